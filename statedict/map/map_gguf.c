/* The key-value pairs of a GGUF file that is made of a model of Hugging Face: see map.h. */
#include "statedict/map/map.h"

#include "base/text.h"
#include "formats/frameworks.h"
#include "statedict/models/config.h"
#include "statedict/models/rope.h"

#include <math.h>
#include <string.h>

/* llama.cpp's numbers for "mostly of this type". */
static int64_t file_type_of(fsdp_dtype dtype)
{
    switch (dtype) {
    case FSDP_F16: return 1;
    case FSDP_Q4_0: return 2;
    case FSDP_Q8_0: return 7;
    case FSDP_BF16: return 32;
    default: return 0;
    }
}

/* The dtype of the largest tensor. */
static fsdp_dtype main_dtype(const fsdp_sd *sd)
{
    fsdp_dtype dtype = FSDP_F32;
    int64_t most = -1;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (entry->kind != FSDP_ENTRY_TENSOR || fsdp_entry_bytes(entry) <= most)
            continue;
        most = fsdp_entry_bytes(entry);
        dtype = entry->dtype;
    }
    return dtype;
}

static fsdp_status add_number(fsdp_derivation *derivation, const char *name, int64_t number,
                              fsdp_error *err)
{
    const fsdp_value value = fsdp_value_i64(number);
    return fsdp_derivation_add_value(derivation, (fsdp_derived_name){name, strlen(name)}, &value,
                                     err);
}

static const char output_name[] = "output.weight";

/* Keeps the tensors, but for an output that add_output makes. */
static fsdp_status keep_tensors(fsdp_derivation *derivation, const fsdp_config_file *config,
                                fsdp_error *err)
{
    const fsdp_sd *sd = fsdp_derivation_base(derivation)->manifest.sd;
    const bool makes_output = config->architecture->gguf.scaled_output != NULL;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (!makes_output || !fsdp_bytes_are(entry->name, entry->name_size, output_name))
            FSDP_TRY(fsdp_derivation_keep(derivation, i, err));
    }
    return FSDP_OK;
}

static fsdp_status add_pairs(fsdp_derivation *derivation, const fsdp_named_values *pairs,
                             fsdp_dtype dtype, fsdp_error *err)
{
    const fsdp_sd *sd = fsdp_derivation_base(derivation)->manifest.sd;
    dtype = dtype ? dtype : main_dtype(sd);
    for (size_t i = 0; i < pairs->count; i++) {
        const char *name = pairs->items[i].name;
        FSDP_TRY(fsdp_derivation_add_value(derivation, (fsdp_derived_name){name, strlen(name)},
                                           &pairs->items[i].value, err));
    }
    FSDP_TRY(add_number(derivation, "general.file_type", file_type_of(dtype), err));
    return fsdp_dtype_describe(dtype)->values > 1
               ? add_number(derivation, "general.quantization_version", 2, err)
               : FSDP_OK;
}

/* The base of rotary positions, which config.json may leave to the default of the family; NAN: none. */
static double find_base(const fsdp_named_values *pairs)
{
    static const char key[] = ".rope.freq_base";
    for (size_t i = 0; i < pairs->count; i++) {
        const char *at = strchr(pairs->items[i].name, '.');
        if (at && strcmp(at, key) == 0 && pairs->items[i].value.kind == FSDP_VALUE_F64)
            return pairs->items[i].value.as.f64;
    }
    return NAN;
}

static fsdp_status add_factors(fsdp_derivation *derivation, const char *name, const float *factors,
                               size_t count, fsdp_error *err)
{
    const fsdp_derived *tensor = NULL;
    FSDP_TRY(fsdp_derive_constant(fsdp_derivation_arena(derivation), FSDP_F32, (int64_t)count,
                                  factors, &tensor, err));
    return fsdp_derivation_add(derivation, (fsdp_derived_name){name, strlen(name)}, tensor, err);
}

/* The factors of long or of short contexts, whose number fsdp_gguf_config has checked. */
static fsdp_status add_list(fsdp_derivation *derivation, const char *name, const fsdp_value *list,
                            fsdp_error *err)
{
    float factors[FSDP_ROPE_MOST];
    for (size_t i = 0; i < list->as.list.count; i++) {
        const fsdp_value *item = &list->as.list.items[i];
        bool is_whole = item->kind == FSDP_VALUE_I64;
        if (!is_whole && item->kind != FSDP_VALUE_F64)
            return fsdp_fail(err, FSDP_ERR_DAMAGED,
                             "a factor of rotary frequencies in config.json is not a number");
        factors[i] = (float)(is_whole ? (double)item->as.i64 : item->as.f64);
    }
    return add_factors(derivation, name, factors, list->as.list.count, err);
}

/* llama.cpp reads the scaling of rotary frequencies from tensors, but not for all families. */
static fsdp_status add_rope(fsdp_derivation *derivation, const fsdp_config_file *config,
                            const fsdp_named_values *pairs, fsdp_error *err)
{
    const fsdp_gguf_names *gguf = &config->architecture->gguf;
    float divisors[FSDP_ROPE_MOST];
    int count = 0;
    fsdp_rope rope;
    FSDP_TRY(fsdp_rope_read(&config->json, fsdp_config_name(config), &rope, err));
    if (gguf->has_long_factors && rope.kind == FSDP_ROPE_LONGROPE) {
        FSDP_TRY(add_list(derivation, "rope_factors_long.weight", rope.long_factor, err));
        return add_list(derivation, "rope_factors_short.weight", rope.short_factor, err);
    }
    if (!gguf->has_factors)
        return FSDP_OK;
    if (!(rope.theta > 0))
        rope.theta = find_base(pairs);
    FSDP_TRY(fsdp_rope_divisors(&rope, &config->json, divisors, &count, err));
    return count == 0 ? FSDP_OK
                      : add_factors(derivation, "rope_freqs.weight", divisors, (size_t)count, err);
}

/* The number that a key below the name of the architecture has; NAN: none. */
static double number_below(const fsdp_named_values *pairs, const char *key)
{
    for (size_t i = 0; i < pairs->count; i++) {
        const char *at = strchr(pairs->items[i].name, '.');
        if (at && strcmp(at + 1, key) == 0 && pairs->items[i].value.kind == FSDP_VALUE_I64)
            return (double)pairs->items[i].value.as.i64;
    }
    return NAN;
}

/* The factor with which transformers multiplies the output of some families, and llama.cpp does not. */
static fsdp_status find_output_factor(const fsdp_config_file *config,
                                      const fsdp_named_values *pairs, double *factor_out,
                                      fsdp_error *err)
{
    fsdp_config formulas = {0};
    double is_scaled = 0;
    fsdp_status st = fsdp_config_take(config, &formulas, err);
    if (st == FSDP_OK)
        st = fsdp_config_number(&formulas, config->architecture->gguf.scaled_output, &is_scaled,
                                err);
    *factor_out = is_scaled != 0 ? 1 / sqrt(number_below(pairs, "embedding_length")) : 1;
    fsdp_arena_release(&formulas.arena);
    return st;
}

/* Adds the output of such a family, scaled. A file has it also where it is the embedding: without it the way
 * back says that transformers scales. */
static fsdp_status add_output(fsdp_derivation *derivation, const fsdp_config_file *config,
                              const fsdp_named_values *pairs, fsdp_error *err)
{
    static const char embedding[] = "token_embd.weight";
    fsdp_checkpoint *base = fsdp_derivation_base(derivation);
    fsdp_arena *arena = fsdp_derivation_arena(derivation);
    const fsdp_derived *tensor = NULL;
    double factor = 1;
    if (!config->architecture->gguf.scaled_output)
        return FSDP_OK;
    int64_t from = fsdp_sd_find(base->manifest.sd, output_name, strlen(output_name));
    if (from < 0)
        from = fsdp_sd_find(base->manifest.sd, embedding, strlen(embedding));
    if (from < 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "the model has no embedding '%s', which llama.cpp needs", embedding);
    FSDP_TRY(find_output_factor(config, pairs, &factor, err));
    FSDP_TRY(fsdp_derive_stored(arena, base, (size_t)from, &tensor, err));
    if (factor != 1)
        FSDP_TRY(fsdp_derive_scale(arena, tensor, factor, &tensor, err));
    return fsdp_derivation_add(derivation, (fsdp_derived_name){output_name, strlen(output_name)},
                               tensor, err);
}

static fsdp_status read_pairs(const fsdp_map_request *request, const fsdp_checkpoint *base,
                              fsdp_gguf_model *model, fsdp_named_values *pairs,
                              fsdp_gguf_found *tokenizer_out, fsdp_error *err)
{
    char *beside = NULL;
    const char *path = base->path;
    model->sd = base->manifest.sd;
    model->directory = request->opts->copy_from;
    model->memory = request->opts->memory;
    if (!model->directory)
        FSDP_TRY(fsdp_framework_config(request->io, path, &beside, err));
    model->directory = model->directory ? model->directory : beside;
    fsdp_status st =
        model->directory && request->config
            ? fsdp_gguf_values(request->io, model, pairs, tokenizer_out, err)
            : fsdp_fail(err, FSDP_ERR_USAGE,
                        "a GGUF file needs the config.json and the tokenizer of its model, but "
                        "neither is %s '%s'; give their directory with --copy-from DIR",
                        model->directory ? "in" : "next to",
                        model->directory ? model->directory : path);
    if (st == FSDP_OK)
        st = fsdp_gguf_add_pooling(request->io, model, pairs, err);
    fsdp_free(beside);
    return st;
}

fsdp_status fsdp_map_add_gguf_pairs(const fsdp_map_request *request, fsdp_dtype dtype,
                                    fsdp_checkpoint **checkpoint, fsdp_gguf_found *tokenizer_out,
                                    fsdp_error *err)
{
    fsdp_named_values pairs = {0};
    fsdp_derivation *derivation = NULL;
    fsdp_checkpoint *base = *checkpoint;
    fsdp_gguf_model model = {.config = request->config};
    fsdp_status st = request->config ? fsdp_config_check(request->config, err) : FSDP_OK;
    if (st == FSDP_OK)
        st = read_pairs(request, base, &model, &pairs, tokenizer_out, err);
    if (st == FSDP_OK) {
        *checkpoint = NULL;
        st = fsdp_derivation_begin(base, &derivation, err);
    }
    if (st == FSDP_OK)
        st = keep_tensors(derivation, request->config, err);
    if (st == FSDP_OK)
        st = add_output(derivation, request->config, &pairs, err);
    if (st == FSDP_OK)
        st = add_pairs(derivation, &pairs, dtype, err);
    if (st == FSDP_OK)
        st = add_rope(derivation, request->config, &pairs, err);
    fsdp_named_values_release(&pairs);
    if (st == FSDP_OK)
        return fsdp_derivation_finish(derivation, checkpoint, err);
    fsdp_derivation_cancel(derivation);
    return st;
}
