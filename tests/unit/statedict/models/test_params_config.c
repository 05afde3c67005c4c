/* Meta's params.json as config.json: every release of Llama, and what has no config.json. */
#include "statedict/models/params_config.h"

#include "base/core/mem.h"

#include <criterion/criterion.h>
#include <string.h>

enum { WORDS = 40, WORDS_OF_3 = 128256, DIM = 16, INNER = 24 };

static fsdp_sd *sd;
static fsdp_text config;
static fsdp_error err;

static fsdp_mesh *mesh;

static void add(const char *name, int64_t rows)
{
    const fsdp_tensor tensor = {.dtype = FSDP_BF16,
                                .ndim = 2,
                                .shape = (int64_t[]){rows, DIM},
                                .layout = {.kind = FSDP_LAYOUT_MESH, .mesh = mesh}};
    cr_assert_eq(fsdp_sd_add_tensor(sd, name, strlen(name), &tensor, &err), FSDP_OK);
}

static void begin(void)
{
    cr_assert_eq(fsdp_mesh_create(1, (int64_t[]){1}, (const char *[]){"rank"}, NULL, &mesh, &err),
                 FSDP_OK);
    cr_assert_eq(fsdp_sd_create(&sd, &err), FSDP_OK);
}

static void end(void)
{
    fsdp_text_release(&config);
    fsdp_sd_free(sd);
    fsdp_mesh_free(mesh);
}

TestSuite(params_config, .init = begin, .fini = end);

static void describe(int64_t words, bool is_tied)
{
    add("tok_embeddings.weight", words);
    add("layers.0.feed_forward.w1.weight", INNER);
    if (!is_tied)
        add("output.weight", words);
}

static fsdp_status make(const char *params)
{
    fsdp_text_release(&config);
    fsdp_config_file file;
    fsdp_status st = fsdp_config_parse(params, strlen(params), "params.json", &file, &err);
    if (st == FSDP_OK)
        st = fsdp_params_config_text(&file, sd, &config, &err);
    fsdp_config_release(&file);
    return st;
}

static bool has(const char *member)
{
    return strstr(config.data, member) != NULL;
}

Test(params_config, llama_2_has_the_numbers_that_meta_leaves_out)
{
    describe(WORDS, false);
    cr_assert(fsdp_is_meta_llama(sd));
    cr_assert_eq(make("{\"dim\": 16, \"multiple_of\": 256, \"n_heads\": 4, \"n_layers\": 2, "
                      "\"norm_eps\": 1e-06, \"vocab_size\": -1}"),
                 FSDP_OK, "%s", err.text);
    cr_assert_str_eq(config.data, "{\n  \"architectures\": [\"LlamaForCausalLM\"],\n"
                                  "  \"model_type\": \"llama\",\n"
                                  "  \"num_hidden_layers\": 2,\n"
                                  "  \"hidden_size\": 16,\n"
                                  "  \"intermediate_size\": 24,\n"
                                  "  \"num_attention_heads\": 4,\n"
                                  "  \"num_key_value_heads\": 4,\n"
                                  "  \"rms_norm_eps\": 1e-06,\n"
                                  "  \"vocab_size\": 40,\n"
                                  "  \"max_position_embeddings\": 4096,\n"
                                  "  \"rope_theta\": 10000.0,\n"
                                  "  \"bos_token_id\": 1,\n"
                                  "  \"eos_token_id\": 2,\n"
                                  "  \"tie_word_embeddings\": false\n}\n");
}

Test(params_config, llama_3_is_told_by_its_vocabulary)
{
    describe(WORDS_OF_3, true);
    cr_assert_eq(make("{\"dim\": 16, \"n_layers\": 2, \"n_heads\": 4, \"n_kv_heads\": 2, "
                      "\"head_dim\": 8, \"use_scaled_rope\": false}"),
                 FSDP_OK, "%s", err.text);
    cr_assert(has("\"num_key_value_heads\": 2,"));
    cr_assert(has("\"head_dim\": 8,"));
    cr_assert(has("\"rope_theta\": 500000.0,"));
    cr_assert(has("\"max_position_embeddings\": 8192,"));
    cr_assert(has("\"bos_token_id\": 128000,"));
    cr_assert(has("\"tie_word_embeddings\": true"));
}

Test(params_config, numbers_that_are_there_are_taken)
{
    describe(WORDS, false);
    cr_assert_eq(make("{\"dim\": 16, \"n_layers\": 2, \"n_heads\": 4, \"n_kv_heads\": null, "
                      "\"max_seq_len\": 2048, \"rope_theta\": 1000000, \"norm_eps\": 1e-5}"),
                 FSDP_OK, "%s", err.text);
    cr_assert(has("\"num_key_value_heads\": 4,"));
    cr_assert(has("\"max_position_embeddings\": 2048,"));
    cr_assert(has("\"rope_theta\": 1000000.0,"));
}

Test(params_config, what_needs_other_numbers_is_refused)
{
    static const struct {
        const char *params, *says;
    } cases[] = {
        {"{\"n_layers\": 2, \"n_heads\": 4}", "no size 'dim'"},
        {"{\"dim\": 16, \"n_layers\": 0, \"n_heads\": 4}", "no size 'n_layers'"},
        {"{\"dim\": 16, \"n_layers\": 2, \"n_heads\": 4.5}", "no size 'n_heads'"},
        {"{\"dim\": 16, \"n_layers\": 2, \"n_heads\": 4, \"n_kv_heads\": 1e300}", "'n_kv_heads'"},
        {"{\"dim\": 16, \"n_layers\": \"two\", \"n_heads\": 4}", "no size 'n_layers'"},
        {"{\"dim\": true, \"n_layers\": 2, \"n_heads\": 4}", "no size 'dim'"},
        {"{\"dim\": 16, \"n_layers\": 2, \"n_heads\": 4, \"norm_eps\": \"1e-5\"}", "'norm_eps'"},
        {"{\"dim\": 16, \"n_layers\": 2, \"n_heads\": 4, \"norm_eps\": true}", "'norm_eps'"},
        {"{\"dim\": 16, \"n_layers\": 2, \"n_heads\": 4, \"rope_theta\": -1}",
         "no positive number 'rope_theta'"},
        {"{\"dim\": 16, \"n_layers\": 2, \"n_heads\": 4, \"use_scaled_rope\": true}", "scaled"},
        {"{\"dim\": 16, \"n_layers\": 2, \"n_heads\": 4, \"use_scaled_rope\": \"no\"}", "scaled"},
        {"{\"dim\": 16, ", "params.json"},
        {"{\"dim\": 16, \"dim\": 16}", "dim"},
        {"[]", "params.json"},
    };
    describe(WORDS, false);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cr_expect_neq(make(cases[i].params), FSDP_OK, "%s", cases[i].params);
        cr_expect(strstr(err.text, cases[i].says), "%s: %s", cases[i].params, err.text);
    }
}

Test(params_config, other_names_are_none_of_meta)
{
    cr_expect_not(fsdp_is_meta_llama(sd));
    add("tok_embeddings.weight", WORDS);
    cr_expect_not(fsdp_is_meta_llama(sd));
}

Test(params_config, memory_that_is_not_there_is_an_error)
{
    fsdp_status st = FSDP_ERR_LIMIT;
    describe(WORDS, false);
    for (int64_t n = 0; st != FSDP_OK && n < 100; n++) {
        fsdp_mem_fail_after(n, false);
        st = make("{\"dim\": 16, \"n_layers\": 2, \"n_heads\": 4}");
        fsdp_mem_fail_after(-1, false);
        cr_assert(st == FSDP_OK || st == FSDP_ERR_LIMIT, "%d: %s", (int)st, err.text);
    }
    cr_assert_eq(st, FSDP_OK);
}
