/* See rank_threads.h. */
#include "tests/support/ranks/rank_threads.h"

#include <pthread.h>
#include <stdlib.h>

#include "runtime/comm_message/message_transport.h"
#include "runtime/comm_message/p2p_tcp.h"
#include "runtime/comm_shared/shared_transports.h"
#include "tests/support/ranks/rank_sockets.h"

enum { MAX_RANKS = 256, DEADLINE_MS = 60000 };

static bool is_over_tcp;

void connect_rank_threads_over_tcp(void)
{
    is_over_tcp = true;
}

typedef struct rank_start {
    rank_thread *rank;
    rank_thread_body body;
    pthread_t thread;
} rank_start;

static void *run_rank(void *user)
{
    rank_start *start = user;
    rank_thread *rank = start->rank;
    int all[MAX_RANKS];
    for (int i = 0; i < rank->size; i++)
        all[i] = i;
    rank->status = rank->transport->ops->comm_create(rank->transport, all, rank->size, 1,
                                                     &rank->comm, &rank->err);
    if (rank->status == FSDP_OK)
        rank->status = start->body(rank, &rank->err);
    fsdp_comm_free(rank->comm);
    if (rank->transport)
        rank->transport->ops->close(rank->transport);
    return NULL;
}

/* Shared by all ranks over TCP. */
typedef struct tcp_world {
    rank_thread *results;
    rank_thread_body body;
    int deadline_ms;
    void *user;
} tcp_world;

static fsdp_status run_tcp_rank(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    const tcp_world *world = user;
    int number = fsdp_ctl_rank(ctl), size = fsdp_ctl_size(ctl);
    rank_thread *rank = &world->results[number];
    rank_start start = {.rank = rank, .body = world->body};
    fsdp_p2p *p2p = NULL;
    *rank = (rank_thread){.rank = number, .size = size, .user = world->user};
    FSDP_TRY(fsdp_p2p_tcp(ctl, world->deadline_ms, &p2p, err));
    FSDP_TRY(fsdp_transport_message(ctl, p2p, world->deadline_ms, &rank->transport, err));
    run_rank(&start);
    return FSDP_OK; /* its own failure is one of the results */
}

bool run_rank_threads(int n, int deadline_ms, rank_thread_body body, void *user,
                      rank_thread *results, fsdp_error *err)
{
    fsdp_transport *transports[MAX_RANKS];
    rank_start starts[MAX_RANKS];
    if (is_over_tcp) {
        tcp_world world = {results, body, deadline_ms, user};
        return run_rank_sockets(n, deadline_ms, run_tcp_rank, &world, err) == FSDP_OK;
    }
    if (fsdp_transport_threads(n, deadline_ms, transports, err) != FSDP_OK)
        return false;
    for (int i = 0; i < n; i++) {
        results[i] = (rank_thread){.rank = i, .size = n, .transport = transports[i], .user = user};
        starts[i] = (rank_start){.rank = &results[i], .body = body};
        if (pthread_create(&starts[i].thread, NULL, run_rank, &starts[i]) != 0)
            abort();
    }
    for (int i = 0; i < n; i++)
        pthread_join(starts[i].thread, NULL);
    return true;
}

fsdp_status run_rank_threads_well(int n, rank_thread_body body, void *user, fsdp_error *err)
{
    rank_thread *results = calloc((size_t)n, sizeof *results);
    fsdp_status status = FSDP_OK;
    if (!run_rank_threads(n, DEADLINE_MS, body, user, results, err))
        status = err->status;
    for (int i = 0; status == FSDP_OK && i < n; i++) {
        status = results[i].status;
        if (status != FSDP_OK)
            *err = results[i].err;
    }
    free(results);
    return status;
}
