/* The fake NCCL (tests/nccl/fake_nccl.h) over the fake CUDA runtime: its collectives are work of streams. */
#ifndef FSDP_NCCL_STREAMS_H
#define FSDP_NCCL_STREAMS_H

#include "tests/nccl/fake_nccl.h"

/* The library that FSDP_NCCL_LIB names, which uses streams and memory of the fake CUDA runtime from now on;
 * NULL: it is not a fake. */
fake_nccl_control *fake_nccl_over_cudart(void);

#endif
