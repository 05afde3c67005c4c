/* The copy of a state dict that a save writes. See snapshot.h. Step 1 of a shard's way in the
 * background (docs/flow_save.md). */
#include "runtime/staging/snapshot.h"

#include "base/core/mem.h"
#include "base/data/flow.h"
#include "kernels/kernels.h"
#include "kernels/train/tensor.h"
#include "runtime/context/work.h"

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

static bool is_in_waves(const fsdp_snapshot *snapshot, const fsdp_entry *entry)
{
    const fsdp_viewed_block *block = fsdp_host_view_find(snapshot->opts.view, entry->data);
    return block && (snapshot->opts.is_still || !block->is_buffers);
}

/* --- the pool --------------------------------------------------------------------------------- */

/* *sum grows by the bytes, up to an aligned address. */
static bool add_aligned(int64_t *sum, int64_t bytes)
{
    return !fsdp_add_overflow(*sum, bytes, sum) &&
           !fsdp_add_overflow(*sum, -*sum & (ALIGNMENT - 1), sum);
}

static fsdp_status plan_pool(const fsdp_snapshot *snapshot, const fsdp_sd *sd, int rank,
                             fsdp_snapshot_plan *plan_out, fsdp_error *err)
{
    int64_t at_once = 0, moved = 0, largest = 0, all = 0;
    bool fits = true;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        int64_t bytes = held_bytes(entry, rank), room = 0;
        bool is_moved = bytes > 0 && is_in_waves(snapshot, entry);
        if (!is_moved && snapshot->opts.is_still)
            continue;
        fits &= add_aligned(&room, bytes) && add_aligned(is_moved ? &moved : &at_once, bytes);
        if (is_moved && room > largest)
            largest = room;
    }
    if (!fits || fsdp_add_overflow(at_once, moved, &all))
        return fsdp_fail(err, FSDP_ERR_LIMIT, "a copy of the state is too large");
    int64_t half = (snapshot->opts.most - at_once) / 2;
    half -= half & (ALIGNMENT - 1);
    if (half < largest)
        half = largest;
    bool is_one_wave = snapshot->opts.most == 0 || moved <= 2 * half;
    *plan_out = (fsdp_snapshot_plan){.at_once = at_once,
                                     .half = is_one_wave ? moved : half,
                                     .room = is_one_wave ? all : at_once + 2 * half};
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
    const fsdp_device_ops *ops = snapshot->opts.view ? snapshot->opts.view->device->ops : NULL;
    if (snapshot->stream)
        (void)!ops->sync(ops->record(snapshot->stream), NULL);
    if (snapshot->pool)
        ops->dealloc_staging(snapshot->opts.view->device, snapshot->pool, (size_t)snapshot->room);
    snapshot->pool = NULL;
    snapshot->room = 0;
}

static fsdp_status reserve(fsdp_snapshot *snapshot, const fsdp_sd *sd, int rank, fsdp_error *err)
{
    fsdp_device *device = snapshot->opts.view->device;
    FSDP_TRY(plan_pool(snapshot, sd, rank, &snapshot->plan, err));
    int64_t room = snapshot->plan.room;
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

fsdp_status fsdp_snapshot_open(fsdp_snapshot *snapshot, const fsdp_snapshot_opts *opts,
                               const fsdp_sd *sd, int rank, fsdp_error *err)
{
    const fsdp_device_ops *ops = opts->view->device->ops;
    snapshot->opts = *opts;
    snapshot->is_ended = true;
    if (!ops->is_host) {
        int failed = pthread_mutex_init(&snapshot->lock, NULL);
        if (!failed && (failed = pthread_cond_init(&snapshot->changed, NULL)))
            pthread_mutex_destroy(&snapshot->lock);
        if (failed)
            return fsdp_fail_errno(err, failed, "cannot create the lock of a copy of the state");
        snapshot->has_lock = true;
        FSDP_TRY(ops->stream_create(opts->view->device, "staging", &snapshot->stream, err));
    }
    return reserve(snapshot, sd, rank, err);
}

void fsdp_snapshot_release(fsdp_snapshot *snapshot)
{
    drop_pool(snapshot);
    if (snapshot->stream)
        snapshot->stream->device->ops->stream_free(snapshot->stream);
    if (snapshot->has_lock) {
        pthread_cond_destroy(&snapshot->changed);
        pthread_mutex_destroy(&snapshot->lock);
    }
    if (snapshot->hashes)
        snapshot->opts.view->device->ops->dealloc_staging(
            snapshot->opts.view->device, snapshot->hashes,
            snapshot->hash_room * sizeof *snapshot->hashes);
    fsdp_free(snapshot->sources);
    fsdp_free(snapshot->first);
    fsdp_free(snapshot->hashed);
    *snapshot = (fsdp_snapshot){0};
}

/* --- the program's and the save's thread -------------------------------------------------------- */

static void note(fsdp_snapshot *snapshot, size_t given, bool is_ended)
{
    if (!snapshot->has_lock)
        return;
    pthread_mutex_lock(&snapshot->lock);
    snapshot->given = given;
    snapshot->is_ended = is_ended;
    pthread_cond_broadcast(&snapshot->changed);
    pthread_mutex_unlock(&snapshot->lock);
}

void fsdp_snapshot_end(fsdp_snapshot *snapshot)
{
    note(snapshot, snapshot->given, true);
}

fsdp_event fsdp_snapshot_last(fsdp_snapshot *snapshot)
{
    if (!snapshot->stream)
        return (fsdp_event){0};
    pthread_mutex_lock(&snapshot->lock);
    while (!snapshot->is_ended && snapshot->given < snapshot->waves.count)
        pthread_cond_wait(&snapshot->changed, &snapshot->lock);
    fsdp_event last =
        snapshot->given > 0 ? snapshot->copied[(snapshot->given - 1) % 2] : (fsdp_event){0};
    pthread_mutex_unlock(&snapshot->lock);
    return last;
}

/* --- waves ------------------------------------------------------------------------------------ */

static void give_wave(fsdp_snapshot *snapshot, size_t number)
{
    const fsdp_device_ops *ops = snapshot->stream->device->ops;
    size_t end = number + 1 < snapshot->waves.count ? snapshot->first[number + 1]
                                                    : fsdp_sd_count(snapshot->sd);
    for (size_t i = snapshot->first[number]; i < end; i++) {
        const fsdp_entry *entry = fsdp_sd_at(snapshot->sd, i);
        if (snapshot->sources[i].data)
            ops->kernels->copy(snapshot->stream, entry->data, snapshot->sources[i].data,
                               (size_t)fsdp_entry_local_bytes(entry, snapshot->rank));
    }
    snapshot->used = snapshot->copied[number % 2] = ops->record(snapshot->stream);
    note(snapshot, number + 1, false);
}

static fsdp_status enter_wave(void *context, size_t number, fsdp_error *err)
{
    fsdp_snapshot *snapshot = context;
    FSDP_TRY(snapshot->stream->device->ops->sync(snapshot->copied[number % 2], err));
    if (number + 1 < snapshot->waves.count)
        give_wave(snapshot, number + 1);
    return FSDP_OK;
}

fsdp_waves *fsdp_snapshot_waves(fsdp_snapshot *snapshot)
{
    return snapshot->stream ? &snapshot->waves : NULL;
}

/* --- hashes ----------------------------------------------------------------------------------- */

static fsdp_status list_hashed(fsdp_snapshot *snapshot, const bool *is_hashed, fsdp_error *err)
{
    snapshot->hashed_count = 0;
    for (size_t i = 0; is_hashed && i < fsdp_sd_count(snapshot->sd); i++) {
        fsdp_snapshot_source *source = &snapshot->sources[i];
        if (!is_hashed[i] || !source->data)
            continue;
        source->hash = snapshot->hashed_count++;
        if (!fsdp_grow(&snapshot->hashed, &snapshot->hashed_room, snapshot->hashed_count,
                       sizeof *snapshot->hashed))
            return fsdp_fail_memory(err, "the list of hashes");
        snapshot->hashed[source->hash] = (fsdp_span){
            (void *)source->data, FSDP_U8,
            (size_t)fsdp_entry_local_bytes(fsdp_sd_at(snapshot->sd, i), snapshot->rank)};
    }
    return FSDP_OK;
}

static fsdp_status reserve_hashes(fsdp_snapshot *snapshot, fsdp_error *err)
{
    fsdp_device *device = snapshot->opts.view->device;
    size_t size = sizeof *snapshot->hashes;
    if (snapshot->hashed_count <= snapshot->hash_room)
        return FSDP_OK;
    if (snapshot->hashes)
        device->ops->dealloc_staging(device, snapshot->hashes, snapshot->hash_room * size);
    snapshot->hash_room = 0;
    snapshot->hashes = device->ops->alloc_staging(device, snapshot->hashed_count * size);
    if (!snapshot->hashes)
        return fsdp_fail_memory(err, "hashes of the state");
    snapshot->hash_room = snapshot->hashed_count;
    return FSDP_OK;
}

static fsdp_status give_hashes(fsdp_snapshot *snapshot, const bool *is_hashed, fsdp_error *err)
{
    FSDP_TRY(list_hashed(snapshot, is_hashed, err));
    FSDP_TRY(reserve_hashes(snapshot, err));
    if (snapshot->hashed_count > 0)
        snapshot->stream->device->ops->kernels->hashes(snapshot->stream, snapshot->hashed,
                                                       snapshot->hashed_count, snapshot->hashes);
    return FSDP_OK;
}

fsdp_hash fsdp_snapshot_hash(const fsdp_snapshot *snapshot, size_t entry)
{
    if (snapshot->sources[entry].data)
        return snapshot->hashes[snapshot->sources[entry].hash];
    const fsdp_entry *copied = fsdp_sd_at(snapshot->sd, entry);
    return fsdp_kernels_get()->hash(copied->data, (size_t)held_bytes(copied, snapshot->rank));
}

/* --- the copy --------------------------------------------------------------------------------- */

static fsdp_status make_lists(fsdp_snapshot *snapshot, size_t count, fsdp_error *err)
{
    if (!fsdp_grow(&snapshot->sources, &snapshot->source_room, count + 1,
                   sizeof *snapshot->sources) ||
        !fsdp_grow(&snapshot->first, &snapshot->first_room, count + 1, sizeof *snapshot->first))
        return fsdp_fail_memory(err, "the list of a state's tensors");
    snapshot->first[0] = 0;
    snapshot->waves = (fsdp_waves){
        .context = snapshot, .enter = enter_wave, .first = snapshot->first, .count = 1};
    return FSDP_OK;
}

/* The place of the next tensor of a wave; *at: the bytes of the last wave so far. */
static unsigned char *place_in_wave(fsdp_snapshot *snapshot, size_t i, int64_t bytes, int64_t *at)
{
    int64_t end = *at;
    if (!add_aligned(&end, bytes) || end > snapshot->plan.half) {
        snapshot->first[snapshot->waves.count++] = i;
        *at = 0;
    }
    size_t half = (snapshot->waves.count - 1) % 2;
    unsigned char *place =
        snapshot->pool + snapshot->plan.at_once + (int64_t)half * snapshot->plan.half + *at;
    (void)add_aligned(at, bytes);
    return place;
}

/* Buffers are copied by the stream, too: the stream `changes` waits for their copies. */
static void copy_at_once(fsdp_snapshot *snapshot, const fsdp_snapshot_take *take, void *to,
                         const fsdp_entry *entry)
{
    size_t size = (size_t)held_bytes(entry, take->rank);
    if (!fsdp_host_view_find(snapshot->opts.view, entry->data)) {
        fsdp_tensor_copy(to, entry->data, size, (size_t)snapshot->room);
        return;
    }
    const fsdp_device_ops *ops = snapshot->stream->device->ops;
    ops->kernels->copy(snapshot->stream, to, entry->data, size);
    snapshot->used = ops->record(snapshot->stream);
    ops->wait(take->changes, snapshot->used);
}

static void note_copy(const fsdp_entry *entry, int64_t bytes)
{
    fsdp_flow("runtime/staging/snapshot.c", "copy '%s': %lld bytes", entry->name, (long long)bytes);
}

static void place_tensors(fsdp_snapshot *snapshot, const fsdp_snapshot_take *take)
{
    fsdp_sd *sd = take->sd;
    int64_t at_once = 0, in_wave = 0;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        int64_t bytes = held_bytes(entry, take->rank);
        snapshot->sources[i] = (fsdp_snapshot_source){0};
        if (bytes == 0)
            continue;
        if (is_in_waves(snapshot, entry)) {
            note_copy(entry, bytes);
            snapshot->sources[i].data = entry->data;
            fsdp_sd_set_data(sd, i, place_in_wave(snapshot, i, bytes, &in_wave));
        } else if (!snapshot->opts.is_still) {
            note_copy(entry, bytes);
            copy_at_once(snapshot, take, snapshot->pool + at_once, entry);
            fsdp_sd_set_data(sd, i, snapshot->pool + at_once);
            (void)add_aligned(&at_once, bytes);
        }
    }
}

fsdp_status fsdp_snapshot_begin(fsdp_snapshot *snapshot, const fsdp_snapshot_take *take,
                                fsdp_error *err)
{
    fsdp_stream *stream = snapshot->stream;
    if (stream) /* a copy that no save waited for may still use the pool */
        FSDP_TRY(stream->device->ops->sync(snapshot->used, err));
    FSDP_TRY(reserve(snapshot, take->sd, take->rank, err));
    FSDP_TRY(make_lists(snapshot, fsdp_sd_count(take->sd), err));
    snapshot->sd = take->sd;
    snapshot->rank = take->rank;
    if (stream)
        stream->device->ops->wait(stream, fsdp_stream_now(take->changes));
    place_tensors(snapshot, take);
    if (!stream)
        return FSDP_OK;
    FSDP_TRY(give_hashes(snapshot, take->is_hashed, err));
    give_wave(snapshot, 0);
    return FSDP_OK;
}
