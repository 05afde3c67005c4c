/*
 * The reader of tokenizer.json: items in the order of the file, with what the file says of them. Its refusals
 * and its golden files are tested with its callers, test_tokenizer.c and test_gguf_values.c.
 */
#include "formats/tokenizer_json.h"

#include <criterion/criterion.h>
#include <string.h>

static fsdp_tokenizer_json file;
static fsdp_text seen; /* the items, one a line */
static fsdp_error err;
static int most; /* items that are taken before an error */

static void begin(void)
{
    most = 1000;
}

static void end(void)
{
    fsdp_tokenizer_json_release(&file);
    fsdp_text_release(&seen);
}

TestSuite(tokenizer_json, .init = begin, .fini = end);

static void open_text(const char *text)
{
    cr_assert_eq(fsdp_tokenizer_json_open(&file, text, strlen(text), "t.json", &err), FSDP_OK, "%s",
                 err.text);
}

static fsdp_status take_one(const fsdp_json *json)
{
    return most-- > 0 ? FSDP_OK : fsdp_json_fail(json, &err, "no more");
}

static fsdp_status take_token(void *context, const fsdp_json *json, const fsdp_file_token *token,
                              fsdp_error *error)
{
    (void)error;
    fsdp_text_addf(context, "%.*s=%lld %g\n", (int)token->size, token->text, (long long)token->id,
                   token->score);
    return take_one(json);
}

static fsdp_status take_merge(void *context, const fsdp_json *json, const fsdp_file_merge *merge,
                              fsdp_error *error)
{
    (void)error;
    fsdp_text_addf(context, "%.*s %zu\n", (int)merge->size, merge->text, merge->first_size);
    return take_one(json);
}

static fsdp_status take_added(void *context, const fsdp_json *json, const fsdp_added_token *added,
                              fsdp_error *error)
{
    (void)error;
    fsdp_text_addf(context, "%.*s=%lld %d%d%d%d%d\n", (int)added->size, added->text,
                   (long long)added->id, added->single_word, added->lstrip, added->rstrip,
                   added->normalized, added->special);
    return take_one(json);
}

Test(tokenizer_json, tokens_and_merges_come_in_the_order_of_the_file)
{
    open_text("{\"added_tokens\": [], \"model\": {\"merges\": [\"#version: 0.2\", \"a b\", "
              "[\"a b\", \"c\"], [\"\", \"x\"]], \"ignore_merges\": true, \"dropout\": 0, "
              "\"unk_token\": null, \"end_of_word_suffix\": \"\", \"continuing_subword_prefix\": "
              "\"##\", \"vocab\": {\"z\\u0041\": 7, \"a\": -1}}}");
    cr_assert_eq(fsdp_tokenizer_json_tokens(&file, take_token, &seen, &err), FSDP_OK);
    cr_assert_eq(fsdp_tokenizer_json_merges(&file, take_merge, &seen, &err), FSDP_OK);
    cr_assert_str_eq(seen.data, "zA=7 0\na=-1 0\nab 1\na bc 3\nx 0\n");
    const fsdp_tokenizer_model *model = &file.model;
    cr_assert(file.has_model && model->ignore_merges && model->has_prefix);
    cr_assert_not(model->has_dropout || model->has_unknown || model->has_suffix ||
                  model->byte_fallback || model->is_scored);
    cr_assert_str_eq(model->type, "");
}

Test(tokenizer_json, a_list_of_scores_numbers_its_tokens)
{
    open_text("{\"model\": {\"type\": \"Unigram\", \"vocab\": [[\"<unk>\", 0], [\"a\", -2.5]]}}");
    cr_assert(file.model.is_scored);
    cr_assert_str_eq(file.model.type, "Unigram");
    cr_assert_eq(fsdp_tokenizer_json_tokens(&file, take_token, &seen, &err), FSDP_OK);
    cr_assert_eq(fsdp_tokenizer_json_merges(&file, take_merge, &seen, &err), FSDP_OK,
                 "there are none");
    cr_assert_str_eq(seen.data, "<unk>=0 0\na=1 -2.5\n");
}

Test(tokenizer_json, added_tokens_have_their_options)
{
    open_text("{\"added_tokens\": [{\"id\": 3, \"content\": \"<s>\", \"special\": true, "
              "\"lstrip\": true}, {\"content\": \"\", \"rstrip\": true, \"normalized\": true, "
              "\"single_word\": true}]}");
    cr_assert_not(file.has_model);
    cr_assert_eq(fsdp_tokenizer_json_tokens(&file, take_token, &seen, &err), FSDP_OK);
    cr_assert_eq(fsdp_tokenizer_json_added(&file, take_added, &seen, &err), FSDP_OK);
    cr_assert_str_eq(seen.data, "<s>=3 01001\n=-1 10110\n");
}

Test(tokenizer_json, the_first_error_ends_a_list)
{
    open_text("{\"model\": {\"vocab\": {\"a\": 0, \"b\": 1, \"c\": 2}}}");
    most = 1;
    cr_assert_eq(fsdp_tokenizer_json_tokens(&file, take_token, &seen, &err), FSDP_ERR_DAMAGED);
    cr_assert_str_eq(seen.data, "a=0 0\nb=1 0\n");
    cr_assert_str_eq(err.text, "'t.json' line 1 column 36: no more");
}

static fsdp_status read_rules(const char *around, const char *ids, fsdp_text_rules *rules)
{
    fsdp_text text = {0};
    fsdp_text_addf(&text,
                   "{\"pre_tokenizer\": {\"type\": \"ByteLevel\"}, \"decoder\": {\"type\": "
                   "\"ByteLevel\"}, \"post_processor\": {\"type\": \"TemplateProcessing\", "
                   "\"single\": [%s], \"special_tokens\": {\"s\": {\"ids\": [%s]}}}}",
                   around, ids);
    open_text(text.data);
    fsdp_status status = fsdp_tokenizer_json_rules(&file, rules, &err);
    fsdp_text_release(&text);
    return status;
}

#define TEXT "{\"Sequence\": {\"id\": \"A\"}}"
#define TOKEN "{\"SpecialToken\": {\"id\": \"s\"}}"
#define TEN "1,2,3,4,5,6,7,8,9,10,"

Test(tokenizer_json, a_template_has_tokens_on_both_sides)
{
    fsdp_text_rules rules;
    cr_assert_eq(read_rules(TOKEN "," TEXT "," TOKEN "," TOKEN, "7, -8", &rules), FSDP_OK, "%s",
                 err.text);
    cr_assert_eq(rules.before.count, 2);
    cr_assert_eq(rules.after.count, 4);
    cr_assert_eq(rules.after.ids[3], -8);
    cr_assert(rules.step_count == 1 && rules.steps[0].adds_space && !rules.normalizes);
    cr_assert_eq(rules.steps[0].pattern, FSDP_WORDS_GPT2);
}

Test(tokenizer_json, a_template_has_at_most_64_ids_on_a_side)
{
    fsdp_text_rules rules;
    cr_assert_eq(read_rules(TEXT "," TOKEN, TEN TEN TEN TEN TEN TEN "1,2,3,4", &rules), FSDP_OK);
    cr_assert_eq(rules.after.count, 64);
    fsdp_tokenizer_json_release(&file);
    cr_assert_eq(read_rules(TEXT "," TOKEN, TEN TEN TEN TEN TEN TEN "1,2,3,4,5", &rules),
                 FSDP_ERR_USAGE);
    cr_assert(strstr(err.text, "more than 64 ids"), "%s", err.text);
}
