/*
 * A conversion as an object: divides the memory and checks the destination before the first byte, moves the
 * tensors in slabs, reads them back, hashes the files. See convert_job.h.
 */
#include "base/core/given.h"
#include "base/core/pool.h"
#include "base/data/box_internal.h"
#include "base/data/flow.h"
#include "base/data/name_path.h"
#include "base/io/io_cache.h"
#include "base/io/io_direct.h"
#include "base/io/io_limit.h"
#include "base/io/io_reuse.h"
#include "statedict/checkpoint/digests.h"
#include "statedict/commit/space.h"
#include "statedict/convert/convert_job.h"
#include "statedict/manifest/disk_names.h"
#include "statedict/sd/layout_internal.h"
#include "statedict/select/relayout.h"

#include <inttypes.h>
#include <string.h>

/* === planning ================================================================================= */

enum { CHUNK_LEAST = 64 << 10, BUFFERS_LEAST = 8 << 20 };

/* True when the entry has data; for targets without aliases, aliases are tensors. */
static bool has_data(const convert_job *job, size_t entry)
{
    fsdp_entry_kind kind = fsdp_sd_at(job->sd, entry)->kind;
    return kind == FSDP_ENTRY_TENSOR || (kind == FSDP_ENTRY_ALIAS && !job->format->caps.aliases);
}

/* The target is compressed, in chunks. */
static bool encodes_chunks(const convert_job *job)
{
    return job->opts.compress && job->format->caps.compresses;
}

static fsdp_dtype source_dtype(const convert_job *job, size_t entry)
{
    const fsdp_sd *from = job->from->manifest.sd;
    return fsdp_sd_at(from, fsdp_sd_tensor_of(from, job->source[entry]))->dtype;
}

/* --- memory ----------------------------------------------------------------------------------- */

static int64_t budget(const convert_job *job)
{
    return job->opts.memory > 0 ? job->opts.memory : FSDP_MEMORY_DEFAULT;
}

static void limit_threads(convert_job *job, int64_t most)
{
    if (most < job->threads)
        job->threads = most < 1 ? 1 : (int)most;
}

static int64_t clamp(int64_t value, int64_t least, int64_t most)
{
    return value < least ? least : value > most ? most : value;
}

/* Bytes that do not depend on the budget. */
static int64_t fixed_room(const convert_job *job, const convert_room *room)
{
    enum { TEXT_BYTES = 300 }; /* of an entry in a manifest, in a buffer that doubles its size */
    int64_t finishing = room->per_thread * job->threads;
    int64_t publishing = 2 * TEXT_BYTES * (int64_t)fsdp_sd_count(job->sd);
    return room->fixed + (room->per_thread > 0 && finishing < publishing ? publishing : finishing);
}

/* Encoders hold twice four chunks per thread, and every file may hold an incomplete chunk. */
static int64_t encoder_chunks(const convert_job *job)
{
    return 8 * job->threads + job->group_files;
}

/*
 * A quarter for the records of files, half for slabs, the rest for finishing and checking files. An encoded
 * target: a quarter for slabs, half for chunks.
 */
static void divide_memory(convert_job *job)
{
    convert_room room = job->target->room(job);
    bool encoded = job->from->info.compressed, encodes = encodes_chunks(job);
    fsdp_reading reading = fsdp_checkpoint_reading(job->from);
    int64_t memory = budget(job), apart = reading.apart;
    job->threads = fsdp_block_readers_within(job->opts.threads, memory / 4, encoded);
    limit_threads(job, reading.threads);
    if (reading.per_thread > 0)
        limit_threads(job, memory / 2 / reading.per_thread);
    memory -= reading.per_thread * job->threads;
    if (room.per_thread > 0)
        limit_threads(job, memory / 4 / room.per_thread);
    if (!job->target->is_ordered)
        limit_threads(job, apart / room.slab_least);
    job->workers = encodes ? 1 : job->threads;
    if (room.fixed > 0) {
        memory -= fixed_room(job, &room);
        memory = memory < BUFFERS_LEAST ? BUFFERS_LEAST : memory;
    }
    int64_t files = room.per_file > 0 ? memory / 4 / room.per_file : job->file_count;
    job->group_files = (int)clamp(files, 1, job->file_count);
    int64_t slab = memory / (encodes ? 4 : 2) / job->threads - fsdp_block_reader_bytes(encoded);
    apart /= job->target->is_ordered ? 1 : job->threads;
    job->slab_bytes = clamp(slab < apart ? slab : apart, room.slab_least, room.slab_most);
    job->chunk_bytes = FSDP_CHUNK_BYTES;
    while (job->chunk_bytes > memory / 2 / encoder_chunks(job) && job->chunk_bytes > CHUNK_LEAST)
        job->chunk_bytes /= 2;
    if (job->opts.chunk_bytes > 0)
        job->chunk_bytes = job->opts.chunk_bytes;
}

static int64_t peak_memory(const convert_job *job)
{
    convert_room room = job->target->room(job);
    int64_t worker = job->slab_bytes + fsdp_block_reader_bytes(job->from->info.compressed) +
                     fsdp_checkpoint_reading(job->from).per_thread;
    int64_t chunks = encodes_chunks(job) ? job->chunk_bytes * encoder_chunks(job) : 0;
    return fixed_room(job, &room) + worker * job->workers + chunks +
           room.per_file * job->group_files;
}

/* A slab is read in its pieces, column by column if they are columns; every group reads all tensors. */
static fsdp_status announce_reading(convert_job *job, fsdp_error *err)
{
    int64_t apart = fsdp_checkpoint_reading(job->from).apart;
    bool columns = job->file_count > 1 && job->opts.shard_dim > 0 && job->slab_bytes > apart;
    bool repeated = columns || job->group_files < job->file_count;
    for (size_t i = 0; i < fsdp_sd_count(job->sd); i++)
        if (has_data(job, i))
            FSDP_TRY(fsdp_checkpoint_announce(job->from, job->source[i], repeated, err));
    return FSDP_OK;
}

/* --- work ----------------------------------------------------------------------- */

static bool is_in_tuple(const fsdp_entry *entry)
{
    for (size_t i = 0; i < entry->path_count; i++)
        if (fsdp_path_in_tuple(entry->path[i]))
            return true;
    return false;
}

static fsdp_status count_work(convert_job *job, fsdp_convert_plan *plan, fsdp_error *err)
{
    plan->world = job->world;
    for (size_t i = 0; i < fsdp_sd_count(job->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(job->sd, i);
        bool is_stored = has_data(job, i);
        plan->tensors += is_stored;
        plan->values += entry->kind == FSDP_ENTRY_VALUE;
        plan->aliases += entry->kind == FSDP_ENTRY_ALIAS && !is_stored;
        if (!is_stored)
            continue;
        job->facts.in_tuples += job->format->caps.lists_tuples && is_in_tuple(entry);
        entry = fsdp_sd_at(job->sd, fsdp_sd_tensor_of(job->sd, i));
        int64_t bytes = fsdp_entry_bytes(entry);
        job->tensor_bytes += bytes;
        plan->bytes_read += bytes / (int64_t)fsdp_dtype_size(entry->dtype) *
                            (int64_t)fsdp_dtype_size(source_dtype(job, i));
    }
    if (job->world > 1 && job->kind == FSDP_SHARDED)
        job->facts.short_tensors = fsdp_relayout_count_short(job->sd, job->opts.shard_dim);
    if (!job->opts.skip_verify)
        plan->bytes_checked =
            fsdp_checkpoint_check_bytes(job->from) + fsdp_digests_bytes(job->io, job->from->path);
    plan->bytes_spooled = fsdp_checkpoint_reading(job->from).spooled;
    plan->peak_memory = peak_memory(job);
    return job->target->measure(job, plan, err);
}

/* Checks the memory for descriptions of many tensors, which the budget does not limit. */
static fsdp_status check_memory(const convert_job *job, const fsdp_convert_plan *plan,
                                fsdp_error *err)
{
    const int64_t beside = 32 << 20, unit = 1 << 20;
    int64_t wanted = plan->peak_memory - beside;
    if (job->opts.memory <= 0 || wanted <= job->opts.memory)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_LIMIT,
                     "converting %zu entries into %d files takes %" PRId64
                     " MiB of memory; allow %" PRId64 "M or more",
                     fsdp_sd_count(job->sd), job->file_count, (plan->peak_memory + unit - 1) / unit,
                     (wanted + unit - 1) / unit);
}

/* The result must fit on the disk before work starts; compression is not counted, since it is unknown. */
static fsdp_status check_space(const convert_job *job, fsdp_convert_plan *plan, fsdp_error *err)
{
    fsdp_space space;
    int64_t more = plan->bytes_spooled;
    bool encodes = encodes_chunks(job);
    if (job->opts.resume && !encodes)
        more -= fsdp_resume_bytes(job->io, job->to, job->hash);
    fsdp_volume volume = {.kind = job->kind,
                          .world = job->file_count,
                          .compress = encodes,
                          .with_view = !job->opts.skip_view,
                          .is_exact = job->format->writer->ops != NULL,
                          .more = more};
    plan->bytes_needed =
        volume.is_exact ? plan->bytes_written + more : fsdp_volume_room(job->sd, &volume);
    fsdp_status st = fsdp_require_space(job->io, job->to, &volume, plan->bytes_needed, &space, err);
    plan->free_bytes = space.free_bytes;
    return st;
}

/* After a failure because something is at the target: finds out whether it could be replaced. */
static fsdp_status ask_overwrite(convert_job *job, fsdp_convert_plan *plan, fsdp_error *err)
{
    fsdp_error other = {0};
    if (job->opts.overwrite)
        return FSDP_ERR_EXISTS;
    job->opts.overwrite = job->place.overwrite = true;
    fsdp_status st = job->target->check_place(job, &other);
    if (st == FSDP_OK)
        st = check_memory(job, plan, &other);
    if (st == FSDP_OK)
        st = check_space(job, plan, &other);
    job->opts.overwrite = job->place.overwrite = false;
    plan->may_overwrite = st == FSDP_OK;
    if (st == FSDP_ERR_EXISTS && err)
        *err = other;
    return FSDP_ERR_EXISTS;
}

static fsdp_status check_chunk(int64_t chunk, fsdp_error *err)
{
    if (chunk == 0 || (chunk >= CHUNK_LEAST && chunk <= FSDP_CHUNK_BYTES))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "chunks cannot have %" PRId64 " bytes; %d to %d are allowed", chunk,
                     (int)CHUNK_LEAST, (int)FSDP_CHUNK_BYTES);
}

/* Does everything before the first byte is written. */
static fsdp_status prepare(convert_job *job, const char *from, fsdp_convert_plan *plan,
                           fsdp_error *err)
{
    if (job->format->caps.compresses)
        FSDP_TRY(check_chunk(job->opts.chunk_bytes, err));
    FSDP_TRY(fsdp_convert_select(job, from, plan, err));
    FSDP_TRY(fsdp_checkpoint_set_memory(job->from, job->opts.memory, job->to, err));
    divide_memory(job);
    FSDP_TRY(announce_reading(job, err));
    FSDP_TRY(count_work(job, plan, err));
    FSDP_TRY(fsdp_plan_note(plan, job, err));
    fsdp_flow("statedict/convert/convert.c", "plan: %d files, slabs of at most %lld bytes",
              plan->files, (long long)job->slab_bytes);
    FSDP_TRY(fsdp_plan_identify(job, job->hash, err));
    fsdp_status st = job->target->check_place(job, err);
    if (st == FSDP_ERR_EXISTS)
        return ask_overwrite(job, plan, err);
    FSDP_TRY(st);
    FSDP_TRY(check_memory(job, plan, err));
    return check_space(job, plan, err);
}

/* === moving slabs ============================================================================= */

/* --- cutting ---------------------------------------------------------------------------------- */

/* The tensor of an entry of the target; of an alias, its target. */
static const fsdp_entry *tensor_at(const convert_job *job, size_t entry)
{
    return fsdp_sd_at(job->sd, fsdp_sd_tensor_of(job->sd, entry));
}

static int64_t slab_elements(const convert_job *job, size_t entry)
{
    fsdp_dtype from = source_dtype(job, entry), to = tensor_at(job, entry)->dtype;
    return job->slab_bytes / (int64_t)fsdp_recast_size(from, to);
}

static bool next_slab(const convert_job *job, size_t entry, fsdp_slabs *slabs, fsdp_box *slab_out)
{
    const fsdp_entry *tensor = tensor_at(job, entry);
    return fsdp_slabs_next(slabs, tensor->ndim, tensor->shape, slab_elements(job, entry), slab_out);
}

/* Numbers the slabs, whose size is final now. */
static fsdp_status number_slabs(convert_job *job, fsdp_error *err)
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
        while (has_data(job, i) && next_slab(job, i, &slabs, &slab))
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
    work->targets[n] =
        (fsdp_read_target){.box = shared,
                           .dtype = work->stored,
                           .data = fsdp_recast_source(data, count, work->stored, work->wanted)};
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
    fsdp_flow_box("statedict/convert/convert.c", "move", entry->name, entry->name_size,
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
    fsdp_flow("statedict/convert/convert.c", "write %zu pieces", work->count);
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
    fsdp_flow_box("statedict/convert/convert.c", "compare", entry->name, entry->name_size,
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

static fsdp_status move_slabs(convert_job *job, fsdp_error *err)
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

/* Opens the result and compares it, slab by slab. */
static fsdp_status read_back(convert_job *job, fsdp_error *err)
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
    return move_slabs(job, err);
}

/* === digests of files ========================================================================= */

/*
 * Digests of files: of the source, where a file next to it has them, before it counts as checked; and of the
 * result, as sha256sum computes them, for publishing and for programs that know nothing of checkpoints. The
 * files are read several at a time.
 */

/* --- the source ---------------------------------------------------------------------------------- */

/* The first finding becomes the error. */
static void keep_first(void *context, const fsdp_finding *finding)
{
    fsdp_error *first = context;
    if (finding->kind == FSDP_FINDING_DAMAGE && first->status == FSDP_OK)
        (void)fsdp_fail(first, FSDP_ERR_DAMAGED, "%s", finding->text);
}

/* Compares the source's files with FROM.xxh3, where that is. FSDP_ERR_DAMAGED names the
 * first that differs. */
static fsdp_status compare_digests(const convert_job *job, const fsdp_watch *watch, fsdp_error *err)
{
    fsdp_error first = {0};
    fsdp_verify_summary summary = {0};
    const fsdp_verify_opts opts = {.level = FSDP_VERIFY_DATA,
                                   .digests = FSDP_DIGESTS_USE,
                                   .threads = job->threads,
                                   .memory = job->opts.memory,
                                   .finding = keep_first,
                                   .finding_context = &first,
                                   .watch = *watch};
    fsdp_status st = fsdp_digests_verify(job->io, job->from->path, &opts, &summary, FSDP_OK, err);
    if (st != FSDP_DIFFERS)
        return st;
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "%s", first.text);
}

/* --- the result ---------------------------------------------------------------------------------- */

/* For a result "a/b/", names begin with "b/". */
static fsdp_status list_files(fsdp_file_list *list, const char *to, fsdp_error *err)
{
    char *path, *parent;
    FSDP_TRY(fsdp_path_split(to, &path, &parent, err));
    const char *last = strrchr(path, '/');
    fsdp_status st =
        fsdp_file_list_add_tree(list, path, last ? (size_t)(last - path) + 1 : 0, NULL, err);
    fsdp_file_list_sort(list);
    fsdp_free(path);
    fsdp_free(parent);
    return st;
}

/* Visits the SHA-256 of the published files, as fsdp_conversion_result, and writes TO.xxh3. */
static fsdp_status visit_digests(const convert_job *job, fsdp_file_digest_visit visit,
                                 void *context, fsdp_error *err)
{
    fsdp_file_list list = {.io = job->io};
    fsdp_digest_opts digest = {.kind = FSDP_DIGEST_SHA256,
                               .threads = job->opts.threads,
                               .memory = job->opts.memory,
                               .watch = &job->opts.watch};
    fsdp_status st = list_files(&list, job->to, err);
    if (st == FSDP_OK)
        st = fsdp_file_list_digest(&list, &digest, err);
    for (size_t i = 0; i < list.count && st == FSDP_OK; i++)
        visit(context, list.items[i].name, list.items[i].digest);
    fsdp_file_list_release(&list);
    return st;
}

static fsdp_status write_digests(const convert_job *job, fsdp_error *err)
{
    const fsdp_verify_opts writing = {
        .threads = job->opts.threads, .memory = job->opts.memory, .watch = job->opts.watch};
    return fsdp_digests_write(job->io, job->to, &writing, err);
}

/* === the conversion =========================================================================== */

/* --- file operations --------------------------------------------------------------------------- */

/* Layers around the given io that bypass the page cache, limit the rate, and open each file once while the
 * conversion is planned. */
typedef struct convert_io {
    fsdp_convert_opts opts;  /* with open.access through all of them */
    fsdp_io *limit, *direct; /* or NULL */
    fsdp_io *cache;          /* the outermost */
} convert_io;

enum { DIRECT_MOST = 16 << 20, BUFFER_MOST = 1 << 20, BUFFER_LEAST = 64 << 10 };

static int threads_of(const fsdp_convert_opts *opts)
{
    return opts->threads > 0 ? opts->threads : fsdp_pool_cores();
}

static int64_t direct_buffer(const fsdp_convert_opts *opts)
{
    int64_t buffer = DIRECT_MOST / threads_of(opts);
    return buffer < BUFFER_LEAST ? BUFFER_LEAST : buffer > BUFFER_MOST ? BUFFER_MOST : buffer;
}

/* Memory of these layers for all threads together. */
static int64_t io_room(const fsdp_convert_opts *opts)
{
    return opts && opts->direct ? direct_buffer(opts) * threads_of(opts) : 0;
}

static fsdp_status make_io(convert_io *how, fsdp_error *err)
{
    fsdp_convert_opts *opts = &how->opts;
    fsdp_io *io = fsdp_access_io(&opts->open.access);
    if (opts->bytes_per_second > 0) {
        fsdp_io_limit_opts limit = {.bytes_per_second = opts->bytes_per_second,
                                    .stopped = opts->watch.stopped,
                                    .context = opts->watch.context};
        FSDP_TRY(fsdp_io_limit_create(io, &limit, &how->limit, err));
        io = how->limit;
    }
    if (opts->direct) {
        FSDP_TRY(fsdp_io_direct_create(io, (size_t)direct_buffer(opts), &how->direct, err));
        io = how->direct;
    }
    FSDP_TRY(fsdp_io_cache_create(io, &how->cache, err));
    opts->open.access.disk = how->cache;
    return FSDP_OK;
}

/* opts NULL: the defaults. The struct must not move until end_io. */
static fsdp_status begin_io(convert_io *how, const fsdp_convert_opts *opts, fsdp_error *err)
{
    *how = (convert_io){.opts = opts ? *opts : (fsdp_convert_opts){0}};
    if (how->opts.bytes_per_second < 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "%" PRId64 " bytes a second is not a valid rate",
                         how->opts.bytes_per_second);
    return make_io(how, err);
}

/* Call after all files are closed. A notice names files for which the page cache was used nevertheless. */
static void end_io(convert_io *how)
{
    if (how->direct && fsdp_io_direct_refusals(how->direct) > 0)
        fsdp_notice(&how->opts.watch,
                    "the file system cannot bypass the page cache: its files were read through it");
    fsdp_io_cache_free(how->cache);
    fsdp_io_direct_free(how->direct);
    fsdp_io_limit_free(how->limit);
}

/* --- the job ---------------------------------------------------------------------------------- */

/* A conversion runs once, and not after its plan failed. */
typedef enum conversion_state {
    CONVERSION_FAILED,
    CONVERSION_PLANNED,
    CONVERSION_DONE
} conversion_state;

struct fsdp_conversion {
    conversion_state state;
    bool has_ended; /* its target has */
    convert_io how;
    convert_job job;
    fsdp_convert_plan plan;
    fsdp_convert_order *order; /* that it applies, or NULL */
};

/* Checks the options. release_job releases the job, also after a failure here. */
static fsdp_status init_job(convert_job *job, const char *to, const fsdp_convert_opts *opts,
                            fsdp_error *err)
{
    *job = (convert_job){.target = &fsdp_directory_target, .to = to, .opts = *opts};
    job->io = fsdp_access_io(&job->opts.open.access);
    job->kind = job->opts.kind;
    FSDP_TRY(fsdp_check_budget(job->opts.threads, job->opts.memory, err));
    job->format = fsdp_format_to(job->opts.format ? job->opts.format : "fsdp");
    if (!job->format)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%.40s' is not a format that can be written",
                         job->opts.format);
    job->place = (fsdp_output_place){.io = job->io,
                                     .format = job->format,
                                     .overwrite = job->opts.overwrite,
                                     .durable = !job->opts.skip_fsync};
    if (job->format->writer->ops) {
        job->target = &fsdp_foreign_target;
        job->kind = FSDP_SHARDED;
    } else if (!job->format->writes_directory) {
        job->target = &fsdp_one_file_target;
        job->kind = job->opts.kind = FSDP_FULL;
    }
    return FSDP_OK;
}

static void release_job(convert_job *job)
{
    fsdp_checkpoint_close(job->written);
    fsdp_checkpoint_close(job->from);
    fsdp_io_reuse_free(job->reuse);
    fsdp_copies_release(&job->copies);
    fsdp_export_report_release(&job->seen);
    fsdp_arena_release(&job->ties.arena);
    fsdp_free(job->ties.items);
    fsdp_names_release(&job->added);
    fsdp_free(job->rule_list);
    fsdp_config_release(&job->config);
    fsdp_free(job->copied_snapshot);
    fsdp_metadata_choice_release(&job->metadata);
    fsdp_text_release(&job->rules);
    fsdp_free(job->is_kept);
    fsdp_free(job->first_slab);
    fsdp_free(job->hashes);
    fsdp_free(job->written_entry);
    fsdp_free(job->cast_sums);
    fsdp_free(job->owners);
    fsdp_free(job->source);
    fsdp_sd_free(job->sd);
    fsdp_mesh_free(job->mesh);
}

/* --- the loop ---------------------------------------------------------------------------------- */

/* Finds the next run of files that were not kept; false after the last. */
static bool next_group(convert_job *job)
{
    int first = job->end_file;
    while (first < job->file_count && job->is_kept && job->is_kept[first])
        first++;
    job->first_file = job->end_file = first;
    while (job->end_file < job->file_count && !(job->is_kept && job->is_kept[job->end_file]) &&
           job->end_file - first < job->group_files)
        job->end_file++;
    return job->end_file > first;
}

static fsdp_status write_group(convert_job *job, fsdp_error *err)
{
    fsdp_flow("statedict/convert/convert.c", "files %d to %d of %d", job->first_file + 1,
              job->end_file, job->file_count);
    job->meter.phase = "write";
    FSDP_TRY(job->target->create(job, err));
    FSDP_TRY(move_slabs(job, err));
    FSDP_TRY(job->target->finish(job, err));
    if (job->opts.skip_verify)
        return FSDP_OK;
    job->meter.phase = "read back";
    fsdp_flow("statedict/convert/convert.c", "read it back");
    return job->target->check ? job->target->check(job, err) : read_back(job, err);
}

static fsdp_status write_target(convert_job *job, fsdp_error *err)
{
    bool is_taken_up = job->staging.is_taken_up || job->place.is_taken_up;
    FSDP_TRY(number_slabs(job, err));
    while (next_group(job))
        FSDP_TRY(write_group(job, err));
    if (is_taken_up)
        fsdp_resume_notify_kept(&job->opts.watch, job->kept_bytes + fsdp_io_reuse_kept(job->reuse));
    FSDP_TRY(fsdp_checkpoint_check_unchanged(job->from, err));
    fsdp_flow("statedict/convert/convert.c", "publish");
    return job->target->publish(job, err);
}

static void report_casts(const convert_job *job)
{
    fsdp_cast_tally sum = {0};
    for (int file = 0; file < job->file_count; file++) {
        fsdp_cast_tally tally = fsdp_cast_sum_get(&job->cast_sums[file]);
        fsdp_cast_tally_add(&sum, &tally);
    }
    fsdp_cast_report_fill(job->opts.cast, &sum, job->facts.selected.cast);
}

static fsdp_status check_source(convert_job *job, const fsdp_convert_plan *plan, fsdp_error *err)
{
    fsdp_meter_part part = {.meter = &job->meter};
    fsdp_watch watch = fsdp_meter_part_watch(&part);
    int64_t bytes = fsdp_checkpoint_check_bytes(job->from);
    job->meter.phase = "check";
    fsdp_flow("statedict/convert/convert.c", "compare the source with its checksums");
    FSDP_TRY(fsdp_checkpoint_check(job->from, job->threads, &watch, err));
    FSDP_TRY(fsdp_meter_part_end(&part, bytes, err));
    part.done = 0;
    FSDP_TRY(compare_digests(job, &watch, err));
    return fsdp_meter_part_end(&part, plan->bytes_checked - bytes, err);
}

static fsdp_status convert(convert_job *job, const fsdp_convert_plan *plan, fsdp_error *err)
{
    job->watch = job->opts.watch;
    /* checks and reading back count as well */
    fsdp_meter_init(&job->meter, &job->watch,
                    plan->bytes_checked + plan->bytes_read +
                        (job->opts.skip_verify ? 0 : job->tensor_bytes));
    if (!job->opts.skip_verify)
        FSDP_TRY(check_source(job, plan, err));
    fsdp_flow("statedict/convert/convert.c", "begin '%s'", job->to);
    FSDP_TRY(job->target->begin(job, err));
    FSDP_TRY(write_target(job, err));
    report_casts(job);
    return FSDP_OK;
}

/* --- the object ------------------------------------------------------------------------------- */

/* Files that the plan looked at are looked at anew from now on. */
static fsdp_status plan_job(fsdp_conversion *conversion, const char *from, const char *to,
                            fsdp_error *err)
{
    convert_job *job = &conversion->job;
    fsdp_convert_plan *plan = &conversion->plan;
    fsdp_status st = init_job(job, to, &conversion->how.opts, err);
    plan->keeps_work = job->target != &fsdp_one_file_target;
    if (st == FSDP_OK)
        st = prepare(job, from, plan, err);
    fsdp_io_cache_end(conversion->how.cache);
    plan->peak_memory += io_room(&conversion->how.opts);
    plan->sd = job->from ? job->from->manifest.sd : NULL;
    plan->source = job->from ? plan->source : NULL; /* a failed derivation has closed it */
    return st;
}

static fsdp_status open_conversion(const char *from, const char *to, const fsdp_convert_opts *opts,
                                   fsdp_conversion **conversion_out, fsdp_error *err)
{
    fsdp_conversion *conversion = fsdp_alloc(1, sizeof *conversion);
    if (!conversion)
        return fsdp_fail_memory(err, "a conversion");
    conversion->plan =
        (fsdp_convert_plan){.to = to, .opts = &conversion->job.opts, .free_bytes = -1};
    conversion->job.target = &fsdp_directory_target;
    *conversion_out = conversion;
    FSDP_TRY(begin_io(&conversion->how, opts, err));
    FSDP_TRY(plan_job(conversion, from, to, err));
    conversion->state = CONVERSION_PLANNED;
    return FSDP_OK;
}

static bool has_state(const fsdp_convert_opts *opts)
{
    return opts && opts->state;
}

fsdp_status fsdp_conversion_open(const char *from, const char *to, const fsdp_convert_opts *opts,
                                 fsdp_conversion **conversion_out, fsdp_error *err)
{
    FSDP_NEED(err, conversion_out);
    *conversion_out = NULL;
    FSDP_NEED(err, to);
    if (!has_state(opts))
        FSDP_NEED(err, from);
    else if (from ||
             opts->resume) /* memory has no identity that a later conversion could compare */
        return fsdp_fail(err, FSDP_ERR_USAGE, "a conversion of a state in memory has no %s",
                         from ? "path to read from" : "resume: the state may have changed");
    return open_conversion(from ? from : FSDP_STATE_PATH, to, opts, conversion_out, err);
}

static void take_how(fsdp_convert_opts *planned, const fsdp_convert_opts *how)
{
    planned->open.access = how->open.access;
    planned->threads = how->threads;
    planned->memory = how->memory;
    planned->bytes_per_second = how->bytes_per_second;
    planned->direct = how->direct;
    planned->skip_fsync = how->skip_fsync;
    planned->skip_verify = how->skip_verify;
    planned->resume = how->resume;
    planned->cast = how->cast;
    planned->watch = how->watch;
}

fsdp_status fsdp_conversion_apply(const char *path, const fsdp_convert_opts *opts,
                                  fsdp_conversion **conversion_out, fsdp_error *err)
{
    static const fsdp_convert_opts defaults = {0};
    FSDP_NEED(err, conversion_out);
    *conversion_out = NULL;
    FSDP_NEED(err, path);
    fsdp_convert_order *order;
    opts = opts ? opts : &defaults;
    FSDP_TRY(fsdp_convert_order_open(path, &opts->open.access, &order, err));
    take_how(&order->opts, opts);
    fsdp_status st = fsdp_convert_order_check_files(order, err);
    if (st == FSDP_OK)
        st = open_conversion(order->from, order->to, &order->opts, conversion_out, err);
    if (st == FSDP_OK) {
        fsdp_conversion *conversion = *conversion_out;
        st = fsdp_convert_order_compare(order, &conversion->job, &conversion->plan, err);
        if (st != FSDP_OK)
            conversion->state = CONVERSION_FAILED;
    }
    if (*conversion_out)
        (*conversion_out)->order = order;
    else
        fsdp_convert_order_close(order);
    return st;
}

const fsdp_convert_plan *fsdp_conversion_plan(const fsdp_conversion *conversion)
{
    return conversion ? &conversion->plan : NULL;
}

fsdp_status fsdp_conversion_write_plan(fsdp_conversion *conversion, const char *path,
                                       fsdp_error *err)
{
    FSDP_NEED(err, conversion, path);
    if (conversion->state != CONVERSION_PLANNED || conversion->job.opts.state)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the conversion of '%s' has no plan to write",
                         conversion->plan.to);
    return fsdp_plan_write(&conversion->job, &conversion->plan, path, err);
}

fsdp_status fsdp_conversion_run(fsdp_conversion *conversion, fsdp_error *err)
{
    FSDP_NEED(err, conversion);
    convert_job *job = &conversion->job;
    fsdp_error local = {0};
    err = err ? err : &local;
    if (conversion->state != CONVERSION_PLANNED)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the conversion of '%s' %s", conversion->plan.to,
                         conversion->state == CONVERSION_DONE ? "has run already"
                                                              : "cannot run: its plan failed");
    conversion->state = CONVERSION_FAILED;
    fsdp_status st = convert(job, &conversion->plan, err);
    fsdp_checkpoint_close(job->written);
    job->written = NULL;
    if (st != FSDP_OK) { /* removing a directory needs a descriptor */
        fsdp_checkpoint_close(job->from);
        job->from = NULL;
        conversion->plan.source = NULL;
        conversion->plan.sd = NULL;
    }
    conversion->has_ended = true;
    FSDP_TRY(job->target->end(job, st, err));
    conversion->state = CONVERSION_DONE;
    return FSDP_OK;
}

static fsdp_status check_done(const fsdp_conversion *conversion, fsdp_error *err)
{
    return conversion->state == CONVERSION_DONE
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_USAGE, "the conversion of '%s' has no result yet",
                           conversion->plan.to);
}

fsdp_status fsdp_conversion_result(fsdp_conversion *conversion, fsdp_file_digest_visit visit,
                                   void *context, fsdp_error *err)
{
    FSDP_NEED(err, conversion);
    FSDP_NEED_CALL(err, visit);
    FSDP_TRY(check_done(conversion, err));
    fsdp_status st = visit_digests(&conversion->job, visit, context, err);
    if (st != FSDP_OK)
        fsdp_error_prefix(err, "'%s' is written, but its digests could not be computed",
                          conversion->plan.to);
    return st;
}

fsdp_status fsdp_conversion_write_digests(fsdp_conversion *conversion, fsdp_error *err)
{
    FSDP_NEED(err, conversion);
    FSDP_TRY(check_done(conversion, err));
    fsdp_status st = write_digests(&conversion->job, err);
    if (st != FSDP_OK)
        fsdp_error_prefix(err, "'%s' is written, but its digests are not", conversion->plan.to);
    return st;
}

void fsdp_conversion_close(fsdp_conversion *conversion)
{
    if (!conversion)
        return;
    convert_job *job = &conversion->job;
    if (!conversion->has_ended)
        (void)job->target->end(job, FSDP_OK, NULL); /* nothing was begun */
    release_job(job);
    if (conversion->plan.memory)
        fsdp_arena_release(conversion->plan.memory);
    fsdp_free(conversion->plan.memory);
    end_io(&conversion->how);
    fsdp_convert_order_close(conversion->order);
    fsdp_free(conversion);
}

fsdp_status fsdp_checkpoint_convert(const char *from, const char *to, const fsdp_convert_opts *opts,
                                    fsdp_error *err)
{
    if (!has_state(opts))
        FSDP_NEED(err, from);
    FSDP_NEED(err, to);
    fsdp_conversion *conversion = NULL;
    fsdp_status st = fsdp_conversion_open(from, to, opts, &conversion, err);
    if (st == FSDP_OK)
        st = fsdp_conversion_run(conversion, err);
    fsdp_conversion_close(conversion);
    return st;
}
