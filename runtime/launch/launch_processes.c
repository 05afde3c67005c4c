/*
 * --np: ranks as forked processes of this host. See launch_internal.h.
 *
 * The listener is opened before the first fork, so that its port is free, and the job's id is
 * random, so that two jobs never mix. launch_supervise.c supervises the ranks.
 */
#include "runtime/launch/launch_supervise.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <unistd.h>

#include "runtime/bootstrap/rendezvous.h"

typedef struct process_group {
    fsdp_launch_job job;
    int size, listener, port;
    char id[33]; /* of the job */
    fsdp_supervisor *supervisor;
} process_group;

/* --- in a rank -------------------------------------------------------------------------------- */

static fsdp_status find_listener(void *context, char host_out[FSDP_HOST_SIZE], int *port_out,
                                 int64_t until_ms, fsdp_error *err)
{
    const process_group *group = context;
    (void)until_ms;
    (void)err;
    snprintf(host_out, FSDP_HOST_SIZE, "%s", FSDP_LOOPBACK);
    *port_out = group->port;
    return FSDP_OK;
}

static fsdp_status connect_rank(process_group *group, int rank, fsdp_ctl **ctl_out, fsdp_error *err)
{
    if (rank != 0) /* rank 0's */
        fsdp_socket_close(&group->listener);
    const fsdp_rendezvous_spec spec = {.rank = rank,
                                       .size = group->size,
                                       .job = group->id,
                                       .is_one_host = true,
                                       .deadline_ms = group->job.options->deadline_ms,
                                       .listener = group->listener,
                                       .find = find_listener,
                                       .context = group};
    return fsdp_rendezvous(&spec, ctl_out, err);
}

/* A terminal belongs to the supervisor's process group: a rank that read from it would be
 * stopped. */
static void choose_stdin(int rank)
{
    if (rank == 0 && !isatty(STDIN_FILENO))
        return;
    int nothing = open("/dev/null", O_RDONLY);
    if (nothing < 0)
        return;
    (void)dup2(nothing, STDIN_FILENO);
    if (nothing != STDIN_FILENO)
        close(nothing);
}

/* The rank dies with its supervisor, also with one that ended before this call. */
static void end_with(pid_t supervisor)
{
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != supervisor)
        _exit(128 + SIGKILL);
}

static int run_rank(process_group *group, int rank)
{
    fsdp_error err = {0};
    fsdp_ctl *ctl = NULL;
    choose_stdin(rank);
    if (connect_rank(group, rank, &ctl, &err) == FSDP_OK)
        return fsdp_launch_rank(&group->job, ctl, NULL);
    fsdp_error_prefix(&err, "rank %d", rank);
    int code = fsdp_error_report(&err);
    group->job.failed(group->job.listener, rank, code);
    return code;
}

/* --- in the supervisor ------------------------------------------------------------------------ */

/* Does not return in the child. */
static int start_rank(process_group *group, int rank)
{
    pid_t supervisor = getpid();
    pid_t pid = fork();
    if (pid < 0)
        return -errno;
    if (pid > 0) {
        fsdp_supervisor_add(group->supervisor, rank, pid);
        return 0;
    }
    end_with(supervisor);
    fsdp_supervisor_leave(group->supervisor);
    exit(run_rank(group, rank));
}

static fsdp_status name_job(char id_out[33], fsdp_error *err)
{
    unsigned char random[16];
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
        return fsdp_fail_errno(err, errno, "cannot make the job's id");
    for (size_t i = 0; i < sizeof random; i++)
        snprintf(id_out + 2 * i, 3, "%02x", random[i]);
    return FSDP_OK;
}

static fsdp_status start_ranks(process_group *group, fsdp_error *err)
{
    const fsdp_launch_options *options = group->job.options;
    FSDP_TRY(fsdp_launch_have_files(options->np_name, options->np, options->comm, err));
    FSDP_TRY(name_job(group->id, err));
    FSDP_TRY(fsdp_socket_listen(FSDP_LOOPBACK, 0, &group->listener, err));
    group->port = fsdp_socket_port(group->listener);
    FSDP_TRY(fsdp_supervisor_create(group->size, options->deadline_ms, &group->supervisor, err));
    group->job.failed = fsdp_supervisor_note;
    group->job.listener = group->supervisor;
    fflush(NULL); /* or every rank would write the buffered output */
    for (int rank = 0; rank < group->size; rank++) {
        int failed = start_rank(group, rank);
        if (failed)
            return fsdp_fail_errno(err, -failed, "cannot start a process for rank %d", rank);
    }
    return FSDP_OK;
}

int fsdp_launch_processes(const fsdp_launch_job *job)
{
    process_group group = {.job = *job, .size = job->options->np, .listener = -1};
    fsdp_error err = {0};
    int code = 0;
    fsdp_status status = start_ranks(&group, &err);
    fsdp_socket_close(&group.listener);
    if (status != FSDP_OK)
        code = fsdp_error_report(&err);
    if (group.supervisor) {
        int first = fsdp_supervise(group.supervisor, status != FSDP_OK);
        code = code != 0 ? code : first;
    }
    fsdp_supervisor_free(group.supervisor);
    return code;
}
