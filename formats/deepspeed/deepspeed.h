/*
 * Room deepspeed: checkpoints of DeepSpeed's engine, and its universal checkpoints.
 *
 * In: the directory of one tag, whose pickles may be hostile. Out: the catalog of a source (source.h): the
 * f32 masters under the names of their parameters, optim.state.NAME.MOMENT, frozen weights, buffers, values.
 *
 *   names -> deepspeed_read.c      bid, open, the files of a tag, and the order in which they are read;
 *                                  universal checkpoints: one folder per parameter
 *         -> deepspeed_model.c     model files: shapes, frozen weights, buffers, tied names, values
 *         -> deepspeed_optim.c     optimizer files: the flat masters and moments of one rank, and
 *                                  the global names of experts that a rank numbers from 0
 *         -> deepspeed_flat.c      flat tensors, split into boxes of the parameters in them, compared with
 *                                  the weights of the module and with those of other ranks
 *         -> deepspeed_plain.c     stage 0: which parameter of the model a state of the optimizer belongs to
 *         -> deepspeed_resume.c    steps and hyper-parameters as PyTorch names them
 *   universal_write.c is the way back: it writes universal checkpoints.
 *   deepspeed.c reads members of dicts and values for all of them, compares what several files say, and adds
 *   tensors of the model.
 *
 * A flat tensor holds the parameters of a group one after the other, in the order of param_shapes.
 *   Stages 1 and 2: the flat tensors of all ranks, one after the other, are the group.
 *   Stage 3: every rank has its part of every parameter: ceil(elements / ranks) of them, the last ones
 *   padded.
 * Parameters are declared as boxes in the files and never loaded. A pickle is freed before the next file is
 * opened. Only the table of formats in detect refers to this room. It calls torch and source.
 */
#ifndef FSDP_DEEPSPEED_H
#define FSDP_DEEPSPEED_H

#include "base/data/name_table.h"
#include "formats/source/source_facts.h"
#include "formats/torch/torch_internal.h"

/* --- the files of a tag --------------------------------------------------------------------------- */

typedef enum ds_file_kind {
    DS_FILE_MODEL,             /* of one rank (stage 3), or of a model-parallel part */
    DS_FILE_OPTIM,
    DS_FILE_LAYER,             /* pipeline: the weights of one layer */
    DS_FILE_EXPERT,            /* the weights of one expert */
    DS_FILE_EXPERT_OPTIM,
    DS_FILE_KINDS
} ds_file_kind;

typedef struct ds_file {
    const char *name;          /* borrowed */
    ds_file_kind kind;
    int part;                  /* model-parallel rank: a stage of a pipeline */
    int rank;                  /* data-parallel rank; -1: the file is of all of them */
    int layer;                 /* DS_FILE_LAYER */
} ds_file;

typedef struct ds_files {
    ds_file *items;            /* sorted by kind, part, layer, rank */
    size_t count, room;
} ds_files;

/* --- the set ---------------------------------------------------------------------------------------- */

/* The tensors that a parameter has: number 0 is the master, the others are moments. */
enum { DS_KINDS = 8, DS_MASTER = 0 };

typedef struct ds_param {
    const char *name;
    size_t name_size;
    int ndim;
    int64_t *shape;
    int64_t count, gap;        /* elements, and padding after them in the flat tensor */
    bool is_copy;              /* an earlier part of the pipeline has it, too */
    bool has_step;             /* a step of its own, in universal checkpoints */
    float step;
    const torch_tensor *weight;    /* the module's, rounded; NULL: it has none */
    size_t tensors[DS_KINDS];  /* number in the source plus 1; 0: none yet */
} ds_param;

/* The progress through the flat tensors of one kind. */
typedef struct ds_cursor {
    size_t param;
    int64_t done;              /* elements of its segment */
    int64_t excess;            /* elements after the last parameter */
    bool is_used;
} ds_cursor;

/* The parameters that share flat tensors, in their order. */
typedef struct ds_lane {
    ds_param *params;
    size_t count;
    ds_cursor cursors[DS_KINDS];
} ds_lane;

/* A parameter group. Experts have a lane for each expert-parallel rank; other groups have one. */
typedef struct ds_group {
    ds_lane *lanes;
    size_t lane_count;
} ds_group;

typedef struct ds_tied {
    const char *name, *stored;
    size_t name_size, stored_size;
} ds_tied;

/* A tensor that is read as f32 while an inner tensor has its elements as they are stored. */
typedef struct ds_widened {
    size_t tensor, stored;
} ds_widened;

/* A parameter of the optimizer, and the number of its state: of its group, sub-group or itself. */
typedef struct ds_owner {
    const char *name;
    size_t name_size, slot, order;
    bool has_state;
    bool has_step;             /* of its own, which counts more than that of its group */
    float step;
} ds_owner;

typedef struct ds_set {
    fsdp_io *io;
    fsdp_source *source;
    torch_memory *memory;
    const char *directory;
    ds_files files;
    fsdp_arena arena;
    int part, rank, layer;     /* of the file that is being read */
    int64_t world;             /* ranks of the part */
    bool is_split;             /* stage 3: every rank has a part of every parameter */
    bool is_plain;             /* stage 0: the model file was all of it */
    ds_group *groups;          /* of the part; stage 3: one */
    size_t group_count;
    const char *kinds[DS_KINDS];    /* names of moments */
    size_t kind_count;
    ds_param *frozen;
    size_t frozen_count;
    fsdp_name_table tensors;   /* names of the model -> number in the source */
    fsdp_name_table buffers;   /* names of buffers -> 0; 1: found */
    ds_param *param;           /* universal: of the file that is being read, as kind and step */
    int kind;
    fsdp_value step;
    ds_tied *tied;
    size_t tied_count, tied_room;
    ds_widened *widened;
    size_t widened_count, widened_room;
    bool is_as_stored;         /* nothing is derived: the rest is not used */
    size_t *ends;              /* stage 3: of each sub-group, after its last parameter */
    ds_owner *owners;
    size_t owner_count, owner_room;
    size_t named_bytes;        /* of the names in groups */
    fsdp_value steps;          /* a list by the number of a state, null without one */
    fsdp_value param_groups;
    fsdp_facts facts;          /* that all files must state alike */
    bool is_chosen;            /* the person named the format: the optimizer was restarted on purpose */
    const char *model_file;    /* the first; NULL: not read yet */
    int64_t global_steps, skipped_steps;   /* of that file; -1: not stated */
    int64_t tensor_ranks;      /* of that file: ranks of tensor parallelism, 1 without */
    int64_t data_ranks;        /* of that file: ranks of data parallelism, 0: not stated */
    fsdp_name_table outside;   /* weights in files of their own -> number in weights */
    torch_tensor **weights;
    size_t weight_count, weight_room;
    bool is_universal;
    bool is_vocabulary;        /* universal: the file that is being read lost the padding of its rows */
    fsdp_name_table module;    /* universal: names in the modules */
    fsdp_text print;           /* hashes of the flat tensors of the file that is being read */
    bool print_tells;          /* they are not of constants alone */
    fsdp_name_table prints;    /* hash of a file's print -> number of the file */
} ds_set;

/* --- deepspeed.c: tensors -------------------------------------------------------------------------- */

typedef fsdp_status ds_reader(ds_set *set, torch_archive *archive, fsdp_error *err);
/* The number of a moment's name, which is new or known. FSDP_ERR_LIMIT: there are too many. */
fsdp_status ds_kind(ds_set *set, const char *name, size_t size, int *kind_out, fsdp_error *err);
/* Adds a tensor of the model as it is stored. */
fsdp_status ds_add_model_tensor(ds_set *set, torch_archive *archive, const char *name, size_t size,
                                torch_tensor *tensor, fsdp_error *err);
/* Adds a buffer, with floats as f32. */
fsdp_status ds_add_buffer(ds_set *set, torch_archive *archive, const char *name, size_t size,
                          torch_tensor *tensor, fsdp_error *err);
/* The place of a tensor, by which its other names are found. */
typedef struct ds_tensor_place {
    int64_t file, stream, offset, ndim, dtype;
    int64_t shape[FSDP_MAX_DIMS], strides[FSDP_MAX_DIMS];
} ds_tensor_place;
/* The place lies in the arena of the set. */
fsdp_status ds_tensor_place_of(ds_set *set, const torch_tensor *tensor, const ds_tensor_place **place_out,
                               fsdp_error *err);
/* Notes a further name of a tensor, which is added after all tensors. */
fsdp_status ds_note_tied(ds_set *set, const ds_tied *tied, fsdp_error *err);

/* --- deepspeed.c: members and values --------------------------------------------------------------- */

/* The path of the file, for messages. */
static inline const char *ds_path(const ds_set *set, const torch_archive *archive)
{
    return fsdp_source_file_path(set->source, (size_t)archive->file);
}

/* Members of a model file that are not values of the program; NULL ends the list. */
extern const char *const ds_model_members[];

/* The members of any dict: key, value, key, value, ... */
typedef struct ds_members {
    const fsdp_node *items;
    size_t count;              /* of both */
} ds_members;

ds_members ds_members_of(const torch_archive *archive, fsdp_node dict);
/* The member of a text key; 0 without one, or when dict is none. */
fsdp_node ds_member(const torch_archive *archive, fsdp_node dict, const char *key);
/* The items of a list or tuple. */
ds_members ds_items_of(const torch_archive *archive, fsdp_node list);
/* A text key; NULL for another key. */
const char *ds_text(const torch_archive *archive, fsdp_node node, size_t *size_out);

fsdp_status ds_bad(const torch_archive *archive, const char *why, fsdp_error *err);
/* A plain tensor. FSDP_ERR_DAMAGED "... WHAT is not a plain tensor". */
fsdp_status ds_read_tensor(const torch_archive *archive, fsdp_node node, const char *what,
                           torch_tensor *tensor_out, fsdp_error *err);
/* Adds the members of a dict as values "PREFIX.KEY", except those of the list, which ends with NULL. */
fsdp_status ds_add_values(ds_set *set, torch_archive *archive, fsdp_node dict, const char *prefix,
                          const char *const *but, fsdp_error *err);
/* Notes what these members of a dict say, which all files must state alike. NULL ends the list. */
fsdp_status ds_note_facts(ds_set *set, torch_archive *archive, fsdp_node dict, const char *const *names,
                          fsdp_error *err);
/* Reads a step: a number, or a tensor of one. */
fsdp_status ds_read_step(torch_archive *archive, fsdp_node node, fsdp_value *value_out, fsdp_error *err);
/* Adds the value optimizer_state.step: a list of the states' steps. Nothing where no state has one. */
fsdp_status ds_add_steps(ds_set *set, torch_archive *archive, const fsdp_node *states, size_t count,
                         fsdp_error *err);
fsdp_status ds_add_step_list(ds_set *set, fsdp_value *steps, fsdp_error *err);
/* The dict {state, param_groups} in that of a wrapped optimizer; 0: none. */
fsdp_node ds_base_state(const torch_archive *archive, fsdp_node optim);
/* Adds optimizer_state.KEY and optimizer_state.param_groups of an optimizer's dict. */
fsdp_status ds_add_optim_values(ds_set *set, torch_archive *archive, fsdp_node optim, fsdp_error *err);

/* --- deepspeed_model.c -------------------------------------------------------------------------------- */

/* Reads the first model file of a part; in stage 3 that of another rank. The first part has the values. */
ds_reader ds_read_model, ds_read_other_model;
/* Notes the weights in the file of a layer or an expert, with which the masters are compared. */
ds_reader ds_note_weights;
/* Reads the buffers in a layer's file. */
ds_reader ds_read_layer;

/* --- deepspeed_optim.c --------------------------------------------------------------------------------- */

ds_reader ds_read_optim;

/* Splits the moments of a state, which are as long as the master. */
fsdp_status ds_read_moments(ds_set *set, const torch_archive *archive, fsdp_node state, ds_lane *lane,
                            const torch_tensor *master, fsdp_error *err);

/* --- deepspeed_flat.c ---------------------------------------------------------------------------------- */

/* Makes the lanes of a group of these parameters. */
fsdp_status ds_group_begin(ds_set *set, ds_group *group, ds_param *params, size_t count, fsdp_error *err);
/* The tensor of a parameter in the source; declares it at its first use. */
fsdp_status ds_param_tensor(ds_set *set, ds_param *param, int kind, fsdp_dtype dtype, size_t *tensor_out,
                            fsdp_error *err);
/* Places elements [first, first + count) of a parameter at element `at` of a 1-D tensor. */
typedef struct ds_run { int64_t first, at, count; } ds_run;
fsdp_status ds_place(ds_set *set, ds_param *param, int kind, const torch_tensor *flat, const ds_run *run,
                     fsdp_error *err);
/* Splits a flat tensor, from where the last one of its kind ended. */
fsdp_status ds_split(ds_set *set, ds_lane *lane, int kind, const torch_tensor *flat, fsdp_error *err);
/* Checks that all parameters got all of their elements. Stage 3: after each rank; else after the last. */
fsdp_status ds_split_end(ds_set *set, fsdp_error *err);

/* True in *does_out when the first elements of a run of a flat master, rounded, are those of the weight. */
fsdp_status ds_rounds_to(const ds_set *set, const torch_tensor *master, const ds_run *run,
                         const torch_tensor *weight, bool *does_out, fsdp_error *err);
/* Adds a flat tensor to the print of the file that is being read; tells: no two ranks have it by chance. */
fsdp_status ds_print_add(ds_set *set, const torch_tensor *tensor, bool tells, fsdp_error *err);
/* Ends the print: FSDP_ERR_DAMAGED when another file has the same one. */
fsdp_status ds_print_end(ds_set *set, const char *what, const torch_archive *archive, fsdp_error *err);

/* --- deepspeed_resume.c -------------------------------------------------------------------------------- */

/* Notes the parameter of a state, or those of all groups of the part. */
fsdp_status ds_note_owner(ds_set *set, size_t slot, const ds_param *param, fsdp_error *err);
fsdp_status ds_note_owners(ds_set *set, fsdp_error *err);
bool ds_is_number(const fsdp_value *value, float *number_out);
/* Adds optim.state.NAME.step and optim.param_groups.N.KEY with names of parameters. */
fsdp_status ds_add_resume(ds_set *set, fsdp_error *err);

/* --- deepspeed_plain.c --------------------------------------------------------------------------------- */

/* Stage 0: model and optimizer are whole in one file. */
ds_reader ds_read_plain;

#endif
