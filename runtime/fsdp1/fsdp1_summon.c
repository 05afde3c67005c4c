/*
 * The FSDP1 face: whole parameters between steps, in the dtype they are stored in, and back: each rank keeps
 * of the changes what lies in its own chunk.
 */
#include "runtime/fsdp1/fsdp1_internal.h"

#include <string.h>

#include "base/core/mem.h"

/* --- which combinations ----------------------------------------------------------------------- */

static bool is_asked_for(const fsdp_v1_flat *flat, const fsdp_v1_flat *outer, bool recurse)
{
    return flat == outer || (recurse && fsdp_name_is_below(flat->module, outer->module));
}

static const fsdp_v1_flat *find_unit(const fsdp_v1 *v1, const fsdp_unit *unit)
{
    for (size_t i = 0; i < v1->flat_count; i++)
        if (v1->flats[i].unit == unit)
            return &v1->flats[i];
    return NULL;
}

static fsdp_status check_opts(const fsdp_v1 *v1, const fsdp_v1_flat *outer,
                              const fsdp_v1_summon_opts *opts, fsdp_error *err)
{
    if (opts->rank0_only && !opts->no_writeback)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "rank0_only goes with no_writeback: what rank 0 changes does not reach the "
            "chunks of the others");
    if (opts->with_grads && !v1->use_orig_params)
        return fsdp_fail(err, FSDP_ERR_USAGE, "with_grads needs use_orig_params");
    if (opts->with_grads && opts->offload_to_cpu)
        return fsdp_fail(err, FSDP_ERR_USAGE, "with_grads does not go with offload_to_cpu");
    for (size_t i = 0; i < v1->flat_count && opts->offload_to_cpu; i++)
        if (v1->flats[i].opts.strategy == FSDP_V1_NO_SHARD &&
            is_asked_for(&v1->flats[i], outer, !opts->no_recurse))
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "unit %s: offload_to_cpu does not go with NO_SHARD, whose parameters "
                             "are whole where they are",
                             fsdp_unit_name(v1->flats[i].unit));
    return FSDP_OK;
}

/* --- out -------------------------------------------------------------------------------------- */

/* *buffer: memory to be freed, *shown: what the parameters are found in. */
static fsdp_status gather(const fsdp_v1_piece *piece, bool keeps, void **buffer, void **shown,
                          fsdp_error *err)
{
    *buffer =
        fsdp_alloc((size_t)fsdp_v1_gathered_count(piece->flat), fsdp_dtype_size(piece->dtype));
    if (!*buffer)
        return fsdp_fail_memory(err, piece->flat->param->name);
    FSDP_TRY(fsdp_v1_gather(piece, *buffer, err));
    if (keeps) {
        *shown = *buffer;
        return FSDP_OK;
    }
    fsdp_free(*buffer);
    *buffer = NULL;
    return FSDP_OK;
}

static fsdp_status take_out(fsdp_v1 *v1, fsdp_v1_flat *flat, fsdp_error *err)
{
    fsdp_param *param = flat->param;
    bool keeps = !v1->summon.rank0_only || v1->root->world->rank == 0;
    bool with_grads = v1->summon.with_grads && param->shard_grad;
    const fsdp_v1_piece data = {.flat = flat, .own = param->shard, .dtype = param->dtype};
    const fsdp_v1_piece grad = {.flat = flat, .own = param->shard_grad, .dtype = param->dtype};
    flat->is_summoned = true;
    if (fsdp_v1_is_whole(flat)) {
        param->summoned = keeps ? param->shard : NULL;
        param->summoned_grad = with_grads && keeps ? param->shard_grad : NULL;
        return FSDP_OK;
    }
    FSDP_TRY(gather(&data, keeps, &flat->summoned, &param->summoned, err));
    if (with_grads)
        FSDP_TRY(gather(&grad, keeps, &flat->summoned_grad, &param->summoned_grad, err));
    return FSDP_OK;
}

/* --- back ------------------------------------------------------------------------------------- */

static void write_back(const fsdp_param *param, const void *whole, void *own)
{
    size_t size = fsdp_dtype_size(param->dtype);
    size_t offset = (size_t)(param->padded * param->group->shard_rank) * size;
    if (whole && own)
        memcpy(own, (const unsigned char *)whole + offset, (size_t)param->rows * size);
}

static void put_back(fsdp_v1 *v1, fsdp_v1_flat *flat)
{
    fsdp_param *param = flat->param;
    if (!flat->is_summoned)
        return;
    if (!v1->summon.no_writeback) {
        write_back(param, flat->summoned, param->shard);
        write_back(param, flat->summoned_grad, param->shard_grad);
    }
    fsdp_free(flat->summoned);
    fsdp_free(flat->summoned_grad);
    flat->summoned = flat->summoned_grad = NULL;
    param->summoned = param->summoned_grad = NULL;
    flat->is_summoned = false;
}

static void put_all_back(fsdp_v1 *v1)
{
    for (size_t i = 0; i < v1->flat_count; i++)
        put_back(v1, &v1->flats[i]);
    v1->root->is_summoned = false;
    fsdp_root_refresh_masters(v1->root, NULL);
}

/* --- the calls -------------------------------------------------------------------------------- */

static fsdp_status take_all_out(fsdp_v1 *v1, const fsdp_v1_flat *outer, fsdp_error *err)
{
    for (size_t i = 0; i < v1->flat_count; i++) {
        fsdp_v1_flat *flat = &v1->flats[i];
        if (flat->param && is_asked_for(flat, outer, !v1->summon.no_recurse))
            FSDP_TRY(take_out(v1, flat, err));
    }
    return FSDP_OK;
}

fsdp_status fsdp_v1_summon_full_params(fsdp_v1 *v1, fsdp_unit *unit,
                                       const fsdp_v1_summon_opts *opts, fsdp_error *err)
{
    static const fsdp_v1_summon_opts none = {0};
    const fsdp_v1_flat *outer = find_unit(v1, unit ? unit : fsdp_root_unit(v1->root));
    FSDP_TRY(fsdp_v1_settle(v1, "fsdp_v1_summon_full_params", err));
    if (!outer)
        return fsdp_fail(err, FSDP_ERR_USAGE, "unit %s is of another model", fsdp_unit_name(unit));
    FSDP_TRY(check_opts(v1, outer, opts ? opts : &none, err));
    v1->summon = opts ? *opts : none;
    v1->root->is_summoned = true;
    fsdp_status status = take_all_out(v1, outer, err);
    if (status != FSDP_OK) {
        v1->summon.no_writeback = true;
        put_all_back(v1);
    }
    return fsdp_root_done(v1->root, status, err);
}

fsdp_status fsdp_v1_summon_end(fsdp_v1 *v1, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_ready(v1->root, err));
    if (!v1->root->is_summoned)
        return fsdp_fail(err, FSDP_ERR_USAGE, "no full parameters are summoned");
    put_all_back(v1);
    return FSDP_OK;
}
