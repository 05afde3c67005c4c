/* The one table of element types, and look-ups in it. See dtype.h. */
#include <fsdp/dtype.h>

#include "base/values_shape.h"

#include <ctype.h>
#include <string.h>
#include <strings.h>

/* dtype, size, values, is_float, ours, torch, torch storage, safetensors, NumPy */
static const fsdp_dtype_info dtypes[FSDP_DTYPE_COUNT] = {
    [FSDP_F64] = {FSDP_F64, 8, 1, true, "f64", "float64", "DoubleStorage", "F64", "<f8"},
    [FSDP_F32] = {FSDP_F32, 4, 1, true, "f32", "float32", "FloatStorage", "F32", "<f4"},
    [FSDP_F16] = {FSDP_F16, 2, 1, true, "f16", "float16", "HalfStorage", "F16", "<f2"},
    [FSDP_BF16] = {FSDP_BF16, 2, 1, true, "bf16", "bfloat16", "BFloat16Storage", "BF16", NULL},
    [FSDP_F8_E4M3FN] = {FSDP_F8_E4M3FN, 1, 1, true, "f8_e4m3fn", "float8_e4m3fn", NULL, "F8_E4M3",
                        NULL},
    [FSDP_F8_E5M2] = {FSDP_F8_E5M2, 1, 1, true, "f8_e5m2", "float8_e5m2", NULL, "F8_E5M2", NULL},
    [FSDP_F8_E4M3FNUZ] = {FSDP_F8_E4M3FNUZ, 1, 1, true, "f8_e4m3fnuz", "float8_e4m3fnuz", NULL,
                          "F8_E4M3FNUZ", NULL},
    [FSDP_F8_E5M2FNUZ] = {FSDP_F8_E5M2FNUZ, 1, 1, true, "f8_e5m2fnuz", "float8_e5m2fnuz", NULL,
                          "F8_E5M2FNUZ", NULL},
    [FSDP_F8_E8M0FNU] = {FSDP_F8_E8M0FNU, 1, 1, true, "f8_e8m0fnu", "float8_e8m0fnu", NULL,
                         "F8_E8M0", NULL},
    [FSDP_F4_E2M1FN_X2] = {FSDP_F4_E2M1FN_X2, 1, 1, false, "f4_e2m1fn_x2", "float4_e2m1fn_x2", NULL,
                           "F4", NULL},
    [FSDP_F6_E2M3] = {FSDP_F6_E2M3, 1, 1, false, "f6_e2m3", NULL, NULL, "F6_E2M3", NULL},
    [FSDP_F6_E3M2] = {FSDP_F6_E3M2, 1, 1, false, "f6_e3m2", NULL, NULL, "F6_E3M2", NULL},
    [FSDP_I64] = {FSDP_I64, 8, 1, false, "i64", "int64", "LongStorage", "I64", "<i8"},
    [FSDP_I32] = {FSDP_I32, 4, 1, false, "i32", "int32", "IntStorage", "I32", "<i4"},
    [FSDP_I16] = {FSDP_I16, 2, 1, false, "i16", "int16", "ShortStorage", "I16", "<i2"},
    [FSDP_I8] = {FSDP_I8, 1, 1, false, "i8", "int8", "CharStorage", "I8", "|i1"},
    [FSDP_U64] = {FSDP_U64, 8, 1, false, "u64", "uint64", NULL, "U64", "<u8"},
    [FSDP_U32] = {FSDP_U32, 4, 1, false, "u32", "uint32", NULL, "U32", "<u4"},
    [FSDP_U16] = {FSDP_U16, 2, 1, false, "u16", "uint16", NULL, "U16", "<u2"},
    [FSDP_U8] = {FSDP_U8, 1, 1, false, "u8", "uint8", "ByteStorage", "U8", "|u1"},
    [FSDP_BOOL] = {FSDP_BOOL, 1, 1, false, "bool", "bool", "BoolStorage", "BOOL", "|b1"},
    [FSDP_C64] = {FSDP_C64, 8, 1, false, "c64", "complex64", "ComplexFloatStorage", "C64", "<c8"},
    [FSDP_C128] = {FSDP_C128, 16, 1, false, "c128", "complex128", "ComplexDoubleStorage", NULL,
                   "<c16"},
    [FSDP_COMPLEX32] = {FSDP_COMPLEX32, 4, 1, false, "complex32", "complex32", NULL, NULL, NULL},
    [FSDP_BCOMPLEX32] = {FSDP_BCOMPLEX32, 4, 1, false, "bcomplex32", "bcomplex32", NULL, NULL,
                         NULL},
    [FSDP_Q4_0] = {FSDP_Q4_0, 18, 32, false, "q4_0", NULL, NULL, NULL, NULL},
    [FSDP_Q4_1] = {FSDP_Q4_1, 20, 32, false, "q4_1", NULL, NULL, NULL, NULL},
    [FSDP_Q5_0] = {FSDP_Q5_0, 22, 32, false, "q5_0", NULL, NULL, NULL, NULL},
    [FSDP_Q5_1] = {FSDP_Q5_1, 24, 32, false, "q5_1", NULL, NULL, NULL, NULL},
    [FSDP_Q8_0] = {FSDP_Q8_0, 34, 32, false, "q8_0", NULL, NULL, NULL, NULL},
    [FSDP_Q2_K] = {FSDP_Q2_K, 84, 256, false, "q2_k", NULL, NULL, NULL, NULL},
    [FSDP_Q3_K] = {FSDP_Q3_K, 110, 256, false, "q3_k", NULL, NULL, NULL, NULL},
    [FSDP_Q4_K] = {FSDP_Q4_K, 144, 256, false, "q4_k", NULL, NULL, NULL, NULL},
    [FSDP_Q5_K] = {FSDP_Q5_K, 176, 256, false, "q5_k", NULL, NULL, NULL, NULL},
    [FSDP_Q6_K] = {FSDP_Q6_K, 210, 256, false, "q6_k", NULL, NULL, NULL, NULL},
};

const fsdp_dtype_info *fsdp_dtype_describe(fsdp_dtype dtype)
{
    size_t index = (size_t)dtype;
    return index > FSDP_DTYPE_NONE && index < FSDP_DTYPE_COUNT ? &dtypes[index] : NULL;
}

size_t fsdp_dtype_size(fsdp_dtype dtype)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(dtype);
    return info ? info->size : 0;
}

void fsdp_dtype_to_values(fsdp_dtype dtype, int ndim, const int64_t *elements, int64_t *values_out)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(dtype);
    for (int d = 0; d < ndim; d++)
        values_out[d] = elements[d];
    if (!info || ndim <= 0)
        return;
    int64_t *last = &values_out[ndim - 1];
    if (__builtin_mul_overflow(*last, (int64_t)info->values, last))
        *last = INT64_MAX;
}

const char *fsdp_dtype_name(fsdp_dtype dtype)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(dtype);
    return info ? info->name : "?";
}

fsdp_dtype fsdp_dtype_from_name(const char *name, size_t size)
{
    if (!name)
        return FSDP_DTYPE_NONE;
    for (size_t i = FSDP_DTYPE_NONE + 1; i < FSDP_DTYPE_COUNT; i++) {
        if (strlen(dtypes[i].name) == size && memcmp(dtypes[i].name, name, size) == 0)
            return dtypes[i].dtype;
    }
    return FSDP_DTYPE_NONE;
}

/* --- what people type --------------------------------------------------------------------------- */

static const struct {
    const char *typed;
    fsdp_dtype dtype;
} typed_names[] = {{"fp16", FSDP_F16},          {"half", FSDP_F16},
                   {"fp32", FSDP_F32},          {"float", FSDP_F32},
                   {"fp64", FSDP_F64},          {"double", FSDP_F64},
                   {"f8e4m3", FSDP_F8_E4M3FN},  {"f8_e4m3", FSDP_F8_E4M3FN},
                   {"f8e8m0", FSDP_F8_E8M0FNU}, {"f8_e8m0", FSDP_F8_E8M0FNU}};

static bool is_text(const char *name, const char *text, size_t size)
{
    return name && strlen(name) == size && strncasecmp(name, text, size) == 0;
}

/* "f8e4m3fn" is f8_e4m3fn. */
static bool is_without_lines(const char *name, const char *text, size_t size)
{
    size_t at = 0;
    for (; *name; name++)
        if (*name != '_' && (at == size || tolower((unsigned char)text[at++]) != *name))
            return false;
    return at == size;
}

fsdp_dtype fsdp_dtype_from_typed(const char *text, size_t size)
{
    fsdp_dtype dtype = fsdp_dtype_from_name(text, size);
    if (dtype != FSDP_DTYPE_NONE || !text)
        return dtype;
    for (size_t i = FSDP_DTYPE_NONE + 1; i < FSDP_DTYPE_COUNT; i++)
        if (is_text(dtypes[i].name, text, size) || is_text(dtypes[i].torch, text, size) ||
            is_without_lines(dtypes[i].name, text, size))
            return dtypes[i].dtype;
    for (size_t i = 0; i < sizeof typed_names / sizeof *typed_names; i++)
        if (is_text(typed_names[i].typed, text, size))
            return typed_names[i].dtype;
    return FSDP_DTYPE_NONE;
}
