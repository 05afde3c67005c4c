/* Signals, and the file RUN/STOP, that ask a training to save and end. See train.h. */
#include "tools/train/train.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

/* --- signals ------------------------------------------------------------------------------------- */

static volatile sig_atomic_t was_asked, interrupts;

static void note_signal(int number)
{
    was_asked = 1;
    if (number == SIGINT && interrupts++)
        _exit(128 + SIGINT); /* who asks twice does not wait for the save */
}

/* Unlike those of other tools, a second SIGTERM does not end the program: schedulers repeat it. A signal that
 * is ignored from the start (nohup, a job in the background) stays ignored. */
void train_catch_signals(void)
{
    static const int asking[] = {SIGINT, SIGTERM, SIGUSR1, SIGHUP};
    struct sigaction action = {.sa_handler = note_signal, .sa_flags = SA_RESTART}, before;
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < sizeof asking / sizeof *asking; i++)
        if (sigaction(asking[i], NULL, &before) == 0 && before.sa_handler != SIG_IGN)
            sigaction(asking[i], &action, NULL);
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
                     "'%s' is a directory: a file of this name stops a training; remove the "
                     "directory, and start again",
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
