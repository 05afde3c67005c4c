/*
 * Point-to-point messages over TCP: one connection with every other rank carries all channels.
 * Sockets are served inside of test and back_off, on the caller's thread. See p2p_tcp_internal.h.
 */
#include "runtime/comm_message/p2p_tcp_internal.h"

#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "base/core/clock.h"
#include "base/core/mem.h"

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
    fsdp_tcp_stream_write(stream);
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
    bool fits = fsdp_tcp_stream_put_small(stream, &frame, NULL);
    if (fits) {
        append(&stream->receives, place_transfer(batch, piece));
        fsdp_tcp_stream_write(stream);
    }
    pthread_mutex_unlock(&mine->lock);
    return fits ? FSDP_OK : fsdp_fail_memory(err, "messages between ranks");
}

/* False when a connection has ended because there was no memory. */
static bool work(tcp_p2p *mine)
{
    bool has_memory = true;
    for (int i = 0; i < mine->size; i++) {
        fsdp_tcp_stream_read(&mine->streams[i], &mine->statuses);
        fsdp_tcp_stream_write(&mine->streams[i]);
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
    if (fsdp_tcp_stream_put_small(&mine->streams[to], &frame, status))
        fsdp_tcp_stream_write(&mine->streams[to]);
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
        short events = fsdp_tcp_stream_wants_out(stream) ? POLLIN | POLLOUT : POLLIN;
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
        fsdp_tcp_stream_release(&mine->streams[i]);
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
