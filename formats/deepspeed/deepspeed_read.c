/* A tag's directory as a source: bid, open, and the order in which its files are read. See deepspeed.h. */
#include "formats/deepspeed/deepspeed.h"
#include "kernels/kernels.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { BITS_OF_ZIP = 48, BITS_OF_LEGACY = 41, HEAD_BYTES = 16 };

/* --- recognition ---------------------------------------------------------------------------------- */

static int bid_file(fsdp_io *io, const char *path)
{
    fsdp_file *file = NULL;
    uint8_t head[HEAD_BYTES] = {0};
    int64_t size = 0;
    fsdp_file_info info;
    if (io->ops->info(io, path, &info) != 0 || info.kind != FSDP_FILE_REGULAR ||
        fsdp_io_open(io, path, FSDP_IO_READ, &file, NULL) != FSDP_OK)
        return 0;
    bool is_read = file->ops->size(file, &size) == 0 && size >= HEAD_BYTES &&
                   fsdp_io_read(file, path, head, sizeof head, 0, NULL) == FSDP_OK;
    (void)fsdp_io_close(&file, path, NULL); /* read only: a failed close loses nothing */
    if (is_read && memcmp(head, "PK\3\4", 4) == 0)
        return BITS_OF_ZIP;
    return is_read && torch_legacy_begins(head, sizeof head) ? BITS_OF_LEGACY : 0;
}

static int bid(const fsdp_probe *probe)
{
    ds_files files = {0};
    size_t count;
    int bits = 0;
    if (!probe->is_directory)
        return 0;
    fsdp_error why = {0}; /* two files of one rank are reported by open */
    (void)ds_files_find(probe->names, probe->name_count, &files, &why);
    const ds_file *first = ds_files_of(&files, DS_FILE_MODEL, -1, &count);
    if (!first)
        first = ds_files_of(&files, DS_FILE_OPTIM, -1, &count);
    char *path = first ? fsdp_path_join(probe->path, first->name) : NULL;
    if (path)
        bits = bid_file(probe->io, path);
    fsdp_free(path);
    ds_files_release(&files);
    return bits;
}

/* --- the source ----------------------------------------------------------------------------------- */

typedef struct ds_state {
    fsdp_source *source;
    torch_memory *memory;
    ds_widened *widened; /* sorted by tensor */
    size_t widened_count;
} ds_state;

static int compare_widened(const void *key, const void *item)
{
    size_t tensor = *(const size_t *)key, other = ((const ds_widened *)item)->tensor;
    return (tensor > other) - (tensor < other);
}

/* The buffers of a model are small. */
static fsdp_status read_widened(const ds_state *state, const ds_widened *widened,
                                const fsdp_box *box, void *data, fsdp_error *err)
{
    fsdp_source_reader reader = {0};
    fsdp_dtype dtype = fsdp_source_tensor_at(state->source, widened->stored)->dtype;
    size_t count = (size_t)fsdp_box_count(box);
    void *stored = fsdp_alloc(count, fsdp_dtype_size(dtype));
    if (!stored)
        return fsdp_fail_memory(err, "a buffer");
    fsdp_status st = fsdp_source_read(state->source, widened->stored, box, stored, &reader, err);
    fsdp_source_reader_release(&reader);
    if (st == FSDP_OK)
        fsdp_kernels_get()->cast(data, FSDP_F32, stored, dtype, count, FSDP_OVERFLOW_INF);
    fsdp_free(stored);
    return st;
}

static fsdp_status read_tensor(void *context, size_t tensor, const fsdp_box *box, void *data,
                               fsdp_error *err)
{
    const ds_state *state = context;
    const ds_widened *widened = state->widened_count == 0
                                    ? NULL
                                    : bsearch(&tensor, state->widened, state->widened_count,
                                              sizeof *widened, compare_widened);
    return widened ? read_widened(state, widened, box, data, err)
                   : torch_memory_read(state->memory, state->source, tensor, box, data, err);
}

static void close_state(void *context)
{
    ds_state *state = context;
    torch_memory_close(state->memory);
    fsdp_free(state->widened);
    fsdp_free(state);
}

static const fsdp_source_ops ds_ops = {.read = read_tensor, .close = close_state};

static fsdp_status create(const fsdp_probe *probe, ds_set *set, ds_state **state_out,
                          fsdp_error *err)
{
    ds_state *state = fsdp_alloc(1, sizeof *state);
    if (!state)
        return fsdp_fail_memory(err, probe->path);
    fsdp_status st = torch_memory_create(&state->memory, err);
    if (st == FSDP_OK)
        st = fsdp_source_create(probe->io, probe->path, "deepspeed", &set->source, err);
    if (st != FSDP_OK) {
        close_state(state);
        return st;
    }
    state->source = set->source;
    set->memory = state->memory;
    fsdp_source_tolerate(set->source, probe->opts);
    fsdp_source_set_ops(set->source, &ds_ops, state);
    *state_out = state;
    return FSDP_OK;
}

/* --- files ---------------------------------------------------------------------------------------- */

static fsdp_status read_optims(ds_set *set, fsdp_error *err)
{
    size_t count, others;
    const ds_file *files = ds_files_of(&set->files, DS_FILE_OPTIM, set->part, &count);
    if (!files && ds_files_of(&set->files, DS_FILE_LAYER, -1, &others) &&
        !ds_files_of(&set->files, DS_FILE_OPTIM, -1, &others))
        return fsdp_fail(err, FSDP_ERR_REFUSED,
                         "'%s' has no optimizer files: a pipeline without ZeRO, whose stages have "
                         "their optimizers in model files, is not read; save it with stage 1",
                         set->directory);
    if (!files)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': there is no optimizer file of model-parallel rank %d, which has "
                         "the weights in f32",
                         set->directory, set->part);
    FSDP_TRY(ds_files_check_ranks(files, count, set->directory, err));
    if (set->is_split && set->world != (int64_t)count)
        return fsdp_fail(
            err, FSDP_ERR_DAMAGED,
            "'%s' has model files of %" PRId64 " ranks and optimizer files of %zu: the "
            "%s file of rank %" PRId64 " is missing, and with it a part of every tensor",
            set->directory, set->world, count, set->world > (int64_t)count ? "optimizer" : "model",
            set->world > (int64_t)count ? (int64_t)count : set->world);
    set->world = (int64_t)count;
    for (size_t i = 0; i < count; i++) {
        set->rank = files[i].rank;
        FSDP_TRY(ds_read_file(set, files[i].name, ds_read_optim, err));
    }
    FSDP_TRY(ds_agree_world(set, err));
    if (!set->is_split)
        FSDP_TRY(ds_split_end(set, err));
    return ds_note_owners(set, err);
}

/* A part is one stage of a pipeline. Parts of tensor parallelism have pieces of the same parameters. */
static fsdp_status check_parts(const ds_set *set, int *parts_out, fsdp_error *err)
{
    size_t count, layers;
    const ds_file *layer = ds_files_of(&set->files, DS_FILE_LAYER, -1, &layers);
    int parts = 0;
    for (size_t i = 0; i < set->files.count; i++) {
        const ds_file *file = &set->files.items[i];
        bool is_of_part = file->kind == DS_FILE_MODEL || file->kind == DS_FILE_OPTIM;
        parts = is_of_part && file->part >= parts ? file->part + 1 : parts;
    }
    *parts_out = parts;
    bool is_tensor_parallel = parts > 1 && layers == 0;
    for (size_t i = 0; i < layers; i++)
        is_tensor_parallel |= layer[i].part > 0;
    if (is_tensor_parallel)
        return fsdp_fail(
            err, FSDP_ERR_REFUSED,
            "'%s': its parameters are cut for tensor parallelism; "
            "join them with deepspeed.checkpoint.ds_to_universal and convert its result",
            set->directory);
    if (ds_files_of(&set->files, DS_FILE_EXPERT_OPTIM, -1, &count))
        return fsdp_fail(err, FSDP_ERR_REFUSED,
                         "'%s': the optimizer of its experts is in separate files, which are not "
                         "supported; train with ZeRO",
                         set->directory);
    return FSDP_OK;
}

static fsdp_status read_parts(ds_set *set, fsdp_error *err)
{
    size_t count, optims;
    int parts;
    FSDP_TRY(check_parts(set, &parts, err));
    (void)ds_files_of(&set->files, DS_FILE_OPTIM, -1, &optims);
    FSDP_TRY(ds_note_weights(set, err));
    for (set->part = 0; set->part < parts; set->part++) {
        FSDP_TRY(ds_read_models(set, err));
        if (set->is_plain && optims > 0)
            return fsdp_fail(err, FSDP_ERR_DAMAGED,
                             "'%s' has optimizer files, but its model file has no param_shapes",
                             set->directory);
        if (!set->is_plain)
            FSDP_TRY(read_optims(set, err));
    }
    set->part = 0;
    const ds_file *layers = ds_files_of(&set->files, DS_FILE_LAYER, -1, &count);
    for (size_t i = 0; i < count && set->buffers.count > 0; i++)
        FSDP_TRY(ds_read_layer(set, &layers[i], err));
    return FSDP_OK;
}

static fsdp_status read_set(const fsdp_probe *probe, ds_set *set, fsdp_error *err)
{
    ds_state *state = NULL;
    FSDP_TRY(create(probe, set, &state, err));
    fsdp_status st = ds_files_find(probe->names, probe->name_count, &set->files, err);
    if (st == FSDP_OK)
        st = ds_is_universal(probe->names, probe->name_count) ? ds_read_universal(set, err)
                                                              : read_parts(set, err);
    if (st == FSDP_OK)
        st = ds_add_resume(set, err);
    if (st == FSDP_OK)
        st = ds_add_tied(set, err);
    state->widened = set->widened;
    state->widened_count = set->widened_count;
    set->widened = NULL;
    if (st == FSDP_OK)
        st = fsdp_source_complete(set->source, err);
    if (st != FSDP_OK) {
        fsdp_source_close(set->source);
        set->source = NULL;
    }
    return st;
}

static fsdp_status open_deepspeed(const fsdp_probe *probe, fsdp_source **source_out,
                                  fsdp_error *err)
{
    ds_set set = {.io = probe->io,
                  .directory = probe->path,
                  .kinds = {""},
                  .kind_count = 1,
                  .is_as_stored = probe->opts && probe->opts->as_stored,
                  .is_chosen = probe->opts && probe->opts->format};
    fsdp_status st = read_set(probe, &set, err);
    *source_out = set.source;
    ds_files_release(&set.files);
    fsdp_name_table_release(&set.tensors);
    fsdp_name_table_release(&set.buffers);
    fsdp_name_table_release(&set.prints);
    fsdp_name_table_release(&set.module);
    fsdp_name_table_release(&set.outside);
    fsdp_facts_release(&set.facts);
    fsdp_text_release(&set.print);
    fsdp_free(set.weights);
    fsdp_free(set.tied);
    fsdp_free(set.widened);
    fsdp_free(set.owners);
    fsdp_value_release(&set.step);
    fsdp_value_release(&set.steps);
    fsdp_value_release(&set.param_groups);
    fsdp_arena_release(&set.arena);
    return st;
}

const fsdp_format fsdp_format_deepspeed = {
    .name = "deepspeed",
    .reads_directory = true,
    .caps = {.only_model = true, .only_tensors = true, .repeats = true},
    .reader = &(const fsdp_format_reader){.bid = bid, .open = open_deepspeed}};
