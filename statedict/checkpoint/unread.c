/* Weight files that were not read: see unread.h. */
#include "statedict/checkpoint/unread.h"

#include "formats/frameworks.h"
#include "formats/source.h"
#include "statedict/commit/commit_internal.h"

#include <stdlib.h>
#include <string.h>

enum { MOST = 1000 };

typedef struct unread_search {
    const fsdp_checkpoint *checkpoint;
    const char **read; /* names of files within the directory, sorted */
    size_t read_count, read_room;
    fsdp_name_list *names;
} unread_search;

static bool is_weights(const char *name)
{
    return fsdp_framework_matches(fsdp_framework_weights, name, NULL) ||
           fsdp_framework_matches(fsdp_framework_foreign_weights, name, NULL);
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static bool is_listed(void *context, const char *name)
{
    (void)context;
    return name[0] != '.';
}

/* The name of a file below the directory of the checkpoint. */
static const char *within(const char *directory, const char *file)
{
    size_t size = strlen(directory);
    while (size > 0 && directory[size - 1] == '/')
        size--;
    if (strncmp(directory, file, size) != 0 || file[size] != '/')
        return file;
    while (file[size] == '/')
        size++;
    return file + size;
}

static fsdp_status note_read(void *context, int number, const char *path,
                             const fsdp_file_info *info, fsdp_error *err)
{
    unread_search *search = context;
    (void)number;
    (void)info;
    if (!fsdp_grow(&search->read, &search->read_room, search->read_count + 1, sizeof *search->read))
        return fsdp_fail_memory(err, "a list of files");
    search->read[search->read_count++] = within(search->checkpoint->path, path);
    return FSDP_OK;
}

/* An adapter that is merged is read, too. */
static fsdp_status list_read(unread_search *search, fsdp_error *err)
{
    FSDP_TRY(fsdp_checkpoint_each_file(search->checkpoint, note_read, search, err));
    if (search->read_count > 0)
        qsort(search->read, search->read_count, sizeof *search->read, compare_names);
    return FSDP_OK;
}

static fsdp_status look_into(unread_search *search, const char *below, int depth, fsdp_error *err);

static fsdp_status look_at(unread_search *search, const char *name, int depth, fsdp_error *err)
{
    fsdp_file_info info;
    fsdp_io *io = search->checkpoint->io;
    char *path = fsdp_path_join(search->checkpoint->path, name);
    if (!path)
        return fsdp_fail_memory(err, "a path");
    bool is_directory = io->ops->info(io, path, &info) == 0 && info.kind == FSDP_FILE_DIRECTORY;
    fsdp_free(path);
    if (is_directory)
        return depth > 0 ? look_into(search, name, depth - 1, err) : FSDP_OK;
    if (!is_weights(name) ||
        (search->read_count > 0 &&
         bsearch(&name, search->read, search->read_count, sizeof *search->read, compare_names)))
        return FSDP_OK;
    return fsdp_names_add(search->names, name, strlen(name))
               ? FSDP_OK
               : fsdp_fail_memory(err, "a list of files");
}

/* A directory that cannot be listed has no files that were passed over. */
static fsdp_status look_into(unread_search *search, const char *below, int depth, fsdp_error *err)
{
    fsdp_io_names names = {0};
    char *path = fsdp_path_join(search->checkpoint->path, below);
    fsdp_status st = path ? FSDP_OK : fsdp_fail_memory(err, "a path");
    if (path &&
        fsdp_io_list_names(search->checkpoint->io, path, is_listed, NULL, &names, NULL) != FSDP_OK)
        names.count = 0;
    if (names.count > 1)
        qsort(names.items, names.count, sizeof *names.items, compare_names);
    for (size_t i = 0; i < names.count && search->names->count < MOST && st == FSDP_OK; i++) {
        char *name = below[0] ? fsdp_path_join(below, names.items[i])
                              : fsdp_strndup(names.items[i], strlen(names.items[i]));
        st = name ? look_at(search, name, depth, err) : fsdp_fail_memory(err, "a path");
        fsdp_free(name);
    }
    fsdp_io_names_release(&names);
    fsdp_free(path);
    return st;
}

fsdp_status fsdp_unread_list(const fsdp_checkpoint *checkpoint, fsdp_name_list *names_out,
                             fsdp_error *err)
{
    fsdp_file_info info;
    unread_search search = {.checkpoint = checkpoint, .names = names_out};
    *names_out = (fsdp_name_list){0};
    /* DeepSpeed's files have the weights several times, and its reader takes the exact ones. */
    if (!checkpoint->source ||
        fsdp_format_from(fsdp_source_format(checkpoint->source))->caps.repeats ||
        checkpoint->io->ops->info(checkpoint->io, checkpoint->path, &info) < 0 ||
        info.kind != FSDP_FILE_DIRECTORY)
        return FSDP_OK;
    fsdp_status st = list_read(&search, err);
    if (st == FSDP_OK)
        st = look_into(&search, "", 1, err);
    fsdp_free(search.read);
    return st;
}
