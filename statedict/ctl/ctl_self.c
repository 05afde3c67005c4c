/* The life of a control plane, and the back end of one rank alone. The calls are in ctl.c. */
#include "statedict/ctl/ctl_backend.h"

#include <string.h>

#include "base/core/given.h"
#include "base/core/mem.h"

fsdp_status fsdp_ctl_create(const fsdp_ctl_ops *ops, int rank, int size, void *backend,
                            fsdp_ctl **ctl_out, fsdp_error *err)
{
    fsdp_ctl made = {.ops = ops,
                     .rank = rank,
                     .size = size,
                     .deadline_ms = FSDP_CTL_DEADLINE_MS,
                     .backend = backend};
    made.peers = rank == 0 ? fsdp_alloc((size_t)size, sizeof *made.peers) : NULL;
    fsdp_ctl *ctl = fsdp_alloc(1, sizeof *ctl);
    if (!ctl || (rank == 0 && !made.peers)) {
        ops->close(&made);
        fsdp_free(made.peers);
        fsdp_free(ctl);
        return fsdp_fail_memory(err, "the control plane");
    }
    *ctl = made;
    *ctl_out = ctl;
    return FSDP_OK;
}

fsdp_status fsdp_ctl_hand_over(fsdp_ctl *ctl, int from, fsdp_ctl_bytes received, void *data,
                               size_t size, fsdp_error *err)
{
    if (received.size == size) {
        memcpy(data, received.data, size);
        return FSDP_OK;
    }
    ctl->unexpected_size = received.size;
    memcpy(ctl->unexpected, received.data,
           received.size < sizeof ctl->unexpected ? received.size : sizeof ctl->unexpected);
    return fsdp_fail(err, FSDP_ERR_PEER, "rank %d sent %zu bytes where %zu were expected", from,
                     received.size, size);
}

void fsdp_ctl_free(fsdp_ctl *ctl)
{
    if (!ctl)
        return;
    ctl->ops->close(ctl);
    fsdp_free(ctl->peers);
    fsdp_free(ctl);
}

static void close_self(fsdp_ctl *ctl)
{
    (void)ctl;
}

/* A single rank never sends or receives. */
static const fsdp_ctl_ops self_ops = {.name = "self", .shares_memory = true, .close = close_self};

fsdp_status fsdp_ctl_self(fsdp_ctl **ctl_out, fsdp_error *err)
{
    FSDP_NEED(err, ctl_out);
    return fsdp_ctl_create(&self_ops, 0, 1, NULL, ctl_out, err);
}

int fsdp_ctl_rank(const fsdp_ctl *ctl)
{
    if (!ctl)
        return 0;
    return ctl->rank;
}

int fsdp_ctl_size(const fsdp_ctl *ctl)
{
    if (!ctl)
        return 0;
    return ctl->size;
}

bool fsdp_ctl_shares_memory(const fsdp_ctl *ctl)
{
    return ctl->ops->shares_memory;
}

void fsdp_ctl_set_deadline(fsdp_ctl *ctl, int milliseconds)
{
    if (!ctl)
        return;
    ctl->deadline_ms = milliseconds > 0 ? milliseconds : 1;
}

void fsdp_ctl_set_waiting(fsdp_ctl *ctl, void (*waiting)(void *context), void *context)
{
    ctl->waiting = waiting;
    ctl->waiting_user = context;
}
