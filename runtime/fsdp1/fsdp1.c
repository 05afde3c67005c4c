/* The FSDP1 face: a model is wrapped. See fsdp1.h, and fsdp1_internal.h for the other files. */
#include "runtime/fsdp1/fsdp1_internal.h"

#include <string.h>

#include "base/core/mem.h"

fsdp_v1_opts fsdp_v1_opts_default(void)
{
    return (fsdp_v1_opts){.unit = {.strategy = FSDP_V1_FULL_SHARD}};
}

/* --- strategies ------------------------------------------------------------------------------- */

bool fsdp_v1_is_hybrid(fsdp_v1_strategy strategy)
{
    return strategy == FSDP_V1_HYBRID_SHARD || strategy == FSDP_V1_HYBRID_SHARD_ZERO2;
}

static bool reshards_after_forward(fsdp_v1_strategy strategy)
{
    return strategy == FSDP_V1_FULL_SHARD || strategy == FSDP_V1_HYBRID_SHARD;
}

static fsdp_status check_strategy(const fsdp_v1 *v1, const fsdp_v1_flat *flat, fsdp_error *err)
{
    const char *name = fsdp_v1_flat_name(flat);
    int ndim = fsdp_mesh_ndim(v1->mesh);
    if (flat->opts.strategy < FSDP_V1_FULL_SHARD ||
        flat->opts.strategy > FSDP_V1_HYBRID_SHARD_ZERO2)
        return fsdp_fail(err, FSDP_ERR_USAGE, "unit %s: there is no strategy %d", name,
                         (int)flat->opts.strategy);
    if (ndim > 2)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "the mesh has %d dims: FSDP1 takes one, or replicas and shards; units "
                         "(unit.h) take more",
                         ndim);
    if (ndim == 1 && fsdp_v1_is_hybrid(flat->opts.strategy))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "unit %s: a hybrid strategy needs a mesh of two dims, replicas and shards",
                         name);
    return FSDP_OK;
}

static fsdp_status check_unit(const fsdp_v1 *v1, const fsdp_v1_flat *flat, fsdp_error *err)
{
    const fsdp_v1_unit_opts *opts = &flat->opts;
    const char *name = fsdp_v1_flat_name(flat);
    if (opts->backward_prefetch < FSDP_V1_BACKWARD_PRE ||
        opts->backward_prefetch > FSDP_V1_BACKWARD_NONE)
        return fsdp_fail(err, FSDP_ERR_USAGE, "unit %s: there is no backward_prefetch %d", name,
                         (int)opts->backward_prefetch);
    FSDP_TRY(fsdp_option_check_float("param_dtype", opts->param_dtype, err));
    FSDP_TRY(fsdp_option_check_float("reduce_dtype", opts->reduce_dtype, err));
    return check_strategy(v1, flat, err);
}

/* The ranks that a unit's parameters are cut for. */
static int64_t shard_ranks(const fsdp_v1 *v1, const fsdp_v1_flat *flat)
{
    bool is_hybrid = fsdp_v1_is_hybrid(flat->opts.strategy);
    return is_hybrid ? fsdp_mesh_dim_size(v1->mesh, 1) : fsdp_mesh_size(v1->mesh);
}

static fsdp_status join_dims(const fsdp_v1 *v1, fsdp_text *dims, fsdp_error *err)
{
    for (int i = 0; i < fsdp_mesh_ndim(v1->mesh); i++)
        fsdp_text_addf(dims, "%s%s", i > 0 ? "," : "", fsdp_mesh_dim_name(v1->mesh, i));
    return dims->failed ? fsdp_fail_memory(err, "a unit") : FSDP_OK;
}

static fsdp_unit_opts opts_of(const fsdp_v1 *v1, const fsdp_v1_flat *flat, const char *all_dims)
{
    fsdp_unit_opts opts = fsdp_unit_opts_default(v1->mesh);
    fsdp_v1_strategy strategy = flat->opts.strategy;
    bool replicates = strategy == FSDP_V1_NO_SHARD;
    if (!fsdp_v1_is_hybrid(strategy)) {
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

static void set_prefetch(fsdp_unit *unit, const fsdp_v1_unit_opts *opts)
{
    static const fsdp_prefetch_time times[] = {
        [FSDP_V1_BACKWARD_PRE] = FSDP_PREFETCH_BEFORE,
        [FSDP_V1_BACKWARD_POST] = FSDP_PREFETCH_AFTER,
        [FSDP_V1_BACKWARD_NONE] = FSDP_PREFETCH_NEVER,
    };
    unit->backward_prefetch_time = times[opts->backward_prefetch];
    unit->prefetches_next = opts->forward_prefetch;
}

static fsdp_status make_unit(fsdp_v1 *v1, fsdp_v1_flat *flat, const bool *ignored, fsdp_error *err)
{
    fsdp_text dims = {0};
    FSDP_TRY(check_unit(v1, flat, err));
    FSDP_TRY(fsdp_v1_flat_declare(v1, flat, ignored, shard_ranks(v1, flat), err));
    fsdp_status status = join_dims(v1, &dims, err);
    const fsdp_unit_opts opts = opts_of(v1, flat, dims.data);
    if (status == FSDP_OK)
        status = fsdp_unit_create(v1->inner, flat->module, &opts, &flat->unit, err);
    fsdp_text_release(&dims);
    if (status == FSDP_OK)
        set_prefetch(flat->unit, &flat->opts);
    return status;
}

static fsdp_status add_flat(fsdp_v1 *v1, const char *module, const fsdp_v1_unit_opts *opts,
                            fsdp_error *err)
{
    fsdp_v1_flat *flat = &v1->flats[v1->flat_count];
    flat->opts = *opts;
    flat->module = fsdp_strndup(module, strlen(module));
    if (!flat->module)
        return fsdp_fail_memory(err, "the units of a model");
    v1->flat_count++;
    return FSDP_OK;
}

/* Buffers, and what is ignored: the same in the inner model, whole on every rank. */
static fsdp_status add_whole(fsdp_v1 *v1, fsdp_param *param, fsdp_error *err)
{
    fsdp_dtype dtype = param->dtype;
    fsdp_param *inner;
    if (!param->is_buffer) {
        FSDP_TRY(fsdp_model_add_param(v1->inner, param->name, dtype, param->ndim, param->shape,
                                      &inner, err));
        inner->is_ignored = true;
    } else {
        bool is_cast = v1->buffer_dtype != FSDP_DTYPE_NONE && fsdp_dtype_describe(dtype)->is_float;
        FSDP_TRY(fsdp_model_add_buffer(v1->inner, param->name, is_cast ? v1->buffer_dtype : dtype,
                                       param->ndim, param->shape, param->is_persistent, &inner,
                                       err));
    }
    inner->requires_grad = false;
    param->flat = inner;
    return FSDP_OK;
}

static fsdp_status add_wholes(fsdp_v1 *v1, const bool *ignored, fsdp_error *err)
{
    for (size_t i = 0; i < v1->model->count; i++) {
        fsdp_param *param = v1->model->params[i];
        if (param->is_buffer || ignored[i])
            FSDP_TRY(add_whole(v1, param, err));
    }
    return FSDP_OK;
}

static fsdp_status plan_units(fsdp_v1 *v1, const fsdp_v1_opts *opts, const bool *ignored,
                              fsdp_error *err)
{
    fsdp_v1_wishes wishes = {0};
    fsdp_status status = fsdp_v1_choose(v1->model, opts, ignored, &wishes, err);
    if (status == FSDP_OK) {
        v1->flats = fsdp_alloc(wishes.count + 1, sizeof *v1->flats);
        status = v1->flats ? FSDP_OK : fsdp_fail_memory(err, "the units of a model");
    }
    for (size_t i = 0; i < wishes.count && status == FSDP_OK; i++)
        status = add_flat(v1, wishes.items[i].module, &wishes.items[i].opts, err);
    if (status == FSDP_OK)
        status = add_flat(v1, "", &opts->unit, err);
    fsdp_v1_wishes_release(&wishes);
    return status;
}

static fsdp_status make_units(fsdp_v1 *v1, const fsdp_v1_opts *opts, bool *ignored, fsdp_error *err)
{
    FSDP_TRY(fsdp_v1_list_ignored(v1->model, opts, ignored, err));
    FSDP_TRY(plan_units(v1, opts, ignored, err));
    FSDP_TRY(fsdp_model_create(v1->model->world, &v1->inner, err));
    FSDP_TRY(add_wholes(v1, ignored, err));
    for (size_t i = 0; i + 1 < v1->flat_count; i++)
        FSDP_TRY(make_unit(v1, &v1->flats[i], ignored, err));
    fsdp_v1_flat *root = &v1->flats[v1->flat_count - 1];
    FSDP_TRY(check_unit(v1, root, err));
    return fsdp_v1_flat_declare(v1, root, ignored, shard_ranks(v1, root), err);
}

/* --- wrapping --------------------------------------------------------------------------------- */

/* Every rank looks at its own host. */
static fsdp_status check_hosts(const fsdp_world *world, fsdp_error *err)
{
    if (fsdp_world_size(world) % fsdp_world_local_size(world) == 0)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "hosts have different numbers of ranks: give a mesh of replicas and shards");
}

/* All ranks; for hybrid strategies, hosts x the ranks of a host. */
static fsdp_status make_mesh(fsdp_v1 *v1, const fsdp_v1_opts *opts, fsdp_error *err)
{
    fsdp_world *world = v1->model->world;
    int64_t size = fsdp_world_size(world), local = fsdp_world_local_size(world);
    bool is_hybrid = fsdp_v1_is_hybrid(opts->unit.strategy);
    v1->mesh = opts->mesh;
    if (opts->mesh)
        return FSDP_OK;
    if (is_hybrid)
        FSDP_TRY(fsdp_ctl_agree(fsdp_world_ctl(world), check_hosts(world, err), err));
    const char *const two[] = {"replicate", "shard"}, *const one[] = {"dp"};
    FSDP_TRY(fsdp_world_mesh(world, is_hybrid ? 2 : 1,
                             is_hybrid ? (int64_t[]){size / local, local} : &size,
                             is_hybrid ? two : one, &v1->own_mesh, err));
    v1->mesh = v1->own_mesh;
    return FSDP_OK;
}

static fsdp_status check_model(const fsdp_model *model, const fsdp_v1_opts *opts, fsdp_error *err)
{
    if (model->root || model->unit_count > 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "the model has units already: fsdp_v1_create makes them itself");
    return fsdp_option_check_float("buffer_dtype", opts->buffer_dtype, err);
}

/* What can fail on one rank alone. */
static fsdp_status plan(fsdp_v1 *v1, const fsdp_v1_opts *opts, fsdp_error *err)
{
    bool *ignored = fsdp_alloc(v1->model->count, sizeof *ignored);
    if (!ignored)
        return fsdp_fail_memory(err, "the units of a model");
    fsdp_status status = make_units(v1, opts, ignored, err);
    fsdp_free(ignored);
    return status;
}

/* The caller's parameters show what they lie in. */
static void point_views(fsdp_v1 *v1)
{
    for (size_t i = 0; i < v1->model->count; i++) {
        fsdp_param *param = v1->model->params[i];
        param->data_dtype = param->flat->data_dtype;
        param->grad_dtype = param->flat->grad_dtype;
        param->shard = param->flat->group ? NULL : param->flat->shard;
    }
    v1->model->root = v1->root;
}

static fsdp_status create_root(fsdp_v1 *v1, fsdp_error *err)
{
    fsdp_v1_flat *flat = &v1->flats[v1->flat_count - 1];
    fsdp_text dims = {0};
    fsdp_status status =
        fsdp_ctl_agree(fsdp_world_ctl(v1->model->world), join_dims(v1, &dims, err), err);
    const fsdp_unit_opts opts = opts_of(v1, flat, dims.data);
    if (status == FSDP_OK)
        status = fsdp_root_create(v1->inner, &opts, &v1->root, err);
    if (v1->root)
        v1->root->is_flat = true;
    fsdp_text_release(&dims);
    if (status != FSDP_OK)
        return status;
    flat->unit = fsdp_root_unit(v1->root);
    set_prefetch(flat->unit, &flat->opts);
    return FSDP_OK;
}

static fsdp_status build(fsdp_v1 *v1, const fsdp_v1_opts *opts, fsdp_error *err)
{
    fsdp_ctl *ctl = fsdp_world_ctl(v1->model->world);
    FSDP_TRY(fsdp_ctl_agree(ctl, check_model(v1->model, opts, err), err));
    FSDP_TRY(make_mesh(v1, opts, err));
    FSDP_TRY(fsdp_ctl_agree(ctl, plan(v1, opts, err), err));
    FSDP_TRY(create_root(v1, err));
    v1->root->context->limits_gathers = !opts->no_limit_all_gathers;
    point_views(v1);
    return FSDP_OK;
}

fsdp_status fsdp_v1_create(fsdp_model *model, const fsdp_v1_opts *opts, fsdp_v1 **v1_out,
                           fsdp_error *err)
{
    fsdp_v1 *v1 = fsdp_alloc(1, sizeof *v1);
    if (!v1) /* the others wait to hear whether all can */
        return fsdp_ctl_agree(fsdp_world_ctl(model->world),
                              fsdp_fail_memory(err, "a wrapped model"), err);
    v1->model = model;
    v1->use_orig_params = opts->use_orig_params;
    v1->buffer_dtype = opts->buffer_dtype;
    fsdp_status status = build(v1, opts, err);
    if (status == FSDP_OK)
        *v1_out = v1;
    else
        fsdp_v1_free(v1);
    return status;
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

void fsdp_v1_free(fsdp_v1 *v1)
{
    if (!v1)
        return;
    if (v1->inner)
        unpoint_views(v1->model);
    if (v1->root) {
        v1->model->root = NULL;
        fsdp_root_free(v1->root);
    }
    fsdp_model_free(v1->inner);
    for (size_t i = 0; i < v1->flat_count; i++)
        fsdp_v1_flat_release(&v1->flats[i]);
    fsdp_free(v1->flats);
    fsdp_mesh_free(v1->own_mesh);
    fsdp_free(v1);
}

/* --- what is in it ---------------------------------------------------------------------------- */

fsdp_root *fsdp_v1_root(fsdp_v1 *v1)
{
    return v1->root;
}

fsdp_unit *fsdp_v1_unit(fsdp_v1 *v1, const char *module)
{
    for (size_t i = 0; i < v1->flat_count; i++)
        if (strcmp(v1->flats[i].module, module) == 0)
            return v1->flats[i].unit;
    return NULL;
}

fsdp_param *fsdp_v1_flat_param(fsdp_v1 *v1, const fsdp_unit *unit)
{
    for (size_t i = 0; i < v1->flat_count; i++)
        if (v1->flats[i].unit == unit)
            return v1->flats[i].param;
    return NULL;
}

fsdp_v1_training fsdp_v1_training_state(const fsdp_v1 *v1)
{
    if (v1->root->is_summoned)
        return FSDP_V1_SUMMON_FULL_PARAMS;
    return v1->root->is_in_forward || v1->root->is_in_backward ? FSDP_V1_FORWARD_BACKWARD
                                                               : FSDP_V1_IDLE;
}

fsdp_status fsdp_v1_check_idle(fsdp_v1 *v1, const char *what, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_ready(v1->root, err));
    if (fsdp_v1_training_state(v1) == FSDP_V1_FORWARD_BACKWARD)
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s is for between steps", what);
    if (fsdp_v1_training_state(v1) == FSDP_V1_SUMMON_FULL_PARAMS)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "%s came while full parameters are summoned: fsdp_v1_summon_end comes "
                         "before it",
                         what);
    return fsdp_context_sync(v1->root->context, err);
}

fsdp_status fsdp_v1_settle(fsdp_v1 *v1, const char *what, fsdp_error *err)
{
    FSDP_TRY(fsdp_v1_check_idle(v1, what, err));
    return fsdp_state_settle(v1->root, err);
}

/* --- settings --------------------------------------------------------------------------------- */

/* Strategies that keep parameters from forward to backward keep them behind it, too. */
fsdp_status fsdp_v1_set_no_sync(fsdp_v1 *v1, bool no_sync, fsdp_error *err)
{
    FSDP_TRY(fsdp_v1_check_idle(v1, "fsdp_v1_set_no_sync", err));
    for (size_t i = 0; i < v1->flat_count; i++) {
        const fsdp_v1_flat *flat = &v1->flats[i];
        bool keeps = no_sync && !reshards_after_forward(flat->opts.strategy);
        fsdp_unit_set_requires_gradient_sync(flat->unit, !no_sync, false);
        fsdp_unit_set_reshard_after_backward(flat->unit, !keeps, false);
    }
    return FSDP_OK;
}
