/* The patterns of pre-tokenizers, which cut text into words, as scanners written by hand. */
#ifndef FSDP_SPLIT_H
#define FSDP_SPLIT_H

#include "runtime/tokens/unicode.h"

/* Bytes of the first word of the well-formed text [at, end), which is not empty; the patterns match
 * everywhere. */
typedef size_t (*fsdp_split)(const fsdp_unicode *unicode, const char *at, const char *end);

/* The pattern of ByteLevel (use_regex), which is GPT-2's. */
size_t fsdp_split_gpt2(const fsdp_unicode *unicode, const char *at, const char *end);

/* The scanner of a regular expression, by its exact text; NULL when there is none. */
fsdp_split fsdp_split_of_pattern(const char *pattern, size_t size);

#endif
