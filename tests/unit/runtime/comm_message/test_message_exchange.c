/* An exchange over a network whose sends end late: staged and reduced bytes stay as long as they are sent. */
#include "runtime/comm_message/comm_message.h"

#include <criterion/criterion.h>
#include <string.h>

enum { PIECE = 16, ROWS = 10, COUNT = PIECE * ROWS / 4, PLACES = 8, RANKS = 2 };

/* Receives complete at the next test, sends when nothing else is in flight. */
typedef struct late_network {
    fsdp_p2p base;
    fsdp_p2p_batch batch;
    fsdp_p2p_transfer sends[ROWS], receives[ROWS];
    int sent, received, sends_done, receives_done;
    float ours[COUNT], theirs[COUNT]; /* before the exchange */
    int wrong_rows;
} late_network;

static fsdp_status start_send(fsdp_p2p *p2p, fsdp_p2p_batch *batch,
                              const fsdp_p2p_transfer *transfer, fsdp_error *err)
{
    late_network *network = (late_network *)p2p;
    (void)batch;
    (void)err;
    network->sends[network->sent++] = *transfer;
    return FSDP_OK;
}

static fsdp_status start_receive(fsdp_p2p *p2p, fsdp_p2p_batch *batch,
                                 const fsdp_p2p_transfer *transfer, fsdp_error *err)
{
    late_network *network = (late_network *)p2p;
    (void)batch;
    (void)err;
    network->receives[network->received++] = *transfer;
    return FSDP_OK;
}

static fsdp_status test(fsdp_p2p *p2p, fsdp_p2p_batch *batch, int *finished, int *count_out,
                        fsdp_error *err)
{
    late_network *network = (late_network *)p2p;
    (void)batch;
    (void)err;
    *count_out = 0;
    bool ends_sends = network->receives_done == network->received;
    for (int row; (row = network->receives_done) < network->received; network->receives_done++) {
        memcpy(network->receives[row].data, (char *)network->theirs + row * PIECE, PIECE);
        finished[(*count_out)++] = network->receives[row].place;
    }
    for (int row; ends_sends && (row = network->sends_done) < network->sent;
         network->sends_done++) {
        network->wrong_rows +=
            memcmp(network->sends[row].data, (char *)network->ours + row * PIECE, PIECE) != 0;
        finished[(*count_out)++] = network->sends[row].place;
    }
    return FSDP_OK;
}

static fsdp_status may_call(fsdp_p2p *p2p, fsdp_error *err)
{
    (void)p2p;
    (void)err;
    return FSDP_OK;
}

static bool receive_no_status(fsdp_p2p *p2p, void *status, size_t size)
{
    (void)p2p;
    (void)status;
    (void)size;
    return false;
}

/* --- failures --------------------------------------------------------------------------------- */

/* One of two ranks: holds the last status that the other one sent. */
typedef struct status_end {
    fsdp_p2p base;
    struct status_end *other;
    unsigned char status[FSDP_P2P_STATUS];
    bool has_status;
} status_end;

static void send_status(fsdp_p2p *p2p, int rank, const void *status, size_t size)
{
    status_end *to = ((status_end *)p2p)->other;
    (void)rank;
    memcpy(to->status, status, size);
    to->has_status = true;
}

static bool receive_status(fsdp_p2p *p2p, void *status, size_t size)
{
    status_end *end = (status_end *)p2p;
    bool has_status = end->has_status;
    if (has_status)
        memcpy(status, end->status, size);
    end->has_status = false;
    return has_status;
}

static void fail(message_transport *transport, const char *what)
{
    fsdp_error why = {0};
    fsdp_fail(&why, FSDP_ERR_IO, "%s", what);
    fsdp_message_fail(&transport->world, &why, true, false);
}

static void expect_failure(message_transport *transport, const char *wanted)
{
    fsdp_error err = {0};
    cr_assert(fsdp_message_has_failed(&transport->world, &err));
    cr_expect_str_eq(err.text, wanted);
}

Test(message_status, the_first_failure_stays)
{
    static const fsdp_p2p_ops ops = {
        .may_call = may_call, .send_status = send_status, .recv_status = receive_status};
    static const int ranks[] = {0, 1};
    for (int fails_too = 0; fails_too < 2; fails_too++) {
        status_end ends[RANKS] = {{.base.ops = &ops, .other = &ends[1]},
                                  {.base.ops = &ops, .other = &ends[0]}};
        message_member members[RANKS][RANKS] = {0};
        message_transport transports[RANKS] = {0};
        for (int i = 0; i < RANKS; i++) {
            transports[i].p2p = &ends[i].base;
            transports[i].base.rank = i;
            transports[i].world = (message_group){.transport = &transports[i],
                                                  .rank = i,
                                                  .size = RANKS,
                                                  .ranks = ranks,
                                                  .members = members[i]};
        }
        fail(&transports[0], "first");
        fail(&transports[0], "second");
        if (fails_too)
            fail(&transports[1], "its own");
        expect_failure(&transports[0], "first");
        expect_failure(&transports[1], fails_too ? "its own" : "rank 0: first");
    }
}

/* --- staging ---------------------------------------------------------------------------------- */

Test(message_exchange, what_is_sent_stays_until_it_has_left)
{
    static const fsdp_p2p_ops ops = {.may_call = may_call,
                                     .send = start_send,
                                     .recv = start_receive,
                                     .test = test,
                                     .recv_status = receive_no_status};
    static late_network network;
    static float sums[COUNT];
    network.base.ops = &ops;
    static unsigned char pieces[PLACES * PIECE];
    message_transport transport = {.p2p = &network.base, .base.deadline_ms = 1000};
    message_member members[RANKS] = {0};
    message_route routes[RANKS] = {{0}, {(unsigned char *)sums, NULL, sizeof sums, sizeof sums}};
    const void *sources[RANKS];
    int finished[PLACES];
    bool is_arriving[PLACES] = {false};
    message_group group = {.transport = &transport,
                           .size = RANKS,
                           .ranks = (const int[]){0, 1},
                           .members = members,
                           .routes = routes,
                           .sources = sources,
                           .finished = finished,
                           .is_arriving = is_arriving,
                           .batch = &network.batch,
                           .pieces = pieces,
                           .piece = PIECE};
    const fsdp_collective call = {.kind = FSDP_ALL_REDUCE, .dtype = FSDP_F32, .count = COUNT};
    const message_exchange exchange = {.group = &group,
                                       .fold = &call,
                                       .local = (unsigned char *)sums,
                                       .to = (unsigned char *)sums,
                                       .to_size = sizeof sums};
    fsdp_error err = {0};
    for (int i = 0; i < COUNT; i++) {
        sums[i] = network.ours[i] = (float)i;
        network.theirs[i] = (float)(1000 * i);
    }
    cr_assert_eq(fsdp_message_run_exchange(&exchange, &err), FSDP_OK, "%s", err.text);
    cr_expect_eq(network.sends_done, ROWS);
    cr_expect_eq(network.wrong_rows, 0);
    for (int i = 0; i < COUNT; i++)
        cr_expect_eq(sums[i], network.ours[i] + network.theirs[i], "element %d", i);
}
