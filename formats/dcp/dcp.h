/*
 * Room dcp: directories of torch.distributed.checkpoint, read and written.
 *
 * In: a directory with `.metadata` and `__R_N.distcp` files, which may be hostile, or the sharded entries
 * of a target. Out: the catalog of a source (source.h), or such a directory.
 *
 *   read:   dcp_read.c      the format: bid, open, items; uneven shards are chunks of one tensor
 *           dcp_metadata.c  names, boxes and file ranges from the pickled metadata; items of several ranks
 *           dcp_agree.c     signs that the files are of two saves
 *   write:  dcp_write.c     the target "dcp": items in one file per rank, and the pickle of .metadata;
 *                           lists that PyTorch loads as one value
 *
 * Only the tables of detect refer to this room. It calls torch (archives), safetensors (items), pickle,
 * source and target. This header is shared by dcp_metadata.c and dcp_read.c.
 */
#ifndef FSDP_DCP_H
#define FSDP_DCP_H

#include "formats/safetensors/safetensors.h"
#include "formats/source/source_facts.h"
#include "formats/torch/torch_internal.h"

typedef struct dcp_state dcp_state;

/* A range of a file. */
typedef struct dcp_item {
    int file;
    int64_t offset, length;
    bool is_packed;            /* compressed with zstd */
    const fsdp_safetensors *header;   /* header of a safetensors file, whose ranges are not used; or NULL */
} dcp_item;

/* A box of a tensor and its place. */
typedef struct dcp_piece {
    dcp_item item;
    int ndim;
    int64_t lo[FSDP_MAX_DIMS], len[FSDP_MAX_DIMS];
} dcp_piece;

typedef struct dcp_tensor {
    const char *name;
    size_t name_size;
    fsdp_dtype dtype;
} dcp_tensor;

/* --- dcp_metadata.c --- */
fsdp_status dcp_read_metadata(const fsdp_probe *probe, dcp_state *state, fsdp_source *source,
                              fsdp_error *err);

/* --- dcp_read.c --- */
fsdp_status dcp_add_piece(dcp_state *state, const dcp_tensor *tensor, size_t number, const dcp_piece *piece,
                          fsdp_error *err);
fsdp_status dcp_add_value(dcp_state *state, const char *name, size_t name_size, const dcp_item *item,
                          fsdp_error *err);
/* Reserves capacity for about so many pieces. */
void dcp_expect(dcp_state *state, size_t pieces);
bool dcp_is_rank_metadata(const char *name);

extern const fsdp_format_reader fsdp_dcp_reader;      /* dcp_read.c; the format is in dcp_write.c */
extern const fsdp_format_writer fsdp_dcp_writer;      /* dcp_write.c */

#endif
