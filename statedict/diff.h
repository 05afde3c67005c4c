/*
 * Compares the states of two checkpoints; their kinds, world sizes and layouts may differ. Whole tensors are
 * streamed from both sides. The call is local.
 *
 * The metadata of safetensors (__metadata__) are compared as values "__metadata__.KEY"; a missing "format" is
 * "pt".
 *
 * Without tolerances two elements are equal if their bits are equal: NaN equals the same NaN, 0.0 and -0.0
 * differ. Real floating tensors of different dtypes are compared by value. An alias counts as the tensor that
 * it names.
 */
#ifndef FSDP_DIFF_H
#define FSDP_DIFF_H

#include <fsdp/checkpoint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fsdp_diff_state {
    FSDP_DIFF_EQUAL,
    FSDP_DIFF_DIFFERS,
    FSDP_DIFF_ONLY_A,
    FSDP_DIFF_ONLY_B
} fsdp_diff_state;

enum { FSDP_DIFF_ELEMENT = 48 };

typedef struct fsdp_diff_item {
    fsdp_diff_state state;
    const fsdp_entry *a, *b;   /* NULL on the side that lacks the name */
    const char *why;           /* DIFFERS: "kind", "dtype", "shape", "value", "nesting"; NULL: the data */
    const char *nesting[2];    /* of "nesting": "in a tuple", "in a list", "whole", "in a dict" */
    /* For data that differs: */
    int64_t elements, differing;
    int64_t at[FSDP_MAX_DIMS]; /* index of the element that differs most */
    char from[FSDP_DIFF_ELEMENT], to[FSDP_DIFF_ELEMENT];   /* that element in a and in b */
    int bits;                  /* bits that differ in it; 0 when the dtypes differ */
    double max_abs;            /* infinity for NaN against a number, and against an infinity */
    double max_rel;            /* relative to the larger of the two */
} fsdp_diff_item;

typedef struct fsdp_diff_summary { int64_t equal, differ, only_a, only_b, bytes; } fsdp_diff_summary;

typedef struct fsdp_diff_opts {
    double atol, rtol;         /* equal when |a - b| <= atol + rtol * |b| ... */
    int64_t ulp;               /* ... or at most this many steps of their dtype apart */
    bool keys_only;            /* compares names, kinds, dtypes and shapes; no data, no values */
    const char *include, *exclude;     /* see fsdp_filter_create */
    const char *const *renames;        /* "s/REGEX/NEW/" in order: from names of a to those of b */
    size_t rename_count;
    int threads;
    int64_t memory;
    /* Called once per name, after all data is compared: in a's order, then for names that only b has, in b's
     * order. The item lives for the call. */
    void (*visit)(void *context, const fsdp_diff_item *item);
    void *visit_context;
    fsdp_watch watch;
} fsdp_diff_opts;

/* Compares a with b, which stay open. Returns FSDP_OK if they are equal and FSDP_DIFFERS if not; also, with
 * the reason in err, if the patterns select no name of either side. opts and summary_out may be NULL. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_checkpoint_diff(fsdp_checkpoint *a, fsdp_checkpoint *b,
                                                       const fsdp_diff_opts *opts,
                                                       fsdp_diff_summary *summary_out, fsdp_error *err);

#ifdef __cplusplus
}
#endif
#endif
