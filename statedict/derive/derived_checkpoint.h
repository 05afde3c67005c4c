/*
 * A checkpoint whose tensors are derived from those of another one: the caller lists its entries, and the
 * result is an opened checkpoint for every reader.
 *
 *   begin (takes the checkpoint)  ->  add tensors, keep entries, in order  ->  finish, or cancel
 */
#ifndef FSDP_DERIVED_CHECKPOINT_H
#define FSDP_DERIVED_CHECKPOINT_H

#include "statedict/derive/derived.h"

typedef struct fsdp_derivation fsdp_derivation;

/* Takes the checkpoint over: finish and cancel close it, and so does a failure of begin. */
fsdp_status fsdp_derivation_begin(fsdp_checkpoint *base, fsdp_derivation **derivation_out, fsdp_error *err);
fsdp_checkpoint *fsdp_derivation_base(const fsdp_derivation *derivation);
/* The arena for nodes. */
fsdp_arena *fsdp_derivation_arena(fsdp_derivation *derivation);

/* Takes over a second checkpoint from which tensors come. */
void fsdp_derivation_close_too(fsdp_derivation *derivation, fsdp_checkpoint *second);

/* Adds a file that decides about the tensors to those that the checkpoint reads; the path is copied. NULL:
 * none. */
fsdp_status fsdp_derivation_note_file(fsdp_derivation *derivation, const char *path, fsdp_error *err);

/* An entry name as bytes. */
typedef struct fsdp_derived_name {
    const char *text;
    size_t size;
} fsdp_derived_name;

/* FSDP_ERR_USAGE when the name is there already. */
fsdp_status fsdp_derivation_add(fsdp_derivation *derivation, fsdp_derived_name name,
                                const fsdp_derived *tensor, fsdp_error *err);
/* As add; where the base has several names of a tensor, and one with equal operations was added by this call,
 * the name becomes an alias of it, or is left out. */
fsdp_status fsdp_derivation_add_tied(fsdp_derivation *derivation, fsdp_derived_name name,
                                     const fsdp_derived *tensor, bool keeps_alias, fsdp_error *err);
fsdp_status fsdp_derivation_add_value(fsdp_derivation *derivation, fsdp_derived_name name,
                                      const fsdp_value *value, fsdp_error *err);
/* Adds a tensor in the place of one of the base, nested as that is where their names are alike. */
fsdp_status fsdp_derivation_replace(fsdp_derivation *derivation, size_t entry, fsdp_derived_name name,
                                    const fsdp_derived *tensor, fsdp_error *err);
/* Adds a tensor of the base as it is under another name, as add_tied does, nested as the old one is. */
fsdp_status fsdp_derivation_rename(fsdp_derivation *derivation, size_t entry, fsdp_derived_name name,
                                   bool keeps_alias, fsdp_error *err);
/* Adds an entry of the base as it is, under its own name and nesting. */
fsdp_status fsdp_derivation_keep(fsdp_derivation *derivation, size_t entry, fsdp_error *err);
/* Adds a value of the base under another name, which is nested as the old one is where they are alike. */
fsdp_status fsdp_derivation_keep_as(fsdp_derivation *derivation, size_t entry, fsdp_derived_name name,
                                    fsdp_error *err);

/* Adds a further name of a tensor that was added. */
fsdp_status fsdp_derivation_add_alias(fsdp_derivation *derivation, fsdp_derived_name name,
                                      fsdp_derived_name target, fsdp_error *err);
/* The entries so far. */
const fsdp_sd *fsdp_derivation_sd(const fsdp_derivation *derivation);

/* Frees the derivation in any case. */
fsdp_status fsdp_derivation_finish(fsdp_derivation *derivation, fsdp_checkpoint **checkpoint_out,
                                   fsdp_error *err);
void fsdp_derivation_cancel(fsdp_derivation *derivation);      /* accepts NULL */

#endif
