/* The numbers of Mamba 2, whose layers have no attention, as key-value pairs of GGUF, and back. */
#include "tests/unit/statedict/gguf_model/model_pairs.h"

TestSuite(gguf_mamba, .init = begin, .fini = end);

static const char small[] = "\"num_heads\": 8, \"head_dim\": 24, \"expand\": 3, \"n_groups\": 2, "
                            "\"state_size\": 16, \"conv_kernel\": 3, \"vocab_size\": 7, "
                            "\"layer_norm_epsilon\": 3e-4";

/* Reads the pairs of the small model with one more member. */
static fsdp_status small_with(const char *member)
{
    char members[400];
    snprintf(members, sizeof members, "%s%s%s", small, *member ? ", " : "", member);
    return read_with("mamba2", members);
}

Test(gguf_mamba, layers_of_a_state_have_keys_of_their_own)
{
    static const struct {
        const char *key;
        int64_t number;
    } numbers[] = {{"context_length", 1048576}, {"embedding_length", 64},
                   {"feed_forward_length", 0},  {"attention.head_count", 0},
                   {"block_count", 2},          {"ssm.conv_kernel", 3},
                   {"ssm.inner_size", 192},     {"ssm.state_size", 16},
                   {"ssm.time_step_rank", 8},   {"ssm.group_count", 2}};
    char key[64];
    cr_assert_eq(small_with(""), FSDP_OK, "%s", err.text);
    cr_expect_str_eq(text_of(find("general.architecture")), "mamba2");
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        snprintf(key, sizeof key, "mamba2.%s", numbers[i].key);
        cr_expect_eq(number(key), numbers[i].number, "%s %lld", key, (long long)number(key));
    }
    cr_expect_eq(find("mamba2.attention.layer_norm_rms_epsilon")->as.f64, (double)3e-4F);
    cr_expect_null(find("mamba2.rope.dimension_count"));
    cr_assert_eq(read_with("mamba2", "\"head_dim\": 1"), FSDP_OK, "transformers': %s", err.text);
    cr_expect_eq(number("mamba2.ssm.time_step_rank"), 128);
    cr_expect_eq(number("mamba2.ssm.group_count"), 8);
    cr_expect_eq(number("mamba2.ssm.conv_kernel"), 4);
}

Test(gguf_mamba, groups_of_the_norm_contradict_those_of_the_config)
{
    fsdp_mesh *mesh = NULL;
    cr_assert_eq(fsdp_mesh_create(1, (int64_t[]){1}, (const char *[]){"rank"}, NULL, &mesh, &err),
                 FSDP_OK);
    const char name[] = "blk.0.ssm_norm.weight";
    const fsdp_tensor norm = {FSDP_F32, 2, (int64_t[]){4, 48}, {.mesh = mesh}, NULL};
    cr_assert_eq(fsdp_sd_create(&tensors, &err), FSDP_OK);
    cr_assert_eq(fsdp_sd_add_tensor(tensors, name, strlen(name), &norm, &err), FSDP_OK);
    cr_expect_eq(small_with(""), FSDP_ERR_DAMAGED);
    cr_expect(strstr(err.text, "n_groups 2, but 'blk.0.ssm_norm.weight' has 4"), "%s", err.text);
}

Test(gguf_mamba, what_llama_cpp_computes_otherwise_is_refused)
{
    static const char *const refused[][2] = {
        {"\"use_bias\": true", "use_bias 1, but llama.cpp computes every 'mamba2' with 0"},
        {"\"use_conv_bias\": false", "use_conv_bias 0"},
        {"\"use_conv_bias\": null", "use_conv_bias 0"},
        {"\"hidden_act\": \"gelu\"", "hidden_act 'gelu'"},
        {"\"time_step_limit\": [0, 0.1]", "another time_step_limit than [0 inf]"},
        {"\"time_step_limit\": [1e-3, Infinity]", "another time_step_limit"},
        {"\"time_step_limit\": [0]", "another time_step_limit"},
        {"\"time_step_limit\": [0, Infinity, 1]", "another time_step_limit"},
        {"\"time_step_limit\": [0, \"Infinity\"]", "another time_step_limit"},
        {"\"time_step_limit\": 3", "another time_step_limit"},
        {"\"time_step_limit\": [0, {\"__float__\": \"-Infinity\"}]", "another time_step_limit"},
        {"\"time_step_limit\": [0, {\"float\": \"Infinity\"}]", "another time_step_limit"}};
    static const char *const widths[][2] = {
        {"\"num_heads\": 8, \"head_dim\": 15",
         "num_heads * head_dim 120, but llama.cpp computes every 'mamba2' with 128"},
        {"\"num_heads\": 9, \"head_dim\": 14", "num_heads * head_dim 126"},
        {"\"num_heads\": 8, \"head_dim\": 16, \"n_groups\": 0", "n_groups null or 0"}};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        cr_expect_eq(small_with(refused[i][0]), FSDP_ERR_USAGE, "%s", refused[i][0]);
        cr_expect(strstr(err.text, refused[i][1]), "%s: %s", refused[i][0], err.text);
    }
    EXPECT_REFUSED("mamba2", widths);
}

/* transformers 4 and 5 write infinity as JSON does not have it. */
Test(gguf_mamba, the_usual_limit_of_steps_is_written_in_two_ways)
{
    static const char *const fine[] = {
        "\"time_step_limit\": [0.0, Infinity]",
        "\"time_step_limit\": [0, {\"__float__\": \"Infinity\"}]",
        "\"use_bias\": false, \"use_conv_bias\": true, \"hidden_act\": \"silu\""};
    for (size_t i = 0; i < sizeof fine / sizeof *fine; i++)
        cr_expect_eq(small_with(fine[i]), FSDP_OK, "%s: %s", fine[i], err.text);
}

/* The config.json of a file of the small model with another whole number in one pair; NULL: refused. */
static char *made_with(const char *key, int64_t other)
{
    fsdp_sd *sd = NULL;
    fsdp_text text = {0};
    const fsdp_value value = fsdp_value_i64(other);
    cr_assert_eq(small_with(""), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_sd_create(&sd, &err), FSDP_OK);
    for (size_t i = 0; i < values.count; i++)
        add_value(sd, values.items[i].name,
                  strcmp(values.items[i].name, key) == 0 ? &value : &values.items[i].value);
    fsdp_status st = fsdp_gguf_config_text(sd, &text, &err);
    char *made = st == FSDP_OK ? fsdp_strndup(text.data, text.size) : NULL;
    fsdp_text_release(&text);
    fsdp_sd_free(sd);
    return made;
}

Test(gguf_mamba, a_config_comes_back_out_of_its_pairs)
{
    static const char *const members[] = {
        "\"model_type\": \"mamba2\"", "\"num_heads\": 8", "\"head_dim\": 24",   "\"expand\": 3",
        "\"state_size\": 16",         "\"n_groups\": 2",  "\"hidden_size\": 64"};
    char *made = made_with("", 0);
    cr_assert_not_null(made, "%s", err.text);
    for (size_t i = 0; i < sizeof members / sizeof *members; i++)
        cr_expect_not_null(strstr(made, members[i]), "%s in %s", members[i], made);
    cr_expect_not_null(strstr(made, "\"layer_norm_epsilon\": 0.0003"), "%s", made);
    cr_expect_null(strstr(made, "max_position_embeddings"), "transformers has no limit");
    cr_expect_null(strstr(made, "num_attention_heads"));
    fsdp_free(made);
}

Test(gguf_mamba, numbers_of_a_file_that_contradict_one_another_are_refused)
{
    static const struct {
        const char *key;
        int64_t number;
        const char *said;
    } odd[] = {{"mamba2.ssm.inner_size", 193, "'mamba2.ssm.inner_size' 193 where 192 is expected"},
               {"mamba2.ssm.time_step_rank", 7, "num_heads * head_dim is 189 where 192"},
               {"mamba2.ssm.time_step_rank", 0, "'mamba2.ssm.time_step_rank' is missing"},
               {"mamba2.ssm.group_count", 0, "'mamba2.ssm.group_count' is missing"},
               {"mamba2.feed_forward_length", 8, "feed_forward_length' 8 where 0 is expected"},
               {"mamba2.embedding_length", INT64_MAX, "inner_size' 192 where 0 is expected"},
               {"mamba2.block_count", -1, "'mamba2.block_count' is -1"}};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        cr_expect_null(made_with(odd[i].key, odd[i].number), "%s", odd[i].key);
        cr_expect(strstr(err.text, odd[i].said), "%s", err.text);
    }
}
