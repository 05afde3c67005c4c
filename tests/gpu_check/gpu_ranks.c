/* See gpu_ranks.h. */
#include "tests/gpu_check/gpu_ranks.h"

#include <stdio.h>
#include <string.h>

static int run_rank(void *context, fsdp_world *world, int argc, char **argv)
{
    gpu_ranks *ranks = context;
    fsdp_error *err = &ranks->errors[fsdp_world_rank(world)];
    (void)argc, (void)argv;
    ranks->has_run = true;
    err->status = ranks->body(ranks->context, world, err);
    return err->status == FSDP_OK ? 0 : fsdp_world_fail(world, err);
}

static fsdp_status find_failure(const gpu_ranks *ranks, int code, fsdp_error *err)
{
    const fsdp_error *first = NULL;
    for (int i = 0; i < ranks->count; i++) {
        const fsdp_error *one = &ranks->errors[i];
        if (one->status != FSDP_OK &&
            (!first || (first->status == FSDP_ERR_PEER && one->status != FSDP_ERR_PEER)))
            first = one;
    }
    if (first)
        *err = *first;
    if (first)
        return first->status;
    return code == 0
               ? FSDP_OK
               : fsdp_fail(err, (fsdp_status)code, "%d ranks (--comm %s) end with exit code %d",
                           ranks->count, ranks->comm ? ranks->comm : "threads", code);
}

fsdp_status gpu_ranks_run(gpu_ranks *ranks, fsdp_error *err)
{
    char count[16], deadline[16];
    snprintf(count, sizeof count, "%d", ranks->count);
    snprintf(deadline, sizeof deadline, "%d", ranks->deadline_s > 0 ? ranks->deadline_s : 30);
    char *argv[] = {"gpu-check",
                    "--threads",
                    count,
                    "--device",
                    (char *)ranks->device,
                    "--deadline",
                    deadline,
                    "--comm",
                    (char *)(ranks->comm ? ranks->comm : "threads"),
                    NULL};
    memset(ranks->errors, 0, sizeof ranks->errors);
    return find_failure(ranks, fsdp_launch(9, argv, run_rank, ranks), err);
}
