/* Between the files of this room. See step.h. */
#ifndef FSDP_STEP_INTERNAL_H
#define FSDP_STEP_INTERNAL_H

#include "runtime/step/step.h"

/* --- unit.c ----------------------------------------------------------------------------------- */

/* A unit of several groups has no custom collective.
 * Before the root is made there are no groups: then this is checked again. */
fsdp_status fsdp_unit_check_custom(const fsdp_unit *unit, fsdp_error *err);

/* --- root_access.c ---------------------------------------------------------------------------- */

/* Makes memory for the largest number of reductions in flight that any unit of the context has set. */
fsdp_status fsdp_root_size_inputs(const fsdp_root *root, fsdp_context *context, fsdp_error *err);

/* The compute stream waits for every reduction. Frees gathers that no call waits for, and forgets the order
 * of this root's forwards. */
void fsdp_root_wait_reductions(fsdp_root *root);
/* Gives back everything that a step has made: gathers, gathered parameters, gradients of any kind. */
void fsdp_root_drop_all(fsdp_root *root);

/* --- root.c ----------------------------------------------------------------------------------- */

/* With --check only: compares the events of all ranks since the last comparison. */
fsdp_status fsdp_root_check_events(fsdp_root *root, fsdp_error *err);

#endif
