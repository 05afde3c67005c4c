/* Copies of steps in other formats go with their steps, and so does what a killed conversion left. */
#include "tests/unit/statedict/commit/tiny_checkpoint.h"

#include "base/core/mem.h"
#include "statedict/commit/leftovers.h"
#include "statedict/run/run_internal.h"

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

static void retain(fsdp_io *io, bool apply, report *all)
{
    fsdp_error err = {0};
    fsdp_retention policy = {.keep_last = 2};
    fsdp_retain_opts opts = {
        .apply = apply, .report = take_action, .report_context = all, .access.disk = io};
    cr_assert_eq(fsdp_run_retain("/run", &policy, &opts, &err), FSDP_OK, "%s", err.text);
}

static void write_small(fsdp_io *io, const char *path)
{
    fsdp_file *file;
    cr_assert_eq(fsdp_io_open(io, path, FSDP_IO_CREATE, &file, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_write(file, path, "x", 1, 0, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_close(&file, path, NULL), FSDP_OK);
}

static void make_copy(fsdp_io *io, const char *dir, const char *name)
{
    char path[200];
    cr_assert_eq(fsdp_io_mkdir(io, dir, NULL), FSDP_OK);
    snprintf(path, sizeof path, "%s/%s", dir, name);
    write_small(io, path);
}

static fsdp_io *disk_of_four(void)
{
    fsdp_io *io = tiny_disk();
    char path[100];
    for (int64_t step = 1; step <= 4; step++) {
        snprintf(path, sizeof path, "/run/step-%08d", (int)step);
        tiny_must_save(io, path, step, false);
    }
    cr_assert_eq(fsdp_io_mkdir(io, "/run/hf", NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_mkdir(io, "/run/dcp", NULL), FSDP_OK);
    return io;
}

/* Both dry and real; the latter says the same. */
static void retain_twice(fsdp_io *io, report *all)
{
    report dry = {{0}};
    retain(io, false, &dry);
    retain(io, true, all);
    cr_assert_str_eq(dry.text, all->text);
}

Test(copies, go_with_their_steps)
{
    fsdp_io *io = disk_of_four();
    report all = {{0}};
    make_copy(io, "/run/hf/00000001", "model.safetensors.index.json");
    make_copy(io, "/run/hf/00000003", "model.safetensors");
    make_copy(io, "/run/hf/00000099", "model.safetensors"); /* its step was removed by hand */
    make_copy(io, "/run/hf/00000002", "notes.txt");         /* somebody else's */
    make_copy(io, "/run/dcp/00000002", ".metadata");
    retain_twice(io, &all);
    cr_assert(strstr(all.text, "- hf/00000001: copy of step-00000001\n"), "%s", all.text);
    cr_assert(strstr(all.text, "- dcp/00000002: copy of step-00000002\n"), "%s", all.text);
    cr_assert(!fsdp_io_exists(io, "/run/hf/00000001") && !fsdp_io_exists(io, "/run/dcp/00000002"));
    cr_assert(fsdp_io_exists(io, "/run/hf/00000003") && fsdp_io_exists(io, "/run/hf/00000099"));
    cr_assert(fsdp_io_exists(io, "/run/hf/00000002/notes.txt"));
    fsdp_sim_free(io);
}

Test(copies, that_a_killed_conversion_left_half_go)
{
    fsdp_io *io = disk_of_four();
    char *dead, *alive, inside[300];
    fsdp_file *dead_marker, *marker, *unsigned_marker;
    report all = {{0}};
    cr_assert_eq(fsdp_staging_make(io, "/run/hf/00000003", &dead, &dead_marker, NULL), FSDP_OK);
    snprintf(inside, sizeof inside, "%s/result", dead);
    make_copy(io, inside, "model.safetensors");
    cr_assert_eq(fsdp_io_close(&dead_marker, dead, NULL), FSDP_OK); /* as the end of its process */
    cr_assert_eq(fsdp_staging_make(io, "/run/hf/00000004", &alive, &marker, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_mkdir(io, "/run/dcp/00000004.tmp-0123456789abcdef0123456789abcdef", NULL),
                 FSDP_OK);
    make_copy(io, "/run/hf/00000001.deleting-0123456789abcdef0123456789abcdef", "half");
    cr_assert_eq(fsdp_io_mkdir(io, "/run/hf/00000002.tmp-0123456789abcdef0123456789abcdef", NULL),
                 FSDP_OK);
    cr_assert_eq(fsdp_io_open(io, "/run/hf/00000002.tmp-0123456789abcdef0123456789abcdef/.saving",
                              FSDP_IO_CREATE, &unsigned_marker, NULL),
                 FSDP_OK);
    cr_assert_eq(fsdp_io_close(&unsigned_marker, "its process ended", NULL), FSDP_OK);
    make_copy(io, "/run/hf/tokens.tmp-1", "half");
    make_copy(io, "/run/hf/7.tmp-0123456789abcdef0123456789abcdef", "half");
    retain_twice(io, &all);
    cr_assert(strstr(all.text, ": interrupted conversion\n"), "%s", all.text);
    cr_assert(strstr(all.text, ": a conversion in progress\n"), "%s", all.text);
    cr_assert(!fsdp_io_exists(io, dead) && fsdp_io_exists(io, alive));
    cr_assert(!fsdp_io_exists(io, "/run/dcp/00000004.tmp-0123456789abcdef0123456789abcdef"));
    cr_assert(!fsdp_io_exists(io, "/run/hf/00000002.tmp-0123456789abcdef0123456789abcdef"));
    cr_assert(!fsdp_io_exists(io, "/run/hf/00000001.deleting-0123456789abcdef0123456789abcdef"));
    cr_assert(fsdp_io_exists(io, "/run/hf/tokens.tmp-1/half"));
    cr_assert(fsdp_io_exists(io, "/run/hf/7.tmp-0123456789abcdef0123456789abcdef/half"));
    cr_assert_eq(fsdp_io_close(&marker, alive, NULL), FSDP_OK);
    fsdp_free(dead);
    fsdp_free(alive);
    fsdp_sim_free(io);
}

/* A kill may come between both removals: the step is still there then, and goes the next time. */
static int refuse_step(void *user, fsdp_io_call call, const char *path)
{
    (void)user, (void)call;
    return strstr(path, "/run/step-00000001") ? -EIO : 0;
}

Test(copies, go_before_their_steps)
{
    fsdp_io *io = disk_of_four(), *faulty;
    const fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_RENAME,
                                  .at = 1,
                                  .forever = true,
                                  .action = FSDP_FAULT_CALL,
                                  .call = refuse_step};
    fsdp_retention policy = {.keep_last = 2};
    make_copy(io, "/run/hf/00000001", "model.safetensors");
    cr_assert_eq(fsdp_io_fault_create(io, &plan, &faulty, NULL), FSDP_OK);
    fsdp_retain_opts opts = {.apply = true, .access.disk = faulty};
    cr_assert_eq(fsdp_run_retain("/run", &policy, &opts, NULL), FSDP_ERR_IO);
    cr_assert(fsdp_io_exists(io, "/run/step-00000001"));
    cr_assert_not(fsdp_io_exists(io, "/run/hf/00000001"));
    fsdp_io_fault_free(faulty);
    fsdp_sim_free(io);
}
