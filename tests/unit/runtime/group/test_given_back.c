/*
 * A block that is given back while another stream may still use it, in a way that few trainings
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
