/*
 * Results of gathers and reductions against a model, element by element: every size on small
 * meshes, HSDP and tensor parallelism, other dims, dtypes, divide factors, kept gradients, and the
 * counts of memory.
 */
#include "tests/support/nets/tensors.h"
#include "tests/support/ranks/worlds.h"
#include "tests/unit/runtime/expect_toy.h"
#include <fsdp/optim.h>
#include <fsdp/root_init.h>

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* --- one unit of some parameters -------------------------------------------------------------- */

enum { MOST_PARAMS = 20 };

typedef struct one_unit {
    fsdp_mesh *mesh;
    fsdp_model *model;
    fsdp_unit *unit;
    fsdp_root *root;
    fsdp_param *params[MOST_PARAMS];
    int count;
} one_unit;

typedef struct unit_case {
    int mesh_ndim;
    int64_t mesh_shape[3];
    const char *mesh_names[3];
    fsdp_unit_opts opts; /* without mesh */
    fsdp_status (*declare)(one_unit *one, fsdp_error *err);
    fsdp_status (*body)(world_rank *rank, one_unit *one, fsdp_error *err);
    const void *user;
} unit_case;

/* backwards: the mesh has the ranks from the last one on. */
static fsdp_status make_mesh(one_unit *one, world_rank *rank, const unit_case *what, bool backwards,
                             fsdp_error *err)
{
    int size = fsdp_world_size(rank->world), ranks[16];
    if (!backwards)
        return fsdp_world_mesh(rank->world, what->mesh_ndim, what->mesh_shape, what->mesh_names,
                               &one->mesh, err);
    for (int i = 0; i < size; i++)
        ranks[i] = size - 1 - i;
    FSDP_TRY(fsdp_mesh_create(what->mesh_ndim, what->mesh_shape, what->mesh_names, ranks,
                              &one->mesh, err));
    return fsdp_world_connect(rank->world, one->mesh, err);
}

static fsdp_status build(one_unit *one, world_rank *rank, const unit_case *what, bool backwards,
                         fsdp_error *err)
{
    FSDP_TRY(make_mesh(one, rank, what, backwards, err));
    FSDP_TRY(fsdp_model_create(rank->world, &one->model, err));
    FSDP_TRY(what->declare(one, err));
    fsdp_unit_opts opts = what->opts;
    opts.mesh = one->mesh;
    FSDP_TRY(fsdp_unit_create(one->model, "u", &opts, &one->unit, err));
    return fsdp_root_create(one->model, &opts, &one->root, err);
}

static fsdp_status run_on(world_rank *rank, bool backwards, fsdp_error *err)
{
    const unit_case *what = rank->user;
    one_unit one = {0};
    fsdp_status status = build(&one, rank, what, backwards, err);
    if (status == FSDP_OK)
        status = what->body(rank, &one, err);
    fsdp_root_free(one.root);
    fsdp_model_free(one.model);
    fsdp_mesh_free(one.mesh);
    return status;
}

static fsdp_status run_forwards(world_rank *rank, fsdp_error *err)
{
    return run_on(rank, false, err);
}

static fsdp_status run_backwards(world_rank *rank, fsdp_error *err)
{
    return run_on(rank, true, err);
}

static void expect_run(world_body run, unit_case what)
{
    static const char *const devices[] = {"cpu", "cpu-async"};
    int64_t ranks = 1;
    for (int i = 0; i < what.mesh_ndim; i++)
        ranks *= what.mesh_shape[i];
    for (size_t i = is_repeated("cpu"); i < 2; i++) {
        fsdp_error err = {0};
        cr_assert_eq(run_worlds((int)ranks, devices[i], run, &what, &err), FSDP_OK,
                     "%lld ranks on %s: %s", (long long)ranks, devices[i], err.text);
    }
}

static void expect_case(unit_case what)
{
    expect_run(run_forwards, what);
}

static fsdp_status add(one_unit *one, fsdp_dtype dtype, int ndim, const int64_t *shape,
                       fsdp_error *err)
{
    char name[16];
    snprintf(name, sizeof name, "u.%d", one->count);
    return fsdp_model_add(
        one->model, &(fsdp_param_spec){.name = name, .dtype = dtype, .ndim = ndim, .shape = shape},
        &one->params[one->count++], err);
}

/* --- gathers ---------------------------------------------------------------------------------- */

/* Every element is its own number. */
static float number_at(const fsdp_param *param, const int64_t *at)
{
    return (float)fsdp_box_position(fsdp_param_describe(param).ndim,
                                    fsdp_param_describe(param).shape, at) +
           1;
}

static fsdp_status check_gathered(fsdp_param *param, fsdp_error *err)
{
    const float *data = fsdp_param_data(param);
    fsdp_box box;
    int64_t at[FSDP_MAX_DIMS];
    if (!data)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' is not there", fsdp_param_name(param));
    fsdp_param_data_box(param, &box);
    if (fsdp_box_count(&box) == 0)
        return FSDP_OK;
    memcpy(at, box.lo, sizeof at);
    do
        if (*data++ != number_at(param, at))
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s': %g at %lld, %g was expected",
                             fsdp_param_name(param), (double)data[-1], (long long)at[0],
                             (double)number_at(param, at));
    while (next_element(&box, at));
    return FSDP_OK;
}

static fsdp_status check_all_gathered(one_unit *one, fsdp_error *err)
{
    for (int i = 0; i < one->count; i++)
        FSDP_TRY(check_gathered(one->params[i], err));
    return FSDP_OK;
}

/* Gathers by hand, in forward, and in backward: after an int reshard from the kept slices. */
static fsdp_status gather_everywhere(world_rank *rank, one_unit *one, fsdp_error *err)
{
    (void)rank;
    FSDP_TRY(fsdp_root_init(one->root, tensor_number, NULL, err));
    FSDP_TRY(fsdp_unit_unshard(one->unit, false, NULL, err));
    FSDP_TRY(check_all_gathered(one, err));
    FSDP_TRY(fsdp_unit_reshard(one->unit, err));
    FSDP_TRY(fsdp_root_begin_forward(one->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(one->unit, err));
    FSDP_TRY(check_all_gathered(one, err));
    FSDP_TRY(fsdp_unit_post_forward(one->unit, err));
    FSDP_TRY(fsdp_root_end_forward(one->root, err));
    FSDP_TRY(fsdp_unit_pre_backward(one->unit, err));
    FSDP_TRY(check_all_gathered(one, err));
    FSDP_TRY(fsdp_unit_post_backward(one->unit, err));
    return fsdp_root_end_backward(one->root, err);
}

/* gather_everywhere with values that only rank 0 has at first. */
static fsdp_status gather_synced(world_rank *rank, one_unit *one, fsdp_error *err)
{
    (void)rank;
    FSDP_TRY(fsdp_root_sync_from_rank0(one->root, tensor_number, NULL, err));
    FSDP_TRY(fsdp_unit_unshard(one->unit, false, NULL, err));
    FSDP_TRY(check_all_gathered(one, err));
    return fsdp_unit_reshard(one->unit, err);
}

static fsdp_status declare_sizes(one_unit *one, fsdp_error *err)
{
    for (int64_t n = 1; n <= 17; n++)
        FSDP_TRY(add(one, FSDP_F32, 1 + (int)(n % 2), (int64_t[]){n, 3}, err));
    return FSDP_OK;
}

Test(unit_values, every_size_is_gathered_on_every_mesh)
{
    for (int reshard = 1; reshard <= 2; reshard++) {
        fsdp_unit_opts opts = (fsdp_unit_opts){0};
        opts.reshard_after_forward = reshard;
        for (int64_t ranks = 1; ranks <= 5; ranks++)
            if (reshard == 1 || ranks % 2 == 0)
                expect_case(
                    (unit_case){1, {ranks}, {"dp"}, opts, declare_sizes, gather_everywhere, NULL});
        for (int64_t rows = 1; rows <= 4; rows++)
            for (int64_t columns = reshard; columns <= 4; columns += reshard)
                expect_case((unit_case){2,
                                        {rows, columns},
                                        {"rep", "dp"},
                                        opts,
                                        declare_sizes,
                                        gather_everywhere,
                                        NULL});
    }
}

/* Along dim 0 (strided over dp), along dim 1, and replicated. */
static fsdp_status declare_tensor_parallel(one_unit *one, fsdp_error *err)
{
    static const fsdp_placement placements[] = {
        {FSDP_SHARD, 0, 0}, {FSDP_SHARD, 1, 0}, {FSDP_REPLICATE, 0, 0}};
    for (int64_t n = 1; n <= 17; n++) {
        FSDP_TRY(add(one, FSDP_F32, 2, (int64_t[]){n, 5}, err));
        FSDP_TRY(fsdp_param_set_placement(one->params[n - 1], "tp", placements[n % 3], err));
    }
    return FSDP_OK;
}

Test(unit_values, tensor_parallel_parameters_are_gathered_to_this_ranks_part)
{
    fsdp_unit_opts opts = (fsdp_unit_opts){0};
    opts.shard_dims = "dp";
    opts.replicate_dims = "";
    for (int64_t dp = 1; dp <= 4; dp++)
        for (int64_t tp = 1; tp <= 4; tp++)
            expect_case((unit_case){
                2, {dp, tp}, {"dp", "tp"}, opts, declare_tensor_parallel, gather_everywhere, NULL});
    opts.replicate_dims = "rep";
    expect_case((unit_case){
        3, {2, 2, 3}, {"rep", "dp", "tp"}, opts, declare_tensor_parallel, gather_everywhere, NULL});
}

static void expect_synced(world_body run)
{
    fsdp_unit_opts opts = (fsdp_unit_opts){0};
    for (int64_t ranks = 1; ranks <= 4; ranks++)
        expect_run(run, (unit_case){1, {ranks}, {"dp"}, opts, declare_sizes, gather_synced, NULL});
    opts.shard_dims = "dp";
    opts.replicate_dims = "";
    expect_run(
        run,
        (unit_case){2, {2, 2}, {"dp", "tp"}, opts, declare_tensor_parallel, gather_synced, NULL});
}

Test(unit_values, every_rank_gets_what_rank_0_has)
{
    expect_synced(run_forwards);
}

Test(unit_values, rank_0_is_rank_0_in_whatever_place_of_the_mesh)
{
    expect_synced(run_backwards);
}

static void cut_dim_one(void *user, const fsdp_param *param, fsdp_param_place *place)
{
    (void)user;
    place->dim = fsdp_param_describe(param).ndim > 1 ? -1 : 0;
}

static fsdp_status declare_even(one_unit *one, fsdp_error *err)
{
    FSDP_TRY(add(one, FSDP_F32, 2, (int64_t[]){3, 8}, err));
    FSDP_TRY(add(one, FSDP_F32, 3, (int64_t[]){2, 3, 4}, err));
    return add(one, FSDP_F32, 1, (int64_t[]){5}, err);
}

Test(unit_values, parameters_are_cut_along_other_dims)
{
    fsdp_unit_opts opts = (fsdp_unit_opts){0};
    opts.placement = cut_dim_one;
    for (int64_t ranks = 1; ranks <= 4; ranks *= 2)
        expect_case((unit_case){1, {ranks}, {"dp"}, opts, declare_even, gather_everywhere, NULL});
}

static fsdp_status expect_uneven_error(world_rank *rank, fsdp_error *err)
{
    const unit_case *what = rank->user;
    one_unit one = {0};
    fsdp_error found = {0};
    fsdp_status status = build(&one, rank, what, false, &found);
    fsdp_root_free(one.root);
    fsdp_model_free(one.model);
    fsdp_mesh_free(one.mesh);
    if (status != FSDP_ERR_USAGE || !strstr(found.text, "only dim 0 may be uneven"))
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "status %d: %s", status, found.text);
    return FSDP_OK;
}

Test(unit_values, other_dims_must_divide_evenly)
{
    fsdp_unit_opts opts = (fsdp_unit_opts){0};
    opts.placement = cut_dim_one;
    unit_case what = {1, {3}, {"dp"}, opts, declare_even, NULL, NULL};
    fsdp_error err = {0};
    cr_assert_eq(run_worlds(3, "cpu", expect_uneven_error, &what, &err), FSDP_OK, "%s", err.text);
}

/* --- reductions ------------------------------------------------------------------------------- */

typedef struct divide_case {
    double factor; /* 0: none */
    bool force_sum;
    int steps; /* backwards without synchronisation before the last */
} divide_case;

static int rank_of(const one_unit *one)
{
    return fsdp_world_rank(one->model->world);
}

/* Rank r gives r + 1 plus the element's number, in small integers: sums are exact. */
static fsdp_status give_grads(one_unit *one, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_begin_forward(one->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(one->unit, err));
    FSDP_TRY(fsdp_unit_post_forward(one->unit, err));
    FSDP_TRY(fsdp_root_end_forward(one->root, err));
    FSDP_TRY(fsdp_unit_pre_backward(one->unit, err));
    for (int i = 0; i < one->count; i++) {
        fsdp_param *param = one->params[i];
        void *grad = fsdp_param_grad(param);
        if (!grad)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "no gradient");
        for (int64_t e = 0; e < fsdp_param_count(param); e++) {
            float value = (float)(rank_of(one) + 1 + e % 3);
            fsdp_cast((char *)grad + (size_t)e * fsdp_dtype_size(param->grad_dtype),
                      param->grad_dtype, &value, FSDP_F32, 1);
        }
    }
    FSDP_TRY(fsdp_unit_post_backward(one->unit, err));
    return fsdp_root_end_backward(one->root, err);
}

static fsdp_status check_shard_grads(one_unit *one, double factor, int times, fsdp_error *err)
{
    int ranks = fsdp_world_size(one->model->world);
    double all = ranks * (ranks + 1) / 2.0;
    for (int i = 0; i < one->count; i++) {
        fsdp_param *param = one->params[i];
        fsdp_box box;
        (void)fsdp_param_shard(param, &box);
        const char *grad = fsdp_param_shard_grad(param);
        if (!grad)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' has no sharded gradient",
                             fsdp_param_name(param));
        int64_t first = box.lo[0] * (box.ndim > 1 ? box.len[1] : 1);
        for (int64_t e = 0; e < fsdp_box_count(&box); e++) {
            float value,
                expected = (float)(times * (all + ranks * (double)((first + e) % 3)) / factor),
                rounded;
            char narrow[8];
            fsdp_cast(&value, FSDP_F32, grad + (size_t)e * fsdp_dtype_size(param->dtype),
                      param->dtype, 1);
            fsdp_cast(narrow, param->dtype, &expected, FSDP_F32, 1);
            fsdp_cast(&rounded, FSDP_F32, narrow, param->dtype, 1);
            if (value != rounded)
                return fsdp_fail(
                    err, FSDP_ERR_INTERNAL, "'%s' element %lld: %.9g, %.9g was expected",
                    fsdp_param_name(param), (long long)e, (double)value, (double)rounded);
        }
    }
    return FSDP_OK;
}

static fsdp_status reduce(world_rank *rank, one_unit *one, fsdp_error *err)
{
    const divide_case *divide = ((const unit_case *)rank->user)->user;
    int ranks = fsdp_world_size(rank->world);
    if (divide->factor > 0)
        FSDP_TRY(fsdp_unit_set_gradient_divide_factor(one->unit, divide->factor, err));
    FSDP_TRY(fsdp_unit_set(one->unit, FSDP_UNIT_FORCE_SUM_REDUCTION_FOR_COMMS, divide->force_sum,
                           false, err));
    for (int step = 0; step <= divide->steps; step++) {
        FSDP_TRY(fsdp_unit_set(one->unit, FSDP_UNIT_REQUIRES_GRADIENT_SYNC, step == divide->steps,
                               false, err));
        FSDP_TRY(give_grads(one, err));
    }
    return check_shard_grads(one, divide->factor > 0 ? divide->factor : ranks, divide->steps + 1,
                             err);
}

static fsdp_status declare_few(one_unit *one, fsdp_error *err)
{
    FSDP_TRY(add(one, FSDP_F32, 2, (int64_t[]){5, 3}, err));
    FSDP_TRY(add(one, FSDP_F32, 1, (int64_t[]){7}, err));
    return add(one, FSDP_F32, 2, (int64_t[]){8, 2}, err);
}

Test(unit_values, gradients_are_divided_exactly_once)
{
    static const double factors[] = {0, 1, 2, 4};
    static const fsdp_dtype reduce_dtypes[] = {FSDP_DTYPE_NONE, FSDP_F32, FSDP_BF16, FSDP_F16};
    for (int64_t ranks = 1; ranks <= 4; ranks *= 2)
        for (size_t f = 0; f < 4; f++)
            for (size_t d = 0; d < 4; d++)
                for (int kind = 0; kind < 4; kind++) {
                    divide_case divide = {factors[f], kind % 2 == 1, kind / 2};
                    fsdp_unit_opts opts = (fsdp_unit_opts){0};
                    opts.reduce_dtype = reduce_dtypes[d];
                    expect_case(
                        (unit_case){1, {ranks}, {"dp"}, opts, declare_few, reduce, &divide});
                }
}

Test(unit_values, gradients_are_reduced_over_replicas_and_shards)
{
    static const int64_t shapes[][2] = {{2, 2}, {2, 1}, {4, 1}, {1, 4}};
    for (size_t i = 0; i < 4; i++)
        for (int kind = 0; kind < 4; kind++) {
            divide_case divide = {0, kind % 2 == 1, kind / 2};
            expect_case((unit_case){2,
                                    {shapes[i][0], shapes[i][1]},
                                    {"rep", "dp"},
                                    (fsdp_unit_opts){0},
                                    declare_few,
                                    reduce,
                                    &divide});
        }
}

static fsdp_status declare_mixed(one_unit *one, fsdp_error *err)
{
    FSDP_TRY(add(one, FSDP_BF16, 2, (int64_t[]){5, 3}, err));
    FSDP_TRY(add(one, FSDP_F32, 1, (int64_t[]){7}, err));
    return add(one, FSDP_BF16, 1, (int64_t[]){9}, err);
}

Test(unit_values, gradients_of_several_dtypes_are_reduced_in_the_wider)
{
    divide_case divide = {0, false, 1};
    expect_case((unit_case){1, {2}, {"dp"}, (fsdp_unit_opts){0}, declare_mixed, reduce, &divide});
    expect_case((unit_case){1, {4}, {"dp"}, (fsdp_unit_opts){0}, declare_mixed, reduce, &divide});
}

Test(unit_values, gradients_are_reduced_along_other_dims)
{
    divide_case divide = {0, false, 0};
    fsdp_unit_opts opts = (fsdp_unit_opts){0};
    opts.shard_dims = "";
    opts.replicate_dims = "dp";
    expect_case((unit_case){1, {3}, {"dp"}, opts, declare_few, reduce, &divide});
}

/* --- partial reductions whose gradients change ------------------------------------------------ */

static fsdp_status give_one(one_unit *one, int which, fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_pre_backward(one->unit, err));
    float *grad = fsdp_param_grad(one->params[which]);
    for (int64_t e = 0; e < fsdp_param_count(one->params[which]); e++)
        grad[e] = (float)(which + 1);
    FSDP_TRY(fsdp_unit_post_backward(one->unit, err));
    return fsdp_root_end_backward(one->root, err);
}

static fsdp_status change_partial(world_rank *rank, one_unit *one, fsdp_error *err)
{
    static const float expected[] = {1, 4, 3};
    (void)rank;
    FSDP_TRY(fsdp_unit_set(one->unit, FSDP_UNIT_REQUIRES_ALL_REDUCE, false, false, err));
    FSDP_TRY(give_one(one, 0, err));
    FSDP_TRY(give_one(one, 1, err));
    FSDP_TRY(fsdp_unit_set(one->unit, FSDP_UNIT_REQUIRES_ALL_REDUCE, true, false, err));
    FSDP_TRY(fsdp_unit_pre_backward(one->unit, err));
    for (int which = 1; which < 3; which++) {
        float *grad = fsdp_param_grad(one->params[which]);
        for (int64_t e = 0; e < fsdp_param_count(one->params[which]); e++)
            grad[e] = (float)(which + 1);
    }
    FSDP_TRY(fsdp_unit_post_backward(one->unit, err));
    FSDP_TRY(fsdp_root_end_backward(one->root, err));
    for (int i = 0; i < 3; i++) {
        const float *grad = fsdp_param_shard_grad(one->params[i]);
        fsdp_box box;
        (void)fsdp_param_shard(one->params[i], &box);
        for (int64_t e = 0; e < fsdp_box_count(&box); e++)
            if (!grad || grad[e] != expected[i])
                return fsdp_fail(err, FSDP_ERR_INTERNAL, "parameter %d: %g, %g was expected", i,
                                 grad ? (double)grad[e] : -1.0, (double)expected[i]);
    }
    return FSDP_OK;
}

Test(unit_values, partial_reductions_are_packed_anew_when_gradients_change)
{
    expect_case((unit_case){
        2, {2, 2}, {"rep", "dp"}, (fsdp_unit_opts){0}, declare_few, change_partial, NULL});
}

/* The backward with the all-reduce over replicas has no gradients of its own, or does not run. */
static fsdp_status end_partial(world_rank *rank, one_unit *one, fsdp_error *err)
{
    (void)rank;
    for (int is_run = 0; is_run < 2; is_run++) {
        FSDP_TRY(fsdp_unit_set(one->unit, FSDP_UNIT_REQUIRES_ALL_REDUCE, false, false, err));
        FSDP_TRY(give_one(one, 1, err));
        FSDP_TRY(fsdp_unit_set(one->unit, FSDP_UNIT_REQUIRES_ALL_REDUCE, true, false, err));
        if (is_run)
            FSDP_TRY(fsdp_unit_pre_backward(one->unit, err));
        FSDP_TRY(fsdp_root_end_backward(one->root, err));
        const float *grad = fsdp_param_shard_grad(one->params[1]);
        if (!grad || grad[0] != 2)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "run %d: %g, 2 was expected", is_run,
                             grad ? (double)grad[0] : -1.0);
        fsdp_root_zero_grad(one->root);
    }
    return FSDP_OK;
}

Test(unit_values, partial_reductions_end_also_without_new_gradients)
{
    expect_case(
        (unit_case){2, {2, 2}, {"rep", "dp"}, (fsdp_unit_opts){0}, declare_few, end_partial, NULL});
}

/* --- errors and memory ------------------------------------------------------------------------ */

static fsdp_status ask_too_early(world_rank *rank, one_unit *one, fsdp_error *err)
{
    fsdp_error found = {0};
    (void)rank;
    if (fsdp_param_data(one->params[0]) || fsdp_param_grad(one->params[0]))
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "a pointer came");
    if (fsdp_root_begin_forward(one->root, &found) != FSDP_ERR_USAGE ||
        !strstr(found.text, "the data of 'u.0' was requested while unit u is sharded"))
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "%s", found.text);
    return fsdp_root_begin_forward(one->root, err);
}

Test(unit_values, a_pointer_asked_for_too_early_is_the_error_of_the_next_call)
{
    expect_case((unit_case){1, {2}, {"dp"}, (fsdp_unit_opts){0}, declare_few, ask_too_early, NULL});
}

static fsdp_status expect_bytes(const one_unit *one, fsdp_memory_class class, int64_t bytes,
                                const char *when, fsdp_error *err)
{
    const fsdp_memory memory = fsdp_root_memory(one->root);
    if (memory.now[class] == bytes)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_INTERNAL, "%s: %lld bytes of class %d, %lld were expected", when,
                     (long long)memory.now[class], (int)class, (long long)bytes);
}

/* Two ranks, shapes 5x3, 7, 8x2: padded shards 9 + 4 + 8 elements. */
static fsdp_status count_memory(world_rank *rank, one_unit *one, fsdp_error *err)
{
    enum { SHARD = 21 * 4, WHOLE = 2 * SHARD, GRADS = (15 + 7 + 16) * 4 };
    (void)rank;
    FSDP_TRY(expect_bytes(one, FSDP_MEMORY_SHARD, SHARD, "at first", err));
    FSDP_TRY(fsdp_root_begin_forward(one->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(one->unit, err));
    FSDP_TRY(expect_bytes(one, FSDP_MEMORY_UNSHARDED, WHOLE, "in forward", err));
    FSDP_TRY(expect_bytes(one, FSDP_MEMORY_ALL_GATHER, WHOLE, "in forward", err));
    FSDP_TRY(fsdp_unit_post_forward(one->unit, err));
    FSDP_TRY(expect_bytes(one, FSDP_MEMORY_UNSHARDED, 0, "after forward", err));
    FSDP_TRY(fsdp_root_end_forward(one->root, err));
    FSDP_TRY(expect_bytes(one, FSDP_MEMORY_ALL_GATHER, 0, "after end_forward", err));
    FSDP_TRY(fsdp_unit_pre_backward(one->unit, err));
    FSDP_TRY(expect_bytes(one, FSDP_MEMORY_UNSHARDED, WHOLE, "in backward", err));
    FSDP_TRY(expect_bytes(one, FSDP_MEMORY_ALL_GATHER, 0, "in backward", err));
    for (int i = 0; i < one->count; i++)
        if (!fsdp_param_grad(one->params[i]))
            return FSDP_ERR_INTERNAL;
    FSDP_TRY(expect_bytes(one, FSDP_MEMORY_GRAD, GRADS, "in backward", err));
    FSDP_TRY(fsdp_unit_post_backward(one->unit, err));
    FSDP_TRY(expect_bytes(one, FSDP_MEMORY_UNSHARDED, 0, "after post_backward", err));
    FSDP_TRY(expect_bytes(one, FSDP_MEMORY_REDUCE, WHOLE, "after post_backward", err));
    FSDP_TRY(expect_bytes(one, FSDP_MEMORY_GRAD, SHARD, "after post_backward", err));
    FSDP_TRY(fsdp_root_end_backward(one->root, err));
    FSDP_TRY(expect_bytes(one, FSDP_MEMORY_REDUCE, 0, "after end_backward", err));
    fsdp_root_zero_grad(one->root);
    return expect_bytes(one, FSDP_MEMORY_GRAD, 0, "after zero_grad", err);
}

Test(unit_values, memory_is_counted_by_class)
{
    expect_case((unit_case){1, {2}, {"dp"}, (fsdp_unit_opts){0}, declare_few, count_memory, NULL});
}

/* --- values that anybody can compute ---------------------------------------------------------- */

Test(unit_values, uniform_numbers_are_the_documented_ones)
{
    static const double expected[] = {-0.743272781, -0.992512822, -0.568123102, -0.541130066};
    for (uint64_t i = 0; i < 4; i++)
        cr_assert_float_eq(fsdp_uniform(1, "layers.0.weight", i), expected[i], 1e-9);
}
