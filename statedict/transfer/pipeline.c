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

fsdp_status fsdp_put_plan(fsdp_shard_writer *writer, const fsdp_save_plan *plan, fsdp_meter *meter,
                          fsdp_error *err)
{
    fsdp_shard_piece *pieces = fsdp_alloc(plan->box_count, sizeof *pieces);
    if (!pieces)
        return fsdp_fail_memory(err, "a list of boxes");
    fsdp_status st = FSDP_OK;
    for (size_t first = 0, end; first < plan->box_count && st == FSDP_OK; first = end) {
        int64_t bytes = 0;
        for (end = first; end < plan->box_count && (end == first || bytes < GROUP_BYTES); end++)
            bytes += planned_bytes(plan, end);
        st = put_group(writer, plan, first, end, pieces, err);
        const fsdp_shard_dataset *dataset = &plan->datasets[plan->boxes[first].dataset];
        if (st == FSDP_OK)
            st = fsdp_meter_add(meter, bytes, dataset->name, dataset->name_size, err);
    }
    fsdp_free(pieces);
    return st;
}

/* --- get -------------------------------------------------------------------------------------- */

void fsdp_block_reader_release(fsdp_block_reader *block_reader)
{
    fsdp_decoder_release(&block_reader->decoder);
    fsdp_hasher_free(block_reader->hasher);
    fsdp_free(block_reader->piece);
    fsdp_free(block_reader->cast);
    fsdp_source_reader_release(&block_reader->foreign);
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
        return fsdp_fail(err, FSDP_ERR_USAGE, "%d threads: a number below zero has no meaning",
                         threads);
    if (memory < 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "%" PRId64 " bytes of memory: a number below zero has no meaning", memory);
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

static void byte_strides(int ndim, const int64_t *len, size_t element_size, int64_t *strides)
{
    fsdp_box_strides(ndim, len, strides);
    for (int d = 0; d < ndim; d++)
        strides[d] *= (int64_t)element_size;
}

static char *element_of(const fsdp_read_target *target, const int64_t *lo, size_t element_size)
{
    int64_t inside[FSDP_MAX_DIMS];
    for (int d = 0; d < target->box.ndim; d++)
        inside[d] = lo[d] - target->box.lo[d];
    return target->data +
           fsdp_box_position(target->box.ndim, target->box.len, inside) * (int64_t)element_size;
}

/* Copies to a target the elements that it shares with `box`; data holds the packed elements of the
 * box in the wanted dtype. */
static void place_box(const fsdp_read_target *target, const fsdp_box *box, const char *data)
{
    fsdp_box shared;
    if (!fsdp_box_intersect(&target->box, box, &shared))
        return;
    size_t element_size = fsdp_dtype_size(target->dtype);
    int64_t from_strides[FSDP_MAX_DIMS], to_strides[FSDP_MAX_DIMS];
    byte_strides(box->ndim, box->len, element_size, from_strides);
    byte_strides(box->ndim, target->box.len, element_size, to_strides);
    for (int d = 0; d < box->ndim; d++)
        data += (shared.lo[d] - box->lo[d]) * from_strides[d];
    fsdp_kernels_get()->copy_box(element_of(target, shared.lo, element_size), to_strides, data,
                                 from_strides, box->ndim, shared.len, element_size);
}

static fsdp_status need_cast_room(fsdp_block_reader *block_reader, fsdp_error *err)
{
    enum { WIDEST = 8 }; /* a cast makes at most 8 bytes of one */
    if (!block_reader->cast && !(block_reader->cast = fsdp_alloc_pages(WIDEST * FSDP_PIECE_BYTES)))
        return fsdp_fail_memory(err, "casting");
    return FSDP_OK;
}

/* Places elements [first, first + count) of a stored box, which are at data, in every target. */
static fsdp_status place_range(fsdp_block_reader *block_reader, const fsdp_stored_box *stored,
                               int64_t first, int64_t count, const char *data,
                               const fsdp_read_target *targets, size_t target_count,
                               fsdp_error *err)
{
    fsdp_box pieces[FSDP_BOX_PIECES], whole = fsdp_stored_box_box(stored);
    int piece_count = fsdp_box_cut(&whole, first, count, pieces);
    for (size_t w = 0; w < target_count; w++) {
        size_t element_size = fsdp_dtype_size(targets[w].dtype);
        const char *at = data;
        if (targets[w].dtype != stored->dtype) {
            FSDP_TRY(need_cast_room(block_reader, err));
            size_t lost =
                fsdp_kernels_get()->cast(block_reader->cast, targets[w].dtype, data, stored->dtype,
                                         (size_t)count, FSDP_OVERFLOW_FAIL);
            if (lost > 0)
                return fsdp_fail(err, FSDP_ERR_USAGE, "%zu values do not fit in %s", lost,
                                 fsdp_dtype_name(targets[w].dtype));
            at = block_reader->cast;
        }
        for (int p = 0; p < piece_count; p++) {
            place_box(&targets[w], &pieces[p], at);
            at += fsdp_box_count(&pieces[p]) * (int64_t)element_size;
        }
    }
    return FSDP_OK;
}

/*
 * When a target holds the stored box as one run, elements can be read straight into it. Returns
 * where the box begins there, or NULL.
 */
static char *direct_target(const fsdp_stored_box *stored, const fsdp_read_target *target)
{
    if (target->dtype != stored->dtype)
        return NULL;
    bool outermost = true; /* no dim with more than one index seen yet */
    for (int d = 0; d < stored->ndim; d++) {
        int64_t lo = stored->lo[d] - target->box.lo[d];
        if (lo < 0 || stored->len[d] > target->box.len[d] - lo)
            return NULL;
        if (!outermost && stored->len[d] != target->box.len[d])
            return NULL;
        outermost = outermost && stored->len[d] == 1;
    }
    return element_of(target, stored->lo, stored->element_size);
}

/* A range of a block in pieces: read, hash, place. */
static fsdp_status get_range(fsdp_block_reader *block_reader, fsdp_shard_reader *reader,
                             const fsdp_stored_box *stored, int64_t first, int64_t count,
                             bool hashed, const fsdp_read_target *targets, size_t target_count,
                             fsdp_error *err)
{
    int64_t element_size = (int64_t)stored->element_size, step = FSDP_PIECE_BYTES / element_size;
    char *direct = target_count > 0 ? direct_target(stored, &targets[0]) : NULL;
    if (direct && !hashed && target_count == 1)
        step = count; /* no hash, no copy: pieces have no use */
    for (int64_t at = first; at < first + count; at += step) {
        int64_t n = first + count - at < step ? first + count - at : step;
        char *piece = direct ? direct + at * element_size : block_reader->piece;
        FSDP_TRY(fsdp_shard_read(reader, stored, at, n, piece, err));
        if (hashed)
            fsdp_hasher_add(block_reader->hasher, piece, (size_t)(n * element_size));
        const fsdp_read_target *others = direct ? targets + 1 : targets; /* NULL: only checking */
        size_t other_count = direct ? target_count - 1 : target_count;
        FSDP_TRY(place_range(block_reader, stored, at, n, piece, others, other_count, err));
    }
    block_reader->bytes_read += count * element_size;
    return FSDP_OK;
}

static fsdp_status compare_hash(fsdp_block_reader *block_reader, const fsdp_shard_reader *reader,
                                const fsdp_stored_box *stored, int64_t block, fsdp_error *err)
{
    fsdp_hash hash = fsdp_hasher_value(block_reader->hasher);
    if (memcmp(&hash, &stored->hashes[block], sizeof hash) != 0)
        return fsdp_block_damaged(reader, stored, block, err);
    return FSDP_OK;
}

static fsdp_status get_raw(fsdp_block_reader *block_reader, fsdp_shard_reader *reader,
                           const fsdp_stored_box *stored, int64_t block,
                           const fsdp_read_target *targets, size_t count, fsdp_error *err)
{
    int64_t first, elements;
    fsdp_block_range(stored, block, &first, &elements);
    fsdp_hasher_reset(block_reader->hasher);
    FSDP_TRY(get_range(block_reader, reader, stored, first, elements, true, targets, count, err));
    return compare_hash(block_reader, reader, stored, block, err);
}

/* Frames are decoded as a whole, so checking them costs little and is always done. */
static fsdp_status get_encoded(fsdp_block_reader *block_reader, fsdp_shard_reader *reader,
                               const fsdp_stored_box *stored, int64_t block,
                               const fsdp_read_target *targets, size_t count, fsdp_error *err)
{
    const void *data = NULL;
    int64_t first, elements;
    fsdp_block_range(stored, block, &first, &elements);
    FSDP_TRY(fsdp_shard_decode(reader, stored, block, &block_reader->decoder, &data, err));
    block_reader->bytes_read += stored->frames[block].size;
    fsdp_hasher_reset(block_reader->hasher);
    fsdp_hasher_add(block_reader->hasher, data, (size_t)elements * stored->element_size);
    FSDP_TRY(compare_hash(block_reader, reader, stored, block, err));
    int64_t step = FSDP_PIECE_BYTES / (int64_t)stored->element_size;
    for (int64_t at = 0; at < elements; at += step) {
        int64_t n = elements - at < step ? elements - at : step;
        FSDP_TRY(place_range(block_reader, stored, first + at, n,
                             (const char *)data + (size_t)at * stored->element_size, targets, count,
                             err));
    }
    return FSDP_OK;
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

bool fsdp_block_is_wanted(const fsdp_stored_box *stored, int64_t block,
                          const fsdp_read_target *targets, size_t count)
{
    for (size_t w = 0; w < count; w++)
        if (wanted_elements(stored, block, &targets[w]) > 0)
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

/* Reads one run straight into the target, or through a cast when the dtypes differ. */
static fsdp_status get_run(fsdp_block_reader *block_reader, fsdp_shard_reader *reader,
                           const fsdp_stored_box *stored, const int64_t *lo, int64_t count,
                           const fsdp_read_target *target, fsdp_error *err)
{
    int64_t inside[FSDP_MAX_DIMS];
    for (int d = 0; d < stored->ndim; d++)
        inside[d] = lo[d] - stored->lo[d];
    int64_t first = fsdp_box_position(stored->ndim, stored->len, inside);
    if (target->dtype != stored->dtype)
        return get_range(block_reader, reader, stored, first, count, false, target, 1, err);
    block_reader->bytes_read += count * (int64_t)stored->element_size;
    return fsdp_shard_read(reader, stored, first, count,
                           element_of(target, lo, stored->element_size), err);
}

static fsdp_status get_rows(fsdp_block_reader *block_reader, fsdp_shard_reader *reader,
                            const fsdp_stored_box *stored, const fsdp_box *shared,
                            const fsdp_read_target *target, fsdp_error *err)
{
    int outer = run_dims(stored, shared, target);
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
        FSDP_TRY(get_run(block_reader, reader, stored, lo, run, target, err));
    }
    return FSDP_OK;
}

static fsdp_status get_wanted_rows(fsdp_block_reader *block_reader, fsdp_shard_reader *reader,
                                   const fsdp_stored_box *stored, int64_t block,
                                   const fsdp_read_target *targets, size_t count, fsdp_error *err)
{
    int64_t first, elements, wanted = 0;
    fsdp_block_range(stored, block, &first, &elements);
    for (size_t w = 0; w < count; w++)
        wanted += wanted_elements(stored, block, &targets[w]);
    if (wanted >= elements)
        return get_range(block_reader, reader, stored, first, elements, false, targets, count, err);
    for (size_t w = 0; w < count; w++) {
        fsdp_box shared[FSDP_BOX_PIECES];
        int found = shared_boxes(stored, block, &targets[w], shared);
        for (int i = 0; i < found; i++)
            FSDP_TRY(get_rows(block_reader, reader, stored, &shared[i], &targets[w], err));
    }
    return FSDP_OK;
}

static fsdp_status get_block(fsdp_block_reader *block_reader, fsdp_shard_reader *reader,
                             const fsdp_stored_box *stored, int64_t block,
                             const fsdp_read_target *targets, size_t count, fsdp_error *err)
{
    if (stored->encoded)
        return get_encoded(block_reader, reader, stored, block, targets, count, err);
    if (block_reader->check == FSDP_CHECK_OFF)
        return get_wanted_rows(block_reader, reader, stored, block, targets, count, err);
    return get_raw(block_reader, reader, stored, block, targets, count, err);
}

fsdp_status fsdp_get_block(fsdp_block_reader *block_reader, fsdp_shard_reader *reader,
                           const fsdp_stored_box *stored, int64_t block,
                           const fsdp_read_target *targets, size_t count, fsdp_error *err)
{
    FSDP_TRY(make_ready(block_reader, err));
    FSDP_TRY(get_block(block_reader, reader, stored, block, targets, count, err));
    fsdp_flow("statedict/transfer/pipeline.c", "block %lld of '%.*s': checked and placed",
              (long long)block, (int)stored->name_size, stored->name);
    return FSDP_OK;
}

fsdp_status fsdp_check_block(fsdp_block_reader *block_reader, fsdp_shard_reader *reader,
                             const fsdp_stored_box *stored, int64_t block, fsdp_error *err)
{
    FSDP_TRY(make_ready(block_reader, err));
    return stored->encoded ? get_encoded(block_reader, reader, stored, block, NULL, 0, err)
                           : get_raw(block_reader, reader, stored, block, NULL, 0, err);
}

fsdp_status fsdp_fail_slab(int64_t bytes, int threads, fsdp_error *err)
{
    return fsdp_fail(
        err, FSDP_ERR_LIMIT,
        "cannot allocate %lld KiB for a slab of a tensor, and each of %d threads takes "
        "one: a smaller --mem or fewer --jobs take less, or allow the process more",
        (long long)(bytes >> 10), threads);
}
