/* Watches processes through their pidfds. See process_watch.h. */
#include "runtime/bootstrap/process_watch.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/core/mem.h"
#include "base/io/process.h"

fsdp_status fsdp_process_watch_open(int pid, int rank, fsdp_process_watch *watch, fsdp_error *err)
{
    *watch = (fsdp_process_watch){-1, pid};
    if (pid <= 0)
        return FSDP_OK;
    watch->fd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (watch->fd >= 0 || errno == ENOSYS || errno == EPERM)
        return FSDP_OK;
    if (errno == ESRCH)
        return fsdp_fail(err, FSDP_ERR_PEER, "rank %d (process %d) died", rank, pid);
    return fsdp_fail_errno(err, errno, "cannot watch process %d of rank %d%s", pid, rank,
                           errno == EMFILE
                               ? ": each rank has a file open for each other one of its "
                                 "host; raise `ulimit -n`"
                               : "");
}

bool fsdp_process_watch_has_ended(const fsdp_process_watch *watch)
{
    struct pollfd look = {.fd = watch->fd, .events = POLLIN};
    return watch->fd >= 0 && poll(&look, 1, 0) > 0;
}

void fsdp_process_watch_close(fsdp_process_watch *watch)
{
    if (watch->fd >= 0)
        close(watch->fd);
    watch->fd = -1;
}

/* --- all ranks -------------------------------------------------------------------------------- */

/* True when a process number means the same process to both. */
static bool are_near(const fsdp_process *a, const fsdp_process *b)
{
    return strcmp(a->boot, "unknown") != 0 && strcmp(a->boot, b->boot) == 0 &&
           strcmp(a->pid_space, "unknown") != 0 && strcmp(a->pid_space, b->pid_space) == 0;
}

fsdp_status fsdp_process_watch_all(fsdp_ctl *ctl, fsdp_process_watch *watches, fsdp_error *err)
{
    int size = fsdp_ctl_size(ctl), rank = fsdp_ctl_rank(ctl);
    fsdp_process self, *all = fsdp_alloc((size_t)size, sizeof *all);
    fsdp_process_self(NULL, &self);
    for (int i = 0; i < size; i++)
        watches[i] = (fsdp_process_watch){-1, 0};
    fsdp_status status = all ? FSDP_OK : fsdp_fail_memory(err, "where the other ranks are");
    status = fsdp_ctl_agree(ctl, status, err);
    if (status == FSDP_OK)
        status = fsdp_ctl_allgather(ctl, &self, sizeof self, all, err);
    for (int i = 0; i < size && status == FSDP_OK; i++) {
        if (i != rank && are_near(&self, &all[i]))
            status = fsdp_process_watch_open((int)all[i].pid, i, &watches[i], err);
    }
    fsdp_free(all);
    return status;
}
