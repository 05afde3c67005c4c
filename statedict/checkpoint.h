/*
 * Checkpoints: save a state dict, load it on any number of ranks, look at it, verify it. Runs of them
 * are in run.h, converting is in convert.h.
 *
 * A checkpoint is a directory that appears by one rename (docs/commit.md). What fsdp_sd_save reported
 * as saved survives a power cut, and loads bit for bit at any world size, mesh, sharding dim or kind.
 */
#ifndef FSDP_CHECKPOINT_H
#define FSDP_CHECKPOINT_H

#include <fsdp/ctl.h>
#include <fsdp/sd.h>
#include <fsdp/status.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fsdp_kind {
    FSDP_SHARDED = 0,          /* one file per rank, every box once */
    FSDP_FULL,                 /* one file, every tensor whole */
    FSDP_LOCAL                 /* one file per rank, what the rank holds as it is */
} fsdp_kind;

typedef enum fsdp_owner_policy {
    FSDP_OWNERS_BALANCED = 0,  /* replicas are written once, by owners with about equal bytes */
    FSDP_OWNERS_LOWEST         /* by the lowest rank that holds them */
} fsdp_owner_policy;

/*
 * Long work reports and can be stopped. All entries may be NULL. Called from the thread that made
 * the call or from workers, one at a time.
 */
typedef struct fsdp_watch {
    void *user;
    /* bytes done of total, and what is at work; non-zero stops the call with FSDP_ERR_CANCELLED. */
    int (*progress)(void *user, int64_t done, int64_t total, const char *what);
    /* A line for people beside the error, if there is one: a skipped checkpoint, a view left out. */
    void (*notice)(void *user, const char *text);
    /* Shall a wait end? The one entry that is asked from several threads at once. What stops a call is still
     * what progress says. */
    bool (*stopped)(void *user);
} fsdp_watch;

/* How files are reached, and how far they are trusted. Zero-initialised: the file system, not at all. */
typedef struct fsdp_access {
    bool follow_links;         /* a symbolic link in a checkpoint's directory is followed wherever it leads;
                                  otherwise only within a Hugging Face cache, where snapshots/REVISION/NAME
                                  leads to a file in blobs. Writing never goes through a link */
    bool limits_only;          /* resource limits alone confine the child process that reads HDF5 files of
                                  other programs; otherwise it may also make few system calls, and opening is
                                  FSDP_ERR_REFUSED where the kernel cannot hold it to that */
    void *disk;                /* NULL. Tests of the library put a disk here that fails */
} fsdp_access;

enum { FSDP_STEP_NONE = -1 };
#define FSDP_MEMORY_DEFAULT ((int64_t)256 << 20)

/* --- save ------------------------------------------------------------------------------------- */

typedef struct fsdp_retention {
    int keep_last;             /* newest verified checkpoints kept; at least 2 */
    int64_t keep_every;        /* steps divisible by this are kept for good; 0: none */
    const int64_t *pins;       /* steps kept for good; a file step-N/.pin pins, too */
    size_t pin_count;
} fsdp_retention;

typedef struct fsdp_save_opts {
    fsdp_kind kind;
    fsdp_owner_policy owners;
    bool compress;             /* byte shuffle + zstd */
    int level;                 /* 0: entropy coding only (fastest, best on floats); else zstd's */
    bool skip_fsync;           /* leave durability to the operating system */
    bool skip_view;            /* no index.h5 */
    bool rank0_writes;         /* full: rank 0 alone touches the file, the others send their boxes */
    bool overwrite;            /* replace an existing checkpoint (outside runs) */
    int threads;               /* workers of this rank; 0: the cores, shared by ranks of one process */
    int64_t memory;            /* bytes of buffers; 0: FSDP_MEMORY_DEFAULT */
    const int64_t *step;       /* kept in the manifest; NULL: none. fsdp_run_save takes its own */
    uint8_t run[16];           /* run uuid; all zero: derived from the state dict's description */
    const fsdp_retention *retain;  /* fsdp_run_save: NULL keeps everything */
    fsdp_watch watch;
    fsdp_access access;
} fsdp_save_opts;

/*
 * Collective, with equal options on every rank (threads, memory and watch may differ). Saves sd as
 * the checkpoint `dir`, which must not exist (FSDP_ERR_EXISTS). Returns the same status on every
 * rank. On failure nothing of the new checkpoint stays and what was there before is untouched; only
 * after FSDP_ERR_PEER, when a rank was lost, it may be there, whole. opts NULL: all zero.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_sd_save(const fsdp_sd *sd, fsdp_ctl *ctl, const char *dir,
                                               const fsdp_save_opts *opts, fsdp_error *err);

/* Local. Bytes of tensors that `rank` would write: plans the save without touching anything. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_save_plan_bytes(const fsdp_sd *sd, fsdp_kind kind,
                                                       fsdp_owner_policy owners, int rank,
                                                       int64_t *bytes_out, fsdp_error *err);

/* --- load ------------------------------------------------------------------------------------- */

typedef enum fsdp_check_mode {
    FSDP_CHECK_BLOCKS = 0,     /* every block that is touched is hashed before its data counts */
    FSDP_CHECK_OFF             /* exactly the wanted rows are read */
} fsdp_check_mode;

/* All names that did not match, also when that is why the load failed; filled by a load, freed by
 * fsdp_load_report_release. */
typedef struct fsdp_load_report {
    char **missing;            /* in the state dict, not in the checkpoint; printable spelling */
    size_t missing_count;
    char **unexpected;         /* the other way round */
    size_t unexpected_count;
    char *path;                /* the checkpoint that was loaded */
    int64_t bytes_read, bytes_needed;  /* this rank's reads; what its boxes hold */
} fsdp_load_report;
FSDP_API void fsdp_load_report_release(fsdp_load_report *report);

typedef struct fsdp_load_opts {
    fsdp_check_mode check;
    bool partial;              /* names may be missing or unexpected; otherwise that is an error, whose
                                  text has their numbers and the first names. Where that is not all of
                                  them, rank 0's watch.notice gets each one; the report has them all */
    bool cast;                 /* floating dtypes may differ; otherwise a difference is an error */
    const char *include;       /* POSIX extended regex: only names of sd that match; NULL: all.
                                  FSDP_ERR_USAGE when none of them do */
    const char *exclude;
    int threads;
    int64_t memory;
    fsdp_load_report *report;  /* may be NULL */
    fsdp_watch watch;
    fsdp_access access;
} fsdp_load_opts;

/*
 * Collective. Fills the memory of sd's tensors and replaces its values from the checkpoint `path`.
 * Given a run directory it takes the newest checkpoint that verifies, naming skipped ones through
 * watch.notice; one of a newer format version is not skipped but FSDP_ERR_REFUSED.
 * Ranks that are threads of one process share one read and check of each block.
 * After a failure the tensors' contents are undefined. Aliases need nothing: their target is loaded.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_sd_load(fsdp_sd *sd, fsdp_ctl *ctl, const char *path,
                                               const fsdp_load_opts *opts, fsdp_error *err);

/* --- full state on one rank ------------------------------------------------------------------- */

/*
 * Called on rank 0 for every tensor of the whole state, in order, in row-major slabs: `data` holds
 * elements [first, first + count) of the tensor. A zero-size tensor gets one call with count 0.
 */
typedef fsdp_status (*fsdp_slab_visit)(void *user, const fsdp_entry *entry, int64_t first,
                                       int64_t count, const void *data, fsdp_error *err);

/* Collective. The live shards of all ranks, streamed to visit on rank 0 (others: visit is not called).
 * Rank 0's memory counts. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_sd_gather(const fsdp_sd *sd, fsdp_ctl *ctl, int64_t memory,
                                                 fsdp_slab_visit visit, void *user, fsdp_error *err);

/*
 * Collective. The same into memory: on rank 0 *full_out becomes a state dict with every tensor whole,
 * values and aliases, which owns its memory; on the others it becomes NULL.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_sd_gather_full(const fsdp_sd *sd, fsdp_ctl *ctl, fsdp_sd **full_out,
                                                      fsdp_error *err);

/*
 * Local. The full state of a checkpoint (or of a run's newest good one), into memory or streamed
 * within opts->memory; opts NULL: defaults. Patterns select names (FSDP_ERR_USAGE when they leave
 * none of those that the checkpoint has); opts->cast has no meaning here, and a stream uses nothing of
 * opts but patterns, memory and access. Damaged data in a run's newest checkpoint: loading goes on to the
 * one before, as fsdp_sd_load does; a stream fails, since visit has seen part of it.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_load_full(const char *path, const fsdp_load_opts *opts,
                                                 fsdp_sd **full_out, fsdp_error *err);
FSDP_API FSDP_CHECKED fsdp_status fsdp_stream_full(const char *path, const fsdp_load_opts *opts,
                                                   fsdp_slab_visit visit, void *user, fsdp_error *err);

/* --- looking at a checkpoint (local) ---------------------------------------------------------- */

typedef struct fsdp_checkpoint fsdp_checkpoint;

typedef struct fsdp_checkpoint_info {
    const char *path;
    const char *format;        /* "fsdp" */
    int format_major, format_minor;
    fsdp_kind kind;
    int64_t step;              /* FSDP_STEP_NONE if none */
    uint8_t run[16];
    int world;
    bool compressed;
    int file_count;
    int64_t file_bytes;
    int64_t tensor_bytes;      /* of all tensors, whole */
} fsdp_checkpoint_info;

typedef struct fsdp_checkpoint_file {
    char name[256];            /* within the checkpoint */
    int64_t size;
    int64_t box_count, block_count;    /* other programs' have no blocks: 0 */
} fsdp_checkpoint_file;

typedef struct fsdp_open_opts {
    const char *format;        /* a name of fsdp_checkpoint_format_at, and no other is tried. NULL: the bytes
                                * tell */
    const char *allow_missing; /* regex over names: what it matches may be incomplete, since files are not
                                * there. NULL: an incomplete checkpoint is FSDP_ERR_DAMAGED */
    fsdp_access access;
} fsdp_open_opts;

/* Opens a checkpoint (or the newest good one of a run directory) and checks manifest, file sizes and
 * shard indexes. opts NULL: all zero. Afterwards reads may come from any thread. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_checkpoint_open(const char *path, const fsdp_open_opts *opts,
                                                       fsdp_checkpoint **checkpoint_out, fsdp_error *err);
FSDP_API void fsdp_checkpoint_close(fsdp_checkpoint *checkpoint);   /* accepts NULL */

/* Formats that can be read, "fsdp" first; NULL behind the last. */
FSDP_API const char *fsdp_checkpoint_format_at(size_t i);
/* What is incomplete, and must not be read: converting leaves it out. */
FSDP_API size_t fsdp_checkpoint_missing_count(const fsdp_checkpoint *checkpoint);
FSDP_API const char *fsdp_checkpoint_missing_at(const fsdp_checkpoint *checkpoint, size_t i,
                                                size_t *size_out);

FSDP_API const fsdp_checkpoint_info *fsdp_checkpoint_describe(const fsdp_checkpoint *checkpoint);
/* Names, dtypes, shapes, saved layouts, values; no data. Lives as long as the checkpoint. */
FSDP_API const fsdp_sd *fsdp_checkpoint_sd(const fsdp_checkpoint *checkpoint);
FSDP_API void fsdp_checkpoint_file_at(const fsdp_checkpoint *checkpoint, int number,
                                      fsdp_checkpoint_file *file_out);

/* How a tensor entry lies in the files of another program's checkpoint, whose layouts say nothing of that: a
 * box of it and the number of its file, each where not NULL. False behind the last one, and for our own
 * checkpoints. */
FSDP_API bool fsdp_checkpoint_stored_box(const fsdp_checkpoint *checkpoint, size_t entry, size_t number,
                                         fsdp_box *box_out, int *file_out);

/* Any box of a tensor entry, packed row-major into data. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_checkpoint_read(fsdp_checkpoint *checkpoint, size_t entry,
                                                       const fsdp_box *box, void *data,
                                                       fsdp_check_mode check, fsdp_error *err);

/* A whole tensor entry, slab by slab within `memory` bytes; see fsdp_slab_visit. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_checkpoint_stream(fsdp_checkpoint *checkpoint, size_t entry,
                                                         int64_t memory, fsdp_slab_visit visit,
                                                         void *user, fsdp_error *err);

/* A tensor inside a value (FSDP_VALUE_TENSOR) of a checkpoint of another program, streamed in the same way;
 * the entry that visit gets has no name. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_checkpoint_stream_inner(fsdp_checkpoint *checkpoint, uint64_t tensor,
                                                               int64_t memory, fsdp_slab_visit visit,
                                                               void *user, fsdp_error *err);

/* Compares what the format of another program keeps checksums of with them: reading tensors does not. Our own
 * checkpoints are checked as they are read. FSDP_ERR_DAMAGED names the first that differs. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_checkpoint_check(fsdp_checkpoint *checkpoint, int threads,
                                                        fsdp_error *err);

/* An OPAQUE value that PyTorch stored (a torch.save file) as a checkpoint of one value, whose name is empty.
 * FSDP_ERR_NOT_FOUND for other bytes. The value must live as long as the checkpoint. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_checkpoint_open_value(const fsdp_value *value,
                                                             fsdp_checkpoint **checkpoint_out,
                                                             fsdp_error *err);

/* A member of listings that is neither tensor nor value, as JSON ("metadata" of safetensors, "attributes" of
 * HDF5 files); NULL when there is none. */
FSDP_API const char *fsdp_checkpoint_extra(const fsdp_checkpoint *checkpoint, const char *member);

/* --- is it whole and undamaged? --------------------------------------------------------------- */

typedef enum fsdp_verify_level {
    FSDP_VERIFY_QUICK = 0,     /* manifest, sizes, shard indexes, every element stored exactly once */
    FSDP_VERIFY_DATA,          /* and every block's hash */
    FSDP_VERIFY_DEEP           /* and the view, if there is one, is the one that belongs here, and HDF5's own
                                  structures of the shards show what the indexes say; of what is whole: NaN
                                  and Inf, and whether optimizer states fit the model */
} fsdp_verify_level;

typedef enum fsdp_finding_kind {
    FSDP_FINDING_DAMAGE = 0,
    FSDP_FINDING_VALUE,        /* a warning: the bytes are as saved, but what they say is doubtful */
    FSDP_FINDING_FIXED         /* was damage or missing, and was written anew */
} fsdp_finding_kind;

typedef struct fsdp_finding {
    const char *file;          /* relative to the checkpoint */
    const char *tensor;        /* printable name, "" when the file as a whole is meant */
    int64_t block;             /* -1: none */
    const char *text;
    bool unreadable;           /* it could not be looked at: says nothing about the bytes */
    fsdp_finding_kind kind;
} fsdp_finding;

typedef struct fsdp_verify_opts {
    fsdp_verify_level level;
    bool repair;               /* a missing or wrong view is written anew when the data is whole; never at
                                  FSDP_VERIFY_QUICK and for checkpoints of other programs (FSDP_ERR_USAGE) */
    int threads;
    int64_t memory;
    void (*finding)(void *user, const fsdp_finding *finding);
    void *finding_user;
    fsdp_watch watch;
    fsdp_access access;
} fsdp_verify_opts;

typedef struct fsdp_verify_summary {
    int64_t files, tensors, blocks, bytes;
    int64_t findings, unreadable;      /* damage; unreadable: those of the findings */
    int64_t warnings, fixed;           /* findings of the other kinds */
} fsdp_verify_summary;

/* FSDP_OK when good (warnings, too), FSDP_DIFFERS when damage was found (each reported as a finding),
 * FSDP_ERR_IO when a part could not be read (findings, too). */
FSDP_API FSDP_CHECKED fsdp_status fsdp_checkpoint_verify(const char *path, const fsdp_verify_opts *opts,
                                                         fsdp_verify_summary *summary_out, fsdp_error *err);

#ifdef __cplusplus
}
#endif
#endif
