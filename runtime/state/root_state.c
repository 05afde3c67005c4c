/*
 * Checkpoints of a root and its optimizer: the live dict (state_get.c) saved; a checkpoint matched as any
 * other dict (state_set.c), and loaded into the memory that is there. See state.h.
 */
#include "runtime/state/state_internal.h"

#include <string.h>

/* Names of flat parameters would be saved, which nobody finds again. */
static fsdp_status check_face(const fsdp_root *root, const char *call, fsdp_error *err)
{
    if (!root->is_flat)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "the parameters of this root lie in flat ones: fsdp_v1_%s does that", call);
}

fsdp_status fsdp_root_save(fsdp_root *root, fsdp_optim *optim, const char *dir, fsdp_error *err)
{
    fsdp_ctl *ctl = fsdp_world_ctl(root->world);
    fsdp_sd *sd = NULL;
    FSDP_TRY(check_face(root, "save", err));
    fsdp_status status = fsdp_root_state(root, optim, NULL, &sd, err);
    status = fsdp_ctl_agree(ctl, status, err);
    if (status == FSDP_OK)
        status = fsdp_sd_save(sd, ctl, dir, NULL, err);
    fsdp_sd_free(sd);
    return status;
}

/* --- loading ---------------------------------------------------------------------------------- */

/* The live dict, matched by what a checkpoint says of itself, and wanted under the names that are there. */
typedef struct load_job {
    fsdp_state_scope scope;
    fsdp_sd *live, *wanted;
    fsdp_checkpoint *checkpoint;
    fsdp_state_match match;
} load_job;

static void close_checkpoint(load_job *job)
{
    fsdp_state_match_release(&job->match, NULL);
    fsdp_checkpoint_close(job->checkpoint);
    job->checkpoint = NULL;
}

static fsdp_status match_checkpoint(load_job *job, const char *path, fsdp_error *err)
{
    FSDP_TRY(fsdp_checkpoint_open(path, NULL, &job->checkpoint, err));
    job->match = (fsdp_state_match){.scope = &job->scope,
                                    .live = job->live,
                                    .sd = fsdp_checkpoint_sd(job->checkpoint),
                                    .is_description = true};
    return fsdp_state_match_all(&job->match, err);
}

/* Numbers have memory of their own until it is known what they are. */
static fsdp_status want_entry(load_job *job, size_t i, fsdp_error *err)
{
    const fsdp_entry *live = fsdp_sd_at(job->live, i);
    const fsdp_entry *from = fsdp_state_source(&job->match, job->match.sd, i);
    const fsdp_entry *named = fsdp_sd_at(job->match.sd, (size_t)job->match.source[i]);
    if (from->kind == FSDP_ENTRY_VALUE)
        return FSDP_OK;
    return fsdp_sd_add_tensor(job->wanted, named->name, named->name_size, from->dtype, live->ndim,
                              live->shape, &live->layout, live->ndim == 0 ? NULL : live->data, err);
}

static fsdp_status prepare(load_job *job, fsdp_root *root, fsdp_optim *const *optims, size_t n,
                           const char *path, fsdp_error *err)
{
    FSDP_TRY(fsdp_state_settle_to_set(root, err));
    FSDP_TRY(fsdp_state_scope_init(&job->scope, root, optims, n, NULL, err));
    FSDP_TRY(fsdp_state_build(&job->scope, &job->live, err));
    FSDP_TRY(match_checkpoint(job, path, err));
    FSDP_TRY(fsdp_sd_create(&job->wanted, err));
    for (size_t i = 0; i < fsdp_sd_count(job->live); i++)
        if (job->match.source[i] >= 0)
            FSDP_TRY(want_entry(job, i, err));
    return fsdp_sd_allocate(job->wanted, root->world->rank, err);
}

static fsdp_status take_numbers(const load_job *job, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_count(job->live); i++) {
        const fsdp_entry *live = fsdp_sd_at(job->live, i);
        if (job->match.source[i] < 0 || live->ndim > 0)
            continue;
        const fsdp_entry *from = fsdp_sd_at(job->match.sd, (size_t)job->match.source[i]);
        int64_t at = fsdp_sd_find(job->wanted, from->name, from->name_size);
        if (!fsdp_state_set_number(live, at < 0 ? from : fsdp_sd_at(job->wanted, (size_t)at)))
            return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' is no number", from->name);
    }
    return FSDP_OK;
}

/* Of a run, the newest checkpoint may have turned out damaged: then an older one was loaded. */
static fsdp_status finish(load_job *job, const char *loaded, fsdp_error *err)
{
    if (strcmp(loaded, fsdp_checkpoint_describe(job->checkpoint)->path) != 0) {
        close_checkpoint(job);
        FSDP_TRY(match_checkpoint(job, loaded, err));
    }
    FSDP_TRY(take_numbers(job, err));
    return fsdp_state_finish(&job->match, err);
}

fsdp_status fsdp_root_load(fsdp_root *root, fsdp_optim *optim, const char *path, fsdp_error *err)
{
    fsdp_ctl *ctl = fsdp_world_ctl(root->world);
    fsdp_load_report report = {0};
    const fsdp_load_opts opts = {.not_strict = true, .report = &report};
    load_job job = {0};
    FSDP_TRY(check_face(root, "load", err));
    fsdp_status status = prepare(&job, root, &optim, optim ? 1 : 0, path, err);
    status = fsdp_ctl_agree(ctl, status, err);
    if (status == FSDP_OK)
        status = fsdp_sd_load(job.wanted, ctl, path, &opts, err);
    if (status == FSDP_OK)
        status = fsdp_ctl_agree(ctl, finish(&job, report.path, err), err);
    fsdp_load_report_release(&report);
    close_checkpoint(&job);
    fsdp_sd_free(job.wanted);
    fsdp_sd_free(job.live);
    fsdp_state_scope_release(&job.scope);
    return status;
}
