/*
 * Ranks connected over TCP, one of which runs out of memory at some moment: the failing rank
 * reports why, and no rank waits for it. Address sanitizers find leaks.
 */
#include <stdio.h>

#include "base/core/mem.h"
#include "runtime/comm_message/message_transport.h"
#include "runtime/comm_message/p2p_tcp.h"
#include "tests/support/rounds/comm_rounds.h"
#include "tests/support/ranks/rank_sockets.h"

enum { RANKS = 3, DEADLINE_MS = 20000, MOST = 300, LEAST = 20 };

/* Ranks are threads, and the first one to allocate after `after` allocations fails. */
typedef struct shortage {
    int after;
    _Atomic int well;
} shortage;

static fsdp_status exchange(fsdp_transport *transport, fsdp_error *err)
{
    static const int all[RANKS] = {0, 1, 2};
    const comm_case test = {.kind = FSDP_ALL_TO_ALL,
                            .dtype = FSDP_F32,
                            .count = 1000,
                            .buffers = COMM_PRIVATE,
                            .seed = 3};
    fsdp_comm *comm = NULL;
    FSDP_TRY(transport->ops->comm_create(transport, all, RANKS, 1, &comm, err));
    fsdp_status status = run_comm_case(comm, &test, err);
    fsdp_comm_free(comm);
    return status;
}

static fsdp_status connect_and_exchange(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    shortage *now = user;
    fsdp_p2p *p2p = NULL;
    fsdp_transport *transport = NULL;
    FSDP_TRY(fsdp_ctl_barrier(ctl, err));
    if (fsdp_ctl_rank(ctl) == 0)
        (void)fsdp_mem_fail_after(now->after, false);
    FSDP_TRY(fsdp_ctl_barrier(ctl, err));
    FSDP_TRY(fsdp_p2p_tcp(ctl, DEADLINE_MS, &p2p, err));
    FSDP_TRY(fsdp_transport_message(ctl, p2p, DEADLINE_MS, &transport, err));
    fsdp_status status = exchange(transport, err);
    now->well += status == FSDP_OK;
    transport->ops->close(transport);
    return status;
}

int main(void)
{
    int failed = 0, wrong = 0;
    for (int after = 0; after < MOST && after - failed < LEAST; after++) {
        shortage now = {.after = after};
        fsdp_error err = {0};
        fsdp_status status = run_rank_sockets(RANKS, DEADLINE_MS, connect_and_exchange, &now, &err);
        (void)fsdp_mem_fail_after(-1, false);
        failed += status != FSDP_OK;
        if (status == FSDP_OK ? now.well == RANKS : status == FSDP_ERR_LIMIT)
            continue;
        wrong++;
        fprintf(stderr, "after %d allocations: %d well, '%s'\n", after, (int)now.well, err.text);
    }
    printf("%d shortages of memory, %d ended wrongly\n", failed, wrong);
    return wrong > 0 || failed < LEAST;
}
