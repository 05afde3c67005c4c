/*
 * Offsets and headers of the zip archives of torch.save: see zip_write.h. They equal those of
 * PyTorch's miniz: sizes and checksums stand after the bytes and in the directory, and the
 * zip64 end records are always written.
 */
#include "formats/zip/zip_write.h"

#include "base/core/mem.h"
#include "formats/zip/zip.h"
#include "kernels/kernels.h"

#include <string.h>

enum {
    LOCAL_BYTES = 30,
    CENTRAL_BYTES = 46,
    END_BYTES = 22,
    END64_BYTES = 56,
    LOCATOR_BYTES = 20,
    EXTRA_BYTES = 4, /* id and size of an extra field */
    EXTRA_ZIP64 = 0x0001,
    FLAG_UTF8 = 0x0800,
    FLAG_TRAILER = 0x0008
};

static const int64_t narrow_end = UINT32_MAX; /* from here on a number needs 64 bits */
static const int64_t archive_most = INT64_C(1) << 62;

static void add_number(fsdp_text *text, uint64_t number, size_t size)
{
    char bytes[8];
    for (size_t i = 0; i < size; i++)
        bytes[i] = (char)(number >> 8 * i);
    fsdp_text_add(text, bytes, size);
}

static void add_signature(fsdp_text *text, const char *kind)
{
    fsdp_text_add(text, "PK", 2);
    fsdp_text_add(text, kind, 2);
}

static bool is_wide(int64_t number)
{
    return number >= narrow_end;
}

/* --- places ----------------------------------------------------------------------------------- */

/* The field of 64-bit numbers in a local header, its head included. */
static int64_t wide_extra(const fsdp_zip_record *record)
{
    int64_t size = (is_wide(record->size) ? 16 : 0) + (is_wide(record->header) ? 8 : 0);
    return size > 0 ? EXTRA_BYTES + size : 0;
}

static int64_t trailer_size(const fsdp_zip_record *record)
{
    if (record->size == 0)
        return 0;
    return is_wide(record->size) || is_wide(record->header) ? 24 : 16;
}

int64_t fsdp_zip_record_end(const fsdp_zip_record *record)
{
    return record->data + record->size + trailer_size(record);
}

fsdp_status fsdp_zip_place(fsdp_zip_record *record, int64_t *place, fsdp_error *err)
{
    record->header = *place;
    int64_t start = LOCAL_BYTES + (int64_t)strlen(record->name) + EXTRA_BYTES + wide_extra(record);
    if (*place < 0 || *place > archive_most || record->size > archive_most)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "the archive would have over 2^62 bytes");
    start += *place;
    record->data = (start + FSDP_ZIP_ALIGNMENT - 1) / FSDP_ZIP_ALIGNMENT * FSDP_ZIP_ALIGNMENT;
    *place = fsdp_zip_record_end(record);
    return FSDP_OK;
}

/* --- records ---------------------------------------------------------------------------------- */

static unsigned flags_of(const fsdp_zip_record *record)
{
    return record->size > 0 ? FLAG_UTF8 | FLAG_TRAILER : FLAG_UTF8;
}

/* Torch leaves the packed size 0 here; readers take it from the directory. */
static void add_wide_extra(fsdp_text *text, const fsdp_zip_record *record)
{
    int64_t size = wide_extra(record);
    if (size == 0)
        return;
    add_number(text, EXTRA_ZIP64, 2);
    add_number(text, (uint64_t)(size - EXTRA_BYTES), 2);
    if (is_wide(record->size)) {
        add_number(text, (uint64_t)record->size, 8);
        add_number(text, 0, 8);
    }
    if (is_wide(record->header))
        add_number(text, (uint64_t)record->header, 8);
}

void fsdp_zip_add_header(fsdp_text *text, const fsdp_zip_record *record)
{
    static const char padding[FSDP_ZIP_ALIGNMENT] = {
        "ZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZZ"};
    size_t name_size = strlen(record->name);
    uint64_t extra = (uint64_t)(record->data - record->header) - LOCAL_BYTES - name_size;
    uint64_t filled = extra - (uint64_t)wide_extra(record) - EXTRA_BYTES;
    add_signature(text, "\3\4");
    add_number(text, 0, 2);
    add_number(text, flags_of(record), 2);
    add_number(text, 0, 2); /* stored */
    add_number(text, 0, 4); /* no time */
    add_number(text, 0, 4); /* checksum, sizes: in the trailer */
    add_number(text, 0, 8);
    add_number(text, name_size, 2);
    add_number(text, extra, 2);
    fsdp_text_add(text, record->name, name_size);
    add_wide_extra(text, record);
    fsdp_text_add(text, "FB", 2);
    add_number(text, filled, 2);
    fsdp_text_add(text, padding, (size_t)filled);
}

void fsdp_zip_add_trailer(fsdp_text *text, const fsdp_zip_record *record)
{
    int64_t size = trailer_size(record);
    if (size == 0)
        return;
    size_t width = size == 24 ? 8 : 4;
    add_signature(text, "\7\10");
    add_number(text, record->crc, 4);
    add_number(text, (uint64_t)record->size, width);
    add_number(text, (uint64_t)record->size, width);
}

void fsdp_zip_add_record(fsdp_text *text, const fsdp_zip_record *record, const void *data)
{
    fsdp_zip_add_header(text, record);
    fsdp_text_add(text, data, (size_t)record->size);
    fsdp_zip_add_trailer(text, record);
}

/* --- the directory ---------------------------------------------------------------------------- */

static int64_t central_size(const fsdp_zip_record *record)
{
    int64_t wide = (is_wide(record->size) ? 16 : 0) + (is_wide(record->header) ? 8 : 0);
    return CENTRAL_BYTES + (int64_t)strlen(record->name) + (wide > 0 ? EXTRA_BYTES + wide : 0);
}

static int64_t entries_size(const fsdp_zip_record *records, size_t count)
{
    int64_t size = 0;
    for (size_t i = 0; i < count; i++)
        size += central_size(&records[i]);
    return size;
}

int64_t fsdp_zip_directory_size(const fsdp_zip_record *records, size_t count)
{
    return entries_size(records, count) + END64_BYTES + LOCATOR_BYTES + END_BYTES;
}

static uint64_t narrow(int64_t number)
{
    return (uint64_t)(is_wide(number) ? narrow_end : number);
}

static void add_central(fsdp_text *text, const fsdp_zip_record *record)
{
    size_t name_size = strlen(record->name);
    size_t extra = (size_t)central_size(record) - CENTRAL_BYTES - name_size;
    add_signature(text, "\1\2");
    add_number(text, 0, 4);
    add_number(text, flags_of(record), 2);
    add_number(text, 0, 2);
    add_number(text, 0, 4);
    add_number(text, record->crc, 4);
    add_number(text, narrow(record->size), 4);
    add_number(text, narrow(record->size), 4);
    add_number(text, name_size, 2);
    add_number(text, extra, 2);
    add_number(text, 0, 8); /* comment, disk, attributes */
    add_number(text, 0, 2);
    add_number(text, narrow(record->header), 4);
    fsdp_text_add(text, record->name, name_size);
    if (extra == 0)
        return;
    add_number(text, EXTRA_ZIP64, 2);
    add_number(text, extra - EXTRA_BYTES, 2);
    if (is_wide(record->size)) {
        add_number(text, (uint64_t)record->size, 8);
        add_number(text, (uint64_t)record->size, 8);
    }
    if (is_wide(record->header))
        add_number(text, (uint64_t)record->header, 8);
}

static void add_ends(fsdp_text *text, size_t count, int64_t directory, int64_t size)
{
    uint64_t few = count < UINT16_MAX ? count : UINT16_MAX;
    add_signature(text, "\6\6");
    add_number(text, END64_BYTES - 12, 8);
    add_number(text, 0x031e, 2); /* made by, needed: as torch says */
    add_number(text, 45, 2);
    add_number(text, 0, 8); /* disks */
    add_number(text, count, 8);
    add_number(text, count, 8);
    add_number(text, (uint64_t)size, 8);
    add_number(text, (uint64_t)directory, 8);
    add_signature(text, "\6\7");
    add_number(text, 0, 4);
    add_number(text, (uint64_t)(directory + size), 8);
    add_number(text, 1, 4);
    add_signature(text, "\5\6");
    add_number(text, 0, 4);
    add_number(text, few, 2);
    add_number(text, few, 2);
    add_number(text, narrow(size), 4);
    add_number(text, narrow(directory), 4);
    add_number(text, 0, 2);
}

void fsdp_zip_add_directory(fsdp_text *text, const fsdp_zip_record *records, size_t count,
                            int64_t place)
{
    for (size_t i = 0; i < count; i++)
        add_central(text, &records[i]);
    add_ends(text, count, place, entries_size(records, count));
}

/* --- checksums -------------------------------------------------------------------------------- */

/* CRC-32 is linear: the checksum of A followed by B is the checksum of A, shifted over the bytes
 * of B, XOR the checksum of B. */
uint32_t fsdp_zip_crc_part(const void *data, size_t size, int64_t behind)
{
    uint32_t crc = fsdp_crc32(0, data, size);
    return behind > 0 ? fsdp_crc32_join(crc, 0, (uint64_t)behind) : crc;
}
