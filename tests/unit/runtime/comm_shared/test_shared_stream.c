/* Collectives of a device's memory, between ranks that are threads, when one of them gives up. */
#include "runtime/comm_shared/shared_transports.h"
#include "runtime/device/device.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

enum { RANKS = 2, DEADLINE_MS = 30000, LOOK_US = 200000 };

typedef struct stream_rank {
    fsdp_transport *transport;
    fsdp_comm *comm;
    fsdp_stream *stream;
    float in, out[RANKS];
    fsdp_status status;
    bool was_used; /* the other rank used this one's stream when the call returned */
} stream_rank;

static stream_rank ranks[RANKS];
static atomic_bool is_looking;

/* Its group fails while rank 1 looks up a point of rank 0's stream. */
static void look_slowly(fsdp_stream *stream, fsdp_event event)
{
    (void)event;
    if (stream != ranks[1].stream)
        return;
    atomic_store(&is_looking, true);
    fsdp_comm_abort(ranks[1].comm, NULL);
    usleep(LOOK_US);
    atomic_store(&is_looking, false);
}

static void *gather(void *context)
{
    stream_rank *mine = context;
    fsdp_error err = {0};
    const fsdp_collective call = {.kind = FSDP_ALL_GATHER,
                                  .dtype = FSDP_F32,
                                  .in = &mine->in,
                                  .out = mine->out,
                                  .count = 1,
                                  .stream = mine->stream};
    mine->status = mine->transport->ops->comm_create(mine->transport, (const int[]){0, 1}, RANKS, 1,
                                                     &mine->comm, &err);
    if (mine->status == FSDP_OK)
        mine->status = fsdp_comm_run(mine->comm, &call, &err);
    mine->was_used = atomic_load(&is_looking);
    return NULL;
}

/* Its caller may free the stream, and the memory, as soon as the call returns. */
Test(shared_stream, a_call_that_fails_returns_when_no_rank_uses_the_stream, .timeout = 60)
{
    fsdp_transport *transports[RANKS];
    fsdp_device *device;
    pthread_t threads[RANKS];
    fsdp_error err = {0};
    cr_assert_eq(fsdp_transport_threads(RANKS, DEADLINE_MS, transports, &err), FSDP_OK);
    cr_assert_eq(fsdp_device_cpu_async(&device, &err), FSDP_OK);
    fsdp_device_ops ops = *device->ops;
    ops.wait = look_slowly;
    device->ops = &ops;
    for (int i = 0; i < RANKS; i++) {
        ranks[i].transport = transports[i];
        cr_assert_eq(ops.stream_create(device, "all_gather", &ranks[i].stream, &err), FSDP_OK);
    }
    for (int i = 0; i < RANKS; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, gather, &ranks[i]), 0);
    for (int i = 0; i < RANKS; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < RANKS; i++) {
        cr_expect_eq(ranks[i].status, FSDP_ERR_CANCELLED);
        cr_expect_not(ranks[i].was_used, "rank %d", i);
        ops.stream_free(ranks[i].stream);
        fsdp_comm_free(ranks[i].comm);
    }
    for (int i = 0; i < RANKS; i++)
        transports[i]->ops->close(transports[i]);
    fsdp_device_close(device);
}
