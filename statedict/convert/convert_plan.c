/*
 * Plans a conversion: selects entries, makes the target's layout, divides the memory, counts the files, and
 * checks the destination. Writes nothing. See convert_job.h.
 */
#include "statedict/convert/convert_job.h"

#include "base/data/flow.h"
#include "base/data/name_path.h"
#include "statedict/checkpoint/digests.h"
#include "statedict/sd/layout_internal.h"
#include "statedict/run/hub_cache.h"
#include "statedict/run/remote_path.h"
#include "statedict/select/metadata.h"
#include "statedict/select/optim_form.h"
#include "statedict/select/relayout.h"
#include "statedict/commit/space.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { CHUNK_LEAST = 64 << 10, BUFFERS_LEAST = 8 << 20 };

bool fsdp_convert_has_data(const convert_job *job, size_t entry)
{
    fsdp_entry_kind kind = fsdp_sd_at(job->sd, entry)->kind;
    return kind == FSDP_ENTRY_TENSOR || (kind == FSDP_ENTRY_ALIAS && !job->format->caps.aliases);
}

/* The target is compressed, in chunks. */
static bool encodes_chunks(const convert_job *job)
{
    return job->opts.compress && job->format->caps.compresses;
}

fsdp_dtype fsdp_convert_source_dtype(const convert_job *job, size_t entry)
{
    const fsdp_sd *from = job->from->manifest.sd;
    return fsdp_sd_at(from, fsdp_sd_tensor_of(from, job->source[entry]))->dtype;
}

/* --- select ----------------------------------------------------------------------------------- */

static fsdp_status check_ranks(const convert_job *job, fsdp_error *err)
{
    const fsdp_convert_opts *opts = &job->opts;
    if (opts->world < 0 || opts->shard_dim < 0 || opts->shard_dim >= FSDP_MAX_DIMS)
        return fsdp_fail(err, FSDP_ERR_USAGE, "world size %d or sharding dim %d is out of range",
                         opts->world, opts->shard_dim);
    bool has_dim = job->format->writer->ops && opts->shard_dim > 0;
    if (!job->format->caps.sharded && (opts->world > 1 || opts->mesh || has_dim))
        return fsdp_fail(err, FSDP_ERR_USAGE, "format %s has no ranks: no world size, no mesh%s",
                         job->format->name, job->format->writer->ops ? ", no sharding dim" : "");
    if (job->kind == FSDP_FULL && opts->world > 1)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "a full checkpoint is one file; it has no world size of %d", opts->world);
    if (opts->mesh && opts->world > 0 && fsdp_mesh_size(opts->mesh) != opts->world)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the mesh has %lld ranks, the world %d",
                         (long long)fsdp_mesh_size(opts->mesh), opts->world);
    return FSDP_OK;
}

static fsdp_status choose_mesh(convert_job *job, fsdp_error *err)
{
    const fsdp_convert_opts *opts = &job->opts;
    FSDP_TRY(check_ranks(job, err));
    bool is_cut = job->kind != FSDP_FULL && job->format->caps.sharded;
    job->world = !is_cut           ? 1
                 : opts->mesh      ? (int)fsdp_mesh_size(opts->mesh)
                 : opts->world > 0 ? opts->world
                                   : job->from->info.world;
    job->file_count = job->world;
    return is_cut && opts->mesh ? FSDP_OK
                                : fsdp_mesh_create(1, (int64_t[]){job->world},
                                                   (const char *[]){"dp"}, NULL, &job->mesh, err);
}

static fsdp_status form_optim(convert_job *job, fsdp_error *err)
{
    fsdp_optim_form form = job->opts.optim_form;
    bool nests = job->format->caps.nests_groups || job->facts.optim_named > 0;
    if (nests && form == FSDP_OPTIM_FORM_DEFAULT)
        form = FSDP_OPTIM_FORM_NESTED;
    if (job->format->caps.names_groups)
        return fsdp_optim_form_apply(form, &job->sd, &job->source, &job->facts.optim_form, err);
    return form == FSDP_OPTIM_FORM_DEFAULT
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_USAGE,
                           "nested and flat are forms of optimizers in dcp, but the target is %s",
                           job->format->name);
}

static fsdp_status describe_selected(convert_job *job, fsdp_selection *selection, fsdp_error *err)
{
    fsdp_relayout_opts opts = {.kind = job->kind,
                               .mesh = job->mesh ? job->mesh : job->opts.mesh,
                               .shard_dim = job->opts.shard_dim,
                               .under = job->opts.select.under};
    fsdp_tie_rules rules = {.opts = &job->opts,
                            .target = job->format,
                            .config = job->copies.tied,
                            .class_name = job->config.kind.class_name,
                            .to = job->to};
    FSDP_TRY(fsdp_ties_drop(job->from, &rules, selection, &job->ties, err));
    FSDP_TRY(fsdp_relayout(job->from->manifest.sd, &opts, selection, &job->sd, &job->source, err));
    FSDP_TRY(form_optim(job, err));
    job->owners = fsdp_alloc(fsdp_sd_count(job->sd), sizeof *job->owners);
    if (!job->owners)
        return fsdp_fail_memory(err, "a conversion");
    if (job->kind != FSDP_LOCAL)
        FSDP_TRY(fsdp_box_plan_owners(job->sd, FSDP_OWNERS_BALANCED, job->owners, err));
    return job->target->declare(job, selection, err);
}

static fsdp_status describe_target(convert_job *job, fsdp_convert_plan *plan, fsdp_error *err)
{
    fsdp_selection *selection = NULL;
    const fsdp_sd *from = job->from->manifest.sd;
    FSDP_TRY(choose_mesh(job, err));
    fsdp_select_opts select = job->opts.select;
    if (fsdp_convert_blocks_of(select.dtype))
        select.dtype = NULL; /* a stage has encoded them */
    const fsdp_select_from source = {
        .sd = from, .is_missing = job->from->is_missing, .known = job->known};
    fsdp_status st = fsdp_selection_create(&source, &select, job->format, &selection, err);
    if (st == FSDP_DIFFERS)
        return fsdp_fail(err, FSDP_DIFFERS, "no name in '%s' matches", job->from->path);
    FSDP_TRY(st);
    st = describe_selected(job, selection, err);
    fsdp_export_report report = {0};
    if (st == FSDP_OK)
        st = fsdp_convert_check_names(job, &report, err);
    plan->model_missing = (int64_t)report.lost;
    if (st == FSDP_OK)
        st = fsdp_plan_note_selected(plan, job, selection, &report, err);
    fsdp_export_report_release(&report);
    if (st == FSDP_OK)
        st = fsdp_plan_note_code(plan, job, selection, err);
    fsdp_selection_count(selection, &job->facts.selected);
    job->casts = job->facts.selected.cast > 0;
    fsdp_selection_free(selection);
    return st;
}

static fsdp_status check_chunk(int64_t chunk, fsdp_error *err)
{
    if (chunk == 0 || (chunk >= CHUNK_LEAST && chunk <= FSDP_CHUNK_BYTES))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE, "chunks of %" PRId64 " bytes: %d to %d are allowed",
                     chunk, (int)CHUNK_LEAST, (int)FSDP_CHUNK_BYTES);
}

/* --- select ----------------------------------------------------------------------------------- */

/* Chooses the texts that the result has beside its tensors, once the plan has counts of all changes. */
static fsdp_status keep_metadata(convert_job *job, fsdp_convert_plan *plan, fsdp_error *err)
{
    const fsdp_selection_counts *counts = &job->facts.selected;
    const int64_t changes = counts->renamed + counts->left_out + counts->dropped + counts->cast;
    const fsdp_metadata_from from = {.path = job->from->path,
                                     .carried = job->from->manifest.metadata,
                                     .contradicting =
                                         fsdp_checkpoint_extra(job->from, "contradicting"),
                                     .renamed = counts->renamed,
                                     .is_changed = changes > 0 || job->from->is_derived};
    fsdp_metadata_choice choice = {0};
    fsdp_status st = fsdp_metadata_choose(&from, &job->opts.select, job->format, &choice, err);
    if (st == FSDP_OK)
        st = fsdp_plan_note_metadata(plan, job, &choice.left_out, err);
    job->metadata = choice.kept;
    choice.kept = NULL;
    fsdp_metadata_choice_release(&choice);
    return st;
}

/* Every target that takes the option needs the directory, though some only its config.json. A model of the
 * cache of Hugging Face stands for its snapshot. */
static fsdp_status find_copy_from(convert_job *job, fsdp_error *err)
{
    const char *dir = job->opts.copy_from;
    fsdp_file_info info;
    int result = dir ? job->io->ops->info(job->io, dir, &info) : 0;
    if (result < 0)
        return fsdp_remote_path_fail(job->io, dir, -result, err);
    if (dir && info.kind != FSDP_FILE_DIRECTORY)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                         "'%s' is not a directory; files are copied from the directory of a model",
                         dir);
    if (dir)
        FSDP_TRY(fsdp_hub_snapshot(dir, job->io, &job->copied_snapshot, err));
    if (job->copied_snapshot)
        job->opts.copy_from = job->copied_snapshot;
    return FSDP_OK;
}

static void keep_full(convert_job *job, const fsdp_checkpoint *source)
{
    const fsdp_convert_opts *opts = &job->opts;
    if (!opts->keep_full || source->info.kind != FSDP_FULL || opts->world > 0 || opts->mesh)
        return;
    job->opts.kind = FSDP_FULL;
    job->kind = job->format->caps.has_kinds ? FSDP_FULL : job->kind;
}

static fsdp_status select_entries(convert_job *job, const char *from, fsdp_convert_plan *plan,
                                  fsdp_error *err)
{
    if (job->format->caps.compresses)
        FSDP_TRY(check_chunk(job->opts.chunk_bytes, err));
    fsdp_flow("statedict/convert/convert_plan.c", "open '%s'", from);
    fsdp_checkpoint *source = NULL;
    FSDP_TRY(fsdp_convert_open(from, &job->opts, &source, err));
    plan->source = job->from = source;
    keep_full(job, source);
    job->facts.rounded = source->source ? fsdp_source_rounded_count(source->source) : 0;
    if (job->format->caps.opaque)
        FSDP_TRY(fsdp_checkpoint_carry_values(source, job->format->caps.classes, err));
    FSDP_TRY(find_copy_from(job, err));
    FSDP_TRY(fsdp_convert_derive(job, source, err));
    const bool is_made = job->config.text && !job->config.path;
    const fsdp_copies_places places = {job->from->path,
                                       job->to,
                                       job->from->manifest.sd,
                                       &job->config,
                                       is_made && job->facts.is_mapped,
                                       job->unties};
    FSDP_TRY(fsdp_copies_open(job->io, &job->opts, &places, &job->copies, err));
    FSDP_TRY(fsdp_convert_fit_names(job, err));
    FSDP_TRY(describe_target(job, plan, err));
    FSDP_TRY(keep_metadata(job, plan, err));
    job->cast_sums = fsdp_alloc((size_t)job->file_count, sizeof *job->cast_sums);
    return job->cast_sums ? FSDP_OK : fsdp_fail_memory(err, "a conversion");
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
        if (fsdp_convert_has_data(job, i))
            FSDP_TRY(fsdp_checkpoint_announce(job->from, job->source[i], repeated, err));
    return FSDP_OK;
}

/* --- memory and threads ----------------------------------------------------------------------- */

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
        bool has_data = fsdp_convert_has_data(job, i);
        plan->tensors += has_data;
        plan->values += entry->kind == FSDP_ENTRY_VALUE;
        plan->aliases += entry->kind == FSDP_ENTRY_ALIAS && !has_data;
        if (!has_data)
            continue;
        job->facts.in_tuples += job->format->caps.lists_tuples && is_in_tuple(entry);
        entry = fsdp_sd_at(job->sd, fsdp_sd_tensor_of(job->sd, i));
        int64_t bytes = fsdp_entry_bytes(entry);
        job->tensor_bytes += bytes;
        plan->bytes_read += bytes / (int64_t)fsdp_dtype_size(entry->dtype) *
                            (int64_t)fsdp_dtype_size(fsdp_convert_source_dtype(job, i));
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
                     " MiB of memory: allow %" PRId64 "M or more",
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

fsdp_status fsdp_convert_prepare(convert_job *job, const char *from, fsdp_convert_plan *plan,
                                 fsdp_error *err)
{
    FSDP_TRY(select_entries(job, from, plan, err));
    FSDP_TRY(fsdp_checkpoint_set_memory(job->from, job->opts.memory, job->to, err));
    divide_memory(job);
    FSDP_TRY(announce_reading(job, err));
    FSDP_TRY(count_work(job, plan, err));
    FSDP_TRY(fsdp_plan_note(plan, job, err));
    fsdp_flow("statedict/convert/convert_plan.c", "plan: %d files, slabs of at most %lld bytes",
              plan->files, (long long)job->slab_bytes);
    FSDP_TRY(fsdp_plan_identify(job, job->hash, err));
    fsdp_status st = job->target->check_place(job, err);
    if (st == FSDP_ERR_EXISTS)
        return ask_overwrite(job, plan, err);
    FSDP_TRY(st);
    FSDP_TRY(check_memory(job, plan, err));
    return check_space(job, plan, err);
}
