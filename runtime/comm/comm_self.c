/* The transport of a world of one rank: comm.c runs all its collectives. */
#include "runtime/comm/comm_backend.h"

#include "base/core/mem.h"

static void close_self(fsdp_transport *transport)
{
    fsdp_free(transport);
}

static const fsdp_transport_ops self_ops = {
    .name = "self",
    .abilities = FSDP_COMM_AVG | FSDP_COMM_PREMUL_SUM | FSDP_COMM_POOL | FSDP_COMM_STREAMS,
    .comm_create = fsdp_comm_create,
    .alloc = fsdp_transport_alloc_pages,
    .dealloc = fsdp_transport_free_pages,
    .close = close_self,
};

fsdp_status fsdp_transport_self(fsdp_transport **transport_out, fsdp_error *err)
{
    fsdp_transport *transport = fsdp_alloc(1, sizeof *transport);
    if (!transport)
        return fsdp_fail_memory(err, "a transport of one rank");
    *transport = (fsdp_transport){.ops = &self_ops, .size = 1};
    *transport_out = transport;
    return FSDP_OK;
}
