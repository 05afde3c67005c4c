/* Sums and maxima of integers over ranks, for fsdp_tensor_fold: sums wrap. */
#ifndef FSDP_INTEGER_FOLD_H
#define FSDP_INTEGER_FOLD_H

#include "kernels/train/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

bool fsdp_integer_can_fold(fsdp_dtype dtype);
void fsdp_integer_fold(void *to, const void *const *from, int n, fsdp_dtype dtype, size_t count,
                       fsdp_fold fold);

#ifdef __cplusplus
}
#endif

#endif
