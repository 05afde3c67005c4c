/* The header of a .npy array: what NumPy writes is understood, what is not a literal is damage. */
#include "formats/npy/npy.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

static fsdp_npy npy;
static fsdp_error err;

static fsdp_status parse(const char *text)
{
    err = (fsdp_error){0};
    return fsdp_npy_parse("file", text, strlen(text), &npy, &err);
}

Test(npy_header, arrays_of_every_order_are_understood)
{
    cr_assert_eq(parse("{'descr': '>c16', 'fortran_order': True, 'shape': (2, 3), }   \n"), FSDP_OK,
                 "%s", err.text);
    cr_expect(npy.dtype == FSDP_C128 && npy.is_swapped && npy.is_fortran && npy.item_size == 16);
    cr_expect(npy.ndim == 2 && npy.shape[0] == 2 && npy.shape[1] == 3);
    cr_assert_eq(parse("{\"shape\": (), 'fortran_order': False, 'descr': '|b1'}"), FSDP_OK);
    cr_expect(npy.dtype == FSDP_BOOL && npy.ndim == 0 && !npy.is_swapped);
    cr_assert_eq(parse("{'descr': '<i4', 'fortran_order': False, 'shape': (12L,)}"), FSDP_OK);
    cr_expect(npy.dtype == FSDP_I32 && npy.shape[0] == 12);
}

Test(npy_header, other_types_have_a_size_and_no_dtype)
{
    static const struct {
        const char *descr;
        int64_t size;
    } types[] = {{"'|S3'", 3},
                 {"'<U5'", 20},
                 {"'<M8[25s]'", 8},
                 {"'<f16'", 16},
                 {"'|V2'", 2},
                 {"'<c32'", 32},
                 {"'|S0'", 0},
                 {"[('a', '<i4'), (('t', 'b'), '>f8', (2, 2)), ('', '|V4')]", 40},
                 {"[('in', [('x', '|i1'), ('y', '<U1', (3,))])]", 13}};
    char text[200];
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        snprintf(text, sizeof text, "{'descr': %s, 'fortran_order': False, 'shape': (1,), }",
                 types[i].descr);
        cr_assert_eq(parse(text), FSDP_OK, "%s: %s", types[i].descr, err.text);
        cr_expect_eq(npy.dtype, FSDP_DTYPE_NONE);
        cr_expect_eq(npy.item_size, types[i].size);
        cr_expect_not(npy.has_objects);
    }
}

Test(npy_header, objects_are_seen_wherever_they_are)
{
    cr_assert_eq(parse("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}"), FSDP_OK);
    cr_expect(npy.has_objects);
    cr_assert_eq(parse("{'descr': [('a', [('b', '|O')])], 'fortran_order': False, 'shape': ()}"),
                 FSDP_OK);
    cr_expect(npy.has_objects);
}

Test(npy_header, what_is_no_literal_is_damage)
{
    static const char *const texts[] = {
        "",
        "{",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (3)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1 2)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': [3]}",
        "{'descr': '<f4', 'fortran_order': 0, 'shape': (3,)}",
        "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (3,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (3,)} x",
        "{'descr': '<f3', 'fortran_order': False, 'shape': (3,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (36893488147419103235,)}", /* 2^65 + 3 */
        "{'descr': '<f4x', 'fortran_order': False, 'shape': (3,)}",
        "{'descr': 'f4",
        "{'descr': [('a', '<i4')",
        "{'descr': [('a', '|V2147483647', (2147483647, 2147483647))]}",
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        cr_expect_eq(parse(texts[i]), FSDP_ERR_DAMAGED, "%s", texts[i]);
}

Test(npy_header, later_versions_are_not_known)
{
    uint8_t prefix[FSDP_NPY_PREFIX] = "\x93NUMPY\3";
    int64_t offset;
    size_t size;
    cr_expect_eq(fsdp_npy_place("file", prefix, sizeof prefix, &offset, &size, &err), FSDP_OK);
    prefix[6] = 4;
    cr_expect_eq(fsdp_npy_place("file", prefix, sizeof prefix, &offset, &size, &err),
                 FSDP_ERR_NOT_FOUND);
}

Test(npy_header, depth_and_dims_are_bounded)
{
    char text[2000] = "{'descr': ";
    for (int i = 0; i < 100; i++)
        strcat(text, "[('a', ");
    cr_expect_eq(parse(text), FSDP_ERR_DAMAGED);
    cr_expect(strstr(err.text, "deeply"), "%s", err.text);
    strcpy(text, "{'shape': (");
    for (int i = 0; i <= FSDP_MAX_DIMS; i++)
        strcat(text, "1, ");
    cr_expect_eq(parse(strcat(text, ")}")), FSDP_ERR_LIMIT);
}
