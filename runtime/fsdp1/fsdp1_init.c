/*
 * The FSDP1 face: the first values of parameters. The engine fills flat parameters; here that is asked for by
 * declared parameters, as boxes of their own.
 */
#include "runtime/fsdp1/fsdp1_internal.h"

typedef struct init_work {
    fsdp_v1 *v1;
    fsdp_param_fill fill;
    void *user;
} init_work;

/* Elements [first, first + count) of a parameter, box after box: they lie one behind the other. */
static fsdp_status fill_run(const init_work *work, const fsdp_param *param, int64_t first,
                            int64_t count, unsigned char *to, fsdp_error *err)
{
    const fsdp_box whole = fsdp_box_whole(param->ndim, param->shape);
    fsdp_box pieces[FSDP_BOX_PIECES];
    int n = fsdp_box_cut(&whole, first, count, pieces);
    for (int i = 0; i < n; i++) {
        FSDP_TRY(work->fill(work->user, param, &pieces[i], to, err));
        to += (size_t)fsdp_box_count(&pieces[i]) * fsdp_dtype_size(param->dtype);
    }
    return FSDP_OK;
}

static const fsdp_v1_flat *find_flat(const fsdp_v1 *v1, const fsdp_param *inner)
{
    for (size_t i = 0; i < v1->flat_count; i++)
        if (v1->flats[i].param == inner)
            return &v1->flats[i];
    return NULL;
}

/* What the box of a flat parameter has of every parameter in it; padding stays as it is. */
static fsdp_status fill_flat(const init_work *work, const fsdp_v1_flat *flat, const fsdp_box *box,
                             unsigned char *data, fsdp_error *err)
{
    int64_t begin = box->lo[0], end = begin + box->len[0];
    for (size_t i = 0; i < flat->view_count; i++) {
        const fsdp_param *param = flat->views[i];
        int64_t at = param->flat_at, behind = at + fsdp_v1_count(param);
        int64_t lo = at > begin ? at : begin, hi = behind < end ? behind : end;
        unsigned char *to = data + (size_t)(lo - begin) * fsdp_dtype_size(param->dtype);
        if (lo < hi)
            FSDP_TRY(fill_run(work, param, lo - at, hi - lo, to, err));
    }
    return FSDP_OK;
}

/* The declared parameter behind one of the inner model that stays whole. */
static const fsdp_param *find_declared(const fsdp_v1 *v1, const fsdp_param *inner)
{
    const fsdp_model *model = v1->model;
    for (size_t i = 0; i < model->count; i++)
        if (model->params[i]->flat == inner)
            return model->params[i];
    return NULL;
}

/* A buffer that is kept in another dtype is filled in that: it is asked for as it lies. */
static fsdp_status fill_inner(void *user, const fsdp_param *inner, const fsdp_box *box, void *data,
                              fsdp_error *err)
{
    const init_work *work = user;
    const fsdp_v1_flat *flat = find_flat(work->v1, inner);
    if (flat)
        return fill_flat(work, flat, box, data, err);
    const fsdp_param *declared = find_declared(work->v1, inner);
    bool is_cast = declared->dtype != inner->dtype;
    return work->fill(work->user, is_cast ? inner : declared, box, data, err);
}

fsdp_status fsdp_v1_init(fsdp_v1 *v1, fsdp_param_fill fill, void *user, fsdp_error *err)
{
    init_work work = {.v1 = v1, .fill = fill, .user = user};
    FSDP_TRY(fsdp_v1_check_idle(v1, "fsdp_v1_init", err));
    return fsdp_root_init(v1->root, fill_inner, &work, err);
}

fsdp_status fsdp_v1_init_uniform(fsdp_v1 *v1, uint64_t seed, fsdp_error *err)
{
    return fsdp_v1_init(v1, fsdp_param_fill_uniform, &seed, err);
}

fsdp_status fsdp_v1_sync_module_states(fsdp_v1 *v1, fsdp_param_fill fill, void *user,
                                       fsdp_error *err)
{
    init_work work = {.v1 = v1, .fill = fill, .user = user};
    FSDP_TRY(fsdp_v1_check_idle(v1, "fsdp_v1_sync_module_states", err));
    return fsdp_root_sync_from_rank0(v1->root, fill_inner, &work, err);
}
