/* Signals, and the file RUN/STOP, that ask a training to save and end. See train.h. */
#include "tools/train/train.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* --- signals ------------------------------------------------------------------------------------- */

enum { REPEATED_MS = 1000, STEPS_OF_PATIENCE = 4 };

static volatile sig_atomic_t was_asked, interrupts, asked_by;
static atomic_bool is_rank, speaks, is_over; /* this process has ranks, has rank 0, has saved */
static atomic_llong asked_ms;
static atomic_int shields; /* works of this process that take their time, and end by themselves */
static atomic_uint patience_s;

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* For the handler: nothing but _exit ends a step that does not come to its end. */
static void end_now(int number)
{
    static const char text[] = "error: stopped by a signal in a step that did not end in time; the "
                               "checkpoints that were saved stay\n";
    if (speaks)
        (void)!write(STDERR_FILENO, text, sizeof text - 1);
    _exit(128 + number);
}

/* Schedulers repeat a signal at once; a person who repeats it does not wait for the step. */
static void note_again(int number)
{
    if (number == SIGINT && interrupts++)
        _exit(128 + SIGINT); /* who asks twice does not wait for the save */
    if (is_rank && !is_over && atomic_load(&shields) == 0 &&
        now_ms() - atomic_load(&asked_ms) >= REPEATED_MS)
        end_now(number);
}

static void note_signal(int number)
{
    const int before = errno;
    if (was_asked) {
        note_again(number);
    } else {
        interrupts += number == SIGINT;
        asked_by = number;
        atomic_store(&asked_ms, now_ms());
        was_asked = 1;
        if (is_rank)
            (void)alarm(atomic_load(&patience_s));
    }
    errno = before;
}

static void note_deadline(int number)
{
    (void)number;
    if (is_over)
        return;
    if (atomic_load(&shields) > 0)
        (void)alarm(atomic_load(&patience_s));
    else
        end_now(asked_by);
}

static void catch_signal(int number, void (*handler)(int))
{
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART}, before;
    sigfillset(&action.sa_mask);
    if (sigaction(number, NULL, &before) == 0 && before.sa_handler != SIG_IGN)
        sigaction(number, &action, NULL);
}

/* A signal that is ignored from the start (nohup, a job in the background) stays ignored. */
void train_catch_signals(double deadline)
{
    atomic_store(&patience_s, (unsigned)ceil(deadline));
    catch_signal(SIGALRM, note_deadline);
    catch_signal(SIGINT, note_signal);
    catch_signal(SIGTERM, note_signal);
    catch_signal(SIGUSR1, note_signal);
    catch_signal(SIGHUP, note_signal);
}

/* The supervisor of --np has the handlers, too, and only passes signals on. */
void train_signals_begin(bool is_first)
{
    if (is_first)
        atomic_store(&speaks, true);
    atomic_store(&is_rank, true);
    if (was_asked)
        (void)alarm(atomic_load(&patience_s));
}

void train_signals_end(void)
{
    atomic_store(&is_over, true);
    (void)alarm(0);
}

void train_signals_shield(bool is_begin)
{
    atomic_fetch_add(&shields, is_begin ? 1 : -1);
}

void train_signals_step(double seconds)
{
    const double patience = ceil(STEPS_OF_PATIENCE * seconds);
    if (patience > atomic_load(&patience_s) && patience < INT_MAX)
        atomic_store(&patience_s, (unsigned)patience);
}

bool train_was_signalled(void)
{
    return was_asked != 0;
}

/* --- the file ------------------------------------------------------------------------------------ */

/* Whether something of this name is there, and what. A path that is too long names nothing. */
static bool find_stop_file(const char *run, char path[PATH_MAX], struct stat *info)
{
    return snprintf(path, PATH_MAX, "%s/STOP", run) < PATH_MAX && lstat(path, info) == 0;
}

bool train_stop_file_is_there(const char *run)
{
    char path[PATH_MAX];
    struct stat info;
    return find_stop_file(run, path, &info);
}

fsdp_status train_stop_file_check(const char *run, fsdp_error *err)
{
    char path[PATH_MAX];
    struct stat info;
    if (!find_stop_file(run, path, &info) || !S_ISDIR(info.st_mode))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_EXISTS,
                     "'%s' is a directory, but a file of this name stops a training; remove the "
                     "directory and start again",
                     path);
}

fsdp_status train_stop_file_take(const char *run, bool *was_there_out, fsdp_error *err)
{
    char path[PATH_MAX];
    struct stat info;
    *was_there_out = find_stop_file(run, path, &info);
    if (!*was_there_out)
        return FSDP_OK;
    FSDP_TRY(train_stop_file_check(run, err));
    return unlink(path) == 0 ? FSDP_OK : fsdp_fail_errno(err, errno, "cannot remove '%s'", path);
}
