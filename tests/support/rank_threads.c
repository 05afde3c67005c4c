/* See rank_threads.h. */
#include "tests/support/rank_threads.h"

#include <pthread.h>
#include <stdlib.h>

enum { MAX_RANKS = 256, DEADLINE_MS = 60000 };

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
    rank->status =
        rank->fabric->ops->comm_create(rank->fabric, all, rank->size, &rank->comm, &rank->err);
    if (rank->status == FSDP_OK)
        rank->status = start->body(rank, &rank->err);
    fsdp_comm_free(rank->comm);
    if (rank->fabric)
        rank->fabric->ops->close(rank->fabric);
    return NULL;
}

bool run_rank_threads(int n, int deadline_ms, rank_thread_body body, void *user,
                      rank_thread *results, fsdp_error *err)
{
    fsdp_fabric *fabrics[MAX_RANKS];
    rank_start starts[MAX_RANKS];
    if (fsdp_fabric_threads(n, deadline_ms, fabrics, err) != FSDP_OK)
        return false;
    for (int i = 0; i < n; i++) {
        results[i] = (rank_thread){.rank = i, .size = n, .fabric = fabrics[i], .user = user};
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
