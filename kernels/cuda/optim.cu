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

enum { STEP_EACH = 8, STEP_TILE = FSDP_THREADS * STEP_EACH }; /* elements */
using step_tile = fsdp_tile<STEP_TILE>;

/* --- whole tiles ------------------------------------------------------------------------------ */

/* Types that whole tiles are taken with, by vectors of LENGTH elements, a thread's VECTORS of each
 * tensor. */
template <uint32_t WEIGHT, uint32_t GRAD, uint32_t MOMENT> struct step_types {
    static constexpr uint32_t weight = WEIGHT, grad = GRAD, moment = MOMENT;
    static constexpr bool IS_NARROW = WEIGHT != FSDP_F32 && GRAD != FSDP_F32 && MOMENT != FSDP_F32;
    static constexpr int LENGTH = IS_NARROW ? 8 : 4, VECTORS = STEP_EACH / LENGTH;
};

FSDP_DEVICE bool is_plain(const optim_item &item, const step_tile &tile)
{
    bool has_usual_param =
        item.param == item.weights || item.param_type == FSDP_BF16 || item.param_type == FSDP_F16;
    return has_usual_param && tile.is_whole() && tile.is_aligned(item.weights, item.weight_type) &&
           tile.is_aligned(item.param, item.param_type) &&
           tile.is_aligned(item.moments[0], item.moment_type) &&
           tile.is_aligned(item.moments[1], item.moment_type);
}

/* The gradient of an odd number of ranks begins anywhere in the output of a reduction: its vectors are
 * shifted then. Fewer are loaded at once, as a shifted one is two. */
template <typename types, bool IS_SHIFTED> struct step_loads {
    static constexpr int AT_ONCE = IS_SHIFTED ? 1 : types::VECTORS;
    using grad = fsdp_source<types::grad, types::LENGTH, IS_SHIFTED>;
};

/* Calls take(types) for the item's types; false when whole tiles are not taken with those. */
template <typename taker> FSDP_DEVICE bool take_with_types(const optim_item &item, taker take)
{
    switch (fsdp_types(item.weight_type, item.grad_type, item.moment_type)) {
    case fsdp_types(FSDP_F32, FSDP_F32, FSDP_F32):
        take(step_types<FSDP_F32, FSDP_F32, FSDP_F32>());
        return true;
    case fsdp_types(FSDP_F32, FSDP_BF16, FSDP_F32):
        take(step_types<FSDP_F32, FSDP_BF16, FSDP_F32>());
        return true;
    case fsdp_types(FSDP_F32, FSDP_F16, FSDP_F32):
        take(step_types<FSDP_F32, FSDP_F16, FSDP_F32>());
        return true;
    case fsdp_types(FSDP_BF16, FSDP_BF16, FSDP_F32):
        take(step_types<FSDP_BF16, FSDP_BF16, FSDP_F32>());
        return true;
    case fsdp_types(FSDP_BF16, FSDP_BF16, FSDP_BF16):
        take(step_types<FSDP_BF16, FSDP_BF16, FSDP_BF16>());
        return true;
    default: return false;
    }
}

/* To the weights, and where these are master weights, to the parameter. */
template <uint32_t TYPE, int LENGTH>
FSDP_DEVICE void store_weights(const optim_item &item, int64_t at, const float numbers[LENGTH])
{
    fsdp_store<TYPE, LENGTH>(item.weights, at, numbers);
    if (item.param == item.weights)
        return;
    if (item.param_type == FSDP_BF16)
        fsdp_store<FSDP_BF16, LENGTH>(item.param, at, numbers);
    else
        fsdp_store<FSDP_F16, LENGTH>(item.param, at, numbers);
}

/* --- one element ------------------------------------------------------------------------------ */

template <typename real>
FSDP_DEVICE void write_weight(const optim_item &item, int64_t at, real number)
{
    fsdp_write(item.weights, item.weight_type, at, number);
    if (item.param != item.weights)
        fsdp_write(item.param, item.param_type, at, number);
}

/* The factor of clipping lies in device memory: no host has seen it. */
template <typename factors> FSDP_DEVICE bool is_skipped(const factors &step)
{
    return step.clip && *step.clip == FSDP_SKIPPED;
}

template <typename factors> FSDP_DEVICE double grad_scale_of(const factors &step)
{
    return step.clip ? step.grad_scale * *step.clip : step.grad_scale;
}

/* --- AdamW ------------------------------------------------------------------------------------ */

template <typename real> struct adamw_numbers {
    real grad_scale, keep, weight1, beta2, weight2, root_bias2, eps, step_size;

    __device__ __forceinline__ explicit adamw_numbers(const fsdp_adamw_factors &from)
        : grad_scale((real)grad_scale_of(from)), keep((real)from.keep), weight1((real)from.weight1),
          beta2((real)from.beta2), weight2((real)from.weight2), root_bias2((real)from.root_bias2),
          eps((real)from.eps), step_size((real)from.step_size)
    {
    }
};

template <typename real> FSDP_DEVICE real between(real a, real b, real weight)
{
    return weight < (real)0.5 ? a + weight * (b - a) : b - (b - a) * (1 - weight);
}

/* Changes parameter and moments. */
template <typename real>
FSDP_DEVICE void adamw_one(const adamw_numbers<real> &by, real g, real *p, real *m, real *v)
{
    real x = g * by.grad_scale;
    real mean = between(*m, x, by.weight1);
    real square = *v * by.beta2 + by.weight2 * x * x;
    real spread = fsdp_root(square) / by.root_bias2 + by.eps;
    *p = fsdp_settled(*p * by.keep - by.step_size * mean / spread);
    *m = fsdp_settled(mean);
    *v = fsdp_settled(square);
}

template <typename types, bool IS_SHIFTED>
FSDP_DEVICE void adamw_vectors(const optim_item &item, const adamw_numbers<float> &by,
                               const step_tile &tile, int first)
{
    using loads = step_loads<types, IS_SHIFTED>;
    constexpr int LENGTH = types::LENGTH, AT_ONCE = loads::AT_ONCE;
    fsdp_vector<types::weight, LENGTH> weights[AT_ONCE];
    fsdp_vector<types::moment, LENGTH> moments[2][AT_ONCE];
    typename loads::grad grads[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        const int64_t at = tile.vector_at(first + i, LENGTH);
        grads[i].load(item.grad, at);
        fsdp_load(&moments[0][i], item.moments[0], at);
        fsdp_load(&moments[1][i], item.moments[1], at);
        fsdp_load(&weights[i], item.weights, at);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        const int64_t at = tile.vector_at(first + i, LENGTH);
        const fsdp_vector<types::grad, LENGTH> g = grads[i].take(item.grad, at);
        float p[LENGTH], m[LENGTH], v[LENGTH];
#pragma unroll
        for (int k = 0; k < LENGTH; k++) {
            p[k] = fsdp_get(weights[i], k);
            m[k] = fsdp_get(moments[0][i], k);
            v[k] = fsdp_get(moments[1][i], k);
            adamw_one(by, fsdp_get(g, k), &p[k], &m[k], &v[k]);
        }
        fsdp_store<types::moment, LENGTH>(item.moments[0], at, m);
        fsdp_store<types::moment, LENGTH>(item.moments[1], at, v);
        store_weights<types::weight, LENGTH>(item, at, p);
    }
}

template <typename real>
FSDP_DEVICE void adamw_elements(const optim_item &item, const adamw_numbers<real> &by,
                                const step_tile &tile)
{
    tile.each([&](int64_t at) {
        const uint64_t g_code = fsdp_code_at(item.grad, item.grad_type, at);
        const uint64_t m_code = fsdp_code_at(item.moments[0], item.moment_type, at);
        const uint64_t v_code = fsdp_code_at(item.moments[1], item.moment_type, at);
        const uint64_t p_code = fsdp_code_at(item.weights, item.weight_type, at);
        real m = fsdp_number<real>(m_code, item.moment_type);
        real v = fsdp_number<real>(v_code, item.moment_type);
        real p = fsdp_number<real>(p_code, item.weight_type);
        adamw_one(by, fsdp_number<real>(g_code, item.grad_type), &p, &m, &v);
        fsdp_write(item.moments[0], item.moment_type, at, m);
        fsdp_write(item.moments[1], item.moment_type, at, v);
        write_weight(item, at, p);
    });
}

FSDP_DEVICE bool adamw_plain(const optim_item &item, const adamw_numbers<float> &by,
                             const step_tile &tile)
{
    return is_plain(item, tile) && take_with_types(item, [&](auto of) {
               using types = decltype(of);
               if (tile.is_aligned(item.grad, item.grad_type)) {
                   adamw_vectors<types, false>(item, by, tile, 0);
                   return;
               }
#pragma unroll 1
               for (int i = 0; i < types::VECTORS; i++)
                   adamw_vectors<types, true>(item, by, tile, i);
           });
}

/* f64 has no whole tiles. */
FSDP_DEVICE bool adamw_plain(const optim_item &, const adamw_numbers<double> &, const step_tile &)
{
    return false;
}

template <typename real, uint32_t MOST>
FSDP_KERNEL(FSDP_THREADS, 4)
step_adamw(FSDP_PARAMS(adamw_batch<MOST>) batch)
{
    const optim_item &item = fsdp_find_item(batch.items, batch.n);
    const fsdp_adamw_factors &factors = batch.shared.rows[item.factors];
    if (is_skipped(factors))
        return;
    const adamw_numbers<real> by(factors);
    const step_tile tile(item.weights, item.weight_type, item.count, item.first_tile);
    if (!adamw_plain(item, by, tile))
        adamw_elements<real>(item, by, tile);
}

/* --- SGD -------------------------------------------------------------------------------------- */

template <typename real> struct sgd_numbers {
    real grad_scale, decay, keep, weight, lr;
    bool has_momentum, is_first, nesterov;

    __device__ __forceinline__ explicit sgd_numbers(const fsdp_sgd_factors &from)
        : grad_scale((real)grad_scale_of(from)), decay((real)from.weight_decay),
          keep((real)from.momentum), weight((real)from.weight), lr((real)from.lr),
          has_momentum(from.has_momentum), is_first(from.is_first), nesterov(from.nesterov)
    {
    }
};

/* Changes parameter and momentum. */
template <typename real>
FSDP_DEVICE void sgd_one(const sgd_numbers<real> &by, real g, real *p, real *velocity)
{
    real x = g * by.grad_scale;
    if (by.decay != 0)
        x = x + by.decay * *p;
    if (by.has_momentum) {
        real next = by.is_first ? x : *velocity * by.keep + by.weight * x;
        *velocity = fsdp_settled(next);
        x = by.nesterov ? x + by.keep * next : next;
    }
    *p = fsdp_settled(*p - by.lr * x);
}

template <typename types, bool IS_SHIFTED>
FSDP_DEVICE void sgd_vectors(const optim_item &item, const sgd_numbers<float> &by,
                             const step_tile &tile, int first)
{
    using loads = step_loads<types, IS_SHIFTED>;
    constexpr int LENGTH = types::LENGTH, AT_ONCE = loads::AT_ONCE;
    const bool reads_momentum = by.has_momentum && !by.is_first;
    fsdp_vector<types::weight, LENGTH> weights[AT_ONCE];
    fsdp_vector<types::moment, LENGTH> velocities[AT_ONCE] = {};
    typename loads::grad grads[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        const int64_t at = tile.vector_at(first + i, LENGTH);
        grads[i].load(item.grad, at);
        fsdp_load(&weights[i], item.weights, at);
        if (reads_momentum)
            fsdp_load(&velocities[i], item.moments[0], at);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        const int64_t at = tile.vector_at(first + i, LENGTH);
        const fsdp_vector<types::grad, LENGTH> g = grads[i].take(item.grad, at);
        float p[LENGTH], velocity[LENGTH];
#pragma unroll
        for (int k = 0; k < LENGTH; k++) {
            p[k] = fsdp_get(weights[i], k);
            velocity[k] = fsdp_get(velocities[i], k);
            sgd_one(by, fsdp_get(g, k), &p[k], &velocity[k]);
        }
        if (by.has_momentum)
            fsdp_store<types::moment, LENGTH>(item.moments[0], at, velocity);
        store_weights<types::weight, LENGTH>(item, at, p);
    }
}

template <typename real>
FSDP_DEVICE void sgd_elements(const optim_item &item, const sgd_numbers<real> &by,
                              const step_tile &tile)
{
    const bool reads_momentum = by.has_momentum && !by.is_first;
    tile.each([&](int64_t at) {
        const uint64_t g_code = fsdp_code_at(item.grad, item.grad_type, at);
        const uint64_t p_code = fsdp_code_at(item.weights, item.weight_type, at);
        real velocity = 0;
        if (reads_momentum)
            velocity = fsdp_read<real>(item.moments[0], item.moment_type, at);
        real p = fsdp_number<real>(p_code, item.weight_type);
        sgd_one(by, fsdp_number<real>(g_code, item.grad_type), &p, &velocity);
        if (by.has_momentum)
            fsdp_write(item.moments[0], item.moment_type, at, velocity);
        write_weight(item, at, p);
    });
}

FSDP_DEVICE bool sgd_plain(const optim_item &item, const sgd_numbers<float> &by,
                           const step_tile &tile)
{
    return is_plain(item, tile) && take_with_types(item, [&](auto of) {
               using types = decltype(of);
               if (tile.is_aligned(item.grad, item.grad_type)) {
                   sgd_vectors<types, false>(item, by, tile, 0);
                   return;
               }
#pragma unroll 1
               for (int i = 0; i < types::VECTORS; i++)
                   sgd_vectors<types, true>(item, by, tile, i);
           });
}

FSDP_DEVICE bool sgd_plain(const optim_item &, const sgd_numbers<double> &, const step_tile &)
{
    return false;
}

template <typename real, uint32_t MOST>
FSDP_KERNEL(FSDP_THREADS, 4)
step_sgd(FSDP_PARAMS(sgd_batch<MOST>) batch)
{
    const optim_item &item = fsdp_find_item(batch.items, batch.n);
    const fsdp_sgd_factors &factors = batch.shared.rows[item.factors];
    if (is_skipped(factors))
        return;
    const sgd_numbers<real> by(factors);
    const step_tile tile(item.weights, item.weight_type, item.count, item.first_tile);
    if (!sgd_plain(item, by, tile))
        sgd_elements<real>(item, by, tile);
}

/* --- the host's side -------------------------------------------------------------------------- */

static bool are_equal(const fsdp_adamw_factors &a, const fsdp_adamw_factors &b)
{
    return memcmp(&a, &b, sizeof a) == 0;
}

/* Other than those of AdamW, these have gaps between them. */
static bool are_equal(const fsdp_sgd_factors &a, const fsdp_sgd_factors &b)
{
    return a.grad_scale == b.grad_scale && a.clip == b.clip && a.weight_decay == b.weight_decay &&
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
static int step_some(const fsdp_list_grid<factor_table<factors>, optim_item> &grid, bool is_wide,
                     const fsdp_optim_tensors *tensors, size_t n, const step *steps)
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
            error = batches.add(item,
                                fsdp_tiles<STEP_TILE>(item.weights, item.weight_type, item.count));
        if (error)
            return error;
    }
    return batches.launch();
}

/* The two instances of a kernel for this type of the arithmetic. */
template <typename real>
static fsdp_list_grid<factor_table<fsdp_adamw_factors>, optim_item> adamw_grid(void *stream)
{
    constexpr uint32_t MANY = fsdp_many<factor_table<fsdp_adamw_factors>, optim_item>();
    return {step_adamw<real, FSDP_FEW>, step_adamw<real, MANY>, FSDP_THREADS, stream};
}

template <typename real>
static fsdp_list_grid<factor_table<fsdp_sgd_factors>, optim_item> sgd_grid(void *stream)
{
    constexpr uint32_t MANY = fsdp_many<factor_table<fsdp_sgd_factors>, optim_item>();
    return {step_sgd<real, FSDP_FEW>, step_sgd<real, MANY>, FSDP_THREADS, stream};
}

int fsdp_cuda_adamw(const fsdp_optim_tensors *tensors, size_t n, const fsdp_adamw_step *steps,
                    void *stream)
{
    int error = step_some<fsdp_adamw_factors>(adamw_grid<float>(stream), false, tensors, n, steps);
    return error
               ? error
               : step_some<fsdp_adamw_factors>(adamw_grid<double>(stream), true, tensors, n, steps);
}

int fsdp_cuda_sgd(const fsdp_optim_tensors *tensors, size_t n, const fsdp_sgd_step *steps,
                  void *stream)
{
    int error = step_some<fsdp_sgd_factors>(sgd_grid<float>(stream), false, tensors, n, steps);
    return error ? error
                 : step_some<fsdp_sgd_factors>(sgd_grid<double>(stream), true, tensors, n, steps);
}
