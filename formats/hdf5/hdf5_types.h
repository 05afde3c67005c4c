/*
 * dtypes as HDF5 types, for those who write HDF5 structures without libhdf5 (hdf5_view.c).
 */
#ifndef FSDP_HDF5_TYPES_H
#define FSDP_HDF5_TYPES_H

#include <fsdp/dtype.h>
#include <fsdp/status.h>

/* The attribute that names a type that HDF5 cannot express. */
#define FSDP_H5_MARK "dtype"

typedef struct fsdp_h5_type_bytes {
    size_t size;
    bool marked;               /* u8 in HDF5, with the attribute */
    unsigned char bytes[256];  /* the body of a datatype message */
} fsdp_h5_type_bytes;

fsdp_status fsdp_h5_type_encode(fsdp_dtype dtype, fsdp_h5_type_bytes *out, fsdp_error *err);

#endif
