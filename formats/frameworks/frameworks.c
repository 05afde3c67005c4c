/*
 * Resolves a path to the one checkpoint that it means, by the table of layouts: finds the row of a directory,
 * follows pointers, and goes down; opens the parts of a row as one source. See frameworks.h.
 */
#include "formats/frameworks/framework_folder.h"
#include "base/core/mem.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* === a directory ============================================================================== */

enum { NAMES_SHOWN = 5, POINTER_MOST = 4096, MARK = 64 };

static bool is_plain(void *context, const char *name)
{
    (void)context;
    return strcmp(name, ".") != 0 && strcmp(name, "..") != 0 && !strchr(name, '/');
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Lists the directory; the caller releases names. */
static fsdp_status folder_look(fsdp_folder *folder, fsdp_error *err)
{
    if (!fsdp_folder_may_look(folder))
        return fsdp_folder_fail_looks(folder->path, err);
    FSDP_TRY(fsdp_io_list_names(folder->io, folder->path, is_plain, NULL, &folder->names, err));
    if (folder->names.count > 1)
        qsort(folder->names.items, folder->names.count, sizeof *folder->names.items, compare_names);
    return FSDP_OK;
}

/* The kind of a path; FSDP_FILE_OTHER where it is not there. Only a lack of memory is an error. */
static fsdp_status folder_info(fsdp_io *io, const char *path, fsdp_file_kind *kind_out,
                               bool *is_there_out, fsdp_error *err)
{
    fsdp_file_info info;
    int result = io->ops->info(io, path, &info);
    *is_there_out = result == 0;
    *kind_out = result == 0 ? info.kind : FSDP_FILE_OTHER;
    return result == -ENOMEM ? fsdp_fail_memory(err, path) : FSDP_OK;
}

/* The kind of what a name in the directory leads to. */
static fsdp_status folder_kind(const fsdp_folder *folder, const char *name,
                               fsdp_file_kind *kind_out, fsdp_error *err)
{
    char *path = fsdp_path_join(folder->path, name);
    bool is_there;
    if (!path)
        return fsdp_fail_memory(err, "a path");
    fsdp_status st = folder_info(folder->io, path, kind_out, &is_there, err);
    fsdp_free(path);
    return st;
}

/* The name with the highest number that matches; NULL: none. */
static const char *folder_find(const fsdp_folder *folder, const char *list)
{
    const char *found = NULL;
    int64_t highest = -2, number;
    for (size_t i = 0; i < folder->names.count; i++)
        if (fsdp_framework_matches(list, folder->names.items[i], &number) && number > highest) {
            found = folder->names.items[i];
            highest = number;
        }
    return found;
}

/* True when the model of the row is the directory itself. */
static bool folder_is_model(const fsdp_framework_row *row)
{
    return row->member && strcmp(row->member, ".") == 0;
}

/* True for "DIR/.": the model of such a directory without its parts. */
static bool folder_is_alone(const char *path)
{
    size_t size = strlen(path);
    return size > 2 && strcmp(path + size - 2, "/.") == 0;
}

/* The list of names of steps that the directory has, or NULL. */
static const char *folder_steps(const fsdp_folder *folder)
{
    for (size_t i = 0; fsdp_framework_steps[i]; i++)
        if (folder_find(folder, fsdp_framework_steps[i]))
            return fsdp_framework_steps[i];
    return NULL;
}

/* The list of names of steps that the directory has, or NULL. */
static bool folder_is_weights(const char *name)
{
    return !fsdp_framework_matches(fsdp_framework_no_model, name, NULL) &&
           fsdp_framework_matches(fsdp_framework_weights, name, NULL);
}

/* --- recognised files --------------------------------------------------------------------------- */

/* FSDP_ERR_NOT_FOUND for a file that another program reads. */
static fsdp_status folder_check_file(fsdp_io *io, const char *path, fsdp_error *err)
{
    char head[MARK] = {0};
    fsdp_file *file = NULL;
    fsdp_status st = fsdp_io_open(io, path, FSDP_IO_READ, &file, err);
    if (st != FSDP_OK)
        return st == FSDP_ERR_LIMIT ? st : FSDP_OK; /* the reader's open fails too */
    ssize_t n = file->ops->pread(file, head, sizeof head, 0);
    (void)fsdp_io_close(&file, path, NULL); /* only read */
    for (size_t i = 0; n >= 0 && i < fsdp_framework_file_count; i++) {
        const fsdp_framework_file *row = &fsdp_framework_files[i];
        if ((size_t)n < row->head_size || memcmp(head, row->head, row->head_size) != 0 ||
            (row->suffix && !fsdp_has_suffix(path, row->suffix)))
            continue;
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "'%s' is a file of %s: %s", path, row->made_by,
                         row->say);
    }
    return FSDP_OK;
}

/* Checks the weights in the directory, which are pointers in a clone without git-lfs. */
static fsdp_status folder_check(const fsdp_folder *folder, fsdp_error *err)
{
    fsdp_status st = FSDP_OK;
    int looked = 0;
    for (size_t i = 0; i < folder->names.count && st == FSDP_OK && looked < FSDP_FOLDER_NAMES;
         i++) {
        fsdp_file_info info;
        if (!folder_is_weights(folder->names.items[i]))
            continue;
        char *path = fsdp_path_join(folder->path, folder->names.items[i]);
        looked++;
        if (!path)
            return fsdp_fail_memory(err, "a path");
        if (folder->io->ops->info(folder->io, path, &info) == 0 && info.kind == FSDP_FILE_REGULAR &&
            info.size < 1024)
            st = folder_check_file(folder->io, path, err);
        fsdp_free(path);
    }
    return st;
}

/* === the row that fits, and what its pointer names ============================================ */

/* The name in the directory that the text is, or whose number it is: "5" for iter_0000005. */
static const char *find_pointed(const fsdp_folder *folder, const fsdp_framework_row *row,
                                const char *text)
{
    size_t digits = strspn(text, "0123456789");
    bool is_number = digits > 0 && digits < 18 && text[digits] == '\0';
    for (size_t i = 0; i < folder->names.count; i++) {
        int64_t number;
        if (strcmp(folder->names.items[i], text) == 0 ||
            (is_number && row->pointed &&
             fsdp_framework_matches(row->pointed, folder->names.items[i], &number) &&
             number == strtoll(text, NULL, 10)))
            return folder->names.items[i];
    }
    return NULL;
}

/* Folders, and files of weights. */
static fsdp_status list_there(const fsdp_folder *folder, fsdp_text *text, fsdp_error *err)
{
    size_t shown = 0;
    for (size_t i = 0; i < folder->names.count && i < FSDP_FOLDER_NAMES; i++) {
        const char *name = folder->names.items[i];
        fsdp_file_kind kind;
        char quoted[200];
        FSDP_TRY(folder_kind(folder, name, &kind, err));
        if (kind != FSDP_FILE_DIRECTORY && !folder_is_weights(name))
            continue;
        if (shown++ < NAMES_SHOWN)
            fsdp_text_addf(text, "%s'%s'", shown > 1 ? ", " : "",
                           fsdp_printable(name, strlen(name), quoted, sizeof quoted));
    }
    if (shown > NAMES_SHOWN)
        fsdp_text_addf(text, " and %zu more", shown - NAMES_SHOWN);
    if (shown == 0)
        fsdp_text_addf(text, "no checkpoint");
    return FSDP_OK;
}

static fsdp_status fail_pointer(const fsdp_folder *folder, const fsdp_framework_row *row,
                                const char *text, size_t size, fsdp_error *err)
{
    fsdp_text there = {0};
    char quoted[120];
    fsdp_status st = list_there(folder, &there, err);
    if (st == FSDP_OK)
        st = there.failed ? fsdp_fail_memory(err, folder->path)
                          : fsdp_fail(err, FSDP_ERR_DAMAGED,
                                      "'%s/%s' names '%s', which is missing; '%s' has %s; name the "
                                      "one to read by its path, or use fsdp-convert --from FORMAT",
                                      folder->path, row->pointer,
                                      fsdp_printable(text, size, quoted, sizeof quoted),
                                      folder->path, there.data);
    fsdp_text_release(&there);
    return st;
}

static bool has_pointer(const fsdp_folder *folder, const fsdp_framework_row *row)
{
    fsdp_file_kind kind;
    return folder_kind(folder, row->pointer, &kind, NULL) == FSDP_OK && kind == FSDP_FILE_REGULAR;
}

/* The text of the pointer, less the line ends and spaces after it. The caller frees it. */
static fsdp_status read_pointer(const fsdp_folder *folder, const fsdp_framework_row *row,
                                char **text_out, size_t *size_out, fsdp_error *err)
{
    char *path = fsdp_path_join(folder->path, row->pointer);
    *text_out = NULL;
    fsdp_status st =
        path ? fsdp_io_read_file(folder->io, path, POINTER_MOST, text_out, size_out, err)
             : fsdp_fail_memory(err, "a path");
    while (st == FSDP_OK && *size_out > 0 && strchr(" \t\r\n", (*text_out)[*size_out - 1]))
        (*text_out)[--*size_out] = '\0';
    fsdp_free(path);
    return st;
}

/* The name in the directory that the row's pointer means. FSDP_ERR_DAMAGED: it is not there. */
static fsdp_status folder_pointed(const fsdp_folder *folder, const fsdp_framework_row *row,
                                  const char **name_out, fsdp_error *err)
{
    char *text = NULL;
    size_t size = 0;
    *name_out = NULL;
    fsdp_status st = read_pointer(folder, row, &text, &size, err);
    if (st == FSDP_OK)
        *name_out = find_pointed(folder, row, text);
    if (st == FSDP_OK && !*name_out)
        st = fail_pointer(folder, row, text, size, err);
    fsdp_free(text);
    return st;
}

/* A pointer to what is not there says nothing when the person named the format. */
static bool counts(const fsdp_folder *folder, const fsdp_framework_row *row)
{
    const char *name = NULL;
    return has_pointer(folder, row) &&
           (!folder->is_chosen || folder_pointed(folder, row, &name, NULL) == FSDP_OK);
}

/* The first row whose markers are there, and whose pointer is a file that is followed; or NULL. */
static const fsdp_framework_row *folder_row(const fsdp_folder *folder)
{
    for (size_t r = 0; r < fsdp_framework_row_count; r++) {
        const fsdp_framework_row *row = &fsdp_framework_rows[r];
        bool is_it = true;
        for (int i = 0; i < FSDP_FRAMEWORK_MARKERS && is_it && row->markers[i]; i++)
            is_it = folder_find(folder, row->markers[i]) != NULL;
        if (is_it && (!row->pointer || counts(folder, row)))
            return row;
    }
    return NULL;
}

/* === notes and errors ========================================================================= */

/* The directory holds these checkpoints; FSDP_FOLDER_NAMES of them: there may be more. */
static fsdp_status folder_fail_several(const fsdp_folder *folder, const char *const *names,
                                       size_t count, fsdp_error *err)
{
    fsdp_text text = {0};
    bool is_all = count < FSDP_FOLDER_NAMES;
    for (size_t i = 0; i < count && i < NAMES_SHOWN; i++) {
        char *path = fsdp_path_join(folder->path, names[i]);
        fsdp_text_addf(&text, "%s", i > 0 ? ", " : "");
        if (path)
            fsdp_text_add_quoted(&text, path); /* fsdp-convert makes a command line of it */
        text.failed = text.failed || !path;
        fsdp_free(path);
    }
    if (!is_all)
        fsdp_text_addf(&text, " and others");
    else if (count > NAMES_SHOWN)
        fsdp_text_addf(&text, " and %zu more", count - NAMES_SHOWN);
    fsdp_status st =
        text.failed
            ? fsdp_fail_memory(err, folder->path)
            : fsdp_fail(err, FSDP_ERR_USAGE, "'%s' holds %zu%s checkpoints; name one of them: %s",
                        folder->path, count, is_all ? "" : " or more", text.data);
    fsdp_text_release(&text);
    return st;
}

/* Is it left out when the model alone is read? */
static bool is_other(const fsdp_framework_row *row, const char *name)
{
    if (!row)
        return fsdp_framework_matches(fsdp_framework_no_model, name, NULL);
    for (int i = 0; i < FSDP_FRAMEWORK_PARTS && row->parts[i].names; i++)
        if (fsdp_framework_matches(row->parts[i].names, name, NULL))
            return true;
    return row->others && fsdp_framework_matches(row->others, name, NULL);
}

static bool is_read(const fsdp_io_names *parts, const char *name)
{
    for (size_t i = 0; i < parts->count; i++)
        if (fsdp_framework_matches(parts->items[i], name, NULL))
            return true;
    return false;
}

/* The directory that was named is the checkpoint. */
static bool is_itself(const char *member)
{
    return strcmp(member, ".") == 0;
}

/* "; optimizer left out: A, B", or "; left out: C" */
static void add_others(const fsdp_folder *folder, const fsdp_io_names *parts, bool is_optim,
                       fsdp_text *text)
{
    size_t shown = 0;
    for (size_t i = 0; i < folder->names.count; i++) {
        const char *name = folder->names.items[i];
        if (!is_other(folder->row, name) || is_read(parts, name) ||
            fsdp_framework_matches("optim*", name, NULL) != is_optim)
            continue;
        if (shown++ < NAMES_SHOWN)
            fsdp_text_addf(text, "%s%s",
                           shown > 1  ? ", "
                           : is_optim ? "; optimizer left out: "
                                      : "; left out: ",
                           name);
    }
    if (shown > NAMES_SHOWN)
        fsdp_text_addf(text, " and %zu more", shown - NAMES_SHOWN);
}

/* "'run' (torchtitan) is read as 'checkpoint/step-10' and 'optim.pt'" */
static void add_choice(const fsdp_folder *folder, const char *member, const fsdp_io_names *parts,
                       fsdp_text *text)
{
    const fsdp_framework_row *row = folder->row;
    fsdp_text_addf(text, "'%s'%s%s%s is read as ", folder->path, row ? " (" : "",
                   row ? row->made_by : "", row ? ")" : "");
    if (is_itself(member))
        fsdp_text_addf(text, "the model");
    else
        fsdp_text_addf(text, "'%s'", member);
    for (size_t i = 0; i < parts->count; i++)
        fsdp_text_addf(text, "%s'%s'", i + 1 < parts->count ? ", " : " and ", parts->items[i]);
}

/* Notes "it is read as MEMBER and PARTS", or the entries next to the member that are left out. Nothing for a
 * directory that is read as it is and whole. */
static void folder_note_choice(const fsdp_folder *folder, const char *member,
                               const fsdp_io_names *parts)
{
    fsdp_text text = {0}, others = {0};
    if (parts->count == 0)
        add_others(folder, parts, true, &others);
    add_others(folder, parts, false, &others);
    bool is_whole = is_itself(member) && parts->count > 0 && others.size == 0 && !others.failed;
    add_choice(folder, member, parts, &text);
    fsdp_text_add(&text, others.data, others.size);
    if (folder->note && !is_whole && !text.failed && !others.failed)
        folder->note(folder->context, text.data);
    fsdp_text_release(&others);
    fsdp_text_release(&text);
}

static void folder_note_skipped(const fsdp_folder *folder, const char *name, const char *why)
{
    fsdp_text text = {0};
    fsdp_text_addf(&text, "skipping '%s' of '%s': %s", name, folder->path, why);
    if (folder->note && !text.failed)
        folder->note(folder->context, text.data);
    fsdp_text_release(&text);
}

/* === the parts next to a model ================================================================ */

/* A part of the row as it is opened, when it is there. names may be "DIR/NAME". */
static fsdp_status find_part(const fsdp_folder *folder, const char *names, const char *member,
                             char **name_out, fsdp_error *err)
{
    char *pattern = fsdp_framework_spell(folder->row->member, member, names);
    *name_out = NULL;
    if (!pattern)
        return fsdp_fail_memory(err, folder->path);
    fsdp_file_kind kind = FSDP_FILE_OTHER;
    fsdp_status st = strchr(pattern, '/') ? folder_kind(folder, pattern, &kind, err) : FSDP_OK;
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

/* The parts next to the model `member`, in the order of the row; with NULL for those that are not there. The
 * first of parts with one key counts. The caller releases them, also after an error. */
static fsdp_status folder_parts(const fsdp_folder *folder, const char *member,
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

static void folder_parts_release(char *parts[FSDP_FRAMEWORK_PARTS])
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
            fsdp_fail(err, st, "%s; '%s/%s' holds the model alone", found.text, folder->path,
                      member);
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

/* True in *is_whole_out: the directory is a row with parts, which are opened together. */
static fsdp_status folder_open(const fsdp_folder *folder, const char *member,
                               const fsdp_source_opts *opts, bool *is_whole_out,
                               fsdp_source **source_out, fsdp_error *err)
{
    char *parts[FSDP_FRAMEWORK_PARTS];
    size_t count;
    fsdp_status st = folder_parts(folder, member, parts, &count, err);
    *is_whole_out = count > 0;
    if (st == FSDP_OK && count > 0)
        st = open_whole(folder, member, parts, opts, source_out, err);
    folder_parts_release(parts);
    return st;
}

/* === from directory to directory ============================================================== */

enum { DEEPEST = 6 };

/* --- what lies in it ----------------------------------------------------------------------------- */

static fsdp_status is_promising(const fsdp_folder *above, const char *name, int depth,
                                bool *is_known_out, fsdp_error *err);

/* Sets *is_known_out when one of the folders in it may hold a checkpoint. */
static fsdp_status has_promising(const fsdp_folder *here, int depth, bool *is_known_out,
                                 fsdp_error *err)
{
    for (size_t i = 0; i < here->names.count && i < FSDP_FOLDER_NAMES && !*is_known_out; i++) {
        fsdp_file_kind kind;
        FSDP_TRY(folder_kind(here, here->names.items[i], &kind, err));
        if (kind == FSDP_FILE_DIRECTORY)
            FSDP_TRY(is_promising(here, here->names.items[i], depth - 1, is_known_out, err));
    }
    return FSDP_OK;
}

/* Only a lack of memory is an error: a folder that cannot be read holds no checkpoint. */
static fsdp_status is_promising(const fsdp_folder *above, const char *name, int depth,
                                bool *is_known_out, fsdp_error *err)
{
    char *path = fsdp_path_join(above->path, name);
    fsdp_folder here = {.io = above->io, .path = path, .left = above->left};
    *is_known_out = false;
    fsdp_status st = path ? folder_look(&here, err) : fsdp_fail_memory(err, "a path");
    if (st == FSDP_OK)
        *is_known_out = folder_row(&here) || folder_steps(&here);
    if (st == FSDP_OK && !*is_known_out && fsdp_folder_may_look(&here))
        st = fsdp_source_recognise(here.io, path, is_known_out, err);
    for (size_t i = 0; i < here.names.count && !*is_known_out; i++)
        *is_known_out = folder_is_weights(here.names.items[i]);
    if (st != FSDP_ERR_LIMIT && !*is_known_out && depth > 0)
        st = has_promising(&here, depth, is_known_out, err);
    fsdp_io_names_release(&here.names);
    fsdp_free(path);
    return st == FSDP_ERR_LIMIT ? st : FSDP_OK;
}

static fsdp_status may_be_it(const fsdp_folder *folder, const char *name, bool *may_be_out,
                             fsdp_error *err)
{
    fsdp_file_kind kind;
    *may_be_out = false;
    if (fsdp_framework_matches(fsdp_framework_no_model, name, NULL))
        return FSDP_OK;
    FSDP_TRY(folder_kind(folder, name, &kind, err));
    if (kind == FSDP_FILE_DIRECTORY)
        return is_promising(folder, name, 2, may_be_out, err);
    *may_be_out = kind == FSDP_FILE_REGULAR && folder_is_weights(name);
    return FSDP_OK;
}

/* True for an adapter with its base, which is the model. */
static bool is_beside_base(const fsdp_folder *folder, const char *name)
{
    bool has_base = false;
    for (size_t i = 0; i < folder->names.count && !has_base; i++)
        has_base = strcmp(folder->names.items[i], "pytorch_model.bin") == 0;
    return has_base && fsdp_framework_matches("adapter_model.*", name, NULL);
}

/* The one folder or file that may hold a checkpoint. A folder does not hide the file next to it. */
static fsdp_status find_only(const fsdp_folder *folder, const char **name_out, fsdp_error *err)
{
    const char *names[FSDP_FOLDER_NAMES];
    size_t count = 0;
    *name_out = NULL;
    for (size_t i = 0; i < folder->names.count && count < FSDP_FOLDER_NAMES; i++) {
        bool may_be;
        FSDP_TRY(may_be_it(folder, folder->names.items[i], &may_be, err));
        if (may_be && !is_beside_base(folder, folder->names.items[i]))
            names[count++] = folder->names.items[i];
    }
    for (size_t i = 1; i < count; i++) /* what is most likely meant stands first */
        if (fsdp_framework_matches("actor|policy|model|unet|transformer", names[i], NULL)) {
            const char *first = names[0];
            names[0] = names[i];
            names[i] = first;
            break;
        }
    if (*folder->left < 0)
        return fsdp_folder_fail_looks(folder->path, err);
    if (count > 1)
        return folder_fail_several(folder, names, count, err);
    *name_out = count == 1 ? names[0] : NULL;
    return FSDP_OK;
}

/* --- resolution --------------------------------------------------------------------------------- */

static fsdp_status resolve(const fsdp_folder *way, const char *path, char **path_out,
                           fsdp_error *err);

/* Opens a step. *is_good_out false: it is damaged, and err names the fault. */
static fsdp_status try_step(const fsdp_folder *folder, const char *name, bool *is_good_out,
                            fsdp_error *err)
{
    char *path = fsdp_path_join(folder->path, name), *member = NULL;
    fsdp_source *source = NULL;
    bool is_whole = false;
    const fsdp_folder way = {.io = folder->io,
                             .whole = folder->whole,
                             .is_chosen = folder->is_chosen,
                             .deeper = folder->deeper - 1,
                             .left = folder->left};
    fsdp_status st =
        path ? fsdp_io_check_link(folder->io, path, err) : fsdp_fail_memory(err, "a path");
    if (st == FSDP_OK)
        st = resolve(&way, path, &member, err);
    if (st == FSDP_OK && !fsdp_folder_may_look(folder))
        st = fsdp_folder_fail_looks(folder->path, err);
    if (st == FSDP_OK && folder->row && folder->whole)
        st = folder_open(folder, name, NULL, &is_whole, &source, err);
    if (st == FSDP_OK && !is_whole)
        st = fsdp_framework_open(folder->io, member ? member : path, NULL, &source, err);
    fsdp_source_close(source);
    fsdp_free(member);
    fsdp_free(path);
    *is_good_out = st == FSDP_OK;
    bool is_fault = st == FSDP_ERR_DAMAGED || st == FSDP_ERR_IO || st == FSDP_ERR_NOT_FOUND;
    return is_fault ? FSDP_OK : st;
}

/* The highest number at most `limit` that a name has. */
static const char *find_below(const fsdp_folder *folder, const char *steps, int64_t limit,
                              int64_t *number_out)
{
    const char *found = NULL;
    int64_t number;
    *number_out = -1;
    for (size_t i = 0; i < folder->names.count; i++)
        if (fsdp_framework_matches(steps, folder->names.items[i], &number) && number <= limit &&
            number > *number_out) {
            found = folder->names.items[i];
            *number_out = number;
        }
    return found;
}

/* The newest step that opens; if none does, the newest, so that its error is reported. */
static fsdp_status find_newest(const fsdp_folder *folder, const char *steps, const char **name_out,
                               fsdp_error *err)
{
    enum { TRIES = 16, TRIES_BELOW = 2 }; /* each nested level of steps multiplies the tries */
    int tries = folder->note ? TRIES : TRIES_BELOW;
    int64_t number, limit = INT64_MAX;
    bool is_good = false;
    *name_out = folder_find(folder, steps);
    for (int i = 0; i < tries; i++, limit = number - 1) {
        fsdp_error why = {0};
        const char *name = find_below(folder, steps, limit, &number);
        if (!name || number < 0)
            break;
        fsdp_status st = try_step(folder, name, &is_good, &why);
        if (st != FSDP_OK || is_good) {
            if (err && st != FSDP_OK)
                *err = why;
            *name_out = name;
            return st;
        }
        folder_note_skipped(folder, name, why.text);
    }
    return FSDP_OK;
}

/* Lists the members of a row. Rank files of one set are one member: they are neighbours in sorted order. */
static fsdp_status list_members(fsdp_folder *folder, const char *member, fsdp_error *err)
{
    fsdp_io_names *members = &folder->members;
    members->items = fsdp_alloc(folder->names.count, sizeof *members->items);
    if (!members->items)
        return fsdp_fail_memory(err, folder->path);
    for (size_t i = 0; i < folder->names.count; i++) {
        if (!fsdp_framework_matches(member, folder->names.items[i], NULL))
            continue;
        const char *name = folder->names.items[i];
        char *spelled = strchr(member, '{') ? fsdp_framework_spell(member, name, member)
                                            : fsdp_strndup(name, strlen(name));
        char *kept = spelled ? fsdp_arena_strndup(&members->arena, spelled, strlen(spelled)) : NULL;
        fsdp_free(spelled);
        if (!kept)
            return fsdp_fail_memory(err, folder->path);
        if (members->count == 0 || strcmp(members->items[members->count - 1], kept) != 0)
            members->items[members->count++] = kept;
    }
    return FSDP_OK;
}

static fsdp_status find_member(fsdp_folder *folder, const fsdp_framework_row *row,
                               const char **name_out, fsdp_error *err)
{
    *name_out = NULL;
    if (row->pointer)
        return folder_pointed(folder, row, name_out, err);
    if (folder_is_model(row)) {
        *name_out = folder_is_alone(folder->path) ? NULL : row->member;
        return FSDP_OK;
    }
    FSDP_TRY(list_members(folder, row->member, err));
    const fsdp_io_names *members = &folder->members;
    if (members->count > 1 && row->counts_models)
        return folder_fail_several(folder, (const char *const *)members->items, members->count,
                                   err);
    if (members->count > 1)
        return find_newest(folder, row->member, name_out, err);
    *name_out = members->count == 1 ? members->items[0] : NULL;
    return FSDP_OK;
}

/* Opens the rank files of which the member may be one. */
static fsdp_status check_member(const fsdp_folder *folder, const fsdp_framework_row *row,
                                fsdp_error *err)
{
    fsdp_source *source = NULL;
    char *path = fsdp_path_join(folder->path, row->checked);
    fsdp_status st = !path ? fsdp_fail_memory(err, "a path")
                     : !fsdp_folder_may_look(folder)
                         ? fsdp_folder_fail_looks(folder->path, err)
                         : fsdp_source_open(folder->io, path, NULL, &source, err);
    fsdp_source_close(source);
    fsdp_free(path);
    return st;
}

/* The name to go down to; NULL: the directory itself is the checkpoint, or no rule applies to it. */
static fsdp_status find_next(fsdp_folder *folder, const char **name_out, fsdp_error *err)
{
    bool is_known = false;
    const fsdp_framework_row *row = folder_row(folder);
    *name_out = NULL;
    FSDP_TRY(folder_check(folder, err));
    if (row && (row->say || row->yields) && folder_find(folder, "*.safetensors|pytorch_model*.bin"))
        row = NULL;
    if (row && row->say)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "'%s' is a directory of %s: %s", folder->path,
                         row->made_by, row->say);
    folder->row = row;
    folder->whole = folder->whole || (row && row->is_one);
    if (row && row->shards)
        return FSDP_OK;
    if (row && row->checked)
        FSDP_TRY(check_member(folder, row, err));
    if (row)
        return find_member(folder, row, name_out, err);
    if (!fsdp_folder_may_look(folder))
        return fsdp_folder_fail_looks(folder->path, err);
    FSDP_TRY(fsdp_source_recognise(folder->io, folder->path, &is_known, err));
    if (is_known)
        return FSDP_OK;
    const char *steps = folder_steps(folder);
    return steps ? find_newest(folder, steps, name_out, err) : find_only(folder, name_out, err);
}

/* Notes what is read; true in *is_whole_out: the row with all of its parts, where the resolution ends. */
static fsdp_status note_choice(const fsdp_folder *folder, const char *name, bool *is_whole_out,
                               fsdp_error *err)
{
    char *parts[FSDP_FRAMEWORK_PARTS], *there[FSDP_FRAMEWORK_PARTS];
    size_t count;
    fsdp_io_names told = {.items = there};
    fsdp_status st = folder_parts(folder, name, parts, &count, err);
    for (int i = 0; i < FSDP_FRAMEWORK_PARTS && folder->whole; i++)
        if (parts[i])
            there[told.count++] = parts[i];
    if (st == FSDP_OK)
        folder_note_choice(folder, name, &told);
    *is_whole_out = told.count > 0;
    folder_parts_release(parts);
    return st;
}

static fsdp_status step_down(fsdp_folder *folder, char **path, bool *is_end_out, fsdp_error *err)
{
    const char *name;
    FSDP_TRY(find_next(folder, &name, err));
    *is_end_out = name == NULL;
    if (!name)
        return FSDP_OK;
    FSDP_TRY(note_choice(folder, name, is_end_out, err));
    if (*is_end_out)
        return FSDP_OK;
    char *next = fsdp_path_join(folder->path, name);
    fsdp_status st =
        next ? fsdp_io_check_link(folder->io, next, err) : fsdp_fail_memory(err, "a path");
    if (st != FSDP_OK) {
        fsdp_free(next);
        return st;
    }
    fsdp_free(*path);
    *path = next;
    return FSDP_OK;
}

static fsdp_status resolve(const fsdp_folder *way, const char *path, char **path_out,
                           fsdp_error *err)
{
    fsdp_io *io = way->io;
    char *at = fsdp_strndup(path, strlen(path));
    fsdp_status st = at ? FSDP_OK : fsdp_fail_memory(err, "a path");
    bool is_end = false;
    *path_out = NULL;
    for (int deeper = way->deeper; deeper > 0 && st == FSDP_OK && !is_end; deeper--) {
        fsdp_file_kind kind;
        bool is_there;
        fsdp_folder folder = *way;
        folder.path = at;
        folder.deeper = deeper - 1;
        st = folder_info(io, at, &kind, &is_there, err);
        if (st != FSDP_OK || !is_there)
            break; /* a pattern of rank files is not a file */
        if (kind != FSDP_FILE_DIRECTORY) {
            st = folder_check_file(io, at, err);
            break;
        }
        char *next = fsdp_strndup(at, strlen(at));
        st = next ? folder_look(&folder, err) : fsdp_fail_memory(err, "a path");
        if (st == FSDP_OK)
            st = step_down(&folder, &next, &is_end, err);
        fsdp_io_names_release(&folder.members);
        fsdp_io_names_release(&folder.names);
        fsdp_free(at);
        at = next;
    }
    if (st == FSDP_OK && strcmp(at, path) != 0) {
        *path_out = at;
        return FSDP_OK;
    }
    fsdp_free(at);
    return st;
}

fsdp_status fsdp_framework_resolve(fsdp_io *io, const char *path, const fsdp_framework_way *given,
                                   char **path_out, fsdp_error *err)
{
    int left = FSDP_FOLDER_LOOKS;
    const fsdp_folder way = {.io = io,
                             .note = given->note,
                             .context = given->context,
                             .whole = given->whole,
                             .is_chosen = given->is_chosen,
                             .deeper = DEEPEST,
                             .left = &left};
    return resolve(&way, path, path_out, err);
}

/* --- opening ------------------------------------------------------------------------------------- */

static fsdp_status open_folder(fsdp_folder *folder, const fsdp_source_opts *opts,
                               bool *is_whole_out, fsdp_source **source_out, fsdp_error *err)
{
    const char *name;
    FSDP_TRY(folder_look(folder, err));
    folder->row = folder_row(folder);
    *is_whole_out = folder->row && folder->row->shards;
    if (*is_whole_out)
        return fsdp_folder_open_shards(folder, opts, source_out, err);
    if (!folder->row || !folder->row->member || !folder->row->parts[0].names)
        return FSDP_OK;
    FSDP_TRY(find_member(folder, folder->row, &name, err));
    return name ? folder_open(folder, name, opts, is_whole_out, source_out, err) : FSDP_OK;
}

static void ignore_note(void *context, const char *text)
{
    (void)context;
    (void)text;
}

fsdp_status fsdp_framework_open(fsdp_io *io, const char *path, const fsdp_source_opts *opts,
                                fsdp_source **source_out, fsdp_error *err)
{
    int left = FSDP_FOLDER_LOOKS;
    bool is_whole = false;
    fsdp_file_kind kind;
    bool is_there;
    fsdp_folder folder = {
        .io = io, .path = path, .note = ignore_note, .whole = true, .deeper = 1, .left = &left};
    *source_out = NULL;
    fsdp_status st = folder_info(io, path, &kind, &is_there, err);
    if (st == FSDP_OK && !(opts && opts->format) && kind == FSDP_FILE_DIRECTORY)
        st = open_folder(&folder, opts, &is_whole, source_out, err);
    fsdp_io_names_release(&folder.members);
    fsdp_io_names_release(&folder.names);
    return st == FSDP_OK && !is_whole ? fsdp_source_open(io, path, opts, source_out, err) : st;
}
