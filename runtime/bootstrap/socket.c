/*
 * Sockets with deadlines, and the loop that accepts connections and reads their hellos. See socket.h and
 * listener.h. It owns netdb.h and netinet.
 */
#include "runtime/bootstrap/socket.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "runtime/bootstrap/listener.h"
#include "statedict/ctl/ctl_backend.h"

enum { BACKLOG = 1024, SOCKET_FLAGS = SOCK_NONBLOCK | SOCK_CLOEXEC };

/* === sockets ================================================================================== */

/* --- waiting ---------------------------------------------------------------------------------- */

int fsdp_poll_ms(int64_t until_ms)
{
    int64_t left_ms = until_ms - fsdp_now_ms();
    return left_ms <= 0 ? 0 : left_ms > INT32_MAX ? INT32_MAX : (int)left_ms;
}

bool fsdp_socket_wait(int fd, short events, int64_t until_ms)
{
    struct pollfd one = {.fd = fd, .events = events};
    for (;;) {
        if (poll(&one, 1, fsdp_poll_ms(until_ms)) > 0)
            return true;
        if (fsdp_now_ms() >= until_ms)
            return false;
    }
}

/* --- addresses -------------------------------------------------------------------------------- */

/* AI_PASSIVE and no host: every interface. The error's errno is 0 when there is no such name
 * (yet). */
static fsdp_status resolve(const char *host, int port, int flags, struct addrinfo **found_out,
                           fsdp_error *err)
{
    struct addrinfo hints = {
        .ai_flags = flags | AI_NUMERICSERV, .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    char service[16];
    snprintf(service, sizeof service, "%d", port);
    int failed = getaddrinfo(host, service, &hints, found_out);
    if (failed)
        return fsdp_fail(err, FSDP_ERR_PEER, "cannot find host '%s': %s", host ? host : "*",
                         gai_strerror(failed));
    return FSDP_OK;
}

int fsdp_socket_port(int fd)
{
    struct sockaddr_storage address;
    socklen_t size = sizeof address;
    char service[16];
    int port = -1;
    if (getsockname(fd, (struct sockaddr *)&address, &size) == 0 &&
        getnameinfo((struct sockaddr *)&address, size, NULL, 0, service, sizeof service,
                    NI_NUMERICSERV) == 0)
        (void)sscanf(service, "%d", &port);
    return port;
}

void fsdp_socket_peer(int fd, char host_out[FSDP_HOST_SIZE])
{
    static const char mapped[] = "::ffff:";
    struct sockaddr_storage address;
    socklen_t size = sizeof address;
    host_out[0] = '\0';
    if (getpeername(fd, (struct sockaddr *)&address, &size) != 0 ||
        getnameinfo((struct sockaddr *)&address, size, host_out, FSDP_HOST_SIZE, NULL, 0,
                    NI_NUMERICHOST) != 0)
        host_out[0] = '\0';
    if (strncmp(host_out, mapped, sizeof mapped - 1) == 0)
        memmove(host_out, host_out + sizeof mapped - 1, strlen(host_out) - sizeof mapped + 2);
}

void fsdp_host_port(const char *host, int port, char *out, size_t out_size)
{
    const int room = (int)out_size - (int)sizeof "[]:65535";
    snprintf(out, out_size, strchr(host, ':') ? "[%.*s]:%d" : "%.*s:%d", room, host, port);
}

void fsdp_socket_place(int fd, char place_out[FSDP_PLACE_SIZE])
{
    char host[FSDP_HOST_SIZE], port[16];
    struct sockaddr_storage address;
    socklen_t size = sizeof address;
    place_out[0] = '\0';
    fsdp_socket_peer(fd, host);
    if (host[0] && getpeername(fd, (struct sockaddr *)&address, &size) == 0 &&
        getnameinfo((struct sockaddr *)&address, size, NULL, 0, port, sizeof port,
                    NI_NUMERICSERV) == 0)
        fsdp_host_port(host, atoi(port), place_out, FSDP_PLACE_SIZE);
}

bool fsdp_host_is_loopback(const char *host)
{
    return strncmp(host, "127.", 4) == 0 || strcmp(host, "::1") == 0 ||
           strcmp(host, "localhost") == 0;
}

/* --- creation and end ------------------------------------------------------------------------- */

void fsdp_socket_close(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static int listen_at(const struct addrinfo *at)
{
    int fd = socket(at->ai_family, SOCK_STREAM | SOCKET_FLAGS, 0), on = 1, off = 0;
    if (fd < 0)
        return -errno;
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (at->ai_family == AF_INET6) /* accepts IPv4 as well */
        (void)setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    if (bind(fd, at->ai_addr, at->ai_addrlen) == 0 && listen(fd, BACKLOG) == 0)
        return fd;
    int failed = errno;
    close(fd);
    return -failed;
}

/* IPv6 first: such a socket accepts IPv4 as well. */
fsdp_status fsdp_socket_listen(const char *host, int port, int *fd_out, fsdp_error *err)
{
    struct addrinfo *found = NULL;
    int fd = -EADDRNOTAVAIL;
    FSDP_TRY(resolve(host, port, AI_PASSIVE, &found, err));
    for (int pass = 0; pass < 2 && fd < 0; pass++)
        for (struct addrinfo *at = found; at && fd < 0; at = at->ai_next)
            if ((at->ai_family == AF_INET6) == (pass == 0))
                fd = listen_at(at);
    freeaddrinfo(found);
    if (fd < 0)
        return fsdp_fail_errno(err, -fd, "cannot listen at %s port %d", host ? host : "any address",
                               port);
    *fd_out = fd;
    return FSDP_OK;
}

static void send_at_once(int fd)
{
    int on = 1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

/* A socket that connects to a free port of its own host can get that port as its own and connect to
 * itself. */
static bool is_own_end(int fd)
{
    struct sockaddr_storage here = {0}, there = {0};
    socklen_t here_size = sizeof here, there_size = sizeof there;
    return getsockname(fd, (struct sockaddr *)&here, &here_size) == 0 &&
           getpeername(fd, (struct sockaddr *)&there, &there_size) == 0 &&
           here_size == there_size && memcmp(&here, &there, here_size) == 0;
}

static int connect_to(const struct addrinfo *to, int64_t until_ms)
{
    int fd = socket(to->ai_family, SOCK_STREAM | SOCKET_FLAGS, 0), failed = 0;
    socklen_t size = sizeof failed;
    if (fd < 0)
        return -errno;
    if (connect(fd, to->ai_addr, to->ai_addrlen) != 0 && errno != EINPROGRESS && errno != EINTR)
        failed = errno;
    else if (!fsdp_socket_wait(fd, POLLOUT, until_ms))
        failed = ETIMEDOUT;
    else if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &failed, &size) != 0)
        failed = errno;
    else if (failed == 0 && is_own_end(fd))
        failed = ECONNREFUSED;
    if (failed == 0) {
        send_at_once(fd);
        return fd;
    }
    close(fd);
    return -failed;
}

fsdp_status fsdp_socket_connect(const char *host, int port, int64_t until_ms, int *fd_out,
                                fsdp_error *err)
{
    struct addrinfo *found = NULL;
    int fd = -ECONNREFUSED;
    FSDP_TRY(resolve(host, port, 0, &found, err));
    for (struct addrinfo *to = found; to && fd < 0; to = to->ai_next)
        fd = connect_to(to, until_ms);
    freeaddrinfo(found);
    if (fd < 0) {
        (void)fsdp_fail_errno(err, -fd, "cannot connect to %s port %d", host, port);
        err->status = FSDP_ERR_PEER;
        return FSDP_ERR_PEER;
    }
    *fd_out = fd;
    return FSDP_OK;
}

/* --- bytes ------------------------------------------------------------------------------------ */

static ssize_t result_of(ssize_t n)
{
    if (n >= 0)
        return n;
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -errno;
}

ssize_t fsdp_socket_read(int fd, void *data, size_t size)
{
    ssize_t n = recv(fd, data, size, 0);
    return n == 0 && size > 0 ? -ECONNRESET : result_of(n);
}

ssize_t fsdp_socket_write(int fd, const void *data, size_t size)
{
    ssize_t n = send(fd, data, size, MSG_NOSIGNAL);
    return n < 0 && errno == EPIPE ? -ECONNRESET : result_of(n);
}

static fsdp_status fail_transfer(ssize_t failed, fsdp_error *err)
{
    if (failed == 0)
        return fsdp_ctl_fail_late(err);
    (void)fsdp_fail_errno(err, (int)-failed, "the connection broke");
    err->status = FSDP_ERR_PEER;
    return FSDP_ERR_PEER;
}

fsdp_status fsdp_socket_recv_all(int fd, void *data, size_t size, int64_t until_ms, fsdp_error *err)
{
    for (size_t got = 0; got < size;) {
        ssize_t n = fsdp_socket_read(fd, (char *)data + got, size - got);
        if (n < 0 || (n == 0 && !fsdp_socket_wait(fd, POLLIN, until_ms)))
            return fail_transfer(n, err);
        got += (size_t)n;
    }
    return FSDP_OK;
}

fsdp_status fsdp_socket_send_all(int fd, const void *data, size_t size, int64_t until_ms,
                                 fsdp_error *err)
{
    for (size_t sent = 0; sent < size;) {
        ssize_t n = fsdp_socket_write(fd, (const char *)data + sent, size - sent);
        if (n < 0 || (n == 0 && !fsdp_socket_wait(fd, POLLOUT, until_ms)))
            return fail_transfer(n, err);
        sent += (size_t)n;
    }
    return FSDP_OK;
}

/* === listeners ================================================================================ */

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

int fsdp_socket_accept(int listener)
{
    int fd = accept4(listener, NULL, NULL, SOCKET_FLAGS);
    if (fd >= 0)
        send_at_once(fd);
    return fd;
}

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
