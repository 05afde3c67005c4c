/*
 * The files of a foreign checkpoint. Their number may exceed the limit of open files (a DCP
 * writer can make one per tensor), so the least recently used are closed and opened again; a
 * file that was replaced in between is an error, so that no read mixes two versions.
 */
#include "formats/source/source_internal.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { MOST_OPEN = 256, LONGEST_PATH = 4096, DEEPEST_FOLDER = 4 };

size_t fsdp_source_file_count(const fsdp_source *source)
{
    return source->file_count;
}

size_t fsdp_source_content_count(const fsdp_source *source)
{
    return source->file_count - source->noted_count;
}

const char *fsdp_source_file_path(const fsdp_source *source, size_t number)
{
    return source->files[number].path;
}

int64_t fsdp_source_file_size(const fsdp_source *source, size_t number)
{
    return source->files[number].info.size;
}

const fsdp_file_info *fsdp_source_file_info(const fsdp_source *source, size_t number)
{
    return &source->files[number].info;
}

/* --- code ------------------------------------------------------------------------------------- */

const char *fsdp_source_code_at(const fsdp_source *source, size_t file, size_t number)
{
    return number < FSDP_SOURCE_CODE ? source->files[file].code[number] : NULL;
}

fsdp_status fsdp_source_note_code(fsdp_source *source, int file, const char *name, fsdp_error *err)
{
    const char **code = source->files[file].code;
    char shown[200];
    size_t i = 0;
    fsdp_printable(name, strlen(name), shown, sizeof shown);
    while (i < FSDP_SOURCE_CODE && code[i] && strcmp(code[i], shown) != 0)
        i++;
    if (i == FSDP_SOURCE_CODE || code[i])
        return FSDP_OK;
    code[i] = fsdp_arena_strndup(&source->arena, shown, strlen(shown));
    return code[i] ? FSDP_OK : fsdp_fail_memory(err, "a name");
}

/* --- links ------------------------------------------------------------------------------------ */

static bool same_node(const fsdp_file_info *a, const fsdp_file_info *b)
{
    return a->device == b->device && a->node == b->node;
}

/* True for "a/b" without empty parts, "." and "..". The parts are checked one after another. */
static bool is_clean(const char *name)
{
    for (const char *part = name;; part++) {
        size_t size = strcspn(part, "/");
        if (size == 0 || (size == 1 && part[0] == '.') ||
            (size == 2 && part[0] == '.' && part[1] == '.'))
            return false;
        part += size;
        if (*part == '\0')
            return strchr(name, '\\') == NULL;
    }
}

/* The folders between the checkpoint and the file must not be links, as the file must not be one: beyond a
 * link, ".." has another meaning. */
static fsdp_status check_folders(fsdp_io *io, size_t root_size, const char *path, fsdp_error *err)
{
    char text[LONGEST_PATH];
    for (size_t end = root_size;;) {
        size_t next = end + 1 + strcspn(path + end + 1, "/");
        if (path[next] == '\0')
            return FSDP_OK;
        if (next >= sizeof text)
            return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s': the path is too long", path);
        snprintf(text, sizeof text, "%.*s", (int)next, path);
        FSDP_TRY(fsdp_io_check_link(io, text, err));
        end = next;
    }
}

typedef struct blob_search {
    fsdp_io *io;
    const char *directory;
    fsdp_file_info wanted;
    bool is_found;
} blob_search;

/* A blob must be a regular file: a link in its place could lead anywhere. */
static bool is_link(fsdp_io *io, const char *path)
{
    fsdp_file *file = NULL;
    int result = io->ops->open(io, path, FSDP_IO_READ | FSDP_IO_BENEATH, &file);
    (void)fsdp_io_close(&file, path, NULL); /* read only: a failed close loses nothing */
    return result < 0;
}

static int compare_blob(void *context, const char *name)
{
    blob_search *search = context;
    char *path = fsdp_path_join(search->directory, name);
    fsdp_file_info info;
    if (path && search->io->ops->info(search->io, path, &info) == 0 &&
        info.kind == FSDP_FILE_REGULAR && same_node(&info, &search->wanted) &&
        !is_link(search->io, path))
        search->is_found = true;
    fsdp_free(path);
    return search->is_found;
}

/* True when `name` in the directory `above` is the directory `here` itself, not a link to it. */
static bool is_child(fsdp_io *io, const char *above, const char *name, const char *here)
{
    fsdp_file_info wanted, found, parent, outer;
    char *path = fsdp_path_join(above, name);
    char *back = path ? fsdp_path_join(path, "..") : NULL;
    bool is_there = back && io->ops->info(io, here ? here : path, &wanted) == 0 &&
                    io->ops->info(io, path, &found) == 0 && same_node(&wanted, &found) &&
                    io->ops->info(io, back, &parent) == 0 &&
                    io->ops->info(io, above, &outer) == 0 && same_node(&parent, &outer);
    fsdp_free(path);
    fsdp_free(back);
    return is_there;
}

/* up: the directory of the source and some "/..". */
static bool is_blob_above(const fsdp_source *source, const char *up, const fsdp_file_info *target)
{
    char *repository = fsdp_path_join(up, "..");
    char *blobs = repository ? fsdp_path_join(repository, "blobs") : NULL;
    bool is_found = false;
    if (blobs && is_child(source->io, repository, "snapshots", up) &&
        is_child(source->io, repository, "blobs", NULL)) {
        blob_search search = {.io = source->io, .directory = blobs, .wanted = *target};
        source->io->ops->list(source->io, blobs, compare_blob, &search);
        is_found = search.is_found;
    }
    fsdp_free(repository);
    fsdp_free(blobs);
    return is_found;
}

/* True when the link's target is a blob of a Hugging Face cache, and the source is
 * snapshots/REVISION or a folder in it. */
static bool is_cached_blob(const fsdp_source *source, const fsdp_file_info *target)
{
    char up[LONGEST_PATH];
    bool is_found = false;
    size_t size = strlen(source->path);
    if (size + 3 * DEEPEST_FOLDER >= sizeof up)
        return false;
    memcpy(up, source->path, size + 1);
    for (int depth = 0; depth < DEEPEST_FOLDER && !is_found; depth++) {
        strcat(up, "/..");
        is_found = is_blob_above(source, up, target);
    }
    return is_found;
}

static fsdp_status open_beneath(fsdp_source *source, source_file *file, fsdp_error *err)
{
    size_t root = strlen(source->path);
    while (root > 0 && source->path[root - 1] == '/')
        root--;
    bool is_below = strncmp(file->path, source->path, root) == 0 && file->path[root] == '/';
    size_t name = strlen(source->path) + (source->path[root] == '\0');
    if (!is_below || name > strlen(file->path) || !is_clean(file->path + name))
        return fsdp_fail(err, FSDP_ERR_REFUSED, "'%s' is not a plain relative path below '%s'",
                         file->path, source->path);
    if (source->io->trust & FSDP_TRUST_LINKS)
        return fsdp_io_open(source->io, file->path, FSDP_IO_READ, &file->file, err);
    FSDP_TRY(check_folders(source->io, name - 1, file->path, err));
    fsdp_error why = {0};
    fsdp_status status =
        fsdp_io_open(source->io, file->path, FSDP_IO_READ | FSDP_IO_BENEATH, &file->file, &why);
    if (status == FSDP_OK)
        return FSDP_OK;
    fsdp_file_info target;
    if (why.errnum == ELOOP && source->io->ops->info(source->io, file->path, &target) == 0 &&
        is_cached_blob(source, &target))
        return fsdp_io_open(source->io, file->path, FSDP_IO_READ, &file->file, err);
    if (err)
        *err = why;
    return status;
}

/* --- open files ------------------------------------------------------------------------------- */

static void close_one(fsdp_source *source, source_file *file)
{
    (void)fsdp_io_close(&file->file, file->path, NULL); /* only read: nothing can be lost */
    source->open_count--;
}

/* Closes a file without readers, the least recently used first; false when there is none. */
static bool close_some_file(fsdp_source *source)
{
    for (int round = 0; round < 2; round++) {
        for (size_t i = 0; i < source->file_count; i++) {
            source_file *file = &source->files[i];
            if (!file->file || file->pins > 0)
                continue;
            if (!file->was_used) {
                close_one(source, file);
                return true;
            }
            file->was_used = false;
        }
    }
    return false;
}

static fsdp_status open_file(fsdp_source *source, source_file *file, fsdp_error *err)
{
    if (source->open_count >= MOST_OPEN)
        (void)close_some_file(source);
    for (;;) {
        fsdp_error why = {0};
        fsdp_status status = file->is_beneath ? open_beneath(source, file, &why)
                                              : fsdp_io_open(source->io, file->path, FSDP_IO_READ,
                                                             &file->file, &why);
        bool is_full = why.errnum == EMFILE || why.errnum == ENFILE;
        if (file->is_beneath && why.errnum == ENAMETOOLONG) /* the checkpoint made the name up */
            status = why.status = FSDP_ERR_DAMAGED;
        if (status == FSDP_OK || !is_full || !close_some_file(source)) {
            source->open_count += status == FSDP_OK;
            if (status != FSDP_OK && err)
                *err = why;
            return status;
        }
    }
}

fsdp_status fsdp_source_file_compare(const fsdp_source *source, size_t number,
                                     const fsdp_file_info *now, fsdp_error *err)
{
    const source_file *file = &source->files[number];
    if (same_node(now, &file->info) && now->size == file->info.size &&
        now->mtime_ns == file->info.mtime_ns)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' was replaced while it was read", file->path);
}

static fsdp_status reopen(fsdp_source *source, source_file *file, fsdp_error *err)
{
    FSDP_TRY(open_file(source, file, err));
    fsdp_file_info now = {0}; /* all zero: equals no file that was opened */
    (void)source->io->ops->info(source->io, file->path, &now);
    fsdp_status st = fsdp_source_file_compare(source, (size_t)(file - source->files), &now, err);
    if (st != FSDP_OK)
        close_one(source, file);
    return st;
}

fsdp_status fsdp_source_pin(fsdp_source *source, int number, fsdp_file **file_out, fsdp_error *err)
{
    pthread_mutex_lock(&source->lock);
    source_file *file = &source->files[number];
    fsdp_status status = file->file ? FSDP_OK : reopen(source, file, err);
    if (status == FSDP_OK) {
        file->pins++;
        file->was_used = true;
        *file_out = file->file;
    }
    pthread_mutex_unlock(&source->lock);
    return status;
}

void fsdp_source_unpin(fsdp_source *source, int number)
{
    pthread_mutex_lock(&source->lock);
    source->files[number].pins--;
    pthread_mutex_unlock(&source->lock);
}

void fsdp_source_close_files(fsdp_source *source)
{
    for (size_t i = 0; i < source->file_count; i++) {
        if (source->files[i].file)
            close_one(source, &source->files[i]);
    }
}

/* --- for formats ------------------------------------------------------------------------------ */

static fsdp_status learn_file(fsdp_source *source, source_file *file, fsdp_error *err)
{
    FSDP_TRY(open_file(source, file, err));
    int result = source->io->ops->info(source->io, file->path, &file->info);
    if (result == 0)
        result = file->file->ops->size(file->file, &file->info.size);
    if (result == 0)
        return FSDP_OK;
    close_one(source, file);
    return fsdp_fail_errno(err, -result, "cannot get the size of '%s'", file->path);
}

fsdp_status fsdp_source_add_file(fsdp_source *source, const char *path, bool beneath,
                                 int *number_out, fsdp_error *err)
{
    size_t size = strlen(path);
    const uint64_t *known = fsdp_name_table_find(&source->paths, path, size);
    if (known) {
        *number_out = (int)*known;
        return FSDP_OK;
    }
    source_file file = {.path = fsdp_arena_strndup(&source->arena, path, size),
                        .is_beneath = beneath};
    if (!file.path || source->file_count >= INT32_MAX ||
        !fsdp_grow(&source->files, &source->file_room, source->file_count + 1,
                   sizeof *source->files))
        return fsdp_fail_memory(err, path);
    FSDP_TRY(learn_file(source, &file, err));
    if (!fsdp_name_table_put(&source->paths, file.path, size, source->file_count)) {
        close_one(source, &file);
        return fsdp_fail_memory(err, path);
    }
    source->files[source->file_count] = file;
    *number_out = (int)source->file_count++;
    return FSDP_OK;
}

fsdp_status fsdp_source_take_file(fsdp_source *source, const source_file *from, bool is_noted,
                                  int *number_out, fsdp_error *err)
{
    size_t size = strlen(from->path);
    const uint64_t *known = fsdp_name_table_find(&source->paths, from->path, size);
    if (known) {
        *number_out = (int)*known;
        return FSDP_OK;
    }
    source_file file = {.path = fsdp_arena_strndup(&source->arena, from->path, size),
                        .info = from->info,
                        .is_beneath = from->is_beneath};
    bool is_full = !file.path || source->file_count >= INT32_MAX ||
                   !fsdp_grow(&source->files, &source->file_room, source->file_count + 1,
                              sizeof *source->files) ||
                   !fsdp_name_table_put(&source->paths, file.path, size, source->file_count);
    for (int i = 0; i < FSDP_SOURCE_CODE && from->code[i] && !is_full; i++) {
        file.code[i] = fsdp_arena_strndup(&source->arena, from->code[i], strlen(from->code[i]));
        is_full = !file.code[i];
    }
    if (is_full)
        return fsdp_fail_memory(err, from->path);
    source->files[source->file_count] = file;
    source->noted_count += is_noted;
    *number_out = (int)source->file_count++;
    return FSDP_OK;
}

fsdp_status fsdp_source_take_notes(fsdp_source *source, const fsdp_io_note *note, fsdp_error *err)
{
    int number;
    source->io = note->inner;
    for (size_t i = 0; i < note->count; i++)
        FSDP_TRY(fsdp_source_take_file(
            source, &(source_file){.path = note->items[i].path, .info = note->items[i].info}, true,
            &number, err));
    return FSDP_OK;
}

fsdp_status fsdp_source_pread(const fsdp_source *source, int file, void *data, size_t size,
                              int64_t offset, fsdp_error *err)
{
    /* the caller's const covers the catalog, not the set of open files */
    fsdp_source *owner = (fsdp_source *)(uintptr_t)source;
    if (file < 0 || file >= (int)source->file_count || offset < 0)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "a read is outside the files of its source");
    fsdp_file *open = NULL;
    FSDP_TRY(fsdp_source_pin(owner, file, &open, err));
    fsdp_status status = fsdp_io_read(open, source->files[file].path, data, size, offset, err);
    fsdp_source_unpin(owner, file);
    return status;
}
