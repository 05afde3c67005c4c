/* A listing: entries of an opened checkpoint, selected, sorted and read. See ls.h. */
#include "tools/ls/ls.h"

#include <fsdp/filter.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* --- entries ---------------------------------------------------------------------------------- */

const fsdp_entry *ls_tensor(const ls_listing *listing, const fsdp_entry *entry)
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

fsdp_status ls_select(ls_listing *listing, fsdp_error *err)
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

fsdp_status ls_stream(ls_listing *listing, size_t number, fsdp_slab_visit visit, void *context,
                      fsdp_error *err)
{
    counted_visit counted = {listing, visit, context};
    return fsdp_checkpoint_stream(listing->checkpoint, number, listing->options->common.memory,
                                  count_slab, &counted, err);
}

/* --- the plugin ------------------------------------------------------------------------------- */

static bool holds_plugin(const char *directory)
{
    char file[2500];
    snprintf(file, sizeof file, "%s/%s", directory, FSDP_PLUGIN_FILE);
    return access(file, R_OK) == 0;
}

/* In addition to the program: in the build tree, and where `cmake --install` puts both. */
void ls_plugin_path(char *out, size_t size)
{
    static const char *const places[] = {FSDP_PLUGIN_DIRS};
    char program[2048], path[2400];
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    out[0] = '\0';
    if (length <= 0)
        return;
    program[length] = '\0';
    *strrchr(program, '/') = '\0';
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        snprintf(path, sizeof path, "%s/%s", program, places[i]);
        char *clean = holds_plugin(path) ? realpath(path, NULL) : NULL;
        if (clean && strlen(clean) < size)
            memcpy(out, clean, strlen(clean) + 1);
        free(clean);
        if (out[0])
            return;
    }
}
