/*
 * The control plane's back end over MPI: one message is one MPI message with one tag.
 *
 * Nothing here blocks in MPI. Every wait is a loop of tests with a deadline, first eagerly, then
 * giving way to others: ranks often outnumber cores. Data goes through a buffer of our own, because
 * a send that was given up may still be read, and a receive still be written, by MPI later: then
 * the buffer is left to MPI until its request is done. Owner of mpi.h.
 */
#include <fsdp/ctl_mpi.h>

#include <mpi.h>
#include <sched.h>
#include <string.h>
#include <time.h>

#include "base/mem.h"
#include "statedict/ctl_backend.h"

enum { TAG = 0x6673, SPINS = 200, YIELDS = 2000, NAP_US = 50, LONGEST_NAP_US = 1000 };

/* Room for one piece on its way. */
typedef struct stage {
    struct stage *next;
    MPI_Request request; /* when it was given up, but MPI may still be at it */
    unsigned char data[FSDP_CTL_PIECE];
} stage;

typedef struct mpi_link {
    MPI_Comm comm;
    stage *outgoing, *incoming;
    struct mpi_link *next; /* among the unfinished */
} mpi_link;

/* What outlives a control plane, because MPI does: one per process, like MPI itself. */
static struct {
    bool begun_here, is_broken;
    int thread_level; /* what MPI_Init_thread gave */
    int deadline_ms;  /* for all ranks to come; 0: the default */
    stage *left_to_mpi;
    mpi_link *unfinished;
} process;

static fsdp_status fail_mpi(fsdp_error *err, int code, const char *what)
{
    char text[MPI_MAX_ERROR_STRING] = "unknown error";
    int length = 0;
    (void)MPI_Error_string(code, text, &length);
    return fsdp_fail(err, FSDP_ERR_PEER, "%s: %s", what, text);
}

/* --- waiting ---------------------------------------------------------------------------------- */

/* Returns false when the time is over, but only after SPINS tests: MPI needs some to move data. */
static bool keep_waiting(int *tests, int64_t until_ms)
{
    int n = (*tests)++;
    if (n < SPINS)
        return true;
    if (fsdp_now_ms() >= until_ms)
        return false;
    if (n < YIELDS) {
        sched_yield();
        return true;
    }
    int nap_us = NAP_US + (n - YIELDS);
    if (nap_us > LONGEST_NAP_US)
        nap_us = LONGEST_NAP_US;
    nanosleep(&(struct timespec){.tv_nsec = nap_us * 1000L}, NULL);
    return true;
}

static fsdp_status fail_timeout(fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_PEER, "%s", "");
}

static fsdp_status wait_for_request(MPI_Request *request, int64_t until_ms, fsdp_error *err)
{
    int done = 0, tests = 0;
    for (;;) {
        int code = MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (code != MPI_SUCCESS)
            return fail_mpi(err, code, "MPI_Test");
        if (done)
            return FSDP_OK;
        if (!keep_waiting(&tests, until_ms))
            return fail_timeout(err);
    }
}

/* --- messages --------------------------------------------------------------------------------- */

/* Frees what MPI has done with meanwhile. */
static void reclaim_stages(void)
{
    for (stage **at = &process.left_to_mpi; *at;) {
        stage *old = *at;
        int done = 0;
        if (MPI_Test(&old->request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done) {
            *at = old->next;
            fsdp_free(old);
        } else {
            at = &old->next;
        }
    }
}

static fsdp_status have_stage(stage **slot, fsdp_error *err)
{
    reclaim_stages();
    if (!*slot)
        *slot = fsdp_alloc(1, sizeof **slot);
    return *slot ? FSDP_OK : fsdp_fail_memory(err, "a message between ranks");
}

static void leave_to_mpi(stage **slot, MPI_Request request)
{
    (*slot)->request = request;
    (*slot)->next = process.left_to_mpi;
    process.left_to_mpi = *slot;
    *slot = NULL;
}

static fsdp_status send_message(fsdp_ctl *ctl, int to, const void *data, size_t size,
                                int64_t until_ms, fsdp_error *err)
{
    mpi_link *link = ctl->backend;
    MPI_Request request = MPI_REQUEST_NULL;
    FSDP_TRY(have_stage(&link->outgoing, err));
    memcpy(link->outgoing->data, data, size);
    int code = MPI_Isend(link->outgoing->data, (int)size, MPI_BYTE, to, TAG, link->comm, &request);
    if (code != MPI_SUCCESS)
        return fail_mpi(err, code, "MPI_Isend");
    fsdp_status status = wait_for_request(&request, until_ms, err);
    if (status != FSDP_OK)
        leave_to_mpi(&link->outgoing, request);
    return status;
}

static fsdp_status wait_for_message(const mpi_link *link, int from, int64_t until_ms,
                                    MPI_Message *message_out, int *size_out, fsdp_error *err)
{
    MPI_Status found;
    int is_there = 0, tests = 0;
    for (;;) {
        int code = MPI_Improbe(from, TAG, link->comm, &is_there, message_out, &found);
        if (code != MPI_SUCCESS)
            return fail_mpi(err, code, "MPI_Improbe");
        if (is_there)
            break;
        if (!keep_waiting(&tests, until_ms))
            return fail_timeout(err);
    }
    int code = MPI_Get_count(&found, MPI_BYTE, size_out);
    return code == MPI_SUCCESS ? FSDP_OK : fail_mpi(err, code, "MPI_Get_count");
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
        return fsdp_fail(err, FSDP_ERR_PEER, "rank %d sent a message of %d bytes", from, coming);
    int code = MPI_Imrecv(link->incoming->data, coming, MPI_BYTE, &message, &request);
    if (code != MPI_SUCCESS)
        return fail_mpi(err, code, "MPI_Imrecv");
    fsdp_status status = wait_for_request(&request, until_ms, err);
    if (status != FSDP_OK) {
        leave_to_mpi(&link->incoming, request);
        return status;
    }
    if ((size_t)coming != size)
        return fsdp_fail(err, FSDP_ERR_PEER, "rank %d sent %d bytes where %zu were expected", from,
                         coming, size);
    memcpy(data, link->incoming->data, size);
    return FSDP_OK;
}

/* --- life ------------------------------------------------------------------------------------- */

static void close_link(fsdp_ctl *ctl)
{
    mpi_link *link = ctl->backend;
    if (ctl->poison.status != FSDP_OK)
        process.is_broken = true;
    else if (link->comm != MPI_COMM_NULL)
        (void)MPI_Comm_free(&link->comm);
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

/* Whoever called MPI_Init alone answers for calling MPI from one thread; we asked for more. */
static fsdp_status check_threads(fsdp_error *err)
{
    if (!process.begun_here || process.thread_level >= MPI_THREAD_FUNNELED)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "this MPI allows no threads beside the one that calls it (level %d), and "
                     "saving and loading use some: one that gives MPI_THREAD_FUNNELED is needed",
                     process.thread_level);
}

static fsdp_status begin_mpi(fsdp_error *err)
{
    int begun = 0, ended = 0;
    int code = MPI_Initialized(&begun);
    if (code == MPI_SUCCESS)
        code = MPI_Finalized(&ended);
    if (code != MPI_SUCCESS)
        return fail_mpi(err, code, "MPI_Initialized");
    if (ended)
        return fsdp_fail(err, FSDP_ERR_USAGE, "MPI has ended in this process: it begins only once");
    if (begun)
        return check_threads(err);
    code = MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &process.thread_level);
    if (code != MPI_SUCCESS)
        return fail_mpi(err, code, "MPI_Init_thread");
    process.begun_here = true;
    return check_threads(err);
}

/* A duplicate, with a deadline: another rank may not have come. *pending_out: MPI may still write it. */
static fsdp_status duplicate_comm(MPI_Comm comm, MPI_Comm *comm_out, bool *pending_out,
                                  fsdp_error *err)
{
    MPI_Request request = MPI_REQUEST_NULL;
    int code = MPI_Comm_idup(comm, comm_out, &request);
    if (code != MPI_SUCCESS)
        return fail_mpi(err, code, "MPI_Comm_idup");
    int deadline_ms = process.deadline_ms > 0 ? process.deadline_ms : FSDP_CTL_DEADLINE_MS;
    fsdp_status status = wait_for_request(&request, fsdp_now_ms() + deadline_ms, err);
    *pending_out = status != FSDP_OK;
    if (*pending_out && err && err->text[0] == '\0')
        (void)fsdp_fail(err, status,
                        "not all ranks came within %g s to set up the control plane: one is gone, "
                        "or stuck; nothing was begun",
                        deadline_ms / 1000.0);
    return status;
}

/* The caller's communicator has a handler for errors, usually one that ends the process. Until there
 * is a duplicate with a handler of ours, errors are to come back to us. */
static fsdp_status duplicate_gently(MPI_Comm comm, MPI_Comm *comm_out, bool *pending_out,
                                    fsdp_error *err)
{
    MPI_Errhandler handler;
    int code = MPI_Comm_get_errhandler(comm, &handler);
    if (code != MPI_SUCCESS)
        return fail_mpi(err, code, "MPI_Comm_get_errhandler");
    code = MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    fsdp_status status = code == MPI_SUCCESS ? duplicate_comm(comm, comm_out, pending_out, err)
                                             : fail_mpi(err, code, "MPI_Comm_set_errhandler");
    (void)MPI_Comm_set_errhandler(comm, handler);
    (void)MPI_Errhandler_free(&handler);
    if (status != FSDP_OK)
        return status;
    code = MPI_Comm_set_errhandler(*comm_out, MPI_ERRORS_RETURN);
    return code == MPI_SUCCESS ? FSDP_OK : fail_mpi(err, code, "MPI_Comm_set_errhandler");
}

static fsdp_status connect_link(MPI_Comm comm, mpi_link *link, int *rank_out, int *size_out,
                                bool *pending_out, fsdp_error *err)
{
    FSDP_TRY(duplicate_gently(comm, &link->comm, pending_out, err));
    int code = MPI_Comm_rank(link->comm, rank_out);
    if (code == MPI_SUCCESS)
        code = MPI_Comm_size(link->comm, size_out);
    return code == MPI_SUCCESS ? FSDP_OK : fail_mpi(err, code, "MPI_Comm_size");
}

/* A duplicate that MPI may still write is left to it, with the link that holds it. */
static void give_up_link(mpi_link *link, bool pending)
{
    if (pending) {
        process.is_broken = true;
        link->next = process.unfinished;
        process.unfinished = link;
        return;
    }
    if (link->comm != MPI_COMM_NULL)
        (void)MPI_Comm_free(&link->comm);
    fsdp_free(link);
}

void fsdp_ctl_mpi_set_deadline(int milliseconds)
{
    process.deadline_ms = milliseconds;
}

fsdp_status fsdp_ctl_mpi_comm(void *comm, fsdp_ctl **ctl_out, fsdp_error *err)
{
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
    MPI_Comm world = MPI_COMM_WORLD;
    FSDP_TRY(begin_mpi(err));
    return fsdp_ctl_mpi_comm(&world, ctl_out, err);
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
