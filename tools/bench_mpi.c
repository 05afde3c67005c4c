/* Ranks of mpirun, in a build with MPI. */
#include "tools/bench.h"

#include <fsdp/ctl_mpi.h>

fsdp_status bench_mpi_begin(fsdp_ctl **ctl_out, fsdp_error *err)
{
    return fsdp_ctl_mpi_world(ctl_out, err);
}

bool bench_mpi_end(void)
{
    return fsdp_mpi_finalize();
}
