/*
 * Where every name of a target lies when its dicts and lists are made of names again: planner_data of DCP
 * (dcp_metadata_write.c), the tree of a torch.save file (torch_write.c).
 */
#ifndef FSDP_NESTING_H
#define FSDP_NESTING_H

#include "formats/target.h"

#include "base/core/mem.h"

enum { NESTING_MOST = 1 << 21 };   /* containers: some hundred bytes of memory each */

/* Zero-initialise; release when done. */
typedef struct nesting {
    const int32_t **paths;     /* per entry, see name_path.h */
    size_t *counts;
    fsdp_arena arena;
} nesting;

/* Who makes the containers: he must find the same names in them. */
typedef enum nesting_reader {
    NESTING_DCP,               /* PyTorch: a list is gone into when a tensor or a dict with keys is in it */
    NESTING_TORCH              /* torch_names.c: also for the sake of a dict without keys */
} nesting_reader;

/*
 * The path that each entry states, or by default has. All of them hold together: nothing is a dict and a
 * list, or a container and a tensor; lists have all positions, and are gone into. Entries that would not fit
 * in, and those of more containers than NESTING_MOST, get a path of one element.
 */
FSDP_CHECKED fsdp_status nesting_find(const fsdp_target_entry *entries, size_t count, nesting_reader reader,
                                      nesting *nesting_out, fsdp_error *err);
void nesting_release(nesting *paths);

#endif
