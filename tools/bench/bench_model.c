/* Names and shapes of real models, in Hugging Face's spelling, at any scale. */
#include "tools/bench/bench.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- a list of parameters --------------------------------------------------------------------- */

/* Keeps a failure in the model; bench_model_init checks it once. */
static bench_param *add_param(bench_model *model)
{
    if (model->count == model->capacity) {
        size_t capacity = model->capacity ? 2 * model->capacity : 256;
        bench_param *params = realloc(model->params, capacity * sizeof *params);
        if (!params) {
            model->failed = true;
            return NULL;
        }
        model->params = params;
        model->capacity = capacity;
    }
    bench_param *param = &model->params[model->count++];
    *param = (bench_param){.dtype = FSDP_F32};
    return param;
}

/* A matrix, or a vector when columns is 0. */
FSDP_PRINTF(4, 5)
static bench_param *add(bench_model *model, int64_t rows, int64_t columns, const char *format, ...)
{
    bench_param *param = add_param(model);
    if (!param)
        return NULL;
    va_list args;
    va_start(args, format);
    if (vasprintf(&param->name, format, args) < 0) {
        param->name = NULL;
        model->failed = true;
    }
    va_end(args);
    param->ndim = columns > 0 ? 2 : 1;
    param->shape[0] = rows;
    param->shape[1] = columns;
    return param;
}

/* --- families --------------------------------------------------------------------------------- */

/* Both sides of a matrix shrink alike. */
static int64_t scaled(const bench_model *model, int64_t n)
{
    int64_t value = llround((double)n * sqrt(model->scale));
    return value > 0 ? value : 1;
}

static void add_gpt2_layer(bench_model *model, int layer, int64_t hidden)
{
    add(model, hidden, 0, "transformer.h.%d.ln_1.weight", layer);
    add(model, hidden, 0, "transformer.h.%d.ln_1.bias", layer);
    add(model, hidden, 3 * hidden, "transformer.h.%d.attn.c_attn.weight", layer);
    add(model, 3 * hidden, 0, "transformer.h.%d.attn.c_attn.bias", layer);
    add(model, hidden, hidden, "transformer.h.%d.attn.c_proj.weight", layer);
    add(model, hidden, 0, "transformer.h.%d.attn.c_proj.bias", layer);
    add(model, hidden, 0, "transformer.h.%d.ln_2.weight", layer);
    add(model, hidden, 0, "transformer.h.%d.ln_2.bias", layer);
    add(model, hidden, 4 * hidden, "transformer.h.%d.mlp.c_fc.weight", layer);
    add(model, 4 * hidden, 0, "transformer.h.%d.mlp.c_fc.bias", layer);
    add(model, 4 * hidden, hidden, "transformer.h.%d.mlp.c_proj.weight", layer);
    add(model, hidden, 0, "transformer.h.%d.mlp.c_proj.bias", layer);
}

static void add_gpt2(bench_model *model)
{
    int64_t hidden = scaled(model, 768);
    add(model, scaled(model, 50257), hidden, "transformer.wte.weight");
    add(model, scaled(model, 1024), hidden, "transformer.wpe.weight");
    for (int layer = 0; layer < 12; layer++)
        add_gpt2_layer(model, layer, hidden);
    add(model, hidden, 0, "transformer.ln_f.weight");
    add(model, hidden, 0, "transformer.ln_f.bias");
    model->alias = "lm_head.weight";
    model->alias_target = "transformer.wte.weight";
}

static void add_attention(bench_model *model, const bench_llama *shape, int layer)
{
    int64_t hidden = scaled(model, shape->hidden), key_value = scaled(model, shape->key_value);
    add(model, hidden, hidden, "model.layers.%d.self_attn.q_proj.weight", layer);
    add(model, key_value, hidden, "model.layers.%d.self_attn.k_proj.weight", layer);
    add(model, key_value, hidden, "model.layers.%d.self_attn.v_proj.weight", layer);
    add(model, hidden, hidden, "model.layers.%d.self_attn.o_proj.weight", layer);
}

static void add_mlp(bench_model *model, const bench_llama *shape, int layer, const char *where)
{
    int64_t hidden = scaled(model, shape->hidden), inner = scaled(model, shape->intermediate);
    add(model, inner, hidden, "model.layers.%d.mlp.%sgate_proj.weight", layer, where);
    add(model, inner, hidden, "model.layers.%d.mlp.%sup_proj.weight", layer, where);
    add(model, hidden, inner, "model.layers.%d.mlp.%sdown_proj.weight", layer, where);
}

static void add_experts(bench_model *model, const bench_llama *shape, int layer)
{
    int64_t hidden = scaled(model, shape->hidden);
    char where[32];
    add(model, scaled(model, 128), 0, "model.layers.%d.self_attn.q_norm.weight", layer);
    add(model, scaled(model, 128), 0, "model.layers.%d.self_attn.k_norm.weight", layer);
    add(model, shape->experts, hidden, "model.layers.%d.mlp.gate.weight", layer);
    for (int expert = 0; expert < shape->experts; expert++) {
        snprintf(where, sizeof where, "experts.%d.", expert);
        add_mlp(model, shape, layer, where);
    }
    add_mlp(model, shape, layer, "shared_expert.");
    bench_param *counts =
        add(model, shape->experts, 0, "model.layers.%d.mlp.tokens_per_expert", layer);
    if (counts) {
        counts->dtype = FSDP_I64;
        counts->is_buffer = true;
    }
}

static void add_llama(bench_model *model, const bench_llama *shape)
{
    int64_t hidden = scaled(model, shape->hidden), vocabulary = scaled(model, shape->vocabulary);
    add(model, vocabulary, hidden, "model.embed_tokens.weight");
    for (int layer = 0; layer < shape->layers; layer++) {
        add_attention(model, shape, layer);
        if (shape->experts > 0)
            add_experts(model, shape, layer);
        else
            add_mlp(model, shape, layer, "");
        add(model, hidden, 0, "model.layers.%d.input_layernorm.weight", layer);
        add(model, hidden, 0, "model.layers.%d.post_attention_layernorm.weight", layer);
    }
    add(model, hidden, 0, "model.norm.weight");
    if (!shape->tied) {
        add(model, vocabulary, hidden, "lm_head.weight");
        return;
    }
    model->alias = "lm_head.weight";
    model->alias_target = "model.embed_tokens.weight";
}

static void add_llama_1b(bench_model *model)
{
    static const bench_llama shape = {.vocabulary = 128256,
                                      .hidden = 2048,
                                      .key_value = 512,
                                      .intermediate = 8192,
                                      .layers = 16,
                                      .tied = true};
    add_llama(model, &shape);
}

static void add_llama_8b(bench_model *model)
{
    static const bench_llama shape = {.vocabulary = 128256,
                                      .hidden = 4096,
                                      .key_value = 1024,
                                      .intermediate = 14336,
                                      .layers = 32};
    add_llama(model, &shape);
}

/* Moments and counts stay as they are. */
static void make_weights_bf16(bench_model *model)
{
    for (size_t i = 0; i < model->count; i++)
        if (!model->params[i].is_buffer)
            model->params[i].dtype = FSDP_BF16;
}

/* 9,987 parameters with three tensors each after them, and 52 buffers: 40,000 tensors. The weights
 * are bf16 and their moments f32. */
static void add_moe(bench_model *model)
{
    static const bench_llama shape = {.vocabulary = 151936,
                                      .hidden = 2048,
                                      .key_value = 512,
                                      .intermediate = 1408,
                                      .layers = 52,
                                      .experts = 60};
    add_llama(model, &shape);
    make_weights_bf16(model);
}

/* --- models ----------------------------------------------------------------------------------- */

enum { GPT2, LLAMA_1B, LLAMA_8B, MOE, MODELS };
const char *const bench_models[MODELS + 1] = {
    [GPT2] = "gpt2", [LLAMA_1B] = "llama-1b", [LLAMA_8B] = "llama-8b", [MOE] = "moe"};
static void (*const add_params[MODELS])(bench_model *model) = {
    [GPT2] = add_gpt2, [LLAMA_1B] = add_llama_1b, [LLAMA_8B] = add_llama_8b, [MOE] = add_moe};

fsdp_status bench_model_finish(bench_model *model, fsdp_error *err)
{
    if (!model->failed)
        return FSDP_OK;
    bench_model_release(model);
    return fsdp_fail(err, FSDP_ERR_LIMIT, "cannot allocate memory for the model's names");
}

fsdp_status bench_model_init(bench_model *model, const char *name, double scale, fsdp_error *err)
{
    for (int i = 0; i < MODELS; i++)
        if (strcmp(bench_models[i], name) == 0) {
            *model = (bench_model){.name = bench_models[i], .scale = scale};
            add_params[i](model);
            return bench_model_finish(model, err);
        }
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "there is no model '%s'; use gpt2, llama-1b, llama-8b or moe", name);
}

fsdp_status bench_model_init_plain(bench_model *model, int count, int64_t bytes, fsdp_error *err)
{
    enum { COLUMNS = 1024 };
    int64_t rows = bytes / 4 / COLUMNS / count;
    *model = (bench_model){.name = "plain", .scale = 1};
    for (int i = 0; i < count; i++)
        add(model, rows > 0 ? rows : 1, COLUMNS, "layers.%d.weight", i);
    return bench_model_finish(model, err);
}

fsdp_status bench_model_init_llama(bench_model *model, const bench_llama *shape, fsdp_error *err)
{
    *model = (bench_model){.name = "llama", .scale = 1};
    add_llama(model, shape);
    make_weights_bf16(model);
    return bench_model_finish(model, err);
}

void bench_model_add(bench_model *model, int64_t rows, int64_t columns, const char *name)
{
    add(model, rows, columns, "%s", name);
}

void bench_model_release(bench_model *model)
{
    for (size_t i = 0; i < model->count; i++)
        free(model->params[i].name);
    free(model->params);
    *model = (bench_model){0};
}

int64_t bench_model_bytes(const bench_model *model)
{
    int64_t bytes = 0;
    for (size_t i = 0; i < model->count; i++) {
        const bench_param *param = &model->params[i];
        int64_t count = param->shape[0] * (param->ndim == 2 ? param->shape[1] : 1);
        bytes += count * (int64_t)fsdp_dtype_size(param->dtype);
        if (!param->is_buffer)
            bytes += 2 * 4 * count + 4;
    }
    return bytes;
}
