/*
 * Verifies a native checkpoint. Quick: manifest, file sizes, shard indexes, and that they hold
 * every box that the manifest promises and no other. Data: every block against its hash. Deep: the
 * values (verify_values.c), and the parts for other programs: HDF5's structures and the view. Every
 * fault is reported; verification goes on to find the others. Only the view can be repaired, because
 * all of it follows from the manifest.
 */
#include "statedict/checkpoint/checkpoint_internal.h"
#include "statedict/commit/commit_internal.h"
#include "statedict/checkpoint/digests.h"
#include "statedict/checkpoint/foreign.h"
#include "statedict/checkpoint/one_file.h"
#include "statedict/checkpoint/verify_code.h"
#include "statedict/checkpoint/verify_values.h"
#include "statedict/checkpoint/view.h"

#include "base/core/pool.h"
#include "statedict/sd/layout_internal.h"

#include <stdio.h>
#include <string.h>

#include "base/core/given.h"

typedef struct verify_job {
    const fsdp_verify_opts *opts;
    fsdp_checkpoint *checkpoint;
    bool is_one_file;
    int file;          /* being verified */
    atomic_llong next; /* box to take */
    atomic_llong blocks, bytes, findings;
    atomic_flag reporting; /* guards the callback and these two */
    int64_t unreadable;
    int unreadable_errnum; /* of the first unreadable file */
    char reason[FSDP_ERROR_TEXT];
    int64_t warnings, fixed, code_files;
    fsdp_meter meter;
} verify_job;

static void emit(verify_job *job, const fsdp_finding *finding, int errnum)
{
    atomic_fetch_add(&job->findings, 1);
    while (atomic_flag_test_and_set(&job->reporting))
        ;
    if (finding->unreadable && job->unreadable++ == 0) {
        job->unreadable_errnum = errnum;
        snprintf(job->reason, sizeof job->reason, "%s", finding->text);
    }
    if (job->opts->finding)
        job->opts->finding(job->opts->finding_context, finding);
    atomic_flag_clear(&job->reporting);
}

static void report(verify_job *job, const char *file, const char *tensor, int64_t block,
                   const char *text)
{
    emit(job, &(fsdp_finding){.file = file, .tensor = tensor, .block = block, .text = text}, 0);
}

/* An error of the disk or of permissions is no finding: the bytes may be good. */
static void report_failure(verify_job *job, const char *file, const char *tensor, int64_t block,
                           const fsdp_error *found)
{
    bool unreadable = found->status == FSDP_ERR_IO;
    fsdp_finding finding = {.file = file,
                            .tensor = tensor,
                            .block = block,
                            .text = found->text,
                            .unreadable = unreadable};
    emit(job, &finding, found->errnum);
}

/* A failure that is a fact about the checkpoint is a finding; others (memory, a stop) end the work. */
static bool is_fact(fsdp_status status)
{
    return status == FSDP_ERR_DAMAGED || status == FSDP_ERR_NOT_FOUND ||
           status == FSDP_ERR_REFUSED || status == FSDP_ERR_IO;
}

/* The file name of a finding, empty when the checkpoint is one file, since its path is known. */
static void file_name(const verify_job *job, int number, char name[FSDP_SHARD_NAME_SIZE])
{
    name[0] = '\0';
    if (!job->is_one_file)
        fsdp_shard_name(number, job->checkpoint->manifest.file_count, name);
}

static const char *manifest_name(const verify_job *job)
{
    return job->is_one_file ? "" : FSDP_MANIFEST_NAME;
}

/* --- blocks ----------------------------------------------------------------------------------- */

static fsdp_status verify_box(verify_job *job, fsdp_shard_reader *reader,
                              const fsdp_stored_box *stored, fsdp_block_reader *block_reader,
                              fsdp_error *err)
{
    char file[FSDP_SHARD_NAME_SIZE], tensor[160];
    file_name(job, job->file, file);
    fsdp_printable(stored->name, stored->name_size, tensor, sizeof tensor);
    for (int64_t block = 0; block < stored->block_count; block++) {
        fsdp_error found = {0};
        int64_t before = block_reader->bytes_read;
        fsdp_status st = fsdp_check_block(block_reader, reader, stored, block, &found);
        if (st != FSDP_OK && !is_fact(st)) {
            if (err)
                *err = found;
            return st;
        }
        if (st != FSDP_OK)
            report_failure(job, file, tensor, block, &found);
        atomic_fetch_add(&job->blocks, 1);
        FSDP_TRY(fsdp_meter_add(&job->meter, block_reader->bytes_read - before, stored->name,
                                stored->name_size, err));
    }
    return FSDP_OK;
}

static fsdp_status verify_worker(void *context, size_t worker, fsdp_error *err)
{
    verify_job *job = context;
    fsdp_shard_reader *reader = fsdp_native_of(job->checkpoint)->readers[job->file];
    int64_t count = (int64_t)fsdp_shard_box_count(reader);
    fsdp_block_reader block_reader = {0};
    fsdp_status st = FSDP_OK;
    (void)worker;
    for (int64_t i; st == FSDP_OK && (i = atomic_fetch_add(&job->next, 1)) < count;)
        st = verify_box(job, reader, fsdp_shard_box_at(reader, (size_t)i), &block_reader, err);
    atomic_fetch_add(&job->bytes, block_reader.bytes_read);
    fsdp_block_reader_release(&block_reader);
    return st;
}

static fsdp_status verify_data(verify_job *job, fsdp_error *err)
{
    int threads = fsdp_block_readers_within(job->opts->threads, job->opts->memory,
                                            job->checkpoint->manifest.compressed);
    for (job->file = 0; job->file < job->checkpoint->manifest.file_count; job->file++) {
        if (!fsdp_native_of(job->checkpoint)->readers[job->file])
            continue;
        atomic_store(&job->next, 0);
        FSDP_TRY(fsdp_parallel(threads, (size_t)threads, verify_worker, job, err));
    }
    return FSDP_OK;
}

/* --- files ------------------------------------------------------------------------------------ */

static fsdp_status open_files(verify_job *job, fsdp_error *err)
{
    for (int i = 0; i < job->checkpoint->manifest.file_count; i++) {
        fsdp_error found = {0};
        char file[FSDP_SHARD_NAME_SIZE];
        fsdp_status st = fsdp_checkpoint_need_file(job->checkpoint, i, &found);
        if (st != FSDP_OK && !is_fact(st)) {
            if (err)
                *err = found;
            return st;
        }
        file_name(job, i, file);
        if (st != FSDP_OK)
            report_failure(job, file, "", -1, &found);
    }
    return FSDP_OK;
}

/* --- comparing with the manifest -------------------------------------------------------------- */

typedef struct coverage {
    verify_job *job;
    size_t entry;
    int64_t elements; /* stored, of the current entry */
    int64_t boxes;    /* found, over all entries */
} coverage;

static fsdp_status cover_box(void *context, int rank, size_t part, const fsdp_box *box,
                             fsdp_error *err)
{
    coverage *cover = context;
    const fsdp_stored_box *stored = NULL;
    fsdp_shard_reader *reader = NULL;
    fsdp_error found = {0};
    char file[FSDP_SHARD_NAME_SIZE], tensor[160];
    verify_job *job = cover->job;
    const fsdp_entry *entry = fsdp_sd_at(job->checkpoint->manifest.sd, cover->entry);
    int number = fsdp_checkpoint_file_of(job->checkpoint, rank);
    (void)err;
    cover->elements += fsdp_box_count(box);
    if (!fsdp_native_of(job->checkpoint)->readers[number])
        return FSDP_OK;
    cover->boxes++;
    fsdp_promised_box promised = {cover->entry, rank, part, box};
    if (fsdp_checkpoint_stored(job->checkpoint, &promised, &stored, &reader, &found) != FSDP_OK) {
        file_name(job, number, file);
        report(job, file, fsdp_printable(entry->name, entry->name_size, tensor, sizeof tensor), -1,
               found.text);
    }
    return FSDP_OK;
}

/* The view is optional; an existing one must equal the view that the manifest gives. */
static fsdp_status check_view(const fsdp_checkpoint *checkpoint, bool *there_out, bool *same_out,
                              fsdp_error *err)
{
    char *path = fsdp_path_join(checkpoint->path, FSDP_VIEW_NAME);
    if (!path)
        return fsdp_fail_memory(err, "a path");
    *there_out = fsdp_io_exists(checkpoint->io, path);
    fsdp_free(path);
    *same_out = true;
    if (!*there_out)
        return FSDP_OK;
    fsdp_view_opts view = {checkpoint->io, &checkpoint->manifest,
                           fsdp_native_of(checkpoint)->owners, false, NULL};
    return fsdp_view_check(&view, checkpoint->path, same_out, err);
}

/* Reports a finding that is no damage; called after the workers are done. */
static void report_beside(verify_job *job, const char *file, fsdp_finding_kind kind,
                          const char *text)
{
    *(kind == FSDP_FINDING_FIXED ? &job->fixed : &job->warnings) += 1;
    if (job->opts->finding)
        job->opts->finding(
            job->opts->finding_context,
            &(fsdp_finding){.file = file, .tensor = "", .block = -1, .text = text, .kind = kind});
}

static void report_fixed(verify_job *job, const char *file, const char *what)
{
    char text[FSDP_ERROR_TEXT];
    snprintf(text, sizeof text, "%s/%s: %s", job->checkpoint->path, file, what);
    report_beside(job, file, FSDP_FINDING_FIXED, text);
}

/* --- for other programs ----------------------------------------------------------------------- */

/* HDF5's structures in one shard file, which nothing hashes. */
static fsdp_status verify_structure(verify_job *job, int number, fsdp_error *err)
{
    const fsdp_manifest *manifest = &job->checkpoint->manifest;
    bool has_flats = manifest->kind == FSDP_LOCAL && fsdp_sd_flat_count(manifest->sd) > 0;
    fsdp_error found = {0};
    char file[FSDP_SHARD_NAME_SIZE];
    file_name(job, number, file);
    fsdp_status st = fsdp_shard_check_structure(
        job->checkpoint->io, fsdp_native_of(job->checkpoint)->readers[number],
        manifest->files[number].index_offset, !has_flats || manifest->compressed, &found);
    if (st == FSDP_OK)
        return FSDP_OK;
    if (st == FSDP_ERR_DAMAGED || st == FSDP_ERR_IO) {
        report_failure(job, file, "", -1, &found);
        return FSDP_OK;
    }
    if (st == FSDP_ERR_REFUSED) { /* no sandbox on this system; the data was checked nevertheless */
        report_beside(job, file, FSDP_FINDING_VALUE, found.text);
        return FSDP_OK;
    }
    if (err)
        *err = found;
    return st;
}

static fsdp_status verify_structures(verify_job *job, fsdp_error *err)
{
    for (int i = 0; i < job->checkpoint->manifest.file_count; i++)
        if (fsdp_native_of(job->checkpoint)->readers[i])
            FSDP_TRY(verify_structure(job, i, err));
    return FSDP_OK;
}

static fsdp_status repair_view(verify_job *job, bool *written_out, fsdp_error *err)
{
    const fsdp_checkpoint *checkpoint = job->checkpoint;
    fsdp_view_opts view = {checkpoint->io, &checkpoint->manifest,
                           fsdp_native_of(checkpoint)->owners, true, &job->opts->watch};
    FSDP_TRY(fsdp_view_replace(&view, checkpoint->path, written_out, err));
    if (!*written_out)
        return FSDP_OK;
    report_fixed(job, FSDP_VIEW_NAME, "the view was written again");
    return FSDP_OK;
}

/* A missing view is no damage: a save may leave it out without recording that, and always leaves out
 * one that is too large. */
static fsdp_status report_view(verify_job *job, bool there, fsdp_error *err)
{
    char text[FSDP_ERROR_TEXT];
    int64_t mappings;
    const fsdp_checkpoint *checkpoint = job->checkpoint;
    FSDP_TRY(fsdp_view_mappings(&checkpoint->manifest, fsdp_native_of(checkpoint)->owners,
                                &mappings, err));
    if (!there && mappings > FSDP_VIEW_MAPPINGS)
        return FSDP_OK;
    snprintf(text, sizeof text, "%s/" FSDP_VIEW_NAME ": %s", job->checkpoint->path,
             there ? "the view is not the one that belongs to this checkpoint; the data is not "
                     "affected, fsdp-verify --repair makes a new one"
                   : "there is no view, by which other programs see whole tensors, unless it was "
                     "left out on purpose; fsdp-verify --repair makes one");
    if (there)
        report(job, FSDP_VIEW_NAME, "", -1, text);
    else
        report_beside(job, FSDP_VIEW_NAME, FSDP_FINDING_VALUE, text);
    return FSDP_OK;
}

/* Runs after the data was verified: a damaged checkpoint is not repaired. */
static fsdp_status verify_view(verify_job *job, fsdp_error *err)
{
    fsdp_error found = {0};
    bool there = true, same = true, fixed = false;
    if (job->checkpoint->manifest.kind == FSDP_FULL)
        return FSDP_OK;
    fsdp_status st = check_view(job->checkpoint, &there, &same, &found);
    if (st != FSDP_OK && !is_fact(st)) {
        if (err)
            *err = found;
        return st;
    }
    bool wrong = !there || !same || (st != FSDP_OK && st != FSDP_ERR_IO);
    if (wrong && job->opts->repair && atomic_load(&job->findings) == 0)
        FSDP_TRY(repair_view(job, &fixed, err));
    if (fixed)
        return FSDP_OK;
    if (st != FSDP_OK)
        report_failure(job, FSDP_VIEW_NAME, "", -1, &found);
    else if (!same || !there)
        return report_view(job, there, err);
    return FSDP_OK;
}

/* Values are only scanned when all data is whole. */
static fsdp_status verify_values(verify_job *job, fsdp_error *err)
{
    if (atomic_load(&job->findings) > 0)
        return FSDP_OK;
    FSDP_TRY(fsdp_values_scan(job->checkpoint, job->opts, &job->meter, &job->warnings, err));
    fsdp_values_match(job->checkpoint->manifest.sd, job->opts, &job->warnings);
    return FSDP_OK;
}

static fsdp_status verify_coverage(verify_job *job, fsdp_error *err)
{
    const fsdp_manifest *manifest = &job->checkpoint->manifest;
    coverage cover = {.job = job};
    for (size_t i = 0; i < fsdp_sd_count(manifest->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(manifest->sd, i);
        if (entry->kind != FSDP_ENTRY_TENSOR)
            continue;
        fsdp_box whole = fsdp_box_whole(entry->ndim, entry->shape);
        char tensor[160];
        cover.entry = i;
        cover.elements = 0;
        FSDP_TRY(fsdp_box_plan_stored(entry, fsdp_native_of(job->checkpoint)->owners[i], &whole,
                                      cover_box, &cover, err));
        if (cover.elements != fsdp_box_count(&whole))
            report(job, manifest_name(job),
                   fsdp_printable(entry->name, entry->name_size, tensor, sizeof tensor), -1,
                   "its boxes do not hold every element exactly once");
    }
    int64_t stored = 0;
    cover.boxes += (int64_t)manifest->stored_count;
    for (int f = 0; f < manifest->file_count; f++)
        stored += fsdp_native_of(job->checkpoint)->readers[f]
                      ? (int64_t)fsdp_shard_box_count(fsdp_native_of(job->checkpoint)->readers[f])
                      : 0;
    if (manifest->kind != FSDP_LOCAL && stored != cover.boxes)
        report(job, manifest_name(job), "", -1,
               "the shard files hold boxes that the manifest does not know");
    return FSDP_OK;
}

/* --- the call --------------------------------------------------------------------------------- */

static int64_t bytes_to_read(const verify_job *job)
{
    int64_t bytes = 0;
    for (int f = 0; f < job->checkpoint->manifest.file_count; f++) {
        const fsdp_shard_reader *reader = fsdp_native_of(job->checkpoint)->readers[f];
        for (size_t i = 0; reader && i < fsdp_shard_box_count(reader); i++) {
            const fsdp_stored_box *box = fsdp_shard_box_at(reader, i);
            if (!box->encoded)
                bytes += box->count * (int64_t)box->element_size;
            for (int64_t b = 0; box->encoded && b < box->block_count; b++)
                bytes += box->frames[b].size;
        }
    }
    return bytes;
}

/* Values over 64 KiB lie in the first shard file. */
static fsdp_status verify_code(verify_job *job, fsdp_error *err)
{
    char shard[FSDP_SHARD_NAME_SIZE];
    file_name(job, 0, shard);
    return fsdp_code_report_values(job->opts, job->checkpoint->manifest.sd, manifest_name(job),
                                   shard, &job->code_files, err);
}

static fsdp_status verify(verify_job *job, fsdp_error *err)
{
    FSDP_TRY(open_files(job, err));
    FSDP_TRY(verify_coverage(job, err));
    bool deep = job->opts->level >= FSDP_VERIFY_DEEP;
    int64_t values = deep ? fsdp_values_bytes(job->checkpoint->manifest.sd) : 0;
    fsdp_meter_init(&job->meter, &job->opts->watch, bytes_to_read(job) + values);
    if (job->opts->level >= FSDP_VERIFY_DATA)
        FSDP_TRY(verify_data(job, err));
    FSDP_TRY(verify_code(job, err));
    if (deep)
        FSDP_TRY(verify_values(job, err));
    if (deep)
        FSDP_TRY(verify_structures(job, err));
    if (deep || job->opts->repair)
        FSDP_TRY(verify_view(job, err));
    if (job->opts->repair && atomic_load(&job->findings) == 0 &&
        fsdp_marker_forget(job->checkpoint->io, job->checkpoint->path))
        report_fixed(job, FSDP_MARKER_SAVING, "leftovers of a killed save were removed");
    return FSDP_OK;
}

static int64_t count_tensors(const fsdp_sd *sd)
{
    int64_t count = 0;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++)
        count += fsdp_sd_at(sd, i)->kind == FSDP_ENTRY_TENSOR;
    return count;
}

/* A bad manifest is the only finding of its checkpoint. */
static fsdp_status bad_manifest(verify_job *job, fsdp_status status, fsdp_error *found,
                                fsdp_error *err)
{
    if (status != FSDP_ERR_DAMAGED) {
        if (err)
            *err = *found;
        return status;
    }
    report(job, manifest_name(job), "", -1, found->text);
    return FSDP_OK;
}

/* Damage is a result of the verification; an unreadable file is an error. */
static fsdp_status judge(const char *path, const verify_job *job,
                         const fsdp_verify_summary *summary, fsdp_error *err)
{
    if (summary->unreadable > 0) {
        fsdp_fail(err, FSDP_ERR_IO, "not all of '%s' could be read: %s", path, job->reason);
        if (err)
            err->errnum = job->unreadable_errnum;
        return FSDP_ERR_IO;
    }
    if (summary->findings > 0)
        return fsdp_fail(err, FSDP_DIFFERS, "'%s' is damaged: %lld faults", path,
                         (long long)summary->findings);
    return FSDP_OK;
}

static fsdp_status check_repair(fsdp_io *io, const char *path, const fsdp_verify_opts *opts,
                                fsdp_error *err)
{
    if (opts->repair && opts->level < FSDP_VERIFY_DATA)
        return fsdp_fail(err, FSDP_ERR_USAGE, "nothing is repaired before its data was read");
    if (opts->repair && fsdp_path_is_foreign(io, path))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' is a checkpoint of another program: nothing in it can be repaired",
                         path);
    return FSDP_OK;
}

static fsdp_status verify_native(fsdp_io *io, const char *path, const fsdp_verify_opts *opts,
                                 fsdp_verify_summary *summary, fsdp_error *err)
{
    fsdp_error found = {0};
    verify_job job = {.opts = opts, .reporting = ATOMIC_FLAG_INIT};
    job.is_one_file = fsdp_is_one_file(io, path);
    fsdp_status st = fsdp_checkpoint_open_alone(io, path, &job.checkpoint, &found);
    if (st != FSDP_OK)
        st = bad_manifest(&job, st, &found, err);
    else
        st = verify(&job, err);
    if (job.checkpoint) {
        summary->files = job.checkpoint->manifest.file_count;
        summary->tensors = count_tensors(job.checkpoint->manifest.sd);
    }
    summary->blocks = atomic_load(&job.blocks);
    summary->bytes = summary->checked_bytes = atomic_load(&job.bytes);
    summary->findings = atomic_load(&job.findings);
    summary->unreadable = job.unreadable;
    summary->warnings = job.warnings;
    summary->fixed = job.fixed;
    summary->code_files = job.code_files;
    fsdp_checkpoint_close(job.checkpoint);
    return st != FSDP_OK ? st : judge(path, &job, summary, err);
}

fsdp_status fsdp_checkpoint_verify(const char *path, const fsdp_verify_opts *opts,
                                   fsdp_verify_summary *summary_out, fsdp_error *err)
{
    FSDP_NEED(err, path);
    static const fsdp_verify_opts defaults = {0};
    fsdp_verify_summary summary = {0};
    opts = opts ? opts : &defaults;
    fsdp_io *io = fsdp_access_io(&opts->access);
    if (summary_out)
        *summary_out = summary;
    FSDP_TRY(fsdp_check_budget(opts->threads, opts->memory, err));
    FSDP_TRY(check_repair(io, path, opts, err));
    fsdp_status st = fsdp_path_is_foreign(io, path)
                         ? fsdp_foreign_verify(io, path, opts, &summary, err)
                         : verify_native(io, path, opts, &summary, err);
    st = fsdp_digests_verify(io, path, opts, &summary, st, err);
    if (summary_out)
        *summary_out = summary;
    return st;
}
