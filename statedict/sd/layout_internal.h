/* What the state dict's own code asks meshes and layouts beyond layout.h. */
#ifndef FSDP_LAYOUT_INTERNAL_H
#define FSDP_LAYOUT_INTERNAL_H

#include <fsdp/layout.h>
#include <fsdp/sd.h>

fsdp_status fsdp_mesh_copy(const fsdp_mesh *mesh, fsdp_mesh **copy_out, fsdp_error *err);

/* Row-major position of a rank, -1 when it is not in the mesh: the inverse of fsdp_mesh_rank_at. */
int64_t fsdp_mesh_position(const fsdp_mesh *mesh, int rank);

/* The highest rank plus one. */
int fsdp_mesh_world(const fsdp_mesh *mesh);

/* FLAT: where the part that a rank holds of a tensor of `count` elements begins in the rank's chunk,
 * in elements; -1 when it holds none. */
int64_t fsdp_layout_flat_start(const fsdp_layout *layout, int64_t count, int rank);

/* BOXES: each inside the shape, none twice on a rank, distinct ones disjoint, every element held. */
fsdp_status fsdp_layout_check_boxes(const fsdp_layout *layout, int ndim, const int64_t *shape,
                                    fsdp_error *err);

/* BOXES: fills copies_out, one per box of a checked layout. */
fsdp_status fsdp_layout_count_copies(const fsdp_layout *layout, fsdp_box_copy *copies_out,
                                     fsdp_error *err);

/* The tensor that an entry is, or is an alias of; a value is itself. */
size_t fsdp_sd_tensor_of(const fsdp_sd *sd, size_t entry);

/* About so many entries will be added: room for them is made at once, as far as there is memory. */
void fsdp_sd_expect(fsdp_sd *sd, size_t count);

/* About how many bytes a state dict takes; the memory of tensors and large values left aside. */
int64_t fsdp_sd_room(const fsdp_sd *sd);

#endif
