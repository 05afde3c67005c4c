/* Lines of JSON through a tokenizer: the work of fsdp-train --tokenize. */
#ifndef FSDP_TOKENIZE_LINES_H
#define FSDP_TOKENIZE_LINES_H

#include "runtime/tokens/tokenizer.h"

typedef struct fsdp_tokenize_options {
    bool special;              /* adds the special tokens of the template */
    bool decode;               /* ids in, text out */
} fsdp_tokenize_options;

/*
 * A line that holds one JSON string becomes an array of ids, [1,2,3]; with decode, an array of ids becomes a
 * string, special tokens included, in which characters that could end a line or mislead a terminal are
 * escaped. Appends to *out, without a line end. line_number, from 1, is for messages.
 */
fsdp_status fsdp_tokenize_line(const fsdp_tokenizer *tokenizer, const fsdp_tokenize_options *options,
                               const fsdp_text *line, int64_t line_number, fsdp_text *out, fsdp_error *err);

#endif
