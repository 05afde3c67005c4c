/* Messages of collectives over MPI (in libfsdp_mpi). See wire.h. */
#ifndef FSDP_WIRE_MPI_H
#define FSDP_WIRE_MPI_H

#include "runtime/comm_message/p2p.h"
#include <fsdp/ctl.h>

/* Collective over ctl, which is one of ctl_mpi.h. */
fsdp_status fsdp_wire_mpi(fsdp_ctl *ctl, fsdp_wire **wire_out, fsdp_error *err);

#endif
