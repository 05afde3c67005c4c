/* Values: copies are deep and equal, failures leave nothing after. */
#include "base/core/mem.h"
#include <fsdp/value.h>

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

static fsdp_value bytes_value(fsdp_value_kind kind, const char *data, size_t size)
{
    fsdp_value value = {0};
    fsdp_error err = {0};
    cr_assert_eq(fsdp_value_set_bytes(&value, kind, data, size, &err), FSDP_OK, "%s", err.text);
    return value;
}

static fsdp_value items_value(fsdp_value_kind kind, size_t count)
{
    fsdp_value value = {0};
    fsdp_error err = {0};
    cr_assert_eq(fsdp_value_set_items(&value, kind, count, &err), FSDP_OK, "%s", err.text);
    return value;
}

/* One of everything: [null, true, -5, 2^64 - 1, 0.5, "\0x", bytes, opaque, {"k": []}, 2^70, 1-2i, class] */
static fsdp_value sample(void)
{
    fsdp_value list = items_value(FSDP_VALUE_LIST, 12), *item = list.as.list.items;
    item[1] = fsdp_value_bool(true);
    item[2] = fsdp_value_i64(-5);
    item[3] = fsdp_value_u64(UINT64_MAX);
    item[4] = fsdp_value_f64(0.5);
    item[5] = bytes_value(FSDP_VALUE_STRING, "\0x", 2);
    item[6] = bytes_value(FSDP_VALUE_BYTES, "\xff\x00\x80", 3);
    item[7] = bytes_value(FSDP_VALUE_OPAQUE, "", 0);
    item[9] = bytes_value(FSDP_VALUE_INTEGER, "1180591620717411303424", 22);
    item[10] = (fsdp_value){.kind = FSDP_VALUE_COMPLEX, .as.complex_parts = {1, -2}};
    item[11] = bytes_value(FSDP_VALUE_CLASS, "a.B", 3);
    item[8] = items_value(FSDP_VALUE_DICT, 2);
    item[8].as.list.items[0] = bytes_value(FSDP_VALUE_STRING, "k", 1);
    item[8].as.list.items[1] = items_value(FSDP_VALUE_LIST, 0);
    return list;
}

Test(value, a_zeroed_value_is_null)
{
    fsdp_value value = {0}, copy = fsdp_value_i64(3);
    cr_assert_eq(value.kind, FSDP_VALUE_NULL);
    cr_assert_eq(fsdp_value_copy(&value, &copy, NULL), FSDP_OK);
    cr_assert(fsdp_value_equal(&value, &copy));
    fsdp_value_release(&value);
    fsdp_value_release(&value);
}

Test(value, a_copy_is_equal_and_shares_nothing)
{
    fsdp_value value = sample(), copy = {0}, again = sample();
    cr_assert_eq(fsdp_value_copy(&value, &copy, NULL), FSDP_OK);
    cr_assert(fsdp_value_equal(&value, &copy));
    fsdp_value_release(&value);
    cr_assert_eq(value.kind, FSDP_VALUE_NULL);
    cr_assert(fsdp_value_equal(&again, &copy));
    fsdp_value_release(&copy);
    fsdp_value_release(&again);
}

Test(value, every_difference_counts)
{
    fsdp_value whole = sample();
    for (size_t i = 0; i < whole.as.list.count; i++) {
        for (size_t k = 0; k < whole.as.list.count; k++)
            cr_assert_eq(fsdp_value_equal(&whole.as.list.items[i], &whole.as.list.items[k]),
                         i == k);
    }
    fsdp_value other = sample();
    cr_assert(fsdp_value_equal(&whole, &other));
    other.as.list.items[6].as.bytes.data[2] = 0;
    cr_assert_not(fsdp_value_equal(&whole, &other));
    fsdp_value_release(&other);
    other = sample();
    fsdp_value_release(&other.as.list.items[8].as.list.items[1]);
    cr_assert_not(fsdp_value_equal(&whole, &other));
    fsdp_value_release(&other);
    fsdp_value_release(&whole);
}

Test(value, numbers_of_other_kinds_or_bits_differ)
{
    fsdp_value i64 = fsdp_value_i64(1), u64 = fsdp_value_u64(1), yes = fsdp_value_bool(true);
    fsdp_value zero = fsdp_value_f64(0.0), minus = fsdp_value_f64(-0.0), nan = fsdp_value_f64(NAN);
    fsdp_value other_nan = fsdp_value_f64(-NAN);
    fsdp_value turns = {.kind = FSDP_VALUE_COMPLEX, .as.complex_parts = {1, -2}}, back = turns;
    back.as.complex_parts[1] = 2;
    cr_assert_not(fsdp_value_equal(&turns, &back));
    cr_assert_not(fsdp_value_equal(&i64, &u64));
    cr_assert_not(fsdp_value_equal(&i64, &yes));
    cr_assert_not(fsdp_value_equal(&zero, &minus));
    cr_assert(fsdp_value_equal(&nan, &nan));
    cr_assert_not(fsdp_value_equal(&nan, &other_nan));
}

Test(value, bytes_have_a_zero_behind_them)
{
    fsdp_value value = bytes_value(FSDP_VALUE_STRING, "abcdef", 3);
    cr_assert_eq(value.as.bytes.size, 3);
    cr_assert_str_eq(value.as.bytes.data, "abc");
    fsdp_value_release(&value);
    value = bytes_value(FSDP_VALUE_BYTES, NULL, 0);
    cr_assert_str_eq(value.as.bytes.data, "");
    fsdp_value_release(&value);
}

Test(value, setting_releases_what_was_there)
{
    fsdp_value value = sample();
    cr_assert_eq(fsdp_value_set_bytes(&value, FSDP_VALUE_STRING, "a", 1, NULL), FSDP_OK);
    cr_assert_eq(fsdp_value_set_items(&value, FSDP_VALUE_DICT, 4, NULL), FSDP_OK);
    cr_assert_eq(value.as.list.items[3].kind, FSDP_VALUE_NULL);
    fsdp_value_release(&value);
}

Test(value, a_refused_value_stays_as_it_was)
{
    fsdp_value value = fsdp_value_i64(7), seven = fsdp_value_i64(7);
    fsdp_error err = {0};
    cr_assert_eq(fsdp_value_set_bytes(&value, FSDP_VALUE_STRING, "a\xff", 2, &err), FSDP_ERR_USAGE);
    cr_assert(strstr(err.text, "not UTF-8"), "%s", err.text);
    cr_assert_eq(fsdp_value_set_bytes(&value, FSDP_VALUE_I64, "a", 1, &err), FSDP_ERR_USAGE);
    cr_assert_eq(fsdp_value_set_bytes(&value, FSDP_VALUE_BYTES, NULL, 1, &err), FSDP_ERR_USAGE);
    cr_assert_eq(fsdp_value_set_items(&value, FSDP_VALUE_DICT, 3, &err), FSDP_ERR_USAGE);
    cr_assert(strstr(err.text, "dict of 3"), "%s", err.text);
    cr_assert_eq(fsdp_value_set_items(&value, FSDP_VALUE_BYTES, 2, &err), FSDP_ERR_USAGE);
    cr_assert_eq(fsdp_value_set_items(&value, FSDP_VALUE_LIST, SIZE_MAX / 2, &err), FSDP_ERR_LIMIT);
    cr_assert(fsdp_value_equal(&value, &seven));
}

/* A number inside `depth` lists. */
static fsdp_value nested(int depth)
{
    fsdp_value value = fsdp_value_i64(1);
    for (int i = 0; i < depth; i++) {
        fsdp_value outer = items_value(FSDP_VALUE_LIST, 1);
        outer.as.list.items[0] = value;
        value = outer;
    }
    return value;
}

Test(value, nesting_ends_at_the_depth_limit)
{
    fsdp_value deep = nested(FSDP_VALUE_DEPTH), deeper = nested(FSDP_VALUE_DEPTH + 1), copy;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_value_copy(&deep, &copy, &err), FSDP_OK, "%s", err.text);
    cr_assert(fsdp_value_equal(&deep, &copy));
    fsdp_value_release(&copy);
    cr_assert_eq(fsdp_value_copy(&deeper, &copy, &err), FSDP_ERR_USAGE);
    cr_assert(strstr(err.text, "more than 1024 deep"), "%s", err.text);
    cr_assert_eq(copy.kind, FSDP_VALUE_NULL);
    fsdp_value_release(&deep);
    fsdp_value_release(&deeper);
}

Test(value, an_unknown_kind_is_not_copied)
{
    fsdp_value odd = {.kind = (fsdp_value_kind)77}, copy;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_value_copy(&odd, &copy, &err), FSDP_ERR_USAGE);
    cr_assert(strstr(err.text, "77"), "%s", err.text);
    cr_assert_not(fsdp_value_equal(&odd, &odd));
}

Test(value, a_copy_that_runs_out_of_memory_is_null)
{
    fsdp_value value = sample(), copy = {0};
    bool succeeded = false;
    int failures = 0;
    for (int64_t n = 0; !succeeded; n++) {
        fsdp_error err = {0};
        fsdp_mem_fail_after(n, true);
        succeeded = fsdp_value_copy(&value, &copy, &err) == FSDP_OK;
        fsdp_mem_fail_after(-1, false);
        if (succeeded)
            break;
        failures++;
        cr_assert_eq(err.status, FSDP_ERR_LIMIT);
        cr_assert_eq(copy.kind, FSDP_VALUE_NULL);
    }
    cr_assert_geq(failures, 7);
    cr_assert(fsdp_value_equal(&value, &copy));
    fsdp_value_release(&copy);
    fsdp_value_release(&value);
}
