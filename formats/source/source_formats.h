/* The table entries of the foreign formats, each defined in its own file; detect.c lists them. */
#ifndef FSDP_SOURCE_FORMATS_H
#define FSDP_SOURCE_FORMATS_H

#include "formats/source.h"

extern const fsdp_foreign_format fsdp_format_hdf5;          /* hdf5_read.c */
extern const fsdp_foreign_format fsdp_format_safetensors;   /* safetensors_read.c */
extern const fsdp_foreign_format fsdp_format_torch;         /* torch_read.c */
extern const fsdp_foreign_format fsdp_format_ranks;         /* ranks_read.c */
extern const fsdp_foreign_format fsdp_format_deepspeed;     /* deepspeed_read.c */
extern const fsdp_foreign_format fsdp_format_dcp;           /* dcp_read.c */
extern const fsdp_foreign_format fsdp_format_gguf;          /* gguf_read.c */
extern const fsdp_foreign_format fsdp_format_llmc;          /* llmc_read.c */
extern const fsdp_foreign_format fsdp_format_npy, fsdp_format_npz;   /* npz_read.c */

#endif
