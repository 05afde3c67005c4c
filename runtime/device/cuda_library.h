/* Finds libraries of NVIDIA, which are opened at run time and never linked. */
#ifndef FSDP_CUDA_LIBRARY_H
#define FSDP_CUDA_LIBRARY_H

#include <fsdp/status.h>

typedef struct fsdp_cuda_library {
    const char *variable;      /* of the environment: names the file, and no other place is searched */
    const char *const *files;  /* names, the best first, after the last NULL */
    const char *const *packages;       /* folders that Python's packages make, after the last NULL */
    const char *advice;        /* for errors: how to get it */
} fsdp_cuda_library;

/* Opens the first that is there, in this order: the variable's, the loader's path, the folders of CUDA,
 * Python's packages. FSDP_ERR_NOT_FOUND: there is none; FSDP_ERR_USAGE: it cannot be loaded. Any thread. */
fsdp_status fsdp_cuda_library_open(const fsdp_cuda_library *which, void **library_out, fsdp_error *err);

#endif
