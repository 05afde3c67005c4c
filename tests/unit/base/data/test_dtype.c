/* The table of element types: every name leads back to its type, sizes and names are those known. */
#include "base/values_shape.h"

#include <criterion/criterion.h>
#include <string.h>

Test(dtype, every_entry_stands_at_its_own_number)
{
    for (int i = FSDP_DTYPE_NONE + 1; i < FSDP_DTYPE_COUNT; i++) {
        const fsdp_dtype_info *info = fsdp_dtype_describe((fsdp_dtype)i);
        cr_assert_not_null(info, "%d has no entry", i);
        cr_assert_eq((int)info->dtype, i);
        cr_assert_not_null(info->name);
        cr_assert_gt(info->size, 0);
    }
}

Test(dtype, names_lead_back_to_their_type)
{
    for (int i = FSDP_DTYPE_NONE + 1; i < FSDP_DTYPE_COUNT; i++) {
        const char *name = fsdp_dtype_name((fsdp_dtype)i);
        cr_assert_eq((int)fsdp_dtype_from_name(name, strlen(name)), i, "%s", name);
    }
}

Test(dtype, only_whole_names_are_found)
{
    cr_assert_eq(fsdp_dtype_from_name("f32", 2), FSDP_DTYPE_NONE);
    cr_assert_eq(fsdp_dtype_from_name("f32x", 4), FSDP_DTYPE_NONE);
    cr_assert_eq(fsdp_dtype_from_name("f32\0", 4), FSDP_DTYPE_NONE);
    cr_assert_eq(fsdp_dtype_from_name("F32", 3), FSDP_DTYPE_NONE);
    cr_assert_eq(fsdp_dtype_from_name("", 0), FSDP_DTYPE_NONE);
    cr_assert_eq(fsdp_dtype_from_name("bf16 and more", 4), FSDP_BF16);
}

Test(dtype, numbers_outside_the_table_are_no_types)
{
    const int outside[] = {FSDP_DTYPE_NONE, FSDP_DTYPE_COUNT, 1000, -1};
    for (size_t i = 0; i < sizeof outside / sizeof *outside; i++) {
        cr_assert_null(fsdp_dtype_describe((fsdp_dtype)outside[i]));
        cr_assert_eq(fsdp_dtype_size((fsdp_dtype)outside[i]), 0);
        cr_assert_str_eq(fsdp_dtype_name((fsdp_dtype)outside[i]), "?");
    }
}

/* The numbers are stored in files: this list may grow at its end and never change. */
Test(dtype, stored_numbers_sizes_and_names_stay)
{
    static const struct {
        const char *name;
        size_t size;
    } stored[] = {
        {"f64", 8},        {"f32", 4},          {"f16", 2},         {"bf16", 2},
        {"f8_e4m3fn", 1},  {"f8_e5m2", 1},      {"f8_e4m3fnuz", 1}, {"f8_e5m2fnuz", 1},
        {"f8_e8m0fnu", 1}, {"f4_e2m1fn_x2", 1}, {"f6_e2m3", 1},     {"f6_e3m2", 1},
        {"i64", 8},        {"i32", 4},          {"i16", 2},         {"i8", 1},
        {"u64", 8},        {"u32", 4},          {"u16", 2},         {"u8", 1},
        {"bool", 1},       {"c64", 8},          {"c128", 16},       {"complex32", 4},
        {"bcomplex32", 4}, {"q4_0", 18},        {"q4_1", 20},       {"q5_0", 22},
        {"q5_1", 24},      {"q8_0", 34},        {"q2_k", 84},       {"q3_k", 110},
        {"q4_k", 144},     {"q5_k", 176},       {"q6_k", 210},
    };
    size_t count = sizeof stored / sizeof *stored;
    cr_assert_geq(FSDP_DTYPE_COUNT - 1, (int)count);
    for (size_t i = 0; i < count; i++) {
        cr_assert_str_eq(fsdp_dtype_name((fsdp_dtype)(i + 1)), stored[i].name);
        cr_assert_eq(fsdp_dtype_size((fsdp_dtype)(i + 1)), stored[i].size, "%s", stored[i].name);
    }
}

Test(dtype, only_blocks_hold_several_values)
{
    for (int i = FSDP_DTYPE_NONE + 1; i < FSDP_DTYPE_COUNT; i++) {
        const fsdp_dtype_info *info = fsdp_dtype_describe((fsdp_dtype)i);
        bool is_k = i >= FSDP_Q2_K && i <= FSDP_Q6_K, is_block = i >= FSDP_Q4_0 && i <= FSDP_Q8_0;
        cr_assert_eq(info->values, is_k ? 256 : is_block ? 32 : 1, "%s", info->name);
    }
}

Test(dtype, shapes_of_blocks_are_shown_in_values)
{
    const int64_t shape[] = {3, 5}, far[] = {2, INT64_MAX / 16};
    int64_t shown[2];
    fsdp_dtype_to_values(FSDP_F32, 2, shape, shown);
    cr_assert_arr_eq(shown, shape, sizeof shape);
    fsdp_dtype_to_values(FSDP_Q8_0, 2, shape, shown);
    cr_assert(shown[0] == 3 && shown[1] == 160);
    fsdp_dtype_to_values(FSDP_Q4_K, 2, shape, shown);
    cr_assert(shown[0] == 3 && shown[1] == 1280);
    fsdp_dtype_to_values(FSDP_Q4_K, 2, far, shown);
    cr_assert(shown[0] == 2 && shown[1] == INT64_MAX, "too many for 64 bits");
    fsdp_dtype_to_values(FSDP_Q8_0, 0, NULL, shown);
}

static bool is_same(const char *a, const char *b)
{
    return a == b || (a && b && strcmp(a, b) == 0);
}

Test(dtype, foreign_names_are_those_of_the_ecosystems)
{
    static const struct {
        fsdp_dtype dtype;
        const char *torch, *storage, *safetensors, *numpy;
    } known[] = {
        {FSDP_F32, "float32", "FloatStorage", "F32", "<f4"},
        {FSDP_BF16, "bfloat16", "BFloat16Storage", "BF16", NULL},
        {FSDP_F8_E4M3FN, "float8_e4m3fn", NULL, "F8_E4M3", NULL},
        {FSDP_F8_E5M2FNUZ, "float8_e5m2fnuz", NULL, "F8_E5M2FNUZ", NULL},
        {FSDP_F8_E8M0FNU, "float8_e8m0fnu", NULL, "F8_E8M0", NULL},
        {FSDP_F4_E2M1FN_X2, "float4_e2m1fn_x2", NULL, "F4", NULL},
        {FSDP_F6_E3M2, NULL, NULL, "F6_E3M2", NULL},
        {FSDP_I8, "int8", "CharStorage", "I8", "|i1"},
        {FSDP_U16, "uint16", NULL, "U16", "<u2"},
        {FSDP_BOOL, "bool", "BoolStorage", "BOOL", "|b1"},
        {FSDP_C64, "complex64", "ComplexFloatStorage", "C64", "<c8"},
        {FSDP_C128, "complex128", "ComplexDoubleStorage", NULL, "<c16"},
        {FSDP_BCOMPLEX32, "bcomplex32", NULL, NULL, NULL},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const fsdp_dtype_info *info = fsdp_dtype_describe(known[i].dtype);
        cr_assert(is_same(info->torch, known[i].torch), "torch name of %s", info->name);
        cr_assert(is_same(info->torch_storage, known[i].storage), "storage of %s", info->name);
        cr_assert(is_same(info->safetensors, known[i].safetensors), "safetensors of %s",
                  info->name);
        cr_assert(is_same(info->numpy, known[i].numpy), "numpy name of %s", info->name);
    }
}

Test(dtype, floats_are_the_ones_that_can_be_cast)
{
    size_t floats = 0;
    for (int i = FSDP_DTYPE_NONE + 1; i < FSDP_DTYPE_COUNT; i++)
        floats += fsdp_dtype_describe((fsdp_dtype)i)->is_float;
    cr_assert_eq(floats, 9);
    cr_assert(fsdp_dtype_describe(FSDP_F8_E8M0FNU)->is_float);
    cr_assert_not(fsdp_dtype_describe(FSDP_F4_E2M1FN_X2)->is_float);
    cr_assert_not(fsdp_dtype_describe(FSDP_COMPLEX32)->is_float);
}

Test(dtype, what_people_type_is_understood)
{
    static const struct {
        const char *typed;
        fsdp_dtype dtype;
    } cases[] = {
        {"fp16", FSDP_F16},         {"half", FSDP_F16},          {"float16", FSDP_F16},
        {"fp32", FSDP_F32},         {"float", FSDP_F32},         {"f32", FSDP_F32},
        {"fp64", FSDP_F64},         {"double", FSDP_F64},        {"bfloat16", FSDP_BF16},
        {"f8e4m3", FSDP_F8_E4M3FN}, {"f8e8m0", FSDP_F8_E8M0FNU}, {"f8_e4m3", FSDP_F8_E4M3FN},
        {"f8e5m2", FSDP_F8_E5M2},   {"f6e2m3", FSDP_F6_E2M3},    {"fp", FSDP_DTYPE_NONE},
        {"f8e4m", FSDP_DTYPE_NONE}, {"", FSDP_DTYPE_NONE},       {"f3", FSDP_DTYPE_NONE},
        {"f32x", FSDP_DTYPE_NONE}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *typed = cases[i].typed;
        cr_assert_eq(fsdp_dtype_from_typed(typed, strlen(typed)), cases[i].dtype, "%s", typed);
    }
    cr_assert_eq(fsdp_dtype_from_name("fp16", 4), FSDP_DTYPE_NONE, "a name in a file");
}
