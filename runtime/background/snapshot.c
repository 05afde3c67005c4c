/* The copy of a state dict that a background save writes. See snapshot.h. Step 1 of a shard's
 * way (docs/flow_save.md). */
#include "runtime/background/snapshot.h"

#include "base/core/mem.h"
#include "base/data/flow.h"
#include "kernels/train/tensor.h"

enum { ALIGNMENT = 64, PAGE_BYTES = 4096 };

/* This rank's bytes of an entry that has memory. */
static int64_t held_bytes(const fsdp_entry *entry, int rank)
{
    return entry->kind == FSDP_ENTRY_TENSOR && entry->data ? fsdp_entry_local_bytes(entry, rank)
                                                           : 0;
}

int64_t fsdp_snapshot_bytes(const fsdp_sd *sd, int rank)
{
    int64_t bytes = 0;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++)
        bytes += held_bytes(fsdp_sd_at(sd, i), rank);
    return bytes;
}

/* The bytes of all copies, each at an aligned address. */
static fsdp_status measure(const fsdp_sd *sd, int rank, int64_t *room_out, fsdp_error *err)
{
    int64_t room = 0;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        int64_t bytes = held_bytes(fsdp_sd_at(sd, i), rank);
        if (fsdp_add_overflow(room, bytes, &room) ||
            fsdp_add_overflow(room, -room & (ALIGNMENT - 1), &room))
            return fsdp_fail(err, FSDP_ERR_LIMIT, "a copy of the state is too large");
    }
    *room_out = room;
    return FSDP_OK;
}

/* A write to each page makes the kernel map it now and not during a copy. */
static void touch(volatile unsigned char *pool, int64_t room)
{
    for (int64_t at = 0; at < room; at += PAGE_BYTES)
        pool[at] = 0;
}

/* The stream may still copy into it, for a save that other ranks gave up. */
static void drop_pool(fsdp_snapshot *snapshot)
{
    const fsdp_device_ops *ops = snapshot->view ? snapshot->view->device->ops : NULL;
    if (snapshot->stream)
        (void)!ops->sync(ops->record(snapshot->stream), NULL);
    if (snapshot->pool)
        ops->dealloc_staging(snapshot->view->device, snapshot->pool, (size_t)snapshot->room);
    snapshot->pool = NULL;
    snapshot->room = 0;
}

static fsdp_status reserve(fsdp_snapshot *snapshot, const fsdp_sd *sd, int rank, fsdp_error *err)
{
    int64_t room = 0;
    fsdp_device *device = snapshot->view->device;
    FSDP_TRY(measure(sd, rank, &room, err));
    if (room <= snapshot->room)
        return FSDP_OK;
    drop_pool(snapshot); /* its contents are not needed, and both may not fit */
    snapshot->pool = device->ops->alloc_staging(device, (size_t)room);
    if (!snapshot->pool)
        return fsdp_fail_memory(err, "a copy of the state");
    snapshot->room = room;
    touch(snapshot->pool, room);
    return FSDP_OK;
}

fsdp_status fsdp_snapshot_open(fsdp_snapshot *snapshot, const fsdp_host_view *view,
                               const fsdp_sd *sd, int rank, fsdp_error *err)
{
    const fsdp_device_ops *ops = view->device->ops;
    snapshot->view = view;
    if (!ops->is_host)
        FSDP_TRY(ops->stream_create(view->device, "staging", &snapshot->stream, err));
    return reserve(snapshot, sd, rank, err);
}

static void copy(const fsdp_snapshot *snapshot, void *to, const void *from, size_t size)
{
    if (snapshot->stream && fsdp_host_view_holds(snapshot->view, from))
        snapshot->stream->device->ops->kernels->copy(snapshot->stream, to, from, size);
    else
        fsdp_tensor_copy(to, from, size, (size_t)snapshot->room);
}

fsdp_status fsdp_snapshot_take(fsdp_snapshot *snapshot, fsdp_sd *sd, int rank, fsdp_event behind,
                               fsdp_event *copied_out, fsdp_error *err)
{
    fsdp_stream *stream = snapshot->stream;
    int64_t at = 0;
    FSDP_TRY(reserve(snapshot, sd, rank, err));
    if (stream)
        stream->device->ops->wait(stream, behind);
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        int64_t size = held_bytes(entry, rank);
        if (size == 0)
            continue;
        fsdp_flow("runtime/background/snapshot.c", "copy '%s': %lld bytes", entry->name,
                  (long long)size);
        copy(snapshot, snapshot->pool + at, entry->data, (size_t)size);
        fsdp_sd_set_data(sd, i, snapshot->pool + at);
        at += size + (-size & (ALIGNMENT - 1));
    }
    *copied_out = stream ? stream->device->ops->record(stream) : (fsdp_event){0};
    return FSDP_OK;
}

void fsdp_snapshot_release(fsdp_snapshot *snapshot)
{
    drop_pool(snapshot);
    if (snapshot->stream)
        snapshot->stream->device->ops->stream_free(snapshot->stream);
    *snapshot = (fsdp_snapshot){0};
}
