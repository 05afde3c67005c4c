/*
 * The FSDP1 face: the parameters of a unit become one flat parameter, in PyTorch's layout.
 *
 * With use_orig_params every parameter begins at a multiple of 16 bytes (in the dtype of gathered
 * parameters), and the end is padded to a multiple of the ranks; without, there are no gaps.
 * Padding is zero. The engine cuts the 1-D tensor by its usual rule, which is FSDP1's: chunks of
 * ceil(count / ranks).
 */
#include "runtime/wrap/wrap_internal.h"

#include <string.h>

#include "base/core/mem.h"

enum { ALIGNMENT = 16 };

int64_t fsdp_wrap_count(const fsdp_param *param)
{
    return fsdp_shape_count(param->ndim, param->shape);
}

/* --- members ---------------------------------------------------------------------------------- */

static bool belongs(const fsdp_wrap_flat *flat, const fsdp_param *param, bool is_ignored)
{
    bool is_taken = param->flat || param->is_buffer || is_ignored;
    return !is_taken && fsdp_name_is_below(param->name, flat->module);
}

static fsdp_status list_views(fsdp_wrap *wrap, fsdp_wrap_flat *flat, const bool *ignored,
                              fsdp_error *err)
{
    const fsdp_model *model = wrap->model;
    flat->views = fsdp_alloc(model->count, sizeof *flat->views);
    if (!flat->views)
        return fsdp_fail_memory(err, "a flat parameter");
    for (size_t i = 0; i < model->count; i++)
        if (belongs(flat, model->params[i], ignored[i]))
            flat->views[flat->view_count++] = model->params[i];
    return FSDP_OK;
}

const char *fsdp_wrap_flat_name(const fsdp_wrap_flat *flat)
{
    return flat->module[0] ? flat->module : "root";
}

static fsdp_status check_view(const fsdp_wrap *wrap, const fsdp_wrap_flat *flat,
                              const fsdp_param *param, fsdp_error *err)
{
    const fsdp_param *first = flat->views[0];
    if (!fsdp_dtype_describe(param->dtype)->is_float)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot put '%s' into a flat parameter: its dtype is %s; ignore it, or "
                         "make it a buffer",
                         param->name, fsdp_dtype_name(param->dtype));
    if (param->dtype != first->dtype)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot wrap unit '%s': '%s' is %s and '%s' is %s, and a flat parameter "
                         "has one dtype; wrap them apart",
                         fsdp_wrap_flat_name(flat), first->name, fsdp_dtype_name(first->dtype),
                         param->name, fsdp_dtype_name(param->dtype));
    if (!wrap->use_orig_params && param->requires_grad != first->requires_grad)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "unit %s: of '%s' and '%s' one is frozen: wrap them apart, or set "
                         "use_orig_params",
                         fsdp_wrap_flat_name(flat), first->name, param->name);
    if (param->place_count > 0 || param->extension || param->asked_grad_dtype != FSDP_DTYPE_NONE)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot put '%s' into a flat parameter: it has a placement, an extension "
                         "or a dtype of gradients of its own; ignore it",
                         param->name);
    return FSDP_OK;
}

/* --- places ----------------------------------------------------------------------------------- */

static int64_t round_up(int64_t count, int64_t multiple)
{
    return (count + multiple - 1) / multiple * multiple;
}

/* The number of elements in 16 bytes, in the dtype of gathered parameters. */
static int64_t alignment_of(const fsdp_wrap *wrap, const fsdp_wrap_flat *flat)
{
    fsdp_dtype dtype = flat->opts.param_dtype;
    if (!wrap->use_orig_params)
        return 1;
    return ALIGNMENT /
           (int64_t)fsdp_dtype_size(dtype != FSDP_DTYPE_NONE ? dtype : flat->views[0]->dtype);
}

static fsdp_status lay_out(const fsdp_wrap *wrap, fsdp_wrap_flat *flat, int64_t ranks,
                           fsdp_error *err)
{
    int64_t alignment = alignment_of(wrap, flat), count = 0;
    for (size_t i = 0; i < flat->view_count; i++) {
        fsdp_param *param = flat->views[i];
        FSDP_TRY(check_view(wrap, flat, param, err));
        count = round_up(count, alignment);
        param->flat_at = count;
        if (fsdp_add_overflow(count, fsdp_wrap_count(param), &count) || count > INT64_MAX / 64)
            return fsdp_fail(
                err, FSDP_ERR_LIMIT,
                "cannot wrap unit '%s': its flat parameter is too large; wrap its modules",
                fsdp_wrap_flat_name(flat));
    }
    flat->count = wrap->use_orig_params ? round_up(count, ranks) : count;
    return FSDP_OK;
}

/* --- declaring -------------------------------------------------------------------------------- */

static bool any_requires_grad(const fsdp_wrap_flat *flat)
{
    for (size_t i = 0; i < flat->view_count; i++)
        if (flat->views[i]->requires_grad)
            return true;
    return false;
}

static fsdp_status add_to_inner(fsdp_wrap *wrap, fsdp_wrap_flat *flat, fsdp_error *err)
{
    fsdp_text name = {0};
    fsdp_text_addf(&name, "%s%s_flat_param", flat->module, flat->module[0] ? "." : "");
    fsdp_status status = name.failed
                             ? fsdp_fail_memory(err, "a flat parameter")
                             : fsdp_model_add(wrap->inner,
                                              &(fsdp_param_spec){.name = name.data,
                                                                 .dtype = flat->views[0]->dtype,
                                                                 .ndim = 1,
                                                                 .shape = &flat->count},
                                              &flat->param, err);
    fsdp_text_release(&name);
    if (status == FSDP_OK)
        flat->param->requires_grad = any_requires_grad(flat);
    return status;
}

fsdp_status fsdp_wrap_flat_declare(fsdp_wrap *wrap, fsdp_wrap_flat *flat, const bool *ignored,
                                   int64_t ranks, fsdp_error *err)
{
    FSDP_TRY(list_views(wrap, flat, ignored, err));
    if (flat->view_count == 0)
        return FSDP_OK;
    FSDP_TRY(lay_out(wrap, flat, ranks, err));
    FSDP_TRY(add_to_inner(wrap, flat, err));
    for (size_t i = 0; i < flat->view_count; i++)
        flat->views[i]->flat = flat->param;
    return FSDP_OK;
}

void fsdp_wrap_flat_release(fsdp_wrap_flat *flat)
{
    fsdp_free(flat->summoned);
    fsdp_free(flat->summoned_grad);
    fsdp_free(flat->module);
    fsdp_free(flat->views);
}

/* --- queries ---------------------------------------------------------------------------------- */

fsdp_wrap_place fsdp_wrap_place_of(const fsdp_param *param)
{
    if (!param)
        return (fsdp_wrap_place){0};
    if (!param->flat || !param->flat->group)
        return (fsdp_wrap_place){0};
    const fsdp_flat_run run = fsdp_param_flat_run(param);
    return (fsdp_wrap_place){.flat = param->flat,
                             .offset = param->flat_at,
                             .count = fsdp_wrap_count(param),
                             .first = run.first,
                             .local = run.count,
                             .at = run.at};
}
