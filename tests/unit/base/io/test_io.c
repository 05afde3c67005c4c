/* Files as bytes: the posix back end and the helpers with their messages. */
#include "base/io/io.h"
#include "tests/support/disk/io_fault.h"
#include "base/core/mem.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

static char folder[64];

static void make_folder(void)
{
    strcpy(folder, "/tmp/fsdp-test-io-XXXXXX");
    cr_assert_not_null(mkdtemp(folder));
}

static void remove_folder(void)
{
    fsdp_error err = {0};
    cr_assert_eq(fsdp_io_remove_tree(NULL, folder, &err), FSDP_OK, "%s", err.text);
    cr_assert_not(fsdp_io_exists(NULL, folder));
}

TestSuite(io, .init = make_folder, .fini = remove_folder);

/* Valid until it has been called eight more times. */
static const char *in_folder(const char *name)
{
    static char paths[8][200];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static fsdp_file *must_open(const char *path, unsigned flags)
{
    fsdp_error err = {0};
    fsdp_file *file = NULL;
    cr_assert_eq(fsdp_io_open(NULL, path, flags, &file, &err), FSDP_OK, "%s", err.text);
    return file;
}

static void must_close(fsdp_file *file)
{
    cr_assert_eq(fsdp_io_close(&file, "file", NULL), FSDP_OK);
    cr_assert_null(file);
    cr_assert_eq(fsdp_io_close(&file, "file", NULL), FSDP_OK);
}

static void make_file(const char *path, const char *content)
{
    fsdp_file *file = must_open(path, FSDP_IO_CREATE);
    cr_assert_eq(fsdp_io_write(file, path, content, strlen(content), 0, NULL), FSDP_OK);
    must_close(file);
}

static void check_content(const char *path, const char *expected)
{
    fsdp_error err = {0};
    char *data = NULL;
    size_t size = 0;
    cr_assert_eq(fsdp_io_read_file(NULL, path, 1 << 20, &data, &size, &err), FSDP_OK, "%s",
                 err.text);
    cr_assert_eq(size, strlen(expected));
    cr_assert_str_eq(data, expected);
    fsdp_free(data);
}

static void check_open_fails(const char *path, unsigned flags, fsdp_status status,
                             const char *message)
{
    fsdp_error err = {0};
    fsdp_file *file = NULL;
    cr_assert_eq(fsdp_io_open(NULL, path, flags, &file, &err), status, "%s", err.text);
    cr_assert_null(file);
    cr_assert_not_null(strstr(err.text, path), "%s", err.text);
    cr_assert_not_null(strstr(err.text, message), "%s", err.text);
}

Test(io, what_is_written_is_read)
{
    const char *path = in_folder("a");
    fsdp_file *file = must_open(path, FSDP_IO_CREATE);
    char data[3000], back[3000];
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (char)(i * 7);
    cr_assert_eq(fsdp_io_write(file, path, data, sizeof data, 5000, NULL), FSDP_OK);
    fsdp_io_begin_sync(file, 5000, sizeof data);
    cr_assert_eq(fsdp_io_sync(file, path, NULL), FSDP_OK);
    int64_t size = 0;
    cr_assert_eq(file->ops->size(file, &size), 0);
    cr_assert_eq(size, 8000);
    cr_assert_eq(fsdp_io_read(file, path, back, 10, 4990, NULL), FSDP_OK);
    cr_assert_eq(memcmp(back, "\0\0\0\0\0\0\0\0\0\0", 10), 0);
    must_close(file);
    file = must_open(path, FSDP_IO_READ | FSDP_IO_BENEATH);
    cr_assert_eq(fsdp_io_read(file, path, back, sizeof back, 5000, NULL), FSDP_OK);
    cr_assert_eq(memcmp(back, data, sizeof data), 0);
    cr_assert_eq(file->ops->pwrite(file, data, 1, 0), -EBADF);
    must_close(file);
    file = must_open(path, FSDP_IO_WRITE);
    cr_assert_eq(file->ops->resize(file, 4), 0);
    must_close(file);
    fsdp_file_info info;
    cr_assert_eq(fsdp_io_posix()->ops->info(fsdp_io_posix(), path, &info), 0);
    cr_assert(info.kind == FSDP_FILE_REGULAR && info.size == 4 && info.mtime_ns > 0);
}

Test(io, a_short_file_is_damaged_and_the_message_says_where)
{
    const char *path = in_folder("short");
    make_file(path, "0123456789");
    fsdp_file *file = must_open(path, FSDP_IO_READ);
    fsdp_error err = {0};
    char data[20];
    cr_assert_eq(fsdp_io_read(file, path, data, 20, 4, &err), FSDP_ERR_DAMAGED);
    char expected[300];
    snprintf(expected, sizeof expected, "'%s' ends at byte 10; expected 20 bytes at byte 4", path);
    cr_assert_str_eq(err.text, expected);
    must_close(file);
}

Test(io, creation_is_exclusive_and_follows_no_link)
{
    make_file(in_folder("there"), "x");
    check_open_fails(in_folder("there"), FSDP_IO_CREATE, FSDP_ERR_EXISTS, "cannot create");
    cr_assert_eq(symlink("nowhere", in_folder("link")), 0);
    check_open_fails(in_folder("link"), FSDP_IO_CREATE, FSDP_ERR_EXISTS, "cannot create");
    cr_assert_not(fsdp_io_exists(NULL, in_folder("nowhere")));
    check_content(in_folder("there"), "x");
}

Test(io, a_link_is_followed_unless_the_path_must_stay_beneath)
{
    make_file(in_folder("target"), "data");
    cr_assert_eq(symlink("target", in_folder("link")), 0);
    fsdp_file *file;
    fsdp_error err = {0};
    char data[4], *whole;
    size_t size;
    cr_assert_eq(fsdp_io_open(NULL, in_folder("link"), FSDP_IO_READ, &file, &err), FSDP_OK, "%s",
                 err.text);
    cr_assert_eq(fsdp_io_read(file, "link", data, sizeof data, 0, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(memcmp(data, "data", sizeof data), 0);
    cr_assert_eq(fsdp_io_close(&file, "link", &err), FSDP_OK);
    check_open_fails(in_folder("link"), FSDP_IO_READ | FSDP_IO_BENEATH, FSDP_ERR_REFUSED,
                     "symbolic link");
    cr_assert_eq(fsdp_io_read_file(NULL, in_folder("link"), 10, &whole, &size, &err),
                 FSDP_ERR_REFUSED);
}

Test(io, what_is_not_a_regular_file_is_refused_without_waiting)
{
    cr_assert_eq(mkfifo(in_folder("fifo"), 0600), 0);
    check_open_fails(in_folder("fifo"), FSDP_IO_READ, FSDP_ERR_REFUSED, "not a regular file");
    check_open_fails(in_folder("fifo"), FSDP_IO_WRITE, FSDP_ERR_REFUSED, "not a regular file");
    check_open_fails("/dev/null", FSDP_IO_READ, FSDP_ERR_REFUSED, "not a regular file");
    check_open_fails(folder, FSDP_IO_READ, FSDP_ERR_NOT_FOUND, "is a directory");
    check_open_fails(folder, FSDP_IO_WRITE, FSDP_ERR_NOT_FOUND, "is a directory");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", in_folder("socket"));
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    cr_assert_eq(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    close(fd);
    check_open_fails(in_folder("socket"), FSDP_IO_READ, FSDP_ERR_REFUSED, "not a regular file");
}

Test(io, missing_files_are_not_found)
{
    make_file(in_folder("file"), "");
    check_open_fails(in_folder("none"), FSDP_IO_READ, FSDP_ERR_NOT_FOUND, "cannot open");
    check_open_fails(in_folder("file/below"), FSDP_IO_READ, FSDP_ERR_NOT_FOUND, "cannot open");
    cr_assert_not(fsdp_io_exists(NULL, in_folder("none")));
    cr_assert(fsdp_io_exists(NULL, folder));
}

Test(io, descriptors_do_not_survive_exec)
{
    make_file(in_folder("file"), "");
    int next = dup(0);
    close(next);
    fsdp_file *file = must_open(in_folder("file"), FSDP_IO_READ);
    cr_assert_eq(fcntl(next, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    must_close(file);
    cr_assert_eq(fcntl(next, F_GETFD), -1);
}

Test(io, reserving_lengthens_with_zeros_and_never_shortens)
{
    const char *path = in_folder("file");
    make_file(path, "abc");
    fsdp_file *file = must_open(path, FSDP_IO_WRITE);
    int64_t size = 0;
    char data[8];
    cr_assert_eq(fsdp_io_reserve(file, path, 8, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_reserve(file, path, 2, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_reserve(file, path, 0, NULL), FSDP_OK);
    cr_assert_eq(file->ops->size(file, &size), 0);
    cr_assert_eq(size, 8);
    cr_assert_eq(fsdp_io_read(file, path, data, 8, 0, NULL), FSDP_OK);
    cr_assert_eq(memcmp(data, "abc\0\0\0\0", 8), 0);
    must_close(file);
}

Test(io, reserving_resizes_where_the_file_system_cannot_allocate)
{
    fsdp_io *io = NULL;
    fsdp_fault_plan plan = {0};
    cr_assert_eq(fsdp_fault_plan_parse("allocate:1:EOPNOTSUPP:forever", &plan, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_fault_create(NULL, &plan, &io, NULL), FSDP_OK);
    fsdp_file *file = NULL;
    int64_t size = 0;
    cr_assert_eq(fsdp_io_open(io, in_folder("a"), FSDP_IO_CREATE, &file, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_reserve(file, "a", 100, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_reserve(file, "a", 50, NULL), FSDP_OK);
    cr_assert_eq(file->ops->size(file, &size), 0);
    cr_assert_eq(size, 100);
    must_close(file);
    fsdp_io_fault_free(io);
}

Test(io, a_lock_excludes_others_until_it_is_closed)
{
    make_file(in_folder("lock"), "");
    fsdp_file *a = must_open(in_folder("lock"), FSDP_IO_WRITE);
    fsdp_file *b = must_open(in_folder("lock"), FSDP_IO_WRITE);
    cr_assert_eq(a->ops->lock(a), 0);
    cr_assert_eq(b->ops->lock(b), -EWOULDBLOCK);
    must_close(a);
    cr_assert_eq(b->ops->lock(b), 0);
    must_close(b);
}

Test(io, rename_replaces_only_when_told)
{
    fsdp_error err = {0};
    const char *a = in_folder("a"), *b = in_folder("b");
    make_file(a, "a");
    make_file(b, "b");
    cr_assert_eq(fsdp_io_rename(NULL, a, b, false, &err), FSDP_ERR_EXISTS);
    cr_assert_not_null(strstr(err.text, "cannot rename"));
    check_content(a, "a");
    check_content(b, "b");
    cr_assert_eq(fsdp_io_rename(NULL, a, b, true, &err), FSDP_OK);
    check_content(b, "a");
    cr_assert_not(fsdp_io_exists(NULL, a));
    cr_assert_eq(fsdp_io_rename(NULL, b, a, false, &err), FSDP_OK);
    check_content(a, "a");
    cr_assert_eq(fsdp_io_mkdir(NULL, in_folder("d"), &err), FSDP_OK);
    cr_assert_eq(fsdp_io_mkdir(NULL, in_folder("d"), &err), FSDP_ERR_EXISTS);
    cr_assert_eq(fsdp_io_rename(NULL, in_folder("d"), in_folder("e"), false, &err), FSDP_OK);
    cr_assert_eq(fsdp_io_sync_dir(NULL, in_folder("e"), &err), FSDP_OK);
    cr_assert_eq(fsdp_io_sync_dir(NULL, in_folder("d"), &err), FSDP_ERR_IO);
}

static int count_names(void *user, const char *name)
{
    int *counts = user;
    counts[0]++;
    counts[1] += strcmp(name, "one") == 0 || strcmp(name, "two") == 0;
    return counts[0] == counts[2];
}

Test(io, listing_gives_each_name_and_stops_when_told)
{
    fsdp_io *io = fsdp_io_posix();
    make_file(in_folder("one"), "");
    make_file(in_folder("two"), "");
    int counts[3] = {0};
    cr_assert_eq(io->ops->list(io, folder, count_names, counts), 0);
    cr_assert(counts[0] == 2 && counts[1] == 2);
    int stopped[3] = {0, 0, 1};
    cr_assert_eq(io->ops->list(io, folder, count_names, stopped), 0);
    cr_assert_eq(stopped[0], 1);
    cr_assert_eq(io->ops->list(io, in_folder("none"), count_names, counts), -ENOENT);
    cr_assert_eq(io->ops->list(io, in_folder("one"), count_names, counts), -ENOTDIR);
}

Test(io, space_is_told)
{
    fsdp_space space = {.free_bytes = -1, .free_files = -1};
    cr_assert_eq(fsdp_io_posix()->ops->space(fsdp_io_posix(), folder, &space), 0);
    cr_assert(space.free_bytes > 0 && space.free_files > 0);
    cr_assert_eq(space.write_errno, 0);
    cr_assert_eq(fsdp_io_posix()->ops->space(fsdp_io_posix(), "/proc/1", &space), 0);
    cr_assert_neq(space.write_errno, 0);
}

Test(io, small_files_are_read_up_to_the_limit)
{
    fsdp_error err = {0};
    char *data = NULL;
    size_t size = 0;
    const char *path = in_folder("file");
    make_file(path, "0123456789");
    cr_assert_eq(fsdp_io_read_file(NULL, path, 10, &data, &size, &err), FSDP_OK);
    cr_assert_str_eq(data, "0123456789");
    fsdp_free(data);
    cr_assert_eq(fsdp_io_read_file(NULL, path, 9, &data, &size, &err), FSDP_ERR_LIMIT);
    cr_assert_null(data);
    cr_assert_not_null(strstr(err.text, "has 10 bytes, at most 9 are allowed"));
    make_file(in_folder("empty"), "");
    check_content(in_folder("empty"), "");
}

Test(io, replacing_a_file_survives_what_a_killed_writer_left)
{
    fsdp_error err = {0};
    const char *path = in_folder("latest");
    make_file(in_folder("latest.tmp"), "left behind, longer than the new one");
    cr_assert_eq(fsdp_io_replace_file(NULL, path, "one", 3, &err), FSDP_OK, "%s", err.text);
    check_content(path, "one");
    cr_assert_eq(fsdp_io_replace_file(NULL, path, "", 0, &err), FSDP_OK);
    check_content(path, "");
    cr_assert_not(fsdp_io_exists(NULL, in_folder("latest.tmp")));
}

Test(io, a_failed_replacement_leaves_the_old_file_and_no_other)
{
    const char *path = in_folder("file");
    make_file(path, "old");
    int failures = 0;
    for (int64_t at = 1;; at++) {
        fsdp_fault_plan plan = {.at = at, .action = FSDP_FAULT_ERRNO, .errnum = ENOSPC};
        fsdp_io *io = NULL;
        fsdp_error err = {0};
        cr_assert_eq(fsdp_io_fault_create(NULL, &plan, &io, NULL), FSDP_OK);
        fsdp_status status = fsdp_io_replace_file(io, path, "new", 3, &err);
        fsdp_io_fault_free(io);
        cr_assert_not(fsdp_io_exists(NULL, in_folder("file.tmp")));
        if (status == FSDP_OK)
            break;
        failures++;
        check_content(path, "old");
        cr_assert_not_null(strstr(err.text, ": No space left on device"), "%s", err.text);
    }
    cr_assert_eq(failures, 5); /* create, write, sync, close, rename */
    check_content(path, "new");
}

Test(io, errors_carry_errno_path_and_place)
{
    fsdp_fault_plan plan = {0};
    fsdp_io *io = NULL;
    fsdp_error err = {0};
    fsdp_file *file = NULL;
    const char *path = in_folder("file");
    cr_assert_eq(fsdp_fault_plan_parse("pwrite:1:ENOSPC", &plan, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_fault_create(NULL, &plan, &io, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_open(io, path, FSDP_IO_CREATE, &file, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_write(file, path, "x", 1, 12345, &err), FSDP_ERR_NO_SPACE);
    char expected[300];
    snprintf(expected, sizeof expected, "cannot write '%s' at byte 12345: No space left on device",
             path);
    cr_assert_str_eq(err.text, expected);
    cr_assert_eq(err.errnum, ENOSPC);
    must_close(file);
    fsdp_io_fault_free(io);
}

static void expect_failed_sync(const char *fault, fsdp_status status, int errnum)
{
    fsdp_fault_plan plan = {0};
    fsdp_io *io = NULL;
    fsdp_error err = {0};
    fsdp_file *file = NULL;
    cr_assert_eq(fsdp_fault_plan_parse(fault, &plan, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_fault_create(NULL, &plan, &io, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_open(io, in_folder("a"), FSDP_IO_CREATE, &file, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_sync(file, "a", &err), status);
    cr_assert(err.status == status && err.errnum == errnum);
    cr_assert_eq(fsdp_io_fault_calls(io), 1, "a failed sync was tried again");
    must_close(file);
    fsdp_io_fault_free(io);
    cr_assert_eq(unlink(in_folder("a")), 0);
}

Test(io, a_failed_sync_is_an_io_error_or_a_full_disk)
{
    expect_failed_sync("sync:1:ENOSPC", FSDP_ERR_NO_SPACE, ENOSPC);
    expect_failed_sync("sync:1:EIO", FSDP_ERR_IO, EIO);
    expect_failed_sync("sync:1:EACCES", FSDP_ERR_IO, EACCES);
}

Test(io, short_transfers_are_continued)
{
    fsdp_fault_plan plan = {.at = 1, .forever = true, .action = FSDP_FAULT_SHORT, .part = 3};
    fsdp_io *io = NULL;
    fsdp_file *file = NULL;
    char back[10];
    cr_assert_eq(fsdp_io_fault_create(NULL, &plan, &io, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_open(io, in_folder("a"), FSDP_IO_CREATE, &file, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_write(file, "a", "0123456789", 10, 0, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_read(file, "a", back, 10, 0, NULL), FSDP_OK);
    cr_assert_eq(memcmp(back, "0123456789", 10), 0);
    cr_assert_eq(fsdp_io_fault_calls(io), 9); /* create, four writes, four reads */
    must_close(file);
    fsdp_io_fault_free(io);
}

Test(io, a_tree_is_removed_with_its_links_but_not_what_they_lead_to)
{
    fsdp_error err = {0};
    make_file(in_folder("kept"), "kept");
    mkdir(in_folder("outside"), 0777);
    make_file(in_folder("outside/kept"), "kept");
    mkdir(in_folder("tree"), 0777);
    mkdir(in_folder("tree/a"), 0777);
    mkdir(in_folder("tree/a/b"), 0777);
    make_file(in_folder("tree/a/file"), "x");
    cr_assert_eq(symlink("../kept", in_folder("tree/file")), 0);
    cr_assert_eq(symlink("../outside", in_folder("tree/dir")), 0);
    cr_assert_eq(fsdp_io_remove_tree(NULL, in_folder("tree"), &err), FSDP_OK, "%s", err.text);
    cr_assert_not(fsdp_io_exists(NULL, in_folder("tree")));
    cr_assert_eq(fsdp_io_remove_tree(NULL, in_folder("tree"), &err), FSDP_OK);
    check_content(in_folder("kept"), "kept");
    check_content(in_folder("outside/kept"), "kept");
}

/* Set: this folder gives way to a link to ../outside right before its first file is removed. */
static char folder_to_swap[500];

static void swap_for_link(const char *removed)
{
    char aside[600];
    size_t size = strlen(removed);
    if (folder_to_swap[0] == '\0' || size < 4 || strcmp(removed + size - 4, "file") != 0)
        return;
    snprintf(aside, sizeof aside, "%s-aside", folder_to_swap);
    cr_assert_eq(rename(folder_to_swap, aside), 0);
    cr_assert_eq(symlink("../outside", folder_to_swap), 0);
    folder_to_swap[0] = '\0';
}

/* Both ways to remove a file, in place of the C library's. */
int unlink(const char *path)
{
    swap_for_link(path);
    return (int)syscall(SYS_unlinkat, AT_FDCWD, path, 0);
}

int unlinkat(int dir, const char *path, int flags)
{
    swap_for_link(path);
    return (int)syscall(SYS_unlinkat, dir, path, flags);
}

Test(io, a_link_put_in_the_way_while_a_tree_is_removed_is_not_followed)
{
    mkdir(in_folder("outside"), 0777);
    make_file(in_folder("outside/file"), "kept");
    mkdir(in_folder("tree"), 0777);
    mkdir(in_folder("tree/a"), 0777);
    make_file(in_folder("tree/a/file"), "x");
    snprintf(folder_to_swap, sizeof folder_to_swap, "%s", in_folder("tree/a"));
    (void)!fsdp_io_remove_tree(NULL, in_folder("tree"), NULL);
    cr_assert_eq(folder_to_swap[0], '\0');
    check_content(in_folder("outside/file"), "kept");
    cr_assert_eq(fsdp_io_remove_tree(NULL, in_folder("tree"), NULL), FSDP_OK);
    check_content(in_folder("outside/file"), "kept");
}

static bool is_wanted(void *user, const char *name)
{
    return strcmp(name, user) != 0;
}

Test(io, names_are_listed_as_a_whole_and_only_those_that_are_wanted)
{
    fsdp_io_names names;
    fsdp_error err = {0};
    char unwanted[] = "b";
    mkdir(in_folder("dir"), 0777);
    make_file(in_folder("dir/a"), "x");
    make_file(in_folder("dir/b"), "x");
    cr_assert_eq(fsdp_io_list_names(NULL, in_folder("dir"), is_wanted, unwanted, &names, &err),
                 FSDP_OK);
    cr_assert_eq(names.count, 1);
    cr_assert_str_eq(names.items[0], "a");
    fsdp_io_names_release(&names);
    cr_assert_eq(fsdp_io_list_names(NULL, in_folder("none"), NULL, NULL, &names, &err),
                 FSDP_ERR_NOT_FOUND);
    cr_assert_eq(err.errnum, ENOENT);
    cr_assert_eq(names.count, 0);
}

static void make_deep(const char *top, int depth, bool remove)
{
    char path[2000];
    snprintf(path, sizeof path, "%s", top);
    for (int i = 0; i < depth; i++) {
        if (!remove)
            cr_assert_eq(mkdir(path, 0777), 0);
        if (i + 1 < depth)
            strcat(path, "/d");
    }
    while (remove && strlen(path) >= strlen(top)) {
        cr_assert_eq(rmdir(path), 0);
        path[strlen(path) - 2] = '\0';
    }
}

Test(io, the_depth_of_a_tree_that_is_removed_is_bounded)
{
    fsdp_error err = {0};
    make_deep(in_folder("deep"), 40, false);
    cr_assert_eq(fsdp_io_remove_tree(NULL, in_folder("deep"), &err), FSDP_ERR_REFUSED);
    cr_assert_not_null(strstr(err.text, "nested more than"));
    make_deep(in_folder("deep"), 40, true);
}

static void check_join(const char *dir, const char *name, const char *expected)
{
    char *path = fsdp_path_join(dir, name);
    cr_assert_str_eq(path, expected);
    fsdp_free(path);
}

Test(io, paths_are_joined_with_one_slash)
{
    check_join("a", "b", "a/b");
    check_join("a/", "b", "a/b");
    check_join("/", "b", "/b");
    check_join("", "b", "b");
}

Test(io, a_failed_allocation_leaves_no_descriptor_and_no_file)
{
    make_file(in_folder("file"), "x");
    int before = dup(0);
    close(before);
    fsdp_file *file = NULL;
    char *data = NULL;
    size_t size = 0;
    int failures = 0;
    for (int64_t n = 0;; n++) {
        fsdp_mem_fail_after(n, false);
        fsdp_status status = fsdp_io_read_file(NULL, in_folder("file"), 10, &data, &size, NULL);
        fsdp_mem_fail_after(-1, false);
        if (status == FSDP_OK)
            break;
        failures++;
        cr_assert_eq(status, FSDP_ERR_LIMIT);
    }
    fsdp_free(data);
    fsdp_mem_fail_after(0, false);
    fsdp_status status = fsdp_io_open(NULL, in_folder("new"), FSDP_IO_CREATE, &file, NULL);
    fsdp_mem_fail_after(-1, false);
    cr_assert_eq(status, FSDP_ERR_LIMIT);
    cr_assert_not(fsdp_io_exists(NULL, in_folder("new")));
    cr_assert_eq(failures, 2);
    int after = dup(0);
    close(after);
    cr_assert_eq(before, after);
}
