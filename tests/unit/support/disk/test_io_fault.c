/* The fault-injecting back end: what is counted, what each action does, plans as text. */
#include "tests/support/disk/io_fault.h"
#include "tests/support/disk/io_sim.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static fsdp_io *make_disk(void)
{
    fsdp_io *disk = NULL;
    cr_assert_eq(fsdp_sim_create(0, &disk, NULL), FSDP_OK);
    return disk;
}

static fsdp_io *wrap(fsdp_io *inner, fsdp_fault_plan plan)
{
    fsdp_io *io = NULL;
    cr_assert_eq(fsdp_io_fault_create(inner, &plan, &io, NULL), FSDP_OK);
    return io;
}

static fsdp_fault_plan parse(const char *text)
{
    fsdp_error err = {0};
    fsdp_fault_plan plan;
    cr_assert_eq(fsdp_fault_plan_parse(text, &plan, &err), FSDP_OK, "%s", err.text);
    return plan;
}

/* One call of each kind, in the order of fsdp_io_call but with the file closed at the right time. */
static int visit_nothing(void *user, const char *name)
{
    (void)user;
    (void)name;
    return 0;
}

static void call_everything(fsdp_io *io)
{
    fsdp_file *file = NULL;
    char data[4];
    int64_t size;
    fsdp_file_info info;
    fsdp_space space;
    cr_assert_eq(io->ops->mkdir(io, "d"), 0);
    cr_assert_eq(io->ops->open(io, "d/a", FSDP_IO_CREATE, &file), 0);
    cr_assert_eq(file->ops->pwrite(file, "1234", 4, 0), 4);
    cr_assert_eq(file->ops->pread(file, data, 4, 0), 4);
    cr_assert_eq(file->ops->size(file, &size), 0);
    cr_assert_eq(file->ops->resize(file, 2), 0);
    cr_assert_eq(file->ops->allocate(file, 8), 0);
    cr_assert_eq(file->ops->lock(file), 0);
    cr_assert_eq(file->ops->sync(file), 0);
    cr_assert_eq(file->ops->close(file), 0);
    cr_assert_eq(io->ops->open(io, "d/a", FSDP_IO_READ, &file), 0);
    cr_assert_eq(file->ops->close(file), 0);
    cr_assert_eq(io->ops->rename(io, "d/a", "d/b", false), 0);
    cr_assert_eq(io->ops->exchange(io, "d/b", "d/b"), 0);
    cr_assert_eq(io->ops->sync_dir(io, "d"), 0);
    cr_assert_eq(io->ops->list(io, "d", visit_nothing, NULL), 0);
    cr_assert_eq(io->ops->info(io, "d/b", &info), 0);
    cr_assert_eq(io->ops->space(io, "d", &space), 0);
    cr_assert_eq(io->ops->unlink(io, "d/b"), 0);
    cr_assert_eq(io->ops->rmdir(io, "d"), 0);
}

static void record_call(void *user, int64_t n, fsdp_io_call call, const char *path)
{
    fsdp_text_addf(user, "%d %s %s\n", (int)n, fsdp_io_call_name(call), path);
}

Test(io_fault, every_call_is_counted_and_traced)
{
    fsdp_io *disk = make_disk();
    fsdp_io *io = wrap(disk, (fsdp_fault_plan){0});
    fsdp_text log = {0};
    fsdp_io_fault_set_trace(io, record_call, &log);
    call_everything(io);
    cr_assert_eq(fsdp_io_fault_calls(io), 20);
    cr_assert_str_eq(log.data, "1 mkdir d\n2 create d/a\n3 pwrite d/a\n4 pread d/a\n5 size d/a\n"
                               "6 resize d/a\n7 allocate d/a\n8 lock d/a\n9 sync d/a\n"
                               "10 close d/a\n11 open d/a\n12 close d/a\n13 rename d/a\n"
                               "14 exchange d/b\n15 sync_dir d\n16 list d\n17 info d/b\n"
                               "18 space d\n19 unlink d/b\n20 rmdir d\n");
    fsdp_text_release(&log);
    fsdp_io_fault_free(io);
    fsdp_io_fault_free(NULL);
    fsdp_sim_free(disk);
}

Test(io_fault, a_mask_counts_only_what_changes_the_disk)
{
    fsdp_io *disk = make_disk();
    fsdp_io *io = wrap(disk, (fsdp_fault_plan){.calls = FSDP_CALLS_WRITES});
    call_everything(io);
    cr_assert_eq(fsdp_io_fault_calls(io), 13);
    fsdp_io_fault_free(io);
    fsdp_sim_free(disk);
}

Test(io_fault, a_call_fails_once_without_effect)
{
    fsdp_io *disk = make_disk();
    fsdp_io *io = wrap(disk, parse("sync:1:EIO"));
    fsdp_file *file = NULL;
    cr_assert_eq(io->ops->open(io, "a", FSDP_IO_CREATE, &file), 0);
    cr_assert_eq(file->ops->pwrite(file, "1234", 4, 0), 4);
    size_t unsynced = fsdp_sim_unsynced(disk);
    cr_assert_eq(file->ops->sync(file), -EIO);
    cr_assert_eq(fsdp_sim_unsynced(disk), unsynced);
    cr_assert_eq(file->ops->sync(file), 0);
    cr_assert_lt(fsdp_sim_unsynced(disk), unsynced);
    cr_assert_eq(file->ops->close(file), 0);
    fsdp_io_fault_free(io);
    fsdp_sim_free(disk);
}

Test(io_fault, a_call_fails_from_then_on)
{
    fsdp_io *disk = make_disk();
    fsdp_io *io = wrap(disk, parse("mkdir:2:EROFS:forever"));
    cr_assert_eq(io->ops->mkdir(io, "a"), 0);
    cr_assert_eq(io->ops->mkdir(io, "b"), -EROFS);
    cr_assert_eq(io->ops->mkdir(io, "b"), -EROFS);
    cr_assert_eq(io->ops->rmdir(io, "a"), 0);
    fsdp_io_fault_free(io);
    fsdp_sim_free(disk);
}

Test(io_fault, each_kind_of_call_can_fail)
{
    for (int call = 0; call < FSDP_CALL_COUNT; call++) {
        fsdp_io *disk = make_disk();
        char text[64];
        snprintf(text, sizeof text, "%s:1:EDQUOT", fsdp_io_call_name((fsdp_io_call)call));
        fsdp_io *io = wrap(disk, parse(text));
        fsdp_file *file = NULL;
        fsdp_file_info info;
        fsdp_space space;
        int64_t size;
        char data[4];
        int failures = 0;
        failures += io->ops->mkdir(io, "d") == -EDQUOT;
        failures += io->ops->open(io, "a", FSDP_IO_CREATE, &file) == -EDQUOT;
        if (!file)
            cr_assert_eq(io->ops->open(io, "a", FSDP_IO_CREATE, &file), 0);
        failures += file->ops->pwrite(file, "1234", 4, 0) == -EDQUOT;
        failures += file->ops->pread(file, data, 4, 0) == -EDQUOT;
        failures += file->ops->size(file, &size) == -EDQUOT;
        failures += file->ops->resize(file, 4) == -EDQUOT;
        failures += file->ops->allocate(file, 4) == -EDQUOT;
        failures += file->ops->lock(file) == -EDQUOT;
        failures += file->ops->sync(file) == -EDQUOT;
        failures += file->ops->close(file) == -EDQUOT;
        file = NULL;
        failures += io->ops->open(io, "a", FSDP_IO_READ, &file) == -EDQUOT;
        if (file)
            cr_assert_eq(file->ops->close(file), 0);
        failures += io->ops->list(io, "/", visit_nothing, NULL) == -EDQUOT;
        failures += io->ops->info(io, "a", &info) == -EDQUOT;
        failures += io->ops->space(io, "/", &space) == -EDQUOT;
        failures += io->ops->exchange(io, "a", "a") == -EDQUOT;
        failures += io->ops->rename(io, "a", "b", true) == -EDQUOT;
        failures += io->ops->unlink(io, "b") == -EDQUOT;
        failures += io->ops->rmdir(io, "d") == -EDQUOT;
        failures += io->ops->sync_dir(io, "/") == -EDQUOT;
        cr_assert_eq(failures, 1, "%s: %d failures", text, failures);
        fsdp_io_fault_free(io);
        fsdp_sim_free(disk);
    }
}

Test(io_fault, a_failing_close_still_closes)
{
    char path[] = "/tmp/fsdp-test-fault-XXXXXX";
    close(mkstemp(path));
    fsdp_io *io = wrap(NULL, parse("close:1:EIO"));
    fsdp_file *file = NULL;
    int before = dup(0);
    close(before);
    cr_assert_eq(io->ops->open(io, path, FSDP_IO_WRITE, &file), 0);
    cr_assert_eq(file->ops->close(file), -EIO);
    int after = dup(0);
    close(after);
    unlink(path);
    cr_assert_eq(before, after);
    fsdp_io_fault_free(io);
}

Test(io_fault, transfers_can_be_short)
{
    fsdp_io *disk = make_disk();
    fsdp_io *io = wrap(disk, parse("pwrite:1:short"));
    fsdp_file *file = NULL;
    cr_assert_eq(io->ops->open(io, "a", FSDP_IO_CREATE, &file), 0);
    cr_assert_eq(file->ops->pwrite(file, "12345678", 8, 0), 4);
    cr_assert_eq(file->ops->pwrite(file, "5678", 4, 4), 4);
    cr_assert_eq(file->ops->close(file), 0);
    fsdp_io_fault_free(io);
    io = wrap(disk, (fsdp_fault_plan){
                        .calls = 1 << FSDP_CALL_PREAD,
                        .at = 1,
                        .forever = true,
                        .action = FSDP_FAULT_SHORT,
                        .part = 3,
                    });
    char data[8];
    cr_assert_eq(io->ops->open(io, "a", FSDP_IO_READ, &file), 0);
    cr_assert_eq(file->ops->pread(file, data, 8, 0), 3);
    cr_assert_eq(file->ops->pread(file, data, 8, 6), 2);
    cr_assert_eq(file->ops->pread(file, data, 1, 0), 1);
    cr_assert_eq(file->ops->close(file), 0);
    fsdp_io_fault_free(io);
    fsdp_sim_free(disk);
}

static int refuse_odd_calls(void *user, fsdp_io_call call, const char *path)
{
    int *calls = user;
    (void)call;
    (void)path;
    return ++*calls % 2 ? -EACCES : 0;
}

Test(io_fault, a_callback_decides)
{
    fsdp_io *disk = make_disk();
    int calls = 0;
    fsdp_io *io = wrap(disk, (fsdp_fault_plan){
                                 .at = 1,
                                 .forever = true,
                                 .action = FSDP_FAULT_CALL,
                                 .call = refuse_odd_calls,
                                 .user = &calls,
                             });
    cr_assert_eq(io->ops->mkdir(io, "a"), -EACCES);
    cr_assert_eq(io->ops->mkdir(io, "a"), 0);
    cr_assert_eq(io->ops->rmdir(io, "a"), -EACCES);
    cr_assert_eq(calls, 3);
    fsdp_io_fault_free(io);
    fsdp_sim_free(disk);
}

static void write_twice_then_exit(const char *path, const char *plan_text)
{
    fsdp_fault_plan plan;
    fsdp_io *io = NULL;
    fsdp_file *file = NULL;
    if (fsdp_fault_plan_parse(plan_text, &plan, NULL) != FSDP_OK ||
        fsdp_io_fault_create(NULL, &plan, &io, NULL) != FSDP_OK ||
        io->ops->open(io, path, FSDP_IO_WRITE, &file) < 0)
        _exit(1);
    file->ops->pwrite(file, "aaaa", 4, 0);
    file->ops->pwrite(file, "bbbb", 4, 4);
    _exit(0);
}

static void check_killed_at(const char *plan, off_t expected_size)
{
    char path[] = "/tmp/fsdp-test-fault-XXXXXX";
    int fd = mkstemp(path);
    pid_t child = fork();
    if (child == 0)
        write_twice_then_exit(path, plan);
    int state = 0;
    cr_assert_eq(waitpid(child, &state, 0), child);
    off_t size = lseek(fd, 0, SEEK_END);
    close(fd);
    unlink(path);
    cr_assert(WIFSIGNALED(state) && WTERMSIG(state) == SIGKILL, "%s", plan);
    cr_assert_eq(size, expected_size, "%s: %d bytes", plan, (int)size);
}

Test(io_fault, a_kill_comes_before_the_call_takes_effect)
{
    check_killed_at("any:1:kill", 0);
    check_killed_at("any:2:kill", 0);
    check_killed_at("pwrite:2:kill", 4);
    check_killed_at("writes:1:kill", 0);
}

Test(io_fault, a_tear_leaves_half_of_the_write)
{
    check_killed_at("pwrite:1:tear", 2);
    check_killed_at("pwrite:2:tear", 6);
    check_killed_at("open:1:tear", 0);
}

Test(io_fault, plans_are_parsed)
{
    fsdp_fault_plan plan = parse("pwrite:17:kill");
    cr_assert_eq(plan.calls, 1u << FSDP_CALL_PWRITE);
    cr_assert(plan.at == 17 && plan.action == FSDP_FAULT_KILL && !plan.forever);
    plan = parse("any:40:ENOSPC");
    cr_assert_eq(plan.calls, (unsigned)FSDP_CALLS_ANY);
    cr_assert(plan.at == 40 && plan.action == FSDP_FAULT_ERRNO && plan.errnum == ENOSPC);
    plan = parse("sync_dir:1:EIO:forever");
    cr_assert(plan.calls == 1u << FSDP_CALL_SYNC_DIR && plan.errnum == EIO && plan.forever);
    plan = parse("");
    cr_assert(plan.at == 0 && plan.action == FSDP_FAULT_NONE);
}

Test(io_fault, plans_that_are_not_understood_are_refused)
{
    static const char *const wrong[] = {
        "pwrite",
        "pwrite:1",
        "pwrite:0:kill",
        "pwrite:-1:kill",
        "write:1:kill",
        "pwrite:1:die",
        "pwrite:1:ENOSUCH",
        "pwrite:x:kill",
        ":1:kill",
        "pwrite:1:",
        "any:1:kill:",
        "any:1:kill:once",
        "any:1:kill:forever:x",
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        fsdp_error err = {0};
        fsdp_fault_plan plan;
        cr_assert_eq(fsdp_fault_plan_parse(wrong[i], &plan, &err), FSDP_ERR_USAGE, "%s", wrong[i]);
        cr_assert_not_null(strstr(err.text, wrong[i]));
        cr_assert_eq(plan.action, FSDP_FAULT_NONE);
    }
}

static void *make_and_remove(void *user)
{
    fsdp_io *io = user;
    char name[32];
    snprintf(name, sizeof name, "%lx", (unsigned long)pthread_self());
    for (int i = 0; i < 200; i++) {
        io->ops->mkdir(io, name);
        io->ops->rmdir(io, name);
    }
    return NULL;
}

Test(io_fault, calls_of_many_threads_are_all_counted)
{
    fsdp_io *disk = make_disk();
    fsdp_io *io = wrap(disk, (fsdp_fault_plan){0});
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, make_and_remove, io);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    cr_assert_eq(fsdp_io_fault_calls(io), 1600);
    fsdp_io_fault_free(io);
    fsdp_sim_free(disk);
}
