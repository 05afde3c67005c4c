/*
 * Products of OpenBLAS, opened at run time for processors with wider vectors than the kernels here use: those
 * with AVX-512. FSDP_PRODUCTS in the environment: auto (default), own, or openblas wherever it is installed.
 *
 * The bits of its products depend on the processor and on the number of rows, not on the number of threads:
 * nn_cpu.c calls it for pieces of one size, whichever thread takes them.
 */
#ifndef FSDP_NN_OPENBLAS_H
#define FSDP_NN_OPENBLAS_H

#include "kernels/nn.h"

#include <stdatomic.h>

typedef struct fsdp_nn_openblas {
    atomic_bool is_used;
    char name[64];             /* "OpenBLAS SkylakeX": the processor that its kernels were made for */
    fsdp_error failure;        /* FSDP_PRODUCTS is not one of these, or OpenBLAS is not there */
    /* cblas_sgemm on the caller's thread alone. */
    void (*sgemm)(int order, int a_is_turned, int b_is_turned, int rows, int columns, int inner, float alpha,
                  const float *a, int a_row, const float *b, int b_row, float beta, float *c, int c_row);
    void *(*alloc)(int place);      /* its buffer for one call at a time; NULL: not exported */
    void (*free)(void *buffer);
} fsdp_nn_openblas;

/* Opened by the first call of the process, which sets OPENBLAS_CORETYPE and OPENBLAS_NUM_THREADS, unless they
 * are set, until it returns: no other thread may read the environment meanwhile. */
const fsdp_nn_openblas *fsdp_nn_openblas_get(void);

/*
 * Makes the buffers for so many more threads that call sgemm, until they are given back: without address
 * space OpenBLAS would try for ever to make one in the middle of a call. *blas_out is what they use; NULL:
 * the products here, because there is no space for it and it was not asked for. FSDP_ERR_LIMIT: it was.
 */
fsdp_status fsdp_nn_openblas_take(int threads, const fsdp_nn_openblas **blas_out, fsdp_error *err);
void fsdp_nn_openblas_give_back(const fsdp_nn_openblas *blas, int threads); /* accepts NULL */

#endif
