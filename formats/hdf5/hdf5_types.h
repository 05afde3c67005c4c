/* HDF5 types of dtypes as bytes, for hdf5_view.c, which writes structures without libhdf5. */
#ifndef FSDP_HDF5_TYPES_H
#define FSDP_HDF5_TYPES_H

#include <fsdp/dtype.h>
#include <fsdp/status.h>
#include <stddef.h>
#include <stdint.h>

/* The attribute with the name of a type that HDF5 cannot express. */
#define FSDP_H5_MARK "dtype"

typedef struct fsdp_h5_type_bytes {
    size_t size;
    bool marked;               /* u8 or opaque in HDF5; the attribute names the type */
    unsigned char bytes[256];  /* the body of a datatype message */
} fsdp_h5_type_bytes;

fsdp_status fsdp_h5_type_encode(fsdp_dtype dtype, fsdp_h5_type_bytes *out, fsdp_error *err);

/* The checksum of HDF5's metadata (Jenkins' lookup3 with initial value 0), of hdf5_view.c. */
uint32_t fsdp_h5_checksum(const void *data, size_t size);

#endif
