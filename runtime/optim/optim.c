/* Optimizers on the shards of a root, clipping of gradients, scaling of losses. See optim.h. */
#include "runtime/optim/optim_internal.h"
#include "base/core/given.h"
#include "base/core/mem.h"
#include "runtime/context/work.h"
#include "statedict/sd/layout_internal.h"

#include <math.h>
#include <string.h>

/* === clipping ================================================================================= */

/*
 * The norm of all gradients as one vector, and clipping. Every rank sums over its own rows; of the ranks that
 * hold copies of a row, only the first counts it. So one number is summed over all ranks, for every mesh. On
 * a GPU sums, number and factor stay on the device: the sums are gathered there, in the order of the ranks.
 */

/* --- one number over all ranks ---------------------------------------------------------------- */

static fsdp_status need_connected(const fsdp_ordered_comm *ordered, const char *what,
                                  fsdp_error *err)
{
    return ordered ? FSDP_OK
                   : fsdp_fail(err, FSDP_ERR_USAGE,
                               "%s needs the mesh of all ranks to be connected "
                               "(fsdp_world_connect)",
                               what);
}

/* Sum, or maximum, of one number over all ranks that hold parts of the root's parameters, in rank order. */
static fsdp_status root_fold(fsdp_root *root, double *value, fsdp_fold fold, const char *what,
                             fsdp_error *err)
{
    fsdp_ordered_comm *ordered;
    const fsdp_collective call = {.kind = FSDP_ALL_REDUCE,
                                  .dtype = FSDP_F64,
                                  .in = value,
                                  .out = value,
                                  .count = 1,
                                  .op = fold == FSDP_FOLD_SUM ? FSDP_REDUCE_SUM : FSDP_REDUCE_MAX,
                                  .unit = what};
    FSDP_TRY(fsdp_root_widest_comm(root, &ordered, err));
    FSDP_TRY(need_connected(ordered, what, err));
    return fsdp_comm_run(ordered->comm, &call, err);
}

/* --- gradients as a list ------------------------------------------------------------------------ */

/* The gradients of this rank, for kernels. counts: which to list; NULL: all. *spans_out is the caller's. */
static fsdp_status list_grads(fsdp_root *root, bool (*counts)(const fsdp_param *param),
                              fsdp_span **spans_out, size_t *count_out, fsdp_error *err)
{
    const fsdp_model *model = root->model;
    fsdp_span *spans = fsdp_alloc(model->count, sizeof *spans);
    *spans_out = spans;
    *count_out = 0;
    if (!spans)
        return fsdp_fail_memory(err, "a list of gradients");
    for (size_t i = 0; i < model->count; i++) {
        const fsdp_param *param = model->params[i];
        size_t count = (size_t)fsdp_param_local_count(param);
        if (param->shard_grad && count > 0 && (!counts || counts(param)))
            spans[(*count_out)++] = (fsdp_span){param->shard_grad, param->dtype, count};
    }
    return FSDP_OK;
}

/* True when this rank is the first of those that hold these rows. */
static bool is_first_holder(const fsdp_param *param)
{
    return fsdp_layout_copy(&param->layout, param->model->world->rank, 0) == 0;
}

/* --- the norm --------------------------------------------------------------------------------- */

/* Memory for the numbers of all clippings of the root. */
static fsdp_status make_numbers(fsdp_root *root, int ranks, fsdp_error *err)
{
    fsdp_clipping *clipping = &root->clipping;
    fsdp_device *device = root->context->device;
    const size_t size = sizeof *clipping->numbers, sums = root->model->count + (size_t)ranks;
    if (!clipping->numbers)
        clipping->numbers = device->ops->alloc(device, (sums + 1) * size);
    if (!clipping->totals)
        clipping->totals = device->ops->alloc_staging(device, FSDP_KEPT_NORMS * size);
    if (!clipping->numbers || !clipping->totals)
        return fsdp_fail_memory(err, "the norm of the gradients");
    clipping->number_count = sums + 1;
    clipping->factor = clipping->numbers + sums;
    return FSDP_OK;
}

static fsdp_kept_norm *last_norm(fsdp_clipping *clipping)
{
    return &clipping->norms[(clipping->count - 1) % FSDP_KEPT_NORMS];
}

static double *last_total(const fsdp_clipping *clipping)
{
    return &clipping->totals[(clipping->count - 1) % FSDP_KEPT_NORMS];
}

/* Each rank's sum goes to its place among those of all ranks. */
static void gather_sums(fsdp_stream *compute, fsdp_ordered_comm *ordered, double *sums)
{
    const fsdp_collective call = {.kind = FSDP_ALL_GATHER,
                                  .dtype = FSDP_F64,
                                  .in = sums + fsdp_comm_rank(ordered->comm),
                                  .out = sums,
                                  .count = 1,
                                  .unit = "clip_grad_norm"};
    fsdp_work_collective(compute, ordered, &call, NULL);
}

/* Gives the compute stream all of it, and does not wait. `call` has what the sums become. */
static void measure_in_stream(fsdp_root *root, fsdp_ordered_comm *ordered, const fsdp_span *grads,
                              fsdp_norm_call call)
{
    fsdp_stream *compute = root->context->streams[FSDP_STREAM_COMPUTE];
    const fsdp_device_kernels *kernels = compute->device->ops->kernels;
    double *sums = root->clipping.numbers, *of_ranks = sums + root->model->count;
    kernels->power_sums(compute, grads, call.n, call.p, sums);
    call.sums = sums;
    if (ordered->size > 1) {
        const fsdp_norm_call mine = {.sums = sums,
                                     .n = call.n,
                                     .p = call.p,
                                     .total_out = of_ranks + fsdp_comm_rank(ordered->comm)};
        kernels->norm(compute, &mine);
        gather_sums(compute, ordered, of_ranks);
        call.sums = of_ranks;
        call.n = (size_t)ordered->size;
    }
    kernels->norm(compute, &call);
    last_norm(&root->clipping)->known = fsdp_stream_now(compute);
}

static fsdp_status measure_on_host(fsdp_root *root, const fsdp_span *grads, fsdp_norm_call call,
                                   fsdp_error *err)
{
    fsdp_stream *compute = root->context->streams[FSDP_STREAM_COMPUTE];
    double *sums = root->clipping.numbers, total = 0;
    const fsdp_norm_call mine = {.sums = sums, .n = call.n, .p = call.p, .total_out = &total};
    const fsdp_fold fold = isinf(call.p) ? FSDP_FOLD_MAX : FSDP_FOLD_SUM;
    compute->device->ops->kernels->power_sums(compute, grads, call.n, call.p, sums);
    FSDP_TRY(compute->device->ops->sync(fsdp_stream_now(compute), err));
    fsdp_tensor_norm(&mine);
    FSDP_TRY(root_fold(root, &total, fold, "clip_grad_norm", err));
    call.sums = &total;
    call.n = 1;
    fsdp_tensor_norm(&call);
    last_norm(&root->clipping)->known = (fsdp_event){0};
    return FSDP_OK;
}

/* The total and the factor of the next norm; on a host's device they are known then. */
static fsdp_status measure(fsdp_root *root, const fsdp_clip_opts *opts, fsdp_error *err)
{
    fsdp_clipping *clipping = &root->clipping;
    fsdp_ordered_comm *ordered = fsdp_root_find_widest(root);
    fsdp_span *grads = NULL;
    size_t n = 0;
    FSDP_TRY(need_connected(ordered, "clip_grad_norm", err));
    FSDP_TRY(make_numbers(root, ordered->size, err));
    fsdp_status status = list_grads(root, is_first_holder, &grads, &n, err);
    clipping->count++;
    last_norm(clipping)->p = opts->norm_type;
    clipping->max_norm = opts->max_norm;
    clipping->skips = opts->error_if_nonfinite;
    const fsdp_norm_call call = {.n = n,
                                 .p = opts->norm_type,
                                 .max_norm = opts->max_norm,
                                 .skips = opts->error_if_nonfinite,
                                 .total_out = last_total(clipping),
                                 .factor_out = clipping->factor};
    if (status == FSDP_OK && root->context->device->ops->is_host)
        status = measure_on_host(root, grads, call, err);
    else if (status == FSDP_OK)
        measure_in_stream(root, ordered, grads, call);
    fsdp_free(grads);
    return status;
}

/* Waits until the norm is known. A rank that failed leaves other numbers in the others' memory. */
static fsdp_status read_norm(const fsdp_root *root, uint64_t number, double *norm_out,
                             fsdp_error *err)
{
    const size_t place = number % FSDP_KEPT_NORMS;
    const fsdp_kept_norm *kept = &root->clipping.norms[place];
    FSDP_TRY(root->context->device->ops->sync(kept->known, err));
    FSDP_TRY(fsdp_context_check_comms(root->context, err));
    *norm_out = fsdp_norm_of(root->clipping.totals[place], kept->p);
    return FSDP_OK;
}

/* --- steps that clip ---------------------------------------------------------------------------- */

static fsdp_status clip_check_done(const fsdp_root *root, const char *call, fsdp_error *err)
{
    if (!root->clipping.is_pending)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "cannot %s: the gradients wait to be clipped by a step; step first, or call "
                     "fsdp_root_zero_grad",
                     call);
}

/* Takes back the count of steps that the device has skipped, and waits for the norm that decides it. A
 * failure stays in the stream, for the next call on the root. */
static void clip_settle(fsdp_root *root)
{
    double norm = 0;
    if (!root->clipping.is_unsettled)
        return;
    root->clipping.is_unsettled = false;
    const bool was_skipped =
        read_norm(root, root->clipping.count - 1, &norm, NULL) == FSDP_OK && !isfinite(norm);
    for (const fsdp_optim *optim = root->optims; optim; optim = optim->next)
        for (size_t i = 0; i < optim->count; i++) {
            if (was_skipped && optim->states[i].is_unsettled)
                optim->states[i].step--;
            optim->states[i].is_unsettled = false;
        }
}

static fsdp_status clip_begin_step(fsdp_root *root, fsdp_error *err)
{
    const fsdp_clipping *clipping = &root->clipping;
    if (!clipping->is_pending)
        clip_settle(root);
    else if (clipping->backwards != root->backwards)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot step the optimizer: a backward came after the clipping that the "
                         "step was to do; clip after the last backward");
    return FSDP_OK;
}

/* The factor by which these kernels multiply gradients; NULL: none. */
static const double *clip_factor_of(fsdp_root *root, const fsdp_device_kernels *kernels)
{
    fsdp_clipping *clipping = &root->clipping;
    if (!clipping->is_pending)
        return NULL;
    if (root->context->device->ops->is_host || kernels != &fsdp_device_host_kernels)
        return clipping->factor;
    /* the host has waited for the compute stream (await_copies) */
    const double norm = fsdp_norm_of(*last_total(clipping), last_norm(clipping)->p);
    clipping->host_factor = fsdp_clip_factor(norm, clipping->max_norm, clipping->skips);
    return &clipping->host_factor;
}

static void clip_end_step(fsdp_root *root)
{
    fsdp_clipping *clipping = &root->clipping;
    clipping->is_unsettled |= clipping->is_pending && clipping->skips;
    if (!fsdp_root_awaits_step(root, NULL))
        clipping->is_pending = false;
}

/* --- clipping ----------------------------------------------------------------------------------- */

/* Offloaded ones are in the memory of the host next to a GPU. */
static bool is_on_device(const fsdp_param *param)
{
    return fsdp_group_kernels(param->group) == param->group->context->device->ops->kernels;
}

static bool is_beside_device(const fsdp_param *param)
{
    return !is_on_device(param);
}

static fsdp_status multiply_some(fsdp_root *root, const fsdp_device_kernels *kernels,
                                 bool (*are_meant)(const fsdp_param *param), double factor,
                                 fsdp_error *err)
{
    fsdp_span *grads = NULL;
    size_t n = 0;
    fsdp_status status = list_grads(root, are_meant, &grads, &n, err);
    if (status == FSDP_OK) {
        kernels->multiply(root->context->streams[FSDP_STREAM_COMPUTE], grads, n, factor);
        status = fsdp_context_sync(root->context, err);
    }
    fsdp_free(grads);
    return status;
}

static fsdp_status multiply_grads(fsdp_root *root, double factor, fsdp_error *err)
{
    const fsdp_device_kernels *kernels = root->context->device->ops->kernels;
    FSDP_TRY(multiply_some(root, kernels, is_on_device, factor, err));
    return multiply_some(root, &fsdp_device_host_kernels, is_beside_device, factor, err);
}

/* The host waits for the norm, and multiplies. */
static fsdp_status clip_now(fsdp_root *root, const fsdp_clip_opts *opts, double *norm_out,
                            fsdp_error *err)
{
    FSDP_TRY(read_norm(root, root->clipping.count - 1, norm_out, err));
    if (isinf(opts->max_norm) || (!isfinite(*norm_out) && opts->error_if_nonfinite))
        return FSDP_OK;
    return multiply_grads(root, fsdp_clip_factor(*norm_out, opts->max_norm, false), err);
}

static fsdp_status clip(fsdp_root *root, const fsdp_clip_opts *opts, double *norm_out,
                        fsdp_error *err)
{
    clip_settle(root);
    FSDP_TRY(measure(root, opts, err));
    if (norm_out)
        return clip_now(root, opts, norm_out, err);
    root->clipping.is_pending = !isinf(opts->max_norm) || opts->error_if_nonfinite;
    root->clipping.backwards = root->backwards;
    return FSDP_OK;
}

fsdp_status fsdp_root_clip_grad_norm(fsdp_root *root, const fsdp_clip_opts *opts, double *norm_out,
                                     fsdp_error *err)
{
    FSDP_NEED(err, root);
    fsdp_clip_opts given = opts ? *opts : (fsdp_clip_opts){0};
    FSDP_TRY(fsdp_root_ready(root, err));
    given.norm_type = given.norm_type == 0 ? 2 : given.norm_type;
    given.max_norm = given.max_norm == 0 ? INFINITY : given.max_norm;
    if (!(given.norm_type > 0) || !(given.max_norm >= 0))
        return fsdp_fail(err, FSDP_ERR_USAGE, "cannot clip gradients to %g in the norm %g",
                         given.max_norm, given.norm_type);
    if (root->is_in_forward || root->is_in_backward)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot clip gradients inside a step; call fsdp_root_end_backward first");
    FSDP_TRY(fsdp_root_check_reduced(root, "clip_grad_norm", err));
    FSDP_TRY(clip_check_done(root, "clip gradients", err));
    if (!norm_out && isfinite(given.max_norm) && !root->optims)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot clip at a step without an optimizer; pass norm_out");
    fsdp_status status = clip(root, &given, norm_out, err);
    FSDP_TRY(fsdp_root_done(root, "fsdp_root_clip_grad_norm", status, err));
    if (norm_out && !isfinite(*norm_out) && given.error_if_nonfinite)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "the norm of the gradients is %g", *norm_out);
    return FSDP_OK;
}

fsdp_status fsdp_root_grad_norm(fsdp_root *root, int ago, double *norm_out, fsdp_error *err)
{
    FSDP_NEED(err, root, norm_out);
    const uint64_t count = root->clipping.count;
    FSDP_TRY(fsdp_root_ready(root, err));
    if (ago < 0 || ago >= FSDP_KEPT_NORMS || (uint64_t)ago >= count)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot read the norm of %d clippings before the last one: the norms of "
                         "the last %d are kept",
                         ago, count < FSDP_KEPT_NORMS ? (int)count : FSDP_KEPT_NORMS);
    return fsdp_root_done(root, "fsdp_root_grad_norm",
                          read_norm(root, count - 1 - (uint64_t)ago, norm_out, err), err);
}

/* === optimizers =============================================================================== */

/* --- creating state --------------------------------------------------------------------------- */

const char *fsdp_optim_moment_name(const fsdp_optim *optim, int moment)
{
    static const char *const adamw[FSDP_MOMENTS] = {"exp_avg", "exp_avg_sq"};
    if (optim->kind == FSDP_OPTIM_ADAMW)
        return adamw[moment];
    return moment == 0 && optim->sgd.momentum != 0 ? "momentum_buffer" : NULL;
}

static bool needs_master(const fsdp_optim *optim, const fsdp_param *param)
{
    bool as_stored = optim->kind == FSDP_OPTIM_ADAMW ? optim->adamw.step_in_param_dtype
                                                     : optim->sgd.step_in_param_dtype;
    return !as_stored && param->dtype != FSDP_F32 && param->dtype != FSDP_F64;
}

static fsdp_dtype moment_dtype_of(const fsdp_optim *optim, const fsdp_param *param)
{
    fsdp_dtype given =
        optim->kind == FSDP_OPTIM_ADAMW ? optim->adamw.moment_dtype : optim->sgd.moment_dtype;
    if (given != FSDP_DTYPE_NONE)
        return given;
    return needs_master(optim, param) ? FSDP_F32 : param->dtype;
}

/* A moment or a master: zeros, where the parameter's shard is. */
static fsdp_status allocate(fsdp_optim *optim, const fsdp_param *param, size_t size,
                            void **data_out, fsdp_error *err)
{
    fsdp_root *root = optim->root;
    fsdp_stream *compute = root->context->streams[FSDP_STREAM_COMPUTE];
    fsdp_device *device = root->context->device;
    int64_t bytes;
    bool is_offloaded = param->group->settings->offloads;
    void *(*alloc)(fsdp_device *, size_t) =
        is_offloaded ? device->ops->alloc_staging : device->ops->alloc;
    bool fits = !fsdp_mul_overflow(fsdp_param_local_count(param), (int64_t)size, &bytes);
    void *data = fits ? alloc(device, bytes > 0 ? (size_t)bytes : 1) : NULL;
    if (!data)
        return fsdp_fail_memory(err, param->name);
    *data_out = data;
    optim->bytes += bytes;
    fsdp_memory_count(&root->context->memory, FSDP_MEMORY_OPTIM, bytes);
    fsdp_group_kernels(param->group)->fill(compute, data, 0, (size_t)bytes);
    if (is_offloaded)
        return FSDP_OK;
    return fsdp_host_view_add(&root->view, (fsdp_viewed_block){.data = data, .size = (size_t)bytes},
                              err);
}

static void deallocate(const fsdp_optim *optim, const fsdp_param *param, void *data, size_t size)
{
    fsdp_device *device = optim->root->context->device;
    size_t bytes = (size_t)fsdp_param_local_count(param) * size;
    if (!data)
        return;
    fsdp_host_view_remove(&optim->root->view, data);
    if (param->group->settings->offloads)
        device->ops->dealloc_staging(device, data, bytes > 0 ? bytes : 1);
    else
        device->ops->dealloc(device, data, bytes > 0 ? bytes : 1);
}

enum { REFRESH_AT_ONCE = 256 };

/* Keeps a master element that still rounds to the parameter's, because it is more precise. */
static void refresh_some(float *master, const unsigned char *data, fsdp_dtype dtype, size_t n)
{
    unsigned char rounded[REFRESH_AT_ONCE * sizeof(float)];
    size_t size = fsdp_dtype_size(dtype);
    fsdp_cast(rounded, dtype, master, FSDP_F32, n);
    for (size_t i = 0; i < n; i++)
        if (memcmp(rounded + i * size, data + i * size, size) != 0)
            fsdp_cast(&master[i], FSDP_F32, data + i * size, dtype, 1);
}

static void refresh(float *master, const unsigned char *data, fsdp_dtype dtype, size_t count)
{
    for (size_t at = 0; at < count; at += REFRESH_AT_ONCE) {
        size_t rest = count - at;
        refresh_some(master + at, data + at * fsdp_dtype_size(dtype), dtype,
                     rest < REFRESH_AT_ONCE ? rest : REFRESH_AT_ONCE);
    }
}

void fsdp_optim_refresh_master(fsdp_optim_state *state)
{
    const fsdp_param *param = state->param;
    if (state->master)
        refresh(fsdp_root_view(param->model->root, state->master),
                fsdp_root_view(param->model->root, param->shard), param->dtype,
                (size_t)fsdp_param_local_count(param));
}

enum { REFRESH_STAGED = 1 << 20 };

/* Elements of a master and its parameter, which lie in the device's memory. */
typedef struct master_range {
    float *master;
    const unsigned char *data;
    fsdp_dtype dtype;
    size_t count;
} master_range;

/* Refreshes a copy of the range in staging memory, and copies the master back. */
static fsdp_status refresh_staged(fsdp_stream *stream, const master_range *range, float *staged,
                                  fsdp_error *err)
{
    const fsdp_device_ops *ops = stream->device->ops;
    const size_t master_size = range->count * sizeof *staged;
    unsigned char *staged_data = (unsigned char *)staged + master_size;
    ops->kernels->copy(stream, staged, range->master, master_size);
    ops->kernels->copy(stream, staged_data, range->data,
                       range->count * fsdp_dtype_size(range->dtype));
    FSDP_TRY(ops->sync(ops->record(stream), err));
    refresh(staged, staged_data, range->dtype, range->count);
    ops->kernels->copy(stream, range->master, staged, master_size);
    return ops->sync(ops->record(stream), err);
}

static fsdp_status refresh_on_device(fsdp_optim_state *state, fsdp_stream *stream, fsdp_error *err)
{
    const fsdp_param *param = state->param;
    fsdp_device *device = stream->device;
    size_t size = fsdp_dtype_size(param->dtype), count = (size_t)fsdp_param_local_count(param);
    size_t most = REFRESH_STAGED / (sizeof *state->master + size);
    fsdp_status status = FSDP_OK;
    float *staged = device->ops->alloc_staging(device, REFRESH_STAGED);
    if (!staged)
        return fsdp_fail_memory(err, "staging memory for masters");
    for (size_t at = 0; at < count && status == FSDP_OK; at += most) {
        const master_range range = {.master = state->master + at,
                                    .data = (const unsigned char *)param->shard + at * size,
                                    .dtype = param->dtype,
                                    .count = count - at < most ? count - at : most};
        status = refresh_staged(stream, &range, staged, err);
    }
    device->ops->dealloc_staging(device, staged, REFRESH_STAGED);
    return status;
}

fsdp_status fsdp_optim_refresh_unviewed(fsdp_optim_state *state, fsdp_error *err)
{
    fsdp_root *root = state->param->model->root;
    fsdp_stream *compute = root->context->streams[FSDP_STREAM_COMPUTE];
    const fsdp_device_ops *ops = compute->device->ops;
    if (!state->master)
        return FSDP_OK;
    fsdp_root_wait_copied(root, compute);
    FSDP_TRY(ops->sync(ops->record(compute), err));
    if (fsdp_host_view_find(&root->view, state->master))
        return refresh_on_device(state, compute, err);
    fsdp_optim_refresh_master(state);
    return FSDP_OK;
}

void fsdp_optim_refresh_masters(fsdp_optim *optim)
{
    fsdp_status status = FSDP_OK; /* a failed stream fails the next call on the root */
    for (size_t i = 0; optim && i < optim->count && status == FSDP_OK; i++)
        status = fsdp_optim_refresh_unviewed(&optim->states[i], NULL);
}

void fsdp_root_refresh_masters(fsdp_root *root, const fsdp_param *param)
{
    for (fsdp_optim *optim = root->optims; optim; optim = optim->next)
        for (size_t i = 0; i < optim->count; i++)
            if (!param || optim->states[i].param == param)
                fsdp_optim_refresh_master(&optim->states[i]);
}

fsdp_status fsdp_root_refresh_unviewed(fsdp_root *root, const fsdp_param *param, fsdp_error *err)
{
    for (fsdp_optim *optim = root->optims; optim; optim = optim->next)
        for (size_t i = 0; i < optim->count; i++)
            if (optim->states[i].param == param)
                FSDP_TRY(fsdp_optim_refresh_unviewed(&optim->states[i], err));
    return FSDP_OK;
}

static fsdp_status add_state(fsdp_optim *optim, fsdp_param *param, size_t group, fsdp_error *err)
{
    fsdp_optim_state *state = &optim->states[optim->count++];
    state->param = param;
    state->group = group;
    state->moment_dtype = moment_dtype_of(optim, param);
    for (int i = 0; i < FSDP_MOMENTS; i++)
        if (fsdp_optim_moment_name(optim, i))
            FSDP_TRY(allocate(optim, param, fsdp_dtype_size(state->moment_dtype),
                              &state->moments[i], err));
    if (needs_master(optim, param))
        FSDP_TRY(allocate(optim, param, sizeof(float), (void **)&state->master, err));
    return FSDP_OK;
}

/* Finds the first group that matches a parameter; false: none does. */
static bool find_group(const fsdp_optim_group *groups, size_t n, const fsdp_param *param,
                       size_t *group_out)
{
    for (*group_out = 0; *group_out < n; ++*group_out)
        if (!groups[*group_out].match ||
            groups[*group_out].match(groups[*group_out].context, param))
            return true;
    return false;
}

static size_t count_views(const fsdp_model *declared, const fsdp_param *flat)
{
    size_t n = 0;
    for (size_t i = 0; i < declared->count; i++)
        n += declared->params[i]->flat == flat;
    return n;
}

/* One run per declared parameter that is stepped, in the order of the flat one. Runs without elements on this
 * rank are empty and stay, so that all ranks count steps alike. */
static fsdp_status add_flat_state(fsdp_optim *optim, fsdp_param *flat,
                                  const fsdp_optim_group *groups, size_t n, fsdp_error *err)
{
    const fsdp_model *declared = optim->root->declared;
    FSDP_TRY(add_state(optim, flat, 0, err));
    fsdp_optim_state *state = &optim->states[optim->count - 1];
    state->runs = fsdp_alloc(count_views(declared, flat), sizeof *state->runs);
    if (!state->runs)
        return fsdp_fail_memory(err, flat->name);
    for (size_t i = 0; i < declared->count; i++) {
        const fsdp_param *param = declared->params[i];
        fsdp_optim_run *run = &state->runs[state->run_count];
        if (param->flat != flat || !param->requires_grad ||
            !find_group(groups, n, param, &run->group))
            continue;
        const fsdp_flat_run place = fsdp_param_flat_run(param);
        run->view = param;
        run->first = place.at;
        run->count = place.count;
        state->run_count++;
    }
    return FSDP_OK;
}

bool fsdp_optim_group_of(const fsdp_optim_state *state, const fsdp_param *param, size_t *group_out)
{
    *group_out = state->group;
    for (size_t i = 0; i < state->run_count; i++)
        if (state->runs[i].view == param) {
            *group_out = state->runs[i].group;
            return true;
        }
    return !state->runs;
}

/* 0 stands for the default. */
static double or_default(double given, double usual)
{
    return given == 0 ? usual : given;
}

/* Memory for the lists of a step. */
static fsdp_status allocate_step(fsdp_optim *optim, fsdp_error *err)
{
    bool is_adamw = optim->kind == FSDP_OPTIM_ADAMW;
    size_t n = 0;
    for (size_t i = 0; i < optim->count; i++)
        n += optim->states[i].runs ? optim->states[i].run_count : 1;
    optim->step_tensors = fsdp_alloc(n, sizeof *optim->step_tensors);
    optim->adamw_steps = fsdp_alloc(is_adamw ? n : 0, sizeof *optim->adamw_steps);
    optim->sgd_steps = fsdp_alloc(is_adamw ? 0 : n, sizeof *optim->sgd_steps);
    if (!optim->step_tensors || !optim->adamw_steps || !optim->sgd_steps)
        return fsdp_fail_memory(err, "an optimizer");
    return FSDP_OK;
}

static fsdp_status fill(fsdp_optim *optim, const fsdp_optim_group *groups, size_t n,
                        fsdp_error *err)
{
    const fsdp_model *model = optim->root->model;
    double lr = optim->kind == FSDP_OPTIM_ADAMW ? optim->adamw.lr : optim->sgd.lr;
    optim->groups = fsdp_alloc(n, sizeof *optim->groups);
    optim->states = fsdp_alloc(model->count, sizeof *optim->states);
    if (!optim->groups || !optim->states)
        return fsdp_fail_memory(err, "an optimizer");
    optim->group_count = n;
    for (size_t i = 0; i < n; i++)
        optim->groups[i] =
            (fsdp_optim_params){or_default(groups[i].lr, lr), groups[i].weight_decay};
    for (size_t i = 0; i < model->count; i++) {
        fsdp_param *param = model->params[i];
        size_t group = 0;
        if (!param->group || !param->requires_grad)
            continue;
        if (optim->root->steps_runs)
            FSDP_TRY(add_flat_state(optim, param, groups, n, err));
        else if (find_group(groups, n, param, &group))
            FSDP_TRY(add_state(optim, param, group, err));
    }
    return allocate_step(optim, err);
}

static fsdp_status check_number(double value, bool may_be_one, const char *name, fsdp_error *err)
{
    bool fits = value >= 0 && isfinite(value) && (may_be_one || value < 1);
    return fits ? FSDP_OK : fsdp_fail(err, FSDP_ERR_USAGE, "%s cannot be %g", name, value);
}

static fsdp_status check_groups(const fsdp_optim_group *groups, size_t n, fsdp_error *err)
{
    for (size_t i = 0; i < n; i++) {
        FSDP_TRY(check_number(groups[i].lr, true, "lr", err));
        FSDP_TRY(check_number(groups[i].weight_decay, true, "weight_decay", err));
    }
    return FSDP_OK;
}

static fsdp_status set_masters(fsdp_optim *optim, fsdp_error *err)
{
    FSDP_TRY(fsdp_context_sync(optim->root->context, err)); /* they are zeroed */
    for (size_t i = 0; i < optim->count; i++)
        FSDP_TRY(fsdp_optim_refresh_unviewed(&optim->states[i], err));
    return fsdp_context_check_comms(optim->root->context, err);
}

/* The end of a summoning would write back parameters of before. */
static fsdp_status refuse_summoned(const fsdp_root *root, const char *what, fsdp_error *err)
{
    if (!root->is_summoned)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "cannot %s: full parameters are summoned; call fsdp_wrap_summon_end first",
                     what);
}

static fsdp_status create(fsdp_root *root, const fsdp_optim *kind, const fsdp_optim_group *groups,
                          size_t n, fsdp_optim **optim_out, fsdp_error *err)
{
    FSDP_TRY(check_groups(groups, n, err));
    FSDP_TRY(refuse_summoned(root, "make an optimizer", err));
    fsdp_optim *optim = fsdp_alloc(1, sizeof *optim);
    if (!optim)
        return fsdp_fail_memory(err, "an optimizer");
    *optim = *kind;
    optim->adamw.groups = optim->sgd.groups = NULL; /* the caller's */
    optim->root = fsdp_root_hold(root);
    optim->next = root->optims;
    root->optims = optim;
    fsdp_status status = fill(optim, groups, n, err);
    if (status == FSDP_OK)
        status = set_masters(optim, err);
    if (status == FSDP_OK)
        *optim_out = optim;
    else
        fsdp_optim_free(optim);
    return status;
}

/* --- the two kinds ---------------------------------------------------------------------------- */

fsdp_status fsdp_adamw_create(fsdp_root *root, const fsdp_adamw_opts *given, fsdp_optim **optim_out,
                              fsdp_error *err)
{
    FSDP_NEED(err, root, optim_out);
    fsdp_adamw_opts opts = given ? *given : (fsdp_adamw_opts){0};
    opts.lr = or_default(opts.lr, 1e-3);
    opts.beta1 = or_default(opts.beta1, 0.9);
    opts.beta2 = or_default(opts.beta2, 0.999);
    opts.eps = or_default(opts.eps, 1e-8);
    FSDP_TRY(check_number(opts.lr, true, "lr", err));
    FSDP_TRY(check_number(opts.beta1, false, "beta1", err));
    FSDP_TRY(check_number(opts.beta2, false, "beta2", err));
    FSDP_TRY(check_number(opts.eps, true, "eps", err));
    FSDP_TRY(check_number(opts.weight_decay, true, "weight_decay", err));
    FSDP_TRY(fsdp_option_check_float("moment_dtype", opts.moment_dtype, err));
    const fsdp_optim kind = {.kind = FSDP_OPTIM_ADAMW, .adamw = opts};
    const fsdp_optim_group all = {.lr = opts.lr, .weight_decay = opts.weight_decay};
    return create(root, &kind, opts.groups ? opts.groups : &all, opts.groups ? opts.group_count : 1,
                  optim_out, err);
}

fsdp_status fsdp_sgd_create(fsdp_root *root, const fsdp_sgd_opts *given, fsdp_optim **optim_out,
                            fsdp_error *err)
{
    FSDP_NEED(err, root, optim_out);
    fsdp_sgd_opts opts = given ? *given : (fsdp_sgd_opts){0};
    opts.lr = or_default(opts.lr, 1e-3);
    FSDP_TRY(check_number(opts.lr, true, "lr", err));
    FSDP_TRY(check_number(opts.momentum, true, "momentum", err));
    FSDP_TRY(check_number(opts.weight_decay, true, "weight_decay", err));
    FSDP_TRY(fsdp_option_check_float("moment_dtype", opts.moment_dtype, err));
    if (!isfinite(opts.dampening))
        return fsdp_fail(err, FSDP_ERR_USAGE, "dampening cannot be %g", opts.dampening);
    if (opts.nesterov && (opts.momentum == 0 || opts.dampening != 0))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot make an SGD with nesterov: it needs a momentum, and no dampening");
    const fsdp_optim kind = {.kind = FSDP_OPTIM_SGD, .sgd = opts};
    const fsdp_optim_group all = {.lr = opts.lr, .weight_decay = opts.weight_decay};
    return create(root, &kind, opts.groups ? opts.groups : &all, opts.groups ? opts.group_count : 1,
                  optim_out, err);
}

static void unlink_from_root(const fsdp_optim *optim)
{
    fsdp_optim **at = &optim->root->optims;
    while (*at != optim)
        at = &(*at)->next;
    *at = optim->next;
}

void fsdp_optim_free(fsdp_optim *optim)
{
    if (!optim)
        return;
    fsdp_stream *compute = optim->root->context->streams[FSDP_STREAM_COMPUTE];
    unlink_from_root(optim);
    fsdp_root_wait_copied(optim->root, compute);
    (void)!compute->device->ops->sync(fsdp_stream_now(compute), NULL); /* work on the state */
    for (size_t i = 0; i < optim->count; i++) {
        fsdp_optim_state *state = &optim->states[i];
        for (int m = 0; m < FSDP_MOMENTS; m++)
            deallocate(optim, state->param, state->moments[m],
                       fsdp_dtype_size(state->moment_dtype));
        deallocate(optim, state->param, state->master, sizeof(float));
        fsdp_free(state->runs);
    }
    fsdp_memory_count(&optim->root->context->memory, FSDP_MEMORY_OPTIM, -optim->bytes);
    fsdp_free(optim->step_tensors);
    fsdp_free(optim->adamw_steps);
    fsdp_free(optim->sgd_steps);
    fsdp_free(optim->states);
    fsdp_free(optim->groups);
    fsdp_root_free(optim->root);
    fsdp_free(optim);
}

size_t fsdp_optim_group_count(const fsdp_optim *optim)
{
    if (!optim)
        return 0;
    return optim->group_count;
}

double fsdp_optim_lr(const fsdp_optim *optim, size_t group)
{
    if (!optim)
        return NAN;
    return group < optim->group_count ? optim->groups[group].lr : NAN;
}

fsdp_status fsdp_optim_set_lr(fsdp_optim *optim, size_t group, double lr, fsdp_error *err)
{
    FSDP_NEED(err, optim);
    if (group >= optim->group_count)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot set the learning rate of group %zu: the optimizer has %zu groups",
                         group, optim->group_count);
    FSDP_TRY(check_number(lr, true, "lr", err));
    optim->groups[group].lr = lr;
    return FSDP_OK;
}

/* --- a step ----------------------------------------------------------------------------------- */

/* The begin of a run in the shard, its gradient or a moment. */
static void *behind(const void *data, const fsdp_optim_run *run, fsdp_dtype dtype)
{
    size_t offset = (size_t)run->first * fsdp_dtype_size(dtype);
    return data ? (unsigned char *)data + offset : NULL;
}

static fsdp_optim_tensors tensors_of(const fsdp_optim_state *state, const fsdp_optim_run *run)
{
    const fsdp_param *param = state->param;
    return (fsdp_optim_tensors){
        .param = behind(param->shard, run, param->dtype),
        .param_type = param->dtype,
        .master = behind(state->master, run, FSDP_F32),
        .grad = behind(param->shard_grad, run, param->dtype),
        .grad_type = param->dtype,
        .moments = {behind(state->moments[0], run, state->moment_dtype),
                    behind(state->moments[1], run, state->moment_dtype)},
        .moment_type = state->moment_dtype,
        .count = (size_t)run->count,
    };
}

static fsdp_adamw_step adamw_step_of(const fsdp_optim *optim, const fsdp_optim_state *state,
                                     const fsdp_optim_params *group, const double *clip)
{
    const fsdp_adamw_opts *opts = &optim->adamw;
    return (fsdp_adamw_step){.lr = group->lr,
                             .beta1 = opts->beta1,
                             .beta2 = opts->beta2,
                             .eps = opts->eps,
                             .weight_decay = group->weight_decay,
                             .step = (int64_t)state->step,
                             .grad_scale = 1,
                             .maximize = opts->maximize,
                             .clip = clip};
}

static fsdp_sgd_step sgd_step_of(const fsdp_optim *optim, const fsdp_optim_state *state,
                                 const fsdp_optim_params *group, const double *clip)
{
    const fsdp_sgd_opts *opts = &optim->sgd;
    return (fsdp_sgd_step){.lr = group->lr,
                           .momentum = opts->momentum,
                           .dampening = opts->dampening,
                           .weight_decay = group->weight_decay,
                           .nesterov = opts->nesterov,
                           .is_first = state->step == 1,
                           .maximize = opts->maximize,
                           .grad_scale = 1,
                           .clip = clip};
}

/* Lists a state's runs after the first n of this step. */
static size_t list_runs(fsdp_optim *optim, fsdp_optim_state *state, const double *clip, size_t n)
{
    const fsdp_optim_run whole = {.count = fsdp_param_local_count(state->param),
                                  .group = state->group};
    const fsdp_optim_run *runs = state->runs ? state->runs : &whole;
    size_t count = state->runs ? state->run_count : 1;
    state->step++;
    state->is_unsettled = clip && optim->root->clipping.skips;
    for (size_t i = 0; i < count; i++, n++) {
        const fsdp_optim_params *group = &optim->groups[runs[i].group];
        optim->step_tensors[n] = tensors_of(state, &runs[i]);
        if (optim->kind == FSDP_OPTIM_ADAMW)
            optim->adamw_steps[n] = adamw_step_of(optim, state, group, clip);
        else
            optim->sgd_steps[n] = sgd_step_of(optim, state, group, clip);
    }
    return n;
}

/* Every flat parameter has a state; it is stepped if it has runs. */
static bool is_due(const fsdp_optim_state *state)
{
    return state->param->shard_grad && (!state->runs || state->run_count > 0);
}

bool fsdp_root_awaits_step(const fsdp_root *root, const fsdp_group *group)
{
    for (const fsdp_optim *optim = root->optims; optim; optim = optim->next)
        for (size_t i = 0; i < optim->count; i++)
            if (is_due(&optim->states[i]) && (!group || optim->states[i].param->group == group))
                return true;
    return false;
}

/* Drops the gradients of its parameters, except those that wait for another optimizer.
 * Gradients of a group share blocks, which are freed when no other optimizer still needs one of them. */
static void drop_grads(fsdp_optim *optim)
{
    const fsdp_root *root = optim->root;
    for (size_t i = 0; i < optim->count; i++)
        if (is_due(&optim->states[i]))
            optim->states[i].param->shard_grad = NULL;
    for (size_t i = 0; i < root->group_count; i++)
        if (!fsdp_root_awaits_step(root, root->groups[i]))
            fsdp_group_drop_grads(root->groups[i]);
    clip_end_step(optim->root);
}

static bool is_due_there(const fsdp_optim_state *state, const fsdp_device_kernels *kernels)
{
    return is_due(state) && fsdp_group_kernels(state->param->group) == kernels;
}

/* The parameters that these kernels step, in one piece of work: a GPU starts it once. Lists them from item
 * `first` on, and returns where the list ends. */
static size_t step_by(fsdp_optim *optim, const fsdp_device_kernels *kernels, fsdp_stream *compute,
                      size_t first)
{
    size_t end = first;
    const double *clip = clip_factor_of(optim->root, kernels);
    for (size_t i = 0; i < optim->count; i++) {
        fsdp_optim_state *state = &optim->states[i];
        if (!is_due_there(state, kernels))
            continue;
        fsdp_work_uses(compute, state->param->shard);
        fsdp_work_uses(compute, state->param->shard_grad);
        end = list_runs(optim, state, clip, end);
    }
    if (optim->kind == FSDP_OPTIM_ADAMW)
        kernels->adamw(compute, optim->step_tensors + first, optim->adamw_steps + first,
                       end - first);
    else
        kernels->sgd(compute, optim->step_tensors + first, optim->sgd_steps + first, end - first);
    return end;
}

/* A forward since the backward may still copy the offloaded shards, which the host is to change. */
static fsdp_status await_copies(const fsdp_optim *optim, fsdp_stream *compute, fsdp_error *err)
{
    for (size_t i = 0; i < optim->count; i++)
        if (is_due_there(&optim->states[i], &fsdp_device_host_kernels))
            return compute->device->ops->sync(fsdp_stream_now(compute), err);
    return FSDP_OK;
}

/* The device, which works on its own, comes first. */
static fsdp_status step_all(fsdp_optim *optim, fsdp_stream *compute, fsdp_error *err)
{
    const fsdp_device_kernels *kernels = compute->device->ops->kernels;
    FSDP_TRY(await_copies(optim, compute, err));
    fsdp_root_wait_copied(optim->root, compute);
    size_t end = step_by(optim, kernels, compute, 0);
    if (kernels != &fsdp_device_host_kernels)
        step_by(optim, &fsdp_device_host_kernels, compute, end);
    return FSDP_OK;
}

/* Reshards after it: gathered parameters have values from before the step, and the next forward
 * must gather again. */
static fsdp_status step(fsdp_optim *optim, fsdp_error *err)
{
    fsdp_context *context = optim->root->context;
    FSDP_TRY(step_all(optim, context->streams[FSDP_STREAM_COMPUTE], err));
    for (size_t i = 0; i < optim->count; i++) {
        if (!is_due(&optim->states[i]))
            continue;
        FSDP_TRY(fsdp_group_reshard(optim->states[i].param->group, err));
        fsdp_group_drop_gather(optim->states[i].param->group);
    }
    drop_grads(optim);
    return fsdp_context_sync(context, err);
}

fsdp_status fsdp_optim_step(fsdp_optim *optim, fsdp_error *err)
{
    FSDP_NEED(err, optim);
    fsdp_root *root = optim->root;
    FSDP_TRY(fsdp_root_ready(root, err));
    if (root->is_in_forward || root->is_in_backward)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "cannot step the optimizer inside a step; call fsdp_root_end_backward first");
    FSDP_TRY(refuse_summoned(root, "step the optimizer", err));
    FSDP_TRY(fsdp_root_check_reduced(root, "the optimizer's step", err));
    FSDP_TRY(clip_begin_step(root, err));
    fsdp_world_trace(root->world, "optim_step", -1);
    fsdp_status status = step(optim, err);
    root->step += !fsdp_root_awaits_step(root, NULL);
    return fsdp_root_done(root, "fsdp_optim_step", status, err);
}

/* === the state as tensors ===================================================================== */

static fsdp_optim_tensor tensor_of(const fsdp_param *param, const char *name, fsdp_dtype dtype,
                                   void *data)
{
    return (fsdp_optim_tensor){.name = name,
                               .dtype = dtype,
                               .ndim = param->ndim,
                               .shape = param->shape,
                               .layout = param->layout,
                               .data = data};
}

size_t fsdp_optim_state_tensors(const fsdp_optim *optim, fsdp_optim_state *state,
                                fsdp_optim_tensor tensors_out[FSDP_OPTIM_TENSORS])
{
    const fsdp_param *param = state->param;
    size_t n = 0;
    clip_settle(optim->root);
    tensors_out[n++] =
        (fsdp_optim_tensor){.name = "step",
                            .dtype = FSDP_F32,
                            .layout = {.kind = FSDP_LAYOUT_MESH, .mesh = param->mesh},
                            .data = &state->step};
    for (int m = 0; m < FSDP_MOMENTS; m++) {
        const char *name = fsdp_optim_moment_name(optim, m);
        if (name)
            tensors_out[n++] = tensor_of(param, name, state->moment_dtype, state->moments[m]);
    }
    if (state->master)
        tensors_out[n++] = tensor_of(param, "master", FSDP_F32, state->master);
    return n;
}

size_t fsdp_optim_describe_state(const fsdp_optim *optim, const fsdp_param *param,
                                 fsdp_optim_tensor tensors_out[FSDP_OPTIM_TENSORS])
{
    if (!optim || !param || !tensors_out)
        return 0;
    for (size_t i = 0; i < optim->count; i++)
        if (optim->states[i].param == param)
            return fsdp_optim_state_tensors(optim, &optim->states[i], tensors_out);
    return 0;
}

/* === scaling ================================================================================== */

struct fsdp_scaler {
    fsdp_scaler_opts opts;
    double scale;
    int64_t good_steps;
    bool is_finite, is_to_adapt; /* the scale changes once all optimizers have stepped */
    const fsdp_root *root;       /* the root and the backward whose gradients were divided */
    uint64_t backwards;
};

static fsdp_scaler_opts with_defaults(const fsdp_scaler_opts *given)
{
    fsdp_scaler_opts opts = given ? *given : (fsdp_scaler_opts){0};
    opts.init_scale = opts.init_scale == 0 ? 65536 : opts.init_scale;
    opts.growth_factor = opts.growth_factor == 0 ? 2 : opts.growth_factor;
    opts.backoff_factor = opts.backoff_factor == 0 ? 0.5 : opts.backoff_factor;
    opts.growth_interval = opts.growth_interval == 0 ? 2000 : opts.growth_interval;
    return opts;
}

fsdp_status fsdp_scaler_create(const fsdp_scaler_opts *given, fsdp_scaler **scaler_out,
                               fsdp_error *err)
{
    FSDP_NEED(err, scaler_out);
    const fsdp_scaler_opts opts = with_defaults(given);
    bool fits = opts.init_scale > 0 && opts.growth_factor > 1 && opts.backoff_factor > 0 &&
                opts.backoff_factor < 1 && opts.growth_interval > 0;
    if (!fits)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot make a scaler: it grows by more than 1, backs off by less than 1, "
                         "and begins above 0");
    fsdp_scaler *scaler = fsdp_alloc(1, sizeof *scaler);
    if (!scaler)
        return fsdp_fail_memory(err, "a scaler");
    scaler->opts = opts;
    scaler->scale = opts.init_scale;
    *scaler_out = scaler;
    return FSDP_OK;
}

void fsdp_scaler_free(fsdp_scaler *scaler)
{
    fsdp_free(scaler);
}

double fsdp_scaler_scale(const fsdp_scaler *scaler)
{
    return scaler ? scaler->scale : 0;
}

static void adapt(fsdp_scaler *scaler)
{
    if (!scaler->is_finite) {
        scaler->scale *= scaler->opts.backoff_factor;
        scaler->good_steps = 0;
    } else if (++scaler->good_steps == scaler->opts.growth_interval) {
        scaler->scale *= scaler->opts.growth_factor;
        scaler->good_steps = 0;
    }
    scaler->is_to_adapt = false;
}

static bool is_unscaled(const fsdp_scaler *scaler, const fsdp_root *root)
{
    return scaler->is_to_adapt && scaler->root == root && scaler->backwards == root->backwards;
}

/* The host waits for the result, so that it may read the gradients, too. */
static fsdp_status unscale_grads(const fsdp_scaler *scaler, const fsdp_root *root,
                                 const fsdp_span *grads, size_t n, int *all_are_finite,
                                 fsdp_error *err)
{
    fsdp_stream *compute = root->context->streams[FSDP_STREAM_COMPUTE];
    const fsdp_device_kernels *kernels = compute->device->ops->kernels;
    kernels->multiply(compute, grads, n, 1 / scaler->scale);
    kernels->are_finite(compute, grads, n, all_are_finite);
    return compute->device->ops->sync(fsdp_stream_now(compute), err);
}

static fsdp_status unscale_local(const fsdp_scaler *scaler, fsdp_root *root, bool *finite_out,
                                 fsdp_error *err)
{
    fsdp_device *device = root->context->device;
    fsdp_span *grads = NULL;
    size_t n = 0;
    int *all_are_finite = device->ops->alloc_staging(device, sizeof *all_are_finite);
    fsdp_status status = all_are_finite ? list_grads(root, NULL, &grads, &n, err)
                                        : fsdp_fail_memory(err, "the search of gradients");
    if (status == FSDP_OK)
        status = unscale_grads(scaler, root, grads, n, all_are_finite, err);
    if (status == FSDP_OK)
        *finite_out = *all_are_finite;
    if (all_are_finite)
        device->ops->dealloc_staging(device, all_are_finite, sizeof *all_are_finite);
    fsdp_free(grads);
    return status;
}

static fsdp_status unscale(fsdp_scaler *scaler, fsdp_root *root, fsdp_error *err)
{
    bool is_finite = false;
    FSDP_TRY(unscale_local(scaler, root, &is_finite, err));
    double bad = is_finite ? 0 : 1;
    FSDP_TRY(root_fold(root, &bad, FSDP_FOLD_MAX, "loss scaling", err));
    if (scaler->is_to_adapt) /* an optimizer did not step after the last backward */
        adapt(scaler);
    scaler->is_finite = bad == 0;
    scaler->is_to_adapt = true;
    scaler->root = root;
    scaler->backwards = root->backwards;
    return FSDP_OK;
}

fsdp_status fsdp_scaler_unscale(fsdp_scaler *scaler, fsdp_root *root, fsdp_error *err)
{
    FSDP_NEED(err, scaler, root);
    FSDP_TRY(fsdp_root_ready(root, err));
    if (root->is_in_forward || root->is_in_backward)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "cannot unscale gradients inside a step; call fsdp_root_end_backward first");
    if (scaler->is_to_adapt && scaler->root != root)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot unscale: the scaler has divided the gradients of another root; "
                         "step its optimizers first");
    if (is_unscaled(scaler, root))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot unscale twice: the gradients were unscaled since the last step");
    FSDP_TRY(fsdp_root_check_reduced(root, "the scaler's unscale", err));
    FSDP_TRY(clip_check_done(root, "unscale gradients", err));
    return fsdp_root_done(root, "fsdp_scaler_unscale", unscale(scaler, root, err), err);
}

fsdp_status fsdp_scaler_step(fsdp_scaler *scaler, fsdp_optim *optim, bool *skipped_out,
                             fsdp_error *err)
{
    FSDP_NEED(err, scaler, optim);
    if (!is_unscaled(scaler, optim->root))
        FSDP_TRY(fsdp_scaler_unscale(scaler, optim->root, err));
    if (skipped_out)
        *skipped_out = !scaler->is_finite;
    if (scaler->is_finite)
        FSDP_TRY(fsdp_optim_step(optim, err));
    else
        drop_grads(optim);
    if (!fsdp_root_awaits_step(optim->root, NULL))
        adapt(scaler);
    return FSDP_OK;
}
