/*
 * Reduces gradients to sharded gradients. In docs/flow_step.md: steps 9 to 12.
 *
 *   part            what it does                                                                stream
 *   chunk-cat       per rank, its rows of every gradient, padded, in the reduce dtype           compute
 *   reduce-scatter  every rank gets the sum of its own rows                                     reduce
 *   all-reduce      over replicas (HSDP), when it is wanted now                                 all_reduce
 *   view-out        divided, in the parameter's dtype: installed, or added to what is there     the last
 *
 * On device cpu the first two may be one, without the copy.
 */
#include "runtime/group/group_internal.h"
#include "base/core/mem.h"

#include <math.h>
#include <string.h>

/* === memory =================================================================================== */

/* May reductions read gradients where they lie? Equal on all ranks. */
static bool may_be_direct(const fsdp_group *group)
{
    const fsdp_group_settings *settings = group->settings;
    const fsdp_stream *compute = fsdp_group_stream(group, FSDP_STREAM_COMPUTE);
    return compute->device->ops->is_at_once && settings->takes_comm_memory &&
           !settings->custom_reduce && !settings->reduces_unused && group->shard_size > 1 &&
           (fsdp_comm_abilities(group->reduce->comm) & FSDP_COMM_POOL);
}

/* Memory for gradients: the communicator's where reductions may be direct. */
static fsdp_allocator grad_allocator(const fsdp_group *group)
{
    return fsdp_allocator_of_comm(may_be_direct(group) ? group->reduce->comm : NULL);
}

fsdp_status fsdp_param_take_grad(fsdp_param *param, fsdp_error *err)
{
    const fsdp_group *group = param->group;
    const fsdp_memory_request request = {.class = FSDP_MEMORY_GRAD,
                                         .stream = fsdp_group_stream(group, FSDP_STREAM_COMPUTE),
                                         .allocator = grad_allocator(group),
                                         .size = (size_t)fsdp_param_count(param) *
                                                 fsdp_dtype_size(param->grad_dtype),
                                         .owner = param->name};
    return fsdp_memory_take(&group->context->memory, &request, &param->grad, err);
}

/* The block's last use is what the compute stream has so far. */
static void give(const fsdp_group *group, fsdp_block *block)
{
    fsdp_group_give(group, block, fsdp_stream_now(fsdp_group_stream(group, FSDP_STREAM_COMPUTE)));
}

/* of this backward */
static void param_drop_grad(fsdp_param *param)
{
    give(param->group, param->grad);
    param->grad = NULL;
    param->has_grad = false;
}

/* of earlier ones */
static void param_drop_kept(fsdp_param *param)
{
    give(param->group, param->kept);
    param->kept = NULL;
}

/* === gradients that are kept ================================================================== */

/*
 * Gradients of backwards that do not reduce: kept whole, in the reduce dtype, and added up until a backward
 * that reduces. In docs/flow_step.md: step 8.
 */

static fsdp_dtype param_reduce_dtype(const fsdp_param *param)
{
    fsdp_dtype dtype = param->group->settings->reduce_dtype;
    return dtype != FSDP_DTYPE_NONE ? dtype : param->dtype;
}

static fsdp_status begin_kept(fsdp_param *param, fsdp_error *err)
{
    const fsdp_group *group = param->group;
    int64_t count = fsdp_param_count(param);
    fsdp_stream *compute = fsdp_group_stream(group, FSDP_STREAM_COMPUTE);
    param->kept_dtype = param_reduce_dtype(param);
    if (param->kept_dtype == param->grad_dtype) {
        param->kept = param->grad;
        param->grad = NULL;
        param->has_grad = false;
        return FSDP_OK;
    }
    const fsdp_memory_request request = {.class = FSDP_MEMORY_GRAD,
                                         .stream = compute,
                                         .allocator = grad_allocator(group),
                                         .size = (size_t)count * fsdp_dtype_size(param->kept_dtype),
                                         .owner = param->name};
    FSDP_TRY(fsdp_memory_take(&group->context->memory, &request, &param->kept, err));
    fsdp_work_cast(compute, param->kept->data, param->kept_dtype, param->grad->data,
                   param->grad_dtype, count);
    param_drop_grad(param);
    return FSDP_OK;
}

/* The gradient of this backward is added to that of earlier ones. */
static void add_to_kept(fsdp_param *param)
{
    fsdp_work_add(fsdp_group_stream(param->group, FSDP_STREAM_COMPUTE), param->kept->data,
                  param->kept_dtype, param->grad->data, param->grad_dtype, fsdp_param_count(param));
    param_drop_grad(param);
}

fsdp_status fsdp_group_keep_grads(fsdp_group *group, fsdp_error *err)
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

void fsdp_group_add_to_kept(fsdp_group *group)
{
    for (size_t i = 0; i < group->count; i++)
        if (group->params[i]->has_grad && group->params[i]->kept)
            add_to_kept(group->params[i]);
}

void fsdp_group_drop_kept(fsdp_group *group)
{
    for (size_t i = 0; i < group->count; i++) {
        param_drop_grad(group->params[i]);
        param_drop_kept(group->params[i]);
    }
    fsdp_group_give(group, group->partial.block,
                    fsdp_stream_now(fsdp_group_stream(group, FSDP_STREAM_REDUCE)));
    fsdp_free(group->partial.parts);
    group->partial = (fsdp_reduced){0};
}

/* === the mean ================================================================================= */

/* The divisors of a mean of gradients, chosen so that sums do not overflow. See fsdp_divide. */

double fsdp_divide_before_sum(double factor)
{
    double before = 1;
    while (fmod(factor, before) == 0 && factor / before > before)
        before *= 2;
    return before;
}

/* Narrow types: part of the factor before the sum, the rest after it. */
static fsdp_divide divide_around(double factor)
{
    fsdp_divide divide = {.before = fsdp_divide_before_sum(factor), .alone = 1};
    divide.after = factor / divide.before;
    return divide;
}

static fsdp_divide divide_behind(double factor)
{
    return (fsdp_divide){.before = 1, .after = factor, .alone = 1};
}

/* The reduction divides. A group of one rank has a copy in its place, which divides by `alone`. */
static fsdp_divide divide_within(double factor, int shard_size)
{
    fsdp_divide divide = {.before = 1, .after = 1, .alone = factor};
    if (factor == shard_size) {
        divide.scatter_op = FSDP_REDUCE_AVG;
    } else {
        divide.scatter_op = FSDP_REDUCE_PREMUL_SUM;
        divide.premul = 1 / factor;
    }
    return divide;
}

fsdp_divide fsdp_divide_for(const fsdp_group *group, fsdp_dtype reduce_dtype)
{
    const fsdp_group_settings *settings = group->settings;
    bool is_narrow = reduce_dtype != FSDP_F32 && reduce_dtype != FSDP_BF16;
    double ranks = (double)group->shard_size * group->replicate_size;
    double factor = settings->divide_factor > 0 ? settings->divide_factor : ranks;
    if (is_narrow)
        return divide_around(factor);
    if (settings->forces_sum)
        return divide_behind(factor);
    if (settings->divide_factor > 0)
        return divide_within(factor, group->shard_size);
    fsdp_reduce_op op = ranks > 1 ? FSDP_REDUCE_AVG : FSDP_REDUCE_SUM;
    return (fsdp_divide){.before = 1, .after = 1, .alone = 1, .scatter_op = op, .all_op = op};
}

/* === packing ================================================================================== */

/*
 * Packs gradients for a reduction: lists them, gives each its place in the flat buffer, and puts together the
 * rows of each rank (chunk-cat). In docs/flow_step.md: step 9.
 */

/* --- dtypes ----------------------------------------------------------------------------------- */

/* The dtype that two dtypes are reduced in. */
static fsdp_dtype dtype_promote(fsdp_dtype a, fsdp_dtype b)
{
    if (a == b || b == FSDP_DTYPE_NONE)
        return a;
    if (a == FSDP_DTYPE_NONE)
        return b;
    return a == FSDP_F64 || b == FSDP_F64 ? FSDP_F64 : FSDP_F32;
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
        reduced->dtype = dtype_promote(reduced->dtype, param_reduce_dtype(param));
    }
}

static bool is_listed(const fsdp_reduced *reduced, fsdp_dtype dtype)
{
    for (size_t i = 0; i < reduced->count; i++)
        if (reduced->parts[i].param->dtype == dtype)
            return true;
    return false;
}

/* Parts and dtype of a reduction of all gradients that are there; parts are the caller's to free.
 * In the order of the unit, but grouped by stored dtype, so that each dtype is one run. */
static fsdp_status reduced_list(fsdp_group *group, fsdp_reduced *reduced, fsdp_error *err)
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

/* elements */
static int64_t reduced_count(const fsdp_reduced *reduced)
{
    const fsdp_reduced_part *last = reduced->count > 0 ? &reduced->parts[reduced->count - 1] : NULL;
    return last ? last->at + last->count : 0;
}

static size_t reduced_bytes(const fsdp_reduced *reduced)
{
    return (size_t)reduced_count(reduced) * fsdp_dtype_size(reduced->dtype);
}

/* or NULL */
static fsdp_reduced_part *reduced_find(const fsdp_reduced *reduced, const fsdp_param *param)
{
    for (size_t i = 0; i < reduced->count; i++)
        if (reduced->parts[i].param == param)
            return &reduced->parts[i];
    return NULL;
}

static void *reduced_at(const fsdp_reduced *reduced, const fsdp_reduced_part *part)
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

/* Rows of a column: `ranks` of them from rank `first` on, `width` elements each after `skip`. */
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

/* Cut along dim 0: whole chunks, a shorter one, and zeros after them. */
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
                                 .pitch = reduced_count(reduced)};
    if (param->cut.dim == 0)
        list_chunks(&group->rects_reduce, param, &column, group->shard_size);
    else
        list_pieces(&group->rects_reduce, param, &column, group->shard_size);
}

/* Gives the gradients back, which were packed or read. */
static void reduced_give_sources(const fsdp_reduced *reduced)
{
    for (size_t i = 0; i < reduced->count; i++) {
        fsdp_param *param = reduced->parts[i].param;
        param_drop_grad(param);
        param_drop_kept(param);
    }
}

/* The block for the input of a reduce-scatter; the context gives it back. */
static fsdp_status group_take_input(fsdp_group *group, const fsdp_reduced *reduced,
                                    fsdp_block **input_out, fsdp_error *err)
{
    fsdp_context *context = group->context;
    const fsdp_memory_request request = {
        .class = FSDP_MEMORY_REDUCE,
        .stream = fsdp_group_stream(group, FSDP_STREAM_COMPUTE),
        .allocator = fsdp_group_allocator(group, group->settings->custom_reduce, group->reduce),
        .size = reduced_bytes(reduced) * (size_t)group->shard_size,
        .owner = group->name};
    fsdp_context_limit_inputs(context, context->max_inputs - 1);
    FSDP_TRY(fsdp_memory_take(&context->memory, &request, input_out, err));
    context->inputs[context->input_count++] = (fsdp_used_block){.block = *input_out};
    return FSDP_OK;
}

/* Makes the input of a reduce-scatter, and gives the gradients back. */
static fsdp_status group_chunk_cat(fsdp_group *group, const fsdp_reduced *reduced,
                                   fsdp_block **input_out, fsdp_error *err)
{
    fsdp_stream *compute = fsdp_group_stream(group, FSDP_STREAM_COMPUTE);
    size_t per_param = group->shard_size > 4 ? (size_t)group->shard_size : 4;
    FSDP_TRY(fsdp_rects_begin(&group->rects_reduce, reduced->count * per_param, err));
    FSDP_TRY(group_take_input(group, reduced, input_out, err));
    for (size_t i = 0; i < reduced->count; i++)
        list_column(group, reduced, &reduced->parts[i], (*input_out)->data);
    fsdp_work_rects(compute, &group->rects_reduce);
    fsdp_trace_work(group, "copy_in", compute->name, (int64_t)(*input_out)->size);
    reduced_give_sources(reduced);
    return FSDP_OK;
}

/* === reductions in place ====================================================================== */

/*
 * A reduction without packing. If nothing overlaps (device cpu) and ranks can read each other's memory,
 * each rank adds up its rows of all ranks' gradients in place. In docs/flow_step.md: step 10.
 *
 * The block that packing would fill holds a table instead: for each part, the distance in bytes from the
 * table to the gradient. The distance is the same in every rank's mapping of this rank's memory.
 */

/* --- conditions ------------------------------------------------------------------------------- */

/* Equal on all ranks, as all that follows: it decides which collective runs. */
static bool is_in_rows(const fsdp_param *param, fsdp_dtype dtype)
{
    return param->outer == 1 && param->grad_dtype == dtype && param_reduce_dtype(param) == dtype;
}

/* Can the other ranks read the gradients where they lie? Equal on all ranks. */
static bool reduced_is_direct(const fsdp_group *group, const fsdp_reduced *reduced,
                              const fsdp_divide *divide)
{
    size_t input = reduced_bytes(reduced) * (size_t)group->shard_size;
    if (!may_be_direct(group) || divide->before != 1 || input < reduced->count * sizeof(int64_t))
        return false;
    for (size_t i = 0; i < reduced->count; i++)
        if (!is_in_rows(reduced->parts[i].param, reduced->dtype))
            return false;
    return true;
}

/* --- the table -------------------------------------------------------------------------------- */

static fsdp_status fail_unreadable(const fsdp_group *group, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_LIMIT,
                     "unit %s: cannot allocate memory that other ranks can read", group->name);
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
                                         .allocator = grad_allocator(group),
                                         .size = old->size,
                                         .owner = param->name};
    FSDP_TRY(fsdp_memory_take(&group->context->memory, &request, source, err));
    fsdp_work_cast(compute, (*source)->data, FSDP_U8, old->data, FSDP_U8, (int64_t)old->size);
    fsdp_group_give(group, old, fsdp_stream_now(compute));
    return (*source)->is_external ? FSDP_OK : fail_unreadable(group, err);
}

/* In place of chunk-cat: the input is a table of the gradients' places. */
static fsdp_status group_list_grads(fsdp_group *group, const fsdp_reduced *reduced,
                                    fsdp_block **input_out, fsdp_error *err)
{
    const fsdp_stream *compute = fsdp_group_stream(group, FSDP_STREAM_COMPUTE);
    FSDP_TRY(group_take_input(group, reduced, input_out, err));
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

/* Returns this rank's rows of part i in a member's memory. NULL: the member has failed, and its table is
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
    unsigned char *to = reduced_at(work->reduced, part);
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

/* In place of the reduce-scatter `call` over that input; gives the gradients back.
 * The collective ends when all ranks have read the gradients: then they are given back. */
static fsdp_status group_add_up(fsdp_group *group, const fsdp_reduced *reduced,
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
    reduced_give_sources(reduced);
    FSDP_TRY(stream->device->ops->check(stream, err)); /* its error has the cause */
    return work.lacks_one ? fail_unreadable(group, err) : FSDP_OK;
}

/* === sums that wait for replicas ============================================================== */

/*
 * HSDP without all-reduce: gradients that were reduced in the shard group wait here to be added up over the
 * replicas. The next reduction adds them to its own, which may be those of other parameters. In
 * docs/flow_step.md: step 11.
 */

static bool covers(const fsdp_reduced *reduced, const fsdp_reduced *other)
{
    for (size_t i = 0; i < other->count; i++)
        if (!reduced_find(reduced, other->parts[i].param))
            return false;
    return reduced->dtype == dtype_promote(reduced->dtype, other->dtype);
}

/* Unites the parts of both, without a block. */
static fsdp_status unite(const fsdp_group *group, const fsdp_reduced *a, const fsdp_reduced *b,
                         fsdp_reduced *both_out, fsdp_error *err)
{
    *both_out = (fsdp_reduced){.dtype = dtype_promote(a->dtype, b->dtype)};
    both_out->parts = fsdp_alloc(a->count + b->count, sizeof *both_out->parts);
    if (!both_out->parts)
        return fsdp_fail_memory(err, group->name);
    int64_t at = 0;
    for (size_t i = 0; i < a->count + b->count; i++) {
        const fsdp_reduced_part *part = i < a->count ? &a->parts[i] : &b->parts[i - a->count];
        if (reduced_find(both_out, part->param))
            continue;
        both_out->parts[both_out->count++] =
            (fsdp_reduced_part){.param = part->param, .at = at, .count = part->count};
        at += part->count;
    }
    return FSDP_OK;
}

/* The two have different parameters or dtypes: both are packed again. */
static fsdp_status repack(fsdp_group *group, fsdp_reduced *reduced, fsdp_error *err)
{
    fsdp_stream *stream = fsdp_group_stream(group, FSDP_STREAM_REDUCE);
    fsdp_reduced both;
    FSDP_TRY(unite(group, reduced, &group->partial, &both, err));
    const fsdp_memory_request request = {.class = FSDP_MEMORY_REDUCE,
                                         .stream = stream,
                                         .size = reduced_bytes(&both),
                                         .owner = group->name};
    fsdp_status status = fsdp_memory_take(&group->context->memory, &request, &both.block, err);
    if (status != FSDP_OK) {
        fsdp_free(both.parts);
        return status;
    }
    for (size_t i = 0; i < both.count; i++) {
        const fsdp_reduced_part *part = &both.parts[i];
        const fsdp_reduced_part *from = reduced_find(reduced, part->param);
        const fsdp_reduced *source = from ? reduced : &group->partial;
        if (!from)
            from = reduced_find(&group->partial, part->param);
        fsdp_work_cast(stream, reduced_at(&both, part), both.dtype, reduced_at(source, from),
                       source->dtype, part->count);
    }
    /* parts that only the partial one has were copied: the others are added */
    for (size_t i = 0; i < both.count; i++) {
        const fsdp_reduced_part *old = reduced_find(&group->partial, both.parts[i].param);
        if (old && reduced_find(reduced, both.parts[i].param))
            fsdp_work_add(stream, reduced_at(&both, &both.parts[i]), both.dtype,
                          reduced_at(&group->partial, old), group->partial.dtype, old->count);
    }
    fsdp_group_give(group, reduced->block, fsdp_stream_now(stream));
    fsdp_free(reduced->parts);
    *reduced = both;
    return FSDP_OK;
}

/* Adds what waits for the replicas. */
static fsdp_status group_add_partial(fsdp_group *group, fsdp_reduced *reduced, fsdp_error *err)
{
    fsdp_stream *stream = fsdp_group_stream(group, FSDP_STREAM_REDUCE);
    fsdp_reduced *partial = &group->partial;
    if (!partial->block)
        return FSDP_OK;
    if (!covers(reduced, partial))
        FSDP_TRY(repack(group, reduced, err));
    else
        for (size_t i = 0; i < partial->count; i++) {
            const fsdp_reduced_part *part = reduced_find(reduced, partial->parts[i].param);
            fsdp_work_add(stream, reduced_at(reduced, part), reduced->dtype,
                          reduced_at(partial, &partial->parts[i]), partial->dtype, part->count);
        }
    fsdp_group_give(group, partial->block, fsdp_stream_now(stream));
    fsdp_free(partial->parts);
    *partial = (fsdp_reduced){0};
    return FSDP_OK;
}

/* === reductions =============================================================================== */

/* --- reduce-scatter --------------------------------------------------------------------------- */

static fsdp_collective call_of(const fsdp_group *group, const fsdp_reduced *reduced,
                               const fsdp_block *input, const fsdp_divide *divide)
{
    return (fsdp_collective){.kind = FSDP_REDUCE_SCATTER,
                             .dtype = reduced->dtype,
                             .in = input->data,
                             .out = reduced->block->data,
                             .count = reduced_count(reduced),
                             .op = divide->scatter_op,
                             .factor = divide->premul,
                             .unit = group->name};
}

static void scatter(fsdp_group *group, const fsdp_reduced *reduced, const fsdp_block *input,
                    const fsdp_divide *divide, fsdp_stream *stream)
{
    int64_t count = reduced_count(reduced);
    const fsdp_collective call = call_of(group, reduced, input, divide);
    fsdp_work_divide(stream, input->data, reduced->dtype, count * group->shard_size,
                     divide->before);
    if (group->shard_size > 1) {
        fsdp_work_collective(stream, group->reduce, &call, group->settings->custom_reduce);
        fsdp_trace_collective(group, group->reduce, &call, stream->name);
    } else {
        fsdp_work_cast(stream, reduced->block->data, reduced->dtype, input->data, reduced->dtype,
                       count);
        fsdp_work_divide(stream, reduced->block->data, reduced->dtype, count, divide->alone);
    }
}

static fsdp_status scatter_directly(fsdp_group *group, const fsdp_reduced *reduced,
                                    const fsdp_block *input, const fsdp_divide *divide,
                                    fsdp_stream *stream, fsdp_error *err)
{
    fsdp_collective call = call_of(group, reduced, input, divide);
    FSDP_TRY(group_add_up(group, reduced, divide, &call, err));
    fsdp_trace_collective(group, group->reduce, &call, stream->name);
    return FSDP_OK;
}

static fsdp_status reduce_scatter(fsdp_group *group, fsdp_reduced *reduced,
                                  const fsdp_divide *divide, fsdp_error *err)
{
    fsdp_context *context = group->context;
    fsdp_stream *stream = fsdp_group_stream(group, FSDP_STREAM_REDUCE);
    fsdp_block *input;
    const fsdp_memory_request output = {
        .class = FSDP_MEMORY_REDUCE,
        .stream = stream,
        .allocator = fsdp_group_allocator(group, group->settings->custom_reduce, group->reduce),
        .size = reduced_bytes(reduced),
        .owner = group->name};
    bool is_direct = reduced_is_direct(group, reduced, divide);
    FSDP_TRY(is_direct ? group_list_grads(group, reduced, &input, err)
                       : group_chunk_cat(group, reduced, &input, err));
    fsdp_stream_follow(stream, fsdp_group_stream(group, FSDP_STREAM_COMPUTE));
    FSDP_TRY(fsdp_memory_take(&context->memory, &output, &reduced->block, err));
    if (is_direct)
        FSDP_TRY(scatter_directly(group, reduced, input, divide, stream, err));
    else
        scatter(group, reduced, input, divide, stream);
    context->inputs[context->input_count - 1].event = fsdp_stream_now(stream);
    return FSDP_OK;
}

/* --- replicas --------------------------------------------------------------------------------- */

static void all_reduce(fsdp_group *group, const fsdp_reduced *reduced, const fsdp_divide *divide,
                       fsdp_stream *stream)
{
    const fsdp_collective call = {.kind = FSDP_ALL_REDUCE,
                                  .dtype = reduced->dtype,
                                  .in = reduced->block->data,
                                  .out = reduced->block->data,
                                  .count = reduced_count(reduced),
                                  .op = divide->all_op,
                                  .unit = group->name};
    fsdp_stream_follow(stream, fsdp_group_stream(group, FSDP_STREAM_REDUCE));
    fsdp_work_collective(stream, group->replicate, &call, group->settings->custom_all_reduce);
    fsdp_trace_collective(group, group->replicate, &call, stream->name);
}

/* --- view-out --------------------------------------------------------------------------------- */

/* The list has capacity for the block. */
static void note_grads(fsdp_group *group, fsdp_block *block)
{
    group->grads[group->grad_count++] = block;
    if (block->class != FSDP_MEMORY_GRAD)
        fsdp_memory_move(&group->context->memory, block, FSDP_MEMORY_GRAD);
}

static bool all_have_dtype(const fsdp_reduced *reduced, fsdp_dtype dtype)
{
    for (size_t i = 0; i < reduced->count; i++)
        if (reduced->parts[i].param->dtype != dtype)
            return false;
    return true;
}

/* New gradients are added to those of an earlier reduction. */
static bool all_have_grads(const fsdp_reduced *reduced)
{
    for (size_t i = 0; i < reduced->count; i++)
        if (!reduced->parts[i].param->shard_grad)
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

/* Casts each run of parts with one dtype. *block_out holds all, and becomes gradients in host memory. */
static fsdp_status cast_grads(fsdp_group *group, const fsdp_reduced *reduced, bool to_host,
                              fsdp_stream *stream, fsdp_block **block_out, fsdp_error *err)
{
    const fsdp_memory_request request = {.class = FSDP_MEMORY_GRAD,
                                         .stream = stream,
                                         .is_staging = to_host,
                                         .size = grad_bytes(reduced),
                                         .owner = group->name};
    FSDP_TRY(fsdp_memory_take(&group->context->memory, &request, block_out, err));
    unsigned char *to = (*block_out)->data;
    for (size_t i = 0; i < reduced->count;) {
        const fsdp_reduced_part *first = &reduced->parts[i];
        fsdp_dtype dtype = first->param->dtype;
        int64_t count = 0;
        for (; i < reduced->count && reduced->parts[i].param->dtype == dtype; i++)
            count += reduced->parts[i].count;
        fsdp_work_cast(stream, to, dtype, reduced_at(reduced, first), reduced->dtype, count);
        to += (size_t)count * fsdp_dtype_size(dtype);
    }
    return FSDP_OK;
}

/* Makes new gradients the parameters', or adds them to those of earlier reductions. Is the block used? */
static bool install(const fsdp_reduced *reduced, fsdp_block *block, fsdp_stream *stream)
{
    unsigned char *at = block->data;
    bool is_used = false;
    for (size_t i = 0; i < reduced->count; i++) {
        fsdp_param *param = reduced->parts[i].param;
        int64_t count = fsdp_param_local_count(param);
        if (param->shard_grad)
            fsdp_work_add(stream, param->shard_grad, param->dtype, at, param->dtype, count);
        else
            param->shard_grad = at;
        param->is_reduced = true;
        is_used = is_used || param->shard_grad == at;
        at += (size_t)reduced->parts[i].count * fsdp_dtype_size(param->dtype);
    }
    return is_used;
}

static fsdp_status view_out(fsdp_group *group, fsdp_reduced *reduced, bool is_all_reduced,
                            fsdp_stream *stream, fsdp_error *err)
{
    fsdp_context *context = group->context;
    fsdp_block *block = reduced->block;
    if (!fsdp_grow(&group->grads, &group->grad_room, group->grad_count + 1, sizeof *group->grads))
        return fsdp_fail_memory(err, group->name);
    bool to_host = group->settings->offloads && !all_have_grads(reduced);
    if (to_host || !all_have_dtype(reduced, reduced->dtype)) {
        FSDP_TRY(cast_grads(group, reduced, to_host, stream, &block, err));
        fsdp_context_give_all_reduced(context);
        const fsdp_used_block used = {.block = reduced->block, .event = fsdp_stream_now(stream)};
        if (is_all_reduced)
            context->all_reduced = used;
        else
            fsdp_memory_give(&context->memory, used.block, used.event);
    }
    if (install(reduced, block, stream))
        note_grads(group, block);
    else
        fsdp_group_give(group, block, fsdp_stream_now(stream));
    reduced->block = NULL;
    group->reduced = fsdp_stream_now(stream);
    return FSDP_OK;
}

/* --- the whole -------------------------------------------------------------------------------- */

static fsdp_status run_hook(const fsdp_group *group, const fsdp_reduced *reduced,
                            fsdp_stream *stream, fsdp_error *err)
{
    const fsdp_group_settings *settings = group->settings;
    if (!settings->all_reduce_hook)
        return FSDP_OK;
    if (!stream->device->ops->is_host)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "unit %s: an all-reduce hook computes on the host, but device %s has its "
                         "own memory; use a custom reduce-scatter, which gets the stream",
                         group->name, stream->device->ops->name);
    fsdp_work_all_reduce_hook(stream, settings->all_reduce_hook, settings->all_reduce_hook_context,
                              reduced->block->data, reduced->dtype, reduced_count(reduced));
    return FSDP_OK;
}

static fsdp_status reduce(fsdp_group *group, fsdp_reduced *reduced, fsdp_error *err)
{
    const fsdp_group_settings *settings = group->settings;
    bool is_new = reduced->count > 0; /* otherwise only partial sums are due */
    const fsdp_divide divide =
        fsdp_divide_for(group, is_new ? reduced->dtype : group->partial.dtype);
    bool has_replicas = group->replicate_size > 1;
    fsdp_stream *last =
        fsdp_group_stream(group, has_replicas ? FSDP_STREAM_ALL_REDUCE : FSDP_STREAM_REDUCE);
    if (is_new)
        FSDP_TRY(reduce_scatter(group, reduced, &divide, err));
    FSDP_TRY(group_add_partial(group, reduced, err));
    if (has_replicas && !settings->all_reduces) {
        group->partial = *reduced;
        *reduced = (fsdp_reduced){0};
        /* after a view-out of an earlier backward, which is on that stream */
        fsdp_stream_follow(last, fsdp_group_stream(group, FSDP_STREAM_REDUCE));
        group->reduced = fsdp_stream_now(last);
        return FSDP_OK;
    }
    if (has_replicas)
        all_reduce(group, reduced, &divide, last);
    FSDP_TRY(run_hook(group, reduced, last, err));
    fsdp_work_divide(last, reduced->block->data, reduced->dtype, reduced_count(reduced),
                     divide.after);
    return view_out(group, reduced, has_replicas, last, err);
}

fsdp_status fsdp_group_reduce(fsdp_group *group, fsdp_error *err)
{
    fsdp_reduced reduced;
    FSDP_TRY(reduced_list(group, &reduced, err));
    bool is_due = group->partial.block && group->settings->all_reduces;
    fsdp_status status = reduced.count > 0 || is_due ? reduce(group, &reduced, err) : FSDP_OK;
    fsdp_group_give(group, reduced.block,
                    fsdp_stream_now(fsdp_group_stream(group, FSDP_STREAM_REDUCE)));
    fsdp_free(reduced.parts);
    return status;
}

void fsdp_group_wait_reduced(fsdp_group *group)
{
    fsdp_stream *compute = fsdp_group_stream(group, FSDP_STREAM_COMPUTE);
    compute->device->ops->wait(compute, group->reduced);
    group->reduced = (fsdp_event){0};
}

fsdp_status fsdp_group_await_offloaded(const fsdp_group *group, fsdp_error *err)
{
    return group->settings->offloads ? group->context->device->ops->sync(group->reduced, err)
                                     : FSDP_OK;
}

void fsdp_group_drop_grads(fsdp_group *group)
{
    for (size_t i = 0; i < group->count; i++) {
        group->params[i]->shard_grad = NULL;
        group->params[i]->is_reduced = false;
    }
    for (size_t i = 0; i < group->grad_count; i++)
        fsdp_group_give(group, group->grads[i],
                        fsdp_stream_now(fsdp_group_stream(group, FSDP_STREAM_COMPUTE)));
    group->grad_count = 0;
}
