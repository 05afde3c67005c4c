/* Divisors of rotary frequencies, compared with those of transformers 5.23. */
#include "statedict/gguf_model/rope_factors.h"

#include "statedict/models/config.h"

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

static float factors[FSDP_ROPE_MOST];
static int count;
static fsdp_error err;

static fsdp_status compute(const char *config)
{
    fsdp_arena arena = {0};
    fsdp_value json;
    fsdp_status st = fsdp_config_parse(&arena, config, strlen(config), "config.json", &json, &err);
    if (st == FSDP_OK)
        st = fsdp_rope_factors(&json, factors, &count, &err);
    fsdp_arena_release(&arena);
    return st;
}

#define SCALING                                                              \
    "\"rope_type\": \"llama3\", \"factor\": 8.0, \"low_freq_factor\": 1.0, " \
    "\"high_freq_factor\": 4.0, \"original_max_position_embeddings\": 8192"

static void expect_llama31(void)
{
    static const double from_28[] = {1, 1.2075, 1.5534, 2.0263, 2.6945, 3.6843, 5.2573, 8, 8};
    cr_assert_eq(count, 64);
    for (int i = 0; i < 9; i++)
        cr_expect(fabs(factors[28 + i] - from_28[i]) < 1e-4, "%d: %f", 28 + i, factors[28 + i]);
    cr_expect(factors[0] == 1 && factors[63] == 8);
}

Test(rope_factors, are_those_of_transformers_5)
{
    cr_assert_eq(compute("{\"hidden_size\": 4096, \"num_attention_heads\": 32, "
                         "\"rope_parameters\": {\"rope_theta\": 500000.0, " SCALING "}}"),
                 FSDP_OK);
    expect_llama31();
}

Test(rope_factors, are_those_of_transformers_4)
{
    cr_assert_eq(
        compute("{\"head_dim\": 128, \"rope_scaling\": {" SCALING "}, \"rope_theta\": 500000.0}"),
        FSDP_OK);
    expect_llama31();
}

Test(rope_factors, are_none_without_this_scaling)
{
    cr_assert_eq(compute("{\"head_dim\": 128, \"rope_scaling\": null}"), FSDP_OK);
    cr_expect_eq(count, 0);
    cr_assert_eq(compute("{\"rope_parameters\": {\"rope_type\": \"default\", \"factor\": 2}}"),
                 FSDP_OK);
    cr_expect_eq(count, 0);
}

Test(rope_factors, name_the_number_that_is_missing)
{
    cr_expect_eq(compute("{\"head_dim\": 8, \"rope_scaling\": {\"type\": \"llama3\"}}"),
                 FSDP_ERR_USAGE);
    cr_expect(strstr(err.text, "'factor'"), "%s", err.text);
    cr_expect_eq(compute("{\"rope_scaling\": {" SCALING "}}"), FSDP_ERR_USAGE);
    cr_expect(strstr(err.text, "size of a head"), "%s", err.text);
    cr_expect_eq(compute("{\"head_dim\": 1e99, \"rope_scaling\": {" SCALING "}}"), FSDP_ERR_USAGE);
    cr_expect_eq(compute("[]"), FSDP_ERR_DAMAGED);
}
