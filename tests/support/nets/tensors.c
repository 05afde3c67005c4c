/* See tensors.h. */
#include "tests/support/nets/tensors.h"

#include <math.h>
#include <string.h>

#include <fsdp/unit.h>

static size_t count_of(const fsdp_param *param)
{
    fsdp_box box;
    fsdp_param_data_box(param, &box);
    return (size_t)fsdp_box_count(&box);
}

fsdp_status tensor_give_grad(fsdp_param *param, const float *grad, fsdp_error *err)
{
    void *to = fsdp_param_grad_raw(param);
    if (!to)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' has no gradient", fsdp_param_name(param));
    fsdp_cast(to, fsdp_param_describe(param).data_dtype, grad, FSDP_F32, count_of(param));
    return FSDP_OK;
}

bool are_close(double a, double b, double tolerance)
{
    return fabs(a - b) <= tolerance * fmax(1, fabs(b));
}

/* --- rows of a rank --------------------------------------------------------------------------- */

bool next_element(const fsdp_box *box, int64_t *at)
{
    for (int i = box->ndim - 1; i >= 0; i--) {
        if (++at[i] < box->lo[i] + box->len[i])
            return true;
        at[i] = box->lo[i];
    }
    return false;
}

fsdp_status tensor_number(void *user, const fsdp_param *param, const fsdp_box *box, void *data,
                          fsdp_error *err)
{
    float *to = data;
    int64_t at[FSDP_MAX_DIMS];
    (void)user;
    (void)err;
    memcpy(at, box->lo, sizeof at);
    if (fsdp_box_count(box) == 0)
        return FSDP_OK;
    do
        *to++ = (float)fsdp_box_position(fsdp_param_describe(param).ndim,
                                         fsdp_param_describe(param).shape, at) +
                1;
    while (next_element(box, at));
    return FSDP_OK;
}

static float value_at(const fsdp_param *param, const void *data, int64_t i)
{
    float value;
    fsdp_dtype dtype = fsdp_param_describe(param).dtype;
    fsdp_cast(&value, FSDP_F32, (const char *)data + (size_t)i * fsdp_dtype_size(dtype), dtype, 1);
    return value;
}

static bool is_equal(float a, float b, double tolerance)
{
    return tolerance > 0 ? are_close((double)a, (double)b, tolerance)
                         : memcmp(&a, &b, sizeof a) == 0;
}

static fsdp_status expect_rows(fsdp_param *param, const void *data, const char *what,
                               const float *whole, double tolerance, fsdp_error *err)
{
    fsdp_box box;
    int64_t at[FSDP_MAX_DIMS], i = 0;
    (void)fsdp_param_shard(param, &box);
    if (fsdp_box_count(&box) == 0)
        return FSDP_OK;
    if (!data)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' has no %s", fsdp_param_name(param), what);
    memcpy(at, box.lo, sizeof at);
    do {
        int64_t place = fsdp_box_position(box.ndim, fsdp_param_describe(param).shape, at);
        float value = value_at(param, data, i++);
        if (!is_equal(value, whole[place], tolerance))
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s', %s, element %lld: %.9g, not %.9g",
                             fsdp_param_name(param), what, (long long)place, (double)value,
                             (double)whole[place]);
    } while (next_element(&box, at));
    return FSDP_OK;
}

fsdp_status expect_shard(fsdp_param *param, const float *whole, double tolerance, fsdp_error *err)
{
    const void *data = fsdp_param_shard(param, NULL);
    return expect_rows(param, data, "value", whole, tolerance, err);
}

fsdp_status expect_shard_grad(fsdp_param *param, const float *whole, double tolerance,
                              fsdp_error *err)
{
    const void *data = fsdp_param_shard_grad(param);
    return expect_rows(param, data, "sharded gradient", whole, tolerance, err);
}

static void keep_rows(fsdp_param *param, const void *data, float *whole)
{
    fsdp_box box;
    int64_t at[FSDP_MAX_DIMS], i = 0;
    (void)fsdp_param_shard(param, &box);
    if (fsdp_box_count(&box) == 0)
        return;
    memcpy(at, box.lo, sizeof at);
    do {
        float *to = &whole[fsdp_box_position(box.ndim, fsdp_param_describe(param).shape, at)];
        *to = data ? value_at(param, data, i++) : 0;
    } while (next_element(&box, at));
}

void keep_shard(fsdp_param *param, float *whole)
{
    keep_rows(param, fsdp_param_shard(param, NULL), whole);
}

void keep_shard_grad(fsdp_param *param, float *whole)
{
    keep_rows(param, fsdp_param_shard_grad(param), whole);
}
