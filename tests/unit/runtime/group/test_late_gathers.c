/*
 * Prefetched gathers whose unit changes before its own hook. On device cpu such gathers run late
 * (group_gather.c); the result equals that of device cpu-async, where they are already running.
 */
#include "tests/unit/runtime/expect_toy.h"

#include <math.h>

enum { LAYERS = 3, WIDTH = 8, RANKS = 4 };

/* Units that two ranks gather again in backward. */
static fsdp_status make_net(toy *net, fsdp_error *err)
{
    FSDP_TRY(toy_add_weights(net, LAYERS, 2, (int64_t[]){WIDTH, WIDTH}, err));
    net->opts.reshard_after_forward = 2;
    FSDP_TRY(toy_wrap(net, err));
    return fsdp_root_init_uniform(net->root, 1, err);
}

static fsdp_status expect_weight(toy *net, int layer, fsdp_error *err)
{
    const float *data = fsdp_param_data(net->weight[layer]);
    for (uint64_t i = 0; data && i < WIDTH * WIDTH; i++) {
        double first = fsdp_uniform(1, fsdp_param_name(net->weight[layer]), i) / sqrt(WIDTH);
        if (fabs(data[i] - first) > 1e-6)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "layer %d, element %d is %g, not %g", layer,
                             (int)i, data[i], first);
    }
    return data ? FSDP_OK : fsdp_fail(err, FSDP_ERR_INTERNAL, "layer %d is not there", layer);
}

static fsdp_status forward(toy *net, fsdp_error *err)
{
    return toy_forward(net, expect_weight, err);
}

static fsdp_status see_and_touch(toy *net, int layer, fsdp_error *err)
{
    FSDP_TRY(expect_weight(net, layer, err));
    return toy_touch_grad(net, layer, err);
}

static fsdp_status backward_of(toy *net, int layer, fsdp_error *err)
{
    return toy_backward_layer(net, layer, see_and_touch, err);
}

/* --- slices go before their gather is due ------------------------------------------------------ */

static fsdp_status skip_a_backward(toy *net, fsdp_error *err)
{
    fsdp_root_set_is_last_backward(net->root, false);
    for (int microbatch = 0; microbatch < 2; microbatch++) {
        FSDP_TRY(forward(net, err));
        FSDP_TRY(backward_of(net, 2, err));
        FSDP_TRY(backward_of(net, 0, err));
        FSDP_TRY(fsdp_root_end_backward(net->root, err));
    }
    return FSDP_OK;
}

static fsdp_status reshard_by_hand(toy *net, fsdp_error *err)
{
    FSDP_TRY(forward(net, err));
    FSDP_TRY(backward_of(net, 2, err));
    FSDP_TRY(fsdp_unit_reshard(net->unit[1], err));
    FSDP_TRY(backward_of(net, 1, err));
    FSDP_TRY(backward_of(net, 0, err));
    return fsdp_root_end_backward(net->root, err);
}

/* The gather of the previous layer is running, and reads slices. */
static fsdp_status reset_in_backward(toy *net, fsdp_error *err)
{
    FSDP_TRY(forward(net, err));
    FSDP_TRY(fsdp_unit_pre_backward(net->unit[2], err));
    FSDP_TRY(fsdp_root_reset(net->root, err));
    FSDP_TRY(forward(net, err));
    return toy_backward(net, see_and_touch, err);
}

/* --- a gather by hand after one that was issued ahead ------------------------------------------ */

/* Rank 0 waits for the gather before the next unit's gather, the other ranks after it. */
static fsdp_status wait_at_other_times(toy *net, fsdp_error *err)
{
    bool is_first = fsdp_world_rank(net->root->world) == 0;
    fsdp_unshard_handle *handle;
    FSDP_TRY(fsdp_unit_set_prefetch(net->unit[0], FSDP_HOOK_PRE_FORWARD, &net->unit[1], 1, err));
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(net->unit[0], err));
    FSDP_TRY(fsdp_unit_post_forward(net->unit[0], err));
    FSDP_TRY(fsdp_unit_unshard(net->unit[1], true, &handle, err));
    if (is_first)
        FSDP_TRY(fsdp_unshard_wait(handle, err));
    FSDP_TRY(fsdp_unit_pre_forward(net->unit[2], err));
    if (!is_first)
        FSDP_TRY(fsdp_unshard_wait(handle, err));
    FSDP_TRY(fsdp_unit_post_forward(net->unit[2], err));
    FSDP_TRY(fsdp_unit_pre_forward(net->unit[1], err));
    FSDP_TRY(expect_weight(net, 1, err));
    FSDP_TRY(fsdp_unit_post_forward(net->unit[1], err));
    return fsdp_root_end_forward(net->root, err);
}

/* The copy-in of the second one is not ordered by the wait for the first. */
static fsdp_status gather_the_second_by_hand(toy *net, fsdp_error *err)
{
    fsdp_unshard_handle *handle;
    FSDP_TRY(fsdp_unit_set_prefetch(net->unit[0], FSDP_HOOK_PRE_FORWARD, &net->unit[1], 2, err));
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(net->unit[0], err));
    FSDP_TRY(fsdp_unit_post_forward(net->unit[0], err));
    FSDP_TRY(fsdp_unit_unshard(net->unit[2], true, &handle, err));
    FSDP_TRY(fsdp_unshard_wait(handle, err));
    for (int i = 1; i < LAYERS; i++)
        FSDP_TRY(toy_forward_layer(net, i, expect_weight, err));
    return fsdp_root_end_forward(net->root, err);
}

/* --- gathers before the optimizer's step --------------------------------------------------------- */

static fsdp_status train(toy *net, bool gathers_again, fsdp_error *err)
{
    fsdp_unshard_handle *handle;
    FSDP_TRY(
        fsdp_unit_set(net->unit[1], FSDP_UNIT_RESHARD_AFTER_BACKWARD, gathers_again, false, err));
    FSDP_TRY(forward(net, err));
    FSDP_TRY(toy_backward_layer(net, 1, toy_add_ones, err));
    FSDP_TRY(fsdp_root_end_backward(net->root, err));
    if (gathers_again)
        FSDP_TRY(fsdp_unit_unshard(net->unit[1], true, &handle, err));
    return fsdp_optim_step(net->optim, err);
}

static fsdp_status step_and_gather(toy *net, bool gathers_again, fsdp_error *err)
{
    fsdp_sgd_opts sgd = {0};
    sgd.lr = 1;
    FSDP_TRY(toy_add_sgd(net, &sgd, err));
    FSDP_TRY(train(net, gathers_again, err));
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(net->unit[1], err));
    const float *data = fsdp_param_data(net->weight[1]);
    double first = fsdp_uniform(1, fsdp_param_name(net->weight[1]), 0) / sqrt(WIDTH);
    if (!data || fabs(data[0] - (first - 1)) > 1e-6)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "%g, %g was expected",
                         data ? (double)data[0] : 0.0, first - 1);
    return FSDP_OK;
}

static fsdp_status step_while_gathered(toy *net, fsdp_error *err)
{
    return step_and_gather(net, false, err);
}

static fsdp_status step_while_on_its_way(toy *net, fsdp_error *err)
{
    return step_and_gather(net, true, err);
}

static fsdp_status init_while_gathered(toy *net, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_init_uniform(net->root, 2, err));
    FSDP_TRY(fsdp_unit_unshard(net->unit[1], false, NULL, err));
    FSDP_TRY(fsdp_root_init_uniform(net->root, 1, err));
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(net->unit[1], err));
    return expect_weight(net, 1, err);
}

/* --- the tests -------------------------------------------------------------------------------- */

static void expect_on_devices(toy_body body)
{
    expect_toy_on_line(RANKS, make_net, body);
}

Test(late_gathers, a_gather_of_slices_stays_one_when_its_backward_does_not_come)
{
    expect_on_devices(skip_a_backward);
}

Test(late_gathers, a_gather_of_slices_stays_one_when_the_unit_is_resharded_by_hand)
{
    expect_on_devices(reshard_by_hand);
}

Test(late_gathers, slices_are_given_back_behind_a_gather_that_a_reset_drops)
{
    expect_on_devices(reset_in_backward);
}

Test(late_gathers, a_gather_by_hand_is_made_at_once_also_behind_one_ahead)
{
    expect_on_devices(wait_at_other_times);
}

Test(late_gathers, a_gather_by_hand_follows_the_copy_in_of_the_one_ahead)
{
    expect_on_devices(gather_the_second_by_hand);
}

Test(late_gathers, what_was_gathered_before_the_optimizers_step_is_gathered_anew)
{
    expect_on_devices(step_while_gathered);
}

Test(late_gathers, what_is_on_its_way_at_the_optimizers_step_is_gathered_anew)
{
    expect_on_devices(step_while_on_its_way);
}

Test(late_gathers, what_was_gathered_before_values_were_set_is_gathered_anew)
{
    expect_on_devices(init_while_gathered);
}
