/*
 * Verifies a native checkpoint. Quick: manifest, file sizes, shard indexes, and that they hold
 * every box that the manifest promises and no other. Data: every block against its hash. Deep: the
 * values, and the parts for other programs: HDF5's structures and the view. Every
 * fault is reported; verification continues to find the others. Only the view can be repaired, because
 * all of it follows from the manifest.
 */
#include "statedict/checkpoint/checkpoint_internal.h"
#include "base/core/given.h"
#include "base/core/pool.h"
#include "base/io/io_cache.h"
#include "formats/source.h"
#include "statedict/checkpoint/digests.h"
#include "statedict/checkpoint/one_file.h"
#include "statedict/checkpoint/verify_code.h"
#include "statedict/checkpoint/view.h"
#include "statedict/commit/commit_internal.h"
#include "statedict/manifest/large_value.h"
#include "statedict/sd/layout_internal.h"
#include "statedict/sd/names.h"
#include <fsdp/stats.h>

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* === code in values and files ================================================================= */

fsdp_status fsdp_value_code(const fsdp_value *value, fsdp_text *names, fsdp_error *err)
{
    if (value->kind == FSDP_VALUE_OPAQUE)
        return fsdp_source_blob_code(value->as.bytes.data, value->as.bytes.size, names, err);
    bool is_list = value->kind == FSDP_VALUE_LIST || value->kind == FSDP_VALUE_DICT;
    for (size_t i = 0; is_list && i < value->as.list.count; i++)
        FSDP_TRY(fsdp_value_code(&value->as.list.items[i], names, err));
    return FSDP_OK;
}

/* Reports that a file holds such objects; tensor: the printable name of the value, or "". */
static fsdp_status code_report(const fsdp_verify_opts *opts, const char *file, const char *tensor,
                               const fsdp_text *names, fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_text_addf(&text, "%s%s%s%s%s runs code when a program loads it: %s", file[0] ? "'" : "",
                   file, file[0] ? "'" : "", tensor[0] ? ": " : "", tensor, names->data);
    bool is_whole = !text.failed;
    if (is_whole && opts->finding)
        opts->finding(opts->finding_context, &(fsdp_finding){.file = file,
                                                             .tensor = tensor,
                                                             .block = -1,
                                                             .text = text.data,
                                                             .kind = FSDP_FINDING_CODE});
    fsdp_text_release(&text);
    return is_whole ? FSDP_OK : fsdp_fail_memory(err, "a finding");
}

/* The classes of an entry. A refused call is not damage, because the bytes are as they were saved. */
static fsdp_status find_code(const fsdp_entry *entry, fsdp_text *names, fsdp_error *err)
{
    fsdp_error found = {0};
    if (entry->kind != FSDP_ENTRY_VALUE)
        return FSDP_OK;
    fsdp_status st = fsdp_value_code(&entry->value, names, &found);
    if (st == FSDP_ERR_REFUSED) {
        fsdp_text_addf(names, "%sa call that is refused", names->size > 0 ? ", " : "");
        st = FSDP_OK;
    }
    if (st != FSDP_OK && err)
        *err = found;
    return st == FSDP_OK && names->failed ? fsdp_fail_memory(err, "a finding") : st;
}

/* Reports each such value of a native checkpoint; *files counts the files that hold some. */
static fsdp_status code_report_values(const fsdp_verify_opts *opts, const fsdp_sd *sd,
                                      const char *manifest, const char *shard, int64_t *files,
                                      fsdp_error *err)
{
    bool in_manifest = false, in_shard = false;
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < fsdp_sd_count(sd) && st == FSDP_OK; i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        fsdp_text names = {0};
        char name[160];
        st = find_code(entry, &names, err);
        if (st == FSDP_OK && names.size > 0) {
            bool is_large = fsdp_value_is_large(&entry->value);
            fsdp_printable(entry->name, entry->name_size, name, sizeof name);
            st = code_report(opts, is_large ? shard : manifest, name, &names, err);
            in_manifest |= !is_large;
            in_shard |= is_large;
        }
        fsdp_text_release(&names);
    }
    *files += in_manifest + (in_shard && (shard[0] || !in_manifest));
    return st;
}

/* === values =================================================================================== */

/*
 * Deep verification of values: NaN and infinite numbers, and optimizer states without their parameters.
 * Findings are of the kind FSDP_FINDING_VALUE and no damage. Several threads read the tensors; findings
 * are reported afterwards in the order of the state dict.
 */

/* Deep verification of values: NaN and infinite numbers, and optimizer states without their parameters.
 * Findings are of the kind FSDP_FINDING_VALUE and no damage. */

/* A moment has the name of its parameter, with the prefix "model." or without. */
enum { NAME_ROOM = 4096 };

static void warn(const fsdp_verify_opts *opts, const fsdp_entry *entry, const char *what,
                 int64_t *warnings)
{
    char tensor[160], text[FSDP_ERROR_TEXT];
    fsdp_printable(entry->name, entry->name_size, tensor, sizeof tensor);
    snprintf(text, sizeof text, "%s: %s", tensor, what);
    ++*warnings;
    if (opts->finding)
        opts->finding(opts->finding_context, &(fsdp_finding){.file = "",
                                                             .tensor = tensor,
                                                             .block = -1,
                                                             .text = text,
                                                             .kind = FSDP_FINDING_VALUE});
}

/* --- NaN and Inf ------------------------------------------------------------------------------ */

typedef struct value_scan {
    fsdp_checkpoint *checkpoint;
    fsdp_meter *meter;
    fsdp_stats *stats; /* per entry */
    int64_t memory;    /* of one worker's slab */
    atomic_llong next; /* entry to take */
} value_scan;

typedef struct tensor_scan {
    fsdp_stats *stats;
    fsdp_meter *meter;
} tensor_scan;

static bool has_floats(const fsdp_entry *entry)
{
    return entry->kind == FSDP_ENTRY_TENSOR && fsdp_dtype_describe(entry->dtype)->is_float;
}

/* The number of bytes that values_scan reads. */
static int64_t values_bytes(const fsdp_sd *sd)
{
    int64_t bytes = 0;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++)
        if (has_floats(fsdp_sd_at(sd, i)))
            bytes += fsdp_entry_bytes(fsdp_sd_at(sd, i));
    return bytes;
}

static fsdp_status add_slab(void *context, const fsdp_entry *entry, int64_t first, int64_t count,
                            const void *data, fsdp_error *err)
{
    tensor_scan *scan = context;
    (void)first;
    fsdp_stats_add(scan->stats, entry->dtype, data, count);
    return fsdp_meter_add(scan->meter, count * (int64_t)fsdp_dtype_size(entry->dtype), entry->name,
                          entry->name_size, err);
}

static fsdp_status scan_worker(void *context, size_t worker, fsdp_error *err)
{
    value_scan *job = context;
    const fsdp_sd *sd = job->checkpoint->manifest.sd;
    int64_t count = (int64_t)fsdp_sd_count(sd);
    fsdp_status st = FSDP_OK;
    (void)worker;
    for (int64_t i; st == FSDP_OK && (i = atomic_fetch_add(&job->next, 1)) < count;) {
        tensor_scan scan = {&job->stats[i], job->meter};
        if (has_floats(fsdp_sd_at(sd, (size_t)i)))
            st = fsdp_checkpoint_stream(job->checkpoint, (size_t)i, job->memory, add_slab, &scan,
                                        err);
    }
    if (st != FSDP_OK)
        atomic_store(&job->next, count);
    return st;
}

/* Reports the stats of one tensor that has NaN or infinite numbers. */
static void values_report(const fsdp_verify_opts *opts, const fsdp_entry *entry,
                          const fsdp_stats *stats, int64_t *warnings)
{
    char what[80];
    if (stats->nans > 0 && stats->infinities > 0)
        snprintf(what, sizeof what, "holds %" PRId64 " NaN and %" PRId64 " Inf", stats->nans,
                 stats->infinities);
    else if (stats->nans > 0)
        snprintf(what, sizeof what, "holds %" PRId64 " NaN", stats->nans);
    else if (stats->infinities > 0)
        snprintf(what, sizeof what, "holds %" PRId64 " Inf", stats->infinities);
    else
        return;
    warn(opts, entry, what, warnings);
}

/* Reads every floating tensor of a checkpoint whose files are all open and undamaged. */
static fsdp_status values_scan(fsdp_checkpoint *checkpoint, const fsdp_verify_opts *opts,
                               fsdp_meter *meter, int64_t *warnings, fsdp_error *err)
{
    const fsdp_sd *sd = checkpoint->manifest.sd;
    int64_t memory = opts->memory > 0 ? opts->memory : FSDP_MEMORY_DEFAULT;
    /* half for the slabs, half for the buffers that fill them */
    int threads =
        fsdp_block_readers_within(opts->threads, memory / 2 + 1, checkpoint->manifest.compressed);
    value_scan job = {.checkpoint = checkpoint, .meter = meter, .memory = memory / 2 / threads + 1};
    job.stats = fsdp_alloc(fsdp_sd_count(sd) + 1, sizeof *job.stats);
    if (!job.stats)
        return fsdp_fail_memory(err, "statistics");
    fsdp_status st = fsdp_parallel(threads, (size_t)threads, scan_worker, &job, err);
    for (size_t i = 0; i < fsdp_sd_count(sd) && st == FSDP_OK; i++)
        values_report(opts, fsdp_sd_at(sd, i), &job.stats[i], warnings);
    fsdp_free(job.stats);
    return st;
}

/* --- the optimizer's states belong to the model ----------------------------------------------- */

/* FQN.KEY of an optimizer's tensor. */
static bool cut_prefix(const fsdp_entry *entry, const char **rest_out, size_t *size_out)
{
    static const char *const prefixes[] = {"optim.state.", "optimizer.state."};
    for (size_t i = 0; i < sizeof prefixes / sizeof prefixes[0]; i++) {
        size_t size = strlen(prefixes[i]);
        if (entry->name_size <= size || memcmp(entry->name, prefixes[i], size) != 0)
            continue;
        *rest_out = entry->name + size;
        *size_out = entry->name_size - size;
        return true;
    }
    return false;
}

/* The tensor of that name, or the one that an alias names; NULL when there is none. */
static const fsdp_entry *find_tensor(const fsdp_sd *sd, const char *name, size_t size)
{
    int64_t at = fsdp_sd_find(sd, name, size);
    const fsdp_entry *entry = at < 0 ? NULL : fsdp_sd_at(sd, (size_t)at);
    if (entry && entry->kind == FSDP_ENTRY_ALIAS)
        entry = fsdp_sd_at(sd, entry->target);
    return entry && entry->kind == FSDP_ENTRY_TENSOR ? entry : NULL;
}

static const fsdp_entry *find_parameter(const fsdp_sd *sd, const char *fqn, size_t size)
{
    char name[NAME_ROOM] = "model.";
    size_t prefix = strlen(name);
    memcpy(name + prefix, fqn, size);
    const fsdp_entry *found = find_tensor(sd, name, prefix + size);
    return found ? found : find_tensor(sd, fqn, size);
}

/* FQN and KEY may contain dots: takes the longest FQN that is a tensor. */
static const fsdp_entry *find_owner(const fsdp_sd *sd, const char *rest, size_t size,
                                    size_t *key_out)
{
    for (size_t at = size; at-- > 1;) {
        const fsdp_entry *found = rest[at] == '.' ? find_parameter(sd, rest, at) : NULL;
        *key_out = at + 1;
        if (found)
            return found;
    }
    return NULL;
}

/* States of PyTorch's optimizers with one element per element of the parameter. Others, factored or
 * quantised, may have any shape. */
static bool is_moment(const char *key, size_t size)
{
    static const char *const moments[] = {
        "exp_avg",    "exp_avg_sq", "max_exp_avg_sq", "exp_inf",   "momentum_buffer",
        "square_avg", "sum",        "grad_avg",       "acc_delta", "step_size",
        "prev",       "ax"};
    for (size_t i = 0; i < sizeof moments / sizeof moments[0]; i++)
        if (strlen(moments[i]) == size && memcmp(moments[i], key, size) == 0)
            return true;
    return false;
}

static bool has_same_shape(const fsdp_entry *a, const fsdp_entry *b)
{
    return a->ndim == b->ndim &&
           (a->ndim == 0 || memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0);
}

/* Plain optimizers of PyTorch number their parameters, and a number does not identify a name. */
static bool is_numbered(const char *rest, size_t size)
{
    size_t digits = 0;
    while (digits < size && rest[digits] >= '0' && rest[digits] <= '9')
        digits++;
    return digits > 0 && digits < size && rest[digits] == '.';
}

/* A checkpoint may hold optimizer states without a model. */
static bool has_model(const fsdp_sd *sd)
{
    const char *rest;
    size_t size;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++)
        if (fsdp_sd_at(sd, i)->kind == FSDP_ENTRY_TENSOR &&
            !cut_prefix(fsdp_sd_at(sd, i), &rest, &size))
            return true;
    return false;
}

static void match_state(const fsdp_sd *sd, const fsdp_entry *state, const fsdp_verify_opts *opts,
                        int64_t *warnings)
{
    const char *rest = NULL;
    size_t size = 0, key = 0;
    char own[128], of[128], name[160], what[512];
    if (!cut_prefix(state, &rest, &size) || size > NAME_ROOM - 16)
        return;
    const fsdp_entry *parameter = find_owner(sd, rest, size, &key);
    if (!parameter) {
        if (!is_numbered(rest, size))
            warn(opts, state, "belongs to no tensor of the model", warnings);
        return;
    }
    if (state->ndim == 0 || !is_moment(rest + key, size - key) || has_same_shape(state, parameter))
        return;
    fsdp_printable(parameter->name, parameter->name_size, name, sizeof name);
    snprintf(what, sizeof what, "has the shape %s, %s has %s",
             fsdp_shape_text(state->ndim, state->shape, own, sizeof own), name,
             fsdp_shape_text(parameter->ndim, parameter->shape, of, sizeof of));
    warn(opts, state, what, warnings);
}

/* Reports optimizer tensors optim.state.FQN.KEY (or optimizer.state.) for whose FQN there is no tensor, or
 * one of another shape. */
static void values_match(const fsdp_sd *sd, const fsdp_verify_opts *opts, int64_t *warnings)
{
    bool whole = has_model(sd);
    for (size_t i = 0; i < fsdp_sd_count(sd) && whole; i++)
        if (fsdp_sd_at(sd, i)->kind == FSDP_ENTRY_TENSOR)
            match_state(sd, fsdp_sd_at(sd, i), opts, warnings);
}

/* === checkpoints of other programs ============================================================ */

typedef struct foreign_job {
    const fsdp_verify_opts *opts;
    fsdp_verify_summary summary;
    fsdp_stats stats; /* of the current tensor, when deep */
    fsdp_meter meter;
} foreign_job;

/* Damage is a finding; failures that stop the work stay errors. */
static fsdp_status judge_read(foreign_job *job, fsdp_status status, const fsdp_error *found,
                              const char *tensor, fsdp_error *err)
{
    bool unreadable = status == FSDP_ERR_IO;
    if (status == FSDP_OK)
        return FSDP_OK;
    if (status != FSDP_ERR_DAMAGED && !unreadable) {
        if (err)
            *err = *found;
        return status;
    }
    job->summary.findings++;
    job->summary.unreadable += unreadable;
    fsdp_finding finding = {
        .file = "", .tensor = tensor, .block = -1, .text = found->text, .unreadable = unreadable};
    if (job->opts->finding)
        job->opts->finding(job->opts->finding_context, &finding);
    return FSDP_OK;
}

static fsdp_status count_slab(void *context, const fsdp_entry *entry, int64_t first, int64_t count,
                              const void *data, fsdp_error *err)
{
    foreign_job *job = context;
    int64_t bytes = count * (int64_t)fsdp_dtype_size(entry->dtype);
    (void)first;
    if (job->opts->level >= FSDP_VERIFY_DEEP)
        fsdp_stats_add(&job->stats, entry->dtype, data, count);
    job->summary.blocks++;
    job->summary.bytes += bytes;
    return fsdp_meter_add(&job->meter, bytes, entry->name, entry->name_size, err);
}

static fsdp_status read_all(foreign_job *job, fsdp_checkpoint *checkpoint, fsdp_error *err)
{
    const fsdp_sd *sd = checkpoint->manifest.sd;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        fsdp_error found = {0};
        char name[160];
        if (entry->kind != FSDP_ENTRY_TENSOR)
            continue;
        job->summary.tensors++;
        job->stats = (fsdp_stats){0};
        fsdp_status st =
            fsdp_checkpoint_stream(checkpoint, i, job->opts->memory, count_slab, job, &found);
        fsdp_printable(entry->name, entry->name_size, name, sizeof name);
        FSDP_TRY(judge_read(job, st, &found, name, err));
        if (st == FSDP_OK)
            values_report(job->opts, entry, &job->stats, &job->summary.warnings);
    }
    if (job->opts->level >= FSDP_VERIFY_DEEP)
        values_match(sd, job->opts, &job->summary.warnings);
    return FSDP_OK;
}

/* Names the files that run code when a program loads them. */
static fsdp_status report_code(foreign_job *job, const fsdp_checkpoint *checkpoint, fsdp_error *err)
{
    const fsdp_source *source = checkpoint->source;
    for (size_t i = 0; i < fsdp_source_file_count(source); i++) {
        fsdp_text names = {0};
        const char *name;
        for (size_t n = 0; (name = fsdp_source_code_at(source, i, n)) != NULL; n++)
            fsdp_text_addf(&names, n > 0 ? ", %s" : "%s", name);
        fsdp_status st = FSDP_OK;
        if (names.failed)
            st = fsdp_fail_memory(err, "a finding");
        else if (names.size > 0)
            st = code_report(job->opts, fsdp_source_file_path(source, i), "", &names, err);
        job->summary.code_files += names.size > 0;
        fsdp_text_release(&names);
        FSDP_TRY(st);
    }
    return FSDP_OK;
}

static fsdp_status verify_opened(foreign_job *job, fsdp_checkpoint *checkpoint, fsdp_error *err)
{
    fsdp_error found = {0};
    job->summary.files = checkpoint->info.file_count;
    FSDP_TRY(report_code(job, checkpoint, err));
    if (job->opts->level < FSDP_VERIFY_DATA)
        return FSDP_OK;
    int64_t check_bytes = fsdp_checkpoint_check_bytes(checkpoint);
    fsdp_meter_part part = {.meter = &job->meter};
    fsdp_watch watch = fsdp_meter_part_watch(&part);
    fsdp_meter_init(&job->meter, &job->opts->watch, check_bytes + checkpoint->info.tensor_bytes);
    job->meter.phase = "check";
    fsdp_status st = fsdp_checkpoint_check(checkpoint, job->opts->threads, &watch, &found);
    job->summary.checked_bytes =
        checkpoint->source ? fsdp_source_checked_bytes(checkpoint->source) : 0;
    FSDP_TRY(judge_read(job, st, &found, "", err));
    FSDP_TRY(fsdp_meter_part_end(&part, check_bytes, err)); /* a fault ends the check */
    job->meter.phase = "read";
    FSDP_TRY(read_all(job, checkpoint, err));
    st = fsdp_checkpoint_check_unchanged(checkpoint, &found);
    return judge_read(job, st, &found, "", err);
}

/* fsdp_checkpoint_verify for checkpoints of other programs: compares the format's
 * checksums, if it has any, and reads every tensor. */
static fsdp_status foreign_verify(fsdp_io *io, const char *path, const fsdp_verify_opts *opts,
                                  fsdp_verify_summary *summary_out, fsdp_error *err)
{
    foreign_job job = {.opts = opts};
    fsdp_checkpoint *checkpoint = NULL;
    fsdp_error found = {0};
    fsdp_io *cache = NULL;
    const fsdp_open_opts open = {.variant = opts->variant};
    FSDP_TRY(fsdp_io_cache_create(io, &cache, err));
    fsdp_status st = fsdp_foreign_open(cache, path, &open, NULL, &checkpoint, &found);
    fsdp_io_cache_end(cache);
    if (st == FSDP_OK)
        st = verify_opened(&job, checkpoint, err);
    else if (st == FSDP_ERR_DAMAGED)
        st = judge_read(&job, st, &found, "", err);
    else if (err)
        *err = found;
    fsdp_checkpoint_close(checkpoint);
    fsdp_io_cache_free(cache);
    if (summary_out)
        *summary_out = job.summary;
    if (st != FSDP_OK)
        return st;
    if (job.summary.unreadable > 0)
        return fsdp_fail(err, FSDP_ERR_IO, "not all of '%s' could be read", path);
    if (job.summary.findings > 0)
        return fsdp_fail(err, FSDP_DIFFERS, "'%s' is damaged: %lld faults", path,
                         (long long)job.summary.findings);
    return FSDP_OK;
}

/* === native checkpoints ======================================================================= */

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

/* An error of the disk or of permissions is not a finding: the bytes may be good. */
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

/* Reports a finding that is not damage; called after the workers are done. */
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

/* A missing view is not damage: a save may leave it out without recording that, and always leaves out
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
             there ? "the view does not belong to this checkpoint; the data is not affected; make "
                     "a new view with fsdp-verify --repair"
                   : "the view is missing, which shows whole tensors to other programs; unless it "
                     "was left out on purpose, make one with fsdp-verify --repair");
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
    FSDP_TRY(values_scan(job->checkpoint, job->opts, &job->meter, &job->warnings, err));
    values_match(job->checkpoint->manifest.sd, job->opts, &job->warnings);
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
               "the shard files hold boxes that the manifest does not list");
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
    return code_report_values(job->opts, job->checkpoint->manifest.sd, manifest_name(job), shard,
                              &job->code_files, err);
}

static fsdp_status verify(verify_job *job, fsdp_error *err)
{
    FSDP_TRY(open_files(job, err));
    FSDP_TRY(verify_coverage(job, err));
    bool deep = job->opts->level >= FSDP_VERIFY_DEEP;
    int64_t values = deep ? values_bytes(job->checkpoint->manifest.sd) : 0;
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
        return fsdp_fail(err, FSDP_ERR_USAGE, "cannot repair before the data was read");
    if (opts->repair && fsdp_path_is_foreign(io, path))
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "'%s' is a checkpoint of another program; only those of fsdp can be repaired", path);
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
    fsdp_status st = fsdp_path_is_foreign(io, path) ? foreign_verify(io, path, opts, &summary, err)
                                                    : verify_native(io, path, opts, &summary, err);
    st = fsdp_digests_verify(io, path, opts, &summary, st, err);
    if (summary_out)
        *summary_out = summary;
    return st;
}
