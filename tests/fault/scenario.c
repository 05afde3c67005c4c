/* The operations of the crash tests: see scenario.h. */
#include "tests/fault/scenario.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The seed of a state is also its step. */
enum { STEP_FIRST = 10, STEP_OLD = 20, STEP_NEW = 30, STEP_LATER = 40, STEP_LAST = 50 };

enum { SHARD_BYTES = 600 }; /* of hf: several files with an index */

static const char *const work_names[] = {"run", "overwrite", "convert", "fresh"};
static const char *const kind_names[] = {"sharded", "full", "local"};

static const struct {
    const char *name;
    bool has_values, has_bf16;
} formats[] = {{"dcp", true, true},   {"hf", false, true},   {"safetensors", false, true},
               {"torch", true, true}, {"npz", false, false}, {"hdf5", true, true}};
_Static_assert(SCENARIO_FOREIGN == 2 * sizeof formats / sizeof formats[0], "two of each format");

static scenario foreign_at(int number)
{
    scenario s = {.work = WORK_CONVERT,
                  .model = STATE_SMALL,
                  .world = 1,
                  .format = formats[number / 2].name,
                  .is_new = number % 2};
    if (strcmp(s.format, "dcp") == 0)
        s.world = 2;
    snprintf(s.name, sizeof s.name, "convert to %s%s", s.format, s.is_new ? ", a new one" : "");
    return s;
}

scenario scenario_at(int number)
{
    if (number >= SCENARIO_NATIVE)
        return foreign_at(number - SCENARIO_NATIVE);
    static const int worlds[] = {1, 2, 4};
    scenario s = {.work = (scenario_work)(number % WORK_COUNT),
                  .model = STATE_SMALL,
                  .world = worlds[number / WORK_COUNT % 3],
                  .kind = (fsdp_kind)(number / WORK_COUNT / 3 % 3),
                  .compress = number / WORK_COUNT / 9};
    snprintf(s.name, sizeof s.name, "%s, %s%s, %d rank%s", work_names[s.work], kind_names[s.kind],
             s.compress ? " compressed" : "", s.world, s.world == 1 ? "" : "s");
    return s;
}

bool scenario_next(int *number, const char *only, scenario *out)
{
    while (*number < SCENARIO_COUNT) {
        *out = scenario_at((*number)++);
        if (!only || strstr(out->name, only))
            return true;
    }
    return false;
}

/* --- one save, one load ------------------------------------------------------------------------- */

typedef struct save_work {
    const scenario *scenario;
    const char *path;
    bool in_run;
    uint64_t seed;
    fsdp_save_opts opts;
} save_work;

static fsdp_status save_rank(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    save_work *work = user;
    test_state state;
    int world = fsdp_ctl_size(ctl);
    fsdp_status st = test_state_create(&(state_part){.model = work->scenario->model,
                                                     .world = world,
                                                     .rank = fsdp_ctl_rank(ctl),
                                                     .variant = world},
                                       true, work->seed, &state, err);
    st = fsdp_ctl_agree(ctl, st, err);
    if (st == FSDP_OK && work->in_run)
        st = fsdp_run_save(state.sd, ctl, work->path, (int64_t)work->seed, &work->opts, err);
    else if (st == FSDP_OK)
        st = fsdp_sd_save(state.sd, ctl, work->path, &work->opts, err);
    test_state_release(&state);
    return st;
}

static fsdp_status save(const scenario *s, fsdp_io *io, const char *path, bool in_run, int world,
                        uint64_t seed, fsdp_error *err)
{
    static const fsdp_retention newest_two = {.keep_last = 2};
    save_work work = {.scenario = s, .path = path, .in_run = in_run, .seed = seed};
    work.opts = (fsdp_save_opts){0};
    work.opts.kind = s->kind;
    work.opts.compress = s->compress;
    work.opts.overwrite = !in_run;
    work.opts.retain = in_run ? &newest_two : NULL;
    work.opts.threads = 1 + world % 2;
    work.opts.access.disk = io;
    return fsdp_ctl_run_threads(world, save_rank, &work, err);
}

static int64_t step_of(const fsdp_sd *sd)
{
    int64_t at = fsdp_sd_find(sd, FSDP_NAME("step"));
    return at < 0 ? -1 : fsdp_sd_at(sd, (size_t)at)->value.as.i64;
}

/* *step_out becomes the seed of the state that is there; FSDP_DIFFERS when it is not all of one. */
static fsdp_status load(const scenario *s, fsdp_io *io, const char *path, int64_t *step_out,
                        fsdp_error *err)
{
    test_state state;
    fsdp_ctl *self = NULL;
    fsdp_load_opts opts = {.access.disk = io, .threads = 1};
    FSDP_TRY(test_state_create(&(state_part){.model = s->model, .world = 1, .rank = 0}, false, 0,
                               &state, err));
    fsdp_status st = fsdp_ctl_self(&self, err);
    if (st == FSDP_OK)
        st = fsdp_sd_load(state.sd, self, path, &opts, err);
    if (st == FSDP_OK) {
        *step_out = step_of(state.sd);
        int64_t differing = test_state_differing(&state, (uint64_t)*step_out);
        if (differing > 0)
            st = fsdp_fail(err, FSDP_DIFFERS,
                           "'%s' says that it is step %lld and has %lld other bytes", path,
                           (long long)*step_out, (long long)differing);
    }
    fsdp_ctl_free(self);
    test_state_release(&state);
    return st;
}

static const char *in(const char *root, const char *name, char *path)
{
    return scenario_path(path, "%s/%s", root, name);
}

/* --- the three phases --------------------------------------------------------------------------- */

bool scenario_is_fresh(const scenario *s)
{
    return s->work == WORK_FRESH || s->is_new;
}

static fsdp_status convert_to(const scenario *s, fsdp_io *io, const char *from, const char *to,
                              fsdp_error *err)
{
    static const char *const drops[] = {"values", "dtype:bf16"};
    bool is_whole = s->kind == FSDP_FULL || (s->format && s->world == 1);
    fsdp_convert_opts opts = {.kind = s->kind,
                              .world = is_whole ? 0 : s->world,
                              .shard_dim = is_whole ? 0 : 1,
                              .compress = s->compress,
                              .overwrite = true,
                              .threads = 1 + s->world % 2,
                              .format = s->format,
                              .max_shard_bytes = SHARD_BYTES,
                              .open.access.disk = io};
    for (size_t i = 0; s->format && i < sizeof formats / sizeof formats[0]; i++) {
        if (strcmp(s->format, formats[i].name) != 0)
            continue;
        opts.select.drops = drops;
        opts.select.drop_count = (size_t)!formats[i].has_values + !formats[i].has_bf16;
    }
    return fsdp_checkpoint_convert(from, to, &opts, err);
}

static fsdp_status convert(const scenario *s, fsdp_io *io, const char *root, fsdp_error *err)
{
    char from[SCENARIO_PATH], to[SCENARIO_PATH];
    return convert_to(s, io, in(root, "from", from), in(root, "to", to), err);
}

/* The old output of another format: a conversion of the old state, which then is removed. */
static fsdp_status prepare_foreign(const scenario *s, fsdp_io *io, const char *root,
                                   fsdp_error *err)
{
    char from[SCENARIO_PATH], to[SCENARIO_PATH];
    if (s->is_new)
        return FSDP_OK;
    FSDP_TRY(save(s, io, in(root, "before", from), false, 3, STEP_OLD, err));
    FSDP_TRY(convert_to(s, io, from, in(root, "to", to), err));
    return fsdp_io_remove_tree(io, from, err);
}

fsdp_status scenario_prepare(const scenario *s, fsdp_io *io, const char *root, fsdp_error *err)
{
    char path[SCENARIO_PATH];
    switch (s->work) {
    case WORK_FRESH: return FSDP_OK;
    case WORK_OVERWRITE: return save(s, io, in(root, "ck", path), false, 3, STEP_OLD, err);
    case WORK_RUN:
        FSDP_TRY(save(s, io, in(root, "run", path), true, 1, STEP_FIRST, err));
        return save(s, io, path, true, 3, STEP_OLD, err);
    default:
        FSDP_TRY(save(s, io, in(root, "from", path), false, 3, STEP_NEW, err));
        if (s->format)
            return prepare_foreign(s, io, root, err);
        return save(s, io, in(root, "to", path), false, 2, STEP_OLD, err);
    }
}

fsdp_status scenario_act(const scenario *s, fsdp_io *io, const char *root, fsdp_error *err)
{
    char path[SCENARIO_PATH];
    if (s->work == WORK_CONVERT)
        return convert(s, io, root, err);
    bool in_run = s->work == WORK_RUN;
    return save(s, io, in(root, in_run ? "run" : "ck", path), in_run, s->world, STEP_NEW, err);
}

fsdp_status scenario_again(const scenario *s, fsdp_io *io, const char *root, fsdp_error *err)
{
    char path[SCENARIO_PATH];
    bool in_run = s->work == WORK_RUN;
    /* a step of a run is saved once */
    uint64_t step = scenario_look(s, io, root, NULL) == FOUND_LATER ? STEP_LAST : STEP_LATER;
    if (s->work == WORK_CONVERT)
        FSDP_TRY(convert(s, io, root, err));
    else
        FSDP_TRY(save(s, io, in(root, in_run ? "run" : "ck", path), in_run, 1, step, err));
    scenario_found found = scenario_look(s, io, root, err);
    if (found != (s->work == WORK_CONVERT ? FOUND_NEW : FOUND_LATER))
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "the next save worked and is not what is found");
    int left = in_run ? scenario_leftovers(s, io, root) : 0;
    if (left > 0)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "the next save left %d leftovers in its run",
                         left);
    return FSDP_OK;
}

/* --- checking the state ------------------------------------------------------------------------- */

static scenario_found found_by_step(int64_t step, fsdp_error *why)
{
    switch (step) {
    case STEP_OLD: return FOUND_OLD;
    case STEP_NEW: return FOUND_NEW;
    case STEP_LATER:
    case STEP_LAST: return FOUND_LATER;
    default:
        fsdp_fail(why, FSDP_DIFFERS, "step %lld is loaded", (long long)step);
        return FOUND_WRONG;
    }
}

static scenario_found look_at(const scenario *s, fsdp_io *io, const char *path, fsdp_error *why)
{
    int64_t step;
    fsdp_status st = load(s, io, path, &step, why);
    if (st != FSDP_OK)
        return st == FSDP_DIFFERS ? FOUND_WRONG : FOUND_NOTHING;
    return found_by_step(step, why);
}

/* A format without values has no step: all tensors of one seed, and as many as the format holds. */
static scenario_found look_at_foreign(const scenario *s, fsdp_io *io, const char *path,
                                      fsdp_error *why)
{
    static const int64_t steps[] = {STEP_OLD, STEP_NEW};
    fsdp_sd *full = NULL;
    scenario_found found = FOUND_WRONG;
    /* a format without aliases has a tensor of that name */
    fsdp_load_opts opts = {.access.disk = io, .threads = 1, .exclude = "^tied$"};
    if (fsdp_load_full(path, &opts, &full, why) != FSDP_OK)
        return FOUND_NOTHING;
    size_t tensors = 0;
    for (size_t i = 0; i < fsdp_sd_count(full); i++)
        tensors += fsdp_sd_at(full, i)->kind == FSDP_ENTRY_TENSOR;
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        bool is_that = test_tensors_differing(full, 0, (uint64_t)steps[i]) == 0;
        int64_t step = step_of(full);
        if (is_that && (step < 0 || step == steps[i]))
            found = found_by_step(steps[i], why);
    }
    if (tensors < (s->model == STATE_SMALL ? 7 : 2) || found == FOUND_WRONG) {
        found = FOUND_WRONG;
        fsdp_fail(why, FSDP_DIFFERS, "'%s' has %zu tensors, which are of no state", path, tensors);
    }
    fsdp_sd_free(full);
    return found;
}

/* Every step that a run calls good is good, and there are at least two. */
static scenario_found check_steps(const scenario *s, fsdp_io *io, const char *run, fsdp_error *why)
{
    fsdp_run_steps steps;
    int good = 0;
    if (fsdp_run_list(run, &(fsdp_access){.disk = io}, &steps, why) != FSDP_OK)
        return FOUND_WRONG;
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < steps.count && st == FSDP_OK; i++) {
        char path[SCENARIO_PATH];
        int64_t step = 0;
        if (steps.items[i].state == FSDP_STEP_BROKEN)
            st = fsdp_fail(why, FSDP_DIFFERS, "%s is broken: %s", steps.items[i].name,
                           steps.items[i].reason);
        if (steps.items[i].state != FSDP_STEP_GOOD)
            continue;
        good++;
        st = load(s, io, in(run, steps.items[i].name, path), &step, why);
        if (st == FSDP_OK && step != steps.items[i].step)
            st = fsdp_fail(why, FSDP_DIFFERS, "%s holds step %lld", path, (long long)step);
    }
    fsdp_run_steps_release(&steps);
    if (st == FSDP_OK && good < 2)
        st = fsdp_fail(why, FSDP_DIFFERS, "only %d good steps are left", good);
    return st == FSDP_OK ? FOUND_OLD : FOUND_WRONG;
}

static const char *output_path(const scenario *s, const char *root, char *path)
{
    static const char *const names[] = {"run", "ck", "to", "ck"};
    return in(root, names[s->work], path);
}

scenario_found scenario_load(const scenario *s, fsdp_io *io, const char *root, fsdp_error *why)
{
    char path[SCENARIO_PATH];
    output_path(s, root, path);
    return s->format ? look_at_foreign(s, io, path, why) : look_at(s, io, path, why);
}

scenario_found scenario_look(const scenario *s, fsdp_io *io, const char *root, fsdp_error *why)
{
    char path[SCENARIO_PATH];
    if (s->work == WORK_RUN && check_steps(s, io, output_path(s, root, path), why) == FOUND_WRONG)
        return FOUND_WRONG;
    if (s->work == WORK_CONVERT && look_at(s, io, in(root, "from", path), why) != FOUND_NEW)
        return FOUND_WRONG;
    scenario_found found = scenario_load(s, io, root, why);
    /* half of a new one is not nothing */
    bool is_half = found == FOUND_NOTHING && scenario_is_fresh(s) &&
                   fsdp_io_exists(io, output_path(s, root, path));
    return is_half ? FOUND_WRONG : found;
}

bool scenario_is_whole(const scenario *s, scenario_found found)
{
    if (found == FOUND_NOTHING)
        return scenario_is_fresh(s);
    return found != FOUND_WRONG;
}

static int count_leftover(void *user, const char *name)
{
    if (strncmp(name, ".lock", 5) != 0 &&
        (strstr(name, ".tmp-") || strstr(name, ".deleting-") || strstr(name, ".old-")))
        ++*(int *)user;
    return 0;
}

int scenario_leftovers(const scenario *s, fsdp_io *io, const char *root)
{
    int count = 0;
    char path[SCENARIO_PATH];
    io->ops->list(io, root, count_leftover, &count);
    if (s->work == WORK_RUN)
        io->ops->list(io, in(root, "run", path), count_leftover, &count);
    return count;
}

bool scenario_folder(char *path_out, size_t room)
{
    const char *place = getenv("FSDP_TEST_DIR");
    if (!place)
        place = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    snprintf(path_out, room, "%s/fsdp-fault-XXXXXX", place);
    return mkdtemp(path_out) != NULL;
}

void scenario_remove(const char *path)
{
    fsdp_error err = {0};
    if (fsdp_io_remove_tree(NULL, path, &err) != FSDP_OK)
        fprintf(stderr, "%s\n", err.text);
}

const char *scenario_path(char out[SCENARIO_PATH], const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int length = vsnprintf(out, SCENARIO_PATH, format, args);
    va_end(args);
    if (length < 0 || length >= SCENARIO_PATH)
        abort();
    return out;
}
