/* See ctl_pairs.h: a message is its size, then its bytes. */
#include "tests/support/rounds/ctl_pairs.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "statedict/ctl/ctl_backend.h"

bool make_ctl_pairs(int n, int *ends_out)
{
    for (int i = 0; i < n * n; i++)
        ends_out[i] = -1;
    for (int i = 0; i < n; i++) {
        for (int j = 0; j < i; j++) {
            int pair[2];
            if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0)
                return false;
            ends_out[i * n + j] = pair[0];
            ends_out[j * n + i] = pair[1];
        }
    }
    return true;
}

void close_ctl_pairs(int n, const int *ends)
{
    for (int i = 0; i < n * n; i++) {
        if (ends[i] >= 0)
            close(ends[i]);
    }
}

static bool wait_for(int fd, short what, int64_t until_ms)
{
    struct pollfd look = {.fd = fd, .events = what};
    int64_t left_ms = until_ms - fsdp_now_ms();
    return poll(&look, 1, left_ms > 0 ? (int)left_ms : 0) > 0;
}

static fsdp_status fail_gone(int rank, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_PEER, "rank %d has left", rank);
}

static fsdp_status put_bytes(int fd, int to, const void *data, size_t size, int64_t until_ms,
                             fsdp_error *err)
{
    for (const char *at = data; size > 0;) {
        ssize_t put = send(fd, at, size, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (put < 0 && errno != EAGAIN)
            return fail_gone(to, err);
        if (put < 0 && !wait_for(fd, POLLOUT, until_ms))
            return fsdp_ctl_fail_late(err);
        at += put > 0 ? put : 0;
        size -= put > 0 ? (size_t)put : 0;
    }
    return FSDP_OK;
}

static fsdp_status take_bytes(int fd, int from, void *data, size_t size, int64_t until_ms,
                              fsdp_error *err)
{
    for (char *at = data; size > 0;) {
        ssize_t got = recv(fd, at, size, MSG_DONTWAIT);
        if (got == 0 || (got < 0 && errno != EAGAIN))
            return fail_gone(from, err);
        if (got < 0 && !wait_for(fd, POLLIN, until_ms))
            return fsdp_ctl_fail_late(err);
        at += got > 0 ? got : 0;
        size -= got > 0 ? (size_t)got : 0;
    }
    return FSDP_OK;
}

/* Finishes a message that has begun; the rest of half a message would be read as the next one's begin. */
static int64_t until_finished(int64_t until_ms)
{
    int64_t finished_ms = fsdp_now_ms() + 10000;
    return until_ms > finished_ms ? until_ms : finished_ms;
}

static fsdp_status send_message(fsdp_ctl *ctl, int to, const void *data, size_t size,
                                int64_t until_ms, fsdp_error *err)
{
    const int *ends = ctl->backend;
    uint64_t head = size;
    FSDP_TRY(put_bytes(ends[to], to, &head, sizeof head, until_ms, err));
    return put_bytes(ends[to], to, data, size, until_finished(until_ms), err);
}

static fsdp_status recv_message(fsdp_ctl *ctl, int from, void *data, size_t size, int64_t until_ms,
                                fsdp_error *err)
{
    const int *ends = ctl->backend;
    uint64_t head = 0;
    FSDP_TRY(take_bytes(ends[from], from, &head, sizeof head, until_ms, err));
    void *came = head <= FSDP_CTL_PIECE ? malloc((size_t)head) : NULL;
    if (!came)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "no memory for the test");
    fsdp_status status =
        take_bytes(ends[from], from, came, (size_t)head, until_finished(until_ms), err);
    if (status == FSDP_OK)
        status =
            fsdp_ctl_hand_over(ctl, from, (fsdp_ctl_bytes){came, (size_t)head}, data, size, err);
    free(came);
    return status;
}

static void close_ends(fsdp_ctl *ctl)
{
    int *ends = ctl->backend;
    for (int i = 0; i < ctl->size; i++) {
        if (ends[i] >= 0)
            close(ends[i]);
    }
    free(ends);
}

static const fsdp_ctl_ops pair_ops = {
    .name = "pairs", .send = send_message, .recv = recv_message, .close = close_ends};

fsdp_status take_ctl_pairs(int n, int rank, const int *ends, fsdp_ctl **ctl_out, fsdp_error *err)
{
    int *own = calloc((size_t)n, sizeof *own);
    if (!own)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "no memory for the test");
    for (int i = 0; i < n * n; i++) {
        if (i / n == rank)
            own[i % n] = ends[i];
        else if (ends[i] >= 0)
            close(ends[i]);
    }
    return fsdp_ctl_create(&pair_ops, rank, n, own, ctl_out, err);
}
