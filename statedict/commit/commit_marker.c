/*
 * The marker of a directory that is being made: a small file in it that its process keeps locked.
 * When another process can lock it, the first one is dead and its directory may be removed.
 *
 * This holds only where a lock of a living process is visible. Some mounts do not share locks
 * between hosts, so the text names the host and the boot id, and markers of other machines are left
 * alone. The text is written after the lock is taken; an empty marker (no locks here, or killed in
 * between) is left alone as well.
 */
#include "statedict/commit/commit_internal.h"

#include "base/io/process.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { LOCK_TRIES = 200, TEXT_ROOM = 400 };

/* Writes the text of this process; empty when the system has no boot id. */
static void spell_maker(const fsdp_io *io, char text_out[TEXT_ROOM])
{
    fsdp_process self;
    fsdp_process_self(io->host, &self);
    text_out[0] = '\0';
    if (strcmp(self.boot, "unknown") != 0)
        snprintf(text_out, TEXT_ROOM, "boot %s\nhost %s\n", self.boot, self.host);
}

/* A marker of an earlier boot of this host counts as well: a restart ends all locks. */
static bool is_of_this_machine(const fsdp_io *io, const char *text)
{
    char local[TEXT_ROOM];
    spell_maker(io, local);
    const char *line = strchr(text, '\n'), *local_line = strchr(local, '\n');
    if (!line || !local_line || strncmp(text, "boot ", 5) != 0 || text[strlen(text) - 1] != '\n')
        return false;
    bool same_boot =
        line - text == local_line - local && strncmp(text, local, (size_t)(line - text)) == 0;
    return same_boot || strcmp(line, local_line) == 0;
}

/* Retries: a process that probes whether the marker is locked holds the lock for a moment. */
static int lock_patiently(fsdp_file *file)
{
    const struct timespec pause = {.tv_nsec = 10 * 1000 * 1000};
    int result = file->ops->lock(file);
    for (int i = 0; i < LOCK_TRIES && result == -EWOULDBLOCK; i++) {
        nanosleep(&pause, NULL);
        result = file->ops->lock(file);
    }
    return result;
}

/* A partial write is not continued: a text that is cut short is left alone like an empty one. */
static fsdp_status sign(const fsdp_io *io, fsdp_file *marker, const char *path, fsdp_error *err)
{
    char text[TEXT_ROOM];
    spell_maker(io, text);
    ssize_t n = marker->ops->pwrite(marker, text, strlen(text), 0);
    return n >= 0 ? FSDP_OK : fsdp_fail_errno(err, (int)-n, "cannot write '%s'", path);
}

fsdp_status fsdp_marker_create(fsdp_io *io, const char *dir, const char *name,
                               fsdp_file **marker_out, fsdp_error *err)
{
    *marker_out = NULL;
    char *path = fsdp_path_join(dir, name);
    if (!path)
        return fsdp_fail_memory(err, dir);
    fsdp_status status = fsdp_io_open(io, path, FSDP_IO_CREATE, marker_out, err);
    if (status == FSDP_OK && lock_patiently(*marker_out) == 0)
        status = sign(io, *marker_out, path, err);
    fsdp_free(path);
    return status;
}

static bool is_abandoned(const fsdp_io *io, fsdp_file *marker)
{
    char text[TEXT_ROOM];
    if (marker->ops->lock(marker) != 0)
        return false;
    ssize_t n = marker->ops->pread(marker, text, sizeof text - 1, 0);
    text[n > 0 ? n : 0] = '\0';
    return n > 0 && is_of_this_machine(io, text);
}

fsdp_marker_state fsdp_marker_look(fsdp_io *io, const char *dir, const char *name)
{
    fsdp_file *marker = NULL;
    char *path = fsdp_path_join(dir, name);
    if (!path)
        return FSDP_MARKER_UNKNOWN;
    fsdp_marker_state state = FSDP_MARKER_UNKNOWN;
    int result = io->ops->open(io, path, FSDP_IO_WRITE, &marker);
    if (result == 0)
        state = marker->ops->lock(marker) == -EWOULDBLOCK ? FSDP_MARKER_HELD : FSDP_MARKER_FREE;
    else if (result == -ENOENT || result == -ENOTDIR)
        state = FSDP_MARKER_MISSING;
    (void)fsdp_io_close(&marker, path, NULL);
    fsdp_free(path);
    return state;
}

void fsdp_marker_remove(fsdp_io *io, const char *dir, const char *name)
{
    char *path = fsdp_path_join(dir, name);
    if (path)
        io->ops->unlink(io, path);
    fsdp_free(path);
}

/* A marker protects a staging directory; in a published checkpoint it has no meaning. */
bool fsdp_marker_forget(fsdp_io *io, const char *dir)
{
    if (fsdp_dir_is_staging(dir) ||
        fsdp_marker_look(io, dir, FSDP_MARKER_SAVING) != FSDP_MARKER_FREE ||
        !fsdp_has_manifest(io, dir))
        return false;
    fsdp_marker_remove(io, dir, FSDP_MARKER_SAVING);
    return fsdp_marker_look(io, dir, FSDP_MARKER_SAVING) == FSDP_MARKER_MISSING;
}

bool fsdp_marker_take_over(fsdp_io *io, const char *dir, const char *name, fsdp_file **marker_out)
{
    char *path = fsdp_path_join(dir, name);
    *marker_out = NULL;
    bool abandoned = path && io->ops->open(io, path, FSDP_IO_WRITE, marker_out) == 0 &&
                     is_abandoned(io, *marker_out);
    if (!abandoned)
        (void)fsdp_io_close(marker_out, dir, NULL);
    fsdp_free(path);
    return abandoned;
}
