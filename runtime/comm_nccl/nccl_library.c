/*
 * Finds and opens NCCL. See nccl_library.h. Places in this order: FSDP_NCCL_LIB, the loader's path, the
 * folders of CUDA, and those into which Python's packages put it.
 */
#include "runtime/comm_nccl/nccl_library.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIBRARY "libnccl.so.2"
#define IN_PACKAGE "nvidia/nccl/lib/" LIBRARY

enum { FIRST_PYTHON = 8, LAST_PYTHON = 19 };

#define ADVICE                                                                            \
    "install NCCL (Debian: libnccl2, pip: nvidia-nccl-cu12 or nvidia-nccl-cu13), or set " \
    "FSDP_NCCL_LIB to the file"

/* The first library that is there and cannot be loaded: its reason is more than "not found". */
typedef struct search {
    void *library;
    char broken[300];
} search;

static const char *variable(const char *name)
{
    const char *text = getenv(name);
    return text && text[0] != '\0' ? text : NULL;
}

static void try_path(search *found, const char *path)
{
    if (found->library)
        return;
    found->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    const char *why = found->library ? NULL : dlerror();
    bool is_there = why && !strstr(why, LIBRARY ": cannot open shared object file");
    if (is_there && !found->broken[0])
        snprintf(found->broken, sizeof found->broken, "%s", why);
}

/* In `length` bytes of `folder`, and of `below` in it. */
static void try_folder(search *found, const char *folder, size_t length, const char *below)
{
    char path[PATH_MAX];
    int n = snprintf(path, sizeof path, "%.*s/%s", (int)length, folder, below);
    if (length > 0 && n > 0 && n < (int)sizeof path)
        try_path(found, path);
}

static void try_cuda(search *found)
{
    static const char *const below[] = {"lib64/" LIBRARY, "lib/" LIBRARY};
    const char *const roots[] = {variable("CUDA_HOME"), variable("CUDA_PATH"), "/usr/local/cuda"};
    for (size_t i = 0; i < sizeof roots / sizeof *roots; i++)
        for (size_t j = 0; roots[i] && j < sizeof below / sizeof *below; j++)
            try_folder(found, roots[i], strlen(roots[i]), below[j]);
}

/* lib/python3.N/KIND-packages of a prefix. */
static void try_prefix(search *found, const char *prefix, const char *kind)
{
    char below[128];
    for (int minor = LAST_PYTHON; prefix && minor >= FIRST_PYTHON && !found->library; minor--) {
        snprintf(below, sizeof below, "lib/python3.%d/%s-packages/" IN_PACKAGE, minor, kind);
        try_folder(found, prefix, strlen(prefix), below);
    }
}

static void try_python(search *found)
{
    char user[PATH_MAX];
    const char *home = variable("HOME"), *path = variable("PYTHONPATH");
    try_prefix(found, variable("VIRTUAL_ENV"), "site");
    for (const char *at = path; at && *at; at += *at == ':') {
        size_t length = strcspn(at, ":");
        try_folder(found, at, length, IN_PACKAGE);
        at += length;
    }
    if (home && snprintf(user, sizeof user, "%s/.local", home) < (int)sizeof user)
        try_prefix(found, user, "site");
    try_prefix(found, "/usr/local", "dist");
    try_prefix(found, "/usr/local", "site");
    try_path(found, "/usr/lib/python3/dist-packages/" IN_PACKAGE);
    try_prefix(found, "/usr", "dist");
}

static fsdp_status find_library(void **library_out, fsdp_error *err)
{
    search found = {0};
    const char *named = variable("FSDP_NCCL_LIB");
    if (named) {
        *library_out = dlopen(named, RTLD_NOW | RTLD_LOCAL);
        const char *why = *library_out ? NULL : dlerror();
        return *library_out ? FSDP_OK
                            : fsdp_fail(err, FSDP_ERR_USAGE, "FSDP_NCCL_LIB is '%s': %s", named,
                                        why ? why : "it cannot be loaded");
    }
    try_path(&found, LIBRARY);
    try_cuda(&found);
    try_python(&found);
    *library_out = found.library;
    if (found.library)
        return FSDP_OK;
    if (found.broken[0])
        return fsdp_fail(err, FSDP_ERR_USAGE, "NCCL cannot be loaded: %s; " ADVICE, found.broken);
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "there is no " LIBRARY
                     ": it was sought in the loader's path, in lib64 and lib of CUDA_HOME, "
                     "CUDA_PATH and /usr/local/cuda, and in nvidia/nccl/lib of Python's packages "
                     "(VIRTUAL_ENV, PYTHONPATH, ~/.local, /usr/local, /usr); " ADVICE);
}

/* --- its functions ---------------------------------------------------------------------------- */

/* 2.8.4 is 2804, 2.9.0 is 20900. */
static void spell_version(int version, char *out, size_t out_size)
{
    int base = version < 10000 ? 1000 : 10000;
    snprintf(out, out_size, "%d.%d.%d", version / base, version % base / 100, version % 100);
}

static fsdp_status read_version(void *library, fsdp_nccl *nccl, fsdp_error *err)
{
    fsdp_nccl_result (*get_version)(int *) =
        (fsdp_nccl_result(*)(int *))dlsym(library, "ncclGetVersion");
    Dl_info where;
    nccl->path = variable("FSDP_NCCL_LIB") ? variable("FSDP_NCCL_LIB") : LIBRARY;
    if (get_version && dladdr((void *)get_version, &where))
        nccl->path = where.dli_fname;
    if (!get_version || get_version(&nccl->version) != FSDP_NCCL_SUCCESS)
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s is no NCCL: it does not tell its version",
                         nccl->path);
    spell_version(nccl->version, nccl->version_text, sizeof nccl->version_text);
    if (nccl->version >= FSDP_NCCL_LEAST)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "%s is NCCL %s, and at least 2.14 is needed, whose communicators do not "
                     "block; " ADVICE,
                     nccl->path, nccl->version_text);
}

static fsdp_status read_functions(void *library, fsdp_nccl *nccl, fsdp_error *err)
{
    const char *missing = NULL;
#define TAKE(name, result, parameters) \
    nccl->name = (result(*) parameters)dlsym(library, "nccl" #name);
#define NEED(name, result, parameters) \
    TAKE(name, result, parameters)     \
    missing = nccl->name ? missing : "nccl" #name;
    FSDP_NCCL_REQUIRED(NEED)
    FSDP_NCCL_OPTIONAL(TAKE)
#undef NEED
#undef TAKE
    if (!missing)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE, "%s (NCCL %s) has no %s; " ADVICE, nccl->path,
                     nccl->version_text, missing);
}

static fsdp_status open_library(fsdp_nccl *nccl, fsdp_error *err)
{
    void *library = NULL;
    FSDP_TRY(find_library(&library, err));
    fsdp_status status = read_version(library, nccl, err);
    if (status == FSDP_OK)
        status = read_functions(library, nccl, err);
    if (status != FSDP_OK)
        dlclose(library);
    else if (nccl->version >= FSDP_NCCL_SHARES_GPU)
        setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 0); /* older ones refuse ranks that share a GPU */
    return status;
}

fsdp_status fsdp_nccl_open(const fsdp_nccl **nccl_out, fsdp_error *err)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static fsdp_nccl table;
    static bool is_open;
    fsdp_nccl made = {0};
    if (!FSDP_WITH_NCCL)
        return fsdp_fail(err, FSDP_ERR_USAGE, "this build leaves NCCL out (FSDP_WITH_NCCL=OFF)");
    pthread_mutex_lock(&lock);
    fsdp_status status = is_open ? FSDP_OK : open_library(&made, err);
    if (status == FSDP_OK && !is_open) {
        table = made;
        is_open = true;
    }
    pthread_mutex_unlock(&lock);
    if (status == FSDP_OK)
        *nccl_out = &table;
    return status;
}

void fsdp_nccl_describe(char *out, size_t out_size)
{
    const fsdp_nccl *nccl = NULL;
    fsdp_error err = {0};
    if (fsdp_nccl_open(&nccl, &err) == FSDP_OK)
        snprintf(out, out_size, "NCCL %s (%s)", nccl->version_text, nccl->path);
    else
        snprintf(out, out_size, "no NCCL: %s", err.text);
}
