/*
 * Parts of tensors on their way between boxes and ranks. A tensor goes piece by piece of its row-major
 * order through one buffer, however large it is.
 */
#include "runtime/root_internal.h"
#include "runtime/state_internal.h"

#include "kernels/kernels.h"

/* --- between boxes ---------------------------------------------------------------------------- */

static void copy_shared(const fsdp_box *from, const void *data, const fsdp_box *to, void *to_data,
                        size_t element)
{
    fsdp_box part;
    int64_t to_strides[FSDP_MAX_DIMS], from_strides[FSDP_MAX_DIMS];
    int64_t to_offset = 0, from_offset = 0, size = (int64_t)element;
    if (!fsdp_box_intersect(from, to, &part))
        return;
    fsdp_box_strides(to->ndim, to->len, to_strides);
    fsdp_box_strides(from->ndim, from->len, from_strides);
    for (int i = 0; i < part.ndim; i++) {
        to_strides[i] *= size;
        from_strides[i] *= size;
        to_offset += (part.lo[i] - to->lo[i]) * to_strides[i];
        from_offset += (part.lo[i] - from->lo[i]) * from_strides[i];
    }
    fsdp_kernels_get()->copy_box((char *)to_data + to_offset, to_strides,
                                 (const char *)data + from_offset, from_strides, part.ndim,
                                 part.len, element);
}

void fsdp_state_copy_range(const fsdp_box *from, int64_t first, int64_t count, const void *data,
                           const fsdp_box *to, void *to_data, size_t element)
{
    fsdp_box pieces[FSDP_BOX_PIECES];
    const char *at = data;
    int n = fsdp_box_cut(from, first, count, pieces);
    for (int i = 0; i < n; i++) {
        copy_shared(&pieces[i], at, to, to_data, element);
        at += (size_t)fsdp_box_count(&pieces[i]) * element;
    }
}

/* --- between ranks ---------------------------------------------------------------------------- */

enum { BUFFER_BYTES = 16 << 20 };

static fsdp_status prepare(fsdp_state_mover *mover, int64_t most, fsdp_error *err)
{
    fsdp_root *root = mover->root;
    mover->room = most < BUFFER_BYTES ? most : BUFFER_BYTES;
    mover->buffer = fsdp_alloc_pages((size_t)mover->room + 1);
    if (!mover->buffer)
        return fsdp_fail_memory(err, "moving the state of a root");
    if (root->world->size == 1)
        return FSDP_OK;
    mover->lane = fsdp_root_all_ranks(root);
    if (!mover->lane || mover->lane->size != root->world->size)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "whole state needs a mesh of all ranks (fsdp_world_connect)");
    return root->context->device->ops->sync(mover->lane->last, err);
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
    *mover = (fsdp_state_mover){0};
}

static int position_of(const fsdp_lane *lane, int rank)
{
    int i = 0;
    while (i < lane->size && lane->ranks[i] != rank)
        i++;
    return i;
}

fsdp_status fsdp_state_move(const fsdp_state_mover *mover, const fsdp_entry *entry, int owner,
                            const fsdp_box *from, const void *data, const fsdp_box *to,
                            void *to_data, fsdp_error *err)
{
    bool is_mine = owner == mover->root->world->rank;
    size_t element = fsdp_dtype_size(entry->dtype);
    int64_t total = fsdp_box_count(from), most = mover->room / (int64_t)element;
    for (int64_t first = 0; first < total; first += most) {
        int64_t count = total - first < most ? total - first : most;
        const void *piece = is_mine ? (const char *)data + (size_t)first * element : mover->buffer;
        const fsdp_collective call = {.kind = FSDP_BROADCAST,
                                      .dtype = entry->dtype,
                                      .in = piece,
                                      .out = mover->buffer,
                                      .count = count,
                                      .root = mover->lane ? position_of(mover->lane, owner) : 0,
                                      .unit = entry->name};
        if (mover->lane)
            FSDP_TRY(fsdp_comm_run(mover->lane->comm, &call, err));
        fsdp_state_copy_range(from, first, count, piece, to, to_data, element);
    }
    return FSDP_OK;
}
