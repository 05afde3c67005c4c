/* Added tokens: found in text before it is cut into words. See added_tokens.h. */
#include "runtime/tokens/added_tokens.h"

#include "base/core/mem.h"

#include <stdlib.h>
#include <string.h>

void fsdp_added_tokens_release(fsdp_added_tokens *tokens)
{
    fsdp_free(tokens->items);
    *tokens = (fsdp_added_tokens){0};
}

fsdp_status fsdp_added_tokens_add(fsdp_added_tokens *tokens, const fsdp_added_token *token,
                                  fsdp_error *err)
{
    if (!fsdp_grow(&tokens->items, &tokens->capacity, tokens->count + 1, sizeof *tokens->items))
        return fsdp_fail_memory(err, "the added tokens");
    tokens->items[tokens->count++] = *token;
    tokens->begins[(unsigned char)token->text[0]] = true;
    return FSDP_OK;
}

static int compare_bytes(const void *a, const void *b)
{
    const fsdp_added_token *x = a, *y = b;
    int order = memcmp(x->text, y->text, x->size < y->size ? x->size : y->size);
    return order ? order : x->size < y->size ? -1 : x->size > y->size;
}

void fsdp_added_tokens_sort(fsdp_added_tokens *tokens)
{
    if (tokens->count > 0)
        qsort(tokens->items, tokens->count, sizeof *tokens->items, compare_bytes);
}

/* The first of the tokens [low, high), alike up to `depth`, whose next byte is at least `byte`. A
 * token that ends there comes before all others. */
static size_t first_with(const fsdp_added_tokens *tokens, size_t low, size_t high, size_t depth,
                         unsigned byte)
{
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const fsdp_added_token *token = &tokens->items[middle];
        if (token->size <= depth || (unsigned char)token->text[depth] < byte)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The longest token that the text begins with, NULL without one. */
static const fsdp_added_token *longest(const fsdp_added_tokens *tokens, const char *text,
                                       size_t size)
{
    const fsdp_added_token *found = NULL;
    size_t low = 0, high = tokens->count;
    for (size_t depth = 0; low < high; depth++) {
        if (tokens->items[low].size == depth)
            found = &tokens->items[low];
        if (depth == size)
            break;
        unsigned byte = (unsigned char)text[depth];
        low = first_with(tokens, low, high, depth, byte);
        high = first_with(tokens, low, high, depth, byte + 1);
    }
    return found;
}

static unsigned bits_before(const fsdp_unicode *unicode, const char *at)
{
    const char *from = fsdp_utf8_back(at);
    return fsdp_unicode_bits(unicode, fsdp_utf8_take(&from));
}

/* False when the token must be a word and is part of one. */
static bool stands_alone(const fsdp_unicode *unicode, const char *text, size_t size, size_t begin,
                         size_t end)
{
    const char *behind = text + end;
    if (begin > 0 && (bits_before(unicode, text + begin) & FSDP_UNICODE_WORD))
        return false;
    return end == size ||
           !(fsdp_unicode_bits(unicode, fsdp_utf8_take(&behind)) & FSDP_UNICODE_WORD);
}

/* White space up to the end of the match before is not looked at again: a token may be white space itself. */
static void take_spaces(const fsdp_added_token *token, const fsdp_unicode *unicode,
                        const char *text, size_t size, fsdp_added_match *match)
{
    size_t taken = match->begin, token_begin = match->end - token->size;
    match->begin = token_begin;
    if (token->lstrip) {
        const char *at = text + token_begin, *from = text + taken;
        while (at > from && (bits_before(unicode, at) & FSDP_UNICODE_SPACE))
            at = fsdp_utf8_back(at);
        match->begin = at > from ? (size_t)(at - text) : taken;
    }
    if (token->rstrip) {
        if (match->end < taken)
            match->end = taken;
        for (const char *at = text + match->end, *next = at; at < text + size; at = next) {
            if (!(fsdp_unicode_bits(unicode, fsdp_utf8_take(&next)) & FSDP_UNICODE_SPACE))
                break;
            match->end = (size_t)(next - text);
        }
    }
}

bool fsdp_added_tokens_next(const fsdp_added_tokens *tokens, const fsdp_unicode *unicode,
                            const char *text, size_t size, size_t *at, fsdp_added_match *match)
{
    if (tokens->count == 0)
        return false;
    for (size_t begin = *at; begin < size; begin++) {
        if (!tokens->begins[(unsigned char)text[begin]])
            continue;
        const fsdp_added_token *token = longest(tokens, text + begin, size - begin);
        if (!token)
            continue;
        *at = begin + token->size;
        if (token->single_word && !stands_alone(unicode, text, size, begin, *at)) {
            begin = *at - 1;
            continue;
        }
        *match = (fsdp_added_match){.begin = match->end, .end = *at, .id = token->id};
        take_spaces(token, unicode, text, size, match);
        return true;
    }
    return false;
}
