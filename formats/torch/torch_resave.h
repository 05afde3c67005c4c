/*
 * Encodes parts of pickles as torch.save files in memory, for formats that keep as bytes what only the writer
 * of a value can interpret. torch_blob.c reads them.
 */
#ifndef FSDP_TORCH_RESAVE_H
#define FSDP_TORCH_RESAVE_H

#include "formats/torch/torch_emit.h"
#include "formats/torch/torch_internal.h"

/* Encodes a part of a pickle, node by node, with the storages that it refers to. Leaves out empty when the
 * result would exceed `most` bytes, or is impossible: storages without bytes or in another byte order, a
 * tuple inside itself. */
FSDP_CHECKED fsdp_status torch_resave_node(const torch_archive *archive, fsdp_node node, size_t most,
                                           fsdp_text *out, fsdp_error *err);

#endif
