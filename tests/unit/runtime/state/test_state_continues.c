/*
 * Optimizer state of other programs that ours cannot continue is refused by name, in every form: amsgrad,
 * Adam's coupled decay, momentum where there is none, numbers that no optimizer accepts.
 */
#include "tests/unit/runtime/expect_toy.h"

#include <math.h>

/* An entry that a program adds to our dict, or puts in place of ours. */
typedef struct added {
    const char *name;
    fsdp_value value;
} added;

static fsdp_value number_of(double number)
{
    return fsdp_value_f64(number);
}

/* The optimizer's dict with other values of some entries, and further ones. */
static fsdp_status get_changed(toy *net, const added *more, size_t n, fsdp_sd **sd_out,
                               fsdp_error *err)
{
    const fsdp_state_opts opts = {.part = FSDP_STATE_OPTIM, .cpu_offload = true};
    FSDP_TRY(net_get(net, &opts, sd_out, err));
    for (size_t i = 0; i < n; i++) {
        int64_t at = fsdp_sd_find(*sd_out, more[i].name, strlen(more[i].name));
        fsdp_value value = more[i].value;
        if (at >= 0)
            fsdp_sd_set_value(*sd_out, (size_t)at, &value);
        else
            FSDP_TRY(fsdp_sd_add_value(*sd_out, more[i].name, strlen(more[i].name), &value, err));
    }
    return FSDP_OK;
}

static fsdp_status set_changed(toy *net, const added *more, size_t n, bool partial, fsdp_error *err)
{
    const fsdp_state_opts opts = {.part = FSDP_STATE_OPTIM, .partial = partial};
    fsdp_sd *sd = NULL;
    fsdp_status status = get_changed(net, more, n, &sd, err);
    if (status == FSDP_OK)
        status = net_set(net, &opts, sd, err);
    fsdp_sd_free(sd);
    return status;
}

#define GROUP(member) "optim.param_groups.layers.0.weight." member

/* --- members ---------------------------------------------------------------------------------- */

static fsdp_status refuse_members(toy *net, fsdp_error *err)
{
    const added amsgrad = {GROUP("amsgrad"), fsdp_value_bool(true)};
    const added nesterov = {GROUP("nesterov"), fsdp_value_bool(true)};
    const added biased = {GROUP("correct_bias"), fsdp_value_bool(false)};
    const added none[] = {{GROUP("amsgrad"), fsdp_value_bool(false)},
                          {GROUP("correct_bias"), fsdp_value_bool(true)},
                          {GROUP("foreach"), {0}},
                          {GROUP("initial_lr"), number_of(3)}};
    EXPECT_REFUSAL(
        set_changed(net, &amsgrad, 1, false, why),
        "'amsgrad' is 1 in '" GROUP(
            "amsgrad") "', and AdamW here cannot continue that: to resume without it, drop it with "
                       "fsdp-convert --drop '\\.(amsgrad|max_exp_avg_sq)$', or set partial");
    EXPECT_REFUSAL(set_changed(net, &nesterov, 1, false, why), "'nesterov' is 1");
    EXPECT_REFUSAL(set_changed(net, &biased, 1, false, why), "'correct_bias' is 0");
    FSDP_TRY(set_changed(net, none, 4, false, err));
    return set_changed(net, &amsgrad, 1, true, err);
}

Test(state_continues, members_that_change_steps_are_refused)
{
    expect_net(refuse_members, NULL);
}

static fsdp_status refuse_list(toy *net, fsdp_error *err)
{
    const fsdp_state_opts nested = {
        .part = FSDP_STATE_OPTIM, .nested_optim = true, .cpu_offload = true};
    fsdp_sd *sd = NULL;
    FSDP_TRY(net_get(net, &nested, &sd, err));
    int64_t at = fsdp_sd_find(sd, FSDP_NAME("optim.param_groups"));
    fsdp_value list;
    FSDP_TRY(fsdp_value_copy(&fsdp_sd_at(sd, (size_t)at)->value, &list, err));
    fsdp_value *maximize = &list.as.list.items[1].as.list.items[8];
    FSDP_TRY(fsdp_value_set_bytes(maximize, FSDP_VALUE_STRING, "amsgrad", 7, err));
    maximize[1] = fsdp_value_bool(true);
    fsdp_sd_set_value(sd, (size_t)at, &list);
    EXPECT_REFUSAL(net_set(net, &nested, sd, why), "'amsgrad' is 1 in 'optim.param_groups'");
    fsdp_sd_free(sd);
    return FSDP_OK;
}

Test(state_continues, members_in_a_list_are_refused)
{
    expect_net(refuse_list, NULL);
}

/* Adam: its decay is a part of the gradient. Without a decay it is AdamW. */
static fsdp_status refuse_adam(toy *net, fsdp_error *err)
{
    const added adam = {GROUP("decoupled_weight_decay"), fsdp_value_bool(false)};
    const added bias = {"optim.param_groups.layers.0.bias.decoupled_weight_decay",
                        fsdp_value_bool(false)};
    const added adamw = {GROUP("decoupled_weight_decay"), fsdp_value_bool(true)};
    EXPECT_REFUSAL(set_changed(net, &adam, 1, false, why),
                   "'decoupled_weight_decay' is false in '" GROUP(
                       "decoupled_weight_decay") "', with a weight_decay of 0.5: that is Adam");
    FSDP_TRY(set_changed(net, &bias, 1, false, err));
    return set_changed(net, &adamw, 1, false, err);
}

Test(state_continues, coupled_decay_is_refused_where_there_is_a_decay)
{
    expect_net(refuse_adam, NULL);
}

static fsdp_status refuse_numbers(toy *net, fsdp_error *err)
{
    const added lr = {GROUP("lr"), number_of(-1)}, decay = {GROUP("weight_decay"), number_of(NAN)};
    fsdp_value beta;
    FSDP_TRY(fsdp_value_set_items(memset(&beta, 0, sizeof beta), FSDP_VALUE_LIST, 2, err));
    beta.as.list.items[0] = number_of(0.5);
    beta.as.list.items[1] = number_of(1);
    const added betas = {GROUP("betas"), beta};
    EXPECT_REFUSAL(set_changed(net, &lr, 1, true, why), "'lr' in '" GROUP("lr") "' cannot be -1");
    EXPECT_REFUSAL(set_changed(net, &decay, 1, true, why), "cannot be nan");
    EXPECT_REFUSAL(set_changed(net, &betas, 1, true, why), "cannot be 1");
    return FSDP_OK;
}

Test(state_continues, numbers_that_no_optimizer_accepts_are_refused)
{
    expect_net(refuse_numbers, NULL);
}

/* --- state ------------------------------------------------------------------------------------ */

static fsdp_status refuse_state(toy *net, fsdp_error *err)
{
    static const char max[] = "optim.state.layers.0.bias.max_exp_avg_sq";
    const fsdp_state_opts copied = {.cpu_offload = true}, loose = {.partial = true};
    const added gone = {"optim.state.gone.weight.max_exp_avg_sq", {0}};
    const added none = {"optim.state.layers.0.bias.momentum_buffer", {0}};
    fsdp_sd *sd = NULL;
    FSDP_TRY(net_get(net, &copied, &sd, err));
    const fsdp_entry *moment = net_entry(sd, "optim.state.layers.0.bias.exp_avg_sq");
    const fsdp_tensor tensor = {moment->dtype, moment->ndim, moment->shape, moment->layout,
                                moment->data};
    FSDP_TRY(fsdp_sd_add_tensor(sd, max, strlen(max), &tensor, err));
    EXPECT_REFUSAL(net_set(net, NULL, sd, why),
                   "cannot resume exactly from 'optim.state.layers.0.bias.max_exp_avg_sq': AdamW "
                   "here does not keep this state; to resume without it, drop it with fsdp-convert "
                   "--drop '\\.max_exp_avg_sq$', or set partial");
    FSDP_TRY(net_set(net, &loose, sd, err));
    fsdp_sd_free(sd);
    FSDP_TRY(set_changed(net, &gone, 1, false, err));
    return set_changed(net, &none, 1, false, err);
}

Test(state_continues, state_that_is_not_kept_is_refused)
{
    expect_net(refuse_state, NULL);
}

/* --- SGD -------------------------------------------------------------------------------------- */

/* Sets a dict of hyper-parameters alone: members of one parameter, which all others share. */
static fsdp_status set_alone(toy *net, fsdp_optim *optim, const added *more, size_t n,
                             fsdp_error *err)
{
    const fsdp_state_opts opts = {
        .part = FSDP_STATE_OPTIM, .optims = &optim, .optim_count = 1, .partial = true};
    fsdp_sd *sd = NULL;
    FSDP_TRY(fsdp_sd_create(&sd, err));
    for (size_t i = 0; i < n; i++)
        FSDP_TRY(fsdp_sd_add_value(sd, more[i].name, strlen(more[i].name), &more[i].value, err));
    fsdp_status status = fsdp_root_set_state(net->root, sd, &opts, NULL, err);
    fsdp_sd_free(sd);
    return status;
}

static fsdp_status refuse_momentum(toy *net, fsdp_error *err)
{
    fsdp_optim *plain, *heavy;
    const added momentum = {GROUP("momentum"), number_of(0.5)};
    const added damped[] = {{GROUP("nesterov"), fsdp_value_bool(true)},
                            {GROUP("dampening"), number_of(0.25)}};
    FSDP_TRY(fsdp_sgd_create(net->root, NULL, &plain, err));
    FSDP_TRY(fsdp_sgd_create(net->root, &(fsdp_sgd_opts){.momentum = 0.9}, &heavy, err));
    EXPECT_REFUSAL(set_alone(net, plain, &momentum, 1, why),
                   "'momentum' is 0.5 in the state dict, and SGD here was made without");
    EXPECT_REFUSAL(set_alone(net, plain, damped, 1, why), "'nesterov' is set with momentum 0");
    EXPECT_REFUSAL(set_alone(net, heavy, damped, 2, why), "and dampening 0.25");
    FSDP_TRY(set_alone(net, heavy, damped, 1, err));
    FSDP_TRY(set_alone(net, heavy, &momentum, 1, err));
    fsdp_optim_free(plain);
    fsdp_optim_free(heavy);
    return FSDP_OK;
}

Test(state_continues, momentum_that_does_not_fit_is_refused)
{
    expect_net(refuse_momentum, NULL);
}
