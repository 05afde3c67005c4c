/*
 * Reading boxes of an opened checkpoint: find the stored boxes that hold what is wanted, bring their
 * blocks (pipeline.c), alone or in turns with other workers. Load, diff and convert stand on this.
 */
#include "statedict/checkpoint/checkpoint_internal.h"
#include "statedict/checkpoint/foreign.h"

#include <string.h>

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

fsdp_status fsdp_checkpoint_stored(const fsdp_checkpoint *checkpoint, size_t entry, int rank,
                                   size_t part, const fsdp_box *box,
                                   const fsdp_stored_box **stored_out,
                                   fsdp_shard_reader **reader_out, fsdp_error *err)
{
    const fsdp_entry *tensor = fsdp_sd_at(checkpoint->manifest.sd, entry);
    fsdp_shard_reader *reader = checkpoint->readers[fsdp_checkpoint_file_of(checkpoint, rank)];
    const fsdp_stored_box *stored =
        fsdp_shard_find(reader, (uint32_t)rank, (uint32_t)entry, (uint32_t)part);
    if (!stored)
        return disagree(reader, tensor, "lacks a box that the manifest promises", err);
    if (!same_box(stored, box) || stored->dtype != tensor->dtype ||
        stored->name_size != tensor->name_size ||
        memcmp(stored->name, tensor->name, tensor->name_size) != 0)
        return disagree(reader, tensor, "holds another box than the manifest says", err);
    *stored_out = stored;
    *reader_out = reader;
    return FSDP_OK;
}

typedef struct get_state {
    fsdp_checkpoint *checkpoint;
    size_t entry;
    const fsdp_want *wants;
    size_t count;
    fsdp_want *near; /* the wants that meet the stored box at hand */
    fsdp_getter *getter;
    fsdp_turns *turns; /* NULL: every block */
} get_state;

#define NO_TURN (INT64_MAX / 2)

void fsdp_turns_begin(fsdp_turns *turns, atomic_llong *next)
{
    *turns = (fsdp_turns){.next = next, .mine = atomic_fetch_add(next, 1)};
}

void fsdp_turns_stop(fsdp_turns *turns)
{
    atomic_store(turns->next, NO_TURN);
}

bool fsdp_turns_take(fsdp_turns *turns)
{
    if (!turns)
        return true;
    if (turns->at++ != turns->mine)
        return false;
    turns->mine = atomic_fetch_add(turns->next, 1);
    return true;
}

/* None of the next `blocks` blocks is this worker's: step over them. */
static bool pass_turns(fsdp_turns *turns, int64_t blocks)
{
    if (!turns || turns->at + blocks > turns->mine)
        return false;
    turns->at += blocks;
    return true;
}

static fsdp_status get_stored(void *user, int rank, size_t part, const fsdp_box *box,
                              fsdp_error *err)
{
    get_state *state = user;
    const fsdp_stored_box *stored = NULL;
    fsdp_shard_reader *reader = NULL;
    fsdp_box shared;
    size_t near = 0;
    for (size_t w = 0; w < state->count; w++)
        if (fsdp_box_intersect(&state->wants[w].box, box, &shared))
            state->near[near++] = state->wants[w];
    if (near == 0) /* between the wants: its file may not even be open */
        return FSDP_OK;
    FSDP_TRY(fsdp_checkpoint_stored(state->checkpoint, state->entry, rank, part, box, &stored,
                                    &reader, err));
    if (pass_turns(state->turns, stored->block_count))
        return FSDP_OK;
    for (int64_t block = 0; block < stored->block_count; block++)
        if (fsdp_turns_take(state->turns) && fsdp_block_is_wanted(stored, block, state->near, near))
            FSDP_TRY(fsdp_get_block(state->getter, reader, stored, block, state->near, near, err));
    return FSDP_OK;
}

/* The smallest box that holds all wants, so that stored boxes are visited once. */
static fsdp_box hull(const fsdp_want *wants, size_t count)
{
    fsdp_box box = wants[0].box;
    for (size_t w = 1; w < count; w++) {
        const fsdp_box *other = &wants[w].box;
        for (int d = 0; d < box.ndim; d++) {
            int64_t end = box.lo[d] + box.len[d], other_end = other->lo[d] + other->len[d];
            box.lo[d] = other->lo[d] < box.lo[d] ? other->lo[d] : box.lo[d];
            box.len[d] = (other_end > end ? other_end : end) - box.lo[d];
        }
    }
    return box;
}

fsdp_status fsdp_checkpoint_get(fsdp_checkpoint *checkpoint, size_t entry, const fsdp_want *wants,
                                size_t count, fsdp_getter *getter, fsdp_turns *turns,
                                fsdp_error *err)
{
    if (count == 0)
        return FSDP_OK;
    if (checkpoint->source)
        return fsdp_foreign_get(checkpoint, entry, wants, count, getter, turns, err);
    get_state state = {.checkpoint = checkpoint,
                       .entry = entry,
                       .wants = wants,
                       .count = count,
                       .getter = getter,
                       .turns = turns,
                       .near = fsdp_alloc(count, sizeof *state.near)};
    if (!state.near)
        return fsdp_fail_memory(err, "a list of boxes");
    fsdp_box all = hull(wants, count);
    fsdp_status st = fsdp_plan_stored(fsdp_sd_at(checkpoint->manifest.sd, entry),
                                      checkpoint->owners[entry], &all, get_stored, &state, err);
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
                                 void *data, fsdp_verify_mode verify, fsdp_error *err)
{
    FSDP_TRY(resolve_tensor(checkpoint, &entry, err));
    const fsdp_entry *tensor = fsdp_sd_at(checkpoint->manifest.sd, entry);
    fsdp_box whole = fsdp_box_whole(tensor->ndim, tensor->shape);
    if (box->ndim != whole.ndim || !fsdp_box_contains(&whole, box))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "the box asked for does not lie in tensor entry %zu of '%s'", entry,
                         checkpoint->path);
    fsdp_want want = {.box = *box, .dtype = tensor->dtype, .data = data};
    fsdp_getter getter = {.verify = verify};
    fsdp_status st = fsdp_box_count(box) > 0
                         ? fsdp_checkpoint_get(checkpoint, entry, &want, 1, &getter, NULL, err)
                         : FSDP_OK;
    fsdp_getter_release(&getter);
    return st;
}

static fsdp_status stream_slabs(fsdp_checkpoint *checkpoint, size_t entry, int64_t max_elements,
                                char *data, fsdp_getter *getter, fsdp_slab_visit visit, void *user,
                                fsdp_error *err)
{
    const fsdp_entry *tensor = fsdp_sd_at(checkpoint->manifest.sd, entry);
    fsdp_slabs slabs = {0};
    fsdp_box slab;
    for (int64_t first = 0;
         fsdp_slabs_next(&slabs, tensor->ndim, tensor->shape, max_elements, &slab);) {
        fsdp_want want = {.box = slab, .dtype = tensor->dtype, .data = data};
        FSDP_TRY(fsdp_checkpoint_get(checkpoint, entry, &want, 1, getter, NULL, err));
        FSDP_TRY(visit(user, tensor, first, slabs.next - first, data, err));
        first = slabs.next;
    }
    return FSDP_OK;
}

fsdp_status fsdp_checkpoint_stream(fsdp_checkpoint *checkpoint, size_t entry, int64_t memory,
                                   fsdp_slab_visit visit, void *user, fsdp_error *err)
{
    FSDP_TRY(resolve_tensor(checkpoint, &entry, err));
    const fsdp_entry *tensor = fsdp_sd_at(checkpoint->manifest.sd, entry);
    int64_t bytes = fsdp_entry_bytes(tensor), size = (int64_t)fsdp_dtype_size(tensor->dtype);
    if (bytes == 0)
        return visit(user, tensor, 0, 0, "", err);
    memory = memory > 0 ? memory : FSDP_MEMORY_DEFAULT;
    /* less than a block at a time would read each block many times over */
    memory = memory > FSDP_BLOCK_BYTES ? memory : FSDP_BLOCK_BYTES;
    int64_t room = bytes < memory ? bytes : memory;
    char *data = fsdp_alloc_pages((size_t)room);
    if (!data)
        return fsdp_fail_memory(err, "a slab of a tensor");
    fsdp_getter getter = {0};
    fsdp_status st = stream_slabs(checkpoint, entry, room / size, data, &getter, visit, user, err);
    fsdp_getter_release(&getter);
    fsdp_free(data);
    return st;
}
