/*
 * A tree of safetensors files as Nanotron writes it: a folder per module, a file per parameter and rank.
 *
 *     20/checkpoint_metadata.json
 *     20/model/model/decoder/0/pp_block/attn/qkv_proj/model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors
 *
 * is the first half of "model.decoder.0.pp_block.attn.qkv_proj.weight". The tensor of a file is "data".
 */
#ifndef FSDP_SAFETENSORS_TREE_H
#define FSDP_SAFETENSORS_TREE_H

#include "formats/source.h"

/* True for the folder "model" next to checkpoint_metadata.json. */
bool fsdp_safetensors_is_tree(const fsdp_probe *probe);
/* Adds all tensors of the tree at the path of the source. */
fsdp_status fsdp_safetensors_add_tree(fsdp_source *source, fsdp_error *err);

#endif
