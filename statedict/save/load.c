/*
 * Loading: step 3 of docs/flow_load.md. Find the checkpoint, match names, see which files are
 * needed, let workers bring every wanted block once, agree. The mirror is save.c.
 */
#include "statedict/run/candidates.h"
#include "statedict/checkpoint/checkpoint_internal.h"
#include "statedict/ctl/ctl_backend.h"
#include "statedict/sd/describe.h"
#include "statedict/save/load_internal.h"
#include "statedict/save/save_internal.h"
#include "statedict/sd/names.h"
#include "statedict/select/selection.h"
#include "statedict/run/run_internal.h"

#include "base/data/flow.h"
#include "base/core/pool.h"

#include <fsdp/filter.h>
#include <string.h>

#include "base/core/given.h"

typedef struct load_job {
    fsdp_sd *sd; /* of the caller, or of hooks->make_sd */
    const fsdp_load_hooks *hooks;
    fsdp_ctl *ctl;
    const fsdp_load_opts *opts;
    fsdp_io *io;
    fsdp_checkpoint *checkpoint; /* shared by ranks that share memory: rank 0 owns it */
    bool owns_checkpoint;
    int64_t *source; /* per entry of sd: entry of the checkpoint, -1: not loaded */
    /* The ranks whose memory this process fills together: all threads of a group, or one rank. */
    const fsdp_sd **group_sds;
    const fsdp_read_device **group_devices; /* of the hooks of each; NULL: none */
    int *group_ranks;
    int group_size;
    atomic_llong *next_block; /* of rank 0 when ranks share memory, else first_block */
    atomic_llong first_block;
    fsdp_meter meter;
    atomic_llong bytes_read;
} load_job;

static const fsdp_read_device *device_of(const load_job *job)
{
    return job->hooks ? job->hooks->device : NULL;
}

/* --- matching names --------------------------------------------------------------------------- */

static fsdp_status match_tensor(const load_job *job, const fsdp_entry *wanted,
                                const fsdp_entry *stored, fsdp_error *err)
{
    char name[160];
    fsdp_printable(wanted->name, wanted->name_size, name, sizeof name);
    if (stored->kind != FSDP_ENTRY_TENSOR)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' is a tensor here and a value in '%s'", name,
                         job->checkpoint->path);
    if (wanted->ndim != stored->ndim ||
        memcmp(wanted->shape, stored->shape, (size_t)wanted->ndim * sizeof(int64_t)) != 0) {
        char here[200], there[200];
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' has shape %s here and %s in '%s'", name,
                         fsdp_tensor_shape_text(wanted, here, sizeof here),
                         fsdp_tensor_shape_text(stored, there, sizeof there),
                         job->checkpoint->path);
    }
    if (wanted->dtype == stored->dtype)
        return FSDP_OK;
    bool castable = fsdp_dtype_describe(wanted->dtype)->is_float &&
                    fsdp_dtype_describe(stored->dtype)->is_float;
    if (job->opts->cast && castable)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' is %s here and %s in '%s'%s", name,
                     fsdp_dtype_name(wanted->dtype), fsdp_dtype_name(stored->dtype),
                     job->checkpoint->path, castable ? "; enable casting to load it" : "");
}

static fsdp_status match_entry(load_job *job, size_t i, bool *found, fsdp_error *err)
{
    const fsdp_sd *stored_sd = job->checkpoint->manifest.sd;
    const fsdp_entry *wanted = fsdp_sd_at(job->sd, i);
    int64_t at = fsdp_sd_find(stored_sd, wanted->name, wanted->name_size);
    *found = at >= 0;
    if (at < 0)
        return FSDP_OK;
    const fsdp_entry *stored = fsdp_sd_at(stored_sd, (size_t)at);
    if (stored->kind == FSDP_ENTRY_ALIAS) {
        at = (int64_t)stored->target;
        stored = fsdp_sd_at(stored_sd, stored->target);
    }
    if (wanted->kind == FSDP_ENTRY_ALIAS)
        return FSDP_OK;
    job->source[i] = at;
    if (wanted->kind == FSDP_ENTRY_TENSOR)
        return match_tensor(job, wanted, stored, err);
    if (stored->kind != FSDP_ENTRY_VALUE) {
        char name[160];
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' is a value here and a tensor in '%s'",
                         fsdp_printable(wanted->name, wanted->name_size, name, sizeof name),
                         job->checkpoint->path);
    }
    return FSDP_OK;
}

static void notice_names(const fsdp_watch *watch, const fsdp_name_list *names, const char *what)
{
    for (size_t i = 0; i < names->count; i++)
        fsdp_notice(watch, "%s: '%s'", what, names->items[i]);
}

/* The text of an error has capacity for a few names; the report and the notices have all of them. */
static void point_at_names(const fsdp_load_opts *opts, fsdp_text *text)
{
    if (opts->report && opts->watch.notice)
        fsdp_text_addf(text, "; each name is in the load's report and was a notice");
    else if (opts->report)
        fsdp_text_addf(text, "; each name is in the load's report");
    else if (opts->watch.notice)
        fsdp_text_addf(text, "; each name was a notice");
    else
        fsdp_text_addf(text, "; a report or a notice function gets each name");
}

static fsdp_status strict_failure(const load_job *job, const fsdp_name_list *missing,
                                  const fsdp_name_list *unexpected, fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_text_addf(&text, "'%s' does not match the state dict", job->checkpoint->path);
    bool all = fsdp_names_append(missing, "missing", &text);
    all = fsdp_names_append(unexpected, "unexpected", &text) && all;
    if (!all)
        point_at_names(job->opts, &text);
    if (!all && fsdp_ctl_rank(job->ctl) == 0) {
        notice_names(&job->opts->watch, missing, "missing");
        notice_names(&job->opts->watch, unexpected, "unexpected");
    }
    fsdp_status st = text.failed ? fsdp_fail_memory(err, "a list of names")
                                 : fsdp_fail(err, FSDP_ERR_USAGE, "%s", text.data);
    fsdp_text_release(&text);
    return st;
}

static fsdp_status match_names(load_job *job, const fsdp_filter *filter, fsdp_name_list *missing,
                               fsdp_name_list *unexpected, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_count(job->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(job->sd, i);
        bool found = true;
        job->source[i] = -1;
        if (!fsdp_filter_selects(filter, entry->name, entry->name_size))
            continue;
        FSDP_TRY(match_entry(job, i, &found, err));
        if (!found && !fsdp_names_add(missing, entry->name, entry->name_size))
            return fsdp_fail_memory(err, "a list of names");
    }
    const fsdp_sd *stored = job->checkpoint->manifest.sd;
    for (size_t i = 0; i < fsdp_sd_count(stored); i++) {
        const fsdp_entry *entry = fsdp_sd_at(stored, i);
        if (fsdp_filter_selects(filter, entry->name, entry->name_size) &&
            fsdp_sd_find(job->sd, entry->name, entry->name_size) < 0 &&
            !fsdp_names_add(unexpected, entry->name, entry->name_size))
            return fsdp_fail_memory(err, "a list of names");
    }
    return FSDP_OK;
}

/* Moves the lists to the report, if the caller gave one. */
static void report_names(const load_job *job, fsdp_name_list *missing, fsdp_name_list *unexpected)
{
    fsdp_load_report *report = job->opts->report;
    if (report) {
        fsdp_names_move(missing, &report->missing, &report->missing_count);
        fsdp_names_move(unexpected, &report->unexpected, &report->unexpected_count);
    }
    fsdp_names_release(missing);
    fsdp_names_release(unexpected);
}

static fsdp_status match(load_job *job, fsdp_error *err)
{
    fsdp_filter *filter = NULL;
    fsdp_name_list missing = {0}, unexpected = {0};
    fsdp_status st = fsdp_filter_create(job->opts->include, job->opts->exclude, &filter, err);
    if (st == FSDP_OK)
        st = match_names(job, filter, &missing, &unexpected, err);
    if (st == FSDP_OK && !job->opts->partial && missing.count + unexpected.count > 0)
        st = strict_failure(job, &missing, &unexpected, err);
    report_names(job, &missing, &unexpected);
    fsdp_filter_free(filter);
    return st;
}

/* --- planning --------------------------------------------------------------------------------- */

/* The read targets of all ranks of the group in one entry. */
typedef struct target_list {
    fsdp_read_target *items;
    size_t count, capacity;
} target_list;

static fsdp_status add_targets(target_list *targets, const fsdp_entry *entry, int rank,
                               const fsdp_read_device *device, fsdp_error *err)
{
    char *data = entry->data;
    size_t parts = fsdp_layout_box_count(&entry->layout, entry->ndim, entry->shape, rank);
    if (!fsdp_grow(&targets->items, &targets->capacity, targets->count + parts,
                   sizeof *targets->items))
        return fsdp_fail_memory(err, "a list of boxes");
    for (size_t part = 0; part < parts; part++) {
        fsdp_read_target *target = &targets->items[targets->count];
        fsdp_layout_box_at(&entry->layout, entry->ndim, entry->shape, rank, part, &target->box);
        fsdp_flow_box("statedict/save/load.c", "want", entry->name, entry->name_size, &target->box);
        target->dtype = entry->dtype;
        target->data = data;
        target->device = device && device->holds(device->context, data) ? device : NULL;
        if (!data) {
            char name[160];
            return fsdp_fail(err, FSDP_ERR_USAGE, "tensor '%s' has no memory on rank %d",
                             fsdp_printable(entry->name, entry->name_size, name, sizeof name),
                             rank);
        }
        data += fsdp_box_count(&target->box) * (int64_t)fsdp_dtype_size(entry->dtype);
        targets->count++;
    }
    return FSDP_OK;
}

static fsdp_status group_targets(const load_job *job, size_t i, target_list *targets,
                                 fsdp_error *err)
{
    targets->count = 0;
    for (int g = 0; g < job->group_size; g++)
        FSDP_TRY(add_targets(targets, fsdp_sd_at(job->group_sds[g], i), job->group_ranks[g],
                             job->group_devices[g], err));
    return FSDP_OK;
}

static bool is_loaded(const load_job *job, size_t i)
{
    return job->source[i] >= 0 && fsdp_sd_at(job->sd, i)->kind == FSDP_ENTRY_TENSOR;
}

static fsdp_status need_file(void *context, int number, fsdp_error *err)
{
    return fsdp_checkpoint_need_file(context, number, err);
}

/* Opens the files that hold a part of what one rank reads. */
static fsdp_status open_files_of(const load_job *job, const fsdp_sd *sd, int rank, fsdp_error *err)
{
    fsdp_checkpoint *from = job->checkpoint;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        if (!is_loaded(job, i))
            continue;
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        size_t parts = fsdp_layout_box_count(&entry->layout, entry->ndim, entry->shape, rank);
        for (size_t part = 0; part < parts; part++) {
            fsdp_box box;
            fsdp_layout_box_at(&entry->layout, entry->ndim, entry->shape, rank, part, &box);
            FSDP_TRY(
                fsdp_checkpoint_locate(from, (size_t)job->source[i], &box, need_file, from, err));
        }
    }
    return FSDP_OK;
}

static fsdp_status open_files(load_job *job, fsdp_error *err)
{
    fsdp_status st = FSDP_OK;
    for (int g = 0; g < job->group_size && st == FSDP_OK; g++)
        st = open_files_of(job, job->group_sds[g], job->group_ranks[g], err);
    return st;
}

/* --- moving ----------------------------------------------------------------------------------- */

static fsdp_status load_entries(load_job *job, target_list *targets, fsdp_reader *reader,
                                fsdp_work_counter *counter, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_count(job->sd); i++) {
        if (!is_loaded(job, i))
            continue;
        FSDP_TRY(fsdp_ctl_check_access(job->ctl, err));
        const fsdp_entry *entry = fsdp_sd_at(job->sd, i);
        int64_t before = fsdp_reader_bytes(reader);
        FSDP_TRY(group_targets(job, i, targets, err));
        fsdp_read_request request = {(size_t)job->source[i], targets->items, targets->count, reader,
                                     counter};
        FSDP_TRY(fsdp_checkpoint_get(job->checkpoint, &request, err));
        fsdp_flow("statedict/save/load.c", "got '%s'", entry->name);
        FSDP_TRY(fsdp_meter_add(&job->meter, fsdp_reader_bytes(reader) - before, entry->name,
                                entry->name_size, err));
    }
    return FSDP_OK;
}

static fsdp_status load_worker(void *context, size_t worker, fsdp_error *err)
{
    load_job *job = context;
    target_list targets = {0};
    fsdp_reader reader = {.blocks.check = job->opts->check};
    fsdp_work_counter counter;
    (void)worker;
    fsdp_work_counter_begin(&counter, job->next_block);
    fsdp_status st = load_entries(job, &targets, &reader, &counter, err);
    if (st == FSDP_OK)
        st = fsdp_read_slots_finish(&reader.slots, err);
    if (st != FSDP_OK)
        fsdp_work_counter_stop(&counter);
    atomic_fetch_add(&job->bytes_read, fsdp_reader_bytes(&reader));
    fsdp_reader_release(&reader);
    fsdp_free(targets.items);
    return st;
}

/* A worker that fills a device's memory has slots, too. */
static int workers_of(const load_job *job)
{
    bool is_encoded = job->checkpoint->manifest.compressed;
    int share = fsdp_pool_cores() / job->group_size;
    int wanted = job->opts->threads > 0 ? job->opts->threads : share > 0 ? share : 1;
    int64_t memory = job->opts->memory > 0 ? job->opts->memory : FSDP_MEMORY_DEFAULT;
    int64_t most = memory / (fsdp_block_reader_bytes(is_encoded) + FSDP_READ_SLOTS_BYTES);
    if (device_of(job) && wanted > most)
        wanted = most > 1 ? (int)most : 1;
    return fsdp_block_readers_within(wanted, memory, is_encoded);
}

static fsdp_status copy_values(load_job *job, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_count(job->sd); i++) {
        if (job->source[i] < 0 || fsdp_sd_at(job->sd, i)->kind != FSDP_ENTRY_VALUE)
            continue;
        fsdp_value value = {0};
        FSDP_TRY(fsdp_value_copy(
            &fsdp_sd_at(job->checkpoint->manifest.sd, (size_t)job->source[i])->value, &value, err));
        fsdp_sd_set_value(job->sd, i, &value);
    }
    return FSDP_OK;
}

static int64_t bytes_of_rank(const load_job *job, int rank)
{
    int64_t bytes = 0;
    for (size_t i = 0; i < fsdp_sd_count(job->sd); i++)
        if (is_loaded(job, i))
            bytes += fsdp_entry_local_bytes(fsdp_sd_at(job->sd, i), rank);
    return bytes;
}

/* A rank of a group reads about its share of what the group needs. */
static int64_t expected_bytes(const load_job *job)
{
    int64_t bytes = 0;
    for (int g = 0; g < job->group_size; g++)
        bytes += bytes_of_rank(job, job->group_ranks[g]);
    return bytes / job->group_size;
}

/* --- the group -------------------------------------------------------------------------------- */

typedef struct group_member {
    const fsdp_sd *sd;
    const fsdp_read_device *device;
    atomic_llong *next_block;
    fsdp_checkpoint *checkpoint;
} group_member;

/*
 * Ranks with one address space give each other the addresses of their memory; rank 0's checkpoint
 * and block counter serve all. Other ranks may have the addresses even when this round fails here.
 */
static fsdp_status group_together(load_job *job, fsdp_status mine, group_member *members,
                                  fsdp_error *err)
{
    group_member local = {job->sd, device_of(job), job->next_block, job->checkpoint};
    FSDP_TRY(fsdp_ctl_agree_allgather(job->ctl, mine, &local, sizeof local, members, err));
    job->next_block = members[0].next_block;
    job->group_size = fsdp_ctl_size(job->ctl);
    for (int g = 0; g < job->group_size; g++) {
        job->group_sds[g] = members[g].sd;
        job->group_devices[g] = members[g].device;
        job->group_ranks[g] = g;
    }
    job->checkpoint = members[0].checkpoint;
    return FSDP_OK;
}

static bool shares_memory(const load_job *job)
{
    return fsdp_ctl_shares_memory(job->ctl) && fsdp_ctl_size(job->ctl) > 1;
}

static fsdp_status allocate_group(load_job *job, group_member **members_out, fsdp_error *err)
{
    size_t n = (size_t)fsdp_ctl_size(job->ctl);
    job->group_sds = fsdp_alloc(n, sizeof *job->group_sds);
    job->group_devices = fsdp_alloc(n, sizeof *job->group_devices);
    job->group_ranks = fsdp_alloc(n, sizeof *job->group_ranks);
    *members_out = fsdp_alloc(n, sizeof **members_out);
    return job->group_sds && job->group_devices && job->group_ranks && *members_out
               ? FSDP_OK
               : fsdp_fail_memory(err, "a group of ranks");
}

static fsdp_status form_group(load_job *job, fsdp_error *err)
{
    group_member *members;
    fsdp_status st = allocate_group(job, &members, err);
    if (shares_memory(job)) {
        st = group_together(job, st, members, err);
    } else {
        st = fsdp_ctl_agree(job->ctl, st, err);
        if (st == FSDP_OK) {
            job->group_size = 1;
            job->group_sds[0] = job->sd;
            job->group_devices[0] = device_of(job);
            job->group_ranks[0] = fsdp_ctl_rank(job->ctl);
        }
    }
    fsdp_free(members);
    return st;
}

/* --- one checkpoint --------------------------------------------------------------------------- */

static fsdp_status open_checkpoint(load_job *job, const fsdp_candidate *chosen, fsdp_error *err)
{
    fsdp_status st = FSDP_OK;
    fsdp_flow("statedict/save/load.c", "open '%s'", chosen->path);
    if (!shares_memory(job) || fsdp_ctl_rank(job->ctl) == 0) {
        st = fsdp_checkpoint_open_manifest(job->io, chosen->path, &job->checkpoint, err);
        job->owns_checkpoint = true;
        if (st == FSDP_OK)
            st = fsdp_candidate_check_step(chosen, job->checkpoint->manifest.step, err);
    }
    return fsdp_ctl_agree(job->ctl, st, err);
}

static fsdp_status match_and_open(load_job *job, fsdp_error *err)
{
    FSDP_TRY(fsdp_ctl_begin_access(job->ctl, err));
    fsdp_status st = match(job, err);
    if (st == FSDP_OK && job->owns_checkpoint)
        st = open_files(job, err);
    fsdp_ctl_end_access(job->ctl);
    return st;
}

/* In the memory of rank 0 that is the checkpoint, too: it must not go meanwhile. */
static fsdp_status call_make_sd(load_job *job, fsdp_error *err)
{
    FSDP_TRY(fsdp_ctl_begin_access(job->ctl, err));
    fsdp_status st =
        job->hooks->make_sd(job->hooks->context, job->checkpoint->manifest.sd, &job->sd, err);
    fsdp_ctl_end_access(job->ctl);
    return st;
}

static fsdp_status make_sd(load_job *job, fsdp_error *err)
{
    fsdp_status st = call_make_sd(job, err);
    FSDP_TRY(fsdp_describe_agree(job->sd, false, job->ctl, st, err));
    job->group_sds[0] = job->sd;
    if (job->group_size == 1)
        return FSDP_OK;
    return fsdp_ctl_allgather(job->ctl, &job->sd, sizeof job->sd, job->group_sds, err);
}

static fsdp_status take(load_job *job, fsdp_error *err)
{
    fsdp_status st = fsdp_ctl_begin_access(job->ctl, err);
    if (st == FSDP_OK) {
        st = job->hooks->take(job->hooks->context, &job->checkpoint->info, err);
        fsdp_ctl_end_access(job->ctl);
    }
    return fsdp_ctl_agree(job->ctl, st, err);
}

static fsdp_status plan_load(load_job *job, fsdp_error *err)
{
    fsdp_flow("statedict/save/load.c", "match names and find files");
    job->source = fsdp_alloc(fsdp_sd_count(job->sd), sizeof *job->source);
    fsdp_status st = job->source ? match_and_open(job, err) : fsdp_fail_memory(err, "a load plan");
    return fsdp_ctl_agree(job->ctl, st, err);
}

static fsdp_status fill_tensors(load_job *job, fsdp_error *err)
{
    FSDP_TRY(fsdp_ctl_begin_access(job->ctl, err));
    int workers = workers_of(job);
    fsdp_status st = fsdp_parallel(workers, (size_t)workers, load_worker, job, err);
    if (st == FSDP_OK)
        st = copy_values(job, err);
    fsdp_ctl_end_access(job->ctl);
    return st;
}

static fsdp_status move_data(load_job *job, fsdp_error *err)
{
    fsdp_meter_init(&job->meter, &job->opts->watch, expected_bytes(job));
    fsdp_meter_join(&job->meter, job->ctl);
    fsdp_status st = fill_tensors(job, err);
    return fsdp_ctl_agree(job->ctl, st, err);
}

static void release_job(load_job *job)
{
    fsdp_ctl_withdraw_memory(job->ctl);
    if (job->owns_checkpoint)
        fsdp_checkpoint_close(job->checkpoint);
    job->checkpoint = NULL;
    job->owns_checkpoint = false;
    fsdp_free(job->source);
    fsdp_free(job->group_sds);
    fsdp_free(job->group_devices);
    fsdp_free(job->group_ranks);
    job->source = NULL;
    job->group_sds = NULL;
    job->group_devices = NULL;
    job->group_ranks = NULL;
}

static fsdp_status fill_report(load_job *job, const char *path, fsdp_error *err)
{
    fsdp_load_report *report = job->opts->report;
    if (!report)
        return FSDP_OK;
    report->bytes_read = atomic_load(&job->bytes_read);
    report->bytes_needed = bytes_of_rank(job, fsdp_ctl_rank(job->ctl));
    report->path = fsdp_strndup(path, strlen(path));
    return report->path ? FSDP_OK : fsdp_fail_memory(err, "a path");
}

static fsdp_status load_checkpoint(load_job *job, const fsdp_candidate *chosen, fsdp_error *err)
{
    if (job->opts->report)
        fsdp_load_report_release(job->opts->report); /* of a checkpoint that was skipped */
    atomic_store(&job->bytes_read, 0);
    atomic_store(&job->first_block, 0);
    job->next_block = &job->first_block;
    fsdp_status st = open_checkpoint(job, chosen, err);
    if (st == FSDP_OK)
        st = form_group(job, err);
    if (st == FSDP_OK && job->hooks)
        st = make_sd(job, err);
    if (st == FSDP_OK)
        st = plan_load(job, err);
    if (st == FSDP_OK)
        st = move_data(job, err);
    if (st == FSDP_OK && job->hooks)
        st = take(job, err);
    if (st == FSDP_OK)
        st = fill_report(job, chosen->path, err);
    release_job(job);
    return st;
}

/* --- choosing the checkpoint ------------------------------------------------------------------ */

/* Rank 0 chooses for all. */
static fsdp_status choose(load_job *job, fsdp_status listed, fsdp_candidates *list,
                          fsdp_candidate *chosen, fsdp_error *err)
{
    fsdp_status st = listed;
    if (st == FSDP_OK && fsdp_ctl_rank(job->ctl) == 0)
        st = fsdp_candidates_next(list, chosen, err);
    return fsdp_ctl_agree_broadcast(job->ctl, st, 0, chosen, sizeof *chosen, err);
}

/* Collective. A step of a version to come is not passed over for an older one. */
static fsdp_status refuse_newer(const load_job *job, const fsdp_candidates *list,
                                const fsdp_candidate *failed, fsdp_error *err)
{
    fsdp_status st = FSDP_OK;
    if (fsdp_ctl_rank(job->ctl) == 0)
        st = fsdp_candidate_refuse_newer(list, failed, job->io, err);
    return fsdp_ctl_agree(job->ctl, st, err);
}

/* Tries the candidates in turn; a damaged one is named and the next older one is taken. */
static fsdp_status load_candidates(load_job *job, fsdp_status listed, fsdp_candidates *list,
                                   fsdp_error *err)
{
    fsdp_candidate chosen = {0};
    for (;;) {
        FSDP_TRY(choose(job, listed, list, &chosen, err));
        fsdp_status st = load_checkpoint(job, &chosen, err);
        if (!fsdp_run_may_skip(st, err))
            return st;
        FSDP_TRY(refuse_newer(job, list, &chosen, err));
        if (chosen.is_last)
            return st;
        if (fsdp_ctl_rank(job->ctl) == 0)
            fsdp_notice(&job->opts->watch, "skipped: %s", err->text);
    }
}

/* With hooks, the state dict is compared later, once hooks->make_sd has made it. */
static fsdp_status agree_to_load(load_job *job, const char *path, fsdp_error *err)
{
    fsdp_status st = fsdp_check_budget(job->opts->threads, job->opts->memory, err);
    if (st == FSDP_OK && !path)
        st = fsdp_fail(err, FSDP_ERR_USAGE, "fsdp_sd_load: 'path' is NULL");
    FSDP_TRY(fsdp_agree_path(job->ctl, path, st, err));
    if (job->hooks)
        return FSDP_OK;
    st = fsdp_filter_require(job->sd, job->opts->include, job->opts->exclude, err);
    return fsdp_describe_agree(job->sd, false, job->ctl, st, err);
}

static fsdp_status load(load_job *job, const char *path, fsdp_error *err)
{
    fsdp_candidates list = {0};
    fsdp_flow("statedict/save/load.c", "begin: rank %d of %d", fsdp_ctl_rank(job->ctl),
              fsdp_ctl_size(job->ctl));
    FSDP_TRY(agree_to_load(job, path, err));
    fsdp_status st = FSDP_OK;
    if (fsdp_ctl_rank(job->ctl) == 0)
        st = fsdp_candidates_list(path, job->io, &job->opts->watch, &list, err);
    st = load_candidates(job, st, &list, err);
    fsdp_candidates_release(&list);
    return st;
}

static fsdp_status run(load_job *job, const char *path, const fsdp_load_opts *opts, fsdp_error *err)
{
    static const fsdp_load_opts defaults = {0};
    fsdp_error local = {0};
    job->opts = opts ? opts : &defaults;
    job->io = fsdp_access_io(&job->opts->access);
    if (job->opts->report)
        *job->opts->report = (fsdp_load_report){0};
    fsdp_status st = load(job, path, err ? err : &local);
    if (st == FSDP_OK && err)
        *err = (fsdp_error){0};
    return st;
}

fsdp_status fsdp_sd_load(fsdp_sd *sd, fsdp_ctl *ctl, const char *path, const fsdp_load_opts *opts,
                         fsdp_error *err)
{
    FSDP_NEED(err, sd, ctl);
    load_job job = {.sd = sd, .ctl = ctl};
    const char *outer = fsdp_ctl_begin_public(ctl, "fsdp_sd_load");
    fsdp_status st = run(&job, path, opts, err);
    fsdp_ctl_end_public(ctl, outer);
    return st;
}

fsdp_status fsdp_load_hooked(const fsdp_load_hooks *hooks, fsdp_ctl *ctl, const char *path,
                             const fsdp_load_opts *opts, fsdp_error *err)
{
    load_job job = {.hooks = hooks, .ctl = ctl};
    return run(&job, path, opts, err);
}
