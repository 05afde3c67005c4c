/*
 * Scenario C23: late streams. On cpu-async, work of some or all streams is delayed, and every free
 * block of the pool is taken, overwritten and returned between the layers: a block that is
 * returned too early or read too late changes the gradients. Plain program, so that
 * ThreadSanitizer sees it.
 */
#include "tests/support/nets/toy_mlp.h"
#include "tests/support/nets/unit_tuning.h"
#include "tests/support/ranks/worlds.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { RANKS = 4, LAYERS = 5, STEPS = 2, MOST_FREE = 64, MOST_US = 1500 };

typedef struct delayed_case {
    const char *stream; /* that is late; NULL: all, now and then */
    int reshard, prefetch, inputs;
    bool replicated, narrow, offload, separate, from_comm;
} delayed_case;

/* --- a device whose streams are late ---------------------------------------------------------- */

static fsdp_device_ops usual, late;
static const char *_Atomic late_stream;
static _Atomic unsigned draws;

static fsdp_status sleep_a_little(void *args, fsdp_error *err)
{
    (void)err;
    nanosleep(&(struct timespec){.tv_nsec = *(const long *)args * 1000}, NULL);
    return FSDP_OK;
}

static void submit_late(fsdp_stream *stream, fsdp_work work, const void *args, size_t args_size)
{
    const char *wanted = atomic_load(&late_stream);
    unsigned draw = atomic_fetch_add(&draws, 1) * 2654435761u >> 16;
    long us = wanted ? MOST_US / 2 : draw % 4 == 0 ? (long)(draw % MOST_US) : 0;
    if (us > 0 && (!wanted || strcmp(stream->name, wanted) == 0))
        usual.submit(stream, sleep_a_little, &us, sizeof us);
    usual.submit(stream, work, args, args_size);
}

/* All ranks have the same device: what one finds is everybody's. */
static fsdp_status find_device(world_rank *rank, fsdp_error *err)
{
    (void)err;
    usual = late = *rank->world->parts.device->ops;
    late.submit = submit_late;
    return FSDP_OK;
}

/* --- memory for the next user ----------------------------------------------------------------- */

typedef struct scribble_args {
    void *data;
    size_t size;
} scribble_args;

static fsdp_status scribble(void *args, fsdp_error *err)
{
    const scribble_args *what = args;
    (void)err;
    memset(what->data, 0x7b, what->size);
    return FSDP_OK;
}

/* In the order of the stream that owns the block, as its next user would. */
static fsdp_status overwrite_free_blocks(fsdp_root *root, fsdp_error *err)
{
    fsdp_memory_pool *pool = &root->context->memory;
    fsdp_block *blocks[MOST_FREE];
    fsdp_memory_request requests[MOST_FREE];
    size_t n = 0;
    for (fsdp_block *at = pool->free; at && n < MOST_FREE; at = at->next)
        requests[n++] = (fsdp_memory_request){.class = FSDP_MEMORY_GRAD,
                                              .stream = at->stream,
                                              .allocator = at->allocator,
                                              .size = at->room,
                                              .owner = "a test"};
    for (size_t i = 0; i < n; i++)
        FSDP_TRY(fsdp_memory_take(pool, &requests[i], &blocks[i], err));
    for (size_t i = 0; i < n; i++) {
        const scribble_args args = {blocks[i]->data, requests[i].size};
        fsdp_stream *stream = requests[i].stream;
        late.submit(stream, scribble, &args, sizeof args);
        fsdp_memory_give(pool, blocks[i], late.record(stream));
    }
    return FSDP_OK;
}

/* --- a step of both --------------------------------------------------------------------------- */

static fsdp_status forward_and_backward(toy *net, uint64_t microbatch, double *loss_out,
                                        fsdp_error *err)
{
    FSDP_TRY(mlp_forward(net, microbatch, err));
    *loss_out = fsdp_mlp_loss(net->mlp);
    for (int i = LAYERS - 1; i >= 0; i--) {
        FSDP_TRY(fsdp_mlp_backward_layer(net->mlp, i, err));
        FSDP_TRY(overwrite_free_blocks(net->root, err));
    }
    return fsdp_root_end_backward(net->root, err);
}

/* Memory that two layers share would make them equal; zeros may be after a relu. */
static fsdp_status expect_different(toy *net, fsdp_error *err)
{
    for (int i = 1; i < LAYERS; i++)
        for (int k = 0; k < i; k++) {
            const void *a = fsdp_param_shard_grad(net->weight[i]),
                       *b = fsdp_param_shard_grad(net->weight[k]);
            if (a == b || (memcmp(a, b, 8) == 0 && memcmp(a, (const char[8]){0}, 8) != 0))
                return fsdp_fail(err, FSDP_ERR_INTERNAL, "layers %d and %d share a gradient", i, k);
        }
    return FSDP_OK;
}

static fsdp_status step_both(toy *net, mlp_replica *replica, world_rank *rank, int step,
                             fsdp_error *err)
{
    uint64_t microbatch = (uint64_t)(step * RANKS + fsdp_world_rank(rank->world));
    mlp_values gathered;
    double loss;
    FSDP_TRY(mlp_gather(net, &gathered, err));
    FSDP_TRY(mlp_replica_backward(replica, rank->world, net, microbatch, &gathered, err));
    for (int i = 0; i < LAYERS; i++)
        mlp_replica_divide(replica, i, RANKS);
    mlp_values_round(&replica->grads, fsdp_param_describe(net->weight[0]).dtype);
    FSDP_TRY(forward_and_backward(net, microbatch, &loss, err));
    if (loss != replica->loss)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "step %d: loss %.17g, not %.17g", step, loss,
                         replica->loss);
    FSDP_TRY(mlp_expect_grads(net, &replica->grads, 0, err));
    FSDP_TRY(expect_different(net, err));
    return fsdp_optim_step(net->optim, err);
}

static mlp_plan plan_of(const delayed_case *what)
{
    mlp_plan plan = mlp_plan_default(LAYERS, RANKS);
    for (int i = 0; i <= LAYERS; i++)
        plan.widths[i] = 8 - i % 2;
    plan.opts.reshard_after_forward = what->reshard;
    plan.opts.offload = what->offload;
    plan.dtype = what->narrow ? FSDP_BF16 : FSDP_F32;
    plan.opts.reduce_dtype = FSDP_F32;
    if (what->replicated) {
        plan.mesh_ndim = 2;
        plan.mesh_shape[0] = plan.mesh_shape[1] = 2;
        plan.mesh_names[0] = "rep";
        plan.mesh_names[1] = "dp";
    }
    return plan;
}

static fsdp_status set_units(toy *net, const delayed_case *what, fsdp_error *err)
{
    const unit_tuning tuning = {.prefetch = what->prefetch,
                                .inputs = what->inputs,
                                .separate = what->separate,
                                .from_comm = what->from_comm};
    FSDP_TRY(tune_row(net->unit, LAYERS, &tuning, err));
    return mlp_add_adamw(net, err);
}

static fsdp_status train_both(world_rank *rank, fsdp_error *err)
{
    const delayed_case *what = rank->user;
    const mlp_plan plan = plan_of(what);
    toy net;
    mlp_replica replica = {0};
    rank->world->parts.device->ops = &late;
    FSDP_TRY(mlp_create(&net, rank->world, &plan, err));
    fsdp_status status = set_units(&net, what, err);
    for (int step = 0; step < STEPS && status == FSDP_OK; step++)
        status = step_both(&net, &replica, rank, step, err);
    toy_free(&net);
    return status;
}

/* --- the cases -------------------------------------------------------------------------------- */

static bool try_case(const delayed_case *what)
{
    fsdp_error err = {0};
    atomic_store(&late_stream, what->stream);
    if (run_worlds(RANKS, "cpu-async", train_both, (void *)what, &err) == FSDP_OK)
        return true;
    printf("%s late, reshard %d, prefetch %d, inputs %d%s%s%s%s%s: %s\n",
           what->stream ? what->stream : "all", what->reshard, what->prefetch, what->inputs,
           what->replicated ? ", replicas" : "", what->narrow ? ", bf16" : "",
           what->offload ? ", offload" : "", what->separate ? ", separate" : "",
           what->from_comm ? ", pool" : "", err.text);
    return false;
}

int main(void)
{
    static const char *const streams[] = {"all_reduce", "reduce",  NULL,
                                          "copy_in",    "compute", "all_gather"};
    fsdp_error err = {0};
    int tried = 0, failed = 0;
    if (run_worlds(1, "cpu-async", find_device, NULL, &err) != FSDP_OK) {
        printf("%s\n", err.text);
        return 1;
    }
    for (size_t s = 0; s < sizeof streams / sizeof *streams; s++)
        for (int kind = 0; kind < 4; kind++) {
            const delayed_case what = {.stream = streams[s],
                                       .reshard = tried % 3 == 2 ? 2 : tried % 2,
                                       .prefetch = tried % 3,
                                       .inputs = 1 + tried / 2 % 2,
                                       .replicated = kind != 3,
                                       .narrow = kind != 1,
                                       .offload = kind == 2,
                                       .separate = tried % 5 == 1,
                                       .from_comm = tried % 7 == 3};
            failed += !try_case(&what);
            tried++;
        }
    printf("%d runs, %d failed\n", tried, failed);
    return failed > 0;
}
