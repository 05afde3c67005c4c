/* See rank_sockets.h. */
#include "tests/support/ranks/rank_sockets.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "runtime/bootstrap/rendezvous.h"
#include "tests/support/ranks/rank_outcome.h"

typedef struct socket_rank {
    int rank, size, port, listener, deadline_ms;
    fsdp_rank_body body;
    void *user;
    rank_outcome *outcome;
    pthread_t thread;
} socket_rank;

static fsdp_status find(void *user, char host_out[FSDP_HOST_SIZE], int *port_out, int64_t until_ms,
                        fsdp_error *err)
{
    const socket_rank *rank = user;
    (void)until_ms;
    (void)err;
    snprintf(host_out, FSDP_HOST_SIZE, "%s", FSDP_LOOPBACK);
    *port_out = rank->port;
    return FSDP_OK;
}

static void *run_rank(void *user)
{
    socket_rank *rank = user;
    rank_outcome *outcome = rank->outcome;
    fsdp_ctl *ctl = NULL;
    const fsdp_rendezvous_spec spec = {.rank = rank->rank,
                                       .size = rank->size,
                                       .job = "test",
                                       .is_one_host = true,
                                       .deadline_ms = rank->deadline_ms,
                                       .listener = rank->rank == 0 ? rank->listener : -1,
                                       .find = find,
                                       .context = rank};
    outcome->status = fsdp_rendezvous(&spec, &ctl, &outcome->err);
    if (outcome->status == FSDP_OK) {
        fsdp_ctl_set_deadline(ctl, rank->deadline_ms);
        outcome->status = rank->body(rank->user, ctl, &outcome->err);
    }
    fsdp_ctl_free(ctl);
    return NULL;
}

fsdp_status run_rank_sockets(int n, int deadline_ms, fsdp_rank_body body, void *user,
                             fsdp_error *err)
{
    int listener;
    FSDP_TRY(fsdp_socket_listen(FSDP_LOOPBACK, 0, &listener, err));
    int port = fsdp_socket_port(listener);
    socket_rank *ranks = calloc((size_t)n, sizeof *ranks);
    rank_outcome *outcomes = calloc((size_t)n, sizeof *outcomes);
    if (!ranks || !outcomes)
        abort();
    for (int i = 0; i < n; i++) {
        ranks[i] = (socket_rank){.rank = i,
                                 .size = n,
                                 .port = port,
                                 .listener = listener,
                                 .deadline_ms = deadline_ms,
                                 .body = body,
                                 .user = user,
                                 .outcome = &outcomes[i]};
        if (pthread_create(&ranks[i].thread, NULL, run_rank, &ranks[i]) != 0)
            abort();
    }
    for (int i = 0; i < n; i++)
        pthread_join(ranks[i].thread, NULL);
    fsdp_status status = first_failure(outcomes, n, err);
    free(outcomes);
    free(ranks);
    return status;
}
