/*
 * How processes become ranks that know each other: rank 0 listens, the others come to it, say who they
 * are and get everybody's address. All within a deadline; whoever is missing is named.
 *
 * Every hello carries a digest of the job's id. Guests of another job are told so and do not disturb; what is
 * no hello is turned away. A rank that comes twice, or counts the ranks differently, ends the meeting for
 * all, with the same error.
 */
#ifndef FSDP_RENDEZVOUS_H
#define FSDP_RENDEZVOUS_H

#include "runtime/bootstrap/socket.h"
#include <fsdp/ctl.h>

typedef struct fsdp_rendezvous_spec {
    int rank, size;
    const char *job;           /* text that is this job's alone */
    bool is_one_host;          /* all ranks here: only this host can connect */
    int deadline_ms;
    /* Rank 0: where it listens. */
    int listener;              /* one that is there already, owned from now on; -1: none */
    int port;                  /* else the port; 0: any free one */
    fsdp_status (*publish)(void *user, int port, int64_t until_ms, fsdp_error *err);   /* NULL: others know */
    /* The others: where rank 0 listens. Asked again before each try. */
    fsdp_status (*find)(void *user, char host_out[FSDP_HOST_SIZE], int *port_out, int64_t until_ms,
                        fsdp_error *err);
    void *user;
} fsdp_rendezvous_spec;

/* Collective over the ranks to be. */
fsdp_status fsdp_rendezvous(const fsdp_rendezvous_spec *spec, fsdp_ctl **ctl_out, fsdp_error *err);

#endif
