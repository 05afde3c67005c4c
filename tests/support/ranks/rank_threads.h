/* Ranks of a transport of threads, for tests: n threads, each with its transport and a group of all. */
#ifndef FSDP_RANK_THREADS_H
#define FSDP_RANK_THREADS_H

#include "runtime/comm/comm_backend.h"

typedef struct rank_thread {
    int rank, size;
    fsdp_transport *transport;
    fsdp_comm *comm;           /* of all ranks; the body may close it, and the transport, and set them NULL */
    void *user;
    fsdp_status status;        /* of the body */
    fsdp_error err;
} rank_thread;

typedef fsdp_status (*rank_thread_body)(rank_thread *rank, fsdp_error *err);

/* Connects ranks over TCP from now on, as if each were on a host of its own. */
void connect_rank_threads_over_tcp(void);

/* Runs body on n threads; results has capacity for n. False, with the reason in err, when no world could be
 * made. */
bool run_rank_threads(int n, int deadline_ms, rank_thread_body body, void *user, rank_thread *results,
                      fsdp_error *err);
/* run_rank_threads that returns the failure of the lowest failing rank. */
fsdp_status run_rank_threads_well(int n, rank_thread_body body, void *user, fsdp_error *err);

#endif
