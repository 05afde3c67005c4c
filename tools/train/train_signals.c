/* Signals that ask a training to save and end. See train.h. */
#include "tools/train/train.h"

#include <signal.h>
#include <unistd.h>

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
