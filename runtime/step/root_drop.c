/* Waits for the reductions of a root's step, and gives back all that the step has made. */
#include "runtime/step/step_internal.h"

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
}
