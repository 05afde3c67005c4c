/*
 * Parameters, units and the root of a transformer, and its first values. Names come from the description of
 * its family, shapes from its form. See transformer.h.
 */
#include "runtime/transformer/transformer_internal.h"
#include "base/core/fnv.h"
#include "base/core/mem.h"
#include "base/core/mix.h"
#include "base/text.h"
#include <fsdp/root_init.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

/* === random numbers =========================================================================== */

/* Random numbers that are functions of a key and an index, so that no rank and no step keeps a state. */

uint64_t fsdp_model_random_key(uint64_t seed, const char *purpose)
{
    return fsdp_mix(fsdp_mix(seed) ^ fsdp_fnv(FSDP_FNV_BEGIN, purpose, strlen(purpose)));
}

double fsdp_model_random_uniform(uint64_t key, uint64_t i)
{
    return ((double)(fsdp_mix(key + (i + 1) * 0x9E3779B97F4A7C15u) >> 11) + 0.5) * 0x1p-53;
}

/* Box and Muller's first number of two uniform ones. */
static double model_random_normal(uint64_t key, uint64_t i)
{
    const double two_pi = 6.283185307179586;
    return sqrt(-2 * log(fsdp_model_random_uniform(key, 2 * i))) *
           cos(two_pi * fsdp_model_random_uniform(key, 2 * i + 1));
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
    fsdp_model_free_arrays(t);
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
    const uint64_t key = fsdp_model_random_key(from->seed, info->name);
    const float scale = scale_of(from->config, info->name);
    const int64_t columns = info->ndim > 1 ? info->shape[1] : 1;
    const int64_t width = info->ndim > 1 ? box->len[1] : 1, left = info->ndim > 1 ? box->lo[1] : 0;
    for (int64_t r = 0; r < box->len[0]; r++)
        for (int64_t c = 0; c < width; c++)
            *data++ = scale * (float)model_random_normal(
                                  key, (uint64_t)((box->lo[0] + r) * columns + left + c));
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
