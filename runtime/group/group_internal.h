/* Between the files of this room. See group.h. */
#ifndef FSDP_GROUP_INTERNAL_H
#define FSDP_GROUP_INTERNAL_H

#include "runtime/group/group.h"

/* --- group_trace.c ---------------------------------------------------------------------------- */

void fsdp_trace_collective(const fsdp_group *group, const fsdp_ordered_comm *ordered,
                           const fsdp_collective *call, const char *stream);
/* On a stream; bytes -1: none. */
void fsdp_trace_work(const fsdp_group *group, const char *event, const char *stream, int64_t bytes);

/* --- group_check.c: these do nothing without --check -------------------------------------------- */

fsdp_status fsdp_group_begin_check(fsdp_group *group, fsdp_error *err);
void fsdp_group_end_check(fsdp_group *group);
/* On the compute stream: hashes of the parameters that were just gathered. */
void fsdp_group_note_gathered(fsdp_group *group);
/* FSDP_ERR_USAGE names a parameter that has changed since. Waits for the compute stream. */
fsdp_status fsdp_group_check_gathered(const fsdp_group *group, fsdp_error *err);
/* On the compute stream: NaN in the memory of the gathered parameters. */
void fsdp_group_spoil_gathered(const fsdp_group *group);

/* --- group_memory.c --------------------------------------------------------------------------- */

/* Memory for buffers of a collective. custom: runs it, or NULL; ordered: its communicator, or NULL. */
fsdp_allocator fsdp_group_allocator(const fsdp_group *group, const fsdp_custom_collective *custom,
                                    const fsdp_ordered_comm *ordered);
/* May reductions read gradients where they lie? Equal on all ranks. */
bool fsdp_group_may_be_direct(const fsdp_group *group);
/* Memory for gradients: the communicator's where reductions may be direct. */
fsdp_allocator fsdp_group_grad_allocator(const fsdp_group *group);
void fsdp_param_drop_grad(fsdp_param *param);          /* of this backward */
void fsdp_param_drop_kept(fsdp_param *param);          /* of earlier ones */

/* --- group_extension.c ------------------------------------------------------------------------ */

/* The extension's inputs lie one behind the other: at `to`, and at `from` and every `stride` bytes
 * behind it. */
void fsdp_work_pre_extension(fsdp_stream *stream, const fsdp_param *param, void *to);
void fsdp_work_post_extension(fsdp_stream *stream, const fsdp_param *param, const void *from, size_t stride);

/* --- group_pack.c ----------------------------------------------------------------------------- */

/* The dtype that two dtypes are reduced in. */
fsdp_dtype fsdp_dtype_promote(fsdp_dtype a, fsdp_dtype b);
fsdp_dtype fsdp_param_reduce_dtype(const fsdp_param *param);
/* Parts and dtype of a reduction of all gradients that are there; parts are the caller's to free. */
fsdp_status fsdp_reduced_list(fsdp_group *group, fsdp_reduced *reduced_out, fsdp_error *err);
int64_t fsdp_reduced_count(const fsdp_reduced *reduced);   /* elements */
size_t fsdp_reduced_bytes(const fsdp_reduced *reduced);
fsdp_reduced_part *fsdp_reduced_find(const fsdp_reduced *reduced, const fsdp_param *param);    /* or NULL */
void *fsdp_reduced_at(const fsdp_reduced *reduced, const fsdp_reduced_part *part);
/* The block for the input of a reduce-scatter; the context gives it back. */
fsdp_status fsdp_group_take_input(fsdp_group *group, const fsdp_reduced *reduced, fsdp_block **input_out,
                                  fsdp_error *err);
/* Gives the gradients back, which were packed or read. */
void fsdp_reduced_give_sources(const fsdp_reduced *reduced);
/* Makes the input of a reduce-scatter, and gives the gradients back. */
fsdp_status fsdp_group_chunk_cat(fsdp_group *group, const fsdp_reduced *reduced, fsdp_block **input_out,
                                 fsdp_error *err);

/* --- group_direct.c --------------------------------------------------------------------------- */

/* Can the other ranks read the gradients where they lie? Equal on all ranks. */
bool fsdp_reduced_is_direct(const fsdp_group *group, const fsdp_reduced *reduced, const fsdp_divide *divide);
/* In place of chunk-cat: the input is a table of the gradients' places. */
fsdp_status fsdp_group_list_grads(fsdp_group *group, const fsdp_reduced *reduced, fsdp_block **input_out,
                                  fsdp_error *err);
/* In place of the reduce-scatter `call` over that input; gives the gradients back. */
fsdp_status fsdp_group_add_up(fsdp_group *group, const fsdp_reduced *reduced, const fsdp_divide *divide,
                              fsdp_collective *call, fsdp_error *err);

/* --- group_partial.c -------------------------------------------------------------------------- */

/* Adds what waits for the replicas. */
fsdp_status fsdp_group_add_partial(fsdp_group *group, fsdp_reduced *reduced, fsdp_error *err);

/* --- group_keep.c ----------------------------------------------------------------------------- */

void fsdp_group_drop_kept(fsdp_group *group);          /* gradients of a step under way */

#endif
