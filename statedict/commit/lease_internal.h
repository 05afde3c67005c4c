/* The lease of a run beyond commit.h, for commit/ and run/, and for tests. */
#ifndef FSDP_LEASE_INTERNAL_H
#define FSDP_LEASE_INTERNAL_H

#include "statedict/commit/commit.h"

/* True when there is a lease that cannot be taken over now. */
bool fsdp_lease_is_held(fsdp_io *io, const char *run);

/* Frees the memory and leaves the file, as a killed process does. */
void fsdp_lease_forget(fsdp_lease *lease);

#endif
