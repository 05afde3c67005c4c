/*
 * The texts that a source has beside its tensors (__metadata__ of safetensors), and what a conversion keeps
 * of them. Called by convert/, once it is known what becomes of the tensors.
 */
#ifndef FSDP_METADATA_H
#define FSDP_METADATA_H

#include "base/data/text_pairs.h"
#include "formats/target.h"
#include <fsdp/convert.h>

typedef struct fsdp_metadata_from {
    const char *path;          /* of the source */
    const char *carried;       /* a JSON object of texts that stay true in other files; NULL: none */
    const char *contradicting; /* keys with another text in another file, and the names of both; NULL: none */
    int64_t renamed;           /* tensors that get other names */
    bool is_changed;           /* names, values or the list of tensors are not those of the source */
} fsdp_metadata_from;

/* Zero-initialise; release after use, also after a failure. */
typedef struct fsdp_metadata_choice {
    char *kept;                /* a JSON object; NULL: nothing */
    fsdp_text_pairs left_out;  /* keys that --drop does not name */
} fsdp_metadata_choice;
void fsdp_metadata_choice_release(fsdp_metadata_choice *choice);

/* Hashes of the source's bytes are left out when these change.
 * FSDP_ERR_USAGE: a text that is true for the names of the source alone would be kept, and they change.
 * FSDP_ERR_DAMAGED names a key that would be kept, and the two files that contradict each other. */
fsdp_status fsdp_metadata_choose(const fsdp_metadata_from *from, const fsdp_select_opts *opts,
                                 const fsdp_format *target, fsdp_metadata_choice *choice, fsdp_error *err);

#endif
