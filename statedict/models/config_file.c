/*
 * Finds config.json next to a checkpoint: see config.h. It is apart from config.c, so that the trainer, which
 * has the text, needs no formats.
 */
#include "statedict/models/config.h"

#include "base/text.h"
#include "formats/frameworks.h"
#include "formats/source.h"

/* Reads a file in the directory, or where dir is NULL in that of the checkpoint's configuration. */
static void find(fsdp_io *io, const char *dir, const char *path, const char *name,
                 fsdp_config_file *file, fsdp_error *err)
{
    char *beside = NULL, *text = NULL;
    size_t size;
    *file = (fsdp_config_file){0};
    if (!dir && fsdp_framework_config(io, path, &beside, NULL) == FSDP_OK)
        dir = beside;
    char *found = dir ? fsdp_path_join(dir, name) : NULL;
    if (found && fsdp_source_read_file(io, found, FSDP_CONFIG_BYTES, &text, &size, err) == FSDP_OK)
        (void)fsdp_config_parse(text, size, found, file, NULL); /* the file keeps the error */
    fsdp_free(text);
    fsdp_free(found);
    fsdp_free(beside);
}

void fsdp_config_find(fsdp_io *io, const char *dir, const char *path, fsdp_config_file *file,
                      fsdp_error *err)
{
    find(io, dir, path, "config.json", file, err);
}

void fsdp_params_find(fsdp_io *io, const char *path, fsdp_config_file *file)
{
    find(io, NULL, path, "params.json", file, NULL);
}
