/* Checks the arguments of a collective that one rank can check alone. See comm.h. */
#include "runtime/comm/comm_backend.h"

#include <inttypes.h>

#include "base/core/mem.h"
#include "kernels/train/tensor.h"

/* The extent of one buffer of a call. */
typedef struct extent {
    const char *name;
    const unsigned char *data;
    int64_t bytes;
} extent;

static fsdp_status fail_large(fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_USAGE, "its size overflows");
}

static fsdp_status check_count(int64_t count, fsdp_error *err)
{
    if (count < 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "a count is %" PRId64, count);
    return FSDP_OK;
}

static fsdp_status add_counts(const int64_t *counts, int n, int64_t *sum_out, fsdp_error *err)
{
    *sum_out = 0;
    for (int i = 0; i < n; i++) {
        FSDP_TRY(check_count(counts[i], err));
        if (fsdp_add_overflow(*sum_out, counts[i], sum_out))
            return fail_large(err);
    }
    return FSDP_OK;
}

static fsdp_status check_op(const fsdp_collective *call, fsdp_error *err)
{
    const char *dtype = fsdp_dtype_name(call->dtype);
    if (!fsdp_comm_reduces((uint32_t)call->kind))
        return FSDP_OK;
    if (!fsdp_tensor_can_fold(call->dtype))
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s cannot be reduced", dtype);
    if (call->op == FSDP_REDUCE_SUM || call->op == FSDP_REDUCE_MAX)
        return FSDP_OK;
    if (call->op != FSDP_REDUCE_AVG && call->op != FSDP_REDUCE_PREMUL_SUM)
        return fsdp_fail(err, FSDP_ERR_USAGE, "no operation has the number %d", (int)call->op);
    if (!fsdp_dtype_describe(call->dtype)->is_float)
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s has no averages and no factors", dtype);
    return FSDP_OK;
}

/* Elements of this rank's buffers. */
static fsdp_status count_elements(const fsdp_comm *comm, const fsdp_collective *call,
                                  int64_t *in_count_out, int64_t *out_count_out, fsdp_error *err)
{
    int64_t all;
    if (call->kind == FSDP_ALL_TO_ALL) {
        if (!call->counts || !call->out_counts)
            return fsdp_fail(err, FSDP_ERR_USAGE, "counts and out_counts are needed");
        FSDP_TRY(add_counts(call->counts, comm->size, in_count_out, err));
        return add_counts(call->out_counts, comm->size, out_count_out, err);
    }
    FSDP_TRY(check_count(call->count, err));
    *in_count_out = *out_count_out = call->count;
    if (call->kind != FSDP_ALL_GATHER && call->kind != FSDP_REDUCE_SCATTER)
        return call->counts ? fsdp_fail(err, FSDP_ERR_USAGE, "it has no uneven counts") : FSDP_OK;
    if (call->counts)
        FSDP_TRY(add_counts(call->counts, comm->size, &all, err));
    else if (fsdp_mul_overflow(call->count, comm->size, &all))
        return fail_large(err);
    *in_count_out = *out_count_out = fsdp_comm_part(call, comm->rank);
    *(call->kind == FSDP_ALL_GATHER ? out_count_out : in_count_out) = all;
    return FSDP_OK;
}

static bool is_in_place(const fsdp_comm *comm, const fsdp_collective *call, const extent *in,
                        const extent *out)
{
    int64_t element = (int64_t)fsdp_dtype_size(call->dtype);
    switch (call->kind) {
    case FSDP_ALL_GATHER:
        return in->data == out->data + fsdp_comm_place(call, comm->rank) * element;
    case FSDP_REDUCE_SCATTER:
        return out->data == in->data + fsdp_comm_place(call, comm->rank) * element;
    case FSDP_ALL_REDUCE: return in->data == out->data;
    default: return false;
    }
}

static fsdp_status check_buffers(const fsdp_comm *comm, const fsdp_collective *call,
                                 const extent *in, const extent *out, fsdp_error *err)
{
    bool uses_in = call->kind != FSDP_BROADCAST || call->root == comm->rank;
    bool uses_out = call->kind != FSDP_BROADCAST || call->root != comm->rank;
    bool has_in = uses_in && in->bytes > 0, has_out = uses_out && out->bytes > 0;
    if ((has_in && !in->data) || (has_out && !out->data))
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' is missing",
                         has_in && !in->data ? in->name : out->name);
    if (!has_in || !has_out)
        return FSDP_OK;
    uintptr_t in_at = (uintptr_t)in->data, out_at = (uintptr_t)out->data;
    bool overlap = in_at < out_at + (uintptr_t)out->bytes && out_at < in_at + (uintptr_t)in->bytes;
    if (overlap && !is_in_place(comm, call, in, out))
        return fsdp_fail(err, FSDP_ERR_USAGE, "'in' and 'out' overlap");
    return FSDP_OK;
}

static fsdp_status check_view(const fsdp_comm *comm, const fsdp_collective *call, fsdp_error *err)
{
    if (!call->view || call->kind == FSDP_ALL_GATHER)
        return FSDP_OK;
    if (call->kind != FSDP_REDUCE_SCATTER)
        return fsdp_fail(err, FSDP_ERR_USAGE, "only all_gather and reduce_scatter have a view");
    if (!(fsdp_comm_abilities(comm) & FSDP_COMM_POOL))
        return fsdp_fail(err, FSDP_ERR_USAGE, "ranks over %s do not see each other's memory",
                         fsdp_comm_backend(comm));
    return FSDP_OK;
}

fsdp_status fsdp_comm_check(const fsdp_comm *comm, const fsdp_collective *call, fsdp_error *err)
{
    extent in = {.name = "in", .data = call->in}, out = {.name = "out", .data = call->out};
    int64_t element = (int64_t)fsdp_dtype_size(call->dtype);
    if (call->kind < FSDP_ALL_GATHER || call->kind > FSDP_ALL_TO_ALL)
        return fsdp_fail(err, FSDP_ERR_USAGE, "no collective has the number %d", (int)call->kind);
    if (element == 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "no dtype has the number %d", (int)call->dtype);
    if (call->kind == FSDP_BROADCAST && (call->root < 0 || call->root >= comm->size))
        return fsdp_fail(err, FSDP_ERR_USAGE, "root %d is not one of %d ranks", call->root,
                         comm->size);
    FSDP_TRY(check_view(comm, call, err));
    FSDP_TRY(check_op(call, err));
    FSDP_TRY(count_elements(comm, call, &in.bytes, &out.bytes, err));
    if (fsdp_mul_overflow(in.bytes, element, &in.bytes) ||
        fsdp_mul_overflow(out.bytes, element, &out.bytes))
        return fail_large(err);
    return check_buffers(comm, call, &in, &out, err);
}
