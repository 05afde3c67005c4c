/* The checkpoint that a path means, by the table of layouts: see frameworks.h. */
#include "formats/frameworks.h"

#include "base/core/mem.h"
#include "formats/source.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { DEEPEST = 6, FOLDERS_MOST = 64, LOOKS_MOST = 4096, NAMES_SHOWN = 5, HEAD = 64 };

/* --- a directory ------------------------------------------------------------------------------- */

typedef struct seen_folder {
    fsdp_io *io;
    const char *path;
    fsdp_io_names names;
    fsdp_io_names members; /* of the row that fits, as they are opened */
    fsdp_framework_note note;
    void *context;
    const fsdp_framework_row *row; /* that fits; NULL: none */
    bool whole;                    /* the way ends at a row with parts, not at its model */
    int deeper;                    /* folders that the way may still go down from here */
    int *left; /* listings and opens that the whole way may still make; -1: it wanted more */
} seen_folder;

static fsdp_status resolve(const seen_folder *way, const char *path, char **path_out,
                           fsdp_error *err);

static bool is_plain(void *context, const char *name)
{
    (void)context;
    return strcmp(name, ".") != 0 && strcmp(name, "..") != 0 && !strchr(name, '/');
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static fsdp_status fail_looks(const char *path, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "%d files and folders were opened on the way to a checkpoint, and '%s' holds "
                     "more: name the checkpoint itself",
                     LOOKS_MOST, path);
}

static bool may_look(const seen_folder *folder)
{
    if (*folder->left >= 0)
        --*folder->left;
    return *folder->left >= 0;
}

static fsdp_status look_into(seen_folder *folder, fsdp_error *err)
{
    if (!may_look(folder))
        return fail_looks(folder->path, err);
    FSDP_TRY(fsdp_io_list_names(folder->io, folder->path, is_plain, NULL, &folder->names, err));
    if (folder->names.count > 1)
        qsort(folder->names.items, folder->names.count, sizeof *folder->names.items, compare_names);
    return FSDP_OK;
}

/* The kind of a name in the directory; a link counts as nothing unless links are trusted. */
static fsdp_file_kind kind_of(const seen_folder *folder, const char *name)
{
    fsdp_file_info info = {.kind = FSDP_FILE_OTHER};
    char *path = fsdp_path_join(folder->path, name);
    if (!path || folder->io->ops->info(folder->io, path, &info) < 0)
        info.kind = FSDP_FILE_OTHER;
    fsdp_free(path);
    return info.kind;
}

/* The name with the highest number that matches; NULL: none. */
static const char *find(const seen_folder *folder, const char *list)
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

static const fsdp_framework_row *find_row(const seen_folder *folder)
{
    for (size_t r = 0; r < fsdp_framework_row_count; r++) {
        const fsdp_framework_row *row = &fsdp_framework_rows[r];
        bool is_it = true;
        for (int i = 0; i < FSDP_FRAMEWORK_MARKERS && is_it && row->markers[i]; i++)
            is_it = find(folder, row->markers[i]) != NULL;
        if (is_it)
            return row;
    }
    return NULL;
}

/* The list of names of steps that the directory has, or NULL. */
static const char *find_steps(const seen_folder *folder)
{
    for (size_t i = 0; fsdp_framework_steps[i]; i++)
        if (find(folder, fsdp_framework_steps[i]))
            return fsdp_framework_steps[i];
    return NULL;
}

static bool ends_with(const char *name, const char *end)
{
    size_t size = strlen(name), n = strlen(end);
    return size > n && strcmp(name + size - n, end) == 0;
}

static bool is_weights(const char *name)
{
    return !fsdp_framework_matches(fsdp_framework_no_model, name, NULL) &&
           fsdp_framework_matches(fsdp_framework_weights, name, NULL);
}

/* --- recognised files --------------------------------------------------------------------------- */

static fsdp_status check_file(fsdp_io *io, const char *path, fsdp_error *err)
{
    char head[HEAD] = {0};
    fsdp_file *file = NULL;
    if (fsdp_io_open(io, path, FSDP_IO_READ, &file, NULL) != FSDP_OK)
        return FSDP_OK; /* who opens it says why */
    ssize_t n = file->ops->pread(file, head, sizeof head, 0);
    (void)fsdp_io_close(&file, path, NULL); /* only read */
    for (size_t i = 0; n >= 0 && i < fsdp_framework_file_count; i++) {
        const fsdp_framework_file *row = &fsdp_framework_files[i];
        if ((size_t)n < row->head_size || memcmp(head, row->head, row->head_size) != 0 ||
            (row->suffix && !ends_with(path, row->suffix)))
            continue;
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "'%s' is a file of %s: %s", path, row->made_by,
                         row->say);
    }
    return FSDP_OK;
}

/* Weights of a clone without git-lfs are pointers. */
static fsdp_status check_pointers(const seen_folder *folder, fsdp_error *err)
{
    fsdp_status st = FSDP_OK;
    int looked = 0;
    for (size_t i = 0; i < folder->names.count && st == FSDP_OK && looked < FOLDERS_MOST; i++) {
        fsdp_file_info info;
        if (!is_weights(folder->names.items[i]))
            continue;
        char *path = fsdp_path_join(folder->path, folder->names.items[i]);
        looked++;
        if (path && folder->io->ops->info(folder->io, path, &info) == 0 &&
            info.kind == FSDP_FILE_REGULAR && info.size < 1024)
            st = check_file(folder->io, path, err);
        fsdp_free(path);
    }
    return st;
}

/* --- what lies in it ----------------------------------------------------------------------------- */

static bool is_promising(const seen_folder *above, const char *name, int depth)
{
    char *path = fsdp_path_join(above->path, name);
    seen_folder here = {.io = above->io, .path = path, .left = above->left};
    bool is_known = false;
    if (path && look_into(&here, NULL) == FSDP_OK) {
        is_known = find_row(&here) || find_steps(&here) ||
                   (may_look(&here) &&
                    fsdp_source_recognise(here.io, path, &is_known, NULL) == FSDP_OK && is_known);
        for (size_t i = 0; i < here.names.count && !is_known; i++)
            is_known = is_weights(here.names.items[i]);
        for (size_t i = 0; i < here.names.count && i < FOLDERS_MOST && !is_known && depth > 0; i++)
            is_known = kind_of(&here, here.names.items[i]) == FSDP_FILE_DIRECTORY &&
                       is_promising(&here, here.names.items[i], depth - 1);
    }
    fsdp_io_names_release(&here.names);
    fsdp_free(path);
    return is_known;
}

/* find_only stops at FOLDERS_MOST, so that there may be more than these. */
static fsdp_status fail_several(const seen_folder *folder, const char *const *names, size_t count,
                                fsdp_error *err)
{
    fsdp_text text = {0};
    bool is_all = count < FOLDERS_MOST;
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

/* The one folder or file that may hold a checkpoint. A folder does not hide the file beside it. */
static fsdp_status find_only(const seen_folder *folder, const char **name_out, fsdp_error *err)
{
    const char *names[FOLDERS_MOST];
    size_t count = 0;
    *name_out = NULL;
    for (size_t i = 0; i < folder->names.count && count < FOLDERS_MOST; i++) {
        const char *name = folder->names.items[i];
        fsdp_file_kind kind = kind_of(folder, name);
        if (!fsdp_framework_matches(fsdp_framework_no_model, name, NULL) &&
            (kind == FSDP_FILE_DIRECTORY ? is_promising(folder, name, 2)
                                         : kind == FSDP_FILE_REGULAR && is_weights(name)))
            names[count++] = name;
    }
    for (size_t i = 1; i < count; i++) /* what is most likely meant stands first */
        if (fsdp_framework_matches("actor|policy|model|unet|transformer", names[i], NULL)) {
            const char *first = names[0];
            names[0] = names[i];
            names[i] = first;
            break;
        }
    if (*folder->left < 0)
        return fail_looks(folder->path, err);
    if (count > 1)
        return fail_several(folder, names, count, err);
    *name_out = count == 1 ? names[0] : NULL;
    return FSDP_OK;
}

/* --- the way ------------------------------------------------------------------------------------- */

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

/* "; optimizer left out: A, B", or "; left out: C" */
static void add_others(const seen_folder *folder, bool is_optim, fsdp_text *text)
{
    size_t shown = 0;
    for (size_t i = 0; i < folder->names.count; i++) {
        const char *name = folder->names.items[i];
        if (!is_other(folder->row, name) ||
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

static void tell(const seen_folder *folder, const char *member, const fsdp_io_names *parts)
{
    const fsdp_framework_row *row = folder->row;
    fsdp_text text = {0};
    if (!folder->note)
        return;
    fsdp_text_addf(&text, "'%s'%s%s%s is read as '%s'", folder->path, row ? " (" : "",
                   row ? row->made_by : "", row ? ")" : "", member);
    for (size_t i = 0; i < parts->count; i++)
        fsdp_text_addf(&text, "%s'%s'", i + 1 < parts->count ? ", " : " and ", parts->items[i]);
    if (parts->count == 0) {
        add_others(folder, true, &text);
        add_others(folder, false, &text);
    }
    if (!text.failed)
        folder->note(folder->context, text.data);
    fsdp_text_release(&text);
}

static void tell_skipped(const seen_folder *folder, const char *name, const char *why)
{
    fsdp_text text = {0};
    fsdp_text_addf(&text, "skipping '%s' of '%s': %s", name, folder->path, why);
    if (folder->note && !text.failed)
        folder->note(folder->context, text.data);
    fsdp_text_release(&text);
}

/* --- parts --------------------------------------------------------------------------------------- */

/* A part of the row as it is opened, when it is there. names may be "DIR/NAME". */
static fsdp_status find_part(const seen_folder *folder, const char *names, const char *member,
                             char **name_out, fsdp_error *err)
{
    char *pattern = fsdp_framework_spell(folder->row->member, member, names);
    *name_out = NULL;
    if (!pattern)
        return fsdp_fail_memory(err, folder->path);
    bool is_there = strchr(pattern, '/') && kind_of(folder, pattern) == FSDP_FILE_REGULAR;
    for (size_t i = 0; i < folder->names.count && !is_there && !strchr(pattern, '#'); i++)
        is_there = fsdp_framework_matches(pattern, folder->names.items[i], NULL);
    if (is_there)
        *name_out = pattern;
    else
        fsdp_free(pattern);
    return FSDP_OK;
}

static bool is_found(const fsdp_framework_row *row, char *const *parts, int count, const char *key)
{
    for (int i = 0; i < count; i++)
        if (parts[i] && strcmp(row->parts[i].key, key) == 0)
            return true;
    return false;
}

/* The parts beside the model `member`, in the order of the row; with NULL for those that are not there. The
 * first of parts with one key counts. */
static fsdp_status find_parts(const seen_folder *folder, const char *member,
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

static void release_parts(char *parts[FSDP_FRAMEWORK_PARTS])
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

static fsdp_status open_part(const seen_folder *folder, const char *name,
                             const fsdp_framework_part *part, const fsdp_source_opts *opts,
                             fsdp_source **source_out, fsdp_error *err)
{
    part_lack lack = {opts, part};
    fsdp_source_opts own = opts ? *opts : (fsdp_source_opts){0};
    char *path = fsdp_path_join(folder->path, name);
    if (own.may_lack) {
        own.may_lack = may_lack;
        own.context = &lack;
    }
    fsdp_status st = !path ? fsdp_fail_memory(err, "a path")
                     : !may_look(folder)
                         ? fail_looks(folder->path, err)
                         : fsdp_source_open(folder->io, path, &own, source_out, err);
    fsdp_free(path);
    return st;
}

static fsdp_status open_whole(const seen_folder *folder, const char *member,
                              char *const parts[FSDP_FRAMEWORK_PARTS], const fsdp_source_opts *opts,
                              fsdp_source **source_out, fsdp_error *err)
{
    static const fsdp_framework_part model = {NULL, "model", "model"};
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

/* True in *is_whole_out: the directory is a row with parts, which are opened together. */
static fsdp_status open_row(const seen_folder *folder, const char *member,
                            const fsdp_source_opts *opts, bool *is_whole_out,
                            fsdp_source **source_out, fsdp_error *err)
{
    char *parts[FSDP_FRAMEWORK_PARTS];
    size_t count;
    fsdp_status st = find_parts(folder, member, parts, &count, err);
    *is_whole_out = count > 0;
    if (st == FSDP_OK && count > 0)
        st = open_whole(folder, member, parts, opts, source_out, err);
    release_parts(parts);
    return st;
}

/* Does a step open? *is_good_out false: it is damaged, which err says. */
static fsdp_status try_step(const seen_folder *folder, const char *name, bool *is_good_out,
                            fsdp_error *err)
{
    char *path = fsdp_path_join(folder->path, name), *member = NULL;
    fsdp_source *source = NULL;
    bool is_whole = false;
    const seen_folder way = {.io = folder->io,
                             .whole = folder->whole,
                             .deeper = folder->deeper - 1,
                             .left = folder->left};
    fsdp_status st = path ? resolve(&way, path, &member, err) : fsdp_fail_memory(err, "a path");
    if (st == FSDP_OK && !may_look(folder))
        st = fail_looks(folder->path, err);
    if (st == FSDP_OK && folder->row && folder->whole)
        st = open_row(folder, name, NULL, &is_whole, &source, err);
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
static const char *find_below(const seen_folder *folder, const char *steps, int64_t limit,
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
static fsdp_status find_newest(const seen_folder *folder, const char *steps, const char **name_out,
                               fsdp_error *err)
{
    enum { TRIES = 16, TRIES_BELOW = 2 }; /* steps in steps in steps are no run */
    int tries = folder->note ? TRIES : TRIES_BELOW;
    int64_t number, limit = INT64_MAX;
    bool is_good = false;
    *name_out = find(folder, steps);
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
        tell_skipped(folder, name, why.text);
    }
    return FSDP_OK;
}

/* Rank files of one number stand side by side among the sorted names. */
static fsdp_status list_members(seen_folder *folder, const char *member, fsdp_error *err)
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

static fsdp_status find_member(seen_folder *folder, const fsdp_framework_row *row,
                               const char **name_out, fsdp_error *err)
{
    FSDP_TRY(list_members(folder, row->member, err));
    const fsdp_io_names *members = &folder->members;
    if (members->count > 1 && row->counts_models)
        return fail_several(folder, (const char *const *)members->items, members->count, err);
    if (members->count > 1)
        return find_newest(folder, row->member, name_out, err);
    *name_out = members->count == 1 ? members->items[0] : NULL;
    return FSDP_OK;
}

/* The next name on the way, NULL: the directory itself is the checkpoint, or nothing is known of it. */
static fsdp_status find_next(seen_folder *folder, const char **name_out, fsdp_error *err)
{
    bool is_known = false;
    const fsdp_framework_row *row = find_row(folder);
    *name_out = NULL;
    FSDP_TRY(check_pointers(folder, err));
    /* Hubs hold the same weights once more for other programs. */
    if (row && row->say && find(folder, "*.safetensors|pytorch_model*.bin"))
        row = NULL;
    if (row && row->say)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "'%s' is a directory of %s: %s", folder->path,
                         row->made_by, row->say);
    folder->row = row;
    if (row)
        return find_member(folder, row, name_out, err);
    if (!may_look(folder))
        return fail_looks(folder->path, err);
    FSDP_TRY(fsdp_source_recognise(folder->io, folder->path, &is_known, err));
    if (is_known)
        return FSDP_OK;
    const char *steps = find_steps(folder);
    return steps ? find_newest(folder, steps, name_out, err) : find_only(folder, name_out, err);
}

/* Tells what is read; true in *is_whole_out: the row with all of its parts, which ends the way. */
static fsdp_status tell_member(const seen_folder *folder, const char *name, bool *is_whole_out,
                               fsdp_error *err)
{
    char *parts[FSDP_FRAMEWORK_PARTS], *there[FSDP_FRAMEWORK_PARTS];
    size_t count;
    fsdp_io_names told = {.items = there};
    fsdp_status st = find_parts(folder, name, parts, &count, err);
    for (int i = 0; i < FSDP_FRAMEWORK_PARTS && folder->whole; i++)
        if (parts[i])
            there[told.count++] = parts[i];
    if (st == FSDP_OK)
        tell(folder, name, &told);
    *is_whole_out = told.count > 0;
    release_parts(parts);
    return st;
}

static fsdp_status step_down(seen_folder *folder, char **path, bool *is_end_out, fsdp_error *err)
{
    const char *name;
    FSDP_TRY(find_next(folder, &name, err));
    *is_end_out = name == NULL;
    if (!name)
        return FSDP_OK;
    FSDP_TRY(tell_member(folder, name, is_end_out, err));
    if (*is_end_out)
        return FSDP_OK;
    char *next = fsdp_path_join(folder->path, name);
    if (!next)
        return fsdp_fail_memory(err, "a path");
    fsdp_free(*path);
    *path = next;
    return FSDP_OK;
}

static fsdp_status resolve(const seen_folder *way, const char *path, char **path_out,
                           fsdp_error *err)
{
    fsdp_io *io = way->io;
    char *at = fsdp_strndup(path, strlen(path));
    fsdp_status st = at ? FSDP_OK : fsdp_fail_memory(err, "a path");
    bool is_end = false;
    *path_out = NULL;
    for (int deeper = way->deeper; deeper > 0 && st == FSDP_OK && !is_end; deeper--) {
        fsdp_file_info info;
        seen_folder folder = *way;
        folder.path = at;
        folder.deeper = deeper - 1;
        if (io->ops->info(io, at, &info) < 0)
            break; /* a pattern of rank files */
        if (info.kind != FSDP_FILE_DIRECTORY) {
            st = check_file(io, at, err);
            break;
        }
        char *next = fsdp_strndup(at, strlen(at));
        st = next ? look_into(&folder, err) : fsdp_fail_memory(err, "a path");
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
    int left = LOOKS_MOST;
    const seen_folder way = {.io = io,
                             .note = given->note,
                             .context = given->context,
                             .whole = given->whole,
                             .deeper = DEEPEST,
                             .left = &left};
    return resolve(&way, path, path_out, err);
}

/* --- opening ------------------------------------------------------------------------------------- */

static fsdp_status open_folder(seen_folder *folder, const fsdp_source_opts *opts,
                               bool *is_whole_out, fsdp_source **source_out, fsdp_error *err)
{
    const char *name;
    FSDP_TRY(look_into(folder, err));
    folder->row = find_row(folder);
    if (!folder->row || !folder->row->member || !folder->row->parts[0].names)
        return FSDP_OK;
    FSDP_TRY(find_member(folder, folder->row, &name, err));
    return name ? open_row(folder, name, opts, is_whole_out, source_out, err) : FSDP_OK;
}

static void tell_nobody(void *context, const char *text)
{
    (void)context;
    (void)text;
}

fsdp_status fsdp_framework_open(fsdp_io *io, const char *path, const fsdp_source_opts *opts,
                                fsdp_source **source_out, fsdp_error *err)
{
    int left = LOOKS_MOST;
    bool is_whole = false;
    fsdp_file_info info;
    fsdp_status st = FSDP_OK;
    seen_folder folder = {
        .io = io, .path = path, .note = tell_nobody, .whole = true, .deeper = 1, .left = &left};
    *source_out = NULL;
    if (!(opts && opts->format) && io->ops->info(io, path, &info) == 0 &&
        info.kind == FSDP_FILE_DIRECTORY)
        st = open_folder(&folder, opts, &is_whole, source_out, err);
    fsdp_io_names_release(&folder.members);
    fsdp_io_names_release(&folder.names);
    return st == FSDP_OK && !is_whole ? fsdp_source_open(io, path, opts, source_out, err) : st;
}
