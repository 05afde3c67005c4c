/*
 * Scenario C5: gradients of several dtypes, cut along several dims, are packed for a reduce-scatter
 * exactly as if each was cast first and then packed alone.
 */

#include "tests/unit/runtime/expect_toy.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fsdp/root_init.h>

enum { RANKS = 4, MOST = 6 };

typedef struct packed_param {
    int ndim;
    int64_t shape[3];
    fsdp_dtype dtype;
    int cut; /* dim */
} packed_param;

typedef struct packed_case {
    int count;
    packed_param params[MOST];
    fsdp_dtype reduce_dtype; /* NONE: the promoted one */
    bool keeps;              /* gradients of two backwards */
} packed_case;

typedef struct packed_unit {
    const packed_case *what;
    fsdp_mesh *mesh;
    fsdp_model *model;
    fsdp_unit *unit;
    fsdp_root *root;
    fsdp_param *params[MOST];
    unsigned char *input; /* of the reduction */
    size_t input_size;
    fsdp_dtype input_dtype;
} packed_unit;

/* --- the unit --------------------------------------------------------------------------------- */

static fsdp_status keep_input(void *user, fsdp_comm *comm, const fsdp_collective *call,
                              fsdp_error *err)
{
    packed_unit *packed = user;
    packed->input_dtype = call->dtype;
    packed->input_size = (size_t)call->count * RANKS * fsdp_dtype_size(call->dtype);
    packed->input = malloc(packed->input_size);
    memcpy(packed->input, call->in, packed->input_size);
    return fsdp_comm_run(comm, call, err);
}

static void place(void *user, const fsdp_param *param, fsdp_param_place *where)
{
    const packed_unit *packed = user;
    for (int i = 0; i < packed->what->count; i++)
        if (packed->params[i] == param)
            where->dim = packed->what->params[i].cut;
}

static fsdp_status build(packed_unit *packed, world_rank *rank, fsdp_error *err)
{
    const packed_case *what = packed->what;
    const fsdp_custom_collective keep = {.context = packed, .run = keep_input};
    int64_t size = RANKS;
    FSDP_TRY(fsdp_world_mesh(rank->world, 1, &size, (const char *[]){"dp"}, &packed->mesh, err));
    FSDP_TRY(fsdp_model_create(rank->world, &packed->model, err));
    for (int i = 0; i < what->count; i++) {
        char name[16];
        snprintf(name, sizeof name, "u.%d", i);
        FSDP_TRY(fsdp_model_add(packed->model,
                                &(fsdp_param_spec){.name = name,
                                                   .dtype = what->params[i].dtype,
                                                   .ndim = what->params[i].ndim,
                                                   .shape = what->params[i].shape},
                                &packed->params[i], err));
    }
    fsdp_unit_opts opts = {.mesh = packed->mesh};
    opts.context = packed;
    opts.placement = place;
    opts.reduce_dtype = what->reduce_dtype;
    FSDP_TRY(fsdp_unit_create(packed->model, "u", &opts, &packed->unit, err));
    FSDP_TRY(fsdp_root_create(packed->model, &opts, &packed->root, err));
    return fsdp_unit_set_custom_collective(packed->unit, FSDP_REDUCE_SCATTER, &keep, err);
}

/* Numbers that are rounded in the narrow dtypes. */
static float grad_at(int param, int64_t element)
{
    char name[16];
    snprintf(name, sizeof name, "g%d", param);
    return (float)fsdp_uniform(4, name, (uint64_t)element);
}

static int64_t count_of(const packed_param *param)
{
    return fsdp_shape_count(param->ndim, param->shape);
}

static fsdp_status backward(packed_unit *packed, fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_pre_backward(packed->unit, err));
    for (int i = 0; i < packed->what->count; i++) {
        fsdp_dtype dtype = packed->what->params[i].dtype;
        unsigned char *grad = fsdp_param_grad_raw(packed->params[i]);
        for (int64_t e = 0; grad && e < count_of(&packed->what->params[i]); e++) {
            float value = grad_at(i, e);
            fsdp_cast(grad + (size_t)e * fsdp_dtype_size(dtype), dtype, &value, FSDP_F32, 1);
        }
    }
    FSDP_TRY(fsdp_unit_post_backward(packed->unit, err));
    return fsdp_root_end_backward(packed->root, err);
}

/* --- the model -------------------------------------------------------------------------------- */

/* Casts one element of a gradient to the dtype of the reduction. */
static void cast_one(const packed_case *what, int param, int64_t element, fsdp_dtype to_type,
                     unsigned char *to)
{
    float value = grad_at(param, element);
    unsigned char own[8];
    fsdp_cast(own, what->params[param].dtype, &value, FSDP_F32, 1);
    if (what->keeps) { /* the sum of two equal gradients is exact */
        fsdp_cast(&value, FSDP_F32, own, what->params[param].dtype, 1);
        value *= 2;
        fsdp_cast(to, to_type, &value, FSDP_F32, 1);
    } else {
        fsdp_cast(to, to_type, own, what->params[param].dtype, 1);
    }
}

/* Packs the rank's rows of one parameter, padded with zeros; returns their end. */
static unsigned char *pack_rows(const packed_case *what, int param, int rank, fsdp_dtype dtype,
                                unsigned char *to)
{
    const packed_param *one = &what->params[param];
    int64_t outer = 1, rest = 1, n = one->shape[one->cut], chunk = (n + RANKS - 1) / RANKS;
    for (int i = 0; i < one->ndim; i++)
        *(i < one->cut ? &outer : &rest) *= i == one->cut ? 1 : one->shape[i];
    for (int64_t o = 0; o < outer; o++)
        for (int64_t row = rank * chunk; row < (rank + 1) * chunk; row++)
            for (int64_t r = 0; r < rest; r++) {
                if (row < n)
                    cast_one(what, param, (o * n + row) * rest + r, dtype, to);
                else
                    memset(to, 0, fsdp_dtype_size(dtype));
                to += fsdp_dtype_size(dtype);
            }
    return to;
}

/* Packs parameters in order, after sorting by dtype. */
static unsigned char *pack(const packed_unit *packed)
{
    const packed_case *what = packed->what;
    unsigned char *all = malloc(packed->input_size), *to = all;
    for (int rank = 0; rank < RANKS; rank++)
        for (int other = 0; other < 2; other++)
            for (int i = 0; i < what->count; i++)
                if ((what->params[i].dtype != what->params[0].dtype) == (other == 1))
                    to = pack_rows(what, i, rank, packed->input_dtype, to);
    return all;
}

static fsdp_status reduce_and_compare(packed_unit *packed, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_begin_forward(packed->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(packed->unit, err));
    FSDP_TRY(fsdp_unit_post_forward(packed->unit, err));
    FSDP_TRY(fsdp_root_end_forward(packed->root, err));
    if (packed->what->keeps) {
        FSDP_TRY(fsdp_unit_set(packed->unit, FSDP_UNIT_REQUIRES_GRADIENT_SYNC, false, false, err));
        FSDP_TRY(backward(packed, err));
        FSDP_TRY(fsdp_unit_set(packed->unit, FSDP_UNIT_REQUIRES_GRADIENT_SYNC, true, false, err));
    }
    FSDP_TRY(backward(packed, err));
    if (!packed->input)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "no reduction came");
    unsigned char *expected = pack(packed);
    bool is_equal = memcmp(expected, packed->input, packed->input_size) == 0;
    free(expected);
    return is_equal ? FSDP_OK
                    : fsdp_fail(err, FSDP_ERR_INTERNAL, "other bits, in %s",
                                fsdp_dtype_name(packed->input_dtype));
}

static fsdp_status run_case(world_rank *rank, fsdp_error *err)
{
    packed_unit packed = {.what = rank->user};
    fsdp_status status = build(&packed, rank, err);
    if (status == FSDP_OK)
        status = reduce_and_compare(&packed, err);
    fsdp_root_free(packed.root);
    fsdp_model_free(packed.model);
    fsdp_mesh_free(packed.mesh);
    free(packed.input);
    return status;
}

static void expect_case(const packed_case *what)
{
    expect_body(RANKS, run_case, (void *)what);
}

/* --- tests ------------------------------------------------------------------------------------ */

static packed_case mix(fsdp_dtype first, fsdp_dtype second)
{
    return (packed_case){.count = 4,
                         .params = {{2, {5, 3}, first, 0},
                                    {1, {7}, second, 0},
                                    {3, {2049, 2, 2}, first, 0},
                                    {2, {9, 5}, second, 0}}};
}

static void expect_mix(packed_case what)
{
    static const fsdp_dtype reduce_dtypes[] = {FSDP_DTYPE_NONE, FSDP_F32, FSDP_BF16};
    for (size_t i = 0; i < sizeof reduce_dtypes / sizeof *reduce_dtypes; i++) {
        what.reduce_dtype = reduce_dtypes[i];
        expect_case(&what);
    }
}

Test(scenarios_chunk_cat, c5_mixed_dtypes_are_cast_and_packed)
{
    expect_mix(mix(FSDP_BF16, FSDP_F32));
    expect_mix(mix(FSDP_F32, FSDP_BF16));
    expect_mix(mix(FSDP_F16, FSDP_F32));
}

/* Cut along another dim, pieces of every row: strided on both sides. */
Test(scenarios_chunk_cat, c5_strided_pieces_are_cast_and_packed)
{
    expect_mix((packed_case){.count = 3,
                             .params = {{2, {3, 8}, FSDP_BF16, 1},
                                        {3, {5, 4, 3}, FSDP_F32, 1},
                                        {1, {6}, FSDP_BF16, 0}}});
}

Test(scenarios_chunk_cat, c5_gradients_that_were_kept_are_packed_in_the_dtype_of_the_reduction)
{
    packed_case what = mix(FSDP_BF16, FSDP_F32);
    what.reduce_dtype = FSDP_F32;
    what.keeps = true;
    expect_case(&what);
}
