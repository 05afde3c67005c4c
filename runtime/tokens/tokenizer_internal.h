/* A tokenizer, for the files that read and use one. */
#ifndef FSDP_TOKENIZER_INTERNAL_H
#define FSDP_TOKENIZER_INTERNAL_H

#include "base/data/json.h"
#include "runtime/tokens/added_tokens.h"
#include "runtime/tokens/merge.h"
#include "runtime/tokens/split.h"
#include "runtime/tokens/tokenizer.h"

enum { FSDP_SPLIT_STEPS = 8 };

/* One step of the pre-tokenizer: cuts each piece that the step before left. */
typedef struct fsdp_split_step {
    fsdp_split split;          /* NULL: leaves it whole */
    bool adds_space;           /* before a piece that begins with none */
} fsdp_split_step;

struct fsdp_tokenizer {
    char *text;
    size_t text_size;
    bool is_bytes;             /* the rest is empty then */
    fsdp_bpe bpe;
    fsdp_unicode *unicode;
    bool normalizes;
    fsdp_added_tokens added, added_normalized;
    fsdp_split_step steps[FSDP_SPLIT_STEPS];
    int step_count;
    bool has_byte_level;       /* among the steps; the last one */
    fsdp_ids before, after;    /* of the template, around the text */
    bool has_template, has_decoder;
};

/* A value in a JSON text, found but not read yet. at NULL: it is absent, or null. */
typedef struct fsdp_json_part { const char *at, *end; } fsdp_json_part;

/* A reader of a part of `whole`. Release it with fsdp_json_release. */
fsdp_json fsdp_json_part_open(const fsdp_json *whole, fsdp_json_part part);
/* Skips the next value and says where it lies. */
fsdp_status fsdp_json_take_part(fsdp_json *json, fsdp_json_part *part_out, fsdp_error *err);
/* The member "type" of an object, "" without one. An array or a scalar is FSDP_ERR_DAMAGED. */
enum { FSDP_PART_TYPE = 64 };
fsdp_status fsdp_json_part_type(const fsdp_json *whole, fsdp_json_part part, char type_out[FSDP_PART_TYPE],
                                fsdp_error *err);

/* FSDP_ERR_USAGE: "'ORIGIN': WHAT 'NAME' is not supported ..." */
fsdp_status fsdp_tokenizer_refuse(const fsdp_json *json, const char *what, const char *name, fsdp_error *err);

/* The members of a tokenizer.json, in this order (tokenizer_model.c, tokenizer_parts.c). */
fsdp_status fsdp_tokenizer_read_model(fsdp_tokenizer *tokenizer, const fsdp_json *json, fsdp_json_part part,
                                      fsdp_error *err);
fsdp_status fsdp_tokenizer_read_normalizer(fsdp_tokenizer *tokenizer, const fsdp_json *json,
                                           fsdp_json_part part, fsdp_error *err);
fsdp_status fsdp_tokenizer_read_added(fsdp_tokenizer *tokenizer, const fsdp_json *json, fsdp_json_part part,
                                      fsdp_error *err);
fsdp_status fsdp_tokenizer_read_splits(fsdp_tokenizer *tokenizer, const fsdp_json *json, fsdp_json_part part,
                                       fsdp_error *err);
fsdp_status fsdp_tokenizer_read_template(fsdp_tokenizer *tokenizer, const fsdp_json *json,
                                         fsdp_json_part part, fsdp_error *err);
fsdp_status fsdp_tokenizer_read_decoder(fsdp_tokenizer *tokenizer, const fsdp_json *json, fsdp_json_part part,
                                        fsdp_error *err);
/* All of them (tokenizer_read.c). */
fsdp_status fsdp_tokenizer_read(fsdp_tokenizer *tokenizer, const char *origin, fsdp_error *err);

#endif
