/* Unicode as the tokenizers library has it: classes of code points, and normal form C. */
#ifndef FSDP_UNICODE_H
#define FSDP_UNICODE_H

#include "base/text.h"
#include "runtime/tokens/pair_table.h"

#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    FSDP_UNICODE_LETTER = 1,   /* \p{L} */
    FSDP_UNICODE_NUMBER = 2,   /* \p{N} */
    FSDP_UNICODE_SPACE = 4,    /* \s */
    FSDP_UNICODE_WORD = 8,     /* \w of added tokens */
    FSDP_UNICODE_CHANGES = 16  /* text without such is in normal form C */
};

/* The bits of the code points below 0x10000, and how pairs compose. */
typedef struct fsdp_unicode {
    uint8_t bits[0x10000];
    fsdp_pair_table compositions;
} fsdp_unicode;

fsdp_status fsdp_unicode_init(fsdp_unicode *unicode, bool composes, fsdp_error *err);
void fsdp_unicode_release(fsdp_unicode *unicode);

uint8_t fsdp_unicode_find_bits(uint32_t c);
static inline uint8_t fsdp_unicode_bits(const fsdp_unicode *unicode, uint32_t c)
{
    return c < 0x10000 ? unicode->bits[c] : fsdp_unicode_find_bits(c);
}

/* The code point at *at of well-formed UTF-8; *at moves past it. */
static inline uint32_t fsdp_utf8_take(const char **at)
{
    const unsigned char *p = (const unsigned char *)*at;
    if (p[0] < 0x80) {
        *at += 1;
        return p[0];
    }
    if (p[0] < 0xE0) {
        *at += 2;
        return (p[0] & 0x1Fu) << 6 | (p[1] & 0x3Fu);
    }
    if (p[0] < 0xF0) {
        *at += 3;
        return (p[0] & 0xFu) << 12 | (p[1] & 0x3Fu) << 6 | (p[2] & 0x3Fu);
    }
    *at += 4;
    return (p[0] & 0x7u) << 18 | (p[1] & 0x3Fu) << 12 | (p[2] & 0x3Fu) << 6 | (p[3] & 0x3Fu);
}

/* The begin of the code point that ends at `at`. */
static inline const char *fsdp_utf8_back(const char *at)
{
    do
        at--;
    while (((unsigned char)*at & 0xC0) == 0x80);
    return at;
}

/* Bytes of a code point as UTF-8 at `to`, which has capacity for 4. */
size_t fsdp_utf8_put(uint32_t c, char *to);
/* The first byte that is not UTF-8; size when all are. */
size_t fsdp_utf8_check(const char *text, size_t size);
/* The bytes as UTF-8: U+FFFD for each longest run that could begin a character and does not continue, and for
 * every other bad byte, as WHATWG and Rust do. */
void fsdp_utf8_add_lossy(fsdp_text *text, const char *data, size_t size);

/* True when the text is in normal form C as far as a look at single code points can tell. */
bool fsdp_unicode_is_normal(const fsdp_unicode *unicode, const char *text, size_t size);
/* Appends the normal form C of well-formed text. unicode was initialised with composes. */
fsdp_status fsdp_unicode_add_normal(const fsdp_unicode *unicode, const char *text, size_t size,
                                    fsdp_text *normal, fsdp_error *err);

#endif
