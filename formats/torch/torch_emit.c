/* The records of a torch.save archive, as PyTorch 2.15 writes them: see torch_emit.h. */
#include "formats/torch/torch_emit.h"

#include "base/core/fnv.h"
#include "base/core/mem.h"
#include "formats/zip/zip.h"
#include "kernels/kernels.h"

#include <stdio.h>
#include <string.h>

enum { TOGETHER = 64 << 10, SYNCED_EARLY = 1 << 20, IDENTITY_SIZE = 40 };

static const struct {
    const char *name, *text;
} marks[] = {{"archive/.format_version", "1"},
             {"archive/.storage_alignment", "64"},
             {"archive/byteorder", "little"}};
static const char version[] = "3\n";

int64_t torch_bytes_of(fsdp_dtype dtype, int ndim, const int64_t *shape)
{
    fsdp_box whole = fsdp_box_whole(ndim, shape);
    return fsdp_box_count(&whole) * (int64_t)fsdp_dtype_size(dtype);
}

fsdp_status torch_blame_entry(const fsdp_target_entry *entry, fsdp_status status, fsdp_error *err)
{
    char name[160];
    if (status != FSDP_OK)
        fsdp_error_prefix(err, "'%s'",
                          fsdp_printable(entry->name, entry->name_size, name, sizeof name));
    return status;
}

bool torch_holds_dtype(fsdp_dtype dtype)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(dtype);
    return info && info->torch;
}

/* --- tensors ---------------------------------------------------------------------------------- */

/* Strides of a row-major tensor, in elements; a dim of length 0 counts as one. */
static void add_strides(fsdp_pickler *pickler, int ndim, const int64_t *shape)
{
    int64_t strides[FSDP_MAX_DIMS], stride = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        strides[d] = stride;
        stride *= shape[d] > 0 ? shape[d] : 1;
    }
    fsdp_pickler_ints(pickler, strides, (size_t)ndim);
}

/* ("storage", class, key, "cpu", count): the count is elements for a storage with a class, bytes
 * for one without. */
static void add_storage(fsdp_pickler *pickler, const fsdp_dtype_info *info, size_t key,
                        int64_t bytes)
{
    char text[24];
    int size = snprintf(text, sizeof text, "%zu", key);
    fsdp_pickler_op(pickler, FSDP_OP_MARK);
    fsdp_pickler_word(pickler, "storage");
    if (info->torch_storage)
        fsdp_pickler_global(pickler, "torch", info->torch_storage);
    else
        fsdp_pickler_global(pickler, "torch.storage", "UntypedStorage");
    fsdp_pickler_text(pickler, text, (size_t)size);
    fsdp_pickler_word(pickler, "cpu");
    fsdp_pickler_int(pickler, info->torch_storage ? bytes / (int64_t)info->size : bytes);
    fsdp_pickler_op(pickler, FSDP_OP_TUPLE);
    fsdp_pickler_op(pickler, FSDP_OP_PERSID);
}

fsdp_status torch_emit_tensor(fsdp_pickler *pickler, fsdp_dtype dtype, int ndim,
                              const int64_t *shape, size_t key, fsdp_error *err)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(dtype);
    if (!info || !info->torch)
        return fsdp_fail(err, FSDP_ERR_USAGE, "torch has no dtype %s", fsdp_dtype_name(dtype));
    fsdp_pickler_global(pickler, "torch._utils",
                        info->torch_storage ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
    fsdp_pickler_op(pickler, FSDP_OP_MARK);
    add_storage(pickler, info, key, torch_bytes_of(dtype, ndim, shape));
    fsdp_pickler_int(pickler, 0);
    fsdp_pickler_ints(pickler, shape, (size_t)ndim);
    add_strides(pickler, ndim, shape);
    fsdp_pickler_op(pickler, FSDP_OP_FALSE);                    /* requires_grad */
    fsdp_pickler_global(pickler, "collections", "OrderedDict"); /* hooks */
    fsdp_pickler_op(pickler, FSDP_OP_EMPTY_TUPLE);
    fsdp_pickler_op(pickler, FSDP_OP_REDUCE);
    if (!info->torch_storage)
        fsdp_pickler_global(pickler, "torch", info->torch);
    fsdp_pickler_op(pickler, FSDP_OP_TUPLE);
    fsdp_pickler_op(pickler, FSDP_OP_REDUCE);
    return FSDP_OK;
}

/* --- the archive ------------------------------------------------------------------------------ */

static void set_record(fsdp_zip_record *record, const char *name, const void *data, size_t size)
{
    snprintf(record->name, sizeof record->name, "%s", name);
    record->size = (int64_t)size;
    record->crc = data ? fsdp_crc32(0, data, size) : 0;
}

fsdp_status torch_place_archive(fsdp_zip_record *records, size_t storages, const fsdp_text *pickle,
                                int64_t *size_out, fsdp_error *err)
{
    fsdp_zip_record *closing = records + TORCH_LEADING + storages;
    int64_t place = 0;
    set_record(&records[0], "archive/data.pkl", pickle->data, pickle->size);
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++)
        set_record(&records[1 + i], marks[i].name, marks[i].text, strlen(marks[i].text));
    for (size_t i = 0; i < storages; i++)
        snprintf(records[TORCH_LEADING + i].name, FSDP_ZIP_NAME, "archive/data/%zu", i);
    set_record(&closing[0], "archive/version", version, strlen(version));
    set_record(&closing[1], "archive/.data/serialization_id", NULL, IDENTITY_SIZE);
    for (size_t i = 0; i < storages + TORCH_FIXED; i++)
        FSDP_TRY(fsdp_zip_place(&records[i], &place, err));
    *size_out = place + fsdp_zip_directory_size(records, storages + TORCH_FIXED);
    return FSDP_OK;
}

void torch_emit_leading(fsdp_text *text, const fsdp_zip_record *records, const fsdp_text *pickle)
{
    fsdp_zip_add_record(text, &records[0], pickle->data);
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++)
        fsdp_zip_add_record(text, &records[1 + i], marks[i].text);
}

/* The identity: 20 digits of all names and 20 of all checksums, so that equal contents have
 * equal identities. */
static void identify(const fsdp_zip_record *records, size_t count, char *identity)
{
    uint64_t names = FSDP_FNV_BEGIN, sums = FSDP_FNV_BEGIN;
    for (size_t i = 0; i < count; i++) {
        names = fsdp_fnv(names, records[i].name, strlen(records[i].name) + 1);
        sums = fsdp_fnv(sums, &records[i].crc, sizeof records[i].crc);
    }
    snprintf(identity, IDENTITY_SIZE + 1, "%020llu%020llu", (unsigned long long)names,
             (unsigned long long)sums);
}

void torch_emit_closing(fsdp_text *text, fsdp_zip_record *records, size_t storages)
{
    char identity[IDENTITY_SIZE + 1];
    size_t count = storages + TORCH_FIXED;
    fsdp_zip_record *last = &records[count - 1];
    identify(records, count - 1, identity);
    last->crc = fsdp_crc32(0, identity, IDENTITY_SIZE);
    fsdp_zip_add_record(text, last - 1, version);
    fsdp_zip_add_record(text, last, identity);
    fsdp_zip_add_directory(text, records, count, fsdp_zip_record_end(last));
}

fsdp_status torch_emit_value(fsdp_text *text, fsdp_pickler *pickler, const fsdp_value *value,
                             fsdp_error *err)
{
    fsdp_zip_record records[TORCH_FIXED] = {0};
    int64_t size;
    fsdp_pickler_begin(pickler);
    FSDP_TRY(fsdp_pickler_value(pickler, value, err));
    fsdp_pickler_op(pickler, FSDP_OP_STOP);
    if (pickler->text.failed)
        return fsdp_fail_memory(err, "a value");
    FSDP_TRY(torch_place_archive(records, 0, &pickler->text, &size, err));
    torch_emit_leading(text, records, &pickler->text);
    torch_emit_closing(text, records, 0);
    return text->failed ? fsdp_fail_memory(err, "a value") : FSDP_OK;
}

/* --- writing ---------------------------------------------------------------------------------- */

bool torch_part_take(torch_part *part, const void *data, size_t size, int64_t behind)
{
    atomic_fetch_xor(&part->crc, fsdp_zip_crc_part(data, size, behind));
    return atomic_fetch_sub(&part->left, (int64_t)size) == (int64_t)size;
}

static fsdp_status write_text(fsdp_file *file, const char *path, const fsdp_text *text,
                              int64_t offset, fsdp_error *err)
{
    return text->size > 0 ? fsdp_io_write(file, path, text->data, text->size, offset, err)
                          : FSDP_OK;
}

/* Adjacent small texts are one write. */
static fsdp_status write_together(fsdp_file *file, const char *path, torch_piece *piece,
                                  fsdp_error *err)
{
    fsdp_text *text = &piece->before;
    int64_t offset = piece->offset - (int64_t)text->size;
    fsdp_text_add(text, piece->data, piece->size);
    if (piece->behind.size > 0 && piece->end == piece->offset + (int64_t)piece->size) {
        fsdp_text_add(text, piece->behind.data, piece->behind.size);
        piece->behind.size = 0;
    }
    return text->failed ? fsdp_fail_memory(err, "a record")
                        : write_text(file, path, text, offset, err);
}

static fsdp_status write_in_order(fsdp_file *file, const char *path, const torch_piece *piece,
                                  fsdp_error *err)
{
    FSDP_TRY(
        write_text(file, path, &piece->before, piece->offset - (int64_t)piece->before.size, err));
    return fsdp_io_write(file, path, piece->data, piece->size, piece->offset, err);
}

fsdp_status torch_write_piece(fsdp_file *file, const char *path, torch_piece *piece, bool sync,
                              fsdp_error *err)
{
    fsdp_status st = FSDP_OK;
    if (piece->before.failed || piece->behind.failed)
        st = fsdp_fail_memory(err, "a record");
    else if (piece->size <= TOGETHER)
        st = write_together(file, path, piece, err);
    else
        st = write_in_order(file, path, piece, err);
    if (st == FSDP_OK)
        st = write_text(file, path, &piece->behind, piece->end, err);
    if (st == FSDP_OK && sync && piece->size >= SYNCED_EARLY)
        fsdp_io_begin_sync(file, piece->offset, (int64_t)piece->size);
    fsdp_text_release(&piece->before);
    fsdp_text_release(&piece->behind);
    return st;
}
