/* Opens NCCL. See nccl_library.h. */
#include "runtime/comm_nccl/nccl_library.h"

#include "runtime/device/cuda_library.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ADVICE                                                                            \
    "install NCCL (Debian: libnccl2, pip: nvidia-nccl-cu12 or nvidia-nccl-cu13), or set " \
    "FSDP_NCCL_LIB to the file; threads that share a GPU need none (--threads N --device cuda:0)"

static fsdp_status find_library(void **library_out, fsdp_error *err)
{
    static const char *const files[] = {"libnccl.so.2", NULL};
    static const char *const packages[] = {"nvidia/nccl/lib", NULL};
    static const fsdp_cuda_library nccl = {"FSDP_NCCL_LIB", files, packages, ADVICE};
    fsdp_error why = {0};
    fsdp_status status = fsdp_cuda_library_open(&nccl, library_out, &why);
    return status == FSDP_OK ? FSDP_OK : fsdp_fail(err, FSDP_ERR_USAGE, "%s", why.text);
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
    const char *named = getenv("FSDP_NCCL_LIB");
    nccl->path = named && named[0] ? named : "libnccl.so.2";
    if (get_version && dladdr((void *)get_version, &where))
        nccl->path = where.dli_fname;
    if (!get_version || get_version(&nccl->version) != FSDP_NCCL_SUCCESS)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "%s is not NCCL: it does not report its version; " ADVICE, nccl->path);
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
