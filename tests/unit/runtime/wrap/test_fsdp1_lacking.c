/*
 * The FSDP1 face: optimizer state from dicts that lack what PyTorch's never have, steps of SGD and f32
 * masters. Nothing may be zeroed in their place.
 */
#include "runtime/optim/optim_internal.h"
#include "tests/unit/runtime/wrap/wrap_state_cases.h"

/* All of a dict but what ends so; borrows its memory. */
static fsdp_status leave_out(const fsdp_sd *sd, const char *suffix, fsdp_sd **sd_out,
                             fsdp_error *err)
{
    FSDP_TRY(fsdp_sd_create(sd_out, err));
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        bool is_left_out = entry->name_size > strlen(suffix) &&
                           strcmp(entry->name + entry->name_size - strlen(suffix), suffix) == 0;
        if (entry->kind == FSDP_ENTRY_TENSOR && !is_left_out)
            FSDP_TRY(fsdp_sd_add_tensor(
                *sd_out, entry->name, entry->name_size,
                &(fsdp_tensor){entry->dtype, entry->ndim, entry->shape, entry->layout, entry->data},
                err));
    }
    return FSDP_OK;
}

/* The optimizer's own state goes out, and without some of it in again. */
static fsdp_status load_without(fsdp_root *root, const char *suffix, bool scatters, fsdp_error *err)
{
    fsdp_state_opts opts = whole_optim;
    fsdp_sd *full, *rest = NULL;
    FSDP_TRY(fsdp_root_get_state(root, &opts, &full, err));
    fsdp_status status = leave_out(full, suffix, &rest, err);
    opts.broadcast_from_rank0 = scatters;
    opts.partial = true; /* hyper-parameters stay as they are, too */
    if (status == FSDP_OK)
        status = fsdp_root_set_state(root, rest, &opts, NULL, err);
    fsdp_sd_free(rest);
    fsdp_sd_free(full);
    return status;
}

static net_result uninterrupted;

static fsdp_status go_on_without_steps(toy *net, state_case *what, fsdp_error *err)
{
    static net_result results[2];
    net_result *result = &results[fsdp_world_rank(net->world)];
    FSDP_TRY(load_without(net->root, ".step", what->flag, err));
    FSDP_TRY(net_train(net, &what->setup, 2, 2, result, err));
    FSDP_TRY(net_keep_weights(net, result, err));
    EXPECT(fsdp_world_rank(net->world) > 0 ||
           memcmp(uninterrupted.weights, result->weights, sizeof result->weights) == 0);
    return FSDP_OK;
}

Test(fsdp1_optim, momentum_goes_on_where_no_steps_were_counted)
{
    for (int scatters = 0; scatters < 2; scatters++) {
        state_case what = case_of(FSDP_WRAP_FULL_SHARD, scatters, go_on_without_steps);
        fsdp_error err = {0};
        what.setup.is_sgd = true;
        what.trained = 2;
        what.flag = scatters;
        cr_assert_eq(net_run(2, "cpu", &what.setup, &uninterrupted, &err), FSDP_OK, "%s", err.text);
        expect_ranks(2, run_case, &what);
    }
}

typedef struct bf16_net {
    fsdp_model *model;
    fsdp_wrap *wrap;
    fsdp_optim *optim;
} bf16_net;

static fsdp_status build_bf16(bf16_net *net, fsdp_world *world, fsdp_error *err)
{
    const fsdp_wrap_opts opts = {0};
    const fsdp_adamw_opts adam = {.weight_decay = 0.01};
    fsdp_param *param;
    FSDP_TRY(fsdp_model_create(world, &net->model, err));
    FSDP_TRY(fsdp_model_add(
        net->model,
        &(fsdp_param_spec){
            .name = "weight", .dtype = FSDP_BF16, .ndim = 2, .shape = (int64_t[]){3, 5}},
        &param, err));
    FSDP_TRY(fsdp_wrap_create(net->model, &opts, &net->wrap, err));
    FSDP_TRY(fsdp_root_init_uniform(fsdp_wrap_root(net->wrap), 1, err));
    return fsdp_adamw_create(fsdp_wrap_root(net->wrap), &adam, &net->optim, err);
}

static fsdp_status keep_masters(bf16_net *net, bool scatters, fsdp_error *err)
{
    const float *master = net->optim->states[0].master;
    float before[8];
    size_t bytes = (size_t)fsdp_param_local_count(net->optim->states[0].param) * sizeof *master;
    EXPECT(bytes > 0 && bytes <= sizeof before);
    memcpy(before, master, bytes);
    FSDP_TRY(load_without(fsdp_wrap_root(net->wrap), ".master", scatters, err));
    EXPECT(before[0] != 0 && memcmp(before, master, bytes) == 0);
    return FSDP_OK;
}

/* An optimizer step would otherwise undo the change. */
static fsdp_status change_summoned(bf16_net *net, fsdp_error *err)
{
    const float two = 2, *master = net->optim->states[0].master;
    FSDP_TRY(fsdp_wrap_summon_full_params(net->wrap, NULL, NULL, err));
    uint16_t *data = fsdp_param_data(fsdp_model_find(net->model, "weight"));
    for (int i = 0; i < 15; i++)
        fsdp_cast(&data[i], FSDP_BF16, &two, FSDP_F32, 1);
    FSDP_TRY(fsdp_wrap_summon_end(net->wrap, err));
    for (int64_t i = 0; i < fsdp_param_local_count(net->optim->states[0].param); i++)
        EXPECT(master[i] == 2);
    return FSDP_OK;
}

static fsdp_status look_at_masters(world_rank *rank, fsdp_error *err)
{
    bf16_net net = {0};
    fsdp_status status = build_bf16(&net, rank->world, err);
    for (int scatters = 0; scatters < 2 && status == FSDP_OK; scatters++)
        status = keep_masters(&net, scatters, err);
    if (status == FSDP_OK)
        status = change_summoned(&net, err);
    fsdp_optim_free(net.optim);
    fsdp_wrap_free(net.wrap);
    fsdp_model_free(net.model);
    return status;
}

Test(fsdp1_optim, masters_stay_where_a_dict_has_none_and_follow_summoned_parameters)
{
    expect_ranks(2, look_at_masters, NULL);
}
