/*
 * Scans text as the patterns of pre-tokenizers do. See split.h. Each scanner takes the alternatives of its
 * pattern in their order; [^\s\p{L}\p{N}] are "others" here.
 */
#include "runtime/tokens/split.h"

#include <string.h>

enum {
    LETTER = FSDP_UNICODE_LETTER,
    NUMBER = FSDP_UNICODE_NUMBER,
    SPACE = FSDP_UNICODE_SPACE,
    KINDS = LETTER | NUMBER | SPACE
};

static unsigned kind_at(const fsdp_unicode *unicode, const char *at)
{
    return fsdp_unicode_bits(unicode, fsdp_utf8_take(&at)) & KINDS;
}

/* The end of the run of characters of this kind, at most `most` of them. */
static const char *run_of(const fsdp_unicode *unicode, unsigned kind, const char *at,
                          const char *end, size_t most)
{
    for (; at < end && most > 0; most--) {
        const char *next = at;
        if ((fsdp_unicode_bits(unicode, fsdp_utf8_take(&next)) & KINDS) != kind)
            break;
        at = next;
    }
    return at;
}

/* \s+(?!\S)|\s+: white space but for its last character when a word follows. */
static const char *spaces_before_word(const char *at, const char *spaces_end, const char *end)
{
    const char *last = fsdp_utf8_back(spaces_end);
    return spaces_end < end && last > at ? last : spaces_end;
}

/* Bytes after an apostrophe that belong to a contraction: s, t, m, d, re, ve, ll. */
static size_t contraction(const char *at, const char *end, char case_bit)
{
    char first = (char)(at < end ? *at | case_bit : 0);
    char second = (char)(end - at > 1 ? at[1] | case_bit : 0);
    if (first == 's' || first == 't' || first == 'm' || first == 'd')
        return 1;
    if (second == 'e' && (first == 'r' || first == 'v'))
        return 2;
    return first == 'l' && second == 'l' ? 2 : 0;
}

static size_t split_gpt2(const fsdp_unicode *unicode, const char *at, const char *end)
{
    if (*at == '\'') {
        size_t size = contraction(at + 1, end, 0);
        if (size > 0)
            return size + 1;
    }
    const char *word = at + (*at == ' ');
    unsigned kind = word < end ? kind_at(unicode, word) : SPACE;
    if (kind != SPACE)
        return (size_t)(run_of(unicode, kind, word, end, SIZE_MAX) - at);
    const char *spaces_end = run_of(unicode, SPACE, at, end, SIZE_MAX);
    return (size_t)(spaces_before_word(at, spaces_end, end) - at);
}

static bool is_line_end(char c)
{
    return c == '\r' || c == '\n';
}

/* (?i:'s|'t|'re|'ve|'m|'ll|'d): U+017F, the long s, is an s when case is ignored. */
static size_t any_contraction(const char *at, const char *end)
{
    if (*at != '\'')
        return 0;
    if (end - at > 2 && memcmp(at + 1, "\xC5\xBF", 2) == 0)
        return 3;
    size_t size = contraction(at + 1, end, ' '); /* a letter with this bit is a small one */
    return size > 0 ? size + 1 : 0;
}

/* \s*[\r\n]+|\s+(?!\S)|\s+ */
static const char *white_space(const fsdp_unicode *unicode, const char *at, const char *end)
{
    const char *spaces_end = run_of(unicode, SPACE, at, end, SIZE_MAX);
    for (const char *last = spaces_end; last > at; last--) {
        if (is_line_end(last[-1]))
            return last;
    }
    return spaces_before_word(at, spaces_end, end);
}

/* Llama 3 takes three digits at most, Qwen2 one. */
static size_t split_newer(const fsdp_unicode *unicode, const char *at, const char *end,
                          size_t digits)
{
    size_t size = any_contraction(at, end);
    if (size > 0)
        return size;
    const char *second = at;
    unsigned kind = fsdp_unicode_bits(unicode, fsdp_utf8_take(&second)) & KINDS;
    bool may_lead = kind != LETTER && kind != NUMBER && !is_line_end(*at);
    if (kind == LETTER || (may_lead && second < end && kind_at(unicode, second) == LETTER))
        return (size_t)(run_of(unicode, LETTER, second, end, SIZE_MAX) - at);
    if (kind == NUMBER)
        return (size_t)(run_of(unicode, NUMBER, at, end, digits) - at);
    const char *others = *at == ' ' ? at + 1 : at;
    if (others < end && kind_at(unicode, others) == 0) {
        const char *to = run_of(unicode, 0, others, end, SIZE_MAX);
        while (to < end && is_line_end(*to))
            to++;
        return (size_t)(to - at);
    }
    return (size_t)(white_space(unicode, at, end) - at);
}

static size_t split_llama3(const fsdp_unicode *unicode, const char *at, const char *end)
{
    return split_newer(unicode, at, end, 3);
}

static size_t split_qwen2(const fsdp_unicode *unicode, const char *at, const char *end)
{
    return split_newer(unicode, at, end, 1);
}

fsdp_split fsdp_split_of(fsdp_word_pattern pattern)
{
    static const fsdp_split splits[] = {[FSDP_WORDS_GPT2] = split_gpt2,
                                        [FSDP_WORDS_LLAMA3] = split_llama3,
                                        [FSDP_WORDS_QWEN2] = split_qwen2};
    return splits[pattern];
}
