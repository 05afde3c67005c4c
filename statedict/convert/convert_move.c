/* Moves the slabs of a conversion: reads, casts, writes and reads them back. See convert_job.h. */
#include "statedict/convert/convert_job.h"

#include "base/data/box_internal.h"
#include "base/data/flow.h"
#include "base/core/pool.h"
#include "statedict/sd/layout_internal.h"

#include <string.h>

/* --- cutting ---------------------------------------------------------------------------------- */

/* The tensor of an entry of the target; of an alias, its target. */
static const fsdp_entry *tensor_at(const convert_job *job, size_t entry)
{
    return fsdp_sd_at(job->sd, fsdp_sd_tensor_of(job->sd, entry));
}

static int64_t slab_elements(const convert_job *job, size_t entry)
{
    fsdp_dtype from = fsdp_convert_source_dtype(job, entry), to = tensor_at(job, entry)->dtype;
    return job->slab_bytes / (int64_t)fsdp_recast_size(from, to);
}

static bool next_slab(const convert_job *job, size_t entry, fsdp_slabs *slabs, fsdp_box *slab_out)
{
    const fsdp_entry *tensor = tensor_at(job, entry);
    return fsdp_slabs_next(slabs, tensor->ndim, tensor->shape, slab_elements(job, entry), slab_out);
}

fsdp_status fsdp_convert_number_slabs(convert_job *job, fsdp_error *err)
{
    size_t count = fsdp_sd_count(job->sd);
    int64_t number = 0;
    fsdp_box slab;
    job->first_slab = fsdp_alloc(count + 1, sizeof *job->first_slab);
    if (!job->first_slab)
        return fsdp_fail_memory(err, "a conversion");
    for (size_t i = 0; i < count; i++) {
        fsdp_slabs slabs = {0};
        job->first_slab[i] = number;
        while (fsdp_convert_has_data(job, i) && next_slab(job, i, &slabs, &slab))
            number++;
    }
    job->first_slab[count] = number;
    if (job->target->check || job->opts.skip_verify)
        return FSDP_OK;
    job->hashes = fsdp_alloc((size_t)number, sizeof *job->hashes);
    return job->hashes ? FSDP_OK : fsdp_fail_memory(err, "a conversion");
}

static size_t entry_of_slab(const convert_job *job, int64_t number)
{
    size_t low = 0, high = fsdp_sd_count(job->sd);
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (job->first_slab[middle] <= number)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* The state of one worker. */
typedef struct slab_worker {
    convert_job *job;
    fsdp_checkpoint *from; /* the source, or the result being read back */
    size_t entry, tensor;  /* of the target; of `from` */
    fsdp_dtype stored, wanted;
    int64_t number; /* of the slab */
    fsdp_box slab;
    char *data;
    int64_t used; /* bytes of data */
    fsdp_read_target *targets;
    convert_piece *pieces; /* per read target: its place in the result */
    size_t count, target_room, piece_room;
    fsdp_reader reader;
    fsdp_hasher *hasher;
    atomic_llong next_share; /* when workers fill the slab together */
} slab_worker;

static fsdp_status add_piece(void *context, int rank, size_t part, const fsdp_box *box,
                             fsdp_error *err)
{
    slab_worker *work = context;
    const convert_job *job = work->job;
    fsdp_box shared;
    size_t n = work->count;
    bool is_at_work = job->written || (rank >= job->first_file && rank < job->end_file);
    if (!is_at_work || !fsdp_box_intersect(box, &work->slab, &shared))
        return FSDP_OK;
    if (!fsdp_grow(&work->targets, &work->target_room, n + 1, sizeof *work->targets) ||
        !fsdp_grow(&work->pieces, &work->piece_room, n + 1, sizeof *work->pieces))
        return fsdp_fail_memory(err, "a slab of a tensor");
    int64_t inside[FSDP_MAX_DIMS], count = fsdp_box_count(&shared);
    char *data = work->data + work->used;
    for (int d = 0; d < box->ndim; d++)
        inside[d] = shared.lo[d] - box->lo[d];
    work->pieces[n] = (convert_piece){.entry = work->entry,
                                      .rank = rank,
                                      .part = part,
                                      .first = fsdp_box_position(box->ndim, box->len, inside),
                                      .count = count,
                                      .data = data};
    work->targets[n] = (fsdp_read_target){
        shared, work->stored, fsdp_recast_source(data, count, work->stored, work->wanted)};
    work->used += count * (int64_t)fsdp_recast_size(work->stored, work->wanted);
    work->count++;
    return FSDP_OK;
}

static fsdp_status cut_slab(slab_worker *work, fsdp_error *err)
{
    const convert_job *job = work->job;
    size_t tensor = fsdp_sd_tensor_of(job->sd, work->entry);
    work->count = 0;
    work->used = 0;
    return fsdp_box_plan_stored(fsdp_sd_at(job->sd, tensor), job->owners[tensor], &work->slab,
                                add_piece, work, err);
}

/* --- reading ---------------------------------------------------------------------------------- */

static fsdp_status read_slab(slab_worker *work, fsdp_reader *reader, fsdp_work_counter *counter,
                             fsdp_error *err)
{
    fsdp_read_request request = {work->tensor, work->targets, work->count, reader, counter};
    return fsdp_checkpoint_get(work->from, &request, err);
}

static fsdp_status fill_share(void *context, size_t worker, fsdp_error *err)
{
    slab_worker *work = context;
    fsdp_reader reader = {0};
    fsdp_work_counter counter;
    (void)worker;
    fsdp_work_counter_begin(&counter, &work->next_share);
    fsdp_status st = read_slab(work, &reader, &counter, err);
    fsdp_reader_release(&reader);
    return st;
}

static fsdp_status fill_slab(slab_worker *work, fsdp_error *err)
{
    int threads = work->job->threads;
    if (work->job->workers == threads)
        return read_slab(work, &work->reader, NULL, err);
    atomic_store(&work->next_share, 0);
    return fsdp_parallel(threads, (size_t)threads, fill_share, work, err);
}

/* Casts a slab in its memory. */
static fsdp_status cast_slab(slab_worker *work, fsdp_cast_tally *sum, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(work->job->sd, work->entry);
    for (size_t i = 0; i < work->count && work->stored != work->wanted; i++) {
        fsdp_cast_tally tally = {0};
        fsdp_recast_box box = {.name = entry->name,
                               .name_size = entry->name_size,
                               .box = &work->targets[i].box,
                               .from = work->stored,
                               .to = work->wanted,
                               .source = work->targets[i].data};
        FSDP_TRY(fsdp_recast(&box, work->job->opts.select.on_overflow, &tally, err));
        fsdp_cast_sum_add(&work->job->cast_sums[work->pieces[i].rank], &tally);
        fsdp_cast_tally_add(sum, &tally);
    }
    return FSDP_OK;
}

static int64_t slab_bytes(const slab_worker *work, fsdp_dtype dtype)
{
    int64_t count = 0;
    for (size_t i = 0; i < work->count; i++)
        count += work->pieces[i].count;
    return count * (int64_t)fsdp_dtype_size(dtype);
}

static fsdp_hash hash_slab(slab_worker *work)
{
    fsdp_hasher_reset(work->hasher);
    for (size_t i = 0; i < work->count; i++)
        fsdp_hasher_add(work->hasher, work->pieces[i].data,
                        (size_t)work->pieces[i].count * fsdp_dtype_size(work->wanted));
    return fsdp_hasher_value(work->hasher);
}

/* --- resuming ----------------------------------------------------------------------------------- */

/* The record of a written slab; the tally only when tensors are cast. */
typedef struct slab_note {
    fsdp_hash hash;
    fsdp_cast_tally tally;
} slab_note;

enum { NOTED_LEAST = 64 << 10 }; /* smaller slabs are faster to convert again than to look up */

static size_t note_size(const convert_job *job)
{
    return job->casts ? sizeof(slab_note) : sizeof(fsdp_hash);
}

/* Reads a piece from its place in the result. */
static bool read_piece(const convert_job *job, const convert_piece *piece, size_t element_size)
{
    fsdp_target_place place;
    fsdp_file *file = NULL;
    if (job->target->locate(job, piece, &place, NULL) != FSDP_OK)
        return false;
    char *path = place.file[0] ? fsdp_path_join(job->place.path, place.file)
                               : fsdp_strndup(job->place.path, strlen(job->place.path));
    int64_t offset = place.offset + piece->first * (int64_t)element_size;
    bool is_read = path && job->io->ops->open(job->io, path, FSDP_IO_READ, &file) == 0 &&
                   fsdp_io_read(file, path, piece->data, (size_t)piece->count * element_size,
                                offset, NULL) == FSDP_OK;
    (void)fsdp_io_close(&file, path, NULL); /* only read */
    fsdp_free(path);
    return is_read;
}

/* True when an earlier conversion wrote the slab; it is then in memory, and the note filled in. */
static bool is_there(slab_worker *work, slab_note *note)
{
    const convert_job *job = work->job;
    slab_note noted = {0};
    if (!job->place.is_taken_up || !job->hashes || !job->target->locate ||
        slab_bytes(work, work->wanted) < NOTED_LEAST ||
        !fsdp_resume_get(&job->place.notes, work->number, &noted, note_size(job)))
        return false;
    for (size_t i = 0; i < work->count; i++)
        if (!read_piece(job, &work->pieces[i], fsdp_dtype_size(work->wanted)))
            return false;
    fsdp_hash hash = hash_slab(work);
    if (memcmp(&noted.hash, &hash, sizeof hash) != 0)
        return false;
    fsdp_cast_sum_add(&job->cast_sums[work->pieces[0].rank], &noted.tally);
    *note = noted;
    return true;
}

/* --- a slab ----------------------------------------------------------------------------------- */

static fsdp_status move_slab(slab_worker *work, fsdp_error *err)
{
    convert_job *job = work->job;
    const fsdp_entry *entry = fsdp_sd_at(job->sd, work->entry);
    slab_note note = {0};
    FSDP_TRY(cut_slab(work, err));
    if (work->count == 0)
        return FSDP_OK; /* the slab belongs to other groups */
    fsdp_flow_box("statedict/convert/convert_move.c", "move", entry->name, entry->name_size,
                  &work->slab);
    bool was_there = is_there(work, &note);
    if (!was_there) {
        FSDP_TRY(fill_slab(work, err));
        FSDP_TRY(cast_slab(work, &note.tally, err));
    }
    if (job->hashes && !was_there)
        note.hash = hash_slab(work);
    if (job->hashes)
        job->hashes[work->number] = note.hash;
    fsdp_flow("statedict/convert/convert_move.c", "write %zu pieces", work->count);
    for (size_t i = 0; i < work->count; i++)
        FSDP_TRY(job->target->write(job, &work->pieces[i], err));
    if (job->hashes && !was_there && slab_bytes(work, work->wanted) >= NOTED_LEAST)
        fsdp_resume_put(&job->place.notes, work->number, &note, note_size(job));
    return fsdp_meter_add(&job->meter, slab_bytes(work, work->stored), entry->name,
                          entry->name_size, err);
}

static fsdp_status check_slab(slab_worker *work, fsdp_error *err)
{
    convert_job *job = work->job;
    const fsdp_entry *entry = fsdp_sd_at(job->sd, work->entry);
    char name[160];
    FSDP_TRY(cut_slab(work, err));
    fsdp_flow_box("statedict/convert/convert_move.c", "compare", entry->name, entry->name_size,
                  &work->slab);
    FSDP_TRY(fill_slab(work, err));
    fsdp_hash hash = hash_slab(work);
    if (memcmp(&hash, &job->hashes[work->number], sizeof hash) != 0)
        return fsdp_fail(
            err, FSDP_ERR_IO, "the data in '%s' differs from the data written: tensor '%s'",
            job->place.path, fsdp_printable(entry->name, entry->name_size, name, sizeof name));
    return fsdp_meter_add(&job->meter, slab_bytes(work, work->wanted), entry->name,
                          entry->name_size, err);
}

/* --- all slabs -------------------------------------------------------------------------------- */

static void take_entry(slab_worker *work, size_t entry)
{
    const convert_job *job = work->job;
    size_t there = job->written ? job->written_entry[entry] : job->source[entry];
    work->entry = entry;
    work->tensor = fsdp_sd_tensor_of(work->from->manifest.sd, there);
    work->stored = fsdp_sd_at(work->from->manifest.sd, work->tensor)->dtype;
    work->wanted = tensor_at(job, entry)->dtype;
}

/* Moves a slab, or for an ordered target all slabs of an entry. */
static fsdp_status work_unit(slab_worker *work, int64_t unit, fsdp_error *err)
{
    const convert_job *job = work->job;
    bool is_entry = job->target->is_ordered;
    size_t entry = is_entry ? (size_t)unit : entry_of_slab(job, unit);
    int64_t end = is_entry ? job->first_slab[entry + 1] : unit + 1;
    fsdp_slabs slabs = {0};
    work->number = job->first_slab[entry];
    if (work->number == end)
        return FSDP_OK;
    take_entry(work, entry);
    for (; work->number < end; work->number++) {
        next_slab(job, entry, &slabs, &work->slab);
        if (is_entry || work->number == unit)
            FSDP_TRY(job->written ? check_slab(work, err) : move_slab(work, err));
    }
    return FSDP_OK;
}

static fsdp_status run_worker(void *context, size_t worker, fsdp_error *err)
{
    convert_job *job = context;
    size_t entries = fsdp_sd_count(job->sd);
    int64_t units = job->target->is_ordered ? (int64_t)entries : job->first_slab[entries];
    slab_worker work = {.job = job,
                        .from = job->written ? job->written : job->from,
                        .data = fsdp_alloc_pages((size_t)job->slab_bytes),
                        .hasher = fsdp_hasher_create()};
    fsdp_status st = !work.data     ? fsdp_fail_slab(job->slab_bytes, job->threads, err)
                     : !work.hasher ? fsdp_fail_memory(err, "a conversion")
                                    : FSDP_OK;
    (void)worker;
    for (int64_t i; st == FSDP_OK && (i = atomic_fetch_add(&job->next, 1)) < units;)
        st = work_unit(&work, i, err);
    if (st != FSDP_OK)
        atomic_store(&job->next, units);
    fsdp_reader_release(&work.reader);
    fsdp_hasher_free(work.hasher);
    fsdp_free(work.data);
    fsdp_free(work.targets);
    fsdp_free(work.pieces);
    return st;
}

fsdp_status fsdp_convert_move(convert_job *job, fsdp_error *err)
{
    atomic_store(&job->next, 0);
    return fsdp_parallel(job->workers, (size_t)job->workers, run_worker, job, err);
}

/* --- reading back ----------------------------------------------------------------------------- */

static fsdp_status fail_differs(const convert_job *job, const fsdp_entry *entry, const char *what,
                                fsdp_error *err)
{
    char name[160];
    return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' was written to '%s' %s",
                     fsdp_printable(entry->name, entry->name_size, name, sizeof name),
                     job->place.path, what);
}

/* True for a dict: the result may have its items as entries. */
static bool may_spread(const fsdp_value *value)
{
    if (value->kind == FSDP_VALUE_DICT)
        return true;
    for (size_t i = 0; value->kind == FSDP_VALUE_LIST && i < value->as.list.count; i++)
        if (may_spread(&value->as.list.items[i]))
            return true;
    return false;
}

/* True for an item of a list: the result may have the list as one value. */
static bool may_fold(const fsdp_entry *entry)
{
    for (size_t i = 0; i < entry->path_count; i++)
        if (entry->path[i] < 0)
            return true;
    return false;
}

static fsdp_status pair_entry(convert_job *job, size_t i, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(job->sd, i), *tensor = tensor_at(job, i);
    const fsdp_sd *sd = job->written->manifest.sd;
    bool is_value = entry->kind == FSDP_ENTRY_VALUE;
    bool is_only = job->format->caps.nameless && fsdp_sd_count(sd) == 1;
    int64_t found = is_only ? 0 : fsdp_sd_find(sd, entry->name, entry->name_size);
    if (found < 0 && is_value && (may_spread(&entry->value) || may_fold(entry)))
        return FSDP_OK;
    if (found < 0)
        return fail_differs(job, entry, "and is missing there", err);
    const fsdp_entry *back = fsdp_sd_at(sd, fsdp_sd_tensor_of(sd, (size_t)found));
    job->written_entry[i] = (size_t)found;
    if ((back->kind == FSDP_ENTRY_VALUE) != is_value)
        return fail_differs(job, entry, "and is an entry of another kind there", err);
    if (is_value)
        return FSDP_OK;
    if (back->dtype != tensor->dtype || back->ndim != tensor->ndim ||
        memcmp(back->shape, tensor->shape, (size_t)tensor->ndim * sizeof *tensor->shape) != 0)
        return fail_differs(job, entry, "and has another type or shape there", err);
    return FSDP_OK;
}

fsdp_status fsdp_convert_read_back(convert_job *job, fsdp_error *err)
{
    size_t count = fsdp_sd_count(job->sd);
    FSDP_TRY(fsdp_checkpoint_open(
        job->place.path, &(fsdp_open_opts){.memory = job->opts.memory, .access.disk = job->io},
        &job->written, err));
    job->written_entry = fsdp_alloc(count, sizeof *job->written_entry);
    if (!job->written_entry)
        return fsdp_fail_memory(err, "a conversion");
    for (size_t i = 0; i < count; i++)
        FSDP_TRY(pair_entry(job, i, err));
    FSDP_TRY(fsdp_copies_check(&job->copies, job->io, job->place.path, err));
    return fsdp_convert_move(job, err);
}
