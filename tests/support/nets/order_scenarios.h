/*
 * The order in which units gather, reshard and reduce: scenarios C6 to C8 and C11 to C15 of PyTorch's own
 * tests (docs/scenarios.md). "U" is unshard, "R" reshard, "post" a post_backward that has returned. The host
 * touches no tensor, so that they run on every device.
 */
#ifndef FSDP_ORDER_SCENARIOS_H
#define FSDP_ORDER_SCENARIOS_H

#include "tests/support/ranks/worlds.h"

/* "C6", "C7", ...; NULL after the last. */
const char *order_scenario_at(int i);
/* Has it settings that go with so many ranks? */
bool order_scenario_fits(const char *name, int ranks);
/* Runs those. */
fsdp_status order_scenario_run(const char *name, const worlds_setup *setup, fsdp_error *err);

#endif
