/*
 * Identity of processes across hosts and restarts: a lease, a marker or a peer names the process that made
 * it, which may have ended since. fsdp_io.host is the process and the clock of the code that uses an io.
 */
#ifndef FSDP_PROCESS_H
#define FSDP_PROCESS_H

#include "base/io/io.h"

/* A pid is not enough: it is reused, and is valid only in its pid name space, on its host, until the host
 * restarts. */
typedef struct fsdp_process {
    char host[256];
    char boot[64];
    char pid_space[64];
    int64_t pid;
    uint64_t start;            /* in clock ticks since the host started; 0: unknown */
} fsdp_process;

/* Tests simulate other hosts, later times and short waits with it. All zero is the same as NULL. */
struct fsdp_host {
    const fsdp_process *self;  /* NULL: the calling process */
    int64_t clock_offset;      /* seconds that are added to the system's clock */
    int lease_wait_ms;         /* how long a save waits for the lease of its run; 0: FSDP_LEASE_WAIT_MS */
};

void fsdp_process_self(const fsdp_host *host, fsdp_process *process_out);
/* True when it runs on this host since the same boot in the same pid name space: its end is then visible. */
bool fsdp_process_is_here(const fsdp_host *host, const fsdp_process *process);
/* False when it has certainly ended: same host and boot, and no such process. */
bool fsdp_process_may_live(const fsdp_host *host, const fsdp_process *process);

/* In seconds since 1970. */
int64_t fsdp_host_now(const fsdp_host *host);

#endif
