/*
 * Units and roots are created and freed: a unit chooses its parameters; with the root the structure is
 * frozen, compared between ranks, and gets its memory and its context. See unit.h and root.h.
 */
#include "runtime/step/step_internal.h"
#include "base/core/given.h"
#include "base/core/mem.h"
#include "base/text.h"
#include "kernels/kernels.h"
#include "runtime/param/nearest_name.h"
#include "statedict/ctl/ctl_backend.h"
#include "statedict/sd/layout_internal.h"

#include <stdlib.h>
#include <string.h>

/* === do all ranks do the same? ================================================================ */

/*
 * Ranks must declare the same model and make the same calls. They compare their declarations when the root is
 * made and, with --check, the events of every step when its backward ends. Without this, a difference shows
 * only at the first collective that does not match, which may come much later or never.
 */

/* --- comparison ------------------------------------------------------------------------------- */

static void describe_param(fsdp_text *text, const fsdp_param *param)
{
    fsdp_text_addf(text, "unit %s: %s %s [", param->unit ? param->unit->name : "(none)",
                   param->name, fsdp_dtype_name(param->dtype));
    for (int i = 0; i < param->ndim; i++)
        fsdp_text_addf(text, "%s%lld", i > 0 ? ", " : "", (long long)param->shape[i]);
    fsdp_text_addf(text, "] cut along dim %d%s\n", param->cut.dim,
                   param->requires_grad ? "" : ", frozen");
}

static void describe(fsdp_text *text, const fsdp_root *root)
{
    for (size_t i = 0; i < root->model->count; i++)
        describe_param(text, root->model->params[i]);
    for (size_t i = 0; i < root->unit_count; i++) {
        const fsdp_unit *unit = root->units[i];
        fsdp_text_addf(text, "unit %s: gathered as %s, reduced as %s, reshard_after_forward %d\n",
                       unit->name, fsdp_dtype_name(unit->opts.param_dtype),
                       fsdp_dtype_name(unit->opts.reduce_dtype),
                       unit->settings.reshard_after_forward);
    }
}

/* --- comparing -------------------------------------------------------------------------------- */

static fsdp_status find_other(fsdp_comm *comm, const fsdp_text *text, int *other_out,
                              fsdp_error *err)
{
    int size = fsdp_comm_size(comm);
    fsdp_hash mine = fsdp_kernels_get()->hash(text->data, text->size);
    fsdp_hash *all = fsdp_alloc((size_t)size, sizeof *all);
    const fsdp_collective call = {.kind = FSDP_ALL_GATHER,
                                  .dtype = FSDP_U8,
                                  .in = &mine,
                                  .out = all,
                                  .count = sizeof mine,
                                  .unit = "a comparison of all ranks"};
    if (!all)
        return fsdp_fail_memory(err, "what ranks compare");
    fsdp_status status = fsdp_comm_run(comm, &call, err);
    for (int i = 1; i < size && status == FSDP_OK && *other_out == 0; i++)
        if (memcmp(&all[i], &all[0], sizeof *all) != 0)
            *other_out = i;
    fsdp_free(all);
    return status;
}

/* Gives every rank the text of rank `from`; the caller frees it. */
static fsdp_status fetch(fsdp_comm *comm, int from, const fsdp_text *local, char **text_out,
                         fsdp_error *err)
{
    int64_t size = (int64_t)local->size;
    fsdp_collective call = {.kind = FSDP_BROADCAST,
                            .dtype = FSDP_I64,
                            .in = &size,
                            .out = &size,
                            .count = 1,
                            .root = from,
                            .unit = "a comparison of all ranks"};
    FSDP_TRY(fsdp_comm_run(comm, &call, err));
    char *text = fsdp_alloc((size_t)size + 1, 1);
    if (!text)
        return fsdp_fail_memory(err, "what ranks compare");
    if (fsdp_comm_rank(comm) == from && size > 0)
        memcpy(text, local->data, (size_t)size);
    call.dtype = FSDP_U8;
    call.in = call.out = text;
    call.count = size;
    fsdp_status status = size > 0 ? fsdp_comm_run(comm, &call, err) : FSDP_OK;
    if (status == FSDP_OK)
        *text_out = text;
    else
        fsdp_free(text);
    return status;
}

/* Moves both to the first line that differs. */
static void skip_common(const char **a, const char **b)
{
    for (;;) {
        size_t line = strcspn(*a, "\n");
        if (line == 0 || strncmp(*a, *b, line + 1) != 0)
            return;
        *a += line + 1;
        *b += line + 1;
    }
}

static fsdp_status report(fsdp_comm *comm, int other, const char *what, const char *first,
                          const char *second, fsdp_error *err)
{
    skip_common(&first, &second);
    const int *ranks = fsdp_comm_ranks(comm);
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "ranks %d and %d differ in %s: rank %d has '%.*s', rank %d has '%.*s'",
                     ranks[0], ranks[other], what, ranks[0], *first ? (int)strcspn(first, "\n") : 7,
                     *first ? first : "nothing", ranks[other],
                     *second ? (int)strcspn(second, "\n") : 7, *second ? second : "nothing");
}

static fsdp_status compare(fsdp_comm *comm, const char *what, const fsdp_text *text,
                           fsdp_error *err)
{
    int other = 0;
    char *first = NULL, *second = NULL;
    FSDP_TRY(find_other(comm, text, &other, err));
    if (other == 0)
        return FSDP_OK;
    fsdp_status status = fetch(comm, 0, text, &first, err);
    if (status == FSDP_OK)
        status = fetch(comm, other, text, &second, err);
    if (status == FSDP_OK)
        status = report(comm, other, what, first, second, err);
    fsdp_free(first);
    fsdp_free(second);
    return status;
}

/* --- moments of checks ------------------------------------------------------------------------ */

/* A rank without memory for the comparison aborts it, because the others wait in it. */
static fsdp_status compare_over(fsdp_root *root, const char *what, fsdp_text *text, fsdp_error *err)
{
    fsdp_ordered_comm *ordered;
    fsdp_error why = {0};
    fsdp_status status = fsdp_root_widest_comm(root, &ordered, &why);
    if (!ordered)
        return FSDP_OK;
    if (status == FSDP_OK && text->failed)
        status = fsdp_fail_memory(&why, "what ranks compare");
    if (status == FSDP_OK)
        status = compare(ordered->comm, what, text, &why);
    if (status == FSDP_ERR_LIMIT)
        fsdp_comm_abort(ordered->comm, &why);
    if (status != FSDP_OK && err)
        *err = why;
    return status;
}

/* Collective among the root's ranks: all have declared the same. */
static fsdp_status root_check_structure(fsdp_root *root, fsdp_error *err)
{
    fsdp_text text = {0};
    describe(&text, root);
    fsdp_status status = compare_over(root, "what they declare", &text, err);
    fsdp_text_release(&text);
    return status;
}

fsdp_status fsdp_root_check_events(fsdp_root *root, fsdp_error *err)
{
    if (!root->world->parts.check)
        return FSDP_OK;
    fsdp_status status = compare_over(root, "what they did in this step", &root->events, err);
    root->events.size = 0;
    return status;
}

/* === contexts ================================================================================= */

static void enter(fsdp_root *root, fsdp_context *context)
{
    root->context = context;
    root->next_sharing = context->roots;
    context->roots = root;
}

/* A context of the root's own. Also when this fails, root_leave_context ends it. */
static fsdp_status root_create_context(fsdp_root *root, fsdp_error *err)
{
    fsdp_context *context;
    fsdp_status status = fsdp_context_create(root->world, &context, err);
    if (context)
        enter(root, context);
    return status;
}

/* The context is freed when no other root shares it. Accepts a root without. */
static void root_leave_context(fsdp_root *root)
{
    fsdp_context *context = root->context;
    if (!context)
        return;
    fsdp_root **at = &context->roots;
    while (*at != root)
        at = &(*at)->next_sharing;
    *at = root->next_sharing;
    root->next_sharing = NULL;
    root->context = NULL;
    if (!context->roots)
        fsdp_context_free(context);
}

static fsdp_status check_shareable(const fsdp_root *root, const fsdp_root *with, fsdp_error *err)
{
    const fsdp_context *local = root->context;
    bool is_in_step = root->is_in_forward || root->is_in_backward || local->finalizing;
    if (root->world != with->world)
        return fsdp_fail(err, FSDP_ERR_USAGE, "roots of two worlds cannot share a context");
    if (is_in_step || root->step > 0 || local->order_count > 0 || local->roots->next_sharing)
        return fsdp_fail(err, FSDP_ERR_USAGE, "a context is shared once, before the first step");
    for (size_t i = 0; i < root->group_count; i++)
        if (!fsdp_group_is_at_rest(root->groups[i]))
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "a context is shared while every unit is sharded: unit %s is "
                             "gathered, or keeps memory of a gather (fsdp_unit_reshard, "
                             "fsdp_root_reset)",
                             root->groups[i]->name);
    return FSDP_OK;
}

/* Before its first step a root has only shards and buffers. */
static void move_blocks(fsdp_root *root, fsdp_context *to)
{
    fsdp_memory_pool *from = &root->context->memory;
    const fsdp_memory *counts = &from->counts;
    for (size_t i = 0; i < root->group_count; i++)
        fsdp_group_enter(root->groups[i], to);
    if (root->buffers)
        fsdp_memory_pass(from, &to->memory, root->buffers, to->streams[FSDP_STREAM_COMPUTE]);
    for (int i = 0; i < FSDP_MEMORY_CLASSES; i++)
        fsdp_memory_count(&to->memory, (fsdp_memory_class)i, counts->now[i]);
}

fsdp_status fsdp_root_share_context(fsdp_root *root, fsdp_root *with, fsdp_error *err)
{
    FSDP_NEED(err, root, with);
    fsdp_context *local = root->context, *shared = with->context;
    if (local == shared)
        return FSDP_OK;
    FSDP_TRY(check_shareable(root, with, err));
    FSDP_TRY(fsdp_context_sync(local, err));
    FSDP_TRY(fsdp_root_size_inputs(root, shared, err));
    fsdp_context_flush_gather(local);
    fsdp_context_drain(local);
    root->has_post_optim_event = false;
    move_blocks(root, shared);
    root_leave_context(root);
    enter(root, shared);
    return FSDP_OK;
}

/* === units ==================================================================================== */

/* --- groups ----------------------------------------------------------------------------------- */

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

/* Each mesh of its parameters is a group. */
static fsdp_status plan_groups(fsdp_unit *unit, fsdp_error *err)
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
    return has_custom ? fsdp_unit_check_custom(unit, err) : FSDP_OK;
}

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

static fsdp_status fill_unit(fsdp_unit *unit, const char *const *prefixes, size_t n,
                             const fsdp_unit_opts *opts, fsdp_error *err)
{
    FSDP_TRY(copy_opts(unit, opts, err));
    FSDP_TRY(copy_members(unit, prefixes, n, err));
    FSDP_TRY(join_names(unit, err));
    set_defaults(unit);
    FSDP_TRY(take_params(unit, err));
    return unit_check_meshes(unit, err);
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

/* Its groups were released with the root. */
static void free_unit(fsdp_unit *unit)
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

static fsdp_status create_unit(fsdp_model *model, const char *const *prefixes, size_t n,
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
    model->free_unit = free_unit;
    fsdp_status status = fill_unit(unit, prefixes, n, &opts, err);
    if (status != FSDP_OK) {
        free_unit(unit);
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
    return create_unit(model, prefixes, n, opts, unit_out, err);
}

fsdp_status fsdp_unit_create(fsdp_model *model, const char *prefix, const fsdp_unit_opts *opts,
                             fsdp_unit **unit_out, fsdp_error *err)
{
    FSDP_NEED(err, model, prefix);
    return fsdp_unit_create_list(model, &prefix, 1, opts, unit_out, err);
}

/* The unit of the parameters that no other unit has. */
static fsdp_status create_root_unit(fsdp_model *model, const fsdp_unit_opts *opts,
                                    fsdp_unit **unit_out, fsdp_error *err)
{
    const char *all = "";
    return create_unit(model, &all, 1, opts, unit_out, err);
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

/* === roots ==================================================================================== */

/* --- memory of parameters --------------------------------------------------------------------- */

/* A buffer, or a parameter that units ignore, is whole on every rank. */
static size_t whole_bytes(const fsdp_param *param)
{
    const fsdp_box box = fsdp_box_whole(param->ndim, param->shape);
    return (size_t)fsdp_box_count(&box) * fsdp_dtype_size(param->dtype);
}

static fsdp_status measure_wholes(const fsdp_model *model, size_t *count_out, int64_t *bytes_out,
                                  fsdp_error *err)
{
    int64_t with_slack = 0;
    *count_out = 0;
    *bytes_out = 0;
    for (size_t i = 0; i < model->count; i++) {
        if (model->params[i]->group)
            continue;
        int64_t bytes = (int64_t)whole_bytes(model->params[i]);
        if (fsdp_add_overflow(with_slack, bytes, &with_slack) ||
            fsdp_add_overflow(with_slack, FSDP_MEMORY_ALIGNMENT, &with_slack))
            return fsdp_fail(err, FSDP_ERR_LIMIT,
                             "buffers up to '%s' have more bytes than can be counted",
                             model->params[i]->name);
        *bytes_out += bytes;
        ++*count_out;
    }
    return FSDP_OK;
}

static fsdp_status allocate_wholes(fsdp_root *root, fsdp_error *err)
{
    const fsdp_model *model = root->model;
    size_t count, at = 0;
    int64_t bytes;
    FSDP_TRY(measure_wholes(model, &count, &bytes, err));
    if (count == 0)
        return FSDP_OK;
    const fsdp_memory_request request = {.class = FSDP_MEMORY_SHARD,
                                         .stream = root->context->streams[FSDP_STREAM_COMPUTE],
                                         .size = (size_t)bytes,
                                         .slack = count * FSDP_MEMORY_ALIGNMENT,
                                         .owner = "buffers"};
    FSDP_TRY(fsdp_memory_take_zeroed(&root->context->memory, &request, &root->buffers, err));
    for (size_t i = 0; i < model->count; i++) {
        fsdp_param *param = model->params[i];
        if (param->group)
            continue;
        param->shard = (unsigned char *)root->buffers->data + at;
        at += fsdp_memory_align(whole_bytes(param));
    }
    return FSDP_OK;
}

/* --- creating --------------------------------------------------------------------------------- */

static fsdp_status make_root_unit(fsdp_root *root, const fsdp_unit_opts *opts, fsdp_error *err)
{
    FSDP_TRY(create_root_unit(root->model, opts, &root->unit, err));
    root->unit->is_root = true;
    char *name = fsdp_strndup("root", 4);
    if (!name)
        return fsdp_fail_memory(err, "a unit");
    fsdp_free(root->unit->name);
    root->unit->name = name;
    return FSDP_OK;
}

/* The position of the unit's first parameter in the model. */
static size_t place_of(const fsdp_unit *unit)
{
    const fsdp_model *model = unit->model;
    for (size_t i = 0; i < model->count; i++)
        if (model->params[i]->unit == unit)
            return i;
    return model->count;
}

static int compare_units(const void *a, const void *b)
{
    const fsdp_unit *x = *(fsdp_unit *const *)a, *y = *(fsdp_unit *const *)b;
    if (x->is_root != y->is_root)
        return x->is_root ? -1 : 1;
    size_t at = place_of(x), other = place_of(y);
    return at < other ? -1 : at > other;
}

static fsdp_status list_units(fsdp_root *root, fsdp_error *err)
{
    const fsdp_model *model = root->model;
    root->units = fsdp_alloc(model->unit_count, sizeof(fsdp_unit *));
    if (!root->units)
        return fsdp_fail_memory(err, "the units of a root");
    root->unit_count = model->unit_count;
    memcpy(root->units, model->units, root->unit_count * sizeof(fsdp_unit *));
    qsort(root->units, root->unit_count, sizeof(fsdp_unit *), compare_units);
    for (size_t i = 0; i < root->unit_count; i++) {
        fsdp_unit *unit = root->units[i];
        unit->root = root;
        int *reshard = &unit->settings.reshard_after_forward;
        if (*reshard == FSDP_RESHARD_AUTO)
            *reshard = unit->is_root ? FSDP_RESHARD_NEVER : FSDP_RESHARD_ALWAYS;
    }
    return FSDP_OK;
}

static fsdp_status list_groups(fsdp_root *root, fsdp_error *err)
{
    size_t count = 0;
    for (size_t i = 0; i < root->unit_count; i++)
        count += root->units[i]->group_count;
    root->groups = fsdp_alloc(count, sizeof(fsdp_group *));
    if (!root->groups)
        return fsdp_fail_memory(err, "the groups of a root");
    for (size_t i = 0; i < root->unit_count; i++)
        for (size_t g = 0; g < root->units[i]->group_count; g++)
            root->groups[root->group_count++] = &root->units[i]->groups[g];
    return FSDP_OK;
}

static fsdp_status plan(fsdp_root *root, const fsdp_unit_opts *opts, fsdp_error *err)
{
    FSDP_TRY(make_root_unit(root, opts, err));
    FSDP_TRY(root_create_context(root, err));
    FSDP_TRY(list_units(root, err));
    for (size_t i = 0; i < root->unit_count; i++)
        FSDP_TRY(plan_groups(root->units[i], err));
    return list_groups(root, err);
}

static fsdp_status connect(fsdp_root *root, fsdp_error *err)
{
    for (size_t i = 0; i < root->group_count; i++)
        FSDP_TRY(fsdp_group_connect(root->groups[i], err));
    return FSDP_OK;
}

static fsdp_status add_to_view(fsdp_root *root, const fsdp_block *block, fsdp_error *err)
{
    if (!block || block->is_staging)
        return FSDP_OK;
    const fsdp_viewed_block viewed = {
        .data = block->data, .size = block->room, .is_buffers = block == root->buffers};
    return fsdp_host_view_add(&root->view, viewed, err);
}

static fsdp_status allocate(fsdp_root *root, fsdp_error *err)
{
    root->view.device = root->context->device;
    for (size_t i = 0; i < root->group_count; i++) {
        FSDP_TRY(fsdp_group_allocate(root->groups[i], err));
        FSDP_TRY(add_to_view(root, root->groups[i]->shards, err));
    }
    FSDP_TRY(allocate_wholes(root, err));
    FSDP_TRY(add_to_view(root, root->buffers, err));
    return fsdp_root_size_inputs(root, root->context, err);
}

/* Ranks agree after each phase: no rank waits in a collective of the next one for a rank that failed. */
static fsdp_status build(fsdp_root *root, const fsdp_unit_opts *opts, fsdp_error *err)
{
    fsdp_ctl *ctl = fsdp_world_ctl(root->world);
    FSDP_TRY(fsdp_ctl_agree(ctl, plan(root, opts, err), err));
    FSDP_TRY(fsdp_ctl_agree(ctl, connect(root, err), err));
    FSDP_TRY(fsdp_ctl_agree(ctl, allocate(root, err), err));
    fsdp_status status = root_check_structure(root, err);
    if (status == FSDP_ERR_PEER) /* it compares in a collective, which names no public call */
        fsdp_error_prefix(err, "%s", ctl->public_call);
    return status;
}

/* Leaves the model as it was, so that the caller may try again with other options. */
static void give_up(fsdp_root *root)
{
    fsdp_model *model = root->model;
    fsdp_unit *unit = root->unit;
    fsdp_root_free(root);
    if (!unit)
        return;
    model->unit_count--; /* the unit `root` is the last */
    free_unit(unit);
}

static fsdp_status create(fsdp_model *model, const fsdp_unit_opts *opts, fsdp_root **root_out,
                          fsdp_error *err)
{
    fsdp_root *root = fsdp_alloc(1, sizeof *root);
    if (!root) /* the other ranks wait in the first agreement */
        return fsdp_ctl_agree(fsdp_world_ctl(model->world), fsdp_fail_memory(err, "a root"), err);
    root->model = root->declared = fsdp_model_hold(model);
    root->world = model->world;
    root->is_last_backward = true;
    root->handle.root = root;
    fsdp_status status = build(root, opts, err);
    model->root = root;
    if (status != FSDP_OK) {
        give_up(root);
        return status;
    }
    *root_out = root;
    return FSDP_OK;
}

fsdp_status fsdp_root_create(fsdp_model *model, const fsdp_unit_opts *opts, fsdp_root **root_out,
                             fsdp_error *err)
{
    FSDP_NEED(err, model, root_out);
    if (model->root)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "the model already has a root; free that root and everything made from it first");
    fsdp_ctl *ctl = fsdp_world_ctl(model->world);
    const char *outer = fsdp_ctl_begin_public(ctl, "fsdp_root_create");
    fsdp_status status = create(model, opts, root_out, err);
    fsdp_ctl_end_public(ctl, outer);
    return status;
}

/* --- freeing ---------------------------------------------------------------------------------- */

static void give(fsdp_root *root, fsdp_block *block)
{
    fsdp_stream *compute = root->context->streams[FSDP_STREAM_COMPUTE];
    if (block)
        fsdp_memory_give(&root->context->memory, block, compute->device->ops->record(compute));
}

/* Other roots may keep the context: nothing in it may point to this one. */
static void leave_step(fsdp_root *root)
{
    fsdp_root_wait_reductions(root);
    fsdp_root_drop_all(root);
    if (root->context->finalizing == root)
        root->context->finalizing = NULL;
}

/* The streams are drained. */
static void release_clipping(fsdp_root *root)
{
    fsdp_device *device = root->context->device;
    const fsdp_clipping *clipping = &root->clipping;
    if (clipping->numbers)
        device->ops->dealloc(device, clipping->numbers,
                             clipping->number_count * sizeof *clipping->numbers);
    if (clipping->totals)
        device->ops->dealloc_staging(device, clipping->totals,
                                     FSDP_KEPT_NORMS * sizeof *clipping->totals);
}

static void release_groups(fsdp_unit *unit)
{
    for (size_t i = 0; i < unit->group_count; i++)
        fsdp_group_release(&unit->groups[i]);
    fsdp_free(unit->groups);
    unit->groups = NULL;
    unit->group_count = 0;
}

fsdp_root *fsdp_root_hold(fsdp_root *root)
{
    root->holders++;
    return root;
}

void fsdp_root_free(fsdp_root *root)
{
    if (!root || root->holders-- > 0)
        return;
    if (root->units) {
        leave_step(root);
        give(root, root->buffers);
    }
    if (root->context) {
        fsdp_context_drain(root->context); /* queued work reads memory of groups */
        release_clipping(root);
        fsdp_memory_return_external(&root->context->memory);
    }
    if (root->view.device)
        fsdp_host_view_release(&root->view);
    for (size_t i = 0; i < root->group_count; i++)
        give(root, root->groups[i]->shards);
    for (size_t i = 0; i < root->unit_count; i++) {
        release_groups(root->units[i]);
        root->units[i]->root = NULL;
    }
    root_leave_context(root);
    /* of buffers and ignored parameters; groups release their own */
    for (size_t i = 0; i < root->model->count; i++)
        root->model->params[i]->shard = NULL;
    root->model->root = NULL;
    fsdp_text_release(&root->events);
    fsdp_free(root->groups);
    fsdp_free(root->units);
    fsdp_model_free(root->model);
    if (root->end_owner)
        root->end_owner(root->owner);
    fsdp_free(root);
}

/* --- contents --------------------------------------------------------------------------------- */

fsdp_unit *fsdp_root_unit(fsdp_root *root)
{
    if (!root)
        return NULL;
    return root->unit;
}

size_t fsdp_root_unit_count(const fsdp_root *root)
{
    if (!root)
        return 0;
    return root->unit_count;
}

fsdp_unit *fsdp_root_unit_at(const fsdp_root *root, size_t i)
{
    if (!root)
        return NULL;
    return i < root->unit_count ? root->units[i] : NULL;
}

fsdp_memory fsdp_root_memory(const fsdp_root *root)
{
    if (!root)
        return (fsdp_memory){0};
    return root->context->memory.counts;
}

void fsdp_root_reset_peak(fsdp_root *root)
{
    if (!root)
        return;
    fsdp_memory *counts = &root->context->memory.counts;
    memcpy(counts->peak, counts->now, sizeof counts->peak);
    counts->total_peak = counts->total_now;
}
