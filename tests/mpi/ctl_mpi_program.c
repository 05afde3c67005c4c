/*
 * The control plane on real ranks (mpirun starts it).
 *
 * usage: ctl_mpi_program                     random calls; exits with 0 when every value is right
 *        ctl_mpi_program HOW RANK DIR        before a collective RANK kills or stops itself, or
 *                                            calls something else (HOW: kill, stop, differ); every
 *                                            living rank writes its error to DIR/rank-N
 *                                            (ctl_mpi_loss.py reads it)
 */
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <fsdp/ctl_mpi.h>

#include "tests/support/rounds/ctl_rounds.h"

enum { LOSS_DEADLINE_MS = 1000 };

static int report(fsdp_ctl *ctl, fsdp_status status, const fsdp_error *err)
{
    if (status != FSDP_OK)
        fprintf(stderr, "rank %d: status %d, '%s'\n", ctl ? fsdp_ctl_rank(ctl) : -1, (int)status,
                err->text);
    return status != FSDP_OK;
}

static int run_random_calls(fsdp_ctl *ctl)
{
    static const ctl_rounds all_rounds[] = {{.seed = 5, .rounds = 150, .max_size = 60000},
                                            {.seed = 6, .rounds = 10, .max_size = 5 << 20}};
    for (int i = 0; i < 2; i++) {
        ctl_rounds rounds = all_rounds[i];
        fsdp_error err = {0};
        if (report(ctl, run_ctl_rounds(&rounds, ctl, &err), &err))
            return 1;
    }
    return 0;
}

/* A second control plane, on half of the ranks, does not disturb the first. */
static int run_on_a_part(fsdp_ctl *world)
{
    int rank = fsdp_ctl_rank(world);
    MPI_Comm half;
    fsdp_ctl *ctl = NULL;
    fsdp_error err = {0};
    ctl_rounds rounds = {.seed = 7, .rounds = 20, .max_size = 1000};
    if (MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &half) != MPI_SUCCESS)
        return 1;
    int failed = report(ctl, fsdp_ctl_mpi_comm(&half, &ctl, &err), &err) ||
                 report(ctl, run_ctl_rounds(&rounds, ctl, &err), &err);
    fsdp_ctl_free(ctl);
    MPI_Comm_free(&half);
    return failed || run_random_calls(world);
}

/* The last: its deadline stays short on rank 1. */
static int run_busy_rank(fsdp_ctl *ctl)
{
    fsdp_error err = {0};
    return fsdp_ctl_size(ctl) > 1 && report(ctl, send_to_busy_rank(NULL, ctl, &err), &err);
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static FILE *open_note(const char *folder, const char *what, int rank)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s-%d", folder, what, rank);
    FILE *file = fopen(path, "w");
    if (!file)
        _exit(99);
    return file;
}

/* Runs on the special rank in place of the allgather of all others. */
static fsdp_status behave_specially(fsdp_ctl *ctl, const char *how, fsdp_error *err)
{
    int rank = fsdp_ctl_rank(ctl);
    if (strcmp(how, "differ") == 0)
        return fsdp_ctl_broadcast(ctl, 0, &rank, sizeof rank, err);
    (void)raise(strcmp(how, "kill") == 0 ? SIGKILL : SIGSTOP);
    return fsdp_ctl_barrier(ctl, err);
}

static void lose_a_rank(fsdp_ctl *ctl, const char *how, int special, const char *folder)
{
    int rank = fsdp_ctl_rank(ctl), all[16];
    fsdp_error err = {0};
    FILE *file = open_note(folder, "pid", rank);
    fprintf(file, "%d\n", (int)getpid());
    fclose(file);
    if (report(ctl, fsdp_ctl_barrier(ctl, &err), &err))
        _exit(98);
    fsdp_ctl_set_deadline(ctl, LOSS_DEADLINE_MS);
    double start = seconds();
    fsdp_status status = rank == special ? behave_specially(ctl, how, &err)
                                         : fsdp_ctl_allgather(ctl, &rank, sizeof rank, all, &err);
    double waited = seconds() - start;
    fsdp_ctl_free(ctl);
    bool may_return = fsdp_mpi_finalize();
    file = open_note(folder, "rank", rank);
    fprintf(file, "%d %d %.3f %s\n", err.rank, may_return, waited, err.text);
    fclose(file);
    _exit((int)status);
}

int main(int argc, char **argv)
{
    fsdp_ctl *ctl = NULL;
    fsdp_error err = {0};
    if (report(ctl, fsdp_ctl_mpi_world(&ctl, &err), &err))
        return 1;
    if (argc == 4)
        lose_a_rank(ctl, argv[1], atoi(argv[2]), argv[3]);
    int failed = run_random_calls(ctl) || run_on_a_part(ctl) || run_busy_rank(ctl);
    fsdp_ctl_free(ctl);
    return !fsdp_mpi_finalize() || failed;
}
