/* The lease of a run beyond commit.h: processes and their identity, for commit/ and run/, and for tests. */
#ifndef FSDP_LEASE_INTERNAL_H
#define FSDP_LEASE_INTERNAL_H

#include "statedict/commit/commit.h"

/* Identifies the process that holds a lease. A pid is not enough: it is reused, and is valid only in its pid
 * name space, on its host, until the host restarts. */
typedef struct fsdp_process {
    char host[256];
    char boot[64];
    char pid_space[64];
    int64_t pid;
    uint64_t start;            /* in clock ticks since the host started; 0: unknown */
} fsdp_process;

/* The calling process, or the one that fsdp_lease_pretend set. */
void fsdp_process_self(fsdp_process *process_out);
/* True when it runs on this host since the same boot in the same pid name space: its end is then visible. */
bool fsdp_process_is_here(const fsdp_process *process);
/* False when it has certainly ended: same host and boot, and no such process. */
bool fsdp_process_may_live(const fsdp_process *process);

/* True when there is a lease that cannot be taken over now. */
bool fsdp_lease_is_held(fsdp_io *io, const char *run);

/* Frees the memory and leaves the file, as a killed process does. */
void fsdp_lease_forget(fsdp_lease *lease);

/* For tests: sets the identity of the calling process (NULL: the real one) and seconds added to the clock. */
void fsdp_lease_pretend(const fsdp_process *self, int64_t clock_offset);
int64_t fsdp_lease_now(void);
/* For tests: sets the time that fsdp_lease_await waits. */
void fsdp_lease_set_patience(int milliseconds);

#endif
