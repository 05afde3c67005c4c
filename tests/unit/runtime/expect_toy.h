/* Toys in Criterion: a body that fails on a rank fails the test. */
#ifndef FSDP_EXPECT_TOY_H
#define FSDP_EXPECT_TOY_H

#include "tests/support/nets/state_net.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

/* On device cpu, every seed of tests/cuda/seeds.py would run the same. */
static inline bool is_repeated(const char *device)
{
    const char *seed = getenv("FSDP_TEST_SEED");
    return seed && strcmp(seed, "1") != 0 && strcmp(device, "cpu") == 0;
}

static inline void expect_body_on(int ranks, const char *device, world_body body, void *user)
{
    fsdp_error err = {0};
    cr_assert_eq(run_worlds(ranks, device, body, user, &err), FSDP_OK, "%d ranks on %s: %s", ranks,
                 device, err.text);
}

/* On both devices. */
static inline void expect_body(int ranks, world_body body, void *user)
{
    if (!is_repeated("cpu"))
        expect_body_on(ranks, "cpu", body, user);
    expect_body_on(ranks, "cpu-async", body, user);
}

static inline void expect_toy_on(const char *device, toy_case what)
{
    fsdp_error err = {0};
    cr_assert_eq(toy_run_on(device, &what, &err), FSDP_OK, "first mesh dim %lld on %s: %s",
                 (long long)what.mesh_shape[0], device, err.text);
}

static inline void expect_toy(toy_case what)
{
    if (!is_repeated("cpu"))
        expect_toy_on("cpu", what);
    expect_toy_on("cpu-async", what);
}

static inline void expect_toy_on_line(int64_t ranks, toy_body declare, toy_body body)
{
    expect_toy((toy_case){.mesh_ndim = 1,
                          .mesh_shape = {ranks},
                          .mesh_names = {"dp"},
                          .declare = declare,
                          .body = body});
}

/* --- state_net.h ---------------------------------------------------------------------------------------- */

static inline void expect_net_on(const char *device, toy_case what)
{
    fsdp_error err = {0};
    cr_assert_eq(net_run_on(device, what, &err), FSDP_OK, "first mesh dim %lld on %s: %s",
                 (long long)what.mesh_shape[0], device, err.text);
}

/* On 1, 2, 3 and 4 ranks. */
static inline void expect_net(toy_body body, const void *user)
{
    for (int64_t ranks = 1; ranks <= 4; ranks++)
        expect_net_on(ranks == 2 ? "cpu-async" : "cpu",
                      (toy_case){1, {ranks}, {"dp"}, declare_net, body, user, {0}});
}

#endif
