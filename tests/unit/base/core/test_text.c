/* Text: JSON spelling, doubles that read back, base64, UTF-8, names safe for a terminal. */
#include "base/text.h"

#include "base/io/io.h"
#include "base/data/json.h"
#include "base/core/mem.h"

#include <criterion/criterion.h>
#include <float.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

Test(text, grows_and_stays_terminated)
{
    fsdp_text text = {0};
    for (int i = 0; i < 1000; i++)
        fsdp_text_addf(&text, "%d,", i % 10);
    fsdp_text_add(&text, "x\0y", 3);
    cr_assert_not(text.failed);
    cr_assert_eq(text.size, 2003);
    cr_assert_eq(text.data[2003], '\0');
    cr_assert_eq(memcmp(text.data + 2000, "x\0y", 3), 0);
    fsdp_text_release(&text);
    cr_assert_null(text.data);
}

Test(text, remembers_that_memory_ran_out)
{
    fsdp_text text = {0};
    fsdp_mem_fail_after(0, false);
    fsdp_text_add(&text, "a", 1);
    fsdp_mem_fail_after(-1, false);
    fsdp_text_add(&text, "b", 1);
    fsdp_text_addf(&text, "%d", 1);
    fsdp_text_add_hex(&text, "c", 1);
    fsdp_text_add_base64(&text, "d", 1);
    cr_assert(text.failed);
    cr_assert_eq(text.size, 0);
    fsdp_text_release(&text);
}

static void check_json_string(const char *data, size_t size, const char *expected)
{
    fsdp_text text = {0};
    fsdp_text_add_json_string(&text, data, size);
    cr_assert_str_eq(text.data, expected);
    fsdp_text_release(&text);
}

Test(text, json_strings_escape_what_json_demands)
{
    check_json_string("", 0, "\"\"");
    check_json_string("a\"b\\c/d", 7, "\"a\\\"b\\\\c/d\"");
    check_json_string("\0\x01\b\t\n\x0b\f\r\x1f\x7f", 10,
                      "\"\\u0000\\u0001\\b\\t\\n\\u000b\\f\\r\\u001f\x7f\"");
    check_json_string("gr\xc3\xbc\xc3\x9f \xf0\x9f\x98\x80", 11,
                      "\"gr\xc3\xbc\xc3\x9f \xf0\x9f\x98\x80\"");
}

/* Files keep such characters as they are, so that their bytes stay the same. */
Test(text, json_strings_for_people_escape_what_misleads_a_terminal)
{
    static const char data[] = "\xc2\x9b"
                               "2J\x7f\xe2\x80\xae\xc2\xa0";
    fsdp_text text = {0};
    check_json_string(data, 10,
                      "\"\xc2\x9b"
                      "2J\x7f\xe2\x80\xae\xc2\xa0\"");
    fsdp_text_add_json_shown(&text, data, 10);
    cr_expect_str_eq(text.data, "\"\\u009b2J\\u007f\\u202e\xc2\xa0\"");
    fsdp_text_release(&text);
}

Test(text, json_strings_replace_bytes_that_are_not_utf8)
{
    check_json_string("a\xff"
                      "b",
                      3,
                      "\"a\xEF\xBF\xBD"
                      "b\"");
    check_json_string("\xc3", 1, "\"\xEF\xBF\xBD\"");
    check_json_string("\xed\xa0\x80", 3, "\"\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\"");
}

static void check_f64(double value, const char *expected)
{
    fsdp_text text = {0};
    fsdp_text_add_f64(&text, value);
    cr_assert_str_eq(text.data, expected);
    fsdp_text_release(&text);
}

Test(text, doubles_are_short_and_always_look_like_doubles)
{
    check_f64(0, "0.0");
    check_f64(-0.0, "-0.0");
    check_f64(1, "1.0");
    check_f64(-17, "-17.0");
    check_f64(0.1, "0.1");
    check_f64(1e22, "1e+22");
    check_f64(1e-4, "0.0001");
    check_f64(0.1 + 0.2, "0.30000000000000004");
    check_f64(5e-324, "5e-324");
    check_f64(DBL_MAX, "1.7976931348623157e+308");
    check_f64(123456789012345678.0, "1.2345678901234568e+17");
}

static uint64_t step_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state ^ *state >> 29;
}

Test(text, any_double_reads_back_with_the_same_bits)
{
    uint64_t state = 1;
    for (int i = 0; i < 20000; i++) {
        uint64_t bits = step_random(&state);
        if (i % 10 == 0)
            bits &= 0x800FFFFFFFFFFFFFu; /* subnormal */
        double value, back;
        memcpy(&value, &bits, sizeof value);
        if (value - value != 0)
            continue;
        fsdp_text text = {0};
        fsdp_text_add_f64(&text, value);
        back = strtod(text.data, NULL);
        cr_assert_eq(memcmp(&back, &value, sizeof value), 0, "%s", text.data);
        fsdp_text_release(&text);
    }
}

static bool decimal_comma(const char *locale)
{
    return setlocale(LC_ALL, locale) && strcmp(localeconv()->decimal_point, ",") == 0;
}

/* Most machines have no such locale: one is compiled where the sources of the locales are there. */
static bool set_comma_locale(const char *folder)
{
    char command[200];
    if (decimal_comma("de_DE.UTF-8") || decimal_comma("fr_FR.UTF-8"))
        return true;
    snprintf(command, sizeof command, "localedef -i de_DE -f UTF-8 %s/de_DE.UTF-8 2>/dev/null",
             folder);
    return setenv("LOCPATH", folder, 1) == 0 && system(command) == 0 &&
           decimal_comma("de_DE.UTF-8");
}

Test(text, the_locale_of_the_process_does_not_matter)
{
    char folder[] = "/tmp/fsdp-test-text-XXXXXX";
    cr_assert_not_null(mkdtemp(folder));
    bool comma = set_comma_locale(folder);
    cr_assert_eq(fsdp_io_remove_tree(NULL, folder, NULL), FSDP_OK);
    cr_assert(comma, "there is no locale with a decimal comma: the package locales is missing");
    check_f64(0.1, "0.1");
    check_f64(-1.5e300, "-1.5e+300");
    fsdp_json json;
    double value = 0;
    fsdp_json_init(&json, "-1.25", 5, "x");
    cr_assert_eq(fsdp_json_f64(&json, &value, NULL), FSDP_OK);
    cr_assert_float_eq(value, -1.25, 0);
    fsdp_json_release(&json);
}

Test(text, base64_is_that_of_the_rfc)
{
    static const char *const expected[] = {"",         "Zg==",     "Zm8=",    "Zm9v",
                                           "Zm9vYg==", "Zm9vYmE=", "Zm9vYmFy"};
    for (size_t n = 0; n <= 6; n++) {
        fsdp_text text = {0};
        fsdp_text_add_base64(&text, "foobar", n);
        cr_assert_str_eq(text.data, expected[n]);
        fsdp_text_release(&text);
    }
}

Test(text, hex_has_two_lower_case_digits_a_byte)
{
    fsdp_text text = {0};
    fsdp_text_add_hex(&text, "\x00\x0f\xf0\xab", 4);
    cr_assert_str_eq(text.data, "000ff0ab");
    fsdp_text_release(&text);
}

Test(text, utf8_accepts_only_what_is_well_formed)
{
    static const struct {
        const char *data;
        size_t size;
        bool valid;
    } cases[] = {
        {"", 0, true},
        {"a\0b", 3, true},
        {"plain text longer than eight", 28, true},
        {"\xc2\x80\xdf\xbf", 4, true},
        {"\xe0\xa0\x80\xef\xbf\xbf", 6, true},
        {"\xed\x9f\xbf\xee\x80\x80", 6, true},
        {"\xf0\x90\x80\x80\xf4\x8f\xbf\xbf", 8, true},
        {"\x80", 1, false},
        {"\xc0\xaf", 2, false},
        {"\xc1\xbf", 2, false},
        {"\xe0\x9f\xbf", 3, false},
        {"\xed\xa0\x80", 3, false},
        {"\xf0\x8f\xbf\xbf", 4, false},
        {"\xf4\x90\x80\x80", 4, false},
        {"\xf5\x80\x80\x80", 4, false},
        {"\xff", 1, false},
        {"12345678\xc3", 9, false},
        {"1234567\xe2\x82", 9, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        cr_assert_eq(fsdp_utf8_valid(cases[i].data, cases[i].size), cases[i].valid, "case %zu", i);
}

static void check_printable(const char *data, size_t size, size_t room, const char *expected)
{
    char out[256];
    memset(out, '#', sizeof out);
    cr_assert_str_eq(fsdp_printable(data, size, out, room), expected);
    for (size_t i = room; i < sizeof out; i++)
        cr_assert_eq(out[i], '#');
}

Test(text, a_terminal_never_sees_control_characters)
{
    check_printable("layers.0.wq", 11, 64, "layers.0.wq");
    check_printable("a\x1b[2Jb\n\0c", 9, 64, "a\\x1b[2Jb\\x0a\\x00c");
    check_printable("\\x1b", 4, 64, "\\\\x1b");
    check_printable("\x7f\xc2\x9b\xff", 4, 64, "\\x7f\\xc2\\x9b\\xff");
    check_printable("\xe2\x80\xae"
                    "evil",
                    7, 64, "\\xe2\\x80\\xaeevil");
    check_printable("gr\xc3\xbc\xc3\x9f", 6, 64, "gr\xc3\xbc\xc3\x9f");
}

Test(text, long_names_are_cut_in_the_middle)
{
    check_printable("0123456789", 10, 11, "0123456789");
    check_printable("0123456789", 10, 10, "012...789");
    check_printable("0123456789", 10, 8, "01...89");
    check_printable("0123456789", 10, 4, "...");
    check_printable("0123456789", 10, 3, "");
    /* no character is cut in two: both ends may come out shorter */
    check_printable("\xc3\xbc\xc3\xbc\xc3\xbc\xc3\xbc\xc3\xbc", 10, 10, "\xc3\xbc...\xc3\xbc");
    char name[60000];
    memset(name, 'n', sizeof name);
    char out[80];
    cr_assert_eq(strlen(fsdp_printable(name, sizeof name, out, sizeof out)), 79);
}

Test(text, a_message_keeps_the_spelling_of_its_names)
{
    char out[64];
    cr_assert_str_eq(
        fsdp_printable_message("'\\x1b' in 'a\x1b[2J\n/\xc3\xbc'", 21, out, sizeof out),
        "'\\x1b' in 'a\\x1b[2J\\x0a/\xc3\xbc'");
}

static void check_quoted(const char *word, const char *expected)
{
    fsdp_text text = {0};
    fsdp_text_add_quoted(&text, word);
    cr_assert_str_eq(text.data, expected);
    fsdp_text_release(&text);
}

Test(text, a_shell_reads_quoted_words_back)
{
    check_quoted("", "''");
    check_quoted("a $b\\", "'a $b\\'");
    check_quoted("it's", "'it'\\''s'");
    check_quoted("gr\xc3\xbc\xc3\x9f", "'gr\xc3\xbc\xc3\x9f'");
    check_quoted("a\xff'\\\n", "$'a\\xff\\'\\\\\\x0a'");
}

Test(text, words_and_ends_of_bytes)
{
    cr_expect(fsdp_bytes_are("key", 3, "key") && fsdp_bytes_are("keys", 3, "key"));
    cr_expect(!fsdp_bytes_are("key", 2, "key") && !fsdp_bytes_are("kex", 3, "key"));
    cr_expect(fsdp_bytes_are("", 0, "") && !fsdp_bytes_are("k\0y", 3, "k"));
    cr_expect(fsdp_bytes_end("a.bias", 6, ".bias") && fsdp_bytes_end(".bias", 5, ".bias"));
    cr_expect(!fsdp_bytes_end("bias", 4, ".bias") && !fsdp_bytes_end("a.bias", 5, ".bias"));
    cr_expect(fsdp_has_suffix("a.bin", ".bin") && !fsdp_has_suffix(".bin", ".bin"));
    cr_expect(!fsdp_has_suffix("a.bin2", ".bin") && !fsdp_has_suffix("", ".bin"));
}
