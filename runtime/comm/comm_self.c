/* The fabric of one rank alone: comm.c does all its collectives. */
#include "runtime/comm/comm_backend.h"

#include "base/mem.h"

static fsdp_status create_comm(fsdp_fabric *fabric, const int *ranks, int size,
                               fsdp_comm **comm_out, fsdp_error *err)
{
    if (size != 1 || ranks[0] != 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "a group of %d ranks in a world of one", size);
    return fsdp_comm_create(fabric, ranks, size, NULL, comm_out, err);
}

static void close_self(fsdp_fabric *fabric)
{
    fsdp_free(fabric);
}

static const fsdp_fabric_ops self_ops = {
    .name = "self",
    .abilities = FSDP_COMM_AVG | FSDP_COMM_PREMUL_SUM | FSDP_COMM_POOL,
    .comm_create = create_comm,
    .alloc = fsdp_fabric_alloc_pages,
    .dealloc = fsdp_fabric_free_pages,
    .close = close_self,
};

fsdp_status fsdp_fabric_self(fsdp_fabric **fabric_out, fsdp_error *err)
{
    fsdp_fabric *fabric = fsdp_alloc(1, sizeof *fabric);
    if (!fabric)
        return fsdp_fail_memory(err, "a fabric of one rank");
    *fabric = (fsdp_fabric){.ops = &self_ops, .size = 1};
    *fabric_out = fabric;
    return FSDP_OK;
}
