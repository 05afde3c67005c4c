/* Roots enter contexts, leave them, and share them. See root.h. */
#include "runtime/step/step_internal.h"

#include "base/core/given.h"

static void enter(fsdp_root *root, fsdp_context *context)
{
    root->context = context;
    root->next_sharing = context->roots;
    context->roots = root;
}

fsdp_status fsdp_root_create_context(fsdp_root *root, fsdp_error *err)
{
    fsdp_context *context;
    fsdp_status status = fsdp_context_create(root->world, &context, err);
    if (context)
        enter(root, context);
    return status;
}

void fsdp_root_leave_context(fsdp_root *root)
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
    fsdp_root_leave_context(root);
    enter(root, shared);
    return FSDP_OK;
}
