/* The JSON reader: strict grammar, exact numbers, bounded depth, errors with line and column. */
#include "base/data/json.h"
#include "base/core/mem.h"

#include "base/text.h"
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* The text lies in memory of exactly its size, so that the sanitizer sees any read after it. */
typedef struct exact_text {
    fsdp_json json;
    char *copy;
} exact_text;

static exact_text open_text(const char *text, size_t size)
{
    exact_text opened = {.copy = fsdp_alloc(size, 1)};
    memcpy(opened.copy, text, size);
    fsdp_json_init(&opened.json, opened.copy, size, "m.json");
    return opened;
}

static void close_text(exact_text *opened)
{
    fsdp_json_release(&opened->json);
    fsdp_free(opened->copy);
}

static fsdp_status skip_all(const char *text, size_t size, fsdp_error *err)
{
    exact_text opened = open_text(text, size);
    fsdp_status status = fsdp_json_skip(&opened.json, err);
    if (status == FSDP_OK)
        status = fsdp_json_finish(&opened.json, err);
    if (status == FSDP_OK)
        cr_assert_eq(opened.json.depth, 0);
    close_text(&opened);
    return status;
}

static void check_valid(const char *text)
{
    fsdp_error err = {0};
    cr_assert_eq(skip_all(text, strlen(text), &err), FSDP_OK, "%s: %s", text, err.text);
}

static void check_invalid(const char *text, const char *message)
{
    fsdp_error err = {0};
    cr_assert_eq(skip_all(text, strlen(text), &err), FSDP_ERR_DAMAGED, "%s", text);
    cr_assert_str_eq(err.text, message);
}

Test(json, valid_texts_pass)
{
    check_valid("null");
    check_valid(" \t\r\n true \n");
    check_valid("[]");
    check_valid("[ ]");
    check_valid("{}");
    check_valid("{ }");
    check_valid("[1,2 , [3,[]],{}]");
    check_valid("{\"a\":{\"b\":[{\"c\":null},{}]},\"d\":false}");
    check_valid("[0,-0,1.5,-1e3,1E+3,1e-3,0.0e0]");
    check_valid("\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e4\\ud83d\\ude00\"");
}

Test(json, invalid_texts_are_refused_with_line_and_column)
{
    check_invalid("", "'m.json' line 1 column 1: the text ends where a value was expected");
    check_invalid("  ", "'m.json' line 1 column 3: the text ends where a value was expected");
    check_invalid("[1,\n 2,\n]", "'m.json' line 3 column 1: a value was expected");
    check_invalid("[1 2]", "'m.json' line 1 column 4: ',' or ']' was expected");
    check_invalid("[,1]", "'m.json' line 1 column 2: a value was expected");
    check_invalid("[1", "'m.json' line 1 column 3: the text ends where ',' or ']' was expected");
    check_invalid("[", "'m.json' line 1 column 2: the text ends where a value was expected");
    check_invalid("{",
                  "'m.json' line 1 column 2: the text ends where a key in quotes was expected");
    check_invalid("{\"a\":1,}", "'m.json' line 1 column 8: a key in quotes was expected");
    check_invalid("{\"a\" 1}", "'m.json' line 1 column 6: ':' was expected");
    check_invalid("{\"a\":}", "'m.json' line 1 column 6: a value was expected");
    check_invalid("{\"a\":1 \"b\":2}", "'m.json' line 1 column 8: ',' or '}' was expected");
    check_invalid("{a:1}", "'m.json' line 1 column 2: a key in quotes was expected");
    check_invalid("[1}", "'m.json' line 1 column 3: ',' or ']' was expected");
    check_invalid("1 2",
                  "'m.json' line 1 column 3: the end of the value is followed by other text");
    check_invalid("]", "'m.json' line 1 column 1: a value was expected");
    check_invalid("nul", "'m.json' line 1 column 1: null was expected");
    check_invalid("TRUE", "'m.json' line 1 column 1: a value was expected");
    check_invalid("'a'", "'m.json' line 1 column 1: a value was expected");
    check_invalid("NaN", "'m.json' line 1 column 1: a value was expected");
    check_invalid("// c\n1", "'m.json' line 1 column 1: a value was expected");
}

Test(json, numbers_follow_the_grammar)
{
    static const char *const wrong[] = {"-",   "+1",  "01",  "1.",   ".5",       "1e",
                                        "1e+", "-.5", "0x1", "1.e3", "Infinity", "1_0"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        fsdp_error err = {0};
        cr_assert_eq(skip_all(wrong[i], strlen(wrong[i]), &err), FSDP_ERR_DAMAGED, "%s", wrong[i]);
    }
}

Test(json, strings_follow_the_grammar)
{
    check_invalid("\"abc", "'m.json' line 1 column 1: a string has no end");
    check_invalid("\"abc\\\"", "'m.json' line 1 column 1: a string has no end");
    check_invalid("\"abc\\", "'m.json' line 1 column 1: a string has no end");
    check_invalid("\"a\nb\"", "'m.json' line 1 column 3: a string has a control character");
    check_invalid("\"\\x41\"", "'m.json' line 1 column 3: a string has an unknown escape");
    check_invalid("\"\\u12\"", "'m.json' line 1 column 4: four hexadecimal digits were expected");
    check_invalid("\"\\u12g4\"", "'m.json' line 1 column 4: four hexadecimal digits were expected");
    check_invalid("\"\\ud800\"", "'m.json' line 1 column 4: a string has half of a surrogate pair");
    check_invalid("\"\\udc00\"", "'m.json' line 1 column 4: a string has half of a surrogate pair");
    check_invalid("\"\\ud800\\u0041\"",
                  "'m.json' line 1 column 4: a string has half of a surrogate pair");
    check_invalid("\"\\ud800\\ue000\"",
                  "'m.json' line 1 column 4: a string has half of a surrogate pair");
    check_invalid("\"\\ud800x\"",
                  "'m.json' line 1 column 4: a string has half of a surrogate pair");
    check_invalid("\"\xff\"", "'m.json' line 1 column 1: a string is not UTF-8");
    check_invalid("\"\xed\xa0\x80\"", "'m.json' line 1 column 1: a string is not UTF-8");
}

Test(json, every_truncation_of_a_valid_text_is_refused)
{
    static const char text[] = "{\"a\":[1.5e3,\"x\\u00e4\\n\",true,null],\"b\":{\"c\":-7}}";
    for (size_t size = 0; size < sizeof text - 1; size++) {
        fsdp_error err = {0};
        cr_assert_eq(skip_all(text, size, &err), FSDP_ERR_DAMAGED, "%zu bytes", size);
    }
    check_valid(text);
}

Test(json, strings_come_back_unescaped_with_nul_and_a_zero_behind)
{
    static const char text[] = "\"a\\u0000b\\ud83d\\ude00\\u00e4\\u20ac\\t\\/\"";
    exact_text opened = open_text(text, sizeof text - 1);
    const char *data = NULL;
    size_t size = 0;
    cr_assert_eq(fsdp_json_string(&opened.json, &data, &size, NULL), FSDP_OK);
    static const char expected[] = "a\0b\xf0\x9f\x98\x80\xc3\xa4\xe2\x82\xac\t/";
    cr_assert_eq(size, sizeof expected - 1);
    cr_assert_eq(memcmp(data, expected, sizeof expected), 0);
    cr_assert_eq(fsdp_json_peek(&opened.json), FSDP_JSON_END);
    close_text(&opened);
}

Test(json, special_characters_are_seen_at_any_place_of_a_string)
{
    static const struct {
        const char *text, *meaning;
    } specials[] = {{"\\n", "\n"}, {"\xc3\xa4", "\xc3\xa4"}, {"\\\\", "\\"}, {"\x7f", "\x7f"}};
    for (size_t i = 0; i < 4 * 40; i++) {
        char text[100], expected[100];
        int before = (int)i / 4;
        snprintf(text, sizeof text, "\"%.*s%sz!#\"", before,
                 "abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGH", specials[i % 4].text);
        snprintf(expected, sizeof expected, "%.*s%sz!#", before,
                 "abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGH", specials[i % 4].meaning);
        exact_text opened = open_text(text, strlen(text));
        const char *data = NULL;
        size_t size = 0;
        cr_assert_eq(fsdp_json_string(&opened.json, &data, &size, NULL), FSDP_OK);
        cr_assert_eq(size, strlen(expected));
        cr_assert_str_eq(data, expected);
        close_text(&opened);
        char *place = strstr(text, specials[i % 4].text);
        *place = '\x1f';
        cr_assert_eq(skip_all(text, strlen(text), NULL), FSDP_ERR_DAMAGED);
        *place = '\xff';
        cr_assert_eq(skip_all(text, strlen(text), NULL), FSDP_ERR_DAMAGED);
    }
}

Test(json, what_text_writes_json_reads)
{
    for (unsigned code = 0; code < 0x300; code++) {
        char name[8];
        int length = code < 0x80 ? snprintf(name, sizeof name, "x%cy", (int)code)
                                 : snprintf(name, sizeof name, "x%c%cy", (int)(0xC0 | code >> 6),
                                            (int)(0x80 | (code & 63)));
        fsdp_text text = {0};
        fsdp_text_add_json_string(&text, name, (size_t)length);
        exact_text opened = open_text(text.data, text.size);
        const char *data = NULL;
        size_t size = 0;
        cr_assert_eq(fsdp_json_string(&opened.json, &data, &size, NULL), FSDP_OK);
        cr_assert_eq(size, (size_t)length);
        cr_assert_eq(memcmp(data, name, size), 0);
        close_text(&opened);
        fsdp_text_release(&text);
    }
}

static fsdp_status read_i64(const char *text, int64_t *value_out)
{
    exact_text opened = open_text(text, strlen(text));
    fsdp_status status = fsdp_json_i64(&opened.json, value_out, NULL);
    if (status == FSDP_OK)
        status = fsdp_json_finish(&opened.json, NULL);
    close_text(&opened);
    return status;
}

static fsdp_status read_u64(const char *text, uint64_t *value_out)
{
    exact_text opened = open_text(text, strlen(text));
    fsdp_status status = fsdp_json_u64(&opened.json, value_out, NULL);
    if (status == FSDP_OK)
        status = fsdp_json_finish(&opened.json, NULL);
    close_text(&opened);
    return status;
}

static fsdp_status read_f64(const char *text, double *value_out)
{
    exact_text opened = open_text(text, strlen(text));
    fsdp_status status = fsdp_json_f64(&opened.json, value_out, NULL);
    if (status == FSDP_OK)
        status = fsdp_json_finish(&opened.json, NULL);
    close_text(&opened);
    return status;
}

Test(json, integers_are_exact_over_the_whole_range)
{
    int64_t i = 1;
    uint64_t u = 1;
    cr_assert(read_i64("-0", &i) == FSDP_OK && i == 0);
    cr_assert(read_i64("9007199254740993", &i) == FSDP_OK && i == 9007199254740993);
    cr_assert(read_i64("9223372036854775807", &i) == FSDP_OK && i == INT64_MAX);
    cr_assert(read_i64("-9223372036854775808", &i) == FSDP_OK && i == INT64_MIN);
    cr_assert(read_u64("18446744073709551615", &u) == FSDP_OK && u == UINT64_MAX);
    cr_assert_eq(read_i64("9223372036854775808", &i), FSDP_ERR_DAMAGED);
    cr_assert_eq(read_i64("-9223372036854775809", &i), FSDP_ERR_DAMAGED);
    cr_assert_eq(read_i64("18446744073709551617", &i), FSDP_ERR_DAMAGED);
    cr_assert_eq(read_u64("18446744073709551616", &u), FSDP_ERR_DAMAGED);
    cr_assert_eq(read_u64("100000000000000000000000", &u), FSDP_ERR_DAMAGED);
    cr_assert_eq(read_u64("-1", &u), FSDP_ERR_DAMAGED);
    cr_assert_eq(read_u64("-0", &u), FSDP_ERR_DAMAGED);
}

Test(json, a_fraction_or_an_exponent_is_no_integer)
{
    int64_t i = 0;
    cr_assert_eq(read_i64("1.0", &i), FSDP_ERR_DAMAGED);
    cr_assert_eq(read_i64("1e3", &i), FSDP_ERR_DAMAGED);
    cr_assert_eq(read_i64("\"1\"", &i), FSDP_ERR_DAMAGED);
    cr_assert_eq(read_i64("null", &i), FSDP_ERR_DAMAGED);
}

Test(json, doubles_are_the_nearest_and_never_infinite)
{
    double value = 0;
    cr_assert(read_f64("0.1", &value) == FSDP_OK && value == 0.1);
    cr_assert(read_f64("-0", &value) == FSDP_OK && signbit(value));
    cr_assert(read_f64("5e-324", &value) == FSDP_OK && value == 5e-324);
    cr_assert(read_f64("1e-400", &value) == FSDP_OK && value == 0);
    cr_assert(read_f64("1.7976931348623157e308", &value) == FSDP_OK &&
              value == 0x1.fffffffffffffp1023);
    cr_assert_eq(read_f64("1e309", &value), FSDP_ERR_DAMAGED);
    cr_assert_eq(read_f64("-1e999999999", &value), FSDP_ERR_DAMAGED);
    cr_assert_eq(read_f64("nan", &value), FSDP_ERR_DAMAGED);
}

Test(json, a_reader_walks_objects_and_arrays)
{
    static const char text[] = " { \"n\" : 3 , \"list\" : [ true , \"s\" ] , \"skipped\" : "
                               "{\"x\":[[],{\"y\":{}}]} , \"last\" : null } ";
    static const char *const names[] = {"n", "list", "last"};
    exact_text opened = open_text(text, sizeof text - 1);
    fsdp_json *json = &opened.json;
    fsdp_json_members members = {.names = names, .count = 3};
    int64_t n = 0;
    bool truth = false, more = false;
    cr_assert_eq(fsdp_json_peek(json), FSDP_JSON_OBJECT);
    cr_assert_eq(fsdp_json_enter_object(json, NULL), FSDP_OK);
    for (int round = 0;; round++) {
        const char *data = NULL;
        size_t size = 0;
        int which = 0;
        cr_assert_eq(fsdp_json_next_member(json, &members, &which, NULL), FSDP_OK);
        if (which < 0) {
            cr_assert_eq(round, 3);
            break;
        }
        switch (which) {
        case 0: cr_assert_eq(fsdp_json_i64(json, &n, NULL), FSDP_OK); break;
        case 1:
            cr_assert_eq(fsdp_json_enter_array(json, NULL), FSDP_OK);
            cr_assert(fsdp_json_next_item(json, &more, NULL) == FSDP_OK && more);
            cr_assert_eq(fsdp_json_peek(json), FSDP_JSON_BOOL);
            cr_assert_eq(fsdp_json_bool(json, &truth, NULL), FSDP_OK);
            cr_assert(fsdp_json_next_item(json, &more, NULL) == FSDP_OK && more);
            cr_assert_eq(fsdp_json_string(json, &data, &size, NULL), FSDP_OK);
            cr_assert_str_eq(data, "s");
            cr_assert(fsdp_json_next_item(json, &more, NULL) == FSDP_OK && !more);
            break;
        default: cr_assert_eq(fsdp_json_null(json, NULL), FSDP_OK); break;
        }
    }
    cr_assert_eq(fsdp_json_finish(json, NULL), FSDP_OK);
    cr_assert(n == 3 && truth && members.seen == 7);
    close_text(&opened);
}

Test(json, a_key_that_stands_twice_is_damage)
{
    static const char *const names[] = {"a", "ab"};
    static const char text[] =
        "{\"ab\": 1, \"a\\u0000\": [2], \"a\": 3, \"a\\u0000\": 4, \"a\": 5}";
    exact_text opened = open_text(text, sizeof text - 1);
    fsdp_json_members members = {.names = names, .count = 2};
    fsdp_error err = {0};
    fsdp_json *json = &opened.json;
    cr_assert_eq(fsdp_json_enter_object(json, &err), FSDP_OK);
    for (int expected = 1; expected >= 0; expected--) {
        int which;
        cr_assert_eq(fsdp_json_next_member(json, &members, &which, &err), FSDP_OK);
        cr_assert_eq(which, expected);
        cr_assert_eq(fsdp_json_skip(json, &err), FSDP_OK);
    }
    int which;
    cr_assert_eq(fsdp_json_next_member(json, &members, &which, &err), FSDP_ERR_DAMAGED);
    cr_assert_not_null(strstr(err.text, "the key 'a' appears twice"));
    close_text(&opened);
}

Test(json, depth_is_bounded)
{
    char text[4001];
    for (int depth = 64; depth <= 65; depth++) {
        fsdp_error err = {0};
        memset(text, '[', (size_t)depth);
        memset(text + depth, ']', (size_t)depth);
        fsdp_status status = skip_all(text, (size_t)depth * 2, &err);
        cr_assert_eq(status, depth == 64 ? FSDP_OK : FSDP_ERR_DAMAGED);
    }
    memset(text, '[', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    check_invalid(text, "'m.json' line 1 column 65: values are nested more than 64 deep");
}

Test(json, memory_running_out_is_reported)
{
    fsdp_error err = {0};
    fsdp_json json;
    const char *data = NULL;
    size_t size = 0;
    fsdp_json_init(&json, "\"a\"", 3, "m.json");
    fsdp_mem_fail_after(0, false);
    fsdp_status status = fsdp_json_string(&json, &data, &size, &err);
    fsdp_mem_fail_after(-1, false);
    cr_assert_eq(status, FSDP_ERR_LIMIT);
    cr_assert_eq(fsdp_json_string(&json, &data, &size, &err), FSDP_OK);
    fsdp_json_release(&json);
}

Test(json, base64_comes_back)
{
    char bytes[64];
    for (size_t n = 0; n < sizeof bytes; n++) {
        bytes[n] = (char)(n * 37 + 200);
        fsdp_text text = {0};
        fsdp_text_add_base64(&text, bytes, n);
        void *data = NULL;
        size_t size = 0;
        cr_assert_eq(fsdp_base64_decode(text.size ? text.data : "", text.size, &data, &size, NULL),
                     FSDP_OK);
        cr_assert_eq(size, n);
        cr_assert_eq(memcmp(data, bytes, n), 0);
        fsdp_free(data);
        fsdp_text_release(&text);
    }
}

Test(json, base64_that_is_not_strict_is_refused)
{
    static const char *const wrong[] = {"Zg",   "Zg=",  "Zh==",     "Zm9=", "Zm 9", "Zm9v\n",
                                        "====", "Z===", "Zg==Zg==", "=Zg=", "Zm-_", "Z=g="};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        void *data = NULL;
        size_t size = 0;
        fsdp_status status = fsdp_base64_decode(wrong[i], strlen(wrong[i]), &data, &size, NULL);
        cr_assert_eq(status, FSDP_ERR_DAMAGED, "%s", wrong[i]);
        cr_assert_null(data);
    }
}
