/*
 * libfsdp_mpi as libfsdp sees it: libfsdp links no MPI, and opens that library when ranks were started by
 * mpirun. All it needs is in one table.
 */
#ifndef FSDP_MPI_LIBRARY_H
#define FSDP_MPI_LIBRARY_H

#include "runtime/comm_message/p2p.h"
#include <fsdp/ctl.h>
#include <fsdp/status.h>

enum { FSDP_MPI_TABLE_VERSION = 4 };

/* libfsdp_mpi exports it as fsdp_mpi_table. Versions differ between libraries of two installations. */
typedef struct fsdp_mpi_functions {
    int version;
    void (*set_deadline)(int milliseconds);
    fsdp_status (*ctl_world)(fsdp_ctl **ctl_out, fsdp_error *err);
    fsdp_status (*ctl_again)(fsdp_ctl *ctl, fsdp_ctl **ctl_out, fsdp_error *err);   /* collective over ctl */
    fsdp_status (*p2p)(fsdp_ctl *ctl, fsdp_p2p **p2p_out, fsdp_error *err); /* collective over ctl */
    bool (*finalize)(void);
} fsdp_mpi_functions;

FSDP_API extern const fsdp_mpi_functions fsdp_mpi_table;

/* Opens libfsdp_mpi: next to this library or program, in ../lib, then where the loader looks. It stays
 * open. */
fsdp_status fsdp_mpi_library_open(const fsdp_mpi_functions **functions_out, fsdp_error *err);

#endif
