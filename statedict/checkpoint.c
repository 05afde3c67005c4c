/*
 * An opened checkpoint: manifest, owners and shard readers, and reading boxes of its tensors. Load,
 * verify, diff and convert stand on this; save.c is its mirror.
 */
#include "statedict/checkpoint_internal.h"

#include "statedict/commit_internal.h"
#include "statedict/large_value.h"

#include <errno.h>
#include <string.h>

/* --- opening ---------------------------------------------------------------------------------- */

static int64_t count_tensor_bytes(const fsdp_sd *sd)
{
    int64_t bytes = 0;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++)
        if (fsdp_sd_at(sd, i)->kind == FSDP_ENTRY_TENSOR)
            bytes += fsdp_entry_bytes(fsdp_sd_at(sd, i));
    return bytes;
}

static void fill_info(fsdp_checkpoint *checkpoint)
{
    const fsdp_manifest *manifest = &checkpoint->manifest;
    fsdp_checkpoint_info *info = &checkpoint->info;
    *info = (fsdp_checkpoint_info){.path = checkpoint->path,
                                   .format = "fsdp",
                                   .format_major = FSDP_FORMAT_MAJOR,
                                   .format_minor = FSDP_FORMAT_MINOR,
                                   .kind = manifest->kind,
                                   .step = manifest->step,
                                   .world = manifest->world,
                                   .compressed = manifest->compressed,
                                   .file_count = manifest->file_count,
                                   .tensor_bytes = count_tensor_bytes(manifest->sd)};
    memcpy(info->run, manifest->run, sizeof info->run);
    for (int i = 0; i < manifest->file_count; i++)
        info->file_bytes += manifest->files[i].size;
}

/* Ranks cost memory in plans. The list of files bounds their number; in a full checkpoint the index
 * does, which has a head for every rank. */
static fsdp_status check_world(const fsdp_checkpoint *checkpoint, fsdp_error *err)
{
    const fsdp_manifest *manifest = &checkpoint->manifest;
    if (manifest->kind != FSDP_FULL ||
        manifest->world <= manifest->files[0].index_size / FSDP_SHARD_INDEX_LEAST)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s/%s' is damaged: an index of %lld bytes does not hold what %d ranks wrote",
                     checkpoint->path, FSDP_MANIFEST_NAME, (long long)manifest->files[0].index_size,
                     manifest->world);
}

/* --- large values --- */

static fsdp_status read_stored(fsdp_checkpoint *checkpoint, const fsdp_stored_value *value,
                               char *bytes, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(checkpoint->manifest.sd, value->entry);
    fsdp_shard_reader *reader = checkpoint->readers[0];
    const fsdp_stored_box *stored = fsdp_shard_find(reader, 0, (uint32_t)value->entry, 0);
    if (!stored || stored->dtype != FSDP_U8 || stored->ndim != 1 || stored->len[0] != value->size)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' lacks the value '%s' that the manifest promises",
                         fsdp_shard_path(reader), entry->name);
    fsdp_want want = {.box = fsdp_stored_box_box(stored), .dtype = FSDP_U8, .data = bytes};
    fsdp_getter getter = {0};
    fsdp_status st = FSDP_OK;
    for (int64_t block = 0; st == FSDP_OK && block < stored->block_count; block++)
        st = fsdp_get_block(&getter, reader, stored, block, &want, 1, err);
    fsdp_getter_release(&getter);
    return st;
}

static fsdp_status load_stored_value(fsdp_checkpoint *checkpoint, const fsdp_stored_value *stored,
                                     fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(checkpoint->manifest.sd, stored->entry);
    fsdp_value value = {0};
    FSDP_TRY(fsdp_checkpoint_need_file(checkpoint, 0, err));
    if (stored->size > checkpoint->manifest.files[0].size && !checkpoint->manifest.compressed)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "the value '%s' is larger than its file",
                         entry->name);
    char *bytes = fsdp_alloc_pages((size_t)stored->size);
    if (!bytes)
        return fsdp_fail_memory(err, "a value");
    fsdp_status st = read_stored(checkpoint, stored, bytes, err);
    if (st == FSDP_OK)
        st = fsdp_value_unpack(stored->kind, bytes, (size_t)stored->size, entry->name, &value, err);
    if (st == FSDP_OK)
        fsdp_sd_set_value(checkpoint->manifest.sd, stored->entry, &value);
    fsdp_free(bytes);
    return st;
}

static fsdp_status load_stored_values(fsdp_checkpoint *checkpoint, fsdp_error *err)
{
    for (size_t i = 0; i < checkpoint->manifest.stored_count; i++)
        FSDP_TRY(load_stored_value(checkpoint, &checkpoint->manifest.stored[i], err));
    return FSDP_OK;
}

static fsdp_status open_manifest(fsdp_checkpoint *checkpoint, const char *path, bool look_at_files,
                                 fsdp_error *err)
{
    checkpoint->path = fsdp_strndup(path, strlen(path));
    if (!checkpoint->path)
        return fsdp_fail_memory(err, "a path");
    FSDP_TRY((look_at_files ? fsdp_manifest_read : fsdp_manifest_read_alone)(
        checkpoint->io, path, &checkpoint->manifest, err));
    FSDP_TRY(check_world(checkpoint, err));
    const fsdp_manifest *manifest = &checkpoint->manifest;
    checkpoint->readers = fsdp_alloc((size_t)manifest->file_count, sizeof *checkpoint->readers);
    checkpoint->owners = fsdp_alloc(fsdp_sd_count(manifest->sd), sizeof *checkpoint->owners);
    if (!checkpoint->readers || !checkpoint->owners)
        return fsdp_fail_memory(err, "a checkpoint");
    if (manifest->kind != FSDP_LOCAL)
        FSDP_TRY(fsdp_plan_owners(manifest->sd, manifest->owners, checkpoint->owners, err));
    fill_info(checkpoint);
    return load_stored_values(checkpoint, err);
}

static fsdp_status open_checkpoint(fsdp_io *io, const char *path, bool look_at_files,
                                   fsdp_checkpoint **checkpoint_out, fsdp_error *err)
{
    fsdp_checkpoint *checkpoint = fsdp_alloc(1, sizeof *checkpoint);
    if (!checkpoint)
        return fsdp_fail_memory(err, "a checkpoint");
    checkpoint->io = io;
    fsdp_status st = open_manifest(checkpoint, path, look_at_files, err);
    if (st != FSDP_OK) {
        fsdp_checkpoint_close(checkpoint);
        return st;
    }
    *checkpoint_out = checkpoint;
    return FSDP_OK;
}

fsdp_status fsdp_checkpoint_open_manifest(fsdp_io *io, const char *path,
                                          fsdp_checkpoint **checkpoint_out, fsdp_error *err)
{
    return open_checkpoint(io, path, true, checkpoint_out, err);
}

fsdp_status fsdp_checkpoint_open_alone(fsdp_io *io, const char *path,
                                       fsdp_checkpoint **checkpoint_out, fsdp_error *err)
{
    return open_checkpoint(io, path, false, checkpoint_out, err);
}

void fsdp_checkpoint_close(fsdp_checkpoint *checkpoint)
{
    if (!checkpoint)
        return;
    for (int i = 0; checkpoint->readers && i < checkpoint->manifest.file_count; i++)
        fsdp_shard_close(checkpoint->readers[i]);
    fsdp_free(checkpoint->readers);
    fsdp_free(checkpoint->owners);
    fsdp_manifest_release(&checkpoint->manifest);
    fsdp_free(checkpoint->path);
    fsdp_free(checkpoint);
}

fsdp_status fsdp_checkpoint_need_file(fsdp_checkpoint *checkpoint, int number, fsdp_error *err)
{
    if (checkpoint->readers[number])
        return FSDP_OK;
    const fsdp_manifest *manifest = &checkpoint->manifest;
    const fsdp_manifest_file *file = &manifest->files[number];
    char name[FSDP_SHARD_NAME_SIZE];
    fsdp_shard_name(number, manifest->file_count, name);
    char *path = fsdp_path_join(checkpoint->path, name);
    if (!path)
        return fsdp_fail_memory(err, "a path");
    fsdp_shard_seal seal = {file->size, file->index_offset, file->index_size, file->index_hash};
    fsdp_shard_id id = {
        .step = manifest->step, .rank = (uint32_t)number, .world = (uint32_t)manifest->world};
    memcpy(id.run, manifest->run, sizeof id.run);
    fsdp_status st =
        fsdp_shard_open(checkpoint->io, path, &seal, &id, &checkpoint->readers[number], err);
    fsdp_free(path);
    return st;
}

fsdp_status fsdp_checkpoint_need_all(fsdp_checkpoint *checkpoint, fsdp_error *err)
{
    for (int i = 0; i < checkpoint->manifest.file_count; i++)
        FSDP_TRY(fsdp_checkpoint_need_file(checkpoint, i, err));
    return FSDP_OK;
}

/* An overwrite that was cut between its two renames left no DIR: what it set aside is still good. */
static bool find_set_aside(const char *path, fsdp_io *io, const fsdp_watch *watch, char **path_out)
{
    if (!fsdp_replaced_find(io, path, path_out))
        return false;
    fsdp_notice(watch,
                "'%s' was being overwritten when that was cut short: taking the one before, '%s'",
                path, *path_out);
    return true;
}

fsdp_status fsdp_checkpoint_resolve(const char *path, fsdp_io *io, const fsdp_watch *watch,
                                    char **path_out, fsdp_error *err)
{
    fsdp_file_info info;
    int errnum = io->ops->info(io, path, &info);
    if (errnum == -ENOENT && find_set_aside(path, io, watch, path_out))
        return FSDP_OK;
    if (errnum < 0)
        return fsdp_fail_errno(err, -errnum, "cannot open '%s'", path);
    if (info.kind != FSDP_FILE_DIRECTORY)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "'%s' is a file; a checkpoint is a directory",
                         path);
    char *manifest = fsdp_path_join(path, FSDP_MANIFEST_NAME);
    if (!manifest)
        return fsdp_fail_memory(err, "a path");
    bool is_checkpoint = fsdp_io_exists(io, manifest);
    fsdp_free(manifest);
    if (!is_checkpoint) {
        fsdp_run_steps steps = {0};
        FSDP_TRY(fsdp_run_list(path, io, &steps, err));
        bool is_run = steps.count > 0;
        fsdp_run_steps_release(&steps);
        if (is_run)
            return fsdp_run_latest(path, FSDP_VERIFY_QUICK, watch, io, path_out, err);
    }
    *path_out = fsdp_strndup(path, strlen(path));
    return *path_out ? FSDP_OK : fsdp_fail_memory(err, "a path");
}

fsdp_status fsdp_checkpoint_open(const char *path, struct fsdp_io *io,
                                 fsdp_checkpoint **checkpoint_out, fsdp_error *err)
{
    char *resolved = NULL;
    fsdp_checkpoint *checkpoint = NULL;
    io = io ? io : fsdp_io_posix();
    FSDP_TRY(fsdp_checkpoint_resolve(path, io, NULL, &resolved, err));
    fsdp_status st = fsdp_checkpoint_open_manifest(io, resolved, &checkpoint, err);
    fsdp_free(resolved);
    if (st == FSDP_OK)
        st = fsdp_checkpoint_need_all(checkpoint, err);
    if (st != FSDP_OK) {
        fsdp_checkpoint_close(checkpoint);
        return st;
    }
    *checkpoint_out = checkpoint;
    return FSDP_OK;
}

/* --- looking ---------------------------------------------------------------------------------- */

const fsdp_checkpoint_info *fsdp_checkpoint_describe(const fsdp_checkpoint *checkpoint)
{
    return &checkpoint->info;
}

const fsdp_sd *fsdp_checkpoint_sd(const fsdp_checkpoint *checkpoint)
{
    return checkpoint->manifest.sd;
}

void fsdp_checkpoint_file_at(const fsdp_checkpoint *checkpoint, int number,
                             fsdp_checkpoint_file *file_out)
{
    *file_out = (fsdp_checkpoint_file){.size = checkpoint->manifest.files[number].size};
    fsdp_shard_name(number, checkpoint->manifest.file_count, file_out->name);
    const fsdp_shard_reader *reader = checkpoint->readers[number];
    if (!reader)
        return;
    file_out->box_count = (int64_t)fsdp_shard_box_count(reader);
    for (size_t i = 0; i < fsdp_shard_box_count(reader); i++)
        file_out->block_count += fsdp_shard_box_at(reader, i)->block_count;
}

/* --- reading ---------------------------------------------------------------------------------- */

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

fsdp_status fsdp_checkpoint_stored(const fsdp_checkpoint *checkpoint, size_t entry, int rank,
                                   size_t part, const fsdp_box *box,
                                   const fsdp_stored_box **stored_out,
                                   fsdp_shard_reader **reader_out, fsdp_error *err)
{
    const fsdp_entry *tensor = fsdp_sd_at(checkpoint->manifest.sd, entry);
    fsdp_shard_reader *reader = checkpoint->readers[fsdp_checkpoint_file_of(checkpoint, rank)];
    const fsdp_stored_box *stored =
        fsdp_shard_find(reader, (uint32_t)rank, (uint32_t)entry, (uint32_t)part);
    char name[160];
    fsdp_printable(tensor->name, tensor->name_size, name, sizeof name);
    if (!stored)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' lacks a box of tensor '%s' that the manifest promises",
                         fsdp_shard_path(reader), name);
    if (!same_box(stored, box) || stored->dtype != tensor->dtype ||
        stored->name_size != tensor->name_size ||
        memcmp(stored->name, tensor->name, tensor->name_size) != 0)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' and the manifest disagree about tensor '%s'",
                         fsdp_shard_path(reader), name);
    *stored_out = stored;
    *reader_out = reader;
    return FSDP_OK;
}

typedef struct get_state {
    fsdp_checkpoint *checkpoint;
    size_t entry;
    const fsdp_want *wants;
    size_t count;
    fsdp_want *near; /* the wants that meet the stored box at hand */
    fsdp_getter *getter;
    fsdp_turns *turns; /* NULL: every block */
} get_state;

#define NO_TURN (INT64_MAX / 2)

void fsdp_turns_begin(fsdp_turns *turns, atomic_llong *next)
{
    *turns = (fsdp_turns){.next = next, .mine = atomic_fetch_add(next, 1)};
}

void fsdp_turns_stop(fsdp_turns *turns)
{
    atomic_store(turns->next, NO_TURN);
}

static bool take_turn(fsdp_turns *turns)
{
    if (!turns)
        return true;
    if (turns->at++ != turns->mine)
        return false;
    turns->mine = atomic_fetch_add(turns->next, 1);
    return true;
}

/* None of the next `blocks` blocks is this worker's: step over them. */
static bool pass_turns(fsdp_turns *turns, int64_t blocks)
{
    if (!turns || turns->at + blocks > turns->mine)
        return false;
    turns->at += blocks;
    return true;
}

static fsdp_status get_stored(void *user, int rank, size_t part, const fsdp_box *box,
                              fsdp_error *err)
{
    get_state *state = user;
    const fsdp_stored_box *stored = NULL;
    fsdp_shard_reader *reader = NULL;
    fsdp_box shared;
    size_t near = 0;
    FSDP_TRY(fsdp_checkpoint_stored(state->checkpoint, state->entry, rank, part, box, &stored,
                                    &reader, err));
    for (size_t w = 0; w < state->count; w++)
        if (fsdp_box_intersect(&state->wants[w].box, box, &shared))
            state->near[near++] = state->wants[w];
    if (near == 0 || pass_turns(state->turns, stored->block_count))
        return FSDP_OK;
    for (int64_t block = 0; block < stored->block_count; block++)
        if (take_turn(state->turns) && fsdp_block_is_wanted(stored, block, state->near, near))
            FSDP_TRY(fsdp_get_block(state->getter, reader, stored, block, state->near, near, err));
    return FSDP_OK;
}

/* The smallest box that holds all wants, so that stored boxes are visited once. */
static fsdp_box hull(const fsdp_want *wants, size_t count)
{
    fsdp_box box = wants[0].box;
    for (size_t w = 1; w < count; w++) {
        const fsdp_box *other = &wants[w].box;
        for (int d = 0; d < box.ndim; d++) {
            int64_t end = box.lo[d] + box.len[d], other_end = other->lo[d] + other->len[d];
            box.lo[d] = other->lo[d] < box.lo[d] ? other->lo[d] : box.lo[d];
            box.len[d] = (other_end > end ? other_end : end) - box.lo[d];
        }
    }
    return box;
}

fsdp_status fsdp_checkpoint_get(fsdp_checkpoint *checkpoint, size_t entry, const fsdp_want *wants,
                                size_t count, fsdp_getter *getter, fsdp_turns *turns,
                                fsdp_error *err)
{
    if (count == 0)
        return FSDP_OK;
    get_state state = {.checkpoint = checkpoint,
                       .entry = entry,
                       .wants = wants,
                       .count = count,
                       .getter = getter,
                       .turns = turns,
                       .near = fsdp_alloc(count, sizeof *state.near)};
    if (!state.near)
        return fsdp_fail_memory(err, "a list of boxes");
    fsdp_box all = hull(wants, count);
    fsdp_status st = fsdp_plan_stored(fsdp_sd_at(checkpoint->manifest.sd, entry),
                                      checkpoint->owners[entry], &all, get_stored, &state, err);
    fsdp_free(state.near);
    return st;
}

static fsdp_status resolve_tensor(const fsdp_checkpoint *checkpoint, size_t *entry, fsdp_error *err)
{
    const fsdp_sd *sd = checkpoint->manifest.sd;
    if (*entry < fsdp_sd_count(sd) && fsdp_sd_at(sd, *entry)->kind == FSDP_ENTRY_ALIAS)
        *entry = fsdp_sd_at(sd, *entry)->target;
    if (*entry >= fsdp_sd_count(sd) || fsdp_sd_at(sd, *entry)->kind != FSDP_ENTRY_TENSOR)
        return fsdp_fail(err, FSDP_ERR_USAGE, "entry %zu of '%s' is no tensor", *entry,
                         checkpoint->path);
    return FSDP_OK;
}

fsdp_status fsdp_checkpoint_read(fsdp_checkpoint *checkpoint, size_t entry, const fsdp_box *box,
                                 void *data, fsdp_verify_mode verify, fsdp_error *err)
{
    FSDP_TRY(resolve_tensor(checkpoint, &entry, err));
    const fsdp_entry *tensor = fsdp_sd_at(checkpoint->manifest.sd, entry);
    fsdp_box whole = fsdp_box_whole(tensor->ndim, tensor->shape);
    if (box->ndim != whole.ndim || !fsdp_box_contains(&whole, box))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "the box asked for does not lie in tensor entry %zu of '%s'", entry,
                         checkpoint->path);
    fsdp_want want = {.box = *box, .dtype = tensor->dtype, .data = data};
    fsdp_getter getter = {.verify = verify};
    fsdp_status st = fsdp_box_count(box) > 0
                         ? fsdp_checkpoint_get(checkpoint, entry, &want, 1, &getter, NULL, err)
                         : FSDP_OK;
    fsdp_getter_release(&getter);
    return st;
}

static fsdp_status stream_slabs(fsdp_checkpoint *checkpoint, size_t entry, int64_t max_elements,
                                char *data, fsdp_getter *getter, fsdp_slab_visit visit, void *user,
                                fsdp_error *err)
{
    const fsdp_entry *tensor = fsdp_sd_at(checkpoint->manifest.sd, entry);
    fsdp_slabs slabs = {0};
    fsdp_box slab;
    for (int64_t first = 0;
         fsdp_slabs_next(&slabs, tensor->ndim, tensor->shape, max_elements, &slab);) {
        fsdp_want want = {.box = slab, .dtype = tensor->dtype, .data = data};
        FSDP_TRY(fsdp_checkpoint_get(checkpoint, entry, &want, 1, getter, NULL, err));
        FSDP_TRY(visit(user, tensor, first, slabs.next - first, data, err));
        first = slabs.next;
    }
    return FSDP_OK;
}

fsdp_status fsdp_checkpoint_stream(fsdp_checkpoint *checkpoint, size_t entry, int64_t memory,
                                   fsdp_slab_visit visit, void *user, fsdp_error *err)
{
    FSDP_TRY(resolve_tensor(checkpoint, &entry, err));
    const fsdp_entry *tensor = fsdp_sd_at(checkpoint->manifest.sd, entry);
    int64_t bytes = fsdp_entry_bytes(tensor), size = (int64_t)fsdp_dtype_size(tensor->dtype);
    if (bytes == 0)
        return visit(user, tensor, 0, 0, "", err);
    memory = memory > 0 ? memory : FSDP_MEMORY_DEFAULT;
    int64_t room = bytes < memory ? bytes : memory > size ? memory : size;
    char *data = fsdp_alloc_pages((size_t)room);
    if (!data)
        return fsdp_fail_memory(err, "a slab of a tensor");
    fsdp_getter getter = {0};
    fsdp_status st = stream_slabs(checkpoint, entry, room / size, data, &getter, visit, user, err);
    fsdp_getter_release(&getter);
    fsdp_free(data);
    return st;
}
