/*
 * The transport over NCCL, for the launcher: memory of GPUs moves by NCCL. All that is not a tensor of a
 * stream goes through another transport, which it owns (inner). The implementation is described in
 * comm_nccl.h.
 */
#ifndef FSDP_TRANSPORT_NCCL_H
#define FSDP_TRANSPORT_NCCL_H

#include "runtime/comm/comm_backend.h"
#include "runtime/device/device.h"

typedef struct fsdp_nccl_spec {
    fsdp_ctl *ctl;
    fsdp_transport *inner;     /* taken on success only */
    fsdp_device *device;       /* whose streams are CUDA's; outlives the transport */
    bool check;                /* compares the headers of all calls before they are given to NCCL */
    bool shares_gpu;           /* the GPU of a rank is that of another one, too */
    uint64_t host;             /* equal on ranks of one host */
    int direct_ranks;          /* up to so many ranks the watches talk to all others; 0: 64 */
    int creation_ms;           /* how long NCCL may take to make and connect a group; 0: ten minutes */
} fsdp_nccl_spec;

/* Collective over ctl, with the same outcome on all ranks. FSDP_ERR_USAGE: no NCCL, or no GPU. */
fsdp_status fsdp_transport_nccl(const fsdp_nccl_spec *spec, fsdp_transport **transport_out, fsdp_error *err);

#endif
