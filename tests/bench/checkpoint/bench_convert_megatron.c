/*
 * A Llama as Megatron saves it on two tensor parallel ranks and two pipeline stages: a file per rank with the
 * rows or columns of its own, of the layers of its stage. See bench_convert.h.
 */
#include "tests/bench/checkpoint/bench_convert.h"

#include <stdarg.h>
#include <stdio.h>

/* Values follow from the name, and each rank has values of its own. */
static void add_part(bench_model *model, int rank, int64_t rows, int64_t columns, const char *part,
                     int layer)
{
    char name[128];
    if (layer < 0)
        snprintf(name, sizeof name, "rank%d.%s", rank, part);
    else
        snprintf(name, sizeof name, "rank%d.decoder.layers.%d.%s", rank, layer, part);
    bench_model_add(model, rows, columns, name);
}

/* Whole on each rank. */
FSDP_PRINTF(4, 5)
static void add(bench_model *model, int64_t rows, int64_t columns, const char *format, ...)
{
    char name[128];
    va_list args;
    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    bench_model_add(model, rows, columns, name);
}

static void add_layer(bench_model *model, const bench_llama *shape, int rank, int layer)
{
    int64_t hidden = shape->hidden, inner = shape->intermediate, parts = BENCH_TENSOR_RANKS;
    int64_t qkv = hidden + 2 * shape->key_value;
    add(model, hidden, 0, "decoder.layers.%d.self_attention.linear_qkv.layer_norm_weight", layer);
    add_part(model, rank, qkv / parts, hidden, "self_attention.linear_qkv.weight", layer);
    add_part(model, rank, hidden, hidden / parts, "self_attention.linear_proj.weight", layer);
    add(model, hidden, 0, "decoder.layers.%d.mlp.linear_fc1.layer_norm_weight", layer);
    add_part(model, rank, 2 * inner / parts, hidden, "mlp.linear_fc1.weight", layer);
    add_part(model, rank, hidden, inner / parts, "mlp.linear_fc2.weight", layer);
}

fsdp_status bench_convert_megatron(const bench_llama *shape, int rank, int stage,
                                   bench_model *model_out, fsdp_error *err)
{
    int64_t vocabulary = shape->vocabulary / BENCH_TENSOR_RANKS;
    *model_out = (bench_model){.name = "megatron", .scale = 1};
    if (stage == 0)
        add_part(model_out, rank, vocabulary, shape->hidden, "embedding.word_embeddings.weight",
                 -1);
    for (int layer = 0; layer < shape->layers / BENCH_STAGES; layer++)
        add_layer(model_out, shape, rank, layer);
    if (stage == BENCH_STAGES - 1) {
        add(model_out, shape->hidden, 0, "decoder.final_layernorm.weight");
        add_part(model_out, rank, vocabulary, shape->hidden, "output_layer.weight", -1);
    }
    for (size_t i = 0; i < model_out->count; i++)
        model_out->params[i].dtype = FSDP_BF16;
    return bench_model_finish(model_out, err);
}
