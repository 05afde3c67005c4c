/* The commit: a checkpoint exists whole or not at all, after a failure at any call. */
#include "tests/unit/statedict/commit/tiny_checkpoint.h"

#include "base/core/mem.h"
#include "statedict/commit/commit_internal.h"
#include "statedict/commit/lease_internal.h"
#include "base/io/process.h"
#include "tests/support/sample_state.h"

#include <fsdp/run.h>

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* --- names --- */

static void expect_name(const char *name, fsdp_step_name_kind kind, int64_t step)
{
    int64_t found = 77;
    cr_assert_eq(fsdp_step_parse(name, &found), kind, "'%s'", name);
    cr_assert_eq(found, step, "'%s'", name);
}

#define UUID "0123456789abcdef0123456789abcdef"

Test(commit, only_the_exact_grammar_is_ours)
{
    expect_name("step-00000000", FSDP_NAME_STEP, 0);
    expect_name("step-00001200", FSDP_NAME_STEP, 1200);
    expect_name("step-123456789", FSDP_NAME_STEP, 123456789);
    expect_name("step-9223372036854775807", FSDP_NAME_STEP, INT64_MAX);
    expect_name("step-00001200.tmp-" UUID, FSDP_NAME_STAGING, 1200);
    expect_name("step-00001200.deleting-" UUID, FSDP_NAME_DELETING, 1200);
    expect_name("step-00001200.old-" UUID, FSDP_NAME_REPLACED, 1200);
    const char *const others[] = {"",
                                  "step-",
                                  "step-900.bak",
                                  "step-900",
                                  "step-0000900",
                                  "step-012345678",
                                  "step-9223372036854775808",
                                  "step-00000900.bak",
                                  "step-00000900 ",
                                  "Step-00000900",
                                  "step-+0000900",
                                  "step-00000900.tmp-",
                                  "step-00000900.tmp-" UUID "0",
                                  "step-00000900.tmp-0123456789ABCDEF0123456789abcdef",
                                  "step-00000900.tmp",
                                  "step-00000900.old",
                                  "step-00000900.deleting",
                                  "xstep-00000900",
                                  "step-00000900.tmp-" UUID ".deleting-" UUID,
                                  "latest",
                                  ".lock"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        expect_name(others[i], FSDP_NAME_OTHER, FSDP_NO_STEP);
    const int64_t steps[] = {0, 1, 99999999, 100000000, INT64_MAX};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        char name[FSDP_STEP_NAME_SIZE];
        fsdp_step_name(steps[i], name);
        expect_name(name, FSDP_NAME_STEP, steps[i]);
    }
}

Test(commit, random_names_differ)
{
    char a[33], b[33];
    fsdp_random_hex(a);
    fsdp_random_hex(b);
    cr_assert_eq(strspn(a, "0123456789abcdef"), 32);
    cr_assert_eq(strlen(a), 32);
    cr_assert_str_neq(a, b);
}

/* --- the steps, on the real file system --- */

static int count_names(void *user, const char *name)
{
    (void)name;
    ++*(int *)user;
    return 0;
}

static int names_in(fsdp_io *io, const char *dir)
{
    int n = 0;
    cr_assert_eq(io->ops->list(io, dir, count_names, &n), 0);
    return n;
}

Test(commit, a_checkpoint_comes_and_goes_on_a_real_disk)
{
    char dir[] = "/tmp/fsdp-commit-XXXXXX", path[100];
    cr_assert_not_null(mkdtemp(dir));
    fsdp_io *io = fsdp_io_posix();
    snprintf(path, sizeof path, "%s/c", dir);
    tiny_must_save(io, path, 7, false);
    cr_assert_eq(tiny_save(io, path, 8, false, NULL), FSDP_ERR_EXISTS);
    cr_assert_eq(tiny_read(io, path), 7);
    tiny_must_save(io, path, 9, true);
    cr_assert_eq(names_in(io, dir), 1);
    cr_assert_eq(chdir(dir), 0);
    cr_assert_eq(tiny_read(io, "c//"), 9);
    tiny_must_save(io, "c//", 10, true);
    cr_assert_eq(fsdp_checkpoint_delete(io, "c/", NULL), FSDP_OK);
    cr_assert_eq(names_in(io, dir), 0);
    cr_assert_eq(fsdp_checkpoint_delete(io, "c", NULL), FSDP_ERR_NOT_FOUND);
    cr_assert_eq(rmdir(dir), 0);
}

static void expect_refusal(fsdp_io *io, const char *dir, bool overwrite, fsdp_status status,
                           const char *words)
{
    fsdp_staging staging;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_staging_begin(io, dir,
                                    &(fsdp_staging_opts){.durable = true, .overwrite = overwrite},
                                    &staging, &err),
                 status, "%s: %s", dir, err.text);
    cr_assert(strstr(err.text, words), "%s", err.text);
    cr_assert_null(staging.path);
    fsdp_staging_abandon(&staging, NULL);
    fsdp_staging_release(&staging);
}

Test(commit, begin_refuses_what_it_must_not_touch)
{
    fsdp_io *io = tiny_disk();
    fsdp_file *file;
    cr_assert_eq(fsdp_io_open(io, "/run/file", FSDP_IO_CREATE, &file, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_close(&file, "", NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_mkdir(io, "/run/other", NULL), FSDP_OK);
    tiny_must_save(io, "/run/c", 1, false);
    expect_refusal(io, "/run/c", false, FSDP_ERR_EXISTS, "'/run/c' exists");
    expect_refusal(io, "/run/file", true, FSDP_ERR_EXISTS, "not a directory");
    expect_refusal(io, "/run/other", true, FSDP_ERR_EXISTS, "not a checkpoint");
    expect_refusal(io, "/run/other", false, FSDP_ERR_EXISTS, "exists");
    expect_refusal(io, "/none/c", false, FSDP_ERR_NOT_FOUND, "'/none'");
    expect_refusal(io, "/run/file/c", false, FSDP_ERR_NOT_FOUND, "'/run/file'");
    expect_refusal(io, "", false, FSDP_ERR_USAGE, "''");
    expect_refusal(io, "/", false, FSDP_ERR_USAGE, "'/'");
    expect_refusal(io, "/run/..", false, FSDP_ERR_USAGE, "'/run/..'");
    cr_assert_eq(names_in(io, "/run"), 3);
    fsdp_sim_free(io);
}

static int fail_to_remove(fsdp_io *io, const char *path)
{
    (void)io;
    (void)path;
    return -EBUSY;
}

Test(commit, a_staging_that_cannot_be_removed_is_told_with_the_reason_it_is_given_up_for)
{
    char dir[] = "/tmp/fsdp-commit-XXXXXX", path[64];
    fsdp_io_ops ops = *fsdp_io_posix()->ops;
    fsdp_io io = {.ops = &ops};
    fsdp_staging staging;
    fsdp_error err = {0};
    ops.remove_tree = fail_to_remove;
    cr_assert_not_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/c", dir);
    cr_assert_eq(
        fsdp_staging_begin(&io, path, &(fsdp_staging_opts){.durable = true}, &staging, &err),
        FSDP_OK);
    fsdp_fail_errno(&err, ENOSPC, "cannot write 'x'");
    fsdp_staging_abandon(&staging, &err);
    fsdp_staging_release(&staging);
    cr_expect_eq(err.status, FSDP_ERR_NO_SPACE);
    cr_expect_eq(err.errnum, ENOSPC);
    cr_expect(strncmp(err.text, "cannot write 'x': ", 18) == 0, "%s", err.text);
    cr_expect(strstr(err.text, "; cannot remove '") && strstr(err.text, ".deleting-"), "%s",
              err.text);
    cr_assert_eq(fsdp_io_remove_tree(NULL, dir, NULL), FSDP_OK);
}

static fsdp_status publish_nothing(fsdp_io *io, const char *dir, int64_t step)
{
    fsdp_staging staging;
    fsdp_text text = {0};
    FSDP_TRY(fsdp_staging_begin(io, dir, &(fsdp_staging_opts){.durable = true, .overwrite = true},
                                &staging, NULL));
    cr_assert_eq(tiny_manifest(step, &text, NULL), FSDP_OK);
    fsdp_status status = fsdp_staging_publish(&staging, text.data, text.size, NULL);
    fsdp_staging_abandon(&staging, NULL);
    fsdp_staging_release(&staging);
    fsdp_text_release(&text);
    return status;
}

Test(commit, a_name_that_could_not_be_set_aside_is_refused_at_once)
{
    fsdp_io *io = tiny_disk();
    char dir[300] = "/run/";
    memset(dir + 5, 'n', 213);
    cr_assert_eq(publish_nothing(io, dir, 1), FSDP_OK);
    cr_assert_eq(publish_nothing(io, dir, 2), FSDP_OK);
    cr_assert_eq(names_in(io, "/run"), 1);
    for (size_t size = 214; size < 220; size++) {
        memset(dir + 5, 'n', size);
        expect_refusal(io, dir, true, FSDP_ERR_USAGE, "at most 213");
    }
    fsdp_sim_free(io);
}

Test(commit, a_link_that_leads_nowhere_is_refused_at_once)
{
    char dir[] = "/tmp/fsdp-commit-XXXXXX", path[100];
    cr_assert_not_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/c", dir);
    cr_assert_eq(symlink("nowhere", path), 0);
    for (int overwrite = 0; overwrite < 2; overwrite++)
        expect_refusal(fsdp_io_posix(), path, overwrite, FSDP_ERR_EXISTS,
                       "is a symbolic link to nothing");
    cr_assert_eq(names_in(fsdp_io_posix(), dir), 1);
    cr_assert_eq(fsdp_io_remove_tree(NULL, dir, NULL), FSDP_OK);
}

Test(commit, a_link_to_a_checkpoint_is_not_followed_to_overwrite_it)
{
    char dir[] = "/tmp/fsdp-commit-XXXXXX", path[100], link[100];
    cr_assert_not_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/c", dir);
    snprintf(link, sizeof link, "%s/link", dir);
    tiny_must_save(fsdp_io_posix(), path, 1, false);
    cr_assert_eq(symlink("c", link), 0);
    expect_refusal(fsdp_io_posix(), link, true, FSDP_ERR_EXISTS, "is a symbolic link");
    expect_refusal(fsdp_io_posix(), link, false, FSDP_ERR_EXISTS, "exists");
    cr_assert_eq(tiny_read(fsdp_io_posix(), link), 1);
    cr_assert_eq(fsdp_io_remove_tree(NULL, dir, NULL), FSDP_OK);
}

Test(commit, what_an_overwrite_set_aside_counts_as_there)
{
    fsdp_io *io = tiny_disk();
    fsdp_error err = {0};
    tiny_must_save(io, "/run/c", 1, false);
    cr_assert_eq(io->ops->rename(io, "/run/c", "/run/c.old-" UUID, false), 0);
    cr_assert_eq(fsdp_place_check(io, "/run/c", false, &err), FSDP_ERR_EXISTS);
    cr_assert(strstr(err.text, "/run/c.old-" UUID), "%s", err.text);
    cr_assert_eq(fsdp_place_check(io, "/run/c", true, &err), FSDP_OK);
    expect_refusal(io, "/run/c", false, FSDP_ERR_EXISTS, "exists");
    cr_assert_eq(tiny_read(io, "/run/c"), 1);
    fsdp_sim_free(io);
}

/* --- steps of a run --- */

#define STEP "/run/step-00000005"

Test(commit, a_step_is_staged_under_the_lease_of_its_run)
{
    fsdp_io *io = tiny_disk();
    fsdp_staging staging;
    cr_assert_eq(
        fsdp_staging_begin(io, STEP "/", &(fsdp_staging_opts){.durable = true}, &staging, NULL),
        FSDP_OK);
    cr_assert(fsdp_lease_is_held(io, "/run"));
    expect_refusal(io, "/run/step-00000006", false, FSDP_ERR_EXISTS, "in use by process");
    tiny_must_save(io, "/run/other", 1, false);
    cr_assert_eq(tiny_save_staged(&staging, 5, NULL), FSDP_OK);
    cr_assert_not(fsdp_lease_is_held(io, "/run"));
    cr_assert_eq(tiny_read(io, STEP), 5);
    fsdp_sim_free(io);
}

Test(commit, a_step_whose_lease_is_lost_is_not_published)
{
    fsdp_io *io = tiny_disk();
    fsdp_staging staging;
    fsdp_error err = {0};
    cr_assert_eq(
        fsdp_staging_begin(io, STEP, &(fsdp_staging_opts){.durable = true}, &staging, NULL),
        FSDP_OK);
    cr_assert_eq(io->ops->unlink(io, "/run/.lock"), 0);
    cr_assert_eq(tiny_save_staged(&staging, 5, &err), FSDP_ERR_EXISTS);
    cr_assert(strstr(err.text, "lease of '/run' is lost"), "%s", err.text);
    cr_assert_eq(names_in(io, "/run"), 0);
    fsdp_sim_free(io);
}

static int count_progress(void *user, int64_t done, int64_t total, const char *what)
{
    (void)done, (void)total, (void)what;
    return ++*(int *)user;
}

Test(commit, long_work_on_a_step_refreshes_the_lease)
{
    fsdp_io *io = tiny_disk();
    fsdp_staging staging;
    fsdp_file_info before, after;
    int called = 0;
    fsdp_watch callers = {.context = &called, .progress = count_progress};
    cr_assert_eq(
        fsdp_staging_begin(io, STEP, &(fsdp_staging_opts){.durable = true}, &staging, NULL),
        FSDP_OK);
    fsdp_watch watch = fsdp_staging_watch(&staging, &callers);
    cr_assert_eq(io->ops->info(io, "/run/.lock", &before), 0);
    staging.keeper.refresh_ms = 0; /* a refresh is due */
    cr_assert_eq(watch.progress(watch.context, 1, 2, "x"), 1);
    cr_assert_eq(io->ops->info(io, "/run/.lock", &after), 0);
    cr_assert_neq(before.node, after.node);
    cr_assert_eq(watch.progress(watch.context, 2, 2, "x"), 2);
    cr_assert_eq(io->ops->info(io, "/run/.lock", &before), 0);
    cr_assert_eq(before.node, after.node, "not at every call");
    fsdp_staging_abandon(&staging, NULL);
    fsdp_staging_release(&staging);
    fsdp_sim_free(io);
}

Test(commit, long_work_on_a_step_stops_when_its_lease_is_lost)
{
    fsdp_io *io = tiny_disk();
    fsdp_staging staging;
    fsdp_error err = {0};
    int called = 0;
    fsdp_watch callers = {.context = &called, .progress = count_progress};
    cr_assert_eq(
        fsdp_staging_begin(io, STEP, &(fsdp_staging_opts){.durable = true}, &staging, NULL),
        FSDP_OK);
    fsdp_watch watch = fsdp_staging_watch(&staging, &callers);
    cr_assert_eq(io->ops->unlink(io, "/run/.lock"), 0);
    staging.keeper.refresh_ms = 0;
    cr_assert_neq(watch.progress(watch.context, 1, 2, "x"), 0);
    cr_assert_eq(called, 0);
    cr_assert_eq(fsdp_staging_judge(&staging, FSDP_ERR_CANCELLED, &err), FSDP_ERR_EXISTS);
    cr_assert(strstr(err.text, "lease of '/run' is lost"), "%s", err.text);
    cr_assert_eq(fsdp_staging_judge(&staging, FSDP_ERR_IO, &err), FSDP_ERR_IO);
    fsdp_staging_abandon(&staging, NULL);
    fsdp_staging_release(&staging);
    fsdp_sim_free(io);
}

Test(commit, a_step_is_never_overwritten)
{
    fsdp_io *io = tiny_disk();
    tiny_must_save(io, STEP, 5, true);
    expect_refusal(io, STEP, true, FSDP_ERR_EXISTS, "never overwritten");
    cr_assert_eq(tiny_read(io, STEP), 5);
    cr_assert_eq(names_in(io, "/run"), 1);
    fsdp_sim_free(io);
}

Test(commit, the_name_of_another_step_is_refused)
{
    fsdp_error err = {0};
    cr_assert_eq(fsdp_name_check_step(STEP, 4, &err), FSDP_ERR_USAGE);
    cr_assert(strstr(err.text, "'step-00000004'"), "%s", err.text);
    cr_assert_eq(fsdp_name_check_step(STEP "//", 4, NULL), FSDP_ERR_USAGE);
    cr_assert_eq(fsdp_name_check_step(STEP, 5, NULL), FSDP_OK);
    cr_assert_eq(fsdp_name_check_step(STEP, FSDP_NO_STEP, NULL), FSDP_OK);
    cr_assert_eq(fsdp_name_check_step("/run/c", 4, NULL), FSDP_OK);
}

Test(commit, an_abandoned_staging_leaves_nothing)
{
    fsdp_io *io = tiny_disk();
    fsdp_staging staging;
    cr_assert_eq(
        fsdp_staging_begin(io, "/run/c", &(fsdp_staging_opts){.durable = true}, &staging, NULL),
        FSDP_OK);
    cr_assert_eq(tiny_write_shard(io, staging.path, 1, NULL), FSDP_OK);
    cr_assert_eq(names_in(io, "/run"), 1);
    fsdp_staging_abandon(&staging, NULL);
    cr_assert_eq(names_in(io, "/run"), 0);
    fsdp_staging_abandon(&staging, NULL);
    fsdp_staging_release(&staging);
    fsdp_sim_free(io);
}

/* --- stagings of the dead --- */

static fsdp_status begin_again(fsdp_io *io, const char *dir)
{
    fsdp_staging staging;
    fsdp_status status = fsdp_staging_begin(
        io, dir, &(fsdp_staging_opts){.durable = true, .overwrite = true}, &staging, NULL);
    if (status == FSDP_OK)
        fsdp_staging_abandon(&staging, NULL);
    fsdp_staging_release(&staging);
    return status;
}

/* A process that stages, reports that through a pipe, and then only waits. */
static pid_t stage_in_child(const char *path)
{
    int told[2];
    cr_assert_eq(pipe(told), 0);
    pid_t child = fork();
    if (child == 0) {
        fsdp_staging staging;
        bool ok =
            fsdp_staging_begin(NULL, path, &(fsdp_staging_opts){.durable = true, .overwrite = true},
                               &staging, NULL) == FSDP_OK &&
            tiny_write_shard(fsdp_io_posix(), staging.path, 1, NULL) == FSDP_OK;
        (void)!write(told[1], ok ? "y" : "n", 1);
        for (;;)
            pause();
    }
    char answer = 'n';
    cr_assert_eq(read(told[0], &answer, 1), 1);
    cr_assert_eq(answer, 'y');
    close(told[0]);
    close(told[1]);
    return child;
}

Test(commit, the_staging_of_a_killed_save_goes_with_the_next_one_and_that_of_a_living_one_stays)
{
    char dir[] = "/tmp/fsdp-commit-XXXXXX", path[100];
    cr_assert_not_null(mkdtemp(dir));
    fsdp_io *io = fsdp_io_posix();
    snprintf(path, sizeof path, "%s/c", dir);
    pid_t dead = stage_in_child(path), alive = stage_in_child(path);
    cr_assert_eq(names_in(io, dir), 2);
    kill(dead, SIGKILL);
    cr_assert_eq(waitpid(dead, NULL, 0), dead);
    tiny_must_save(io, path, 7, false);
    cr_assert_eq(names_in(io, dir), 2, "the checkpoint and the living one's");
    cr_assert_eq(names_in(io, path), 2, "the manifest and the shard");
    kill(alive, SIGKILL);
    cr_assert_eq(waitpid(alive, NULL, 0), alive);
    tiny_must_save(io, path, 8, true);
    cr_assert_eq(names_in(io, dir), 1);
    cr_assert_eq(fsdp_io_remove_tree(io, dir, NULL), FSDP_OK);
}

static void expect_empty_staging(mode_t mode, time_t age, int left)
{
    char dir[] = "/tmp/fsdp-commit-XXXXXX", path[100], staging[200];
    cr_assert_not_null(mkdtemp(dir));
    fsdp_io *io = fsdp_io_posix();
    snprintf(path, sizeof path, "%s/c", dir);
    snprintf(staging, sizeof staging, "%s.tmp-" UUID, path);
    cr_assert_eq(mkdir(staging, 0700), 0);
    cr_assert_eq(chmod(staging, mode), 0);
    const struct timespec times[2] = {{.tv_sec = time(NULL) - age}, {.tv_sec = time(NULL) - age}};
    cr_assert_eq(utimensat(AT_FDCWD, staging, times, 0), 0);
    cr_assert_eq(begin_again(io, path), FSDP_OK);
    cr_expect_eq(names_in(io, dir), left, "mode %o, %d s old", (unsigned)mode, (int)age);
    cr_assert_eq(fsdp_io_remove_tree(io, dir, NULL), FSDP_OK);
}

/* A directory that others may write to counts as one of another user. */
Test(commit, an_old_empty_staging_goes_unless_another_user_made_it)
{
    expect_empty_staging(0700, 3600, 0);
    expect_empty_staging(0700, 60, 1);
    expect_empty_staging(0777, 3600, 1);
}

/* Makes the leftovers of a killed save, with another text in the marker. */
static void leave_staging(fsdp_io *io, const char *marker)
{
    fsdp_staging staging;
    char path[200];
    cr_assert_eq(
        fsdp_staging_begin(io, "/run/c", &(fsdp_staging_opts){.durable = true}, &staging, NULL),
        FSDP_OK);
    snprintf(path, sizeof path, "%s/" FSDP_MARKER_SAVING, staging.path);
    fsdp_staging_release(&staging);
    fsdp_file *file;
    if (!marker)
        return;
    cr_assert_eq(fsdp_io_open(io, path, FSDP_IO_WRITE, &file, NULL), FSDP_OK);
    cr_assert_eq(file->ops->resize(file, 0), 0);
    cr_assert_eq(fsdp_io_write(file, path, marker, strlen(marker), 0, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_close(&file, path, NULL), FSDP_OK);
}

static void expect_left(const char *marker, int left)
{
    fsdp_io *io = tiny_disk();
    leave_staging(io, marker);
    cr_assert_eq(begin_again(io, "/run/c"), FSDP_OK);
    cr_assert_eq(names_in(io, "/run"), left, "marker '%s'", marker ? marker : "of our own");
    fsdp_sim_free(io);
}

Test(commit, only_a_staging_of_this_machine_is_ever_judged)
{
    char text[400];
    fsdp_process self;
    fsdp_process_self(NULL, &self);
    expect_left(NULL, 0);
    expect_left("", 1);
    expect_left("something", 1);
    expect_left("boot 1\nhost elsewhere\n", 1);
    snprintf(text, sizeof text, "boot 1\nhost %s\n", self.host);
    expect_left(text, 0);
    snprintf(text, sizeof text, "boot %s\nhost elsewhere\n", self.boot);
    expect_left(text, 0);
    snprintf(text, sizeof text, "boot %s\nhost %.3s", self.boot, self.host);
    expect_left(text, 1);
}

Test(commit, without_locks_no_staging_is_judged)
{
    fsdp_io *sim = tiny_disk(), *io;
    fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_LOCK,
                            .at = 1,
                            .forever = true,
                            .action = FSDP_FAULT_ERRNO,
                            .errnum = ENOLCK};
    cr_assert_eq(fsdp_io_fault_create(sim, &plan, &io, NULL), FSDP_OK);
    leave_staging(io, NULL);
    tiny_must_save(io, "/run/c", 1, false);
    tiny_must_save(sim, "/run/c", 2, true);
    cr_assert_eq(names_in(sim, "/run"), 2);
    cr_assert_eq(names_in(sim, "/run/c"), 2);
    fsdp_io_fault_free(io);
    fsdp_sim_free(sim);
}

Test(commit, of_two_publishers_the_first_wins)
{
    for (int stiff_disk = 0; stiff_disk < 2; stiff_disk++) {
        fsdp_io *sim = tiny_disk(), *io = sim;
        tiny_stiff stiff;
        if (stiff_disk)
            io = tiny_stiff_io(&stiff, sim, EINVAL);
        fsdp_staging staging[2];
        fsdp_status status[2];
        for (int i = 0; i < 2; i++) {
            cr_assert_eq(fsdp_staging_begin(io, "/run/c", &(fsdp_staging_opts){.durable = true},
                                            &staging[i], NULL),
                         FSDP_OK);
            cr_assert_eq(tiny_write_shard(io, staging[i].path, i, NULL), FSDP_OK);
        }
        for (int i = 0; i < 2; i++) {
            fsdp_text text = {0};
            cr_assert_eq(tiny_manifest(i, &text, NULL), FSDP_OK);
            fsdp_error err = {0};
            status[i] = fsdp_staging_publish(&staging[i], text.data, text.size, &err);
            fsdp_text_release(&text);
            cr_assert(i == 0 || strstr(err.text, "another job created it in the meantime"), "%s",
                      err.text);
        }
        cr_assert_eq(status[0], FSDP_OK);
        cr_assert_eq(status[1], FSDP_ERR_EXISTS);
        for (int i = 0; i < 2; i++) {
            fsdp_staging_abandon(&staging[i], NULL);
            fsdp_staging_release(&staging[i]);
        }
        cr_assert_eq(tiny_read(io, "/run/c"), 0);
        cr_assert_eq(names_in(io, "/run"), 1);
        if (stiff_disk)
            fsdp_io_fault_free(io);
        fsdp_sim_free(sim);
    }
}

Test(commit, without_durability_nothing_is_synced)
{
    fsdp_io *sim = tiny_disk(), *io;
    fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_SYNC | 1 << FSDP_CALL_SYNC_DIR};
    cr_assert_eq(fsdp_io_fault_create(sim, &plan, &io, NULL), FSDP_OK);
    fsdp_staging staging;
    fsdp_text text = {0};
    cr_assert_eq(tiny_manifest(1, &text, NULL), FSDP_OK);
    cr_assert_eq(fsdp_staging_begin(io, "/run/c", &(fsdp_staging_opts){0}, &staging, NULL),
                 FSDP_OK);
    cr_assert_eq(tiny_write_shard(sim, staging.path, 1, NULL), FSDP_OK);
    cr_assert_eq(fsdp_staging_publish(&staging, text.data, text.size, NULL), FSDP_OK);
    fsdp_staging_release(&staging);
    cr_assert_eq(fsdp_io_fault_calls(io), 0);
    cr_assert_eq(tiny_read(sim, "/run/c"), 1);
    fsdp_text_release(&text);
    fsdp_io_fault_free(io);
    fsdp_sim_free(sim);
}

/* --- crashes --- */

enum { SEEDS = 50 };

typedef struct expectation {
    int64_t old; /* step that /run/c may still hold; -1: it may be missing */
    int64_t new; /* step that it may hold already; -1: it may be missing */
    int errnum;  /* of renames of directories, on disks that cannot rename them; 0: they can */
    bool no_exchange;
} expectation;

static fsdp_io *disk_of(tiny_stiff *stiff, fsdp_io *sim, const expectation *expected)
{
    if (expected->errnum)
        return tiny_stiff_io(stiff, sim, expected->errnum);
    return expected->no_exchange ? tiny_no_exchange(sim) : sim;
}

static void check_alternative(fsdp_io *disk, const expectation *expected)
{
    int64_t found = tiny_read(disk, "/run/c");
    char *old = NULL;
    if (found == -1 && expected->no_exchange) {
        /* between the two renames of an overwrite: the old checkpoint is whole and found */
        cr_assert(fsdp_replaced_find(disk, "/run/c", &old));
        cr_assert_eq(tiny_read(disk, old), expected->old);
        free(old);
        return;
    }
    cr_assert(found == expected->old || found == expected->new, "found step %lld",
              (long long)found);
}

/* With any leftovers, the next save of that name succeeds, on a disk of the same kind. */
static void check_next_save(fsdp_io *disk, const expectation *expected)
{
    fsdp_io *io = disk;
    tiny_stiff stiff;
    if (expected->errnum)
        io = tiny_stiff_io(&stiff, disk, expected->errnum);
    int64_t found = tiny_read(disk, "/run/c");
    if (found >= 0 || expected->no_exchange) {
        cr_assert_eq(tiny_save(io, "/run/c", 50, false, NULL), FSDP_ERR_EXISTS);
        cr_assert_eq(tiny_read(disk, "/run/c"), found >= 0 ? found : expected->old);
    }
    if (!expected->errnum)
        tiny_must_save(io, "/run/c", 51, tiny_read(disk, "/run/c") >= 0);
    else if (found < 0)
        tiny_must_save(io, "/run/c", 51, false);
    if (expected->errnum)
        fsdp_io_fault_free(io);
}

static void check_after_crash(fsdp_io *disk, void *user)
{
    const expectation *expected = user;
    check_alternative(disk, expected);
    check_next_save(disk, expected);
}

typedef void (*work)(fsdp_io *io, const expectation *expected);

static void work_save(fsdp_io *io, const expectation *expected)
{
    fsdp_error err = {0};
    cr_assert_eq(tiny_save(io, "/run/c", expected->new, expected->old >= 0, &err), FSDP_OK, "%s",
                 err.text);
}

static void work_delete(fsdp_io *io, const expectation *expected)
{
    (void)expected;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_checkpoint_delete(io, "/run/c", &err), FSDP_OK, "%s", err.text);
}

/* A kill does not change the disk: runs the checks on a copy that lost nothing. */
static void crash_everywhere(work run, expectation expected)
{
    fsdp_io *sim = tiny_disk(), *inner;
    tiny_stiff stiff;
    if (expected.old >= 0)
        tiny_must_save(sim, "/run/c", expected.old, false);
    inner = disk_of(&stiff, sim, &expected);
    tiny_crashes crashes = {.seeds = SEEDS, .check = check_after_crash, .user = &expected};
    fsdp_io *io = tiny_crash_io(&crashes, sim, inner);
    run(io, &expected);
    /* after the report only the new state is accepted */
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        fsdp_io *left = fsdp_sim_crash(sim, seed);
        cr_assert_eq(tiny_read(left, "/run/c"), expected.new);
        fsdp_sim_free(left);
    }
    cr_assert_gt(crashes.points, 5);
    printf("%lld crash points, %lld states\n", (long long)crashes.points,
           (long long)crashes.states);
    fsdp_io_fault_free(io);
    if (inner != sim)
        fsdp_io_fault_free(inner);
    fsdp_sim_free(sim);
}

Test(commit, a_power_cut_in_a_save_leaves_nothing_or_the_new_one)
{
    crash_everywhere(work_save, (expectation){-1, 5, 0, false});
}

Test(commit, a_power_cut_in_an_overwrite_leaves_the_old_or_the_new_one)
{
    crash_everywhere(work_save, (expectation){4, 5, 0, false});
    crash_everywhere(work_save, (expectation){4, 5, 0, true});
}

Test(commit, a_power_cut_in_a_delete_leaves_all_or_nothing)
{
    crash_everywhere(work_delete, (expectation){4, -1, 0, false});
}

Test(commit, a_power_cut_while_files_move_one_by_one_is_the_same)
{
    const int errnums[] = {EXDEV, EINVAL, ENOSYS};
    for (size_t i = 0; i < sizeof errnums / sizeof *errnums; i += (size_t)test_sample_at_most(3)) {
        crash_everywhere(work_save, (expectation){-1, 5, errnums[i], false});
        crash_everywhere(work_delete, (expectation){4, -1, errnums[i], false});
    }
}

/* --- a marker in what was published --- */

static bool has_marker(fsdp_io *io, const char *dir)
{
    char path[200];
    snprintf(path, sizeof path, "%s/" FSDP_MARKER_SAVING, dir);
    return fsdp_io_exists(io, path);
}

/* A save that is killed after the rename and before it removes its marker. */
static void save_and_die(fsdp_io *sim, const char *dir, int64_t step)
{
    fsdp_io *io;
    fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_UNLINK,
                            .at = 1,
                            .forever = true,
                            .action = FSDP_FAULT_ERRNO,
                            .errnum = EIO};
    cr_assert_eq(fsdp_io_fault_create(sim, &plan, &io, NULL), FSDP_OK);
    tiny_must_save(io, dir, step, false);
    fsdp_io_fault_free(io);
    cr_assert(has_marker(sim, dir));
    cr_assert_eq(tiny_read(sim, dir), step, "readers do not look at it");
}

Test(commit, a_marker_that_a_killed_save_left_is_removed_by_the_next_save)
{
    fsdp_io *sim = tiny_disk();
    save_and_die(sim, "/run/c", 1);
    cr_assert_eq(tiny_save(sim, "/run/c", 2, false, NULL), FSDP_ERR_EXISTS);
    cr_assert_not(has_marker(sim, "/run/c"));
    cr_assert_eq(tiny_read(sim, "/run/c"), 1);
    fsdp_sim_free(sim);
}

Test(commit, retention_removes_markers_from_the_steps_that_stay)
{
    fsdp_io *sim = tiny_disk();
    const fsdp_retention policy = {.keep_last = 2};
    save_and_die(sim, "/run/step-00000001", 1);
    save_and_die(sim, "/run/step-00000002", 2);
    cr_assert_eq(fsdp_run_retain("/run", &policy, &(fsdp_retain_opts){.access.disk = sim}, NULL),
                 FSDP_OK);
    cr_assert(has_marker(sim, "/run/step-00000001"), "a dry run changes nothing");
    cr_assert_eq(fsdp_run_retain("/run", &policy,
                                 &(fsdp_retain_opts){.apply = true, .access.disk = sim}, NULL),
                 FSDP_OK);
    cr_assert_not(has_marker(sim, "/run/step-00000001"));
    cr_assert_not(has_marker(sim, "/run/step-00000002"));
    cr_assert_eq(tiny_read(sim, "/run/step-00000001"), 1);
    fsdp_sim_free(sim);
}

Test(commit, repair_removes_a_marker_and_says_so)
{
    fsdp_io *sim = tiny_disk();
    fsdp_verify_summary summary;
    fsdp_verify_opts opts = {.level = FSDP_VERIFY_DATA, .access.disk = sim};
    fsdp_error err = {0};
    save_and_die(sim, "/run/c", 1);
    cr_assert_eq(fsdp_checkpoint_verify("/run/c", &opts, &summary, &err), FSDP_OK, "%s", err.text);
    cr_assert(has_marker(sim, "/run/c"), "verifying changes nothing");
    opts.repair = true;
    cr_assert_eq(fsdp_checkpoint_verify("/run/c", &opts, &summary, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(summary.fixed, 1);
    cr_assert_not(has_marker(sim, "/run/c"));
    fsdp_sim_free(sim);
}

Test(commit, a_marker_stays_that_is_held_or_belongs_to_a_staging)
{
    fsdp_io *sim = tiny_disk();
    fsdp_file *marker;
    save_and_die(sim, "/run/c", 1);
    cr_assert_eq(fsdp_io_open(sim, "/run/c/" FSDP_MARKER_SAVING, FSDP_IO_WRITE, &marker, NULL),
                 FSDP_OK);
    cr_assert_eq(marker->ops->lock(marker), 0);
    cr_assert_not(fsdp_marker_forget(sim, "/run/c"));
    cr_assert_eq(fsdp_io_close(&marker, "/run/c", NULL), FSDP_OK);
    const char *const staging[] = {"/run/c.tmp-" UUID, "/run/c.tmp-" UUID "/"};
    cr_assert_eq(fsdp_io_rename(sim, "/run/c", staging[0], true, NULL), FSDP_OK);
    cr_assert_not(fsdp_marker_forget(sim, staging[0]));
    cr_assert_not(fsdp_marker_forget(sim, staging[1]));
    cr_assert(has_marker(sim, staging[0]));
    cr_assert_eq(fsdp_io_rename(sim, staging[0], "/run/c.tmp-" UUID "0", true, NULL), FSDP_OK);
    cr_assert(fsdp_marker_forget(sim, "/run/c.tmp-" UUID "0"));
    fsdp_sim_free(sim);
}

/* --- kills: the process dies before a call, the disk stays as it is --- */

static int stop_at(void *user, fsdp_io_call call, const char *path)
{
    (void)call;
    (void)path;
    return -*(int *)user;
}

static int count_data(void *user, const char *name)
{
    *(int *)user +=
        strcmp(name, FSDP_MARKER_SAVING) != 0 && strcmp(name, FSDP_MARKER_PUBLISHING) != 0;
    return 0;
}

/* Leftovers of a kill between mkdir and the marker's text, which are never removed, hold no data. */
static bool holds_no_data(void *user, const char *path)
{
    fsdp_io *io = user;
    int data = 0;
    cr_assert_eq(io->ops->list(io, path, count_data, &data), 0);
    cr_assert_eq(data, 0, "'%s' was left with %d files", path, data);
    return true;
}

static bool has_no_judgeable_marker(void *user, const char *path)
{
    char marker[300];
    fsdp_file_info info;
    fsdp_io *io = user;
    snprintf(marker, sizeof marker, "%s/" FSDP_MARKER_SAVING, path);
    cr_assert(io->ops->info(io, marker, &info) < 0 || info.size == 0, "'%s' was left", path);
    return true;
}

/* From the n-th call on all calls fail, as after a kill; then a new process starts. */
static bool killed_at(work run, expectation expected, int64_t n)
{
    fsdp_io *sim = tiny_disk(), *inner, *io;
    tiny_stiff stiff;
    if (expected.old >= 0)
        tiny_must_save(sim, "/run/c", expected.old, false);
    inner = disk_of(&stiff, sim, &expected);
    int errnum = EIO;
    fsdp_fault_plan plan = {
        .at = n, .forever = true, .action = FSDP_FAULT_CALL, .call = stop_at, .user = &errnum};
    cr_assert_eq(fsdp_io_fault_create(inner, &plan, &io, NULL), FSDP_OK);
    if (run == work_delete)
        (void)!fsdp_checkpoint_delete(io, "/run/c", NULL);
    else
        (void)!tiny_save(io, "/run/c", expected.new, expected.old >= 0, NULL);
    bool reached = fsdp_io_fault_calls(io) >= n;
    check_after_crash(sim, &expected);
    cr_assert(fsdp_beside_each(sim, "/run/c", FSDP_SUFFIX_STAGING, holds_no_data, sim));
    if (!expected.errnum) /* such disks refuse overwrites, so no save cleans up */
        cr_assert(
            fsdp_beside_each(sim, "/run/c", FSDP_SUFFIX_STAGING, has_no_judgeable_marker, sim));
    fsdp_io_fault_free(io);
    if (inner != sim)
        fsdp_io_fault_free(inner);
    fsdp_sim_free(sim);
    return reached;
}

Test(commit, a_kill_at_every_call_leaves_the_old_or_the_new_one)
{
    const expectation saves[] = {
        {-1, 5, 0, false}, {4, 5, 0, false}, {4, 5, 0, true}, {-1, 5, EXDEV, false}};
    const expectation deletes[] = {{4, -1, 0, false}, {4, -1, EINVAL, false}};
    int64_t points = 0;
    for (size_t i = 0; i < sizeof saves / sizeof *saves; i++) {
        for (int64_t n = 1; killed_at(work_save, saves[i], n); n++)
            points++;
    }
    for (size_t i = 0; i < sizeof deletes / sizeof *deletes; i++) {
        for (int64_t n = 1; killed_at(work_delete, deletes[i], n); n++)
            points++;
    }
    cr_assert_gt(points, 60);
    printf("%lld kill points\n", (long long)points);
}

/* --- errors --- */

/* One call fails, the process lives: success means saved, failure means untouched. */
static bool fails_at(expectation expected, int errnum, int64_t n)
{
    fsdp_io *sim = tiny_disk(), *inner, *io;
    tiny_stiff stiff;
    if (expected.old >= 0)
        tiny_must_save(sim, "/run/c", expected.old, false);
    inner = disk_of(&stiff, sim, &expected);
    fsdp_fault_plan plan = {.at = n, .action = FSDP_FAULT_ERRNO, .errnum = errnum};
    cr_assert_eq(fsdp_io_fault_create(inner, &plan, &io, NULL), FSDP_OK);
    fsdp_error err = {0};
    fsdp_status status = tiny_save(io, "/run/c", expected.new, expected.old >= 0, &err);
    bool reached = fsdp_io_fault_calls(io) >= n;
    cr_assert_eq(tiny_read(sim, "/run/c"), status == FSDP_OK ? expected.new : expected.old,
                 "call %lld, errno %d: %s", (long long)n, errnum, err.text);
    cr_assert(status == FSDP_OK || err.text[0]);
    check_next_save(sim, &expected);
    fsdp_io_fault_free(io);
    if (inner != sim)
        fsdp_io_fault_free(inner);
    fsdp_sim_free(sim);
    return reached;
}

Test(commit, an_error_at_every_call_leaves_what_was_there)
{
    const int errnums[] = {EIO,    ENOSPC, EDQUOT, EACCES, EROFS,
                           EMFILE, ENOENT, EXDEV,  EINVAL, ENOSYS};
    const expectation expected[] = {
        {-1, 5, 0, false}, {4, 5, 0, false}, {4, 5, 0, true}, {-1, 5, EXDEV, false}};
    const int64_t every = test_sample_at_most(4);
    int64_t cases = 0;
    for (size_t e = 0; e < sizeof errnums / sizeof *errnums; e++) {
        for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
            for (int64_t n = 1 + (int64_t)e % every; fails_at(expected[i], errnums[e], n);
                 n += every)
                cases++;
        }
    }
    cr_assert_gt(cases, 300 / every);
    printf("%lld failed calls\n", (long long)cases);
}

Test(commit, every_failing_allocation_leaves_what_was_there)
{
    fsdp_io *sim = tiny_disk();
    fsdp_mem_fail_after(-1, false);
    tiny_must_save(sim, "/run/c", 1, false);
    int64_t n = fsdp_mem_fail_after(-1, false);
    for (int64_t i = 0; i < n; i++) {
        fsdp_mem_fail_after(i, false);
        fsdp_status status = tiny_save(sim, "/run/c", 2, true, NULL);
        fsdp_mem_fail_after(-1, false);
        int64_t found = tiny_read(sim, "/run/c");
        cr_assert_eq(found, status == FSDP_OK ? 2 : 1, "allocation %lld", (long long)i);
        if (status == FSDP_OK)
            tiny_must_save(sim, "/run/c", 1, true);
    }
    fsdp_sim_free(sim);
}

/* The staging directory next to it would prove that a directory without a manifest is a leftover. */
Test(commit, a_manifest_that_cannot_be_looked_at_is_not_taken_for_a_missing_one)
{
    bool reached = true;
    for (int64_t n = 1; reached; n++) {
        fsdp_io *io, *sim = tiny_disk();
        fsdp_fault_plan plan = {.at = n, .action = FSDP_FAULT_ERRNO, .errnum = EIO};
        fsdp_error err = {0};
        tiny_must_save(sim, "/run/c", 1, false);
        cr_assert_eq(fsdp_io_mkdir(sim, "/run/c.deleting-0123456789abcdef0123456789abcdef", NULL),
                     FSDP_OK);
        cr_assert_eq(fsdp_io_fault_create(sim, &plan, &io, NULL), FSDP_OK);
        fsdp_status status = tiny_save(io, "/run/c", 2, true, &err);
        reached = fsdp_io_fault_calls(io) >= n;
        cr_assert_eq(tiny_read(sim, "/run/c"), status == FSDP_OK ? 2 : 1, "call %lld: %s",
                     (long long)n, err.text);
        cr_assert_null(strstr(err.text, "move it away first"), "call %lld: %s", (long long)n,
                       err.text);
        fsdp_io_fault_free(io);
        fsdp_sim_free(sim);
    }
}
