/*
 * Room map: the same model under the names of two frameworks. A map is a text of rules; each rule says how
 * tensors on its left become tensors on its right, and holds in both directions. docs/maps.md describes the
 * language.
 *
 * In: a map (a file, or a built-in one by name) and an opened checkpoint. Out: the checkpoint under the names
 * of the other side, whose tensors are computed while they are read (derive/).
 *
 *   map_file.c     text -> rules, for further names too: frames, single rows, a key above the model
 *   map_size.c     sizes: expressions over numbers of the checkpoint and of config.json
 *   map_apply.c    names -> bindings of the variables, rule by rule; the steps of a rule -> derived tensors
 *   map_choice.c   the map of a conversion: the user's, a built-in one (texts in builtin/), or "hub",
 *                  whose rules are those of the model's class, in hub_names.txt; and of an opened
 *                  checkpoint; a config.json for a source without one
 *   map_gguf.c     the key-value pairs of a GGUF file; map_megatron.c: the objects of a Megatron checkpoint
 *
 * Local; one thread. Callers: convert, and tools through fsdp_checkpoint_map.
 */
#ifndef FSDP_MAP_H
#define FSDP_MAP_H

#include "formats/target.h"
#include "statedict/derive/derived_checkpoint.h"
#include "statedict/gguf_model/gguf_values.h"
#include "statedict/models/config.h"
#include <fsdp/convert.h>

enum { MAP_VARIABLES = 10, MAP_NAMES = 16, MAP_STEPS = 16, MAP_PIECES = 16, MAP_SIZES = 64 };

typedef struct fsdp_map fsdp_map;

/* --- map_file.c --- */

/* Reads a map. FSDP_ERR_USAGE names the line that is wrong. */
fsdp_status fsdp_map_parse(const char *text, size_t size, const char *path, fsdp_map **map_out,
                           fsdp_error *err);
/* Every name of its rules gets the key before it: "model.", which must not have '{' or '*'. */
fsdp_status fsdp_map_put_below(fsdp_map *map, const char *key, size_t size, fsdp_error *err);
void fsdp_map_free(fsdp_map *map);     /* accepts NULL */
const char *fsdp_map_layout(const fsdp_map *map, bool right);

/* --- map_apply.c --- */

/* A map is applied with these, besides the checkpoint. Zero-initialise. */
typedef struct fsdp_map_call {
    const fsdp_config_file *config;    /* for sizes; NULL: none */
    const char *const *given;  /* "NAME=NUMBER", sizes of the user, which come first */
    size_t given_count;
    bool keeps_tied;           /* also names that a side lacks where they are tied */
    /* True when a tensor that no rule takes may stay as it is. NULL: never. */
    bool (*may_stay)(void *context, const fsdp_entry *entry);
    void *context;
} fsdp_map_call;

/*
 * Replaces the checkpoint by one under the names of the other side; it is closed and NULL after a failure.
 * FSDP_ERR_USAGE names a tensor that no rule takes, one that a rule lacks, or a size that is not known.
 */
fsdp_status fsdp_map_apply(const fsdp_map *map, bool from_right, const fsdp_map_call *call,
                           fsdp_checkpoint **checkpoint, fsdp_error *err);

/* --- map_choice.c --- */

/* A built-in map, whose sides are known before its text is read. */
typedef struct fsdp_builtin_map {
    const char *name;
    const char *layouts[2];    /* of the left and of the right side */
    const char *types;         /* "llama mistral", whose descriptions name the map; "": any */
    const char *text;
} fsdp_builtin_map;

/* True when the type of a model of transformers is one of the types ("llama mistral"), or these are none
 * (""); and whether the map is for it. */
bool fsdp_map_types_have(const char *types, const char *model_type);
bool fsdp_map_is_for(const fsdp_map *map, const char *model_type);

/* True for "optim.state.NAME.exp_avg" that no rule takes, of a NAME that one does; root_size: bytes of the
 * key that fsdp_map_put_below has put before it. */
bool fsdp_map_takes_moment(const fsdp_map *map, bool from_right, const fsdp_entry *entry, size_t root_size);

/* NULL behind the last. */
const fsdp_builtin_map *fsdp_map_builtin_at(size_t i);
fsdp_status fsdp_map_builtin(const char *name, fsdp_map **map_out, fsdp_error *err);

typedef struct fsdp_map_request {
    fsdp_io *io;
    const fsdp_convert_opts *opts;     /* map, sizes, select */
    const fsdp_config_file *config;    /* of the model; NULL: none */
    const fsdp_format *target;
    bool keeps_rest;           /* tensors that no rule takes stay as they are */
    /* Sees the checkpoint before a map takes it away from the names of transformers, which may all be below
     * a further one ("model."; NULL: not). NULL: nobody does. */
    fsdp_status (*see_model)(void *context, const struct fsdp_map_request *request,
                             fsdp_checkpoint *checkpoint, const char *below, fsdp_error *err);
    void *context;
} fsdp_map_request;

/* A map and its sides, "" without one. */
typedef struct fsdp_map_sides {
    char name[64], from[32], to[32];
    bool needs_pairs;          /* it led to GGUF: fsdp_map_add_gguf_pairs is next */
    bool is_used;              /* false: its names fit, and no config.json says that the model does */
} fsdp_map_sides;

/* Replaces the checkpoint, as fsdp_map_apply does, if the user names a map, or if a built-in one takes it to
 * the layout of the target and is for the model_type of config.json. */
fsdp_status fsdp_map_rename(const fsdp_map_request *request, fsdp_checkpoint **checkpoint,
                            fsdp_map_sides *sides_out, fsdp_error *err);

/*
 * Makes a config.json of the pairs of GGUF, or of the params.json beside a Llama of Meta where the
 * user asks for transformers' names. There is none when none is needed or can be made. FSDP_ERR_USAGE:
 * numbers are missing that only the model's own config.json has.
 */
fsdp_status fsdp_map_make_config(const fsdp_map_request *request, const fsdp_checkpoint *checkpoint,
                                 fsdp_config_file *config_out, fsdp_error *err);

/* --- map_gguf.c --- */

/* Adds behind all entries the pairs of general.*, of the model's numbers and of its tokenizer, from the
 * directory of its config.json; dtype: that of the result's matrices, or NONE. The checkpoint is replaced, or
 * closed as above. */
fsdp_status fsdp_map_add_gguf_pairs(const fsdp_map_request *request, fsdp_dtype dtype,
                                    fsdp_checkpoint **checkpoint, fsdp_gguf_found *tokenizer_out,
                                    fsdp_error *err);

/* --- map_megatron.c --- */

/* Adds what Megatron-Core's loader asks for besides tensors. The checkpoint is replaced, or closed as
 * above. */
fsdp_status fsdp_map_add_megatron_objects(fsdp_checkpoint **checkpoint, fsdp_error *err);

#endif
