/* Added tokens: found in text before it is cut into words. */
#ifndef FSDP_ADDED_TOKENS_H
#define FSDP_ADDED_TOKENS_H

#include "formats/tokenizer_json.h"
#include "runtime/tokens/unicode.h"

/* Zero-initialise; release when done. */
typedef struct fsdp_added_tokens {
    fsdp_added_token *items;   /* in the order of their bytes, once sorted; texts are borrowed */
    size_t count, capacity;
    bool begins[256];          /* whether one begins with this byte */
} fsdp_added_tokens;

void fsdp_added_tokens_release(fsdp_added_tokens *tokens);
fsdp_status fsdp_added_tokens_add(fsdp_added_tokens *tokens, const fsdp_added_token *token, fsdp_error *err);
/* Once, before the search. */
void fsdp_added_tokens_sort(fsdp_added_tokens *tokens);

typedef struct fsdp_added_match { size_t begin, end; int64_t id; } fsdp_added_match;

/*
 * The next match at or after *at, the leftmost and of those the longest; *at moves past the token's own
 * bytes. *match is the match before, a zeroed one at first: white space that it took is not taken again. A
 * token in such white space is a match nevertheless, as in the library.
 */
bool fsdp_added_tokens_next(const fsdp_added_tokens *tokens, const fsdp_unicode *unicode,
                            const char *text, size_t size, size_t *at, fsdp_added_match *match);

#endif
