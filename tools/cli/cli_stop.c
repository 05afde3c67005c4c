/* Signals that ask a tool to stop. See cli.h. */
#include "tools/cli/cli.h"

#include <signal.h>

static volatile sig_atomic_t stop_signal;

static void note_signal(int number)
{
    stop_signal = number;
}

/* The first signal requests a stop, a second one ends the program at once. A signal that is
 * ignored from the start (nohup, a job in the background) stays ignored. */
void cli_catch_signals(void)
{
    static const int asking[] = {SIGINT, SIGTERM, SIGHUP};
    struct sigaction action = {.sa_handler = note_signal, .sa_flags = (int)SA_RESETHAND}, before;
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < sizeof asking / sizeof *asking; i++)
        if (sigaction(asking[i], NULL, &before) == 0 && before.sa_handler != SIG_IGN)
            sigaction(asking[i], &action, NULL);
    signal(SIGXFSZ, SIG_IGN); /* a write beyond the limit is an error like any other */
    signal(SIGPIPE, SIG_IGN);
}

int cli_stopped(void)
{
    return stop_signal;
}

fsdp_status cli_check_stop(fsdp_error *err)
{
    return stop_signal ? fsdp_fail(err, FSDP_ERR_CANCELLED, "stopped") : FSDP_OK;
}
