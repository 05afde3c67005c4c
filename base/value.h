/*
 * Values: the entries of a state dict that are not tensors. A value is a small tree that owns its strings and
 * items; fsdp_value_release frees them. All calls are local.
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
    FSDP_VALUE_LIST,           /* of Python: a list, or a tuple (is_tuple) */
    FSDP_VALUE_DICT,           /* items: key, value, key, value, ... in order */
    FSDP_VALUE_OPAQUE,         /* bytes that only their writer understands */
    FSDP_VALUE_INTEGER,        /* an integer beyond 64 bits: decimal text */
    FSDP_VALUE_COMPLEX,
    FSDP_VALUE_CLASS,          /* an object of a class that has no rule: the class's name, "module.Class" */
    FSDP_VALUE_TENSOR          /* a tensor inside a value: its number among the tensors of its source */
} fsdp_value_kind;

/* Zero-initialised it is null. */
typedef struct fsdp_value {
    fsdp_value_kind kind;
    bool is_tuple;             /* LIST only. Readers of lists take both; fsdp_value_equal tells them apart */
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

/*
 * The nesting of an entry's name: one number per element of the name, its bytes; elements are joined by dots.
 * A position in a list is negative. Flags: a key that is a number in place of a text, and a position in a
 * tuple (added before the sign). The one element WHOLE is an entry that is in no dict or list; its name is
 * empty.
 */
enum { FSDP_PATH_NUMBER = 1 << 30, FSDP_PATH_TUPLE = 1 << 29, FSDP_PATH_WHOLE = INT32_MIN };
enum { FSDP_PATH_DEFAULT_MOST = 4 };  /* elements of fsdp_path_default at most */

/* Returns a boolean. The four values made here own no memory, and need no release. */
FSDP_API fsdp_value fsdp_value_bool(bool value);
/* Returns a signed integer. */
FSDP_API fsdp_value fsdp_value_i64(int64_t value);
/* Returns an unsigned integer. */
FSDP_API fsdp_value fsdp_value_u64(uint64_t value);
/* Returns a floating number. */
FSDP_API fsdp_value fsdp_value_f64(double value);

/* Replaces *value by a copy of the bytes. kind is one of those with bytes. FSDP_ERR_USAGE for a STRING,
 * INTEGER or CLASS that is not UTF-8. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_value_set_bytes(fsdp_value *value, fsdp_value_kind kind,
                                                       const void *data, size_t size, fsdp_error *err);

/* Replaces *value by a list or dict of count null items, which the caller fills in (a dict: count is keys
 * plus values). */
FSDP_API FSDP_CHECKED fsdp_status fsdp_value_set_items(fsdp_value *value, fsdp_value_kind kind,
                                                       size_t count, fsdp_error *err);

/* Returns the list in a value that has an item per rank, as readers of other programs' checkpoints make
 * them; borrowed from the value. NULL for any other value. */
FSDP_API const fsdp_value *fsdp_value_per_rank(const fsdp_value *value);

/* Copies the whole tree; the caller releases the copy. *to_out is overwritten, not released; it is null
 * after a failure. FSDP_ERR_USAGE for lists and dicts that nest more than FSDP_VALUE_DEPTH deep. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_value_copy(const fsdp_value *from, fsdp_value *to_out,
                                                  fsdp_error *err);

/* Returns true when kinds and bits are the same (NaN equals the same NaN). */
FSDP_API bool fsdp_value_equal(const fsdp_value *a, const fsdp_value *b);

/* Computes the nesting of a name that has none of its own: model.NAME, optim.state.NAME.KIND and
 * optim.param_groups.NAME.KIND are nested as PyTorch nests them, another name is one element. path_out has
 * capacity for FSDP_PATH_DEFAULT_MOST. Returns the number of elements. */
FSDP_API size_t fsdp_path_default(const char *name, size_t size, int32_t *path_out);

/* Frees the tree and leaves null. */
FSDP_API void fsdp_value_release(fsdp_value *value);

#ifdef __cplusplus
}
#endif
#endif
