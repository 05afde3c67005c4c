/*
 * Power cuts on the simulated disk: at every storage call of a save or conversion, several random
 * survivals of what was not synced, each found by the next start of the system. Every one holds the
 * old state or the new one bit for bit, and the next save works. After "saved" was reported only the
 * new one will do. From some of them the recovery itself is cut again.
 */
#include "tests/support/disk/io_fault.h"
#include "tests/support/disk/io_sim.h"
#include "statedict/commit/lease_internal.h"
#include "tests/fault/scenario.h"

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
    MOST_DISKS = 100000
};

#define ROOT "/disk"

typedef struct counts {
    int64_t points, disks, nested, old, new, lost, undurable, stuck;
} counts;

/* Disks as power cuts left them, taken while the work goes on. */
typedef struct collector {
    pthread_mutex_t lock;
    fsdp_io *sim;
    test_sampler *sampler;
    fsdp_io **disks;
    int count;
    int64_t points;
} collector;

static uint64_t next_seed;

static void collect(void *user, int64_t n, fsdp_io_call call, const char *path)
{
    collector *c = user;
    (void)n;
    (void)call;
    (void)path;
    pthread_mutex_lock(&c->lock);
    if (test_sampler_takes(c->sampler)) {
        c->points++;
        for (int i = 0; i < SURVIVALS && c->count < MOST_DISKS; i++)
            c->disks[c->count++] = fsdp_sim_crash(c->sim, ++next_seed);
    }
    pthread_mutex_unlock(&c->lock);
}

/* After a power cut the system starts anew, and has done so long after it. */
static void start_again(void)
{
    static int64_t starts;
    fsdp_process process;
    fsdp_lease_pretend(NULL, 0);
    fsdp_process_self(&process);
    starts++;
    snprintf(process.boot, sizeof process.boot, "start %" PRId64, starts);
    fsdp_lease_pretend(&process, starts * (FSDP_LEASE_SECONDS + 1));
}

static void tell(const scenario *s, const char *when, const char *what, const fsdp_error *err)
{
    fprintf(stderr, "%s, power cut %s: %s: %s\n", s->name, when, what, err->text);
}

/* Takes the disk over. What was there before, or was reported, is the least that must be found. */
static void judge(const scenario *s, fsdp_io *disk, const char *when, scenario_found least,
                  counts *c)
{
    fsdp_error err = {0};
    c->disks++;
    start_again();
    scenario_found found = scenario_look(s, disk, ROOT, &err);
    c->old += found == FOUND_OLD || found == FOUND_NOTHING;
    c->new += found == FOUND_NEW;
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
    *c = (collector){.sampler = sampler, .disks = malloc(MOST_DISKS * sizeof(fsdp_io *))};
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
    return fsdp_sim_create(0, sim_out, err) == FSDP_OK &&
           fsdp_io_mkdir(*sim_out, ROOT, err) == FSDP_OK &&
           fsdp_io_sync_dir(*sim_out, "/", err) == FSDP_OK &&
           scenario_prepare(s, *sim_out, ROOT, err) == FSDP_OK;
}

static bool run_scenario(const scenario *s, test_sampler *sampler, counts *all)
{
    fsdp_io *sim = NULL;
    collector c;
    fsdp_error err = {0};
    fsdp_lease_pretend(NULL, 0);
    if (!collector_init(&c, sampler))
        return false;
    bool ok = prepare(s, &sim, &err) && run_collecting(s, sim, scenario_act, &c, &err) == FSDP_OK;
    if (!ok)
        fprintf(stderr, "%s: %s\n", s->name, err.text);
    all->points += c.points;
    judge_all(s, &c, all);
    int reported = sampler->every > 1 ? SURVIVALS : SURVIVALS_REPORTED;
    for (int i = 0; ok && i < reported; i++)
        judge(s, fsdp_sim_crash(sim, ++next_seed), "after it", FOUND_NEW, all);
    fsdp_sim_free(sim);
    collector_release(&c);
    return ok;
}

int main(void)
{
    counts c = {0};
    test_sampler sampler = {.every = test_sample(USUAL_SAMPLE)};
    bool ok = true;
    for (int i = 0; i < SCENARIO_COUNT; i++) {
        scenario s = scenario_at(i);
        ok = run_scenario(&s, &sampler, &c) && ok;
    }
    printf("| power cut at a storage call, simulated disk | %" PRId64 " points (1 of %" PRId64
           "), %" PRId64 " disks, %" PRId64 " of them cut again during recovery: old %" PRId64
           ", new %" PRId64 " | lost %" PRId64 ", reported and not there %" PRId64
           ", next save fails %" PRId64 " |\n",
           c.points, sampler.every, c.disks, c.nested, c.old, c.new, c.lost, c.undurable, c.stuck);
    return ok && c.points > 0 && c.lost == 0 && c.undurable == 0 && c.stuck == 0 ? 0 : 1;
}
