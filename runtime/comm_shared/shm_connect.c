/*
 * Passes every rank's memory segment to the other ranks of the host. Every rank listens on an
 * abstract Unix socket whose name holds a random token of the job, connects to each other rank and
 * sends it a hello (listener.h) and the descriptor of its segment. Both ends check that the other
 * process belongs to the same user. Abstract names and descriptors in flight disappear with the
 * processes. See transport_shm.h.
 */
#include "runtime/comm_shared/transport_shm.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "runtime/bootstrap/listener.h"
#include "runtime/bootstrap/socket.h"

enum { TOKEN = FSDP_SHA256_SIZE, LOOK_MS = 20 };

typedef struct connector {
    fsdp_ctl *ctl;
    int rank, size;
    fsdp_listener listener;
    unsigned char token[TOKEN];
    int64_t until_ms;
    const shm_segment *segment;
    shm_peer *peers;
    fsdp_status local; /* a failure of this rank, reported once the others have its hello */
} connector;

/* --- sockets ---------------------------------------------------------------------------------- */

static socklen_t make_name(const connector *now, int rank, struct sockaddr_un *name)
{
    char *text = name->sun_path + 1;
    size_t room = sizeof name->sun_path - 1, used = 0;
    memset(name, 0, sizeof *name);
    name->sun_family = AF_UNIX;
    used += (size_t)snprintf(text, room, "fsdp-%d-", rank);
    for (int i = 0; i < TOKEN; i++)
        used += (size_t)snprintf(text + used, room - used, "%02x", now->token[i]);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + used);
}

static int open_socket(void)
{
    return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

static bool is_same_user(int fd, int *pid_out)
{
    struct ucred about;
    socklen_t size = sizeof about;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &about, &size) != 0)
        return false;
    *pid_out = (int)about.pid;
    return about.uid == geteuid();
}

static bool allows(int fd)
{
    int pid;
    return is_same_user(fd, &pid);
}

static fsdp_status listen_for_peers(connector *now, fsdp_error *err)
{
    struct sockaddr_un name;
    socklen_t length = make_name(now, now->rank, &name);
    int fd = open_socket();
    now->listener = (fsdp_listener){.fd = fd, .allows = allows};
    if (fd < 0 || bind(fd, (struct sockaddr *)&name, length) != 0 || listen(fd, now->size) != 0)
        return fsdp_fail_errno(err, errno, "cannot listen for the other ranks of this host");
    return FSDP_OK;
}

/* --- descriptors ------------------------------------------------------------------------------ */

/* One byte, and one descriptor beside it. */
typedef struct descriptor_message {
    struct msghdr head;
    struct iovec data;
    char byte;
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
} descriptor_message;

static void init_message(descriptor_message *message)
{
    memset(message, 0, sizeof *message);
    message->data = (struct iovec){.iov_base = &message->byte, .iov_len = 1};
    message->head = (struct msghdr){.msg_iov = &message->data,
                                    .msg_iovlen = 1,
                                    .msg_control = message->control.bytes,
                                    .msg_controllen = sizeof message->control.bytes};
}

static bool send_descriptor(int to, int fd)
{
    descriptor_message message;
    init_message(&message);
    struct cmsghdr *head = CMSG_FIRSTHDR(&message.head);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(head), &fd, sizeof(int));
    return sendmsg(to, &message.head, MSG_NOSIGNAL) == 1;
}

/* False when none was sent. *fd_out: -1 when this process has no room for it. */
static bool recv_descriptor(int from, int *fd_out)
{
    descriptor_message message;
    init_message(&message);
    *fd_out = -1;
    bool came = recvmsg(from, &message.head, MSG_CMSG_CLOEXEC) == 1;
    bool is_cut = came && (message.head.msg_flags & MSG_CTRUNC) != 0;
    struct cmsghdr *head = came ? CMSG_FIRSTHDR(&message.head) : NULL;
    if (head && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS &&
        head->cmsg_len == CMSG_LEN(sizeof(int)))
        memcpy(fd_out, CMSG_DATA(head), sizeof(int));
    return *fd_out >= 0 || is_cut;
}

/* --- sending ---------------------------------------------------------------------------------- */

static fsdp_status fail_connect(int rank, fsdp_error *err)
{
    if (errno == ECONNREFUSED)
        return fsdp_fail(err, FSDP_ERR_PEER,
                         "rank %d is gone, or in another network namespace of this host", rank);
    return fsdp_fail_errno(err, errno, "cannot connect to rank %d", rank);
}

static bool send_segment(const connector *now, int fd, int rank)
{
    bool has_segment = now->local == FSDP_OK;
    fsdp_hello hello = fsdp_hello_make(FSDP_HELLO_MEMORY, now->rank, now->size, rank, now->token);
    hello.port = has_segment;
    return send(fd, &hello, sizeof hello, MSG_NOSIGNAL) == (ssize_t)sizeof hello &&
           (!has_segment || send_descriptor(fd, now->segment->fd));
}

/* was_sent stays false when the connection cannot take it now: a full backlog, a full buffer, or a
 * peer that closed the connection for newer ones. The next round tries again. */
static fsdp_status send_over(connector *now, int fd, int rank, fsdp_error *err)
{
    struct sockaddr_un name;
    socklen_t length = make_name(now, rank, &name);
    shm_peer *peer = &now->peers[rank];
    if (connect(fd, (struct sockaddr *)&name, length) != 0)
        return errno == EAGAIN ? FSDP_OK : fail_connect(rank, err);
    int pid = 0;
    if (!is_same_user(fd, &pid))
        return fsdp_fail(err, FSDP_ERR_REFUSED, "rank %d runs as another user", rank);
    if (peer->process.fd < 0)
        FSDP_TRY(fsdp_process_watch_open(pid, rank, &peer->process, err));
    peer->was_sent = send_segment(now, fd, rank);
    if (!peer->was_sent && errno != EAGAIN && errno != ETOOMANYREFS && errno != EPIPE &&
        errno != ECONNRESET)
        return fail_connect(rank, err);
    return FSDP_OK;
}

static fsdp_status send_to(connector *now, int rank, fsdp_error *err)
{
    int fd = open_socket();
    if (fd < 0)
        return fsdp_fail_errno(err, errno, "cannot connect to rank %d", rank);
    fsdp_status status = send_over(now, fd, rank, err);
    close(fd);
    return status;
}

static fsdp_status send_to_all(connector *now, fsdp_error *err)
{
    for (int i = 1; i < now->size; i++) {
        int to = (now->rank + i) % now->size;
        if (!now->peers[to].was_sent)
            FSDP_TRY(send_to(now, to, err));
    }
    return FSDP_OK;
}

/* --- receiving -------------------------------------------------------------------------------- */

/* A failure to map is kept in `local`: this rank goes on, so that no other waits for it, and fails
 * at the end. */
static void recv_segment(connector *now, const fsdp_pending *from, fsdp_error *err)
{
    int rank = from->hello.rank, passed = -1;
    shm_peer *peer = &now->peers[rank];
    if (from->hello.port == 0) {
        peer->is_here = true;
        return;
    }
    if (!fsdp_socket_wait(from->fd, POLLIN, now->until_ms) || !recv_descriptor(from->fd, &passed))
        return; /* it sends again */
    peer->is_here = true;
    if (now->local != FSDP_OK) {
        fsdp_socket_close(&passed);
        return;
    }
    if (passed >= 0)
        now->local = fsdp_shm_segment_map(passed, rank, &peer->segment, err);
    else
        now->local = fsdp_fail(err, FSDP_ERR_LIMIT,
                               "cannot open the memory of rank %d: the limit of open files is "
                               "reached; raise `ulimit -n`",
                               rank);
}

static bool recv_from_all(connector *now, fsdp_error *err)
{
    fsdp_pending from;
    bool any = false;
    for (; fsdp_listener_accept(&now->listener, &from); fsdp_socket_close(&from.fd)) {
        any = true;
        if (fsdp_hello_is_for(&from.hello, FSDP_HELLO_MEMORY, now->rank, now->size, now->token) &&
            !now->peers[from.hello.rank].is_here)
            recv_segment(now, &from, err);
    }
    return any;
}

/* --- all ranks -------------------------------------------------------------------------------- */

static bool is_complete(const connector *now)
{
    for (int i = 0; i < now->size; i++) {
        if (i != now->rank && !(now->peers[i].was_sent && now->peers[i].is_here))
            return false;
    }
    return true;
}

static fsdp_status check_missing(const connector *now, fsdp_error *err)
{
    bool is_late = fsdp_now_ms() >= now->until_ms;
    for (int i = 0; i < now->size; i++) {
        const shm_peer *peer = &now->peers[i];
        if (i == now->rank || (peer->was_sent && peer->is_here))
            continue;
        if (fsdp_process_watch_has_ended(&peer->process))
            return fsdp_fail(err, FSDP_ERR_PEER, "rank %d (process %d) died", i, peer->process.pid);
        if (is_late)
            return fsdp_fail(err, FSDP_ERR_PEER, "rank %d did not pass its memory in time", i);
    }
    return FSDP_OK;
}

static fsdp_status connect_all(connector *now, fsdp_error *err)
{
    while (!is_complete(now)) {
        FSDP_TRY(send_to_all(now, err));
        bool any = recv_from_all(now, err);
        FSDP_TRY(fsdp_listener_check(&now->listener, err));
        if (any && fsdp_now_ms() < now->until_ms)
            continue;
        FSDP_TRY(check_missing(now, err));
        fsdp_listener_wait(&now->listener, fsdp_now_ms() + LOOK_MS);
    }
    return now->local;
}

static fsdp_status share_token(connector *now, fsdp_error *err)
{
    fsdp_status status = FSDP_OK;
    if (now->rank == 0 && getrandom(now->token, TOKEN, 0) != TOKEN)
        status = fsdp_fail_errno(err, errno, "cannot draw a random number for the job");
    FSDP_TRY(fsdp_ctl_agree(now->ctl, status, err));
    return fsdp_ctl_broadcast(now->ctl, 0, now->token, TOKEN, err);
}

fsdp_status fsdp_shm_connect(fsdp_ctl *ctl, int deadline_ms, const shm_segment *segment,
                             shm_peer *peers, fsdp_error *err)
{
    connector now = {.ctl = ctl,
                     .rank = fsdp_ctl_rank(ctl),
                     .size = fsdp_ctl_size(ctl),
                     .listener = {.fd = -1},
                     .until_ms = fsdp_now_ms() + deadline_ms,
                     .segment = segment,
                     .peers = peers};
    FSDP_TRY(share_token(&now, err));
    fsdp_status status = fsdp_ctl_agree(ctl, listen_for_peers(&now, err), err);
    if (status == FSDP_OK) {
        /* a rank that fails here keeps listening: the others still send it their segments */
        status = fsdp_ctl_agree(ctl, connect_all(&now, err), err);
    }
    fsdp_listener_release(&now.listener);
    return status;
}
