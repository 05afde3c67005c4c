/* Patterns that cut text into words, classes of code points, and normal form C. */
#include "base/core/mem.h"
#include "runtime/tokens/split.h"

#include <criterion/criterion.h>
#include <string.h>

#define GPT2_REST "| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
#define OPTIMIZED "'(?:[sdmt]|ll|ve|re)" GPT2_REST
#define GPT2 "'s|'t|'re|'ve|'m|'ll|'d" GPT2_REST
#define NEWER(numbers)                                                    \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" numbers \
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define LLAMA3 NEWER("\\p{N}{1,3}")
#define QWEN2 NEWER("\\p{N}")

static fsdp_unicode unicode;

static void init(void)
{
    cr_assert_eq(fsdp_unicode_init(&unicode, true, NULL), FSDP_OK);
}

static void release(void)
{
    fsdp_unicode_release(&unicode);
}

/* The words with '|' between. */
static void expect_words(const char *pattern, const char *text, const char *wanted)
{
    char words[500];
    size_t used = 0;
    fsdp_split split = fsdp_split_of(fsdp_word_pattern_of(pattern, strlen(pattern)));
    cr_assert_not_null(split);
    for (const char *at = text, *end = text + strlen(text); at < end;) {
        size_t size = split(&unicode, at, end);
        cr_assert(size > 0 && size <= (size_t)(end - at));
        memcpy(words + used, at, size);
        used += size;
        at += size;
        words[used++] = at < end ? '|' : '\0';
    }
    cr_expect_str_eq(words, wanted, "'%s' is cut into '%s'", text, words);
}

Test(split, words_of_gpt2, .init = init, .fini = release)
{
    expect_words(GPT2, "I'm it's CAN'T they'll'd''s", "I|'m| it|'s| CAN|'|T| they|'ll|'d|''|s");
    expect_words(GPT2, "a  b\n c \n\nd  ", "a| | b|\n| c| \n|\n|d|  ");
    expect_words(GPT2, "x=12345 !? 7", "x|=|12345| !?| 7");
    expect_words(GPT2, "\xC2\xA0x \xE3\x80\x80y \xC2\x85", "\xC2\xA0|x| |\xE3\x80\x80|y| \xC2\x85");
    expect_words(GPT2, "e\xCC\x81 \xD9\xA3\xE2\x85\xA7\xC2\xBD",
                 "e|\xCC\x81| \xD9\xA3\xE2\x85\xA7\xC2\xBD");
}

Test(split, words_of_llama3_and_qwen2, .init = init, .fini = release)
{
    expect_words(LLAMA3, "I'M it'S they'Ll'\xC5\xBF '\xC5\xBF",
                 "I|'M| it|'S| they|'Ll|'\xC5\xBF| '|\xC5\xBF");
    expect_words(LLAMA3, "a1234567 .word\n=x\r\n\r\n", "a|123|456|7| .|word|\n|=x|\r\n\r\n");
    expect_words(LLAMA3, "x'LLy z'\xC5\xBFy", "x|'LL|y| z|'\xC5\xBF|y");
    expect_words(QWEN2, "a123 4", "a|1|2|3| |4");
    expect_words(QWEN2, "  \n \n  b!!\n\nc\td", "  \n \n| | b|!!\n\n|c|\td");
    expect_words(QWEN2, "x\ra", "x|\r|a");
    expect_words(QWEN2, "?\r\ra\r\nb.\n\r=", "?\r\r|a|\r\n|b|.\n\r|=");
    expect_words(LLAMA3, "  x   ", " | x|   ");
    expect_words(LLAMA3, "\xF0\x9F\x98\x80word\xF0\x9F\x98\x80 1",
                 "\xF0\x9F\x98\x80word|\xF0\x9F\x98\x80| |1");
}

Test(split, other_patterns_have_no_scanner)
{
    cr_assert_eq(fsdp_word_pattern_of("\\p{L}+", 6), FSDP_WORDS_WHOLE);
    cr_assert_eq(fsdp_word_pattern_of(GPT2 "|", sizeof GPT2), FSDP_WORDS_WHOLE);
    cr_assert_eq(fsdp_word_pattern_of("", 0), FSDP_WORDS_WHOLE);
    cr_assert_eq(fsdp_word_pattern_of(OPTIMIZED, sizeof OPTIMIZED - 1), FSDP_WORDS_GPT2);
}

Test(split, classes_of_code_points, .init = init, .fini = release)
{
    static const struct {
        uint32_t c;
        unsigned bits;
    } cases[] = {{'a', FSDP_UNICODE_LETTER | FSDP_UNICODE_WORD},
                 {'7', FSDP_UNICODE_NUMBER | FSDP_UNICODE_WORD},
                 {' ', FSDP_UNICODE_SPACE},
                 {0x85, FSDP_UNICODE_SPACE},
                 {0x200B, 0},
                 {'_', FSDP_UNICODE_WORD},
                 {0x20000, FSDP_UNICODE_LETTER | FSDP_UNICODE_WORD},
                 {0x1F600, 0},
                 {0x10FFFF, 0},
                 {0x301, FSDP_UNICODE_WORD | FSDP_UNICODE_CHANGES},
                 {0xBD, FSDP_UNICODE_NUMBER},
                 {0x1D7CE, FSDP_UNICODE_NUMBER | FSDP_UNICODE_WORD}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        cr_expect_eq(fsdp_unicode_bits(&unicode, cases[i].c), cases[i].bits, "U+%04X", cases[i].c);
}

static void expect_normal(const char *text, const char *wanted)
{
    fsdp_text normal = {0};
    cr_assert_eq(fsdp_unicode_add_normal(&unicode, text, strlen(text), &normal, NULL), FSDP_OK);
    cr_expect_str_eq(normal.data, wanted, "'%s' became '%s'", text, normal.data);
    cr_expect(strcmp(text, wanted) == 0 || !fsdp_unicode_is_normal(&unicode, text, strlen(text)));
    fsdp_text_release(&normal);
}

Test(split, normal_form_c, .init = init, .fini = release)
{
    expect_normal("plain \xC3\xA9 \xED\x95\x9C", "plain \xC3\xA9 \xED\x95\x9C");
    expect_normal("e\xCC\x81", "\xC3\xA9");
    expect_normal("a\xCC\x81\xCC\xA7", "\xC3\xA1\xCC\xA7"); /* marks below come first */
    expect_normal("q\xCC\x87\xCC\xA3", "q\xCC\xA3\xCC\x87");
    expect_normal("\xE2\x84\xAB", "\xC3\x85"); /* the sign of Angstrom */
    expect_normal("\xE1\x84\x80\xE1\x85\xA1\xE1\x86\xA8", "\xEA\xB0\x81"); /* Hangul */
    expect_normal("\xE0\xA5\x98", "\xE0\xA4\x95\xE0\xA4\xBC"); /* never composed again */
    expect_normal("a\xCC\x8D\xCC\x81", "a\xCC\x8D\xCC\x81");   /* a mark of one class is between */
    expect_normal("\xCC\x81"
                  "e",
                  "\xCC\x81"
                  "e");
    expect_normal("\xF0\xAF\xA0\x80", "\xE4\xB8\xBD");
}

Test(split, many_marks_in_a_row, .init = init, .fini = release)
{
    fsdp_text marks = {0}, normal = {0};
    for (int i = 0; i < 100000; i++)
        fsdp_text_add(&marks, i % 2 ? "\xCC\xA7" : "\xCC\x81", 2);
    cr_assert_eq(fsdp_unicode_add_normal(&unicode, marks.data, marks.size, &normal, NULL), FSDP_OK);
    cr_assert_eq(normal.size, marks.size);
    cr_assert_eq(memcmp(normal.data + 2 * 49999, "\xCC\xA7\xCC\x81", 4), 0);
    fsdp_text_release(&marks);
    fsdp_text_release(&normal);
}
