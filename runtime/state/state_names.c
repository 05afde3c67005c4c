/*
 * Selects the parameters of a state dict, makes their names, and finds the parameter of a name. Names are
 * those of the model, below the selected submodules, after the caller's renaming. See state_internal.h.
 */
#include "runtime/state/state_internal.h"

#include <string.h>

/* --- spelling --------------------------------------------------------------------------------- */

fsdp_status fsdp_state_spell(fsdp_text *text, const fsdp_state_naming *naming, const char *name,
                             fsdp_error *err)
{
    text->size = 0;
    fsdp_text_addf(text, "%s%s%s%s%s", naming->prefix, naming->more, name, naming->what ? "." : "",
                   naming->what ? naming->what : "");
    return text->failed ? fsdp_fail_memory(err, name) : FSDP_OK;
}

/* The length of the submodule's prefix in the name; negative when it is below no selected one. */
static int64_t prefix_of(const fsdp_state_opts *opts, const char *name)
{
    if (!opts->submodules)
        return 0;
    for (size_t i = 0; i < opts->submodule_count; i++) {
        size_t size = strlen(opts->submodules[i]);
        if (size == 0)
            return 0;
        if (strncmp(name, opts->submodules[i], size) == 0 && name[size] == '.')
            return (int64_t)size + 1;
    }
    return -1;
}

/* The name in the dict for a name of the model; NULL when it is not selected. */
static const char *spell(const fsdp_state_opts *opts, const char *name)
{
    int64_t prefix = prefix_of(opts, name);
    const char *spelled = opts->rename ? opts->rename(opts->context, name) : NULL;
    if (prefix < 0)
        return NULL;
    spelled = spelled ? spelled : name;
    if (opts->drop_submodule_prefixes && strncmp(spelled, name, (size_t)prefix) == 0)
        spelled += prefix;
    return spelled;
}

static fsdp_status fail_twice(const fsdp_state_scope *scope, int64_t at, const char *name,
                              const char *spelled, fsdp_error *err)
{
    const fsdp_param *other =
        scope->params[fsdp_sd_at(scope->index, (size_t)at)->value.as.i64].param;
    return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' and '%s' would both be '%s' in the state dict",
                     other->name, name, spelled);
}

static fsdp_status add_name(fsdp_state_scope *scope, fsdp_state_param *param, const char *name,
                            fsdp_error *err)
{
    const char *spelled = spell(&scope->opts, name);
    if (!spelled)
        return FSDP_OK;
    size_t size = strlen(spelled);
    const fsdp_value number = fsdp_value_i64(param - scope->params);
    int64_t at = fsdp_sd_find(scope->index, spelled, size);
    if (at >= 0 && fsdp_sd_at(scope->index, (size_t)at)->value.as.i64 == number.as.i64)
        return FSDP_OK;
    if (at >= 0)
        return fail_twice(scope, at, name, spelled, err);
    const char *copy = fsdp_arena_strndup(&scope->arena, spelled, size);
    if (!copy)
        return fsdp_fail_memory(err, name);
    param->names[param->count++] = copy;
    return fsdp_sd_add_value(scope->index, copy, size, &number, err);
}

static fsdp_status add_names(fsdp_state_scope *scope, fsdp_state_param *param, fsdp_error *err)
{
    const fsdp_param *of = param->param;
    param->names = fsdp_arena_alloc(&scope->arena, of->alias_count + 1, sizeof *param->names);
    if (!param->names)
        return fsdp_fail_memory(err, of->name);
    FSDP_TRY(add_name(scope, param, of->name, err));
    for (size_t i = 0; i < of->alias_count; i++)
        FSDP_TRY(add_name(scope, param, of->aliases[i], err));
    return FSDP_OK;
}

/* --- optimizers ------------------------------------------------------------------------------- */

static fsdp_status add_state(fsdp_state_param *param, fsdp_optim *optim, fsdp_optim_state *state,
                             fsdp_error *err)
{
    size_t group;
    if (!fsdp_optim_group_of(state, param->param, &group))
        return FSDP_OK;
    if (param->state)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' is in two optimizers, whose state cannot be merged",
                         param->param->name);
    param->optim = optim;
    param->state = state;
    param->group = group;
    return FSDP_OK;
}

/* Each search begins where the last one ended, because parameters and states mostly have the same order. */
static fsdp_status add_optim(fsdp_state_scope *scope, fsdp_optim *optim, fsdp_error *err)
{
    if (optim->root != scope->root)
        return fsdp_fail(err, FSDP_ERR_USAGE, "an optimizer is another root's");
    for (size_t i = 0, at = 0; i < scope->count; i++) {
        const fsdp_param *param = scope->params[i].param,
                         *holder = param->flat ? param->flat : param;
        size_t tried = 0;
        while (tried < optim->count && optim->states[at].param != holder) {
            at = at + 1 < optim->count ? at + 1 : 0;
            tried++;
        }
        if (tried < optim->count)
            FSDP_TRY(add_state(&scope->params[i], optim, &optim->states[at], err));
    }
    return FSDP_OK;
}

/* Lists the root's optimizers in the order of their creation. */
static fsdp_status list_optims(fsdp_state_scope *scope, fsdp_error *err)
{
    size_t n = 0;
    if (scope->opts.optims || scope->opts.part == FSDP_STATE_MODEL) {
        scope->optims = scope->opts.optims;
        scope->optim_count = scope->opts.optims ? scope->opts.optim_count : 0;
        return FSDP_OK;
    }
    for (const fsdp_optim *optim = scope->root->optims; optim; optim = optim->next)
        n++;
    fsdp_optim **all = fsdp_arena_alloc(&scope->arena, n, sizeof(fsdp_optim *));
    if (!all)
        return fsdp_fail_memory(err, "the optimizers of a root");
    scope->optims = all;
    scope->optim_count = n;
    for (fsdp_optim *optim = scope->root->optims; optim; optim = optim->next)
        all[--n] = optim;
    return FSDP_OK;
}

/* --- scopes ----------------------------------------------------------------------------------- */

static fsdp_status check_opts(const fsdp_state_scope *scope, fsdp_error *err)
{
    const fsdp_state_opts *opts = &scope->opts;
    if (opts->broadcast_from_rank0 && !opts->full_state_dict)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "broadcast_from_rank0 needs full_state_dict: what rank 0 has is whole");
    if (opts->part < FSDP_STATE_ALL || opts->part > FSDP_STATE_OPTIM)
        return fsdp_fail(err, FSDP_ERR_USAGE, "there is no part %d of a state", (int)opts->part);
    if (opts->part == FSDP_STATE_OPTIM && scope->optim_count == 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "state of optimizers only was asked for, and there is no optimizer");
    return FSDP_OK;
}

fsdp_status fsdp_state_check_stored(const fsdp_state_opts *opts, fsdp_error *err)
{
    const char *option = opts->full_state_dict        ? "full_state_dict"
                         : opts->cpu_offload          ? "cpu_offload"
                         : opts->broadcast_from_rank0 ? "broadcast_from_rank0"
                                                      : NULL;
    if (!option)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "%s is for state in memory: of a checkpoint each rank has its part, and "
                     "save.kind says how it is stored",
                     option);
}

static fsdp_status check_submodules(const fsdp_state_scope *scope, fsdp_error *err)
{
    const fsdp_state_opts *opts = &scope->opts;
    for (size_t i = 0; opts->submodules && i < opts->submodule_count; i++) {
        const fsdp_state_opts one = {.submodules = &opts->submodules[i], .submodule_count = 1};
        bool found = false;
        for (size_t p = 0; p < scope->count && !found; p++) {
            const fsdp_param *param = scope->params[p].param;
            found = prefix_of(&one, param->name) >= 0;
            for (size_t a = 0; a < param->alias_count && !found; a++)
                found = prefix_of(&one, param->aliases[a]) >= 0;
        }
        if (!found)
            return fsdp_fail(err, FSDP_ERR_USAGE, "no parameter is below '%s'",
                             opts->submodules[i]);
    }
    return FSDP_OK;
}

static fsdp_status fill(fsdp_state_scope *scope, fsdp_error *err)
{
    const fsdp_model *model = scope->root->declared;
    scope->params = fsdp_alloc(model->count, sizeof *scope->params);
    if (!scope->params)
        return fsdp_fail_memory(err, "the names of a state dict");
    scope->count = model->count;
    for (size_t i = 0; i < model->count; i++)
        scope->params[i].param = model->params[i];
    FSDP_TRY(check_submodules(scope, err));
    FSDP_TRY(fsdp_sd_create(&scope->index, err));
    for (size_t i = 0; i < model->count; i++)
        FSDP_TRY(add_names(scope, &scope->params[i], err));
    for (size_t i = 0; i < scope->optim_count; i++)
        FSDP_TRY(add_optim(scope, scope->optims[i], err));
    return FSDP_OK;
}

fsdp_status fsdp_state_scope_init(fsdp_state_scope *scope, fsdp_root *root,
                                  const fsdp_state_opts *opts, fsdp_error *err)
{
    *scope = (fsdp_state_scope){.root = root, .is_unviewed = scope->is_unviewed};
    if (opts)
        scope->opts = *opts;
    if (!scope->opts.model_prefix)
        scope->opts.model_prefix = "model.";
    if (!scope->opts.optim_prefix)
        scope->opts.optim_prefix = "optim.";
    FSDP_TRY(list_optims(scope, err));
    FSDP_TRY(check_opts(scope, err));
    return fill(scope, err);
}

void fsdp_state_scope_release(fsdp_state_scope *scope)
{
    fsdp_sd_free(scope->index);
    fsdp_free(scope->params);
    fsdp_arena_release(&scope->arena);
    *scope = (fsdp_state_scope){0};
}

/* --- queries ---------------------------------------------------------------------------------- */

bool fsdp_state_has(const fsdp_state_scope *scope, const fsdp_state_param *param)
{
    if (param->count == 0)
        return false;
    if (param->param->is_buffer)
        return param->param->is_persistent;
    return param->param->requires_grad || !scope->opts.ignore_frozen;
}

fsdp_state_param *fsdp_state_find(const fsdp_state_scope *scope, const char *name, size_t size)
{
    int64_t at = fsdp_sd_find(scope->index, name, size);
    return at < 0 ? NULL : &scope->params[fsdp_sd_at(scope->index, (size_t)at)->value.as.i64];
}

const char *fsdp_state_behind(const char *name, size_t size, const char *prefix, const char *more,
                              size_t *rest_out)
{
    size_t first = strlen(prefix), both = first + strlen(more);
    if (size < both || memcmp(name, prefix, first) != 0 ||
        memcmp(name + first, more, both - first) != 0)
        return NULL;
    *rest_out = size - both;
    return name + both;
}
