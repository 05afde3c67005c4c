/* Ranks that are processes of this host, connected by shared memory, for tests. */
#ifndef FSDP_RANK_PROCESSES_H
#define FSDP_RANK_PROCESSES_H

#include "runtime/comm/comm_backend.h"
#include "tests/support/ranks/forked_ranks.h"

enum { RANK_PROCESSES_MOST = FORKED_RANKS_MOST };

/* The result of a rank, in memory shared with the parent. */
typedef struct rank_result {
    fsdp_status status;        /* of its body, or of what came before it */
    bool is_connected;         /* it reached its body */
    bool is_done;              /* it ended by itself */
    int fds_left;              /* more open files at the end than at the start */
    fsdp_error err;
} rank_result;

typedef struct rank_process {
    int rank, size;
    fsdp_ctl *ctl;
    fsdp_transport *transport;
    fsdp_comm *comm;           /* of all ranks; the body may free it and set it NULL */
    void *user;
    rank_result *result;
} rank_process;

typedef fsdp_status (*rank_process_body)(rank_process *rank, fsdp_error *err);

typedef struct rank_processes {
    int size, deadline_ms;
    void (*before)(int rank, void *user);      /* in each process, before it connects; may be NULL */
    rank_process_body body;
    void *user;
    pid_t pids[RANK_PROCESSES_MOST];
    rank_result *results;
} rank_processes;

/* Start forks; finish waits, passes the results on and frees them. Both end the test program on failure. */
void start_rank_processes(rank_processes *ranks);
void finish_rank_processes(rank_processes *ranks, rank_result *results_out);
void run_rank_processes(rank_processes *ranks, rank_result *results_out);

#endif
