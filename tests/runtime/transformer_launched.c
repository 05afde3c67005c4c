/*
 * The small transformer as a program that is launched, in any way: every rank compares what it has
 * with what it computes alone, first. Argument: which of the modes, else all.
 */
#include <fsdp/fsdp.h>

#include <stdio.h>
#include <stdlib.h>

#include "tests/support/nets/transformer_units.h"

static const transformer_mode modes[] = {
    {.reshard = FSDP_RESHARD_ALWAYS, .root_reshard = FSDP_RESHARD_AUTO, .inputs = 1},
    {.reshard = FSDP_RESHARD_NEVER, .prefetch = 1, .inputs = 2, .from_comm = true},
    {.reshard = FSDP_RESHARD_ALWAYS, .prefetch = 2, .inputs = 1, .separate = true},
    {.reshard = FSDP_RESHARD_ALWAYS, .inputs = 1, .dtype = FSDP_BF16, .reduce_dtype = FSDP_F32},
    {.reshard = 2, .root_reshard = FSDP_RESHARD_ALWAYS, .prefetch = 1, .inputs = 1},
};
enum { MODES = sizeof modes / sizeof *modes };

static fsdp_status try_mode(fsdp_world *world, const transformer_mode *mode, fsdp_error *err)
{
    transformer_record *record = calloc(1, sizeof *record);
    if (!record)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "no memory for what one rank has");
    fsdp_status status = transformer_train_alone(mode, fsdp_world_size(world), record, err);
    if (status == FSDP_OK)
        status = transformer_train_and_compare(world, mode, record, err);
    free(record);
    return status;
}

static int run_rank(void *user, fsdp_world *world, int argc, char **argv)
{
    (void)user;
    size_t only = argc > 1 ? strtoul(argv[1], NULL, 10) : MODES;
    for (size_t i = 0; i < MODES; i++) {
        fsdp_error err = {0};
        if (only != MODES && only != i)
            continue;
        if (modes[i].reshard > 1 && fsdp_world_size(world) % modes[i].reshard != 0)
            continue;
        if (try_mode(world, &modes[i], &err) != FSDP_OK)
            return fsdp_error_report(&err);
    }
    if (fsdp_world_rank(world) == 0)
        printf("%d ranks: the bits of one\n", fsdp_world_size(world));
    return 0;
}

int main(int argc, char **argv)
{
    return fsdp_launch(argc, argv, run_rank, NULL);
}
