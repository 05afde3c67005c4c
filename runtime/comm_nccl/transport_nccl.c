/* Creates and closes the transport over NCCL. See comm_nccl.h. */
#include "runtime/comm_nccl/comm_nccl.h"

#include "base/core/clock.h"
#include "base/core/mem.h"
#include "runtime/comm_nccl/transport_nccl.h"

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
    FSDP_TRY(fsdp_nccl_open(&nccl, err));
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
