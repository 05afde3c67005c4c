/*
 * The arrays of a microbatch: room that grows to the largest one and stays, the batch's ids, tables of
 * rotary positions. See transformer_internal.h.
 */
#include "runtime/transformer/transformer_internal.h"

#include "base/core/mem.h"

#include <math.h>
#include <string.h>

/* --- ids ----------------------------------------------------------------------------------------- */

static fsdp_status check_ids(const fsdp_transformer *t, const fsdp_token_batch *batch,
                             int64_t length, fsdp_error *err)
{
    for (int64_t s = 0; s < batch->sequences; s++)
        for (int64_t i = 0; i < length; i++) {
            int64_t id = batch->ids[s * batch->stride + i];
            if (id < 0 || id >= t->config.vocab)
                return fsdp_fail(err, FSDP_ERR_USAGE,
                                 "token %lld of sequence %lld is %lld, beyond the model's "
                                 "vocabulary of %lld",
                                 (long long)i, (long long)s, (long long)id,
                                 (long long)t->config.vocab);
        }
    return FSDP_OK;
}

static void take_ids(fsdp_transformer *t, const fsdp_token_batch *batch, bool with_targets)
{
    for (int64_t s = 0; s < batch->sequences; s++) {
        const int64_t *from = batch->ids + s * batch->stride;
        size_t size = (size_t)batch->length * sizeof *from;
        memcpy(t->inputs + s * batch->length, from, size);
        if (with_targets)
            memcpy(t->targets + s * batch->length, from + 1, size);
    }
}

/* --- room ---------------------------------------------------------------------------------------- */

static void free_rows(fsdp_transformer *t)
{
    float *const all[] = {t->last_mean, t->last_inverse, t->last_normed, t->dx, t->logits};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        t->ops->free(t->nn, all[i]);
    for (int64_t i = 0; t->arrays && i < (t->opts.recompute ? 1 : t->config.layers); i++)
        fsdp_model_free_block_arrays(t, &t->arrays[i]);
    fsdp_model_free_block_grads(t);
    for (int64_t i = 0; t->block_inputs && i <= t->config.layers; i++)
        t->ops->free(t->nn, t->block_inputs[i]);
    fsdp_free(t->arrays);
    fsdp_free(t->block_inputs);
    fsdp_free(t->inputs);
    fsdp_free(t->targets);
    fsdp_free(t->losses);
    t->last_mean = t->last_inverse = t->last_normed = t->dx = t->logits = NULL;
    t->arrays = NULL;
    t->block_inputs = NULL;
    t->inputs = t->targets = NULL;
    t->losses = NULL;
    t->room_rows = 0;
}

void fsdp_model_free_arrays(fsdp_transformer *t)
{
    if (!t->nn)
        return;
    free_rows(t);
    t->ops->free(t->nn, t->cosines);
    t->ops->free(t->nn, t->sines);
    fsdp_f32_params_release(&t->params);
}

static fsdp_status make_layers(fsdp_transformer *t, int64_t rows, fsdp_error *err)
{
    const size_t layers = (size_t)t->config.layers;
    t->arrays = fsdp_alloc(layers, sizeof *t->arrays);
    t->block_inputs = fsdp_alloc(layers + 1, sizeof *t->block_inputs);
    if (!t->arrays || !t->block_inputs)
        return fsdp_fail_memory(err, "activations");
    for (size_t i = 0; i <= layers; i++)
        FSDP_TRY(fsdp_model_alloc(t, rows, t->config.width, &t->block_inputs[i], err));
    for (size_t i = 0; i < (t->opts.recompute ? 1 : layers); i++)
        FSDP_TRY(fsdp_model_make_block_arrays(t, rows, &t->arrays[i], err));
    for (size_t i = 1; t->opts.recompute && i < layers; i++)
        t->arrays[i] = t->arrays[0];
    return FSDP_OK;
}

/* Logits are made for some rows at a time, so that a large vocabulary needs no rows x vocab. */
static int64_t logit_rows_for(const fsdp_transformer *t, int64_t rows)
{
    enum { MOST = 1 << 24 }; /* elements: 64 MiB */
    int64_t some = (t->opts.logit_room > 0 ? t->opts.logit_room : MOST) / t->config.vocab;
    return some < 1 ? 1 : some < rows ? some : rows;
}

static fsdp_status make_rows(fsdp_transformer *t, int64_t rows, fsdp_error *err)
{
    const fsdp_transformer_config *config = &t->config;
    const size_t count = (size_t)(rows > 0 ? rows : 1);
    t->inputs = fsdp_alloc(count, sizeof *t->inputs);
    t->targets = fsdp_alloc(count, sizeof *t->targets);
    t->losses = fsdp_alloc(count, sizeof *t->losses);
    if (!t->inputs || !t->targets || !t->losses)
        return fsdp_fail_memory(err, "the ids of a microbatch");
    FSDP_TRY(make_layers(t, rows, err));
    if (config->form.has_layer_norm)
        FSDP_TRY(fsdp_model_alloc(t, rows, 1, &t->last_mean, err));
    FSDP_TRY(fsdp_model_alloc(t, rows, 1, &t->last_inverse, err));
    FSDP_TRY(fsdp_model_alloc(t, rows, config->width, &t->last_normed, err));
    FSDP_TRY(fsdp_model_alloc(t, rows, config->width, &t->dx, err));
    FSDP_TRY(fsdp_model_make_block_grads(t, rows, err));
    t->logit_rows = logit_rows_for(t, rows);
    return fsdp_model_alloc(t, t->logit_rows, config->vocab, &t->logits, err);
}

/* --- rotary positions ---------------------------------------------------------------------------- */

/* Frequencies in f32 throughout, as transformers computes them. */
static float frequency_of(const fsdp_transformer_config *config, int64_t pair)
{
    const float exponent = (float)(2 * pair) / (float)config->head_dim;
    const float plain = 1 / powf((float)config->rope.theta, exponent);
    return (float)((double)plain / fsdp_rope_divisor(&config->rope, (double)plain));
}

static void fill_angles(const fsdp_transformer_config *config, int64_t positions, float *cosines,
                        float *sines)
{
    const int64_t pairs = config->head_dim / 2;
    for (int64_t i = 0; i < pairs; i++) {
        const float frequency = frequency_of(config, i);
        for (int64_t p = 0; p < positions; p++) {
            const float angle = (float)p * frequency;
            cosines[p * pairs + i] = cosf(angle);
            sines[p * pairs + i] = sinf(angle);
        }
    }
}

static fsdp_status make_angles(fsdp_transformer *t, int64_t positions, fsdp_error *err)
{
    const int64_t count = positions * (t->config.head_dim / 2);
    if (!t->config.form.is_rotary || positions <= t->angle_room)
        return FSDP_OK;
    t->ops->free(t->nn, t->cosines);
    t->ops->free(t->nn, t->sines);
    t->angle_room = 0;
    t->cosines = t->sines = NULL;
    FSDP_TRY(fsdp_model_alloc(t, count, 1, &t->cosines, err));
    FSDP_TRY(fsdp_model_alloc(t, count, 1, &t->sines, err));
    float *host = fsdp_alloc((size_t)(2 * count), sizeof *host);
    if (!host)
        return fsdp_fail_memory(err, "rotary positions");
    fill_angles(&t->config, positions, host, host + count);
    t->ops->upload(t->nn, t->cosines, host, count);
    t->ops->upload(t->nn, t->sines, host + count, count);
    fsdp_free(host);
    t->angle_room = positions;
    return FSDP_OK;
}

fsdp_status fsdp_model_make_room(fsdp_transformer *t, int64_t rows, int64_t positions,
                                 fsdp_error *err)
{
    FSDP_TRY(make_angles(t, positions, err));
    if (rows <= t->room_rows && t->inputs)
        return FSDP_OK;
    free_rows(t);
    fsdp_status st = make_rows(t, rows, err);
    if (st == FSDP_OK)
        t->room_rows = rows;
    else
        free_rows(t);
    return st;
}

fsdp_status fsdp_model_take_batch(fsdp_transformer *t, const fsdp_token_batch *batch,
                                  bool with_targets, fsdp_error *err)
{
    int64_t rows;
    if (batch->sequences < 0 || batch->length < 1 ||
        batch->stride < batch->length + (with_targets ? 1 : 0) ||
        fsdp_mul_overflow(batch->sequences, batch->length, &rows))
        return fsdp_fail(
            err, FSDP_ERR_USAGE, "a microbatch of %lld sequences of %lld tokens, %lld apart",
            (long long)batch->sequences, (long long)batch->length, (long long)batch->stride);
    if (batch->length > t->config.context)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "sequences of %lld tokens are longer than the model's context of %lld",
                         (long long)batch->length, (long long)t->config.context);
    FSDP_TRY(check_ids(t, batch, batch->length + (with_targets ? 1 : 0), err));
    FSDP_TRY(fsdp_model_make_room(t, rows, batch->length, err));
    t->sequences = batch->sequences;
    t->length = batch->length;
    take_ids(t, batch, with_targets);
    return FSDP_OK;
}
