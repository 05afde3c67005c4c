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

enum {
    FOLD_EACH = 8, /* elements of a thread */
    FOLD_TILE = FSDP_THREADS * FOLD_EACH,
    FOLD_AT_ONCE = 4 /* sources */
};
using fold_tile = fsdp_tile<FOLD_TILE>;

template <typename real> struct fold_numbers {
    real multiply, factor, divisor;
    bool is_sum, multiplies, divides;

    __device__ __forceinline__ fold_numbers(const fsdp_reduction &how, double exact)
        : multiply((real)how.multiply), factor((real)exact), divisor((real)how.divide),
          is_sum(how.fold == FSDP_FOLD_SUM), multiplies(how.multiply != 1 || !is_sum),
          divides(how.divide * exact != 1)
    {
    }

    __device__ __forceinline__ real begin(real x) const
    {
        return multiplies ? fsdp_settled(x * multiply) : x;
    }

    __device__ __forceinline__ real next(real total, real x) const
    {
        return is_sum ? total + begin(x) : fsdp_larger(total, begin(x));
    }

    __device__ __forceinline__ real end(real total) const
    {
        total = fsdp_settled(total * factor);
        return divides ? fsdp_settled(total / divisor) : total;
    }
};

/* Loads four sources before it adds the first of them; in place of those after the last one, the last
 * one again. Additions are in the order of the loops of C. */
template <uint32_t TYPE, uint32_t MOST>
FSDP_DEVICE void fold_whole(const fold_params<MOST> &fold, const fold_numbers<float> &by,
                            const fold_tile &tile)
{
    constexpr int LENGTH = 16 / fsdp_type_size(TYPE), VECTORS = FOLD_EACH / LENGTH;
    float totals[FOLD_EACH];
#pragma unroll 1
    for (uint32_t first = 0; first < fold.n; first += FOLD_AT_ONCE) {
        fsdp_vector<TYPE, LENGTH> sources[FOLD_AT_ONCE][VECTORS];
#pragma unroll
        for (uint32_t k = 0; k < FOLD_AT_ONCE; k++) {
            const uint8_t *from = fold.from[first + k < fold.n ? first + k : fold.n - 1];
#pragma unroll
            for (int i = 0; i < VECTORS; i++)
                fsdp_load(&sources[k][i], from, tile.vector_at(i, LENGTH));
        }
#pragma unroll
        for (uint32_t k = 0; k < FOLD_AT_ONCE; k++) {
#pragma unroll
            for (int i = 0; i < FOLD_EACH; i++) {
                const float x = fsdp_get(sources[k][i / LENGTH], i % LENGTH);
                if (first + k == 0)
                    totals[i] = by.begin(x);
                else if (first + k < fold.n)
                    totals[i] = by.next(totals[i], x);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
#pragma unroll
        for (int k = 0; k < LENGTH; k++)
            totals[i * LENGTH + k] = by.end(totals[i * LENGTH + k]);
        fsdp_store<TYPE, LENGTH>(fold.to, tile.vector_at(i, LENGTH), totals + i * LENGTH);
    }
}

template <typename real, uint32_t MOST>
FSDP_DEVICE void fold_elements(const fold_params<MOST> &fold, const fold_numbers<real> &by,
                               const fold_tile &tile)
{
    tile.each([&](int64_t at) {
        real total = by.begin(fsdp_read<real>(fold.from[0], fold.type, at));
#pragma unroll 1
        for (uint32_t source = 1; source < fold.n; source++)
            total = by.next(total, fsdp_read<real>(fold.from[source], fold.type, at));
        fsdp_write(fold.to, fold.type, at, by.end(total));
    });
}

template <uint32_t MOST>
FSDP_DEVICE bool fold_plain(const fold_params<MOST> &fold, const fold_numbers<float> &by,
                            const fold_tile &tile)
{
    bool is_aligned = tile.is_whole() && tile.is_aligned(fold.to, fold.type);
#pragma unroll 1
    for (uint32_t i = 0; i < fold.n && is_aligned; i++)
        is_aligned = tile.is_aligned(fold.from[i], fold.type);
    if (!is_aligned)
        return false;
    switch (fold.type) {
    case FSDP_F32: fold_whole<FSDP_F32>(fold, by, tile); return true;
    case FSDP_BF16: fold_whole<FSDP_BF16>(fold, by, tile); return true;
    case FSDP_F16: fold_whole<FSDP_F16>(fold, by, tile); return true;
    default: return false;
    }
}

/* f64 has no whole tiles. */
template <uint32_t MOST>
FSDP_DEVICE bool fold_plain(const fold_params<MOST> &, const fold_numbers<double> &,
                            const fold_tile &)
{
    return false;
}

template <typename real, uint32_t MOST>
FSDP_KERNEL(FSDP_THREADS, 4)
fold_reals(FSDP_PARAMS(fold_params<MOST>) fold)
{
    const fold_numbers<real> by(fold.how, fold.factor);
    const fold_tile tile(fold.to, fold.type, fold.count, 0);
    if (!fold_plain(fold, by, tile))
        fold_elements(fold, by, tile);
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

/* Sums wrap: the bits that the type lacks are not stored. Flipping the sign bit makes the order of
 * signed codes that of unsigned ones. */
template <uint32_t MOST>
FSDP_KERNEL(FSDP_THREADS, 4)
fold_integers(FSDP_PARAMS(fold_params<MOST>) fold)
{
    const uint32_t size = integer_size(fold.type);
    const uint64_t sign = is_signed(fold.type) ? (uint64_t)1 << (8 * size - 1) : 0;
    const fold_tile tile(fold.to, fold.type, fold.count, 0);
    tile.each([&](int64_t at) {
        at *= (int64_t)size;
        uint64_t total = fsdp_load_code(fold.from[0] + at, size);
#pragma unroll 1
        for (uint32_t source = 1; source < fold.n; source++) {
            uint64_t more = fsdp_load_code(fold.from[source] + at, size);
            if (fold.how.fold == FSDP_FOLD_MAX)
                total = (more ^ sign) > (total ^ sign) ? more : total;
            else
                total += more;
        }
        fsdp_store_code(fold.to + at, size, total);
    });
}

template <uint32_t MOST>
static void (*fold_kernel(fsdp_dtype dtype))(FSDP_PARAMS(fold_params<MOST>))
{
    if (fsdp_integer_can_fold(dtype))
        return fold_integers<MOST>;
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
    uint64_t tiles = fsdp_tiles<FOLD_TILE>(fold.to, fold.type, fold.count);
    if (tiles > FSDP_MOST_TILES)
        return FSDP_CUDA_INVALID;
    const fsdp_grid<fold_params<MOST>> grid = {fold_kernel<MOST>(call.to->dtype), FSDP_THREADS,
                                               call.stream};
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

enum { EDIT_EACH = 16, EDIT_TILE = FSDP_THREADS * EDIT_EACH }; /* elements */
using edit_tile = fsdp_tile<EDIT_TILE>;

template <typename real> FSDP_DEVICE real edited(edit_kind kind, real x, real by)
{
    switch (kind) {
    case EDIT_ADD: return fsdp_settled(x + by);
    case EDIT_MULTIPLY: return fsdp_settled(x * by);
    default: return fsdp_settled(x / by);
    }
}

template <uint32_t TYPE, uint32_t MORE>
FSDP_DEVICE bool add_whole(const edit_item &item, const edit_tile &tile)
{
    constexpr int LENGTH = 16 / (TYPE == FSDP_F32 || MORE == FSDP_F32 ? 4 : 2);
    constexpr int VECTORS = EDIT_EACH / LENGTH;
    fsdp_vector<TYPE, LENGTH> numbers[VECTORS];
    fsdp_vector<MORE, LENGTH> more[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        fsdp_load(&numbers[i], item.data, tile.vector_at(i, LENGTH));
        fsdp_load(&more[i], item.more, tile.vector_at(i, LENGTH));
    }
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        float sums[LENGTH];
#pragma unroll
        for (int k = 0; k < LENGTH; k++)
            sums[k] = edited(EDIT_ADD, fsdp_get(numbers[i], k), fsdp_get(more[i], k));
        fsdp_store<TYPE, LENGTH>(item.data, tile.vector_at(i, LENGTH), sums);
    }
    return true;
}

template <edit_kind KIND, uint32_t TYPE>
FSDP_DEVICE bool scale_whole(const edit_item &item, float number, const edit_tile &tile)
{
    constexpr int LENGTH = 16 / fsdp_type_size(TYPE), VECTORS = EDIT_EACH / LENGTH;
    fsdp_vector<TYPE, LENGTH> numbers[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        fsdp_load(&numbers[i], item.data, tile.vector_at(i, LENGTH));
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        float results[LENGTH];
#pragma unroll
        for (int k = 0; k < LENGTH; k++)
            results[k] = edited(KIND, fsdp_get(numbers[i], k), number);
        fsdp_store<TYPE, LENGTH>(item.data, tile.vector_at(i, LENGTH), results);
    }
    return true;
}

template <typename real>
FSDP_DEVICE void edit_elements(const edit_item &item, const edit_how &how, const edit_tile &tile)
{
    tile.each([&](int64_t at) {
        const uint64_t code = fsdp_code_at(item.data, item.type, at);
        real by = (real)how.number;
        if (how.kind == EDIT_ADD)
            by = fsdp_read<real>(item.more, item.more_type, at);
        fsdp_write(item.data, item.type, at,
                   edited(how.kind, fsdp_number<real>(code, item.type), by));
    });
}

template <edit_kind KIND>
FSDP_DEVICE bool scale_plain(const edit_item &item, float number, const edit_tile &tile)
{
    switch (item.type) {
    case FSDP_F32: return scale_whole<KIND, FSDP_F32>(item, number, tile);
    case FSDP_BF16: return scale_whole<KIND, FSDP_BF16>(item, number, tile);
    case FSDP_F16: return scale_whole<KIND, FSDP_F16>(item, number, tile);
    default: return false;
    }
}

FSDP_DEVICE bool add_plain(const edit_item &item, const edit_tile &tile)
{
    if (!tile.is_aligned(item.more, item.more_type))
        return false;
    switch (fsdp_types(item.type, item.more_type)) {
    case fsdp_types(FSDP_F32, FSDP_F32): return add_whole<FSDP_F32, FSDP_F32>(item, tile);
    case fsdp_types(FSDP_F32, FSDP_BF16): return add_whole<FSDP_F32, FSDP_BF16>(item, tile);
    case fsdp_types(FSDP_F32, FSDP_F16): return add_whole<FSDP_F32, FSDP_F16>(item, tile);
    case fsdp_types(FSDP_BF16, FSDP_BF16): return add_whole<FSDP_BF16, FSDP_BF16>(item, tile);
    case fsdp_types(FSDP_F16, FSDP_F16): return add_whole<FSDP_F16, FSDP_F16>(item, tile);
    default: return false;
    }
}

FSDP_DEVICE bool edit_plain(const edit_item &item, const edit_how &how, const edit_tile &tile)
{
    if (!tile.is_whole() || !tile.is_aligned(item.data, item.type))
        return false;
    switch (how.kind) {
    case EDIT_ADD: return add_plain(item, tile);
    case EDIT_MULTIPLY: return scale_plain<EDIT_MULTIPLY>(item, (float)how.number, tile);
    default: return scale_plain<EDIT_DIVIDE>(item, (float)how.number, tile);
    }
}

/* f64 has no whole tiles. */
template <typename real, uint32_t MOST>
FSDP_KERNEL(FSDP_THREADS, 4)
edit(FSDP_PARAMS(edit_batch<MOST>) batch)
{
    const edit_item &item = fsdp_find_item(batch.items, batch.n);
    const edit_tile tile(item.data, item.type, item.count, item.first_tile);
    if (sizeof(real) == 8 || !edit_plain(item, batch.shared, tile))
        edit_elements<real>(item, batch.shared, tile);
}

template <typename real> static fsdp_list_grid<edit_how, edit_item> edit_grid(void *stream)
{
    constexpr uint32_t MANY = fsdp_many<edit_how, edit_item>();
    return {edit<real, FSDP_FEW>, edit<real, MANY>, FSDP_THREADS, stream};
}

static int add_edit(fsdp_batches<edit_how, edit_item> *batches, const edit_item &item)
{
    return batches->add(item, fsdp_tiles<EDIT_TILE>(item.data, item.type, item.count));
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
