/*
 * Failing allocations: the n-th one of a save, conversion, load, verification and listing fails,
 * once and from then on, for every n. Each ends in success or in a clean error; the old state stays;
 * under AddressSanitizer nothing leaks.
 */
#include "base/core/mem.h"
#include "tests/fault/scenario.h"
#include "tests/support/matrix_row.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { USUAL_SAMPLE = 80 };

typedef struct counts {
    int64_t points, all, succeeded, failed, wrong, left;
} counts;

static char folder[100], golden[SCENARIO_PATH], work[SCENARIO_PATH];

static int64_t allocations = -1; /* made while they could fail; -1: they still can */

static void begin_failing(int64_t at, bool forever)
{
    allocations = -1;
    fsdp_mem_fail_after(at, forever);
}

/* Before the test looks at what it got, which takes memory, too. Returns how many were made. */
static int64_t end_failing(void)
{
    if (allocations < 0)
        allocations = fsdp_mem_fail_after(-1, false);
    return allocations;
}

static void copy_tree(const char *from, const char *to)
{
    char command[2 * SCENARIO_PATH + 40];
    scenario_remove(to);
    int length = snprintf(command, sizeof command, "cp -a '%s' '%s'", from, to);
    if (length < 0 || (size_t)length >= sizeof command || system(command) != 0)
        abort();
}

static void tell(const char *what, int64_t at, bool forever, const char *text)
{
    fprintf(stderr, "%s, allocation %" PRId64 "%s: %s\n", what, at,
            forever ? " and all after it" : "", text);
}

/* --- saving and converting ---------------------------------------------------------------------- */

static void fail_save(const scenario *s, int64_t at, bool forever, counts *c)
{
    fsdp_error err = {0}, why = {0};
    copy_tree(golden, work);
    begin_failing(at, forever);
    fsdp_status st = scenario_act(s, NULL, work, &err);
    bool reached = end_failing() > at;
    scenario_found found = scenario_look(s, fsdp_io_posix(), work, &why);
    c->points += reached;
    c->succeeded += reached && st == FSDP_OK;
    c->failed += st != FSDP_OK;
    /* ranks that cannot tell each other the result any more cannot take it back either */
    bool untold = s->world > 1 && found == FOUND_NEW &&
                  strstr(err.text, "a message to another rank during fsdp_");
    bool ok = st == FSDP_OK ? found == FOUND_NEW
                            : (found != FOUND_NEW || untold) && scenario_is_whole(s, found) &&
                                  err.text[0] && st != FSDP_ERR_INTERNAL;
    if (!ok) {
        c->wrong++;
        tell(s->name, at, forever, err.text);
        tell("and then", at, forever, why.text);
    }
    if (st != FSDP_OK && !forever && scenario_leftovers(s, fsdp_io_posix(), work) > 0) {
        c->left++;
        tell(s->name, at, forever, "left something half-written");
    }
    if (reached && scenario_again(s, fsdp_io_posix(), work, &why) != FSDP_OK) {
        c->wrong++;
        tell("the next save", at, forever, why.text);
    }
}

/* 0 when it fails. */
static int64_t count_allocations(const scenario *s)
{
    fsdp_error err = {0};
    copy_tree(golden, work);
    begin_failing(INT64_MAX, false);
    fsdp_status st = scenario_act(s, NULL, work, &err);
    int64_t made = end_failing();
    if (st != FSDP_OK)
        fprintf(stderr, "%s: %s\n", s->name, err.text);
    return st == FSDP_OK ? made : 0;
}

static bool run_saves(const scenario *s, test_sampler *sampler, counts *c)
{
    fsdp_error err = {0};
    scenario_remove(golden);
    if (mkdir(golden, 0777) < 0 || scenario_prepare(s, fsdp_io_posix(), golden, &err) != FSDP_OK) {
        fprintf(stderr, "%s: %s\n", s->name, err.text);
        return false;
    }
    int64_t made = count_allocations(s);
    c->all += 2 * made;
    for (int forever = 0; forever < 2; forever++)
        for (int64_t at = 0; at < made; at++)
            if (test_sampler_takes(sampler))
                fail_save(s, at, forever, c);
    return made > 0;
}

/* --- reading ------------------------------------------------------------------------------------ */

typedef struct reading {
    const char *name;
    fsdp_status (*read)(const char *dir, fsdp_error *err);
} reading;

enum { MOST_RANKS = 3 };

typedef struct load_job {
    const char *dir;
    test_state states[MOST_RANKS];
} load_job;

static fsdp_status load_rank(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    load_job *job = user;
    test_state *state = &job->states[fsdp_ctl_rank(ctl)];
    fsdp_status st = test_state_create(&(state_part){.model = STATE_EVERYTHING,
                                                     .world = fsdp_ctl_size(ctl),
                                                     .rank = fsdp_ctl_rank(ctl),
                                                     .variant = 4},
                                       false, 0, state, err);
    FSDP_TRY(fsdp_ctl_agree(ctl, st, err));
    return fsdp_sd_load(state->sd, ctl, job->dir, NULL, err);
}

static fsdp_status read_by_ranks(int world, const char *dir, fsdp_error *err)
{
    load_job job = {.dir = dir};
    fsdp_status st = fsdp_ctl_run_threads(world, load_rank, &job, err);
    end_failing();
    for (int rank = 0; rank < world; rank++) {
        if (st == FSDP_OK && test_state_differing(&job.states[rank], 7) > 0)
            st = fsdp_fail(err, FSDP_ERR_INTERNAL, "loaded other bytes");
        test_state_release(&job.states[rank]);
    }
    return st;
}

static fsdp_status load_by_one(const char *dir, fsdp_error *err)
{
    return read_by_ranks(1, dir, err);
}

static fsdp_status load_by_three(const char *dir, fsdp_error *err)
{
    return read_by_ranks(3, dir, err);
}

static fsdp_status load_full(const char *dir, fsdp_error *err)
{
    fsdp_sd *full = NULL;
    FSDP_TRY(fsdp_load_full(dir, NULL, &full, err));
    end_failing();
    int64_t differing = test_sd_differing(full, 0, 7);
    fsdp_sd_free(full);
    return differing == 0 ? FSDP_OK : fsdp_fail(err, FSDP_ERR_INTERNAL, "loaded other bytes");
}

/* Damage that is not there would be as wrong as damage that is not seen. */
static fsdp_status verify(const char *dir, fsdp_error *err)
{
    fsdp_verify_opts deep = {.level = FSDP_VERIFY_DEEP};
    fsdp_status st = fsdp_checkpoint_verify(dir, &deep, NULL, err);
    return st == FSDP_DIFFERS
               ? fsdp_fail(err, FSDP_ERR_INTERNAL, "a good checkpoint is called damaged")
               : st;
}

static fsdp_status open_and_read(const char *dir, fsdp_error *err)
{
    fsdp_checkpoint *checkpoint = NULL;
    fsdp_box whole = {0};
    char scalar[16];
    FSDP_TRY(fsdp_checkpoint_open(dir, NULL, &checkpoint, err));
    int64_t at = fsdp_sd_find(fsdp_checkpoint_sd(checkpoint), FSDP_NAME("scalar"));
    fsdp_status st =
        fsdp_checkpoint_read(checkpoint, (size_t)at, &whole, scalar, FSDP_CHECK_BLOCKS, err);
    fsdp_checkpoint_close(checkpoint);
    return st;
}

/* The run above it. */
static fsdp_status find_latest(const char *dir, fsdp_error *err)
{
    char run[SCENARIO_PATH], *path = NULL;
    scenario_path(run, "%s", dir);
    *strrchr(run, '/') = '\0';
    FSDP_TRY(fsdp_run_latest(run, FSDP_VERIFY_DATA, NULL, NULL, &path, err));
    fsdp_status st =
        strcmp(path, dir) == 0 ? FSDP_OK : fsdp_fail(err, FSDP_ERR_INTERNAL, "took '%s'", path);
    fsdp_string_free(path);
    return st;
}

static void fail_reading(const reading *r, const char *dir, int64_t at, bool forever, counts *c)
{
    fsdp_error err = {0};
    begin_failing(at, forever);
    fsdp_status st = r->read(dir, &err);
    bool reached = end_failing() > at;
    c->points += reached;
    c->succeeded += reached && st == FSDP_OK;
    c->failed += st != FSDP_OK;
    /* libhdf5's process inherits the count and continues with it by itself */
    bool in_child = !reached && st == FSDP_ERR_LIMIT;
    if (st != FSDP_OK && ((!reached && !in_child) || st == FSDP_ERR_INTERNAL || !err.text[0])) {
        c->wrong++;
        tell(r->name, at, forever, err.text);
    }
}

static fsdp_status save_rank(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    test_state state;
    fsdp_save_opts opts = {0};
    opts.compress = true;
    FSDP_TRY(test_state_create(&(state_part){.model = STATE_EVERYTHING,
                                             .world = fsdp_ctl_size(ctl),
                                             .rank = fsdp_ctl_rank(ctl),
                                             .variant = 3},
                               true, 7, &state, err));
    fsdp_status st = fsdp_run_save(state.sd, ctl, user, 7, &opts, err);
    test_state_release(&state);
    return st;
}

static bool run_readings(const char *only, test_sampler *sampler, counts *c)
{
    static const reading readings[] = {
        {"load by one rank", load_by_one},  {"load by three ranks", load_by_three},
        {"load the full state", load_full}, {"verify", verify},
        {"open and read", open_and_read},   {"the newest of a run", find_latest},
    };
    char run[SCENARIO_PATH], dir[SCENARIO_PATH];
    fsdp_error err = {0};
    scenario_path(run, "%s/run", folder);
    scenario_path(dir, "%s/run/step-00000007", folder);
    if (fsdp_ctl_run_threads(2, save_rank, run, &err) != FSDP_OK) {
        fprintf(stderr, "%s\n", err.text);
        return false;
    }
    for (size_t i = 0; i < sizeof readings / sizeof readings[0]; i++) {
        if (only && !strstr(readings[i].name, only))
            continue;
        begin_failing(INT64_MAX, false);
        fsdp_status st = readings[i].read(dir, &err);
        int64_t made = end_failing();
        c->all += 2 * made;
        for (int forever = 0; forever < 2 && st == FSDP_OK; forever++)
            for (int64_t at = 0; at < made; at++)
                if (test_sampler_takes(sampler))
                    fail_reading(&readings[i], dir, at, forever, c);
        if (st != FSDP_OK) {
            fprintf(stderr, "%s: %s\n", readings[i].name, err.text);
            return false;
        }
    }
    return true;
}

static bool report_saves(int64_t every, bool are_all, const counts *c)
{
    matrix_row row = {"n-th allocation of a save or conversion fails", "points", c->points,
                      are_all ? c->all : 0, every};
    bool is_true = matrix_row_print(&row,
                                    ": worked %" PRId64 ", failed cleanly %" PRId64
                                    " | wrong %" PRId64 ", leftovers %" PRId64,
                                    c->succeeded, c->failed, c->wrong, c->left);
    return is_true && (c->points > 0 || !are_all) && c->wrong + c->left == 0;
}

static bool report_readings(int64_t every, bool are_all, const counts *c)
{
    matrix_row row = {"n-th allocation of a load, verification or listing fails", "points",
                      c->points, are_all ? c->all : 0, every};
    bool is_true =
        matrix_row_print(&row, ": worked %" PRId64 ", failed cleanly %" PRId64 " | wrong %" PRId64,
                         c->succeeded, c->failed, c->wrong);
    return is_true && (c->points > 0 || !are_all) && c->wrong == 0;
}

int main(int argc, char **argv)
{
    scenario s;
    counts saves = {0}, reads = {0};
    const char *only = argc > 1 ? argv[1] : NULL;
    test_sampler of_saves = {.every = test_sample(USUAL_SAMPLE)}, of_reads = of_saves;
    if (!scenario_folder(folder, sizeof folder))
        return 1;
    scenario_path(golden, "%s/golden", folder);
    scenario_path(work, "%s/work", folder);
    bool ok = true;
    for (int i = 0; ok && scenario_next(&i, only, &s);)
        ok = s.world == 4 || run_saves(&s, &of_saves, &saves);
    ok = report_saves(of_saves.every, !only, &saves) && ok;
    ok = run_readings(only, &of_reads, &reads) && ok;
    ok = report_readings(of_reads.every, !only, &reads) && ok;
    scenario_remove(folder);
    return ok ? 0 : 1;
}
