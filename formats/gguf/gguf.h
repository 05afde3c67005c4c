/*
 * Room gguf: GGUF files of llama.cpp, versions 2 and 3. A file is a header, key-value pairs, descriptions of
 * tensors and, from a multiple of general.alignment on, their bytes; all offsets count from there.
 *
 *   gguf_type.c    ggml's types of tensors, and the types of values
 *   gguf_read.c    the format "gguf" as a source: one file, or the parts of a split one; reads numbers,
 *                  strings and values at growing offsets of a file, in either byte order
 *   gguf_write.c   the format "gguf" as a packed target (target/packed.h)
 *
 * In: bytes of a file, which may be hostile. Out: a catalog (source.h). Only detect calls this room.
 */
#ifndef FSDP_GGUF_H
#define FSDP_GGUF_H

#include "formats/source.h"
#include "formats/target.h"

enum { GGUF_MAGIC = 4, GGUF_DIMS = 4, GGUF_ALIGNMENT = 32, GGUF_LONGEST_NAME = 63, GGUF_LONGEST_KEY = 65535 };

/* Types of values, as files number them. */
typedef enum gguf_kind {
    GGUF_U8 = 0, GGUF_I8, GGUF_U16, GGUF_I16, GGUF_U32, GGUF_I32, GGUF_F32, GGUF_BOOL, GGUF_STRING,
    GGUF_ARRAY, GGUF_U64, GGUF_I64, GGUF_F64, GGUF_KINDS
} gguf_kind;

/* Bytes of a number; of a string and an array the fewest that one takes. 0: there is no such type. */
size_t gguf_kind_size(uint32_t kind);

/* By ggml's number; the name is NULL where ggml has no type. Types without a dtype are only named. */
typedef struct gguf_type { const char *name; fsdp_dtype dtype; } gguf_type;
enum { GGUF_TYPES = 41 };
extern const gguf_type gguf_types[GGUF_TYPES];

extern const fsdp_format_writer fsdp_gguf_writer;   /* gguf_write.c */

#endif
