/* Reading past the page cache: over a disk that takes only whole blocks, short reads, refusals. */
#include "base/io/io_direct.h"
#include "tests/support/disk/io_fault.h"
#include "base/io/io_pass.h"
#include "tests/support/disk/io_sim.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BLOCK = FSDP_DIRECT_BLOCK, SIZE = FSDP_DIRECT_LEAST + 3 * BLOCK + 777, BUFFER = 64 << 10 };

/* --- a disk that takes only whole blocks ------------------------------------------------------ */

static bool refuses;
static int direct_reads, other_reads;
static size_t largest;

static int strict_open(fsdp_io *io, const char *path, unsigned flags, fsdp_file **file_out)
{
    if (refuses && (flags & FSDP_IO_DIRECT))
        return -EINVAL;
    return fsdp_io_pass_open(io, path, flags, file_out);
}

static ssize_t strict_pread(fsdp_file *base, void *data, size_t size, int64_t offset)
{
    fsdp_pass_file *file = (fsdp_pass_file *)base;
    bool whole = size % BLOCK == 0 && offset % BLOCK == 0 && (uintptr_t)data % BLOCK == 0;
    bool direct = file->flags & FSDP_IO_DIRECT;
    if (direct && !whole && size > 0)
        return -EINVAL;
    *(direct ? &direct_reads : &other_reads) += 1;
    largest = size > largest ? size : largest;
    return file->inner->ops->pread(file->inner, data, size, offset);
}

static fsdp_io *disk, *faults;
static fsdp_io_pass strict;
static char content[SIZE], got[SIZE + BLOCK];

static void put(const char *path, size_t size)
{
    fsdp_file *file = NULL;
    cr_assert_eq(fsdp_io_open(disk, path, FSDP_IO_CREATE, &file, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_write(file, path, content, size, 0, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_close(&file, path, NULL), FSDP_OK);
}

static fsdp_io *make(fsdp_fault_plan plan)
{
    fsdp_io *io = NULL;
    for (size_t i = 0; i < SIZE; i++)
        content[i] = (char)(i * 2654435761u >> 7);
    cr_assert_eq(fsdp_sim_create(0, &disk, NULL), FSDP_OK);
    put("large", SIZE);
    put("small", FSDP_DIRECT_LEAST - 1);
    cr_assert_eq(fsdp_io_fault_create(disk, &plan, &faults, NULL), FSDP_OK);
    fsdp_io_pass_begin(&strict, "strict", faults);
    strict.ops.open = strict_open;
    strict.ops.pread = strict_pread;
    cr_assert_eq(fsdp_io_direct_create(&strict.base, BUFFER, &io, NULL), FSDP_OK);
    return io;
}

static void end(fsdp_io *io)
{
    fsdp_io_direct_free(io);
    fsdp_io_fault_free(faults);
    fsdp_sim_free(disk);
}

static fsdp_file *open_file(fsdp_io *io, const char *path)
{
    fsdp_file *file = NULL;
    cr_assert_eq(fsdp_io_open(io, path, FSDP_IO_READ, &file, NULL), FSDP_OK);
    return file;
}

static void assert_reads(fsdp_file *file, size_t size, int64_t offset)
{
    fsdp_error err = {0};
    memset(got, 0x55, sizeof got);
    cr_assert_eq(fsdp_io_read(file, "large", got, size, offset, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(memcmp(got, content + offset, size), 0, "%zu bytes at %lld", size,
                 (long long)offset);
    cr_assert_eq(got[size], 0x55, "%zu bytes at %lld", size, (long long)offset);
}

/* --- tests ------------------------------------------------------------------------------------ */

Test(io_direct, any_range_is_read_in_whole_blocks)
{
    fsdp_io *io = make((fsdp_fault_plan){0});
    fsdp_file *file = open_file(io, "large");
    static const int around[] = {-1, 0, 1, 777};
    static const size_t sizes[] = {1, 2, BLOCK - 1, BLOCK, BLOCK + 1, BUFFER, BUFFER + 1, SIZE / 2};
    for (int at = 0; at < 3; at++)
        for (int i = 0; i < 4; i++)
            for (int k = 0; k < 8; k++) {
                int64_t offset = (int64_t)at * BLOCK * 5 + around[i];
                if (offset >= 0)
                    assert_reads(file, sizes[k], offset);
            }
    assert_reads(file, SIZE, 0);
    assert_reads(file, 1, SIZE - 1);
    assert_reads(file, 778, SIZE - 778);
    cr_assert_eq(file->ops->pread(file, got, 0, 7), 0);
    cr_assert_gt(direct_reads, 0);
    cr_assert_leq(largest, (size_t)BUFFER);
    cr_assert_eq(fsdp_io_close(&file, "large", NULL), FSDP_OK);
    end(io);
}

Test(io_direct, the_end_of_a_file_is_seen)
{
    fsdp_io *io = make((fsdp_fault_plan){0});
    fsdp_file *file = open_file(io, "large");
    cr_assert_eq(file->ops->pread(file, got, 100, SIZE), 0);
    cr_assert_eq(file->ops->pread(file, got, 100, SIZE + 10 * BLOCK), 0);
    cr_assert_eq(file->ops->pread(file, got, 100, -1), -EINVAL);
    fsdp_error err = {0};
    cr_assert_eq(fsdp_io_read(file, "large", got, 100, SIZE - 50, &err), FSDP_ERR_DAMAGED);
    cr_assert_eq(fsdp_io_close(&file, "large", NULL), FSDP_OK);
    end(io);
}

Test(io_direct, small_files_and_files_to_write_go_through_the_cache)
{
    fsdp_io *io = make((fsdp_fault_plan){0});
    fsdp_file *file = open_file(io, "small");
    assert_reads(file, 1000, 3);
    cr_assert_eq(fsdp_io_close(&file, "small", NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_open(io, "large", FSDP_IO_WRITE, &file, NULL), FSDP_OK);
    assert_reads(file, 1000, 3);
    cr_assert_eq(fsdp_io_close(&file, "large", NULL), FSDP_OK);
    cr_assert_eq(direct_reads, 0);
    cr_assert_eq(other_reads, 2);
    cr_assert_eq(fsdp_io_direct_refusals(io), 0);
    end(io);
}

Test(io_direct, a_file_system_without_it_is_read_as_ever_and_counted)
{
    fsdp_io *io = make((fsdp_fault_plan){0});
    refuses = true;
    fsdp_file *file = open_file(io, "large");
    assert_reads(file, SIZE / 3, 5);
    cr_assert_eq(fsdp_io_close(&file, "large", NULL), FSDP_OK);
    cr_assert_eq(direct_reads, 0);
    cr_assert_eq(fsdp_io_direct_refusals(io), 1);
    end(io);
}

Test(io_direct, what_is_no_file_is_refused_as_ever)
{
    fsdp_io *io = make((fsdp_fault_plan){0});
    fsdp_file *file = NULL;
    cr_assert_eq(io->ops->open(io, "missing", FSDP_IO_READ, &file), -ENOENT);
    cr_assert_eq(io->ops->mkdir(io, "folder"), 0);
    cr_assert_eq(io->ops->open(io, "folder", FSDP_IO_READ, &file), -EISDIR);
    end(io);
}

Test(io_direct, short_reads_lose_nothing)
{
    const size_t parts[] = {0, 1, BLOCK - 1, BLOCK, BLOCK + 1};
    for (int at = 1; at < 6; at++)
        for (int i = 0; i < 5; i++) {
            fsdp_io *io = make((fsdp_fault_plan){.calls = 1 << FSDP_CALL_PREAD,
                                                 .at = at,
                                                 .action = FSDP_FAULT_SHORT,
                                                 .part = parts[i]});
            fsdp_file *file = open_file(io, "large");
            assert_reads(file, 5 * BUFFER, 3000);
            assert_reads(file, 20, BLOCK - 10);
            cr_assert_eq(fsdp_io_close(&file, "large", NULL), FSDP_OK);
            end(io);
        }
}

Test(io_direct, reads_that_are_always_short_come_to_an_end)
{
    fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_PREAD,
                            .at = 1,
                            .forever = true,
                            .action = FSDP_FAULT_SHORT,
                            .part = BLOCK};
    fsdp_io *io = make(plan);
    fsdp_file *file = open_file(io, "large");
    assert_reads(file, 3 * BUFFER, 4000);
    cr_assert_eq(fsdp_io_close(&file, "large", NULL), FSDP_OK);
    end(io);
    plan.part = 512;
    io = make(plan);
    file = open_file(io, "large");
    cr_assert_eq(file->ops->pread(file, got, 10, 600), -EIO);
    cr_assert_eq(fsdp_io_close(&file, "large", NULL), FSDP_OK);
    end(io);
}

Test(io_direct, failures_are_those_of_the_disk)
{
    fsdp_io *io = make((fsdp_fault_plan){
        .calls = 1 << FSDP_CALL_PREAD, .at = 2, .action = FSDP_FAULT_ERRNO, .errnum = EIO});
    fsdp_file *file = open_file(io, "large");
    fsdp_error err = {0};
    cr_assert_eq(fsdp_io_read(file, "large", got, 3 * BUFFER, 1, &err), FSDP_ERR_IO);
    cr_assert_eq(fsdp_io_close(&file, "large", NULL), FSDP_OK);
    end(io);
    for (int at = 0; at < 3; at++) {
        io = make((fsdp_fault_plan){0});
        fsdp_mem_fail_after(at, false);
        int result = io->ops->open(io, "large", FSDP_IO_READ, &file);
        ssize_t n = result == 0 ? file->ops->pread(file, got, 10, 0) : result;
        fsdp_mem_fail_after(-1, false);
        cr_assert(n == -ENOMEM || n == 10);
        if (result == 0)
            cr_assert_eq(fsdp_io_close(&file, "large", NULL), FSDP_OK);
        end(io);
    }
}

/* Holds with or without O_DIRECT in the file system of /tmp. */
Test(io_direct, a_real_file_is_read)
{
    char path[] = "/tmp/fsdp-direct-XXXXXX";
    int fd = mkstemp(path);
    fsdp_io *io = make((fsdp_fault_plan){0}), *real = NULL;
    cr_assert_eq(write(fd, content, SIZE), SIZE);
    close(fd);
    cr_assert_eq(fsdp_io_direct_create(fsdp_io_posix(), 0, &real, NULL), FSDP_OK);
    fsdp_file *file = open_file(real, path);
    assert_reads(file, SIZE, 0);
    assert_reads(file, SIZE - 5, 4);
    assert_reads(file, 5 * BLOCK, BLOCK);
    cr_assert_eq(fsdp_io_close(&file, path, NULL), FSDP_OK);
    fsdp_io_direct_free(real);
    unlink(path);
    end(io);
}
