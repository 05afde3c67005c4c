/*
 * The FSDP1 face: when units are gathered, whole parameters, hooks, clipping, groups, dtypes. Bits of
 * training are in tests/threads/fsdp1_program.c, what is wrapped in test_fsdp1_wrap.c, state in two more.
 */
#include "tests/unit/runtime/wrap/wrap_expect.h"

#include <stdio.h>

static bool says(const fsdp_error *err, fsdp_status status, const char *text)
{
    return err->status == status && strstr(err->text, text);
}

/* --- the order of gathers: PyTorch 2.15's ------------------------------------------------------ */

typedef struct order_case {
    net_setup setup;
    int passes; /* before the events that count */
    const char *events;
} order_case;

static fsdp_status note_order(world_rank *rank, fsdp_error *err)
{
    const order_case *what = rank->user;
    toy net;
    double loss;
    fsdp_status status = net_build(&net, rank->world, &what->setup, err);
    rank->notes_collectives = true;
    for (int i = 0; i <= what->passes && status == FSDP_OK; i++) {
        forget_events(rank);
        status = net_microbatch(&net, i, 0, &loss, err);
    }
    if (status == FSDP_OK && strcmp(rank->events.data, what->events) != 0)
        status = fsdp_fail(err, FSDP_ERR_INTERNAL, "%s", rank->events.data);
    toy_free(&net);
    return status;
}

/* The root is kept from forward to backward; "l0" stands for layers.0. */
static void expect_order(const net_setup *setup, int passes, const char *events)
{
    static char full[4096];
    order_case what = {.setup = *setup, .passes = passes, .events = full};
    size_t size = 0;
    for (; *events; events++) {
        bool is_layer = *events == 'l' && events[1] >= '0' && events[1] <= '9';
        const char *text = is_layer ? "layers." : (char[]){*events, '\0'};
        memcpy(full + size, text, strlen(text));
        size += strlen(text);
    }
    full[size] = '\0';
    expect_ranks(2, note_order, &what);
}

#define FORWARD_FULL "U root|AG root/2|U l0|AG l0/2|R l0|U l1|AG l1/2|R l1|U l2|AG l2/2|R l2|"

#define BACKWARD_NONE                                                      \
    "U l2|AG l2/2|R l2|RS l2/2|post l2|U l1|AG l1/2|R l1|RS l1/2|post l1|" \
    "U l0|AG l0/2|R l0|RS l0/2|post l0|R root|RS root/2|post root"

Test(fsdp1, backward_pre_gathers_before_the_mathematics)
{
    net_setup setup = net_setup_default();
    expect_order(&setup, 0,
                 FORWARD_FULL "U l2|AG l2/2|U l1|AG l1/2|R l2|RS l2/2|post l2|"
                              "U l0|AG l0/2|R l1|RS l1/2|post l1|"
                              "R l0|RS l0/2|post l0|R root|RS root/2|post root");
}

Test(fsdp1, backward_post_gathers_what_comes_next_before_it_reduces)
{
    net_setup setup = net_setup_default();
    setup.wrap.unit.backward_prefetch = FSDP_WRAP_BACKWARD_POST;
    expect_order(&setup, 1,
                 FORWARD_FULL "U l2|AG l2/2|R l2|U l1|AG l1/2|RS l2/2|post l2|"
                              "R l1|U l0|AG l0/2|RS l1/2|post l1|"
                              "R l0|RS l0/2|post l0|R root|RS root/2|post root");
}

Test(fsdp1, backward_none_gathers_when_it_is_due)
{
    net_setup setup = net_setup_default();
    setup.wrap.unit.backward_prefetch = FSDP_WRAP_BACKWARD_NONE;
    expect_order(&setup, 1, FORWARD_FULL BACKWARD_NONE);
}

Test(fsdp1, forward_prefetch_follows_the_first_forward)
{
    net_setup setup = net_setup_default();
    setup.wrap.unit.forward_prefetch = true;
    setup.wrap.unit.backward_prefetch = FSDP_WRAP_BACKWARD_NONE;
    expect_order(&setup, 0, FORWARD_FULL BACKWARD_NONE);
    expect_order(
        &setup, 1,
        "U root|AG root/2|U l0|AG l0/2|U l1|AG l1/2|R l0|U l2|AG l2/2|R l1|R l2|" BACKWARD_NONE);
}

Test(fsdp1, no_shard_only_reduces_whole_gradients)
{
    net_setup setup = net_setup_default();
    setup.wrap.unit.strategy = FSDP_WRAP_NO_SHARD;
    expect_order(&setup, 0,
                 "U root|U l0|U l1|U l2|R l2|AR l2/2|post l2|R l1|AR l1/2|post l1|"
                 "R l0|AR l0/2|post l0|R root|AR root/2|post root");
}

/* --- accumulating ----------------------------------------------------------------------------- */

static fsdp_status count_no_sync(world_rank *rank, fsdp_error *err)
{
    const net_setup *setup = rank->user;
    bool is_kept = setup->wrap.unit.strategy == FSDP_WRAP_SHARD_GRAD_OP;
    static net_result results[2];
    toy net;
    FSDP_TRY(net_build(&net, rank->world, setup, err));
    rank->notes_collectives = true;
    forget_events(rank);
    fsdp_status status = net_train(&net, setup, 0, 1, &results[fsdp_world_rank(rank->world)], err);
    int gathers = count_events(rank, "AG layers.1"), reductions = count_events(rank, "RS layers.1");
    toy_free(&net);
    FSDP_TRY(status);
    EXPECT(gathers == (is_kept ? 1 : 6) && reductions == 1);
    return FSDP_OK;
}

Test(fsdp1, no_sync_reduces_once_and_keeps_what_the_strategy_keeps)
{
    net_setup setup = net_setup_default();
    setup.microbatches = 3;
    expect_ranks(2, count_no_sync, &setup);
    setup.wrap.unit.strategy = FSDP_WRAP_SHARD_GRAD_OP;
    expect_ranks(2, count_no_sync, &setup);
}

/* --- the limit -------------------------------------------------------------------------------- */

static fsdp_status prefetch_all(world_rank *rank, fsdp_error *err)
{
    const net_setup *setup = rank->user;
    toy net;
    FSDP_TRY(net_build(&net, rank->world, setup, err));
    fsdp_unit *ahead[] = {net.unit[0], net.unit[1], net.unit[2]};
    fsdp_unit *root = fsdp_root_unit(net.root);
    fsdp_status status = fsdp_unit_set_prefetch(root, FSDP_HOOK_PRE_FORWARD, ahead, 3, err);
    if (status == FSDP_OK)
        status = fsdp_root_begin_forward(net.root, err);
    if (status == FSDP_OK)
        status = fsdp_unit_pre_forward(root, err);
    int in_flight = net.root->context->gather_count;
    toy_free(&net);
    FSDP_TRY(status);
    EXPECT(in_flight == (setup->wrap.unlimited_gathers ? 3 : 2));
    return FSDP_OK;
}

Test(fsdp1, at_most_two_gathers_are_in_flight)
{
    net_setup setup = net_setup_default();
    expect_ranks(2, prefetch_all, &setup);
    setup.wrap.unlimited_gathers = true;
    expect_ranks(2, prefetch_all, &setup);
}

/* --- whole parameters ------------------------------------------------------------------------- */

static fsdp_status summon_and_look(toy *net, const fsdp_wrap_summon_opts *opts, fsdp_error *err)
{
    bool has_it = !opts || !opts->rank0_only || fsdp_world_rank(net->world) == 0;
    FSDP_TRY(fsdp_wrap_summon_full_params(net->wrap, NULL, opts, err));
    EXPECT(fsdp_wrap_training_state(net->wrap) == FSDP_WRAP_SUMMON_FULL_PARAMS);
    const float *weight = fsdp_param_data(net->weight[1]);
    EXPECT((weight != NULL) == has_it);
    for (int i = 0; weight && i < NET_HIDDEN * NET_HIDDEN; i++)
        EXPECT(weight[i] == uniform("layers.1.weight", i, NET_HIDDEN));
    return fsdp_wrap_summon_end(net->wrap, err);
}

static fsdp_status change(toy *net, const fsdp_wrap_summon_opts *opts, float value, fsdp_error *err)
{
    FSDP_TRY(fsdp_wrap_summon_full_params(net->wrap, NULL, opts, err));
    float *bias = fsdp_param_data(net->bias[0]), *weight = fsdp_param_data(net->weight[2]);
    bias[6] = value;
    weight[0] = value + 1;
    return fsdp_wrap_summon_end(net->wrap, err);
}

static fsdp_status expect_value(toy *net, float value, fsdp_error *err)
{
    const fsdp_wrap_summon_opts look = {.discard_changes = true};
    FSDP_TRY(fsdp_wrap_summon_full_params(net->wrap, NULL, &look, err));
    const float *bias = fsdp_param_data(net->bias[0]), *weight = fsdp_param_data(net->weight[2]);
    EXPECT(bias[6] == value && weight[0] == value + 1);
    return fsdp_wrap_summon_end(net->wrap, err);
}

static fsdp_status summon(toy *net, bool is_whole, fsdp_error *err)
{
    const fsdp_wrap_summon_opts rank0 = {.rank0_only = true, .discard_changes = true};
    const fsdp_wrap_summon_opts look = {.discard_changes = true};
    FSDP_TRY(summon_and_look(net, NULL, err));
    FSDP_TRY(summon_and_look(net, &rank0, err));
    FSDP_TRY(change(net, NULL, 5, err));
    FSDP_TRY(expect_value(net, 5, err));
    FSDP_TRY(change(net, &look, 7, err));
    return expect_value(net, is_whole ? 7 : 5, err);
}

static fsdp_status summon_rank(world_rank *rank, fsdp_error *err)
{
    const net_setup *setup = rank->user;
    bool is_whole = setup->wrap.unit.strategy == FSDP_WRAP_NO_SHARD;
    toy net;
    fsdp_status status = net_build(&net, rank->world, setup, err);
    if (status == FSDP_OK)
        status = summon(&net, is_whole || fsdp_world_size(rank->world) == 1, err);
    toy_free(&net);
    return status;
}

Test(fsdp1, whole_parameters_come_and_changes_stay)
{
    net_setup setup = net_setup_default();
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        for (int strategy = 0; strategy <= FSDP_WRAP_NO_SHARD; strategy++) {
            setup.wrap.unit.strategy = (fsdp_wrap_strategy)strategy;
            setup.wrap.use_orig_params = ranks != 2;
            setup.wrap.unit.param_dtype = ranks == 4 ? FSDP_BF16 : FSDP_DTYPE_NONE;
            expect_ranks(ranks, summon_rank, &setup);
        }
}

static fsdp_status refuse_summon(toy *net, fsdp_wrap_summon_opts opts, const char *reason,
                                 fsdp_error *err)
{
    fsdp_error why = {0};
    EXPECT(fsdp_wrap_summon_full_params(net->wrap, NULL, &opts, &why) == FSDP_ERR_USAGE);
    EXPECT(strstr(why.text, reason));
    return FSDP_OK;
}

static fsdp_status refuse_summons(toy *net, const net_setup *setup, fsdp_error *err)
{
    fsdp_error why = {0};
    fsdp_wrap_summon_opts rank0 = {.rank0_only = true}, offload = {.offload_to_cpu = true},
                          grads = {.with_grads = true},
                          both = {.with_grads = true, .offload_to_cpu = true};
    fsdp_optim *optim = NULL, *late = NULL;
    FSDP_TRY(refuse_summon(net, rank0, "discard_changes", err));
    if (setup->wrap.use_orig_params)
        FSDP_TRY(refuse_summon(net, both, "offload_to_cpu", err));
    else
        FSDP_TRY(refuse_summon(net, grads, "use_orig_params", err));
    if (setup->wrap.unit.strategy == FSDP_WRAP_NO_SHARD)
        FSDP_TRY(refuse_summon(net, offload, "NO_SHARD", err));
    EXPECT(fsdp_wrap_summon_end(net->wrap, &why) == FSDP_ERR_USAGE);
    FSDP_TRY(fsdp_sgd_create(net->root, NULL, &optim, err));
    FSDP_TRY(fsdp_wrap_summon_full_params(net->wrap, NULL, NULL, err));
    EXPECT(fsdp_wrap_summon_full_params(net->wrap, NULL, NULL, &why) == FSDP_ERR_USAGE);
    EXPECT(fsdp_root_begin_forward(net->root, &why) == FSDP_ERR_USAGE);
    EXPECT(fsdp_unit_unshard(net->unit[0], false, NULL, &why) == FSDP_ERR_USAGE);
    EXPECT(fsdp_sgd_create(net->root, NULL, &late, &why) == FSDP_ERR_USAGE);
    EXPECT(fsdp_optim_step(optim, &why) == FSDP_ERR_USAGE && strstr(why.text, "summon_end"));
    FSDP_TRY(fsdp_wrap_summon_end(net->wrap, err));
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    FSDP_TRY(refuse_summon(net, (fsdp_wrap_summon_opts){0}, "between steps", err));
    fsdp_optim_free(optim);
    return FSDP_OK;
}

static fsdp_status refuse_summons_rank(world_rank *rank, fsdp_error *err)
{
    toy net;
    fsdp_status status = net_build(&net, rank->world, rank->user, err);
    if (status == FSDP_OK)
        status = refuse_summons(&net, rank->user, err);
    toy_free(&net);
    return status;
}

Test(fsdp1, summoning_refuses_what_pytorch_refuses)
{
    net_setup setup = net_setup_default();
    expect_ranks(2, refuse_summons_rank, &setup);
    setup.wrap.use_orig_params = true;
    setup.wrap.unit.strategy = FSDP_WRAP_NO_SHARD;
    expect_ranks(2, refuse_summons_rank, &setup);
}

/* Gradients are those that the optimizer would see; changes of them reach it. */
static fsdp_status summon_grads(toy *net, fsdp_error *err)
{
    const fsdp_wrap_summon_opts opts = {.with_grads = true};
    double loss;
    FSDP_TRY(net_microbatch(net, 0, fsdp_world_rank(net->world), &loss, err));
    const fsdp_wrap_place place = fsdp_wrap_place_of(net->weight[1]);
    const float *shard = fsdp_param_shard_grad(net->weight[1]);
    FSDP_TRY(fsdp_wrap_summon_full_params(net->wrap, net->unit[1], &opts, err));
    float *grad = fsdp_param_grad(net->weight[1]);
    EXPECT(grad && !fsdp_param_grad(net->weight[0]));
    for (int64_t i = 0; i < place.local; i++)
        EXPECT(grad[place.first + i] == shard[i]);
    for (int i = 0; i < NET_HIDDEN * NET_HIDDEN; i++)
        grad[i] = (float)i;
    FSDP_TRY(fsdp_wrap_summon_end(net->wrap, err));
    for (int64_t i = 0; i < place.local; i++)
        EXPECT(shard[i] == (float)(place.first + i));
    return FSDP_OK;
}

static fsdp_status summon_grads_rank(world_rank *rank, fsdp_error *err)
{
    toy net;
    fsdp_status status = net_build(&net, rank->world, rank->user, err);
    if (status == FSDP_OK)
        status = summon_grads(&net, err);
    toy_free(&net);
    return status;
}

Test(fsdp1, gradients_are_summoned_with_their_unit_alone)
{
    net_setup setup = net_setup_default();
    setup.wrap.use_orig_params = true;
    expect_ranks(2, summon_grads_rank, &setup);
    expect_ranks(4, summon_grads_rank, &setup);
}

/* --- hooks ------------------------------------------------------------------------------------ */

/* The reduction that the library does without a hook. */
static fsdp_status mean_hook(void *state, fsdp_comm *comm, const fsdp_wrap_bucket *bucket,
                             fsdp_error *err)
{
    const fsdp_collective call = {.kind = bucket->shard ? FSDP_REDUCE_SCATTER : FSDP_ALL_REDUCE,
                                  .dtype = bucket->dtype,
                                  .in = bucket->grad,
                                  .out = bucket->shard ? bucket->shard : bucket->grad,
                                  .count = bucket->shard ? bucket->count / fsdp_comm_size(comm)
                                                         : bucket->count,
                                  .op = FSDP_REDUCE_AVG,
                                  .unit = bucket->unit};
    if (fsdp_comm_rank(comm) == 0)
        ++*(int *)state;
    return fsdp_comm_run(comm, &call, err);
}

static net_result plain_result, hooked_result;

static void run(int ranks, const net_setup *setup, net_result *result)
{
    fsdp_error err = {0};
    cr_assert_eq(net_run(ranks, "cpu", setup, result, &err), FSDP_OK, "%s", err.text);
}

Test(fsdp1, a_hook_replaces_the_mean_with_its_division)
{
    static const fsdp_wrap_strategy strategies[] = {FSDP_WRAP_FULL_SHARD, FSDP_WRAP_NO_SHARD};
    for (int i = 0; i < 2; i++) {
        int calls = 0;
        net_setup setup = net_setup_default();
        setup.wrap.unit.strategy = strategies[i];
        run(2, &setup, &plain_result);
        setup.hook = mean_hook;
        setup.hook_context = &calls;
        run(2, &setup, &hooked_result);
        cr_assert(net_equal(&plain_result, &hooked_result));
        cr_assert_eq(calls, 4 * setup.steps);
    }
}

static double largest_difference(const net_result *a, const net_result *b)
{
    double largest = 0;
    for (int l = 0; l < NET_LAYERS; l++)
        for (int i = 0; i < NET_WEIGHTS; i++)
            largest = fmax(largest, fabs((double)a->weights[l][i] - (double)b->weights[l][i]));
    return largest;
}

Test(fsdp1, compressed_gradients_are_close_and_not_the_same)
{
    static const fsdp_wrap_strategy strategies[] = {FSDP_WRAP_SHARD_GRAD_OP, FSDP_WRAP_NO_SHARD};
    static const fsdp_wrap_comm_hook hooks[] = {fsdp_wrap_fp16_compress_hook,
                                                fsdp_wrap_bf16_compress_hook};
    for (int i = 0; i < 4; i++) {
        net_setup setup = net_setup_default();
        setup.wrap.unit.strategy = strategies[i / 2];
        setup.is_sgd = true;
        run(4, &setup, &plain_result);
        setup.hook = hooks[i % 2];
        run(4, &setup, &hooked_result);
        double difference = largest_difference(&plain_result, &hooked_result);
        cr_assert(difference > 0 && difference < 2e-3, "%g", difference);
    }
}

static fsdp_status refuse_hooks(world_rank *rank, fsdp_error *err)
{
    const net_setup *setup = rank->user;
    fsdp_error why = {0};
    toy net;
    double loss;
    FSDP_TRY(net_build(&net, rank->world, setup, err));
    fsdp_status status = FSDP_OK;
    const char *reason = "hybrid";
    if (!setup->replicas && !setup->hook) {
        reason = "after the first forward";
        status = net_microbatch(&net, 0, 0, &loss, err);
    } else if (setup->hook) {
        reason = "a second communication hook";
    }
    if (status == FSDP_OK)
        (void)!fsdp_wrap_register_comm_hook(net.wrap, fsdp_wrap_bf16_compress_hook, NULL, &why);
    toy_free(&net);
    FSDP_TRY(status);
    EXPECT(says(&why, FSDP_ERR_USAGE, reason));
    return FSDP_OK;
}

Test(fsdp1, hooks_come_once_and_early_and_not_to_hybrids)
{
    net_setup setup = net_setup_default();
    expect_ranks(2, refuse_hooks, &setup);
    setup.hook = fsdp_wrap_fp16_compress_hook;
    expect_ranks(2, refuse_hooks, &setup);
    setup = net_setup_default();
    setup.wrap.unit.strategy = FSDP_WRAP_HYBRID_SHARD;
    setup.replicas = 2;
    expect_ranks(2, refuse_hooks, &setup);
}

/* --- clipping, groups, scaling ---------------------------------------------------------------- */

static void expect_close(const net_result *a, const net_result *b, int steps)
{
    for (int i = 0; i < steps; i++)
        cr_assert(fabs(a->norms[i] - b->norms[i]) <= 1e-6 * b->norms[i] && a->norms[i] > 0,
                  "step %d: %.9g and %.9g", i, a->norms[i], b->norms[i]);
    cr_assert_lt(largest_difference(a, b), 1e-6);
}

Test(fsdp1, the_norm_is_of_all_gradients_whatever_the_strategies)
{
    net_setup alone = net_setup_default(), setup = net_setup_default();
    alone.is_plain = alone.is_sgd = setup.is_sgd = true;
    alone.clip = setup.clip = 0.05;
    alone.microbatches = 4;
    alone.divide = 4;
    run(1, &alone, &plain_result);
    setup.wrap.unit.strategy = FSDP_WRAP_NO_SHARD; /* all of them */
    run(4, &setup, &hooked_result);
    expect_close(&hooked_result, &plain_result, setup.steps);
    setup.has_layer_opts = true; /* the root's bias alone is not cut */
    setup.layer.strategy = FSDP_WRAP_FULL_SHARD;
    run(4, &setup, &hooked_result);
    expect_close(&hooked_result, &plain_result, setup.steps);
    setup.replicas = 2; /* three kinds of one mesh */
    setup.layer.strategy = FSDP_WRAP_HYBRID_SHARD;
    run(4, &setup, &hooked_result);
    expect_close(&hooked_result, &plain_result, setup.steps);
}

static bool is_bias(void *user, const fsdp_param *param)
{
    (void)user;
    return strstr(fsdp_param_name(param), "bias") != NULL;
}

static bool is_weight(void *user, const fsdp_param *param)
{
    return !is_bias(user, param);
}

Test(fsdp1, groups_are_of_declared_parameters)
{
    static const fsdp_optim_group groups[] = {
        {.match = is_bias, .lr = 0.01}, {.match = is_weight, .lr = 1e-3, .weight_decay = 0.1}};
    net_setup alone = net_setup_default(), setup = net_setup_default();
    alone.is_plain = true;
    alone.microbatches = 2;
    alone.divide = 2;
    alone.groups = setup.groups = groups;
    alone.group_count = setup.group_count = 2;
    setup.wrap.use_orig_params = true;
    run(1, &alone, &plain_result);
    run(2, &setup, &hooked_result);
    cr_assert(net_equal(&plain_result, &hooked_result));
    alone.group_count = setup.group_count = 1; /* weights are not stepped */
    run(1, &alone, &plain_result);
    run(2, &setup, &hooked_result);
    cr_assert(net_equal(&plain_result, &hooked_result));
}

static fsdp_status find_infinity(world_rank *rank, fsdp_error *err)
{
    const fsdp_scaler_opts opts = {.init_scale = 1024};
    fsdp_scaler *scaler = NULL;
    toy net;
    double loss;
    bool skipped = false;
    FSDP_TRY(net_build(&net, rank->world, rank->user, err));
    fsdp_status status = fsdp_scaler_create(&opts, &scaler, err);
    if (status == FSDP_OK)
        status = net_microbatch(&net, 0, fsdp_world_rank(rank->world), &loss, err);
    float *grad = fsdp_param_shard_grad(net.own);
    if (status == FSDP_OK && fsdp_world_rank(rank->world) == 1)
        grad[0] = INFINITY;
    if (status == FSDP_OK)
        status = fsdp_scaler_step(scaler, net.optim, &skipped, err);
    bool is_less = scaler && fsdp_scaler_scale(scaler) == opts.init_scale / 2;
    fsdp_scaler_free(scaler);
    toy_free(&net);
    FSDP_TRY(status);
    EXPECT(skipped && is_less);
    return FSDP_OK;
}

Test(fsdp1, one_rank_that_finds_an_infinity_stops_all)
{
    net_setup setup = net_setup_default();
    expect_ranks(2, find_infinity, &setup);
}

/* --- dtypes, pointers ------------------------------------------------------------------------- */

static fsdp_status look_at_dtypes(world_rank *rank, fsdp_error *err)
{
    fsdp_error why = {0};
    toy net;
    fsdp_status status = net_build(&net, rank->world, rank->user, err);
    bool is_narrow = status == FSDP_OK &&
                     fsdp_param_describe(net.bias[0]).data_dtype == FSDP_BF16 &&
                     net.unit[0]->opts.reduce_dtype == FSDP_BF16;
    bool is_aligned = status == FSDP_OK && fsdp_wrap_place_of(net.bias[0]).offset == 40; /* of 35 */
    void *early = status == FSDP_OK ? fsdp_param_data(net.bias[0]) : NULL;
    (void)!fsdp_root_begin_forward(net.root, &why);
    toy_free(&net);
    FSDP_TRY(status);
    EXPECT(is_narrow && is_aligned && !early);
    EXPECT(says(&why, FSDP_ERR_USAGE, "layers.0"));
    return FSDP_OK;
}

Test(fsdp1, gradients_are_reduced_in_the_dtype_of_the_mathematics)
{
    net_setup setup = net_setup_default();
    setup.wrap.unit.param_dtype = FSDP_BF16;
    setup.wrap.use_orig_params = true;
    expect_ranks(2, look_at_dtypes, &setup);
}
