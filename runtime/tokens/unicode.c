/* Unicode as the tokenizers library has it: classes of code points, and normal form C. See unicode.h. */
#include "runtime/tokens/unicode.h"

#include "runtime/tokens/unicode_tables.h"

#include "base/core/mem.h"

#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* Hangul syllables are computed: a syllable is a leading, a vowel and perhaps a trailing letter. */
enum {
    HANGUL = 0xAC00,
    LEADING = 0x1100,
    VOWEL = 0x1161,
    TRAILING = 0x11A7, /* which itself stands for no trailing letter */
    LEADINGS = 19,
    VOWELS = 21,
    TRAILINGS = 28,
    SYLLABLES = LEADINGS * VOWELS * TRAILINGS
};

/* The value at c in a table of changes, whose entries are packed: c << shift | value. */
static uint32_t find_run(const uint32_t *table, size_t count, unsigned shift, uint32_t c)
{
    size_t low = 0;
    for (size_t high = count; low < high;) {
        size_t middle = (low + high) / 2;
        if (table[middle] >> shift <= c)
            low = middle + 1;
        else
            high = middle;
    }
    return low == 0 ? 0 : table[low - 1] & ((1u << shift) - 1);
}

uint8_t fsdp_unicode_find_bits(uint32_t c)
{
    return (uint8_t)find_run(UNICODE_BITS, COUNT(UNICODE_BITS), 5, c);
}

static uint32_t combining_class(uint32_t c)
{
    return c < 0x300 ? 0 : find_run(UNICODE_COMBINING, COUNT(UNICODE_COMBINING), 8, c);
}

fsdp_status fsdp_unicode_init(fsdp_unicode *unicode, bool composes, fsdp_error *err)
{
    unicode->compositions = (fsdp_pair_table){0};
    size_t run = 0;
    uint8_t bits = 0;
    for (uint32_t c = 0; c < 0x10000; c++) {
        if (run < COUNT(UNICODE_BITS) && UNICODE_BITS[run] >> 5 == c)
            bits = UNICODE_BITS[run++] & 31;
        unicode->bits[c] = bits;
    }
    if (!composes)
        return FSDP_OK;
    FSDP_TRY(fsdp_pair_table_init(&unicode->compositions, COUNT(UNICODE_PAIRS) / 3, err));
    for (size_t i = 0; i < COUNT(UNICODE_PAIRS); i += 3) {
        const uint32_t *pair = &UNICODE_PAIRS[i];
        if (pair[0] & 1)
            fsdp_pair_table_set(&unicode->compositions, pair[1], pair[2], pair[0] >> 1);
    }
    return FSDP_OK;
}

void fsdp_unicode_release(fsdp_unicode *unicode)
{
    fsdp_pair_table_release(&unicode->compositions);
}

/* --- UTF-8 --- */

size_t fsdp_utf8_put(uint32_t c, char *to)
{
    size_t length = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    if (length == 1) {
        to[0] = (char)c;
        return 1;
    }
    for (size_t i = length - 1; i > 0; i--, c >>= 6)
        to[i] = (char)(0x80 | (c & 0x3F));
    to[0] = (char)((0xF00u >> length & 0xFFu) | c);
    return length;
}

/* Bytes of the character at p, or, negative, of the part that could begin one. */
static int character_length(const unsigned char *p, size_t left)
{
    if (p[0] < 0x80)
        return 1;
    if (p[0] < 0xC2 || p[0] > 0xF4)
        return -1;
    int length = p[0] < 0xE0 ? 2 : p[0] < 0xF0 ? 3 : 4;
    unsigned lowest = p[0] == 0xE0 ? 0xA0 : p[0] == 0xF0 ? 0x90 : 0x80;
    unsigned highest = p[0] == 0xED ? 0x9F : p[0] == 0xF4 ? 0x8F : 0xBF;
    for (int i = 1; i < length; i++) {
        if ((size_t)i >= left || p[i] < lowest || p[i] > highest)
            return -i;
        lowest = 0x80;
        highest = 0xBF;
    }
    return length;
}

size_t fsdp_utf8_check(const char *text, size_t size)
{
    if (fsdp_utf8_valid(text, size))
        return size;
    size_t at = 0;
    for (int length; at < size; at += (size_t)length) {
        length = character_length((const unsigned char *)text + at, size - at);
        if (length < 0)
            break;
    }
    return at;
}

void fsdp_utf8_add_lossy(fsdp_text *text, const char *data, size_t size)
{
    for (size_t at = 0; at < size;) {
        size_t good = fsdp_utf8_check(data + at, size - at);
        fsdp_text_add(text, data + at, good);
        at += good;
        if (at == size)
            break;
        fsdp_text_add(text, "\xEF\xBF\xBD", 3);
        at += (size_t)-character_length((const unsigned char *)data + at, size - at);
    }
}

/* --- normal form C --- */

bool fsdp_unicode_is_normal(const fsdp_unicode *unicode, const char *text, size_t size)
{
    for (const char *at = text, *end = text + size; at < end;) {
        if (fsdp_unicode_bits(unicode, fsdp_utf8_take(&at)) & FSDP_UNICODE_CHANGES)
            return false;
    }
    return true;
}

/* Code points with their combining classes. */
typedef struct points {
    uint64_t *items; /* class << 56 | position among the others << 21 | code point */
    size_t count, capacity;
} points;

enum { POINT_BITS = 21, CLASS_SHIFT = 56 };

static uint32_t point_of(uint64_t item)
{
    return (uint32_t)item & ((1u << POINT_BITS) - 1);
}

static bool add_point(points *list, uint32_t c)
{
    if (!fsdp_grow(&list->items, &list->capacity, list->count + 1, sizeof *list->items))
        return false;
    uint64_t position = (uint64_t)list->count << POINT_BITS & ((UINT64_C(1) << CLASS_SHIFT) - 1);
    list->items[list->count++] = (uint64_t)combining_class(c) << CLASS_SHIFT | position | c;
    return true;
}

/* The entry of c in a sorted table of `width` numbers each, whose first is c << shift; NULL without
 * one. */
static const uint32_t *find_parts(const uint32_t *table, size_t count, size_t width, uint32_t c)
{
    unsigned shift = width == 3 ? 1 : 0;
    for (size_t low = 0, high = count / width; low < high;) {
        size_t middle = (low + high) / 2;
        uint32_t whole = table[middle * width] >> shift;
        if (whole == c)
            return &table[middle * width];
        if (whole < c)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

static bool decompose(points *list, uint32_t c)
{
    if (c < 0xC0)
        return add_point(list, c);
    if (c >= HANGUL && c < HANGUL + SYLLABLES) {
        uint32_t syllable = c - HANGUL, trailing = syllable % TRAILINGS;
        return add_point(list, LEADING + syllable / (VOWELS * TRAILINGS)) &&
               add_point(list, VOWEL + syllable / TRAILINGS % VOWELS) &&
               (trailing == 0 || add_point(list, TRAILING + trailing));
    }
    const uint32_t *parts = find_parts(UNICODE_PAIRS, COUNT(UNICODE_PAIRS), 3, c);
    if (parts) /* parts of parts nest four deep at most */
        return decompose(list, parts[1]) && decompose(list, parts[2]);
    parts = find_parts(UNICODE_SINGLES, COUNT(UNICODE_SINGLES), 2, c);
    return parts ? decompose(list, parts[1]) : add_point(list, c);
}

static int compare_items(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* Sorts every run of marks by class; marks of one class stay in their order. */
static void order_marks(points *list)
{
    for (size_t begin = 0, end; begin < list->count; begin = end + 1) {
        for (end = begin; end < list->count && list->items[end] >> CLASS_SHIFT; end++)
            continue;
        if (end - begin > 1)
            qsort(list->items + begin, end - begin, sizeof *list->items, compare_items);
    }
}

/* The code point that two make, 0 when they make none. */
static uint32_t compose_pair(const fsdp_unicode *unicode, uint32_t first, uint32_t second)
{
    if (first - LEADING < LEADINGS && second - VOWEL < VOWELS)
        return HANGUL + ((first - LEADING) * VOWELS + (second - VOWEL)) * TRAILINGS;
    if (first - HANGUL < SYLLABLES && (first - HANGUL) % TRAILINGS == 0 && second > TRAILING &&
        second < TRAILING + TRAILINGS)
        return first + (second - TRAILING);
    uint64_t whole = fsdp_pair_table_get(&unicode->compositions, first, second);
    return whole == UINT64_MAX ? 0 : (uint32_t)whole;
}

/* Joins every mark with the starter before it, unless a mark of its class or a higher one stands
 * between. */
static void compose(const fsdp_unicode *unicode, points *list)
{
    size_t count = 0, starter = SIZE_MAX;
    for (size_t i = 0; i < list->count; i++) {
        uint64_t item = list->items[i], mark = item >> CLASS_SHIFT;
        bool joins = starter != SIZE_MAX &&
                     (count == starter + 1 || list->items[count - 1] >> CLASS_SHIFT < mark);
        uint32_t whole =
            joins ? compose_pair(unicode, point_of(list->items[starter]), point_of(item)) : 0;
        if (whole) {
            list->items[starter] = whole;
            continue;
        }
        if (mark == 0)
            starter = count;
        list->items[count++] = item;
    }
    list->count = count;
}

fsdp_status fsdp_unicode_add_normal(const fsdp_unicode *unicode, const char *text, size_t size,
                                    fsdp_text *normal, fsdp_error *err)
{
    points list = {0};
    bool fits = true;
    for (const char *at = text, *end = text + size; fits && at < end;)
        fits = decompose(&list, fsdp_utf8_take(&at));
    if (fits) {
        order_marks(&list);
        compose(unicode, &list);
        for (size_t i = 0; i < list.count; i++) {
            char bytes[4];
            fsdp_text_add(normal, bytes, fsdp_utf8_put(point_of(list.items[i]), bytes));
        }
    }
    fsdp_free(list.items);
    return fits && !normal->failed ? FSDP_OK : fsdp_fail_memory(err, "normalized text");
}
