/* Next ids: the prompt goes through the model once, then one id at a time with its cached keys. */
#include "runtime/transformer/transformer_internal.h"

#include "base/core/mem.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* --- choosing an id ------------------------------------------------------------------------------ */

typedef struct choice {
    float logit;
    int64_t id;
    double weight;
} choice;

static int compare_choices(const void *a, const void *b)
{
    const choice *x = a, *y = b;
    if (x->logit != y->logit)
        return x->logit > y->logit ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

static int64_t find_largest(const float *logits, int64_t vocab)
{
    int64_t best = 0;
    for (int64_t i = 1; i < vocab; i++)
        if (logits[i] > logits[best])
            best = i;
    return best;
}

/* Keeps the first choices whose probabilities reach top_p. */
static int64_t cut_tail(const choice *choices, int64_t count, double sum, double top_p)
{
    double reached = 0;
    for (int64_t i = 0; i < count; i++) {
        reached += choices[i].weight;
        if (reached >= top_p * sum)
            return i + 1;
    }
    return count;
}

static double weigh(choice *choices, int64_t count, double temperature)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++) {
        choices[i].weight =
            exp(((double)choices[i].logit - (double)choices[0].logit) / temperature);
        sum += choices[i].weight;
    }
    return sum;
}

static int64_t draw(const fsdp_sampling *sampling, const float *logits, int64_t vocab,
                    choice *choices, double uniform)
{
    if (sampling->temperature == 0)
        return find_largest(logits, vocab);
    for (int64_t i = 0; i < vocab; i++)
        choices[i] = (choice){logits[i], i, 0};
    qsort(choices, (size_t)vocab, sizeof *choices, compare_choices);
    int64_t count = sampling->top_k > 0 && sampling->top_k < vocab ? sampling->top_k : vocab;
    double sum = weigh(choices, count, sampling->temperature);
    if (sampling->top_p > 0 && sampling->top_p < 1) {
        count = cut_tail(choices, count, sum, sampling->top_p);
        sum = weigh(choices, count, sampling->temperature);
    }
    double at = uniform * sum;
    for (int64_t i = 0; i < count; i++) {
        at -= choices[i].weight;
        if (at < 0)
            return choices[i].id;
    }
    return choices[count - 1].id;
}

/* --- caches -------------------------------------------------------------------------------------- */

typedef struct sampler {
    fsdp_transformer *t;
    const fsdp_sampling *sampling;
    model_caches caches;
    int64_t sequences, room; /* tokens that the caches hold of each sequence */
    int64_t *ids;            /* sequences x stride: prompt and new ids */
    int64_t stride, known;   /* ids of each sequence that are there */
    int64_t begin;           /* the first of them that the caches know */
    float *logits;           /* one row on the host */
    choice *choices;
} sampler;

static void sampler_release(sampler *s)
{
    for (int64_t i = 0; s->caches.layers && i < s->t->config.layers; i++) {
        s->t->ops->free(s->t->nn, s->caches.layers[i].keys);
        s->t->ops->free(s->t->nn, s->caches.layers[i].values);
    }
    fsdp_free(s->caches.layers);
    fsdp_free(s->ids);
    fsdp_free(s->logits);
    fsdp_free(s->choices);
}

static fsdp_status make_caches(sampler *s, fsdp_error *err)
{
    const fsdp_transformer_config *config = &s->t->config;
    int64_t count;
    s->caches.layers = fsdp_alloc((size_t)config->layers, sizeof *s->caches.layers);
    if (!s->caches.layers ||
        fsdp_mul_overflow(s->sequences * s->room, config->kv_heads * config->head_dim, &count))
        return fsdp_fail_memory(err, "keys and values");
    for (int64_t i = 0; i < config->layers; i++) {
        key_cache *cache = &s->caches.layers[i];
        cache->room = s->room;
        cache->keys = s->t->ops->alloc(s->t->nn, count);
        cache->values = s->t->ops->alloc(s->t->nn, count);
        if (!cache->keys || !cache->values)
            return fsdp_fail_memory(err, "keys and values");
    }
    return FSDP_OK;
}

static fsdp_status sampler_init(sampler *s, const fsdp_token_batch *batch, fsdp_error *err)
{
    const int64_t vocab = s->t->config.vocab, context = s->t->config.context;
    int64_t most, count;
    if (batch->sequences < 1 || batch->length < 1 || s->sampling->count < 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "sampling needs at least one token to go on from");
    if (!(s->sampling->temperature >= 0) || !isfinite(s->sampling->temperature))
        return fsdp_fail(err, FSDP_ERR_USAGE, "the temperature is not a number of at least 0");
    if (fsdp_add_overflow(batch->length, s->sampling->count, &most) ||
        fsdp_mul_overflow(most, batch->sequences, &count))
        return fsdp_fail_memory(err, "ids");
    s->sequences = batch->sequences;
    s->stride = most;
    s->room = most < context ? most : context;
    s->ids = fsdp_alloc((size_t)count, sizeof *s->ids);
    s->logits = fsdp_alloc((size_t)vocab, sizeof *s->logits);
    s->choices = fsdp_alloc((size_t)vocab, sizeof *s->choices);
    if (!s->ids || !s->logits || !s->choices)
        return fsdp_fail_memory(err, "ids");
    for (int64_t i = 0; i < s->sequences; i++)
        memcpy(s->ids + i * s->stride, batch->ids + i * batch->stride,
               (size_t)batch->length * sizeof *s->ids);
    s->known = batch->length;
    return make_caches(s, err);
}

/* --- steps --------------------------------------------------------------------------------------- */

/* The ids that the caches do not know yet; when they are full they begin again with the last half. */
static fsdp_token_batch next_batch(sampler *s)
{
    int64_t used = s->caches.layers[0].used, fresh = s->known - s->begin - used;
    if (used + fresh > s->room) {
        fresh = s->room - s->room / 2;
        s->begin = s->known - fresh;
        used = 0;
    }
    for (int64_t i = 0; i < s->t->config.layers; i++)
        s->caches.layers[i].used = used;
    return (fsdp_token_batch){s->ids + s->begin + used, s->sequences, fresh, s->stride};
}

static fsdp_status take_batch(sampler *s, const fsdp_token_batch *batch, fsdp_error *err)
{
    FSDP_TRY(fsdp_model_make_room(s->t, batch->sequences * batch->length, s->room, err));
    return fsdp_model_take_batch(s->t, batch, false, err);
}

/* The next id of every sequence, from the logits of its last row. */
static fsdp_status choose(sampler *s, fsdp_error *err)
{
    fsdp_transformer *t = s->t;
    const uint64_t key = fsdp_model_random_key(s->sampling->seed, "sample");
    const int64_t number = s->sampling->count - (s->stride - s->known);
    for (int64_t i = 0; i < s->sequences; i++) {
        const uint64_t index = (uint64_t)(i * s->sampling->count + number);
        FSDP_TRY(fsdp_model_head(t, (i + 1) * t->length - 1, 1, err));
        t->ops->download(t->nn, s->logits, t->logits, t->config.vocab);
        FSDP_TRY(t->ops->finish(t->nn, err));
        s->ids[i * s->stride + s->known] = draw(s->sampling, s->logits, t->config.vocab, s->choices,
                                                fsdp_model_random_uniform(key, index));
    }
    return FSDP_OK;
}

static fsdp_status step(sampler *s, fsdp_error *err)
{
    fsdp_transformer *t = s->t;
    const fsdp_token_batch batch = next_batch(s);
    FSDP_TRY(fsdp_ctl_agree(t->ctl, take_batch(s, &batch, err), err));
    FSDP_TRY(fsdp_model_forward(t, &s->caches, err));
    FSDP_TRY(fsdp_model_last_norm(t, err));
    FSDP_TRY(choose(s, err));
    for (int64_t i = 0; i < t->config.layers; i++)
        s->caches.layers[i].used += batch.length;
    s->known++;
    return fsdp_model_end_forward(t, err);
}

static fsdp_status run(sampler *s, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_set_evaluating(s->t->root, true, err));
    for (int64_t n = 0; n < s->sampling->count; n++)
        FSDP_TRY(step(s, err));
    return fsdp_root_set_evaluating(s->t->root, false, err);
}

fsdp_status fsdp_transformer_sample(fsdp_transformer *t, const fsdp_token_batch *batch,
                                    const fsdp_sampling *sampling, int64_t *ids_out,
                                    fsdp_error *err)
{
    sampler s = {.t = t, .sampling = sampling};
    fsdp_status st = fsdp_ctl_agree(t->ctl, sampler_init(&s, batch, err), err);
    if (st == FSDP_OK)
        st = run(&s, err);
    for (int64_t i = 0; st == FSDP_OK && i < s.sequences; i++)
        memcpy(ids_out + i * sampling->count, s.ids + i * s.stride + batch->length,
               (size_t)sampling->count * sizeof *ids_out);
    sampler_release(&s);
    return st;
}
