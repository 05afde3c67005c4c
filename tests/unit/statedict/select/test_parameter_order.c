/* Parameters in the order of their model, whatever the order of names. */
#include "statedict/select/parameter_order.h"

#include <criterion/criterion.h>
#include <string.h>

static size_t list(fsdp_parameter *parameters, const char *const *names)
{
    size_t count = 0;
    for (; names[count]; count++)
        parameters[count] =
            (fsdp_parameter){.name = names[count], .size = strlen(names[count]), .entry = count};
    return count;
}

static bool sort(const char *type, fsdp_parameter *parameters, size_t count)
{
    fsdp_arena arena = {0};
    fsdp_error err = {0};
    bool is_known = false;
    cr_assert_eq(fsdp_parameters_sort(type, parameters, count, &arena, &is_known, &err), FSDP_OK,
                 "%s", err.text);
    fsdp_arena_release(&arena);
    return is_known;
}

Test(parameter_order, layers_count_and_modules_have_their_own_order)
{
    static const char *const names[] = {"lm_head.weight",
                                        "model.layers.10.input_layernorm.weight",
                                        "model.layers.10.mlp.up_proj.weight",
                                        "model.layers.2.mlp.down_proj.weight",
                                        "model.layers.2.mlp.gate_proj.weight",
                                        "model.layers.2.self_attn.k_proj.weight",
                                        "model.layers.2.self_attn.o_proj.weight",
                                        "model.layers.2.self_attn.q_proj.bias",
                                        "model.layers.2.self_attn.q_proj.weight",
                                        "model.norm.weight",
                                        "model.embed_tokens.weight",
                                        NULL};
    static const int order[] = {10, 8, 7, 5, 6, 4, 3, 2, 1, 9, 0};
    fsdp_parameter parameters[16];
    size_t count = list(parameters, names);
    cr_assert(sort("llama", parameters, count));
    for (size_t i = 0; i < count; i++)
        cr_assert_eq(parameters[i].entry, (size_t)order[i], "%zu is %s", i, parameters[i].name);
}

Test(parameter_order, norms_and_buffers_are_marked)
{
    static const char *const names[] = {"transformer.ln_f.weight", "transformer.h.0.ln_1.weight",
                                        "transformer.h.0.attn.c_attn.weight", NULL};
    fsdp_parameter parameters[16];
    size_t count = list(parameters, names);
    cr_assert(sort("gpt2", parameters, count));
    cr_assert_str_eq(parameters[0].name, names[1]);
    cr_assert(parameters[0].is_norm && !parameters[1].is_norm && parameters[2].is_norm);
}

Test(parameter_order, a_type_or_a_name_that_is_not_known_has_no_order)
{
    static const char *const names[] = {"model.layers.0.self_attn.q_proj.weight",
                                        "model.layers.0.self_attn.another.weight", NULL};
    static const char *const above[] = {"model.norm.weight", "model.norm.weight.scale", NULL};
    static const char *const unknown[] = {"a.x.weight", "b.x.weight", NULL};
    fsdp_parameter parameters[16];
    cr_assert_not(sort("another", parameters, list(parameters, names)));
    cr_assert_not(sort("llama", parameters, list(parameters, names)));
    cr_assert_not(sort("llama", parameters, list(parameters, above)));
    cr_assert_not(sort("llama", parameters, list(parameters, unknown)));
    cr_assert_eq(parameters[0].entry, 0);
    cr_assert_not(sort("llama", parameters, 0));
}
