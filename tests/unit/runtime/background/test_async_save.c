/*
 * Saves in the background: the moment that they save, one after the other, failures, stale saves, and the end
 * of a saver with a save in flight. tests/runtime/async_save.py has ranks that are processes, and lost ones.
 */
#include "base/io/io.h"
#include "base/core/mem.h"
#include "tests/support/disk/io_fault.h"
#include "tests/unit/runtime/expect_toy.h"
#include <fsdp/async_save.h>

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

enum { RANKS = 2 };

/* --- paths ------------------------------------------------------------------------------------ */

static char dir[] = "/tmp/fsdp-async-XXXXXX";

static void make_dir(void)
{
    cr_assert(mkdtemp(dir));
}

static void remove_dir(void)
{
    cr_assert_eq(fsdp_io_remove_tree(NULL, dir, NULL), FSDP_OK);
}

TestSuite(async_save, .init = make_dir, .fini = remove_dir);

/* The path is valid in one thread until its next call. */
static const char *in_dir(const char *name)
{
    static _Thread_local char path[120];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static bool exists(const char *name)
{
    char path[160];
    snprintf(path, sizeof path, "%s/%s/manifest.json", dir, name);
    return access(path, F_OK) == 0;
}

static void expect_same_files(const char *one, const char *other)
{
    char command[200];
    snprintf(command, sizeof command, "cd %s && diff -r %s %s", dir, one, other);
    cr_assert_eq(system(command), 0);
}

/* --- disks ------------------------------------------------------------------------------------ */

/* Writes wait until every rank has trained on. */
static atomic_int ranks_at_work;

static int wait_for_training(void *user, fsdp_io_call call, const char *path)
{
    (void)user;
    (void)call;
    (void)path;
    for (int i = 0; i < 20000 && atomic_load(&ranks_at_work) > 0; i++)
        usleep(1000);
    return atomic_load(&ranks_at_work) > 0 ? -ETIMEDOUT : 0;
}

static fsdp_io *gated_disk(void)
{
    fsdp_error err = {0};
    fsdp_io *io = NULL;
    const fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_PWRITE,
                                  .at = 1,
                                  .forever = true,
                                  .action = FSDP_FAULT_CALL,
                                  .call = wait_for_training};
    atomic_store(&ranks_at_work, RANKS);
    cr_assert_eq(fsdp_io_fault_create(NULL, &plan, &io, &err), FSDP_OK);
    return io;
}

static fsdp_io *full_disk(void)
{
    fsdp_error err = {0};
    fsdp_io *io = NULL;
    const fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_PWRITE,
                                  .at = 1,
                                  .forever = true,
                                  .action = FSDP_FAULT_ERRNO,
                                  .errnum = ENOSPC};
    cr_assert_eq(fsdp_io_fault_create(NULL, &plan, &io, &err), FSDP_OK);
    return io;
}

static void run_on(fsdp_io *disk, toy_body body, const char *device)
{
    expect_net_on(device, (toy_case){1, {RANKS}, {"dp"}, declare_net, body, disk, {0}});
    fsdp_io_fault_free(disk);
}

static fsdp_root_save_opts on_disk(const toy *net)
{
    fsdp_root_save_opts opts = {0};
    opts.save.access.disk = (void *)net->user;
    return opts;
}

/* --- the moment of the call ------------------------------------------------------------------- */

static fsdp_status make_extra(const toy *net, float *row, fsdp_sd **extra_out, fsdp_error *err)
{
    const fsdp_placement rows = {FSDP_SHARD, 0, 0};
    const int64_t shape[] = {RANKS, 2};
    FSDP_TRY(fsdp_sd_create(extra_out, err));
    return fsdp_sd_add_tensor(
        *extra_out, FSDP_NAME("data.row"),
        &(fsdp_tensor){FSDP_F32, 2, shape, {.mesh = net->mesh, .placement = {rows}}, row}, err);
}

static fsdp_status save_and_train_on(toy *net, fsdp_error *err)
{
    fsdp_async_saver *saver = NULL;
    fsdp_sd *extra = NULL;
    float row[] = {1, 2};
    int64_t step = 2;
    fsdp_root_save_opts opts = {.save.step = &step};
    FSDP_TRY(net_train(net, 2, err));
    FSDP_TRY(make_extra(net, row, &extra, err));
    opts.extra = extra;
    FSDP_TRY(fsdp_root_save(net->root, in_dir("sync"), &opts, err));

    opts.save.access.disk = (void *)net->user;
    FSDP_TRY(fsdp_async_saver_create(net->root, NULL, &saver, err));
    EXPECT(fsdp_async_save_is_done(saver));
    FSDP_TRY(fsdp_async_save(saver, in_dir("async"), &opts, err));
    fsdp_sd_free(extra);
    row[0] = 77;
    step = 99;
    FSDP_TRY(net_train(net, 3, err));
    double rank = fsdp_world_rank(net->rank->world); /* over the training's control plane */
    FSDP_TRY(fsdp_world_mean(net->rank->world, &rank, err));
    EXPECT(rank == 0.5);
    EXPECT(!fsdp_async_save_is_done(saver) && !exists("async"));
    FSDP_TRY(net_spoil(net, err));
    atomic_fetch_sub(&ranks_at_work, 1);

    fsdp_async_report report;
    FSDP_TRY(fsdp_async_save_wait(saver, &report, err));
    EXPECT(fsdp_async_save_is_done(saver) && exists("async"));
    EXPECT(report.step == 2 && strcmp(report.path, in_dir("async")) == 0 && !report.is_stale);
    EXPECT(report.bytes > 0 && report.pool_bytes >= report.bytes && report.write_ms > 0);
    fsdp_async_saver_free(saver);
    return FSDP_OK;
}

static void expect_moment(const char *device)
{
    run_on(gated_disk(), save_and_train_on, device);
    expect_same_files("sync", "async");
}

Test(async_save, saves_the_state_of_the_call_while_training_goes_on)
{
    expect_moment("cpu");
}

Test(async_save, saves_the_state_of_the_call_beside_streams)
{
    expect_moment("cpu-async");
}

/* --- one after the other ---------------------------------------------------------------------- */

static int be_slow(void *user, fsdp_io_call call, const char *path)
{
    (void)user;
    (void)call;
    (void)path;
    usleep(20000);
    return 0;
}

static fsdp_status save_twice(toy *net, fsdp_error *err)
{
    fsdp_async_saver *saver = NULL;
    fsdp_async_report first, second;
    fsdp_root_save_opts opts = on_disk(net);
    FSDP_TRY(fsdp_async_saver_create(net->root, NULL, &saver, err));
    FSDP_TRY(fsdp_async_save(saver, in_dir("one"), &opts, err));
    FSDP_TRY(net_train(net, 1, err));
    FSDP_TRY(fsdp_async_save(saver, in_dir("two"), &opts, err));
    EXPECT(exists("one"));
    FSDP_TRY(fsdp_async_save_wait(saver, &first, err));
    EXPECT(exists("two") && strcmp(first.path, in_dir("two")) == 0);
    FSDP_TRY(fsdp_async_save_wait(saver, &second, err));
    EXPECT(second.pool_bytes == first.pool_bytes && second.bytes == first.bytes);

    int64_t step = 3; /* the pool grows with the state */
    float row[] = {1, 2};
    fsdp_sd *extra = NULL;
    FSDP_TRY(make_extra(net, row, &extra, err));
    opts = (fsdp_root_save_opts){.save.step = &step, .into_run = true, .extra = extra};
    FSDP_TRY(fsdp_async_save(saver, in_dir("run"), &opts, err));
    fsdp_sd_free(extra);
    FSDP_TRY(fsdp_async_save_wait(saver, &second, err));
    EXPECT(second.bytes == first.bytes + 8 && second.pool_bytes > first.pool_bytes);
    EXPECT(exists("run/step-00000003") && strcmp(second.path, in_dir("run/step-00000003")) == 0);
    fsdp_async_saver_free(saver);
    return FSDP_OK;
}

Test(async_save, the_next_save_waits_and_uses_the_memory_again)
{
    fsdp_error err = {0};
    fsdp_io *io = NULL;
    const fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_PWRITE | 1 << FSDP_CALL_SYNC,
                                  .at = 1,
                                  .forever = true,
                                  .action = FSDP_FAULT_CALL,
                                  .call = be_slow};
    cr_assert_eq(fsdp_io_fault_create(NULL, &plan, &io, &err), FSDP_OK);
    run_on(io, save_twice, "cpu");
}

/* --- failures --------------------------------------------------------------------------------- */

static fsdp_status fail_on_disk(toy *net, fsdp_error *err)
{
    fsdp_async_saver *saver = NULL;
    fsdp_async_report report;
    fsdp_error why = {0};
    fsdp_root_save_opts full = on_disk(net);
    FSDP_TRY(fsdp_async_saver_create(net->root, NULL, &saver, err));
    FSDP_TRY(fsdp_async_save(saver, in_dir("full"), &full, err));
    FSDP_TRY(net_train(net, 1, err));
    EXPECT(fsdp_async_save(saver, in_dir("next"), NULL, &why) == FSDP_ERR_NO_SPACE);
    EXPECT(strstr(why.text, in_dir("full")) && strstr(why.text, "in the background"));
    EXPECT(!exists("full") && !exists("next"));
    FSDP_TRY(fsdp_async_save_wait(saver, NULL, err)); /* a failure is returned once */

    FSDP_TRY(fsdp_async_save(saver, in_dir("full"), &full, err));
    EXPECT(fsdp_async_save_wait(saver, &report, &why) == FSDP_ERR_NO_SPACE);
    EXPECT(strcmp(report.path, in_dir("full")) == 0);
    FSDP_TRY(fsdp_async_save(saver, in_dir("full"), NULL, err));
    FSDP_TRY(fsdp_async_save_wait(saver, NULL, err));
    EXPECT(exists("full"));

    bool is_first = fsdp_world_rank(net->rank->world) == 0; /* one rank fails before the copy */
    EXPECT(fsdp_async_save(saver, is_first ? in_dir("next") : NULL, NULL, &why) == FSDP_ERR_USAGE);
    EXPECT(strstr(why.text, "'dir' is NULL"));
    FSDP_TRY(fsdp_async_save(saver, in_dir("next"), NULL, err));
    FSDP_TRY(fsdp_async_save_wait(saver, NULL, err));
    EXPECT(exists("next"));
    fsdp_async_saver_free(saver);
    return FSDP_OK;
}

Test(async_save, a_failure_is_returned_once_on_all_ranks)
{
    run_on(full_disk(), fail_on_disk, "cpu");
}

static int stop_at_once(void *context, int64_t done, int64_t total, const char *what)
{
    (void)context;
    (void)done;
    (void)total;
    (void)what;
    return 1;
}

static fsdp_status stop_save(toy *net, fsdp_error *err)
{
    fsdp_async_saver *saver = NULL;
    fsdp_error why = {0};
    fsdp_root_save_opts opts = {0};
    opts.save.watch.progress = stop_at_once;
    FSDP_TRY(fsdp_async_saver_create(net->root, NULL, &saver, err));
    FSDP_TRY(fsdp_async_save(saver, in_dir("stopped"), &opts, err));
    EXPECT(fsdp_async_save_wait(saver, NULL, &why) == FSDP_ERR_CANCELLED);
    EXPECT(!exists("stopped"));
    FSDP_TRY(fsdp_async_save(saver, in_dir("next"), NULL, err));
    fsdp_status status = fsdp_async_save_wait(saver, NULL, err);
    fsdp_async_saver_free(saver);
    return status;
}

Test(async_save, a_watch_stops_the_save)
{
    run_on(NULL, stop_save, "cpu");
}

static fsdp_status refuse_null(toy *net, fsdp_error *err)
{
    fsdp_async_saver *saver = NULL;
    fsdp_async_report report;
    (void)net;
    EXPECT_REFUSAL(fsdp_async_saver_create(NULL, NULL, &saver, why), "'root' is NULL");
    EXPECT_REFUSAL(fsdp_async_save(NULL, "x", NULL, why), "'saver' is NULL");
    EXPECT_REFUSAL(fsdp_async_save_wait(NULL, &report, why), "'saver' is NULL");
    EXPECT(fsdp_async_save_is_done(NULL) && !report.path);
    return FSDP_OK;
}

static fsdp_status refuse_pool(toy *net, fsdp_error *err)
{
    const fsdp_async_opts opts = {.pool_bytes = -1};
    fsdp_async_saver *saver = NULL;
    EXPECT_REFUSAL(fsdp_async_saver_create(net->root, &opts, &saver, why),
                   "pool_bytes is -1; give");
    EXPECT(!saver);
    return FSDP_OK;
}

Test(async_save, a_negative_pool_is_refused)
{
    run_on(NULL, refuse_pool, "cpu");
}

Test(async_save, null_is_refused)
{
    run_on(NULL, refuse_null, "cpu");
}

/* The n-th allocation fails, wherever that is: in a call, or in the saver's thread. */
static fsdp_status lack_memory(toy *net, fsdp_error *err)
{
    const fsdp_root_save_opts opts = {.save.skip_fsync = true, .save.overwrite = true};
    bool has_failed = true;
    for (int64_t n = 0; has_failed; n += 1 + n / 50) {
        fsdp_error why = {0};
        fsdp_async_saver *saver = NULL;
        (void)fsdp_mem_fail_after(n, false);
        fsdp_status status = fsdp_async_saver_create(net->root, NULL, &saver, &why);
        if (status == FSDP_OK)
            status = fsdp_async_save(saver, in_dir("ckpt"), &opts, &why);
        if (status == FSDP_OK)
            status = fsdp_async_save_wait(saver, NULL, &why);
        has_failed = status != FSDP_OK || fsdp_mem_fail_after(-1, false) > n;
        (void)fsdp_mem_fail_after(-1, false);
        EXPECT(status == FSDP_OK || status == FSDP_ERR_LIMIT);
        fsdp_async_saver_free(saver);
    }
    EXPECT(exists("ckpt"));
    return FSDP_OK;
}

Test(async_save, lack_of_memory_is_an_error)
{
    expect_net_on("cpu", (toy_case){1, {1}, {"dp"}, declare_net, lack_memory, NULL, {0}});
}

/* --- stale saves ------------------------------------------------------------------------------ */

static fsdp_status save_step(fsdp_async_saver *saver, int64_t step, fsdp_async_report *report_out,
                             fsdp_error *err)
{
    const fsdp_root_save_opts opts = {.save.step = &step, .into_run = true};
    FSDP_TRY(fsdp_async_save(saver, in_dir("run"), &opts, err));
    return fsdp_async_save_wait(saver, report_out, err);
}

static fsdp_status save_stale(toy *net, fsdp_error *err)
{
    fsdp_async_saver *saver = NULL, *lenient = NULL;
    fsdp_async_report report;
    FSDP_TRY(fsdp_async_saver_create(net->root, NULL, &saver, err));
    FSDP_TRY(
        fsdp_async_saver_create(net->root, &(fsdp_async_opts){.allow_equal = true}, &lenient, err));
    FSDP_TRY(save_step(saver, 1, &report, err));
    EXPECT_REFUSAL(save_step(saver, 2, &report, why), "stale: the model of step 2");
    EXPECT(report.is_stale && !exists("run/step-00000002"));
    FSDP_TRY(net_train(net, 1, err));
    FSDP_TRY(save_step(saver, 3, &report, err));
    EXPECT(!report.is_stale);

    FSDP_TRY(save_step(lenient, 4, &report, err));
    EXPECT(!report.is_stale);
    FSDP_TRY(save_step(lenient, 5, &report, err));
    EXPECT(report.is_stale && exists("run/step-00000005"));
    fsdp_async_saver_free(lenient);
    fsdp_async_saver_free(saver);
    return FSDP_OK;
}

Test(async_save, a_model_that_did_not_change_is_an_alarm)
{
    run_on(NULL, save_stale, "cpu");
}

/* Saves after a step with an lr of 0, which changes the optimizer's state only. */
static fsdp_status save_unchanged(toy *net, fsdp_async_saver *saver, fsdp_root_save_opts opts,
                                  const char *name, bool *is_stale_out, fsdp_error *err)
{
    fsdp_async_report report;
    for (size_t i = 0; i < fsdp_optim_group_count(net->optim); i++)
        FSDP_TRY(fsdp_optim_set_lr(net->optim, i, 0, err));
    FSDP_TRY(net_train(net, 1, err));
    FSDP_TRY(fsdp_async_save(saver, in_dir(name), &opts, err));
    FSDP_TRY(fsdp_async_save_wait(saver, &report, err));
    *is_stale_out = report.is_stale;
    return FSDP_OK;
}

/* Steps that are equal, or that one of the two does not have, are no reason. */
static fsdp_status save_steps(toy *net, fsdp_error *err)
{
    enum { NONE = 99 };
    static const int64_t steps[] = {0, 1, 1, NONE, NONE, 1, 2};
    static const bool are_stale[] = {false, true, false, false, false, false, true};
    fsdp_async_saver *saver = NULL;
    const fsdp_async_opts opts = {.allow_equal = true};
    FSDP_TRY(fsdp_async_saver_create(net->root, &opts, &saver, err));
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        const char name[] = {'s', (char)('0' + i), '\0'};
        const fsdp_root_save_opts save = {.save.step = steps[i] == NONE ? NULL : &steps[i]};
        bool is_stale;
        FSDP_TRY(save_unchanged(net, saver, save, name, &is_stale, err));
        if (is_stale != are_stale[i])
            return fsdp_fail(err, FSDP_DIFFERS, "save %zu", i);
    }
    fsdp_async_saver_free(saver);
    return FSDP_OK;
}

Test(async_save, a_save_of_no_other_step_is_no_alarm)
{
    run_on(NULL, save_steps, "cpu");
}

/* A part of the model that one rank has changes, and then one of another rank. */
static fsdp_status save_parts(toy *net, fsdp_error *err)
{
    const fsdp_async_opts opts = {.allow_equal = true};
    fsdp_async_saver *saver = NULL;
    FSDP_TRY(fsdp_async_saver_create(net->root, &opts, &saver, err));
    for (int64_t step = 0; step < 4; step++) {
        const fsdp_root_save_opts save = {.save.step = &step, .save.overwrite = true};
        float *shard = fsdp_param_shard(fsdp_unit_param_at(net->unit[0], 0), NULL);
        bool is_stale;
        if (shard && fsdp_world_rank(net->rank->world) == step - 1)
            shard[0] += 1;
        FSDP_TRY(save_unchanged(net, saver, save, "parts", &is_stale, err));
        EXPECT(is_stale == (step == 3));
    }
    fsdp_async_saver_free(saver);
    return FSDP_OK;
}

Test(async_save, a_change_on_any_rank_is_one)
{
    run_on(NULL, save_parts, "cpu");
}

/* A save that failed leaves nothing to compare the next one with. */
static fsdp_status save_again(toy *net, fsdp_error *err)
{
    fsdp_async_saver *saver = NULL;
    fsdp_async_report report;
    fsdp_root_save_opts opts = {.save.overwrite = true};
    FSDP_TRY(fsdp_async_saver_create(net->root, NULL, &saver, err));
    for (int64_t step = 1; step <= 3; step++) {
        opts.save.step = &step;
        opts.save.access.disk = step == 2 ? (void *)net->user : NULL;
        if (step < 3)
            FSDP_TRY(net_train(net, 1, err));
        FSDP_TRY(fsdp_async_save(saver, in_dir("again"), &opts, err));
        fsdp_error why = {0};
        EXPECT(fsdp_async_save_wait(saver, &report, &why) ==
               (step == 2 ? FSDP_ERR_NO_SPACE : FSDP_OK));
        EXPECT(!report.is_stale);
    }
    fsdp_async_saver_free(saver);
    return FSDP_OK;
}

Test(async_save, a_save_behind_one_that_failed_is_no_alarm)
{
    run_on(full_disk(), save_again, "cpu");
}

/* The optimizer's state and the caller's entries change, under whatever names: the model did not. */
static fsdp_status save_names(toy *net, fsdp_error *err)
{
    static const char *const prefixes[] = {"model.", "", "model."};
    static const char *const names[] = {"data.row", "row", "model.row"};
    const fsdp_placement rows = {FSDP_SHARD, 0, 0};
    const int64_t shape[] = {RANKS, 2};
    fsdp_async_saver *saver = NULL;
    int64_t step = 0;
    FSDP_TRY(
        fsdp_async_saver_create(net->root, &(fsdp_async_opts){.allow_equal = true}, &saver, err));
    for (int i = 0; i < 6; i++) {
        float row[] = {1, (float)i};
        fsdp_sd *extra = NULL;
        bool is_stale;
        FSDP_TRY(fsdp_sd_create(&extra, err));
        FSDP_TRY(fsdp_sd_add_tensor(
            extra, names[i / 2], strlen(names[i / 2]),
            &(fsdp_tensor){FSDP_F32, 2, shape, {.mesh = net->mesh, .placement = {rows}}, row},
            err));
        step++;
        const fsdp_root_save_opts save = {.save.step = &step,
                                          .save.overwrite = true,
                                          .state.model_prefix = prefixes[i / 2],
                                          .extra = extra};
        FSDP_TRY(save_unchanged(net, saver, save, "names", &is_stale, err));
        fsdp_sd_free(extra);
        if (is_stale != (i > 0))
            return fsdp_fail(err, FSDP_DIFFERS, "save %d", i);
    }
    fsdp_async_saver_free(saver);
    return FSDP_OK;
}

Test(async_save, only_the_model_is_compared)
{
    run_on(NULL, save_names, "cpu");
}

static fsdp_status save_optimizer(toy *net, fsdp_error *err)
{
    fsdp_async_saver *saver = NULL;
    FSDP_TRY(fsdp_async_saver_create(net->root, NULL, &saver, err));
    for (int64_t step = 1; step < 3; step++) {
        const fsdp_root_save_opts save = {
            .save.step = &step, .save.overwrite = true, .state.part = FSDP_STATE_OPTIM};
        bool is_stale;
        FSDP_TRY(save_unchanged(net, saver, save, "optim", &is_stale, err));
        EXPECT(!is_stale);
    }
    fsdp_async_saver_free(saver);
    return FSDP_OK;
}

Test(async_save, a_save_without_a_model_is_no_alarm)
{
    run_on(NULL, save_optimizer, "cpu");
}

/* --- retention -------------------------------------------------------------------------------- */

static bool step_exists(int64_t step)
{
    char name[40];
    snprintf(name, sizeof name, "run/step-%08lld", (long long)step);
    return exists(name);
}

/* The caller's list of pins may go as soon as the call has returned. */
static fsdp_status keep_pins_of_call(toy *net, fsdp_error *err)
{
    fsdp_async_saver *saver = NULL;
    fsdp_root_save_opts opts = {.into_run = true};
    FSDP_TRY(fsdp_async_saver_create(net->root, NULL, &saver, err));
    for (int64_t step = 1; step <= 5; step++) {
        int64_t pins[] = {1, 3};
        const fsdp_retention retain = {.keep_last = 2, .pins = pins, .pin_count = 2};
        opts.save.step = &step;
        opts.save.retain = step == 5 ? &retain : NULL;
        opts.save.access.disk = step == 5 ? (void *)net->user : NULL;
        FSDP_TRY(net_train(net, 1, err));
        FSDP_TRY(fsdp_async_save(saver, in_dir("run"), &opts, err));
        pins[0] = pins[1] = 2;
        if (step == 5)
            atomic_fetch_sub(&ranks_at_work, 1);
        FSDP_TRY(fsdp_async_save_wait(saver, NULL, err));
    }
    fsdp_async_saver_free(saver);
    if (fsdp_world_rank(net->rank->world) > 0) /* rank 0 tidies up when the others are done */
        return FSDP_OK;
    EXPECT(step_exists(1) && !step_exists(2) && step_exists(3));
    EXPECT(step_exists(4) && step_exists(5));
    return FSDP_OK;
}

Test(async_save, steps_stay_that_were_pinned_at_the_call)
{
    run_on(gated_disk(), keep_pins_of_call, "cpu");
}

/* --- the end ---------------------------------------------------------------------------------- */

static atomic_int notices;

static void count_notice(void *context, const char *text)
{
    (void)context;
    atomic_fetch_add(&notices, strstr(text, "in the background") != NULL);
}

static fsdp_status end_with_save(toy *net, fsdp_error *err)
{
    fsdp_async_saver *saver = NULL, *left = NULL;
    fsdp_root_save_opts opts = on_disk(net);
    opts.save.watch.notice = count_notice;
    FSDP_TRY(fsdp_async_saver_create(net->root, NULL, &saver, err));
    FSDP_TRY(fsdp_async_save(saver, in_dir("failed"), &opts, err));
    fsdp_async_saver_free(saver);
    FSDP_TRY(fsdp_async_saver_create(net->root, NULL, &saver, err));
    FSDP_TRY(fsdp_async_saver_create(net->root, NULL, &left, err));
    FSDP_TRY(fsdp_async_save(saver, in_dir("freed"), NULL, err));
    FSDP_TRY(fsdp_async_save(left, in_dir("left"), NULL, err));
    fsdp_async_saver_free(saver);
    EXPECT(exists("freed"));
    fsdp_async_saver_free(NULL);
    return FSDP_OK; /* the world ends the one that is left */
}

Test(async_save, the_end_of_a_saver_completes_its_save)
{
    atomic_store(&notices, 0);
    run_on(full_disk(), end_with_save, "cpu");
    cr_assert_eq(atomic_load(&notices), RANKS);
    cr_assert(exists("left"));
    cr_assert_not(exists("failed"));
}
