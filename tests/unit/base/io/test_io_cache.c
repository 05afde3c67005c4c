/* Files are opened and directories listed once, until the cache ends. */
#include "base/io/io_cache.h"
#include "tests/support/disk/io_fault.h"
#include "tests/support/disk/io_sim.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static fsdp_io *disk, *counted, *io;
static int opens, lists;

static int count(void *user, fsdp_io_call call, const char *path)
{
    (void)user;
    (void)path;
    opens += call == FSDP_CALL_OPEN;
    lists += call == FSDP_CALL_LIST;
    return 0;
}

static void create(const char *path, char byte)
{
    fsdp_file *file = NULL;
    cr_assert_eq(fsdp_io_open(disk, path, FSDP_IO_CREATE, &file, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_write(file, path, &byte, 1, 0, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_close(&file, path, NULL), FSDP_OK);
}

static void begin(void)
{
    const fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_OPEN | 1 << FSDP_CALL_LIST,
                                  .at = 1,
                                  .forever = true,
                                  .action = FSDP_FAULT_CALL,
                                  .call = count};
    opens = lists = 0;
    cr_assert_eq(fsdp_sim_create(0, &disk, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_mkdir(disk, "/d", NULL), FSDP_OK);
    create("/d/a", 'a');
    create("/d/b", 'b');
    cr_assert_eq(fsdp_io_fault_create(disk, &plan, &counted, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_cache_create(counted, &io, NULL), FSDP_OK);
}

static void end(void)
{
    fsdp_io_cache_free(io);
    fsdp_io_fault_free(counted);
    fsdp_sim_free(disk);
}

TestSuite(io_cache, .init = begin, .fini = end);

static fsdp_file *open_file(const char *path)
{
    fsdp_file *file = NULL;
    cr_assert_eq(fsdp_io_open(io, path, FSDP_IO_READ, &file, NULL), FSDP_OK, "%s", path);
    return file;
}

static char byte_of(fsdp_file *file)
{
    char byte = 0;
    cr_assert_eq(fsdp_io_read(file, "", &byte, 1, 0, NULL), FSDP_OK);
    return byte;
}

static char read_byte(const char *path)
{
    fsdp_file *file = open_file(path);
    char byte = byte_of(file);
    cr_assert_eq(fsdp_io_close(&file, path, NULL), FSDP_OK);
    return byte;
}

Test(io_cache, a_file_is_opened_once_until_the_end)
{
    for (int i = 0; i < 3; i++) {
        cr_expect_eq(read_byte("/d/a"), 'a');
        cr_expect_eq(read_byte("/d/b"), 'b');
    }
    cr_expect_eq(opens, 2);
    fsdp_io_cache_end(io);
    cr_expect_eq(read_byte("/d/a"), 'a');
    cr_expect_eq(read_byte("/d/a"), 'a');
    cr_expect_eq(opens, 4);
}

Test(io_cache, two_users_share_a_file_that_outlives_the_end)
{
    fsdp_file *one = open_file("/d/a"), *two = open_file("/d/a");
    cr_expect_eq(opens, 1);
    cr_assert_eq(fsdp_io_close(&one, "/d/a", NULL), FSDP_OK);
    fsdp_io_cache_end(io);
    cr_expect_eq(byte_of(two), 'a');
    cr_assert_eq(fsdp_io_close(&two, "/d/a", NULL), FSDP_OK);
}

Test(io_cache, a_link_is_refused_to_those_who_follow_none)
{
    char directory[] = "/tmp/fsdp-cache-XXXXXX", path[60], link[60];
    fsdp_io *real = NULL;
    fsdp_file *file = NULL;
    cr_assert(mkdtemp(directory));
    snprintf(path, sizeof path, "%s/a", directory);
    snprintf(link, sizeof link, "%s/link", directory);
    cr_assert_eq(fsdp_io_open(NULL, path, FSDP_IO_CREATE, &file, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_close(&file, path, NULL), FSDP_OK);
    cr_assert_eq(symlink("a", link), 0);
    cr_assert_eq(fsdp_io_cache_create(fsdp_io_posix(), &real, NULL), FSDP_OK);
    for (int i = 0; i < 2; i++) {
        cr_expect_eq(real->ops->open(real, link, FSDP_IO_READ, &file), 0);
        cr_expect_eq(file->ops->close(file), 0);
        cr_expect_eq(real->ops->open(real, link, FSDP_IO_READ | FSDP_IO_BENEATH, &file), -ELOOP);
    }
    fsdp_io_cache_free(real);
    cr_assert_eq(fsdp_io_remove_tree(NULL, directory, NULL), FSDP_OK);
}

Test(io_cache, one_opening_serves_those_who_follow_links_and_those_who_do_not)
{
    fsdp_file *file = NULL;
    cr_expect_eq(read_byte("/d/a"), 'a');
    cr_assert_eq(fsdp_io_open(io, "/d/a", FSDP_IO_READ | FSDP_IO_BENEATH, &file, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_close(&file, "/d/a", NULL), FSDP_OK);
    cr_expect_eq(opens, 1);
}

Test(io_cache, writing_is_not_cached)
{
    const char byte = 'c';
    fsdp_file *file = NULL;
    cr_assert_eq(fsdp_io_open(io, "/d/a", FSDP_IO_WRITE, &file, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_write(file, "/d/a", &byte, 1, 0, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_close(&file, "/d/a", NULL), FSDP_OK);
    cr_expect_eq(read_byte("/d/a"), 'c');
    cr_expect_eq(fsdp_io_open(io, "/d/none", FSDP_IO_READ, &file, NULL), FSDP_ERR_NOT_FOUND);
}

/* The files that were used last stay open. */
Test(io_cache, the_number_of_idle_files_is_bounded)
{
    char path[40];
    for (int i = 0; i < 2 * FSDP_IO_CACHE_FILES; i++) {
        snprintf(path, sizeof path, "/d/f%d", i);
        create(path, (char)i);
    }
    for (int i = 0; i < 2 * FSDP_IO_CACHE_FILES; i++) {
        snprintf(path, sizeof path, "/d/f%d", i);
        cr_expect_eq(read_byte(path), (char)i);
    }
    cr_expect_eq(opens, 2 * FSDP_IO_CACHE_FILES);
    cr_expect_eq(read_byte(path), (char)(2 * FSDP_IO_CACHE_FILES - 1));
    cr_expect_eq(opens, 2 * FSDP_IO_CACHE_FILES, "the last one is open");
    cr_expect_eq(read_byte("/d/f0"), 0);
    cr_expect_eq(opens, 2 * FSDP_IO_CACHE_FILES + 1, "the first one is not");
}

static int add_name(void *context, const char *name)
{
    strncat(context, name, 1);
    return 0;
}

static int stop(void *context, const char *name)
{
    *(char *)context = name[0];
    return 1;
}

Test(io_cache, a_directory_is_listed_once_until_the_end)
{
    char first[8] = "", again[8] = "", one = 0;
    cr_expect_eq(io->ops->list(io, "/d", stop, &one), 0, "a visit that stops");
    cr_expect_eq(io->ops->list(io, "/d", add_name, first), 0);
    create("/d/c", 'c');
    cr_expect_eq(io->ops->list(io, "/d", add_name, again), 0);
    cr_expect_eq(strlen(first), 2);
    cr_expect_str_eq(again, first);
    cr_expect_eq(lists, 1);
    fsdp_io_cache_end(io);
    again[0] = '\0';
    cr_expect_eq(io->ops->list(io, "/d", add_name, again), 0);
    cr_expect_eq(strlen(again), 3);
    create("/d/e", 'e');
    again[0] = '\0';
    cr_expect_eq(io->ops->list(io, "/d", add_name, again), 0);
    cr_expect_eq(strlen(again), 4);
    cr_expect_lt(io->ops->list(io, "/none", add_name, again), 0);
}
