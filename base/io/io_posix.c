/*
 * The product's io back end: the file system through POSIX calls. Step 7 of a save and of a load.
 * Interrupted calls are repeated here; nothing above sees EINTR except from close.
 */
#include "base/io/io.h"

#include "base/core/mem.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { LARGEST_WRITE = 256 << 10 };

typedef struct posix_file {
    fsdp_file base;
    int fd;
} posix_file;

static int descriptor(fsdp_file *file)
{
    return ((posix_file *)file)->fd;
}

static int zero_or_errno(int result)
{
    return result < 0 ? -errno : 0;
}

static int open_flags(unsigned flags)
{
    /* O_NONBLOCK: opening a FIFO or a device in place of a file must not block */
    int common = O_CLOEXEC | O_NOCTTY | O_NONBLOCK | (flags & FSDP_IO_DIRECT ? O_DIRECT : 0);
    switch (flags & FSDP_IO_MODE) {
    case FSDP_IO_READ: return common | O_RDONLY | (flags & FSDP_IO_BENEATH ? O_NOFOLLOW : 0);
    case FSDP_IO_WRITE: return common | O_RDWR | (flags & FSDP_IO_BENEATH ? O_NOFOLLOW : 0);
    case FSDP_IO_CREATE: return common | O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW;
    default: return -1;
    }
}

static int require_regular(int fd)
{
    struct stat info;
    if (fstat(fd, &info) < 0)
        return -errno;
    if (S_ISDIR(info.st_mode))
        return -EISDIR;
    return S_ISREG(info.st_mode) ? 0 : -EINVAL;
}

static int open_descriptor(const char *path, int flags)
{
    int fd;
    do {
        fd = open(path, flags, 0666);
    } while (fd < 0 && errno == EINTR);
    if (fd < 0)
        return errno == ENXIO ? -EINVAL : -errno; /* ENXIO: a socket or a device without a driver */
    int result = require_regular(fd);
    if (result < 0) {
        close(fd);
        return result;
    }
    return fd;
}

static const fsdp_io_ops posix_ops;

static int posix_open(fsdp_io *io, const char *path, unsigned flags, fsdp_file **file_out)
{
    (void)io;
    int system_flags = open_flags(flags);
    if (system_flags < 0)
        return -EINVAL;
    posix_file *file = fsdp_alloc(1, sizeof *file);
    if (!file)
        return -ENOMEM;
    file->base.ops = &posix_ops;
    file->fd = open_descriptor(path, system_flags);
    if (file->fd < 0) {
        int result = file->fd;
        fsdp_free(file);
        return result;
    }
    *file_out = &file->base;
    return 0;
}

static ssize_t posix_pread(fsdp_file *file, void *data, size_t size, int64_t offset)
{
    ssize_t n;
    do {
        n = pread(descriptor(file), data, size, offset);
    } while (n < 0 && errno == EINTR);
    return n < 0 ? -errno : n;
}

static ssize_t write_piece(int fd, const char *data, size_t size, int64_t offset)
{
    ssize_t n;
    do {
        n = pwrite(fd, data, size, offset);
    } while (n < 0 && errno == EINTR);
    return n < 0 ? -errno : n;
}

/* Writes pieces that stay in a core's cache. Larger ones make the page cache look for contiguous memory: when
 * it is fragmented, a write of 2 MiB takes several times as long as eight of 256 KiB. */
static ssize_t posix_pwrite(fsdp_file *file, const void *data, size_t size, int64_t offset)
{
    size_t done = 0;
    while (done < size) {
        size_t piece = size - done < LARGEST_WRITE ? size - done : LARGEST_WRITE;
        ssize_t n =
            write_piece(descriptor(file), (const char *)data + done, piece, offset + (int64_t)done);
        if (n <= 0)
            return done > 0 ? (ssize_t)done : n;
        done += (size_t)n;
    }
    return (ssize_t)done;
}

static int posix_size(fsdp_file *file, int64_t *size_out)
{
    struct stat info;
    if (fstat(descriptor(file), &info) < 0)
        return -errno;
    *size_out = info.st_size;
    return 0;
}

static int posix_resize(fsdp_file *file, int64_t size)
{
    int result;
    do {
        result = ftruncate(descriptor(file), size);
    } while (result < 0 && errno == EINTR);
    return zero_or_errno(result);
}

static int posix_allocate(fsdp_file *file, int64_t size)
{
    if (size == 0)
        return 0;
    if (size < 0)
        return -EINVAL;
    int result;
    do {
        result = fallocate(descriptor(file), 0, 0, size);
    } while (result < 0 && errno == EINTR);
    if (result < 0 && (errno == EINVAL || errno == ENOSYS || errno == ENODEV))
        return -EOPNOTSUPP;
    return zero_or_errno(result);
}

static int sync_descriptor(int fd)
{
    int result;
    do {
        result = fsync(fd);
    } while (result < 0 && errno == EINTR);
    return zero_or_errno(result);
}

static void posix_begin_sync(fsdp_file *file, int64_t offset, int64_t size)
{
    (void)sync_file_range(descriptor(file), offset, size, SYNC_FILE_RANGE_WRITE);
}

static void posix_await_sync(fsdp_file *file, int64_t offset, int64_t size)
{
    (void)sync_file_range(descriptor(file), offset, size,
                          SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
                              SYNC_FILE_RANGE_WAIT_AFTER);
}

static int posix_sync(fsdp_file *file)
{
    return sync_descriptor(descriptor(file));
}

static int posix_close(fsdp_file *file)
{
    /* not repeated after EINTR: Linux has freed the descriptor, another thread may own it by now */
    int result = zero_or_errno(close(descriptor(file)));
    fsdp_free(file);
    return result;
}

static int posix_lock(fsdp_file *file)
{
    int result;
    do {
        result = flock(descriptor(file), LOCK_EX | LOCK_NB);
    } while (result < 0 && errno == EINTR);
    return zero_or_errno(result);
}

static int posix_rename(fsdp_io *io, const char *from, const char *to, bool replace)
{
    (void)io;
    if (replace)
        return zero_or_errno(rename(from, to));
    int result = zero_or_errno(renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE));
    return result == -ENOSYS ? -EINVAL : result;
}

static int posix_exchange(fsdp_io *io, const char *a, const char *b)
{
    (void)io;
    int result = zero_or_errno(renameat2(AT_FDCWD, a, AT_FDCWD, b, RENAME_EXCHANGE));
    return result == -ENOSYS ? -EINVAL : result;
}

static int posix_unlink(fsdp_io *io, const char *path)
{
    (void)io;
    return zero_or_errno(unlink(path));
}

static int posix_mkdir(fsdp_io *io, const char *path)
{
    (void)io;
    return zero_or_errno(mkdir(path, 0777));
}

static int posix_rmdir(fsdp_io *io, const char *path)
{
    (void)io;
    return zero_or_errno(rmdir(path));
}

static int posix_sync_dir(fsdp_io *io, const char *path)
{
    (void)io;
    int fd;
    do {
        fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    } while (fd < 0 && errno == EINTR);
    if (fd < 0)
        return -errno;
    int result = sync_descriptor(fd);
    close(fd);
    return result;
}

static int posix_list(fsdp_io *io, const char *path, int (*visit)(void *context, const char *name),
                      void *context)
{
    (void)io;
    DIR *dir = opendir(path);
    if (!dir)
        return -errno;
    int result = 0;
    for (;;) {
        errno = 0;
        struct dirent *entry = readdir(dir);
        if (!entry) {
            result = -errno;
            break;
        }
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        if (visit(context, entry->d_name) != 0)
            break;
    }
    closedir(dir);
    return result;
}

static int posix_info(fsdp_io *io, const char *path, fsdp_file_info *info_out)
{
    (void)io;
    struct stat info;
    if (stat(path, &info) < 0)
        return -errno;
    info_out->kind = S_ISREG(info.st_mode)   ? FSDP_FILE_REGULAR
                     : S_ISDIR(info.st_mode) ? FSDP_FILE_DIRECTORY
                                             : FSDP_FILE_OTHER;
    info_out->size = info.st_size;
    info_out->mtime_ns = (int64_t)info.st_mtim.tv_sec * 1000000000 + info.st_mtim.tv_nsec;
    info_out->device = info.st_dev;
    info_out->node = info.st_ino;
    info_out->is_own = info.st_uid == geteuid() && (info.st_mode & S_IWOTH) == 0;
    return 0;
}

static int64_t clamp_to_i64(__uint128_t value)
{
    return value > INT64_MAX ? INT64_MAX : (int64_t)value;
}

static bool is_in_memory(const char *path)
{
    struct statfs info;
    return statfs(path, &info) == 0 &&
           (info.f_type == TMPFS_MAGIC || info.f_type == (long)RAMFS_MAGIC);
}

static int posix_space(fsdp_io *io, const char *path, fsdp_space *space_out)
{
    (void)io;
    struct statvfs info;
    int result;
    do {
        result = statvfs(path, &info);
    } while (result < 0 && errno == EINTR);
    if (result < 0)
        return -errno;
    space_out->free_bytes = clamp_to_i64((__uint128_t)info.f_bavail * info.f_frsize);
    space_out->free_files = info.f_files == 0 ? INT64_MAX : clamp_to_i64(info.f_favail);
    bool writable = faccessat(AT_FDCWD, path, W_OK | X_OK, AT_EACCESS) == 0;
    space_out->write_errno = writable ? 0 : errno;
    space_out->in_memory = is_in_memory(path);
    return 0;
}

/* --- removing a tree -------------------------------------------------------------------------- */

static int remove_at(int parent, const char *name, int depth);

/* Tries to remove each entry of an open directory once; *removed_out is true when one was removed. */
static int remove_entries(DIR *dir, int depth, bool *removed_out)
{
    *removed_out = false;
    rewinddir(dir);
    for (;;) {
        errno = 0;
        struct dirent *entry = readdir(dir);
        if (!entry)
            return -errno;
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        int result = remove_at(dirfd(dir), entry->d_name, depth + 1);
        if (result < 0)
            return result;
        *removed_out = true;
    }
}

static int remove_directory_at(int parent, const char *name, int depth)
{
    if (unlinkat(parent, name, AT_REMOVEDIR) == 0) /* empty: also when no descriptor is left */
        return 0;
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (!dir) {
        int failed = errno;
        if (fd >= 0)
            close(fd);
        return failed == ENOENT ? 0 : failed == ELOOP ? -ENOTDIR : -failed;
    }
    bool removed;
    int result;
    do {
        /* some file systems skip entries of a listing while others vanish: then look again */
        result = remove_entries(dir, depth, &removed);
        if (result == 0)
            result = zero_or_errno(unlinkat(parent, name, AT_REMOVEDIR));
    } while (result == -ENOTEMPTY && removed);
    closedir(dir);
    return result == -ENOENT ? 0 : result;
}

/* Removes by names relative to open directories, so that no link can redirect the removal. */
static int remove_at(int parent, const char *name, int depth)
{
    if (unlinkat(parent, name, 0) == 0 || errno == ENOENT)
        return 0;
    if (errno != EISDIR)
        return -errno;
    return depth >= FSDP_IO_TREE_DEPTH ? -ELOOP : remove_directory_at(parent, name, depth);
}

static int posix_remove_tree(fsdp_io *io, const char *path)
{
    (void)io;
    return remove_at(AT_FDCWD, path, 0);
}

static const fsdp_io_ops posix_ops = {
    .name = "posix",
    .open = posix_open,
    .pread = posix_pread,
    .pwrite = posix_pwrite,
    .size = posix_size,
    .resize = posix_resize,
    .allocate = posix_allocate,
    .sync = posix_sync,
    .begin_sync = posix_begin_sync,
    .await_sync = posix_await_sync,
    .close = posix_close,
    .lock = posix_lock,
    .rename = posix_rename,
    .exchange = posix_exchange,
    .unlink = posix_unlink,
    .mkdir = posix_mkdir,
    .rmdir = posix_rmdir,
    .sync_dir = posix_sync_dir,
    .list = posix_list,
    .info = posix_info,
    .space = posix_space,
    .remove_tree = posix_remove_tree,
};

fsdp_io *fsdp_io_posix(void)
{
    return fsdp_io_posix_trusting(0);
}

fsdp_io *fsdp_io_posix_trusting(unsigned trust)
{
    enum { ALL = FSDP_TRUST_LINKS | FSDP_TRUST_LIMITS };
    static fsdp_io ios[ALL + 1] = {
        {&posix_ops, 0, NULL}, {&posix_ops, 1, NULL}, {&posix_ops, 2, NULL}, {&posix_ops, 3, NULL}};
    return &ios[trust & ALL];
}
