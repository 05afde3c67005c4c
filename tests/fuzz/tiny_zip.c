/* A zip archive of stored records, built in memory. See tiny_zip.h. */
#include "tests/fuzz/tiny_zip.h"

#include <stdlib.h>
#include <string.h>

enum { LOCAL = 30, CENTRAL = 46, END = 22 };

static uint8_t *put(uint8_t *at, uint64_t value, int width)
{
    for (int i = 0; i < width; i++, value >>= 8)
        *at++ = (uint8_t)value;
    return at;
}

/* Writes the fields that local and central headers share: needed version to size of extra fields. */
static uint8_t *put_common(uint8_t *at, const tiny_record *record)
{
    at = put(at, 0, 2 + 2 + 2 + 4 + 4);
    at = put(at, record->size, 4);
    at = put(at, record->size, 4);
    at = put(at, strlen(record->name), 2);
    return put(at, 0, 2);
}

static uint8_t *put_name(uint8_t *at, const tiny_record *record)
{
    size_t size = strlen(record->name);
    memcpy(at, record->name, size);
    return at + size;
}

size_t tiny_zip_size(const tiny_record *records, size_t count)
{
    size_t size = END;
    for (size_t i = 0; i < count; i++)
        size += LOCAL + CENTRAL + 2 * strlen(records[i].name) + records[i].size;
    return size;
}

uint8_t *tiny_zip(const tiny_record *records, size_t count, size_t *size_out)
{
    size_t size = tiny_zip_size(records, count);
    uint8_t *zip = calloc(1, size), *at = zip;
    if (!zip)
        return NULL;
    for (size_t i = 0; i < count; i++) {
        at = put_name(put_common(put(at, 0x04034b50, 4), &records[i]), &records[i]);
        if (records[i].size > 0)
            memcpy(at, records[i].data, records[i].size);
        at += records[i].size;
    }
    size_t directory = (size_t)(at - zip), place = 0;
    for (size_t i = 0; i < count; i++) {
        at = put_common(put(put(at, 0x02014b50, 4), 0, 2), &records[i]);
        at = put_name(put(put(at, 0, 2 + 2 + 2 + 4), place, 4), &records[i]);
        place += LOCAL + strlen(records[i].name) + records[i].size;
    }
    size_t directory_size = (size_t)(at - zip) - directory;
    at = put(put(put(at, 0x06054b50, 4), 0, 4), count, 2);
    at = put(put(put(at, count, 2), directory_size, 4), directory, 4);
    put(at, 0, 2);
    *size_out = size;
    return zip;
}
