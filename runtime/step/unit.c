/* Units are created and freed; their groups and their settings. See unit.h. */
#include "runtime/step/step_internal.h"
#include "base/core/given.h"
#include "base/core/mem.h"
#include "base/text.h"
#include "runtime/param/nearest_name.h"
#include "statedict/sd/layout_internal.h"

#include <math.h>
#include <string.h>

/* === groups =================================================================================== */

static fsdp_dim_names names_of(const fsdp_unit *unit)
{
    return (fsdp_dim_names){
        .unit = unit->name, .shard = unit->opts.shard_dims, .replicate = unit->opts.replicate_dims};
}

/* Have the meshes of its parameters the dims that its options name? */
static fsdp_status unit_check_meshes(const fsdp_unit *unit, fsdp_error *err)
{
    const fsdp_dim_names names = names_of(unit);
    int reshard = unit->settings.reshard_after_forward;
    for (size_t i = 0; i < unit->param_count; i++)
        FSDP_TRY(fsdp_mesh_check_dims(unit->params[i]->cut.mesh, &names, reshard, err));
    return unit->param_count == 0 ? fsdp_mesh_check_dims(unit->opts.mesh, &names, reshard, err)
                                  : FSDP_OK;
}

/* A unit of several groups has no custom collective.
 * Before the root is made there are no groups: then this is checked again. */
static fsdp_status unit_check_custom(const fsdp_unit *unit, fsdp_error *err)
{
    if (unit->group_count <= 1)
        return FSDP_OK;
    return fsdp_fail(
        err, FSDP_ERR_USAGE,
        "unit %s has %zu groups of parameters, but a custom collective serves only one", unit->name,
        unit->group_count);
}

static size_t count_meshes(const fsdp_unit *unit)
{
    size_t count = 0;
    for (size_t i = 0; i < unit->param_count; i++) {
        bool is_new = true;
        for (size_t j = 0; j < i && is_new; j++)
            is_new = !fsdp_mesh_equal(unit->params[i]->cut.mesh, unit->params[j]->cut.mesh);
        count += is_new;
    }
    return count;
}

static fsdp_status plan_group(fsdp_unit *unit, const fsdp_mesh *mesh, fsdp_error *err)
{
    const fsdp_dim_names names = names_of(unit);
    fsdp_group *group = &unit->groups[unit->group_count++];
    group->unit = unit;
    group->name = unit->name;
    group->settings = &unit->settings;
    group->context = unit->root->context;
    group->events = unit->root->world->parts.check ? &unit->root->events : NULL;
    FSDP_TRY(fsdp_group_take_params(group, unit->params, unit->param_count, mesh, err));
    return fsdp_group_choose_mesh(group, mesh, &names, err);
}

fsdp_status fsdp_unit_plan_groups(fsdp_unit *unit, fsdp_error *err)
{
    const fsdp_group_settings *settings = &unit->settings;
    unit->groups = fsdp_alloc(count_meshes(unit), sizeof *unit->groups);
    if (!unit->groups)
        return fsdp_fail_memory(err, unit->name);
    for (size_t i = 0; i < unit->param_count; i++)
        if (!unit->params[i]->group)
            FSDP_TRY(plan_group(unit, unit->params[i]->cut.mesh, err));
    bool has_custom =
        settings->custom_gather || settings->custom_reduce || settings->custom_all_reduce;
    return has_custom ? unit_check_custom(unit, err) : FSDP_OK;
}

void fsdp_unit_release_groups(fsdp_unit *unit)
{
    for (size_t i = 0; i < unit->group_count; i++)
        fsdp_group_release(&unit->groups[i]);
    fsdp_free(unit->groups);
    unit->groups = NULL;
    unit->group_count = 0;
}

/* === settings ================================================================================= */

/* Is `inner` the unit `outer`, or of a module below it? */
static bool is_within(const fsdp_unit *inner, const fsdp_unit *outer)
{
    if (inner == outer || outer->is_root)
        return true;
    for (size_t i = 0; i < inner->member_count; i++)
        for (size_t o = 0; o < outer->member_count; o++)
            if (fsdp_name_is_below(inner->prefixes[i], outer->prefixes[o]))
                return true;
    return false;
}

typedef struct unit_range {
    fsdp_unit *outer;
    size_t next;
    bool recurse, is_begun;
} unit_range;

/* First the unit itself, then with recurse those below it. */
static fsdp_unit *next_unit(unit_range *range)
{
    const fsdp_model *model = range->outer->model;
    if (!range->is_begun) {
        range->is_begun = true;
        return range->outer;
    }
    while (range->recurse && range->next < model->unit_count) {
        fsdp_unit *unit = model->units[range->next++];
        if (unit != range->outer && is_within(unit, range->outer))
            return unit;
    }
    return NULL;
}

/* Inside a step, collectives under way use the buffers and the communicator that would change. */
static fsdp_status check_outside(const fsdp_unit *unit, const char *what, fsdp_error *err)
{
    const fsdp_root *root = unit->root;
    if (!root || (!root->is_in_forward && !root->is_in_backward))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE, "unit %s: %s cannot change inside a forward or backward",
                     unit->name, what);
}

static fsdp_status check_comm_memory(const fsdp_unit *unit, bool from_comm, fsdp_error *err)
{
    FSDP_TRY(check_outside(unit, "the memory of collectives", err));
    if (from_comm && (unit->settings.custom_gather || unit->settings.custom_reduce))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "unit %s has a custom collective, which provides its own memory",
                         unit->name);
    return FSDP_OK;
}

static fsdp_status check_setting(const fsdp_unit *unit, fsdp_unit_setting setting, int value,
                                 fsdp_error *err)
{
    if (setting == FSDP_UNIT_REDUCE_SCATTER_MAX_INPUT_BUFFERS && value < 1)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "unit %s: the number of reduce-scatter inputs in flight is at least 1, not %d",
            unit->name, value);
    if (setting == FSDP_UNIT_SEPARATE_REDUCE_SCATTER_GROUP)
        return check_outside(unit, "the group that reduces", err);
    if (setting == FSDP_UNIT_ALLOCATE_MEMORY_FROM_PROCESS_GROUP)
        return check_comm_memory(unit, value, err);
    return FSDP_OK;
}

static fsdp_status separate_reduce(fsdp_unit *unit, bool is_separate, fsdp_error *err)
{
    unit->settings.is_separate = is_separate;
    for (size_t g = 0; g < unit->group_count; g++)
        FSDP_TRY(fsdp_group_separate_reduce(&unit->groups[g], err));
    return FSDP_OK;
}

static fsdp_status set(fsdp_unit *unit, fsdp_unit_setting setting, int value, fsdp_error *err)
{
    fsdp_group_settings *settings = &unit->settings;
    bool on = value != 0;
    switch (setting) {
    case FSDP_UNIT_REQUIRES_GRADIENT_SYNC:
        settings->reduces = settings->all_reduces = on;
        return FSDP_OK;
    case FSDP_UNIT_REQUIRES_ALL_REDUCE: settings->all_reduces = on; return FSDP_OK;
    case FSDP_UNIT_RESHARD_AFTER_FORWARD:
        settings->reshard_after_forward = on ? FSDP_RESHARD_ALWAYS : FSDP_RESHARD_NEVER;
        return FSDP_OK;
    case FSDP_UNIT_RESHARD_AFTER_BACKWARD: settings->reshards_after_backward = on; return FSDP_OK;
    case FSDP_UNIT_UNSHARD_IN_BACKWARD: settings->unshards_in_backward = on; return FSDP_OK;
    case FSDP_UNIT_KEEP_UNSHARDED_STORAGE: settings->keeps_storage = on; return FSDP_OK;
    case FSDP_UNIT_UNSHARD_ASYNC_OP: unit->is_async = on; return FSDP_OK;
    case FSDP_UNIT_FORCE_SUM_REDUCTION_FOR_COMMS: settings->forces_sum = on; return FSDP_OK;
    case FSDP_UNIT_REDUCE_SCATTER_UNUSED_PARAMS: settings->reduces_unused = on; return FSDP_OK;
    case FSDP_UNIT_REDUCE_SCATTER_MAX_INPUT_BUFFERS: unit->max_inputs = value; return FSDP_OK;
    case FSDP_UNIT_SEPARATE_REDUCE_SCATTER_GROUP: return separate_reduce(unit, on, err);
    case FSDP_UNIT_ALLOCATE_MEMORY_FROM_PROCESS_GROUP:
        settings->takes_comm_memory = on;
        return FSDP_OK;
    }
    return fsdp_fail(err, FSDP_ERR_USAGE, "unit %s has no setting %d", unit->name, (int)setting);
}

fsdp_status fsdp_unit_set(fsdp_unit *unit, fsdp_unit_setting setting, int value, bool recurse,
                          fsdp_error *err)
{
    FSDP_NEED(err, unit);
    unit_range checked = {.outer = unit, .recurse = recurse}, changed = checked;
    for (const fsdp_unit *at; (at = next_unit(&checked)) != NULL;)
        FSDP_TRY(check_setting(at, setting, value, err));
    for (fsdp_unit *at; (at = next_unit(&changed)) != NULL;)
        FSDP_TRY(set(at, setting, value, err));
    return FSDP_OK;
}

fsdp_status fsdp_unit_set_gradient_divide_factor(fsdp_unit *unit, double factor, fsdp_error *err)
{
    FSDP_NEED(err, unit);
    if (!(factor > 0) || isinf(factor))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "unit %s: a divide factor is a positive number, not %g", unit->name,
                         factor);
    unit->settings.divide_factor = factor;
    return FSDP_OK;
}

/* --- prefetch --------------------------------------------------------------------------------- */

static fsdp_status set_list(fsdp_unit *unit, fsdp_unit *const *units, size_t n,
                            fsdp_unit_list *list, fsdp_error *err)
{
    for (size_t i = 0; i < n; i++)
        if (units[i]->model != unit->model)
            return fsdp_fail(err, FSDP_ERR_USAGE, "unit %s cannot prefetch %s of another model",
                             unit->name, units[i]->name);
    fsdp_unit **copy = fsdp_realloc(list->units, n + 1, sizeof *copy);
    if (!copy)
        return fsdp_fail_memory(err, "a list of units");
    if (n > 0)
        memcpy(copy, units, n * sizeof *copy);
    *list = (fsdp_unit_list){copy, n};
    return FSDP_OK;
}

fsdp_status fsdp_unit_set_prefetch(fsdp_unit *unit, fsdp_hook hook, fsdp_unit *const *units,
                                   size_t n, fsdp_error *err)
{
    FSDP_NEED(err, unit);
    if (n > 0)
        FSDP_NEED(err, units);
    for (size_t i = 0; i < n; i++)
        FSDP_NEED(err, units[i]);
    if (hook == FSDP_HOOK_PRE_FORWARD)
        return set_list(unit, units, n, &unit->forward_prefetch, err);
    if (hook == FSDP_HOOK_PRE_BACKWARD)
        return set_list(unit, units, n, &unit->backward_prefetch, err);
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "unit %s: units are gathered ahead by pre_forward or pre_backward only",
                     unit->name);
}

/* --- plug-ins --------------------------------------------------------------------------------- */

static fsdp_status set_custom(fsdp_unit *unit, const fsdp_custom_collective *custom,
                              fsdp_custom_collective **slot, fsdp_error *err)
{
    FSDP_TRY(check_outside(unit, "a custom collective", err));
    FSDP_TRY(unit_check_custom(unit, err));
    fsdp_custom_collective *copy = NULL;
    if (custom) {
        copy = fsdp_alloc(1, sizeof *copy);
        if (!copy)
            return fsdp_fail_memory(err, "a custom collective");
        *copy = *custom;
    }
    fsdp_free(*slot);
    *slot = copy;
    if (unit->root) /* no request asks for buffers of the earlier collective again */
        fsdp_memory_return_external(&unit->root->context->memory);
    return FSDP_OK;
}

fsdp_status fsdp_unit_set_custom_collective(fsdp_unit *unit, fsdp_collective_kind kind,
                                            const fsdp_custom_collective *custom, fsdp_error *err)
{
    FSDP_NEED(err, unit);
    if (kind == FSDP_ALL_GATHER)
        return set_custom(unit, custom, &unit->settings.custom_gather, err);
    if (kind == FSDP_REDUCE_SCATTER)
        return set_custom(unit, custom, &unit->settings.custom_reduce, err);
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "unit %s: only all-gather and reduce-scatter can be replaced", unit->name);
}

void fsdp_unit_set_all_reduce_hook(fsdp_unit *unit, fsdp_all_reduce_hook hook, void *context)
{
    if (!unit)
        return;
    unit->settings.all_reduce_hook = hook;
    unit->settings.all_reduce_hook_context = context;
}

/* === units ==================================================================================== */

/* --- choosing parameters ---------------------------------------------------------------------- */

static bool belongs(const fsdp_unit *unit, const fsdp_param *param)
{
    for (size_t i = 0; i < unit->member_count; i++)
        if (fsdp_name_is_below(param->name, unit->prefixes[i]))
            return true;
    return false;
}

fsdp_status fsdp_option_check_float(const char *option, fsdp_dtype dtype, fsdp_error *err)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(dtype);
    if (dtype == FSDP_DTYPE_NONE || (info && info->is_float))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE, "%s cannot be %s, which is not a floating type", option,
                     fsdp_dtype_name(dtype));
}

static fsdp_status choose_dtype(const fsdp_unit *unit, fsdp_param *param, fsdp_error *err)
{
    const fsdp_unit_opts *opts = &unit->opts;
    fsdp_dtype dtype = FSDP_DTYPE_NONE;
    if (opts->param_dtype_of)
        dtype = opts->param_dtype_of(opts->context, param);
    if (dtype == FSDP_DTYPE_NONE)
        dtype = opts->param_dtype;
    if (dtype != FSDP_DTYPE_NONE && dtype != opts->param_dtype && dtype != param->dtype)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "param_dtype_of gives %s for '%s', which is neither the unit's param_dtype "
            "nor the parameter's own",
            fsdp_dtype_name(dtype), param->name);
    param->data_dtype = param->dtype;
    if (dtype != FSDP_DTYPE_NONE && fsdp_dtype_describe(param->dtype)->is_float)
        param->data_dtype = dtype;
    bool is_asked = param->asked_grad_dtype != FSDP_DTYPE_NONE;
    param->grad_dtype = is_asked ? param->asked_grad_dtype : param->data_dtype;
    return FSDP_OK;
}

static fsdp_status choose_cut(const fsdp_unit *unit, fsdp_param *param, fsdp_error *err)
{
    const fsdp_unit_opts *opts = &unit->opts;
    fsdp_param_place cut = {.mesh = opts->mesh};
    if (opts->placement)
        opts->placement(opts->context, param, &cut);
    if (cut.dim < 0)
        cut.dim += param->ndim;
    if (cut.dim < 0 || cut.dim >= param->ndim)
        return fsdp_fail(err, FSDP_ERR_USAGE, "cannot cut '%s' of %d dims along dim %d",
                         param->name, param->ndim, cut.dim);
    cut.mesh = fsdp_mesh_hold(cut.mesh ? cut.mesh : opts->mesh);
    param->cut = cut;
    return FSDP_OK;
}

static fsdp_status take_param(fsdp_unit *unit, fsdp_param *param, fsdp_error *err)
{
    if (unit->opts.ignore && unit->opts.ignore(unit->opts.context, param)) {
        param->is_ignored = true;
        param->ignored_by = unit;
        return FSDP_OK;
    }
    if (!fsdp_grow(&unit->params, &unit->param_room, unit->param_count + 1, sizeof(fsdp_param *)))
        return fsdp_fail_memory(err, unit->name);
    unit->params[unit->param_count++] = param;
    param->unit = unit;
    FSDP_TRY(choose_dtype(unit, param, err));
    return choose_cut(unit, param, err);
}

static fsdp_status take_params(fsdp_unit *unit, fsdp_error *err)
{
    const fsdp_model *model = unit->model;
    for (size_t i = 0; i < model->count; i++) {
        fsdp_param *param = model->params[i];
        if (!param->unit && !param->is_buffer && !param->is_ignored && belongs(unit, param))
            FSDP_TRY(take_param(unit, param, err));
    }
    return FSDP_OK;
}

/* --- creating --------------------------------------------------------------------------------- */

static fsdp_status join_names(fsdp_unit *unit, fsdp_error *err)
{
    fsdp_text text = {0};
    for (size_t i = 0; i < unit->member_count; i++)
        fsdp_text_addf(&text, "%s%s", i > 0 ? ", " : "", unit->prefixes[i]);
    fsdp_text_add(&text, "", 1);
    if (text.failed)
        return fsdp_fail_memory(err, "a unit");
    unit->name = fsdp_strndup(text.data, strlen(text.data));
    fsdp_text_release(&text);
    return unit->name ? FSDP_OK : fsdp_fail_memory(err, "a unit");
}

static fsdp_status copy_text(const char *text, char **copy_out, fsdp_error *err)
{
    if (!text)
        return FSDP_OK;
    *copy_out = fsdp_strndup(text, strlen(text));
    return *copy_out ? FSDP_OK : fsdp_fail_memory(err, "a unit");
}

static fsdp_status copy_opts(fsdp_unit *unit, const fsdp_unit_opts *opts, fsdp_error *err)
{
    unit->opts = *opts;
    unit->opts.mesh = fsdp_mesh_hold(opts->mesh);
    FSDP_TRY(copy_text(opts->shard_dims, &unit->shard_dims, err));
    FSDP_TRY(copy_text(opts->replicate_dims, &unit->replicate_dims, err));
    unit->opts.shard_dims = unit->shard_dims;
    unit->opts.replicate_dims = unit->replicate_dims;
    return FSDP_OK;
}

static fsdp_status copy_members(fsdp_unit *unit, const char *const *prefixes, size_t n,
                                fsdp_error *err)
{
    unit->prefixes = fsdp_alloc(n, sizeof *unit->prefixes);
    if (!unit->prefixes)
        return fsdp_fail_memory(err, "a unit");
    for (; unit->member_count < n; unit->member_count++)
        FSDP_TRY(copy_text(prefixes[unit->member_count], &unit->prefixes[unit->member_count], err));
    if (n == 1)
        return FSDP_OK;
    unit->to_run = fsdp_alloc(n, sizeof *unit->to_run);
    unit->to_return = fsdp_alloc(n, sizeof *unit->to_return);
    unit->has_run = fsdp_alloc(n, sizeof *unit->has_run);
    bool has_all = unit->to_run && unit->to_return && unit->has_run;
    return has_all ? FSDP_OK : fsdp_fail_memory(err, "a unit");
}

static fsdp_status check_dtypes(const fsdp_unit_opts *opts, fsdp_error *err)
{
    FSDP_TRY(fsdp_option_check_float("param_dtype", opts->param_dtype, err));
    FSDP_TRY(fsdp_option_check_float("reduce_dtype", opts->reduce_dtype, err));
    return fsdp_option_check_float("output_dtype", opts->output_dtype, err);
}

/* A second unit of the same module would have no parameters. */
static fsdp_status check_is_free(const fsdp_model *model, const char *prefix, fsdp_error *err)
{
    for (size_t i = 0; i < model->unit_count; i++)
        for (size_t m = 0; m < model->units[i]->member_count; m++)
            if (strcmp(model->units[i]->prefixes[m], prefix) == 0)
                return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' is already in unit '%s'", prefix,
                                 model->units[i]->name);
    return FSDP_OK;
}

/* A mistyped prefix would make an empty unit and leave its parameters to the root. A module that has only
 * buffers, or parameters that it shares with others, is valid. */
static fsdp_status check_prefix(const fsdp_model *model, const char *prefix, fsdp_error *err)
{
    fsdp_nearest_name nearest = {.wanted = prefix};
    bool is_there = prefix[0] == '\0';
    for (size_t i = 0; i < model->count && !is_there; i++)
        is_there = fsdp_param_is_below(model->params[i], prefix);
    if (is_there)
        return FSDP_OK;
    for (size_t i = 0; i < model->count; i++) {
        fsdp_nearest_name_offer_modules(&nearest, model->params[i]);
        fsdp_nearest_name_offer_param(&nearest, model->params[i]);
    }
    if (nearest.name[0] == '\0')
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "unit '%s' has no parameters; declare them before the unit", prefix);
    return fsdp_fail(
        err, FSDP_ERR_USAGE,
        "unit '%s' has no parameters: no name is equal or below it, the nearest one is '%s'",
        prefix, nearest.name);
}

static fsdp_status check_opts(const fsdp_model *model, const char *const *prefixes, size_t n,
                              const fsdp_unit_opts *opts, fsdp_error *err)
{
    const char *first = n > 0 && prefixes[0][0] != '\0' ? prefixes[0] : "root";
    if (n < 1)
        return fsdp_fail(err, FSDP_ERR_USAGE, "a unit has at least one member");
    if (model->root)
        return fsdp_fail(err, FSDP_ERR_USAGE, "cannot make unit '%s': the root exists", first);
    if (!opts->mesh)
        return fsdp_fail(err, FSDP_ERR_USAGE, "unit '%s' has no mesh", first);
    if (opts->reshard_after_forward < FSDP_RESHARD_NEVER)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "unit '%s': reshard_after_forward is %d; it is AUTO, NEVER, ALWAYS or a "
                         "number of ranks",
                         first, opts->reshard_after_forward);
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < i; j++)
            if (strcmp(prefixes[i], prefixes[j]) == 0)
                return fsdp_fail(err, FSDP_ERR_USAGE, "unit '%s' has the member '%s' twice", first,
                                 prefixes[i]);
    fsdp_status status = check_dtypes(opts, err);
    if (status != FSDP_OK)
        fsdp_error_prefix(err, "unit '%s'", first);
    for (size_t i = 0; i < n && status == FSDP_OK; i++)
        status = check_prefix(model, prefixes[i], err);
    for (size_t i = 0; i < n && status == FSDP_OK; i++)
        status = check_is_free(model, prefixes[i], err);
    return status;
}

static void set_defaults(fsdp_unit *unit)
{
    unit->settings =
        (fsdp_group_settings){.reduces = true,
                              .all_reduces = true,
                              .reshards_after_backward = true,
                              .unshards_in_backward = true,
                              .offloads = unit->opts.offload,
                              .reshard_after_forward = unit->opts.reshard_after_forward,
                              .reduce_dtype = unit->opts.reduce_dtype};
    unit->max_inputs = 1;
    unit->handle.unit = unit;
}

static fsdp_status fill(fsdp_unit *unit, const char *const *prefixes, size_t n,
                        const fsdp_unit_opts *opts, fsdp_error *err)
{
    FSDP_TRY(copy_opts(unit, opts, err));
    FSDP_TRY(copy_members(unit, prefixes, n, err));
    FSDP_TRY(join_names(unit, err));
    set_defaults(unit);
    FSDP_TRY(take_params(unit, err));
    return unit_check_meshes(unit, err);
}

static fsdp_status create(fsdp_model *model, const char *const *prefixes, size_t n,
                          const fsdp_unit_opts *given, fsdp_unit **unit_out, fsdp_error *err)
{
    const fsdp_unit_opts opts = given ? *given : (fsdp_unit_opts){0};
    FSDP_TRY(check_opts(model, prefixes, n, &opts, err));
    if (!fsdp_grow(&model->units, &model->unit_room, model->unit_count + 1, sizeof(fsdp_unit *)))
        return fsdp_fail_memory(err, "a unit");
    fsdp_unit *unit = fsdp_alloc(1, sizeof *unit);
    if (!unit)
        return fsdp_fail_memory(err, "a unit");
    unit->model = model;
    model->free_unit = fsdp_unit_free;
    fsdp_status status = fill(unit, prefixes, n, &opts, err);
    if (status != FSDP_OK) {
        fsdp_unit_free(unit);
        return status;
    }
    model->units[model->unit_count++] = unit;
    if (unit_out)
        *unit_out = unit;
    return FSDP_OK;
}

fsdp_status fsdp_unit_create_list(fsdp_model *model, const char *const *prefixes, size_t n,
                                  const fsdp_unit_opts *opts, fsdp_unit **unit_out, fsdp_error *err)
{
    FSDP_NEED(err, model, prefixes);
    for (size_t i = 0; i < n; i++) {
        FSDP_NEED(err, prefixes[i]);
        if (prefixes[i][0] == '\0')
            return fsdp_fail(
                err, FSDP_ERR_USAGE,
                "the prefix is empty: fsdp_root_create makes the unit of the remaining parameters");
    }
    return create(model, prefixes, n, opts, unit_out, err);
}

fsdp_status fsdp_unit_create(fsdp_model *model, const char *prefix, const fsdp_unit_opts *opts,
                             fsdp_unit **unit_out, fsdp_error *err)
{
    FSDP_NEED(err, model, prefix);
    return fsdp_unit_create_list(model, &prefix, 1, opts, unit_out, err);
}

fsdp_status fsdp_unit_create_root(fsdp_model *model, const fsdp_unit_opts *opts,
                                  fsdp_unit **unit_out, fsdp_error *err)
{
    const char *all = "";
    return create(model, &all, 1, opts, unit_out, err);
}

/* Leaves the parameters as they were before the unit, so that another one may take them. */
static void release_params(const fsdp_unit *unit)
{
    for (size_t i = 0; i < unit->param_count; i++) {
        fsdp_param *param = unit->params[i];
        param->unit = NULL;
        fsdp_mesh_free((fsdp_mesh *)param->cut.mesh);
        param->cut = (fsdp_param_place){0};
        param->data_dtype = param->dtype;
        param->grad_dtype = param->asked_grad_dtype;
    }
    for (size_t i = 0; i < unit->model->count; i++) {
        fsdp_param *param = unit->model->params[i];
        if (param->ignored_by != unit)
            continue;
        param->is_ignored = false;
        param->ignored_by = NULL;
    }
}

void fsdp_unit_free(fsdp_unit *unit)
{
    if (!unit)
        return;
    release_params(unit);
    fsdp_mesh_free((fsdp_mesh *)unit->opts.mesh);
    for (size_t i = 0; i < unit->member_count; i++)
        fsdp_free(unit->prefixes[i]);
    fsdp_free(unit->prefixes);
    fsdp_free(unit->name);
    fsdp_free(unit->shard_dims);
    fsdp_free(unit->replicate_dims);
    fsdp_free(unit->params);
    fsdp_free(unit->forward_prefetch.units);
    fsdp_free(unit->backward_prefetch.units);
    fsdp_free(unit->settings.custom_gather);
    fsdp_free(unit->settings.custom_reduce);
    fsdp_free(unit->settings.custom_all_reduce);
    fsdp_free(unit->to_run);
    fsdp_free(unit->to_return);
    fsdp_free(unit->has_run);
    fsdp_free(unit);
}

const char *fsdp_unit_name(const fsdp_unit *unit)
{
    if (!unit)
        return NULL;
    return unit->name;
}

size_t fsdp_unit_param_count(const fsdp_unit *unit)
{
    if (!unit)
        return 0;
    return unit->param_count;
}

fsdp_param *fsdp_unit_param_at(const fsdp_unit *unit, size_t i)
{
    if (!unit)
        return NULL;
    return i < unit->param_count ? unit->params[i] : NULL;
}

fsdp_dtype fsdp_unit_input_dtype(const fsdp_unit *unit, fsdp_dtype dtype)
{
    if (!unit)
        return dtype;
    const fsdp_dtype_info *info = fsdp_dtype_describe(dtype);
    bool casts = !unit->opts.keep_input_dtype && unit->opts.param_dtype != FSDP_DTYPE_NONE;
    return casts && info && info->is_float ? unit->opts.param_dtype : dtype;
}

fsdp_dtype fsdp_unit_output_dtype(const fsdp_unit *unit, fsdp_dtype dtype)
{
    if (!unit)
        return dtype;
    const fsdp_dtype_info *info = fsdp_dtype_describe(dtype);
    bool casts = unit->opts.output_dtype != FSDP_DTYPE_NONE;
    return casts && info && info->is_float ? unit->opts.output_dtype : dtype;
}

void fsdp_cast(void *to, fsdp_dtype to_type, const void *from, fsdp_dtype from_type, size_t n)
{
    if (!to || !from)
        return;
    const fsdp_rect line = fsdp_rect_line(to, to_type, from, from_type, (int64_t)n);
    fsdp_rects_copy(&line, n > 0);
}
