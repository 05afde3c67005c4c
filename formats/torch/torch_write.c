/*
 * Writes a torch.save file: see target.h. The mirror is torch_read.c. The file holds one dict,
 * in which dicts and lists are nested by the paths of names (nesting.c, torch_tree.c); a name
 * without a path is a key.
 *
 *   pickle and offsets (plan) -> leading records (create) -> storages, by many
 *   threads (write) -> closing records with the checksums (finish)
 */
#include "base/core/mem.h"
#include "formats/torch/torch_tree.h"

#include <string.h>

struct fsdp_target {
    fsdp_target_opts opts;
    char *path;
    fsdp_file *file;
    fsdp_pickler pickler;
    fsdp_zip_record *records; /* TORCH_FIXED + storages */
    torch_part *parts;        /* per storage */
    size_t *storage_of; /* per entry that is a tensor and the first of its names: counted from 1 */
    size_t storages;
    int64_t size;
};

/* --- planning --------------------------------------------------------------------------------- */

static void release(fsdp_target *target)
{
    fsdp_pickler_release(&target->pickler);
    fsdp_free(target->records);
    fsdp_free(target->parts);
    fsdp_free(target->storage_of);
    fsdp_free(target->path);
    fsdp_free(target);
}

static fsdp_status allocate(fsdp_target *target, fsdp_error *err)
{
    const fsdp_target_opts *opts = &target->opts;
    size_t storages = 0;
    for (size_t i = 0; i < opts->entry_count; i++)
        storages += opts->entries[i].value == NULL;
    target->records = fsdp_alloc(storages + TORCH_FIXED, sizeof *target->records);
    target->parts = fsdp_alloc(storages, sizeof *target->parts);
    target->storage_of = fsdp_alloc(opts->entry_count, sizeof *target->storage_of);
    if (!target->records || !target->parts || !target->storage_of)
        return fsdp_fail_memory(err, "a torch.save file");
    return FSDP_OK;
}

static size_t first_name(const fsdp_target *target, size_t i)
{
    size_t same = target->opts.entries[i].same_as;
    return same > 0 ? same - 1 : i;
}

/* Storages are numbered in the order of the pickle, as torch does; all names of a tensor share
 * one. */
static size_t storage_for(fsdp_target *target, size_t i)
{
    const fsdp_target_entry *entry = &target->opts.entries[i];
    size_t *known = &target->storage_of[first_name(target, i)];
    if (*known == 0) {
        int64_t size = torch_bytes_of(entry->dtype, entry->ndim, entry->shape);
        *known = ++target->storages;
        target->records[TORCH_LEADING + *known - 1].size = size;
        atomic_store(&target->parts[*known - 1].left, size);
    }
    return *known - 1;
}

static fsdp_status pickle_entry(void *context, size_t i, fsdp_error *err)
{
    fsdp_target *target = context;
    const fsdp_target_entry *entry = &target->opts.entries[i];
    if (entry->value)
        return torch_blame_entry(entry, fsdp_pickler_value(&target->pickler, entry->value, err),
                                 err);
    size_t storage = storage_for(target, i);
    return torch_blame_entry(
        entry,
        torch_emit_tensor(&target->pickler, entry->dtype, entry->ndim, entry->shape, storage, err),
        err);
}

static fsdp_status pickle_all(fsdp_target *target, fsdp_error *err)
{
    fsdp_pickler *pickler = &target->pickler;
    pickler->weights_only = true;
    fsdp_pickler_begin(pickler);
    FSDP_TRY(torch_emit_tree(pickler, &target->opts, pickle_entry, target, err));
    fsdp_pickler_op(pickler, FSDP_OP_STOP);
    return pickler->text.failed ? fsdp_fail_memory(err, "a pickle") : FSDP_OK;
}

static fsdp_status plan(const fsdp_target_opts *opts, fsdp_target **target_out, fsdp_error *err)
{
    fsdp_target *target = fsdp_alloc(1, sizeof *target);
    if (!target)
        return fsdp_fail_memory(err, "a torch.save file");
    target->opts = *opts;
    fsdp_status st = allocate(target, err);
    if (st == FSDP_OK)
        st = pickle_all(target, err);
    if (st == FSDP_OK)
        st = torch_place_archive(target->records, target->storages, &target->pickler.text,
                                 &target->size, err);
    if (st == FSDP_OK)
        *target_out = target;
    else
        release(target);
    return st;
}

static fsdp_status measure(const fsdp_target_opts *opts, int64_t *files_out, int64_t *bytes_out,
                           fsdp_error *err)
{
    fsdp_target *target;
    FSDP_TRY(plan(opts, &target, err));
    *files_out = 1;
    *bytes_out = target->size;
    release(target);
    return FSDP_OK;
}

/* --- writing ---------------------------------------------------------------------------------- */

static void discard(fsdp_target *target)
{
    (void)fsdp_io_close(&target->file, target->path, NULL);
    release(target);
}

static fsdp_status write_leading(fsdp_target *target, fsdp_error *err)
{
    fsdp_text text = {0};
    torch_emit_leading(&text, target->records, &target->pickler.text);
    fsdp_status st = text.failed ? fsdp_fail_memory(err, "a pickle")
                                 : fsdp_io_write(target->file, target->path, text.data, text.size,
                                                 target->records[0].header, err);
    fsdp_text_release(&text);
    return st;
}

static fsdp_status open_file(fsdp_target *target, fsdp_error *err)
{
    target->path = fsdp_strndup(target->opts.path, strlen(target->opts.path));
    if (!target->path)
        return fsdp_fail_memory(err, "a path");
    FSDP_TRY(fsdp_io_open(target->opts.io, target->path, FSDP_IO_CREATE, &target->file, err));
    FSDP_TRY(fsdp_io_reserve(target->file, target->path, target->size, err));
    return write_leading(target, err);
}

static fsdp_status create(const fsdp_target_opts *opts, fsdp_target **target_out, fsdp_error *err)
{
    fsdp_target *target;
    FSDP_TRY(plan(opts, &target, err));
    fsdp_status st = open_file(target, err);
    if (st == FSDP_OK)
        *target_out = target;
    else
        discard(target);
    return st;
}

/* The only box of an entry is the whole tensor. */
static fsdp_status write(fsdp_target *target, const fsdp_target_piece *elements, fsdp_error *err)
{
    size_t entry = elements->entry, number = target->storage_of[first_name(target, entry)] - 1;
    int64_t element = (int64_t)fsdp_dtype_size(target->opts.entries[entry].dtype);
    int64_t end = elements->first + elements->count;
    fsdp_zip_record *record = &target->records[TORCH_LEADING + number];
    torch_part *part = &target->parts[number];
    torch_piece piece = {.data = elements->data,
                         .size = (size_t)(elements->count * element),
                         .offset = record->data + elements->first * element,
                         .end = record->data + record->size};
    if (elements->count == 0 || first_name(target, entry) != entry)
        return FSDP_OK;
    if (elements->first == 0)
        fsdp_zip_add_header(&piece.before, record);
    if (torch_part_take(part, piece.data, piece.size, record->size - end * element)) {
        record->crc = atomic_load(&part->crc);
        fsdp_zip_add_trailer(&piece.behind, record);
    }
    return torch_write_piece(target->file, target->path, &piece, target->opts.sync, err);
}

/* --- the end ---------------------------------------------------------------------------------- */

static fsdp_status write_empty(fsdp_target *target, const fsdp_zip_record *record, fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_zip_add_header(&text, record);
    fsdp_status st = text.failed ? fsdp_fail_memory(err, "a record")
                                 : fsdp_io_write(target->file, target->path, text.data, text.size,
                                                 record->header, err);
    fsdp_text_release(&text);
    return st;
}

static fsdp_status check_complete(fsdp_target *target, fsdp_error *err)
{
    for (size_t i = 0; i < target->storages; i++) {
        if (atomic_load(&target->parts[i].left) != 0)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s': storage %zu is not complete",
                             target->path, i);
        if (target->records[TORCH_LEADING + i].size == 0)
            FSDP_TRY(write_empty(target, &target->records[TORCH_LEADING + i], err));
    }
    return FSDP_OK;
}

static fsdp_status write_closing(fsdp_target *target, fsdp_error *err)
{
    fsdp_text text = {0};
    torch_emit_closing(&text, target->records, target->storages);
    fsdp_status st =
        text.failed ? fsdp_fail_memory(err, "a zip directory")
                    : fsdp_io_write(target->file, target->path, text.data, text.size,
                                    target->records[TORCH_LEADING + target->storages].header, err);
    fsdp_text_release(&text);
    return st;
}

static fsdp_status finish(fsdp_target *target, fsdp_error *err)
{
    fsdp_status st = check_complete(target, err);
    if (st == FSDP_OK)
        st = write_closing(target, err);
    if (st == FSDP_OK && target->opts.sync)
        st = fsdp_io_sync(target->file, target->path, err);
    if (st == FSDP_OK)
        st = fsdp_io_close(&target->file, target->path, err);
    discard(target);
    return st;
}

static fsdp_status place(const fsdp_target *target, size_t entry, size_t box,
                         fsdp_target_place *place_out, fsdp_error *err)
{
    (void)box;
    (void)err;
    size_t storage = target->storage_of[first_name(target, entry)] - 1;
    *place_out =
        (fsdp_target_place){.file = "", .offset = target->records[TORCH_LEADING + storage].data};
    return FSDP_OK;
}

static const fsdp_target_ops ops = {measure, create, write, finish, discard, place};

const fsdp_format_writer fsdp_torch_writer = {.ops = &ops, .holds_dtype = torch_holds_dtype};
