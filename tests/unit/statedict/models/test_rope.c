/* Rotary positions of config.json; divisors of frequencies are compared with those of transformers 5.23. */
#include "statedict/models/rope.h"

#include "statedict/models/config.h"

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

static float divisors[FSDP_ROPE_MOST];
static int count;
static fsdp_rope rope;
static fsdp_error err;

/* Has the texts that rope borrows. */
static fsdp_config_file file;

static fsdp_status read_rope(const char *config)
{
    fsdp_config_release(&file);
    FSDP_TRY(fsdp_config_parse(config, strlen(config), "c", &file, &err));
    return fsdp_rope_read(&file.json, "c", &rope, &err);
}

static fsdp_status compute(const char *config)
{
    FSDP_TRY(read_rope(config));
    return fsdp_rope_divisors(&rope, &file.json, divisors, &count, &err);
}

static void read_as(const char *config, fsdp_rope_kind kind)
{
    cr_assert_eq(read_rope(config), FSDP_OK, "%s: %s", config, err.text);
    cr_expect_eq(rope.kind, kind, "%s", config);
}

Test(rope, are_read_in_the_spelling_of_either_version)
{
    read_as("{\"rope_theta\": 1, \"factor\": 3, \"rope_parameters\": "
            "{\"rope_type\": \"yarn\", \"rope_theta\": 2, \"truncate\": false}}",
            FSDP_ROPE_YARN);
    cr_expect_str_eq(rope.member, "rope_parameters");
    cr_expect(rope.theta == 2, "5's come first");
    cr_expect(isnan(rope.factor), "the model has no factor of its own");
    cr_expect(!rope.differs && isnan(rope.mscale) && rope.truncate == 0);
    read_as("{\"rope_theta\": 1, \"rope_scaling\": {\"type\": \"linear\"}}", FSDP_ROPE_LINEAR);
    cr_expect_str_eq(rope.type, "linear");
    cr_expect(rope.theta == 1);
    read_as("{\"rope_parameters\": {\"a\": {\"rope_theta\": 7}}}", FSDP_ROPE_DEFAULT);
    cr_expect(rope.differs && isnan(rope.theta));
    read_as("{\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2}, \"rope_parameters\": "
            "{\"rope_type\": \"yarn\", \"factor\": 3}}",
            FSDP_ROPE_LINEAR);
    cr_expect(rope.factor == 2, "rope_scaling replaces rope_parameters");
}

Test(rope, have_the_types_of_transformers)
{
    read_as("{}", FSDP_ROPE_DEFAULT);
    cr_expect_str_eq(rope.type, "default");
    read_as("{\"rope_scaling\": {\"rope_type\": \"dynamic\"}}", FSDP_ROPE_DYNAMIC);
    read_as("{\"rope_scaling\": {\"rope_type\": \"longrope\", \"long_factor\": [1, 2]}, "
            "\"original_max_position_embeddings\": 4096}",
            FSDP_ROPE_LONGROPE);
    cr_expect(rope.original_context == 4096 && !rope.short_factor);
    cr_assert(rope.long_factor && rope.long_factor->as.list.count == 2);
    read_as("{\"rope_scaling\": {\"rope_type\": \"llama3\"}}", FSDP_ROPE_LLAMA3);
    read_as("{\"rope_scaling\": {\"rope_type\": \"proportional\"}}", FSDP_ROPE_OTHER);
    cr_expect_str_eq(rope.type, "proportional");
}

Test(rope, are_damaged_where_a_member_is_not_of_its_kind)
{
    static const char *const wrong[][2] = {
        {"{\"rope_scaling\": 4}", "'c': rope_scaling is not an object"},
        {"{\"rope_parameters\": {\"rope_type\": 1}}", "'c': rope_type is not a text"},
        {"{\"rope_theta\": \"10000\"}", "'c': rope_theta is not a number"},
        {"{\"rope_scaling\": {\"factor\": true}}", "'c': factor is not a number"},
        {"{\"rope_scaling\": {\"truncate\": \"no\"}}", "'c': truncate is not true or false"}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        cr_expect_eq(read_rope(wrong[i][0]), FSDP_ERR_DAMAGED, "%s", wrong[i][0]);
        cr_expect_str_eq(err.text, wrong[i][1]);
    }
    read_as("{\"rope_scaling\": {\"type\": null, \"factor\": null}, \"rope_theta\": null}",
            FSDP_ROPE_DEFAULT);
    cr_expect(isnan(rope.factor) && isnan(rope.theta), "null is as absent");
}

#define SCALING                                                              \
    "\"rope_type\": \"llama3\", \"factor\": 8.0, \"low_freq_factor\": 1.0, " \
    "\"high_freq_factor\": 4.0, \"original_max_position_embeddings\": 8192"

static void expect_llama31(void)
{
    static const double from_28[] = {1, 1.2075, 1.5534, 2.0263, 2.6945, 3.6843, 5.2573, 8, 8};
    cr_assert_eq(count, 64);
    for (int i = 0; i < 9; i++)
        cr_expect(fabs(divisors[28 + i] - from_28[i]) < 1e-4, "%d: %f", 28 + i, divisors[28 + i]);
    cr_expect(divisors[0] == 1 && divisors[63] == 8);
}

Test(rope, divisors_are_those_of_transformers_5)
{
    cr_assert_eq(compute("{\"hidden_size\": 4096, \"num_attention_heads\": 32, "
                         "\"rope_parameters\": {\"rope_theta\": 500000.0, " SCALING "}}"),
                 FSDP_OK);
    expect_llama31();
}

Test(rope, divisors_are_those_of_transformers_4)
{
    cr_assert_eq(
        compute("{\"head_dim\": 128, \"rope_scaling\": {" SCALING "}, \"rope_theta\": 500000.0}"),
        FSDP_OK);
    expect_llama31();
}

Test(rope, divisors_are_none_without_this_scaling)
{
    cr_assert_eq(compute("{\"head_dim\": 128, \"rope_scaling\": null}"), FSDP_OK);
    cr_expect_eq(count, 0);
    cr_assert_eq(compute("{\"rope_parameters\": {\"rope_type\": \"default\", \"factor\": 2}}"),
                 FSDP_OK);
    cr_expect_eq(count, 0);
}

Test(rope, divisors_name_the_number_that_is_missing)
{
    cr_expect_eq(compute("{\"head_dim\": 8, \"rope_scaling\": {\"type\": \"llama3\"}}"),
                 FSDP_ERR_USAGE);
    cr_expect(strstr(err.text, "'factor'"), "%s", err.text);
    cr_expect_eq(compute("{\"rope_scaling\": {" SCALING "}}"), FSDP_ERR_USAGE);
    cr_expect(strstr(err.text, "size of a head"), "%s", err.text);
    cr_expect_eq(compute("{\"head_dim\": 1e99, \"rope_scaling\": {" SCALING "}}"), FSDP_ERR_USAGE);
}
