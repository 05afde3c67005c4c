/* Derived tensors that change numbers: casts and factors. See derived.h. */
#include "statedict/derive/derived.h"

#include "kernels/kernels.h"

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
static fsdp_status read_changed(const fsdp_derived *tensor, fsdp_block_reader *reader,
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

static fsdp_status read_cast(const fsdp_derived *tensor, fsdp_block_reader *reader,
                             const fsdp_box *box, void *data, fsdp_error *err)
{
    return read_changed(tensor, reader, box, data, cast_run, err);
}

static const fsdp_derived_ops cast_ops = {read_cast, 1};

static fsdp_status check_float(fsdp_dtype dtype, fsdp_error *err)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(dtype);
    return info && info->is_float
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_USAGE, "%s is no floating type", fsdp_dtype_name(dtype));
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

/* --- factors -------------------------------------------------------------------------------------- */

enum { SOME = 4096 };

static void scale_f64(const double *from, size_t count, double factor, double *to)
{
    for (size_t i = 0; i < count; i++)
        to[i] = from[i] * factor;
}

/* `to` and `from` have the same dtype. */
static fsdp_status scale_run(const fsdp_derived *tensor, const void *from, size_t count, void *to,
                             fsdp_error *err)
{
    const fsdp_kernels *kernels = fsdp_kernels_get();
    size_t size = fsdp_dtype_size(tensor->dtype), misfits = 0;
    float some[SOME], factor = (float)tensor->factor;
    if (tensor->dtype == FSDP_F64) {
        scale_f64(from, count, tensor->factor, to);
        return FSDP_OK;
    }
    for (size_t at = 0; at < count; at += SOME) {
        size_t n = count - at < SOME ? count - at : SOME;
        kernels->cast(some, FSDP_F32, (const char *)from + at * size, tensor->dtype, n,
                      FSDP_OVERFLOW_INF);
        for (size_t i = 0; i < n; i++)
            some[i] *= factor;
        misfits += kernels->cast((char *)to + at * size, tensor->dtype, some, FSDP_F32, n,
                                 FSDP_OVERFLOW_FAIL);
    }
    return misfits == 0 ? FSDP_OK
                        : fsdp_fail(err, FSDP_ERR_DAMAGED, "a value times %g does not fit in %s",
                                    tensor->factor, fsdp_dtype_name(tensor->dtype));
}

static fsdp_status read_scaled(const fsdp_derived *tensor, fsdp_block_reader *reader,
                               const fsdp_box *box, void *data, fsdp_error *err)
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
    return make_changed(arena, &like, out, err);
}
