/*
 * Use of other ranks' memory by ranks with one address space. A rank whose control plane broke must
 * not free what others still use, and no message can tell it when they have stopped: so they count
 * themselves while they do.
 */
#include "statedict/ctl/ctl_backend.h"

#include <time.h>

fsdp_status fsdp_ctl_check_access(const fsdp_ctl *ctl, fsdp_error *err)
{
    return ctl->access && atomic_load(&ctl->access->closed)
               ? fsdp_fail(err, FSDP_ERR_PEER, "another rank has left")
               : FSDP_OK;
}

fsdp_status fsdp_ctl_begin_access(fsdp_ctl *ctl, fsdp_error *err)
{
    if (ctl->access)
        atomic_fetch_add(&ctl->access->users, 1);
    fsdp_status status = fsdp_ctl_check_access(ctl, err);
    if (status != FSDP_OK)
        fsdp_ctl_end_access(ctl);
    return status;
}

void fsdp_ctl_end_access(fsdp_ctl *ctl)
{
    if (ctl->access)
        atomic_fetch_sub(&ctl->access->users, 1);
}

void fsdp_ctl_withdraw_memory(fsdp_ctl *ctl)
{
    bool is_broken = ctl->poison.status != FSDP_OK;
    if (!ctl->access || !is_broken)
        return;
    atomic_store(&ctl->access->closed, true);
    while (atomic_load(&ctl->access->users) > 0)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}
