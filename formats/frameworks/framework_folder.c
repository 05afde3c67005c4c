/* Lists a directory while a path is resolved to a checkpoint: see framework_folder.h. */
#include "formats/frameworks/framework_folder.h"

#include "base/core/mem.h"
#include "base/text.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { HEAD = 64 };

bool fsdp_folder_may_look(const fsdp_folder *folder)
{
    if (*folder->left >= 0)
        --*folder->left;
    return *folder->left >= 0;
}

fsdp_status fsdp_folder_fail_looks(const char *path, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "%d files and folders were opened to find a checkpoint, and '%s' holds more; "
                     "name the checkpoint itself",
                     FSDP_FOLDER_LOOKS, path);
}

static bool is_plain(void *context, const char *name)
{
    (void)context;
    return strcmp(name, ".") != 0 && strcmp(name, "..") != 0 && !strchr(name, '/');
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

fsdp_status fsdp_folder_look(fsdp_folder *folder, fsdp_error *err)
{
    if (!fsdp_folder_may_look(folder))
        return fsdp_folder_fail_looks(folder->path, err);
    FSDP_TRY(fsdp_io_list_names(folder->io, folder->path, is_plain, NULL, &folder->names, err));
    if (folder->names.count > 1)
        qsort(folder->names.items, folder->names.count, sizeof *folder->names.items, compare_names);
    return FSDP_OK;
}

fsdp_status fsdp_folder_kind(const fsdp_folder *folder, const char *name, fsdp_file_kind *kind_out,
                             fsdp_error *err)
{
    char *path = fsdp_path_join(folder->path, name);
    bool is_there;
    if (!path)
        return fsdp_fail_memory(err, "a path");
    fsdp_status st = fsdp_folder_info(folder->io, path, kind_out, &is_there, err);
    fsdp_free(path);
    return st;
}

fsdp_status fsdp_folder_info(fsdp_io *io, const char *path, fsdp_file_kind *kind_out,
                             bool *is_there_out, fsdp_error *err)
{
    fsdp_file_info info;
    int result = io->ops->info(io, path, &info);
    *is_there_out = result == 0;
    *kind_out = result == 0 ? info.kind : FSDP_FILE_OTHER;
    return result == -ENOMEM ? fsdp_fail_memory(err, path) : FSDP_OK;
}

fsdp_status fsdp_folder_check_links(const fsdp_folder *folder, const char *name, fsdp_error *err)
{
    fsdp_status st = FSDP_OK;
    for (size_t end = 0; st == FSDP_OK && name[end] != '\0';) {
        end += strcspn(name + end, "/");
        char *own = fsdp_strndup(name, end);
        char *path = own ? fsdp_path_join(folder->path, own) : NULL;
        st = path ? fsdp_io_check_link(folder->io, path, err) : fsdp_fail_memory(err, "a path");
        fsdp_free(own);
        fsdp_free(path);
        end += name[end] == '/';
    }
    return st;
}

const char *fsdp_folder_find(const fsdp_folder *folder, const char *list)
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

bool fsdp_folder_is_model(const fsdp_framework_row *row)
{
    return row->member && strcmp(row->member, ".") == 0;
}

bool fsdp_folder_is_alone(const char *path)
{
    size_t size = strlen(path);
    return size > 2 && strcmp(path + size - 2, "/.") == 0;
}

const char *fsdp_folder_steps(const fsdp_folder *folder)
{
    for (size_t i = 0; fsdp_framework_steps[i]; i++)
        if (fsdp_folder_find(folder, fsdp_framework_steps[i]))
            return fsdp_framework_steps[i];
    return NULL;
}

bool fsdp_folder_is_weights(const char *name)
{
    return !fsdp_framework_matches(fsdp_framework_no_model, name, NULL) &&
           fsdp_framework_matches(fsdp_framework_weights, name, NULL);
}

/* --- recognised files --------------------------------------------------------------------------- */

fsdp_status fsdp_folder_check_file(fsdp_io *io, const char *path, fsdp_error *err)
{
    char head[HEAD] = {0};
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

/* Weights of a clone without git-lfs are pointers. */
fsdp_status fsdp_folder_check(const fsdp_folder *folder, fsdp_error *err)
{
    fsdp_status st = FSDP_OK;
    int looked = 0;
    for (size_t i = 0; i < folder->names.count && st == FSDP_OK && looked < FSDP_FOLDER_NAMES;
         i++) {
        fsdp_file_info info;
        if (!fsdp_folder_is_weights(folder->names.items[i]))
            continue;
        char *path = fsdp_path_join(folder->path, folder->names.items[i]);
        looked++;
        if (!path)
            return fsdp_fail_memory(err, "a path");
        if (folder->io->ops->info(folder->io, path, &info) == 0 && info.kind == FSDP_FILE_REGULAR &&
            info.size < 1024)
            st = fsdp_folder_check_file(folder->io, path, err);
        fsdp_free(path);
    }
    return st;
}
