/* Runs: the newest good checkpoint is found, and retention never deletes one too many. */
#include "tests/unit/statedict/commit/tiny_checkpoint.h"

#include "base/core/mem.h"
#include "base/io/process.h"
#include "statedict/commit/lease_internal.h"
#include "statedict/run/run_internal.h"

#include "tests/support/sample_state.h"

#include <stdlib.h>

#define UUID "0123456789abcdef0123456789abcdef"

static const char *step_path(int64_t step)
{
    static char path[100];
    char name[FSDP_STEP_NAME_SIZE];
    fsdp_step_name(step, name);
    snprintf(path, sizeof path, "/run/%s", name);
    return path;
}

static void save_steps(fsdp_io *io, const int64_t *steps, int n)
{
    for (int i = 0; i < n; i++)
        tiny_must_save(io, step_path(steps[i]), steps[i], false);
    cr_assert_eq(fsdp_io_sync_dir(io, "/run", NULL),
                 FSDP_OK); /* the removal of the lease is durable */
}

static void write_small(fsdp_io *io, const char *path)
{
    fsdp_file *file;
    cr_assert_eq(fsdp_io_open(io, path, FSDP_IO_CREATE, &file, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_write(file, path, "x", 1, 0, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_close(&file, path, NULL), FSDP_OK);
}

static void in_step(int64_t step, const char *name, char path[200])
{
    snprintf(path, 200, "%s/%s", step_path(step), name);
}

static void flip_manifest(fsdp_io *io, int64_t step)
{
    char path[200];
    fsdp_file *file;
    in_step(step, "manifest.json", path);
    cr_assert_eq(fsdp_io_open(io, path, FSDP_IO_WRITE, &file, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_write(file, path, "#", 1, 40, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_close(&file, path, NULL), FSDP_OK);
}

/* --- list --- */

Test(run, a_list_has_our_names_newest_first_and_says_what_is_broken)
{
    fsdp_io *io = tiny_disk();
    save_steps(io, (int64_t[]){5, 100000000, 10, 20, 30}, 5);
    flip_manifest(io, 20);
    char path[200];
    in_step(10, ".pin", path);
    write_small(io, path);
    in_step(30, "shard-00000-of-00001.h5", path);
    cr_assert_eq(io->ops->unlink(io, path), 0);
    cr_assert_eq(fsdp_io_mkdir(io, "/run/step-00000040.tmp-" UUID, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_mkdir(io, "/run/step-00000002.deleting-" UUID, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_mkdir(io, "/run/step-00000050", NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_mkdir(io, "/run/step-00000060.bak", NULL), FSDP_OK);
    tiny_must_save(io, "/run/step-00000007", 8, false);
    tiny_must_save(io, "/run/step-00000080", 9, false);
    write_small(io, "/run/step-00000070");
    write_small(io, "/run/latest");

    fsdp_run_steps steps;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_run_list("/run", &(fsdp_access){.disk = io}, &steps, &err), FSDP_OK, "%s",
                 err.text);
    const struct {
        int64_t step;
        fsdp_step_state state;
        const char *reason;
    } expected[] = {{100000000, FSDP_STEP_GOOD, NULL},     {80, FSDP_STEP_BROKEN, "holds step 9"},
                    {70, FSDP_STEP_BROKEN, "is a file"},   {50, FSDP_STEP_BROKEN, "no manifest"},
                    {40, FSDP_STEP_STAGING, NULL},         {30, FSDP_STEP_BROKEN, "is missing"},
                    {20, FSDP_STEP_BROKEN, "damaged"},     {10, FSDP_STEP_GOOD, NULL},
                    {7, FSDP_STEP_BROKEN, "holds step 8"}, {5, FSDP_STEP_GOOD, NULL},
                    {2, FSDP_STEP_DELETING, NULL}};
    cr_assert_eq(steps.count, sizeof expected / sizeof *expected);
    for (size_t i = 0; i < steps.count; i++) {
        cr_assert_eq(steps.items[i].step, expected[i].step);
        cr_assert_eq(steps.items[i].state, expected[i].state, "step %lld",
                     (long long)steps.items[i].step);
        cr_assert_eq(steps.items[i].pinned, expected[i].step == 10);
        if (expected[i].reason)
            cr_assert(strstr(steps.items[i].reason, expected[i].reason), "%s",
                      steps.items[i].reason);
    }
    fsdp_run_steps_release(&steps);
    cr_assert_eq(fsdp_run_list("/none", &(fsdp_access){.disk = io}, &steps, &err),
                 FSDP_ERR_NOT_FOUND);
    cr_assert(strstr(err.text, "'/none'"), "%s", err.text);
    fsdp_sim_free(io);
}

/* --- latest --- */

typedef struct notices {
    char text[4000];
    int count;
} notices;

static void take_notice(void *user, const char *text)
{
    notices *all = user;
    strncat(all->text, text, sizeof all->text - strlen(all->text) - 1);
    all->count++;
}

static void expect_latest(fsdp_io *io, int64_t step, int skipped, const char *words)
{
    notices all = {.count = 0};
    fsdp_watch watch = {.context = &all, .notice = take_notice};
    fsdp_error err = {0};
    char *path;
    fsdp_status status =
        fsdp_run_latest("/run", FSDP_VERIFY_QUICK, &watch, &(fsdp_access){.disk = io}, &path, &err);
    cr_assert_eq(status, step < 0 ? FSDP_ERR_NOT_FOUND : FSDP_OK, "%s", err.text);
    if (step < 0)
        cr_assert_null(path);
    else
        cr_assert_str_eq(path, step_path(step));
    cr_assert_eq(all.count, skipped, "%s", all.text);
    cr_assert(strstr(all.text, words), "%s", all.text);
    fsdp_string_free(path);
}

Test(run, latest_is_the_newest_that_verifies_and_names_the_skipped)
{
    fsdp_io *io = tiny_disk();
    expect_latest(io, -1, 0, "");
    save_steps(io, (int64_t[]){5, 10, 20}, 3);
    write_small(io, "/run/latest");
    expect_latest(io, 20, 0, "");
    flip_manifest(io, 20);
    expect_latest(io, 10, 1, "skipping 'step-00000020' of '/run'");
    cr_assert_eq(fsdp_io_mkdir(io, "/run/step-00000030", NULL), FSDP_OK);
    expect_latest(io, 10, 2, "no manifest");
    flip_manifest(io, 10);
    flip_manifest(io, 5);
    expect_latest(io, -1, 4, "step-00000005");
    char *path;
    fsdp_error err = {0};
    cr_assert_eq(
        fsdp_run_latest("/run", FSDP_VERIFY_QUICK, NULL, &(fsdp_access){.disk = io}, &path, &err),
        FSDP_ERR_NOT_FOUND);
    cr_assert(strstr(err.text, "4 do not verify"), "%s", err.text);
    fsdp_sim_free(io);
}

Test(run, latest_does_not_skip_for_want_of_memory)
{
    fsdp_io *io = tiny_disk();
    save_steps(io, (int64_t[]){5, 10}, 2);
    char *path;
    fsdp_mem_fail_after(-1, false);
    cr_assert_eq(
        fsdp_run_latest("/run", FSDP_VERIFY_QUICK, NULL, &(fsdp_access){.disk = io}, &path, NULL),
        FSDP_OK);
    fsdp_string_free(path);
    int64_t n = fsdp_mem_fail_after(-1, false);
    for (int64_t i = 0; i < n; i++) {
        fsdp_mem_fail_after(i, false);
        fsdp_status status = fsdp_run_latest("/run", FSDP_VERIFY_QUICK, NULL,
                                             &(fsdp_access){.disk = io}, &path, NULL);
        fsdp_mem_fail_after(-1, false);
        cr_assert_neq(status, FSDP_ERR_NOT_FOUND, "allocation %lld", (long long)i);
        if (status == FSDP_OK)
            cr_assert_str_eq(path, step_path(10));
        fsdp_string_free(path);
    }
    fsdp_sim_free(io);
}

/* --- unreadable steps --- */

/* For every error of the n-th call, an older checkpoint is not used silently. */
static bool latest_fails_at(int64_t n, int errnum, fsdp_verify_level level)
{
    fsdp_io *sim = tiny_disk(), *io;
    save_steps(sim, (int64_t[]){10, 20}, 2);
    fsdp_fault_plan plan = {.at = n, .action = FSDP_FAULT_ERRNO, .errnum = errnum};
    cr_assert_eq(fsdp_io_fault_create(sim, &plan, &io, NULL), FSDP_OK);
    fsdp_error err = {0};
    char *path;
    fsdp_status status =
        fsdp_run_latest("/run", level, NULL, &(fsdp_access){.disk = io}, &path, &err);
    if (status == FSDP_OK)
        cr_assert_str_eq(path, step_path(20), "call %d, errno %d", (int)n, errnum);
    else
        cr_assert(status == FSDP_ERR_IO || status == FSDP_ERR_LIMIT, "call %d, errno %d: %s",
                  (int)n, errnum, err.text);
    cr_assert(status == FSDP_OK || strstr(err.text, "/run"), "%s", err.text);
    fsdp_string_free(path);
    bool reached = fsdp_io_fault_calls(io) >= n;
    fsdp_io_fault_free(io);
    fsdp_sim_free(sim);
    return reached;
}

Test(run, latest_does_not_fall_back_for_want_of_rights_or_of_files)
{
    const int errnums[] = {EACCES, EPERM, EMFILE, ENFILE, ENOMEM, ESTALE};
    int64_t cases = 0;
    for (size_t i = 0; i < sizeof errnums / sizeof *errnums; i++)
        for (int level = FSDP_VERIFY_QUICK; level <= FSDP_VERIFY_DATA; level++) /* it is no HDF5 */
            for (int64_t n = 1; latest_fails_at(n, errnums[i], (fsdp_verify_level)level); n++)
                cases++;
    cr_assert_gt(cases, 100);
}

/* --- retention --- */

/* The steps that are good, newest first, as text. */
static void good_steps(fsdp_io *io, char *text, size_t room)
{
    fsdp_run_steps steps;
    cr_assert_eq(fsdp_run_list("/run", &(fsdp_access){.disk = io}, &steps, NULL), FSDP_OK);
    text[0] = '\0';
    for (size_t i = 0; i < steps.count; i++) {
        if (steps.items[i].state != FSDP_STEP_GOOD)
            continue;
        cr_assert_eq(tiny_read(io, step_path(steps.items[i].step)), steps.items[i].step);
        size_t used = strlen(text);
        snprintf(text + used, room - used, "%s%lld", used ? " " : "",
                 (long long)steps.items[i].step);
    }
    fsdp_run_steps_release(&steps);
}

static void expect_good(fsdp_io *io, const char *expected)
{
    char text[400];
    good_steps(io, text, sizeof text);
    cr_assert_str_eq(text, expected);
}

typedef struct report {
    char text[2000];
} report;

static void take_action(void *user, const fsdp_retain_action *action)
{
    report *all = user;
    size_t used = strlen(all->text);
    snprintf(all->text + used, sizeof all->text - used, "%s %s: %s\n", action->remove ? "-" : "+",
             action->name, action->reason);
}

/* all: gets the actions; may be NULL. */
static fsdp_status retain(fsdp_io *io, const fsdp_retention *policy, bool dry_run, report *all,
                          fsdp_error *err)
{
    fsdp_retain_opts opts = {.apply = !dry_run,
                             .report = all ? take_action : NULL,
                             .report_context = all,
                             .access.disk = io};
    return fsdp_run_retain("/run", policy, &opts, err);
}

static void must_retain(fsdp_io *io, const fsdp_retention *policy)
{
    fsdp_error err = {0};
    cr_assert_eq(retain(io, policy, false, NULL, &err), FSDP_OK, "%s", err.text);
}

Test(run, retention_keeps_the_union_of_its_rules)
{
    fsdp_io *io = tiny_disk();
    save_steps(io, (int64_t[]){10, 20, 30, 40, 50, 60, 70, 80}, 8);
    char path[200];
    in_step(20, ".pin", path);
    write_small(io, path);
    int64_t pins[] = {10, 999};
    must_retain(io, NULL);
    expect_good(io, "80 70 60 50 40 30 20 10");
    must_retain(io,
                &(fsdp_retention){.keep_last = 3, .keep_every = 25, .pins = pins, .pin_count = 2});
    expect_good(io, "80 70 60 50 20 10");
    must_retain(io, &(fsdp_retention){.keep_last = 2});
    expect_good(io, "80 70 20");
    fsdp_sim_free(io);
}

static int fail_pin(void *user, fsdp_io_call call, const char *path)
{
    const char *pin = user;
    return call == FSDP_CALL_INFO && strcmp(path, pin) == 0 ? -EIO : 0;
}

Test(run, a_pin_that_cannot_be_read_keeps_its_step)
{
    fsdp_io *disk = tiny_disk(), *io;
    char path[200];
    save_steps(disk, (int64_t[]){10, 20, 30, 40}, 4);
    in_step(10, ".pin", path);
    fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_INFO,
                            .at = 1,
                            .forever = true,
                            .action = FSDP_FAULT_CALL,
                            .call = fail_pin,
                            .user = path};
    cr_assert_eq(fsdp_io_fault_create(disk, &plan, &io, NULL), FSDP_OK);
    must_retain(io, &(fsdp_retention){.keep_last = 2});
    expect_good(disk, "40 30 10");
    fsdp_io_fault_free(io);
    fsdp_sim_free(disk);
}

Test(run, retention_counts_only_what_verifies_and_leaves_the_rest_alone)
{
    fsdp_io *io = tiny_disk();
    save_steps(io, (int64_t[]){10, 20, 30, 40, 50}, 5);
    flip_manifest(io, 50);
    flip_manifest(io, 30);
    flip_manifest(io, 10);
    cr_assert_eq(fsdp_io_mkdir(io, "/run/step-00000040.bak", NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_mkdir(io, "/run/step-5", NULL), FSDP_OK);
    must_retain(io, &(fsdp_retention){.keep_last = 2});
    expect_good(io, "40 20");
    const char *const kept[] = {"/run/step-00000050", "/run/step-00000030", "/run/step-00000010",
                                "/run/step-00000040.bak", "/run/step-5"};
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
        cr_assert(fsdp_io_exists(io, kept[i]), "%s", kept[i]);
    fsdp_sim_free(io);
}

/* Flips a byte of a tensor, which only its hash detects. */
static void flip_data(fsdp_io *io, int64_t step)
{
    char path[200], byte;
    fsdp_file *file;
    fsdp_file_info info;
    in_step(step, "shard-00000-of-00001.h5", path);
    cr_assert_eq(io->ops->info(io, path, &info), 0);
    for (int64_t at = info.size - 1; at >= 0; at--) {
        cr_assert_eq(fsdp_io_open(io, path, FSDP_IO_WRITE, &file, NULL), FSDP_OK);
        cr_assert_eq(fsdp_io_read(file, path, &byte, 1, at, NULL), FSDP_OK);
        char other = (char)(byte ^ 1);
        cr_assert_eq(fsdp_io_write(file, path, &other, 1, at, NULL), FSDP_OK);
        fsdp_verify_opts quick = {.level = FSDP_VERIFY_QUICK, .access.disk = io},
                         data = {.level = FSDP_VERIFY_DATA, .access.disk = io};
        bool found = fsdp_checkpoint_verify(step_path(step), &quick, NULL, NULL) == FSDP_OK &&
                     fsdp_checkpoint_verify(step_path(step), &data, NULL, NULL) == FSDP_DIFFERS;
        if (!found)
            cr_assert_eq(fsdp_io_write(file, path, &byte, 1, at, NULL), FSDP_OK);
        cr_assert_eq(fsdp_io_close(&file, path, NULL), FSDP_OK);
        if (found)
            return;
    }
    cr_assert_fail("no byte of a tensor");
}

static void save_real_step(fsdp_io *io, int64_t step)
{
    fsdp_ctl *self;
    test_state state;
    fsdp_error err = {0};
    fsdp_save_opts opts = {0};
    opts.access.disk = io;
    opts.step = &step;
    cr_assert_eq(fsdp_ctl_self(&self, &err), FSDP_OK);
    cr_assert_eq(test_state_create(&(state_part){.model = STATE_SMALL, .world = 1, .rank = 0}, true,
                                   1, &state, &err),
                 FSDP_OK);
    cr_assert_eq(fsdp_sd_save(state.sd, self, step_path(step), &opts, &err), FSDP_OK, "%s",
                 err.text);
    test_state_release(&state);
    fsdp_ctl_free(self);
}

static void expect_there(fsdp_io *io, const int64_t *steps, int n, int64_t last)
{
    for (int64_t step = 10; step <= last; step += 10) {
        bool wanted = false;
        for (int i = 0; i < n; i++)
            wanted = wanted || steps[i] == step;
        cr_assert_eq(fsdp_io_exists(io, step_path(step)), wanted, "step %d", (int)step);
    }
}

Test(run, no_good_step_goes_for_the_sake_of_one_whose_data_is_damaged)
{
    fsdp_io *io = tiny_disk();
    for (int64_t step = 10; step <= 60; step += 10)
        save_real_step(io, step);
    flip_data(io, 30);
    flip_data(io, 40);
    report dry = {{0}}, real = {{0}};
    fsdp_retention policy = {.keep_last = 4};
    cr_assert_eq(retain(io, &policy, true, &dry, NULL), FSDP_OK);
    cr_assert_eq(retain(io, &policy, false, &real, NULL), FSDP_OK);
    cr_assert_str_eq(dry.text, real.text);
    cr_assert(strstr(real.text, "+ step-00000040: does not verify: "), "%s", real.text);
    expect_there(io, (int64_t[]){10, 20, 30, 40, 50, 60}, 6, 60);
    save_real_step(io, 70);
    must_retain(io, &policy);
    expect_there(io, (int64_t[]){20, 30, 40, 50, 60, 70}, 6, 70);
    fsdp_sim_free(io);
}

static int count_call(void *user, fsdp_io_call call, const char *path)
{
    (void)call;
    *(int *)user += strstr(path, "/shard-") != NULL;
    return 0;
}

Test(run, retention_reads_a_step_once_and_again_when_it_has_changed)
{
    fsdp_io *sim = tiny_disk(), *io;
    int reads = 0;
    fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_PREAD,
                            .at = 1,
                            .forever = true,
                            .action = FSDP_FAULT_CALL,
                            .call = count_call,
                            .user = &reads};
    cr_assert_eq(fsdp_io_fault_create(sim, &plan, &io, NULL), FSDP_OK);
    fsdp_retention policy = {.keep_last = 3};
    for (int64_t step = 10; step <= 40; step += 10)
        save_real_step(io, step);
    reads = 0;
    must_retain(io, &policy);
    int first = reads;
    must_retain(io, &policy); /* deletes nothing */
    int idle = reads - first;
    save_real_step(io, 50);
    reads = 0;
    must_retain(io, &policy);
    int second = reads;
    cr_assert_gt(first, second);
    cr_assert_gt(second, 2 * idle);
    flip_data(sim, 40);
    save_real_step(io, 60);
    must_retain(io, &policy);
    expect_there(io, (int64_t[]){30, 40, 50, 60}, 4, 60);
    fsdp_io_fault_free(io);
    fsdp_sim_free(sim);
}

/* --- stopped --- */

/* Stops at the n-th call of the callback. */
typedef struct stopping {
    int asked, at;
} stopping;

static int stop_at(void *user, int64_t done, int64_t total, const char *what)
{
    stopping *work = user;
    (void)done, (void)total, (void)what;
    return ++work->asked == work->at;
}

static fsdp_status retain_and_stop(fsdp_io *io, bool dry_run, int at, report *all, fsdp_error *err)
{
    stopping work = {.at = at};
    fsdp_watch watch = {.context = &work, .progress = stop_at};
    const fsdp_retention policy = {.keep_last = 2};
    fsdp_status st = fsdp_run_retain("/run", &policy,
                                     &(fsdp_retain_opts){.apply = !dry_run,
                                                         .report = take_action,
                                                         .report_context = all,
                                                         .watch = watch,
                                                         .access.disk = io},
                                     err);
    cr_assert(st != FSDP_OK || work.asked < at, "asked %d times, stopped at %d", work.asked, at);
    return st;
}

Test(run, retention_that_is_stopped_while_it_reads_removes_nothing)
{
    fsdp_io *io = tiny_disk();
    for (int64_t step = 10; step <= 40; step += 10)
        save_real_step(io, step);
    for (int dry_run = 0; dry_run < 2; dry_run++) {
        fsdp_error err = {0};
        report all = {{0}};
        cr_assert_eq(retain_and_stop(io, dry_run, 1, &all, &err), FSDP_ERR_CANCELLED);
        cr_assert(strstr(err.text, "stopped on request; nothing was changed"), "%s", err.text);
        cr_assert_str_eq(all.text, "");
        expect_there(io, (int64_t[]){10, 20, 30, 40}, 4, 40);
    }
    fsdp_sim_free(io);
}

/* One of the stops comes before the second removal: one checkpoint is deleted then, and reported. */
Test(run, retention_that_is_stopped_later_tells_what_it_removed)
{
    fsdp_io *io = tiny_disk();
    fsdp_error err = {0};
    report all = {{0}};
    for (int64_t step = 10; step <= 40; step += 10)
        save_real_step(io, step);
    for (int at = 1; fsdp_io_exists(io, step_path(20)); at++)
        cr_assert_eq(retain_and_stop(io, false, at, &all, &err), FSDP_ERR_CANCELLED);
    cr_assert(strstr(err.text, "before 'step-00000010' was removed"), "%s", err.text);
    cr_assert(strstr(all.text, "- step-00000020: "), "%s", all.text);
    cr_assert_null(strstr(all.text, "step-00000010"), "%s", all.text);
    expect_there(io, (int64_t[]){10, 30, 40}, 3, 40);
    fsdp_sim_free(io);
}

static int refuse_step_40(void *user, fsdp_io_call call, const char *path)
{
    (void)user, (void)call;
    return strstr(path, "step-00000040/manifest") ? -ENOMEM : 0;
}

/* A failure before the stop must not hide the stop. */
Test(run, retention_stops_on_request_whatever_failed_before)
{
    fsdp_io *sim = tiny_disk(), *io;
    for (int64_t step = 10; step <= 40; step += 10)
        save_real_step(sim, step);
    fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_OPEN,
                            .at = 1,
                            .forever = true,
                            .action = FSDP_FAULT_CALL,
                            .call = refuse_step_40};
    cr_assert_eq(fsdp_io_fault_create(sim, &plan, &io, NULL), FSDP_OK);
    fsdp_error err = {0};
    report all = {{0}};
    cr_assert_neq(retain_and_stop(io, true, 1000, &all, &err), FSDP_OK);
    all.text[0] = '\0';
    cr_assert_eq(retain_and_stop(io, false, 1, &all, &err), FSDP_ERR_CANCELLED, "%s", err.text);
    expect_there(sim, (int64_t[]){10, 20, 30, 40}, 4, 40);
    fsdp_io_fault_free(io);
    fsdp_sim_free(sim);
}

/* Without a policy no other data is read. */
Test(run, retention_is_stopped_while_it_reads_what_an_overwrite_made, .timeout = 30)
{
    fsdp_io *io = tiny_disk();
    const char old[] = "/run/step-00000010.old-" UUID;
    fsdp_error err = {0};
    save_real_step(io, 10);
    cr_assert_eq(io->ops->rename(io, step_path(10), "/run/other", false), 0);
    save_real_step(io, 10);
    cr_assert_eq(io->ops->rename(io, "/run/other", old, false), 0);
    stopping work = {.at = 1};
    fsdp_watch watch = {.context = &work, .progress = stop_at};
    cr_assert_eq(fsdp_run_retain(
                     "/run", NULL,
                     &(fsdp_retain_opts){.apply = true, .watch = watch, .access.disk = io}, &err),
                 FSDP_ERR_CANCELLED);
    cr_assert(fsdp_io_exists(io, old));
    watch.progress = NULL;
    cr_assert_eq(fsdp_run_retain(
                     "/run", NULL,
                     &(fsdp_retain_opts){.apply = true, .watch = watch, .access.disk = io}, &err),
                 FSDP_OK);
    cr_assert_not(fsdp_io_exists(io, old));
    fsdp_sim_free(io);
}

/* Every save looks up each checkpoint in turn: a small ring of records would drop each before
 * its next use. */
Test(run, a_long_run_of_verified_checkpoints_is_remembered)
{
    enum { STEPS = 1000 };
    for (int round = 0; round < 2; round++)
        for (uint64_t i = 0; i < STEPS; i++) {
            fsdp_fingerprint print = {{i, ~i}};
            cr_assert_eq(fsdp_verified_has(&print), round == 1);
            fsdp_verified_add(&print);
        }
}

/* --- leftovers --- */

Test(run, retention_finishes_what_was_interrupted)
{
    fsdp_io *io = tiny_disk();
    save_steps(io, (int64_t[]){10, 20}, 2);
    cr_assert_eq(io->ops->rename(io, step_path(10), "/run/step-00000010.deleting-" UUID, false), 0);
    cr_assert_eq(fsdp_io_mkdir(io, "/run/step-00000030.tmp-" UUID, NULL), FSDP_OK);
    write_small(io, "/run/step-00000030.tmp-" UUID "/shard-00000-of-00001.h5");
    write_small(io, "/run/.lock.tmp-" UUID);
    must_retain(io, NULL);
    expect_good(io, "20");
    cr_assert_not(fsdp_io_exists(io, "/run/step-00000010.deleting-" UUID));
    cr_assert_not(fsdp_io_exists(io, "/run/step-00000030.tmp-" UUID));
    cr_assert_not(fsdp_io_exists(io, "/run/.lock.tmp-" UUID));
    cr_assert_not(fsdp_io_exists(io, "/run/.lock"));
    fsdp_sim_free(io);
}

/* A power cut must not bring a half of it back as step-N: the new name is durable before the tree goes. */
Test(run, retention_syncs_an_interrupted_delete_before_it_finishes_it)
{
    for (uint64_t seed = 1; seed <= 16; seed++) {
        fsdp_io *io = tiny_disk();
        save_steps(io, (int64_t[]){10, 20}, 2);
        cr_assert_eq(io->ops->rename(io, step_path(10), "/run/step-00000010.deleting-" UUID, false),
                     0);
        must_retain(io, NULL);
        fsdp_io *after = fsdp_sim_crash(io, seed);
        cr_assert_not(fsdp_io_exists(after, step_path(10)), "seed %d", (int)seed);
        fsdp_sim_free(after);
        fsdp_sim_free(io);
    }
}

/* A save from outside the run, such as a conversion, that lost the lease and goes on. */
Test(run, retention_leaves_a_staging_alone_as_long_as_its_maker_lives)
{
    fsdp_io *io = tiny_disk();
    fsdp_staging alive;
    save_steps(io, (int64_t[]){10}, 1);
    cr_assert_eq(fsdp_staging_begin(io, step_path(20),
                                    &(fsdp_staging_opts){.durable = true, .has_lease = true},
                                    &alive, NULL),
                 FSDP_OK);
    report dry = {{0}}, real = {{0}};
    cr_assert_eq(retain(io, NULL, true, &dry, NULL), FSDP_OK);
    cr_assert_eq(retain(io, NULL, false, &real, NULL), FSDP_OK);
    cr_assert(fsdp_io_exists(io, alive.path));
    cr_assert(strstr(real.text, ": a save in progress"), "%s", real.text);
    cr_assert_str_eq(dry.text, real.text);
    cr_assert_eq(tiny_save_staged(&alive, 20, NULL), FSDP_OK);
    expect_good(io, "20 10");
    cr_assert_eq(fsdp_staging_begin(io, step_path(30),
                                    &(fsdp_staging_opts){.durable = true, .has_lease = true},
                                    &alive, NULL),
                 FSDP_OK);
    char *path = alive.path;
    alive.path = NULL;
    fsdp_staging_release(&alive); /* has the effect of the end of its process */
    must_retain(io, NULL);
    cr_assert_not(fsdp_io_exists(io, path));
    free(path);
    fsdp_sim_free(io);
}

#define STAGING_30 "/run/step-00000030.tmp-" UUID

static int publish_late(void *user, fsdp_io_call call, const char *path)
{
    fsdp_io *disk = user;
    (void)call;
    if (strstr(path, "step-00000030"))
        cr_assert_lt(disk->ops->rename(disk, STAGING_30, step_path(30), false), 0,
                     "published while it is emptied, at '%s'", path);
    return 0;
}

Test(run, what_retention_empties_cannot_be_published)
{
    fsdp_io *sim = tiny_disk(), *io;
    cr_assert_eq(fsdp_io_mkdir(sim, STAGING_30, NULL), FSDP_OK);
    write_small(sim, STAGING_30 "/shard-00000-of-00001.h5");
    fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_UNLINK | 1 << FSDP_CALL_RMDIR,
                            .at = 1,
                            .forever = true,
                            .action = FSDP_FAULT_CALL,
                            .call = publish_late,
                            .user = sim};
    cr_assert_eq(fsdp_io_fault_create(sim, &plan, &io, NULL), FSDP_OK);
    must_retain(io, NULL);
    cr_assert_geq(fsdp_io_fault_calls(io), 2);
    cr_assert_not(fsdp_io_exists(sim, STAGING_30));
    cr_assert_not(fsdp_io_exists(sim, step_path(30)));
    fsdp_io_fault_free(io);
    fsdp_sim_free(sim);
}

Test(run, a_step_that_an_overwrite_set_aside_is_brought_back_or_removed)
{
    fsdp_io *io = tiny_disk();
    save_steps(io, (int64_t[]){10, 20, 30, 40}, 4);
    cr_assert_eq(io->ops->rename(io, step_path(40), "/run/step-00000040.old-" UUID, false), 0);
    tiny_must_save(io, "/run/other", 30, false);
    cr_assert_eq(io->ops->rename(io, "/run/other", "/run/step-00000030.old-" UUID, false), 0);
    tiny_must_save(io, "/run/other", 20, false);
    cr_assert_eq(io->ops->rename(io, "/run/other", "/run/step-00000020.old-" UUID, false), 0);
    flip_manifest(io, 20);
    expect_latest(io, 30, 1, "set aside");
    report dry = {{0}}, real = {{0}};
    cr_assert_eq(retain(io, NULL, true, &dry, NULL), FSDP_OK);
    cr_assert(fsdp_io_exists(io, "/run/step-00000040.old-" UUID));
    cr_assert_eq(retain(io, NULL, false, &real, NULL), FSDP_OK);
    cr_assert_str_eq(dry.text, real.text);
    cr_assert(strstr(real.text, "+ step-00000040.old-" UUID ": restored"), "%s", real.text);
    cr_assert(strstr(real.text, "- step-00000030.old-" UUID ": overwritten"), "%s", real.text);
    cr_assert(strstr(real.text, "+ step-00000020.old-" UUID ": set aside"), "%s", real.text);
    expect_good(io, "40 30 10");
    cr_assert_not(fsdp_io_exists(io, "/run/step-00000030.old-" UUID));
    cr_assert_eq(tiny_read(io, "/run/step-00000020.old-" UUID), 20);
    fsdp_sim_free(io);
}

Test(run, retention_removes_a_step_that_holds_nothing_and_none_that_holds_anything)
{
    fsdp_io *io = tiny_disk();
    save_steps(io, (int64_t[]){10, 20}, 2);
    const int64_t steps[] = {30, 40, 50, 60, 70};
    const char *const names[] = {NULL, "index.h5", "shard-00000-of-00001.h5", "notes", ".pin"};
    for (int i = 0; i < 5; i++) {
        char path[200];
        cr_assert_eq(fsdp_io_mkdir(io, step_path(steps[i]), NULL), FSDP_OK);
        in_step(steps[i], names[i] ? names[i] : "", path);
        if (names[i])
            write_small(io, path);
    }
    must_retain(io, NULL);
    for (int i = 0; i < 5; i++)
        cr_assert(fsdp_io_exists(io, step_path(steps[i])));
    report all = {{0}};
    fsdp_retention policy = {.keep_last = 2};
    cr_assert_eq(retain(io, &policy, false, &all, NULL), FSDP_OK);
    for (int i = 0; i < 5; i++)
        cr_assert_eq(fsdp_io_exists(io, step_path(steps[i])), i >= 2, "step %d", (int)steps[i]);
    cr_assert(strstr(all.text, "- step-00000030: holds neither"), "%s", all.text);
    fsdp_sim_free(io);
}

Test(run, retention_that_would_keep_fewer_than_two_is_refused)
{
    fsdp_io *io = tiny_disk();
    save_steps(io, (int64_t[]){10, 20}, 2);
    for (int keep = -1; keep < 2; keep++) {
        fsdp_error err = {0};
        fsdp_retention policy = {.keep_last = keep};
        cr_assert_eq(retain(io, &policy, false, NULL, &err), FSDP_ERR_USAGE);
        cr_assert(strstr(err.text, "at least 2"), "%s", err.text);
    }
    expect_good(io, "20 10");
    fsdp_sim_free(io);
}

Test(run, a_dry_run_reports_what_a_real_one_does)
{
    fsdp_io *io = tiny_disk();
    save_steps(io, (int64_t[]){10, 20, 30, 40, 50, 60}, 6);
    flip_manifest(io, 30);
    cr_assert_eq(fsdp_io_mkdir(io, "/run/step-00000070.tmp-" UUID, NULL), FSDP_OK);
    int64_t pin = 20;
    fsdp_retention policy = {.keep_last = 2, .keep_every = 40, .pins = &pin, .pin_count = 1};
    report dry = {{0}}, real = {{0}};
    fsdp_error err = {0};
    cr_assert_eq(retain(io, &policy, true, &dry, &err), FSDP_OK);
    expect_good(io, "60 50 40 20 10");
    cr_assert_eq(retain(io, &policy, false, &real, &err), FSDP_OK);
    expect_good(io, "60 50 40 20");
    cr_assert_str_eq(dry.text, real.text);
    cr_assert(
        strstr(real.text,
               "- step-00000070.tmp-" UUID ": interrupted save\n+ step-00000060: newest 2\n"
               "+ step-00000050: newest 2\n+ step-00000040: every 40\n+ step-00000030: does not "
               "verify: "),
        "%s", real.text);
    cr_assert(strstr(real.text, "+ step-00000020: pinned\n- step-00000010: no rule keeps it\n"),
              "%s", real.text);
    fsdp_sim_free(io);
}

Test(run, another_job_at_work_stops_retention_and_not_a_dry_run)
{
    fsdp_io *io = tiny_disk();
    save_steps(io, (int64_t[]){10, 20, 30}, 3);
    cr_assert_eq(fsdp_io_mkdir(io, "/run/step-00000040.tmp-" UUID, NULL), FSDP_OK);
    fsdp_lease *lease;
    fsdp_retention policy = {.keep_last = 2};
    cr_assert_eq(fsdp_lease_take(io, "/run", &lease, NULL), FSDP_OK);
    cr_assert_eq(retain(io, &policy, false, NULL, NULL), FSDP_ERR_EXISTS);
    expect_good(io, "30 20 10");
    report dry = {{0}};
    cr_assert_eq(retain(io, &policy, true, &dry, NULL), FSDP_OK);
    cr_assert(strstr(dry.text, "+ step-00000040.tmp-" UUID ": a save in progress"), "%s", dry.text);
    cr_assert_eq(
        fsdp_run_retain_held(lease, "/run", &policy, &(fsdp_retain_opts){.access.disk = io}, NULL),
        FSDP_OK);
    expect_good(io, "30 20");
    fsdp_lease_release(lease);
    fsdp_sim_free(io);
}

/* --- checkpoints of a version to come --- */

static void make_newer(fsdp_io *io, int64_t step)
{
    char path[200];
    fsdp_file *file;
    in_step(step, "manifest.json", path);
    cr_assert_eq(fsdp_io_open(io, path, FSDP_IO_WRITE, &file, NULL), FSDP_OK);
    const char start[] = "{\n\"fsdp\": {\"major\": 9,";
    cr_assert_eq(fsdp_io_write(file, path, start, sizeof start - 1, 0, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_close(&file, path, NULL), FSDP_OK);
}

Test(run, a_step_of_a_newer_format_version_is_not_passed_over)
{
    fsdp_io *io = tiny_disk();
    save_steps(io, (int64_t[]){10, 20, 30, 40}, 4);
    make_newer(io, 30);
    expect_latest(io, 40, 0, "");
    flip_manifest(io, 40);
    char *path;
    fsdp_error err = {0};
    cr_assert_eq(
        fsdp_run_latest("/run", FSDP_VERIFY_QUICK, NULL, &(fsdp_access){.disk = io}, &path, &err),
        FSDP_ERR_REFUSED);
    cr_assert_null(path);
    cr_assert(strstr(err.text, "'/run/step-00000030' has format version 9"), "%s", err.text);
    cr_assert(strstr(err.text, "its own path"), "%s", err.text);
    fsdp_run_steps steps;
    cr_assert_eq(fsdp_run_list("/run", &(fsdp_access){.disk = io}, &steps, &err), FSDP_OK);
    cr_assert_eq(steps.items[0].state, FSDP_STEP_BROKEN);
    cr_assert_eq(steps.items[1].state, FSDP_STEP_NEWER);
    cr_assert(strstr(steps.items[1].reason, "version 9"), "%s", steps.items[1].reason);
    fsdp_run_steps_release(&steps);
    fsdp_sim_free(io);
}

Test(run, retention_neither_removes_nor_counts_a_newer_format_version)
{
    fsdp_io *io = tiny_disk();
    save_steps(io, (int64_t[]){10, 20, 30, 40, 50}, 5);
    make_newer(io, 20);
    make_newer(io, 40);
    report all = {{0}};
    fsdp_retention policy = {.keep_last = 2};
    cr_assert_eq(retain(io, &policy, false, &all, NULL), FSDP_OK);
    expect_good(io, "50 30");
    cr_assert(fsdp_io_exists(io, step_path(40)));
    cr_assert(fsdp_io_exists(io, step_path(20)));
    cr_assert(strstr(all.text, "+ step-00000040: of a newer format version\n"), "%s", all.text);
    cr_assert(strstr(all.text, "- step-00000010: no rule keeps it\n"), "%s", all.text);
    fsdp_sim_free(io);
}

/* --- a lease that is lost --- */

static int steal_lease(void *user, fsdp_io_call call, const char *path)
{
    (void)call;
    fsdp_io *disk = user;
    if (!strstr(path, "step-"))
        return 0;
    disk->ops->unlink(disk, "/run/.lock");
    write_small(disk, "/run/.lock");
    return 0;
}

/* Another job takes the lease between two removals: the second one is not made. */
Test(run, retention_stops_when_its_lease_is_lost)
{
    fsdp_io *sim = tiny_disk(), *io;
    save_steps(sim, (int64_t[]){10, 20, 30, 40}, 4);
    fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_RENAME,
                            .at = 1,
                            .forever = true,
                            .action = FSDP_FAULT_CALL,
                            .call = steal_lease,
                            .user = sim};
    fsdp_retention policy = {.keep_last = 2};
    cr_assert_eq(fsdp_io_fault_create(sim, &plan, &io, NULL), FSDP_OK);
    fsdp_error err = {0};
    cr_assert_eq(retain(io, &policy, false, NULL, &err), FSDP_ERR_EXISTS);
    cr_assert(strstr(err.text, "lease of '/run' is lost"), "%s", err.text);
    expect_good(sim, "40 30 10");
    fsdp_io_fault_free(io);
    fsdp_sim_free(sim);
}

/* --- crashes: save a step, then retain, under the lease --- */

/* The host of the disks below; its clock is ahead of their files by a minute. */
static fsdp_process played;
static fsdp_host host = {.self = &played, .clock_offset = 60};

static void play(int64_t pid)
{
    fsdp_process_self(NULL, &played);
    played.pid = pid;
}

static fsdp_status save_and_retain(fsdp_io *io, int64_t step, fsdp_error *err)
{
    fsdp_lease *lease;
    fsdp_retention policy = {.keep_last = 2};
    FSDP_TRY(fsdp_lease_take(io, "/run", &lease, err));
    fsdp_status status = tiny_save_held(io, step_path(step), step, err);
    if (status == FSDP_OK)
        status = fsdp_run_retain_held(lease, "/run", &policy,
                                      &(fsdp_retain_opts){.access.disk = io}, err);
    fsdp_lease_release(lease);
    return status;
}

/* Before: 30 20 10 (one more than the policy keeps). Only these may be found. */
static void check_histories(fsdp_io *disk)
{
    char text[400];
    good_steps(disk, text, sizeof text);
    const char *const allowed[] = {"30 20 10", "40 30 20 10", "40 30 10", "40 30 20", "40 30"};
    bool found = false;
    for (size_t i = 0; i < sizeof allowed / sizeof *allowed; i++)
        found = found || strcmp(text, allowed[i]) == 0;
    cr_assert(found, "good steps: %s", text);
}

static void check_recovery(fsdp_io *disk, void *user)
{
    (void)user;
    check_histories(disk);
    play(999999992);
    fsdp_error err = {0};
    char *latest;
    cr_assert_eq(fsdp_run_latest("/run", FSDP_VERIFY_QUICK, NULL, &(fsdp_access){.disk = disk},
                                 &latest, &err),
                 FSDP_OK, "%s", err.text);
    int64_t newest = tiny_read(disk, latest);
    fsdp_string_free(latest);
    /* the job starts again, repeats missing steps and goes on; no leftovers stay */
    for (int64_t step = newest + 10; step <= 60; step += 10)
        cr_assert_eq(save_and_retain(disk, step, &err), FSDP_OK, "%s", err.text);
    expect_good(disk, "60 50");
    fsdp_run_steps steps;
    cr_assert_eq(fsdp_run_scan("/run", disk, &steps, NULL), FSDP_OK);
    cr_assert_eq(steps.count, 2);
    fsdp_run_steps_release(&steps);
    play(999999991);
}

/* power_cut, with its torture, tries many more */
enum { SEEDS = 8 };

static void crash_everywhere(int stiff_errnum)
{
    fsdp_io *sim = tiny_disk(), *inner = sim;
    tiny_stiff stiff;
    save_steps(sim, (int64_t[]){10, 20, 30}, 3);
    play(999999991);
    sim->host = &host;
    if (stiff_errnum)
        inner = tiny_stiff_io(&stiff, sim, stiff_errnum);
    tiny_crashes crashes = {.seeds = test_sample_of(SEEDS, 4), .check = check_recovery};
    fsdp_io *io = tiny_crash_io(&crashes, sim, inner);
    fsdp_error err = {0};
    cr_assert_eq(save_and_retain(io, 40, &err), FSDP_OK, "%s", err.text);
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        fsdp_io *left = fsdp_sim_crash(sim, seed);
        expect_good(left, "40 30");
        fsdp_sim_free(left);
    }
    printf("%lld crash points, %lld states\n", (long long)crashes.points,
           (long long)crashes.states);
    cr_assert_gt(crashes.points, 25);
    fsdp_io_fault_free(io);
    if (stiff_errnum)
        fsdp_io_fault_free(inner);
    fsdp_sim_free(sim);
}

Test(run, a_power_cut_in_save_and_retention_loses_nothing, .timeout = 120)
{
    crash_everywhere(0);
    crash_everywhere(EXDEV);
}

/* forever: as for a process that was killed before that call. */
static bool fails_at(int64_t n, int errnum, bool forever)
{
    fsdp_io *sim = tiny_disk(), *io;
    save_steps(sim, (int64_t[]){10, 20, 30}, 3);
    play(999999991);
    sim->host = &host;
    fsdp_fault_plan plan = {
        .at = n, .forever = forever, .action = FSDP_FAULT_ERRNO, .errnum = errnum};
    cr_assert_eq(fsdp_io_fault_create(sim, &plan, &io, NULL), FSDP_OK);
    fsdp_error err = {0};
    fsdp_status status = save_and_retain(io, 40, &err);
    bool reached = fsdp_io_fault_calls(io) >= n;
    cr_assert(status == FSDP_OK || err.text[0]);
    if (status == FSDP_OK)
        cr_assert_eq(tiny_read(sim, step_path(40)), 40);
    check_recovery(sim, NULL);
    fsdp_io_fault_free(io);
    fsdp_sim_free(sim);
    return reached;
}

Test(run, an_error_or_a_kill_at_every_call_loses_nothing, .timeout = 120)
{
    const int errnums[] = {EIO, ENOSPC, EACCES, EXDEV};
    const int64_t every = test_sample_at_most(4);
    int64_t cases = 0;
    for (size_t i = 0; i < sizeof errnums / sizeof *errnums; i++) {
        for (int64_t n = 1 + (int64_t)i % every; fails_at(n, errnums[i], false); n += every)
            cases++;
    }
    for (int64_t n = 1; fails_at(n, EIO, true); n += every)
        cases++;
    printf("%lld failed calls\n", (long long)cases);
    cr_assert_gt(cases, 300 / every);
}

/* A checkpoint that is unreadable for a moment is not damaged: retention must not delete it, and must not
 * count older ones in its place. */
Test(run, retention_under_errors_never_leaves_fewer_than_two)
{
    for (int64_t n = 1;; n++) {
        fsdp_io *sim = tiny_disk(), *io;
        save_steps(sim, (int64_t[]){10, 20, 30, 40, 50}, 5);
        fsdp_fault_plan plan = {.at = n, .action = FSDP_FAULT_ERRNO, .errnum = EIO};
        cr_assert_eq(fsdp_io_fault_create(sim, &plan, &io, NULL), FSDP_OK);
        (void)!retain(io, &(fsdp_retention){.keep_last = 2}, false, NULL, NULL);
        bool reached = fsdp_io_fault_calls(io) >= n;
        char text[400];
        good_steps(sim, text, sizeof text);
        cr_assert(strncmp(text, "50 40", 5) == 0, "call %lld: %s", (long long)n, text);
        fsdp_io_fault_free(io);
        fsdp_sim_free(sim);
        if (!reached)
            break;
    }
}
