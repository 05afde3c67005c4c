/*
 * Room gguf: GGUF files of llama.cpp, versions 2 and 3. A file is a header, key-value pairs, descriptions of
 * tensors and, from a multiple of general.alignment on, their bytes; all offsets count from there.
 *
 *   gguf_type.c    ggml's types of tensors, and the types of values
 *   gguf_input.c   reads numbers and strings at growing offsets of a file, in either byte order
 *   gguf_value.c   a key-value pair as a value
 *   gguf_read.c    the format "gguf" as a source: one file, or the parts of a split one
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

/* The dtype of a ggml type; NONE where we have none, and *name_out is NULL when ggml has none, either. */
fsdp_dtype gguf_dtype_of(uint32_t type, const char **name_out);
/* The number of a dtype in ggml, -1 where ggml has none. */
int gguf_type_of(fsdp_dtype dtype);

/* --- reading --- */

typedef struct gguf_input {
    const fsdp_source *source;
    const char *path;
    int file;
    bool is_big;               /* big-endian numbers */
    int64_t at, size;          /* the next byte, the bytes of the file */
    uint8_t *buf;              /* bytes from buf_at on */
    int64_t buf_at, buf_size;
    size_t items;              /* of all arrays so far */
    int64_t memory, most;      /* bytes of all arrays, twice: the state dict has a copy; and the limit */
} gguf_input;

/* memory: bytes that arrays may take; 0: 256 MiB. */
fsdp_status gguf_input_init(gguf_input *in, fsdp_source *source, int file, int64_t memory, fsdp_error *err);
void gguf_input_release(gguf_input *in);
/* FSDP_ERR_DAMAGED when fewer bytes remain; what names them. */
fsdp_status gguf_take(gguf_input *in, size_t size, const char *what, void *out, fsdp_error *err);
fsdp_status gguf_take_u32(gguf_input *in, const char *what, uint32_t *out, fsdp_error *err);
fsdp_status gguf_take_u64(gguf_input *in, const char *what, uint64_t *out, fsdp_error *err);
/* A number that counts things of at least `least` bytes each: they must fit into the rest of the file. */
fsdp_status gguf_take_count(gguf_input *in, size_t least, const char *what, size_t *out, fsdp_error *err);
/* The caller frees *out, which ends with a zero byte. */
fsdp_status gguf_take_string(gguf_input *in, size_t most, const char *what, char **out, size_t *size_out,
                             fsdp_error *err);

/* A value and the type that it is stored with, which may be an array. */
fsdp_status gguf_take_value(gguf_input *in, const char *key, fsdp_value *value, fsdp_error *err);

extern const fsdp_format_writer fsdp_gguf_writer;   /* gguf_write.c */

#endif
