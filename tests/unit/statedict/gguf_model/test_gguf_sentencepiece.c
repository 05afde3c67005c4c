/* Pieces of SentencePiece, and the files that add to them, as key-value pairs of GGUF. */
#include "base/core/mem.h"
#include "statedict/gguf_model/gguf_values.h"
#include "tests/support/piece_file.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char directory[64];
static fsdp_text model;
static fsdp_named_values values;
static fsdp_gguf_tokens config;
static fsdp_gguf_found found;
static fsdp_error err;

static void begin(void)
{
    config = (fsdp_gguf_tokens){.pre = "default", .vocab_size = -1, .bos = -1, .eos = -1};
    strcpy(directory, "/tmp/fsdp-pieces-XXXXXX");
    cr_assert(mkdtemp(directory));
}

static void end(void)
{
    fsdp_text_release(&model);
    fsdp_named_values_release(&values);
    cr_assert_eq(fsdp_io_remove_tree(NULL, directory, &err), FSDP_OK);
}

TestSuite(gguf_sentencepiece, .init = begin, .fini = end);

static void put(const char *name, const char *data, size_t size)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    cr_assert_eq(fsdp_io_replace_file(fsdp_io_posix(), path, data, size, &err), FSDP_OK);
}

static void put_text(const char *name, const char *text)
{
    put(name, text, strlen(text));
}

static fsdp_status make_pairs(void)
{
    fsdp_named_values_release(&values);
    return fsdp_gguf_tokenizer(fsdp_io_posix(), directory, &config, &values, &found, &err);
}

static const fsdp_value *find(const char *name)
{
    for (size_t i = 0; i < values.count; i++)
        if (strcmp(values.items[i].name, name) == 0)
            return &values.items[i].value;
    return NULL;
}

static int64_t number(const char *name)
{
    const fsdp_value *value = find(name);
    return value && value->kind == FSDP_VALUE_I64 ? value->as.i64 : -1;
}

static const fsdp_value *item(const char *name, size_t i)
{
    const fsdp_value *value = find(name);
    cr_assert(value && value->kind == FSDP_VALUE_LIST && i < value->as.list.count, "%s %zu", name,
              i);
    return &value->as.list.items[i];
}

static void expect_token(size_t id, const char *text, double score, int64_t type)
{
    cr_assert_str_eq(item("tokenizer.ggml.tokens", id)->as.bytes.data, text);
    cr_assert_eq(item("tokenizer.ggml.scores", id)->as.f64, score, "%s", text);
    cr_assert_eq(item("tokenizer.ggml.token_type", id)->as.i64, type, "%s", text);
}

Test(gguf_sentencepiece, pieces_become_tokens_as_llama_cpp_has_them)
{
    piece_file_make(&model);
    put("tokenizer.model", model.data, model.size);
    config.vocab_size = 11;
    cr_assert_eq(make_pairs(), FSDP_OK, "%s", err.text);
    cr_assert_eq(found, FSDP_GGUF_TOKENIZER);
    cr_assert_str_eq(find("tokenizer.ggml.model")->as.bytes.data, "llama");
    cr_assert_str_eq(find("tokenizer.ggml.pre")->as.bytes.data, "default");
    cr_assert_eq(find("tokenizer.ggml.tokens")->as.list.count, 11);
    expect_token(0, "<unk>", 0, 2);
    expect_token(1, "<s>", 0, 3);
    expect_token(4, " tool ", 0, 4); /* found in the text before spaces are replaced */
    expect_token(5, "<0x0A>", 0, 6);
    expect_token(6, "\xE2\x96\x81\x61", -1, 1);
    expect_token(8, "b", -3, 5);
    expect_token(10, "[PAD10]", -10000, 5);
    cr_assert_eq(number("tokenizer.ggml.unknown_token_id"), 0);
    cr_assert_eq(number("tokenizer.ggml.bos_token_id"), 1);
    cr_assert_eq(number("tokenizer.ggml.eos_token_id"), 2);
    cr_assert_eq(number("tokenizer.ggml.padding_token_id"), 3);
    cr_assert_null(find("tokenizer.ggml.add_space_prefix"), "llama.cpp adds one without a word");
    cr_assert_null(find("tokenizer.ggml.merges"));
}

Test(gguf_sentencepiece, other_files_add_and_replace_tokens)
{
    piece_file_make(&model);
    put("tokenizer.model", model.data, model.size);
    put_text("added_tokens.json", "{\"<more>\": 9, \"<far>\": 99}");
    put_text(
        "tokenizer_config.json",
        "{\"bos_token\": \"<|im_start|>\", \"eos_token\": {\"content\": \"b\"}, "
        "\"added_tokens_decoder\": {\"0\": {\"content\": \"<unk>\", \"special\": true}, "
        "\"1\": {\"content\": \"<s>\", \"special\": true, \"lstrip\": false}, "
        "\"8\": {\"content\": \"<b>\"}, \"10\": {\"content\": \"<|im_start|>\"}}, "
        "\"add_prefix_space\": false, \"add_bos_token\": true, \"chat_template\": \"{{ x }}\"}");
    config = (fsdp_gguf_tokens){.pre = "default", .vocab_size = 12, .bos = 1, .eos = 99};
    cr_assert_eq(make_pairs(), FSDP_OK, "%s", err.text);
    cr_assert_eq(find("tokenizer.ggml.tokens")->as.list.count, 12);
    expect_token(0, "<unk>", 0, 2);
    expect_token(1, "<s>", -1000, 3);
    expect_token(8, "<b>", -1000, 4);
    expect_token(9, "<more>", -1000, 4);
    expect_token(10, "<|im_start|>", -1000, 3); /* looks special */
    expect_token(11, "[PAD11]", -10000, 5);
    cr_assert_eq(number("tokenizer.ggml.bos_token_id"), 10,
                 "a token that the file adds further on");
    cr_assert_eq(number("tokenizer.ggml.eos_token_id"), 2,
                 "no token is 'b' any more, and that of config.json is no token");
    cr_assert_not(find("tokenizer.ggml.add_space_prefix")->as.boolean);
    cr_assert(find("tokenizer.ggml.add_bos_token")->as.boolean);
    cr_assert_str_eq(find("tokenizer.chat_template")->as.bytes.data, "{{ x }}");
}

Test(gguf_sentencepiece, tokenizer_json_comes_first)
{
    piece_file_make(&model);
    put("tokenizer.model", model.data, model.size);
    put_text("added_tokens.json", "{\"<more>\": 9}");
    put_text("tokenizer.json", "{\"model\": {\"vocab\": {\"x\": 0}, \"merges\": []}}");
    cr_assert_eq(make_pairs(), FSDP_OK, "%s", err.text);
    cr_assert_eq(find("tokenizer.ggml.tokens")->as.list.count, 1);
    cr_assert_str_eq(find("tokenizer.ggml.model")->as.bytes.data, "gpt2");
}

Test(gguf_sentencepiece, tiktoken_gives_no_pairs)
{
    put_text("tokenizer.model", "IQ== 0\nIg== 1\n");
    cr_assert_eq(make_pairs(), FSDP_OK, "%s", err.text);
    cr_assert_eq(found, FSDP_GGUF_TIKTOKEN);
    cr_assert_eq(values.count, 0);
    cr_assert_eq(fsdp_io_remove_tree(NULL, directory, &err), FSDP_OK);
    cr_assert_eq(make_pairs(), FSDP_OK, "%s", err.text);
    cr_assert_eq(found, FSDP_GGUF_NO_TOKENIZER);
}

static void expect_refusal(fsdp_status status, const char *why)
{
    put("tokenizer.model", model.data, model.size);
    cr_assert_eq(make_pairs(), status, "%s", err.text);
    cr_assert_not_null(strstr(err.text, why), "%s, not: %s", err.text, why);
}

Test(gguf_sentencepiece, a_model_that_llama_cpp_does_not_run_is_refused)
{
    piece_file_make(&model);
    config.vocab_size = 8;
    expect_refusal(FSDP_ERR_USAGE,
                   "tokenizer.model' has 9 pieces, and the model's vocab_size is 8");
    config.vocab_size = -1;
    piece_file_add_trainer(&model, 3, FSDP_PIECE_WORD);
    expect_refusal(FSDP_ERR_USAGE, "of the type word");
    piece_file_add_trainer(&model, 3, FSDP_PIECE_UNIGRAM);
    expect_refusal(FSDP_OK, "");
    size_t good = model.size;
    piece_file_add_piece(&model, "a", 0, 0);
    expect_refusal(FSDP_ERR_DAMAGED, "piece 9 is 'a', as piece 7 is");
    model.size = good;
    piece_file_add_piece(&model, "<0xZZ>", 0, FSDP_PIECE_BYTE);
    expect_refusal(FSDP_ERR_DAMAGED, "piece 9 is a byte and reads '<0xZZ>'");
}

Test(gguf_sentencepiece, added_tokens_that_make_no_sense_are_refused)
{
    static const char *const lists[] = {"[]", "{\"a\": \"b\"}", "{\"c\": -1}",
                                        "{\"c\": 99999999999}"};
    static const char *const decoders[] = {
        "{\"x\": {\"content\": \"c\"}}", "{\"\": {\"content\": \"c\"}}",
        "{\"12345678901\": {\"content\": \"c\"}}", "{\"9\": {}}", "{\"9\": 3}"};
    piece_file_make(&model);
    put("tokenizer.model", model.data, model.size);
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        put_text("added_tokens.json", lists[i]);
        cr_assert_eq(make_pairs(), FSDP_ERR_DAMAGED, "%s", lists[i]);
        cr_assert_not_null(strstr(err.text, "added_tokens.json"), "%s", err.text);
    }
    put_text("added_tokens.json", "{}");
    for (size_t i = 0; i < sizeof decoders / sizeof *decoders; i++) {
        char text[200];
        snprintf(text, sizeof text, "{\"added_tokens_decoder\": %s}", decoders[i]);
        put_text("tokenizer_config.json", text);
        cr_assert_eq(make_pairs(), FSDP_ERR_DAMAGED, "%s", decoders[i]);
    }
}

/* Every allocation fails once. */
Test(gguf_sentencepiece, memory_that_is_not_there_is_an_error)
{
    fsdp_status st = FSDP_ERR_LIMIT;
    piece_file_make(&model);
    put("tokenizer.model", model.data, model.size);
    put_text("added_tokens.json", "{\"<more>\": 9}");
    put_text("tokenizer_config.json", "{\"bos_token\": \"<s>\", \"added_tokens_decoder\": "
                                      "{\"8\": {\"content\": \"\xE2\x96\x81 b\"}}}");
    config.vocab_size = 12;
    for (int64_t n = 0; st != FSDP_OK && n < 1000; n++) {
        fsdp_named_values_release(&values);
        fsdp_mem_fail_after(n, false);
        st = make_pairs();
        fsdp_mem_fail_after(-1, false);
        cr_assert(st == FSDP_OK || st == FSDP_ERR_LIMIT, "%d: %s", (int)st, err.text);
    }
    cr_assert_eq(st, FSDP_OK);
}
