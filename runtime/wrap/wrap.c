/* The FSDP1 face: wraps a model. See wrap.h, and wrap_internal.h for the other files. */
#include "runtime/wrap/wrap_internal.h"

#include <string.h>

#include "base/core/given.h"
#include "base/core/mem.h"
#include "statedict/ctl/ctl_backend.h"

/* --- strategies ------------------------------------------------------------------------------- */

bool fsdp_wrap_is_hybrid(fsdp_wrap_strategy strategy)
{
    return strategy == FSDP_WRAP_HYBRID_SHARD || strategy == FSDP_WRAP_HYBRID_SHARD_ZERO2;
}

static bool reshards_after_forward(fsdp_wrap_strategy strategy)
{
    return strategy == FSDP_WRAP_FULL_SHARD || strategy == FSDP_WRAP_HYBRID_SHARD;
}

static fsdp_status check_strategy(const fsdp_wrap *wrap, const fsdp_wrap_flat *flat,
                                  fsdp_error *err)
{
    const char *name = fsdp_wrap_flat_name(flat);
    int ndim = fsdp_mesh_ndim(wrap->mesh);
    if (flat->opts.strategy < FSDP_WRAP_FULL_SHARD ||
        flat->opts.strategy > FSDP_WRAP_HYBRID_SHARD_ZERO2)
        return fsdp_fail(err, FSDP_ERR_USAGE, "cannot wrap unit '%s': %d is not a strategy", name,
                         (int)flat->opts.strategy);
    if (ndim > 2)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot wrap the model: the mesh has %d dims; give one of one dim, or of "
                         "replicas and shards, or make units (unit.h)",
                         ndim);
    if (ndim == 1 && fsdp_wrap_is_hybrid(flat->opts.strategy))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot wrap unit '%s': its strategy is hybrid and the mesh has one dim; "
                         "give a mesh of replicas and shards",
                         name);
    return FSDP_OK;
}

static fsdp_status check_unit(const fsdp_wrap *wrap, const fsdp_wrap_flat *flat, fsdp_error *err)
{
    const fsdp_wrap_unit_opts *opts = &flat->opts;
    const char *name = fsdp_wrap_flat_name(flat);
    if (opts->backward_prefetch < FSDP_WRAP_BACKWARD_PRE ||
        opts->backward_prefetch > FSDP_WRAP_BACKWARD_NONE)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot wrap unit '%s': %d is not a backward_prefetch", name,
                         (int)opts->backward_prefetch);
    FSDP_TRY(fsdp_option_check_float("param_dtype", opts->param_dtype, err));
    FSDP_TRY(fsdp_option_check_float("reduce_dtype", opts->reduce_dtype, err));
    return check_strategy(wrap, flat, err);
}

/* The number of ranks that a unit's parameters are cut for. */
static int64_t shard_ranks(const fsdp_wrap *wrap, const fsdp_wrap_flat *flat)
{
    bool is_hybrid = fsdp_wrap_is_hybrid(flat->opts.strategy);
    return is_hybrid ? fsdp_mesh_dim_size(wrap->mesh, 1) : fsdp_mesh_size(wrap->mesh);
}

static fsdp_status join_dims(const fsdp_wrap *wrap, fsdp_text *dims, fsdp_error *err)
{
    for (int i = 0; i < fsdp_mesh_ndim(wrap->mesh); i++)
        fsdp_text_addf(dims, "%s%s", i > 0 ? "," : "", fsdp_mesh_dim_name(wrap->mesh, i));
    return dims->failed ? fsdp_fail_memory(err, "a unit") : FSDP_OK;
}

static fsdp_unit_opts opts_of(const fsdp_wrap *wrap, const fsdp_wrap_flat *flat,
                              const char *all_dims)
{
    fsdp_unit_opts opts = {.mesh = wrap->mesh};
    fsdp_wrap_strategy strategy = flat->opts.strategy;
    bool replicates = strategy == FSDP_WRAP_NO_SHARD;
    if (!fsdp_wrap_is_hybrid(strategy)) {
        opts.shard_dims = replicates ? "" : all_dims;
        opts.replicate_dims = replicates ? all_dims : "";
    }
    opts.reshard_after_forward =
        reshards_after_forward(strategy) ? FSDP_RESHARD_AUTO : FSDP_RESHARD_NEVER;
    opts.param_dtype = flat->opts.param_dtype;
    opts.reduce_dtype = flat->opts.reduce_dtype != FSDP_DTYPE_NONE ? flat->opts.reduce_dtype
                                                                   : flat->opts.param_dtype;
    opts.offload = flat->opts.offload_params;
    return opts;
}

/* --- units ------------------------------------------------------------------------------------ */

static void set_prefetch(fsdp_unit *unit, const fsdp_wrap_unit_opts *opts)
{
    static const fsdp_prefetch_time times[] = {
        [FSDP_WRAP_BACKWARD_PRE] = FSDP_PREFETCH_BEFORE,
        [FSDP_WRAP_BACKWARD_POST] = FSDP_PREFETCH_AFTER,
        [FSDP_WRAP_BACKWARD_NONE] = FSDP_PREFETCH_NEVER,
    };
    unit->backward_prefetch_time = times[opts->backward_prefetch];
    unit->prefetches_next = opts->forward_prefetch;
}

static fsdp_status make_unit(fsdp_wrap *wrap, fsdp_wrap_flat *flat, const bool *ignored,
                             fsdp_error *err)
{
    fsdp_text dims = {0};
    FSDP_TRY(check_unit(wrap, flat, err));
    FSDP_TRY(fsdp_wrap_flat_declare(wrap, flat, ignored, shard_ranks(wrap, flat), err));
    fsdp_status status = join_dims(wrap, &dims, err);
    const fsdp_unit_opts opts = opts_of(wrap, flat, dims.data);
    if (status == FSDP_OK)
        status = fsdp_unit_create(wrap->inner, flat->module, &opts, &flat->unit, err);
    fsdp_text_release(&dims);
    if (status == FSDP_OK)
        set_prefetch(flat->unit, &flat->opts);
    return status;
}

static fsdp_status add_flat(fsdp_wrap *wrap, const char *module, const fsdp_wrap_unit_opts *opts,
                            fsdp_error *err)
{
    fsdp_wrap_flat *flat = &wrap->flats[wrap->flat_count];
    flat->opts = *opts;
    flat->module = fsdp_strndup(module, strlen(module));
    if (!flat->module)
        return fsdp_fail_memory(err, "the units of a model");
    wrap->flat_count++;
    return FSDP_OK;
}

/* Adds buffers and ignored parameters to the inner model, whole on every rank. */
static fsdp_status add_whole(fsdp_wrap *wrap, fsdp_param *param, fsdp_error *err)
{
    fsdp_dtype dtype = param->dtype;
    fsdp_param *inner;
    if (!param->is_buffer) {
        FSDP_TRY(fsdp_model_add(
            wrap->inner,
            &(fsdp_param_spec){
                .name = param->name, .dtype = dtype, .ndim = param->ndim, .shape = param->shape},
            &inner, err));
        inner->is_ignored = true;
    } else {
        bool is_cast =
            wrap->buffer_dtype != FSDP_DTYPE_NONE && fsdp_dtype_describe(dtype)->is_float;
        FSDP_TRY(fsdp_model_add(wrap->inner,
                                &(fsdp_param_spec){.name = param->name,
                                                   .dtype = is_cast ? wrap->buffer_dtype : dtype,
                                                   .ndim = param->ndim,
                                                   .shape = param->shape,
                                                   .is_buffer = true,
                                                   .is_transient = !param->is_persistent},
                                &inner, err));
    }
    inner->requires_grad = false;
    param->flat = inner;
    return FSDP_OK;
}

static fsdp_status add_wholes(fsdp_wrap *wrap, const bool *ignored, fsdp_error *err)
{
    for (size_t i = 0; i < wrap->model->count; i++) {
        fsdp_param *param = wrap->model->params[i];
        if (param->is_buffer || ignored[i])
            FSDP_TRY(add_whole(wrap, param, err));
    }
    return FSDP_OK;
}

static fsdp_status plan_units(fsdp_wrap *wrap, const fsdp_wrap_opts *opts, const bool *ignored,
                              fsdp_error *err)
{
    fsdp_wrap_wishes wishes = {0};
    fsdp_status status = fsdp_wrap_choose(wrap->model, opts, ignored, &wishes, err);
    if (status == FSDP_OK) {
        wrap->flats = fsdp_alloc(wishes.count + 1, sizeof *wrap->flats);
        status = wrap->flats ? FSDP_OK : fsdp_fail_memory(err, "the units of a model");
    }
    for (size_t i = 0; i < wishes.count && status == FSDP_OK; i++)
        status = add_flat(wrap, wishes.items[i].module, &wishes.items[i].opts, err);
    if (status == FSDP_OK)
        status = add_flat(wrap, "", &opts->unit, err);
    fsdp_wrap_wishes_release(&wishes);
    return status;
}

static fsdp_status make_units(fsdp_wrap *wrap, const fsdp_wrap_opts *opts, bool *ignored,
                              fsdp_error *err)
{
    FSDP_TRY(fsdp_wrap_list_ignored(wrap->model, opts, ignored, err));
    FSDP_TRY(plan_units(wrap, opts, ignored, err));
    FSDP_TRY(fsdp_model_create(wrap->model->world, &wrap->inner, err));
    FSDP_TRY(add_wholes(wrap, ignored, err));
    for (size_t i = 0; i + 1 < wrap->flat_count; i++)
        FSDP_TRY(make_unit(wrap, &wrap->flats[i], ignored, err));
    fsdp_wrap_flat *root = &wrap->flats[wrap->flat_count - 1];
    FSDP_TRY(check_unit(wrap, root, err));
    return fsdp_wrap_flat_declare(wrap, root, ignored, shard_ranks(wrap, root), err);
}

/* --- wrapping --------------------------------------------------------------------------------- */

/* Every rank checks its own host. */
static fsdp_status check_hosts(const fsdp_world *world, fsdp_error *err)
{
    if (fsdp_world_size(world) % fsdp_world_local_size(world) == 0)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "hosts have different numbers of ranks: give a mesh of replicas and shards");
}

/* Makes a mesh of all ranks; for hybrid strategies, of hosts x the ranks of a host. */
static fsdp_status make_mesh(fsdp_wrap *wrap, const fsdp_wrap_opts *opts, fsdp_error *err)
{
    fsdp_world *world = wrap->model->world;
    int64_t size = fsdp_world_size(world), local = fsdp_world_local_size(world);
    bool is_hybrid = fsdp_wrap_is_hybrid(opts->unit.strategy);
    wrap->mesh = opts->mesh;
    if (opts->mesh)
        return FSDP_OK;
    if (is_hybrid)
        FSDP_TRY(fsdp_ctl_agree(fsdp_world_ctl(world), check_hosts(world, err), err));
    const char *const two[] = {"replicate", "shard"}, *const one[] = {"dp"};
    FSDP_TRY(fsdp_world_mesh(world, is_hybrid ? 2 : 1,
                             is_hybrid ? (int64_t[]){size / local, local} : &size,
                             is_hybrid ? two : one, &wrap->made_mesh, err));
    wrap->mesh = wrap->made_mesh;
    return FSDP_OK;
}

static fsdp_status check_model(const fsdp_model *model, const fsdp_wrap_opts *opts, fsdp_error *err)
{
    if (model->root || model->unit_count > 0)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "cannot wrap the model: it has units already; leave them to fsdp_wrap_create");
    return fsdp_option_check_float("buffer_dtype", opts->buffer_dtype, err);
}

/* The part of wrapping that can fail on one rank alone. */
static fsdp_status plan(fsdp_wrap *wrap, const fsdp_wrap_opts *opts, fsdp_error *err)
{
    bool *ignored = fsdp_alloc(wrap->model->count, sizeof *ignored);
    if (!ignored)
        return fsdp_fail_memory(err, "the units of a model");
    fsdp_status status = make_units(wrap, opts, ignored, err);
    fsdp_free(ignored);
    return status;
}

/* Copies dtypes and shards of the flat parameters to the caller's parameters. */
static void point_views(fsdp_wrap *wrap)
{
    for (size_t i = 0; i < wrap->model->count; i++) {
        fsdp_param *param = wrap->model->params[i];
        param->data_dtype = param->flat->data_dtype;
        param->grad_dtype = param->flat->grad_dtype;
        param->shard = param->flat->group ? NULL : param->flat->shard;
    }
    wrap->model->root = wrap->root;
}

static void unpoint_views(fsdp_model *model)
{
    for (size_t i = 0; i < model->count; i++) {
        fsdp_param *param = model->params[i];
        param->flat = NULL;
        param->flat_at = 0;
        param->shard = NULL;
        param->data_dtype = param->dtype;
        param->grad_dtype = FSDP_DTYPE_NONE;
    }
}

/* After its root, whose optimizers may be freed later than the wrap. */
static void end_wrap(void *owner)
{
    fsdp_wrap *wrap = owner;
    if (wrap->inner)
        unpoint_views(wrap->model);
    if (wrap->root)
        wrap->model->root = NULL;
    fsdp_model_free(wrap->model);
    fsdp_model_free(wrap->inner);
    for (size_t i = 0; i < wrap->flat_count; i++)
        fsdp_wrap_flat_release(&wrap->flats[i]);
    fsdp_free(wrap->flats);
    fsdp_host_view_release(&wrap->summoned_grads);
    fsdp_mesh_free(wrap->made_mesh);
    fsdp_free(wrap);
}

static fsdp_status create_root(fsdp_wrap *wrap, fsdp_error *err)
{
    fsdp_wrap_flat *flat = &wrap->flats[wrap->flat_count - 1];
    fsdp_text dims = {0};
    fsdp_status status =
        fsdp_ctl_agree(fsdp_world_ctl(wrap->model->world), join_dims(wrap, &dims, err), err);
    const fsdp_unit_opts opts = opts_of(wrap, flat, dims.data);
    if (status == FSDP_OK)
        status = fsdp_root_create(wrap->inner, &opts, &wrap->root, err);
    if (wrap->root) {
        wrap->root->owner = wrap;
        wrap->root->end_owner = end_wrap;
        wrap->root->declared = wrap->model;
        wrap->root->steps_runs = wrap->use_orig_params;
    }
    fsdp_text_release(&dims);
    if (status != FSDP_OK)
        return status;
    flat->unit = fsdp_root_unit(wrap->root);
    set_prefetch(flat->unit, &flat->opts);
    return FSDP_OK;
}

static fsdp_status build(fsdp_wrap *wrap, const fsdp_wrap_opts *opts, fsdp_error *err)
{
    fsdp_ctl *ctl = fsdp_world_ctl(wrap->model->world);
    FSDP_TRY(fsdp_ctl_agree(ctl, check_model(wrap->model, opts, err), err));
    FSDP_TRY(make_mesh(wrap, opts, err));
    FSDP_TRY(fsdp_ctl_agree(ctl, plan(wrap, opts, err), err));
    FSDP_TRY(create_root(wrap, err));
    wrap->root->context->limits_gathers = !opts->unlimited_gathers;
    point_views(wrap);
    return FSDP_OK;
}

static fsdp_status create(fsdp_model *model, const fsdp_wrap_opts *opts, fsdp_wrap **wrap_out,
                          fsdp_error *err)
{
    fsdp_wrap *wrap = fsdp_alloc(1, sizeof *wrap);
    if (!wrap) /* the other ranks wait for this rank's status */
        return fsdp_ctl_agree(fsdp_world_ctl(model->world),
                              fsdp_fail_memory(err, "a wrapped model"), err);
    wrap->model = fsdp_model_hold(model);
    wrap->use_orig_params = opts->use_orig_params;
    wrap->buffer_dtype = opts->buffer_dtype;
    fsdp_status status = build(wrap, opts, err);
    if (status == FSDP_OK)
        *wrap_out = wrap;
    else
        fsdp_wrap_free(wrap);
    return status;
}

fsdp_status fsdp_wrap_create(fsdp_model *model, const fsdp_wrap_opts *given, fsdp_wrap **wrap_out,
                             fsdp_error *err)
{
    FSDP_NEED(err, model, wrap_out);
    const fsdp_wrap_opts opts = given ? *given : (fsdp_wrap_opts){0};
    fsdp_ctl *ctl = fsdp_world_ctl(model->world);
    const char *outer = fsdp_ctl_begin_public(ctl, "fsdp_wrap_create");
    fsdp_status status = create(model, &opts, wrap_out, err);
    fsdp_ctl_end_public(ctl, outer);
    return status;
}

void fsdp_wrap_free(fsdp_wrap *wrap)
{
    if (wrap && wrap->root)
        fsdp_root_free(wrap->root);
    else if (wrap)
        end_wrap(wrap);
}

/* --- contents --------------------------------------------------------------------------------- */

fsdp_root *fsdp_wrap_root(fsdp_wrap *wrap)
{
    if (!wrap)
        return NULL;
    return wrap->root;
}

fsdp_unit *fsdp_wrap_unit(fsdp_wrap *wrap, const char *module)
{
    if (!wrap || !module)
        return NULL;
    for (size_t i = 0; i < wrap->flat_count; i++)
        if (strcmp(wrap->flats[i].module, module) == 0)
            return wrap->flats[i].unit;
    return NULL;
}

fsdp_param *fsdp_wrap_flat_param(fsdp_wrap *wrap, const fsdp_unit *unit)
{
    if (!wrap || !unit)
        return NULL;
    for (size_t i = 0; i < wrap->flat_count; i++)
        if (wrap->flats[i].unit == unit)
            return wrap->flats[i].param;
    return NULL;
}

fsdp_wrap_training fsdp_wrap_training_state(const fsdp_wrap *wrap)
{
    if (!wrap)
        return FSDP_WRAP_IDLE;
    if (wrap->root->is_summoned)
        return FSDP_WRAP_SUMMON_FULL_PARAMS;
    return wrap->root->is_in_forward || wrap->root->is_in_backward ? FSDP_WRAP_FORWARD_BACKWARD
                                                                   : FSDP_WRAP_IDLE;
}

fsdp_status fsdp_wrap_check_idle(fsdp_wrap *wrap, const char *what, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_ready(wrap->root, err));
    if (fsdp_wrap_training_state(wrap) == FSDP_WRAP_FORWARD_BACKWARD)
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s is for between steps", what);
    if (fsdp_wrap_training_state(wrap) == FSDP_WRAP_SUMMON_FULL_PARAMS)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "cannot run %s: full parameters are summoned; call fsdp_wrap_summon_end first", what);
    return fsdp_context_sync(wrap->root->context, err);
}

/* --- settings --------------------------------------------------------------------------------- */

/* Strategies that keep parameters from forward to backward also keep them after an accumulating backward. */
fsdp_status fsdp_wrap_set_accumulating(fsdp_wrap *wrap, bool is_accumulating, fsdp_error *err)
{
    FSDP_NEED(err, wrap);
    FSDP_TRY(fsdp_wrap_check_idle(wrap, "fsdp_wrap_set_accumulating", err));
    for (size_t i = 0; i < wrap->flat_count; i++) {
        const fsdp_wrap_flat *flat = &wrap->flats[i];
        bool keeps = is_accumulating && !reshards_after_forward(flat->opts.strategy);
        FSDP_TRY(fsdp_unit_set(flat->unit, FSDP_UNIT_REQUIRES_GRADIENT_SYNC, !is_accumulating,
                               false, err));
        FSDP_TRY(fsdp_unit_set(flat->unit, FSDP_UNIT_RESHARD_AFTER_BACKWARD, !keeps, false, err));
    }
    return FSDP_OK;
}
