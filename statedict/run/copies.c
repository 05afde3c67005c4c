/*
 * Copies of a run's steps in other formats, RUN/hf/N and RUN/dcp/N: fsdp-train makes them (save.also). They
 * go with their steps, in front of them, so that a kill leaves no copy of a step that is gone; and what a
 * killed conversion left goes like that of a killed save. Part of retention, under the lease of the run.
 */
#include "statedict/run/copies.h"

#include "base/core/mem.h"
#include "statedict/commit/commit_internal.h"
#include "statedict/commit/leftovers.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { DIGITS = 8, NAME_SIZE = 32 };

/* The files that a format is known by: a directory without them is none of ours. */
static const struct {
    const char *folder, *files[2];
} formats[FSDP_COPY_FORMATS] = {{"dcp", {".metadata"}},
                                {"hf", {"model.safetensors", "model.safetensors.index.json"}}};

static bool has_file(fsdp_io *io, const char *dir, const char *name)
{
    char *path = name ? fsdp_path_join(dir, name) : NULL;
    bool is_there = path && fsdp_io_exists(io, path);
    fsdp_free(path);
    return is_there;
}

/* A copy is a directory, not a link to one. */
static bool is_copy(fsdp_io *io, const char *path, int format)
{
    fsdp_file_info info;
    return io->ops->info(io, path, &info) == 0 && info.kind == FSDP_FILE_DIRECTORY &&
           fsdp_place_refuse_link(io, path, NULL) == FSDP_OK &&
           (has_file(io, path, formats[format].files[0]) ||
            has_file(io, path, formats[format].files[1]));
}

static int note_folder(void *context, const char *name)
{
    fsdp_run_copies *copies = context;
    for (int i = 0; i < FSDP_COPY_FORMATS; i++)
        copies->has_folder[i] = copies->has_folder[i] || strcmp(name, formats[i].folder) == 0;
    return 0;
}

void fsdp_run_copies_look(fsdp_run_copies *copies)
{
    (void)copies->io->ops->list(copies->io, copies->run, note_folder, copies);
}

static char *folder_path(const fsdp_run_copies *copies, int format)
{
    return copies->has_folder[format] ? fsdp_path_join(copies->run, formats[format].folder) : NULL;
}

static void emit(const fsdp_run_copies *copies, int format, const char *name, bool is_removed,
                 const char *reason)
{
    char *path = fsdp_path_join(formats[format].folder, name);
    if (path && copies->report)
        copies->report(copies->context, path, is_removed, reason);
    fsdp_free(path);
}

void fsdp_run_copies_remove(const fsdp_run_copies *copies, int64_t step)
{
    char name[NAME_SIZE], reason[2 * NAME_SIZE];
    snprintf(name, sizeof name, "%0*" PRId64, DIGITS, step);
    snprintf(reason, sizeof reason, "copy of step-%s", name);
    for (int i = 0; i < FSDP_COPY_FORMATS; i++) {
        char *folder = folder_path(copies, i);
        char *path = folder ? fsdp_path_join(folder, name) : NULL;
        if (path && is_copy(copies->io, path, i)) {
            bool is_gone =
                !copies->applies || fsdp_delete_as(copies->io, path, folder, path, NULL) == FSDP_OK;
            emit(copies, i, name, is_gone, is_gone ? reason : "cannot be removed");
        }
        fsdp_free(path);
        fsdp_free(folder);
    }
}

/* --- leftovers -------------------------------------------------------------------------------- */

/* The name of the copy that a conversion was making, or a removal was emptying. */
static bool is_leftover(const char *name, char copy_out[NAME_SIZE])
{
    const size_t digits = strspn(name, "0123456789");
    const char *suffix = name + digits;
    if (digits < DIGITS || digits >= NAME_SIZE)
        return false;
    memcpy(copy_out, name, digits);
    copy_out[digits] = '\0';
    return strncmp(suffix, FSDP_SUFFIX_STAGING, strlen(FSDP_SUFFIX_STAGING)) == 0 ||
           strncmp(suffix, FSDP_SUFFIX_DELETING, strlen(FSDP_SUFFIX_DELETING)) == 0;
}

static bool is_at_work(fsdp_io *io, const char *path)
{
    fsdp_marker_state state = fsdp_marker_look(io, path, FSDP_MARKER_SAVING);
    return state == FSDP_MARKER_HELD || state == FSDP_MARKER_UNKNOWN;
}

/* A marker that its process was killed before it signed. The lease of the run is held here, so that no
 * other training is about to sign it. */
static void remove_unsigned(fsdp_io *io, const char *path)
{
    fsdp_file_info info = {0};
    char *marker = fsdp_path_join(path, FSDP_MARKER_SAVING);
    if (marker && fsdp_marker_look(io, path, FSDP_MARKER_SAVING) == FSDP_MARKER_FREE &&
        io->ops->info(io, marker, &info) == 0 && info.size == 0)
        fsdp_marker_remove(io, path, FSDP_MARKER_SAVING);
    fsdp_free(marker);
}

/* A process that made the directory and has no marker in it yet makes another one. */
static void clear(fsdp_io *io, const char *path, const char *copy, const char *folder)
{
    char *kept = NULL;
    fsdp_file *marker = NULL;
    fsdp_leftovers_clear(io, copy, folder, NULL, &kept, &marker);
    remove_unsigned(io, path);
    (void)io->ops->rmdir(io, path);
}

static void clear_one(const fsdp_run_copies *copies, int format, const char *folder,
                      const char *name)
{
    char copy_name[NAME_SIZE];
    if (!is_leftover(name, copy_name))
        return;
    char *path = fsdp_path_join(folder, name), *copy = fsdp_path_join(folder, copy_name);
    if (path && copy && fsdp_io_exists(copies->io, path)) {
        if (copies->applies)
            clear(copies->io, path, copy, folder);
        bool is_gone =
            copies->applies ? !fsdp_io_exists(copies->io, path) : !is_at_work(copies->io, path);
        emit(copies, format, name, is_gone,
             is_gone ? "interrupted conversion" : "a conversion in progress");
    }
    fsdp_free(path);
    fsdp_free(copy);
}

void fsdp_run_copies_clear(const fsdp_run_copies *copies)
{
    for (int i = 0; i < FSDP_COPY_FORMATS; i++) {
        fsdp_io_names names = {0};
        char *folder = folder_path(copies, i);
        if (folder && fsdp_place_refuse_link(copies->io, folder, NULL) == FSDP_OK &&
            fsdp_io_list_names(copies->io, folder, NULL, NULL, &names, NULL) == FSDP_OK)
            for (size_t k = 0; k < names.count; k++)
                clear_one(copies, i, folder, names.items[k]);
        fsdp_io_names_release(&names);
        fsdp_free(folder);
    }
}
