/*
 * How ranks of one host get at each other's segments. Every rank listens on an abstract Unix
 * socket, whose name holds a random number that only this job knows, sends its descriptor to all
 * others, and takes theirs. Both sides look who is at the other end; processes of other users are
 * not talked to. Abstract names and descriptors under way go with the processes. See
 * transport_shm.h.
 */
#include "runtime/comm_shared/transport_shm.h"

#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/mem.h"

enum { TOKEN = 16, LOOK_MS = 20, SPARE_PENDING = 16, ACCEPTS_AT_ONCE = 8 };

typedef struct handshake {
    unsigned char token[TOKEN];
    int32_t rank;
    int32_t has_segment;
} handshake;

typedef struct connector {
    fsdp_ctl *ctl;
    int rank, size, listener;
    /* The listener, then who has connected and not sent its letter yet, in the order of coming. */
    struct pollfd *polled;
    int pending, pending_room;
    unsigned char token[TOKEN];
    int64_t until_ms;
    const shm_segment *own;
    shm_peer *peers;
    fsdp_status local; /* a failure here that the others need not wait for */
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

static fsdp_status listen_for_peers(connector *now, fsdp_error *err)
{
    struct sockaddr_un name;
    socklen_t length = make_name(now, now->rank, &name);
    now->listener = open_socket();
    if (now->listener < 0 || bind(now->listener, (struct sockaddr *)&name, length) != 0 ||
        listen(now->listener, now->size) != 0)
        return fsdp_fail_errno(err, errno, "cannot listen for the other ranks of this host");
    now->polled[0] = (struct pollfd){.fd = now->listener, .events = POLLIN};
    return FSDP_OK;
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

/* --- letters ---------------------------------------------------------------------------------- */

typedef union descriptor_room {
    struct cmsghdr head;
    char bytes[CMSG_SPACE(sizeof(int))];
} descriptor_room;

static bool send_handshake(const connector *now, int fd)
{
    bool has_segment = now->local == FSDP_OK;
    handshake mine = {.rank = now->rank, .has_segment = has_segment};
    struct iovec data = {.iov_base = &mine, .iov_len = sizeof mine};
    descriptor_room room = {.bytes = {0}};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1};
    memcpy(mine.token, now->token, TOKEN);
    if (has_segment) {
        message.msg_control = room.bytes;
        message.msg_controllen = sizeof room.bytes;
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(head), &now->own->fd, sizeof(int));
    }
    return sendmsg(fd, &message, MSG_NOSIGNAL) == (ssize_t)sizeof mine;
}

/*
 * False when it is not a letter of this job. *passed_out: -1, or the descriptor that came with it,
 * unless this process has no room for it.
 */
static bool recv_handshake(const connector *now, int fd, handshake *theirs, int *passed_out)
{
    struct iovec data = {.iov_base = theirs, .iov_len = sizeof *theirs};
    descriptor_room room = {.bytes = {0}};
    struct msghdr message = {.msg_iov = &data,
                             .msg_iovlen = 1,
                             .msg_control = room.bytes,
                             .msg_controllen = sizeof room.bytes};
    *passed_out = -1;
    ssize_t got = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
    bool is_cut = got >= 0 && (message.msg_flags & MSG_CTRUNC) != 0;
    struct cmsghdr *head = got >= 0 ? CMSG_FIRSTHDR(&message) : NULL;
    if (head && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS &&
        head->cmsg_len == CMSG_LEN(sizeof(int)))
        memcpy(passed_out, CMSG_DATA(head), sizeof(int));
    return got == (ssize_t)sizeof *theirs && memcmp(theirs->token, now->token, TOKEN) == 0 &&
           theirs->rank >= 0 && theirs->rank < now->size && theirs->rank != now->rank &&
           !now->peers[theirs->rank].is_here &&
           (*passed_out >= 0 || is_cut) == (theirs->has_segment != 0);
}

/* --- sending ---------------------------------------------------------------------------------- */

static fsdp_status fail_connect(int rank, fsdp_error *err)
{
    if (errno == ECONNREFUSED)
        return fsdp_fail(err, FSDP_ERR_PEER,
                         "rank %d is gone, or in another network namespace of this host", rank);
    return fsdp_fail_errno(err, errno, "cannot connect to rank %d", rank);
}

/* It may be that there is no room now: then was_sent stays false. */
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
    peer->was_sent = send_handshake(now, fd);
    if (!peer->was_sent && errno != EAGAIN && errno != ETOOMANYREFS)
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

/* --- taking ----------------------------------------------------------------------------------- */

/* A failure to map is this rank's own: it goes on, so that nobody waits for it, and tells at the
 * end. */
static void recv_segment(connector *now, int fd, fsdp_error *err)
{
    handshake theirs;
    int passed;
    if (!recv_handshake(now, fd, &theirs, &passed)) {
        if (passed >= 0)
            close(passed);
        return;
    }
    shm_peer *peer = &now->peers[theirs.rank];
    peer->is_here = true;
    if (passed < 0 && theirs.has_segment && now->local == FSDP_OK)
        now->local =
            fsdp_fail(err, FSDP_ERR_LIMIT,
                      "no file is left for the memory of rank %d; raise `ulimit -n`", theirs.rank);
    if (passed < 0)
        return;
    if (now->local == FSDP_OK)
        now->local = fsdp_shm_segment_map(passed, theirs.rank, &peer->segment, err);
    else
        close(passed);
}

static void drop_pending(connector *now, int i)
{
    struct pollfd *at = &now->polled[1 + i];
    close(at->fd);
    now->pending--;
    memmove(at, at + 1, (size_t)(now->pending - i) * sizeof *at);
}

/* There is room for all ranks: where it is too little strangers are among the pending. */
static void admit(connector *now, int fd)
{
    int pid;
    if (!is_same_user(fd, &pid)) {
        close(fd);
        return;
    }
    if (now->pending == now->pending_room)
        drop_pending(now, 0);
    now->polled[1 + now->pending++] = (struct pollfd){.fd = fd, .events = POLLIN};
}

/*
 * Somebody waits at the door, and this process may open nothing more. Who is in keeps files open: a
 * rank says at once what it has to, so that when all are silent for a while the oldest ones are
 * strangers. Two of them go: the next one brings a file along.
 */
static fsdp_status free_descriptors(connector *now, fsdp_error *err)
{
    int failed = errno;
    if (now->pending == 0)
        return fsdp_fail_errno(err, failed, "cannot let in the other ranks of this host");
    if (poll(now->polled + 1, (nfds_t)now->pending, LOOK_MS) > 0)
        return FSDP_OK;
    for (int i = 0; i < 2 && now->pending > 0; i++)
        drop_pending(now, 0);
    return FSDP_OK;
}

static fsdp_status accept_new(connector *now, bool *has_new_out, fsdp_error *err)
{
    *has_new_out = false;
    for (int came = 0; came < ACCEPTS_AT_ONCE; came++) {
        int fd = accept4(now->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM))
            return free_descriptors(now, err);
        if (fd < 0)
            return FSDP_OK;
        *has_new_out = true;
        admit(now, fd);
    }
    return FSDP_OK;
}

/* Of the pending whose letter is here, or who have gone. */
static bool recv_handshakes(connector *now, fsdp_error *err)
{
    bool any = poll(now->polled + 1, (nfds_t)now->pending, 0) > 0;
    for (int i = now->pending - 1; i >= 0 && any; i--) {
        if (now->polled[1 + i].revents == 0)
            continue;
        recv_segment(now, now->polled[1 + i].fd, err);
        drop_pending(now, i);
    }
    return any;
}

static fsdp_status serve_listener(connector *now, bool *any_out, fsdp_error *err)
{
    FSDP_TRY(accept_new(now, any_out, err));
    *any_out |= recv_handshakes(now, err);
    return FSDP_OK;
}

/* --- the connector ---------------------------------------------------------------------------- */

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

static fsdp_status send_to_all(connector *now, fsdp_error *err)
{
    for (int i = 1; i < now->size; i++) {
        int to = (now->rank + i) % now->size;
        if (!now->peers[to].was_sent)
            FSDP_TRY(send_to(now, to, err));
    }
    return FSDP_OK;
}

static fsdp_status connect_all(connector *now, fsdp_error *err)
{
    while (!is_complete(now)) {
        bool any;
        FSDP_TRY(send_to_all(now, err));
        FSDP_TRY(serve_listener(now, &any, err));
        /* strangers may come for ever */
        if (any && fsdp_now_ms() < now->until_ms)
            continue;
        FSDP_TRY(check_missing(now, err));
        (void)poll(now->polled, (nfds_t)(1 + now->pending), LOOK_MS);
    }
    return now->local;
}

static fsdp_status init_pending(connector *now, fsdp_error *err)
{
    now->pending_room = now->size + SPARE_PENDING;
    now->polled = fsdp_alloc((size_t)now->pending_room + 1, sizeof *now->polled);
    return now->polled ? FSDP_OK : fsdp_fail_memory(err, "the memory of other ranks");
}

static void release_pending(connector *now)
{
    while (now->pending > 0)
        drop_pending(now, now->pending - 1);
    if (now->listener >= 0)
        close(now->listener);
    fsdp_free(now->polled);
}

static fsdp_status share_token(connector *now, fsdp_error *err)
{
    fsdp_status status = FSDP_OK;
    if (now->rank == 0 && getrandom(now->token, TOKEN, 0) != TOKEN)
        status = fsdp_fail_errno(err, errno, "cannot draw a random number for the job");
    FSDP_TRY(fsdp_ctl_agree(now->ctl, status, err));
    return fsdp_ctl_broadcast(now->ctl, 0, now->token, TOKEN, err);
}

fsdp_status fsdp_shm_connect(fsdp_ctl *ctl, int deadline_ms, const shm_segment *own,
                             shm_peer *peers, fsdp_error *err)
{
    connector now = {.ctl = ctl,
                     .rank = fsdp_ctl_rank(ctl),
                     .size = fsdp_ctl_size(ctl),
                     .listener = -1,
                     .until_ms = fsdp_now_ms() + deadline_ms,
                     .own = own,
                     .peers = peers};
    FSDP_TRY(share_token(&now, err));
    fsdp_status status = init_pending(&now, err);
    if (status == FSDP_OK)
        status = listen_for_peers(&now, err);
    status = fsdp_ctl_agree(ctl, status, err);
    if (status == FSDP_OK) {
        /* where this rank fails its door stays open for the letters of the others, who go on */
        status = fsdp_ctl_agree(ctl, connect_all(&now, err), err);
    }
    release_pending(&now);
    return status;
}
