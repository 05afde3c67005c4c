/*
 * The state dict and its layouts: the private part of sd.h and layout.h.
 *
 * In: names, tensors, values, meshes and placements from callers, manifests and other programs' checkpoints.
 * Out: a checked fsdp_sd, and for every (layout, shape, rank) the boxes that the rank holds. All of statedict
 * and runtime uses this room; everything is local but for describe.c.
 *
 *   sd.c            entries, their names and the memory they point to
 *   layout.c        meshes: the rank's coordinates; from layout, shape and rank to boxes
 *   describe.c      compares the state dicts of all ranks by hashes
 *   optim_names.c   which names belong to an optimizer
 *   meter.c         progress and notices; names.c  lists of names in messages
 */
#ifndef FSDP_LAYOUT_INTERNAL_H
#define FSDP_LAYOUT_INTERNAL_H

#include <fsdp/layout.h>
#include <fsdp/sd.h>

/* One more fsdp_mesh_free ends it, on any thread. */
fsdp_mesh *fsdp_mesh_hold(const fsdp_mesh *mesh);
fsdp_status fsdp_mesh_copy(const fsdp_mesh *mesh, fsdp_mesh **copy_out, fsdp_error *err);

int fsdp_mesh_rank_at(const fsdp_mesh *mesh, int64_t position);
/* Row-major position of a rank, -1 when it is not in the mesh: the inverse of fsdp_mesh_rank_at. */
int64_t fsdp_mesh_position(const fsdp_mesh *mesh, int rank);

/* True when every rank of the mesh is its own position: 0, 1, 2, ... */
bool fsdp_mesh_is_dense(const fsdp_mesh *mesh);

/*
 * Checks a layout against a shape that fsdp_shape_check accepted: dims in range, Shard and
 * StridedShard as PyTorch allows them, at most FSDP_MAX_LAYOUT_BOXES boxes, each inside the shape,
 * not overlapping unless equal and on different ranks, and covering every element. Partial is
 * FSDP_ERR_USAGE, saying that it must be reduced first. The functions below expect a checked layout.
 */
FSDP_CHECKED fsdp_status fsdp_layout_check(const fsdp_layout *layout, int ndim, const int64_t *shape,
                                           fsdp_error *err);

/* The highest rank that the layout names, plus one. */
int fsdp_layout_world(const fsdp_layout *layout);

/*
 * Copies of box `index` of a rank: the ranks that hold an equal box have a copy number each, 0 ..
 * copies - 1, row-major over the replicate dims of a mesh layout, in rank order for a box layout.
 * No copies and copy -1 when the rank has no such box (an empty one of a mesh layout counts).
 */
int64_t fsdp_layout_copies(const fsdp_layout *layout, int rank, size_t index);
int64_t fsdp_layout_copy(const fsdp_layout *layout, int rank, size_t index);

/* FLAT: the element of the rank's chunk at which its part of a tensor of `count` elements begins; -1 when the
 * rank holds no part. */
int64_t fsdp_layout_flat_start(const fsdp_layout *layout, int64_t count, int rank);

/* BOXES: fills copies_out, one per box of a checked layout. */
fsdp_status fsdp_layout_count_copies(const fsdp_layout *layout, fsdp_box_copy *copies_out,
                                     fsdp_error *err);

/* A flat buffer (see fsdp_sd_add_flat). */
typedef struct fsdp_flat {
    const char *name;
    size_t name_size;
    fsdp_dtype dtype;
    const fsdp_mesh *mesh;
    int64_t count;             /* elements of the whole buffer with padding: a multiple of the mesh size */
    void *data;                /* this rank's chunk */
} fsdp_flat;
size_t fsdp_sd_flat_count(const fsdp_sd *sd);
const fsdp_flat *fsdp_sd_flat_at(const fsdp_sd *sd, size_t index);

/* Bytes of all whole tensors; aliases count nothing. */
int64_t fsdp_sd_tensor_bytes(const fsdp_sd *sd);

/* The number of the tensor that an alias names; any other entry returns its number. */
size_t fsdp_sd_tensor_of(const fsdp_sd *sd, size_t entry);

/* Reserves memory for about `count` more entries. A lack of memory is ignored: adding them reports it. */
void fsdp_sd_expect(fsdp_sd *sd, size_t count);

/* About how many bytes a state dict takes, without the memory of tensors and large values. */
int64_t fsdp_sd_room(const fsdp_sd *sd);

#endif
