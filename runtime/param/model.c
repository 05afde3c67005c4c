/* Models and parameters as they are declared. See model.h. */
#include "runtime/param/param.h"

#include <string.h>

#include "base/core/given.h"
#include "base/core/mem.h"
#include "base/data/box_internal.h"
#include <fsdp/sd.h>

/* --- models ----------------------------------------------------------------------------------- */

fsdp_status fsdp_model_create(fsdp_world *world, fsdp_model **model_out, fsdp_error *err)
{
    FSDP_NEED(err, world, model_out);
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

fsdp_model *fsdp_model_hold(fsdp_model *model)
{
    model->holders++;
    return model;
}

void fsdp_model_free(fsdp_model *model)
{
    if (!model || model->holders-- > 0)
        return;
    for (size_t i = 0; i < model->unit_count; i++)
        model->free_unit(model->units[i]);
    for (size_t i = 0; i < model->count; i++)
        free_param(model->params[i]);
    fsdp_free(model->units);
    fsdp_free(model->params);
    fsdp_free(model);
}

size_t fsdp_model_count(const fsdp_model *model)
{
    if (!model)
        return 0;
    return model->count;
}

fsdp_param *fsdp_model_at(const fsdp_model *model, size_t i)
{
    if (!model)
        return NULL;
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
    if (!model || !name)
        return NULL;
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
                         "cannot declare '%s': the root exists, so the model is complete", name);
    if (fsdp_model_find(model, name))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot declare '%s': a parameter of this name exists", name);
    return FSDP_OK;
}

static fsdp_status check_param_shape(const fsdp_param_spec *spec, fsdp_error *err)
{
    if (spec->ndim < 1)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "cannot shard '%s': it has no dims; give it the shape [1], or make it a buffer",
            spec->name);
    for (int i = 0; i < spec->ndim; i++)
        if (spec->shape[i] < 1)
            return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' has no elements: its dim %d is %lld",
                             spec->name, i, (long long)spec->shape[i]);
    return FSDP_OK;
}

static fsdp_status check_spec(const fsdp_model *model, const fsdp_param_spec *spec, fsdp_error *err)
{
    size_t size = fsdp_dtype_size(spec->dtype);
    FSDP_TRY(check_name(model, spec->name, err));
    if (size == 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' has an unknown dtype", spec->name);
    if (spec->ndim > FSDP_PARAM_DIMS)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' has %d dims, at most %d are allowed",
                         spec->name, spec->ndim, FSDP_PARAM_DIMS);
    if (!spec->is_buffer)
        FSDP_TRY(check_param_shape(spec, err));
    fsdp_status status = fsdp_shape_check(spec->ndim, spec->shape, size, err);
    if (status != FSDP_OK)
        fsdp_error_prefix(err, "'%s'", spec->name);
    return status;
}

fsdp_status fsdp_model_add(fsdp_model *model, const fsdp_param_spec *spec, fsdp_param **param_out,
                           fsdp_error *err)
{
    FSDP_NEED(err, model, spec);
    FSDP_NEED(err, spec->name);
    if (spec->ndim > 0)
        FSDP_NEED(err, spec->shape);
    FSDP_TRY(check_spec(model, spec, err));
    if (!fsdp_grow(&model->params, &model->room, model->count + 1, sizeof(fsdp_param *)))
        return fsdp_fail_memory(err, spec->name);
    fsdp_param *param = fsdp_alloc(1, sizeof *param);
    char *copy = param ? fsdp_strndup(spec->name, strlen(spec->name)) : NULL;
    if (!copy) {
        fsdp_free(param);
        return fsdp_fail_memory(err, spec->name);
    }
    bool is_float = fsdp_dtype_describe(spec->dtype)->is_float;
    *param = (fsdp_param){.model = model,
                          .name = copy,
                          .dtype = spec->dtype,
                          .data_dtype = spec->dtype,
                          .ndim = spec->ndim,
                          .is_buffer = spec->is_buffer,
                          .is_persistent = spec->is_buffer && !spec->is_transient,
                          .requires_grad = !spec->is_buffer && is_float};
    if (spec->ndim > 0)
        memcpy(param->shape, spec->shape, (size_t)spec->ndim * sizeof *spec->shape);
    model->params[model->count++] = param;
    if (param_out)
        *param_out = param;
    return FSDP_OK;
}

fsdp_status fsdp_model_add_alias(fsdp_model *model, const char *name, fsdp_param *param,
                                 fsdp_error *err)
{
    FSDP_NEED(err, model, name, param);
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

/* --- parameters ------------------------------------------------------------------------------- */

const char *fsdp_param_name(const fsdp_param *param)
{
    if (!param)
        return NULL;
    return param->name;
}

fsdp_param_info fsdp_param_describe(const fsdp_param *param)
{
    if (!param)
        return (fsdp_param_info){0};
    bool is_summoned = param->flat && param->flat->summoned;
    return (fsdp_param_info){.name = param->name,
                             .dtype = param->dtype,
                             .data_dtype = is_summoned ? param->dtype : param->data_dtype,
                             .grad_dtype = param->grad_dtype,
                             .ndim = param->ndim,
                             .shape = param->shape,
                             .is_buffer = param->is_buffer,
                             .requires_grad = param->requires_grad,
                             .aliases = (const char *const *)param->aliases,
                             .alias_count = param->alias_count,
                             .layout = param->mesh ? &param->layout : NULL};
}

/* --- settings --------------------------------------------------------------------------------- */

fsdp_status fsdp_param_set_grad_dtype(fsdp_param *param, fsdp_dtype dtype, fsdp_error *err)
{
    FSDP_NEED(err, param);
    const fsdp_dtype_info *info = fsdp_dtype_describe(dtype);
    if (param->model->root)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot set the gradient dtype of '%s': the root exists; set it before",
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
    FSDP_NEED(err, param, mesh_dim);
    fsdp_tensor_place *place = param->places;
    bool cuts = placement.kind != FSDP_REPLICATE;
    if (param->unit)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot set a placement of '%s': its unit exists; set it before",
                         param->name);
    if (cuts && (placement.dim < 0 || placement.dim >= param->ndim))
        return fsdp_fail(err, FSDP_ERR_USAGE, "cannot cut '%s' of %d dims along dim %d",
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
    FSDP_NEED(err, param, extension);
    if (param->model->root)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot set an extension of '%s': the root exists; set it before",
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

void fsdp_param_set_post_accumulate_hook(fsdp_param *param, fsdp_grad_hook hook, void *context)
{
    if (!param)
        return;
    param->hook = hook;
    param->hook_context = context;
}
