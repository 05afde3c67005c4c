/*
 * Models that the sources of bench convert hold: a Llama, the same with scales of blocks, an adapter for
 * it, and the configurations next to them. See bench_convert.h.
 */
#include "tests/bench/checkpoint/bench_convert.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { LAYERS = 8, HEAD = 64, SCALE_BLOCK = 128, LORA_RANK = 16 };

/* --- sizes ---------------------------------------------------------------------------------------- */

/* The matrices of a layer have 12 hidden^2 elements. A third of those of all layers, and what the steps of
 * hidden leave over, is for the two of the vocabulary. */
bench_llama bench_llama_of(int64_t bytes)
{
    enum { STEP = 4 * HEAD, OF_LAYER = 12 };
    int64_t elements = bytes / 2, hidden = STEP;
    while ((hidden + STEP) * (hidden + STEP) * OF_LAYER * LAYERS * 4 / 3 <= elements)
        hidden += STEP;
    int64_t left = elements - hidden * hidden * OF_LAYER * LAYERS;
    int64_t vocabulary = left / 2 / hidden / SCALE_BLOCK * SCALE_BLOCK;
    return (bench_llama){.vocabulary = vocabulary > SCALE_BLOCK ? vocabulary : SCALE_BLOCK,
                         .hidden = hidden,
                         .key_value = hidden / 2,
                         .intermediate = 3 * hidden,
                         .layers = LAYERS};
}

/* --- models ---------------------------------------------------------------------------------------- */

fsdp_status bench_convert_llama(const bench_llama *shape, bench_model *model_out, fsdp_error *err)
{
    return bench_model_init_llama(model_out, shape, err);
}

static bool is_matrix_of_layer(const bench_param *param)
{
    return param->ndim == 2 && strstr(param->name, "_proj.");
}

fsdp_status bench_convert_scaled_llama(const bench_llama *shape, bench_model *model_out,
                                       fsdp_error *err)
{
    char name[256];
    FSDP_TRY(bench_model_init_llama(model_out, shape, err));
    for (size_t i = 0, count = model_out->count; i < count; i++) {
        const bench_param *param = &model_out->params[i];
        if (!is_matrix_of_layer(param))
            continue;
        snprintf(name, sizeof name, "%s_scale_inv", param->name);
        bench_model_add(model_out, (param->shape[0] + SCALE_BLOCK - 1) / SCALE_BLOCK,
                        (param->shape[1] + SCALE_BLOCK - 1) / SCALE_BLOCK, name);
    }
    return bench_model_finish(model_out, err);
}

/* PEFT's names: those of the modules, in a model that is wrapped twice. */
fsdp_status bench_convert_adapter(const bench_llama *shape, bench_model *model_out, fsdp_error *err)
{
    bench_model base;
    char name[256];
    FSDP_TRY(bench_model_init_llama(&base, shape, err));
    *model_out = (bench_model){.name = "adapter", .scale = 1};
    for (size_t i = 0; i < base.count; i++) {
        const bench_param *param = &base.params[i];
        int module = (int)(strlen(param->name) - strlen(".weight"));
        if (!is_matrix_of_layer(param))
            continue;
        snprintf(name, sizeof name, "base_model.model.%.*s.lora_A.weight", module, param->name);
        bench_model_add(model_out, LORA_RANK, param->shape[1], name);
        snprintf(name, sizeof name, "base_model.model.%.*s.lora_B.weight", module, param->name);
        bench_model_add(model_out, param->shape[0], LORA_RANK, name);
    }
    bench_model_release(&base);
    return bench_model_finish(model_out, err);
}

/* --- configurations -------------------------------------------------------------------------------- */

static fsdp_status write_text(const char *path, fsdp_text *text, fsdp_error *err)
{
    FILE *file = text->failed ? NULL : fopen(path, "we");
    bool written = file && fwrite(text->data, 1, text->size, file) == text->size;
    if (file)
        written = fclose(file) == 0 && written;
    fsdp_text_release(text);
    return written ? FSDP_OK : fsdp_fail_errno(err, errno, "cannot write '%s'", path);
}

fsdp_status bench_write_llama_config(const bench_llama *shape, const char *path, fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_text_addf(&text,
                   "{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", "
                   "\"torch_dtype\": \"bfloat16\", \"tie_word_embeddings\": false, "
                   "\"hidden_act\": \"silu\", \"rms_norm_eps\": 1e-06, \"rope_theta\": 10000.0, "
                   "\"max_position_embeddings\": 4096, \"num_hidden_layers\": %d, ",
                   shape->layers);
    fsdp_text_addf(&text,
                   "\"hidden_size\": %" PRId64 ", \"intermediate_size\": %" PRId64
                   ", \"vocab_size\": %" PRId64 ", ",
                   shape->hidden, shape->intermediate, shape->vocabulary);
    fsdp_text_addf(&text,
                   "\"num_attention_heads\": %" PRId64 ", \"num_key_value_heads\": %" PRId64 "}\n",
                   shape->hidden / HEAD, shape->key_value / HEAD);
    return write_text(path, &text, err);
}

fsdp_status bench_write_adapter_config(const char *path, fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_text_addf(&text, "{\"peft_type\": \"LORA\", \"r\": %d, \"lora_alpha\": %d}\n", LORA_RANK,
                   2 * LORA_RANK);
    return write_text(path, &text, err);
}
