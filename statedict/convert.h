/* Converting: the same state in another kind, world size, mesh or sharding dim, offline. */
#ifndef FSDP_CONVERT_H
#define FSDP_CONVERT_H

#include <fsdp/checkpoint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fsdp_only {
    FSDP_ONLY_DEFAULT = 0,     /* what is usual for the target: the model for hf and safetensors, else all */
    FSDP_ONLY_ALL,
    FSDP_ONLY_MODEL,
    FSDP_ONLY_OPTIM            /* below a first element optim, optimizer, optimizers, opt or
                                * optimizer_state_dict; or below state, where param_groups is beside it */
} fsdp_only;

/* Which entries, and their new names. Zero-initialised: all, as they are. */
typedef struct fsdp_select_opts {
    const char *include, *exclude;     /* POSIX extended regex over names */
    fsdp_only only;
    const char *const *drops;          /* "values", "opaque", "optim", "dtype:NAME" or a regex over names */
    size_t drop_count;
    const char *const *renames;        /* "s/REGEX/NEW/", applied in order */
    size_t rename_count;
    /* Floating types of the result: fsdp_castable. Only what is of such a type itself can be cast. */
    const char *dtype;                 /* of the model's tensors; NULL or "keep": as they are */
    const char *const *dtype_rules;    /* "REGEX=DTYPE" over names of the source; the first that matches wins,
                                        * before dtype, also for the optimizer */
    size_t dtype_rule_count;
    fsdp_on_overflow on_overflow;      /* FAIL: FSDP_ERR_DAMAGED names the first value */
} fsdp_select_opts;

/* What casting did to the values of all tensors that were cast. */
typedef struct fsdp_cast_report {
    int64_t tensors;
    int64_t overflows;         /* finite values that did not fit */
    int64_t nans;              /* in the result */
    int64_t underflows;        /* values that became zero */
    double max_rounding;       /* the largest |new - old| / |old| of all others that are finite and not 0 */
    double max_underflow;      /* the largest |old| that became zero */
} fsdp_cast_report;

typedef enum fsdp_tied {
    FSDP_TIED_AUTO = 0,        /* for hf and safetensors, which note the others, one name of what the source
                                * declares to be one; else every name */
    FSDP_TIED_KEEP,            /* a tensor, or what the target has for aliases, for each name */
    FSDP_TIED_DROP             /* one name; also of embeddings that are equal byte by byte */
} fsdp_tied;

typedef struct fsdp_convert_opts {
    const char *from_format;   /* as fsdp_open_opts.format */
    const char *allow_missing; /* as fsdp_open_opts.allow_missing */
    const char *format;        /* NULL or "fsdp"; "hf", "safetensors", "dcp", "torch", "hdf5", "npz", "npy" */
    int64_t max_shard_bytes;   /* hf: bytes of tensors in a file; 0: its default */
    fsdp_kind kind;
    int world;                 /* ranks of the result; 0: 1 for full, else the source's */
    const fsdp_mesh *mesh;     /* NULL: one dim of `world` ranks */
    int shard_dim;             /* tensor dim that is cut (tensors with fewer dims: dim 0) */
    bool compress;
    int level;
    int64_t chunk_bytes;       /* compress: bytes of a chunk; 0: 1 MiB, or less where memory is short */
    bool skip_fsync;           /* leave durability to the operating system */
    bool skip_view;            /* no index.h5 */
    bool skip_verify;          /* publish without reading back */
    bool overwrite;            /* replace what is at the target */
    fsdp_select_opts select;
    fsdp_cast_report *cast;    /* filled in by a conversion that succeeds; may be NULL */
    const char *copy_from;     /* hf: a directory whose config.json, tokenizer, licences and the like are
                                * copied beside the weights, config.json edited to be true of them */
    bool copy_code;            /* Python files as well */
    fsdp_tied tied;
    int threads;
    int64_t memory;
    bool resume;               /* go on where a conversion of the same plan was cut off; should this one fail
                                * or be cut off, what it did is kept for the next
                                * (fsdp_convert_keeps_work) */
    int64_t bytes_per_second;  /* reads and writes are each held to it; 0: no limit */
    bool direct;               /* files are read past the page cache where their file system can */
    const char *plan_hash;     /* NULL, or what is converted only if its plan has this hash */
    fsdp_watch watch;
    fsdp_access access;
} fsdp_convert_opts;

enum { FSDP_CAST_PAIRS = 72 }; /* of two types that fsdp casts */

typedef struct fsdp_cast_pair {
    fsdp_dtype from, to;
    int64_t tensors;
} fsdp_cast_pair;

/* Two names of one tensor. */
typedef struct fsdp_convert_tie {
    const char *dropped, *kept;
    size_t dropped_size, kept_size;
} fsdp_convert_tie;

typedef struct fsdp_convert_copy {
    const char *name;
    const char *change;        /* "dtype float32 -> bfloat16", or "" */
} fsdp_convert_copy;

typedef struct fsdp_convert_plan {
    int64_t tensors, values, aliases;
    int64_t bytes_read, bytes_written, peak_memory, free_bytes;
    int files;
    int world;                 /* ranks of the result */
    int64_t renamed;           /* names that change */
    int64_t left_out;          /* entries that fsdp_only leaves out */
    int64_t dropped;           /* entries that drop rules leave out */
    int64_t short_tensors;     /* without a dim shard_dim: cut along dim 0; 0 for a world of 1 */
    char prefix[64];           /* that all tensors of the model share ("model."), "" if none */
    int64_t bytes_spooled;     /* packed bytes of the source that are wanted in another order than they lie
                                * in: unpacked beside `to` meanwhile, in files without a name */
    int64_t bytes_needed;      /* that must be free for all of it: tensors, what describes them, some to
                                * spare; compressed: without the tensors. 0 when it is stopped before */
    int64_t cast_tensors;      /* that get another dtype */
    fsdp_cast_pair casts[FSDP_CAST_PAIRS];     /* which ones; cast_pairs of them */
    int cast_pairs;
    int64_t optim_uncast;      /* floating tensors of the optimizer that `dtype` leaves as they are */
    const fsdp_convert_tie *tied;      /* names that are left out, since another one is kept */
    size_t tied_count;
    const fsdp_convert_copy *copied;   /* files that are copied beside the weights */
    size_t copied_count;
    const bool *kept;          /* per entry of the source: its name, or what it becomes, is in the result */
    size_t kept_count;
    struct fsdp_plan_notes *notes;     /* owns what the lists lead to */
} fsdp_convert_plan;

/* Frees the lists; what is left may be filled again. Also after a failure, and of a zero-initialised one. */
FSDP_API void fsdp_convert_plan_release(fsdp_convert_plan *plan);

/* Names of the formats that can be written, "fsdp" first; NULL behind the last. */
FSDP_API const char *fsdp_convert_format(size_t i);
/* The format that the suffix of a path asks for, "hf" for any other. */
FSDP_API const char *fsdp_convert_format_of(const char *path);

/* The i-th name of a type that can be cast to, NULL behind the last. Options also take PyTorch's names
 * ("bfloat16"), and ours without the line and the last letters ("f8e4m3"). */
FSDP_API const char *fsdp_castable(size_t i);

/* Is anything kept of a conversion to it that is cut off? Not of one file of ours: "hdf5". */
FSDP_API bool fsdp_convert_keeps_work(const char *format);

/* What fsdp_checkpoint_convert would do; writes nothing. What would stop it before its first byte is
 * the status, and the plan is filled in all the same once the source could be read. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_checkpoint_convert_plan(const char *from, const char *to,
                                                               const fsdp_convert_opts *opts,
                                                               fsdp_convert_plan *plan_out, fsdp_error *err);

/* `to` must not exist unless overwrite. It appears whole or not at all. Unless skip_verify, what was
 * written is read back and compared by hash before it is published. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_checkpoint_convert(const char *from, const char *to,
                                                          const fsdp_convert_opts *opts, fsdp_error *err);

/*
 * SHA-256 of every file of `to`, which was converted, in order of their names: as sha256sum prints them in
 * the directory that holds `to`. Reads them, with the threads, memory, access and rate of opts. name and digest
 * are valid during the call.
 */
typedef void (*fsdp_file_digest_visit)(void *user, const char *name, const uint8_t digest[32]);
FSDP_API FSDP_CHECKED fsdp_status fsdp_convert_digests(const char *to, const fsdp_convert_opts *opts,
                                                       fsdp_file_digest_visit visit, void *user,
                                                       fsdp_error *err);

/* --- plans as files --- */

/*
 * Writes the same plan with all its details as JSON (docs/formats.md): source files with size and time,
 * options, outputs with their parts. The same bytes for the same sources, paths and options; the file appears
 * whole or not at all. FSDP_ERR_EXISTS when something is there that is no such plan.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_checkpoint_convert_plan_write(const char *from, const char *to,
                                                                     const fsdp_convert_opts *opts,
                                                                     const char *path, fsdp_error *err);

/* A plan that was read: what is to be converted, and the options that planned it (plan_hash included). */
typedef struct fsdp_convert_order {
    const char *from, *to;
    fsdp_convert_opts opts;
    struct fsdp_order_text *text;
} fsdp_convert_order;

/* FSDP_ERR_NOT_FOUND: not such a file. FSDP_ERR_DAMAGED: it is damaged, or of a newer version. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_convert_order_open(const char *path, const fsdp_access *access,
                                                          fsdp_convert_order **order_out, fsdp_error *err);
/* FSDP_ERR_DAMAGED when a source is not what it was, naming the file and what differs, or when the plan says
 * anything else than what would be done. Otherwise as fsdp_checkpoint_convert_plan. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_convert_order_check(const fsdp_convert_order *order, fsdp_error *err);
FSDP_API void fsdp_convert_order_close(fsdp_convert_order *order);   /* accepts NULL */

#ifdef __cplusplus
}
#endif
#endif
