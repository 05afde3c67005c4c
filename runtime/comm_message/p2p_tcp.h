/* Messages of collectives over TCP. See wire.h. */
#ifndef FSDP_WIRE_TCP_H
#define FSDP_WIRE_TCP_H

#include "runtime/comm_message/p2p.h"
#include <fsdp/ctl.h>

/* Collective over ctl, which is one of ctl_tcp.h: every rank is connected with every other one. */
fsdp_status fsdp_wire_tcp(fsdp_ctl *ctl, int deadline_ms, fsdp_wire **wire_out, fsdp_error *err);

#endif
