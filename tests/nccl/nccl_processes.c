/*
 * Ranks as processes: one that is killed or stopped in a collective is named by the others (over the fake
 * NCCL); and the real NCCL, where there is one, goes as far as it can without a GPU.
 *
 * usage: nccl_processes [real|hosts|stopped]: with `hosts` and `stopped` beats go through one rank per host
 */
#include "tests/nccl/nccl_ranks.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "runtime/bootstrap/rendezvous.h"
#include "runtime/comm_message/message_transport.h"
#include "runtime/comm_message/p2p_tcp.h"
#include "runtime/comm_nccl/nccl_library.h"
#include "tests/support/ranks/rank_processes.h"

enum { SKIPPED = 77, DEADLINE_MS = 60000, STOPPED_MS = 6000, STOPPED_RANKS = 6 };

static bool has_hosts;
static int killed;

/* The transport over NCCL takes the place of the rank's own. */
static fsdp_status connect_nccl(rank_process *process, nccl_rank *rank, fsdp_error *err)
{
    int all[NCCL_MOST_RANKS] = {0, 1, 2, 3, 4, 5, 6, 7};
    *rank = (nccl_rank){.rank = process->rank, .size = process->size};
    FSDP_TRY(open_nccl_device(&rank->device, &rank->stream, err));
    const fsdp_nccl_spec spec = {.ctl = process->ctl,
                                 .inner = process->transport,
                                 .device = rank->device,
                                 .host = (uint64_t)rank->rank % 2,
                                 .direct_ranks = has_hosts ? 1 : 0};
    FSDP_TRY(fsdp_transport_nccl(&spec, &rank->transport, err));
    process->transport = rank->transport;
    return rank->transport->ops->comm_create(rank->transport, all, rank->size, 1, &rank->comm, err);
}

/* The device outlives the transport. */
static void release(rank_process *process, nccl_rank *rank)
{
    fsdp_comm_free(rank->comm);
    if (rank->transport) {
        fsdp_comm_free(process->comm);
        rank->transport->ops->close(rank->transport);
        process->comm = NULL;
        process->transport = NULL;
    }
    if (rank->stream)
        rank->device->ops->stream_free(rank->stream);
    fsdp_device_close(rank->device);
}

/* --- the fake ----------------------------------------------------------------------------------- */

static fsdp_status be_killed(rank_process *process, fsdp_error *err)
{
    nccl_rank rank;
    fake_nccl_of()->plan = (fake_nccl_plan){.rank = -1, .is_alone = true};
    fsdp_status status = connect_nccl(process, &rank, err);
    if (status == FSDP_OK)
        status = give_call(&rank, err);
    if (rank.rank == killed)
        raise(SIGKILL);
    if (status == FSDP_OK)
        status = await_failure(&rank, err);
    release(process, &rank);
    return status;
}

static int names_a_killed_rank(void)
{
    rank_processes ranks = {.size = 3, .deadline_ms = DEADLINE_MS, .body = be_killed};
    rank_result results[3];
    run_rank_processes(&ranks, results);
    char named[96];
    snprintf(named, sizeof named, "in all_reduce of 8 f32 for layers.1 (call 1): rank %d (process ",
             killed);
    for (int i = 0; i < 3; i++) {
        const fsdp_error *err = &results[i].err;
        if (i == killed)
            continue;
        expect(results[i].status == FSDP_ERR_PEER && err->rank == killed,
               "the rank that was killed is at fault", err->text);
        expect(strstr(err->text, named) && strstr(err->text, " died "),
               "the rank that was killed is named, and the call", err->text);
    }
    return 0;
}

/* --- stopped ranks ------------------------------------------------------------------------------ */

static int listener = -1, port; /* of rank 0, opened by the parent */

static fsdp_status find(void *context, char host_out[FSDP_HOST_SIZE], int *port_out,
                        int64_t until_ms, fsdp_error *err)
{
    (void)context;
    (void)until_ms;
    (void)err;
    snprintf(host_out, FSDP_HOST_SIZE, "%s", FSDP_LOOPBACK);
    *port_out = port;
    return FSDP_OK;
}

/* Over TCP, as between hosts: over shared memory a rank sees for whom another one waits. */
static fsdp_status connect_tcp(rank_process *process, fsdp_error *err)
{
    fsdp_p2p *p2p = NULL;
    fsdp_transport *tcp = NULL;
    fsdp_ctl *ctl = NULL;
    const fsdp_rendezvous_spec spec = {.rank = process->rank,
                                       .size = process->size,
                                       .job = "stopped",
                                       .is_one_host = true,
                                       .deadline_ms = DEADLINE_MS,
                                       .listener = process->rank == 0 ? listener : -1,
                                       .find = find};
    if (process->rank > 0)
        fsdp_socket_close(&listener);
    fsdp_comm_free(process->comm);
    process->comm = NULL;
    process->transport->ops->close(process->transport);
    process->transport = NULL;
    FSDP_TRY(fsdp_rendezvous(&spec, &ctl, err));
    fsdp_ctl_free(process->ctl);
    process->ctl = ctl;
    FSDP_TRY(fsdp_p2p_tcp(process->ctl, STOPPED_MS, &p2p, err));
    FSDP_TRY(fsdp_transport_message(process->ctl, p2p, STOPPED_MS, &tcp, err));
    process->transport = tcp;
    return FSDP_OK;
}

static fsdp_status be_stopped(rank_process *process, fsdp_error *err)
{
    nccl_rank rank = {0};
    fake_nccl_of()->plan = (fake_nccl_plan){.rank = -1, .is_alone = true};
    FSDP_TRY(connect_tcp(process, err));
    fsdp_status status = connect_nccl(process, &rank, err);
    if (status == FSDP_OK)
        status = give_call(&rank, err);
    if (rank.rank == killed)
        raise(SIGSTOP);
    if (status == FSDP_OK)
        status = await_failure(&rank, err);
    release(process, &rank);
    return status;
}

static void await_others(const rank_processes *ranks)
{
    for (int i = 0; i < ranks->size; i++)
        while (i != killed && !((volatile rank_result *)ranks->results)[i].is_done)
            nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
}

/* Ranks of the other host, and of the same one, name it, and no rank that waits for it. */
static void names_a_stopped_rank(void)
{
    rank_processes ranks = {.size = STOPPED_RANKS, .deadline_ms = DEADLINE_MS, .body = be_stopped};
    rank_result results[STOPPED_RANKS];
    char wrong[64];
    fsdp_error why = {0};
    expect(fsdp_socket_listen(FSDP_LOOPBACK, 0, &listener, &why) == FSDP_OK, "a listener",
           why.text);
    port = fsdp_socket_port(listener);
    start_rank_processes(&ranks);
    fsdp_socket_close(&listener);
    await_others(&ranks);
    kill(ranks.pids[killed], SIGKILL);
    finish_rank_processes(&ranks, results);
    for (int i = 0; i < STOPPED_RANKS; i++) {
        const fsdp_error *err = &results[i].err;
        snprintf(wrong, sizeof wrong, "rank %d names rank %d, which is stopped", i, killed);
        if (i != killed)
            expect(results[i].status == FSDP_ERR_PEER && err->rank == killed, wrong, err->text);
    }
}

static int names_stopped_ranks(void)
{
    for (killed = 0; killed < STOPPED_RANKS;
         killed += 3) /* the first rank of a host, and another one */
        names_a_stopped_rank();
    return 0;
}

/* --- the real one --------------------------------------------------------------------------------- */

static fsdp_status bootstrap(rank_process *process, fsdp_error *err)
{
    nccl_rank rank;
    fsdp_status status = connect_nccl(process, &rank, err);
    release(process, &rank);
    return status;
}

/* With GPUs it may continue. */
static int goes_up_to_the_device(void)
{
    rank_processes ranks = {.size = 4, .deadline_ms = DEADLINE_MS, .body = bootstrap};
    rank_result results[4];
    char version[FSDP_ERROR_TEXT];
    fsdp_nccl_describe(version, sizeof version);
    printf("%s\n", version);
    if (strncmp(version, "no NCCL: cannot find ", strlen("no NCCL: cannot find ")) == 0)
        return SKIPPED;
    expect(strncmp(version, "NCCL 2.", strlen("NCCL 2.")) == 0, "NCCL tells its version", version);
    run_rank_processes(&ranks, results);
    for (int i = 0; i < 4; i++) {
        const fsdp_error *err = &results[i].err;
        printf("rank %d: %d, %s\n", i, (int)results[i].status, err->text);
        if (results[i].status == FSDP_OK)
            continue;
        expect(results[i].status == FSDP_ERR_USAGE || results[i].status == FSDP_ERR_PEER,
               "exit code 2 or 10", err->text);
        expect(strstr(err->text, "the making of a group of 4 ranks") &&
                   strstr(err->text, "NCCL 2."),
               "an error of NCCL", err->text);
    }
    return 0;
}

int main(int argc, char **argv)
{
    const bool is_real = argc > 1 && strcmp(argv[1], "real") == 0;
    const bool is_stopped = argc > 1 && strcmp(argv[1], "stopped") == 0;
    has_hosts = is_stopped || (argc > 1 && strcmp(argv[1], "hosts") == 0);
    if (is_real)
        return goes_up_to_the_device();
    if (is_stopped)
        return names_stopped_ranks();
    if (!has_hosts) {
        killed = 1;
        return names_a_killed_rank();
    }
    killed = 0; /* it passes the beats of rank 2 on */
    (void)names_a_killed_rank();
    killed = 2;
    return names_a_killed_rank();
}
