/*
 * Values: everything in a state dict that is not a tensor. A small tree that owns what it holds.
 */
#ifndef FSDP_VALUE_H
#define FSDP_VALUE_H

#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fsdp_value_kind {
    FSDP_VALUE_NULL = 0,
    FSDP_VALUE_BOOL, FSDP_VALUE_I64, FSDP_VALUE_U64, FSDP_VALUE_F64,
    FSDP_VALUE_STRING,         /* UTF-8 */
    FSDP_VALUE_BYTES,
    FSDP_VALUE_LIST,
    FSDP_VALUE_DICT,           /* items: key, value, key, value, ... in order */
    FSDP_VALUE_OPAQUE,         /* bytes of something only its writer understands */
    FSDP_VALUE_INTEGER,        /* one that 64 bits do not hold: decimal text */
    FSDP_VALUE_COMPLEX,
    FSDP_VALUE_CLASS,          /* an object of a class without a rule: its name, "module.Class" */
    FSDP_VALUE_TENSOR          /* a tensor inside a value: its number among the tensors of its source */
} fsdp_value_kind;

/* Zero-initialised it is null. */
typedef struct fsdp_value {
    fsdp_value_kind kind;
    union {
        bool boolean;
        int64_t i64;
        uint64_t u64;
        double f64;
        double complex_parts[2];   /* real, imaginary */
        uint64_t tensor;
        struct { char *data; size_t size; } bytes;     /* STRING, BYTES, OPAQUE, INTEGER, CLASS */
        struct { struct fsdp_value *items; size_t count; } list;   /* LIST, DICT */
    } as;
} fsdp_value;

enum { FSDP_VALUE_DEPTH = 1024 };    /* a little more than pickles nest */

FSDP_API fsdp_value fsdp_value_bool(bool value);
FSDP_API fsdp_value fsdp_value_i64(int64_t value);
FSDP_API fsdp_value fsdp_value_u64(uint64_t value);
FSDP_API fsdp_value fsdp_value_f64(double value);

/* Copies, and releases what value held. kind is one of those with bytes; STRING, INTEGER or CLASS that is
 * not UTF-8 is FSDP_ERR_USAGE. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_value_set_bytes(fsdp_value *value, fsdp_value_kind kind,
                                                       const void *data, size_t size, fsdp_error *err);

/* Turns value into a list or dict of count null items (a dict: count is keys plus values). */
FSDP_API FSDP_CHECKED fsdp_status fsdp_value_set_items(fsdp_value *value, fsdp_value_kind kind,
                                                       size_t count, fsdp_error *err);

/* The list of items of a value with an item per rank, NULL for any other value. */
FSDP_API const fsdp_value *fsdp_value_per_rank(const fsdp_value *value);

/* *to_out is overwritten, not released. Lists and dicts that nest more than FSDP_VALUE_DEPTH deep are
 * FSDP_ERR_USAGE. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_value_copy(const fsdp_value *from, fsdp_value *to_out,
                                                  fsdp_error *err);

/* True when kinds and bits are the same (NaN equals the same NaN). */
FSDP_API bool fsdp_value_equal(const fsdp_value *a, const fsdp_value *b);

/* Frees what it holds and leaves null. */
FSDP_API void fsdp_value_release(fsdp_value *value);

#ifdef __cplusplus
}
#endif
#endif
