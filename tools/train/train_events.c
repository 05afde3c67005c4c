/*
 * TensorBoard's files are records of protocol buffers: length, its checksum, the message, its checksum. A
 * message Event has wall_time (1, double), step (2, varint), and file_version (3, string) or summary (5),
 * which holds values (1) of tag (1, string) and simple_value (2, float).
 */
#include "tools/train/train_events.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct train_events {
    FILE *stream;
    char path[PATH_MAX];
};

/* --- checksums ----------------------------------------------------------------------------------- */

/* CRC-32C, bit by bit: records are small and few. */
static uint32_t crc32c(const uint8_t *data, size_t size)
{
    uint32_t crc = 0xffffffff;
    for (size_t i = 0; i < size; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return ~crc;
}

static uint32_t masked(uint32_t crc)
{
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

/* --- messages ------------------------------------------------------------------------------------ */

typedef struct message {
    uint8_t data[512];
    size_t size;
} message;

static void add_bytes(message *to, const void *data, size_t size)
{
    if (size > sizeof to->data - to->size)
        return; /* tags are short: see train_events_add */
    memcpy(to->data + to->size, data, size);
    to->size += size;
}

static void add_little(message *to, uint64_t value, int bytes)
{
    uint8_t data[8];
    for (int i = 0; i < bytes; i++)
        data[i] = (uint8_t)(value >> 8 * i);
    add_bytes(to, data, (size_t)bytes);
}

static void add_varint(message *to, uint64_t value)
{
    for (; value >= 0x80; value >>= 7)
        add_little(to, value | 0x80, 1);
    add_little(to, value, 1);
}

static void add_field(message *to, int number, const void *data, size_t size)
{
    add_varint(to, (uint64_t)number << 3 | 2);
    add_varint(to, size);
    add_bytes(to, data, size);
}

static void begin_event(message *event)
{
    struct timespec now;
    uint64_t bits;
    clock_gettime(CLOCK_REALTIME, &now);
    double seconds = (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
    memcpy(&bits, &seconds, sizeof bits);
    add_varint(event, 1 << 3 | 1);
    add_little(event, bits, 8);
}

static fsdp_status write_record(train_events *events, const message *event, fsdp_error *err)
{
    message head = {.size = 0}, tail = {.size = 0};
    add_little(&head, event->size, 8);
    add_little(&head, masked(crc32c(head.data, 8)), 4);
    add_little(&tail, masked(crc32c(event->data, event->size)), 4);
    if (fwrite(head.data, 1, head.size, events->stream) != head.size ||
        fwrite(event->data, 1, event->size, events->stream) != event->size ||
        fwrite(tail.data, 1, tail.size, events->stream) != tail.size)
        return fsdp_fail_errno(err, errno, "cannot write '%s'", events->path);
    return FSDP_OK;
}

/* --- the file ------------------------------------------------------------------------------------ */

fsdp_status train_events_open(const char *directory, train_events **events_out, fsdp_error *err)
{
    static const char version[] = "brain.Event:2";
    char host[64] = "host";
    message event = {.size = 0};
    train_events *events = calloc(1, sizeof *events);
    if (!events)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    gethostname(host, sizeof host - 1);
    snprintf(events->path, sizeof events->path, "%s/events.out.tfevents.%lld.%s.%ld", directory,
             (long long)time(NULL), host, (long)getpid());
    events->stream = fopen(events->path, "we");
    if (!events->stream) {
        fsdp_status st = fsdp_fail_errno(err, errno, "cannot create '%s'", events->path);
        free(events);
        return st;
    }
    begin_event(&event);
    add_field(&event, 3, version, sizeof version - 1);
    fsdp_status st = write_record(events, &event, err);
    if (st == FSDP_OK)
        *events_out = events;
    else
        train_events_close(events);
    return st;
}

fsdp_status train_events_add(train_events *events, int64_t step, const char *tag, double value,
                             fsdp_error *err)
{
    message event = {.size = 0}, summary = {.size = 0}, scalar = {.size = 0};
    float single = (float)value;
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    add_field(&scalar, 1, tag, strnlen(tag, 200));
    add_varint(&scalar, 2 << 3 | 5);
    add_little(&scalar, bits, 4);
    add_field(&summary, 1, scalar.data, scalar.size);
    begin_event(&event);
    add_varint(&event, 2 << 3 | 0);
    add_varint(&event, (uint64_t)step);
    add_field(&event, 5, summary.data, summary.size);
    return write_record(events, &event, err);
}

fsdp_status train_events_flush(train_events *events, fsdp_error *err)
{
    if (fflush(events->stream) != 0)
        return fsdp_fail_errno(err, errno, "cannot write '%s'", events->path);
    return FSDP_OK;
}

void train_events_close(train_events *events)
{
    if (!events)
        return;
    fclose(events->stream);
    free(events);
}
