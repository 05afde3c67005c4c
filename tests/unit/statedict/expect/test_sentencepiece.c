/* tokenizer.model of SentencePiece: its pieces, what is refused, and the key-value pairs of GGUF. */
#include "statedict/expect/sentencepiece.h"

#include "base/core/mem.h"
#include "statedict/expect/gguf_values.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char directory[64];
static fsdp_text model;
static fsdp_sentencepiece pieces;
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
    fsdp_sentencepiece_release(&pieces);
    fsdp_named_values_release(&values);
    cr_assert_eq(fsdp_io_remove_tree(NULL, directory, &err), FSDP_OK);
}

TestSuite(sentencepiece, .init = begin, .fini = end);

/* --- making a file --- */

static void add_varint(fsdp_text *out, uint64_t value)
{
    for (; value >= 0x80; value >>= 7)
        fsdp_text_add(out, (const char[]){(char)(value | 0x80)}, 1);
    fsdp_text_add(out, (const char[]){(char)value}, 1);
}

static void add_number(fsdp_text *out, unsigned field, uint64_t value)
{
    add_varint(out, field << 3);
    add_varint(out, value);
}

static void add_bytes(fsdp_text *out, unsigned field, const char *data, size_t size)
{
    add_varint(out, field << 3 | 2);
    add_varint(out, size);
    fsdp_text_add(out, data, size);
}

/* type 0: the file does not say, which means NORMAL */
static void add_piece(const char *text, float score, unsigned type)
{
    fsdp_text piece = {0};
    add_bytes(&piece, 1, text, strlen(text));
    add_varint(&piece, 2 << 3 | 5);
    fsdp_text_add(&piece, (const char *)&score, sizeof score);
    if (type > 0)
        add_number(&piece, 3, type);
    add_bytes(&model, 1, piece.data, piece.size);
    fsdp_text_release(&piece);
}

static void add_trainer(unsigned field, uint64_t value)
{
    fsdp_text trainer = {0};
    add_number(&trainer, field, value);
    add_bytes(&model, 2, trainer.data, trainer.size);
    fsdp_text_release(&trainer);
}

static void add_specials(void)
{
    add_piece("<unk>", 0, FSDP_PIECE_UNKNOWN);
    add_piece("<s>", 0, FSDP_PIECE_CONTROL);
    add_piece("</s>", 0, FSDP_PIECE_CONTROL);
}

/* Nine pieces of every type. */
static void make_model(void)
{
    add_specials();
    add_piece("<pad>", 0, FSDP_PIECE_CONTROL);
    add_piece("\xE2\x96\x81tool\xE2\x96\x81", 0, FSDP_PIECE_USER_DEFINED);
    add_piece("<0x0A>", 0, FSDP_PIECE_BYTE);
    add_piece("\xE2\x96\x81\x61", -1, 0);
    add_piece("a", -2.5F, FSDP_PIECE_NORMAL);
    add_piece("b", -3, FSDP_PIECE_UNUSED);
    add_trainer(3, FSDP_PIECE_BPE);
    add_trainer(43, 3);
    add_bytes(&model, 4, "unknown", 7);
}

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

/* --- the file --- */

static fsdp_status read_model(void)
{
    fsdp_sentencepiece_release(&pieces);
    return fsdp_sentencepiece_read(model.data, model.size, "t.model", 1000, &pieces, &err);
}

Test(sentencepiece, a_file_has_pieces_and_their_roles)
{
    make_model();
    cr_assert_eq(read_model(), FSDP_OK, "%s", err.text);
    cr_assert_eq(pieces.count, 9);
    cr_assert_eq(pieces.model, FSDP_PIECE_BPE);
    cr_assert_eq(memcmp(pieces.pieces[7].text, "a", 1), 0);
    cr_assert_eq(pieces.pieces[7].size, 1);
    cr_assert_eq(pieces.pieces[7].score, -2.5F);
    cr_assert_eq(pieces.pieces[6].type, FSDP_PIECE_NORMAL);
    cr_assert_eq(pieces.pieces[8].type, FSDP_PIECE_UNUSED);
    cr_assert(pieces.unk == 0 && pieces.bos == 1 && pieces.eos == 2 && pieces.pad == 3);
    cr_assert(pieces.adds_space);
}

Test(sentencepiece, a_role_belongs_to_a_control_piece_or_to_none)
{
    add_piece("a", 0, 0);
    add_piece("<unk>", 0, FSDP_PIECE_UNKNOWN);
    add_trainer(43, UINT64_MAX); /* -1: none */
    add_bytes(&model, 3, "\x18\0", 2);
    cr_assert_eq(read_model(), FSDP_OK, "%s", err.text);
    cr_assert_eq(pieces.model, FSDP_PIECE_UNIGRAM, "that of files that do not say");
    cr_assert(pieces.unk == 1 && pieces.bos == -1 && pieces.eos == -1 && pieces.pad == -1);
    cr_assert_not(pieces.adds_space);
}

Test(sentencepiece, fields_that_are_not_known_are_skipped)
{
    add_specials();
    add_varint(&model, 7 << 3 | 1);
    fsdp_text_add(&model, "12345678", 8);
    add_varint(&model, 8 << 3 | 5);
    fsdp_text_add(&model, "1234", 4);
    add_number(&model, 9, UINT64_MAX);
    cr_assert_eq(read_model(), FSDP_OK, "%s", err.text);
    cr_assert_eq(pieces.count, 3);
}

/* Appends the bytes to a good file, and reads it. */
static void expect_damage(const char *data, size_t size, const char *why)
{
    fsdp_text_release(&model);
    add_specials();
    fsdp_text_add(&model, data, size);
    cr_assert_eq(read_model(), FSDP_ERR_DAMAGED, "%s", why);
    cr_assert_not_null(strstr(err.text, why), "%s, not: %s", err.text, why);
    cr_assert_not_null(strstr(err.text, "'t.model'"), "%s", err.text);
}

#define DAMAGE(bytes, why) expect_damage(bytes, sizeof bytes - 1, why)

Test(sentencepiece, hostile_bytes_are_refused_with_their_place)
{
    DAMAGE("\x0A", "byte 46: a number is cut off");
    DAMAGE("\x08\xFF\xFF", "a number is cut off");
    DAMAGE("\x28\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x02", "more than 64 bits");
    DAMAGE("\x0A\x05\x0A", "byte 45: a field is longer");
    DAMAGE("\x0A\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x01", "a field is longer");
    DAMAGE("\x0A\x03\x0A\x02\x61", "byte 47: a field is longer"); /* than the piece */
    DAMAGE("\x29\x01\x02", "a field is longer");
    DAMAGE("\x2B\x2C", "a field is a group");
    DAMAGE("\x2C", "a field is a group");
    DAMAGE("\x2E", "unknown wire type");
    DAMAGE("\x02\x00", "a number that no field may have");
    DAMAGE("\xFA\xFF\xFF\xFF\x7F\x00", "a number that no field may have");
    DAMAGE("\x08\x05", "'a part of the model' has the wire type 0");
    DAMAGE("\x0A\x02\x08\x05", "'piece' has the wire type 0");
    DAMAGE("\x0A\x05\x0A\x01\x61\x10\x01", "'score' has the wire type 0");
    DAMAGE("\x0A\x05\x0A\x01\x61\x1A\x00", "'type' has the wire type 2");
    DAMAGE("\x0A\x00", "a piece has no text");
    DAMAGE("\x0A\x03\x0A\x01\xFF", "no UTF-8");
    DAMAGE("\x0A\x08\x0A\x01\x61\x15\x00\x00\xC0\x7F", "the score of a piece is not finite");
    DAMAGE("\x0A\x08\x0A\x01\x61\x15\x00\x00\x80\xFF", "the score of a piece is not finite");
    DAMAGE("\x0A\x05\x0A\x01\x61\x18\x07", "a piece has an unknown type");
    DAMAGE("\x0A\x05\x0A\x01\x61\x18\x02", "second piece of the type UNKNOWN");
    DAMAGE("\x12\x02\x18\x05", "'model_type' is unknown");
    DAMAGE("\x12\x02\x1A\x00", "'model_type' has the wire type 2");
    DAMAGE("\x12\x03\xC8\x02\x03", "'bos_id' is 3, and there are 3 pieces");
    DAMAGE("\x12\x03\xD0\x02\x09", "'eos_id' is 9");
    DAMAGE("\x12\x07\xD8\x02\xFF\xFF\xFF\xFF\x0F", "more than 32 bits");
    DAMAGE("\x1A\x02\x1A\x00", "'add_dummy_prefix' has the wire type 2");
}

Test(sentencepiece, a_file_that_is_cut_off_is_refused_anywhere_within_a_field)
{
    make_model();
    size_t whole = model.size;
    int accepted = 0;
    for (model.size = 0; model.size < whole; model.size++)
        accepted += read_model() == FSDP_OK;
    cr_assert_eq(accepted, 11, "only ends of fields behind the first piece end a file: %d",
                 accepted);
}

Test(sentencepiece, pieces_are_limited_and_one_is_unknown)
{
    add_piece("a", 0, 0);
    cr_assert_eq(read_model(), FSDP_ERR_DAMAGED);
    cr_assert_not_null(strstr(err.text, "none of its 1 pieces is of the type UNKNOWN"), "%s",
                       err.text);
    add_specials();
    fsdp_sentencepiece_release(&pieces);
    cr_assert_eq(fsdp_sentencepiece_read(model.data, model.size, "t", 3, &pieces, &err),
                 FSDP_ERR_LIMIT);
}

Test(sentencepiece, tiktoken_is_known_by_its_first_line)
{
    static const char *const lists[] = {"IQ== 0\nIg== 1\n", "IQ== 0", "ISEh 12\r\n"};
    static const char *const others[] = {"",        "IQ==", "IQ== ",     "IQ== x",
                                         "IQ= 0\n", " 0\n", "IQ== 0 1\n"};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        cr_assert(fsdp_sentencepiece_is_tiktoken(lists[i], strlen(lists[i])), "%zu", i);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        cr_assert_not(fsdp_sentencepiece_is_tiktoken(others[i], strlen(others[i])), "%zu", i);
    make_model();
    cr_assert_not(fsdp_sentencepiece_is_tiktoken(model.data, model.size));
}

/* --- pairs of GGUF --- */

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

Test(sentencepiece, pieces_become_tokens_as_llama_cpp_has_them)
{
    make_model();
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

Test(sentencepiece, other_files_add_and_replace_tokens)
{
    make_model();
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

Test(sentencepiece, tokenizer_json_comes_first)
{
    make_model();
    put("tokenizer.model", model.data, model.size);
    put_text("added_tokens.json", "{\"<more>\": 9}");
    put_text("tokenizer.json", "{\"model\": {\"vocab\": {\"x\": 0}, \"merges\": []}}");
    cr_assert_eq(make_pairs(), FSDP_OK, "%s", err.text);
    cr_assert_eq(find("tokenizer.ggml.tokens")->as.list.count, 1);
    cr_assert_str_eq(find("tokenizer.ggml.model")->as.bytes.data, "gpt2");
}

Test(sentencepiece, tiktoken_gives_no_pairs)
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

Test(sentencepiece, a_model_that_llama_cpp_does_not_run_is_refused)
{
    make_model();
    config.vocab_size = 8;
    expect_refusal(FSDP_ERR_USAGE,
                   "tokenizer.model' has 9 pieces, and the model's vocab_size is 8");
    config.vocab_size = -1;
    add_trainer(3, FSDP_PIECE_WORD);
    expect_refusal(FSDP_ERR_USAGE, "of the type word");
    add_trainer(3, FSDP_PIECE_UNIGRAM);
    expect_refusal(FSDP_OK, "");
    size_t good = model.size;
    add_piece("a", 0, 0);
    expect_refusal(FSDP_ERR_DAMAGED, "piece 9 is 'a', as piece 7 is");
    model.size = good;
    add_piece("<0xZZ>", 0, FSDP_PIECE_BYTE);
    expect_refusal(FSDP_ERR_DAMAGED, "piece 9 is a byte and reads '<0xZZ>'");
}

Test(sentencepiece, added_tokens_that_make_no_sense_are_refused)
{
    static const char *const lists[] = {"[]", "{\"a\": \"b\"}", "{\"c\": -1}",
                                        "{\"c\": 99999999999}"};
    static const char *const decoders[] = {
        "{\"x\": {\"content\": \"c\"}}", "{\"\": {\"content\": \"c\"}}",
        "{\"12345678901\": {\"content\": \"c\"}}", "{\"9\": {}}", "{\"9\": 3}"};
    make_model();
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
Test(sentencepiece, memory_that_is_not_there_is_an_error)
{
    fsdp_status st = FSDP_ERR_LIMIT;
    make_model();
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
