/* The LZF filter of h5py: HDF5 filter 32000. Decoding only. */
#ifndef FSDP_HDF5_LZF_H
#define FSDP_HDF5_LZF_H

#include "formats/hdf5/hdf5_internal.h"

enum { FSDP_H5_LZF = 32000 };
extern const H5Z_class2_t fsdp_h5_lzf_filter;

typedef enum fsdp_lzf_result { FSDP_LZF_OK, FSDP_LZF_NO_ROOM, FSDP_LZF_DAMAGED } fsdp_lzf_result;

/* Decodes all of data. */
fsdp_lzf_result fsdp_lzf_decode(const unsigned char *data, size_t size, unsigned char *out, size_t room,
                                size_t *size_out);

#endif
