/* Between the files of this room. See group.h. */
#ifndef FSDP_GROUP_INTERNAL_H
#define FSDP_GROUP_INTERNAL_H

#include "runtime/group/group.h"

/* --- group_trace.c ---------------------------------------------------------------------------- */

void fsdp_trace_collective(const fsdp_group *group, const fsdp_ordered_comm *ordered,
                           const fsdp_collective *call, const char *stream);
/* On a stream; bytes -1: none. */
void fsdp_trace_work(const fsdp_group *group, const char *event, const char *stream, int64_t bytes);

/* --- group_mesh.c ----------------------------------------------------------------------------- */

/* Memory for buffers of a collective. custom: runs it, or NULL; ordered: its communicator, or NULL. */
fsdp_allocator fsdp_group_allocator(const fsdp_group *group, const fsdp_custom_collective *custom,
                                    const fsdp_ordered_comm *ordered);

/* --- group_reduce.c --------------------------------------------------------------------------- */

void fsdp_group_drop_kept(fsdp_group *group);          /* gradients of a step under way */

#endif
