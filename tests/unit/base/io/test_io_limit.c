/* Reading and writing at a rate, with a clock that only sleeping moves on. */
#include "base/io/io_limit.h"
#include "tests/support/disk/io_sim.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>

enum { RATE = 1 << 20, FILE_BYTES = 4 << 20 };

static const int64_t SECOND = 1000000000;

typedef struct clock_of_test {
    int64_t now, slept, longest;
    int sleeps, stops_after; /* sleeps; 0: never */
} clock_of_test;

static int64_t now_of(void *user)
{
    return ((clock_of_test *)user)->now;
}

static void sleep_of(void *user, int64_t ns)
{
    clock_of_test *clock = user;
    clock->now += ns;
    clock->slept += ns;
    clock->sleeps++;
    clock->longest = ns > clock->longest ? ns : clock->longest;
}

static bool stop_of(void *user)
{
    const clock_of_test *clock = user;
    return clock->stops_after > 0 && clock->sleeps >= clock->stops_after;
}

static fsdp_io *disk;
static clock_of_test clock_now;
static char *bytes;

static fsdp_io *make(int64_t rate)
{
    fsdp_io *io = NULL;
    clock_now = (clock_of_test){.now = 5 * SECOND};
    bytes = calloc(FILE_BYTES, 1);
    fsdp_io_limit_opts opts = {.bytes_per_second = rate,
                               .stopped = stop_of,
                               .now_ns = now_of,
                               .sleep_ns = sleep_of,
                               .context = &clock_now};
    cr_assert_eq(fsdp_sim_create(0, &disk, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_limit_create(disk, &opts, &io, NULL), FSDP_OK);
    return io;
}

static fsdp_file *create(fsdp_io *io)
{
    fsdp_file *file = NULL;
    cr_assert_eq(fsdp_io_open(io, "a", FSDP_IO_CREATE, &file, NULL), FSDP_OK);
    return file;
}

static void end(fsdp_io *io, fsdp_file *file)
{
    cr_assert_eq(fsdp_io_close(&file, "a", NULL), FSDP_OK);
    fsdp_io_limit_free(io);
    fsdp_sim_free(disk);
    free(bytes);
}

/* So many bytes at RATE, the first eighth of a second's at once; the last piece needs no time after it. */
static void assert_slept_for(int64_t transferred)
{
    int64_t all = transferred * SECOND / RATE;
    cr_assert_leq(clock_now.slept, all);
    cr_assert_geq(clock_now.slept, all - SECOND / 4 - SECOND / 100, "%lld of %lld",
                  (long long)clock_now.slept, (long long)all);
}

Test(io_limit, what_is_written_takes_its_time)
{
    fsdp_io *io = make(RATE);
    fsdp_file *file = create(io);
    cr_assert_eq(fsdp_io_write(file, "a", bytes, FILE_BYTES, 0, NULL), FSDP_OK);
    assert_slept_for(FILE_BYTES);
    end(io, file);
}

Test(io_limit, what_is_read_is_counted_apart)
{
    fsdp_io *io = make(RATE);
    fsdp_file *file = create(io);
    cr_assert_eq(fsdp_io_write(file, "a", bytes, FILE_BYTES, 0, NULL), FSDP_OK);
    int64_t writing = clock_now.slept;
    cr_assert_eq(fsdp_io_read(file, "a", bytes, FILE_BYTES, 0, NULL), FSDP_OK);
    clock_now.slept -= writing;
    assert_slept_for(FILE_BYTES);
    end(io, file);
}

Test(io_limit, all_files_share_the_rate)
{
    fsdp_io *io = make(RATE);
    fsdp_file *file = create(io), *other = NULL;
    cr_assert_eq(fsdp_io_open(io, "b", FSDP_IO_CREATE, &other, NULL), FSDP_OK);
    for (int i = 0; i < 16; i++) {
        fsdp_file *one = i % 2 ? file : other;
        cr_assert_eq(fsdp_io_write(one, "a", bytes, FILE_BYTES / 16, 0, NULL), FSDP_OK);
    }
    assert_slept_for(FILE_BYTES);
    cr_assert_eq(fsdp_io_close(&other, "b", NULL), FSDP_OK);
    end(io, file);
}

Test(io_limit, a_pause_saves_up_no_more_than_a_burst)
{
    fsdp_io *io = make(RATE);
    fsdp_file *file = create(io);
    clock_now.now += 1000 * SECOND;
    cr_assert_eq(fsdp_io_write(file, "a", bytes, FILE_BYTES, 0, NULL), FSDP_OK);
    assert_slept_for(FILE_BYTES);
    end(io, file);
}

Test(io_limit, the_end_of_a_file_takes_no_time)
{
    fsdp_io *io = make(RATE);
    fsdp_file *file = create(io);
    cr_assert_eq(fsdp_io_write(file, "a", bytes, 100, 0, NULL), FSDP_OK);
    int64_t before = clock_now.slept;
    for (int i = 0; i < 1000; i++)
        cr_assert_eq(file->ops->pread(file, bytes, FILE_BYTES, 100), 0);
    cr_assert_leq(clock_now.slept - before, SECOND / 8);
    end(io, file);
}

Test(io_limit, a_failed_write_takes_no_time)
{
    fsdp_io *io = make(RATE);
    fsdp_file *file = create(io), *full = NULL;
    cr_assert_eq(fsdp_io_close(&file, "a", NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_open(io, "a", FSDP_IO_READ, &full, NULL), FSDP_OK);
    for (int i = 0; i < 1000; i++)
        cr_assert_lt(full->ops->pwrite(full, bytes, FILE_BYTES, 0), 0);
    cr_assert_leq(clock_now.slept, SECOND / 8);
    end(io, full);
}

Test(io_limit, waits_are_slept_in_slices_and_end_when_stopped)
{
    fsdp_io *io = make(1000);
    fsdp_file *file = create(io);
    clock_now.stops_after = 7;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_io_write(file, "a", bytes, FILE_BYTES, 0, &err), FSDP_ERR_CANCELLED);
    cr_assert_eq(clock_now.sleeps, 7);
    cr_assert_leq(clock_now.longest, SECOND / 10);
    end(io, file);
}

Test(io_limit, small_transfers_go_through_after_a_stop)
{
    fsdp_io *io = make(1000);
    fsdp_file *file = create(io);
    cr_assert_eq(fsdp_io_write(file, "a", bytes, 4096, 0, NULL), FSDP_OK);
    clock_now.stops_after = 1;
    clock_now.sleeps = 1;
    cr_assert_eq(fsdp_io_write(file, "a", bytes, 300, 0, NULL), FSDP_OK);
    cr_assert_eq(file->ops->pwrite(file, bytes, 4096, 0), -ECANCELED);
    cr_assert_eq(clock_now.sleeps, 1);
    end(io, file);
}

Test(io_limit, the_slowest_and_the_fastest_rate_work)
{
    const int64_t rates[] = {1, INT64_MAX};
    for (int i = 0; i < 2; i++) {
        fsdp_io *io = make(rates[i]);
        fsdp_file *file = create(io);
        cr_assert_eq(fsdp_io_write(file, "a", bytes, 10000, 0, NULL), FSDP_OK);
        cr_assert_eq(clock_now.slept > 0, rates[i] == 1);
        end(io, file);
    }
}

Test(io_limit, the_systems_clock_is_the_default)
{
    fsdp_io *io = NULL;
    fsdp_file *file = NULL;
    char data[64 << 10] = {0};
    fsdp_io_limit_opts opts = {.bytes_per_second = 4 << 20};
    cr_assert_eq(fsdp_sim_create(0, &disk, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_limit_create(disk, &opts, &io, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_open(io, "a", FSDP_IO_CREATE, &file, NULL), FSDP_OK);
    for (int i = 0; i < 16; i++)
        cr_assert_eq(fsdp_io_write(file, "a", data, sizeof data, 0, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_close(&file, "a", NULL), FSDP_OK);
    fsdp_io_limit_free(io);
    fsdp_io_limit_free(NULL);
    fsdp_sim_free(disk);
}
