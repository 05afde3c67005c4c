/* Wrong options and calls, one by one: each is an error that names the mistake. */
#include "tests/unit/runtime/expect_toy.h"

#include <math.h>

/* An empty model. */
static void expect_ok(int ranks, toy_body body)
{
    expect_toy_on("cpu-async", (toy_case){1, {ranks}, {"dp"}, NULL, body, NULL, {0}});
}

static fsdp_status add_weight(toy *net, fsdp_dtype dtype, fsdp_param **param_out, fsdp_error *err)
{
    return fsdp_model_add(
        net->model,
        &(fsdp_param_spec){.name = "w", .dtype = dtype, .ndim = 2, .shape = (int64_t[]){4, 3}},
        param_out, err);
}

static fsdp_status make_root(toy *net, fsdp_error *err)
{
    return fsdp_root_create(net->model, &net->opts, &net->root, err);
}

/* --- declarations ----------------------------------------------------------------------------- */

static fsdp_status place_outside(toy *net, fsdp_error *err)
{
    fsdp_param *weight;
    FSDP_TRY(add_weight(net, FSDP_F32, &weight, err));
    static const int outside[] = {-1, 2, 100000};
    for (size_t i = 0; i < 3; i++) {
        const fsdp_placement placement = {FSDP_SHARD, outside[i], 0};
        EXPECT_REFUSAL(fsdp_param_set_placement(weight, "dp", placement, why), "'w' of 2 dims");
    }
    return fsdp_param_set_placement(weight, "tp", (fsdp_placement){FSDP_REPLICATE, 7, 0}, err);
}

Test(wrong_use, a_placement_is_of_a_dim_that_is_there)
{
    expect_ok(1, place_outside);
}

static fsdp_status give_dtypes(toy *net, fsdp_error *err)
{
    fsdp_param *weight;
    fsdp_unit_opts opts[3] = {net->opts, net->opts, net->opts};
    FSDP_TRY(add_weight(net, FSDP_F32, &weight, err));
    opts[0].param_dtype = FSDP_I64;
    opts[1].reduce_dtype = (fsdp_dtype)100000;
    opts[2].output_dtype = FSDP_BOOL;
    EXPECT_REFUSAL(fsdp_unit_create(net->model, "w", &opts[0], NULL, why),
                   "param_dtype cannot be i64");
    EXPECT_REFUSAL(fsdp_unit_create(net->model, "w", &opts[1], NULL, why),
                   "reduce_dtype cannot be ?");
    EXPECT_REFUSAL(fsdp_unit_create(net->model, "w", &opts[2], NULL, why),
                   "output_dtype cannot be");
    FSDP_TRY(make_root(net, err));
    fsdp_adamw_opts adamw = {.weight_decay = 0.01};
    adamw.moment_dtype = FSDP_I32;
    EXPECT_REFUSAL(fsdp_adamw_create(net->root, &adamw, &net->optim, why),
                   "moment_dtype cannot be i32");
    fsdp_sgd_opts sgd = {0};
    sgd.moment_dtype = FSDP_U8;
    EXPECT_REFUSAL(fsdp_sgd_create(net->root, &sgd, &net->optim, why), "moment_dtype cannot be u8");
    return FSDP_OK;
}

Test(wrong_use, dtypes_of_units_and_moments_are_floating)
{
    expect_ok(1, give_dtypes);
}

static fsdp_status end_in_forward(toy *net, fsdp_error *err)
{
    fsdp_param *weight;
    FSDP_TRY(add_weight(net, FSDP_F32, &weight, err));
    FSDP_TRY(make_root(net, err));
    FSDP_TRY(fsdp_root_set_manual_backward_finalization(net->root, true, err));
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    EXPECT_REFUSAL(fsdp_root_finalize_backward(net->root, false, NULL, why),
                   "finalize_backward came before fsdp_root_end_forward");
    EXPECT_REFUSAL(fsdp_root_end_backward(net->root, why),
                   "end_backward came before fsdp_root_end_forward");
    FSDP_TRY(fsdp_root_end_forward(net->root, err));
    return fsdp_root_finalize_backward(net->root, false, NULL, err);
}

Test(wrong_use, no_backward_ends_inside_a_forward)
{
    expect_ok(1, end_in_forward);
}

static fsdp_status wrap_wrongly(toy *net, fsdp_error *err)
{
    fsdp_param *weight;
    fsdp_wrap *wrap;
    fsdp_wrap_opts opts[4];
    for (int i = 0; i < 4; i++)
        opts[i] = (fsdp_wrap_opts){0};
    FSDP_TRY(add_weight(net, FSDP_F32, &weight, err));
    opts[0].unit.param_dtype = (fsdp_dtype)100000;
    opts[0].use_orig_params = true;
    opts[1].unit.reduce_dtype = FSDP_I8;
    opts[2].buffer_dtype = (fsdp_dtype)100000;
    opts[3].unit.backward_prefetch = (fsdp_wrap_prefetch)100000;
    EXPECT_REFUSAL(fsdp_wrap_create(net->model, &opts[0], &wrap, why), "param_dtype cannot be ?");
    EXPECT_REFUSAL(fsdp_wrap_create(net->model, &opts[1], &wrap, why), "reduce_dtype cannot be i8");
    EXPECT_REFUSAL(fsdp_wrap_create(net->model, &opts[2], &wrap, why), "buffer_dtype cannot be ?");
    EXPECT_REFUSAL(fsdp_wrap_create(net->model, &opts[3], &wrap, why),
                   "100000 is not a backward_prefetch");
    return FSDP_OK;
}

Test(wrong_use, so_are_those_of_the_fsdp1_face)
{
    expect_ok(1, wrap_wrongly);
}

/* --- no options ------------------------------------------------------------------------------- */

static fsdp_status give_no_opts(toy *net, fsdp_error *err)
{
    double norm = -1;
    fsdp_param *weight;
    FSDP_TRY(add_weight(net, FSDP_F32, &weight, err));
    EXPECT_REFUSAL(fsdp_unit_create(net->model, "w", NULL, NULL, why), "unit 'w' has no mesh");
    EXPECT_REFUSAL(fsdp_unit_create_list(net->model, (const char *[]){"w"}, 1, NULL, NULL, why),
                   "unit 'w' has no mesh");
    EXPECT_REFUSAL(fsdp_root_create(net->model, NULL, &net->root, why), "unit 'root' has no mesh");
    FSDP_TRY(make_root(net, err));
    FSDP_TRY(fsdp_root_clip_grad_norm(net->root, NULL, &norm, err));
    EXPECT(norm == 0);
    return FSDP_OK;
}

static fsdp_status wrap_without_opts(toy *net, fsdp_error *err)
{
    fsdp_param *weight;
    fsdp_wrap *wrap;
    FSDP_TRY(add_weight(net, FSDP_F32, &weight, err));
    FSDP_TRY(fsdp_wrap_create(net->model, NULL, &wrap, err));
    bool is_wrapped = fsdp_wrap_unit(wrap, "") == fsdp_root_unit(fsdp_wrap_root(wrap));
    fsdp_wrap_free(wrap);
    EXPECT(is_wrapped);
    return FSDP_OK;
}

Test(wrong_use, options_may_be_null)
{
    expect_ok(2, give_no_opts);
    expect_ok(2, wrap_without_opts);
}

/* --- numbers ---------------------------------------------------------------------------------- */

static fsdp_status give_numbers(toy *net, fsdp_error *err)
{
    fsdp_param *weight;
    FSDP_TRY(add_weight(net, FSDP_F32, &weight, err));
    FSDP_TRY(make_root(net, err));
    fsdp_optim_group group = {.lr = NAN};
    fsdp_adamw_opts adamw = {.weight_decay = 0.01};
    adamw.groups = &group;
    adamw.group_count = 1;
    EXPECT_REFUSAL(fsdp_adamw_create(net->root, &adamw, &net->optim, why), "lr cannot be nan");
    group = (fsdp_optim_group){.lr = 1, .weight_decay = -1};
    EXPECT_REFUSAL(fsdp_adamw_create(net->root, &adamw, &net->optim, why),
                   "weight_decay cannot be -1");
    fsdp_sgd_opts sgd = {0};
    sgd.dampening = INFINITY;
    EXPECT_REFUSAL(fsdp_sgd_create(net->root, &sgd, &net->optim, why), "dampening cannot be inf");
    sgd.dampening = 0;
    FSDP_TRY(fsdp_sgd_create(net->root, &sgd, &net->optim, err));
    EXPECT_REFUSAL(fsdp_optim_set_lr(net->optim, 0, NAN, why), "lr cannot be nan");
    EXPECT_REFUSAL(fsdp_optim_set_lr(net->optim, 1, 1, why), "of group 1: the optimizer has 1");
    EXPECT(fsdp_optim_lr(net->optim, 0) == 1e-3 && isnan(fsdp_optim_lr(net->optim, 1)));
    FSDP_TRY(fsdp_optim_set_lr(net->optim, 0, 0.5, err));
    EXPECT(fsdp_optim_lr(net->optim, 0) == 0.5);
    return FSDP_OK;
}

Test(wrong_use, numbers_of_optimizers_are_looked_at)
{
    expect_ok(1, give_numbers);
}

/* --- sizes ------------------------------------------------------------------------------------ */

/* Each size is valid, but all together are 2^64 bytes. */
static fsdp_status declare_many(toy *net, bool are_buffers, fsdp_error *err)
{
    const int64_t size = (int64_t)1 << 59;
    for (int i = 0; i < 32; i++) {
        const char name[] = {(char)('A' + i), '\0'};
        if (are_buffers)
            FSDP_TRY(fsdp_model_add(
                net->model,
                &(fsdp_param_spec){
                    .name = name, .dtype = FSDP_U8, .ndim = 1, .shape = &size, .is_buffer = true},
                NULL, err));
        else
            FSDP_TRY(fsdp_model_add(
                net->model,
                &(fsdp_param_spec){.name = name, .dtype = FSDP_U8, .ndim = 1, .shape = &size}, NULL,
                err));
    }
    return FSDP_OK;
}

static fsdp_status make_too_large(toy *net, fsdp_error *err)
{
    FSDP_TRY(declare_many(net, false, err));
    EXPECT_REFUSAL(make_root(net, why), "unit root is too large");
    return FSDP_OK;
}

static fsdp_status make_too_large_buffers(toy *net, fsdp_error *err)
{
    FSDP_TRY(declare_many(net, true, err));
    EXPECT_REFUSAL(make_root(net, why), "more bytes than can be counted");
    return FSDP_OK;
}

static fsdp_status make_too_large_inputs(toy *net, fsdp_error *err)
{
    const size_t half = SIZE_MAX / 2;
    const fsdp_extension extension = {.count = 1, .sizes = &half};
    fsdp_param *weight;
    FSDP_TRY(add_weight(net, FSDP_F32, &weight, err));
    FSDP_TRY(fsdp_param_set_extension(weight, &extension, err));
    EXPECT_REFUSAL(make_root(net, why), "unit root is too large");
    return FSDP_OK;
}

Test(wrong_use, what_is_too_large_to_count_is_not_allocated)
{
    expect_ok(2, make_too_large);
    expect_ok(1, make_too_large_buffers);
    expect_ok(2, make_too_large_inputs);
}

/* --- errors on some ranks --------------------------------------------------------------------- */

/* Three ranks on one host, one on another: only on the second one do the ranks of a host divide 4. */
static fsdp_status wrap_on_uneven_hosts(toy *net, fsdp_error *err)
{
    fsdp_world *world = net->rank->world;
    fsdp_wrap_opts opts = {0};
    fsdp_wrap *wrap;
    world->parts.local_size = fsdp_world_rank(world) == 3 ? 1 : 3;
    opts.unit.strategy = FSDP_WRAP_HYBRID_SHARD;
    EXPECT_REFUSAL(fsdp_wrap_create(net->model, &opts, &wrap, why),
                   "hosts have different numbers of ranks");
    return FSDP_OK;
}

Test(wrong_use, all_ranks_learn_that_hosts_differ)
{
    expect_ok(4, wrap_on_uneven_hosts);
}

/* --- at the wrong time ------------------------------------------------------------------------ */

static fsdp_status unscale_inside(toy *net, fsdp_error *err)
{
    const fsdp_scaler_opts opts = {0};
    fsdp_scaler *scaler;
    fsdp_param *weight;
    FSDP_TRY(add_weight(net, FSDP_F32, &weight, err));
    FSDP_TRY(make_root(net, err));
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    FSDP_TRY(fsdp_scaler_create(&opts, &scaler, err));
    fsdp_error why = {0};
    fsdp_status status = fsdp_scaler_unscale(scaler, net->root, &why);
    fsdp_scaler_free(scaler);
    EXPECT(status == FSDP_ERR_USAGE && strstr(why.text, "cannot unscale gradients inside a step"));
    return fsdp_root_end_forward(net->root, err);
}

Test(wrong_use, gradients_are_not_unscaled_inside_a_step)
{
    expect_ok(1, unscale_inside);
}

static void place_by_name(void *user, const fsdp_param *param, fsdp_param_place *place)
{
    const toy *net = user;
    if (fsdp_param_name(param)[0] == 'w')
        place->mesh = net->other_mesh;
}

static fsdp_status run_nothing(void *user, fsdp_comm *comm, const fsdp_collective *call,
                               fsdp_error *err)
{
    (void)user;
    (void)comm;
    (void)call;
    (void)err;
    return FSDP_OK;
}

/* The groups of a unit are known when the root is created. */
static fsdp_status customise_two_groups(toy *net, fsdp_error *err)
{
    const fsdp_custom_collective custom = {.run = run_nothing};
    fsdp_param *weight;
    fsdp_unit *unit;
    FSDP_TRY(add_weight(net, FSDP_F32, &weight, err));
    FSDP_TRY(fsdp_model_add(
        net->model,
        &(fsdp_param_spec){.name = "b", .dtype = FSDP_F32, .ndim = 1, .shape = (int64_t[]){2}},
        &weight, err));
    FSDP_TRY(fsdp_world_mesh(net->world, 1, (int64_t[]){1}, (const char *[]){"x"}, &net->other_mesh,
                             err));
    net->opts.placement = place_by_name;
    net->opts.context = net;
    FSDP_TRY(
        fsdp_unit_create_list(net->model, (const char *[]){"w", "b"}, 2, &net->opts, &unit, err));
    FSDP_TRY(fsdp_unit_set_custom_collective(unit, FSDP_ALL_GATHER, &custom, err));
    EXPECT_REFUSAL(make_root(net, why), "has 2 groups of parameters");
    return FSDP_OK;
}

Test(wrong_use, a_custom_collective_serves_one_group)
{
    expect_ok(1, customise_two_groups);
}
