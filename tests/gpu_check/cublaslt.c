/*
 * One product of cuBLASLt, whose library (542 MB) is opened at run time. The one file that
 * includes its header. See gpu_check.h.
 */
#include "tests/gpu_check/gpu_check.h"

#include <dlfcn.h>
#include <stdio.h>

#include "base/core/mem.h"
#include "runtime/device/cuda_library.h"

#define ADVICE \
    "install it (pip: nvidia-cublas, nvidia-cublas-cu12), or set FSDP_CUBLASLT_LIB to the file"

#if __has_include(<cublasLt.h>)
#include <cublasLt.h>

static fsdp_status open_library(void **library_out, fsdp_error *err)
{
    /* the calls below are the same in all of them */
    static const char *const files[] = {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so",
                                        NULL};
    static const char *const packages[] = {"nvidia/cu13/lib", "nvidia/cublas/lib", NULL};
    static const fsdp_cuda_library cublaslt = {"FSDP_CUBLASLT_LIB", files, packages, ADVICE};
    return fsdp_cuda_library_open(&cublaslt, library_out, err);
}

/* --- its functions ---------------------------------------------------------------------------- */

#define FUNCTIONS(DO)                        \
    DO(cublasLtGetVersion)                   \
    DO(cublasLtCreate)                       \
    DO(cublasLtDestroy)                      \
    DO(cublasLtMatmulDescCreate)             \
    DO(cublasLtMatmulDescDestroy)            \
    DO(cublasLtMatmulDescSetAttribute)       \
    DO(cublasLtMatrixLayoutCreate)           \
    DO(cublasLtMatrixLayoutDestroy)          \
    DO(cublasLtMatmulPreferenceCreate)       \
    DO(cublasLtMatmulPreferenceDestroy)      \
    DO(cublasLtMatmulPreferenceSetAttribute) \
    DO(cublasLtMatmulAlgoGetHeuristic)       \
    DO(cublasLtMatmul)

#define POINTER(name) __typeof__(&name) name;
typedef struct cublaslt {
    FUNCTIONS(POINTER)
} cublaslt;

struct gpu_product {
    void *library;
    cublaslt call;
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t layout; /* of all three */
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulAlgo_t algorithm;
    void *workspace;
    size_t workspace_size;
};

static fsdp_status read_functions(gpu_product *product, fsdp_error *err)
{
    const char *missing = NULL;
#define TAKE(name)                                                          \
    product->call.name = (__typeof__(&name))dlsym(product->library, #name); \
    missing = product->call.name ? missing : #name;
    FUNCTIONS(TAKE)
#undef TAKE
    return missing ? fsdp_fail(err, FSDP_ERR_INTERNAL, "libcublasLt has no %s; " ADVICE, missing)
                   : FSDP_OK;
}

static fsdp_status check(int code, const char *call, fsdp_error *err)
{
    return code == 0 ? FSDP_OK : fsdp_fail(err, FSDP_ERR_INTERNAL, "%s: error %d", call, code);
}

static fsdp_status describe(gpu_product *product, int64_t n, fsdp_error *err)
{
    const cublaslt *call = &product->call;
    const cublasOperation_t turned = CUBLAS_OP_T;
    FSDP_TRY(check((int)call->cublasLtCreate(&product->handle), "cublasLtCreate", err));
    FSDP_TRY(
        check((int)call->cublasLtMatmulDescCreate(&product->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F),
              "cublasLtMatmulDescCreate", err));
    FSDP_TRY(check((int)call->cublasLtMatmulDescSetAttribute(
                       product->desc, CUBLASLT_MATMUL_DESC_TRANSA, &turned, sizeof turned),
                   "cublasLtMatmulDescSetAttribute", err));
    return check((int)call->cublasLtMatrixLayoutCreate(&product->layout, CUDA_R_16BF, (uint64_t)n,
                                                       (uint64_t)n, n),
                 "cublasLtMatrixLayoutCreate", err);
}

static fsdp_status choose(gpu_product *product, fsdp_error *err)
{
    const cublaslt *call = &product->call;
    cublasLtMatmulHeuristicResult_t best;
    int found = 0;
    FSDP_TRY(check((int)call->cublasLtMatmulPreferenceCreate(&product->preference),
                   "cublasLtMatmulPreferenceCreate", err));
    FSDP_TRY(check((int)call->cublasLtMatmulPreferenceSetAttribute(
                       product->preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                       &product->workspace_size, sizeof product->workspace_size),
                   "cublasLtMatmulPreferenceSetAttribute", err));
    FSDP_TRY(check((int)call->cublasLtMatmulAlgoGetHeuristic(
                       product->handle, product->desc, product->layout, product->layout,
                       product->layout, product->layout, product->preference, 1, &best, &found),
                   "cublasLtMatmulAlgoGetHeuristic", err));
    product->algorithm = best.algo;
    return found > 0 ? FSDP_OK
                     : fsdp_fail(err, FSDP_ERR_INTERNAL, "cuBLASLt has no way to multiply these");
}

static fsdp_status open_product(gpu_product *product, int64_t n, char *version_out, fsdp_error *err)
{
    FSDP_TRY(open_library(&product->library, err));
    FSDP_TRY(read_functions(product, err));
    snprintf(version_out, 64, "%zu", product->call.cublasLtGetVersion());
    FSDP_TRY(describe(product, n, err));
    return choose(product, err);
}

fsdp_status gpu_product_open(int64_t n, void *workspace, size_t workspace_size, char *version_out,
                             gpu_product **product_out, fsdp_error *err)
{
    gpu_product *product = fsdp_alloc(1, sizeof *product);
    if (!product)
        return fsdp_fail_memory(err, "a product");
    product->workspace = workspace;
    product->workspace_size = workspace_size;
    fsdp_status status = open_product(product, n, version_out, err);
    if (status == FSDP_OK)
        *product_out = product;
    else
        gpu_product_close(product);
    return status;
}

/* The library stays: CUDA keeps what it registered. */
void gpu_product_close(gpu_product *product)
{
    if (!product)
        return;
    const cublaslt *call = &product->call;
    if (product->preference)
        (void)call->cublasLtMatmulPreferenceDestroy(product->preference);
    if (product->layout)
        (void)call->cublasLtMatrixLayoutDestroy(product->layout);
    if (product->desc)
        (void)call->cublasLtMatmulDescDestroy(product->desc);
    if (product->handle)
        (void)call->cublasLtDestroy(product->handle);
    fsdp_free(product);
}

int gpu_product_run(const gpu_product *product, const void *a, const void *b, void *c,
                    void *native_stream)
{
    const float one = 1, zero = 0;
    return (int)product->call.cublasLtMatmul(
        product->handle, product->desc, &one, a, product->layout, b, product->layout, &zero, c,
        product->layout, c, product->layout, &product->algorithm, product->workspace,
        product->workspace_size, native_stream);
}

#else

fsdp_status gpu_product_open(int64_t n, void *workspace, size_t workspace_size, char *version_out,
                             gpu_product **product_out, fsdp_error *err)
{
    (void)n, (void)workspace, (void)workspace_size, (void)version_out, (void)product_out;
    return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "this program was built without cublasLt.h");
}

void gpu_product_close(gpu_product *product)
{
    (void)product;
}

int gpu_product_run(const gpu_product *product, const void *a, const void *b, void *c,
                    void *native_stream)
{
    (void)product, (void)a, (void)b, (void)c, (void)native_stream;
    return -1;
}
#endif
