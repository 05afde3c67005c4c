/*
 * Writes a checkpoint of Megatron-Core (torch_dist): a DCP directory of tensors and sharded objects, and
 * beside it what Megatron's loader opens first. See target.h; the mirror is a row of
 * frameworks/framework_table.c.
 *
 *   common.pt      torch.save of a dict: the values below "common."; args is a Namespace
 *   metadata.json  says that the directory is one of torch_dist; written last
 */
#include "base/core/mem.h"
#include "base/data/name_path.h"
#include "formats/dcp/dcp.h"
#include "formats/torch/torch_emit.h"

#include <string.h>

static const char common_key[] = "common.", common_file[] = "common.pt",
                  metadata_file[] = "metadata.json";
static const char metadata_text[] =
    "{\"sharded_backend\": \"torch_dist\", \"sharded_backend_version\": 1, "
    "\"common_backend\": \"torch\", \"common_backend_version\": 1}";

/* The entries of the two parts. */
typedef struct parts {
    fsdp_target_entry *common, *tensors;
    size_t common_count, tensor_count;
    size_t *number; /* per entry: its number in its part */
    fsdp_arena paths;
} parts;

struct fsdp_target {
    fsdp_target_opts opts;
    parts parts;
    char *path;
    fsdp_target *tensors; /* of the DCP directory */
};

/* --- which entries ------------------------------------------------------------------------------ */

static bool is_common(const char *name, size_t size)
{
    size_t key = sizeof common_key - 1;
    return size > key && memcmp(name, common_key, key) == 0;
}

/* "rng_state/shard_0.0_1.1": an object that a rank has, as Megatron finds it. */
static bool is_sharded(const char *name, size_t size)
{
    static const char mark[] = "/shard_";
    const char *found = memmem(name, size, mark, sizeof mark - 1);
    size_t at = found ? (size_t)(found - name) + sizeof mark - 1 : size;
    for (size_t i = at; i < size; i++)
        if (!strchr("0123456789._", name[i]))
            return false;
    return at < size;
}

static bool holds_value(const char *name, size_t size, const fsdp_value *value)
{
    return is_common(name, size) ? value->kind != FSDP_VALUE_OPAQUE : is_sharded(name, size);
}

/* --- the parts ------------------------------------------------------------------------------------ */

static void release_parts(parts *all)
{
    fsdp_free(all->common);
    fsdp_free(all->tensors);
    fsdp_free(all->number);
    fsdp_arena_release(&all->paths);
}

/* A name that is one element gets one for each word between its dots. */
static fsdp_status split_name(parts *all, fsdp_target_entry *entry, fsdp_error *err)
{
    size_t count = 1;
    for (size_t i = 0; i < entry->name_size; i++)
        count += entry->name[i] == '.';
    int32_t *path = fsdp_arena_alloc(&all->paths, count, sizeof *path);
    if (!path)
        return fsdp_fail_memory(err, "a checkpoint");
    for (size_t i = 0, element = 0; i < entry->name_size; i++) {
        if (entry->name[i] == '.')
            element++;
        else
            path[element]++;
    }
    entry->path = path;
    entry->path_count = count;
    return FSDP_OK;
}

/* The value without the key of the common ones. */
static fsdp_status add_common(parts *all, const fsdp_target_entry *entry, fsdp_error *err)
{
    size_t key = sizeof common_key - 1;
    fsdp_target_entry *added = &all->common[all->common_count++];
    *added = *entry;
    added->name += key;
    added->name_size -= key;
    added->path = NULL;
    added->path_count = 0;
    if (entry->path_count < 2 || fsdp_path_bytes(entry->path[0]) + 1 != key)
        return split_name(all, added, err);
    added->path = entry->path + 1;
    added->path_count = entry->path_count - 1;
    return FSDP_OK;
}

static fsdp_status part_entries(const fsdp_target_opts *opts, parts *all, fsdp_error *err)
{
    *all = (parts){.common = fsdp_alloc(opts->entry_count, sizeof *all->common),
                   .tensors = fsdp_alloc(opts->entry_count, sizeof *all->tensors),
                   .number = fsdp_alloc(opts->entry_count, sizeof *all->number)};
    if (!all->common || !all->tensors || !all->number)
        return fsdp_fail_memory(err, "a checkpoint");
    for (size_t i = 0; i < opts->entry_count; i++) {
        const fsdp_target_entry *entry = &opts->entries[i];
        if (entry->value && is_common(entry->name, entry->name_size)) {
            all->number[i] = all->common_count;
            FSDP_TRY(add_common(all, entry, err));
        } else {
            all->number[i] = all->tensor_count;
            all->tensors[all->tensor_count++] = *entry;
        }
    }
    return FSDP_OK;
}

static fsdp_target_opts tensor_opts(const fsdp_target_opts *opts, const parts *all)
{
    fsdp_target_opts own = *opts;
    own.entries = all->tensors;
    own.entry_count = all->tensor_count;
    return own;
}

static fsdp_target_opts common_opts(const fsdp_target_opts *opts, const parts *all,
                                    const char *path)
{
    fsdp_target_opts own = *opts;
    own.path = path;
    own.entries = all->common;
    own.entry_count = all->common_count;
    own.namespaces = "args";
    return own;
}

static fsdp_status measure_parts(const fsdp_target_opts *opts, const parts *all, int64_t *files_out,
                                 int64_t *bytes_out, fsdp_error *err)
{
    const fsdp_target_opts tensors = tensor_opts(opts, all), common = common_opts(opts, all, NULL);
    int64_t files = 0, bytes = 0;
    FSDP_TRY(fsdp_dcp_writer.ops->measure(&tensors, files_out, bytes_out, err));
    FSDP_TRY(fsdp_torch_writer.ops->measure(&common, &files, &bytes, err));
    *files_out += files + 1;
    return fsdp_add_overflow(*bytes_out, bytes + (int64_t)sizeof metadata_text - 1, bytes_out)
               ? fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' would be too large", opts->path)
               : FSDP_OK;
}

static fsdp_status measure(const fsdp_target_opts *opts, int64_t *files_out, int64_t *bytes_out,
                           fsdp_error *err)
{
    parts all;
    fsdp_status st = part_entries(opts, &all, err);
    if (st == FSDP_OK)
        st = measure_parts(opts, &all, files_out, bytes_out, err);
    release_parts(&all);
    return st;
}

/* --- writing -------------------------------------------------------------------------------------- */

static void release(fsdp_target *target)
{
    release_parts(&target->parts);
    fsdp_free(target->path);
    fsdp_free(target);
}

static void discard(fsdp_target *target)
{
    if (target->tensors)
        fsdp_dcp_writer.ops->discard(target->tensors);
    release(target);
}

static fsdp_status write_common(const fsdp_target *target, fsdp_error *err)
{
    char *path = fsdp_path_join(target->path, common_file);
    fsdp_target_opts opts = common_opts(&target->opts, &target->parts, path);
    fsdp_target *common = NULL;
    fsdp_status st =
        path ? fsdp_torch_writer.ops->create(&opts, &common, err) : fsdp_fail_memory(err, "a path");
    if (st == FSDP_OK)
        st = fsdp_torch_writer.ops->finish(common, err);
    fsdp_free(path);
    return st;
}

static fsdp_status write_metadata(const fsdp_target *target, fsdp_error *err)
{
    char *path = fsdp_path_join(target->path, metadata_file);
    fsdp_file *file = NULL;
    fsdp_status st = path ? fsdp_io_open(target->opts.io, path, FSDP_IO_CREATE, &file, err)
                          : fsdp_fail_memory(err, "a path");
    if (st == FSDP_OK)
        st = fsdp_io_write(file, path, metadata_text, sizeof metadata_text - 1, 0, err);
    if (st == FSDP_OK && target->opts.sync)
        st = fsdp_io_sync(file, path, err);
    fsdp_status closed = fsdp_io_close(&file, path, st == FSDP_OK ? err : NULL);
    fsdp_free(path);
    return st == FSDP_OK ? closed : st;
}

static fsdp_status create(const fsdp_target_opts *opts, fsdp_target **target_out, fsdp_error *err)
{
    fsdp_target *target = fsdp_alloc(1, sizeof *target);
    if (!target)
        return fsdp_fail_memory(err, "a checkpoint");
    target->opts = *opts;
    target->path = fsdp_strndup(opts->path, strlen(opts->path));
    fsdp_status st = target->path ? part_entries(opts, &target->parts, err)
                                  : fsdp_fail_memory(err, "a checkpoint");
    if (st == FSDP_OK)
        st = write_common(target, err);
    fsdp_target_opts tensors = tensor_opts(opts, &target->parts);
    if (st == FSDP_OK)
        st = fsdp_dcp_writer.ops->create(&tensors, &target->tensors, err);
    if (st == FSDP_OK)
        *target_out = target;
    else
        discard(target);
    return st;
}

static fsdp_status write(fsdp_target *target, const fsdp_target_piece *piece, fsdp_error *err)
{
    fsdp_target_piece own = *piece;
    own.entry = target->parts.number[piece->entry];
    return fsdp_dcp_writer.ops->write(target->tensors, &own, err);
}

static fsdp_status place(const fsdp_target *target, size_t entry, size_t box,
                         fsdp_target_place *place_out, fsdp_error *err)
{
    return fsdp_dcp_writer.ops->place(target->tensors, target->parts.number[entry], box, place_out,
                                      err);
}

static fsdp_status finish(fsdp_target *target, fsdp_error *err)
{
    fsdp_target *tensors = target->tensors;
    target->tensors = NULL;
    fsdp_status st = fsdp_dcp_writer.ops->finish(tensors, err);
    if (st == FSDP_OK)
        st = write_metadata(target, err);
    release(target);
    return st;
}

/* --- the format ------------------------------------------------------------------------------------ */

static bool owns(const char *name)
{
    return fsdp_dcp_writer.owns(name) || strcmp(name, common_file) == 0 ||
           strcmp(name, metadata_file) == 0;
}

static bool holds_dtype(fsdp_dtype dtype)
{
    return fsdp_dcp_writer.holds_dtype(dtype);
}

static const fsdp_target_ops ops = {measure, create, write, finish, discard, place};

const fsdp_format fsdp_format_megatron = {
    .name = "megatron",
    .base = "dcp",
    .makes = "^common\\.|/shard_",
    .writes_directory = true,
    .caps = {.values = true,
             .opaque = true,
             .maps_names = true,
             .takes_config = true,
             .adds_objects = true,
             .sharded = true},
    .writer = &(const fsdp_format_writer){
        .ops = &ops, .owns = owns, .holds_dtype = holds_dtype, .holds_value = holds_value}};
