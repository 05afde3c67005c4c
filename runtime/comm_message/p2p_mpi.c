/*
 * Point-to-point messages over MPI: a channel is a tag of a communicator that only this file uses.
 * See p2p.h.
 *
 * That communicator is never freed: MPI could give its number to a later world, which would receive
 * late status messages of this one.
 */
#include "runtime/comm_message/p2p_mpi.h"

#include <sched.h>
#include <string.h>
#include <time.h>

#include "base/core/mem.h"
#include "runtime/bootstrap/mpi_process.h"

enum { STATUS_TAG = 0, LEAST_CHANNELS = 32767 };
enum { YIELDS = 100, NAP_US = 50, NAP_STEP_US = 2, LONGEST_NAP_US = 1000, MOST_STEPS = 475 };

typedef struct mpi_p2p {
    fsdp_p2p p2p;
    fsdp_p2p_ops ops; /* with the number of tags of this MPI */
    MPI_Comm comm;
} mpi_p2p;

typedef struct mpi_batch {
    fsdp_p2p_batch batch;
    fsdp_mpi_deferred deferred;
    MPI_Request *requests;
    MPI_Status *statuses; /* of completed requests */
    int *sizes;           /* expected by a receive; 0: a send */
} mpi_batch;

static fsdp_status may_call(fsdp_p2p *p2p, fsdp_error *err)
{
    (void)p2p;
    if (fsdp_mpi_may_call())
        return FSDP_OK;
    return fsdp_fail(
        err, FSDP_ERR_USAGE,
        "cannot call this MPI from a thread other than the main one: collectives on other threads "
        "(device cpu-async, calls that are started) need MPI_THREAD_SERIALIZED");
}

/* --- batches ---------------------------------------------------------------------------------- */

static void free_batch(mpi_batch *batch)
{
    if (!batch)
        return;
    fsdp_free(batch->batch.memory);
    fsdp_free(batch->requests);
    fsdp_free(batch->statuses);
    fsdp_free(batch->sizes);
    fsdp_free(batch);
}

static fsdp_status create_batch(fsdp_p2p *p2p, int places, size_t size, fsdp_p2p_batch **batch_out,
                                fsdp_error *err)
{
    (void)p2p;
    size_t n = (size_t)places;
    mpi_batch *made = fsdp_alloc(1, sizeof *made);
    if (made) {
        made->batch = (fsdp_p2p_batch){fsdp_alloc_pages(size), places};
        made->requests = fsdp_alloc(n, sizeof(MPI_Request));
        made->statuses = fsdp_alloc(n, sizeof(MPI_Status));
        made->sizes = fsdp_alloc(n, sizeof *made->sizes);
    }
    if (!made || !made->batch.memory || !made->requests || !made->statuses || !made->sizes) {
        free_batch(made);
        return fsdp_fail_memory(err, "messages between ranks");
    }
    for (int i = 0; i < places; i++)
        made->requests[i] = MPI_REQUEST_NULL;
    *batch_out = &made->batch;
    return FSDP_OK;
}

static bool is_idle(mpi_batch *batch)
{
    int all = 0;
    int code = MPI_Testall(batch->batch.places, batch->requests, &all, MPI_STATUSES_IGNORE);
    return code == MPI_SUCCESS && all;
}

/* After a failure the peers may never match the transfers in flight. */
static void close_batch(fsdp_p2p *p2p, fsdp_p2p_batch *closed)
{
    (void)p2p;
    mpi_batch *batch = (mpi_batch *)closed;
    fsdp_mpi_lock();
    bool is_over = fsdp_mpi_may_call() && is_idle(batch);
    if (!is_over) {
        fsdp_mpi_mark_broken();
        fsdp_free(batch->sizes);
        fsdp_free(batch->statuses);
        batch->deferred =
            (fsdp_mpi_deferred){.requests = batch->requests,
                                .count = batch->batch.places,
                                .memory = {batch->batch.memory, batch->requests, batch}};
        fsdp_mpi_defer(&batch->deferred);
    }
    fsdp_mpi_unlock();
    if (is_over)
        free_batch(batch);
}

/* --- transfers -------------------------------------------------------------------------------- */

static fsdp_status send_piece(fsdp_p2p *p2p, fsdp_p2p_batch *to_batch,
                              const fsdp_p2p_transfer *piece, fsdp_error *err)
{
    mpi_batch *batch = (mpi_batch *)to_batch;
    batch->sizes[piece->place] = 0;
    fsdp_mpi_lock();
    int code = MPI_Isend(piece->data, (int)piece->size, MPI_BYTE, piece->peer, piece->channel,
                         ((const mpi_p2p *)p2p)->comm, &batch->requests[piece->place]);
    fsdp_mpi_unlock();
    return code == MPI_SUCCESS ? FSDP_OK : fsdp_mpi_fail(err, code, "MPI_Isend");
}

static fsdp_status receive_piece(fsdp_p2p *p2p, fsdp_p2p_batch *to_batch,
                                 const fsdp_p2p_transfer *piece, fsdp_error *err)
{
    mpi_batch *batch = (mpi_batch *)to_batch;
    batch->sizes[piece->place] = (int)piece->size;
    fsdp_mpi_lock();
    int code = MPI_Irecv(piece->data, (int)piece->size, MPI_BYTE, piece->peer, piece->channel,
                         ((const mpi_p2p *)p2p)->comm, &batch->requests[piece->place]);
    fsdp_mpi_unlock();
    return code == MPI_SUCCESS ? FSDP_OK : fsdp_mpi_fail(err, code, "MPI_Irecv");
}

static fsdp_status check_received(const mpi_batch *batch, int place, const MPI_Status *status,
                                  fsdp_error *err)
{
    int size = 0, expected = batch->sizes[place];
    if (expected == 0)
        return FSDP_OK;
    int code = MPI_Get_count(status, MPI_BYTE, &size);
    if (code != MPI_SUCCESS)
        return fsdp_mpi_fail(err, code, "MPI_Get_count");
    if (size == expected)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_PEER, "received %d bytes over MPI, expected %d", size, expected);
}

/* MPI_ERR_IN_STATUS: the error of a request is in its status. */
static fsdp_status fail_test(const mpi_batch *batch, int count, int code, fsdp_error *err)
{
    for (int i = 0; code == MPI_ERR_IN_STATUS && i < count; i++) {
        int error = batch->statuses[i].MPI_ERROR;
        if (error != MPI_SUCCESS && error != MPI_ERR_PENDING)
            code = error;
    }
    return fsdp_mpi_fail(err, code, "MPI_Testsome");
}

static fsdp_status test_batch(fsdp_p2p *p2p, fsdp_p2p_batch *tested, int *finished, int *count_out,
                              fsdp_error *err)
{
    (void)p2p;
    mpi_batch *batch = (mpi_batch *)tested;
    int count = 0;
    fsdp_mpi_lock();
    int code =
        MPI_Testsome(batch->batch.places, batch->requests, &count, finished, batch->statuses);
    fsdp_mpi_unlock();
    if (count == MPI_UNDEFINED) /* no request is active */
        count = 0;
    if (code != MPI_SUCCESS)
        return fail_test(batch, count, code, err);
    for (int i = 0; i < count; i++)
        FSDP_TRY(check_received(batch, finished[i], &batch->statuses[i], err));
    *count_out = count;
    return FSDP_OK;
}

/* --- status ----------------------------------------------------------------------------------- */

typedef struct mpi_status {
    fsdp_mpi_deferred deferred;
    MPI_Request request;
    unsigned char data[];
} mpi_status;

static void send_status(fsdp_p2p *p2p, int to, const void *status, size_t size)
{
    const mpi_p2p *mine = (const mpi_p2p *)p2p;
    mpi_status *sent = fsdp_alloc(1, sizeof *sent + size);
    if (!sent)
        return;
    memcpy(sent->data, status, size);
    fsdp_mpi_lock();
    int code =
        MPI_Isend(sent->data, (int)size, MPI_BYTE, to, STATUS_TAG, mine->comm, &sent->request);
    if (code == MPI_SUCCESS) {
        sent->deferred =
            (fsdp_mpi_deferred){.requests = &sent->request, .count = 1, .memory = {sent}};
        fsdp_mpi_defer(&sent->deferred);
    }
    fsdp_mpi_reclaim();
    fsdp_mpi_unlock();
    if (code != MPI_SUCCESS)
        fsdp_free(sent);
}

static bool handle_status(const mpi_p2p *mine, void *status, size_t size)
{
    int is_there = 0, coming = 0;
    MPI_Status about;
    if (MPI_Iprobe(MPI_ANY_SOURCE, STATUS_TAG, mine->comm, &is_there, &about) != MPI_SUCCESS ||
        !is_there || MPI_Get_count(&about, MPI_BYTE, &coming) != MPI_SUCCESS || coming != (int)size)
        return false;
    /* Small messages are buffered completely: this does not block. */
    return MPI_Recv(status, coming, MPI_BYTE, about.MPI_SOURCE, STATUS_TAG, mine->comm,
                    MPI_STATUS_IGNORE) == MPI_SUCCESS;
}

static bool recv_status(fsdp_p2p *p2p, void *status, size_t size)
{
    fsdp_mpi_lock();
    bool is_there = handle_status((const mpi_p2p *)p2p, status, size);
    fsdp_mpi_unlock();
    return is_there;
}

/* MPI moves data only while it is called: frequent polls are fast, but ranks often outnumber cores. */
static void back_off(fsdp_p2p *p2p, int idle)
{
    (void)p2p;
    if (idle < YIELDS) {
        sched_yield();
        return;
    }
    int naps = idle - YIELDS;
    int nap_us = naps < MOST_STEPS ? NAP_US + naps * NAP_STEP_US : LONGEST_NAP_US;
    nanosleep(&(struct timespec){.tv_nsec = nap_us * 1000L}, NULL);
}

/* --- creation and end ------------------------------------------------------------------------- */

static void close_p2p(fsdp_p2p *p2p)
{
    fsdp_free(p2p);
}

static const fsdp_p2p_ops mpi_p2p_ops = {
    .name = "mpi",
    .channels = LEAST_CHANNELS,
    .may_call = may_call,
    .batch_create = create_batch,
    .send = send_piece,
    .recv = receive_piece,
    .test = test_batch,
    .batch_close = close_batch,
    .send_status = send_status,
    .recv_status = recv_status,
    .back_off = back_off,
    .close = close_p2p,
};

static void count_channels(mpi_p2p *mine)
{
    int *most = NULL, is_set = 0;
    mine->ops = mpi_p2p_ops;
    if (MPI_Comm_get_attr(mine->comm, MPI_TAG_UB, &most, &is_set) == MPI_SUCCESS && is_set)
        mine->ops.channels = *most;
    mine->p2p.ops = &mine->ops;
}

fsdp_status fsdp_p2p_mpi(fsdp_ctl *ctl, fsdp_p2p **p2p_out, fsdp_error *err)
{
    bool pending = false;
    MPI_Comm comm = fsdp_ctl_mpi_comm_of(ctl);
    if (comm == MPI_COMM_NULL)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "collectives over MPI need ranks that MPI connected; start them by mpirun");
    mpi_p2p *mine = fsdp_alloc(1, sizeof *mine);
    fsdp_status status = mine ? FSDP_OK : fsdp_fail_memory(err, "messages over MPI");
    status = fsdp_ctl_agree(ctl, status, err);
    if (status == FSDP_OK)
        status = fsdp_mpi_duplicate(comm, &mine->comm, &pending, err);
    if (status == FSDP_OK) {
        count_channels(mine);
        *p2p_out = &mine->p2p;
        return FSDP_OK;
    }
    if (pending) /* MPI may still write it: never freed */
        fsdp_mpi_mark_broken();
    else
        fsdp_free(mine);
    return status;
}
