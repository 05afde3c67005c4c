/*
 * Averages and premultiplied sums over a back end that only sums, bit-identical to one that does
 * all: the sum is made in the type of the accumulator, which rounds nothing, and scaled there.
 */
#include "runtime/comm/comm_backend.h"

#include "base/core/mem.h"
#include "kernels/train/tensor.h"

/* The call as the caller made it, and the one that the back end gets. */
typedef struct scaled_call {
    const fsdp_collective *call;
    fsdp_collective sum;
    fsdp_dtype wide;
    int64_t in_count, out_count;
    void *wide_in, *wide_out;
} scaled_call;

static void convert(void *to, fsdp_dtype to_type, const void *from, fsdp_dtype from_type,
                    int64_t count)
{
    const fsdp_rect rect = fsdp_rect_line(to, to_type, from, from_type, count);
    if (count > 0)
        fsdp_rects_copy(&rect, 1);
}

static fsdp_status make_room(scaled_call *scaled, fsdp_error *err)
{
    size_t element = fsdp_dtype_size(scaled->wide);
    bool needs_out = scaled->wide != scaled->call->dtype;
    bool needs_in = needs_out || scaled->call->op == FSDP_REDUCE_PREMUL_SUM;
    if (needs_in)
        scaled->wide_in = fsdp_realloc(NULL, (size_t)scaled->in_count, element);
    if (needs_out)
        scaled->wide_out = fsdp_realloc(NULL, (size_t)scaled->out_count, element);
    if ((needs_in && !scaled->wide_in) || (needs_out && !scaled->wide_out))
        return fsdp_fail_memory(err, "a reduction that is scaled");
    return FSDP_OK;
}

static fsdp_status run_sum(fsdp_comm *comm, scaled_call *scaled, fsdp_error *err)
{
    const fsdp_collective *call = scaled->call;
    if (scaled->wide_in) {
        convert(scaled->wide_in, scaled->wide, call->in, call->dtype, scaled->in_count);
        scaled->sum.in = scaled->wide_in;
    }
    if (scaled->wide_out)
        scaled->sum.out = scaled->wide_out;
    if (call->op == FSDP_REDUCE_PREMUL_SUM)
        fsdp_tensor_multiply(scaled->wide_in, scaled->wide, (size_t)scaled->in_count, call->factor);

    fsdp_comm_header header = fsdp_comm_head(comm, &scaled->sum);
    FSDP_TRY(comm->transport->ops->run(comm, &scaled->sum, &header, err));

    if (call->op == FSDP_REDUCE_AVG)
        fsdp_tensor_divide(scaled->sum.out, scaled->wide, (size_t)scaled->out_count, comm->size);
    if (scaled->wide_out)
        convert(call->out, call->dtype, scaled->wide_out, scaled->wide, scaled->out_count);
    return FSDP_OK;
}

fsdp_status fsdp_comm_run_scaled(fsdp_comm *comm, const fsdp_collective *call, fsdp_error *err)
{
    scaled_call scaled = {.call = call, .sum = *call};
    bool is_scatter = call->kind == FSDP_REDUCE_SCATTER;
    scaled.wide = call->dtype == FSDP_F64 ? FSDP_F64 : FSDP_F32;
    scaled.sum.dtype = scaled.wide;
    scaled.sum.op = FSDP_REDUCE_SUM;
    scaled.in_count = is_scatter ? fsdp_comm_place(call, comm->size) : call->count;
    scaled.out_count = is_scatter ? fsdp_comm_part(call, comm->rank) : call->count;
    fsdp_status status = make_room(&scaled, err);
    if (status == FSDP_OK)
        status = run_sum(comm, &scaled, err);
    fsdp_free(scaled.wide_in);
    fsdp_free(scaled.wide_out);
    return status;
}
