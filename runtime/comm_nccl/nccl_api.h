/*
 * The part of NCCL's interface that the transport uses, declared here because libnccl is opened at run time
 * and its header is not needed to build. tests/nccl/nccl_header.c compares all of it with nccl.h.
 *
 * A function of FSDP_NCCL_REQUIRED is in every NCCL that is accepted. One of FSDP_NCCL_OPTIONAL is NULL where
 * the library lacks it, and is then not called.
 */
#ifndef FSDP_NCCL_API_H
#define FSDP_NCCL_API_H

#include <limits.h>
#include <stddef.h>

/* 2.14 has communicators that do not block; from 2.22.3 on a group of calls tells all communicators to abort
 * before it waits for one. Numbers as ncclGetVersion returns them. */
enum {
    FSDP_NCCL_LEAST = 21400, FSDP_NCCL_ABORTS_IN_GROUPS = 22203, FSDP_NCCL_HAS_RAS = 22400,
    FSDP_NCCL_SHARES_GPU = 23000
};

/* ncclConfig_t of 2.17: later ones take it for what it is, by its size and version, and earlier ones read the
 * beginning. */
struct fsdp_nccl_config_layout {
    size_t size;
    unsigned magic, version;
    int blocking;
    int cgaClusterSize, minCTAs, maxCTAs;      /* FSDP_NCCL_UNDEFINED: NCCL chooses */
    const char *netName;
};
enum { FSDP_NCCL_UNDEFINED = INT_MIN, FSDP_NCCL_HAS_CTAS = 21700 };
enum { FSDP_NCCL_MAGIC = (int)0xcafebeef };

#ifndef FSDP_NCCL_TYPES
#define FSDP_NCCL_TYPES
typedef int fsdp_nccl_result;
typedef int fsdp_nccl_dtype;
typedef int fsdp_nccl_op;
typedef int fsdp_nccl_residence;
typedef struct fsdp_nccl_id { char bytes[128]; } fsdp_nccl_id;
typedef struct fsdp_nccl_config_layout fsdp_nccl_config;
typedef struct ncclComm *fsdp_nccl_comm;
typedef void *fsdp_nccl_stream;        /* a cudaStream_t */
#endif

enum {
    FSDP_NCCL_SUCCESS = 0, FSDP_NCCL_CUDA_ERROR = 1, FSDP_NCCL_INVALID_ARGUMENT = 4,
    FSDP_NCCL_INVALID_USAGE = 5, FSDP_NCCL_REMOTE_ERROR = 6, FSDP_NCCL_IN_PROGRESS = 7
};
enum { FSDP_NCCL_SUM = 0, FSDP_NCCL_MAX = 2, FSDP_NCCL_AVG = 4 };
enum {
    FSDP_NCCL_I8 = 0, FSDP_NCCL_U8, FSDP_NCCL_I32, FSDP_NCCL_U32, FSDP_NCCL_I64, FSDP_NCCL_U64, FSDP_NCCL_F16,
    FSDP_NCCL_F32, FSDP_NCCL_F64, FSDP_NCCL_BF16
};
enum { FSDP_NCCL_NO_COLOR = -1, FSDP_NCCL_HOST_IMMEDIATE = 1 };

/* X(name without "nccl", result, parameters) */
#define FSDP_NCCL_REQUIRED(X)                                                                                \
    X(GetVersion, fsdp_nccl_result, (int *))                                                                 \
    X(GetUniqueId, fsdp_nccl_result, (fsdp_nccl_id *))                                                       \
    X(CommInitRankConfig, fsdp_nccl_result, (fsdp_nccl_comm *, int, fsdp_nccl_id, int, fsdp_nccl_config *))  \
    X(CommFinalize, fsdp_nccl_result, (fsdp_nccl_comm))                                                      \
    X(CommDestroy, fsdp_nccl_result, (fsdp_nccl_comm))                                                       \
    X(CommAbort, fsdp_nccl_result, (fsdp_nccl_comm))                                                         \
    X(CommGetAsyncError, fsdp_nccl_result, (fsdp_nccl_comm, fsdp_nccl_result *))                             \
    X(GetErrorString, const char *, (fsdp_nccl_result))                                                      \
    X(GetLastError, const char *, (fsdp_nccl_comm))                                                          \
    X(GroupStart, fsdp_nccl_result, (void))                                                                  \
    X(GroupEnd, fsdp_nccl_result, (void))                                                                    \
    X(AllGather, fsdp_nccl_result,                                                                           \
      (const void *, void *, size_t, fsdp_nccl_dtype, fsdp_nccl_comm, fsdp_nccl_stream))                     \
    X(ReduceScatter, fsdp_nccl_result,                                                                       \
      (const void *, void *, size_t, fsdp_nccl_dtype, fsdp_nccl_op, fsdp_nccl_comm, fsdp_nccl_stream))       \
    X(AllReduce, fsdp_nccl_result,                                                                           \
      (const void *, void *, size_t, fsdp_nccl_dtype, fsdp_nccl_op, fsdp_nccl_comm, fsdp_nccl_stream))       \
    X(Broadcast, fsdp_nccl_result,                                                                           \
      (const void *, void *, size_t, fsdp_nccl_dtype, int, fsdp_nccl_comm, fsdp_nccl_stream))                \
    X(Reduce, fsdp_nccl_result,                                                                              \
      (const void *, void *, size_t, fsdp_nccl_dtype, fsdp_nccl_op, int, fsdp_nccl_comm, fsdp_nccl_stream))  \
    X(Send, fsdp_nccl_result,                                                                                \
      (const void *, size_t, fsdp_nccl_dtype, int, fsdp_nccl_comm, fsdp_nccl_stream))                        \
    X(Recv, fsdp_nccl_result, (void *, size_t, fsdp_nccl_dtype, int, fsdp_nccl_comm, fsdp_nccl_stream))      \
    X(RedOpCreatePreMulSum, fsdp_nccl_result,                                                                \
      (fsdp_nccl_op *, void *, fsdp_nccl_dtype, fsdp_nccl_residence, fsdp_nccl_comm))                        \
    X(RedOpDestroy, fsdp_nccl_result, (fsdp_nccl_op, fsdp_nccl_comm))

#define FSDP_NCCL_OPTIONAL(X)                                                                                \
    X(CommSplit, fsdp_nccl_result, (fsdp_nccl_comm, int, int, fsdp_nccl_comm *, fsdp_nccl_config *))         \
    X(MemAlloc, fsdp_nccl_result, (void **, size_t))                                                         \
    X(MemFree, fsdp_nccl_result, (void *))                                                                   \
    X(CommRegister, fsdp_nccl_result, (fsdp_nccl_comm, void *, size_t, void **))                             \
    X(CommDeregister, fsdp_nccl_result, (fsdp_nccl_comm, void *))

#endif
