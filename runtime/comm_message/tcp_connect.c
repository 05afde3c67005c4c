/*
 * Every rank connects with those before it, and lets those after it in. See wire_tcp_internal.h.
 *
 * Some ranks at a time visit the others, no more than can stand before a door that nobody looks at. All agree
 * that these visits went well before anybody waits for them: so the rank that could not connect says why, at
 * once, and not the ones that would have waited for it.
 */
#include "runtime/comm_message/p2p_tcp_internal.h"

#include "base/clock.h"
#include "base/mem.h"
#include "runtime/bootstrap/ctl_tcp.h"

enum { VISITORS = 64 }; /* listen() may be content with 128 */

typedef struct gathering {
    fsdp_ctl *ctl;
    int rank, size;
    int64_t until_ms;
    int deadline_ms;
    int *fds;
    int32_t *ports; /* of all ranks */
    uint8_t job[FSDP_SHA256_SIZE];
    fsdp_reception door;
} gathering;

/* When all ranks are of this host, no other one needs to see the door. */
static fsdp_status open_door(gathering *now, fsdp_error *err)
{
    bool is_one_host = true;
    for (int i = 0; i < now->size; i++) {
        char host[FSDP_HOST_SIZE];
        is_one_host &= i == now->rank || (fsdp_ctl_tcp_find(now->ctl, i, host, now->job) &&
                                          fsdp_host_is_loopback(host));
    }
    return fsdp_socket_listen(is_one_host ? FSDP_LOOPBACK : NULL, 0, &now->door.listener, err);
}

static fsdp_status share_ports(gathering *now, fsdp_error *err)
{
    now->ports = fsdp_alloc((size_t)now->size, sizeof *now->ports);
    fsdp_status status =
        now->ports ? open_door(now, err) : fsdp_fail_memory(err, "connections between ranks");
    FSDP_TRY(fsdp_ctl_agree(now->ctl, status, err));
    const int32_t port = fsdp_socket_port(now->door.listener);
    return fsdp_ctl_allgather(now->ctl, &port, sizeof port, now->ports, err);
}

static fsdp_status visit(gathering *now, int to, fsdp_error *err)
{
    char host[FSDP_HOST_SIZE];
    (void)fsdp_ctl_tcp_find(now->ctl, to, host, now->job);
    const fsdp_hello hello = fsdp_hello_make(FSDP_HELLO_DATA, now->rank, now->size, to, now->job);
    fsdp_status status =
        fsdp_socket_connect(host, now->ports[to], now->until_ms, &now->fds[to], err);
    if (status == FSDP_OK)
        status = fsdp_socket_put(now->fds[to], &hello, sizeof hello, now->until_ms, err);
    if (status != FSDP_OK && err->text[0] == '\0')
        (void)fsdp_fail(err, status, "it took nothing within %g s", now->deadline_ms / 1000.0);
    if (status != FSDP_OK)
        fsdp_error_prefix(err, "rank %d cannot be reached for data", to);
    return status;
}

static bool is_expected(const gathering *now, const fsdp_hello *hello)
{
    return fsdp_hello_is_for(hello, FSDP_HELLO_DATA, now->rank, now->size, now->job) &&
           hello->rank > now->rank && now->fds[hello->rank] < 0;
}

static void let_in(gathering *now)
{
    fsdp_guest guest;
    while (fsdp_reception_take(&now->door, &guest)) {
        if (is_expected(now, &guest.hello))
            now->fds[guest.hello.rank] = guest.fd;
        else
            fsdp_socket_close(&guest.fd);
    }
}

/* Of the visitors before `end`. */
static int find_missing(const gathering *now, int end)
{
    int rank = now->rank + 1;
    while (rank < end && now->fds[rank] >= 0)
        rank++;
    return rank;
}

static fsdp_status receive_visits(gathering *now, int end, fsdp_error *err)
{
    struct pollfd polled[1 + FSDP_RECEPTION_ROOM];
    for (let_in(now); find_missing(now, end) < end; let_in(now)) {
        if (fsdp_now_ms() >= now->until_ms)
            return fsdp_fail(err, FSDP_ERR_PEER, "rank %d did not connect for data within %g s",
                             find_missing(now, end), now->deadline_ms / 1000.0);
        FSDP_TRY(fsdp_reception_check(&now->door, err));
        int n = fsdp_reception_watch(&now->door, polled);
        (void)poll(polled, (nfds_t)n, fsdp_poll_ms(now->until_ms));
    }
    return FSDP_OK;
}

static fsdp_status visit_all(gathering *now, fsdp_error *err)
{
    for (int to = 0; to < now->rank; to++)
        FSDP_TRY(visit(now, to, err));
    return FSDP_OK;
}

/* Collective. The ranks from `first` on, before `end`. */
static fsdp_status visit_in_turn(gathering *now, int first, int end, fsdp_error *err)
{
    bool is_visitor = now->rank >= first && now->rank < end;
    fsdp_status status = is_visitor ? visit_all(now, err) : FSDP_OK;
    FSDP_TRY(fsdp_ctl_agree(now->ctl, status, err));
    if (now->rank < end)
        status = receive_visits(now, end, err);
    return fsdp_ctl_agree(now->ctl, status, err);
}

fsdp_status fsdp_tcp_connect_all(fsdp_ctl *ctl, int deadline_ms, int *fds, fsdp_error *err)
{
    gathering now = {.ctl = ctl,
                     .rank = fsdp_ctl_rank(ctl),
                     .size = fsdp_ctl_size(ctl),
                     .until_ms = fsdp_now_ms() + deadline_ms,
                     .deadline_ms = deadline_ms,
                     .fds = fds,
                     .door = {.listener = -1}};
    fsdp_status status = share_ports(&now, err);
    for (int first = 0; first < now.size && status == FSDP_OK; first += VISITORS) {
        int end = first + VISITORS < now.size ? first + VISITORS : now.size;
        status = visit_in_turn(&now, first, end, err);
    }
    fsdp_reception_release(&now.door);
    fsdp_free(now.ports);
    return status;
}
