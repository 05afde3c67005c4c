/* A control plane over socket pairs that were made before the ranks were forked, for tests of processes. */
#ifndef FSDP_CTL_PAIRS_H
#define FSDP_CTL_PAIRS_H

#include <fsdp/ctl.h>

enum { CTL_PAIRS_MOST = 8 };

/* ends[i * n + j]: rank i's end towards rank j. False when the sockets cannot be made. */
bool make_ctl_pairs(int n, int *ends_out);
void close_ctl_pairs(int n, const int *ends);
/* In rank's process: takes its ends and closes the others. */
fsdp_status take_ctl_pairs(int n, int rank, const int *ends, fsdp_ctl **ctl_out, fsdp_error *err);

#endif
