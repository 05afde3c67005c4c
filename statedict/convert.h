/* Converting: the same state in another kind, world size, mesh or sharding dim, offline. */
#ifndef FSDP_CONVERT_H
#define FSDP_CONVERT_H

#include <fsdp/checkpoint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_convert_opts {
    fsdp_kind kind;
    int world;                 /* ranks of the result; 0: 1 for full, else the source's */
    const fsdp_mesh *mesh;     /* NULL: one dim of `world` ranks */
    int shard_dim;             /* tensor dim that is cut (tensors with fewer dims: dim 0) */
    bool compress;
    int level;
    bool no_sync, no_view, no_verify, overwrite;
    const char *include, *exclude;     /* POSIX extended regex over names */
    int threads;
    int64_t memory;
    fsdp_watch watch;
    struct fsdp_io *io;
} fsdp_convert_opts;

typedef struct fsdp_convert_plan {
    int64_t tensors, values, aliases;
    int64_t bytes_read, bytes_written, peak_memory, free_bytes;
    int files;
} fsdp_convert_plan;

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
