/*
 * The FSDP1 face: communication hooks. A hook replaces a unit's reduce-scatter, or its all-reduce when
 * nothing is cut, together with the division of the gradients.
 */
#include "runtime/wrap/wrap_internal.h"

#include "base/core/given.h"
#include "base/core/mem.h"
#include "kernels/train/tensor.h"

/* --- registering ------------------------------------------------------------------------------ */

static fsdp_status run_scatter(void *context, fsdp_comm *comm, const fsdp_collective *call,
                               fsdp_error *err)
{
    const fsdp_wrap *wrap = context;
    const fsdp_wrap_bucket bucket = {.unit = call->unit,
                                     .dtype = call->dtype,
                                     .grad = (void *)call->in,
                                     .count = call->count * fsdp_comm_size(comm),
                                     .shard = call->out};
    return wrap->hook(wrap->hook_context, comm, &bucket, err);
}

static fsdp_status run_all_reduce(void *context, fsdp_comm *comm, const fsdp_collective *call,
                                  fsdp_error *err)
{
    const fsdp_wrap *wrap = context;
    const fsdp_wrap_bucket bucket = {
        .unit = call->unit, .dtype = call->dtype, .grad = call->out, .count = call->count};
    return wrap->hook(wrap->hook_context, comm, &bucket, err);
}

static fsdp_status check_hook(fsdp_wrap *wrap, fsdp_error *err)
{
    FSDP_TRY(fsdp_wrap_check_idle(wrap, "fsdp_wrap_register_comm_hook", err));
    const fsdp_device *device = wrap->root->context->device;
    if (wrap->hook)
        return fsdp_fail(err, FSDP_ERR_USAGE, "a communication hook was registered before");
    if (!device->ops->is_host)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "communication hooks compute on the host, and device %s has memory of its "
                         "own",
                         device->ops->name);
    if (wrap->root->last_seen)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "a communication hook is registered before the first forward");
    for (size_t i = 0; i < wrap->flat_count; i++)
        if (fsdp_wrap_is_hybrid(wrap->flats[i].opts.strategy))
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "unit %s: communication hooks do not go with hybrid strategies",
                             fsdp_unit_name(wrap->flats[i].unit));
    return FSDP_OK;
}

/* Configures the unit for a plain sum without division, because the hook computes the mean. */
static fsdp_status install(fsdp_wrap *wrap, fsdp_unit *unit, fsdp_error *err)
{
    fsdp_custom_collective *scatter = fsdp_alloc(1, sizeof *scatter);
    fsdp_custom_collective *all_reduce = fsdp_alloc(1, sizeof *all_reduce);
    if (!scatter || !all_reduce) {
        fsdp_free(scatter);
        fsdp_free(all_reduce);
        return fsdp_fail_memory(err, "a communication hook");
    }
    *scatter = (fsdp_custom_collective){.context = wrap, .run = run_scatter};
    *all_reduce = (fsdp_custom_collective){.context = wrap, .run = run_all_reduce};
    fsdp_free(unit->settings.custom_reduce);
    unit->settings.custom_reduce = scatter;
    unit->settings.custom_all_reduce = all_reduce;
    unit->settings.forces_sum = true;
    unit->settings.divide_factor = 1;
    return FSDP_OK;
}

fsdp_status fsdp_wrap_register_comm_hook(fsdp_wrap *wrap, fsdp_wrap_comm_hook hook, void *context,
                                         fsdp_error *err)
{
    FSDP_NEED(err, wrap);
    FSDP_NEED_CALL(err, hook);
    FSDP_TRY(check_hook(wrap, err));
    wrap->hook = hook;
    wrap->hook_context = context;
    for (size_t i = 0; i < wrap->flat_count; i++)
        FSDP_TRY(install(wrap, wrap->flats[i].unit, err));
    return FSDP_OK;
}

/* --- narrow numbers --------------------------------------------------------------------------- */

static fsdp_status reduce_narrow(fsdp_comm *comm, const fsdp_wrap_bucket *bucket, fsdp_dtype dtype,
                                 void *narrow, fsdp_error *err)
{
    int ranks = fsdp_comm_size(comm);
    double before = fsdp_divide_before_sum(ranks);
    int64_t each = bucket->count / ranks;
    int64_t count = bucket->shard ? each : bucket->count;
    unsigned char *out = narrow;
    if (bucket->shard)
        out += (size_t)(each * fsdp_comm_rank(comm)) * fsdp_dtype_size(dtype);
    const fsdp_collective call = {.kind = bucket->shard ? FSDP_REDUCE_SCATTER : FSDP_ALL_REDUCE,
                                  .dtype = dtype,
                                  .in = narrow,
                                  .out = out,
                                  .count = count,
                                  .op = FSDP_REDUCE_SUM,
                                  .unit = bucket->unit};
    fsdp_cast(narrow, dtype, bucket->grad, bucket->dtype, (size_t)bucket->count);
    fsdp_tensor_divide(narrow, dtype, (size_t)bucket->count, before);
    FSDP_TRY(fsdp_comm_run(comm, &call, err));
    fsdp_tensor_divide(out, dtype, (size_t)count, ranks / before);
    fsdp_cast(bucket->shard ? bucket->shard : bucket->grad, bucket->dtype, out, dtype,
              (size_t)count);
    return FSDP_OK;
}

static fsdp_status compress(fsdp_comm *comm, const fsdp_wrap_bucket *bucket, fsdp_dtype dtype,
                            fsdp_error *err)
{
    void *narrow = fsdp_alloc((size_t)bucket->count, fsdp_dtype_size(dtype));
    if (!narrow)
        return fsdp_fail_memory(err, bucket->unit);
    fsdp_status status = reduce_narrow(comm, bucket, dtype, narrow, err);
    fsdp_free(narrow);
    return status;
}

fsdp_status fsdp_wrap_fp16_compress_hook(void *context, fsdp_comm *comm,
                                         const fsdp_wrap_bucket *bucket, fsdp_error *err)
{
    FSDP_NEED(err, comm, bucket);
    (void)context;
    return compress(comm, bucket, FSDP_F16, err);
}

fsdp_status fsdp_wrap_bf16_compress_hook(void *context, fsdp_comm *comm,
                                         const fsdp_wrap_bucket *bucket, fsdp_error *err)
{
    FSDP_NEED(err, comm, bucket);
    (void)context;
    return compress(comm, bucket, FSDP_BF16, err);
}
