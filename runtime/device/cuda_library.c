/* Finds libraries of NVIDIA: see cuda_library.h. */
#include "runtime/device/cuda_library.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FIRST_PYTHON = 8, LAST_PYTHON = 19 };

/* The first library that is there and cannot be loaded: its reason is more than "not found". */
typedef struct search {
    const fsdp_cuda_library *which;
    void *library;
    char broken[300];
} search;

static const char *variable(const char *name)
{
    const char *text = getenv(name);
    return text && text[0] != '\0' ? text : NULL;
}

/* Whether the loader has a better reason than that no such file was found; `path` may be a mere name. */
static bool is_there(const char *path, const char *why)
{
    char absent[128];
    if (strchr(path, '/'))
        return access(path, F_OK) == 0;
    snprintf(absent, sizeof absent, "%s: cannot open shared object file", path);
    return !strstr(why, absent);
}

static void try_path(search *found, const char *path)
{
    if (found->library)
        return;
    found->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    const char *why = found->library ? NULL : dlerror();
    if (why && !found->broken[0] && is_there(path, why))
        snprintf(found->broken, sizeof found->broken, "%s", why);
}

/* In `length` bytes of `folder`, in the folder `below` of it. */
static void try_folder(search *found, const char *folder, size_t length, const char *below)
{
    char path[PATH_MAX];
    for (const char *const *file = found->which->files; *file && length > 0; file++)
        if (snprintf(path, sizeof path, "%.*s/%s/%s", (int)length, folder, below, *file) <
            (int)sizeof path)
            try_path(found, path);
}

static void try_cuda(search *found)
{
    static const char *const below[] = {"lib64", "lib"};
    const char *const roots[] = {variable("CUDA_HOME"), variable("CUDA_PATH"), "/usr/local/cuda"};
    for (size_t i = 0; i < sizeof roots / sizeof *roots; i++)
        for (size_t j = 0; roots[i] && j < sizeof below / sizeof *below; j++)
            try_folder(found, roots[i], strlen(roots[i]), below[j]);
}

static void try_packages(search *found, const char *folder, size_t length)
{
    for (const char *const *package = found->which->packages; *package; package++)
        try_folder(found, folder, length, *package);
}

/* lib/python3.N/KIND-packages of a prefix. */
static void try_prefix(search *found, const char *prefix, const char *kind)
{
    char folder[PATH_MAX];
    for (int minor = LAST_PYTHON; prefix && minor >= FIRST_PYTHON && !found->library; minor--)
        if (snprintf(folder, sizeof folder, "%s/lib/python3.%d/%s-packages", prefix, minor, kind) <
            (int)sizeof folder)
            try_packages(found, folder, strlen(folder));
}

static void try_python(search *found)
{
    static const char everywhere[] = "/usr/lib/python3/dist-packages";
    char user[PATH_MAX];
    const char *home = variable("HOME");
    try_prefix(found, variable("VIRTUAL_ENV"), "site");
    for (const char *at = variable("PYTHONPATH"); at && *at; at += *at == ':') {
        size_t length = strcspn(at, ":");
        try_packages(found, at, length);
        at += length;
    }
    if (home && snprintf(user, sizeof user, "%s/.local", home) < (int)sizeof user)
        try_prefix(found, user, "site");
    try_prefix(found, "/usr/local", "dist");
    try_prefix(found, "/usr/local", "site");
    try_packages(found, everywhere, sizeof everywhere - 1);
    try_prefix(found, "/usr", "dist");
}

static fsdp_status fail(const search *found, fsdp_error *err)
{
    const fsdp_cuda_library *which = found->which;
    if (found->broken[0])
        return fsdp_fail(err, FSDP_ERR_USAGE, "cannot load %s: %s; %s", which->files[0],
                         found->broken, which->advice);
    return fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                     "cannot find %s in the loader's path, in lib64 and lib of CUDA_HOME, "
                     "CUDA_PATH and /usr/local/cuda, or in %s of Python's packages (VIRTUAL_ENV, "
                     "PYTHONPATH, ~/.local, /usr/local, /usr); %s",
                     which->files[0], which->packages[0], which->advice);
}

static fsdp_status open_named(const fsdp_cuda_library *which, const char *path, void **library_out,
                              fsdp_error *err)
{
    *library_out = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    const char *why = *library_out ? NULL : dlerror();
    return *library_out ? FSDP_OK
                        : fsdp_fail(err, FSDP_ERR_USAGE, "%s is '%s': %s; correct it, or unset it",
                                    which->variable, path, why ? why : "it cannot be loaded");
}

fsdp_status fsdp_cuda_library_open(const fsdp_cuda_library *which, void **library_out,
                                   fsdp_error *err)
{
    search found = {.which = which};
    const char *named = variable(which->variable);
    if (named)
        return open_named(which, named, library_out, err);
    for (const char *const *file = which->files; *file; file++)
        try_path(&found, *file);
    try_cuda(&found);
    try_python(&found);
    *library_out = found.library;
    return found.library ? FSDP_OK : fail(&found, err);
}
