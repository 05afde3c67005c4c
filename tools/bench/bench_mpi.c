/* Ranks of mpirun, in a build with MPI. */
#include "tools/bench/bench.h"

#include <fsdp/ctl_mpi.h>

fsdp_status bench_mpi_begin(int deadline_ms, fsdp_ctl **ctl_out, fsdp_error *err)
{
    fsdp_ctl_mpi_set_deadline(deadline_ms);
    return fsdp_ctl_mpi_world(ctl_out, err);
}

bool bench_mpi_end(void)
{
    return fsdp_mpi_finalize();
}
