/* The bytes of zip structures, for stored members: the mirror of zip.c. */
#include "formats/zip/zip_emit.h"

#include <stdbool.h>
#include <string.h>

enum {
    ZIP64_VERSION = 45,
    PLAIN_VERSION = 20,
    UTF8_FLAG = 0x800,
    FIRST_DAY = 0x21, /* 1980-01-01 */
    MADE_ON_UNIX = 3,
    ZIP64_FIELD = 1,
    PADDING_FIELD = 0xD935, /* "alignment": Android's archives use this field */
    FIELD_HEAD = 4
};
#define MOST_32 ((int64_t)0xFFFFFFFF)
#define UNIX_MODE ((uint32_t)0600 << 16)

static void put(fsdp_text *out, uint64_t value, int bytes)
{
    char data[8];
    for (int i = 0; i < bytes; i++, value >>= 8)
        data[i] = (char)(value & 0xFF);
    fsdp_text_add(out, data, (size_t)bytes);
}

static void put_signature(fsdp_text *out, const char *letters)
{
    fsdp_text_add(out, letters, 4);
}

static int flags_of(const fsdp_zip_member *member)
{
    for (size_t i = 0; i < member->name_size; i++) {
        if ((unsigned char)member->name[i] >= 0x80)
            return UTF8_FLAG;
    }
    return 0;
}

static uint64_t clipped(int64_t value)
{
    return (uint64_t)(value < MOST_32 ? value : MOST_32);
}

/* The fields that local and central header share, from the version needed to the sizes. */
static void put_common(fsdp_text *out, const fsdp_zip_member *member, bool is_large)
{
    put(out, is_large ? ZIP64_VERSION : PLAIN_VERSION, 2);
    put(out, (uint64_t)flags_of(member), 2);
    put(out, 0, 2); /* stored */
    put(out, 0, 2);
    put(out, FIRST_DAY, 2);
    put(out, member->crc, 4);
    put(out, clipped(member->size), 4);
    put(out, clipped(member->size), 4);
    put(out, member->name_size, 2);
}

void fsdp_zip_emit_local(fsdp_text *out, const fsdp_zip_member *member, int alignment)
{
    bool is_large = member->size >= MOST_32;
    int zip64 = is_large ? FIELD_HEAD + 16 : 0;
    int64_t end = member->header + FSDP_ZIP_NAME_AT + (int64_t)member->name_size + zip64;
    int padding = (int)((alignment - end % alignment) % alignment);
    if (padding > 0 && padding < FIELD_HEAD)
        padding += alignment;
    put_signature(out, "PK\3\4");
    put_common(out, member, is_large);
    put(out, (uint64_t)(zip64 + padding), 2);
    fsdp_text_add(out, member->name, member->name_size);
    if (is_large) {
        put(out, ZIP64_FIELD, 2);
        put(out, 16, 2);
        put(out, (uint64_t)member->size, 8);
        put(out, (uint64_t)member->size, 8);
    }
    if (padding > 0) {
        put(out, PADDING_FIELD, 2);
        put(out, (uint64_t)(padding - FIELD_HEAD), 2);
        for (int i = FIELD_HEAD; i < padding; i++)
            put(out, 0, 1);
    }
}

void fsdp_zip_emit_central(fsdp_text *out, const fsdp_zip_member *member)
{
    bool is_large = member->size >= MOST_32, is_far = member->header >= MOST_32;
    int zip64 = 16 * is_large + 8 * is_far;
    put_signature(out, "PK\1\2");
    put(out, is_large || is_far ? ZIP64_VERSION : PLAIN_VERSION, 1);
    put(out, MADE_ON_UNIX, 1);
    put_common(out, member, is_large || is_far);
    put(out, (uint64_t)(zip64 > 0 ? FIELD_HEAD + zip64 : 0), 2);
    put(out, 0, 2); /* comment */
    put(out, 0, 2); /* disk */
    put(out, 0, 2);
    put(out, UNIX_MODE, 4);
    put(out, clipped(member->header), 4);
    fsdp_text_add(out, member->name, member->name_size);
    if (zip64 == 0)
        return;
    put(out, ZIP64_FIELD, 2);
    put(out, (uint64_t)zip64, 2);
    if (is_large) {
        put(out, (uint64_t)member->size, 8);
        put(out, (uint64_t)member->size, 8);
    }
    if (is_far)
        put(out, (uint64_t)member->header, 8);
}

/* The zip64 end record and its locator. */
static void put_large_end(fsdp_text *out, int64_t count, int64_t offset, int64_t size)
{
    put_signature(out, "PK\6\6");
    put(out, 44, 8); /* bytes that follow */
    put(out, ZIP64_VERSION, 2);
    put(out, ZIP64_VERSION, 2);
    put(out, 0, 4);
    put(out, 0, 4);
    put(out, (uint64_t)count, 8);
    put(out, (uint64_t)count, 8);
    put(out, (uint64_t)size, 8);
    put(out, (uint64_t)offset, 8);
    put_signature(out, "PK\6\7");
    put(out, 0, 4);
    put(out, (uint64_t)(offset + size), 8);
    put(out, 1, 4);
}

void fsdp_zip_emit_end(fsdp_text *out, int64_t count, int64_t offset, int64_t size)
{
    bool is_large = count >= 0xFFFF || offset >= MOST_32 || size >= MOST_32;
    if (is_large)
        put_large_end(out, count, offset, size);
    put_signature(out, "PK\5\6");
    put(out, 0, 4);
    put(out, (uint64_t)(count < 0xFFFF ? count : 0xFFFF), 2);
    put(out, (uint64_t)(count < 0xFFFF ? count : 0xFFFF), 2);
    put(out, clipped(size), 4);
    put(out, clipped(offset), 4);
    put(out, 0, 2);
}
