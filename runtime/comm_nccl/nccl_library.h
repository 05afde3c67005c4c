/* Finds libnccl.so.2, which is opened at run time and never linked. */
#ifndef FSDP_NCCL_LIBRARY_H
#define FSDP_NCCL_LIBRARY_H

#include "runtime/comm_nccl/nccl_api.h"
#include <fsdp/status.h>

#define FSDP_NCCL_POINTER(name, result, parameters) result(*name) parameters;
typedef struct fsdp_nccl {
    FSDP_NCCL_REQUIRED(FSDP_NCCL_POINTER)
    FSDP_NCCL_OPTIONAL(FSDP_NCCL_POINTER)
    int version;               /* 22809: 2.28.9 */
    char version_text[40];
    const char *path;          /* of the library */
} fsdp_nccl;
#undef FSDP_NCCL_POINTER

/* The library that FSDP_NCCL_LIB names, else the first of the places of cuda_library.h; opened once, and kept
 * as long as the process. Any thread. FSDP_ERR_USAGE: there is none, or it is too old. */
fsdp_status fsdp_nccl_open(const fsdp_nccl **nccl_out, fsdp_error *err);
/* For --version: "NCCL 2.28.9 (/usr/lib/libnccl.so.2)", or "no NCCL: " and the reason. */
void fsdp_nccl_describe(char *out, size_t out_size);

#endif
