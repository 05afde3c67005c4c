/*
 * Values as torch.save files of their own, in memory: for formats that keep as bytes what only its writer
 * understands. Read back by torch_blob.c.
 *
 *   torch_resave_node: a part of a pickle, node by node as it was, with the storages that it speaks of
 *   torch_resave_value: a value of ours with tensors in it (what differs from rank to rank)
 */
#ifndef FSDP_TORCH_RESAVE_H
#define FSDP_TORCH_RESAVE_H

#include "formats/torch/torch_emit.h"
#include "formats/torch/torch_internal.h"

/* Both leave out empty when there would be more than `most` bytes, or when it cannot be told: storages
 * without bytes or in another byte order, a tuple inside itself. */
FSDP_CHECKED fsdp_status torch_resave_node(const torch_archive *archive, fsdp_node node, size_t most,
                                           fsdp_text *out, fsdp_error *err);
FSDP_CHECKED fsdp_status torch_resave_value(fsdp_source *source, const fsdp_value *value, size_t most,
                                            fsdp_text *out, fsdp_error *err);

/* The key, a tuple of strings, under which the values of all ranks lie: {("fsdp", "per_rank"): [...]}. */
#define TORCH_PER_RANK_FIRST "fsdp"
#define TORCH_PER_RANK_SECOND "per_rank"

/* What torch_resave_value made of fsdp_value_per_rank becomes that again; any other value stays. */
FSDP_CHECKED fsdp_status torch_restore_per_rank(fsdp_value *value, fsdp_error *err);

#endif
