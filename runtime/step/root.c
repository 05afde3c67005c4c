/*
 * Roots are created and freed: the structure is frozen, compared between ranks, and gets its memory and its
 * context. See root.h.
 */
#include "runtime/step/step_internal.h"
#include "base/core/given.h"
#include "base/core/mem.h"
#include "kernels/kernels.h"
#include "statedict/ctl/ctl_backend.h"
#include "statedict/sd/names.h"

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

/* --- parameters without a gradient ------------------------------------------------------------ */

/* Frozen, ignored and unused ones that the unit expects are right. */
static bool lacks_grad(fsdp_param *param)
{
    const fsdp_param *held = param->flat ? param->flat : param;
    bool lacks = param->requires_grad && held->group && !param->had_grad && !param->was_reported &&
                 !held->group->settings->reduces_unused;
    param->had_grad = false;
    return lacks;
}

void fsdp_root_report_lacking(const fsdp_root *root)
{
    const fsdp_model *declared = root->declared;
    fsdp_text text = {0};
    for (size_t i = 0; i < declared->count; i++) {
        fsdp_param *param = declared->params[i];
        if (!lacks_grad(param))
            continue;
        param->was_reported = true;
        fsdp_text_addf(&text, "%s'%s'", text.size > 0 ? ", " : "", param->name);
    }
    if (text.size > 0 && !text.failed)
        fsdp_launch_note(root->world->rank, "trainable parameters got no gradient in a backward",
                         text.data);
    fsdp_text_release(&text);
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

static int most_inputs(const fsdp_root *root)
{
    int most = 1;
    for (size_t i = 0; i < root->unit_count; i++)
        if (root->units[i]->max_inputs > most)
            most = root->units[i]->max_inputs;
    return most;
}

fsdp_status fsdp_root_size_inputs(const fsdp_root *root, fsdp_context *context, fsdp_error *err)
{
    int most = most_inputs(root);
    for (const fsdp_root *at = context->roots; at; at = at->next_sharing)
        if (most_inputs(at) > most)
            most = most_inputs(at);
    return fsdp_context_size_inputs(context, most, err);
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

/* === the end of a step ======================================================================== */

/* Waits for the reductions of a root's step, and gives back all that the step has made. */

static void move_place(fsdp_group *group, size_t from, size_t to)
{
    for (size_t i = 0; i < group->order_count; i++)
        if (group->order[i] == from)
            group->order[i] = to;
}

/* Removes the forwards of this root from the context's order. Forwards of other roots move up: several
 * roots on one context may take turns, so that a forward of some root is always pending. */
static void clear_order(fsdp_root *root)
{
    fsdp_context *context = root->context;
    size_t kept = 0;
    for (size_t i = 0; i < context->order_count; i++) {
        fsdp_group *group = context->order[i];
        if (group->unit->root == root)
            continue;
        move_place(group, i, kept);
        context->order[kept++] = group;
    }
    context->order_count = kept;
}

void fsdp_root_wait_reductions(fsdp_root *root)
{
    for (size_t i = 0; i < root->group_count; i++) {
        fsdp_group *group = root->groups[i];
        fsdp_group_wait_reduced(group);
        fsdp_group_cancel_gather(group);
        group->order_count = 0;
    }
    clear_order(root);
    fsdp_context_limit_inputs(root->context, 0);
    fsdp_context_give_all_reduced(root->context);
}

void fsdp_root_drop_all(fsdp_root *root)
{
    fsdp_context_flush_gather(root->context);
    for (size_t i = 0; i < root->group_count; i++)
        fsdp_group_drop(root->groups[i]);
    root->clipping.is_pending = false;
}

/* === parameters without values ================================================================ */

/*
 * Parameters that have no values yet, for programs that ask for an error when one is used (a model on
 * PyTorch's meta device raises one). See fsdp_root_expect_values.
 */

fsdp_status fsdp_root_expect_values(fsdp_root *root, fsdp_error *err)
{
    FSDP_NEED(err, root);
    const fsdp_model *model = root->model;
    FSDP_TRY(fsdp_root_ready(root, err));
    if (root->is_in_forward || root->is_in_backward)
        return fsdp_fail(err, FSDP_ERR_USAGE, "values are expected between steps, not inside one");
    if (root->declared != root->model)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "the parameters of this root are in flat parameters, which get values as "
                         "a whole; call fsdp_root_init or fsdp_root_load");
    for (size_t i = 0; i < model->count; i++)
        model->params[i]->lacks_value = !model->params[i]->is_buffer;
    return FSDP_OK;
}

void fsdp_root_note_values(const fsdp_root *root)
{
    for (size_t i = 0; i < root->model->count; i++)
        root->model->params[i]->lacks_value = false;
}

static fsdp_status report_missing(const char *call, const fsdp_name_list *names, fsdp_error *err)
{
    fsdp_text text = {0};
    (void)fsdp_names_append(names, "missing", &text);
    fsdp_status status = fsdp_fail(err, FSDP_ERR_USAGE,
                                   "%s came before all parameters had values%s; fsdp_root_init, "
                                   "fsdp_root_set_state and fsdp_root_load set them",
                                   call, text.data ? text.data : "");
    fsdp_text_release(&text);
    return status;
}

fsdp_status fsdp_root_check_values(const fsdp_root *root, const fsdp_unit *unit, const char *call,
                                   fsdp_error *err)
{
    const fsdp_model *model = root->model;
    fsdp_name_list names = {0};
    fsdp_status status = FSDP_OK;
    for (size_t i = 0; i < model->count && status == FSDP_OK; i++) {
        const fsdp_param *param = model->params[i];
        if (param->lacks_value && (!unit || param->unit == unit) &&
            !fsdp_names_add(&names, param->name, strlen(param->name)))
            status = fsdp_fail_memory(err, param->name);
    }
    if (status == FSDP_OK && names.count > 0)
        status = report_missing(call, &names, err);
    fsdp_names_release(&names);
    return status;
}

/* === the communicator of all ranks ============================================================ */

/* The largest mesh of the root contains the others. */
static const fsdp_mesh *widest_mesh(const fsdp_root *root)
{
    const fsdp_group *widest = NULL;
    for (size_t i = 0; i < root->group_count; i++) {
        const fsdp_group *group = root->groups[i];
        if (!widest || fsdp_mesh_size(group->roles.mesh) > fsdp_mesh_size(widest->roles.mesh))
            widest = group;
    }
    return widest ? widest->params[0]->cut.mesh : root->unit->opts.mesh;
}

fsdp_ordered_comm *fsdp_root_find_widest(const fsdp_root *root)
{
    const fsdp_mesh *mesh = widest_mesh(root);
    return fsdp_world_find_comm(root->world, mesh, 0, fsdp_mesh_ndim(mesh) - 1);
}

fsdp_status fsdp_root_widest_comm(fsdp_root *root, fsdp_ordered_comm **ordered_out, fsdp_error *err)
{
    *ordered_out = fsdp_root_find_widest(root);
    return *ordered_out ? root->context->device->ops->sync((*ordered_out)->last, err) : FSDP_OK;
}

fsdp_status fsdp_root_world_comm(fsdp_root *root, const char *call, fsdp_ordered_comm **ordered_out,
                                 fsdp_error *err)
{
    *ordered_out = NULL;
    if (root->world->size == 1)
        return FSDP_OK;
    FSDP_TRY(fsdp_root_widest_comm(root, ordered_out, err));
    if (*ordered_out && (*ordered_out)->size == root->world->size)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE, "%s needs a mesh of all ranks (fsdp_world_connect)",
                     call);
}

int fsdp_ordered_comm_position(const fsdp_ordered_comm *ordered, int rank)
{
    int i = 0;
    while (i < ordered->size && ordered->ranks[i] != rank)
        i++;
    return i;
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

static fsdp_status create_root_unit(fsdp_root *root, const fsdp_unit_opts *opts, fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_create_root(root->model, opts, &root->unit, err));
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
    FSDP_TRY(create_root_unit(root, opts, err));
    FSDP_TRY(root_create_context(root, err));
    FSDP_TRY(list_units(root, err));
    for (size_t i = 0; i < root->unit_count; i++)
        FSDP_TRY(fsdp_unit_plan_groups(root->units[i], err));
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
    fsdp_unit_free(unit);
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
        fsdp_unit_release_groups(root->units[i]);
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

/* --- saves in the background --------------------------------------------------------------------- */

void fsdp_root_add_copies(fsdp_root *root, fsdp_root_copies *copies)
{
    copies->next = root->copies;
    root->copies = copies;
}

void fsdp_root_remove_copies(fsdp_root *root, const fsdp_root_copies *copies)
{
    fsdp_root_copies **at = &root->copies;
    while (*at && *at != copies)
        at = &(*at)->next;
    if (*at)
        *at = copies->next;
}

void fsdp_root_wait_copied(const fsdp_root *root, fsdp_stream *stream)
{
    for (const fsdp_root_copies *at = root->copies; at; at = at->next)
        stream->device->ops->wait(stream, at->last(at->context));
}

/* --- the host's view ---------------------------------------------------------------------------- */

fsdp_status fsdp_root_load_view(fsdp_root *root, fsdp_error *err)
{
    fsdp_stream *compute = root->context->streams[FSDP_STREAM_COMPUTE];
    FSDP_TRY(fsdp_host_view_load(&root->view, compute, err));
    return fsdp_context_check_comms(root->context, err);
}

fsdp_status fsdp_root_load_buffers(fsdp_root *root, fsdp_error *err)
{
    fsdp_stream *compute = root->context->streams[FSDP_STREAM_COMPUTE];
    FSDP_TRY(fsdp_host_view_load_buffers(&root->view, compute, err));
    return fsdp_context_check_comms(root->context, err);
}

fsdp_status fsdp_root_store_view(fsdp_root *root, fsdp_error *err)
{
    fsdp_stream *compute = root->context->streams[FSDP_STREAM_COMPUTE];
    fsdp_root_wait_copied(root, compute);
    return fsdp_host_view_store(&root->view, compute, err);
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
