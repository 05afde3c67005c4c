/* Failures of a group, results of NCCL as errors, and waits that both can end. See comm_nccl.h. */
#include "runtime/comm_nccl/comm_nccl.h"

#include <string.h>
#include <time.h>

#include "base/core/clock.h"

enum { SPINS = 200, NAP_US = 50 };

static const char *hint_of(const nccl_transport *transport, fsdp_nccl_result result,
                           const char *said)
{
    if (strstr(said, "Duplicate GPU"))
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

void fsdp_nccl_await_told(nccl_group *group)
{
    nccl_transport *transport = group->transport;
    int64_t until_ms = fsdp_now_ms() + atomic_load(&transport->base.deadline_ms);
    bool is_told = false;
    while (!is_told && atomic_load(&transport->is_whole) && fsdp_now_ms() < until_ms) {
        pthread_mutex_lock(&group->lock);
        is_told = group->origin == FSDP_NCCL_NO_FAILURE || group->origin == FSDP_NCCL_TOLD;
        pthread_mutex_unlock(&group->lock);
        fsdp_nccl_nap(SPINS);
    }
}

void fsdp_nccl_advance(nccl_group *group)
{
    while (group->done < group->issued &&
           atomic_load(&group->flags[group->done % FSDP_NCCL_PENDING])) {
        group->done++;
        group->progress_ms = fsdp_now_ms();
    }
}

fsdp_nccl_result fsdp_nccl_poll(nccl_group *group)
{
    fsdp_nccl_result state = FSDP_NCCL_SUCCESS;
    fsdp_nccl_result result = group->transport->nccl->CommGetAsyncError(group->handle, &state);
    return result != FSDP_NCCL_SUCCESS ? result : state;
}

/* NCCL's notice that another rank is gone becomes the group's failure when the watch knows no better one. */
static fsdp_nccl_result await_reason(nccl_group *group, fsdp_nccl_result result)
{
    fsdp_error why = {0};
    if (result != FSDP_NCCL_REMOTE_ERROR)
        return result;
    (void)fsdp_nccl_fail(group->transport, result, &why);
    fsdp_nccl_group_fail(group, &why, FSDP_NCCL_REMOTE);
    return FSDP_NCCL_IN_PROGRESS;
}

fsdp_status fsdp_nccl_await(nccl_group *group, fsdp_nccl_result result, fsdp_error *err)
{
    fsdp_error why = {0};
    bool has_noticed = result == FSDP_NCCL_REMOTE_ERROR;
    result = await_reason(group, result);
    for (unsigned naps = 0; result == FSDP_NCCL_IN_PROGRESS; naps++) {
        if (fsdp_nccl_group_has_failed(group, &why)) {
            if (err)
                *err = why;
            return why.status;
        }
        fsdp_nccl_nap(naps);
        pthread_mutex_lock(&group->calling);
        if (group->handle && !has_noticed) /* one that blocks reports success again */
            result = fsdp_nccl_poll(group);
        pthread_mutex_unlock(&group->calling);
        has_noticed |= result == FSDP_NCCL_REMOTE_ERROR;
        result = await_reason(group, result);
    }
    return result == FSDP_NCCL_SUCCESS ? FSDP_OK : fsdp_nccl_fail(group->transport, result, err);
}
