/* Files beside the weights, and edits of those that describe the model: see copied.h. */
#include "statedict/convert/copied.h"
#include "base/core/mem.h"
#include "base/data/json.h"
#include "base/text.h"
#include "formats/frameworks.h"
#include "formats/source.h"
#include "statedict/commit/commit_internal.h"
#include "statedict/derive/adapter.h"
#include "statedict/derive/tied_names.h"
#include "statedict/gguf_model/gguf_values.h"
#include "statedict/sd/meter.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* === edits of config.json ===================================================================== */

/* Edits members that would be wrong for the result. All other bytes of the text stay. */

typedef enum cut_kind { REMOVED, TO_DTYPE, TO_FALSE } cut_kind;

/* A range of the text and its replacement. */
typedef struct config_cut {
    const char *from, *to;
    cut_kind kind;
} config_cut;

typedef struct config_walk {
    fsdp_json json;
    const fsdp_config_edits *edits;
    const char *first_key; /* of the whole text, or NULL */
    bool says_tied;        /* it has tie_word_embeddings, or its text_config has */
    config_cut *cuts;
    size_t cut_count, cut_room;
    char was[32];
} config_walk;

/* The place of an object: at the top, in a member "NAME_config" of the top, or elsewhere. */
typedef enum config_place { AT_TOP, IN_TEXT_CONFIG, IN_OTHER_CONFIG, ELSEWHERE } config_place;

static config_place place_below(config_place place, const char *key, size_t size)
{
    static const char end[] = "_config";
    size_t n = sizeof end - 1;
    if (place != AT_TOP || size < n || memcmp(key + size - n, end, n) != 0 ||
        fsdp_bytes_are(key, size, "quantization_config"))
        return ELSEWHERE;
    return fsdp_bytes_are(key, size, "text_config") ? IN_TEXT_CONFIG : IN_OTHER_CONFIG;
}

/* --- edits ------------------------------------------------------------------------------------ */

/* Ranges arrive in the order of their ends; one that contains earlier ones replaces them. */
static fsdp_status add_cut(config_walk *walk, config_cut cut, fsdp_error *err)
{
    while (walk->cut_count > 0 && walk->cuts[walk->cut_count - 1].to > cut.from) {
        const config_cut *last = &walk->cuts[--walk->cut_count];
        cut.from = last->from < cut.from ? last->from : cut.from;
    }
    if (!fsdp_grow(&walk->cuts, &walk->cut_room, walk->cut_count + 1, sizeof *walk->cuts))
        return fsdp_fail_memory(err, walk->json.name);
    walk->cuts[walk->cut_count++] = cut;
    return FSDP_OK;
}

/* The member is added before the first one, which no cut removes then. */
static bool lacks_tied(const config_walk *walk)
{
    return walk->edits->untied && !walk->says_tied && walk->first_key &&
           (walk->cut_count == 0 || walk->cuts[0].from >= walk->first_key);
}

static fsdp_status apply_cuts(const config_walk *walk, fsdp_text *out, fsdp_error *err)
{
    const char *at = walk->json.text;
    if (lacks_tied(walk)) {
        fsdp_text_add(out, at, (size_t)(walk->first_key - at));
        fsdp_text_addf(out, "\"tie_word_embeddings\": false,\n  ");
        at = walk->first_key;
    }
    for (size_t i = 0; i < walk->cut_count; i++) {
        const config_cut *cut = &walk->cuts[i];
        fsdp_text_add(out, at, (size_t)(cut->from - at));
        if (cut->kind == TO_DTYPE)
            fsdp_text_addf(out, "\"%s\"", walk->edits->dtype);
        else if (cut->kind == TO_FALSE)
            fsdp_text_addf(out, "false");
        at = cut->to;
    }
    if (at != walk->json.text)
        fsdp_text_add(out, at, (size_t)(walk->json.end - at));
    return out->failed ? fsdp_fail_memory(err, walk->json.name) : FSDP_OK;
}

/* kept_end: the end of the last kept member before this one, or of the brace. */
static fsdp_status cut_member(config_walk *walk, const char *key, const char *kept_end,
                              fsdp_error *err)
{
    const char *end = walk->json.at;
    if (fsdp_json_peek(&walk->json) == FSDP_JSON_END || *walk->json.at != ',')
        return add_cut(walk, (config_cut){.from = kept_end, .to = end}, err);
    const char *next = walk->json.at + 1; /* not consumed: the reader takes the comma itself */
    while (next < walk->json.end && strchr(" \t\r\n", *next))
        next++;
    return add_cut(walk, (config_cut){.from = key, .to = next}, err);
}

/* --- members ---------------------------------------------------------------------------------- */

static fsdp_status walk_value(config_walk *walk, config_place place, fsdp_error *err);

/* Skips NaN, Infinity and -Infinity, which Python writes and JSON does not have. */
static bool skip_word(fsdp_json *json)
{
    static const char *const words[] = {"NaN", "Infinity", "-Infinity"};
    (void)fsdp_json_peek(json); /* skips white space */
    for (int i = 0; i < 3; i++) {
        size_t n = strlen(words[i]);
        if ((size_t)(json->end - json->at) >= n && memcmp(json->at, words[i], n) == 0) {
            json->at += n;
            return true;
        }
    }
    return false;
}

static fsdp_status read_dtype(config_walk *walk, fsdp_error *err)
{
    const char *data;
    size_t size;
    if (fsdp_json_peek(&walk->json) != FSDP_JSON_STRING)
        return walk_value(walk, ELSEWHERE, err);
    const char *from = walk->json.at;
    FSDP_TRY(fsdp_json_string(&walk->json, &data, &size, err));
    const char *wanted = walk->edits->dtype;
    if (!wanted || fsdp_bytes_are(data, size, wanted))
        return FSDP_OK;
    if (!walk->was[0])
        fsdp_printable(data, size, walk->was, sizeof walk->was);
    return add_cut(walk, (config_cut){from, walk->json.at, TO_DTYPE}, err);
}

static fsdp_status read_tied(config_walk *walk, fsdp_error *err)
{
    bool value;
    if (fsdp_json_peek(&walk->json) != FSDP_JSON_BOOL)
        return walk_value(walk, ELSEWHERE, err);
    const char *from = walk->json.at;
    FSDP_TRY(fsdp_json_bool(&walk->json, &value, err));
    walk->says_tied = true;
    return value && walk->edits->untied
               ? add_cut(walk, (config_cut){from, walk->json.at, TO_FALSE}, err)
               : FSDP_OK;
}

static fsdp_status walk_member(config_walk *walk, config_place place, const char *key, size_t size,
                               fsdp_error *err)
{
    if (place != ELSEWHERE &&
        (fsdp_bytes_are(key, size, "dtype") || fsdp_bytes_are(key, size, "torch_dtype")))
        return read_dtype(walk, err);
    if ((place == AT_TOP || place == IN_TEXT_CONFIG) &&
        fsdp_bytes_are(key, size, "tie_word_embeddings"))
        return read_tied(walk, err);
    return walk_value(walk, place_below(place, key, size), err);
}

/* --- values ----------------------------------------------------------------------------------- */

static const char *start_of_key(const char *at, const char *end)
{
    while (at < end && *at != '"')
        at++;
    return at;
}

static bool is_removed(const fsdp_config_edits *edits, const char *key, size_t size)
{
    return (edits->no_code && fsdp_bytes_are(key, size, "auto_map")) ||
           (edits->no_quantization && fsdp_bytes_are(key, size, "quantization_config"));
}

static fsdp_status walk_object(config_walk *walk, config_place place, fsdp_error *err)
{
    fsdp_json *json = &walk->json;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (const char *kept_end = json->at;;) {
        const char *key, *before = json->at;
        size_t size;
        bool more;
        FSDP_TRY(fsdp_json_next_key(json, &key, &size, &more, err));
        if (!more)
            return FSDP_OK;
        if (place == AT_TOP && !walk->first_key)
            walk->first_key = start_of_key(before, json->end);
        bool goes = is_removed(walk->edits, key, size);
        FSDP_TRY(goes ? walk_value(walk, ELSEWHERE, err)
                      : walk_member(walk, place, key, size, err));
        if (goes)
            FSDP_TRY(cut_member(walk, start_of_key(before, json->end), kept_end, err));
        else
            kept_end = json->at;
    }
}

static fsdp_status walk_array(config_walk *walk, fsdp_error *err)
{
    bool more;
    FSDP_TRY(fsdp_json_enter_array(&walk->json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_item(&walk->json, &more, err));
        if (!more)
            return FSDP_OK;
        FSDP_TRY(walk_value(walk, ELSEWHERE, err));
    }
}

static fsdp_status walk_value(config_walk *walk, config_place place, fsdp_error *err)
{
    switch (fsdp_json_peek(&walk->json)) {
    case FSDP_JSON_OBJECT: return walk_object(walk, place, err);
    case FSDP_JSON_ARRAY: return walk_array(walk, err);
    case FSDP_JSON_NUMBER:
        if (skip_word(&walk->json))
            return FSDP_OK;
        return fsdp_json_skip(&walk->json, err);
    default: return fsdp_json_skip(&walk->json, err);
    }
}

/* --- the whole text --------------------------------------------------------------------------- */

static fsdp_status walk_text(config_walk *walk, const char *text, size_t size, const char *path,
                             fsdp_error *err)
{
    fsdp_json_init(&walk->json, text, size, path);
    if (fsdp_json_peek(&walk->json) != FSDP_JSON_OBJECT)
        return fsdp_json_fail(&walk->json, err, "a JSON object was expected");
    FSDP_TRY(walk_value(walk, AT_TOP, err));
    return fsdp_json_finish(&walk->json, err);
}

fsdp_status fsdp_model_config_edit(const char *text, size_t size, const char *path,
                                   const fsdp_config_edits *edits, fsdp_edited_config *out,
                                   fsdp_error *err)
{
    config_walk walk = {.edits = edits};
    fsdp_status st = walk_text(&walk, text, size, path, err);
    if (st == FSDP_OK)
        st = apply_cuts(&walk, &out->text, err);
    memcpy(out->was, walk.was, sizeof walk.was);
    fsdp_json_release(&walk.json);
    fsdp_free(walk.cuts);
    return st;
}

/* === the copies =============================================================================== */

enum { PIECE = 1 << 20, EDITED_MOST = 16 << 20, COPIED_MOST = 256 << 20 };

/* --- listing files ---------------------------------------------------------------------------- */

bool fsdp_copied_name(const char *name, bool with_code)
{
    if (name[0] == '.')
        return false;
    if (fsdp_framework_matches("*.py", name, NULL))
        return with_code;
    return !fsdp_framework_matches(fsdp_framework_not_beside, name, NULL) &&
           fsdp_framework_matches(fsdp_framework_beside, name, NULL);
}

static const char *base_name(const char *name)
{
    const char *slash = strrchr(name, '/');
    return slash ? slash + 1 : name;
}

/* True for files whose "auto_map" names code. Others are data: a vocabulary may hold any word. */
static bool is_config(const char *name)
{
    return fsdp_framework_matches("config.json|generation_config.json|tokenizer_config.json|"
                                  "preprocessor_config.json|processor_config.json",
                                  base_name(name), NULL);
}

static bool wanted(void *context, const char *name)
{
    return fsdp_copied_name(name, *(bool *)context);
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* --- opening ---------------------------------------------------------------------------------- */

static fsdp_status keep_file(fsdp_copies *copies, const fsdp_copied_file *file, const char *path,
                             fsdp_error *err)
{
    int64_t most = is_config(file->name)     ? EDITED_MOST
                   : strchr(file->name, '/') ? INT64_MAX /* weights of a module */
                                             : COPIED_MOST;
    if (file->size > most)
        return fsdp_fail(err, FSDP_ERR_LIMIT,
                         "'%s' has %" PRId64 " bytes, at most %" PRId64 " are copied", path,
                         file->size, most);
    if (!fsdp_grow(&copies->files, &copies->room, copies->count + 1, sizeof *file))
        return fsdp_fail_memory(err, "a list of files");
    copies->files[copies->count++] = *file;
    return FSDP_OK;
}

static bool drops_code(const fsdp_convert_opts *opts)
{
    for (size_t i = 0; i < opts->select.drop_count; i++)
        if (strcmp(opts->select.drops[i], "opaque") == 0)
            return true;
    return false;
}

/* Adds the names of the classes and functions that a program runs when it loads the file, with ", " between
 * them. A file that is not understood may run anything, and names says so. */
static fsdp_status add_file_code(const char *path, const fsdp_access *access, fsdp_text *names,
                                 fsdp_error *err)
{
    const fsdp_open_opts open = {.access = *access};
    fsdp_checkpoint *checkpoint = NULL;
    const char *name;
    fsdp_error odd = {0};
    fsdp_status st = fsdp_checkpoint_open(path, &open, &checkpoint, &odd);
    if (st == FSDP_ERR_LIMIT)
        return fsdp_fail(err, st, "%s", odd.text);
    if (st != FSDP_OK || !checkpoint->source)
        fsdp_text_addf(names, "not understood");
    for (size_t file = 0;
         st == FSDP_OK && checkpoint->source && file < fsdp_source_file_count(checkpoint->source);
         file++)
        for (size_t n = 0; (name = fsdp_source_code_at(checkpoint->source, file, n)) != NULL; n++)
            fsdp_text_addf(names, "%s%s", names->size > 0 ? ", " : "", name);
    fsdp_checkpoint_close(checkpoint);
    return names->failed ? fsdp_fail_memory(err, path) : FSDP_OK;
}

/* Files obey the rule of values: code is copied only where it is asked for (plan_notes.c). */
static fsdp_status find_code(fsdp_copies *copies, const fsdp_convert_opts *opts, const char *path,
                             fsdp_copied_file *file, fsdp_error *err)
{
    fsdp_text names = {0};
    if (!fsdp_framework_matches(fsdp_framework_pickles, file->name, NULL))
        return FSDP_OK;
    fsdp_status st = add_file_code(path, &opts->open.access, &names, err);
    if (st == FSDP_OK && names.size > 0) {
        file->code = fsdp_arena_strndup(&copies->arena, names.data, names.size);
        st = file->code ? FSDP_OK : fsdp_fail_memory(err, path);
    }
    fsdp_text_release(&names);
    return st;
}

static fsdp_status add_path(fsdp_copies *copies, fsdp_io *io, const fsdp_convert_opts *opts,
                            const char *path, fsdp_copied_file *file, fsdp_error *err)
{
    fsdp_file_info info;
    int result = io->ops->info(io, path, &info);
    if (result < 0)
        return fsdp_fail_errno(err, -result, "cannot open '%s'", path);
    if (info.kind == FSDP_FILE_DIRECTORY)
        return FSDP_OK;
    if (info.kind == FSDP_FILE_OTHER)
        return fsdp_fail(err, FSDP_ERR_REFUSED, "cannot copy '%s': it is not a regular file", path);
    FSDP_TRY(find_code(copies, opts, path, file, err));
    if (file->code && drops_code(opts))
        return FSDP_OK;
    FSDP_TRY(fsdp_source_add_file(copies->source, path, true, &file->number, err));
    const fsdp_file_info *found = fsdp_source_file_info(copies->source, (size_t)file->number);
    file->path = fsdp_source_file_path(copies->source, (size_t)file->number);
    file->size = found->size;
    file->mtime_ns = found->mtime_ns;
    return keep_file(copies, file, path, err);
}

static fsdp_status add_file(fsdp_copies *copies, fsdp_io *io, const fsdp_convert_opts *opts,
                            const char *name, fsdp_error *err)
{
    fsdp_copied_file file = {.name = fsdp_arena_strndup(&copies->arena, name, strlen(name))};
    char *path = fsdp_path_join(opts->copy_from, name);
    fsdp_status st = path && file.name ? add_path(copies, io, opts, path, &file, err)
                                       : fsdp_fail_memory(err, "a path");
    fsdp_free(path);
    return st;
}

static int64_t size_of(const fsdp_copied_file *file)
{
    return file->has_text ? (int64_t)file->text.size : file->size;
}

static fsdp_status read_whole(const fsdp_copies *copies, const fsdp_copied_file *file,
                              char **data_out, size_t *size_out, fsdp_error *err)
{
    int64_t size = size_of(file);
    *size_out = (size_t)size;
    *data_out = fsdp_realloc(NULL, (size_t)size + 1, 1);
    if (!*data_out)
        return fsdp_fail_memory(err, file->name);
    if (file->has_text) {
        memcpy(*data_out, file->text.data, *size_out);
        return FSDP_OK;
    }
    return fsdp_source_pread(copies->source, file->number, *data_out, *size_out, 0, err);
}

/* For messages. */
static const char *path_of(const fsdp_copies *copies, const fsdp_copied_file *file)
{
    return file->path ? file->path : copies->carrier;
}

static fsdp_copied_file *find_file(const fsdp_copies *copies, const char *name)
{
    for (size_t i = 0; i < copies->count; i++)
        if (strcmp(copies->files[i].name, name) == 0)
            return &copies->files[i];
    return NULL;
}

static fsdp_copied_file *find_config(const fsdp_copies *copies)
{
    return find_file(copies, "config.json");
}

static bool wanted_in_module(void *context, const char *name)
{
    return name[0] != '.' && (!fsdp_framework_matches("*.py", name, NULL) || *(bool *)context);
}

/* All files of a folder of the directory. One that is not there had none: git keeps no empty folder. */
static fsdp_status add_folder(fsdp_copies *copies, fsdp_io *io, const fsdp_convert_opts *opts,
                              const char *folder, fsdp_error *err)
{
    fsdp_io_names names = {0};
    bool with_code = opts->copy_code;
    char *path = fsdp_path_join(opts->copy_from, folder);
    fsdp_status st = path ? fsdp_io_list_names(io, path, wanted_in_module, &with_code, &names, err)
                          : fsdp_fail_memory(err, "a path");
    if (st == FSDP_ERR_NOT_FOUND)
        st = FSDP_OK;
    if (names.count > 0)
        qsort(names.items, names.count, sizeof *names.items, compare_names);
    for (size_t i = 0; i < names.count && st == FSDP_OK; i++) {
        char *name = fsdp_path_join(folder, names.items[i]);
        st = name ? add_file(copies, io, opts, name, err) : fsdp_fail_memory(err, "a path");
        fsdp_free(name);
    }
    fsdp_io_names_release(&names);
    fsdp_free(path);
    return st;
}

/* A model's modules in folders of their own are copied as they are, with their weights: loaders cast them. */
static fsdp_status add_modules(fsdp_copies *copies, fsdp_io *io, const fsdp_convert_opts *opts,
                               fsdp_error *err)
{
    char *text;
    size_t size;
    fsdp_io_names folders = {0};
    const fsdp_copied_file *list = find_file(copies, fsdp_framework_module_list);
    if (!list)
        return FSDP_OK;
    fsdp_status st = read_whole(copies, list, &text, &size, err);
    if (st == FSDP_OK)
        st = fsdp_framework_modules(text, size, path_of(copies, list), &folders, err);
    for (size_t i = 0; i < folders.count && st == FSDP_OK; i++)
        st = add_folder(copies, io, opts, folders.items[i], err);
    fsdp_io_names_release(&folders);
    fsdp_free(text);
    return st;
}

static fsdp_status add_files(fsdp_copies *copies, fsdp_io *io, const fsdp_convert_opts *opts,
                             fsdp_error *err)
{
    fsdp_io_names names = {0};
    bool with_code = opts->copy_code;
    fsdp_status st = fsdp_io_list_names(io, opts->copy_from, wanted, &with_code, &names, err);
    if (st == FSDP_OK && names.count > 0)
        qsort(names.items, names.count, sizeof *names.items, compare_names);
    for (size_t i = 0; i < names.count && st == FSDP_OK; i++)
        if (copies->has_adapter || strcmp(names.items[i], "adapter_config.json") != 0)
            st = add_file(copies, io, opts, names.items[i], err);
    fsdp_io_names_release(&names);
    if (st == FSDP_OK)
        st = add_modules(copies, io, opts, err);
    if (st == FSDP_OK && copies->count == 0)
        st = fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                       "'%s' holds nothing to copy: no config.json, tokenizer, vocabulary or "
                       "licence",
                       opts->copy_from);
    return st;
}

static fsdp_status read_own(fsdp_copies *copies, const fsdp_copied_file *file, fsdp_error *err)
{
    char *text;
    size_t size;
    FSDP_TRY(read_whole(copies, file, &text, &size, err));
    fsdp_config_release(&copies->own);
    (void)fsdp_config_parse(text, size, path_of(copies, file), &copies->own, NULL);
    copies->config = &copies->own;
    fsdp_free(text);
    return FSDP_OK;
}

/* The conversion has read config.json, unless a trainer carries one in the checkpoint. */
static fsdp_status read_config(fsdp_copies *copies, fsdp_error *err)
{
    const fsdp_copied_file *file = find_config(copies);
    const char *path = file ? path_of(copies, file) : NULL, *known = copies->known->path;
    const bool is_carried = file && !file->path;
    copies->config = NULL;
    if (file && (is_carried ? copies->copies_made : known && strcmp(known, path) == 0))
        copies->config = copies->known;
    else if (file)
        FSDP_TRY(read_own(copies, file, err));
    if (copies->config && !copies->config->is_object)
        FSDP_TRY(fsdp_config_check(copies->config, err));
    copies->tied = copies->unties ? 0 : copies->config ? fsdp_config_says_tied(copies->config) : -1;
    return FSDP_OK;
}

/* Its length stays the same when the hashes are filled in. */
static fsdp_status make_record(fsdp_copies *copies, fsdp_error *err)
{
    copies->record.size = 0;
    for (size_t i = 0; i < copies->count; i++) {
        const fsdp_copied_file *file = &copies->files[i];
        fsdp_text_addf(&copies->record, i > 0 ? "," : "{");
        fsdp_text_add_json_string(&copies->record, file->name, strlen(file->name));
        fsdp_text_addf(&copies->record, ":\"");
        fsdp_text_add_hex(&copies->record, file->hash.bytes, sizeof file->hash.bytes);
        fsdp_text_addf(&copies->record, "\"");
    }
    fsdp_text_addf(&copies->record, "}");
    return copies->record.failed ? fsdp_fail_memory(err, "a list of files") : FSDP_OK;
}

/* A file that lies nowhere. */
static fsdp_status carry_text(fsdp_copies *copies, const char *text, size_t size, const char *name,
                              fsdp_error *err)
{
    fsdp_copied_file file = {.name = name, .has_text = true};
    fsdp_text_add(&file.text, text, size);
    if (file.text.failed ||
        !fsdp_grow(&copies->files, &copies->room, copies->count + 1, sizeof file)) {
        fsdp_text_release(&file.text);
        return fsdp_fail_memory(err, name);
    }
    copies->files[copies->count++] = file;
    return FSDP_OK;
}

/* A file that the checkpoint keeps as a value. */
static fsdp_status carry(fsdp_copies *copies, const fsdp_value *value, const char *name,
                         fsdp_error *err)
{
    return value->kind == FSDP_VALUE_STRING && value->as.bytes.size > 0
               ? carry_text(copies, value->as.bytes.data, value->as.bytes.size, name, err)
               : FSDP_OK;
}

static const fsdp_value *find_value(const fsdp_sd *sd, const char *name)
{
    int64_t i = fsdp_sd_find(sd, name, strlen(name));
    const fsdp_entry *entry = i < 0 ? NULL : fsdp_sd_at(sd, (size_t)i);
    return entry && entry->kind == FSDP_ENTRY_VALUE ? &entry->value : NULL;
}

/* In the order of names, as add_files has them. */
static fsdp_status carry_files(fsdp_copies *copies, const fsdp_copies_places *places,
                               fsdp_error *err)
{
    static const char *const names[][2] = {{"train.hf_config", "config.json"},
                                           {"train.generation_config", "generation_config.json"},
                                           {"train.tokenizer", "tokenizer.json"},
                                           {"train.tokenizer_config", "tokenizer_config.json"}};
    const fsdp_config_file *made = places->copies_made ? places->config : NULL;
    if (made)
        FSDP_TRY(carry_text(copies, made->text, made->size, "config.json", err));
    for (size_t i = 0; made && i < places->made->count; i++) {
        const fsdp_gguf_file *file = &places->made->items[i];
        FSDP_TRY(carry_text(copies, file->text.data, file->text.size, file->name, err));
    }
    for (size_t i = made ? 1 : 0; i < sizeof names / sizeof *names; i++) {
        const fsdp_value *value = find_value(places->sd, names[i][0]);
        if (value)
            FSDP_TRY(carry(copies, value, names[i][1], err));
    }
    FSDP_TRY(read_config(copies, err));
    return copies->count > 0 ? make_record(copies, err) : FSDP_OK;
}

/* Adds the files of the directory to those that are carried. Files that cannot be read are no reason to
 * refuse the weights. */
static fsdp_status add_beside(fsdp_io *io, const fsdp_convert_opts *opts, const char *dir,
                              fsdp_copies *copies, fsdp_error *err)
{
    fsdp_convert_opts found = *opts;
    fsdp_error why = {0};
    size_t carried = copies->count;
    found.copy_from = dir;
    FSDP_TRY(fsdp_source_create(io, dir, "files", &copies->source, err));
    if (add_files(copies, io, &found, &why) == FSDP_OK && read_config(copies, &why) == FSDP_OK)
        return make_record(copies, err);
    fsdp_notice(&opts->watch, "cannot copy the files next to the weights in '%s': %s", dir,
                why.text);
    copies->count = carried;
    copies->config = NULL;
    copies->tied = -1;
    return carried > 0 ? read_config(copies, err) : FSDP_OK;
}

/* Without --copy-from: what the checkpoint carries as values, or what its framework left beside it, also
 * beside a config.json that was made. */
static fsdp_status copy_from_source(fsdp_io *io, const fsdp_convert_opts *opts,
                                    const fsdp_copies_places *places, fsdp_copies *copies,
                                    fsdp_error *err)
{
    char *dir = NULL;
    FSDP_TRY(carry_files(copies, places, err));
    if (copies->count > 0 && !places->copies_made)
        return FSDP_OK;
    FSDP_TRY(fsdp_framework_config(io, places->from, &dir, err));
    fsdp_status st = dir && !fsdp_paths_are_same(io, dir, places->to)
                         ? add_beside(io, opts, dir, copies, err)
                         : FSDP_OK;
    fsdp_free(dir);
    return st;
}

fsdp_status fsdp_copies_open(fsdp_io *io, const fsdp_convert_opts *opts,
                             const fsdp_copies_places *places, fsdp_copies *copies, fsdp_error *err)
{
    const char *dir = opts->copy_from;
    bool takes_files = opts->format && fsdp_format_to(opts->format)->caps.copies_files;
    *copies = (fsdp_copies){.carrier = places->from,
                            .tied = -1,
                            .known = places->config,
                            .copies_made = places->copies_made,
                            .unties = places->unties,
                            .has_adapter = fsdp_sd_has_adapter(places->sd)};
    if (!dir && opts->copy_code)
        return fsdp_fail(err, FSDP_ERR_USAGE, "code is copied only with a directory to copy from");
    if (!dir)
        return takes_files && !opts->skip_copies ? copy_from_source(io, opts, places, copies, err)
                                                 : FSDP_OK;
    if (!takes_files)
        return FSDP_OK; /* its config.json has the sizes of a map */
    if (fsdp_paths_are_same(io, dir, places->to))
        return fsdp_fail(err, FSDP_ERR_USAGE, "cannot copy files from '%s', which is the target",
                         dir);
    FSDP_TRY(fsdp_source_create(io, dir, "files", &copies->source, err));
    FSDP_TRY(add_files(copies, io, opts, err));
    FSDP_TRY(read_config(copies, err));
    return make_record(copies, err);
}

void fsdp_copies_release(fsdp_copies *copies)
{
    for (size_t i = 0; i < copies->count; i++)
        fsdp_text_release(&copies->files[i].text);
    fsdp_free(copies->files);
    fsdp_text_release(&copies->record);
    fsdp_arena_release(&copies->arena);
    fsdp_config_release(&copies->own);
    fsdp_source_close(copies->source);
    *copies = (fsdp_copies){0};
}

/* --- comparing with the result ---------------------------------------------------------------- */

static const char *shown(const char *name, size_t size, char out[160])
{
    return fsdp_printable(name, size, out, 160);
}

/* If config.json says tied, loaders use one of the two tensors for both, so the two must be equal. */
static fsdp_status check_tied(const fsdp_copies *copies, const fsdp_convert_opts *opts,
                              const fsdp_target_entry *embedding, const fsdp_target_entry *head,
                              const fsdp_copies_beside *beside, fsdp_error *err)
{
    char one[160], other[160];
    if (copies->tied == 1 && opts->tied != FSDP_TIED_KEEP && embedding && head)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' says tie_word_embeddings true, but '%s' is not equal to '%s'; use "
                         "--tied keep to write both",
                         path_of(copies, find_config(copies)),
                         shown(head->name, head->name_size, one),
                         shown(embedding->name, embedding->name_size, other));
    for (size_t i = 0; copies->tied == 0 && i < beside->tie_count; i++) {
        const fsdp_convert_tie *tie = &beside->ties[i];
        if (fsdp_name_is_head(tie->dropped, tie->dropped_size))
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "'%s' says tie_word_embeddings false, but '%s' would be left out as "
                             "another name of '%s'; use --tied keep to write both",
                             path_of(copies, find_config(copies)),
                             shown(tie->dropped, tie->dropped_size, one),
                             shown(tie->kept, tie->kept_size, other));
    }
    return FSDP_OK;
}

/* The dtype of all floating tensors of the model, or NULL when they differ. */
static const char *common_dtype(const fsdp_target_entry *entries, const bool *is_model,
                                size_t count)
{
    fsdp_dtype common = FSDP_DTYPE_NONE;
    for (size_t i = 0; i < count; i++) {
        const fsdp_dtype_info *info = fsdp_dtype_describe(entries[i].dtype);
        if (entries[i].value || !is_model[i] || !info || !info->is_float)
            continue;
        if (common != FSDP_DTYPE_NONE && common != entries[i].dtype)
            return NULL;
        common = entries[i].dtype;
    }
    bool is_usual =
        common == FSDP_F64 || common == FSDP_F32 || common == FSDP_F16 || common == FSDP_BF16;
    return is_usual ? fsdp_dtype_describe(common)->torch : NULL;
}

static fsdp_status edit(const fsdp_copies *copies, fsdp_copied_file *file, const char *dtype,
                        const fsdp_convert_opts *opts, fsdp_error *err)
{
    char *text = NULL;
    fsdp_edited_config edited = {0};
    size_t size;
    bool is_main = strcmp(file->name, "config.json") == 0;
    fsdp_config_edits edits = {.dtype = is_main ? dtype : NULL,
                               .no_code = !opts->copy_code,
                               .no_quantization = opts->dequant && !strchr(file->name, '/'),
                               .untied = is_main && copies->unties};
    if (!is_config(file->name) ||
        (!edits.dtype && !edits.no_code && !edits.no_quantization && !edits.untied))
        return FSDP_OK;
    fsdp_status st = read_whole(copies, file, &text, &size, err);
    if (st == FSDP_OK)
        st = fsdp_model_config_edit(text, size, path_of(copies, file), &edits, &edited, err);
    fsdp_free(text);
    FSDP_TRY(st);
    if (edited.text.size > 0) {
        fsdp_text_release(&file->text);
        file->text = edited.text;
        file->has_text = true;
    }
    if (edited.was[0])
        snprintf(file->change, sizeof file->change, "dtype %s -> %s", edited.was, dtype);
    return FSDP_OK;
}

fsdp_status fsdp_copies_fit(fsdp_copies *copies, const fsdp_convert_opts *opts,
                            const fsdp_copies_beside *beside, fsdp_error *err)
{
    const fsdp_target_entry *embedding = NULL, *head = NULL;
    for (size_t i = 0; copies->count > 0 && i < beside->count; i++) {
        const fsdp_target_entry *entry = &beside->entries[i];
        if (entry->value || !beside->is_model[i])
            continue;
        if (fsdp_name_is_vocabulary(entry->name, entry->name_size))
            embedding = entry;
        if (fsdp_name_is_head(entry->name, entry->name_size))
            head = entry;
    }
    FSDP_TRY(check_tied(copies, opts, embedding, head, beside, err));
    const char *dtype = common_dtype(beside->entries, beside->is_model, beside->count);
    for (size_t i = 0; i < copies->count; i++) {
        FSDP_TRY(edit(copies, &copies->files[i], dtype, opts, err));
        copies->bytes += size_of(&copies->files[i]);
    }
    return FSDP_OK;
}

/* --- writing ---------------------------------------------------------------------------------- */

/* Without following a link. */
static fsdp_status hash_pieces(fsdp_io *io, const char *path, fsdp_hasher *hasher, char *piece,
                               fsdp_error *err)
{
    fsdp_file *file = NULL;
    int64_t size = 0;
    FSDP_TRY(fsdp_io_open(io, path, fsdp_io_read_beneath(io), &file, err));
    int result = file->ops->size(file, &size);
    fsdp_status st = FSDP_OK;
    if (result < 0)
        st = fsdp_fail_errno(err, -result, "cannot get the size of '%s'", path);
    for (int64_t at = 0; at < size && st == FSDP_OK; at += PIECE) {
        size_t n = size - at < PIECE ? (size_t)(size - at) : PIECE;
        st = fsdp_io_read(file, path, piece, n, at, err);
        if (st == FSDP_OK)
            fsdp_hasher_add(hasher, piece, n);
    }
    (void)fsdp_io_close(&file, path, NULL); /* only read: nothing can be lost */
    return st;
}

fsdp_status fsdp_copied_hash(fsdp_io *io, const char *path, fsdp_hash *hash_out, fsdp_error *err)
{
    fsdp_hasher *hasher = fsdp_hasher_create();
    char *piece = fsdp_alloc_pages(PIECE);
    fsdp_status st =
        hasher && piece ? hash_pieces(io, path, hasher, piece, err) : fsdp_fail_memory(err, path);
    if (st == FSDP_OK)
        *hash_out = fsdp_hasher_value(hasher);
    fsdp_free(piece);
    fsdp_hasher_free(hasher);
    return st;
}

static fsdp_status write_pieces(const fsdp_copies *copies, const fsdp_copied_file *file,
                                fsdp_file *to, const char *path, fsdp_hasher *hasher,
                                fsdp_error *err)
{
    int64_t size = size_of(file);
    char *piece = fsdp_alloc_pages(PIECE);
    fsdp_status st = piece ? FSDP_OK : fsdp_fail_memory(err, path);
    fsdp_hasher_reset(hasher);
    for (int64_t at = 0; at < size && st == FSDP_OK; at += PIECE) {
        size_t n = size - at < PIECE ? (size_t)(size - at) : PIECE;
        if (file->has_text)
            memcpy(piece, file->text.data + at, n);
        else
            st = fsdp_source_pread(copies->source, file->number, piece, n, at, err);
        if (st == FSDP_OK)
            st = fsdp_io_write(to, path, piece, n, at, err);
        if (st == FSDP_OK)
            fsdp_hasher_add(hasher, piece, n);
    }
    fsdp_free(piece);
    return st;
}

static fsdp_status write_file(const fsdp_copies *copies, fsdp_copied_file *file, fsdp_io *io,
                              const char *path, bool sync, fsdp_error *err)
{
    fsdp_file *to = NULL;
    fsdp_hasher *hasher = fsdp_hasher_create();
    if (!hasher)
        return fsdp_fail_memory(err, path);
    (void)io->ops->unlink(io, path); /* left by an interrupted conversion */
    fsdp_status st = fsdp_io_open(io, path, FSDP_IO_CREATE, &to, err);
    if (st == FSDP_OK)
        st = write_pieces(copies, file, to, path, hasher, err);
    if (st == FSDP_OK && sync)
        st = fsdp_io_sync(to, path, err);
    fsdp_status closed = fsdp_io_close(&to, path, st == FSDP_OK ? err : NULL);
    file->hash = fsdp_hasher_value(hasher);
    fsdp_hasher_free(hasher);
    return st == FSDP_OK ? closed : st;
}

/* Makes, or syncs, the folders in the directory of `size` characters that lead to the path. */
static fsdp_status do_folders(fsdp_io *io, char *path, size_t size, bool make, fsdp_error *err)
{
    fsdp_status st = FSDP_OK;
    for (char *at = path + size + 1; st == FSDP_OK && (at = strchr(at, '/')) != NULL; at++) {
        *at = '\0';
        if (!make)
            st = fsdp_io_sync_dir(io, path, err);
        else if (!fsdp_io_exists(io, path))
            st = fsdp_io_mkdir(io, path, err);
        *at = '/';
    }
    return st;
}

fsdp_status fsdp_copies_write(fsdp_copies *copies, fsdp_io *io, const char *dir, bool sync,
                              fsdp_error *err)
{
    for (size_t i = 0; i < copies->count; i++) {
        char *path = fsdp_path_join(dir, copies->files[i].name);
        fsdp_status st =
            path ? do_folders(io, path, strlen(dir), true, err) : fsdp_fail_memory(err, "a path");
        if (st == FSDP_OK)
            st = write_file(copies, &copies->files[i], io, path, sync, err);
        if (st == FSDP_OK && sync)
            st = do_folders(io, path, strlen(dir), false, err);
        fsdp_free(path);
        FSDP_TRY(st);
    }
    return copies->count > 0 ? make_record(copies, err) : FSDP_OK;
}

static fsdp_status check_file(const fsdp_copied_file *file, fsdp_io *io, const char *path,
                              fsdp_error *err)
{
    fsdp_hash hash;
    FSDP_TRY(fsdp_copied_hash(io, path, &hash, err));
    return memcmp(&hash, &file->hash, sizeof hash) == 0
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_IO, "the copy '%s' differs from the bytes written", path);
}

fsdp_status fsdp_copies_check(const fsdp_copies *copies, fsdp_io *io, const char *dir,
                              fsdp_error *err)
{
    for (size_t i = 0; i < copies->count; i++) {
        char *path = fsdp_path_join(dir, copies->files[i].name);
        fsdp_status st =
            path ? check_file(&copies->files[i], io, path, err) : fsdp_fail_memory(err, "a path");
        fsdp_free(path);
        FSDP_TRY(st);
    }
    return FSDP_OK;
}
