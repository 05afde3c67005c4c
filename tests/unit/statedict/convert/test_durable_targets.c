/* Results for other programs: a power cut right after a conversion loses none, and no failed sync or close
 * goes unreported. A kill or a failed rename loses none either, even where two names cannot be exchanged. */
#include "statedict/checkpoint/one_file.h"
#include "tests/support/disk/io_fault.h"
#include "tests/support/disk/io_sim.h"
#include "tests/support/sample_state.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fsdp/fsdp.h>
#include <stdio.h>
#include <string.h>

enum { TENSOR_BYTES = 4096, CUTS = 20 };

static const struct {
    const char *format, *to;
} targets[] = {{"safetensors", "/out/a.safetensors"},
               {"hf", "/out/hf"},
               {"npz", "/out/a.npz"},
               {"torch", "/out/a.pt"},
               {"dcp", "/out/dcp"},
               {"hdf5", "/out/a.h5"},
               {"universal", "/out/universal"},
               {"megatron", "/out/megatron"}};
enum { TARGETS = sizeof targets / sizeof *targets };

static fsdp_io *disk;
static fsdp_error err;

/* A weight and its moment, whose bytes all have this value. */
static void write_source(const char *path, char value)
{
    char bytes[300 + 2 * TENSOR_BYTES] = {0};
    fsdp_file *file;
    int size =
        snprintf(bytes + 8, 280,
                 "{\"t\":{\"dtype\":\"F32\",\"shape\":[%d],\"data_offsets\":[0,%d]},"
                 "\"optim.state.t.m\":{\"dtype\":\"F32\",\"shape\":[%d],\"data_offsets\":[%d,%d]}}",
                 TENSOR_BYTES / 4, TENSOR_BYTES, TENSOR_BYTES / 4, TENSOR_BYTES, 2 * TENSOR_BYTES);
    cr_assert_lt(size, 256); /* one byte of the header's length */
    bytes[0] = (char)size;
    memset(bytes + 8 + size, value, 2 * TENSOR_BYTES);
    cr_assert_eq(fsdp_io_open(disk, path, FSDP_IO_CREATE, &file, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_io_write(file, path, bytes, (size_t)size + 8 + 2 * TENSOR_BYTES, 0, &err),
                 FSDP_OK);
    cr_assert_eq(fsdp_io_sync(file, path, &err), FSDP_OK);
    cr_assert_eq(fsdp_io_close(&file, path, &err), FSDP_OK);
}

static void begin(void)
{
    cr_assert_eq(fsdp_sim_create(0, &disk, &err), FSDP_OK, "%s", err.text);
    write_source("/one.safetensors", 1);
    write_source("/two.safetensors", 2);
    write_source("/three.safetensors", 3);
    cr_assert_eq(fsdp_io_mkdir(disk, "/out", &err), FSDP_OK);
    cr_assert_eq(fsdp_io_sync_dir(disk, "/", &err), FSDP_OK);
}

static void end(void)
{
    fsdp_sim_free(disk);
}

static const fsdp_io_ops *whole_ops;
static fsdp_io_ops few_ops;

static int no_exchange(fsdp_io *io, const char *a, const char *b)
{
    (void)io;
    (void)a;
    (void)b;
    return -EINVAL;
}

static int only_replacing_rename(fsdp_io *io, const char *from, const char *to, bool replace)
{
    return replace ? whole_ops->rename(io, from, to, true) : -EINVAL;
}

/* A file system without RENAME_EXCHANGE, and perhaps without RENAME_NOREPLACE. Its crashes are such
 * disks, too. */
static void limit_renames(bool no_replace)
{
    whole_ops = disk->ops;
    few_ops = *disk->ops;
    few_ops.exchange = no_exchange;
    if (no_replace)
        few_ops.rename = only_replacing_rename;
    disk->ops = &few_ops;
}

TestSuite(durable_targets, .init = begin, .fini = end);

/* Nothing is read back: only files that were written are closed. */
static fsdp_status convert_to(fsdp_io *io, const char *from, int target, bool overwrite)
{
    const fsdp_convert_opts opts = {.format = targets[target].format,
                                    .open.access.disk = io,
                                    .skip_verify = true,
                                    .overwrite = overwrite,
                                    .threads = 1};
    err = (fsdp_error){0};
    return fsdp_checkpoint_convert(from, targets[target].to, &opts, &err);
}

static fsdp_status convert(fsdp_io *io, const char *from, int target)
{
    return convert_to(io, from, target, true);
}

/* A checkpoint of Megatron without its metadata.json is read as one of DCP, but not by Megatron. */
static bool is_megatron(fsdp_io *io)
{
    fsdp_file_info info = {0};
    return io->ops->info(io, "/out/megatron/metadata.json", &info) == 0 && info.size > 0;
}

/* The value of the tensor's bytes; -1: it cannot be read, or they differ. */
static int look(fsdp_io *io, int target)
{
    const fsdp_load_opts opts = {.access.disk = io, .threads = 1};
    fsdp_sd *sd = NULL;
    /* without its manifest it would be read as the HDF5 file of another program */
    if (strcmp(targets[target].format, "hdf5") == 0 && !fsdp_is_one_file(io, targets[target].to))
        return -1;
    if (strcmp(targets[target].format, "megatron") == 0 && !is_megatron(io))
        return -1;
    if (fsdp_load_full(targets[target].to, &opts, &sd, &err) != FSDP_OK)
        return -1;
    const char *data = fsdp_sd_at(sd, (size_t)fsdp_sd_find(sd, "t", 1))->data;
    int value = data[0];
    for (int i = 0; i < TENSOR_BYTES; i++)
        value = data[i] == data[0] ? value : -1;
    fsdp_sd_free(sd);
    return value;
}

static void expect_after_cuts(int target, int value)
{
    for (uint64_t seed = 1; seed <= CUTS; seed++) {
        fsdp_io *left = fsdp_sim_crash(disk, seed);
        int found = look(left, target);
        cr_expect_eq(found, value, "%s holds %d, not %d: %s", targets[target].format, found, value,
                     err.text);
        fsdp_sim_free(left);
    }
}

Test(durable_targets, a_conversion_that_succeeded_survives_a_power_cut)
{
    for (int i = 0; i < TARGETS; i++) {
        cr_assert_eq(convert(disk, "/one.safetensors", i), FSDP_OK, "%s", err.text);
        expect_after_cuts(i, 1);
        cr_assert_eq(convert(disk, "/two.safetensors", i), FSDP_OK, "%s", err.text);
        expect_after_cuts(i, 2);
    }
}

/* Fails the n-th sync or close of what is being written, or sync of a directory. */
typedef struct failing {
    int left;
    bool has_failed;
    char path[200];
} failing;

static int fail_in_turn(void *user, fsdp_io_call call, const char *path)
{
    failing *plan = user;
    bool counts = call == FSDP_CALL_SYNC_DIR ||
                  (strstr(path, "/result") && (call == FSDP_CALL_SYNC || call == FSDP_CALL_CLOSE));
    if (!counts || plan->left-- != 0)
        return 0;
    plan->has_failed = true;
    snprintf(plan->path, sizeof plan->path, "%s of %s", fsdp_io_call_name(call), path);
    return -EIO;
}

static bool fail_at(int n, int target)
{
    failing plan = {.left = n};
    fsdp_fault_plan calls = {
        .at = 1, .forever = true, .action = FSDP_FAULT_CALL, .call = fail_in_turn, .user = &plan};
    fsdp_io *io;
    cr_assert_eq(fsdp_io_fault_create(disk, &calls, &io, &err), FSDP_OK);
    fsdp_status st = convert(io, "/one.safetensors", target);
    cr_expect(!plan.has_failed || st != FSDP_OK, "%s: the failed %s is not reported",
              targets[target].format, plan.path);
    fsdp_io_fault_free(io);
    return plan.has_failed;
}

Test(durable_targets, every_failed_sync_and_close_is_reported)
{
    for (int i = 0; i < TARGETS; i++)
        for (int n = 0; fail_at(n, i); n++)
            cr_assert_lt(n, 100);
}

/* --- where two names cannot be exchanged --- */

enum { FIRST_DIRECTORY = 1, SECOND_DIRECTORY = 4 };

static int find_aside(void *user, const char *name)
{
    *(int *)user += strstr(name, ".old-") != NULL;
    return 0;
}

/* Directories that an overwrite set aside. */
static int count_aside(fsdp_io *io)
{
    int count = 0;
    cr_assert_eq(io->ops->list(io, "/out", find_aside, &count), 0);
    return count;
}

/* Converts until the n-th call of these kinds (0: any) fails, and all after it if `forever`. */
static bool fail_from(fsdp_io *io, const char *from, int target, fsdp_fault_plan plan,
                      fsdp_status *status_out)
{
    fsdp_io *failing_io;
    plan.action = FSDP_FAULT_ERRNO;
    plan.errnum = EIO;
    cr_assert_eq(fsdp_io_fault_create(io, &plan, &failing_io, &err), FSDP_OK);
    *status_out = convert(failing_io, from, target);
    bool has_failed = fsdp_io_fault_calls(failing_io) >= plan.at;
    fsdp_io_fault_free(failing_io);
    return has_failed;
}

/* When all calls fail from one on, that is as good as a kill. */
static bool kill_at(fsdp_io *io, const char *from, int target, int64_t n)
{
    fsdp_status st;
    return fail_from(io, from, target, (fsdp_fault_plan){.at = n, .forever = true}, &st);
}

/* A disk that holds value 1, on which an overwrite with value 2 was killed; its crashes lose nothing else. */
static fsdp_io *kill_overwrite(fsdp_io *base, int target, int64_t n, bool *was_killed)
{
    fsdp_io *killed = fsdp_sim_crash(base, 0);
    *was_killed = kill_at(killed, "/two.safetensors", target, n);
    return killed;
}

/* A conversion that refuses to replace the target puts it back first. */
static int recover(fsdp_io *io, int target)
{
    cr_expect_eq(convert_to(io, "/one.safetensors", target, false), FSDP_ERR_EXISTS, "%s",
                 err.text);
    return look(io, target);
}

/* The next overwrite, with value 3, is killed, too: at each of its calls. */
static void kill_again(fsdp_io *base, int target, int64_t n, int before)
{
    bool was_killed, goes_on = true;
    for (int64_t m = 1; goes_on; m += test_sample_at_most(10)) {
        fsdp_io *again = kill_overwrite(base, target, n, &was_killed);
        goes_on = kill_at(again, "/three.safetensors", target, m);
        int found = recover(again, target);
        cr_expect(found == before || found == 3, "%s: killed at calls %d and %d: %d, not %d",
                  targets[target].format, (int)n, (int)m, found, before);
        fsdp_sim_free(again);
    }
}

static void kill_everywhere(int target)
{
    int aside = 0;
    bool goes_on = true;
    cr_assert_eq(convert(disk, "/one.safetensors", target), FSDP_OK, "%s", err.text);
    fsdp_io *base = fsdp_sim_crash(disk, 0);
    for (int64_t n = 1; goes_on; n++) {
        fsdp_io *killed = kill_overwrite(base, target, n, &goes_on);
        bool is_aside = count_aside(killed) > 0;
        int found = recover(killed, target);
        cr_expect(found == 1 || found == 2, "killed at call %d: %d", (int)n, found);
        cr_expect_eq(convert(killed, "/three.safetensors", target), FSDP_OK, "%s", err.text);
        cr_expect_eq(look(killed, target), 3);
        cr_expect_eq(count_aside(killed), 0, "killed at call %d", (int)n);
        fsdp_sim_free(killed);
        if (is_aside)
            kill_again(base, target, n, found);
        aside += is_aside;
    }
    cr_expect_gt(aside, 1);
    fsdp_sim_free(base);
}

Test(durable_targets, a_kill_between_two_renames_loses_nothing, .timeout = 120)
{
    limit_renames(false);
    kill_everywhere(FIRST_DIRECTORY);
    disk->ops = whole_ops;
    limit_renames(true);
    kill_everywhere(SECOND_DIRECTORY);
}

/* After one failed rename or sync the old result has its name again. */
static void fail_once(int target, unsigned calls)
{
    bool has_failed = true;
    cr_assert_eq(convert(disk, "/one.safetensors", target), FSDP_OK, "%s", err.text);
    fsdp_io *base = fsdp_sim_crash(disk, 0);
    for (int64_t n = 1; has_failed; n++) {
        fsdp_status st;
        fsdp_io *io = fsdp_sim_crash(base, 0);
        has_failed = fail_from(io, "/two.safetensors", target,
                               (fsdp_fault_plan){.calls = calls, .at = n}, &st);
        cr_expect_eq(look(io, target), st == FSDP_OK ? 2 : 1, "%s: call %d", targets[target].format,
                     (int)n);
        cr_expect(st == FSDP_OK || count_aside(io) == 0, "call %d", (int)n);
        fsdp_sim_free(io);
    }
    fsdp_sim_free(base);
}

Test(durable_targets, a_failed_second_rename_puts_the_old_result_back)
{
    for (int no_replace = 0; no_replace < 2; no_replace++) {
        limit_renames(no_replace);
        fail_once(FIRST_DIRECTORY, 1 << FSDP_CALL_RENAME);
        fail_once(SECOND_DIRECTORY, 1 << FSDP_CALL_SYNC_DIR);
        disk->ops = whole_ops;
    }
}

Test(durable_targets, an_old_result_that_cannot_be_put_back_is_named)
{
    int named = 0;
    bool has_failed = true;
    limit_renames(false);
    cr_assert_eq(convert(disk, "/one.safetensors", FIRST_DIRECTORY), FSDP_OK, "%s", err.text);
    fsdp_io *base = fsdp_sim_crash(disk, 0);
    for (int64_t n = 1; has_failed; n++) {
        fsdp_status st;
        fsdp_io *io = fsdp_sim_crash(base, 0);
        const fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_RENAME, .at = n, .forever = true};
        has_failed = fail_from(io, "/two.safetensors", FIRST_DIRECTORY, plan, &st);
        if (count_aside(io) > 0 && st != FSDP_OK) {
            cr_expect(strstr(err.text, "/out/hf.old-"), "%s", err.text);
            cr_expect_eq(recover(io, FIRST_DIRECTORY), 1);
            named++;
        }
        fsdp_sim_free(io);
    }
    cr_expect_eq(named, 1);
    fsdp_sim_free(base);
}
