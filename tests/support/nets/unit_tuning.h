/* Settings of units that change order, groups or memory, but no result, for tests. */
#ifndef FSDP_UNIT_TUNING_H
#define FSDP_UNIT_TUNING_H

#include <fsdp/unit.h>

typedef struct unit_tuning {
    int prefetch;              /* number of neighbours to prefetch, in both directions */
    int inputs;                /* buffers of reduce-scatter */
    bool separate;             /* reduce-scatter in a group of its own */
    bool from_comm;            /* buffers in memory of the communicator */
} unit_tuning;

/* Applies all but the prefetch, which needs units in a row. */
fsdp_status tune_unit(fsdp_unit *unit, const unit_tuning *tuning, fsdp_error *err);
fsdp_status tune_row(fsdp_unit *const *units, int n, const unit_tuning *tuning, fsdp_error *err);

#endif
