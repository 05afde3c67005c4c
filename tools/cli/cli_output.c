/* Files that tools write: whole or not at all, and over nothing but files of their own kind. See cli.h. */
#include "tools/cli/cli.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* --- what may be replaced ------------------------------------------------------------------------ */

/* The descriptor that a path names, or -1. A shell has opened it, so that it is written as it is. */
static int descriptor_of(const char *path)
{
    static const char *const directories[] = {"/dev/fd/", "/proc/self/fd/"};
    if (strcmp(path, "/dev/stdout") == 0 || strcmp(path, "/dev/stderr") == 0)
        return strcmp(path, "/dev/stdout") == 0 ? STDOUT_FILENO : STDERR_FILENO;
    for (size_t i = 0; i < sizeof directories / sizeof *directories; i++) {
        const char *digits = path + strlen(directories[i]);
        size_t size = strncmp(path, directories[i], strlen(directories[i])) == 0
                          ? strspn(digits, "0123456789")
                          : 0;
        if (size > 0 && size < 5 && digits[size] == '\0')
            return atoi(digits);
    }
    return -1;
}

bool cli_is_stdout(const char *path)
{
    return descriptor_of(path) == STDOUT_FILENO;
}

static fsdp_status check_kind(const char *path, const cli_output_kind *kind, bool may_replace,
                              fsdp_error *err)
{
    char begin[CLI_OUTPUT_BEGIN];
    FILE *file = fopen(path, "re");
    if (!file)
        return fsdp_fail_errno(err, errno, "cannot open '%s'", path);
    size_t size = fread(begin, 1, sizeof begin, file);
    int errnum = ferror(file) ? errno : 0;
    fclose(file);
    if (errnum)
        return fsdp_fail_errno(err, errnum, "cannot read '%s'", path);
    if (kind->fits(begin, size))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_EXISTS, "'%s' is not %s%s", path, kind->name,
                     may_replace ? "; replace it with --overwrite" : " and is not replaced");
}

/* Nothing can be read at path. */
static fsdp_status check_link(const char *path, fsdp_error *err)
{
    struct stat info;
    if (lstat(path, &info) == 0 && S_ISLNK(info.st_mode))
        return fsdp_fail(err, FSDP_ERR_EXISTS,
                         "'%s' is a link to a file that does not exist; give the file's own path",
                         path);
    return FSDP_OK;
}

fsdp_status cli_check_output(const char *path, const cli_output_kind *kind, const bool *overwrite,
                             fsdp_error *err)
{
    struct stat info;
    if (descriptor_of(path) >= 0)
        return FSDP_OK;
    if (stat(path, &info) != 0)
        return errno == ENOENT ? check_link(path, err)
                               : fsdp_fail_errno(err, errno, "cannot write '%s'", path);
    if (S_ISDIR(info.st_mode))
        return fsdp_fail(err, FSDP_ERR_EXISTS, "'%s' is a directory", path);
    if (S_ISREG(info.st_mode) && !(overwrite && *overwrite))
        return check_kind(path, kind, overwrite != NULL, err);
    return FSDP_OK;
}

/* An empty file, as mktemp and a shell's > make them, holds nothing that could be lost. */
static bool is_picture(const char *begin, size_t size)
{
    const size_t wanted = sizeof CLI_PICTURE - 1;
    return size == 0 || (size >= wanted && memcmp(begin, CLI_PICTURE, wanted) == 0);
}

const cli_output_kind cli_picture = {"a picture of these tools", is_picture};

/* --- writing ------------------------------------------------------------------------------------- */

int cli_write_all(int fd, const void *data, size_t size)
{
    for (const char *at = data, *end = at + size; at < end;) {
        ssize_t n = write(fd, at, (size_t)(end - at));
        if (n >= 0)
            at += n;
        else if (errno != EINTR)
            return errno;
    }
    return 0;
}

/* Closes the file; messages name the output. */
static fsdp_status write_parts(int fd, const char *output, const cli_part *parts, size_t count,
                               fsdp_error *err)
{
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < count && st == FSDP_OK; i++) {
        const int errnum = cli_write_all(fd, parts[i].data, parts[i].size);
        if (errnum != 0)
            st = fsdp_fail_errno(err, errnum, "cannot write '%s'", output);
    }
    if (close(fd) != 0 && st == FSDP_OK)
        st = fsdp_fail_errno(err, errno, "cannot write '%s'", output);
    return st;
}

/* A new file next to the target, whatever lies there: nothing is followed or emptied. */
static fsdp_status create_beside(const char *target, const char *output, char beside[PATH_MAX],
                                 int *fd_out, fsdp_error *err)
{
    enum { ATTEMPTS = 100 };
    *fd_out = -1;
    errno = EEXIST;
    for (int i = 0; i < ATTEMPTS && *fd_out < 0 && errno == EEXIST; i++) {
        if (snprintf(beside, PATH_MAX, "%s.tmp-%ld.%d", target, (long)getpid(), i) >= PATH_MAX)
            return fsdp_fail(err, FSDP_ERR_USAGE, "the path '%s' is too long", output);
        *fd_out = open(beside, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    }
    return *fd_out >= 0 ? FSDP_OK : fsdp_fail_errno(err, errno, "cannot write '%s'", output);
}

/* A link's target is replaced, not the link. */
static fsdp_status find_target(const char *path, char target[PATH_MAX], fsdp_error *err)
{
    if (realpath(path, target))
        return FSDP_OK;
    FSDP_TRY(check_link(path, err));
    if (snprintf(target, PATH_MAX, "%s", path) >= PATH_MAX)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the path '%s' is too long", path);
    return FSDP_OK;
}

static fsdp_status write_as_it_is(const char *path, const cli_part *parts, size_t count,
                                  fsdp_error *err)
{
    int given = descriptor_of(path);
    int fd = given >= 0 ? fcntl(given, F_DUPFD_CLOEXEC, 0) : open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return fsdp_fail_errno(err, errno, "cannot write '%s'", path);
    return write_parts(fd, path, parts, count, err);
}

fsdp_status cli_write_output(const char *path, const cli_part *parts, size_t count, fsdp_error *err)
{
    struct stat info;
    char target[PATH_MAX], beside[PATH_MAX];
    int fd;
    bool is_open = descriptor_of(path) >= 0;
    /* a link may lead to the descriptor of a file without a name */
    if (is_open || (stat(path, &info) == 0 && (!S_ISREG(info.st_mode) || info.st_nlink == 0)))
        return write_as_it_is(path, parts, count, err);
    FSDP_TRY(find_target(path, target, err));
    FSDP_TRY(create_beside(target, path, beside, &fd, err));
    fsdp_status st = write_parts(fd, path, parts, count, err);
    if (st == FSDP_OK && rename(beside, target) != 0)
        st = fsdp_fail_errno(err, errno, "cannot write '%s'", path);
    if (st != FSDP_OK)
        unlink(beside);
    return st;
}

fsdp_status cli_write_picture(const char *path, const fsdp_text *text, fsdp_error *err)
{
    if (text->failed)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "cannot allocate memory for a picture");
    return cli_write_output(path, &(cli_part){text->data, text->size}, 1, err);
}
