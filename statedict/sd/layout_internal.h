/*
 * The state dict and its layouts: the private part of sd.h and layout.h.
 *
 * In: names, tensors, values, meshes and placements from callers, manifests and other programs' checkpoints.
 * Out: a checked fsdp_sd, and for every (layout, shape, rank) the boxes that the rank holds. All of statedict
 * and runtime uses this room; everything is local but for describe.c.
 *
 *   sd.c            entries, their names and the memory they point to
 *   mesh.c          which rank has which coordinates
 *   layout.c        from layout, shape and rank to boxes
 *   layout_boxes.c  checks that explicit boxes tile the tensor
 *   describe.c      compares the state dicts of all ranks by hashes
 *   optim_names.c   which names belong to an optimizer
 *   meter.c         progress and notices; names.c  lists of names in messages
 */
#ifndef FSDP_LAYOUT_INTERNAL_H
#define FSDP_LAYOUT_INTERNAL_H

#include <fsdp/layout.h>
#include <fsdp/sd.h>

fsdp_status fsdp_mesh_copy(const fsdp_mesh *mesh, fsdp_mesh **copy_out, fsdp_error *err);

/* Row-major position of a rank, -1 when it is not in the mesh: the inverse of fsdp_mesh_rank_at. */
int64_t fsdp_mesh_position(const fsdp_mesh *mesh, int rank);

/* The highest rank plus one. */
int fsdp_mesh_world(const fsdp_mesh *mesh);

/* FLAT: the element of the rank's chunk at which its part of a tensor of `count` elements begins; -1 when the
 * rank holds no part. */
int64_t fsdp_layout_flat_start(const fsdp_layout *layout, int64_t count, int rank);

/* BOXES: each inside the shape, none twice on a rank, distinct ones disjoint, every element held. */
fsdp_status fsdp_layout_check_boxes(const fsdp_layout *layout, int ndim, const int64_t *shape,
                                    fsdp_error *err);

/* BOXES: fills copies_out, one per box of a checked layout. */
fsdp_status fsdp_layout_count_copies(const fsdp_layout *layout, fsdp_box_copy *copies_out,
                                     fsdp_error *err);

/* The number of the tensor that an alias names; any other entry returns its number. */
size_t fsdp_sd_tensor_of(const fsdp_sd *sd, size_t entry);

/* Reserves room for about `count` more entries. A lack of memory is ignored: adding them reports it. */
void fsdp_sd_expect(fsdp_sd *sd, size_t count);

/* About how many bytes a state dict takes, without the memory of tensors and large values. */
int64_t fsdp_sd_room(const fsdp_sd *sd);

#endif
