/* The FSDP1 face: checkpoints with options: steps of a run, entries of the caller's own, what is missing. */
#include "base/io/io.h"
#include "tests/unit/runtime/wrap/wrap_state_cases.h"
#include <fsdp/async_save.h>

#include <stdio.h>
#include <stdlib.h>

static char dir[] = "/tmp/fsdp1-checkpoint-XXXXXX";

static void make_dir(void)
{
    cr_assert(mkdtemp(dir));
}

static void remove_dir(void)
{
    cr_assert_eq(fsdp_io_remove_tree(NULL, dir, NULL), FSDP_OK);
}

TestSuite(fsdp1_checkpoint, .init = make_dir, .fini = remove_dir);

static fsdp_status make_extra(int64_t epoch, fsdp_sd **extra_out, fsdp_error *err)
{
    const fsdp_value value = fsdp_value_i64(epoch);
    FSDP_TRY(fsdp_sd_create(extra_out, err));
    return fsdp_sd_add_value(*extra_out, FSDP_NAME("data.epoch"), &value, err);
}

static int64_t epoch_in(const fsdp_sd *extra)
{
    return find(extra, "data.epoch")->value.as.i64;
}

/* --- saved ------------------------------------------------------------------------------------ */

static fsdp_status save_step(toy *net, state_case *what, fsdp_error *err)
{
    const int64_t step = 30;
    fsdp_root_save_opts opts = {.save.kind = what->kind, .save.step = &step};
    fsdp_sd *extra;
    FSDP_TRY(make_extra(7, &extra, err));
    opts.save.compress = true;
    opts.into_run = true;
    opts.extra = extra;
    fsdp_status status = fsdp_root_save(net->root, dir, &opts, err);
    fsdp_sd_free(extra);
    return status == FSDP_OK ? leave_all(net, what, err) : status;
}

static fsdp_status load_step(toy *net, state_case *what, fsdp_error *err)
{
    const move_case *move = (const move_case *)what;
    int64_t step = 0;
    fsdp_sd *extra;
    FSDP_TRY(make_extra(0, &extra, err));
    const fsdp_root_load_opts opts = {.extra = extra, .step = &step};
    fsdp_status status = fsdp_root_load(net->root, dir, &opts, err);
    int64_t epoch = epoch_in(extra);
    fsdp_sd_free(extra);
    FSDP_TRY(status);
    EXPECT(step == 30 && epoch == 7);
    FSDP_TRY(compare_with(net, move->from, err));
    return fsdp_root_load(net->root, dir, NULL, err); /* extra entries need not be loaded */
}

static fsdp_status load_step_into_units(toy *net, state_case *what, fsdp_error *err)
{
    int64_t step = 0;
    fsdp_sd *extra;
    (void)what;
    FSDP_TRY(make_extra(0, &extra, err));
    const fsdp_root_load_opts opts = {.extra = extra, .step = &step};
    fsdp_status status = fsdp_root_load(net->root, dir, &opts, err);
    int64_t epoch = epoch_in(extra);
    fsdp_sd_free(extra);
    FSDP_TRY(status);
    EXPECT(step == 30 && epoch == 7);
    return FSDP_OK;
}

Test(fsdp1_checkpoint, a_run_goes_on_with_step_and_own_entries_in_either_face)
{
    state_case from = case_of(FSDP_WRAP_FULL_SHARD, true, save_step);
    from.trained = 1;
    from.kind = FSDP_FULL;
    expect_ranks(2, run_case, &from);
    move_case move = {.from = &from};
    move.state = case_of(FSDP_WRAP_SHARD_GRAD_OP, false, load_step);
    expect_ranks(3, run_case, &move);
    move.state = case_of(FSDP_WRAP_FULL_SHARD, false, load_step_into_units);
    move.state.setup.is_plain = true;
    expect_ranks(2, run_case, &move);
    free_state(&from);
}

/* --- steps ------------------------------------------------------------------------------------ */

static void path_of_steps(char path[80])
{
    snprintf(path, 80, "%s/steps", dir);
}

/* Units count the steps of every parameter. */
static fsdp_status save_uneven_steps(toy *net, state_case *what, fsdp_error *err)
{
    char path[80];
    fsdp_optim_tensor state[FSDP_OPTIM_TENSORS];
    size_t n = fsdp_optim_describe_state(net->optim, net->bias[1], state);
    (void)what;
    for (size_t i = 0; i < n; i++)
        if (strcmp(state[i].name, "step") == 0)
            *(float *)state[i].data = 9;
    path_of_steps(path);
    return fsdp_root_save(net->root, path, NULL, err);
}

static fsdp_status load_uneven_steps(toy *net, state_case *what, fsdp_error *err)
{
    char path[80];
    fsdp_error why = {0};
    (void)what;
    path_of_steps(path);
    EXPECT(fsdp_root_load(net->root, path, NULL, &why) == FSDP_ERR_USAGE);
    EXPECT(strstr(why.text, "'layers.1.bias' 9 times: they lie in one flat parameter"));
    return FSDP_OK;
}

Test(fsdp1_checkpoint, parameters_that_were_not_stepped_alike_do_not_become_one)
{
    state_case from = case_of(FSDP_WRAP_FULL_SHARD, true, save_uneven_steps);
    from.trained = 1;
    from.setup.is_plain = true;
    expect_ranks(2, run_case, &from);
    state_case to = case_of(FSDP_WRAP_FULL_SHARD, true, load_uneven_steps);
    expect_ranks(2, run_case, &to);
}

/* --- missing ---------------------------------------------------------------------------------- */

/* A load that fails because an extra entry is missing has changed nothing. */
static fsdp_status refuse_before_loading(toy *net, const char *path, fsdp_root_load_opts *opts,
                                         fsdp_error *err)
{
    fsdp_param *flat = fsdp_wrap_flat_param(net->wrap, net->unit[0]);
    const float *values = fsdp_param_shard(flat, NULL);
    fsdp_error why = {0};
    float saved = values[0];
    FSDP_TRY(fsdp_root_init_uniform(net->root, 99, err));
    float changed = values[0];
    const fsdp_root_load_opts model = {.state.part = FSDP_STATE_MODEL};
    EXPECT(fsdp_root_load(net->root, path, opts, &why) == FSDP_ERR_USAGE);
    bool is_told =
        strstr(why.text, "missing: 'data.epoch'") && opts->load.report->missing_count == 1;
    fsdp_load_report_release(opts->load.report);
    EXPECT(is_told && changed != saved && values[0] == changed);
    FSDP_TRY(fsdp_root_load(net->root, path, &model, err));
    EXPECT(values[0] == saved);
    return FSDP_OK;
}

static fsdp_status load_in_part(toy *net, fsdp_sd *extra, fsdp_error *err)
{
    fsdp_load_report report;
    const fsdp_root_save_opts model = {.state.part = FSDP_STATE_MODEL};
    fsdp_root_load_opts opts = {
        .extra = extra, .state.part = FSDP_STATE_MODEL, .load.report = &report};
    char path[80];
    fsdp_error why = {0};
    snprintf(path, sizeof path, "%s/part", dir);
    FSDP_TRY(fsdp_root_save(net->root, path, &model, err));
    FSDP_TRY(refuse_before_loading(net, path, &opts, err));
    opts.extra = NULL;
    opts.state.part = FSDP_STATE_ALL;
    EXPECT(fsdp_root_load(net->root, path, &opts, &why) == FSDP_ERR_USAGE);
    EXPECT(strstr(why.text, "missing") && report.missing_count > 0);
    fsdp_load_report_release(&report);
    opts.extra = extra;
    opts.load.partial = true;
    FSDP_TRY(fsdp_root_load(net->root, path, &opts, err));
    bool is_told = strcmp(report.missing[report.missing_count - 1], "data.epoch") == 0 &&
                   strcmp(report.path, path) == 0;
    fsdp_load_report_release(&report);
    EXPECT(is_told && epoch_in(extra) == 4);
    opts.load.include = "weight";
    EXPECT(fsdp_root_load(net->root, path, &opts, &why) == FSDP_ERR_USAGE);
    EXPECT(strstr(why.text, "include and exclude") && !report.path);
    return FSDP_OK;
}

static fsdp_status look_at_parts(toy *net, state_case *what, fsdp_error *err)
{
    fsdp_sd *extra;
    (void)what;
    FSDP_TRY(make_extra(4, &extra, err));
    fsdp_status status = load_in_part(net, extra, err);
    fsdp_sd_free(extra);
    return status;
}

Test(fsdp1_checkpoint, what_is_missing_is_reported_and_partial_loads_go_on)
{
    state_case what = case_of(FSDP_WRAP_FULL_SHARD, false, look_at_parts);
    expect_ranks(2, run_case, &what);
}

/* --- in the background ------------------------------------------------------------------------ */

static fsdp_status save_both_ways(toy *net, state_case *what, fsdp_error *err)
{
    const fsdp_root_save_opts opts = {.save.kind = what->kind};
    fsdp_async_saver *saver;
    char path[96];
    snprintf(path, sizeof path, "%s/plain-%d", dir, (int)what->kind);
    FSDP_TRY(fsdp_root_save(net->root, path, &opts, err));
    FSDP_TRY(fsdp_async_saver_create(net->root, NULL, &saver, err));
    snprintf(path, sizeof path, "%s/background-%d", dir, (int)what->kind);
    fsdp_status status = fsdp_async_save(saver, path, &opts, err);
    if (status == FSDP_OK)
        status = fsdp_async_save_wait(saver, NULL, err);
    fsdp_async_saver_free(saver);
    return status;
}

Test(fsdp1_checkpoint, flat_parameters_are_saved_in_the_background)
{
    for (int kind = 0; kind <= FSDP_LOCAL; kind++) {
        char command[160];
        state_case what = case_of(FSDP_WRAP_FULL_SHARD, false, save_both_ways);
        what.kind = (fsdp_kind)kind;
        what.trained = 1;
        expect_ranks(2, run_case, &what);
        snprintf(command, sizeof command, "cd %s && diff -r plain-%d background-%d", dir, kind,
                 kind);
        cr_assert_eq(system(command), 0);
    }
}
