/* Roots are created and freed: the structure is frozen, and gets its memory. See root.h. */
#include "runtime/step/step_internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/core/given.h"
#include "base/core/mem.h"
#include "statedict/ctl/ctl_backend.h"

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
    FSDP_TRY(fsdp_root_create_context(root, err));
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
    fsdp_status status = fsdp_root_check_structure(root, err);
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
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "the model has a root already; free that root and everything that was "
                         "made of it first");
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

/* For buffers and ignored parameters; groups release their own. */
static void forget_wholes(fsdp_model *model)
{
    for (size_t i = 0; i < model->count; i++)
        model->params[i]->shard = NULL;
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
    fsdp_root_leave_context(root);
    forget_wholes(root->model);
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
