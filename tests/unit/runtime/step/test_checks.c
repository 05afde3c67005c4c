/* With --check: lost writes, values from no memory, and parameters without a gradient. Also microbatches. */
#include "tests/unit/runtime/expect_toy.h"

#include <math.h>
#include <unistd.h>

static fsdp_status declare(toy *net, fsdp_error *err)
{
    FSDP_TRY(toy_add_weights(net, 2, 2, (int64_t[]){3, 5}, err));
    return toy_wrap(net, err);
}

/* --- writes to gathered data ------------------------------------------------------------------ */

static fsdp_status write_gathered(toy *net, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(net->unit[1], err));
    float *data = fsdp_param_data(net->weight[1]);
    EXPECT(data);
    data[14] += 1; /* the last element, after which there is padding */
    EXPECT_REFUSAL(fsdp_unit_post_forward(net->unit[1], why), "unit L1: 'L1.w' was changed");
    EXPECT_REFUSAL(fsdp_root_end_forward(net->root, why), "'L1.w' was changed");
    return FSDP_OK;
}

Test(checks, a_write_to_a_gathered_parameter_is_an_error)
{
    expect_toy_on_line(2, declare, write_gathered);
}

/* --- values from no memory -------------------------------------------------------------------- */

static bool is_nan(const float *values, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!isnan(values[i]))
            return false;
    return true;
}

static fsdp_status use_late(toy *net, fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_set(net->unit[0], FSDP_UNIT_KEEP_UNSHARDED_STORAGE, 1, false, err));
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(net->unit[0], err));
    const float *stale = fsdp_param_data(net->weight[0]);
    EXPECT(!is_nan(stale, 1));
    FSDP_TRY(fsdp_unit_post_forward(net->unit[0], err));
    FSDP_TRY(fsdp_root_end_forward(net->root, err));
    FSDP_TRY(fsdp_unit_reshard(net->unit[0], err)); /* and its stream is done */
    FSDP_TRY(fsdp_root_reset(net->root, err));
    EXPECT(is_nan(stale, 15));
    return FSDP_OK;
}

Test(checks, parameters_that_were_given_back_are_nan)
{
    expect_toy_on_line(2, declare, use_late);
}

static fsdp_status leave_raw(toy *net, fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_pre_backward(net->unit[0], err));
    const float *grad = fsdp_param_grad_raw(net->weight[0]);
    EXPECT(grad && is_nan(grad, 15));
    FSDP_TRY(fsdp_unit_post_backward(net->unit[0], err));
    FSDP_TRY(fsdp_root_end_backward(net->root, err));
    const float *reduced = fsdp_param_shard_grad(net->weight[0]);
    fsdp_box box;
    (void)fsdp_param_shard(net->weight[0], &box);
    EXPECT(is_nan(reduced, (size_t)fsdp_box_count(&box)));
    return FSDP_OK;
}

Test(checks, a_gradient_that_nobody_wrote_is_nan)
{
    expect_toy_on_line(2, declare, leave_raw);
}

/* --- parameters without a gradient ------------------------------------------------------------ */

static fsdp_status skip_one(toy *net, fsdp_error *err)
{
    for (int i = 0; i < 2; i++) {
        FSDP_TRY(toy_forward(net, NULL, err));
        FSDP_TRY(toy_backward_layer(net, 1, toy_add_ones, err));
        FSDP_TRY(toy_backward_layer(net, 0, NULL, err));
        FSDP_TRY(fsdp_root_end_backward(net->root, err));
        fsdp_root_zero_grad(net->root);
    }
    return FSDP_OK;
}

static fsdp_status skip_a_frozen_one(toy *net, fsdp_error *err)
{
    FSDP_TRY(fsdp_param_set_requires_grad(net->weight[0], false, err));
    return skip_one(net, err);
}

static fsdp_status skip_an_expected_one(toy *net, fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_set(net->unit[0], FSDP_UNIT_REDUCE_SCATTER_UNUSED_PARAMS, 1, false, err));
    return skip_one(net, err);
}

/* The text that the body writes to standard error, on one rank. */
static void expect_message(toy_body body, const char *wanted)
{
    char text[1000] = "";
    int pipes[2], saved = dup(STDERR_FILENO);
    cr_assert(saved >= 0 && pipe(pipes) == 0);
    dup2(pipes[1], STDERR_FILENO);
    expect_toy_on("cpu", (toy_case){1, {1}, {"dp"}, declare, body, NULL, {0}});
    dup2(saved, STDERR_FILENO);
    close(pipes[1]);
    cr_assert(read(pipes[0], text, sizeof text - 1) >= 0);
    cr_assert_str_eq(text, wanted);
}

Test(checks, trainable_parameters_without_a_gradient_are_reported_once)
{
    expect_message(skip_one, "fsdp: rank 0, --check: trainable parameters got no gradient in a "
                             "backward: 'L0.w'\n");
}

Test(checks, frozen_and_unused_ones_are_not_reported)
{
    expect_message(skip_a_frozen_one, "");
    expect_message(skip_an_expected_one, "");
}

/* --- microbatches ----------------------------------------------------------------------------- */

/* Three microbatches whose gradients are 1, 1 and 1: the sum, once, in the last one. */
static fsdp_status accumulate(toy *net, fsdp_error *err)
{
    for (int64_t i = 0; i < 3; i++) {
        FSDP_TRY(fsdp_root_begin_microbatch(net->root, i, 3, err));
        FSDP_TRY(toy_forward(net, NULL, err));
        FSDP_TRY(toy_backward(net, toy_add_ones, err));
        const float *grad = fsdp_param_shard_grad(net->weight[0]);
        EXPECT(i == 2 ? grad && *grad == 3 : !grad);
    }
    FSDP_TRY(fsdp_root_begin_microbatch(net->root, 0, 1, err));
    EXPECT_REFUSAL(fsdp_root_begin_microbatch(net->root, 3, 3, why),
                   "microbatch 3 of 3 does not exist");
    EXPECT_REFUSAL(fsdp_root_begin_microbatch(net->root, -1, 3, why),
                   "microbatch -1 of 3 does not exist");
    EXPECT_REFUSAL(fsdp_root_begin_microbatch(net->root, 0, 0, why),
                   "microbatch 0 of 0 does not exist");
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    EXPECT_REFUSAL(fsdp_root_begin_microbatch(net->root, 0, 1, why), "inside a step");
    return fsdp_root_end_forward(net->root, err);
}

Test(checks, microbatches_add_up_and_the_last_one_reduces)
{
    expect_toy_on_line(2, declare, accumulate);
}
