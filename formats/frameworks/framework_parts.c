/* Parts that are next to a model, opened with it as one source: see framework_folder.h. */
#include "formats/frameworks/framework_folder.h"

#include "base/core/mem.h"

#include <string.h>

/* A part of the row as it is opened, when it is there. names may be "DIR/NAME". */
static fsdp_status find_part(const fsdp_folder *folder, const char *names, const char *member,
                             char **name_out, fsdp_error *err)
{
    char *pattern = fsdp_framework_spell(folder->row->member, member, names);
    *name_out = NULL;
    if (!pattern)
        return fsdp_fail_memory(err, folder->path);
    fsdp_file_kind kind = FSDP_FILE_OTHER;
    fsdp_status st = strchr(pattern, '/') ? fsdp_folder_kind(folder, pattern, &kind, err) : FSDP_OK;
    bool is_there = kind == FSDP_FILE_REGULAR;
    for (size_t i = 0; i < folder->names.count && !is_there && !strchr(pattern, '#'); i++)
        is_there = fsdp_framework_matches(pattern, folder->names.items[i], NULL);
    if (st == FSDP_OK && is_there)
        *name_out = pattern;
    else
        fsdp_free(pattern);
    return st;
}

static bool is_found(const fsdp_framework_row *row, char *const *parts, int count, const char *key)
{
    for (int i = 0; i < count; i++)
        if (parts[i] && strcmp(row->parts[i].key, key) == 0)
            return true;
    return false;
}

fsdp_status fsdp_folder_parts(const fsdp_folder *folder, const char *member,
                              char *parts_out[FSDP_FRAMEWORK_PARTS], size_t *count_out,
                              fsdp_error *err)
{
    *count_out = 0;
    memset(parts_out, 0, FSDP_FRAMEWORK_PARTS * sizeof *parts_out);
    for (int i = 0; i < FSDP_FRAMEWORK_PARTS && folder->row && folder->row->parts[i].names; i++) {
        const fsdp_framework_part *part = &folder->row->parts[i];
        if (is_found(folder->row, parts_out, i, part->key))
            continue;
        FSDP_TRY(find_part(folder, part->names, member, &parts_out[i], err));
        *count_out += parts_out[i] != NULL;
    }
    return FSDP_OK;
}

void fsdp_folder_parts_release(char *parts[FSDP_FRAMEWORK_PARTS])
{
    for (int i = 0; i < FSDP_FRAMEWORK_PARTS; i++)
        fsdp_free(parts[i]);
}

typedef struct part_lack {
    const fsdp_source_opts *opts;
    const fsdp_framework_part *part;
} part_lack;

static bool may_lack_below(const part_lack *lack, const char *name, size_t size)
{
    fsdp_text text = {0};
    fsdp_text_addf(&text, "%s%s", lack->part->key, lack->part->key[0] ? "." : "");
    fsdp_text_add(&text, name, size);
    bool may = !text.failed && lack->opts->may_lack(lack->opts->context, text.data, text.size);
    fsdp_text_release(&text);
    return may;
}

/* The caller knows the names of the whole; the join asks again for the right one of the two. */
static bool may_lack(void *context, const char *name, size_t size)
{
    const part_lack *lack = context;
    size_t own = lack->part->own_key ? strlen(lack->part->own_key) : 0;
    bool has_own =
        own > 0 && size > own && name[own] == '.' && memcmp(name, lack->part->own_key, own) == 0;
    return may_lack_below(lack, name, size) ||
           (has_own && may_lack_below(lack, name + own + 1, size - own - 1));
}

static fsdp_status open_part(const fsdp_folder *folder, const char *name,
                             const fsdp_framework_part *part, const fsdp_source_opts *opts,
                             fsdp_source **source_out, fsdp_error *err)
{
    part_lack lack = {opts, part};
    fsdp_source_opts own = opts ? *opts : (fsdp_source_opts){0};
    char *path = strcmp(name, ".") == 0 ? fsdp_strndup(folder->path, strlen(folder->path))
                                        : fsdp_path_join(folder->path, name);
    if (own.may_lack) {
        own.may_lack = may_lack;
        own.context = &lack;
    }
    fsdp_status st = !path                           ? fsdp_fail_memory(err, "a path")
                     : !fsdp_folder_may_look(folder) ? fsdp_folder_fail_looks(folder->path, err)
                                                     : fsdp_folder_check_links(folder, name, err);
    if (st == FSDP_OK)
        st = fsdp_source_open(folder->io, path, &own, source_out, err);
    fsdp_free(path);
    return st;
}

static fsdp_status open_whole(const fsdp_folder *folder, const char *member,
                              char *const parts[FSDP_FRAMEWORK_PARTS], const fsdp_source_opts *opts,
                              fsdp_source **source_out, fsdp_error *err)
{
    const char *key = folder->row->is_one ? "" : "model";
    const fsdp_framework_part model = {NULL, key, folder->row->is_one ? NULL : key};
    fsdp_source_part opened[FSDP_FRAMEWORK_PARTS + 1] = {
        {.key = model.key, .own_key = model.own_key}};
    size_t count = 1;
    fsdp_status st = open_part(folder, member, &model, opts, &opened[0].source, err);
    for (int i = 0; i < FSDP_FRAMEWORK_PARTS && st == FSDP_OK; i++) {
        const fsdp_framework_part *part = &folder->row->parts[i];
        if (!parts[i])
            continue;
        opened[count] = (fsdp_source_part){.key = part->key, .own_key = part->own_key};
        st = open_part(folder, parts[i], part, opts, &opened[count].source, err);
        if (st != FSDP_OK && err) {
            fsdp_error found = *err;
            fsdp_fail(err, st, "%s; '%s/%s' is the model alone", found.text, folder->path, member);
            err->errnum = found.errnum;
        }
        count++;
    }
    if (st == FSDP_OK)
        return fsdp_source_join(folder->path, opened, count, opts, source_out, err);
    for (size_t i = 0; i < count; i++)
        fsdp_source_close(opened[i].source);
    return st;
}

fsdp_status fsdp_folder_open(const fsdp_folder *folder, const char *member,
                             const fsdp_source_opts *opts, bool *is_whole_out,
                             fsdp_source **source_out, fsdp_error *err)
{
    char *parts[FSDP_FRAMEWORK_PARTS];
    size_t count;
    fsdp_status st = fsdp_folder_parts(folder, member, parts, &count, err);
    *is_whole_out = count > 0;
    if (st == FSDP_OK && count > 0)
        st = open_whole(folder, member, parts, opts, source_out, err);
    fsdp_folder_parts_release(parts);
    return st;
}
