/*
 * Options and setters of units, one by one, and their effect on gathers, gradients and memory: frozen and
 * unused parameters, extensions, hooks, dtypes of gradients and activations, and several mesh dims as one.
 */
#include "tests/unit/runtime/expect_toy.h"

enum { ROWS = 5, COLUMNS = 2 }; /* of weights; biases have ROWS */

/* One unit "layer" of a weight and a bias; the body makes it. */
static fsdp_status declare(toy *net, fsdp_error *err)
{
    FSDP_TRY(fsdp_model_add(net->model,
                            &(fsdp_param_spec){.name = "layer.weight",
                                               .dtype = FSDP_F32,
                                               .ndim = 2,
                                               .shape = (int64_t[]){ROWS, COLUMNS}},
                            &net->weight[0], err));
    net->layers = 1;
    return fsdp_model_add(
        net->model,
        &(fsdp_param_spec){
            .name = "layer.bias", .dtype = FSDP_F32, .ndim = 1, .shape = (int64_t[]){ROWS}},
        &net->bias[0], err);
}

static void expect_on_line(int64_t ranks, toy_body body)
{
    expect_toy_on_line(ranks, declare, body);
}

static void expect_on_square(toy_body body)
{
    expect_toy((toy_case){2, {2, 2}, {"x", "y"}, declare, body, NULL, {0}});
}

static void expect_on_cube(toy_body body)
{
    expect_toy((toy_case){3, {2, 2, 2}, {"x", "y", "z"}, declare, body, NULL, {0}});
}

/* Even numbers, 2, 4, ... */
static fsdp_status number(void *user, const fsdp_param *param, const fsdp_box *box, void *data,
                          fsdp_error *err)
{
    float *values = data;
    FSDP_TRY(tensor_number(user, param, box, data, err));
    for (int64_t i = 0; i < fsdp_box_count(box); i++)
        values[i] *= 2;
    return FSDP_OK;
}

static fsdp_status build(toy *net, fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_create(net->model, "layer", &net->opts, &net->unit[0], err));
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

static fsdp_status expect_gathered(toy *net, fsdp_error *err)
{
    FSDP_TRY(expect_numbers(net->weight[0], ROWS * COLUMNS, err));
    return expect_numbers(net->bias[0], ROWS, err);
}

static fsdp_status expect_layer(toy *net, int layer, fsdp_error *err)
{
    (void)layer;
    return expect_gathered(net, err);
}

static fsdp_status forward(toy *net, fsdp_error *err)
{
    return toy_forward(net, expect_layer, err);
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
static fsdp_status backward(toy *net, fsdp_param *one, fsdp_param *other, float value,
                            fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_pre_backward(net->unit[0], err));
    if (one)
        FSDP_TRY(fill_grad(one, value, err));
    if (other)
        FSDP_TRY(fill_grad(other, value, err));
    FSDP_TRY(fsdp_unit_post_backward(net->unit[0], err));
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

/* --- existing gradients ------------------------------------------------------------------------- */

static fsdp_status freeze(toy *net, fsdp_error *err)
{
    FSDP_TRY(fsdp_param_set_requires_grad(net->bias[0], false, err));
    FSDP_TRY(build(net, err));
    FSDP_TRY(forward(net, err));
    FSDP_TRY(fsdp_unit_pre_backward(net->unit[0], err));
    FSDP_TRY(expect_gathered(net, err));
    EXPECT(!fsdp_param_grad(net->bias[0]));
    EXPECT_REFUSAL(fsdp_param_error(net->bias[0], why), "it is frozen");
    EXPECT_REFUSAL(fsdp_param_set_requires_grad(net->bias[0], true, why), "inside a step");
    FSDP_TRY(backward(net, net->weight[0], NULL, 3, err));
    FSDP_TRY(expect_grad(net->weight[0], 3, err));
    EXPECT(!fsdp_param_shard_grad(net->bias[0]));
    FSDP_TRY(fsdp_param_set_requires_grad(net->bias[0], true, err));
    FSDP_TRY(forward(net, err));
    FSDP_TRY(backward(net, NULL, net->bias[0], 3, err));
    return expect_grad(net->bias[0], 3, err);
}

Test(unit_options, frozen_parameters_are_gathered_and_not_reduced)
{
    expect_on_line(2, freeze);
}

/* Rank 0 has no use for the bias, rank 1 none for the weight. */
static fsdp_status use_different_ones(toy *net, fsdp_error *err)
{
    bool is_first = fsdp_world_rank(net->rank->world) == 0;
    FSDP_TRY(build(net, err));
    FSDP_TRY(fsdp_unit_set(net->unit[0], FSDP_UNIT_REDUCE_SCATTER_UNUSED_PARAMS, true, false, err));
    FSDP_TRY(forward(net, err));
    FSDP_TRY(
        backward(net, is_first ? net->weight[0] : NULL, is_first ? NULL : net->bias[0], 3, err));
    FSDP_TRY(expect_grad(net->weight[0], 1.5f, err));
    return expect_grad(net->bias[0], 1.5f, err);
}

Test(unit_options, unused_parameters_may_differ_between_ranks)
{
    expect_on_line(2, use_different_ones);
}

static fsdp_status differ_without_asking(toy *net, fsdp_error *err)
{
    bool is_first = fsdp_world_rank(net->rank->world) == 0;
    FSDP_TRY(build(net, err));
    FSDP_TRY(forward(net, err));
    EXPECT_REFUSAL(
        backward(net, is_first ? net->weight[0] : NULL, is_first ? NULL : net->bias[0], 3, why),
        "layer");
    return FSDP_OK;
}

Test(unit_options, otherwise_all_ranks_learn_of_it)
{
    expect_on_line(2, differ_without_asking);
}

/* Gradients kept by earlier backwards are reduced by the one that synchronises, even if it does not use the
 * unit. */
static fsdp_status keep_and_leave(toy *net, fsdp_error *err)
{
    FSDP_TRY(build(net, err));
    FSDP_TRY(fsdp_unit_set(net->unit[0], FSDP_UNIT_REQUIRES_GRADIENT_SYNC, false, true, err));
    FSDP_TRY(forward(net, err));
    FSDP_TRY(backward(net, net->weight[0], NULL, 3, err));
    EXPECT(!fsdp_param_shard_grad(net->weight[0]) && count_events(net->rank, "RS") == 0);
    FSDP_TRY(fsdp_unit_set(net->unit[0], FSDP_UNIT_REQUIRES_GRADIENT_SYNC, true, true, err));
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    FSDP_TRY(fsdp_root_end_forward(net->root, err));
    FSDP_TRY(fsdp_root_end_backward(net->root, err));
    EXPECT(count_events(net->rank, "RS") == 1 && !fsdp_param_shard_grad(net->bias[0]));
    return expect_grad(net->weight[0], 3, err);
}

Test(unit_options, what_was_kept_is_reduced_without_the_unit)
{
    expect_on_line(2, keep_and_leave);
}

/* --- gathers ------------------------------------------------------------------------------------ */

static fsdp_status leave_sharded_in_backward(toy *net, fsdp_error *err)
{
    FSDP_TRY(build(net, err));
    FSDP_TRY(fsdp_unit_set(net->unit[0], FSDP_UNIT_UNSHARD_IN_BACKWARD, false, false, err));
    FSDP_TRY(forward(net, err));
    FSDP_TRY(fsdp_unit_pre_backward(net->unit[0], err));
    EXPECT(!fsdp_param_data(net->weight[0]));
    EXPECT_REFUSAL(fsdp_param_error(net->weight[0], why), "while unit layer is sharded");
    FSDP_TRY(backward(net, net->weight[0], net->bias[0], 3, err));
    EXPECT(count_events(net->rank, "AG") == 1 && count_events(net->rank, "RS") == 1);
    return expect_grad(net->weight[0], 3, err);
}

Test(unit_options, a_unit_that_backward_does_not_need_is_not_gathered_there)
{
    expect_on_line(2, leave_sharded_in_backward);
}

static fsdp_status keep_storage(toy *net, fsdp_error *err)
{
    FSDP_TRY(build(net, err));
    FSDP_TRY(fsdp_unit_set(net->unit[0], FSDP_UNIT_KEEP_UNSHARDED_STORAGE, true, false, err));
    FSDP_TRY(fsdp_unit_unshard(net->unit[0], false, NULL, err));
    const void *weight = fsdp_param_data(net->weight[0]), *bias = fsdp_param_data(net->bias[0]);
    FSDP_TRY(fsdp_unit_reshard(net->unit[0], err));
    EXPECT(weight && fsdp_root_memory(net->root).now[FSDP_MEMORY_UNSHARDED] > 0);
    for (int step = 0; step < 2; step++) {
        FSDP_TRY(forward(net, err));
        FSDP_TRY(fsdp_unit_pre_backward(net->unit[0], err));
        EXPECT(fsdp_param_data(net->weight[0]) == weight && fsdp_param_data(net->bias[0]) == bias);
        FSDP_TRY(backward(net, net->weight[0], NULL, 3, err));
    }
    FSDP_TRY(fsdp_unit_set(net->unit[0], FSDP_UNIT_KEEP_UNSHARDED_STORAGE, false, false, err));
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

/* Both dims shard as one dim of four, or replicate as one, or one does each, in any order in the mesh. */
static fsdp_status flatten_dims(toy *net, const char *shard, const char *replicate,
                                const char *gather, int gathers, fsdp_error *err)
{
    net->opts.shard_dims = shard;
    net->opts.replicate_dims = replicate;
    FSDP_TRY(build(net, err));
    FSDP_TRY(forward(net, err));
    FSDP_TRY(
        backward(net, net->weight[0], net->bias[0], (float)fsdp_world_rank(net->rank->world), err));
    EXPECT(count_events(net->rank, gather) == gathers);
    FSDP_TRY(expect_grad(net->weight[0], 3.5f, err)); /* the mean of 0 to 7 */
    return expect_grad(net->bias[0], 3.5f, err);
}

static fsdp_status shard_over_two(toy *net, fsdp_error *err)
{
    return flatten_dims(net, "x,z", "y", "AG layer/4", 2, err);
}

static fsdp_status replicate_over_two(toy *net, fsdp_error *err)
{
    return flatten_dims(net, "x", "y,z", "AG layer/2", 2, err);
}

static fsdp_status shard_over_all(toy *net, fsdp_error *err)
{
    return flatten_dims(net, "x,y,z", "", "AG layer/8", 2, err);
}

static fsdp_status replicate_over_all(toy *net, fsdp_error *err)
{
    FSDP_TRY(flatten_dims(net, "", "x,y,z", "AG", 0, err));
    EXPECT(count_events(net->rank, "AR layer/8") == 1);
    return FSDP_OK;
}

Test(unit_options, several_mesh_dims_are_one)
{
    expect_on_cube(shard_over_two);
    expect_on_cube(replicate_over_two);
    expect_on_cube(shard_over_all);
    expect_on_cube(replicate_over_all);
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

static fsdp_status set_coding(toy *net, coding *counts, fsdp_error *err)
{
    const size_t sizes[] = {CODES, sizeof(float)};
    const fsdp_extension extension = {counts, 2, sizes, encode, decode};
    return fsdp_param_set_extension(net->weight[0], &extension, err);
}

/* The weight is sent as 10 bytes per rank, the bias unchanged. */
static fsdp_status gather_codes(toy *net, fsdp_error *err)
{
    coding counts = {0};
    FSDP_TRY(set_coding(net, &counts, err));
    FSDP_TRY(build(net, err));
    EXPECT_REFUSAL(set_coding(net, &counts, why), "the root exists; set it before");
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(net->unit[0], err));
    int64_t bytes = fsdp_root_memory(net->root).now[FSDP_MEMORY_ALL_GATHER];
    EXPECT(bytes == 2 * (CODES + (int64_t)sizeof(float) + CHUNK * (int64_t)sizeof(float)));
    FSDP_TRY(fsdp_unit_post_forward(net->unit[0], err));
    FSDP_TRY(fsdp_root_end_forward(net->root, err));
    FSDP_TRY(forward(net, err));
    FSDP_TRY(backward(net, net->weight[0], net->bias[0], 3, err));
    EXPECT(counts.pre_calls == 3 && counts.post_calls == 3);
    return expect_grad(net->weight[0], 3, err);
}

Test(unit_options, an_extension_says_what_travels)
{
    expect_on_line(2, gather_codes);
}

static fsdp_status fail_to_code(toy *net, fsdp_error *err)
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

/* --- partial sums ------------------------------------------------------------------------------- */

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
static fsdp_status hook_sum(toy *net, fsdp_error *err)
{
    seen_sum seen = {0};
    FSDP_TRY(build(net, err));
    FSDP_TRY(
        fsdp_unit_set(net->unit[0], FSDP_UNIT_FORCE_SUM_REDUCTION_FOR_COMMS, true, false, err));
    fsdp_unit_set_all_reduce_hook(net->unit[0], add_a_half, &seen);
    FSDP_TRY(forward(net, err));
    FSDP_TRY(backward(net, net->weight[0], net->bias[0], 3, err));
    int64_t ranks = fsdp_world_size(net->rank->world);
    int64_t rows = fsdp_mesh_ndim(net->mesh) == 1 ? (ROWS + ranks - 1) / ranks : CHUNK;
    EXPECT(seen.calls == 1 && seen.dtype == FSDP_F32 && seen.count == rows * (COLUMNS + 1));
    EXPECT(seen.first == 3 * (float)ranks || fsdp_world_rank(net->rank->world) > 0);
    FSDP_TRY(expect_grad(net->weight[0], (3 * (float)ranks + 0.5f) / (float)ranks, err));
    fsdp_unit_set_all_reduce_hook(net->unit[0], NULL, NULL);
    fsdp_root_zero_grad(net->root);
    FSDP_TRY(forward(net, err));
    FSDP_TRY(backward(net, net->weight[0], net->bias[0], 3, err));
    EXPECT(seen.calls == 1);
    return expect_grad(net->weight[0], 3, err);
}

Test(unit_options, a_hook_sees_the_sum_before_it_is_divided)
{
    expect_on_line(4, hook_sum);
    expect_on_square(hook_sum);
}

/* Sums that wait for the replicas, in a backward that the caller ends. */
static fsdp_status finalize_partial(toy *net, fsdp_error *err)
{
    FSDP_TRY(build(net, err));
    FSDP_TRY(fsdp_root_set_manual_backward_finalization(net->root, true, err));
    for (int step = 0; step < 2; step++) {
        FSDP_TRY(fsdp_unit_set(net->unit[0], FSDP_UNIT_REQUIRES_ALL_REDUCE, step == 1, false, err));
        FSDP_TRY(forward(net, err));
        FSDP_TRY(backward(net, net->weight[0], step == 1 ? net->bias[0] : NULL, 3, err));
        FSDP_TRY(fsdp_root_finalize_backward(net->root, false, NULL, err));
        EXPECT(count_events(net->rank, "AR") == step);
        EXPECT(step == 1 || !fsdp_param_shard_grad(net->weight[0]));
    }
    FSDP_TRY(expect_grad(net->weight[0], 6, err));
    return expect_grad(net->bias[0], 3, err);
}

Test(unit_options, sums_wait_for_the_replicas_also_when_the_caller_ends_backward)
{
    expect_on_square(finalize_partial);
}

/* A bf16 computation whose gradients are f32. */
static fsdp_status give_wide_grads(toy *net, fsdp_error *err)
{
    const float fine = 1 + 1.0f / 4096; /* not a value of bf16 */
    net->opts.param_dtype = FSDP_BF16;
    FSDP_TRY(fsdp_param_set_grad_dtype(net->weight[0], FSDP_F32, err));
    FSDP_TRY(build(net, err));
    EXPECT_REFUSAL(fsdp_param_set_grad_dtype(net->weight[0], FSDP_F32, why),
                   "the root exists; set it before");
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(net->unit[0], err));
    const uint16_t *data = fsdp_param_data(net->weight[0]);
    EXPECT(fsdp_param_describe(net->weight[0]).data_dtype == FSDP_BF16 && data[0] == 0x4000);
    FSDP_TRY(fsdp_unit_post_forward(net->unit[0], err));
    FSDP_TRY(fsdp_root_end_forward(net->root, err));
    FSDP_TRY(backward(net, net->weight[0], NULL, fine, err));
    return expect_grad(net->weight[0], fine, err);
}

Test(unit_options, gradients_may_be_wider_than_what_is_computed_with)
{
    expect_on_line(2, give_wide_grads);
}

/* --- activations -------------------------------------------------------------------------------- */

static fsdp_status ask_for_activations(toy *net, fsdp_error *err)
{
    net->opts.param_dtype = FSDP_BF16;
    net->opts.output_dtype = FSDP_F16;
    FSDP_TRY(build(net, err));
    EXPECT(fsdp_unit_input_dtype(net->unit[0], FSDP_F32) == FSDP_BF16);
    EXPECT(fsdp_unit_input_dtype(net->unit[0], FSDP_I64) == FSDP_I64);
    EXPECT(fsdp_unit_output_dtype(net->unit[0], FSDP_BF16) == FSDP_F16);
    EXPECT(fsdp_unit_output_dtype(net->unit[0], FSDP_BOOL) == FSDP_BOOL);
    const float from[] = {1, -2.5f, 65536};
    uint16_t narrow[3];
    float back[3];
    fsdp_cast(narrow, FSDP_BF16, from, FSDP_F32, 3);
    fsdp_cast(back, FSDP_F32, narrow, FSDP_BF16, 3);
    EXPECT(memcmp(from, back, sizeof from) == 0);
    fsdp_cast(narrow, FSDP_BF16, from, FSDP_F32, 0);
    return FSDP_OK;
}

static fsdp_status leave_inputs(toy *net, fsdp_error *err)
{
    net->opts.param_dtype = FSDP_BF16;
    net->opts.keep_input_dtype = true;
    FSDP_TRY(build(net, err));
    EXPECT(fsdp_unit_input_dtype(net->unit[0], FSDP_F32) == FSDP_F32);
    EXPECT(fsdp_unit_output_dtype(net->unit[0], FSDP_F32) == FSDP_F32);
    return FSDP_OK;
}

Test(unit_options, activations_are_cast_as_the_policy_says)
{
    expect_on_line(1, ask_for_activations);
    expect_on_line(1, leave_inputs);
}
