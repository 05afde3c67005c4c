/* kernels/cuda/optim.cu, run by the host, against fsdp_tensor_adamw and fsdp_tensor_sgd: every
 * bit agrees. */
#include "tests/unit/kernels/cuda/cuda_cases.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { OPERANDS = 5, MOST_TENSORS = 6 };

/* The operands of one tensor: param, master, grad and two moments; and what C makes of them. */
typedef struct tensor_case {
    case_buffer found[OPERANDS], expected[OPERANDS];
    fsdp_optim_tensors tensors, reference;
} tensor_case;

static const char *const names[OPERANDS] = {"param", "master", "grad", "moment 0", "moment 1"};

static bool is_half(fsdp_dtype dtype)
{
    return dtype == FSDP_BF16 || dtype == FSDP_F16;
}

static fsdp_optim_tensors point_at(const fsdp_optim_tensors *like, const case_buffer *operands)
{
    fsdp_optim_tensors tensors = *like;
    tensors.param = operands[0].data;
    tensors.master = like->master ? (float *)(void *)operands[1].data : NULL;
    tensors.grad = operands[2].data;
    tensors.moments[0] = operands[3].data;
    tensors.moments[1] = operands[4].data;
    return tensors;
}

static float some_master;

/* Elements after a multiple of 16 bytes where operands begin; those of gradients may differ. */
typedef struct skews {
    size_t grad, others;
} skews;

/* Mostly numbers as in training, sometimes any codes. NULL: at addresses by chance. */
static void create_operands(tensor_case *one, const skews *at)
{
    fsdp_optim_tensors *tensors = &one->tensors;
    size_t count = tensors->count;
    fsdp_dtype types[OPERANDS] = {tensors->param_type, FSDP_F32, tensors->grad_type,
                                  tensors->moment_type, tensors->moment_type};
    bool is_usual = case_below(3) > 0;
    for (int i = 0; i < OPERANDS; i++) {
        one->found[i] = at ? case_tensor_at(types[i], count, i == 2 ? at->grad : at->others)
                           : case_tensor(types[i], count, i != 1);
        if (is_usual)
            case_fill_usual(one->found[i].data, types[i], count, i == 4 ? 1e-4 : 0.1);
        one->expected[i] = case_buffer_copy(&one->found[i]);
    }
    one->reference = point_at(tensors, one->expected);
    *tensors = point_at(tensors, one->found);
}

/* Types as in training, sometimes any. */
static void create_case(tensor_case *one, size_t count)
{
    static const fsdp_dtype usual[] = {FSDP_F32, FSDP_BF16, FSDP_F16, FSDP_F64};
    fsdp_optim_tensors *tensors = &one->tensors;
    *tensors = (fsdp_optim_tensors){.count = count};
    tensors->param_type = case_below(4) == 0 ? case_float() : usual[case_below(4)];
    tensors->grad_type = case_below(2) == 0 ? tensors->param_type : case_float();
    tensors->moment_type = case_below(2) == 0 ? FSDP_F32 : case_float();
    tensors->master = is_half(tensors->param_type) && case_below(2) == 0 ? &some_master : NULL;
    create_operands(one, NULL);
}

static void check_case(tensor_case *one)
{
    for (int i = 0; i < OPERANDS; i++) {
        case_expect_equal(&one->found[i], &one->expected[i], names[i]);
        case_buffer_free(&one->found[i]);
        case_buffer_free(&one->expected[i]);
    }
}

/* Factors of clipping, in the device's memory. */
static const double *random_clip(void)
{
    static const double factors[] = {0.41, 1, FSDP_SKIPPED};
    const size_t which = case_below(5);
    return which < 3 ? &factors[which] : NULL;
}

static fsdp_adamw_step random_adamw(void)
{
    return (fsdp_adamw_step){.lr = ldexp(1, -(int)case_below(12)),
                             .beta1 = case_below(2) == 0 ? 0.9 : 0.3,
                             .beta2 = 0.999,
                             .eps = 1e-8,
                             .weight_decay = case_below(2) == 0 ? 0.01 : 0,
                             .step = 1 + (int64_t)case_below(100),
                             .grad_scale = case_below(2) == 0 ? 1 : 0.37,
                             .maximize = case_below(4) == 0,
                             .clip = random_clip()};
}

static fsdp_sgd_step random_sgd(void)
{
    return (fsdp_sgd_step){.lr = 0.05,
                           .momentum = case_below(3) == 0 ? 0 : 0.9,
                           .dampening = case_below(2) == 0 ? 0 : 0.1,
                           .weight_decay = case_below(2) == 0 ? 0.01 : 0,
                           .nesterov = case_below(2) == 0,
                           .is_first = case_below(3) == 0,
                           .maximize = case_below(4) == 0,
                           .grad_scale = case_below(2) == 0 ? 1 : 0.37,
                           .clip = random_clip()};
}

Test(cuda_kernels_optim, adamw_is_that_of_c)
{
    tensor_case cases[MOST_TENSORS];
    fsdp_optim_tensors tensors[MOST_TENSORS];
    fsdp_adamw_step steps[MOST_TENSORS];
    for (uint64_t seed = 0; seed < 60; seed++) {
        case_seed(seed);
        size_t n = case_below(MOST_TENSORS + 1);
        for (size_t i = 0; i < n; i++) {
            create_case(&cases[i], case_count(case_below(4) == 0 ? 20000 : 500));
            tensors[i] = cases[i].tensors;
            steps[i] = i > 0 && case_below(2) == 0 ? steps[i - 1] : random_adamw();
        }
        case_expect_success(fsdp_cuda_adamw(tensors, n, steps, NULL));
        for (size_t i = 0; i < n; i++) {
            fsdp_tensor_adamw(&cases[i].reference, &steps[i]);
            check_case(&cases[i]);
        }
    }
}

Test(cuda_kernels_optim, sgd_is_that_of_c)
{
    tensor_case cases[MOST_TENSORS];
    fsdp_optim_tensors tensors[MOST_TENSORS];
    fsdp_sgd_step steps[MOST_TENSORS];
    for (uint64_t seed = 0; seed < 60; seed++) {
        case_seed(seed);
        size_t n = case_below(MOST_TENSORS + 1);
        for (size_t i = 0; i < n; i++) {
            create_case(&cases[i], case_count(case_below(4) == 0 ? 20000 : 500));
            tensors[i] = cases[i].tensors;
            steps[i] = i > 0 && case_below(2) == 0 ? steps[i - 1] : random_sgd();
            if (steps[i].momentum == 0) {
                tensors[i].moments[0] = NULL;
                cases[i].reference.moments[0] = NULL;
            }
        }
        case_expect_success(fsdp_cuda_sgd(tensors, n, steps, NULL));
        for (size_t i = 0; i < n; i++) {
            fsdp_tensor_sgd(&cases[i].reference, &steps[i]);
            check_case(&cases[i]);
        }
    }
}

/* Tensors of three tiles and a part of one, which begin equally far from a multiple of 16 bytes, but
 * for some gradients: whole tiles are taken by vectors, with each list of types that has a path. */
static void try_whole_tiles(const fsdp_optim_tensors *types, const skews *at)
{
    tensor_case one = {.tensors = *types};
    const fsdp_adamw_step adamw = random_adamw();
    one.tensors.count = 3 * 2048 + 77;
    create_operands(&one, at);
    case_expect_success(fsdp_cuda_adamw(&one.tensors, 1, &adamw, NULL));
    fsdp_tensor_adamw(&one.reference, &adamw);
    check_case(&one);

    const fsdp_sgd_step sgd = random_sgd();
    one.tensors = *types;
    one.tensors.count = 3 * 2048 + 77;
    create_operands(&one, at);
    case_expect_success(fsdp_cuda_sgd(&one.tensors, 1, &sgd, NULL));
    fsdp_tensor_sgd(&one.reference, &sgd);
    check_case(&one);
}

Test(cuda_kernels_optim, whole_tiles_are_those_of_c)
{
    static const fsdp_optim_tensors types[] = {
        {.param_type = FSDP_F32, .grad_type = FSDP_F32, .moment_type = FSDP_F32},
        {.param_type = FSDP_F32, .grad_type = FSDP_BF16, .moment_type = FSDP_F32},
        {.param_type = FSDP_BF16, .grad_type = FSDP_BF16, .moment_type = FSDP_F32},
        {.param_type = FSDP_BF16, .grad_type = FSDP_BF16, .moment_type = FSDP_BF16},
        {.param_type = FSDP_BF16,
         .master = &some_master,
         .grad_type = FSDP_BF16,
         .moment_type = FSDP_F32},
        {.param_type = FSDP_BF16,
         .master = &some_master,
         .grad_type = FSDP_F32,
         .moment_type = FSDP_F32},
        {.param_type = FSDP_F16,
         .master = &some_master,
         .grad_type = FSDP_F16,
         .moment_type = FSDP_F32},
    };
    for (uint64_t seed = 0; seed < 12; seed++) {
        case_seed(seed);
        for (size_t i = 0; i < sizeof types / sizeof *types; i++)
            try_whole_tiles(&types[i], &(skews){seed % 3 + seed / 6 * 2, seed % 3});
    }
}

/* More tensors than a launch has capacity for, with more groups of parameters than it has factors
 * for. */
Test(cuda_kernels_optim, a_thousand_tensors_are_three_launches)
{
    enum { TENSORS = 1000, COUNT = 3, GROUPS = 20 };
    static float params[TENSORS][COUNT], grads[TENSORS][COUNT], moments[2][TENSORS][COUNT];
    static float expected[TENSORS][COUNT], expected_moments[2][TENSORS][COUNT];
    static fsdp_optim_tensors tensors[TENSORS];
    static fsdp_adamw_step steps[TENSORS];
    for (int groups = 2; groups <= GROUPS; groups += GROUPS - 2) {
        case_seed((uint64_t)groups);
        for (int i = 0; i < TENSORS; i++) {
            case_fill_usual(params[i], FSDP_F32, COUNT, 1);
            case_fill_usual(grads[i], FSDP_F32, COUNT, 1);
            for (int k = 0; k < COUNT; k++)
                moments[0][i][k] = moments[1][i][k] = 0;
            steps[i] = (fsdp_adamw_step){.lr = 0.001 * (1 + i % groups),
                                         .beta1 = 0.9,
                                         .beta2 = 0.99,
                                         .eps = 1e-8,
                                         .step = 1,
                                         .grad_scale = 1};
            tensors[i] = (fsdp_optim_tensors){.param = params[i],
                                              .param_type = FSDP_F32,
                                              .grad = grads[i],
                                              .grad_type = FSDP_F32,
                                              .moments = {moments[0][i], moments[1][i]},
                                              .moment_type = FSDP_F32,
                                              .count = COUNT};
        }
        memcpy(expected, params, sizeof params);
        memcpy(expected_moments, moments, sizeof moments);
        size_t before = case_launches();
        case_expect_success(fsdp_cuda_adamw(tensors, TENSORS, steps, NULL));
        if (groups == 2)
            cr_assert_eq(case_launches() - before, 3);
        for (int i = 0; i < TENSORS; i++) {
            fsdp_optim_tensors reference = tensors[i];
            reference.param = expected[i];
            reference.moments[0] = expected_moments[0][i];
            reference.moments[1] = expected_moments[1][i];
            fsdp_tensor_adamw(&reference, &steps[i]);
        }
        cr_assert(memcmp(expected, params, sizeof params) == 0);
        cr_assert(memcmp(expected_moments, moments, sizeof moments) == 0);
    }
}
