/*
 * The rendezvous of the ranks over TCP, and the control plane over its connections. See rendezvous.h and
 * ctl_tcp.h.
 *
 * Every other rank connects to rank 0 and sends a hello (listener.h). Rank 0 answers each once:
 * with the addresses of all ranks when all have connected, else with the reason of the failure.
 *
 * A message of the control plane is its size and its bytes on a stream. One that was sent or received in part
 * at its deadline stays with its link, and the next call continues it: the stream keeps its message bounds
 * after any failure, and a leave message still arrives.
 */
#include "runtime/bootstrap/rendezvous.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <fsdp/connect.h>

#include "base/core/clock.h"
#include "base/core/given.h"
#include "base/core/mem.h"
#include "statedict/ctl/ctl_backend.h"
#include "runtime/bootstrap/ctl_tcp.h"

/* === the control plane ======================================================================== */

enum { KEPT = 64 << 10, LAST_READS = 64 };

/* A message on its way: its size, then its bytes. */
typedef struct tcp_message {
    size_t at, end; /* how much of head and data has passed; end 0: not known */
    size_t room;
    unsigned char *data; /* begins with the size, four bytes */
} tcp_message;

enum { HEAD = sizeof(uint32_t) };

typedef struct tcp_link {
    int fd;        /* -1: not connected yet, or no more */
    bool has_left; /* the peer sends nothing more */
    bool is_deaf;  /* sending failed; data received before is still valid */
    tcp_message incoming, outgoing;
    char place[FSDP_PLACE_SIZE]; /* of the connections with rank 0: the other end */
} tcp_link;

typedef struct tcp_end {
    fsdp_tcp_parts parts;
    fsdp_listener listener;
    tcp_link *links;   /* connected by this rank; those of rank 0 come from the rendezvous */
    tcp_link *callers; /* connected by the other ranks; NULL at rank 0 */
} tcp_end;

static fsdp_status fail_left(int rank, ssize_t failed, fsdp_error *err)
{
    if (failed == 0 || failed == -ECONNRESET)
        return fsdp_fail(err, FSDP_ERR_PEER, "rank %d has left", rank);
    (void)fsdp_fail_errno(err, (int)-failed, "the connection with rank %d broke", rank);
    err->status = FSDP_ERR_PEER;
    return FSDP_ERR_PEER;
}

/* --- messages --------------------------------------------------------------------------------- */

static bool have_room(tcp_message *message, size_t size)
{
    if (size <= message->room)
        return true;
    unsigned char *data = fsdp_realloc(message->data, size, 1);
    if (!data)
        return false;
    message->data = data;
    message->room = size;
    return true;
}

static void forget(tcp_message *message)
{
    message->at = message->end = 0;
    if (message->room <= KEPT)
        return;
    fsdp_free(message->data);
    message->data = NULL;
    message->room = 0;
}

/* Sends the rest of the outgoing message. FSDP_ERR_PEER with an empty text: the time is over. */
static fsdp_status push(const fsdp_ctl *ctl, tcp_link *link, int to, int64_t until_ms,
                        fsdp_error *err)
{
    tcp_message *message = &link->outgoing;
    while (message->at < message->end) {
        ssize_t n =
            fsdp_socket_write(link->fd, message->data + message->at, message->end - message->at);
        if (n < 0) {
            link->is_deaf = true;
            return fail_left(to, n, err);
        }
        if (n == 0 && !fsdp_socket_wait(link->fd, POLLOUT, until_ms) &&
            !fsdp_ctl_keep_sending(ctl, to, &until_ms))
            return fsdp_ctl_fail_late(err);
        message->at += (size_t)n;
    }
    forget(message);
    return FSDP_OK;
}

static fsdp_status fill(tcp_message *message, const void *data, size_t size, fsdp_error *err)
{
    const uint32_t head = (uint32_t)size;
    if (!have_room(message, HEAD + size))
        return fsdp_fail_memory(err, "a message to another rank");
    memcpy(message->data, &head, HEAD);
    memcpy(message->data + HEAD, data, size);
    message->at = 0;
    message->end = HEAD + size;
    return FSDP_OK;
}

/* Bytes of the message that have not arrived yet. */
static size_t missing(const tcp_message *message)
{
    return message->at < HEAD ? HEAD - message->at : message->end - message->at;
}

static fsdp_status note_size(tcp_message *message, int from, fsdp_error *err)
{
    uint32_t size;
    memcpy(&size, message->data, HEAD);
    if (size == 0 || size > FSDP_CTL_PIECE)
        return fsdp_fail(err, FSDP_ERR_PEER,
                         "rank %d sent a message of %u bytes, which is not a valid size", from,
                         (unsigned)size);
    if (!have_room(message, HEAD + (size_t)size))
        return fsdp_fail_memory(err, "a message from another rank");
    message->end = HEAD + (size_t)size;
    return FSDP_OK;
}

/* Reads without waiting. *whole_out: the message is complete. */
static fsdp_status pull(tcp_link *link, int from, bool *whole_out, fsdp_error *err)
{
    tcp_message *message = &link->incoming;
    if (!have_room(message, HEAD))
        return fsdp_fail_memory(err, "a message from another rank");
    for (;;) {
        if (message->at >= HEAD && message->end == 0)
            FSDP_TRY(note_size(message, from, err));
        size_t left = missing(message);
        *whole_out = left == 0;
        if (left == 0)
            return FSDP_OK;
        ssize_t n = fsdp_socket_read(link->fd, message->data + message->at, left);
        if (n < 0) {
            fsdp_socket_close(&link->fd);
            link->has_left = true;
            return fail_left(from, n, err);
        }
        if (n == 0)
            return FSDP_OK;
        message->at += (size_t)n;
    }
}

static fsdp_status hand_over(fsdp_ctl *ctl, tcp_message *message, int from, void *data, size_t size,
                             fsdp_error *err)
{
    const fsdp_ctl_bytes received = {message->data + HEAD, message->end - HEAD};
    fsdp_status status = fsdp_ctl_hand_over(ctl, from, received, data, size, err);
    forget(message);
    return status;
}

/* --- connections between ranks other than 0 --------------------------------------------------- */

static fsdp_status call_rank(tcp_end *end, int to, int64_t until_ms, fsdp_error *err)
{
    const fsdp_rank_address *address = &end->parts.addresses[to];
    tcp_link *link = &end->links[to];
    const fsdp_hello hello =
        fsdp_hello_make(FSDP_HELLO_LINK, end->parts.rank, end->parts.size, to, end->parts.job);
    fsdp_status status =
        fsdp_socket_connect(address->host, address->port, until_ms, &link->fd, err);
    if (status != FSDP_OK && err->errnum == ETIMEDOUT)
        return fsdp_ctl_fail_late(err);
    if (status != FSDP_OK && err->errnum == ECONNREFUSED) {
        link->has_left = true;
        return fail_left(to, 0, err);
    }
    if (status == FSDP_OK) /* a hello fits into any socket's buffer */
        status = fsdp_socket_send_all(link->fd, &hello, sizeof hello, fsdp_now_ms() + 1, err);
    if (status != FSDP_OK)
        fsdp_socket_close(&link->fd);
    return status;
}

static bool is_caller(const tcp_end *end, const fsdp_hello *hello)
{
    const fsdp_tcp_parts *parts = &end->parts;
    return fsdp_hello_is_for(hello, FSDP_HELLO_LINK, parts->rank, parts->size, parts->job) &&
           hello->rank > 0 && end->callers[hello->rank].fd < 0;
}

static void receive_callers(tcp_end *end)
{
    fsdp_pending pending;
    while (fsdp_listener_accept(&end->listener, &pending)) {
        if (is_caller(end, &pending.hello))
            end->callers[pending.hello.rank].fd = pending.fd;
        else
            fsdp_socket_close(&pending.fd);
    }
}

/* --- the back end ----------------------------------------------------------------------------- */

/* A message of which no byte was sent in time is dropped: the caller reports its failure. */
static fsdp_status send_message(fsdp_ctl *ctl, int to, const void *data, size_t size,
                                int64_t until_ms, fsdp_error *err)
{
    tcp_end *end = ctl->backend;
    tcp_link *link = &end->links[to];
    if (link->has_left || link->is_deaf)
        return fail_left(to, 0, err);
    if (link->fd < 0)
        FSDP_TRY(call_rank(end, to, until_ms, err));
    FSDP_TRY(push(ctl, link, to, until_ms, err));
    FSDP_TRY(fill(&link->outgoing, data, size, err));
    fsdp_status status = push(ctl, link, to, until_ms, err);
    if (status != FSDP_OK && link->outgoing.at == 0)
        forget(&link->outgoing);
    return status;
}

/* Returns when the link has bytes or, before it is connected, when the peer connects. */
static void wait_for(const tcp_end *end, const tcp_link *link, int64_t until_ms)
{
    if (link->fd >= 0)
        (void)fsdp_socket_wait(link->fd, POLLIN, until_ms);
    else
        fsdp_listener_wait(&end->listener, until_ms);
}

static fsdp_status recv_message(fsdp_ctl *ctl, int from, void *data, size_t size, int64_t until_ms,
                                fsdp_error *err)
{
    tcp_end *end = ctl->backend;
    bool is_star = ctl->rank == 0 || from == 0, whole = false;
    tcp_link *link = is_star ? &end->links[from] : &end->callers[from];
    for (;;) {
        bool is_late = fsdp_now_ms() >= until_ms; /* then this is the last attempt */
        if (link->has_left)
            return fail_left(from, 0, err);
        if (!is_star && link->fd < 0)
            receive_callers(end);
        if (link->fd >= 0)
            FSDP_TRY(pull(link, from, &whole, err));
        if (whole)
            return hand_over(ctl, &link->incoming, from, data, size, err);
        if (is_late && link->fd < 0) /* descriptors may have been freed until the deadline */
            FSDP_TRY(fsdp_listener_check(&end->listener, err));
        if (is_late)
            return fsdp_ctl_fail_late(err);
        wait_for(end, link, until_ms);
    }
}

/* --- creation and end ------------------------------------------------------------------------- */

/* Closing a socket with unread data makes the kernel discard what was sent last: reads it first. */
static void close_link(tcp_link *link)
{
    char rest[4096];
    fsdp_error ignored = {0};
    if (link->fd >= 0)
        (void)push(NULL, link, 0, 0, &ignored);
    for (int i = 0; link->fd >= 0 && i < LAST_READS; i++)
        if (fsdp_socket_read(link->fd, rest, sizeof rest) <= 0)
            break;
    fsdp_socket_close(&link->fd);
    fsdp_free(link->incoming.data);
    fsdp_free(link->outgoing.data);
}

static void free_end(tcp_end *end)
{
    for (int i = 0; i < end->parts.size; i++) {
        if (end->links)
            close_link(&end->links[i]);
        if (end->callers)
            close_link(&end->callers[i]);
    }
    fsdp_listener_release(&end->listener);
    fsdp_free(end->links);
    fsdp_free(end->callers);
    fsdp_free(end->parts.addresses);
    fsdp_free(end);
}

static void close_end(fsdp_ctl *ctl)
{
    free_end(ctl->backend);
}

/* Other ranks than 0 connect late, to the address of a listener. */
static void locate_link(const fsdp_ctl *ctl, int rank, char *out, size_t out_size)
{
    const tcp_end *end = ctl->backend;
    if (ctl->rank == 0 || rank == 0)
        snprintf(out, out_size, "%s", end->links[rank].place);
    else
        fsdp_host_port(end->parts.addresses[rank].host, end->parts.addresses[rank].port, out,
                       out_size);
}

static const fsdp_ctl_ops tcp_ops = {
    .name = "tcp",
    .send = send_message,
    .recv = recv_message,
    .close = close_end,
    .locate = locate_link,
};

bool fsdp_ctl_tcp_find(const fsdp_ctl *ctl, int rank, char host_out[FSDP_HOST_SIZE],
                       uint8_t job_out[FSDP_SHA256_SIZE])
{
    if (ctl->ops != &tcp_ops)
        return false;
    const tcp_end *end = ctl->backend;
    memcpy(job_out, end->parts.job, sizeof end->parts.job);
    if (ctl->rank == 0 || rank == 0)
        fsdp_socket_peer(end->links[rank].fd, host_out);
    else
        memcpy(host_out, end->parts.addresses[rank].host, FSDP_HOST_SIZE);
    return true;
}

static tcp_link *make_links(int n)
{
    tcp_link *links = fsdp_alloc((size_t)n, sizeof *links);
    for (int i = 0; links && i < n; i++)
        links[i].fd = -1;
    return links;
}

/* For parts that no control plane took; fds and addresses may be NULL. */
static void release_parts(fsdp_tcp_parts *parts)
{
    for (int i = 0; parts->fds && i < (parts->rank == 0 ? parts->size : 1); i++)
        fsdp_socket_close(&parts->fds[i]);
    fsdp_socket_close(&parts->listener);
    fsdp_free(parts->fds);
    fsdp_free(parts->addresses);
}

fsdp_status fsdp_ctl_tcp(const fsdp_tcp_parts *parts, fsdp_ctl **ctl_out, fsdp_error *err)
{
    fsdp_tcp_parts mine = *parts;
    tcp_end *end = fsdp_alloc(1, sizeof *end);
    tcp_link *links = make_links(mine.size);
    tcp_link *callers = mine.rank == 0 ? NULL : make_links(mine.size);
    if (!end || !links || (mine.rank != 0 && !callers)) {
        release_parts(&mine);
        fsdp_free(end);
        fsdp_free(links);
        fsdp_free(callers);
        return fsdp_fail_memory(err, "the control plane");
    }
    for (int i = 0; i < (mine.rank == 0 ? mine.size : 1); i++) {
        links[i].fd = mine.fds[i];
        fsdp_socket_place(links[i].fd, links[i].place);
    }
    fsdp_free(mine.fds);
    mine.fds = NULL;
    end->parts = mine;
    end->listener.fd = mine.listener;
    end->links = links;
    end->callers = callers;
    return fsdp_ctl_create(&tcp_ops, mine.rank, mine.size, end, ctl_out, err);
}

/* === the rendezvous =========================================================================== */

enum {
    MISSING_SHOWN = 16,
    GRACE_MS = 2000,
    RETRY_MS = 20,
    LONGEST_RETRY_MS = 250,
    ANSWER_MS = 1000
};

/* The head of rank 0's answer. Addresses follow when the rank is accepted, a text when it is
 * refused. */
typedef struct answer {
    uint32_t magic;
    int32_t status; /* FSDP_OK: accepted */
    uint32_t size;
} answer;

/* The rendezvous at rank 0. */
typedef struct host_state {
    const fsdp_rendezvous_spec *spec;
    fsdp_listener listener;
    int *fds;                     /* one per rank; -1: not connected yet */
    fsdp_rank_address *addresses; /* of their listeners */
    struct pollfd *polled;
    int here; /* connected ranks, rank 0 included */
    uint8_t job[FSDP_SHA256_SIZE];
} host_state;

static void digest_job(const char *job, uint8_t digest_out[FSDP_SHA256_SIZE])
{
    fsdp_sha256 sha;
    fsdp_sha256_init(&sha);
    fsdp_sha256_add(&sha, job, strlen(job));
    fsdp_sha256_value(&sha, digest_out);
}

static fsdp_status listen_here(const fsdp_rendezvous_spec *spec, int port, int *fd_out,
                               fsdp_error *err)
{
    return fsdp_socket_listen(spec->is_one_host ? FSDP_LOOPBACK : NULL, port, fd_out, err);
}

/* --- rank 0: connections ---------------------------------------------------------------------- */

/* Best effort: the answer fits into the socket's buffer. */
static void refuse(int fd, const fsdp_error *why)
{
    const answer head = {FSDP_HELLO_MAGIC, (int32_t)why->status, sizeof why->text};
    fsdp_error ignored = {0};
    int64_t until_ms = fsdp_now_ms() + ANSWER_MS;
    if (fsdp_socket_send_all(fd, &head, sizeof head, until_ms, &ignored) == FSDP_OK)
        (void)!fsdp_socket_send_all(fd, why->text, sizeof why->text, until_ms, &ignored);
}

static fsdp_status check_member(const host_state *all, const fsdp_pending *pending,
                                const char *host, fsdp_error *err)
{
    const fsdp_hello *hello = &pending->hello;
    int size = all->spec->size;
    if (hello->size != size)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "rank %d (from %s) was started with a world of %d ranks, rank 0 with %d",
                         (int)hello->rank, host, (int)hello->size, size);
    if (hello->rank <= 0 || hello->rank >= size || all->fds[hello->rank] >= 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "two processes claim to be rank %d, the second one from %s; each needs a "
                         "different rank below %d",
                         (int)hello->rank, host, size);
    return FSDP_OK;
}

static fsdp_status admit(host_state *all, fsdp_pending *pending, fsdp_error *err)
{
    char host[FSDP_HOST_SIZE];
    fsdp_error other = {0};
    fsdp_socket_peer(pending->fd, host);
    if (pending->hello.purpose != FSDP_HELLO_RENDEZVOUS ||
        memcmp(pending->hello.job, all->job, sizeof all->job) != 0) {
        (void)fsdp_fail(
            &other, FSDP_ERR_USAGE,
            "another job's rendezvous listens at this address: its id differs from this job's");
        refuse(pending->fd, &other);
        fsdp_socket_close(&pending->fd);
        return FSDP_OK;
    }
    fsdp_status status = check_member(all, pending, host, err);
    if (status != FSDP_OK) {
        refuse(pending->fd, err);
        fsdp_socket_close(&pending->fd);
        return status;
    }
    all->fds[pending->hello.rank] = pending->fd;
    memcpy(all->addresses[pending->hello.rank].host, host, sizeof host);
    all->addresses[pending->hello.rank].port = pending->hello.port;
    all->here++;
    return FSDP_OK;
}

static fsdp_status admit_pending(host_state *all, fsdp_error *err)
{
    fsdp_pending pending;
    while (fsdp_listener_accept(&all->listener, &pending))
        FSDP_TRY(admit(all, &pending, err));
    return fsdp_listener_check(&all->listener, err);
}

/* A connected rank sends nothing more until it gets its answer: a readable socket has been
 * closed. */
static fsdp_status check_members(const host_state *all, fsdp_error *err)
{
    for (int rank = 1; rank < all->spec->size; rank++) {
        char byte;
        if (all->fds[rank] >= 0 && fsdp_socket_read(all->fds[rank], &byte, 1) != 0) {
            err->rank = rank;
            return fsdp_fail(err, FSDP_ERR_PEER, "rank %d left during the rendezvous", rank);
        }
    }
    return FSDP_OK;
}

static fsdp_status fail_missing(const host_state *all, fsdp_error *err)
{
    char names[MISSING_SHOWN * 12] = "";
    int n = all->spec->size - all->here, shown = 0;
    for (int rank = 1; rank < all->spec->size && shown < MISSING_SHOWN; rank++) {
        size_t used = strlen(names);
        if (all->fds[rank] >= 0)
            continue;
        err->rank = shown == 0 ? rank : err->rank;
        snprintf(names + used, sizeof names - used, "%s%d", shown++ ? ", " : "", rank);
    }
    if (n > MISSING_SHOWN)
        return fsdp_fail(err, FSDP_ERR_PEER,
                         "%d of %d ranks did not connect within %g s: %s and %d more", n,
                         all->spec->size, all->spec->deadline_ms / 1000.0, names, n - shown);
    return fsdp_fail(err, FSDP_ERR_PEER, "%s %s did not connect within %g s",
                     n > 1 ? "ranks" : "rank", names, all->spec->deadline_ms / 1000.0);
}

static fsdp_status collect_ranks(host_state *all, int64_t until_ms, fsdp_error *err)
{
    while (all->here < all->spec->size) {
        int n = fsdp_listener_poll(&all->listener, all->polled);
        for (int rank = 1; rank < all->spec->size; rank++)
            if (all->fds[rank] >= 0)
                all->polled[n++] = (struct pollfd){.fd = all->fds[rank], .events = POLLIN};
        (void)poll(all->polled, (nfds_t)n, fsdp_poll_ms(until_ms));
        FSDP_TRY(admit_pending(all, err));
        FSDP_TRY(check_members(all, err));
        if (fsdp_now_ms() >= until_ms && all->here < all->spec->size)
            return fail_missing(all, err);
    }
    return FSDP_OK;
}

/* --- rank 0 ----------------------------------------------------------------------------------- */

static fsdp_status init_host(host_state *all, fsdp_error *err)
{
    size_t size = (size_t)all->spec->size;
    all->fds = fsdp_alloc(size, sizeof *all->fds);
    all->addresses = fsdp_alloc(size, sizeof *all->addresses);
    all->polled = fsdp_alloc(size + 1 + FSDP_LISTENER_PENDING, sizeof *all->polled);
    for (size_t i = 0; all->fds && i < size; i++)
        all->fds[i] = -1;
    if (!all->fds || !all->addresses || !all->polled)
        return fsdp_fail_memory(err, "the rendezvous of the ranks");
    return FSDP_OK;
}

static fsdp_status open_listener(host_state *all, int64_t until_ms, fsdp_error *err)
{
    const fsdp_rendezvous_spec *spec = all->spec;
    if (all->listener.fd < 0)
        FSDP_TRY(listen_here(spec, spec->port, &all->listener.fd, err));
    if (!spec->publish)
        return FSDP_OK;
    return spec->publish(spec->context, fsdp_socket_port(all->listener.fd), until_ms, err);
}

static fsdp_status accept_all(const host_state *all, int64_t until_ms, fsdp_error *err)
{
    int size = all->spec->size;
    size_t bytes = (size_t)size * sizeof *all->addresses;
    const answer head = {FSDP_HELLO_MAGIC, FSDP_OK, (uint32_t)bytes};
    for (int rank = 1; rank < size; rank++) {
        fsdp_status status =
            fsdp_socket_send_all(all->fds[rank], &head, sizeof head, until_ms, err);
        if (status == FSDP_OK)
            status = fsdp_socket_send_all(all->fds[rank], all->addresses, bytes, until_ms, err);
        if (status == FSDP_OK)
            continue;
        err->rank = rank;
        return fsdp_fail(err, FSDP_ERR_PEER, "rank %d left during the rendezvous", rank);
    }
    return FSDP_OK;
}

static void end_rendezvous(host_state *all, const fsdp_error *why)
{
    for (int rank = 1; all->fds && rank < all->spec->size; rank++) {
        if (all->fds[rank] >= 0 && why->status != FSDP_OK)
            refuse(all->fds[rank], why);
        fsdp_socket_close(&all->fds[rank]);
    }
    fsdp_free(all->fds);
}

static fsdp_status host_rendezvous(const fsdp_rendezvous_spec *spec, int64_t until_ms,
                                   fsdp_ctl **ctl_out, fsdp_error *err)
{
    host_state all = {.spec = spec, .listener = {.fd = spec->listener}, .here = 1};
    digest_job(spec->job, all.job);
    fsdp_status status = init_host(&all, err);
    if (status == FSDP_OK)
        status = open_listener(&all, until_ms, err);
    if (status == FSDP_OK)
        status = collect_ranks(&all, until_ms, err);
    if (status == FSDP_OK)
        status = accept_all(&all, fsdp_now_ms() + spec->deadline_ms, err);
    fsdp_listener_release(&all.listener);
    fsdp_free(all.polled);
    fsdp_free(all.addresses);
    if (status != FSDP_OK) {
        end_rendezvous(&all, err);
        return status;
    }
    fsdp_tcp_parts parts = {.size = spec->size, .listener = -1, .fds = all.fds};
    memcpy(parts.job, all.job, sizeof parts.job);
    return fsdp_ctl_tcp(&parts, ctl_out, err);
}

/* --- other ranks ------------------------------------------------------------------------------ */

typedef struct joiner {
    const fsdp_rendezvous_spec *spec;
    char host[FSDP_HOST_SIZE]; /* of rank 0 */
    int port;
    fsdp_tcp_parts parts;
} joiner;

static bool may_help_to_wait(int errnum)
{
    return errnum == 0 || errnum == ECONNREFUSED || errnum == ETIMEDOUT || errnum == ECONNRESET ||
           errnum == EHOSTUNREACH || errnum == ENETUNREACH || errnum == EADDRNOTAVAIL;
}

static void sleep_between(int tries, int64_t until_ms)
{
    int64_t pause_ms = RETRY_MS * (int64_t)(tries + 1), left_ms = until_ms - fsdp_now_ms();
    pause_ms = pause_ms < LONGEST_RETRY_MS ? pause_ms : LONGEST_RETRY_MS;
    pause_ms = pause_ms < left_ms ? pause_ms : left_ms;
    struct timespec pause = fsdp_timespec(pause_ms > 0 ? pause_ms : 0);
    nanosleep(&pause, NULL);
}

static fsdp_status try_connect(joiner *mine, int64_t until_ms, fsdp_error *err)
{
    const fsdp_rendezvous_spec *spec = mine->spec;
    FSDP_TRY(spec->find(spec->context, mine->host, &mine->port, until_ms, err));
    return fsdp_socket_connect(mine->host, mine->port, until_ms, &mine->parts.fds[0], err);
}

/* Rank 0 may start later than this rank, within the deadline. */
static fsdp_status connect_to_host(joiner *mine, int64_t until_ms, fsdp_error *err)
{
    for (int tries = 0;; tries++) {
        fsdp_error why = {0};
        fsdp_status status = try_connect(mine, until_ms, &why);
        if (status == FSDP_OK)
            return FSDP_OK;
        if (status == FSDP_ERR_PEER && may_help_to_wait(why.errnum) && fsdp_now_ms() < until_ms) {
            sleep_between(tries, until_ms);
            continue;
        }
        *err = why;
        if (status == FSDP_ERR_PEER)
            fsdp_error_prefix(err, "rank 0 did not answer within %g s",
                              mine->spec->deadline_ms / 1000.0);
        return status;
    }
}

static fsdp_status send_hello(const joiner *mine, int64_t until_ms, fsdp_error *err)
{
    const fsdp_rendezvous_spec *spec = mine->spec;
    fsdp_hello hello =
        fsdp_hello_make(FSDP_HELLO_RENDEZVOUS, spec->rank, spec->size, 0, mine->parts.job);
    hello.port = fsdp_socket_port(mine->parts.listener);
    return fsdp_socket_send_all(mine->parts.fds[0], &hello, sizeof hello, until_ms, err);
}

static fsdp_status fail_answer(const joiner *mine, fsdp_error *err)
{
    if (err->text[0] == '\0')
        return fsdp_fail(err, FSDP_ERR_PEER,
                         "rank 0 at %s port %d did not answer within %g s: it is stuck, or another "
                         "program listens at that address",
                         mine->host, mine->port, mine->spec->deadline_ms / 1000.0);
    return fsdp_fail(err, FSDP_ERR_PEER,
                     "rank 0 at %s port %d has left before all ranks connected, or another program "
                     "listens at that address",
                     mine->host, mine->port);
}

static fsdp_status recv_refusal(const joiner *mine, int32_t reason, int64_t until_ms,
                                fsdp_error *err)
{
    fsdp_error why = {0};
    if (fsdp_socket_recv_all(mine->parts.fds[0], why.text, sizeof why.text, until_ms, err) !=
        FSDP_OK)
        return fail_answer(mine, err);
    why.text[sizeof why.text - 1] = '\0';
    return fsdp_fail(err, (fsdp_status)reason, "rank 0 at %s port %d: %s", mine->host, mine->port,
                     why.text);
}

static fsdp_status recv_answer(const joiner *mine, int64_t until_ms, fsdp_error *err)
{
    const size_t bytes = (size_t)mine->spec->size * sizeof *mine->parts.addresses;
    answer head;
    if (fsdp_socket_recv_all(mine->parts.fds[0], &head, sizeof head, until_ms, err) != FSDP_OK)
        return fail_answer(mine, err);
    bool is_known = head.magic == FSDP_HELLO_MAGIC && head.status >= 0 &&
                    head.size == (head.status == FSDP_OK ? bytes : (size_t)FSDP_ERROR_TEXT);
    if (!is_known)
        return fsdp_fail(err, FSDP_ERR_PEER,
                         "the program that answers at %s port %d is not rank 0 of fsdp", mine->host,
                         mine->port);
    if (head.status != FSDP_OK)
        return recv_refusal(mine, head.status, until_ms, err);
    if (fsdp_socket_recv_all(mine->parts.fds[0], mine->parts.addresses, bytes, until_ms, err) !=
        FSDP_OK)
        return fail_answer(mine, err);
    return FSDP_OK;
}

/* Rank 0 sees the ranks of its own host at a loopback address: replaced by rank 0's address. */
static void mend_addresses(joiner *mine)
{
    char host[FSDP_HOST_SIZE];
    fsdp_socket_peer(mine->parts.fds[0], host);
    for (int i = 1; i < mine->spec->size; i++) {
        fsdp_rank_address *address = &mine->parts.addresses[i];
        address->host[sizeof address->host - 1] = '\0';
        if (fsdp_host_is_loopback(address->host))
            memcpy(address->host, host, sizeof host);
    }
}

static fsdp_status join(joiner *mine, int64_t until_ms, fsdp_error *err)
{
    const fsdp_rendezvous_spec *spec = mine->spec;
    int64_t grace_ms = spec->deadline_ms / 5 > GRACE_MS ? spec->deadline_ms / 5 : GRACE_MS;
    mine->parts.fds = fsdp_alloc(1, sizeof *mine->parts.fds);
    mine->parts.addresses = fsdp_alloc((size_t)spec->size, sizeof *mine->parts.addresses);
    if (mine->parts.fds)
        mine->parts.fds[0] = -1;
    if (!mine->parts.fds || !mine->parts.addresses)
        return fsdp_fail_memory(err, "the rendezvous of the ranks");
    FSDP_TRY(listen_here(spec, 0, &mine->parts.listener, err));
    FSDP_TRY(connect_to_host(mine, until_ms, err));
    /* Rank 0 began earlier than this rank, and answers within its deadline. */
    until_ms = fsdp_now_ms() + spec->deadline_ms + grace_ms;
    if (send_hello(mine, until_ms, err) != FSDP_OK)
        return fail_answer(mine, err);
    FSDP_TRY(recv_answer(mine, until_ms, err));
    mend_addresses(mine);
    return FSDP_OK;
}

static fsdp_status join_rendezvous(const fsdp_rendezvous_spec *spec, int64_t until_ms,
                                   fsdp_ctl **ctl_out, fsdp_error *err)
{
    joiner mine = {.spec = spec, .parts = {.rank = spec->rank, .size = spec->size, .listener = -1}};
    digest_job(spec->job, mine.parts.job);
    fsdp_status status = join(&mine, until_ms, err);
    if (status == FSDP_OK)
        return fsdp_ctl_tcp(&mine.parts, ctl_out, err);
    release_parts(&mine.parts);
    return status;
}

fsdp_status fsdp_rendezvous(const fsdp_rendezvous_spec *spec, fsdp_ctl **ctl_out, fsdp_error *err)
{
    int64_t until_ms = fsdp_now_ms() + spec->deadline_ms;
    return spec->rank == 0 ? host_rendezvous(spec, until_ms, ctl_out, err)
                           : join_rendezvous(spec, until_ms, ctl_out, err);
}

/* --- processes that another program started ---------------------------------------------------- */

static fsdp_status find_given(void *context, char host_out[FSDP_HOST_SIZE], int *port_out,
                              int64_t until_ms, fsdp_error *err)
{
    const fsdp_connect_opts *opts = context;
    (void)until_ms;
    (void)err;
    snprintf(host_out, FSDP_HOST_SIZE, "%s", opts->host);
    *port_out = opts->port;
    return FSDP_OK;
}

static fsdp_status check_opts(const fsdp_connect_opts *opts, fsdp_error *err)
{
    if (!opts->job || !*opts->job)
        return fsdp_fail(err, FSDP_ERR_USAGE, "fsdp_ctl_connect: 'job' is empty");
    if (opts->size < 1 || opts->rank < 0 || opts->rank >= opts->size)
        return fsdp_fail(err, FSDP_ERR_USAGE, "fsdp_ctl_connect: rank %d is not below size %d",
                         opts->rank, opts->size);
    if (opts->rank > 0 && (!opts->host || strlen(opts->host) >= FSDP_HOST_SIZE))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "fsdp_ctl_connect: 'host' is missing, or longer than %d bytes",
                         FSDP_HOST_SIZE - 1);
    if (opts->rank > 0 && (opts->port < 1 || opts->port > 65535))
        return fsdp_fail(err, FSDP_ERR_USAGE, "fsdp_ctl_connect: port %d is not 1 to 65535",
                         opts->port);
    return FSDP_OK;
}

static fsdp_status connect_given(const fsdp_connect_opts *opts, int *listener, int deadline_ms,
                                 fsdp_ctl **ctl_out, fsdp_error *err)
{
    fsdp_rendezvous_spec spec = {.rank = opts->rank,
                                 .size = opts->size,
                                 .job = opts->job,
                                 .deadline_ms = deadline_ms,
                                 .listener = -1,
                                 .find = find_given,
                                 .context = (void *)(uintptr_t)opts};
    FSDP_TRY(check_opts(opts, err));
    if (opts->size == 1)
        return fsdp_ctl_self(ctl_out, err);
    if (opts->rank == 0 && fcntl(*listener, F_SETFL, O_NONBLOCK) < 0)
        return fsdp_fail_errno(err, errno, "fsdp_ctl_connect: cannot use the listener");
    if (opts->rank == 0) {
        spec.listener = *listener;
        *listener = -1;
    }
    return fsdp_rendezvous(&spec, ctl_out, err);
}

fsdp_status fsdp_ctl_connect(const fsdp_connect_opts *opts, fsdp_ctl **ctl_out, fsdp_error *err)
{
    FSDP_NEED(err, opts, ctl_out);
    fsdp_error local;
    int deadline_ms = opts->deadline_ms > 0 ? opts->deadline_ms : FSDP_CTL_DEADLINE_MS;
    int listener = opts->rank == 0 ? opts->listener : -1;
    *ctl_out = NULL;
    fsdp_status status = connect_given(opts, &listener, deadline_ms, ctl_out,
                                       err ? err : memset(&local, 0, sizeof local));
    fsdp_socket_close(&listener);
    if (status == FSDP_OK)
        fsdp_ctl_set_deadline(*ctl_out, deadline_ms);
    return status;
}
