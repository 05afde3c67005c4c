/*
 * The plain file system: reads, writes and copies of the same bytes without the library. Rows are
 * measured against these, so the code stays simple.
 */
#include "tests/bench/rows.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

void bench_path(char *out, const char *dir, const char *name)
{
    snprintf(out, BENCH_PATH, "%s/%s", dir, name);
}

int64_t bench_file_size(const char *path)
{
    struct stat found;
    return stat(path, &found) == 0 ? found.st_size : -1;
}

/* --- trees ------------------------------------------------------------------------------------ */

typedef fsdp_status (*tree_visit)(const char *path, bool is_directory, fsdp_error *err);

fsdp_status bench_make_directory(fsdp_ctl *ctl, const char *place, char *dir_out, fsdp_error *err)
{
    fsdp_status st = FSDP_OK;
    bench_path(dir_out, place, "fsdp-bench-XXXXXX");
    if (fsdp_ctl_rank(ctl) == 0 && !mkdtemp(dir_out))
        st = fsdp_fail_errno(err, errno, "cannot create a directory in '%s'", place);
    FSDP_TRY(fsdp_ctl_agree(ctl, st, err));
    return fsdp_ctl_broadcast(ctl, 0, dir_out, BENCH_PATH, err);
}

/* Children first. */
static fsdp_status visit_tree(const char *path, tree_visit visit, fsdp_error *err)
{
    DIR *dir = opendir(path);
    fsdp_status st = FSDP_OK;
    if (!dir)
        return errno == ENOTDIR ? visit(path, false, err)
                                : fsdp_fail_errno(err, errno, "cannot open '%s'", path);
    for (struct dirent *item; st == FSDP_OK && (item = readdir(dir)) != NULL;) {
        char child[BENCH_PATH];
        if (strcmp(item->d_name, ".") == 0 || strcmp(item->d_name, "..") == 0)
            continue;
        bench_path(child, path, item->d_name);
        st = visit_tree(child, visit, err);
    }
    closedir(dir);
    return st == FSDP_OK ? visit(path, true, err) : st;
}

static fsdp_status remove_one(const char *path, bool is_directory, fsdp_error *err)
{
    if ((is_directory ? rmdir(path) : unlink(path)) != 0)
        return fsdp_fail_errno(err, errno, "cannot remove '%s'", path);
    return FSDP_OK;
}

fsdp_status bench_remove(const char *path, fsdp_error *err)
{
    struct stat found;
    return lstat(path, &found) == 0 ? visit_tree(path, remove_one, err) : FSDP_OK;
}

static fsdp_status sync_one(const char *path, bool is_directory, fsdp_error *err)
{
    (void)is_directory;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    bool ok = file >= 0 && fsync(file) == 0;
    fsdp_status st = ok ? FSDP_OK : fsdp_fail_errno(err, errno, "cannot sync '%s'", path);
    if (file >= 0)
        close(file);
    return st;
}

fsdp_status bench_settle(const char *dir, fsdp_error *err)
{
    int file = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool ok = file >= 0 && syncfs(file) == 0;
    fsdp_status st = ok ? FSDP_OK : fsdp_fail_errno(err, errno, "cannot sync '%s'", dir);
    if (file >= 0)
        close(file);
    return st;
}

/* --- programs --------------------------------------------------------------------------------- */

_Noreturn static void become_program(char *const *argv, int output)
{
    dup2(output, STDOUT_FILENO);
    execvp(argv[0], argv);
    _exit(127);
}

static fsdp_status await_program(const char *name, pid_t child, int output, char *text, size_t room,
                                 fsdp_error *err)
{
    size_t size = 0;
    int code = 0;
    for (ssize_t n; size < room - 1 && (n = read(output, text + size, room - 1 - size)) > 0;)
        size += (size_t)n;
    text[size] = '\0';
    if (waitpid(child, &code, 0) != child || code != 0)
        return fsdp_fail(err, FSDP_ERR_IO, "'%s' failed", name);
    return FSDP_OK;
}

fsdp_status bench_run_program(char *const *argv, char *output, size_t room, fsdp_error *err)
{
    int ends[2];
    fflush(NULL);
    if (pipe(ends) != 0)
        return fsdp_fail_errno(err, errno, "cannot start '%s'", argv[0]);
    pid_t child = fork();
    if (child == 0)
        become_program(argv, ends[1]);
    close(ends[1]);
    fsdp_status st = child > 0 ? await_program(argv[0], child, ends[0], output, room, err)
                               : fsdp_fail_errno(err, errno, "cannot start '%s'", argv[0]);
    close(ends[0]);
    return st;
}

fsdp_status bench_copy_plain(const char *from, const char *to, fsdp_error *err)
{
    char none[2], *argv[] = {(char[]){"cp"}, (char[]){"-r"}, strdup(from), strdup(to), NULL};
    fsdp_status st = bench_run_program(argv, none, sizeof none, err);
    free(argv[2]);
    free(argv[3]);
    return st == FSDP_OK ? visit_tree(to, sync_one, err) : st;
}

/* --- the memory of a rank's tensors, piece by piece ------------------------------------------- */

static fsdp_status write_memory(const fsdp_sd *sd, int rank, int file, const char *path,
                                int64_t piece, fsdp_error *err)
{
    off_t offset = 0;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        int64_t size = entry->kind == FSDP_ENTRY_TENSOR ? fsdp_entry_local_bytes(entry, rank) : 0;
        for (int64_t at = 0; at < size;) {
            int64_t n = size - at < piece ? size - at : piece;
            ssize_t done = pwrite(file, (const char *)entry->data + at, (size_t)n, offset);
            if (done <= 0)
                return fsdp_fail_errno(err, errno, "cannot write '%s'", path);
            at += done;
            offset += done;
        }
    }
    return FSDP_OK;
}

fsdp_status bench_write_plain(const fsdp_sd *sd, int rank, const char *path, int64_t piece,
                              bool sync, fsdp_error *err)
{
    int file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file < 0)
        return fsdp_fail_errno(err, errno, "cannot create '%s'", path);
    fsdp_status st = write_memory(sd, rank, file, path, piece, err);
    if (st == FSDP_OK && sync && fsync(file) != 0)
        st = fsdp_fail_errno(err, errno, "cannot sync '%s'", path);
    if (close(file) != 0 && st == FSDP_OK)
        st = fsdp_fail_errno(err, errno, "cannot close '%s'", path);
    return st;
}

/* The position of a read in a sequence of files. */
typedef struct file_row {
    char *const *paths;
    int count, next;
    int file; /* -1: none open */
    off_t offset, size;
} file_row;

static fsdp_status open_next(file_row *row, fsdp_error *err)
{
    struct stat found;
    if (row->file >= 0)
        close(row->file);
    row->file = -1;
    if (row->next == row->count)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "the files are too short");
    const char *path = row->paths[row->next++];
    row->file = open(path, O_RDONLY | O_CLOEXEC);
    if (row->file < 0 || fstat(row->file, &found) != 0)
        return fsdp_fail_errno(err, errno, "cannot open '%s'", path);
    row->size = found.st_size;
    return FSDP_OK;
}

static fsdp_status skip_to(file_row *row, int64_t first, fsdp_error *err)
{
    for (;;) {
        FSDP_TRY(open_next(row, err));
        row->offset = first;
        if (first < row->size)
            return FSDP_OK;
        first -= row->size;
    }
}

static fsdp_status read_piece(file_row *row, char *data, int64_t size, fsdp_error *err)
{
    while (size > 0) {
        if (row->offset == row->size) {
            FSDP_TRY(open_next(row, err));
            row->offset = 0;
        }
        ssize_t n = pread(row->file, data, (size_t)size, row->offset);
        if (n <= 0)
            return fsdp_fail_errno(err, errno, "cannot read '%s'", row->paths[row->next - 1]);
        row->offset += n;
        data += n;
        size -= n;
    }
    return FSDP_OK;
}

static fsdp_status read_memory(const fsdp_sd *sd, int rank, file_row *row, int64_t piece,
                               fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        int64_t size = entry->kind == FSDP_ENTRY_TENSOR ? fsdp_entry_local_bytes(entry, rank) : 0;
        for (int64_t at = 0; at < size; at += piece)
            FSDP_TRY(read_piece(row, (char *)entry->data + at,
                                size - at < piece ? size - at : piece, err));
    }
    return FSDP_OK;
}

fsdp_status bench_read_plain(const fsdp_sd *sd, int rank, const bench_file_row *from, int64_t piece,
                             fsdp_error *err)
{
    file_row row = {.paths = from->paths, .count = from->count, .file = -1};
    fsdp_status st = skip_to(&row, from->first, err);
    if (st == FSDP_OK)
        st = read_memory(sd, rank, &row, piece, err);
    if (row.file >= 0)
        close(row.file);
    return st;
}
