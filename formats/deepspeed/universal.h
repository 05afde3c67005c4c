/*
 * Writes a universal checkpoint of DeepSpeed, from which a run resumes at any ZeRO stage and number of ranks:
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
 *   universal_plan.c     the parameters by all their names, the file and the member of it that every entry
 *                        becomes
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

/* FSDP_ERR_USAGE: DeepSpeed could not resume from these entries; the text says why, and what to do. Release
 * the plan in any case. */
FSDP_CHECKED fsdp_status universal_plan_make(const fsdp_target_opts *opts, universal_plan *plan_out,
                                             fsdp_error *err);
void universal_plan_release(universal_plan *plan);

#endif
