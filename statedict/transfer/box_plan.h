/*
 * Room transfer: plans of boxes (box_plan.c), and the data of a plan between memory and files (pipeline.c).
 *
 * In: the description of a state dict, the rank, a writer or readers of shard files. Out: the boxes that each
 * rank writes, and the stored boxes that cover a box to read; their bytes. Plans are pure functions of the
 * description, so that ranks need no messages and a reader repeats the decisions of the writer. save/,
 * checkpoint/ and convert/ call this room. docs/flow_save.md and docs/flow_load.md have its steps.
 */
#ifndef FSDP_BOX_PLAN_H
#define FSDP_BOX_PLAN_H

#include "base/core/mem.h"
#include "formats/shard.h"
#include <fsdp/checkpoint.h>
#include <fsdp/sd.h>

/*
 * Chooses, per tensor entry, the copy (fsdp_layout_copy) that stores its boxes. Balanced: within each group
 * of tensors that have the same copies on the same mesh, from the largest to the smallest, each goes to the
 * copy with the fewest bytes so far.
 */
fsdp_status fsdp_box_plan_owners(const fsdp_sd *sd, fsdp_owner_policy policy, int *owners_out,
                                 fsdp_error *err);

/* The datasets and boxes that one rank writes into a file. */
typedef struct fsdp_save_plan {
    fsdp_shard_dataset *datasets;
    size_t dataset_count;
    fsdp_shard_link *links;
    size_t link_count;
    fsdp_shard_box *boxes;     /* sorted by (tensor, part) */
    size_t box_count;
    int64_t *dims;             /* storage of lo and len of each box */
    size_t dim_count;
    const void **data;         /* per box: its bytes in the rank's memory, NULL in a description */
    int64_t bytes;
    fsdp_arena arena;
} fsdp_save_plan;

typedef struct fsdp_box_plan_input {
    const fsdp_sd *sd;
    fsdp_kind kind;
    bool encode;               /* blocks are compressed */
    const int *owners;         /* fsdp_box_plan_owners; of no use in a local checkpoint */
    int rank;
} fsdp_box_plan_input;

/*
 * The plan of one rank. Sharded: a dataset per box. Local: a dataset per flat chunk and per other
 * box; encoded, when a chunk of the file must lie in one box, a dataset per box throughout. Full: a
 * dataset per tensor, the same list on every rank, and inside them the boxes that this rank stores.
 */
fsdp_status fsdp_box_plan_save(const fsdp_box_plan_input *input, fsdp_save_plan *plan_out, fsdp_error *err);
/* An estimate of the bytes of such a plan and its writer. */
int64_t fsdp_save_plan_room(const fsdp_sd *sd, fsdp_kind kind, int rank);
/* Number of a box in the plan; it must be there. */
size_t fsdp_save_plan_find(const fsdp_save_plan *plan, size_t tensor, size_t part);
void fsdp_save_plan_release(fsdp_save_plan *plan);

/*
 * Calls visit for every stored box of an entry that shares an element with `wanted`: the rank that
 * stored it, its part number and the box. Stops at the first failure.
 */
typedef fsdp_status (*fsdp_stored_visit)(void *context, int rank, size_t part, const fsdp_box *box,
                                         fsdp_error *err);
fsdp_status fsdp_box_plan_stored(const fsdp_entry *entry, int owner, const fsdp_box *wanted,
                             fsdp_stored_visit visit, void *context, fsdp_error *err);

/*
 * Row-major slabs of a tensor that hold at most max_elements each: contiguous in the tensor's
 * order and, cut by any box, contiguous in that box's order. Zero-initialise to begin.
 */
typedef struct fsdp_slabs {
    int64_t next;              /* first element of the next slab */
} fsdp_slabs;
bool fsdp_slabs_next(fsdp_slabs *slabs, int ndim, const int64_t *shape, int64_t max_elements,
                     fsdp_box *slab_out);

#endif
