/*
 * Scenarios C1 to C4: one unit of uneven sizes over 128 ranks that are threads. Gathers at once, by
 * prefetch, in the hooks, and by eight neighbours give the original bit for bit; reductions in f32
 * and f16 give the plain gradients divided, added up and divided.
 */
#include "tests/support/nets/tensors.h"
#include "tests/support/ranks/worlds.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fsdp/root_init.h>

enum { RANKS = 128, COUNT = 8, LARGEST = 512 * 64, PER_RANK = 1190, NEIGHBOURS = 8 };

static const int64_t shapes[COUNT][2] = {{17, 257}, {17, 0},   {64, 312}, {64, 0},
                                         {64, 64},  {512, 64}, {256, 0},  {64, 297}};

typedef struct wide_unit {
    fsdp_mesh *mesh;
    fsdp_model *model;
    fsdp_unit *unit;
    fsdp_root *root;
    fsdp_param *params[COUNT];
    float *whole; /* the original of one */
} wide_unit;

typedef struct wide_case {
    int reshard;
    fsdp_dtype reduce_dtype;
    bool is_async, is_separate;
    fsdp_status (*body)(world_rank *rank, wide_unit *wide, fsdp_error *err);
} wide_case;

/* Every element of every parameter is its own number. */
static float number_at(size_t param, int64_t element)
{
    return (float)((int64_t)param * LARGEST + element + 1);
}

static fsdp_status number(void *user, const fsdp_param *param, const fsdp_box *box, void *data,
                          fsdp_error *err)
{
    const wide_unit *wide = user;
    size_t which = 0;
    (void)err;
    while (wide->params[which] != param)
        which++;
    int64_t first = fsdp_box_count(box) > 0
                        ? fsdp_box_position(box->ndim, fsdp_param_describe(param).shape, box->lo)
                        : 0;
    for (int64_t i = 0; i < fsdp_box_count(box); i++)
        ((float *)data)[i] = number_at(which, first + i);
    return FSDP_OK;
}

static fsdp_status build(wide_unit *wide, world_rank *rank, fsdp_error *err)
{
    const wide_case *what = rank->user;
    int64_t size = fsdp_world_size(rank->world);
    FSDP_TRY(fsdp_world_mesh(rank->world, 1, &size, (const char *[]){"dp"}, &wide->mesh, err));
    FSDP_TRY(fsdp_model_create(rank->world, &wide->model, err));
    for (size_t i = 0; i < COUNT; i++) {
        char name[16];
        snprintf(name, sizeof name, "u.%zu", i);
        FSDP_TRY(fsdp_model_add(wide->model,
                                &(fsdp_param_spec){.name = name,
                                                   .dtype = FSDP_F32,
                                                   .ndim = shapes[i][1] > 0 ? 2 : 1,
                                                   .shape = shapes[i]},
                                &wide->params[i], err));
    }
    fsdp_unit_opts opts = {.mesh = wide->mesh};
    opts.reshard_after_forward = what->reshard;
    opts.reduce_dtype = what->reduce_dtype;
    FSDP_TRY(fsdp_unit_create(wide->model, "u", &opts, &wide->unit, err));
    FSDP_TRY(fsdp_unit_set(wide->unit, FSDP_UNIT_SEPARATE_REDUCE_SCATTER_GROUP, what->is_separate,
                           false, err));
    FSDP_TRY(fsdp_unit_set(wide->unit, FSDP_UNIT_UNSHARD_ASYNC_OP, what->is_async, false, err));
    FSDP_TRY(fsdp_root_create(wide->model, &opts, &wide->root, err));
    return fsdp_root_init(wide->root, number, wide, err);
}

static fsdp_status run_case(world_rank *rank, fsdp_error *err)
{
    const wide_case *what = rank->user;
    wide_unit wide = {.whole = calloc(LARGEST, sizeof(float))};
    rank->notes_collectives = true;
    fsdp_status status = build(&wide, rank, err);
    if (status == FSDP_OK)
        status = what->body(rank, &wide, err);
    fsdp_root_free(wide.root);
    fsdp_model_free(wide.model);
    fsdp_mesh_free(wide.mesh);
    free(wide.whole);
    return status;
}

static void expect_case(const char *device, wide_case what)
{
    fsdp_error err = {0};
    cr_assert_eq(run_worlds(RANKS, device, run_case, &what, &err), FSDP_OK, "%s: %s", device,
                 err.text);
}

static int64_t count_of(size_t param)
{
    return shapes[param][0] * (shapes[param][1] > 0 ? shapes[param][1] : 1);
}

/* --- C1: gathers ------------------------------------------------------------------------------ */

static fsdp_status expect_sharded(wide_unit *wide, fsdp_error *err)
{
    for (size_t i = 0; i < COUNT; i++) {
        for (int64_t e = 0; e < count_of(i); e++)
            wide->whole[e] = number_at(i, e);
        FSDP_TRY(expect_shard(wide->params[i], wide->whole, 0, err));
        if (wide->params[i]->data)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "parameter %zu is gathered", i);
    }
    return FSDP_OK;
}

static fsdp_status expect_gathered(wide_unit *wide, fsdp_error *err)
{
    for (size_t i = 0; i < COUNT; i++) {
        const float *data = fsdp_param_data(wide->params[i]);
        for (int64_t e = 0; e < count_of(i); e++)
            if (!data || data[e] != number_at(i, e))
                return fsdp_fail(err, FSDP_ERR_INTERNAL, "parameter %zu, element %lld: %g", i,
                                 (long long)e, data ? (double)data[e] : -1.0);
    }
    return FSDP_OK;
}

static fsdp_status gather_by_hand(world_rank *rank, wide_unit *wide, fsdp_error *err)
{
    FSDP_TRY(expect_sharded(wide, err));
    for (int is_async = 0; is_async < 2; is_async++) {
        fsdp_unshard_handle *handle;
        FSDP_TRY(fsdp_unit_unshard(wide->unit, is_async == 1, &handle, err));
        FSDP_TRY(fsdp_unshard_wait(handle, err));
        FSDP_TRY(fsdp_unshard_wait(handle, err)); /* returns at once */
        FSDP_TRY(expect_gathered(wide, err));
        FSDP_TRY(fsdp_unit_reshard(wide->unit, err));
        FSDP_TRY(expect_sharded(wide, err));
    }
    return expect_events(rank, "U u|AG u/128|R u|U u|AG u/128|R u", err);
}

static fsdp_status forward(wide_unit *wide, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_begin_forward(wide->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(wide->unit, err));
    FSDP_TRY(expect_gathered(wide, err));
    FSDP_TRY(fsdp_unit_post_forward(wide->unit, err));
    return fsdp_root_end_forward(wide->root, err);
}

static fsdp_status gather_in_hooks(world_rank *rank, wide_unit *wide, fsdp_error *err)
{
    FSDP_TRY(forward(wide, err));
    FSDP_TRY(expect_sharded(wide, err));
    FSDP_TRY(fsdp_unit_pre_backward(wide->unit, err));
    FSDP_TRY(expect_gathered(wide, err));
    FSDP_TRY(fsdp_unit_post_backward(wide->unit, err));
    FSDP_TRY(fsdp_root_end_backward(wide->root, err));
    return expect_events(rank, "U u|AG u/128|R u|U u|AG u/128|R u|post u", err);
}

Test(scenarios_wide, c1_every_way_of_gathering_gives_the_original)
{
    /* on cpu, asynchronous units behave as others */
    for (int kind = 0; kind < 3; kind++) {
        const char *device = kind == 0 ? "cpu" : "cpu-async";
        wide_case what = {.reshard = FSDP_RESHARD_ALWAYS, .is_async = kind == 2};
        what.body = gather_by_hand;
        expect_case(device, what);
        what.body = gather_in_hooks;
        expect_case(device, what);
    }
}

/* The sizes of the scenario: 1190 elements per rank. */
static void expect_size(void *user, const fsdp_trace_event *event)
{
    int *wrong = user;
    if (event->call && event->call->kind == FSDP_ALL_GATHER)
        *wrong += event->call->count != PER_RANK || event->bytes != (int64_t)RANKS * PER_RANK * 4;
}

static fsdp_status gather_and_measure(world_rank *rank, wide_unit *wide, fsdp_error *err)
{
    int wrong = 0;
    fsdp_trace_set_listener(rank->world->parts.trace, expect_size, &wrong);
    FSDP_TRY(forward(wide, err));
    return wrong == 0 ? FSDP_OK : fsdp_fail(err, FSDP_ERR_INTERNAL, "other sizes");
}

Test(scenarios_wide, c1_every_rank_brings_1190_elements)
{
    expect_case("cpu", (wide_case){.reshard = FSDP_RESHARD_ALWAYS, .body = gather_and_measure});
}

/* --- C2: gathers of eight ranks --------------------------------------------------------------- */

static fsdp_status gather_of_neighbours(world_rank *rank, wide_unit *wide, fsdp_error *err)
{
    FSDP_TRY(forward(wide, err));
    FSDP_TRY(expect_sharded(wide, err));
    FSDP_TRY(fsdp_unit_pre_backward(wide->unit, err));
    FSDP_TRY(expect_gathered(wide, err));
    const int *ranks = fsdp_comm_ranks(wide->unit->groups[0].again->comm);
    int me = fsdp_world_rank(rank->world), first = me / NEIGHBOURS * NEIGHBOURS;
    if (ranks[0] != first || ranks[NEIGHBOURS - 1] != first + NEIGHBOURS - 1)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "rank %d is with %d", me, ranks[0]);
    FSDP_TRY(fsdp_unit_post_backward(wide->unit, err));
    FSDP_TRY(fsdp_root_end_backward(wide->root, err));
    return expect_events(rank, "U u|AG u/128|R u|U u|AG u/8|R u|post u", err);
}

Test(scenarios_wide, c2_eight_neighbours_gather_what_they_kept)
{
    wide_case what = {.reshard = NEIGHBOURS, .body = gather_of_neighbours};
    expect_case("cpu", what);
    expect_case("cpu-async", what);
}

/* --- C3, C4: reductions ----------------------------------------------------------------------- */

/* In f16 the sum of all would overflow, if nothing was divided before. */
static float grad_at(int rank, int64_t element, fsdp_dtype dtype)
{
    return (float)(rank % 8) * (float)(1 + element % 3) * (dtype == FSDP_F16 ? 512 : 1);
}

static fsdp_status give_grads(world_rank *rank, wide_unit *wide, fsdp_error *err)
{
    const wide_case *what = rank->user;
    FSDP_TRY(forward(wide, err));
    FSDP_TRY(fsdp_unit_pre_backward(wide->unit, err));
    for (size_t i = 0; i < COUNT; i++) {
        float *grad = fsdp_param_grad(wide->params[i]);
        for (int64_t e = 0; e < count_of(i); e++)
            grad[e] = grad_at(fsdp_world_rank(rank->world), e, what->reduce_dtype);
    }
    FSDP_TRY(fsdp_unit_post_backward(wide->unit, err));
    return fsdp_root_end_backward(wide->root, err);
}

/* The plain gradient, divided, added up over all ranks, and divided. */
static fsdp_status reduce_plainly(world_rank *rank, wide_unit *wide, size_t param, double before,
                                  double after, fsdp_error *err)
{
    const wide_case *what = rank->user;
    float *whole = wide->whole;
    const fsdp_collective call = {.kind = FSDP_ALL_REDUCE,
                                  .dtype = FSDP_F32,
                                  .in = whole,
                                  .out = whole,
                                  .count = count_of(param)};
    for (int64_t e = 0; e < call.count; e++)
        whole[e] = grad_at(fsdp_world_rank(rank->world), e, what->reduce_dtype) / (float)before;
    FSDP_TRY(fsdp_comm_run(fsdp_world_comm(rank->world, wide->mesh, 0, 0), &call, err));
    for (int64_t e = 0; e < call.count; e++)
        whole[e] /= (float)after;
    return FSDP_OK;
}

static fsdp_status reduce(world_rank *rank, wide_unit *wide, fsdp_error *err)
{
    const wide_case *what = rank->user;
    bool is_narrow = what->reduce_dtype == FSDP_F16;
    double before = is_narrow ? 16 : 1, after = is_narrow ? 8 : RANKS;
    const fsdp_divide divide = fsdp_divide_for(&wide->unit->groups[0], what->reduce_dtype);
    if (is_narrow && (divide.before != before || divide.after != after))
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "divided by %g and %g", divide.before,
                         divide.after);
    FSDP_TRY(give_grads(rank, wide, err));
    for (size_t i = 0; i < COUNT; i++) {
        FSDP_TRY(reduce_plainly(rank, wide, i, before, after, err));
        if (wide->whole[0] != (is_narrow ? 3.5f * 512 : 3.5f))
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "the mean is %g", (double)wide->whole[0]);
        FSDP_TRY(expect_shard_grad(wide->params[i], wide->whole, 0, err));
    }
    return FSDP_OK;
}

static void expect_reductions(fsdp_dtype dtype)
{
    static const char *const devices[] = {"cpu", "cpu-async"};
    for (int kind = 0; kind < 2; kind++)
        expect_case(devices[kind], (wide_case){.reshard = FSDP_RESHARD_ALWAYS,
                                               .reduce_dtype = dtype,
                                               .is_separate = kind == 1,
                                               .body = reduce});
}

Test(scenarios_wide, c3_gradients_are_what_the_plain_ones_give)
{
    expect_reductions(FSDP_F32);
}

Test(scenarios_wide, c4_in_f16_they_are_divided_before_and_after)
{
    expect_reductions(FSDP_F16);
}
