/*
 * The parts that all packed formats share: unique names, every element written exactly once,
 * checksums of pieces in any order combined into one, and no files left after a failure.
 */
#include "formats/target/packed.h"
#include "base/core/mem.h"
#include "base/data/box_internal.h"
#include "base/data/flow.h"
#include "base/io/io_dry.h"
#include "formats/target/packed_internal.h"
#include "kernels/kernels.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* --- names ------------------------------------------------------------------------------------ */

/* False for a name that the file stores escaped, with the true one next to it. */
static bool holds_name_as_is(const fsdp_packed_format *format, const char *name, size_t size)
{
    return !format->holds_name || format->holds_name(name, size);
}

/* --- declaring -------------------------------------------------------------------------------- */

fsdp_status fsdp_packed_create(const fsdp_format *format, const fsdp_packed_opts *opts,
                               const char *path, fsdp_packed **target_out, fsdp_error *err)
{
    *target_out = NULL;
    fsdp_packed *target = fsdp_alloc(1, sizeof *target);
    char *copy = fsdp_strndup(path, strlen(path));
    if (!target || !copy) {
        fsdp_free(target);
        fsdp_free(copy);
        return fsdp_fail_memory(err, path);
    }
    target->format = format;
    target->packed = format->writer->packed;
    target->opts = *opts;
    target->io = opts->io ? opts->io : fsdp_io_posix();
    target->path = copy;
    pthread_mutex_init(&target->lock, NULL);
    *target_out = target;
    return FSDP_OK;
}

static void release(fsdp_packed *target)
{
    for (size_t i = 0; i < target->tensor_count; i++)
        fsdp_free(target->tensors[i].ranges);
    for (size_t i = 0; i < target->value_count; i++)
        fsdp_value_release(&target->values[i].value);
    fsdp_free(target->tensors);
    fsdp_free(target->values);
    fsdp_free(target->ties);
    fsdp_free(target->files);
    fsdp_text_release(&target->escaped_names);
    fsdp_text_pairs_release(&target->metadata);
    fsdp_name_table_release(&target->names);
    fsdp_arena_release(&target->arena);
    pthread_mutex_destroy(&target->lock);
    fsdp_free(target->path);
    fsdp_free(target);
}

/* Copies a name, which must be new. */
static fsdp_status take_name(fsdp_packed *target, const char **name, size_t size, fsdp_error *err)
{
    char shown[200];
    fsdp_printable(*name, size, shown, sizeof shown);
    if (fsdp_name_table_find(&target->names, *name, size))
        return fsdp_fail(err, FSDP_ERR_USAGE, "the name '%s' appears twice", shown);
    *name = fsdp_arena_strndup(&target->arena, *name, size);
    if (!*name || !fsdp_name_table_put(&target->names, *name, size, 0))
        return fsdp_fail_memory(err, target->path);
    return FSDP_OK;
}

fsdp_status fsdp_packed_add_tensor(fsdp_packed *target, const fsdp_packed_tensor *what,
                                   size_t *number_out, fsdp_error *err)
{
    if (!target->format->writer->holds_dtype(what->dtype))
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s cannot hold tensors of %s", target->format->name,
                         fsdp_dtype_name(what->dtype));
    size_t element_size = fsdp_dtype_size(what->dtype);
    FSDP_TRY(fsdp_shape_check(what->ndim, what->shape, element_size, err));
    target_tensor tensor = {.what = *what, .file = -1};
    if (what->name)
        FSDP_TRY(take_name(target, &tensor.what.name, what->name_size, err));
    int64_t *shape = fsdp_arena_alloc(&target->arena, (size_t)what->ndim, sizeof *shape);
    if (!shape || !fsdp_grow(&target->tensors, &target->tensor_room, target->tensor_count + 1,
                             sizeof *target->tensors))
        return fsdp_fail_memory(err, target->path);
    if (what->ndim > 0)
        memcpy(shape, what->shape, (size_t)what->ndim * sizeof *shape);
    fsdp_box whole = fsdp_box_whole(what->ndim, shape);
    tensor.what.shape = shape;
    tensor.count = fsdp_box_count(&whole);
    tensor.size = tensor.count * (int64_t)element_size;
    *number_out = target->tensor_count;
    target->tensors[target->tensor_count++] = tensor;
    return FSDP_OK;
}

fsdp_status fsdp_packed_add_value(fsdp_packed *target, const char *name, size_t name_size,
                                  const fsdp_value *value, fsdp_error *err)
{
    char shown[200];
    if (!target->format->caps.values)
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s cannot hold the value '%s'", target->format->name,
                         fsdp_printable(name, name_size, shown, sizeof shown));
    FSDP_TRY(take_name(target, &name, name_size, err));
    if (!fsdp_grow(&target->values, &target->value_room, target->value_count + 1,
                   sizeof *target->values))
        return fsdp_fail_memory(err, target->path);
    target_value *kept = &target->values[target->value_count];
    FSDP_TRY(fsdp_value_copy(value, &kept->value, err));
    kept->name = name;
    kept->name_size = name_size;
    target->value_count++;
    return FSDP_OK;
}

/* Records another name of a tensor. FSDP_ERR_USAGE: the format cannot (notes_tie of its writer). */
static fsdp_status packed_add_tie(fsdp_packed *target, const char *name, size_t name_size,
                                  size_t tensor, fsdp_error *err)
{
    char shown[200];
    const fsdp_packed_tensor *kept = &target->tensors[tensor].what;
    if (!target->format->caps.notes_ties ||
        !target->format->writer->notes_tie(name, name_size, kept->name, kept->name_size))
        return fsdp_fail(
            err, FSDP_ERR_USAGE, "%s cannot record that '%s' is another name of a tensor",
            target->format->name, fsdp_printable(name, name_size, shown, sizeof shown));
    const char *copy = fsdp_arena_strndup(&target->arena, name, name_size);
    if (!copy ||
        !fsdp_grow(&target->ties, &target->tie_room, target->tie_count + 1, sizeof *target->ties))
        return fsdp_fail_memory(err, target->path);
    target->ties[target->tie_count++] = (target_tie){copy, name_size, tensor};
    return FSDP_OK;
}

/* Sets a text that is stored next to the tensors, if the format can hold one. */
static fsdp_status packed_set_copied(fsdp_packed *target, const char *text, fsdp_error *err)
{
    target->copied = fsdp_arena_strndup(&target->arena, text, strlen(text));
    return target->copied ? FSDP_OK : fsdp_fail_memory(err, target->path);
}

/* Sets texts under keys that are stored next to the tensors, a JSON object, if the format can hold them. */
static fsdp_status packed_set_metadata(fsdp_packed *target, const char *json, fsdp_error *err)
{
    return fsdp_text_pairs_parse(&target->metadata, json, "metadata", err);
}

/* --- names that the format cannot spell ------------------------------------------------------- */

/* Escapes '%' and NUL; when the format still refuses the name, its first character; at last
 * appends a hash of the name. */
static void escape(const fsdp_packed_format *format, const char *name, size_t size, fsdp_text *out)
{
    for (size_t i = 0; i < size; i++) {
        if (name[i] == '%' || name[i] == '\0')
            fsdp_text_addf(out, name[i] ? "%%25" : "%%00");
        else
            fsdp_text_add(out, name + i, 1);
    }
    if (out->failed || out->size == 0 || format->holds_name(out->data, out->size))
        return;
    out->size = 0;
    fsdp_text_addf(out, "%%%02X", (unsigned char)name[0]);
    fsdp_text_add(out, name + 1, size - 1);
    if (out->failed || format->holds_name(out->data, out->size))
        return;
    fsdp_hash hash = fsdp_kernels_get()->hash(name, size);
    out->size = 0;
    fsdp_text_addf(out, "%%h");
    fsdp_text_add_hex(out, hash.bytes, sizeof hash.bytes);
}

static fsdp_status spell(fsdp_packed *target, target_tensor *tensor, fsdp_error *err)
{
    fsdp_text text = {0};
    escape(target->packed, tensor->what.name, tensor->what.name_size, &text);
    while (!text.failed && fsdp_name_table_find(&target->names, text.data, text.size))
        fsdp_text_addf(&text, "%%");
    tensor->stored_name =
        text.failed ? NULL : fsdp_arena_strndup(&target->arena, text.data, text.size);
    tensor->stored_name_size = text.size;
    fsdp_text_release(&text);
    if (!tensor->stored_name ||
        !fsdp_name_table_put(&target->names, tensor->stored_name, tensor->stored_name_size, 0))
        return fsdp_fail_memory(err, target->path);
    fsdp_text_addf(&target->escaped_names, target->escaped_names.size > 0 ? "," : "{");
    fsdp_text_add_json_string(&target->escaped_names, tensor->stored_name,
                              tensor->stored_name_size);
    fsdp_text_addf(&target->escaped_names, ":");
    fsdp_text_add_json_string(&target->escaped_names, tensor->what.name, tensor->what.name_size);
    return FSDP_OK;
}

static fsdp_status escape_names(fsdp_packed *target, fsdp_error *err)
{
    for (size_t i = 0; i < target->tensor_count; i++) {
        target_tensor *tensor = &target->tensors[i];
        tensor->stored_name = tensor->what.name;
        tensor->stored_name_size = tensor->what.name_size;
        if (tensor->what.name &&
            !holds_name_as_is(target->packed, tensor->stored_name, tensor->stored_name_size))
            FSDP_TRY(spell(target, tensor, err));
    }
    if (target->escaped_names.size > 0)
        fsdp_text_addf(&target->escaped_names, "}");
    return target->escaped_names.failed ? fsdp_fail_memory(err, target->path) : FSDP_OK;
}

/* --- files ------------------------------------------------------------------------------------ */

fsdp_status fsdp_packed_add_file(fsdp_packed *target, const char *name, int64_t size,
                                 int *number_out, fsdp_error *err)
{
    if (!fsdp_grow(&target->files, &target->file_room, target->file_count + 1,
                   sizeof *target->files))
        return fsdp_fail_memory(err, target->path);
    char *joined = target->format->writes_directory ? fsdp_path_join(target->path, name) : NULL;
    const char *path = joined ? joined : target->path;
    target_file file = {.path = fsdp_arena_strndup(&target->arena, path, strlen(path))};
    bool is_full = !file.path || (target->format->writes_directory && !joined);
    fsdp_free(joined);
    if (is_full)
        return fsdp_fail_memory(err, target->path);
    FSDP_TRY(fsdp_io_open(target->io, file.path, FSDP_IO_CREATE, &file.file, err));
    *number_out = (int)target->file_count;
    target->files[target->file_count++] = file;
    target->file_bytes += size;
    return size > 0 ? fsdp_io_reserve(file.file, file.path, size, err) : FSDP_OK;
}

fsdp_status fsdp_packed_put(fsdp_packed *target, int file, const void *data, size_t size,
                            int64_t offset, fsdp_error *err)
{
    return fsdp_io_write(target->files[file].file, target->files[file].path, data, size, offset,
                         err);
}

fsdp_status fsdp_packed_lay_out(fsdp_packed *target, fsdp_error *err)
{
    FSDP_TRY(escape_names(target, err));
    if (target->format->writes_directory) {
        target->has_directory = !fsdp_io_exists(target->io, target->path);
        if (target->has_directory)
            FSDP_TRY(fsdp_io_mkdir(target->io, target->path, err));
    }
    return target->packed->lay_out(target, err);
}

/* Files and bytes of the layout. */
static void packed_total(const fsdp_packed *target, int64_t *files_out, int64_t *bytes_out)
{
    *files_out = (int64_t)target->file_count;
    *bytes_out = target->file_bytes;
}

fsdp_packed_place fsdp_packed_place_of(const fsdp_packed *target, size_t number)
{
    const target_tensor *tensor = &target->tensors[number];
    const target_file *file = &target->files[tensor->file];
    return (fsdp_packed_place){
        .file = file->file, .path = file->path, .offset = tensor->offset, .size = tensor->size};
}

/* --- written ranges --------------------------------------------------------------------------- */

/* Joins range `second` to the adjacent one before it. */
static void join(const target_tensor *tensor, target_range *first, const target_range *second)
{
    int64_t size = second->count * (int64_t)fsdp_dtype_size(tensor->what.dtype);
    first->crc = fsdp_crc32_join(first->crc, second->crc, (uint64_t)size);
    first->count += second->count;
}

/* Inserts a range in order and joins it with its neighbours. */
static fsdp_status insert_range(target_tensor *tensor, target_range range, fsdp_error *err)
{
    size_t low = 0, high = tensor->range_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (tensor->ranges[middle].first < range.first)
            low = middle + 1;
        else
            high = middle;
    }
    target_range *before = low > 0 ? &tensor->ranges[low - 1] : NULL;
    target_range *after = low < tensor->range_count ? &tensor->ranges[low] : NULL;
    if ((before && before->first + before->count > range.first) ||
        (after && range.first + range.count > after->first))
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "elements were written twice");
    bool joins_after = after && range.first + range.count == after->first;
    if (joins_after)
        join(tensor, &range, after);
    if (before && before->first + before->count == range.first) {
        join(tensor, before, &range);
        if (joins_after) {
            tensor->range_count--;
            memmove(after, after + 1, (tensor->range_count - low) * sizeof *after);
        }
        return FSDP_OK;
    }
    if (joins_after) {
        *after = range;
        return FSDP_OK;
    }
    if (!fsdp_grow(&tensor->ranges, &tensor->range_room, tensor->range_count + 1, sizeof range))
        return fsdp_fail_memory(err, "what was written");
    memmove(tensor->ranges + low + 1, tensor->ranges + low,
            (tensor->range_count - low) * sizeof range);
    tensor->ranges[low] = range;
    tensor->range_count++;
    return FSDP_OK;
}

static fsdp_status keep_range(fsdp_packed *target, size_t number, target_range range,
                              fsdp_error *err)
{
    pthread_mutex_lock(&target->lock);
    fsdp_status status = insert_range(&target->tensors[number], range, err);
    pthread_mutex_unlock(&target->lock);
    return status;
}

static fsdp_status check_range(const fsdp_packed *target, size_t number, int64_t first,
                               int64_t count, fsdp_error *err)
{
    bool is_inside = number < target->tensor_count && first >= 0 && count >= 0 &&
                     count <= target->tensors[number].count - first;
    return is_inside ? FSDP_OK
                     : fsdp_fail(err, FSDP_ERR_INTERNAL, "elements of no tensor were written");
}

fsdp_status fsdp_packed_write(fsdp_packed *target, size_t number, int64_t first, int64_t count,
                              const void *data, fsdp_error *err)
{
    FSDP_TRY(check_range(target, number, first, count, err));
    if (count == 0)
        return FSDP_OK;
    const target_tensor *tensor = &target->tensors[number];
    int64_t element_size = (int64_t)fsdp_dtype_size(tensor->what.dtype);
    size_t size = (size_t)(count * element_size);
    fsdp_flow("formats/target/packed.c", "%" PRId64 " elements at element %" PRId64 " of '%.*s'",
              count, first, (int)tensor->what.name_size,
              tensor->what.name ? tensor->what.name : "");
    FSDP_TRY(fsdp_packed_put(target, tensor->file, data, size,
                             tensor->offset + first * element_size, err));
    target_range range = {.first = first,
                          .count = count,
                          .crc = target->packed->has_crc ? fsdp_crc32(0, data, size) : 0};
    return keep_range(target, number, range, err);
}

uint32_t fsdp_packed_crc(const target_tensor *tensor)
{
    return tensor->range_count > 0 ? tensor->ranges[0].crc : 0;
}

/* --- the end ---------------------------------------------------------------------------------- */

static fsdp_status check_complete(const fsdp_packed *target, fsdp_error *err)
{
    for (size_t i = 0; i < target->tensor_count; i++) {
        const target_tensor *tensor = &target->tensors[i];
        char shown[200];
        if (tensor->count > 0 &&
            (tensor->range_count != 1 || tensor->ranges[0].count != tensor->count))
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "tensor '%s' was not written completely",
                             fsdp_printable(tensor->what.name ? tensor->what.name : "",
                                            tensor->what.name_size, shown, sizeof shown));
    }
    return FSDP_OK;
}

static fsdp_status close_files(fsdp_packed *target, fsdp_error *err)
{
    for (size_t i = 0; i < target->file_count; i++) {
        target_file *file = &target->files[i];
        if (target->opts.sync)
            FSDP_TRY(fsdp_io_sync(file->file, file->path, err));
        FSDP_TRY(fsdp_io_close(&file->file, file->path, err));
    }
    return target->opts.sync && target->has_directory
               ? fsdp_io_sync_dir(target->io, target->path, err)
               : FSDP_OK;
}

fsdp_status fsdp_packed_finish(fsdp_packed *target, fsdp_error *err)
{
    fsdp_status status = check_complete(target, err);
    if (status == FSDP_OK && target->packed->finish)
        status = target->packed->finish(target, err);
    if (status == FSDP_OK)
        status = close_files(target, err);
    if (status == FSDP_OK)
        release(target);
    else
        fsdp_packed_discard(target);
    return status;
}

void fsdp_packed_discard(fsdp_packed *target)
{
    if (!target)
        return;
    for (size_t i = 0; i < target->file_count; i++) /* nobody relies on unsynced files */
        (void)fsdp_io_close(&target->files[i].file, target->files[i].path, NULL);
    release(target);
}

/* --- the functions of target.h ---------------------------------------------------------------- */

struct fsdp_target {
    const fsdp_format *format;
    fsdp_packed *packed;
    size_t *numbers; /* per entry: number of its tensor */
};

static void target_release(fsdp_target *target)
{
    fsdp_free(target->numbers);
    fsdp_free(target);
}

static fsdp_status add_entry(fsdp_target *target, const fsdp_target_entry *entry,
                             size_t *number_out, fsdp_error *err)
{
    if (entry->value)
        return fsdp_packed_add_value(target->packed, entry->name, entry->name_size, entry->value,
                                     err);
    fsdp_packed_tensor tensor = {entry->name, entry->name_size, entry->dtype, entry->ndim,
                                 entry->shape};
    return fsdp_packed_add_tensor(target->packed, &tensor, number_out, err);
}

static fsdp_status declare(fsdp_target *target, const fsdp_target_opts *opts, fsdp_error *err)
{
    fsdp_packed_opts packed = {opts->io, opts->max_file_bytes, opts->stem, opts->sync};
    target->format = opts->format;
    target->numbers = fsdp_alloc(opts->entry_count, sizeof *target->numbers);
    if (!target->numbers)
        return fsdp_fail_memory(err, "a conversion");
    FSDP_TRY(fsdp_packed_create(opts->format, &packed, opts->path ? opts->path : "",
                                &target->packed, err));
    for (size_t i = 0; i < opts->entry_count; i++)
        FSDP_TRY(add_entry(target, &opts->entries[i], &target->numbers[i], err));
    for (size_t i = 0; i < opts->tie_count; i++)
        FSDP_TRY(packed_add_tie(target->packed, opts->ties[i].name, opts->ties[i].name_size,
                                target->numbers[opts->ties[i].entry], err));
    if (opts->metadata)
        FSDP_TRY(packed_set_metadata(target->packed, opts->metadata, err));
    return opts->copied ? packed_set_copied(target->packed, opts->copied, err) : FSDP_OK;
}

static fsdp_status create(const fsdp_target_opts *opts, fsdp_target **target_out, fsdp_error *err)
{
    fsdp_target *target = fsdp_alloc(1, sizeof *target);
    if (!target)
        return fsdp_fail_memory(err, "a conversion");
    fsdp_status st = declare(target, opts, err);
    if (st == FSDP_OK)
        st = fsdp_packed_lay_out(target->packed, err);
    if (st != FSDP_OK) {
        fsdp_packed_discard(target->packed);
        target_release(target);
        return st;
    }
    *target_out = target;
    return FSDP_OK;
}

/* Lays the target out without creating files. */
static fsdp_status measure(const fsdp_target_opts *opts, int64_t *files_out, int64_t *bytes_out,
                           fsdp_error *err)
{
    fsdp_target_opts dry = *opts;
    fsdp_target *target = NULL;
    dry.io = fsdp_io_dry();
    dry.sync = false;
    FSDP_TRY(create(&dry, &target, err));
    packed_total(target->packed, files_out, bytes_out);
    fsdp_packed_discard(target->packed);
    target_release(target);
    return FSDP_OK;
}

/* The only box of an entry is the whole tensor. */
static fsdp_status write_elements(fsdp_target *target, const fsdp_target_piece *piece,
                                  fsdp_error *err)
{
    return fsdp_packed_write(target->packed, target->numbers[piece->entry], piece->first,
                             piece->count, piece->data, err);
}

static fsdp_status finish(fsdp_target *target, fsdp_error *err)
{
    fsdp_status st = fsdp_packed_finish(target->packed, err);
    target_release(target);
    return st;
}

static void discard(fsdp_target *target)
{
    fsdp_packed_discard(target->packed);
    target_release(target);
}

static fsdp_status place(const fsdp_target *target, size_t entry, size_t box,
                         fsdp_target_place *place_out, fsdp_error *err)
{
    fsdp_packed_place lies = fsdp_packed_place_of(target->packed, target->numbers[entry]);
    const char *name = target->format->writes_directory ? strrchr(lies.path, '/') + 1 : "";
    (void)box; /* the box is the whole tensor */
    (void)err;
    *place_out = (fsdp_target_place){name, lies.offset};
    return FSDP_OK;
}

const fsdp_target_ops fsdp_packed_ops = {measure, create, write_elements, finish, discard, place};
