/*
 * Checkpoints of other programs: the catalog of a source (formats/source.h) becomes a state dict in
 * which every tensor is whole, and wanted boxes are read from it. See checkpoint_internal.h.
 */
#include "base/core/given.h"
#include "base/core/mem.h"
#include "base/core/pool.h"
#include "base/data/box_internal.h"
#include "base/data/name_path.h"
#include "base/data/value_internal.h"
#include "formats/frameworks.h"
#include "formats/source.h"
#include "statedict/checkpoint/checkpoint_internal.h"
#include "statedict/checkpoint/one_file.h"
#include "statedict/commit/commit_internal.h"
#include "statedict/sd/layout_internal.h"
#include <fsdp/run.h>

#include <stdio.h>
#include <string.h>

/* === shapes of a model ======================================================================== */

/*
 * The shapes of a model (fsdp_open_opts.like) for a checkpoint whose files lack them: FSDP1's local state
 * dicts with use_orig_params hold pieces of parameters under their names.
 */

typedef struct fsdp_model_shapes {
    const fsdp_checkpoint *checkpoint;
    bool *is_found;              /* by entry: a name that was looked up */
    const fsdp_filter *may_lack; /* NULL: the source must have every tensor of the model */
    fsdp_source_model model;     /* what the source gets */
} fsdp_model_shapes;

static const fsdp_sd *sd_of(const fsdp_model_shapes *shapes)
{
    return shapes->checkpoint->manifest.sd;
}

static bool find(void *context, const char *name, size_t size, fsdp_source_shape *shape_out)
{
    fsdp_model_shapes *shapes = context;
    int64_t number = fsdp_sd_find(sd_of(shapes), name, size);
    if (number < 0)
        return false;
    const fsdp_entry *entry = fsdp_sd_at(sd_of(shapes), (size_t)number);
    shapes->is_found[number] = true;
    if (entry->kind == FSDP_ENTRY_ALIAS)
        entry = fsdp_sd_at(sd_of(shapes), entry->target);
    if (entry->kind != FSDP_ENTRY_TENSOR)
        return false;
    *shape_out = (fsdp_source_shape){entry->dtype, entry->ndim, entry->shape};
    return true;
}

static fsdp_status check(void *context, fsdp_error *err)
{
    const fsdp_model_shapes *shapes = context;
    char shown[200];
    for (size_t i = 0; i < fsdp_sd_count(sd_of(shapes)); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd_of(shapes), i);
        if (shapes->is_found[i] || entry->kind != FSDP_ENTRY_TENSOR ||
            (shapes->may_lack &&
             fsdp_filter_selects(shapes->may_lack, entry->name, entry->name_size)))
            continue;
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' of --like has a tensor '%s' that the files of the ranks lack; name "
                         "the model that was saved, or accept it with --allow-missing",
                         shapes->model.path,
                         fsdp_printable(entry->name, entry->name_size, shown, sizeof shown));
    }
    return FSDP_OK;
}

/* Borrows checkpoint and may_lack. The caller releases shapes, after a failure, too; it must not move. */
static fsdp_status model_shapes_take(const fsdp_checkpoint *checkpoint, const fsdp_filter *may_lack,
                                     fsdp_model_shapes *shapes, fsdp_error *err)
{
    shapes->checkpoint = checkpoint;
    shapes->may_lack = may_lack;
    shapes->is_found = fsdp_alloc(fsdp_sd_count(sd_of(shapes)), sizeof *shapes->is_found);
    if (!shapes->is_found)
        return fsdp_fail_memory(err, "the shapes of a model");
    shapes->model = (fsdp_source_model){
        .path = checkpoint->path, .find = find, .check = check, .context = shapes};
    return FSDP_OK;
}

static void model_shapes_release(fsdp_model_shapes *shapes)
{
    fsdp_free(shapes->is_found);
}

/* === the checkpoint =========================================================================== */

typedef struct foreign_checkpoint {
    fsdp_checkpoint base;
    size_t *tensors; /* per entry: its tensor in the source */
    int64_t *boxes;  /* per file of the source with tensors or values: boxes of tensors */
} foreign_checkpoint;

static foreign_checkpoint *foreign_of(const fsdp_checkpoint *checkpoint)
{
    return (foreign_checkpoint *)(uintptr_t)checkpoint;
}

typedef struct own_files {
    bool manifest, other;
} own_files;

static int find_own_file(void *context, const char *name)
{
    own_files *found = context;
    if (strcmp(name, FSDP_MANIFEST_NAME) == 0)
        found->manifest = true;
    else
        found->other = fsdp_is_checkpoint_file(name);
    return found->other;
}

/* Many programs have a file called manifest.json: without shards it must begin as a native one. */
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

bool fsdp_path_has_manifest(const char *path, const fsdp_access *access)
{
    if (!path)
        return false;
    fsdp_io *io = fsdp_access_io(access);
    char *manifest = fsdp_path_join(path, FSDP_MANIFEST_NAME);
    bool is_there = manifest && fsdp_io_exists(io, manifest);
    fsdp_free(manifest);
    return is_there && holds_own_files(io, path);
}

/* --- recognition ------------------------------------------------------------------------------ */

static int file_of(const fsdp_source_chunk *chunk)
{
    return chunk->file >= 0 ? chunk->file : chunk->origin;
}

static const fsdp_source_tensor *tensor_of(const fsdp_checkpoint *checkpoint, size_t entry)
{
    return fsdp_source_tensor_at(checkpoint->source, foreign_of(checkpoint)->tensors[entry]);
}

/* The part of a file's path after the path of the checkpoint, if the checkpoint is a directory. */
static const char *within(const char *path, const char *file)
{
    size_t size = strlen(path);
    const char *slash = strrchr(file, '/');
    if (strncmp(path, file, size) == 0 && file[size] == '/')
        return file + size + 1;
    return slash ? slash + 1 : file;
}

static void file_at(const fsdp_checkpoint *checkpoint, int number, fsdp_checkpoint_file *file_out)
{
    const fsdp_source *source = checkpoint->source;
    *file_out = (fsdp_checkpoint_file){.size = fsdp_source_file_size(source, (size_t)number),
                                       .box_count = foreign_of(checkpoint)->boxes[number]};
    snprintf(file_out->name, sizeof file_out->name, "%s",
             within(checkpoint->path, fsdp_source_file_path(source, (size_t)number)));
}

static bool stored_box(const fsdp_checkpoint *checkpoint, size_t entry, size_t number,
                       fsdp_box *box_out, int *file_out)
{
    const fsdp_source_tensor *tensor = tensor_of(checkpoint, entry);
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
                             const fsdp_read_target *target, fsdp_reader *reader, fsdp_error *err)
{
    size_t size = fsdp_dtype_size(stored), wanted = fsdp_dtype_size(target->dtype);
    char *to = target->data;
    fsdp_slabs slabs = {0};
    fsdp_box slab;
    void *data = fsdp_alloc_pages(CAST_BYTES);
    fsdp_status st = data ? FSDP_OK : fsdp_fail_memory(err, "casting");
    while (st == FSDP_OK && fsdp_slabs_next(&slabs, target->box.ndim, target->box.len,
                                            CAST_BYTES / (int64_t)size, &slab)) {
        int64_t count = fsdp_box_count(&slab);
        for (int d = 0; d < slab.ndim; d++)
            slab.lo[d] += target->box.lo[d];
        st = fsdp_source_read(checkpoint->source, tensor, &slab, data, &reader->source, err);
        if (st == FSDP_OK)
            st = fsdp_read_cast(to, target->dtype, data, stored, count, err);
        to += count * (int64_t)wanted;
    }
    fsdp_free(data);
    return st;
}

/* A device's target in slabs, each through a slot. */
static fsdp_status read_for_device(fsdp_checkpoint *checkpoint, size_t tensor, fsdp_dtype stored,
                                   const fsdp_read_target *target, fsdp_reader *reader,
                                   fsdp_error *err)
{
    const int64_t most = FSDP_BLOCK_BYTES / (int64_t)fsdp_dtype_size(stored);
    fsdp_slabs slabs = {0};
    fsdp_box slab;
    while (fsdp_slabs_next(&slabs, target->box.ndim, target->box.len, most, &slab)) {
        char *data;
        for (int d = 0; d < slab.ndim; d++)
            slab.lo[d] += target->box.lo[d];
        FSDP_TRY(fsdp_read_slots_take(&reader->slots, target->device, &data, err));
        FSDP_TRY(fsdp_source_read(checkpoint->source, tensor, &slab, data, &reader->source, err));
        const fsdp_read_range range = {&slab, 0, fsdp_box_count(&slab), stored, data};
        FSDP_TRY(fsdp_read_slots_place(&reader->slots, &range, target, err));
    }
    return FSDP_OK;
}

static fsdp_status get(fsdp_checkpoint *checkpoint, const fsdp_read_request *request,
                       fsdp_error *err)
{
    size_t tensor = foreign_of(checkpoint)->tensors[request->entry];
    fsdp_dtype stored = fsdp_sd_at(checkpoint->manifest.sd, request->entry)->dtype;
    fsdp_reader *reader = request->reader;
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < request->count && st == FSDP_OK; i++) {
        const fsdp_read_target *target = &request->targets[i];
        if (!fsdp_work_counter_take(request->counter))
            continue;
        if (target->device)
            st = read_for_device(checkpoint, tensor, stored, target, reader, err);
        else if (target->dtype == stored)
            st = fsdp_source_read(checkpoint->source, tensor, &target->box, target->data,
                                  &reader->source, err);
        else
            st = read_cast(checkpoint, tensor, stored, target, reader, err);
    }
    return st;
}

/* An HDF5 chunk may take all of the memory; streams share it with the slabs. */
static fsdp_status set_memory(fsdp_checkpoint *checkpoint, int64_t memory, const char *to,
                              fsdp_error *err)
{
    char *path, *parent;
    FSDP_TRY(fsdp_path_split(to, &path, &parent, err));
    bool is_whole = fsdp_format_from(fsdp_source_format(checkpoint->source))->caps.whole_chunks;
    memory = memory > 0 ? memory : FSDP_MEMORY_DEFAULT;
    fsdp_source_set_memory(checkpoint->source, is_whole ? memory : memory / 2, parent);
    fsdp_free(path);
    fsdp_free(parent);
    return FSDP_OK;
}

static fsdp_status announce(fsdp_checkpoint *checkpoint, size_t entry, bool repeated,
                            fsdp_error *err)
{
    return fsdp_source_announce(checkpoint->source, foreign_of(checkpoint)->tensors[entry],
                                repeated, err);
}

static fsdp_reading reading(const fsdp_checkpoint *checkpoint)
{
    fsdp_reading reading = {.spooled = fsdp_source_spool_bytes(checkpoint->source)};
    fsdp_source_reading_limits(checkpoint->source, &reading.threads, &reading.apart);
    return reading;
}

/* --- inside values ---------------------------------------------------------------------------- */

typedef struct inner_reader {
    fsdp_source *source;
    size_t tensor;
    fsdp_source_reader reader;
} inner_reader;

static fsdp_status read_inner(void *context, const fsdp_box *slab, char *data, fsdp_error *err)
{
    inner_reader *inner = context;
    return fsdp_source_read(inner->source, inner->tensor, slab, data, &inner->reader, err);
}

fsdp_status fsdp_checkpoint_stream_inner(fsdp_checkpoint *checkpoint, uint64_t tensor,
                                         int64_t memory, fsdp_slab_visit visit, void *context,
                                         fsdp_error *err)
{
    FSDP_NEED(err, checkpoint);
    FSDP_NEED_CALL(err, visit);
    inner_reader reader = {.source = checkpoint->source, .tensor = (size_t)tensor};
    if (!reader.source || tensor >= fsdp_source_tensor_count(reader.source))
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' has no inner tensor %llu", checkpoint->path,
                         (unsigned long long)tensor);
    const fsdp_source_tensor *inner = fsdp_source_tensor_at(checkpoint->source, reader.tensor);
    fsdp_entry entry = {.kind = FSDP_ENTRY_TENSOR,
                        .name = "",
                        .dtype = inner->dtype,
                        .ndim = inner->ndim,
                        .shape = inner->shape};
    fsdp_slab_stream stream = {.tensor = &entry,
                               .read = read_inner,
                               .source = &reader,
                               .memory = memory,
                               .visit = visit,
                               .context = context};
    fsdp_status st = fsdp_stream_slabs(&stream, err);
    fsdp_source_reader_release(&reader.reader);
    return st;
}

const char *fsdp_checkpoint_extra(const fsdp_checkpoint *checkpoint, const char *member)
{
    if (!checkpoint || !member)
        return NULL;
    const char *extra = checkpoint->source ? fsdp_source_extra(checkpoint->source, member) : NULL;
    bool is_metadata = strcmp(member, "metadata") == 0 || strcmp(member, "carried") == 0;
    return !extra && is_metadata ? checkpoint->manifest.metadata : extra;
}

/* --- checksums -------------------------------------------------------------------------------- */

typedef struct check_job {
    fsdp_source *source;
    atomic_llong next;
    fsdp_meter meter;
} check_job;

static fsdp_status count_check(void *context, int64_t bytes, const char *what, fsdp_error *err)
{
    check_job *job = context;
    return fsdp_meter_add(&job->meter, bytes, what, strlen(what), err);
}

static fsdp_status check_worker(void *context, size_t worker, fsdp_error *err)
{
    check_job *job = context;
    fsdp_source_reader reader = {.count = count_check, .context = job};
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

int64_t fsdp_checkpoint_check_bytes(const fsdp_checkpoint *checkpoint)
{
    return checkpoint->source ? fsdp_source_check_bytes(checkpoint->source) : 0;
}

fsdp_status fsdp_checkpoint_check(fsdp_checkpoint *checkpoint, int threads, const fsdp_watch *watch,
                                  fsdp_error *err)
{
    FSDP_NEED(err, checkpoint);
    check_job job = {.source = checkpoint->source};
    if (!job.source)
        return FSDP_OK;
    fsdp_meter_init(&job.meter, watch, fsdp_checkpoint_check_bytes(checkpoint));
    threads = threads > 0 ? threads : fsdp_pool_cores();
    return fsdp_parallel(threads, (size_t)threads, check_worker, &job, err);
}

/* --- places of tensors -------------------------------------------------------------------------- */

static int compare_numbers(const int64_t *a, const int64_t *b, int n)
{
    for (int i = 0; i < n; i++)
        if (a[i] != b[i])
            return a[i] < b[i] ? -1 : 1;
    return 0;
}

static int compare_chunks(const fsdp_source_chunk *a, const fsdp_source_chunk *b, int ndim)
{
    const int64_t x[] = {a->file, a->stream, a->offset, a->fix, a->strides != NULL};
    const int64_t y[] = {b->file, b->stream, b->offset, b->fix, b->strides != NULL};
    int order = compare_numbers(x, y, 5);
    order = order != 0 ? order : compare_numbers(a->lo, b->lo, ndim);
    order = order != 0 ? order : compare_numbers(a->len, b->len, ndim);
    return order != 0 || !a->strides ? order : compare_numbers(a->strides, b->strides, ndim);
}

/* Elements that a format produces by itself (no chunk) have no place to compare. */
static bool has_place(const fsdp_source_tensor *tensor)
{
    for (size_t i = 0; i < tensor->chunk_count; i++)
        if (tensor->chunks[i].file < 0 && tensor->chunks[i].stream < 0)
            return false;
    return tensor->chunk_count > 0;
}

static bool compare_places(const fsdp_checkpoint *checkpoint, size_t first, size_t second,
                           int *order_out)
{
    const fsdp_source_tensor *a = tensor_of(checkpoint, first), *b = tensor_of(checkpoint, second);
    const int64_t x[] = {(int64_t)a->chunk_count, (int64_t)a->dtype, a->ndim};
    const int64_t y[] = {(int64_t)b->chunk_count, (int64_t)b->dtype, b->ndim};
    if (!has_place(a) || !has_place(b))
        return false;
    int order = compare_numbers(x, y, 3);
    order = order != 0 ? order : compare_numbers(a->shape, b->shape, a->ndim);
    for (size_t i = 0; order == 0 && i < a->chunk_count; i++)
        order = compare_chunks(&a->chunks[i], &b->chunks[i], a->ndim);
    *order_out = order;
    return true;
}

/* --- values of other programs ----------------------------------------------------------------- */

enum { BLOBS_MOST = 64 << 20 }; /* of all values together */

typedef struct carrying {
    fsdp_checkpoint *checkpoint;
    bool is_ours; /* the target is native */
    size_t room;
    fsdp_text bytes;
} carrying;

/* Values that differ from rank to rank are stored as {"per_rank": ...}, which no other program knows. */
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

fsdp_status fsdp_checkpoint_carry_values(fsdp_checkpoint *checkpoint, bool is_ours, fsdp_error *err)
{
    carrying work = {.checkpoint = checkpoint, .is_ours = is_ours, .room = BLOBS_MOST};
    const fsdp_sd *sd = checkpoint->manifest.sd;
    fsdp_status st = FSDP_OK;
    if (!checkpoint->source)
        return FSDP_OK;
    for (size_t i = 0; i < fsdp_sd_count(sd) && st == FSDP_OK; i++)
        if (is_carried(&work, fsdp_sd_at(sd, i)))
            st = carry_value(&work, i, err);
    fsdp_text_release(&work.bytes);
    return st;
}

/* --- the table ---------------------------------------------------------------------------------- */

static void close_source(fsdp_checkpoint *checkpoint)
{
    fsdp_source_close(checkpoint->source);
    fsdp_free(foreign_of(checkpoint)->tensors);
    fsdp_free(foreign_of(checkpoint)->boxes);
}

static fsdp_status each_file(const fsdp_checkpoint *checkpoint, fsdp_file_visit visit,
                             void *context, fsdp_error *err)
{
    const fsdp_source *source = checkpoint->source;
    for (size_t i = 0; i < fsdp_source_file_count(source); i++)
        FSDP_TRY(visit(context, (int)i, fsdp_source_file_path(source, i),
                       fsdp_source_file_info(source, i), err));
    return FSDP_OK;
}

static fsdp_status locate(fsdp_checkpoint *checkpoint, size_t entry, const fsdp_box *box,
                          fsdp_number_visit visit, void *context, fsdp_error *err)
{
    fsdp_box stored, shared;
    int file;
    for (size_t i = 0; stored_box(checkpoint, entry, i, &stored, &file); i++)
        if (fsdp_box_intersect(&stored, box, &shared))
            FSDP_TRY(visit(context, file, err));
    return FSDP_OK;
}

static const char *missing_at(const fsdp_checkpoint *checkpoint, size_t number, size_t *size_out)
{
    return number < fsdp_source_missing_count(checkpoint->source)
               ? fsdp_source_missing_at(checkpoint->source, number, size_out)
               : NULL;
}

static const fsdp_checkpoint_ops foreign_ops = {.close = close_source,
                                                .get = get,
                                                .file_at = file_at,
                                                .each_file = each_file,
                                                .locate = locate,
                                                .missing_at = missing_at,
                                                .announce = announce,
                                                .set_memory = set_memory,
                                                .reading = reading,
                                                .compare_places = compare_places};

bool fsdp_checkpoint_stored_box_at(const fsdp_checkpoint *checkpoint, size_t entry, size_t number,
                                   fsdp_box *box_out, int *file_out)
{
    return checkpoint && checkpoint->ops == &foreign_ops &&
           stored_box(checkpoint, entry, number, box_out, file_out);
}

/* --- bytes for maps ----------------------------------------------------------------------------- */

/* True for strides of a packed row-major box. */
static bool is_packed(const fsdp_source_tensor *tensor, const int64_t *strides)
{
    int64_t packed[FSDP_MAX_DIMS];
    fsdp_box_strides(tensor->ndim, tensor->shape, packed);
    for (int d = 0; strides && d < tensor->ndim; d++)
        if (tensor->shape[d] > 1 &&
            strides[d] != packed[d] * (int64_t)fsdp_dtype_size(tensor->dtype))
            return false;
    return true;
}

bool fsdp_checkpoint_plain_bytes(const fsdp_checkpoint *checkpoint, size_t entry,
                                 fsdp_file_range *range_out)
{
    if (!checkpoint || !range_out || checkpoint->ops != &foreign_ops ||
        entry >= fsdp_sd_count(checkpoint->manifest.sd) ||
        fsdp_sd_at(checkpoint->manifest.sd, entry)->kind == FSDP_ENTRY_VALUE)
        return false;
    entry = fsdp_sd_tensor_of(checkpoint->manifest.sd, entry);
    const fsdp_source_tensor *tensor = tensor_of(checkpoint, entry);
    const fsdp_source_chunk *chunk = tensor->chunks;
    int64_t size = fsdp_entry_bytes(fsdp_sd_at(checkpoint->manifest.sd, entry));
    if (tensor->is_missing || tensor->chunk_count != 1 || chunk->file < 0 || chunk->stream >= 0 ||
        chunk->fix || size == 0 || !is_packed(tensor, chunk->strides))
        return false;
    *range_out = (fsdp_file_range){fsdp_source_file_path(checkpoint->source, (size_t)chunk->file),
                                   chunk->offset, size};
    return true;
}

/* --- opening ---------------------------------------------------------------------------------- */

static fsdp_status add_tensor(fsdp_checkpoint *checkpoint, const fsdp_source_tensor *tensor,
                              const fsdp_mesh *mesh, fsdp_error *err)
{
    const fsdp_placement whole = {.kind = FSDP_REPLICATE};
    return fsdp_sd_add_tensor(
        checkpoint->manifest.sd, tensor->name, tensor->name_size,
        &(fsdp_tensor){
            tensor->dtype, tensor->ndim, tensor->shape, {.mesh = mesh, .placement = {whole}}, NULL},
        err);
}

static fsdp_status add_alias(fsdp_checkpoint *checkpoint, const fsdp_source_entry *entry,
                             fsdp_error *err)
{
    const fsdp_source_tensor *tensor = fsdp_source_tensor_at(checkpoint->source, entry->tensor);
    return fsdp_sd_add_alias(checkpoint->manifest.sd, entry->name, entry->name_size, tensor->name,
                             tensor->name_size, err);
}

/* An entry without a path in the source is not nested. The path is stored only for names that
 * native checkpoints would nest by default. */
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
    size_t *tensors = fsdp_alloc(count, sizeof *tensors);
    foreign_of(checkpoint)->tensors = tensors;
    if (!tensors)
        return fsdp_fail_memory(err, "a checkpoint");
    fsdp_sd_expect(checkpoint->manifest.sd, count);
    for (size_t i = 0; i < count; i++) {
        const fsdp_source_entry *entry = fsdp_source_entry_at(source, i);
        tensors[i] = entry->tensor;
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

static fsdp_status count_boxes(fsdp_checkpoint *checkpoint, fsdp_error *err)
{
    const fsdp_source *source = checkpoint->source;
    int64_t *boxes = fsdp_alloc(fsdp_source_file_count(source), sizeof *boxes);
    foreign_of(checkpoint)->boxes = boxes;
    if (!boxes)
        return fsdp_fail_memory(err, "a checkpoint");
    for (size_t i = 0; i < fsdp_source_tensor_count(source); i++) {
        const fsdp_source_tensor *tensor = fsdp_source_tensor_at(source, i);
        for (size_t c = 0; c < tensor->chunk_count; c++)
            boxes[file_of(&tensor->chunks[c])]++;
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
                                              .step = FSDP_NO_STEP,
                                              .world = 1,
                                              .file_count = (int)fsdp_source_content_count(source)};
    for (size_t i = 0; i < fsdp_source_content_count(source); i++)
        checkpoint->info.file_bytes += fsdp_source_file_size(source, i);
    checkpoint->info.tensor_bytes = fsdp_sd_tensor_bytes(checkpoint->manifest.sd);
    return count_boxes(checkpoint, err);
}

/* Missing names may have no entry; those are only counted. */
static fsdp_status mark_missing(fsdp_checkpoint *checkpoint, fsdp_error *err)
{
    const fsdp_source *source = checkpoint->source;
    size_t count = fsdp_source_missing_count(source);
    for (size_t i = 0; count > 0 && i < fsdp_sd_count(checkpoint->manifest.sd); i++)
        if (fsdp_sd_at(checkpoint->manifest.sd, i)->kind != FSDP_ENTRY_VALUE &&
            fsdp_source_tensor_at(source, foreign_of(checkpoint)->tensors[i])->is_missing)
            FSDP_TRY(fsdp_incomplete_mark(checkpoint, i, err));
    checkpoint->missing_count = count;
    return FSDP_OK;
}

static bool may_lack(void *context, const char *name, size_t size)
{
    return fsdp_filter_selects(context, name, size);
}

static int64_t values_memory(const fsdp_open_opts *given)
{
    enum { BESIDE = 32 << 20 };
    return BESIDE + (given && given->memory > 0 ? given->memory : FSDP_MEMORY_DEFAULT);
}

static fsdp_status open_source(fsdp_checkpoint *checkpoint, const char *path,
                               const fsdp_open_opts *given, const fsdp_checkpoint *model,
                               fsdp_error *err)
{
    fsdp_source_opts opts = {.format = given ? given->format : NULL,
                             .as_stored = given && given->as_stored,
                             .variant = given ? given->variant : NULL,
                             .memory = values_memory(given),
                             .may_lack = checkpoint->may_lack ? may_lack : NULL,
                             .context = checkpoint->may_lack,
                             .void_as = given ? given->void_as : NULL};
    checkpoint->path = fsdp_strndup(path, strlen(path));
    if (!checkpoint->path)
        return fsdp_fail_memory(err, "a path");
    fsdp_model_shapes shapes = {0};
    fsdp_status st = FSDP_OK;
    if (model)
        st = model_shapes_take(model, checkpoint->may_lack, &shapes, err);
    if (st == FSDP_OK) {
        opts.model = model ? &shapes.model : NULL;
        st = fsdp_framework_open(checkpoint->io, path, &opts, &checkpoint->source, err);
    }
    model_shapes_release(&shapes);
    FSDP_TRY(st);
    const fsdp_format *format = fsdp_format_from(fsdp_source_format(checkpoint->source));
    if (model && !format->caps.takes_model)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "--like is for rank files of FSDP1, but '%s' is %s; leave it out", path,
                         format->name);
    if (opts.void_as && !format->caps.takes_void)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "--void-as is for npy and npz, but '%s' is %s; leave it out", path,
                         format->name);
    const char *carried = fsdp_source_extra(checkpoint->source, "carried");
    if (carried) {
        checkpoint->manifest.metadata = fsdp_strndup(carried, strlen(carried));
        if (!checkpoint->manifest.metadata)
            return fsdp_fail_memory(err, "metadata");
    }
    return describe(checkpoint, err);
}

fsdp_status fsdp_foreign_open(fsdp_io *io, const char *path, const fsdp_open_opts *opts,
                              const fsdp_checkpoint *model, fsdp_checkpoint **checkpoint_out,
                              fsdp_error *err)
{
    foreign_checkpoint *foreign = fsdp_alloc(1, sizeof *foreign);
    if (!foreign)
        return fsdp_fail_memory(err, "a checkpoint");
    fsdp_checkpoint *checkpoint = &foreign->base;
    checkpoint->ops = &foreign_ops;
    checkpoint->io = io;
    checkpoint->manifest.step = FSDP_NO_STEP;
    checkpoint->manifest.kind = FSDP_FULL;
    checkpoint->manifest.world = 1;
    fsdp_status st = fsdp_incomplete_allow(checkpoint, opts, err);
    if (st == FSDP_OK)
        st = open_source(checkpoint, path, opts, model, err);
    if (st == FSDP_OK)
        st = mark_missing(checkpoint, err);
    if (st != FSDP_OK) {
        fsdp_checkpoint_close(checkpoint);
        return st;
    }
    *checkpoint_out = checkpoint;
    return FSDP_OK;
}

fsdp_status fsdp_checkpoint_open_value(const fsdp_value *value, fsdp_checkpoint **checkpoint_out,
                                       fsdp_error *err)
{
    FSDP_NEED(err, value, checkpoint_out);
    static const char zip_start[] = "PK\003\004";
    if (value->kind != FSDP_VALUE_OPAQUE || value->as.bytes.size < 4 ||
        memcmp(value->as.bytes.data, zip_start, 4) != 0)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "the value has an unknown form");
    foreign_checkpoint *foreign = fsdp_alloc(1, sizeof *foreign);
    if (!foreign)
        return fsdp_fail_memory(err, "a value");
    fsdp_checkpoint *checkpoint = &foreign->base;
    checkpoint->ops = &foreign_ops;
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
