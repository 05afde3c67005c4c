/* The directory that holds the configuration of a checkpoint: see frameworks.h. */
#include "formats/frameworks.h"

#include "base/core/mem.h"

#include <string.h>

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
