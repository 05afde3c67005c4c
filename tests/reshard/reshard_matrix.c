/*
 * The reshard matrix: a state saved by W ranks, in each kind, raw and compressed, is loaded by W'
 * ranks that lay it out differently, directly and after an offline conversion to W'. Every byte of
 * every box is compared with what it must be. Ranks are threads.
 *
 * Two models: one of many small tensors (every dtype, awkward shapes, all layouts) for all W and W'
 * in 1..16, 33 and 64; one of tensors of several hash blocks for a few.
 */
#include "tests/support/matrix_row.h"
#include "tests/support/sample_state.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FORMS = 6, USUAL_SAMPLE = 75, PATH_ROOM = 200 };

typedef struct matrix {
    const char *name;
    state_model model;
    const int *worlds;
    int world_count;
    test_sampler sampler;
    int64_t saves, loads, conversions, differing, failed;
} matrix;

/* One save, load or conversion, as its ranks see it. */
typedef struct job {
    state_model model;
    int variant;
    uint64_t seed;
    const char *path;
    fsdp_save_opts save;
    fsdp_load_opts load;
    int64_t differing; /* added up by the ranks */
} job;

static char folder[64];

/* --- a rank ------------------------------------------------------------------------------------- */

static fsdp_status save_rank(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    job *j = user;
    test_state state;
    fsdp_status st = test_state_create(&(state_part){.model = j->model,
                                                     .world = fsdp_ctl_size(ctl),
                                                     .rank = fsdp_ctl_rank(ctl),
                                                     .variant = j->variant},
                                       true, j->seed, &state, err);
    FSDP_TRY(fsdp_ctl_agree(ctl, st, err));
    st = fsdp_sd_save(state.sd, ctl, j->path, &j->save, err);
    test_state_release(&state);
    return st;
}

static fsdp_status load_rank(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    job *j = user;
    test_state state;
    fsdp_status st = test_state_create(&(state_part){.model = j->model,
                                                     .world = fsdp_ctl_size(ctl),
                                                     .rank = fsdp_ctl_rank(ctl),
                                                     .variant = j->variant},
                                       false, 0, &state, err);
    FSDP_TRY(fsdp_ctl_agree(ctl, st, err));
    st = fsdp_sd_load(state.sd, ctl, j->path, &j->load, err);
    if (st == FSDP_OK)
        __atomic_fetch_add(&j->differing, test_state_differing(&state, j->seed), __ATOMIC_RELAXED);
    test_state_release(&state);
    return st;
}

/* --- cases -------------------------------------------------------------------------------------- */

static const char *const kind_names[] = {"sharded", "full", "local"};

static void fail(matrix *m, const char *what, const char *text)
{
    fprintf(stderr, "%s: %s: %s\n", m->name, what, text);
    m->failed++;
}

static void remove_all(const char *path)
{
    char command[PATH_ROOM + 20];
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    if (system(command) != 0)
        fprintf(stderr, "cannot remove %s\n", path);
}

static void check_load(matrix *m, job *j, int world, const char *what)
{
    fsdp_error err = {0};
    char text[300];
    j->differing = 0;
    snprintf(text, sizeof text, "%s loaded by %d ranks as variant %d, verification %s", what, world,
             j->variant, j->load.check == FSDP_CHECK_OFF ? "off" : "on");
    m->loads++;
    if (fsdp_ctl_run_threads(world, load_rank, j, &err) != FSDP_OK)
        fail(m, text, err.text);
    if (j->differing > 0)
        fail(m, text, "bytes differ");
    m->differing += j->differing;
}

/* Deep verification, and the whole state at once on one rank. */
static void check_source(matrix *m, const job *j, const char *what)
{
    fsdp_error err = {0};
    fsdp_verify_opts deep = {.level = FSDP_VERIFY_DEEP, .threads = 1};
    fsdp_sd *full = NULL;
    if (fsdp_checkpoint_verify(j->path, &deep, NULL, &err) != FSDP_OK)
        fail(m, what, err.text);
    if (fsdp_load_full(j->path, NULL, &full, &err) != FSDP_OK)
        fail(m, what, err.text);
    else if (test_sd_differing(full, 0, j->seed) > 0)
        fail(m, what, "the full state differs");
    fsdp_sd_free(full);
}

static void check_conversion(matrix *m, const job *saved, int world, int number, const char *what)
{
    char to[PATH_ROOM], text[300];
    fsdp_error err = {0};
    fsdp_kind kind = (fsdp_kind)(number % 3);
    fsdp_convert_opts opts = {.kind = kind,
                              .world = kind == FSDP_FULL ? 0 : world,
                              .shard_dim = number / 3 % 2,
                              .compress = number / 6 % 2,
                              .skip_fsync = true,
                              .skip_view = number % 5 != 0,
                              .threads = 1 + number % 2,
                              .memory = 1 << 20};
    snprintf(to, sizeof to, "%s/to", folder);
    snprintf(text, sizeof text, "%s converted to %s for %d ranks%s", what, kind_names[kind], world,
             opts.compress ? ", compressed" : "");
    m->conversions++;
    if (fsdp_checkpoint_convert(saved->path, to, &opts, &err) == FSDP_OK) {
        job back = {.model = m->model, .variant = number, .seed = saved->seed, .path = to};
        back.load.threads = 1;
        check_load(m, &back, 1 + number % 4, text);
    } else {
        fail(m, text, err.text);
    }
    remove_all(to);
}

static fsdp_save_opts options_of(int form, int number)
{
    fsdp_save_opts opts = {0};
    opts.kind = (fsdp_kind)(form % 3);
    opts.compress = form / 3;
    opts.owners = number % 2 ? FSDP_OWNERS_LOWEST : FSDP_OWNERS_BALANCED;
    opts.rank0_writes = number % 3 == 0;
    opts.skip_fsync = true;
    opts.skip_view = number % 4 != 0;
    opts.threads = 1 + number % 2;
    return opts;
}

/* Saved once, when the first case of this source is taken. */
static void need_source(matrix *m, job *j, int world, const char *what, bool *saved)
{
    fsdp_error err = {0};
    if (*saved)
        return;
    *saved = true;
    m->saves++;
    if (fsdp_ctl_run_threads(world, save_rank, j, &err) != FSDP_OK)
        fail(m, what, err.text);
    else
        check_source(m, j, what);
}

static void run_source(matrix *m, int world, int form)
{
    char path[PATH_ROOM], what[200];
    int number = world * FORMS + form;
    bool saved = false;
    job j = {.model = m->model,
             .variant = number,
             .seed = (uint64_t)number + 1000,
             .path = path,
             .save = options_of(form, number)};
    snprintf(path, sizeof path, "%s/from", folder);
    snprintf(what, sizeof what, "variant %d saved by %d ranks as %s%s", j.variant, world,
             kind_names[j.save.kind], j.save.compress ? ", compressed" : "");
    for (int i = 0; i < m->world_count; i++) {
        if (test_sampler_takes(&m->sampler)) {
            need_source(m, &j, world, what, &saved);
            job back = {
                .model = m->model, .variant = number + 5 * i + 1, .seed = j.seed, .path = path};
            back.load.threads = 1;
            back.load.check = (number + i) % 2 ? FSDP_CHECK_OFF : FSDP_CHECK_BLOCKS;
            check_load(m, &back, m->worlds[i], what);
        }
        if (test_sampler_takes(&m->sampler)) {
            need_source(m, &j, world, what, &saved);
            check_conversion(m, &j, m->worlds[i], number + i, what);
        }
    }
    remove_all(path);
}

static bool run_matrix(matrix *m)
{
    for (int i = 0; i < m->world_count; i++) {
        for (int form = 0; form < FORMS; form++)
            run_source(m, m->worlds[i], form);
    }
    char what[200];
    snprintf(what, sizeof what, "reshard, %s", m->name);
    matrix_row row = {what, "cases", m->sampler.taken, m->sampler.seen, m->sampler.every};
    bool is_true = matrix_row_print(&row,
                                    ": %" PRId64 " saves, %" PRId64 " loads, %" PRId64
                                    " conversions | bytes differ %" PRId64 ", fail %" PRId64,
                                    m->saves, m->loads, m->conversions, m->differing, m->failed);
    return is_true && m->failed == 0 && m->differing == 0 && m->loads > 0;
}

int main(void)
{
    static const int all[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 33, 64};
    static const int few[] = {1, 2, 3, 5, 8};
    int64_t every = test_sample(USUAL_SAMPLE);
    matrix small = {.name = "every dtype, shape and layout, W and W' in 1..16, 33, 64",
                    .model = STATE_EVERYTHING,
                    .worlds = all,
                    .world_count = sizeof all / sizeof all[0],
                    .sampler = {.every = every}};
    matrix large = {.name = "several blocks a tensor, W and W' in 1, 2, 3, 5, 8",
                    .model = STATE_BLOCKS,
                    .worlds = few,
                    .world_count = sizeof few / sizeof few[0],
                    .sampler = {.every = every}};
    strcpy(folder, access("/dev/shm", W_OK) == 0 ? "/dev/shm/fsdp-reshard-XXXXXX"
                                                 : "/tmp/fsdp-reshard-XXXXXX");
    if (!mkdtemp(folder)) {
        perror(folder);
        return 1;
    }
    bool ok = run_matrix(&small);
    ok = run_matrix(&large) && ok;
    remove_all(folder);
    return ok ? 0 : 1;
}
