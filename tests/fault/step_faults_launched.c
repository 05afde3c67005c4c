/*
 * One fault in a training step, as a launched program: KIND AT RANK, of step_fault.h. Every rank
 * runs a step without the fault, then one with it, and checks the error that it got: "rank R: as
 * it should be", exit code 0. Over MPI the exit code is 10 after a failure: ranks with messages in
 * flight leave without MPI_Finalize, which would wait for the others.
 */
#include "base/text.h"
#include <fsdp/fsdp.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/launch/world_internal.h"
#include "tests/fault/step_fault.h"

static bool read_fault(int argc, char **argv, step_fault *fault)
{
    if (argc != 4)
        return false;
    while (fault->kind < STEP_FAULT_KINDS && strcmp(step_fault_names[fault->kind], argv[1]) != 0)
        fault->kind++;
    fault->at = atoi(argv[2]);
    fault->rank = atoi(argv[3]);
    return fault->kind < STEP_FAULT_KINDS;
}

static int code_after(const fsdp_world *world, fsdp_status status)
{
    bool is_mpi = strcmp(world->parts.transport->ops->name, "mpi") == 0;
    return is_mpi && status != FSDP_OK ? FSDP_ERR_PEER : 0;
}

static int run_rank(void *user, fsdp_world *world, int argc, char **argv)
{
    step_calls calls = {0};
    step_fault fault = {.is_launched = true, .calls = &calls};
    world_rank rank = {.world = world, .user = &fault};
    fsdp_error err = {0};
    fsdp_text why = {0};
    int me = fsdp_world_rank(world);
    (void)user;
    if (step_fault_body(&rank, &err) != FSDP_OK)
        return fsdp_error_report(&err);
    if (!read_fault(argc, argv, &fault)) {
        fprintf(stderr, "usage: KIND AT RANK\n");
        return FSDP_ERR_USAGE;
    }
    fsdp_status status = step_fault_body(&rank, &err);
    err.status = status;
    bool is_well = step_fault_judge(&fault, me, status, &err, &why);
    printf("rank %d: %s\n", me, is_well ? "as it should be" : why.data);
    fsdp_text_release(&why);
    return is_well ? code_after(world, status) : FSDP_ERR_INTERNAL;
}

int main(int argc, char **argv)
{
    return fsdp_launch(argc, argv, run_rank, NULL);
}
