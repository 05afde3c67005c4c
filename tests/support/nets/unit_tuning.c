/* See unit_tuning.h. */
#include "tests/support/nets/unit_tuning.h"

enum { MOST_AHEAD = 8 };

fsdp_status tune_unit(fsdp_unit *unit, const unit_tuning *tuning, fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_set(unit, FSDP_UNIT_REDUCE_SCATTER_MAX_INPUT_BUFFERS, tuning->inputs, false,
                           err));
    FSDP_TRY(fsdp_unit_set(unit, FSDP_UNIT_ALLOCATE_MEMORY_FROM_PROCESS_GROUP, tuning->from_comm,
                           false, err));
    return fsdp_unit_set(unit, FSDP_UNIT_SEPARATE_REDUCE_SCATTER_GROUP, tuning->separate, false,
                         err);
}

static fsdp_status prefetch_neighbours(fsdp_unit *const *units, int n, int at, int most,
                                       fsdp_error *err)
{
    fsdp_unit *ahead[MOST_AHEAD], *behind[MOST_AHEAD];
    size_t n_ahead = 0, n_behind = 0;
    for (int d = 1; d <= most && d <= MOST_AHEAD; d++) {
        if (at + d < n)
            ahead[n_ahead++] = units[at + d];
        if (at - d >= 0)
            behind[n_behind++] = units[at - d];
    }
    FSDP_TRY(fsdp_unit_set_prefetch(units[at], FSDP_HOOK_PRE_FORWARD, ahead, n_ahead, err));
    return fsdp_unit_set_prefetch(units[at], FSDP_HOOK_PRE_BACKWARD, behind, n_behind, err);
}

fsdp_status tune_row(fsdp_unit *const *units, int n, const unit_tuning *tuning, fsdp_error *err)
{
    for (int i = 0; i < n; i++) {
        FSDP_TRY(prefetch_neighbours(units, n, i, tuning->prefetch, err));
        FSDP_TRY(tune_unit(units[i], tuning, err));
    }
    return FSDP_OK;
}
