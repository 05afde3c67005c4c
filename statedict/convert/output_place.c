/* Files and directories for other programs, whole or not at all: see output_place.h. */
#include "statedict/convert/output_place.h"

#include "base/core/mem.h"
#include "base/data/json.h"
#include "formats/source.h"
#include "statedict/checkpoint/checkpoint_internal.h"
#include "statedict/commit/commit_internal.h"
#include "statedict/convert/copied.h"
#include "statedict/commit/leftovers.h"

#include <errno.h>
#include <string.h>

enum { FOLDERS = 4, RECORD_MOST = 1 << 20 };

/* --- earlier copies --------------------------------------------------------------------------- */

/* Finds the text of "fsdp.copied" in the metadata. */
static fsdp_status find_record(const char *metadata, const char *dir, fsdp_text *out,
                               fsdp_error *err)
{
    static const char *const names[] = {"fsdp.copied"};
    fsdp_json_members members = {.names = names, .count = 1};
    fsdp_json json;
    int which = 0;
    fsdp_json_init(&json, metadata, strlen(metadata), dir);
    fsdp_status st = fsdp_json_enter_object(&json, err);
    while (st == FSDP_OK) {
        const char *data;
        size_t size;
        st = fsdp_json_next_member(&json, &members, &which, err);
        if (st != FSDP_OK || which < 0)
            break;
        st = fsdp_json_string(&json, &data, &size, err);
        if (st == FSDP_OK && size <= RECORD_MOST)
            fsdp_text_add(out, data, size);
    }
    fsdp_json_release(&json);
    return st;
}

/* The name of a record may be anything. */
static bool is_plain(const char *name)
{
    bool is_out = name[0] == '/' || strcmp(name, "..") == 0 || strncmp(name, "../", 3) == 0 ||
                  strstr(name, "/../") || strstr(name, "/./");
    return !is_out && (strchr(name, '/') || fsdp_copied_name(name, true));
}

static bool is_still(fsdp_io *io, const char *dir, const char *name, const char *digits)
{
    fsdp_hash hash;
    fsdp_text now = {0};
    char *path = fsdp_path_join(dir, name);
    bool is_same = path && is_plain(name) && fsdp_copied_hash(io, path, &hash, NULL) == FSDP_OK;
    if (is_same)
        fsdp_text_add_hex(&now, hash.bytes, sizeof hash.bytes);
    is_same = is_same && now.data && strcmp(now.data, digits) == 0;
    fsdp_text_release(&now);
    fsdp_free(path);
    return is_same;
}

static fsdp_status add_ours(fsdp_io *io, const char *dir, fsdp_json *json, fsdp_io_names *names,
                            bool *more_out, fsdp_error *err)
{
    const char *data, *digits;
    size_t size;
    FSDP_TRY(fsdp_json_next_key(json, &data, &size, more_out, err));
    if (!*more_out)
        return FSDP_OK;
    char *name = fsdp_arena_strndup(&names->arena, data, size);
    FSDP_TRY(fsdp_json_string(json, &digits, &size, err));
    if (!name || !fsdp_grow(&names->items, &names->capacity, names->count + 1, sizeof(char *)))
        return fsdp_fail_memory(err, "a list of files");
    names->items[names->count] = name;
    names->count += is_still(io, dir, name, digits);
    return FSDP_OK;
}

static fsdp_status read_record(fsdp_io *io, const char *dir, const fsdp_text *record,
                               fsdp_io_names *names, fsdp_error *err)
{
    fsdp_json json;
    bool more = true;
    fsdp_json_init(&json, record->data, record->size, dir);
    fsdp_status st = fsdp_json_enter_object(&json, err);
    while (st == FSDP_OK && more)
        st = add_ours(io, dir, &json, names, &more, err);
    fsdp_json_release(&json);
    return st;
}

/* Lists the names in a directory that its record has and that are unchanged since the copy. A record that
 * cannot be read lists no file. */
static void list_ours(fsdp_io *io, const char *dir, fsdp_io_names *names)
{
    fsdp_source *source = NULL;
    fsdp_source_opts opts = {.format = "hf"};
    fsdp_text record = {0};
    if (fsdp_source_open(io, dir, &opts, &source, NULL) != FSDP_OK)
        return;
    const char *metadata = fsdp_source_extra(source, "metadata");
    fsdp_status st = metadata ? find_record(metadata, dir, &record, NULL) : FSDP_DIFFERS;
    if (st == FSDP_OK && record.size > 0 && !record.failed)
        st = read_record(io, dir, &record, names, NULL);
    if (st != FSDP_OK)
        names->count = 0;
    fsdp_text_release(&record);
    fsdp_source_close(source);
}

/* --- checking the destination ----------------------------------------------------------------- */

typedef struct extra_search {
    const fsdp_output_place *place;
    const char *to;
    fsdp_io_names copied; /* files that an earlier conversion copied */
    char *found;
} extra_search;

static bool was_copied(const extra_search *search, const char *name)
{
    for (size_t i = 0; i < search->copied.count; i++)
        if (strcmp(search->copied.items[i], name) == 0)
            return true;
    return false;
}

/* A folder is ours when all files in it are. */
static bool is_ours(const extra_search *search, const char *name, int depth)
{
    fsdp_io *io = search->place->io;
    fsdp_io_names names = {0};
    bool is_it = false;
    if (was_copied(search, name))
        return true;
    char *path = fsdp_path_join(search->to, name);
    if (path && depth > 0 && fsdp_io_list_names(io, path, NULL, NULL, &names, NULL) == FSDP_OK)
        is_it = names.count > 0;
    for (size_t i = 0; i < names.count && is_it; i++) {
        char *below = fsdp_path_join(name, names.items[i]);
        is_it = below && is_ours(search, below, depth - 1);
        fsdp_free(below);
    }
    fsdp_io_names_release(&names);
    fsdp_free(path);
    return is_it;
}

static int find_extra(void *context, const char *name)
{
    extra_search *search = context;
    if (search->place->format->writer->owns(name) || is_ours(search, name, FOLDERS))
        return 0;
    search->found = fsdp_strndup(name, strlen(name));
    return 1;
}

static fsdp_status require_no_extras(const fsdp_output_place *place, const char *to,
                                     fsdp_error *err)
{
    extra_search search = {.place = place, .to = to};
    if (place->format->caps.copies_files)
        list_ours(place->io, to, &search.copied);
    int result = place->io->ops->list(place->io, to, find_extra, &search);
    fsdp_io_names_release(&search.copied);
    if (result < 0)
        return fsdp_fail_errno(err, -result, "cannot list '%s'", to);
    if (!search.found)
        return FSDP_OK;
    bool could_be = fsdp_copied_name(search.found, true);
    fsdp_fail(
        err, FSDP_ERR_EXISTS,
        "cannot overwrite '%s': it holds '%s', which is not of format %s%s; move that away first",
        to, search.found, place->format->name,
        could_be ? " or was changed since it was copied" : "");
    fsdp_free(search.found);
    return FSDP_ERR_EXISTS;
}

/* A file of another kind was named by mistake; an empty one loses nothing. */
static fsdp_status require_checkpoint(const fsdp_output_place *place, const char *to,
                                      fsdp_error *err)
{
    fsdp_file_info info;
    bool is_known;
    if (place->io->ops->info(place->io, to, &info) == 0 && info.size == 0)
        return FSDP_OK;
    FSDP_TRY(fsdp_source_recognise(place->io, to, &is_known, err));
    return is_known
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_EXISTS,
                           "cannot overwrite '%s': it is not a checkpoint; move it away first", to);
}

static fsdp_status check_name(const fsdp_output_place *place, const char *to, fsdp_error *err)
{
    fsdp_file_info info;
    bool directory = place->format->writes_directory;
    FSDP_TRY(fsdp_place_check_parent(place->io, to, err));
    FSDP_TRY(fsdp_place_refuse_link(place->io, to, err));
    int result = place->io->ops->info(place->io, to, &info);
    if (result == -ENOENT)
        return FSDP_OK;
    if (result < 0)
        return fsdp_fail_errno(err, -result, "cannot stat '%s'", to);
    if ((info.kind == FSDP_FILE_DIRECTORY) != directory || info.kind == FSDP_FILE_OTHER)
        return fsdp_fail(err, FSDP_ERR_EXISTS, "'%s' exists and is not a %s", to,
                         directory ? "directory" : "file");
    if (!place->overwrite)
        return fsdp_fail(err, FSDP_ERR_EXISTS, "'%s' exists", to);
    return directory ? require_no_extras(place, to, err) : require_checkpoint(place, to, err);
}

/* An overwrite must not replace its source. A step of a run is always a native checkpoint. */
fsdp_status fsdp_output_check(const fsdp_output_place *place, const fsdp_checkpoint *from,
                              const char *to, fsdp_error *err)
{
    int64_t step;
    if (fsdp_dir_is_step(to, &step))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' is the name of a step of a run, but a run has no checkpoints of "
                         "format %s; use another name",
                         to, place->format->name);
    if (fsdp_paths_are_same(place->io, from->path, to))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' and '%s' are the same checkpoint; convert to another path",
                         from->path, to);
    FSDP_TRY(fsdp_checkpoint_refuse_inside(from, to, err));
    if (fsdp_checkpoint_lies_in(from, to))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' is inside '%s', which would be replaced; convert to another path",
                         from->path, to);
    if (fsdp_checkpoint_reads(from, to))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' is a file of the source '%s'; convert to another path", to,
                         from->path);
    return check_name(place, to, err);
}

/* --- begin ------------------------------------------------------------------------------------ */

/* The result lies one level down, so that a file, too, has a marker beside it, which is never published. */
#define RESULT_NAME "result"

static fsdp_status make_result(fsdp_output_place *place, fsdp_error *err)
{
    char *path = fsdp_path_join(place->staging, RESULT_NAME);
    if (!path)
        return fsdp_fail_memory(err, "a path");
    place->path = path;
    bool is_there = place->is_taken_up && fsdp_io_exists(place->io, path);
    return place->format->writes_directory && !is_there ? fsdp_io_mkdir(place->io, path, err)
                                                        : FSDP_OK;
}

static bool put_back(void *context, const char *path)
{
    const fsdp_output_place *place = context;
    /* such file systems have no rename that refuses to replace either; an empty directory is no loss */
    return place->io->ops->rename(place->io, path, place->target, true) != 0;
}

/* Without an exchange of names a kill may come between the two renames of an overwrite, which
 * leaves DST at DST.old-UUID. */
static void restore_replaced(fsdp_output_place *place)
{
    if (place->format->writes_directory && !fsdp_io_exists(place->io, place->target))
        (void)fsdp_beside_each(place->io, place->target, FSDP_SUFFIX_REPLACED, put_back, place);
}

/* Removes the journal before the exchange: afterwards the staging holds the old DST, and must
 * not be resumed. */
static void forget_notes(fsdp_output_place *place)
{
    fsdp_resume_end(&place->notes);
    fsdp_marker_remove(place->io, place->staging, FSDP_RESUME_NAME);
}

/* Sets the unit to that of the resumed conversion, if memory allows. Otherwise its records are useless, and a
 * new journal is begun. */
static void agree_on_unit(fsdp_output_place *place)
{
    int64_t noted = place->notes.unit;
    if (!place->is_taken_up || noted == place->unit)
        return;
    if (noted >= place->unit_least && noted < place->unit) {
        place->unit = noted;
        return;
    }
    forget_notes(place);
    fsdp_resume_begin(&place->notes, place->io, place->staging, place->hash, place->unit, false);
}

fsdp_status fsdp_output_begin(fsdp_output_place *place, const char *to, fsdp_error *err)
{
    FSDP_TRY(fsdp_path_split(to, &place->target, &place->parent, err));
    restore_replaced(place);
    FSDP_TRY(check_name(place, to, err));
    fsdp_leftovers_clear(place->io, place->target, place->parent,
                         place->resume ? place->hash : NULL, &place->staging, &place->marker);
    place->is_taken_up = place->staging != NULL;
    if (!place->staging)
        FSDP_TRY(fsdp_staging_make(place->io, place->target, &place->staging, &place->marker, err));
    if (place->hash) {
        fsdp_resume_begin(&place->notes, place->io, place->staging, place->hash, place->unit,
                          place->is_taken_up);
        agree_on_unit(place);
    }
    return make_result(place, err);
}

/* --- publish ---------------------------------------------------------------------------------- */

/* The old file stays until the new one is durable, where two names can be exchanged. */
static fsdp_status replace_file(const fsdp_swap *swap, fsdp_error *err)
{
    fsdp_io *io = swap->io;
    bool is_exchanged = io->ops->exchange(io, swap->path, swap->target) == 0;
    if (!is_exchanged)
        FSDP_TRY(fsdp_io_rename(io, swap->path, swap->target, true, err));
    fsdp_status status = fsdp_swap_sync(swap, err);
    if (status != FSDP_OK && is_exchanged)
        (void)io->ops->exchange(io, swap->path, swap->target);
    return status;
}

static fsdp_status take_place(fsdp_output_place *place, fsdp_error *err)
{
    fsdp_swap swap = {.io = place->io,
                      .path = place->path,
                      .target = place->target,
                      .parent = place->parent,
                      .folder = place->staging,
                      .durable = place->durable};
    bool is_old;
    FSDP_TRY(
        fsdp_place_forget_digests(place->io, place->target, place->parent, place->durable, err));
    if (!place->overwrite || !fsdp_io_exists(place->io, place->target))
        return fsdp_swap_new(&swap, err);
    if (!place->format->writes_directory)
        return replace_file(&swap, err);
    FSDP_TRY(check_name(place, place->target, err)); /* DST may have changed */
    fsdp_status status = fsdp_swap_replace(&swap, &is_old, err);
    if (is_old) { /* it is in the staging directory, which stays */
        fsdp_free(place->staging);
        place->staging = NULL;
    }
    return status;
}

fsdp_status fsdp_output_publish(fsdp_output_place *place, fsdp_error *err)
{
    forget_notes(place);
    if (place->durable && place->format->writes_directory)
        FSDP_TRY(fsdp_io_sync_dir(place->io, place->path, err));
    if (place->durable)
        FSDP_TRY(fsdp_io_sync_dir(place->io, place->staging, err));
    FSDP_TRY(take_place(place, err));
    fsdp_free(place->path);
    place->path = NULL;
    return FSDP_OK;
}

void fsdp_output_end(fsdp_output_place *place, fsdp_error *err)
{
    bool stays = place->resume && place->path && place->notes.file;
    fsdp_resume_end(&place->notes);
    if (place->staging && !stays)
        fsdp_leftovers_discard(place->io, place->staging, place->target, &place->marker, err);
    (void)fsdp_io_close(&place->marker, FSDP_MARKER_SAVING, NULL); /* no data can be lost */
    fsdp_free(place->path);
    fsdp_free(place->staging);
    fsdp_free(place->target);
    fsdp_free(place->parent);
    place->path = place->staging = place->target = place->parent = NULL;
}
