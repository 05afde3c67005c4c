/*
 * put and get: see pipeline.h. Data moves in pieces of FSDP_PIECE_BYTES, so that it is hashed and
 * placed while it is in the cache.
 */
#include "statedict/transfer/pipeline.h"

#include "base/core/pool.h"
#include "base/data/box_internal.h"
#include "base/data/flow.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* --- put -------------------------------------------------------------------------------------- */

/* Boxes are written in groups of this many bytes, after each of which progress is reported. */
enum { GROUP_BYTES = 64 << 20 };

static fsdp_status put_group(fsdp_shard_writer *writer, const fsdp_save_plan *plan, size_t first,
                             size_t end, fsdp_shard_piece *pieces, fsdp_error *err)
{
    size_t count = 0;
    for (size_t i = first; i < end; i++) {
        const fsdp_shard_box *box = &plan->boxes[i];
        if (!plan->data[i])
            continue;
        fsdp_box whole = fsdp_shard_box_box(box);
        fsdp_flow_box("statedict/transfer/pipeline.c", "put", box->name, box->name_size, &whole);
        pieces[count++] = (fsdp_shard_piece){i, 0, fsdp_box_count(&whole), plan->data[i]};
    }
    return fsdp_shard_write(writer, pieces, count, err);
}

static int64_t planned_bytes(const fsdp_save_plan *plan, size_t i)
{
    const fsdp_shard_box *box = &plan->boxes[i];
    size_t size = fsdp_dtype_size(plan->datasets[box->dataset].dtype);
    fsdp_box whole = fsdp_shard_box_box(box);
    return plan->data[i] ? fsdp_box_count(&whole) * (int64_t)size : 0;
}

/* The end of the group of boxes from `first` on: all are of one wave. */
static size_t group_end(const fsdp_save_plan *plan, const fsdp_waves *waves, size_t first,
                        int64_t *bytes_out)
{
    size_t wave = fsdp_waves_find(waves, plan->boxes[first].tensor), end = first;
    *bytes_out = 0;
    do
        *bytes_out += planned_bytes(plan, end++);
    while (end < plan->box_count && *bytes_out < GROUP_BYTES &&
           fsdp_waves_find(waves, plan->boxes[end].tensor) == wave);
    return end;
}

fsdp_status fsdp_put_plan(fsdp_shard_writer *writer, const fsdp_save_plan *plan, fsdp_waves *waves,
                          fsdp_meter *meter, fsdp_error *err)
{
    fsdp_shard_piece *pieces = fsdp_alloc(plan->box_count, sizeof *pieces);
    if (!pieces)
        return fsdp_fail_memory(err, "a list of boxes");
    fsdp_status st = FSDP_OK;
    for (size_t first = 0, end; first < plan->box_count && st == FSDP_OK; first = end) {
        int64_t bytes;
        end = group_end(plan, waves, first, &bytes);
        const fsdp_shard_dataset *dataset = &plan->datasets[plan->boxes[first].dataset];
        st = fsdp_waves_reach(waves, plan->boxes[first].tensor, err);
        if (st == FSDP_OK)
            st = put_group(writer, plan, first, end, pieces, err);
        if (st == FSDP_OK)
            st = fsdp_meter_add(meter, bytes, dataset->name, dataset->name_size, err);
    }
    fsdp_free(pieces);
    return st == FSDP_OK ? fsdp_waves_finish(waves, err) : st;
}

/* --- get -------------------------------------------------------------------------------------- */

void fsdp_block_reader_release(fsdp_block_reader *block_reader)
{
    fsdp_decoder_release(&block_reader->decoder);
    fsdp_hasher_free(block_reader->hasher);
    fsdp_free(block_reader->piece);
    fsdp_free(block_reader->cast);
    *block_reader = (fsdp_block_reader){0};
}

int64_t fsdp_block_reader_bytes(bool encoded)
{
    /* piece and hash state; encoded: a frame, a chunk and the codec's own copy of it, too */
    return FSDP_PIECE_BYTES * 2 + (encoded ? 3 * (int64_t)FSDP_BLOCK_BYTES : 0);
}

fsdp_status fsdp_check_budget(int threads, int64_t memory, fsdp_error *err)
{
    if (threads < 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "the number of threads is %d: it must not be negative", threads);
    if (memory < 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "the memory is %" PRId64 " bytes: it must not be negative", memory);
    return FSDP_OK;
}

int fsdp_block_readers_within(int threads, int64_t memory, bool encoded)
{
    int64_t most = (memory > 0 ? memory : FSDP_MEMORY_DEFAULT) / fsdp_block_reader_bytes(encoded);
    int wanted = threads > 0 ? threads : fsdp_pool_cores();
    return wanted <= most ? wanted : most > 1 ? (int)most : 1;
}

static fsdp_status make_ready(fsdp_block_reader *block_reader, fsdp_error *err)
{
    if (block_reader->piece)
        return FSDP_OK;
    block_reader->hasher = fsdp_hasher_create();
    block_reader->piece = fsdp_alloc_pages(FSDP_PIECE_BYTES);
    if (!block_reader->hasher || !block_reader->piece)
        return fsdp_fail_memory(err, "read buffers");
    return FSDP_OK;
}

static char *element_of(const fsdp_read_target *target, const int64_t *lo, size_t element_size)
{
    int64_t inside[FSDP_MAX_DIMS];
    for (int d = 0; d < target->box.ndim; d++)
        inside[d] = lo[d] - target->box.lo[d];
    return target->data +
           fsdp_box_position(target->box.ndim, target->box.len, inside) * (int64_t)element_size;
}

static fsdp_status need_cast_room(fsdp_block_reader *block_reader, fsdp_error *err)
{
    enum { WIDEST = 8 }; /* a cast makes at most 8 bytes of one */
    if (!block_reader->cast && !(block_reader->cast = fsdp_alloc_pages(WIDEST * FSDP_PIECE_BYTES)))
        return fsdp_fail_memory(err, "casting");
    return FSDP_OK;
}

/* Places elements [first, first + count) of the stored box, which are at data, in the host's targets. */
static fsdp_status place_range(const fsdp_box_read *read, int64_t first, int64_t count,
                               const char *data, fsdp_error *err)
{
    const fsdp_stored_box *stored = read->stored;
    fsdp_box pieces[FSDP_BOX_PIECES], whole = fsdp_stored_box_box(stored);
    int piece_count = fsdp_box_cut(&whole, first, count, pieces);
    for (size_t w = 0; w < read->target_count; w++) {
        const fsdp_read_target *target = &read->targets[w];
        size_t element_size = fsdp_dtype_size(target->dtype);
        const char *at = data;
        if (target->device)
            continue;
        if (target->dtype != stored->dtype) {
            FSDP_TRY(need_cast_room(read->block_reader, err));
            char *cast = read->block_reader->cast;
            FSDP_TRY(fsdp_read_cast(cast, target->dtype, data, stored->dtype, count, err));
            at = cast;
        }
        for (int p = 0; p < piece_count; p++) {
            fsdp_copy_shared(&target->box, target->data, &pieces[p], at, element_size);
            at += fsdp_box_count(&pieces[p]) * (int64_t)element_size;
        }
    }
    return FSDP_OK;
}

/* --- targets of a device --- */

static const fsdp_read_device *find_device(const fsdp_box_read *read)
{
    size_t w = 0;
    while (w < read->target_count && !read->targets[w].device)
        w++;
    return w < read->target_count ? read->targets[w].device : NULL;
}

/* Memory for a whole block, if a target is a device's; else NULL. */
static fsdp_status take_slot(const fsdp_box_read *read, char **slot_out, fsdp_error *err)
{
    const fsdp_read_device *device = find_device(read);
    *slot_out = NULL;
    return device ? fsdp_read_slots_take(read->slots, device, slot_out, err) : FSDP_OK;
}

/* place_range for the targets of devices. The elements were checked. */
static fsdp_status place_on_devices(const fsdp_box_read *read, int64_t first, int64_t count,
                                    const char *data, fsdp_error *err)
{
    const fsdp_box whole = fsdp_stored_box_box(read->stored);
    const fsdp_read_range range = {&whole, first, count, read->stored->dtype, data};
    for (size_t w = 0; w < read->target_count; w++)
        if (read->targets[w].device)
            FSDP_TRY(fsdp_read_slots_place(read->slots, &range, &read->targets[w], err));
    return FSDP_OK;
}

/* --- blocks --- */

/*
 * When a target of the host holds the stored box as one run, elements can be read straight into it. Returns
 * where the box begins there, or NULL.
 */
static char *direct_target(const fsdp_box_read *read)
{
    const fsdp_stored_box *stored = read->stored;
    const fsdp_read_target *target = read->targets;
    const fsdp_box whole = fsdp_stored_box_box(stored);
    int64_t at;
    if (read->target_count == 0 || target->dtype != stored->dtype ||
        !fsdp_box_is_run(&target->box, &whole, &at))
        return NULL;
    return target->data + at * (int64_t)stored->element_size;
}

/* A range of a block in pieces: read, hash, place. slot: gets the range, for targets of devices; or NULL. */
static fsdp_status get_range(const fsdp_box_read *read, int64_t first, int64_t count, char *slot,
                             bool hashed, fsdp_error *err)
{
    fsdp_block_reader *block_reader = read->block_reader;
    const fsdp_stored_box *stored = read->stored;
    int64_t element_size = (int64_t)stored->element_size, step = FSDP_PIECE_BYTES / element_size;
    fsdp_box_read others = *read; /* the targets that the bytes are copied to */
    char *direct = slot ? NULL : direct_target(read);
    if (direct) {
        others.targets++;
        others.target_count--;
        if (!hashed && others.target_count == 0)
            step = count; /* no hash, no copy: pieces have no use */
    }
    for (int64_t at = first; at < first + count; at += step) {
        int64_t n = first + count - at < step ? first + count - at : step;
        char *piece = direct ? direct + at * element_size
                      : slot ? slot + (at - first) * element_size
                             : block_reader->piece;
        FSDP_TRY(fsdp_shard_read(read->shard, stored, at, n, piece, err));
        if (hashed)
            fsdp_hasher_add(block_reader->hasher, piece, (size_t)(n * element_size));
        FSDP_TRY(place_range(&others, at, n, piece, err));
    }
    block_reader->bytes_read += count * element_size;
    return FSDP_OK;
}

static fsdp_status compare_hash(const fsdp_box_read *read, int64_t block, fsdp_error *err)
{
    fsdp_hash hash = fsdp_hasher_value(read->block_reader->hasher);
    if (memcmp(&hash, &read->stored->hashes[block], sizeof hash) != 0)
        return fsdp_block_damaged(read->shard, read->stored, block, err);
    return FSDP_OK;
}

static fsdp_status get_raw(const fsdp_box_read *read, int64_t block, fsdp_error *err)
{
    int64_t first, elements;
    char *slot;
    fsdp_block_range(read->stored, block, &first, &elements);
    FSDP_TRY(take_slot(read, &slot, err));
    fsdp_hasher_reset(read->block_reader->hasher);
    FSDP_TRY(get_range(read, first, elements, slot, true, err));
    FSDP_TRY(compare_hash(read, block, err));
    return place_on_devices(read, first, elements, slot, err);
}

/* Frames are decoded as a whole, so checking them costs little and is always done. */
static fsdp_status get_encoded(const fsdp_box_read *read, int64_t block, fsdp_error *err)
{
    fsdp_block_reader *block_reader = read->block_reader;
    const fsdp_stored_box *stored = read->stored;
    const void *data = NULL;
    int64_t first, elements;
    fsdp_block_range(stored, block, &first, &elements);
    FSDP_TRY(fsdp_shard_decode(read->shard, stored, block, &block_reader->decoder, &data, err));
    block_reader->bytes_read += stored->frames[block].size;
    fsdp_hasher_reset(block_reader->hasher);
    fsdp_hasher_add(block_reader->hasher, data, (size_t)elements * stored->element_size);
    FSDP_TRY(compare_hash(read, block, err));
    int64_t step = FSDP_PIECE_BYTES / (int64_t)stored->element_size;
    for (int64_t at = 0; at < elements; at += step) {
        int64_t n = elements - at < step ? elements - at : step;
        const char *piece = (const char *)data + (size_t)at * stored->element_size;
        FSDP_TRY(place_range(read, first + at, n, piece, err));
    }
    return place_on_devices(read, first, elements, data, err);
}

/* --- without verification: exactly the wanted rows --- */

/* The elements that a target shares with a block, as boxes of the packed order. */
static int shared_boxes(const fsdp_stored_box *stored, int64_t block,
                        const fsdp_read_target *target, fsdp_box *shared)
{
    fsdp_box pieces[FSDP_BOX_PIECES], whole = fsdp_stored_box_box(stored);
    int64_t first, count;
    fsdp_block_range(stored, block, &first, &count);
    int piece_count = fsdp_box_cut(&whole, first, count, pieces), found = 0;
    for (int p = 0; p < piece_count; p++)
        if (fsdp_box_intersect(&pieces[p], &target->box, &shared[found]))
            found++;
    return found;
}

static int64_t wanted_elements(const fsdp_stored_box *stored, int64_t block,
                               const fsdp_read_target *target)
{
    fsdp_box shared[FSDP_BOX_PIECES];
    int64_t total = 0;
    for (int i = shared_boxes(stored, block, target, shared); i-- > 0;)
        total += fsdp_box_count(&shared[i]);
    return total;
}

bool fsdp_block_is_wanted(const fsdp_box_read *read, int64_t block)
{
    for (size_t w = 0; w < read->target_count; w++)
        if (wanted_elements(read->stored, block, &read->targets[w]) > 0)
            return true;
    return false;
}

/* Trailing dims in which a shared box is one run of both the stored box and the target. */
static int run_dims(const fsdp_stored_box *stored, const fsdp_box *shared,
                    const fsdp_read_target *target)
{
    int dim = shared->ndim - 1;
    while (dim > 0 && shared->len[dim] == stored->len[dim] &&
           shared->len[dim] == target->box.len[dim])
        dim--;
    return dim < 0 ? 0 : dim;
}

/* Reads one run straight into the only target, the host's, or through a cast when the dtypes differ. */
static fsdp_status get_run(const fsdp_box_read *read, const int64_t *lo, int64_t count,
                           fsdp_error *err)
{
    const fsdp_stored_box *stored = read->stored;
    const fsdp_read_target *target = read->targets;
    int64_t inside[FSDP_MAX_DIMS];
    for (int d = 0; d < stored->ndim; d++)
        inside[d] = lo[d] - stored->lo[d];
    int64_t first = fsdp_box_position(stored->ndim, stored->len, inside);
    if (target->dtype != stored->dtype)
        return get_range(read, first, count, NULL, false, err);
    read->block_reader->bytes_read += count * (int64_t)stored->element_size;
    return fsdp_shard_read(read->shard, stored, first, count,
                           element_of(target, lo, stored->element_size), err);
}

static fsdp_status get_rows(const fsdp_box_read *read, const fsdp_box *shared, fsdp_error *err)
{
    int outer = run_dims(read->stored, shared, read->targets);
    int64_t rows = 1, lo[FSDP_MAX_DIMS];
    for (int d = 0; d < outer; d++)
        rows *= shared->len[d];
    int64_t run = fsdp_box_count(shared) / rows;
    for (int64_t row = 0; row < rows; row++) {
        int64_t left = row;
        memcpy(lo, shared->lo, sizeof lo);
        for (int d = outer - 1; d >= 0; d--) {
            lo[d] += left % shared->len[d];
            left /= shared->len[d];
        }
        FSDP_TRY(get_run(read, lo, run, err));
    }
    return FSDP_OK;
}

/* The rows come to a slot as a box of their own. */
static fsdp_status get_rows_for_device(const fsdp_box_read *read, const fsdp_box *shared,
                                       fsdp_error *err)
{
    const fsdp_read_target *target = read->targets;
    fsdp_read_target rows = {.box = *shared, .dtype = read->stored->dtype};
    fsdp_box_read to_slot = *read;
    to_slot.targets = &rows;
    FSDP_TRY(fsdp_read_slots_take(read->slots, target->device, &rows.data, err));
    FSDP_TRY(get_rows(&to_slot, shared, err));
    const fsdp_read_range range = {shared, 0, fsdp_box_count(shared), rows.dtype, rows.data};
    return fsdp_read_slots_place(read->slots, &range, target, err);
}

static fsdp_status get_all_rows(const fsdp_box_read *read, int64_t first, int64_t count,
                                fsdp_error *err)
{
    char *slot;
    FSDP_TRY(take_slot(read, &slot, err));
    FSDP_TRY(get_range(read, first, count, slot, false, err));
    return place_on_devices(read, first, count, slot, err);
}

static fsdp_status get_wanted_rows(const fsdp_box_read *read, int64_t block, fsdp_error *err)
{
    int64_t first, elements, wanted = 0;
    fsdp_block_range(read->stored, block, &first, &elements);
    for (size_t w = 0; w < read->target_count; w++)
        wanted += wanted_elements(read->stored, block, &read->targets[w]);
    if (wanted >= elements)
        return get_all_rows(read, first, elements, err);
    fsdp_box_read one = *read; /* into one target after the other */
    one.target_count = 1;
    for (size_t w = 0; w < read->target_count; w++) {
        fsdp_box shared[FSDP_BOX_PIECES];
        one.targets = &read->targets[w];
        int found = shared_boxes(read->stored, block, one.targets, shared);
        for (int i = 0; i < found; i++)
            FSDP_TRY(one.targets->device ? get_rows_for_device(&one, &shared[i], err)
                                         : get_rows(&one, &shared[i], err));
    }
    return FSDP_OK;
}

static fsdp_status get_block(const fsdp_box_read *read, int64_t block, fsdp_error *err)
{
    if (read->stored->encoded)
        return get_encoded(read, block, err);
    if (read->block_reader->check == FSDP_CHECK_OFF)
        return get_wanted_rows(read, block, err);
    return get_raw(read, block, err);
}

fsdp_status fsdp_get_block(const fsdp_box_read *read, int64_t block, fsdp_error *err)
{
    FSDP_TRY(make_ready(read->block_reader, err));
    FSDP_TRY(get_block(read, block, err));
    fsdp_flow("statedict/transfer/pipeline.c", "block %lld of '%.*s': checked and placed",
              (long long)block, (int)read->stored->name_size, read->stored->name);
    return FSDP_OK;
}

fsdp_status fsdp_check_block(fsdp_block_reader *block_reader, fsdp_shard_reader *shard,
                             const fsdp_stored_box *stored, int64_t block, fsdp_error *err)
{
    fsdp_box_read read = {.block_reader = block_reader, .shard = shard, .stored = stored};
    FSDP_TRY(make_ready(block_reader, err));
    return stored->encoded ? get_encoded(&read, block, err) : get_raw(&read, block, err);
}

fsdp_status fsdp_fail_slab(int64_t bytes, int threads, fsdp_error *err)
{
    return fsdp_fail(
        err, FSDP_ERR_LIMIT,
        "cannot allocate %lld KiB for a slab of a tensor, and each of %d threads takes one; lower "
        "--mem (fsdp-train: --save.mem) or --jobs, or allow the process more memory",
        (long long)(bytes >> 10), threads);
}
