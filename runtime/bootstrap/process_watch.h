/* Has another process of this host ended? Watched without being its parent. */
#ifndef FSDP_LIFELINE_H
#define FSDP_LIFELINE_H

#include <fsdp/ctl.h>

typedef struct fsdp_lifeline {
    int fd;                    /* readable when the process has ended; -1: cannot be watched */
    int pid;                   /* in our numbers; 0: not known */
} fsdp_lifeline;

/* FSDP_ERR_PEER: it has died already. A process that is not in our space of process numbers, or on an old
 * kernel, cannot be watched. */
fsdp_status fsdp_lifeline_open(int pid, int rank, fsdp_lifeline *line, fsdp_error *err);
bool fsdp_lifeline_has_ended(const fsdp_lifeline *line);
void fsdp_lifeline_close(fsdp_lifeline *line);

/* Collective over ctl: those of all ranks that share process numbers with this one; `lines` has one for
 * each rank. */
fsdp_status fsdp_lifelines_open(fsdp_ctl *ctl, fsdp_lifeline *lines, fsdp_error *err);

#endif
