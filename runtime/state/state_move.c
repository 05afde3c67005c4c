/*
 * Getting and setting share these: entries of other dicts, the agreement of all ranks on a call, and parts of
 * tensors that move between boxes and ranks. A tensor of any size goes through one buffer, in pieces of its
 * row-major order.
 */
#include "runtime/step/step.h"
#include "runtime/state/state_internal.h"

#include <stdio.h>
#include <string.h>

#include "base/data/box_internal.h"
#include "kernels/kernels.h"
#include "statedict/ctl/ctl_backend.h"
#include "statedict/sd/describe.h"

/* --- entries ---------------------------------------------------------------------------------- */

fsdp_status fsdp_state_add_entry(const fsdp_sd *from, const fsdp_entry *entry,
                                 const fsdp_layout *layout, void *data, fsdp_sd *sd,
                                 fsdp_error *err)
{
    const fsdp_entry *target = fsdp_sd_at(from, entry->target);
    switch (entry->kind) {
    case FSDP_ENTRY_TENSOR:
        return fsdp_sd_add_tensor(
            sd, entry->name, entry->name_size,
            &(fsdp_tensor){entry->dtype, entry->ndim, entry->shape, *layout, data}, err);
    case FSDP_ENTRY_VALUE:
        return fsdp_sd_add_value(sd, entry->name, entry->name_size, &entry->value, err);
    case FSDP_ENTRY_ALIAS: break;
    }
    return fsdp_sd_add_alias(sd, entry->name, entry->name_size, target->name, target->name_size,
                             err);
}

fsdp_status fsdp_state_add_extra(const fsdp_sd *extra, const fsdp_entry *entry, fsdp_sd *sd,
                                 fsdp_error *err)
{
    if (entry->flat >= 0)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "'%s' lies in a flat buffer, which extra entries cannot: add it as a tensor",
            entry->name);
    return fsdp_state_add_entry(extra, entry, &entry->layout, entry->data, sd, err);
}

/* --- comparing requests ----------------------------------------------------------------------- */

/* A rank's request, as the ranks compare it. */
typedef struct asked {
    char text[64];
} asked;

static fsdp_status compare_asked(const asked *all, int n, fsdp_error *err)
{
    for (int i = 1; i < n; i++)
        if (strcmp(all[i].text, all[0].text) != 0)
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "rank 0 %s and rank %d %s: all ranks must make the same call",
                             all[0].text, i, all[i].text);
    return FSDP_OK;
}

fsdp_status fsdp_state_agree(const fsdp_state_scope *scope, const fsdp_sd *live, const char *call,
                             bool with_values, fsdp_status mine, fsdp_error *err)
{
    fsdp_ctl *ctl = fsdp_world_ctl(scope->root->world);
    int n = fsdp_ctl_size(ctl);
    asked local = {""}, *all = fsdp_alloc((size_t)n, sizeof *all);
    snprintf(local.text, sizeof local.text, "%s", call);
    if (mine == FSDP_OK && !all)
        mine = fsdp_fail_memory(err, "a comparison of ranks");
    fsdp_status status = fsdp_ctl_agree(ctl, mine, err);
    if (status == FSDP_OK)
        status = fsdp_ctl_allgather(ctl, &local, sizeof local, all, err);
    if (status == FSDP_OK)
        status = compare_asked(all, n, err);
    fsdp_free(all);
    return status == FSDP_OK ? fsdp_describe_agree(live, with_values, ctl, FSDP_OK, err) : status;
}

/* --- between boxes ---------------------------------------------------------------------------- */

void fsdp_state_copy_range(const fsdp_state_range *from, const fsdp_box *to, void *to_data,
                           size_t element)
{
    fsdp_box pieces[FSDP_BOX_PIECES];
    const char *at = from->data;
    int n = fsdp_box_cut(&from->box, from->first, from->count, pieces);
    for (int i = 0; i < n; i++) {
        fsdp_copy_shared(to, to_data, &pieces[i], at, element);
        at += (size_t)fsdp_box_count(&pieces[i]) * element;
    }
}

void fsdp_state_copy_into(const fsdp_state_range *from, const fsdp_entry *to, int rank)
{
    size_t element = fsdp_dtype_size(to->dtype);
    size_t n = fsdp_layout_box_count(&to->layout, to->ndim, to->shape, rank);
    char *at = to->data;
    for (size_t i = 0; i < n; i++) {
        fsdp_box box;
        fsdp_layout_box_at(&to->layout, to->ndim, to->shape, rank, i, &box);
        fsdp_state_copy_range(from, &box, at, element);
        at += (size_t)fsdp_box_count(&box) * element;
    }
}

/* --- between ranks ---------------------------------------------------------------------------- */

enum { BUFFER_BYTES = 16 << 20, PIECES = 256, ALIGNMENT = 64 };

/* A part of a tensor in the buffer, at from.data. */
struct fsdp_state_piece {
    fsdp_state_range from;
    const fsdp_entry *to;
};

static fsdp_status prepare(fsdp_state_mover *mover, int64_t most, fsdp_error *err)
{
    fsdp_root *root = mover->root;
    mover->room = (size_t)(most < BUFFER_BYTES ? most : BUFFER_BYTES);
    mover->buffer = fsdp_alloc_pages(mover->room + 1);
    mover->pieces = fsdp_alloc(PIECES, sizeof *mover->pieces);
    if (!mover->buffer || !mover->pieces)
        return fsdp_fail_memory(err, "moving the state of a root");
    return fsdp_root_world_comm(root, "whole state", &mover->ordered, err);
}

fsdp_status fsdp_state_mover_init(fsdp_state_mover *mover, fsdp_root *root, int64_t most,
                                  fsdp_status mine, fsdp_error *err)
{
    *mover = (fsdp_state_mover){.root = root};
    if (mine == FSDP_OK)
        mine = prepare(mover, most, err);
    return fsdp_ctl_agree(fsdp_world_ctl(root->world), mine, err);
}

void fsdp_state_mover_release(fsdp_state_mover *mover)
{
    fsdp_free(mover->buffer);
    fsdp_free(mover->pieces);
    *mover = (fsdp_state_mover){0};
}

fsdp_status fsdp_state_move_end(fsdp_state_mover *mover, fsdp_error *err)
{
    const fsdp_ordered_comm *ordered = mover->ordered;
    const fsdp_collective call = {
        .kind = FSDP_BROADCAST,
        .dtype = FSDP_U8,
        .in = mover->buffer,
        .out = mover->buffer,
        .count = (int64_t)mover->used,
        .root = ordered ? fsdp_ordered_comm_position(ordered, mover->owner) : 0,
        .unit = mover->unit};
    if (mover->piece_count == 0)
        return FSDP_OK;
    if (ordered)
        FSDP_TRY(fsdp_comm_run(ordered->comm, &call, err));
    for (size_t i = 0; i < mover->piece_count; i++)
        fsdp_state_copy_into(&mover->pieces[i].from, mover->pieces[i].to, mover->root->world->rank);
    mover->piece_count = mover->used = 0;
    return FSDP_OK;
}

/* The number of elements that fit into the buffer, which is sent first if it is too full. */
static fsdp_status make_room(fsdp_state_mover *mover, const fsdp_entry *entry, int owner,
                             int64_t *count_out, fsdp_error *err)
{
    size_t element = fsdp_dtype_size(entry->dtype);
    if (mover->owner != owner || mover->piece_count == PIECES ||
        mover->room - mover->used < element)
        FSDP_TRY(fsdp_state_move_end(mover, err));
    if (mover->piece_count == 0) {
        mover->owner = owner;
        mover->unit = entry->name;
    }
    *count_out = (int64_t)((mover->room - mover->used) / element);
    return FSDP_OK;
}

fsdp_status fsdp_state_move(fsdp_state_mover *mover, int owner, const fsdp_box *box,
                            const void *data, const fsdp_entry *to, fsdp_error *err)
{
    size_t element = fsdp_dtype_size(to->dtype);
    int64_t total = fsdp_box_count(box), room;
    for (int64_t first = 0; first < total;) {
        FSDP_TRY(make_room(mover, to, owner, &room, err));
        int64_t count = total - first < room ? total - first : room;
        char *at = mover->buffer + mover->used;
        size_t bytes = (size_t)count * element, end = mover->used + bytes;
        mover->pieces[mover->piece_count++] =
            (struct fsdp_state_piece){{*box, first, count, at}, to};
        if (owner == mover->root->world->rank)
            memcpy(at, (const char *)data + (size_t)first * element, bytes);
        mover->used = (end + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        mover->used = mover->used < mover->room ? mover->used : mover->room;
        first += count;
    }
    return FSDP_OK;
}
