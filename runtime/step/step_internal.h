/* Between the files of this room. See step.h. */
#ifndef FSDP_STEP_INTERNAL_H
#define FSDP_STEP_INTERNAL_H

#include "runtime/step/step.h"

/* --- unit.c ----------------------------------------------------------------------------------- */

/* The unit of the parameters that no other unit has. */
fsdp_status fsdp_unit_create_root(fsdp_model *model, const fsdp_unit_opts *opts, fsdp_unit **unit_out,
                                  fsdp_error *err);
void fsdp_unit_free(fsdp_unit *unit);  /* accepts NULL; its groups were released with the root */

/* --- unit_groups.c ---------------------------------------------------------------------------- */

/* Have the meshes of its parameters the dims that its options name? */
fsdp_status fsdp_unit_check_meshes(const fsdp_unit *unit, fsdp_error *err);
/* A unit of several groups has no custom collective. */
fsdp_status fsdp_unit_check_custom(const fsdp_unit *unit, fsdp_error *err);
/* Local. Each mesh of its parameters is a group. */
fsdp_status fsdp_unit_plan_groups(fsdp_unit *unit, fsdp_error *err);
void fsdp_unit_release_groups(fsdp_unit *unit);

/* --- unit_hooks.c ----------------------------------------------------------------------------- */

/* For end_backward: of a unit whose post_backward did not come. */
fsdp_status fsdp_unit_complete_backward(fsdp_unit *unit, fsdp_error *err);
/* For end_forward: of a unit whose members ran in part. */
fsdp_status fsdp_unit_complete_forward(fsdp_unit *unit, fsdp_error *err);

/* --- root_context.c --------------------------------------------------------------------------- */

/* A context of the root's own. Also when this fails, fsdp_root_leave_context ends it. */
fsdp_status fsdp_root_create_context(fsdp_root *root, fsdp_error *err);
/* The context is freed when no other root shares it. Accepts a root without. */
void fsdp_root_leave_context(fsdp_root *root);
/* Makes room for the largest number of reductions in flight that any unit of the context has set. */
fsdp_status fsdp_root_size_inputs(const fsdp_root *root, fsdp_context *context, fsdp_error *err);

/* --- root_drop.c ------------------------------------------------------------------------------ */

/* The compute stream waits for every reduction. Frees gathers that no call waits for, and forgets the order
 * of this root's forwards. */
void fsdp_root_wait_reductions(fsdp_root *root);
/* Gives back everything that a step has made: gathers, gathered parameters, gradients of any kind. */
void fsdp_root_drop_all(fsdp_root *root);

/* --- root_check.c ----------------------------------------------------------------------------- */

/* Collective among the root's ranks: all have declared the same. */
fsdp_status fsdp_root_check_structure(fsdp_root *root, fsdp_error *err);
/* With --check only: compares the events of all ranks since the last comparison. */
fsdp_status fsdp_root_check_events(fsdp_root *root, fsdp_error *err);
/* For --check, at the end of a backward: on standard error, trainable parameters whose gradient nobody has
 * asked for, each one once. */
void fsdp_root_report_lacking(const fsdp_root *root);

#endif
