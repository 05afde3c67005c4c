/* Values for the tests of kernels/nn.h: seeded arrays, and comparisons with numbers of f64. */
#ifndef FSDP_NN_VALUES_H
#define FSDP_NN_VALUES_H

#include "kernels/nn.h"
#include <fsdp/fsdp.h>

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>

/* count numbers in [-1, 1) of this name; the caller frees them. */
static inline float *values(const char *name, int64_t count)
{
    float *data = malloc(((size_t)count + 1) * sizeof *data);
    cr_assert(data);
    for (int64_t i = 0; i < count; i++)
        data[i] = (float)fsdp_uniform(5, name, (uint64_t)i);
    return data;
}

static inline fsdp_nn *open_nn(int threads)
{
    fsdp_nn *nn;
    cr_assert_eq(fsdp_nn_open_cpu(threads, &nn, NULL), FSDP_OK);
    return nn;
}

static inline void finish_nn(fsdp_nn *nn)
{
    cr_assert_eq(nn->ops->finish(nn, NULL), FSDP_OK);
    nn->ops->close(nn);
}

static inline void expect_near(double got, double want, double tolerance, const char *what, int64_t i)
{
    cr_assert(fabs(got - want) <= tolerance * (1 + fabs(want)), "%s %lld: %.9g, not %.9g", what,
              (long long)i, got, want);
}

#endif
