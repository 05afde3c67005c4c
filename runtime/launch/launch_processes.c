/*
 * --np: ranks as forked processes of this host. See launch_internal.h.
 *
 * The listener is opened before the first fork, so that its port is free, and the job's id is
 * random, so that two jobs never mix.
 */
#include "runtime/launch/launch_internal.h"
#include "base/core/clock.h"
#include "base/core/mem.h"
#include "runtime/bootstrap/rendezvous.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* === the supervisor =========================================================================== */

/*
 * The supervisor of forked ranks. See launch_internal.h.
 *
 * The rank that failed first: a failing rank writes a note to a pipe before the others can see its
 * failure. A crashed rank writes none; its death counts as earlier than the errors that it causes
 * in the others, which mostly have the code of a lost peer.
 *
 * Ranks are a process group of their own, so that a signal of a terminal or `timeout` to the
 * parent's group reaches them once, through the parent.
 */

enum { NOTICE_MS = 2000 };

static const int forwarded[] = {SIGTERM, SIGINT,  SIGHUP,  SIGQUIT,
                                SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT};
enum { FORWARDED = sizeof forwarded / sizeof *forwarded };

typedef struct note {
    int32_t rank, code;
} note;

typedef struct process {
    pid_t pid; /* 0: not started */
    bool has_ended;
    int code;     /* 128 + N: killed by signal N */
    int signal;   /* the N; 0: it ended by itself */
    int noted;    /* the code it left in the pipe; 0: none */
    int noted_at; /* its place among the notes */
} process;

struct fsdp_supervisor {
    int size, deadline_ms, running, notes;
    int pipe[2];
    sigset_t waited, before;
    struct sigaction child_before; /* what SIGCHLD did */
    process *ranks;
    bool has_failed; /* a rank has ended with a failure */
    bool is_ending;  /* the remaining ranks are being ended */
    int first;       /* the rank that failed first; -1: not known yet */
    int first_code;
    int left;                 /* the rank that ended first with code 0; -1: none */
    int64_t term_ms, kill_ms; /* time to send these signals; INT64_MAX: never, or sent */
    bool sent[NSIG];          /* signals forwarded, or sent to end the ranks */
};

/* --- creation and end ------------------------------------------------------------------------- */

fsdp_status fsdp_supervisor_create(int size, int deadline_ms, fsdp_supervisor **supervisor_out,
                                   fsdp_error *err)
{
    fsdp_supervisor *made = fsdp_alloc(1, sizeof *made);
    process *ranks = fsdp_alloc((size_t)size, sizeof *ranks);
    bool has_pipe = made && ranks && pipe2(made->pipe, O_CLOEXEC | O_NONBLOCK) == 0;
    if (!has_pipe) {
        fsdp_status status = made && ranks
                                 ? fsdp_fail_errno(err, errno, "cannot make a pipe for the ranks")
                                 : fsdp_fail_memory(err, "the ranks' supervisor");
        fsdp_free(made);
        fsdp_free(ranks);
        return status;
    }
    made->size = size;
    made->deadline_ms = deadline_ms;
    made->ranks = ranks;
    made->first = made->left = -1;
    made->term_ms = made->kill_ms = INT64_MAX;
    sigemptyset(&made->waited);
    sigaddset(&made->waited, SIGCHLD);
    for (int i = 0; i < FORWARDED; i++)
        sigaddset(&made->waited, forwarded[i]);
    (void)sigprocmask(SIG_BLOCK, &made->waited, &made->before);
    /* An inherited SIG_IGN would make the kernel discard the ranks' exit codes. */
    (void)sigaction(SIGCHLD, &(struct sigaction){.sa_handler = SIG_DFL}, &made->child_before);
    *supervisor_out = made;
    return FSDP_OK;
}

static void restore_signals(const fsdp_supervisor *supervisor)
{
    (void)sigaction(SIGCHLD, &supervisor->child_before, NULL);
    (void)sigprocmask(SIG_SETMASK, &supervisor->before, NULL);
}

void fsdp_supervisor_free(fsdp_supervisor *supervisor)
{
    if (!supervisor)
        return;
    restore_signals(supervisor);
    close(supervisor->pipe[0]);
    close(supervisor->pipe[1]);
    fsdp_free(supervisor->ranks);
    fsdp_free(supervisor);
}

/* Called by parent and child, because either may run first. */
static void join_group(const fsdp_supervisor *supervisor, pid_t pid)
{
    (void)setpgid(pid, supervisor->ranks[0].pid);
}

void fsdp_supervisor_add(fsdp_supervisor *supervisor, int rank, pid_t pid)
{
    supervisor->ranks[rank].pid = pid;
    supervisor->running++;
    join_group(supervisor, pid);
}

/* In the rank: restores the signals and joins the ranks' process group. */
static void supervisor_leave(const fsdp_supervisor *supervisor)
{
    join_group(supervisor, 0);
    restore_signals(supervisor);
}

/* In the rank: `failed` of its fsdp_launch_job; notes the exit code before the rank ends. */
static void supervisor_note(void *supervisor, int rank, int code)
{
    const fsdp_supervisor *mine = supervisor;
    const note what = {rank, code};
    (void)!write(mine->pipe[1], &what, sizeof what);
}

/* --- the first failure ------------------------------------------------------------------------ */

static void read_notes(fsdp_supervisor *supervisor)
{
    note what;
    while (read(supervisor->pipe[0], &what, sizeof what) == (ssize_t)sizeof what) {
        process *rank = &supervisor->ranks[what.rank];
        rank->noted = what.code & 0xff;
        rank->noted_at = supervisor->notes++;
    }
}

/* A rank killed by the supervisor's own signal did not fail. */
static bool is_ours(const fsdp_supervisor *supervisor, const process *rank)
{
    return rank->signal != 0 && supervisor->sent[rank->signal] &&
           (supervisor->first >= 0 || rank->signal != SIGKILL);
}

/* Smaller is earlier; -1: it has not failed. */
static int lateness(const fsdp_supervisor *supervisor, const process *rank)
{
    int code = rank->noted ? rank->noted : rank->has_ended ? rank->code : 0;
    int place = rank->noted ? rank->noted_at : 0;
    if (code == 0)
        return -1;
    if (rank->has_ended && rank->signal != 0 && !rank->noted)
        return 0;
    return (code == FSDP_ERR_PEER ? 2 : 1) * (supervisor->size + 1) + place;
}

/* A rank that ends with SIGPIPE's code has lost the reader of its output, who wants no more of it. */
static void report_end(const process *rank, int number)
{
    int code = rank->noted ? rank->noted : rank->code;
    if (rank->has_ended && rank->signal != 0)
        fprintf(stderr, "fsdp: rank %d was killed by signal %d (%s)\n", number, rank->signal,
                strsignal(rank->signal));
    else if (code != 128 + SIGPIPE)
        fprintf(stderr, "fsdp: rank %d ended with exit code %d\n", number, code);
}

/* The rank that failed first, by what is known now; -1: none. */
static int find_first(const fsdp_supervisor *supervisor)
{
    int earliest = -1, first = -1;
    for (int i = 0; i < supervisor->size; i++) {
        int late = lateness(supervisor, &supervisor->ranks[i]);
        if (late >= 0 && (earliest < 0 || late < earliest)) {
            earliest = late;
            first = i;
        }
    }
    return first;
}

static void settle_first(fsdp_supervisor *supervisor, int first)
{
    const process *rank = &supervisor->ranks[first];
    supervisor->first = first;
    supervisor->first_code = rank->noted ? rank->noted : rank->code;
    if (!is_ours(supervisor, rank) || rank->noted)
        report_end(rank, first);
    if (supervisor->first_code == FSDP_ERR_PEER && supervisor->left >= 0)
        fprintf(stderr,
                "fsdp: rank %d has ended with exit code 0: it called exit, or made "
                "fewer calls\n",
                supervisor->left);
}

/* --- ending ----------------------------------------------------------------------------------- */

static void send_all(fsdp_supervisor *supervisor, int number)
{
    supervisor->sent[number] = true;
    for (int i = 0; i < supervisor->size; i++)
        if (supervisor->ranks[i].pid > 0 && !supervisor->ranks[i].has_ended)
            (void)kill(supervisor->ranks[i].pid, number);
}

static void begin_to_end(fsdp_supervisor *supervisor, int64_t now_ms, int64_t notice_ms)
{
    int64_t quarter_ms = supervisor->deadline_ms / 4;
    supervisor->term_ms = now_ms + (notice_ms < quarter_ms ? notice_ms : quarter_ms);
    supervisor->kill_ms = now_ms + supervisor->deadline_ms;
    supervisor->is_ending = true;
}

static void end_in_time(fsdp_supervisor *supervisor, int64_t now_ms)
{
    if (now_ms >= supervisor->term_ms) {
        supervisor->term_ms = INT64_MAX;
        send_all(supervisor, SIGTERM);
        send_all(supervisor, SIGCONT); /* so that a stopped rank gets the signal, too */
    }
    if (now_ms >= supervisor->kill_ms) {
        supervisor->kill_ms = INT64_MAX;
        send_all(supervisor, SIGKILL);
    }
}

/* False: it runs. Its exit code is lost when other code of this process has waited for it. */
static bool look_for_end(process *rank, int number)
{
    int status;
    pid_t ended = waitpid(rank->pid, &status, WNOHANG);
    if (ended == 0 || (ended < 0 && errno != ECHILD))
        return false;
    rank->has_ended = true;
    if (ended < 0) {
        rank->code = FSDP_ERR_INTERNAL;
        fprintf(stderr,
                "fsdp: the exit code of rank %d is unknown: other code in the program waited for "
                "the process\n",
                number);
        return true;
    }
    rank->signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    rank->code = rank->signal ? 128 + rank->signal : WEXITSTATUS(status);
    return true;
}

/* Also reports ranks that die of a signal after the first failure. */
static void reap(fsdp_supervisor *supervisor)
{
    bool had_failed = supervisor->first >= 0;
    for (int i = 0; i < supervisor->size; i++) {
        process *rank = &supervisor->ranks[i];
        if (rank->pid == 0 || rank->has_ended || !look_for_end(rank, i))
            continue;
        supervisor->running--;
        supervisor->has_failed = supervisor->has_failed || rank->code != 0;
        if (rank->code == 0 && supervisor->left < 0)
            supervisor->left = i;
        if (had_failed && rank->signal != 0 && !is_ours(supervisor, rank))
            report_end(rank, i);
    }
    read_notes(supervisor);
}

/* A lost peer may be seen first, because a crashing process closes its connections before it has
 * ended. It is reported only when no other failure shows up in time. */
static void judge(fsdp_supervisor *supervisor, int64_t now_ms)
{
    int first = supervisor->has_failed && supervisor->first < 0 ? find_first(supervisor) : -1;
    if (first < 0)
        return;
    const process *rank = &supervisor->ranks[first];
    if (!supervisor->is_ending)
        begin_to_end(supervisor, now_ms, NOTICE_MS);
    if ((rank->noted ? rank->noted : rank->code) != FSDP_ERR_PEER || supervisor->running == 0 ||
        now_ms >= supervisor->term_ms)
        settle_first(supervisor, first);
}

/* --- the loop --------------------------------------------------------------------------------- */

static void wait_for_signal(fsdp_supervisor *supervisor)
{
    int64_t next_ms =
        supervisor->term_ms < supervisor->kill_ms ? supervisor->term_ms : supervisor->kill_ms;
    int64_t left_ms = next_ms == INT64_MAX ? 1000 : fsdp_poll_ms(next_ms);
    struct timespec left = fsdp_timespec(left_ms);
    int number = sigtimedwait(&supervisor->waited, NULL, &left);
    if (number <= 0 || number == SIGCHLD)
        return;
    send_all(supervisor, number);
    if (number == SIGTSTP)
        (void)raise(SIGSTOP);
}

int fsdp_supervise(fsdp_supervisor *supervisor, bool is_failed)
{
    if (is_failed)
        begin_to_end(supervisor, fsdp_now_ms(), 0);
    while (supervisor->running > 0) {
        wait_for_signal(supervisor);
        reap(supervisor);
        int64_t now_ms = fsdp_now_ms(); /* the same for both: a rank is judged before it is ended */
        judge(supervisor, now_ms);
        end_in_time(supervisor, now_ms);
    }
    return supervisor->first_code;
}

/* === ranks as processes ======================================================================= */

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
    supervisor_leave(group->supervisor);
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
    group->job.failed = supervisor_note;
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
