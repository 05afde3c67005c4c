/* Finds and opens libnccl; creates and closes the transport over it. See comm_nccl.h. */
#include "runtime/comm_nccl/transport_nccl.h"
#include "base/core/clock.h"
#include "base/core/mem.h"
#include "runtime/comm_nccl/comm_nccl.h"
#include "runtime/comm_nccl/nccl_library.h"
#include "runtime/device/cuda_library.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* === libnccl ================================================================================== */

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
                         "%s is no NCCL: it does not tell its version; " ADVICE, nccl->path);
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

/* The library that FSDP_NCCL_LIB names, else the first of the places of cuda_library.h; opened once, and kept
 * as long as the process. Any thread. FSDP_ERR_USAGE: there is none, or it is too old. */
static fsdp_status nccl_open(const fsdp_nccl **nccl_out, fsdp_error *err)
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
    if (nccl_open(&nccl, &err) == FSDP_OK)
        snprintf(out, out_size, "NCCL %s (%s)", nccl->version_text, nccl->path);
    else
        snprintf(out, out_size, "no NCCL: %s", err.text);
}

/* === the transport ============================================================================ */

/* --- entries of the table ------------------------------------------------------------------------ */

/* A failure that this rank was told by the others is not told again. */
static void abort_comm(fsdp_comm *comm, const fsdp_error *why)
{
    nccl_group *group = comm->backend;
    fsdp_comm_abort(group->inner, why);
    fsdp_nccl_group_fail(group, why, FSDP_NCCL_OWN);
}

/* NCCL's failure goes first; a failure of a call of host memory is the inner group's. */
static bool has_failed(fsdp_comm *comm, fsdp_error *err_out)
{
    nccl_group *group = comm->backend;
    const fsdp_transport_ops *inner = group->inner->transport->ops;
    return fsdp_nccl_group_has_failed(group, err_out) ||
           (inner->has_failed && inner->has_failed(group->inner, err_out));
}

static void set_busy(fsdp_transport *base, int64_t until_ms)
{
    nccl_transport *transport = (nccl_transport *)base;
    atomic_store(&transport->busy_until_ms, until_ms);
    if (transport->inner->ops->set_busy)
        transport->inner->ops->set_busy(transport->inner, until_ms);
}

static void release(nccl_transport *transport)
{
    fsdp_comm_free(transport->watches);
    pthread_mutex_destroy(&transport->lock);
    pthread_cond_destroy(&transport->changed);
    fsdp_free(transport->closed);
    fsdp_free(transport->beats);
    fsdp_free(transport->progress);
    fsdp_free(transport->has_left);
    fsdp_free(transport);
}

/* The inner transport tells its peers why this rank leaves. */
static void close_transport(fsdp_transport *base)
{
    nccl_transport *transport = (nccl_transport *)base;
    fsdp_transport *inner = transport->inner;
    fsdp_nccl_watch_end(transport);
    fsdp_nccl_free_blocks(transport);
    inner->exit_code = base->exit_code;
    inner->exit_reason = base->exit_reason;
    release(transport);
    inner->ops->close(inner);
}

static const fsdp_transport_ops nccl_ops = {
    .name = "nccl",
    .abilities = FSDP_COMM_AVG | FSDP_COMM_PREMUL_SUM | FSDP_COMM_STREAMS | FSDP_COMM_DEVICE_MEMORY,
    .comm_create = fsdp_nccl_comm_create,
    .run = fsdp_nccl_run,
    .abort = abort_comm,
    .has_failed = has_failed,
    .comm_close = fsdp_nccl_comm_close,
    .set_busy = set_busy,
    .alloc = fsdp_nccl_alloc,
    .dealloc = fsdp_nccl_dealloc,
    .close = close_transport,
};

/* --- creation ------------------------------------------------------------------------------------ */

static fsdp_status init_locks(nccl_transport *transport, fsdp_error *err)
{
    pthread_condattr_t attributes;
    int failed = pthread_condattr_init(&attributes);
    if (!failed) {
        failed = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
        if (!failed)
            failed = pthread_cond_init(&transport->changed, &attributes);
        pthread_condattr_destroy(&attributes);
    }
    if (!failed)
        failed = pthread_mutex_init(&transport->lock, NULL);
    return failed ? fsdp_fail_errno(err, failed, "cannot make a lock") : FSDP_OK;
}

/* Local. */
static fsdp_status create(const fsdp_nccl_spec *spec, nccl_transport **made_out, fsdp_error *err)
{
    const fsdp_transport *inner = spec->inner;
    const size_t n = (size_t)inner->size;
    const fsdp_nccl *nccl = NULL;
    if (!spec->device->ops->native)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "NCCL moves memory of GPUs: it needs --device cuda, not %s",
                         spec->device->ops->name);
    FSDP_TRY(nccl_open(&nccl, err));
    nccl_transport *made = fsdp_alloc(1, sizeof *made);
    if (!made)
        return fsdp_fail_memory(err, "a transport over NCCL");
    *made = (nccl_transport){.base = {.ops = &nccl_ops, .rank = inner->rank, .size = inner->size},
                             .inner = spec->inner,
                             .device = spec->device,
                             .nccl = nccl,
                             .check = spec->check};
    atomic_store(&made->base.deadline_ms, atomic_load(&inner->deadline_ms));
    atomic_store(&made->is_whole, true);
    fsdp_status status = init_locks(made, err);
    if (status != FSDP_OK) {
        fsdp_free(made);
        return status;
    }
    made->beats = fsdp_alloc(n, sizeof *made->beats);
    made->progress = fsdp_alloc(n, sizeof *made->progress);
    made->has_left = fsdp_alloc(n, sizeof *made->has_left);
    *made_out = made;
    return made->beats && made->progress && made->has_left
               ? FSDP_OK
               : fsdp_fail_memory(err, "a transport over NCCL");
}

/* Collective: the watch's own group. */
static fsdp_status create_watches(nccl_transport *transport, fsdp_error *err)
{
    fsdp_transport *inner = transport->inner;
    int *ranks = fsdp_alloc((size_t)inner->size, sizeof *ranks);
    if (!ranks)
        return fsdp_fail_memory(err, "the watch over NCCL");
    for (int i = 0; i < inner->size; i++)
        ranks[i] = i;
    fsdp_status status =
        inner->ops->comm_create(inner, ranks, inner->size, &transport->watches, err);
    fsdp_free(ranks);
    return status;
}

fsdp_status fsdp_transport_nccl(const fsdp_nccl_spec *spec, fsdp_transport **transport_out,
                                fsdp_error *err)
{
    nccl_transport *made = NULL;
    fsdp_status status = fsdp_ctl_agree(spec->ctl, create(spec, &made, err), err);
    if (status == FSDP_OK)
        status = fsdp_ctl_agree(spec->ctl, create_watches(made, err), err);
    if (status == FSDP_OK)
        status = fsdp_ctl_agree(spec->ctl, fsdp_nccl_watch_begin(made, err), err);
    if (status == FSDP_OK) {
        *transport_out = &made->base;
        return FSDP_OK;
    }
    if (made) {
        fsdp_nccl_watch_end(made);
        release(made);
    }
    return status;
}
