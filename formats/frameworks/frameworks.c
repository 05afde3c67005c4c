/* The checkpoint that a path means, by the table of layouts: see frameworks.h. */
#include "formats/frameworks.h"

#include "base/core/mem.h"
#include "formats/source.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { DEEPEST = 6, FOLDERS_MOST = 64, LOOKS_MOST = 4096, NAMES_SHOWN = 5, HEAD = 64 };

/* --- patterns --------------------------------------------------------------------------------- */

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* The pattern ends at `end`. The depth of the recursion is the number of '*' in it. */
static bool match(const char *pattern, const char *end, const char *name, int64_t *number)
{
    for (; pattern < end; pattern++) {
        if (*pattern == '*') {
            do
                if (match(pattern + 1, end, name, number))
                    return true;
            while (*name++);
            return false;
        }
        if (*pattern == '#') {
            int64_t value = 0;
            if (!is_digit(*name))
                return false;
            for (; is_digit(*name); name++)
                value = value < INT64_MAX / 10 - 1 ? value * 10 + (*name - '0') : value;
            *number = value;
            continue;
        }
        if (*pattern == '{') {
            if (!is_digit(*name))
                return false;
            name += strspn(name, "0123456789");
            while (pattern + 1 < end && *pattern != '}')
                pattern++;
            continue;
        }
        if (*name++ != *pattern)
            return false;
    }
    return *name == '\0';
}

bool fsdp_framework_matches(const char *list, const char *name, int64_t *number_out)
{
    int64_t number = -1;
    for (const char *at = list; at;) {
        const char *bar = strchr(at, '|');
        number = -1;
        if (match(at, bar ? bar : at + strlen(at), name, &number)) {
            if (number_out)
                *number_out = number;
            return true;
        }
        at = bar ? bar + 1 : NULL;
    }
    return false;
}

/* --- a directory ------------------------------------------------------------------------------- */

typedef struct seen_folder {
    fsdp_io *io;
    const char *path;
    fsdp_io_names names;
    fsdp_io_names members; /* of the row that fits, as they are opened */
    fsdp_framework_note note;
    void *context;
    int deeper; /* folders that the way may still go down from here */
    int *left;  /* listings and opens that the whole way may still make; -1: it wanted more */
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

static fsdp_status fail_several(const seen_folder *folder, const char *const *names, size_t count,
                                fsdp_error *err)
{
    fsdp_text text = {0};
    for (size_t i = 0; i < count && i < NAMES_SHOWN; i++) {
        char *path = fsdp_path_join(folder->path, names[i]);
        fsdp_text_addf(&text, "%s", i > 0 ? ", " : "");
        if (path)
            fsdp_text_add_quoted(&text, path); /* fsdp-convert makes a command line of it */
        text.failed = text.failed || !path;
        fsdp_free(path);
    }
    if (count > NAMES_SHOWN)
        fsdp_text_addf(&text, " and %zu more", count - NAMES_SHOWN);
    fsdp_status st = text.failed ? fsdp_fail_memory(err, folder->path)
                                 : fsdp_fail(err, FSDP_ERR_USAGE,
                                             "'%s' holds %zu checkpoints; name one of them: %s",
                                             folder->path, count, text.data);
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

/* "; optimizer left out: A, B", or "; left out: C" */
static void add_others(const seen_folder *folder, const char *others, bool is_optim,
                       fsdp_text *text)
{
    size_t shown = 0;
    for (size_t i = 0; i < folder->names.count; i++) {
        const char *name = folder->names.items[i];
        if (!fsdp_framework_matches(others, name, NULL) ||
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

static void tell(const seen_folder *folder, const char *member, const fsdp_framework_row *row)
{
    fsdp_text text = {0};
    if (!folder->note)
        return;
    fsdp_text_addf(&text, "'%s'%s%s%s is read as '%s'", folder->path, row ? " (" : "",
                   row ? row->made_by : "", row ? ")" : "", member);
    const char *others = row ? row->others : fsdp_framework_no_model;
    if (others) {
        add_others(folder, others, true, &text);
        add_others(folder, others, false, &text);
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

/* Does a step open? *is_good_out false: it is damaged, which err says. */
static fsdp_status try_step(const seen_folder *folder, const char *name, bool *is_good_out,
                            fsdp_error *err)
{
    char *path = fsdp_path_join(folder->path, name), *member = NULL;
    fsdp_source *source = NULL;
    const seen_folder way = {.io = folder->io, .deeper = folder->deeper - 1, .left = folder->left};
    fsdp_status st = path ? resolve(&way, path, &member, err) : fsdp_fail_memory(err, "a path");
    if (st == FSDP_OK && !may_look(folder))
        st = fail_looks(folder->path, err);
    if (st == FSDP_OK)
        st = fsdp_source_open(folder->io, member ? member : path, NULL, &source, err);
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

/* The newest step that opens. Where none does, the newest, so that its error is told. */
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

/* A member as it is opened: the file itself, or the pattern of rank files with its number. */
static char *spell_member(const char *member, const char *name, int64_t number)
{
    const char *hash = strchr(member, '#');
    fsdp_text text = {0};
    if (!strchr(member, '{'))
        return fsdp_strndup(name, strlen(name));
    if (!hash)
        return fsdp_strndup(member, strlen(member));
    fsdp_text_addf(&text, "%.*s%" PRId64 "%s", (int)(hash - member), member, number, hash + 1);
    char *spelled = text.failed ? NULL : fsdp_strndup(text.data, text.size);
    fsdp_text_release(&text);
    return spelled;
}

/* Rank files of one number stand side by side among the sorted names. */
static fsdp_status list_members(seen_folder *folder, const char *member, fsdp_error *err)
{
    fsdp_io_names *members = &folder->members;
    members->items = fsdp_alloc(folder->names.count, sizeof *members->items);
    if (!members->items)
        return fsdp_fail_memory(err, folder->path);
    for (size_t i = 0; i < folder->names.count; i++) {
        int64_t number;
        if (!fsdp_framework_matches(member, folder->names.items[i], &number))
            continue;
        char *spelled = spell_member(member, folder->names.items[i], number);
        if (!spelled)
            return fsdp_fail_memory(err, folder->path);
        if (members->count > 0 && strcmp(members->items[members->count - 1], spelled) == 0)
            fsdp_free(spelled);
        else
            members->items[members->count++] = spelled;
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
static fsdp_status find_next(seen_folder *folder, const char **name_out,
                             const fsdp_framework_row **row_out, fsdp_error *err)
{
    bool is_known = false;
    const fsdp_framework_row *row = *row_out = find_row(folder);
    *name_out = NULL;
    FSDP_TRY(check_pointers(folder, err));
    /* Hubs hold the same weights once more for other programs. */
    if (row && row->say && find(folder, "*.safetensors|pytorch_model*.bin"))
        row = *row_out = NULL;
    if (row && row->say)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "'%s' is a directory of %s: %s", folder->path,
                         row->made_by, row->say);
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

static fsdp_status step_down(seen_folder *folder, char **path, bool *is_end_out, fsdp_error *err)
{
    const char *name;
    const fsdp_framework_row *row;
    FSDP_TRY(find_next(folder, &name, &row, err));
    *is_end_out = name == NULL;
    if (!name)
        return FSDP_OK;
    tell(folder, name, row);
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

fsdp_status fsdp_framework_resolve(fsdp_io *io, const char *path, fsdp_framework_note note,
                                   void *context, char **path_out, fsdp_error *err)
{
    int left = LOOKS_MOST;
    const seen_folder way = {
        .io = io, .note = note, .context = context, .deeper = DEEPEST, .left = &left};
    return resolve(&way, path, path_out, err);
}

/* --- configurations ------------------------------------------------------------------------------ */

static bool holds_config(fsdp_io *io, const char *dir)
{
    bool is_there = false;
    for (size_t i = 0; fsdp_framework_config_names[i] && !is_there; i++) {
        char *path = fsdp_path_join(dir, fsdp_framework_config_names[i]);
        is_there = path && fsdp_io_exists(io, path);
        fsdp_free(path);
    }
    return is_there;
}

fsdp_status fsdp_framework_config(fsdp_io *io, const char *path, char **dir_out, fsdp_error *err)
{
    fsdp_file_info info;
    bool is_directory = io->ops->info(io, path, &info) == 0 && info.kind == FSDP_FILE_DIRECTORY;
    const char *slash = strrchr(path, '/');
    char *base = is_directory ? fsdp_strndup(path, strlen(path))
                 : slash      ? fsdp_strndup(path, (size_t)(slash - path))
                              : fsdp_strndup(".", 1);
    *dir_out = NULL;
    if (!base)
        return fsdp_fail_memory(err, "a path");
    for (size_t i = 0; fsdp_framework_configs[i] && !*dir_out; i++) {
        bool is_here = strcmp(fsdp_framework_configs[i], ".") == 0;
        char *dir = is_here ? fsdp_strndup(base, strlen(base))
                            : fsdp_path_join(base, fsdp_framework_configs[i]);
        if (dir && holds_config(io, dir))
            *dir_out = dir;
        else
            fsdp_free(dir);
    }
    fsdp_free(base);
    return FSDP_OK;
}
