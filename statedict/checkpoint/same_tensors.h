/* Names of one tensor in a checkpoint. Callers: derive and convert. */
#ifndef FSDP_SAME_TENSORS_H
#define FSDP_SAME_TENSORS_H

#include "statedict/checkpoint/checkpoint_internal.h"

/* Per entry the first entry of the same tensor, which aliases name; by_place: also where tensors of another
 * program lie in the same bytes. Reads no data. */
fsdp_status fsdp_same_tensors(const fsdp_checkpoint *from, bool by_place, size_t *one_out, fsdp_error *err);

#endif
