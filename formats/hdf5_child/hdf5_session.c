/*
 * The parent's side of reading HDF5 files of other programs: starts the child, exchanges
 * messages with it, and checks all of them. hdf5_protocol.h has the messages.
 */
#include "formats/hdf5_child/hdf5_session.h"

#include "base/core/clock.h"
#include "base/core/mem.h"
#include "formats/hdf5/hdf5_internal.h"
#include "formats/hdf5_child/hdf5_sandbox.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <sys/resource.h>
#include <time.h>

enum { USUAL_DEADLINE_MS = 30000, FILE_BYTES_PER_MS = 4096 };
enum { BY_PIDFD = 3 }; /* P_PIDFD, which glibc has since 2.36, as it has the calls */

struct fsdp_h5_session {
    fsdp_h5_file_view view;
    int channel;
    unsigned char *shared;
    pid_t child;  /* 0 for an adopted session */
    int handle;   /* pidfd of the child, -1 without one */
    bool is_over; /* failed once: sends nothing more */
    int64_t deadline_ms;
    int64_t granted; /* memory beyond the initial limit */
    pthread_mutex_t lock;
};

/* --- one message ------------------------------------------------------------------------------ */

static fsdp_status fail_child(fsdp_h5_session *session, const char *why, fsdp_error *err)
{
    session->is_over = true;
    return fsdp_fail(err, FSDP_ERR_REFUSED,
                     "'%s': the HDF5 library failed on this file: its process %s",
                     session->view.path, why);
}

/* Explains how the child ended; it is about to end when its channel is closed. */
static const char *death(fsdp_h5_session *session)
{
    enum { SOON_MS = 2000 };
    siginfo_t info = {0};
    struct pollfd wait = {.fd = session->handle, .events = POLLIN};
    if (session->handle < 0 || poll(&wait, 1, SOON_MS) <= 0 ||
        waitid((idtype_t)BY_PIDFD, (id_t)session->handle, &info, WEXITED | WNOWAIT | WNOHANG) < 0 ||
        info.si_pid == 0 || info.si_code == CLD_EXITED)
        return "ended";
    switch (info.si_status) {
    case SIGSYS: return "made a forbidden system call";
    case SIGXCPU: return "took too long";
    case SIGSEGV:
    case SIGBUS:
    case SIGABRT: return "crashed";
    default: return "was killed";
    }
}

static fsdp_status send_message(fsdp_h5_session *session, const fsdp_h5_message *message,
                                fsdp_error *err)
{
    ssize_t n;
    do {
        n = send(session->channel, message, sizeof *message, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (n < 0 && errno == EINTR);
    if (n == (ssize_t)sizeof *message)
        return FSDP_OK;
    return fail_child(session,
                      n < 0 && errno == EPIPE ? death(session) : "does not accept messages", err);
}

/* Waits for a message until *left_ms is used up. */
static fsdp_status await(fsdp_h5_session *session, int64_t *left_ms, fsdp_h5_message *message_out,
                         fsdp_error *err)
{
    int64_t begin = fsdp_now_ms(), end = begin + *left_ms;
    for (;;) {
        struct pollfd wait = {.fd = session->channel, .events = POLLIN};
        int64_t left = end - fsdp_now_ms();
        int ready = left <= 0 ? 0 : poll(&wait, 1, left > 1000 ? 1000 : (int)left);
        if (ready > 0)
            break;
        if (ready < 0 && errno != EINTR)
            return fail_child(session, "cannot be polled", err);
        if (left <= 0)
            return fail_child(session, "took too long", err);
    }
    *left_ms -= fsdp_now_ms() - begin;
    ssize_t n = recv(session->channel, message_out, sizeof *message_out, MSG_DONTWAIT | MSG_TRUNC);
    if (n == 0 || (n < 0 && errno == ECONNRESET))
        return fail_child(session, death(session), err);
    if (n != (ssize_t)sizeof *message_out)
        return fail_child(session, "sent an invalid message", err);
    return FSDP_OK;
}

/* --- messages of the child -------------------------------------------------------------------- */

/* Sends bytes of the file. The parent reports an I/O error itself; the child does not get it. */
static fsdp_status bring_bytes(fsdp_h5_session *session, const fsdp_h5_message *need,
                               fsdp_error *err)
{
    int64_t offset = need->number, size = need->size;
    if (size <= 0 || size > FSDP_H5_FILE_ROOM || offset < 0 || offset > session->view.size ||
        size > session->view.size - offset)
        return fail_child(session, "asks for bytes that the file does not have", err);
    fsdp_status status =
        session->view.pread(session->view.context, session->shared, (size_t)size, offset, err);
    if (status != FSDP_OK) {
        session->is_over = true;
        return status;
    }
    const fsdp_h5_message answer = {.kind = FSDP_H5_BYTES, .size = size};
    return send_message(session, &answer, err);
}

/* Reports the child's reason with unsafe characters replaced; the child may choose among few
 * errors. */
static fsdp_status take_failure(fsdp_h5_session *session, const fsdp_h5_message *failed,
                                fsdp_error *err)
{
    enum { LONGEST = 700 };
    char reason[LONGEST], text[LONGEST];
    size_t size = failed->size >= 0 && failed->size <= LONGEST ? (size_t)failed->size : LONGEST;
    memcpy(reason, session->shared + FSDP_H5_FILE_ROOM, size);
    fsdp_status status = FSDP_ERR_REFUSED;
    if (failed->status == FSDP_ERR_DAMAGED || failed->status == FSDP_ERR_LIMIT)
        status = (fsdp_status)failed->status;
    return fsdp_fail(err, status, "'%s': %s", session->view.path,
                     fsdp_printable_message(reason, size, text, sizeof text));
}

/* Serves NEED, reports FAILED; accepts PART and `last`, of at most FSDP_H5_REPLY_ROOM bytes. */
static fsdp_status take_message(fsdp_h5_session *session, const fsdp_h5_message *message,
                                fsdp_h5_message_kind last, fsdp_error *err)
{
    if (message->kind == FSDP_H5_NEED)
        return bring_bytes(session, message, err);
    if (message->size < 0 || message->size > FSDP_H5_REPLY_ROOM)
        return fail_child(session, "sent an invalid message", err);
    if (message->kind == FSDP_H5_FAILED)
        return take_failure(session, message, err);
    if (message->kind != (uint32_t)last && message->kind != FSDP_H5_PART)
        return fail_child(session, "sent an invalid message", err);
    return FSDP_OK;
}

typedef struct part_taker {
    fsdp_text *listing; /* NULL: parts are not expected */
    size_t most;
} part_taker;

static fsdp_status take_part(fsdp_h5_session *session, const part_taker *taker, size_t size,
                             fsdp_error *err)
{
    if (!taker->listing)
        return fail_child(session, "sent an invalid message", err);
    if (size > taker->most || taker->listing->size > taker->most - size) {
        session->is_over = true;
        return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s': the listing takes more than %zu bytes",
                         session->view.path, taker->most);
    }
    fsdp_text_add(taker->listing, (const char *)session->shared + FSDP_H5_FILE_ROOM, size);
    return taker->listing->failed ? fsdp_fail_memory(err, "a listing") : FSDP_OK;
}

/* Handles messages until the kind `last` arrives. */
static fsdp_status converse(fsdp_h5_session *session, fsdp_h5_message_kind last,
                            const part_taker *taker, size_t *size_out, fsdp_error *err)
{
    int64_t left_ms = session->deadline_ms;
    for (;;) {
        fsdp_h5_message message;
        FSDP_TRY(await(session, &left_ms, &message, err));
        FSDP_TRY(take_message(session, &message, last, err));
        bool is_done = message.kind == (uint32_t)last, is_part = message.kind == FSDP_H5_PART;
        if (is_part || is_done)
            *size_out = (size_t)message.size;
        if (is_part || (is_done && taker->listing))
            FSDP_TRY(take_part(session, taker, *size_out, err));
        if (is_done)
            return FSDP_OK;
        const fsdp_h5_message go_on = {.kind = FSDP_H5_GO_ON};
        if (is_part)
            FSDP_TRY(send_message(session, &go_on, err));
    }
}

/* --- requests --------------------------------------------------------------------------------- */

/* Raises the limits of the sandbox for one more request. A limit that the kernel does not raise stays. */
static void extend_limits(pid_t child, int64_t memory)
{
    clockid_t clock;
    struct timespec used;
    struct rlimit limit;
    if (clock_getcpuclockid(child, &clock) == 0 && clock_gettime(clock, &used) == 0 &&
        prlimit(child, RLIMIT_CPU, NULL, &limit) == 0) {
        rlim_t seconds = (rlim_t)used.tv_sec + FSDP_HDF5_CPU_SECONDS + 1;
        limit.rlim_cur = limit.rlim_max < seconds ? limit.rlim_max : seconds;
        (void)prlimit(child, RLIMIT_CPU, &limit, NULL);
    }
    if (memory > 0 && prlimit(child, RLIMIT_AS, NULL, &limit) == 0) {
        rlim_t more = limit.rlim_max - limit.rlim_cur;
        limit.rlim_cur += more < (rlim_t)memory ? more : (rlim_t)memory;
        (void)prlimit(child, RLIMIT_AS, &limit, NULL);
    }
}

/* libhdf5 needs a chunk in its stored form, in its decoded form, and a buffer in between. */
static void grant(fsdp_h5_session *session, int64_t chunk)
{
    enum { COPIES = 4 };
    int64_t more = chunk > FSDP_HDF5_MEMORY / (2 * COPIES) ? COPIES * chunk - session->granted : 0;
    if (session->child > 0)
        extend_limits(session->child, more > 0 ? more : 0);
    if (more > 0)
        session->granted += more;
}

static fsdp_status request(fsdp_h5_session *session, const fsdp_h5_message *message, int64_t chunk,
                           const part_taker *taker, size_t *size_out, fsdp_error *err)
{
    if (session->is_over)
        return fsdp_fail(err, FSDP_ERR_REFUSED, "'%s': the HDF5 library failed on this file before",
                         session->view.path);
    grant(session, chunk);
    FSDP_TRY(send_message(session, message, err));
    return converse(session, FSDP_H5_DONE, taker, size_out, err);
}

fsdp_status fsdp_h5_session_list(fsdp_h5_session *session, size_t most, fsdp_text *listing,
                                 fsdp_error *err)
{
    const fsdp_h5_message message = {.kind = FSDP_H5_LIST};
    const part_taker taker = {listing, most};
    size_t size;
    pthread_mutex_lock(&session->lock);
    fsdp_status status = request(session, &message, 0, &taker, &size, err);
    pthread_mutex_unlock(&session->lock);
    return status;
}

fsdp_status fsdp_h5_session_read(fsdp_h5_session *session, const fsdp_h5_request *wanted,
                                 void *data, fsdp_error *err)
{
    const fsdp_h5_message message = {.kind = FSDP_H5_READ,
                                     .number = wanted->dataset,
                                     .size = wanted->cache,
                                     .box = *wanted->box};
    const part_taker nothing = {NULL, 0};
    size_t brought = 0;
    pthread_mutex_lock(&session->lock);
    fsdp_status status = request(session, &message, wanted->chunk, &nothing, &brought, err);
    if (status == FSDP_OK && brought != wanted->size)
        status = fail_child(session, "sent a different number of bytes", err);
    if (status == FSDP_OK)
        memcpy(data, session->shared + FSDP_H5_FILE_ROOM, wanted->size);
    pthread_mutex_unlock(&session->lock);
    return status;
}

/* --- beginning and end ------------------------------------------------------------------------ */

fsdp_status fsdp_h5_session_adopt(const fsdp_h5_file_view *view, int channel, unsigned char *shared,
                                  int64_t deadline_ms, fsdp_h5_session **session_out,
                                  fsdp_error *err)
{
    *session_out = NULL;
    fsdp_h5_session *session = fsdp_alloc(1, sizeof *session);
    if (!session)
        return fsdp_fail_memory(err, "an HDF5 file");
    session->view = *view;
    session->channel = channel;
    session->shared = shared;
    session->handle = -1;
    session->deadline_ms = deadline_ms;
    pthread_mutex_init(&session->lock, NULL);
    *session_out = session;
    return FSDP_OK;
}

/* Ends the child through its pidfd where there is one: a program that reaps all its children may
 * have reaped this one, and its pid may belong to another process now. */
static void end_child(fsdp_h5_session *session)
{
    siginfo_t info;
    if (session->handle >= 0) {
        (void)syscall(SYS_pidfd_send_signal, session->handle, SIGKILL, NULL, 0);
        while (waitid((idtype_t)BY_PIDFD, (id_t)session->handle, &info, WEXITED) < 0 &&
               errno == EINTR)
            continue;
        close(session->handle);
        return;
    }
    kill(session->child, SIGKILL);
    while (waitpid(session->child, NULL, 0) < 0 && errno == EINTR)
        continue;
}

void fsdp_h5_session_stop(fsdp_h5_session *session)
{
    if (!session)
        return;
    if (session->child > 0) {
        close(session->channel);
        end_child(session);
        munmap(session->shared, FSDP_H5_SHARED);
    }
    pthread_mutex_destroy(&session->lock);
    fsdp_free(session);
}

/* Holds libhdf5's lock during the fork, so that the child gets the library in a consistent
 * state. */
static fsdp_status fork_child(fsdp_h5_session *session, int child_channel, fsdp_error *err)
{
    fsdp_h5_call call;
    FSDP_TRY(fsdp_h5_enter(&call, err));
    pid_t child = fork();
    if (child == 0)
        fsdp_h5_child_run(child_channel, session->shared, session->view.size,
                          session->view.limits_only);
    int reason = errno;
    fsdp_h5_leave(&call);
    if (child < 0)
        return fsdp_fail_errno(err, reason, "cannot start a process that reads '%s'",
                               session->view.path);
    session->child = child;
    session->handle = (int)syscall(SYS_pidfd_open, child, 0);
    return FSDP_OK;
}

static fsdp_status greet(fsdp_h5_session *session, fsdp_error *err)
{
    const part_taker nothing = {NULL, 0};
    size_t size;
    return converse(session, FSDP_H5_READY, &nothing, &size, err);
}

/* The shared memory has no descriptor, so the child cannot truncate it. */
fsdp_status fsdp_h5_session_start(const fsdp_h5_file_view *view, fsdp_h5_session **session_out,
                                  fsdp_error *err)
{
    int channels[2];
    *session_out = NULL;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, channels) < 0)
        return fsdp_fail_errno(err, errno, "cannot start a process that reads '%s'", view->path);
    void *shared =
        mmap(NULL, FSDP_H5_SHARED, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    fsdp_h5_session *session = NULL;
    fsdp_status status = FSDP_OK;
    if (shared == MAP_FAILED)
        status = fsdp_fail_memory(err, "an HDF5 file");
    else
        status = fsdp_h5_session_adopt(view, channels[0], shared,
                                       USUAL_DEADLINE_MS + view->size / FILE_BYTES_PER_MS, &session,
                                       err);
    if (status == FSDP_OK)
        status = fork_child(session, channels[1], err);
    close(channels[1]);
    if (status != FSDP_OK) {
        close(channels[0]);
        if (shared != MAP_FAILED)
            munmap(shared, FSDP_H5_SHARED);
        fsdp_h5_session_stop(session);
        return status;
    }
    status = greet(session, err);
    if (status != FSDP_OK) {
        fsdp_h5_session_stop(session);
        return status;
    }
    *session_out = session;
    return FSDP_OK;
}
