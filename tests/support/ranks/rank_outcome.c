/* See rank_outcome.h. */
#include "tests/support/ranks/rank_outcome.h"

#include <stddef.h>

fsdp_status first_failure(const rank_outcome *outcomes, int n, fsdp_error *err)
{
    const rank_outcome *first = NULL;
    for (int i = 0; i < n; i++)
        if (outcomes[i].status != FSDP_OK &&
            (!first || (first->status == FSDP_ERR_PEER && outcomes[i].status != FSDP_ERR_PEER)))
            first = &outcomes[i];
    if (!first)
        return FSDP_OK;
    *err = first->err;
    return first->status;
}
