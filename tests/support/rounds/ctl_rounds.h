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

/* An fsdp_rank_body for two or more ranks: rank 1 sends more than the window holds to rank 0, which is busy
 * for longer than the deadline before it receives. The deadline of rank 1 stays short. */
fsdp_status send_to_busy_rank(void *user, fsdp_ctl *ctl, fsdp_error *err);

#endif
