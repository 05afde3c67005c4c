/*
 * Power cuts on the simulated disk: at every storage call of a save or conversion, several random
 * survivals of what was not synced, each found by the next start of the system. Every one holds the
 * old state or the new one bit for bit, and the next save works. After "saved" was reported only the
 * new one will do. From some of them the recovery itself is cut again.
 *
 * A kill and then a power cut: the next process finds what the killed one renamed and did not sync, and
 * must not delete the other state before that is durable.
 */
#include "tests/support/disk/io_fault.h"
#include "tests/support/disk/io_sim.h"
#include "base/io/process.h"
#include "statedict/commit/commit.h"
#include "tests/fault/scenario.h"
#include "tests/support/matrix_row.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    USUAL_SAMPLE = 240,
    SURVIVALS = 6,
    SURVIVALS_REPORTED = 40,
    NESTED_EVERY = 40,
    USUAL_KILLS = 3,
    SURVIVALS_KILLED = 4,
    MOST_DISKS = 100000
};

#define ROOT "/disk"

/* The host of every disk. */
static fsdp_host host;

typedef struct counts {
    int64_t points, taken, disks, nested, old, new, later, wrong, lost, undurable, stuck;
} counts;

/* Disks as power cuts left them, taken while the work continues. */
typedef struct collector {
    pthread_mutex_t lock;
    fsdp_io *sim;
    test_sampler *sampler;
    int survivals;
    unsigned after; /* only right after such calls */
    fsdp_io_call last;
    fsdp_io **disks;
    int count;
    int64_t points, taken;
} collector;

static uint64_t next_seed;

static void collect(void *user, int64_t n, fsdp_io_call call, const char *path)
{
    collector *c = user;
    (void)path;
    pthread_mutex_lock(&c->lock);
    bool is_point = c->after == 0 || (n > 1 && c->after >> c->last & 1);
    c->last = call;
    c->points += is_point;
    if (is_point && test_sampler_takes(c->sampler)) {
        c->taken++;
        for (int i = 0; i < c->survivals && c->count < MOST_DISKS; i++)
            c->disks[c->count++] = fsdp_sim_crash(c->sim, ++next_seed);
    }
    pthread_mutex_unlock(&c->lock);
}

/* After a power cut the system starts again, and has done so long after it. */
static void start_again(void)
{
    static int64_t starts;
    static fsdp_process process;
    fsdp_process_self(NULL, &process);
    starts++;
    snprintf(process.boot, sizeof process.boot, "start %" PRId64, starts);
    host = (fsdp_host){.self = &process, .clock_offset = starts * (FSDP_LEASE_SECONDS + 1)};
}

static void tell(const scenario *s, const char *when, const char *what, const fsdp_error *err)
{
    fprintf(stderr, "%s, power cut %s: %s: %s\n", s->name, when, what, err->text);
}

/* Takes the disk over. `least`: the state before the save, or the one that was reported. */
static void judge(const scenario *s, fsdp_io *disk, const char *when, scenario_found least,
                  counts *c)
{
    fsdp_error err = {0};
    c->disks++;
    start_again();
    scenario_found found = scenario_look(s, disk, ROOT, &err);
    c->old += found == FOUND_OLD || found == FOUND_NOTHING;
    c->new += found == FOUND_NEW;
    c->later += found == FOUND_LATER;
    c->wrong += found == FOUND_WRONG;
    if (!scenario_is_whole(s, found)) {
        c->lost++;
        tell(s, when, "lost", &err);
    } else if (found < least) {
        c->undurable++;
        tell(s, when, "what was saved is not there any more", &err);
    }
    if (scenario_again(s, disk, ROOT, &err) != FSDP_OK) {
        c->stuck++;
        tell(s, when, "the next save fails", &err);
    }
    fsdp_sim_free(disk);
}

typedef fsdp_status (*scenario_step)(const scenario *s, fsdp_io *io, const char *root,
                                     fsdp_error *err);

/* Runs a step on the disk, and leaves in `c` what cuts during it would leave. */
static fsdp_status run_collecting(const scenario *s, fsdp_io *sim, scenario_step step, collector *c,
                                  fsdp_error *err)
{
    fsdp_io *io = NULL;
    c->sim = sim;
    FSDP_TRY(fsdp_io_fault_create(sim, NULL, &io, err));
    fsdp_io_fault_set_trace(io, collect, c);
    fsdp_status st = step(s, io, ROOT, err);
    fsdp_io_fault_free(io);
    return st;
}

static bool collector_init(collector *c, test_sampler *sampler)
{
    *c = (collector){.sampler = sampler,
                     .survivals = SURVIVALS,
                     .disks = malloc(MOST_DISKS * sizeof(fsdp_io *))};
    pthread_mutex_init(&c->lock, NULL);
    return c->disks;
}

static void collector_release(collector *c)
{
    pthread_mutex_destroy(&c->lock);
    free(c->disks);
}

/* The save after a cut is cut, too. */
static void cut_recovery(const scenario *s, fsdp_io *disk, counts *all)
{
    collector c;
    fsdp_error err = {0};
    test_sampler some = {.every = 24};
    fsdp_io *copy = fsdp_sim_crash(disk, 1);
    if (!collector_init(&c, &some) || !copy)
        abort();
    start_again();
    scenario_found least = scenario_look(s, copy, ROOT, &err);
    if (run_collecting(s, copy, scenario_again, &c, &err) != FSDP_OK)
        tell(s, "once", "the next save fails", &err);
    for (int i = 0; i < c.count; i++)
        judge(s, c.disks[i], "again while the next save ran", least, all);
    all->nested += c.count;
    fsdp_sim_free(copy);
    collector_release(&c);
}

static void judge_all(const scenario *s, collector *c, counts *all)
{
    for (int i = 0; i < c->count; i++) {
        if (all->disks % NESTED_EVERY == 0)
            cut_recovery(s, c->disks[i], all);
        judge(s, c->disks[i], "while it ran", FOUND_NOTHING, all);
    }
}

static bool prepare(const scenario *s, fsdp_io **sim_out, fsdp_error *err)
{
    if (fsdp_sim_create(0, sim_out, err) != FSDP_OK)
        return false;
    (*sim_out)->host = &host;
    return fsdp_io_mkdir(*sim_out, ROOT, err) == FSDP_OK &&
           fsdp_io_sync_dir(*sim_out, "/", err) == FSDP_OK &&
           scenario_prepare(s, *sim_out, ROOT, err) == FSDP_OK;
}

static bool run_scenario(const scenario *s, test_sampler *sampler, counts *all)
{
    fsdp_io *sim = NULL;
    collector c;
    fsdp_error err = {0};
    host = (fsdp_host){0};
    if (!collector_init(&c, sampler))
        return false;
    bool ok = prepare(s, &sim, &err) && run_collecting(s, sim, scenario_act, &c, &err) == FSDP_OK;
    if (!ok)
        fprintf(stderr, "%s: %s\n", s->name, err.text);
    all->points += c.points;
    all->taken += c.taken;
    judge_all(s, &c, all);
    int reported = sampler->every > 1 && !s->format ? SURVIVALS : SURVIVALS_REPORTED;
    for (int i = 0; ok && i < reported; i++)
        judge(s, fsdp_sim_crash(sim, ++next_seed), "after it", FOUND_NEW, all);
    fsdp_sim_free(sim);
    collector_release(&c);
    return ok;
}

/* --- killed, and then cut ----------------------------------------------------------------------- */

static const unsigned renames = 1u << FSDP_CALL_RENAME | 1u << FSDP_CALL_EXCHANGE;
static const unsigned changes = 1u << FSDP_CALL_RENAME | 1u << FSDP_CALL_EXCHANGE |
                                1u << FSDP_CALL_UNLINK | 1u << FSDP_CALL_RMDIR;

/* The calls of an act that come right after a rename. */
typedef struct kill_points {
    int64_t at[64];
    int count;
    bool was_rename;
} kill_points;

static void note_rename(void *user, int64_t n, fsdp_io_call call, const char *path)
{
    kill_points *points = user;
    (void)path;
    if (points->was_rename && points->count < 64)
        points->at[points->count++] = n;
    points->was_rename = renames >> call & 1;
}

/* A disk whose file system cannot exchange two names, when that is wanted. */
static fsdp_io *limit_disk(fsdp_io *sim, bool exchanges)
{
    fsdp_fault_plan plan = {.calls = 1u << FSDP_CALL_EXCHANGE,
                            .at = exchanges ? 0 : 1,
                            .forever = true,
                            .action = FSDP_FAULT_ERRNO,
                            .errnum = EINVAL};
    fsdp_io *io = NULL;
    return fsdp_io_fault_create(sim, &plan, &io, NULL) == FSDP_OK ? io : NULL;
}

/* Acts on the disk until a call from which on all fail, as good as a kill; 0: none. */
static void act_until(const scenario *s, fsdp_io *sim, bool exchanges, int64_t at,
                      kill_points *points)
{
    fsdp_fault_plan plan = {.at = at, .forever = true, .action = FSDP_FAULT_ERRNO, .errnum = EIO};
    fsdp_io *disk = limit_disk(sim, exchanges), *io = NULL;
    if (!disk || fsdp_io_fault_create(disk, &plan, &io, NULL) != FSDP_OK)
        abort();
    if (points)
        fsdp_io_fault_set_trace(io, note_rename, points);
    (void)scenario_act(s, io, ROOT, NULL);
    fsdp_io_fault_free(io);
    fsdp_io_fault_free(disk);
}

static void cut_after_kill(const scenario *s, fsdp_io *sim, bool exchanges, counts *all)
{
    collector c;
    fsdp_error err = {0};
    test_sampler every = {.every = 1};
    fsdp_io *disk = limit_disk(sim, exchanges), *io = NULL;
    if (!disk || !collector_init(&c, &every) ||
        fsdp_io_fault_create(disk, NULL, &io, NULL) != FSDP_OK)
        abort();
    c.sim = sim;
    c.survivals = SURVIVALS_KILLED;
    c.after = changes;
    fsdp_io_fault_set_trace(io, collect, &c);
    start_again();
    if (scenario_again(s, io, ROOT, &err) != FSDP_OK) {
        all->stuck++;
        tell(s, "not yet", "the next save after a kill fails", &err);
    }
    for (int i = 0; i < c.count; i++)
        judge(s, c.disks[i], "while the next one ran after a kill", FOUND_NOTHING, all);
    fsdp_io_fault_free(io);
    fsdp_io_fault_free(disk);
    collector_release(&c);
}

/* Ranks and compression change nothing about renames. Without an exchange a directory of another
 * program has no name between two renames. */
static bool may_be_killed(const scenario *s, bool exchanges)
{
    if (!s->format)
        return s->work != WORK_FRESH && s->world == 1 && !s->compress;
    bool is_directory = strcmp(s->format, "dcp") == 0 || strcmp(s->format, "hf") == 0;
    return !s->is_new && (exchanges || !is_directory);
}

static bool run_kills(const scenario *s, bool exchanges, test_sampler *sampler, counts *all)
{
    fsdp_io *sim = NULL;
    fsdp_error err = {0};
    kill_points points = {0};
    if (!may_be_killed(s, exchanges))
        return true;
    host = (fsdp_host){0};
    if (!prepare(s, &sim, &err)) {
        fprintf(stderr, "%s: %s\n", s->name, err.text);
        return false;
    }
    fsdp_io *once = fsdp_sim_crash(sim, 1);
    act_until(s, once, exchanges, 0, &points);
    fsdp_sim_free(once);
    for (int i = 0; i < points.count; i++) {
        all->points++;
        if (!test_sampler_takes(sampler))
            continue;
        all->taken++;
        fsdp_io *killed = fsdp_sim_crash(sim, 1);
        act_until(s, killed, exchanges, points.at[i], NULL);
        cut_after_kill(s, killed, exchanges, all);
        fsdp_sim_free(killed);
    }
    fsdp_sim_free(sim);
    return true;
}

/* --- all ---------------------------------------------------------------------------------------- */

/* Each disk is in one of the counts. */
static bool adds_up(const counts *c)
{
    return c->old + c->new + c->later + c->wrong == c->disks;
}

static bool report(bool are_all, int64_t every, const counts *c)
{
    matrix_row row = {"power cut at a storage call, simulated disk", "points", c->taken,
                      are_all ? c->points : 0, every};
    bool is_true = matrix_row_print(
        &row,
        ", %" PRId64 " disks, %" PRId64 " of them cut again during recovery: old %" PRId64
        ", new %" PRId64 ", of the next save %" PRId64 " | lost %" PRId64
        ", reported and not there %" PRId64 ", next save fails %" PRId64,
        c->disks, c->nested, c->old, c->new, c->later, c->lost, c->undurable, c->stuck);
    return is_true && adds_up(c) && c->taken > 0 && c->lost + c->undurable + c->stuck == 0;
}

static bool report_kills(bool are_all, int64_t every, const counts *c)
{
    matrix_row row = {"killed after a rename, then a power cut during the next save", "points",
                      c->taken, are_all ? c->points : 0, every};
    bool is_true = matrix_row_print(&row,
                                    ", %" PRId64 " disks: old %" PRId64 ", new %" PRId64
                                    ", of the next save %" PRId64 " | lost %" PRId64
                                    ", next save fails %" PRId64,
                                    c->disks, c->old, c->new, c->later, c->lost, c->stuck);
    return is_true && adds_up(c) && c->lost + c->stuck == 0;
}

/* usage: power_cut cuts|kills [WORDS] */
int main(int argc, char **argv)
{
    counts c = {0};
    scenario s;
    bool kills = argc > 1 && strcmp(argv[1], "kills") == 0, ok = true;
    test_sampler sampler = {.every = test_sample(kills ? USUAL_KILLS : USUAL_SAMPLE)};
    for (int i = 0; scenario_next(&i, argc > 2 ? argv[2] : NULL, &s);) {
        if (!kills)
            ok = run_scenario(&s, &sampler, &c) && ok;
        for (int exchanges = 0; kills && exchanges < 2; exchanges++)
            ok = run_kills(&s, exchanges, &sampler, &c) && ok;
    }
    return (kills ? report_kills : report)(argc < 3, sampler.every, &c) && ok ? 0 : 1;
}
