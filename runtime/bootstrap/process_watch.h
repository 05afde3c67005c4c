/* Watches whether other processes of this host have ended, without being their parent. */
#ifndef FSDP_PROCESS_WATCH_H
#define FSDP_PROCESS_WATCH_H

#include <fsdp/ctl.h>

typedef struct fsdp_process_watch {
    int fd;                    /* readable when the process has ended; -1: cannot be watched */
    int pid;                   /* in this process's PID namespace; 0: not known */
} fsdp_process_watch;

/* FSDP_ERR_PEER: the process has died already. A process of another PID namespace, or on an old kernel,
 * cannot be watched: its fd is -1. */
fsdp_status fsdp_process_watch_open(int pid, int rank, fsdp_process_watch *watch, fsdp_error *err);
bool fsdp_process_watch_has_ended(const fsdp_process_watch *watch);
void fsdp_process_watch_close(fsdp_process_watch *watch);

/* Collective over ctl. Watches all ranks of this PID namespace; `watches` has capacity for one per rank. */
fsdp_status fsdp_process_watch_all(fsdp_ctl *ctl, fsdp_process_watch *watches, fsdp_error *err);

#endif
