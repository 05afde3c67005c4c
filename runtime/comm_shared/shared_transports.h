/* For the launcher: ranks that share memory tell apart who is stuck and who waits elsewhere. */
#ifndef FSDP_SHARED_WHERE_H
#define FSDP_SHARED_WHERE_H

#include "runtime/comm/comm_backend.h"

/* Of a fabric over shared memory (threads, shm): until it closes it sees what this rank calls over ctl, and
 * ctl what the ranks do in collectives. ctl outlives the fabric. */
void fsdp_shared_follow(fsdp_fabric *fabric, fsdp_ctl *ctl);

#endif
