/*
 * fsdp-ls: lists the entries of a checkpoint and the ranks that hold them. Opens it, selects and sorts the
 * entries, and prints them one by one, for people or for programs, or as a summary (ls_summary.c).
 */
#include "tools/ls/ls.h"
#include "base/text.h"
#include "base/values_shape.h"
#include "kernels/digest.h"
#include <fsdp/filter.h>
#include <fsdp/stats.h>

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* === the listing ============================================================================== */

/* The tensor that an entry is or names; NULL for a value. */
static const fsdp_entry *tensor_of(const ls_listing *listing, const fsdp_entry *entry)
{
    if (entry->kind == FSDP_ENTRY_ALIAS)
        return fsdp_sd_at(listing->sd, entry->target);
    return entry->kind == FSDP_ENTRY_TENSOR ? entry : NULL;
}

static int64_t listed_bytes(const ls_listing *listing, size_t number)
{
    const fsdp_entry *entry = fsdp_sd_at(listing->sd, number);
    return entry->kind == FSDP_ENTRY_TENSOR ? fsdp_entry_bytes(entry) : -1;
}

static int by_size(const void *left, const void *right, void *context)
{
    size_t a = *(const size_t *)left, b = *(const size_t *)right;
    int64_t bytes_a = listed_bytes(context, a), bytes_b = listed_bytes(context, b);
    if (bytes_a != bytes_b)
        return bytes_a > bytes_b ? -1 : 1;
    return a < b ? -1 : a > b;
}

/* Components of names, numbers by their value: layers.2 comes before layers.10. */
static int compare_components(const char *a, size_t size_a, const char *b, size_t size_b)
{
    bool number_a = strspn(a, "0123456789") >= size_a && size_a > 0;
    bool number_b = strspn(b, "0123456789") >= size_b && size_b > 0;
    if (number_a != number_b)
        return number_a ? -1 : 1;
    if (number_a && size_a != size_b)
        return size_a < size_b ? -1 : 1;
    int order = memcmp(a, b, size_a < size_b ? size_a : size_b);
    return order != 0 ? order : (size_a > size_b) - (size_a < size_b);
}

static size_t component_size(const char *data, size_t size)
{
    const char *dot = memchr(data, '.', size);
    return dot ? (size_t)(dot - data) : size;
}

static int by_name(const void *left, const void *right, void *context)
{
    const ls_listing *listing = context;
    const fsdp_entry *a = fsdp_sd_at(listing->sd, *(const size_t *)left);
    const fsdp_entry *b = fsdp_sd_at(listing->sd, *(const size_t *)right);
    size_t at_a = 0, at_b = 0;
    while (at_a <= a->name_size && at_b <= b->name_size) {
        size_t size_a = component_size(a->name + at_a, a->name_size - at_a);
        size_t size_b = component_size(b->name + at_b, b->name_size - at_b);
        int order = compare_components(a->name + at_a, size_a, b->name + at_b, size_b);
        if (order != 0)
            return order;
        at_a += size_a + 1;
        at_b += size_b + 1;
    }
    return (a->name_size > b->name_size) - (a->name_size < b->name_size);
}

/* Sets the order: the entries that the options select, sorted. */
static fsdp_status select_entries(ls_listing *listing, fsdp_error *err)
{
    const cli_common *common = &listing->options->common;
    size_t count = fsdp_sd_count(listing->sd);
    fsdp_filter *filter = NULL;
    listing->order = calloc(count + 1, sizeof *listing->order);
    if (!listing->order)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "cannot allocate memory for %zu names", count);
    FSDP_TRY(fsdp_filter_create(common->include, common->exclude, &filter, err));
    for (size_t i = 0; i < count; i++) {
        const fsdp_entry *entry = fsdp_sd_at(listing->sd, i);
        if (!fsdp_filter_selects(filter, entry->name, entry->name_size))
            continue;
        listing->order[listing->count++] = i;
        if (entry->kind == FSDP_ENTRY_TENSOR)
            listing->total += fsdp_entry_bytes(entry);
    }
    fsdp_filter_free(filter);
    if (listing->options->sort == LS_SORT_NAME)
        qsort_r(listing->order, listing->count, sizeof *listing->order, by_name, listing);
    if (listing->options->sort == LS_SORT_SIZE)
        qsort_r(listing->order, listing->count, sizeof *listing->order, by_size, listing);
    return FSDP_OK;
}

/* --- reading ---------------------------------------------------------------------------------- */

typedef struct counted_visit {
    ls_listing *listing;
    fsdp_slab_visit visit;
    void *context;
} counted_visit;

static fsdp_status count_slab(void *context, const fsdp_entry *entry, int64_t first, int64_t count,
                              const void *data, fsdp_error *err)
{
    counted_visit *counted = context;
    ls_listing *listing = counted->listing;
    char name[160];
    FSDP_TRY(counted->visit(counted->context, entry, first, count, data, err));
    listing->done += count * (int64_t)fsdp_dtype_size(entry->dtype);
    fsdp_printable(entry->name, entry->name_size, name, sizeof name);
    listing->watch.progress(listing->watch.context, listing->done, listing->total, name);
    return cli_check_stop(err);
}

/* Reads a whole tensor in slabs and reports progress. */
static fsdp_status stream_tensor(ls_listing *listing, size_t number, fsdp_slab_visit visit,
                                 void *context, fsdp_error *err)
{
    counted_visit counted = {listing, visit, context};
    return fsdp_checkpoint_stream(listing->checkpoint, number, listing->options->common.memory,
                                  count_slab, &counted, err);
}

/* --- the plugin ------------------------------------------------------------------------------- */

/* === for people =============================================================================== */

/* fsdp-ls entry by entry: --long, --shards, --tree, --config. */

enum { NAME_WIDTH = 48, VALUE_WIDTH = 100 };

/* A value on one line of a terminal, cut when it is long. */
static void add_short_value(ls_listing *listing, fsdp_text *text, const fsdp_value *value)
{
    char shown[VALUE_WIDTH];
    fsdp_text json = {0};
    ls_add_value(listing, &json, value);
    if (json.failed)
        text->failed = true;
    else
        cli_add_padded(text, fsdp_printable(json.data, json.size, shown, sizeof shown), 0);
    fsdp_text_release(&json);
}

static void add_padded_name(fsdp_text *text, const fsdp_entry *entry)
{
    size_t before = text->size;
    cli_add_name(text, entry->name, entry->name_size);
    for (size_t used = text->size - before; used < NAME_WIDTH; used++)
        fsdp_text_add(text, " ", 1);
    fsdp_text_add(text, "  ", 2);
}

static void add_tensor_columns(fsdp_text *text, const fsdp_entry *tensor)
{
    char number[CLI_NUMBER];
    fsdp_text words = {0};
    int64_t shape[FSDP_MAX_DIMS];
    ls_shape(tensor, shape);
    cli_add_shape(&words, tensor->ndim, shape);
    fsdp_text_addf(text, "%-8s  %-18s  %10s  ", fsdp_dtype_name(tensor->dtype),
                   words.data ? words.data : "", cli_bytes(fsdp_entry_bytes(tensor), number));
    fsdp_text_release(&words);
}

static void add_long_entry(fsdp_text *text, ls_listing *listing, size_t number)
{
    const fsdp_entry *entry = fsdp_sd_at(listing->sd, number);
    add_padded_name(text, entry);
    switch (entry->kind) {
    case FSDP_ENTRY_TENSOR:
        add_tensor_columns(text, entry);
        ls_add_layout(text, listing, number);
        break;
    case FSDP_ENTRY_VALUE:
        fsdp_text_addf(text, "value     ");
        add_short_value(listing, text, &entry->value);
        break;
    case FSDP_ENTRY_ALIAS: {
        const fsdp_entry *target = tensor_of(listing, entry);
        fsdp_text_addf(text, "alias     ");
        cli_add_name(text, target->name, target->name_size);
        break;
    }
    }
    fsdp_text_add(text, "\n", 1);
}

static fsdp_status print_long(ls_listing *listing, fsdp_text *text)
{
    for (size_t i = 0; i < listing->count; i++) {
        add_long_entry(text, listing, listing->order[i]);
        FSDP_TRY(cli_put(text));
    }
    return FSDP_OK;
}

/* A box of a tensor, in values as ls_shape counts blocks. */
static fsdp_box in_values(const fsdp_entry *tensor, const fsdp_box *box)
{
    fsdp_box shown = *box;
    fsdp_dtype_to_values(tensor->dtype, box->ndim, box->lo, shown.lo);
    fsdp_dtype_to_values(tensor->dtype, box->ndim, box->len, shown.len);
    return shown;
}

/* --- shards ----------------------------------------------------------------------------------- */

/* "[0:288, 0:768]" */
static void add_box(fsdp_text *text, const fsdp_entry *tensor, const fsdp_box *stored)
{
    const fsdp_box shown = in_values(tensor, stored), *box = &shown;
    fsdp_text_add(text, "[", 1);
    for (int d = 0; d < box->ndim; d++)
        fsdp_text_addf(text, "%s%" PRId64 ":%" PRId64, d > 0 ? ", " : "", box->lo[d],
                       box->lo[d] + box->len[d]);
    fsdp_text_add(text, "]", 1);
}

static bool same_boxes(const fsdp_entry *tensor, int a, int b)
{
    size_t count = fsdp_layout_box_count(&tensor->layout, tensor->ndim, tensor->shape, a);
    if (fsdp_layout_box_count(&tensor->layout, tensor->ndim, tensor->shape, b) != count)
        return false;
    for (size_t i = 0; i < count; i++) {
        fsdp_box box_a, box_b;
        fsdp_layout_box_at(&tensor->layout, tensor->ndim, tensor->shape, a, i, &box_a);
        fsdp_layout_box_at(&tensor->layout, tensor->ndim, tensor->shape, b, i, &box_b);
        if (!fsdp_box_equal(&box_a, &box_b))
            return false;
    }
    return true;
}

/* A line for ranks first..last, which hold the same box. */
static void add_ranks(fsdp_text *text, const fsdp_entry *tensor, int first, int last)
{
    char number[CLI_NUMBER], ranks[CLI_NUMBER];
    size_t count = fsdp_layout_box_count(&tensor->layout, tensor->ndim, tensor->shape, first);
    if (count == 0)
        return;
    if (first == last)
        snprintf(ranks, sizeof ranks, "rank %d", first);
    else
        snprintf(ranks, sizeof ranks, "ranks %d-%d", first, last);
    fsdp_text_addf(text, "  %-12s  %10s ", ranks,
                   cli_bytes(fsdp_entry_local_bytes(tensor, first), number));
    for (size_t i = 0; i < count; i++) {
        fsdp_box box;
        fsdp_layout_box_at(&tensor->layout, tensor->ndim, tensor->shape, first, i, &box);
        fsdp_text_add(text, " ", 1);
        add_box(text, tensor, &box);
    }
    fsdp_text_add(text, "\n", 1);
}

/* Places in other programs' files, which do not name the rank that saved a box. */
static void add_places(fsdp_text *text, const ls_listing *listing, size_t number)
{
    const fsdp_entry *tensor = fsdp_sd_at(listing->sd, number);
    fsdp_box box;
    char bytes[CLI_NUMBER];
    int in;
    for (size_t i = 0; fsdp_checkpoint_stored_box_at(listing->checkpoint, number, i, &box, &in);
         i++) {
        fsdp_checkpoint_file file;
        int64_t size = fsdp_box_count(&box) * (int64_t)fsdp_dtype_size(tensor->dtype);
        fsdp_checkpoint_file_at(listing->checkpoint, in, &file);
        fsdp_text_addf(text, "  ");
        cli_add_message(text, file.name);
        fsdp_text_addf(text, "  %10s  ", cli_bytes(size, bytes));
        add_box(text, tensor, &box);
        fsdp_text_add(text, "\n", 1);
    }
}

static void add_holders(fsdp_text *text, const ls_listing *listing, size_t number)
{
    const fsdp_entry *tensor = fsdp_sd_at(listing->sd, number);
    int first = 0;
    add_padded_name(text, tensor);
    add_tensor_columns(text, tensor);
    cli_end_line(text);
    if (listing->info->format_major == 0) {
        add_places(text, listing, number);
        return;
    }
    for (int rank = 1; rank <= listing->info->world; rank++) {
        if (rank < listing->info->world && same_boxes(tensor, first, rank))
            continue;
        add_ranks(text, tensor, first, rank - 1);
        first = rank;
    }
}

static void add_file(fsdp_text *text, const ls_listing *listing, int number)
{
    fsdp_checkpoint_file file;
    char words[CLI_NUMBER];
    fsdp_checkpoint_file_at(listing->checkpoint, number, &file);
    cli_add_message(text, file.name);
    fsdp_text_addf(text, "  %10s  ", cli_bytes(file.size, words));
    if (listing->info->format_major == 0)
        fsdp_text_addf(text, "%" PRId64 " %s\n", file.box_count,
                       file.box_count == 1 ? "box" : "boxes");
    else
        fsdp_text_addf(text, "%" PRId64 " boxes, %" PRId64 " blocks\n", file.box_count,
                       file.block_count);
}

static fsdp_status print_shards(ls_listing *listing, fsdp_text *text)
{
    for (int i = 0; i < listing->info->file_count; i++) {
        add_file(text, listing, i);
        FSDP_TRY(cli_put(text));
    }
    for (size_t i = 0; i < listing->count; i++) {
        const fsdp_entry *entry = fsdp_sd_at(listing->sd, listing->order[i]);
        if (entry->kind == FSDP_ENTRY_TENSOR)
            add_holders(text, listing, listing->order[i]);
        FSDP_TRY(cli_put(text));
    }
    return FSDP_OK;
}

/* --- tree ------------------------------------------------------------------------------------- */

/* Bytes at the beginning of name that make up whole components shared with before. */
static size_t shared_components(const fsdp_entry *name, const fsdp_entry *before)
{
    size_t shared = 0;
    for (size_t i = 0; before && i < name->name_size && i < before->name_size; i++) {
        if (name->name[i] != before->name[i])
            break;
        if (name->name[i] == '.')
            shared = i + 1;
    }
    return shared;
}

static void add_indent(fsdp_text *text, int depth)
{
    fsdp_text_addf(text, "%*s", 2 * depth, "");
}

static void add_leaf(fsdp_text *text, ls_listing *listing, const fsdp_entry *entry)
{
    char number[CLI_NUMBER];
    const fsdp_entry *tensor = tensor_of(listing, entry);
    fsdp_text_add(text, "  ", 2);
    if (entry->kind == FSDP_ENTRY_VALUE) {
        fsdp_text_add(text, "= ", 2);
        add_short_value(listing, text, &entry->value);
    } else if (entry->kind == FSDP_ENTRY_ALIAS) {
        fsdp_text_add(text, "-> ", 3);
        cli_add_name(text, tensor->name, tensor->name_size);
    } else {
        int64_t shape[FSDP_MAX_DIMS];
        ls_shape(tensor, shape);
        fsdp_text_addf(text, "%s ", fsdp_dtype_name(tensor->dtype));
        cli_add_shape(text, tensor->ndim, shape);
        fsdp_text_addf(text, " %s", cli_bytes(fsdp_entry_bytes(tensor), number));
    }
    fsdp_text_add(text, "\n", 1);
}

static void add_branch(fsdp_text *text, ls_listing *listing, const fsdp_entry *entry,
                       const fsdp_entry *before)
{
    size_t start = 0, shared = shared_components(entry, before);
    int depth = 0;
    for (size_t i = 0; i < entry->name_size; i++) {
        if (entry->name[i] != '.')
            continue;
        if (i >= shared) {
            add_indent(text, depth);
            cli_add_name(text, entry->name + start, i - start);
            fsdp_text_add(text, "\n", 1);
        }
        depth++;
        start = i + 1;
    }
    add_indent(text, depth);
    cli_add_name(text, entry->name + start, entry->name_size - start);
    add_leaf(text, listing, entry);
}

static fsdp_status print_tree(ls_listing *listing, fsdp_text *text)
{
    const fsdp_entry *before = NULL;
    for (size_t i = 0; i < listing->count; i++) {
        const fsdp_entry *entry = fsdp_sd_at(listing->sd, listing->order[i]);
        add_branch(text, listing, entry, before);
        before = entry;
        FSDP_TRY(cli_put(text));
    }
    return FSDP_OK;
}

/* --- values ----------------------------------------------------------------------------------- */

static fsdp_status print_config(ls_listing *listing, fsdp_text *text)
{
    for (size_t i = 0; i < listing->count; i++) {
        const fsdp_entry *entry = fsdp_sd_at(listing->sd, listing->order[i]);
        if (entry->kind != FSDP_ENTRY_VALUE)
            continue;
        cli_add_full_name(text, entry->name, entry->name_size);
        fsdp_text_addf(text, " = ");
        ls_add_value(listing, text, &entry->value);
        fsdp_text_add(text, "\n", 1);
        FSDP_TRY(cli_put(text));
    }
    return FSDP_OK;
}

/* === for programs ============================================================================= */

/*
 * fsdp-ls for programs: the JSON listing and the list of digests, printed entry by entry, so that memory
 * does not grow with the tensors.
 */

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

static fsdp_status digest_slab(void *context, const fsdp_entry *entry, int64_t first, int64_t count,
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
        FSDP_TRY(stream_tensor(listing, target, digest_slab, &sha, err));
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

static fsdp_status print_sums(ls_listing *listing, fsdp_text *text, fsdp_error *err)
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
            box = in_values(tensor, &box);
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
static void add_places_json(fsdp_text *text, const ls_listing *listing, size_t number)
{
    fsdp_box box;
    int in;
    fsdp_text_addf(text, ", \"boxes\": [");
    for (size_t i = 0; fsdp_checkpoint_stored_box_at(listing->checkpoint, number, i, &box, &in);
         i++) {
        fsdp_checkpoint_file file;
        fsdp_checkpoint_file_at(listing->checkpoint, in, &file);
        box = in_values(fsdp_sd_at(listing->sd, number), &box);
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
    const fsdp_entry *tensor = tensor_of(listing, fsdp_sd_at(listing->sd, number));
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
        add_places_json(text, listing, target_of(listing, number));
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

static fsdp_status print_json(ls_listing *listing, fsdp_text *text, fsdp_error *err)
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

/* === stats ==================================================================================== */

/* fsdp-ls --stats, --hist: reads every floating tensor and prints statistics of its numbers. */

static fsdp_status add_slab(void *context, const fsdp_entry *entry, int64_t first, int64_t count,
                            const void *data, fsdp_error *err)
{
    (void)first;
    (void)err;
    fsdp_stats_add(context, entry->dtype, data, count);
    return FSDP_OK;
}

static void add_line(fsdp_text *text, const fsdp_entry *entry, const fsdp_stats *stats)
{
    char name[64];
    fsdp_printable(entry->name, entry->name_size, name, sizeof name);
    fsdp_text_addf(text, "%-48s  %-8s", name, fsdp_dtype_name(entry->dtype));
    if (stats->finite > 0)
        fsdp_text_addf(text, "  min %-12.6g max %-12.6g mean %-12.6g zeros %" PRId64, stats->min,
                       stats->max, stats->sum / (double)stats->finite, stats->zeros);
    if (stats->nans > 0)
        fsdp_text_addf(text, "  NaN %" PRId64, stats->nans);
    if (stats->infinities > 0)
        fsdp_text_addf(text, "  Inf %" PRId64, stats->infinities);
    cli_end_line(text);
}

/* One character per bin, as high as the logarithm of its count; counts of zeros, NaN and Inf follow. */
static void add_histogram(fsdp_text *text, const fsdp_entry *entry, const fsdp_stats *stats)
{
    static const char *const bars[] = {" ",      "\u2581", "\u2582", "\u2583", "\u2584",
                                       "\u2585", "\u2586", "\u2587", "\u2588"};
    char name[64];
    int64_t most = 1;
    fsdp_printable(entry->name, entry->name_size, name, sizeof name);
    for (int i = 0; i < FSDP_STATS_BINS; i++)
        most = stats->magnitudes[i] > most ? stats->magnitudes[i] : most;
    fsdp_text_addf(text, "%-48s  %-8s  |", name, fsdp_dtype_name(entry->dtype));
    for (int i = 0; i < FSDP_STATS_BINS; i++) {
        double part = log1p((double)stats->magnitudes[i]) / log1p((double)most);
        fsdp_text_addf(text, "%s", bars[(int)ceil(8 * part)]);
    }
    fsdp_text_addf(text, "|  zeros %" PRId64, stats->zeros);
    if (stats->nans > 0)
        fsdp_text_addf(text, "  NaN %" PRId64, stats->nans);
    if (stats->infinities > 0)
        fsdp_text_addf(text, "  Inf %" PRId64, stats->infinities);
    fsdp_text_add(text, "\n", 1);
}

static fsdp_status print_stats(ls_listing *listing, fsdp_text *text, fsdp_error *err)
{
    if (listing->options->mode == LS_HIST)
        fsdp_text_addf(text, "%-58s  |2^%d .. 2^%d, 2^%d a column, heights logarithmic|\n", "",
                       FSDP_STATS_LOWEST, FSDP_STATS_LOWEST + FSDP_STATS_BINS * FSDP_STATS_STEP,
                       FSDP_STATS_STEP);
    for (size_t i = 0; i < listing->count; i++) {
        const fsdp_entry *entry = fsdp_sd_at(listing->sd, listing->order[i]);
        fsdp_stats stats = {0};
        if (entry->kind != FSDP_ENTRY_TENSOR || !fsdp_dtype_describe(entry->dtype)->is_float)
            continue;
        FSDP_TRY(stream_tensor(listing, listing->order[i], add_slab, &stats, err));
        if (listing->options->mode == LS_HIST)
            add_histogram(text, entry, &stats);
        else
            add_line(text, entry, &stats);
        FSDP_TRY(cli_put(text));
    }
    return FSDP_OK;
}

/* === the tool ================================================================================= */

/* --- options ---------------------------------------------------------------------------------- */

enum {
    KEY_SHARDS = 0x2000,
    KEY_TREE,
    KEY_CONFIG,
    KEY_STATS,
    KEY_HIST,
    KEY_DIGEST,
    KEY_SORT,
    KEY_MAP,
    KEY_SIZE,
    KEY_VARIANT
};

static const struct argp_option options[] = {
    {"long", 'l', NULL, 0, "show one line per entry", 0},
    {"shards", KEY_SHARDS, NULL, 0, "show files, and the boxes that each rank holds", 0},
    {"tree", KEY_TREE, NULL, 0, "show names as a tree", 0},
    {"config", KEY_CONFIG, NULL, 0, "show the values that are not tensors", 0},
    {"stats", KEY_STATS, NULL, 0, "read the data: min, max, mean, NaN, Inf of float tensors", 0},
    {"hist", KEY_HIST, NULL, 0, "read the data: magnitudes of float tensors", 0},
    {"digest", KEY_DIGEST, "sha256", 0, "read the data: digests of whole tensors", 0},
    {"sort", KEY_SORT, "KEY", 0, "sort by order (as saved), name or size", 0},
    {"map", KEY_MAP, "MAP", 0, "show the names of another framework, as in fsdp-convert", 0},
    {"size", KEY_SIZE, "NAME=N", 0, "give a size that the map needs, such as heads=32", 0},
    {"variant", KEY_VARIANT, "NAME", 0, "read the files model.NAME.safetensors of PATH", 0},
    {0}};

static const char *const sort_keys[] = {
    [LS_SORT_ORDER] = "order", [LS_SORT_NAME] = "name", [LS_SORT_SIZE] = "size", NULL};
static const char *const digests[] = {"sha256", NULL};
static const cli_words words[] = {{"sort", sort_keys}, {"digest", digests}, {0}};

static void set_mode(ls_options *opts, ls_mode mode)
{
    if (opts->mode != LS_SUMMARY && opts->mode != mode)
        cli_usage_error("only one of --long, --shards, --tree, --config, --stats can be shown");
    opts->mode = mode;
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    ls_options *opts = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        for (int i = 0; i < CLI_CHILDREN; i++)
            state->child_inputs[i] = &opts->common;
        opts->paths = calloc((size_t)state->argc + 1, sizeof *opts->paths);
        opts->map.sizes = opts->sizes = calloc((size_t)state->argc + 1, sizeof *opts->sizes);
        return opts->paths && opts->sizes ? 0 : ENOMEM;
    case 'l': set_mode(opts, LS_LONG); return 0;
    case KEY_SHARDS: set_mode(opts, LS_SHARDS); return 0;
    case KEY_TREE: set_mode(opts, LS_TREE); return 0;
    case KEY_CONFIG: set_mode(opts, LS_CONFIG); return 0;
    case KEY_STATS: set_mode(opts, LS_STATS); return 0;
    case KEY_HIST: set_mode(opts, LS_HIST); return 0;
    case KEY_SORT:
        opts->sort = (ls_sort)cli_parse_word("--sort", arg, sort_keys);
        opts->sort_given = true;
        return 0;
    case KEY_MAP: opts->map.map = arg; return 0;
    case KEY_VARIANT: opts->variant = arg; return 0;
    case KEY_SIZE: opts->sizes[opts->map.size_count++] = arg; return 0;
    case KEY_DIGEST:
        if (strcmp(arg, "sha256") != 0)
            cli_usage_error("--digest '%s' is unknown; use sha256", arg);
        opts->digest = true;
        return 0;
    case ARGP_KEY_ARG: opts->paths[opts->path_count++] = arg; return 0;
    case ARGP_KEY_END:
        if (opts->path_count == 0)
            cli_usage_error("PATH is missing");
        if (opts->map.size_count > 0 && !opts->map.map)
            cli_usage_error("--size gives a number to a map; add --map");
        if (opts->mode == LS_SUMMARY)
            opts->mode = opts->usual;
        if (opts->mode == LS_TREE && !opts->sort_given)
            opts->sort = LS_SORT_NAME; /* so that every branch is printed once */
        return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp argp = {.options = options, .parser = parse, .children = cli_children};

static const cli_tool tool = {
    .name = "fsdp-ls",
    .args = "PATH...",
    .summary = "Lists the contents of checkpoints, and the ranks that hold them.",
    .examples = "  fsdp-ls runs/gpt2                        newest good checkpoint of a run\n"
                "  fsdp-ls --long --sort size step-00001200 every tensor, largest first\n"
                "  fsdp-ls --shards -I 'attn' step-00001200 which rank holds which rows\n"
                "  fsdp-ls --json --digest sha256 step-00001200 > listing.json\n",
    .argp = &argp,
    .words = words};

/* fsdp-inspect is this program under another name. */
static const cli_tool inspect_tool = {
    .name = "fsdp-inspect",
    .args = "PATH...",
    .summary = "Lists the entries of checkpoints, one per line: short for fsdp-ls --long.",
    .examples = "  fsdp-inspect step-00001200               names, dtypes, shapes, layouts\n"
                "  fsdp-inspect runs/gpt2 -I 'attn'         of the newest good one of a run\n"
                "  fsdp-inspect --shards step-00001200      all that fsdp-ls can show\n",
    .argp = &argp,
    .words = words};

static bool is_inspect(const char *program)
{
    const char *slash = strrchr(program, '/');
    return strcmp(slash ? slash + 1 : program, inspect_tool.name) == 0;
}

/* --- the whole -------------------------------------------------------------------------------- */

static fsdp_status print_entries(ls_listing *listing, fsdp_text *text, fsdp_error *err)
{
    const ls_options *opts = listing->options;
    if (opts->common.json)
        return print_json(listing, text, err);
    if (opts->digest)
        return print_sums(listing, text, err);
    switch (opts->mode) {
    case LS_SUMMARY: return ls_print_summary(listing, text);
    case LS_LONG: return print_long(listing, text);
    case LS_SHARDS: return print_shards(listing, text);
    case LS_TREE: return print_tree(listing, text);
    case LS_CONFIG: return print_config(listing, text);
    case LS_STATS:
    case LS_HIST: return print_stats(listing, text, err);
    }
    return FSDP_OK;
}

/* Lists one path; heading has what stands above, or is empty. */
static fsdp_status list_path(ls_listing *listing, const char *path, const fsdp_text *heading,
                             fsdp_text *text, fsdp_error *err)
{
    const ls_options *opts = listing->options;
    listing->watch = cli_watch(&opts->common);
    const fsdp_open_opts open = {
        .variant = opts->variant, .whole = true, .as_stored = true, .memory = opts->common.memory};
    FSDP_TRY(cli_open_checkpoint(path, &open, &listing->watch, &listing->checkpoint, err));
    if (opts->map.map)
        FSDP_TRY(fsdp_checkpoint_map(&listing->checkpoint, &opts->map, err));
    listing->info = fsdp_checkpoint_describe(listing->checkpoint);
    listing->sd = fsdp_checkpoint_sd(listing->checkpoint);
    FSDP_TRY(select_entries(listing, err));
    if (listing->count == 0 && fsdp_sd_count(listing->sd) > 0)
        return fsdp_fail(err, FSDP_DIFFERS, "no name in '%s' matches", listing->info->path);
    if (opts->digest)
        FSDP_TRY(
            fsdp_checkpoint_check(listing->checkpoint, opts->common.jobs, &listing->watch, err));
    if (heading->size > 0)
        fsdp_text_add(text, heading->data, heading->size);
    return print_entries(listing, text, err);
}

/* Text of JSON is dropped after a failure, text for people is printed as far as it came. */
static fsdp_status list(const ls_options *opts, const char *path, const fsdp_text *heading,
                        fsdp_text *text, fsdp_error *err)
{
    ls_listing listing = {.options = opts};
    fsdp_status st = list_path(&listing, path, heading, text, err);
    if (st != FSDP_OK)
        cli_drop(text);
    fsdp_checkpoint_close(listing.checkpoint);
    free(listing.order);
    return st;
}

static fsdp_status list_only(const ls_options *opts, fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_status st = list(opts, opts->paths[0], &(fsdp_text){0}, &text, err);
    fsdp_status put = cli_put_all(&text);
    return st != FSDP_OK ? st : put;
}

/* Prints an element of "paths": the object of one path alone, or its error. */
static void add_element(fsdp_text *all, const char *path, fsdp_text *text, fsdp_status status,
                        const fsdp_error *err)
{
    fsdp_text_addf(all, all->data[all->size - 1] == '[' ? "\n" : ",\n");
    if (status == FSDP_OK) {
        fsdp_text_add(all, text->data, text->size - 1); /* without its end of line */
        return;
    }
    fsdp_text_addf(all, "{\"path\": ");
    fsdp_text_add_json_shown(all, path, strlen(path));
    fsdp_text_addf(all, ", ");
    cli_add_json_error(all, status, err);
    fsdp_text_addf(all, "}");
}

/* A path that fails does not hide the others: the worst outcome is the program's. */
static fsdp_status list_all(const ls_options *opts)
{
    fsdp_status worst = FSDP_OK, put = FSDP_OK;
    fsdp_text all = {0};
    bool is_json = opts->common.json, is_first = true;
    fsdp_text_addf(&all, "{\"schema\": 1, \"paths\": [");
    for (int i = 0; i < opts->path_count && put == FSDP_OK && !cli_stopped(); i++) {
        fsdp_text heading = {0}, text = {0};
        fsdp_error err = {0};
        if (!is_json) {
            /* "PATH:" above the listing, after an empty line below the one before it. */
            fsdp_text_addf(&heading, is_first ? "" : "\n");
            cli_add_message(&heading, opts->paths[i]);
            fsdp_text_addf(&heading, ":\n");
        }
        fsdp_status st = list(opts, opts->paths[i], &heading, &text, &err);
        is_first = is_first && text.size == 0;
        cli_progress_clear();
        if (is_json && !all.failed && !text.failed)
            add_element(&all, opts->paths[i], &text, st, &err);
        else if (!is_json)
            put = cli_put_all(&text);
        if (st != FSDP_ERR_CANCELLED)
            cli_report(&err);
        all.failed = all.failed || text.failed || heading.failed;
        worst = st > worst ? st : worst;
        fsdp_text_release(&text);
        fsdp_text_release(&heading);
    }
    fsdp_text_addf(&all, "\n]}\n");
    if (is_json)
        put = cli_put_end(&all);
    fsdp_text_release(&all);
    return worst == FSDP_OK ? put : worst;
}

int main(int argc, char **argv)
{
    ls_options opts = {0};
    fsdp_error err = {0};
    bool inspect = argc > 0 && is_inspect(argv[0]);
    opts.usual = inspect ? LS_LONG : LS_SUMMARY;
    cli_begin(inspect ? &inspect_tool : &tool, argc, argv, &opts);
    bool is_one = opts.path_count == 1;
    fsdp_status st = is_one ? list_only(&opts, &err) : list_all(&opts);
    free(opts.paths);
    free(opts.sizes);
    return cli_end(st, is_one ? &err : NULL);
}
