/* See trainer.h: gathered values, gradients, and the sums that they must become. */
#include "tests/random/trainer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- elements ----------------------------------------------------------------------------------- */

/* The place in the whole tensor of the i-th element that this rank holds: of its box, or of its run. */
static int64_t offset_of(const trainer *t, const case_param *param, const fsdp_box *box, int64_t i)
{
    if (t->c->is_flat)
        return box->lo[0] + i;
    int64_t offset = 0, stride = 1;
    for (int d = param->ndim - 1; d >= 0; d--) {
        offset += (i % box->len[d] + box->lo[d]) * stride;
        i /= box->len[d];
        stride *= param->shape[d];
    }
    return offset;
}

/* The error that a mean of values of that dtype may have, relative to their sizes. */
static double tolerance_of(fsdp_dtype dtype)
{
    if (dtype == FSDP_BF16)
        return 1.0 / 100;
    if (dtype == FSDP_F16)
        return 1.0 / 700;
    return dtype == FSDP_F64 ? 1e-6 : 2e-6;
}

static void report_wrong(trainer *t, int i, const char *what)
{
    if (t->wrong++ < 5)
        printf("wrong: rank %d, step %d, microbatch %d, %s of %s: %s\n", t->rank, t->step,
               t->microbatch, t->c->params[i].name, t->c->units[t->c->params[i].unit].name, what);
}

/* --- gathered ----------------------------------------------------------------------------------- */

static fsdp_status compare_with_shard(trainer *t, int i, const char *data, fsdp_dtype dtype,
                                      fsdp_error *err)
{
    const case_param *param = &t->c->params[i];
    size_t size = fsdp_dtype_size(dtype);
    fsdp_box box;
    const void *shard = fsdp_param_shard(t->net->params[i], &box);
    int64_t count = fsdp_box_count(&box);
    char *cast = malloc(size * (size_t)count + 1);
    if (!cast)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "no memory for a shard");
    if (count > 0)
        fsdp_cast(cast, dtype, shard, param->dtype, (size_t)count);
    bool is_same = true;
    for (int64_t e = 0; e < count; e++)
        is_same &= memcmp(cast + size * (size_t)e,
                          data + size * (size_t)offset_of(t, param, &box, e), size) == 0;
    if (!is_same)
        report_wrong(t, i, "what is gathered is not what the shard holds");
    free(cast);
    return FSDP_OK;
}

static fsdp_status see_param(trainer *t, int i, fsdp_error *err)
{
    fsdp_param *param = t->net->params[i];
    const size_t count = (size_t)t->c->params[i].count;
    const char *data = fsdp_param_data(param);
    if (!data) {
        FSDP_TRY(fsdp_param_error(param, err));
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' is not gathered", fsdp_param_name(param));
    }
    fsdp_dtype dtype = fsdp_param_describe(param).data_dtype;
    if (t->as_rank == t->rank)
        t->forward_hash = hash_bytes(t->forward_hash, data, count * fsdp_dtype_size(dtype));
    fsdp_cast(t->grads[i].data, FSDP_F64, data, dtype, count);
    return compare_with_shard(t, i, data, dtype, err);
}

fsdp_status trainer_see_unit(trainer *t, int unit, fsdp_error *err)
{
    for (int i = 0; i < t->c->param_count; i++)
        if (t->c->params[i].unit == unit)
            FSDP_TRY(see_param(t, i, err));
    return FSDP_OK;
}

/* --- gradients ---------------------------------------------------------------------------------- */

void trainer_forget_grads(trainer *t)
{
    for (int i = 0; i < t->c->param_count; i++) {
        size_t size = sizeof(double) * (size_t)t->c->params[i].count;
        memset(t->grads[i].sum, 0, size);
        memset(t->grads[i].size, 0, size);
        t->grads[i].is_given = false;
    }
}

/* Ranks use other parameters only where units allow it. */
static bool is_unused(const trainer *t, int i, int rank, uint64_t seed)
{
    if (t->c->units[t->c->params[i].unit].takes_unused)
        return mix(seed, (uint64_t)rank) % 100 < 30;
    return seed % 100 < 12;
}

/* The first to touch it may overwrite it. */
static fsdp_status add_grad(trainer *t, int i, const void *grad, bool is_raw, fsdp_error *err)
{
    fsdp_param *param = t->net->params[i];
    const size_t count = (size_t)t->c->params[i].count;
    void *own = is_raw ? fsdp_param_grad_raw(param) : fsdp_param_grad(param);
    if (!own) {
        FSDP_TRY(fsdp_param_error(param, err));
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' has no gradient", fsdp_param_name(param));
    }
    fsdp_dtype dtype = t->c->params[i].grad_dtype;
    dtype = dtype ? dtype : fsdp_param_describe(param).data_dtype;
    if (is_raw) {
        memcpy(own, grad, count * fsdp_dtype_size(dtype));
        return FSDP_OK;
    }
    for (size_t e = 0; e < count; e++) {
        double sum, more;
        size_t at = e * fsdp_dtype_size(dtype);
        fsdp_cast(&sum, FSDP_F64, (char *)own + at, dtype, 1);
        fsdp_cast(&more, FSDP_F64, (const char *)grad + at, dtype, 1);
        sum += more;
        fsdp_cast((char *)own + at, dtype, &sum, FSDP_F64, 1);
    }
    return FSDP_OK;
}

/* One rank's gradient, as narrow as it will be; values: scratch. */
static void make_grad(trainer *t, int i, int rank, uint64_t seed, fsdp_dtype dtype, double *values,
                      void *grad_out)
{
    random_grad *grad = &t->grads[i];
    const int64_t count = t->c->params[i].count;
    for (int64_t e = 0; e < count; e++) {
        uint64_t bits = mix(seed, (uint64_t)e * 64 + (uint64_t)rank);
        double thrown = (double)(bits >> 11) * 0x1p-52 - 1;
        values[e] = (double)(float)(thrown + 0.125 * grad->data[e]);
    }
    fsdp_cast(grad_out, dtype, values, FSDP_F64, (size_t)count);
    fsdp_cast(values, FSDP_F64, grad_out, dtype, (size_t)count);
    for (int64_t e = 0; e < count; e++) {
        grad->sum[e] += values[e];
        grad->size[e] += fabs(values[e]);
    }
    grad->is_given = true;
}

static fsdp_status give_param(trainer *t, int i, fsdp_error *err)
{
    const training_case *c = t->c;
    const case_param *param = &c->params[i];
    uint64_t when = (uint64_t)(t->step * 16 + t->microbatch) * 4096 + (uint64_t)(t->gives * 64 + i);
    uint64_t seed = dice_for(c->seed, DICE_GRADS, when).state;
    bool is_raw = (seed >> 20) % 100 < 15 && !t->grads[i].is_touched;
    t->grads[i].is_touched = true;
    fsdp_dtype dtype =
        param->grad_dtype ? param->grad_dtype : fsdp_param_describe(t->net->params[i]).data_dtype;
    void *grad = malloc((size_t)param->count * fsdp_dtype_size(dtype));
    double *values = malloc((size_t)param->count * sizeof *values);
    fsdp_status status = FSDP_OK;
    if (!grad || !values)
        status = fsdp_fail(err, FSDP_ERR_LIMIT, "no memory for a gradient");
    for (int rank = 0; rank < c->ranks && status == FSDP_OK; rank++) {
        bool is_ours = rank == t->as_rank;
        if ((c->is_alone && !is_ours) || is_unused(t, i, rank, seed))
            continue;
        make_grad(t, i, rank, seed, dtype, values, grad);
        if (is_ours)
            status = add_grad(t, i, grad, is_raw, err);
    }
    free(values);
    free(grad);
    return status;
}

fsdp_status trainer_give_grads(trainer *t, int unit, fsdp_error *err)
{
    for (int i = 0; i < t->c->param_count; i++)
        if (t->c->params[i].unit == unit && !t->c->params[i].is_frozen)
            FSDP_TRY(give_param(t, i, err));
    t->gives++;
    return FSDP_OK;
}

/* --- reduced ------------------------------------------------------------------------------------ */

static double tolerance_of_param(const trainer *t, int i)
{
    const case_param *param = &t->c->params[i];
    fsdp_dtype data = fsdp_param_describe(t->net->params[i]).data_dtype;
    double most = tolerance_of(case_reduce_dtype(t->c, param));
    most = fmax(most, tolerance_of(param->dtype));
    if (t->c->hook)
        most = fmax(most, tolerance_of(FSDP_BF16));
    return fmax(most, tolerance_of(param->grad_dtype ? param->grad_dtype : data));
}

/* Small ones vanish in f16. */
static double least_of_param(const trainer *t, int i)
{
    const case_param *param = &t->c->params[i];
    bool is_f16 = case_reduce_dtype(t->c, param) == FSDP_F16 || param->dtype == FSDP_F16;
    return is_f16 || t->c->hook ? 1e-5 : 1e-7;
}

static void check_grad(trainer *t, int i)
{
    const case_param *param = &t->c->params[i];
    const double asked = t->c->units[param->unit].divide, divide = asked > 0 ? asked : t->c->ranks;
    const double relative = 2 * tolerance_of_param(t, i), least = least_of_param(t, i);
    fsdp_box box;
    fsdp_param_shard(t->net->params[i], &box);
    const char *grad = fsdp_param_shard_grad(t->net->params[i]);
    const int64_t count = fsdp_box_count(&box);
    if (!grad && count > 0 && t->grads[i].is_given)
        report_wrong(t, i, "no gradient was reduced");
    for (int64_t e = 0; grad && e < count; e++) {
        char what[96];
        double got;
        int64_t at = offset_of(t, param, &box, e);
        double want = t->grads[i].sum[at] / divide;
        fsdp_cast(&got, FSDP_F64, grad + (size_t)e * fsdp_dtype_size(param->dtype), param->dtype,
                  1);
        if (fabs(got - want) <= relative * t->grads[i].size[at] / divide + least)
            continue;
        snprintf(what, sizeof what, "gradient %lld is %g, not %g", (long long)at, got, want);
        report_wrong(t, i, what);
        return;
    }
}

void trainer_check_grads(trainer *t)
{
    for (int i = 0; i < t->c->param_count; i++)
        if (!t->c->params[i].is_frozen)
            check_grad(t, i);
}

/* --- numbers of what this rank holds ------------------------------------------------------------- */

/* Every element is on ranks / shards of the ranks: times the shards, all ranks together have it `ranks`
 * times, and so has one rank alone. */
static uint64_t hash_elements(const trainer *t, int i, int kind, const void *data, fsdp_dtype dtype,
                              bool is_scalar)
{
    const case_param *param = &t->c->params[i];
    const size_t size = fsdp_dtype_size(dtype);
    uint64_t sum = 0, times = is_scalar ? 1 : (uint64_t)case_shards(t->c, param);
    fsdp_box box;
    fsdp_param_shard(t->net->params[i], &box);
    int64_t count = is_scalar ? 1 : fsdp_box_count(&box);
    for (int64_t e = 0; data && e < count; e++) {
        uint64_t bits = 0;
        int64_t at = is_scalar ? 0 : offset_of(t, param, &box, e);
        memcpy(&bits, (const char *)data + (size_t)e * size, size);
        sum += mix(mix((uint64_t)(i * 8 + kind), (uint64_t)at), bits);
    }
    return sum * (t->c->is_alone ? (uint64_t)t->c->ranks : times);
}

uint64_t trainer_hash_grads(const trainer *t)
{
    uint64_t sum = 0;
    for (int i = 0; i < t->c->param_count; i++)
        if (!t->c->params[i].is_frozen)
            sum += hash_elements(t, i, 0, fsdp_param_shard_grad(t->net->params[i]),
                                 t->c->params[i].dtype, false);
    return sum;
}

/* Optimizers' state, too; of flat parameters only at the end, in the whole state. */
uint64_t trainer_hash_weights(const trainer *t)
{
    uint64_t sum = 0;
    for (int i = 0; i < t->c->param_count; i++) {
        fsdp_param *param = t->net->params[i];
        fsdp_optim_tensor state[FSDP_OPTIM_TENSORS];
        sum += hash_elements(t, i, 1, fsdp_param_shard(param, NULL), t->c->params[i].dtype, false);
        size_t n = t->c->is_flat ? 0 : fsdp_optim_describe_state(t->net->toy.optim, param, state);
        for (size_t k = 0; k < n; k++)
            sum +=
                hash_elements(t, i, 2 + (int)k, state[k].data, state[k].dtype, state[k].ndim == 0);
    }
    return sum;
}
