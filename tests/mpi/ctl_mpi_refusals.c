/*
 * Setting up the control plane when MPI itself fails: an error comes back, nothing aborts, nothing
 * leaks. The functions of MPI that fail are replaced by ones of this program.
 *
 * usage: ctl_mpi_refusals HOW     HOW: threads, second, duplicate, describe or late
 */
#include <mpi.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include <fsdp/ctl_mpi.h>

#include "runtime/launch/mpi_library.h"

static int fewer_threads = -1; /* the level that is granted; -1: as MPI says */
static bool no_duplicate, no_size, is_late;
static int duplicates; /* that were made and not freed */

int MPI_Init_thread(int *argc, char ***argv, int required, int *provided)
{
    int code = PMPI_Init_thread(argc, argv, required, provided);
    if (fewer_threads >= 0)
        *provided = fewer_threads;
    return code;
}

/* As MPI does it: the handler of the communicator decides first. */
static int fail_on(MPI_Comm comm)
{
    MPI_Comm_call_errhandler(comm, MPI_ERR_OTHER);
    return MPI_ERR_OTHER;
}

/* The duplicate of a communicator whose other ranks never duplicate it: this message is never
 * sent. */
static MPI_Request never;

static int wait_for_ever(MPI_Comm *newcomm, MPI_Request *request)
{
    static char message;
    *newcomm = MPI_COMM_NULL;
    int code = MPI_Irecv(&message, 1, MPI_BYTE, 0, 1, MPI_COMM_SELF, &never);
    *request = never;
    return code;
}

int MPI_Comm_idup(MPI_Comm comm, MPI_Comm *newcomm, MPI_Request *request)
{
    if (is_late)
        return wait_for_ever(newcomm, request);
    duplicates += !no_duplicate;
    return no_duplicate ? fail_on(comm) : PMPI_Comm_idup(comm, newcomm, request);
}

int MPI_Comm_free(MPI_Comm *comm)
{
    duplicates--;
    return PMPI_Comm_free(comm);
}

int MPI_Comm_size(MPI_Comm comm, int *size)
{
    return no_size ? fail_on(comm) : PMPI_Comm_size(comm, size);
}

static int expect(fsdp_status status, fsdp_status expected, const fsdp_error *err,
                  const char *words)
{
    if (status == expected && strstr(err->text, words))
        return 0;
    fprintf(stderr, "status %d, '%s'; %d and '%s' were expected\n", (int)status, err->text,
            (int)expected, words);
    return 1;
}

static int try_world(fsdp_status expected, const char *words)
{
    fsdp_ctl *ctl = NULL;
    fsdp_error err = {0};
    fsdp_status status = fsdp_ctl_mpi_world(&ctl, &err);
    if (status == FSDP_OK)
        fsdp_ctl_free(ctl);
    return expect(status, expected, &err, words);
}

static int try_null(void)
{
    fsdp_ctl *ctl = NULL;
    fsdp_error err = {0};
    MPI_Comm none = MPI_COMM_NULL;
    return expect(fsdp_ctl_mpi_comm(&none, &ctl, &err), FSDP_ERR_USAGE, &err, "MPI_COMM_NULL");
}

/* The program's communicator goes back to what it was. */
static int check_handler(void)
{
    MPI_Errhandler handler;
    MPI_Comm_get_errhandler(MPI_COMM_WORLD, &handler);
    bool fatal = handler == MPI_ERRORS_ARE_FATAL;
    MPI_Errhandler_free(&handler);
    return !fatal;
}

/* The deadline is the caller's, and then MPI is not ended: the others would be waited for again. */
static int check_late(void)
{
    fsdp_ctl_mpi_set_deadline(200);
    is_late = true;
    const char *words = "not all ranks connected over MPI within 0.2 s";
    int failed = try_world(FSDP_ERR_PEER, words) || fsdp_mpi_finalize();
    MPI_Cancel(&never);
    MPI_Wait(&never, MPI_STATUS_IGNORE);
    return MPI_Finalize() != MPI_SUCCESS || failed;
}

/* A control plane for another thread is refused, and the first one continues. */
static int check_second(void)
{
    fsdp_ctl *ctl = NULL, *second = NULL;
    fsdp_error err = {0};
    fewer_threads = MPI_THREAD_FUNNELED;
    if (fsdp_ctl_mpi_world(&ctl, &err) != FSDP_OK)
        return 1;
    int failed = expect(fsdp_mpi_table.ctl_again(ctl, &second, &err), FSDP_ERR_USAGE, &err,
                        "MPI_THREAD_SERIALIZED");
    failed = failed || second || fsdp_ctl_barrier(ctl, &err) != FSDP_OK;
    fsdp_ctl_free(ctl);
    return !fsdp_mpi_finalize() || failed || duplicates != 0;
}

int main(int argc, char **argv)
{
    const char *how = argc > 1 ? argv[1] : "";
    if (strcmp(how, "late") == 0)
        return check_late();
    if (strcmp(how, "second") == 0)
        return check_second();
    int failed = 0;
    bool few_threads = strcmp(how, "threads") == 0;
    if (few_threads)
        fewer_threads = MPI_THREAD_SINGLE;
    no_duplicate = strcmp(how, "duplicate") == 0;
    no_size = strcmp(how, "describe") == 0;
    if (few_threads)
        failed = try_world(FSDP_ERR_USAGE, "MPI_THREAD_FUNNELED") ||
                 try_world(FSDP_ERR_USAGE, "MPI_THREAD_FUNNELED");
    else
        failed = try_world(FSDP_ERR_PEER, no_duplicate ? "MPI_Comm_idup" : "MPI_Comm_size");
    no_duplicate = no_size = false;
    failed = failed || try_null() || check_handler();
    if (!few_threads)
        failed = failed || try_world(FSDP_OK, "");
    if (duplicates != 0)
        fprintf(stderr, "%d duplicates were not freed\n", duplicates);
    return !fsdp_mpi_finalize() || failed || duplicates != 0;
}
