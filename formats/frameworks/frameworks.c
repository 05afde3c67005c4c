/* The checkpoint that a path means, by the table of layouts: see frameworks.h. */
#include "formats/frameworks/framework_folder.h"

#include "base/core/mem.h"

#include <stdlib.h>
#include <string.h>

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
        FSDP_TRY(fsdp_folder_kind(here, here->names.items[i], &kind, err));
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
    fsdp_status st = path ? fsdp_folder_look(&here, err) : fsdp_fail_memory(err, "a path");
    if (st == FSDP_OK)
        *is_known_out = fsdp_folder_row(&here) || fsdp_folder_steps(&here);
    if (st == FSDP_OK && !*is_known_out && fsdp_folder_may_look(&here))
        st = fsdp_source_recognise(here.io, path, is_known_out, err);
    for (size_t i = 0; i < here.names.count && !*is_known_out; i++)
        *is_known_out = fsdp_folder_is_weights(here.names.items[i]);
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
    FSDP_TRY(fsdp_folder_kind(folder, name, &kind, err));
    if (kind == FSDP_FILE_DIRECTORY)
        return is_promising(folder, name, 2, may_be_out, err);
    *may_be_out = kind == FSDP_FILE_REGULAR && fsdp_folder_is_weights(name);
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
        return fsdp_folder_fail_several(folder, names, count, err);
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
        st = fsdp_folder_open(folder, name, NULL, &is_whole, &source, err);
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
    *name_out = fsdp_folder_find(folder, steps);
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
        fsdp_folder_note_skipped(folder, name, why.text);
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
        return fsdp_folder_pointed(folder, row, name_out, err);
    if (fsdp_folder_is_model(row)) {
        *name_out = fsdp_folder_is_alone(folder->path) ? NULL : row->member;
        return FSDP_OK;
    }
    FSDP_TRY(list_members(folder, row->member, err));
    const fsdp_io_names *members = &folder->members;
    if (members->count > 1 && row->counts_models)
        return fsdp_folder_fail_several(folder, (const char *const *)members->items, members->count,
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
    const fsdp_framework_row *row = fsdp_folder_row(folder);
    *name_out = NULL;
    FSDP_TRY(fsdp_folder_check(folder, err));
    if (row && (row->say || row->yields) &&
        fsdp_folder_find(folder, "*.safetensors|pytorch_model*.bin"))
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
    const char *steps = fsdp_folder_steps(folder);
    return steps ? find_newest(folder, steps, name_out, err) : find_only(folder, name_out, err);
}

/* Notes what is read; true in *is_whole_out: the row with all of its parts, where the resolution ends. */
static fsdp_status note_choice(const fsdp_folder *folder, const char *name, bool *is_whole_out,
                               fsdp_error *err)
{
    char *parts[FSDP_FRAMEWORK_PARTS], *there[FSDP_FRAMEWORK_PARTS];
    size_t count;
    fsdp_io_names told = {.items = there};
    fsdp_status st = fsdp_folder_parts(folder, name, parts, &count, err);
    for (int i = 0; i < FSDP_FRAMEWORK_PARTS && folder->whole; i++)
        if (parts[i])
            there[told.count++] = parts[i];
    if (st == FSDP_OK)
        fsdp_folder_note_choice(folder, name, &told);
    *is_whole_out = told.count > 0;
    fsdp_folder_parts_release(parts);
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
        st = fsdp_folder_info(io, at, &kind, &is_there, err);
        if (st != FSDP_OK || !is_there)
            break; /* a pattern of rank files is not a file */
        if (kind != FSDP_FILE_DIRECTORY) {
            st = fsdp_folder_check_file(io, at, err);
            break;
        }
        char *next = fsdp_strndup(at, strlen(at));
        st = next ? fsdp_folder_look(&folder, err) : fsdp_fail_memory(err, "a path");
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
    FSDP_TRY(fsdp_folder_look(folder, err));
    folder->row = fsdp_folder_row(folder);
    *is_whole_out = folder->row && folder->row->shards;
    if (*is_whole_out)
        return fsdp_folder_open_shards(folder, opts, source_out, err);
    if (!folder->row || !folder->row->member || !folder->row->parts[0].names)
        return FSDP_OK;
    FSDP_TRY(find_member(folder, folder->row, &name, err));
    return name ? fsdp_folder_open(folder, name, opts, is_whole_out, source_out, err) : FSDP_OK;
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
    fsdp_status st = fsdp_folder_info(io, path, &kind, &is_there, err);
    if (st == FSDP_OK && !(opts && opts->format) && kind == FSDP_FILE_DIRECTORY)
        st = open_folder(&folder, opts, &is_whole, source_out, err);
    fsdp_io_names_release(&folder.members);
    fsdp_io_names_release(&folder.names);
    return st == FSDP_OK && !is_whole ? fsdp_source_open(io, path, opts, source_out, err) : st;
}
