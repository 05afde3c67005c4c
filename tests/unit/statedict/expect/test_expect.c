/* The tensors that a config.json asks for: formulas, defaults, bounds, comparison with a state dict. */
#include "base/core/mem.h"
#include "statedict/models/config.h"
#include "statedict/expect/expect.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

/* The last one that was read, which configs borrow. */
static fsdp_config_file file;

static fsdp_status read_config(const char *text, fsdp_config *config, fsdp_error *err)
{
    fsdp_config_release(&file);
    FSDP_TRY(fsdp_config_parse(text, strlen(text), "c", &file, err));
    return fsdp_config_read(&file, config, err);
}

/* --- formulas ----------------------------------------------------------------------------------- */

static fsdp_status compute(const char *members, const char *formula, int64_t layer, int64_t *value)
{
    char text[512];
    fsdp_config config;
    fsdp_error err = {0};
    snprintf(text, sizeof text, "{\"model_type\": \"qwen2_moe\"%s}", members);
    fsdp_status st = read_config(text, &config, &err);
    cr_assert_eq(st, FSDP_OK, "%s", err.text);
    st = fsdp_formula_compute(&config, formula, layer, value, &err);
    fsdp_arena_release(&config.arena);
    return st;
}

static void expect_value(const char *members, const char *formula, int64_t layer, int64_t wanted)
{
    int64_t value = -99;
    cr_assert_eq(compute(members, formula, layer, &value), FSDP_OK, "%s", formula);
    cr_expect_eq(value, wanted, "%s is %lld", formula, (long long)value);
}

Test(expect, formulas)
{
    expect_value("", "2 + 3 * 4 == 14", 0, 1);
    expect_value("", "(2 + 3) * 4 / 3 % 4", 0, 2);
    expect_value("", "!0 && !(1 > 2) && 2 != 3", 0, 1);
    expect_value("", "0 || 0 && 1 || 5 > 4", 0, 1);
    expect_value(", \"hidden_size\": 12, \"num_attention_heads\": 3", "head_dim", 0, 4);
    expect_value(", \"hidden_size\": null", "hidden_size", 0, 2048);
    expect_value(", \"qkv_bias\": false", "qkv_bias", 0, 0);
    expect_value(", \"num_local_experts\": 7", "$experts", 0, 7);
    expect_value(", \"id2label\": {\"0\": \"a\", \"1\": \"b\", \"2\": \"c\"}", "$labels", 0, 3);
    expect_value(", \"mlp_only_layers\": [1, 4]", "layer in mlp_only_layers", 4, 1);
    expect_value(", \"mlp_only_layers\": [1, 4]", "layer in mlp_only_layers", 2, 0);
    expect_value(", \"mlp_only_layers\": [9, 1, \"4\", 4]", "layer in mlp_only_layers", 4, 1);
    expect_value(", \"hidden_size\": 12.0", "hidden_size", 0, 12);
    expect_value("", "layer in mlp_only_layers", 0, 0);
    expect_value(", \"architectures\": [\"Qwen2MoeForCausalLM\"]", "'ForCausalLM'", 0, 1);
    expect_value(", \"architectures\": [\"Qwen2MoeForCausalLM\"]", "'Model' || 'LM '", 0, 0);
}

Test(expect, the_right_side_counts_only_where_the_left_one_leaves_it_open)
{
    int64_t value;
    expect_value(", \"decoder_sparse_step\": 0", "0 && layer % decoder_sparse_step == 0", 3, 0);
    expect_value(", \"decoder_sparse_step\": 0", "0 && (1 / 0 > 1) || 1", 3, 1);
    cr_expect_eq(
        compute(", \"decoder_sparse_step\": 0", "1 && layer % decoder_sparse_step", 3, &value),
        FSDP_ERR_USAGE);
}

Test(expect, numbers_that_make_no_sense_are_errors)
{
    int64_t value;
    const char *huge = ", \"hidden_size\": 9223372036854775807";
    cr_expect_eq(compute(huge, "2 * hidden_size", 0, &value), FSDP_ERR_USAGE);
    cr_expect_eq(compute(huge, "hidden_size + 1", 0, &value), FSDP_ERR_USAGE);
    cr_expect_eq(compute(", \"num_attention_heads\": -2", "head_dim", 0, &value), FSDP_ERR_USAGE);
    cr_expect_eq(compute("", "no_such_member", 0, &value), FSDP_ERR_USAGE);
}

Test(expect, members_that_are_no_whole_numbers_are_errors)
{
    static const char *const values[] = {"\"8\"", "8.5", "1e400", "9223372036854775808"};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        char text[128];
        fsdp_config config;
        fsdp_error err = {0};
        snprintf(text, sizeof text, "{\"model_type\": \"llama\", \"hidden_size\": %s}", values[i]);
        cr_expect_eq(read_config(text, &config, &err), FSDP_ERR_DAMAGED, "%s", values[i]);
        cr_expect(strstr(err.text, "'hidden_size' is not a 64-bit integer"), "%s", err.text);
        fsdp_arena_release(&config.arena);
    }
}

/* --- lists -------------------------------------------------------------------------------------- */

static fsdp_status ignore(void *context, fsdp_expect_fault fault, const fsdp_expected *expected,
                          const fsdp_entry *entry, fsdp_error *err)
{
    (void)context, (void)fault, (void)expected, (void)entry, (void)err;
    return FSDP_OK;
}

static fsdp_status count(const char *config, const fsdp_sd *sd, fsdp_expect_counts *counts,
                         fsdp_error *err)
{
    fsdp_expect *expect = NULL;
    fsdp_config_release(&file);
    FSDP_TRY(fsdp_config_parse(config, strlen(config), "c", &file, err));
    FSDP_TRY(fsdp_expect_config(&file, &expect, err));
    fsdp_status st = fsdp_expect_compare(expect, sd, ignore, NULL, counts, err);
    fsdp_expect_free(expect);
    return st;
}

/* The models of which the defaults are, and the numbers of tensors in their files. */
Test(expect, defaults_are_those_of_known_models)
{
    static const struct {
        const char *type, *class_name;
        int64_t tensors;
    } models[] = {{"gpt2", "GPT2LMHeadModel", 148},
                  {"llama", "LlamaForCausalLM", 291},
                  {"mistral", "MistralForCausalLM", 291},
                  {"mixtral", "MixtralForCausalLM", 995},
                  {"gemma", "GemmaForCausalLM", 254},
                  {"gemma2", "Gemma2ForCausalLM", 288},
                  {"phi3", "Phi3ForCausalLM", 195},
                  {"opt", "OPTForCausalLM", 196},
                  {"bert", "BertForSequenceClassification", 201},
                  {"gpt_neox", "GPTNeoXForCausalLM", 532}};
    fsdp_sd *sd = NULL;
    cr_assert_eq(fsdp_sd_create(&sd, NULL), FSDP_OK);
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        char config[256];
        fsdp_expect_counts counts;
        fsdp_error err = {0};
        snprintf(config, sizeof config, "{\"model_type\": \"%s\", \"architectures\": [\"%s\"]}",
                 models[i].type, models[i].class_name);
        cr_assert_eq(count(config, sd, &counts, &err), FSDP_OK, "%s", err.text);
        cr_expect_eq(counts.expected, models[i].tensors, "%s: %lld", models[i].type,
                     (long long)counts.expected);
        cr_expect_eq(counts.missing, counts.expected);
    }
    fsdp_sd_free(sd);
}

static void add(fsdp_sd *sd, const fsdp_mesh *mesh, const char *name, int64_t size)
{
    const fsdp_layout layout = {.kind = FSDP_LAYOUT_MESH, .mesh = mesh};
    cr_assert_eq(fsdp_sd_add_tensor(sd, name, strlen(name),
                                    &(fsdp_tensor){FSDP_F32, 1, &size, layout, NULL}, NULL),
                 FSDP_OK);
}

static fsdp_sd *two_norms(const char *prefix)
{
    fsdp_sd *sd = NULL;
    fsdp_mesh *mesh = NULL;
    char name[64];
    cr_assert_eq(fsdp_sd_create(&sd, NULL), FSDP_OK);
    cr_assert_eq(fsdp_mesh_create(1, (int64_t[]){1}, (const char *[]){"rank"}, NULL, &mesh, NULL),
                 FSDP_OK);
    snprintf(name, sizeof name, "%snorm.weight", prefix);
    add(sd, mesh, name, 8);
    snprintf(name, sizeof name, "%slayers.0.input_layernorm.weight", prefix);
    add(sd, mesh, name, 4);
    add(sd, mesh, "v_head.weight", 8);
    fsdp_mesh_free(mesh);
    return sd;
}

static const char small[] =
    "{\"model_type\": \"llama\", \"architectures\": [\"LlamaForCausalLM\"], "
    "\"hidden_size\": 8, \"num_hidden_layers\": 1}";

Test(expect, the_spelling_that_is_there_counts)
{
    static const char *const prefixes[] = {"model.", "", "transformer."};
    for (int i = 0; i < 3; i++) {
        fsdp_sd *sd = two_norms(prefixes[i]);
        fsdp_expect_counts counts;
        cr_assert_eq(count(small, sd, &counts, NULL), FSDP_OK);
        cr_expect_eq(counts.expected, 12);
        cr_expect_eq(counts.found, 2, "'%s'", prefixes[i]);
        cr_expect(counts.missing == 10 && counts.shapes == 1 && counts.extra == 1);
        fsdp_sd_free(sd);
    }
}

Test(expect, lists_are_bounded)
{
    fsdp_sd *sd = two_norms("");
    static const char *const configs[] = {
        "{\"model_type\": \"llama\", \"num_hidden_layers\": 1000000000000}",
        "{\"model_type\": \"mixtral\", \"num_local_experts\": 9223372036854775807}",
        "{\"model_type\": \"mixtral\", \"num_local_experts\": 4000000}",
        "{\"model_type\": \"llama\", \"num_hidden_layers\": -1}"};
    for (size_t i = 0; i < sizeof configs / sizeof *configs; i++) {
        fsdp_expect_counts counts;
        fsdp_error err = {0};
        cr_expect_eq(count(configs[i], sd, &counts, &err), FSDP_ERR_USAGE, "%s", configs[i]);
        cr_expect(strstr(err.text, "'c'"), "%s", err.text);
    }
    fsdp_sd_free(sd);
}

/* A class that the table does not have may have any head; a class that has none may not. */
Test(expect, heads_of_unknown_classes_may_be_there)
{
    static const char *const configs[] = {
        "{\"model_type\": \"llama\", \"num_hidden_layers\": 1}",
        "{\"model_type\": \"llama\", \"num_hidden_layers\": 1, \"architectures\": [\"Mine\"]}",
        ("{\"model_type\": \"llama\", \"num_hidden_layers\": 1, \"architectures\": "
         "[\"LlamaModel\"]}")};
    fsdp_sd *sd = NULL;
    fsdp_mesh *mesh = NULL;
    cr_assert_eq(fsdp_sd_create(&sd, NULL), FSDP_OK);
    cr_assert_eq(fsdp_mesh_create(1, (int64_t[]){1}, (const char *[]){"rank"}, NULL, &mesh, NULL),
                 FSDP_OK);
    add(sd, mesh, "lm_head.weight", 8);
    fsdp_mesh_free(mesh);
    for (int i = 0; i < 3; i++) {
        fsdp_expect_counts counts;
        cr_assert_eq(count(configs[i], sd, &counts, NULL), FSDP_OK);
        cr_expect_eq(counts.expected, 11);
        cr_expect_eq(counts.extra, i == 2);
    }
    fsdp_sd_free(sd);
}

/* A layer has 11 tensors, and with 2 experts 15. */
Test(expect, layers_of_experts_are_counted_from_1)
{
    fsdp_sd *sd = two_norms("");
    fsdp_expect_counts counts;
    static const char config[] = "{\"model_type\": \"qwen3_moe\", \"architectures\": "
                                 "[\"Qwen3MoeModel\"], \"num_experts\": 2, "
                                 "\"num_hidden_layers\": 3, \"decoder_sparse_step\": 2}";
    cr_assert_eq(count(config, sd, &counts, NULL), FSDP_OK);
    cr_expect_eq(counts.expected, 2 + 2 * 11 + 15, "%lld", (long long)counts.expected);
    fsdp_sd_free(sd);
}

/* DeepSeek-V3's files have a layer after the last one, of other tensors, which transformers leaves out. */
Test(expect, layers_that_predict_further_tokens_may_be_there)
{
    static const char *const names[] = {"model.layers.2.eh_proj.weight",
                                        "model.layers.3.enorm.weight",
                                        "model.layers.4.enorm.weight"};
    static const char config[] = "{\"model_type\": \"deepseek_v3\", \"num_hidden_layers\": 2, "
                                 "\"n_routed_experts\": 1, \"num_nextn_predict_layers\": 2}";
    for (int i = 0; i < 3; i++) {
        fsdp_sd *sd = two_norms("model.");
        fsdp_mesh *mesh = NULL;
        fsdp_expect_counts counts;
        cr_assert_eq(
            fsdp_mesh_create(1, (int64_t[]){1}, (const char *[]){"rank"}, NULL, &mesh, NULL),
            FSDP_OK);
        add(sd, mesh, names[i], 8);
        fsdp_mesh_free(mesh);
        cr_assert_eq(count(config, sd, &counts, NULL), FSDP_OK);
        cr_expect_eq(counts.extra, 1 + (i == 2), "%s", names[i]);
        fsdp_sd_free(sd);
    }
}

Test(expect, every_failing_allocation_is_an_error)
{
    fsdp_sd *sd = two_norms("model.");
    fsdp_expect_counts counts;
    static const char lists[] = "{\"model_type\": \"qwen3_moe\", \"mlp_only_layers\": [1], "
                                "\"num_hidden_layers\": 2, \"a\\u0062\": \"c\\u0064\"}";
    fsdp_mem_fail_after(-1, false);
    cr_assert_eq(count(lists, sd, &counts, NULL), FSDP_OK);
    int64_t n = fsdp_mem_fail_after(-1, false);
    cr_assert_gt(n, 3);
    for (int64_t i = 0; i < n; i++) {
        fsdp_error err = {0};
        fsdp_mem_fail_after(i, false);
        fsdp_status status = count(lists, sd, &counts, &err);
        fsdp_mem_fail_after(-1, false);
        cr_assert_neq(status, FSDP_OK, "allocation %lld", (long long)i);
        cr_assert(err.text[0]);
    }
    fsdp_sd_free(sd);
}
