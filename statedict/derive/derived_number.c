/* Derived tensors that change numbers: casts, factors and sums with a number, powers of e and logarithms. See
 * derived.h. */
#include "statedict/derive/derived.h"

#include "kernels/kernels.h"

#include <math.h>

/* --- casts ---------------------------------------------------------------------------------------- */

static fsdp_status cast_run(const fsdp_derived *tensor, const void *from, size_t count, void *to,
                            fsdp_error *err)
{
    fsdp_dtype old = tensor->parts[0]->dtype;
    if (fsdp_kernels_get()->cast(to, tensor->dtype, from, old, count, FSDP_OVERFLOW_FAIL) == 0)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "a value of %s does not fit in %s",
                     fsdp_dtype_name(old), fsdp_dtype_name(tensor->dtype));
}

/* Elements [0, count) of `from`, of the part's dtype, become elements of the tensor's. */
typedef fsdp_status (*change_run)(const fsdp_derived *tensor, const void *from, size_t count,
                                  void *to, fsdp_error *err);

/* Reads the part piece by piece, and changes each on the way. */
static fsdp_status read_changed(const fsdp_derived *tensor, fsdp_reader *reader,
                                const fsdp_box *box, void *data, change_run change, fsdp_error *err)
{
    const fsdp_derived *part = tensor->parts[0];
    int64_t most = FSDP_DERIVED_RUN / (int64_t)fsdp_dtype_size(part->dtype);
    fsdp_derived_pieces pieces = {.box = box, .most = most};
    fsdp_box piece;
    char *to = data;
    void *buffer;
    FSDP_TRY(fsdp_derived_take(reader, &buffer, err));
    fsdp_status st = FSDP_OK;
    while (st == FSDP_OK && fsdp_derived_next(&pieces, &piece)) {
        int64_t count = fsdp_box_count(&piece);
        st = fsdp_derived_read(part, reader, &piece, buffer, err);
        if (st == FSDP_OK)
            st = change(tensor, buffer, (size_t)count, to, err);
        to += count * (int64_t)fsdp_dtype_size(tensor->dtype);
    }
    fsdp_derived_give(reader);
    return st;
}

static fsdp_status read_cast(const fsdp_derived *tensor, fsdp_reader *reader, const fsdp_box *box,
                             void *data, fsdp_error *err)
{
    return read_changed(tensor, reader, box, data, cast_run, err);
}

static const fsdp_derived_ops cast_ops = {read_cast, 1};

static fsdp_status check_float(fsdp_dtype dtype, fsdp_error *err)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(dtype);
    return info && info->is_float ? FSDP_OK
                                  : fsdp_fail(err, FSDP_ERR_USAGE, "%s is not a floating type",
                                              fsdp_dtype_name(dtype));
}

static fsdp_status make_changed(fsdp_arena *arena, const fsdp_derived *like,
                                const fsdp_derived **out, fsdp_error *err)
{
    fsdp_derived *made = NULL;
    FSDP_TRY(fsdp_derived_make(arena, like, &made, err));
    *out = made;
    return FSDP_OK;
}

fsdp_status fsdp_derive_cast(fsdp_arena *arena, const fsdp_derived *part, fsdp_dtype dtype,
                             const fsdp_derived **out, fsdp_error *err)
{
    fsdp_derived like = {.ops = &cast_ops,
                         .dtype = dtype,
                         .ndim = part->ndim,
                         .shape = part->shape,
                         .parts = &part,
                         .part_count = 1};
    *out = part;
    if (part->dtype == dtype)
        return FSDP_OK;
    FSDP_TRY(check_float(part->dtype, err));
    FSDP_TRY(check_float(dtype, err));
    return make_changed(arena, &like, out, err);
}

/* The type in which sums and functions are computed. */
static fsdp_status widen(fsdp_arena *arena, const fsdp_derived *part, const fsdp_derived **out,
                         fsdp_error *err)
{
    FSDP_TRY(check_float(part->dtype, err));
    return fsdp_derive_cast(arena, part, part->dtype == FSDP_F64 ? FSDP_F64 : FSDP_F32, out, err);
}

/* --- factors -------------------------------------------------------------------------------------- */

enum { SOME = 4096 };

/* Functions that scale return how many finite numbers do not fit afterwards. */
static size_t scale_f64(const double *from, size_t count, double factor, double *to)
{
    size_t misfits = 0;
    for (size_t i = 0; i < count; i++) {
        to[i] = from[i] * factor;
        misfits += isfinite(from[i]) && !isfinite(to[i]);
    }
    return misfits;
}

static size_t scale_f32(float *numbers, size_t count, float factor)
{
    size_t misfits = 0;
    for (size_t i = 0; i < count; i++) {
        float scaled = numbers[i] * factor;
        misfits += isfinite(numbers[i]) && !isfinite(scaled);
        numbers[i] = scaled;
    }
    return misfits;
}

static size_t scale_by_casts(const fsdp_derived *tensor, const char *from, size_t count, char *to)
{
    const fsdp_kernels *kernels = fsdp_kernels_get();
    fsdp_dtype dtype = tensor->dtype;
    size_t size = fsdp_dtype_size(dtype), misfits = 0;
    float some[SOME];
    for (size_t at = 0; at < count; at += SOME) {
        size_t n = count - at < SOME ? count - at : SOME;
        kernels->cast(some, FSDP_F32, from + at * size, dtype, n, FSDP_OVERFLOW_INF);
        misfits += scale_f32(some, n, (float)tensor->factor);
        misfits += kernels->cast(to + at * size, dtype, some, FSDP_F32, n, FSDP_OVERFLOW_FAIL);
    }
    return misfits;
}

/* `to` and `from` have the same dtype. */
static fsdp_status scale_run(const fsdp_derived *tensor, const void *from, size_t count, void *to,
                             fsdp_error *err)
{
    size_t misfits = tensor->dtype == FSDP_F64 ? scale_f64(from, count, tensor->factor, to)
                                               : scale_by_casts(tensor, from, count, to);
    return misfits == 0 ? FSDP_OK
                        : fsdp_fail(err, FSDP_ERR_DAMAGED, "a value times %g does not fit in %s",
                                    tensor->factor, fsdp_dtype_name(tensor->dtype));
}

static fsdp_status read_scaled(const fsdp_derived *tensor, fsdp_reader *reader, const fsdp_box *box,
                               void *data, fsdp_error *err)
{
    return read_changed(tensor, reader, box, data, scale_run, err);
}

static const fsdp_derived_ops scale_ops = {read_scaled, 1};

fsdp_status fsdp_derive_scale(fsdp_arena *arena, const fsdp_derived *part, double factor,
                              const fsdp_derived **out, fsdp_error *err)
{
    fsdp_derived like = {.ops = &scale_ops,
                         .dtype = part->dtype,
                         .ndim = part->ndim,
                         .shape = part->shape,
                         .parts = &part,
                         .part_count = 1,
                         .factor = factor};
    *out = part;
    if (factor == 1)
        return FSDP_OK;
    FSDP_TRY(check_float(part->dtype, err));
    if (part->dtype != FSDP_F64 && ((float)factor == 0 || isinf((float)factor)))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "the factor %g is out of range for f32, in which %s is scaled", factor,
                         fsdp_dtype_name(part->dtype));
    return make_changed(arena, &like, out, err);
}

/* --- sums ----------------------------------------------------------------------------------------- */

/* Elements have the type of the sum already. */
static fsdp_status add_run(const fsdp_derived *tensor, const void *from, size_t count, void *to,
                           fsdp_error *err)
{
    (void)err;
    if (tensor->dtype == FSDP_F64)
        for (size_t i = 0; i < count; i++)
            ((double *)to)[i] = ((const double *)from)[i] + tensor->factor;
    else
        for (size_t i = 0; i < count; i++)
            ((float *)to)[i] = ((const float *)from)[i] + (float)tensor->factor;
    return FSDP_OK;
}

static fsdp_status read_sum(const fsdp_derived *tensor, fsdp_reader *reader, const fsdp_box *box,
                            void *data, fsdp_error *err)
{
    return read_changed(tensor, reader, box, data, add_run, err);
}

static const fsdp_derived_ops sum_ops = {read_sum, 1};

fsdp_status fsdp_derive_add(fsdp_arena *arena, const fsdp_derived *part, double number,
                            const fsdp_derived **out, fsdp_error *err)
{
    if (part->dtype != FSDP_F64 && isinf((float)number))
        return fsdp_fail(err, FSDP_ERR_USAGE, "the number %g is out of range for f32", number);
    FSDP_TRY(widen(arena, part, &part, err));
    fsdp_derived like = {.ops = &sum_ops,
                         .dtype = part->dtype,
                         .ndim = part->ndim,
                         .shape = part->shape,
                         .parts = &part,
                         .part_count = 1,
                         .factor = number};
    return make_changed(arena, &like, out, err);
}

/* --- powers of e and logarithms ------------------------------------------------------------------- */

typedef struct number_function {
    const char *name;
    double (*compute)(double number);
} number_function;

static const number_function power_of_e = {"exp", exp}, logarithm = {"log", log};

/* A number without a finite result; infinities and NaN pass where they have one. */
static bool is_misfit(double from, double to)
{
    return (isfinite(from) && !isfinite(to)) || (isnan(to) && !isnan(from));
}

/* Elements have the type of the result already. One of f32 is rounded from f64, so that it is the nearest. */
static fsdp_status compute_run(const fsdp_derived *tensor, const void *from, size_t count, void *to,
                               fsdp_error *err)
{
    const number_function *function = tensor->more;
    const bool is_f64 = tensor->dtype == FSDP_F64;
    for (size_t i = 0; i < count; i++) {
        double number = is_f64 ? ((const double *)from)[i] : (double)((const float *)from)[i];
        double result = function->compute(number);
        if (is_f64)
            ((double *)to)[i] = result;
        else
            result = (double)(((float *)to)[i] = (float)result);
        if (is_misfit(number, result))
            return fsdp_fail(err, FSDP_ERR_DAMAGED, "the %s of %g is not a finite number of %s",
                             function->name, number, fsdp_dtype_name(tensor->dtype));
    }
    return FSDP_OK;
}

static fsdp_status read_computed(const fsdp_derived *tensor, fsdp_reader *reader,
                                 const fsdp_box *box, void *data, fsdp_error *err)
{
    return read_changed(tensor, reader, box, data, compute_run, err);
}

static const fsdp_derived_ops computed_ops = {read_computed, 1};

static fsdp_status make_computed(fsdp_arena *arena, const fsdp_derived *part,
                                 const number_function *function, const fsdp_derived **out,
                                 fsdp_error *err)
{
    FSDP_TRY(widen(arena, part, &part, err));
    fsdp_derived like = {.ops = &computed_ops,
                         .dtype = part->dtype,
                         .ndim = part->ndim,
                         .shape = part->shape,
                         .parts = &part,
                         .part_count = 1,
                         .more = function};
    return make_changed(arena, &like, out, err);
}

fsdp_status fsdp_derive_exp(fsdp_arena *arena, const fsdp_derived *part, const fsdp_derived **out,
                            fsdp_error *err)
{
    return make_computed(arena, part, &power_of_e, out, err);
}

fsdp_status fsdp_derive_log(fsdp_arena *arena, const fsdp_derived *part, const fsdp_derived **out,
                            fsdp_error *err)
{
    return make_computed(arena, part, &logarithm, out, err);
}
