/*
 * Connects every pair of ranks: each rank connects to those before it and accepts those after it.
 * See p2p_tcp_internal.h.
 *
 * Ranks connect in batches no larger than a listener's backlog, because a rank accepts only after
 * its own connects. All ranks agree on the outcome of the connects before any rank waits to accept:
 * the rank that could not connect reports the reason at once.
 */
#include "runtime/comm_message/p2p_tcp_internal.h"

#include "base/core/clock.h"
#include "base/core/mem.h"
#include "runtime/bootstrap/ctl_tcp.h"

enum { BATCH = 64 }; /* a backlog may be limited to 128 */

typedef struct connector {
    fsdp_ctl *ctl;
    int rank, size;
    int64_t until_ms;
    int deadline_ms;
    int *fds;
    int32_t *ports; /* of all ranks */
    uint8_t job[FSDP_SHA256_SIZE];
    fsdp_listener listener;
} connector;

/* Listens at the loopback address when all ranks are on this host. */
static fsdp_status open_listener(connector *now, fsdp_error *err)
{
    bool is_one_host = true;
    for (int i = 0; i < now->size; i++) {
        char host[FSDP_HOST_SIZE];
        is_one_host &= i == now->rank || (fsdp_ctl_tcp_find(now->ctl, i, host, now->job) &&
                                          fsdp_host_is_loopback(host));
    }
    return fsdp_socket_listen(is_one_host ? FSDP_LOOPBACK : NULL, 0, &now->listener.fd, err);
}

static fsdp_status share_ports(connector *now, fsdp_error *err)
{
    now->ports = fsdp_alloc((size_t)now->size, sizeof *now->ports);
    fsdp_status status =
        now->ports ? open_listener(now, err) : fsdp_fail_memory(err, "connections between ranks");
    FSDP_TRY(fsdp_ctl_agree(now->ctl, status, err));
    const int32_t port = fsdp_socket_port(now->listener.fd);
    return fsdp_ctl_allgather(now->ctl, &port, sizeof port, now->ports, err);
}

static fsdp_status connect_to(connector *now, int to, fsdp_error *err)
{
    char host[FSDP_HOST_SIZE];
    (void)fsdp_ctl_tcp_find(now->ctl, to, host, now->job);
    const fsdp_hello hello = fsdp_hello_make(FSDP_HELLO_DATA, now->rank, now->size, to, now->job);
    fsdp_status status =
        fsdp_socket_connect(host, now->ports[to], now->until_ms, &now->fds[to], err);
    if (status == FSDP_OK)
        status = fsdp_socket_send_all(now->fds[to], &hello, sizeof hello, now->until_ms, err);
    if (status != FSDP_OK && err->text[0] == '\0')
        (void)fsdp_fail(err, status, "it accepted no data within %g s", now->deadline_ms / 1000.0);
    if (status != FSDP_OK)
        fsdp_error_prefix(err, "rank %d cannot be reached for data", to);
    return status;
}

static bool is_expected(const connector *now, const fsdp_hello *hello)
{
    return fsdp_hello_is_for(hello, FSDP_HELLO_DATA, now->rank, now->size, now->job) &&
           hello->rank > now->rank && now->fds[hello->rank] < 0;
}

static void accept_all(connector *now)
{
    fsdp_pending pending;
    while (fsdp_listener_accept(&now->listener, &pending)) {
        if (is_expected(now, &pending.hello))
            now->fds[pending.hello.rank] = pending.fd;
        else
            fsdp_socket_close(&pending.fd);
    }
}

/* The first rank before `end` that has not connected. */
static int find_missing(const connector *now, int end)
{
    int rank = now->rank + 1;
    while (rank < end && now->fds[rank] >= 0)
        rank++;
    return rank;
}

static fsdp_status accept_batch(connector *now, int end, fsdp_error *err)
{
    for (accept_all(now); find_missing(now, end) < end; accept_all(now)) {
        if (fsdp_now_ms() >= now->until_ms)
            return fsdp_fail(err, FSDP_ERR_PEER, "rank %d did not connect for data within %g s",
                             find_missing(now, end), now->deadline_ms / 1000.0);
        FSDP_TRY(fsdp_listener_check(&now->listener, err));
        fsdp_listener_wait(&now->listener, now->until_ms);
    }
    return FSDP_OK;
}

static fsdp_status connect_to_all(connector *now, fsdp_error *err)
{
    for (int to = 0; to < now->rank; to++)
        FSDP_TRY(connect_to(now, to, err));
    return FSDP_OK;
}

/* Collective. The ranks from `first` to `end` connect, those before `end` accept. */
static fsdp_status connect_batch(connector *now, int first, int end, fsdp_error *err)
{
    bool is_connecting = now->rank >= first && now->rank < end;
    fsdp_status status = is_connecting ? connect_to_all(now, err) : FSDP_OK;
    FSDP_TRY(fsdp_ctl_agree(now->ctl, status, err));
    if (now->rank < end)
        status = accept_batch(now, end, err);
    return fsdp_ctl_agree(now->ctl, status, err);
}

fsdp_status fsdp_tcp_connect_all(fsdp_ctl *ctl, int deadline_ms, int *fds, fsdp_error *err)
{
    connector now = {.ctl = ctl,
                     .rank = fsdp_ctl_rank(ctl),
                     .size = fsdp_ctl_size(ctl),
                     .until_ms = fsdp_now_ms() + deadline_ms,
                     .deadline_ms = deadline_ms,
                     .fds = fds,
                     .listener = {.fd = -1}};
    fsdp_status status = share_ports(&now, err);
    for (int first = 0; first < now.size && status == FSDP_OK; first += BATCH) {
        int end = first + BATCH < now.size ? first + BATCH : now.size;
        status = connect_batch(&now, first, end, err);
    }
    fsdp_listener_release(&now.listener);
    fsdp_free(now.ports);
    return status;
}
