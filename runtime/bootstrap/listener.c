/* Accepts connections and reads their hellos. See listener.h. */
#include "runtime/bootstrap/listener.h"

#include <errno.h>
#include <string.h>

#include "runtime/bootstrap/socket.h"

enum { SILENCE_MS = 20, CLOSED_AT_ONCE = 2 };

fsdp_hello fsdp_hello_make(fsdp_hello_purpose purpose, int rank, int size, int to,
                           const uint8_t job[FSDP_SHA256_SIZE])
{
    fsdp_hello hello = {
        .magic = FSDP_HELLO_MAGIC, .purpose = purpose, .rank = rank, .size = size, .to = to};
    memcpy(hello.job, job, sizeof hello.job);
    return hello;
}

bool fsdp_hello_is_for(const fsdp_hello *hello, fsdp_hello_purpose purpose, int rank, int size,
                       const uint8_t job[FSDP_SHA256_SIZE])
{
    return hello->purpose == purpose && hello->size == size && hello->to == rank &&
           hello->rank >= 0 && hello->rank < size && hello->rank != rank &&
           memcmp(hello->job, job, sizeof hello->job) == 0;
}

/* --- pending connections ---------------------------------------------------------------------- */

/* The first whose hello is complete; count: there is none. */
static int find_complete(const fsdp_listener *listener)
{
    int idx = 0;
    while (idx < listener->count && listener->pending[idx].got < sizeof(fsdp_hello))
        idx++;
    return idx;
}

static void drop(fsdp_listener *listener, int idx)
{
    fsdp_pending *pending = listener->pending;
    listener->count--;
    memmove(&pending[idx], &pending[idx + 1], (size_t)(listener->count - idx) * sizeof *pending);
}

static void reject(fsdp_listener *listener, int idx)
{
    fsdp_socket_close(&listener->pending[idx].fd);
    drop(listener, idx);
}

void fsdp_listener_release(fsdp_listener *listener)
{
    while (listener->count > 0)
        reject(listener, 0);
    fsdp_socket_close(&listener->fd);
}

/* False when it does not begin with a hello. The first bytes decide: an HTTP client waits for an
 * answer, and would never send as many bytes as a hello has. */
static bool read_hello(fsdp_pending *pending)
{
    static const uint32_t magic = FSDP_HELLO_MAGIC;
    size_t left = sizeof pending->hello - pending->got;
    ssize_t n =
        left > 0 ? fsdp_socket_read(pending->fd, (char *)&pending->hello + pending->got, left) : 0;
    if (n < 0)
        return false;
    pending->got += (size_t)n;
    return memcmp(&pending->hello, &magic,
                  pending->got < sizeof magic ? pending->got : sizeof magic) == 0;
}

/* --- accepting -------------------------------------------------------------------------------- */

int fsdp_listener_poll(const fsdp_listener *listener, struct pollfd *polled)
{
    int n = 0;
    if (listener->fd < 0)
        return 0;
    polled[n++] = (struct pollfd){.fd = listener->fd, .events = POLLIN};
    for (int i = 0; i < listener->count; i++)
        polled[n++] = (struct pollfd){.fd = listener->pending[i].fd, .events = POLLIN};
    return n;
}

void fsdp_listener_wait(const fsdp_listener *listener, int64_t until_ms)
{
    struct pollfd polled[1 + FSDP_LISTENER_PENDING];
    (void)poll(polled, (nfds_t)fsdp_listener_poll(listener, polled), fsdp_poll_ms(until_ms));
}

/* A rank sends its hello at once: connections that are all silent for a while are not from ranks.
 * Two are closed, because the next connection may bring a descriptor along. */
static void close_silent(fsdp_listener *listener)
{
    struct pollfd polled[1 + FSDP_LISTENER_PENDING];
    int n = fsdp_listener_poll(listener, polled);
    if (n <= 1 || poll(polled + 1, (nfds_t)(n - 1), SILENCE_MS) > 0)
        return;
    for (int i = 0; i < CLOSED_AT_ONCE && listener->count > 0; i++)
        reject(listener, 0);
}

/* At most as many at once as can be pending: others than ranks may connect without end. */
static void accept_new(fsdp_listener *listener)
{
    for (int accepted = 0; accepted < FSDP_LISTENER_PENDING; accepted++) {
        int fd = fsdp_socket_accept(listener->fd), failed = fd < 0 ? errno : 0;
        bool lacks = failed == EMFILE || failed == ENFILE || failed == ENOBUFS || failed == ENOMEM;
        listener->lacks = lacks && listener->count == 0 ? failed : 0;
        if (lacks)
            close_silent(listener);
        if (fd < 0)
            return;
        if (listener->count == FSDP_LISTENER_PENDING)
            reject(listener, 0);
        fsdp_pending *pending = &listener->pending[listener->count++];
        *pending = (fsdp_pending){.fd = fd};
        bool is_allowed = !listener->allows || listener->allows(fd);
        if (!is_allowed || !read_hello(pending))
            reject(listener, listener->count - 1);
        else if (pending->got == sizeof pending->hello)
            return; /* the caller takes it before newer connections push it out */
    }
}

static void serve(fsdp_listener *listener)
{
    for (int i = listener->count - 1; i >= 0; i--)
        if (!read_hello(&listener->pending[i]))
            reject(listener, i);
    if (find_complete(listener) == listener->count)
        accept_new(listener);
}

bool fsdp_listener_accept(fsdp_listener *listener, fsdp_pending *pending_out)
{
    if (listener->fd < 0)
        return false;
    serve(listener);
    int idx = find_complete(listener);
    if (idx == listener->count)
        return false;
    *pending_out = listener->pending[idx];
    drop(listener, idx);
    return true;
}

fsdp_status fsdp_listener_check(const fsdp_listener *listener, fsdp_error *err)
{
    if (listener->lacks == 0)
        return FSDP_OK;
    if (listener->lacks != EMFILE)
        return fsdp_fail_errno(err, listener->lacks, "cannot accept connections of other ranks");
    return fsdp_fail(err, FSDP_ERR_LIMIT,
                     "cannot open connections with all other ranks: the limit of open files is "
                     "reached; raise `ulimit -n`");
}
