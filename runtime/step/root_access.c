/*
 * The files of this room, and the rooms above it, ask these things of a root: whether it may be called, its
 * first failure, values, the communicator of all ranks, memory and the end of reductions, copies of its
 * state, and the host's view. See step.h and root.h.
 */
#include "runtime/step/step_internal.h"
#include "base/core/given.h"
#include "statedict/sd/names.h"

#include <string.h>

/* === errors =================================================================================== */

/* A call at the wrong time fails alone; any other failure stays: every later call returns it, and so do the
 * calls of the other ranks, whose communicators are aborted. */

fsdp_status fsdp_root_ready(fsdp_root *root, fsdp_error *err)
{
    fsdp_error *reason = root->failure.status != FSDP_OK ? &root->failure : &root->pending;
    if (reason->status == FSDP_OK)
        return FSDP_OK;
    fsdp_status status = reason->status;
    if (err)
        *err = *reason;
    root->pending = (fsdp_error){0};
    return status;
}

fsdp_status fsdp_root_done(fsdp_root *root, const char *call, fsdp_status status, fsdp_error *err)
{
    fsdp_error here = {0};
    fsdp_error *reason = err ? err : &here;
    if (status == FSDP_OK)
        status = fsdp_context_check(root->context, reason);
    if (status == FSDP_OK || root->failure.status != FSDP_OK)
        return status;
    fsdp_error_prefix(reason, "%s", call);
    root->failure = *reason;
    root->failure.status = status;
    fsdp_world_note_failure(root->world, &root->failure);
    /* ranks that wait for this one in a collective return this reason */
    for (size_t i = 0; i < root->world->comm_count; i++)
        if (root->world->comms[i]->comm)
            fsdp_comm_abort(root->world->comms[i]->comm, &root->failure);
    return status;
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

/* === reductions =============================================================================== */

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

/* === saves in the background =============================================================== */

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

/* === the host's view ======================================================================= */

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
