/* Between the files of this room. See step.h. */
#ifndef FSDP_STEP_INTERNAL_H
#define FSDP_STEP_INTERNAL_H

#include "runtime/step/step.h"

/* --- unit.c ----------------------------------------------------------------------------------- */

/* The unit of the parameters that no other unit has. */
fsdp_status fsdp_unit_create_root(fsdp_model *model, const fsdp_unit_opts *opts, fsdp_unit **unit_out,
                                  fsdp_error *err);
void fsdp_unit_free(fsdp_unit *unit);  /* accepts NULL; its groups were released with the root */

/* Local. Each mesh of its parameters is a group. */
fsdp_status fsdp_unit_plan_groups(fsdp_unit *unit, fsdp_error *err);
void fsdp_unit_release_groups(fsdp_unit *unit);

/* --- root.c ----------------------------------------------------------------------------------- */

/* Makes memory for the largest number of reductions in flight that any unit of the context has set. */
fsdp_status fsdp_root_size_inputs(const fsdp_root *root, fsdp_context *context, fsdp_error *err);

/* The compute stream waits for every reduction. Frees gathers that no call waits for, and forgets the order
 * of this root's forwards. */
void fsdp_root_wait_reductions(fsdp_root *root);
/* Gives back everything that a step has made: gathers, gathered parameters, gradients of any kind. */
void fsdp_root_drop_all(fsdp_root *root);

/* With --check only: compares the events of all ranks since the last comparison. */
fsdp_status fsdp_root_check_events(fsdp_root *root, fsdp_error *err);
/* For --check, at the end of a backward: on standard error, trainable parameters whose gradient nobody has
 * asked for, each one once. */
void fsdp_root_report_lacking(const fsdp_root *root);

#endif
