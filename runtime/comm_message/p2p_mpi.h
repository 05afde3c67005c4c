/* Messages of collectives over MPI (in libfsdp_mpi). See p2p.h. */
#ifndef FSDP_P2P_MPI_H
#define FSDP_P2P_MPI_H

#include "runtime/comm_message/p2p.h"
#include <fsdp/ctl.h>

/* Collective over ctl, which is one of ctl_mpi.h. */
fsdp_status fsdp_p2p_mpi(fsdp_ctl *ctl, fsdp_p2p **p2p_out, fsdp_error *err);

#endif
