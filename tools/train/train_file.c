/* Small files: see train_file.h. */
#include "tools/train/train_file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

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
            return text->failed ? fsdp_fail(err, FSDP_ERR_LIMIT,
                                            "cannot read '%s': it does not fit in memory", path)
                                : FSDP_OK;
        if (text->size - begin + (size_t)n > most)
            return fsdp_fail(err, FSDP_ERR_LIMIT, "cannot read '%s': it has more than %zu bytes",
                             path, most);
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
