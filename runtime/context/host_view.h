/*
 * The host's view of a device's memory, for work between steps: first values, state dicts.
 *
 * On a device with is_host the view is the device's memory: `at` returns what it is given, load and store do
 * nothing. On another each block of shards or of an optimizer's state has a copy in staging memory, made by
 * the first load and kept. Work between steps loads all copies, reads and writes them, and stores them.
 */
#ifndef FSDP_HOST_VIEW_H
#define FSDP_HOST_VIEW_H

#include "runtime/device/device.h"

typedef struct fsdp_viewed_block {
    unsigned char *data;       /* of the device */
    unsigned char *copy;       /* NULL: not loaded yet */
    size_t size;
    bool is_buffers;           /* of a model, whose forward may change them */
} fsdp_viewed_block;

/* Zero-initialise, but for the device. */
typedef struct fsdp_host_view {
    fsdp_device *device;
    fsdp_viewed_block *blocks; /* by address */
    size_t count, room;
} fsdp_host_view;

/* block: its copy is NULL. */
fsdp_status fsdp_host_view_add(fsdp_host_view *view, fsdp_viewed_block block, fsdp_error *err);
void fsdp_host_view_remove(fsdp_host_view *view, const void *data);    /* any address in it; or of no block */
void fsdp_host_view_release(fsdp_host_view *view);

/* The block that an address lies in, memory of a device that the host cannot read; else NULL. */
const fsdp_viewed_block *fsdp_host_view_find(const fsdp_host_view *view, const void *data);
/* The host's address of a byte in a block; other addresses, and NULL, stay as they are. */
void *fsdp_host_view_at(const fsdp_host_view *view, const void *data);

/* The next three give the stream copies of all blocks, or of buffers alone, and the host waits. A load waits
 * without blocks, too: work of the stream may use shards in the host's memory (fsdp_unit_opts.offload). */
fsdp_status fsdp_host_view_load(fsdp_host_view *view, fsdp_stream *stream, fsdp_error *err);
fsdp_status fsdp_host_view_load_buffers(fsdp_host_view *view, fsdp_stream *stream, fsdp_error *err);
fsdp_status fsdp_host_view_store(fsdp_host_view *view, fsdp_stream *stream, fsdp_error *err);
/* Gives the stream a copy of these bytes to the device, if they lie in the host's copy of a block. */
void fsdp_host_view_store_part(const fsdp_host_view *view, fsdp_stream *stream, const void *data,
                               size_t size);

#endif
