/*
 * Texts under unique keys, in their order: what a file says of itself next to its tensors, such as
 * __metadata__ of safetensors. As text they are a JSON object whose members are strings.
 */
#ifndef FSDP_TEXT_PAIRS_H
#define FSDP_TEXT_PAIRS_H

#include "base/core/mem.h"
#include "base/data/json.h"
#include "base/data/name_table.h"
#include "base/text.h"

/* No writer comes near; each pair costs about a hundred bytes of memory, and ten in a file. */
enum { FSDP_TEXT_PAIRS_MOST = 1 << 20 };

typedef struct fsdp_text_pair {
    const char *key, *text;    /* zero-terminated after their ends, may hold NUL */
    size_t key_size, text_size;
} fsdp_text_pair;

/* Zero-initialise; release after use, also after a failure. */
typedef struct fsdp_text_pairs {
    fsdp_arena arena;
    fsdp_text_pair *items;
    size_t count, room;
    fsdp_name_table keys;      /* -> number of the item */
} fsdp_text_pairs;

void fsdp_text_pairs_release(fsdp_text_pairs *pairs);
/* NULL when the key is not there; valid until the next pair is added. */
const fsdp_text_pair *fsdp_text_pairs_find(const fsdp_text_pairs *pairs, const char *key, size_t size);
/* Copies a pair, whose key is new. */
fsdp_status fsdp_text_pairs_add(fsdp_text_pairs *pairs, const fsdp_text_pair *pair, fsdp_error *err);

/* Adds the members of a JSON object. FSDP_ERR_DAMAGED: a key is there twice, or a text is not a string;
 * FSDP_ERR_LIMIT: more than FSDP_TEXT_PAIRS_MOST. */
fsdp_status fsdp_text_pairs_take(fsdp_text_pairs *pairs, fsdp_json *json, fsdp_error *err);
/* Like fsdp_text_pairs_take, for a whole text; name is for messages. */
fsdp_status fsdp_text_pairs_parse(fsdp_text_pairs *pairs, const char *json, const char *name,
                                  fsdp_error *err);
/* {"key": "text", "other": "text"}, fit for a terminal */
void fsdp_text_pairs_spell(const fsdp_text_pairs *pairs, fsdp_text *out);

#endif
