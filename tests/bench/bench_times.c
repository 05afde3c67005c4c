/*
 * Measures two sides in turns on the same bytes: one warm-up round, then medians of the others. Ranks begin
 * each timed run together, and it ends with the last rank.
 */
#include "tests/bench/rows.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

const int64_t bench_pieces[BENCH_PIECES] = {256 << 10, 1 << 20, 4 << 20};

/* --- times ------------------------------------------------------------------------------------ */

static int compare_doubles(const void *a, const void *b)
{
    const double *x = a, *y = b;
    return *x < *y ? -1 : *x > *y;
}

static double median_of(const double *values, int count)
{
    double order[BENCH_MAX_ROUNDS];
    if (count == 0)
        return 0;
    memcpy(order, values, (size_t)count * sizeof *order);
    qsort(order, (size_t)count, sizeof *order, compare_doubles);
    return count % 2 ? order[count / 2] : (order[count / 2 - 1] + order[count / 2]) / 2;
}

double bench_median(const bench_times *times)
{
    return median_of(times->seconds, times->count);
}

double bench_median_cpu(const bench_times *times)
{
    return median_of(times->cpu, times->count);
}

double bench_shortest(const bench_times *times)
{
    double shortest = times->count > 0 ? times->seconds[0] : 0;
    for (int i = 1; i < times->count; i++)
        shortest = times->seconds[i] < shortest ? times->seconds[i] : shortest;
    return shortest;
}

double bench_longest(const bench_times *times)
{
    double longest = 0;
    for (int i = 0; i < times->count; i++)
        longest = times->seconds[i] > longest ? times->seconds[i] : longest;
    return longest;
}

static double cpu_of(int who)
{
    struct rusage usage = {0};
    getrusage(who, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

bench_clock bench_now(void)
{
    return (bench_clock){cli_now(), cpu_of(RUSAGE_SELF) + cpu_of(RUSAGE_CHILDREN)};
}

void bench_add_time(bench_times *times, const bench_clock *began)
{
    bench_clock ended = bench_now();
    if (times->count == BENCH_MAX_ROUNDS)
        return;
    times->cpu[times->count] = ended.cpu - began->cpu;
    times->seconds[times->count++] = ended.wall - began->wall;
}

/* --- counters --------------------------------------------------------------------------------- */

int64_t bench_bytes_read(void)
{
    char line[80];
    long long bytes = 0;
    FILE *counters = fopen("/proc/self/io", "re");
    if (counters && fgets(line, sizeof line, counters))
        sscanf(line, "rchar: %lld", &bytes);
    if (counters)
        fclose(counters);
    return bytes;
}

int64_t bench_peak_kib(void)
{
    struct rusage usage;
    return getrusage(RUSAGE_SELF, &usage) == 0 ? usage.ru_maxrss : 0;
}

/* --- two sides in turns ----------------------------------------------------------------------- */

typedef fsdp_status (*contest_step)(void *context, fsdp_error *err);

static fsdp_status together(const bench_contest *contest, contest_step step, fsdp_error *err)
{
    fsdp_status st = cli_check_stop(err);
    if (st == FSDP_OK && step)
        st = step(contest->context, err);
    return fsdp_ctl_agree(contest->ctl, st, err);
}

static fsdp_status run_ours(const bench_contest *contest, bench_outcome *outcome, fsdp_error *err)
{
    FSDP_TRY(together(contest, contest->prepare, err));
    FSDP_TRY(fsdp_ctl_barrier(contest->ctl, err));
    int64_t read_before = bench_bytes_read();
    FSDP_TRY(fsdp_ctl_barrier(contest->ctl, err));
    bench_clock began = bench_now();
    FSDP_TRY(together(contest, contest->ours, err));
    bench_add_time(&outcome->ours, &began);
    outcome->bytes_read = bench_bytes_read() - read_before;
    FSDP_TRY(together(contest, contest->prove, err));
    return together(contest, contest->clean, err);
}

static fsdp_status run_plain(const bench_contest *contest, int piece, bench_outcome *outcome,
                             fsdp_error *err)
{
    FSDP_TRY(together(contest, contest->prepare, err));
    FSDP_TRY(fsdp_ctl_barrier(contest->ctl, err));
    bench_clock began = bench_now();
    fsdp_status st = contest->plain(contest->context, bench_pieces[piece], err);
    FSDP_TRY(fsdp_ctl_agree(contest->ctl, st, err));
    bench_add_time(&outcome->plain[piece], &began);
    return together(contest, contest->clean, err);
}

static fsdp_status run_round(const bench_contest *contest, bench_outcome *outcome, fsdp_error *err)
{
    FSDP_TRY(run_ours(contest, outcome, err));
    for (int piece = 0; contest->plain && piece < BENCH_PIECES; piece++)
        FSDP_TRY(run_plain(contest, piece, outcome, err));
    return FSDP_OK;
}

fsdp_status bench_contest_run(const bench_contest *contest, bench_outcome *outcome, fsdp_error *err)
{
    bench_outcome warm_up = {0};
    *outcome = (bench_outcome){0};
    FSDP_TRY(run_round(contest, &warm_up, err));
    for (int round = 0; round < contest->rounds; round++)
        FSDP_TRY(run_round(contest, outcome, err));
    return FSDP_OK;
}

int bench_best_piece(const bench_outcome *outcome)
{
    int best = 0;
    for (int piece = 1; piece < BENCH_PIECES; piece++)
        if (bench_median(&outcome->plain[piece]) < bench_median(&outcome->plain[best]))
            best = piece;
    return best;
}

/* --- processes -------------------------------------------------------------------------------- */

typedef struct child_report {
    fsdp_status status;
    fsdp_error err;
    bench_child_result result;
} child_report;

static void work_and_report(int to, bench_child_work work, void *context)
{
    child_report report = {0};
    report.status = work(context, &report.result, &report.err);
    bool told = write(to, &report, sizeof report) == (ssize_t)sizeof report;
    _exit(told ? 0 : 1);
}

static fsdp_status hear(int from, pid_t child, bench_child_result *result_out, fsdp_error *err)
{
    child_report report = {0};
    struct rusage usage = {0};
    ssize_t size = read(from, &report, sizeof report);
    if (wait4(child, NULL, 0, &usage) != child || size != (ssize_t)sizeof report)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "a measuring process ended early");
    if (report.status != FSDP_OK) {
        *err = report.err;
        return report.status;
    }
    *result_out = report.result;
    result_out->peak_kib = usage.ru_maxrss;
    return FSDP_OK;
}

fsdp_status bench_in_child(bench_child_work work, void *context, bench_child_result *result_out,
                           fsdp_error *err)
{
    int ends[2];
    fflush(NULL);
    if (pipe(ends) != 0)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "cannot make a pipe");
    pid_t child = fork();
    if (child == 0)
        work_and_report(ends[1], work, context);
    close(ends[1]);
    fsdp_status st = child > 0 ? hear(ends[0], child, result_out, err)
                               : fsdp_fail(err, FSDP_ERR_LIMIT, "cannot make a process");
    close(ends[0]);
    return st;
}
