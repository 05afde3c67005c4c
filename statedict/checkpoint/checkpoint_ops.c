/*
 * The calls of an opened checkpoint, which go through its table (checkpoint_internal.h): native, another
 * program's, or derived. Boxes of any of them are read by several workers or in slabs.
 */
#include "statedict/checkpoint/checkpoint_internal.h"
#include "base/core/given.h"
#include "base/core/mem.h"
#include "base/data/box_internal.h"
#include "base/io/io_cache.h"
#include "statedict/commit/commit_internal.h"
#include "statedict/sd/layout_internal.h"

#include <limits.h>
#include <string.h>

void fsdp_checkpoint_close(fsdp_checkpoint *checkpoint)
{
    if (!checkpoint)
        return;
    if (checkpoint->ops->close)
        checkpoint->ops->close(checkpoint);
    fsdp_free(checkpoint->is_missing);
    fsdp_filter_free(checkpoint->may_lack);
    fsdp_manifest_release(&checkpoint->manifest);
    fsdp_sd_free(checkpoint->metadata);
    fsdp_free(checkpoint->path);
    fsdp_io_cache_free(checkpoint->cache);
    fsdp_free(checkpoint);
}

/* --- reading ---------------------------------------------------------------------------------- */

fsdp_status fsdp_checkpoint_get(fsdp_checkpoint *checkpoint, const fsdp_read_request *request,
                                fsdp_error *err)
{
    return request->count > 0 ? checkpoint->ops->get(checkpoint, request, err) : FSDP_OK;
}

int64_t fsdp_reader_bytes(const fsdp_reader *reader)
{
    return reader->blocks.bytes_read + reader->source.bytes_read;
}

void fsdp_reader_release(fsdp_reader *reader)
{
    fsdp_block_reader_release(&reader->blocks);
    fsdp_source_reader_release(&reader->source);
    fsdp_read_slots_release(&reader->slots);
    for (int i = 0; i < FSDP_READ_BUFFERS; i++)
        fsdp_free(reader->buffers.data[i]);
    *reader = (fsdp_reader){0};
}

fsdp_status fsdp_checkpoint_require(fsdp_checkpoint *checkpoint, size_t entry, fsdp_error *err)
{
    return checkpoint->ops->require ? checkpoint->ops->require(checkpoint, entry, err) : FSDP_OK;
}

/* --- queries ---------------------------------------------------------------------------------- */

const fsdp_checkpoint_info *fsdp_checkpoint_describe(const fsdp_checkpoint *checkpoint)
{
    if (!checkpoint)
        return NULL;
    return &checkpoint->info;
}

const fsdp_sd *fsdp_checkpoint_sd(const fsdp_checkpoint *checkpoint)
{
    if (!checkpoint)
        return NULL;
    return checkpoint->manifest.sd;
}

size_t fsdp_checkpoint_missing_count(const fsdp_checkpoint *checkpoint)
{
    if (!checkpoint)
        return 0;
    return checkpoint->missing_count;
}

const char *fsdp_checkpoint_missing_at(const fsdp_checkpoint *checkpoint, size_t number,
                                       size_t *size_out)
{
    size_t size;
    if (!checkpoint || !checkpoint->ops->missing_at)
        return NULL;
    return checkpoint->ops->missing_at(checkpoint, number, size_out ? size_out : &size);
}

/* --- conversions ------------------------------------------------------------------------------ */

fsdp_status fsdp_checkpoint_set_memory(fsdp_checkpoint *checkpoint, int64_t memory, const char *to,
                                       fsdp_error *err)
{
    return checkpoint->ops->set_memory ? checkpoint->ops->set_memory(checkpoint, memory, to, err)
                                       : FSDP_OK;
}

fsdp_status fsdp_checkpoint_announce(fsdp_checkpoint *checkpoint, size_t entry, bool repeated,
                                     fsdp_error *err)
{
    if (!checkpoint->ops->announce)
        return FSDP_OK;
    return checkpoint->ops->announce(checkpoint, fsdp_sd_tensor_of(checkpoint->manifest.sd, entry),
                                     repeated, err);
}

fsdp_reading fsdp_checkpoint_reading(const fsdp_checkpoint *checkpoint)
{
    if (!checkpoint->ops->reading)
        return (fsdp_reading){.threads = INT_MAX, .apart = INT64_MAX};
    return checkpoint->ops->reading(checkpoint);
}

bool fsdp_checkpoint_compare_places(const fsdp_checkpoint *checkpoint, size_t a, size_t b,
                                    int *order_out)
{
    return checkpoint->ops->compare_places &&
           checkpoint->ops->compare_places(checkpoint, a, b, order_out);
}

/* --- files ------------------------------------------------------------------------------------ */

void fsdp_checkpoint_file_at(const fsdp_checkpoint *checkpoint, int number,
                             fsdp_checkpoint_file *file_out)
{
    if (!checkpoint || !file_out)
        return;
    *file_out = (fsdp_checkpoint_file){0};
    if (checkpoint->ops->file_at)
        checkpoint->ops->file_at(checkpoint, number, file_out);
}

fsdp_status fsdp_checkpoint_each_file(const fsdp_checkpoint *checkpoint, fsdp_file_visit visit,
                                      void *context, fsdp_error *err)
{
    return checkpoint->ops->each_file ? checkpoint->ops->each_file(checkpoint, visit, context, err)
                                      : FSDP_OK;
}

fsdp_status fsdp_checkpoint_locate(fsdp_checkpoint *checkpoint, size_t entry, const fsdp_box *box,
                                   fsdp_number_visit visit, void *context, fsdp_error *err)
{
    return checkpoint->ops->locate
               ? checkpoint->ops->locate(checkpoint, entry, box, visit, context, err)
               : FSDP_OK;
}

static bool lies_in(fsdp_io *io, const char *path, const char *dir)
{
    char *whole = NULL, *parent = NULL;
    bool inside = fsdp_path_split(path, &whole, &parent, NULL) == FSDP_OK &&
                  fsdp_paths_are_same(io, parent, dir);
    fsdp_free(whole);
    fsdp_free(parent);
    return inside;
}

typedef struct path_search {
    fsdp_io *io;
    const char *path;
    bool is_inside, is_same;
} path_search;

static fsdp_status look_at_file(void *context, int number, const char *path,
                                const fsdp_file_info *info, fsdp_error *err)
{
    path_search *search = context;
    (void)number;
    (void)info;
    (void)err;
    search->is_inside = search->is_inside || lies_in(search->io, path, search->path);
    search->is_same = search->is_same || fsdp_paths_are_same(search->io, path, search->path);
    return FSDP_OK;
}

static path_search search_files(const fsdp_checkpoint *checkpoint, const char *path)
{
    path_search search = {.io = checkpoint->io, .path = path};
    (void)fsdp_checkpoint_each_file(checkpoint, look_at_file, &search, NULL);
    return search;
}

static fsdp_status compare_with_now(void *context, int number, const char *path,
                                    const fsdp_file_info *then, fsdp_error *err)
{
    fsdp_io *io = context;
    fsdp_file_info now;
    (void)number;
    int result = io->ops->info(io, path, &now);
    if (result < 0)
        return fsdp_fail_errno(err, -result, "cannot stat '%s' again", path);
    if (now.device == then->device && now.node == then->node && now.size == then->size &&
        now.mtime_ns == then->mtime_ns)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s' changed while it was read; try again when its writer has finished",
                     path);
}

fsdp_status fsdp_checkpoint_check_unchanged(const fsdp_checkpoint *checkpoint, fsdp_error *err)
{
    if (!checkpoint->source)
        return FSDP_OK;
    return fsdp_checkpoint_each_file(checkpoint, compare_with_now, checkpoint->io, err);
}

bool fsdp_checkpoint_lies_in(const fsdp_checkpoint *checkpoint, const char *dir)
{
    return lies_in(checkpoint->io, checkpoint->path, dir) ||
           search_files(checkpoint, dir).is_inside;
}

fsdp_status fsdp_checkpoint_refuse_inside(const fsdp_checkpoint *checkpoint, const char *to,
                                          fsdp_error *err)
{
    if (!lies_in(checkpoint->io, to, checkpoint->path))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "'%s' would be inside '%s', which is the source; convert to another path", to,
                     checkpoint->path);
}

bool fsdp_checkpoint_reads(const fsdp_checkpoint *checkpoint, const char *path)
{
    return search_files(checkpoint, path).is_same;
}

/* --- reading, of whatever kind ------------------------------------------------------------------ */

#define NO_WORK (INT64_MAX / 2)

void fsdp_work_counter_begin(fsdp_work_counter *counter, atomic_llong *next)
{
    *counter = (fsdp_work_counter){.next = next, .mine = atomic_fetch_add(next, 1)};
}

void fsdp_work_counter_stop(fsdp_work_counter *counter)
{
    atomic_store(counter->next, NO_WORK);
}

bool fsdp_work_counter_take(fsdp_work_counter *counter)
{
    if (!counter)
        return true;
    if (counter->at++ != counter->mine)
        return false;
    counter->mine = atomic_fetch_add(counter->next, 1);
    return true;
}

static fsdp_status resolve_tensor(const fsdp_checkpoint *checkpoint, size_t *entry, fsdp_error *err)
{
    const fsdp_sd *sd = checkpoint->manifest.sd;
    if (*entry < fsdp_sd_count(sd) && fsdp_sd_at(sd, *entry)->kind == FSDP_ENTRY_ALIAS)
        *entry = fsdp_sd_at(sd, *entry)->target;
    if (*entry >= fsdp_sd_count(sd) || fsdp_sd_at(sd, *entry)->kind != FSDP_ENTRY_TENSOR)
        return fsdp_fail(err, FSDP_ERR_USAGE, "entry %zu of '%s' is not a tensor", *entry,
                         checkpoint->path);
    return FSDP_OK;
}

fsdp_status fsdp_checkpoint_read(fsdp_checkpoint *checkpoint, size_t entry, const fsdp_box *box,
                                 void *data, fsdp_check_mode check, fsdp_error *err)
{
    FSDP_NEED(err, checkpoint, box, data);
    FSDP_TRY(resolve_tensor(checkpoint, &entry, err));
    const fsdp_entry *tensor = fsdp_sd_at(checkpoint->manifest.sd, entry);
    fsdp_box whole = fsdp_box_whole(tensor->ndim, tensor->shape);
    if (box->ndim != whole.ndim || !fsdp_box_contains(&whole, box))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "the requested box is not inside tensor entry %zu of '%s'", entry,
                         checkpoint->path);
    fsdp_read_target target = {.box = *box, .dtype = tensor->dtype, .data = data};
    fsdp_reader reader = {.blocks.check = check};
    fsdp_read_request request = {entry, &target, 1, &reader, NULL};
    fsdp_status st =
        fsdp_box_count(box) > 0 ? fsdp_checkpoint_get(checkpoint, &request, err) : FSDP_OK;
    fsdp_reader_release(&reader);
    return st;
}

static fsdp_status stream_with(const fsdp_slab_stream *stream, char *data, int64_t most,
                               fsdp_error *err)
{
    const fsdp_entry *tensor = stream->tensor;
    fsdp_slabs slabs = {0};
    fsdp_box slab;
    for (int64_t first = 0; fsdp_slabs_next(&slabs, tensor->ndim, tensor->shape, most, &slab);) {
        FSDP_TRY(stream->read(stream->source, &slab, data, err));
        FSDP_TRY(stream->visit(stream->context, tensor, first, slabs.next - first, data, err));
        first = slabs.next;
    }
    return FSDP_OK;
}

fsdp_status fsdp_stream_slabs(const fsdp_slab_stream *stream, fsdp_error *err)
{
    int64_t bytes = fsdp_entry_bytes(stream->tensor);
    int64_t memory = stream->memory > 0 ? stream->memory : FSDP_MEMORY_DEFAULT;
    if (bytes == 0)
        return stream->visit(stream->context, stream->tensor, 0, 0, "", err);
    /* smaller slabs would read each block several times */
    memory = memory > FSDP_BLOCK_BYTES ? memory : FSDP_BLOCK_BYTES;
    int64_t room = bytes < memory ? bytes : memory;
    char *data = fsdp_alloc_pages((size_t)room);
    if (!data)
        return fsdp_fail_memory(err, "a slab of a tensor");
    int64_t most = room / (int64_t)fsdp_dtype_size(stream->tensor->dtype);
    fsdp_status st = stream_with(stream, data, most, err);
    fsdp_free(data);
    return st;
}

typedef struct entry_reader {
    fsdp_checkpoint *checkpoint;
    size_t entry;
    fsdp_reader reader;
} entry_reader;

static fsdp_status read_slab(void *context, const fsdp_box *slab, char *data, fsdp_error *err)
{
    entry_reader *work = context;
    const fsdp_entry *tensor = fsdp_sd_at(work->checkpoint->manifest.sd, work->entry);
    fsdp_read_target target = {.box = *slab, .dtype = tensor->dtype, .data = data};
    fsdp_read_request request = {work->entry, &target, 1, &work->reader, NULL};
    return fsdp_checkpoint_get(work->checkpoint, &request, err);
}

fsdp_status fsdp_checkpoint_stream(fsdp_checkpoint *checkpoint, size_t entry, int64_t memory,
                                   fsdp_slab_visit visit, void *context, fsdp_error *err)
{
    FSDP_NEED(err, checkpoint);
    FSDP_NEED_CALL(err, visit);
    FSDP_TRY(resolve_tensor(checkpoint, &entry, err));
    entry_reader work = {.checkpoint = checkpoint, .entry = entry};
    fsdp_slab_stream stream = {.tensor = fsdp_sd_at(checkpoint->manifest.sd, entry),
                               .read = read_slab,
                               .source = &work,
                               .memory = memory,
                               .visit = visit,
                               .context = context};
    fsdp_status st = fsdp_stream_slabs(&stream, err);
    fsdp_reader_release(&work.reader);
    return st;
}

/* --- missing files ------------------------------------------------------------------------------ */

fsdp_status fsdp_incomplete_allow(fsdp_checkpoint *checkpoint, const fsdp_open_opts *opts,
                                  fsdp_error *err)
{
    if (!opts || !opts->allow_missing)
        return FSDP_OK;
    return fsdp_filter_create(opts->allow_missing, NULL, &checkpoint->may_lack, err);
}

fsdp_status fsdp_incomplete_mark(fsdp_checkpoint *checkpoint, size_t entry, fsdp_error *err)
{
    size_t count = fsdp_sd_count(checkpoint->manifest.sd);
    if (!checkpoint->is_missing)
        checkpoint->is_missing = fsdp_alloc(count, sizeof *checkpoint->is_missing);
    if (!checkpoint->is_missing)
        return fsdp_fail_memory(err, "the list of what is missing");
    checkpoint->missing_count += !checkpoint->is_missing[entry];
    checkpoint->is_missing[entry] = true;
    return FSDP_OK;
}
