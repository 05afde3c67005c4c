/*
 * The full state on rank 0, streamed: every tensor in row-major slabs, each put together from the
 * boxes of the ranks that own them. Messages go through the bounded window of the control plane, so
 * memory is one slab on rank 0 and one piece of it on each other rank.
 *
 * After a local failure rank 0 receives, and other ranks send, every message, so that no rank waits in vain.
 */
#include "base/data/box_internal.h"
#include "statedict/ctl/ctl_backend.h"
#include "statedict/save/save_internal.h"
#include "statedict/sd/describe.h"
#include "statedict/transfer/pipeline.h"
#include "statedict/transfer/box_plan.h"
#include "statedict/select/relayout.h"

#include <string.h>

#include "base/core/given.h"

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

static fsdp_status prepare(gather_job *job, int64_t memory, fsdp_error *err)
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

fsdp_status fsdp_gather_slabs(const fsdp_sd *sd, fsdp_ctl *ctl, const fsdp_gather *how,
                              fsdp_status mine, fsdp_error *err)
{
    gather_job job = {.sd = sd,
                      .ctl = ctl,
                      .waves = how->waves,
                      .visit = how->visit,
                      .context = how->context,
                      .err = err};
    if (mine == FSDP_OK)
        mine = prepare(&job, how->memory, err);
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
        st = fsdp_ctl_agree(ctl, fsdp_gather_slabs(sd, ctl, &how, mine, err), err);
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
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "tensor '%s' has no place in the full state",
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
