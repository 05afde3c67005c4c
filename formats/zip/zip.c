/*
 * An untrusted zip archive: its directory (end record, central directory, local headers), and the bytes of
 * its entries, inflated and compared with their checksums. See zip.h.
 *
 *   end of the range -> end record (and its zip64 form) -> central directory -> one local header per entry
 *
 * An archive that two readers could understand differently is refused.
 */
#include "formats/zip/zip.h"
#include "base/core/bytes.h"
#include "base/core/mem.h"
#include "base/text.h"
#include "kernels/kernels.h"

#include <stdlib.h>
#include <string.h>
#include <zlib.h>

/* === names ==================================================================================== */

/*
 * Names of archives whose names are data (npz), as Python's zipfile, and with it NumPy, reads them: UTF-8
 * when bit 11 of an entry's flags says so, else code page 437.
 */

/* Bytes from 0x80 on; those below are ASCII. */
static const uint16_t code_page_437[128] = {
    0x00C7, 0x00FC, 0x00E9, 0x00E2, 0x00E4, 0x00E0, 0x00E5, 0x00E7, 0x00EA, 0x00EB, 0x00E8, 0x00EF,
    0x00EE, 0x00EC, 0x00C4, 0x00C5, 0x00C9, 0x00E6, 0x00C6, 0x00F4, 0x00F6, 0x00F2, 0x00FB, 0x00F9,
    0x00FF, 0x00D6, 0x00DC, 0x00A2, 0x00A3, 0x00A5, 0x20A7, 0x0192, 0x00E1, 0x00ED, 0x00F3, 0x00FA,
    0x00F1, 0x00D1, 0x00AA, 0x00BA, 0x00BF, 0x2310, 0x00AC, 0x00BD, 0x00BC, 0x00A1, 0x00AB, 0x00BB,
    0x2591, 0x2592, 0x2593, 0x2502, 0x2524, 0x2561, 0x2562, 0x2556, 0x2555, 0x2563, 0x2551, 0x2557,
    0x255D, 0x255C, 0x255B, 0x2510, 0x2514, 0x2534, 0x252C, 0x251C, 0x2500, 0x253C, 0x255E, 0x255F,
    0x255A, 0x2554, 0x2569, 0x2566, 0x2560, 0x2550, 0x256C, 0x2567, 0x2568, 0x2564, 0x2565, 0x2559,
    0x2558, 0x2552, 0x2553, 0x256B, 0x256A, 0x2518, 0x250C, 0x2588, 0x2584, 0x258C, 0x2590, 0x2580,
    0x03B1, 0x00DF, 0x0393, 0x03C0, 0x03A3, 0x03C3, 0x00B5, 0x03C4, 0x03A6, 0x0398, 0x03A9, 0x03B4,
    0x221E, 0x03C6, 0x03B5, 0x2229, 0x2261, 0x00B1, 0x2265, 0x2264, 0x2320, 0x2321, 0x00F7, 0x2248,
    0x00B0, 0x2219, 0x00B7, 0x221A, 0x207F, 0x00B2, 0x25A0, 0x00A0,
};

static size_t encode(uint16_t point, uint8_t out[3])
{
    if (point < 0x800) {
        out[0] = (uint8_t)(0xC0 | point >> 6);
        out[1] = (uint8_t)(0x80 | (point & 0x3F));
        return 2;
    }
    out[0] = (uint8_t)(0xE0 | point >> 12);
    out[1] = (uint8_t)(0x80 | (point >> 6 & 0x3F));
    out[2] = (uint8_t)(0x80 | (point & 0x3F));
    return 3;
}

static bool zip_name_is_ascii(const char *name, size_t size)
{
    for (size_t i = 0; i < size; i++)
        if ((uint8_t)name[i] >= 0x80)
            return false;
    return true;
}

/* Adds the UTF-8 form of a name in code page 437 to out. */
static void zip_name_decode(fsdp_text *out, const char *name, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        uint8_t byte = (uint8_t)name[i], bytes[3] = {byte};
        fsdp_text_add(out, (const char *)bytes,
                      byte < 0x80 ? 1 : encode(code_page_437[byte - 0x80], bytes));
    }
}

/* === the archive ============================================================================== */

enum {
    CENTRAL_SIGNATURE = 0x02014b50,
    LOCAL_SIGNATURE = 0x04034b50,
    END_SIGNATURE = 0x06054b50,
    END64_SIGNATURE = 0x06064b50,
    LOCATOR_SIGNATURE = 0x07064b50
};
enum {
    CENTRAL_BYTES = 46,
    LOCAL_BYTES = 30,
    END_BYTES = 22,
    END64_BYTES = 56,
    LOCATOR_BYTES = 20,
    COMMENT_BYTES = 65535
};
enum { FLAG_ENCRYPTED = 1, FLAG_DESCRIPTOR = 8, FLAG_STRONG_ENCRYPTION = 64, FLAG_MASKED = 8192 };
enum { FLAG_UTF8 = 2048 };
enum { METHOD_STORED = 0, METHOD_DEFLATE = 8 };
enum { EXTRA_ZIP64 = 1, EXTRA_UNICODE_PATH = 0x7075 };
enum { WINDOW_BYTES = 4096, SMALL_ARCHIVE_BYTES = 16384 };
enum { DEFLATE_RATIO = 1032 }; /* no deflate stream becomes larger */

static const int64_t directory_limit = INT64_C(1) << 30;
static const uint32_t saturated = UINT32_MAX;

/* An entry as the central directory describes it, before its local header is read. */
typedef struct central {
    fsdp_zip_entry entry;
    unsigned flags, method;
    int64_t header; /* offset of its local header from the beginning of the archive */
    uint32_t kind;  /* of the file, as Unix encodes it */
    uint8_t dos_kind;
} central;

typedef struct window {
    uint8_t *data;
    size_t size, capacity;
    int64_t start; /* offset from the beginning of the archive */
} window;

struct fsdp_zip {
    fsdp_zip_input input;
    unsigned flags;
    window window;
    int64_t directory, directory_size, end; /* end: where the directory must end */
    uint64_t count_told;
    char *names;
    fsdp_text decoded; /* names that were not UTF-8 */
    central *entries;
    size_t count;
    central **sorted; /* by name */
};

/* --- messages --------------------------------------------------------------------------------- */

static fsdp_status refuse(const fsdp_zip *zip, fsdp_status status, const char *why, fsdp_error *err)
{
    return fsdp_fail(err, status, "'%s': the zip archive at byte %lld %s", zip->input.path,
                     (long long)zip->input.offset, why);
}

static fsdp_status refuse_entry(const fsdp_zip *zip, const central *item, fsdp_status status,
                                const char *why, fsdp_error *err)
{
    char name[200];
    fsdp_printable(item->entry.name, item->entry.name_size, name, sizeof name);
    return fsdp_fail(err, status, "'%s': record '%s' of the zip archive at byte %lld %s",
                     zip->input.path, name, (long long)zip->input.offset, why);
}

/* --- bytes of the archive ----------------------------------------------------------------------- */

/* Loads bytes [start, start + size) of the archive into the window. */
static fsdp_status look(fsdp_zip *zip, int64_t start, size_t size, fsdp_error *err)
{
    window *view = &zip->window;
    int64_t room = zip->input.size - start;
    if (start < 0 || room < 0 || (uint64_t)room < size)
        return refuse(zip, FSDP_ERR_DAMAGED, "points beyond its end", err);
    if (start < view->start || (uint64_t)(start - view->start) + size > view->size) {
        size_t wanted = size > WINDOW_BYTES ? size : WINDOW_BYTES;
        if (zip->input.size <= SMALL_ARCHIVE_BYTES) {
            start = 0;
            room = zip->input.size;
            wanted = (size_t)room;
        }
        if ((uint64_t)room < wanted)
            wanted = (size_t)room;
        if (!fsdp_grow(&view->data, &view->capacity, wanted, 1))
            return fsdp_fail_memory(err, "a zip directory");
        view->size = 0;
        FSDP_TRY(zip->input.read(zip->input.context, view->data, wanted, zip->input.offset + start,
                                 err));
        view->start = start;
        view->size = wanted;
    }
    return FSDP_OK;
}

/* The position in the window of a byte that look() loaded. */
static const uint8_t *seen(const fsdp_zip *zip, int64_t place)
{
    return zip->window.data + (place - zip->window.start);
}

/* --- the end record ----------------------------------------------------------------------------- */

static bool is_end_at(const uint8_t *data, size_t rest)
{
    return rest >= END_BYTES && fsdp_load_u32(data) == END_SIGNATURE &&
           fsdp_load_u16(data + 20) == rest - END_BYTES;
}

/* The last end record whose comment reaches exactly to the end of the archive. */
static fsdp_status find_end(fsdp_zip *zip, int64_t *place_out, fsdp_error *err)
{
    static const size_t tails[] = {END_BYTES, END_BYTES + COMMENT_BYTES};
    for (int attempt = 0; attempt < 2; attempt++) {
        size_t tail = tails[attempt];
        if ((uint64_t)zip->input.size < tail)
            tail = (size_t)zip->input.size;
        int64_t start = zip->input.size - (int64_t)tail;
        FSDP_TRY(look(zip, start, tail, err));
        for (size_t back = END_BYTES; back <= tail; back++)
            if (is_end_at(seen(zip, zip->input.size - (int64_t)back), back)) {
                *place_out = zip->input.size - (int64_t)back;
                return FSDP_OK;
            }
    }
    return refuse(zip, FSDP_ERR_DAMAGED, "has no end record: it is cut off, or not a zip archive",
                  err);
}

static bool fits(uint64_t plain, uint64_t limit, uint64_t wide)
{
    return plain == limit || plain == wide;
}

/* The zip64 form of the end record, when there is one in front of the plain one. */
static fsdp_status read_end64(fsdp_zip *zip, int64_t plain, fsdp_error *err)
{
    int64_t locator = plain - LOCATOR_BYTES;
    if (locator < 0)
        return FSDP_OK;
    FSDP_TRY(look(zip, locator, LOCATOR_BYTES + END_BYTES, err));
    const uint8_t *data = seen(zip, locator);
    if (fsdp_load_u32(data) != LOCATOR_SIGNATURE)
        return FSDP_OK;
    uint64_t wide = fsdp_load_u64(data + 8);
    if (fsdp_load_u32(data + 4) != 0 || fsdp_load_u32(data + 16) > 1)
        return refuse(zip, FSDP_ERR_REFUSED, "is spread over several disks", err);
    if (locator < END64_BYTES || wide > (uint64_t)(locator - END64_BYTES))
        return refuse(zip, FSDP_ERR_DAMAGED, "has a zip64 locator that points nowhere", err);
    FSDP_TRY(look(zip, (int64_t)wide, END64_BYTES, err));
    data = seen(zip, (int64_t)wide);
    if (fsdp_load_u32(data) != END64_SIGNATURE ||
        fsdp_load_u64(data + 4) != (uint64_t)locator - wide - 12)
        return refuse(zip, FSDP_ERR_DAMAGED, "has no zip64 end record where its locator points",
                      err);
    if (fsdp_load_u32(data + 16) != 0 || fsdp_load_u32(data + 20) != 0 ||
        fsdp_load_u64(data + 24) != fsdp_load_u64(data + 32))
        return refuse(zip, FSDP_ERR_REFUSED, "is spread over several disks", err);
    uint64_t count = fsdp_load_u64(data + 32), size = fsdp_load_u64(data + 40);
    uint64_t offset = fsdp_load_u64(data + 48);
    FSDP_TRY(look(zip, plain, END_BYTES, err));
    data = seen(zip, plain);
    if (!fits(fsdp_load_u16(data + 10), UINT16_MAX, count) ||
        !fits(fsdp_load_u32(data + 12), saturated, size) ||
        !fits(fsdp_load_u32(data + 16), saturated, offset))
        return refuse(zip, FSDP_ERR_REFUSED, "has two end records that differ", err);
    if (offset > (uint64_t)zip->input.size || size > (uint64_t)zip->input.size)
        return refuse(zip, FSDP_ERR_DAMAGED, "has a directory beyond its end", err);
    zip->count_told = count;
    zip->directory = (int64_t)offset;
    zip->directory_size = (int64_t)size;
    zip->end = (int64_t)wide;
    return FSDP_OK;
}

static fsdp_status read_end(fsdp_zip *zip, int64_t place, fsdp_error *err)
{
    FSDP_TRY(look(zip, place, END_BYTES, err));
    const uint8_t *data = seen(zip, place);
    zip->count_told = fsdp_load_u16(data + 10);
    zip->directory_size = fsdp_load_u32(data + 12);
    zip->directory = fsdp_load_u32(data + 16);
    zip->end = place;
    if (fsdp_load_u32(data + 4) != 0 || fsdp_load_u16(data + 8) != zip->count_told)
        return refuse(zip, FSDP_ERR_REFUSED, "is spread over several disks", err);
    FSDP_TRY(read_end64(zip, place, err));
    if (zip->directory > zip->end || zip->directory_size != zip->end - zip->directory)
        return refuse(zip, FSDP_ERR_DAMAGED, "has no directory where its end record says", err);
    if (zip->directory_size > directory_limit)
        return refuse(zip, FSDP_ERR_LIMIT, "has a directory of over 1 GiB", err);
    if (zip->count_told > (uint64_t)zip->directory_size / CENTRAL_BYTES)
        return refuse(zip, FSDP_ERR_DAMAGED, "counts more records than its directory can hold",
                      err);
    return FSDP_OK;
}

/* Refuses a second end record after the first one or in the directory: another reader could
 * take that one. */
static fsdp_status check_one_end(const fsdp_zip *zip, const uint8_t *data, size_t size, size_t own,
                                 fsdp_error *err)
{
    for (size_t i = 0; i + END_BYTES <= size; i++)
        if (data[i] == 'P' && i != own && is_end_at(data + i, size - i))
            return refuse(zip, FSDP_ERR_REFUSED, "has two end records", err);
    return FSDP_OK;
}

/* --- the central directory ---------------------------------------------------------------------- */

/* Extra fields are (id, size, bytes); a few bytes of padding may follow the last one. */
static bool find_extra(const uint8_t *extra, size_t size, unsigned id, const uint8_t **data_out,
                       size_t *size_out)
{
    *data_out = NULL;
    *size_out = 0;
    while (size >= 4) {
        size_t length = fsdp_load_u16(extra + 2);
        if (length > size - 4)
            return false;
        if (fsdp_load_u16(extra) == id && !*data_out) {
            *data_out = extra + 4;
            *size_out = length;
        }
        extra += 4 + length;
        size -= 4 + length;
    }
    return true;
}

/* Replaces a saturated 32-bit number by the next one of the zip64 field. */
static bool widen(uint64_t *value, const uint8_t **data, size_t *size)
{
    if (*value != saturated)
        return true;
    if (*size < 8)
        return false;
    *value = fsdp_load_u64(*data);
    *data += 8;
    *size -= 8;
    return true;
}

static fsdp_status read_places(fsdp_zip *zip, central *item, const uint8_t *header,
                               const uint8_t *extra, size_t extra_size, fsdp_error *err)
{
    const uint8_t *wide;
    size_t wide_size;
    if (!find_extra(extra, extra_size, EXTRA_ZIP64, &wide, &wide_size))
        return refuse_entry(zip, item, FSDP_ERR_DAMAGED, "has an extra field that is too long",
                            err);
    uint64_t size = fsdp_load_u32(header + 24), stored = fsdp_load_u32(header + 20);
    uint64_t place = fsdp_load_u32(header + 42);
    if (!widen(&size, &wide, &wide_size) || !widen(&stored, &wide, &wide_size) ||
        !widen(&place, &wide, &wide_size))
        return refuse_entry(zip, item, FSDP_ERR_DAMAGED, "lacks its zip64 sizes", err);
    if (stored > (uint64_t)zip->directory || place > (uint64_t)zip->directory || size > INT64_MAX)
        return refuse_entry(zip, item, FSDP_ERR_DAMAGED, "lies beyond the end of the archive", err);
    item->entry.size = (int64_t)size;
    item->entry.stored = (int64_t)stored;
    item->header = (int64_t)place;
    return FSDP_OK;
}

static fsdp_status check_method(const fsdp_zip *zip, central *item, fsdp_error *err)
{
    const fsdp_zip_entry *entry = &item->entry;
    if (item->flags & (FLAG_ENCRYPTED | FLAG_STRONG_ENCRYPTION | FLAG_MASKED))
        return refuse_entry(zip, item, FSDP_ERR_REFUSED, "is encrypted", err);
    if (item->method != METHOD_STORED && item->method != METHOD_DEFLATE)
        return refuse_entry(zip, item, FSDP_ERR_REFUSED, "is packed by an unknown method", err);
    item->entry.is_deflated = item->method == METHOD_DEFLATE;
    if (!entry->is_deflated && entry->size != entry->stored)
        return refuse_entry(zip, item, FSDP_ERR_REFUSED, "is stored and has two different sizes",
                            err);
    if (entry->is_deflated && entry->size / DEFLATE_RATIO > entry->stored)
        return refuse_entry(zip, item, FSDP_ERR_REFUSED, "claims more than its bytes can hold",
                            err);
    return FSDP_OK;
}

static bool element_is_bad(const char *element, size_t size)
{
    return size == 0 || (size == 1 && element[0] == '.') ||
           (size == 2 && element[0] == '.' && element[1] == '.');
}

/* torch.save makes the names itself, as relative paths: a name that is absolute, contains ".."
 * or uses another system's separators is refused. */
static bool name_is_clean(const char *name, size_t size)
{
    if (memchr(name, '\\', size))
        return false;
    if (size > 0 && name[size - 1] == '/')
        size--;
    size_t start = 0;
    for (size_t i = 0; i <= size; i++)
        if (i == size || name[i] == '/') {
            if (element_is_bad(name + start, i - start))
                return false;
            start = i + 1;
        }
    return true;
}

static bool is_folder(const central *item)
{
    size_t size = item->entry.name_size;
    return size > 0 && item->entry.name[size - 1] == '/' && item->entry.size == 0;
}

static bool is_utf8(const central *item)
{
    return (item->flags & FLAG_UTF8) || zip_name_is_ascii(item->entry.name, item->entry.name_size);
}

static fsdp_status check_name(const fsdp_zip *zip, const central *item, fsdp_error *err)
{
    enum { KIND_MASK = 0170000, KIND_FILE = 0100000, KIND_FOLDER = 0040000, DOS_FOLDER = 0x10 };
    uint32_t kind = item->kind & KIND_MASK;
    if (kind != 0 && kind != KIND_FILE && !(kind == KIND_FOLDER && is_folder(item)))
        return refuse_entry(zip, item, FSDP_ERR_REFUSED, "is not a regular file", err);
    if ((item->dos_kind & DOS_FOLDER) &&
        !is_folder(item)) /* PyTorch reads nothing, NumPy reads it */
        return refuse_entry(zip, item, FSDP_ERR_REFUSED, "is a file but is marked as a folder",
                            err);
    if (memchr(item->entry.name, '\0',
               item->entry.name_size)) /* Python's zipfile ends names there */
        return refuse_entry(zip, item, FSDP_ERR_REFUSED, "has a name with a zero byte", err);
    if (!(zip->flags & FSDP_ZIP_NAMES_ARE_DATA) &&
        !name_is_clean(item->entry.name, item->entry.name_size))
        return refuse_entry(zip, item, FSDP_ERR_REFUSED, "has a name that leaves the archive", err);
    return FSDP_OK;
}

/* Some readers take a name in UTF-8 from an extra field, after a version and a checksum. */
static fsdp_status check_unicode_path(const fsdp_zip *zip, const central *item,
                                      const uint8_t *extra, size_t extra_size, fsdp_error *err)
{
    enum { PATH_AT = 5 };
    const fsdp_zip_entry *entry = &item->entry;
    const uint8_t *field;
    size_t size;
    if (!find_extra(extra, extra_size, EXTRA_UNICODE_PATH, &field, &size) || !field)
        return FSDP_OK;
    if (is_utf8(item) && size == PATH_AT + entry->name_size &&
        memcmp(field + PATH_AT, entry->name, entry->name_size) == 0)
        return FSDP_OK;
    return refuse_entry(zip, item, FSDP_ERR_REFUSED, "has two names", err);
}

static fsdp_status read_central(fsdp_zip *zip, const uint8_t *data, size_t rest, char **names,
                                size_t *taken_out, fsdp_error *err)
{
    if (rest < CENTRAL_BYTES || fsdp_load_u32(data) != CENTRAL_SIGNATURE)
        return refuse(zip, FSDP_ERR_DAMAGED,
                      "has a broken directory, or counts its records wrongly", err);
    size_t name_size = fsdp_load_u16(data + 28), extra_size = fsdp_load_u16(data + 30);
    size_t whole = CENTRAL_BYTES + name_size + extra_size + fsdp_load_u16(data + 32);
    if (whole > rest)
        return refuse(zip, FSDP_ERR_DAMAGED, "has a directory that ends inside a record", err);
    central *item = &zip->entries[zip->count++];
    memcpy(*names, data + CENTRAL_BYTES, name_size);
    item->entry.name = *names;
    item->entry.name_size = name_size;
    *names += name_size + 1;
    item->flags = fsdp_load_u16(data + 8);
    item->method = fsdp_load_u16(data + 10);
    item->entry.crc = fsdp_load_u32(data + 16);
    item->dos_kind = data[38];
    item->kind = fsdp_load_u32(data + 38) >> 16;
    if (fsdp_load_u16(data + 34) != 0)
        return refuse_entry(zip, item, FSDP_ERR_REFUSED, "lies on another disk", err);
    FSDP_TRY(read_places(zip, item, data, data + CENTRAL_BYTES + name_size, extra_size, err));
    FSDP_TRY(check_method(zip, item, err));
    FSDP_TRY(check_unicode_path(zip, item, data + CENTRAL_BYTES + name_size, extra_size, err));
    *taken_out = whole;
    return check_name(zip, item, err);
}

/* data: the directory, and after it the end records. */
static fsdp_status read_entries(fsdp_zip *zip, const uint8_t *data, fsdp_error *err)
{
    size_t size = (size_t)zip->directory_size, count = (size_t)zip->count_told;
    zip->entries = fsdp_alloc(count, sizeof *zip->entries);
    zip->names = fsdp_alloc(size + 1, 1);
    if (!zip->entries || !zip->names)
        return fsdp_fail_memory(err, "a zip directory");
    char *names = zip->names;
    size_t place = 0;
    for (size_t i = 0; i < count; i++) {
        size_t taken = 0;
        FSDP_TRY(read_central(zip, data + place, size - place, &names, &taken, err));
        place += taken;
    }
    if (place != size)
        return refuse(zip, FSDP_ERR_REFUSED, "holds more than its end record counts", err);
    return FSDP_OK;
}

static fsdp_status read_directory(fsdp_zip *zip, int64_t end, fsdp_error *err)
{
    size_t tail = (size_t)(zip->input.size - zip->directory);
    uint8_t *data = fsdp_realloc(NULL, tail, 1);
    if (!data)
        return fsdp_fail_memory(err, "a zip directory");
    fsdp_status st =
        zip->input.read(zip->input.context, data, tail, zip->input.offset + zip->directory, err);
    if (st == FSDP_OK)
        st = check_one_end(zip, data, tail, (size_t)(end - zip->directory), err);
    if (st == FSDP_OK)
        st = read_entries(zip, data, err);
    fsdp_free(data);
    return st;
}

/* --- local headers ------------------------------------------------------------------------------ */

/* A local header repeats the size, or has 0 and a data descriptor after the data. */
static bool size_agrees(uint64_t local, uint64_t central_size, bool has_descriptor)
{
    return local == central_size || (has_descriptor && (local == 0 || local == saturated));
}

static fsdp_status check_local_sizes(fsdp_zip *zip, const central *item, const uint8_t *header,
                                     const uint8_t *extra, size_t extra_size, fsdp_error *err)
{
    bool has_descriptor = fsdp_load_u16(header + 6) & FLAG_DESCRIPTOR;
    uint64_t stored = fsdp_load_u32(header + 18), size = fsdp_load_u32(header + 22);
    if (!has_descriptor) {
        const uint8_t *wide;
        size_t wide_size;
        if (!find_extra(extra, extra_size, EXTRA_ZIP64, &wide, &wide_size) ||
            !widen(&size, &wide, &wide_size) || !widen(&stored, &wide, &wide_size))
            return refuse_entry(zip, item, FSDP_ERR_DAMAGED, "has a broken local header", err);
    }
    if (!size_agrees(stored, (uint64_t)item->entry.stored, has_descriptor) ||
        !size_agrees(size, (uint64_t)item->entry.size, has_descriptor))
        return refuse_entry(zip, item, FSDP_ERR_REFUSED, "has two sizes", err);
    uint32_t crc = fsdp_load_u32(header + 14);
    if (crc != item->entry.crc && !(has_descriptor && crc == 0))
        return refuse_entry(zip, item, FSDP_ERR_REFUSED, "has two checksums", err);
    return FSDP_OK;
}

static fsdp_status read_local(fsdp_zip *zip, central *item, fsdp_error *err)
{
    int64_t place = item->header;
    if (place > zip->directory - LOCAL_BYTES)
        return refuse_entry(zip, item, FSDP_ERR_DAMAGED, "lies beyond the end of the archive", err);
    FSDP_TRY(look(zip, place, LOCAL_BYTES, err));
    const uint8_t *header = seen(zip, place);
    size_t name_size = fsdp_load_u16(header + 26), extra_size = fsdp_load_u16(header + 28);
    if (fsdp_load_u32(header) != LOCAL_SIGNATURE)
        return refuse_entry(zip, item, FSDP_ERR_DAMAGED, "has no header where the directory says",
                            err);
    size_t whole = LOCAL_BYTES + name_size + extra_size;
    if ((int64_t)whole > zip->directory - place ||
        item->entry.stored > zip->directory - place - (int64_t)whole)
        return refuse_entry(zip, item, FSDP_ERR_DAMAGED, "reaches beyond the end of the archive",
                            err);
    FSDP_TRY(look(zip, place, whole, err));
    header = seen(zip, place);
    if (name_size != item->entry.name_size ||
        memcmp(header + LOCAL_BYTES, item->entry.name, name_size) != 0)
        return refuse_entry(zip, item, FSDP_ERR_REFUSED, "has two names", err);
    if ((fsdp_load_u16(header + 6) ^ item->flags) & FLAG_UTF8 &&
        !zip_name_is_ascii(item->entry.name, name_size))
        return refuse_entry(zip, item, FSDP_ERR_REFUSED, "has two names", err);
    if (fsdp_load_u16(header + 8) != item->method)
        return refuse_entry(zip, item, FSDP_ERR_REFUSED, "has two packing methods", err);
    if (fsdp_load_u16(header + 6) & (FLAG_ENCRYPTED | FLAG_STRONG_ENCRYPTION | FLAG_MASKED))
        return refuse_entry(zip, item, FSDP_ERR_REFUSED, "is encrypted", err);
    FSDP_TRY(
        check_local_sizes(zip, item, header, header + LOCAL_BYTES + name_size, extra_size, err));
    item->entry.offset = zip->input.offset + place + (int64_t)whole;
    return FSDP_OK;
}

static int compare_places(const void *a, const void *b)
{
    const central *const *left = a, *const *right = b;
    return ((*left)->header > (*right)->header) - ((*left)->header < (*right)->header);
}

static int compare_names(const char *a, size_t a_size, const char *b, size_t b_size)
{
    int order = memcmp(a, b, a_size < b_size ? a_size : b_size);
    return order != 0 ? order : (a_size > b_size) - (a_size < b_size);
}

static int compare_entries(const void *a, const void *b)
{
    const central *const *left = a, *const *right = b;
    return compare_names((*left)->entry.name, (*left)->entry.name_size, (*right)->entry.name,
                         (*right)->entry.name_size);
}

/* Reads the local headers in file order, so that each one lies after the one before it. */
static fsdp_status read_locals(fsdp_zip *zip, fsdp_error *err)
{
    zip->sorted = fsdp_alloc(zip->count, sizeof(central *));
    if (!zip->sorted)
        return fsdp_fail_memory(err, "a zip directory");
    for (size_t i = 0; i < zip->count; i++)
        zip->sorted[i] = &zip->entries[i];
    qsort(zip->sorted, zip->count, sizeof(central *), compare_places);
    int64_t free_from = 0;
    for (size_t i = 0; i < zip->count; i++) {
        central *item = zip->sorted[i];
        if (item->header < free_from)
            return refuse_entry(zip, item, FSDP_ERR_REFUSED, "overlaps another one", err);
        FSDP_TRY(read_local(zip, item, err));
        free_from = item->entry.offset - zip->input.offset + item->entry.stored;
    }
    return FSDP_OK;
}

/* Local headers were compared with the names as they are stored. */
static fsdp_status decode_names(fsdp_zip *zip, fsdp_error *err)
{
    if (!(zip->flags & FSDP_ZIP_NAMES_ARE_DATA))
        return FSDP_OK;
    for (size_t i = 0; i < zip->count; i++) {
        const fsdp_zip_entry *entry = &zip->entries[i].entry;
        if (!is_utf8(&zip->entries[i])) {
            zip_name_decode(&zip->decoded, entry->name, entry->name_size);
            fsdp_text_add(&zip->decoded, "", 1);
        }
    }
    if (zip->decoded.failed)
        return fsdp_fail_memory(err, "a zip directory");
    const char *next = zip->decoded.data;
    for (size_t i = 0; i < zip->count; i++)
        if (!is_utf8(&zip->entries[i])) {
            zip->entries[i].entry.name = next;
            zip->entries[i].entry.name_size = strlen(next);
            next += strlen(next) + 1;
        }
    return FSDP_OK;
}

static fsdp_status sort_names(fsdp_zip *zip, fsdp_error *err)
{
    qsort(zip->sorted, zip->count, sizeof(central *), compare_entries);
    for (size_t i = 1; i < zip->count; i++)
        if (compare_entries(&zip->sorted[i - 1], &zip->sorted[i]) == 0)
            return refuse_entry(zip, zip->sorted[i], FSDP_ERR_REFUSED, "is there twice", err);
    return FSDP_OK;
}

static void drop_folders(fsdp_zip *zip)
{
    size_t kept = 0;
    for (size_t i = 0; i < zip->count; i++)
        if (!is_folder(&zip->entries[i]))
            zip->entries[kept++] = zip->entries[i];
    zip->count = kept;
    for (size_t i = 0; i < kept; i++)
        zip->sorted[i] = &zip->entries[i];
    qsort(zip->sorted, kept, sizeof(central *), compare_entries);
}

/* PyTorch can switch checksums off, and then writes zeros for all entries. A 0 among other numbers is the
 * checksum of its bytes. NumPy never switches them off: in an npz every 0 is a checksum. */
static void find_checksums(fsdp_zip *zip)
{
    bool has_any = zip->flags & FSDP_ZIP_NAMES_ARE_DATA;
    for (size_t i = 0; i < zip->count; i++)
        has_any |= zip->entries[i].entry.crc != 0;
    for (size_t i = 0; i < zip->count; i++)
        zip->entries[i].entry.has_crc = has_any;
}

/* --- opening ------------------------------------------------------------------------------------ */

static fsdp_status load(fsdp_zip *zip, fsdp_error *err)
{
    int64_t end = 0;
    FSDP_TRY(find_end(zip, &end, err));
    FSDP_TRY(read_end(zip, end, err));
    FSDP_TRY(read_directory(zip, end, err));
    FSDP_TRY(read_locals(zip, err));
    FSDP_TRY(decode_names(zip, err));
    FSDP_TRY(sort_names(zip, err));
    drop_folders(zip);
    find_checksums(zip);
    return FSDP_OK;
}

fsdp_status fsdp_zip_open(const fsdp_zip_input *input, unsigned flags, fsdp_zip **zip_out,
                          fsdp_error *err)
{
    *zip_out = NULL;
    fsdp_zip *zip = fsdp_alloc(1, sizeof *zip);
    if (!zip)
        return fsdp_fail_memory(err, "a zip archive");
    zip->input = *input;
    zip->flags = flags;
    fsdp_status st = load(zip, err);
    fsdp_free(zip->window.data);
    zip->window = (window){0};
    if (st != FSDP_OK) {
        fsdp_zip_close(zip);
        return st;
    }
    *zip_out = zip;
    return FSDP_OK;
}

void fsdp_zip_close(fsdp_zip *zip)
{
    if (!zip)
        return;
    fsdp_free(zip->window.data);
    fsdp_free(zip->names);
    fsdp_text_release(&zip->decoded);
    fsdp_free(zip->entries);
    fsdp_free(zip->sorted);
    fsdp_free(zip);
}

size_t fsdp_zip_count(const fsdp_zip *zip)
{
    return zip->count;
}

const fsdp_zip_entry *fsdp_zip_at(const fsdp_zip *zip, size_t number)
{
    return &zip->entries[number].entry;
}

const fsdp_zip_entry *fsdp_zip_find(const fsdp_zip *zip, const char *name, size_t name_size)
{
    size_t low = 0, high = zip->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const fsdp_zip_entry *entry = &zip->sorted[middle]->entry;
        int order = compare_names(name, name_size, entry->name, entry->name_size);
        if (order == 0)
            return entry;
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

/* === bytes of an entry ======================================================================== */

enum { PIECE_BYTES = 256 << 10 };

static fsdp_status fail_entry(const fsdp_zip *zip, const fsdp_zip_entry *entry, const char *why,
                              fsdp_error *err)
{
    char name[200];
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': record '%s' at byte %lld %s", zip->input.path,
                     fsdp_printable(entry->name, entry->name_size, name, sizeof name),
                     (long long)entry->offset, why);
}

/* A deflate stream that is decoded piece by piece. */
typedef struct inflation {
    const fsdp_zip *zip;
    const fsdp_zip_entry *entry;
    uint8_t *input;       /* PIECE_BYTES */
    int64_t taken, given; /* bytes read, bytes decoded */
    z_stream stream;
} inflation;

static fsdp_status refill(inflation *state, fsdp_error *err)
{
    int64_t rest = state->entry->stored - state->taken;
    size_t piece = rest < PIECE_BYTES ? (size_t)rest : PIECE_BYTES;
    const fsdp_zip_input *input = &state->zip->input;
    FSDP_TRY(
        input->read(input->context, state->input, piece, state->entry->offset + state->taken, err));
    state->taken += (int64_t)piece;
    state->stream.next_in = state->input;
    state->stream.avail_in = (uInt)piece;
    return FSDP_OK;
}

/* Fills out with exactly room bytes, or with fewer at the end of the stream. */
static fsdp_status inflate_piece(inflation *state, uint8_t *out, size_t room, size_t *size_out,
                                 bool *ended_out, fsdp_error *err)
{
    state->stream.next_out = out;
    state->stream.avail_out = (uInt)room;
    int rc = Z_OK;
    while (state->stream.avail_out > 0 && rc != Z_STREAM_END) {
        if (state->stream.avail_in == 0 && state->taken < state->entry->stored)
            FSDP_TRY(refill(state, err));
        rc = inflate(&state->stream, Z_NO_FLUSH);
        if (rc != Z_OK && rc != Z_STREAM_END)
            return fail_entry(state->zip, state->entry, "cannot be unpacked", err);
    }
    *size_out = room - state->stream.avail_out;
    *ended_out = rc == Z_STREAM_END;
    return FSDP_OK;
}

/* Decodes the whole stream into data; scratch takes bytes that the entry does not announce. */
static fsdp_status inflate_all(inflation *state, uint8_t *data, uint8_t *scratch, uint32_t *crc,
                               fsdp_error *err)
{
    bool ended = false;
    while (!ended) {
        int64_t rest = state->entry->size - state->given;
        uint8_t *out = rest > 0 ? data + state->given : scratch;
        size_t room = rest > 0 && rest < PIECE_BYTES ? (size_t)rest : PIECE_BYTES, size = 0;
        FSDP_TRY(inflate_piece(state, out, room, &size, &ended, err));
        if ((int64_t)size > rest)
            return fail_entry(state->zip, state->entry, "is longer than declared", err);
        *crc = fsdp_crc32(*crc, out, size);
        state->given += (int64_t)size;
    }
    if (state->given != state->entry->size || state->taken != state->entry->stored ||
        state->stream.avail_in > 0)
        return fail_entry(state->zip, state->entry, "has a different size than declared", err);
    return FSDP_OK;
}

static fsdp_status inflate_entry(const fsdp_zip *zip, const fsdp_zip_entry *entry, uint8_t *data,
                                 uint32_t *crc, fsdp_error *err)
{
    inflation state = {.zip = zip, .entry = entry, .input = fsdp_realloc(NULL, PIECE_BYTES, 1)};
    uint8_t *scratch = fsdp_realloc(NULL, PIECE_BYTES, 1);
    fsdp_status st = FSDP_OK;
    if (!state.input || !scratch || inflateInit2(&state.stream, -MAX_WBITS) != Z_OK) {
        st = fsdp_fail_memory(err, "unpacking a zip record");
    } else {
        st = inflate_all(&state, data, scratch, crc, err);
        inflateEnd(&state.stream);
    }
    fsdp_free(scratch);
    fsdp_free(state.input);
    return st;
}

static fsdp_status read_stored(const fsdp_zip *zip, const fsdp_zip_entry *entry, uint8_t *data,
                               uint32_t *crc, fsdp_error *err)
{
    const fsdp_zip_input *input = &zip->input;
    for (int64_t at = 0; at < entry->size;) {
        size_t piece = entry->size - at < PIECE_BYTES ? (size_t)(entry->size - at) : PIECE_BYTES;
        FSDP_TRY(input->read(input->context, data + at, piece, entry->offset + at, err));
        if (entry->has_crc)
            *crc = fsdp_crc32(*crc, data + at, piece);
        at += (int64_t)piece;
    }
    return FSDP_OK;
}

static fsdp_status read_entry(const fsdp_zip *zip, const fsdp_zip_entry *entry, uint8_t *data,
                              fsdp_error *err)
{
    uint32_t crc = 0;
    FSDP_TRY(entry->is_deflated ? inflate_entry(zip, entry, data, &crc, err)
                                : read_stored(zip, entry, data, &crc, err));
    if (entry->has_crc && crc != entry->crc)
        return fail_entry(zip, entry, "does not have the checksum that the archive gives", err);
    return FSDP_OK;
}

fsdp_status fsdp_zip_read(const fsdp_zip *zip, const fsdp_zip_entry *entry, size_t max_size,
                          char **data_out, fsdp_error *err)
{
    *data_out = NULL;
    if ((uint64_t)entry->size > max_size) {
        char name[200];
        return fsdp_fail(
            err, FSDP_ERR_LIMIT, "'%s': record '%s' has %lld bytes, at most %zu are allowed",
            zip->input.path, fsdp_printable(entry->name, entry->name_size, name, sizeof name),
            (long long)entry->size, max_size);
    }
    char *data = fsdp_realloc(NULL, (size_t)entry->size + 1, 1);
    if (!data)
        return fsdp_fail_memory(err, "a zip record");
    data[entry->size] = '\0';
    fsdp_status st = read_entry(zip, entry, (uint8_t *)data, err);
    if (st != FSDP_OK) {
        fsdp_free(data);
        return st;
    }
    *data_out = data;
    return FSDP_OK;
}
