/*
 * Checkpoints of a root and its optimizers. Saving writes the live dict (state_get.c). Loading matches the
 * checkpoint like any other dict (state_set.c) and reads it into the root's own memory
 * (statedict/save/load_internal.h). See state.h.
 */
#include "runtime/state/state_internal.h"
#include "base/core/given.h"
#include "runtime/staging/snapshot.h"
#include "statedict/ctl/ctl_backend.h"
#include "statedict/save/load_internal.h"
#include "statedict/save/save_call.h"
#include "statedict/sd/layout_internal.h"
#include <fsdp/run.h>

/* === the caller's entries ===================================================================== */

/* The caller's extra entries beside the state of a root are saved and loaded with it: state.h, "checkpoints".
 * */

static fsdp_status add_extra(const fsdp_sd *extra, const fsdp_entry *entry, fsdp_sd *sd,
                             fsdp_error *err)
{
    if (entry->flat >= 0)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "'%s' lies in a flat buffer, which extra entries cannot: add it as a tensor",
            entry->name);
    return fsdp_state_add_entry(extra, entry, &entry->layout, entry->data, sd, err);
}

/* Adds the caller's extra entries to sd. extra may be NULL. Memory of tensors is borrowed. */
static fsdp_status state_save_extra(const fsdp_sd *extra, fsdp_sd *sd, fsdp_error *err)
{
    for (size_t i = 0; extra && i < fsdp_sd_count(extra); i++) {
        const fsdp_entry *entry = fsdp_sd_at(extra, i);
        FSDP_TRY(add_extra(extra, entry, sd, err));
        if (entry->path)
            FSDP_TRY(
                fsdp_sd_set_path(sd, fsdp_sd_count(sd) - 1, entry->path, entry->path_count, err));
    }
    return FSDP_OK;
}

/* Adds to `wanted` the extra entries that are stored; tensors get memory if they lack it. After the load,
 * state_take_extra copies values to extra.
 * Aliases are skipped, because their target is loaded. */
static fsdp_status state_want_extra(fsdp_sd *extra, const fsdp_sd *stored, int rank,
                                    fsdp_sd *wanted, fsdp_error *err)
{
    if (!extra)
        return FSDP_OK;
    FSDP_TRY(fsdp_sd_allocate(extra, rank, err));
    for (size_t i = 0; i < fsdp_sd_count(extra); i++) {
        const fsdp_entry *entry = fsdp_sd_at(extra, i);
        bool is_stored = fsdp_sd_find(stored, entry->name, entry->name_size) >= 0;
        if (entry->kind != FSDP_ENTRY_ALIAS && is_stored)
            FSDP_TRY(add_extra(extra, entry, wanted, err));
    }
    return FSDP_OK;
}

/* Copies values only: tensors were loaded into their memory. */
static fsdp_status state_take_extra(fsdp_sd *extra, const fsdp_sd *loaded, fsdp_error *err)
{
    for (size_t i = 0; extra && i < fsdp_sd_count(extra); i++) {
        const fsdp_entry *entry = fsdp_sd_at(extra, i);
        int64_t at = fsdp_sd_find(loaded, entry->name, entry->name_size);
        fsdp_value value = {0};
        if (entry->kind != FSDP_ENTRY_VALUE || at < 0)
            continue;
        FSDP_TRY(fsdp_value_copy(&fsdp_sd_at(loaded, (size_t)at)->value, &value, err));
        fsdp_sd_set_value(extra, i, &value);
    }
    return FSDP_OK;
}

/* === checkpoints ============================================================================== */

/* A save takes so much staging memory for the copy of a GPU's state. */
enum { POOL_BYTES = 256 << 20 };

/* Refuses the options that move state between ranks in memory; checkpoints do not use them. */
static fsdp_status check_state_opts(const fsdp_state_opts *opts, fsdp_error *err)
{
    const char *option = opts->full_state_dict        ? "full_state_dict"
                         : opts->cpu_offload          ? "cpu_offload"
                         : opts->broadcast_from_rank0 ? "broadcast_from_rank0"
                                                      : NULL;
    if (!option)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "%s is for state in memory: of a checkpoint each rank has its part, and "
                     "save.kind says how it is stored",
                     option);
}

/* --- saving ----------------------------------------------------------------------------------- */

/* Kind LOCAL stores flat buffers as they are; replicated flat parameters are not one flat buffer. */
static fsdp_status check_local(const fsdp_root *root, fsdp_error *err)
{
    for (size_t i = 0; root->declared != root->model && i < root->unit_count; i++)
        for (size_t g = 0; g < root->units[i]->group_count; g++) {
            const fsdp_group *group = &root->units[i]->groups[g];
            if (group->roles.shard_dim >= 0 && group->roles.replicate_dim >= 0)
                return fsdp_fail(err, FSDP_ERR_USAGE,
                                 "unit %s: local checkpoints do not go with hybrid strategies, "
                                 "sharded ones do",
                                 root->units[i]->name);
        }
    return FSDP_OK;
}

fsdp_status fsdp_root_saved_state(fsdp_root *root, const fsdp_root_save_opts *opts,
                                  fsdp_sd **sd_out, fsdp_error *err)
{
    FSDP_TRY(check_state_opts(&opts->state, err));
    if (opts->save.kind == FSDP_LOCAL)
        FSDP_TRY(check_local(root, err));
    if (opts->state.part != FSDP_STATE_OPTIM)
        FSDP_TRY(fsdp_root_check_values(root, NULL, "saving", err));
    FSDP_TRY(fsdp_state_get_unviewed(root, &opts->state, sd_out, err));
    return state_save_extra(opts->extra, *sd_out, err);
}

/* Makes the state dict and, of memory that the host cannot read, the copy that a save writes. */
static fsdp_status copy_state(fsdp_root *root, const fsdp_root_save_opts *given, fsdp_sd **sd_out,
                              fsdp_snapshot *snapshot, fsdp_error *err)
{
    const fsdp_snapshot_opts opts = {.view = &root->view, .most = POOL_BYTES, .is_still = true};
    FSDP_TRY(fsdp_root_saved_state(root, given, sd_out, err));
    FSDP_TRY(fsdp_snapshot_open(snapshot, &opts, *sd_out, root->world->rank, err));
    const fsdp_snapshot_take take = {.sd = *sd_out,
                                     .rank = root->world->rank,
                                     .changes = root->context->streams[FSDP_STREAM_COMPUTE]};
    FSDP_TRY(fsdp_snapshot_begin(snapshot, &take, err));
    FSDP_TRY(fsdp_waves_reach(fsdp_snapshot_waves(snapshot), 0, err));
    return fsdp_context_check_comms(root->context, err);
}

fsdp_status fsdp_root_save(fsdp_root *root, const char *dir, const fsdp_root_save_opts *opts,
                           fsdp_error *err)
{
    FSDP_NEED(err, root);
    static const fsdp_root_save_opts none = {0};
    const fsdp_root_save_opts *given = opts ? opts : &none;
    fsdp_ctl *ctl = fsdp_world_ctl(root->world);
    int64_t step = given->save.step ? *given->save.step : FSDP_NO_STEP;
    fsdp_sd *sd = NULL;
    fsdp_snapshot snapshot = {0};
    fsdp_world_trace(root->world, "save", -1);
    fsdp_status mine = FSDP_GIVEN(err, dir);
    if (mine == FSDP_OK)
        mine = copy_state(root, given, &sd, &snapshot, err);
    const fsdp_save_call call = {sd, ctl, dir, &given->save, mine, fsdp_snapshot_waves(&snapshot)};
    const char *outer = fsdp_ctl_begin_public(ctl, "fsdp_root_save");
    fsdp_status status =
        given->into_run ? fsdp_run_save_begun(&call, step, err) : fsdp_save_begun(&call, err);
    fsdp_ctl_end_public(ctl, outer);
    fsdp_snapshot_release(&snapshot);
    fsdp_sd_free(sd);
    return status;
}

/* --- loading ---------------------------------------------------------------------------------- */

/* A load: the live dict, matched with a checkpoint's description, and loaded under the stored names. */
typedef struct load_job {
    fsdp_root_load_opts opts;
    fsdp_state_scope scope;
    fsdp_sd *live, *wanted;
    fsdp_state_match match; /* of the last checkpoint that was tried */
} load_job;

/* Numbers are loaded into separate memory and converted later, because their stored type may differ. */
static fsdp_status want_entry(load_job *job, size_t i, fsdp_error *err)
{
    const fsdp_entry *live = fsdp_sd_at(job->live, i);
    const fsdp_entry *from = fsdp_state_source(&job->match, job->match.sd, i);
    const fsdp_entry *named = fsdp_sd_at(job->match.sd, (size_t)job->match.source[i]);
    bool is_number = live->ndim == 0;
    if (from->kind == FSDP_ENTRY_VALUE)
        return FSDP_OK;
    return fsdp_sd_add_tensor(job->wanted, named->name, named->name_size,
                              &(fsdp_tensor){is_number ? from->dtype : live->dtype, live->ndim,
                                             live->shape, live->layout,
                                             is_number ? NULL : live->data},
                              err);
}

static fsdp_status want_all(load_job *job, fsdp_error *err)
{
    int rank = job->scope.root->world->rank;
    FSDP_TRY(fsdp_sd_create(&job->wanted, err));
    for (size_t i = 0; i < fsdp_sd_count(job->live); i++)
        if (job->match.source[i] >= 0)
            FSDP_TRY(want_entry(job, i, err));
    FSDP_TRY(state_want_extra(job->opts.extra, job->match.sd, rank, job->wanted, err));
    return fsdp_sd_allocate(job->wanted, rank, err);
}

static void forget_checkpoint(load_job *job)
{
    fsdp_state_match_release(&job->match, NULL);
    fsdp_sd_free(job->wanted);
    job->wanted = NULL;
}

static fsdp_status make_wanted(void *context, const fsdp_sd *stored, fsdp_sd **sd_out,
                               fsdp_error *err)
{
    load_job *job = context;
    forget_checkpoint(job);
    job->match = (fsdp_state_match){.scope = &job->scope,
                                    .live = job->live,
                                    .sd = stored,
                                    .is_description = true,
                                    .casts = job->opts.load.cast,
                                    .extra = job->opts.extra};
    FSDP_TRY(fsdp_state_match_all(&job->match, err));
    FSDP_TRY(want_all(job, err));
    *sd_out = job->wanted;
    return FSDP_OK;
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

static fsdp_status take(void *context, const fsdp_checkpoint_info *info, fsdp_error *err)
{
    load_job *job = context;
    FSDP_TRY(fsdp_state_check_steps(&job->match, job->wanted, err));
    FSDP_TRY(take_numbers(job, err));
    FSDP_TRY(state_take_extra(job->opts.extra, job->wanted, err));
    if (job->opts.step)
        *job->opts.step = info->step;
    return fsdp_state_finish(&job->match, err);
}

static fsdp_status check_load_opts(const fsdp_root_load_opts *opts, fsdp_error *err)
{
    if (opts->load.include || opts->load.exclude)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "include and exclude do not select state of a root: state.submodules and "
                         "state.part do");
    return check_state_opts(&opts->state, err);
}

static fsdp_status prepare(load_job *job, fsdp_root *root, fsdp_error *err)
{
    job->opts.state.partial |= job->opts.load.partial;
    FSDP_TRY(check_load_opts(&job->opts, err));
    FSDP_TRY(fsdp_state_settle_to_set(root, err));
    FSDP_TRY(fsdp_state_scope_init(&job->scope, root, &job->opts.state, err));
    return fsdp_state_build(&job->scope, false, &job->live, err);
}

/* Merges two reports: names come from the match, path and bytes from the load. */
static void report_load(load_job *job, fsdp_load_report *loaded)
{
    fsdp_load_report *report = job->opts.load.report;
    if (!report)
        return;
    fsdp_state_match_release(&job->match, report);
    report->path = loaded->path;
    report->bytes_read = loaded->bytes_read;
    report->bytes_needed = loaded->bytes_needed;
    loaded->path = NULL;
}

static fsdp_status load(load_job *job, fsdp_ctl *ctl, const char *path, fsdp_load_report *loaded,
                        fsdp_error *err)
{
    const fsdp_load_hooks hooks = {.context = job, .make_sd = make_wanted, .take = take};
    fsdp_load_opts opts = job->opts.load;
    opts.partial = true; /* match_all has checked the names */
    opts.report = loaded;
    return fsdp_ctl_agree(ctl, fsdp_load_hooked(&hooks, ctl, path, &opts, err), err);
}

fsdp_status fsdp_root_load(fsdp_root *root, const char *path, const fsdp_root_load_opts *opts,
                           fsdp_error *err)
{
    FSDP_NEED(err, root);
    fsdp_ctl *ctl = fsdp_world_ctl(root->world);
    fsdp_load_report loaded = {0};
    load_job job = {0};
    if (opts)
        job.opts = *opts;
    if (job.opts.load.report)
        *job.opts.load.report = (fsdp_load_report){0};
    fsdp_world_trace(root->world, "load", -1);
    fsdp_status mine = FSDP_GIVEN(err, path);
    if (mine == FSDP_OK)
        mine = prepare(&job, root, err);
    const char *outer = fsdp_ctl_begin_public(ctl, "fsdp_root_load");
    fsdp_status status = fsdp_ctl_agree(ctl, mine, err);
    if (status == FSDP_OK)
        status = load(&job, ctl, path, &loaded, err);
    fsdp_ctl_end_public(ctl, outer);
    report_load(&job, &loaded);
    fsdp_load_report_release(&loaded);
    forget_checkpoint(&job);
    fsdp_sd_free(job.live);
    fsdp_state_scope_release(&job.scope);
    return status;
}
