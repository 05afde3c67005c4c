/*
 * The two functions by which libhdf5 of other programs loads the zstd filter. With hdf5_zstd.c
 * they are the whole of build/plugin/libfsdp_h5zstd.so, to which HDF5_PLUGIN_PATH points.
 */
#include "formats/hdf5/hdf5_internal.h"

#include <H5PLextern.h>

H5PL_type_t H5PLget_plugin_type(void)
{
    return H5PL_TYPE_FILTER;
}

const void *H5PLget_plugin_info(void)
{
    return &fsdp_h5_zstd_filter;
}
