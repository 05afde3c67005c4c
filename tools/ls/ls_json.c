/*
 * fsdp-ls for programs: the JSON listing and the list of digests, printed entry by entry, so that memory
 * does not grow with the tensors.
 */
#include "tools/ls/ls.h"
#include "base/text.h"

#include "kernels/digest.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

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

static fsdp_status add_slab(void *context, const fsdp_entry *entry, int64_t first, int64_t count,
                            const void *data, fsdp_error *err)
{
    (void)first;
    (void)err;
    fsdp_sha256_add(context, data, (size_t)count * fsdp_dtype_size(entry->dtype));
    return FSDP_OK;
}

static size_t target_of(const ls_listing *listing, size_t number)
{
    const fsdp_entry *entry = fsdp_sd_at(listing->sd, number);
    return entry->kind == FSDP_ENTRY_ALIAS ? entry->target : number;
}

/* number is of a tensor or an alias. */
static fsdp_status add_tensor_digest(ls_listing *listing, digest_cache *cache, size_t number,
                                     fsdp_text *text, fsdp_error *err)
{
    size_t target = target_of(listing, number);
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
    listing->plain_dicts = fsdp_format_from(listing->info->format)->caps.only_tensors;
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
    fsdp_text_add_json_shown(text, name, size);
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
            fsdp_layout_box_at(&tensor->layout, tensor->ndim, tensor->shape, rank, i, &box);
            box = ls_box(tensor, &box);
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

/* Places in other programs' files, which do not name the rank that saved a box. */
static void add_places(fsdp_text *text, const ls_listing *listing, size_t number)
{
    fsdp_box box;
    int in;
    fsdp_text_addf(text, ", \"boxes\": [");
    for (size_t i = 0; fsdp_checkpoint_stored_box_at(listing->checkpoint, number, i, &box, &in);
         i++) {
        fsdp_checkpoint_file file;
        fsdp_checkpoint_file_at(listing->checkpoint, in, &file);
        box = ls_box(fsdp_sd_at(listing->sd, number), &box);
        fsdp_text_addf(text, "%s{\"file\": ", i > 0 ? ", " : "");
        fsdp_text_add_json_shown(text, file.name, strlen(file.name));
        fsdp_text_addf(text, ", \"offset\": ");
        add_numbers(text, box.ndim, box.lo);
        fsdp_text_addf(text, ", \"shape\": ");
        add_numbers(text, box.ndim, box.len);
        fsdp_text_add(text, "}", 1);
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
    if (listing->options->mode == LS_SHARDS && listing->info->format_major == 0)
        add_places(text, listing, target_of(listing, number));
    else if (listing->options->mode == LS_SHARDS)
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
        bool is_noted = entry->kind == FSDP_ENTRY_ALIAS &&
                        fsdp_format_from(listing->info->format)->caps.notes_aliases;
        if (entry->kind == FSDP_ENTRY_VALUE ||
            is_noted) /* a name in the metadata is not a tensor */
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
        fsdp_text_add_json_shown(text, target->name, target->name_size);
        FSDP_TRY(cli_put(text));
    }
    fsdp_text_add(text, "}", 1);
    return FSDP_OK;
}

/* Members for data of other programs that is neither a tensor nor a value. */
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
        fsdp_text_add_json_shown(text, file.name, strlen(file.name));
        fsdp_text_addf(text,
                       ", \"size\": %" PRId64 ", \"boxes\": %" PRId64 ", \"blocks\": ", file.size,
                       file.box_count);
        if (listing->info->format_major > 0)
            fsdp_text_addf(text, "%" PRId64 "}", file.block_count);
        else
            fsdp_text_addf(text, "null}");
    }
    fsdp_text_addf(text, "],\n");
}

/* Other programs name no run. */
static void add_run(fsdp_text *text, const fsdp_checkpoint_info *info)
{
    if (info->format_major == 0) {
        fsdp_text_addf(text, "null");
        return;
    }
    fsdp_text_add(text, "\"", 1);
    fsdp_text_add_hex(text, info->run, sizeof info->run);
    fsdp_text_add(text, "\"", 1);
}

static void add_head(const ls_listing *listing, fsdp_text *text)
{
    const fsdp_checkpoint_info *info = listing->info;
    fsdp_text_addf(text, "{\"schema\": 1, \"path\": ");
    fsdp_text_add_json_shown(text, info->path, strlen(info->path));
    fsdp_text_addf(text, ", \"format\": \"%s\", \"format_version\": ", info->format);
    if (info->format_major > 0)
        fsdp_text_addf(text, "\"%d.%d\"", info->format_major, info->format_minor);
    else
        fsdp_text_addf(text, "null");
    fsdp_text_addf(text, ", \"kind\": \"%s\",\n \"step\": ", cli_kind(info->kind));
    if (info->step == FSDP_NO_STEP)
        fsdp_text_addf(text, "null");
    else
        fsdp_text_addf(text, "%" PRId64, info->step);
    fsdp_text_addf(text, ", \"world_size\": %d, \"compressed\": %s, \"run\": ", info->world,
                   info->compressed ? "true" : "false");
    add_run(text, info);
    fsdp_text_addf(text, ",\n");
    if (info->compressed) {
        char plugin[4096];
        ls_plugin_path(plugin, sizeof plugin);
        fsdp_text_addf(text, " \"hdf5_plugin_path\": ");
        fsdp_text_add_json_shown(text, plugin, strlen(plugin));
        fsdp_text_addf(text, ",\n");
    }
}

fsdp_status ls_print_json(ls_listing *listing, fsdp_text *text, fsdp_error *err)
{
    digest_cache cache = {0};
    listing->plain_dicts = fsdp_format_from(listing->info->format)->caps.only_tensors;
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
