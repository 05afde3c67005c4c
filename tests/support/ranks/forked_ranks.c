/* See forked_ranks.h. */
#include "tests/support/ranks/forked_ranks.h"

#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/rounds/ctl_pairs.h"

static void stop(const char *what)
{
    perror(what);
    exit(99);
}

void *share_memory(size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        stop("memory of several processes");
    return memory;
}

int count_open_files(void)
{
    int n = 0;
    DIR *all = opendir("/proc/self/fd");
    while (all && readdir(all))
        n++;
    if (all)
        closedir(all);
    return n;
}

int count_files_without_ends(int n)
{
    return count_open_files() - n * (n - 1);
}

void fork_ranks(int n, forked_rank run, const void *user, pid_t *pids_out)
{
    int ends[FORKED_RANKS_MOST * FORKED_RANKS_MOST];
    if (!make_ctl_pairs(n, ends))
        stop("a world of processes");
    fflush(NULL);
    for (int i = 0; i < n; i++) {
        pids_out[i] = fork();
        if (pids_out[i] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            run(i, ends, user);
            exit(0); /* not _exit: runs the check for leaks */
        }
        if (pids_out[i] < 0)
            stop("fork");
    }
    close_ctl_pairs(n, ends);
}

int wait_for_rank(pid_t pid)
{
    int how;
    if (waitpid(pid, &how, 0) < 0)
        stop("waitpid");
    return how;
}
