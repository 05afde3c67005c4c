/* Small files: see train_file.h. */
#include "tools/train/train_file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static fsdp_status write_all(int fd, const char *path, const train_part *part, fsdp_error *err)
{
    const char *at = part->data;
    for (size_t left = part->size; left > 0;) {
        ssize_t n = write(fd, at, left);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return fsdp_fail_errno(err, errno, "cannot write '%s'", path);
        at += n;
        left -= (size_t)n;
    }
    return FSDP_OK;
}

/* Writes to `to`; messages name the path. */
static fsdp_status write_parts(const char *to, const char *path, const train_part *parts,
                               size_t count, fsdp_error *err)
{
    fsdp_status st = FSDP_OK;
    int fd = open(to, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0)
        return fsdp_fail_errno(err, errno, "cannot create '%s'", path);
    for (size_t i = 0; i < count && st == FSDP_OK; i++)
        st = write_all(fd, path, &parts[i], err);
    if (close(fd) != 0 && st == FSDP_OK)
        st = fsdp_fail_errno(err, errno, "cannot write '%s'", path);
    return st;
}

fsdp_status train_file_write(const char *path, const train_part *parts, size_t count,
                             fsdp_error *err)
{
    struct stat info;
    char target[PATH_MAX], beside[PATH_MAX];
    if (stat(path, &info) == 0 && !S_ISREG(info.st_mode)) /* a device or pipe is never replaced */
        return write_parts(path, path, parts, count, err);
    if (!realpath(path, target)) /* a link's target is replaced, not the link */
        snprintf(target, sizeof target, "%s", path);
    if (snprintf(beside, sizeof beside, "%s.tmp-%ld", target, (long)getpid()) >= (int)sizeof beside)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the path '%s' is too long", path);
    fsdp_status st = write_parts(beside, path, parts, count, err);
    if (st == FSDP_OK && rename(beside, target) != 0)
        st = fsdp_fail_errno(err, errno, "cannot create '%s'", path);
    if (st != FSDP_OK)
        unlink(beside);
    return st;
}

static fsdp_status read_all(int fd, const char *path, size_t most, fsdp_text *text, fsdp_error *err)
{
    char piece[1 << 14];
    size_t begin = text->size;
    for (;;) {
        ssize_t n = read(fd, piece, sizeof piece);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return fsdp_fail_errno(err, errno, "cannot read '%s'", path);
        if (n == 0)
            return text->failed
                       ? fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' does not fit in memory", path)
                       : FSDP_OK;
        if (text->size - begin + (size_t)n > most)
            return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' has more than %zu bytes", path, most);
        fsdp_text_add(text, piece, (size_t)n);
    }
}

fsdp_status train_file_read(const char *path, size_t most, fsdp_text *text, fsdp_error *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return fsdp_fail_errno(err, errno, "cannot open '%s'", path);
    fsdp_status st = read_all(fd, path, most, text, err);
    close(fd);
    return st;
}

fsdp_status train_file_remove_directory(const char *path, fsdp_error *err)
{
    const struct dirent *entry;
    DIR *directory = opendir(path);
    if (!directory)
        return fsdp_fail_errno(err, errno, "cannot open '%s'", path);
    while ((entry = readdir(directory)))
        if (entry->d_type != DT_DIR)
            (void)unlinkat(dirfd(directory), entry->d_name, 0); /* rmdir tells of files that stay */
    closedir(directory);
    return rmdir(path) == 0 ? FSDP_OK : fsdp_fail_errno(err, errno, "cannot remove '%s'", path);
}
