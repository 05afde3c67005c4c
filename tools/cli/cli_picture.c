/* Pictures (SVG) that tools write: whole or not at all, and over nothing but other pictures. See cli.h. */
#include "tools/cli/cli.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static bool is_picture(const char *path)
{
    char begin[sizeof CLI_PICTURE - 1];
    FILE *file = fopen(path, "re");
    bool is_ours = file && fread(begin, 1, sizeof begin, file) == sizeof begin &&
                   memcmp(begin, CLI_PICTURE, sizeof begin) == 0;
    if (file)
        fclose(file);
    return is_ours;
}

fsdp_status cli_check_picture(const char *path, const bool *overwrite, fsdp_error *err)
{
    struct stat info;
    if (stat(path, &info) != 0)
        return errno == ENOENT ? FSDP_OK : fsdp_fail_errno(err, errno, "cannot write '%s'", path);
    if (S_ISDIR(info.st_mode))
        return fsdp_fail(err, FSDP_ERR_EXISTS, "'%s' is a directory", path);
    if (S_ISREG(info.st_mode) && !(overwrite && *overwrite) && !is_picture(path))
        return fsdp_fail(err, FSDP_ERR_EXISTS, "'%s' is no picture of these tools%s", path,
                         overwrite ? "; --overwrite replaces it" : ", and is not replaced");
    return FSDP_OK;
}

/* Writes to path; messages name the output. */
static fsdp_status write_file(const char *path, const char *output, const fsdp_text *text,
                              fsdp_error *err)
{
    FILE *file = fopen(path, "we");
    bool written =
        file && fwrite(text->data, 1, text->size, file) == text->size && fflush(file) == 0;
    int problem = errno; /* closing sets another */
    if (file && fclose(file) != 0 && written) {
        problem = errno;
        written = false;
    }
    return written ? FSDP_OK : fsdp_fail_errno(err, problem, "cannot write '%s'", output);
}

fsdp_status cli_write_picture(const char *path, const fsdp_text *text, fsdp_error *err)
{
    struct stat info;
    char target[PATH_MAX], temporary[PATH_MAX];
    if (text->failed)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    if (stat(path, &info) == 0 && !S_ISREG(info.st_mode))
        return write_file(path, path, text, err);
    if (!realpath(path, target)) /* a link's target is replaced, not the link */
        snprintf(target, sizeof target, "%s", path);
    if (snprintf(temporary, sizeof temporary, "%s.tmp-%ld", target, (long)getpid()) >=
        (int)sizeof temporary)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the path '%s' is too long", path);
    fsdp_status st = write_file(temporary, path, text, err);
    if (st == FSDP_OK && rename(temporary, target) != 0)
        st = fsdp_fail_errno(err, errno, "cannot write '%s'", path);
    if (st != FSDP_OK)
        unlink(temporary);
    return st;
}
