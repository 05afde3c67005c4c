/*
 * Converting: another kind, world size, mesh or sharding dim, offline and within a memory budget.
 *
 * Every tensor goes through in row-major slabs: the blocks of the source that meet the slab are read
 * and checked, placed into the boxes of the target that meet it, and those are hashed and written.
 * A slab is a run of every target box, so nothing is written twice or out of order. Raw targets:
 * workers take whole tensors. Encoded targets: tensor after tensor, with all workers on each slab,
 * because the order of frames in a file must not depend on the number of workers.
 *
 * Many files have many records, so files are written in groups whose records fit the budget: each
 * group is created, filled, finished and read back before the next. A block of the source that two
 * groups want is read twice.
 *
 * To format "hdf5" it is the same with one full file, which becomes a checkpoint of its own at the
 * end (one_file.c) and has the place of an exported file (export_commit.c) instead of a directory's.
 */
#include "statedict/convert/convert_internal.h"

#include "statedict/commit/commit_internal.h"
#include "statedict/convert/convert_io.h"
#include "statedict/convert/export.h"
#include "statedict/convert/export_commit.h"
#include "statedict/checkpoint/foreign.h"
#include "statedict/sd/layout_internal.h"
#include "statedict/convert/plan_notes.h"
#include "statedict/select/relayout.h"
#include "statedict/commit/space.h"

#include "base/io/io_reuse.h"
#include "base/core/pool.h"

#include <inttypes.h>
#include <string.h>

enum {
    SLAB_MOST = 32 << 20,
    SLAB_LEAST = FSDP_BLOCK_BYTES,
    CHUNK_LEAST = 64 << 10,
    BUFFERS_LEAST = 8 << 20
};

/* --- the target ------------------------------------------------------------------------------- */

static fsdp_status choose_mesh(convert_job *job, fsdp_error *err)
{
    const fsdp_convert_opts *opts = job->opts;
    if (opts->world < 0 || opts->shard_dim < 0 || opts->shard_dim >= FSDP_MAX_DIMS)
        return fsdp_fail(err, FSDP_ERR_USAGE, "world size %d or sharding dim %d is out of range",
                         opts->world, opts->shard_dim);
    if (job->place.format && (opts->world > 1 || opts->mesh))
        return fsdp_fail(err, FSDP_ERR_USAGE, "format %s has no ranks: no world size, no mesh",
                         opts->format);
    if (opts->kind == FSDP_FULL && opts->world > 1)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "a full checkpoint is one file; it has no world size of %d", opts->world);
    if (opts->mesh && opts->world > 0 && fsdp_mesh_size(opts->mesh) != opts->world)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the mesh has %lld ranks, the world %d",
                         (long long)fsdp_mesh_size(opts->mesh), opts->world);
    job->world = opts->kind == FSDP_FULL ? 1
                 : opts->world > 0       ? opts->world
                                         : job->from->info.world;
    if (opts->mesh && opts->kind != FSDP_FULL)
        job->world = (int)fsdp_mesh_size(opts->mesh);
    job->file_count = job->world;
    if (opts->mesh && opts->kind != FSDP_FULL)
        return FSDP_OK;
    return fsdp_mesh_create(1, (int64_t[]){job->world}, (const char *[]){"dp"}, NULL, &job->mesh,
                            err);
}

static fsdp_status describe_target(convert_job *job, const char *to, fsdp_convert_plan *plan,
                                   fsdp_error *err)
{
    fsdp_selection *selection = NULL;
    FSDP_TRY(choose_mesh(job, err));
    fsdp_status st = fsdp_selection_create(job->from->manifest.sd, &job->opts->select, NULL,
                                           job->from->is_missing, &selection, err);
    if (st == FSDP_DIFFERS)
        return fsdp_fail(err, FSDP_DIFFERS, "no name in '%s' matches", job->from->path);
    FSDP_TRY(st);
    fsdp_tie_rules rules = {.opts = job->opts, .config = -1, .to = to};
    st = fsdp_ties_drop(job->from, &rules, selection, &job->ties, err);
    if (st == FSDP_OK)
        st = fsdp_relayout(job->from->manifest.sd, job->opts->kind,
                           job->mesh ? job->mesh : job->opts->mesh, job->opts->shard_dim, selection,
                           &job->sd, &job->source, err);
    fsdp_noted noted = {
        .selection = selection, .count = fsdp_sd_count(job->from->manifest.sd), .ties = &job->ties};
    if (st == FSDP_OK)
        st = fsdp_plan_note(plan, &noted, err);
    fsdp_selection_tell(selection, plan);
    fsdp_selection_free(selection);
    job->casts = plan->cast_tensors > 0;
    FSDP_TRY(st);
    job->owners = fsdp_alloc(fsdp_sd_count(job->sd), sizeof *job->owners);
    if (!job->owners)
        return fsdp_fail_memory(err, "a conversion");
    return job->opts->kind == FSDP_LOCAL
               ? FSDP_OK
               : fsdp_plan_owners(job->sd, FSDP_OWNERS_BALANCED, job->owners, err);
}

/* Bytes that one file takes while it is written. */
static int64_t file_room(const convert_job *job)
{
    int64_t room = fsdp_save_plan_room(job->sd, job->opts->kind, 0);
    return job->opts->compress ? room + FSDP_OPEN_LAYOUT_BYTES + CHUNK_LEAST : room;
}

/* Bytes that a thread needs to put a file's index together, or to read it back. */
static int64_t finish_room(const convert_job *job)
{
    return 2 * fsdp_save_plan_room(job->sd, job->opts->kind, 0);
}

/*
 * Bytes that do not depend on the budget: both descriptions, the indexes of the source, and either
 * two indexes of the target at once (finished or read back by each thread) or its manifest's text.
 */
static int64_t fixed_room(const convert_job *job)
{
    enum { TEXT_BYTES = 300 }; /* of an entry in the manifest, in a buffer that doubles */
    const fsdp_manifest *source = &job->from->manifest;
    int64_t indexes = 0, count = (int64_t)fsdp_sd_count(job->sd);
    for (int i = 0; i < source->file_count; i++)
        indexes += source->files[i].index_size;
    int64_t finishing = finish_room(job) * job->threads, publishing = 2 * TEXT_BYTES * count;
    return fsdp_sd_room(source->sd) + fsdp_sd_room(job->sd) + indexes * 8 / 5 +
           (finishing > publishing ? finishing : publishing);
}

/* Raw: half for slabs, a quarter for the records of files; the rest is for finishing and checking
 * them. Encoded: a quarter for slabs, a quarter for records, half for chunks. */
static void divide_memory(convert_job *job)
{
    int64_t memory = job->opts->memory > 0 ? job->opts->memory : FSDP_MEMORY_DEFAULT;
    bool encoded = job->from->info.compressed;
    job->threads = fsdp_getters_within(job->opts->threads, memory / 4, encoded);
    int64_t finishing = memory / 4 / finish_room(job);
    if (finishing < job->threads)
        job->threads = finishing < 1 ? 1 : (int)finishing;
    int most;
    int64_t apart;
    fsdp_foreign_reading_limits(job->from, &most, &apart);
    job->threads = most < job->threads ? most : job->threads;
    memory -= fixed_room(job);
    if (memory < BUFFERS_LEAST)
        memory = BUFFERS_LEAST;
    int64_t for_slabs = job->opts->compress ? memory / 4 : memory / 2;
    int64_t files = memory / 4 / file_room(job);
    job->group_files = files < 1 ? 1 : files > job->file_count ? job->file_count : (int)files;
    int64_t slab = (for_slabs - fsdp_getter_bytes(encoded) * job->threads) / job->threads;
    slab = slab < apart ? slab : apart;
    job->slab_bytes = slab < SLAB_LEAST ? SLAB_LEAST : slab > SLAB_MOST ? SLAB_MOST : slab;
    /* Encoders hold four chunks a thread, twice; a chunk in part may wait in every file. */
    int64_t chunk = memory / 2 / (8 * job->threads + job->group_files);
    job->chunk_bytes = FSDP_CHUNK_BYTES;
    while (job->chunk_bytes > chunk && job->chunk_bytes > CHUNK_LEAST)
        job->chunk_bytes /= 2;
    if (job->opts->chunk_bytes > 0)
        job->chunk_bytes = job->opts->chunk_bytes;
}

/* A slab is read in the pieces of its boxes, a column at a time when they are columns; a group reads all. */
static fsdp_status announce_reading(convert_job *job, fsdp_error *err)
{
    int threads;
    int64_t apart;
    fsdp_foreign_reading_limits(job->from, &threads, &apart);
    bool columns = job->file_count > 1 && job->opts->shard_dim > 0 && job->slab_bytes > apart;
    bool repeated = columns || job->group_files < job->file_count;
    for (size_t i = 0; i < fsdp_sd_count(job->sd); i++)
        if (fsdp_sd_at(job->sd, i)->kind == FSDP_ENTRY_TENSOR)
            FSDP_TRY(fsdp_foreign_announce(job->from, job->source[i], repeated, err));
    return FSDP_OK;
}

static fsdp_planned plan_of(const convert_job *job, const char *to)
{
    return (fsdp_planned){.from = job->from,
                          .to = to,
                          .opts = job->opts,
                          .chunk_bytes = job->chunk_bytes,
                          .sd = job->sd,
                          .source = job->source,
                          .ties = &job->ties};
}

static fsdp_status check_chunk(const fsdp_convert_opts *opts, fsdp_error *err)
{
    int64_t chunk = opts->chunk_bytes;
    if (chunk == 0 || (chunk >= CHUNK_LEAST && chunk <= FSDP_CHUNK_BYTES))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE, "chunks of %" PRId64 " bytes: %d to %d are allowed",
                     chunk, (int)CHUNK_LEAST, (int)FSDP_CHUNK_BYTES);
}

static fsdp_status open_source(convert_job *job, const char *from, const char *to,
                               fsdp_convert_plan *plan, fsdp_error *err)
{
    fsdp_copies no_copies; /* asking for some is refused */
    FSDP_TRY(fsdp_check_budget(job->opts->threads, job->opts->memory, err));
    FSDP_TRY(check_chunk(job->opts, err));
    FSDP_TRY(fsdp_copies_open(job->io, job->opts, to, &no_copies, err));
    FSDP_TRY(fsdp_convert_open(from, job->opts, &job->from, err));
    FSDP_TRY(fsdp_foreign_carry_values(job->from, true, err));
    FSDP_TRY(describe_target(job, to, plan, err));
    FSDP_TRY(fsdp_foreign_set_memory(job->from, job->opts->memory, to, err));
    divide_memory(job);
    FSDP_TRY(announce_reading(job, err));
    plan->bytes_spooled = fsdp_foreign_spool_bytes(job->from);
    fsdp_planned planned = plan_of(job, to);
    return fsdp_plan_identify(&planned, job->hash, err);
}

static int64_t peak_memory(const convert_job *job)
{
    int64_t buffers = (job->slab_bytes + fsdp_getter_bytes(job->from->info.compressed)) *
                      (job->opts->compress ? 1 : job->threads);
    if (job->opts->compress)
        buffers += job->chunk_bytes * (8 * job->threads + job->group_files);
    return fixed_room(job) + buffers + file_room(job) * job->group_files;
}

/* --- planning --------------------------------------------------------------------------------- */

static void count_work(const convert_job *job, fsdp_convert_plan *plan)
{
    plan->files = job->file_count;
    plan->world = job->world;
    for (size_t i = 0; i < fsdp_sd_count(job->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(job->sd, i);
        plan->tensors += entry->kind == FSDP_ENTRY_TENSOR;
        plan->values += entry->kind == FSDP_ENTRY_VALUE;
        plan->aliases += entry->kind == FSDP_ENTRY_ALIAS;
        if (entry->kind != FSDP_ENTRY_TENSOR)
            continue;
        plan->bytes_written += fsdp_entry_bytes(entry);
        plan->bytes_read += fsdp_entry_bytes(entry) / (int64_t)fsdp_dtype_size(entry->dtype) *
                            (int64_t)fsdp_dtype_size(fsdp_convert_source_dtype(job, i));
    }
    if (job->world > 1 && job->opts->kind == FSDP_SHARDED)
        plan->short_tensors = fsdp_relayout_count_short(job->sd, job->opts->shard_dim);
    plan->peak_memory = peak_memory(job);
}

/* What is to be written must fit before work starts. */
static fsdp_status check_space(const convert_job *job, const char *to, fsdp_convert_plan *plan,
                               fsdp_error *err)
{
    fsdp_space space;
    fsdp_volume volume = {.kind = job->opts->kind,
                          .world = job->file_count,
                          .compress = job->opts->compress,
                          .with_view = !job->opts->no_view,
                          .more = plan->bytes_spooled};
    if (job->opts->resume && !job->opts->compress) /* which are not counted when they are encoded */
        volume.more -= fsdp_resume_bytes(job->io, to, job->hash);
    plan->bytes_needed = fsdp_volume_room(job->sd, &volume);
    fsdp_status st = fsdp_require_space(job->io, to, &volume, plan->bytes_needed, &space, err);
    plan->free_bytes = space.free_bytes;
    return st;
}

/* Records of many tensors take memory that no budget makes smaller. */
static fsdp_status check_memory(const convert_job *job, const fsdp_convert_plan *plan,
                                fsdp_error *err)
{
    const int64_t beside = 32 << 20, unit = 1 << 20;
    int64_t wanted = plan->peak_memory - beside;
    if (job->opts->memory <= 0 || wanted <= job->opts->memory)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_LIMIT,
                     "converting %zu entries into %d files takes %" PRId64
                     " MiB of memory: allow %" PRId64 "M or more",
                     fsdp_sd_count(job->sd), job->file_count, (plan->peak_memory + unit - 1) / unit,
                     (wanted + unit - 1) / unit);
}

/* All that comes before the first byte. */
static fsdp_status prepare(convert_job *job, const char *from, const char *to,
                           fsdp_convert_plan *plan, fsdp_error *err)
{
    FSDP_TRY(open_source(job, from, to, plan, err));
    count_work(job, plan);
    FSDP_TRY(fsdp_convert_check_target(job, to, err));
    FSDP_TRY(check_memory(job, plan, err));
    return check_space(job, to, plan, err);
}

/* --- files ------------------------------------------------------------------------------------ */

static fsdp_status create_file(convert_job *job, int file, fsdp_error *err)
{
    fsdp_save_plan *plan = &job->plans[file];
    FSDP_TRY(fsdp_plan_save(job->sd, job->opts->kind, job->opts->compress, job->owners, file, plan,
                            err));
    char *path = fsdp_convert_staged_path(job, file);
    if (!path)
        return fsdp_fail_memory(err, "a path");
    if (job->opts->compress && job->staging.is_taken_up) /* its half cannot be gone on with */
        (void)job->io->ops->unlink(job->io, path);
    fsdp_shard_opts opts = {.io = job->reuse && !job->opts->compress ? job->reuse : job->io,
                            .path = path,
                            .id = fsdp_convert_file_id(job, file),
                            .encode = job->opts->compress,
                            .level = job->opts->level,
                            .chunk_bytes = job->chunk_bytes,
                            .encoder = job->encoder,
                            .threads = 1,
                            .sync = !job->opts->no_sync};
    fsdp_status st =
        fsdp_shard_create(&opts, plan->datasets, plan->dataset_count, plan->links, plan->link_count,
                          plan->boxes, plan->box_count, &job->writers[file], err);
    fsdp_free(path);
    return st == FSDP_OK ? fsdp_put_plan(job->writers[file], plan, NULL, err) : st;
}

static fsdp_status prepare_files(convert_job *job, fsdp_error *err)
{
    size_t n = (size_t)job->file_count;
    job->plans = fsdp_alloc(n, sizeof *job->plans);
    job->writers = fsdp_alloc(n, sizeof *job->writers);
    job->seals = fsdp_alloc(n, sizeof *job->seals);
    job->is_kept = fsdp_alloc(n, sizeof *job->is_kept);
    job->cast_sums = fsdp_alloc(job->casts ? n : 1, sizeof *job->cast_sums);
    if (!job->plans || !job->writers || !job->seals || !job->is_kept || !job->cast_sums)
        return fsdp_fail_memory(err, "a conversion");
    if (job->opts->compress)
        return fsdp_encoder_create(job->threads, job->opts->level, job->chunk_bytes, &job->encoder,
                                   err);
    return FSDP_OK;
}

static fsdp_status finish_file(void *user, size_t number, fsdp_error *err)
{
    convert_job *job = user;
    size_t file = (size_t)job->first_file + number;
    fsdp_shard_writer *writer = job->writers[file];
    job->writers[file] = NULL;
    fsdp_status st = fsdp_shard_finish(writer, &job->seals[file], err);
    fsdp_finished_file note = {.seal = job->seals[file]};
    if (job->casts)
        note.tally = fsdp_cast_sum_get(&job->cast_sums[file]);
    if (st == FSDP_OK)
        fsdp_resume_put(&job->notes, (int64_t)file, &note, fsdp_convert_note_size(job));
    fsdp_save_plan_release(&job->plans[file]);
    return st;
}

/* --- one slab --------------------------------------------------------------------------------- */

/* What one worker has at hand. */
typedef struct slab_work {
    convert_job *job;
    size_t entry;
    fsdp_box slab;
    char *data;
    int64_t used; /* bytes of data */
    int64_t bytes_read;
    fsdp_want *wants;
    fsdp_shard_piece *pieces;
    int *files; /* per want: the file it goes to */
    size_t count, want_room, piece_room, file_room;
    fsdp_getter getter;
    atomic_llong next_turn; /* encoded: workers fill the slab together */
} slab_work;

static fsdp_status add_target(void *user, int rank, size_t part, const fsdp_box *box,
                              fsdp_error *err)
{
    slab_work *work = user;
    fsdp_box shared;
    if (rank < work->job->first_file || rank >= work->job->end_file ||
        !fsdp_box_intersect(box, &work->slab, &shared))
        return FSDP_OK;
    size_t n = work->count;
    if (!fsdp_grow(&work->wants, &work->want_room, n + 1, sizeof *work->wants) ||
        !fsdp_grow(&work->pieces, &work->piece_room, n + 1, sizeof *work->pieces) ||
        !fsdp_grow(&work->files, &work->file_room, n + 1, sizeof *work->files))
        return fsdp_fail_memory(err, "a slab of a tensor");
    fsdp_dtype to = fsdp_sd_at(work->job->sd, work->entry)->dtype;
    fsdp_dtype from = fsdp_convert_source_dtype(work->job, work->entry);
    int64_t inside[FSDP_MAX_DIMS], count = fsdp_box_count(&shared);
    char *data = work->data + work->used;
    for (int d = 0; d < box->ndim; d++)
        inside[d] = shared.lo[d] - box->lo[d];
    work->wants[n] = (fsdp_want){shared, from, fsdp_recast_source(data, count, from, to)};
    work->pieces[n] =
        (fsdp_shard_piece){fsdp_save_plan_find(&work->job->plans[rank], work->entry, part),
                           fsdp_box_position(box->ndim, box->len, inside), count, data};
    work->files[n] = rank;
    work->used += count * (int64_t)fsdp_recast_size(from, to);
    work->bytes_read += count * (int64_t)fsdp_dtype_size(from);
    work->count++;
    return FSDP_OK;
}

static fsdp_status fill_share(void *user, size_t worker, fsdp_error *err)
{
    slab_work *work = user;
    fsdp_getter getter = {0};
    fsdp_turns turns;
    (void)worker;
    fsdp_turns_begin(&turns, &work->next_turn);
    fsdp_status st = fsdp_checkpoint_get(work->job->from, work->job->source[work->entry],
                                         work->wants, work->count, &getter, &turns, err);
    fsdp_getter_release(&getter);
    return st;
}

static fsdp_status fill_slab(slab_work *work, fsdp_error *err)
{
    convert_job *job = work->job;
    if (!job->opts->compress)
        return fsdp_checkpoint_get(job->from, job->source[work->entry], work->wants, work->count,
                                   &work->getter, NULL, err);
    atomic_store(&work->next_turn, 0);
    return fsdp_parallel(job->threads, (size_t)job->threads, fill_share, work, err);
}

static fsdp_status convert_slab(slab_work *work, fsdp_error *err)
{
    convert_job *job = work->job;
    const fsdp_entry *entry = fsdp_sd_at(job->sd, work->entry);
    work->count = 0;
    work->used = work->bytes_read = 0;
    FSDP_TRY(fsdp_plan_stored(entry, job->owners[work->entry], &work->slab, add_target, work, err));
    if (work->count == 0)
        return FSDP_OK; /* all of it belongs to other groups */
    FSDP_TRY(fill_slab(work, err));
    FSDP_TRY(fsdp_convert_cast(job, work->entry, work->wants, work->files, work->count, err));
    for (size_t i = 0; i < work->count; i++)
        FSDP_TRY(fsdp_shard_write(job->writers[work->files[i]], &work->pieces[i], 1, err));
    return fsdp_meter_add(&job->meter, work->bytes_read, entry->name, entry->name_size, err);
}

static fsdp_status convert_tensor(slab_work *work, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(work->job->sd, work->entry);
    fsdp_slabs slabs = {0};
    int64_t most =
        work->job->slab_bytes /
        (int64_t)fsdp_recast_size(fsdp_convert_source_dtype(work->job, work->entry), entry->dtype);
    while (fsdp_slabs_next(&slabs, entry->ndim, entry->shape, most, &work->slab))
        FSDP_TRY(convert_slab(work, err));
    return FSDP_OK;
}

/* --- all tensors ------------------------------------------------------------------------------ */

typedef struct convert_work {
    convert_job *job;
    atomic_llong next; /* entry to take */
} convert_work;

static fsdp_status convert_worker(void *user, size_t worker, fsdp_error *err)
{
    convert_work *all = user;
    slab_work work = {.job = all->job, .data = fsdp_alloc_pages((size_t)all->job->slab_bytes)};
    fsdp_status st =
        work.data ? FSDP_OK : fsdp_fail_slab(all->job->slab_bytes, all->job->threads, err);
    int64_t count = (int64_t)fsdp_sd_count(all->job->sd);
    (void)worker;
    for (int64_t i; st == FSDP_OK && (i = atomic_fetch_add(&all->next, 1)) < count;) {
        work.entry = (size_t)i;
        if (fsdp_sd_at(all->job->sd, work.entry)->kind == FSDP_ENTRY_TENSOR)
            st = convert_tensor(&work, err);
    }
    if (st != FSDP_OK)
        atomic_store(&all->next, count);
    fsdp_getter_release(&work.getter);
    fsdp_free(work.data);
    fsdp_free(work.wants);
    fsdp_free(work.pieces);
    fsdp_free(work.files);
    return st;
}

static fsdp_status move_tensors(convert_job *job, fsdp_error *err)
{
    convert_work work = {.job = job};
    int workers = job->opts->compress ? 1 : job->threads;
    return fsdp_parallel(workers, (size_t)workers, convert_worker, &work, err);
}

/* --- the beginning ----------------------------------------------------------------------------- */

static fsdp_status begin(convert_job *job, const char *to, fsdp_error *err)
{
    const fsdp_convert_opts *opts = job->opts;
    fsdp_staging *staging = &job->staging;
    job->watch = opts->watch;
    if (job->place.format && opts->resume)
        fsdp_notice(&opts->watch,
                    "nothing is kept of a file of format %s that is cut off: starting anew",
                    job->place.format->limits.format);
    if (job->place.format)
        return fsdp_export_begin(&job->place, to, err);
    FSDP_TRY(fsdp_staging_begin(job->io, to, !opts->no_sync, opts->overwrite,
                                opts->resume ? job->hash : NULL, &opts->watch, staging, err));
    fsdp_resume_begin(&job->notes, job->io, staging->path, job->hash, job->file_count,
                      staging->is_taken_up);
    staging->has_notes = true;
    job->watch = fsdp_staging_watch(staging, &opts->watch);
    if (!opts->resume)
        return FSDP_OK;
    fsdp_resume_tell(&opts->watch, staging->is_taken_up ? staging->path : NULL);
    return staging->is_taken_up ? fsdp_io_reuse_create(job->io, &job->reuse, err) : FSDP_OK;
}

/* --- the end ---------------------------------------------------------------------------------- */

static fsdp_status convert_group(convert_job *job, fsdp_error *err)
{
    size_t count = (size_t)(job->end_file - job->first_file);
    for (int file = job->first_file; file < job->end_file; file++)
        FSDP_TRY(create_file(job, file, err));
    FSDP_TRY(move_tensors(job, err));
    FSDP_TRY(fsdp_parallel(job->threads, count, finish_file, job, err));
    if (job->opts->no_verify)
        return FSDP_OK;
    return fsdp_parallel(job->threads, count, fsdp_convert_check_file, job, err);
}

/* The next files that lie together and are not there yet; false behind the last. */
static bool next_group(convert_job *job)
{
    int first = job->end_file;
    while (first < job->file_count && job->is_kept[first])
        first++;
    job->first_file = job->end_file = first;
    while (job->end_file < job->file_count && !job->is_kept[job->end_file] &&
           job->end_file - first < job->group_files)
        job->end_file++;
    return job->end_file > first;
}

static fsdp_status convert_files(convert_job *job, const fsdp_convert_plan *plan, fsdp_error *err)
{
    /* what is read back counts as well */
    fsdp_meter_init(&job->meter, &job->watch,
                    plan->bytes_read + (job->opts->no_verify ? 0 : plan->bytes_written));
    FSDP_TRY(prepare_files(job, err));
    if (job->staging.is_taken_up)
        FSDP_TRY(fsdp_convert_keep_files(job, err));
    while (next_group(job))
        FSDP_TRY(convert_group(job, err));
    if (job->staging.is_taken_up)
        fsdp_resume_tell_kept(&job->opts->watch, job->kept_bytes + fsdp_io_reuse_kept(job->reuse));
    return FSDP_OK;
}

/* --- the calls -------------------------------------------------------------------------------- */

static fsdp_status convert_planned(convert_job *job, const char *from, const char *to,
                                   fsdp_convert_plan *plan, fsdp_error *err)
{
    FSDP_TRY(prepare(job, from, to, plan, err));
    FSDP_TRY(begin(job, to, err));
    if (!job->opts->no_verify)
        FSDP_TRY(fsdp_checkpoint_check(job->from, job->threads, err));
    FSDP_TRY(convert_files(job, plan, err));
    FSDP_TRY(job->place.format ? fsdp_convert_publish_file(job, err)
                               : fsdp_convert_publish(job, err));
    fsdp_convert_report_casts(job, plan);
    return FSDP_OK;
}

static fsdp_status convert(convert_job *job, const char *from, const char *to, fsdp_error *err)
{
    fsdp_convert_plan plan = {.free_bytes = -1};
    fsdp_status st = convert_planned(job, from, to, &plan, err);
    fsdp_convert_plan_release(&plan);
    return st;
}

/* err: of a failure, or NULL; see fsdp_staging_abandon. All descriptors go first: removing needs one. */
static void release_job(convert_job *job, fsdp_error *err)
{
    for (int i = 0; job->writers && i < job->file_count; i++)
        fsdp_shard_discard(job->writers[i]);
    for (int i = 0; job->plans && i < job->file_count; i++)
        fsdp_save_plan_release(&job->plans[i]);
    fsdp_encoder_free(job->encoder);
    fsdp_free(job->writers);
    fsdp_free(job->plans);
    fsdp_free(job->seals);
    fsdp_free(job->is_kept);
    fsdp_free(job->cast_sums);
    fsdp_resume_end(&job->notes);
    fsdp_io_reuse_free(job->reuse);
    fsdp_free(job->owners);
    fsdp_ties_release(&job->ties);
    fsdp_free(job->source);
    fsdp_sd_free(job->sd);
    fsdp_mesh_free(job->mesh);
    fsdp_checkpoint_close(job->from);
    if (err && !job->opts->resume)
        fsdp_staging_abandon(&job->staging, err);
    fsdp_staging_release(&job->staging);
    fsdp_export_end(&job->place, err);
}

/* Format "hdf5" is one full file. */
static convert_job new_job(const fsdp_convert_opts *opts, fsdp_convert_opts *own)
{
    *own = opts ? *opts : (fsdp_convert_opts){0};
    convert_job job = {.opts = own, .io = own->io ? own->io : fsdp_io_posix()};
    if (!own->format || strcmp(own->format, "fsdp") == 0)
        return job;
    own->kind = FSDP_FULL;
    job.place = (fsdp_export_place){.io = job.io,
                                    .format = fsdp_target_find(own->format),
                                    .overwrite = own->overwrite,
                                    .durable = !own->no_sync};
    return job;
}

static bool is_export(const fsdp_convert_opts *opts)
{
    return opts && opts->format && strcmp(opts->format, "fsdp") != 0 &&
           strcmp(opts->format, "hdf5") != 0;
}

static fsdp_status convert_with(const char *from, const char *to, const fsdp_convert_opts *opts,
                                fsdp_error *err)
{
    if (is_export(opts))
        return fsdp_export(from, to, opts, err);
    fsdp_convert_opts own;
    convert_job job = new_job(opts, &own);
    fsdp_status st = convert(&job, from, to, err);
    st = fsdp_staging_judge(&job.staging, st, err);
    release_job(&job, st == FSDP_OK ? NULL : err);
    return st;
}

fsdp_status fsdp_checkpoint_convert(const char *from, const char *to, const fsdp_convert_opts *opts,
                                    fsdp_error *err)
{
    fsdp_convert_io how;
    fsdp_error local = {0};
    err = err ? err : &local;
    fsdp_status st = fsdp_convert_io_begin(&how, opts, err);
    if (st == FSDP_OK)
        st = convert_with(from, to, &how.opts, err);
    fsdp_convert_io_end(&how);
    return st;
}

static fsdp_status plan_own(const char *from, const char *to, const fsdp_convert_opts *opts,
                            fsdp_convert_plan *plan_out, fsdp_error *err)
{
    fsdp_convert_opts own;
    convert_job job = new_job(opts, &own);
    fsdp_status st = prepare(&job, from, to, plan_out, err);
    release_job(&job, NULL);
    return st;
}

fsdp_status fsdp_checkpoint_convert_plan(const char *from, const char *to,
                                         const fsdp_convert_opts *opts, fsdp_convert_plan *plan_out,
                                         fsdp_error *err)
{
    *plan_out = (fsdp_convert_plan){.free_bytes = -1};
    fsdp_status st = is_export(opts) ? fsdp_export_plan(from, to, opts, plan_out, err)
                                     : plan_own(from, to, opts, plan_out, err);
    plan_out->peak_memory += fsdp_convert_io_room(opts);
    return st;
}

fsdp_status fsdp_convert_plan_text(const char *from, const char *to, const fsdp_convert_opts *opts,
                                   const char *path, fsdp_text *text, fsdp_error *err)
{
    if (is_export(opts))
        return fsdp_export_plan_text(from, to, opts, path, text, err);
    fsdp_convert_plan plan = {.free_bytes = -1};
    fsdp_convert_opts own;
    convert_job job = new_job(opts, &own);
    fsdp_status st = prepare(&job, from, to, &plan, err);
    if (st == FSDP_OK)
        st = fsdp_plan_check_path(job.from, to, path, err);
    fsdp_planned planned = plan_of(&job, to);
    if (st == FSDP_OK)
        st = fsdp_plan_head(&planned, text, job.hash, err);
    if (st == FSDP_OK)
        st = fsdp_plan_add_files(&planned, &plan, job.owners, text, err);
    if (st == FSDP_OK)
        st = fsdp_plan_close(text, err);
    fsdp_convert_plan_release(&plan);
    release_job(&job, NULL);
    return st;
}
