/*
 * Reads boxes of an opened native checkpoint: finds the stored boxes that overlap the wanted ones and
 * gets their blocks (pipeline.c), alone or shared with other workers. Used by load, diff and convert.
 */
#include "statedict/checkpoint/checkpoint_internal.h"
#include "base/data/box_internal.h"

#include <string.h>

#include "base/core/given.h"

int fsdp_checkpoint_file_of(const fsdp_checkpoint *checkpoint, int rank)
{
    return checkpoint->manifest.kind == FSDP_FULL ? 0 : rank;
}

static bool same_box(const fsdp_stored_box *stored, const fsdp_box *box)
{
    size_t size = (size_t)box->ndim * sizeof(int64_t);
    return stored->ndim == box->ndim && memcmp(stored->lo, box->lo, size) == 0 &&
           memcmp(stored->len, box->len, size) == 0;
}

static fsdp_status disagree(const fsdp_shard_reader *reader, const fsdp_entry *tensor,
                            const char *what, fsdp_error *err)
{
    char name[160];
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' %s: tensor '%s'", fsdp_shard_path(reader), what,
                     fsdp_printable(tensor->name, tensor->name_size, name, sizeof name));
}

fsdp_status fsdp_checkpoint_stored(const fsdp_checkpoint *checkpoint,
                                   const fsdp_promised_box *promised,
                                   const fsdp_stored_box **stored_out,
                                   fsdp_shard_reader **reader_out, fsdp_error *err)
{
    const fsdp_entry *tensor = fsdp_sd_at(checkpoint->manifest.sd, promised->entry);
    fsdp_shard_reader *reader =
        fsdp_native_of(checkpoint)->readers[fsdp_checkpoint_file_of(checkpoint, promised->rank)];
    const fsdp_stored_box *stored = fsdp_shard_find(
        reader, (uint32_t)promised->rank, (uint32_t)promised->entry, (uint32_t)promised->part);
    if (!stored)
        return disagree(reader, tensor, "lacks a box that the manifest promises", err);
    if (!same_box(stored, promised->box) || stored->dtype != tensor->dtype ||
        stored->name_size != tensor->name_size ||
        memcmp(stored->name, tensor->name, tensor->name_size) != 0)
        return disagree(reader, tensor, "holds another box than the manifest says", err);
    *stored_out = stored;
    *reader_out = reader;
    return FSDP_OK;
}

typedef struct get_state {
    fsdp_checkpoint *checkpoint;
    const fsdp_read_request *request;
    fsdp_read_target *near; /* the targets that overlap the current stored box */
} get_state;

#define NO_WORK (INT64_MAX / 2)

void fsdp_work_counter_begin(fsdp_work_counter *counter, atomic_llong *next)
{
    *counter = (fsdp_work_counter){.next = next, .mine = atomic_fetch_add(next, 1)};
}

void fsdp_work_counter_stop(fsdp_work_counter *counter)
{
    atomic_store(counter->next, NO_WORK);
}

bool fsdp_work_counter_take(fsdp_work_counter *counter)
{
    if (!counter)
        return true;
    if (counter->at++ != counter->mine)
        return false;
    counter->mine = atomic_fetch_add(counter->next, 1);
    return true;
}

/* Skips the next `blocks` blocks if none of them is this worker's. */
static bool pass_blocks(fsdp_work_counter *counter, int64_t blocks)
{
    if (!counter || counter->at + blocks > counter->mine)
        return false;
    counter->at += blocks;
    return true;
}

static fsdp_status get_stored(void *context, int rank, size_t part, const fsdp_box *box,
                              fsdp_error *err)
{
    const get_state *state = context;
    const fsdp_read_request *request = state->request;
    fsdp_box_read read = {.block_reader = &request->reader->blocks, .targets = state->near};
    fsdp_box shared;
    for (size_t w = 0; w < request->count; w++)
        if (fsdp_box_intersect(&request->targets[w].box, box, &shared))
            state->near[read.target_count++] = request->targets[w];
    if (read.target_count == 0) /* overlaps the hull, but no target: its file may not be open */
        return FSDP_OK;
    fsdp_promised_box promised = {request->entry, rank, part, box};
    FSDP_TRY(fsdp_checkpoint_stored(state->checkpoint, &promised, &read.stored, &read.shard, err));
    if (pass_blocks(request->counter, read.stored->block_count))
        return FSDP_OK;
    for (int64_t block = 0; block < read.stored->block_count; block++)
        if (fsdp_work_counter_take(request->counter) && fsdp_block_is_wanted(&read, block))
            FSDP_TRY(fsdp_get_block(&read, block, err));
    return FSDP_OK;
}

/* The smallest box that holds all targets, so that stored boxes are visited once. */
static fsdp_box hull(const fsdp_read_target *targets, size_t count)
{
    fsdp_box box = targets[0].box;
    for (size_t w = 1; w < count; w++) {
        const fsdp_box *other = &targets[w].box;
        for (int d = 0; d < box.ndim; d++) {
            int64_t end = box.lo[d] + box.len[d], other_end = other->lo[d] + other->len[d];
            box.lo[d] = other->lo[d] < box.lo[d] ? other->lo[d] : box.lo[d];
            box.len[d] = (other_end > end ? other_end : end) - box.lo[d];
        }
    }
    return box;
}

fsdp_status fsdp_native_get(fsdp_checkpoint *checkpoint, const fsdp_read_request *request,
                            fsdp_error *err)
{
    size_t entry = request->entry;
    get_state state = {checkpoint, request, fsdp_alloc(request->count, sizeof *state.near)};
    if (!state.near)
        return fsdp_fail_memory(err, "a list of boxes");
    fsdp_box all = hull(request->targets, request->count);
    fsdp_status st = fsdp_box_plan_stored(fsdp_sd_at(checkpoint->manifest.sd, entry),
                                          fsdp_native_of(checkpoint)->owners[entry], &all,
                                          get_stored, &state, err);
    fsdp_free(state.near);
    return st;
}

static fsdp_status resolve_tensor(const fsdp_checkpoint *checkpoint, size_t *entry, fsdp_error *err)
{
    const fsdp_sd *sd = checkpoint->manifest.sd;
    if (*entry < fsdp_sd_count(sd) && fsdp_sd_at(sd, *entry)->kind == FSDP_ENTRY_ALIAS)
        *entry = fsdp_sd_at(sd, *entry)->target;
    if (*entry >= fsdp_sd_count(sd) || fsdp_sd_at(sd, *entry)->kind != FSDP_ENTRY_TENSOR)
        return fsdp_fail(err, FSDP_ERR_USAGE, "entry %zu of '%s' is no tensor", *entry,
                         checkpoint->path);
    return FSDP_OK;
}

fsdp_status fsdp_checkpoint_read(fsdp_checkpoint *checkpoint, size_t entry, const fsdp_box *box,
                                 void *data, fsdp_check_mode check, fsdp_error *err)
{
    FSDP_NEED(err, checkpoint, box, data);
    FSDP_TRY(resolve_tensor(checkpoint, &entry, err));
    const fsdp_entry *tensor = fsdp_sd_at(checkpoint->manifest.sd, entry);
    fsdp_box whole = fsdp_box_whole(tensor->ndim, tensor->shape);
    if (box->ndim != whole.ndim || !fsdp_box_contains(&whole, box))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "the box asked for does not lie in tensor entry %zu of '%s'", entry,
                         checkpoint->path);
    fsdp_read_target target = {.box = *box, .dtype = tensor->dtype, .data = data};
    fsdp_reader reader = {.blocks.check = check};
    fsdp_read_request request = {entry, &target, 1, &reader, NULL};
    fsdp_status st =
        fsdp_box_count(box) > 0 ? fsdp_checkpoint_get(checkpoint, &request, err) : FSDP_OK;
    fsdp_reader_release(&reader);
    return st;
}

static fsdp_status stream_with(const fsdp_slab_stream *stream, char *data, int64_t most,
                               fsdp_error *err)
{
    const fsdp_entry *tensor = stream->tensor;
    fsdp_slabs slabs = {0};
    fsdp_box slab;
    for (int64_t first = 0; fsdp_slabs_next(&slabs, tensor->ndim, tensor->shape, most, &slab);) {
        FSDP_TRY(stream->read(stream->source, &slab, data, err));
        FSDP_TRY(stream->visit(stream->context, tensor, first, slabs.next - first, data, err));
        first = slabs.next;
    }
    return FSDP_OK;
}

fsdp_status fsdp_stream_slabs(const fsdp_slab_stream *stream, fsdp_error *err)
{
    int64_t bytes = fsdp_entry_bytes(stream->tensor);
    int64_t memory = stream->memory > 0 ? stream->memory : FSDP_MEMORY_DEFAULT;
    if (bytes == 0)
        return stream->visit(stream->context, stream->tensor, 0, 0, "", err);
    /* smaller slabs would read each block several times */
    memory = memory > FSDP_BLOCK_BYTES ? memory : FSDP_BLOCK_BYTES;
    int64_t room = bytes < memory ? bytes : memory;
    char *data = fsdp_alloc_pages((size_t)room);
    if (!data)
        return fsdp_fail_memory(err, "a slab of a tensor");
    int64_t most = room / (int64_t)fsdp_dtype_size(stream->tensor->dtype);
    fsdp_status st = stream_with(stream, data, most, err);
    fsdp_free(data);
    return st;
}

typedef struct entry_reader {
    fsdp_checkpoint *checkpoint;
    size_t entry;
    fsdp_reader reader;
} entry_reader;

static fsdp_status read_slab(void *context, const fsdp_box *slab, char *data, fsdp_error *err)
{
    entry_reader *work = context;
    const fsdp_entry *tensor = fsdp_sd_at(work->checkpoint->manifest.sd, work->entry);
    fsdp_read_target target = {.box = *slab, .dtype = tensor->dtype, .data = data};
    fsdp_read_request request = {work->entry, &target, 1, &work->reader, NULL};
    return fsdp_checkpoint_get(work->checkpoint, &request, err);
}

fsdp_status fsdp_checkpoint_stream(fsdp_checkpoint *checkpoint, size_t entry, int64_t memory,
                                   fsdp_slab_visit visit, void *context, fsdp_error *err)
{
    FSDP_NEED(err, checkpoint);
    FSDP_NEED_CALL(err, visit);
    FSDP_TRY(resolve_tensor(checkpoint, &entry, err));
    entry_reader work = {.checkpoint = checkpoint, .entry = entry};
    fsdp_slab_stream stream = {.tensor = fsdp_sd_at(checkpoint->manifest.sd, entry),
                               .read = read_slab,
                               .source = &work,
                               .memory = memory,
                               .visit = visit,
                               .context = context};
    fsdp_status st = fsdp_stream_slabs(&stream, err);
    fsdp_reader_release(&work.reader);
    return st;
}
