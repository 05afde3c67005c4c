/* Mesh, model, root, optimizer and saver are freed in every order: each works until it is freed itself, and
 * nothing is used after it was freed. MALLOC_PERTURB_ makes memory that was freed useless. */
#include "tests/unit/runtime/expect_toy.h"
#include <fsdp/async_save.h>
#include <stdatomic.h>

enum { HANDLES = 5 };

typedef struct family {
    fsdp_mesh *mesh;
    fsdp_model *model;
    fsdp_root *root; /* of the wrap, if there is one */
    fsdp_wrap *wrap;
    fsdp_optim *optim;
    fsdp_async_saver *saver;
    fsdp_param *weight;
    bool is_freed[HANDLES];
} family;

enum { MESH, MODEL, ROOT, OPTIM, SAVER };

static fsdp_status create(family *of, fsdp_world *world, bool wraps, fsdp_error *err)
{
    int64_t size = fsdp_world_size(world);
    const char *dim = "dp";
    *of = (family){0};
    FSDP_TRY(fsdp_world_mesh(world, 1, &size, &dim, &of->mesh, err));
    FSDP_TRY(fsdp_model_create(world, &of->model, err));
    FSDP_TRY(fsdp_model_add(
        of->model,
        &(fsdp_param_spec){.name = "a.w", .dtype = FSDP_F32, .ndim = 2, .shape = (int64_t[]){6, 5}},
        &of->weight, err));
    const fsdp_unit_opts opts = {.mesh = of->mesh};
    if (wraps) {
        FSDP_TRY(fsdp_wrap_create(of->model, &(fsdp_wrap_opts){.mesh = of->mesh}, &of->wrap, err));
        of->root = fsdp_wrap_root(of->wrap);
    } else {
        FSDP_TRY(fsdp_unit_create(of->model, "a", &opts, NULL, err));
        FSDP_TRY(fsdp_root_create(of->model, &opts, &of->root, err));
    }
    FSDP_TRY(fsdp_adamw_create(of->root, NULL, &of->optim, err));
    return fsdp_async_saver_create(of->root, NULL, &of->saver, err);
}

/* A step of a program that holds the optimizer alone: units and parameters are still there. */
static fsdp_status step(const family *of, fsdp_error *err)
{
    fsdp_unit *unit = fsdp_root_unit_at(of->root, fsdp_root_unit_count(of->root) - 1);
    FSDP_TRY(fsdp_root_begin_forward(of->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(unit, err));
    EXPECT(fsdp_param_data(of->weight));
    FSDP_TRY(fsdp_unit_post_forward(unit, err));
    FSDP_TRY(fsdp_root_end_forward(of->root, err));
    FSDP_TRY(fsdp_unit_pre_backward(unit, err));
    EXPECT(fsdp_param_grad(of->weight));
    FSDP_TRY(fsdp_unit_post_backward(unit, err));
    FSDP_TRY(fsdp_root_end_backward(of->root, err));
    return fsdp_optim_step(of->optim, err);
}

/* It fails later, in the background; the first call returns the failure of the save before. */
static void start_save(fsdp_async_saver *saver)
{
    for (int i = 0; i < 2; i++)
        (void)!fsdp_async_save(saver, "/dev/null/nowhere", NULL, NULL);
}

static void free_one(family *of, int which)
{
    of->is_freed[which] = true;
    switch (which) {
    case MESH: fsdp_mesh_free(of->mesh); return;
    case MODEL: fsdp_model_free(of->model); return;
    case ROOT: of->wrap ? fsdp_wrap_free(of->wrap) : fsdp_root_free(of->root); return;
    case OPTIM: fsdp_optim_free(of->optim); return;
    default: fsdp_async_saver_free(of->saver);
    }
}

static fsdp_status free_in_order(family *of, const int order[HANDLES], fsdp_error *err)
{
    for (int i = 0; i < HANDLES; i++) {
        free_one(of, order[i]);
        if (!of->is_freed[OPTIM])
            FSDP_TRY(step(of, err));
        if (!of->is_freed[SAVER])
            start_save(of->saver);
    }
    return FSDP_OK;
}

/* The number-th order of the handles. */
static void choose_order(int number, int order[HANDLES])
{
    bool is_taken[HANDLES] = {false};
    for (int i = 0; i < HANDLES; i++) {
        int skip = number % (HANDLES - i), which = 0;
        number /= HANDLES - i;
        for (; is_taken[which] || skip > 0; which++)
            skip -= !is_taken[which];
        is_taken[which] = true;
        order[i] = which;
    }
}

static fsdp_status free_in_all_orders(world_rank *rank, fsdp_error *err)
{
    for (int number = 0; number < 2 * 5 * 4 * 3 * 2; number++) {
        family of;
        int order[HANDLES];
        choose_order(number / 2, order);
        FSDP_TRY(create(&of, rank->world, number % 2, err));
        start_save(of.saver);
        FSDP_TRY(free_in_order(&of, order, err));
    }
    return FSDP_OK;
}

Test(free_order, every_order_is_right)
{
    expect_body_on(1, "cpu", free_in_all_orders, NULL);
    expect_body_on(2, "cpu-async", free_in_all_orders, NULL);
}

static void count_end(void *ended)
{
    atomic_fetch_add((atomic_int *)ended, 1);
}

/* Saver and optimizer that a program forgot, or frees after its world. */
static fsdp_status leave_the_saver(world_rank *rank, fsdp_error *err)
{
    family of;
    FSDP_TRY(create(&of, rank->world, false, err));
    fsdp_optim_free(of.optim);
    fsdp_mesh_free(of.mesh);
    of.root->owner = rank->user;
    of.root->end_owner = count_end;
    fsdp_root_free(of.root);
    fsdp_model_free(of.model);
    return FSDP_OK; /* the world ends the saver, which ends the root */
}

Test(free_order, a_world_ends_the_root_of_a_saver)
{
    for (int i = 0; i < 2; i++) {
        atomic_int ended = 0;
        expect_body_on(2, i == 0 ? "cpu" : "cpu-async", leave_the_saver, &ended);
        cr_expect_eq(ended, 2, "of 2 roots %d have ended", (int)ended);
    }
}
