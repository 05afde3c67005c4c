/* WordPiece tokenizers and the pooling of encoders as key-value pairs of GGUF, and back. */
#include "base/core/mem.h"
#include "tests/unit/statedict/gguf_model/model_pairs.h"

#include <string.h>

#define SIGN "\xE2\x96\x81"

static const char bert[] = "{\"model_type\": \"bert\", \"vocab_size\": 9, \"hidden_size\": 8, "
                           "\"num_hidden_layers\": 1, \"num_attention_heads\": 2, "
                           "\"intermediate_size\": 8, \"max_position_embeddings\": 16, "
                           "\"type_vocab_size\": 2, \"is_decoder\": false}";
static const char rules[] =
    "\"normalizer\": {\"type\": \"BertNormalizer\", \"clean_text\": true, "
    "\"handle_chinese_chars\": true, \"strip_accents\": null, \"lowercase\": true}, "
    "\"pre_tokenizer\": {\"type\": \"BertPreTokenizer\"}, ";
static const char around[] =
    "\"post_processor\": {\"type\": \"TemplateProcessing\", \"single\": ["
    "{\"SpecialToken\": {\"id\": \"[CLS]\", \"type_id\": 0}}, "
    "{\"Sequence\": {\"id\": \"A\", \"type_id\": 0}}, "
    "{\"SpecialToken\": {\"id\": \"[SEP]\", \"type_id\": 0}}], \"special_tokens\": {"
    "\"[CLS]\": {\"id\": \"[CLS]\", \"ids\": [3], \"tokens\": [\"[CLS]\"]}, "
    "\"[SEP]\": {\"id\": \"[SEP]\", \"ids\": [1], \"tokens\": [\"[SEP]\"]}}}, ";
static const char pieces[] =
    "\"model\": {\"type\": \"WordPiece\", \"unk_token\": \"[UNK]\", "
    "\"continuing_subword_prefix\": \"##\", \"max_input_chars_per_word\": 100, \"vocab\": "
    "{\"[PAD]\": 0, \"[SEP]\": 1, \"[UNK]\": 2, \"[CLS]\": 3, \"a\": 4, \"##a\": 5, \"##b\": 6, "
    "\"<t>\": 7}}";
static const char added[] =
    "\"added_tokens\": [{\"id\": 0, \"content\": \"[PAD]\", \"special\": true}, "
    "{\"id\": 1, \"content\": \"[SEP]\", \"special\": true}, "
    "{\"id\": 2, \"content\": \"[UNK]\", \"special\": true}, "
    "{\"id\": 3, \"content\": \"[CLS]\", \"special\": true}, "
    "{\"id\": 7, \"content\": \"<t>\", \"special\": false}], ";

static void begin_bert(void)
{
    config = bert;
    begin();
}

TestSuite(gguf_wordpiece, .init = begin_bert, .fini = end);

static void put(const char *name, const char *text)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    cr_assert_eq(fsdp_io_replace_file(fsdp_io_posix(), path, text, strlen(text), &err), FSDP_OK,
                 "%s", err.text);
}

/* Writes the tokenizer.json with one text in place of another one, of which there is one. */
static void put_tokenizer(const char *from, const char *to)
{
    fsdp_text text = {0};
    fsdp_text_addf(&text, "{%s%s%s%s}", added, rules, around, pieces);
    const char *at = strstr(text.data, from);
    cr_assert_not_null(at, "%s", from);
    fsdp_text changed = {0};
    fsdp_text_addf(&changed, "%.*s%s%s", (int)(at - text.data), text.data, to, at + strlen(from));
    put("tokenizer.json", changed.data);
    fsdp_text_release(&changed);
    fsdp_text_release(&text);
}

static fsdp_status make_pairs(void)
{
    fsdp_config_file file;
    const fsdp_gguf_model model = {.config = &file, .directory = directory};
    fsdp_named_values_release(&values);
    fsdp_status st = fsdp_config_parse(config, strlen(config), NULL, &file, &err);
    if (st == FSDP_OK)
        st = fsdp_gguf_values(fsdp_io_posix(), &model, &values, &found, &err);
    if (st == FSDP_OK)
        st = fsdp_gguf_add_pooling(fsdp_io_posix(), &model, &values, &err);
    fsdp_config_release(&file);
    return st;
}

static void expect_failure(fsdp_status status, const char *text)
{
    cr_expect_eq(make_pairs(), status, "%s", text);
    cr_expect_not_null(strstr(err.text, text), "%s", err.text);
}

static void expect_tokens(const char *const *tokens, const int64_t *types, size_t count)
{
    const fsdp_value *list = find("tokenizer.ggml.tokens");
    const fsdp_value *kinds = find("tokenizer.ggml.token_type");
    cr_assert(list && kinds && list->as.list.count == count && kinds->as.list.count == count);
    for (size_t i = 0; i < count; i++) {
        cr_expect_str_eq(list->as.list.items[i].as.bytes.data, tokens[i]);
        cr_expect_eq(kinds->as.list.items[i].as.i64, types[i], "%s", tokens[i]);
    }
}

static const char *const spelled[] = {"[PAD]", "[SEP]", "[UNK]", "[CLS]",      SIGN "a",
                                      "a",     "b",     "<t>",   SIGN "[PAD8]"};
static const int64_t kinds[] = {3, 3, 3, 3, 1, 1, 1, 4, 5};

/* --- to GGUF -------------------------------------------------------------------------------------- */

Test(gguf_wordpiece, tokens_are_spelled_as_llama_cpp_does)
{
    put_tokenizer("{", "{");
    put("tokenizer_config.json",
        "{\"pad_token\": \"[PAD]\", \"cls_token\": \"[PAD]\", "
        "\"mask_token\": {\"content\": \"<t>\"}, \"do_lower_case\": true}");
    cr_assert_eq(make_pairs(), FSDP_OK, "%s", err.text);
    expect_tokens(spelled, kinds, 9);
    cr_expect_str_eq(find("tokenizer.ggml.model")->as.bytes.data, "bert");
    cr_expect_eq(number("tokenizer.ggml.token_type_count"), 2);
    cr_expect_eq(number("tokenizer.ggml.bos_token_id"), 3, "the template's");
    cr_expect_eq(number("tokenizer.ggml.eos_token_id"), 1);
    cr_expect_eq(number("tokenizer.ggml.seperator_token_id"), 1);
    cr_expect_eq(number("tokenizer.ggml.unknown_token_id"), 2);
    cr_expect_eq(number("tokenizer.ggml.padding_token_id"), 0);
    cr_expect_eq(number("tokenizer.ggml.mask_token_id"), 7);
    cr_expect_eq(flag("tokenizer.ggml.normalizer.lowercase"), 1);
    cr_expect_eq(flag("tokenizer.ggml.normalizer.strip_accents"), -1);
    cr_expect_eq(flag("bert.attention.causal"), 0);
    cr_expect_null(find("tokenizer.ggml.scores"));
}

Test(gguf_wordpiece, a_list_of_words_has_the_usual_special_tokens)
{
    put("vocab.txt", "[PAD]\n[SEP]\r\n[UNK]\n[CLS]\na\n##a\n##b");
    put("tokenizer_config.json",
        "{\"do_lower_case\": false, \"strip_accents\": true, \"added_tokens_decoder\": {"
        "\"7\": {\"content\": \"<t>\", \"special\": false}}}");
    cr_assert_eq(make_pairs(), FSDP_OK, "%s", err.text);
    expect_tokens(spelled, kinds, 9);
    cr_expect_eq(number("tokenizer.ggml.bos_token_id"), 3);
    cr_expect_eq(flag("tokenizer.ggml.normalizer.lowercase"), 0);
    cr_expect_eq(flag("tokenizer.ggml.normalizer.strip_accents"), 1);
}

Test(gguf_wordpiece, a_list_of_words_that_is_none_is_refused)
{
    put("vocab.txt", "[PAD]\n[SEP]\n[UNK]\n[CLS]\na\n##a\na\n");
    expect_failure(FSDP_ERR_DAMAGED, "lines 5 and 7 are the same token");
    put("vocab.txt", "[PAD]\n[SEP]\n[UNK]\na\n");
    expect_failure(FSDP_ERR_DAMAGED, "stands for [CLS]");
    put("vocab.txt", "[PAD]\n\xFF\n");
    expect_failure(FSDP_ERR_DAMAGED, "line 2 is not UTF-8");
    put("vocab.txt", "[PAD]\n[SEP]\n[UNK]\n[CLS]\na\n");
    put("added_tokens.json", "{\"<t>\": 4}");
    expect_failure(FSDP_ERR_DAMAGED, "'<t>' has the number 4");
}

Test(gguf_wordpiece, text_that_llama_cpp_treats_in_another_way_is_refused)
{
    static const struct {
        const char *from, *to, *why;
    } cases[] = {
        {"\"clean_text\": true", "\"clean_text\": false", "'clean_text'"},
        {"\"handle_chinese_chars\": true", "\"handle_chinese_chars\": false",
         "'handle_chinese_chars'"},
        {"BertNormalizer", "NFKC", "normalizer 'NFKC'"},
        {"BertPreTokenizer", "Whitespace", "pre-tokenizer 'Whitespace'"},
        {"TemplateProcessing", "RobertaProcessing", "post-processor 'RobertaProcessing'"},
        {"{\"SpecialToken\": {\"id\": \"[CLS]\", \"type_id\": 0}}, ", "", "on each side"},
        {"_prefix\": \"##\"", "_prefix\": \"@@\"", "'@@'"},
        {"##b", "##" SIGN "b", "the beginning of a word"},
        {"##b", "##[CLS]", "3 and 6 alike"},
        {"\"type\": \"WordPiece\"", "\"type\": \"BPE\"", "not of the type WordPiece"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        put_tokenizer(cases[i].from, cases[i].to);
        expect_failure(FSDP_ERR_USAGE, cases[i].why);
    }
    put_tokenizer("\"unk_token\": \"[UNK]\"", "\"unk_token\": \"[NO]\"");
    expect_failure(FSDP_ERR_DAMAGED, "'[NO]'");
}

Test(gguf_wordpiece, files_that_contradict_each_other_are_refused)
{
    put_tokenizer("{", "{");
    put("tokenizer_config.json", "{\"do_lower_case\": false}");
    expect_failure(FSDP_ERR_USAGE, "do_lower_case false");
    put("tokenizer_config.json", "{\"strip_accents\": false}");
    expect_failure(FSDP_ERR_USAGE, "strip_accents false");
    put("tokenizer_config.json", "{\"tokenize_chinese_chars\": false}");
    expect_failure(FSDP_ERR_USAGE, "tokenize_chinese_chars false");
    put("tokenizer_config.json", "{\"strip_accents\": true}");
    cr_expect_eq(make_pairs(), FSDP_OK, "%s", err.text);
}

Test(gguf_wordpiece, another_form_of_the_template_is_read)
{
    put_tokenizer(around, "\"post_processor\": {\"type\": \"BertProcessing\", \"sep\": "
                          "[\"[SEP]\", 1], \"cls\": [\"[CLS]\", 3]}, ");
    cr_assert_eq(make_pairs(), FSDP_OK, "%s", err.text);
    cr_expect_eq(number("tokenizer.ggml.bos_token_id"), 3);
    cr_expect_eq(number("tokenizer.ggml.seperator_token_id"), 1);
}

Test(gguf_wordpiece, members_that_change_an_encoder_are_refused)
{
    static const char *const members[] = {"\"is_decoder\": true", "\"add_cross_attention\": true",
                                          "\"position_embedding_type\": \"relative_key\"",
                                          "\"hidden_act\": \"relu\""};
    for (size_t i = 0; i < sizeof members / sizeof *members; i++) {
        fsdp_text text = {0};
        const char *begin = strstr(bert, "\"is_decoder\"");
        fsdp_text_addf(&text, "%.*s%s}", (int)(begin - bert), bert, members[i]);
        config = text.data;
        expect_failure(FSDP_ERR_USAGE, "llama.cpp");
        fsdp_text_release(&text);
    }
}

/* --- pooling -------------------------------------------------------------------------------------- */

static void put_modules(const char *type, const char *settings)
{
    char folder[128], text[256];
    snprintf(folder, sizeof folder, "%s/1_Pooling", directory);
    (void)fsdp_io_mkdir(fsdp_io_posix(), folder, &err);
    snprintf(text, sizeof text,
             "[{\"path\": \"\", \"type\": \"sentence_transformers.models.Transformer\"}, "
             "{\"path\": \"1_Pooling\", \"type\": \"sentence_transformers.models.%s\"}]",
             type);
    put("modules.json", text);
    put("1_Pooling/config.json", settings);
}

Test(gguf_wordpiece, pooling_is_that_of_sentence_transformers)
{
    static const struct {
        const char *settings;
        int64_t number;
    } cases[] = {{"{\"pooling_mode_mean_tokens\": true, \"pooling_mode_cls_token\": false}", 1},
                 {"{\"pooling_mode_mean_tokens\": false, \"pooling_mode_cls_token\": true}", 2},
                 {"{\"pooling_mode\": \"lasttoken\"}", 3}};
    put_tokenizer("{", "{");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        put_modules("Pooling", cases[i].settings);
        cr_assert_eq(make_pairs(), FSDP_OK, "%s", err.text);
        cr_expect_eq(number("bert.pooling_type"), cases[i].number);
    }
    put_modules("Normalize", "{}");
    cr_assert_eq(make_pairs(), FSDP_OK, "%s", err.text);
    cr_expect_null(find("bert.pooling_type"));
}

Test(gguf_wordpiece, pooling_that_llama_cpp_lacks_is_refused)
{
    static const char *const settings[] = {
        "{\"pooling_mode_max_tokens\": true}", "{}",
        "{\"pooling_mode_mean_tokens\": true, \"pooling_mode_max_tokens\": true}",
        "{\"pooling_mode_mean_tokens\": true, \"include_prompt\": false}"};
    put_tokenizer("{", "{");
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        put_modules("Pooling", settings[i]);
        expect_failure(FSDP_ERR_USAGE, "1_Pooling/config.json'");
    }
    put_modules("Dense", "{}");
    expect_failure(FSDP_ERR_USAGE, "'Dense', which llama.cpp does not compute");
}

/* --- back ----------------------------------------------------------------------------------------- */

static fsdp_status make_files(fsdp_gguf_files *files)
{
    fsdp_sd *sd = NULL;
    cr_assert_eq(fsdp_sd_create(&sd, &err), FSDP_OK);
    for (size_t i = 0; i < values.count; i++)
        cr_assert_eq(fsdp_sd_add_value(sd, values.items[i].name, strlen(values.items[i].name),
                                       &values.items[i].value, &err),
                     FSDP_OK);
    fsdp_status st = fsdp_gguf_make_files(sd, files, &err);
    fsdp_sd_free(sd);
    return st;
}

static const char *file_text(const fsdp_gguf_files *files, const char *name)
{
    for (size_t i = 0; i < files->count; i++)
        if (strcmp(files->items[i].name, name) == 0)
            return files->items[i].text.data;
    return "";
}

/* The files give the same pairs again. */
static void expect_circle(const char *without)
{
    fsdp_gguf_files files;
    cr_assert_eq(make_files(&files), FSDP_OK, "%s", err.text);
    for (size_t i = 0; i < files.count; i++)
        if (!without || strcmp(without, files.items[i].name) != 0)
            put(files.items[i].name, files.items[i].text.data);
    fsdp_named_values before = values;
    values = (fsdp_named_values){0};
    cr_assert_eq(make_pairs(), FSDP_OK, "%s", err.text);
    cr_assert_eq(values.count, before.count);
    for (size_t i = 0; i < before.count; i++)
        cr_expect(fsdp_value_equal(&values.items[i].value, &before.items[i].value), "%s",
                  before.items[i].name);
    fsdp_named_values_release(&before);
    fsdp_gguf_files_release(&files);
}

Test(gguf_wordpiece, files_come_back_out_of_the_pairs)
{
    put_tokenizer("\"strip_accents\": null, \"lowercase\": true",
                  "\"strip_accents\": true, \"lowercase\": false");
    put_modules("Pooling", "{\"pooling_mode_cls_token\": true}");
    cr_assert_eq(make_pairs(), FSDP_OK, "%s", err.text);
    expect_circle(NULL);
}

Test(gguf_wordpiece, a_list_of_words_comes_back_out_of_the_pairs)
{
    put("vocab.txt", "[PAD]\n[SEP]\n[UNK]\n[CLS]\na\n##a\n##b\n");
    cr_assert_eq(make_pairs(), FSDP_OK, "%s", err.text);
    expect_circle("tokenizer.json");
    expect_circle(NULL);
}

static fsdp_value *token(size_t i)
{
    return &((fsdp_value *)find("tokenizer.ggml.tokens"))->as.list.items[i];
}

/* Earlier converters spelled all tokens in brackets as they are. */
Test(gguf_wordpiece, words_in_brackets_are_no_continuations)
{
    fsdp_gguf_files files;
    put_tokenizer("{", "{");
    cr_assert_eq(make_pairs(), FSDP_OK, "%s", err.text);
    fsdp_value_release(token(5));
    cr_assert_eq(fsdp_value_set_bytes(token(5), FSDP_VALUE_STRING, "[unused0]", 9, &err), FSDP_OK);
    cr_assert_eq(make_files(&files), FSDP_OK, "%s", err.text);
    cr_expect_str_eq(file_text(&files, "vocab.txt"),
                     "[PAD]\n[SEP]\n[UNK]\n[CLS]\na\n[unused0]\n##b\n<t>\n");
    fsdp_gguf_files_release(&files);
}

Test(gguf_wordpiece, tokens_that_make_no_tokenizer_are_refused)
{
    static const char *const texts[] = {"b", "a\nb"}, *const reasons[] = {"6", "5"};
    fsdp_gguf_files files;
    for (size_t i = 0; i < 2; i++) {
        put_tokenizer("{", "{");
        cr_assert_eq(make_pairs(), FSDP_OK, "%s", err.text);
        fsdp_value_release(token(5));
        cr_assert_eq(
            fsdp_value_set_bytes(token(5), FSDP_VALUE_STRING, texts[i], strlen(texts[i]), &err),
            FSDP_OK);
        cr_expect_eq(make_files(&files), FSDP_ERR_DAMAGED);
        cr_expect_not_null(strstr(err.text, reasons[i]), "%s", err.text);
        fsdp_gguf_files_release(&files);
    }
}
