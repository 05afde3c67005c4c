/*
 * Room safetensors: files of safetensors, Hugging Face directories of them, the cut files of DCP, and
 * Nanotron's trees.
 *
 * In: files whose bytes may be hostile, or the tensors of a packed target. Out: the catalog of a source
 * (source.h), or files byte for byte as the format's library and huggingface_hub write them.
 *
 *   safetensors_header.c  parses and checks the header of one file
 *   safetensors_read.c    the format as a source: one file, a directory with an index, files of DCP's ranks;
 *                         what __metadata__ of the files says
 *   safetensors_choice.c  which of several models in a directory is read; numbered files must all be there
 *   safetensors_tree.c    folders as modules, a file per parameter and rank
 *   safetensors_write.c   both formats of the room, "safetensors" and "hf", as packed targets
 *
 * A file is:
 *
 *     u64 n (little-endian), n bytes of JSON, then the data of the tensors without gaps or overlaps
 *
 * Callers: detect (the list of formats) and dcp (this header, for items in safetensors files). The room
 * calls source and target.
 */
#ifndef FSDP_SAFETENSORS_H
#define FSDP_SAFETENSORS_H

#include "base/data/name_table.h"
#include "base/data/text_pairs.h"
#include "formats/source.h"
#include "formats/source/escaped_names.h"
#include "formats/target.h"

/* Bytes of a header: the limit of the format's library. */
enum { FSDP_SAFETENSORS_HEADER_MOST = 100000000 };
/* The key of the metadata by which DCP says where the tensors of a rank's file lie. */
#define FSDP_SAFETENSORS_SHARDING "DCP_SHARDING_INFO"

typedef struct fsdp_safetensors_entry {
    const char *name;          /* as it stands in the file */
    size_t name_size;
    const char *true_name;     /* the unescaped name */
    size_t true_size;
    fsdp_dtype dtype;
    int ndim;
    const int64_t *shape;      /* in elements of the dtype; the last dim of F4 and F6 counts bytes */
    int64_t begin, end;        /* offsets in the file */
    bool is_added;             /* set by readers: the source has it as a tensor, with this number */
    size_t tensor;
    const int64_t *lo;         /* the box in the whole tensor (DCP_SHARDING_INFO); NULL: not stated */
} fsdp_safetensors_entry;

/* Zero-initialise; release after use, also after a failure. */
typedef struct fsdp_safetensors {
    fsdp_arena arena;
    fsdp_safetensors_entry *entries;   /* in the order of the header */
    size_t count, room;
    fsdp_name_table names;     /* -> number of the entry */
    bool has_metadata, is_sharded;     /* is_sharded: there is a DCP_SHARDING_INFO */
    fsdp_text_pairs metadata;
    fsdp_escaped_names escaped_names;
} fsdp_safetensors;

/* Reads the header of a file of the source that is a whole safetensors file. */
fsdp_status fsdp_safetensors_read(const fsdp_source *source, int file, fsdp_safetensors *header,
                                  fsdp_error *err);
void fsdp_safetensors_release(fsdp_safetensors *header);

/* The index of a directory, of the variant that the options name; without one the only index there is, also
 * that of a variant; NULL: none. FSDP_ERR_USAGE when several are of equal right. */
fsdp_status fsdp_safetensors_choose_index(const fsdp_probe *probe, const char **name_out, fsdp_error *err);
/* Lists the files of the one model of a directory without an index, in at most probe->name_count names, which
 * are borrowed. FSDP_ERR_USAGE lists the models when nothing says which one is meant. When the names state
 * the number of files, all of them must exist: FSDP_ERR_DAMAGED names the first one that is missing. */
fsdp_status fsdp_safetensors_choose_files(const fsdp_probe *probe, const char **names_out, size_t *count_out,
                                          fsdp_error *err);

extern const fsdp_format_writer fsdp_safetensors_writer, fsdp_hf_writer;   /* safetensors_write.c */

#endif
