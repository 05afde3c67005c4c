/*
 * Failing storage calls: at every call of a save, conversion or load, each of several errnos, once
 * and from then on, and transfers that fall short. The work either succeeds and is durable, or fails
 * with a message that names a path and leaves the old state untouched and nothing half-written. A
 * write, sync or close of a staged file that failed is never reported as saved.
 */
#include "tests/support/disk/io_fault.h"
#include "tests/support/disk/io_sim.h"
#include "statedict/commit/lease_internal.h"
#include "tests/fault/scenario.h"
#include "tests/support/matrix_row.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { USUAL_SAMPLE = 200, CUTS = 3, MOST_CALLS = 2000 };

#define ROOT "/disk"

typedef struct counts {
    int64_t points, all, succeeded, failed, lost, silent, bare, left, stuck;
} counts;

/* One way to fail. */
typedef struct fault_kind {
    const char *name;
    fsdp_fault_action action;
    int errnum;
    bool forever;
    size_t part;
} fault_kind;

static const fault_kind kinds[] = {
    {"EIO", FSDP_FAULT_ERRNO, EIO, false, 0},
    {"EIO from then on", FSDP_FAULT_ERRNO, EIO, true, 0},
    {"ENOSPC", FSDP_FAULT_ERRNO, ENOSPC, false, 0},
    {"ENOSPC from then on", FSDP_FAULT_ERRNO, ENOSPC, true, 0},
    {"EDQUOT", FSDP_FAULT_ERRNO, EDQUOT, false, 0},
    {"EDQUOT from then on", FSDP_FAULT_ERRNO, EDQUOT, true, 0},
    {"EROFS", FSDP_FAULT_ERRNO, EROFS, false, 0},
    {"EROFS from then on", FSDP_FAULT_ERRNO, EROFS, true, 0},
    {"EMFILE", FSDP_FAULT_ERRNO, EMFILE, false, 0},
    {"EMFILE from then on", FSDP_FAULT_ERRNO, EMFILE, true, 0},
    {"short by half", FSDP_FAULT_SHORT, 0, false, 0},
    {"short from then on", FSDP_FAULT_SHORT, 0, true, 7},
};
enum { KIND_COUNT = sizeof kinds / sizeof kinds[0] };

enum { MOST_FILES = 64 };

/* A run of the work with one fault in it. */
typedef struct trial {
    const scenario *scenario;
    const fault_kind *kind;
    int64_t at;
    fsdp_io_call call; /* that the fault befell */
    char path[SCENARIO_PATH];
    bool was_written; /* the last call of that file before was a write or sync */
    struct {
        char path[SCENARIO_PATH];
        fsdp_io_call last;
    } files[MOST_FILES];
    int file_count;
    fsdp_status status;
    fsdp_error err;
} trial;

static pthread_mutex_t noting = PTHREAD_MUTEX_INITIALIZER;

static void note_call(void *user, int64_t n, fsdp_io_call call, const char *path)
{
    trial *t = user;
    int i = 0;
    pthread_mutex_lock(&noting);
    while (i < t->file_count && strcmp(t->files[i].path, path) != 0)
        i++;
    if (n == t->at) {
        t->call = call;
        scenario_path(t->path, "%s", path);
        t->was_written = i < t->file_count && (t->files[i].last == FSDP_CALL_PWRITE ||
                                               t->files[i].last == FSDP_CALL_SYNC);
    }
    if (i == t->file_count && i < MOST_FILES)
        scenario_path(t->files[t->file_count++].path, "%s", path);
    if (i < MOST_FILES)
        t->files[i].last = call;
    pthread_mutex_unlock(&noting);
}

static void tell(const trial *t, const char *what, const char *text)
{
    fprintf(stderr, "%s, %s at call %" PRId64 " (%s of '%s'): %s: %s\n", t->scenario->name,
            t->kind->name, t->at, fsdp_io_call_name(t->call), t->path, what, text);
}

static void run_trial(trial *t, fsdp_io *disk)
{
    fsdp_fault_plan plan = {.at = t->at,
                            .forever = t->kind->forever,
                            .action = t->kind->action,
                            .errnum = t->kind->errnum,
                            .part = t->kind->part};
    fsdp_io *io = NULL;
    if (fsdp_io_fault_create(disk, &plan, &io, NULL) != FSDP_OK)
        abort();
    fsdp_io_fault_set_trace(io, note_call, t);
    t->err = (fsdp_error){0};
    t->status = scenario_act(t->scenario, io, ROOT, &t->err);
    fsdp_io_fault_free(io);
}

/* --- checking the result ------------------------------------------------------------------------ */

static bool befell_what_is_saved(const trial *t)
{
    unsigned calls = 1u << FSDP_CALL_PWRITE | 1u << FSDP_CALL_SYNC | 1u << FSDP_CALL_SYNC_DIR;
    if (t->was_written && !strstr(t->path, "/.saving")) /* its text is nothing that is saved */
        calls |= 1u << FSDP_CALL_CLOSE;
    return t->kind->action == FSDP_FAULT_ERRNO && calls >> t->call & 1 &&
           strstr(t->path, ".tmp-") && !strstr(t->path, ".lock") &&
           !strstr(t->path, "/.resume"); /* nor are the notes for --resume */
}

/* Reported as saved: it is there, also after the power was cut at once. */
static void judge_success(const trial *t, fsdp_io *disk, counts *c)
{
    fsdp_error why = {0};
    bool there = scenario_look(t->scenario, disk, ROOT, &why) == FOUND_NEW;
    c->succeeded++;
    for (int i = 0; i < CUTS && there; i++) {
        fsdp_io *after = fsdp_sim_crash(disk, (uint64_t)(t->at * CUTS + i));
        there = after && scenario_look(t->scenario, after, ROOT, &why) == FOUND_NEW;
        fsdp_sim_free(after);
    }
    if (!there || befell_what_is_saved(t)) {
        c->silent++;
        tell(t, "reported as saved", why.text);
    }
}

/* When calls fail from then on, taking back what was published fails, too. */
static void judge_failure(const trial *t, fsdp_io *disk, counts *c)
{
    fsdp_error why = {0};
    scenario_found found = scenario_look(t->scenario, disk, ROOT, &why);
    c->failed++;
    if (!scenario_is_whole(t->scenario, found) || (found == FOUND_NEW && !t->kind->forever)) {
        c->lost++;
        tell(t, found == FOUND_NEW ? "failed, and the new state is there" : "lost", why.text);
    }
    if (!strstr(t->err.text, ROOT) || t->status == FSDP_ERR_INTERNAL ||
        t->status != t->err.status) {
        c->bare++;
        tell(t, "the message is not good", t->err.text);
    }
    if (!t->kind->forever && scenario_leftovers(t->scenario, disk, ROOT) > 0) {
        c->left++;
        tell(t, "left something half-written", t->err.text);
    }
    if (t->kind->action == FSDP_FAULT_SHORT) {
        c->lost++;
        tell(t, "a short transfer is no failure", t->err.text);
    }
}

static void judge(const trial *t, fsdp_io *disk, counts *c)
{
    fsdp_error err = {0};
    c->points++;
    if (t->status == FSDP_OK)
        judge_success(t, disk, c);
    else
        judge_failure(t, disk, c);
    if (scenario_again(t->scenario, disk, ROOT, &err) != FSDP_OK) {
        c->stuck++;
        tell(t, "the next save fails", err.text);
    }
}

/* --- all points --------------------------------------------------------------------------------- */

static fsdp_io *prepare(const scenario *s)
{
    fsdp_io *sim = NULL;
    fsdp_error err = {0};
    if (fsdp_sim_create(0, &sim, &err) == FSDP_OK && fsdp_io_mkdir(sim, ROOT, &err) == FSDP_OK &&
        fsdp_io_sync_dir(sim, "/", &err) == FSDP_OK &&
        scenario_prepare(s, sim, ROOT, &err) == FSDP_OK)
        return sim;
    fprintf(stderr, "%s: %s\n", s->name, err.text);
    abort();
}

/* The calls after which nothing else notices that data is not on the disk. */
typedef struct last_calls {
    bool is_last[MOST_CALLS]; /* by number */
} last_calls;

static void note_last(void *user, int64_t n, fsdp_io_call call, const char *path)
{
    last_calls *last = user;
    bool is_source = strstr(path, "/from/") != NULL;
    unsigned calls = 1u << FSDP_CALL_SYNC | 1u << FSDP_CALL_SYNC_DIR | 1u << FSDP_CALL_CLOSE;
    if (n < MOST_CALLS)
        last->is_last[n] = (calls >> call & 1) && !is_source;
}

static int64_t count_calls(const scenario *s, fsdp_io *prepared, last_calls *last_out)
{
    fsdp_io *io = NULL, *disk = fsdp_sim_crash(prepared, 1);
    fsdp_error err = {0};
    *last_out = (last_calls){0};
    bool ok = disk && fsdp_io_fault_create(disk, NULL, &io, &err) == FSDP_OK;
    if (ok)
        fsdp_io_fault_set_trace(io, note_last, last_out);
    if (!ok || scenario_act(s, io, ROOT, &err) != FSDP_OK) {
        fprintf(stderr, "%s: %s\n", s->name, err.text);
        abort();
    }
    int64_t calls = fsdp_io_fault_calls(io);
    fsdp_io_fault_free(io);
    fsdp_sim_free(disk);
    return calls;
}

static void run_scenario(const scenario *s, test_sampler *sampler, counts *c)
{
    fsdp_io *prepared = prepare(s);
    last_calls last;
    int64_t calls = count_calls(s, prepared, &last);
    c->all += calls * KIND_COUNT;
    for (int64_t at = 1; at <= calls; at++) {
        for (int k = 0; k < KIND_COUNT; k++) {
            /* conversions have few of these calls: none is left out */
            bool is_always = s->format && k == 0 && at < MOST_CALLS && last.is_last[at];
            if (!test_sampler_takes(sampler) && !is_always)
                continue;
            trial t = {.scenario = s, .kind = &kinds[k], .at = at};
            fsdp_io *disk = fsdp_sim_crash(prepared, 1);
            if (!disk)
                abort();
            run_trial(&t, disk);
            judge(&t, disk, c);
            fsdp_sim_free(disk);
        }
    }
    fsdp_sim_free(prepared);
}

/* --- loading ------------------------------------------------------------------------------------ */

/* Loading changes nothing: it succeeds with the right bytes, or says why not. */
static void load_trial(trial *t, fsdp_io *disk, counts *c)
{
    fsdp_fault_plan plan = {.at = t->at,
                            .forever = t->kind->forever,
                            .action = t->kind->action,
                            .errnum = t->kind->errnum,
                            .part = t->kind->part};
    fsdp_io *io = NULL;
    fsdp_error why = {0};
    if (fsdp_io_fault_create(disk, &plan, &io, NULL) != FSDP_OK)
        abort();
    fsdp_io_fault_set_trace(io, note_call, t);
    scenario_found found = scenario_load(t->scenario, io, ROOT, &why);
    fsdp_io_fault_free(io);
    c->points++;
    c->succeeded += found == FOUND_OLD;
    c->failed += found == FOUND_NOTHING;
    if (fsdp_sim_unsynced(disk) > 0) {
        c->left++;
        tell(t, "something was changed", why.text);
    }
    bool must_work = t->kind->action == FSDP_FAULT_SHORT;
    if (found == FOUND_NOTHING && !strstr(why.text, ROOT)) {
        c->bare++;
        tell(t, "the message is not good", why.text);
    }
    if (found == FOUND_NEW || found == FOUND_WRONG || (must_work && found != FOUND_OLD)) {
        c->silent++;
        tell(t, "loaded something else", why.text);
    }
}

static void run_load(const scenario *s, test_sampler *sampler, counts *c)
{
    fsdp_io *written = prepare(s), *prepared = fsdp_sim_crash(written, 1), *io = NULL;
    if (!prepared || fsdp_io_fault_create(prepared, NULL, &io, NULL) != FSDP_OK)
        abort();
    scenario_load(s, io, ROOT, NULL);
    int64_t calls = fsdp_io_fault_calls(io);
    fsdp_io_fault_free(io);
    c->all += calls * KIND_COUNT;
    for (int64_t at = 1; at <= calls; at++) {
        for (int k = 0; k < KIND_COUNT; k++) {
            trial t = {.scenario = s, .kind = &kinds[k], .at = at};
            if (test_sampler_takes(sampler))
                load_trial(&t, prepared, c);
        }
    }
    fsdp_sim_free(prepared);
    fsdp_sim_free(written);
}

static bool report(const char *what, bool are_all, int64_t every, const counts *c)
{
    matrix_row row = {what, "points", c->points, are_all ? c->all : 0, every};
    bool is_true = matrix_row_print(
        &row,
        ": worked %" PRId64 ", failed cleanly %" PRId64 " | lost %" PRId64 ", silent %" PRId64
        ", bad messages %" PRId64 ", leftovers %" PRId64 ", next save fails %" PRId64,
        c->succeeded, c->failed, c->lost, c->silent, c->bare, c->left, c->stuck);
    return is_true && c->points > 0 && c->lost + c->silent + c->bare + c->left + c->stuck == 0;
}

/* Loading has nothing to lose, and leaves what it finds. */
static bool report_loads(bool are_all, int64_t every, const counts *c)
{
    matrix_row row = {"errno or short transfer at a storage call of a load", "points", c->points,
                      are_all ? c->all : 0, every};
    bool is_true = matrix_row_print(&row,
                                    ": worked %" PRId64 ", failed cleanly %" PRId64
                                    " | loaded something else %" PRId64 ", bad messages %" PRId64
                                    ", something was changed %" PRId64,
                                    c->succeeded, c->failed, c->silent, c->bare, c->left);
    return is_true && c->points > 0 && c->silent + c->bare + c->left == 0;
}

int main(int argc, char **argv)
{
    scenario s;
    counts saves = {0}, loads = {0};
    test_sampler of_saves = {.every = test_sample(USUAL_SAMPLE)}, of_loads = of_saves;
    for (int i = 0; scenario_next(&i, argc > 1 ? argv[1] : NULL, &s);) {
        run_scenario(&s, &of_saves, &saves);
        if (s.world <= 2 && (s.work == WORK_OVERWRITE || (s.format && !s.is_new)))
            run_load(&s, &of_loads, &loads);
    }
    bool ok = report("errno or short transfer at a storage call of a save or conversion", argc == 1,
                     of_saves.every, &saves);
    if (argc == 1 || loads.all > 0)
        ok = report_loads(argc == 1, of_loads.every, &loads) && ok;
    return ok ? 0 : 1;
}
