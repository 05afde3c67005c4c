/* Messages of collectives over TCP. See p2p.h. */
#ifndef FSDP_P2P_TCP_H
#define FSDP_P2P_TCP_H

#include "runtime/comm_message/p2p.h"
#include <fsdp/ctl.h>

/* Collective over ctl, which is one of ctl_tcp.h: every rank is connected with every other one. */
fsdp_status fsdp_p2p_tcp(fsdp_ctl *ctl, int deadline_ms, fsdp_p2p **p2p_out, fsdp_error *err);

#endif
