/*
 * Rank sets: one torch.save file per rank, put together into one catalog without the world they came from.
 *
 *   names -> rankset_name.c (which files are a set, and whose)
 *         -> rankset_read.c (the walk through one file after the other)
 *         -> rankset_mesh.c (where a rank sits)   rankset_place.c (the boxes that placements give it)
 *         -> rankset_dist.c (DTensor, ShardedTensor: boxes of the whole)
 *         -> rankset_plain.c (what every rank has: the same, or each its own)
 *         -> rankset_flat.c (FSDP1's flat parameters, taken apart)
 *         -> rankset_merge.c (replicas left out, missing ranks) -> the builder of the source
 *
 * A pickle is let go before the next file is opened; what is kept of it are boxes and places of bytes.
 */
#ifndef FSDP_RANKSET_H
#define FSDP_RANKSET_H

#include "formats/source/rank_names.h"
#include "formats/torch/torch_internal.h"
#include "kernels/kernels.h"

/* --- rankset_mesh.c --- */

enum { RANK_MESH_DIMS = 16, RANK_MESH_LIMIT = 1 << 20 };

/* The ranks that share a tensor. */
typedef struct rank_mesh {
    int ndim;
    int64_t shape[RANK_MESH_DIMS];
    int64_t *ranks;            /* row-major */
    size_t count;
    size_t listed;             /* ranks in the list that it is a part of ... */
    int64_t highest;           /* ... and the highest of them */
} rank_mesh;

/* A DeviceMesh, and where the rank sits in it; *sits_out false: nowhere. mesh_out->ranks is freed with
 * fsdp_free. FSDP_ERR_DAMAGED when it contradicts the rank. */
fsdp_status rank_mesh_read(const torch_archive *archive, fsdp_node node, int rank, rank_mesh *mesh_out,
                           int64_t *coordinate_out, bool *sits_out, fsdp_error *err);

/* --- rankset_place.c --- */

typedef struct rank_placement {
    enum { RANK_REPLICATE, RANK_SHARD, RANK_STRIDED } kind;
    int dim;
    int64_t split;
} rank_placement;

/* How a tensor lies on a mesh, and the order in which the mesh's dims cut it (first is cut first; only
 * those that cut). */
typedef struct rank_layout {
    int mesh_ndim;
    const int64_t *mesh_shape, *coordinate;
    rank_placement placements[RANK_MESH_DIMS];
    int order[RANK_MESH_DIMS], order_count;
    bool is_ordered;           /* false: no order of cuts stands for the strided placements */
    bool has_strided;
} rank_layout;

/* Fills in the order that strided placements stand for: _StridedShard(d, s) is cut after dims that make s
 * parts of d. */
void rank_layout_order(rank_layout *layout);

/* The box of the coordinate when the dims are cut in that order. An empty box lies at the end. */
void rank_layout_box(const rank_layout *layout, int ndim, const int64_t *shape, fsdp_box *box_out);

/* Rows of one dim that a rank holds one behind the other. */
typedef struct rank_run {
    int64_t lo, len;
} rank_run;

typedef struct rank_runs {
    rank_run *items;
    size_t count, room;
} rank_runs;

enum { RANK_MOST_RUNS = 65536 };

/* The other reading of strided placements: from left to right, each taking its part of every one of
 * `split` pieces. False when there are more than RANK_MOST_RUNS, or no memory. */
bool rank_layout_runs(const rank_layout *layout, int dim, int64_t size, rank_runs *runs_out);

/* --- the set --- */

/* A box of a tensor and the place of its elements, of one rank. What it points to is the arena's. */
typedef struct rank_chunk {
    int rank;
    fsdp_source_chunk chunk;
} rank_chunk;

typedef struct rank_chunks {
    rank_chunk *items;
    size_t count, room;
    bool fails;                /* a rank's piece does not have the shape that this reading gives it */
} rank_chunks;

enum { RANK_ORDERED, RANK_LEFT_TO_RIGHT, RANK_READINGS };

/* What one rank has under a name that is not spread. */
typedef struct rank_item {
    int rank;
    bool is_same;              /* as the entry's first item: then nothing else is filled in */
    bool is_tensor;
    torch_tensor *tensor;      /* is_tensor; its data is the item's */
    fsdp_value value;
    fsdp_hash stored;          /* of an object, whose value is only its class: as it is stored; or zeros */
} rank_item;

typedef struct rank_entry {
    const char *name;
    size_t name_size;
    size_t twin;               /* the next entry of the same name, when a file has it twice; 0: none */
    int last_rank;             /* that has it */
    bool is_spread, is_hidden;
    fsdp_dtype dtype;          /* is_spread: the whole tensor */
    int ndim;
    int64_t *shape;
    rank_chunks readings[RANK_READINGS];
    bool readings_differ;
    rank_item *items;          /* otherwise */
    size_t item_count, item_room;
} rank_entry;

/* A rank's FlatParamShardMetadata. */
typedef struct rank_flat_param {
    const char *name;
    size_t name_size;
    int ndim;
    int64_t shape[FSDP_MAX_DIMS], strides[FSDP_MAX_DIMS];
    bool has_strides;          /* not contiguous: elements lie in the order of the strides */
    int64_t count, first, last;    /* elements; those of this rank, last included */
} rank_flat_param;

typedef struct rank_flat {
    int rank;
    const char *name;          /* under which it was found */
    size_t name_size;
    rank_flat_param *params;
    size_t param_count;
} rank_flat;

/* A mesh that a rank is in. */
typedef struct rank_seat {
    int rank;
    size_t mesh;
} rank_seat;

typedef struct rank_set {
    fsdp_source *source;
    torch_memory *memory;
    const char *where;         /* the pattern, for messages */
    const rank_group *group;
    fsdp_arena arena;
    int rank;                  /* whose file is being read */
    int64_t world;             /* ranks that there were, as far as is known */
    int64_t work;              /* steps that a hostile file could multiply */
    int64_t bytes, compared;   /* of the files so far; of tensors compared with one another */
    bool is_seated;            /* the rank at hand is known to be one of all (ShardedTensor) */

    rank_entry *entries;       /* entries[0] is not used */
    size_t entry_count, entry_room;
    fsdp_name_table names;

    rank_mesh *meshes;         /* each once */
    size_t mesh_count, mesh_room;
    rank_seat *seats;
    size_t seat_count, seat_room;
    struct seen_mesh { fsdp_node node; size_t mesh; bool sits; int64_t coordinate[RANK_MESH_DIMS]; } *seen;
    size_t seen_count, seen_room;   /* of the file that is being read */

    rank_flat *flats;
    size_t flat_count, flat_room;
} rank_set;

/* FSDP_ERR_LIMIT when the files ask for more steps than any checkpoint takes. */
fsdp_status rank_set_spend(rank_set *set, size_t steps, fsdp_error *err);
/* The rank at hand is in the mesh; takes mesh->ranks. */
fsdp_status rank_set_seat(rank_set *set, rank_mesh *mesh, bool sits, size_t *number_out, fsdp_error *err);
/* The entry of a name for the rank at hand. */
fsdp_status rank_set_entry(rank_set *set, const char *name, size_t name_size, rank_entry **entry_out,
                           fsdp_error *err);
/* A fresh entry that no file's name leads to. Entries may move. */
fsdp_status rank_set_new_entry(rank_set *set, const char *name, size_t name_size, size_t *number_out,
                               fsdp_error *err);
/* Copies the chunk into the arena. */
fsdp_status rank_set_add_chunk(rank_set *set, rank_chunks *chunks, int rank, int ndim,
                               const fsdp_source_chunk *chunk, fsdp_error *err);
/* The first rank's word of a whole tensor's dtype and shape counts, the others must agree. */
fsdp_status rank_set_spread(rank_set *set, rank_entry *entry, fsdp_dtype dtype, int ndim,
                            const int64_t *shape, fsdp_error *err);

/* --- rankset_dist.c, rankset_plain.c, rankset_flat.c: as torch_visitor has them, user is the set --- */

fsdp_status rank_set_distributed(void *user, torch_archive *archive, const char *name, size_t name_size,
                                 const torch_wrapper *wrapper, fsdp_error *err);
fsdp_status rank_set_tensor(void *user, torch_archive *archive, const char *name, size_t name_size,
                            torch_tensor *tensor, fsdp_error *err);
fsdp_status rank_set_value(void *user, const torch_archive *archive, fsdp_node node, const char *name,
                           size_t name_size, fsdp_value *value, fsdp_error *err);
fsdp_status rank_set_object(void *user, torch_archive *archive, const char *name, size_t name_size,
                            fsdp_node node, bool *taken_out, fsdp_error *err);
void rank_items_release(rank_entry *entry);

/* --- rankset_compare.c --- */

/* Bytes behind the tensor's first element, wherever they are kept. */
fsdp_status rank_tensor_pread(fsdp_source *source, const torch_tensor *tensor, int64_t offset, void *data,
                              size_t size, fsdp_error *err);
/* From the first byte of the tensor to the last one. */
int64_t rank_tensor_span(const torch_tensor *tensor);
/* Do they hold the same bytes, as the same dtype and shape? */
fsdp_status rank_same_elements(fsdp_source *source, const torch_tensor *a, const torch_tensor *b,
                               bool *same_out, fsdp_error *err);

/* Makes entries of the parameters in flat ones, and hides those and their pieces. */
fsdp_status rank_set_take_apart(rank_set *set, fsdp_error *err);

/* --- rankset_merge.c --- */

/* Everything was read: adds what was found to the source. */
fsdp_status rank_set_merge(rank_set *set, fsdp_error *err);

#endif
