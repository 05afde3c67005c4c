/* Pickles that we write come back from our own reader; Python reads them in tests/formats. */
#include "base/core/mem.h"
#include "formats/pickle/pickle.h"
#include "formats/pickle/pickle_write.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

static fsdp_pickle pickle;

/* Pickles value and reads it back: its root. */
static const fsdp_pickle_node *back(fsdp_pickler *pickler, const fsdp_value *value)
{
    fsdp_error err = {0};
    fsdp_pickle_options options = {.where = "test"};
    fsdp_pickler_begin(pickler);
    cr_assert_eq(fsdp_pickler_value(pickler, value, &err), FSDP_OK, "%s", err.text);
    fsdp_pickler_op(pickler, FSDP_OP_STOP);
    cr_assert_not(pickler->text.failed);
    size_t used;
    fsdp_status st =
        fsdp_pickle_parse(&options, pickler->text.data, pickler->text.size, &pickle, &used, &err);
    cr_assert_eq(st, FSDP_OK, "%s", err.text);
    cr_assert_eq(used, pickler->text.size);
    return fsdp_pickle_at(&pickle, pickle.root);
}

static void release(fsdp_pickler *pickler)
{
    fsdp_pickle_release(&pickle);
    fsdp_pickler_release(pickler);
}

Test(pickle_write, every_width_of_integers_comes_back)
{
    static const int64_t numbers[] = {0,
                                      1,
                                      -1,
                                      127,
                                      128,
                                      255,
                                      256,
                                      65535,
                                      65536,
                                      -128,
                                      -129,
                                      INT32_MAX,
                                      INT32_MIN,
                                      INT64_MAX,
                                      INT64_MIN,
                                      INT32_MAX + 1LL,
                                      INT32_MIN - 1LL,
                                      1LL << 40,
                                      -(1LL << 40)};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        fsdp_pickler pickler = {0};
        fsdp_value value = fsdp_value_i64(numbers[i]);
        const fsdp_pickle_node *node = back(&pickler, &value);
        cr_assert_eq(node->kind, FSDP_NODE_INT);
        cr_assert_eq(node->as.i64, numbers[i]);
        release(&pickler);
    }
}

static void expect_decimal(const char *digits)
{
    fsdp_pickler pickler = {0};
    fsdp_value value = {0};
    cr_assert_eq(fsdp_value_set_bytes(&value, FSDP_VALUE_INTEGER, digits, strlen(digits), NULL),
                 FSDP_OK);
    const fsdp_pickle_node *node = back(&pickler, &value);
    char small[32], *text = NULL;
    if (node->kind == FSDP_NODE_INT)
        snprintf(small, sizeof small, "%lld", (long long)node->as.i64);
    else
        text = fsdp_pickle_decimal(node);
    cr_assert_str_eq(text ? text : small, digits);
    fsdp_free(text);
    fsdp_value_release(&value);
    release(&pickler);
}

Test(pickle_write, integers_beyond_64_bits_come_back)
{
    expect_decimal("18446744073709551616");
    expect_decimal("-18446744073709551616");
    expect_decimal("-9223372036854775809");
    expect_decimal("340282366920938463463374607431768211455");
    expect_decimal("-170141183460469231731687303715884105728"); /* exactly 16 bytes */
    expect_decimal("0");
    expect_decimal("-7");
    char digits[4301];
    memset(digits, '9', 4300);
    digits[4300] = '\0';
    expect_decimal(digits);
}

Test(pickle_write, weights_only_refuses_integers_that_it_cannot_load)
{
    char digits[801];
    fsdp_pickler pickler = {.weights_only = true};
    fsdp_error err = {0};
    fsdp_value value = {0};
    memset(digits, '7', 800);
    digits[800] = '\0';
    cr_assert_eq(fsdp_value_set_bytes(&value, FSDP_VALUE_INTEGER, digits, 800, NULL), FSDP_OK);
    fsdp_pickler_begin(&pickler);
    cr_assert_eq(fsdp_pickler_value(&pickler, &value, &err), FSDP_ERR_USAGE);
    cr_assert(strstr(err.text, "weights_only") != NULL, "%s", err.text);
    pickler.weights_only = false;
    cr_assert_eq(fsdp_pickler_value(&pickler, &value, &err), FSDP_OK);
    fsdp_value_release(&value);
    fsdp_pickler_release(&pickler);
}

Test(pickle_write, keys_that_are_lists_are_tuples)
{
    fsdp_pickler pickler = {0};
    fsdp_value dict = {0};
    cr_assert_eq(fsdp_value_set_items(&dict, FSDP_VALUE_DICT, 2, NULL), FSDP_OK);
    cr_assert_eq(fsdp_value_set_items(&dict.as.list.items[0], FSDP_VALUE_LIST, 4, NULL), FSDP_OK);
    dict.as.list.items[0].as.list.items[3] = fsdp_value_i64(5);
    const fsdp_pickle_node *node = back(&pickler, &dict);
    cr_assert_eq(node->kind, FSDP_NODE_DICT);
    const fsdp_pickle_node *key = fsdp_pickle_at(&pickle, node->as.items[0]);
    cr_assert_eq(key->kind, FSDP_NODE_TUPLE);
    cr_assert_eq(key->count, 4);
    fsdp_value_release(&dict);
    release(&pickler);
}

Test(pickle_write, what_python_cannot_hold_is_refused)
{
    fsdp_pickler pickler = {0};
    fsdp_error err = {0};
    fsdp_value dict = {0}, object = {0};
    cr_assert_eq(fsdp_value_set_items(&dict, FSDP_VALUE_DICT, 2, NULL), FSDP_OK);
    cr_assert_eq(fsdp_value_set_items(&dict.as.list.items[0], FSDP_VALUE_DICT, 0, NULL), FSDP_OK);
    fsdp_pickler_begin(&pickler);
    cr_assert_eq(fsdp_pickler_value(&pickler, &dict, &err), FSDP_ERR_USAGE);
    cr_assert_eq(fsdp_value_set_bytes(&object, FSDP_VALUE_CLASS, "a.B", 3, NULL), FSDP_OK);
    cr_assert_eq(fsdp_pickler_value(&pickler, &object, &err), FSDP_ERR_USAGE);
    fsdp_value_release(&dict);
    fsdp_value_release(&object);
    fsdp_pickler_release(&pickler);
}

Test(pickle_write, constants_are_spelled_once)
{
    fsdp_pickler pickler = {0};
    fsdp_pickler_begin(&pickler);
    fsdp_pickler_word(&pickler, "storage");
    fsdp_pickler_global(&pickler, "torch", "storage");
    size_t spelled = pickler.text.size;
    fsdp_pickler_word(&pickler, "storage");
    fsdp_pickler_global(&pickler, "torch", "storage");
    cr_assert_eq(pickler.text.size, spelled + 4);
    cr_assert_eq(memcmp(pickler.text.data + spelled, "h\0h\1", 4), 0);
    fsdp_pickler_release(&pickler);
}
