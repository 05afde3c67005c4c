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

static fsdp_status grow(fsdp_snapshot *snapshot, int64_t room, fsdp_error *err)
{
    if (room <= snapshot->room)
        return FSDP_OK;
    fsdp_snapshot_release(snapshot); /* its contents are not needed, and both may not fit */
    snapshot->pool = fsdp_alloc_pages((size_t)room);
    if (!snapshot->pool)
        return fsdp_fail_memory(err, "a copy of the state");
    snapshot->room = room;
    touch(snapshot->pool, room);
    return FSDP_OK;
}

fsdp_status fsdp_snapshot_reserve(fsdp_snapshot *snapshot, const fsdp_sd *sd, int rank,
                                  fsdp_error *err)
{
    int64_t room = 0;
    FSDP_TRY(measure(sd, rank, &room, err));
    return grow(snapshot, room, err);
}

fsdp_status fsdp_snapshot_take(fsdp_snapshot *snapshot, fsdp_sd *sd, int rank, int64_t *bytes_out,
                               fsdp_error *err)
{
    int64_t at = 0, bytes = 0, total = 0;
    FSDP_TRY(measure(sd, rank, &total, err));
    FSDP_TRY(grow(snapshot, total, err));
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        int64_t size = held_bytes(entry, rank);
        if (size == 0)
            continue;
        fsdp_flow("runtime/background/snapshot.c", "copy '%s': %lld bytes", entry->name,
                  (long long)size);
        fsdp_tensor_copy(snapshot->pool + at, entry->data, (size_t)size, (size_t)total);
        fsdp_sd_set_data(sd, i, snapshot->pool + at);
        bytes += size;
        at += size + (-size & (ALIGNMENT - 1));
    }
    *bytes_out = bytes;
    return FSDP_OK;
}

void fsdp_snapshot_release(fsdp_snapshot *snapshot)
{
    fsdp_free(snapshot->pool);
    *snapshot = (fsdp_snapshot){0};
}
