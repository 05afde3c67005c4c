/* The writer of Megatron-Core's checkpoints as a target: its files, and every lack of memory. The tests with
 * Megatron-Core itself (tests/peers) load what it writes. */
#include "base/core/mem.h"
#include "formats/target.h"
#include "tests/support/disk/io_sim.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>

enum { WEIGHT, STATE, ITERATION, HIDDEN, ENTRIES };

static const int64_t shape[] = {2, 3};
static const fsdp_target_box whole = {0, (int64_t[]){0, 0}, (int64_t[]){2, 3}};
static const float numbers[6] = {1, 2, 3, 4, 5, 6};
static fsdp_io *disk;
static fsdp_value iteration, hidden, state;
static fsdp_target_entry entries[ENTRIES];

static fsdp_target_entry value(const char *name, const fsdp_value *of)
{
    return (fsdp_target_entry){.name = name, .name_size = strlen(name), .value = of};
}

static void begin(void)
{
    iteration = fsdp_value_i64(7);
    hidden = fsdp_value_i64(32);
    state = (fsdp_value){.kind = FSDP_VALUE_NULL};
    entries[WEIGHT] = (fsdp_target_entry){.name = "decoder.w",
                                          .name_size = strlen("decoder.w"),
                                          .dtype = FSDP_F32,
                                          .ndim = 2,
                                          .shape = shape,
                                          .boxes = &whole,
                                          .box_count = 1};
    entries[STATE] = value("decoder._extra_state/shard_0_1", &state);
    entries[ITERATION] = value("common.iteration", &iteration);
    entries[HIDDEN] = value("common.args.hidden_size", &hidden);
    cr_assert_eq(fsdp_sim_create(0, &disk, NULL), FSDP_OK);
}

static void end(void)
{
    fsdp_sim_free(disk);
}

TestSuite(megatron_write, .init = begin, .fini = end);

static fsdp_status write_all(int64_t *files_out, int64_t *bytes_out, fsdp_error *err)
{
    const fsdp_target_ops *ops = fsdp_format_to("megatron")->writer->ops;
    const fsdp_target_piece piece = {.entry = WEIGHT, .count = 6, .data = numbers};
    const fsdp_target_opts opts = {.io = disk,
                                   .path = "/out",
                                   .entries = entries,
                                   .entry_count = ENTRIES,
                                   .world = 1,
                                   .sync = true};
    fsdp_target *target = NULL;
    FSDP_TRY(ops->measure(&opts, files_out, bytes_out, err));
    FSDP_TRY(ops->create(&opts, &target, err));
    fsdp_status st = ops->write(target, &piece, err);
    if (st == FSDP_OK)
        return ops->finish(target, err);
    ops->discard(target);
    return st;
}

Test(megatron_write, every_lack_of_memory_is_reported)
{
    int64_t failed = 0;
    for (bool is_whole = false; !is_whole; failed++) {
        fsdp_error err = {0};
        int64_t files, bytes;
        cr_assert_eq(fsdp_io_mkdir(disk, "/out", &err), FSDP_OK);
        fsdp_mem_fail_after(failed, false);
        fsdp_status st = write_all(&files, &bytes, &err);
        bool has_failed = fsdp_mem_fail_after(-1, false) > failed;
        is_whole = st == FSDP_OK && !has_failed;
        cr_assert(is_whole || st == FSDP_ERR_LIMIT || err.errnum == ENOMEM, "allocation %d: %d %s",
                  (int)failed, (int)st, err.text);
        cr_assert_eq(fsdp_io_remove_tree(disk, "/out", NULL), FSDP_OK);
    }
    cr_assert_gt(failed, 30);
}

Test(megatron_write, as_many_files_and_bytes_as_announced)
{
    static const char *const names[] = {"/out/.metadata", "/out/__0_0.distcp", "/out/common.pt",
                                        "/out/metadata.json"};
    int64_t files, announced, bytes = 0;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_io_mkdir(disk, "/out", &err), FSDP_OK);
    cr_assert_eq(write_all(&files, &announced, &err), FSDP_OK, "%s", err.text);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        fsdp_file_info info;
        cr_assert_eq(disk->ops->info(disk, names[i], &info), 0, "%s", names[i]);
        bytes += info.size;
    }
    cr_assert_eq(files, sizeof names / sizeof *names);
    cr_assert_eq(announced, bytes);
}

/* Megatron-Core has a place for the common state and for objects of ranks. */
Test(megatron_write, values_of_other_names_have_no_place)
{
    static const struct {
        const char *name;
        bool is_held;
    } cases[] = {{"common.iteration", true},
                 {"common.args.hidden_size", true},
                 {"rng_state/shard_0.0_1.2", true},
                 {"common", false},
                 {"common.", false},
                 {"commons.iteration", false},
                 {"iteration", false},
                 {"rng_state/shard_", false},
                 {"rng_state/shard_a", false},
                 {"rng_state/shard_0.0_1.2/more", false}};
    const fsdp_format *format = fsdp_format_to("megatron");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        cr_expect_eq(format->writer->holds_value(cases[i].name, strlen(cases[i].name), &iteration),
                     cases[i].is_held, "%s", cases[i].name);
    const fsdp_value object = {.kind = FSDP_VALUE_OPAQUE};
    cr_assert(format->writer->holds_value("a/shard_0_1", strlen("a/shard_0_1"), &object));
    cr_assert_not(format->writer->holds_value("common.a", strlen("common.a"), &object));
}
