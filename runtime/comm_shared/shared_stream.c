/*
 * Collectives over the memory of a device, among ranks that are threads of a process: several ranks on one
 * GPU. The members publish their buffers and points of their streams, and each gives its own stream the
 * copies and sums that read the others' memory. The host passes barriers and never waits for the device:
 *
 *   meet      every stream waits for the points that all members' streams have reached so far
 *   work      copies, and sums in the order of the group's ranks
 *   meet      no stream continues to change a buffer that another one still reads
 *
 * See comm_shared.h.
 */
#include "runtime/comm_shared/comm_shared.h"

#include "runtime/device/device.h"

typedef struct stream_call {
    shared_group *group;
    const fsdp_collective *call;
    fsdp_stream *stream;
    size_t element;
    unsigned char *out;
    unsigned points; /* published so far; two places alternate */
} stream_call;

static const fsdp_device_ops *ops_of(const stream_call *job)
{
    return job->stream->device->ops;
}

/* --- meeting ------------------------------------------------------------------------------------ */

/* A point is published again only after the barrier after the next one, when all have read this one. */
static void follow_all(const stream_call *job)
{
    for (int i = 0; i < job->group->size; i++)
        if (i != job->group->rank)
            ops_of(job)->wait(job->stream,
                              fsdp_shared_published(job->group, i)->points[(job->points - 1) % 2]);
}

/* From here to the next meeting this member reads the others: a member that gives up waits for that. */
static fsdp_status meet(stream_call *job, fsdp_error *err)
{
    shared_published *mine = fsdp_shared_published(job->group, job->group->rank);
    mine->points[job->points++ % 2] = ops_of(job)->record(job->stream);
    fsdp_shared_end_read(job->group);
    FSDP_TRY(fsdp_shared_pass_barrier(job->group, err));
    FSDP_TRY(fsdp_shared_begin_read(job->group, err));
    follow_all(job);
    return FSDP_OK;
}

/* --- work --------------------------------------------------------------------------------------- */

static const unsigned char *in_of(const stream_call *job, int member)
{
    return (const unsigned char *)(uintptr_t)fsdp_shared_published(job->group, member)->in;
}

static void copy(const stream_call *job, void *to, const void *from, int64_t count)
{
    if (count > 0 && to != from)
        ops_of(job)->kernels->copy(job->stream, to, from, (size_t)count * job->element);
}

/* Sums `count` elements from `at` on of all inputs. */
static void fold(const stream_call *job, void *to, int64_t at, int64_t count)
{
    shared_group *group = job->group;
    const fsdp_collective *call = job->call;
    if (count == 0)
        return;
    for (int i = 0; i < group->size; i++)
        group->sources[i] = in_of(job, i) + (size_t)at * job->element;
    const fsdp_fold_call sum = {.to = to,
                                .from = group->sources,
                                .n = group->size,
                                .dtype = call->dtype,
                                .count = (size_t)count,
                                .how = fsdp_comm_reduction(call, group->size)};
    ops_of(job)->kernels->fold(job->stream, &sum);
}

static fsdp_status gather(stream_call *job, fsdp_error *err)
{
    (void)err;
    for (int i = 0; i < job->group->size; i++)
        copy(job, job->out + (size_t)fsdp_comm_place(job->call, i) * job->element, in_of(job, i),
             fsdp_comm_part(job->call, i));
    return FSDP_OK;
}

static fsdp_status scatter(stream_call *job, fsdp_error *err)
{
    int rank = job->group->rank;
    (void)err;
    fold(job, job->out, fsdp_comm_place(job->call, rank), fsdp_comm_part(job->call, rank));
    return FSDP_OK;
}

/* Each member sums up a slice; when all slices are there, it copies those of the others. In place is safe:
 * nobody but the member itself reads its own slice of its input. */
static fsdp_status reduce(stream_call *job, fsdp_error *err)
{
    const shared_group *group = job->group;
    int64_t count = job->call->count, slice = (count + group->size - 1) / group->size;
    for (int i = 0; i < group->size; i++) {
        int member = (group->rank + i) % group->size;
        int64_t at = member * slice < count ? member * slice : count;
        int64_t size = count - at < slice ? count - at : slice;
        unsigned char *to = job->out + (size_t)at * job->element;
        const unsigned char *theirs =
            (const unsigned char *)(uintptr_t)fsdp_shared_published(group, member)->out;
        if (i == 0) {
            fold(job, to, at, size);
            FSDP_TRY(meet(job, err));
        } else {
            copy(job, to, theirs + (size_t)at * job->element, size);
        }
    }
    return FSDP_OK;
}

static fsdp_status broadcast(stream_call *job, fsdp_error *err)
{
    (void)err;
    if (job->group->rank != job->call->root)
        copy(job, job->out, in_of(job, job->call->root), job->call->count);
    return FSDP_OK;
}

static fsdp_status exchange(stream_call *job, fsdp_error *err)
{
    const shared_group *group = job->group;
    int64_t place = 0;
    (void)err;
    for (int from = 0; from < group->size; from++) {
        const int64_t *sent = fsdp_shared_counts(job->group, from);
        int64_t before = 0;
        for (int to = 0; to < group->rank; to++)
            before += sent[to];
        copy(job, job->out + (size_t)place * job->element,
             in_of(job, from) + (size_t)before * job->element, sent[group->rank]);
        place += sent[group->rank];
    }
    return FSDP_OK;
}

fsdp_status fsdp_shared_run_in_stream(shared_group *group, const fsdp_collective *call,
                                      fsdp_error *err)
{
    static fsdp_status (*const works[])(stream_call * job, fsdp_error * err) = {
        [FSDP_ALL_GATHER] = gather,   [FSDP_REDUCE_SCATTER] = scatter, [FSDP_ALL_REDUCE] = reduce,
        [FSDP_BROADCAST] = broadcast, [FSDP_ALL_TO_ALL] = exchange,
    };
    stream_call job = {.group = group,
                       .call = call,
                       .stream = call->stream,
                       .element = fsdp_dtype_size(call->dtype),
                       .out = call->out};
    FSDP_TRY(meet(&job, err));
    FSDP_TRY(works[call->kind](&job, err));
    FSDP_TRY(meet(&job, err));
    fsdp_shared_end_read(group);
    /* Streams may be given more work only when no other member looks up their points any more. */
    return fsdp_shared_pass_barrier(group, err);
}
