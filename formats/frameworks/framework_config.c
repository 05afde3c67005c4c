/* The directory that holds the configuration of a checkpoint: see frameworks.h. */
#include "formats/frameworks.h"

#include "base/core/mem.h"

#include <string.h>

static fsdp_status holds_config(fsdp_io *io, const char *dir, bool *is_there_out, fsdp_error *err)
{
    *is_there_out = false;
    for (size_t i = 0; fsdp_framework_config_names[i] && !*is_there_out; i++) {
        char *path = fsdp_path_join(dir, fsdp_framework_config_names[i]);
        if (!path)
            return fsdp_fail_memory(err, "a path");
        *is_there_out = fsdp_io_exists(io, path);
        fsdp_free(path);
    }
    return FSDP_OK;
}

/* The directory itself, or the one that holds the file. */
static char *directory_of(fsdp_io *io, const char *path)
{
    fsdp_file_info info;
    const char *slash = strrchr(path, '/');
    if (io->ops->info(io, path, &info) == 0 && info.kind == FSDP_FILE_DIRECTORY)
        return fsdp_strndup(path, strlen(path));
    if (!slash)
        return fsdp_strndup(".", 1);
    return fsdp_strndup(path, slash > path ? (size_t)(slash - path) : 1);
}

/* True when the directory has a file that names its newest checkpoint: DeepSpeed's tags lie in the directory
 * where a Trainer puts the configuration. */
static fsdp_status holds_pointer(fsdp_io *io, const char *dir, bool *is_there_out, fsdp_error *err)
{
    *is_there_out = false;
    for (size_t r = 0; r < fsdp_framework_row_count && !*is_there_out; r++) {
        if (!fsdp_framework_rows[r].pointer)
            continue;
        char *path = fsdp_path_join(dir, fsdp_framework_rows[r].pointer);
        if (!path)
            return fsdp_fail_memory(err, "a path");
        *is_there_out = fsdp_io_exists(io, path);
        fsdp_free(path);
    }
    return FSDP_OK;
}

/* The directory above, where that is the run of the checkpoint. */
static fsdp_status find_above(fsdp_io *io, const char *base, char **dir_out, fsdp_error *err)
{
    const char *slash = strrchr(base, '/');
    bool is_run = false, is_there = false;
    if (!slash || slash == base)
        return FSDP_OK;
    char *dir = fsdp_strndup(base, (size_t)(slash - base));
    fsdp_status st = dir ? holds_pointer(io, dir, &is_run, err) : fsdp_fail_memory(err, "a path");
    if (st == FSDP_OK && is_run)
        st = holds_config(io, dir, &is_there, err);
    if (is_there)
        *dir_out = dir;
    else
        fsdp_free(dir);
    return st;
}

fsdp_status fsdp_framework_config(fsdp_io *io, const char *path, char **dir_out, fsdp_error *err)
{
    char *base = directory_of(io, path);
    fsdp_status st = base ? FSDP_OK : fsdp_fail_memory(err, "a path");
    *dir_out = NULL;
    for (size_t i = 0; st == FSDP_OK && fsdp_framework_configs[i] && !*dir_out; i++) {
        bool is_here = strcmp(fsdp_framework_configs[i], ".") == 0, is_there = false;
        char *dir = is_here ? fsdp_strndup(base, strlen(base))
                            : fsdp_path_join(base, fsdp_framework_configs[i]);
        st = dir ? holds_config(io, dir, &is_there, err) : fsdp_fail_memory(err, "a path");
        if (is_there)
            *dir_out = dir;
        else
            fsdp_free(dir);
    }
    if (st == FSDP_OK && !*dir_out)
        st = find_above(io, base, dir_out, err);
    fsdp_free(base);
    return st;
}
