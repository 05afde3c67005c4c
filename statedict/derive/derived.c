/* Makes nodes of derived tensors, and reads boxes of them; stored tensors. See derived.h. */
#include "statedict/derive/derived.h"

#include "base/data/box_internal.h"
#include "statedict/sd/layout_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* --- reading -------------------------------------------------------------------------------------- */

fsdp_status fsdp_derived_read(const fsdp_derived *tensor, fsdp_reader *reader, const fsdp_box *box,
                              void *data, fsdp_error *err)
{
    return fsdp_box_count(box) == 0 ? FSDP_OK : tensor->ops->read(tensor, reader, box, data, err);
}

fsdp_status fsdp_derived_take(fsdp_reader *reader, void **buffer_out, fsdp_error *err)
{
    fsdp_read_buffers *buffers = &reader->buffers;
    if (buffers->used == FSDP_READ_BUFFERS)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "a derived tensor needs more than %d buffers",
                         FSDP_READ_BUFFERS);
    void **buffer = &buffers->data[buffers->used];
    if (!*buffer)
        *buffer = fsdp_alloc_pages(FSDP_DERIVED_PIECE);
    if (!*buffer)
        return fsdp_fail_memory(err, "a derived tensor");
    buffers->used++;
    *buffer_out = *buffer;
    return FSDP_OK;
}

void fsdp_derived_give(fsdp_reader *reader)
{
    reader->buffers.used--;
}

bool fsdp_derived_next(fsdp_derived_pieces *pieces, fsdp_box *piece_out)
{
    const fsdp_box *box = pieces->box;
    if (!fsdp_slabs_next(&pieces->slabs, box->ndim, box->len, pieces->most, piece_out))
        return false;
    for (int d = 0; d < box->ndim; d++)
        piece_out->lo[d] += box->lo[d];
    return true;
}

/* --- making --------------------------------------------------------------------------------------- */

const char *fsdp_derived_text(const fsdp_derived *tensor, char *out, size_t room)
{
    size_t at = (size_t)snprintf(out, room, "[");
    for (int d = 0; d < tensor->ndim && at < room; d++)
        at += (size_t)snprintf(out + at, room - at, "%s%" PRId64, d > 0 ? ", " : "",
                               tensor->shape[d]);
    if (at < room)
        snprintf(out + at, room - at, "]");
    return out;
}

static int levels_of(const fsdp_derived *tensor)
{
    int most = 0;
    for (size_t i = 0; i < tensor->part_count; i++)
        most = most > tensor->parts[i]->levels ? most : tensor->parts[i]->levels;
    return most + tensor->ops->buffers;
}

fsdp_status fsdp_derived_make(fsdp_arena *arena, const fsdp_derived *like, fsdp_derived **out,
                              fsdp_error *err)
{
    fsdp_derived *made = fsdp_arena_alloc(arena, 1, sizeof *made);
    int64_t *shape = fsdp_arena_alloc(arena, (size_t)like->ndim, sizeof *shape);
    const fsdp_derived **parts = fsdp_arena_alloc(arena, like->part_count, sizeof(void *));
    if (!made || !shape || !parts)
        return fsdp_fail_memory(err, "a derived tensor");
    FSDP_TRY(fsdp_shape_check(like->ndim, like->shape, fsdp_dtype_size(like->dtype), err));
    memcpy(shape, like->shape, (size_t)like->ndim * sizeof *shape);
    if (like->part_count > 0)
        memcpy(parts, like->parts, like->part_count * sizeof *parts);
    *made = *like;
    made->shape = shape;
    made->parts = parts;
    made->levels = levels_of(made);
    if (made->levels > FSDP_DERIVED_LEVELS)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "a tensor is derived in more than %d steps",
                         FSDP_DERIVED_LEVELS);
    *out = made;
    return FSDP_OK;
}

/* --- stored tensors ------------------------------------------------------------------------------- */

static fsdp_status read_stored(const fsdp_derived *tensor, fsdp_reader *reader, const fsdp_box *box,
                               void *data, fsdp_error *err)
{
    fsdp_read_target target = {.box = *box, .dtype = tensor->dtype, .data = data};
    fsdp_read_request request = {
        .entry = tensor->entry, .targets = &target, .count = 1, .reader = reader};
    return fsdp_checkpoint_get(tensor->checkpoint, &request, err);
}

static const fsdp_derived_ops stored_ops = {read_stored, 0};

fsdp_status fsdp_derive_stored(fsdp_arena *arena, fsdp_checkpoint *checkpoint, size_t entry,
                               const fsdp_derived **out, fsdp_error *err)
{
    const fsdp_sd *sd = checkpoint->manifest.sd;
    entry = fsdp_sd_tensor_of(sd, entry);
    const fsdp_entry *tensor = fsdp_sd_at(sd, entry);
    fsdp_derived like = {.ops = &stored_ops,
                         .dtype = tensor->dtype,
                         .ndim = tensor->ndim,
                         .shape = tensor->shape,
                         .checkpoint = checkpoint,
                         .entry = entry};
    fsdp_derived *made = NULL;
    FSDP_TRY(fsdp_derived_make(arena, &like, &made, err));
    *out = made;
    return FSDP_OK;
}
