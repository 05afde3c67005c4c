/* A plan becomes a file, whole or not at all: see plan_file.h. */
#include "statedict/plan_file.h"

#include "base/mem.h"
#include "statedict/commit_internal.h"

#include <errno.h>
#include <string.h>

/* A plan may be made again; whatever else has that name was not meant. */
static fsdp_status check_place(fsdp_io *io, const char *path, fsdp_error *err)
{
    char start[sizeof FSDP_PLAN_START] = "";
    fsdp_file *file = NULL;
    int result = io->ops->open(io, path, FSDP_IO_READ | FSDP_IO_BENEATH, &file);
    if (result == -ENOENT)
        return FSDP_OK;
    ssize_t n = result < 0 ? 0 : file->ops->pread(file, start, sizeof start - 1, 0);
    (void)fsdp_io_close(&file, path, NULL);
    if (n == sizeof start - 1 && memcmp(start, FSDP_PLAN_START, sizeof start - 1) == 0)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_EXISTS, "'%s' exists and is no plan: it is not replaced", path);
}

fsdp_status fsdp_checkpoint_convert_plan_write(const char *from, const char *to,
                                               const fsdp_convert_opts *opts, const char *path,
                                               fsdp_error *err)
{
    static const fsdp_convert_opts defaults = {0};
    fsdp_text text = {0};
    opts = opts ? opts : &defaults;
    fsdp_io *io = opts->io ? opts->io : fsdp_io_posix();
    FSDP_TRY(check_place(io, path, err));
    fsdp_status st = fsdp_convert_plan_text(from, to, opts, &text, err);
    if (st == FSDP_OK)
        st = fsdp_io_replace_file(io, path, text.data, text.size, err);
    fsdp_text_release(&text);
    return st;
}
