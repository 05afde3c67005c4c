/* Several optimizers of one root: each steps its own parameters, in one step of the whole. */
#include "tests/unit/runtime/expect_toy.h"

#include <math.h>

typedef struct two_optims {
    fsdp_optim *weights, *biases;
    fsdp_scaler *scaler; /* NULL: without */
} two_optims;

/* The groups of the net's own optimizer. */
static fsdp_status make_two(toy *net, two_optims *two, fsdp_error *err)
{
    const fsdp_optim_group weights = {net_is_no_bias, NULL, 0.25, 0.5};
    const fsdp_optim_group biases = {net_is_bias, NULL, 0.125, 0};
    fsdp_adamw_opts opts = {.weight_decay = 0.01};
    opts.group_count = 1;
    opts.groups = &weights;
    FSDP_TRY(fsdp_adamw_create(net->root, &opts, &two->weights, err));
    opts.groups = &biases;
    return fsdp_adamw_create(net->root, &opts, &two->biases, err);
}

static void free_two(two_optims *two)
{
    fsdp_optim_free(two->weights);
    fsdp_optim_free(two->biases);
    fsdp_scaler_free(two->scaler);
}

static fsdp_status step(two_optims *two, fsdp_optim *optim, bool *skipped_out, fsdp_error *err)
{
    *skipped_out = false;
    return two->scaler ? fsdp_scaler_step(two->scaler, optim, skipped_out, err)
                       : fsdp_optim_step(optim, err);
}

static fsdp_status train_two(toy *net, two_optims *two, fsdp_error *err)
{
    bool skipped;
    for (int i = 0; i < 3; i++) {
        FSDP_TRY(net_forward(net, err));
        FSDP_TRY(net_backward(net, err));
        FSDP_TRY(step(two, two->weights, &skipped, err));
        EXPECT(!skipped);
        FSDP_TRY(step(two, two->biases, &skipped, err));
        EXPECT(!skipped && fsdp_root_memory(net->root).now[FSDP_MEMORY_GRAD] == 0);
    }
    return FSDP_OK;
}

/* Compares the model after the steps of one optimizer with that after the steps of two. */
static fsdp_status compare(toy *net, two_optims *two, fsdp_error *err)
{
    const fsdp_state_opts opts = {.part = FSDP_STATE_MODEL, .cpu_offload = true};
    fsdp_sd *by_one = NULL, *by_two = NULL;
    FSDP_TRY(net_train(net, 3, err));
    FSDP_TRY(fsdp_root_get_state(net->root, &opts, &by_one, err));
    fsdp_status status = fsdp_root_init(net->root, tensor_number, NULL, err);
    if (status == FSDP_OK)
        status = train_two(net, two, err);
    if (status == FSDP_OK)
        status = fsdp_root_get_state(net->root, &opts, &by_two, err);
    if (status == FSDP_OK)
        status = net_expect_equal(by_one, by_two, fsdp_world_rank(net->rank->world), err);
    fsdp_sd_free(by_one);
    fsdp_sd_free(by_two);
    return status;
}

static fsdp_status step_apart(toy *net, fsdp_error *err)
{
    two_optims two = {0};
    fsdp_status status = make_two(net, &two, err);
    if (status == FSDP_OK)
        status = compare(net, &two, err);
    free_two(&two);
    return status;
}

Test(optim, two_optimizers_step_as_two_groups_of_one)
{
    expect_net(step_apart, NULL);
}

/* This rank's first element of a bias; NULL: it holds none. */
static float *first_bias(toy *net, float *grad_out)
{
    for (size_t i = 0; i < fsdp_unit_param_count(net->unit[0]); i++) {
        fsdp_param *param = fsdp_unit_param_at(net->unit[0], i);
        fsdp_box box;
        float *own = fsdp_param_shard(param, &box);
        if (!net_is_bias(NULL, param) || fsdp_box_count(&box) == 0)
            continue;
        *grad_out = *(const float *)fsdp_param_shard_grad(param);
        return own;
    }
    return NULL;
}

static fsdp_status expect_scaled_once(toy *net, two_optims *two, fsdp_error *err)
{
    float grad = 0;
    bool skipped;
    FSDP_TRY(net_forward(net, err));
    FSDP_TRY(net_backward(net, err));
    const float *bias = first_bias(net, &grad), before = bias ? *bias : 0;
    FSDP_TRY(step(two, two->weights, &skipped, err));
    EXPECT(!bias || *bias == before);
    FSDP_TRY(step(two, two->biases, &skipped, err));
    EXPECT(!bias || *bias == before - 0.5f * (grad / 4));
    EXPECT(fsdp_scaler_scale(two->scaler) == 4);
    return FSDP_OK;
}

typedef fsdp_status (*scaled_body)(toy *net, two_optims *two, fsdp_error *err);

/* Weights and biases by SGD of their own, the scale 4, which grows after two good steps. */
static fsdp_status with_scaled_pair(toy *net, scaled_body body, fsdp_error *err)
{
    two_optims two = {0};
    const fsdp_optim_group weights = {net_is_no_bias, NULL, 0.5, 0};
    const fsdp_optim_group biases = {net_is_bias, NULL, 0.5, 0};
    fsdp_sgd_opts sgd = {0};
    fsdp_scaler_opts opts = {0};
    opts.init_scale = 4;
    opts.growth_interval = 2;
    sgd.group_count = 1;
    sgd.groups = &weights;
    fsdp_status status = fsdp_sgd_create(net->root, &sgd, &two.weights, err);
    sgd.groups = &biases;
    if (status == FSDP_OK)
        status = fsdp_sgd_create(net->root, &sgd, &two.biases, err);
    if (status == FSDP_OK)
        status = fsdp_scaler_create(&opts, &two.scaler, err);
    if (status == FSDP_OK)
        status = body(net, &two, err);
    free_two(&two);
    return status;
}

static fsdp_status step_scaled(toy *net, fsdp_error *err)
{
    return with_scaled_pair(net, expect_scaled_once, err);
}

Test(optim, a_scaler_counts_and_divides_once_for_two_optimizers)
{
    expect_net(step_scaled, NULL);
}

static fsdp_status skip_both(toy *net, two_optims *two, fsdp_error *err)
{
    bool skipped;
    FSDP_TRY(net_forward(net, err));
    FSDP_TRY(net_backward(net, err));
    for (size_t i = 0; i < fsdp_unit_param_count(net->unit[0]); i++) {
        fsdp_param *weight = fsdp_unit_param_at(net->unit[0], i);
        fsdp_box box;
        (void)fsdp_param_shard(weight, &box);
        if (!net_is_bias(NULL, weight) && fsdp_box_count(&box) > 0)
            *(float *)fsdp_param_shard_grad(weight) = INFINITY;
    }
    FSDP_TRY(step(two, two->weights, &skipped, err));
    EXPECT(skipped && fsdp_scaler_scale(two->scaler) == 65536);
    FSDP_TRY(step(two, two->biases, &skipped, err));
    EXPECT(skipped && fsdp_scaler_scale(two->scaler) == 32768);
    return FSDP_OK;
}

static fsdp_status step_infinite(toy *net, fsdp_error *err)
{
    two_optims two = {0};
    const fsdp_scaler_opts opts = {0};
    fsdp_status status = make_two(net, &two, err);
    if (status == FSDP_OK)
        status = fsdp_scaler_create(&opts, &two.scaler, err);
    if (status == FSDP_OK)
        status = skip_both(net, &two, err);
    free_two(&two);
    return status;
}

Test(optim, an_infinity_of_one_optimizer_skips_the_other_too)
{
    expect_net(step_infinite, NULL);
}

static fsdp_status make_by_default(toy *net, fsdp_error *err)
{
    const fsdp_optim_group half = {.match = net_is_bias}, rest = {.lr = 0.5};
    const fsdp_optim_group groups[] = {half, rest};
    const fsdp_adamw_opts grouped = {.lr = 0.25, .groups = groups, .group_count = 2};
    fsdp_optim *adamw = NULL, *sgd = NULL, *of_groups = NULL;
    fsdp_scaler *scaler = NULL;
    fsdp_status status = fsdp_adamw_create(net->root, NULL, &adamw, err);
    if (status == FSDP_OK)
        status = fsdp_sgd_create(net->root, NULL, &sgd, err);
    if (status == FSDP_OK)
        status = fsdp_adamw_create(net->root, &grouped, &of_groups, err);
    if (status == FSDP_OK)
        status = fsdp_scaler_create(NULL, &scaler, err);
    bool fits = status == FSDP_OK && fsdp_optim_lr(adamw, 0) == 1e-3 &&
                fsdp_optim_lr(sgd, 0) == 1e-3 && fsdp_optim_lr(of_groups, 0) == 0.25 &&
                fsdp_optim_lr(of_groups, 1) == 0.5 && fsdp_scaler_scale(scaler) == 65536;
    fsdp_scaler_free(scaler);
    fsdp_optim_free(of_groups);
    fsdp_optim_free(sgd);
    fsdp_optim_free(adamw);
    FSDP_TRY(status);
    EXPECT(fits);
    return FSDP_OK;
}

Test(optim, options_that_are_zero_or_absent_are_the_defaults)
{
    expect_net(make_by_default, NULL);
}

/* The other optimizer's turn comes with a later backward. */
static fsdp_status step_one(toy *net, two_optims *two, fsdp_error *err)
{
    bool skipped;
    for (int i = 1; i <= 3; i++) {
        float grad = 0;
        FSDP_TRY(net_forward(net, err));
        FSDP_TRY(net_backward(net, err));
        const float *bias = first_bias(net, &grad), before = bias ? *bias : 0;
        FSDP_TRY(step(two, two->biases, &skipped, err));
        EXPECT(!bias || *bias == before - 0.5f * (grad / 4));
        EXPECT(!skipped && fsdp_scaler_scale(two->scaler) == (i < 3 ? 4 : 8));
    }
    return FSDP_OK;
}

static fsdp_status step_one_of_two(toy *net, fsdp_error *err)
{
    return with_scaled_pair(net, step_one, err);
}

Test(optim, a_scaler_divides_new_gradients_though_one_optimizer_waits)
{
    expect_net(step_one_of_two, NULL);
}
