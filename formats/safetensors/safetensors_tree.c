/* Reads a tree of safetensors files, in which folders are modules: see safetensors_tree.h. */
#include "formats/safetensors/safetensors_tree.h"
#include "base/core/mem.h"
#include "base/data/json.h"
#include "formats/safetensors/safetensors.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* === slices =================================================================================== */

/*
 * The texts with which Nanotron says where a rank's part of a parameter lies in it, in the metadata of its
 * file:
 *
 *     unsharded_shape            "(32, 8)"
 *     local_global_slices_pairs  "0,16,None|None,None,None#16,32,None|None,None,None;..."
 *
 * A slice is start, stop and step; '|' separates dims, '#' the part's slices from the parameter's, ';' pairs.
 */

/* The pairs of a part; the text is borrowed. */
typedef struct fsdp_slices {
    const char *at, *end;
    int ndim;
    const int64_t *part, *whole; /* shapes */
} fsdp_slices;

/* A box of the part, and where it lies in the parameter. */
typedef struct fsdp_slices_pair {
    int64_t from[FSDP_MAX_DIMS], lo[FSDP_MAX_DIMS], len[FSDP_MAX_DIMS];
} fsdp_slices_pair;

typedef struct cursor {
    const char *at, *end;
} cursor;

static bool take(cursor *from, const char *word)
{
    size_t size = strlen(word);
    if ((size_t)(from->end - from->at) < size || memcmp(from->at, word, size) != 0)
        return false;
    from->at += size;
    return true;
}

static bool is_digit(const cursor *from)
{
    return from->at < from->end && *from->at >= '0' && *from->at <= '9';
}

static bool take_number(cursor *from, int64_t *number_out)
{
    const int64_t most = INT64_MAX / 10 - 1;
    if (!is_digit(from))
        return false;
    for (*number_out = 0; is_digit(from); from->at++) {
        if (*number_out > most)
            return false;
        *number_out = *number_out * 10 + (*from->at - '0');
    }
    return true;
}

/* "32", or "np.int64(32)" */
static bool take_size(cursor *from, int64_t *size_out)
{
    int64_t bits;
    if (!take(from, "np.int"))
        return take_number(from, size_out);
    return take_number(from, &bits) && take(from, "(") && take_number(from, size_out) &&
           take(from, ")");
}

/* False: the text is not a shape of at most FSDP_MAX_DIMS dims. */
static bool slices_shape(const char *text, size_t size, int64_t shape_out[FSDP_MAX_DIMS],
                         int *ndim_out)
{
    cursor from = {text, text + size};
    *ndim_out = 0;
    if (!take(&from, "("))
        return false;
    while (!take(&from, ")")) {
        if (*ndim_out == FSDP_MAX_DIMS || !take_size(&from, &shape_out[*ndim_out]))
            return false;
        ++*ndim_out;
        if (take(&from, ","))
            (void)take(&from, " ");
        else if (from.at == from.end || *from.at != ')')
            return false;
    }
    return from.at == from.end;
}

/* "START,STOP,STEP" of a dim, as Python means it: None is all. */
static bool take_slice(cursor *from, int64_t size, int64_t *lo_out, int64_t *len_out)
{
    int64_t start = 0, stop = size, step = 1;
    if (!take(from, "None") && !take_number(from, &start))
        return false;
    if (!take(from, ",") || (!take(from, "None") && !take_number(from, &stop)))
        return false;
    if (!take(from, ",") || (!take(from, "None") && !take_number(from, &step)))
        return false;
    *lo_out = start;
    *len_out = stop - start;
    return step == 1 && start <= stop && stop <= size;
}

static bool take_slices(cursor *from, const fsdp_slices *slices, const int64_t *shape,
                        int64_t *lo_out, int64_t *len_out)
{
    for (int dim = 0; dim < slices->ndim; dim++)
        if ((dim > 0 && !take(from, "|")) ||
            !take_slice(from, shape[dim], &lo_out[dim], &len_out[dim]))
            return false;
    return true;
}

/* Takes a pair, of which there must be one: at < end. False: it does not fit the shapes, or has a step. */
static bool slices_next(fsdp_slices *slices, fsdp_slices_pair *pair_out)
{
    int64_t part_len[FSDP_MAX_DIMS];
    cursor from = {slices->at, slices->end};
    if (!take_slices(&from, slices, slices->part, pair_out->from, part_len) || !take(&from, "#") ||
        !take_slices(&from, slices, slices->whole, pair_out->lo, pair_out->len) ||
        memcmp(part_len, pair_out->len, (size_t)slices->ndim * sizeof *part_len) != 0)
        return false;
    if (from.at < from.end && (!take(&from, ";") || from.at == from.end))
        return false;
    slices->at = from.at;
    return true;
}

/* === trees ==================================================================================== */

enum { DEEPEST = 32, MOST_FOLDERS = 1 << 18 };

static const char root_name[] = "model", beside_root[] = "checkpoint_metadata.json";
static const char file_start[] = "model_", file_end[] = ".safetensors", rank_start[] = "_pp-rank-";
static const char tensor_name[] = "data";

typedef struct module_tree {
    fsdp_source *source;
    fsdp_arena arena;
    char **files; /* relative to the source, sorted by folder */
    size_t file_count, file_room;
    int folders;
    fsdp_name_table tensors; /* name -> number */
} module_tree;

/* --- finding the files ------------------------------------------------------------------------- */

static const char *last_part(const char *path, size_t *size_out)
{
    size_t end = strlen(path);
    while (end > 1 && path[end - 1] == '/')
        end--;
    size_t begin = end;
    while (begin > 0 && path[begin - 1] != '/')
        begin--;
    *size_out = end - begin;
    return path + begin;
}

bool fsdp_safetensors_is_tree(const fsdp_probe *probe)
{
    size_t size;
    const char *name = last_part(probe->path, &size);
    if (!probe->is_directory || size != strlen(root_name) || memcmp(name, root_name, size) != 0 ||
        name - probe->path >= PATH_MAX)
        return false;
    char path[PATH_MAX];
    int length =
        snprintf(path, sizeof path, "%.*s%s", (int)(name - probe->path), probe->path, beside_root);
    return length < PATH_MAX && fsdp_io_exists(probe->io, path);
}

static bool is_wanted(void *context, const char *name)
{
    (void)context;
    return name[0] != '.' && !strchr(name, '/');
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static bool is_parameter(const char *name)
{
    size_t size = strlen(name), start = sizeof file_start - 1, end = sizeof file_end - 1;
    return size > start + end && memcmp(name, file_start, start) == 0 &&
           strcmp(name + size - end, file_end) == 0;
}

static fsdp_status add_folder(module_tree *tree, const char *below, int depth, fsdp_error *err);

/* below: the path of the name in the tree */
static fsdp_status add_name(module_tree *tree, const char *below, const char *name, int depth,
                            fsdp_error *err)
{
    fsdp_io *io = fsdp_source_io(tree->source);
    fsdp_file_info info;
    char *path = fsdp_path_join(fsdp_source_path(tree->source), below);
    int result = path ? io->ops->info(io, path, &info) : 0;
    fsdp_free(path);
    if (!path)
        return fsdp_fail_memory(err, below);
    if (result == 0 && info.kind == FSDP_FILE_DIRECTORY)
        return add_folder(tree, below, depth + 1, err);
    if (result < 0 || info.kind != FSDP_FILE_REGULAR || !is_parameter(name))
        return FSDP_OK;
    char *kept = fsdp_arena_strndup(&tree->arena, below, strlen(below));
    if (!kept ||
        !fsdp_grow(&tree->files, &tree->file_room, tree->file_count + 1, sizeof *tree->files))
        return fsdp_fail_memory(err, below);
    tree->files[tree->file_count++] = kept;
    return FSDP_OK;
}

static fsdp_status add_names(module_tree *tree, const char *below, const fsdp_io_names *names,
                             int depth, fsdp_error *err)
{
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < names->count && st == FSDP_OK; i++) {
        const char *name = names->items[i];
        char *path = below[0] ? fsdp_path_join(below, name) : fsdp_strndup(name, strlen(name));
        st = path ? add_name(tree, path, name, depth, err) : fsdp_fail_memory(err, below);
        fsdp_free(path);
    }
    return st;
}

static fsdp_status add_folder(module_tree *tree, const char *below, int depth, fsdp_error *err)
{
    const char *root = fsdp_source_path(tree->source);
    fsdp_io_names names = {0};
    if (depth > DEEPEST || ++tree->folders > MOST_FOLDERS)
        return fsdp_fail(err, FSDP_ERR_LIMIT,
                         "'%s' has folders nested more than %d deep, or more than %d of them", root,
                         DEEPEST, MOST_FOLDERS);
    char *path = below[0] ? fsdp_path_join(root, below) : fsdp_strndup(root, strlen(root));
    if (!path)
        return fsdp_fail_memory(err, root);
    fsdp_status st =
        fsdp_io_list_names(fsdp_source_io(tree->source), path, is_wanted, NULL, &names, err);
    fsdp_free(path);
    if (st == FSDP_OK && names.count > 1)
        qsort(names.items, names.count, sizeof *names.items, compare_names);
    if (st == FSDP_OK)
        st = add_names(tree, below, &names, depth, err);
    fsdp_io_names_release(&names);
    return st;
}

/* --- one file ---------------------------------------------------------------------------------- */

typedef struct part_file {
    const char *path; /* in the tree */
    int file;
    const fsdp_safetensors_entry *data;
    fsdp_text slices; /* empty: the parameter is whole */
    int64_t shape[FSDP_MAX_DIMS];
    int ndim;
} part_file;

static fsdp_status fail_part(const module_tree *tree, const part_file *part, const char *why,
                             fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s/%s' %s", fsdp_source_path(tree->source),
                     part->path, why);
}

/* "model/lm_head/model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors": "model.lm_head.weight" */
static fsdp_status spell_name(const char *path, fsdp_text *name, fsdp_error *err)
{
    const char *slash = strrchr(path, '/'), *file = slash ? slash + 1 : path;
    const char *own = file + sizeof file_start - 1, *end = strstr(own, rank_start);
    for (const char *at = path; at < file; at++)
        fsdp_text_add(name, *at == '/' ? "." : at, 1);
    if (!end)
        end = own + strlen(own) - (sizeof file_end - 1);
    fsdp_text_add(name, own, (size_t)(end - own));
    return name->failed ? fsdp_fail_memory(err, path) : FSDP_OK;
}

static const fsdp_text_pair *metadata_of(const fsdp_safetensors *header, const char *key)
{
    return fsdp_text_pairs_find(&header->metadata, key, strlen(key));
}

static fsdp_status read_metadata(const module_tree *tree, const fsdp_safetensors *header,
                                 part_file *part, fsdp_error *err)
{
    const fsdp_text_pair *shape = metadata_of(header, "unsharded_shape");
    const fsdp_text_pair *slices = metadata_of(header, "local_global_slices_pairs");
    if (shape && !slices_shape(shape->text, shape->text_size, part->shape, &part->ndim))
        return fail_part(tree, part, "has an unsharded_shape that is not a shape", err);
    if (slices)
        fsdp_text_add(&part->slices, slices->text, slices->text_size);
    if (part->slices.failed)
        return fsdp_fail_memory(err, part->path);
    if (part->slices.size > 0 && !shape)
        return fail_part(tree, part, "is a part of a parameter without its unsharded_shape", err);
    return FSDP_OK;
}

/* Without slices the parameter is whole. */
static fsdp_status read_place(const module_tree *tree, const fsdp_safetensors *header,
                              part_file *part, fsdp_error *err)
{
    const uint64_t *number =
        fsdp_name_table_find(&header->names, tensor_name, sizeof tensor_name - 1);
    if (!number)
        return fail_part(tree, part, "holds no tensor 'data', as a parameter of Nanotron does",
                         err);
    part->data = &header->entries[*number];
    FSDP_TRY(read_metadata(tree, header, part, err));
    if (part->slices.size > 0)
        return part->ndim == part->data->ndim
                   ? FSDP_OK
                   : fail_part(tree, part, "has a different number of dims than its parameter",
                               err);
    part->ndim = part->data->ndim;
    memcpy(part->shape, part->data->shape, (size_t)part->ndim * sizeof *part->shape);
    return FSDP_OK;
}

/* The tensor of the name, added when it is new. */
static fsdp_status find_tensor(module_tree *tree, const part_file *part, size_t *number_out,
                               fsdp_error *err)
{
    fsdp_text name = {0};
    const fsdp_source_shape shape = {part->data->dtype, part->ndim, part->shape};
    fsdp_status st = spell_name(part->path, &name, err);
    const uint64_t *known =
        st == FSDP_OK ? fsdp_name_table_find(&tree->tensors, name.data, name.size) : NULL;
    if (known) {
        const fsdp_source_tensor *tensor =
            fsdp_source_tensor_at(tree->source, *number_out = (size_t)*known);
        if (tensor->dtype != shape.dtype || tensor->ndim != shape.ndim ||
            memcmp(tensor->shape, shape.shape, (size_t)shape.ndim * sizeof *shape.shape) != 0)
            st = fail_part(tree, part, "has a different shape or dtype than an earlier part", err);
    } else if (st == FSDP_OK) {
        st = fsdp_source_add_tensor(tree->source, name.data, name.size, &shape, number_out, err);
        const char *kept = fsdp_arena_strndup(&tree->arena, name.data, name.size);
        if (st == FSDP_OK &&
            (!kept || !fsdp_name_table_put(&tree->tensors, kept, name.size, *number_out)))
            st = fsdp_fail_memory(err, part->path);
    }
    fsdp_text_release(&name);
    return st;
}

static fsdp_status add_pair(module_tree *tree, const part_file *part, size_t tensor,
                            const fsdp_slices_pair *pair, fsdp_error *err)
{
    int64_t strides[FSDP_MAX_DIMS], stride = (int64_t)fsdp_dtype_size(part->data->dtype);
    fsdp_source_chunk chunk = {.lo = pair->lo,
                               .len = pair->len,
                               .strides = strides,
                               .offset = part->data->begin,
                               .file = part->file,
                               .stream = FSDP_NO_STREAM};
    for (int dim = part->ndim - 1; dim >= 0; dim--) {
        if (pair->len[dim] == 0)
            return FSDP_OK;
        strides[dim] = stride;
        chunk.offset += pair->from[dim] * stride;
        stride *= part->data->shape[dim];
    }
    return fsdp_source_add_chunk(tree->source, tensor, &chunk, err);
}

static fsdp_status add_part(module_tree *tree, const part_file *part, fsdp_error *err)
{
    size_t tensor;
    fsdp_slices_pair pair = {.from = {0}};
    FSDP_TRY(find_tensor(tree, part, &tensor, err));
    if (part->slices.size == 0) {
        memcpy(pair.len, part->shape, (size_t)part->ndim * sizeof *part->shape);
        return add_pair(tree, part, tensor, &pair, err);
    }
    fsdp_slices slices = {part->slices.data, part->slices.data + part->slices.size, part->ndim,
                          part->data->shape, part->shape};
    while (slices.at < slices.end) {
        if (!slices_next(&slices, &pair))
            return fail_part(tree, part,
                             "has local_global_slices_pairs that do not fit its shape, or a step",
                             err);
        FSDP_TRY(add_pair(tree, part, tensor, &pair, err));
    }
    return FSDP_OK;
}

static fsdp_status add_file(module_tree *tree, const char *below, fsdp_error *err)
{
    part_file part = {.path = below};
    fsdp_safetensors header = {0};
    char *path = fsdp_path_join(fsdp_source_path(tree->source), below);
    if (!path)
        return fsdp_fail_memory(err, below);
    fsdp_status st = fsdp_source_add_file(tree->source, path, true, &part.file, err);
    if (st == FSDP_OK)
        st = fsdp_safetensors_read(tree->source, part.file, &header, err);
    if (st == FSDP_OK)
        st = read_place(tree, &header, &part, err);
    if (st == FSDP_OK)
        st = add_part(tree, &part, err);
    fsdp_text_release(&part.slices);
    fsdp_safetensors_release(&header);
    fsdp_free(path);
    return st;
}

fsdp_status fsdp_safetensors_add_tree(fsdp_source *source, fsdp_error *err)
{
    module_tree tree = {.source = source};
    fsdp_status st = add_folder(&tree, "", 0, err);
    if (st == FSDP_OK && tree.file_count == 0)
        st = fsdp_fail(err, FSDP_ERR_NOT_FOUND, "'%s' holds no file %sNAME%s",
                       fsdp_source_path(source), file_start, file_end);
    for (size_t i = 0; i < tree.file_count && st == FSDP_OK; i++)
        st = add_file(&tree, tree.files[i], err);
    fsdp_name_table_release(&tree.tensors);
    fsdp_free(tree.files);
    fsdp_arena_release(&tree.arena);
    return st;
}
