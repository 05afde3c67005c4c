/*
 * Saving: step 3 of docs/flow_save.md. Agree on what is saved, stage, let every rank write its own
 * file, gather what the manifest must say, publish by one rename. A step of a run is saved in the
 * same way under the lease of the run. The mirror is load.c.
 *
 * A local failure never skips a collective: it is brought to the next fsdp_ctl_agree, and every
 * rank leaves with the same status.
 */
#include "statedict/commit/commit.h"
#include "base/core/given.h"
#include "base/core/fnv.h"
#include "base/core/mem.h"
#include "base/core/pool.h"
#include "base/data/box_internal.h"
#include "base/data/flow.h"
#include "statedict/commit/space.h"
#include "statedict/ctl/ctl_backend.h"
#include "statedict/manifest/manifest.h"
#include "statedict/run/run_internal.h"
#include "statedict/save/publish.h"
#include "statedict/save/save_internal.h"
#include "statedict/sd/describe.h"
#include "statedict/select/relayout.h"
#include "statedict/transfer/box_plan.h"
#include "statedict/transfer/pipeline.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

/* === the full state on rank 0 ================================================================= */

/*
 * The full state on rank 0, streamed: every tensor in row-major slabs, each put together from the
 * boxes of the ranks that own them. Messages go through the bounded window of the control plane, so
 * memory is one slab on rank 0 and one piece of it on each other rank.
 *
 * After a local failure rank 0 receives, and other ranks send, every message, so that no rank waits in vain.
 */

enum { SLAB_BYTES = 16 << 20, SLAB_LEAST = 64 << 10 };

/* Bytes between two rounds of all ranks: one with nothing to send waits in short rounds. */
enum { ROUND_BYTES = 256 << 20 };

typedef struct gather_job {
    const fsdp_sd *sd;
    fsdp_ctl *ctl;
    int *owners;
    fsdp_waves *waves;
    int64_t slab_bytes, since_round;
    char *slab, *message;
    fsdp_slab_visit visit;
    void *context;
    fsdp_status failed; /* the first local failure: of a visit, or of a wave */
    fsdp_error *err;
    /* at hand */
    const fsdp_entry *entry;
    fsdp_box slab_box;
} gather_job;

/* The address of a box in this rank's memory, in which boxes are packed one after the other. */
static const char *local_memory(const gather_job *job, size_t part)
{
    const char *data = job->entry->data;
    for (size_t p = 0; p < part; p++) {
        fsdp_box before;
        fsdp_layout_box_at(&job->entry->layout, job->entry->ndim, job->entry->shape,
                           fsdp_ctl_rank(job->ctl), p, &before);
        data += fsdp_box_count(&before) * (int64_t)fsdp_dtype_size(job->entry->dtype);
    }
    return data;
}

/* Moves the part of the slab that one rank stores to the slab of rank 0. */
static fsdp_status bring_share(void *context, int rank, size_t part, const fsdp_box *box,
                               fsdp_error *err)
{
    gather_job *job = context;
    fsdp_box shared;
    int local = fsdp_ctl_rank(job->ctl);
    if ((local != 0 && local != rank) || !fsdp_box_intersect(box, &job->slab_box, &shared))
        return FSDP_OK;
    size_t element = fsdp_dtype_size(job->entry->dtype);
    size_t size = (size_t)fsdp_box_count(&shared) * element;
    if (local == 0 && rank == 0) {
        fsdp_copy_shared(&job->slab_box, job->slab, box, local_memory(job, part), element);
    } else if (local == rank) {
        fsdp_copy_shared(&shared, job->message, box, local_memory(job, part), element);
        return fsdp_ctl_send(job->ctl, 0, job->message, size, err);
    } else {
        FSDP_TRY(fsdp_ctl_recv(job->ctl, rank, job->message, size, err));
        fsdp_copy_shared(&job->slab_box, job->slab, &shared, job->message, element);
    }
    return FSDP_OK;
}

static void visit_slab(gather_job *job, int64_t first, int64_t count)
{
    if (fsdp_ctl_rank(job->ctl) == 0 && job->failed == FSDP_OK)
        job->failed = job->visit(job->context, job->entry, first, count, job->slab, job->err);
}

/* Ranks stay within ROUND_BYTES of each other. */
static fsdp_status barrier_after(gather_job *job, int64_t bytes, fsdp_error *err)
{
    job->since_round += bytes;
    if (job->since_round < ROUND_BYTES)
        return FSDP_OK;
    job->since_round = 0;
    return fsdp_ctl_barrier(job->ctl, err);
}

static fsdp_status gather_tensor(gather_job *job, int owner, fsdp_error *err)
{
    const fsdp_entry *entry = job->entry;
    int64_t size = (int64_t)fsdp_dtype_size(entry->dtype), first = 0;
    fsdp_slabs slabs = {0};
    if (fsdp_entry_bytes(entry) == 0)
        visit_slab(job, 0, 0);
    else
        while (fsdp_slabs_next(&slabs, entry->ndim, entry->shape, job->slab_bytes / size,
                               &job->slab_box)) {
            FSDP_TRY(fsdp_box_plan_stored(entry, owner, &job->slab_box, bring_share, job, err));
            visit_slab(job, first, slabs.next - first);
            FSDP_TRY(barrier_after(job, (slabs.next - first) * size, err));
            first = slabs.next;
        }
    return FSDP_OK;
}

/* After a failure the messages have undefined contents, which nobody reads. */
static void enter_waves(gather_job *job, size_t entry)
{
    if (job->failed == FSDP_OK)
        job->failed = fsdp_waves_reach(job->waves, entry, job->err);
}

static fsdp_status gather_all(gather_job *job, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_count(job->sd); i++) {
        job->entry = fsdp_sd_at(job->sd, i);
        if (job->entry->kind != FSDP_ENTRY_TENSOR)
            continue;
        enter_waves(job, i);
        FSDP_TRY(gather_tensor(job, job->owners[i], err));
    }
    return job->failed == FSDP_OK ? fsdp_waves_finish(job->waves, err) : FSDP_OK;
}

static fsdp_status prepare_gather(gather_job *job, int64_t memory, fsdp_error *err)
{
    FSDP_TRY(fsdp_check_budget(0, memory, err));
    int64_t share = (memory > 0 ? memory : FSDP_MEMORY_DEFAULT) / 4;
    job->slab_bytes = share < SLAB_LEAST ? SLAB_LEAST : share > SLAB_BYTES ? SLAB_BYTES : share;
    job->owners = fsdp_alloc(fsdp_sd_count(job->sd), sizeof *job->owners);
    job->message = fsdp_alloc_pages((size_t)job->slab_bytes);
    if (fsdp_ctl_rank(job->ctl) == 0)
        job->slab = fsdp_alloc_pages((size_t)job->slab_bytes);
    if (!job->owners || !job->message || (fsdp_ctl_rank(job->ctl) == 0 && !job->slab))
        return fsdp_fail_memory(err, "gathering the full state");
    FSDP_TRY(fsdp_box_plan_owners(job->sd, FSDP_OWNERS_BALANCED, job->owners, err));
    return fsdp_check_memory(job->sd, job->ctl, err);
}

/*
 * Collective. fsdp_sd_gather; `mine` is the outcome of this rank so far, and no data moves unless all ranks
 * pass FSDP_OK. A failure of visit or of waves is returned on this rank alone, which passes it to the next
 * round.
 */
static fsdp_status gather_slabs(const fsdp_sd *sd, fsdp_ctl *ctl, const fsdp_gather *how,
                                fsdp_status mine, fsdp_error *err)
{
    gather_job job = {.sd = sd,
                      .ctl = ctl,
                      .waves = how->waves,
                      .visit = how->visit,
                      .context = how->context,
                      .err = err};
    if (mine == FSDP_OK)
        mine = prepare_gather(&job, how->memory, err);
    fsdp_status st = how->is_described ? fsdp_ctl_agree(ctl, mine, err)
                                       : fsdp_describe_agree(sd, false, ctl, mine, err);
    if (st == FSDP_OK)
        st = gather_all(&job, err);
    fsdp_free(job.owners);
    fsdp_free(job.slab);
    fsdp_free(job.message);
    return st == FSDP_OK ? job.failed : st;
}

fsdp_status fsdp_sd_gather(const fsdp_sd *sd, fsdp_ctl *ctl, int64_t memory, fsdp_slab_visit visit,
                           void *context, fsdp_error *err)
{
    FSDP_NEED(err, sd, ctl);
    fsdp_error local = {0};
    fsdp_gather how = {.memory = memory, .visit = visit, .context = context};
    err = err ? err : &local;
    const char *outer = fsdp_ctl_begin_public(ctl, "fsdp_sd_gather");
    fsdp_status mine = fsdp_ctl_rank(ctl) == 0 ? FSDP_GIVEN_CALL(err, visit) : FSDP_OK;
    fsdp_status st = fsdp_ctl_broadcast(ctl, 0, &how.memory, sizeof how.memory, err);
    if (st == FSDP_OK)
        st = fsdp_ctl_agree(ctl, gather_slabs(sd, ctl, &how, mine, err), err);
    fsdp_ctl_end_public(ctl, outer);
    return st;
}

/* --- into memory ------------------------------------------------------------------------------ */

static fsdp_status keep_slab(void *context, const fsdp_entry *entry, int64_t first, int64_t count,
                             const void *data, fsdp_error *err)
{
    fsdp_sd *full = context;
    size_t size = fsdp_dtype_size(entry->dtype);
    int64_t at = fsdp_sd_find(full, entry->name, entry->name_size);
    if (at < 0)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "tensor '%s' has no location in the full state",
                         entry->name);
    if (count > 0)
        memcpy((char *)fsdp_sd_at(full, (size_t)at)->data + (size_t)first * size, data,
               (size_t)count * size);
    return FSDP_OK;
}

static fsdp_status make_full(const fsdp_sd *sd, fsdp_sd **full_out, fsdp_error *err)
{
    FSDP_TRY(fsdp_relayout_whole(sd, NULL, full_out, err));
    return fsdp_sd_allocate(*full_out, 0, err);
}

fsdp_status fsdp_sd_gather_full(const fsdp_sd *sd, fsdp_ctl *ctl, fsdp_sd **full_out,
                                fsdp_error *err)
{
    FSDP_NEED(err, full_out);
    *full_out = NULL;
    FSDP_NEED(err, sd, ctl);
    fsdp_error local = {0};
    err = err ? err : &local;
    const char *outer = fsdp_ctl_begin_public(ctl, "fsdp_sd_gather_full");
    fsdp_status st = fsdp_ctl_rank(ctl) == 0 ? make_full(sd, full_out, err) : FSDP_OK;
    st = fsdp_ctl_agree(ctl, st, err);
    if (st == FSDP_OK)
        st = fsdp_sd_gather(sd, ctl, 0, keep_slab, *full_out, err);
    fsdp_ctl_end_public(ctl, outer);
    if (st != FSDP_OK) {
        fsdp_sd_free(*full_out);
        *full_out = NULL;
    }
    return st;
}

/* === a save =================================================================================== */

enum { PATH_ROOM = 4096, SEGMENT_PIECE = 1 << 20 };
enum { OPTION_COUNT = 9 };

typedef struct save_job {
    const fsdp_sd *sd;
    fsdp_ctl *ctl;
    const fsdp_save_opts *opts;
    fsdp_waves *waves; /* of sd, or NULL */
    fsdp_io *io;
    int rank, world;
    uint8_t run[16];
    fsdp_staging staging;   /* rank 0 */
    char staged[PATH_ROOM]; /* the staging directory, known to all */
    int64_t index_room;     /* of a file that all ranks write */
    int64_t memory;         /* rank 0's */
    int *owners;
    fsdp_save_plan plan;
    fsdp_shard_writer *writer;
    fsdp_file_record record;
    fsdp_sd *whole; /* rank 0 alone writes a full file: what it then stores */
    fsdp_meter meter;
    fsdp_watch watch;      /* the caller's, which also keeps the lease of a run */
    bool may_be_published; /* rank 0 may have begun to, as far as this rank knows */
    bool is_published;     /* rank 0 */
} save_job;

/* --- the beginning ---------------------------------------------------------------------------- */

/* A compressed dataset has the chunks of one box. */
static bool has_parts(const fsdp_sd *sd)
{
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (entry->kind == FSDP_ENTRY_TENSOR &&
            fsdp_layout_box_count(&entry->layout, entry->ndim, entry->shape, 0) > 1)
            return true;
    }
    return false;
}

static bool rank0_writes_all(const save_job *job)
{
    if (job->opts->kind != FSDP_FULL)
        return false;
    return job->world > 1 ? job->opts->compress || job->opts->rank0_writes
                          : job->opts->compress && has_parts(job->sd);
}

static bool all_write_one(const save_job *job)
{
    return job->opts->kind == FSDP_FULL && !rank0_writes_all(job);
}

static fsdp_status check_options(const save_job *job, fsdp_error *err)
{
    const fsdp_save_opts *opts = job->opts;
    if (opts->kind != FSDP_SHARDED && opts->kind != FSDP_FULL && opts->kind != FSDP_LOCAL)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the checkpoint cannot have the kind %d",
                         (int)opts->kind);
    if (fsdp_save_step(opts) < FSDP_NO_STEP)
        return fsdp_fail(err, FSDP_ERR_USAGE, "step %lld is negative",
                         (long long)fsdp_save_step(opts));
    if (opts->level < 0 || opts->level > 19)
        return fsdp_fail(err, FSDP_ERR_USAGE, "compression level %d is not in 0..19", opts->level);
    FSDP_TRY(fsdp_check_budget(opts->threads, opts->memory, err));
    return fsdp_check_memory(job->sd, job->ctl, err);
}

/* The identity of a run when the caller gave none: a hash of its description. */
static fsdp_status choose_run(save_job *job, fsdp_error *err)
{
    static const uint8_t none[16];
    memcpy(job->run, job->opts->run, sizeof job->run);
    if (memcmp(job->run, none, sizeof none) != 0)
        return FSDP_OK;
    fsdp_hash hash;
    FSDP_TRY(fsdp_describe_hash(job->sd, false, &hash, err));
    memcpy(job->run, hash.bytes, sizeof job->run);
    return FSDP_OK;
}

static fsdp_status prepare(save_job *job, fsdp_error *err)
{
    FSDP_TRY(check_options(job, err));
    FSDP_TRY(choose_run(job, err));
    job->owners = fsdp_alloc(fsdp_sd_count(job->sd), sizeof *job->owners);
    if (!job->owners)
        return fsdp_fail_memory(err, "a save plan");
    if (rank0_writes_all(job)) /* one rank, one copy: owners stay 0 */
        return fsdp_relayout_whole(job->sd, NULL, &job->whole, err);
    if (job->opts->kind != FSDP_LOCAL)
        FSDP_TRY(fsdp_box_plan_owners(job->sd, job->opts->owners, job->owners, err));
    fsdp_box_plan_input input = {job->sd, job->opts->kind, job->opts->compress, job->owners,
                                 job->rank};
    return fsdp_box_plan_save(&input, &job->plan, err);
}

/* Checks before the first byte that the disk has enough space, and warns of a file system in memory. */
static fsdp_status check_place(const save_job *job, const char *dir, fsdp_error *err)
{
    const fsdp_save_opts *opts = job->opts;
    fsdp_space space;
    fsdp_volume volume = {.kind = opts->kind,
                          .world = job->world,
                          .compress = opts->compress,
                          .with_view = !opts->skip_view};
    FSDP_TRY(
        fsdp_require_space(job->io, dir, &volume, fsdp_volume_room(job->sd, &volume), &space, err));
    if (space.in_memory && !opts->skip_fsync)
        fsdp_notice(&opts->watch,
                    "'%s' is on a file system in memory: the checkpoint is not durable: it is gone "
                    "when the machine restarts",
                    dir);
    return FSDP_OK;
}

/* Rank 0 may wait for the lease of the run: it sends signs of life to the other ranks. */
static int report_run_wait(void *context, int64_t done, int64_t total, const char *what)
{
    const save_job *job = context;
    const fsdp_watch *watch = &job->opts->watch;
    fsdp_ctl_report_working(job->ctl, job->ctl->deadline_ms);
    return watch->progress ? watch->progress(watch->context, done, total, what) : 0;
}

static void pass_notice(void *context, const char *text)
{
    const save_job *job = context;
    fsdp_notice(&job->opts->watch, "%s", text);
}

static fsdp_status begin_staging(save_job *job, const char *dir, fsdp_error *err)
{
    FSDP_TRY(fsdp_name_check_step(dir, fsdp_save_step(job->opts), err));
    const fsdp_save_opts *opts = job->opts;
    fsdp_watch watch = {.context = job, .progress = report_run_wait, .notice = pass_notice};
    fsdp_staging_opts how = {
        .durable = !opts->skip_fsync, .overwrite = opts->overwrite, .watch = &watch};
    FSDP_TRY(fsdp_staging_begin(job->io, dir, &how, &job->staging, err));
    job->watch = fsdp_staging_watch(&job->staging, &opts->watch);
    if (strlen(job->staging.path) >= sizeof job->staged)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the path '%.200s...' is too long", dir);
    strcpy(job->staged, job->staging.path);
    return check_place(job, dir, err);
}

/* --- options are equal on all ranks --- */

/* A save and a load use the path that rank 0 gives. Ranks that give another one mean another checkpoint: they
 * are told so, instead of reading or writing that of rank 0. */
enum { PATH_SHOWN = 400 };

/* Equal for equal paths, whatever slashes and dots they are spelled with: "a//b/./" is "a/b". */
static uint64_t path_print(const char *path)
{
    uint64_t print = FSDP_FNV_BEGIN;
    if (path[0] == '/')
        print = fsdp_fnv(print, "/", 1);
    while (*path) {
        size_t size = strcspn(path, "/");
        if (size > 0 && !(size == 1 && path[0] == '.')) {
            print = fsdp_fnv(print, path, size);
            print = fsdp_fnv(print, "/", 1);
        }
        path += size + (path[size] == '/');
    }
    return print;
}

/* Collective. Fails with the path of a rank that gave another one than rank 0. */
static fsdp_status fail_paths(fsdp_ctl *ctl, int rank, const char *path, fsdp_error *err)
{
    char first[PATH_SHOWN] = "", other[PATH_SHOWN] = ""; /* all bytes are sent */
    snprintf(first, sizeof first, "%s", path);
    snprintf(other, sizeof other, "%s", path);
    FSDP_TRY(fsdp_ctl_broadcast(ctl, 0, first, sizeof first, err));
    FSDP_TRY(fsdp_ctl_broadcast(ctl, rank, other, sizeof other, err));
    if (err)
        err->rank = rank;
    return fsdp_fail(err, FSDP_ERR_USAGE, "ranks give different paths: rank %d '%s', rank 0 '%s'",
                     rank, other, first);
}

fsdp_status fsdp_agree_path(fsdp_ctl *ctl, const char *path, fsdp_status mine, fsdp_error *err)
{
    const int ranks = fsdp_ctl_size(ctl);
    const uint64_t print = path ? path_print(path) : 0;
    uint64_t *all = fsdp_alloc((size_t)ranks, sizeof *all);
    if (mine == FSDP_OK && !all)
        mine = fsdp_fail_memory(err, "a comparison of ranks");
    fsdp_status st = fsdp_ctl_agree_allgather(ctl, mine, &print, sizeof print, all, err);
    for (int rank = 1; rank < ranks && st == FSDP_OK; rank++)
        if (all[rank] != all[0])
            st = fail_paths(ctl, rank, path, err);
    fsdp_free(all);
    return st;
}

/* The path, and the options that decide the bytes of a checkpoint; a difference is reported by
 * name. */
typedef struct shared_options {
    int64_t numbers[OPTION_COUNT];
    uint64_t path; /* path_print */
    uint8_t run[16];
} shared_options;

/* One rank's part of the round: its options, and what may differ. */
typedef struct rank_options {
    shared_options shared;
    int64_t index_bytes; /* of its boxes, in a file that all ranks write */
    int64_t memory;
} rank_options;

static const char *const option_names[OPTION_COUNT] = {"kind",      "owners",       "compress",
                                                       "level",     "step",         "skip_fsync",
                                                       "skip_view", "rank0_writes", "overwrite"};

static rank_options local_options(const save_job *job, const char *dir)
{
    const fsdp_save_opts *opts = job->opts;
    const fsdp_save_plan *plan = &job->plan;
    rank_options local = {
        .shared = {.numbers = {opts->kind, opts->owners, opts->compress, opts->level,
                               fsdp_save_step(opts), opts->skip_fsync, opts->skip_view,
                               opts->rank0_writes, opts->overwrite},
                   .path = path_print(dir)},
        .memory = opts->memory};
    memcpy(local.shared.run, opts->run, sizeof local.shared.run);
    if (all_write_one(job))
        local.index_bytes = fsdp_shard_index_bytes(plan->datasets, plan->boxes, plan->box_count);
    return local;
}

/* Collective: every rank sees the same difference. */
static fsdp_status fail_options(save_job *job, const rank_options *all, int rank, const char *dir,
                                fsdp_error *err)
{
    const int64_t *theirs = all[rank].shared.numbers, *first = all[0].shared.numbers;
    for (int i = 0; i < OPTION_COUNT; i++) {
        if (theirs[i] != first[i])
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "ranks save with different options: %s is %lld on rank %d and %lld on "
                             "rank 0",
                             option_names[i], (long long)theirs[i], rank, (long long)first[i]);
    }
    if (all[rank].shared.path != all[0].shared.path)
        return fail_paths(job->ctl, rank, dir, err);
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "ranks save with different options: rank %d has another run uuid than rank 0",
                     rank);
}

static fsdp_status agree_options(save_job *job, const char *dir, fsdp_error *err)
{
    rank_options local = local_options(job, dir),
                 *all = fsdp_alloc((size_t)job->world, sizeof *all);
    fsdp_status st = all ? FSDP_OK : fsdp_fail_memory(err, "a comparison of ranks");
    st = fsdp_ctl_agree_allgather(job->ctl, st, &local, sizeof local, all, err);
    for (int rank = 0; st == FSDP_OK && rank < job->world; rank++) {
        job->index_room += all[rank].index_bytes;
        if (memcmp(&all[rank].shared, &all[0].shared, sizeof local.shared) != 0)
            st = fail_options(job, all, rank, dir, err);
    }
    job->memory = st == FSDP_OK ? all[0].memory : 0;
    fsdp_free(all);
    return st;
}

/* --- files ------------------------------------------------------------------------------------ */

static int threads_of(const save_job *job)
{
    if (job->opts->threads > 0)
        return job->opts->threads;
    int sharing = fsdp_ctl_shares_memory(job->ctl) ? job->world : 1;
    if (rank0_writes_all(job))
        sharing = 1;
    int share = fsdp_pool_cores() / sharing;
    return share > 0 ? share : 1;
}

/* Options of file `number`; the path is freed by the caller. */
static fsdp_status file_options(save_job *job, int number, int count, fsdp_shard_opts *opts_out,
                                char **path_out, fsdp_error *err)
{
    char name[FSDP_SHARD_NAME_SIZE];
    fsdp_shard_name(number, count, name);
    *path_out = fsdp_path_join(job->staged, name);
    if (!*path_out)
        return fsdp_fail_memory(err, "a path");
    *opts_out = (fsdp_shard_opts){.io = job->io,
                                  .path = *path_out,
                                  .encode = job->opts->compress,
                                  .level = job->opts->level,
                                  .threads = threads_of(job),
                                  .sync = !job->opts->skip_fsync,
                                  .alive = fsdp_meter_alive,
                                  .alive_user = &job->meter};
    opts_out->id = (fsdp_shard_id){.step = fsdp_save_step(job->opts),
                                   .rank = (uint32_t)job->rank,
                                   .world = (uint32_t)(job->whole ? 1 : job->world)};
    memcpy(opts_out->id.run, job->run, sizeof job->run);
    return FSDP_OK;
}

static fsdp_status create_file(save_job *job, int number, int count, int64_t index_room,
                               fsdp_error *err)
{
    fsdp_shard_opts opts;
    char *path = NULL;
    fsdp_flow("statedict/save/save.c", "create file %d of %d", number, count);
    FSDP_TRY(file_options(job, number, count, &opts, &path, err));
    opts.index_room = index_room;
    fsdp_status st = fsdp_shard_create(
        &opts,
        &(fsdp_shard_layout){job->plan.datasets, job->plan.dataset_count, job->plan.links,
                             job->plan.link_count, job->plan.boxes, job->plan.box_count},
        &job->writer, err);
    fsdp_free(path);
    return st;
}

static fsdp_status join_file(save_job *job, fsdp_error *err)
{
    fsdp_shard_opts opts;
    char *path = NULL;
    fsdp_flow("statedict/save/save.c", "join the file of rank 0");
    FSDP_TRY(file_options(job, 0, 1, &opts, &path, err));
    fsdp_status st = fsdp_shard_join(&opts, job->plan.datasets, job->plan.boxes,
                                     job->plan.box_count, &job->writer, err);
    fsdp_free(path);
    return st;
}

static fsdp_status finish_file(save_job *job, fsdp_error *err)
{
    fsdp_shard_writer *writer = job->writer;
    fsdp_flow("statedict/save/save.c", "finish the file");
    job->writer = NULL;
    return fsdp_shard_finish(writer, &job->record, err);
}

/* --- the place of the files --- */

static fsdp_status begin_on_rank0(save_job *job, const char *dir, fsdp_error *err)
{
    if (job->rank != 0)
        return FSDP_OK;
    FSDP_TRY(begin_staging(job, dir, err));
    return all_write_one(job) ? create_file(job, 0, 1, job->index_room, err) : FSDP_OK;
}

/* Sent by rank 0: the staging directory, and the offsets of datasets in a file that all ranks
 * write. */
typedef struct save_place {
    char staged[PATH_ROOM];
    int64_t offsets[];
} save_place;

static fsdp_status stage(save_job *job, const char *dir, fsdp_error *err)
{
    fsdp_flow("statedict/save/save.c", "stage '%s'", dir);
    fsdp_shard_dataset *datasets = job->plan.datasets;
    size_t count = all_write_one(job) ? job->plan.dataset_count : 0;
    save_place *place = fsdp_alloc(PATH_ROOM / sizeof(int64_t) + count, sizeof(int64_t));
    fsdp_status st = place ? begin_on_rank0(job, dir, err) : fsdp_fail_memory(err, "file offsets");
    if (st == FSDP_OK)
        memcpy(place->staged, job->staged, PATH_ROOM);
    for (size_t i = 0; st == FSDP_OK && i < count; i++)
        place->offsets[i] = datasets[i].offset;
    st = fsdp_ctl_agree_broadcast(job->ctl, st, 0, place, sizeof *place + count * sizeof(int64_t),
                                  err);
    if (st == FSDP_OK)
        memcpy(job->staged, place->staged, PATH_ROOM);
    for (size_t i = 0; st == FSDP_OK && i < count; i++)
        datasets[i].offset = place->offsets[i];
    fsdp_free(place);
    return st;
}

/* --- writing ---------------------------------------------------------------------------------- */

/* Sharded and local: every rank for itself. */
static fsdp_status write_rank_file(save_job *job, fsdp_error *err)
{
    FSDP_TRY(create_file(job, job->rank, job->world, 0, err));
    fsdp_flow("statedict/save/save.c", "put %zu boxes", job->plan.box_count);
    FSDP_TRY(fsdp_put_plan(job->writer, &job->plan, job->waves, &job->meter, err));
    return finish_file(job, err);
}

/* --- full, all ranks writing --- */

static fsdp_status send_segment(save_job *job, const fsdp_text *segment, fsdp_error *err)
{
    int64_t size = (int64_t)segment->size;
    FSDP_TRY(fsdp_ctl_send(job->ctl, 0, &size, sizeof size, err));
    for (size_t at = 0; at < segment->size; at += SEGMENT_PIECE) {
        size_t left = segment->size - at;
        FSDP_TRY(fsdp_ctl_send(job->ctl, 0, segment->data + at,
                               left < SEGMENT_PIECE ? left : SEGMENT_PIECE, err));
    }
    return FSDP_OK;
}

/* Receives everything that the rank sends, also after a failure on rank 0 (*local). */
static fsdp_status take_segment(save_job *job, int rank, char *buffer, fsdp_status *local,
                                fsdp_error *err)
{
    int64_t size = 0;
    FSDP_TRY(fsdp_ctl_recv(job->ctl, rank, &size, sizeof size, err));
    for (int64_t at = 0; at < size; at += SEGMENT_PIECE) {
        size_t piece = (size_t)(size - at < SEGMENT_PIECE ? size - at : SEGMENT_PIECE);
        FSDP_TRY(fsdp_ctl_recv(job->ctl, rank, buffer, piece, err));
        if (*local == FSDP_OK)
            *local = fsdp_shard_put_index(job->writer, buffer, piece, err);
    }
    return FSDP_OK;
}

/* After the ranks agree that all boxes are written, rank 0 takes the index segments into the
 * file. */
static fsdp_status collect_segments(save_job *job, fsdp_status mine, fsdp_text *segment,
                                    fsdp_error *err)
{
    fsdp_status local = mine == FSDP_OK ? fsdp_shard_segment(job->writer, segment, err) : mine;
    char *buffer = local == FSDP_OK ? fsdp_alloc_pages(SEGMENT_PIECE) : NULL;
    if (local == FSDP_OK && !buffer)
        local = fsdp_fail_memory(err, "index segments");
    fsdp_status moved = fsdp_ctl_agree(job->ctl, local, err);
    if (job->rank == 0 && moved == FSDP_OK)
        local = fsdp_shard_put_index(job->writer, segment->data, segment->size, err);
    if (job->rank != 0 && moved == FSDP_OK)
        moved = send_segment(job, segment, err);
    for (int r = 1; job->rank == 0 && r < job->world && moved == FSDP_OK; r++)
        moved = take_segment(job, r, buffer, &local, err);
    fsdp_free(buffer);
    return moved != FSDP_OK ? moved : local;
}

static fsdp_status write_shared_file(save_job *job, fsdp_error *err)
{
    fsdp_status st = job->rank == 0 ? FSDP_OK : join_file(job, err);
    fsdp_flow("statedict/save/save.c", "put %zu boxes", job->plan.box_count);
    if (st == FSDP_OK)
        st = fsdp_put_plan(job->writer, &job->plan, job->waves, &job->meter, err);
    fsdp_text segment = {0};
    st = collect_segments(job, st, &segment, err);
    fsdp_text_release(&segment);
    return st == FSDP_OK ? finish_file(job, err) : st;
}

/* --- full, rank 0 writing --- */

static fsdp_status put_slab(void *context, const fsdp_entry *entry, int64_t first, int64_t count,
                            const void *data, fsdp_error *err)
{
    save_job *job = context;
    if (count == 0)
        return FSDP_OK;
    size_t number = (size_t)fsdp_sd_find(job->whole, entry->name, entry->name_size);
    fsdp_shard_piece piece = {fsdp_save_plan_find(&job->plan, number, 0), first, count, data};
    FSDP_TRY(fsdp_shard_write(job->writer, &piece, 1, err));
    return fsdp_meter_add(&job->meter, count * (int64_t)fsdp_dtype_size(entry->dtype), entry->name,
                          entry->name_size, err);
}

static fsdp_status write_gathered_file(save_job *job, fsdp_error *err)
{
    fsdp_status st = FSDP_OK;
    if (job->rank == 0) {
        fsdp_box_plan_input input = {job->whole, FSDP_FULL, job->opts->compress, job->owners, 0};
        st = fsdp_box_plan_save(&input, &job->plan, err);
        job->meter.total = job->plan.bytes;
        if (st == FSDP_OK)
            st = create_file(job, 0, 1, 0, err);
        if (st == FSDP_OK)
            st = fsdp_put_plan(job->writer, &job->plan, NULL, NULL, err);
    }
    fsdp_gather how = {.memory = job->memory,
                       .is_described = true,
                       .waves = job->waves,
                       .visit = put_slab,
                       .context = job};
    FSDP_TRY(gather_slabs(job->sd, job->ctl, &how, st, err));
    return job->rank == 0 ? finish_file(job, err) : FSDP_OK;
}

/* --- the end ---------------------------------------------------------------------------------- */

static fsdp_status publish(save_job *job, const fsdp_file_record *records, fsdp_error *err)
{
    const fsdp_save_opts *opts = job->opts;
    FSDP_TRY(fsdp_meter_check(&job->meter, err));
    fsdp_publication publication = {.staging = &job->staging,
                                    .records = records,
                                    .owners = job->owners,
                                    .with_view = !opts->skip_view,
                                    .watch = &job->watch};
    publication.manifest =
        (fsdp_manifest){.kind = opts->kind,
                        .step = fsdp_save_step(opts),
                        .world = job->whole ? 1 : job->world,
                        .owners = opts->owners,
                        .compressed = opts->compress,
                        .file_count = opts->kind == FSDP_FULL ? 1 : job->world,
                        .sd = job->whole ? job->whole : (fsdp_sd *)(uintptr_t)job->sd};
    memcpy(publication.manifest.run, job->run, sizeof job->run);
    FSDP_TRY(fsdp_publish(&publication, err));
    job->is_published = true;
    return FSDP_OK;
}

/* The outcome of each rank's writes and the record of its file travel in one round. */
static fsdp_status commit(save_job *job, fsdp_status mine, fsdp_error *err)
{
    fsdp_flow("statedict/save/save.c", "gather what the manifest says of the files");
    fsdp_file_record *records = fsdp_alloc((size_t)job->world, sizeof *records);
    if (mine == FSDP_OK && !records)
        mine = fsdp_fail_memory(err, "a manifest");
    job->may_be_published = mine == FSDP_OK && job->rank != 0; /* once rank 0 has the last record */
    fsdp_status st =
        fsdp_ctl_agree_allgather(job->ctl, mine, &job->record, sizeof job->record, records, err);
    if (st == FSDP_OK) {
        if (job->rank == 0)
            st = publish(job, records, err);
        st = fsdp_ctl_agree(job->ctl, st, err);
    }
    fsdp_free(records);
    return st;
}

/* Rank 0 has written and others have not: calls progress during the wait, which may stop it. */
static void report_rank_wait(void *context)
{
    static const char what[] = "waiting for other ranks";
    save_job *job = context;
    (void)fsdp_meter_add(&job->meter, 0, what, sizeof what - 1, NULL);
}

static fsdp_status write_and_commit(save_job *job, fsdp_error *err)
{
    fsdp_status st;
    if (rank0_writes_all(job))
        st = write_gathered_file(job, err);
    else if (job->opts->kind == FSDP_FULL)
        st = write_shared_file(job, err);
    else
        st = write_rank_file(job, err);
    return commit(job, st, err);
}

static fsdp_status save(save_job *job, const char *dir, fsdp_status mine, fsdp_error *err)
{
    fsdp_flow("statedict/save/save.c", "begin: rank %d of %d", job->rank, job->world);
    fsdp_status st = mine == FSDP_OK ? prepare(job, err) : mine;
    FSDP_TRY(fsdp_describe_agree(job->sd, true, job->ctl, st, err));
    FSDP_TRY(agree_options(job, dir, err));
    fsdp_meter_init(&job->meter, &job->watch, job->plan.bytes);
    fsdp_meter_join(&job->meter, job->ctl);
    fsdp_ctl_set_waiting(job->ctl, report_rank_wait, job);
    st = stage(job, dir, err);
    if (st == FSDP_OK)
        st = write_and_commit(job, err);
    fsdp_ctl_set_waiting(job->ctl, NULL, NULL);
    fsdp_shard_discard(job->writer);
    if (st != FSDP_OK && job->rank == 0)
        fsdp_staging_abandon(&job->staging, err);
    return st;
}

/* All ranks were cancelled: finds out whether by the caller or because rank 0 lost the lease. */
static fsdp_status explain_cancelled(const save_job *job, fsdp_error *err)
{
    fsdp_error cancelled = *err;
    fsdp_status st = fsdp_staging_judge(&job->staging, FSDP_ERR_CANCELLED, err);
    FSDP_TRY(fsdp_ctl_agree(job->ctl, st == FSDP_ERR_EXISTS ? st : FSDP_OK, err));
    *err = cancelled;
    return FSDP_ERR_CANCELLED;
}

static void add_to_error(fsdp_error *err, const char *what)
{
    size_t used = strlen(err->text);
    snprintf(err->text + used, sizeof err->text - used, "; %s", what);
}

/* A rank was lost: appends the state of the checkpoint, as far as this rank knows it. */
static void explain_lost_rank(const save_job *job, fsdp_error *err)
{
    if (job->is_published)
        add_to_error(err, "the checkpoint is saved nevertheless");
    else if (job->may_be_published)
        add_to_error(err, "the checkpoint is saved whole or not at all, and rank 0 reports which");
    else if (err)
        add_to_error(err, "nothing was saved, and existing checkpoints are unchanged");
}

static fsdp_status explain(const save_job *job, fsdp_status status, fsdp_error *err)
{
    if (status == FSDP_ERR_CANCELLED)
        status = explain_cancelled(job, err);
    if (status == FSDP_ERR_PEER)
        explain_lost_rank(job, err);
    return status;
}

/* fsdp_save_begun. On rank 0, *lease_out is the lease of the run if DIR is a step and the save succeeded;
 * else NULL. */
static fsdp_status save_leased(const fsdp_save_call *call, fsdp_lease **lease_out, fsdp_error *err)
{
    fsdp_error local = {0};
    static const fsdp_save_opts defaults = {0};
    save_job job = {.sd = call->sd,
                    .ctl = call->ctl,
                    .waves = call->waves,
                    .opts = call->opts ? call->opts : &defaults,
                    .rank = fsdp_ctl_rank(call->ctl),
                    .world = fsdp_ctl_size(call->ctl)};
    job.io = fsdp_access_io(&job.opts->access);
    job.watch = job.opts->watch;
    err = err ? err : &local;
    fsdp_status st = explain(&job, save(&job, call->dir, call->mine, err), err);
    *lease_out = st == FSDP_OK ? fsdp_staging_move_lease(&job.staging) : NULL;
    fsdp_staging_release(&job.staging);
    fsdp_save_plan_release(&job.plan);
    fsdp_sd_free(job.whole);
    fsdp_free(job.owners);
    return st;
}

fsdp_status fsdp_save_begun(const fsdp_save_call *call, fsdp_error *err)
{
    fsdp_lease *lease;
    fsdp_status st = save_leased(call, &lease, err);
    fsdp_lease_release(lease);
    return st;
}

fsdp_status fsdp_sd_save(const fsdp_sd *sd, fsdp_ctl *ctl, const char *dir,
                         const fsdp_save_opts *opts, fsdp_error *err)
{
    FSDP_NEED(err, sd, ctl);
    fsdp_status mine = FSDP_GIVEN(err, dir);
    const char *outer = fsdp_ctl_begin_public(ctl, "fsdp_sd_save");
    fsdp_status st = fsdp_save_begun(&(fsdp_save_call){sd, ctl, dir, opts, mine, NULL}, err);
    fsdp_ctl_end_public(ctl, outer);
    return st;
}

/* === a step of a run ========================================================================== */

/*
 * Saves a step of a run: one writer at a time under the lease of the run, then the hint and
 * retention. Retention removes an older step only after the new one is saved.
 */

typedef struct run_job {
    fsdp_ctl *ctl;
    const char *run;
    fsdp_io *io;
    fsdp_save_opts opts;
    int64_t step;      /* which opts point to */
    fsdp_lease *lease; /* rank 0, once the step is saved */
    uintptr_t thread;  /* that may use ctl */
    char name[FSDP_STEP_NAME_SIZE];
    char *path;
} run_job;

/* Syncs the parent of the run: its directory must survive a power cut like the checkpoint in it. */
static fsdp_status sync_parent(const run_job *job, fsdp_error *err)
{
    char *path = NULL, *parent = NULL;
    FSDP_TRY(fsdp_path_split(job->run, &path, &parent, err));
    fsdp_status st = fsdp_io_sync_dir(job->io, parent, err);
    fsdp_free(path);
    fsdp_free(parent);
    return st;
}

static fsdp_status make_run_directory(const run_job *job, fsdp_error *err)
{
    int errnum = job->io->ops->mkdir(job->io, job->run);
    if (errnum < 0 && errnum != -EEXIST)
        return fsdp_fail_errno(err, -errnum, "cannot create the run directory '%s'", job->run);
    return job->opts.skip_fsync ? FSDP_OK : sync_parent(job, err);
}

static fsdp_status prepare_run(run_job *job, fsdp_error *err)
{
    fsdp_status st = FSDP_OK;
    fsdp_step_name(job->step, job->name);
    job->path = fsdp_path_join(job->run, job->name);
    if (!job->path)
        st = fsdp_fail_memory(err, "a path");
    if (job->step == FSDP_NO_STEP)
        st = fsdp_fail(err, FSDP_ERR_USAGE,
                       "a checkpoint of a run is named after its step; give a step");
    else if (job->step < 0)
        st = fsdp_fail(err, FSDP_ERR_USAGE, "step %lld is negative", (long long)job->step);
    if (st == FSDP_OK)
        st = fsdp_retention_check(job->opts.retain, err);
    if (st == FSDP_OK && fsdp_ctl_rank(job->ctl) == 0)
        st = make_run_directory(job, err);
    return st;
}

/* For people who look into the directory; nothing of ours reads it. */
static fsdp_status write_hint(const run_job *job, fsdp_error *err)
{
    char text[FSDP_STEP_NAME_SIZE + 1];
    char *path = fsdp_path_join(job->run, "latest");
    if (!path)
        return fsdp_fail_memory(err, "a path");
    size_t size = strlen(job->name);
    memcpy(text, job->name, size);
    text[size] = '\n';
    fsdp_status st = fsdp_io_replace_file(job->io, path, text, size + 1, err);
    fsdp_free(path);
    return st;
}

/* The other ranks have returned and wait for rank 0 in their next call: sends them signs of
 * life. */
static int report_to_ranks(void *context, int64_t done, int64_t total, const char *what)
{
    const run_job *job = context;
    const fsdp_watch *watch = &job->opts.watch;
    if (job->thread == fsdp_thread_number())
        fsdp_ctl_report_working(job->ctl, job->ctl->deadline_ms);
    return watch->progress ? watch->progress(watch->context, done, total, what) : 0;
}

/* Pins the step just saved: after a return to an earlier step it may be lower than others. */
static fsdp_status retain_others(run_job *job, fsdp_error *err)
{
    const fsdp_retention *asked = job->opts.retain;
    fsdp_retain_opts opts = {.apply = true,
                             .threads = job->opts.threads,
                             .memory = job->opts.memory,
                             .watch = {.context = job, .progress = report_to_ranks},
                             .access.disk = job->io};
    if (!asked)
        return fsdp_run_retain_held(job->lease, job->run, NULL, &opts, err);
    fsdp_retention policy = *asked;
    int64_t *pins = fsdp_alloc(asked->pin_count + 1, sizeof *pins);
    if (!pins)
        return fsdp_fail_memory(err, "a list of pinned steps");
    if (asked->pin_count > 0)
        memcpy(pins, asked->pins, asked->pin_count * sizeof *pins);
    pins[policy.pin_count++] = job->step;
    policy.pins = pins;
    fsdp_status st = fsdp_run_retain_held(job->lease, job->run, &policy, &opts, err);
    fsdp_free(pins);
    return st;
}

static void notify_untidy(const run_job *job, const char *what, fsdp_status status,
                          const fsdp_error *err)
{
    if (status != FSDP_OK)
        fsdp_notice(&job->opts.watch, "'%s' is saved, but %s failed: %s", job->path, what,
                    err->text);
}

/* The checkpoint is saved: a failure from here on is a notice and not an error. */
static void tidy_run(run_job *job)
{
    fsdp_error err = {0};
    notify_untidy(job, "the hint 'latest'", write_hint(job, &err), &err);
    notify_untidy(job, "tidying the run", retain_others(job, &err), &err);
}

static fsdp_status run_save(run_job *job, const fsdp_save_call *begun, fsdp_error *err)
{
    fsdp_status mine = begun->mine;
    if (mine == FSDP_OK)
        mine = prepare_run(job, err);
    fsdp_save_call call = *begun;
    call.dir = job->path;
    call.opts = &job->opts;
    call.mine = mine;
    FSDP_TRY(save_leased(&call, &job->lease, err));
    if (fsdp_ctl_rank(job->ctl) == 0)
        tidy_run(job);
    return FSDP_OK;
}

fsdp_status fsdp_run_save_begun(const fsdp_save_call *call, int64_t step, fsdp_error *err)
{
    run_job job = {.ctl = call->ctl, .run = call->dir, .step = step};
    if (call->opts)
        job.opts = *call->opts;
    job.io = fsdp_access_io(&job.opts.access);
    job.opts.step = &job.step;
    job.thread = fsdp_thread_number();
    job.opts.overwrite = false;
    fsdp_status st = run_save(&job, call, err);
    fsdp_lease_release(job.lease);
    fsdp_free(job.path);
    return st;
}

fsdp_status fsdp_run_save(const fsdp_sd *sd, fsdp_ctl *ctl, const char *run, int64_t step,
                          const fsdp_save_opts *opts, fsdp_error *err)
{
    FSDP_NEED(err, sd, ctl);
    fsdp_status mine = FSDP_GIVEN(err, run);
    const char *outer = fsdp_ctl_begin_public(ctl, "fsdp_run_save");
    fsdp_status st =
        fsdp_run_save_begun(&(fsdp_save_call){sd, ctl, run, opts, mine, NULL}, step, err);
    fsdp_ctl_end_public(ctl, outer);
    return st;
}
