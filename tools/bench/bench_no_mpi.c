/* Ranks of mpirun, in a build without MPI: there are no ranks to join. */
#include "tools/bench/bench.h"

fsdp_status bench_mpi_begin(int deadline_ms, fsdp_ctl **ctl_out, fsdp_error *err)
{
    (void)deadline_ms, (void)ctl_out;
    return fsdp_fail(
        err, FSDP_ERR_USAGE,
        "mpirun started this program, but this build has no MPI; use --world-size for threads");
}

bool bench_mpi_end(void)
{
    return true;
}
