/*
 * Encodes single values as torch.save files in memory, for formats that keep as bytes what only the writer
 * of a value can interpret. torch_blob.c reads them.
 *
 *   torch_resave_node: a part of a pickle, node by node, with the storages that it refers to
 *   torch_resave_value: an fsdp_value with tensors in it (values that differ from rank to rank)
 */
#ifndef FSDP_TORCH_RESAVE_H
#define FSDP_TORCH_RESAVE_H

#include "formats/torch/torch_emit.h"
#include "formats/torch/torch_internal.h"

/* Both leave out empty when the result would exceed `most` bytes, or is impossible: storages without bytes
 * or in another byte order, a tuple inside itself. */
FSDP_CHECKED fsdp_status torch_resave_node(const torch_archive *archive, fsdp_node node, size_t most,
                                           fsdp_text *out, fsdp_error *err);
FSDP_CHECKED fsdp_status torch_resave_value(fsdp_source *source, const fsdp_value *value, size_t most,
                                            fsdp_text *out, fsdp_error *err);

/* The key, a tuple of strings, of the values of all ranks: {("fsdp", "per_rank"): [...]}. */
#define TORCH_PER_RANK_FIRST "fsdp"
#define TORCH_PER_RANK_SECOND "per_rank"

/* Restores fsdp_value_per_rank from the form that torch_resave_value gives it; any other value stays. */
FSDP_CHECKED fsdp_status torch_restore_per_rank(fsdp_value *value, fsdp_error *err);

#endif
