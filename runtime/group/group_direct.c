/*
 * A reduction without packing. If nothing overlaps (device cpu) and ranks can read each other's memory,
 * each rank adds up its rows of all ranks' gradients in place. In docs/flow_step.md: step 10.
 *
 * The block that packing would fill holds a table instead: for each part, the distance in bytes from the
 * table to the gradient. The distance is the same in every rank's mapping of this rank's memory.
 */
#include "runtime/group/group_internal.h"

#include <string.h>

#include "base/core/mem.h"

/* --- conditions ------------------------------------------------------------------------------- */

/* Equal on all ranks, as all that follows: it decides which collective runs. */
static bool is_in_rows(const fsdp_param *param, fsdp_dtype dtype)
{
    return param->outer == 1 && param->grad_dtype == dtype &&
           fsdp_param_reduce_dtype(param) == dtype;
}

bool fsdp_reduced_is_direct(const fsdp_group *group, const fsdp_reduced *reduced,
                            const fsdp_divide *divide)
{
    size_t input = fsdp_reduced_bytes(reduced) * (size_t)group->shard_size;
    if (!fsdp_group_may_be_direct(group) || divide->before != 1 ||
        input < reduced->count * sizeof(int64_t))
        return false;
    for (size_t i = 0; i < reduced->count; i++)
        if (!is_in_rows(reduced->parts[i].param, reduced->dtype))
            return false;
    return true;
}

/* --- the table -------------------------------------------------------------------------------- */

static fsdp_status fail_unreadable(const fsdp_group *group, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_LIMIT, "unit %s: out of memory that other ranks can read",
                     group->name);
}

/* A gradient that was allocated before the unit took the communicator's memory is copied there once. */
static fsdp_status make_readable(fsdp_param *param, fsdp_block **source, fsdp_error *err)
{
    fsdp_group *group = param->group;
    fsdp_block *old = *source;
    fsdp_stream *compute = fsdp_group_stream(group, FSDP_STREAM_COMPUTE);
    if (old->is_external)
        return FSDP_OK;
    const fsdp_memory_request request = {.class = FSDP_MEMORY_GRAD,
                                         .stream = compute,
                                         .allocator = fsdp_group_grad_allocator(group),
                                         .size = old->size,
                                         .owner = param->name};
    FSDP_TRY(fsdp_memory_take(&group->context->memory, &request, source, err));
    fsdp_work_cast(compute, (*source)->data, FSDP_U8, old->data, FSDP_U8, (int64_t)old->size);
    fsdp_group_give(group, old, fsdp_stream_now(compute));
    return (*source)->is_external ? FSDP_OK : fail_unreadable(group, err);
}

fsdp_status fsdp_group_list_grads(fsdp_group *group, const fsdp_reduced *reduced,
                                  fsdp_block **input_out, fsdp_error *err)
{
    const fsdp_stream *compute = fsdp_group_stream(group, FSDP_STREAM_COMPUTE);
    FSDP_TRY(fsdp_group_take_input(group, reduced, input_out, err));
    if (!(*input_out)->is_external)
        return fail_unreadable(group, err);
    int64_t *table = (*input_out)->data;
    for (size_t i = 0; i < reduced->count; i++) {
        fsdp_param *param = reduced->parts[i].param;
        fsdp_block **source = param->kept ? &param->kept : &param->grad;
        FSDP_TRY(make_readable(param, source, err));
        table[i] = (int64_t)((intptr_t)(*source)->data - (intptr_t)table);
        fsdp_memory_uncount(&group->context->memory, *source);
    }
    fsdp_trace_work(group, "copy_in", compute->name, (int64_t)(*input_out)->size);
    return FSDP_OK;
}

/* --- the sum ---------------------------------------------------------------------------------- */

typedef struct addition {
    const fsdp_group *group;
    const fsdp_reduced *reduced;
    const fsdp_divide *divide;
    const void **sources;
    bool lacks_one;
} addition;

/* This rank's rows of part i in a member's memory. NULL: the member has failed, and its table is
 * overwritten. */
static const void *source_at(const addition *work, size_t i, int member, const int64_t *table,
                             size_t skip, size_t size)
{
    const void *at = (const void *)((uintptr_t)table + (uintptr_t)table[i] + skip);
    return fsdp_comm_sees(work->group->reduce->comm, member, at, size) ? at : NULL;
}

static void add_up_part(addition *work, size_t i, const void *const *tables)
{
    const fsdp_group *group = work->group;
    const fsdp_reduced_part *part = &work->reduced->parts[i];
    const fsdp_param *param = part->param;
    size_t element = fsdp_dtype_size(work->reduced->dtype);
    size_t size = (size_t)(param->rows * param->rest) * element;
    size_t skip = (size_t)(group->shard_rank * param->chunk * param->rest) * element;
    unsigned char *to = fsdp_reduced_at(work->reduced, part);
    for (int rank = 0; size > 0 && rank < group->shard_size; rank++) {
        work->sources[rank] = source_at(work, i, rank, tables[rank], skip, size);
        work->lacks_one |= !work->sources[rank];
    }
    const fsdp_collective call = {.op = work->divide->scatter_op, .factor = work->divide->premul};
    if (size > 0 && !work->lacks_one)
        fsdp_tensor_fold(to, work->sources, group->shard_size, work->reduced->dtype, size / element,
                         fsdp_comm_reduction(&call, group->shard_size));
    memset(to + size, 0, (size_t)part->count * element - size);
}

static void add_up(void *context, const void *const *tables)
{
    addition *work = context;
    for (size_t i = 0; i < work->reduced->count && !work->lacks_one; i++)
        add_up_part(work, i, tables);
}

/* The collective ends when all ranks have read the gradients: then they are given back. */
fsdp_status fsdp_group_add_up(fsdp_group *group, const fsdp_reduced *reduced,
                              const fsdp_divide *divide, fsdp_collective *call, fsdp_error *err)
{
    fsdp_stream *stream = fsdp_group_stream(group, FSDP_STREAM_REDUCE);
    addition work = {.group = group, .reduced = reduced, .divide = divide};
    const fsdp_comm_view view = {.see = add_up, .context = &work};
    work.sources = fsdp_alloc((size_t)group->shard_size, sizeof *work.sources);
    if (!work.sources)
        return fsdp_fail_memory(err, group->name);
    for (size_t i = 0; i < reduced->count; i++) {
        const fsdp_param *param = reduced->parts[i].param;
        fsdp_work_uses(stream, param->kept ? param->kept->data : param->grad->data);
    }
    call->view = &view;
    fsdp_work_collective(stream, group->reduce, call, NULL);
    call->view = NULL;
    fsdp_free(work.sources);
    fsdp_stream_follow(fsdp_group_stream(group, FSDP_STREAM_COMPUTE), stream);
    fsdp_reduced_give_sources(reduced);
    FSDP_TRY(stream->device->ops->check(stream, err)); /* its error has the cause */
    return work.lacks_one ? fail_unreadable(group, err) : FSDP_OK;
}
