/* Results for other programs: a power cut right after a conversion loses none, and no failed sync or close
 * goes unreported. */
#include "statedict/checkpoint/one_file.h"
#include "tests/support/disk/io_fault.h"
#include "tests/support/disk/io_sim.h"

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
               {"hdf5", "/out/a.h5"}};
enum { TARGETS = sizeof targets / sizeof *targets };

static fsdp_io *disk;
static fsdp_error err;

/* A tensor whose bytes all have this value. */
static void write_source(const char *path, char value)
{
    char bytes[200 + TENSOR_BYTES] = {0};
    fsdp_file *file;
    int size = snprintf(bytes + 8, 192,
                        "{\"t\":{\"dtype\":\"U8\",\"shape\":[%d],\"data_offsets\":[0,%d]}}",
                        TENSOR_BYTES, TENSOR_BYTES);
    bytes[0] = (char)size;
    memset(bytes + 8 + size, value, TENSOR_BYTES);
    cr_assert_eq(fsdp_io_open(disk, path, FSDP_IO_CREATE, &file, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_io_write(file, path, bytes, (size_t)size + 8 + TENSOR_BYTES, 0, &err),
                 FSDP_OK);
    cr_assert_eq(fsdp_io_sync(file, path, &err), FSDP_OK);
    cr_assert_eq(fsdp_io_close(&file, path, &err), FSDP_OK);
}

static void begin(void)
{
    cr_assert_eq(fsdp_sim_create(0, &disk, &err), FSDP_OK, "%s", err.text);
    write_source("/one.safetensors", 1);
    write_source("/two.safetensors", 2);
    cr_assert_eq(fsdp_io_mkdir(disk, "/out", &err), FSDP_OK);
    cr_assert_eq(fsdp_io_sync_dir(disk, "/", &err), FSDP_OK);
}

static void end(void)
{
    fsdp_sim_free(disk);
}

TestSuite(durable_targets, .init = begin, .fini = end);

/* Nothing is read back: only files that were written are closed. */
static fsdp_status convert(fsdp_io *io, const char *from, int target)
{
    const fsdp_convert_opts opts = {.format = targets[target].format,
                                    .open.access.disk = io,
                                    .skip_verify = true,
                                    .overwrite = true,
                                    .threads = 1};
    err = (fsdp_error){0};
    return fsdp_checkpoint_convert(from, targets[target].to, &opts, &err);
}

/* The value of the tensor's bytes; -1: it cannot be read, or they differ. */
static int look(fsdp_io *io, int target)
{
    const fsdp_load_opts opts = {.access.disk = io, .threads = 1};
    fsdp_sd *sd = NULL;
    /* without its manifest it would be read as the HDF5 file of another program */
    if (strcmp(targets[target].format, "hdf5") == 0 && !fsdp_is_one_file(io, targets[target].to))
        return -1;
    if (fsdp_load_full(targets[target].to, &opts, &sd, &err) != FSDP_OK)
        return -1;
    const char *data = fsdp_sd_at(sd, 0)->data;
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
