/*
 * Parameters: declared by name, dtype and shape (model.c), cut over the ranks of a mesh (param_layout.c),
 * found by names that users type (nearest_name.c).
 *
 * In: declarations from the public calls of model.h; from runtime/group, a mesh and the roles of its dims.
 * Out: struct fsdp_param, which every room above reads and fills. Its layout, boxes and sizes are computed
 * here; runtime/group gives it data and reduced gradients, runtime/step gives callers the pointers.
 * Callers: all rooms above. The room itself knows ranks and meshes, but neither memory nor communication:
 * units, groups and roots are only pointers that are NULL or not.
 */
#ifndef FSDP_PARAM_H
#define FSDP_PARAM_H

#include <fsdp/model.h>

typedef struct fsdp_block fsdp_block;
typedef struct fsdp_group fsdp_group;
typedef struct fsdp_root fsdp_root;
typedef struct fsdp_unit fsdp_unit;

enum { FSDP_PARAM_DIMS = 8, FSDP_MAX_EXTENSION_INPUTS = 8 };

typedef struct fsdp_tensor_place {     /* tensor parallelism */
    char dim[FSDP_MAX_MESH_NAME + 1];
    fsdp_placement placement;
} fsdp_tensor_place;

struct fsdp_param {
    fsdp_model *model;
    char *name;
    char **aliases;
    size_t alias_count;
    fsdp_dtype dtype, data_dtype, grad_dtype;
    fsdp_dtype asked_grad_dtype;       /* NONE: as the data */
    int ndim;
    int64_t shape[FSDP_PARAM_DIMS];
    bool is_buffer, is_persistent, requires_grad;
    bool lacks_value;                  /* expected (root.c), and not set yet */
    fsdp_tensor_place places[FSDP_MAX_MESH_DIMS];
    int place_count;
    fsdp_extension *extension;         /* or NULL */
    fsdp_grad_hook hook;
    void *hook_context;
    fsdp_unit *unit;                   /* NULL: of none yet, or ignored */
    bool is_ignored;
    fsdp_unit *ignored_by;             /* the unit whose opts ignore it; NULL: the FSDP1 face does */
    fsdp_group *group;
    fsdp_param_place cut;

    /* This rank's part, since the root was made. */
    const fsdp_mesh *mesh;
    fsdp_layout layout;
    fsdp_box data_box, shard_box;      /* in the tensor */
    int64_t outer, n, rest;            /* of the data: dims before the one that is cut, it, those after it */
    int64_t chunk, rows;               /* rows of the cut dim per rank, and this rank's */
    int64_t padded;                    /* elements of a padded shard: outer * chunk * rest */
    void *shard;
    void *data;                        /* while gathered */
    fsdp_block *grad;                  /* of this backward */
    bool has_grad;
    bool had_grad;                     /* a gradient was asked for since the last report, with --check */
    bool was_reported;                 /* as one without a gradient */
    fsdp_block *kept;                  /* of earlier backwards, in kept_dtype: the dtype of its reduction */
    fsdp_dtype kept_dtype;
    void *shard_grad;                  /* in a block of the group */
    bool is_reduced;                   /* shard_grad is new: the hook was not called for it yet */

    /* A parameter that another one holds (wrap.h): which, and from which element on. */
    fsdp_param *flat;
    int64_t flat_at;
    void *summoned, *summoned_grad;    /* of one that holds others: whole, in the stored dtype; or NULL */
};

struct fsdp_model {
    int holders;                       /* roots and wraps, which free it, too; the last one ends it */
    fsdp_world *world;
    fsdp_param **params;
    size_t count, room;
    fsdp_unit **units;
    size_t unit_count, unit_room;
    void (*free_unit)(fsdp_unit *unit);        /* set with the first unit */
    fsdp_root *root;
};

fsdp_model *fsdp_model_hold(fsdp_model *model);        /* one more fsdp_model_free ends it */

/* True when the name is `prefix` or lies in the module `prefix`; "" contains every name. */
bool fsdp_name_is_below(const char *name, const char *prefix);
/* True when any of the parameter's names, aliases included, is below the prefix. */
bool fsdp_param_is_below(const fsdp_param *param, const char *prefix);

/* --- param_layout.c --------------------------------------------------------------------------- */

/* The dims of a mesh: at most one shards, at most one replicates, the others are tensor parallel. */
typedef struct fsdp_mesh_roles {
    const fsdp_mesh *mesh;
    int shard_dim, replicate_dim;      /* -1: none */
    unsigned tensor_dims;              /* as bits */
} fsdp_mesh_roles;

/* Computes layout, boxes and sizes. unit: its name, for errors. */
fsdp_status fsdp_param_lay_out(fsdp_param *param, const fsdp_mesh_roles *roles, const char *unit,
                               fsdp_error *err);
/* The number of elements of the data, of this rank's rows, and of the data with every shard padded. */
int64_t fsdp_param_count(const fsdp_param *param);
int64_t fsdp_param_local_count(const fsdp_param *param);
int64_t fsdp_param_padded_count(const fsdp_param *param, int parts);

/* This rank's part of a parameter that lies in a flat one: elements [first, first + count) of it, which begin
 * `at` elements after the beginning of the flat one's shard. */
typedef struct fsdp_flat_run {
    int64_t first, count, at;
} fsdp_flat_run;
fsdp_flat_run fsdp_param_flat_run(const fsdp_param *param);

#endif
