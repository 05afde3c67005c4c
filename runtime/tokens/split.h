/* The patterns of pre-tokenizers, which cut text into words, as scanners written by hand. */
#ifndef FSDP_SPLIT_H
#define FSDP_SPLIT_H

#include "formats/tokenizer_json.h"
#include "runtime/tokens/unicode.h"

/* Bytes of the first word of the well-formed text [at, end), which is not empty; the patterns match
 * everywhere. */
typedef size_t (*fsdp_split)(const fsdp_unicode *unicode, const char *at, const char *end);

/* Returns the scanner of a pattern; NULL for FSDP_WORDS_WHOLE. */
fsdp_split fsdp_split_of(fsdp_word_pattern pattern);

#endif
