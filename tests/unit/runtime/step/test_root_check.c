/* With --check, every rank gets an error that names both sides when ranks declare or do different
 * things, and when a rank has no memory for the check. */
#include "base/core/mem.h"
#include "tests/support/ranks/worlds.h"
#include <fsdp/wrap.h>

#include <criterion/criterion.h>
#include <string.h>

typedef struct difference {
    bool in_shape, in_dtype, in_step;
    bool is_manual; /* backward is ended by hand */
    const char *words;
} difference;

typedef struct small_net {
    fsdp_mesh *mesh;
    fsdp_model *model;
    fsdp_root *root;
    fsdp_unit *unit[2];
} small_net;

static fsdp_status build(small_net *net, const world_rank *rank, fsdp_error *err)
{
    static const char *const names[] = {"a", "b"};
    const difference *what = rank->user;
    bool is_other = fsdp_world_rank(rank->world) == 2;
    int64_t size = fsdp_world_size(rank->world), rows = what->in_shape && is_other ? 5 : 4;
    FSDP_TRY(fsdp_world_mesh(rank->world, 1, &size, (const char *[]){"dp"}, &net->mesh, err));
    FSDP_TRY(fsdp_model_create(rank->world, &net->model, err));
    fsdp_unit_opts opts = {.mesh = net->mesh};
    if (what->in_dtype && is_other)
        opts.reduce_dtype = FSDP_BF16;
    for (int i = 0; i < 2; i++) {
        fsdp_param *weight;
        char name[] = {names[i][0], '.', 'w', '\0'};
        FSDP_TRY(fsdp_model_add(
            net->model,
            &(fsdp_param_spec){
                .name = name, .dtype = FSDP_F32, .ndim = 2, .shape = (int64_t[]){rows, 2}},
            &weight, err));
        FSDP_TRY(fsdp_unit_create(net->model, names[i], &opts, &net->unit[i], err));
    }
    return fsdp_root_create(net->model, &opts, &net->root, err);
}

/* Rank 2 may go through its units the other way round, without a gather that would tell. */
static fsdp_status step(small_net *net, const world_rank *rank, fsdp_error *err)
{
    const difference *what = rank->user;
    int first = what->in_step && fsdp_world_rank(rank->world) == 2;
    for (int i = 0; i < 2; i++)
        FSDP_TRY(fsdp_unit_unshard(net->unit[i], false, NULL, err));
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    FSDP_TRY(fsdp_unit_reshard(net->unit[first], err));
    FSDP_TRY(fsdp_unit_reshard(net->unit[!first], err));
    FSDP_TRY(fsdp_root_end_forward(net->root, err));
    if (!what->is_manual)
        return fsdp_root_end_backward(net->root, err);
    FSDP_TRY(fsdp_root_set_manual_backward_finalization(net->root, true, err));
    return fsdp_root_finalize_backward(net->root, false, NULL, err);
}

/* Every rank gets this error, before the run reaches another one. */
static fsdp_status run(world_rank *rank, fsdp_error *err)
{
    const difference *what = rank->user;
    fsdp_error told = {0};
    small_net net = {0};
    fsdp_status status = build(&net, rank, &told);
    if (status == FSDP_OK)
        status = step(&net, rank, &told);
    fsdp_root_free(net.root);
    fsdp_model_free(net.model);
    fsdp_mesh_free(net.mesh);
    if (status != (what->words ? FSDP_ERR_USAGE : FSDP_OK) ||
        (what->words && !strstr(told.text, what->words)))
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "rank %d has '%s'", fsdp_world_rank(rank->world),
                         told.text);
    return FSDP_OK;
}

static void expect_told(difference what)
{
    fsdp_error err = {0};
    cr_assert_eq(run_worlds(3, "cpu", run, &what, &err), FSDP_OK, "%s", err.text);
}

Test(root_check, ranks_that_do_the_same_hear_nothing)
{
    expect_told((difference){0});
}

Test(root_check, another_shape_is_told)
{
    expect_told((difference){.in_shape = true,
                             .words = "ranks 0 and 2 differ in what they declare: rank 0 has 'unit "
                                      "a: a.w f32 [4, 2] cut along dim 0', rank 2 has 'unit a: a.w "
                                      "f32 [5, 2]"});
}

Test(root_check, another_reduce_dtype_is_told)
{
    expect_told((difference){.in_dtype = true, .words = "reduced as bf16"});
}

Test(root_check, another_order_of_a_step_is_told)
{
    expect_told((difference){
        .in_step = true,
        .words = "differ in what they did in this step: rank 0 has 'reshard a', rank 2 has "
                 "'reshard b'"});
}

Test(root_check, another_order_is_told_where_backward_is_ended_by_hand)
{
    expect_told((difference){.is_manual = true});
    expect_told((difference){
        .in_step = true, .is_manual = true, .words = "differ in what they did in this step"});
}

/* --- memory ----------------------------------------------------------------------------------- */

static fsdp_status create(fsdp_model *model, const fsdp_mesh *mesh, bool is_flat, fsdp_error *err)
{
    const fsdp_unit_opts opts = {.mesh = mesh};
    const fsdp_wrap_opts flat_opts = {.mesh = mesh};
    fsdp_wrap *wrap = NULL;
    fsdp_root *root = NULL;
    fsdp_status status = is_flat ? fsdp_wrap_create(model, &flat_opts, &wrap, err)
                                 : fsdp_root_create(model, &opts, &root, err);
    fsdp_wrap_free(wrap);
    fsdp_root_free(root);
    return status;
}

typedef struct shortage {
    int at; /* which allocation fails */
    bool is_flat;
} shortage;

static fsdp_status create_in_shortage(world_rank *rank, fsdp_error *err)
{
    const shortage *what = rank->user;
    fsdp_mesh *mesh = NULL;
    fsdp_model *model = NULL;
    int64_t size = fsdp_world_size(rank->world);
    FSDP_TRY(fsdp_world_mesh(rank->world, 1, &size, (const char *[]){"dp"}, &mesh, err));
    fsdp_status status = fsdp_model_create(rank->world, &model, err);
    if (status == FSDP_OK)
        status = fsdp_model_add(
            model,
            &(fsdp_param_spec){
                .name = "w", .dtype = FSDP_F32, .ndim = 2, .shape = (int64_t[]){4, 2}},
            NULL, err);
    if (status == FSDP_OK)
        status = fsdp_ctl_barrier(fsdp_world_ctl(rank->world), err);
    if (status == FSDP_OK && fsdp_world_rank(rank->world) == 0)
        (void)fsdp_mem_fail_after(what->at, false);
    if (status == FSDP_OK)
        status = create(model, mesh, what->is_flat, err);
    fsdp_model_free(model);
    fsdp_mesh_free(mesh);
    return status;
}

/* Always a later allocation, until none is missing. A rank that waits would name who did not come. */
static void expect_word_of_memory(bool is_flat)
{
    enum { MOST_ALLOCATIONS = 1000, MOST_MS = 5000 };
    bool was_short = true;
    for (int i = 0; i < MOST_ALLOCATIONS && was_short; i++) {
        const shortage what = {.at = i, .is_flat = is_flat};
        const worlds_setup setup = {.ranks = 2, .deadline_ms = MOST_MS, .device = "cpu"};
        rank_outcome outcomes[2] = {{0}};
        fsdp_error err = {0};
        was_short =
            run_worlds_within(&setup, create_in_shortage, (void *)&what, outcomes, &err) != FSDP_OK;
        (void)fsdp_mem_fail_after(-1, false);
        for (int r = 0; r < 2; r++)
            cr_assert(outcomes[r].status == FSDP_OK || strstr(outcomes[r].err.text, "memory"),
                      "allocation %d, rank %d: %s", i, r, outcomes[r].err.text);
    }
    cr_assert(!was_short);
}

Test(root_check, a_rank_without_memory_for_a_root_keeps_nobody_waiting)
{
    expect_word_of_memory(false);
}

Test(root_check, a_rank_without_memory_for_a_wrapped_model_keeps_nobody_waiting)
{
    expect_word_of_memory(true);
}
