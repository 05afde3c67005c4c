/* The io back end that keeps to a rate: see io_limit.h. */
#include "base/io/io_limit.h"

#include "base/io/io_pass.h"

#include <errno.h>
#include <stdatomic.h>
#include <time.h>

enum { PIECE_LEAST = 4 << 10, PIECE_MOST = 256 << 10 };

static const int64_t SECOND = 1000000000, BURST = 125000000, SLICE = 100000000;

/* The time at which the transfers so far are paid for at the rate. */
typedef struct rate_turn {
    _Atomic int64_t free_ns;
} rate_turn;

typedef struct limit_io {
    fsdp_io_pass pass;
    fsdp_io_limit_opts opts;
    size_t piece;
    rate_turn reads, writes;
} limit_io;

static limit_io *owner_of(fsdp_file *file)
{
    return (limit_io *)((fsdp_pass_file *)file)->owner;
}

/* --- time ------------------------------------------------------------------------------------- */

static int64_t system_now(void *context)
{
    struct timespec now;
    (void)context;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * SECOND + now.tv_nsec;
}

static void system_sleep(void *context, int64_t ns)
{
    (void)context;
    struct timespec wait = {.tv_sec = ns / SECOND, .tv_nsec = ns % SECOND};
    (void)nanosleep(&wait, NULL); /* a signal may shorten it: the caller checks the clock */
}

static bool is_stopped(const limit_io *limit)
{
    return limit->opts.stopped && limit->opts.stopped(limit->opts.context);
}

/* --- booking transfers ------------------------------------------------------------------------ */

static int64_t time_of(const limit_io *limit, size_t bytes)
{
    return (int64_t)((__int128)bytes * SECOND / limit->opts.bytes_per_second);
}

/* Books a transfer of that many bytes and returns the time at which it may begin. */
static int64_t take_turn(const limit_io *limit, rate_turn *turn, size_t bytes, int64_t now)
{
    int64_t taken = atomic_load(&turn->free_ns), begin, end;
    do {
        begin = taken > now - BURST ? taken : now - BURST;
        if (__builtin_add_overflow(begin, time_of(limit, bytes), &end))
            end = INT64_MAX;
    } while (!atomic_compare_exchange_weak(&turn->free_ns, &taken, end));
    return begin;
}

static void give_back(const limit_io *limit, rate_turn *turn, size_t bytes)
{
    atomic_fetch_sub(&turn->free_ns, time_of(limit, bytes));
}

static int await_turn(const limit_io *limit, rate_turn *turn, size_t bytes)
{
    int64_t now = limit->opts.now_ns(limit->opts.context);
    int64_t begin = take_turn(limit, turn, bytes, now);
    while (now < begin) {
        if (is_stopped(limit) && bytes < PIECE_LEAST)
            return 0;
        if (is_stopped(limit)) {
            give_back(limit, turn, bytes);
            return -ECANCELED;
        }
        limit->opts.sleep_ns(limit->opts.context, begin - now < SLICE ? begin - now : SLICE);
        now = limit->opts.now_ns(limit->opts.context);
    }
    return 0;
}

static size_t piece_of(const limit_io *limit, size_t size)
{
    return size < limit->piece ? size : limit->piece;
}

/* Gives back the time of bytes that were booked and not transferred. */
static ssize_t settle(const limit_io *limit, rate_turn *turn, size_t asked, ssize_t n)
{
    size_t done = n < 0 ? 0 : (size_t)n;
    if (done < asked)
        give_back(limit, turn, asked - done);
    return n;
}

static ssize_t limit_pread(fsdp_file *file, void *data, size_t size, int64_t offset)
{
    limit_io *limit = owner_of(file);
    fsdp_file *inner = ((fsdp_pass_file *)file)->inner;
    size_t piece = piece_of(limit, size);
    int result = await_turn(limit, &limit->reads, piece);
    if (result < 0)
        return result;
    return settle(limit, &limit->reads, piece, inner->ops->pread(inner, data, piece, offset));
}

static ssize_t limit_pwrite(fsdp_file *file, const void *data, size_t size, int64_t offset)
{
    limit_io *limit = owner_of(file);
    fsdp_file *inner = ((fsdp_pass_file *)file)->inner;
    size_t piece = piece_of(limit, size);
    int result = await_turn(limit, &limit->writes, piece);
    if (result < 0)
        return result;
    return settle(limit, &limit->writes, piece, inner->ops->pwrite(inner, data, piece, offset));
}

/* --- create and free -------------------------------------------------------------------------- */

static size_t choose_piece(int64_t rate)
{
    int64_t piece = rate / 8 / PIECE_LEAST * PIECE_LEAST;
    return piece < PIECE_LEAST ? PIECE_LEAST : piece > PIECE_MOST ? PIECE_MOST : (size_t)piece;
}

fsdp_status fsdp_io_limit_create(fsdp_io *inner, const fsdp_io_limit_opts *opts, fsdp_io **io_out,
                                 fsdp_error *err)
{
    limit_io *limit = fsdp_alloc(1, sizeof *limit);
    if (!limit)
        return fsdp_fail_memory(err, "a limit of bytes a second");
    fsdp_io_pass_begin(&limit->pass, "limit", inner);
    limit->pass.ops.pread = limit_pread;
    limit->pass.ops.pwrite = limit_pwrite;
    limit->opts = *opts;
    if (!opts->now_ns || !opts->sleep_ns) {
        limit->opts.now_ns = system_now;
        limit->opts.sleep_ns = system_sleep;
    }
    limit->piece = choose_piece(opts->bytes_per_second);
    *io_out = &limit->pass.base;
    return FSDP_OK;
}

void fsdp_io_limit_free(fsdp_io *io)
{
    fsdp_free(io);
}
