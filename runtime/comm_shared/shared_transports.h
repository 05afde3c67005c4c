/*
 * Transports over shared memory, for the launcher: ranks that are threads of this process, or processes of
 * one host. The implementation is described in comm_shared.h.
 */
#ifndef FSDP_SHARED_TRANSPORTS_H
#define FSDP_SHARED_TRANSPORTS_H

#include "runtime/comm/comm_backend.h"

/* n connected ranks for n threads of this process. */
fsdp_status fsdp_transport_threads(int n, int deadline_ms, fsdp_transport **transports_out, fsdp_error *err);
/* Collective over ctl, whose ranks are all processes of this host. */
fsdp_status fsdp_transport_shm(fsdp_ctl *ctl, int deadline_ms, fsdp_transport **transport_out,
                               fsdp_error *err);

/* For a transport of this header. Until it closes, it records this rank's calls over ctl, and ctl can ask it
 * which collective another rank waits in, so that errors tell a stuck rank from one that waits elsewhere.
 * ctl outlives the transport. */
void fsdp_shared_observe(fsdp_transport *transport, fsdp_ctl *ctl);

#endif
