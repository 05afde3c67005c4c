/*
 * The missing parts of a source: files that do not exist, and the entries that are incomplete
 * without them. See fsdp_source_opts in source.h.
 */
#include "formats/source/source_internal.h"

#include <stdlib.h>
#include <string.h>

void fsdp_source_tolerate(fsdp_source *source, const fsdp_source_opts *opts)
{
    if (opts)
        source->tolerance = *opts;
}

bool fsdp_source_tolerates(const fsdp_source *source)
{
    return source->tolerance.may_lack != NULL;
}

static bool may_lack(const fsdp_source *source, const char *name, size_t size)
{
    const fsdp_source_opts *opts = &source->tolerance;
    return opts->may_lack && opts->may_lack(opts->context, name, size);
}

static fsdp_status keep(fsdp_source *source, const char *name, size_t size, fsdp_error *err)
{
    const char *copy = fsdp_arena_strndup(&source->arena, name, size);
    if (!copy || !fsdp_grow(&source->missing, &source->missing_room, source->missing_count + 1,
                            sizeof *source->missing))
        return fsdp_fail_memory(err, "the list of what is missing");
    source->missing[source->missing_count].name = copy;
    source->missing[source->missing_count++].size = size;
    return FSDP_OK;
}

fsdp_status fsdp_source_add_missing(fsdp_source *source, const char *name, size_t name_size,
                                    const char *file, fsdp_error *err)
{
    char shown[FSDP_NAME_SHOWN];
    if (may_lack(source, name, name_size))
        return keep(source, name, name_size, err);
    fsdp_printable(name, name_size, shown, sizeof shown);
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s' is not whole: '%s' is not there%s%s%s, and --allow-missing does not "
                     "match its name",
                     source->path, file ? file : shown, file ? ", which holds '" : "",
                     file ? shown : "", file ? "'" : "");
}

fsdp_status fsdp_source_let_go(fsdp_source *source, size_t number, bool *may_out, fsdp_error *err)
{
    fsdp_source_tensor *tensor = &source->tensors[number];
    *may_out = !tensor->is_inner && may_lack(source, tensor->name, tensor->name_size);
    if (!*may_out)
        return FSDP_OK;
    tensor->is_missing = true;
    return keep(source, tensor->name, tensor->name_size, err);
}

static int compare_missing(const void *a, const void *b)
{
    const missing_entry *x = a, *y = b;
    size_t size = x->size < y->size ? x->size : y->size;
    int order = size > 0 ? memcmp(x->name, y->name, size) : 0;
    return order != 0 ? order : (x->size > y->size) - (x->size < y->size);
}

void fsdp_source_sort_missing(fsdp_source *source)
{
    if (source->missing_count > 1)
        qsort(source->missing, source->missing_count, sizeof *source->missing, compare_missing);
}

size_t fsdp_source_missing_count(const fsdp_source *source)
{
    return source->missing_count;
}

const char *fsdp_source_missing_at(const fsdp_source *source, size_t number, size_t *size_out)
{
    *size_out = source->missing[number].size;
    return source->missing[number].name;
}
