/* Link names: see hdf5_link_name.h. */
#include "formats/hdf5/hdf5_link_name.h"

#include "kernels/kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char upper_hex[] = "0123456789ABCDEF";
static const char lower_hex[] = "0123456789abcdef";
static const char part_mark[] = "%#";
static const char hash_mark[] = "%h";
enum { HASH_LINK = 2 + 32 };

static bool only_dots(const char *name, size_t size)
{
    for (size_t i = 0; i < size; i++)
        if (name[i] != '.')
            return false;
    return size > 0;
}

/* --- name to link --- */

static size_t put_hash(const char *name, size_t size, char *out)
{
    fsdp_hash hash = fsdp_kernels_get()->hash(name, size);
    size_t n = 0;
    for (const char *c = hash_mark; *c; c++)
        out[n++] = *c;
    for (size_t i = 0; i < sizeof hash.bytes; i++) {
        out[n++] = lower_hex[hash.bytes[i] >> 4];
        out[n++] = lower_hex[hash.bytes[i] & 15];
    }
    return n;
}

static size_t put_escaped(const char *name, size_t size, char *out)
{
    bool dots = only_dots(name, size);
    size_t n = 0;
    for (size_t i = 0; i < size; i++) {
        unsigned char c = (unsigned char)name[i];
        if (c == '%' || c == '/' || c == '\0' || dots) {
            out[n++] = '%';
            out[n++] = upper_hex[c >> 4];
            out[n++] = upper_hex[c & 15];
        } else {
            out[n++] = (char)c;
        }
    }
    if (size == 0)
        out[n++] = '%';
    return n;
}

size_t fsdp_native_link(const char *name, size_t size, uint32_t part,
                        char out[FSDP_NATIVE_LINK_ROOM])
{
    size_t n = 0;
    if (size > FSDP_NATIVE_NAME_PLAIN)
        n = put_hash(name, size, out);
    else
        n = put_escaped(name, size, out);
    if (part > 0)
        n += (size_t)snprintf(out + n, FSDP_NATIVE_LINK_ROOM - n, "%s%u", part_mark, part);
    out[n] = '\0';
    return n;
}

/* --- link to name --- */

/* The value of an upper-case hex digit, -1 for another character. */
static int digit(char c)
{
    const char *at = c ? strchr(upper_hex, c) : NULL;
    return at ? (int)(at - upper_hex) : -1;
}

/* Decodes %XX only. fsdp_native_name encodes the result again and compares it with the link. */
static bool take_escaped(const char *link, size_t size, char *out, size_t *size_out)
{
    size_t n = 0;
    for (size_t i = 0; i < size; i++) {
        if (n == FSDP_NATIVE_NAME_PLAIN)
            return false;
        if (link[i] != '%') {
            out[n++] = link[i];
            continue;
        }
        int high = i + 2 < size ? digit(link[i + 1]) : -1;
        int low = high >= 0 ? digit(link[i + 2]) : -1;
        if (low < 0)
            return false;
        out[n++] = (char)(high * 16 + low);
        i += 2;
    }
    *size_out = n;
    return true;
}

/* The part number after "%#", 0 without one; *size_out is the size of the text before it. */
static uint32_t take_part(const char *link, size_t *size_out)
{
    const char *mark = strstr(link, part_mark);
    *size_out = mark ? (size_t)(mark - link) : strlen(link);
    if (!mark)
        return 0;
    unsigned long part = strtoul(mark + 2, NULL, 10);
    return part > UINT32_MAX ? 0 : (uint32_t)part;
}

static bool is_hash_link(const char *link, size_t size)
{
    if (size != HASH_LINK || strncmp(link, hash_mark, 2) != 0)
        return false;
    return strspn(link + 2, lower_hex) >= HASH_LINK - 2;
}

fsdp_status fsdp_native_name(const char *link, char name_out[FSDP_NATIVE_NAME_PLAIN + 1],
                             size_t *size_out, uint32_t *part_out, fsdp_error *err)
{
    size_t stem = 0, size = 0;
    uint32_t part = take_part(link, &stem);
    *part_out = part;
    *size_out = 0;
    name_out[0] = '\0';
    if (is_hash_link(link, stem))
        return fsdp_fail(err, FSDP_DIFFERS, "the name of '%.40s' is in the shard index only", link);
    bool empty = stem == 1 && link[0] == '%';
    char again[FSDP_NATIVE_LINK_ROOM];
    if (empty || take_escaped(link, stem, name_out, &size)) {
        fsdp_native_link(name_out, size, part, again);
        if (strcmp(again, link) == 0) {
            name_out[size] = '\0';
            *size_out = size;
            return FSDP_OK;
        }
    }
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%.200s' is not the link of a tensor", link);
}
