/* Has another process of this host ended? Watched without being its parent. */
#ifndef FSDP_PROCESS_WATCH_H
#define FSDP_PROCESS_WATCH_H

#include <fsdp/ctl.h>

typedef struct fsdp_process_watch {
    int fd;                    /* readable when the process has ended; -1: cannot be watched */
    int pid;                   /* in our numbers; 0: not known */
} fsdp_process_watch;

/* FSDP_ERR_PEER: it has died already. A process that is not in our space of process numbers, or on an old
 * kernel, cannot be watched. */
fsdp_status fsdp_process_watch_open(int pid, int rank, fsdp_process_watch *watch, fsdp_error *err);
bool fsdp_process_watch_has_ended(const fsdp_process_watch *watch);
void fsdp_process_watch_close(fsdp_process_watch *watch);

/* Collective over ctl: those of all ranks that share process numbers with this one; `lines` has one for
 * each rank. */
fsdp_status fsdp_process_watch_all(fsdp_ctl *ctl, fsdp_process_watch *lines, fsdp_error *err);

#endif
