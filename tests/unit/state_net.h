/* The small net of state dicts' tests, in Criterion. */
#ifndef FSDP_TESTS_UNIT_STATE_NET_H
#define FSDP_TESTS_UNIT_STATE_NET_H

#include "tests/support/state_net.h"

#include <criterion/criterion.h>

static inline void expect_net_on(const char *device, state_case what)
{
    fsdp_error err = {0};
    cr_assert_eq(net_run_on(device, what, &err), FSDP_OK, "first mesh dim %lld on %s: %s",
                 (long long)what.mesh_shape[0], device, err.text);
}

/* On 1, 2, 3 and 4 ranks. */
static inline void expect_net(fsdp_status (*body)(state_net *net, fsdp_error *err), const void *user)
{
    for (int64_t ranks = 1; ranks <= 4; ranks++)
        expect_net_on(ranks == 2 ? "cpu-async" : "cpu",
                      (state_case){1, {ranks}, {"dp"}, declare_net, body, user, {0}});
}

#endif
