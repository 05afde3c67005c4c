/*
 * Checkpoints of other programs: the catalog of a source (formats/source.h) becomes a state dict in
 * which every tensor is whole, and wanted boxes are read from it. See foreign.h.
 */
#include "statedict/checkpoint/foreign.h"

#include "statedict/checkpoint/incomplete.h"
#include "statedict/checkpoint/one_file.h"
#include "statedict/checkpoint/verify_values.h"

#include "base/data/name_path.h"
#include "base/core/pool.h"
#include "formats/source.h"
#include "statedict/commit/commit_internal.h"
#include "statedict/sd/layout_internal.h"
#include <fsdp/convert.h>
#include <fsdp/run.h>

#include <limits.h>
#include <stdio.h>
#include <string.h>

typedef struct own_files {
    bool manifest, other;
} own_files;

static int find_own_file(void *user, const char *name)
{
    own_files *found = user;
    if (strcmp(name, FSDP_MANIFEST_NAME) == 0)
        found->manifest = true;
    else
        found->other = fsdp_is_checkpoint_file(name);
    return found->other;
}

/* Many programs have a file called manifest.json: alone it must begin like ours. */
static bool holds_own_files(fsdp_io *io, const char *directory)
{
    own_files found = {0};
    bool ours = false;
    if (io->ops->list(io, directory, find_own_file, &found) < 0 || found.other)
        return true;
    return found.manifest && (fsdp_manifest_is_ours(io, directory, &ours, NULL) != FSDP_OK || ours);
}

bool fsdp_path_is_foreign(fsdp_io *io, const char *path)
{
    fsdp_file_info info;
    if (io->ops->info(io, path, &info) < 0)
        return fsdp_source_is_pattern(path);
    if (info.kind != FSDP_FILE_DIRECTORY)
        return !fsdp_is_one_file(io, path);
    return !holds_own_files(io, path);
}

bool fsdp_path_has_manifest(const char *path, fsdp_io *io)
{
    io = io ? io : fsdp_io_posix();
    char *manifest = fsdp_path_join(path, FSDP_MANIFEST_NAME);
    bool is_there = manifest && fsdp_io_exists(io, manifest);
    fsdp_free(manifest);
    return is_there && holds_own_files(io, path);
}

void fsdp_sandbox_by_limits_only(void)
{
    fsdp_source_limit_only();
}

void fsdp_follow_links(void)
{
    fsdp_io_follow_links();
}

/* --- opening ---------------------------------------------------------------------------------- */

static fsdp_status add_tensor(fsdp_checkpoint *checkpoint, const fsdp_source_tensor *tensor,
                              const fsdp_mesh *mesh, fsdp_error *err)
{
    const fsdp_placement whole = {.kind = FSDP_REPLICATE};
    return fsdp_sd_add_sharded(checkpoint->manifest.sd, tensor->name, tensor->name_size,
                               tensor->dtype, tensor->ndim, tensor->shape, mesh, &whole, NULL, err);
}

static fsdp_status add_alias(fsdp_checkpoint *checkpoint, const fsdp_source_entry *entry,
                             fsdp_error *err)
{
    const fsdp_source_tensor *tensor = fsdp_source_tensor_at(checkpoint->source, entry->tensor);
    return fsdp_sd_add_alias(checkpoint->manifest.sd, entry->name, entry->name_size, tensor->name,
                             tensor->name_size, err);
}

/* What has no path there is not nested. That is only worth noting where we would nest it. */
static fsdp_status add_path(fsdp_checkpoint *checkpoint, size_t i, const fsdp_source_entry *entry,
                            fsdp_error *err)
{
    const int32_t flat = (int32_t)entry->name_size;
    const int32_t *path = entry->path ? entry->path : &flat;
    size_t count = entry->path ? entry->path_count : 1;
    if (fsdp_path_is_default(entry->name, entry->name_size, path, count))
        return FSDP_OK;
    return fsdp_sd_set_path(checkpoint->manifest.sd, i, path, count, err);
}

static fsdp_status add_entries(fsdp_checkpoint *checkpoint, const fsdp_mesh *mesh, fsdp_error *err)
{
    fsdp_source *source = checkpoint->source;
    size_t count = fsdp_source_entry_count(source);
    checkpoint->source_tensor = fsdp_alloc(count, sizeof *checkpoint->source_tensor);
    if (!checkpoint->source_tensor)
        return fsdp_fail_memory(err, "a checkpoint");
    fsdp_sd_expect(checkpoint->manifest.sd, count);
    for (size_t i = 0; i < count; i++) {
        const fsdp_source_entry *entry = fsdp_source_entry_at(source, i);
        checkpoint->source_tensor[i] = entry->tensor;
        if (entry->is_tensor)
            FSDP_TRY(
                add_tensor(checkpoint, fsdp_source_tensor_at(source, entry->tensor), mesh, err));
        else if (entry->is_alias)
            FSDP_TRY(add_alias(checkpoint, entry, err));
        else
            FSDP_TRY(fsdp_sd_add_value(checkpoint->manifest.sd, entry->name, entry->name_size,
                                       entry->value, err));
        FSDP_TRY(add_path(checkpoint, i, entry, err));
    }
    return FSDP_OK;
}

static int file_of(const fsdp_source_chunk *chunk)
{
    return chunk->file >= 0 ? chunk->file : chunk->origin;
}

static fsdp_status count_boxes(fsdp_checkpoint *checkpoint, fsdp_error *err)
{
    const fsdp_source *source = checkpoint->source;
    checkpoint->source_boxes =
        fsdp_alloc(fsdp_source_file_count(source), sizeof *checkpoint->source_boxes);
    if (!checkpoint->source_boxes)
        return fsdp_fail_memory(err, "a checkpoint");
    for (size_t i = 0; i < fsdp_source_tensor_count(source); i++) {
        const fsdp_source_tensor *tensor = fsdp_source_tensor_at(source, i);
        for (size_t c = 0; c < tensor->chunk_count; c++)
            checkpoint->source_boxes[file_of(&tensor->chunks[c])]++;
    }
    return FSDP_OK;
}

static fsdp_status describe(fsdp_checkpoint *checkpoint, fsdp_error *err)
{
    fsdp_mesh *mesh = NULL;
    const fsdp_source *source = checkpoint->source;
    FSDP_TRY(fsdp_sd_create(&checkpoint->manifest.sd, err));
    FSDP_TRY(fsdp_mesh_create(1, (int64_t[]){1}, (const char *[]){"dp"}, NULL, &mesh, err));
    fsdp_status st = add_entries(checkpoint, mesh, err);
    fsdp_mesh_free(mesh);
    FSDP_TRY(st);
    checkpoint->info = (fsdp_checkpoint_info){.path = checkpoint->path,
                                              .format = fsdp_source_format(source),
                                              .kind = FSDP_FULL,
                                              .step = FSDP_STEP_NONE,
                                              .world = 1,
                                              .file_count = (int)fsdp_source_content_count(source)};
    for (size_t i = 0; i < fsdp_source_content_count(source); i++)
        checkpoint->info.file_bytes += fsdp_source_file_size(source, i);
    checkpoint->info.tensor_bytes = fsdp_sd_tensor_bytes(checkpoint->manifest.sd);
    return count_boxes(checkpoint, err);
}

static bool may_lack(void *user, const char *name, size_t size)
{
    return fsdp_filter_selects(user, name, size);
}

static fsdp_status open_source(fsdp_checkpoint *checkpoint, const char *path, const char *format,
                               fsdp_error *err)
{
    fsdp_source_opts opts = {.format = format,
                             .may_lack = checkpoint->may_lack ? may_lack : NULL,
                             .user = checkpoint->may_lack};
    checkpoint->path = fsdp_strndup(path, strlen(path));
    if (!checkpoint->path)
        return fsdp_fail_memory(err, "a path");
    FSDP_TRY(fsdp_source_open(checkpoint->io, path, &opts, &checkpoint->source, err));
    return describe(checkpoint, err);
}

fsdp_status fsdp_foreign_open(fsdp_io *io, const char *path, const fsdp_open_opts *opts,
                              fsdp_checkpoint **checkpoint_out, fsdp_error *err)
{
    fsdp_checkpoint *checkpoint = fsdp_alloc(1, sizeof *checkpoint);
    if (!checkpoint)
        return fsdp_fail_memory(err, "a checkpoint");
    checkpoint->io = io;
    checkpoint->manifest.step = FSDP_STEP_NONE;
    checkpoint->manifest.kind = FSDP_FULL;
    checkpoint->manifest.world = 1;
    fsdp_status st = fsdp_incomplete_allow(checkpoint, opts, err);
    if (st == FSDP_OK)
        st = open_source(checkpoint, path, opts ? opts->format : NULL, err);
    if (st == FSDP_OK)
        st = fsdp_incomplete_mark(checkpoint, err);
    if (st != FSDP_OK) {
        fsdp_checkpoint_close(checkpoint);
        return st;
    }
    *checkpoint_out = checkpoint;
    return FSDP_OK;
}

static bool lies_in(fsdp_io *io, const char *path, const char *dir)
{
    char *own = NULL, *parent = NULL;
    bool inside = fsdp_path_split(path, &own, &parent, NULL) == FSDP_OK &&
                  fsdp_paths_are_same(io, parent, dir);
    fsdp_free(own);
    fsdp_free(parent);
    return inside;
}

bool fsdp_foreign_lies_in(const fsdp_checkpoint *checkpoint, const char *dir)
{
    const fsdp_source *source = checkpoint->source;
    if (lies_in(checkpoint->io, checkpoint->path, dir))
        return true;
    for (size_t i = 0; source && i < fsdp_source_file_count(source); i++)
        if (lies_in(checkpoint->io, fsdp_source_file_path(source, i), dir))
            return true;
    return false;
}

bool fsdp_foreign_takes_in(const fsdp_checkpoint *checkpoint, const char *path)
{
    return lies_in(checkpoint->io, path, checkpoint->path);
}

bool fsdp_foreign_reads(const fsdp_checkpoint *checkpoint, const char *path)
{
    const fsdp_source *source = checkpoint->source;
    for (size_t i = 0; source && i < fsdp_source_file_count(source); i++)
        if (fsdp_paths_are_same(checkpoint->io, fsdp_source_file_path(source, i), path))
            return true;
    return false;
}

/* Paths of files begin with the path of the checkpoint, unless it is that file. */
static const char *within(const char *path, const char *file)
{
    size_t size = strlen(path);
    const char *slash = strrchr(file, '/');
    if (strncmp(path, file, size) == 0 && file[size] == '/')
        return file + size + 1;
    return slash ? slash + 1 : file;
}

void fsdp_foreign_file_at(const fsdp_checkpoint *checkpoint, int number,
                          fsdp_checkpoint_file *file_out)
{
    const fsdp_source *source = checkpoint->source;
    *file_out = (fsdp_checkpoint_file){.size = fsdp_source_file_size(source, (size_t)number),
                                       .box_count = checkpoint->source_boxes[number]};
    snprintf(file_out->name, sizeof file_out->name, "%s",
             within(checkpoint->path, fsdp_source_file_path(source, (size_t)number)));
}

bool fsdp_checkpoint_stored_box(const fsdp_checkpoint *checkpoint, size_t entry, size_t number,
                                fsdp_box *box_out, int *file_out)
{
    if (!checkpoint->source)
        return false;
    const fsdp_source_tensor *tensor =
        fsdp_source_tensor_at(checkpoint->source, checkpoint->source_tensor[entry]);
    if (number >= tensor->chunk_count)
        return false;
    const fsdp_source_chunk *chunk = &tensor->chunks[number];
    if (box_out) {
        *box_out = (fsdp_box){.ndim = tensor->ndim};
        memcpy(box_out->lo, chunk->lo, (size_t)tensor->ndim * sizeof *chunk->lo);
        memcpy(box_out->len, chunk->len, (size_t)tensor->ndim * sizeof *chunk->len);
    }
    if (file_out)
        *file_out = file_of(chunk);
    return true;
}

/* --- reading ---------------------------------------------------------------------------------- */

enum { CAST_BYTES = 1 << 20 };

static fsdp_status read_cast(fsdp_checkpoint *checkpoint, size_t tensor, fsdp_dtype stored,
                             const fsdp_want *want, fsdp_getter *getter, fsdp_error *err)
{
    size_t size = fsdp_dtype_size(stored), wanted = fsdp_dtype_size(want->dtype);
    char *to = want->data;
    fsdp_slabs slabs = {0};
    fsdp_box slab;
    void *data = fsdp_alloc_pages(CAST_BYTES);
    fsdp_status st = data ? FSDP_OK : fsdp_fail_memory(err, "casting");
    while (st == FSDP_OK && fsdp_slabs_next(&slabs, want->box.ndim, want->box.len,
                                            CAST_BYTES / (int64_t)size, &slab)) {
        int64_t count = fsdp_box_count(&slab);
        for (int d = 0; d < slab.ndim; d++)
            slab.lo[d] += want->box.lo[d];
        st = fsdp_source_read(checkpoint->source, tensor, &slab, data, &getter->foreign, err);
        if (st == FSDP_OK && fsdp_kernels_get()->cast(to, want->dtype, data, stored, (size_t)count,
                                                      FSDP_OVERFLOW_FAIL) > 0)
            st = fsdp_fail(err, FSDP_ERR_USAGE, "values do not fit in %s",
                           fsdp_dtype_name(want->dtype));
        to += count * (int64_t)wanted;
    }
    fsdp_free(data);
    return st;
}

fsdp_status fsdp_foreign_get(fsdp_checkpoint *checkpoint, size_t entry, const fsdp_want *wants,
                             size_t count, fsdp_getter *getter, fsdp_turns *turns, fsdp_error *err)
{
    size_t tensor = checkpoint->source_tensor[entry];
    fsdp_dtype stored = fsdp_sd_at(checkpoint->manifest.sd, entry)->dtype;
    fsdp_status st = FSDP_OK;
    for (size_t w = 0; w < count && st == FSDP_OK; w++) {
        if (!fsdp_turns_take(turns))
            continue;
        if (wants[w].dtype == stored)
            st = fsdp_source_read(checkpoint->source, tensor, &wants[w].box, wants[w].data,
                                  &getter->foreign, err);
        else
            st = read_cast(checkpoint, tensor, stored, &wants[w], getter, err);
    }
    getter->bytes_read = getter->foreign.bytes_read;
    return st;
}

/* An HDF5 chunk may take all of it. Streams keep what they unpack, and slabs want their part, too. */
fsdp_status fsdp_foreign_set_memory(fsdp_checkpoint *checkpoint, int64_t memory, const char *to,
                                    fsdp_error *err)
{
    char *path, *parent;
    if (!checkpoint->source)
        return FSDP_OK;
    FSDP_TRY(fsdp_path_split(to, &path, &parent, err));
    bool is_hdf5 = strcmp(fsdp_source_format(checkpoint->source), "hdf5") == 0;
    memory = memory > 0 ? memory : FSDP_MEMORY_DEFAULT;
    fsdp_source_set_memory(checkpoint->source, is_hdf5 ? memory : memory / 2, parent);
    fsdp_free(path);
    fsdp_free(parent);
    return FSDP_OK;
}

void fsdp_foreign_reading_limits(const fsdp_checkpoint *checkpoint, int *threads_out,
                                 int64_t *bytes_out)
{
    *threads_out = INT_MAX;
    *bytes_out = INT64_MAX;
    if (checkpoint->source)
        fsdp_source_reading_limits(checkpoint->source, threads_out, bytes_out);
}

fsdp_status fsdp_foreign_announce(fsdp_checkpoint *checkpoint, size_t entry, bool repeated,
                                  fsdp_error *err)
{
    const fsdp_entry *tensor = fsdp_sd_at(checkpoint->manifest.sd, entry);
    if (tensor->kind == FSDP_ENTRY_ALIAS)
        entry = tensor->target;
    if (!checkpoint->source || fsdp_sd_at(checkpoint->manifest.sd, entry)->kind == FSDP_ENTRY_VALUE)
        return FSDP_OK;
    return fsdp_source_announce(checkpoint->source, checkpoint->source_tensor[entry], repeated,
                                err);
}

int64_t fsdp_foreign_spool_bytes(const fsdp_checkpoint *checkpoint)
{
    return checkpoint->source ? fsdp_source_spool_bytes(checkpoint->source) : 0;
}

/* --- inside values ---------------------------------------------------------------------------- */

static fsdp_status stream_slabs(fsdp_source *source, size_t number, const fsdp_entry *entry,
                                char *data, int64_t most, fsdp_slab_visit visit, void *user,
                                fsdp_error *err)
{
    fsdp_source_reader reader = {0};
    fsdp_slabs slabs = {0};
    fsdp_box slab;
    fsdp_status st = FSDP_OK;
    for (int64_t first = 0;
         st == FSDP_OK && fsdp_slabs_next(&slabs, entry->ndim, entry->shape, most, &slab);) {
        st = fsdp_source_read(source, number, &slab, data, &reader, err);
        if (st == FSDP_OK)
            st = visit(user, entry, first, slabs.next - first, data, err);
        first = slabs.next;
    }
    fsdp_source_reader_release(&reader);
    return st;
}

fsdp_status fsdp_checkpoint_stream_inner(fsdp_checkpoint *checkpoint, uint64_t tensor,
                                         int64_t memory, fsdp_slab_visit visit, void *user,
                                         fsdp_error *err)
{
    if (!checkpoint->source || tensor >= fsdp_source_tensor_count(checkpoint->source))
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' has no inner tensor %llu", checkpoint->path,
                         (unsigned long long)tensor);
    const fsdp_source_tensor *inner = fsdp_source_tensor_at(checkpoint->source, (size_t)tensor);
    fsdp_entry entry = {.kind = FSDP_ENTRY_TENSOR,
                        .name = "",
                        .dtype = inner->dtype,
                        .ndim = inner->ndim,
                        .shape = inner->shape};
    int64_t bytes = fsdp_entry_bytes(&entry), size = (int64_t)fsdp_dtype_size(inner->dtype);
    if (bytes == 0)
        return visit(user, &entry, 0, 0, "", err);
    memory = memory > 0 ? memory : FSDP_MEMORY_DEFAULT;
    int64_t most = (bytes < memory ? bytes : memory) / size;
    most = most > 0 ? most : 1;
    char *data = fsdp_alloc_pages((size_t)(most * size));
    if (!data)
        return fsdp_fail_memory(err, "a slab of a tensor");
    fsdp_status st =
        stream_slabs(checkpoint->source, (size_t)tensor, &entry, data, most, visit, user, err);
    fsdp_free(data);
    return st;
}

const char *fsdp_checkpoint_extra(const fsdp_checkpoint *checkpoint, const char *member)
{
    return checkpoint->source ? fsdp_source_extra(checkpoint->source, member) : NULL;
}

/* --- checksums -------------------------------------------------------------------------------- */

typedef struct check_job {
    fsdp_source *source;
    atomic_llong next;
} check_job;

static fsdp_status check_worker(void *user, size_t worker, fsdp_error *err)
{
    check_job *job = user;
    fsdp_source_reader reader = {0};
    int64_t count = (int64_t)fsdp_source_check_count(job->source);
    fsdp_status st = FSDP_OK;
    (void)worker;
    for (int64_t i; st == FSDP_OK && (i = atomic_fetch_add(&job->next, 1)) < count;)
        st = fsdp_source_check(job->source, (size_t)i, &reader, err);
    if (st != FSDP_OK)
        atomic_store(&job->next, count);
    fsdp_source_reader_release(&reader);
    return st;
}

fsdp_status fsdp_checkpoint_check(fsdp_checkpoint *checkpoint, int threads, fsdp_error *err)
{
    if (!checkpoint->source)
        return FSDP_OK;
    check_job job = {.source = checkpoint->source};
    threads = threads > 0 ? threads : fsdp_pool_cores();
    return fsdp_parallel(threads, (size_t)threads, check_worker, &job, err);
}

/* --- is it whole? ----------------------------------------------------------------------------- */

typedef struct verify_job {
    const fsdp_verify_opts *opts;
    fsdp_verify_summary summary;
    fsdp_stats stats; /* of the tensor at hand, when deep */
    fsdp_meter meter;
} verify_job;

/* Damage becomes a finding, what stops the work stays an error. */
static fsdp_status judge(verify_job *job, fsdp_status status, const fsdp_error *found,
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
        job->opts->finding(job->opts->finding_user, &finding);
    return FSDP_OK;
}

static fsdp_status count_slab(void *user, const fsdp_entry *entry, int64_t first, int64_t count,
                              const void *data, fsdp_error *err)
{
    verify_job *job = user;
    int64_t bytes = count * (int64_t)fsdp_dtype_size(entry->dtype);
    (void)first;
    if (job->opts->level >= FSDP_VERIFY_DEEP)
        fsdp_stats_add(&job->stats, entry->dtype, data, count);
    job->summary.blocks++;
    job->summary.bytes += bytes;
    return fsdp_meter_add(&job->meter, bytes, entry->name, entry->name_size, err);
}

static fsdp_status read_all(verify_job *job, fsdp_checkpoint *checkpoint, fsdp_error *err)
{
    const fsdp_sd *sd = checkpoint->manifest.sd;
    fsdp_meter_init(&job->meter, &job->opts->watch, checkpoint->info.tensor_bytes);
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
        FSDP_TRY(judge(job, st, &found, name, err));
        if (st == FSDP_OK)
            fsdp_values_tell(job->opts, entry, &job->stats, &job->summary.warnings);
    }
    if (job->opts->level >= FSDP_VERIFY_DEEP)
        fsdp_values_match(sd, job->opts, &job->summary.warnings);
    return FSDP_OK;
}

static fsdp_status verify_opened(verify_job *job, fsdp_checkpoint *checkpoint, fsdp_error *err)
{
    fsdp_error found = {0};
    job->summary.files = checkpoint->info.file_count;
    if (job->opts->level < FSDP_VERIFY_DATA)
        return FSDP_OK;
    fsdp_status st = fsdp_checkpoint_check(checkpoint, job->opts->threads, &found);
    FSDP_TRY(judge(job, st, &found, "", err));
    return read_all(job, checkpoint, err);
}

fsdp_status fsdp_foreign_verify(fsdp_io *io, const char *path, const fsdp_verify_opts *opts,
                                fsdp_verify_summary *summary_out, fsdp_error *err)
{
    verify_job job = {.opts = opts};
    fsdp_checkpoint *checkpoint = NULL;
    fsdp_error found = {0};
    fsdp_status st = fsdp_foreign_open(io, path, NULL, &checkpoint, &found);
    if (st == FSDP_OK)
        st = verify_opened(&job, checkpoint, err);
    else if (st == FSDP_ERR_DAMAGED)
        st = judge(&job, st, &found, "", err);
    else if (err)
        *err = found;
    fsdp_checkpoint_close(checkpoint);
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

/* --- carrying on ------------------------------------------------------------------------------ */

enum { BLOBS_MOST = 64 << 20 }; /* of all values together */

typedef struct carrying {
    fsdp_checkpoint *checkpoint;
    bool is_ours; /* the target */
    size_t room;
    fsdp_text bytes;
} carrying;

/* What differs from rank to rank is a value of ours: no program of others knows it. */
static bool is_carried(const carrying *work, const fsdp_entry *entry)
{
    return entry->kind == FSDP_ENTRY_VALUE && fsdp_value_is_opaque(&entry->value) &&
           (work->is_ours || !fsdp_value_per_rank(&entry->value));
}

static fsdp_status carry_value(carrying *work, size_t i, fsdp_error *err)
{
    fsdp_value value = {0};
    FSDP_TRY(fsdp_source_save_value(work->checkpoint->source, i, work->room, &work->bytes, err));
    if (work->bytes.size == 0)
        return FSDP_OK;
    FSDP_TRY(
        fsdp_value_set_bytes(&value, FSDP_VALUE_OPAQUE, work->bytes.data, work->bytes.size, err));
    fsdp_sd_set_value(work->checkpoint->manifest.sd, i, &value);
    work->room -= work->bytes.size;
    return FSDP_OK;
}

fsdp_status fsdp_foreign_carry_values(fsdp_checkpoint *checkpoint, bool is_ours, fsdp_error *err)
{
    carrying work = {.checkpoint = checkpoint, .is_ours = is_ours, .room = BLOBS_MOST};
    const fsdp_sd *sd = checkpoint->manifest.sd;
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; checkpoint->source && i < fsdp_sd_count(sd) && st == FSDP_OK; i++)
        if (is_carried(&work, fsdp_sd_at(sd, i)))
            st = carry_value(&work, i, err);
    fsdp_text_release(&work.bytes);
    return st;
}

fsdp_status fsdp_checkpoint_open_value(const fsdp_value *value, fsdp_checkpoint **checkpoint_out,
                                       fsdp_error *err)
{
    static const char zip_start[] = "PK\003\004";
    if (value->kind != FSDP_VALUE_OPAQUE || value->as.bytes.size < 4 ||
        memcmp(value->as.bytes.data, zip_start, 4) != 0)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "the value is not in a form that is known");
    fsdp_checkpoint *checkpoint = fsdp_alloc(1, sizeof *checkpoint);
    if (!checkpoint)
        return fsdp_fail_memory(err, "a value");
    checkpoint->path = fsdp_strndup("", 0);
    fsdp_status st =
        fsdp_source_open_blob(value->as.bytes.data, value->as.bytes.size, &checkpoint->source, err);
    if (st == FSDP_OK)
        st = describe(checkpoint, err);
    if (st != FSDP_OK) {
        fsdp_checkpoint_close(checkpoint);
        return st;
    }
    *checkpoint_out = checkpoint;
    return FSDP_OK;
}
