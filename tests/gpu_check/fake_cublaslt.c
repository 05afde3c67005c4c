/*
 * A libcublasLt.so of tests: one way to multiply, on the stream of the fake CUDA runtime of the program that
 * opens it. It reads what it is told about the matrices, so that a wrong layout shows.
 */
#include <cublasLt.h>
#include <stdlib.h>

#include "tests/cuda/fake_cudart.h"

typedef struct matrix {
    uint64_t rows, columns;
    int64_t pitch;
} matrix;

typedef struct product {
    cublasOperation_t turned;
    matrix a, b, c;
    const uint16_t *from[2];
    uint16_t *to;
} product;

size_t cublasLtGetVersion(void)
{
    return 120000;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
    *handle = calloc(1, 1);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle)
{
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute,
                                        cudaDataType_t scale)
{
    *desc = calloc(1, sizeof(product));
    return compute == CUBLAS_COMPUTE_32F && scale == CUDA_R_32F ? CUBLAS_STATUS_SUCCESS
                                                                : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc)
{
    free(desc);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t size)
{
    if (attribute != CUBLASLT_MATMUL_DESC_TRANSA || size != sizeof(cublasOperation_t))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    ((product *)(void *)desc)->turned = *(const cublasOperation_t *)value;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type,
                                          uint64_t rows, uint64_t columns, int64_t pitch)
{
    matrix *made = calloc(1, sizeof *made);
    *made = (matrix){rows, columns, pitch};
    *layout = (cublasLtMatrixLayout_t)(void *)made;
    return type == CUDA_R_16BF ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout)
{
    free(layout);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference)
{
    *preference = calloc(1, 1);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference)
{
    free(preference);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void *value, size_t size)
{
    (void)preference, (void)value, (void)size;
    return attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES ? CUBLAS_STATUS_SUCCESS
                                                                 : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int most,
                                              cublasLtMatmulHeuristicResult_t results[], int *found)
{
    (void)handle, (void)desc, (void)a, (void)b, (void)c, (void)d, (void)preference;
    results[0] = (cublasLtMatmulHeuristicResult_t){0};
    *found = most > 0;
    return CUBLAS_STATUS_SUCCESS;
}

static float value_of(uint16_t bf16)
{
    union {
        uint32_t bits;
        float value;
    } both = {.bits = (uint32_t)bf16 << 16};
    return both.value;
}

/* To nearest even. */
static uint16_t round_value(float value)
{
    union {
        float value;
        uint32_t bits;
    } both = {.value = value};
    return (uint16_t)((both.bits + 0x7fff + (both.bits >> 16 & 1)) >> 16);
}

static void multiply(void *closure)
{
    const product *job = closure;
    bool turns = job->turned == CUBLAS_OP_T;
    uint64_t depth = turns ? job->a.rows : job->a.columns;
    for (uint64_t column = 0; column < job->c.columns; column++)
        for (uint64_t row = 0; row < job->c.rows; row++) {
            float sum = 0;
            for (uint64_t k = 0; k < depth; k++) {
                uint64_t at =
                    turns ? k + row * (uint64_t)job->a.pitch : row + k * (uint64_t)job->a.pitch;
                sum += value_of(job->from[0][at]) *
                       value_of(job->from[1][k + column * (uint64_t)job->b.pitch]);
            }
            job->to[row + column * (uint64_t)job->c.pitch] = round_value(sum);
        }
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *A, cublasLtMatrixLayout_t a, const void *B,
                              cublasLtMatrixLayout_t b, const void *beta, const void *C,
                              cublasLtMatrixLayout_t c, void *D, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t *algorithm, void *workspace, size_t size,
                              cudaStream_t stream)
{
    product *job = calloc(1, sizeof *job);
    (void)handle, (void)C, (void)c, (void)algorithm, (void)workspace, (void)size;
    if (*(const float *)alpha != 1 || *(const float *)beta != 0)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    *job = *(product *)(void *)desc;
    job->a = *(matrix *)(void *)a;
    job->b = *(matrix *)(void *)b;
    job->c = *(matrix *)(void *)d;
    job->from[0] = A;
    job->from[1] = B;
    job->to = D;
    return fake_cudart_enqueue(stream, multiply, job, free) == 0 ? CUBLAS_STATUS_SUCCESS
                                                                 : CUBLAS_STATUS_EXECUTION_FAILED;
}
