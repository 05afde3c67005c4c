/*
 * MPI: a resource of the process (mpi_process.h), and the control plane's back end over it, where one message
 * is one MPI message with one tag.
 *
 * No call blocks in MPI. A wait is a loop of tests with a deadline that first polls and then
 * yields, because ranks often outnumber cores. Data is copied through a stage: after a timeout MPI
 * may still read a send or write a receive, so the stage is freed only when its request is done.
 */
#include <fsdp/ctl_mpi.h>

#include <mpi.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <time.h>

#include "base/core/clock.h"
#include "base/core/given.h"
#include "base/core/mem.h"
#include "runtime/bootstrap/mpi_process.h"
#include "statedict/ctl/ctl_backend.h"

/* === the process ============================================================================== */

enum { SPINS = 200, YIELDS = 2000, NAP_US = 50, LONGEST_NAP_US = 1000 };

static struct {
    pthread_mutex_t lock;
    bool begun_here, is_broken;
    int thread_level; /* granted by MPI */
    int deadline_ms;  /* of the creation of a control plane; 0: the default */
    fsdp_mpi_deferred *deferred;
} process = {.lock = PTHREAD_MUTEX_INITIALIZER};

void fsdp_mpi_lock(void)
{
    pthread_mutex_lock(&process.lock);
}

void fsdp_mpi_unlock(void)
{
    pthread_mutex_unlock(&process.lock);
}

bool fsdp_mpi_may_call(void)
{
    int is_main = 0;
    if (process.thread_level >= MPI_THREAD_SERIALIZED)
        return true;
    return MPI_Is_thread_main(&is_main) == MPI_SUCCESS && is_main;
}

/* True when any thread may call MPI. */
static bool allows_threads(void)
{
    return process.thread_level >= MPI_THREAD_SERIALIZED;
}

void fsdp_mpi_mark_broken(void)
{
    process.is_broken = true;
}

fsdp_status fsdp_mpi_fail(fsdp_error *err, int code, const char *what)
{
    char text[MPI_MAX_ERROR_STRING] = "unknown error";
    int length = 0;
    (void)MPI_Error_string(code, text, &length);
    return fsdp_fail(err, FSDP_ERR_PEER, "%s: %s", what, text);
}

/* --- waiting ---------------------------------------------------------------------------------- */

/* Backs off after `tests` unsuccessful tests: polls, then yields, then sleeps longer and longer. False when
 * the time is over, but only after some tests: MPI moves data inside of them. */
static bool keep_waiting(int tests, int64_t until_ms)
{
    if (tests < SPINS)
        return true;
    if (fsdp_now_ms() >= until_ms)
        return false;
    if (tests < YIELDS) {
        sched_yield();
        return true;
    }
    int nap_us =
        tests - YIELDS < LONGEST_NAP_US - NAP_US ? NAP_US + tests - YIELDS : LONGEST_NAP_US;
    nanosleep(&(struct timespec){.tv_nsec = nap_us * 1000L}, NULL);
    return true;
}

/* --- deferred memory -------------------------------------------------------------------------- */

void fsdp_mpi_defer(fsdp_mpi_deferred *deferred)
{
    deferred->next = process.deferred;
    process.deferred = deferred;
}

static bool is_done(const fsdp_mpi_deferred *deferred)
{
    bool all = true;
    for (int i = 0; i < deferred->count; i++) {
        int done = 0;
        all &= MPI_Test(&deferred->requests[i], &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done;
    }
    return all;
}

void fsdp_mpi_reclaim(void)
{
    for (fsdp_mpi_deferred **at = &process.deferred; *at;) {
        fsdp_mpi_deferred *old = *at;
        if (!is_done(old)) {
            at = &old->next;
            continue;
        }
        void *memory[] = {old->memory[0], old->memory[1], old->memory[2]};
        *at = old->next;
        for (int i = 0; i < 3; i++)
            fsdp_free(memory[i]);
    }
}

/* --- the beginning ---------------------------------------------------------------------------- */

/* A program that called MPI_Init itself is responsible for its thread level; here more was
 * requested. */
static fsdp_status check_threads(fsdp_error *err)
{
    if (!process.begun_here || process.thread_level >= MPI_THREAD_FUNNELED)
        return FSDP_OK;
    return fsdp_fail(
        err, FSDP_ERR_USAGE,
        "cannot use this MPI: it allows no threads other than the one that calls it (level %d), "
        "but saving and loading use threads; use an MPI that gives MPI_THREAD_FUNNELED",
        process.thread_level);
}

/* Initialises MPI unless that is done. */
static fsdp_status begin_mpi(fsdp_error *err)
{
    int begun = 0, ended = 0;
    int code = MPI_Initialized(&begun);
    if (code == MPI_SUCCESS)
        code = MPI_Finalized(&ended);
    if (code != MPI_SUCCESS)
        return fsdp_mpi_fail(err, code, "MPI_Initialized");
    if (ended)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot initialise MPI again: it has ended in this process");
    if (begun && !process.begun_here)
        (void)MPI_Query_thread(&process.thread_level);
    if (begun)
        return check_threads(err);
    code = MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &process.thread_level);
    if (code != MPI_SUCCESS)
        return fsdp_mpi_fail(err, code, "MPI_Init_thread");
    process.begun_here = true;
    return check_threads(err);
}

void fsdp_ctl_mpi_set_deadline(int milliseconds)
{
    process.deadline_ms = milliseconds;
}

bool fsdp_mpi_finalize(void)
{
    int begun = 0, ended = 0;
    if (MPI_Initialized(&begun) != MPI_SUCCESS || MPI_Finalized(&ended) != MPI_SUCCESS)
        return false;
    if (!process.begun_here || !begun || ended)
        return !process.is_broken;
    return !process.is_broken && MPI_Finalize() == MPI_SUCCESS;
}

/* --- duplicates ------------------------------------------------------------------------------- */

static fsdp_status await_duplicate(MPI_Request *request, bool *pending_out, fsdp_error *err)
{
    int deadline_ms = process.deadline_ms > 0 ? process.deadline_ms : FSDP_CTL_DEADLINE_MS;
    int64_t until_ms = fsdp_now_ms() + deadline_ms;
    int done = 0;
    for (int tests = 0; !done; tests++) {
        fsdp_mpi_lock();
        int code = MPI_Test(request, &done, MPI_STATUS_IGNORE);
        fsdp_mpi_unlock();
        if (code != MPI_SUCCESS)
            return fsdp_mpi_fail(err, code, "MPI_Test");
        if (!done && !keep_waiting(tests, until_ms)) {
            *pending_out = true;
            return fsdp_fail(err, FSDP_ERR_PEER,
                             "not all ranks connected over MPI within %g s: a rank is gone or "
                             "stuck; no connection was begun",
                             deadline_ms / 1000.0);
        }
    }
    return FSDP_OK;
}

/* The caller's error handler usually ends the process. Until the duplicate has its own handler,
 * errors are returned. */
static fsdp_status duplicate_gently(MPI_Comm comm, MPI_Comm *comm_out, bool *pending_out,
                                    fsdp_error *err)
{
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_Errhandler handler;
    int code = MPI_Comm_get_errhandler(comm, &handler);
    if (code != MPI_SUCCESS)
        return fsdp_mpi_fail(err, code, "MPI_Comm_get_errhandler");
    const char *what = "MPI_Comm_set_errhandler";
    code = MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    if (code == MPI_SUCCESS) {
        what = "MPI_Comm_idup";
        fsdp_mpi_lock();
        code = MPI_Comm_idup(comm, comm_out, &request);
        fsdp_mpi_unlock();
    }
    fsdp_status status = code == MPI_SUCCESS ? await_duplicate(&request, pending_out, err)
                                             : fsdp_mpi_fail(err, code, what);
    (void)MPI_Comm_set_errhandler(comm, handler);
    (void)MPI_Errhandler_free(&handler);
    return status;
}

fsdp_status fsdp_mpi_duplicate(MPI_Comm comm, MPI_Comm *comm_out, bool *pending_out,
                               fsdp_error *err)
{
    *pending_out = false;
    FSDP_TRY(duplicate_gently(comm, comm_out, pending_out, err));
    int code = MPI_Comm_set_errhandler(*comm_out, MPI_ERRORS_RETURN);
    return code == MPI_SUCCESS ? FSDP_OK : fsdp_mpi_fail(err, code, "MPI_Comm_set_errhandler");
}

/* === the control plane ======================================================================== */

enum { TAG = 0x6673 };

/* The buffer of one message in flight. */
typedef struct stage {
    MPI_Request request; /* after a timeout: still in flight */
    fsdp_mpi_deferred deferred;
    unsigned char data[FSDP_CTL_PIECE];
} stage;

typedef struct mpi_link {
    MPI_Comm comm;
    stage *outgoing, *incoming;
    struct mpi_link *next; /* in the list `unfinished` */
} mpi_link;

static mpi_link *unfinished;

static int test(MPI_Request *request, int *done_out)
{
    fsdp_mpi_lock();
    int code = MPI_Test(request, done_out, MPI_STATUS_IGNORE);
    fsdp_mpi_unlock();
    return code;
}

static fsdp_status wait_for_request(MPI_Request *request, int64_t until_ms, fsdp_error *err)
{
    int done = 0;
    for (int tests = 0;; tests++) {
        int code = test(request, &done);
        if (code != MPI_SUCCESS)
            return fsdp_mpi_fail(err, code, "MPI_Test");
        if (done)
            return FSDP_OK;
        if (!keep_waiting(tests, until_ms))
            return fsdp_ctl_fail_late(err);
    }
}

/* --- messages --------------------------------------------------------------------------------- */

static fsdp_status have_stage(stage **slot, fsdp_error *err)
{
    fsdp_mpi_lock();
    fsdp_mpi_reclaim();
    fsdp_mpi_unlock();
    if (!*slot)
        *slot = fsdp_alloc(1, sizeof **slot);
    return *slot ? FSDP_OK : fsdp_fail_memory(err, "a message between ranks");
}

static void defer_free(stage **slot, MPI_Request request)
{
    stage *left = *slot;
    left->request = request;
    left->deferred = (fsdp_mpi_deferred){.requests = &left->request, .count = 1, .memory = {left}};
    fsdp_mpi_lock();
    fsdp_mpi_defer(&left->deferred);
    fsdp_mpi_unlock();
    *slot = NULL;
}

static fsdp_status send_message(fsdp_ctl *ctl, int to, const void *data, size_t size,
                                int64_t until_ms, fsdp_error *err)
{
    mpi_link *link = ctl->backend;
    MPI_Request request = MPI_REQUEST_NULL;
    FSDP_TRY(have_stage(&link->outgoing, err));
    memcpy(link->outgoing->data, data, size);
    fsdp_mpi_lock();
    int code = MPI_Isend(link->outgoing->data, (int)size, MPI_BYTE, to, TAG, link->comm, &request);
    fsdp_mpi_unlock();
    if (code != MPI_SUCCESS)
        return fsdp_mpi_fail(err, code, "MPI_Isend");
    fsdp_status status;
    do
        status = wait_for_request(&request, until_ms, err);
    while (status == FSDP_ERR_PEER && err->text[0] == '\0' &&
           fsdp_ctl_keep_sending(ctl, to, &until_ms));
    if (status != FSDP_OK)
        defer_free(&link->outgoing, request);
    return status;
}

/* The size of the next message, if one has arrived. */
static int probe(const mpi_link *link, int from, MPI_Message *message_out, int *is_there_out,
                 int *size_out)
{
    MPI_Status found;
    fsdp_mpi_lock();
    int code = MPI_Improbe(from, TAG, link->comm, is_there_out, message_out, &found);
    if (code == MPI_SUCCESS && *is_there_out)
        code = MPI_Get_count(&found, MPI_BYTE, size_out);
    fsdp_mpi_unlock();
    return code;
}

static fsdp_status wait_for_message(const mpi_link *link, int from, int64_t until_ms,
                                    MPI_Message *message_out, int *size_out, fsdp_error *err)
{
    int is_there = 0;
    for (int tests = 0;; tests++) {
        int code = probe(link, from, message_out, &is_there, size_out);
        if (code != MPI_SUCCESS)
            return fsdp_mpi_fail(err, code, "MPI_Improbe");
        if (is_there)
            return FSDP_OK;
        if (!keep_waiting(tests, until_ms))
            return fsdp_ctl_fail_late(err);
    }
}

static fsdp_status recv_message(fsdp_ctl *ctl, int from, void *data, size_t size, int64_t until_ms,
                                fsdp_error *err)
{
    mpi_link *link = ctl->backend;
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_Message message = MPI_MESSAGE_NULL;
    int coming = 0;
    FSDP_TRY(have_stage(&link->incoming, err));
    FSDP_TRY(wait_for_message(link, from, until_ms, &message, &coming, err));
    if (coming < 0 || coming > FSDP_CTL_PIECE)
        return fsdp_fail(err, FSDP_ERR_PEER,
                         "rank %d sent a message of %d bytes, which is not a valid size", from,
                         coming);
    fsdp_mpi_lock();
    int code = MPI_Imrecv(link->incoming->data, coming, MPI_BYTE, &message, &request);
    fsdp_mpi_unlock();
    if (code != MPI_SUCCESS)
        return fsdp_mpi_fail(err, code, "MPI_Imrecv");
    fsdp_status status = wait_for_request(&request, until_ms, err);
    if (status != FSDP_OK) {
        defer_free(&link->incoming, request);
        return status;
    }
    return fsdp_ctl_hand_over(ctl, from, (fsdp_ctl_bytes){link->incoming->data, (size_t)coming},
                              data, size, err);
}

/* --- creation and end ------------------------------------------------------------------------- */

static void close_link(fsdp_ctl *ctl)
{
    mpi_link *link = ctl->backend;
    if (ctl->poison.status != FSDP_OK)
        fsdp_mpi_mark_broken();
    else if (link->comm != MPI_COMM_NULL) {
        fsdp_mpi_lock();
        (void)MPI_Comm_free(&link->comm);
        fsdp_mpi_unlock();
    }
    fsdp_free(link->outgoing);
    fsdp_free(link->incoming);
    fsdp_free(link);
}

static const fsdp_ctl_ops mpi_ops = {
    .name = "mpi",
    .send = send_message,
    .recv = recv_message,
    .close = close_link,
};

static fsdp_status connect_link(MPI_Comm comm, mpi_link *link, int *rank_out, int *size_out,
                                bool *pending_out, fsdp_error *err)
{
    FSDP_TRY(fsdp_mpi_duplicate(comm, &link->comm, pending_out, err));
    int code = MPI_Comm_rank(link->comm, rank_out);
    if (code == MPI_SUCCESS)
        code = MPI_Comm_size(link->comm, size_out);
    return code == MPI_SUCCESS ? FSDP_OK : fsdp_mpi_fail(err, code, "MPI_Comm_size");
}

/* MPI may still write a pending duplicate: its link is kept until the process ends. */
static void give_up_link(mpi_link *link, bool pending)
{
    if (pending) {
        fsdp_mpi_mark_broken();
        link->next = unfinished;
        unfinished = link;
        return;
    }
    if (link->comm != MPI_COMM_NULL)
        (void)MPI_Comm_free(&link->comm);
    fsdp_free(link);
}

fsdp_status fsdp_ctl_mpi_comm(void *comm, fsdp_ctl **ctl_out, fsdp_error *err)
{
    FSDP_NEED(err, comm, ctl_out);
    int rank = 0, size = 0;
    bool pending = false;
    MPI_Comm given = *(MPI_Comm *)comm;
    if (given == MPI_COMM_NULL)
        return fsdp_fail(err, FSDP_ERR_USAGE, "MPI_COMM_NULL connects no ranks");
    mpi_link *link = fsdp_alloc(1, sizeof *link);
    if (!link)
        return fsdp_fail_memory(err, "the control plane");
    link->comm = MPI_COMM_NULL;
    fsdp_status status = connect_link(given, link, &rank, &size, &pending, err);
    if (status == FSDP_OK)
        return fsdp_ctl_create(&mpi_ops, rank, size, link, ctl_out, err);
    give_up_link(link, pending);
    return status;
}

fsdp_status fsdp_ctl_mpi_world(fsdp_ctl **ctl_out, fsdp_error *err)
{
    FSDP_NEED(err, ctl_out);
    MPI_Comm world = MPI_COMM_WORLD;
    FSDP_TRY(begin_mpi(err));
    return fsdp_ctl_mpi_comm(&world, ctl_out, err);
}

fsdp_status fsdp_ctl_mpi_again(fsdp_ctl *ctl, fsdp_ctl **ctl_out, fsdp_error *err)
{
    MPI_Comm comm = fsdp_ctl_mpi_comm_of(ctl);
    fsdp_status status = FSDP_OK;
    if (!allows_threads())
        status = fsdp_fail(err, FSDP_ERR_USAGE,
                           "a second thread cannot use MPI, which was initialised with less than "
                           "MPI_THREAD_SERIALIZED");
    FSDP_TRY(fsdp_ctl_agree(ctl, status, err));
    return fsdp_ctl_mpi_comm(&comm, ctl_out, err);
}

MPI_Comm fsdp_ctl_mpi_comm_of(const fsdp_ctl *ctl)
{
    return ctl->ops == &mpi_ops ? ((const mpi_link *)ctl->backend)->comm : MPI_COMM_NULL;
}
