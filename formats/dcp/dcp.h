/* What the two files of the DCP reader share: dcp_metadata.c (what there is) and dcp_read.c (bytes). */
#ifndef FSDP_DCP_H
#define FSDP_DCP_H

#include "formats/safetensors/safetensors.h"
#include "formats/torch/torch_internal.h"

typedef struct dcp_state dcp_state;

/* A range of a file. */
typedef struct dcp_item {
    int file;
    int64_t offset, length;
    bool is_packed;            /* with zstd */
    const fsdp_safetensors *header;   /* of a file that is safetensors: the range says nothing; or NULL */
} dcp_item;

/* A box of a tensor and where it is. */
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
/* About so many pieces more will be added. */
void dcp_expect(dcp_state *state, size_t pieces);
/* A whole file of metadata; *data_out is the caller's, also after a failure. */
fsdp_status dcp_read_bytes(fsdp_io *io, const char *path, char **data_out, size_t *size_out, fsdp_error *err);
bool dcp_is_rank_metadata(const char *name);

#endif
