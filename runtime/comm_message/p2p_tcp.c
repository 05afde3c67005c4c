/*
 * Point-to-point messages over TCP: one connection with every other rank carries all channels.
 * Sockets are served inside of test and back_off, on the caller's thread. See p2p_tcp_internal.h.
 */
#include "runtime/comm_message/p2p_tcp_internal.h"
#include "base/core/clock.h"
#include "base/core/mem.h"
#include "runtime/bootstrap/ctl_tcp.h"
#include "runtime/bootstrap/socket.h"

#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

/* === connecting =============================================================================== */

/*
 * Connects every pair of ranks: each rank connects to those before it and accepts those after it.
 *
 * Ranks connect in batches no larger than a listener's backlog, because a rank accepts only after
 * its own connects. All ranks agree on the outcome of the connects before any rank waits to accept:
 * the rank that could not connect reports the reason at once.
 */

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

/* === frames of one connection ================================================================= */

/* Writes and reads frames on the connection with one rank, without waiting. */

/* It precedes everything that is sent. */
typedef struct tcp_frame {
    uint32_t kind, size;
    int32_t channel;
} tcp_frame;

typedef struct tcp_room {
    int channel, count; /* posted receives of the other rank */
} tcp_room;

typedef struct tcp_status {
    struct tcp_status *next;
    size_t size;
    unsigned char data[FSDP_P2P_STATUS];
} tcp_status;

/* The connection with one rank. */
typedef struct tcp_stream {
    int fd;                         /* -1: this rank itself, or the connection has ended */
    bool lacks_memory;              /* the reason of that */
    char place[FSDP_PLACE_SIZE];    /* the other end */
    tcp_transfer *sends, *receives; /* the oldest first */
    /* Small frames wait here, and go before those of data. */
    unsigned char *small;
    size_t small_at, small_end, small_room;
    tcp_transfer *sending; /* its frame has begun */
    tcp_frame out;
    size_t out_at; /* of frame and data */
    tcp_frame in;
    size_t in_at;
    tcp_transfer *receiving;
    tcp_status *receiving_status;
    tcp_room *rooms;
    size_t room_count, room_capacity;
} tcp_stream;

static void finish(tcp_transfer *transfer)
{
    tcp_batch *batch = transfer->batch;
    transfer->batch = NULL;
    batch->finished[batch->finished_count++] = transfer->piece.place;
}

static tcp_transfer *take_from(tcp_transfer **list, tcp_transfer *wanted)
{
    while (*list && *list != wanted)
        list = &(*list)->next;
    if (*list)
        *list = wanted->next;
    return wanted;
}

/* --- receive room of the peer ----------------------------------------------------------------- */

static tcp_room *find_room(tcp_stream *stream, int channel)
{
    for (size_t i = 0; i < stream->room_count; i++) {
        if (stream->rooms[i].channel == channel)
            return &stream->rooms[i];
    }
    return NULL;
}

static bool note_room(tcp_stream *stream, int channel)
{
    tcp_room *room = find_room(stream, channel);
    if (!room) {
        if (!fsdp_grow(&stream->rooms, &stream->room_capacity, stream->room_count + 1,
                       sizeof *stream->rooms))
            return false;
        room = &stream->rooms[stream->room_count++];
        *room = (tcp_room){.channel = channel};
    }
    room->count++;
    return true;
}

/* The oldest send for which the other rank has posted a receive. */
static tcp_transfer *next_send(const tcp_stream *stream, tcp_room **room_out)
{
    for (tcp_transfer *at = stream->sends; at; at = at->next) {
        *room_out = find_room((tcp_stream *)stream, at->piece.channel);
        if (*room_out && (*room_out)->count > 0)
            return at;
    }
    return NULL;
}

/* --- sending ---------------------------------------------------------------------------------- */

/* data: the frame->size bytes after the frame; NULL: none. False when there is no memory. */
static bool tcp_stream_put_small(tcp_stream *stream, const tcp_frame *frame, const void *data)
{
    size_t size = sizeof *frame + frame->size;
    if (stream->small_at == stream->small_end)
        stream->small_at = stream->small_end = 0;
    if (!fsdp_grow(&stream->small, &stream->small_room, stream->small_end + size, 1))
        return false;
    memcpy(stream->small + stream->small_end, frame, sizeof *frame);
    if (data)
        memcpy(stream->small + stream->small_end + sizeof *frame, data, frame->size);
    stream->small_end += size;
    return true;
}

/* True when it has something to write now. */
static bool tcp_stream_wants_out(const tcp_stream *stream)
{
    tcp_room *room;
    return stream->fd >= 0 &&
           (stream->sending || stream->small_at < stream->small_end || next_send(stream, &room));
}

/* Bytes written; negative: none, and the socket takes no more now. */
static ssize_t write_some(tcp_stream *stream, const void *data, size_t size)
{
    ssize_t n = fsdp_socket_write(stream->fd, data, size);
    if (n < 0)
        fsdp_socket_close(&stream->fd);
    return n > 0 ? n : -1;
}

static bool write_small(tcp_stream *stream)
{
    ssize_t n =
        write_some(stream, stream->small + stream->small_at, stream->small_end - stream->small_at);
    stream->small_at += n > 0 ? (size_t)n : 0;
    return n > 0;
}

static bool begin_send(tcp_stream *stream)
{
    tcp_room *room;
    tcp_transfer *next = next_send(stream, &room);
    if (!next)
        return false;
    room->count--;
    stream->sending = take_from(&stream->sends, next);
    stream->out = (tcp_frame){FRAME_DATA, (uint32_t)next->piece.size, next->piece.channel};
    stream->out_at = 0;
    return true;
}

static bool write_data(tcp_stream *stream)
{
    tcp_transfer *now = stream->sending;
    size_t at = stream->out_at, head = sizeof stream->out;
    ssize_t n = at < head ? write_some(stream, (const unsigned char *)&stream->out + at, head - at)
                          : write_some(stream, now->piece.data + (at - head),
                                       now->piece.size - (at - head));
    stream->out_at += n > 0 ? (size_t)n : 0;
    if (stream->out_at == head + now->piece.size) {
        stream->sending = NULL;
        finish(now);
    }
    return n > 0;
}

/* Transfer without waiting. An ended connection is closed. */
static void tcp_stream_write(tcp_stream *stream)
{
    bool goes_on = stream->fd >= 0;
    while (goes_on) {
        if (stream->sending)
            goes_on = write_data(stream);
        else if (stream->small_at < stream->small_end)
            goes_on = write_small(stream);
        else
            goes_on = begin_send(stream);
    }
}

/* --- receiving -------------------------------------------------------------------------------- */

static tcp_transfer *find_receive(const tcp_stream *stream, int channel)
{
    tcp_transfer *at = stream->receives;
    while (at && at->piece.channel != channel)
        at = at->next;
    return at;
}

/* Prepares to receive the frame whose head has arrived. False: it is invalid. */
static bool begin_frame(tcp_stream *stream)
{
    const tcp_frame *frame = &stream->in;
    if (frame->kind == FRAME_ROOM && frame->size == 0) {
        stream->lacks_memory = !note_room(stream, frame->channel);
        return !stream->lacks_memory;
    }
    if (frame->kind == FRAME_STATUS && frame->size <= FSDP_P2P_STATUS) {
        stream->receiving_status = fsdp_alloc(1, sizeof(tcp_status));
        stream->lacks_memory = !stream->receiving_status;
        return !stream->lacks_memory;
    }
    tcp_transfer *receive = find_receive(stream, frame->channel);
    if (frame->kind != FRAME_DATA || !receive || receive->piece.size != frame->size)
        return false;
    stream->receiving = take_from(&stream->receives, receive);
    return true;
}

static void end_frame(tcp_stream *stream, tcp_status **statuses)
{
    if (stream->receiving)
        finish(stream->receiving);
    if (stream->receiving_status) {
        while (*statuses)
            statuses = &(*statuses)->next;
        stream->receiving_status->size = stream->in.size;
        *statuses = stream->receiving_status;
    }
    stream->receiving = NULL;
    stream->receiving_status = NULL;
    stream->in_at = 0;
}

static bool read_some(tcp_stream *stream, void *data, size_t size)
{
    ssize_t n = fsdp_socket_read(stream->fd, data, size);
    if (n < 0)
        fsdp_socket_close(&stream->fd);
    stream->in_at += n > 0 ? (size_t)n : 0;
    return n > 0;
}

static bool read_frame(tcp_stream *stream, tcp_status **statuses)
{
    const size_t head = sizeof stream->in;
    bool goes_on = true;
    if (stream->in_at < head) {
        goes_on =
            read_some(stream, (unsigned char *)&stream->in + stream->in_at, head - stream->in_at);
        if (stream->in_at == head && !begin_frame(stream)) {
            fsdp_socket_close(&stream->fd);
            return false;
        }
    } else {
        unsigned char *to =
            stream->receiving ? stream->receiving->piece.data : stream->receiving_status->data;
        goes_on =
            read_some(stream, to + (stream->in_at - head), head + stream->in.size - stream->in_at);
    }
    if (stream->in_at >= head && stream->in_at == head + stream->in.size)
        end_frame(stream, statuses);
    return goes_on;
}

static void tcp_stream_read(tcp_stream *stream, tcp_status **statuses)
{
    while (stream->fd >= 0 && read_frame(stream, statuses))
        ;
}

static void tcp_stream_release(tcp_stream *stream)
{
    fsdp_socket_close(&stream->fd);
    fsdp_free(stream->receiving_status);
    fsdp_free(stream->small);
    fsdp_free(stream->rooms);
}

/* === batches, transfers, status messages ====================================================== */

enum { YIELDS = 20, REST_MS = 2, FLUSH_MS = 1000 };

typedef struct tcp_p2p {
    fsdp_p2p p2p;
    pthread_mutex_t lock;
    int rank, size;
    tcp_stream *streams;   /* by rank */
    struct pollfd *polled; /* for back_off, which polls outside the lock */
    tcp_status *statuses;
    tcp_batch *given_up; /* streams may still use them */
} tcp_p2p;

static fsdp_status may_call(fsdp_p2p *p2p, fsdp_error *err)
{
    (void)p2p;
    (void)err;
    return FSDP_OK;
}

/* --- batches ---------------------------------------------------------------------------------- */

static void free_batch(tcp_batch *batch)
{
    if (!batch)
        return;
    fsdp_free(batch->batch.memory);
    fsdp_free(batch->transfers);
    fsdp_free(batch->finished);
    fsdp_free(batch);
}

static fsdp_status create_batch(fsdp_p2p *p2p, int places, size_t size, fsdp_p2p_batch **batch_out,
                                fsdp_error *err)
{
    (void)p2p;
    tcp_batch *made = fsdp_alloc(1, sizeof *made);
    if (made) {
        made->batch = (fsdp_p2p_batch){fsdp_alloc_pages(size), places};
        made->transfers = fsdp_alloc((size_t)places, sizeof *made->transfers);
        made->finished = fsdp_alloc((size_t)places, sizeof *made->finished);
    }
    if (!made || !made->batch.memory || !made->transfers || !made->finished) {
        free_batch(made);
        return fsdp_fail_memory(err, "messages between ranks");
    }
    *batch_out = &made->batch;
    return FSDP_OK;
}

static bool is_idle(const tcp_batch *batch)
{
    bool idle = true;
    for (int i = 0; i < batch->batch.places; i++)
        idle &= batch->transfers[i].batch == NULL;
    return idle;
}

/* A batch that a stream still uses, after a failure, is freed when the p2p closes. */
static void close_batch(fsdp_p2p *p2p, fsdp_p2p_batch *closed)
{
    tcp_p2p *mine = (tcp_p2p *)p2p;
    tcp_batch *batch = (tcp_batch *)closed;
    pthread_mutex_lock(&mine->lock);
    if (is_idle(batch)) {
        free_batch(batch);
    } else {
        batch->next = mine->given_up;
        mine->given_up = batch;
    }
    pthread_mutex_unlock(&mine->lock);
}

/* --- transfers -------------------------------------------------------------------------------- */

static void append(tcp_transfer **list, tcp_transfer *transfer)
{
    while (*list)
        list = &(*list)->next;
    *list = transfer;
}

static tcp_transfer *place_transfer(fsdp_p2p_batch *to, const fsdp_p2p_transfer *piece)
{
    tcp_batch *batch = (tcp_batch *)to;
    tcp_transfer *transfer = &batch->transfers[piece->place];
    *transfer = (tcp_transfer){.batch = batch, .piece = *piece};
    return transfer;
}

static fsdp_status send_piece(fsdp_p2p *p2p, fsdp_p2p_batch *batch, const fsdp_p2p_transfer *piece,
                              fsdp_error *err)
{
    tcp_p2p *mine = (tcp_p2p *)p2p;
    tcp_stream *stream = &mine->streams[piece->peer];
    (void)err;
    pthread_mutex_lock(&mine->lock);
    append(&stream->sends, place_transfer(batch, piece));
    tcp_stream_write(stream);
    pthread_mutex_unlock(&mine->lock);
    return FSDP_OK;
}

static fsdp_status receive_piece(fsdp_p2p *p2p, fsdp_p2p_batch *batch,
                                 const fsdp_p2p_transfer *piece, fsdp_error *err)
{
    tcp_p2p *mine = (tcp_p2p *)p2p;
    tcp_stream *stream = &mine->streams[piece->peer];
    const tcp_frame frame = {FRAME_ROOM, 0, piece->channel};
    pthread_mutex_lock(&mine->lock);
    bool fits = tcp_stream_put_small(stream, &frame, NULL);
    if (fits) {
        append(&stream->receives, place_transfer(batch, piece));
        tcp_stream_write(stream);
    }
    pthread_mutex_unlock(&mine->lock);
    return fits ? FSDP_OK : fsdp_fail_memory(err, "messages between ranks");
}

/* False when a connection has ended because there was no memory. */
static bool work(tcp_p2p *mine)
{
    bool has_memory = true;
    for (int i = 0; i < mine->size; i++) {
        tcp_stream_read(&mine->streams[i], &mine->statuses);
        tcp_stream_write(&mine->streams[i]);
        has_memory &= !mine->streams[i].lacks_memory;
    }
    return has_memory;
}

static fsdp_status test_batch(fsdp_p2p *p2p, fsdp_p2p_batch *tested, int *finished, int *count_out,
                              fsdp_error *err)
{
    tcp_p2p *mine = (tcp_p2p *)p2p;
    tcp_batch *batch = (tcp_batch *)tested;
    pthread_mutex_lock(&mine->lock);
    bool lacks_memory = !work(mine);
    *count_out = batch->finished_count;
    memcpy(finished, batch->finished, (size_t)batch->finished_count * sizeof *finished);
    batch->finished_count = 0;
    pthread_mutex_unlock(&mine->lock);
    return lacks_memory ? fsdp_fail_memory(err, "messages between ranks") : FSDP_OK;
}

/* --- status ----------------------------------------------------------------------------------- */

static void send_status(fsdp_p2p *p2p, int to, const void *status, size_t size)
{
    tcp_p2p *mine = (tcp_p2p *)p2p;
    const tcp_frame frame = {FRAME_STATUS, (uint32_t)size, 0};
    pthread_mutex_lock(&mine->lock);
    if (tcp_stream_put_small(&mine->streams[to], &frame, status))
        tcp_stream_write(&mine->streams[to]);
    pthread_mutex_unlock(&mine->lock);
}

static bool recv_status(fsdp_p2p *p2p, void *status, size_t size)
{
    tcp_p2p *mine = (tcp_p2p *)p2p;
    pthread_mutex_lock(&mine->lock);
    if (!mine->statuses)
        (void)work(mine);
    tcp_status *first = mine->statuses;
    bool fits = first && first->size == size;
    if (first) {
        mine->statuses = first->next;
        if (fits)
            memcpy(status, first->data, size);
        fsdp_free(first);
    }
    pthread_mutex_unlock(&mine->lock);
    return fits;
}

static bool is_disconnected(fsdp_p2p *p2p, int rank)
{
    tcp_p2p *mine = (tcp_p2p *)p2p;
    pthread_mutex_lock(&mine->lock);
    bool is_lost = rank != mine->rank && mine->streams[rank].fd < 0;
    pthread_mutex_unlock(&mine->lock);
    return is_lost;
}

static void locate(fsdp_p2p *p2p, int rank, char *out, size_t out_size)
{
    snprintf(out, out_size, "%s", ((const tcp_p2p *)p2p)->streams[rank].place);
}

/* --- backing off ------------------------------------------------------------------------------ */

static int watch(const tcp_p2p *mine, struct pollfd *polled)
{
    int n = 0;
    for (int i = 0; i < mine->size; i++) {
        const tcp_stream *stream = &mine->streams[i];
        short events = tcp_stream_wants_out(stream) ? POLLIN | POLLOUT : POLLIN;
        if (stream->fd >= 0)
            polled[n++] = (struct pollfd){.fd = stream->fd, .events = events};
    }
    return n;
}

/* When several threads back off, one of them polls the sockets and the others sleep. */
static void back_off(fsdp_p2p *p2p, int idle)
{
    tcp_p2p *mine = (tcp_p2p *)p2p;
    if (idle < YIELDS) {
        sched_yield();
        return;
    }
    pthread_mutex_lock(&mine->lock);
    struct pollfd *polled = mine->polled;
    mine->polled = NULL;
    int n = polled ? watch(mine, polled) : 0;
    pthread_mutex_unlock(&mine->lock);
    (void)poll(polled, (nfds_t)n, REST_MS);
    if (!polled)
        return;
    pthread_mutex_lock(&mine->lock);
    mine->polled = polled;
    pthread_mutex_unlock(&mine->lock);
}

/* --- creation and end ------------------------------------------------------------------------- */

static bool wants_out(const tcp_p2p *mine)
{
    bool wants = false;
    for (int i = 0; i < mine->size; i++)
        wants |= mine->streams[i].fd >= 0 && mine->streams[i].small_at < mine->streams[i].small_end;
    return wants;
}

/* Sends what is queued. Also reads what has arrived, because closing a socket with unread data
 * makes the kernel discard what was sent last. */
static void flush(tcp_p2p *mine)
{
    int64_t until_ms = fsdp_now_ms() + FLUSH_MS;
    (void)work(mine);
    while (wants_out(mine) && fsdp_now_ms() < until_ms) {
        int n = watch(mine, mine->polled);
        (void)poll(mine->polled, (nfds_t)n, REST_MS);
        (void)work(mine);
    }
}

static void free_p2p(tcp_p2p *mine)
{
    for (int i = 0; mine->streams && i < mine->size; i++)
        tcp_stream_release(&mine->streams[i]);
    while (mine->given_up) {
        tcp_batch *next = mine->given_up->next;
        free_batch(mine->given_up);
        mine->given_up = next;
    }
    while (mine->statuses) {
        tcp_status *next = mine->statuses->next;
        fsdp_free(mine->statuses);
        mine->statuses = next;
    }
    fsdp_free(mine->streams);
    fsdp_free(mine->polled);
    pthread_mutex_destroy(&mine->lock);
    fsdp_free(mine);
}

static void close_p2p(fsdp_p2p *p2p)
{
    flush((tcp_p2p *)p2p);
    free_p2p((tcp_p2p *)p2p);
}

static const fsdp_p2p_ops tcp_p2p_ops = {
    .name = "tcp",
    .channels = INT32_MAX,
    .may_call = may_call,
    .batch_create = create_batch,
    .send = send_piece,
    .recv = receive_piece,
    .test = test_batch,
    .batch_close = close_batch,
    .send_status = send_status,
    .recv_status = recv_status,
    .is_disconnected = is_disconnected,
    .locate = locate,
    .back_off = back_off,
    .close = close_p2p,
};

static fsdp_status make_p2p(int rank, int size, tcp_p2p **p2p_out, fsdp_error *err)
{
    tcp_p2p *mine = fsdp_alloc(1, sizeof *mine);
    if (!mine || pthread_mutex_init(&mine->lock, NULL) != 0) {
        fsdp_free(mine);
        return fsdp_fail_memory(err, "messages over TCP");
    }
    mine->p2p.ops = &tcp_p2p_ops;
    mine->rank = rank;
    mine->size = size;
    mine->streams = fsdp_alloc((size_t)size, sizeof *mine->streams);
    mine->polled = fsdp_alloc((size_t)size, sizeof *mine->polled);
    for (int i = 0; mine->streams && i < size; i++)
        mine->streams[i].fd = -1;
    if (mine->streams && mine->polled) {
        *p2p_out = mine;
        return FSDP_OK;
    }
    free_p2p(mine);
    return fsdp_fail_memory(err, "messages over TCP");
}

fsdp_status fsdp_p2p_tcp(fsdp_ctl *ctl, int deadline_ms, fsdp_p2p **p2p_out, fsdp_error *err)
{
    int size = fsdp_ctl_size(ctl);
    tcp_p2p *mine = NULL;
    int *fds = fsdp_alloc((size_t)size, sizeof *fds);
    fsdp_status status = fds ? make_p2p(fsdp_ctl_rank(ctl), size, &mine, err)
                             : fsdp_fail_memory(err, "messages over TCP");
    for (int i = 0; fds && i < size; i++)
        fds[i] = -1;
    status = fsdp_ctl_agree(ctl, status, err);
    if (status == FSDP_OK)
        status = fsdp_tcp_connect_all(ctl, deadline_ms, fds, err);
    for (int i = 0; mine && i < size; i++) {
        mine->streams[i].fd = fds[i];
        fsdp_socket_place(fds[i], mine->streams[i].place);
    }
    fsdp_free(fds);
    if (status == FSDP_OK)
        *p2p_out = &mine->p2p;
    else if (mine)
        free_p2p(mine);
    return status;
}
