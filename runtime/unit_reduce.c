/*
 * Gradients become sharded gradients. In docs/flow_step.md: step "reduce".
 *
 *   chunk-cat       per rank, its rows of every gradient, padded, in the reduce dtype           compute
 *   reduce-scatter  every rank gets the sum of its own rows                                     reduce
 *   all-reduce      over replicas (HSDP), when it is wanted now                                 all_reduce
 *   view-out        divided, in the parameter's dtype: installed, or added to what is there     the last
 *
 * Without synchronisation gradients are kept whole, in the dtype they will be reduced in.
 */
#include "runtime/unit_internal.h"
#include "runtime/work.h"

#include <string.h>

#include "base/mem.h"

static fsdp_context *context_of(const fsdp_group *group)
{
    return group->unit->root->context;
}

static fsdp_stream *stream_of(const fsdp_group *group, int which)
{
    return context_of(group)->streams[which];
}

static fsdp_event now(fsdp_stream *stream)
{
    return stream->device->ops->record(stream);
}

static void give(const fsdp_group *group, fsdp_block *block, fsdp_event last_use)
{
    fsdp_memory_give(&context_of(group)->memory, block, last_use);
}

/* --- dtypes ----------------------------------------------------------------------------------- */

static fsdp_dtype promote(fsdp_dtype a, fsdp_dtype b)
{
    if (a == b || b == FSDP_DTYPE_NONE)
        return a;
    if (a == FSDP_DTYPE_NONE)
        return b;
    return a == FSDP_F64 || b == FSDP_F64 ? FSDP_F64 : FSDP_F32;
}

static fsdp_dtype reduce_dtype_of(const fsdp_param *param)
{
    fsdp_dtype dtype = param->unit->opts.reduce_dtype;
    return dtype != FSDP_DTYPE_NONE ? dtype : param->dtype;
}

/* --- gradients that are kept ------------------------------------------------------------------ */

static void drop_grad(fsdp_param *param)
{
    const fsdp_group *group = param->group;
    give(group, param->grad, now(stream_of(group, FSDP_STREAM_COMPUTE)));
    param->grad = NULL;
    param->has_grad = false;
}

static fsdp_status begin_kept(fsdp_param *param, fsdp_error *err)
{
    const fsdp_group *group = param->group;
    int64_t count = fsdp_param_count(param);
    fsdp_stream *compute = stream_of(group, FSDP_STREAM_COMPUTE);
    param->kept_dtype = reduce_dtype_of(param);
    if (param->kept_dtype == param->grad_dtype) {
        param->kept = param->grad;
        param->grad = NULL;
        param->has_grad = false;
        return FSDP_OK;
    }
    FSDP_TRY(fsdp_memory_take(&context_of(group)->memory, FSDP_MEMORY_GRAD, compute, NULL,
                              (size_t)count * fsdp_dtype_size(param->kept_dtype), 0, param->name,
                              &param->kept, err));
    fsdp_work_cast(compute, param->kept->data, param->kept_dtype, param->grad->data,
                   param->grad_dtype, count);
    drop_grad(param);
    return FSDP_OK;
}

/* What this backward gave is added to what earlier ones left. */
static void add_to_kept(fsdp_param *param)
{
    fsdp_work_add(stream_of(param->group, FSDP_STREAM_COMPUTE), param->kept->data,
                  param->kept_dtype, param->grad->data, param->grad_dtype, fsdp_param_count(param));
    drop_grad(param);
}

static fsdp_status keep_grads(fsdp_group *group, fsdp_error *err)
{
    for (size_t i = 0; i < group->count; i++) {
        fsdp_param *param = group->params[i];
        if (!param->has_grad)
            continue;
        if (param->kept)
            add_to_kept(param);
        else
            FSDP_TRY(begin_kept(param, err));
    }
    return FSDP_OK;
}

static void add_all_to_kept(fsdp_group *group)
{
    for (size_t i = 0; i < group->count; i++)
        if (group->params[i]->has_grad && group->params[i]->kept)
            add_to_kept(group->params[i]);
}

void fsdp_group_drop_kept(fsdp_group *group)
{
    for (size_t i = 0; i < group->count; i++) {
        fsdp_param *param = group->params[i];
        drop_grad(param);
        give(group, param->kept, now(stream_of(group, FSDP_STREAM_COMPUTE)));
        param->kept = NULL;
    }
    give(group, group->partial.block, now(stream_of(group, FSDP_STREAM_REDUCE)));
    fsdp_free(group->partial.parts);
    group->partial = (fsdp_reduced){0};
}

/* --- what is reduced -------------------------------------------------------------------------- */

static bool has_any_grad(const fsdp_param *param)
{
    return param->has_grad || param->kept;
}

static bool is_reduced(const fsdp_param *param)
{
    return has_any_grad(param) || (param->unit->reduces_unused && param->requires_grad);
}

static void add_parts_of(fsdp_reduced *reduced, fsdp_group *group, fsdp_dtype dtype)
{
    int64_t at = 0;
    if (reduced->count > 0)
        at = reduced->parts[reduced->count - 1].at + reduced->parts[reduced->count - 1].count;
    for (size_t i = 0; i < group->count; i++) {
        fsdp_param *param = group->params[i];
        if (param->dtype != dtype || !is_reduced(param))
            continue;
        reduced->parts[reduced->count++] =
            (fsdp_reduced_part){.param = param, .at = at, .count = param->padded};
        at += param->padded;
        reduced->dtype = promote(reduced->dtype, reduce_dtype_of(param));
    }
}

static bool is_listed(const fsdp_reduced *reduced, fsdp_dtype dtype)
{
    for (size_t i = 0; i < reduced->count; i++)
        if (reduced->parts[i].param->dtype == dtype)
            return true;
    return false;
}

/* In unit order, but those of one dtype together, so that each dtype is one run. */
static fsdp_status list_parts(fsdp_group *group, fsdp_reduced *reduced, fsdp_error *err)
{
    *reduced = (fsdp_reduced){0};
    reduced->parts = fsdp_alloc(group->count, sizeof *reduced->parts);
    if (!reduced->parts)
        return fsdp_fail_memory(err, group->unit->name);
    for (size_t i = 0; i < group->count; i++)
        if (!is_listed(reduced, group->params[i]->dtype))
            add_parts_of(reduced, group, group->params[i]->dtype);
    return FSDP_OK;
}

static int64_t count_of(const fsdp_reduced *reduced)
{
    const fsdp_reduced_part *last = reduced->count > 0 ? &reduced->parts[reduced->count - 1] : NULL;
    return last ? last->at + last->count : 0;
}

static size_t bytes_of(const fsdp_reduced *reduced)
{
    return (size_t)count_of(reduced) * fsdp_dtype_size(reduced->dtype);
}

/* --- chunk-cat -------------------------------------------------------------------------------- */

/* One parameter's column of the table of ranks x elements. */
typedef struct chunk_column {
    unsigned char *to; /* of rank 0 */
    const unsigned char *from;
    fsdp_dtype to_type, from_type;
    int64_t pitch; /* elements of a rank's row */
} chunk_column;

static void add_rows(fsdp_rect_list *list, const chunk_column *column, int64_t rank, int64_t skip,
                     int64_t ranks, int64_t width, int64_t from_pitch)
{
    int64_t to = rank * column->pitch + skip;
    int64_t from = rank * from_pitch;
    size_t to_size = fsdp_dtype_size(column->to_type),
           from_size = fsdp_dtype_size(column->from_type);
    fsdp_rects_add(
        list, &(fsdp_rect){.to = column->to + (size_t)to * to_size,
                           .from = column->from ? column->from + (size_t)from * from_size : NULL,
                           .to_type = column->to_type,
                           .from_type = column->from_type,
                           .rows = ranks,
                           .width = width,
                           .to_pitch = column->pitch,
                           .from_pitch = from_pitch});
}

/* Cut along dim 0: whole chunks, one that is cut short, and zeros for what is missing. */
static void list_chunks(fsdp_rect_list *list, const fsdp_param *param, const chunk_column *filled,
                        int64_t ranks)
{
    const chunk_column zeros = {.to = filled->to,
                                .to_type = filled->to_type,
                                .from_type = filled->to_type,
                                .pitch = filled->pitch};
    int64_t whole = param->n / param->chunk, width = param->chunk * param->rest;
    int64_t left = (param->n - whole * param->chunk) * param->rest;
    if (!filled->from)
        whole = left = 0;
    add_rows(list, filled, 0, 0, whole, width, width);
    add_rows(list, filled, whole, 0, left > 0, left, width);
    if (left > 0)
        add_rows(list, &zeros, whole++, left, 1, width - left, width);
    add_rows(list, &zeros, whole, 0, ranks - whole, width, width);
}

/* Cut along another dim, which ranks divide evenly: per rank, a piece of every row. */
static void list_pieces(fsdp_rect_list *list, const fsdp_param *param, const chunk_column *column,
                        int64_t ranks)
{
    int64_t width = param->chunk * param->rest;
    for (int64_t rank = 0; rank < ranks; rank++)
        fsdp_rects_add(
            list, &(fsdp_rect){.to = column->to + (size_t)(rank * column->pitch) *
                                                      fsdp_dtype_size(column->to_type),
                               .from = column->from
                                           ? column->from + (size_t)(rank * width) *
                                                                fsdp_dtype_size(column->from_type)
                                           : NULL,
                               .to_type = column->to_type,
                               .from_type = column->from_type,
                               .rows = param->outer,
                               .width = width,
                               .to_pitch = width,
                               .from_pitch = param->n * param->rest});
}

static void list_column(fsdp_group *group, const fsdp_reduced *reduced,
                        const fsdp_reduced_part *part, unsigned char *input)
{
    const fsdp_param *param = part->param;
    const fsdp_block *source = param->kept ? param->kept : param->grad;
    const chunk_column column = {.to = input + (size_t)part->at * fsdp_dtype_size(reduced->dtype),
                                 .from = source ? source->data : NULL,
                                 .to_type = reduced->dtype,
                                 .from_type = param->kept ? param->kept_dtype : param->grad_dtype,
                                 .pitch = count_of(reduced)};
    if (param->cut.dim == 0)
        list_chunks(&group->rects_reduce, param, &column, group->shard_size);
    else
        list_pieces(&group->rects_reduce, param, &column, group->shard_size);
}

static void give_sources(const fsdp_reduced *reduced)
{
    for (size_t i = 0; i < reduced->count; i++) {
        fsdp_param *param = reduced->parts[i].param;
        drop_grad(param);
        give(param->group, param->kept, now(stream_of(param->group, FSDP_STREAM_COMPUTE)));
        param->kept = NULL;
    }
}

static fsdp_status chunk_cat(fsdp_group *group, const fsdp_reduced *reduced, fsdp_block **input_out,
                             fsdp_error *err)
{
    fsdp_context *context = context_of(group);
    fsdp_stream *compute = stream_of(group, FSDP_STREAM_COMPUTE);
    size_t bytes = bytes_of(reduced) * (size_t)group->shard_size;
    size_t per_param = group->shard_size > 4 ? (size_t)group->shard_size : 4;
    bool from_comm = group->unit->takes_comm_memory && group->reduce;
    fsdp_context_limit_inputs(context, context->max_inputs - 1);
    FSDP_TRY(fsdp_rects_begin(&group->rects_reduce, reduced->count * per_param, err));
    FSDP_TRY(fsdp_memory_take(&context->memory, FSDP_MEMORY_REDUCE, compute,
                              from_comm ? group->reduce->comm : NULL, bytes, 0, group->unit->name,
                              input_out, err));
    for (size_t i = 0; i < reduced->count; i++)
        list_column(group, reduced, &reduced->parts[i], (*input_out)->data);
    fsdp_work_rects(compute, &group->rects_reduce);
    fsdp_trace_copy(group, "copy_in", compute->name, (int64_t)bytes);
    give_sources(reduced);
    return FSDP_OK;
}

/* --- inputs in flight ------------------------------------------------------------------------- */

void fsdp_context_limit_inputs(fsdp_context *context, int most)
{
    fsdp_stream *compute = context->streams[FSDP_STREAM_COMPUTE];
    while (context->input_count > most) {
        const fsdp_used_block oldest = context->inputs[0];
        compute->device->ops->wait(compute, oldest.event);
        fsdp_memory_give(&context->memory, oldest.block, oldest.event);
        context->input_count--;
        memmove(context->inputs, context->inputs + 1,
                (size_t)context->input_count * sizeof *context->inputs);
    }
}

void fsdp_context_give_all_reduced(fsdp_context *context)
{
    fsdp_memory_give(&context->memory, context->all_reduced.block, context->all_reduced.event);
    context->all_reduced = (fsdp_used_block){0};
}

/* --- reduce-scatter --------------------------------------------------------------------------- */

static void scatter(fsdp_group *group, fsdp_reduced *reduced, fsdp_block *input,
                    const fsdp_divide *divide, fsdp_stream *stream)
{
    int64_t count = count_of(reduced);
    const fsdp_collective call = {.kind = FSDP_REDUCE_SCATTER,
                                  .dtype = reduced->dtype,
                                  .in = input->data,
                                  .out = reduced->block->data,
                                  .count = count,
                                  .op = divide->scatter_op,
                                  .factor = divide->premul,
                                  .unit = group->unit->name};
    fsdp_work_divide(stream, input->data, reduced->dtype, count * group->shard_size,
                     divide->before);
    if (group->shard_size > 1) {
        fsdp_work_collective(stream, group->reduce, &call, group->unit->custom_reduce);
        fsdp_trace_collective(group, group->reduce, &call, stream->name);
    } else {
        fsdp_work_cast(stream, reduced->block->data, reduced->dtype, input->data, reduced->dtype,
                       count);
        fsdp_work_divide(stream, reduced->block->data, reduced->dtype, count, divide->alone);
    }
}

static fsdp_status reduce_scatter(fsdp_group *group, fsdp_reduced *reduced,
                                  const fsdp_divide *divide, fsdp_error *err)
{
    fsdp_context *context = context_of(group);
    fsdp_stream *stream = stream_of(group, FSDP_STREAM_REDUCE);
    fsdp_block *input;
    bool from_comm = group->unit->takes_comm_memory && group->reduce;
    FSDP_TRY(chunk_cat(group, reduced, &input, err));
    context->inputs[context->input_count++] = (fsdp_used_block){.block = input};
    fsdp_stream_follow(stream, stream_of(group, FSDP_STREAM_COMPUTE));
    FSDP_TRY(fsdp_memory_take(&context->memory, FSDP_MEMORY_REDUCE, stream,
                              from_comm ? group->reduce->comm : NULL, bytes_of(reduced), 0,
                              group->unit->name, &reduced->block, err));
    scatter(group, reduced, input, divide, stream);
    context->inputs[context->input_count - 1].event = now(stream);
    return FSDP_OK;
}

/* --- replicas --------------------------------------------------------------------------------- */

static fsdp_reduced_part *find_part(const fsdp_reduced *reduced, const fsdp_param *param)
{
    for (size_t i = 0; i < reduced->count; i++)
        if (reduced->parts[i].param == param)
            return &reduced->parts[i];
    return NULL;
}

static void *data_at(const fsdp_reduced *reduced, const fsdp_reduced_part *part)
{
    return (unsigned char *)reduced->block->data +
           (size_t)part->at * fsdp_dtype_size(reduced->dtype);
}

static bool covers(const fsdp_reduced *reduced, const fsdp_reduced *other)
{
    for (size_t i = 0; i < other->count; i++)
        if (!find_part(reduced, other->parts[i].param))
            return false;
    return reduced->dtype == promote(reduced->dtype, other->dtype);
}

/* The parameters of both, without data. */
static fsdp_status unite(const fsdp_group *group, const fsdp_reduced *a, const fsdp_reduced *b,
                         fsdp_reduced *both_out, fsdp_error *err)
{
    *both_out = (fsdp_reduced){.dtype = promote(a->dtype, b->dtype)};
    both_out->parts = fsdp_alloc(a->count + b->count, sizeof *both_out->parts);
    if (!both_out->parts)
        return fsdp_fail_memory(err, group->unit->name);
    int64_t at = 0;
    for (size_t i = 0; i < a->count + b->count; i++) {
        const fsdp_reduced_part *part = i < a->count ? &a->parts[i] : &b->parts[i - a->count];
        if (find_part(both_out, part->param))
            continue;
        both_out->parts[both_out->count++] =
            (fsdp_reduced_part){.param = part->param, .at = at, .count = part->count};
        at += part->count;
    }
    return FSDP_OK;
}

/* The set of gradients has changed between microbatches: both are packed anew. */
static fsdp_status repack(fsdp_group *group, fsdp_reduced *reduced, fsdp_error *err)
{
    fsdp_stream *stream = stream_of(group, FSDP_STREAM_REDUCE);
    fsdp_reduced both;
    FSDP_TRY(unite(group, reduced, &group->partial, &both, err));
    fsdp_status status =
        fsdp_memory_take(&context_of(group)->memory, FSDP_MEMORY_REDUCE, stream, NULL,
                         bytes_of(&both), 0, group->unit->name, &both.block, err);
    if (status != FSDP_OK) {
        fsdp_free(both.parts);
        return status;
    }
    for (size_t i = 0; i < both.count; i++) {
        const fsdp_reduced_part *part = &both.parts[i];
        const fsdp_reduced_part *from = find_part(reduced, part->param);
        const fsdp_reduced *source = from ? reduced : &group->partial;
        if (!from)
            from = find_part(&group->partial, part->param);
        fsdp_work_cast(stream, data_at(&both, part), both.dtype, data_at(source, from),
                       source->dtype, part->count);
    }
    /* what was copied from the partial one is not to be added again */
    for (size_t i = 0; i < both.count; i++) {
        const fsdp_reduced_part *old = find_part(&group->partial, both.parts[i].param);
        if (old && find_part(reduced, both.parts[i].param))
            fsdp_work_add(stream, data_at(&both, &both.parts[i]), both.dtype,
                          data_at(&group->partial, old), group->partial.dtype, old->count);
    }
    give(group, reduced->block, now(stream));
    fsdp_free(reduced->parts);
    *reduced = both;
    return FSDP_OK;
}

static fsdp_status add_partial(fsdp_group *group, fsdp_reduced *reduced, fsdp_error *err)
{
    fsdp_stream *stream = stream_of(group, FSDP_STREAM_REDUCE);
    fsdp_reduced *partial = &group->partial;
    if (!partial->block)
        return FSDP_OK;
    if (!covers(reduced, partial))
        FSDP_TRY(repack(group, reduced, err));
    else
        for (size_t i = 0; i < partial->count; i++) {
            const fsdp_reduced_part *part = find_part(reduced, partial->parts[i].param);
            fsdp_work_add(stream, data_at(reduced, part), reduced->dtype,
                          data_at(partial, &partial->parts[i]), partial->dtype, part->count);
        }
    give(group, partial->block, now(stream));
    fsdp_free(partial->parts);
    *partial = (fsdp_reduced){0};
    return FSDP_OK;
}

static void all_reduce(fsdp_group *group, const fsdp_reduced *reduced, const fsdp_divide *divide,
                       fsdp_stream *stream)
{
    const fsdp_collective call = {.kind = FSDP_ALL_REDUCE,
                                  .dtype = reduced->dtype,
                                  .in = reduced->block->data,
                                  .out = reduced->block->data,
                                  .count = count_of(reduced),
                                  .op = divide->all_op,
                                  .unit = group->unit->name};
    fsdp_stream_follow(stream, stream_of(group, FSDP_STREAM_REDUCE));
    fsdp_work_collective(stream, group->replicate, &call, NULL);
    fsdp_trace_collective(group, group->replicate, &call, stream->name);
}

/* --- view-out --------------------------------------------------------------------------------- */

static fsdp_status note_grads(fsdp_group *group, fsdp_block *block, fsdp_error *err)
{
    if (!fsdp_grow(&group->grads, &group->grad_room, group->grad_count + 1, sizeof *group->grads))
        return fsdp_fail_memory(err, group->unit->name);
    group->grads[group->grad_count++] = block;
    if (block->class != FSDP_MEMORY_GRAD)
        fsdp_memory_move(&context_of(group)->memory, block, FSDP_MEMORY_GRAD);
    return FSDP_OK;
}

static bool all_have_dtype(const fsdp_reduced *reduced, fsdp_dtype dtype)
{
    for (size_t i = 0; i < reduced->count; i++)
        if (reduced->parts[i].param->dtype != dtype)
            return false;
    return true;
}

static size_t grad_bytes(const fsdp_reduced *reduced)
{
    size_t bytes = 0;
    for (size_t i = 0; i < reduced->count; i++)
        bytes += (size_t)reduced->parts[i].count * fsdp_dtype_size(reduced->parts[i].param->dtype);
    return bytes;
}

/* Every run of parts with one dtype is cast as one; *block_out holds all of them. */
static fsdp_status cast_grads(fsdp_group *group, const fsdp_reduced *reduced, fsdp_stream *stream,
                              fsdp_block **block_out, fsdp_error *err)
{
    FSDP_TRY(fsdp_memory_take(&context_of(group)->memory, FSDP_MEMORY_GRAD, stream, NULL,
                              grad_bytes(reduced), 0, group->unit->name, block_out, err));
    unsigned char *to = (*block_out)->data;
    for (size_t i = 0; i < reduced->count;) {
        const fsdp_reduced_part *first = &reduced->parts[i];
        fsdp_dtype dtype = first->param->dtype;
        int64_t count = 0;
        for (; i < reduced->count && reduced->parts[i].param->dtype == dtype; i++)
            count += reduced->parts[i].count;
        fsdp_work_cast(stream, to, dtype, data_at(reduced, first), reduced->dtype, count);
        to += (size_t)count * fsdp_dtype_size(dtype);
    }
    return FSDP_OK;
}

/* New gradients become the parameters', or are added to what earlier reductions gave. */
static bool install(const fsdp_reduced *reduced, fsdp_block *block, fsdp_stream *stream)
{
    unsigned char *at = block->data;
    bool is_used = false;
    for (size_t i = 0; i < reduced->count; i++) {
        fsdp_param *param = reduced->parts[i].param;
        int64_t own = param->outer * param->rows * param->rest;
        if (param->shard_grad)
            fsdp_work_add(stream, param->shard_grad, param->dtype, at, param->dtype, own);
        else
            param->shard_grad = at;
        is_used = is_used || param->shard_grad == at;
        at += (size_t)reduced->parts[i].count * fsdp_dtype_size(param->dtype);
    }
    return is_used;
}

static fsdp_status view_out(fsdp_group *group, fsdp_reduced *reduced, bool is_all_reduced,
                            fsdp_stream *stream, fsdp_error *err)
{
    fsdp_context *context = context_of(group);
    fsdp_block *block = reduced->block;
    if (!all_have_dtype(reduced, reduced->dtype)) {
        FSDP_TRY(cast_grads(group, reduced, stream, &block, err));
        fsdp_context_give_all_reduced(context);
        const fsdp_used_block used = {.block = reduced->block, .event = now(stream)};
        if (is_all_reduced)
            context->all_reduced = used;
        else
            fsdp_memory_give(&context->memory, used.block, used.event);
        reduced->block = NULL;
    }
    if (install(reduced, block, stream))
        FSDP_TRY(note_grads(group, block, err));
    else
        give(group, block, now(stream));
    reduced->block = NULL;
    group->reduced = now(stream);
    return FSDP_OK;
}

/* --- the whole -------------------------------------------------------------------------------- */

static fsdp_status reduce(fsdp_group *group, fsdp_reduced *reduced, fsdp_error *err)
{
    const fsdp_unit *unit = group->unit;
    const fsdp_divide divide = fsdp_divide_for(group, reduced->dtype);
    bool has_replicas = group->replicate_size > 1;
    fsdp_stream *last =
        stream_of(group, has_replicas ? FSDP_STREAM_ALL_REDUCE : FSDP_STREAM_REDUCE);
    FSDP_TRY(reduce_scatter(group, reduced, &divide, err));
    FSDP_TRY(add_partial(group, reduced, err));
    if (has_replicas && !unit->all_reduces) {
        group->partial = *reduced;
        *reduced = (fsdp_reduced){0};
        group->reduced = now(stream_of(group, FSDP_STREAM_REDUCE));
        return FSDP_OK;
    }
    if (has_replicas)
        all_reduce(group, reduced, &divide, last);
    if (unit->all_reduce_hook)
        fsdp_work_all_reduce_hook(last, unit->all_reduce_hook, unit->all_reduce_hook_user,
                                  reduced->block->data, reduced->dtype, count_of(reduced));
    fsdp_work_divide(last, reduced->block->data, reduced->dtype, count_of(reduced), divide.after);
    return view_out(group, reduced, has_replicas, last, err);
}

static fsdp_status reduce_grads(fsdp_group *group, fsdp_error *err)
{
    fsdp_reduced reduced;
    FSDP_TRY(list_parts(group, &reduced, err));
    fsdp_status status = reduced.count > 0 ? reduce(group, &reduced, err) : FSDP_OK;
    give(group, reduced.block, now(stream_of(group, FSDP_STREAM_REDUCE)));
    fsdp_free(reduced.parts);
    return status;
}

/* Parameters go back before gradients are packed: the two need not be there at once. */
fsdp_status fsdp_group_post_backward(fsdp_group *group, fsdp_error *err)
{
    const fsdp_unit *unit = group->unit;
    group->phase = FSDP_POST_BACKWARD;
    if (unit->reduces)
        add_all_to_kept(group);
    if (unit->reshards_after_backward)
        FSDP_TRY(fsdp_group_reshard(group, err));
    return unit->reduces ? reduce_grads(group, err) : keep_grads(group, err);
}

void fsdp_group_wait_reduced(fsdp_group *group)
{
    fsdp_stream *compute = stream_of(group, FSDP_STREAM_COMPUTE);
    compute->device->ops->wait(compute, group->reduced);
    group->reduced = (fsdp_event){0};
}

void fsdp_group_drop_grads(fsdp_group *group)
{
    for (size_t i = 0; i < group->count; i++)
        group->params[i]->shard_grad = NULL;
    for (size_t i = 0; i < group->grad_count; i++)
        give(group, group->grads[i], now(stream_of(group, FSDP_STREAM_COMPUTE)));
    group->grad_count = 0;
}
