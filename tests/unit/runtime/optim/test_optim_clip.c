/*
 * Clipping by the norm of gradients that lie on several meshes, and schedules of the learning rate.
 */
#include "tests/support/nets/state_net.h"

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

/* --- gradients on several meshes -------------------------------------------------------------- */

enum { RANKS = 4, PARAMS = 6 };

/* One unit cut over dp, its first two parameters over tp, too; one over all ranks; one of replicas. */
static const struct {
    const char *name;
    int64_t shape[2];
} declared[PARAMS] = {{"cut.column", {7, 4}},  {"cut.row", {5, 6}},  {"cut.both", {3, 2}},
                      {"flat.weight", {9, 3}}, {"flat.one", {1, 2}}, {"copied.weight", {4, 3}}};

typedef struct mixed_net {
    fsdp_mesh *square, *line;
    fsdp_model *model;
    fsdp_root *root;
    fsdp_param *params[PARAMS];
} mixed_net;

typedef struct clip_case {
    double p, max_norm;
    double norms[RANKS]; /* what each rank was told */
} clip_case;

static float grad_at(int param, int64_t element)
{
    return (float)fsdp_uniform(9, declared[param].name, (uint64_t)element);
}

static double expected_norm(double p)
{
    double sum = 0, most = 0;
    for (int i = 0; i < PARAMS; i++)
        for (int64_t e = 0; e < declared[i].shape[0] * declared[i].shape[1]; e++) {
            double size = fabs((double)grad_at(i, e));
            sum += pow(size, p);
            most = fmax(most, size);
        }
    return isinf(p) ? most : pow(sum, 1 / p);
}

static fsdp_status add_units(mixed_net *net, fsdp_error *err)
{
    fsdp_unit *unit;
    fsdp_unit_opts over_dp = (fsdp_unit_opts){.mesh = net->square}, copied = over_dp;
    const fsdp_unit_opts over_all = {.mesh = net->line};
    over_dp.shard_dims = "dp";
    over_dp.replicate_dims = "";
    copied.shard_dims = "";
    copied.replicate_dims = "dp,tp";
    FSDP_TRY(
        fsdp_param_set_placement(net->params[0], "tp", (fsdp_placement){FSDP_SHARD, 0, 0}, err));
    FSDP_TRY(
        fsdp_param_set_placement(net->params[1], "tp", (fsdp_placement){FSDP_SHARD, 1, 0}, err));
    FSDP_TRY(fsdp_unit_create(net->model, "cut", &over_dp, &unit, err));
    FSDP_TRY(fsdp_unit_create(net->model, "flat", &over_all, &unit, err));
    FSDP_TRY(fsdp_unit_create(net->model, "copied", &copied, &unit, err));
    return fsdp_root_create(net->model, &over_all, &net->root, err);
}

static fsdp_status build(mixed_net *net, fsdp_world *world, fsdp_error *err)
{
    FSDP_TRY(fsdp_world_mesh(world, 2, (int64_t[]){2, 2}, (const char *[]){"dp", "tp"},
                             &net->square, err));
    FSDP_TRY(
        fsdp_world_mesh(world, 1, (int64_t[]){RANKS}, (const char *[]){"all"}, &net->line, err));
    FSDP_TRY(fsdp_model_create(world, &net->model, err));
    for (int i = 0; i < PARAMS; i++)
        FSDP_TRY(fsdp_model_add(
            net->model,
            &(fsdp_param_spec){
                .name = declared[i].name, .dtype = FSDP_F32, .ndim = 2, .shape = declared[i].shape},
            &net->params[i], err));
    return add_units(net, err);
}

/* Element by element of a box in row-major order, the one in the whole tensor. */
static int64_t element_of(int param, const fsdp_box *box, int64_t i)
{
    int64_t row = box->lo[0] + i / box->len[1], column = box->lo[1] + i % box->len[1];
    return row * declared[param].shape[1] + column;
}

static fsdp_status give_grads(mixed_net *net, fsdp_error *err)
{
    fsdp_root *root = net->root;
    FSDP_TRY(fsdp_root_begin_forward(root, err));
    for (size_t u = 0; u < fsdp_root_unit_count(root); u++) {
        FSDP_TRY(fsdp_unit_pre_forward(fsdp_root_unit_at(root, u), err));
        FSDP_TRY(fsdp_unit_post_forward(fsdp_root_unit_at(root, u), err));
    }
    FSDP_TRY(fsdp_root_end_forward(root, err));
    for (size_t u = 0; u < fsdp_root_unit_count(root); u++)
        FSDP_TRY(fsdp_unit_pre_backward(fsdp_root_unit_at(root, u), err));
    for (int p = 0; p < PARAMS; p++) {
        fsdp_box box;
        float *grad = fsdp_param_grad(net->params[p]);
        fsdp_param_data_box(net->params[p], &box);
        for (int64_t i = 0; grad && i < fsdp_box_count(&box); i++)
            grad[i] = grad_at(p, element_of(p, &box, i));
    }
    return fsdp_root_end_backward(root, err);
}

static fsdp_status expect_scaled(mixed_net *net, double factor, fsdp_error *err)
{
    for (int p = 0; p < PARAMS; p++) {
        fsdp_box box;
        (void)fsdp_param_shard(net->params[p], &box);
        const float *grad = fsdp_param_shard_grad(net->params[p]);
        for (int64_t i = 0; i < fsdp_box_count(&box); i++) {
            double wanted = factor * (double)grad_at(p, element_of(p, &box, i));
            EXPECT(grad && fabs((double)grad[i] - wanted) <= 1e-6 * fabs(wanted));
        }
    }
    return FSDP_OK;
}

static fsdp_status clip(mixed_net *net, world_rank *rank, fsdp_error *err)
{
    clip_case *what = rank->user;
    const fsdp_clip_opts opts = {.max_norm = what->max_norm, .norm_type = what->p};
    double norm, wanted = expected_norm(what->p > 0 ? what->p : 2);
    FSDP_TRY(give_grads(net, err));
    FSDP_TRY(expect_scaled(net, 1, err));
    FSDP_TRY(fsdp_root_clip_grad_norm(net->root, &opts, &norm, err));
    what->norms[fsdp_world_rank(rank->world)] = norm;
    if (fabs(norm - wanted) > 1e-6 * wanted)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "the norm is %.9g, not %.9g", norm, wanted);
    return expect_scaled(net, fmin(1, what->max_norm / (norm + 1e-6)), err);
}

/* Puts an infinity into a shard that one rank alone holds. */
static fsdp_status find_infinity(mixed_net *net, world_rank *rank, fsdp_error *err)
{
    fsdp_clip_opts opts = {.max_norm = 1, .error_if_nonfinite = true};
    double norm = 0;
    FSDP_TRY(give_grads(net, err));
    if (fsdp_world_rank(rank->world) == 1)
        *(float *)fsdp_param_shard_grad(net->params[3]) = INFINITY;
    EXPECT_REFUSAL(fsdp_root_clip_grad_norm(net->root, &opts, &norm, why),
                   "the norm of the gradients is inf");
    EXPECT(isinf(norm));
    if (fsdp_world_rank(rank->world) == 0) /* nothing was changed */
        FSDP_TRY(expect_scaled(net, 1, err));
    opts.error_if_nonfinite = false;
    FSDP_TRY(fsdp_root_clip_grad_norm(net->root, &opts, &norm, err));
    EXPECT(isinf(norm));
    return fsdp_world_rank(rank->world) == 0 ? expect_scaled(net, 0, err) : FSDP_OK;
}

/* In the parameter that is measured first: the later ones are finite. */
static fsdp_status find_nan(mixed_net *net, world_rank *rank, fsdp_error *err)
{
    const fsdp_clip_opts opts = {.norm_type = INFINITY};
    double norm = 0;
    FSDP_TRY(give_grads(net, err));
    if (fsdp_world_rank(rank->world) == 1)
        *(float *)fsdp_param_shard_grad(net->params[0]) = NAN;
    FSDP_TRY(fsdp_root_clip_grad_norm(net->root, &opts, &norm, err));
    EXPECT(isnan(norm));
    return FSDP_OK;
}

static fsdp_status refuse_norms(mixed_net *net, world_rank *rank, fsdp_error *err)
{
    double norm;
    (void)rank;
    FSDP_TRY(give_grads(net, err));
    const fsdp_clip_opts wrong[] = {{.max_norm = -1}, {.max_norm = NAN}, {1, -2, false}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        EXPECT_REFUSAL(fsdp_root_clip_grad_norm(net->root, &wrong[i], &norm, why),
                       "cannot clip gradients to");
    return expect_scaled(net, 1, err);
}

/* Gradients that wait for the optimizer's step take no other work. */
static fsdp_status refuse_waiting(mixed_net *net, world_rank *rank, fsdp_error *err)
{
    const fsdp_clip_opts opts = {.max_norm = 0.1};
    fsdp_scaler *scaler;
    fsdp_optim *optim;
    double norm;
    (void)rank;
    FSDP_TRY(fsdp_scaler_create(NULL, &scaler, err));
    FSDP_TRY(give_grads(net, err));
    EXPECT_REFUSAL(fsdp_root_clip_grad_norm(net->root, &opts, NULL, why),
                   "cannot clip at a step without an optimizer");
    fsdp_root_zero_grad(net->root);
    FSDP_TRY(fsdp_sgd_create(net->root, NULL, &optim, err));
    FSDP_TRY(give_grads(net, err));
    EXPECT_REFUSAL(fsdp_root_grad_norm(net->root, 0, &norm, why),
                   "the norms of the last 0 are kept");
    FSDP_TRY(fsdp_root_clip_grad_norm(net->root, &opts, NULL, err));
    EXPECT_REFUSAL(fsdp_root_clip_grad_norm(net->root, &opts, &norm, why),
                   "cannot clip gradients: the gradients wait to be clipped");
    EXPECT_REFUSAL(fsdp_scaler_unscale(scaler, net->root, why),
                   "cannot unscale gradients: the gradients wait to be clipped");
    EXPECT_REFUSAL(fsdp_root_grad_norm(net->root, 1, &norm, why),
                   "the norms of the last 1 are kept");
    EXPECT_REFUSAL(fsdp_root_grad_norm(net->root, -1, &norm, why), "of -1 clippings");
    FSDP_TRY(expect_scaled(net, 1, err)); /* until the step */
    FSDP_TRY(give_grads(net, err));
    EXPECT_REFUSAL(fsdp_optim_step(optim, why), "a backward came after the clipping");
    fsdp_root_zero_grad(net->root);
    FSDP_TRY(give_grads(net, err));
    FSDP_TRY(fsdp_root_clip_grad_norm(net->root, NULL, NULL, err)); /* only measures */
    FSDP_TRY(fsdp_scaler_unscale(scaler, net->root, err));
    FSDP_TRY(fsdp_optim_step(optim, err));
    fsdp_optim_free(optim);
    fsdp_scaler_free(scaler);
    return FSDP_OK;
}

/* --- steps that clip -------------------------------------------------------------------------- */

enum { CLIP_STEPS = 4, SPOILED = 2, MOST_SHARDS = 128 };

/* Some steps, clipped by the host or by the steps themselves; in step SPOILED one gradient is infinite. */
typedef struct step_case {
    bool is_late, uses_sgd;
    size_t counts[RANKS];
    float shards[RANKS][MOST_SHARDS];
    double norms[RANKS][CLIP_STEPS];
    float taken[RANKS]; /* steps of a parameter */
} step_case;

static fsdp_status clip_and_step(mixed_net *net, fsdp_optim *optim, const step_case *what,
                                 double *norm_out, fsdp_error *err)
{
    const fsdp_clip_opts opts = {.max_norm = 0.7, .error_if_nonfinite = true};
    if (what->is_late) {
        FSDP_TRY(fsdp_root_clip_grad_norm(net->root, &opts, NULL, err));
        FSDP_TRY(fsdp_optim_step(optim, err));
        return fsdp_root_grad_norm(net->root, 0, norm_out, err);
    }
    fsdp_status status = fsdp_root_clip_grad_norm(net->root, &opts, norm_out, err);
    if (status != FSDP_ERR_DAMAGED)
        return status == FSDP_OK ? fsdp_optim_step(optim, err) : status;
    *err = (fsdp_error){0};
    fsdp_root_zero_grad(net->root);
    return FSDP_OK;
}

static fsdp_status run_clip_steps(mixed_net *net, world_rank *rank, fsdp_error *err)
{
    step_case *what = rank->user;
    const int me = fsdp_world_rank(rank->world);
    fsdp_optim_tensor tensors[FSDP_OPTIM_TENSORS];
    fsdp_optim *optim;
    FSDP_TRY(what->uses_sgd
                 ? fsdp_sgd_create(net->root, &(fsdp_sgd_opts){.momentum = 0.9}, &optim, err)
                 : fsdp_adamw_create(net->root, NULL, &optim, err));
    for (int step = 0; step < CLIP_STEPS; step++) {
        FSDP_TRY(give_grads(net, err));
        if (step == SPOILED && me == 1)
            *(float *)fsdp_param_shard_grad(net->params[3]) = INFINITY;
        FSDP_TRY(clip_and_step(net, optim, what, &what->norms[me][step], err));
        EXPECT(!fsdp_param_shard_grad(net->params[0]));
    }
    for (int p = 0; p < PARAMS; p++) {
        fsdp_box box;
        const float *shard = fsdp_param_shard(net->params[p], &box);
        for (int64_t i = 0; i < fsdp_box_count(&box); i++)
            what->shards[me][what->counts[me]++] = shard[i];
    }
    EXPECT(fsdp_optim_describe_state(optim, net->params[0], tensors) > 0);
    what->taken[me] = *(const float *)tensors[0].data;
    fsdp_optim_free(optim);
    return FSDP_OK;
}

typedef fsdp_status (*mixed_body)(mixed_net *net, world_rank *rank, fsdp_error *err);

static fsdp_status run_mixed(world_rank *rank, mixed_body body, fsdp_error *err)
{
    mixed_net net = {0};
    fsdp_status status = build(&net, rank->world, err);
    if (status == FSDP_OK)
        status = body(&net, rank, err);
    fsdp_root_free(net.root);
    fsdp_model_free(net.model);
    fsdp_mesh_free(net.square);
    fsdp_mesh_free(net.line);
    return status;
}

static fsdp_status run_clip(world_rank *rank, fsdp_error *err)
{
    return run_mixed(rank, clip, err);
}

static fsdp_status run_infinity(world_rank *rank, fsdp_error *err)
{
    return run_mixed(rank, find_infinity, err);
}

static fsdp_status run_nan(world_rank *rank, fsdp_error *err)
{
    return run_mixed(rank, find_nan, err);
}

static fsdp_status run_refusals(world_rank *rank, fsdp_error *err)
{
    return run_mixed(rank, refuse_norms, err);
}

static fsdp_status run_waiting(world_rank *rank, fsdp_error *err)
{
    return run_mixed(rank, refuse_waiting, err);
}

static fsdp_status run_late(world_rank *rank, fsdp_error *err)
{
    return run_mixed(rank, run_clip_steps, err);
}

Test(optim_clip, gradients_that_wait_for_a_step_take_no_other_work)
{
    fsdp_error err = {0};
    cr_assert_eq(run_worlds(RANKS, "cpu", run_waiting, NULL, &err), FSDP_OK, "%s", err.text);
}

/* The bits are those of gradients that were multiplied before; a step without a finite norm does not
 * count. */
Test(optim_clip, steps_that_clip_give_the_bits_of_clipped_gradients)
{
    static step_case now, late;
    for (int i = 0; i < 4; i++) {
        fsdp_error err = {0};
        const char *device = i / 2 ? "cpu-async" : "cpu";
        now = (step_case){.uses_sgd = i % 2};
        late = (step_case){.uses_sgd = i % 2, .is_late = true};
        cr_assert_eq(run_worlds(RANKS, device, run_late, &now, &err), FSDP_OK, "%s", err.text);
        cr_assert_eq(run_worlds(RANKS, device, run_late, &late, &err), FSDP_OK, "%s", err.text);
        for (int r = 0; r < RANKS; r++) {
            cr_assert_eq(late.taken[r], CLIP_STEPS - 1);
            cr_assert_eq(now.taken[r], CLIP_STEPS - 1);
            cr_assert(memcmp(late.norms[r], now.norms[0], sizeof late.norms[r]) == 0);
        }
        cr_assert(isinf(late.norms[0][SPOILED]));
        cr_assert(memcmp(late.shards, now.shards, sizeof now.shards) == 0, "%s", device);
    }
}

Test(optim_clip, gradients_of_several_meshes_are_clipped_by_their_true_norm)
{
    static const double norms[] = {0, 1, 2, 3, INFINITY}; /* 0: the default, 2 */
    static const double limits[] = {0.01, 1000, INFINITY};
    for (size_t n = 0; n < sizeof norms / sizeof *norms; n++)
        for (size_t m = 0; m < sizeof limits / sizeof *limits; m++) {
            clip_case what = {.p = norms[n], .max_norm = limits[m]};
            fsdp_error err = {0};
            const char *device = (n + m) % 2 ? "cpu" : "cpu-async";
            cr_assert_eq(run_worlds(RANKS, device, run_clip, &what, &err), FSDP_OK,
                         "p %g, to %g on %s: %s", what.p, what.max_norm, device, err.text);
            for (int r = 1; r < RANKS; r++)
                cr_assert_eq(what.norms[r], what.norms[0]);
        }
}

Test(optim_clip, a_norm_that_is_not_finite_is_an_error_of_all_ranks_when_asked)
{
    fsdp_error err = {0};
    cr_assert_eq(run_worlds(RANKS, "cpu", run_infinity, NULL, &err), FSDP_OK, "%s", err.text);
}

Test(optim_clip, the_largest_of_numbers_and_nan_is_nan)
{
    fsdp_error err = {0};
    cr_assert_eq(run_worlds(RANKS, "cpu", run_nan, NULL, &err), FSDP_OK, "%s", err.text);
}

Test(optim_clip, norms_that_mean_nothing_are_refused)
{
    fsdp_error err = {0};
    cr_assert_eq(run_worlds(RANKS, "cpu", run_refusals, NULL, &err), FSDP_OK, "%s", err.text);
}

/* --- schedules -------------------------------------------------------------------------------- */

static void expect_factor(fsdp_schedule schedule, int64_t step, double wanted)
{
    double found = fsdp_schedule_factor(&schedule, step);
    cr_assert(fabs(found - wanted) < 1e-12, "step %d: %.17g, not %.17g", (int)step, found, wanted);
}

Test(optim_clip, schedules_warm_up_fall_and_end)
{
    static const double warm[] = {0.25, 0.5, 0.75, 1};
    for (int step = 0; step < 4; step++) {
        expect_factor((fsdp_schedule){.warmup = 4}, step, warm[step]);
        expect_factor((fsdp_schedule){FSDP_SCHEDULE_LINEAR, 4, 12, 0.5}, step, warm[step]);
        expect_factor((fsdp_schedule){FSDP_SCHEDULE_COSINE, 4, 12, 0.5}, step, warm[step]);
    }
    expect_factor((fsdp_schedule){.warmup = 4}, 1000, 1);
    expect_factor((fsdp_schedule){FSDP_SCHEDULE_LINEAR, 4, 12, 0.5}, 4, 1);
    expect_factor((fsdp_schedule){FSDP_SCHEDULE_LINEAR, 4, 12, 0.5}, 8, 0.75);
    expect_factor((fsdp_schedule){FSDP_SCHEDULE_LINEAR, 4, 12, 0.5}, 12, 0.5);
    expect_factor((fsdp_schedule){FSDP_SCHEDULE_LINEAR, 4, 12, 0.5}, 1000, 0.5);
    expect_factor((fsdp_schedule){FSDP_SCHEDULE_COSINE, 4, 12, 0.5}, 4, 1);
    expect_factor((fsdp_schedule){FSDP_SCHEDULE_COSINE, 4, 12, 0}, 6, (1 + sqrt(0.5)) / 2);
    expect_factor((fsdp_schedule){FSDP_SCHEDULE_COSINE, 4, 12, 0.5}, 8, 0.75);
    expect_factor((fsdp_schedule){FSDP_SCHEDULE_COSINE, 4, 12, 0.5}, 12, 0.5);
    expect_factor((fsdp_schedule){FSDP_SCHEDULE_COSINE, 4, 12, 0.5}, 1000, 0.5);
}

Test(optim_clip, schedules_without_warm_up_or_length_are_numbers)
{
    expect_factor((fsdp_schedule){.warmup = 0}, 0, 1);
    expect_factor((fsdp_schedule){FSDP_SCHEDULE_LINEAR, 0, 10, 0}, 0, 1);
    expect_factor((fsdp_schedule){FSDP_SCHEDULE_COSINE, 0, 10, 0}, 0, 1);
    expect_factor((fsdp_schedule){FSDP_SCHEDULE_LINEAR, 0, 0, 0.1}, 0, 0.1);
    expect_factor((fsdp_schedule){FSDP_SCHEDULE_COSINE, 5, 5, 0.1}, 5, 0.1);
    expect_factor((fsdp_schedule){FSDP_SCHEDULE_LINEAR, 10, 5, 0.1}, 7,
                  0.8); /* a warm-up longer than all */
}
