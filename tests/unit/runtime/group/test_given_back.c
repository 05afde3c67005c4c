/*
 * Blocks that are given back while another stream may still use them, in the ways that few trainings
 * take: the watch of the device finds an owner that did not wait.
 */
#include "tests/unit/runtime/expect_toy.h"

enum { LAYERS = 3 };

static fsdp_status declare(toy *net, fsdp_error *err)
{
    FSDP_TRY(toy_add_weights(net, LAYERS, 2, (int64_t[]){6, 5}, err));
    return toy_wrap(net, err);
}

static void expect_given_back(toy_case what)
{
    what.mesh_names[0] = "rep";
    what.mesh_names[what.mesh_ndim - 1] = "dp";
    what.declare = declare;
    expect_toy(what);
}

/* --- slices of an int reshard ------------------------------------------------------------------- */

/* The last layer's backward has begun, and the gather of the layer before it reads the slices. */
static fsdp_status gather_slices(toy *net, fsdp_error *err)
{
    FSDP_TRY(toy_forward(net, NULL, err));
    FSDP_TRY(fsdp_unit_pre_backward(net->unit[LAYERS - 1], err));
    EXPECT(net->unit[LAYERS - 2]->groups[0].gather.is_of_slices);
    return toy_touch_grad(net, LAYERS - 1, err);
}

static fsdp_status reshard_meanwhile(toy *net, fsdp_error *err)
{
    FSDP_TRY(gather_slices(net, err));
    FSDP_TRY(fsdp_unit_reshard(net->unit[LAYERS - 2], err));
    FSDP_TRY(fsdp_unit_post_backward(net->unit[LAYERS - 1], err));
    for (int i = LAYERS - 2; i >= 0; i--)
        FSDP_TRY(toy_backward_layer(net, i, toy_touch_grad, err));
    return fsdp_root_end_backward(net->root, err);
}

static fsdp_status reset_meanwhile(toy *net, fsdp_error *err)
{
    FSDP_TRY(gather_slices(net, err));
    FSDP_TRY(fsdp_root_reset(net->root, err));
    FSDP_TRY(toy_forward(net, NULL, err));
    return toy_backward(net, toy_touch_grad, err);
}

static void expect_slices(toy_body body)
{
    expect_given_back((toy_case){
        .mesh_ndim = 1, .mesh_shape = {4}, .body = body, .opts.reshard_after_forward = 2});
}

Test(given_back, slices_that_a_gather_reads_when_their_unit_is_resharded)
{
    expect_slices(reshard_meanwhile);
}

Test(given_back, slices_that_a_gather_reads_when_the_root_is_reset)
{
    expect_slices(reset_meanwhile);
}

/* --- sums that were added to earlier ones --------------------------------------------------------- */

static fsdp_status reduce_twice(toy *net, fsdp_error *err)
{
    for (int i = 0; i < 2; i++) {
        FSDP_TRY(toy_forward(net, NULL, err));
        FSDP_TRY(toy_backward(net, toy_touch_grad, err));
    }
    return FSDP_OK;
}

Test(given_back, sums_of_replicas_that_are_added_to_earlier_ones)
{
    expect_given_back((toy_case){.mesh_ndim = 2, .mesh_shape = {2, 2}, .body = reduce_twice});
}
