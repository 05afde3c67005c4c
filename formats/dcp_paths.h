/* The paths of planner_data: where PyTorch puts every name when it nests them again. */
#ifndef FSDP_DCP_PATHS_H
#define FSDP_DCP_PATHS_H

#include "formats/target.h"

#include "base/mem.h"

/* Zero-initialise; release when done. */
typedef struct dcp_paths {
    const int32_t **paths;     /* per entry, see name_path.h */
    size_t *counts;
    fsdp_arena arena;
} dcp_paths;

/*
 * The path that each entry states, or by default has. All of them hold together: nothing is a dict and a
 * list, or a container and a tensor. Entries that would not fit in get a path of one element.
 */
FSDP_CHECKED fsdp_status dcp_paths_find(const fsdp_target_entry *entries, size_t count,
                                        dcp_paths *paths_out, fsdp_error *err);
void dcp_paths_release(dcp_paths *paths);

#endif
