/*
 * --np: ranks as forked processes of this host. See launch_internal.h.
 *
 * The listener is made before the first fork, so nobody races for a port, and the job's id is random,
 * so two jobs never mix. What happens to the ranks afterwards is launch_supervise.c.
 */
#include "runtime/launch/launch_supervise.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

#include "runtime/meet/rendezvous.h"

enum {
    /* Of a process beside what it has for each other rank: pipe, listeners, memory, trace, the one that
     * it talks to; and as many ranks of its host as may stand in the door at once (shm_exchange.c). */
    FILES_AT_LEAST = 32,
    FILES_TO_SPARE = 128 /* for what the program opens */
};

typedef struct process_group {
    fsdp_launch_job job;
    int size, listener, port;
    char id[33]; /* of the job */
    fsdp_supervisor *supervisor;
} process_group;

/* --- in a rank -------------------------------------------------------------------------------- */

static fsdp_status find_listener(void *user, char host_out[FSDP_HOST_SIZE], int *port_out,
                                 int64_t until_ms, fsdp_error *err)
{
    const process_group *group = user;
    (void)until_ms;
    (void)err;
    snprintf(host_out, FSDP_HOST_SIZE, "%s", FSDP_LOOPBACK);
    *port_out = group->port;
    return FSDP_OK;
}

static fsdp_status connect_rank(process_group *group, int rank, fsdp_ctl **ctl_out, fsdp_error *err)
{
    if (rank != 0) /* the door of rank 0 */
        fsdp_socket_close(&group->listener);
    const fsdp_meeting meeting = {.rank = rank,
                                  .size = group->size,
                                  .job = group->id,
                                  .is_one_host = true,
                                  .deadline_ms = group->job.options->deadline_ms,
                                  .listener = group->listener,
                                  .find = find_listener,
                                  .user = group};
    return fsdp_meet(&meeting, ctl_out, err);
}

/* A terminal belongs to the supervisor's process group: a rank that read from it would be stopped. */
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

/* Ends with its supervisor, whatever happens to that, also before this line. */
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

/* The child never comes back from here: its main is body. */
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

/* The lowest limit that leaves room for n files beside those that are open now. */
static rlim_t limit_for(int n)
{
    int limit = 0;
    for (; n > 0; limit++)
        n -= fcntl(limit, F_GETFD) < 0;
    return (rlim_t)limit;
}

/* A rank has a connection with each other one, watches its process, and over TCP has a second connection.
 * Programs are often given few files at first, and may take more. */
static fsdp_status have_files(const fsdp_launch_options *options, fsdp_error *err)
{
    const int of_each = options->comm == FSDP_COMM_TCP ? 3 : 2;
    const rlim_t needed = limit_for((options->np - 1) * of_each + FILES_AT_LEAST);
    const rlim_t wanted = needed + FILES_TO_SPARE;
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur >= wanted)
        return FSDP_OK;
    if (files.rlim_max < needed)
        return fsdp_fail(err, FSDP_ERR_LIMIT,
                         "%s %d needs at least %llu open files in a process, which may have %llu: "
                         "raise the hard limit (`ulimit -Hn`), or start fewer ranks",
                         options->np_name, options->np, (unsigned long long)needed,
                         (unsigned long long)files.rlim_max);
    files.rlim_cur = wanted < files.rlim_max ? wanted : files.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &files) != 0)
        return fsdp_fail_errno(err, errno, "cannot raise the limit of open files to %llu",
                               (unsigned long long)files.rlim_cur);
    return FSDP_OK;
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
    FSDP_TRY(have_files(group->job.options, err));
    FSDP_TRY(name_job(group->id, err));
    FSDP_TRY(fsdp_socket_listen(FSDP_LOOPBACK, 0, &group->listener, err));
    group->port = fsdp_socket_port(group->listener);
    FSDP_TRY(fsdp_supervisor_create(group->size, group->job.options->deadline_ms,
                                    &group->supervisor, err));
    group->job.failed = fsdp_supervisor_note;
    group->job.listener = group->supervisor;
    fflush(NULL); /* what is buffered is written once */
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
