/*
 * Files as bytes: every byte that the product reads or writes passes this table, libhdf5's included.
 *
 * The room base/io takes paths and bytes and returns bytes, counts and errors that name the path. Every layer
 * above may call it. Back ends: io_posix.c (the file system), and io_direct, io_dry, io_limit, io_memory,
 * io_note and io_reuse, which wrap or replace another one; tests add io_fault.c (fails, shortens or kills at
 * the n-th call) and io_sim.c (a disk in memory that loses, tears and reorders unsynced writes). Entries
 * return 0 or a count, or a negative errno; io.c writes the message.
 */
#ifndef FSDP_IO_H
#define FSDP_IO_H

#include "base/core/mem.h"

#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

typedef struct fsdp_io fsdp_io;
typedef struct fsdp_file fsdp_file;
typedef struct fsdp_host fsdp_host;    /* process.h; NULL: the calling process and the system's clock */

enum {
    FSDP_IO_READ = 1,          /* an existing regular file, read only */
    FSDP_IO_WRITE = 2,         /* an existing regular file, read and write */
    FSDP_IO_CREATE = 4,        /* a new file (exclusive, no symbolic link followed), read and write */
    FSDP_IO_MODE = 7,
    FSDP_IO_BENEATH = 8,       /* with READ, WRITE: the last path element must not be a symbolic link */
    FSDP_IO_DIRECT = 16        /* with READ: past the page cache, in whole blocks (io_direct.h); -EINVAL where
                                * the file system cannot */
};

typedef enum fsdp_file_kind { FSDP_FILE_REGULAR, FSDP_FILE_DIRECTORY, FSDP_FILE_OTHER } fsdp_file_kind;

typedef struct fsdp_file_info {
    fsdp_file_kind kind;       /* of what the path leads to, symbolic links followed */
    int64_t size;
    int64_t mtime_ns;
    uint64_t device, node;     /* equal for two paths that lead to the same file */
    bool is_own;               /* owned by this process's effective user, and not writable by everybody */
} fsdp_file_info;

typedef struct fsdp_space {
    int64_t free_bytes;
    int64_t free_files;        /* INT64_MAX where the file system does not count them */
    int write_errno;           /* why this process may not create names in the directory; 0: it may */
    bool in_memory;            /* tmpfs, ramfs: nothing there survives a restart */
} fsdp_space;

typedef struct fsdp_io_ops {
    const char *name;
    int (*open)(fsdp_io *io, const char *path, unsigned flags, fsdp_file **file_out);
    /* May transfer less than asked; 0 from pread means end of file. */
    ssize_t (*pread)(fsdp_file *file, void *data, size_t size, int64_t offset);
    ssize_t (*pwrite)(fsdp_file *file, const void *data, size_t size, int64_t offset);
    int (*size)(fsdp_file *file, int64_t *size_out);
    int (*resize)(fsdp_file *file, int64_t size);
    /* Reserves space for bytes [0, size) and makes the file at least that long; unwritten bytes
     * read as zeros. -EOPNOTSUPP where the file system cannot: the caller resizes instead. */
    int (*allocate)(fsdp_file *file, int64_t size);
    int (*sync)(fsdp_file *file);
    /* A hint: begins to write these bytes to the disk, so that sync has less to wait for. May be
     * NULL. sync reports its failures. */
    void (*begin_sync)(fsdp_file *file, int64_t offset, int64_t size);
    /* Waits until these bytes are written, as far as the file system does that for a part: sync then
     * waits for little. May be NULL. sync reports its failures. */
    void (*await_sync)(fsdp_file *file, int64_t offset, int64_t size);
    /* Frees file in any case; a negative errno means that data may be lost. */
    int (*close)(fsdp_file *file);
    /* Exclusive advisory lock until close, without waiting: -EWOULDBLOCK when another has it. */
    int (*lock)(fsdp_file *file);
    /* replace false: -EEXIST when `to` exists; -EINVAL where the file system cannot promise that. */
    int (*rename)(fsdp_io *io, const char *from, const char *to, bool replace);
    /* Exchanges two files or directories in one step. -EINVAL where the file system cannot. */
    int (*exchange)(fsdp_io *io, const char *a, const char *b);
    int (*unlink)(fsdp_io *io, const char *path);
    int (*mkdir)(fsdp_io *io, const char *path);
    int (*rmdir)(fsdp_io *io, const char *path);
    int (*sync_dir)(fsdp_io *io, const char *path);
    /* Names in no order, without "." and "..". visit returns non-zero to stop. */
    int (*list)(fsdp_io *io, const char *path, int (*visit)(void *context, const char *name), void *context);
    int (*info)(fsdp_io *io, const char *path, fsdp_file_info *info_out);
    int (*space)(fsdp_io *io, const char *path, fsdp_space *space_out);
    /* Removes a tree and never follows a symbolic link, not even one that replaces a directory during the
     * removal. -ELOOP: nested too deep. NULL: fsdp_io_remove_tree does it path by path. */
    int (*remove_tree)(fsdp_io *io, const char *path);
} fsdp_io_ops;

/* Back ends put these first in their own structs. */
struct fsdp_io { const fsdp_io_ops *ops; unsigned trust; const fsdp_host *host; };
struct fsdp_file { const fsdp_io_ops *ops; };

/* The trust in files that are read: bits of fsdp_io.trust. A wrapper has the trust and the host of its
 * inner io. */
enum {
    FSDP_TRUST_LINKS = 1,      /* a symbolic link in a checkpoint's directory may lead anywhere */
    FSDP_TRUST_LIMITS = 2      /* resource limits alone confine a child that reads another program's file */
};

/* The file system itself. One object for the process, never freed. */
FSDP_API fsdp_io *fsdp_io_posix(void);
/* One object for each set of trust bits. */
fsdp_io *fsdp_io_posix_trusting(unsigned trust);

/* Flags to open a file in a checkpoint: READ | BENEATH, or READ with FSDP_TRUST_LINKS. */
unsigned fsdp_io_read_beneath(const fsdp_io *io);

/* FSDP_ERR_REFUSED when the path is a symbolic link, to a file or a directory, unless links are trusted.
 * Callers check each name that they find below the path that a person typed. */
fsdp_status fsdp_io_check_link(fsdp_io *io, const char *path, fsdp_error *err);

/* Helpers (io.c) that add loops, paths and messages to the table. io NULL means fsdp_io_posix(). */
fsdp_status fsdp_io_open(fsdp_io *io, const char *path, unsigned flags, fsdp_file **file_out,
                         fsdp_error *err);
/* Exactly size bytes; fewer is FSDP_ERR_DAMAGED "'PATH' ends at byte N, M were expected". */
fsdp_status fsdp_io_read(fsdp_file *file, const char *path, void *data, size_t size, int64_t offset,
                         fsdp_error *err);
fsdp_status fsdp_io_write(fsdp_file *file, const char *path, const void *data, size_t size,
                          int64_t offset, fsdp_error *err);
/* allocate, falling back to resize. */
fsdp_status fsdp_io_reserve(fsdp_file *file, const char *path, int64_t size, fsdp_error *err);
void fsdp_io_begin_sync(fsdp_file *file, int64_t offset, int64_t size);
void fsdp_io_await_sync(fsdp_file *file, int64_t offset, int64_t size);
fsdp_status fsdp_io_sync(fsdp_file *file, const char *path, fsdp_error *err);
/* Sets *file to NULL. Accepts a NULL *file. */
fsdp_status fsdp_io_close(fsdp_file **file, const char *path, fsdp_error *err);
fsdp_status fsdp_io_sync_dir(fsdp_io *io, const char *path, fsdp_error *err);
fsdp_status fsdp_io_rename(fsdp_io *io, const char *from, const char *to, bool replace, fsdp_error *err);
fsdp_status fsdp_io_mkdir(fsdp_io *io, const char *path, fsdp_error *err);
bool fsdp_io_exists(fsdp_io *io, const char *path);

/*
 * A small file as a whole. Reading is refused (FSDP_ERR_LIMIT) above max_size, and through a symbolic
 * link (FSDP_ERR_REFUSED), which could lead out of a checkpoint.
 * *data_out is freed with fsdp_free and has a zero byte after its end. Replacing is write-temporary
 * (PATH.tmp), fsync, rename; the directory is not synced.
 */
fsdp_status fsdp_io_read_file(fsdp_io *io, const char *path, size_t max_size, char **data_out,
                              size_t *size_out, fsdp_error *err);
fsdp_status fsdp_io_replace_file(fsdp_io *io, const char *path, const void *data, size_t size,
                                 fsdp_error *err);

/*
 * The names in a directory that `wanted` (NULL: all) accepts, in no order. Collected as a whole:
 * a listing while entries come and go may skip some. The error keeps the errno of the listing.
 */
typedef struct fsdp_io_names {
    char **items;
    size_t count, capacity;
    fsdp_arena arena;
} fsdp_io_names;
fsdp_status fsdp_io_list_names(fsdp_io *io, const char *path, bool (*wanted)(void *context, const char *name),
                               void *context, fsdp_io_names *names_out, fsdp_error *err);
void fsdp_io_names_release(fsdp_io_names *names);

/* Deletes a directory tree (files and folders only; links are unlinked, not followed). Idempotent. */
enum { FSDP_IO_TREE_DEPTH = 32 };
fsdp_status fsdp_io_remove_tree(fsdp_io *io, const char *path, fsdp_error *err);

/* "DIR/NAME" in fresh memory, NULL when there is none. */
char *fsdp_path_join(const char *dir, const char *name);

#endif
