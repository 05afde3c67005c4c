/* Compares runtime/comm_nccl/nccl_api.h with NCCL's own header: it compiles when they agree. */
#include <nccl.h>

typedef ncclResult_t fsdp_nccl_result;
typedef ncclDataType_t fsdp_nccl_dtype;
typedef ncclRedOp_t fsdp_nccl_op;
typedef ncclScalarResidence_t fsdp_nccl_residence;
typedef ncclUniqueId fsdp_nccl_id;
typedef ncclConfig_t fsdp_nccl_config;
typedef ncclComm_t fsdp_nccl_comm;
typedef cudaStream_t fsdp_nccl_stream;
#define FSDP_NCCL_TYPES
#include "runtime/comm_nccl/nccl_api.h"

#define EQUAL(ours, theirs) _Static_assert((long long)(ours) == (long long)(theirs), #ours)
#define SAME_TYPE(name, result, parameters)                                                      \
    _Static_assert(                                                                              \
        __builtin_types_compatible_p(__typeof__(&nccl##name), __typeof__(result(*) parameters)), \
        "nccl" #name);

FSDP_NCCL_REQUIRED(SAME_TYPE)
FSDP_NCCL_OPTIONAL(SAME_TYPE)

EQUAL(FSDP_NCCL_SUCCESS, ncclSuccess);
EQUAL(FSDP_NCCL_CUDA_ERROR, ncclUnhandledCudaError);
EQUAL(FSDP_NCCL_INVALID_ARGUMENT, ncclInvalidArgument);
EQUAL(FSDP_NCCL_INVALID_USAGE, ncclInvalidUsage);
EQUAL(FSDP_NCCL_REMOTE_ERROR, ncclRemoteError);
EQUAL(FSDP_NCCL_IN_PROGRESS, ncclInProgress);
EQUAL(FSDP_NCCL_SUM, ncclSum);
EQUAL(FSDP_NCCL_MAX, ncclMax);
EQUAL(FSDP_NCCL_AVG, ncclAvg);
EQUAL(FSDP_NCCL_I8, ncclInt8);
EQUAL(FSDP_NCCL_U8, ncclUint8);
EQUAL(FSDP_NCCL_I32, ncclInt32);
EQUAL(FSDP_NCCL_U32, ncclUint32);
EQUAL(FSDP_NCCL_I64, ncclInt64);
EQUAL(FSDP_NCCL_U64, ncclUint64);
EQUAL(FSDP_NCCL_F16, ncclFloat16);
EQUAL(FSDP_NCCL_F32, ncclFloat32);
EQUAL(FSDP_NCCL_F64, ncclFloat64);
EQUAL(FSDP_NCCL_BF16, ncclBfloat16);
EQUAL(FSDP_NCCL_NO_COLOR, NCCL_SPLIT_NOCOLOR);
EQUAL(FSDP_NCCL_HOST_IMMEDIATE, ncclScalarHostImmediate);
EQUAL(FSDP_NCCL_LEAST, NCCL_VERSION(2, 14, 0));
EQUAL(FSDP_NCCL_HAS_RAS, NCCL_VERSION(2, 24, 0));
EQUAL(FSDP_NCCL_SHARES_GPU, NCCL_VERSION(2, 30, 0));
EQUAL(sizeof(ncclUniqueId), 128);

/* The configuration of 2.17 is the beginning of every later one. */
static const ncclConfig_t initial = NCCL_CONFIG_INITIALIZER;
EQUAL(offsetof(struct fsdp_nccl_config_layout, magic), offsetof(ncclConfig_t, magic));
EQUAL(offsetof(struct fsdp_nccl_config_layout, version), offsetof(ncclConfig_t, version));
EQUAL(offsetof(struct fsdp_nccl_config_layout, blocking), offsetof(ncclConfig_t, blocking));
EQUAL(offsetof(struct fsdp_nccl_config_layout, maxCTAs), offsetof(ncclConfig_t, maxCTAs));
EQUAL(offsetof(struct fsdp_nccl_config_layout, netName), offsetof(ncclConfig_t, netName));
EQUAL(FSDP_NCCL_UNDEFINED, NCCL_CONFIG_UNDEF_INT);

int main(void)
{
    return initial.magic == (unsigned)FSDP_NCCL_MAGIC ? 0 : 1;
}
