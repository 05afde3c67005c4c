/*
 * Scenario C21: buffers of gathers and reductions in memory of the communicator, between
 * processes. No buffer lies there before a unit sets it, all do afterwards, values do not change,
 * and all memory is freed. A custom collective has memory of its own: it may be set after, not
 * before.
 */
#include "tests/support/nets/toy_mlp.h"
#include "tests/support/ranks/world_processes.h"

#include <stdio.h>
#include <string.h>

enum { LAYERS = 3 };

/* --- a transport that counts ------------------------------------------------------------------ */

static const fsdp_transport_ops *usual;
static int taken, given;

static void *take(fsdp_transport *transport, size_t size)
{
    taken++;
    return usual->alloc(transport, size);
}

static void give(fsdp_transport *transport, void *data)
{
    given++;
    usual->dealloc(transport, data);
}

static void count_on(fsdp_transport *transport)
{
    static fsdp_transport_ops counting;
    usual = transport->ops;
    counting = *usual;
    counting.alloc = take;
    counting.dealloc = give;
    transport->ops = &counting;
}

/* --- steps ------------------------------------------------------------------------------------ */

static fsdp_status step_both(toy *net, fsdp_world *world, fsdp_error *err)
{
    mlp_replica replica = {0};
    double loss;
    mlp_values_init(net->plan, &replica.values);
    uint64_t microbatch = (uint64_t)fsdp_world_rank(world);
    FSDP_TRY(mlp_replica_backward(&replica, world, net, microbatch, NULL, err));
    for (int i = 0; i < LAYERS; i++)
        mlp_replica_divide(&replica, i, fsdp_world_size(world));
    FSDP_TRY(mlp_microbatch(net, microbatch, &loss, err));
    FSDP_TRY(mlp_expect_grads(net, &replica.grads, 0, err));
    fsdp_root_zero_grad(net->root);
    return loss == replica.loss
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_INTERNAL, "loss %.17g, not %.17g", loss, replica.loss);
}

static fsdp_status run_custom(void *user, fsdp_comm *comm, const fsdp_collective *call,
                              fsdp_error *err)
{
    ++*(int *)user;
    return fsdp_comm_run(comm, call, err);
}

static fsdp_status set_pools(toy *net, bool from_comm, fsdp_error *err)
{
    for (int i = 0; i < LAYERS; i++)
        FSDP_TRY(fsdp_unit_set(net->unit[i], FSDP_UNIT_ALLOCATE_MEMORY_FROM_PROCESS_GROUP,
                               from_comm, false, err));
    return FSDP_OK;
}

static fsdp_status expect_taken(bool some, fsdp_error *err)
{
    if ((taken > 0) == some)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_INTERNAL, "%d buffers of the communicator", taken);
}

/* The reverse order is an error. */
static fsdp_status step_with_custom(toy *net, fsdp_world *world, fsdp_error *err)
{
    int calls = 0;
    const fsdp_custom_collective custom = {.context = &calls, .run = run_custom};
    fsdp_error found = {0};
    FSDP_TRY(fsdp_unit_set_custom_collective(net->unit[0], FSDP_ALL_GATHER, &custom, err));
    FSDP_TRY(step_both(net, world, err));
    if (calls != (net->plan->opts.reshard_after_forward == FSDP_RESHARD_NEVER ? 1 : 2))
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "%d calls of the custom collective", calls);
    if (fsdp_unit_set(net->unit[0], FSDP_UNIT_ALLOCATE_MEMORY_FROM_PROCESS_GROUP, true, false,
                      &found) != FSDP_ERR_USAGE ||
        !strstr(found.text, "custom collective"))
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "then '%.200s'", found.text);
    return fsdp_unit_set_custom_collective(net->unit[0], FSDP_ALL_GATHER, NULL, err);
}

static fsdp_status run_steps(toy *net, fsdp_world *world, fsdp_error *err)
{
    FSDP_TRY(step_both(net, world, err));
    FSDP_TRY(expect_taken(false, err));
    FSDP_TRY(set_pools(net, true, err));
    FSDP_TRY(step_both(net, world, err));
    FSDP_TRY(expect_taken(true, err));
    return step_with_custom(net, world, err);
}

static fsdp_status run_rank(world_rank *rank, fsdp_error *err)
{
    int64_t size = fsdp_world_size(rank->world);
    mlp_plan plan = mlp_plan_default(LAYERS, size);
    toy net;
    plan.opts.reshard_after_forward = *(const int *)rank->user;
    count_on(rank->world->parts.transport);
    FSDP_TRY(mlp_create(&net, rank->world, &plan, err));
    fsdp_status status = run_steps(&net, rank->world, err);
    toy_free(&net);
    if (status == FSDP_OK && taken != given)
        status = fsdp_fail(err, FSDP_ERR_INTERNAL, "%d buffers taken, %d given back", taken, given);
    return status;
}

int main(void)
{
    static const char *const devices[] = {"cpu", "cpu-async"};
    static const int reshards[] = {FSDP_RESHARD_ALWAYS, FSDP_RESHARD_NEVER, 2};
    int failed = 0;
    for (int size = 2; size <= 4; size += 2)
        for (size_t d = 0; d < 2; d++)
            for (size_t r = 0; r < 2 + (size == 4); r++) {
                int reshard = reshards[r];
                world_processes worlds = {.size = size,
                                          .deadline_ms = 30000,
                                          .device = devices[d],
                                          .body = run_rank,
                                          .user = &reshard};
                fsdp_error err = {0};
                if (run_world_processes(&worlds, &err) == FSDP_OK)
                    continue;
                printf("%d processes on %s, reshard %d: %s\n", size, devices[d], reshard, err.text);
                failed++;
            }
    return failed > 0;
}
