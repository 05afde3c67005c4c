/* Saving into runs and onto disks: errors before the first byte, and notices. */
#include "tests/support/disk/io_fault.h"
#include "tests/support/disk/io_sim.h"
#include "base/core/pool.h"
#include "statedict/commit/commit.h"
#include "statedict/commit/space.h"
#include "tests/support/sample_state.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fsdp/convert.h>
#include <fsdp/diff.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static fsdp_io *sim;
static fsdp_ctl *self;
static test_state state;

static void set_up(void)
{
    fsdp_error err = {0};
    cr_assert_eq(fsdp_sim_create(0, &sim, &err), FSDP_OK);
    cr_assert_eq(fsdp_io_mkdir(sim, "/d", &err), FSDP_OK);
    cr_assert_eq(fsdp_ctl_self(&self, &err), FSDP_OK);
    cr_assert_eq(test_state_create(&(state_part){.model = STATE_SMALL, .world = 1, .rank = 0}, true,
                                   1, &state, &err),
                 FSDP_OK);
}

static void tear_down(void)
{
    test_state_release(&state);
    fsdp_ctl_free(self);
    fsdp_sim_free(sim);
}

TestSuite(run_save, .init = set_up, .fini = tear_down);

static fsdp_save_opts options(fsdp_io *io)
{
    fsdp_save_opts opts = {0};
    opts.access.disk = io;
    return opts;
}

static void must_save_step(int64_t step)
{
    fsdp_error err = {0};
    fsdp_save_opts opts = options(sim);
    cr_assert_eq(fsdp_run_save(state.sd, self, "/d/run", step, &opts, &err), FSDP_OK, "%s",
                 err.text);
}

static int count_names(void *user, const char *name)
{
    (void)name;
    ++*(int *)user;
    return 0;
}

static int names_in(const char *dir)
{
    int n = 0;
    cr_assert_eq(sim->ops->list(sim, dir, count_names, &n), 0);
    return n;
}

/* --- refused before anything is done --- */

Test(run_save, a_policy_that_keeps_too_little_is_refused_before_the_save)
{
    for (int keep = -1; keep < 2; keep++) {
        fsdp_error err = {0};
        fsdp_retention policy = {.keep_last = keep};
        fsdp_save_opts opts = options(sim);
        opts.retain = &policy;
        cr_assert_eq(fsdp_run_save(state.sd, self, "/d/run", 1, &opts, &err), FSDP_ERR_USAGE);
        cr_assert(strstr(err.text, "at least 2"), "%s", err.text);
        cr_assert_eq(names_in("/d"), 0);
    }
}

static void expect_usage(fsdp_status status, const fsdp_error *err)
{
    cr_assert_eq(status, FSDP_ERR_USAGE);
    cr_assert(strstr(err->text, "must not be negative"), "%s", err->text);
}

static fsdp_status visit_nothing(void *user, const fsdp_entry *entry, int64_t first, int64_t count,
                                 const void *data, fsdp_error *err)
{
    (void)user, (void)entry, (void)first, (void)count, (void)data, (void)err;
    return FSDP_OK;
}

Test(run_save, a_negative_number_of_threads_or_bytes_of_memory_is_refused_everywhere)
{
    must_save_step(1);
    fsdp_checkpoint *checkpoint;
    cr_assert_eq(
        fsdp_checkpoint_open("/d/run", &(fsdp_open_opts){.access.disk = sim}, &checkpoint, NULL),
        FSDP_OK);
    for (int which = 0; which < 2; which++) {
        int threads = which ? 0 : -1;
        int64_t memory = which ? -1 : 0;
        fsdp_error err = {0};
        fsdp_save_opts save = options(sim);
        save.threads = threads;
        save.memory = memory;
        expect_usage(fsdp_sd_save(state.sd, self, "/d/c", &save, &err), &err);
        fsdp_load_opts load = {.access.disk = sim, .threads = threads, .memory = memory};
        expect_usage(fsdp_sd_load(state.sd, self, "/d/run", &load, &err), &err);
        fsdp_sd *full;
        expect_usage(fsdp_load_full("/d/run", &load, &full, &err), &err);
        expect_usage(fsdp_stream_full("/d/run", &load, visit_nothing, NULL, &err), &err);
        fsdp_verify_opts verify = {.access.disk = sim, .threads = threads, .memory = memory};
        expect_usage(fsdp_checkpoint_verify("/d/run/step-00000001", &verify, NULL, &err), &err);
        fsdp_convert_opts convert = {.open.access.disk = sim, .threads = threads, .memory = memory};
        expect_usage(fsdp_checkpoint_convert("/d/run", "/d/c", &convert, &err), &err);
        fsdp_diff_opts diff = {.threads = threads, .memory = memory};
        expect_usage(fsdp_checkpoint_diff(checkpoint, checkpoint, &diff, NULL, &err), &err);
    }
    fsdp_error err = {0};
    expect_usage(fsdp_sd_gather(state.sd, self, -1, visit_nothing, NULL, &err), &err);
    cr_assert_eq(names_in("/d"), 1);
    fsdp_checkpoint_close(checkpoint);
}

/* --- the lease --- */

static void write_lock(void)
{
    fsdp_file *file;
    sim->ops->unlink(sim, "/d/run/.lock");
    cr_assert_eq(fsdp_io_open(sim, "/d/run/.lock", FSDP_IO_CREATE, &file, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_write(file, "", "other", 5, 0, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_close(&file, "", NULL), FSDP_OK);
}

/* Steals the lease after the data is written and synced. */
static int steal_lease(void *user, fsdp_io_call call, const char *path)
{
    (void)user;
    (void)call;
    if (strstr(path, "/shard-"))
        write_lock();
    return 0;
}

Test(run_save, a_lease_that_is_lost_while_saving_stops_the_publication)
{
    fsdp_io *io;
    must_save_step(1);
    fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_SYNC,
                            .at = 1,
                            .forever = true,
                            .action = FSDP_FAULT_CALL,
                            .call = steal_lease};
    cr_assert_eq(fsdp_io_fault_create(sim, &plan, &io, NULL), FSDP_OK);
    fsdp_save_opts opts = options(io);
    fsdp_error err = {0};
    cr_assert_eq(fsdp_run_save(state.sd, self, "/d/run", 2, &opts, &err), FSDP_ERR_EXISTS);
    cr_assert(strstr(err.text, "lease of '/d/run' is lost to another job"), "%s", err.text);
    cr_assert_eq(names_in("/d/run"), 3, "step 1, the hint and the lock of another");
    fsdp_io_fault_free(io);
}

typedef struct notices {
    int count;
    char text[2000];
} notices;

static void take_notice(void *user, const char *text)
{
    notices *all = user;
    all->count++;
    strncat(all->text, text, sizeof all->text - strlen(all->text) - 1);
}

static int free_the_run(void *user, int64_t done, int64_t total, const char *what)
{
    (void)done, (void)total;
    fsdp_lease **lease = user;
    if (strcmp(what, "waiting for the run") == 0) {
        fsdp_lease_release(*lease);
        *lease = NULL;
    }
    return 0;
}

/* Such a holder is fsdp-gc, which finishes soon. */
Test(run_save, a_save_waits_for_who_holds_the_run_for_a_moment, .timeout = 60)
{
    must_save_step(1);
    for (int outside = 0; outside < 2; outside++) {
        fsdp_lease *lease;
        fsdp_error err = {0};
        fsdp_save_opts opts = options(sim);
        opts.watch = (fsdp_watch){.context = &lease, .progress = free_the_run};
        cr_assert_eq(fsdp_lease_take(sim, "/d/run", &lease, NULL), FSDP_OK);
        fsdp_status st = outside ? fsdp_sd_save(state.sd, self, "/d/run/step-00000003", &opts, &err)
                                 : fsdp_run_save(state.sd, self, "/d/run", 2, &opts, &err);
        cr_assert_eq(st, FSDP_OK, "%s", err.text);
        cr_assert_null(lease);
    }
}

Test(run_save, a_hint_that_cannot_be_written_does_not_keep_retention_from_its_work)
{
    notices all = {0};
    fsdp_retention policy = {.keep_last = 2};
    fsdp_save_opts opts = options(sim);
    opts.retain = &policy;
    opts.watch = (fsdp_watch){.context = &all, .notice = take_notice};
    cr_assert_eq(fsdp_io_mkdir(sim, "/d/run", NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_mkdir(sim, "/d/run/latest", NULL), FSDP_OK);
    for (int64_t step = 1; step <= 3; step++) {
        fsdp_error err = {0};
        cr_assert_eq(fsdp_run_save(state.sd, self, "/d/run", step, &opts, &err), FSDP_OK, "%s",
                     err.text);
    }
    cr_assert_eq(all.count, 3, "%s", all.text);
    cr_assert(strstr(all.text, "is saved, but the hint 'latest' failed: "), "%s", all.text);
    cr_assert_not(fsdp_io_exists(sim, "/d/run/step-00000001"));
    cr_assert_eq(names_in("/d/run"), 3, "two steps and what is in the place of the hint");
}

/* After a return to an earlier step the latest save is not the highest. */
Test(run_save, retention_keeps_the_step_that_was_just_saved)
{
    fsdp_error err = {0};
    fsdp_retention policy = {.keep_last = 2};
    fsdp_save_opts opts = options(sim);
    for (int64_t step = 10; step <= 30; step += 10)
        must_save_step(step);
    opts.retain = &policy;
    cr_assert_eq(fsdp_run_save(state.sd, self, "/d/run", 5, &opts, &err), FSDP_OK, "%s", err.text);
    cr_expect(fsdp_io_exists(sim, "/d/run/step-00000005"));
    cr_expect_not(fsdp_io_exists(sim, "/d/run/step-00000010"));
}

Test(run_save, a_new_run_survives_a_power_cut)
{
    cr_assert_eq(fsdp_io_sync_dir(sim, "/", NULL), FSDP_OK);
    must_save_step(1);
    for (uint64_t seed = 1; seed <= 20; seed++) {
        fsdp_io *left = fsdp_sim_crash(sim, seed);
        cr_assert_not_null(left);
        cr_expect(fsdp_io_exists(left, "/d/run/step-00000001/manifest.json"), "%d", (int)seed);
        fsdp_sim_free(left);
    }
}

typedef struct readers {
    atomic_uintptr_t first; /* thread that read a step */
    atomic_bool others;
    atomic_int reads;
} readers;

/* Slow enough that a second thread, if there was one, would also read. */
static int note_reader(void *user, fsdp_io_call call, const char *path)
{
    readers *seen = user;
    (void)call;
    if (!strstr(path, "step-00000002/shard-"))
        return 0;
    uintptr_t none = 0, self_number = fsdp_thread_number();
    if (!atomic_compare_exchange_strong(&seen->first, &none, self_number) && none != self_number)
        atomic_store(&seen->others, true);
    atomic_fetch_add(&seen->reads, 1);
    usleep(20000);
    return 0;
}

Test(run_save, retention_reads_with_the_threads_of_the_save)
{
    fsdp_io *io;
    readers seen = {0};
    fsdp_error err = {0};
    fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_PREAD,
                            .at = 1,
                            .forever = true,
                            .action = FSDP_FAULT_CALL,
                            .call = note_reader,
                            .user = &seen};
    must_save_step(1);
    must_save_step(2);
    cr_assert_eq(fsdp_io_fault_create(sim, &plan, &io, NULL), FSDP_OK);
    fsdp_retention policy = {.keep_last = 2};
    fsdp_save_opts opts = options(io);
    opts.retain = &policy;
    opts.threads = 1;
    cr_assert_eq(fsdp_run_save(state.sd, self, "/d/run", 3, &opts, &err), FSDP_OK, "%s", err.text);
    cr_assert_not(fsdp_io_exists(sim, "/d/run/step-00000001"));
    cr_assert_gt(seen.reads, 2);
    cr_assert_not(seen.others);
    fsdp_io_fault_free(io);
}

/* --- a format version to come --- */

Test(run_save, loading_a_run_does_not_pass_over_a_newer_format_version)
{
    must_save_step(1);
    must_save_step(2);
    fsdp_file *file;
    const char path[] = "/d/run/step-00000002/manifest.json";
    const char start[] = "{\n\"fsdp\": {\"major\": 9,";
    cr_assert_eq(fsdp_io_open(sim, path, FSDP_IO_WRITE, &file, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_write(file, path, start, sizeof start - 1, 0, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_close(&file, path, NULL), FSDP_OK);
    fsdp_error err = {0};
    fsdp_load_opts opts = {.access.disk = sim};
    cr_assert_eq(fsdp_sd_load(state.sd, self, "/d/run", &opts, &err), FSDP_ERR_REFUSED);
    cr_assert(strstr(err.text, "'/d/run/step-00000002' has format version 9"), "%s", err.text);
    fsdp_sd *full;
    cr_assert_eq(fsdp_load_full("/d/run", &opts, &full, &err), FSDP_ERR_REFUSED, "%s", err.text);
    cr_assert_eq(fsdp_sd_load(state.sd, self, "/d/run/step-00000001", &opts, &err), FSDP_OK);
}

static int refuse_newest(void *user, fsdp_io_call call, const char *path)
{
    (void)user, (void)call;
    return strstr(path, "step-00000002/shard-") ? -EACCES : 0;
}

Test(run_save, loading_a_run_does_not_pass_over_a_step_that_may_not_be_read)
{
    fsdp_io *io;
    must_save_step(1);
    must_save_step(2);
    fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_OPEN,
                            .at = 1,
                            .forever = true,
                            .action = FSDP_FAULT_CALL,
                            .call = refuse_newest};
    cr_assert_eq(fsdp_io_fault_create(sim, &plan, &io, NULL), FSDP_OK);
    fsdp_error err = {0};
    fsdp_load_opts opts = {.access.disk = io};
    cr_assert_eq(fsdp_sd_load(state.sd, self, "/d/run", &opts, &err), FSDP_ERR_IO);
    cr_assert(strstr(err.text, "'/d/run/step-00000002/shard-"), "%s", err.text);
    fsdp_sd *full;
    cr_assert_eq(fsdp_load_full("/d/run", &opts, &full, &err), FSDP_ERR_IO);
    fsdp_io_fault_free(io);
}

/* --- free space --- */

static int64_t used_bytes(fsdp_io *disk, const char *dir)
{
    fsdp_io_names names;
    int64_t sum = 0;
    cr_assert_eq(fsdp_io_list_names(disk, dir, NULL, NULL, &names, NULL), FSDP_OK);
    for (size_t i = 0; i < names.count; i++) {
        char *path = fsdp_path_join(dir, names.items[i]);
        fsdp_file_info info;
        cr_assert_eq(disk->ops->info(disk, path, &info), 0);
        sum += info.size;
        fsdp_free(path);
    }
    fsdp_io_names_release(&names);
    return sum;
}

typedef struct saving {
    state_model model;
    fsdp_save_opts opts;
    fsdp_volume volume;
    int64_t estimate;
} saving;

static fsdp_status save_rank(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    saving *work = user;
    test_state mine;
    FSDP_TRY(test_state_create(&(state_part){.model = work->model,
                                             .world = fsdp_ctl_size(ctl),
                                             .rank = fsdp_ctl_rank(ctl),
                                             .variant = 3},
                               true, 1, &mine, err));
    if (fsdp_ctl_rank(ctl) == 0)
        work->estimate = fsdp_volume_bytes(mine.sd, &work->volume);
    fsdp_status st = fsdp_sd_save(mine.sd, ctl, "/d/c", &work->opts, err);
    test_state_release(&mine);
    return st;
}

Test(run_save, the_estimate_covers_what_is_written_and_is_not_far_above_it)
{
    const state_model models[] = {STATE_SMALL, STATE_EVERYTHING, STATE_MEGABYTE};
    for (size_t i = 0; i < sizeof models / sizeof *models; i++)
        for (int kind = 0; kind < 3; kind++)
            for (int world = 1; world < 6; world += 2) {
                saving work = {.model = models[i], .opts = options(sim)};
                work.opts.kind = (fsdp_kind)kind;
                work.opts.overwrite = true;
                work.volume =
                    (fsdp_volume){.kind = (fsdp_kind)kind, .world = world, .with_view = true};
                fsdp_error err = {0};
                cr_assert_eq(fsdp_ctl_run_threads(world, save_rank, &work, &err), FSDP_OK, "%s",
                             err.text);
                int64_t used = used_bytes(sim, "/d/c");
                printf("model %zu, kind %d, %d ranks: %" PRId64 " used, %" PRId64 " estimated\n", i,
                       kind, world, used, work.estimate);
                cr_expect_geq(work.estimate + work.estimate / 10, used);
                cr_expect_leq(work.estimate, 4 * used + (128 << 10));
            }
}

Test(run_save, a_disk_that_holds_the_tensors_and_nothing_else_is_too_small)
{
    fsdp_volume volume = {.kind = FSDP_SHARDED, .world = 1, .with_view = true};
    int64_t needed = fsdp_volume_bytes(state.sd, &volume);
    for (int enough = 0; enough < 2; enough++) {
        fsdp_io *disk;
        fsdp_error err = {0};
        int64_t capacity = needed + needed / 10 - (enough ? 0 : 1);
        cr_assert_eq(fsdp_sim_create(capacity, &disk, &err), FSDP_OK);
        cr_assert_eq(fsdp_io_mkdir(disk, "/d", &err), FSDP_OK);
        fsdp_space space;
        fsdp_status st = fsdp_require_space(disk, "/d/c", &volume,
                                            fsdp_volume_room(state.sd, &volume), &space, &err);
        cr_assert_eq(st, enough ? FSDP_OK : FSDP_ERR_NO_SPACE);
        char words[100];
        snprintf(words, sizeof words, "needs about %lld bytes", (long long)(needed + needed / 10));
        cr_assert(enough || strstr(err.text, words), "%s", err.text);
        cr_assert(enough || strstr(err.text, "free some space"), "%s", err.text);
        fsdp_sim_free(disk);
    }
}

Test(run_save, more_than_enough_that_is_there_already_leaves_nothing_to_ask_for)
{
    fsdp_volume volume = {.kind = FSDP_SHARDED, .world = 1, .with_view = true};
    int64_t needed = fsdp_volume_bytes(state.sd, &volume);
    volume.more = -needed - 1000;
    cr_assert_eq(fsdp_volume_room(state.sd, &volume), 0);
    volume.more = -needed + 1000;
    cr_assert_eq(fsdp_volume_room(state.sd, &volume), 1100);
}

/* The printed plan and the check of free space use one estimate. */
Test(run_save, a_plan_of_a_conversion_says_how_much_room_it_needs)
{
    for (int format = 0; format < 2; format++)
        for (int fits = 0; fits < 2; fits++) {
            fsdp_error err = {0};
            fsdp_io *disk;
            cr_assert_eq(fsdp_sim_create(fits ? 64 << 20 : 4 << 20, &disk, &err), FSDP_OK);
            cr_assert_eq(fsdp_io_mkdir(disk, "/d", &err), FSDP_OK);
            fsdp_save_opts opts = options(disk);
            cr_assert_eq(fsdp_sd_save(state.sd, self, "/d/c", &opts, &err), FSDP_OK, "%s",
                         err.text);
            fsdp_convert_opts convert = {.format = format ? "fsdp" : "torch",
                                         .world = format ? 1000 : 0,
                                         .open.access.disk = disk};
            fsdp_conversion *conversion;
            fsdp_status st = fsdp_conversion_open("/d/c", "/d/e", &convert, &conversion, &err);
            const fsdp_convert_plan *plan = fsdp_conversion_plan(conversion);
            bool enough = plan->bytes_needed <= plan->free_bytes;
            cr_expect_eq(st, enough ? FSDP_OK : FSDP_ERR_NO_SPACE, "%s", err.text);
            cr_expect(enough || format, "torch fits in any case");
            cr_expect(!format || enough == (fits == 1));
            char words[40];
            snprintf(words, sizeof words, "%" PRId64 " bytes", plan->bytes_needed);
            cr_expect(enough || strstr(err.text, words), "%s", err.text);
            fsdp_conversion_close(conversion);
            fsdp_sim_free(disk);
        }
}

/* --- a disk that forgets --- */

static int space_in_memory(fsdp_io *io, const char *path, fsdp_space *space_out)
{
    int result = fsdp_io_posix()->ops->space(io, path, space_out);
    space_out->in_memory = true;
    return result;
}

static int space_on_disk(fsdp_io *io, const char *path, fsdp_space *space_out)
{
    int result = fsdp_io_posix()->ops->space(io, path, space_out);
    space_out->in_memory = false;
    return result;
}

static void count_notice(void *user, const char *text)
{
    *(int *)user += strstr(text, "not durable") != NULL;
}

Test(run_save, a_file_system_in_memory_is_told_once_per_save)
{
    char run[] = "/tmp/fsdp-run-save-XXXXXX";
    cr_assert_not_null(mkdtemp(run));
    for (int in_memory = 0; in_memory < 2; in_memory++) {
        fsdp_io_ops ops = *fsdp_io_posix()->ops;
        ops.space = in_memory ? space_in_memory : space_on_disk;
        fsdp_io io = {.ops = &ops};
        int told = 0;
        fsdp_error err = {0};
        fsdp_save_opts opts = options(&io);
        opts.watch = (fsdp_watch){.context = &told, .notice = count_notice};
        for (int n = 1; n <= 2; n++) {
            cr_assert_eq(fsdp_run_save(state.sd, self, run, 10 * in_memory + n, &opts, &err),
                         FSDP_OK, "%s", err.text);
            cr_assert_eq(told, in_memory * n);
        }
    }
    cr_assert_eq(fsdp_io_remove_tree(NULL, run, NULL), FSDP_OK);
}

/* --- one rank is slower than the others --- */

/* 32 MiB per rank in 128 pieces: together they take nearly twice the deadline, each a small part of it, also
 * on a busy machine. */
enum { DEADLINE_MS = 2500, SLOW_MS = 36, ELEMENTS = 64 << 20 };

static int slow_write(void *user, fsdp_io_call call, const char *path)
{
    (void)user;
    (void)call;
    if (strstr(path, "shard-00001-"))
        usleep(SLOW_MS * 1000);
    return 0;
}

static fsdp_status save_impatiently(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    fsdp_mesh *mesh;
    fsdp_sd *sd;
    fsdp_save_opts opts = options(user);
    const int64_t shape[] = {ELEMENTS};
    const fsdp_placement placement = {.kind = FSDP_SHARD};
    fsdp_ctl_set_deadline(ctl, DEADLINE_MS);
    FSDP_TRY(fsdp_mesh_create(1, (int64_t[]){2}, (const char *[]){"dp"}, NULL, &mesh, err));
    FSDP_TRY(fsdp_sd_create(&sd, err));
    fsdp_status st = fsdp_sd_add_tensor(
        sd, FSDP_NAME("w"),
        &(fsdp_tensor){FSDP_U8, 1, shape, {.mesh = mesh, .placement = {placement}}, NULL}, err);
    if (st == FSDP_OK)
        st = fsdp_sd_allocate(sd, fsdp_ctl_rank(ctl), err);
    if (st == FSDP_OK)
        st = fsdp_sd_save(sd, ctl, "/d/c", &opts, err);
    fsdp_sd_free(sd);
    fsdp_mesh_free(mesh);
    return st;
}

Test(run_save, a_rank_whose_disk_is_slow_is_waited_for_beyond_the_deadline)
{
    fsdp_io *io;
    fsdp_error err = {0};
    fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_PWRITE,
                            .at = 1,
                            .forever = true,
                            .action = FSDP_FAULT_CALL,
                            .call = slow_write};
    cr_assert_eq(fsdp_io_fault_create(sim, &plan, &io, &err), FSDP_OK);
    cr_assert_eq(fsdp_ctl_run_threads(2, save_impatiently, io, &err), FSDP_OK, "%s", err.text);
    fsdp_io_fault_free(io);
}
