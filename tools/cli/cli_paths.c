/* Errors for a path that lies in a checkpoint or a run: the message names the path to use instead. */
#include "tools/cli/cli.h"

#include "base/text.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static bool holds(const char *directory, const char *name)
{
    char path[PATH_MAX];
    struct stat info;
    int n = snprintf(path, sizeof path, "%s/%s", directory, name);
    return n > 0 && (size_t)n < sizeof path && lstat(path, &info) == 0;
}

fsdp_access *cli_access(void)
{
    static fsdp_access given;
    return &given;
}

bool cli_is_run(const char *path)
{
    bool is_run = false;
    return fsdp_path_is_run(path, cli_access(), &is_run, NULL) == FSDP_OK && is_run;
}

static fsdp_status fail_inside(const char *path, const char *directory, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                     "'%s' is a file of the checkpoint '%s'; name the checkpoint", path, directory);
}

const char *cli_from_here(const char *path)
{
    char here[PATH_MAX];
    size_t size = getcwd(here, sizeof here) ? strlen(here) : 0;
    if (size < 2 || strncmp(path, here, size) != 0 || path[size] != '/')
        return path;
    path += size + strspn(path + size, "/");
    return path[0] ? path : ".";
}

/* .metadata and __0_0.distcp of DCP. */
static fsdp_status check_dcp(const char *path, const char *name, const char *directory,
                             fsdp_error *err)
{
    bool is_metadata = strcmp(name, ".metadata") == 0;
    if (!is_metadata && !fsdp_bytes_end(name, strlen(name), ".distcp") &&
        !(strncmp(name, "__", 2) == 0 && fsdp_bytes_end(name, strlen(name), ".metadata")))
        return FSDP_OK;
    if (is_metadata || fsdp_bytes_end(name, strlen(name), ".metadata") ||
        holds(directory, ".metadata"))
        return fail_inside(path, directory, err);
    return fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                     "'%s' is one file of a DCP checkpoint, and '%s/.metadata', which describes "
                     "it, is missing; check that the save finished",
                     path, directory);
}

/* Explains files next to the weights of a Hugging Face model, such as config.json. */
static fsdp_status check_beside_weights(const char *path, const char *name, const char *directory,
                                        fsdp_error *err)
{
    if (fsdp_bytes_end(name, strlen(name), ".index.json"))
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                         "'%s' is only an index of files; name the directory '%s'", path,
                         directory);
    if (strcmp(name, "config.json") != 0)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                     "'%s' is only the configuration of a model, and the weights are in other "
                     "files; name the directory '%s' if they are there",
                     path, directory);
}

static fsdp_status check_latest(const char *path, const char *name, const char *directory,
                                fsdp_error *err)
{
    if (strcmp(name, "latest") != 0 || !cli_is_run(directory))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                     "'%s' is a hint for people; name the run '%s' for its newest good checkpoint, "
                     "or one of its steps",
                     path, directory);
}

fsdp_status cli_check_not_inside(const char *path, fsdp_error *err)
{
    char directory[PATH_MAX];
    struct stat info;
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    int n = slash ? (int)(slash - path) : 1;
    if (stat(path, &info) != 0 || !S_ISREG(info.st_mode) || n == 0 || n >= PATH_MAX)
        return FSDP_OK;
    snprintf(directory, sizeof directory, "%.*s", n, slash ? path : ".");
    if (fsdp_path_has_manifest(directory, cli_access()))
        return fail_inside(path, directory, err);
    FSDP_TRY(check_dcp(path, name, directory, err));
    FSDP_TRY(check_beside_weights(path, name, directory, err));
    return check_latest(path, name, directory, err);
}
