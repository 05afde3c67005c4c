/* What came of a rank, for tests that run several. */
#ifndef FSDP_TESTS_RANK_OUTCOME_H
#define FSDP_TESTS_RANK_OUTCOME_H

#include <fsdp/status.h>

typedef struct rank_outcome {
    fsdp_status status;
    fsdp_error err;
} rank_outcome;

/* The failure of the lowest failing rank, but rather of one that failed by itself than of one that missed
 * another: the cause before its echoes. */
fsdp_status first_failure(const rank_outcome *outcomes, int n, fsdp_error *err);

#endif
