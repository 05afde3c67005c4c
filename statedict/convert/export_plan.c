/*
 * The plan of an export: which entries and boxes are written (selection.c, relayout.c), what that takes,
 * and whether the target can hold it and may be written. See export.h.
 */
#include "statedict/convert/export_internal.h"

#include "base/io/io_reuse.h"
#include "statedict/commit/commit_internal.h"
#include "statedict/checkpoint/foreign.h"
#include "statedict/convert/plan_notes.h"
#include "statedict/select/relayout.h"
#include "statedict/select/selection.h"

#include <string.h>

/* --- what is written -------------------------------------------------------------------------- */

static fsdp_status choose_mesh(export_job *job, fsdp_error *err)
{
    const fsdp_convert_opts *opts = job->opts;
    bool sharded = job->format->limits.sharded;
    if (!sharded && (opts->world > 1 || opts->mesh || opts->shard_dim > 0))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "format %s has no ranks: no world size, no mesh, no sharding dim",
                         job->format->limits.format);
    if (opts->mesh) {
        job->world = (int)fsdp_mesh_size(opts->mesh);
        return FSDP_OK;
    }
    job->world = opts->world > 0 ? opts->world : sharded ? job->from->info.world : 1;
    return fsdp_mesh_create(1, (int64_t[]){job->world}, (const char *[]){"dp"}, NULL, &job->mesh,
                            err);
}

size_t fsdp_export_tensor_of(const fsdp_sd *sd, size_t i)
{
    const fsdp_entry *entry = fsdp_sd_at(sd, i);
    return entry->kind == FSDP_ENTRY_ALIAS ? entry->target : i;
}

static fsdp_status count_box(void *user, int rank, size_t part, const fsdp_box *box,
                             fsdp_error *err)
{
    (void)rank;
    (void)part;
    (void)box;
    (void)err;
    ++*(size_t *)user;
    return FSDP_OK;
}

typedef struct box_list {
    fsdp_target_box *items;
    size_t count;
    fsdp_arena *arena; /* of their dims */
} box_list;

static fsdp_status add_box(void *user, int rank, size_t part, const fsdp_box *box, fsdp_error *err)
{
    box_list *list = user;
    size_t ndim = (size_t)box->ndim;
    int64_t *dims = fsdp_arena_alloc(list->arena, 2 * ndim, sizeof *dims);
    (void)part;
    if (!dims)
        return fsdp_fail_memory(err, "a conversion");
    memcpy(dims, box->lo, ndim * sizeof *dims);
    memcpy(dims + ndim, box->len, ndim * sizeof *dims);
    list->items[list->count++] = (fsdp_target_box){rank, dims, dims + ndim};
    return FSDP_OK;
}

static fsdp_status each_box(const export_job *job, size_t tensor, fsdp_stored_visit visit,
                            void *user, const int *owners, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(job->sd, tensor);
    fsdp_box whole = fsdp_box_whole(entry->ndim, entry->shape);
    return fsdp_plan_stored(entry, owners[tensor], &whole, visit, user, err);
}

static fsdp_status cut_boxes(export_job *job, const int *owners, fsdp_error *err)
{
    box_list list = {.arena = &job->dims};
    for (size_t i = 0; i < fsdp_sd_count(job->sd); i++)
        if (fsdp_sd_at(job->sd, i)->kind != FSDP_ENTRY_VALUE)
            FSDP_TRY(each_box(job, fsdp_export_tensor_of(job->sd, i), count_box, &job->box_count,
                              owners, err));
    list.items = job->boxes = fsdp_alloc(job->box_count, sizeof *job->boxes);
    job->parts = fsdp_alloc(job->box_count, sizeof *job->parts);
    if (!job->boxes || !job->parts)
        return fsdp_fail_memory(err, "a conversion");
    for (size_t i = 0; i < fsdp_sd_count(job->sd); i++) {
        fsdp_target_entry *entry = &job->entries[i];
        if (fsdp_sd_at(job->sd, i)->kind == FSDP_ENTRY_VALUE)
            continue;
        size_t first = list.count;
        FSDP_TRY(each_box(job, fsdp_export_tensor_of(job->sd, i), add_box, &list, owners, err));
        entry->boxes = job->boxes + first;
        entry->box_count = list.count - first;
    }
    return FSDP_OK;
}

static fsdp_status declare_entries(export_job *job, fsdp_error *err)
{
    size_t count = fsdp_sd_count(job->sd);
    job->entries = fsdp_alloc(count, sizeof *job->entries);
    int *owners = fsdp_alloc(count, sizeof *owners);
    fsdp_status st = job->entries && owners ? FSDP_OK : fsdp_fail_memory(err, "a conversion");
    if (st == FSDP_OK)
        st = fsdp_plan_owners(job->sd, FSDP_OWNERS_BALANCED, owners, err);
    for (size_t i = 0; i < count && st == FSDP_OK; i++) {
        const fsdp_entry *entry = fsdp_sd_at(job->sd, i);
        const fsdp_entry *tensor = fsdp_sd_at(job->sd, fsdp_export_tensor_of(job->sd, i));
        job->entries[i] = (fsdp_target_entry){.name = entry->name,
                                              .name_size = entry->name_size,
                                              .path = entry->path,
                                              .path_count = entry->path_count};
        if (entry->kind == FSDP_ENTRY_VALUE) {
            job->entries[i].value = &entry->value;
            continue;
        }
        job->entries[i].dtype = tensor->dtype;
        job->entries[i].ndim = tensor->ndim;
        job->entries[i].shape = tensor->shape;
    }
    if (st == FSDP_OK)
        st = cut_boxes(job, owners, err);
    fsdp_free(owners);
    return st;
}

static bool may_share(const fsdp_target_entry *a, const fsdp_target_entry *b)
{
    return a->dtype == b->dtype && a->ndim == b->ndim &&
           memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0;
}

/* Names of one tensor of the source, where the target stores it once. */
static fsdp_status declare_shared(export_job *job, fsdp_error *err)
{
    size_t count = fsdp_sd_count(job->from->manifest.sd);
    size_t *one = fsdp_alloc(count, sizeof *one);
    size_t *first = fsdp_alloc(count, sizeof *first); /* entry of the target, counted from 1 */
    fsdp_status st =
        one && first ? fsdp_ties_known(job->from, one, err) : fsdp_fail_memory(err, "tied weights");
    for (size_t i = 0; i < fsdp_sd_count(job->sd) && st == FSDP_OK; i++) {
        fsdp_target_entry *entry = &job->entries[i];
        size_t *known = &first[one[job->source[i]]];
        if (entry->value)
            continue;
        if (*known == 0)
            *known = i + 1;
        else if (may_share(entry, &job->entries[*known - 1]))
            entry->same_as = *known;
    }
    fsdp_free(one);
    fsdp_free(first);
    return st;
}

/* What is known of tied names, in the numbers of the target. */
static fsdp_status declare_ties(export_job *job, fsdp_error *err)
{
    const fsdp_ties *names = &job->names_left;
    job->ties = fsdp_alloc(names->count, sizeof *job->ties);
    if (!job->ties)
        return fsdp_fail_memory(err, "tied weights");
    for (size_t i = 0; i < names->count; i++) {
        const fsdp_convert_tie *tie = &names->items[i];
        int64_t kept = fsdp_sd_find(job->sd, tie->kept, tie->kept_size);
        if (kept < 0)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "a tied name that is not there");
        job->ties[i] = (fsdp_target_tie){tie->dropped, tie->dropped_size, (size_t)kept};
    }
    return FSDP_OK;
}

static fsdp_status fit_copies(export_job *job, const fsdp_selection *selection, fsdp_error *err)
{
    size_t count = fsdp_sd_count(job->sd);
    bool *is_model = fsdp_alloc(count, sizeof *is_model);
    if (!is_model)
        return fsdp_fail_memory(err, "a conversion");
    for (size_t i = 0; i < count; i++)
        is_model[i] = !fsdp_selection_at(selection, job->source[i])->is_optim;
    fsdp_status st = fsdp_copies_fit(&job->copies, job->opts, job->entries, is_model, count,
                                     &job->names_left, err);
    fsdp_free(is_model);
    return st;
}

static fsdp_status describe_selected(export_job *job, const char *to, fsdp_selection *selection,
                                     fsdp_error *err)
{
    fsdp_tie_rules rules = {.opts = job->opts,
                            .limits = &job->format->limits,
                            .config = job->copies.config.tied,
                            .to = to};
    FSDP_TRY(fsdp_ties_drop(job->from, &rules, selection, &job->names_left, err));
    FSDP_TRY(fsdp_relayout(job->from->manifest.sd, FSDP_SHARDED,
                           job->mesh ? job->mesh : job->opts->mesh, job->opts->shard_dim, selection,
                           &job->sd, &job->source, err));
    FSDP_TRY(declare_entries(job, err));
    if (job->format->limits.notes_tie)
        FSDP_TRY(declare_ties(job, err));
    if (job->format->limits.shares)
        FSDP_TRY(declare_shared(job, err));
    return fit_copies(job, selection, err);
}

static fsdp_status describe_target(export_job *job, const char *to, fsdp_convert_plan *plan,
                                   fsdp_error *err)
{
    fsdp_selection *selection = NULL;
    const fsdp_sd *from = job->from->manifest.sd;
    FSDP_TRY(choose_mesh(job, err));
    fsdp_status st = fsdp_selection_create(from, &job->opts->select, &job->format->limits,
                                           job->from->is_missing, &selection, err);
    if (st == FSDP_DIFFERS)
        return fsdp_fail(err, FSDP_DIFFERS, "no name in '%s' matches", job->from->path);
    FSDP_TRY(st);
    st = describe_selected(job, to, selection, err);
    fsdp_noted noted = {.selection = selection,
                        .count = fsdp_sd_count(from),
                        .notes_ties = job->format->limits.notes_tie != NULL,
                        .ties = &job->names_left,
                        .copies = &job->copies};
    if (st == FSDP_OK)
        st = fsdp_plan_note(plan, &noted, err);
    fsdp_selection_tell(selection, plan);
    job->casts = plan->cast_tensors > 0;
    fsdp_selection_free(selection);
    return st;
}

/* Its elements are one run of the tensor's row-major order. */
static bool is_run(const fsdp_target_entry *entry, const fsdp_target_box *box)
{
    bool is_cut = false;
    for (int d = entry->ndim - 1; d >= 0; d--) {
        if (is_cut && box->len[d] > 1)
            return false;
        is_cut = is_cut || box->len[d] < entry->shape[d];
    }
    return true;
}

static fsdp_status announce_reading(export_job *job, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_count(job->sd); i++) {
        const fsdp_target_entry *entry = &job->entries[i];
        bool across = false;
        for (size_t b = 0; b < entry->box_count; b++)
            across = across || !is_run(entry, &entry->boxes[b]);
        if (!entry->value)
            FSDP_TRY(fsdp_foreign_announce(job->from, job->source[i], across, err));
    }
    return FSDP_OK;
}

/* --- what it takes ---------------------------------------------------------------------------- */

fsdp_target_opts fsdp_export_target_opts(const export_job *job)
{
    return (fsdp_target_opts){.io = job->reuse ? job->reuse : job->io,
                              .path = job->place.path,
                              .entries = job->entries,
                              .entry_count = fsdp_sd_count(job->sd),
                              .world = job->world,
                              .max_file_bytes = job->opts->max_shard_bytes,
                              .ties = job->ties,
                              .tie_count = job->ties ? job->names_left.count : 0,
                              .copied = fsdp_copies_record(&job->copies),
                              .sync = !job->opts->no_sync};
}

static fsdp_status count_work(export_job *job, fsdp_convert_plan *plan, fsdp_error *err)
{
    fsdp_target_opts opts = fsdp_export_target_opts(job);
    int64_t files = 0;
    plan->world = job->world;
    if (job->world > 1)
        plan->short_tensors = fsdp_relayout_count_short(job->sd, job->opts->shard_dim);
    for (size_t i = 0; i < opts.entry_count; i++) {
        const fsdp_target_entry *entry = &job->entries[i];
        plan->values += entry->value != NULL;
        plan->tensors += entry->value == NULL;
        for (size_t b = 0; b < entry->box_count; b++) {
            fsdp_box box = fsdp_target_box_at(entry, b);
            int64_t count = fsdp_box_count(&box);
            plan->bytes_read += count * (int64_t)fsdp_dtype_size(fsdp_export_source_dtype(job, i));
            job->tensor_bytes += count * (int64_t)fsdp_dtype_size(entry->dtype);
        }
    }
    FSDP_TRY(job->format->ops->measure(&opts, &files, &plan->bytes_written, err));
    plan->files = (int)files + (int)job->copies.count;
    plan->bytes_written += fsdp_copies_bytes(&job->copies);
    plan->peak_memory = job->slab_bytes * job->threads;
    return FSDP_OK;
}

static fsdp_status check_space(const export_job *job, const char *to, fsdp_convert_plan *plan,
                               fsdp_error *err)
{
    fsdp_space space;
    char *path, *parent;
    FSDP_TRY(fsdp_path_split(to, &path, &parent, err));
    int result = job->io->ops->space(job->io, parent, &space);
    fsdp_free(path);
    fsdp_free(parent);
    if (result < 0)
        return FSDP_OK;
    int64_t needed = plan->bytes_written + plan->bytes_spooled;
    if (job->opts->resume)
        needed -= fsdp_resume_bytes(job->io, to, job->hash);
    plan->free_bytes = space.free_bytes;
    plan->bytes_needed = needed;
    if (needed <= space.free_bytes)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_NO_SPACE,
                     "'%s' needs %lld bytes, %lld are free: free some, or choose another place", to,
                     (long long)needed, (long long)space.free_bytes);
}

/* An overwrite must not take what it reads from. Steps of a run are checkpoints of our own. */
static fsdp_status check_target(const export_job *job, const char *to, fsdp_error *err)
{
    int64_t step;
    if (fsdp_dir_is_step(to, &step))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' is the name of a step of a run, and format %s is none of a run's: "
                         "give it another name",
                         to, job->format->limits.format);
    if (fsdp_paths_are_same(job->io, job->from->path, to))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' and '%s' are the same checkpoint: convert to another name",
                         job->from->path, to);
    if (fsdp_foreign_takes_in(job->from, to))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' would lie in '%s', which is converted: convert to another place", to,
                         job->from->path);
    if (fsdp_foreign_lies_in(job->from, to))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' lies in '%s', which would be replaced: convert to another name",
                         job->from->path, to);
    if (fsdp_foreign_reads(job->from, to))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' is a file of '%s', which is converted: convert to another name", to,
                         job->from->path);
    return fsdp_export_check(&job->place, to, err);
}

/* --- the job ---------------------------------------------------------------------------------- */

fsdp_status fsdp_export_job_init(const fsdp_convert_opts *opts, export_job *job, fsdp_error *err)
{
    *job = (export_job){.opts = opts, .io = opts->io ? opts->io : fsdp_io_posix()};
    FSDP_TRY(fsdp_check_budget(opts->threads, opts->memory, err));
    job->format = fsdp_target_find(opts->format);
    if (!job->format)
        return fsdp_fail(err, FSDP_ERR_USAGE, "there is no format '%.40s' to write", opts->format);
    job->place = (fsdp_export_place){.io = job->io,
                                     .format = job->format,
                                     .overwrite = opts->overwrite,
                                     .durable = !opts->no_sync};
    return FSDP_OK;
}

void fsdp_export_job_release(export_job *job, fsdp_error *err)
{
    fsdp_checkpoint_close(job->written);
    fsdp_checkpoint_close(job->from); /* removing needs a descriptor */
    fsdp_export_end(&job->place, err);
    fsdp_copies_release(&job->copies);
    fsdp_ties_release(&job->names_left);
    fsdp_free(job->ties);
    fsdp_free(job->written_entry);
    fsdp_free(job->hashes);
    fsdp_free(job->parts);
    fsdp_free(job->boxes);
    fsdp_arena_release(&job->dims);
    fsdp_free(job->entries);
    fsdp_free(job->source);
    fsdp_sd_free(job->sd);
    fsdp_mesh_free(job->mesh);
    fsdp_io_reuse_free(job->reuse);
}

static fsdp_planned plan_of(const export_job *job, const char *to)
{
    return (fsdp_planned){.from = job->from,
                          .to = to,
                          .opts = job->opts,
                          .sd = job->sd,
                          .source = job->source,
                          .copies = &job->copies,
                          .ties = &job->names_left};
}

fsdp_status fsdp_export_prepare(export_job *job, const char *from, const char *to,
                                fsdp_convert_plan *plan, fsdp_error *err)
{
    FSDP_TRY(fsdp_convert_open(from, job->opts, &job->from, err));
    if (job->format->limits.opaque)
        FSDP_TRY(fsdp_foreign_carry_values(job->from, false, err));
    FSDP_TRY(fsdp_copies_open(job->io, job->opts, to, &job->copies, err));
    FSDP_TRY(describe_target(job, to, plan, err));
    FSDP_TRY(fsdp_foreign_set_memory(job->from, job->opts->memory, to, err));
    fsdp_export_divide_memory(job);
    FSDP_TRY(announce_reading(job, err));
    plan->bytes_spooled = fsdp_foreign_spool_bytes(job->from);
    FSDP_TRY(count_work(job, plan, err));
    fsdp_planned planned = plan_of(job, to);
    FSDP_TRY(fsdp_plan_identify(&planned, job->hash, err));
    FSDP_TRY(check_target(job, to, err));
    return check_space(job, to, plan, err);
}

/* --- the calls -------------------------------------------------------------------------------- */

fsdp_status fsdp_export_plan(const char *from, const char *to, const fsdp_convert_opts *opts,
                             fsdp_convert_plan *plan_out, fsdp_error *err)
{
    export_job job;
    *plan_out = (fsdp_convert_plan){.free_bytes = -1};
    FSDP_TRY(fsdp_export_job_init(opts, &job, err));
    fsdp_status st = fsdp_export_prepare(&job, from, to, plan_out, err);
    fsdp_export_job_release(&job, NULL);
    return st;
}

static fsdp_status add_text(export_job *job, const char *to, const fsdp_convert_plan *plan,
                            fsdp_text *text, fsdp_error *err)
{
    fsdp_planned planned = plan_of(job, to);
    fsdp_target_opts opts = fsdp_export_target_opts(job);
    FSDP_TRY(fsdp_plan_head(&planned, text, job->hash, err));
    FSDP_TRY(fsdp_plan_add_target(&planned, plan, job->format, &opts, text, err));
    return fsdp_plan_close(text, err);
}

fsdp_status fsdp_export_plan_text(const char *from, const char *to, const fsdp_convert_opts *opts,
                                  const char *path, fsdp_text *text, fsdp_error *err)
{
    export_job job;
    fsdp_convert_plan plan = {.free_bytes = -1};
    FSDP_TRY(fsdp_export_job_init(opts, &job, err));
    fsdp_status st = fsdp_export_prepare(&job, from, to, &plan, err);
    if (st == FSDP_OK)
        st = fsdp_plan_check_path(job.from, to, path, err);
    if (st == FSDP_OK)
        st = add_text(&job, to, &plan, text, err);
    fsdp_convert_plan_release(&plan);
    fsdp_export_job_release(&job, NULL);
    return st;
}
