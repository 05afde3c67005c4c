/* What other files of ours ask about a run's lease beyond commit.h, and how tests play other hosts. */
#ifndef FSDP_LEASE_INTERNAL_H
#define FSDP_LEASE_INTERNAL_H

#include "statedict/commit/commit.h"

/* Which process a lease belongs to. A pid alone says little: it is reused, and means something only
 * in its pid name space, on its host, until the host starts again. */
typedef struct fsdp_process {
    char host[256];
    char boot[64];
    char pid_space[64];
    int64_t pid;
    uint64_t start;            /* in clock ticks since the host started; 0: not known */
} fsdp_process;

/* The caller, as the system (or fsdp_lease_pretend) has it. */
void fsdp_process_self(fsdp_process *process_out);
/* Is it one of this host, start of the system and pid name space, so that its end would be seen? */
bool fsdp_process_is_here(const fsdp_process *process);
/* False when it is known to have ended: same host and start of the system, and no such process. */
bool fsdp_process_may_live(const fsdp_process *process);

/* True when a lease is there that could not be taken over now. */
bool fsdp_lease_is_held(fsdp_io *io, const char *run);

/* Frees the memory and leaves the file, as the end of a killed process does. */
void fsdp_lease_forget(fsdp_lease *lease);

/* For tests: who the caller is from now on (NULL: the truth), and seconds added to the clock. */
void fsdp_lease_pretend(const fsdp_process *self, int64_t clock_offset);
int64_t fsdp_lease_now(void);
/* For tests: how long fsdp_lease_await waits. */
void fsdp_lease_set_patience(int milliseconds);

#endif
