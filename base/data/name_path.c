/* Paths of names: see name_path.h. */
#include "base/data/name_path.h"

#include <string.h>

bool fsdp_path_is_whole(const int32_t *path, size_t count)
{
    return path && count == 1 && path[0] == FSDP_PATH_WHOLE;
}

bool fsdp_path_in_tuple(int32_t element)
{
    return element < 0 && element != FSDP_PATH_WHOLE && -element & FSDP_PATH_TUPLE;
}

size_t fsdp_path_bytes(int32_t element)
{
    if (element == FSDP_PATH_WHOLE)
        return 0;
    return (size_t)(element < 0 ? -element & ~FSDP_PATH_TUPLE : element & ~FSDP_PATH_NUMBER);
}

/* 0, or digits without a zero before them. */
static bool is_natural(const char *text, size_t size, size_t digits)
{
    if (size == 0 || size > digits || (size > 1 && text[0] == '0'))
        return false;
    for (size_t i = 0; i < size; i++)
        if (text[i] < '0' || text[i] > '9')
            return false;
    return true;
}

/* A natural number that fits an int64_t. */
bool fsdp_name_is_key(const char *text, size_t size)
{
    static const char letters[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-";
    for (size_t i = 0; i < size; i++)
        if (!memchr(letters, text[i], sizeof letters - 1))
            return false;
    return size > 0;
}

bool fsdp_path_is_number(const char *text, size_t size)
{
    bool is_negative = size > 1 && text[0] == '-' && text[1] != '0';
    return is_natural(text + is_negative, size - is_negative, 18);
}

static bool is_spelled(const char *text, size_t size, int32_t element)
{
    if (element < 0)
        return is_natural(text, size, 9); /* that fits an int */
    return !(element & FSDP_PATH_NUMBER) || fsdp_path_is_number(text, size);
}

bool fsdp_path_fits(const char *name, size_t size, const int32_t *path, size_t count)
{
    size_t at = 0;
    if (count == 0 || count > FSDP_PATH_MOST)
        return false;
    if (fsdp_path_is_whole(path, count))
        return size == 0;
    for (size_t i = 0; i < count; i++) {
        size_t bytes = fsdp_path_bytes(path[i]);
        if (i > 0 && (at >= size || name[at++] != '.'))
            return false;
        if (bytes > size - at || !is_spelled(name + at, bytes, path[i]))
            return false;
        at += bytes;
    }
    return at == size;
}

/* --- by default ------------------------------------------------------------------------------- */

/* True for "WORD." with further text after it. */
static bool begins(const char *name, size_t size, const char *word)
{
    size_t bytes = strlen(word);
    return size > bytes + 1 && memcmp(name, word, bytes) == 0 && name[bytes] == '.';
}

static size_t last_dot(const char *name, size_t size)
{
    while (size > 0 && name[size - 1] != '.')
        size--;
    return size > 0 ? size - 1 : 0;
}

/* Writes the elements of a name that begins with "optim.". */
static size_t optimizer_path(const char *name, size_t size, int32_t *path_out)
{
    static const char *const tables[] = {"state", "param_groups"};
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
        size_t before = strlen(tables[i]) + 1;
        if (!begins(name, size, tables[i]))
            continue;
        size_t dot = last_dot(name + before, size - before);
        if (dot == 0 || before + dot + 1 == size)
            continue;
        path_out[0] = (int32_t)(before - 1);
        path_out[1] = (int32_t)dot;
        path_out[2] = (int32_t)(size - before - dot - 1);
        return 3;
    }
    path_out[0] = (int32_t)size;
    return 1;
}

size_t fsdp_path_default(const char *name, size_t size, int32_t *path_out)
{
    enum { WORD = 5 };
    if (!name || !path_out)
        return 0;
    path_out[0] = WORD;
    if (begins(name, size, "optim"))
        return 1 + optimizer_path(name + WORD + 1, size - WORD - 1, path_out + 1);
    if (begins(name, size, "model")) {
        path_out[1] = (int32_t)(size - WORD - 1);
        return 2;
    }
    path_out[0] = (int32_t)size;
    return 1;
}

bool fsdp_path_is_default(const char *name, size_t size, const int32_t *path, size_t count)
{
    int32_t usual[FSDP_PATH_DEFAULT_MOST];
    size_t usual_count = fsdp_path_default(name, size, usual);
    return count == usual_count && memcmp(path, usual, count * sizeof *path) == 0;
}

/* --- after renaming --------------------------------------------------------------------------- */

/* Elements at the beginning that both names have, each with the dot after it. */
static size_t same_first(const fsdp_path *old, const char *name, size_t size, size_t *bytes_out)
{
    size_t at = 0, i = 0;
    for (; i + 1 < old->count; i++) {
        size_t end = at + fsdp_path_bytes(old->elements[i]) + 1;
        if (end > size || memcmp(old->name + at, name + at, end - at) != 0)
            break;
        at = end;
    }
    *bytes_out = at;
    return i;
}

/* At most `most` elements at the end of both `old` and `rest`, each with the dot before it. */
static size_t same_last(const fsdp_path *old, size_t most, const char *rest, size_t size,
                        size_t *bytes_out)
{
    size_t at = 0, n = 0;
    for (; n < most; n++) {
        size_t end = at + fsdp_path_bytes(old->elements[old->count - 1 - n]) + 1;
        if (end > size ||
            memcmp(old->name + old->name_size - end, rest + size - end, end - at) != 0)
            break;
        at = end;
    }
    *bytes_out = at;
    return n;
}

size_t fsdp_path_rename(const fsdp_path *old, const char *name, size_t size, int32_t *path_out)
{
    size_t first_bytes, last_bytes;
    if (old->name_size == size && memcmp(old->name, name, size) == 0) {
        memcpy(path_out, old->elements, old->count * sizeof *path_out);
        return old->count;
    }
    size_t first = same_first(old, name, size, &first_bytes);
    size_t last =
        same_last(old, old->count - first - 1, name + first_bytes, size - first_bytes, &last_bytes);
    memcpy(path_out, old->elements, first * sizeof *path_out);
    path_out[first] = (int32_t)(size - first_bytes - last_bytes);
    memcpy(path_out + first + 1, old->elements + old->count - last, last * sizeof *path_out);
    return first + 1 + last;
}
