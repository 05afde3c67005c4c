/*
 * The control plane's back end over TCP: one message is its size and its bytes on a stream. See
 * ctl_tcp.h.
 *
 * A message that was sent or received in part at its deadline stays with its link, and the next
 * call continues it: the stream keeps its message bounds after any failure, and a leave message
 * still arrives.
 */
#include "runtime/bootstrap/ctl_tcp.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/core/mem.h"
#include "statedict/ctl/ctl_backend.h"

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

void fsdp_tcp_parts_release(fsdp_tcp_parts *parts)
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
        fsdp_tcp_parts_release(&mine);
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
