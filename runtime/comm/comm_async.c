/*
 * Collectives that are started and waited for later. The first start creates a stream with its own
 * thread, which runs the calls of the communicator in the order of their starts. See comm.h.
 */
#include "runtime/comm/comm_backend.h"

#include "base/core/given.h"
#include "base/core/mem.h"
#include "runtime/device/device.h"

/* The thread writes `result` before it reaches `done`. */
struct fsdp_comm_handle {
    fsdp_comm *comm;
    fsdp_collective call;
    fsdp_event done;
    fsdp_error result;
    fsdp_comm_handle *next; /* in the list of handles not waited for */
};

struct fsdp_comm_queue {
    fsdp_device *device;
    fsdp_stream *stream;
    fsdp_comm_handle *first;
};

static fsdp_status create_queue(fsdp_comm_queue **queue_out, fsdp_error *err)
{
    fsdp_comm_queue *made = fsdp_alloc(1, sizeof *made);
    if (!made)
        return fsdp_fail_memory(err, "collectives that are started");
    fsdp_status status = fsdp_device_cpu_async(&made->device, err);
    if (status == FSDP_OK)
        status = made->device->ops->stream_create(made->device, "started", &made->stream, err);
    if (status == FSDP_OK) {
        *queue_out = made;
        return FSDP_OK;
    }
    fsdp_device_close(made->device);
    fsdp_free(made);
    return status;
}

static fsdp_status prepare(fsdp_comm *comm, fsdp_comm_handle **handle_out, fsdp_error *err)
{
    if (!comm->queue)
        FSDP_TRY(create_queue(&comm->queue, err));
    *handle_out = fsdp_alloc(1, sizeof **handle_out);
    return *handle_out ? FSDP_OK : fsdp_fail_memory(err, "a collective that is started");
}

/* A failure is the handle's: the stream goes on, and later calls find the communicator poisoned. */
static fsdp_status run_started(void *args, fsdp_error *err)
{
    fsdp_comm_handle *handle = *(fsdp_comm_handle **)args;
    (void)err;
    handle->result.status = fsdp_comm_run_now(handle->comm, &handle->call, &handle->result);
    return FSDP_OK;
}

fsdp_status fsdp_comm_start(fsdp_comm *comm, const fsdp_collective *call,
                            fsdp_comm_handle **handle_out, fsdp_error *err)
{
    FSDP_NEED(err, handle_out);
    *handle_out = NULL;
    FSDP_NEED(err, comm, call);
    fsdp_error failure = {0};
    fsdp_comm_handle *handle = NULL;
    if (prepare(comm, &handle, &failure) != FSDP_OK) {
        fsdp_comm_abort(comm, &failure); /* so that the others do not wait for this call */
        if (err)
            *err = failure;
        return failure.status;
    }
    const fsdp_device_ops *ops = comm->queue->device->ops;
    *handle = (fsdp_comm_handle){.comm = comm, .call = *call, .next = comm->queue->first};
    comm->queue->first = handle;
    ops->submit(comm->queue->stream, run_started, &handle, sizeof(fsdp_comm_handle *));
    handle->done = ops->record(comm->queue->stream);
    *handle_out = handle;
    return FSDP_OK;
}

bool fsdp_comm_is_done(const fsdp_comm_handle *handle)
{
    return !handle || handle->comm->queue->device->ops->is_reached(handle->done);
}

static void forget(fsdp_comm_handle *handle)
{
    fsdp_comm_handle **at = &handle->comm->queue->first;
    while (*at != handle)
        at = &(*at)->next;
    *at = handle->next;
    fsdp_free(handle);
}

fsdp_status fsdp_comm_wait(fsdp_comm_handle **handle, fsdp_error *err)
{
    FSDP_NEED(err, handle);
    fsdp_comm_handle *waited = *handle;
    if (!waited)
        return FSDP_OK;
    (void)!waited->comm->queue->device->ops->sync(waited->done, NULL);
    fsdp_status status = waited->result.status;
    if (status != FSDP_OK && err)
        *err = waited->result;
    forget(waited);
    *handle = NULL;
    return status;
}

void fsdp_comm_settle(const fsdp_comm *comm)
{
    if (comm->queue)
        (void)!comm->queue->device->ops->sync(comm->queue->device->ops->record(comm->queue->stream),
                                              NULL);
}

/* A rank that closes its communicator with calls in flight aborts them, so that no rank waits for
 * them. */
static void abort_unfinished(fsdp_comm *comm)
{
    bool is_done = true;
    for (const fsdp_comm_handle *at = comm->queue->first; at; at = at->next)
        is_done &= fsdp_comm_is_done(at);
    if (is_done)
        return;
    fsdp_error why = {0};
    char exit_code[FSDP_EXIT_TEXT];
    fsdp_comm_describe_exit(comm->transport->exit_code, exit_code);
    (void)fsdp_fail(&why, FSDP_ERR_PEER, "left with %s, without waiting for a call it had started",
                    exit_code);
    fsdp_comm_abort(comm, &why);
}

void fsdp_comm_close_queue(fsdp_comm *comm)
{
    fsdp_comm_queue *queue = comm->queue;
    if (!queue)
        return;
    abort_unfinished(comm);
    queue->device->ops->stream_free(queue->stream);
    while (queue->first)
        forget(queue->first);
    fsdp_device_close(queue->device);
    fsdp_free(queue);
    comm->queue = NULL;
}
