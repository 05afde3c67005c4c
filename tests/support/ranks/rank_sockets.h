/* Ranks that are threads connected over TCP, for tests. */
#ifndef FSDP_RANK_SOCKETS_H
#define FSDP_RANK_SOCKETS_H

#include <fsdp/ctl.h>

/* As fsdp_ctl_run_threads, after a rendezvous on the loopback interface. */
fsdp_status run_rank_sockets(int n, int deadline_ms, fsdp_rank_body body, void *user, fsdp_error *err);

#endif
