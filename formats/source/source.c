/*
 * The catalog of a foreign checkpoint, and the builder through which formats fill it. The
 * builder checks every name, shape and offset, so that the callers of the catalog need not.
 */
#include "base/data/box_internal.h"
#include "base/data/name_path.h"
#include "formats/source/source_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { LONGEST_NAME = 65535 };

/* --- the catalog ------------------------------------------------------------------------------ */

size_t fsdp_source_entry_count(const fsdp_source *source)
{
    return source->entry_count;
}

const fsdp_source_entry *fsdp_source_entry_at(const fsdp_source *source, size_t number)
{
    return &source->entries[number];
}

size_t fsdp_source_tensor_count(const fsdp_source *source)
{
    return source->tensor_count;
}

const fsdp_source_tensor *fsdp_source_tensor_at(const fsdp_source *source, size_t number)
{
    return &source->tensors[number];
}

const char *fsdp_source_format(const fsdp_source *source)
{
    return source->format;
}

const char *fsdp_source_path(const fsdp_source *source)
{
    return source->path;
}

fsdp_io *fsdp_source_io(const fsdp_source *source)
{
    return source->io;
}

const char *fsdp_source_extra(const fsdp_source *source, const char *member)
{
    for (size_t i = 0; i < source->extra_count; i++) {
        if (strcmp(source->extras[i].member, member) == 0)
            return source->extras[i].json;
    }
    return NULL;
}

/* --- beginning and end ------------------------------------------------------------------------ */

fsdp_status fsdp_source_create(fsdp_io *io, const char *path, const char *format,
                               fsdp_source **source_out, fsdp_error *err)
{
    *source_out = NULL;
    fsdp_source *source = fsdp_alloc(1, sizeof *source);
    if (!source)
        return fsdp_fail_memory(err, path);
    source->io = io ? io : fsdp_io_posix();
    source->format = format;
    source->stream_memory = (int64_t)256 << 20;
    source->path = fsdp_strndup(path, strlen(path));
    if (!source->path) {
        fsdp_free(source);
        return fsdp_fail_memory(err, path);
    }
    pthread_mutex_init(&source->lock, NULL);
    *source_out = source;
    return FSDP_OK;
}

void fsdp_source_set_ops(fsdp_source *source, const fsdp_source_ops *ops, void *state)
{
    source->ops = *ops;
    source->state = state;
}

static void release_entries(fsdp_source *source)
{
    for (size_t i = 0; i < source->entry_count; i++) {
        /* the catalog returns values as const, but owns them */
        if (source->entries[i].value)
            fsdp_value_release((fsdp_value *)(uintptr_t)source->entries[i].value);
    }
    fsdp_free(source->entries);
}

void fsdp_source_close(fsdp_source *source)
{
    if (!source)
        return;
    if (source->ops.close)
        source->ops.close(source->state);
    for (size_t i = 0; i < source->stream_count; i++)
        fsdp_packed_free(source->streams[i]);
    fsdp_source_close_files(source);
    release_entries(source);
    fsdp_free(source->tensors);
    fsdp_free(source->files);
    fsdp_free(source->streams);
    fsdp_free(source->checks);
    fsdp_free(source->chunks);
    fsdp_free(source->chunk_tensors);
    fsdp_free(source->orders);
    fsdp_free(source->extras);
    fsdp_free(source->missing);
    fsdp_name_table_release(&source->names);
    fsdp_name_table_release(&source->paths);
    fsdp_arena_release(&source->arena);
    fsdp_free(source->spool_directory);
    fsdp_free(source->path);
    pthread_mutex_destroy(&source->lock);
    fsdp_free(source);
}

/* --- names ------------------------------------------------------------------------------------ */

static fsdp_status check_name(const fsdp_source *source, const char *name, size_t size,
                              fsdp_error *err)
{
    char shown[FSDP_NAME_SHOWN];
    if (!fsdp_utf8_valid(name, size))
        return fsdp_fail(err, FSDP_ERR_REFUSED, "'%s': the name '%s' is not UTF-8", source->path,
                         fsdp_printable(name, size, shown, sizeof shown));
    if (size > LONGEST_NAME)
        return fsdp_fail(err, FSDP_ERR_LIMIT,
                         "'%s': the name '%s' has %zu bytes, at most %d are allowed", source->path,
                         fsdp_printable(name, size, shown, sizeof shown), size, LONGEST_NAME);
    return FSDP_OK;
}

/* "NAME#n" with the next free n; *count is the number of entries with this name. */
static const char *numbered_name(fsdp_source *source, const char *name, size_t size,
                                 uint64_t *count, size_t *size_out)
{
    char *text = fsdp_arena_alloc(&source->arena, size + 24, 1);
    if (!text)
        return NULL;
    memcpy(text, name, size);
    do {
        ++*count;
        *size_out = size + (size_t)snprintf(text + size, 24, "#%" PRIu64, *count);
    } while (fsdp_name_table_find(&source->names, text, *size_out));
    return text;
}

static fsdp_status count_bytes(fsdp_source *source, size_t bytes, fsdp_error *err)
{
    source->name_bytes += bytes;
    if (source->name_bytes <= FSDP_SOURCE_NAMES)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_LIMIT,
                     "'%s': its names take over %d MiB, because many begin with a long one",
                     source->path, FSDP_SOURCE_NAMES >> 20);
}

/* Copies a name and makes it unique. */
static fsdp_status take_name(fsdp_source *source, const char *name, size_t size,
                             const char **name_out, size_t *size_out, fsdp_error *err)
{
    FSDP_TRY(check_name(source, name, size, err));
    FSDP_TRY(count_bytes(source, size, err));
    const char *copy = fsdp_arena_strndup(&source->arena, name, size);
    size_t names_before = source->names.count;
    uint64_t *count = copy ? fsdp_name_table_enter(&source->names, copy, size, 1) : NULL;
    if (count && source->names.count == names_before) {
        copy = numbered_name(source, name, size, count, &size);
        if (copy && !fsdp_name_table_put(&source->names, copy, size, 1))
            copy = NULL;
    }
    *name_out = copy;
    *size_out = size;
    return count && copy ? FSDP_OK : fsdp_fail_memory(err, "the names of a checkpoint");
}

void fsdp_source_nest(fsdp_source *source, const int32_t *path, size_t count)
{
    source->nesting = path;
    source->nesting_count = count;
}

const int32_t *fsdp_source_nesting(const fsdp_source *source, size_t *count_out)
{
    *count_out = source->nesting_count;
    return source->nesting;
}

/* size: length of the name before it was made unique, which lengthened its last element. */
static fsdp_status take_path(fsdp_source *source, const char *name, size_t size,
                             fsdp_source_entry *entry, fsdp_error *err)
{
    size_t count = source->nesting_count;
    if (count == 0 || !fsdp_path_fits(name, size, source->nesting, count))
        return FSDP_OK;
    FSDP_TRY(count_bytes(source, count * sizeof(int32_t), err));
    int32_t *copy = fsdp_arena_alloc(&source->arena, count, sizeof *copy);
    if (!copy)
        return fsdp_fail_memory(err, "the names of a checkpoint");
    memcpy(copy, source->nesting, count * sizeof *copy);
    if (entry->name_size != size)
        copy[count - 1] = (int32_t)(fsdp_path_bytes(copy[count - 1]) + entry->name_size - size);
    entry->path = copy;
    entry->path_count = count;
    return FSDP_OK;
}

static fsdp_status add_entry(fsdp_source *source, const char *name, size_t size,
                             fsdp_source_entry **entry_out, fsdp_error *err)
{
    if (!fsdp_grow(&source->entries, &source->entry_room, source->entry_count + 1,
                   sizeof *source->entries))
        return fsdp_fail_memory(err, "the list of a checkpoint");
    fsdp_source_entry *entry = &source->entries[source->entry_count];
    *entry = (fsdp_source_entry){.blob = {.file = -1}};
    FSDP_TRY(take_name(source, name, size, &entry->name, &entry->name_size, err));
    FSDP_TRY(take_path(source, name, size, entry, err));
    source->entry_count++;
    *entry_out = entry;
    return FSDP_OK;
}

void fsdp_source_expect(fsdp_source *source, size_t tensors, size_t chunks)
{
    (void)fsdp_grow(&source->entries, &source->entry_room, source->entry_count + tensors,
                    sizeof *source->entries);
    (void)fsdp_grow(&source->tensors, &source->tensor_room, source->tensor_count + tensors,
                    sizeof *source->tensors);
    (void)fsdp_grow(&source->chunks, &source->chunk_room, source->chunk_count + chunks,
                    sizeof *source->chunks);
    (void)fsdp_grow(&source->chunk_tensors, &source->chunk_tensor_room,
                    source->chunk_count + chunks, sizeof *source->chunk_tensors);
    (void)fsdp_name_table_expect(&source->names, source->entry_count + tensors);
}

/* --- tensors ---------------------------------------------------------------------------------- */

/* A bad shape in a file is damage, not a usage error. */
static fsdp_status check_shape(int ndim, const int64_t *shape, size_t element_size, fsdp_error *err)
{
    if (element_size == 0)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "a tensor has no dtype");
    fsdp_error why = {0};
    if (fsdp_shape_check(ndim, shape, element_size, &why) == FSDP_OK)
        return FSDP_OK;
    return fsdp_fail(err, ndim > FSDP_MAX_DIMS ? FSDP_ERR_LIMIT : FSDP_ERR_DAMAGED, "%s", why.text);
}

static fsdp_status append_tensor(fsdp_source *source, fsdp_dtype dtype, int ndim,
                                 const int64_t *shape, size_t *tensor_out, fsdp_error *err)
{
    FSDP_TRY(check_shape(ndim, shape, fsdp_dtype_size(dtype), err));
    int64_t *copy = fsdp_arena_alloc(&source->arena, (size_t)ndim, sizeof *copy);
    if (!copy || !fsdp_grow(&source->tensors, &source->tensor_room, source->tensor_count + 1,
                            sizeof *source->tensors))
        return fsdp_fail_memory(err, "the tensors of a checkpoint");
    if (ndim > 0)
        memcpy(copy, shape, (size_t)ndim * sizeof *copy);
    source->tensors[source->tensor_count] = (fsdp_source_tensor){
        .name = "", .dtype = dtype, .ndim = ndim, .shape = copy, .is_inner = true};
    *tensor_out = source->tensor_count++;
    return FSDP_OK;
}

fsdp_status fsdp_source_add_inner(fsdp_source *source, fsdp_dtype dtype, int ndim,
                                  const int64_t *shape, size_t *tensor_out, fsdp_error *err)
{
    fsdp_status status = append_tensor(source, dtype, ndim, shape, tensor_out, err);
    if (status != FSDP_OK)
        fsdp_error_prefix(err, "'%s': a tensor inside a value", source->path);
    return status;
}

fsdp_status fsdp_source_name_tensor(fsdp_source *source, size_t tensor, const char *name,
                                    size_t size, fsdp_error *err)
{
    fsdp_source_entry *entry;
    FSDP_TRY(add_entry(source, name, size, &entry, err));
    entry->is_tensor = true;
    entry->tensor = tensor;
    source->tensors[tensor].name = entry->name;
    source->tensors[tensor].name_size = entry->name_size;
    source->tensors[tensor].is_inner = false;
    return FSDP_OK;
}

fsdp_status fsdp_source_add_tensor(fsdp_source *source, const char *name, size_t name_size,
                                   const fsdp_source_shape *shape, size_t *tensor_out,
                                   fsdp_error *err)
{
    fsdp_source_entry *entry;
    FSDP_TRY(add_entry(source, name, name_size, &entry, err));
    size_t number;
    fsdp_status status =
        append_tensor(source, shape->dtype, shape->ndim, shape->shape, &number, err);
    if (status != FSDP_OK) {
        char shown[FSDP_NAME_SHOWN];
        source->entry_count--;
        fsdp_error_prefix(err, "'%s': tensor '%s'", source->path,
                          fsdp_printable(entry->name, entry->name_size, shown, sizeof shown));
        return status;
    }
    entry->is_tensor = true;
    entry->tensor = number;
    source->tensors[number].name = entry->name;
    source->tensors[number].name_size = entry->name_size;
    source->tensors[number].is_inner = false;
    if (tensor_out)
        *tensor_out = number;
    return FSDP_OK;
}

bool fsdp_source_has(const fsdp_source *source, const char *name, size_t name_size)
{
    return fsdp_name_table_find(&source->names, name, name_size) != NULL;
}

fsdp_status fsdp_source_add_alias(fsdp_source *source, const char *name, size_t name_size,
                                  size_t tensor, fsdp_error *err)
{
    fsdp_source_entry *entry;
    FSDP_TRY(add_entry(source, name, name_size, &entry, err));
    entry->is_alias = true;
    entry->tensor = tensor;
    return FSDP_OK;
}

/* --- chunks ----------------------------------------------------------------------------------- */

static fsdp_status fail_chunk(const fsdp_source *source, const fsdp_source_tensor *tensor,
                              const fsdp_source_chunk *chunk, const char *what, fsdp_error *err)
{
    char shown[FSDP_NAME_SHOWN], box[FSDP_NAME_SHOWN];
    const char *file = chunk->file >= 0 ? source->files[chunk->file].path : source->path;
    fsdp_box_text(tensor->ndim, chunk->lo, chunk->len, box, sizeof box);
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': tensor '%s' %s at byte %" PRId64 " %s", file,
                     fsdp_tensor_text(tensor, shown, sizeof shown), box, chunk->offset, what);
}

/* Row-major strides of the chunk. */
static void packed_strides(int ndim, const int64_t *len, size_t element_size, int64_t *strides)
{
    int64_t stride = (int64_t)element_size;
    for (int dim = ndim - 1; dim >= 0; dim--) {
        strides[dim] = stride;
        stride *= len[dim] > 0 ? len[dim] : 1;
    }
}

/* Adds the extent of one dim to the lowest or the highest offset. */
static bool add_reach(int64_t len, int64_t stride, int64_t *lowest, int64_t *highest)
{
    int64_t reach;
    if (fsdp_mul_overflow(len - 1, stride, &reach))
        return false;
    int64_t *end = reach < 0 ? lowest : highest;
    return !fsdp_add_overflow(*end, reach, end);
}

static fsdp_status check_reach(const fsdp_source *source, const fsdp_source_tensor *tensor,
                               const fsdp_source_chunk *chunk, const int64_t *strides,
                               fsdp_error *err)
{
    int64_t lowest = chunk->offset, highest = chunk->offset;
    for (int dim = 0; dim < tensor->ndim; dim++) {
        if (!add_reach(chunk->len[dim], strides[dim], &lowest, &highest))
            return fail_chunk(source, tensor, chunk, "has strides that overflow", err);
    }
    int64_t size = chunk->stream >= 0 ? fsdp_source_stream_size(source, chunk->stream)
                                      : source->files[chunk->file].info.size;
    int64_t element_size = (int64_t)fsdp_dtype_size(tensor->dtype);
    if (lowest < 0 || highest > size - element_size)
        return fail_chunk(source, tensor, chunk,
                          chunk->stream >= 0 ? "extends past the end of the packed bytes"
                                             : "extends past the end of the file",
                          err);
    return FSDP_OK;
}

static fsdp_status check_box(const fsdp_source *source, const fsdp_source_tensor *tensor,
                             const fsdp_source_chunk *chunk, fsdp_error *err)
{
    for (int dim = 0; dim < tensor->ndim; dim++) {
        int64_t lo = chunk->lo[dim], len = chunk->len[dim];
        if (lo < 0 || len < 0 || lo > tensor->shape[dim] || len > tensor->shape[dim] - lo)
            return fail_chunk(source, tensor, chunk, "is outside of the tensor", err);
    }
    return FSDP_OK;
}

/* Copies the chunk; its dims go to the arena, and strides that equal the row-major ones are
 * dropped. */
static bool copy_chunk(fsdp_source *source, int ndim, const fsdp_source_chunk *chunk,
                       const int64_t *packed, fsdp_source_chunk *copy_out)
{
    size_t bytes = (size_t)ndim * sizeof(int64_t);
    bool is_packed = !chunk->strides || bytes == 0 || memcmp(chunk->strides, packed, bytes) == 0;
    int64_t *dims = fsdp_arena_alloc(&source->arena, (size_t)ndim * (is_packed ? 2 : 3), 8);
    if (!dims)
        return false;
    *copy_out = *chunk;
    copy_out->lo = dims;
    copy_out->len = dims + ndim;
    copy_out->strides = is_packed ? NULL : dims + 2 * ndim;
    if (ndim > 0) {
        memcpy(dims, chunk->lo, bytes);
        memcpy(dims + ndim, chunk->len, bytes);
    }
    if (!is_packed)
        memcpy(dims + 2 * ndim, chunk->strides, bytes);
    return true;
}

static bool is_empty(int ndim, const int64_t *len)
{
    for (int dim = 0; dim < ndim; dim++) {
        if (len[dim] == 0)
            return true;
    }
    return false;
}

fsdp_status fsdp_source_add_chunk(fsdp_source *source, size_t tensor_number,
                                  const fsdp_source_chunk *chunk, fsdp_error *err)
{
    const fsdp_source_tensor *tensor = &source->tensors[tensor_number];
    if (chunk->file >= (int)source->file_count || chunk->stream >= (int)source->stream_count)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "a chunk is in a file that was not added");
    FSDP_TRY(check_box(source, tensor, chunk, err));
    if (is_empty(tensor->ndim, chunk->len))
        return FSDP_OK;
    int64_t packed[FSDP_MAX_DIMS];
    packed_strides(tensor->ndim, chunk->len, fsdp_dtype_size(tensor->dtype), packed);
    if (chunk->file >= 0 || chunk->stream >= 0)
        FSDP_TRY(check_reach(source, tensor, chunk, chunk->strides ? chunk->strides : packed, err));
    size_t count = source->chunk_count;
    if (!fsdp_grow(&source->chunks, &source->chunk_room, count + 1, sizeof *source->chunks) ||
        !fsdp_grow(&source->chunk_tensors, &source->chunk_tensor_room, count + 1,
                   sizeof *source->chunk_tensors) ||
        !copy_chunk(source, tensor->ndim, chunk, packed, &source->chunks[count]))
        return fsdp_fail_memory(err, "the chunks of a checkpoint");
    source->chunk_tensors[count] = tensor_number;
    source->chunk_count++;
    return FSDP_OK;
}

/* --- values and the rest ---------------------------------------------------------------------- */

fsdp_status fsdp_source_add_value(fsdp_source *source, const char *name, size_t name_size,
                                  fsdp_value *value, const fsdp_source_blob *blob, fsdp_error *err)
{
    fsdp_value *copy = fsdp_arena_alloc(&source->arena, 1, sizeof *copy);
    if (!copy)
        return fsdp_fail_memory(err, "the values of a checkpoint");
    fsdp_source_entry *entry;
    FSDP_TRY(add_entry(source, name, name_size, &entry, err));
    *copy = *value;
    *value = (fsdp_value){.kind = FSDP_VALUE_NULL};
    entry->value = copy;
    if (blob)
        entry->blob = *blob;
    return FSDP_OK;
}

fsdp_status fsdp_source_add_extra(fsdp_source *source, const char *member, const char *json,
                                  size_t size, fsdp_error *err)
{
    const char *name = fsdp_arena_strndup(&source->arena, member, strlen(member));
    const char *text = fsdp_arena_strndup(&source->arena, json, size);
    if (!name || !text ||
        !fsdp_grow(&source->extras, &source->extra_room, source->extra_count + 1,
                   sizeof *source->extras))
        return fsdp_fail_memory(err, member);
    source->extras[source->extra_count].member = name;
    source->extras[source->extra_count++].json = text;
    return FSDP_OK;
}

fsdp_status fsdp_source_add_crc(fsdp_source *source, const fsdp_source_crc *check, fsdp_error *err)
{
    int64_t offset = check->offset, size = check->size;
    if (check->file < 0 || check->file >= (int)source->file_count)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "a checksum is in a file that was not added");
    const source_file *in = &source->files[check->file];
    if (offset < 0 || size < 0 || offset > in->info.size || size > in->info.size - offset)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': %s extends past the end of the file",
                         in->path, check->what);
    const char *name = fsdp_arena_strndup(&source->arena, check->what, strlen(check->what));
    if (!name || !fsdp_grow(&source->checks, &source->check_room, source->check_count + 1,
                            sizeof *source->checks))
        return fsdp_fail_memory(err, "the checksums of a checkpoint");
    source->checks[source->check_count] = *check;
    source->checks[source->check_count++].what = name;
    fsdp_source_count_checked(source, size);
    return FSDP_OK;
}

int64_t fsdp_source_rounded_count(const fsdp_source *source)
{
    return source->rounded_count;
}

void fsdp_source_count_rounded(fsdp_source *source)
{
    source->rounded_count++;
}
