/* Describes the same state with another layout, for full saves by rank 0 and for conversions. */
#ifndef FSDP_RELAYOUT_H
#define FSDP_RELAYOUT_H

#include "base/core/mem.h"
#include "statedict/select/selection.h"
#include <fsdp/checkpoint.h>

typedef struct fsdp_relayout_opts {
    fsdp_kind kind;
    const fsdp_mesh *mesh;
    int shard_dim;
    const char *under;         /* as in fsdp_select_opts */
} fsdp_relayout_opts;

/*
 * A new description (no memory) of the selected entries of `from`. Sharded and full: every mesh dim cuts the
 * tensor dim `shard_dim` (dim 0 of tensors with fewer dims), but a mesh dim whose name begins with "rep"
 * holds copies, and scalars are copied to every rank. Local: one flat buffer per dtype over all ranks of the
 * mesh. selection NULL: all entries with their names. An alias whose target is not selected becomes the
 * tensor. source_out: per new entry the number of the old one; the caller frees it.
 */
fsdp_status fsdp_relayout(const fsdp_sd *from, const fsdp_relayout_opts *opts,
                          const fsdp_selection *selection, fsdp_sd **sd_out, size_t **source_out,
                          fsdp_error *err);

/* True for the name of a mesh dim that holds copies. */
bool fsdp_relayout_copies(const char *name);

/* The number of tensors that fsdp_relayout cut along dim 0 because they have no dim `shard_dim`. */
int64_t fsdp_relayout_count_short(const fsdp_sd *sd, int shard_dim);

/* One rank that holds everything. */
fsdp_status fsdp_relayout_whole(const fsdp_sd *from, const fsdp_selection *selection, fsdp_sd **sd_out,
                                fsdp_error *err);

#endif
