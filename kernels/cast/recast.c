/*
 * Counted casts: small blocks are cast, cast back and compared while they are in the first cache, so that
 * memory is read and written once. See kernels.h; statedict/select/cast_box.c calls this.
 *
 * A cast to a type that holds every value of the source type only counts NaNs. Casts from f64 are compared in
 * f64, in plain C, since models are rarely stored in it.
 */
#include "kernels/kernels.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

enum { BLOCK = 1024, CODES = 256, CODE_BLOCK = 32768 };

/* One block at work. */
typedef struct block {
    fsdp_dtype to_type, from_type;
    const void *from;
    void *to;
    size_t count;
    size_t misfits;
} block;

static size_t cast(void *to, fsdp_dtype to_type, const void *from, fsdp_dtype from_type,
                   size_t count, fsdp_on_overflow overflow)
{
    return fsdp_kernels_get()->cast(to, to_type, from, from_type, count, overflow);
}

static bool holds_all(fsdp_dtype to_type, fsdp_dtype from_type)
{
    if (to_type == from_type || to_type == FSDP_F64)
        return true;
    if (to_type == FSDP_F32)
        return from_type != FSDP_F64;
    if (fsdp_dtype_size(from_type) > 1)
        return false;
    return to_type == FSDP_BF16 || (to_type == FSDP_F16 && from_type != FSDP_F8_E8M0FNU);
}

/* --- comparing a block ------------------------------------------------------------------------ */

/* The values as f32, in place or in room. */
static const float *as_f32(float room[BLOCK], const void *from, fsdp_dtype type, size_t count)
{
    if (type == FSDP_F32)
        return from;
    cast(room, FSDP_F32, from, type, count, FSDP_OVERFLOW_INF);
    return room;
}

static uint64_t count_nans(const block *work)
{
    float room[BLOCK];
    double wide[BLOCK];
    uint32_t nans = 0;
    if (work->from_type == FSDP_F64) {
        memcpy(wide, work->from, work->count * sizeof *wide);
        for (size_t i = 0; i < work->count; i++)
            nans += isnan(wide[i]) != 0;
        return nans;
    }
    const float *values = as_f32(room, work->from, work->from_type, work->count);
    for (size_t i = 0; i < work->count; i++)
        nans += values[i] != values[i];
    return nans;
}

static void measure_f64(const block *work, fsdp_cast_measure *measure, fsdp_cast_tally *tally)
{
    double before[BLOCK], after[BLOCK];
    memcpy(before, work->from, work->count * sizeof *before);
    cast(after, FSDP_F64, work->to, work->to_type, work->count, FSDP_OVERFLOW_INF);
    for (size_t i = 0; i < work->count; i++) {
        double old = fabs(before[i]), new = fabs(after[i]);
        measure->nans_before += isnan(old) != 0;
        measure->nans_after += isnan(new) != 0;
        measure->infinite_after += isinf(new) != 0;
        if (new == 0 && old > 0) {
            measure->underflows++;
            tally->max_underflow = fmax(tally->max_underflow, old);
        } else if (old > 0 && new > 0 && isfinite(old) && isfinite(new) &&
                   !signbit(before[i]) == !signbit(after[i])) {
            tally->max_rounding = fmax(tally->max_rounding, fabs(new - old) / old);
        }
    }
}

/* The number rounded down to f32. */
static float lower_f32(double number)
{
    float lower = (float)number;
    return (double)lower > number ? nextafterf(lower, 0) : lower;
}

static void measure_f32(const block *work, fsdp_cast_measure *measure, fsdp_cast_tally *tally)
{
    float before_room[BLOCK], after_room[BLOCK];
    measure->max_rounding = lower_f32(tally->max_rounding); /* only larger changes matter */
    const float *before = as_f32(before_room, work->from, work->from_type, work->count);
    const float *after = as_f32(after_room, work->to, work->to_type, work->count);
    fsdp_kernels_get()->measure(measure, before, after, work->count);
    tally->max_rounding = fmax(tally->max_rounding, (double)measure->max_rounding);
    tally->max_underflow = fmax(tally->max_underflow, (double)measure->max_underflow);
}

/* --- one block -------------------------------------------------------------------------------- */

/* Finds the first value that does not fit, and its index. */
static size_t find_misfit(const block *work, double *misfit_out)
{
    size_t size = fsdp_dtype_size(work->from_type), i = 0;
    const char *from = work->from;
    char made[sizeof(double)];
    while (i + 1 < work->count &&
           cast(made, work->to_type, from + i * size, work->from_type, 1, FSDP_OVERFLOW_INF) == 0)
        i++;
    cast(misfit_out, FSDP_F64, from + i * size, work->from_type, 1, FSDP_OVERFLOW_INF);
    return i;
}

/* Values that do not fit are made infinite first, so that the measurement leaves them out. */
static void cast_block(block *work, fsdp_on_overflow overflow, fsdp_cast_tally *tally)
{
    fsdp_cast_measure measure = {0};
    bool clamps = overflow == FSDP_OVERFLOW_CLAMP;
    if (holds_all(work->to_type, work->from_type)) {
        cast(work->to, work->to_type, work->from, work->from_type, work->count, overflow);
        tally->nans += count_nans(work);
        return;
    }
    work->misfits = cast(work->to, work->to_type, work->from, work->from_type, work->count,
                         clamps ? FSDP_OVERFLOW_INF : overflow);
    if (work->from_type == FSDP_F64)
        measure_f64(work, &measure, tally);
    else
        measure_f32(work, &measure, tally);
    tally->overflows += work->misfits;
    tally->underflows += measure.underflows;
    tally->nans += clamps ? measure.nans_before : measure.nans_after;
    if (clamps && (work->misfits > 0 || measure.infinite_after > 0 || measure.nans_after > 0))
        cast(work->to, work->to_type, work->from, work->from_type, work->count, overflow);
}

/* --- 8-bit types ------------------------------------------------------------------------------ */

/* Each code is measured once and weighted by its number of occurrences. */
static void measure_codes(fsdp_dtype to_type, fsdp_dtype from_type, const uint64_t times[CODES],
                          fsdp_on_overflow overflow, fsdp_cast_tally *tally)
{
    for (unsigned code = 0; code < CODES; code++) {
        uint8_t from = (uint8_t)code;
        double to;
        fsdp_cast_tally one = {0};
        block work = {to_type, from_type, &from, &to, 1, 0};
        if (times[code] == 0)
            continue;
        cast_block(&work, overflow, &one);
        one.overflows *= times[code];
        one.nans *= times[code];
        one.underflows *= times[code];
        fsdp_cast_tally_add(tally, &one);
    }
}

static size_t cast_codes(const fsdp_counted_cast *job, fsdp_cast_tally *tally, double *misfit_out)
{
    uint8_t room[CODE_BLOCK];
    uint64_t times[CODES] = {0};
    size_t to_size = fsdp_dtype_size(job->to_type);
    for (size_t first = 0; first < job->count; first += CODE_BLOCK) {
        size_t n = job->count - first < CODE_BLOCK ? job->count - first : CODE_BLOCK;
        block work = {job->to_type, job->from_type, room, (char *)job->to + first * to_size, n, 0};
        memcpy(room, (const char *)job->from + first, n);
        for (size_t i = 0; i < n; i++)
            times[room[i]]++;
        if (cast(work.to, job->to_type, room, job->from_type, n, job->overflow) > 0 &&
            job->overflow == FSDP_OVERFLOW_FAIL)
            return first + find_misfit(&work, misfit_out);
    }
    measure_codes(job->to_type, job->from_type, times, job->overflow, tally);
    return job->count;
}

/* --- the calls -------------------------------------------------------------------------------- */

size_t fsdp_cast_measured(const fsdp_counted_cast *job, fsdp_cast_tally *tally, double *misfit_out)
{
    size_t to_size = fsdp_dtype_size(job->to_type), from_size = fsdp_dtype_size(job->from_type);
    double room[BLOCK]; /* a copy: `to` may lie over `from` */
    if (from_size == 1 && job->count > BLOCK)
        return cast_codes(job, tally, misfit_out);
    for (size_t first = 0; first < job->count; first += BLOCK) {
        block work = {.to_type = job->to_type,
                      .from_type = job->from_type,
                      .from = room,
                      .to = (char *)job->to + first * to_size,
                      .count = job->count - first < BLOCK ? job->count - first : BLOCK};
        memcpy(room, (const char *)job->from + first * from_size, work.count * from_size);
        cast_block(&work, job->overflow, tally);
        if (work.misfits > 0 && job->overflow == FSDP_OVERFLOW_FAIL)
            return first + find_misfit(&work, misfit_out);
    }
    return job->count;
}

void fsdp_cast_tally_add(fsdp_cast_tally *sum, const fsdp_cast_tally *more)
{
    sum->overflows += more->overflows;
    sum->nans += more->nans;
    sum->underflows += more->underflows;
    sum->max_rounding = fmax(sum->max_rounding, more->max_rounding);
    sum->max_underflow = fmax(sum->max_underflow, more->max_underflow);
}
