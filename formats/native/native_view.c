/*
 * index.h5: a view in which every tensor is one dataset. It is never authoritative: the library
 * does not read it. This file makes link names of tensor names; hdf5_view.c makes the virtual
 * datasets.
 */
#include "formats/hdf5/hdf5_file.h"
#include "formats/native/native_index.h"
#include "formats/hdf5/hdf5_link_name.h"

#include "base/core/mem.h"

#include <string.h>

struct fsdp_view {
    fsdp_io *io;
    char *path;
    fsdp_h5_view *h5;
};

fsdp_status fsdp_view_create(fsdp_io *io, const char *path, fsdp_view **view_out, fsdp_error *err)
{
    fsdp_view *view = fsdp_alloc(1, sizeof *view);
    if (!view)
        return fsdp_fail_memory(err, "a view");
    view->io = io;
    view->path = fsdp_strndup(path, strlen(path));
    fsdp_status st = view->path ? fsdp_h5_view_create(io, path, &view->h5, err)
                                : fsdp_fail_memory(err, "a path");
    if (st != FSDP_OK) {
        fsdp_view_discard(view);
        return st;
    }
    *view_out = view;
    return FSDP_OK;
}

static char *link_of(fsdp_arena *arena, const char *name, size_t size, unsigned part)
{
    char link[FSDP_NATIVE_LINK_ROOM];
    size_t length = fsdp_native_link(name, size, part, link);
    return fsdp_arena_strndup(arena, link, length);
}

fsdp_status fsdp_view_add(fsdp_view *view, const fsdp_shard_dataset *tensor,
                          const fsdp_view_source *sources, size_t count, fsdp_error *err)
{
    fsdp_arena arena = {0};
    fsdp_status st = FSDP_OK;
    char *link = link_of(&arena, tensor->name, tensor->name_size, 0);
    fsdp_h5_source *h5 = fsdp_arena_alloc(&arena, count, sizeof *h5);
    if (!link || !h5)
        st = fsdp_fail_memory(err, "a view");
    for (size_t i = 0; i < count && st == FSDP_OK; i++) {
        const fsdp_view_source *source = &sources[i];
        h5[i] =
            (fsdp_h5_source){.file = source->file,
                             .link = link_of(&arena, source->name, source->name_size, source->part),
                             .source_ndim = source->ndim,
                             .source_shape = source->shape,
                             .source_lo = source->lo,
                             .source_len = source->len,
                             .lo = source->box.lo,
                             .len = source->box.len};
        if (!h5[i].link)
            st = fsdp_fail_memory(err, "a view");
    }
    if (st == FSDP_OK)
        st = fsdp_h5_view_add(
            view->h5,
            &(fsdp_h5_dataset){
                .link = link, .dtype = tensor->dtype, .ndim = tensor->ndim, .shape = tensor->shape},
            h5, count, err);
    fsdp_arena_release(&arena);
    return st;
}

fsdp_status fsdp_view_alias(fsdp_view *view, const char *name, size_t name_size, const char *target,
                            size_t target_size, fsdp_error *err)
{
    char link[FSDP_NATIVE_LINK_ROOM], target_link[FSDP_NATIVE_LINK_ROOM];
    fsdp_native_link(name, name_size, 0, link);
    fsdp_native_link(target, target_size, 0, target_link);
    return fsdp_h5_view_link(view->h5, link, target_link, err);
}

static fsdp_status sync_path(fsdp_view *view, fsdp_error *err)
{
    fsdp_file *file = NULL;
    FSDP_TRY(fsdp_io_open(view->io, view->path, FSDP_IO_WRITE, &file, err));
    fsdp_status st = fsdp_io_sync(file, view->path, err);
    fsdp_status closed = fsdp_io_close(&file, view->path, st == FSDP_OK ? err : NULL);
    return st != FSDP_OK ? st : closed;
}

fsdp_status fsdp_view_finish(fsdp_view *view, bool sync, fsdp_error *err)
{
    int64_t size = 0;
    fsdp_status st = fsdp_h5_view_close(view->h5, &size, err);
    view->h5 = NULL;
    if (st == FSDP_OK && sync)
        st = sync_path(view, err);
    fsdp_view_discard(view);
    return st;
}

void fsdp_view_discard(fsdp_view *view)
{
    if (!view)
        return;
    fsdp_h5_view_discard(view->h5);
    fsdp_free(view->path);
    fsdp_free(view);
}
