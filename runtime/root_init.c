/* The first values of parameters: reproducible ones, the user's, or rank 0's. See root.h. */
#include "runtime/root_internal.h"

#include <math.h>
#include <string.h>

#include "base/mem.h"

/* --- the sequence ----------------------------------------------------------------------------- */

static uint64_t mix(uint64_t x) /* SplitMix64's finaliser */
{
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

static uint64_t fnv1a(const char *text)
{
    uint64_t hash = 0xCBF29CE484222325u;
    for (; *text; text++)
        hash = (hash ^ (unsigned char)*text) * 0x100000001B3u;
    return hash;
}

static double uniform_at(uint64_t begin, uint64_t i)
{
    return (double)(mix(begin + (i + 1) * 0x9E3779B97F4A7C15u) >> 40) * 0x1p-23 - 1;
}

double fsdp_uniform(uint64_t seed, const char *name, uint64_t i)
{
    return uniform_at(mix(seed ^ fnv1a(name)), i);
}

/* --- filling ---------------------------------------------------------------------------------- */

static fsdp_status check_idle(fsdp_root *root, const char *what, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_ready(root, err));
    if (root->is_in_forward || root->is_in_backward)
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s is for between steps", what);
    return FSDP_OK;
}

fsdp_status fsdp_root_init(fsdp_root *root, fsdp_param_fill fill, void *user, fsdp_error *err)
{
    const fsdp_model *model = root->model;
    FSDP_TRY(check_idle(root, "fsdp_root_init", err));
    for (size_t i = 0; i < model->count; i++) {
        fsdp_param *param = model->params[i];
        fsdp_box box;
        void *shard = fsdp_param_shard(param, &box);
        if (!param->is_buffer)
            FSDP_TRY(fill(user, param, &box, shard, err));
    }
    return FSDP_OK;
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

static fsdp_status fill_uniform(void *user, const fsdp_param *param, const fsdp_box *box,
                                void *data, fsdp_error *err)
{
    enum { PIECE = 256 };
    uint64_t begin = mix(*(const uint64_t *)user ^ fnv1a(param->name));
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
    return fsdp_root_init(root, fill_uniform, &seed, err);
}
