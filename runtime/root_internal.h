/* What root.c needs of root_groups.c. */
#ifndef FSDP_ROOT_INTERNAL_H
#define FSDP_ROOT_INTERNAL_H

#include "runtime/unit_internal.h"
#include "runtime/work.h"

/* Collective: groups, their communicators, and what this rank holds of each parameter. */
fsdp_status fsdp_unit_make_groups(fsdp_unit *unit, fsdp_error *err);
void fsdp_unit_release_groups(fsdp_unit *unit);        /* their blocks were given back */
/* Collective: reductions on a communicator of their own, or no longer. */
fsdp_status fsdp_group_separate_reduce(fsdp_group *group, fsdp_error *err);

/* The lane of the widest mesh of the root's units (optim_clip.c); NULL when it was not connected. */
fsdp_lane *fsdp_root_all_ranks(fsdp_root *root);

#endif
