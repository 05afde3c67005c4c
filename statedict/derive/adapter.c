/* Merges an adapter into a model: see adapter.h. */
#include "statedict/derive/adapter.h"

#include "statedict/derive/adapter_config.h"
#include "statedict/derive/derived_checkpoint.h"
#include "statedict/derive/derived_product.h"
#include "statedict/sd/layout_internal.h"

#include <string.h>

typedef struct adapter_merge {
    fsdp_adapter_config config;
    fsdp_checkpoint *adapter;
    fsdp_derivation *derivation;
    const fsdp_sd *base;
    bool *is_used;     /* per entry of the adapter */
    bool lacks_memory; /* a name could not be made, so what find() said does not count */
    fsdp_adapter_report report;
} adapter_merge;

/* --- names ---------------------------------------------------------------------------------------- */

/* The adapter's entry of a module, with an end; -1: none. PEFT's models wrap the model twice. */
static int64_t find(adapter_merge *merge, const char *module, size_t size, const char *end)
{
    static const char *const prefixes[] = {"base_model.model.", ""};
    const fsdp_sd *sd = merge->adapter->manifest.sd;
    int64_t entry = -1;
    for (int i = 0; i < 2 && entry < 0; i++) {
        fsdp_text name = {0};
        fsdp_text_addf(&name, "%s%.*s%s", prefixes[i], (int)size, module, end);
        merge->lacks_memory = merge->lacks_memory || name.failed;
        if (!name.failed)
            entry = fsdp_sd_find(sd, name.data, name.size);
        fsdp_text_release(&name);
    }
    return entry >= 0 && fsdp_sd_at(sd, (size_t)entry)->kind != FSDP_ENTRY_VALUE ? entry : -1;
}

/* The node of one of an adapter's tensors of a module; *out stays NULL when there is none. */
static fsdp_status find_part(adapter_merge *merge, const char *module, size_t size,
                             const char *const *ends, const fsdp_derived **out, fsdp_error *err)
{
    for (; *ends && !*out; ends++) {
        int64_t entry = find(merge, module, size, *ends);
        if (entry < 0)
            continue;
        FSDP_TRY(fsdp_derive_stored(fsdp_derivation_arena(merge->derivation), merge->adapter,
                                    (size_t)entry, out, err));
        merge->is_used[entry] = true;
    }
    return merge->lacks_memory ? fsdp_fail_memory(err, "a name") : FSDP_OK;
}

/* --- one weight ------------------------------------------------------------------------------------- */

static const int swapped[2] = {1, 0};

typedef struct module_parts {
    const fsdp_derived *a, *b, *magnitudes;
    bool is_embedding;
} module_parts;

static fsdp_status find_parts(adapter_merge *merge, const char *module, size_t size,
                              module_parts *parts, fsdp_error *err)
{
    static const char *const a[] = {".lora_A.weight", ".lora_A.default.weight", NULL};
    static const char *const b[] = {".lora_B.weight", ".lora_B.default.weight", NULL};
    static const char *const embedding_a[] = {".lora_embedding_A", ".lora_embedding_A.default",
                                              NULL};
    static const char *const embedding_b[] = {".lora_embedding_B", ".lora_embedding_B.default",
                                              NULL};
    static const char *const lengths[] = {".lora_magnitude_vector", ".lora_magnitude_vector.weight",
                                          ".lora_magnitude_vector.default.weight",
                                          ".lora_magnitude_vector.default", NULL};
    *parts = (module_parts){0};
    FSDP_TRY(find_part(merge, module, size, a, &parts->a, err));
    FSDP_TRY(find_part(merge, module, size, b, &parts->b, err));
    if (!parts->a && !parts->b) {
        FSDP_TRY(find_part(merge, module, size, embedding_a, &parts->a, err));
        FSDP_TRY(find_part(merge, module, size, embedding_b, &parts->b, err));
        parts->is_embedding = parts->a != NULL;
    }
    FSDP_TRY(find_part(merge, module, size, lengths, &parts->magnitudes, err));
    if (!parts->a == !parts->b)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' has one matrix of the pair for '%.*s', not both",
                     merge->adapter->path, (int)size, module);
}

/* True when the product has the dims of the weight as it is, or with its dims swapped. */
static bool fits(const int64_t *shape, const module_parts *parts, bool is_swapped)
{
    return parts->b->shape[0] == shape[is_swapped] && parts->a->shape[1] == shape[!is_swapped];
}

/* A model has linear modules of both kinds, and PEFT stores the kind of the last one that the adapter wraps
 * (fan_in_fan_out). So the dims decide, and fan_in_fan_out where they are equal. */
static bool is_transposed(const adapter_merge *merge, const fsdp_derived *weight,
                          const module_parts *parts)
{
    bool is_matrix = weight->ndim == 2, as_it_is = is_matrix && fits(weight->shape, parts, false),
         turned = is_matrix && fits(weight->shape, parts, true);
    return parts->is_embedding || (as_it_is == turned ? merge->config.is_transposed : turned);
}

/* [out, in] of a weight that is stored as [in, out], and back. */
static fsdp_status merge_pair(adapter_merge *merge, const fsdp_derived *weight,
                              const module_parts *parts, const fsdp_low_rank *pair,
                              const fsdp_derived **out, fsdp_error *err)
{
    fsdp_arena *arena = fsdp_derivation_arena(merge->derivation);
    bool turns = is_transposed(merge, weight, parts);
    if (turns && weight->ndim == 2)
        FSDP_TRY(fsdp_derive_permute(arena, weight, swapped, &weight, err));
    FSDP_TRY(fsdp_derive_low_rank(arena, weight, pair, out, err));
    return turns ? fsdp_derive_permute(arena, *out, swapped, out, err) : FSDP_OK;
}

/* DoRA: the sum's rows get the trained lengths. They are computed in f32. */
static fsdp_status merge_lengths(adapter_merge *merge, const fsdp_derived *weight,
                                 const module_parts *parts, const fsdp_low_rank *pair,
                                 const fsdp_derived **out, fsdp_error *err)
{
    fsdp_arena *arena = fsdp_derivation_arena(merge->derivation);
    fsdp_dtype dtype = weight->dtype;
    bool turns = is_transposed(merge, weight, parts);
    if (turns && weight->ndim == 2)
        FSDP_TRY(fsdp_derive_permute(arena, weight, swapped, &weight, err));
    FSDP_TRY(fsdp_derive_cast(arena, weight, FSDP_F32, &weight, err));
    FSDP_TRY(fsdp_derive_low_rank(arena, weight, pair, out, err));
    FSDP_TRY(fsdp_derive_row_lengths(arena, *out, parts->magnitudes, out, err));
    FSDP_TRY(fsdp_derive_cast(arena, *out, dtype, out, err));
    return turns ? fsdp_derive_permute(arena, *out, swapped, out, err) : FSDP_OK;
}

static fsdp_status merge_module(adapter_merge *merge, const fsdp_derived *weight,
                                fsdp_derived_name module, const module_parts *parts,
                                const fsdp_derived **out, fsdp_error *err)
{
    if (parts->a->ndim != 2 || parts->b->ndim != 2)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%.*s' has an adapter of a convolution, which cannot be merged here: "
                         "PEFT's merge_and_unload does",
                         (int)module.size, module.text);
    const fsdp_low_rank pair = {
        parts->b, parts->a,
        fsdp_adapter_factor(&merge->config, module.text, module.size, parts->a->shape[0])};
    merge->report.merged++;
    if (!parts->magnitudes)
        return merge_pair(merge, weight, parts, &pair, out, err);
    if (parts->is_embedding)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%.*s' is an embedding with DoRA, which cannot be merged here",
                         (int)module.size, module.text);
    return merge_lengths(merge, weight, parts, &pair, out, err);
}

/* --- all of them -------------------------------------------------------------------------------------- */

/* The adapter's own tensor for one of the model, which was trained whole or belongs to a module that the
 * adapter wraps: a bias, or an embedding's weight. *out stays NULL when there is none. */
static fsdp_status find_whole(adapter_merge *merge, fsdp_derived_name name,
                              const fsdp_derived **out, fsdp_error *err)
{
    static const char *const whole[] = {"", NULL};
    static const char *const ends[] = {".weight", ".bias"};
    FSDP_TRY(find_part(merge, name.text, name.size, whole, out, err));
    for (int i = 0; i < 2 && !*out; i++) {
        size_t size = strlen(ends[i]);
        const char *const wrapped[] = {i == 0 ? ".base_layer.weight" : ".base_layer.bias", NULL};
        if (name.size > size && memcmp(name.text + name.size - size, ends[i], size) == 0)
            FSDP_TRY(find_part(merge, name.text, name.size - size, wrapped, out, err));
    }
    return FSDP_OK;
}

static bool has_tensor(const fsdp_sd *sd, const char *name)
{
    int64_t entry = fsdp_sd_find(sd, name, strlen(name));
    return entry >= 0 && fsdp_sd_at(sd, (size_t)entry)->kind == FSDP_ENTRY_TENSOR;
}

/* PEFT trains an embedding apart from the output that was tied to it, which keeps the old weights. */
static fsdp_status check_output(const adapter_merge *merge, fsdp_derived_name name, fsdp_error *err)
{
    static const char *const embeddings[] = {"model.embed_tokens.weight", "transformer.wte.weight"};
    static const char *const outputs[] = {"lm_head.weight", "score.weight", "classifier.weight"};
    bool is_embedding = false, has_output = false;
    for (size_t i = 0; i < sizeof embeddings / sizeof *embeddings; i++)
        is_embedding |=
            name.size == strlen(embeddings[i]) && memcmp(name.text, embeddings[i], name.size) == 0;
    for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++)
        has_output |= has_tensor(merge->base, outputs[i]);
    return !is_embedding || has_output || merge->config.ties_weights
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_USAGE,
                           "'%.*s' was trained without the output that the base ties to it: PEFT's "
                           "merge_and_unload makes two tensors of them",
                           (int)name.size, name.text);
}

/* A tensor of the model: with a product, replaced by the adapter's, or as it is. */
static fsdp_status add_tensor(adapter_merge *merge, size_t number, fsdp_error *err)
{
    static const char suffix[] = ".weight";
    const fsdp_entry *entry = fsdp_sd_at(merge->base, number);
    fsdp_arena *arena = fsdp_derivation_arena(merge->derivation);
    const fsdp_derived_name name = {entry->name, entry->name_size};
    const fsdp_derived *tensor = NULL;
    bool is_weight =
        name.size > sizeof suffix - 1 &&
        memcmp(name.text + name.size - (sizeof suffix - 1), suffix, sizeof suffix - 1) == 0;
    module_parts parts = {0};
    const fsdp_derived_name module = {name.text,
                                      is_weight ? name.size - (sizeof suffix - 1) : name.size};
    FSDP_TRY(find_whole(merge, name, &tensor, err));
    if (is_weight)
        FSDP_TRY(find_parts(merge, module.text, module.size, &parts, err));
    merge->report.replaced += tensor != NULL && !parts.a;
    if (tensor && !parts.a)
        FSDP_TRY(check_output(merge, name, err));
    if (!parts.a)
        return tensor ? fsdp_derivation_replace(merge->derivation, number, name, tensor, err)
                      : fsdp_derivation_keep(merge->derivation, number, err);
    if (!tensor)
        FSDP_TRY(fsdp_derive_stored(arena, fsdp_derivation_base(merge->derivation), number, &tensor,
                                    err));
    fsdp_status st = merge_module(merge, tensor, module, &parts, &tensor, err);
    if (st != FSDP_OK) {
        fsdp_error_prefix(err, "'%.*s'", (int)name.size, name.text);
        return st;
    }
    return fsdp_derivation_replace(merge->derivation, number, name, tensor, err);
}

/* Square weights of a model are stored as its other ones are, of which an adapter that says nothing of
 * fan_in_fan_out may hold some. */
static fsdp_status find_transposed(adapter_merge *merge, fsdp_error *err)
{
    static const char suffix[] = ".weight";
    for (size_t i = 0; i < fsdp_sd_count(merge->base) && !merge->config.is_transposed; i++) {
        const fsdp_entry *entry = fsdp_sd_at(merge->base, i);
        size_t size = entry->name_size - (sizeof suffix - 1);
        module_parts parts = {0};
        if (entry->kind != FSDP_ENTRY_TENSOR || entry->ndim != 2 ||
            entry->name_size < sizeof suffix ||
            memcmp(entry->name + size, suffix, sizeof suffix - 1) != 0)
            continue;
        FSDP_TRY(find_parts(merge, entry->name, size, &parts, err));
        merge->config.is_transposed = parts.a && !parts.is_embedding && parts.a->ndim == 2 &&
                                      parts.b->ndim == 2 && !fits(entry->shape, &parts, false) &&
                                      fits(entry->shape, &parts, true);
    }
    return FSDP_OK;
}

/* A second name of a merged tensor becomes a tensor of its own only if the adapter has one for it. */
static fsdp_status add_entries(adapter_merge *merge, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_count(merge->base); i++) {
        bool is_tensor = fsdp_sd_at(merge->base, i)->kind == FSDP_ENTRY_TENSOR;
        FSDP_TRY(is_tensor ? add_tensor(merge, i, err)
                           : fsdp_derivation_keep(merge->derivation, i, err));
    }
    return FSDP_OK;
}

static bool ends_with(const fsdp_entry *entry, const char *end)
{
    size_t size = strlen(end);
    return entry->name_size >= size &&
           memcmp(entry->name + entry->name_size - size, end, size) == 0;
}

/* Why no tensor of the model took one of the adapter. */
static const char *reason_of(const fsdp_entry *entry)
{
    static const struct {
        const char *end, *reason;
    } rows[] = {
        {".lora_B.bias", "adapters with biases (lora_bias) are not merged here"},
        {".trainable_tokens_delta", "single trained tokens are not merged here"},
        {"lm_head.weight", "the base has no output, or one that is tied to its embedding"},
        {"lm_head.base_layer.weight",
         "the base has no output, or one that is tied to its embedding"},
        {".base_layer.lora_A.weight", "adapters of single parameters are not merged here"},
        {".base_layer.lora_B.weight", "adapters of single parameters are not merged here"},
        {"", "is it of this model?"},
    };
    size_t row = 0;
    while (!ends_with(entry, rows[row].end))
        row++;
    return rows[row].reason;
}

/* A tensor of the adapter that no tensor of the model took. */
static fsdp_status check_all_used(const adapter_merge *merge, fsdp_error *err)
{
    const fsdp_sd *sd = merge->adapter->manifest.sd;
    char shown[200];
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (entry->kind != FSDP_ENTRY_TENSOR || merge->is_used[i])
            continue;
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' of the adapter belongs to no tensor of '%s': %s",
                         fsdp_printable(entry->name, entry->name_size, shown, sizeof shown),
                         fsdp_derivation_base(merge->derivation)->path, reason_of(entry));
    }
    return FSDP_OK;
}

static fsdp_status note_config(adapter_merge *merge, const char *dir, fsdp_error *err)
{
    char *path = fsdp_path_join(dir, "adapter_config.json");
    fsdp_status st = path ? fsdp_derivation_note_file(merge->derivation, path, err)
                          : fsdp_fail_memory(err, "a path");
    fsdp_free(path);
    return st;
}

/* Before PEFT 0.7 they were in a file of torch.save. */
static fsdp_status open_tensors(adapter_merge *merge, fsdp_io *io, const char *dir, fsdp_error *err)
{
    fsdp_file_info info;
    char *bin = fsdp_path_join(dir, "adapter_model.bin"),
         *safe = fsdp_path_join(dir, "adapter_model.safetensors");
    bool is_bin =
        bin && safe && io->ops->info(io, safe, &info) != 0 && io->ops->info(io, bin, &info) == 0;
    fsdp_status st =
        bin && safe ? fsdp_checkpoint_open_as(io, is_bin ? bin : dir, NULL, &merge->adapter, err)
                    : fsdp_fail_memory(err, "a path");
    fsdp_free(bin);
    fsdp_free(safe);
    return st;
}

static fsdp_status open_adapter(adapter_merge *merge, const char *dir, const fsdp_access *access,
                                fsdp_error *err)
{
    fsdp_io *io = fsdp_access_io(access);
    FSDP_TRY(note_config(merge, dir, err));
    FSDP_TRY(fsdp_adapter_config_read(io, dir, &merge->config, err));
    FSDP_TRY(open_tensors(merge, io, dir, err));
    fsdp_derivation_close_too(merge->derivation, merge->adapter);
    merge->is_used = fsdp_alloc(fsdp_sd_count(merge->adapter->manifest.sd), sizeof *merge->is_used);
    return merge->is_used ? FSDP_OK : fsdp_fail_memory(err, "an adapter");
}

fsdp_status fsdp_adapter_merge(const char *dir, const fsdp_access *access,
                               fsdp_checkpoint **checkpoint, fsdp_adapter_report *report_out,
                               fsdp_error *err)
{
    adapter_merge merge = {.base = (*checkpoint)->manifest.sd};
    fsdp_checkpoint *base = *checkpoint;
    *checkpoint = NULL;
    FSDP_TRY(fsdp_derivation_begin(base, &merge.derivation, err));
    fsdp_status st = open_adapter(&merge, dir, access, err);
    if (st == FSDP_OK)
        st = find_transposed(&merge, err);
    if (st == FSDP_OK)
        st = add_entries(&merge, err);
    if (st == FSDP_OK)
        st = check_all_used(&merge, err);
    *report_out = merge.report;
    fsdp_free(merge.is_used);
    fsdp_adapter_config_release(&merge.config);
    if (st == FSDP_OK)
        return fsdp_derivation_finish(merge.derivation, checkpoint, err);
    fsdp_derivation_cancel(merge.derivation);
    return st;
}
