/* The small transformer over ranks that are processes: the bits of one rank, in some modes of
 * each kind. */
#include "tests/support/nets/transformer_units.h"
#include "tests/support/ranks/world_processes.h"

#include <stdio.h>

typedef struct transformer_run {
    const transformer_mode *mode;
    const transformer_record *expected;
} transformer_run;

static fsdp_status run_rank(world_rank *rank, fsdp_error *err)
{
    const transformer_run *run = rank->user;
    return transformer_train_and_compare(rank->world, run->mode, run->expected, err);
}

static bool try_mode(int ranks, const char *device, const transformer_mode *mode)
{
    static transformer_record record;
    transformer_run run = {mode, &record};
    world_processes worlds = {
        .size = ranks, .deadline_ms = 30000, .device = device, .body = run_rank, .user = &run};
    fsdp_error err = {0};
    char text[300];
    if (transformer_train_alone(mode, ranks, &record, &err) == FSDP_OK &&
        run_world_processes(&worlds, &err) == FSDP_OK)
        return true;
    transformer_mode_describe(mode, text, sizeof text);
    printf("%d processes on %s, %s: %s\n", ranks, device, text, err.text);
    return false;
}

int main(void)
{
    static const transformer_mode modes[] = {
        {.reshard = FSDP_RESHARD_ALWAYS, .root_reshard = FSDP_RESHARD_AUTO, .inputs = 1},
        {.reshard = FSDP_RESHARD_NEVER, .prefetch = 1, .inputs = 2, .from_comm = true},
        {.reshard = FSDP_RESHARD_ALWAYS,
         .root_reshard = FSDP_RESHARD_ALWAYS,
         .prefetch = 2,
         .inputs = 1,
         .from_comm = true,
         .separate = true},
        {.reshard = FSDP_RESHARD_ALWAYS,
         .inputs = 1,
         .dtype = FSDP_BF16,
         .reduce_dtype = FSDP_F32,
         .from_comm = true},
        {.reshard = FSDP_RESHARD_NEVER,
         .prefetch = 1,
         .inputs = 1,
         .param_dtype = FSDP_BF16,
         .reduce_dtype = FSDP_F32},
    };
    static const transformer_mode halves = {.reshard = 2, .inputs = 1, .from_comm = true};
    static const transformer_mode replicas = {
        .reshard = 1, .inputs = 1, .replicas = 2, .sgd = true, .tolerance = 1e-5};
    static const int worlds[] = {2, 3, 4, 8};
    int tried = 0, failed = 0;
    for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++)
        for (size_t m = 0; m < sizeof modes / sizeof *modes && (m == 0 || worlds[w] < 8); m++)
            failed += !try_mode(worlds[w], tried++ % 2 == 0 ? "cpu" : "cpu-async", &modes[m]);
    failed += !try_mode(4, "cpu", &halves);
    failed += !try_mode(4, "cpu-async", &replicas);
    printf("%d runs, %d failed\n", tried + 2, failed);
    return failed > 0;
}
