/* Parameters, units and the root of a transformer, and its first values. See transformer.h. */
#include "runtime/transformer/transformer_internal.h"

#include "base/core/fnv.h"
#include "base/core/mem.h"
#include "base/text.h"

#include <fsdp/root_init.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* --- parameters ---------------------------------------------------------------------------------- */

static fsdp_status add_param(fsdp_transformer *t, const char *name, int ndim, const int64_t *shape,
                             fsdp_param **param_out, fsdp_error *err)
{
    const fsdp_param_spec spec = {.name = name, .dtype = FSDP_F32, .ndim = ndim, .shape = shape};
    FSDP_TRY(fsdp_model_add(t->model, &spec, param_out, err));
    return t->opts.is_mixed ? fsdp_param_set_grad_dtype(*param_out, FSDP_F32, err) : FSDP_OK;
}

/* The place of a layer's parameters in the tree of names. */
typedef struct place {
    fsdp_transformer *t;
    const char *prefix;
} place;

enum { NAME = 96 };

static fsdp_status add_linear(place at, const char *name, fsdp_linear linear, bool has_bias,
                              fsdp_linear *linear_out, fsdp_error *err)
{
    char full[NAME];
    const int64_t turned[2] = {linear.out, linear.in}, straight[2] = {linear.in, linear.out};
    *linear_out = linear;
    snprintf(full, sizeof full, "%s.%s.weight", at.prefix, name);
    FSDP_TRY(add_param(at.t, full, 2, linear.is_in_by_out ? straight : turned, &linear_out->weight,
                       err));
    if (!has_bias)
        return FSDP_OK;
    snprintf(full, sizeof full, "%s.%s.bias", at.prefix, name);
    return add_param(at.t, full, 1, &linear.out, &linear_out->bias, err);
}

static fsdp_status add_norm(place at, const char *name, model_norm *norm_out, fsdp_error *err)
{
    char full[NAME];
    const char *dot = at.prefix[0] ? "." : "";
    snprintf(full, sizeof full, "%s%s%s.weight", at.prefix, dot, name);
    FSDP_TRY(add_param(at.t, full, 1, &at.t->config.width, &norm_out->weight, err));
    if (!at.t->config.form.has_layer_norm)
        return FSDP_OK;
    snprintf(full, sizeof full, "%s%s%s.bias", at.prefix, dot, name);
    return add_param(at.t, full, 1, &at.t->config.width, &norm_out->bias, err);
}

/* Both families declare in the order of transformers' modules, so that listings read alike. */
static fsdp_status add_gpt2_block(place at, model_block *block, fsdp_error *err)
{
    const fsdp_transformer_config *config = &at.t->config;
    const int64_t width = config->width;
    FSDP_TRY(add_norm(at, "ln_1", &block->norm1, err));
    FSDP_TRY(add_linear(at, "attn.c_attn",
                        (fsdp_linear){.in = width, .out = 3 * width, .is_in_by_out = true}, true,
                        &block->qkv, err));
    FSDP_TRY(add_linear(at, "attn.c_proj",
                        (fsdp_linear){.in = width, .out = width, .is_in_by_out = true}, true,
                        &block->output, err));
    FSDP_TRY(add_norm(at, "ln_2", &block->norm2, err));
    FSDP_TRY(add_linear(at, "mlp.c_fc",
                        (fsdp_linear){.in = width, .out = config->inner, .is_in_by_out = true},
                        true, &block->up, err));
    return add_linear(at, "mlp.c_proj",
                      (fsdp_linear){.in = config->inner, .out = width, .is_in_by_out = true}, true,
                      &block->down, err);
}

static fsdp_status add_llama_block(place at, model_block *block, fsdp_error *err)
{
    const fsdp_transformer_config *config = &at.t->config;
    const int64_t width = config->width, inner = config->inner;
    const int64_t queries = config->heads * config->head_dim;
    const int64_t keys = config->kv_heads * config->head_dim;
    const bool bias = config->attention_bias;
    FSDP_TRY(add_linear(at, "self_attn.q_proj", (fsdp_linear){.in = width, .out = queries}, bias,
                        &block->q, err));
    FSDP_TRY(add_linear(at, "self_attn.k_proj", (fsdp_linear){.in = width, .out = keys}, bias,
                        &block->k, err));
    FSDP_TRY(add_linear(at, "self_attn.v_proj", (fsdp_linear){.in = width, .out = keys}, bias,
                        &block->v, err));
    FSDP_TRY(add_linear(at, "self_attn.o_proj", (fsdp_linear){.in = queries, .out = width},
                        config->output_bias, &block->output, err));
    FSDP_TRY(add_linear(at, "mlp.gate_proj", (fsdp_linear){.in = width, .out = inner},
                        config->mlp_bias, &block->gate, err));
    FSDP_TRY(add_linear(at, "mlp.up_proj", (fsdp_linear){.in = width, .out = inner},
                        config->mlp_bias, &block->up, err));
    FSDP_TRY(add_linear(at, "mlp.down_proj", (fsdp_linear){.in = inner, .out = width},
                        config->mlp_bias, &block->down, err));
    FSDP_TRY(add_norm(at, "input_layernorm", &block->norm1, err));
    return add_norm(at, "post_attention_layernorm", &block->norm2, err);
}

static fsdp_status add_blocks(fsdp_transformer *t, const char *layers, fsdp_error *err)
{
    char prefix[NAME];
    t->blocks = fsdp_alloc((size_t)t->config.layers, sizeof *t->blocks);
    if (!t->blocks)
        return fsdp_fail_memory(err, "layers");
    for (int64_t i = 0; i < t->config.layers; i++) {
        model_block *block = &t->blocks[i];
        snprintf(prefix, sizeof prefix, "%s.%lld", layers, (long long)i);
        block->number = i;
        FSDP_TRY((t->config.form.has_packed_qkv ? add_gpt2_block
                                                : add_llama_block)((place){t, prefix}, block, err));
        FSDP_TRY(fsdp_unit_create(t->model, prefix, &t->opts.unit, &block->unit, err));
    }
    return FSDP_OK;
}

static fsdp_status add_head(fsdp_transformer *t, fsdp_error *err)
{
    const int64_t shape[2] = {t->config.vocab, t->config.width};
    t->head = t->tokens;
    return t->config.is_tied ? fsdp_model_add_alias(t->model, "lm_head.weight", t->tokens, err)
                             : add_param(t, "lm_head.weight", 2, shape, &t->head, err);
}

static fsdp_status declare(fsdp_transformer *t, fsdp_error *err)
{
    const fsdp_transformer_config *config = &t->config;
    const int64_t tokens[2] = {config->vocab, config->width};
    const int64_t positions[2] = {config->context, config->width};
    if (!config->form.is_rotary) {
        FSDP_TRY(add_param(t, "transformer.wte.weight", 2, tokens, &t->tokens, err));
        FSDP_TRY(add_param(t, "transformer.wpe.weight", 2, positions, &t->positions, err));
        FSDP_TRY(add_blocks(t, "transformer.h", err));
        FSDP_TRY(add_norm((place){t, "transformer"}, "ln_f", &t->last_norm, err));
    } else {
        FSDP_TRY(add_param(t, "model.embed_tokens.weight", 2, tokens, &t->tokens, err));
        FSDP_TRY(add_blocks(t, "model.layers", err));
        FSDP_TRY(add_norm((place){t, "model"}, "norm", &t->last_norm, err));
    }
    return add_head(t, err);
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
    if (config->form.scales_projections && fsdp_has_suffix(name, "c_proj.weight"))
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
            *data++ = scale * (float)fsdp_model_random_normal(
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
