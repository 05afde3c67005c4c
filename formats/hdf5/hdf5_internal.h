/*
 * The private interface of the hdf5_*.c files: the lock around libhdf5. Only these files include hdf5.h;
 * hdf5_file.h is their public face.
 *
 * One use of the library is: fsdp_h5_enter, libhdf5 calls, fsdp_h5_leave.
 */
#ifndef FSDP_HDF5_INTERNAL_H
#define FSDP_HDF5_INTERNAL_H

#include "formats/hdf5/hdf5_file.h"

#include <fsdp/box.h>
#include <hdf5.h>

/* --- the library (hdf5_file.c) --- */

typedef struct fsdp_h5_call {
    H5E_auto2_t print;         /* the error handler of the program, restored by leave */
    void *print_data;
} fsdp_h5_call;

/* Takes the process-wide lock and silences libhdf5 until fsdp_h5_leave. After a failure the lock is not
 * held. */
fsdp_status fsdp_h5_enter(fsdp_h5_call *call, fsdp_error *err);
void fsdp_h5_leave(const fsdp_h5_call *call);

/* --- the zstd filter (hdf5_zstd.c) --- */

enum { FSDP_H5_ZSTD = 32015 };
extern const H5Z_class2_t fsdp_h5_zstd_filter;

#endif
