/*
 * The FSDP1 face: communication hooks. A hook replaces a unit's reduce-scatter, or its all-reduce when
 * nothing is cut, together with the division of the gradients.
 */
#include "runtime/wrap/wrap_internal.h"

#include "base/core/given.h"
#include "base/core/mem.h"
#include "runtime/context/work.h"
#include "kernels/train/tensor.h"

/* --- registering ------------------------------------------------------------------------------ */

static fsdp_wrap_bucket bucket_of(fsdp_wrap *wrap, const fsdp_collective *call)
{
    fsdp_stream *stream = call->stream;
    return (fsdp_wrap_bucket){.unit = call->unit,
                              .dtype = call->dtype,
                              .wrap = wrap,
                              .stream = stream,
                              .native = stream ? stream->device->ops->native(stream) : NULL};
}

static fsdp_status run_scatter(void *context, fsdp_comm *comm, const fsdp_collective *call,
                               fsdp_error *err)
{
    fsdp_wrap *wrap = context;
    fsdp_wrap_bucket bucket = bucket_of(wrap, call);
    bucket.grad = (void *)call->in;
    bucket.count = call->count * fsdp_comm_size(comm);
    bucket.shard = call->out;
    return wrap->hook(wrap->hook_context, comm, &bucket, err);
}

static fsdp_status run_all_reduce(void *context, fsdp_comm *comm, const fsdp_collective *call,
                                  fsdp_error *err)
{
    fsdp_wrap *wrap = context;
    fsdp_wrap_bucket bucket = bucket_of(wrap, call);
    bucket.grad = call->out;
    bucket.count = call->count;
    return wrap->hook(wrap->hook_context, comm, &bucket, err);
}

static fsdp_status check_hook(fsdp_wrap *wrap, fsdp_error *err)
{
    FSDP_TRY(fsdp_wrap_check_idle(wrap, "fsdp_wrap_register_comm_hook", err));
    if (wrap->hook)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot register a second communication hook: the first one stays");
    if (wrap->root->last_seen)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "cannot register a communication hook after the first forward; register it before");
    for (size_t i = 0; i < wrap->flat_count; i++)
        if (wrap->flats[i].is_hybrid)
            return fsdp_fail(
                err, FSDP_ERR_USAGE,
                "cannot register a communication hook: the strategy of unit '%s' is hybrid",
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

static void cast(const fsdp_wrap_bucket *bucket, void *to, fsdp_dtype to_type, const void *from,
                 fsdp_dtype from_type, int64_t count)
{
    if (bucket->stream)
        fsdp_work_cast(bucket->stream, to, to_type, from, from_type, count);
    else
        fsdp_cast(to, to_type, from, from_type, (size_t)count);
}

static void divide(const fsdp_wrap_bucket *bucket, void *data, fsdp_dtype dtype, int64_t count,
                   double divisor)
{
    if (bucket->stream)
        fsdp_work_divide(bucket->stream, data, dtype, count, divisor);
    else
        fsdp_tensor_divide(data, dtype, (size_t)count, divisor);
}

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
                                  .unit = bucket->unit,
                                  .stream = bucket->stream};
    cast(bucket, narrow, dtype, bucket->grad, bucket->dtype, bucket->count);
    divide(bucket, narrow, dtype, bucket->count, before);
    FSDP_TRY(fsdp_comm_run(comm, &call, err));
    divide(bucket, out, dtype, count, ranks / before);
    cast(bucket, bucket->shard ? bucket->shard : bucket->grad, bucket->dtype, out, dtype, count);
    return FSDP_OK;
}

static fsdp_status compress_on_stream(fsdp_comm *comm, const fsdp_wrap_bucket *bucket,
                                      fsdp_dtype dtype, fsdp_error *err)
{
    fsdp_memory_pool *memory = &bucket->wrap->root->context->memory;
    const fsdp_memory_request request = {.class = FSDP_MEMORY_REDUCE,
                                         .stream = bucket->stream,
                                         .size = (size_t)bucket->count * fsdp_dtype_size(dtype),
                                         .owner = bucket->unit};
    fsdp_block *narrow;
    FSDP_TRY(fsdp_memory_take(memory, &request, &narrow, err));
    fsdp_status status = reduce_narrow(comm, bucket, dtype, narrow->data, err);
    fsdp_memory_give(memory, narrow, fsdp_stream_now(bucket->stream));
    return status;
}

static fsdp_status compress(fsdp_comm *comm, const fsdp_wrap_bucket *bucket, fsdp_dtype dtype,
                            fsdp_error *err)
{
    if (bucket->stream)
        return compress_on_stream(comm, bucket, dtype, err);
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
