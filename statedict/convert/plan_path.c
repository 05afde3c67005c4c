/* Writes a plan into a file, whole or not at all: see plan_text.h. */
#include "statedict/convert/plan_text.h"

#include "base/core/mem.h"
#include "statedict/checkpoint/checkpoint_internal.h"
#include "statedict/commit/commit_internal.h"

#include <errno.h>
#include <string.h>

/* Only an earlier plan may be replaced; another file at the path is most likely a mistake. */
static fsdp_status check_place(fsdp_io *io, const char *path, fsdp_error *err)
{
    char start[sizeof FSDP_PLAN_START] = "";
    fsdp_error why = {0};
    fsdp_file *file = NULL;
    fsdp_status st = fsdp_io_open(io, path, FSDP_IO_READ | FSDP_IO_BENEATH, &file, &why);
    if (why.errnum == ENOENT)
        return FSDP_OK;
    bool is_other = why.errnum == EISDIR || why.errnum == EINVAL || why.errnum == ELOOP;
    if (st != FSDP_OK && !is_other) {
        if (err)
            *err = why;
        return st;
    }
    ssize_t n = file ? file->ops->pread(file, start, sizeof start - 1, 0) : 0;
    (void)fsdp_io_close(&file, path, NULL); /* only read */
    if (n < 0)
        return fsdp_fail_errno(err, (int)-n, "cannot read '%s'", path);
    if (n == sizeof start - 1 && memcmp(start, FSDP_PLAN_START, sizeof start - 1) == 0)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_EXISTS, "'%s' exists and is not a plan; it is not replaced",
                     path);
}

/* --- checking the path ------------------------------------------------------------------------ */

/* True when both paths name one file, which need not exist. */
static bool are_one_name(fsdp_io *io, const char *a, const char *b)
{
    char *left = NULL, *right = NULL, *left_parent = NULL, *right_parent = NULL;
    bool same = fsdp_path_split(a, &left, &left_parent, NULL) == FSDP_OK &&
                fsdp_path_split(b, &right, &right_parent, NULL) == FSDP_OK &&
                fsdp_paths_are_same(io, left_parent, right_parent) &&
                strcmp(strrchr(left, '/') ? strrchr(left, '/') + 1 : left,
                       strrchr(right, '/') ? strrchr(right, '/') + 1 : right) == 0;
    fsdp_free(left);
    fsdp_free(right);
    fsdp_free(left_parent);
    fsdp_free(right_parent);
    return same || fsdp_paths_are_same(io, a, b);
}

/* True when `dir` is the path itself or one of its parent directories. */
static bool lies_in(fsdp_io *io, const char *path, const char *dir)
{
    char *at = fsdp_strndup(path, strlen(path));
    bool is_in = at && are_one_name(io, at, dir);
    while (at && !is_in) {
        char *slash = strrchr(at, '/');
        if (!slash || slash == at)
            break;
        *slash = '\0';
        is_in = are_one_name(io, at, dir);
    }
    fsdp_free(at);
    return is_in;
}

static fsdp_status check_apart(const fsdp_checkpoint *from, const char *to, const char *path,
                               fsdp_error *err)
{
    if (lies_in(from->io, path, to))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "the plan '%s' would be at the path of the result '%s'; use another name",
                         path, to);
    bool is_source =
        fsdp_paths_are_same(from->io, path, from->path) || fsdp_checkpoint_reads(from, path);
    return is_source ? fsdp_fail(err, FSDP_ERR_USAGE,
                                 "the plan '%s' would replace the source; use another name", path)
                     : FSDP_OK;
}

fsdp_status fsdp_plan_check_path(const fsdp_checkpoint *from, const char *to, const char *path,
                                 fsdp_error *err)
{
    FSDP_TRY(check_apart(from, to, path, err));
    return check_place(from->io, path, err);
}
