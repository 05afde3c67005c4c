/* Casts boxes in memory: see cast_box.h. The loops are in kernels/cast/recast.c. */
#include "statedict/select/cast_box.h"

#include "statedict/sd/names.h"

#include <math.h>

size_t fsdp_recast_size(fsdp_dtype from, fsdp_dtype to)
{
    size_t old = fsdp_dtype_size(from), new = fsdp_dtype_size(to);
    return old > new ? old : new;
}

char *fsdp_recast_source(char *data, int64_t count, fsdp_dtype from, fsdp_dtype to)
{
    return data + count * (int64_t)(fsdp_recast_size(from, to) - fsdp_dtype_size(from));
}

/* The value after a cast. */
static double cast_value(double value, fsdp_dtype dtype, fsdp_on_overflow on_overflow)
{
    uint8_t code[sizeof(double)];
    fsdp_kernels_get()->cast(code, dtype, &value, FSDP_F64, 1, on_overflow);
    fsdp_kernels_get()->cast(&value, FSDP_F64, code, dtype, 1, FSDP_OVERFLOW_INF);
    return value;
}

static fsdp_status fail_misfit(const fsdp_recast_box *box, int64_t number, double value,
                               fsdp_error *err)
{
    char name[160], place[300];
    int64_t at[FSDP_MAX_DIMS];
    for (int d = box->box->ndim - 1; d >= 0; d--) {
        at[d] = box->box->lo[d] + number % box->box->len[d];
        number /= box->box->len[d];
    }
    double clamped = cast_value(value, box->to, FSDP_OVERFLOW_CLAMP);
    double infinite = cast_value(value, box->to, FSDP_OVERFLOW_INF);
    return fsdp_fail(
        err, FSDP_ERR_DAMAGED,
        "'%s' is %.9g at %s, which %s cannot hold; use --on-overflow clamp to make it %.9g, "
        "--on-overflow inf to make it %s, or --dtype-for 'RE=keep' to keep the tensor",
        fsdp_printable(box->name, box->name_size, name, sizeof name), value,
        fsdp_shape_text(box->box->ndim, at, place, sizeof place), fsdp_dtype_name(box->to), clamped,
        isnan(infinite) ? "NaN"
        : infinite < 0  ? "-inf"
                        : "inf");
}

fsdp_status fsdp_recast(const fsdp_recast_box *box, fsdp_on_overflow on_overflow,
                        fsdp_cast_tally *tally, fsdp_error *err)
{
    int64_t count = fsdp_box_count(box->box);
    double misfit = 0;
    if (box->from == box->to)
        return FSDP_OK;
    size_t more = fsdp_recast_size(box->from, box->to) - fsdp_dtype_size(box->from);
    fsdp_counted_cast cast = {box->source - (size_t)count * more,
                              box->to,
                              box->source,
                              box->from,
                              (size_t)count,
                              on_overflow};
    size_t done = fsdp_cast_measured(&cast, tally, &misfit);
    return done == (size_t)count ? FSDP_OK : fail_misfit(box, (int64_t)done, misfit, err);
}

/* --- counting --------------------------------------------------------------------------------- */

static void raise_to(_Atomic double *most, double value)
{
    double known = atomic_load(most);
    while (value > known && !atomic_compare_exchange_weak(most, &known, value))
        continue;
}

void fsdp_cast_sum_add(fsdp_cast_sum *sum, const fsdp_cast_tally *tally)
{
    atomic_fetch_add(&sum->overflows, (long long)tally->overflows);
    atomic_fetch_add(&sum->nans, (long long)tally->nans);
    atomic_fetch_add(&sum->underflows, (long long)tally->underflows);
    raise_to(&sum->max_rounding, tally->max_rounding);
    raise_to(&sum->max_underflow, tally->max_underflow);
}

fsdp_cast_tally fsdp_cast_sum_get(fsdp_cast_sum *sum)
{
    return (fsdp_cast_tally){.overflows = (uint64_t)atomic_load(&sum->overflows),
                             .nans = (uint64_t)atomic_load(&sum->nans),
                             .underflows = (uint64_t)atomic_load(&sum->underflows),
                             .max_rounding = atomic_load(&sum->max_rounding),
                             .max_underflow = atomic_load(&sum->max_underflow)};
}

void fsdp_cast_report_fill(fsdp_cast_report *report, const fsdp_cast_tally *tally, int64_t tensors)
{
    if (!report)
        return;
    *report = (fsdp_cast_report){.tensors = tensors,
                                 .overflows = (int64_t)tally->overflows,
                                 .nans = (int64_t)tally->nans,
                                 .underflows = (int64_t)tally->underflows,
                                 .max_rounding = tally->max_rounding,
                                 .max_underflow = tally->max_underflow};
}
