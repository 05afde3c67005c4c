/*
 * Each check of gpu-check runs in a process of its own, which adds its rows to memory that all
 * share: a kernel that faults ends CUDA in its process, and one that hangs is ended with it.
 * Nothing is reset, since the driver takes back what a process had. See gpu_check.h.
 */
#include "tests/gpu_check/gpu_check.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/core/clock.h"

enum { POLL_US = 2000, KILLED = 128 };

gpu_results *gpu_results_create(void)
{
    void *data =
        mmap(NULL, sizeof(gpu_results), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return data == MAP_FAILED ? NULL : data;
}

/* --- signals ---------------------------------------------------------------------------------- */

static volatile sig_atomic_t stopped;

static void stop(int number)
{
    (void)number;
    stopped = 1;
}

static void set_handlers(void (*handler)(int))
{
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        (void)sigaction(numbers[i], &(struct sigaction){.sa_handler = handler}, NULL);
}

void gpu_catch_signals(void)
{
    set_handlers(stop);
}

bool gpu_stopped(void)
{
    return stopped != 0;
}

/* --- processes -------------------------------------------------------------------------------- */

/* The row that a process was at, which did not say by itself how it ended. */
static gpu_row *last_row(gpu_results *results, const gpu_check *check, int before)
{
    return results->count > before ? &results->rows[results->count - 1]
                                   : gpu_add_row(results, "%s", check->name);
}

/* The first process may be killed: its children go with it. */
static void die_with_parent(void)
{
    pid_t parent = getppid();
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != parent)
        _exit(KILLED);
}

_Noreturn static void run_body(gpu_results *results, const gpu_check *check)
{
    fsdp_error err = {0};
    int before = results->count;
    set_handlers(SIG_DFL);
    die_with_parent();
    fsdp_status status = check->body(results, check->argument, &err);
    if (status != FSDP_OK)
        gpu_end_row(last_row(results, check, before), status, &err);
    fflush(stdout);
    _exit(0); /* CUDA's own end of the process may hang after a fault */
}

/* False: it did not end in time, or a signal came, and it was killed. */
static bool wait_for(pid_t child, double seconds, int *state_out)
{
    int64_t end = fsdp_now_ms() + (int64_t)(seconds * 1e3);
    pid_t ended;
    while ((ended = waitpid(child, state_out, WNOHANG)) == 0 && fsdp_now_ms() < end && !stopped)
        usleep(POLL_US);
    if (ended == child)
        return true;
    kill(child, SIGKILL);
    (void)waitpid(child, state_out, 0);
    return false;
}

static void note_end(gpu_results *results, const gpu_check *check, int before, int state)
{
    if (WIFSIGNALED(state))
        gpu_fail_row(last_row(results, check, before), "ended by signal %d (%s)", WTERMSIG(state),
                     strsignal(WTERMSIG(state)));
    else if (WEXITSTATUS(state) != 0)
        gpu_fail_row(last_row(results, check, before), "ended with exit code %d",
                     WEXITSTATUS(state));
}

static void await(gpu_results *results, const gpu_check *check, int before, pid_t child,
                  double seconds)
{
    int state = 0;
    if (wait_for(child, seconds, &state))
        note_end(results, check, before, state);
    else if (stopped)
        gpu_fail_row(last_row(results, check, before), "stopped by a signal");
    else
        gpu_fail_row(last_row(results, check, before), "did not end within %.0f s", seconds);
}

void gpu_run_check(gpu_results *results, const gpu_check *check, double seconds)
{
    int before = results->count;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0)
        run_body(results, check);
    if (child < 0)
        gpu_fail_row(gpu_add_row(results, "%s", check->name), "no process: %s", strerror(errno));
    else
        await(results, check, before, child, seconds);
    for (int i = before; i < results->count; i++)
        gpu_print_row(&results->rows[i]);
}

/* --- programs --------------------------------------------------------------------------------- */

_Noreturn static void become(char *const *argv, const char *output)
{
    int file = open(output, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    die_with_parent();
    if (file >= 0 && dup2(file, STDOUT_FILENO) >= 0 && dup2(file, STDERR_FILENO) >= 0)
        execv(argv[0], argv);
    _exit(KILLED);
}

fsdp_status gpu_run_program(char *const *argv, const char *output, double seconds, int *exit_out,
                            fsdp_error *err)
{
    int state = 0;
    if (access(argv[0], X_OK) != 0)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "'%s' is not there", argv[0]);
    pid_t child = fork();
    if (child == 0)
        become(argv, output);
    if (child < 0)
        return fsdp_fail_errno(err, errno, "cannot run '%s'", argv[0]);
    if (!wait_for(child, seconds, &state))
        return stopped ? fsdp_fail(err, FSDP_ERR_CANCELLED, "stopped by a signal")
                       : fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' did not end within %.0f s",
                                   argv[0], seconds);
    *exit_out = WIFEXITED(state) ? WEXITSTATUS(state) : KILLED + WTERMSIG(state);
    return FSDP_OK;
}
