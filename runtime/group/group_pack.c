/*
 * Packs gradients for a reduction: lists them, gives each its place in the flat buffer, and puts together the
 * rows of each rank (chunk-cat). In docs/flow_step.md: step 9.
 */
#include "runtime/group/group_internal.h"

#include "base/core/mem.h"

/* --- dtypes ----------------------------------------------------------------------------------- */

fsdp_dtype fsdp_dtype_promote(fsdp_dtype a, fsdp_dtype b)
{
    if (a == b || b == FSDP_DTYPE_NONE)
        return a;
    if (a == FSDP_DTYPE_NONE)
        return b;
    return a == FSDP_F64 || b == FSDP_F64 ? FSDP_F64 : FSDP_F32;
}

fsdp_dtype fsdp_param_reduce_dtype(const fsdp_param *param)
{
    fsdp_dtype dtype = param->group->settings->reduce_dtype;
    return dtype != FSDP_DTYPE_NONE ? dtype : param->dtype;
}

/* --- reduced gradients and their places ------------------------------------------------------- */

static bool has_any_grad(const fsdp_param *param)
{
    return param->has_grad || param->kept;
}

static bool is_reduced(const fsdp_param *param)
{
    return has_any_grad(param) || (param->group->settings->reduces_unused && param->requires_grad);
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
        reduced->dtype = fsdp_dtype_promote(reduced->dtype, fsdp_param_reduce_dtype(param));
    }
}

static bool is_listed(const fsdp_reduced *reduced, fsdp_dtype dtype)
{
    for (size_t i = 0; i < reduced->count; i++)
        if (reduced->parts[i].param->dtype == dtype)
            return true;
    return false;
}

/* In the order of the unit, but grouped by stored dtype, so that each dtype is one run. */
fsdp_status fsdp_reduced_list(fsdp_group *group, fsdp_reduced *reduced, fsdp_error *err)
{
    *reduced = (fsdp_reduced){0};
    reduced->parts = fsdp_alloc(group->count, sizeof *reduced->parts);
    if (!reduced->parts)
        return fsdp_fail_memory(err, group->name);
    for (size_t i = 0; i < group->count; i++)
        if (!is_listed(reduced, group->params[i]->dtype))
            add_parts_of(reduced, group, group->params[i]->dtype);
    return FSDP_OK;
}

int64_t fsdp_reduced_count(const fsdp_reduced *reduced)
{
    const fsdp_reduced_part *last = reduced->count > 0 ? &reduced->parts[reduced->count - 1] : NULL;
    return last ? last->at + last->count : 0;
}

size_t fsdp_reduced_bytes(const fsdp_reduced *reduced)
{
    return (size_t)fsdp_reduced_count(reduced) * fsdp_dtype_size(reduced->dtype);
}

fsdp_reduced_part *fsdp_reduced_find(const fsdp_reduced *reduced, const fsdp_param *param)
{
    for (size_t i = 0; i < reduced->count; i++)
        if (reduced->parts[i].param == param)
            return &reduced->parts[i];
    return NULL;
}

void *fsdp_reduced_at(const fsdp_reduced *reduced, const fsdp_reduced_part *part)
{
    return (unsigned char *)reduced->block->data +
           (size_t)part->at * fsdp_dtype_size(reduced->dtype);
}

/* --- chunk-cat -------------------------------------------------------------------------------- */

/* The flat input is a table with a row per rank. A parameter is a column of it. */
typedef struct chunk_column {
    unsigned char *to; /* of rank 0 */
    const unsigned char *from;
    fsdp_dtype to_type, from_type;
    int64_t pitch; /* elements of a rank's row */
} chunk_column;

/* Rows of a column: `ranks` of them from rank `first` on, `width` elements each behind `skip`. */
typedef struct chunk_rows {
    int64_t first, ranks, skip, width;
} chunk_rows;

static void add_rows(fsdp_rect_list *list, const chunk_column *column, const chunk_rows *rows,
                     int64_t from_pitch)
{
    int64_t to = rows->first * column->pitch + rows->skip, from = rows->first * from_pitch;
    size_t to_size = fsdp_dtype_size(column->to_type);
    size_t from_size = fsdp_dtype_size(column->from_type);
    fsdp_rects_add(
        list, &(fsdp_rect){.to = column->to + (size_t)to * to_size,
                           .from = column->from ? column->from + (size_t)from * from_size : NULL,
                           .to_type = column->to_type,
                           .from_type = column->from_type,
                           .rows = rows->ranks,
                           .width = rows->width,
                           .to_pitch = column->pitch,
                           .from_pitch = from_pitch});
}

/* Cut along dim 0: whole chunks, a shorter one, and zeros behind them. */
static void list_chunks(fsdp_rect_list *list, const fsdp_param *param, const chunk_column *filled,
                        int64_t ranks)
{
    const chunk_column zeros = {.to = filled->to,
                                .to_type = filled->to_type,
                                .from_type = filled->to_type,
                                .pitch = filled->pitch};
    /* a part of a tensor-parallel parameter may have no rows at all */
    int64_t whole = param->chunk > 0 ? param->n / param->chunk : 0;
    int64_t width = param->chunk * param->rest;
    int64_t left = (param->n - whole * param->chunk) * param->rest;
    if (!filled->from)
        whole = left = 0;
    add_rows(list, filled, &(chunk_rows){0, whole, 0, width}, width);
    add_rows(list, filled, &(chunk_rows){whole, left > 0, 0, left}, width);
    if (left > 0)
        add_rows(list, &zeros, &(chunk_rows){whole++, 1, left, width - left}, width);
    add_rows(list, &zeros, &(chunk_rows){whole, ranks - whole, 0, width}, width);
}

/* Cut along another dim, which the ranks divide evenly: each rank gets a piece of every row. */
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
                                 .pitch = fsdp_reduced_count(reduced)};
    if (param->cut.dim == 0)
        list_chunks(&group->rects_reduce, param, &column, group->shard_size);
    else
        list_pieces(&group->rects_reduce, param, &column, group->shard_size);
}

void fsdp_reduced_give_sources(const fsdp_reduced *reduced)
{
    for (size_t i = 0; i < reduced->count; i++) {
        fsdp_param *param = reduced->parts[i].param;
        fsdp_param_drop_grad(param);
        fsdp_param_drop_kept(param);
    }
}

fsdp_status fsdp_group_take_input(fsdp_group *group, const fsdp_reduced *reduced,
                                  fsdp_block **input_out, fsdp_error *err)
{
    fsdp_context *context = group->context;
    const fsdp_memory_request request = {
        .class = FSDP_MEMORY_REDUCE,
        .stream = fsdp_group_stream(group, FSDP_STREAM_COMPUTE),
        .allocator = fsdp_group_allocator(group, group->settings->custom_reduce, group->reduce),
        .size = fsdp_reduced_bytes(reduced) * (size_t)group->shard_size,
        .owner = group->name};
    fsdp_context_limit_inputs(context, context->max_inputs - 1);
    FSDP_TRY(fsdp_memory_take(&context->memory, &request, input_out, err));
    context->inputs[context->input_count++] = (fsdp_used_block){.block = *input_out};
    return FSDP_OK;
}

fsdp_status fsdp_group_chunk_cat(fsdp_group *group, const fsdp_reduced *reduced,
                                 fsdp_block **input_out, fsdp_error *err)
{
    fsdp_stream *compute = fsdp_group_stream(group, FSDP_STREAM_COMPUTE);
    size_t per_param = group->shard_size > 4 ? (size_t)group->shard_size : 4;
    FSDP_TRY(fsdp_rects_begin(&group->rects_reduce, reduced->count * per_param, err));
    FSDP_TRY(fsdp_group_take_input(group, reduced, input_out, err));
    for (size_t i = 0; i < reduced->count; i++)
        list_column(group, reduced, &reduced->parts[i], (*input_out)->data);
    fsdp_work_rects(compute, &group->rects_reduce);
    fsdp_trace_work(group, "copy_in", compute->name, (int64_t)(*input_out)->size);
    fsdp_reduced_give_sources(reduced);
    return FSDP_OK;
}
