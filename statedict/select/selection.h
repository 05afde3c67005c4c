/*
 * Which entries of a checkpoint go into another one, and under which names: patterns, model or
 * optimizer, what is dropped, which dtype tensors get, what the target's format cannot hold, and renaming. In
 * that order.
 */
#ifndef FSDP_SELECTION_H
#define FSDP_SELECTION_H

#include "formats/target.h"
#include <fsdp/convert.h>
#include <fsdp/sd.h>

typedef struct fsdp_selected {
    bool is_kept;
    bool is_optim;             /* of the optimizer */
    bool is_tied;              /* not kept, since another name of the same tensor is */
    const char *name;          /* new; borrowed from the selection */
    size_t name_size;
    fsdp_dtype dtype;          /* of the result; values: FSDP_DTYPE_NONE */
} fsdp_selected;

typedef struct fsdp_selection fsdp_selection;

/*
 * is_missing: entries that cannot go over (incomplete.h), or NULL. limits NULL: the native format, which
 * holds all but tensors inside values. FSDP_ERR_USAGE lists what the format cannot hold and how to drop it,
 * tensors that cannot be cast, or two entries that would get one name; it is also the answer where nothing
 * but the optimizer is there and the format leaves that out by default. FSDP_DIFFERS: no name matches.
 */
fsdp_status fsdp_selection_create(const fsdp_sd *sd, const fsdp_select_opts *opts,
                                  const fsdp_limits *limits, const bool *is_missing,
                                  fsdp_selection **selection_out, fsdp_error *err);
void fsdp_selection_free(fsdp_selection *selection); /* accepts NULL */

const fsdp_selected *fsdp_selection_at(const fsdp_selection *selection, size_t entry);

/* It does not go over after all: another name of the same tensor does. */
void fsdp_selection_leave_out(fsdp_selection *selection, size_t entry);

/* Fills in what a plan tells of it. */
void fsdp_selection_tell(const fsdp_selection *selection, fsdp_convert_plan *plan);

/* FSDP_ERR_USAGE when the state dict has names and the patterns (filter.h) select none: that is a mistake,
 * whatever a checkpoint holds. */
fsdp_status fsdp_filter_require(const fsdp_sd *sd, const char *include, const char *exclude, fsdp_error *err);

#endif
