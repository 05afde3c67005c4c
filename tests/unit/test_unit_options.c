/*
 * Options and setters of units, one by one, by what they do to gathers, gradients and memory: parameters that
 * are frozen or unused, extensions, hooks, dtypes of gradients and activations, and several mesh dims as one.
 */
#include "tests/support/state_net.h"

#include <criterion/criterion.h>

enum { ROWS = 5, COLUMNS = 2 }; /* of weights; biases have ROWS */

/* One unit "layer" of a weight and a bias. */
typedef struct options_net {
    world_rank *rank;
    fsdp_mesh *mesh;
    fsdp_model *model;
    fsdp_root *root;
    fsdp_unit *unit;
    fsdp_param *weight, *bias;
    fsdp_unit_opts opts;
} options_net;

typedef struct options_case {
    fsdp_status (*body)(options_net *net, fsdp_error *err);
    int ndim;
    int64_t shape[3];
} options_case;

static fsdp_status begin_net(options_net *net, const options_case *what, fsdp_error *err)
{
    static const char *const names[] = {"x", "y", "z"};
    FSDP_TRY(fsdp_world_mesh(net->rank->world, what->ndim, what->shape, names, &net->mesh, err));
    FSDP_TRY(fsdp_model_create(net->rank->world, &net->model, err));
    net->opts = fsdp_unit_opts_default(net->mesh);
    FSDP_TRY(fsdp_model_add_param(net->model, "layer.weight", FSDP_F32, 2,
                                  (int64_t[]){ROWS, COLUMNS}, &net->weight, err));
    FSDP_TRY(fsdp_model_add_param(net->model, "layer.bias", FSDP_F32, 1, (int64_t[]){ROWS},
                                  &net->bias, err));
    return what->body(net, err);
}

static fsdp_status run_net(world_rank *rank, fsdp_error *err)
{
    options_net net = {.rank = rank};
    fsdp_status status = begin_net(&net, rank->user, err);
    fsdp_root_free(net.root);
    fsdp_model_free(net.model);
    fsdp_mesh_free(net.mesh);
    return status;
}

static void expect_ok(options_case what)
{
    static const char *const devices[] = {"cpu", "cpu-async"};
    int64_t ranks = 1;
    for (int i = 0; i < what.ndim; i++)
        ranks *= what.shape[i];
    for (size_t i = 0; i < 2; i++) {
        fsdp_error err = {0};
        cr_assert_eq(run_worlds((int)ranks, devices[i], run_net, &what, &err), FSDP_OK, "%s: %s",
                     devices[i], err.text);
    }
}

static void expect_on_line(int64_t ranks, fsdp_status (*body)(options_net *net, fsdp_error *err))
{
    expect_ok((options_case){body, 1, {ranks}});
}

/* Even numbers, 2, 4, ... */
static fsdp_status number(void *user, const fsdp_param *param, const fsdp_box *box, void *data,
                          fsdp_error *err)
{
    float *values = data;
    FSDP_TRY(net_number(user, param, box, data, err));
    for (int64_t i = 0; i < fsdp_box_count(box); i++)
        values[i] *= 2;
    return FSDP_OK;
}

static fsdp_status build(options_net *net, fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_create(net->model, "layer", &net->opts, &net->unit, err));
    FSDP_TRY(fsdp_root_create(net->model, &net->opts, &net->root, err));
    net->rank->notes_collectives = true;
    return fsdp_root_init(net->root, number, NULL, err);
}

static fsdp_status expect_numbers(fsdp_param *param, int64_t count, fsdp_error *err)
{
    const float *data = fsdp_param_data(param);
    EXPECT(data);
    for (int64_t i = 0; i < count; i++)
        EXPECT(data[i] == (float)(i + 1) * 2);
    return FSDP_OK;
}

static fsdp_status expect_gathered(options_net *net, fsdp_error *err)
{
    FSDP_TRY(expect_numbers(net->weight, ROWS * COLUMNS, err));
    return expect_numbers(net->bias, ROWS, err);
}

static fsdp_status forward(options_net *net, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(net->unit, err));
    FSDP_TRY(expect_gathered(net, err));
    FSDP_TRY(fsdp_unit_post_forward(net->unit, err));
    return fsdp_root_end_forward(net->root, err);
}

static fsdp_status fill_grad(fsdp_param *param, float value, fsdp_error *err)
{
    float *grad = fsdp_param_grad_raw(param);
    EXPECT(grad);
    for (int64_t i = 0; i < fsdp_param_count(param); i++)
        grad[i] = value;
    return FSDP_OK;
}

/* NULL parameters get no gradient. */
static fsdp_status backward(options_net *net, fsdp_param *one, fsdp_param *other, float value,
                            fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_pre_backward(net->unit, err));
    if (one)
        FSDP_TRY(fill_grad(one, value, err));
    if (other)
        FSDP_TRY(fill_grad(other, value, err));
    FSDP_TRY(fsdp_unit_post_backward(net->unit, err));
    return fsdp_root_end_backward(net->root, err);
}

/* This rank's rows, of which it may have none. */
static fsdp_status expect_grad(fsdp_param *param, float value, fsdp_error *err)
{
    fsdp_box box;
    (void)fsdp_param_shard(param, &box);
    const float *grad = fsdp_param_shard_grad(param);
    EXPECT(grad);
    for (int64_t i = 0; i < fsdp_box_count(&box); i++)
        if (grad[i] != value)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "the gradient of '%s' is %g, not %g",
                             fsdp_param_name(param), (double)grad[i], (double)value);
    return FSDP_OK;
}

/* --- which gradients there are ------------------------------------------------------------------ */

static fsdp_status freeze(options_net *net, fsdp_error *err)
{
    FSDP_TRY(fsdp_param_set_requires_grad(net->bias, false, err));
    FSDP_TRY(build(net, err));
    FSDP_TRY(forward(net, err));
    FSDP_TRY(fsdp_unit_pre_backward(net->unit, err));
    FSDP_TRY(expect_gathered(net, err));
    EXPECT(!fsdp_param_grad(net->bias));
    EXPECT_REFUSAL(fsdp_param_complaint(net->bias, why), "it is frozen");
    EXPECT_REFUSAL(fsdp_param_set_requires_grad(net->bias, true, why), "inside a step");
    FSDP_TRY(backward(net, net->weight, NULL, 3, err));
    FSDP_TRY(expect_grad(net->weight, 3, err));
    EXPECT(!fsdp_param_shard_grad(net->bias));
    FSDP_TRY(fsdp_param_set_requires_grad(net->bias, true, err));
    FSDP_TRY(forward(net, err));
    FSDP_TRY(backward(net, NULL, net->bias, 3, err));
    return expect_grad(net->bias, 3, err);
}

Test(unit_options, frozen_parameters_are_gathered_and_not_reduced)
{
    expect_on_line(2, freeze);
}

/* Rank 0 has no use for the bias, rank 1 none for the weight. */
static fsdp_status use_different_ones(options_net *net, fsdp_error *err)
{
    bool is_first = fsdp_world_rank(net->rank->world) == 0;
    FSDP_TRY(build(net, err));
    fsdp_unit_set_reduce_scatter_unused_params(net->unit, true, false);
    FSDP_TRY(forward(net, err));
    FSDP_TRY(backward(net, is_first ? net->weight : NULL, is_first ? NULL : net->bias, 3, err));
    FSDP_TRY(expect_grad(net->weight, 1.5f, err));
    return expect_grad(net->bias, 1.5f, err);
}

Test(unit_options, unused_parameters_may_differ_between_ranks)
{
    expect_on_line(2, use_different_ones);
}

static fsdp_status differ_without_asking(options_net *net, fsdp_error *err)
{
    bool is_first = fsdp_world_rank(net->rank->world) == 0;
    FSDP_TRY(build(net, err));
    FSDP_TRY(forward(net, err));
    EXPECT_REFUSAL(
        backward(net, is_first ? net->weight : NULL, is_first ? NULL : net->bias, 3, why), "layer");
    return FSDP_OK;
}

Test(unit_options, otherwise_all_ranks_learn_of_it)
{
    expect_on_line(2, differ_without_asking);
}

/* What earlier backwards kept is reduced by the one that synchronises, which does not use the unit at all. */
static fsdp_status keep_and_leave(options_net *net, fsdp_error *err)
{
    FSDP_TRY(build(net, err));
    fsdp_unit_set_requires_gradient_sync(net->unit, false, true);
    FSDP_TRY(forward(net, err));
    FSDP_TRY(backward(net, net->weight, NULL, 3, err));
    EXPECT(!fsdp_param_shard_grad(net->weight) && count_events(net->rank, "RS") == 0);
    fsdp_unit_set_requires_gradient_sync(net->unit, true, true);
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    FSDP_TRY(fsdp_root_end_forward(net->root, err));
    FSDP_TRY(fsdp_root_end_backward(net->root, err));
    EXPECT(count_events(net->rank, "RS") == 1 && !fsdp_param_shard_grad(net->bias));
    return expect_grad(net->weight, 3, err);
}

Test(unit_options, what_was_kept_is_reduced_without_the_unit)
{
    expect_on_line(2, keep_and_leave);
}

/* --- gathers ------------------------------------------------------------------------------------ */

static fsdp_status leave_sharded_in_backward(options_net *net, fsdp_error *err)
{
    FSDP_TRY(build(net, err));
    fsdp_unit_set_unshard_in_backward(net->unit, false);
    FSDP_TRY(forward(net, err));
    FSDP_TRY(fsdp_unit_pre_backward(net->unit, err));
    EXPECT(!fsdp_param_data(net->weight));
    EXPECT_REFUSAL(fsdp_param_complaint(net->weight, why), "while unit layer is sharded");
    FSDP_TRY(backward(net, net->weight, net->bias, 3, err));
    EXPECT(count_events(net->rank, "AG") == 1 && count_events(net->rank, "RS") == 1);
    return expect_grad(net->weight, 3, err);
}

Test(unit_options, a_unit_that_backward_does_not_need_is_not_gathered_there)
{
    expect_on_line(2, leave_sharded_in_backward);
}

static fsdp_status keep_storage(options_net *net, fsdp_error *err)
{
    FSDP_TRY(build(net, err));
    fsdp_unit_set_keep_unsharded_storage(net->unit, true, false);
    FSDP_TRY(fsdp_unit_unshard(net->unit, false, NULL, err));
    const void *weight = fsdp_param_data(net->weight), *bias = fsdp_param_data(net->bias);
    FSDP_TRY(fsdp_unit_reshard(net->unit, err));
    EXPECT(weight && fsdp_root_memory(net->root).now[FSDP_MEMORY_UNSHARDED] > 0);
    for (int step = 0; step < 2; step++) {
        FSDP_TRY(forward(net, err));
        FSDP_TRY(fsdp_unit_pre_backward(net->unit, err));
        EXPECT(fsdp_param_data(net->weight) == weight && fsdp_param_data(net->bias) == bias);
        FSDP_TRY(backward(net, net->weight, NULL, 3, err));
    }
    fsdp_unit_set_keep_unsharded_storage(net->unit, false, false);
    FSDP_TRY(forward(net, err));
    EXPECT(fsdp_root_memory(net->root).now[FSDP_MEMORY_UNSHARDED] == 0);
    fsdp_root_reset_peak(net->root);
    EXPECT(fsdp_root_memory(net->root).peak[FSDP_MEMORY_UNSHARDED] == 0);
    return FSDP_OK;
}

Test(unit_options, pointers_survive_where_storage_is_kept)
{
    expect_on_line(2, keep_storage);
}

/* Both dims shard as one of four, or replicate as one, or one of each, whatever their order in the mesh. */
static fsdp_status flatten_dims(options_net *net, const char *shard, const char *replicate,
                                const char *gather, int gathers, fsdp_error *err)
{
    net->opts.shard_dims = shard;
    net->opts.replicate_dims = replicate;
    FSDP_TRY(build(net, err));
    FSDP_TRY(forward(net, err));
    FSDP_TRY(backward(net, net->weight, net->bias, (float)fsdp_world_rank(net->rank->world), err));
    EXPECT(count_events(net->rank, gather) == gathers);
    FSDP_TRY(expect_grad(net->weight, 3.5f, err)); /* the mean of 0 to 7 */
    return expect_grad(net->bias, 3.5f, err);
}

static fsdp_status shard_over_two(options_net *net, fsdp_error *err)
{
    return flatten_dims(net, "x,z", "y", "AG layer/4", 2, err);
}

static fsdp_status replicate_over_two(options_net *net, fsdp_error *err)
{
    return flatten_dims(net, "x", "y,z", "AG layer/2", 2, err);
}

static fsdp_status shard_over_all(options_net *net, fsdp_error *err)
{
    return flatten_dims(net, "x,y,z", "", "AG layer/8", 2, err);
}

static fsdp_status replicate_over_all(options_net *net, fsdp_error *err)
{
    FSDP_TRY(flatten_dims(net, "", "x,y,z", "AG", 0, err));
    EXPECT(count_events(net->rank, "AR layer/8") == 1);
    return FSDP_OK;
}

Test(unit_options, several_mesh_dims_are_one)
{
    expect_ok((options_case){shard_over_two, 3, {2, 2, 2}});
    expect_ok((options_case){replicate_over_two, 3, {2, 2, 2}});
    expect_ok((options_case){shard_over_all, 3, {2, 2, 2}});
    expect_ok((options_case){replicate_over_all, 3, {2, 2, 2}});
}

/* --- extensions --------------------------------------------------------------------------------- */

enum { CODES = 6, CHUNK = 3 }; /* bytes of the weight's padded shard as codes; rows of two ranks */

typedef struct coding {
    int pre_calls, post_calls;
    bool fails;
} coding;

/* One byte for each element, and what to multiply it by. */
static fsdp_status encode(void *user, const fsdp_param *param, const void *shard,
                          void *const *inputs, fsdp_error *err)
{
    coding *counts = user;
    const float *values = shard;
    const float scale = 2;
    counts->pre_calls++;
    for (int i = 0; i < CODES; i++)
        ((unsigned char *)inputs[0])[i] = (unsigned char)(values[i] / scale);
    memcpy(inputs[1], &scale, sizeof scale);
    return counts->fails
               ? fsdp_fail(err, FSDP_ERR_USAGE, "no code for '%s'", fsdp_param_name(param))
               : FSDP_OK;
}

static fsdp_status decode(void *user, const fsdp_param *param, const void *const *gathered,
                          size_t stride, void *data, fsdp_error *err)
{
    coding *counts = user;
    float *values = data;
    (void)param;
    (void)err;
    counts->post_calls++;
    for (size_t rank = 0; rank < 2; rank++) {
        const unsigned char *codes = (const unsigned char *)gathered[0] + rank * stride;
        float scale;
        memcpy(&scale, (const unsigned char *)gathered[1] + rank * stride, sizeof scale);
        for (int i = 0; i < CODES && (int)rank * CODES + i < ROWS * COLUMNS; i++)
            values[(int)rank * CODES + i] = codes[i] * scale;
    }
    return FSDP_OK;
}

static fsdp_status set_coding(options_net *net, coding *counts, fsdp_error *err)
{
    const size_t sizes[] = {CODES, sizeof(float)};
    const fsdp_extension extension = {counts, 2, sizes, encode, decode};
    return fsdp_param_set_extension(net->weight, &extension, err);
}

/* The weight travels as 10 bytes of each rank, the bias as it is. */
static fsdp_status gather_codes(options_net *net, fsdp_error *err)
{
    coding counts = {0};
    FSDP_TRY(set_coding(net, &counts, err));
    FSDP_TRY(build(net, err));
    EXPECT_REFUSAL(set_coding(net, &counts, why), "is set before the root");
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(net->unit, err));
    int64_t bytes = fsdp_root_memory(net->root).now[FSDP_MEMORY_ALL_GATHER];
    EXPECT(bytes == 2 * (CODES + (int64_t)sizeof(float) + CHUNK * (int64_t)sizeof(float)));
    FSDP_TRY(fsdp_unit_post_forward(net->unit, err));
    FSDP_TRY(fsdp_root_end_forward(net->root, err));
    FSDP_TRY(forward(net, err));
    FSDP_TRY(backward(net, net->weight, net->bias, 3, err));
    EXPECT(counts.pre_calls == 3 && counts.post_calls == 3);
    return expect_grad(net->weight, 3, err);
}

Test(unit_options, an_extension_says_what_travels)
{
    expect_on_line(2, gather_codes);
}

static fsdp_status fail_to_code(options_net *net, fsdp_error *err)
{
    coding counts = {.fails = fsdp_world_rank(net->rank->world) == 1};
    FSDP_TRY(set_coding(net, &counts, err));
    FSDP_TRY(build(net, err));
    EXPECT_REFUSAL(forward(net, why), "no code for 'layer.weight'");
    return FSDP_OK;
}

Test(unit_options, an_extension_that_fails_is_told_on_all_ranks)
{
    expect_on_line(2, fail_to_code);
}

/* --- what becomes of a sum ---------------------------------------------------------------------- */

typedef struct seen_sum {
    int calls;
    int64_t count;
    fsdp_dtype dtype;
    float first;
} seen_sum;

static fsdp_status add_a_half(void *user, void *data, fsdp_dtype dtype, int64_t count,
                              fsdp_error *err)
{
    seen_sum *seen = user;
    float *values = data;
    (void)err;
    *seen = (seen_sum){seen->calls + 1, count, dtype, values[0]};
    for (int64_t i = 0; i < count; i++)
        values[i] += 0.5f;
    return FSDP_OK;
}

/* 6 and 3 elements of each rank: the sum of all four ranks, before it is divided. */
static fsdp_status hook_sum(options_net *net, fsdp_error *err)
{
    seen_sum seen = {0};
    FSDP_TRY(build(net, err));
    fsdp_unit_set_force_sum_reduction_for_comms(net->unit, true);
    FSDP_TRY(fsdp_unit_set_all_reduce_hook(net->unit, add_a_half, &seen, err));
    FSDP_TRY(forward(net, err));
    FSDP_TRY(backward(net, net->weight, net->bias, 3, err));
    int64_t ranks = fsdp_world_size(net->rank->world);
    int64_t rows = fsdp_mesh_ndim(net->mesh) == 1 ? (ROWS + ranks - 1) / ranks : CHUNK;
    EXPECT(seen.calls == 1 && seen.dtype == FSDP_F32 && seen.count == rows * (COLUMNS + 1));
    EXPECT(seen.first == 3 * (float)ranks || fsdp_world_rank(net->rank->world) > 0);
    FSDP_TRY(expect_grad(net->weight, (3 * (float)ranks + 0.5f) / (float)ranks, err));
    FSDP_TRY(fsdp_unit_set_all_reduce_hook(net->unit, NULL, NULL, err));
    fsdp_root_zero_grad(net->root);
    FSDP_TRY(forward(net, err));
    FSDP_TRY(backward(net, net->weight, net->bias, 3, err));
    EXPECT(seen.calls == 1);
    return expect_grad(net->weight, 3, err);
}

Test(unit_options, a_hook_sees_the_sum_before_it_is_divided)
{
    expect_on_line(4, hook_sum);
    expect_ok((options_case){hook_sum, 2, {2, 2}});
}

/* Sums that wait for the replicas, in a backward that the caller ends. */
static fsdp_status finalize_partial(options_net *net, fsdp_error *err)
{
    FSDP_TRY(build(net, err));
    FSDP_TRY(fsdp_root_set_manual_backward_finalization(net->root, true, err));
    for (int step = 0; step < 2; step++) {
        fsdp_unit_set_requires_all_reduce(net->unit, step == 1, false);
        FSDP_TRY(forward(net, err));
        FSDP_TRY(backward(net, net->weight, step == 1 ? net->bias : NULL, 3, err));
        FSDP_TRY(fsdp_root_finalize_backward(net->root, false, NULL, err));
        EXPECT(count_events(net->rank, "AR") == step);
        EXPECT(step == 1 || !fsdp_param_shard_grad(net->weight));
    }
    FSDP_TRY(expect_grad(net->weight, 6, err));
    return expect_grad(net->bias, 3, err);
}

Test(unit_options, sums_wait_for_the_replicas_also_when_the_caller_ends_backward)
{
    expect_ok((options_case){finalize_partial, 2, {2, 2}});
}

/* A bf16 computation whose gradients are kept as precise as f32. */
static fsdp_status give_wide_grads(options_net *net, fsdp_error *err)
{
    const float fine = 1 + 1.0f / 4096; /* no bf16 */
    net->opts.param_dtype = FSDP_BF16;
    FSDP_TRY(fsdp_param_set_grad_dtype(net->weight, FSDP_F32, err));
    FSDP_TRY(build(net, err));
    EXPECT_REFUSAL(fsdp_param_set_grad_dtype(net->weight, FSDP_F32, why), "before the root");
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(net->unit, err));
    const uint16_t *data = fsdp_param_data(net->weight);
    EXPECT(fsdp_param_data_dtype(net->weight) == FSDP_BF16 && data[0] == 0x4000);
    FSDP_TRY(fsdp_unit_post_forward(net->unit, err));
    FSDP_TRY(fsdp_root_end_forward(net->root, err));
    FSDP_TRY(backward(net, net->weight, NULL, fine, err));
    return expect_grad(net->weight, fine, err);
}

Test(unit_options, gradients_may_be_wider_than_what_is_computed_with)
{
    expect_on_line(2, give_wide_grads);
}

/* --- activations -------------------------------------------------------------------------------- */

static fsdp_status ask_for_activations(options_net *net, fsdp_error *err)
{
    net->opts.param_dtype = FSDP_BF16;
    net->opts.output_dtype = FSDP_F16;
    FSDP_TRY(build(net, err));
    EXPECT(fsdp_unit_input_dtype(net->unit, FSDP_F32) == FSDP_BF16);
    EXPECT(fsdp_unit_input_dtype(net->unit, FSDP_I64) == FSDP_I64);
    EXPECT(fsdp_unit_output_dtype(net->unit, FSDP_BF16) == FSDP_F16);
    EXPECT(fsdp_unit_output_dtype(net->unit, FSDP_BOOL) == FSDP_BOOL);
    const float from[] = {1, -2.5f, 65536};
    uint16_t narrow[3];
    float back[3];
    fsdp_cast(narrow, FSDP_BF16, from, FSDP_F32, 3);
    fsdp_cast(back, FSDP_F32, narrow, FSDP_BF16, 3);
    EXPECT(memcmp(from, back, sizeof from) == 0);
    fsdp_cast(narrow, FSDP_BF16, from, FSDP_F32, 0);
    return FSDP_OK;
}

static fsdp_status leave_inputs(options_net *net, fsdp_error *err)
{
    net->opts.param_dtype = FSDP_BF16;
    net->opts.cast_forward_inputs = false;
    FSDP_TRY(build(net, err));
    EXPECT(fsdp_unit_input_dtype(net->unit, FSDP_F32) == FSDP_F32);
    EXPECT(fsdp_unit_output_dtype(net->unit, FSDP_F32) == FSDP_F32);
    return FSDP_OK;
}

Test(unit_options, activations_are_cast_as_the_policy_says)
{
    expect_on_line(1, ask_for_activations);
    expect_on_line(1, leave_inputs);
}
