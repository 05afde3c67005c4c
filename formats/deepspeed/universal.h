/*
 * Writes a universal checkpoint of DeepSpeed, from which a run goes on at any ZeRO stage and number of ranks:
 * see target.h. deepspeed_universal.c reads it back.
 *
 *   latest_universal                                       the name of the folder: "universal"
 *   universal/zero/NAME/fp32.pt                            {"param": the weights}, for every parameter
 *   universal/zero/NAME/KEY.pt, step.pt                    {"param": a moment}; the step alone
 *   universal/zero/optimizer_state.pt                      hyper-parameters of the groups
 *   universal/mp_rank_00_model_states.pt                   what stages 1 and 2 ask for: counts, shapes by
 *                                                          group, buffers, and all other entries
 *   universal/zero_pp_rank_0_mp_rank_00_model_states.pt    the same without tensors, for stage 3
 *
 *   universal_plan.c     the file and the member of it that every entry becomes
 *   universal_params.c   the parameters by all their names
 *   universal_members.c  files and members of a plan
 *   universal_write.c    each file by the writer of torch.save files, opened when its first piece comes
 *
 * In: entries under the names NAME (a weight), optim.state.NAME.KEY and optim.param_groups.N.KEY. An entry
 * that is none of these is a member of the model file by its name, which DeepSpeed hands to the program as
 * client state.
 */
#ifndef FSDP_UNIVERSAL_H
#define FSDP_UNIVERSAL_H

#include "formats/target.h"

#include "base/core/mem.h"
#include "base/data/name_table.h"

#include <stdatomic.h>

#define UNIVERSAL_FOLDER "universal"
#define UNIVERSAL_ZERO UNIVERSAL_FOLDER "/zero"
#define UNIVERSAL_POINTER "latest_universal"

/* Files that are there once, by their numbers. Files of parameters follow them. */
enum { UNIVERSAL_MODEL, UNIVERSAL_MODEL_OF_STAGE_3, UNIVERSAL_OPTIM, UNIVERSAL_PARAMS };

typedef struct universal_file {
    const char *name;          /* below the directory */
    fsdp_target_entry *entries;
    size_t count, room;
    fsdp_target *target;       /* NULL: not begun, or finished */
    _Atomic int64_t left;      /* bytes of tensors that were not written yet */
} universal_file;

/* The place of a tensor. */
typedef struct universal_slot { size_t file, entry; } universal_slot;

typedef struct universal_plan {
    universal_file *files;
    size_t file_count, file_room;
    const char **folders;      /* of parameters, below the directory */
    size_t folder_count, folder_room;
    universal_slot *slots;     /* per entry of the target; unset for values and further names of a tensor */
    size_t *first;             /* per entry: the first name of its tensor in the model, or the entry itself */
    size_t step;               /* the entry that optimizer_state.pt has, too, counted from 1; 0: none */
    universal_slot step_again; /* its second place */
    struct universal_value *values;    /* that the plan made */
    fsdp_arena arena;
} universal_plan;

/* FSDP_ERR_USAGE: DeepSpeed could not go on from these entries; the text says why, and what to do. Release
 * the plan in any case. */
FSDP_CHECKED fsdp_status universal_plan_make(const fsdp_target_opts *opts, universal_plan *plan_out,
                                             fsdp_error *err);
void universal_plan_release(universal_plan *plan);

/* --- universal_members.c ---------------------------------------------------------------------------- */

/* A key of a dict, or a position in a list. */
typedef enum universal_key_kind {
    UNIVERSAL_KEY_TEXT, UNIVERSAL_KEY_POSITION, UNIVERSAL_KEY_NUMBER
} universal_key_kind;

typedef struct universal_key {
    const char *text;
    size_t size;
    universal_key_kind kind;
} universal_key;

universal_key universal_text_key(const char *text);
fsdp_status universal_fail_memory(fsdp_error *err);
/* A null value that the plan owns; NULL without memory. */
fsdp_value *universal_new_value(universal_plan *plan);
/* The plan borrows the name, which may be NULL for a lack of memory. */
fsdp_status universal_add_file(universal_plan *plan, const char *name, size_t *number_out, fsdp_error *err);
/* Names a member by the keys of the dicts and lists around it, outermost first. */
fsdp_status universal_name_member(universal_plan *plan, fsdp_target_entry *member, const universal_key *keys,
                                  size_t count, fsdp_error *err);
/* slot_out may be NULL. */
fsdp_status universal_add_member(universal_plan *plan, size_t file, const fsdp_target_entry *member,
                                 universal_slot *slot_out, fsdp_error *err);
/* Adds a member of the outermost dict. */
fsdp_status universal_add_named(universal_plan *plan, size_t file, fsdp_target_entry member,
                                universal_key name, universal_slot *slot_out, fsdp_error *err);

/* --- universal_params.c ------------------------------------------------------------------------------ */

/* Floating tensors of the model. Tied ones are one parameter. */
typedef struct universal_params {
    const fsdp_target_opts *opts;
    const size_t *first;       /* of the plan */
    fsdp_name_table table;     /* all names -> their entry */
    size_t *shown;             /* per first entry: the entry whose name its folder has */
} universal_params;

bool universal_is_param(const fsdp_target_entry *entry);
/* Sets plan->first. Release params in any case. */
fsdp_status universal_params_find(const fsdp_target_opts *opts, universal_plan *plan,
                                  universal_params *params, fsdp_error *err);
void universal_params_release(universal_params *params);
/* The entry whose name the folder of a tensor of the model has. */
const fsdp_target_entry *universal_param_shown(const universal_params *params,
                                               const fsdp_target_entry *entry);
/* The entry that universal_param_shown gives for this name; NULL: there is no such parameter. */
const fsdp_target_entry *universal_param_named(const universal_params *params, const char *name, size_t size);
/* The entry NAME of "optim.state.NAME.KEY", and the key; NULL: it is none of a parameter. */
const fsdp_target_entry *universal_param_of_state(const universal_params *params,
                                                  const fsdp_target_entry *state, universal_key *key_out);

#endif
