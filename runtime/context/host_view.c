/* The host's copies of blocks of a device. See host_view.h. */
#include "runtime/context/host_view.h"

#include <string.h>

#include "base/core/mem.h"

/* The number of blocks that begin at or before the address. */
static size_t blocks_before(const fsdp_host_view *view, const void *data)
{
    size_t low = 0, high = view->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if ((uintptr_t)view->blocks[middle].data <= (uintptr_t)data)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static fsdp_viewed_block *find(const fsdp_host_view *view, const void *data)
{
    size_t before = blocks_before(view, data);
    fsdp_viewed_block *block = before > 0 ? &view->blocks[before - 1] : NULL;
    return block && (uintptr_t)data - (uintptr_t)block->data < block->size ? block : NULL;
}

fsdp_status fsdp_host_view_add(fsdp_host_view *view, fsdp_viewed_block block, fsdp_error *err)
{
    if (view->device->ops->is_host || block.size == 0)
        return FSDP_OK;
    if (!fsdp_grow(&view->blocks, &view->room, view->count + 1, sizeof *view->blocks))
        return fsdp_fail_memory(err, "the list of a device's blocks");
    size_t at = blocks_before(view, block.data);
    memmove(view->blocks + at + 1, view->blocks + at, (view->count - at) * sizeof *view->blocks);
    view->blocks[at] = block;
    view->count++;
    return FSDP_OK;
}

static void drop_copy(const fsdp_host_view *view, const fsdp_viewed_block *block)
{
    if (block->copy)
        view->device->ops->dealloc_staging(view->device, block->copy, block->size);
}

void fsdp_host_view_remove(fsdp_host_view *view, const void *data)
{
    fsdp_viewed_block *block = find(view, data);
    if (!block)
        return;
    drop_copy(view, block);
    size_t behind = view->count - (size_t)(block + 1 - view->blocks);
    memmove(block, block + 1, behind * sizeof *block);
    view->count--;
}

void fsdp_host_view_release(fsdp_host_view *view)
{
    for (size_t i = 0; i < view->count; i++)
        drop_copy(view, &view->blocks[i]);
    fsdp_free(view->blocks);
    *view = (fsdp_host_view){.device = view->device};
}

const fsdp_viewed_block *fsdp_host_view_find(const fsdp_host_view *view, const void *data)
{
    return find(view, data);
}

void *fsdp_host_view_at(const fsdp_host_view *view, const void *data)
{
    const fsdp_viewed_block *block = find(view, data);
    if (!block || !block->copy)
        return (void *)data;
    return block->copy + ((uintptr_t)data - (uintptr_t)block->data);
}

static bool is_loaded(const fsdp_viewed_block *block, bool loads_all)
{
    return loads_all || block->is_buffers;
}

/* Before the first copy, so that memory to which a stream writes is not given back for want of more. */
static fsdp_status reserve_copies(const fsdp_host_view *view, bool loads_all, fsdp_error *err)
{
    for (size_t i = 0; i < view->count; i++) {
        fsdp_viewed_block *block = &view->blocks[i];
        if (is_loaded(block, loads_all) && !block->copy)
            block->copy = view->device->ops->alloc_staging(view->device, block->size);
        if (is_loaded(block, loads_all) && !block->copy)
            return fsdp_fail_memory(err, "the host's copy of parameters and optimizers");
    }
    return FSDP_OK;
}

static fsdp_status load(fsdp_host_view *view, bool loads_all, fsdp_stream *stream, fsdp_error *err)
{
    const fsdp_device_ops *ops = view->device->ops;
    FSDP_TRY(reserve_copies(view, loads_all, err));
    for (size_t i = 0; i < view->count; i++) {
        const fsdp_viewed_block *block = &view->blocks[i];
        if (is_loaded(block, loads_all))
            ops->kernels->copy(stream, block->copy, block->data, block->size);
    }
    return ops->is_host ? FSDP_OK : ops->sync(ops->record(stream), err);
}

fsdp_status fsdp_host_view_load(fsdp_host_view *view, fsdp_stream *stream, fsdp_error *err)
{
    return load(view, true, stream, err);
}

fsdp_status fsdp_host_view_load_buffers(fsdp_host_view *view, fsdp_stream *stream, fsdp_error *err)
{
    return load(view, false, stream, err);
}

fsdp_status fsdp_host_view_store(fsdp_host_view *view, fsdp_stream *stream, fsdp_error *err)
{
    const fsdp_device_ops *ops = view->device->ops;
    for (size_t i = 0; i < view->count; i++)
        if (view->blocks[i].copy)
            ops->kernels->copy(stream, view->blocks[i].data, view->blocks[i].copy,
                               view->blocks[i].size);
    return view->count > 0 ? ops->sync(ops->record(stream), err) : FSDP_OK;
}

void fsdp_host_view_store_part(const fsdp_host_view *view, fsdp_stream *stream, const void *data,
                               size_t size)
{
    for (size_t i = 0; i < view->count && size > 0; i++) {
        const fsdp_viewed_block *block = &view->blocks[i];
        uintptr_t at = (uintptr_t)data - (uintptr_t)block->copy;
        if (block->copy && at < block->size && size <= block->size - at)
            stream->device->ops->kernels->copy(stream, block->data + at, data, size);
    }
}
