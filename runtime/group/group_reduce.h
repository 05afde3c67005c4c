/*
 * Between the files that reduce gradients: unit_keep.c keeps them, unit_pack.c packs them or unit_direct.c
 * does without, unit_partial.c adds what waits for the replicas, unit_reduce.c leads.
 */
#ifndef FSDP_UNIT_REDUCE_H
#define FSDP_UNIT_REDUCE_H

#include "runtime/step/step.h"

/* --- unit_keep.c ------------------------------------------------------------------------------ */

void fsdp_param_drop_grad(fsdp_param *param);          /* what this backward gave */
fsdp_status fsdp_group_keep_grads(fsdp_group *group, fsdp_error *err);
/* What this backward gave goes to where earlier ones left something. */
void fsdp_group_add_to_kept(fsdp_group *group);

/* --- unit_pack.c ------------------------------------------------------------------------------ */

/* The dtype that two dtypes are reduced in. */
fsdp_dtype fsdp_dtype_promote(fsdp_dtype a, fsdp_dtype b);
fsdp_dtype fsdp_param_reduce_dtype(const fsdp_param *param);
/* Parts and dtype of a reduction of what has gradients; parts are the caller's to free. */
fsdp_status fsdp_reduced_list(fsdp_group *group, fsdp_reduced *reduced_out, fsdp_error *err);
int64_t fsdp_reduced_count(const fsdp_reduced *reduced);   /* elements */
size_t fsdp_reduced_bytes(const fsdp_reduced *reduced);
fsdp_reduced_part *fsdp_reduced_find(const fsdp_reduced *reduced, const fsdp_param *param);    /* or NULL */
void *fsdp_reduced_at(const fsdp_reduced *reduced, const fsdp_reduced_part *part);
/* The block for the input of a reduce-scatter; the context gives it back. */
fsdp_status fsdp_group_take_input(fsdp_group *group, const fsdp_reduced *reduced, fsdp_block **input_out,
                                  fsdp_error *err);
/* Gradients go back that were packed, or read. */
void fsdp_reduced_give_sources(const fsdp_reduced *reduced);
/* Makes the input of a reduce-scatter, and gives the gradients back. */
fsdp_status fsdp_group_chunk_cat(fsdp_group *group, const fsdp_reduced *reduced, fsdp_block **input_out,
                                 fsdp_error *err);

/* --- unit_direct.c ---------------------------------------------------------------------------- */

/* Can the other ranks read the gradients where they lie? Equal on all ranks. */
bool fsdp_reduced_is_direct(const fsdp_group *group, const fsdp_reduced *reduced, const fsdp_divide *divide);
/* In place of chunk-cat: the input tells where they are. */
fsdp_status fsdp_group_list_grads(fsdp_group *group, const fsdp_reduced *reduced, fsdp_block **input_out,
                                  fsdp_error *err);
/* In place of the reduce-scatter `call` over that input; gives the gradients back. */
fsdp_status fsdp_group_add_up(fsdp_group *group, const fsdp_reduced *reduced, const fsdp_divide *divide,
                              fsdp_collective *call, fsdp_error *err);

/* --- unit_partial.c --------------------------------------------------------------------------- */

fsdp_status fsdp_group_add_partial(fsdp_group *group, fsdp_reduced *reduced, fsdp_error *err);

#endif
