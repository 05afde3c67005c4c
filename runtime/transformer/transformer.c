/*
 * The model of transformer.h: its parameters, units and root, the arrays of a microbatch, the way of ids
 * through embedding, layers, last norm and head to the loss and back, and sampling. Names come from the
 * description of its family, shapes from its form; a layer is in block.c.
 */
#include "runtime/transformer/transformer_internal.h"
#include "base/core/fnv.h"
#include "base/core/mem.h"
#include "base/core/mix.h"
#include "base/text.h"
#include <fsdp/root_init.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* === random numbers =========================================================================== */

/* Random numbers that are functions of a key and an index, so that no rank and no step keeps a state. */

static uint64_t random_key(uint64_t seed, const char *purpose)
{
    return fsdp_mix(fsdp_mix(seed) ^ fsdp_fnv(FSDP_FNV_BEGIN, purpose, strlen(purpose)));
}

/* in (0, 1) */
static double random_uniform(uint64_t key, uint64_t i)
{
    return ((double)(fsdp_mix(key + (i + 1) * 0x9E3779B97F4A7C15u) >> 11) + 0.5) * 0x1p-53;
}

/* Box and Muller's first number of two uniform ones. */
static double random_normal(uint64_t key, uint64_t i)
{
    const double two_pi = 6.283185307179586;
    return sqrt(-2 * log(random_uniform(key, 2 * i))) *
           cos(two_pi * random_uniform(key, 2 * i + 1));
}

/* === arrays of a microbatch =================================================================== */

/* Their memory grows to the largest microbatch and stays. */

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

/* --- memory ---------------------------------------------------------------------------------------- */

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

static void free_arrays(fsdp_transformer *t)
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

/* Makes arrays for that many rows, and angles of that many positions. */
static fsdp_status make_arrays(fsdp_transformer *t, int64_t rows, int64_t positions,
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

/* Checks the batch, and makes arrays large enough for it. */
static fsdp_status prepare_batch(fsdp_transformer *t, const fsdp_token_batch *batch,
                                 bool with_targets, fsdp_error *err)
{
    int64_t rows;
    if (batch->sequences < 0 || batch->length < 1 ||
        batch->stride < batch->length + (with_targets ? 1 : 0) ||
        fsdp_mul_overflow(batch->sequences, batch->length, &rows))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot take a microbatch of %lld sequences of %lld tokens with a stride "
                         "of %lld: the stride must hold the tokens and the last target",
                         (long long)batch->sequences, (long long)batch->length,
                         (long long)batch->stride);
    if (batch->length > t->config.context)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "sequences of %lld tokens are longer than the model's context of %lld",
                         (long long)batch->length, (long long)t->config.context);
    FSDP_TRY(check_ids(t, batch, batch->length + (with_targets ? 1 : 0), err));
    return make_arrays(t, rows, batch->length, err);
}

/* Takes the batch's sequences. Sets inputs and, with_targets, targets. */
static fsdp_status model_take_batch(fsdp_transformer *t, const fsdp_token_batch *batch,
                                    bool with_targets, fsdp_error *err)
{
    FSDP_TRY(prepare_batch(t, batch, with_targets, err));
    t->sequences = batch->sequences;
    t->length = batch->length;
    take_ids(t, batch, with_targets);
    return FSDP_OK;
}

/* === parameters, units and the root =========================================================== */

/* --- parameters ---------------------------------------------------------------------------------- */

/* Adds the parameter of a role outside the layers; none where the description has none. */
static fsdp_status add_other(fsdp_transformer *t, const fsdp_architecture *model, const char *role,
                             fsdp_param **param_out, fsdp_error *err)
{
    const fsdp_tensor_row *row = fsdp_architecture_role(model, role, 0);
    char name[FSDP_MODEL_NAME];
    model_part part;
    if (!row || !fsdp_model_find_other(&t->config, role, &part))
        return FSDP_OK;
    fsdp_model_tensor_name(model, row->name, 0, name);
    if (t->config.is_tied && *param_out)
        return fsdp_model_add_alias(t->model, name, *param_out, err);
    return fsdp_model_add_param(t, name, part.ndim, part.shape, param_out, err);
}

static fsdp_status add_blocks(fsdp_transformer *t, const fsdp_architecture *model, fsdp_error *err)
{
    t->blocks = fsdp_alloc((size_t)t->config.layers, sizeof *t->blocks);
    if (!t->blocks)
        return fsdp_fail_memory(err, "layers");
    for (int64_t i = 0; i < t->config.layers; i++) {
        t->blocks[i].number = i;
        FSDP_TRY(fsdp_model_declare_block(t, model, &t->blocks[i], err));
    }
    return FSDP_OK;
}

static fsdp_status declare_all(fsdp_transformer *t, const fsdp_architecture *model, fsdp_error *err)
{
    FSDP_TRY(add_other(t, model, "embed", &t->tokens, err));
    FSDP_TRY(add_other(t, model, "position_embed", &t->positions, err));
    FSDP_TRY(add_blocks(t, model, err));
    t->last_norm.columns = t->config.width;
    FSDP_TRY(add_other(t, model, "final_norm", &t->last_norm.weight, err));
    FSDP_TRY(add_other(t, model, "final_norm.bias", &t->last_norm.bias, err));
    t->head = t->tokens;
    return add_other(t, model, "output", &t->head, err);
}

static fsdp_status declare(fsdp_transformer *t, fsdp_error *err)
{
    fsdp_arena arena = {0};
    const fsdp_architecture *model;
    fsdp_status st = fsdp_model_describe(&t->config, &arena, &model, err);
    if (st == FSDP_OK)
        st = declare_all(t, model, err);
    fsdp_arena_release(&arena);
    return st;
}

/* --- the object ---------------------------------------------------------------------------------- */

static fsdp_status set_options(fsdp_transformer *t, const fsdp_transformer_opts *opts,
                               fsdp_error *err)
{
    t->opts = *opts;
    if (opts->is_mixed) {
        t->opts.unit.param_dtype = FSDP_BF16;
        t->opts.unit.reduce_dtype = FSDP_F32;
    }
    FSDP_TRY(fsdp_nn_open_cpu(opts->threads > 0 ? opts->threads : 1, &t->nn, err));
    t->ops = t->nn->ops;
    return FSDP_OK;
}

/* Gradients are summed: the loss has the factor of the whole step already. */
static fsdp_status set_sums(fsdp_transformer *t, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_root_unit_count(t->root); i++)
        FSDP_TRY(fsdp_unit_set_gradient_divide_factor(fsdp_root_unit_at(t->root, i), 1, err));
    return FSDP_OK;
}

static fsdp_status prepare(fsdp_world *world, fsdp_transformer *t,
                           const fsdp_transformer_opts *opts, fsdp_error *err)
{
    FSDP_TRY(fsdp_transformer_config_check(&t->config, "the model", err));
    FSDP_TRY(set_options(t, opts, err));
    FSDP_TRY(fsdp_model_create(world, &t->model, err));
    return declare(t, err);
}

fsdp_status fsdp_transformer_create(fsdp_world *world, const fsdp_transformer_config *config,
                                    const fsdp_transformer_opts *opts,
                                    fsdp_transformer **transformer_out, fsdp_error *err)
{
    fsdp_ctl *ctl = fsdp_world_ctl(world);
    fsdp_transformer *t = fsdp_alloc(1, sizeof *t);
    fsdp_status st;
    if (t) {
        t->config = *config;
        t->ctl = ctl;
        st = prepare(world, t, opts, err);
    } else {
        st = fsdp_fail_memory(err, "a model");
    }
    st = fsdp_ctl_agree(ctl, st, err);
    if (st == FSDP_OK)
        st = fsdp_root_create(t->model, &t->opts.unit, &t->root, err);
    if (st == FSDP_OK) {
        st = set_sums(t, err);
        if (st == FSDP_OK)
            st = fsdp_f32_params_init(&t->params, t->nn, t->model, false, err);
        st = fsdp_ctl_agree(ctl, st, err);
    }
    if (st == FSDP_OK)
        *transformer_out = t;
    else
        fsdp_transformer_free(t);
    return st;
}

void fsdp_transformer_free(fsdp_transformer *t)
{
    if (!t)
        return;
    free_arrays(t);
    fsdp_root_free(t->root);
    fsdp_model_free(t->model);
    if (t->nn)
        t->ops->close(t->nn);
    fsdp_free(t->blocks);
    fsdp_free(t);
}

fsdp_root *fsdp_transformer_root(fsdp_transformer *t)
{
    return t->root;
}

int64_t fsdp_transformer_param_count(const fsdp_transformer *t)
{
    int64_t count = 0;
    for (size_t i = 0; i < fsdp_model_count(t->model); i++) {
        const fsdp_param_info info = fsdp_param_describe(fsdp_model_at(t->model, i));
        int64_t elements = 1;
        for (int d = 0; d < info.ndim; d++)
            elements *= info.shape[d];
        count += elements;
    }
    return count;
}

/* --- first values -------------------------------------------------------------------------------- */

typedef struct first_values {
    const fsdp_transformer_config *config;
    uint64_t seed;
} first_values;

static float scale_of(const fsdp_transformer_config *config, const char *name)
{
    double scale = config->initializer_range;
    if (config->form.is_in_by_out && fsdp_has_suffix(name, "c_proj.weight")) /* of GPT-2 */
        scale /= sqrt(2.0 * (double)config->layers);
    return (float)scale;
}

/* Elements of a box of a tensor, row by row: their numbers in the whole tensor. */
static void fill_normal(const first_values *from, const fsdp_param_info *info, const fsdp_box *box,
                        float *data)
{
    const uint64_t key = random_key(from->seed, info->name);
    const float scale = scale_of(from->config, info->name);
    const int64_t columns = info->ndim > 1 ? info->shape[1] : 1;
    const int64_t width = info->ndim > 1 ? box->len[1] : 1, left = info->ndim > 1 ? box->lo[1] : 0;
    for (int64_t r = 0; r < box->len[0]; r++)
        for (int64_t c = 0; c < width; c++)
            *data++ = scale *
                      (float)random_normal(key, (uint64_t)((box->lo[0] + r) * columns + left + c));
}

static fsdp_status fill_param(void *context, const fsdp_param *param, const fsdp_box *box,
                              void *data, fsdp_error *err)
{
    const first_values *from = context;
    const fsdp_param_info info = fsdp_param_describe(param);
    float *to = data;
    (void)err;
    if (info.ndim > 1) {
        fill_normal(from, &info, box, to);
        return FSDP_OK;
    }
    const float value = fsdp_has_suffix(info.name, ".bias") ? 0 : 1; /* of norms */
    for (int64_t i = 0; i < box->len[0]; i++)
        to[i] = value;
    return FSDP_OK;
}

fsdp_status fsdp_transformer_init(fsdp_transformer *t, uint64_t seed, fsdp_error *err)
{
    first_values from = {&t->config, seed};
    return fsdp_root_init(t->root, fill_param, &from, err);
}

/* === a microbatch ============================================================================= */

/*
 * A microbatch: ids through embedding, layers, last norm and head to the loss, and back. The head runs once,
 * when backward has begun: its logits become their gradient in place, some rows at a time.
 */

typedef struct model_caches {
    key_cache *layers;
} model_caches;

/* --- embedding ----------------------------------------------------------------------------------- */

/* Apart from the embedding of tokens: of bf16 parameters one f32 copy at a time is at hand. */
static fsdp_status add_positions(fsdp_transformer *t, int64_t first, fsdp_error *err)
{
    const int64_t count = t->length * t->config.width;
    const float *positions = fsdp_param_f32(t->positions, t->params.weight);
    if (!positions)
        return fsdp_param_error(t->positions, err);
    for (int64_t s = 0; s < t->sequences; s++)
        t->ops->add(t->nn, t->block_inputs[0] + s * count, positions + first * t->config.width,
                    count);
    return FSDP_OK;
}

static fsdp_status embed(fsdp_transformer *t, int64_t first, fsdp_error *err)
{
    fsdp_nn_embedding call = {.ids = t->inputs,
                              .out = t->block_inputs[0],
                              .sequences = t->sequences,
                              .length = t->length,
                              .first = first,
                              .columns = t->config.width};
    call.table = fsdp_param_f32(t->tokens, t->params.weight);
    if (!call.table)
        return fsdp_param_error(t->tokens, err);
    t->ops->embed(t->nn, &call);
    return t->positions ? add_positions(t, first, err) : FSDP_OK;
}

static fsdp_status embed_grad(fsdp_transformer *t, fsdp_error *err)
{
    fsdp_nn_embedding_grad call = {.ids = t->inputs,
                                   .dout = t->dx,
                                   .sequences = t->sequences,
                                   .length = t->length,
                                   .columns = t->config.width};
    call.dtable = fsdp_param_grad(t->tokens);
    if (!call.dtable)
        return fsdp_param_error(t->tokens, err);
    if (t->positions) {
        call.dpositions = fsdp_param_grad(t->positions);
        if (!call.dpositions)
            return fsdp_param_error(t->positions, err);
    }
    t->ops->embed_grad(t->nn, &call);
    return FSDP_OK;
}

/* --- forward: ids -> the last layer's result ----------------------------------------------------- */

static fsdp_status run_layers(fsdp_transformer *t, const model_caches *caches, fsdp_error *err)
{
    const int64_t first = caches ? caches->layers[0].used : 0;
    FSDP_TRY(embed(t, first, err));
    for (int64_t i = 0; i < t->config.layers; i++) {
        const model_block *block = &t->blocks[i];
        FSDP_TRY(fsdp_unit_pre_forward(block->unit, err));
        FSDP_TRY(fsdp_model_block(t, block, t->block_inputs[i], t->block_inputs[i + 1],
                                  caches ? &caches->layers[i] : NULL, err));
        FSDP_TRY(fsdp_unit_post_forward(block->unit, err));
    }
    return FSDP_OK;
}

/* last_normed: the last norm's result. Computes logits of rows [first, first + rows), at most logit_rows. */
static fsdp_status model_last_norm(fsdp_transformer *t, fsdp_error *err)
{
    return fsdp_model_norm(t, &t->last_norm,
                           &(fsdp_nn_norm){.x = t->block_inputs[t->config.layers],
                                           .y = t->last_normed,
                                           .mean = t->last_mean,
                                           .inverse = t->last_inverse,
                                           .rows = model_rows(t)},
                           err);
}

/* --- head ---------------------------------------------------------------------------------------- */

static fsdp_status model_head(fsdp_transformer *t, int64_t first, int64_t rows, fsdp_error *err)
{
    const fsdp_linear head = {.weight = t->head, .in = t->config.width, .out = t->config.vocab};
    return fsdp_linear_forward(&t->params, &head, t->last_normed + first * t->config.width,
                               t->logits, rows, err);
}

/* Losses of all rows; with a scale the gradients of the head and, in dnormed, of its input. */
static fsdp_status find_losses(fsdp_transformer *t, double scale, bool with_grads, fsdp_error *err)
{
    const fsdp_linear head = {.weight = t->head, .in = t->config.width, .out = t->config.vocab};
    const int64_t rows = model_rows(t);
    if (with_grads && rows == 0 && !fsdp_param_grad(t->head)) /* else overwritten below */
        return fsdp_param_error(t->head, err);
    for (int64_t first = 0; first < rows; first += t->logit_rows) {
        int64_t some = rows - first < t->logit_rows ? rows - first : t->logit_rows;
        FSDP_TRY(model_head(t, first, some, err));
        t->ops->cross_entropy(t->nn, &(fsdp_nn_cross_entropy){.logits = t->logits,
                                                              .targets = t->targets + first,
                                                              .losses = t->losses + first,
                                                              .rows = some,
                                                              .columns = t->config.vocab,
                                                              .scale = scale,
                                                              .keeps_logits = !with_grads});
        if (!with_grads)
            continue;
        fsdp_linear_grad call = {.x = t->last_normed + first * t->config.width,
                                 .dy = t->logits,
                                 .dx = t->dnormed + first * t->config.width,
                                 .adds = first > 0,
                                 .rows = some};
        FSDP_TRY(fsdp_linear_backward(&t->params, &head, &call, err));
    }
    return FSDP_OK;
}

static double sum_losses(const fsdp_transformer *t)
{
    double sum = 0;
    for (int64_t r = 0; r < model_rows(t); r++)
        sum += t->losses[r];
    return sum;
}

/* --- backward ------------------------------------------------------------------------------------ */

/* dx, the gradient of the last layer's result. */
static fsdp_status run_head(fsdp_transformer *t, double scale, fsdp_error *err)
{
    FSDP_TRY(model_last_norm(t, err));
    FSDP_TRY(find_losses(t, scale, true, err));
    return fsdp_model_norm_grad(t, &t->last_norm,
                                &(fsdp_nn_norm_grad){.x = t->block_inputs[t->config.layers],
                                                     .mean = t->last_mean,
                                                     .inverse = t->last_inverse,
                                                     .dy = t->dnormed,
                                                     .dx = t->dx,
                                                     .rows = model_rows(t)},
                                err);
}

static fsdp_status go_back(fsdp_transformer *t, double scale, fsdp_error *err)
{
    fsdp_unit *root = fsdp_root_unit(t->root);
    FSDP_TRY(fsdp_unit_pre_backward(root, err));
    FSDP_TRY(run_head(t, scale, err));
    for (int64_t i = t->config.layers - 1; i >= 0; i--) {
        const model_block *block = &t->blocks[i];
        FSDP_TRY(fsdp_unit_pre_backward(block->unit, err));
        FSDP_TRY(fsdp_model_block_grad(t, block, t->block_inputs[i], err));
        FSDP_TRY(fsdp_unit_post_backward(block->unit, err));
    }
    FSDP_TRY(embed_grad(t, err));
    FSDP_TRY(fsdp_unit_post_backward(root, err));
    return fsdp_root_end_backward(t->root, err);
}

/* --- a microbatch -------------------------------------------------------------------------------- */

fsdp_status fsdp_transformer_prepare(fsdp_transformer *t, const fsdp_token_batch *batch,
                                     fsdp_error *err)
{
    return prepare_batch(t, batch, true, err);
}

/* Every rank learns that one cannot take its sequences, before any collective of the step. */
static fsdp_status take_batch(fsdp_transformer *t, const fsdp_token_batch *batch, bool with_targets,
                              fsdp_error *err)
{
    const fsdp_status mine = model_take_batch(t, batch, with_targets, err);
    return batch->is_agreed ? mine : fsdp_ctl_agree(t->ctl, mine, err);
}

/* Collective: begins a forward and runs all layers; the root's own parameters stay gathered until the end.
 * caches: NULL, or one per layer. */
static fsdp_status model_forward(fsdp_transformer *t, const model_caches *caches, fsdp_error *err)
{
    fsdp_unit *root = fsdp_root_unit(t->root);
    FSDP_TRY(fsdp_root_begin_forward(t->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(root, err));
    return run_layers(t, caches, err);
}

static fsdp_status end_forward(fsdp_transformer *t, fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_post_forward(fsdp_root_unit(t->root), err));
    return fsdp_root_end_forward(t->root, err);
}

fsdp_status fsdp_transformer_train(fsdp_transformer *t, const fsdp_token_batch *batch, double scale,
                                   double *loss_out, fsdp_error *err)
{
    FSDP_TRY(take_batch(t, batch, true, err));
    FSDP_TRY(model_forward(t, NULL, err));
    FSDP_TRY(end_forward(t, err));
    FSDP_TRY(go_back(t, scale, err));
    FSDP_TRY(t->ops->finish(t->nn, err));
    *loss_out = sum_losses(t);
    return FSDP_OK;
}

/* Forward alone; `finish_rows` gets the rows while the root's parameters are gathered. */
typedef fsdp_status (*rows_use)(fsdp_transformer *t, void *context, fsdp_error *err);

static fsdp_status look(fsdp_transformer *t, rows_use use, void *context, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_set_evaluating(t->root, true, err));
    FSDP_TRY(model_forward(t, NULL, err));
    FSDP_TRY(model_last_norm(t, err));
    FSDP_TRY(use(t, context, err));
    FSDP_TRY(end_forward(t, err));
    FSDP_TRY(t->ops->finish(t->nn, err));
    return fsdp_root_set_evaluating(t->root, false, err);
}

static fsdp_status use_losses(fsdp_transformer *t, void *context, fsdp_error *err)
{
    (void)context;
    return find_losses(t, 0, false, err);
}

fsdp_status fsdp_transformer_evaluate(fsdp_transformer *t, const fsdp_token_batch *batch,
                                      double *loss_out, fsdp_error *err)
{
    FSDP_TRY(take_batch(t, batch, true, err));
    FSDP_TRY(look(t, use_losses, NULL, err));
    *loss_out = sum_losses(t);
    return FSDP_OK;
}

static fsdp_status use_logits(fsdp_transformer *t, void *context, fsdp_error *err)
{
    float *out = context;
    const int64_t rows = model_rows(t), vocab = t->config.vocab;
    for (int64_t first = 0; first < rows; first += t->logit_rows) {
        int64_t some = rows - first < t->logit_rows ? rows - first : t->logit_rows;
        FSDP_TRY(model_head(t, first, some, err));
        t->ops->download(t->nn, out + first * vocab, t->logits, some * vocab);
    }
    return FSDP_OK;
}

fsdp_status fsdp_transformer_logits(fsdp_transformer *t, const fsdp_token_batch *batch,
                                    float *logits_out, fsdp_error *err)
{
    FSDP_TRY(take_batch(t, batch, false, err));
    return look(t, use_logits, logits_out, err);
}

/* === sampling ================================================================================= */

/* Next ids: the prompt goes through the model once, then one id at a time with its cached keys. */

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
        return fsdp_fail(err, FSDP_ERR_USAGE, "cannot sample from no token; give at least one");
    if (!(s->sampling->temperature >= 0) || !isfinite(s->sampling->temperature))
        return fsdp_fail(err, FSDP_ERR_USAGE, "the temperature must be a number of at least 0");
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
    return (fsdp_token_batch){.ids = s->ids + s->begin + used,
                              .sequences = s->sequences,
                              .length = fresh,
                              .stride = s->stride};
}

static fsdp_status take_prompts(sampler *s, const fsdp_token_batch *batch, fsdp_error *err)
{
    FSDP_TRY(make_arrays(s->t, batch->sequences * batch->length, s->room, err));
    return model_take_batch(s->t, batch, false, err);
}

/* The next id of every sequence, from the logits of its last row. */
static fsdp_status choose(sampler *s, fsdp_error *err)
{
    fsdp_transformer *t = s->t;
    const uint64_t key = random_key(s->sampling->seed, "sample");
    const int64_t number = s->sampling->count - (s->stride - s->known);
    for (int64_t i = 0; i < s->sequences; i++) {
        const uint64_t index = (uint64_t)(i * s->sampling->count + number);
        FSDP_TRY(model_head(t, (i + 1) * t->length - 1, 1, err));
        t->ops->download(t->nn, s->logits, t->logits, t->config.vocab);
        FSDP_TRY(t->ops->finish(t->nn, err));
        s->ids[i * s->stride + s->known] =
            draw(s->sampling, s->logits, t->config.vocab, s->choices, random_uniform(key, index));
    }
    return FSDP_OK;
}

static fsdp_status step(sampler *s, fsdp_error *err)
{
    fsdp_transformer *t = s->t;
    const fsdp_token_batch batch = next_batch(s);
    FSDP_TRY(fsdp_ctl_agree(t->ctl, take_prompts(s, &batch, err), err));
    FSDP_TRY(model_forward(t, &s->caches, err));
    FSDP_TRY(model_last_norm(t, err));
    FSDP_TRY(choose(s, err));
    for (int64_t i = 0; i < t->config.layers; i++)
        s->caches.layers[i].used += batch.length;
    s->known++;
    return end_forward(t, err);
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
