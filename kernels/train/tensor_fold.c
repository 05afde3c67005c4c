/*
 * Sums over ranks. Every element is folded in rank order; blocks are short, so that each source is read once
 * and the sum stays in the cache. The result does not depend on how calls cut the tensor. See tensor.h.
 */
#include "kernels/train/tensor.h"
#include "kernels/cast/blocks.h"
#include "kernels/train/factors.h"
#include "kernels/train/integer_fold.h"

#include <math.h>
#include <string.h>

/* === integers ================================================================================= */

enum { BLOCK = 4096 }; /* bytes */

bool fsdp_integer_can_fold(fsdp_dtype dtype)
{
    switch (dtype) {
    case FSDP_I64:
    case FSDP_I32:
    case FSDP_I16:
    case FSDP_I8:
    case FSDP_U64:
    case FSDP_U32:
    case FSDP_U16:
    case FSDP_U8: return true;
    default: return false;
    }
}

static bool is_signed(fsdp_dtype dtype)
{
    return dtype == FSDP_I64 || dtype == FSDP_I32 || dtype == FSDP_I16 || dtype == FSDP_I8;
}

static inline uint64_t load(const uint8_t *from, size_t size)
{
    uint64_t code = 0;
    memcpy(&code, from, size);
    return code;
}

/* Flipping the sign bit makes the order of signed codes that of unsigned ones. */
static inline uint64_t larger(uint64_t a, uint64_t b, uint64_t sign)
{
    return (b ^ sign) > (a ^ sign) ? b : a;
}

/* Inlined with a constant size, a load is one instruction. */
static inline void fold_codes(uint8_t *restrict to, const uint8_t *restrict from, size_t size,
                              size_t bytes, fsdp_fold fold, uint64_t sign)
{
    if (fold == FSDP_FOLD_MAX) {
        for (size_t at = 0; at < bytes; at += size) {
            uint64_t code = larger(load(to + at, size), load(from + at, size), sign);
            memcpy(to + at, &code, size);
        }
        return;
    }
    for (size_t at = 0; at < bytes; at += size) {
        uint64_t code = load(to + at, size) + load(from + at, size);
        memcpy(to + at, &code, size);
    }
}

static void fold_integers(uint8_t *to, const uint8_t *from, fsdp_dtype dtype, size_t bytes,
                          fsdp_fold fold)
{
    size_t size = fsdp_dtype_size(dtype);
    uint64_t sign = is_signed(dtype) ? UINT64_C(1) << (8 * size - 1) : 0;
    switch (size) {
    case 8: fold_codes(to, from, 8, bytes, fold, sign); break;
    case 4: fold_codes(to, from, 4, bytes, fold, sign); break;
    case 2: fold_codes(to, from, 2, bytes, fold, sign); break;
    default: fold_codes(to, from, 1, bytes, fold, sign); break;
    }
}

static void integer_fold(void *to, const void *const *from, int n, fsdp_dtype dtype, size_t count,
                         fsdp_fold fold)
{
    size_t size = count * fsdp_dtype_size(dtype);
    for (size_t first = 0; first < size; first += BLOCK) {
        uint8_t block[BLOCK];
        size_t bytes = size - first < BLOCK ? size - first : BLOCK;
        memcpy(block, (const uint8_t *)from[0] + first, bytes);
        for (int source = 1; source < n; source++)
            fold_integers(block, (const uint8_t *)from[source] + first, dtype, bytes, fold);
        memcpy((uint8_t *)to + first, block, bytes);
    }
}

/* === all types ================================================================================ */

typedef struct fold_job {
    fsdp_dtype dtype;
    fsdp_real real;
    const void *const *from;
    int n;
    fsdp_reduction how;
    double factor; /* fsdp_exact_reciprocal of the divisor */
} fold_job;

double fsdp_exact_reciprocal(double divisor)
{
    int exponent;
    bool is_power = frexp(divisor, &exponent) == 0.5 && exponent > -100 && exponent < 100;
    return is_power ? 1 / divisor : 1;
}

static const void *read_source(const fold_job *job, int source, size_t first, size_t count,
                               fsdp_room *room)
{
    const void *data = fsdp_element_const(job->from[source], job->dtype, first);
    if (job->how.multiply == 1)
        return fsdp_real_read(job->real, data, job->dtype, count, room);
    fsdp_real_load(job->real, data, job->dtype, count, room);
    job->real.loops->multiply(room, count, job->how.multiply);
    return room;
}

/*
 * Adds groups of sources to a sum in a buffer. Only the last group writes `to`, which may be a source that
 * is still to be read.
 */
static void sum_block(const fold_job *job, size_t first, size_t count, void *to)
{
    fsdp_room sum;
    for (int source = 0; source < job->n;) {
        fsdp_room rooms[FSDP_LOOP_SOURCES];
        const void *numbers[FSDP_LOOP_SOURCES] = {&sum};
        int n = source > 0 ? 1 : 0;
        for (; n < FSDP_LOOP_SOURCES && source < job->n; n++, source++)
            numbers[n] = read_source(job, source, first, count, &rooms[n]);
        bool is_last = source == job->n;
        job->real.loops->sum(is_last ? to : &sum, numbers, n, count, is_last ? job->factor : 1);
    }
}

static void raise_block(const fold_job *job, size_t first, size_t count, void *to)
{
    fsdp_room largest;
    fsdp_real_load(job->real, fsdp_element_const(job->from[0], job->dtype, first), job->dtype,
                   count, &largest);
    job->real.loops->multiply(&largest, count, job->how.multiply);
    for (int source = 1; source < job->n; source++) {
        fsdp_room room;
        job->real.loops->raise(&largest, read_source(job, source, first, count, &room), count);
    }
    const void *numbers = &largest;
    job->real.loops->sum(to, &numbers, 1, count, job->factor);
}

static void fold_block(const fold_job *job, size_t first, size_t count, void *to)
{
    fsdp_room room;
    bool fits = fsdp_real_fits(job->real, to, job->dtype);
    void *numbers = fits ? to : &room;
    if (job->how.fold == FSDP_FOLD_MAX)
        raise_block(job, first, count, numbers);
    else
        sum_block(job, first, count, numbers);
    if (job->how.divide * job->factor != 1)
        job->real.loops->divide(numbers, count, job->how.divide);
    fsdp_real_store(job->real, numbers, to, job->dtype, count);
}

/* Few bf16 sources, all aligned, are one loop from end to end. */
static bool is_short_bf16(const fold_job *job, const void *to)
{
    uintptr_t bits = (uintptr_t)to;
    for (int i = 0; i < job->n; i++)
        bits |= (uintptr_t)job->from[i];
    return job->dtype == FSDP_BF16 && job->n <= FSDP_LOOP_SOURCES &&
           job->how.fold == FSDP_FOLD_SUM && job->how.multiply == 1 &&
           job->how.divide * job->factor == 1 && bits % sizeof(uint16_t) == 0;
}

void fsdp_tensor_fold(void *to, const void *const *from, int n, fsdp_dtype dtype, size_t count,
                      fsdp_reduction how)
{
    if (fsdp_integer_can_fold(dtype)) {
        integer_fold(to, from, n, dtype, count, how.fold);
        return;
    }
    const fold_job job = {
        .dtype = dtype,
        .real = fsdp_real_of(dtype),
        .from = from,
        .n = n,
        .how = how,
        .factor = fsdp_exact_reciprocal(how.divide),
    };
    if (is_short_bf16(&job, to)) {
        job.real.loops->sum_bf16(to, from, n, count, job.factor);
        return;
    }
    for (size_t first = 0; first < count; first += FSDP_LOOP_BLOCK)
        fold_block(&job, first, fsdp_block_size(first, count), fsdp_element(to, dtype, first));
}

bool fsdp_tensor_can_fold(fsdp_dtype dtype)
{
    switch (dtype) {
    case FSDP_F64:
    case FSDP_F32:
    case FSDP_F16:
    case FSDP_BF16: return true;
    default: return fsdp_integer_can_fold(dtype);
    }
}
