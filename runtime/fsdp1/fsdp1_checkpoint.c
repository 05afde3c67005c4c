/*
 * The FSDP1 face: checkpoints of model and optimizer, with the names that roots give them (root_state.c), and
 * entries of the caller's own beside them.
 */
#include "runtime/fsdp1/fsdp1_internal.h"

#include <string.h>

#include <fsdp/run.h>

#define MODEL "model."
#define OPTIM "optim."

/* Live memory of model and optimizer; only buffers that are kept in another dtype are copied, and, to load,
 * steps. */
static fsdp_status make_live(fsdp_v1 *v1, fsdp_optim *optim, fsdp_v1_state_type type, bool loads,
                             fsdp_sd **sd_out, fsdp_error *err)
{
    const fsdp_v1_state_opts model = {.type = type, .prefix = MODEL};
    const fsdp_v1_state_opts state = {.type = type, .prefix = OPTIM};
    FSDP_TRY(fsdp_v1_check_state_opts(v1, &model, err));
    FSDP_TRY(fsdp_sd_create(sd_out, err));
    FSDP_TRY(fsdp_v1_add_model(v1, *sd_out, &model, err));
    if (optim && loads)
        FSDP_TRY(fsdp_v1_add_optim_to_load(v1, optim, &state, *sd_out, err));
    else if (optim)
        FSDP_TRY(fsdp_v1_add_optim(v1, optim, &state, *sd_out, err));
    FSDP_TRY(fsdp_sd_allocate(*sd_out, v1->root->world->rank, err));
    if (optim && loads)
        FSDP_TRY(fsdp_v1_unset_steps(v1, optim, &state, *sd_out, err));
    return fsdp_v1_fill_model(v1, *sd_out, &model, true, err);
}

/* --- saving ----------------------------------------------------------------------------------- */

fsdp_v1_save_opts fsdp_v1_save_opts_default(void)
{
    return (fsdp_v1_save_opts){.save = fsdp_save_opts_default()};
}

static fsdp_kind kind_of(fsdp_v1_state_type type)
{
    return type == FSDP_V1_LOCAL_STATE_DICT  ? FSDP_LOCAL
           : type == FSDP_V1_FULL_STATE_DICT ? FSDP_FULL
                                             : FSDP_SHARDED;
}

/* Whole tensors are put together as they are written. */
static fsdp_status make_saved(fsdp_v1 *v1, fsdp_optim *optim, fsdp_v1_state_type type,
                              const fsdp_sd *own, fsdp_sd **sd_out, fsdp_error *err)
{
    bool is_local = type == FSDP_V1_LOCAL_STATE_DICT;
    FSDP_TRY(
        make_live(v1, optim, is_local ? type : FSDP_V1_SHARDED_STATE_DICT, false, sd_out, err));
    return fsdp_state_save_own(own, *sd_out, err);
}

fsdp_status fsdp_v1_save_with(fsdp_v1 *v1, fsdp_optim *optim, const char *dir,
                              fsdp_v1_state_type type, const fsdp_v1_save_opts *opts,
                              fsdp_error *err)
{
    fsdp_ctl *ctl = fsdp_world_ctl(v1->root->world);
    fsdp_v1_save_opts given = opts ? *opts : fsdp_v1_save_opts_default();
    fsdp_sd *sd = NULL;
    given.save.kind = kind_of(type);
    FSDP_TRY(fsdp_v1_check_idle(v1, "fsdp_v1_save", err));
    fsdp_status status = fsdp_ctl_agree(ctl, make_saved(v1, optim, type, given.own, &sd, err), err);
    if (status == FSDP_OK && given.into_run)
        status = fsdp_run_save(sd, ctl, dir, given.save.step, &given.save, err);
    else if (status == FSDP_OK)
        status = fsdp_sd_save(sd, ctl, dir, &given.save, err);
    fsdp_sd_free(sd);
    return status;
}

fsdp_status fsdp_v1_save(fsdp_v1 *v1, fsdp_optim *optim, const char *dir, fsdp_v1_state_type type,
                         fsdp_error *err)
{
    return fsdp_v1_save_with(v1, optim, dir, type, NULL, err);
}

/* --- loading ---------------------------------------------------------------------------------- */

typedef struct load_job {
    fsdp_v1 *v1;
    fsdp_optim *optim;
    fsdp_ctl *ctl;
    fsdp_v1_load_opts opts;
    fsdp_load_report report; /* names, and where from */
} load_job;

static fsdp_status check_load_opts(const fsdp_v1_load_opts *opts, fsdp_error *err)
{
    if (!opts->load.include && !opts->load.exclude)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "include and exclude do not select state of a wrapped model: all of it is "
                     "loaded, without the optimizer when that is NULL");
}

/* What of the own entries a checkpoint lacks. */
static fsdp_status list_missing(load_job *job, const fsdp_checkpoint *checkpoint, fsdp_error *err)
{
    fsdp_name_list names = {0};
    const char *path = fsdp_checkpoint_describe(checkpoint)->path;
    bool fits = true;
    for (size_t i = 0; i < fsdp_sd_count(job->opts.own) && fits; i++) {
        const fsdp_entry *own = fsdp_sd_at(job->opts.own, i);
        bool is_wanted = own->kind != FSDP_ENTRY_ALIAS;
        if (is_wanted &&
            fsdp_sd_find(fsdp_checkpoint_sd(checkpoint), own->name, own->name_size) < 0)
            fits = fsdp_names_add(&names, own->name, own->name_size);
    }
    fsdp_names_move(&names, &job->report.missing, &job->report.missing_count);
    if (!fits)
        return fsdp_fail_memory(err, "a list of names");
    if (job->report.missing_count == 0)
        return FSDP_OK;
    job->report.path = fsdp_strndup(path, strlen(path));
    return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' has no '%s'; nothing was loaded", path,
                     job->report.missing[0]);
}

/* Before the state is loaded, which comes first. */
static fsdp_status check_own(load_job *job, const char *path, fsdp_error *err)
{
    fsdp_checkpoint *checkpoint;
    if (!job->opts.own || job->opts.load.not_strict)
        return FSDP_OK;
    FSDP_TRY(fsdp_checkpoint_open(path, job->opts.load.io, &checkpoint, err));
    fsdp_status status = list_missing(job, checkpoint, err);
    fsdp_checkpoint_close(checkpoint);
    return status;
}

static fsdp_status prepare(load_job *job, const char *path, fsdp_sd **sd_out, fsdp_error *err)
{
    FSDP_TRY(check_load_opts(&job->opts, err));
    FSDP_TRY(check_own(job, path, err));
    if (job->opts.own)
        FSDP_TRY(fsdp_sd_allocate(job->opts.own, job->v1->root->world->rank, err));
    return make_live(job->v1, job->optim, FSDP_V1_SHARDED_STATE_DICT, true, sd_out, err);
}

static fsdp_status take_buffers(fsdp_v1 *v1, const fsdp_sd *sd, fsdp_error *err)
{
    return v1->buffer_dtype != FSDP_DTYPE_NONE ? fsdp_v1_take_buffers(v1, sd, MODEL, err) : FSDP_OK;
}

/* Of the checkpoint, names of others are nobody's business here. */
static fsdp_status load_state(load_job *job, fsdp_sd *sd, const char *path, fsdp_error *err)
{
    fsdp_load_opts opts = job->opts.load;
    opts.include = job->optim ? "^(model|optim)\\." : "^model\\.";
    opts.report = &job->report;
    FSDP_TRY(fsdp_sd_load(sd, job->ctl, path, &opts, err));
    FSDP_TRY(take_buffers(job->v1, sd, err));
    if (job->optim)
        FSDP_TRY(fsdp_v1_take_steps(job->v1, job->optim, OPTIM, sd, err));
    if (job->optim)
        FSDP_TRY(fsdp_v1_take_flat_hypers(job->v1, job->optim, OPTIM, sd, err));
    fsdp_root_refresh_masters(job->v1->root, NULL);
    return FSDP_OK;
}

static fsdp_status add_missing(load_job *job, const fsdp_load_report *own, fsdp_error *err)
{
    fsdp_name_list names = {job->report.missing, job->report.missing_count,
                            job->report.missing_count};
    bool fits = true;
    for (size_t i = 0; i < own->missing_count && fits; i++)
        fits = fsdp_names_add(&names, own->missing[i], strlen(own->missing[i]));
    fsdp_names_move(&names, &job->report.missing, &job->report.missing_count);
    if (!fits)
        return fsdp_fail_memory(err, "a list of names");
    if (own->missing_count == 0 || job->opts.load.not_strict)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' has no '%s'", job->report.path, own->missing[0]);
}

/* From the very checkpoint that the state came from. */
static fsdp_status load_own(load_job *job, fsdp_error *err)
{
    fsdp_load_report own = {0};
    fsdp_load_opts opts = job->opts.load;
    if (!job->opts.own || fsdp_sd_count(job->opts.own) == 0)
        return FSDP_OK;
    opts.not_strict = true;
    opts.report = &own;
    fsdp_status status = fsdp_sd_load(job->opts.own, job->ctl, job->report.path, &opts, err);
    if (status == FSDP_OK)
        status = add_missing(job, &own, err);
    fsdp_load_report_release(&own);
    return status;
}

static fsdp_status take_step(const load_job *job, fsdp_error *err)
{
    fsdp_checkpoint *checkpoint;
    if (!job->opts.step)
        return FSDP_OK;
    FSDP_TRY(fsdp_checkpoint_open(job->report.path, job->opts.load.io, &checkpoint, err));
    *job->opts.step = fsdp_checkpoint_describe(checkpoint)->step;
    fsdp_checkpoint_close(checkpoint);
    return FSDP_OK;
}

static fsdp_status load(load_job *job, fsdp_sd *sd, const char *path, fsdp_error *err)
{
    FSDP_TRY(fsdp_ctl_agree(job->ctl, load_state(job, sd, path, err), err));
    fsdp_status status = fsdp_ctl_agree(job->ctl, load_own(job, err), err);
    return status == FSDP_OK ? fsdp_ctl_agree(job->ctl, take_step(job, err), err) : status;
}

fsdp_status fsdp_v1_load_with(fsdp_v1 *v1, fsdp_optim *optim, const char *path,
                              const fsdp_v1_load_opts *opts, fsdp_error *err)
{
    load_job job = {.v1 = v1, .optim = optim, .ctl = fsdp_world_ctl(v1->root->world)};
    fsdp_sd *sd = NULL;
    if (opts)
        job.opts = *opts;
    if (job.opts.load.report)
        *job.opts.load.report = (fsdp_load_report){0};
    FSDP_TRY(fsdp_v1_settle(v1, "fsdp_v1_load", err));
    fsdp_status status = fsdp_ctl_agree(job.ctl, prepare(&job, path, &sd, err), err);
    if (status == FSDP_OK)
        status = load(&job, sd, path, err);
    fsdp_sd_free(sd);
    if (job.opts.load.report)
        *job.opts.load.report = job.report;
    else
        fsdp_load_report_release(&job.report);
    return status;
}

fsdp_status fsdp_v1_load(fsdp_v1 *v1, fsdp_optim *optim, const char *path, fsdp_error *err)
{
    return fsdp_v1_load_with(v1, optim, path, NULL, err);
}
