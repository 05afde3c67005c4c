/*
 * Safetensors as a target: one file, or a Hugging Face directory of files with an index, byte
 * for byte as the format's library and huggingface_hub write them. The mirror of
 * safetensors_read.c.
 */
#include "formats/safetensors/safetensors.h"
#include "formats/target/packed_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LENGTH_BYTES = 8 };
#define USUAL_SHARD ((int64_t)5000000000)

static bool holds_dtype(fsdp_dtype dtype)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(dtype);
    return info && info->safetensors;
}

/* "__metadata__" is the one key that names no tensor. */
static bool holds_name(const char *name, size_t size)
{
    return size != strlen("__metadata__") || memcmp(name, "__metadata__", size) != 0;
}

/* False for keys of the metadata with another meaning. */
static bool notes_tie(const char *name, size_t size, const char *kept, size_t kept_size)
{
    static const char native[] = "fsdp.";
    bool is_native = size >= sizeof native - 1 && memcmp(name, native, sizeof native - 1) == 0;
    bool is_format = size == 6 && memcmp(name, "format", 6) == 0;
    bool is_cut = size == 17 && memcmp(name, "DCP_SHARDING_INFO", 17) == 0;
    return !is_native && !is_format && !is_cut && holds_name(name, size) &&
           holds_name(kept, kept_size);
}

/* --- the order within a file ------------------------------------------------------------------ */

/* Orders dtypes by falling element size, so that all tensors are aligned: the library's list of
 * dtypes, backwards. */
static int rank_of(fsdp_dtype dtype)
{
    static const fsdp_dtype order[] = {
        FSDP_U64,          FSDP_I64,         FSDP_F64,         FSDP_C64,        FSDP_F32,
        FSDP_U32,          FSDP_I32,         FSDP_BF16,        FSDP_F16,        FSDP_U16,
        FSDP_I16,          FSDP_F8_E5M2FNUZ, FSDP_F8_E4M3FNUZ, FSDP_F8_E8M0FNU, FSDP_F8_E4M3FN,
        FSDP_F8_E5M2,      FSDP_I8,          FSDP_U8,          FSDP_F6_E3M2,    FSDP_F6_E2M3,
        FSDP_F4_E2M1FN_X2, FSDP_BOOL};
    int rank = 0;
    while (rank < (int)(sizeof order / sizeof *order) && order[rank] != dtype)
        rank++;
    return rank;
}

static int compare_names(const target_tensor *a, const target_tensor *b)
{
    size_t size =
        a->stored_name_size < b->stored_name_size ? a->stored_name_size : b->stored_name_size;
    int order = size > 0 ? memcmp(a->stored_name, b->stored_name, size) : 0;
    if (order != 0)
        return order;
    return (a->stored_name_size > b->stored_name_size) -
           (a->stored_name_size < b->stored_name_size);
}

static int compare_tensors(const void *a, const void *b)
{
    const target_tensor *x = *(target_tensor *const *)a, *y = *(target_tensor *const *)b;
    if (x->file != y->file)
        return x->file < y->file ? -1 : 1;
    int p = rank_of(x->what.dtype), q = rank_of(y->what.dtype);
    return p != q ? p - q : compare_names(x, y);
}

static int compare_by_name(const void *a, const void *b)
{
    return compare_names(*(target_tensor *const *)a, *(target_tensor *const *)b);
}

/* --- one header ------------------------------------------------------------------------------- */

static bool is_four(fsdp_dtype dtype)
{
    return dtype == FSDP_F4_E2M1FN_X2;
}

static bool is_six(fsdp_dtype dtype)
{
    return dtype == FSDP_F6_E2M3 || dtype == FSDP_F6_E3M2;
}

/* Sub-byte values are counted one by one in the file. */
static int64_t values_in(fsdp_dtype dtype, int64_t bytes)
{
    return is_four(dtype) ? 2 * bytes : is_six(dtype) ? bytes / 3 * 4 : bytes;
}

/* False when the last dim cannot be counted in values: the tensor is then stored flat, and the
 * metadata holds its true shape. */
static bool has_true_shape(const target_tensor *tensor)
{
    const fsdp_packed_tensor *what = &tensor->what;
    if (!is_four(what->dtype) && !is_six(what->dtype))
        return true;
    return what->ndim > 0 && (!is_six(what->dtype) || what->shape[what->ndim - 1] % 3 == 0);
}

static fsdp_status check_packed(const target_tensor *tensor, fsdp_error *err)
{
    char shown[200];
    if (is_six(tensor->what.dtype) && tensor->size % 3 != 0)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "safetensors cannot hold tensor '%s': the bytes of %s must be a multiple of 3",
            fsdp_printable(tensor->what.name, tensor->what.name_size, shown, sizeof shown),
            fsdp_dtype_name(tensor->what.dtype));
    return FSDP_OK;
}

/* {"name": [shape in bytes]} of the tensors that are stored flat. */
static void add_true_shapes(fsdp_text *text, const fsdp_packed *target)
{
    fsdp_text shapes = {0};
    for (size_t i = 0; i < target->tensor_count; i++) {
        const target_tensor *tensor = &target->tensors[i];
        if (has_true_shape(tensor))
            continue;
        fsdp_text_addf(&shapes, shapes.size > 0 ? "," : "{");
        fsdp_text_add_json_string(&shapes, tensor->stored_name, tensor->stored_name_size);
        fsdp_text_addf(&shapes, ":[");
        for (int dim = 0; dim < tensor->what.ndim; dim++)
            fsdp_text_addf(&shapes, "%s%" PRId64, dim > 0 ? "," : "", tensor->what.shape[dim]);
        fsdp_text_addf(&shapes, "]");
    }
    if (shapes.size > 0) {
        fsdp_text_addf(&shapes, "}");
        fsdp_text_addf(text, ",\"fsdp.shapes\":");
        fsdp_text_add_json_string(text, shapes.data, shapes.size);
    }
    text->failed = text->failed || shapes.failed;
    fsdp_text_release(&shapes);
}

/* "dropped": "kept", for tensors of this file, in the form of the library's save_model. */
static void add_ties(fsdp_text *text, const fsdp_packed *target, int file)
{
    for (size_t i = 0; i < target->tie_count; i++) {
        const target_tie *tie = &target->ties[i];
        const target_tensor *kept = &target->tensors[tie->tensor];
        if (kept->file != file)
            continue;
        fsdp_text_addf(text, ",");
        fsdp_text_add_json_string(text, tie->name, tie->name_size);
        fsdp_text_addf(text, ":");
        fsdp_text_add_json_string(text, kept->stored_name, kept->stored_name_size);
    }
}

/* The texts of the source, in its order; transformers requires a format. */
static void add_carried(fsdp_text *text, const fsdp_text_pairs *carried)
{
    bool has_format = fsdp_text_pairs_find(carried, "format", strlen("format")) != NULL;
    fsdp_text_addf(text, has_format ? "" : "\"format\":\"pt\"");
    for (size_t i = 0; i < carried->count; i++) {
        const fsdp_text_pair *pair = &carried->items[i];
        fsdp_text_addf(text, i > 0 || !has_format ? "," : "");
        fsdp_text_add_json_string(text, pair->key, pair->key_size);
        fsdp_text_addf(text, ":");
        fsdp_text_add_json_string(text, pair->text, pair->text_size);
    }
}

/* file: the number that the file will get. */
static void add_metadata(fsdp_text *text, const fsdp_packed *target, int file)
{
    fsdp_text_addf(text, "{\"__metadata__\":{");
    add_carried(text, &target->metadata);
    if (target->escaped_names.size > 0) {
        fsdp_text_addf(text, ",\"fsdp.names\":");
        fsdp_text_add_json_string(text, target->escaped_names.data, target->escaped_names.size);
    }
    add_true_shapes(text, target);
    if (target->copied) {
        fsdp_text_addf(text, ",\"fsdp.copied\":");
        fsdp_text_add_json_string(text, target->copied, strlen(target->copied));
    }
    add_ties(text, target, file);
    fsdp_text_addf(text, "}");
}

static void add_tensor(fsdp_text *text, const target_tensor *tensor, int64_t begin)
{
    fsdp_text_addf(text, ",");
    fsdp_text_add_json_string(text, tensor->stored_name, tensor->stored_name_size);
    fsdp_text_addf(text, ":{\"dtype\":\"%s\",\"shape\":[",
                   fsdp_dtype_describe(tensor->what.dtype)->safetensors);
    const fsdp_packed_tensor *what = &tensor->what;
    if (!has_true_shape(tensor))
        fsdp_text_addf(text, "%" PRId64, values_in(what->dtype, tensor->size));
    for (int dim = 0; dim < what->ndim && has_true_shape(tensor); dim++) {
        bool is_last = dim == what->ndim - 1;
        fsdp_text_addf(text, "%s%" PRId64, dim > 0 ? "," : "",
                       is_last ? values_in(what->dtype, what->shape[dim]) : what->shape[dim]);
    }
    fsdp_text_addf(text, "],\"data_offsets\":[%" PRId64 ",%" PRId64 "]}", begin,
                   begin + tensor->size);
}

/* The length, the JSON, and spaces up to a multiple of eight bytes. */
static fsdp_status make_header(const fsdp_packed *target, target_tensor *const *tensors, size_t n,
                               fsdp_text *text, int64_t *data_size_out, fsdp_error *err)
{
    uint8_t length[LENGTH_BYTES] = {0};
    *data_size_out = 0;
    fsdp_text_add(text, (const char *)length, sizeof length);
    add_metadata(text, target, (int)target->file_count);
    for (size_t i = 0; i < n; i++) {
        add_tensor(text, tensors[i], *data_size_out);
        if (fsdp_add_overflow(*data_size_out, tensors[i]->size, data_size_out))
            return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' would be too large", target->path);
    }
    fsdp_text_addf(text, "}");
    while (!text->failed && text->size % 8 != 0)
        fsdp_text_addf(text, " ");
    if (text->failed)
        return fsdp_fail_memory(err, target->path);
    if (text->size - LENGTH_BYTES > FSDP_SAFETENSORS_HEADER_MOST)
        return fsdp_fail(
            err, FSDP_ERR_LIMIT,
            "'%s' would have a header of %zu bytes, but readers of safetensors take at most %d%s",
            target->path, text->size - LENGTH_BYTES, FSDP_SAFETENSORS_HEADER_MOST,
            target->metadata.count > 0 ? "; use --drop metadata to make it smaller" : "");
    for (size_t i = 0, size = text->size - LENGTH_BYTES; i < LENGTH_BYTES; i++, size >>= 8)
        text->data[i] = (char)(size & 0xFF);
    return FSDP_OK;
}

static fsdp_status write_file(fsdp_packed *target, const char *name, target_tensor **tensors,
                              size_t n, fsdp_error *err)
{
    fsdp_text text = {0};
    int64_t data_size = 0, size;
    int file;
    fsdp_status status = make_header(target, tensors, n, &text, &data_size, err);
    if (status == FSDP_OK && fsdp_add_overflow(data_size, (int64_t)text.size, &size))
        status = fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' would be too large", target->path);
    if (status == FSDP_OK)
        status = fsdp_packed_add_file(target, name, size, &file, err);
    if (status == FSDP_OK)
        status = fsdp_packed_put(target, file, text.data, text.size, 0, err);
    int64_t at = (int64_t)text.size;
    for (size_t i = 0; i < n && status == FSDP_OK; i++) {
        tensors[i]->file = file;
        tensors[i]->offset = at;
        at += tensors[i]->size;
    }
    fsdp_text_release(&text);
    return status;
}

/* --- metadata that a reader would take for the name of a tied tensor ---------------------------- */

static fsdp_status fail_tie(const fsdp_text_pair *pair, fsdp_error *err)
{
    char key[160];
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "'%s' of the source's metadata would make a tied tensor of that name; leave "
                     "it out with --drop metadata:REGEX",
                     fsdp_printable(pair->key, pair->key_size, key, sizeof key));
}

/* Keys that are the name of a tied tensor, and texts that are the name of a stored one. */
static fsdp_status check_metadata(const fsdp_packed *target, fsdp_error *err)
{
    for (size_t i = 0; i < target->tie_count; i++) {
        const target_tie *tie = &target->ties[i];
        const fsdp_text_pair *pair =
            fsdp_text_pairs_find(&target->metadata, tie->name, tie->name_size);
        if (pair)
            return fail_tie(pair, err);
    }
    for (size_t i = 0; i < target->metadata.count; i++) {
        const fsdp_text_pair *pair = &target->metadata.items[i];
        if (fsdp_name_table_find(&target->names, pair->text, pair->text_size) &&
            !fsdp_bytes_are(pair->key, pair->key_size, "format"))
            return fail_tie(pair, err);
    }
    return FSDP_OK;
}

static fsdp_status check_all(const fsdp_packed *target, fsdp_error *err)
{
    for (size_t i = 0; i < target->tensor_count; i++)
        FSDP_TRY(check_packed(&target->tensors[i], err));
    return check_metadata(target, err);
}

/* --- all files -------------------------------------------------------------------------------- */

static target_tensor **list_tensors(fsdp_packed *target)
{
    target_tensor **list = fsdp_alloc(target->tensor_count, sizeof(target_tensor *));
    for (size_t i = 0; list && i < target->tensor_count; i++)
        list[i] = &target->tensors[i];
    return list;
}

static fsdp_status lay_out_file(fsdp_packed *target, fsdp_error *err)
{
    FSDP_TRY(check_all(target, err));
    target_tensor **list = list_tensors(target);
    if (!list)
        return fsdp_fail_memory(err, target->path);
    for (size_t i = 0; i < target->tensor_count; i++)
        list[i]->file = 0;
    if (target->tensor_count > 0)
        qsort(list, target->tensor_count, sizeof *list, compare_tensors);
    fsdp_status status = write_file(target, NULL, list, target->tensor_count, err);
    fsdp_free(list);
    return status;
}

/* Assigns tensors to files as huggingface_hub does: in their order, a tensor that is too large
 * alone; files are numbered in the order in which they become full. Sets tensor->file; false
 * when there is no memory. */
static bool assign_shards(fsdp_packed *target, int *count_out)
{
    int64_t most = target->opts.max_shard_size > 0 ? target->opts.max_shard_size : USUAL_SHARD;
    int *numbers = fsdp_alloc(target->tensor_count + 1, sizeof *numbers); /* by order of opening */
    int64_t filled = 0;
    int opened = 0, full = 0, open = -1;
    for (size_t i = 0; numbers && i < target->tensor_count; i++) {
        target_tensor *tensor = &target->tensors[i];
        bool is_alone = tensor->size > most;
        if (!is_alone && open >= 0 && filled + tensor->size > most) {
            numbers[open] = full++;
            open = -1;
        }
        if (is_alone || open < 0) {
            tensor->file = opened++;
            filled = is_alone ? filled : 0;
        }
        if (is_alone) {
            numbers[tensor->file] = full++;
            continue;
        }
        open = open < 0 ? tensor->file : open;
        tensor->file = open;
        filled += tensor->size;
    }
    if (numbers && open >= 0)
        numbers[open] = full++;
    for (size_t i = 0; numbers && i < target->tensor_count; i++)
        target->tensors[i].file = numbers[target->tensors[i].file];
    *count_out = full > 0 ? full : 1;
    bool is_done = numbers != NULL;
    fsdp_free(numbers);
    return is_done;
}

static const char *stem_of(const fsdp_packed *target)
{
    return target->opts.stem ? target->opts.stem : "model";
}

static void name_file(const fsdp_packed *target, char *out, size_t room, int number, int count)
{
    if (count == 1)
        snprintf(out, room, "%s.safetensors", stem_of(target));
    else
        snprintf(out, room, "%s-%05d-of-%05d.safetensors", stem_of(target), number + 1, count);
}

static fsdp_status write_index(fsdp_packed *target, target_tensor **list, int count,
                               fsdp_error *err)
{
    int64_t total = 0;
    for (size_t i = 0; i < target->tensor_count; i++)
        total += target->tensors[i].size;
    qsort(list, target->tensor_count, sizeof *list, compare_by_name);
    fsdp_text text = {0};
    fsdp_text_addf(&text, "{\n  \"metadata\": {\n    \"total_size\": %" PRId64 "\n  },\n", total);
    fsdp_text_addf(&text, "  \"weight_map\": {");
    for (size_t i = 0; i < target->tensor_count; i++) {
        char name[64];
        name_file(target, name, sizeof name, list[i]->file, count);
        fsdp_text_addf(&text, "%s\n    ", i > 0 ? "," : "");
        fsdp_text_add_json_string(&text, list[i]->stored_name, list[i]->stored_name_size);
        fsdp_text_addf(&text, ": \"%s\"", name);
    }
    fsdp_text_addf(&text, "\n  }\n}\n");
    int file;
    char index[64];
    snprintf(index, sizeof index, "%s.safetensors.index.json", stem_of(target));
    fsdp_status status = text.failed ? fsdp_fail_memory(err, target->path) : FSDP_OK;
    if (status == FSDP_OK)
        status = fsdp_packed_add_file(target, index, (int64_t)text.size, &file, err);
    if (status == FSDP_OK)
        status = fsdp_packed_put(target, file, text.data, text.size, 0, err);
    fsdp_text_release(&text);
    return status;
}

static fsdp_status write_shards(fsdp_packed *target, target_tensor **list, int count,
                                fsdp_error *err)
{
    size_t first = 0;
    for (int shard = 0; shard < count; shard++) {
        char name[64];
        size_t end = first;
        while (end < target->tensor_count && list[end]->file == shard)
            end++;
        name_file(target, name, sizeof name, shard, count);
        FSDP_TRY(write_file(target, name, list + first, end - first, err));
        first = end;
    }
    return count > 1 ? write_index(target, list, count, err) : FSDP_OK;
}

static fsdp_status lay_out_directory(fsdp_packed *target, fsdp_error *err)
{
    FSDP_TRY(check_all(target, err));
    int count;
    target_tensor **list = assign_shards(target, &count) ? list_tensors(target) : NULL;
    if (!list)
        return fsdp_fail_memory(err, target->path);
    if (target->tensor_count > 0)
        qsort(list, target->tensor_count, sizeof *list, compare_tensors);
    fsdp_status status = write_shards(target, list, count, err);
    fsdp_free(list);
    return status;
}

const char *const fsdp_hf_stems[] = {"model", "adapter_model", "diffusion_pytorch_model",
                                     "adapters", NULL};

static bool is_of_stem(const char *name, const char *stem)
{
    int number, count;
    char same[80];
    size_t size = strlen(stem);
    if (strncmp(name, stem, size) != 0)
        return false;
    if (strcmp(name + size, ".safetensors") == 0 ||
        strcmp(name + size, ".safetensors.index.json") == 0)
        return true;
    if (sscanf(name + size, "-%9d-of-%9d", &number, &count) != 2)
        return false;
    snprintf(same, sizeof same, "-%05d-of-%05d.safetensors", number, count);
    return strcmp(name + size, same) == 0;
}

static bool owns(const char *name)
{
    for (size_t i = 0; fsdp_hf_stems[i]; i++)
        if (is_of_stem(name, fsdp_hf_stems[i]))
            return true;
    return false;
}

const fsdp_format_writer fsdp_safetensors_writer = {
    .ops = &fsdp_packed_ops,
    .packed = &(const fsdp_packed_format){.holds_name = holds_name, .lay_out = lay_out_file},
    .holds_dtype = holds_dtype,
    .notes_tie = notes_tie};
const fsdp_format_writer fsdp_hf_writer = {
    .ops = &fsdp_packed_ops,
    .packed = &(const fsdp_packed_format){.holds_name = holds_name, .lay_out = lay_out_directory},
    .owns = owns,
    .holds_dtype = holds_dtype,
    .notes_tie = notes_tie};
