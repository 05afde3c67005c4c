/*
 * Safetensors as a source: one file; a Hugging Face directory, whose index assigns tensors to
 * files; a directory of files that the ranks of DCP wrote, in which a tensor may be cut
 * (DCP_SHARDING_INFO); or Nanotron's tree of folders.
 */
#include "base/data/json.h"
#include "base/text.h"
#include "formats/safetensors/safetensors.h"
#include "formats/safetensors/safetensors_tree.h"

#include <inttypes.h>
#include <string.h>

/* === metadata ================================================================================= */

/*
 * Joins __metadata__ of the files of a checkpoint. Texts come out that are JSON objects:
 *
 *   "metadata"        every key, for listings
 *   "carried"         the keys that stay true when the tensors are written into other files: neither
 *                     names of tied tensors, nor what describes one file; nothing where only the
 *                     usual format is left
 *   "contradicting"   keys that are carried and have two texts, with the files that differ
 */

typedef struct metadata_merger {
    const fsdp_source *source;
    const fsdp_safetensors *headers;
    const int *files;
    fsdp_text_pairs all, carried, contradicting;
    size_t *first; /* per carried key: the header that has it */
    size_t first_room;
} metadata_merger;

/* "format", which files of any writer have, names no tensor. */
static bool is_format(const fsdp_text_pair *pair)
{
    return fsdp_bytes_are(pair->key, pair->key_size, "format");
}

/* The tensor of the file that the text of the pair names, whose other name the key is then; NULL: the pair
 * has another meaning. */
static const fsdp_safetensors_entry *safetensors_tied(const fsdp_safetensors *header,
                                                      const fsdp_text_pair *pair)
{
    const uint64_t *number = fsdp_name_table_find(&header->names, pair->text, pair->text_size);
    if (!number || *number >= header->count || is_format(pair))
        return NULL;
    return header->entries[*number].is_added ? &header->entries[*number] : NULL;
}

/* True for keys about one file: ours, and the places of its parts. */
static bool is_of_file(const fsdp_text_pair *pair)
{
    static const char ours[] = "fsdp.";
    size_t size = sizeof ours - 1;
    return (pair->key_size >= size && memcmp(pair->key, ours, size) == 0) ||
           fsdp_bytes_are(pair->key, pair->key_size, FSDP_SAFETENSORS_SHARDING);
}

static const char *name_of(const metadata_merger *merger, size_t header)
{
    const char *path = fsdp_source_file_path(merger->source, (size_t)merger->files[header]);
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* Notes the files of a key, once. */
static fsdp_status contradict(metadata_merger *merger, const fsdp_text_pair *pair, size_t first,
                              size_t second, fsdp_error *err)
{
    fsdp_text files = {0};
    if (fsdp_text_pairs_find(&merger->contradicting, pair->key, pair->key_size))
        return FSDP_OK;
    fsdp_text_addf(&files, "'%s' and '%s'", name_of(merger, first), name_of(merger, second));
    const fsdp_text_pair noted = {pair->key, files.data, pair->key_size, files.size};
    fsdp_status st = files.failed ? fsdp_fail_memory(err, "metadata")
                                  : fsdp_text_pairs_add(&merger->contradicting, &noted, err);
    fsdp_text_release(&files);
    return st;
}

static fsdp_status carry(metadata_merger *merger, const fsdp_text_pair *pair, size_t header,
                         fsdp_error *err)
{
    fsdp_text_pairs *carried = &merger->carried;
    const fsdp_text_pair *known = fsdp_text_pairs_find(carried, pair->key, pair->key_size);
    if (known && known->text_size == pair->text_size &&
        memcmp(known->text, pair->text, pair->text_size) == 0)
        return FSDP_OK;
    if (known)
        return contradict(merger, pair, merger->first[known - carried->items], header, err);
    if (!fsdp_grow(&merger->first, &merger->first_room, carried->count + 1, sizeof *merger->first))
        return fsdp_fail_memory(err, "metadata");
    merger->first[carried->count] = header;
    return fsdp_text_pairs_add(carried, pair, err);
}

static fsdp_status merge(metadata_merger *merger, size_t header, fsdp_error *err)
{
    const fsdp_safetensors *from = &merger->headers[header];
    for (size_t i = 0; i < from->metadata.count; i++) {
        const fsdp_text_pair *pair = &from->metadata.items[i];
        if (!fsdp_text_pairs_find(&merger->all, pair->key, pair->key_size))
            FSDP_TRY(fsdp_text_pairs_add(&merger->all, pair, err));
        if (!is_of_file(pair) && !safetensors_tied(from, pair))
            FSDP_TRY(carry(merger, pair, header, err));
        if (merger->all.count > FSDP_TEXT_PAIRS_MOST)
            return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' has more than %d keys of metadata",
                             fsdp_source_path(merger->source), FSDP_TEXT_PAIRS_MOST);
    }
    return FSDP_OK;
}

static fsdp_status add_extra(fsdp_source *source, const char *member, const fsdp_text_pairs *pairs,
                             fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_text_pairs_spell(pairs, &text);
    fsdp_status st = text.failed ? fsdp_fail_memory(err, "metadata")
                                 : fsdp_source_add_extra(source, member, text.data, text.size, err);
    fsdp_text_release(&text);
    return st;
}

/* True when files of any writer would say the same. */
static bool is_usual(const fsdp_text_pairs *carried)
{
    const fsdp_text_pair *only = carried->count == 1 ? &carried->items[0] : NULL;
    return carried->count == 0 ||
           (only && is_format(only) && fsdp_bytes_are(only->text, only->text_size, "pt"));
}

static fsdp_status add_extras(fsdp_source *source, const metadata_merger *merger, fsdp_error *err)
{
    FSDP_TRY(add_extra(source, "metadata", &merger->all, err));
    if (!is_usual(&merger->carried))
        FSDP_TRY(add_extra(source, "carried", &merger->carried, err));
    return merger->contradicting.count > 0
               ? add_extra(source, "contradicting", &merger->contradicting, err)
               : FSDP_OK;
}

/* The metadata of files that were added to the source: all of it for listings, and what stays true in other
 * files. headers[i] is that of the file with number files[i], or of none where that is negative. */
static fsdp_status safetensors_add_metadata(fsdp_source *source, const fsdp_safetensors *headers,
                                            const int *files, size_t count, fsdp_error *err)
{
    metadata_merger merger = {.source = source, .headers = headers, .files = files};
    fsdp_status st = FSDP_OK;
    bool is_there = false;
    for (size_t i = 0; i < count && st == FSDP_OK; i++) {
        is_there = is_there || headers[i].has_metadata;
        st = merge(&merger, i, err);
    }
    if (st == FSDP_OK && is_there)
        st = add_extras(source, &merger, err);
    fsdp_free(merger.first);
    fsdp_text_pairs_release(&merger.all);
    fsdp_text_pairs_release(&merger.carried);
    fsdp_text_pairs_release(&merger.contradicting);
    return st;
}

/* === the format =============================================================================== */

static const char file_suffix[] = ".safetensors";
static const char index_suffix[] = ".safetensors.index.json";

enum { LONGEST_INDEX = 256 << 20 };

/* A tensor whose parts lie in several files, and those parts. */
typedef struct cut_tensor {
    const fsdp_safetensors_entry *first;
    int64_t shape[FSDP_MAX_DIMS];
    size_t first_part, last_part;
    bool was_added;
} cut_tensor;

typedef struct cut_part {
    const fsdp_safetensors_entry *entry;
    int file;
    size_t next; /* SIZE_MAX: no further part */
} cut_part;

/* A directory being opened. */
/* An entry of the index: this tensor is in that file. */
typedef struct index_entry {
    const char *name;
    size_t size;
    uint64_t file; /* number in names */
} index_entry;

typedef struct model_folder {
    fsdp_source *source;
    fsdp_arena arena;
    char *index_path;      /* NULL: none */
    fsdp_name_table files; /* files of the index: name -> number in names */
    const char **names;    /* of files */
    size_t name_count, name_room;
    index_entry *promised; /* entries of the index, in its order */
    size_t promised_count, promised_room;
    fsdp_name_table map;       /* the index: tensor -> number in promised */
    fsdp_safetensors *headers; /* one per name */
    fsdp_name_table cut;       /* name of a tensor -> number in tensors */
    cut_tensor *tensors;
    size_t tensor_count, tensor_room;
    cut_part *parts;
    size_t part_count, part_room;
} model_folder;

static bool is_index(const char *name)
{
    return fsdp_has_suffix(name, index_suffix);
}

static bool is_part(const char *name)
{
    return fsdp_has_suffix(name, file_suffix);
}

/* --- tensors ---------------------------------------------------------------------------------- */

static fsdp_status add_part(fsdp_source *source, size_t tensor, const fsdp_safetensors_entry *entry,
                            const int64_t *lo, int file, fsdp_error *err)
{
    static const int64_t origin[FSDP_MAX_DIMS];
    fsdp_source_chunk chunk = {.lo = lo ? lo : origin,
                               .len = entry->shape,
                               .offset = entry->begin,
                               .file = file,
                               .stream = FSDP_NO_STREAM};
    return fsdp_source_add_chunk(source, tensor, &chunk, err);
}

static fsdp_status add_whole(fsdp_source *source, fsdp_safetensors_entry *entry, int file,
                             fsdp_error *err)
{
    FSDP_TRY(fsdp_source_add_tensor(source, entry->true_name, entry->true_size,
                                    &(fsdp_source_shape){entry->dtype, entry->ndim, entry->shape},
                                    &entry->tensor, err));
    entry->is_added = true;
    return add_part(source, entry->tensor, entry, NULL, file, err);
}

/* --- tied tensors ------------------------------------------------------------------------------- */

/* Adds tied names. A writer that ties tensors stores one name and records the others in the
 * metadata, each with the stored name. A key whose value names no tensor of the file has another
 * meaning. */
static fsdp_status add_all_tied(fsdp_source *source, const fsdp_safetensors *header,
                                fsdp_error *err)
{
    for (size_t i = 0; i < header->metadata.count; i++) {
        const fsdp_text_pair *pair = &header->metadata.items[i];
        const fsdp_safetensors_entry *entry = safetensors_tied(header, pair);
        if (entry && !fsdp_source_has(source, pair->key, pair->key_size))
            FSDP_TRY(fsdp_source_add_alias(source, pair->key, pair->key_size, entry->tensor, err));
    }
    return FSDP_OK;
}

/* Extends the shape of the whole tensor to the end of this part: no file states the shape. */
static fsdp_status widen(const model_folder *folder, cut_tensor *tensor,
                         const fsdp_safetensors_entry *entry, int file, fsdp_error *err)
{
    const char *path = fsdp_source_file_path(folder->source, (size_t)file);
    char shown[200];
    fsdp_printable(entry->name, entry->name_size, shown, sizeof shown);
    if (entry->dtype != tensor->first->dtype || entry->ndim != tensor->first->ndim)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': tensor '%s' has a different dtype or rank in another file", path,
                         shown);
    for (int dim = 0; dim < entry->ndim; dim++) {
        int64_t end;
        if (fsdp_add_overflow(entry->lo ? entry->lo[dim] : 0, entry->shape[dim], &end))
            return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': the offsets of tensor '%s' overflow",
                             path, shown);
        if (end > tensor->shape[dim])
            tensor->shape[dim] = end;
    }
    return FSDP_OK;
}

static fsdp_status keep_part(model_folder *folder, const fsdp_safetensors_entry *entry, int file,
                             fsdp_error *err)
{
    const uint64_t *known = fsdp_name_table_find(&folder->cut, entry->name, entry->name_size);
    size_t number = known ? (size_t)*known : folder->tensor_count;
    if (!fsdp_grow(&folder->tensors, &folder->tensor_room, number + 1, sizeof *folder->tensors) ||
        !fsdp_grow(&folder->parts, &folder->part_room, folder->part_count + 1,
                   sizeof *folder->parts) ||
        (!known && !fsdp_name_table_put(&folder->cut, entry->name, entry->name_size, number)))
        return fsdp_fail_memory(err, fsdp_source_path(folder->source));
    cut_tensor *tensor = &folder->tensors[number];
    size_t part = folder->part_count++;
    folder->parts[part] = (cut_part){.entry = entry, .file = file, .next = SIZE_MAX};
    if (known) {
        folder->parts[tensor->last_part].next = part;
    } else {
        *tensor = (cut_tensor){.first = entry, .first_part = part};
        folder->tensor_count++;
    }
    tensor->last_part = part;
    return widen(folder, tensor, entry, file, err);
}

static fsdp_status add_cut(model_folder *folder, cut_tensor *tensor, fsdp_error *err)
{
    size_t number;
    const fsdp_safetensors_entry *first = tensor->first;
    FSDP_TRY(fsdp_source_add_tensor(folder->source, first->true_name, first->true_size,
                                    &(fsdp_source_shape){first->dtype, first->ndim, tensor->shape},
                                    &number, err));
    for (size_t i = tensor->first_part; i != SIZE_MAX; i = folder->parts[i].next) {
        const cut_part *part = &folder->parts[i];
        FSDP_TRY(add_part(folder->source, number, part->entry, part->entry->lo, part->file, err));
    }
    return FSDP_OK;
}

/* --- the index -------------------------------------------------------------------------------- */

/* The number of a file name, added when it is new. */
static fsdp_status number_file(model_folder *folder, const char *name, size_t size,
                               uint64_t *number_out, fsdp_error *err)
{
    const uint64_t *known = fsdp_name_table_find(&folder->files, name, size);
    if (known) {
        *number_out = *known;
        return FSDP_OK;
    }
    char shown[200];
    if (strlen(name) != size)
        return fsdp_fail(err, FSDP_ERR_REFUSED,
                         "'%s' names the file '%s', which no file can have as a name",
                         folder->index_path, fsdp_printable(name, size, shown, sizeof shown));
    const char *kept = fsdp_arena_strndup(&folder->arena, name, size);
    if (!kept ||
        !fsdp_grow(&folder->names, &folder->name_room, folder->name_count + 1,
                   sizeof *folder->names) ||
        !fsdp_name_table_put(&folder->files, kept, size, folder->name_count))
        return fsdp_fail_memory(err, folder->index_path);
    *number_out = folder->name_count;
    folder->names[folder->name_count++] = kept;
    return FSDP_OK;
}

static fsdp_status promise(model_folder *folder, const index_entry *entry, fsdp_error *err)
{
    if (!entry->name ||
        !fsdp_grow(&folder->promised, &folder->promised_room, folder->promised_count + 1,
                   sizeof *folder->promised) ||
        !fsdp_name_table_put(&folder->map, entry->name, entry->size, folder->promised_count))
        return fsdp_fail_memory(err, folder->index_path);
    folder->promised[folder->promised_count++] = *entry;
    return FSDP_OK;
}

static fsdp_status read_weight_map(model_folder *folder, fsdp_json *json, fsdp_error *err)
{
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        const char *key, *file;
        size_t key_size, file_size;
        bool more;
        index_entry entry;
        FSDP_TRY(fsdp_json_next_key(json, &key, &key_size, &more, err));
        if (!more)
            return FSDP_OK;
        if (fsdp_name_table_find(&folder->map, key, key_size))
            return fsdp_json_fail(json, err, "the name appears twice");
        entry.name = fsdp_arena_strndup(&folder->arena, key, key_size);
        entry.size = key_size;
        FSDP_TRY(fsdp_json_string(json, &file, &file_size, err));
        FSDP_TRY(number_file(folder, file, file_size, &entry.file, err));
        FSDP_TRY(promise(folder, &entry, err));
    }
}

/* {"total_size": number, ...}: only the types are checked, because many published indexes have
 * wrong numbers. */
static fsdp_status read_index_metadata(fsdp_json *json, fsdp_error *err)
{
    static const char *const names[] = {"total_size"};
    fsdp_json_members members = {.names = names, .count = 1};
    double total;
    int which;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        if (which < 0)
            return FSDP_OK;
        FSDP_TRY(fsdp_json_f64(json, &total, err));
    }
}

static fsdp_status read_index_members(model_folder *folder, fsdp_json *json, fsdp_error *err)
{
    static const char *const names[] = {"weight_map", "metadata"};
    fsdp_json_members members = {.names = names, .count = 2};
    int which;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        if (which < 0)
            break;
        if (which == 0)
            FSDP_TRY(read_weight_map(folder, json, err));
        else if (fsdp_json_peek(json) == FSDP_JSON_OBJECT)
            FSDP_TRY(read_index_metadata(json, err));
        else
            FSDP_TRY(fsdp_json_null(json, err));
    }
    if (!(members.seen & 1))
        return fsdp_json_fail(json, err, "weight_map is missing");
    return fsdp_json_finish(json, err);
}

static fsdp_status parse_index(model_folder *folder, int file, fsdp_error *err)
{
    int64_t size = fsdp_source_file_size(folder->source, (size_t)file);
    if (size > LONGEST_INDEX)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' has %" PRId64 " bytes, at most %d are allowed",
                         folder->index_path, size, LONGEST_INDEX);
    char *text = fsdp_realloc(NULL, (size_t)size + 1, 1);
    if (!text)
        return fsdp_fail_memory(err, folder->index_path);
    fsdp_status status = fsdp_source_pread(folder->source, file, text, (size_t)size, 0, err);
    if (status == FSDP_OK) {
        fsdp_json json;
        fsdp_json_init(&json, text, (size_t)size, folder->index_path);
        status = read_index_members(folder, &json, err);
        fsdp_json_release(&json);
    }
    fsdp_free(text);
    return status;
}

static fsdp_status read_index(model_folder *folder, const char *name, fsdp_error *err)
{
    int file;
    folder->index_path = fsdp_path_join(fsdp_source_path(folder->source), name);
    if (!folder->index_path)
        return fsdp_fail_memory(err, name);
    FSDP_TRY(fsdp_source_add_file(folder->source, folder->index_path, true, &file, err));
    return parse_index(folder, file, err);
}

/* --- the files of a directory ----------------------------------------------------------------- */

static fsdp_status list_files(model_folder *folder, const fsdp_probe *probe, fsdp_error *err)
{
    size_t count;
    uint64_t number;
    const char **names = fsdp_alloc(probe->name_count, sizeof *names);
    if (!names)
        return fsdp_fail_memory(err, "the names of files");
    fsdp_status status = fsdp_safetensors_choose_files(probe, names, &count, err);
    for (size_t i = 0; i < count && status == FSDP_OK; i++)
        status = number_file(folder, names[i], strlen(names[i]), &number, err);
    fsdp_free(names);
    return status;
}

static fsdp_status open_file(model_folder *folder, const char *name, int *file_out, fsdp_error *err)
{
    char *path = fsdp_path_join(fsdp_source_path(folder->source), name);
    if (!path)
        return fsdp_fail_memory(err, name);
    fsdp_error why = {0};
    fsdp_status status = fsdp_source_add_file(folder->source, path, true, file_out, &why);
    bool is_lost = status == FSDP_ERR_NOT_FOUND && folder->index_path;
    if (is_lost && fsdp_source_tolerates(folder->source)) {
        *file_out = -1; /* check_map reports its entries as missing */
        status = FSDP_OK;
    } else if (is_lost)
        status = fsdp_fail(err, FSDP_ERR_DAMAGED,
                           "'%s' names the file '%s', which is missing" FSDP_MISSING_HINT,
                           folder->index_path, name);
    else if (status != FSDP_OK && err)
        *err = why;
    fsdp_free(path);
    return status;
}

/* True when the index assigns the name to another file. Names that the index does not list are
 * accepted. */
static bool is_elsewhere(const model_folder *folder, const fsdp_safetensors_entry *entry,
                         size_t number)
{
    const uint64_t *place = fsdp_name_table_find(&folder->map, entry->name, entry->name_size);
    return place && folder->promised[*place].file != number;
}

/* Without an index nothing says which of two tensors of one name is the model's. */
static fsdp_status check_new(const model_folder *folder, const fsdp_safetensors_entry *entry,
                             size_t number, fsdp_error *err)
{
    char shown[200];
    size_t other = 0;
    if (folder->index_path || !fsdp_source_has(folder->source, entry->true_name, entry->true_size))
        return FSDP_OK;
    while (other < number &&
           !fsdp_name_table_find(&folder->headers[other].names, entry->name, entry->name_size))
        other++;
    return other == number
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_USAGE,
                           "'%s' and '%s' both hold tensor '%s', and no index says which one is "
                           "meant; name one of these files of '%s'",
                           folder->names[other], folder->names[number],
                           fsdp_printable(entry->name, entry->name_size, shown, sizeof shown),
                           fsdp_source_path(folder->source));
}

/* Adds tensors in the order of their first part. */
static fsdp_status add_file(model_folder *folder, size_t number, const int *files, fsdp_error *err)
{
    const fsdp_safetensors *header = &folder->headers[number];
    for (size_t i = 0; i < header->count; i++) {
        fsdp_safetensors_entry *entry = &header->entries[i];
        if (is_elsewhere(folder, entry, number))
            continue;
        if (!header->is_sharded) {
            FSDP_TRY(check_new(folder, entry, number, err));
            FSDP_TRY(add_whole(folder->source, entry, files[number], err));
            continue;
        }
        cut_tensor *tensor =
            &folder->tensors[*fsdp_name_table_find(&folder->cut, entry->name, entry->name_size)];
        if (!tensor->was_added)
            FSDP_TRY(add_cut(folder, tensor, err));
        tensor->was_added = true;
    }
    return FSDP_OK;
}

/* Derives the shape of a cut tensor from all of its parts. */
static fsdp_status check_cut(const model_folder *folder, size_t lost, fsdp_error *err)
{
    for (size_t i = 0; i < folder->name_count && lost < folder->name_count; i++)
        if (folder->headers[i].is_sharded)
            return fsdp_fail(err, FSDP_ERR_DAMAGED,
                             "'%s' names the file '%s', which is missing, and tensors are cut: it "
                             "is unknown which of them are whole",
                             folder->index_path, folder->names[lost]);
    return FSDP_OK;
}

static fsdp_status read_headers(model_folder *folder, int *files, fsdp_error *err)
{
    size_t lost = folder->name_count;
    for (size_t i = 0; i < folder->name_count; i++) {
        fsdp_safetensors *header = &folder->headers[i];
        FSDP_TRY(open_file(folder, folder->names[i], &files[i], err));
        if (files[i] < 0) {
            lost = i;
            continue;
        }
        FSDP_TRY(fsdp_safetensors_read(folder->source, files[i], header, err));
        for (size_t k = 0; header->is_sharded && k < header->count; k++) {
            if (!is_elsewhere(folder, &header->entries[k], i))
                FSDP_TRY(keep_part(folder, &header->entries[k], files[i], err));
        }
    }
    return check_cut(folder, lost, err);
}

/* The entries of the index that are not in their files, the first of them by name. */
typedef struct absent_list {
    fsdp_text text;
    size_t count;
} absent_list;

static void note_absent(const model_folder *folder, const index_entry *entry, absent_list *absent)
{
    enum { SHOWN = 5 };
    char shown[200];
    fsdp_printable(entry->name, entry->size, shown, sizeof shown);
    if (absent->count++ < SHOWN)
        fsdp_text_addf(&absent->text, "%s'%s' in '%s'", absent->count > 1 ? ", " : "", shown,
                       folder->names[entry->file]);
    else if (absent->count == SHOWN + 1)
        fsdp_text_addf(&absent->text, ", ...");
}

static fsdp_status fail_absent(const model_folder *folder, const absent_list *absent,
                               fsdp_error *err)
{
    if (absent->text.failed)
        return fsdp_fail_memory(err, folder->index_path);
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' names %zu tensor%s that %s not in the file: %s",
                     folder->index_path, absent->count, absent->count == 1 ? "" : "s",
                     absent->count == 1 ? "is" : "are", absent->text.data);
}

/* Every entry of the index must be in its file. */
static fsdp_status check_map(const model_folder *folder, const int *files, fsdp_error *err)
{
    absent_list absent = {.count = 0};
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < folder->promised_count && st == FSDP_OK; i++) {
        const index_entry *entry = &folder->promised[i];
        if (fsdp_name_table_find(&folder->headers[entry->file].names, entry->name, entry->size))
            continue;
        if (files[entry->file] < 0)
            st = fsdp_source_add_missing(folder->source, entry->name, entry->size,
                                         folder->names[entry->file], err);
        else
            note_absent(folder, entry, &absent);
    }
    if (st == FSDP_OK && absent.count > 0)
        st = fail_absent(folder, &absent, err);
    fsdp_text_release(&absent.text);
    return st;
}

static fsdp_status add_files(model_folder *folder, fsdp_error *err)
{
    int *files = fsdp_alloc(folder->name_count, sizeof *files);
    folder->headers = fsdp_alloc(folder->name_count, sizeof *folder->headers);
    if (!files || !folder->headers) {
        fsdp_free(files);
        return fsdp_fail_memory(err, fsdp_source_path(folder->source));
    }
    fsdp_status status = read_headers(folder, files, err);
    if (status == FSDP_OK)
        status = check_map(folder, files, err);
    for (size_t i = 0; i < folder->name_count && status == FSDP_OK; i++)
        status = add_file(folder, i, files, err);
    for (size_t i = 0; i < folder->name_count && status == FSDP_OK; i++)
        status = add_all_tied(folder->source, &folder->headers[i], err);
    if (status == FSDP_OK)
        status = safetensors_add_metadata(folder->source, folder->headers, files,
                                          folder->name_count, err);
    fsdp_free(files);
    return status;
}

static fsdp_status open_folder(model_folder *folder, const fsdp_probe *probe, fsdp_error *err)
{
    const char *index;
    FSDP_TRY(fsdp_safetensors_choose_index(probe, &index, err));
    FSDP_TRY(index ? read_index(folder, index, err) : list_files(folder, probe, err));
    if (!index && folder->name_count == 0)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "'%s' holds no file NAME%s", probe->path,
                         file_suffix);
    return add_files(folder, err);
}

static void release_folder(model_folder *folder)
{
    for (size_t i = 0; folder->headers && i < folder->name_count; i++)
        fsdp_safetensors_release(&folder->headers[i]);
    fsdp_free(folder->headers);
    fsdp_free(folder->names);
    fsdp_free(folder->promised);
    fsdp_free(folder->tensors);
    fsdp_free(folder->parts);
    fsdp_free(folder->index_path);
    fsdp_name_table_release(&folder->files);
    fsdp_name_table_release(&folder->map);
    fsdp_name_table_release(&folder->cut);
    fsdp_arena_release(&folder->arena);
}

/* --- one file --------------------------------------------------------------------------------- */

/* A single file of DCP is complete only if each of its tensors is whole. */
static fsdp_status add_entries(fsdp_source *source, const fsdp_safetensors *header, int file,
                               fsdp_error *err)
{
    model_folder single = {.source = source};
    fsdp_status status = FSDP_OK;
    for (size_t i = 0; i < header->count && status == FSDP_OK; i++) {
        status = header->is_sharded ? keep_part(&single, &header->entries[i], file, err)
                                    : add_whole(source, &header->entries[i], file, err);
    }
    for (size_t i = 0; i < single.tensor_count && status == FSDP_OK; i++)
        status = add_cut(&single, &single.tensors[i], err);
    release_folder(&single);
    return status;
}

static fsdp_status open_single(fsdp_source *source, const char *path, fsdp_error *err)
{
    int file;
    fsdp_safetensors header = {0};
    FSDP_TRY(fsdp_source_add_file(source, path, false, &file, err));
    fsdp_status status = fsdp_safetensors_read(source, file, &header, err);
    if (status == FSDP_OK)
        status = add_entries(source, &header, file, err);
    if (status == FSDP_OK)
        status = add_all_tied(source, &header, err);
    if (status == FSDP_OK)
        status = safetensors_add_metadata(source, &header, &file, 1, err);
    fsdp_safetensors_release(&header);
    return status;
}

/* --- the format ------------------------------------------------------------------------------- */

/* Checks that the length fits into the file and that '{' follows. If the file is truncated, only
 * the upper bytes of the length can be right. */
static int bid_for_file(const fsdp_probe *probe)
{
    if (probe->head_size < 9 || probe->head[8] != '{')
        return 0;
    uint64_t size = 0;
    for (int i = 7; i >= 0; i--)
        size = size << 8 | probe->head[i];
    if (size <= (uint64_t)probe->size - 8)
        return 8 + 40;
    return size <= LONGEST_INDEX ? 8 + 32 : 8;
}

/* True when all files are those of an adapter, and its base lies next to it in a format of its own. */
static bool has_other_base(const fsdp_probe *probe)
{
    static const char adapter[] = "adapter_model";
    for (size_t i = 0; i < probe->name_count; i++)
        if (is_part(probe->names[i]) && strncmp(probe->names[i], adapter, sizeof adapter - 1) != 0)
            return false;
    return fsdp_probe_has(probe, "pytorch_model.bin");
}

static int bid(const fsdp_probe *probe)
{
    if (!probe->is_directory)
        return bid_for_file(probe);
    if (has_other_base(probe))
        return 0;
    int best = fsdp_safetensors_is_tree(probe) ? 90 : 0;
    for (size_t i = 0; i < probe->name_count; i++) {
        if (is_index(probe->names[i]))
            return 100;
        if (is_part(probe->names[i]) && best == 0)
            best = 80;
    }
    return best;
}

static fsdp_status open_safetensors(const fsdp_probe *probe, fsdp_source **source_out,
                                    fsdp_error *err)
{
    fsdp_source *source = NULL;
    FSDP_TRY(fsdp_source_create(probe->io, probe->path, "safetensors", &source, err));
    fsdp_source_tolerate(source, probe->opts);
    model_folder folder = {.source = source};
    fsdp_status status = !probe->is_directory              ? open_single(source, probe->path, err)
                         : fsdp_safetensors_is_tree(probe) ? fsdp_safetensors_add_tree(source, err)
                                                           : open_folder(&folder, probe, err);
    release_folder(&folder);
    if (status == FSDP_OK)
        status = fsdp_source_complete(source, err);
    if (status != FSDP_OK) {
        fsdp_source_close(source);
        source = NULL;
    }
    *source_out = source;
    return status;
}

const fsdp_format fsdp_format_safetensors = {
    .name = "safetensors",
    .suffixes = {".safetensors"},
    .reads_file = true,
    .reads_directory = true,
    .writes_file = true,
    .caps = {.metadata = true,
             .model_only = true,
             .model_part = true,
             .maps_names = true,
             .notes_ties = true,
             .checks_config = true,
             .only_model = true,
             .notes_aliases = true,
             .numbered = true},
    .reader = &(const fsdp_format_reader){.bid = bid, .open = open_safetensors},
    .writer = &fsdp_safetensors_writer};

/* A directory of files of safetensors, as the hub of Hugging Face has models. */
const fsdp_format fsdp_format_hf = {.name = "hf",
                                    .reads_directory = true,
                                    .writes_directory = true,
                                    .caps = {.metadata = true,
                                             .model_only = true,
                                             .model_part = true,
                                             .for_loaders = true,
                                             .maps_names = true,
                                             .notes_ties = true,
                                             .takes_config = true,
                                             .copies_files = true,
                                             .splits_files = true},
                                    .reader = &(const fsdp_format_reader){.open = open_safetensors},
                                    .writer = &fsdp_hf_writer};
