/*
 * Tokenizers: ids equal to those of the library on the golden files, parts that are refused by name,
 * hostile files. Random text is compared with the library itself by tests/peers/tokenizers_ids.py.
 */
#include "base/core/mem.h"
#include "base/data/json.h"
#include "base/io/io.h"
#include "runtime/tokens/tokenize_lines.h"
#include "runtime/tokens/tokenizer.h"
#include "runtime/tokens/vocab.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

/* --- golden files --- */

typedef struct golden_row {
    fsdp_text text;
    fsdp_ids ids, special;
} golden_row;

static void read_ids(fsdp_json *json, fsdp_ids *ids)
{
    cr_assert_eq(fsdp_json_enter_array(json, NULL), FSDP_OK);
    for (bool more;;) {
        cr_assert_eq(fsdp_json_next_item(json, &more, NULL), FSDP_OK);
        if (!more)
            return;
        cr_assert(fsdp_grow(&ids->ids, &ids->capacity, ids->count + 1, sizeof *ids->ids));
        cr_assert_eq(fsdp_json_i64(json, &ids->ids[ids->count++], NULL), FSDP_OK);
    }
}

static void expect_ids(const fsdp_tokenizer *tokenizer, const golden_row *row, bool special)
{
    const fsdp_ids *wanted = special && row->special.ids ? &row->special : &row->ids;
    fsdp_ids ids = {0};
    fsdp_error err = {0};
    cr_assert_eq(
        fsdp_tokenizer_encode(tokenizer, row->text.data, row->text.size, special, &ids, &err),
        FSDP_OK, "%s", err.text);
    cr_assert_eq(ids.count, wanted->count, "'%s': %zu ids", row->text.data, ids.count);
    for (size_t i = 0; i < ids.count; i++)
        cr_assert_eq(ids.ids[i], wanted->ids[i], "'%s': id %zu", row->text.data, i);
    fsdp_text back = {0};
    cr_assert_eq(fsdp_tokenizer_decode(tokenizer, ids.ids, ids.count, true, &back, &err), FSDP_OK);
    bool has_special = strstr(row->text.data, "<|endoftext|>") != NULL;
    if (!has_special) {
        cr_assert_eq(back.size, row->text.size);
        cr_assert(back.size == 0 || memcmp(back.data, row->text.data, back.size) == 0);
    }
    fsdp_text_release(&back);
    fsdp_ids_release(&ids);
}

static void check_row(const fsdp_tokenizer *tokenizer, fsdp_json *json)
{
    static const char *const names[] = {"text", "ids", "ids_with_special"};
    fsdp_json_members members = {names, 3, 0};
    golden_row row = {0};
    cr_assert_eq(fsdp_json_enter_object(json, NULL), FSDP_OK);
    for (int which;;) {
        cr_assert_eq(fsdp_json_next_member(json, &members, &which, NULL), FSDP_OK);
        if (which < 0)
            break;
        const char *text;
        size_t size;
        if (which == 0) {
            cr_assert_eq(fsdp_json_string(json, &text, &size, NULL), FSDP_OK);
            fsdp_text_add(&row.text, text, size);
        } else {
            read_ids(json, which == 1 ? &row.ids : &row.special);
        }
    }
    expect_ids(tokenizer, &row, false);
    expect_ids(tokenizer, &row, true);
    fsdp_text_release(&row.text);
    fsdp_ids_release(&row.ids);
    fsdp_ids_release(&row.special);
}

static int check_golden(const char *folder)
{
    static const char *const names[] = {"strings"};
    fsdp_tokenizer *tokenizer;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_tokenizer_open(folder, &tokenizer, &err), FSDP_OK, "%s", err.text);
    char *path = fsdp_path_join(folder, "expected.json"), *text;
    size_t size;
    cr_assert_eq(fsdp_io_read_file(NULL, path, 1 << 20, &text, &size, &err), FSDP_OK, "%s",
                 err.text);
    fsdp_json json;
    fsdp_json_init(&json, text, size, path);
    fsdp_json_members members = {names, 1, 0};
    int which, rows = 0;
    cr_assert_eq(fsdp_json_enter_object(&json, NULL), FSDP_OK);
    cr_assert_eq(fsdp_json_next_member(&json, &members, &which, NULL), FSDP_OK);
    cr_assert_eq(fsdp_json_enter_array(&json, NULL), FSDP_OK);
    for (bool more;; rows++) {
        cr_assert_eq(fsdp_json_next_item(&json, &more, NULL), FSDP_OK);
        if (!more)
            break;
        check_row(tokenizer, &json);
    }
    fsdp_json_release(&json);
    fsdp_free(text);
    fsdp_free(path);
    fsdp_tokenizer_free(tokenizer);
    return rows;
}

Test(tokenizer, ids_of_golden_files)
{
    cr_assert_eq(check_golden(GOLDEN "/gpt2"), 44);
    cr_assert_eq(check_golden(GOLDEN "/llama3"), 44);
}

/* --- small files, made here --- */

#define LEVEL \
    "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":true,\"use_regex\":true}"
#define VOCAB "\"a\":0,\"b\":1,\"ab\":2,\"\xC4\xA0\":3,\"abab\":4"
#define MERGES "[\"a\",\"b\"],\"ab ab\""
#define MODEL(members) \
    "\"model\":{\"type\":\"BPE\",\"vocab\":{" VOCAB "},\"merges\":[" MERGES "]" members "}"
#define PARTS "\"decoder\":" LEVEL ",\"pre_tokenizer\":" LEVEL
#define WITH(more) "{" PARTS "," MODEL("") "," more "}"
#define ADDED(content, id, more) \
    "{\"content\":\"" content "\",\"id\":" id ",\"single_word\":false,\"special\":true" more "}"

static fsdp_status parse(const char *text, fsdp_tokenizer **tokenizer, fsdp_error *err)
{
    return fsdp_tokenizer_parse(text, strlen(text), "t.json", tokenizer, err);
}

/* Ids as "1 2 3", through the lines of --tokenize. */
static const char *ids_of(const char *file, const char *line, bool special)
{
    static char shown[FSDP_ERROR_TEXT + 20];
    fsdp_tokenizer *tokenizer;
    fsdp_error err = {0};
    cr_assert_eq(parse(file, &tokenizer, &err), FSDP_OK, "%s", err.text);
    fsdp_text in = {0}, out = {0};
    fsdp_text_add(&in, line, strlen(line));
    fsdp_tokenize_options options = {.special = special};
    if (fsdp_tokenize_line(tokenizer, &options, &in, 1, &out, &err) == FSDP_OK)
        snprintf(shown, sizeof shown, "%s", out.data);
    else
        snprintf(shown, sizeof shown, "%d: %s", err.status, err.text);
    fsdp_text_release(&in);
    fsdp_text_release(&out);
    fsdp_tokenizer_free(tokenizer);
    return shown;
}

Test(tokenizer, merges_in_both_spellings_and_the_order_of_members_do_not_matter)
{
    cr_assert_str_eq(ids_of(WITH("\"version\":\"1.0\""), "\"ababab ab\\u0020\"", false),
                     "[4,2,3,2,3]");
    cr_assert_str_eq(ids_of("{\"model\":{\"merges\":[\"#version: 0.2\"," MERGES
                            "],\"vocab\":{" VOCAB "}}," PARTS "}",
                            "\"abab\"", false),
                     "[4]");
}

Test(tokenizer, a_pair_that_is_gone_merges_no_more)
{
    /* b c takes the b of a b, whose place in the order a bc must not take */
    const char *file =
        "{" PARTS
        ",\"model\":{\"vocab\":{\"a\":0,\"b\":1,\"c\":2,\"x\":3,\"bc\":4,\"ab\":5,\"bcx\":6,"
        "\"abc\":7},\"merges\":[\"b c\",\"a b\",\"bc x\",\"a bc\"]}}";
    cr_assert_str_eq(ids_of(file, "\"abcx\"", false), "[0,6]");
    cr_assert_str_eq(ids_of(file, "\"abcabx\"", false), "[7,5,3]");
}

/* A space and letters: aaa is an id per letter, and of abababa every abab is one. */
static void add_word(fsdp_text *text, int letters, bool is_merged)
{
    fsdp_text_add(text, " ", 1);
    for (int i = 0; i < letters; i++)
        fsdp_text_add(text, is_merged && i % 2 ? "b" : "a", 1);
}

/* Words of at most 22 bytes and 10 ids are remembered: each one is the same the first time and again. */
Test(tokenizer, a_word_has_the_same_ids_each_time)
{
    enum { MOST = 26, LEAST_BYTES = 1024 }; /* shorter texts need no memory of words */
    fsdp_tokenizer *tokenizer;
    cr_assert_eq(parse(WITH("\"version\":\"1.0\""), &tokenizer, NULL), FSDP_OK);
    for (int letters = 1; letters <= MOST; letters++)
        for (int is_merged = 0; is_merged < 2; is_merged++) {
            fsdp_text text = {0};
            fsdp_ids ids = {0};
            const int each =
                1 + (is_merged ? letters / 4 + letters % 4 / 2 + letters % 2 : letters);
            size_t words = 0;
            for (; text.size < LEAST_BYTES; words++)
                add_word(&text, letters, is_merged);
            cr_assert_eq(fsdp_tokenizer_encode(tokenizer, text.data, text.size, false, &ids, NULL),
                         FSDP_OK);
            cr_assert_eq(ids.count, words * (size_t)each, "%d letters", letters);
            for (size_t i = (size_t)each; i < ids.count; i++)
                cr_assert_eq(ids.ids[i], ids.ids[i - (size_t)each], "%d letters: id %zu", letters,
                             i);
            fsdp_text_release(&text);
            fsdp_ids_release(&ids);
        }
    fsdp_tokenizer_free(tokenizer);
}

/* Few places for remembered words, and many words of one length: each is itself. */
Test(tokenizer, words_do_not_take_the_ids_of_others)
{
    enum { LETTERS = 9, WORDS = 1 << LETTERS };
    fsdp_tokenizer *tokenizer;
    fsdp_text text = {0};
    fsdp_ids all = {0}, one = {0};
    cr_assert_eq(parse(WITH("\"version\":\"1.0\""), &tokenizer, NULL), FSDP_OK);
    for (int word = 0; word < WORDS; word++) {
        char letters[1 + LETTERS] = " ";
        for (int i = 0; i < LETTERS; i++)
            letters[1 + i] = word >> i & 1 ? 'a' : 'b';
        fsdp_text_add(&text, letters, sizeof letters);
        cr_assert_eq(fsdp_tokenizer_encode(tokenizer, letters, sizeof letters, false, &one, NULL),
                     FSDP_OK);
    }
    cr_assert_eq(fsdp_tokenizer_encode(tokenizer, text.data, text.size, false, &all, NULL),
                 FSDP_OK);
    cr_assert_eq(all.count, one.count);
    cr_assert_arr_eq(all.ids, one.ids, one.count * sizeof *one.ids);
    fsdp_text_release(&text);
    fsdp_ids_release(&all);
    fsdp_ids_release(&one);
    fsdp_tokenizer_free(tokenizer);
}

Test(tokenizer, a_text_that_fails_leaves_no_ids)
{
    fsdp_tokenizer *tokenizer;
    fsdp_ids ids = {0};
    cr_assert_eq(parse(WITH("\"version\":\"1.0\""), &tokenizer, NULL), FSDP_OK);
    cr_assert_eq(fsdp_tokenizer_encode(tokenizer, "ab", 2, false, &ids, NULL), FSDP_OK);
    cr_assert_eq(fsdp_tokenizer_encode(tokenizer, "ab w", 4, false, &ids, NULL), FSDP_ERR_USAGE);
    cr_assert_eq(ids.count, 1);
    fsdp_ids_release(&ids);
    fsdp_tokenizer_free(tokenizer);
}

/* The letters that GPT-2 writes bytes with: 188 stand for themselves. */
Test(tokenizer, letters_of_bytes)
{
    static const struct {
        uint8_t byte;
        uint32_t letter;
    } cases[] = {{0, 0x100}, {32, 0x120}, {33, 33},     {126, 126}, {127, 0x121}, {160, 0x142},
                 {161, 161}, {172, 172},  {173, 0x143}, {174, 174}, {255, 255}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        cr_expect_eq(fsdp_alphabet_letter(cases[i].byte), cases[i].letter, "%d", cases[i].byte);
}

Test(tokenizer, added_tokens)
{
    const char *file =
        WITH("\"added_tokens\":[" ADDED("<x>", "5", ",\"lstrip\":true,\"rstrip\":true") "," ADDED(
            "<x>a", "6",
            "") "," ADDED("b", "1",
                          "") "," ADDED("", "9",
                                        "") ","
                                            "{\"content\":\"w\",\"id\":7,\"single_word\":true}]");
    cr_assert_str_eq(ids_of(file, "\"a <x> <x>a<x\\u003e\"", false), "[0,5,6,5]");
    cr_assert_str_eq(ids_of(file, "\"ab\"", false), "[0,1]"); /* before any merge */
    cr_assert_str_eq(ids_of(file, "\"w a w\"", false), "[7,3,0,3,7]");
    /* w is not a byte of the model, so it is found alone and nowhere else */
    cr_assert(strstr(ids_of(file, "\"aw\"", false), "byte 0x77"));
}

Test(tokenizer, template)
{
#define TOKEN(name) "{\"SpecialToken\":{\"id\":\"" name "\",\"type_id\":0}}"
    const char *file =
        WITH("\"post_processor\":{\"type\":\"Sequence\",\"processors\":[" LEVEL
             ",{\"type\":\"TemplateProcessing\",\"single\":[" TOKEN(
                 "s") ",{\"Sequence\":{\"id\":\"A\"}}," TOKEN("e") "],\"special_tokens\":{\"s\":{"
                                                                   "\"ids\":[3,0]},\"e\":{\"ids\":["
                                                                   "1]}}}]}");
    cr_assert_str_eq(ids_of(file, "\"ab\"", true), "[3,0,2,1]");
    cr_assert_str_eq(ids_of(file, "\"ab\"", false), "[2]");
    cr_assert_str_eq(ids_of(file, "\"\"", true), "[3,0,1]");
}

Test(tokenizer, prefix_space)
{
    const char *file =
        "{\"decoder\":" LEVEL
        ",\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":true}," MODEL(
            "") ",\"added_tokens\":[" ADDED("<x>", "5", "") "]}";
    cr_assert_str_eq(ids_of(file, "\"ab<x> a<x>b\"", false), "[3,2,5,3,0,5,3,1]");
    cr_assert_str_eq(ids_of(file, "\"\"", false), "[]");
}

Test(tokenizer, overlapping_white_space_of_added_tokens_ends)
{
    const char *file =
        WITH("\"added_tokens\":[" ADDED("<x>", "5", ",\"lstrip\":true,\"rstrip\":true") "," ADDED(
            " ", "6", ",\"lstrip\":true") "]");
    cr_assert_str_eq(ids_of(file, "\"a<x>  a\"", false), "[0,5,6,6,0]");
}

Test(tokenizer, a_megabyte_of_white_space_that_is_a_token)
{
    fsdp_tokenizer *tokenizer;
    cr_assert_eq(
        parse(WITH("\"added_tokens\":[" ADDED(" ", "5", ",\"lstrip\":true,\"rstrip\":true") "]"),
              &tokenizer, NULL),
        FSDP_OK);
    size_t size = 1 << 20;
    char *spaces = fsdp_alloc(size, 1);
    fsdp_ids ids = {0};
    memset(spaces, ' ', size);
    cr_assert_eq(fsdp_tokenizer_encode(tokenizer, spaces, size, false, &ids, NULL), FSDP_OK);
    cr_assert_eq(ids.count, size);
    fsdp_free(spaces);
    fsdp_ids_release(&ids);
    fsdp_tokenizer_free(tokenizer);
}

/* --- refused and hostile files --- */

static void expect_fail(const char *file, fsdp_status status, const char *part)
{
    fsdp_tokenizer *tokenizer = NULL;
    fsdp_error err = {0};
    cr_expect_eq(parse(file, &tokenizer, &err), status, "%s: %s", file, err.text);
    cr_expect(strstr(err.text, part), "%s: '%s' does not say '%s'", file, err.text, part);
    cr_expect_null(tokenizer);
}

Test(tokenizer, other_parts_are_refused_by_name)
{
    static const char *const cases[][2] = {
        {"{\"model\":{\"type\":\"Unigram\",\"vocab\":[[\"a\",0.5]]}}", "model 'Unigram'"},
        {"{\"model\":{\"vocab\":{},\"type\":\"WordPiece\"}}", "model 'WordPiece'"},
        {"{" PARTS "," MODEL(",\"byte_fallback\":true") "}", "'byte_fallback'"},
        {"{" PARTS "," MODEL(",\"dropout\":0.1") "}", "'dropout'"},
        {"{" PARTS "," MODEL(",\"unk_token\":\"a\"") "}", "'unk_token'"},
        {"{" PARTS "," MODEL(",\"continuing_subword_prefix\":\"##\"") "}",
         "'continuing_subword_prefix'"},
        {"{" PARTS "," MODEL(",\"end_of_word_suffix\":\"</w>\"") "}", "'end_of_word_suffix'"},
        {WITH("\"normalizer\":{\"type\":\"NFKC\"}"), "normalizer 'NFKC'"},
        {WITH("\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFC\"},{\"type\":"
              "\"Lowercase\"}]}"),
         "normalizer 'Lowercase'"},
        {WITH("\"post_processor\":{\"type\":\"BertProcessing\"}"),
         "post-processor 'BertProcessing'"},
        {"{\"decoder\":" LEVEL "," MODEL("") "}", "pre-tokenizer 'null'"},
        {"{\"decoder\":" LEVEL ",\"pre_tokenizer\":{\"type\":\"Metaspace\"}," MODEL("") "}",
         "pre-tokenizer 'Metaspace'"},
        {"{\"decoder\":" LEVEL ",\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[" LEVEL
         "," LEVEL "]}," MODEL("") "}",
         "a step after ByteLevel"},
        {"{\"decoder\":" LEVEL
         ",\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[]}," MODEL("") "}",
         "none with ByteLevel"},
        {"{\"decoder\":" LEVEL
         ",\"pre_tokenizer\":{\"type\":\"Split\",\"behavior\":\"Isolated\",\"pattern\":"
         "{\"Regex\":\"\\\\d+|x\"}}," MODEL("") "}",
         "'\\\\d+|x'"},
        {"{\"decoder\":" LEVEL
         ",\"pre_tokenizer\":{\"type\":\"Split\",\"behavior\":\"Removed\",\"pattern\":"
         "{\"Regex\":\"'s|'t|'re|'ve|'m|'ll|'d| ?\\\\p{L}+| ?\\\\p{N}+| "
         "?[^\\\\s\\\\p{L}\\\\p{N}]+|\\\\s+(?!\\\\S)|\\\\s+\"}}," MODEL("") "}",
         "behavior of a Split 'Removed'"},
        {"{\"decoder\":" LEVEL
         ",\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"String\":\" \"}}," MODEL("") "}",
         "pattern of a Split"},
        {"{\"pre_tokenizer\":" LEVEL "," MODEL("") "}", "decoder 'null'"},
        {"{\"decoder\":{\"type\":\"WordPiece\"},\"pre_tokenizer\":" LEVEL "," MODEL("") "}",
         "decoder 'WordPiece'"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        expect_fail(cases[i][0], FSDP_ERR_USAGE, cases[i][1]);
}

#define VOCAB_OF(vocab, merges) \
    "{" PARTS ",\"model\":{\"vocab\":{" vocab "},\"merges\":[" merges "]}}"
#define TEMPLATE(single, tokens)                                                  \
    WITH("\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":" single \
         ",\"special_tokens\":" tokens "}")

Test(tokenizer, hostile_files)
{
    static const char *const cases[][2] = {
        {"", "an object was expected"},
        {"{", "ends where"},
        {"{}", "no model"},
        {"{\"model\":null}", "no model"},
        {"{\"model\":{\"type\":\"BPE\"}}", "no vocab"},
        {"{\"model\":{\"vocab\":{}}}", "no merges"},
        {"{\"model\":{},\"model\":{}}", "'model' appears twice"},
        {VOCAB_OF("\"a\":4294967295", ""), "not below 2^31"},
        {VOCAB_OF("\"a\":-1", ""), "line 1"},
        {VOCAB_OF("\"a\":1e99", ""), "line 1"},
        {VOCAB_OF("\"a\":1,\"a\":2", ""), "comes twice"},
        {VOCAB_OF("\"a\":1,\"b\":1", ""), "both have the id 1"},
        {VOCAB_OF("\"a\":1,\"b\":2", "[\"a\",\"b\"]"), "lacks the result"},
        {VOCAB_OF("\"a\":1,\"b\":2", "[\"a\",\"c\"]"), "lacks the second part"},
        {VOCAB_OF("\"a\":1,\"b\":2", "\"c b\""), "lacks the first part"},
        {VOCAB_OF("\"a\":1,\"b\":2", "\"ab\""), "not two parts"},
        {VOCAB_OF("\"a\":1,\"b\":2", "\"a b c\""), "not two parts"},
        {VOCAB_OF("\"a\":1,\"b\":2", "[\"a\"]"), "1 parts"},
        {VOCAB_OF("\"a\":1,\"b\":2", "[\"a\",\"b\",\"c\"]"), "3 parts"},
        {VOCAB_OF("\"a\":1,\"b\":2", "7"), "a string was expected"},
        {WITH("\"added_tokens\":[" ADDED("<x>", "7", "") "]"), "has the id 7, but its id is 5"},
        {WITH("\"added_tokens\":[" ADDED("a", "5", "") "]"), "but its id is 0 in the vocabulary"},
        {WITH("\"added_tokens\":[" ADDED("<x>", "5", "") "," ADDED("<x>", "5", "") "]"),
         "comes twice"},
        {WITH("\"added_tokens\":[{\"id\":5}]"), "no content"},
        {WITH("\"added_tokens\":[{\"content\":\"x\"}]"), "no id"},
        {WITH("\"added_tokens\":{}"), "an array was expected"},
        {WITH("\"normalizer\":{\"type\":\"Sequence\"}"), "no normalizers"},
        {WITH("\"normalizer\":7"), "an object was expected"},
        {TEMPLATE("[{\"Sequence\":{\"id\":\"A\"}}," TOKEN("s") "]", "{}"), "has no ids of 's'"},
        {TEMPLATE("[{\"Sequence\":{\"id\":\"A\"}}," TOKEN("s") "]", "{\"s\":{\"ids\":[99]}}"),
         "the id 99"},
        {TEMPLATE("[{\"Sequence\":{\"id\":\"A\"}}," TOKEN("s") "]", "{\"s\":{\"ids\":[-1]}}"),
         "the id -1"},
        {TEMPLATE("[]", "{}"), "lacks the text A"},
        {TEMPLATE("[null]", "{}"), "neither text nor token"},
        {TEMPLATE("null", "{}"), "no single"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        expect_fail(cases[i][0], FSDP_ERR_DAMAGED, cases[i][1]);
    expect_fail(TEMPLATE("[{\"Sequence\":{\"id\":\"A\"}},{\"Sequence\":{\"id\":\"A\"}}]", "{}"),
                FSDP_ERR_USAGE, "a text other than one A");
    expect_fail(TEMPLATE("[{\"Sequence\":{\"id\":\"B\"}}]", "{}"), FSDP_ERR_USAGE,
                "a text other than one A");
}

Test(tokenizer, deep_sequences)
{
    fsdp_text text = {0};
    fsdp_text_addf(&text, "{" PARTS "," MODEL("") ",\"normalizer\":");
    for (int i = 0; i < 100; i++)
        fsdp_text_addf(&text, "{\"type\":\"Sequence\",\"normalizers\":[");
    for (int i = 0; i < 100; i++)
        fsdp_text_addf(&text, "]}");
    fsdp_text_addf(&text, "}");
    expect_fail(text.data, FSDP_ERR_DAMAGED, "more than 64 deep");
    fsdp_text_release(&text);
}

/* --- text --- */

static fsdp_tokenizer *golden(const char *name)
{
    fsdp_tokenizer *tokenizer;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_tokenizer_open(name, &tokenizer, &err), FSDP_OK, "%s", err.text);
    return tokenizer;
}

Test(tokenizer, text_that_is_not_utf8)
{
    fsdp_tokenizer *tokenizer = golden(GOLDEN "/gpt2/tokenizer.json");
    fsdp_ids ids = {0};
    fsdp_error err = {0};
    cr_assert_eq(fsdp_tokenizer_encode(tokenizer, "abc\xE2\x82(", 6, false, &ids, &err),
                 FSDP_ERR_DAMAGED);
    cr_assert(strstr(err.text, "byte 3"), "%s", err.text);
    cr_assert_eq(ids.count, 0);
    cr_assert_eq(fsdp_tokenizer_end_of_text(tokenizer), 0);
    fsdp_ids_release(&ids);
    fsdp_tokenizer_free(tokenizer);
}

Test(tokenizer, a_word_of_a_megabyte)
{
    fsdp_tokenizer *tokenizer = golden(GOLDEN "/llama3");
    size_t size = 1 << 20;
    char *word = fsdp_alloc(size, 1);
    fsdp_ids ids = {0};
    fsdp_text back = {0};
    for (size_t i = 0; i < size; i++)
        word[i] = "the"[i % 3];
    cr_assert_eq(fsdp_tokenizer_encode(tokenizer, word, size, false, &ids, NULL), FSDP_OK);
    cr_assert_eq(fsdp_tokenizer_decode(tokenizer, ids.ids, ids.count, false, &back, NULL), FSDP_OK);
    cr_assert(back.size == size && memcmp(back.data, word, size) == 0);
    cr_assert_lt(ids.count, size);
    fsdp_free(word);
    fsdp_ids_release(&ids);
    fsdp_text_release(&back);
    fsdp_tokenizer_free(tokenizer);
}

Test(tokenizer, bytes)
{
    fsdp_tokenizer *bytes = golden("bytes"), *json;
    fsdp_text text = {0}, back = {0};
    fsdp_tokenizer_add_bytes_json(&text);
    cr_assert_eq(parse(text.data, &json, NULL), FSDP_OK);
    cr_assert_eq(fsdp_tokenizer_vocab(bytes), 256);
    cr_assert_eq(fsdp_tokenizer_vocab(json), 256);
    const char *sample = "z\xC3\xA9\xE6\x97\xA5 \x01\x7F\n";
    fsdp_ids ids[2] = {0};
    cr_assert_eq(fsdp_tokenizer_encode(bytes, sample, strlen(sample), true, &ids[0], NULL),
                 FSDP_OK);
    cr_assert_eq(fsdp_tokenizer_encode(json, sample, strlen(sample), true, &ids[1], NULL), FSDP_OK);
    cr_assert_eq(ids[0].count, strlen(sample));
    cr_assert_eq(ids[1].count, strlen(sample));
    for (size_t i = 0; i < ids[0].count; i++) {
        cr_assert_eq(ids[0].ids[i], (unsigned char)sample[i]);
        cr_assert_eq(ids[1].ids[i], (unsigned char)sample[i]);
    }
    /* E2 82 could begin a character and is one U+FFFD; FF is another */
    const int64_t broken[] = {0xE2, 0x82, 'a', 0xFF};
    cr_assert_eq(fsdp_tokenizer_decode(bytes, broken, 4, false, &back, NULL), FSDP_OK);
    cr_assert_str_eq(back.data, "\xEF\xBF\xBD"
                                "a\xEF\xBF\xBD");
    fsdp_error err = {0};
    cr_assert_eq(fsdp_tokenizer_decode(bytes, (const int64_t[]){256}, 1, false, &back, &err),
                 FSDP_ERR_USAGE);
    cr_assert(strstr(err.text, "256"));
    fsdp_ids_release(&ids[0]);
    fsdp_ids_release(&ids[1]);
    fsdp_text_release(&text);
    fsdp_text_release(&back);
    fsdp_tokenizer_free(bytes);
    fsdp_tokenizer_free(json);
}

Test(tokenizer, lines_of_json)
{
    cr_assert(strstr(ids_of(WITH("\"x\":0"), "7", false),
                     "'line 1' line 1 column 1: a string was expected"));
    cr_assert(strstr(ids_of(WITH("\"x\":0"), "\"a\" 7", false),
                     "the end of the value is followed by other text"));
    fsdp_tokenizer *bytes = golden("bytes");
    fsdp_text line = {0}, out = {0};
    fsdp_text_addf(&line, "[226,128,168,10,34]\n");
    fsdp_tokenize_options options = {.decode = true};
    cr_assert_eq(fsdp_tokenize_line(bytes, &options, &line, 1, &out, NULL), FSDP_OK);
    cr_assert_str_eq(out.data, "\"\\u2028\\n\\\"\"");
    fsdp_text_release(&line);
    fsdp_text_release(&out);
    fsdp_tokenizer_free(bytes);
}

/* --- memory --- */

static fsdp_status whole_way(void)
{
    static const char text[] = "e\xCC\x81 the <x> the The 12345 <y>";
    fsdp_tokenizer *tokenizer;
    fsdp_ids ids = {0};
    fsdp_text back = {0};
    fsdp_error err = {0};
    fsdp_status status = parse(WITH("\"normalizer\":{\"type\":\"NFC\"},\"added_tokens\":[" ADDED(
                                   "e\xCC\x81", "5", ",\"normalized\":true") "]"),
                               &tokenizer, &err);
    if (status == FSDP_OK)
        status = fsdp_tokenizer_encode(tokenizer, text, 3, true, &ids, &err);
    if (status == FSDP_OK)
        status = fsdp_tokenizer_decode(tokenizer, ids.ids, ids.count, true, &back, &err);
    fsdp_ids_release(&ids);
    fsdp_text_release(&back);
    fsdp_tokenizer_free(tokenizer);
    cr_assert_eq(status, err.status);
    return status;
}

Test(tokenizer, every_allocation_may_fail)
{
    cr_assert_eq(whole_way(), FSDP_OK);
    for (int64_t n = 0;; n++) {
        fsdp_mem_fail_after(n, true);
        fsdp_status status = whole_way();
        fsdp_mem_fail_after(-1, false);
        if (status == FSDP_OK)
            break;
        cr_assert_eq(status, FSDP_ERR_LIMIT);
        cr_assert_lt(n, 200);
    }
}
