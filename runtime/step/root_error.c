/*
 * Errors of a root. A call at the wrong time fails alone; any other failure stays: every later call returns
 * it, and so do the calls of the other ranks, whose communicators are aborted. See root.h.
 */
#include "runtime/step/step_internal.h"

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
