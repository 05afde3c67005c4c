/* Writes and reads frames on the connection with one rank, without waiting. See
 * p2p_tcp_internal.h. */
#include "runtime/comm_message/p2p_tcp_internal.h"

#include <string.h>

#include "base/core/mem.h"
#include "runtime/bootstrap/socket.h"

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

bool fsdp_tcp_stream_put_small(tcp_stream *stream, const tcp_frame *frame, const void *data)
{
    size_t size = sizeof *frame + frame->size;
    if (stream->small_at == stream->small_end)
        stream->small_at = stream->small_end = 0;
    if (!fsdp_grow(&stream->small, &stream->small_room, stream->small_end + size, 1))
        return false;
    memcpy(stream->small + stream->small_end, frame, sizeof *frame);
    if (frame->size > 0)
        memcpy(stream->small + stream->small_end + sizeof *frame, data, frame->size);
    stream->small_end += size;
    return true;
}

bool fsdp_tcp_stream_wants_out(const tcp_stream *stream)
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

void fsdp_tcp_stream_write(tcp_stream *stream)
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

void fsdp_tcp_stream_read(tcp_stream *stream, tcp_status **statuses)
{
    while (stream->fd >= 0 && read_frame(stream, statuses))
        ;
}

void fsdp_tcp_stream_release(tcp_stream *stream)
{
    fsdp_socket_close(&stream->fd);
    fsdp_free(stream->receiving_status);
    fsdp_free(stream->small);
    fsdp_free(stream->rooms);
}
