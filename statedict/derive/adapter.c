/* Merges an adapter into a model: see adapter.h. */
#include "statedict/derive/adapter.h"

#include "base/text.h"
#include "formats/frameworks.h"
#include "statedict/derive/adapter_config.h"
#include "statedict/derive/derived_checkpoint.h"
#include "statedict/derive/derived_product.h"
#include "statedict/run/hub_cache.h"
#include "statedict/run/remote_path.h"
#include "statedict/sd/layout_internal.h"
#include "statedict/sd/meter.h"

#include <string.h>

typedef struct adapter_merge {
    fsdp_adapter_config config;
    fsdp_checkpoint *adapter;
    fsdp_derivation *derivation;
    const fsdp_sd *base;
    bool *is_used;     /* per entry of the adapter */
    int64_t tied;      /* of the base: the embedding that is the output, too; -1: none */
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
        fsdp_text_addf(&name, "%s", prefixes[i]);
        fsdp_text_add(&name, module, size);
        fsdp_text_addf(&name, "%s", end);
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
                         "an adapter of a convolution cannot be merged here; merge it with PEFT's "
                         "merge_and_unload");
    const fsdp_adapter_module found = {.name = {module.text, module.size},
                                       .rank = parts->a->shape[0],
                                       .has_lengths = parts->magnitudes != NULL};
    fsdp_low_rank pair = {.b = parts->b, .a = parts->a};
    FSDP_TRY(fsdp_adapter_factor(&merge->config, &found, &pair.factor, err));
    merge->report.merged++;
    if (!parts->magnitudes)
        return merge_pair(merge, weight, parts, &pair, out, err);
    if (parts->is_embedding)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "an embedding with DoRA cannot be merged here; merge it with PEFT's merge_and_unload");
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
        if (name.size > size && fsdp_bytes_end(name.text, name.size, ends[i]))
            FSDP_TRY(find_part(merge, name.text, name.size - size, wrapped, out, err));
    }
    return FSDP_OK;
}

/* The sum of a tensor, or of the base's where *tensor is NULL, and the product of a module. */
static fsdp_status merge_stored(adapter_merge *merge, size_t number, fsdp_derived_name module,
                                const module_parts *parts, const fsdp_derived **tensor,
                                fsdp_error *err)
{
    if (!*tensor)
        FSDP_TRY(fsdp_derive_stored(fsdp_derivation_arena(merge->derivation),
                                    fsdp_derivation_base(merge->derivation), number, tensor, err));
    fsdp_status st = merge_module(merge, *tensor, module, parts, tensor, err);
    if (st != FSDP_OK)
        fsdp_error_prefix(err, "'%.*s'", (int)module.size, module.text);
    return st;
}

/* --- an output that the base ties to its embedding -------------------------------------------------- */

static const char output_module[] = "lm_head";
static const fsdp_derived_name output = {"lm_head.weight", sizeof "lm_head.weight" - 1};

static int64_t find_tensor(const fsdp_sd *sd, const char *name)
{
    int64_t entry = fsdp_sd_find(sd, name, strlen(name));
    bool is_tensor = entry >= 0 && fsdp_sd_at(sd, (size_t)entry)->kind == FSDP_ENTRY_TENSOR;
    return is_tensor ? entry : -1;
}

static int64_t find_tied(const fsdp_sd *sd)
{
    static const char *const embeddings[] = {"model.embed_tokens.weight", "transformer.wte.weight"};
    static const char *const outputs[] = {"lm_head.weight", "score.weight", "classifier.weight"};
    int64_t embedding = -1;
    for (size_t i = 0; i < sizeof embeddings / sizeof *embeddings && embedding < 0; i++)
        embedding = find_tensor(sd, embeddings[i]);
    for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++)
        if (find_tensor(sd, outputs[i]) >= 0)
            return -1;
    return embedding;
}

/* The output's part of a sum: the adapter's product on the tensor, or on the base's where *tensor is NULL. */
static fsdp_status merge_output(adapter_merge *merge, const fsdp_derived **tensor, fsdp_error *err)
{
    const fsdp_derived_name module = {output_module, sizeof output_module - 1};
    module_parts parts = {0};
    FSDP_TRY(find_parts(merge, module.text, module.size, &parts, err));
    if (!parts.a)
        return FSDP_OK;
    if (!*tensor)
        FSDP_TRY(find_whole(merge, output, tensor, err));
    return merge_stored(merge, (size_t)merge->tied, module, &parts, tensor, err);
}

/* The adapter's own tensor of a module that has no product; *is_whole_out tells whether there is one. */
static fsdp_status find_trained(adapter_merge *merge, fsdp_derived_name name, bool *is_whole_out,
                                fsdp_error *err)
{
    const fsdp_derived *tensor = NULL;
    module_parts parts = {0};
    FSDP_TRY(find_whole(merge, name, &tensor, err));
    FSDP_TRY(find_parts(merge, name.text, name.size - (sizeof ".weight" - 1), &parts, err));
    *is_whole_out = tensor && !parts.a;
    return FSDP_OK;
}

/* An embedding or an output that was trained whole is no longer the other one, unless PEFT was told to keep
 * them tied. */
static fsdp_status find_untied(adapter_merge *merge, fsdp_error *err)
{
    bool has_embedding = false, has_output = false;
    merge->tied = find_tied(merge->base);
    if (merge->tied < 0)
        return FSDP_OK;
    const fsdp_entry *entry = fsdp_sd_at(merge->base, (size_t)merge->tied);
    FSDP_TRY(find_trained(merge, (fsdp_derived_name){entry->name, entry->name_size}, &has_embedding,
                          err));
    FSDP_TRY(find_trained(merge, output, &has_output, err));
    merge->report.unties = (has_embedding || has_output) && !merge->config.ties_weights;
    merge->report.replaced += has_output && merge->report.unties;
    return FSDP_OK;
}

/* An output that was not trained whole keeps the base's numbers. */
static fsdp_status add_output(adapter_merge *merge, fsdp_error *err)
{
    const fsdp_derived *tensor = NULL;
    if (!merge->report.unties)
        return FSDP_OK;
    FSDP_TRY(find_whole(merge, output, &tensor, err));
    FSDP_TRY(merge_output(merge, &tensor, err));
    if (!tensor)
        FSDP_TRY(fsdp_derive_stored(fsdp_derivation_arena(merge->derivation),
                                    fsdp_derivation_base(merge->derivation), (size_t)merge->tied,
                                    &tensor, err));
    return fsdp_derivation_add(merge->derivation, output, tensor, err);
}

/* --- the model -------------------------------------------------------------------------------------- */

/* Finds what the adapter makes of a tensor of the model; *out stays NULL where it makes nothing. */
static fsdp_status merge_tensor(adapter_merge *merge, size_t number, fsdp_derived_name name,
                                const fsdp_derived **out, fsdp_error *err)
{
    static const char suffix[] = ".weight";
    bool is_weight = name.size > sizeof suffix - 1 && fsdp_bytes_end(name.text, name.size, suffix);
    module_parts parts = {0};
    const fsdp_derived_name module = {name.text,
                                      is_weight ? name.size - (sizeof suffix - 1) : name.size};
    FSDP_TRY(find_whole(merge, name, out, err));
    if (is_weight)
        FSDP_TRY(find_parts(merge, module.text, module.size, &parts, err));
    bool is_whole = *out && !parts.a, is_tied = (int64_t)number == merge->tied;
    merge->report.replaced += is_whole;
    if (parts.a)
        FSDP_TRY(merge_stored(merge, number, module, &parts, out, err));
    return is_tied && !merge->report.unties ? merge_output(merge, out, err) : FSDP_OK;
}

static fsdp_status add_tensor(adapter_merge *merge, size_t number, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(merge->base, number);
    const fsdp_derived_name name = {entry->name, entry->name_size};
    const fsdp_derived *tensor = NULL;
    FSDP_TRY(merge_tensor(merge, number, name, &tensor, err));
    return tensor ? fsdp_derivation_replace(merge->derivation, number, name, tensor, err)
                  : fsdp_derivation_keep(merge->derivation, number, err);
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
            !fsdp_bytes_end(entry->name, entry->name_size, suffix))
            continue;
        FSDP_TRY(find_parts(merge, entry->name, size, &parts, err));
        merge->config.is_transposed = parts.a && !parts.is_embedding && parts.a->ndim == 2 &&
                                      parts.b->ndim == 2 && !fits(entry->shape, &parts, false) &&
                                      fits(entry->shape, &parts, true);
    }
    return FSDP_OK;
}

/* True for the second name that the base has for a tied output, which gets a tensor of its own. */
static bool is_left(const adapter_merge *merge, const fsdp_entry *entry)
{
    return merge->report.unties && entry->kind == FSDP_ENTRY_ALIAS &&
           fsdp_bytes_are(entry->name, entry->name_size, output.text);
}

static fsdp_status add_entries(adapter_merge *merge, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_count(merge->base); i++) {
        const fsdp_entry *entry = fsdp_sd_at(merge->base, i);
        if (entry->kind == FSDP_ENTRY_TENSOR)
            FSDP_TRY(add_tensor(merge, i, err));
        else if (!is_left(merge, entry))
            FSDP_TRY(fsdp_derivation_keep(merge->derivation, i, err));
    }
    return add_output(merge, err);
}

/* Why no tensor of the model took one of the adapter. */
static const char *reason_of(const fsdp_entry *entry)
{
    static const struct {
        const char *end, *reason;
    } rows[] = {
        {".lora_B.bias", "adapters with biases (lora_bias) are not merged here"},
        {".trainable_tokens_delta", "single trained tokens are not merged here"},
        {"lm_head.weight", "the base has no output"},
        {"lm_head.base_layer.weight", "the base has no output"},
        {".base_layer.lora_A.weight", "adapters of single parameters are not merged here"},
        {".base_layer.lora_B.weight", "adapters of single parameters are not merged here"},
        {"", "the adapter may belong to another model"},
    };
    size_t row = 0;
    while (!fsdp_bytes_end(entry->name, entry->name_size, rows[row].end))
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

/* --- files -------------------------------------------------------------------------------------------- */

static const char config_name[] = "adapter_config.json";

bool fsdp_sd_has_adapter(const fsdp_sd *sd)
{
    static const char *const parts[] = {".lora_", "base_model.model.", "prompt_embeddings"};
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        for (size_t j = 0; j < sizeof parts / sizeof *parts && entry->kind != FSDP_ENTRY_VALUE; j++)
            if (memmem(entry->name, entry->name_size, parts[j], strlen(parts[j])))
                return true;
    }
    return false;
}

static fsdp_status has_file(fsdp_io *io, const char *dir, const char *name, bool *has_out,
                            fsdp_error *err)
{
    fsdp_file_info info;
    char *path = fsdp_path_join(dir, name);
    *has_out = path && io->ops->info(io, path, &info) == 0;
    fsdp_free(path);
    return path ? FSDP_OK : fsdp_fail_memory(err, "a path");
}

static void notify(void *context, const char *text)
{
    fsdp_notice(context, "%s", text);
}

static fsdp_status refuse_directory(const adapter_merge *merge, const char *dir, fsdp_error *err)
{
    const char *base = fsdp_derivation_base(merge->derivation)->path;
    if (fsdp_sd_has_adapter(merge->base))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' is an adapter, and '%s' is not: the two are swapped; name the model "
                         "first, and the adapter after --adapter",
                         base, dir);
    return fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                     "'%s' is not an adapter of PEFT: neither it nor its newest step has an %s",
                     dir, config_name);
}

/* The snapshot in a hub's cache, or the newest step of a run; the caller frees it also after a failure. */
static fsdp_status find_newest(const adapter_merge *merge, const fsdp_adapter_opts *opts,
                               char **step_out, fsdp_error *err)
{
    fsdp_io *io = fsdp_access_io(opts->access);
    const fsdp_framework_way way = {.note = notify, .context = (void *)(uintptr_t)opts->watch};
    bool has_config = false;
    fsdp_status st = fsdp_hub_snapshot(opts->path, io, step_out, err);
    if (st == FSDP_OK && !*step_out)
        st = fsdp_framework_resolve(io, opts->path, &way, step_out, err);
    if (st == FSDP_ERR_LIMIT || st == FSDP_ERR_DAMAGED || st == FSDP_ERR_REFUSED)
        return st; /* a pointer to nothing, a link: the run says more than that it is not an adapter */
    if (*step_out)
        FSDP_TRY(has_file(io, *step_out, config_name, &has_config, err));
    return has_config ? FSDP_OK : refuse_directory(merge, opts->path, err);
}

/* The directory itself, or the newest step of a run. */
static fsdp_status find_directory(const adapter_merge *merge, const fsdp_adapter_opts *opts,
                                  char **dir_out, fsdp_error *err)
{
    fsdp_io *io = fsdp_access_io(opts->access);
    fsdp_file_info info;
    bool has_config;
    int result = io->ops->info(io, opts->path, &info);
    *dir_out = NULL;
    if (result < 0)
        return fsdp_remote_path_fail(io, opts->path, -result, err);
    FSDP_TRY(has_file(io, opts->path, config_name, &has_config, err));
    if (!has_config && info.kind != FSDP_FILE_DIRECTORY)
        return refuse_directory(merge, opts->path, err);
    if (!has_config)
        return find_newest(merge, opts, dir_out, err);
    *dir_out = fsdp_strndup(opts->path, strlen(opts->path));
    return *dir_out ? FSDP_OK : fsdp_fail_memory(err, "a path");
}

static fsdp_status note_config(adapter_merge *merge, const char *dir, fsdp_error *err)
{
    char *path = fsdp_path_join(dir, config_name);
    fsdp_status st = path ? fsdp_derivation_note_file(merge->derivation, path, err)
                          : fsdp_fail_memory(err, "a path");
    fsdp_free(path);
    return st;
}

/* The adapter's own file: a base model, or the state of an optimizer, may be next to it. Before PEFT 0.7 it
 * was one of torch.save. */
static fsdp_status open_tensors(adapter_merge *merge, fsdp_io *io, const char *dir, fsdp_error *err)
{
    static const char *const names[] = {"adapter_model.safetensors", "adapter_model.bin"};
    bool is_there = false;
    char *path = NULL;
    for (int i = 0; i < 2 && !is_there; i++) {
        FSDP_TRY(has_file(io, dir, names[i], &is_there, err));
        if (is_there)
            path = fsdp_path_join(dir, names[i]);
    }
    if (is_there && !path)
        return fsdp_fail_memory(err, "a path");
    fsdp_status st = fsdp_checkpoint_open_as(io, path ? path : dir, NULL, &merge->adapter, err);
    fsdp_free(path);
    return st;
}

static fsdp_status open_directory(adapter_merge *merge, const char *dir, fsdp_io *io,
                                  fsdp_error *err)
{
    FSDP_TRY(note_config(merge, dir, err));
    FSDP_TRY(fsdp_adapter_config_read(io, dir, &merge->config, err));
    FSDP_TRY(open_tensors(merge, io, dir, err));
    fsdp_derivation_close_too(merge->derivation, merge->adapter);
    merge->is_used = fsdp_alloc(fsdp_sd_count(merge->adapter->manifest.sd), sizeof *merge->is_used);
    return merge->is_used ? FSDP_OK : fsdp_fail_memory(err, "an adapter");
}

static fsdp_status open_adapter(adapter_merge *merge, const fsdp_adapter_opts *opts,
                                fsdp_error *err)
{
    char *dir = NULL;
    fsdp_status st = find_directory(merge, opts, &dir, err);
    if (st == FSDP_OK)
        st = open_directory(merge, dir, fsdp_access_io(opts->access), err);
    fsdp_free(dir);
    return st;
}

fsdp_status fsdp_adapter_merge(const fsdp_adapter_opts *opts, fsdp_checkpoint **checkpoint,
                               fsdp_adapter_report *report_out, fsdp_error *err)
{
    adapter_merge merge = {.base = (*checkpoint)->manifest.sd};
    fsdp_checkpoint *base = *checkpoint;
    *checkpoint = NULL;
    FSDP_TRY(fsdp_derivation_begin(base, &merge.derivation, err));
    fsdp_status st = open_adapter(&merge, opts, err);
    if (st == FSDP_OK)
        st = find_transposed(&merge, err);
    if (st == FSDP_OK)
        st = find_untied(&merge, err);
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
