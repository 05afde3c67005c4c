/*
 * The transport over point-to-point messages, for the launcher. The implementation is described in
 * comm_message.h.
 */
#ifndef FSDP_MESSAGE_TRANSPORT_H
#define FSDP_MESSAGE_TRANSPORT_H

#include "runtime/comm/comm_backend.h"
#include "runtime/comm_message/p2p.h"

/* Collective over ctl, whose ranks p2p connects; takes p2p, also on failure. */
fsdp_status fsdp_transport_message(fsdp_ctl *ctl, fsdp_p2p *p2p, int deadline_ms,
                                   fsdp_transport **transport_out, fsdp_error *err);

#endif
