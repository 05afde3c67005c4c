/* Models and parameters as they are declared. See model.h. */
#include "runtime/unit/unit_internal.h"

#include <string.h>

#include "base/mem.h"
#include <fsdp/sd.h>

/* --- models ----------------------------------------------------------------------------------- */

fsdp_status fsdp_model_create(fsdp_world *world, fsdp_model **model_out, fsdp_error *err)
{
    fsdp_model *model = fsdp_alloc(1, sizeof *model);
    if (!model)
        return fsdp_fail_memory(err, "a model");
    model->world = world;
    *model_out = model;
    return FSDP_OK;
}

static void free_param(fsdp_param *param)
{
    for (size_t i = 0; i < param->alias_count; i++)
        fsdp_free(param->aliases[i]);
    fsdp_free(param->aliases);
    fsdp_free(param->extension);
    fsdp_free(param->name);
    fsdp_free(param);
}

void fsdp_model_free(fsdp_model *model)
{
    if (!model)
        return;
    for (size_t i = 0; i < model->unit_count; i++)
        fsdp_unit_free(model->units[i]);
    for (size_t i = 0; i < model->count; i++)
        free_param(model->params[i]);
    fsdp_free(model->units);
    fsdp_free(model->params);
    fsdp_free(model);
}

size_t fsdp_model_count(const fsdp_model *model)
{
    return model->count;
}

fsdp_param *fsdp_model_at(const fsdp_model *model, size_t i)
{
    return i < model->count ? model->params[i] : NULL;
}

static bool has_name(const fsdp_param *param, const char *name)
{
    if (strcmp(param->name, name) == 0)
        return true;
    for (size_t i = 0; i < param->alias_count; i++)
        if (strcmp(param->aliases[i], name) == 0)
            return true;
    return false;
}

fsdp_param *fsdp_model_find(const fsdp_model *model, const char *name)
{
    for (size_t i = 0; i < model->count; i++)
        if (has_name(model->params[i], name))
            return model->params[i];
    return NULL;
}

bool fsdp_name_is_below(const char *name, const char *prefix)
{
    size_t size = strlen(prefix);
    return size == 0 ||
           (strncmp(name, prefix, size) == 0 && (name[size] == '.' || name[size] == '\0'));
}

bool fsdp_param_is_below(const fsdp_param *param, const char *prefix)
{
    bool is_below = fsdp_name_is_below(param->name, prefix);
    for (size_t i = 0; i < param->alias_count && !is_below; i++)
        is_below = fsdp_name_is_below(param->aliases[i], prefix);
    return is_below;
}

/* --- declaring -------------------------------------------------------------------------------- */

static fsdp_status check_name(const fsdp_model *model, const char *name, fsdp_error *err)
{
    if (!name[0] || strlen(name) > FSDP_MAX_NAME)
        return fsdp_fail(err, FSDP_ERR_USAGE, "a parameter's name has 1 to %d bytes",
                         FSDP_MAX_NAME);
    if (model->root)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' comes too late: the root was made, the model is complete", name);
    if (fsdp_model_find(model, name))
        return fsdp_fail(err, FSDP_ERR_USAGE, "there are two parameters '%s'", name);
    return FSDP_OK;
}

static fsdp_status check_declaration(const fsdp_model *model, const char *name, fsdp_dtype dtype,
                                     int ndim, const int64_t *shape, fsdp_error *err)
{
    FSDP_TRY(check_name(model, name, err));
    if (fsdp_dtype_size(dtype) == 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' has no dtype that is known", name);
    if (ndim > FSDP_PARAM_DIMS)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' has %d dims, at most %d are possible", name,
                         ndim, FSDP_PARAM_DIMS);
    fsdp_status status = fsdp_shape_check(ndim, shape, fsdp_dtype_size(dtype), err);
    if (status != FSDP_OK)
        fsdp_error_prefix(err, "'%s'", name);
    return status;
}

static fsdp_status add(fsdp_model *model, const char *name, fsdp_dtype dtype, int ndim,
                       const int64_t *shape, fsdp_param **param_out, fsdp_error *err)
{
    FSDP_TRY(check_declaration(model, name, dtype, ndim, shape, err));
    if (!fsdp_grow(&model->params, &model->room, model->count + 1, sizeof(fsdp_param *)))
        return fsdp_fail_memory(err, name);
    fsdp_param *param = fsdp_alloc(1, sizeof *param);
    char *copy = param ? fsdp_strndup(name, strlen(name)) : NULL;
    if (!copy) {
        fsdp_free(param);
        return fsdp_fail_memory(err, name);
    }
    *param = (fsdp_param){.model = model,
                          .name = copy,
                          .dtype = dtype,
                          .data_dtype = dtype,
                          .ndim = ndim,
                          .requires_grad = fsdp_dtype_describe(dtype)->is_float};
    if (ndim > 0)
        memcpy(param->shape, shape, (size_t)ndim * sizeof *shape);
    model->params[model->count++] = param;
    *param_out = param;
    return FSDP_OK;
}

fsdp_status fsdp_model_add_param(fsdp_model *model, const char *name, fsdp_dtype dtype, int ndim,
                                 const int64_t *shape, fsdp_param **param_out, fsdp_error *err)
{
    fsdp_param *param;
    if (ndim < 1)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has no dims and cannot be cut: give it the shape [1], or make it a "
                         "buffer",
                         name);
    for (int i = 0; i < ndim && i < FSDP_PARAM_DIMS; i++)
        if (shape[i] < 1)
            return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' has no elements: its dim %d is %lld", name,
                             i, (long long)shape[i]);
    FSDP_TRY(add(model, name, dtype, ndim, shape, &param, err));
    if (param_out)
        *param_out = param;
    return FSDP_OK;
}

fsdp_status fsdp_model_add_buffer(fsdp_model *model, const char *name, fsdp_dtype dtype, int ndim,
                                  const int64_t *shape, bool is_persistent, fsdp_param **buffer_out,
                                  fsdp_error *err)
{
    fsdp_param *param;
    FSDP_TRY(add(model, name, dtype, ndim, shape, &param, err));
    param->is_buffer = true;
    param->is_persistent = is_persistent;
    param->requires_grad = false;
    if (buffer_out)
        *buffer_out = param;
    return FSDP_OK;
}

fsdp_status fsdp_model_add_alias(fsdp_model *model, const char *name, fsdp_param *param,
                                 fsdp_error *err)
{
    FSDP_TRY(check_name(model, name, err));
    char **aliases = fsdp_realloc(param->aliases, param->alias_count + 1, sizeof *aliases);
    if (!aliases)
        return fsdp_fail_memory(err, name);
    param->aliases = aliases;
    aliases[param->alias_count] = fsdp_strndup(name, strlen(name));
    if (!aliases[param->alias_count])
        return fsdp_fail_memory(err, name);
    param->alias_count++;
    return FSDP_OK;
}

/* --- what a parameter is ---------------------------------------------------------------------- */

const char *fsdp_param_name(const fsdp_param *param)
{
    return param->name;
}

size_t fsdp_param_alias_count(const fsdp_param *param)
{
    return param->alias_count;
}

const char *fsdp_param_alias(const fsdp_param *param, size_t i)
{
    return i < param->alias_count ? param->aliases[i] : NULL;
}

fsdp_dtype fsdp_param_dtype(const fsdp_param *param)
{
    return param->dtype;
}

fsdp_dtype fsdp_param_data_dtype(const fsdp_param *param)
{
    bool is_summoned = param->flat && param->flat->summoned;
    return is_summoned ? param->dtype : param->data_dtype;
}

int fsdp_param_ndim(const fsdp_param *param)
{
    return param->ndim;
}

const int64_t *fsdp_param_shape(const fsdp_param *param)
{
    return param->shape;
}

bool fsdp_param_is_buffer(const fsdp_param *param)
{
    return param->is_buffer;
}

bool fsdp_param_requires_grad(const fsdp_param *param)
{
    return param->requires_grad;
}

const fsdp_layout *fsdp_param_layout(const fsdp_param *param)
{
    return param->mesh ? &param->layout : NULL;
}

/* --- settings --------------------------------------------------------------------------------- */

fsdp_status fsdp_param_set_requires_grad(fsdp_param *param, bool requires_grad, fsdp_error *err)
{
    const fsdp_root *root = param->model->root;
    if (requires_grad && (param->is_buffer || !fsdp_dtype_describe(param->dtype)->is_float))
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' cannot have a gradient: it is %s", param->name,
                         param->is_buffer ? "a buffer" : fsdp_dtype_name(param->dtype));
    if (root && (root->is_in_forward || root->is_in_backward))
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' cannot be frozen or thawed inside a step",
                         param->name);
    if (param->flat)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' lies in a flat parameter: freeze it before fsdp_wrap_create",
                         param->name);
    param->requires_grad = requires_grad;
    return FSDP_OK;
}

fsdp_status fsdp_param_set_grad_dtype(fsdp_param *param, fsdp_dtype dtype, fsdp_error *err)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(dtype);
    if (param->model->root)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s': the dtype of gradients is set before the root",
                         param->name);
    if (!info || !info->is_float)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' cannot have gradients of %s", param->name,
                         fsdp_dtype_name(dtype));
    param->asked_grad_dtype = param->grad_dtype = dtype;
    return FSDP_OK;
}

fsdp_status fsdp_param_set_placement(fsdp_param *param, const char *mesh_dim,
                                     fsdp_placement placement, fsdp_error *err)
{
    fsdp_tensor_place *place = param->places;
    bool cuts = placement.kind != FSDP_REPLICATE;
    if (param->unit)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s': a placement is set before the unit is made",
                         param->name);
    if (cuts && (placement.dim < 0 || placement.dim >= param->ndim))
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' has %d dims and cannot be cut along dim %d",
                         param->name, param->ndim, placement.dim);
    if (strlen(mesh_dim) > FSDP_MAX_MESH_NAME)
        return fsdp_fail(err, FSDP_ERR_USAGE, "no mesh dim is named '%s'", mesh_dim);
    while (place < param->places + param->place_count && strcmp(place->dim, mesh_dim) != 0)
        place++;
    if (place == param->places + FSDP_MAX_MESH_DIMS)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' has placements on %d mesh dims already",
                         param->name, FSDP_MAX_MESH_DIMS);
    if (place == param->places + param->place_count)
        param->place_count++;
    strcpy(place->dim, mesh_dim);
    place->placement = placement;
    return FSDP_OK;
}

fsdp_status fsdp_param_set_extension(fsdp_param *param, const fsdp_extension *extension,
                                     fsdp_error *err)
{
    if (param->model->root)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s': an extension is set before the root",
                         param->name);
    if (extension->count < 1 || extension->count > FSDP_MAX_EXTENSION_INPUTS)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s': an extension has 1 to %d inputs", param->name,
                         FSDP_MAX_EXTENSION_INPUTS);
    size_t sizes = extension->count * sizeof *extension->sizes;
    fsdp_extension *copy = fsdp_alloc(1, sizeof *copy + sizes);
    if (!copy)
        return fsdp_fail_memory(err, param->name);
    *copy = *extension;
    copy->sizes = memcpy(copy + 1, extension->sizes, sizes);
    fsdp_free(param->extension);
    param->extension = copy;
    return FSDP_OK;
}

void fsdp_param_set_post_accumulate_hook(fsdp_param *param, fsdp_grad_hook hook, void *user)
{
    param->hook = hook;
    param->hook_user = user;
}

/* --- memory ----------------------------------------------------------------------------------- */

/* The pointer is NULL; the reason is the error of the next call on the root. */
static void *complain(fsdp_param *param, const char *what, const char *when)
{
    static const char *const states[] = {"sharded", "sharded again after forward", "gathered"};
    fsdp_root *root = param->model->root;
    if (!root || root->complaint.status != FSDP_OK)
        return NULL;
    if (param->group)
        (void)fsdp_fail(&root->complaint, FSDP_ERR_USAGE,
                        "%s of '%s' was asked for while unit %s is %s; %s", what, param->name,
                        param->unit->name, states[param->group->state], when);
    else
        (void)fsdp_fail(&root->complaint, FSDP_ERR_USAGE, "%s of '%s' was asked for; %s", what,
                        param->name, when);
    return NULL;
}

fsdp_status fsdp_param_complaint(const fsdp_param *param, fsdp_error *err)
{
    fsdp_root *root = param->model->root;
    if (!root)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has no memory: fsdp_root_create, or fsdp_wrap_create, gives it",
                         param->name);
    return fsdp_root_ready(root, err);
}

/* What one that lies in a flat parameter has of memory of that one. */
static void *within(const fsdp_param *param, void *flat_data, fsdp_dtype dtype)
{
    size_t offset = (size_t)param->flat_at * fsdp_dtype_size(dtype);
    return flat_data ? (unsigned char *)flat_data + offset : NULL;
}

static void *flat_data(const fsdp_param *param)
{
    fsdp_param *flat = param->flat;
    if (flat->model->root->is_summoned && flat->group)
        return within(param, flat->summoned, flat->dtype);
    return within(param, fsdp_param_data(flat), flat->data_dtype);
}

/* Of the shard, or its gradient: this rank's run of it. */
static void *flat_shard(const fsdp_param *param, void *shard)
{
    const fsdp_flat_run run = fsdp_param_flat_run(param);
    bool has_any = shard && (run.count > 0 || !param->flat->group);
    return has_any ? (unsigned char *)shard + (size_t)run.at * fsdp_dtype_size(param->flat->dtype)
                   : NULL;
}

static void flat_box(const fsdp_param *param, fsdp_box *box_out)
{
    const fsdp_flat_run run = fsdp_param_flat_run(param);
    *box_out = (fsdp_box){.ndim = 1, .lo = {run.first}, .len = {run.count}};
}

void *fsdp_param_shard(fsdp_param *param, fsdp_box *box_out)
{
    if (param->flat && param->flat->group) {
        if (box_out)
            flat_box(param, box_out);
        return flat_shard(param, param->flat->shard);
    }
    if (box_out)
        *box_out = param->mesh ? param->shard_box : fsdp_box_whole(param->ndim, param->shape);
    param->lacks_value = false; /* whoever asks may write */
    return param->shard;
}

void fsdp_param_data_box(const fsdp_param *param, fsdp_box *box_out)
{
    *box_out = param->mesh ? param->data_box : fsdp_box_whole(param->ndim, param->shape);
}

void *fsdp_param_data(fsdp_param *param)
{
    if (param->flat)
        return flat_data(param);
    if (!param->group)
        return param->shard;
    if (param->group->state != FSDP_IS_UNSHARDED)
        return complain(param, "the data",
                        "it is there between pre_forward and post_forward, and "
                        "pre_backward and post_backward");
    return param->data;
}

/* The host may touch it. */
static fsdp_status take_grad(fsdp_param *param, bool zeroed, fsdp_error *err)
{
    fsdp_context *context = param->model->root->context;
    size_t size = (size_t)fsdp_param_count(param) * fsdp_dtype_size(param->grad_dtype);
    const fsdp_lender lender = fsdp_group_grad_lender(param->group);
    FSDP_TRY(fsdp_memory_take(&context->memory, FSDP_MEMORY_GRAD,
                              context->streams[FSDP_STREAM_COMPUTE], &lender, size, 0, param->name,
                              &param->grad, err));
    FSDP_TRY(fsdp_context_sync(context, err));
    if (zeroed)
        memset(param->grad->data, 0, size);
    return FSDP_OK;
}

static void *grad(fsdp_param *param, bool zeroed)
{
    fsdp_error err = {0};
    if (!param->requires_grad)
        return complain(param, "the gradient", "it is frozen, or of no kind that has one");
    if (param->flat && param->flat->model->root->is_summoned)
        return within(param, param->flat->summoned_grad, param->flat->dtype);
    if (param->flat)
        return within(param, grad(param->flat, true), param->flat->grad_dtype);
    if (param->is_ignored)
        return complain(param, "the gradient", "units ignore it, so its gradient is the caller's");
    if (!param->group || param->group->phase != FSDP_PRE_BACKWARD)
        return complain(param, "the gradient",
                        "it is there between pre_backward and post_backward");
    if (!param->grad && take_grad(param, zeroed, &err) != FSDP_OK) {
        if (param->model->root->complaint.status == FSDP_OK)
            param->model->root->complaint = err;
        return NULL;
    }
    param->has_grad = true;
    return param->grad->data;
}

void *fsdp_param_grad(fsdp_param *param)
{
    return grad(param, true);
}

void *fsdp_param_grad_raw(fsdp_param *param)
{
    return grad(param, false);
}

void *fsdp_param_shard_grad(fsdp_param *param)
{
    if (param->flat)
        return flat_shard(param, param->flat->shard_grad);
    return param->shard_grad;
}
