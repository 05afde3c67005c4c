/*
 * A small transformer, its embedding tied with its head, is trained for 20 steps by W ranks that
 * are threads, in every mode and on both devices: losses, gradients and weights are the bits of one
 * rank that runs the W microbatches one after the other. With replicas, where sums have another
 * order, they are close. FSDP_TEST_SAMPLE: every n-th run. Plain program, so that ThreadSanitizer
 * sees it.
 */
#include "tests/support/sample_state.h"
#include "tests/support/nets/transformer_units.h"
#include "tests/support/ranks/worlds.h"

#include <stdio.h>

enum { USUAL_SAMPLE = 2 };

typedef struct transformer_run {
    const transformer_mode *mode;
    const transformer_record *expected;
} transformer_run;

typedef struct counts {
    int tried, failed;
} counts;

static fsdp_status run_rank(world_rank *rank, fsdp_error *err)
{
    const transformer_run *run = rank->user;
    return transformer_train_and_compare(rank->world, run->mode, run->expected, err);
}

static void try_mode(int ranks, const char *device, const transformer_mode *mode,
                     const transformer_record *expected, counts *c)
{
    transformer_run run = {mode, expected};
    fsdp_error err = {0};
    char text[300];
    c->tried++;
    if (run_worlds(ranks, device, run_rank, &run, &err) == FSDP_OK)
        return;
    c->failed++;
    transformer_mode_describe(mode, text, sizeof text);
    printf("%d ranks on %s, %s: %s\n", ranks, device, text, err.text);
}

/* NULL, and a failure, when even one rank cannot do it. */
static const transformer_record *train_alone(const transformer_mode *mode, int microbatches,
                                             counts *c)
{
    static transformer_record record;
    fsdp_error err = {0};
    record = (transformer_record){0};
    fsdp_status status = transformer_train_alone(mode, microbatches, &record, &err);
    if (status == FSDP_OK && record.losses[TRANSFORMER_STEPS - 1][0] < record.losses[0][0])
        return &record;
    printf("one rank, %d microbatches: %s\n", microbatches, err.text[0] ? err.text : "no progress");
    c->failed++;
    return NULL;
}

static const char *const devices[] = {"cpu", "cpu-async"};

/* Reshard, prefetch, device, and by turns the rest. */
static void try_all_modes(int ranks, test_sampler *sampler, counts *c)
{
    static const int reshards[] = {FSDP_RESHARD_ALWAYS, FSDP_RESHARD_NEVER, FSDP_RESHARD_AUTO, 2};
    const transformer_mode plain = {0};
    const transformer_record *expected = train_alone(&plain, ranks, c);
    for (int kind = 0; expected && kind < 24; kind++) {
        transformer_mode mode = {.reshard = reshards[kind % 4],
                                 .root_reshard = reshards[kind / 2 % 3],
                                 .prefetch = kind / 4 % 3,
                                 .inputs = 1 + kind % 5 / 3,
                                 .from_comm = kind % 7 == 2,
                                 .separate = kind % 5 == 1};
        if (mode.reshard > FSDP_RESHARD_ALWAYS && ranks % mode.reshard != 0)
            mode.reshard = ranks; /* the same as always, by a number */
        if (test_sampler_takes(sampler))
            try_mode(ranks, devices[kind / 12], &mode, expected, c);
    }
}

static void try_narrow(int ranks, test_sampler *sampler, counts *c)
{
    static const fsdp_dtype stored[] = {FSDP_F32, FSDP_BF16, FSDP_BF16};
    static const fsdp_dtype gathered[] = {FSDP_BF16, FSDP_DTYPE_NONE, FSDP_F32};
    for (int kind = 0; kind < 3; kind++) {
        const transformer_mode mode = {.reshard = kind % 2,
                                       .root_reshard = FSDP_RESHARD_AUTO,
                                       .prefetch = kind,
                                       .inputs = 1,
                                       .dtype = stored[kind],
                                       .param_dtype = gathered[kind],
                                       .reduce_dtype = FSDP_F32};
        if (!test_sampler_takes(sampler))
            continue;
        const transformer_record *expected = train_alone(&mode, ranks, c);
        for (int d = 0; expected && d < 2; d++)
            try_mode(ranks, devices[d], &mode, expected, c);
    }
}

static void try_replicas(int64_t replicas, int ranks, test_sampler *sampler, counts *c)
{
    const transformer_mode plain = {.sgd = true};
    const transformer_record *expected = train_alone(&plain, ranks, c);
    for (int kind = 0; expected && kind < 4; kind++) {
        const transformer_mode mode = {.reshard = kind % 2,
                                       .root_reshard = FSDP_RESHARD_AUTO,
                                       .prefetch = kind % 3,
                                       .inputs = 1 + kind / 2,
                                       .replicas = replicas,
                                       .sgd = true,
                                       .tolerance = 1e-5};
        if (test_sampler_takes(sampler))
            try_mode(ranks, devices[kind / 2], &mode, expected, c);
    }
}

int main(void)
{
    static const int worlds[] = {1, 2, 3, 4, 8};
    counts c = {0};
    test_sampler sampler = {.every = test_sample(USUAL_SAMPLE)};
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++)
        try_all_modes(worlds[i], &sampler, &c);
    for (int ranks = 2; ranks <= 4; ranks++)
        try_narrow(ranks, &sampler, &c);
    try_replicas(2, 4, &sampler, &c);
    try_replicas(4, 4, &sampler, &c);
    try_replicas(2, 8, &sampler, &c);
    printf("%d runs, %d failed\n", c.tried, c.failed);
    return c.failed > 0 || c.tried == 0;
}
