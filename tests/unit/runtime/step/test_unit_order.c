/*
 * The order in which units gather, reshard and reduce, on two ranks that are threads, or four where groups of
 * two are needed: the scenarios of tests/support/nets/order_scenarios.h.
 */
#include "tests/support/nets/order_scenarios.h"
#include "tests/unit/runtime/expect_toy.h"

#include <string.h>

static void expect_order_of(const char *name, int ranks)
{
    static const char *const devices[] = {"cpu", "cpu-async"};
    for (size_t i = is_repeated("cpu"); i < 2; i++) {
        const worlds_setup setup = {.ranks = ranks, .deadline_ms = 30000, .device = devices[i]};
        fsdp_error err = {0};
        cr_assert(order_scenario_fits(name, ranks), "%s", name);
        cr_assert_eq(order_scenario_run(name, &setup, &err), FSDP_OK, "%s, %d ranks on %s: %s",
                     name, ranks, devices[i], err.text);
    }
}

Test(unit_order, every_mode_has_its_number_of_collectives)
{
    expect_order_of("C6", 2);
    expect_order_of("C6", 4);
}

Test(unit_order, what_was_resharded_by_hand_is_gathered_in_backward)
{
    expect_order_of("C7", 2);
}

Test(unit_order, the_setter_flips_one_unit_or_all_below)
{
    expect_order_of("C8", 2);
}

Test(unit_order, backward_gathers_the_unit_before)
{
    expect_order_of("C11", 2);
}

Test(unit_order, computing_again_changes_no_order)
{
    expect_order_of("C11-recompute", 2);
}

Test(unit_order, two_forwards_and_one_backward_play_the_layers_twice)
{
    expect_order_of("C12", 2);
}

Test(unit_order, a_head_that_was_gathered_by_mistake_is_used_later)
{
    expect_order_of("C13", 2);
}

Test(unit_order, forward_gathers_what_it_was_told_to)
{
    expect_order_of("C14", 2);
}

Test(unit_order, backward_gathers_what_it_was_told_to)
{
    expect_order_of("C15", 2);
}

Test(unit_order, units_inside_of_what_is_computed_again_are_gathered_ahead_or_by_it)
{
    expect_order_of("C15-nested", 4);
}

static fsdp_status expect_refused(fsdp_status status, fsdp_error *told, const char *words,
                                  fsdp_error *err)
{
    bool is_told = status == FSDP_ERR_USAGE && strstr(told->text, words);
    fsdp_status result = FSDP_OK;
    if (!is_told)
        result = fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s', not '%s', was told", told->text, words);
    *told = (fsdp_error){0};
    return result;
}

static fsdp_status two_layers(toy *net, fsdp_error *err)
{
    FSDP_TRY(toy_add_weights(net, 2, 2, (int64_t[]){3, 2}, err));
    return toy_wrap(net, err);
}

static fsdp_status out_of_order(toy *net, fsdp_error *err)
{
    fsdp_error told = {0};
    FSDP_TRY(expect_refused(fsdp_unit_pre_forward(NULL, &told), &told, "'unit' is NULL", err));
    FSDP_TRY(expect_refused(fsdp_unit_pre_forward(net->unit[0], &told), &told,
                            "pre_forward of unit L0 came before fsdp_root_begin_forward", err));
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    FSDP_TRY(expect_refused(fsdp_unit_pre_backward(net->unit[0], &told), &told,
                            "pre_backward of unit L0 came before fsdp_root_end_forward", err));
    FSDP_TRY(expect_refused(fsdp_root_end_backward(net->root, &told), &told,
                            "end_backward came before fsdp_root_end_forward", err));
    FSDP_TRY(fsdp_root_end_forward(net->root, err));
    FSDP_TRY(toy_forward(net, NULL, err));
    return toy_backward(net, toy_touch_grad, err);
}

Test(unit_order, hooks_out_of_order_are_refused_and_break_nothing)
{
    expect_toy_on_line(2, two_layers, out_of_order);
}
