/*
 * The FSDP1 face: whole parameters between steps, in their stored dtype. Afterwards each rank writes the
 * changes in its own chunk back.
 */
#include "runtime/wrap/wrap_internal.h"

#include <string.h>

#include "base/core/given.h"
#include "base/core/mem.h"

/* --- allowed combinations --------------------------------------------------------------------- */

static bool is_asked_for(const fsdp_wrap_flat *flat, const fsdp_wrap_flat *outer, bool recurse)
{
    return flat == outer || (recurse && fsdp_name_is_below(flat->module, outer->module));
}

static const fsdp_wrap_flat *find_unit(const fsdp_wrap *wrap, const fsdp_unit *unit)
{
    for (size_t i = 0; i < wrap->flat_count; i++)
        if (wrap->flats[i].unit == unit)
            return &wrap->flats[i];
    return NULL;
}

static fsdp_status check_opts(const fsdp_wrap *wrap, const fsdp_wrap_flat *outer,
                              const fsdp_wrap_summon_opts *opts, fsdp_error *err)
{
    if (opts->rank0_only && !opts->discard_changes)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot summon with rank0_only alone: changes on rank 0 do not reach the "
                         "chunks of the others; set discard_changes");
    if (opts->with_grads && !wrap->use_orig_params)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot summon with_grads: the model was wrapped without use_orig_params");
    if (opts->with_grads && opts->offload_to_cpu)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot summon with_grads into host memory; drop offload_to_cpu");
    for (size_t i = 0; i < wrap->flat_count && opts->offload_to_cpu; i++)
        if (wrap->flats[i].opts.strategy == FSDP_WRAP_NO_SHARD &&
            is_asked_for(&wrap->flats[i], outer, !opts->only_unit))
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "cannot offload unit '%s': it is NO_SHARD, and its parameters are "
                             "whole where they are; drop offload_to_cpu",
                             fsdp_unit_name(wrap->flats[i].unit));
    return FSDP_OK;
}

/* --- gathering -------------------------------------------------------------------------------- */

static bool is_whole(const fsdp_param *flat)
{
    return flat->group->shard_size == 1;
}

/* Collective in the flat parameter's group. local: this rank's part of the parameter or of a tensor with its
 * layout. */
static fsdp_status gather_parts(const fsdp_param *flat, const void *local, void *whole,
                                fsdp_error *err)
{
    const fsdp_group *group = flat->group;
    size_t size = fsdp_dtype_size(flat->dtype), bytes = (size_t)flat->rows * size;
    size_t chunk = (size_t)flat->padded * size;
    unsigned char *mine = (unsigned char *)whole + (size_t)group->shard_rank * chunk;
    const fsdp_collective call = {.kind = FSDP_ALL_GATHER,
                                  .dtype = flat->dtype,
                                  .in = mine,
                                  .out = whole,
                                  .count = flat->padded,
                                  .unit = group->unit->name};
    memcpy(mine, local, bytes);
    memset(mine + bytes, 0, chunk - bytes);
    FSDP_TRY(group->context->device->ops->sync(group->shard->last, err));
    return fsdp_comm_run(group->shard->comm, &call, err);
}

/* A rank that keeps nothing takes part, too. */
static fsdp_status gather(const fsdp_param *flat, const void *local, bool keeps, void **whole_out,
                          fsdp_error *err)
{
    size_t count = (size_t)(flat->padded * flat->group->shard_size);
    *whole_out = fsdp_alloc(count, fsdp_dtype_size(flat->dtype));
    if (!*whole_out)
        return fsdp_fail_memory(err, flat->name);
    FSDP_TRY(gather_parts(flat, local, *whole_out, err));
    if (keeps)
        return FSDP_OK;
    fsdp_free(*whole_out);
    *whole_out = NULL;
    return FSDP_OK;
}

/* The host's address of this rank's gradient. */
static void *grad_of(const fsdp_wrap *wrap, const fsdp_param *param)
{
    return fsdp_host_view_at(&wrap->summoned_grads, param->shard_grad);
}

static fsdp_status view_grads(fsdp_wrap *wrap, fsdp_error *err)
{
    fsdp_context *context = wrap->root->context;
    fsdp_host_view *view = &wrap->summoned_grads;
    view->device = context->device;
    for (size_t i = 0; i < wrap->flat_count; i++) {
        const fsdp_param *param = wrap->flats[i].param;
        if (!param || !param->shard_grad || param->group->settings->offloads)
            continue;
        size_t bytes = (size_t)param->rows * fsdp_dtype_size(param->dtype);
        const fsdp_viewed_block grad = {.data = param->shard_grad, .size = bytes};
        FSDP_TRY(fsdp_host_view_add(view, grad, err));
    }
    return fsdp_host_view_load(view, context->streams[FSDP_STREAM_COMPUTE], err);
}

static fsdp_status take_out(fsdp_wrap *wrap, fsdp_wrap_flat *flat, fsdp_error *err)
{
    fsdp_param *param = flat->param;
    bool keeps = !wrap->summon.rank0_only || wrap->root->world->rank == 0;
    bool with_grads = wrap->summon.with_grads && param->shard_grad;
    flat->is_summoned = true;
    if (is_whole(param)) {
        param->summoned = keeps ? fsdp_root_view(wrap->root, param->shard) : NULL;
        param->summoned_grad = with_grads && keeps ? grad_of(wrap, param) : NULL;
        return FSDP_OK;
    }
    FSDP_TRY(gather(param, fsdp_root_view(wrap->root, param->shard), keeps, &flat->summoned, err));
    param->summoned = flat->summoned;
    if (with_grads)
        FSDP_TRY(gather(param, grad_of(wrap, param), keeps, &flat->summoned_grad, err));
    param->summoned_grad = flat->summoned_grad;
    return FSDP_OK;
}

/* --- back ------------------------------------------------------------------------------------- */

static void write_back(const fsdp_param *param, const void *whole, void *local)
{
    size_t size = fsdp_dtype_size(param->dtype);
    size_t offset = (size_t)(param->padded * param->group->shard_rank) * size;
    if (whole && local)
        memcpy(local, (const unsigned char *)whole + offset, (size_t)param->rows * size);
}

static void put_back(fsdp_wrap *wrap, fsdp_wrap_flat *flat)
{
    fsdp_param *param = flat->param;
    if (!flat->is_summoned)
        return;
    if (!wrap->summon.discard_changes) {
        write_back(param, flat->summoned, fsdp_root_view(wrap->root, param->shard));
        write_back(param, flat->summoned_grad, grad_of(wrap, param));
    }
    fsdp_free(flat->summoned);
    fsdp_free(flat->summoned_grad);
    flat->summoned = flat->summoned_grad = NULL;
    param->summoned = param->summoned_grad = NULL;
    flat->is_summoned = false;
}

/* An optimizer may have dropped some gradients since. */
static fsdp_status store_grads(fsdp_wrap *wrap, fsdp_error *err)
{
    fsdp_stream *compute = wrap->root->context->streams[FSDP_STREAM_COMPUTE];
    fsdp_host_view *view = &wrap->summoned_grads;
    for (size_t i = 0; i < wrap->flat_count; i++) {
        const fsdp_param *param = wrap->flats[i].param;
        if (param && fsdp_host_view_find(view, param->shard_grad))
            compute->device->ops->kernels->copy(compute, param->shard_grad, grad_of(wrap, param),
                                                (size_t)param->rows *
                                                    fsdp_dtype_size(param->dtype));
    }
    fsdp_status status =
        view->count > 0 ? compute->device->ops->sync(fsdp_stream_now(compute), err) : FSDP_OK;
    fsdp_host_view_release(view);
    return status;
}

static fsdp_status put_all_back(fsdp_wrap *wrap, fsdp_error *err)
{
    for (size_t i = 0; i < wrap->flat_count; i++)
        put_back(wrap, &wrap->flats[i]);
    wrap->root->is_summoned = false;
    fsdp_root_refresh_masters(wrap->root, NULL);
    FSDP_TRY(store_grads(wrap, err));
    return fsdp_root_store_view(wrap->root, err);
}

/* --- the calls -------------------------------------------------------------------------------- */

static fsdp_status take_all_out(fsdp_wrap *wrap, const fsdp_wrap_flat *outer, fsdp_error *err)
{
    if (wrap->summon.with_grads)
        FSDP_TRY(view_grads(wrap, err));
    for (size_t i = 0; i < wrap->flat_count; i++) {
        fsdp_wrap_flat *flat = &wrap->flats[i];
        if (flat->param && is_asked_for(flat, outer, !wrap->summon.only_unit))
            FSDP_TRY(take_out(wrap, flat, err));
    }
    return FSDP_OK;
}

fsdp_status fsdp_wrap_summon_full_params(fsdp_wrap *wrap, fsdp_unit *unit,
                                         const fsdp_wrap_summon_opts *opts, fsdp_error *err)
{
    FSDP_NEED(err, wrap);
    static const fsdp_wrap_summon_opts none = {0};
    const fsdp_wrap_flat *outer = find_unit(wrap, unit ? unit : fsdp_root_unit(wrap->root));
    FSDP_TRY(fsdp_wrap_check_idle(wrap, "fsdp_wrap_summon_full_params", err));
    FSDP_TRY(fsdp_state_settle(wrap->root, false, err));
    if (!outer)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot summon unit '%s': it belongs to another model",
                         fsdp_unit_name(unit));
    FSDP_TRY(check_opts(wrap, outer, opts ? opts : &none, err));
    wrap->summon = opts ? *opts : none;
    wrap->root->is_summoned = true;
    fsdp_status status = take_all_out(wrap, outer, err);
    if (status != FSDP_OK) {
        wrap->summon.discard_changes = true;
        (void)!put_all_back(wrap, NULL);
    }
    return fsdp_root_done(wrap->root, "fsdp_wrap_summon_full_params", status, err);
}

fsdp_status fsdp_wrap_summon_end(fsdp_wrap *wrap, fsdp_error *err)
{
    FSDP_NEED(err, wrap);
    FSDP_TRY(fsdp_root_ready(wrap->root, err));
    if (!wrap->root->is_summoned)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot end the summoning: no full parameters are summoned");
    return put_all_back(wrap, err);
}
