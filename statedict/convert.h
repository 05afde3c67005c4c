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
} fsdp_select_opts;

typedef struct fsdp_convert_opts {
    const char *format;        /* NULL or "fsdp"; "hf", "safetensors", "dcp", "torch", "hdf5", "npz" */
    int64_t max_shard_bytes;   /* hf: bytes of tensors in a file; 0: its default */
    fsdp_kind kind;
    int world;                 /* ranks of the result; 0: 1 for full, else the source's */
    const fsdp_mesh *mesh;     /* NULL: one dim of `world` ranks */
    int shard_dim;             /* tensor dim that is cut (tensors with fewer dims: dim 0) */
    bool compress;
    int level;
    bool no_sync, no_view, no_verify, overwrite;
    fsdp_select_opts select;
    int threads;
    int64_t memory;
    fsdp_watch watch;
    struct fsdp_io *io;
} fsdp_convert_opts;

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
} fsdp_convert_plan;

/* HDF5 files of other programs are read by a child process; by default it may make few system calls. Where
 * the kernel cannot hold it to that, opening fails (FSDP_ERR_REFUSED) unless this was called before. */
FSDP_API void fsdp_sandbox_by_limits_only(void);

/* Names of the formats that can be written, "fsdp" first; NULL behind the last. */
FSDP_API const char *fsdp_convert_format(size_t i);
/* The format that the suffix of a path asks for, "hf" for any other. */
FSDP_API const char *fsdp_convert_format_of(const char *path);

/* What fsdp_checkpoint_convert would do; writes nothing. What would stop it before its first byte is
 * the status, and the plan is filled in all the same once the source could be read. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_checkpoint_convert_plan(const char *from, const char *to,
                                                               const fsdp_convert_opts *opts,
                                                               fsdp_convert_plan *plan_out, fsdp_error *err);

/* `to` must not exist unless overwrite. It appears whole or not at all. Unless no_verify, what was
 * written is read back and compared by hash before it is published. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_checkpoint_convert(const char *from, const char *to,
                                                          const fsdp_convert_opts *opts, fsdp_error *err);

#ifdef __cplusplus
}
#endif
#endif
