/*
 * Joins __metadata__ of the files of a checkpoint. Texts come out that are JSON objects:
 *
 *   "metadata"        every key, for listings
 *   "carried"         the keys that stay true when the tensors are written into other files: neither
 *                     names of tied tensors, nor what describes one file; nothing where only the
 *                     usual format is left
 *   "contradicting"   keys that are carried and have two texts, with the files that differ
 */
#include "formats/safetensors/safetensors.h"

#include <string.h>

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

const fsdp_safetensors_entry *fsdp_safetensors_tied(const fsdp_safetensors *header,
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
        if (!is_of_file(pair) && !fsdp_safetensors_tied(from, pair))
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

fsdp_status fsdp_safetensors_add_metadata(fsdp_source *source, const fsdp_safetensors *headers,
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
