/* See nccl_ranks.h. */
#include "tests/nccl/nccl_ranks.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/core/clock.h"
#include "runtime/comm_nccl/comm_nccl.h"
#include "runtime/comm_shared/shared_transports.h"
#include "statedict/ctl/ctl_backend.h"

enum { PATIENCE_MS = 20000 };

void expect(bool holds, const char *what, const char *got)
{
    if (holds)
        return;
    fprintf(stderr, "failed: %s; got: %s\n", what, got);
    exit(1);
}

/* --- a device with streams of its own ----------------------------------------------------------- */

typedef struct work_for_nccl {
    void (*work)(void *argument);
    void *argument;
} work_for_nccl;

static fsdp_status run_work(void *args, fsdp_error *err)
{
    const work_for_nccl *given = args;
    (void)err;
    given->work(given->argument);
    return FSDP_OK;
}

static void launch(void *stream, void (*work)(void *), void *argument)
{
    fsdp_stream *head = stream;
    const work_for_nccl given = {work, argument};
    head->device->ops->submit(head, run_work, &given, sizeof given);
}

static fake_nccl_control *opened;

static void open_fake(void)
{
    const char *path = getenv("FSDP_NCCL_LIB");
    void *library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    opened = library ? dlsym(library, "fake_nccl") : NULL;
    expect(opened, "FSDP_NCCL_LIB is the fake", path ? path : "nothing");
    opened->launch = launch;
}

fake_nccl_control *fake_nccl_of(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, open_fake);
    return opened;
}

static fsdp_status set_flag(void *args, fsdp_error *err)
{
    _Atomic unsigned char *const *flag = args;
    (void)err;
    atomic_store(*flag, 1);
    return FSDP_OK;
}

/* The transport fills its flags only, which a GPU sets as one byte, too. */
static void fill_flag(fsdp_stream *stream, void *to, int byte, size_t size)
{
    expect(byte == 1 && size == 1, "a flag is set", "another fill");
    stream->device->ops->submit(stream, set_flag, &to, sizeof to);
}

static void *native_of(fsdp_stream *stream)
{
    return stream;
}

static const fsdp_gpu *choose_gpu(fsdp_device *device)
{
    static const fsdp_gpu gpu = {.visible = 1, .bus = "0000:1B:00.0"};
    (void)device;
    return &gpu;
}

/* Staging memory, of which nothing is left when a world has ended: flags too, of calls that failed. */
static const fsdp_device_ops *counted_ops;
static atomic_int staging;

static void *alloc_staging(fsdp_device *device, size_t size)
{
    void *made = counted_ops->alloc_staging(device, size);
    atomic_fetch_add(&staging, made != NULL);
    return made;
}

static void dealloc_staging(fsdp_device *device, void *data, size_t size)
{
    atomic_fetch_sub(&staging, data != NULL);
    counted_ops->dealloc_staging(device, data, size);
}

static fsdp_device_ops ops;
static fsdp_device_kernels kernels;
static pthread_once_t ops_made = PTHREAD_ONCE_INIT;

static void make_ops(void)
{
    fsdp_device *device = NULL;
    fsdp_error err = {0};
    expect(fsdp_device_cpu_async(&device, &err) == FSDP_OK, "a device", err.text);
    ops = *device->ops;
    kernels = *ops.kernels;
    kernels.fill = fill_flag;
    ops.kernels = &kernels;
    counted_ops = device->ops;
    ops.alloc_staging = alloc_staging;
    ops.dealloc_staging = dealloc_staging;
    ops.native = native_of;
    ops.choose_gpu = choose_gpu;
    ops.close(device);
}

fsdp_status open_nccl_device(fsdp_device **device_out, fsdp_stream **stream_out, fsdp_error *err)
{
    pthread_once(&ops_made, make_ops);
    FSDP_TRY(fsdp_device_cpu_async(device_out, err));
    (*device_out)->ops = &ops;
    return ops.stream_create(*device_out, "all_gather", stream_out, err);
}

/* --- ranks -------------------------------------------------------------------------------------- */

typedef struct rank_start {
    const nccl_world *world;
    nccl_rank *rank;
    fsdp_transport *inner;
    pthread_t thread;
} rank_start;

static fsdp_status create(const rank_start *start, fsdp_error *err)
{
    nccl_rank *rank = start->rank;
    int all[NCCL_MOST_RANKS] = {0, 1, 2, 3, 4, 5, 6, 7};
    FSDP_TRY(open_nccl_device(&rank->device, &rank->stream, err));
    const fsdp_nccl_spec spec = {.ctl = rank->ctl,
                                 .inner = start->inner,
                                 .device = rank->device,
                                 .check = start->world->check,
                                 .host = (uint64_t)rank->rank % 2,
                                 .direct_ranks = start->world->has_hosts ? 1 : 0,
                                 .creation_ms = start->world->creation_ms
                                                    ? start->world->creation_ms
                                                    : start->world->deadline_ms};
    FSDP_TRY(fsdp_transport_nccl(&spec, &rank->transport, err));
    return rank->transport->ops->comm_create(rank->transport, all, rank->size, 1, &rank->comm, err);
}

static void *run_rank(void *context)
{
    rank_start *start = context;
    nccl_rank *rank = start->rank;
    rank->status = create(start, &rank->err);
    if (rank->status == FSDP_OK)
        rank->status = start->world->body(rank, &rank->err);
    fsdp_comm_free(rank->comm);
    fsdp_transport *mine = rank->transport ? rank->transport : start->inner;
    mine->ops->close(mine);
    if (rank->stream)
        ops.stream_free(rank->stream);
    fsdp_device_close(rank->device);
    fsdp_ctl_free(rank->ctl);
    return NULL;
}

void run_nccl_world(const nccl_world *world, nccl_rank *results)
{
    fsdp_transport *inner[NCCL_MOST_RANKS];
    fsdp_ctl *ctls[NCCL_MOST_RANKS];
    rank_start starts[NCCL_MOST_RANKS];
    fsdp_error err = {0};
    char left[64];
    fake_nccl_control *fake = fake_nccl_of();
    expect(fsdp_ctl_threads(world->size, ctls, &err) == FSDP_OK &&
               fsdp_transport_threads(world->size, world->deadline_ms, inner, &err) == FSDP_OK,
           "ranks as threads", err.text);
    for (int i = 0; i < world->size; i++) {
        fsdp_ctl_set_deadline(ctls[i], PATIENCE_MS);
        results[i] =
            (nccl_rank){.rank = i, .size = world->size, .ctl = ctls[i], .context = world->context};
        starts[i] = (rank_start){.world = world, .rank = &results[i], .inner = inner[i]};
        expect(pthread_create(&starts[i].thread, NULL, run_rank, &starts[i]) == 0, "a thread", "");
    }
    for (int i = 0; i < world->size; i++)
        pthread_join(starts[i].thread, NULL);
    if (world->at_end)
        world->at_end();
    const int64_t until_ms = fsdp_now_ms() + PATIENCE_MS;
    while (world->at_end && fake->alive() > 0 && fsdp_now_ms() < until_ms)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    snprintf(left, sizeof left, "%d left, %d misuses", fake->alive(), fake->misuses());
    expect(fake->alive() == 0 && fake->misuses() == 0, "nothing is left in NCCL", left);
    snprintf(left, sizeof left, "%d blocks", atomic_load(&staging));
    expect(world->at_end || atomic_load(&staging) == 0, "staging memory is given back", left);
    atomic_store(&staging, 0); /* of groups that NCCL did not end in time */
}

fsdp_status give_call(nccl_rank *rank, fsdp_error *err)
{
    static float data[NCCL_MOST_RANKS][8];
    const fsdp_collective call = {.kind = FSDP_ALL_REDUCE,
                                  .dtype = FSDP_F32,
                                  .in = data[rank->rank],
                                  .out = data[rank->rank],
                                  .count = 8,
                                  .unit = "layers.1",
                                  .stream = rank->stream};
    return fsdp_comm_run(rank->comm, &call, err);
}

void end_beats(nccl_rank *rank, const fsdp_error *why)
{
    nccl_transport *transport = (nccl_transport *)rank->transport;
    fsdp_comm_abort(transport->watches, why);
    if (transport->hosts.local && fsdp_comm_size(transport->hosts.local) > 1)
        fsdp_comm_abort(transport->hosts.local, why);
    fsdp_comm_abort(transport->hosts.leaders, why);
}

fsdp_status await_failure(nccl_rank *rank, fsdp_error *err)
{
    const fsdp_transport_ops *transport = rank->transport->ops;
    int64_t until_ms = fsdp_now_ms() + PATIENCE_MS;
    while (fsdp_now_ms() < until_ms) {
        if (transport->has_failed(rank->comm, err))
            return err->status;
        nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    }
    return fsdp_fail(err, FSDP_ERR_INTERNAL, "rank %d: the group has not failed", rank->rank);
}
