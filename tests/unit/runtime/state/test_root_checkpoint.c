/*
 * Checkpoints of roots with options: steps of a run, kinds and compression, extra entries of the caller,
 * missing names, other dtypes, and options that are refused.
 */
#include "base/io/io.h"
#include "tests/unit/runtime/expect_toy.h"
#include <fsdp/root_init.h>
#include <fsdp/run.h>

#include <stdatomic.h>
#include <stdlib.h>

/* --- paths ------------------------------------------------------------------------------------ */

static char dir[] = "/tmp/fsdp-root-XXXXXX";

static void make_dir(void)
{
    cr_assert(mkdtemp(dir));
}

static void remove_dir(void)
{
    cr_assert_eq(fsdp_io_remove_tree(NULL, dir, NULL), FSDP_OK);
}

TestSuite(root_checkpoint, .init = make_dir, .fini = remove_dir);

static fsdp_status save_as(toy *net, const char *path, const fsdp_root_save_opts *opts,
                           fsdp_error *err)
{
    return fsdp_root_save(net->root, path, opts, err);
}

static fsdp_status load_from(toy *net, const char *path, const fsdp_root_load_opts *opts,
                             fsdp_error *err)
{
    return fsdp_root_load(net->root, path, opts, err);
}

/* Expects tensor_number's values again, after net_spoil. */
static fsdp_status expect_numbers(toy *net, const char *name, fsdp_error *err)
{
    fsdp_box box;
    const float *data = fsdp_param_shard(fsdp_model_find(net->model, name), &box);
    for (int64_t i = 0; i < fsdp_box_count(&box); i++)
        EXPECT(data[i] == (float)(fsdp_box_position(box.ndim, (int64_t[]){9, 4}, box.lo) + i + 1));
    return FSDP_OK;
}

/* --- extra entries, steps of a run -------------------------------------------------------------- */

/* A number that occurs nowhere else in a checkpoint. */
static int64_t draw(int64_t step)
{
    return step * 0x00123456789abcde;
}

/* Extra entries: an epoch, and a tensor with one drawn row per rank. */
static fsdp_status make_extra(const toy *net, int64_t epoch, void *drawn, fsdp_sd **extra_out,
                              fsdp_error *err)
{
    const fsdp_placement rows = {FSDP_SHARD, 0, 0};
    const int64_t shape[] = {fsdp_world_size(net->rank->world), 2};
    const fsdp_value value = fsdp_value_i64(epoch);
    FSDP_TRY(fsdp_sd_create(extra_out, err));
    FSDP_TRY(fsdp_sd_add_value(*extra_out, FSDP_NAME("data.epoch"), &value, err));
    FSDP_TRY(fsdp_sd_add_tensor(
        *extra_out, FSDP_NAME("data.drawn"),
        &(fsdp_tensor){FSDP_I64, 2, shape, {.mesh = net->mesh, .placement = {rows}}, drawn}, err));
    return fsdp_sd_add_alias(*extra_out, FSDP_NAME("data.same"), FSDP_NAME("data.drawn"), err);
}

static fsdp_status save_step(toy *net, int64_t step, fsdp_error *err)
{
    fsdp_root_save_opts opts = {0};
    int64_t drawn[] = {draw(step), fsdp_world_rank(net->rank->world)};
    fsdp_sd *extra = NULL;
    FSDP_TRY(make_extra(net, 2 * step, drawn, &extra, err));
    opts.into_run = true;
    opts.save.step = &step;
    opts.extra = extra;
    fsdp_status status = save_as(net, dir, &opts, err);
    fsdp_sd_free(extra);
    return status;
}

static fsdp_status expect_extra(toy *net, fsdp_sd *extra, int64_t step, fsdp_error *err)
{
    const int64_t *drawn = net_entry(extra, "data.drawn")->data;
    EXPECT(net_entry(extra, "data.epoch")->value.as.i64 == 2 * step);
    EXPECT(drawn[0] == draw(step) && drawn[1] == fsdp_world_rank(net->rank->world));
    return FSDP_OK;
}

static fsdp_status go_on_from_run(toy *net, fsdp_error *err)
{
    int64_t step = 0, drawn[2];
    fsdp_sd *extra = NULL, *empty = NULL;
    FSDP_TRY(save_step(net, 10, err));
    FSDP_TRY(save_step(net, 20, err));
    EXPECT_REFUSAL(save_step(net, 20, why), "step-00000020");
    FSDP_TRY(net_spoil(net, err));
    FSDP_TRY(make_extra(net, 0, drawn, &extra, err));
    FSDP_TRY(load_from(net, dir, &(fsdp_root_load_opts){.extra = extra, .step = &step}, err));
    EXPECT(step == 20);
    FSDP_TRY(expect_extra(net, extra, 20, err));
    FSDP_TRY(expect_numbers(net, "embed.weight", err));
    char path[60];
    snprintf(path, sizeof path, "%s/step-00000010", dir);
    FSDP_TRY(make_extra(net, 0, NULL, &empty, err));
    FSDP_TRY(load_from(net, path, &(fsdp_root_load_opts){.extra = empty, .step = &step}, err));
    EXPECT(step == 10);
    FSDP_TRY(expect_extra(net, empty, 10, err));
    /* extra entries are optional in a load */
    FSDP_TRY(fsdp_root_load(net->root, path, NULL, err));
    fsdp_sd_free(extra);
    fsdp_sd_free(empty);
    return FSDP_OK;
}

Test(root_checkpoint, a_run_goes_on_with_step_and_own_entries)
{
    expect_net_on("cpu", (toy_case){1, {3}, {"dp"}, declare_net, go_on_from_run, NULL, {0}});
}

/* Damages the row that rank 0 has drawn at that step. */
static fsdp_status damage_step(toy *net, int64_t step, fsdp_error *err)
{
    const int64_t drawn[] = {draw(step), 0};
    char path[90], bytes[1 << 16];
    if (fsdp_world_rank(net->rank->world) == 0) {
        snprintf(path, sizeof path, "%s/step-%08d/shard-00000-of-00002.h5", dir, (int)step);
        FILE *file = fopen(path, "r+b");
        EXPECT(file);
        size_t size = fread(bytes, 1, sizeof bytes, file);
        const char *at = memmem(bytes, size, drawn, sizeof drawn);
        bool is_done = at && fseek(file, at - bytes, SEEK_SET) == 0 && fputc(99, file) == 99;
        EXPECT(fclose(file) == 0 && is_done);
    }
    return fsdp_ctl_barrier(fsdp_world_ctl(net->rank->world), err);
}

static fsdp_status pass_over_damage(toy *net, fsdp_error *err)
{
    int64_t step = 0, drawn[2];
    fsdp_load_report report;
    fsdp_sd *extra = NULL;
    FSDP_TRY(save_step(net, 10, err));
    FSDP_TRY(save_step(net, 20, err));
    FSDP_TRY(damage_step(net, 20, err));
    FSDP_TRY(net_spoil(net, err));
    FSDP_TRY(make_extra(net, 0, drawn, &extra, err));
    fsdp_root_load_opts opts = {.extra = extra, .step = &step, .load.report = &report};
    FSDP_TRY(load_from(net, dir, &opts, err));
    EXPECT(step == 10 && strstr(report.path, "step-00000010"));
    FSDP_TRY(expect_extra(net, extra, 10, err));
    FSDP_TRY(expect_numbers(net, "embed.weight", err));
    fsdp_load_report_release(&report);
    fsdp_sd_free(extra);
    return FSDP_OK;
}

Test(root_checkpoint, a_damaged_newest_step_is_passed_over_with_its_own_entries)
{
    expect_net_on("cpu", (toy_case){1, {2}, {"dp"}, declare_net, pass_over_damage, NULL, {0}});
}

static fsdp_status save_unprefixed(toy *net, fsdp_error *err)
{
    fsdp_root_save_opts save = {0};
    fsdp_root_load_opts load = {.state = {.model_prefix = ""}};
    int64_t drawn[2] = {draw(7), fsdp_world_rank(net->rank->world)};
    fsdp_sd *extra = NULL;
    char path[60];
    snprintf(path, sizeof path, "%s/bare", dir);
    save.state.model_prefix = "";
    FSDP_TRY(make_extra(net, 14, drawn, &extra, err));
    save.extra = load.extra = extra;
    FSDP_TRY(save_as(net, path, &save, err));
    drawn[0] = 0;
    FSDP_TRY(load_from(net, path, &load, err));
    FSDP_TRY(expect_extra(net, extra, 7, err));
    load.extra = NULL;
    EXPECT_REFUSAL(load_from(net, path, &load, why), "'data.epoch'");
    fsdp_sd_free(extra);
    return FSDP_OK;
}

Test(root_checkpoint, own_entries_are_expected_beside_names_without_prefix)
{
    expect_net_on("cpu", (toy_case){1, {2}, {"dp"}, declare_net, save_unprefixed, NULL, {0}});
}

/* --- number of reads ------------------------------------------------------------------------------ */

static atomic_int manifest_opens;

static int count_open(fsdp_io *io, const char *path, unsigned flags, fsdp_file **file_out)
{
    static const char name[] = "/manifest.json";
    size_t size = strlen(path), end = sizeof name - 1;
    if (size > end && strcmp(path + size - end, name) == 0)
        atomic_fetch_add(&manifest_opens, 1);
    return fsdp_io_posix()->ops->open(io, path, flags, file_out);
}

/* Ranks that are threads open the checkpoint once for all; processes open it once each. */
static fsdp_status load_once(toy *net, fsdp_error *err)
{
    fsdp_io_ops ops = *fsdp_io_posix()->ops;
    fsdp_io io = {.ops = &ops};
    fsdp_sd *extra = NULL;
    int64_t step, drawn[] = {1, 2};
    char path[60];
    ops.open = count_open;
    fsdp_root_load_opts load = {.load.access.disk = &io, .step = &step};
    snprintf(path, sizeof path, "%s/once-%d", dir, fsdp_world_size(net->rank->world));
    FSDP_TRY(make_extra(net, 1, drawn, &extra, err));
    const fsdp_root_save_opts save = {.extra = extra};
    FSDP_TRY(save_as(net, path, &save, err));
    FSDP_TRY(fsdp_ctl_barrier(fsdp_world_ctl(net->rank->world), err));
    atomic_store(&manifest_opens, 0);
    FSDP_TRY(fsdp_ctl_barrier(fsdp_world_ctl(net->rank->world), err));
    load.extra = extra;
    FSDP_TRY(load_from(net, path, &load, err));
    int opens = atomic_load(&manifest_opens);
    fsdp_sd_free(extra);
    if (opens != 1)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "the manifest was opened %d times", opens);
    return FSDP_OK;
}

Test(root_checkpoint, a_load_reads_the_description_once)
{
    expect_net_on("cpu", (toy_case){1, {1}, {"dp"}, declare_net, load_once, NULL, {0}});
    expect_net_on("cpu", (toy_case){1, {2}, {"dp"}, declare_net, load_once, NULL, {0}});
}

/* --- kinds and compression ---------------------------------------------------------------------- */

static fsdp_status store_whole(toy *net, fsdp_error *err)
{
    fsdp_root_save_opts opts = {0};
    fsdp_checkpoint *checkpoint;
    const int64_t five = 5;
    char path[60];
    snprintf(path, sizeof path, "%s/whole", dir);
    FSDP_TRY(net_spoil(net, err));
    FSDP_TRY(save_as(net, path, NULL, err));
    FSDP_TRY(fsdp_root_init(net->root, tensor_number, NULL, err));
    opts.save.kind = FSDP_FULL;
    opts.save.compress = true;
    opts.save.step = &five;
    EXPECT_REFUSAL(save_as(net, path, &opts, why), "exists");
    opts.save.overwrite = true;
    FSDP_TRY(save_as(net, path, &opts, err));
    FSDP_TRY(fsdp_checkpoint_open(path, NULL, &checkpoint, err));
    const fsdp_checkpoint_info info = *fsdp_checkpoint_describe(checkpoint);
    fsdp_checkpoint_close(checkpoint);
    EXPECT(info.kind == FSDP_FULL && info.compressed && info.step == 5 && info.file_count == 1);
    FSDP_TRY(net_spoil(net, err));
    FSDP_TRY(load_from(net, path, NULL, err));
    return expect_numbers(net, "embed.weight", err);
}

Test(root_checkpoint, kind_compression_and_overwriting_are_the_callers)
{
    expect_net_on("cpu", (toy_case){1, {2}, {"dp"}, declare_net, store_whole, NULL, {0}});
}

/* --- missing entries ----------------------------------------------------------------------------- */

static bool has_name(char *const *names, size_t n, const char *name)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(names[i], name) == 0)
            return true;
    return false;
}

/* Saved without optimizer and extra entries, loaded with both. */
static fsdp_status load_in_part(toy *net, fsdp_error *err)
{
    fsdp_root_save_opts save = {0};
    fsdp_load_report report;
    fsdp_root_load_opts load = {.load.report = &report};
    int64_t drawn[2] = {1, 2};
    char path[60];
    fsdp_sd *extra = NULL;
    snprintf(path, sizeof path, "%s/part", dir);
    save.state.part = FSDP_STATE_MODEL;
    FSDP_TRY(save_as(net, path, &save, err));
    FSDP_TRY(make_extra(net, 3, drawn, &extra, err));
    FSDP_TRY(net_spoil(net, err));
    load.extra = extra;
    for (int strict = 1; strict >= 0; strict--) {
        load.load.partial = !strict;
        if (strict)
            EXPECT_REFUSAL(load_from(net, path, &load, why), "missing");
        else
            FSDP_TRY(load_from(net, path, &load, err));
        EXPECT(has_name(report.missing, report.missing_count, "data.epoch"));
        EXPECT(has_name(report.missing, report.missing_count, "optim.state.embed.weight.exp_avg"));
        EXPECT(!has_name(report.missing, report.missing_count, "model.embed.weight"));
        EXPECT(strict ? !report.path : strcmp(report.path, path) == 0 && report.bytes_needed > 0);
        fsdp_load_report_release(&report);
    }
    EXPECT(net_entry(extra, "data.epoch")->value.as.i64 == 3 && drawn[0] == 1);
    FSDP_TRY(expect_numbers(net, "embed.weight", err));
    fsdp_sd_free(extra);
    return FSDP_OK;
}

Test(root_checkpoint, a_report_names_what_is_missing_and_partial_loads_go_on)
{
    expect_net_on("cpu", (toy_case){1, {2}, {"dp"}, declare_net, load_in_part, NULL, {0}});
}

/* --- dtypes -------------------------------------------------------------------------------------- */

static fsdp_status declare_typed(toy *net, fsdp_error *err)
{
    return fsdp_model_add(net->model,
                          &(fsdp_param_spec){.name = "w",
                                             .dtype = *(const fsdp_dtype *)net->user,
                                             .ndim = 1,
                                             .shape = (int64_t[]){5}},
                          NULL, err);
}

static fsdp_status save_bare(toy *net, fsdp_error *err)
{
    char path[60];
    snprintf(path, sizeof path, "%s/typed", dir);
    return fsdp_root_save(net->root, path, NULL, err);
}

static fsdp_status load_cast(toy *net, fsdp_error *err)
{
    fsdp_root_load_opts opts = {.load.cast = false};
    fsdp_box box;
    char path[60];
    snprintf(path, sizeof path, "%s/typed", dir);
    EXPECT_REFUSAL(fsdp_root_load(net->root, path, &opts, why), "'model.w' is f64 here and f32");
    opts.load.cast = true;
    FSDP_TRY(fsdp_root_load(net->root, path, &opts, err));
    const double *data = fsdp_param_shard(fsdp_model_at(net->model, 0), &box);
    for (int64_t i = 0; i < fsdp_box_count(&box); i++)
        EXPECT(data[i] == (double)(box.lo[0] + i + 1));
    return FSDP_OK;
}

Test(root_checkpoint, floating_dtypes_that_differ_are_cast_when_asked)
{
    const fsdp_dtype stored = FSDP_F32, wanted = FSDP_F64;
    expect_net_on("cpu", (toy_case){1, {2}, {"dp"}, declare_typed, save_bare, &stored, {0}});
    expect_net_on("cpu", (toy_case){1, {3}, {"dp"}, declare_typed, load_cast, &wanted, {0}});
}

/* --- refused options ------------------------------------------------------------------------------ */

static fsdp_status misuse(toy *net, fsdp_error *err)
{
    const fsdp_root_save_opts plain = {0};
    fsdp_root_save_opts save = plain;
    fsdp_sd *extra = NULL;
    const fsdp_value value = fsdp_value_i64(1);
    save.state.full_state_dict = true;
    EXPECT_REFUSAL(save_as(net, dir, &save, why), "full_state_dict is for state in memory");
    save = plain;
    save.into_run = true;
    EXPECT_REFUSAL(save_as(net, dir, &save, why), "a checkpoint of a run is named after its step");
    save = plain;
    FSDP_TRY(fsdp_sd_create(&extra, err));
    FSDP_TRY(fsdp_sd_add_value(extra, FSDP_NAME("model.embed.weight"), &value, err));
    save.extra = extra;
    EXPECT_REFUSAL(save_as(net, dir, &save, why), "'model.embed.weight'");
    EXPECT_REFUSAL(load_from(net, dir, &(fsdp_root_load_opts){.load.include = "embed"}, why),
                   "state.submodules");
    EXPECT_REFUSAL(
        load_from(net, dir, &(fsdp_root_load_opts){.state.broadcast_from_rank0 = true}, why),
        "broadcast_from_rank0 is for state in memory");
    fsdp_sd_free(extra);
    return FSDP_OK;
}

Test(root_checkpoint, options_that_mean_nothing_are_refused)
{
    expect_net_on("cpu", (toy_case){1, {2}, {"dp"}, declare_net, misuse, NULL, {0}});
}
