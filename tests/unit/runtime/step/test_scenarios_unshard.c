/*
 * Scenarios C18 to C20: gathers outside the unit's own hooks. A backward prefetch of a unit whose
 * backward is done, siblings prefetched in parallel with the caller's own all-reduces, units without
 * parameters, and gathers before the first step.
 */
#include "tests/support/nets/toy_mlp.h"
#include "tests/unit/runtime/expect_toy.h"

#include <string.h>

enum { RANKS = 4 };

typedef fsdp_status (*step_of_net)(toy *net, world_rank *rank, uint64_t microbatch,
                                   double *loss_out, fsdp_error *err);

typedef struct training {
    int layers, steps;
    fsdp_status (*prepare)(toy *net, world_rank *rank, fsdp_error *err);
    step_of_net step;
} training;

static void expect_on_devices(world_body body, void *user)
{
    expect_body(RANKS, body, user);
}

/* --- next to a replica ------------------------------------------------------------------------- */

static fsdp_status step_both(toy *net, mlp_replica *replica, world_rank *rank, int step,
                             fsdp_error *err)
{
    const training *what = rank->user;
    uint64_t microbatch = (uint64_t)(step * RANKS + fsdp_world_rank(rank->world));
    mlp_values gathered;
    double loss;
    FSDP_TRY(mlp_gather(net, &gathered, err));
    FSDP_TRY(mlp_replica_backward(replica, rank->world, net, microbatch, &gathered, err));
    for (int i = 0; i < net->plan->layers; i++)
        mlp_replica_divide(replica, i, RANKS);
    FSDP_TRY(what->step(net, rank, microbatch, &loss, err));
    if (loss != replica->loss)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "step %d: loss %.17g, not %.17g", step, loss,
                         replica->loss);
    FSDP_TRY(mlp_expect_grads(net, &replica->grads, 0, err));
    FSDP_TRY(fsdp_optim_step(net->optim, err));
    mlp_plain_adamw(&replica->values, &replica->grads, &replica->moments);
    return mlp_expect(net, &replica->values, 1e-6, err);
}

static fsdp_status train_both(world_rank *rank, fsdp_error *err)
{
    const training *what = rank->user;
    const mlp_plan plan = mlp_plan_default(what->layers, RANKS);
    toy net;
    mlp_replica replica = {0};
    FSDP_TRY(mlp_create(&net, rank->world, &plan, err));
    mlp_values_init(&plan, &replica.values);
    fsdp_status status = mlp_add_adamw(&net, err);
    if (status == FSDP_OK)
        status = what->prepare(&net, rank, err);
    for (int step = 0; step < what->steps && status == FSDP_OK; step++)
        status = step_both(&net, &replica, rank, step, err);
    toy_free(&net);
    return status;
}

/* --- C18: a prefetch that comes too late ------------------------------------------------------ */

static fsdp_status prefetch_what_is_done(toy *net, world_rank *rank, fsdp_error *err)
{
    (void)rank;
    return fsdp_unit_set_prefetch(net->unit[0], FSDP_HOOK_PRE_BACKWARD, &net->unit[1], 1, err);
}

static fsdp_status usual_step(toy *net, world_rank *rank, uint64_t microbatch, double *loss_out,
                              fsdp_error *err)
{
    forget_events(rank);
    FSDP_TRY(mlp_microbatch(net, microbatch, loss_out, err));
    if (count_events(rank, "U L1") != 3) /* forward, backward, and the one too late */
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "not gathered too late: %s", rank->events.data);
    return FSDP_OK;
}

Test(scenarios_unshard, c18_a_prefetch_of_what_is_done_changes_nothing)
{
    training what = {2, 3, prefetch_what_is_done, usual_step};
    expect_on_devices(train_both, &what);
}

/* --- C19: siblings gathered ahead ------------------------------------------------------------- */

/* Connects the ranks in reverse order, which makes another group. */
static fsdp_status connect_backwards(toy *net, world_rank *rank, fsdp_error *err)
{
    fsdp_mesh *mesh;
    const int64_t size = RANKS;
    (void)net;
    FSDP_TRY(fsdp_mesh_create(1, &size, (const char *[]){"back"}, (const int[]){3, 2, 1, 0}, &mesh,
                              err));
    fsdp_status status = fsdp_world_connect(rank->world, mesh, err);
    fsdp_mesh_free(mesh);
    return status;
}

static fsdp_status add_up_backwards(world_rank *rank, fsdp_error *err)
{
    fsdp_mesh *mesh;
    const int64_t size = RANKS;
    float x[1000];
    for (int i = 0; i < 1000; i++)
        x[i] = (float)(i + fsdp_world_rank(rank->world));
    const fsdp_collective call = {
        .kind = FSDP_ALL_REDUCE, .dtype = FSDP_F32, .in = x, .out = x, .count = 1000};
    FSDP_TRY(fsdp_mesh_create(1, &size, (const char *[]){"back"}, (const int[]){3, 2, 1, 0}, &mesh,
                              err));
    fsdp_comm *comm = fsdp_world_comm(rank->world, mesh, 0, 0);
    fsdp_status status = comm ? fsdp_comm_run(comm, &call, err)
                              : fsdp_fail(err, FSDP_ERR_INTERNAL, "there is no such group");
    fsdp_mesh_free(mesh);
    for (int i = 0; i < 1000 && status == FSDP_OK; i++)
        if (x[i] != (float)(RANKS * i + 6))
            status = fsdp_fail(err, FSDP_ERR_INTERNAL, "element %d is %g", i, (double)x[i]);
    return status;
}

static fsdp_status gather_ahead(toy *net, world_rank *rank, uint64_t microbatch, double *loss_out,
                                fsdp_error *err)
{
    for (int i = 0; i < 3; i++) {
        FSDP_TRY(fsdp_unit_unshard(net->unit[i], true, NULL, err));
        FSDP_TRY(add_up_backwards(rank, err));
    }
    forget_events(rank);
    FSDP_TRY(mlp_forward(net, microbatch, err));
    if (count_events(rank, "U L") > 0)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "gathered twice: %s", rank->events.data);
    *loss_out = fsdp_mlp_loss(net->mlp);
    return fsdp_mlp_backward(net->mlp, err);
}

Test(scenarios_unshard, c19_siblings_are_gathered_beside_all_reduces)
{
    training what = {3, 10, connect_backwards, gather_ahead};
    expect_on_devices(train_both, &what);
}

/* --- C20: nothing to gather, and before the first step ---------------------------------------- */

static fsdp_status expect_gathered(toy *net, const mlp_values *values, fsdp_error *err)
{
    for (int i = 0; i < net->plan->layers; i++) {
        const float *data = fsdp_param_data(net->weight[i]);
        size_t count = (size_t)(net->plan->widths[i] * net->plan->widths[i + 1]);
        if (!data || memcmp(data, values->weight[i], count * sizeof *data) != 0)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "layer %d is not there", i);
    }
    return FSDP_OK;
}

static fsdp_status gather_early(toy *net, fsdp_error *err)
{
    fsdp_unshard_handle *handle = NULL;
    mlp_values values;
    mlp_values_init(net->plan, &values);
    FSDP_TRY(fsdp_unit_unshard(fsdp_root_unit(net->root), true, &handle, err)); /* which has none */
    FSDP_TRY(fsdp_unshard_wait(handle, err));
    for (int is_async = 0; is_async < 2; is_async++) {
        for (int i = 0; i < net->plan->layers; i++) {
            FSDP_TRY(fsdp_unit_unshard(net->unit[i], is_async == 1, &handle, err));
            FSDP_TRY(fsdp_unshard_wait(handle, err));
        }
        FSDP_TRY(expect_gathered(net, &values, err));
        for (int i = 0; i < net->plan->layers; i++)
            FSDP_TRY(fsdp_unit_reshard(net->unit[i], err));
    }
    return FSDP_OK;
}

static fsdp_status before_the_first_step(world_rank *rank, fsdp_error *err)
{
    const mlp_plan plan = mlp_plan_default(3, RANKS);
    toy net;
    FSDP_TRY(mlp_create(&net, rank->world, &plan, err));
    fsdp_status status = gather_early(&net, err);
    toy_free(&net);
    return status;
}

Test(scenarios_unshard, c20_units_are_gathered_before_the_first_step)
{
    expect_on_devices(before_the_first_step, NULL);
}
