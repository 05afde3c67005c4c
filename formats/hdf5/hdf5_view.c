/*
 * The view: an HDF5 file in which every tensor is one virtual dataset over the shard files, for
 * h5py, h5ls and other programs; the library never reads it. See hdf5_file.h. hdf5_emit.h has
 * the bytes of each structure and the reason for writing without libhdf5.
 *
 * The file: superblock, batches of datasets, root group. A batch is a global heap with the
 * mappings of some datasets, followed by their object headers. Only the names and addresses of
 * datasets are kept until the end, so that memory stays small however many mappings there are.
 */
#include "base/core/mem.h"
#include "formats/hdf5/hdf5_emit.h"
#include "formats/hdf5/hdf5_file.h"
#include "formats/hdf5/hdf5_types.h"

#include <stdlib.h>
#include <string.h>

typedef struct view_entry {
    const char *link;
    const char *target; /* of an alias: a link, resolved at the end */
    int64_t address;    /* of the object header; relative to the batch until the batch is written */
    size_t heap_at;     /* offset of the heap address in its header; 0: none */
    uint32_t references;
} view_entry;

struct fsdp_h5_view {
    fsdp_file *file;
    char *path;
    int64_t end;             /* bytes in the file */
    fsdp_text heap, headers; /* the batch */
    unsigned heap_objects;
    size_t batch_first; /* first entry of the batch */
    view_entry *entries;
    size_t count, capacity;
    fsdp_arena names;
    fsdp_h5_type_bytes types[FSDP_DTYPE_COUNT];
};

/* --- batches --- */

static fsdp_status append(fsdp_h5_view *view, const fsdp_text *text, fsdp_error *err)
{
    if (text->failed)
        return fsdp_fail_memory(err, "a part of the view");
    FSDP_TRY(fsdp_io_write(view->file, view->path, text->data, text->size, view->end, err));
    view->end += (int64_t)text->size;
    return FSDP_OK;
}

static void start_batch(fsdp_h5_view *view)
{
    fsdp_h5_begin_heap(&view->heap);
    view->headers.size = 0;
    view->heap_objects = 0;
    view->batch_first = view->count;
}

/* Fills in addresses: the heap's position is known now, and with its size the position of the
 * headers. */
static void place_batch(fsdp_h5_view *view, int64_t headers)
{
    for (size_t i = view->batch_first; i < view->count; i++) {
        view_entry *entry = &view->entries[i];
        if (entry->target)
            continue;
        entry->address += headers;
        if (entry->heap_at > 0)
            fsdp_h5_set_u64(&view->headers, entry->heap_at, (uint64_t)view->end);
    }
}

static fsdp_status write_batch(fsdp_h5_view *view, fsdp_error *err)
{
    bool has_heap = view->heap_objects > 0;
    if (has_heap)
        fsdp_h5_end_heap(&view->heap);
    place_batch(view, view->end + (has_heap ? (int64_t)view->heap.size : 0));
    if (has_heap)
        FSDP_TRY(append(view, &view->heap, err));
    if (view->headers.size > 0)
        FSDP_TRY(append(view, &view->headers, err));
    start_batch(view);
    return FSDP_OK;
}

/* --- datasets --- */

static view_entry *add_entry(fsdp_h5_view *view, const char *link)
{
    if (!fsdp_grow(&view->entries, &view->capacity, view->count + 1, sizeof *view->entries))
        return NULL;
    const char *copy = fsdp_arena_strndup(&view->names, link, strlen(link));
    if (!copy)
        return NULL;
    view_entry *entry = &view->entries[view->count++];
    *entry = (view_entry){.link = copy, .references = 1};
    return entry;
}

/* Readers use a name as a printf format: "%b" is a block number, "%%" a percent sign. */
static void put_source_name(fsdp_text *heap, const char *name)
{
    for (const char *at = name; *at; at++) {
        if (*at == '%')
            fsdp_text_add(heap, "%", 1);
        fsdp_text_add(heap, at, 1);
    }
    fsdp_text_add(heap, "", 1);
}

static void put_mappings(fsdp_h5_view *view, int ndim, const int64_t *shape,
                         const fsdp_h5_source *sources, size_t count)
{
    fsdp_text *heap = &view->heap;
    size_t object = fsdp_h5_begin_heap_object(heap, ++view->heap_objects);
    size_t block = fsdp_h5_begin_mappings(heap, count);
    for (size_t i = 0; i < count; i++) {
        const fsdp_h5_source *source = &sources[i];
        put_source_name(heap, source->file);
        put_source_name(heap, source->link);
        fsdp_h5_put_selection(heap, source->source_ndim, source->source_shape, source->source_lo,
                              source->source_len);
        fsdp_h5_put_selection(heap, ndim, shape, source->lo, source->len);
    }
    fsdp_h5_end_mappings(heap, block);
    fsdp_h5_end_heap_object(heap, object);
}

static void put_header(fsdp_h5_view *view, view_entry *entry, fsdp_dtype dtype, int ndim,
                       const int64_t *shape, bool has_sources)
{
    fsdp_text *out = &view->headers;
    const fsdp_h5_type_bytes *type = &view->types[dtype];
    const unsigned messages = 4;
    entry->address = (int64_t)out->size;
    size_t header = fsdp_h5_begin_header(out, messages + type->marked);
    fsdp_h5_put_dataspace(out, ndim, shape);
    fsdp_h5_put_datatype(out, type->bytes, type->size);
    fsdp_h5_put_fill(out, fsdp_dtype_size(dtype));
    if (has_sources)
        entry->heap_at = fsdp_h5_put_virtual_layout(out, view->heap_objects);
    else
        fsdp_h5_put_empty_layout(out);
    if (type->marked)
        fsdp_h5_put_string_attribute(out, FSDP_H5_MARK, fsdp_dtype_name(dtype));
    fsdp_h5_end_header(out, header);
}

/* A reader loads a whole heap to open one of its datasets, so a heap stays small. */
static bool batch_is_full(const fsdp_h5_view *view)
{
    enum { ENOUGH = 16 << 10 };
    return view->heap.size >= ENOUGH || view->headers.size >= 4 * ENOUGH;
}

fsdp_status fsdp_h5_view_add(fsdp_h5_view *view, const fsdp_h5_dataset *tensor,
                             const fsdp_h5_source *sources, size_t count, fsdp_error *err)
{
    const char *link = tensor->link;
    fsdp_dtype dtype = tensor->dtype;
    if (dtype <= FSDP_DTYPE_NONE || dtype >= FSDP_DTYPE_COUNT)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' of '%s' has no dtype", link, view->path);
    if (view->types[dtype].size == 0)
        FSDP_TRY(fsdp_h5_type_encode(dtype, &view->types[dtype], err));
    view_entry *entry = add_entry(view, link);
    if (!entry)
        return fsdp_fail_memory(err, "the names of a view");
    if (count > 0)
        put_mappings(view, tensor->ndim, tensor->shape, sources, count);
    put_header(view, entry, dtype, tensor->ndim, tensor->shape, count > 0);
    if (view->heap.failed || view->headers.failed)
        return fsdp_fail_memory(err, "a part of the view");
    return batch_is_full(view) ? write_batch(view, err) : FSDP_OK;
}

fsdp_status fsdp_h5_view_link(fsdp_h5_view *view, const char *link, const char *target,
                              fsdp_error *err)
{
    const char *copy = fsdp_arena_strndup(&view->names, target, strlen(target));
    view_entry *entry = copy ? add_entry(view, link) : NULL;
    if (!entry)
        return fsdp_fail_memory(err, "the names of a view");
    entry->target = copy;
    return FSDP_OK;
}

/* --- the root group --- */

static int compare_links(const void *a, const void *b)
{
    return strcmp(((const view_entry *)a)->link, ((const view_entry *)b)->link);
}

static fsdp_status sort_entries(fsdp_h5_view *view, fsdp_error *err)
{
    if (view->count > 0)
        qsort(view->entries, view->count, sizeof *view->entries, compare_links);
    for (size_t i = 1; i < view->count; i++)
        if (compare_links(&view->entries[i - 1], &view->entries[i]) == 0)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' is in '%s' twice", view->entries[i].link,
                             view->path);
    return FSDP_OK;
}

static view_entry *find_entry(fsdp_h5_view *view, const char *link)
{
    const view_entry key = {.link = link};
    return bsearch(&key, view->entries, view->count, sizeof key, compare_links);
}

static fsdp_status resolve_aliases(fsdp_h5_view *view, fsdp_error *err)
{
    for (size_t i = 0; i < view->count; i++) {
        view_entry *alias = &view->entries[i];
        if (!alias->target)
            continue;
        view_entry *target = find_entry(view, alias->target);
        if (!target || target->target)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' of '%s' is an alias of '%s', %s",
                             alias->link, view->path, alias->target,
                             target ? "which is one itself" : "which is not there");
        alias->address = target->address;
        target->references++;
    }
    return FSDP_OK;
}

static fsdp_status write_references(fsdp_h5_view *view, fsdp_error *err)
{
    for (size_t i = 0; i < view->count; i++) {
        const view_entry *entry = &view->entries[i];
        if (entry->target || entry->references == 1)
            continue;
        fsdp_text number = {0};
        fsdp_h5_put_u32(&number, entry->references);
        fsdp_status status = FSDP_OK;
        if (number.failed)
            status = fsdp_fail_memory(err, "a part of the view");
        else
            status = fsdp_io_write(view->file, view->path, number.data, number.size,
                                   entry->address + FSDP_H5_REFERENCES_AT, err);
        fsdp_text_release(&number);
        FSDP_TRY(status);
    }
    return FSDP_OK;
}

static fsdp_status write_root_group(fsdp_h5_view *view, fsdp_error *err)
{
    fsdp_h5_symbol *symbols = fsdp_alloc(view->count, sizeof *symbols);
    if (!symbols)
        return fsdp_fail_memory(err, "the names of a view");
    for (size_t i = 0; i < view->count; i++)
        symbols[i] =
            (fsdp_h5_symbol){.link = view->entries[i].link, .address = view->entries[i].address};
    fsdp_text group = {0}, superblock = {0};
    fsdp_h5_put_root_group(&group, view->end, symbols, view->count, &superblock);
    fsdp_status status = append(view, &group, err);
    if (status == FSDP_OK && superblock.failed)
        status = fsdp_fail_memory(err, "a part of the view");
    if (status == FSDP_OK)
        status = fsdp_io_write(view->file, view->path, superblock.data, superblock.size, 0, err);
    fsdp_text_release(&group);
    fsdp_text_release(&superblock);
    fsdp_free(symbols);
    return status;
}

/* --- the file --- */

fsdp_status fsdp_h5_view_create(fsdp_io *io, const char *path, fsdp_h5_view **view_out,
                                fsdp_error *err)
{
    *view_out = NULL;
    fsdp_h5_view *view = fsdp_alloc(1, sizeof *view);
    char *copy = fsdp_strndup(path, strlen(path));
    fsdp_status status = FSDP_OK;
    if (!view || !copy)
        status = fsdp_fail_memory(err, "a view");
    else
        status = fsdp_io_open(io, path, FSDP_IO_CREATE, &view->file, err);
    if (status != FSDP_OK) {
        fsdp_free(copy);
        fsdp_free(view);
        return status;
    }
    view->path = copy;
    view->end = FSDP_H5_SUPERBLOCK;
    start_batch(view);
    *view_out = view;
    return FSDP_OK;
}

static fsdp_status finish(fsdp_h5_view *view, fsdp_error *err)
{
    FSDP_TRY(write_batch(view, err));
    FSDP_TRY(sort_entries(view, err));
    FSDP_TRY(resolve_aliases(view, err));
    FSDP_TRY(write_references(view, err));
    return write_root_group(view, err);
}

static void release(fsdp_h5_view *view)
{
    fsdp_text_release(&view->heap);
    fsdp_text_release(&view->headers);
    fsdp_arena_release(&view->names);
    fsdp_free(view->entries);
    fsdp_free(view->path);
    fsdp_free(view);
}

fsdp_status fsdp_h5_view_close(fsdp_h5_view *view, int64_t *size_out, fsdp_error *err)
{
    fsdp_status status = finish(view, err);
    fsdp_error ignored = {0};
    fsdp_status closed = fsdp_io_close(&view->file, view->path, status == FSDP_OK ? err : &ignored);
    if (status == FSDP_OK)
        status = closed;
    *size_out = status == FSDP_OK ? view->end : 0;
    release(view);
    return status;
}

void fsdp_h5_view_discard(fsdp_h5_view *view)
{
    if (!view)
        return;
    fsdp_error ignored = {0};
    (void)fsdp_io_close(&view->file, view->path, &ignored);
    release(view);
}
