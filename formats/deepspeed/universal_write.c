/*
 * Writes a universal checkpoint of DeepSpeed, from which a run resumes at any ZeRO stage and number of ranks:
 * see target.h. deepspeed_read.c reads it back.
 *
 *   latest_universal                                       the name of the folder: "universal"
 *   universal/zero/NAME/fp32.pt                            {"param": the weights}, for every parameter
 *   universal/zero/NAME/KEY.pt, step.pt                    {"param": a moment}; the step alone
 *   universal/zero/optimizer_state.pt                      hyper-parameters of the groups
 *   universal/mp_rank_00_model_states.pt                   what stages 1 and 2 ask for: counts, shapes by
 *                                                          group, buffers, and all other entries
 *   universal/zero_pp_rank_0_mp_rank_00_model_states.pt    the same without tensors, for stage 3
 *
 * In: entries under the names NAME (a weight), optim.state.NAME.KEY and optim.param_groups.N.KEY. An entry
 * that is none of these is a member of the model file by its name, which DeepSpeed hands to the program as
 * client state.
 *
 * The plan has the parameters by all their names, the file that every entry goes to and its member there.
 * Each file is a target of the writer of torch.save files, created when its first piece comes and finished
 * with its last, so that few are open at a time.
 */
#include "formats/torch/torch_emit.h"
#include "base/core/mem.h"
#include "base/data/name_path.h"
#include "base/data/name_table.h"
#include "base/data/param_groups.h"
#include "base/io/io_dry.h"
#include "base/text.h"
#include "formats/deepspeed/deepspeed.h"
#include "formats/target.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define UNIVERSAL_FOLDER "universal"
#define UNIVERSAL_ZERO UNIVERSAL_FOLDER "/zero"
#define UNIVERSAL_POINTER "latest_universal"

/* Files that are there once, by their numbers. Files of parameters follow them. */
enum { UNIVERSAL_MODEL, UNIVERSAL_MODEL_OF_STAGE_3, UNIVERSAL_OPTIM, UNIVERSAL_PARAMS };

typedef struct universal_file {
    const char *name; /* below the directory */
    fsdp_target_entry *entries;
    size_t count, room;
    fsdp_target *target;  /* NULL: not begun, or finished */
    _Atomic int64_t left; /* bytes of tensors that were not written yet */
} universal_file;

/* The place of a tensor. */
typedef struct universal_slot {
    size_t file, entry;
} universal_slot;

typedef struct universal_plan {
    universal_file *files;
    size_t file_count, file_room;
    const char **folders; /* of parameters, below the directory */
    size_t folder_count, folder_room;
    universal_slot *slots; /* per entry; unset for values and further names of a tensor */
    size_t *first; /* per entry: the first name of its tensor in the model, or the entry itself */
    size_t step;   /* the entry that optimizer_state.pt has, too, counted from 1; 0: none */
    universal_slot step_again; /* its second place */
    struct plan_value *values; /* that the plan made */
    fsdp_arena arena;
} universal_plan;

/* === members of the plan ====================================================================== */

/* A key of a dict. */
typedef struct member_key {
    const char *text;
    size_t size;
    bool is_number;
} member_key;

typedef struct plan_value {
    fsdp_value value;
    struct plan_value *next;
} plan_value;

static fsdp_status fail_memory(fsdp_error *err)
{
    return fsdp_fail_memory(err, "a universal checkpoint");
}

/* A null value that the plan owns; NULL without memory. */
static fsdp_value *new_value(universal_plan *plan)
{
    plan_value *made = fsdp_arena_alloc(&plan->arena, 1, sizeof *made);
    if (!made)
        return NULL;
    made->next = plan->values;
    plan->values = made;
    return &made->value;
}

/* The plan borrows the name, which may be NULL for a lack of memory. */
static fsdp_status add_file(universal_plan *plan, const char *name, size_t *number_out,
                            fsdp_error *err)
{
    if (!name ||
        !fsdp_grow(&plan->files, &plan->file_room, plan->file_count + 1, sizeof *plan->files))
        return fail_memory(err);
    plan->files[plan->file_count] = (universal_file){.name = name};
    *number_out = plan->file_count++;
    return FSDP_OK;
}

/* slot_out may be NULL. */
static fsdp_status add_member(universal_plan *plan, size_t number, const fsdp_target_entry *member,
                              universal_slot *slot_out, fsdp_error *err)
{
    universal_file *file = &plan->files[number];
    if (!fsdp_grow(&file->entries, &file->room, file->count + 1, sizeof *file->entries))
        return fail_memory(err);
    if (slot_out)
        *slot_out = (universal_slot){number, file->count};
    file->entries[file->count++] = *member;
    return FSDP_OK;
}

/* --- names ------------------------------------------------------------------------------------ */

static member_key text_key(const char *text)
{
    return (member_key){text, strlen(text), false};
}

/* Names a member by the keys of the dicts around it, outermost first. */
static fsdp_status name_member(universal_plan *plan, fsdp_target_entry *member,
                               const member_key *keys, size_t count, fsdp_error *err)
{
    size_t size = count - 1, at = 0;
    for (size_t i = 0; i < count; i++)
        size += keys[i].size;
    char *name = fsdp_arena_alloc(&plan->arena, size + 1, 1);
    int32_t *path = fsdp_arena_alloc(&plan->arena, count, sizeof *path);
    if (!name || !path)
        return fail_memory(err);
    for (size_t i = 0; i < count; i++) {
        int32_t bytes = (int32_t)keys[i].size;
        if (i > 0)
            name[at++] = '.';
        if (bytes > 0)
            memcpy(name + at, keys[i].text, keys[i].size);
        at += keys[i].size;
        path[i] = keys[i].is_number ? bytes | FSDP_PATH_NUMBER : bytes;
    }
    member->name = name;
    member->name_size = size;
    member->path = path;
    member->path_count = count;
    return FSDP_OK;
}

/* Adds a member of the outermost dict. */
static fsdp_status add_named(universal_plan *plan, size_t file, fsdp_target_entry member,
                             member_key name, universal_slot *slot_out, fsdp_error *err)
{
    FSDP_TRY(name_member(plan, &member, &name, 1, err));
    return add_member(plan, file, &member, slot_out, err);
}

static void release_plan(universal_plan *plan)
{
    for (plan_value *made = plan->values; made; made = made->next)
        fsdp_value_release(&made->value);
    for (size_t f = 0; f < plan->file_count; f++)
        fsdp_free(plan->files[f].entries);
    fsdp_free(plan->files);
    fsdp_free(plan->folders);
    fsdp_arena_release(&plan->arena);
    *plan = (universal_plan){0};
}

/* === parameters =============================================================================== */

/*
 * The parameters of a universal checkpoint by all their names. Tied names are one parameter, whose folder has
 * the name under which the optimizer has its state.
 */

/* Floating tensors of the model. Tied ones are one parameter. */
typedef struct universal_params {
    const fsdp_target_opts *opts;
    const size_t *first;   /* of the plan */
    fsdp_name_table table; /* all names -> their entry */
    size_t *shown;         /* per first entry: the entry whose name its folder has */
} universal_params;

static const char state_prefix[] = "optim.state.";
enum { STATE_PREFIX = sizeof state_prefix - 1 };

static bool is_param(const fsdp_target_entry *entry)
{
    return entry->is_model && !entry->value && fsdp_dtype_describe(entry->dtype)->is_float;
}

/* The entry NAME of "optim.state.NAME.KEY", whichever of the tied ones that is, and the key; NULL: the state
 * does not belong to a parameter. */
static const fsdp_target_entry *param_of_state(const universal_params *params,
                                               const fsdp_target_entry *entry, member_key *key_out)
{
    const char *name = entry->name + STATE_PREFIX;
    if (entry->name_size <= STATE_PREFIX || memcmp(entry->name, state_prefix, STATE_PREFIX) != 0)
        return NULL;
    for (size_t size = entry->name_size - STATE_PREFIX; size-- > 0;) {
        const uint64_t *found =
            name[size] == '.' ? fsdp_name_table_find(&params->table, name, size) : NULL;
        if (!found)
            continue;
        *key_out = (member_key){name + size + 1, entry->name_size - STATE_PREFIX - size - 1, false};
        return &params->opts->entries[*found];
    }
    return NULL;
}

/* A program may have a tensor of the model under a name of its own, too, which is stored apart. */
static fsdp_status find_first(const fsdp_target_opts *opts, size_t *first, fsdp_error *err)
{
    size_t *known = fsdp_alloc(opts->entry_count, sizeof *known); /* counted from 1 */
    if (!known)
        return fail_memory(err);
    for (size_t i = 0; i < opts->entry_count; i++) {
        const fsdp_target_entry *entry = &opts->entries[i];
        size_t *name = &known[entry->same_as > 0 ? entry->same_as - 1 : i];
        bool is_tensor_of_model = entry->is_model && !entry->value;
        if (is_tensor_of_model && *name == 0)
            *name = i + 1;
        first[i] = is_tensor_of_model ? *name - 1 : i;
    }
    fsdp_free(known);
    return FSDP_OK;
}

static fsdp_status list_names(universal_params *params, fsdp_error *err)
{
    for (size_t i = 0; i < params->opts->entry_count; i++) {
        const fsdp_target_entry *entry = &params->opts->entries[i];
        params->shown[i] = i;
        if (is_param(entry) &&
            !fsdp_name_table_enter(&params->table, entry->name, entry->name_size, i))
            return fail_memory(err);
    }
    return FSDP_OK;
}

/* Sets plan->first. Release params in any case. */
static fsdp_status find_params(const fsdp_target_opts *opts, universal_plan *plan,
                               universal_params *params, fsdp_error *err)
{
    *params = (universal_params){.opts = opts};
    plan->first = fsdp_arena_alloc(&plan->arena, opts->entry_count, sizeof *plan->first);
    params->shown = fsdp_alloc(opts->entry_count, sizeof *params->shown);
    if (!plan->first || !params->shown)
        return fail_memory(err);
    params->first = plan->first;
    FSDP_TRY(find_first(opts, plan->first, err));
    FSDP_TRY(list_names(params, err));
    for (size_t i = opts->entry_count; i-- > 0;) { /* the first name that has a state stays */
        member_key key;
        const fsdp_target_entry *param = param_of_state(params, &opts->entries[i], &key);
        size_t number = param ? (size_t)(param - opts->entries) : 0;
        if (param)
            params->shown[params->first[number]] = number;
    }
    return FSDP_OK;
}

static void release_params(universal_params *params)
{
    fsdp_name_table_release(&params->table);
    fsdp_free(params->shown);
    *params = (universal_params){0};
}

/* The entry whose name the folder of a tensor of the model has. */
static const fsdp_target_entry *param_shown(const universal_params *params,
                                            const fsdp_target_entry *entry)
{
    size_t number = (size_t)(entry - params->opts->entries);
    return &params->opts->entries[params->shown[params->first[number]]];
}

/* The entry that param_shown gives for this name; NULL: there is no such parameter. */
static const fsdp_target_entry *param_named(const universal_params *params, const char *name,
                                            size_t size)
{
    const uint64_t *found = fsdp_name_table_find(&params->table, name, size);
    return found ? param_shown(params, &params->opts->entries[*found]) : NULL;
}

/* === the plan ================================================================================= */

static const char group_prefix[] = "optim.param_groups.";
enum { GROUP_PREFIX = sizeof group_prefix - 1, NAME_MOST = 255 };

typedef struct planning {
    const fsdp_target_opts *opts;
    universal_plan *plan;
    universal_params params;
    fsdp_name_table others; /* members of the model file by the names of their entries -> 0 */
    fsdp_param_groups groups;
    bool *has_state; /* per entry: a parameter with a moment */
    size_t stateful;
} planning;

/* --- what the plan makes ---------------------------------------------------------------------- */

static fsdp_status refuse(const fsdp_target_entry *entry, const char *why, fsdp_error *err)
{
    return torch_blame_entry(entry, fsdp_fail(err, FSDP_ERR_USAGE, "%s", why), err);
}

static fsdp_target_entry value_member(const fsdp_value *value)
{
    return (fsdp_target_entry){.value = value};
}

static fsdp_target_entry tensor_member(const fsdp_target_entry *entry)
{
    return (fsdp_target_entry){.dtype = entry->dtype, .ndim = entry->ndim, .shape = entry->shape};
}

static bool begins(const fsdp_target_entry *entry, const char *prefix, size_t size)
{
    return entry->name_size > size && memcmp(entry->name, prefix, size) == 0;
}

/* --- weights and buffers ---------------------------------------------------------------------- */

/* DeepSpeed finds a parameter by a folder of its name. */
static bool may_be_folder(const char *name, size_t size)
{
    return size > 0 && size <= NAME_MOST && !memchr(name, '/', size) && !memchr(name, '\0', size) &&
           !fsdp_bytes_are(name, size, ".") && !fsdp_bytes_are(name, size, "..") &&
           !fsdp_bytes_end(name, size, ".pt");
}

static const char *file_of(universal_plan *plan, const fsdp_target_entry *param, const char *kind,
                           size_t kind_size)
{
    size_t room = sizeof UNIVERSAL_ZERO + param->name_size + kind_size + 8;
    char *name = fsdp_arena_alloc(&plan->arena, room, 1);
    if (name)
        snprintf(name, room, UNIVERSAL_ZERO "/%.*s/%.*s.pt", (int)param->name_size, param->name,
                 (int)kind_size, kind);
    return name;
}

static fsdp_status add_folder(universal_plan *plan, const fsdp_target_entry *param, fsdp_error *err)
{
    size_t room = sizeof UNIVERSAL_ZERO + param->name_size + 1;
    char *name = fsdp_arena_alloc(&plan->arena, room, 1);
    if (!name || !fsdp_grow(&plan->folders, &plan->folder_room, plan->folder_count + 1,
                            sizeof *plan->folders))
        return fail_memory(err);
    snprintf(name, room, UNIVERSAL_ZERO "/%.*s", (int)param->name_size, param->name);
    plan->folders[plan->folder_count++] = name;
    return FSDP_OK;
}

static fsdp_status place_param(planning *work, size_t i, fsdp_error *err)
{
    universal_plan *plan = work->plan;
    const fsdp_target_entry *entry = &work->opts->entries[i];
    const fsdp_target_entry *shown = param_shown(&work->params, entry);
    size_t file = 0;
    if (!may_be_folder(shown->name, shown->name_size))
        return refuse(shown,
                      "DeepSpeed needs a folder with its name, which is not a valid folder name; "
                      "rename it with --rename",
                      err);
    FSDP_TRY(add_folder(plan, shown, err));
    FSDP_TRY(add_file(plan, file_of(plan, shown, "fp32", 4), &file, err));
    return add_named(plan, file, tensor_member(entry), text_key("param"), &plan->slots[i], err);
}

/* A tensor of the model that is not a parameter. */
static fsdp_status place_buffer(planning *work, size_t i, fsdp_error *err)
{
    const fsdp_target_entry *entry = &work->opts->entries[i];
    fsdp_target_entry member = tensor_member(entry);
    const member_key keys[] = {text_key("module"), {entry->name, entry->name_size, false}};
    FSDP_TRY(name_member(work->plan, &member, keys, 2, err));
    return add_member(work->plan, UNIVERSAL_MODEL, &member, &work->plan->slots[i], err);
}

static bool is_buffer(const fsdp_target_entry *entry)
{
    return entry->is_model && !entry->value && !fsdp_dtype_describe(entry->dtype)->is_float;
}

/* --- the optimizer's state -------------------------------------------------------------------- */

/* step.pt is the step itself, a tensor or a number. Stage 3 reads the step of the first state. */
static fsdp_status place_step(planning *work, size_t i, size_t file, fsdp_error *err)
{
    static const int32_t whole[] = {FSDP_PATH_WHOLE};
    universal_plan *plan = work->plan;
    const fsdp_target_entry *entry = &work->opts->entries[i];
    fsdp_target_entry member = entry->value ? value_member(entry->value) : tensor_member(entry);
    fsdp_target_entry again = member;
    const member_key keys[] = {
        text_key("optimizer_state_dict"), text_key("state"), {"0", 1, true}, text_key("step")};
    member.name = "";
    member.path = whole;
    member.path_count = 1;
    FSDP_TRY(add_member(plan, file, &member, &plan->slots[i], err));
    if (plan->step > 0)
        return FSDP_OK;
    plan->step = i + 1;
    FSDP_TRY(name_member(plan, &again, keys, 4, err));
    return add_member(plan, UNIVERSAL_OPTIM, &again, &plan->step_again, err);
}

static bool is_of_shape(const fsdp_target_entry *entry, const fsdp_target_entry *param)
{
    return entry->ndim == param->ndim &&
           memcmp(entry->shape, param->shape, (size_t)entry->ndim * sizeof *entry->shape) == 0;
}

/* KEY.pt, in a folder in which fp32.pt is the weight. */
static bool may_be_file(member_key key)
{
    return may_be_folder(key.text, key.size) && key.size <= NAME_MOST - 3 &&
           !fsdp_bytes_are(key.text, key.size, "fp32");
}

static fsdp_status place_state(planning *work, size_t i, fsdp_error *err)
{
    universal_plan *plan = work->plan;
    const fsdp_target_entry *entry = &work->opts->entries[i];
    member_key kind = {0};
    const fsdp_target_entry *param = param_of_state(&work->params, entry, &kind);
    size_t file = 0;
    if (!param)
        return refuse(entry,
                      "DeepSpeed finds the states of a weight NAME as optim.state.NAME.KEY, and "
                      "this name is different; rename it with --rename",
                      err);
    bool is_step = fsdp_bytes_are(kind.text, kind.size, "step") && entry->ndim == 0;
    if (!is_step && !may_be_file(kind))
        return refuse(entry,
                      "DeepSpeed needs a file with the name of its key, which is invalid or taken; "
                      "rename it with --rename",
                      err);
    if (!is_step && !is_of_shape(entry, param))
        return refuse(entry, "DeepSpeed keeps only states that have the shape of their parameter",
                      err);
    if (param != param_shown(&work->params, param))
        return refuse(entry,
                      "another name of the same weight also has states, and DeepSpeed keeps those "
                      "of one name; leave out the others with --exclude",
                      err);
    FSDP_TRY(add_file(plan, file_of(plan, param, kind.text, kind.size), &file, err));
    if (is_step)
        return place_step(work, i, file, err);
    bool *has_state = &work->has_state[param - work->opts->entries];
    work->stateful += !*has_state;
    *has_state = true;
    return add_named(plan, file, tensor_member(entry), text_key("param"), &plan->slots[i], err);
}

/* --- hyper-parameters ------------------------------------------------------------------------- */

static fsdp_status read_hyper(planning *work, size_t i, fsdp_error *err)
{
    const fsdp_target_entry *entry = &work->opts->entries[i];
    fsdp_group_source from = {
        .name = entry->name, .spelling = FSDP_GROUPS_PLACES, .value = entry->value, .entry = i};
    if (!fsdp_group_name_split(entry->name, entry->name_size, &from.parts) ||
        !fsdp_path_is_number(entry->name + from.parts.key, from.parts.key_size) ||
        strtoull(entry->name + from.parts.key, NULL, 10) >= work->opts->entry_count)
        return refuse(entry,
                      "hyper-parameters are not a list of groups; leave them out with --exclude "
                      "param_groups to use those of DeepSpeed's configuration",
                      err);
    return fsdp_groups_read(&work->groups, &from, err);
}

static fsdp_status put_hyper(void *context, const fsdp_group_entry *entry, fsdp_error *err)
{
    universal_plan *plan = ((planning *)context)->plan;
    fsdp_value *value = new_value(plan);
    int32_t *path = fsdp_arena_alloc(&plan->arena, entry->path_count, sizeof *path);
    const fsdp_target_entry member = {
        .name = fsdp_arena_strndup(&plan->arena, entry->name, entry->name_size),
        .name_size = entry->name_size,
        .path = path,
        .path_count = entry->path_count,
        .value = value};
    if (!value || !path || !member.name)
        return fail_memory(err);
    memcpy(path, entry->path, entry->path_count * sizeof *path);
    FSDP_TRY(fsdp_value_copy(entry->value, value, err));
    return add_member(plan, UNIVERSAL_OPTIM, &member, NULL, err);
}

/* Stages 1 and 2 read param_groups, stage 3 optimizer_state_dict.param_groups. In place of parameters a group
 * has the number of a flat tensor there. */
static fsdp_status place_hypers(planning *work, fsdp_error *err)
{
    static const char *const prefixes[] = {"", "optimizer_state_dict."};
    fsdp_groups_sort(&work->groups);
    for (size_t p = 0; p < sizeof prefixes / sizeof *prefixes; p++)
        for (size_t g = 0; g < work->groups.count; g++) {
            fsdp_param_group group = work->groups.items[g];
            const fsdp_value number = fsdp_value_i64((int64_t)group.place);
            fsdp_group_item flat = {.value = &number};
            if (group.is_listed)
                group.params = (fsdp_group_items){&flat, &flat, 1};
            group.prefix = prefixes[p];
            group.prefix_size = strlen(prefixes[p]);
            FSDP_TRY(fsdp_group_put(&group, FSDP_GROUPS_PLACES, put_hyper, work, err));
        }
    return FSDP_OK;
}

/* --- other entries ---------------------------------------------------------------------------- */

static fsdp_status place_other(planning *work, size_t i, fsdp_error *err)
{
    const fsdp_target_entry *entry = &work->opts->entries[i];
    const member_key name = {entry->name, entry->name_size, false};
    for (size_t m = 0; ds_model_members[m]; m++)
        if (fsdp_bytes_are(entry->name, entry->name_size, ds_model_members[m]))
            return refuse(entry, "DeepSpeed has a member of that name; rename it with --rename",
                          err);
    if (!fsdp_name_table_enter(&work->others, entry->name, entry->name_size, 0))
        return fail_memory(err);
    return add_named(work->plan, UNIVERSAL_MODEL,
                     entry->value ? value_member(entry->value) : tensor_member(entry), name,
                     &work->plan->slots[i], err);
}

/* The norm to which gradients are clipped, which DeepSpeed takes from the optimizer's file. */
static bool is_clip(const fsdp_target_entry *entry)
{
    return fsdp_bytes_are(entry->name, entry->name_size, "optimizer_state.clip_grad") &&
           (entry->value->kind == FSDP_VALUE_F64 || entry->value->kind == FSDP_VALUE_I64);
}

/* The reader makes the first two from steps and groups. DeepSpeed compares the last one with the number of
 * model files, which is 1 here. */
static bool is_made_anew(const fsdp_target_entry *entry)
{
    static const char *const names[] = {"optimizer_state.step", "optimizer_state.param_groups",
                                        "mp_world_size"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (fsdp_bytes_are(entry->name, entry->name_size, names[i]))
            return true;
    return false;
}

static fsdp_status place_value(planning *work, size_t i, fsdp_error *err)
{
    const fsdp_target_entry *entry = &work->opts->entries[i];
    member_key kind;
    if (begins(entry, group_prefix, GROUP_PREFIX))
        return read_hyper(work, i, err);
    if (is_made_anew(entry))
        return FSDP_OK;
    if (is_clip(entry))
        return add_named(work->plan, UNIVERSAL_OPTIM, value_member(entry->value),
                         text_key("clip_grad"), NULL, err);
    bool is_step = param_of_state(&work->params, entry, &kind) != NULL &&
                   fsdp_bytes_are(kind.text, kind.size, "step");
    return is_step ? place_state(work, i, err) : place_other(work, i, err);
}

static fsdp_status place_entry(planning *work, size_t i, fsdp_error *err)
{
    const fsdp_target_entry *entry = &work->opts->entries[i];
    if (entry->value)
        return place_value(work, i, err);
    if (work->plan->first[i] != i)
        return FSDP_OK; /* shared_params has the name */
    if (is_param(entry))
        return place_param(work, i, err);
    if (is_buffer(entry))
        return place_buffer(work, i, err);
    return entry->is_optim ? place_state(work, i, err) : place_other(work, i, err);
}

/* --- members of the model file that describe the rest ------------------------------------------- */

static fsdp_status set_text(fsdp_value *value, const char *text, size_t size, fsdp_error *err)
{
    return fsdp_value_set_bytes(value, FSDP_VALUE_STRING, text, size, err);
}

static fsdp_status add_shape(fsdp_value *items, const fsdp_target_entry *param, fsdp_error *err)
{
    FSDP_TRY(set_text(&items[0], param->name, param->name_size, err));
    FSDP_TRY(fsdp_value_set_items(&items[1], FSDP_VALUE_LIST, (size_t)param->ndim, err));
    items[1].is_tuple = true;
    for (int d = 0; d < param->ndim; d++)
        items[1].as.list.items[d] = fsdp_value_i64(param->shape[d]);
    return FSDP_OK;
}

static const fsdp_target_entry *named_param(const planning *work, const fsdp_group_item *param)
{
    return param->name ? param_named(&work->params, param->name, param->size) : NULL;
}

/* The parameters of a group that are there, with their shapes. */
static fsdp_status describe_group(const planning *work, const fsdp_param_group *group,
                                  fsdp_value *dict, fsdp_error *err)
{
    size_t count = 0;
    for (const fsdp_group_item *item = group->params.first; item; item = item->next)
        count += named_param(work, item) != NULL;
    FSDP_TRY(fsdp_value_set_items(dict, FSDP_VALUE_DICT, 2 * count, err));
    fsdp_value *items = dict->as.list.items;
    for (const fsdp_group_item *item = group->params.first; item; item = item->next) {
        const fsdp_target_entry *param = named_param(work, item);
        if (!param)
            continue;
        FSDP_TRY(add_shape(items, param, err));
        items += 2;
    }
    return FSDP_OK;
}

/* A dict per place, of which some may have no group. */
static fsdp_status describe_shapes(const planning *work, fsdp_value *list, fsdp_error *err)
{
    static const fsdp_param_group none;
    const fsdp_param_group *group = work->groups.items, *end = group + work->groups.count;
    size_t count = group < end ? end[-1].place + 1 : 0;
    FSDP_TRY(fsdp_value_set_items(list, FSDP_VALUE_LIST, count, err));
    for (size_t place = 0; place < count; place++) {
        bool has_group = group->place == place;
        FSDP_TRY(describe_group(work, has_group ? group : &none, &list->as.list.items[place], err));
        group += has_group;
    }
    return FSDP_OK;
}

static bool is_stored_buffer(const planning *work, size_t i)
{
    return is_buffer(&work->opts->entries[i]) && work->plan->first[i] == i;
}

static fsdp_status describe_buffers(const planning *work, fsdp_value *list, fsdp_error *err)
{
    const fsdp_target_opts *opts = work->opts;
    size_t count = 0, at = 0;
    for (size_t i = 0; i < opts->entry_count; i++)
        count += is_stored_buffer(work, i);
    FSDP_TRY(fsdp_value_set_items(list, FSDP_VALUE_LIST, count, err));
    for (size_t i = 0; i < opts->entry_count; i++)
        if (is_stored_buffer(work, i))
            FSDP_TRY(set_text(&list->as.list.items[at++], opts->entries[i].name,
                              opts->entries[i].name_size, err));
    return FSDP_OK;
}

/* The other name of a tied tensor; NULL: the entry is stored under its own. */
static const fsdp_target_entry *stored_as(const planning *work, const fsdp_target_entry *entry)
{
    const fsdp_target_entry *shown = param_shown(&work->params, entry);
    return shown == entry ? NULL : shown;
}

/* Tied names, each with the name that is stored. */
static fsdp_status describe_tied(const planning *work, fsdp_value *dict, fsdp_error *err)
{
    const fsdp_target_opts *opts = work->opts;
    size_t count = 0, at = 0;
    for (size_t i = 0; i < opts->entry_count; i++)
        count += stored_as(work, &opts->entries[i]) != NULL;
    FSDP_TRY(fsdp_value_set_items(dict, FSDP_VALUE_DICT, 2 * count, err));
    for (size_t i = 0; i < opts->entry_count; i++) {
        const fsdp_target_entry *entry = &opts->entries[i], *stored = stored_as(work, entry);
        if (!stored)
            continue;
        FSDP_TRY(set_text(&dict->as.list.items[at++], entry->name, entry->name_size, err));
        FSDP_TRY(set_text(&dict->as.list.items[at++], stored->name, stored->name_size, err));
    }
    return FSDP_OK;
}

/* The steps of the run: DeepSpeed counts them, and programs under one of these names. */
static fsdp_status describe_steps(const planning *work, fsdp_value *value, fsdp_error *err)
{
    static const char *const names[] = {"global_step", "train.step", "step", "iteration"};
    (void)err;
    *value = fsdp_value_i64(0);
    for (size_t n = 0; n < sizeof names / sizeof *names; n++)
        for (size_t i = 0; i < work->opts->entry_count; i++) {
            const fsdp_target_entry *entry = &work->opts->entries[i];
            if (entry->value && entry->value->kind == FSDP_VALUE_I64 &&
                fsdp_bytes_are(entry->name, entry->name_size, names[n])) {
                *value = *entry->value;
                return FSDP_OK;
            }
        }
    return FSDP_OK;
}

/* The version whose universal checkpoints these are: DeepSpeed refuses those of none. */
static fsdp_status describe_version(const planning *work, fsdp_value *value, fsdp_error *err)
{
    static const char version[] = "0.19.8";
    (void)work;
    return set_text(value, version, sizeof version - 1, err);
}

static const struct {
    const char *name;
    fsdp_status (*describe)(const planning *work, fsdp_value *value, fsdp_error *err);
    fsdp_value constant; /* without that call */
} described[] = {
    {"buffer_names", describe_buffers, {0}},
    {"param_shapes", describe_shapes, {0}},
    {"shared_params", describe_tied, {0}},
    {"optimizer", NULL, {0}},
    {"lr_scheduler", NULL, {0}},
    {"global_steps", describe_steps, {0}},
    {"skipped_steps", NULL, {.kind = FSDP_VALUE_I64}},
    {"dp_world_size", NULL, {.kind = FSDP_VALUE_I64, .as = {.i64 = 1}}},
    {"mp_world_size", NULL, {.kind = FSDP_VALUE_I64, .as = {.i64 = 1}}},
    {"ds_version", describe_version, {0}},
};

static fsdp_status add_described(planning *work, fsdp_error *err)
{
    for (size_t i = 0; i < sizeof described / sizeof *described; i++) {
        const member_key name = text_key(described[i].name);
        fsdp_value *value = new_value(work->plan);
        if (!value)
            return fail_memory(err);
        if (fsdp_name_table_find(&work->others, name.text, name.size))
            continue; /* the source has it */
        *value = described[i].constant;
        if (described[i].describe)
            FSDP_TRY(described[i].describe(work, value, err));
        FSDP_TRY(add_named(work->plan, UNIVERSAL_MODEL, value_member(value), name, NULL, err));
    }
    return FSDP_OK;
}

/* The optimizer's file has a version, whatever the source says; the model file keeps that of the source. */
static fsdp_status add_version(planning *work, fsdp_error *err)
{
    fsdp_value *value = new_value(work->plan);
    if (!value)
        return fail_memory(err);
    FSDP_TRY(describe_version(work, value, err));
    return add_named(work->plan, UNIVERSAL_OPTIM, value_member(value), text_key("ds_version"), NULL,
                     err);
}

/* --- files ------------------------------------------------------------------------------------ */

/* The module of a file that holds no buffer. */
static fsdp_status add_no_module(universal_plan *plan, size_t file, fsdp_error *err)
{
    fsdp_value *none = new_value(plan);
    if (!none)
        return fail_memory(err);
    FSDP_TRY(fsdp_value_set_items(none, FSDP_VALUE_DICT, 0, err));
    return add_named(plan, file, value_member(none), text_key("module"), NULL, err);
}

static bool has_module(const universal_file *file)
{
    for (size_t i = 0; i < file->count; i++)
        if (file->entries[i].path_count == 2)
            return true;
    return false;
}

/* The values of the model file once more. */
static fsdp_status add_stage_3(universal_plan *plan, fsdp_error *err)
{
    const universal_file *model = &plan->files[UNIVERSAL_MODEL];
    for (size_t i = 0; i < model->count; i++)
        if (model->entries[i].value)
            FSDP_TRY(add_member(plan, UNIVERSAL_MODEL_OF_STAGE_3, &model->entries[i], NULL, err));
    FSDP_TRY(add_no_module(plan, UNIVERSAL_MODEL_OF_STAGE_3, err));
    return has_module(model) ? FSDP_OK : add_no_module(plan, UNIVERSAL_MODEL, err);
}

static fsdp_status add_fixed_files(universal_plan *plan, fsdp_error *err)
{
    static const char *const names[UNIVERSAL_PARAMS] = {
        [UNIVERSAL_MODEL] = UNIVERSAL_FOLDER "/mp_rank_00_model_states.pt",
        [UNIVERSAL_MODEL_OF_STAGE_3] =
            UNIVERSAL_FOLDER "/zero_pp_rank_0_mp_rank_00_model_states.pt",
        [UNIVERSAL_OPTIM] = UNIVERSAL_ZERO "/optimizer_state.pt"};
    size_t number;
    for (size_t i = 0; i < UNIVERSAL_PARAMS; i++)
        FSDP_TRY(add_file(plan, names[i], &number, err));
    return FSDP_OK;
}

static fsdp_status count_bytes(universal_plan *plan, fsdp_error *err)
{
    for (size_t f = 0; f < plan->file_count; f++) {
        universal_file *file = &plan->files[f];
        int64_t bytes = 0;
        for (size_t i = 0; i < file->count; i++) {
            const fsdp_target_entry *entry = &file->entries[i];
            if (!entry->value &&
                fsdp_add_overflow(bytes, torch_bytes_of(entry->dtype, entry->ndim, entry->shape),
                                  &bytes))
                return fsdp_fail(err, FSDP_ERR_LIMIT, "the checkpoint is too large");
        }
        atomic_store(&file->left, bytes);
    }
    return FSDP_OK;
}

/* --- all entries ------------------------------------------------------------------------------ */

/* A group per parameter, each without members: DeepSpeed pairs them with its own in order, of which there are
 * not more, and keeps its hyper-parameters. */
static fsdp_status add_empty_groups(planning *work, fsdp_error *err)
{
    universal_plan *plan = work->plan;
    fsdp_value *groups = new_value(plan);
    fsdp_target_entry member = value_member(groups);
    const member_key keys[] = {text_key("optimizer_state_dict"), text_key("param_groups")};
    if (!groups)
        return fail_memory(err);
    FSDP_TRY(fsdp_value_set_items(groups, FSDP_VALUE_LIST, work->stateful, err));
    for (size_t i = 0; i < work->stateful; i++)
        FSDP_TRY(fsdp_value_set_items(&groups->as.list.items[i], FSDP_VALUE_DICT, 0, err));
    FSDP_TRY(add_named(plan, UNIVERSAL_OPTIM, member, keys[1], NULL, err));
    FSDP_TRY(name_member(plan, &member, keys, 2, err));
    return add_member(plan, UNIVERSAL_OPTIM, &member, NULL, err);
}

/* Elastic checkpoints of DeepSpeed have no hyper-parameters. param_shapes asks for a group of all. */
static fsdp_status make_groups(planning *work, fsdp_error *err)
{
    fsdp_param_group *group;
    FSDP_TRY(fsdp_groups_add(&work->groups, &(fsdp_param_group){0}, &group, err));
    for (size_t i = 0; i < work->opts->entry_count; i++) {
        const fsdp_target_entry *entry = &work->opts->entries[i];
        const fsdp_group_item param = {.name = entry->name, .size = entry->name_size};
        if (work->has_state[i])
            FSDP_TRY(fsdp_group_add(&work->groups, &group->params, param, err));
    }
    return add_empty_groups(work, err);
}

static fsdp_status check_optimizer(planning *work, fsdp_error *err)
{
    if (work->stateful == 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "the source has no optimizer state (optim.state.NAME.KEY), and DeepSpeed "
                         "does not resume from a universal checkpoint without it; use --to hf or "
                         "torch to write weights for a new run");
    return work->groups.count > 0 ? place_hypers(work, err) : make_groups(work, err);
}

static fsdp_status plan_all(planning *work, fsdp_error *err)
{
    universal_plan *plan = work->plan;
    size_t count = work->opts->entry_count;
    plan->slots = fsdp_arena_alloc(&plan->arena, count, sizeof *plan->slots);
    work->has_state = fsdp_arena_alloc(&plan->arena, count, sizeof *work->has_state);
    if (!plan->slots || !work->has_state)
        return fail_memory(err);
    FSDP_TRY(add_fixed_files(plan, err));
    FSDP_TRY(find_params(work->opts, plan, &work->params, err));
    for (size_t i = 0; i < count; i++)
        FSDP_TRY(place_entry(work, i, err));
    FSDP_TRY(check_optimizer(work, err));
    FSDP_TRY(add_described(work, err));
    FSDP_TRY(add_version(work, err));
    FSDP_TRY(add_stage_3(plan, err));
    return count_bytes(plan, err);
}

/* FSDP_ERR_USAGE: DeepSpeed could not resume from these entries; the text says why, and what to do. Release
 * the plan in any case. */
static fsdp_status make_plan(const fsdp_target_opts *opts, universal_plan *plan_out,
                             fsdp_error *err)
{
    planning work = {.opts = opts, .plan = plan_out};
    *plan_out = (universal_plan){0};
    fsdp_status st = plan_all(&work, err);
    release_params(&work.params);
    fsdp_name_table_release(&work.others);
    fsdp_groups_release(&work.groups);
    return st;
}

/* === files ==================================================================================== */

struct fsdp_target {
    fsdp_target_opts opts;
    char *path;
    universal_plan plan;
    fsdp_target *layout;  /* of the model file, which alone has many tensors: written to nowhere */
    pthread_mutex_t lock; /* of the files' targets */
};

static const fsdp_target_ops *torch_ops(void)
{
    return fsdp_torch_writer.ops;
}

static fsdp_target_opts file_opts(const fsdp_target_opts *opts, const universal_file *file,
                                  const char *path)
{
    return (fsdp_target_opts){.io = opts->io,
                              .path = path,
                              .entries = file->entries,
                              .entry_count = file->count,
                              .sync = opts->sync};
}

/* --- measure ---------------------------------------------------------------------------------- */

static fsdp_status measure_files(const universal_plan *plan, const fsdp_target_opts *opts,
                                 int64_t *bytes_out, fsdp_error *err)
{
    *bytes_out = sizeof UNIVERSAL_FOLDER - 1;
    for (size_t f = 0; f < plan->file_count; f++) {
        fsdp_target_opts file = file_opts(opts, &plan->files[f], plan->files[f].name);
        int64_t one, bytes;
        FSDP_TRY(torch_ops()->measure(&file, &one, &bytes, err));
        if (fsdp_add_overflow(*bytes_out, bytes, bytes_out))
            return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' would be too large", opts->path);
    }
    return FSDP_OK;
}

static fsdp_status measure(const fsdp_target_opts *opts, int64_t *files_out, int64_t *bytes_out,
                           fsdp_error *err)
{
    universal_plan plan;
    fsdp_status st = make_plan(opts, &plan, err);
    if (st == FSDP_OK)
        st = measure_files(&plan, opts, bytes_out, err);
    *files_out = (int64_t)plan.file_count + 1;
    release_plan(&plan);
    return st;
}

/* --- files ------------------------------------------------------------------------------------ */

static fsdp_status path_of(const fsdp_target *target, const char *name, char **path_out,
                           fsdp_error *err)
{
    *path_out = fsdp_path_join(target->path, name);
    return *path_out ? FSDP_OK : fsdp_fail_memory(err, "a path");
}

static fsdp_status create_file(const fsdp_target *target, universal_file *file, fsdp_error *err)
{
    char *path;
    FSDP_TRY(path_of(target, file->name, &path, err));
    fsdp_target_opts opts = file_opts(&target->opts, file, path);
    fsdp_status st = torch_ops()->create(&opts, &file->target, err);
    fsdp_free(path);
    return st;
}

static fsdp_status finish_file(universal_file *file, fsdp_error *err)
{
    fsdp_target *finished = file->target;
    file->target = NULL;
    return torch_ops()->finish(finished, err);
}

/* Files without an element have no piece that would create them. */
static fsdp_status write_valued_files(fsdp_target *target, fsdp_error *err)
{
    for (size_t f = 0; f < target->plan.file_count; f++) {
        universal_file *file = &target->plan.files[f];
        if (atomic_load(&file->left) > 0)
            continue;
        FSDP_TRY(create_file(target, file, err));
        FSDP_TRY(finish_file(file, err));
    }
    return FSDP_OK;
}

/* A file that stores nothing has the same places. */
static fsdp_status create_layout(const fsdp_target *target, size_t number, fsdp_target **layout_out,
                                 fsdp_error *err)
{
    const universal_file *file = &target->plan.files[number];
    fsdp_target_opts opts = file_opts(&target->opts, file, file->name);
    opts.io = fsdp_io_dry();
    return torch_ops()->create(&opts, layout_out, err);
}

/* A resumed conversion has the folder. */
static fsdp_status make_folder(const fsdp_target *target, const char *name, fsdp_error *err)
{
    char *path;
    FSDP_TRY(path_of(target, name, &path, err));
    fsdp_status st =
        fsdp_io_exists(target->opts.io, path) ? FSDP_OK : fsdp_io_mkdir(target->opts.io, path, err);
    fsdp_free(path);
    return st;
}

static fsdp_status make_folders(const fsdp_target *target, fsdp_error *err)
{
    FSDP_TRY(make_folder(target, UNIVERSAL_FOLDER, err));
    FSDP_TRY(make_folder(target, UNIVERSAL_ZERO, err));
    for (size_t i = 0; i < target->plan.folder_count; i++)
        FSDP_TRY(make_folder(target, target->plan.folders[i], err));
    return FSDP_OK;
}

static void discard(fsdp_target *target)
{
    for (size_t f = 0; f < target->plan.file_count; f++)
        if (target->plan.files[f].target)
            torch_ops()->discard(target->plan.files[f].target);
    if (target->layout)
        torch_ops()->discard(target->layout);
    release_plan(&target->plan);
    pthread_mutex_destroy(&target->lock);
    fsdp_free(target->path);
    fsdp_free(target);
}

static fsdp_status begin(fsdp_target *target, fsdp_error *err)
{
    target->path = fsdp_strndup(target->opts.path, strlen(target->opts.path));
    if (!target->path)
        return fsdp_fail_memory(err, "a path");
    FSDP_TRY(make_plan(&target->opts, &target->plan, err));
    FSDP_TRY(create_layout(target, UNIVERSAL_MODEL, &target->layout, err));
    FSDP_TRY(make_folders(target, err));
    return write_valued_files(target, err);
}

static fsdp_status create(const fsdp_target_opts *opts, fsdp_target **target_out, fsdp_error *err)
{
    fsdp_target *target = fsdp_alloc(1, sizeof *target);
    if (!target)
        return fsdp_fail_memory(err, "a checkpoint");
    target->opts = *opts;
    pthread_mutex_init(&target->lock, NULL);
    fsdp_status st = begin(target, err);
    if (st == FSDP_OK)
        *target_out = target;
    else
        discard(target);
    return st;
}

/* --- write ------------------------------------------------------------------------------------ */

static fsdp_status open_file(fsdp_target *target, universal_file *file, fsdp_error *err)
{
    pthread_mutex_lock(&target->lock);
    fsdp_status st = file->target ? FSDP_OK : create_file(target, file, err);
    pthread_mutex_unlock(&target->lock);
    return st;
}

/* The thread that writes the last bytes finishes the file: no other one writes to it then. */
static fsdp_status write_at(fsdp_target *target, universal_slot slot,
                            const fsdp_target_piece *piece, fsdp_error *err)
{
    universal_file *file = &target->plan.files[slot.file];
    size_t element = fsdp_dtype_size(file->entries[slot.entry].dtype);
    int64_t bytes = piece->count * (int64_t)element;
    const fsdp_target_piece inner = {
        .entry = slot.entry, .first = piece->first, .count = piece->count, .data = piece->data};
    FSDP_TRY(open_file(target, file, err));
    FSDP_TRY(torch_ops()->write(file->target, &inner, err));
    bool is_last = atomic_fetch_sub(&file->left, bytes) == bytes;
    return is_last ? finish_file(file, err) : FSDP_OK;
}

static fsdp_status write(fsdp_target *target, const fsdp_target_piece *piece, fsdp_error *err)
{
    const universal_plan *plan = &target->plan;
    if (piece->count == 0 || plan->first[piece->entry] != piece->entry)
        return FSDP_OK;
    FSDP_TRY(write_at(target, plan->slots[piece->entry], piece, err));
    return plan->step == piece->entry + 1 ? write_at(target, plan->step_again, piece, err)
                                          : FSDP_OK;
}

/* --- finish ----------------------------------------------------------------------------------- */

static fsdp_status check_complete(const fsdp_target *target, fsdp_error *err)
{
    for (size_t f = 0; f < target->plan.file_count; f++)
        if (atomic_load(&target->plan.files[f].left) != 0)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' is not complete",
                             target->plan.files[f].name);
    return FSDP_OK;
}

static fsdp_status write_pointer(const fsdp_target *target, fsdp_error *err)
{
    static const char folder[] = UNIVERSAL_FOLDER;
    char *path;
    fsdp_file *file = NULL;
    FSDP_TRY(path_of(target, UNIVERSAL_POINTER, &path, err));
    fsdp_status st = fsdp_io_open(target->opts.io, path, FSDP_IO_CREATE, &file, err);
    if (st == FSDP_OK)
        st = fsdp_io_write(file, path, folder, sizeof folder - 1, 0, err);
    if (st == FSDP_OK && target->opts.sync)
        st = fsdp_io_sync(file, path, err);
    fsdp_status closed = fsdp_io_close(&file, path, st == FSDP_OK ? err : NULL);
    fsdp_free(path);
    return st == FSDP_OK ? closed : st;
}

static fsdp_status sync_folder(const fsdp_target *target, const char *name, fsdp_error *err)
{
    char *path;
    FSDP_TRY(path_of(target, name, &path, err));
    fsdp_status st = fsdp_io_sync_dir(target->opts.io, path, err);
    fsdp_free(path);
    return st;
}

static fsdp_status sync_folders(const fsdp_target *target, fsdp_error *err)
{
    for (size_t i = 0; i < target->plan.folder_count; i++)
        FSDP_TRY(sync_folder(target, target->plan.folders[i], err));
    FSDP_TRY(sync_folder(target, UNIVERSAL_ZERO, err));
    return sync_folder(target, UNIVERSAL_FOLDER, err);
}

static fsdp_status finish(fsdp_target *target, fsdp_error *err)
{
    fsdp_status st = check_complete(target, err);
    if (st == FSDP_OK)
        st = write_pointer(target, err);
    if (st == FSDP_OK && target->opts.sync)
        st = sync_folders(target, err);
    discard(target);
    return st;
}

/* --- places ----------------------------------------------------------------------------------- */

static fsdp_status place(const fsdp_target *target, size_t entry, size_t box,
                         fsdp_target_place *place_out, fsdp_error *err)
{
    universal_slot slot = target->plan.slots[target->plan.first[entry]];
    bool is_model = slot.file == UNIVERSAL_MODEL;
    fsdp_target *layout = target->layout;
    if (!is_model)
        FSDP_TRY(create_layout(target, slot.file, &layout, err));
    fsdp_status st = torch_ops()->place(layout, slot.entry, box, place_out, err);
    if (!is_model)
        torch_ops()->discard(layout);
    place_out->file = target->plan.files[slot.file].name;
    return st;
}

/* --- the format ------------------------------------------------------------------------------- */

static bool owns(const char *name)
{
    return strcmp(name, UNIVERSAL_POINTER) == 0 || strcmp(name, UNIVERSAL_FOLDER) == 0;
}

static const fsdp_target_ops ops = {measure, create, write, finish, discard, place};

const fsdp_format fsdp_format_universal = {
    .name = "universal",
    .makes = "^(optimizer_state\\.(step|param_groups)|mp_world_size)$",
    .writes_directory = true,
    .caps = {.values = true,
             .shares = true,
             .plain_names = true,
             .maps_names = true,
             .names_groups = true,
             .nests_groups = true,
             .f32_weights = true},
    .writer =
        &(const fsdp_format_writer){.ops = &ops, .owns = owns, .holds_dtype = torch_holds_dtype}};
