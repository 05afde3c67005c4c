/*
 * The dict and list path of every entry of a target, from which the reader rebuilds the containers:
 * planner_data of DCP (dcp_write.c), the tree of a torch.save file (torch_write.c).
 */
#ifndef FSDP_NESTING_H
#define FSDP_NESTING_H

#include "formats/target.h"

#include "base/core/mem.h"

enum { NESTING_MOST = 1 << 21 };   /* containers; each takes some hundred bytes */

/* The outermost object. */
typedef enum nesting_root { NESTING_IN_DICT, NESTING_IN_LIST, NESTING_IN_TUPLE, NESTING_WHOLE } nesting_root;

/* Zero-initialise; release when done. */
typedef struct nesting {
    nesting_root root;         /* NESTING_TORCH only. WHOLE: there is one entry, and it is the object */
    const int32_t **paths;     /* per entry, see name_path.h */
    size_t *counts;
    fsdp_arena arena;
} nesting;

/* The reader that rebuilds the containers; it must find the same names in them. */
typedef enum nesting_reader {
    NESTING_DCP,               /* PyTorch: visits a list that holds a tensor or a dict with keys; no tuples */
    NESTING_TORCH              /* torch_names.c: visits it for a dict without keys, too */
} nesting_reader;

/*
 * Finds the path of each entry: the one that it states, or the default. No two contradict each other: no
 * place is a dict and a list, or a container and a tensor; lists have all positions, and their reader
 * visits them. Entries that would contradict, and those beyond NESTING_MOST containers, get a path of one
 * element.
 */
FSDP_CHECKED fsdp_status nesting_find(const fsdp_target_entry *entries, size_t count, nesting_reader reader,
                                      nesting *nesting_out, fsdp_error *err);
void nesting_release(nesting *paths);

#endif
