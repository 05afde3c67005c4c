/* config.json: its members, and edits that keep all other bytes. */
#include "base/data/json.h"
#include "base/core/mem.h"
#include "statedict/convert/copied.h"
#include "statedict/derive/tied_names.h"

#include <criterion/criterion.h>
#include <string.h>

static void expect_edits(const char *text, fsdp_config_edits edits, const char *expected)
{
    fsdp_edited_config out = {0};
    fsdp_error err = {0};
    cr_assert_eq(fsdp_model_config_edit(text, strlen(text), "c", &edits, &out, &err), FSDP_OK, "%s",
                 err.text);
    if (expected)
        cr_expect_str_eq(out.text.data ? out.text.data : "", expected);
    else
        cr_expect_eq(out.text.size, 0, "%s became %s", text, out.text.data);
    fsdp_text_release(&out.text);
}

static void expect_edit(const char *text, const char *dtype, bool no_code, const char *expected)
{
    expect_edits(text, (fsdp_config_edits){.dtype = dtype, .no_code = no_code}, expected);
}

static fsdp_status read(const char *text)
{
    fsdp_config_file file;
    fsdp_status st = fsdp_config_parse(text, strlen(text), "c", &file, NULL);
    fsdp_config_release(&file);
    return st;
}

static bool is_json(const fsdp_text *text)
{
    fsdp_json json;
    fsdp_json_init(&json, text->data, text->size, "c");
    bool is = fsdp_json_skip(&json, NULL) == FSDP_OK && fsdp_json_finish(&json, NULL) == FSDP_OK;
    fsdp_json_release(&json);
    return is;
}

Test(model_config, the_dtype_is_replaced_and_nothing_else)
{
    expect_edit("{ \"torch_dtype\" :\t\"float32\" , \"x\":1.50}", "bfloat16", false,
                "{ \"torch_dtype\" :\t\"bfloat16\" , \"x\":1.50}");
    expect_edit("{\"dtype\":\"a\",\"torch_dtype\":\"b\"}", "float16", false,
                "{\"dtype\":\"float16\",\"torch_dtype\":\"float16\"}");
    expect_edit("{\"d\\u0074ype\":\"flo\\u0061t32\"}", "float16", false,
                "{\"d\\u0074ype\":\"float16\"}");
    expect_edit("{\"d\\u0074ype\":\"flo\\u0061t32\"}", "float32", false, NULL);
}

Test(model_config, what_is_no_dtype_of_the_model_stays)
{
    expect_edit("{}", "float16", true, NULL);
    expect_edit("{\"dtype\":null}", "float16", true, NULL);
    expect_edit("{\"a\":{\"dtype\":\"x\"},\"b\":[{\"dtype\":\"x\"}]}", "float16", true, NULL);
    expect_edit("{\"quantization_config\":{\"dtype\":\"x\"}}", "float16", true, NULL);
    expect_edit("{\"text_config\":{\"dtype\":\"x\",\"y_config\":{\"dtype\":\"x\"}}}", "float16",
                true, "{\"text_config\":{\"dtype\":\"float16\",\"y_config\":{\"dtype\":\"x\"}}}");
}

Test(model_config, numbers_that_only_python_writes_are_passed_over)
{
    expect_edit("{\"a\":[NaN, -Infinity,Infinity],\"dtype\":\"x\"}", "float16", false,
                "{\"a\":[NaN, -Infinity,Infinity],\"dtype\":\"float16\"}");
}

Test(model_config, code_is_removed_wherever_it_stands)
{
    expect_edit("{\"auto_map\":{}}", NULL, true, "{}");
    expect_edit("{\"auto_map\":{},\"a\":1}", NULL, true, "{\"a\":1}");
    expect_edit("{\"a\":1, \"auto_map\":{}\n}", NULL, true, "{\"a\":1\n}");
    expect_edit("{\"a\":1, \"auto_map\":\"x\" , \"b\":2}", NULL, true, "{\"a\":1, \"b\":2}");
    expect_edit("{\"auto_map\":1,\"auto_map\":{\"auto_map\":2}}", NULL, true, "{}");
    expect_edit("{\"a\":1,\"auto_map\":1,\"auto_map\":[3],\"b\":[{\"auto_map\":2}]}", NULL, true,
                "{\"a\":1,\"b\":[{}]}");
    expect_edit("{\"a\":1,\"auto_map\":1,\"auto_map\":[3]}", NULL, true, "{\"a\":1}");
    expect_edit("{\"auto\\u005fmap\":1, \"b\":2}", NULL, true, "{\"b\":2}");
    expect_edit("{\"a\":\"auto_map\"}", NULL, true, NULL);
    expect_edit("{\"auto_map\":{}}", NULL, false, NULL);
}

/* Every edit leaves valid JSON. */
Test(model_config, embeddings_are_said_not_to_be_tied)
{
    const fsdp_config_edits untied = {.untied = true};
    expect_edits("{\"tie_word_embeddings\": true, \"x\": 1}", untied,
                 "{\"tie_word_embeddings\": false, \"x\": 1}");
    expect_edits("{\"text_config\": {\"tie_word_embeddings\": true}}", untied,
                 "{\"text_config\": {\"tie_word_embeddings\": false}}");
    expect_edits("{\"tie_word_embeddings\": false}", untied, NULL);
    expect_edits("{\n  \"x\": 1\n}\n", untied,
                 "{\n  \"tie_word_embeddings\": false,\n  \"x\": 1\n}\n");
    expect_edits("{\"auto_map\": {}, \"x\": 1, \"dtype\": \"float32\"}",
                 (fsdp_config_edits){.untied = true, .no_code = true, .dtype = "float16"},
                 "{\"tie_word_embeddings\": false,\n  \"x\": 1, \"dtype\": \"float16\"}");
    expect_edits("{}", untied, NULL);
}

Test(model_config, what_is_left_can_be_read)
{
    static const char *const members[] = {"\"a\":1", "\"auto_map\":{\"b\":[1,2]}",
                                          "\"c\": {\"auto_map\":0}", "\"auto_map\": 1 "};
    for (int code = 0; code < 256; code++) {
        fsdp_text text = {0};
        fsdp_edited_config out = {0};
        const fsdp_config_edits edits = {.no_code = true};
        for (int i = 0; i < 4; i++)
            fsdp_text_addf(&text, "%s%s", i > 0 ? " ,\n" : "{", members[code >> 2 * i & 3]);
        fsdp_text_addf(&text, "}");
        cr_assert_eq(fsdp_model_config_edit(text.data, text.size, "c", &edits, &out, NULL),
                     FSDP_OK);
        if (out.text.size > 0) {
            cr_expect(is_json(&out.text), "%s became %s", text.data, out.text.data);
            cr_expect_null(strstr(out.text.data, "auto_map"), "%s became %s", text.data,
                           out.text.data);
        }
        fsdp_text_release(&text);
        fsdp_text_release(&out.text);
    }
}

Test(model_config, two_answers_are_none)
{
    cr_expect_eq(read("{\"tie_word_embeddings\":true,\"tie_word_embeddings\":true}"),
                 FSDP_ERR_DAMAGED);
    cr_expect_eq(read("{\"dtype\":\"a\",\"dtype\":\"a\"}"), FSDP_ERR_DAMAGED);
    cr_expect_eq(read("{\"a\":{\"tie_word_embeddings\":true,\"tie_word_embeddings\":true}}"),
                 FSDP_OK);
}

Test(model_config, what_is_no_object_is_damaged)
{
    static const char *const texts[] = {"", "[]", "1", "{", "{}x", "{\"a\":}", "{\"a\":Inf}"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        cr_expect_eq(read(texts[i]), FSDP_ERR_DAMAGED, "%s", texts[i]);
    fsdp_text deep = {0};
    fsdp_text_addf(&deep, "{\"a\":");
    for (int i = 0; i < 100; i++)
        fsdp_text_addf(&deep, "[");
    cr_expect_eq(read(deep.data), FSDP_ERR_DAMAGED);
    fsdp_text_release(&deep);
}

Test(model_config, a_large_text_is_edited_in_place)
{
    fsdp_text text = {0};
    fsdp_edited_config out = {0};
    const fsdp_config_edits edits = {.dtype = "float16", .no_code = true};
    fsdp_text_addf(&text, "{");
    for (int i = 0; i < 100000; i++)
        fsdp_text_addf(&text, "\"label%d\": \"x\", ", i);
    size_t before = text.size;
    fsdp_text_addf(&text, "\"dtype\": \"a-dtype-of-a-name-that-is-longer-than-its-room\"}");
    cr_assert_eq(fsdp_model_config_edit(text.data, text.size, "c", &edits, &out, NULL), FSDP_OK);
    cr_expect_eq(memcmp(text.data, out.text.data, before), 0);
    cr_expect_str_eq(out.text.data + before, "\"dtype\": \"float16\"}");
    cr_expect(strlen(out.was) > 0 && strlen(out.was) < sizeof out.was);
    fsdp_text_release(&text);
    fsdp_text_release(&out.text);
}

/* --- names of copied files -------------------------------------------------------------------- */

Test(model_config, files_are_chosen_by_name)
{
    static const char *const yes[] = {
        "config.json",         "tokenizer.json", "tokenizer.model", "vocab.txt", "merges.txt",
        "chat_template.jinja", "qwen.tiktoken",  "LICENSE.txt",     "NOTICE",    "README.md"};
    static const char *const no[] = {"model.safetensors",
                                     "tokenizer.bin",
                                     "vocab.safetensors",
                                     "x.py",
                                     "tokenizer.py",
                                     ".config.json",
                                     "model.safetensors.index.json",
                                     "xconfig.json",
                                     "config.json.bak",
                                     "vocab",
                                     ".tiktoken"};
    for (size_t i = 0; i < sizeof yes / sizeof *yes; i++)
        cr_expect(fsdp_copied_name(yes[i], false), "%s", yes[i]);
    for (size_t i = 0; i < sizeof no / sizeof *no; i++)
        cr_expect_not(fsdp_copied_name(no[i], false), "%s", no[i]);
    cr_expect(fsdp_copied_name("x.py", true));
    cr_expect_not(fsdp_copied_name(".x.py", true));
}

static bool is_head(const char *name)
{
    return fsdp_name_is_head(name, strlen(name));
}

static bool is_embedding(const char *name)
{
    return fsdp_name_is_embedding(name, strlen(name));
}

Test(model_config, heads_and_embeddings_are_known_by_the_ends_of_names)
{
    cr_expect(is_head("lm_head.weight") && is_head("model.output.weight"));
    cr_expect_not(is_head("layers.0.attention.output.weight") || is_head("xlm_head.weight") ||
                  is_head("lm_head.bias") || is_head(""));
    cr_expect(is_embedding("wte.weight") && is_embedding("model.embed_tokens.weight"));
    cr_expect_not(is_embedding("awte.weight") || is_embedding("wte") || is_embedding(""));
}
