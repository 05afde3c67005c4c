/*
 * Element types: all of PyTorch and safetensors, each with its name in every ecosystem. One table (dtype.c)
 * lists them. All calls are local; names and infos live as long as the process.
 */
#ifndef FSDP_DTYPE_H
#define FSDP_DTYPE_H

#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The numbers are stored in shard indexes: append only. */
typedef enum fsdp_dtype {
    FSDP_DTYPE_NONE = 0,
    FSDP_F64, FSDP_F32, FSDP_F16, FSDP_BF16,
    FSDP_F8_E4M3FN, FSDP_F8_E5M2, FSDP_F8_E4M3FNUZ, FSDP_F8_E5M2FNUZ, FSDP_F8_E8M0FNU,
    FSDP_F4_E2M1FN_X2,         /* one element is a byte holding two values; shapes count bytes */
    FSDP_F6_E2M3, FSDP_F6_E3M2, /* packed: four values take three elements of one byte each */
    FSDP_I64, FSDP_I32, FSDP_I16, FSDP_I8,
    FSDP_U64, FSDP_U32, FSDP_U16, FSDP_U8,
    FSDP_BOOL,
    FSDP_C64, FSDP_C128, FSDP_COMPLEX32, FSDP_BCOMPLEX32,
    FSDP_Q4_0, FSDP_Q4_1, FSDP_Q5_0, FSDP_Q5_1, FSDP_Q8_0, /* ggml's: an element is a block of 32 values, */
    FSDP_Q2_K, FSDP_Q3_K, FSDP_Q4_K, FSDP_Q5_K, FSDP_Q6_K, /* or of 256; shapes count blocks */
    FSDP_DTYPE_COUNT
} fsdp_dtype;

/* A cast's result for finite values that the other type cannot hold. */
typedef enum fsdp_on_overflow {
    FSDP_OVERFLOW_FAIL = 0,    /* an error */
    FSDP_OVERFLOW_CLAMP,       /* the largest finite value */
    FSDP_OVERFLOW_INF          /* infinity, or NaN where the type has no infinity (IEEE) */
} fsdp_on_overflow;

typedef struct fsdp_dtype_info {
    fsdp_dtype dtype;
    size_t size;               /* bytes of one element */
    size_t values;             /* numbers that one element of a block type holds; 1 of all other types */
    bool is_float;             /* a real floating type that fsdp casts from and to */
    const char *name;          /* "f32", in manifests, listings and options */
    const char *torch;         /* "float32", as in torch.float32 */
    const char *torch_storage; /* "FloatStorage"; NULL where torch has none */
    const char *safetensors;   /* "F32"; NULL where safetensors has none */
    const char *numpy;         /* "<f4"; NULL where NumPy has none */
} fsdp_dtype_info;

/* Returns the description of a dtype; NULL for a number that is not a dtype. */
FSDP_API const fsdp_dtype_info *fsdp_dtype_describe(fsdp_dtype dtype);

/* Returns the bytes of one element, 0 for a number that is not a dtype. */
FSDP_API size_t fsdp_dtype_size(fsdp_dtype dtype);

/* Returns the name "f32", "?" for a number that is not a dtype. */
FSDP_API const char *fsdp_dtype_name(fsdp_dtype dtype);

/* Returns the dtype with a name of `size` bytes ("f32"); FSDP_DTYPE_NONE: no dtype has it. */
FSDP_API fsdp_dtype fsdp_dtype_from_name(const char *name, size_t size);

/* Returns the dtype of a name that a user types. Accepts the names of fsdp_dtype_from_name, PyTorch's
 * ("float16"), names without their underscores ("f8e4m3fn"), and the usual others ("fp16", "half"). Not for
 * names in files. */
FSDP_API fsdp_dtype fsdp_dtype_from_typed(const char *text, size_t size);

#ifdef __cplusplus
}
#endif
#endif
