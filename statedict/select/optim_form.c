/* Other forms of hyper-parameters: see optim_form.h. */
#include "statedict/select/optim_form.h"

#include "base/core/mem.h"
#include "base/data/name_path.h"
#include "base/data/param_groups.h"
#include "base/data/value_internal.h"
#include "base/text.h"
#include "statedict/sd/layout_internal.h"

#include <string.h>

/* Programs have a few groups, or one per layer. The bounds keep the search for equal groups short. */
enum { GROUPS_MOST = 4096, OPTIONS_MOST = 256 };

typedef struct forming {
    const fsdp_sd *from;
    const size_t *old_source;
    fsdp_optim_form form;
    fsdp_param_groups groups;
    bool *is_replaced; /* per entry of from */
    bool leaves;       /* the groups stay as they are */
    fsdp_sd *sd;
    size_t *source;
    size_t source_room;
} forming;

static fsdp_status fail_memory(fsdp_error *err)
{
    return fsdp_fail_memory(err, "the groups of an optimizer");
}

/* --- reading ---------------------------------------------------------------------------------- */

/* Groups that cannot get another form stay as they are, unless the caller wants one. */
static fsdp_status leave(forming *work, size_t entry, const char *why, fsdp_error *err)
{
    work->leaves = true;
    return work->form == FSDP_OPTIM_FORM_DEFAULT
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_USAGE, "'%s' cannot take the other form: %s",
                           fsdp_sd_at(work->from, entry)->name, why);
}

/* DeepSpeed's own list, which numbers its parameters; its reader derives one with names (optim.). */
static bool is_of_deepspeed(const fsdp_entry *entry, const fsdp_group_name *parts)
{
    static const char prefix[] = "optimizer_state.";
    return parts->prefix_size == sizeof prefix - 1 && parts->option_size == 0 &&
           memcmp(entry->name, prefix, parts->prefix_size) == 0;
}

/* "optim.param_groups.0.lr" is of a place if there is "optim.param_groups.0.params". */
static fsdp_status find_spelling(const forming *work, const fsdp_entry *entry,
                                 const fsdp_group_name *parts, fsdp_group_spelling *spelling_out,
                                 fsdp_error *err)
{
    *spelling_out = parts->option_size == 0 ? FSDP_GROUPS_LIST : FSDP_GROUPS_NAMES;
    if (parts->option_size == 0 || !fsdp_path_is_number(entry->name + parts->key, parts->key_size))
        return FSDP_OK;
    fsdp_text params = {0};
    fsdp_text_add(&params, entry->name, parts->key + parts->key_size);
    fsdp_text_addf(&params, ".params");
    if (!params.failed && fsdp_sd_find(work->from, params.data, params.size) >= 0)
        *spelling_out = FSDP_GROUPS_PLACES;
    fsdp_status status = params.failed ? fail_memory(err) : FSDP_OK;
    fsdp_text_release(&params);
    return status;
}

static fsdp_status read_entry(forming *work, size_t number, const fsdp_group_name *parts,
                              fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(work->from, number);
    fsdp_group_source source = {
        .name = entry->name, .parts = *parts, .value = &entry->value, .entry = number};
    if (entry->kind != FSDP_ENTRY_VALUE || fsdp_value_is_opaque(&entry->value) ||
        (parts->option_size == 0 && !fsdp_group_list_fits(&entry->value)))
        return leave(work, number, "it is not a plain value", err);
    work->is_replaced[number] = true;
    FSDP_TRY(find_spelling(work, entry, parts, &source.spelling, err));
    return fsdp_groups_read(&work->groups, &source, err);
}

/* Groups with numbers of parameters, or with so many options that no program has them, stay. */
static fsdp_status check_group(forming *work, const fsdp_param_group *group, fsdp_error *err)
{
    for (const fsdp_group_item *param = group->params.first; param; param = param->next)
        if (!param->name)
            return leave(work, param->entry,
                         "it numbers its parameters, and get_optimizer_state_dict names them", err);
    return group->options.count <= OPTIONS_MOST
               ? FSDP_OK
               : leave(work, group->options.last->entry, "its group has too many members", err);
}

static fsdp_status read_groups(forming *work, fsdp_error *err)
{
    fsdp_group_name parts;
    for (size_t i = 0; i < fsdp_sd_count(work->from) && !work->leaves; i++) {
        const fsdp_entry *entry = fsdp_sd_at(work->from, i);
        if (fsdp_group_name_split(entry->name, entry->name_size, &parts) &&
            !is_of_deepspeed(entry, &parts))
            FSDP_TRY(read_entry(work, i, &parts, err));
    }
    for (size_t i = 0; i < work->groups.count && !work->leaves; i++)
        FSDP_TRY(check_group(work, &work->groups.items[i], err));
    fsdp_groups_sort(&work->groups);
    return FSDP_OK;
}

/* --- members of PyTorch's optimizers ---------------------------------------------------------- */

/* A member that PyTorch's optimizer has next to those of ours, with the value that means nothing. */
typedef struct neutral_member {
    const char *name;
    const fsdp_value *value;
} neutral_member;

/* An optimizer of optim.h: the members that fsdp_root_save stores, and PyTorch's others (torch 2.15). */
typedef struct own_kind {
    const char *const *members;
    const neutral_member *neutrals;
} own_kind;

static const fsdp_value no = {.kind = FSDP_VALUE_BOOL}, unset = {.kind = FSDP_VALUE_NULL};
static const fsdp_value yes = {.kind = FSDP_VALUE_BOOL, .as = {.boolean = true}};
static const char *const adamw_members[] = {"lr", "betas", "eps", "weight_decay", "maximize", NULL};
static const neutral_member adamw_neutrals[] = {
    {"amsgrad", &no},    {"foreach", &unset},
    {"capturable", &no}, {"differentiable", &no},
    {"fused", &unset},   {"decoupled_weight_decay", &yes},
    {NULL, NULL}};
static const char *const sgd_members[] = {"lr",       "momentum", "dampening", "weight_decay",
                                          "nesterov", "maximize", NULL};
static const neutral_member sgd_neutrals[] = {
    {"foreach", &unset}, {"differentiable", &no}, {"fused", &unset}, {NULL, NULL}};
static const own_kind own_kinds[] = {{adamw_members, adamw_neutrals}, {sgd_members, sgd_neutrals}};

static const fsdp_group_item *find_option(const fsdp_param_group *group, const char *name)
{
    return fsdp_group_option(group, name, strlen(name));
}

static bool has_all(const fsdp_param_group *group, const char *const *members)
{
    while (*members && find_option(group, *members))
        members++;
    return !*members;
}

/* The optimizer of ours that stored the group; NULL: none. PyTorch's have `foreach` or, before 1.12, only
 * `amsgrad`. */
static const own_kind *kind_of(const fsdp_param_group *group)
{
    if (find_option(group, "foreach") || find_option(group, "amsgrad"))
        return NULL;
    for (size_t i = 0; i < sizeof own_kinds / sizeof *own_kinds; i++)
        if (has_all(group, own_kinds[i].members))
            return &own_kinds[i];
    return NULL;
}

static bool are_ours(const forming *work)
{
    for (size_t i = 0; i < work->groups.count; i++)
        if (!kind_of(&work->groups.items[i]))
            return false;
    return true;
}

static fsdp_status complete_groups(forming *work, fsdp_error *err)
{
    for (size_t i = 0; i < work->groups.count; i++) {
        fsdp_param_group *group = &work->groups.items[i];
        const own_kind *kind = kind_of(group);
        for (const neutral_member *more = kind ? kind->neutrals : NULL; more && more->name; more++)
            FSDP_TRY(fsdp_group_add(&work->groups, &group->options,
                                    (fsdp_group_item){.name = more->name,
                                                      .size = strlen(more->name),
                                                      .value = more->value,
                                                      .entry = group->entry},
                                    err));
    }
    return FSDP_OK;
}

/* --- writing: entries that stay --------------------------------------------------------------- */

static fsdp_status note_source(forming *work, size_t old, fsdp_error *err)
{
    size_t count = fsdp_sd_count(work->sd);
    if (!fsdp_grow(&work->source, &work->source_room, count, sizeof *work->source))
        return fail_memory(err);
    work->source[count - 1] = work->old_source[old];
    return FSDP_OK;
}

/* The size of "optim." when the name begins with "optim.state." beside "optim.param_groups"; else -1. */
static int64_t find_state(const forming *work, const fsdp_entry *entry)
{
    for (size_t i = 0; i < work->groups.count; i++) {
        const fsdp_param_group *group = &work->groups.items[i];
        size_t size = group->prefix_size;
        if (group->place == 0 && entry->name_size > size + 6 &&
            memcmp(entry->name, group->prefix, size) == 0 &&
            memcmp(entry->name + size, "state.", 6) == 0)
            return (int64_t)size;
    }
    return -1;
}

static size_t add_element(int32_t *path, size_t count, size_t size)
{
    path[count] = (int32_t)size;
    return count + 1;
}

/* PyTorch nests state as {"state": {NAME: {KIND: ...}}}, or the flat form has one key "state.NAME.KIND". */
static fsdp_status place_state(const forming *work, const fsdp_entry *entry, size_t prefix,
                               fsdp_error *err)
{
    int32_t path[4];
    size_t count = prefix > 0 ? add_element(path, 0, prefix - 1) : 0, size = entry->name_size, dot;
    for (dot = size - 1; entry->name[dot] != '.';)
        dot--;
    bool is_nested = work->form == FSDP_OPTIM_FORM_NESTED && dot > prefix + 5;
    if (is_nested) {
        count = add_element(path, count, 5);
        count = add_element(path, count, dot - prefix - 6);
        count = add_element(path, count, size - dot - 1);
    } else {
        count = add_element(path, count, size - prefix);
    }
    return fsdp_sd_set_path(work->sd, fsdp_sd_count(work->sd) - 1, path, count, err);
}

static fsdp_status keep_entry(forming *work, size_t i, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(work->from, i), *target;
    const fsdp_tensor tensor = {entry->dtype, entry->ndim, entry->shape, entry->layout, NULL};
    switch (entry->kind) {
    case FSDP_ENTRY_TENSOR:
        FSDP_TRY(fsdp_sd_add_tensor(work->sd, entry->name, entry->name_size, &tensor, err));
        break;
    case FSDP_ENTRY_VALUE:
        FSDP_TRY(fsdp_sd_add_value(work->sd, entry->name, entry->name_size, &entry->value, err));
        break;
    case FSDP_ENTRY_ALIAS:
        target = fsdp_sd_at(work->from, entry->target);
        FSDP_TRY(fsdp_sd_add_alias(work->sd, entry->name, entry->name_size, target->name,
                                   target->name_size, err));
        break;
    }
    FSDP_TRY(note_source(work, i, err));
    int64_t prefix = find_state(work, entry);
    if (prefix >= 0)
        return place_state(work, entry, (size_t)prefix, err);
    return entry->path ? fsdp_sd_set_path(work->sd, fsdp_sd_count(work->sd) - 1, entry->path,
                                          entry->path_count, err)
                       : FSDP_OK;
}

/* --- writing: groups -------------------------------------------------------------------------- */

static fsdp_status put_entry(void *context, const fsdp_group_entry *entry, fsdp_error *err)
{
    forming *work = context;
    FSDP_TRY(fsdp_sd_add_value(work->sd, entry->name, entry->name_size, entry->value, err));
    FSDP_TRY(note_source(work, entry->entry, err));
    return fsdp_sd_set_path(work->sd, fsdp_sd_count(work->sd) - 1, entry->path, entry->path_count,
                            err);
}

static fsdp_status put_group(forming *work, fsdp_param_group *group, fsdp_error *err)
{
    bool is_flat = work->form == FSDP_OPTIM_FORM_FLAT;
    if (is_flat && group->params.count == 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "a group of '%s' has no parameters, but the flat form stores groups by "
                         "their parameters",
                         fsdp_sd_at(work->from, group->entry)->name);
    group->is_listed = true;
    return fsdp_group_put(group, is_flat ? FSDP_GROUPS_NAMES : FSDP_GROUPS_PLACES, put_entry, work,
                          err);
}

static fsdp_status write_all(forming *work, fsdp_error *err)
{
    FSDP_TRY(fsdp_sd_create(&work->sd, err));
    for (size_t i = 0; i < fsdp_sd_count(work->from); i++)
        if (!work->is_replaced[i])
            FSDP_TRY(keep_entry(work, i, err));
    for (size_t i = 0; i < work->groups.count; i++)
        FSDP_TRY(put_group(work, &work->groups.items[i], err));
    return FSDP_OK;
}

/* --- the call --------------------------------------------------------------------------------- */

static fsdp_status form_all(forming *work, fsdp_error *err)
{
    work->is_replaced = fsdp_alloc(fsdp_sd_count(work->from), sizeof *work->is_replaced);
    if (!work->is_replaced)
        return fail_memory(err);
    FSDP_TRY(read_groups(work, err));
    if (work->form == FSDP_OPTIM_FORM_DEFAULT && !work->leaves)
        work->leaves = !are_ours(work);
    if (work->leaves || work->groups.count == 0)
        return FSDP_OK;
    if (!fsdp_groups_join(&work->groups, GROUPS_MOST))
        return leave(work, work->groups.items[0].entry, "there are too many groups", err);
    if (work->form == FSDP_OPTIM_FORM_DEFAULT)
        work->form = FSDP_OPTIM_FORM_NESTED;
    FSDP_TRY(complete_groups(work, err));
    return write_all(work, err);
}

fsdp_status fsdp_optim_form_apply(fsdp_optim_form form, fsdp_sd **sd, size_t **source,
                                  fsdp_optim_form *written_out, fsdp_error *err)
{
    forming work = {.from = *sd, .old_source = *source, .form = form};
    fsdp_status status = form_all(&work, err);
    *written_out = FSDP_OPTIM_FORM_DEFAULT;
    if (status == FSDP_OK && work.sd) {
        fsdp_free(*source);
        *source = work.source;
        fsdp_sd_free(*sd);
        *sd = work.sd;
        *written_out = work.form;
    } else {
        fsdp_sd_free(work.sd);
        fsdp_free(work.source);
    }
    fsdp_groups_release(&work.groups);
    fsdp_free(work.is_replaced);
    return status;
}
