/*
 * Room llmc: GPT-2 models of llm.c (.bin): 256 numbers of 32 bits, then 16 tensors in a fixed order, those of
 * all layers stacked in one. Version 3 holds f32, version 5 bf16.
 *
 *   llmc_layout.c  the names and shapes of the tensors, out of the header's numbers
 *   llmc_read.c    the format "llmc" as a source: the numbers are values
 *   llmc_write.c   the format "llmc" as a packed target (target/packed.h), of exactly these names
 *
 * In: bytes of a file, which may be hostile. Out: a catalog (source.h). Only detect calls this room.
 */
#ifndef FSDP_LLMC_H
#define FSDP_LLMC_H

#include "formats/target.h"
#include <fsdp/dtype.h>
#include <fsdp/status.h>

enum { LLMC_MAGIC = 20240326, LLMC_HEADER = 256, LLMC_BYTES = 4 * LLMC_HEADER };
enum { LLMC_TENSORS = 16, LLMC_DIMS = 3 };
enum { LLMC_F32 = 3, LLMC_BF16 = 5 };  /* versions */

/* The header's numbers from number 2 on. */
typedef enum llmc_number {
    LLMC_LENGTH, LLMC_VOCAB, LLMC_LAYERS, LLMC_HEADS, LLMC_CHANNELS, LLMC_PADDED_VOCAB, LLMC_NUMBERS
} llmc_number;

/* "max_seq_len", "vocab_size", "num_layers", "num_heads", "channels", "padded_vocab_size" */
extern const char *const llmc_number_names[LLMC_NUMBERS];

typedef struct llmc_tensor {
    const char *name;          /* "qkvw" */
    int ndim;
    int64_t shape[LLMC_DIMS];
} llmc_tensor;

/* NONE for a version that is not known, and 0 for a dtype that has none. */
fsdp_dtype llmc_dtype_of(int64_t version);
int llmc_version_of(fsdp_dtype dtype);

/* The tensors of a model, in their order. Fails with `status` when the numbers make no model. */
fsdp_status llmc_lay_out(const char *path, const int64_t numbers[LLMC_NUMBERS], fsdp_status status,
                         llmc_tensor tensors_out[LLMC_TENSORS], fsdp_error *err);

extern const fsdp_format_writer fsdp_llmc_writer;    /* llmc_write.c */

#endif
