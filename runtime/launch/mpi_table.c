/* The table by which libfsdp finds this library's functions. See mpi_library.h. */
#include "runtime/launch/mpi_library.h"

#include <fsdp/ctl_mpi.h>

#include "runtime/bootstrap/mpi_process.h"
#include "runtime/comm_message/p2p_mpi.h"

const fsdp_mpi_functions fsdp_mpi_table = {
    .version = FSDP_MPI_TABLE_VERSION,
    .set_deadline = fsdp_ctl_mpi_set_deadline,
    .ctl_world = fsdp_ctl_mpi_world,
    .ctl_again = fsdp_ctl_mpi_again,
    .p2p = fsdp_p2p_mpi,
    .finalize = fsdp_mpi_finalize,
};
