/*
 * Room ranks: rank files, one torch.save file per rank, merged into one catalog without the world that wrote
 * them.
 *
 * In: a directory of rank files, or a pattern of their names; the pickles may be hostile. Out: the catalog of
 * a source (source.h) with whole tensors.
 *
 *   names -> source/rank_names.c (groups of files, and the rank of each)
 *         -> ranks_read.c    bid, open, and the loop that reads one file after another; Meta's parts of
 *                            tensor parallelism, joined by rules and params.json
 *         -> ranks_dist.c    DTensor, ShardedTensor: the mesh, the rank's coordinate, boxes of the whole;
 *                            what metadata next to the files states of them
 *         -> ranks.c         other tensors and values: equal on all ranks, or kept per rank
 *         -> ranks_flat.c    FSDP1's flat parameters, split into parameters; pieces without shapes get those
 *                            of a model that was named
 *         -> ranks_read.c    drops replicas, checks for missing ranks, fills the source
 *   ranks.c holds entries and boxes for all of them.
 *
 * A pickle is freed before the next file is opened; its boxes and the places of their bytes are kept.
 * Callers: the table of formats in detect, and torch_checkpointing, whose directories have a set of rank
 * files per item and metadata next to them. It calls torch and source.
 */
#ifndef FSDP_RANKS_H
#define FSDP_RANKS_H

#include "formats/source/rank_names.h"
#include "formats/source/source_facts.h"
#include "formats/torch/torch_internal.h"
#include "kernels/kernels.h"

/* --- ranks_dist.c --- */

enum { RANK_MESH_DIMS = 16, RANK_MESH_LIMIT = 1 << 20 };

/* A mesh: the ranks that share a tensor. */
typedef struct rank_mesh {
    int ndim;
    int64_t shape[RANK_MESH_DIMS];
    int64_t *ranks;            /* row-major */
    size_t count;
    size_t listed;             /* number of ranks in the list that contains the mesh ... */
    int64_t highest;           /* ... and the highest of them */
} rank_mesh;

/* The coordinate of a rank in a mesh; is_member false: it is not in the mesh. */
typedef struct rank_position {
    bool is_member;
    int64_t coordinate[RANK_MESH_DIMS];
} rank_position;

/* --- ranks_dist.c --- */

/* Adjacent rows of one dim that a rank holds. */
typedef struct rank_run {
    int64_t lo, len;
} rank_run;

typedef struct rank_placement {
    enum { RANK_REPLICATE, RANK_SHARD, RANK_STRIDED } kind;
    int dim;
    int64_t split;
} rank_placement;

/* --- what is stated next to the files --- */

/* A part that a rank holds: offset in the whole tensor, offset in the rank's own, lengths. */
typedef struct rank_piece {
    const int64_t *lo, *local, *len;
} rank_piece;

/* How the ranks hold a tensor, as the metadata of the checkpoint states it: by placements or by pieces. */
typedef struct rank_statement {
    fsdp_dtype dtype;
    int ndim;
    const int64_t *shape;      /* of the whole tensor */
    const rank_mesh *mesh;     /* NULL: by pieces */
    const rank_placement *placements;  /* one per mesh dim */
    const rank_piece *pieces;  /* of the rank that was asked for */
    size_t piece_count;
} rank_statement;

typedef struct rank_statements {
    void *context;
    const char *where;         /* "'PATH'" of the metadata */
    /* The statement about the tensor of that name on a rank; NULL: none. */
    const rank_statement *(*find)(void *context, const char *name, size_t size, int rank);
} rank_statements;

/* --- all rank files --- */

/* A box of a tensor, with the place of its elements in one rank's file. Its pointers belong to the arena. */
typedef struct rank_chunk {
    int rank;
    fsdp_source_chunk chunk;
} rank_chunk;

typedef struct rank_chunks {
    rank_chunk *items;
    size_t count, room;
    bool fails;                /* a rank's piece has another shape than this interpretation gives it */
} rank_chunks;

enum { RANK_ORDERED, RANK_LEFT_TO_RIGHT, RANK_READINGS };

/* The data of one rank under a name that is not distributed. */
typedef struct rank_item {
    int rank;
    bool is_same;              /* equal to the first item of the entry: other fields are unset */
    bool is_tensor;
    torch_tensor *tensor;      /* is_tensor; the item owns its data */
    fsdp_value value;
    fsdp_hash stored;          /* of an object, whose value is only its class: as it is stored; or zeros */
} rank_item;

typedef struct rank_entry {
    const char *name;
    size_t name_size;
    const int32_t *path;       /* how the first rank that has it nests it (name_path.h) */
    size_t path_count;
    size_t twin;               /* next entry of this name, when a file has it twice; 0: none */
    int last_rank;             /* last rank that has it */
    bool is_spread, is_hidden;
    fsdp_dtype dtype;          /* is_spread: of the whole tensor */
    int ndim;
    int64_t *shape;
    rank_chunks readings[RANK_READINGS];
    bool readings_differ;
    rank_item *items;          /* not is_spread */
    size_t item_count, item_room;
} rank_entry;

/* A rank's FlatParamShardMetadata. */
typedef struct rank_flat_param {
    const char *name;
    size_t name_size;
    int ndim;
    int64_t shape[FSDP_MAX_DIMS], strides[FSDP_MAX_DIMS];
    bool has_strides;          /* not contiguous: elements are ordered by the strides */
    int64_t count, first, last;    /* number of elements; the range of this rank, last included */
} rank_flat_param;

typedef struct rank_flat {
    int rank;
    const char *name;          /* the name under which it was found */
    size_t name_size;
    rank_flat_param *params;
    size_t param_count;
} rank_flat;

/* Two parameters with the same elements: one is in the flat tensor, the other a name of it. */
typedef struct rank_tie {
    size_t entry, other;       /* numbers of entries */
} rank_tie;

/* Membership of a rank in a mesh. */
typedef struct rank_member {
    int rank;
    size_t mesh;
} rank_member;

/* The numbers of params.json by which Meta's parts are joined. */
typedef struct rank_parts {
    int64_t count;             /* of files; 0: the files are not such parts */
    int64_t dim, queries, keys, width; /* of the model, rows of all queries, of all keys, of a head */
} rank_parts;

typedef struct rank_files {
    fsdp_source *source;
    torch_memory *memory;
    const char *where;         /* the pattern, for messages */
    const rank_group *group;
    const char *key;           /* above all names; NULL: none */
    const rank_statements *statements; /* NULL: the files alone say where parts belong */
    fsdp_status (*take)(void *set, const torch_item *found, torch_tensor *tensor, fsdp_error *err);
                               /* a tensor that is not distributed; NULL: rank_files_tensor */
    const char *const *expected;       /* with statements: per rank, the path of its file */
    fsdp_arena arena;
    int rank;                  /* the rank whose file is being read */
    int64_t world;             /* number of ranks that wrote, as far as known */
    int64_t work;              /* steps so far, which a hostile file could multiply */
    int64_t bytes, compared;   /* bytes of files so far; bytes of compared tensors */
    rank_parts parts;
    fsdp_facts facts;          /* that all files must state alike */
    const char *path;          /* of the file that is being read */
    bool is_placed;            /* the current rank is known to be one of all (ShardedTensor) */

    rank_entry *entries;       /* entries[0] is not used */
    size_t entry_count, entry_room;
    fsdp_name_table names;

    rank_mesh *meshes;         /* without duplicates */
    size_t mesh_count, mesh_room;
    rank_member *members;
    size_t member_count, member_room;
    struct seen_mesh {
        fsdp_node node;        /* of the current file; 0: it is stated */
        const rank_mesh *stated;
        size_t mesh;
        rank_position position;
    } *seen;
    size_t seen_count, seen_room;   /* meshes of the current file */

    rank_flat *flats;
    size_t flat_count, flat_room;
    rank_tie *ties;
    size_t tie_count, tie_room;
    size_t unknown;            /* an entry without a shape that may be in a flat tensor; 0: none */
} rank_files;

/* Counts steps. FSDP_ERR_LIMIT when the files need more of them than any checkpoint does. */
fsdp_status rank_files_spend(rank_files *set, size_t steps, fsdp_error *err);
/* Finds or makes the entry of a name for the current rank. */
fsdp_status rank_files_entry(rank_files *set, const char *name, size_t name_size, rank_entry **entry_out,
                           fsdp_error *err);
/* Makes an entry that no name leads to. Entries may move. */
fsdp_status rank_files_new_entry(rank_files *set, const char *name, size_t name_size, size_t *number_out,
                               fsdp_error *err);
/* Copies the chunk into the arena. */
fsdp_status rank_files_add_chunk(rank_files *set, rank_chunks *chunks, int rank, int ndim,
                               const fsdp_source_chunk *chunk, fsdp_error *err);
/* Sets dtype and shape of a whole tensor from its first rank; other ranks must have the same. */
fsdp_status rank_files_spread(rank_files *set, rank_entry *entry, fsdp_dtype dtype, int ndim,
                            const int64_t *shape, fsdp_error *err);

/* --- ranks_dist.c, ranks.c, ranks_flat.c: of a torch_visitor, whose context is the rank_files --- */

fsdp_status rank_files_distributed(void *context, const torch_item *found, const torch_wrapper *wrapper,
                                   fsdp_error *err);
fsdp_status rank_files_tensor(void *context, const torch_item *found, torch_tensor *tensor, fsdp_error *err);
fsdp_status rank_files_value(void *context, const torch_item *found, fsdp_value *value, fsdp_error *err);
fsdp_status rank_files_object(void *context, const torch_item *found, bool *taken_out, fsdp_error *err);

/* --- ranks_dist.c --- */

/* Compares a tensor that is not distributed in the file with the statement about it, if there is one, and
 * places it when it is a part; *taken_out false: it is whole. */
fsdp_status rank_files_place_stated(rank_files *set, const torch_item *found, const torch_tensor *tensor,
                                    bool *taken_out, fsdp_error *err);

/* --- ranks_read.c --- */

/* A source of rank files, in this order: create; read each file; merge, after all files; ties, after all sets
 * of the source. Release frees the set in any case. */
fsdp_status rank_files_create(const fsdp_probe *probe, const char *format, rank_files *set, fsdp_error *err);
/* Reads the file of a rank: a torch.save file. beneath: as in fsdp_source_add_file. */
fsdp_status rank_files_read(rank_files *set, const char *directory, const rank_file *of, bool beneath,
                            fsdp_error *err);
/* Adds a file that the caller reads; set->rank, set->path and *file_out are of it then. */
fsdp_status rank_files_begin(rank_files *set, const char *directory, const rank_file *of, bool beneath,
                             int *file_out, fsdp_error *err);
fsdp_status rank_files_merge(rank_files *set, const fsdp_source_model *model, fsdp_error *err);
fsdp_status rank_files_add_ties(rank_files *set, fsdp_error *err);
void rank_files_release(rank_files *set);

/* Counts the bytes of a tensor that are compared, at most `most`: many views of one small storage would cost
 * much. */
fsdp_status rank_files_count_compared(rank_files *set, const torch_tensor *tensor, int64_t most,
                                      fsdp_error *err);

/* --- ranks_flat.c --- */

/* Makes entries of the parameters inside flat ones, and hides the flat ones and their pieces. Pieces that
 * have names and no shapes get those of the model; NULL: none. */
fsdp_status rank_files_take_apart(rank_files *set, const fsdp_source_model *model, fsdp_error *err);

#endif
