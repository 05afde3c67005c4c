/* Which types fsdp_tensor_fold adds and compares as integers; sums wrap. */
#ifndef FSDP_INTEGER_FOLD_H
#define FSDP_INTEGER_FOLD_H

#include "kernels/train/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

bool fsdp_integer_can_fold(fsdp_dtype dtype);

#ifdef __cplusplus
}
#endif

#endif
