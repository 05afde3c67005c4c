/*
 * Exporting: a checkpoint is written for another program, offline and within a memory budget. See
 * export.h; into our own format it is convert.c.
 *
 *   open -> select (selection.c) -> declare every entry -> workers: take a slab, read it, hash it,
 *   write it -> finish -> read back what was written, slab by slab, and compare -> publish
 *
 * A slab is a run of the row-major order of one box, so it has one place in the target.
 */
#include "statedict/export.h"

#include "base/io_reuse.h"
#include "base/pool.h"
#include "formats/target.h"
#include "statedict/checkpoint_internal.h"
#include "statedict/commit_internal.h"
#include "statedict/export_commit.h"
#include "statedict/export_resume.h"
#include "statedict/foreign.h"
#include "statedict/plan_file.h"
#include "statedict/relayout.h"
#include "statedict/selection.h"

#include <string.h>

enum { SLAB_MOST = 16 << 20, SLAB_LEAST = 1 << 20 };

/* One box of one entry, cut into slabs. */
typedef struct export_part {
    size_t entry, box;
    int64_t first_slab;
} export_part;

typedef struct export_job {
    const fsdp_convert_opts *opts;
    fsdp_io *io;
    const fsdp_target_format *format;
    fsdp_checkpoint *from;
    fsdp_mesh *mesh;
    fsdp_sd *sd;    /* the target's description */
    size_t *source; /* per entry of it: entry of the source */
    int world, threads;
    int64_t slab_bytes;
    char hash[FSDP_PLAN_HASH]; /* of the plan */
    fsdp_target_entry *entries;
    fsdp_target_box *boxes; /* of all entries */
    fsdp_arena dims;        /* of boxes */
    size_t box_count;
    export_part *parts;
    size_t part_count;
    fsdp_hash *hashes; /* per slab */
    int64_t slab_count;
    fsdp_export_place place;
    fsdp_io
        *reuse; /* what was written by another one and is the same is not written again; or NULL */
    fsdp_target *target;
    fsdp_checkpoint *written; /* while it is read back */
    size_t *written_entry;    /* per entry: its number there */
    atomic_llong next;        /* slab to take */
    fsdp_meter meter;
} export_job;

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

/* Aliases become tensors: not every format knows them. */
static size_t tensor_of(const fsdp_sd *sd, size_t i)
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
            FSDP_TRY(each_box(job, tensor_of(job->sd, i), count_box, &job->box_count, owners, err));
    list.items = job->boxes = fsdp_alloc(job->box_count, sizeof *job->boxes);
    job->parts = fsdp_alloc(job->box_count, sizeof *job->parts);
    if (!job->boxes || !job->parts)
        return fsdp_fail_memory(err, "a conversion");
    for (size_t i = 0; i < fsdp_sd_count(job->sd); i++) {
        fsdp_target_entry *entry = &job->entries[i];
        if (fsdp_sd_at(job->sd, i)->kind == FSDP_ENTRY_VALUE)
            continue;
        size_t first = list.count;
        FSDP_TRY(each_box(job, tensor_of(job->sd, i), add_box, &list, owners, err));
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
        const fsdp_entry *tensor = fsdp_sd_at(job->sd, tensor_of(job->sd, i));
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

static fsdp_status describe_target(export_job *job, fsdp_convert_plan *plan, fsdp_error *err)
{
    fsdp_selection *selection = NULL;
    const fsdp_sd *from = job->from->manifest.sd;
    FSDP_TRY(choose_mesh(job, err));
    fsdp_status st =
        fsdp_selection_create(from, &job->opts->select, &job->format->limits, &selection, err);
    if (st == FSDP_DIFFERS)
        return fsdp_fail(err, FSDP_DIFFERS, "no name in '%s' matches", job->from->path);
    FSDP_TRY(st);
    st = fsdp_relayout(from, FSDP_SHARDED, job->mesh ? job->mesh : job->opts->mesh,
                       job->opts->shard_dim, selection, &job->sd, &job->source, err);
    fsdp_selection_tell(selection, plan);
    fsdp_selection_free(selection);
    return st == FSDP_OK ? declare_entries(job, err) : st;
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

/* --- slabs ------------------------------------------------------------------------------------ */

static void divide_memory(export_job *job)
{
    int64_t memory = job->opts->memory > 0 ? job->opts->memory : FSDP_MEMORY_DEFAULT;
    bool encoded = job->from->info.compressed;
    int most;
    int64_t apart;
    fsdp_foreign_reading_limits(job->from, &most, &apart);
    job->threads = fsdp_getters_within(job->opts->threads, memory / 2, encoded);
    most = apart / SLAB_LEAST < most ? (int)(apart / SLAB_LEAST) : most;
    job->threads = most < 1 ? 1 : most < job->threads ? most : job->threads;
    int64_t slab = (memory / 2 < apart ? memory / 2 : apart) / job->threads;
    job->slab_bytes = slab < SLAB_LEAST ? SLAB_LEAST : slab > SLAB_MOST ? SLAB_MOST : slab;
}

static int64_t slab_elements(const export_job *job, const fsdp_target_entry *entry)
{
    return job->slab_bytes / (int64_t)fsdp_dtype_size(entry->dtype);
}

static fsdp_status number_slabs(export_job *job, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_count(job->sd); i++) {
        const fsdp_target_entry *entry = &job->entries[i];
        for (size_t b = 0; b < entry->box_count; b++) {
            const int64_t *len = entry->boxes[b].len;
            fsdp_slabs slabs = {0};
            fsdp_box slab;
            job->parts[job->part_count++] = (export_part){i, b, job->slab_count};
            while (fsdp_slabs_next(&slabs, entry->ndim, len, slab_elements(job, entry), &slab))
                job->slab_count++;
        }
    }
    job->hashes = fsdp_alloc((size_t)job->slab_count, sizeof *job->hashes);
    return job->hashes ? FSDP_OK : fsdp_fail_memory(err, "a conversion");
}

/* A slab at hand. */
typedef struct export_slab {
    size_t entry, box_number;
    fsdp_box box; /* in the tensor */
    int64_t first, count;
} export_slab;

static const export_part *find_part(const export_job *job, int64_t number)
{
    size_t low = 0, high = job->part_count;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (job->parts[middle].first_slab <= number)
            low = middle;
        else
            high = middle;
    }
    return &job->parts[low];
}

static void find_slab(const export_job *job, int64_t number, export_slab *slab)
{
    const export_part *part = find_part(job, number);
    const fsdp_target_entry *entry = &job->entries[part->entry];
    const fsdp_target_box *box = &entry->boxes[part->box];
    fsdp_slabs slabs = {0};
    *slab = (export_slab){.entry = part->entry, .box_number = part->box};
    for (int64_t i = part->first_slab; i <= number; i++) {
        slab->first = slabs.next;
        fsdp_slabs_next(&slabs, entry->ndim, box->len, slab_elements(job, entry), &slab->box);
    }
    slab->count = slabs.next - slab->first;
    for (int d = 0; d < entry->ndim; d++)
        slab->box.lo[d] += box->lo[d];
}

static size_t slab_size(const export_job *job, const export_slab *slab)
{
    return (size_t)slab->count * fsdp_dtype_size(job->entries[slab->entry].dtype);
}

/* --- moving ----------------------------------------------------------------------------------- */

static fsdp_status read_slab(export_job *job, fsdp_checkpoint *checkpoint, size_t entry,
                             const export_slab *slab, char *data, fsdp_getter *getter,
                             fsdp_error *err)
{
    fsdp_want want = {slab->box, job->entries[slab->entry].dtype, data};
    return fsdp_checkpoint_get(checkpoint, tensor_of(checkpoint->manifest.sd, entry), &want, 1,
                               getter, NULL, err);
}

static fsdp_export_piece piece_of(const export_job *job, int64_t number, const export_slab *slab)
{
    return (fsdp_export_piece){.target = job->target,
                               .number = number,
                               .entry = slab->entry,
                               .box = slab->box_number,
                               .first = slab->first,
                               .size = slab_size(job, slab),
                               .element_size = fsdp_dtype_size(job->entries[slab->entry].dtype)};
}

static fsdp_status move_slab(export_job *job, int64_t number, char *data, fsdp_getter *getter,
                             fsdp_error *err)
{
    export_slab slab;
    find_slab(job, number, &slab);
    const fsdp_target_entry *entry = &job->entries[slab.entry];
    fsdp_export_piece piece = piece_of(job, number, &slab);
    bool is_there = fsdp_export_is_there(&job->place, &piece, data, &job->hashes[number]);
    if (!is_there)
        FSDP_TRY(read_slab(job, job->from, job->source[slab.entry], &slab, data, getter, err));
    if (!is_there && !job->opts->no_verify)
        job->hashes[number] = fsdp_kernels_get()->hash(data, piece.size);
    FSDP_TRY(job->format->ops->write(job->target, slab.entry, slab.box_number, slab.first,
                                     slab.count, data, err));
    if (!is_there && !job->opts->no_verify)
        fsdp_export_note(&job->place, &piece, &job->hashes[number]);
    return fsdp_meter_add(&job->meter, (int64_t)slab_size(job, &slab), entry->name,
                          entry->name_size, err);
}

static fsdp_status check_slab(export_job *job, int64_t number, char *data, fsdp_getter *getter,
                              fsdp_error *err)
{
    export_slab slab;
    find_slab(job, number, &slab);
    const fsdp_target_entry *entry = &job->entries[slab.entry];
    FSDP_TRY(
        read_slab(job, job->written, job->written_entry[slab.entry], &slab, data, getter, err));
    fsdp_hash hash = fsdp_kernels_get()->hash(data, slab_size(job, &slab));
    if (memcmp(&hash, &job->hashes[number], sizeof hash) != 0) {
        char name[160];
        return fsdp_fail(
            err, FSDP_ERR_IO, "what was written to '%s' does not come back the same: tensor '%s'",
            job->place.path, fsdp_printable(entry->name, entry->name_size, name, sizeof name));
    }
    return fsdp_meter_add(&job->meter, (int64_t)slab_size(job, &slab), entry->name,
                          entry->name_size, err);
}

static fsdp_status work(void *user, size_t worker, fsdp_error *err)
{
    export_job *job = user;
    fsdp_getter getter = {0};
    char *data = fsdp_alloc_pages((size_t)job->slab_bytes);
    fsdp_status st = data ? FSDP_OK : fsdp_fail_memory(err, "a slab of a tensor");
    (void)worker;
    for (int64_t i; st == FSDP_OK && (i = atomic_fetch_add(&job->next, 1)) < job->slab_count;)
        st = job->written ? check_slab(job, i, data, &getter, err)
                          : move_slab(job, i, data, &getter, err);
    if (st != FSDP_OK)
        atomic_store(&job->next, job->slab_count);
    fsdp_getter_release(&getter);
    fsdp_free(data);
    return st;
}

static fsdp_status work_on_all(export_job *job, fsdp_error *err)
{
    atomic_store(&job->next, 0);
    return fsdp_parallel(job->threads, (size_t)job->threads, work, job, err);
}

/* --- reading back ----------------------------------------------------------------------------- */

static fsdp_status fail_differs(const export_job *job, size_t i, const char *what, fsdp_error *err)
{
    char name[160];
    const fsdp_target_entry *entry = &job->entries[i];
    return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' was written to '%s' %s",
                     fsdp_printable(entry->name, entry->name_size, name, sizeof name),
                     job->place.path, what);
}

/* A dict may come back as names of its own. */
static bool may_spread(const fsdp_value *value)
{
    if (value->kind == FSDP_VALUE_DICT)
        return true;
    for (size_t i = 0; value->kind == FSDP_VALUE_LIST && i < value->as.list.count; i++)
        if (may_spread(&value->as.list.items[i]))
            return true;
    return false;
}

static fsdp_status pair_entry(export_job *job, size_t i, fsdp_error *err)
{
    const fsdp_target_entry *entry = &job->entries[i];
    const fsdp_sd *sd = job->written->manifest.sd;
    int64_t found = fsdp_sd_find(sd, entry->name, entry->name_size);
    if (found < 0 && entry->value && may_spread(entry->value))
        return FSDP_OK;
    if (found < 0)
        return fail_differs(job, i, "and is not found there", err);
    const fsdp_entry *back = fsdp_sd_at(sd, (size_t)found);
    job->written_entry[i] = (size_t)found;
    if ((back->kind == FSDP_ENTRY_VALUE) != (entry->value != NULL))
        return fail_differs(job, i, "and comes back as another thing", err);
    if (entry->value)
        return FSDP_OK;
    if (back->dtype != entry->dtype || back->ndim != entry->ndim ||
        memcmp(back->shape, entry->shape, (size_t)entry->ndim * sizeof *entry->shape) != 0)
        return fail_differs(job, i, "and comes back in another type or shape", err);
    return FSDP_OK;
}

static fsdp_status read_back(export_job *job, fsdp_error *err)
{
    size_t count = fsdp_sd_count(job->sd);
    FSDP_TRY(fsdp_checkpoint_open(job->place.path, job->io, &job->written, err));
    job->written_entry = fsdp_alloc(count, sizeof *job->written_entry);
    if (!job->written_entry)
        return fsdp_fail_memory(err, "a conversion");
    for (size_t i = 0; i < count; i++)
        FSDP_TRY(pair_entry(job, i, err));
    return work_on_all(job, err);
}

/* --- the calls -------------------------------------------------------------------------------- */

static fsdp_target_opts target_opts(const export_job *job)
{
    return (fsdp_target_opts){.io = job->reuse ? job->reuse : job->io,
                              .path = job->place.path,
                              .entries = job->entries,
                              .entry_count = fsdp_sd_count(job->sd),
                              .world = job->world,
                              .max_file_bytes = job->opts->max_shard_bytes,
                              .sync = !job->opts->no_sync};
}

static fsdp_status count_work(export_job *job, fsdp_convert_plan *plan, fsdp_error *err)
{
    fsdp_target_opts opts = target_opts(job);
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
            plan->bytes_read += fsdp_box_count(&box) * (int64_t)fsdp_dtype_size(entry->dtype);
        }
    }
    FSDP_TRY(job->format->ops->measure(&opts, &files, &plan->bytes_written, err));
    plan->files = (int)files;
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

static fsdp_planned plan_of(const export_job *job, const char *to)
{
    return (fsdp_planned){
        .from = job->from, .to = to, .opts = job->opts, .sd = job->sd, .source = job->source};
}

static fsdp_status plan_all(export_job *job, const char *from, const char *to,
                            fsdp_convert_plan *plan, fsdp_error *err)
{
    FSDP_TRY(fsdp_checkpoint_open(from, job->io, &job->from, err));
    FSDP_TRY(fsdp_foreign_carry_values(job->from, err));
    FSDP_TRY(describe_target(job, plan, err));
    FSDP_TRY(fsdp_foreign_set_memory(job->from, job->opts->memory, to, err));
    divide_memory(job);
    FSDP_TRY(announce_reading(job, err));
    plan->bytes_spooled = fsdp_foreign_spool_bytes(job->from);
    FSDP_TRY(count_work(job, plan, err));
    fsdp_planned planned = plan_of(job, to);
    FSDP_TRY(fsdp_plan_identify(&planned, job->hash, err));
    FSDP_TRY(check_target(job, to, err));
    return check_space(job, to, plan, err);
}

static fsdp_status add_text(export_job *job, const char *to, const fsdp_convert_plan *plan,
                            fsdp_text *text, fsdp_error *err)
{
    fsdp_planned planned = plan_of(job, to);
    fsdp_target_opts opts = target_opts(job);
    FSDP_TRY(fsdp_plan_head(&planned, text, job->hash, err));
    FSDP_TRY(fsdp_plan_add_target(&planned, plan, job->format, &opts, text, err));
    return fsdp_plan_close(text, err);
}

static fsdp_status begin(export_job *job, const char *to, fsdp_error *err)
{
    const fsdp_convert_opts *opts = job->opts;
    job->place.hash = job->hash;
    job->place.resume = opts->resume;
    job->place.unit = job->slab_bytes;
    FSDP_TRY(fsdp_export_begin(&job->place, to, err));
    if (opts->resume) {
        fsdp_resume_tell(&opts->watch, job->place.is_taken_up ? job->place.staging : NULL);
        fsdp_export_agree_on_slabs(&job->place, SLAB_LEAST, &job->slab_bytes);
        FSDP_TRY(fsdp_io_reuse_create(job->io, &job->reuse, err));
    }
    return number_slabs(job, err);
}

static fsdp_status write_target(export_job *job, const char *to, fsdp_error *err)
{
    if (!job->opts->no_verify)
        FSDP_TRY(fsdp_checkpoint_check(job->from, job->threads, err));
    FSDP_TRY(begin(job, to, err));
    fsdp_target_opts opts = target_opts(job);
    FSDP_TRY(job->format->ops->create(&opts, &job->target, err));
    fsdp_status st = work_on_all(job, err);
    fsdp_target *target = job->target;
    job->target = NULL;
    if (st == FSDP_OK)
        return job->format->ops->finish(target, err);
    job->format->ops->discard(target);
    return st;
}

static void release_job(export_job *job)
{
    fsdp_checkpoint_close(job->written);
    fsdp_export_end(&job->place);
    fsdp_free(job->written_entry);
    fsdp_free(job->hashes);
    fsdp_free(job->parts);
    fsdp_free(job->boxes);
    fsdp_arena_release(&job->dims);
    fsdp_free(job->entries);
    fsdp_free(job->source);
    fsdp_sd_free(job->sd);
    fsdp_mesh_free(job->mesh);
    fsdp_checkpoint_close(job->from);
    fsdp_io_reuse_free(job->reuse);
}

static fsdp_status new_job(const fsdp_convert_opts *opts, export_job *job, fsdp_error *err)
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

fsdp_status fsdp_export(const char *from, const char *to, const fsdp_convert_opts *opts,
                        fsdp_error *err)
{
    export_job job;
    fsdp_convert_plan plan = {.free_bytes = -1};
    FSDP_TRY(new_job(opts, &job, err));
    fsdp_status st = plan_all(&job, from, to, &plan, err);
    fsdp_meter_init(&job.meter, &opts->watch,
                    opts->no_verify ? plan.bytes_read : 2 * plan.bytes_read);
    if (st == FSDP_OK)
        st = write_target(&job, to, err);
    if (st == FSDP_OK && !opts->no_verify)
        st = read_back(&job, err);
    if (st == FSDP_OK && job.place.is_taken_up)
        fsdp_resume_tell_kept(&opts->watch, fsdp_io_reuse_kept(job.reuse));
    if (st == FSDP_OK)
        st = fsdp_export_publish(&job.place, err);
    release_job(&job);
    return st;
}

fsdp_status fsdp_export_plan(const char *from, const char *to, const fsdp_convert_opts *opts,
                             fsdp_convert_plan *plan_out, fsdp_error *err)
{
    export_job job;
    *plan_out = (fsdp_convert_plan){.free_bytes = -1};
    FSDP_TRY(new_job(opts, &job, err));
    fsdp_status st = plan_all(&job, from, to, plan_out, err);
    release_job(&job);
    return st;
}

fsdp_status fsdp_export_plan_text(const char *from, const char *to, const fsdp_convert_opts *opts,
                                  fsdp_text *text, fsdp_error *err)
{
    export_job job;
    fsdp_convert_plan plan = {.free_bytes = -1};
    FSDP_TRY(new_job(opts, &job, err));
    fsdp_status st = plan_all(&job, from, to, &plan, err);
    if (st == FSDP_OK)
        st = add_text(&job, to, &plan, text, err);
    release_job(&job);
    return st;
}

/* --- names of formats ------------------------------------------------------------------------- */

const char *fsdp_convert_format(size_t i)
{
    if (i == 0)
        return "fsdp";
    const fsdp_target_format *format = fsdp_target_at(i - 1);
    return format ? format->limits.format : NULL;
}

const char *fsdp_convert_format_of(const char *path)
{
    static const struct {
        const char *suffix, *format;
    } suffixes[] = {{".safetensors", "safetensors"},
                    {".pt", "torch"},
                    {".pth", "torch"},
                    {".bin", "torch"},
                    {".h5", "hdf5"},
                    {".hdf5", "hdf5"},
                    {".npz", "npz"},
                    {".fsdp", "fsdp"},
                    {".dcp", "dcp"}};
    size_t size = strlen(path);
    while (size > 0 && path[size - 1] == '/')
        size--;
    for (size_t i = 0; i < sizeof suffixes / sizeof *suffixes; i++) {
        size_t suffix = strlen(suffixes[i].suffix);
        if (size > suffix && memcmp(path + size - suffix, suffixes[i].suffix, suffix) == 0)
            return suffixes[i].format;
    }
    return "hf";
}
