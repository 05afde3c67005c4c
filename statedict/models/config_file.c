/*
 * Finds config.json next to a checkpoint: see config.h. Apart from config.c, so that who has the text, as the
 * trainer has, needs no formats.
 */
#include "statedict/models/config.h"

#include "base/text.h"
#include "formats/frameworks.h"
#include "formats/source.h"

/* The path of a file in the directory, or where dir is NULL in the one that holds the checkpoint's
 * configuration. */
static char *locate(fsdp_io *io, const char *dir, const char *path, const char *name)
{
    char *beside = NULL;
    if (!dir && fsdp_framework_config(io, path, &beside, NULL) == FSDP_OK)
        dir = beside;
    char *file = dir ? fsdp_path_join(dir, name) : NULL;
    fsdp_free(beside);
    return file;
}

/* Takes the path. */
static char *read_located(fsdp_io *io, char *file, size_t *size_out, char **path_out,
                          fsdp_error *err)
{
    char *text = NULL;
    if (file)
        (void)fsdp_source_read_file(io, file, FSDP_CONFIG_BYTES, &text, size_out, err);
    *path_out = text ? file : NULL;
    if (!text)
        fsdp_free(file);
    return text;
}

char *fsdp_config_find(fsdp_io *io, const char *dir, const char *path, size_t *size_out,
                       char **path_out, fsdp_error *err)
{
    return read_located(io, locate(io, dir, path, "config.json"), size_out, path_out, err);
}

char *fsdp_params_find(fsdp_io *io, const char *path, size_t *size_out, char **path_out)
{
    return read_located(io, locate(io, NULL, path, "params.json"), size_out, path_out, NULL);
}

void fsdp_model_kind_find(fsdp_io *io, const char *dir, const char *path, fsdp_model_kind *kind)
{
    size_t size;
    char *found, *text = fsdp_config_find(io, dir, path, &size, &found, NULL);
    *kind = (fsdp_model_kind){0};
    if (text && fsdp_model_kind_read(text, size, "config.json", kind, NULL) != FSDP_OK)
        *kind = (fsdp_model_kind){0};
    fsdp_free(found);
    fsdp_free(text);
}
