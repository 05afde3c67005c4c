/* Identifies a process across hosts and restarts, and finds out whether it lives: see process.h. */
#include "base/io/process.h"

#include "base/io/io.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

int64_t fsdp_host_now(const fsdp_host *host)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec + (host ? host->clock_offset : 0);
}

/* Reads a file of /proc, whose size is unknown before. It is on the local system, so no fsdp_io
 * is used. */
static bool read_system_file(const char *path, char *text_out, size_t room)
{
    fsdp_file *file;
    if (fsdp_io_open(fsdp_io_posix(), path, FSDP_IO_READ, &file, NULL) != FSDP_OK)
        return false;
    ssize_t n = file->ops->pread(file, text_out, room - 1, 0);
    (void)fsdp_io_close(&file, path, NULL);
    text_out[n > 0 ? n : 0] = '\0';
    return n > 0;
}

typedef struct process_state {
    char letter;
    long long threads;
    unsigned long long start;
} process_state;

/* Fields 3, 20 and 22 of /proc/PID/stat; the name before them may hold anything. */
static bool read_state(int64_t pid, process_state *state_out)
{
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%" PRId64 "/stat", pid);
    if (!read_system_file(path, text, sizeof text))
        return false;
    const char *at = strrchr(text, ')');
    return at && sscanf(at + 1,
                        " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %lld"
                        " %*s %llu",
                        &state_out->letter, &state_out->threads, &state_out->start) == 3;
}

static void read_boot(char *boot_out, size_t room)
{
    if (!read_system_file("/proc/sys/kernel/random/boot_id", boot_out, room))
        snprintf(boot_out, room, "unknown");
    boot_out[strcspn(boot_out, "\n")] = '\0';
}

void fsdp_process_self(const fsdp_host *host, fsdp_process *process_out)
{
    if (host && host->self) {
        *process_out = *host->self;
        return;
    }
    *process_out = (fsdp_process){.pid = getpid()};
    if (gethostname(process_out->host, sizeof process_out->host - 1) < 0)
        snprintf(process_out->host, sizeof process_out->host, "unknown");
    read_boot(process_out->boot, sizeof process_out->boot);
    ssize_t n =
        readlink("/proc/self/ns/pid", process_out->pid_space, sizeof process_out->pid_space - 1);
    if (n < 0)
        snprintf(process_out->pid_space, sizeof process_out->pid_space, "unknown");
    process_state state;
    process_out->start = read_state(getpid(), &state) ? state.start : 0;
}

static bool is_where(const fsdp_process *process, const fsdp_process *self)
{
    return strcmp(process->host, self->host) == 0 && strcmp(process->boot, self->boot) == 0 &&
           strcmp(process->pid_space, self->pid_space) == 0;
}

bool fsdp_process_is_here(const fsdp_host *host, const fsdp_process *process)
{
    fsdp_process self;
    fsdp_process_self(host, &self);
    return is_where(process, &self);
}

bool fsdp_process_may_live(const fsdp_host *host, const fsdp_process *process)
{
    fsdp_process self;
    fsdp_process_self(host, &self);
    if (!is_where(process, &self))
        return true;
    if (process->pid == self.pid && process->start == self.start)
        return true;
    process_state state;
    if (process->pid <= 0 || process->pid > INT32_MAX)
        return false;
    /* without a known start time: checks the pid only, which may have been reused */
    if (process->start == 0 || !read_state(getpid(), &state))
        return kill((pid_t)process->pid, 0) == 0 || errno == EPERM;
    if (!read_state(process->pid, &state))
        return false;
    /* a zombie: ended, its parent did not wait yet; with threads left only the main thread ended */
    bool ended = (state.letter == 'Z' && state.threads <= 1) || state.letter == 'X';
    return state.start == process->start && !ended;
}
