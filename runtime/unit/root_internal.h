/* Between the files that roots are made of. */
#ifndef FSDP_ROOT_INTERNAL_H
#define FSDP_ROOT_INTERNAL_H

#include "runtime/unit/unit_internal.h"
#include "runtime/unit/work.h"

/* --- root_context.c --------------------------------------------------------------------------- */

/* One of the root's own. Also when that fails, fsdp_context_leave ends it. */
fsdp_status fsdp_context_create(fsdp_root *root, fsdp_error *err);
/* The root has no context any more, which is freed when no other root shares it. Accepts one without. */
void fsdp_context_leave(fsdp_root *root);
/* Until every stream has done what was issued. */
void fsdp_context_drain(fsdp_context *context);
/* Room for as many reductions in flight as any unit wants, of the root and of those that share the
 * context. */
fsdp_status fsdp_context_size_inputs(fsdp_context *context, const fsdp_root *root, fsdp_error *err);

/* --- root.c ----------------------------------------------------------------------------------- */

/* Everything that a step has made: gathers, gathered parameters, gradients of any kind. */
void fsdp_root_drop_all(fsdp_root *root);

/* --- root_step.c ------------------------------------------------------------------------------ */

/* The compute stream waits for every reduction, gathers that nobody took go, and the order of this root's
 * forwards is forgotten. */
void fsdp_root_wait_reductions(fsdp_root *root);
/* A gather that nobody took. The compute stream waits for it: what it reads, shards or slices, may change or
 * go then. */
void fsdp_root_drop_gather(fsdp_group *group);

/* --- root_check.c ----------------------------------------------------------------------------- */

/* Collective among the root's ranks: all have declared the same. */
fsdp_status fsdp_root_check_structure(fsdp_root *root, fsdp_error *err);
/* The same, with --check only, else nothing: all have done the same since they were asked last. */
fsdp_status fsdp_root_check_events(fsdp_root *root, fsdp_error *err);

/* --- unit_set.c ------------------------------------------------------------------------------- */

/* A unit of several groups has no custom collective. */
fsdp_status fsdp_unit_check_custom(const fsdp_unit *unit, fsdp_error *err);

/* --- root_groups.c ---------------------------------------------------------------------------- */

/* Which parameters are groups, on which mesh: local. */
fsdp_status fsdp_unit_plan_groups(fsdp_unit *unit, fsdp_error *err);
/* Collective: their communicators. */
fsdp_status fsdp_unit_connect_groups(fsdp_unit *unit, fsdp_error *err);
/* What this rank holds of each parameter: local. */
fsdp_status fsdp_group_lay_out(fsdp_group *group, fsdp_error *err);
void fsdp_unit_release_groups(fsdp_unit *unit);        /* their blocks were given back */
/* Collective: reductions on a communicator of their own, or no longer. */
fsdp_status fsdp_group_separate_reduce(fsdp_group *group, fsdp_error *err);

/* The ordered communicator of the widest mesh of the root's units, which contains the others, for collectives
 * that the host makes itself: waits first for the streams' work on it. NULL when it was not connected. */
fsdp_status fsdp_root_widest_comm(fsdp_root *root, fsdp_ordered_comm **ordered_out, fsdp_error *err);
/* The same; it has all ranks of the world, for `what`. NULL, and no error, in a world of one. */
fsdp_status fsdp_root_world_comm(fsdp_root *root, const char *what, fsdp_ordered_comm **ordered_out,
                                 fsdp_error *err);
/* A world rank's position in the communicator: meshes may order their ranks differently. */
int fsdp_ordered_comm_position(const fsdp_ordered_comm *ordered, int rank);

#endif
