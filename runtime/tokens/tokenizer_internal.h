/* A tokenizer, for the files that read and use one. */
#ifndef FSDP_TOKENIZER_INTERNAL_H
#define FSDP_TOKENIZER_INTERNAL_H

#include "formats/tokenizer_json.h"
#include "runtime/tokens/added_tokens.h"
#include "runtime/tokens/merge.h"
#include "runtime/tokens/split.h"
#include "runtime/tokens/tokenizer.h"

struct fsdp_tokenizer {
    char *text;
    size_t text_size;
    bool is_bytes;             /* the rest is empty then */
    fsdp_bpe bpe;
    fsdp_unicode *unicode;
    fsdp_added_tokens added, added_normalized;
    fsdp_text_rules rules; /* ids of its template are tokens */
};

/* Fills the tokenizer from its text (tokenizer_read.c). */
fsdp_status fsdp_tokenizer_read(fsdp_tokenizer *tokenizer, const char *origin, fsdp_error *err);

#endif
