/*
 * Room derive: tensors that are computed from a checkpoint's tensors while they are read.
 *
 * In: an opened checkpoint, and operations on its tensors (maps of names, adapters, quantized weights). Out:
 * an opened checkpoint that every reader of checkpoint.h can use, whose tensors are derived ones.
 *
 *   derived.c             stored tensors; makes nodes, and reads boxes of them
 *   derived_shape.c       slices, joins, other shapes, other orders of dims, zeros
 *   derived_number.c      casts, factors and sums with a number, powers of e and logarithms
 *   derived_product.c     sums with products of thin matrices, rows of given lengths (adapters)
 *   derived_checkpoint.c  the checkpoint of derived tensors (derived_checkpoint.h), and names of one tensor
 *                         that are still names of one tensor
 *
 * A derived tensor is a node: a stored tensor, or an operation on the nodes that are its parts. A box of it
 * is read by reading boxes of its parts, so that no tensor is in memory as a whole: an operation that needs
 * memory works on pieces of at most FSDP_DERIVED_PIECE bytes, in one buffer per level of the tree.
 *
 *   adapter.c             merges an adapter of PEFT, as its settings say
 *   python_expression.c   the expressions in them
 *   element_types.c       quantized weights of a model as plain ones; blocks and vectors as the target needs
 *                         them
 *   tied_names.c          names of tied tensors that the files lack
 *   numbered_optim.c      names for the parameters that an optimizer numbers
 *
 * Nodes live in an arena and are never changed; several threads may read one at once, each with a block
 * reader of its own, which has the buffers. Callers: map and convert.
 */
#ifndef FSDP_DERIVED_H
#define FSDP_DERIVED_H

#include "base/core/mem.h"
#include "statedict/checkpoint/checkpoint_internal.h"

enum {
    FSDP_DERIVED_PIECE = 4 << 20,      /* bytes of a buffer */
    FSDP_DERIVED_RUN = 512 << 10,      /* bytes that are made at once: they stay in the second cache */
    FSDP_DERIVED_LEVELS = 12
};

typedef struct fsdp_derived fsdp_derived;

/* An operation: fills a box of the tensor, packed row-major. */
typedef struct fsdp_derived_ops {
    fsdp_status (*read)(const fsdp_derived *tensor, fsdp_reader *reader, const fsdp_box *box,
                        void *data, fsdp_error *err);
    int buffers;               /* that read takes, besides those of the parts */
} fsdp_derived_ops;

struct fsdp_derived {
    const fsdp_derived_ops *ops;
    fsdp_dtype dtype;
    int ndim;
    const int64_t *shape;
    const fsdp_derived *const *parts;
    size_t part_count;
    int levels;                /* buffers that a reader needs for it and its parts */
    fsdp_checkpoint *checkpoint;       /* of a stored tensor, with entry */
    size_t entry;
    const int64_t *lo;         /* of a slice: where it begins in its part */
    const int *order;          /* of another order of dims: the part's dim of each */
    int dim;                   /* of a join */
    double factor;             /* of a product or a sum with a number */
    const void *more;          /* of operations in other files */
};

/* Fills a box of the tensor, packed row-major. */
fsdp_status fsdp_derived_read(const fsdp_derived *tensor, fsdp_reader *reader, const fsdp_box *box,
                              void *data, fsdp_error *err);

/* --- nodes --------------------------------------------------------------------------------------- */

/* All calls below make a node in the arena, which holds it until its release; parts and checkpoint are
 * borrowed as long. FSDP_ERR_USAGE says which shapes do not fit. */

/* A tensor of a checkpoint; aliases lead to their tensor. */
fsdp_status fsdp_derive_stored(fsdp_arena *arena, fsdp_checkpoint *checkpoint, size_t entry,
                               const fsdp_derived **out, fsdp_error *err);
/* Rows [lo, lo + len) of one dim. */
fsdp_status fsdp_derive_slice(fsdp_arena *arena, const fsdp_derived *part, int dim, const int64_t range[2],
                              const fsdp_derived **out, fsdp_error *err);
/* Other dims over the same elements in the same order. */
fsdp_status fsdp_derive_reshape(fsdp_arena *arena, const fsdp_derived *part, int ndim, const int64_t *shape,
                                const fsdp_derived **out, fsdp_error *err);
/* Dim d is dim order[d] of the part. */
fsdp_status fsdp_derive_permute(fsdp_arena *arena, const fsdp_derived *part, const int *order,
                                const fsdp_derived **out, fsdp_error *err);
/* Parts, at least one, one after the other in a dim; all other dims and the dtype are the same. */
fsdp_status fsdp_derive_join(fsdp_arena *arena, const fsdp_derived *const *parts, size_t count, int dim,
                             const fsdp_derived **out, fsdp_error *err);
fsdp_status fsdp_derive_zeros(fsdp_arena *arena, fsdp_dtype dtype, int ndim, const int64_t *shape,
                              const fsdp_derived **out, fsdp_error *err);
/* Elements in memory, which are copied. */
fsdp_status fsdp_derive_constant(fsdp_arena *arena, fsdp_dtype dtype, int64_t count, const void *data,
                                 const fsdp_derived **out, fsdp_error *err);
/* Each element times the factor, computed in f32 (f64 for that type) and rounded once. */
fsdp_status fsdp_derive_scale(fsdp_arena *arena, const fsdp_derived *part, double factor,
                              const fsdp_derived **out, fsdp_error *err);
/* Each element plus the number, in f32 (f64 for that type), whatever the floating type of the part: a sum of
 * bf16 or f16 would lose digits. */
fsdp_status fsdp_derive_add(fsdp_arena *arena, const fsdp_derived *part, double number,
                            const fsdp_derived **out, fsdp_error *err);
/* e to the power of each element, and the natural logarithm of each, in f32 (f64 for that type), whatever the
 * floating type of the part. A number that has no finite result is an error of the read. */
fsdp_status fsdp_derive_exp(fsdp_arena *arena, const fsdp_derived *part, const fsdp_derived **out,
                            fsdp_error *err);
fsdp_status fsdp_derive_log(fsdp_arena *arena, const fsdp_derived *part, const fsdp_derived **out,
                            fsdp_error *err);
/* Another floating type. A value that does not fit in it is an error of the read. */
fsdp_status fsdp_derive_cast(fsdp_arena *arena, const fsdp_derived *part, fsdp_dtype dtype,
                             const fsdp_derived **out, fsdp_error *err);

/* --- for operations ------------------------------------------------------------------------------- */

/* A new node with copies of shape and parts; the caller fills in the members of its operation. */
fsdp_status fsdp_derived_make(fsdp_arena *arena, const fsdp_derived *like, fsdp_derived **out,
                              fsdp_error *err);
/* Takes a buffer of FSDP_DERIVED_PIECE bytes; buffers are given back in the reverse order. The reader keeps
 * them for the next read. */
fsdp_status fsdp_derived_take(fsdp_reader *reader, void **buffer_out, fsdp_error *err);
void fsdp_derived_give(fsdp_reader *reader);

/* The pieces of a box in its row-major order: each is one run of that order. */
typedef struct fsdp_derived_pieces {
    fsdp_slabs slabs;
    const fsdp_box *box;
    int64_t most;              /* elements of a piece */
} fsdp_derived_pieces;
bool fsdp_derived_next(fsdp_derived_pieces *pieces, fsdp_box *piece_out);

/* "[4, 8]" */
const char *fsdp_derived_text(const fsdp_derived *tensor, char *out, size_t room);

#endif
