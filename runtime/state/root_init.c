/* First values of parameters: reproducible ones, the caller's, or rank 0's. See root_init.h. */
#include "runtime/state/state_internal.h"
#include "runtime/step/step.h"

#include <math.h>
#include <string.h>

#include "base/core/fnv.h"
#include "base/core/given.h"
#include "base/core/mem.h"
#include "base/core/mix.h"
#include "base/data/box_internal.h"
#include "statedict/ctl/ctl_backend.h"

/* --- the sequence ----------------------------------------------------------------------------- */

static double uniform_at(uint64_t begin, uint64_t i)
{
    return (double)(fsdp_mix(begin + (i + 1) * 0x9E3779B97F4A7C15u) >> 40) * 0x1p-23 - 1;
}

static uint64_t begin_of(uint64_t seed, const char *name)
{
    return fsdp_mix(seed ^ fsdp_fnv(FSDP_FNV_BEGIN, name, strlen(name)));
}

double fsdp_uniform(uint64_t seed, const char *name, uint64_t i)
{
    if (!name)
        return 0;
    return uniform_at(begin_of(seed, name), i);
}

/* --- filling ---------------------------------------------------------------------------------- */

/* Reshards everything and waits, so that no gather reads the shards or holds their old values. */
static fsdp_status settle(fsdp_root *root, const char *what, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_ready(root, err));
    if (root->is_in_forward || root->is_in_backward)
        return fsdp_fail(err, FSDP_ERR_USAGE, "cannot run %s inside a step; call it between steps",
                         what);
    return fsdp_state_settle(root, false, err);
}

/* The parameter whose values fill makes: the declared one, unless it is stored in another dtype. */
static fsdp_param *filled(fsdp_param *param)
{
    return fsdp_state_is_cast(param) ? param->flat : param;
}

/* Fills this rank's run of a parameter inside a flat one: consecutive boxes. */
static fsdp_status fill_run(const fsdp_param *param, fsdp_param_fill fill, void *context,
                            fsdp_error *err)
{
    const fsdp_box whole = fsdp_box_whole(param->ndim, param->shape);
    const fsdp_flat_run run = fsdp_param_flat_run(param);
    size_t size = fsdp_dtype_size(param->dtype);
    const fsdp_root *root = param->flat->model->root;
    char *to = (char *)fsdp_root_view(root, param->flat->shard) + (size_t)run.at * size;
    fsdp_box pieces[FSDP_BOX_PIECES];
    int n = fsdp_box_cut(&whole, run.first, run.count, pieces);
    for (int i = 0; i < n; i++) {
        FSDP_TRY(fill(context, param, &pieces[i], to, err));
        to += (size_t)fsdp_box_count(&pieces[i]) * size;
    }
    return FSDP_OK;
}

fsdp_status fsdp_root_init(fsdp_root *root, fsdp_param_fill fill, void *context, fsdp_error *err)
{
    FSDP_NEED(err, root);
    FSDP_NEED_CALL(err, fill);
    const fsdp_model *model = root->declared;
    FSDP_TRY(settle(root, "fsdp_root_init", err));
    for (size_t i = 0; i < model->count; i++) {
        fsdp_param *param = filled(model->params[i]);
        fsdp_box box;
        if (param->is_buffer)
            continue;
        if (param->flat && param->flat->group) {
            FSDP_TRY(fill_run(param, fill, context, err));
            continue;
        }
        void *shard = fsdp_param_shard(param, &box);
        FSDP_TRY(fill(context, param, &box, fsdp_root_view(root, shard), err));
    }
    fsdp_root_refresh_masters(root, NULL);
    return fsdp_root_store_view(root, err);
}

/* Element numbers in the whole tensor, along the box's rows. */
typedef struct row_walk {
    const fsdp_box *box;
    int64_t at[FSDP_PARAM_DIMS], strides[FSDP_MAX_DIMS];
} row_walk;

static uint64_t first_of_row(const row_walk *walk)
{
    int64_t position = 0;
    for (int i = 0; i < walk->box->ndim; i++)
        position += (walk->box->lo[i] + walk->at[i]) * walk->strides[i];
    return (uint64_t)position;
}

static bool next_row(row_walk *walk)
{
    for (int i = walk->box->ndim - 2; i >= 0; i--) {
        if (++walk->at[i] < walk->box->len[i])
            return true;
        walk->at[i] = 0;
    }
    return false;
}

static fsdp_status fill_uniform(void *context, const fsdp_param *param, const fsdp_box *box,
                                void *data, fsdp_error *err)
{
    enum { PIECE = 256 };
    uint64_t begin = begin_of(*(const uint64_t *)context, param->name);
    double scale = sqrt((double)param->shape[param->ndim - 1]);
    size_t size = fsdp_dtype_size(param->dtype);
    unsigned char *to = data;
    row_walk rows = {.box = box};
    if (!fsdp_dtype_describe(param->dtype)->is_float)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' is %s: there are no uniform values of that",
                         param->name, fsdp_dtype_name(param->dtype));
    if (fsdp_box_count(box) == 0)
        return FSDP_OK;
    fsdp_box_strides(param->ndim, param->shape, rows.strides);
    int64_t width = box->len[box->ndim - 1];
    do {
        uint64_t first = first_of_row(&rows);
        for (int64_t at = 0; at < width; at += PIECE) {
            float values[PIECE];
            int64_t count = width - at < PIECE ? width - at : PIECE;
            for (int64_t i = 0; i < count; i++)
                values[i] = (float)(uniform_at(begin, first + (uint64_t)(at + i)) / scale);
            fsdp_cast(to, param->dtype, values, FSDP_F32, (size_t)count);
            to += (size_t)count * size;
        }
    } while (next_row(&rows));
    return FSDP_OK;
}

fsdp_status fsdp_root_init_uniform(fsdp_root *root, uint64_t seed, fsdp_error *err)
{
    FSDP_NEED(err, root);
    return fsdp_root_init(root, fill_uniform, &seed, err);
}

/* --- values of rank 0 ------------------------------------------------------------------------- */

enum { SLAB_BYTES = 16 << 20 };

typedef struct sync_work {
    fsdp_root *root;
    fsdp_ordered_comm *ordered; /* of all ranks; NULL: a world of one rank */
    fsdp_param_fill fill;
    void *context;
    void *slab;
} sync_work;

/* Copies this rank's part of a slab of a parameter inside a flat one: boxes of its run. */
static void take_run(const fsdp_param *param, const fsdp_state_range *slab)
{
    const fsdp_box whole = fsdp_box_whole(param->ndim, param->shape);
    const fsdp_flat_run run = fsdp_param_flat_run(param);
    size_t size = fsdp_dtype_size(param->dtype);
    const fsdp_root *root = param->flat->model->root;
    char *to = (char *)fsdp_root_view(root, param->flat->shard) + (size_t)run.at * size;
    fsdp_box pieces[FSDP_BOX_PIECES];
    int n = fsdp_box_cut(&whole, run.first, run.count, pieces);
    for (int i = 0; i < n; i++) {
        fsdp_state_copy_range(slab, &pieces[i], to, size);
        to += (size_t)fsdp_box_count(&pieces[i]) * size;
    }
}

/* Copies this rank's part of a slab to its place. */
static void take_part(const sync_work *work, const fsdp_param *param, const fsdp_box *slab)
{
    const fsdp_box local =
        param->mesh ? param->shard_box : fsdp_box_whole(param->ndim, param->shape);
    const fsdp_state_range all = {*slab, 0, fsdp_box_count(slab), work->slab};
    if (param->flat && param->flat->group)
        take_run(param, &all);
    else
        fsdp_state_copy_range(&all, &local, fsdp_root_view(work->root, param->shard),
                              fsdp_dtype_size(param->dtype));
}

static fsdp_status sync_slab(sync_work *work, const fsdp_param *param, const fsdp_box *slab,
                             fsdp_error *err)
{
    const fsdp_world *world = work->root->world;
    fsdp_status status = FSDP_OK;
    if (world->rank == 0)
        status = work->fill(work->context, param, slab, work->slab, err);
    FSDP_TRY(fsdp_ctl_agree(world->parts.ctl, status, err));
    const fsdp_collective call = {
        .kind = FSDP_BROADCAST,
        .dtype = param->dtype,
        .in = work->slab,
        .out = work->slab,
        .count = fsdp_box_count(slab),
        .root = work->ordered ? fsdp_ordered_comm_position(work->ordered, 0) : 0,
        .unit = param->name};
    if (work->ordered)
        FSDP_TRY(fsdp_comm_run(work->ordered->comm, &call, err));
    take_part(work, param, slab);
    return FSDP_OK;
}

/* Broadcasts a parameter slab by slab in row-major order; a 0-d tensor is one slab. */
static fsdp_status sync_param(sync_work *work, const fsdp_param *param, fsdp_error *err)
{
    const fsdp_box whole = fsdp_box_whole(param->ndim, param->shape);
    int64_t count = fsdp_box_count(&whole);
    int64_t most = SLAB_BYTES / (int64_t)fsdp_dtype_size(param->dtype);
    for (int64_t first = 0; first < count; first += most) {
        fsdp_box pieces[FSDP_BOX_PIECES];
        int64_t rest = count - first;
        int n = fsdp_box_cut(&whole, first, rest < most ? rest : most, pieces);
        for (int i = 0; i < n; i++)
            FSDP_TRY(sync_slab(work, param, &pieces[i], err));
    }
    return FSDP_OK;
}

static fsdp_status sync_all(sync_work *work, fsdp_error *err)
{
    const fsdp_world *world = work->root->world;
    const fsdp_model *model = work->root->declared;
    work->slab = fsdp_alloc_pages(SLAB_BYTES);
    fsdp_status status = work->slab ? FSDP_OK : fsdp_fail_memory(err, "a slab of a parameter");
    if (status == FSDP_OK && world->rank == 0 && !work->fill)
        status = fsdp_fail(err, FSDP_ERR_USAGE, "fsdp_root_sync_from_rank0: 'fill' is NULL");
    if (status == FSDP_OK)
        status = fsdp_root_world_comm(work->root, "sync_from_rank0", &work->ordered, err);
    FSDP_TRY(fsdp_ctl_agree(world->parts.ctl, status, err));
    for (size_t i = 0; i < model->count; i++)
        FSDP_TRY(sync_param(work, filled(model->params[i]), err));
    return FSDP_OK;
}

fsdp_status fsdp_root_sync_from_rank0(fsdp_root *root, fsdp_param_fill fill, void *context,
                                      fsdp_error *err)
{
    FSDP_NEED(err, root);
    sync_work work = {.root = root, .fill = fill, .context = context};
    FSDP_TRY(settle(root, "fsdp_root_sync_from_rank0", err));
    fsdp_ctl *ctl = fsdp_world_ctl(root->world);
    const char *outer = fsdp_ctl_begin_public(ctl, "fsdp_root_sync_from_rank0");
    fsdp_status status = sync_all(&work, err);
    fsdp_ctl_end_public(ctl, outer);
    fsdp_free(work.slab);
    if (status == FSDP_OK) {
        fsdp_root_note_values(root);
        fsdp_root_refresh_masters(root, NULL);
        status = fsdp_root_store_view(root, err);
    }
    return fsdp_root_done(root, "fsdp_root_sync_from_rank0", status, err);
}
