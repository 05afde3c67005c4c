/* T5, an encoder and a decoder with a tokenizer of the model Unigram, as key-value pairs of GGUF and back. */
#include "base/core/mem.h"
#include "tests/support/piece_file.h"
#include "tests/unit/statedict/gguf_model/model_pairs.h"

#include <string.h>

static const char *const usual[] = {"\"model_type\": \"t5\"",
                                    "\"d_model\": 16",
                                    "\"d_ff\": 24",
                                    "\"d_kv\": 12",
                                    "\"num_heads\": 4",
                                    "\"num_layers\": 3",
                                    "\"num_decoder_layers\": 2",
                                    "\"vocab_size\": 9",
                                    "\"relative_attention_num_buckets\": 20",
                                    "\"layer_norm_epsilon\": 0.5"};

/* A map of the characters whose replacement is "": its trie has 8 bytes. */
#define CHARSMAP "\x08\0\0\0trietrie\0"

static fsdp_text model;

static void release(void)
{
    fsdp_text_release(&model);
    end();
}

TestSuite(gguf_t5, .init = begin, .fini = release);

static void put(const char *name, const char *data, size_t size)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    cr_assert_eq(fsdp_io_replace_file(fsdp_io_posix(), path, data, size, &err), FSDP_OK);
}

/* The pairs of a T5 whose config.json has these members, and the usual ones of other names. */
static fsdp_status read_t5(const char *members)
{
    fsdp_text text = {0};
    fsdp_text_addf(&text, "{%s", members);
    for (size_t i = 0; i < sizeof usual / sizeof *usual; i++) {
        char key[64];
        snprintf(key, sizeof key, "%.*s", (int)strcspn(usual[i], ":"), usual[i]);
        if (!strstr(members, key))
            fsdp_text_addf(&text, "%s%s", text.size > 1 ? ", " : "", usual[i]);
    }
    fsdp_text_addf(&text, "}");
    config = text.data;
    fsdp_named_values_release(&values);
    fsdp_status st = text.failed ? FSDP_ERR_LIMIT : read_all();
    fsdp_text_release(&text);
    return st;
}

static void expect_refusal(fsdp_status st, fsdp_status wanted, const char *why)
{
    cr_assert_eq(st, wanted, "%s: %s", why, err.text);
    cr_assert_not_null(strstr(err.text, why), "%s, not: %s", why, err.text);
}

static void add_tensor(const char *name, int64_t rows, int64_t columns)
{
    static fsdp_mesh *mesh;
    if (!mesh)
        cr_assert_eq(
            fsdp_mesh_create(1, (int64_t[]){1}, (const char *[]){"rank"}, NULL, &mesh, &err),
            FSDP_OK);
    const fsdp_tensor tensor = {FSDP_F32, 2, (int64_t[]){rows, columns}, {.mesh = mesh}, NULL};
    if (!tensors)
        cr_assert_eq(fsdp_sd_create(&tensors, &err), FSDP_OK);
    cr_assert_eq(fsdp_sd_add_tensor(tensors, name, strlen(name), &tensor, &err), FSDP_OK, "%s",
                 err.text);
}

static void add_layers(void)
{
    add_tensor("token_embd.weight", 9, 16);
    add_tensor("enc.blk.2.ffn_up.weight", 24, 16);
    add_tensor("dec.blk.1.ffn_up.weight", 24, 16);
}

/* --- numbers --- */

Test(gguf_t5, a_config_gives_the_numbers_of_encoder_and_decoder)
{
    cr_assert_eq(read_t5(""), FSDP_OK, "%s", err.text);
    cr_expect_eq(number("t5.block_count"), 3);
    cr_expect_eq(number("t5.decoder_block_count"), 2);
    cr_expect_eq(number("t5.context_length"), 512, "that of llama.cpp's converter");
    cr_expect_eq(number("t5.feed_forward_length"), 24);
    cr_expect_eq(number("t5.attention.head_count"), 4);
    cr_expect_eq(number("t5.attention.key_length"), 12);
    cr_expect_eq(number("t5.attention.value_length"), 12);
    cr_expect_eq(number("t5.attention.relative_buckets_count"), 20);
    cr_expect_eq(find("t5.attention.layer_norm_rms_epsilon")->as.f64, 0.5);
    cr_expect_eq(number("t5.decoder_start_token_id"), 0, "T5 begins with the token for padding");
    cr_assert_eq(read_t5("\"n_positions\": 77, \"decoder_start_token_id\": 5"), FSDP_OK);
    cr_expect_eq(number("t5.context_length"), 77);
    cr_expect_eq(number("t5.decoder_start_token_id"), 5);
}

Test(gguf_t5, numbers_of_the_tensors_contradict_or_complete_those_of_the_config)
{
    add_layers();
    cr_assert_eq(read_t5(""), FSDP_OK, "%s", err.text);
    add_tensor("enc.blk.0.attn_q.weight", 48, 16);
    add_tensor("enc.blk.0.attn_k.weight", 48, 16);
    add_tensor("enc.blk.0.attn_rel_b.weight", 20, 4);
    cr_assert_eq(read_t5("\"d_kv\": null"), FSDP_OK, "%s", err.text);
    cr_expect_eq(number("t5.attention.key_length"), 12);
    expect_refusal(read_t5("\"d_kv\": 13"), FSDP_ERR_DAMAGED, "d_kv 13, but");
    expect_refusal(read_t5("\"relative_attention_num_buckets\": 32"), FSDP_ERR_DAMAGED,
                   "relative_attention_num_buckets 32, but 'enc.blk.0.attn_rel_b.weight' has 20");
    expect_refusal(read_t5("\"num_heads\": 8"), FSDP_ERR_DAMAGED, "num_heads 8");
    expect_refusal(read_t5("\"num_decoder_layers\": 1"), FSDP_ERR_DAMAGED,
                   "num_decoder_layers 1, but 'dec.blk.1' has 2");
    add_tensor("dec.blk.2.ffn_up.weight", 24, 16);
    add_tensor("dec.blk.3.ffn_up.weight", 24, 16);
    expect_refusal(read_t5("\"num_decoder_layers\": 4"), FSDP_ERR_USAGE,
                   "3 layers in the encoder and 4 in the decoder");
}

Test(gguf_t5, a_model_without_a_decoder_is_refused)
{
    add_tensor("token_embd.weight", 9, 16);
    add_tensor("enc.blk.2.ffn_up.weight", 24, 16);
    expect_refusal(read_t5(""), FSDP_ERR_USAGE, "no tensors of a decoder");
}

Test(gguf_t5, what_llama_cpp_computes_otherwise_is_refused)
{
    expect_refusal(read_t5("\"relative_attention_max_distance\": 64"), FSDP_ERR_USAGE,
                   "relative_attention_max_distance 64");
    expect_refusal(read_t5("\"is_encoder_decoder\": false"), FSDP_ERR_USAGE,
                   "is_encoder_decoder 0");
    add_layers();
    expect_refusal(read_t5("\"feed_forward_proj\": \"gelu\""), FSDP_ERR_USAGE,
                   "feed_forward_proj 'gelu'");
    expect_refusal(read_t5("\"feed_forward_proj\": \"gated-gelu\""), FSDP_ERR_USAGE,
                   "lacks the tensor 'dec.blk.0.ffn_gate.weight' with 'relu'");
    expect_refusal(read_t5("\"dense_act_fn\": \"silu\""), FSDP_ERR_USAGE, "dense_act_fn 'silu'");
    add_tensor("dec.blk.0.ffn_gate.weight", 24, 16);
    cr_assert_eq(read_t5("\"feed_forward_proj\": \"gated-gelu\", \"dense_act_fn\": \"gelu_new\""),
                 FSDP_OK, "%s", err.text);
    expect_refusal(read_t5(""), FSDP_ERR_USAGE, "has the tensor 'dec.blk.0.ffn_gate.weight'");
}

/* --- the way back --- */

/* Makes the tensors and pairs of a file, one pair with another value. */
static void make_file(const char *key, const fsdp_value *other)
{
    cr_assert_eq(read_t5("\"n_positions\": 77"), FSDP_OK, "%s", err.text);
    add_layers();
    for (size_t i = 0; i < values.count; i++) {
        const char *name = values.items[i].name;
        const fsdp_value *value = strcmp(name, key) == 0 ? other : &values.items[i].value;
        cr_assert_eq(fsdp_sd_add_value(tensors, name, strlen(name), value, &err), FSDP_OK);
    }
}

static void expect_back(const char *tensor, const char *const *wanted)
{
    fsdp_text text = {0};
    make_file("", NULL);
    if (tensor)
        add_tensor(tensor, 24, 16);
    cr_assert_eq(fsdp_gguf_config_text(tensors, &text, &err), FSDP_OK, "%s", err.text);
    for (; *wanted; wanted++)
        cr_expect_not_null(strstr(text.data, *wanted), "%s in %s", *wanted, text.data);
    fsdp_text_release(&text);
    fsdp_sd_free(tensors);
    tensors = NULL;
}

Test(gguf_t5, a_config_comes_back)
{
    expect_back(NULL,
                (const char *const[]){
                    "T5ForConditionalGeneration", "\"n_positions\": 77", "\"num_layers\": 3",
                    "\"num_decoder_layers\": 2", "\"d_kv\": 12", "\"layer_norm_epsilon\": 0.5",
                    "\"relative_attention_num_buckets\": 20", "\"decoder_start_token_id\": 0",
                    "\"feed_forward_proj\": \"relu\"", "\"tie_word_embeddings\": true", NULL});
    expect_back("dec.blk.0.ffn_gate.weight",
                (const char *const[]){"\"feed_forward_proj\": \"gated-gelu\"", NULL});
    expect_back("output.weight", (const char *const[]){"\"tie_word_embeddings\": false", NULL});
}

Test(gguf_t5, a_file_that_counts_no_layers_is_refused)
{
    const fsdp_value none = fsdp_value_i64(0);
    fsdp_text text = {0};
    make_file("t5.decoder_block_count", &none);
    expect_refusal(fsdp_gguf_config_text(tensors, &text, &err), FSDP_ERR_DAMAGED,
                   "'t5.decoder_block_count' is 0");
    fsdp_text_release(&text);
}

/* llama.cpp computes with the one of root mean squares, and reads no other. */
Test(gguf_t5, the_epsilon_that_llama_cpp_reads_comes_back)
{
    const fsdp_value other = fsdp_value_f64(0.25);
    fsdp_text text = {0};
    make_file("t5.attention.layer_norm_rms_epsilon", &other);
    cr_assert_eq(fsdp_gguf_config_text(tensors, &text, &err), FSDP_OK, "%s", err.text);
    cr_expect_not_null(strstr(text.data, "\"layer_norm_epsilon\": 0.25"), "%s", text.data);
    fsdp_text_release(&text);
}

/* --- the tokenizer: tokenizer.json --- */

#define NORMALIZER                                                           \
    "\"normalizer\": {\"type\": \"Precompiled\", \"precompiled_charsmap\": " \
    "\"CAAAAHRyaWV0cmllAA==\"}"
#define MARK \
    "{\"type\": \"Metaspace\", \"replacement\": \"\xE2\x96\x81\", \"prepend_scheme\": \"always\"}"
#define SPLITS                                                                    \
    "\"pre_tokenizer\": {\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": " \
    "\"WhitespaceSplit\"}, " MARK "]}"
#define MARKS "\"pre_tokenizer\": " MARK
#define UNIGRAM(more)                                                                        \
    "\"model\": {\"type\": \"Unigram\", " more "\"vocab\": [[\"<pad>\", 0], [\"</s>\", 0], " \
    "[\"<unk>\", 0], [\"\xE2\x96\x81\", -2.5], [\"a\", -3]]}"
#define MODEL UNIGRAM("\"unk_id\": 2, ")
#define ADDED                                                                                 \
    "\"added_tokens\": [{\"id\": 0, \"content\": \"<pad>\", \"special\": true}, {\"id\": 5, " \
    "\"content\": \"<x>\", \"special\": false}]"
#define TEMPLATE(before, after)                                                                  \
    "\"post_processor\": {\"type\": \"TemplateProcessing\", \"single\": [" before                \
    "{\"Sequence\": {\"id\": \"A\"}}" after "], \"special_tokens\": {\"</s>\": {\"ids\": [1]}, " \
    "\"a\": {\"ids\": [4]}}}"
#define SPECIAL(name) "{\"SpecialToken\": {\"id\": \"" name "\"}}"
#define ENDS TEMPLATE("", ", " SPECIAL("</s>"))

static fsdp_status read_json(const char *text)
{
    put("tokenizer.json", text, strlen(text));
    return read_t5("\"eos_token_id\": 1, \"pad_token_id\": 0");
}

static void expect_token(size_t id, const char *text, double score, int64_t type)
{
    static const char *const lists[] = {"tokenizer.ggml.tokens", "tokenizer.ggml.scores",
                                        "tokenizer.ggml.token_type"};
    for (size_t i = 0; i < 3; i++)
        cr_assert(find(lists[i]) && id < find(lists[i])->as.list.count);
    cr_expect_str_eq(find(lists[0])->as.list.items[id].as.bytes.data, text);
    cr_expect_eq(find(lists[1])->as.list.items[id].as.f64, score, "%s", text);
    cr_expect_eq(find(lists[2])->as.list.items[id].as.i64, type, "%s", text);
}

static void expect_charsmap(void)
{
    const fsdp_value *list = find("tokenizer.ggml.precompiled_charsmap");
    cr_assert(list && list->kind == FSDP_VALUE_LIST);
    cr_assert_eq(list->as.list.count, sizeof CHARSMAP - 1);
    for (size_t i = 0; i < sizeof CHARSMAP - 1; i++)
        cr_expect_eq(list->as.list.items[i].as.i64, (uint8_t)CHARSMAP[i], "byte %zu", i);
}

Test(gguf_t5, a_tokenizer_json_of_unigram_is_llama_cpps_t5)
{
    cr_assert_eq(read_json("{" NORMALIZER ", " SPLITS ", " ADDED ", " ENDS ", " MODEL "}"), FSDP_OK,
                 "%s", err.text);
    cr_expect_eq(found, FSDP_GGUF_TOKENIZER);
    cr_expect_str_eq(find("tokenizer.ggml.model")->as.bytes.data, "t5");
    cr_expect_str_eq(find("tokenizer.ggml.pre")->as.bytes.data, "default");
    expect_token(0, "<pad>", 0, 3);
    expect_token(2, "<unk>", 0, 2);
    expect_token(3, "\xE2\x96\x81", -2.5, 1);
    expect_token(5, "<x>", -1e6, 4);
    expect_token(8, "[PAD8]", -10000, 5);
    expect_charsmap();
    cr_expect_eq(flag("tokenizer.ggml.add_space_prefix"), 1);
    cr_expect_eq(flag("tokenizer.ggml.remove_extra_whitespaces"), 1);
    cr_expect_eq(flag("tokenizer.ggml.add_eos_token"), -1, "llama.cpp adds one without a word");
    cr_expect_eq(number("tokenizer.ggml.unknown_token_id"), 2);
    cr_expect_eq(number("tokenizer.ggml.eos_token_id"), 1);
    cr_expect_eq(number("tokenizer.ggml.padding_token_id"), 0);
}

Test(gguf_t5, the_template_says_which_tokens_are_around_the_text)
{
    cr_assert_eq(read_json("{" SPLITS ", " MODEL "}"), FSDP_OK, "%s", err.text);
    cr_expect_eq(flag("tokenizer.ggml.add_eos_token"), 0);
    cr_expect_null(find("tokenizer.ggml.precompiled_charsmap"));
    put("tokenizer_config.json", "{\"bos_token\": \"a\", \"add_eos_token\": true}", 41);
    cr_assert_eq(read_json("{" SPLITS ", " MODEL ", " TEMPLATE(SPECIAL("a") ", ", "") "}"), FSDP_OK,
                 "%s", err.text);
    cr_expect_eq(flag("tokenizer.ggml.add_bos_token"), 1);
    cr_expect_eq(flag("tokenizer.ggml.add_eos_token"), 0, "the template counts");
    expect_refusal(read_json("{" SPLITS ", " MODEL ", " TEMPLATE("", ", " SPECIAL("a")) "}"),
                   FSDP_ERR_USAGE, "other tokens than bos_token");
}

Test(gguf_t5, spaces_may_be_merged_by_the_normalizer)
{
#define REPLACE(what) \
    "{\"type\": \"Replace\", \"pattern\": {\"Regex\": \" {2,}\"}, \"content\": \"" what "\"}"
#define STRIP "{\"type\": \"Strip\", \"strip_left\": false, \"strip_right\": true}"
#define NORMALIZERS(list) "\"normalizer\": {\"type\": \"Sequence\", \"normalizers\": [" list "]}"
    cr_assert_eq(
        read_json("{" NORMALIZERS(STRIP ", " REPLACE("\xE2\x96\x81")) ", " MARKS ", " MODEL "}"),
        FSDP_OK, "%s", err.text);
    static const char *const odd[][2] = {
        {"{" NORMALIZERS(STRIP) ", " MARKS ", " MODEL "}", "keeps several spaces"},
        {"{" NORMALIZERS(REPLACE(" ")) ", " MARKS ", " MODEL "}", "keeps several spaces"},
        {"{" NORMALIZERS(REPLACE("x")) ", " SPLITS ", " MODEL "}", "normalizer Replace of"},
        {"{\"normalizer\": {\"type\": \"Lowercase\"}, " SPLITS ", " MODEL "}", "'Lowercase'"},
        {"{" MODEL "}", "pre-tokenizer 'null'"},
        {"{\"pre_tokenizer\": {\"type\": \"WhitespaceSplit\"}, " MODEL "}", "without 'Metaspace'"},
        {"{\"pre_tokenizer\": {\"type\": \"Digits\"}, " MODEL "}", "'Digits'"},
        {"{\"pre_tokenizer\": {\"type\": \"Metaspace\", \"replacement\": \"_\"}, " MODEL "}",
         "replacement '_'"},
        {"{\"pre_tokenizer\": {\"type\": \"Metaspace\", \"replacement\": \"\xE2\x96\x81\", "
         "\"prepend_scheme\": \"never\"}, " MODEL "}",
         "'never'"},
        {"{\"pre_tokenizer\": {\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": "
         "\"WhitespaceSplit\"}, {\"type\": \"Metaspace\", \"replacement\": \"\xE2\x96\x81\", "
         "\"prepend_scheme\": \"first\"}]}, " MODEL "}",
         "'first'"},
        {"{" SPLITS ", " UNIGRAM("") "}", "no unk_id"},
        {"{" SPLITS ", \"model\": {\"type\": \"Unigram\", \"unk_id\": 0, \"vocab\": "
         "[[\"<unk>\", 0], [\"\xE2\x96\x81\x61\xE2\x96\x81\x62\", -1]]}}",
         "token 1 is of several words"},
        {"{" SPLITS ", " UNIGRAM("\"unk_id\": 0, \"byte_fallback\": true, ") "}", "byte_fallback"},
    };
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++)
        expect_refusal(read_json(odd[i][0]), FSDP_ERR_USAGE, odd[i][1]);
    expect_refusal(read_json("{" SPLITS ", " UNIGRAM("\"unk_id\": 7, ") "}"), FSDP_ERR_DAMAGED,
                   "unk_id is 7 of 5 tokens");
    expect_refusal(read_json("{\"normalizer\": {\"type\": \"Precompiled\", "
                             "\"precompiled_charsmap\": \"CQAAAHRyaWV0cmllAA==\"}, " SPLITS
                             ", " MODEL "}"),
                   FSDP_ERR_DAMAGED, "precompiled_charsmap is not a trie");
}

Test(gguf_t5, tokens_after_the_rows_of_the_model)
{
    cr_assert_eq(
        read_json("{\"added_tokens\": [{\"id\": 8, \"content\": \"<last>\", \"special\": "
                  "true}, {\"id\": 9, \"content\": \"<after>\", \"special\": true}], " SPLITS
                  ", " MODEL "}"),
        FSDP_OK, "%s", err.text);
    cr_expect_eq(find("tokenizer.ggml.tokens")->as.list.count, 9);
    expect_token(8, "<last>", -1e6, 3);
    expect_refusal(read_json("{" SPLITS ", \"model\": {\"type\": \"Unigram\", \"unk_id\": 0, "
                             "\"vocab\": [[\"0\", 0], [\"1\", 0], [\"2\", 0], [\"3\", 0], "
                             "[\"4\", 0], [\"5\", 0], [\"6\", 0], [\"7\", 0], [\"8\", 0], "
                             "[\"9\", 0]]}}"),
                   FSDP_ERR_USAGE, "has 10 tokens, and the model's vocab_size is 9");
}

/* --- the tokenizer: spiece.model --- */

/* normalizer: its fields 2 to 5, and the trainer's field for spaces that end words. */
static void make_pieces(bool merges_spaces, bool escapes, bool is_suffix)
{
    fsdp_text normalizer = {0};
    model.size = 0;
    piece_file_add_piece(&model, "<pad>", 0, FSDP_PIECE_CONTROL);
    piece_file_add_piece(&model, "</s>", 0, FSDP_PIECE_CONTROL);
    piece_file_add_piece(&model, "<unk>", 0, FSDP_PIECE_UNKNOWN);
    piece_file_add_piece(&model, "\xE2\x96\x81\x61", -1, 0);
    piece_file_add_bytes(&normalizer, 2, CHARSMAP, sizeof CHARSMAP - 1);
    piece_file_add_number(&normalizer, 3, 1);
    piece_file_add_number(&normalizer, 4, merges_spaces);
    piece_file_add_number(&normalizer, 5, escapes);
    piece_file_add_bytes(&model, 3, normalizer.data, normalizer.size);
    fsdp_text_release(&normalizer);
    piece_file_add_trainer(&model, 24, is_suffix);
    piece_file_add_trainer(&model, 43, 0);
    piece_file_add_trainer(&model, 42, 1);
}

static fsdp_status read_pieces(void)
{
    put("spiece.model", model.data, model.size);
    return read_t5("");
}

Test(gguf_t5, unigram_pieces_are_llama_cpps_t5)
{
    make_pieces(true, true, false);
    cr_assert_eq(read_pieces(), FSDP_OK, "%s", err.text);
    cr_expect_str_eq(find("tokenizer.ggml.model")->as.bytes.data, "t5");
    expect_token(2, "<unk>", 0, 2);
    expect_token(3, "\xE2\x96\x81\x61", -1, 1);
    expect_token(8, "[PAD8]", -10000, 5);
    expect_charsmap();
    cr_expect_eq(flag("tokenizer.ggml.add_space_prefix"), 1);
    cr_expect_eq(flag("tokenizer.ggml.remove_extra_whitespaces"), 1);
    cr_expect_eq(number("tokenizer.ggml.eos_token_id"), 1);
    cr_expect_eq(number("tokenizer.ggml.padding_token_id"), 0);
    make_pieces(false, true, false);
    cr_assert_eq(read_pieces(), FSDP_OK, "%s", err.text);
    cr_expect_eq(flag("tokenizer.ggml.remove_extra_whitespaces"), 0);
    piece_file_add_trainer(&model, 3, FSDP_PIECE_BPE);
    cr_assert_eq(read_pieces(), FSDP_OK, "%s", err.text);
    cr_expect_str_eq(find("tokenizer.ggml.model")->as.bytes.data, "llama");
}

Test(gguf_t5, unigram_pieces_that_llama_cpp_treats_otherwise_are_refused)
{
    make_pieces(true, false, false);
    expect_refusal(read_pieces(), FSDP_ERR_USAGE, "escape_whitespaces");
    make_pieces(true, true, true);
    expect_refusal(read_pieces(), FSDP_ERR_USAGE, "treat_whitespace_as_suffix");
    make_pieces(true, true, false);
    piece_file_add_bytes(&model, 3, "\x18\0", 2);
    expect_refusal(read_pieces(), FSDP_ERR_USAGE, "add_dummy_prefix is false");
    make_pieces(true, true, false);
    piece_file_add_piece(&model, "<0x0A>", 0, FSDP_PIECE_BYTE);
    expect_refusal(read_pieces(), FSDP_ERR_USAGE, "bytes in place of unknown characters");
}

/* Every allocation fails once. */
Test(gguf_t5, memory_that_is_not_there_is_an_error)
{
    fsdp_status st = FSDP_ERR_LIMIT;
    const char *text = "{" NORMALIZER ", " SPLITS ", " ADDED ", " ENDS ", " MODEL "}";
    put("tokenizer.json", text, strlen(text));
    for (int64_t n = 0; st != FSDP_OK && n < 2000; n++) {
        fsdp_named_values_release(&values);
        fsdp_mem_fail_after(n, false);
        st = read_t5("");
        fsdp_mem_fail_after(-1, false);
        cr_assert(st == FSDP_OK || st == FSDP_ERR_LIMIT, "%d: %s", (int)st, err.text);
    }
    cr_assert_eq(st, FSDP_OK);
}
