/*
 * Device "cuda": a GPU, of which a rank has one. device_cuda.c has its memory, its streams and its events
 * after the table of device.h; device_cuda_kernels.c gives the streams kernels. Built where FSDP_HAVE_CUDA
 * is defined. docs/gpu.md describes names, errors and the environment.
 *
 * In: the name of the device and its rank, from device.c; work from the rooms above, through the tables. Out:
 * work for CUDA's streams. A failure of CUDA stays in the stream that met it.
 */
#ifndef FSDP_DEVICE_CUDA_H
#define FSDP_DEVICE_CUDA_H

#include "runtime/device/device.h"

/* "cuda": GPU local_rank of this host, modulo their number; "cuda:N": that one. FSDP_ERR_USAGE names what is
 * missing, where it was sought and what to do. kernels: all but copy and fill, which are CUDA's own.
 * device_out NULL: finds out whether there are a driver and a GPU that is new enough, and opens nothing. */
fsdp_status fsdp_device_cuda(const char *name, const fsdp_device_rank *rank,
                             const fsdp_device_kernels *kernels, fsdp_device **device_out, fsdp_error *err);

extern const fsdp_device_kernels fsdp_device_cuda_kernels;     /* without copy and fill */

enum { FSDP_CUDA_DRIVER = 64 };
/* Spells what a runtime of CUDA (12090: 12.9) needs: "NVIDIA driver 530.30.02 or later". Returns the CUDA
 * version of the least such driver. */
int fsdp_cuda_needed_driver(int runtime, char spelled_out[FSDP_CUDA_DRIVER]);

/* --- for kernels ------------------------------------------------------------------------------ */

/* The cudaStream_t that the next kernel goes to; NULL: the stream has failed, and skips its work. */
void *fsdp_cuda_stream_begin(fsdp_stream *stream);
/* code: the cudaError_t that the launch of the kernel returned. kernel and size are for errors. */
void fsdp_cuda_stream_end(fsdp_stream *stream, const char *kernel, size_t size, int code);

/* Device memory for what kernels of the stream hand to each other, valid until the next call. NULL: there is
 * none, which is the stream's failure now. */
void *fsdp_cuda_stream_workspace(fsdp_stream *stream, size_t size);

#endif
