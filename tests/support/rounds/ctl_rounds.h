/* Random calls of a control plane, for threads and for real ranks. */
#ifndef FSDP_CTL_ROUNDS_H
#define FSDP_CTL_ROUNDS_H

#include <fsdp/ctl.h>
#include <stdint.h>

typedef struct ctl_rounds {
    uint64_t seed;             /* equal on all ranks */
    int rounds;
    size_t max_size;           /* of one rank's part */
} ctl_rounds;

/* An fsdp_rank_body; user is a const ctl_rounds. Every value that arrives is checked. */
fsdp_status run_ctl_rounds(void *user, fsdp_ctl *ctl, fsdp_error *err);

#endif
