/*
 * Getting: a dict of the memory that this rank holds, without a copy or a word to other ranks; then, where
 * it was asked for, its values whole (state_full.c) or copied. The mirror is state_set.c.
 */
#include "runtime/state/state_internal.h"
#include "runtime/step/step.h"

#include <string.h>

#include <fsdp/text.h>

/* --- names and tensors ------------------------------------------------------------------------ */

typedef struct state_build {
    const fsdp_state_scope *scope;
    fsdp_sd *sd;
    fsdp_text name;
} state_build;

/* Prefix, name and, unless it is NULL, what: the name of the entry that comes next. */
static fsdp_status spell(state_build *build, const char *prefix, const char *more, const char *name,
                         const char *what, fsdp_error *err)
{
    build->name.size = 0;
    fsdp_text_addf(&build->name, "%s%s%s%s%s", prefix, more, name, what ? "." : "",
                   what ? what : "");
    return build->name.failed ? fsdp_fail_memory(err, name) : FSDP_OK;
}

/* Whole on every rank: buffers, and what units ignored. */
static fsdp_layout layout_of(const fsdp_state_scope *scope, const fsdp_param *param)
{
    if (param->mesh)
        return param->layout;
    return (fsdp_layout){.kind = FSDP_LAYOUT_MESH, .mesh = scope->root->unit->opts.mesh};
}

/* Under the name that was spelled. */
static fsdp_status add_tensor(state_build *build, const fsdp_optim_tensor *tensor, fsdp_error *err)
{
    int rank = build->scope->root->world->rank;
    bool has_part = fsdp_layout_box_count(&tensor->layout, tensor->ndim, tensor->shape, rank) > 0;
    return fsdp_sd_add_tensor(build->sd, build->name.data, build->name.size, tensor->dtype,
                              tensor->ndim, tensor->shape, &tensor->layout,
                              has_part ? tensor->data : NULL, err);
}

/* --- the model -------------------------------------------------------------------------------- */

static fsdp_status add_aliases(state_build *build, const fsdp_state_param *param, fsdp_error *err)
{
    const char *prefix = build->scope->opts.model_prefix;
    for (size_t i = 1; i < param->count; i++) {
        fsdp_text target = {0};
        fsdp_text_addf(&target, "%s%s", prefix, param->names[0]);
        fsdp_status status = spell(build, prefix, "", param->names[i], NULL, err);
        if (status == FSDP_OK && target.failed)
            status = fsdp_fail_memory(err, param->names[i]);
        if (status == FSDP_OK)
            status = fsdp_sd_add_alias(build->sd, build->name.data, build->name.size, target.data,
                                       target.size, err);
        fsdp_text_release(&target);
        FSDP_TRY(status);
    }
    return FSDP_OK;
}

static fsdp_status add_param(state_build *build, const fsdp_state_param *param, fsdp_error *err)
{
    const fsdp_state_scope *scope = build->scope;
    const fsdp_param *of = param->param;
    const fsdp_optim_tensor tensor = {.dtype = of->dtype,
                                      .ndim = of->ndim,
                                      .shape = of->shape,
                                      .layout = layout_of(scope, of),
                                      .data = of->shard};
    FSDP_TRY(spell(build, scope->opts.model_prefix, "", param->names[0], NULL, err));
    FSDP_TRY(add_tensor(build, &tensor, err));
    return add_aliases(build, param, err);
}

static fsdp_status add_model(state_build *build, bool buffers, fsdp_error *err)
{
    const fsdp_state_scope *scope = build->scope;
    for (size_t i = 0; i < scope->count; i++)
        if (scope->params[i].param->is_buffer == buffers &&
            fsdp_state_has(scope, &scope->params[i]))
            FSDP_TRY(add_param(build, &scope->params[i], err));
    return FSDP_OK;
}

/* --- optimizers ------------------------------------------------------------------------------- */

static fsdp_status add_state(state_build *build, const fsdp_state_param *param, fsdp_error *err)
{
    fsdp_optim_tensor tensors[FSDP_OPTIM_TENSORS];
    size_t n = fsdp_optim_state_tensors(param->optim, param->state, tensors);
    for (size_t i = 0; i < n; i++) {
        FSDP_TRY(spell(build, build->scope->opts.optim_prefix, "state.", param->names[0],
                       tensors[i].name, err));
        FSDP_TRY(add_tensor(build, &tensors[i], err));
    }
    return FSDP_OK;
}

static fsdp_status add_optims(state_build *build, fsdp_error *err)
{
    const fsdp_state_scope *scope = build->scope;
    for (size_t i = 0; i < scope->count; i++)
        if (scope->params[i].state && fsdp_state_has(scope, &scope->params[i]))
            FSDP_TRY(add_state(build, &scope->params[i], err));
    return fsdp_state_put_groups(scope, build->sd, err);
}

/* --- entries of other dicts ------------------------------------------------------------------- */

fsdp_status fsdp_state_add_entry(const fsdp_sd *from, const fsdp_entry *entry,
                                 const fsdp_layout *layout, void *data, fsdp_sd *sd,
                                 fsdp_error *err)
{
    const fsdp_entry *target = fsdp_sd_at(from, entry->target);
    switch (entry->kind) {
    case FSDP_ENTRY_TENSOR:
        return fsdp_sd_add_tensor(sd, entry->name, entry->name_size, entry->dtype, entry->ndim,
                                  entry->shape, layout, data, err);
    case FSDP_ENTRY_VALUE:
        return fsdp_sd_add_value(sd, entry->name, entry->name_size, &entry->value, err);
    case FSDP_ENTRY_ALIAS: break;
    }
    return fsdp_sd_add_alias(sd, entry->name, entry->name_size, target->name, target->name_size,
                             err);
}

/* --- the live dict ---------------------------------------------------------------------------- */

static fsdp_status add_all(state_build *build, fsdp_error *err)
{
    const fsdp_state_opts *opts = &build->scope->opts;
    if (!opts->no_model) {
        FSDP_TRY(add_model(build, false, err));
        FSDP_TRY(add_model(build, true, err));
    }
    return build->scope->optim_count > 0 && !opts->no_optim ? add_optims(build, err) : FSDP_OK;
}

fsdp_status fsdp_state_build(const fsdp_state_scope *scope, fsdp_sd **sd_out, fsdp_error *err)
{
    state_build build = {.scope = scope};
    *sd_out = NULL;
    FSDP_TRY(fsdp_sd_create(&build.sd, err));
    fsdp_status status = add_all(&build, err);
    fsdp_text_release(&build.name);
    if (status == FSDP_OK)
        *sd_out = build.sd;
    else
        fsdp_sd_free(build.sd);
    return status;
}

/* --- getting ---------------------------------------------------------------------------------- */

static fsdp_status reshard_all(fsdp_root *root, fsdp_error *err)
{
    fsdp_context_flush_gather(root->context);
    for (size_t i = 0; i < root->group_count; i++) {
        fsdp_group *group = root->groups[i];
        fsdp_group_cancel_gather(group);
        FSDP_TRY(fsdp_group_reshard(group, err));
    }
    return FSDP_OK;
}

fsdp_status fsdp_state_settle(fsdp_root *root, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_ready(root, err));
    if (root->is_in_forward || root->is_in_backward)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the state of a root is got and set between steps");
    FSDP_TRY(reshard_all(root, err));
    return fsdp_context_sync(root->context, err);
}

/* The same names, with this rank's parts in memory of the dict's own. */
static fsdp_status copy_parts(const fsdp_sd *live, int rank, fsdp_sd *sd, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_count(live); i++)
        fsdp_sd_set_data(sd, i, NULL);
    FSDP_TRY(fsdp_sd_allocate(sd, rank, err));
    for (size_t i = 0; i < fsdp_sd_count(live); i++) {
        const fsdp_entry *entry = fsdp_sd_at(live, i);
        if (entry->kind == FSDP_ENTRY_TENSOR && entry->data)
            memcpy(fsdp_sd_at(sd, i)->data, entry->data,
                   (size_t)fsdp_entry_local_bytes(entry, rank));
    }
    return FSDP_OK;
}

static fsdp_status get_copies(const fsdp_state_scope *scope, const fsdp_sd *live, fsdp_sd **sd_out,
                              fsdp_error *err)
{
    fsdp_sd *sd = NULL;
    fsdp_status status = fsdp_state_build(scope, &sd, err);
    if (status == FSDP_OK)
        status = copy_parts(live, scope->root->world->rank, sd, err);
    if (status == FSDP_OK)
        *sd_out = sd;
    else
        fsdp_sd_free(sd);
    return status;
}

static bool has_model(const fsdp_state_scope *scope)
{
    for (size_t i = 0; i < scope->count; i++)
        if (scope->params[i].count > 0)
            return true;
    return false;
}

static fsdp_status get_live(fsdp_state_scope *scope, fsdp_root *root, fsdp_optim *const *optims,
                            size_t n, const fsdp_state_opts *opts, fsdp_sd **live_out,
                            fsdp_error *err)
{
    scope->root = root;
    FSDP_TRY(fsdp_state_settle(root, err));
    FSDP_TRY(fsdp_state_scope_init(scope, root, optims, n, opts, err));
    if (scope->opts.broadcast_from_rank0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "broadcast_from_rank0 is for setting state");
    if (!scope->opts.no_model && (scope->opts.full_state_dict || scope->opts.cpu_offload))
        FSDP_TRY(fsdp_root_check_values(root, NULL, "a copy of the state", err));
    if (!scope->opts.no_model && !scope->opts.not_strict && !has_model(scope))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "state of the model was asked for, and the model is empty");
    return fsdp_state_build(scope, live_out, err);
}

fsdp_status fsdp_root_get_state(fsdp_root *root, fsdp_optim *const *optims, size_t n,
                                const fsdp_state_opts *opts, fsdp_sd **sd_out, fsdp_error *err)
{
    fsdp_state_scope scope = {0};
    fsdp_error local = {0};
    fsdp_sd *live = NULL;
    err = err ? err : &local;
    *sd_out = NULL;
    fsdp_status status = get_live(&scope, root, optims, n, opts, &live, err);
    if (opts && opts->full_state_dict)
        status = fsdp_state_gather(&scope, live, status, sd_out, err);
    else if (status == FSDP_OK && opts && opts->cpu_offload)
        status = get_copies(&scope, live, sd_out, err);
    else if (status == FSDP_OK) {
        *sd_out = live;
        live = NULL;
    }
    fsdp_sd_free(live);
    fsdp_state_scope_release(&scope);
    return status;
}

fsdp_status fsdp_root_state(fsdp_root *root, fsdp_optim *optim, const fsdp_state_opts *opts,
                            fsdp_sd **sd_out, fsdp_error *err)
{
    return fsdp_root_get_state(root, &optim, optim ? 1 : 0, opts, sd_out, err);
}
