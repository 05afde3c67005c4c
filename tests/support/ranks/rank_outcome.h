/* The result of a rank, for tests that run several. */
#ifndef FSDP_RANK_OUTCOME_H
#define FSDP_RANK_OUTCOME_H

#include <fsdp/status.h>

typedef struct rank_outcome {
    fsdp_status status;
    fsdp_error err;
} rank_outcome;

/* The failure of the lowest failing rank. Ranks that failed by themselves come before ranks that only missed
 * another one, so that the cause is returned. */
fsdp_status first_failure(const rank_outcome *outcomes, int n, fsdp_error *err);

#endif
