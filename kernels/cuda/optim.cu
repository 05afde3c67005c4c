/*
 * Steps of AdamW and SGD, many tensors in one launch. The arithmetic is that of kernels/train/real_loops.h:
 * the same operations in the same order, none of them fused. See cuda_kernels.h.
 */
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/real.cuh"
#include "kernels/train/factors.h"

/* One tensor; all pointers are to its elements. master and velocities may be NULL. */
struct optim_item {
    uint8_t *param, *weights; /* weights: param, or the master weights */
    const uint8_t *grad;
    uint8_t *moments[2];
    uint64_t count;
    uint32_t first_tile;
    uint8_t param_type, weight_type, grad_type, moment_type;
    uint32_t factors; /* index in the table */
};

/* The factors of a batch: lists have few groups of parameters, in any order. */
enum { MOST_FACTORS = 16 };
template <typename factors> struct factor_table {
    factors rows[MOST_FACTORS];
};

template <uint32_t MOST>
using adamw_batch = fsdp_batch<factor_table<fsdp_adamw_factors>, optim_item, MOST>;
template <uint32_t MOST>
using sgd_batch = fsdp_batch<factor_table<fsdp_sgd_factors>, optim_item, MOST>;

/* One loop, so that the code of a write is there once: most tensors have no master weights. */
template <typename real>
FSDP_DEVICE void write_weights(const optim_item &item, fsdp_unit unit,
                               const real numbers[FSDP_UNIT])
{
    const int places = item.param == item.weights ? 1 : 2;
#pragma unroll 1
    for (int i = 0; i < places; i++)
        fsdp_write(i == 0 ? item.weights : item.param, i == 0 ? item.weight_type : item.param_type,
                   unit, numbers);
}

/* --- AdamW ------------------------------------------------------------------------------------ */

template <typename real> FSDP_DEVICE real between(real a, real b, real weight)
{
    return weight < (real)0.5 ? a + weight * (b - a) : b - (b - a) * (1 - weight);
}

template <typename real>
FSDP_DEVICE void adamw_unit(const optim_item &item, const fsdp_adamw_factors &factors,
                            fsdp_unit unit)
{
    const real grad_scale = (real)factors.grad_scale, keep = (real)factors.keep;
    const real weight1 = (real)factors.weight1, beta2 = (real)factors.beta2;
    const real weight2 = (real)factors.weight2, root_bias2 = (real)factors.root_bias2;
    const real eps = (real)factors.eps, step_size = (real)factors.step_size;
    real p[FSDP_UNIT], g[FSDP_UNIT], m[FSDP_UNIT], v[FSDP_UNIT];
    fsdp_read(g, item.grad, item.grad_type, unit);
    fsdp_read(m, item.moments[0], item.moment_type, unit);
    fsdp_read(v, item.moments[1], item.moment_type, unit);
    fsdp_read(p, item.weights, item.weight_type, unit);
#pragma unroll
    for (int i = 0; i < FSDP_UNIT; i++) {
        real x = g[i] * grad_scale;
        real mean = between(m[i], x, weight1);
        real square = v[i] * beta2 + weight2 * x * x;
        real spread = fsdp_root(square) / root_bias2 + eps;
        p[i] = fsdp_settled(p[i] * keep - step_size * mean / spread);
        m[i] = fsdp_settled(mean);
        v[i] = fsdp_settled(square);
    }
    fsdp_write(item.moments[0], item.moment_type, unit, m);
    fsdp_write(item.moments[1], item.moment_type, unit, v);
    write_weights(item, unit, p);
}

template <typename real, uint32_t MOST>
FSDP_KERNEL(FSDP_THREADS, 1) step_adamw(FSDP_PARAMS(adamw_batch<MOST>) batch)
{
    const optim_item &item = fsdp_find_item(batch.items, batch.n);
    fsdp_line line(item.weights, item.weight_type, item.count, item.first_tile);
#pragma unroll 1
    for (fsdp_unit unit; line.next(&unit);)
        adamw_unit<real>(item, batch.shared.rows[item.factors], unit);
}

/* --- SGD -------------------------------------------------------------------------------------- */

template <typename real>
FSDP_DEVICE void sgd_unit(const optim_item &item, const fsdp_sgd_factors &factors, fsdp_unit unit)
{
    const real grad_scale = (real)factors.grad_scale, decay = (real)factors.weight_decay;
    const real keep = (real)factors.momentum, weight = (real)factors.weight, lr = (real)factors.lr;
    real p[FSDP_UNIT], g[FSDP_UNIT], velocity[FSDP_UNIT] = {};
    fsdp_read(g, item.grad, item.grad_type, unit);
    fsdp_read(p, item.weights, item.weight_type, unit);
    if (factors.has_momentum && !factors.is_first)
        fsdp_read(velocity, item.moments[0], item.moment_type, unit);
#pragma unroll
    for (int i = 0; i < FSDP_UNIT; i++) {
        real x = g[i] * grad_scale;
        if (decay != 0)
            x = x + decay * p[i];
        if (factors.has_momentum) {
            real next = factors.is_first ? x : velocity[i] * keep + weight * x;
            velocity[i] = fsdp_settled(next);
            x = factors.nesterov ? x + keep * next : next;
        }
        p[i] = fsdp_settled(p[i] - lr * x);
    }
    if (factors.has_momentum)
        fsdp_write(item.moments[0], item.moment_type, unit, velocity);
    write_weights(item, unit, p);
}

template <typename real, uint32_t MOST>
FSDP_KERNEL(FSDP_THREADS, 2) step_sgd(FSDP_PARAMS(sgd_batch<MOST>) batch)
{
    const optim_item &item = fsdp_find_item(batch.items, batch.n);
    fsdp_line line(item.weights, item.weight_type, item.count, item.first_tile);
#pragma unroll 1
    for (fsdp_unit unit; line.next(&unit);)
        sgd_unit<real>(item, batch.shared.rows[item.factors], unit);
}

/* --- the host's side -------------------------------------------------------------------------- */

static bool are_equal(const fsdp_adamw_factors &a, const fsdp_adamw_factors &b)
{
    return memcmp(&a, &b, sizeof a) == 0;
}

/* Other than those of AdamW, these have gaps between them. */
static bool are_equal(const fsdp_sgd_factors &a, const fsdp_sgd_factors &b)
{
    return a.grad_scale == b.grad_scale && a.weight_decay == b.weight_decay &&
           a.momentum == b.momentum && a.weight == b.weight && a.lr == b.lr &&
           a.has_momentum == b.has_momentum && a.is_first == b.is_first && a.nesterov == b.nesterov;
}

static fsdp_adamw_factors factors_of(const fsdp_adamw_step *step)
{
    return fsdp_adamw_factors_of(step);
}

static fsdp_sgd_factors factors_of(const fsdp_sgd_step *step)
{
    return fsdp_sgd_factors_of(step);
}

/* Index of the factors in the table of the batch; a full table is launched first. */
template <typename batches, typename factors>
static int find_factors(batches *all, uint32_t *used, const factors &wanted, uint32_t *index_out)
{
    factors *rows = all->held.shared.rows;
    for (*index_out = 0; *index_out < *used; ++*index_out) {
        if (are_equal(rows[*index_out], wanted))
            return FSDP_CUDA_OK;
    }
    if (*used == MOST_FACTORS) {
        int error = all->launch();
        if (error)
            return error;
        *used = *index_out = 0;
    }
    rows[(*used)++] = wanted;
    return FSDP_CUDA_OK;
}

static optim_item item_of(const fsdp_optim_tensors &tensors)
{
    optim_item item = {};
    item.param = (uint8_t *)tensors.param;
    item.weights = tensors.master ? (uint8_t *)tensors.master : item.param;
    item.grad = (const uint8_t *)tensors.grad;
    item.moments[0] = (uint8_t *)tensors.moments[0];
    item.moments[1] = (uint8_t *)tensors.moments[1];
    item.count = tensors.count;
    item.param_type = (uint8_t)tensors.param_type;
    item.weight_type = (uint8_t)(tensors.master ? FSDP_F32 : tensors.param_type);
    item.grad_type = (uint8_t)tensors.grad_type;
    item.moment_type = (uint8_t)tensors.moment_type;
    return item;
}

/* The tensors that compute in f64, or all others. */
template <typename factors, typename step>
static int step_some(const fsdp_list_grid<factor_table<factors>, optim_item> &grid,
                     bool is_wide, const fsdp_optim_tensors *tensors, size_t n, const step *steps)
{
    fsdp_batches<factor_table<factors>, optim_item> batches(grid, {});
    const step *last = nullptr;
    factors wanted = {};
    uint32_t used = 0;
    for (size_t i = 0; i < n; i++) {
        optim_item item = item_of(tensors[i]);
        if ((item.weight_type == FSDP_F64) != is_wide)
            continue;
        if (!last || memcmp(last, &steps[i], sizeof *last) != 0)
            wanted = factors_of(&steps[i]);
        last = &steps[i];
        int error = find_factors(&batches, &used, wanted, &item.factors);
        if (!error)
            error = batches.add(item, fsdp_line_tiles(item.count));
        if (error)
            return error;
    }
    return batches.launch();
}

/* The two instances of a kernel for this type of the arithmetic. */
template <typename real> static fsdp_list_grid<factor_table<fsdp_adamw_factors>, optim_item> adamw_grid(void *stream)
{
    constexpr uint32_t MANY = fsdp_many<factor_table<fsdp_adamw_factors>, optim_item>();
    return {step_adamw<real, FSDP_FEW>, step_adamw<real, MANY>, FSDP_THREADS, stream};
}

template <typename real> static fsdp_list_grid<factor_table<fsdp_sgd_factors>, optim_item> sgd_grid(void *stream)
{
    constexpr uint32_t MANY = fsdp_many<factor_table<fsdp_sgd_factors>, optim_item>();
    return {step_sgd<real, FSDP_FEW>, step_sgd<real, MANY>, FSDP_THREADS, stream};
}

int fsdp_cuda_adamw(const fsdp_optim_tensors *tensors, size_t n, const fsdp_adamw_step *steps,
                    void *stream)
{
    int error = step_some<fsdp_adamw_factors>(adamw_grid<float>(stream), false, tensors, n, steps);
    return error ? error
                 : step_some<fsdp_adamw_factors>(adamw_grid<double>(stream), true, tensors, n, steps);
}

int fsdp_cuda_sgd(const fsdp_optim_tensors *tensors, size_t n, const fsdp_sgd_step *steps,
                  void *stream)
{
    int error = step_some<fsdp_sgd_factors>(sgd_grid<float>(stream), false, tensors, n, steps);
    return error ? error : step_some<fsdp_sgd_factors>(sgd_grid<double>(stream), true, tensors, n, steps);
}
