/*
 * The simulated disk: a file system like any other until the power is cut; then what was synced is
 * there, whole, and every weaker protocol than write, sync, rename, sync_dir loses something.
 */
#include "tests/support/disk/io_sim.h"

#include "tests/support/disk/io_fault.h"
#include "base/core/mem.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static fsdp_io *make_disk(int64_t capacity)
{
    fsdp_io *disk = NULL;
    cr_assert_eq(fsdp_sim_create(capacity, &disk, NULL), FSDP_OK);
    return disk;
}

static fsdp_file *open_file(fsdp_io *io, const char *path, unsigned flags)
{
    fsdp_error err = {0};
    fsdp_file *file = NULL;
    cr_assert_eq(fsdp_io_open(io, path, flags, &file, &err), FSDP_OK, "%s", err.text);
    return file;
}

static void close_file(fsdp_file *file)
{
    cr_assert_eq(file->ops->close(file), 0);
}

/* A file with that content, durable with its name. */
static void make_durable_file(fsdp_io *io, const char *path, const char *content)
{
    fsdp_file *file = open_file(io, path, FSDP_IO_CREATE);
    cr_assert_eq(fsdp_io_write(file, path, content, strlen(content), 0, NULL), FSDP_OK);
    fsdp_io_begin_sync(file, 0,
                       (int64_t)strlen(content)); /* a hint that this disk has no use for */
    cr_assert_eq(file->ops->sync(file), 0);
    close_file(file);
    cr_assert_eq(io->ops->sync_dir(io, "/"), 0);
}

static void cut_power(fsdp_io **disk, uint64_t seed)
{
    fsdp_io *after = fsdp_sim_crash(*disk, seed);
    cr_assert_not_null(after);
    fsdp_sim_free(*disk);
    *disk = after;
}

static bool has_content(fsdp_io *io, const char *path, const char *expected)
{
    char *data = NULL;
    size_t size = 0;
    if (fsdp_io_read_file(io, path, 1 << 20, &data, &size, NULL) != FSDP_OK)
        return false;
    bool same = size == strlen(expected) && memcmp(data, expected, size) == 0;
    fsdp_free(data);
    return same;
}

/* --- a file system like any other ------------------------------------------------------------- */

Test(io_sim, files_are_written_read_resized)
{
    fsdp_io *io = make_disk(0);
    fsdp_file *file = open_file(io, "/a", FSDP_IO_CREATE);
    char data[8];
    int64_t size = 0;
    cr_assert_eq(file->ops->pwrite(file, "1234", 4, 2), 4);
    cr_assert_eq(file->ops->pread(file, data, 8, 0), 6);
    cr_assert_eq(memcmp(data,
                        "\0\0"
                        "1234",
                        6),
                 0);
    cr_assert_eq(file->ops->pread(file, data, 8, 6), 0);
    cr_assert_eq(file->ops->resize(file, 3), 0);
    cr_assert_eq(file->ops->allocate(file, 5), 0);
    cr_assert_eq(file->ops->allocate(file, 2), 0);
    cr_assert_eq(file->ops->size(file, &size), 0);
    cr_assert_eq(size, 5);
    cr_assert_eq(file->ops->pread(file, data, 8, 0), 5);
    cr_assert_eq(memcmp(data,
                        "\0\0"
                        "1\0\0",
                        5),
                 0);
    cr_assert_eq(file->ops->pwrite(file, "x", 1, -1), -EINVAL);
    cr_assert_eq(file->ops->pwrite(file, "x", 1, INT64_MAX), -EFBIG);
    close_file(file);
    file = open_file(io, "a", FSDP_IO_READ);
    cr_assert_eq(file->ops->pwrite(file, "x", 1, 0), -EBADF);
    cr_assert_eq(file->ops->resize(file, 0), -EBADF);
    close_file(file);
    fsdp_sim_free(io);
    fsdp_sim_free(NULL);
}

Test(io_sim, paths_answer_like_those_of_posix)
{
    fsdp_io *io = make_disk(0);
    fsdp_file *file = NULL;
    fsdp_file_info info;
    char longer[300];
    memset(longer, 'n', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    make_durable_file(io, "/file", "x");
    cr_assert_eq(io->ops->mkdir(io, "/d"), 0);
    cr_assert_eq(io->ops->mkdir(io, "//d//./sub/"), 0);
    cr_assert_eq(io->ops->mkdir(io, "/d"), -EEXIST);
    cr_assert_eq(io->ops->mkdir(io, "/"), -EEXIST);
    cr_assert_eq(io->ops->mkdir(io, "/none/sub"), -ENOENT);
    cr_assert_eq(io->ops->mkdir(io, "/file/sub"), -ENOTDIR);
    cr_assert_eq(io->ops->mkdir(io, "/d/../d"), -EEXIST);
    cr_assert_eq(io->ops->mkdir(io, "/../e"), -EINVAL);
    cr_assert_eq(io->ops->mkdir(io, longer), -ENAMETOOLONG);
    cr_assert_eq(io->ops->mkdir(io, ""), -ENOENT);
    cr_assert_eq(io->ops->open(io, "/file", FSDP_IO_CREATE, &file), -EEXIST);
    cr_assert_eq(io->ops->open(io, "/none", FSDP_IO_READ, &file), -ENOENT);
    cr_assert_eq(io->ops->open(io, "/d", FSDP_IO_READ, &file), -EISDIR);
    cr_assert_eq(io->ops->open(io, "/d", FSDP_IO_WRITE, &file), -EISDIR);
    cr_assert_eq(io->ops->unlink(io, "/d"), -EISDIR);
    cr_assert_eq(io->ops->unlink(io, "/none"), -ENOENT);
    cr_assert_eq(io->ops->rmdir(io, "/file"), -ENOTDIR);
    cr_assert_eq(io->ops->rmdir(io, "/d"), -ENOTEMPTY);
    cr_assert_eq(io->ops->rmdir(io, "/"), -EBUSY);
    cr_assert_eq(io->ops->sync_dir(io, "/file"), -ENOTDIR);
    cr_assert(io->ops->info(io, "/d/sub", &info) == 0 && info.kind == FSDP_FILE_DIRECTORY);
    cr_assert(io->ops->info(io, "/file", &info) == 0 && info.kind == FSDP_FILE_REGULAR);
    cr_assert_eq(info.size, 1);
    cr_assert_eq(io->ops->info(io, "/file/x", &info), -ENOTDIR);
    cr_assert_eq(fsdp_io_remove_tree(io, "/d", NULL), FSDP_OK);
    cr_assert_not(fsdp_io_exists(io, "/d"));
    fsdp_sim_free(io);
}

Test(io_sim, renames_answer_like_those_of_posix)
{
    fsdp_io *io = make_disk(0);
    make_durable_file(io, "/a", "a");
    make_durable_file(io, "/b", "b");
    cr_assert_eq(io->ops->mkdir(io, "/d"), 0);
    cr_assert_eq(io->ops->mkdir(io, "/d/e"), 0);
    cr_assert_eq(io->ops->mkdir(io, "/f"), 0);
    cr_assert_eq(io->ops->rename(io, "/a", "/b", false), -EEXIST);
    cr_assert_eq(io->ops->rename(io, "/none", "/c", true), -ENOENT);
    cr_assert_eq(io->ops->rename(io, "/a", "/d", true), -EISDIR);
    cr_assert_eq(io->ops->rename(io, "/d", "/a", true), -ENOTDIR);
    cr_assert_eq(io->ops->rename(io, "/f", "/d", true), -ENOTEMPTY);
    cr_assert_eq(io->ops->rename(io, "/d", "/d/e/x", true), -EINVAL);
    cr_assert_eq(io->ops->rename(io, "/a", "/a", true), 0);
    cr_assert_eq(io->ops->rename(io, "/a", "/b", true), 0);
    cr_assert(has_content(io, "/b", "a") && !fsdp_io_exists(io, "/a"));
    cr_assert_eq(io->ops->rename(io, "/b", "/d/e/c", false), 0);
    cr_assert_eq(io->ops->rename(io, "/d", "/f", true), 0);
    cr_assert(has_content(io, "/f/e/c", "a") && !fsdp_io_exists(io, "/d"));
    fsdp_sim_free(io);
}

typedef struct seen_names {
    fsdp_io *io;
    fsdp_text text;
} seen_names;

static int see_name(void *user, const char *name)
{
    seen_names *seen = user;
    cr_assert(fsdp_io_exists(seen->io, name)); /* the disk may be used while it is listed */
    fsdp_text_addf(&seen->text, "%s ", name);
    return seen->text.size > 5;
}

Test(io_sim, directories_are_listed)
{
    fsdp_io *io = make_disk(0);
    make_durable_file(io, "/a", "");
    make_durable_file(io, "/b", "");
    seen_names seen = {.io = io};
    cr_assert_eq(io->ops->list(io, "/", see_name, &seen), 0);
    cr_assert_str_eq(seen.text.data, "a b ");
    make_durable_file(io, "/c", "");
    make_durable_file(io, "/d", "");
    cr_assert_eq(io->ops->list(io, "/", see_name, &seen), 0);
    cr_assert_str_eq(seen.text.data, "a b a ");
    cr_assert_eq(io->ops->list(io, "/none", see_name, &seen), -ENOENT);
    fsdp_text_release(&seen.text);
    fsdp_sim_free(io);
}

Test(io_sim, a_lock_excludes_others_until_it_is_closed)
{
    fsdp_io *io = make_disk(0);
    make_durable_file(io, "/lock", "");
    fsdp_file *a = open_file(io, "/lock", FSDP_IO_WRITE);
    fsdp_file *b = open_file(io, "/lock", FSDP_IO_WRITE);
    cr_assert(a->ops->lock(a) == 0 && a->ops->lock(a) == 0);
    cr_assert_eq(b->ops->lock(b), -EWOULDBLOCK);
    close_file(a);
    cr_assert_eq(b->ops->lock(b), 0);
    close_file(b);
    fsdp_sim_free(io);
}

static int64_t free_bytes(fsdp_io *io)
{
    fsdp_space space = {0};
    cr_assert_eq(io->ops->space(io, "/", &space), 0);
    return space.free_bytes;
}

Test(io_sim, a_full_disk_writes_short_and_then_nothing)
{
    fsdp_io *io = make_disk(1000);
    static const char data[1000];
    fsdp_file *file = open_file(io, "/a", FSDP_IO_CREATE);
    cr_assert_eq(file->ops->pwrite(file, data, 600, 0), 600);
    cr_assert_eq(free_bytes(io), 400);
    cr_assert_eq(file->ops->pwrite(file, data, 600, 600), 400);
    cr_assert_eq(file->ops->pwrite(file, data, 1, 1000), -ENOSPC);
    cr_assert_eq(file->ops->pwrite(file, data, 1000, 0), 1000);
    cr_assert_eq(file->ops->allocate(file, 1001), -ENOSPC);
    close_file(file);
    file = open_file(io, "/b", FSDP_IO_CREATE);
    cr_assert_eq(file->ops->pwrite(file, data, 1, 0), -ENOSPC);
    cr_assert_eq(file->ops->resize(file, 5000), 0);
    cr_assert_eq(io->ops->unlink(io, "/a"), 0);
    cr_assert_eq(free_bytes(io), 1000);
    cr_assert_eq(file->ops->allocate(file, 800), 0);
    cr_assert_eq(free_bytes(io), 200);
    cr_assert_eq(file->ops->pwrite(file, data, 300, 700), 300);
    cr_assert_eq(file->ops->pwrite(file, data, 300, 900), 100);
    close_file(file);
    fsdp_sim_free(io);
}

Test(io_sim, a_removed_file_stays_readable_while_it_is_open)
{
    fsdp_io *io = make_disk(10);
    make_durable_file(io, "/a", "1234");
    fsdp_file *file = open_file(io, "/a", FSDP_IO_READ);
    cr_assert_eq(io->ops->unlink(io, "/a"), 0);
    cr_assert_eq(io->ops->sync_dir(io, "/"), 0);
    char data[4];
    cr_assert_eq(file->ops->pread(file, data, 4, 0), 4);
    cr_assert_eq(free_bytes(io), 6);
    close_file(file);
    cr_assert_eq(free_bytes(io), 10);
    fsdp_sim_free(io);
}

Test(io_sim, a_dump_shows_what_is_not_durable)
{
    fsdp_io *io = make_disk(0);
    fsdp_text text = {0};
    make_durable_file(io, "/a", "1234");
    fsdp_file *file = open_file(io, "/a", FSDP_IO_WRITE);
    cr_assert_eq(file->ops->pwrite(file, "56", 2, 4), 2);
    close_file(file);
    cr_assert_eq(io->ops->mkdir(io, "/d"), 0);
    cr_assert_eq(fsdp_sim_unsynced(io), 2);
    fsdp_sim_dump(io, &text);
    cr_assert_str_eq(text.data, "a 6 bytes, 4 synced, 1 changes since\n"
                                "d/ (name not synced)\n"
                                "not synced: '' -> 'd'\n");
    fsdp_text_release(&text);
    fsdp_sim_free(io);
}

/* --- the power cut ---------------------------------------------------------------------------- */

enum { SEEDS = 300 };

Test(io_sim, the_same_seed_leaves_the_same_disk)
{
    fsdp_io *io = make_disk(0);
    fsdp_file *file = open_file(io, "/a", FSDP_IO_CREATE);
    for (int i = 0; i < 20; i++)
        cr_assert_eq(fsdp_io_write(file, "a", "some bytes", 10, i * 700, NULL), FSDP_OK);
    cr_assert_eq(io->ops->sync_dir(io, "/"), 0);
    int different = 0;
    for (uint64_t seed = 0; seed < 50; seed++) {
        fsdp_io *one = fsdp_sim_crash(io, seed), *two = fsdp_sim_crash(io, seed);
        fsdp_io *other = fsdp_sim_crash(io, seed + 1);
        char *data[3] = {NULL};
        size_t size[3] = {0};
        cr_assert_eq(fsdp_io_read_file(one, "a", 1 << 20, &data[0], &size[0], NULL), FSDP_OK);
        cr_assert_eq(fsdp_io_read_file(two, "a", 1 << 20, &data[1], &size[1], NULL), FSDP_OK);
        cr_assert_eq(fsdp_io_read_file(other, "a", 1 << 20, &data[2], &size[2], NULL), FSDP_OK);
        cr_assert(size[0] == size[1] && memcmp(data[0], data[1], size[0]) == 0);
        different += size[0] != size[2] || memcmp(data[0], data[2], size[0]) != 0;
        for (int i = 0; i < 3; i++)
            fsdp_free(data[i]);
        fsdp_sim_free(one);
        fsdp_sim_free(two);
        fsdp_sim_free(other);
    }
    cr_assert_gt(different, 10);
    close_file(file);
    fsdp_sim_free(io);
}

Test(io_sim, what_survives_is_durable)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        fsdp_io *io = make_disk(0);
        fsdp_file *file = open_file(io, "/a", FSDP_IO_CREATE);
        cr_assert_eq(fsdp_io_write(file, "a", "1234", 4, 0, NULL), FSDP_OK);
        close_file(file);
        cut_power(&io, seed);
        cr_assert_eq(fsdp_sim_unsynced(io), 0);
        bool there = fsdp_io_exists(io, "/a"), whole = has_content(io, "/a", "1234");
        for (uint64_t again = 0; again < 5; again++) {
            cut_power(&io, again);
            cr_assert_eq(fsdp_io_exists(io, "/a"), there);
            cr_assert_eq(has_content(io, "/a", "1234"), whole);
        }
        fsdp_sim_free(io);
    }
}

static void fill(char *data, size_t size, char with)
{
    memset(data, with, size);
}

/* Synced sectors hold '1'; three writes of '2', '3', '4' over parts of them are not synced. */
Test(io_sim, unsynced_writes_survive_in_any_combination_torn_at_sectors)
{
    enum { SECTOR = 512, SECTORS = 8 };
    char data[SECTOR * SECTORS];
    fsdp_io *io = make_disk(0);
    fsdp_file *file = open_file(io, "/a", FSDP_IO_CREATE);
    fill(data, sizeof data, '1');
    cr_assert_eq(fsdp_io_write(file, "a", data, sizeof data, 0, NULL), FSDP_OK);
    cr_assert_eq(file->ops->sync(file), 0);
    cr_assert_eq(io->ops->sync_dir(io, "/"), 0);
    for (int i = 0; i < 3; i++) {
        fill(data, sizeof data, (char)('2' + i));
        cr_assert_eq(fsdp_io_write(file, "a", data, SECTOR * 4, i * 2 * SECTOR, NULL), FSDP_OK);
    }
    int later_without_earlier = 0, torn = 0, all_old = 0, all_new = 0;
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        fsdp_io *after = fsdp_sim_crash(io, seed);
        fsdp_file *found = open_file(after, "/a", FSDP_IO_READ);
        cr_assert_eq(fsdp_io_read(found, "a", data, sizeof data, 0, NULL), FSDP_OK);
        char sectors[SECTORS + 1] = "";
        for (int i = 0; i < SECTORS; i++) {
            sectors[i] = data[i * SECTOR];
            for (int k = 1; k < SECTOR; k++)
                cr_assert_eq(data[i * SECTOR + k], sectors[i], "a sector is torn");
        }
        all_old += strcmp(sectors, "11111111") == 0;
        all_new += strcmp(sectors, "22334444") == 0;
        torn += sectors[0] != sectors[1];
        later_without_earlier += memcmp(sectors, "11", 2) == 0 && memcmp(sectors + 6, "44", 2) == 0;
        close_file(found);
        fsdp_sim_free(after);
    }
    cr_assert(all_old > 20 && all_new > 20 && torn > 10 && later_without_earlier > 5,
              "old %d, new %d, torn %d, later without earlier %d", all_old, all_new, torn,
              later_without_earlier);
    close_file(file);
    fsdp_sim_free(io);
}

Test(io_sim, an_unsynced_size_is_any_of_those_the_file_had)
{
    fsdp_io *io = make_disk(0);
    make_durable_file(io, "/a", "12345678");
    fsdp_file *file = open_file(io, "/a", FSDP_IO_WRITE);
    cr_assert_eq(file->ops->resize(file, 3), 0);
    cr_assert_eq(file->ops->resize(file, 6), 0);
    cr_assert_eq(file->ops->pwrite(file, "xyz", 3, 6), 3);
    int sizes[10] = {0};
    int without_bytes = 0;
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        fsdp_io *after = fsdp_sim_crash(io, seed);
        char *data = NULL;
        size_t size = 0;
        cr_assert_eq(fsdp_io_read_file(after, "/a", 100, &data, &size, NULL), FSDP_OK);
        cr_assert_lt(size, 10);
        sizes[size]++;
        cr_assert_eq(memcmp(data, "123", 3), 0);
        if (size == 6)
            cr_assert_eq(memcmp(data + 3, "\0\0\0", 3), 0, "bytes that were cut off came back");
        without_bytes += size == 9 && memcmp(data + 6, "\0\0\0", 3) == 0;
        fsdp_free(data);
        fsdp_sim_free(after);
    }
    cr_assert(sizes[8] > 0 && sizes[3] > 0 && sizes[6] > 0 && sizes[9] > 0);
    cr_assert_eq(sizes[8] + sizes[3] + sizes[6] + sizes[9], SEEDS);
    cr_assert_gt(without_bytes, 0);
    close_file(file);
    fsdp_sim_free(io);
}

Test(io_sim, a_rename_between_directories_leaves_exactly_one_name)
{
    int kept_old = 0, kept_new = 0;
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        fsdp_io *io = make_disk(0);
        make_durable_file(io, "/a", "x");
        cr_assert_eq(io->ops->mkdir(io, "/d"), 0);
        cr_assert_eq(io->ops->mkdir(io, "/d/e"), 0);
        cr_assert_eq(io->ops->rename(io, "/a", "/b", false), 0);
        cr_assert_eq(io->ops->rename(io, "/b", "/d/e/c", false), 0);
        if (seed % 3 == 0)
            cr_assert_eq(io->ops->sync_dir(io, "/d/e"), 0);
        cut_power(&io, seed);
        int names = has_content(io, "/a", "x") + has_content(io, "/b", "x") +
                    has_content(io, "/d/e/c", "x");
        cr_assert_eq(names, 1, "seed %d: %d names", (int)seed, names);
        kept_old += fsdp_io_exists(io, "/a");
        kept_new += fsdp_io_exists(io, "/d/e/c");
        fsdp_sim_free(io);
    }
    cr_assert(kept_old > 0 && kept_new > 0);
}

Test(io_sim, a_removed_directory_takes_nothing_with_it_that_had_left)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        fsdp_io *io = make_disk(0);
        cr_assert_eq(io->ops->mkdir(io, "/d"), 0);
        make_durable_file(io, "/d/a", "x");
        cr_assert_eq(io->ops->sync_dir(io, "/d"), 0);
        cr_assert_eq(fsdp_sim_unsynced(io), 0);
        cr_assert_eq(io->ops->rename(io, "/d/a", "/a", false), 0);
        cr_assert_eq(io->ops->rmdir(io, "/d"), 0);
        cut_power(&io, seed);
        cr_assert_eq(has_content(io, "/a", "x") + has_content(io, "/d/a", "x"), 1);
        fsdp_sim_free(io);
    }
}

Test(io_sim, a_rename_over_a_file_leaves_the_old_or_the_new_one)
{
    int old = 0, new = 0;
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        fsdp_io *io = make_disk(0);
        make_durable_file(io, "/a", "old");
        make_durable_file(io, "/t", "new");
        cr_assert_eq(io->ops->rename(io, "/t", "/a", true), 0);
        cut_power(&io, seed);
        old += has_content(io, "/a", "old") && has_content(io, "/t", "new");
        new += has_content(io, "/a", "new") && !fsdp_io_exists(io, "/t");
        fsdp_sim_free(io);
    }
    cr_assert_eq(old + new, SEEDS);
    cr_assert(old > 0 && new > 0);
}

Test(io_sim, an_exchange_leaves_both_in_their_old_places_or_both_in_their_new_ones)
{
    int old = 0, new = 0;
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        fsdp_io *io = make_disk(0);
        cr_assert_eq(io->ops->mkdir(io, "/a"), 0);
        make_durable_file(io, "/a/f", "old");
        cr_assert_eq(io->ops->mkdir(io, "/t"), 0);
        make_durable_file(io, "/t/f", "new");
        cr_assert_eq(io->ops->sync_dir(io, "/a"), 0);
        cr_assert_eq(io->ops->sync_dir(io, "/t"), 0);
        cr_assert_eq(io->ops->sync_dir(io, "/"), 0);
        cr_assert_eq(io->ops->exchange(io, "/t", "/none"), -ENOENT);
        cr_assert_eq(io->ops->exchange(io, "/t", "/a"), 0);
        cr_assert(has_content(io, "/a/f", "new") && has_content(io, "/t/f", "old"));
        bool synced = seed % 4 == 0;
        if (synced)
            cr_assert_eq(io->ops->sync_dir(io, "/"), 0);
        if (seed % 4 == 1)
            cr_assert_eq(io->ops->rename(io, "/t", "/u", false), 0);
        cut_power(&io, seed);
        bool is_new = has_content(io, "/a/f", "new") &&
                      (has_content(io, "/t/f", "old") || has_content(io, "/u/f", "old"));
        old += has_content(io, "/a/f", "old") && has_content(io, "/t/f", "new");
        new += is_new;
        cr_assert(is_new || !synced);
        fsdp_sim_free(io);
    }
    cr_assert_eq(old + new, SEEDS);
    cr_assert(old > 0 && new > SEEDS / 4);
}

/* --- protocols -------------------------------------------------------------------------------- */

typedef struct write_protocol {
    bool in_place, sync_file, sync_dir;
} write_protocol;

static const char OLD[] = "the old content";

/* More than one sector, so that it can be torn. */
static const char *new_content(void)
{
    static char text[3000];
    memset(text, 'n', sizeof text - 1);
    return text;
}

static void replace_by(write_protocol protocol, fsdp_io *io)
{
    const char *path = protocol.in_place ? "/d/a" : "/d/a.tmp";
    fsdp_file *file = open_file(io, path, protocol.in_place ? FSDP_IO_WRITE : FSDP_IO_CREATE);
    fsdp_error err = {0};
    cr_assert_eq(fsdp_io_write(file, path, new_content(), strlen(new_content()), 0, &err), FSDP_OK);
    if (protocol.sync_file)
        cr_assert_eq(fsdp_io_sync(file, path, &err), FSDP_OK);
    close_file(file);
    if (!protocol.in_place)
        cr_assert_eq(fsdp_io_rename(io, path, "/d/a", true, &err), FSDP_OK);
    if (protocol.sync_dir)
        cr_assert_eq(fsdp_io_sync_dir(io, "/d", &err), FSDP_OK);
}

static fsdp_io *disk_with_old_file(void)
{
    fsdp_io *io = make_disk(0);
    cr_assert_eq(io->ops->mkdir(io, "/d"), 0);
    make_durable_file(io, "/d/a", OLD);
    cr_assert_eq(io->ops->sync_dir(io, "/d"), 0);
    cr_assert_eq(fsdp_sim_unsynced(io), 0);
    return io;
}

/* The number of power cuts, of SEEDS after the end of the protocol, that lose the new content. */
static int losses_after(write_protocol protocol)
{
    int losses = 0;
    fsdp_io *io = disk_with_old_file();
    replace_by(protocol, io);
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        fsdp_io *after = fsdp_sim_crash(io, seed);
        losses += !has_content(after, "/d/a", new_content());
        fsdp_sim_free(after);
    }
    fsdp_sim_free(io);
    return losses;
}

typedef struct cut_counts {
    fsdp_io *disk;
    int damaged, old, new;
} cut_counts;

static int cut_before_call(void *user, fsdp_io_call call, const char *path)
{
    cut_counts *cuts = user;
    (void)call;
    (void)path;
    for (uint64_t seed = 0; seed < 40; seed++) {
        fsdp_io *after = fsdp_sim_crash(cuts->disk, seed);
        bool old = has_content(after, "/d/a", OLD);
        bool new = has_content(after, "/d/a", new_content());
        cuts->old += old;
        cuts->new += new;
        cuts->damaged += !old && !new;
        fsdp_sim_free(after);
    }
    return 0;
}

/* Cuts the power before every storage call of the protocol. */
static cut_counts cut_during(write_protocol protocol)
{
    cut_counts cuts = {.disk = disk_with_old_file()};
    fsdp_fault_plan plan = {
        .at = 1,
        .forever = true,
        .action = FSDP_FAULT_CALL,
        .call = cut_before_call,
        .user = &cuts,
    };
    fsdp_io *io = NULL;
    cr_assert_eq(fsdp_io_fault_create(cuts.disk, &plan, &io, NULL), FSDP_OK);
    replace_by(protocol, io);
    fsdp_io_fault_free(io);
    fsdp_sim_free(cuts.disk);
    return cuts;
}

static const write_protocol FULL = {.sync_file = true, .sync_dir = true};

Test(io_sim, write_sync_rename_sync_dir_loses_nothing)
{
    cr_assert_eq(losses_after(FULL), 0);
    cut_counts cuts = cut_during(FULL);
    cr_assert_eq(cuts.damaged, 0);
    cr_assert(cuts.old > 0 && cuts.new > 0);
}

Test(io_sim, without_a_sync_of_the_file_content_is_lost)
{
    write_protocol weak = FULL;
    weak.sync_file = false;
    cr_assert_gt(losses_after(weak), 20);
    cr_assert_gt(cut_during(weak).damaged, 5);
}

Test(io_sim, without_a_sync_of_the_directory_the_new_name_is_lost)
{
    write_protocol weak = FULL;
    weak.sync_dir = false;
    cr_assert_gt(losses_after(weak), 20);
    cr_assert_eq(cut_during(weak).damaged, 0); /* old or new in any case */
}

Test(io_sim, writing_in_place_damages)
{
    write_protocol weak = FULL;
    weak.in_place = true;
    cr_assert_eq(losses_after(weak), 0);
    cr_assert_gt(cut_during(weak).damaged, 5);
}

Test(io_sim, a_new_directory_is_lost_until_its_parent_is_synced)
{
    int lost = 0;
    fsdp_io *io = make_disk(0);
    cr_assert_eq(io->ops->mkdir(io, "/d"), 0);
    make_durable_file(io, "/file", "");
    cr_assert_eq(io->ops->mkdir(io, "/d/e"), 0);
    fsdp_file *file = open_file(io, "/d/e/a", FSDP_IO_CREATE);
    cr_assert_eq(file->ops->sync(file), 0);
    close_file(file);
    cr_assert_eq(io->ops->sync_dir(io, "/d/e"), 0);
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        fsdp_io *after = fsdp_sim_crash(io, seed);
        lost += !fsdp_io_exists(after, "/d/e/a");
        fsdp_sim_free(after);
    }
    cr_assert(lost > 20 && lost < SEEDS);
    cr_assert_eq(io->ops->sync_dir(io, "/d"), 0);
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        fsdp_io *after = fsdp_sim_crash(io, seed);
        cr_assert(fsdp_io_exists(after, "/d/e/a"));
        fsdp_sim_free(after);
    }
    fsdp_sim_free(io);
}

/* --- random programs -------------------------------------------------------------------------- */

static uint64_t next_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

static const char *random_path(uint64_t *state)
{
    static const char *const paths[] = {"/a",   "/b",     "/c",     "/d",     "/d/a",
                                        "/d/b", "/e",     "/e/a",   "/d/e",   "/d/e/a",
                                        "/e/d", "/e/d/b", "/d/e/d", "/e/d/e", "/d/c"};
    return paths[next_random(state) % (sizeof paths / sizeof paths[0])];
}

static void random_step(fsdp_io *io, uint64_t *state)
{
    const char *path = random_path(state);
    fsdp_file *file = NULL;
    switch (next_random(state) % 9) {
    case 0:
    case 1: (void)io->ops->mkdir(io, path); break;
    case 2: (void)io->ops->rmdir(io, path); break;
    case 3: (void)io->ops->unlink(io, path); break;
    case 4:
    case 5: (void)io->ops->rename(io, path, random_path(state), next_random(state) % 2); break;
    case 6: (void)io->ops->sync_dir(io, path); break;
    case 7: (void)io->ops->sync_dir(io, "/"); break;
    default:
        if (io->ops->open(io, path, FSDP_IO_CREATE, &file) == 0) {
            file->ops->pwrite(file, path, strlen(path), 0);
            if (next_random(state) % 2)
                file->ops->sync(file);
            file->ops->close(file);
        }
    }
}

/* Every step of a random program keeps the disk usable, before and after a cut, and frees all. */
Test(io_sim, random_programs_and_cuts_always_leave_a_tree)
{
    for (uint64_t program = 0; program < 60; program++) {
        uint64_t state = program;
        fsdp_io *io = make_disk(0);
        for (int i = 0; i < 150; i++) {
            random_step(io, &state);
            if (i % 10 == 0) {
                fsdp_io *after = fsdp_sim_crash(io, state);
                cr_assert_not_null(after);
                cr_assert_eq(fsdp_sim_unsynced(after), 0);
                for (int k = 0; k < 10; k++)
                    random_step(after, &state);
                fsdp_io *last = fsdp_sim_crash(after, state);
                static const char *const tops[] = {"/a", "/b", "/c", "/d", "/e"};
                for (int k = 0; k < 5; k++)
                    cr_assert_eq(fsdp_io_remove_tree(last, tops[k], NULL), FSDP_OK);
                fsdp_text text = {0};
                cr_assert_eq(last->ops->sync_dir(last, "/"), 0);
                fsdp_sim_dump(last, &text);
                cr_assert_eq(text.size, 0, "%s", text.data);
                fsdp_text_release(&text);
                fsdp_sim_free(last);
                fsdp_sim_free(after);
            }
        }
        fsdp_sim_free(io);
    }
}

/* Threads as ranks, each with its own file, while another one cuts the power again and again. */
static void *write_own_files(void *user)
{
    fsdp_io *io = user;
    char path[64];
    for (int i = 0; i < 30; i++) {
        snprintf(path, sizeof path, "/%lx-%d", (unsigned long)pthread_self(), i);
        if (fsdp_io_replace_file(io, path, OLD, strlen(OLD), NULL) != FSDP_OK)
            return user;
        io->ops->sync_dir(io, "/");
        if (!has_content(io, path, OLD))
            return user;
    }
    return NULL;
}

Test(io_sim, threads_may_share_a_disk_that_is_cut)
{
    fsdp_io *io = make_disk(0);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, write_own_files, io);
    for (uint64_t seed = 0; seed < 50; seed++)
        fsdp_sim_free(fsdp_sim_crash(io, seed));
    for (int i = 0; i < 4; i++) {
        void *failed = NULL;
        pthread_join(threads[i], &failed);
        cr_assert_null(failed);
    }
    cr_assert_eq(fsdp_sim_unsynced(io), 0);
    fsdp_sim_free(io);
}

Test(io_sim, a_cut_without_memory_gives_no_disk_and_leaks_nothing)
{
    fsdp_io *io = disk_with_old_file();
    replace_by((write_protocol){0}, io);
    int failures = 0;
    for (int64_t n = 0;; n++) {
        fsdp_mem_fail_after(n, false);
        fsdp_io *after = fsdp_sim_crash(io, 1);
        fsdp_mem_fail_after(-1, false);
        fsdp_sim_free(after);
        if (after)
            break;
        failures++;
    }
    cr_assert_gt(failures, 5);
    fsdp_sim_free(io);
}
