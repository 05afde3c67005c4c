/*
 * A native checkpoint, opened: its manifest, the owners that the writers agreed on, its shard readers, and
 * the values that were too large for the manifest; and boxes read from it. Files may be missing.
 */
#include "statedict/checkpoint/checkpoint_internal.h"
#include "base/data/box_internal.h"
#include "statedict/checkpoint/one_file.h"
#include "statedict/manifest/large_value.h"
#include "statedict/sd/layout_internal.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

/* === missing files ============================================================================ */

/* True when the shard file is missing. */
static bool incomplete_is_lost(const fsdp_checkpoint *checkpoint, int file)
{
    char name[FSDP_SHARD_NAME_SIZE];
    fsdp_file_info info;
    fsdp_shard_name(file, checkpoint->manifest.file_count, name);
    char *path = checkpoint->is_one_file ? NULL : fsdp_path_join(checkpoint->path, name);
    bool lost = path && checkpoint->io->ops->info(checkpoint->io, path, &info) == -ENOENT;
    fsdp_free(path);
    return lost;
}

/* Marks an entry of which a part lies in a missing file. FSDP_ERR_DAMAGED when it may not be incomplete. */
static fsdp_status incomplete_lose(fsdp_checkpoint *checkpoint, size_t number, int file,
                                   fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(checkpoint->manifest.sd, number);
    char shown[160], name[FSDP_SHARD_NAME_SIZE];
    if (fsdp_filter_selects(checkpoint->may_lack, entry->name, entry->name_size))
        return fsdp_incomplete_mark(checkpoint, number, err);
    fsdp_shard_name(file, checkpoint->manifest.file_count, name);
    return fsdp_fail(
        err, FSDP_ERR_DAMAGED,
        "'%s/%s' is missing and holds a part of '%s'; --allow-missing does not match its name",
        checkpoint->path, name, fsdp_printable(entry->name, entry->name_size, shown, sizeof shown));
}

typedef struct lost_search {
    const fsdp_checkpoint *checkpoint;
    int file; /* that holds a part of the entry, or -1 */
} lost_search;

static fsdp_status find_lost(void *context, int file, fsdp_error *err)
{
    lost_search *search = context;
    (void)err;
    if (!fsdp_native_of(search->checkpoint)->readers[file])
        search->file = file;
    return FSDP_OK;
}

/* Marks the entries of a native checkpoint in files that were not opened. */
static fsdp_status incomplete_mark_lost(fsdp_checkpoint *checkpoint, fsdp_error *err)
{
    const fsdp_sd *sd = checkpoint->manifest.sd;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        lost_search search = {checkpoint, -1};
        if (entry->kind != FSDP_ENTRY_TENSOR)
            continue;
        fsdp_box whole = fsdp_box_whole(entry->ndim, entry->shape);
        FSDP_TRY(fsdp_checkpoint_locate(checkpoint, i, &whole, find_lost, &search, err));
        if (search.file >= 0)
            FSDP_TRY(incomplete_lose(checkpoint, i, search.file, err));
    }
    for (size_t i = 0; checkpoint->is_missing && i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (entry->kind == FSDP_ENTRY_ALIAS && checkpoint->is_missing[entry->target])
            FSDP_TRY(fsdp_incomplete_mark(checkpoint, i, err));
    }
    return FSDP_OK;
}

/* === reading ================================================================================== */

/*
 * Reads boxes of an opened native checkpoint: finds the stored boxes that overlap the wanted ones and
 * gets their blocks (pipeline.c), alone or shared with other workers. Used by load, diff and convert.
 */

int fsdp_checkpoint_file_of(const fsdp_checkpoint *checkpoint, int rank)
{
    return checkpoint->manifest.kind == FSDP_FULL ? 0 : rank;
}

static bool same_box(const fsdp_stored_box *stored, const fsdp_box *box)
{
    size_t size = (size_t)box->ndim * sizeof(int64_t);
    return stored->ndim == box->ndim && memcmp(stored->lo, box->lo, size) == 0 &&
           memcmp(stored->len, box->len, size) == 0;
}

static fsdp_status disagree(const fsdp_shard_reader *reader, const fsdp_entry *tensor,
                            const char *what, fsdp_error *err)
{
    char name[160];
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' %s: tensor '%s'", fsdp_shard_path(reader), what,
                     fsdp_printable(tensor->name, tensor->name_size, name, sizeof name));
}

fsdp_status fsdp_checkpoint_stored(const fsdp_checkpoint *checkpoint,
                                   const fsdp_promised_box *promised,
                                   const fsdp_stored_box **stored_out,
                                   fsdp_shard_reader **reader_out, fsdp_error *err)
{
    const fsdp_entry *tensor = fsdp_sd_at(checkpoint->manifest.sd, promised->entry);
    fsdp_shard_reader *reader =
        fsdp_native_of(checkpoint)->readers[fsdp_checkpoint_file_of(checkpoint, promised->rank)];
    const fsdp_stored_box *stored = fsdp_shard_find(
        reader, (uint32_t)promised->rank, (uint32_t)promised->entry, (uint32_t)promised->part);
    if (!stored)
        return disagree(reader, tensor, "lacks a box that the manifest lists", err);
    if (!same_box(stored, promised->box) || stored->dtype != tensor->dtype ||
        stored->name_size != tensor->name_size ||
        memcmp(stored->name, tensor->name, tensor->name_size) != 0)
        return disagree(reader, tensor, "holds a different box than the manifest lists", err);
    *stored_out = stored;
    *reader_out = reader;
    return FSDP_OK;
}

typedef struct get_state {
    fsdp_checkpoint *checkpoint;
    const fsdp_read_request *request;
    fsdp_read_target *near; /* the targets that overlap the current stored box */
} get_state;

/* Skips the next `blocks` blocks if none of them is this worker's. */
static bool pass_blocks(fsdp_work_counter *counter, int64_t blocks)
{
    if (!counter || counter->at + blocks > counter->mine)
        return false;
    counter->at += blocks;
    return true;
}

static fsdp_status get_stored(void *context, int rank, size_t part, const fsdp_box *box,
                              fsdp_error *err)
{
    const get_state *state = context;
    const fsdp_read_request *request = state->request;
    fsdp_box_read read = {.block_reader = &request->reader->blocks,
                          .targets = state->near,
                          .slots = &request->reader->slots};
    fsdp_box shared;
    for (size_t w = 0; w < request->count; w++)
        if (fsdp_box_intersect(&request->targets[w].box, box, &shared))
            state->near[read.target_count++] = request->targets[w];
    if (read.target_count == 0) /* overlaps the hull, but no target: its file may not be open */
        return FSDP_OK;
    fsdp_promised_box promised = {request->entry, rank, part, box};
    FSDP_TRY(fsdp_checkpoint_stored(state->checkpoint, &promised, &read.stored, &read.shard, err));
    if (pass_blocks(request->counter, read.stored->block_count))
        return FSDP_OK;
    for (int64_t block = 0; block < read.stored->block_count; block++)
        if (fsdp_work_counter_take(request->counter) && fsdp_block_is_wanted(&read, block))
            FSDP_TRY(fsdp_get_block(&read, block, err));
    return FSDP_OK;
}

/* The smallest box that holds all targets, so that stored boxes are visited once. */
static fsdp_box hull(const fsdp_read_target *targets, size_t count)
{
    fsdp_box box = targets[0].box;
    for (size_t w = 1; w < count; w++) {
        const fsdp_box *other = &targets[w].box;
        for (int d = 0; d < box.ndim; d++) {
            int64_t end = box.lo[d] + box.len[d], other_end = other->lo[d] + other->len[d];
            box.lo[d] = other->lo[d] < box.lo[d] ? other->lo[d] : box.lo[d];
            box.len[d] = (other_end > end ? other_end : end) - box.lo[d];
        }
    }
    return box;
}

/* The table's `get` of native checkpoints. */
static fsdp_status native_get(fsdp_checkpoint *checkpoint, const fsdp_read_request *request,
                              fsdp_error *err)
{
    size_t entry = request->entry;
    get_state state = {checkpoint, request, fsdp_alloc(request->count, sizeof *state.near)};
    if (!state.near)
        return fsdp_fail_memory(err, "a list of boxes");
    fsdp_box all = hull(request->targets, request->count);
    fsdp_status st = fsdp_box_plan_stored(fsdp_sd_at(checkpoint->manifest.sd, entry),
                                          fsdp_native_of(checkpoint)->owners[entry], &all,
                                          get_stored, &state, err);
    fsdp_free(state.near);
    return st;
}

/* === opening ===================================================================================== */

static void fill_info(fsdp_checkpoint *checkpoint)
{
    const fsdp_manifest *manifest = &checkpoint->manifest;
    fsdp_checkpoint_info *info = &checkpoint->info;
    *info = (fsdp_checkpoint_info){.path = checkpoint->path,
                                   .format = "fsdp",
                                   .format_major = FSDP_FORMAT_MAJOR,
                                   .format_minor = manifest->minor,
                                   .kind = manifest->kind,
                                   .step = manifest->step,
                                   .world = manifest->world,
                                   .compressed = manifest->compressed,
                                   .file_count = manifest->file_count,
                                   .tensor_bytes = fsdp_sd_tensor_bytes(manifest->sd)};
    memcpy(info->run, manifest->run, sizeof info->run);
    for (int i = 0; i < manifest->file_count; i++)
        info->file_bytes += manifest->files[i].size;
}

/* Plans need memory per rank, so the number of ranks is checked: against the list of files or, in a
 * full checkpoint, against the size of the index, which has a head for every rank. */
static fsdp_status check_world(const fsdp_checkpoint *checkpoint, fsdp_error *err)
{
    const fsdp_manifest *manifest = &checkpoint->manifest;
    if (manifest->kind != FSDP_FULL ||
        manifest->world <= manifest->files[0].index_size / FSDP_SHARD_INDEX_LEAST)
        return FSDP_OK;
    return fsdp_fail(
        err, FSDP_ERR_DAMAGED,
        "'%s/%s' is damaged: its index of %lld bytes does not fit the boxes of %d ranks",
        checkpoint->path, FSDP_MANIFEST_NAME, (long long)manifest->files[0].index_size,
        manifest->world);
}

/* --- large values --- */

/* The index, not the manifest, bounds the memory of the value. */
static fsdp_status find_stored(fsdp_checkpoint *checkpoint, const fsdp_stored_value *value,
                               const fsdp_stored_box **stored_out, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(checkpoint->manifest.sd, value->entry);
    fsdp_shard_reader *reader = fsdp_native_of(checkpoint)->readers[0];
    const fsdp_stored_box *stored = fsdp_shard_find(reader, 0, (uint32_t)value->entry, 0);
    char name[160];
    if (!stored || stored->dtype != FSDP_U8 || stored->ndim != 1 || stored->len[0] != value->size)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' lacks the value '%s' that the manifest lists",
                         fsdp_shard_path(reader),
                         fsdp_printable(entry->name, entry->name_size, name, sizeof name));
    *stored_out = stored;
    return FSDP_OK;
}

static fsdp_status read_stored(fsdp_checkpoint *checkpoint, const fsdp_stored_box *stored,
                               char *bytes, fsdp_error *err)
{
    fsdp_read_target target = {.box = fsdp_stored_box_box(stored), .dtype = FSDP_U8, .data = bytes};
    fsdp_block_reader block_reader = {0};
    fsdp_box_read read = {.block_reader = &block_reader,
                          .shard = fsdp_native_of(checkpoint)->readers[0],
                          .stored = stored,
                          .targets = &target,
                          .target_count = 1};
    fsdp_status st = FSDP_OK;
    for (int64_t block = 0; st == FSDP_OK && block < stored->block_count; block++)
        st = fsdp_get_block(&read, block, err);
    fsdp_block_reader_release(&block_reader);
    return st;
}

static fsdp_status load_stored_value(fsdp_checkpoint *checkpoint, const fsdp_stored_value *value,
                                     fsdp_error *err)
{
    const fsdp_stored_box *stored = NULL;
    fsdp_value unpacked = {0};
    if (checkpoint->may_lack && !fsdp_native_of(checkpoint)->readers[0] &&
        incomplete_is_lost(checkpoint, 0))
        return incomplete_lose(checkpoint, value->entry, 0, err);
    FSDP_TRY(fsdp_checkpoint_need_file(checkpoint, 0, err));
    FSDP_TRY(find_stored(checkpoint, value, &stored, err));
    char *bytes = fsdp_alloc_pages((size_t)value->size);
    if (!bytes)
        return fsdp_fail_memory(err, "a value");
    fsdp_status st = read_stored(checkpoint, stored, bytes, err);
    if (st == FSDP_OK)
        st = fsdp_value_unpack(value->kind, bytes, (size_t)value->size, checkpoint->path, &unpacked,
                               err);
    if (st == FSDP_OK)
        fsdp_sd_set_value(checkpoint->manifest.sd, value->entry, &unpacked);
    fsdp_free(bytes);
    return st;
}

static fsdp_status load_stored_values(fsdp_checkpoint *checkpoint, fsdp_error *err)
{
    for (size_t i = 0; i < checkpoint->manifest.stored_count; i++)
        FSDP_TRY(load_stored_value(checkpoint, &checkpoint->manifest.stored[i], err));
    return FSDP_OK;
}

static fsdp_status read_manifest(fsdp_checkpoint *checkpoint, bool look_at_files, fsdp_error *err)
{
    fsdp_io *io = checkpoint->io;
    checkpoint->is_one_file = fsdp_is_one_file(io, checkpoint->path);
    if (checkpoint->is_one_file)
        return fsdp_one_file_read(io, checkpoint->path, &checkpoint->manifest, err);
    return (look_at_files ? fsdp_manifest_read : fsdp_manifest_read_alone)(
        io, checkpoint->path, &checkpoint->manifest, err);
}

static fsdp_status open_manifest(fsdp_checkpoint *checkpoint, const char *path, bool look_at_files,
                                 fsdp_error *err)
{
    checkpoint->path = fsdp_strndup(path, strlen(path));
    if (!checkpoint->path)
        return fsdp_fail_memory(err, "a path");
    FSDP_TRY(read_manifest(checkpoint, look_at_files, err));
    FSDP_TRY(check_world(checkpoint, err));
    const fsdp_manifest *manifest = &checkpoint->manifest;
    fsdp_native *native = fsdp_native_of(checkpoint);
    native->readers = fsdp_alloc((size_t)manifest->file_count, sizeof *native->readers);
    native->owners = fsdp_alloc(fsdp_sd_count(manifest->sd), sizeof *native->owners);
    if (!native->readers || !native->owners)
        return fsdp_fail_memory(err, "a checkpoint");
    if (manifest->kind != FSDP_LOCAL)
        FSDP_TRY(fsdp_box_plan_owners(manifest->sd, manifest->owners, native->owners, err));
    fill_info(checkpoint);
    return load_stored_values(checkpoint, err);
}

/* --- the table of native checkpoints ---------------------------------------------------------- */

static void close_native(fsdp_checkpoint *checkpoint)
{
    fsdp_native *native = fsdp_native_of(checkpoint);
    for (int i = 0; native->readers && i < checkpoint->manifest.file_count; i++)
        fsdp_shard_close(native->readers[i]);
    fsdp_free(native->readers);
    fsdp_free(native->owners);
}

static char *file_path(const fsdp_checkpoint *checkpoint, int number)
{
    char name[FSDP_SHARD_NAME_SIZE];
    if (checkpoint->is_one_file)
        return fsdp_strndup(checkpoint->path, strlen(checkpoint->path));
    fsdp_shard_name(number, checkpoint->manifest.file_count, name);
    return fsdp_path_join(checkpoint->path, name);
}

fsdp_status fsdp_checkpoint_need_file(fsdp_checkpoint *checkpoint, int number, fsdp_error *err)
{
    fsdp_shard_reader **reader = &fsdp_native_of(checkpoint)->readers[number];
    if (*reader)
        return FSDP_OK;
    const fsdp_manifest *manifest = &checkpoint->manifest;
    const fsdp_manifest_file *file = &manifest->files[number];
    char *path = file_path(checkpoint, number);
    if (!path)
        return fsdp_fail_memory(err, "a path");
    fsdp_file_record record = {file->size, file->index_offset, file->index_size, file->index_hash,
                               checkpoint->is_one_file};
    fsdp_shard_id id = {
        .step = manifest->step, .rank = (uint32_t)number, .world = (uint32_t)manifest->world};
    memcpy(id.run, manifest->run, sizeof id.run);
    fsdp_status st = fsdp_shard_open(checkpoint->io, path, &record, &id, reader, err);
    fsdp_free(path);
    return st;
}

fsdp_status fsdp_checkpoint_need_all(fsdp_checkpoint *checkpoint, fsdp_error *err)
{
    bool is_lost = false;
    for (int i = 0; i < checkpoint->manifest.file_count; i++) {
        if (checkpoint->may_lack && incomplete_is_lost(checkpoint, i))
            is_lost = true;
        else
            FSDP_TRY(fsdp_checkpoint_need_file(checkpoint, i, err));
    }
    return is_lost ? incomplete_mark_lost(checkpoint, err) : FSDP_OK;
}

static void file_at(const fsdp_checkpoint *checkpoint, int number, fsdp_checkpoint_file *file_out)
{
    *file_out = (fsdp_checkpoint_file){.size = checkpoint->manifest.files[number].size};
    const char *slash = strrchr(checkpoint->path, '/');
    if (checkpoint->is_one_file)
        snprintf(file_out->name, sizeof file_out->name, "%s", slash ? slash + 1 : checkpoint->path);
    else
        fsdp_shard_name(number, checkpoint->manifest.file_count, file_out->name);
    const fsdp_shard_reader *reader = fsdp_native_of(checkpoint)->readers[number];
    if (!reader)
        return;
    file_out->box_count = (int64_t)fsdp_shard_box_count(reader);
    for (size_t i = 0; i < fsdp_shard_box_count(reader); i++)
        file_out->block_count += fsdp_shard_box_at(reader, i)->block_count;
}

static fsdp_status visit_file(const fsdp_checkpoint *checkpoint, int number, char *path,
                              fsdp_file_visit visit, void *context, fsdp_error *err)
{
    fsdp_file_info info;
    if (!path)
        return fsdp_fail_memory(err, "a path");
    int result = checkpoint->io->ops->info(checkpoint->io, path, &info);
    fsdp_status st = result == 0 ? visit(context, number, path, &info, err)
                                 : fsdp_fail_errno(err, -result, "cannot stat '%s'", path);
    fsdp_free(path);
    return st;
}

/* Visits all files except missing ones (checkpoint_internal.h). */
static fsdp_status each_file(const fsdp_checkpoint *checkpoint, fsdp_file_visit visit,
                             void *context, fsdp_error *err)
{
    if (!checkpoint->is_one_file)
        FSDP_TRY(visit_file(checkpoint, -1, fsdp_path_join(checkpoint->path, FSDP_MANIFEST_NAME),
                            visit, context, err));
    for (int i = 0; i < checkpoint->manifest.file_count; i++)
        if (fsdp_native_of(checkpoint)->readers[i])
            FSDP_TRY(visit_file(checkpoint, i, file_path(checkpoint, i), visit, context, err));
    return FSDP_OK;
}

typedef struct located {
    const fsdp_checkpoint *checkpoint;
    size_t entry;
    fsdp_number_visit visit;
    void *context;
} located;

static fsdp_status visit_located(void *context, int rank, size_t part, const fsdp_box *box,
                                 fsdp_error *err)
{
    const located *search = context;
    (void)part;
    (void)box;
    return search->visit(search->context, fsdp_checkpoint_file_of(search->checkpoint, rank), err);
}

static fsdp_status locate(fsdp_checkpoint *checkpoint, size_t entry, const fsdp_box *box,
                          fsdp_number_visit visit, void *context, fsdp_error *err)
{
    located search = {checkpoint, entry, visit, context};
    return fsdp_box_plan_stored(fsdp_sd_at(checkpoint->manifest.sd, entry),
                                fsdp_native_of(checkpoint)->owners[entry], box, visit_located,
                                &search, err);
}

static fsdp_status find_stored_box(void *context, int rank, size_t part, const fsdp_box *box,
                                   fsdp_error *err)
{
    const located *search = context;
    const fsdp_stored_box *stored;
    fsdp_shard_reader *reader;
    fsdp_promised_box promised = {search->entry, rank, part, box};
    return fsdp_checkpoint_stored(search->checkpoint, &promised, &stored, &reader, err);
}

static fsdp_status require(fsdp_checkpoint *checkpoint, size_t entry, fsdp_error *err)
{
    located search = {.checkpoint = checkpoint, .entry = entry};
    const fsdp_entry *tensor = fsdp_sd_at(checkpoint->manifest.sd, entry);
    fsdp_box whole = fsdp_box_whole(tensor->ndim, tensor->shape);
    return fsdp_box_plan_stored(tensor, fsdp_native_of(checkpoint)->owners[entry], &whole,
                                find_stored_box, &search, err);
}

static const char *missing_at(const fsdp_checkpoint *checkpoint, size_t number, size_t *size_out)
{
    for (size_t i = 0; checkpoint->is_missing && i < fsdp_sd_count(checkpoint->manifest.sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(checkpoint->manifest.sd, i);
        if (checkpoint->is_missing[i] && number-- == 0) {
            *size_out = entry->name_size;
            return entry->name;
        }
    }
    return NULL;
}

static const fsdp_checkpoint_ops native_ops = {.close = close_native,
                                               .get = native_get,
                                               .file_at = file_at,
                                               .each_file = each_file,
                                               .locate = locate,
                                               .missing_at = missing_at,
                                               .require = require};

static fsdp_status open_checkpoint(fsdp_io *io, const char *path, const fsdp_open_opts *opts,
                                   bool look_at_files, fsdp_checkpoint **checkpoint_out,
                                   fsdp_error *err)
{
    fsdp_native *native = fsdp_alloc(1, sizeof *native);
    if (!native)
        return fsdp_fail_memory(err, "a checkpoint");
    fsdp_checkpoint *checkpoint = &native->base;
    checkpoint->ops = &native_ops;
    checkpoint->io = io;
    fsdp_status st = fsdp_incomplete_allow(checkpoint, opts, err);
    if (st == FSDP_OK)
        st = open_manifest(checkpoint, path, look_at_files && !checkpoint->may_lack, err);
    if (st != FSDP_OK) {
        fsdp_checkpoint_close(checkpoint);
        return st;
    }
    *checkpoint_out = checkpoint;
    return FSDP_OK;
}

/* model: that of opts->like, or NULL. */
static fsdp_status open_either(fsdp_io *io, const char *path, const fsdp_open_opts *opts,
                               const fsdp_checkpoint *model, fsdp_checkpoint **checkpoint_out,
                               fsdp_error *err)
{
    const char *named = opts ? opts->format : NULL;
    const fsdp_format *format = named ? fsdp_format_from(named) : NULL;
    if (named ? !format || format->reader : fsdp_path_is_foreign(io, path))
        return fsdp_foreign_open(io, path, opts, model, checkpoint_out, err);
    if (opts && opts->void_as)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "--void-as is for npy and npz, but '%s' is fsdp; leave it out", path);
    if (model)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "--like is for rank files of FSDP1, but '%s' is fsdp; leave it out", path);
    return open_checkpoint(io, path, opts, true, checkpoint_out, err);
}

fsdp_status fsdp_checkpoint_open_as(fsdp_io *io, const char *path, const fsdp_open_opts *opts,
                                    fsdp_checkpoint **checkpoint_out, fsdp_error *err)
{
    fsdp_checkpoint *model = NULL;
    fsdp_status st = FSDP_OK;
    if (opts && opts->like)
        st = open_either(io, opts->like, NULL, NULL, &model, err);
    if (st != FSDP_OK)
        fsdp_error_prefix(err, "--like");
    else
        st = open_either(io, path, opts, model, checkpoint_out, err);
    fsdp_checkpoint_close(model);
    return st;
}

fsdp_status fsdp_checkpoint_open_manifest(fsdp_io *io, const char *path,
                                          fsdp_checkpoint **checkpoint_out, fsdp_error *err)
{
    return fsdp_checkpoint_open_as(io, path, NULL, checkpoint_out, err);
}

fsdp_status fsdp_checkpoint_open_alone(fsdp_io *io, const char *path,
                                       fsdp_checkpoint **checkpoint_out, fsdp_error *err)
{
    return open_checkpoint(io, path, NULL, false, checkpoint_out, err);
}
