/*
 * fsdp-ls for programs: the JSON listing and the list of digests. Printed as it is made, so that
 * neither the number nor the size of the tensors matters.
 */
#include "tools/ls.h"

#include <fsdp/digest.h>

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* --- values ----------------------------------------------------------------------------------- */

static void add_hex_digest(fsdp_text *text, const void *data, size_t size)
{
    fsdp_sha256 sha;
    uint8_t digest[FSDP_SHA256_SIZE];
    fsdp_sha256_init(&sha);
    fsdp_sha256_add(&sha, data, size);
    fsdp_sha256_value(&sha, digest);
    fsdp_text_add_hex(text, digest, sizeof digest);
}

static void add_float(fsdp_text *text, double value)
{
    if (isfinite(value))
        fsdp_text_add_f64(text, value);
    else
        fsdp_text_addf(text, "{\"float\": \"%s\"}",
                       isnan(value) ? "nan"
                       : value > 0  ? "inf"
                                    : "-inf");
}

static void add_list(ls_listing *listing, fsdp_text *text, const fsdp_value *value)
{
    fsdp_text_add(text, "[", 1);
    for (size_t i = 0; i < value->as.list.count; i++) {
        if (i > 0)
            fsdp_text_add(text, ", ", 2);
        ls_add_value(listing, text, &value->as.list.items[i]);
    }
    fsdp_text_add(text, "]", 1);
}

static void add_dict(ls_listing *listing, fsdp_text *text, const fsdp_value *value)
{
    if (value->as.list.count == 0) {
        fsdp_text_add(text, "{}", 2);
        return;
    }
    fsdp_text_addf(text, "{\"dict\": [");
    for (size_t i = 0; i + 1 < value->as.list.count; i += 2) {
        fsdp_text_addf(text, i > 0 ? ", [" : "[");
        ls_add_value(listing, text, &value->as.list.items[i]);
        fsdp_text_add(text, ", ", 2);
        ls_add_value(listing, text, &value->as.list.items[i + 1]);
        fsdp_text_add(text, "]", 1);
    }
    fsdp_text_addf(text, "]}");
}

static void add_per_rank(ls_listing *listing, fsdp_text *text, const fsdp_value *value)
{
    fsdp_text_addf(text, "{\"per_rank\": ");
    add_list(listing, text, fsdp_value_per_rank(value));
    fsdp_text_add(text, "}", 1);
}

static void add_bytes(fsdp_text *text, const fsdp_value *value)
{
    fsdp_text_addf(text, "{\"bytes\": %zu, \"sha256\": \"", value->as.bytes.size);
    add_hex_digest(text, value->as.bytes.data, value->as.bytes.size);
    fsdp_text_addf(text, "\"}");
}

/* What PyTorch stored is shown as it is shown there. */
static bool add_opened(ls_listing *listing, fsdp_text *text, const fsdp_value *value)
{
    ls_listing inner = {.options = listing->options};
    fsdp_error err = {0};
    if (fsdp_checkpoint_open_value(value, &inner.checkpoint, &err) != FSDP_OK)
        return false;
    ls_add_value(&inner, text, &fsdp_sd_at(fsdp_checkpoint_sd(inner.checkpoint), 0)->value);
    if (listing->failure.status == FSDP_OK)
        listing->failure = inner.failure;
    fsdp_checkpoint_close(inner.checkpoint);
    return true;
}

static void add_opaque(ls_listing *listing, fsdp_text *text, const fsdp_value *value)
{
    if (add_opened(listing, text, value))
        return;
    fsdp_text_addf(text, "{\"opaque\": ");
    if (fsdp_utf8_valid(value->as.bytes.data, value->as.bytes.size))
        fsdp_text_add_json_string(text, value->as.bytes.data, value->as.bytes.size);
    else
        fsdp_text_addf(text, "\"%zu bytes\"", value->as.bytes.size);
    fsdp_text_add(text, "}", 1);
}

static void add_integer(fsdp_text *text, const fsdp_value *value)
{
    fsdp_text_addf(text, "{\"int\": ");
    fsdp_text_add_json_string(text, value->as.bytes.data, value->as.bytes.size);
    fsdp_text_add(text, "}", 1);
}

static void add_complex(fsdp_text *text, const double parts[2])
{
    fsdp_text_addf(text, "{\"complex\": [");
    add_float(text, parts[0]);
    fsdp_text_add(text, ", ", 2);
    add_float(text, parts[1]);
    fsdp_text_addf(text, "]}");
}

typedef struct inner_digest {
    fsdp_sha256 sha;
    fsdp_text head; /* dtype and shape */
} inner_digest;

static fsdp_status add_inner_slab(void *user, const fsdp_entry *entry, int64_t first, int64_t count,
                                  const void *data, fsdp_error *err)
{
    inner_digest *inner = user;
    (void)err;
    fsdp_sha256_add(&inner->sha, data, (size_t)count * fsdp_dtype_size(entry->dtype));
    if (first > 0)
        return FSDP_OK;
    int64_t shape[FSDP_MAX_DIMS];
    ls_shape(entry, shape);
    fsdp_text_addf(&inner->head, "{\"dtype\": \"%s\", \"shape\": ", fsdp_dtype_name(entry->dtype));
    cli_add_shape(&inner->head, entry->ndim, shape);
    return FSDP_OK;
}

/* What fails here is told at the end of the listing. */
static void add_inner(ls_listing *listing, fsdp_text *text, uint64_t tensor)
{
    inner_digest inner = {0};
    uint8_t digest[FSDP_SHA256_SIZE];
    fsdp_sha256_init(&inner.sha);
    fsdp_error err = {0};
    if (fsdp_checkpoint_stream_inner(listing->checkpoint, tensor, listing->options->common.memory,
                                     add_inner_slab, &inner, &err) != FSDP_OK &&
        listing->failure.status == FSDP_OK)
        listing->failure = err;
    fsdp_sha256_value(&inner.sha, digest);
    fsdp_text_addf(text, "{\"tensor\": ");
    if (inner.head.size > 0)
        fsdp_text_add(text, inner.head.data, inner.head.size);
    fsdp_text_addf(text, ", \"sha256\": \"");
    fsdp_text_add_hex(text, digest, sizeof digest);
    fsdp_text_addf(text, "\"}}");
    fsdp_text_release(&inner.head);
}

void ls_add_value(ls_listing *listing, fsdp_text *text, const fsdp_value *value)
{
    switch (value->kind) {
    case FSDP_VALUE_NULL: fsdp_text_addf(text, "null"); break;
    case FSDP_VALUE_BOOL: fsdp_text_addf(text, value->as.boolean ? "true" : "false"); break;
    case FSDP_VALUE_I64: fsdp_text_addf(text, "%" PRId64, value->as.i64); break;
    case FSDP_VALUE_U64:
        fsdp_text_addf(text, value->as.u64 <= INT64_MAX ? "%" PRIu64 : "{\"int\": \"%" PRIu64 "\"}",
                       value->as.u64);
        break;
    case FSDP_VALUE_F64: add_float(text, value->as.f64); break;
    case FSDP_VALUE_STRING:
        fsdp_text_add_json_string(text, value->as.bytes.data, value->as.bytes.size);
        break;
    case FSDP_VALUE_BYTES: add_bytes(text, value); break;
    case FSDP_VALUE_LIST: add_list(listing, text, value); break;
    case FSDP_VALUE_DICT:
        if (fsdp_value_per_rank(value))
            add_per_rank(listing, text, value);
        else
            add_dict(listing, text, value);
        break;
    case FSDP_VALUE_OPAQUE:
    case FSDP_VALUE_CLASS: add_opaque(listing, text, value); break;
    case FSDP_VALUE_INTEGER: add_integer(text, value); break;
    case FSDP_VALUE_COMPLEX: add_complex(text, value->as.complex_parts); break;
    case FSDP_VALUE_TENSOR: add_inner(listing, text, value->as.tensor); break;
    }
}

/* --- digests ---------------------------------------------------------------------------------- */

/* Digests by entry number, so that an alias does not read its target again. */
typedef struct digest_cache {
    uint8_t (*digests)[FSDP_SHA256_SIZE];
    bool *known;
} digest_cache;

static fsdp_status cache_create(const ls_listing *listing, digest_cache *cache, fsdp_error *err)
{
    size_t count = fsdp_sd_count(listing->sd) + 1;
    cache->digests = calloc(count, sizeof *cache->digests);
    cache->known = calloc(count, sizeof *cache->known);
    if (cache->digests && cache->known)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_LIMIT, "cannot allocate memory for %zu digests", count);
}

static void cache_free(digest_cache *cache)
{
    free(cache->digests);
    free(cache->known);
}

static fsdp_status add_slab(void *user, const fsdp_entry *entry, int64_t first, int64_t count,
                            const void *data, fsdp_error *err)
{
    (void)first;
    (void)err;
    fsdp_sha256_add(user, data, (size_t)count * fsdp_dtype_size(entry->dtype));
    return FSDP_OK;
}

/* number is of a tensor or an alias. */
static fsdp_status add_tensor_digest(ls_listing *listing, digest_cache *cache, size_t number,
                                     fsdp_text *text, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(listing->sd, number);
    size_t target = entry->kind == FSDP_ENTRY_ALIAS ? entry->target : number;
    if (!cache->known[target]) {
        fsdp_sha256 sha;
        fsdp_sha256_init(&sha);
        FSDP_TRY(ls_stream(listing, target, add_slab, &sha, err));
        fsdp_sha256_value(&sha, cache->digests[target]);
        cache->known[target] = true;
    }
    fsdp_text_add_hex(text, cache->digests[target], FSDP_SHA256_SIZE);
    return FSDP_OK;
}

static fsdp_status print_digests(ls_listing *listing, digest_cache *cache, fsdp_text *text,
                                 fsdp_error *err)
{
    for (size_t i = 0; i < listing->count; i++) {
        const fsdp_entry *entry = fsdp_sd_at(listing->sd, listing->order[i]);
        if (entry->kind == FSDP_ENTRY_VALUE)
            continue;
        FSDP_TRY(add_tensor_digest(listing, cache, listing->order[i], text, err));
        fsdp_text_add(text, "  ", 2);
        cli_add_full_name(text, entry->name, entry->name_size);
        fsdp_text_add(text, "\n", 1);
        FSDP_TRY(cli_put(text));
    }
    return FSDP_OK;
}

fsdp_status ls_print_digests(ls_listing *listing, fsdp_text *text, fsdp_error *err)
{
    digest_cache cache = {0};
    fsdp_status st = cache_create(listing, &cache, err);
    if (st == FSDP_OK)
        st = print_digests(listing, &cache, text, err);
    cache_free(&cache);
    return st;
}

/* --- the listing ------------------------------------------------------------------------------ */

static void add_key(fsdp_text *text, const char *name, size_t size, bool *is_first)
{
    fsdp_text_addf(text, *is_first ? "\n  " : ",\n  ");
    *is_first = false;
    fsdp_text_add_json_string(text, name, size);
    fsdp_text_add(text, ": ", 2);
}

static void add_numbers(fsdp_text *text, int count, const int64_t *numbers)
{
    fsdp_text_add(text, "[", 1);
    for (int i = 0; i < count; i++)
        fsdp_text_addf(text, "%s%" PRId64, i > 0 ? ", " : "", numbers[i]);
    fsdp_text_add(text, "]", 1);
}

static void add_boxes(fsdp_text *text, const ls_listing *listing, const fsdp_entry *tensor)
{
    bool is_first = true;
    fsdp_text_addf(text, ", \"boxes\": [");
    for (int rank = 0; rank < listing->info->world; rank++) {
        size_t boxes = fsdp_layout_box_count(&tensor->layout, tensor->ndim, tensor->shape, rank);
        for (size_t i = 0; i < boxes; i++) {
            fsdp_box box;
            fsdp_layout_box(&tensor->layout, tensor->ndim, tensor->shape, rank, i, &box);
            fsdp_text_addf(text, "%s{\"rank\": %d, \"offset\": ", is_first ? "" : ", ", rank);
            add_numbers(text, box.ndim, box.lo);
            fsdp_text_addf(text, ", \"shape\": ");
            add_numbers(text, box.ndim, box.len);
            fsdp_text_add(text, "}", 1);
            is_first = false;
        }
    }
    fsdp_text_add(text, "]", 1);
}

static fsdp_status add_tensor(ls_listing *listing, digest_cache *cache, size_t number,
                              fsdp_text *text, fsdp_error *err)
{
    const fsdp_entry *tensor = ls_tensor(listing, fsdp_sd_at(listing->sd, number));
    int64_t shape[FSDP_MAX_DIMS];
    ls_shape(tensor, shape);
    fsdp_text_addf(text, "{\"dtype\": \"%s\", \"shape\": ", fsdp_dtype_name(tensor->dtype));
    add_numbers(text, tensor->ndim, shape);
    if (listing->options->digest) {
        fsdp_text_addf(text, ", \"sha256\": \"");
        FSDP_TRY(add_tensor_digest(listing, cache, number, text, err));
        fsdp_text_add(text, "\"", 1);
    }
    if (listing->options->mode == LS_SHARDS)
        add_boxes(text, listing, tensor);
    fsdp_text_add(text, "}", 1);
    return FSDP_OK;
}

static fsdp_status add_tensors(ls_listing *listing, digest_cache *cache, fsdp_text *text,
                               fsdp_error *err)
{
    bool is_first = true;
    fsdp_text_addf(text, " \"tensors\": {");
    for (size_t i = 0; i < listing->count; i++) {
        const fsdp_entry *entry = fsdp_sd_at(listing->sd, listing->order[i]);
        bool is_noted = entry->kind == FSDP_ENTRY_ALIAS && listing->info->format_major == 0;
        if (entry->kind == FSDP_ENTRY_VALUE || is_noted) /* a name in the metadata is no tensor */
            continue;
        add_key(text, entry->name, entry->name_size, &is_first);
        FSDP_TRY(add_tensor(listing, cache, listing->order[i], text, err));
        FSDP_TRY(cli_put(text));
    }
    fsdp_text_addf(text, "},\n");
    return FSDP_OK;
}

static fsdp_status add_values(ls_listing *listing, fsdp_text *text)
{
    bool is_first = true;
    fsdp_text_addf(text, " \"values\": {");
    for (size_t i = 0; i < listing->count; i++) {
        const fsdp_entry *entry = fsdp_sd_at(listing->sd, listing->order[i]);
        if (entry->kind != FSDP_ENTRY_VALUE)
            continue;
        add_key(text, entry->name, entry->name_size, &is_first);
        ls_add_value(listing, text, &entry->value);
        FSDP_TRY(cli_put(text));
    }
    fsdp_text_addf(text, "},\n");
    return FSDP_OK;
}

static fsdp_status add_aliases(ls_listing *listing, fsdp_text *text)
{
    bool is_first = true;
    fsdp_text_addf(text, " \"aliases\": {");
    for (size_t i = 0; i < listing->count; i++) {
        const fsdp_entry *entry = fsdp_sd_at(listing->sd, listing->order[i]);
        if (entry->kind != FSDP_ENTRY_ALIAS)
            continue;
        const fsdp_entry *target = fsdp_sd_at(listing->sd, entry->target);
        add_key(text, entry->name, entry->name_size, &is_first);
        fsdp_text_add_json_string(text, target->name, target->name_size);
        FSDP_TRY(cli_put(text));
    }
    fsdp_text_add(text, "}", 1);
    return FSDP_OK;
}

/* What other programs keep beside tensors and values. */
static void add_extras(const ls_listing *listing, fsdp_text *text)
{
    static const char *const members[] = {"metadata", "attributes", "soft_links"};
    for (size_t i = 0; i < sizeof members / sizeof *members; i++) {
        const char *json = fsdp_checkpoint_extra(listing->checkpoint, members[i]);
        if (json)
            fsdp_text_addf(text, ",\n \"%s\": %s", members[i], json);
    }
    fsdp_text_addf(text, "}\n");
}

static void add_files(const ls_listing *listing, fsdp_text *text)
{
    fsdp_text_addf(text, " \"files\": [");
    for (int i = 0; i < listing->info->file_count; i++) {
        fsdp_checkpoint_file file;
        fsdp_checkpoint_file_at(listing->checkpoint, i, &file);
        fsdp_text_addf(text, i > 0 ? ",\n  {\"name\": " : "\n  {\"name\": ");
        fsdp_text_add_json_string(text, file.name, strlen(file.name));
        fsdp_text_addf(text,
                       ", \"size\": %" PRId64 ", \"boxes\": %" PRId64 ", \"blocks\": %" PRId64 "}",
                       file.size, file.box_count, file.block_count);
    }
    fsdp_text_addf(text, "],\n");
}

static void add_head(const ls_listing *listing, fsdp_text *text)
{
    const fsdp_checkpoint_info *info = listing->info;
    fsdp_text_addf(text, "{\"schema\": 1, \"path\": ");
    fsdp_text_add_json_string(text, info->path, strlen(info->path));
    fsdp_text_addf(text, ", \"format\": \"%s\", \"format_version\": \"%d.%d\", \"kind\": \"%s\",\n",
                   info->format, info->format_major, info->format_minor, cli_kind(info->kind));
    fsdp_text_addf(text, " \"step\": ");
    if (info->step == FSDP_STEP_NONE)
        fsdp_text_addf(text, "null");
    else
        fsdp_text_addf(text, "%" PRId64, info->step);
    fsdp_text_addf(text, ", \"world_size\": %d, \"compressed\": %s, \"run\": \"", info->world,
                   info->compressed ? "true" : "false");
    fsdp_text_add_hex(text, info->run, sizeof info->run);
    fsdp_text_addf(text, "\",\n");
    if (info->compressed) {
        char plugin[4096];
        ls_plugin_path(plugin, sizeof plugin);
        fsdp_text_addf(text, " \"hdf5_plugin_path\": ");
        fsdp_text_add_json_string(text, plugin, strlen(plugin));
        fsdp_text_addf(text, ",\n");
    }
}

fsdp_status ls_print_json(ls_listing *listing, fsdp_text *text, fsdp_error *err)
{
    digest_cache cache = {0};
    fsdp_status st = cache_create(listing, &cache, err);
    add_head(listing, text);
    add_files(listing, text);
    if (st == FSDP_OK)
        st = add_tensors(listing, &cache, text, err);
    if (st == FSDP_OK)
        st = add_values(listing, text);
    if (st == FSDP_OK)
        st = add_aliases(listing, text);
    if (st == FSDP_OK)
        add_extras(listing, text);
    cache_free(&cache);
    if (st == FSDP_OK && listing->failure.status != FSDP_OK) {
        *err = listing->failure;
        st = err->status;
    }
    return st;
}
