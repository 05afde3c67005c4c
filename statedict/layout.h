/*
 * A layout decides which rank holds which boxes of a tensor. The boxes of a rank are a pure function of
 * (layout, shape, rank), so every call is local, and any thread may make it.
 *
 * - mesh layout: a mesh of 1 to 4 named dims and one placement per mesh dim, as DTensor has them;
 * - box layout: explicit boxes per rank, for everything irregular;
 * - flat layout: a piece of a flat buffer of many tensors that is cut into equal chunks (FSDP1).
 */
#ifndef FSDP_LAYOUT_H
#define FSDP_LAYOUT_H

#include <fsdp/box.h>
#include <fsdp/status.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { FSDP_MAX_MESH_DIMS = 4, FSDP_MAX_MESH_NAME = 31 };

/* --- meshes ----------------------------------------------------------------------------------- */

typedef struct fsdp_mesh fsdp_mesh;

/*
 * Creates a mesh of ndim dims (1..4, each size >= 1), which the caller frees. names[i] are 1..31 bytes of
 * [A-Za-z0-9_.-], all different. ranks: the world ranks in row-major mesh order, all different, or NULL for
 * 0, 1, 2, ... All arguments are copied. FSDP_ERR_USAGE names the argument that breaks these rules.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_mesh_create(int ndim, const int64_t *shape,
                                                   const char *const *names, const int *ranks,
                                                   fsdp_mesh **mesh_out, fsdp_error *err);
/* Frees a mesh; accepts NULL. */
FSDP_API void fsdp_mesh_free(fsdp_mesh *mesh);

/* Returns the number of dims. */
FSDP_API int fsdp_mesh_ndim(const fsdp_mesh *mesh);
/* Returns the size of a dim below ndim. */
FSDP_API int64_t fsdp_mesh_dim_size(const fsdp_mesh *mesh, int dim);
/* Returns the name of a dim below ndim, which lives as long as the mesh. */
FSDP_API const char *fsdp_mesh_dim_name(const fsdp_mesh *mesh, int dim);
/* Returns the number of ranks in the mesh. */
FSDP_API int64_t fsdp_mesh_size(const fsdp_mesh *mesh);
/* Gets the coordinates of a rank, one per dim. Returns false when the rank is not in the mesh. */
FSDP_API bool fsdp_mesh_coord(const fsdp_mesh *mesh, int rank, int64_t *coord_out);
/* Returns true when sizes, names and ranks are the same. */
FSDP_API bool fsdp_mesh_equal(const fsdp_mesh *a, const fsdp_mesh *b);

/* --- placements ------------------------------------------------------------------------------- */

typedef enum fsdp_placement_kind {
    FSDP_REPLICATE = 0,
    FSDP_SHARD,                /* dim: cut into chunks of ceil(n / parts); the last ones may be empty */
    FSDP_STRIDED_SHARD,        /* dim, split: FSDP after TP has cut the same dim into `split` pieces */
    FSDP_PARTIAL               /* not reduced yet; state dicts refuse it */
} fsdp_placement_kind;

typedef struct fsdp_placement {
    fsdp_placement_kind kind;
    int dim;                   /* tensor dim of the two shard kinds */
    int64_t split;             /* of FSDP_STRIDED_SHARD */
} fsdp_placement;

/* --- layouts ---------------------------------------------------------------------------------- */

typedef struct fsdp_rank_box {
    int rank;
    fsdp_box box;
} fsdp_rank_box;

/* The number of ranks that hold an equal box, and the number of this one among them, in rank order. */
typedef struct fsdp_box_copy {
    int copies, copy;
} fsdp_box_copy;

enum { FSDP_MAX_LAYOUT_BOXES = 65536 };

/* A tensor in a flat buffer (fsdp_flat_buffer). */
typedef struct fsdp_flat_part {
    const char *name;          /* the tensor's name */
    size_t name_size;
    int ndim;
    const int64_t *shape;
    int64_t offset;            /* of its first element in the flat buffer */
} fsdp_flat_part;

typedef enum fsdp_layout_kind { FSDP_LAYOUT_MESH, FSDP_LAYOUT_BOXES, FSDP_LAYOUT_FLAT } fsdp_layout_kind;

typedef struct fsdp_layout {
    fsdp_layout_kind kind;
    const fsdp_mesh *mesh;                             /* MESH and FLAT */
    fsdp_placement placement[FSDP_MAX_MESH_DIMS];      /* MESH: one per mesh dim */
    const fsdp_rank_box *boxes;                        /* BOXES: sorted by rank, none empty */
    size_t box_count;
    const fsdp_box_copy *copies;                       /* BOXES: one per box; a state dict fills it in,
                                                        * callers leave it NULL */
    int64_t flat_count;                                /* FLAT: elements of the whole flat buffer ... */
    int64_t flat_offset;                               /* ... and where this tensor begins in it */
} fsdp_layout;

/* The calls below expect a layout that fits the shape. They do not check it; adding a tensor to a state dict
 * does. */

/* Returns the number of boxes that a rank holds: 0 when it is not in the mesh or its box is empty. */
FSDP_API size_t fsdp_layout_box_count(const fsdp_layout *layout, int ndim, const int64_t *shape, int rank);

/* Gets box `index` of a rank, in the order in which the rank's memory holds them. */
FSDP_API void fsdp_layout_box_at(const fsdp_layout *layout, int ndim, const int64_t *shape, int rank,
                                 size_t index, fsdp_box *box_out);

/* Gets the one box of a rank under a mesh layout, empty ones included ((n, 0) in the empty dim, as in
 * DTensor). Returns false when the rank is not in the mesh. */
FSDP_API bool fsdp_layout_mesh_box(const fsdp_layout *layout, int ndim, const int64_t *shape, int rank,
                                   fsdp_box *box_out);

#ifdef __cplusplus
}
#endif
#endif
