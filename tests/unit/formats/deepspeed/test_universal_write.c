/* The writer of universal checkpoints as a target: what it refuses, and every lack of memory. The tests of
 * conversions and those with DeepSpeed itself (tests/peers) read what it writes. */
#include "base/core/mem.h"
#include "formats/target.h"
#include "tests/support/disk/io_sim.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>

enum { W, BUFFER, TIED, MOMENT, STEP, RATE, PARAMS, EXTRA, ENTRIES };

static const int64_t shape[] = {2, 3}, one_dim[] = {2};
static const float numbers[6] = {1, 2, 3, 4, 5, 6};
static fsdp_io *disk;
static fsdp_value rate, params;
static fsdp_target_entry entries[ENTRIES];

static fsdp_target_entry tensor(const char *name, fsdp_dtype dtype, int ndim, const int64_t *sizes)
{
    return (fsdp_target_entry){
        .name = name, .name_size = strlen(name), .dtype = dtype, .ndim = ndim, .shape = sizes};
}

static fsdp_target_entry value(const char *name, const fsdp_value *of)
{
    return (fsdp_target_entry){.name = name, .name_size = strlen(name), .value = of};
}

static void declare(void)
{
    entries[W] = tensor("w", FSDP_F32, 2, shape);
    entries[BUFFER] = tensor("ids", FSDP_I64, 1, one_dim);
    entries[TIED] = tensor("head.w", FSDP_F32, 2, shape);
    entries[MOMENT] = tensor("optim.state.w.exp_avg", FSDP_F32, 2, shape);
    entries[STEP] = tensor("optim.state.w.step", FSDP_F32, 0, shape);
    entries[RATE] = value("optim.param_groups.0.lr", &rate);
    entries[PARAMS] = value("optim.param_groups.0.params", &params);
    entries[EXTRA] = tensor("ema.w", FSDP_F32, 2, shape);
    entries[W].is_model = entries[BUFFER].is_model = entries[TIED].is_model = true;
    entries[TIED].same_as = W + 1;
    for (int i = MOMENT; i <= PARAMS; i++)
        entries[i].is_optim = true;
}

static void begin(void)
{
    rate = fsdp_value_f64(0.5);
    cr_assert_eq(fsdp_value_set_items(&params, FSDP_VALUE_LIST, 1, NULL), FSDP_OK);
    cr_assert_eq(fsdp_value_set_bytes(&params.as.list.items[0], FSDP_VALUE_STRING, "w", 1, NULL),
                 FSDP_OK);
    cr_assert_eq(fsdp_sim_create(0, &disk, NULL), FSDP_OK);
    declare();
}

static void end(void)
{
    fsdp_value_release(&params);
    fsdp_sim_free(disk);
}

TestSuite(universal_write, .init = begin, .fini = end);

static fsdp_target_opts opts_for(const char *path)
{
    return (fsdp_target_opts){
        .io = disk, .path = path, .entries = entries, .entry_count = ENTRIES, .sync = true};
}

static fsdp_status write_entry(const fsdp_target_ops *ops, fsdp_target *target, size_t entry,
                               fsdp_error *err)
{
    int64_t count = entry == STEP ? 1 : entry == BUFFER ? 2 : 6;
    const fsdp_target_piece piece = {.entry = entry, .count = count, .data = numbers};
    return entries[entry].value ? FSDP_OK : ops->write(target, &piece, err);
}

static fsdp_status write_all(const char *path, fsdp_error *err)
{
    const fsdp_target_ops *ops = fsdp_format_to("universal")->writer->ops;
    fsdp_target_opts opts = opts_for(path);
    fsdp_target *target = NULL;
    int64_t files, bytes;
    FSDP_TRY(ops->measure(&opts, &files, &bytes, err));
    FSDP_TRY(ops->create(&opts, &target, err));
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < ENTRIES && st == FSDP_OK; i++)
        st = write_entry(ops, target, i, err);
    if (st == FSDP_OK)
        return ops->finish(target, err);
    ops->discard(target);
    return st;
}

Test(universal_write, every_lack_of_memory_is_reported)
{
    int64_t failed = 0;
    for (bool is_whole = false; !is_whole; failed++) {
        fsdp_error err = {0};
        cr_assert_eq(fsdp_io_mkdir(disk, "/out", &err), FSDP_OK);
        fsdp_mem_fail_after(failed, false);
        fsdp_status st = write_all("/out", &err);
        bool has_failed = fsdp_mem_fail_after(-1, false) > failed;
        is_whole = st == FSDP_OK && !has_failed;
        cr_assert(is_whole || st == FSDP_ERR_LIMIT || err.errnum == ENOMEM, "allocation %d: %d %s",
                  (int)failed, (int)st, err.text);
        cr_assert_eq(fsdp_io_remove_tree(disk, "/out", NULL), FSDP_OK);
    }
    cr_assert_gt(failed, 50);
}

Test(universal_write, as_many_files_and_bytes_as_announced)
{
    static const char *const names[] = {"latest_universal",
                                        "universal/mp_rank_00_model_states.pt",
                                        "universal/zero_pp_rank_0_mp_rank_00_model_states.pt",
                                        "universal/zero/optimizer_state.pt",
                                        "universal/zero/w/fp32.pt",
                                        "universal/zero/w/exp_avg.pt",
                                        "universal/zero/w/step.pt"};
    enum { FILES = sizeof names / sizeof *names };
    fsdp_target_opts opts = opts_for("/out");
    int64_t files, announced, bytes = 0;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_format_to("universal")->writer->ops->measure(&opts, &files, &announced, &err),
                 FSDP_OK);
    cr_assert_eq(fsdp_io_mkdir(disk, "/out", &err), FSDP_OK);
    cr_assert_eq(write_all("/out", &err), FSDP_OK, "%s", err.text);
    for (int i = 0; i < FILES; i++) {
        fsdp_file_info info;
        char *path = fsdp_path_join("/out", names[i]);
        cr_assert_eq(disk->ops->info(disk, path, &info), 0, "%s", names[i]);
        bytes += info.size;
        fsdp_free(path);
    }
    cr_assert_eq(files, FILES);
    cr_assert_eq(announced, bytes);
}

/* The bytes of the model file, which the caller frees, of two entries in that order. */
static char *model_file_of(fsdp_target_entry first, fsdp_target_entry second, size_t *size_out)
{
    fsdp_error err = {0};
    char *bytes;
    entries[RATE] = first;
    entries[PARAMS] = second;
    entries[RATE].is_optim = entries[PARAMS].is_optim = true;
    cr_assert_eq(fsdp_io_mkdir(disk, "/out", &err), FSDP_OK);
    cr_assert_eq(write_all("/out", &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_io_read_file(disk, "/out/universal/mp_rank_00_model_states.pt", 1 << 20,
                                   &bytes, size_out, &err),
                 FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_io_remove_tree(disk, "/out", NULL), FSDP_OK);
    return bytes;
}

/* The model file lists the parameters of each group, whichever comes first. */
Test(universal_write, groups_come_in_any_order)
{
    const fsdp_target_entry first = value("optim.param_groups.0.params", &params),
                            last = value("optim.param_groups.2.lr", &rate),
                            between = value("optim.param_groups.1.lr", &rate);
    size_t size, turned_size, fewer_size;
    char *in_order = model_file_of(first, last, &size);
    char *turned = model_file_of(last, first, &turned_size);
    char *fewer = model_file_of(first, between, &fewer_size);
    cr_assert(size == turned_size && memcmp(in_order, turned, size) == 0);
    cr_assert(size != fewer_size || memcmp(in_order, fewer, size) != 0);
    fsdp_free(in_order);
    fsdp_free(turned);
    fsdp_free(fewer);
}

/* DeepSpeed looks for the folder of the name that its optimizer has. */
Test(universal_write, a_tied_weight_has_the_name_that_has_states)
{
    fsdp_error err = {0};
    entries[MOMENT].name = "optim.state.head.w.exp_avg";
    entries[MOMENT].name_size = strlen(entries[MOMENT].name);
    entries[STEP].name = "optim.state.head.w.step";
    entries[STEP].name_size = strlen(entries[STEP].name);
    cr_assert_eq(fsdp_io_mkdir(disk, "/out", &err), FSDP_OK);
    cr_assert_eq(write_all("/out", &err), FSDP_OK, "%s", err.text);
    cr_expect(fsdp_io_exists(disk, "/out/universal/zero/head.w/fp32.pt"));
    cr_expect(fsdp_io_exists(disk, "/out/universal/zero/head.w/exp_avg.pt"));
    cr_expect_not(fsdp_io_exists(disk, "/out/universal/zero/w"));
}

/* A program keeps weights under a name of its own, too, which is no parameter. */
Test(universal_write, a_weight_that_another_entry_shares_is_a_parameter)
{
    fsdp_error err = {0};
    fsdp_target_entry shared = entries[EXTRA];
    entries[EXTRA] = entries[W];
    entries[W] = shared;
    entries[EXTRA].same_as = entries[TIED].same_as = W + 1;
    cr_assert_eq(fsdp_io_mkdir(disk, "/out", &err), FSDP_OK);
    cr_assert_eq(write_all("/out", &err), FSDP_OK, "%s", err.text);
    cr_expect(fsdp_io_exists(disk, "/out/universal/zero/w/fp32.pt"));
    cr_expect(fsdp_io_exists(disk, "/out/universal/zero/w/exp_avg.pt"));
    cr_expect_not(fsdp_io_exists(disk, "/out/universal/zero/head.w"));
}

static void expect_refused(const char *why)
{
    fsdp_error err = {0};
    fsdp_target_opts opts = opts_for("/out");
    int64_t files, bytes;
    fsdp_status st = fsdp_format_to("universal")->writer->ops->measure(&opts, &files, &bytes, &err);
    cr_expect_eq(st, FSDP_ERR_USAGE, "%s", why);
    cr_expect(strstr(err.text, why), "'%s' is not in '%s'", why, err.text);
    declare();
}

Test(universal_write, a_state_that_deepspeed_cannot_hold_is_refused)
{
    static char long_key[sizeof "optim.state.w." + 253] = "optim.state.w.";
    memset(long_key + strlen(long_key), 'k', 253);
    entries[MOMENT].ndim = 1;
    expect_refused("have the shape of their parameter");
    entries[MOMENT] = tensor("optim.state.v.exp_avg", FSDP_F32, 2, shape);
    entries[MOMENT].is_optim = true;
    expect_refused("of a weight NAME");
    entries[STEP] = tensor("optim.state.head.w.exp_avg", FSDP_F32, 2, shape);
    entries[STEP].is_optim = true;
    expect_refused("another name of the same weight also has states");
    entries[MOMENT].name = long_key;
    entries[MOMENT].name_size = sizeof long_key - 1;
    expect_refused("a file with the name of its key");
    entries[W].name = "..";
    entries[W].name_size = 2;
    expect_refused("a folder with its name");
    entries[RATE] = value("optim.param_groups.w.lr", &rate);
    expect_refused("not a list of groups");
    entries[MOMENT].is_optim = entries[STEP].is_optim = false;
    expect_refused("no optimizer state");
}

Test(universal_write, what_is_not_complete_does_not_end)
{
    const fsdp_target_ops *ops = fsdp_format_to("universal")->writer->ops;
    fsdp_target_opts opts = opts_for("/out");
    fsdp_target *target;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_io_mkdir(disk, "/out", &err), FSDP_OK);
    cr_assert_eq(ops->create(&opts, &target, &err), FSDP_OK, "%s", err.text);
    for (size_t i = 0; i < ENTRIES; i++)
        if (i != MOMENT)
            cr_assert_eq(write_entry(ops, target, i, &err), FSDP_OK, "%s", err.text);
    cr_expect_eq(ops->finish(target, &err), FSDP_ERR_INTERNAL);
    cr_expect_not(fsdp_io_exists(disk, "/out/latest_universal"));
}

/* The model file is laid out once, however many tensors ask for their places in it. */
Test(universal_write, a_place_in_the_model_file_needs_no_memory)
{
    const fsdp_target_ops *ops = fsdp_format_to("universal")->writer->ops;
    fsdp_target_opts opts = opts_for("/out");
    fsdp_target *target;
    fsdp_target_place buffer, extra;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_io_mkdir(disk, "/out", &err), FSDP_OK);
    cr_assert_eq(ops->create(&opts, &target, &err), FSDP_OK, "%s", err.text);
    fsdp_mem_fail_after(0, false);
    fsdp_status first = ops->place(target, BUFFER, 0, &buffer, &err);
    fsdp_status second = ops->place(target, EXTRA, 0, &extra, &err);
    cr_expect_eq(fsdp_mem_fail_after(-1, false), 0);
    cr_assert(first == FSDP_OK && second == FSDP_OK, "%s", err.text);
    cr_expect_str_eq(extra.file, "universal/mp_rank_00_model_states.pt");
    cr_expect_gt(extra.offset, buffer.offset);
    ops->discard(target);
}
