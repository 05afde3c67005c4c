/* The nested dicts and lists of a torch.save file. */
#ifndef FSDP_TORCH_TREE_H
#define FSDP_TORCH_TREE_H

#include "formats/torch/torch_emit.h"

/* Pickles one dict of all entries of opts, nested by their paths (nesting.h); the callback emit pickles one
 * entry and is called once for each. */
FSDP_CHECKED fsdp_status torch_emit_tree(fsdp_pickler *pickler, const fsdp_target_opts *opts,
                                         fsdp_status (*emit)(void *context, size_t entry, fsdp_error *err),
                                         void *context, fsdp_error *err);

#endif
