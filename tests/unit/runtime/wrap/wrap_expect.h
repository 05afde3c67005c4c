/* Expectations of the tests of the FSDP1 face, on ranks that are threads. */
#ifndef FSDP_WRAP_EXPECT_H
#define FSDP_WRAP_EXPECT_H

#include "tests/support/nets/training.h"
#include <fsdp/root_init.h>

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

static inline void expect_ranks(int ranks, world_body body, void *user)
{
    fsdp_error err = {0};
    cr_assert_eq(run_worlds(ranks, "cpu", body, user, &err), FSDP_OK, "%d ranks: %s", ranks, err.text);
}

/* A value of fsdp_root_init_uniform(1). */
static inline float uniform(const char *name, int64_t i, int last_dim)
{
    return (float)(fsdp_uniform(1, name, (uint64_t)i) / sqrt(last_dim));
}

#endif
