/*
 * The transport of ranks that are processes of one host. All ranks map every rank's segment of
 * memory, which contains its pool, blocks of groups and windows. See comm_shared.h and
 * transport_shm.h.
 */
#include "runtime/comm_shared/transport_shm.h"
#include "base/core/clock.h"
#include "base/core/mem.h"
#include "runtime/bootstrap/listener.h"
#include "runtime/bootstrap/socket.h"
#include "runtime/comm_shared/comm_shared.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

/* === the pool ================================================================================= */

/*
 * Allocates pages of this rank's segment from an ordered list of ranges; neighbouring free ranges
 * are joined. First fit keeps allocations together; freed large ranges return their pages to the
 * system. Locked, because streams of a rank are threads.
 */

enum { GIVEN_BACK = 1 << 20 };

typedef struct shm_range {
    struct shm_range *before, *after;
    size_t at, size;
    bool is_taken;
} shm_range;

struct shm_pool {
    pthread_mutex_t lock;
    unsigned char *data;
    size_t page;
    shm_range *first;
};

fsdp_status fsdp_shm_pool_create(const shm_segment *segment, shm_pool **pool_out, fsdp_error *err)
{
    shm_pool *pool = fsdp_alloc(1, sizeof *pool);
    shm_range *all = fsdp_alloc(1, sizeof *all);
    if (!pool || !all || pthread_mutex_init(&pool->lock, NULL) != 0) {
        fsdp_free(pool);
        fsdp_free(all);
        return fsdp_fail_memory(err, "a pool of shared memory");
    }
    all->size = segment->size;
    pool->data = segment->data;
    pool->page = (size_t)sysconf(_SC_PAGESIZE);
    pool->first = all;
    *pool_out = pool;
    return FSDP_OK;
}

void fsdp_shm_pool_free(shm_pool *pool)
{
    if (!pool)
        return;
    while (pool->first) {
        shm_range *after = pool->first->after;
        fsdp_free(pool->first);
        pool->first = after;
    }
    pthread_mutex_destroy(&pool->lock);
    fsdp_free(pool);
}

/* Cuts a range after `size` bytes. */
static void cut(shm_range *range, size_t size, shm_range *rest)
{
    *rest = (shm_range){
        .before = range, .after = range->after, .at = range->at + size, .size = range->size - size};
    if (range->after)
        range->after->before = rest;
    range->after = rest;
    range->size = size;
}

/* Joins a range with the next one. */
static void join(shm_range *range)
{
    shm_range *gone = range->after;
    range->size += gone->size;
    range->after = gone->after;
    if (gone->after)
        gone->after->before = range;
    fsdp_free(gone);
}

void *fsdp_shm_pool_take(shm_pool *pool, size_t size)
{
    if (size > SIZE_MAX - pool->page)
        return NULL;
    size_t pages = size > 0 ? (size + pool->page - 1) / pool->page * pool->page : pool->page;
    shm_range *rest = fsdp_alloc(1, sizeof *rest);
    if (!rest)
        return NULL;
    pthread_mutex_lock(&pool->lock);
    shm_range *range = pool->first;
    while (range && (range->is_taken || range->size < pages))
        range = range->after;
    if (range)
        range->is_taken = true;
    if (range && range->size > pages) {
        cut(range, pages, rest);
        rest = NULL;
    }
    void *data = range ? pool->data + range->at : NULL;
    pthread_mutex_unlock(&pool->lock);
    fsdp_free(rest);
    return data;
}

void fsdp_shm_pool_give(shm_pool *pool, void *data)
{
    pthread_mutex_lock(&pool->lock);
    shm_range *range = pool->first;
    while (range && (!range->is_taken || pool->data + range->at != data))
        range = range->after;
    if (range) {
        if (range->size >= GIVEN_BACK)
            (void)madvise(data, range->size, MADV_REMOVE);
        range->is_taken = false;
        if (range->after && !range->after->is_taken)
            join(range);
        if (range->before && !range->before->is_taken)
            join(range->before);
    }
    pthread_mutex_unlock(&pool->lock);
}

/* === segments ================================================================================= */

/*
 * A segment is a memfd: it leaves no name behind and is limited by the host's memory only. It has
 * its final size from the start, sealed so that no access of another rank can fail, and uses pages
 * only where it was written.
 */

static const size_t most_in_all = (size_t)1 << 45, least = (size_t)64 << 20;

static bool can_map(size_t size)
{
    void *data = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED)
        return false;
    munmap(data, size);
    return true;
}

/* RLIMIT_FSIZE applies to memfds, too, and kills a process that exceeds it. */
static void choose_size(int ranks, shm_segment *segment)
{
    struct rlimit limit;
    size_t page = (size_t)sysconf(_SC_PAGESIZE), n = (size_t)ranks;
    size_t size = (size_t)sysconf(_SC_PHYS_PAGES) * page;
    if (size > most_in_all / n)
        size = most_in_all / n;
    segment->is_limited = getrlimit(RLIMIT_FSIZE, &limit) == 0 && size > limit.rlim_cur;
    if (segment->is_limited)
        size = limit.rlim_cur;
    while (size > least && !can_map(size * n))
        size /= 2;
    segment->size = size / page * page;
}

/* Keeps segments out of core files, which would contain them once per rank. */
static bool map(shm_segment *segment)
{
    void *data = mmap(NULL, segment->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                      segment->fd, 0);
    if (data == MAP_FAILED)
        return false;
    segment->data = data;
    (void)madvise(data, segment->size, MADV_DONTDUMP);
    return true;
}

static fsdp_status give_size(shm_segment *segment, fsdp_error *err)
{
    const unsigned seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    if (ftruncate(segment->fd, (off_t)segment->size) != 0 ||
        fcntl(segment->fd, F_ADD_SEALS, seals) != 0 || !map(segment))
        return fsdp_fail_errno(err, errno, "cannot make %zu bytes of shared memory", segment->size);
    return FSDP_OK;
}

fsdp_status fsdp_shm_segment_init(int ranks, shm_segment *segment_out, fsdp_error *err)
{
    shm_segment made = {.fd = -1};
    choose_size(ranks, &made);
    if (made.size == 0)
        return fsdp_fail_errno(err, EFBIG, "cannot make shared memory");
    made.fd = memfd_create("fsdp", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (made.fd < 0)
        return fsdp_fail_errno(err, errno, "cannot make shared memory");
    fsdp_status status = give_size(&made, err);
    if (status == FSDP_OK)
        *segment_out = made;
    else
        fsdp_shm_segment_close_fd(&made);
    return status;
}

/* Maps another rank's segment; takes the descriptor. */
static fsdp_status shm_segment_map(int fd, int rank, shm_segment *segment_out, fsdp_error *err)
{
    shm_segment made = {.fd = fd};
    struct stat about;
    int seals = fcntl(fd, F_GET_SEALS);
    fsdp_status status = FSDP_OK;
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &about) != 0 || about.st_size <= 0)
        status = fsdp_fail(err, FSDP_ERR_PEER, "rank %d passed no segment of shared memory", rank);
    if (status == FSDP_OK) {
        made.size = (size_t)about.st_size;
        if (!map(&made))
            status = fsdp_fail_errno(err, errno, "cannot map %zu bytes of shared memory of rank %d",
                                     made.size, rank);
    }
    fsdp_shm_segment_close_fd(&made);
    if (status == FSDP_OK)
        *segment_out = made;
    return status;
}

void fsdp_shm_segment_close_fd(shm_segment *segment)
{
    if (segment->fd >= 0)
        close(segment->fd);
    segment->fd = -1;
}

void fsdp_shm_segment_release(shm_segment *segment)
{
    if (!segment->data)
        return;
    munmap(segment->data, segment->size);
    fsdp_shm_segment_close_fd(segment);
    *segment = (shm_segment){.fd = -1};
}

/* === passing the segments ===================================================================== */

/*
 * Passes every rank's memory segment to the other ranks of the host. Every rank listens on an
 * abstract Unix socket whose name holds a random token of the job, connects to each other rank and
 * sends it a hello (listener.h) and the descriptor of its segment. Both ends check that the other
 * process belongs to the same user. Abstract names and descriptors in flight disappear with the
 * processes.
 */

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

/* A message has one byte and one descriptor. */
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

/* False when none was sent. *fd_out: -1 when this process has no capacity for it. */
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

/* A failure to map is kept in `local`: this rank continues, so that no other waits for it, and fails
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
        now->local = shm_segment_map(passed, rank, &peer->segment, err);
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

/* === the transport ============================================================================ */

enum { LEAST_HALF = 512 << 10, MOST_HALF = 2 << 20, HALF_PER_RANK = 32 << 10 };

typedef struct shm_transport {
    shared_transport shared;
    shm_segment local;
    shm_pool *pool;
    shm_peer *peers;
} shm_transport;

static bool is_dead(shared_transport *transport, int rank, char *name, size_t name_size)
{
    const shm_peer *peer = &((const shm_transport *)transport)->peers[rank];
    snprintf(name, name_size, "process %d", peer->process.pid);
    return fsdp_process_watch_has_ended(&peer->process);
}

static void *allocate(fsdp_transport *transport, size_t size)
{
    return fsdp_shm_pool_take(((shm_transport *)transport)->pool, size);
}

static void deallocate(fsdp_transport *transport, void *data)
{
    fsdp_shm_pool_give(((shm_transport *)transport)->pool, data);
}

/* --- creating and closing --------------------------------------------------------------------- */

static void release_peers(shm_transport *mine)
{
    for (int i = 0; mine->peers && i < mine->shared.base.size; i++) {
        fsdp_shm_segment_release(&mine->peers[i].segment);
        fsdp_process_watch_close(&mine->peers[i].process);
    }
    fsdp_free(mine->peers);
}

static void free_transport(shm_transport *mine)
{
    if (!mine)
        return;
    release_peers(mine);
    fsdp_shm_pool_free(mine->pool);
    fsdp_shm_segment_release(&mine->local);
    fsdp_shared_transport_release(&mine->shared);
    fsdp_free(mine);
}

static void close_transport(fsdp_transport *transport)
{
    shm_transport *mine = (shm_transport *)transport;
    fsdp_shared_leave(&mine->shared.world);
    free_transport(mine);
}

static const fsdp_transport_ops shm_ops = {
    .name = "shm",
    .abilities = FSDP_COMM_AVG | FSDP_COMM_PREMUL_SUM | FSDP_COMM_POOL,
    .comm_create = fsdp_shared_comm_create,
    .run = fsdp_shared_run,
    .abort = fsdp_shared_abort,
    .has_failed = fsdp_shared_comm_has_failed,
    .sees = fsdp_shared_sees,
    .comm_close = fsdp_shared_comm_close,
    .set_busy = fsdp_shared_set_busy,
    .alloc = allocate,
    .dealloc = deallocate,
    .close = close_transport,
};

static size_t half_of_window(int ranks)
{
    size_t wanted = (size_t)ranks * HALF_PER_RANK;
    return wanted < LEAST_HALF ? LEAST_HALF : wanted > MOST_HALF ? MOST_HALF : wanted;
}

static fsdp_status create_transport(fsdp_ctl *ctl, int deadline_ms, shm_transport **mine_out,
                                    fsdp_error *err)
{
    shm_transport *mine = fsdp_alloc(1, sizeof *mine);
    if (!mine)
        return fsdp_fail_memory(err, "a transport");
    int size = fsdp_ctl_size(ctl);
    mine->shared.base = (fsdp_transport){
        .ops = &shm_ops, .rank = fsdp_ctl_rank(ctl), .size = size, .deadline_ms = deadline_ms};
    mine->shared.window_half = half_of_window(size);
    mine->shared.alloc_shared = allocate;
    mine->shared.is_dead = is_dead;
    fsdp_status status = fsdp_shared_transport_init(&mine->shared, err);
    if (status == FSDP_OK)
        *mine_out = mine;
    else
        fsdp_free(mine);
    return status;
}

/* The block of the world is at the beginning of rank 0's segment: all ranks know its address. */
static fsdp_status prepare(shm_transport *mine, fsdp_error *err)
{
    int rank = mine->shared.base.rank, size = mine->shared.base.size;
    mine->peers = fsdp_alloc((size_t)size, sizeof *mine->peers);
    if (!mine->peers)
        return fsdp_fail_memory(err, "a transport");
    for (int i = 0; i < size; i++)
        mine->peers[i].process.fd = -1;
    FSDP_TRY(fsdp_shm_segment_init(size, &mine->local, err));
    FSDP_TRY(fsdp_shm_pool_create(&mine->local, &mine->pool, err));
    mine->shared.segment_size = mine->local.size;
    mine->shared.is_limited = mine->local.is_limited;
    mine->shared.bases[rank] = (uintptr_t)mine->local.data;
    if (rank != 0)
        return FSDP_OK;
    size_t block_size = fsdp_shared_world_size(size);
    void *block = fsdp_shm_pool_take(mine->pool, block_size);
    return block ? FSDP_OK : fsdp_shared_fail_memory(&mine->shared, "the block of a world", err);
}

static void attach(shm_transport *mine)
{
    shared_transport *shared = &mine->shared;
    for (int i = 0; i < shared->base.size; i++) {
        if (i != shared->base.rank)
            shared->bases[i] = (uintptr_t)mine->peers[i].segment.data;
    }
    shared->world.block = (shared_block *)shared->bases[0];
    fsdp_shm_segment_close_fd(&mine->local);
}

fsdp_status fsdp_transport_shm(fsdp_ctl *ctl, int deadline_ms, fsdp_transport **transport_out,
                               fsdp_error *err)
{
    shm_transport *mine = NULL;
    fsdp_error why = {0};
    fsdp_status status = create_transport(ctl, deadline_ms, &mine, &why);
    if (status == FSDP_OK)
        status = prepare(mine, &why);
    status = fsdp_ctl_agree(ctl, status, &why);
    if (status == FSDP_OK)
        status = fsdp_shm_connect(ctl, deadline_ms, &mine->local, mine->peers, &why);
    if (status == FSDP_OK) {
        attach(mine);
        fsdp_shared_observe(&mine->shared.base, ctl);
        *transport_out = &mine->shared.base;
        return FSDP_OK;
    }
    free_transport(mine);
    if (err)
        *err = why;
    return status;
}
