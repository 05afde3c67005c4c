/*
 * Is the view the one that its checkpoint would get today? It is written once more, into memory, and
 * compared with the file, or put in its place. See view.h. Memory: the size of the view, some hundred
 * bytes per mapping.
 */
#include "statedict/view.h"

#include "base/io_memory.h"
#include "base/mem.h"

#include <string.h>

enum { PIECE_BYTES = 64 << 10 };

static fsdp_status compare_bytes(fsdp_file *file, const char *path, const fsdp_memory_io *expected,
                                 bool *same_out, fsdp_error *err)
{
    char piece[PIECE_BYTES];
    for (size_t at = 0; *same_out && at < expected->size;) {
        size_t n = expected->size - at < sizeof piece ? expected->size - at : sizeof piece;
        FSDP_TRY(fsdp_io_read(file, path, piece, n, (int64_t)at, err));
        *same_out = memcmp(piece, expected->data + at, n) == 0;
        at += n;
    }
    return FSDP_OK;
}

static fsdp_status compare_file(fsdp_io *io, const char *path, const fsdp_memory_io *expected,
                                bool *same_out, fsdp_error *err)
{
    fsdp_file *file = NULL;
    int64_t size = 0;
    FSDP_TRY(fsdp_io_open(io, path, FSDP_IO_READ | FSDP_IO_BENEATH, &file, err));
    int result = file->ops->size(file, &size);
    *same_out = result == 0 && size == (int64_t)expected->size;
    fsdp_status status = result < 0 ? fsdp_fail_errno(err, -result, "cannot look at '%s'", path)
                                    : compare_bytes(file, path, expected, same_out, err);
    (void)fsdp_io_close(&file, path, NULL); /* only read */
    return status;
}

fsdp_status fsdp_view_check(fsdp_io *io, const char *dir, const fsdp_manifest *manifest,
                            const int *owners, bool *same_out, fsdp_error *err)
{
    fsdp_memory_io expected;
    fsdp_memory_io_init(&expected);
    char *path = fsdp_path_join(dir, FSDP_VIEW_NAME);
    fsdp_status status = path ? FSDP_OK : fsdp_fail_memory(err, "a path");
    *same_out = false;
    if (status == FSDP_OK)
        status = fsdp_view_write(&expected.io, dir, manifest, owners, false, NULL, err);
    if (status == FSDP_OK)
        status = compare_file(io, path, &expected, same_out, err);
    fsdp_free(path);
    fsdp_memory_io_release(&expected);
    return status;
}

static fsdp_status replace_file(fsdp_io *io, const char *dir, const fsdp_memory_io *view,
                                fsdp_error *err)
{
    char *path = fsdp_path_join(dir, FSDP_VIEW_NAME);
    if (!path)
        return fsdp_fail_memory(err, "a path");
    fsdp_status status = fsdp_io_replace_file(io, path, view->data, view->size, err);
    fsdp_free(path);
    return status == FSDP_OK ? fsdp_io_sync_dir(io, dir, err) : status;
}

fsdp_status fsdp_view_replace(fsdp_io *io, const char *dir, const fsdp_manifest *manifest,
                              const int *owners, const fsdp_watch *watch, bool *written_out,
                              fsdp_error *err)
{
    fsdp_memory_io view;
    fsdp_memory_io_init(&view);
    *written_out = false;
    fsdp_status status = fsdp_view_write(&view.io, dir, manifest, owners, false, watch, err);
    if (status == FSDP_OK && view.size > 0) {
        status = replace_file(io, dir, &view, err);
        *written_out = status == FSDP_OK;
    }
    fsdp_memory_io_release(&view);
    return status;
}
