/*
 * A collective over messages: all members meet, which compares what they call, then its legs run. See
 * comm_message.h.
 */
#include "runtime/comm/comm_message.h"

fsdp_status fsdp_message_run(fsdp_comm *comm, const fsdp_collective *call,
                             const fsdp_comm_header *header, fsdp_error *err)
{
    message_group *group = comm->backend;
    fsdp_wire *wire = group->fabric->wire;
    fsdp_error failure = {.rank = comm->fabric->rank};
    fsdp_status status = wire->ops->may_call(wire, &failure);
    if (status == FSDP_OK)
        status = fsdp_message_meet(group, header, &failure);
    if (status == FSDP_OK)
        status = fsdp_message_run_steps(group, call, &failure);
    if (status == FSDP_OK)
        return FSDP_OK;
    failure.status = status;
    fsdp_message_fail(group, &failure, true, false);
    *err = failure;
    return status;
}
