/* Folds over ranks, sums, products and quotients. See cuda_kernels.h. */
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/real.cuh"
#include "kernels/train/factors.h"
#include "kernels/train/integer_fold.h"

/* --- folds ------------------------------------------------------------------------------------ */

/* Folds of few ranks have an instance with capacity for so many, as lists do (launch.cuh). */
template <uint32_t MOST> struct fold_params {
    uint8_t *to;
    uint64_t count;
    uint32_t type, n;
    fsdp_reduction how;
    double factor; /* fsdp_exact_reciprocal of the divisor */
    const uint8_t *from[MOST];
};

/* Unlike the loops of C, which add four sources to a sum in a block of memory, this one keeps it in
 * registers: the order is the same. */
template <typename real, uint32_t MOST>
FSDP_DEVICE void fold_unit(const fold_params<MOST> &fold, fsdp_unit unit)
{
    const bool is_sum = fold.how.fold == FSDP_FOLD_SUM;
    const bool multiplies = fold.how.multiply != 1 || !is_sum;
    const real multiply = (real)fold.how.multiply;
    real total[FSDP_UNIT], more[FSDP_UNIT];
    fsdp_read(total, fold.from[0], fold.type, unit);
#pragma unroll
    for (int i = 0; i < FSDP_UNIT; i++)
        total[i] = multiplies ? fsdp_settled(total[i] * multiply) : total[i];
#pragma unroll 1
    for (uint32_t source = 1; source < fold.n; source++) {
        fsdp_read(more, fold.from[source], fold.type, unit);
#pragma unroll
        for (int i = 0; i < FSDP_UNIT; i++) {
            real x = multiplies ? fsdp_settled(more[i] * multiply) : more[i];
            total[i] = is_sum ? total[i] + x : fsdp_larger(total[i], x);
        }
    }
    const real factor = (real)fold.factor, divisor = (real)fold.how.divide;
    const bool divides = fold.how.divide * fold.factor != 1;
#pragma unroll
    for (int i = 0; i < FSDP_UNIT; i++) {
        total[i] = fsdp_settled(total[i] * factor);
        total[i] = divides ? fsdp_settled(total[i] / divisor) : total[i];
    }
    fsdp_write(fold.to, fold.type, unit, total);
}

template <typename real, uint32_t MOST>
FSDP_KERNEL(FSDP_THREADS, 2) fold_reals(FSDP_PARAMS(fold_params<MOST>) fold)
{
    fsdp_line line(fold.to, fold.type, fold.count, 0);
#pragma unroll 1
    for (fsdp_unit unit; line.next(&unit);)
        fold_unit<real>(fold, unit);
}

FSDP_DEVICE uint32_t integer_size(uint32_t type)
{
    switch (type) {
    case FSDP_I64:
    case FSDP_U64: return 8;
    case FSDP_I32:
    case FSDP_U32: return 4;
    case FSDP_I16:
    case FSDP_U16: return 2;
    default: return 1;
    }
}

FSDP_DEVICE bool is_signed(uint32_t type)
{
    return type == FSDP_I64 || type == FSDP_I32 || type == FSDP_I16 || type == FSDP_I8;
}

FSDP_DEVICE void load_integers(uint32_t codes[FSDP_UNIT], const uint8_t *from, uint32_t size,
                               uint32_t mask)
{
    fsdp_load_codes(codes, from, size, mask);
}

FSDP_DEVICE void load_integers(uint64_t codes[FSDP_UNIT], const uint8_t *from, uint32_t,
                               uint32_t mask)
{
    fsdp_load_codes(codes, from, mask);
}

/* Sums wrap: the bits that the type lacks are cut off. */
FSDP_DEVICE void store_integers(uint8_t *to, uint32_t codes[FSDP_UNIT], uint32_t size,
                                uint32_t mask)
{
    const uint32_t bits = size == 4 ? ~0u : (1u << 8 * size) - 1;
#pragma unroll
    for (int i = 0; i < FSDP_UNIT; i++)
        codes[i] &= bits;
    fsdp_store_codes(to, codes, size, mask);
}

FSDP_DEVICE void store_integers(uint8_t *to, uint64_t codes[FSDP_UNIT], uint32_t, uint32_t mask)
{
    fsdp_store_codes(to, codes, mask);
}

/* Flipping the sign bit makes the order of signed codes that of unsigned ones. */
template <typename code, uint32_t MOST>
FSDP_DEVICE void fold_integers_unit(const fold_params<MOST> &fold, fsdp_unit unit)
{
    const uint32_t size = integer_size(fold.type);
    const int64_t at = unit.at * (int64_t)size;
    const code sign = is_signed(fold.type) ? (code)1 << (8 * size - 1) : 0;
    code total[FSDP_UNIT], more[FSDP_UNIT];
    load_integers(total, fold.from[0] + at, size, unit.mask);
#pragma unroll 1
    for (uint32_t source = 1; source < fold.n; source++) {
        load_integers(more, fold.from[source] + at, size, unit.mask);
#pragma unroll
        for (int i = 0; i < FSDP_UNIT; i++) {
            if (fold.how.fold == FSDP_FOLD_MAX)
                total[i] = (more[i] ^ sign) > (total[i] ^ sign) ? more[i] : total[i];
            else
                total[i] += more[i];
        }
    }
    store_integers(fold.to + at, total, size, unit.mask);
}

template <typename code, uint32_t MOST>
FSDP_KERNEL(FSDP_THREADS, 2) fold_integers(FSDP_PARAMS(fold_params<MOST>) fold)
{
    fsdp_line line(fold.to, fold.type, fold.count, 0);
#pragma unroll 1
    for (fsdp_unit unit; line.next(&unit);)
        fold_integers_unit<code>(fold, unit);
}

template <uint32_t MOST> static void (*fold_kernel(fsdp_dtype dtype))(FSDP_PARAMS(fold_params<MOST>))
{
    if (fsdp_integer_can_fold(dtype))
        return fsdp_dtype_size(dtype) == 8 ? fold_integers<uint64_t, MOST>
                                           : fold_integers<uint32_t, MOST>;
    return dtype == FSDP_F64 ? fold_reals<double, MOST> : fold_reals<float, MOST>;
}

struct fold_call {
    const fsdp_cuda_span *to;
    const void *const *from;
    uint32_t n;
    fsdp_reduction how;
    void *stream;
};

template <uint32_t MOST> static int launch_fold(const fold_call &call)
{
    fold_params<MOST> fold = {};
    fold.to = (uint8_t *)call.to->data;
    fold.count = call.to->count;
    fold.type = (uint32_t)call.to->dtype;
    fold.n = call.n;
    fold.how = call.how;
    fold.factor = fsdp_exact_reciprocal(call.how.divide);
    for (uint32_t i = 0; i < call.n; i++)
        fold.from[i] = (const uint8_t *)call.from[i];
    uint64_t tiles = fsdp_line_tiles(fold.count);
    if (tiles > FSDP_MOST_TILES)
        return FSDP_CUDA_INVALID;
    const fsdp_grid<fold_params<MOST>> grid = {fold_kernel<MOST>(call.to->dtype), FSDP_THREADS, call.stream};
    return tiles == 0 ? (int)FSDP_CUDA_OK : fsdp_launch(grid, (unsigned)tiles, fold);
}

int fsdp_cuda_fold(const fsdp_cuda_span *to, const void *const *from, int n, fsdp_reduction how,
                   void *stream)
{
    if (n < 1 || n > FSDP_CUDA_FOLD_SOURCES)
        return FSDP_CUDA_INVALID;
    const fold_call call = {to, from, (uint32_t)n, how, stream};
    return n <= FSDP_FEW ? launch_fold<FSDP_FEW>(call) : launch_fold<FSDP_CUDA_FOLD_SOURCES>(call);
}

/* --- sums, products and quotients in place ---------------------------------------------------- */

struct edit_item {
    uint8_t *data;
    const uint8_t *more; /* of a sum */
    uint64_t count;
    uint32_t first_tile;
    uint8_t type, more_type;
};

enum edit_kind { EDIT_ADD, EDIT_MULTIPLY, EDIT_DIVIDE };
struct edit_how {
    double number;
    edit_kind kind;
};

template <uint32_t MOST> using edit_batch = fsdp_batch<edit_how, edit_item, MOST>;

template <typename real>
FSDP_DEVICE void edit_unit(const edit_item &item, const edit_how &how, fsdp_unit unit)
{
    real x[FSDP_UNIT], more[FSDP_UNIT] = {};
    const real number = (real)how.number;
    fsdp_read(x, item.data, item.type, unit);
    if (how.kind == EDIT_ADD)
        fsdp_read(more, item.more, item.more_type, unit);
#pragma unroll
    for (int i = 0; i < FSDP_UNIT; i++) {
        if (how.kind == EDIT_ADD)
            x[i] = x[i] + more[i];
        else
            x[i] = how.kind == EDIT_MULTIPLY ? x[i] * number : x[i] / number;
        x[i] = fsdp_settled(x[i]);
    }
    fsdp_write(item.data, item.type, unit, x);
}

template <typename real, uint32_t MOST>
FSDP_KERNEL(FSDP_THREADS, 2) edit(FSDP_PARAMS(edit_batch<MOST>) batch)
{
    const edit_item &item = fsdp_find_item(batch.items, batch.n);
    fsdp_line line(item.data, item.type, item.count, item.first_tile);
#pragma unroll 1
    for (fsdp_unit unit; line.next(&unit);)
        edit_unit<real>(item, batch.shared, unit);
}

template <typename real> static fsdp_list_grid<edit_how, edit_item> edit_grid(void *stream)
{
    constexpr uint32_t MANY = fsdp_many<edit_how, edit_item>();
    return {edit<real, FSDP_FEW>, edit<real, MANY>, FSDP_THREADS, stream};
}

static int add_edit(fsdp_batches<edit_how, edit_item> *batches, const edit_item &item)
{
    return batches->add(item, fsdp_line_tiles(item.count));
}

/* The spans that compute in f64, or all others. */
static int edit_some(const fsdp_list_grid<edit_how, edit_item> &grid, const edit_how &how,
                     bool is_wide, const fsdp_cuda_span *spans, size_t n)
{
    fsdp_batches<edit_how, edit_item> batches(grid, how);
    for (size_t i = 0; i < n; i++) {
        if ((spans[i].dtype == FSDP_F64) != is_wide)
            continue;
        int error = add_edit(&batches, {(uint8_t *)spans[i].data, nullptr, spans[i].count, 0,
                                        (uint8_t)spans[i].dtype, 0});
        if (error)
            return error;
    }
    return batches.launch();
}

static int edit_all(const fsdp_cuda_span *spans, size_t n, const edit_how &how, void *stream)
{
    int error = edit_some(edit_grid<float>(stream), how, false, spans, n);
    return error ? error : edit_some(edit_grid<double>(stream), how, true, spans, n);
}

int fsdp_cuda_multiply(const fsdp_cuda_span *spans, size_t n, double factor, void *stream)
{
    return edit_all(spans, n, {factor, EDIT_MULTIPLY}, stream);
}

int fsdp_cuda_divide(const fsdp_cuda_span *spans, size_t n, double divisor, void *stream)
{
    return edit_all(spans, n, {divisor, EDIT_DIVIDE}, stream);
}

int fsdp_cuda_add(const fsdp_cuda_span *to, const void *from, fsdp_dtype from_type, void *stream)
{
    bool is_wide = to->dtype == FSDP_F64 || from_type == FSDP_F64;
    fsdp_batches<edit_how, edit_item> batches(
        is_wide ? edit_grid<double>(stream) : edit_grid<float>(stream), {0, EDIT_ADD});
    int error = add_edit(&batches, {(uint8_t *)to->data, (const uint8_t *)from, to->count, 0,
                                    (uint8_t)to->dtype, (uint8_t)from_type});
    return error ? error : batches.launch();
}
