/* Failures of a group, results of NCCL as errors, and the end of communicators. See comm_nccl.h. */
#include "runtime/comm_nccl/comm_nccl.h"

#include <string.h>
#include <time.h>

#include "base/core/clock.h"

enum { SPINS = 200, NAP_US = 50, CALL_MS = 1000, END_MS = 2000 };

static const char *hint_of(const nccl_transport *transport, fsdp_nccl_result result,
                           const char *said)
{
    if (strstr(said, "Duplicate GPU") ||
        strstr(said, "same GPU/Partition")) /* before 2.30; from it */
        return "; this NCCL refuses several ranks on one GPU; start as many ranks as there are "
               "GPUs, or threads that share one (--threads N --device cuda:0), or use NCCL 2.30 or "
               "later";
    if (result == FSDP_NCCL_CUDA_ERROR && strstr(said, "driver"))
        return "; NCCL needs a GPU with a driver for its version of CUDA: nvidia-smi shows both";
    return transport->nccl->version >= FSDP_NCCL_HAS_RAS && result == FSDP_NCCL_REMOTE_ERROR
               ? "; ncclras tells the state of all ranks"
               : "";
}

fsdp_status fsdp_nccl_fail(const nccl_transport *transport, fsdp_nccl_result result,
                           fsdp_error *err)
{
    const fsdp_nccl *nccl = transport->nccl;
    const char *said = nccl->GetLastError(NULL);
    bool is_usage = result == FSDP_NCCL_INVALID_ARGUMENT || result == FSDP_NCCL_INVALID_USAGE;
    said = said ? said : "";
    if (err)
        err->rank = transport->base.rank;
    return fsdp_fail(err, is_usage ? FSDP_ERR_USAGE : FSDP_ERR_PEER, "NCCL %s: %s%s%s%s",
                     nccl->version_text, nccl->GetErrorString(result), said[0] ? ": " : "", said,
                     hint_of(transport, result, said));
}

void fsdp_nccl_group_fail(nccl_group *group, const fsdp_error *why, nccl_origin origin)
{
    pthread_mutex_lock(&group->lock);
    bool is_better = group->origin == FSDP_NCCL_REMOTE && origin != FSDP_NCCL_REMOTE;
    if (group->origin == FSDP_NCCL_NO_FAILURE || is_better) {
        group->failure = *why;
        group->origin = origin;
    }
    pthread_mutex_unlock(&group->lock);
    pthread_cond_signal(&group->transport->changed);
}

bool fsdp_nccl_group_has_failed(nccl_group *group, fsdp_error *err_out)
{
    pthread_mutex_lock(&group->lock);
    bool has_failed = group->origin != FSDP_NCCL_NO_FAILURE && group->origin != FSDP_NCCL_REMOTE;
    if (has_failed && err_out)
        *err_out = group->failure;
    pthread_mutex_unlock(&group->lock);
    return has_failed;
}

void fsdp_nccl_nap(unsigned naps)
{
    if (naps >= SPINS)
        nanosleep(&(struct timespec){.tv_nsec = NAP_US * 1000}, NULL);
}

void fsdp_nccl_advance(nccl_group *group)
{
    while (group->done < group->issued &&
           atomic_load(&group->flags[group->done % FSDP_NCCL_PENDING])) {
        group->done++;
        group->progress_ms = fsdp_now_ms();
    }
}

fsdp_nccl_result fsdp_nccl_poll(const fsdp_nccl *nccl, fsdp_nccl_comm handle)
{
    fsdp_nccl_result state = FSDP_NCCL_SUCCESS;
    fsdp_nccl_result result = nccl->CommGetAsyncError(handle, &state);
    return result != FSDP_NCCL_SUCCESS ? result : state;
}

/* --- the end of communicators ------------------------------------------------------------------- */

bool fsdp_nccl_take_handle(nccl_group *group, nccl_group **list)
{
    fsdp_nccl_comm handle = atomic_load(&group->handle);
    if (!handle)
        return false;
    group->ended = handle;
    atomic_store(&group->end, FSDP_NCCL_ENDING); /* first: who finds no handle looks at it */
    atomic_store(&group->handle, NULL);
    /* The creator comes last: NCCL waits there for its thread, which may wait for the GPU. */
    while (*list && group->is_creator)
        list = &(*list)->next_ended;
    group->next_ended = *list;
    *list = group;
    return true;
}

/* Waits for a call of another thread; by trying, since ThreadSanitizer does not know
 * pthread_mutex_clocklock. A call that begins later has no handle. */
static void await_call(nccl_group *group, int64_t until_ms)
{
    for (unsigned naps = 0; fsdp_now_ms() < until_ms; naps++) {
        if (pthread_mutex_trylock(&group->calling) == 0) {
            pthread_mutex_unlock(&group->calling);
            return;
        }
        fsdp_nccl_nap(naps);
    }
}

/* A split that failed has left a communicator, too: its parent goes first. */
static void abort_group(const fsdp_nccl *nccl, nccl_group *group)
{
    (void)nccl->CommAbort(group->ended);
    fsdp_nccl_comm split = atomic_exchange(&group->split, NULL);
    if (split)
        (void)nccl->CommAbort(split);
}

static void abort_groups(const fsdp_nccl *nccl, nccl_group *list)
{
    const bool in_group = nccl->version >= FSDP_NCCL_ABORTS_IN_GROUPS;
    const int64_t until_ms = fsdp_now_ms() + CALL_MS;
    if (in_group)
        (void)nccl->GroupStart();
    for (nccl_group *group = list; in_group && group; group = group->next_ended) {
        if (!group
                 ->is_blocking) /* a call returns by itself, and must not meet NCCL's wait for its thread */
            await_call(group, until_ms);
        abort_group(nccl, group);
    }
    for (nccl_group *group = list; group; group = group->next_ended)
        await_call(group, until_ms);
    if (in_group) {
        (void)nccl->GroupEnd();
        return;
    }
    for (nccl_group *group = list; group; group = group->next_ended)
        abort_group(nccl, group);
}

static bool finalize(const fsdp_nccl *nccl, fsdp_nccl_comm handle, int64_t until_ms)
{
    fsdp_nccl_result result = nccl->CommFinalize(handle);
    for (unsigned naps = 0; result == FSDP_NCCL_IN_PROGRESS && fsdp_now_ms() < until_ms; naps++) {
        fsdp_nccl_nap(naps);
        result = fsdp_nccl_poll(nccl, handle);
    }
    return result == FSDP_NCCL_SUCCESS;
}

/* ncclCommDestroy finalizes; where that must not block, it is done before. */
static void destroy_group(const fsdp_nccl *nccl, const nccl_group *group, int64_t until_ms)
{
    if (group->is_blocking || finalize(nccl, group->ended, until_ms))
        (void)nccl->CommDestroy(group->ended);
    else
        (void)nccl->CommAbort(group->ended);
}

/* The transport may be gone when NCCL returns, and each group as soon as it has ended. */
static void end_groups(nccl_group *list, bool aborts)
{
    const nccl_transport *transport = list->transport;
    const fsdp_nccl *nccl = transport->nccl;
    const int64_t until_ms = fsdp_now_ms() + atomic_load(&transport->base.deadline_ms);
    /* NCCL comes back to this thread's GPU, and would begin with a context on GPU 0. */
    (void)transport->device->ops->choose_gpu(transport->device);
    if (aborts)
        abort_groups(nccl, list);
    for (nccl_group *group = list; group && !aborts; group = group->next_ended)
        destroy_group(nccl, group, until_ms);
    while (list) {
        nccl_group *next = list->next_ended;
        atomic_store(&list->end, FSDP_NCCL_ENDED);
        list = next;
    }
}

static void *abort_list(void *list)
{
    end_groups(list, true);
    return NULL;
}

static void *destroy_list(void *list)
{
    end_groups(list, false);
    return NULL;
}

/* Without a thread the caller does it. */
static void start_end(nccl_group *list, bool aborts)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, aborts ? abort_list : destroy_list, list) == 0)
        pthread_detach(thread);
    else
        end_groups(list, aborts);
}

void fsdp_nccl_end(nccl_group *list, bool aborts)
{
    if (list && aborts && list->transport->nccl->version >= FSDP_NCCL_ABORTS_IN_GROUPS) {
        start_end(list, aborts);
        return;
    }
    while (list) {
        nccl_group *next = list->next_ended;
        list->next_ended = NULL;
        start_end(list, aborts);
        list = next;
    }
}

bool fsdp_nccl_await_end(const nccl_group *group)
{
    const int64_t until_ms =
        fsdp_now_ms() + atomic_load(&group->transport->base.deadline_ms) + END_MS;
    for (unsigned naps = 0; atomic_load(&group->end) == FSDP_NCCL_ENDING; naps++) {
        if (fsdp_now_ms() >= until_ms)
            return false;
        fsdp_nccl_nap(naps);
    }
    return true;
}
