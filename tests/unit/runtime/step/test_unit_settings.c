/*
 * Settings of a unit, and when they apply: options that are checked at its creation, setters inside a
 * step, hooks that are called twice, and the end of a backward.
 */
#include "tests/unit/runtime/expect_toy.h"

enum { LAYERS = 2, RANKS = 2, ROWS = 4 };

/* "L0.w" and "L1.w"; the body makes units of them, or does not. */
static fsdp_status declare(toy *net, fsdp_error *err)
{
    return toy_add_weights(net, LAYERS, 1, (int64_t[]){ROWS}, err);
}

static void expect_ok(toy_body body)
{
    expect_toy_on_line(RANKS, declare, body);
}

static fsdp_status forward(toy *net, fsdp_error *err)
{
    return toy_forward(net, NULL, err);
}

static fsdp_status backward(toy *net, fsdp_error *err)
{
    return toy_backward(net, toy_add_ones, err);
}

static fsdp_status expect_grad(fsdp_param *weight, float value, fsdp_error *err)
{
    const float *grad = fsdp_param_shard_grad(weight);
    EXPECT(grad && grad[0] == value && grad[1] == value);
    return FSDP_OK;
}

/* --- options ---------------------------------------------------------------------------------- */

static fsdp_dtype dtype_by_name(void *user, const fsdp_param *param)
{
    static const fsdp_dtype answers[] = {FSDP_DTYPE_NONE, FSDP_F32, FSDP_BF16, FSDP_F16};
    (void)user;
    return answers[fsdp_param_name(param)[0] - 'a'];
}

/* "a" gets none, "b" its own, "c" the unit's, "d" another one. */
static fsdp_status ask_for_dtypes(toy *net, fsdp_error *err)
{
    static const fsdp_dtype expected[] = {FSDP_BF16, FSDP_F32, FSDP_BF16};
    fsdp_unit_opts opts = {.mesh = net->mesh};
    opts.param_dtype = FSDP_BF16;
    opts.param_dtype_of = dtype_by_name;
    for (int i = 0; i < 4; i++) {
        const char name[] = {(char)('a' + i), '\0'};
        fsdp_param *param;
        fsdp_unit *unit;
        FSDP_TRY(fsdp_model_add(
            net->model,
            &(fsdp_param_spec){
                .name = name, .dtype = FSDP_F32, .ndim = 1, .shape = (int64_t[]){ROWS}},
            &param, err));
        if (i == 3) {
            EXPECT_REFUSAL(fsdp_unit_create(net->model, name, &opts, &unit, why),
                           "param_dtype_of gives f16 for 'd'");
            break;
        }
        FSDP_TRY(fsdp_unit_create(net->model, name, &opts, &unit, err));
        EXPECT(fsdp_param_describe(param).data_dtype == expected[i]);
        EXPECT(fsdp_param_describe(param).dtype == FSDP_F32);
        EXPECT(fsdp_unit_input_dtype(unit, FSDP_F32) == FSDP_BF16); /* inputs go by the unit's */
    }
    return FSDP_OK;
}

Test(unit_settings, dtypes_of_parameters_are_the_units_or_their_own)
{
    expect_ok(ask_for_dtypes);
}

/* The unit reports the error, not the root later. */
static fsdp_status reshard_to_three(toy *net, fsdp_error *err)
{
    fsdp_unit_opts opts = {.mesh = net->mesh};
    opts.reshard_after_forward = 3;
    EXPECT_REFUSAL(fsdp_unit_create(net->model, "L0", &opts, &net->unit[0], why),
                   "unit L0: reshard_after_forward is 3, which does not divide the 2 ranks");
    opts.reshard_after_forward = 4;
    EXPECT_REFUSAL(fsdp_unit_create(net->model, "L0", &opts, &net->unit[0], why),
                   "does not divide the 2 ranks");
    EXPECT_REFUSAL(fsdp_root_create(net->model, &opts, &net->root, why),
                   "unit : reshard_after_forward is 4");
    opts.shard_dims = "pd";
    EXPECT_REFUSAL(fsdp_unit_create(net->model, "L0", &opts, &net->unit[0], why),
                   "unit L0: its mesh has no dim 'pd'");
    FSDP_TRY(toy_wrap(net, err));
    FSDP_TRY(forward(net, err));
    return backward(net, err);
}

Test(unit_settings, a_number_that_does_not_divide_the_ranks_is_told_at_once)
{
    expect_ok(reshard_to_three);
}

static bool ignore_last(void *user, const fsdp_param *param)
{
    (void)user;
    return strcmp(fsdp_param_name(param), "L1.w") == 0;
}

static fsdp_status ignore_one(toy *net, fsdp_error *err)
{
    fsdp_unit_opts opts = {.mesh = net->mesh};
    opts.ignore = ignore_last;
    FSDP_TRY(fsdp_root_create(net->model, &opts, &net->root, err));
    fsdp_box box;
    EXPECT(fsdp_param_shard(net->weight[1], &box) == fsdp_param_data(net->weight[1]));
    EXPECT(box.len[0] == ROWS);
    EXPECT(!fsdp_param_grad(net->weight[1]));
    EXPECT_REFUSAL(fsdp_param_error(net->weight[1], why),
                   "units ignore it, so its gradient is the caller's");
    return FSDP_OK;
}

Test(unit_settings, the_gradient_of_an_ignored_parameter_is_the_callers)
{
    expect_ok(ignore_one);
}

/* --- contradictions ----------------------------------------------------------------------------- */

static fsdp_status contradict_before(toy *net, fsdp_error *err)
{
    const char *const twice[] = {"L0", "L1", "L0"};
    fsdp_unit_opts opts = {.mesh = net->mesh};
    EXPECT_REFUSAL(fsdp_unit_create_list(net->model, twice, 3, &opts, &net->unit[0], why),
                   "has the member 'L0' twice");
    EXPECT_REFUSAL(fsdp_unit_create_list(net->model, twice, 0, &opts, &net->unit[0], why),
                   "at least one member");
    EXPECT_REFUSAL(fsdp_model_add(net->model,
                                  &(fsdp_param_spec){.name = "scalar", .dtype = FSDP_F32}, NULL,
                                  why),
                   "cannot shard 'scalar': it has no dims");
    EXPECT_REFUSAL(
        fsdp_model_add(net->model,
                       &(fsdp_param_spec){
                           .name = "L0.w", .dtype = FSDP_F32, .ndim = 1, .shape = (int64_t[]){1}},
                       NULL, why),
        "cannot declare 'L0.w': a parameter of this name exists");
    opts.shard_dims = opts.replicate_dims = "dp";
    EXPECT_REFUSAL(fsdp_unit_create(net->model, "L0", &opts, &net->unit[0], why),
                   "a mesh dim both shards and replicates");
    opts = (fsdp_unit_opts){0};
    EXPECT_REFUSAL(fsdp_unit_create(net->model, "L0", &opts, &net->unit[0], why), "has no mesh");
    opts = (fsdp_unit_opts){.mesh = net->mesh};
    opts.reshard_after_forward = -2;
    EXPECT_REFUSAL(fsdp_unit_create(net->model, "L0", &opts, &net->unit[0], why),
                   "reshard_after_forward is -2");
    return FSDP_OK;
}

static fsdp_status contradict_after(toy *net, fsdp_error *err)
{
    const fsdp_placement whole = {FSDP_REPLICATE, 0, 0};
    const fsdp_custom_collective custom = {0};
    fsdp_unit_opts opts = {.mesh = net->mesh};
    fsdp_root *root = NULL;
    fsdp_unit *unit;
    EXPECT_REFUSAL(fsdp_root_create(net->model, &opts, &root, why), "already has a root");
    EXPECT_REFUSAL(fsdp_unit_create(net->model, "L0.w", &opts, &unit, why), "cannot make unit");
    EXPECT_REFUSAL(
        fsdp_model_add(net->model,
                       &(fsdp_param_spec){
                           .name = "late", .dtype = FSDP_F32, .ndim = 1, .shape = (int64_t[]){1}},
                       NULL, why),
        "cannot declare 'late'");
    EXPECT_REFUSAL(fsdp_param_set_placement(net->weight[0], "tp", whole, why),
                   "its unit exists; set it before");
    EXPECT_REFUSAL(fsdp_unit_set_gradient_divide_factor(net->unit[0], 0, why), "not 0");
    EXPECT_REFUSAL(
        fsdp_unit_set(net->unit[0], FSDP_UNIT_REDUCE_SCATTER_MAX_INPUT_BUFFERS, 0, true, why),
        "not 0");
    EXPECT_REFUSAL(fsdp_unit_set(net->unit[0], (fsdp_unit_setting)100, 1, true, why),
                   "has no setting 100");
    EXPECT_REFUSAL(fsdp_unit_set_prefetch(net->unit[0], FSDP_HOOK_POST_FORWARD, NULL, 0, why),
                   "by pre_forward or pre_backward only");
    EXPECT_REFUSAL(fsdp_unit_set_custom_collective(net->unit[0], FSDP_BROADCAST, NULL, why),
                   "only all-gather and reduce-scatter");
    EXPECT_REFUSAL(fsdp_unit_member_hook(net->unit[0], 1, FSDP_HOOK_PRE_FORWARD, why),
                   "member 1 does not exist");
    EXPECT_REFUSAL(fsdp_root_end_forward(net->root, why), "came without begin_forward");
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    EXPECT_REFUSAL(fsdp_root_begin_forward(net->root, why), "came twice without end_forward");
    FSDP_TRY(fsdp_root_end_forward(net->root, err));
    EXPECT_REFUSAL(fsdp_root_finalize_backward(net->root, false, NULL, why),
                   "needs fsdp_root_set_manual_backward_finalization");
    FSDP_TRY(fsdp_unit_set(net->unit[0], FSDP_UNIT_ALLOCATE_MEMORY_FROM_PROCESS_GROUP, true, false,
                           err));
    FSDP_TRY(fsdp_unit_set_custom_collective(net->unit[0], FSDP_ALL_GATHER, &custom, err));
    EXPECT_REFUSAL(
        fsdp_unit_set(net->unit[0], FSDP_UNIT_ALLOCATE_MEMORY_FROM_PROCESS_GROUP, true, false, why),
        "which provides its own memory");
    return fsdp_unit_set_custom_collective(net->unit[0], FSDP_ALL_GATHER, NULL, err);
}

static fsdp_status contradict(toy *net, fsdp_error *err)
{
    FSDP_TRY(contradict_before(net, err));
    FSDP_TRY(toy_wrap(net, err));
    FSDP_TRY(contradict_after(net, err));
    FSDP_TRY(forward(net, err)); /* the root is still usable */
    FSDP_TRY(backward(net, err));
    return expect_grad(net->weight[0], 1, err);
}

Test(unit_settings, contradictions_are_refused_and_break_nothing)
{
    expect_ok(contradict);
}

/* Ranks keep slices of whole parameters, so parts of tensor parallelism cannot be resharded to a number. */
static fsdp_status reshard_parts(toy *net, fsdp_error *err)
{
    fsdp_mesh *mesh;
    FSDP_TRY(fsdp_world_mesh(net->rank->world, 2, (int64_t[]){RANKS, 2},
                             (const char *[]){"dp", "tp"}, &mesh, err));
    fsdp_unit_opts opts = {.mesh = mesh};
    opts.shard_dims = "dp";
    opts.reshard_after_forward = 2;
    fsdp_error why = {0};
    fsdp_status status = fsdp_unit_create(net->model, "L0", &opts, &net->unit[0], &why);
    fsdp_mesh_free(mesh);
    EXPECT(status == FSDP_ERR_USAGE &&
           strstr(why.text, "cannot be combined with tensor parallelism"));
    return FSDP_OK;
}

Test(unit_settings, no_number_of_ranks_beside_tensor_parallelism)
{
    expect_toy_on("cpu", (toy_case){1, {2 * RANKS}, {"dp"}, declare, reshard_parts, NULL, {0}});
}

/* --- setters inside a step ---------------------------------------------------------------------- */

/* Switches every setting that only later calls use, on and off. */
static fsdp_status flip_all(fsdp_unit *unit, bool to, fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_set(unit, FSDP_UNIT_RESHARD_AFTER_FORWARD, to, true, err));
    FSDP_TRY(fsdp_unit_set(unit, FSDP_UNIT_RESHARD_AFTER_BACKWARD, to, true, err));
    FSDP_TRY(fsdp_unit_set(unit, FSDP_UNIT_KEEP_UNSHARDED_STORAGE, !to, true, err));
    FSDP_TRY(fsdp_unit_set(unit, FSDP_UNIT_UNSHARD_ASYNC_OP, !to, true, err));
    FSDP_TRY(fsdp_unit_set(unit, FSDP_UNIT_FORCE_SUM_REDUCTION_FOR_COMMS, !to, false, err));
    FSDP_TRY(fsdp_unit_set(unit, FSDP_UNIT_REDUCE_SCATTER_UNUSED_PARAMS, !to, true, err));
    FSDP_TRY(fsdp_unit_set(unit, FSDP_UNIT_REQUIRES_ALL_REDUCE, to, true, err));
    FSDP_TRY(
        fsdp_unit_set(unit, FSDP_UNIT_REDUCE_SCATTER_MAX_INPUT_BUFFERS, to ? 1 : 2, true, err));
    FSDP_TRY(fsdp_unit_set_prefetch(unit, FSDP_HOOK_PRE_BACKWARD, &unit, to ? 0 : 1, err));
    return fsdp_unit_set_prefetch(unit, FSDP_HOOK_PRE_FORWARD, &unit, to ? 0 : 1, err);
}

static fsdp_status refuse_inside(fsdp_unit *unit, fsdp_error *err)
{
    const fsdp_custom_collective none = {0};
    const char inside[] = "cannot change inside a forward or backward";
    EXPECT_REFUSAL(fsdp_unit_set(unit, FSDP_UNIT_SEPARATE_REDUCE_SCATTER_GROUP, true, false, why),
                   inside);
    EXPECT_REFUSAL(fsdp_unit_set_custom_collective(unit, FSDP_ALL_GATHER, &none, why), inside);
    EXPECT_REFUSAL(fsdp_unit_set_custom_collective(unit, FSDP_REDUCE_SCATTER, &none, why), inside);
    EXPECT_REFUSAL(
        fsdp_unit_set(unit, FSDP_UNIT_ALLOCATE_MEMORY_FROM_PROCESS_GROUP, true, false, why),
        inside);
    return FSDP_OK;
}

static fsdp_status forward_with_changes(toy *net, fsdp_unit *top, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    for (int i = 0; i < LAYERS; i++) {
        FSDP_TRY(flip_all(top, i > 0, err));
        FSDP_TRY(fsdp_unit_pre_forward(net->unit[i], err));
        FSDP_TRY(refuse_inside(net->unit[i], err));
        FSDP_TRY(flip_all(top, i == 0, err));
        FSDP_TRY(fsdp_unit_post_forward(net->unit[i], err));
    }
    return fsdp_root_end_forward(net->root, err);
}

static fsdp_status change_in_steps(toy *net, fsdp_error *err)
{
    FSDP_TRY(toy_wrap(net, err));
    fsdp_unit *top = fsdp_root_unit(net->root);
    for (int step = 0; step < 3; step++) {
        FSDP_TRY(forward_with_changes(net, top, err));
        for (int i = LAYERS - 1; i >= 0; i--) {
            FSDP_TRY(fsdp_unit_pre_backward(net->unit[i], err));
            FSDP_TRY(flip_all(top, i == 0, err));
            FSDP_TRY(refuse_inside(net->unit[i], err));
            FSDP_TRY(toy_add_ones(net, i, err));
            FSDP_TRY(fsdp_unit_post_backward(net->unit[i], err));
            FSDP_TRY(flip_all(top, i > 0, err));
        }
        FSDP_TRY(flip_all(top, true, err));
        FSDP_TRY(fsdp_root_end_backward(net->root, err));
        FSDP_TRY(expect_grad(net->weight[0], 1, err));
        FSDP_TRY(expect_grad(net->weight[1], 1, err));
        fsdp_root_zero_grad(net->root);
    }
    return fsdp_unit_set(top, FSDP_UNIT_SEPARATE_REDUCE_SCATTER_GROUP, true, true, err);
}

Test(unit_settings, setters_inside_a_step_are_gone_by_or_refused)
{
    expect_ok(change_in_steps);
}

/* Kept gradients lie in memory of the communicator that reduces them. */
static fsdp_status change_group_over_kept(toy *net, fsdp_error *err)
{
    FSDP_TRY(toy_wrap(net, err));
    fsdp_unit *top = fsdp_root_unit(net->root);
    for (int i = 0; i < LAYERS; i++)
        FSDP_TRY(fsdp_unit_set(net->unit[i], FSDP_UNIT_ALLOCATE_MEMORY_FROM_PROCESS_GROUP, true,
                               false, err));
    FSDP_TRY(fsdp_unit_set(top, FSDP_UNIT_REQUIRES_GRADIENT_SYNC, false, true, err));
    FSDP_TRY(forward(net, err));
    FSDP_TRY(backward(net, err));
    FSDP_TRY(fsdp_unit_set(top, FSDP_UNIT_SEPARATE_REDUCE_SCATTER_GROUP, true, true, err));
    FSDP_TRY(fsdp_unit_set(top, FSDP_UNIT_REQUIRES_GRADIENT_SYNC, true, true, err));
    FSDP_TRY(forward(net, err));
    FSDP_TRY(backward(net, err));
    return expect_grad(net->weight[0], 2, err);
}

Test(unit_settings, what_was_kept_is_reduced_by_another_group)
{
    expect_ok(change_group_over_kept);
}

/* --- hooks that come twice ---------------------------------------------------------------------- */

static fsdp_status come_twice(toy *net, fsdp_error *err)
{
    FSDP_TRY(toy_wrap(net, err));
    net->rank->notes_collectives = true;
    FSDP_TRY(fsdp_unit_set_prefetch(net->unit[0], FSDP_HOOK_PRE_FORWARD, &net->unit[1], 1, err));
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(net->unit[0], err));
    FSDP_TRY(fsdp_unit_pre_forward(net->unit[1], err));
    FSDP_TRY(fsdp_unit_post_forward(net->unit[1], err));
    FSDP_TRY(fsdp_unit_pre_forward(net->unit[0], err)); /* does not prefetch L1 again */
    FSDP_TRY(fsdp_unit_post_forward(net->unit[0], err));
    EXPECT_REFUSAL(fsdp_unit_post_forward(net->unit[0], why), "came without its pre_forward");
    FSDP_TRY(fsdp_root_end_forward(net->root, err));
    EXPECT(count_events(net->rank, "AG L0") == 1 && count_events(net->rank, "AG L1") == 1);
    for (int i = 0; i < LAYERS; i++) {
        FSDP_TRY(fsdp_unit_pre_backward(net->unit[i], err));
        FSDP_TRY(toy_backward_layer(net, i, toy_add_ones, err));
        FSDP_TRY(fsdp_unit_post_backward(net->unit[i], err));
    }
    FSDP_TRY(fsdp_root_end_backward(net->root, err));
    EXPECT(count_events(net->rank, "AG L0") == 2 && count_events(net->rank, "AG L1") == 2);
    EXPECT(count_events(net->rank, "RS L0") == 1 && count_events(net->rank, "RS L1") == 1);
    FSDP_TRY(expect_grad(net->weight[0], 1, err));
    return expect_grad(net->weight[1], 1, err);
}

Test(unit_settings, a_hook_that_comes_twice_does_nothing_more)
{
    expect_ok(come_twice);
}

static fsdp_status count_call(void *user, fsdp_param *param, fsdp_error *err)
{
    (void)param;
    (void)err;
    ++*(int *)user;
    return FSDP_OK;
}

/* Hooks are not called for a gradient of an earlier backward. */
static fsdp_status hook_what_is_new(toy *net, fsdp_error *err)
{
    int calls[LAYERS] = {0};
    FSDP_TRY(toy_wrap(net, err));
    for (int i = 0; i < LAYERS; i++)
        fsdp_param_set_post_accumulate_hook(net->weight[i], count_call, &calls[i]);
    FSDP_TRY(forward(net, err));
    FSDP_TRY(backward(net, err));
    EXPECT(calls[0] == 1 && calls[1] == 1);
    FSDP_TRY(forward(net, err));
    FSDP_TRY(toy_backward_layer(net, 1, toy_add_ones, err));
    FSDP_TRY(fsdp_root_end_backward(net->root, err));
    EXPECT(calls[0] == 1 && calls[1] == 2);
    return expect_grad(net->weight[1], 2, err);
}

Test(unit_settings, gradient_hooks_see_what_was_reduced_since)
{
    expect_ok(hook_what_is_new);
}

/* --- the end of backward ------------------------------------------------------------------------ */

static fsdp_status change_the_end(toy *net, fsdp_error *err)
{
    FSDP_TRY(toy_wrap(net, err));
    fsdp_root *root = net->root;
    fsdp_finalize_handle *handle;
    fsdp_root_set_is_last_backward(root, false);
    FSDP_TRY(forward(net, err));
    FSDP_TRY(backward(net, err));
    EXPECT_REFUSAL(fsdp_root_set_manual_backward_finalization(root, true, why),
                   "call the end_backward of a last backward first");
    fsdp_root_set_is_last_backward(root, true);
    FSDP_TRY(forward(net, err));
    FSDP_TRY(backward(net, err));
    FSDP_TRY(fsdp_root_set_manual_backward_finalization(root, true, err));
    FSDP_TRY(forward(net, err));
    FSDP_TRY(backward(net, err));
    EXPECT_REFUSAL(fsdp_root_set_manual_backward_finalization(root, false, why),
                   "call fsdp_root_finalize_backward, and wait for it, first");
    FSDP_TRY(fsdp_root_finalize_backward(root, true, &handle, err));
    FSDP_TRY(fsdp_finalize_wait(handle, err));
    FSDP_TRY(fsdp_finalize_wait(handle, err)); /* was waited for */
    FSDP_TRY(expect_grad(net->weight[0], 3, err));
    return fsdp_root_set_manual_backward_finalization(root, false, err);
}

Test(unit_settings, how_a_backward_ends_changes_between_steps)
{
    expect_ok(change_the_end);
}

static fsdp_status end_later(toy *net, fsdp_finalize_handle **handle_out, fsdp_error *err)
{
    FSDP_TRY(forward(net, err));
    FSDP_TRY(backward(net, err));
    return fsdp_root_finalize_backward(net->root, true, handle_out, err);
}

static fsdp_status reset_two(toy *net, toy *other, fsdp_error *err)
{
    fsdp_finalize_handle *handle;
    FSDP_TRY(toy_begin(other, net->rank, net->rank->user, err));
    FSDP_TRY(declare(other, err));
    FSDP_TRY(toy_wrap(other, err));
    FSDP_TRY(fsdp_root_share_context(other->root, net->root, err));
    FSDP_TRY(fsdp_root_set_manual_backward_finalization(net->root, true, err));
    FSDP_TRY(end_later(net, &handle, err));
    EXPECT_REFUSAL(fsdp_root_reset(other->root, why), "another root on this context");
    FSDP_TRY(fsdp_root_reset(net->root, err));
    EXPECT_REFUSAL(fsdp_finalize_wait(handle, why), "fsdp_root_reset discarded the backward");
    EXPECT(!fsdp_param_shard_grad(net->weight[0]));
    FSDP_TRY(fsdp_root_reset(other->root, err));
    FSDP_TRY(end_later(net, &handle, err));
    FSDP_TRY(fsdp_finalize_wait(handle, err));
    return expect_grad(net->weight[0], 1, err);
}

static fsdp_status reset_while_ending(toy *net, fsdp_error *err)
{
    toy other = {0};
    FSDP_TRY(toy_wrap(net, err));
    fsdp_status status = reset_two(net, &other, err);
    toy_free(&other);
    return status;
}

Test(unit_settings, a_reset_drops_an_end_that_was_not_waited_for)
{
    expect_ok(reset_while_ending);
}
