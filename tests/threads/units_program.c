/*
 * Units over ranks that are threads: a small MLP is trained by W ranks in every mode, on both devices, and
 * must give the bits of one rank that runs the W microbatches one after the other. Plain program, so that
 * ThreadSanitizer sees it.
 */
#include "tests/support/nets/training.h"

#include <math.h>
#include <stdio.h>

enum { KINDS = 7 };

/* A way to work, in a world of which a half may be a replica of the other. */
typedef struct unit_mode {
    net_units units;
    bool replicated;
} unit_mode;

typedef struct units_run {
    net_setup setup;
    net_result result;
} units_run;

static fsdp_status expect_nothing_left(const toy *net, const net_units *units, fsdp_error *err)
{
    const fsdp_memory memory = fsdp_root_memory(net->root);
    int64_t left = memory.total_now - memory.now[FSDP_MEMORY_SHARD] - memory.now[FSDP_MEMORY_OPTIM];
    if (left == 0 || units->keeps)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_INTERNAL, "%lld bytes are left after a step", (long long)left);
}

static fsdp_status train_rank(world_rank *rank, fsdp_error *err)
{
    units_run *run = rank->user;
    toy net;
    fsdp_status status = net_work(&net, rank->world, &run->setup, &run->result, err);
    if (status == FSDP_OK)
        status = expect_nothing_left(&net, run->setup.units, err);
    toy_free(&net);
    return status;
}

static bool is_near(double a, double b)
{
    return fabs(a - b) <= 1e-5 * fmax(fabs(a), fabs(b)) + 1e-7;
}

/* Replicas are added up in another order. */
static bool is_close(const net_result *a, const net_result *b)
{
    bool near = true;
    for (int i = 0; i < NET_LAYERS; i++)
        for (int j = 0; j < NET_WEIGHTS; j++)
            near = near && is_near(a->weights[i][j], b->weights[i][j]);
    for (int i = 0; i < NET_OUT; i++)
        near = near && is_near(a->root_bias[i], b->root_bias[i]);
    for (int step = 0; step < NET_STEPS; step++)
        for (int r = 0; r < NET_MOST; r++)
            near = near && is_near(a->losses[step][r], b->losses[step][r]);
    return near;
}

static void describe(int ranks, const char *device, const unit_mode *mode)
{
    const net_units *units = &mode->units;
    const unit_tuning *tuning = &units->tuning;
    printf("%d ranks on %s, reshard %d, prefetch %d, inputs %d%s%s%s%s%s%s", ranks, device,
           units->reshard, tuning->prefetch, tuning->inputs, tuning->from_comm ? ", pool" : "",
           tuning->separate ? ", separate" : "", units->keeps ? ", keeps" : "",
           units->is_async ? ", async" : "", units->offloads ? ", offload" : "",
           mode->replicated ? ", replicas" : "");
}

/* Groups of a size that does not divide the ranks are refused. */
static net_setup setup_of(int ranks, unit_mode *mode)
{
    net_setup setup = net_setup_default();
    mode->replicated = mode->replicated && ranks % 2 == 0;
    int sharded = mode->replicated ? ranks / 2 : ranks;
    if (mode->units.reshard > 1 && sharded % mode->units.reshard != 0)
        mode->units.reshard = FSDP_RESHARD_ALWAYS;
    setup.is_plain = true;
    setup.units = &mode->units;
    setup.replicas = mode->replicated ? 2 : 0;
    return setup;
}

static bool try_mode(int ranks, const char *device, unit_mode mode)
{
    static const net_units plain = {.reshard = FSDP_RESHARD_ALWAYS, .tuning.inputs = 1};
    static units_run alone, together;
    fsdp_error err = {0};
    together = (units_run){.setup = setup_of(ranks, &mode)};
    alone = (units_run){.setup = net_setup_default()};
    alone.setup.is_plain = true;
    alone.setup.units = &plain;
    alone.setup.microbatches = ranks;
    alone.setup.divide = ranks > 1 ? ranks : 0;
    if (run_worlds(1, "cpu", train_rank, &alone, &err) == FSDP_OK &&
        run_worlds(ranks, device, train_rank, &together, &err) == FSDP_OK) {
        if (mode.replicated ? is_close(&alone.result, &together.result)
                            : net_equal(&alone.result, &together.result))
            return true;
        snprintf(err.text, sizeof err.text, "other bits");
    }
    describe(ranks, device, &mode);
    printf(": %s\n", err.text);
    return false;
}

int main(void)
{
    static const int ranks[] = {1, 2, 3, 4, 8};
    static const int reshards[] = {FSDP_RESHARD_ALWAYS, FSDP_RESHARD_NEVER, FSDP_RESHARD_AUTO, 2};
    static const char *const devices[] = {"cpu", "cpu-async"};
    int tried = 0, failed = 0;
    for (size_t r = 0; r < sizeof ranks / sizeof *ranks; r++)
        for (size_t d = 0; d < 2; d++)
            for (size_t s = 0; s < 4; s++)
                for (int prefetch = 0; prefetch < 3; prefetch++) {
                    int kind = (tried + tried / 12) % KINDS;
                    const unit_tuning tuning = {.prefetch = prefetch,
                                                .inputs = 1 + kind % 2,
                                                .from_comm = kind == 1,
                                                .separate = kind == 2};
                    const unit_mode mode = {.units = {.reshard = reshards[s],
                                                      .keeps = kind == 3,
                                                      .is_async = kind == 4,
                                                      .offloads = kind == 6,
                                                      .tuning = tuning},
                                            .replicated = kind == 5};
                    failed += !try_mode(ranks[r], devices[d], mode);
                    tried++;
                }
    printf("%d runs, %d failed\n", tried, failed);
    return failed > 0;
}
