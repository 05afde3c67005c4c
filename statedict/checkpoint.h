/*
 * Saves a state dict as a checkpoint, loads it on any number of ranks, lists it and verifies it. run.h has
 * runs of checkpoints, convert.h conversions. Calls are local unless they are marked collective.
 *
 * A checkpoint is a directory that appears by one rename (docs/commit.md). After fsdp_sd_save has returned
 * FSDP_OK it survives a power cut, and it loads bit for bit at any world size, mesh, sharding dim or kind.
 *
 * Options: NULL or all zero is the default. threads 0: one per core, divided among ranks of one process.
 * memory limits the bytes of buffers, whatever the size of the checkpoint; 0: FSDP_MEMORY_DEFAULT.
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
    FSDP_LOCAL                 /* one file per rank, with its boxes and flat chunks as they are */
} fsdp_kind;

typedef enum fsdp_owner_policy {
    FSDP_OWNERS_BALANCED = 0,  /* replicas are written once, by owners with about equal bytes */
    FSDP_OWNERS_LOWEST         /* replicas are written once, by the lowest rank that holds them */
} fsdp_owner_policy;

/*
 * Callbacks of a long call, by which it reports and can be stopped. Each may be NULL. The thread that made
 * the call or its workers call them, one at a time; several threads may call `stopped` at once.
 */
typedef struct fsdp_watch {
    void *context;
    /* Gets the bytes done, their total, and the name of the current entry. Returns non-zero to stop the call
     * with FSDP_ERR_CANCELLED. */
    int (*progress)(void *context, int64_t done, int64_t total, const char *what);
    /* Gets a line for users that is not an error: a skipped checkpoint, a view that was left out. */
    void (*notice)(void *context, const char *text);
    /* Returns true to end a wait early. Only `progress` stops the call itself. */
    bool (*stopped)(void *context);
} fsdp_watch;

/* How files are accessed, and how far they are trusted. All zero: through the file system, and not trusted.
 * */
typedef struct fsdp_access {
    bool follow_links;         /* follows any symbolic link in a checkpoint's directory; otherwise only those
                                  of a Hugging Face cache from snapshots/REVISION/NAME to a file in blobs.
                                  Nothing is written through a link */
    bool limits_only;          /* only resource limits confine the child process that reads HDF5 files of
                                  other programs; otherwise seccomp also limits its system calls, and opening
                                  is FSDP_ERR_REFUSED where the kernel has no seccomp */
    void *disk;                /* NULL; tests of the library set a disk that fails */
} fsdp_access;

enum { FSDP_NO_STEP = -1 };
#define FSDP_MEMORY_DEFAULT ((int64_t)256 << 20)

/* --- save ------------------------------------------------------------------------------------- */

typedef struct fsdp_retention {
    int keep_last;             /* number of the newest verified checkpoints that are kept; at least 2 */
    int64_t keep_every;        /* steps that this divides are kept permanently; 0: none */
    const int64_t *pins;       /* steps that are kept permanently; a file step-N/.pin does the same */
    size_t pin_count;
} fsdp_retention;

typedef struct fsdp_save_opts {
    fsdp_kind kind;
    fsdp_owner_policy owners;
    bool compress;             /* byte shuffle + zstd */
    int level;                 /* 0: entropy coding only (fastest, best on floats); else zstd's */
    bool skip_fsync;           /* leaves durability to the operating system */
    bool skip_view;            /* writes no index.h5 */
    bool rank0_writes;         /* full: only rank 0 writes the file, the others send their boxes to it */
    bool overwrite;            /* replaces an existing checkpoint (outside runs) */
    int threads;               /* workers of this rank */
    int64_t memory;            /* bytes of buffers of this rank */
    const int64_t *step;       /* written to the manifest; NULL: none. fsdp_run_save ignores it */
    uint8_t run[16];           /* run uuid; all zero: derived from the state dict's description */
    const fsdp_retention *retain;  /* fsdp_run_save: NULL keeps everything */
    fsdp_watch watch;
    fsdp_access access;
} fsdp_save_opts;

/* Saves sd as the checkpoint `dir`, which must not exist (FSDP_ERR_EXISTS). Path and options are equal on
 * every rank (threads, memory and watch may differ), else FSDP_ERR_USAGE names two ranks. Returns the same
 * status on every rank. After a failure nothing of the new checkpoint remains, and an old one is untouched;
 * only after FSDP_ERR_PEER, if a rank was lost, the complete new one may exist. Collective. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_sd_save(const fsdp_sd *sd, fsdp_ctl *ctl, const char *dir,
                                               const fsdp_save_opts *opts, fsdp_error *err);

/* Computes the bytes of tensors that `rank` would write; touches no file. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_save_plan_bytes(const fsdp_sd *sd, fsdp_kind kind,
                                                       fsdp_owner_policy owners, int rank,
                                                       int64_t *bytes_out, fsdp_error *err);

/* --- load ------------------------------------------------------------------------------------- */

typedef enum fsdp_check_mode {
    FSDP_CHECK_BLOCKS = 0,     /* reads whole blocks and compares their hashes */
    FSDP_CHECK_OFF             /* reads exactly the wanted rows and compares nothing */
} fsdp_check_mode;

/* The names that did not match, and what was read. A load fills it in, also when it fails; the caller
 * releases it. */
typedef struct fsdp_load_report {
    char **missing;            /* in the state dict, not in the checkpoint; as printable text */
    size_t missing_count;
    char **unexpected;         /* in the checkpoint, not in the state dict */
    size_t unexpected_count;
    char *path;                /* the checkpoint that was loaded */
    int64_t bytes_read, bytes_needed;  /* read by this rank; in its boxes */
} fsdp_load_report;
/* Frees the names and the path of a report. */
FSDP_API void fsdp_load_report_release(fsdp_load_report *report);

typedef struct fsdp_load_opts {
    fsdp_check_mode check;
    bool partial;              /* skips missing and unexpected names. Otherwise they are FSDP_ERR_USAGE, whose
                                  text has their numbers and the first names; if it cannot hold all of them,
                                  rank 0's watch.notice gets each one */
    bool cast;                 /* floating dtypes may differ; otherwise a difference is an error */
    const char *include, *exclude;     /* select names of sd (fsdp_filter_create); FSDP_ERR_USAGE if they
                                          select none */
    int threads;
    int64_t memory;
    fsdp_load_report *report;  /* may be NULL */
    fsdp_watch watch;
    fsdp_access access;
} fsdp_load_opts;

/*
 * Fills the memory of sd's tensors and replaces its values from the checkpoint `path`; an alias has the data
 * of its tensor. `path` is the same on all ranks, else FSDP_ERR_USAGE. If it is a run, loads the newest
 * checkpoint that verifies, and names skipped ones through watch.notice; a newer format version is not
 * skipped, but FSDP_ERR_REFUSED. Ranks that are threads of one process share each read and check of a block.
 * After a failure the contents of the tensors are undefined. Collective.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_sd_load(fsdp_sd *sd, fsdp_ctl *ctl, const char *path,
                                               const fsdp_load_opts *opts, fsdp_error *err);

/* --- full state on one rank ------------------------------------------------------------------- */

/*
 * Gets a tensor in row-major slabs, in order: `data`, which lives for the call, holds elements [first, first
 * + count). There is one call with count 0 for a tensor without elements. A failure ends the stream with that
 * status.
 */
typedef fsdp_status (*fsdp_slab_visit)(void *context, const fsdp_entry *entry, int64_t first,
                                       int64_t count, const void *data, fsdp_error *err);

/* Streams every whole tensor of the state dicts of all ranks to visit on rank 0, within rank 0's `memory`
 * bytes. visit is not called on the other ranks. Collective. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_sd_gather(const fsdp_sd *sd, fsdp_ctl *ctl, int64_t memory,
                                                 fsdp_slab_visit visit, void *context, fsdp_error *err);

/* Gathers the state dicts of all ranks on rank 0: *full_out becomes a state dict with all tensors, whole, and
 * all values and aliases. It owns its memory, and the caller frees it. NULL on the other ranks. Collective.
 * */
FSDP_API FSDP_CHECKED fsdp_status fsdp_sd_gather_full(const fsdp_sd *sd, fsdp_ctl *ctl, fsdp_sd **full_out,
                                                      fsdp_error *err);

/* Loads the whole state of a checkpoint (or of a run's newest good one, as fsdp_sd_load does) into a state
 * dict that owns its memory and that the caller frees. FSDP_ERR_USAGE if the patterns select no name of the
 * checkpoint; opts->cast is ignored. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_load_full(const char *path, const fsdp_load_opts *opts,
                                                 fsdp_sd **full_out, fsdp_error *err);
/* Streams the whole state to visit, within opts->memory; of opts it uses patterns, memory and access. Damaged
 * data is an error also in a run, where fsdp_sd_load would take an older step, because visit has already got
 * a part of the damaged one. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_stream_full(const char *path, const fsdp_load_opts *opts,
                                                   fsdp_slab_visit visit, void *context, fsdp_error *err);

/* --- reading a checkpoint --------------------------------------------------------------------- */

typedef struct fsdp_checkpoint fsdp_checkpoint;

typedef struct fsdp_checkpoint_info {
    const char *path;
    const char *format;        /* of a format that is read (fsdp_format_from) */
    int format_major, format_minor;
    fsdp_kind kind;
    int64_t step;              /* FSDP_NO_STEP if none */
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
    int64_t box_count, block_count;    /* files of other programs have no blocks: 0 */
} fsdp_checkpoint_file;

typedef struct fsdp_open_opts {
    const char *format;        /* name of the only format that is tried; NULL: detected from the bytes */
    const char *allow_missing; /* regex over names of entries that may be incomplete because files are
                                  missing; NULL: an incomplete checkpoint is FSDP_ERR_DAMAGED */
    const char *variant;       /* "fp16": reads the files NAME.fp16.safetensors of a directory; NULL: those
                                  without a variant */
    const char *void_as;       /* npy, npz: dtypes of arrays whose elements are untyped bytes (|V2), one
                                  per size: "bf16,f8_e4m3fn"; NULL: such arrays are values */
    const char *like;          /* a checkpoint or Hugging Face directory of the model, for rank files of FSDP1
                                  that name pieces of parameters without their shapes (LOCAL_STATE_DICT with
                                  use_orig_params); NULL: they are listed as pieces */
    bool as_stored;            /* DeepSpeed: only the entries that it stores. Otherwise also those that
                                  PyTorch has for each parameter: optim.state.NAME.step, and
                                  optim.param_groups.N.* with the names of parameters */
    bool whole;                /* a directory in which another program keeps a model, its optimizer and the
                                  rest side by side: reads all (model., optim., ...), not only the model */
    int64_t memory;            /* limit on the bytes of values while they are read (arrays of GGUF), in
                                * addition to 32 MiB; 0: 256 MiB. More is FSDP_ERR_LIMIT */
    const fsdp_watch *watch;   /* gets notices of what a path stands for; NULL: none */
    fsdp_access access;
} fsdp_open_opts;

/* Opens a checkpoint (or the newest good one of a run) and checks manifest, file sizes and shard indexes. The
 * caller closes it. Several threads may read from it at once. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_checkpoint_open(const char *path, const fsdp_open_opts *opts,
                                                       fsdp_checkpoint **checkpoint_out, fsdp_error *err);
/* Closes a checkpoint; accepts NULL. */
FSDP_API void fsdp_checkpoint_close(fsdp_checkpoint *checkpoint);

/* Returns the number of incomplete entries (allow_missing), which must not be read; a conversion leaves
 * them out. */
FSDP_API size_t fsdp_checkpoint_missing_count(const fsdp_checkpoint *checkpoint);
/* Returns the name of an incomplete entry, which lives as long as the checkpoint; NULL after the last. */
FSDP_API const char *fsdp_checkpoint_missing_at(const fsdp_checkpoint *checkpoint, size_t i,
                                                size_t *size_out);

/* Describes the checkpoint as a whole; borrowed until the close. */
FSDP_API const fsdp_checkpoint_info *fsdp_checkpoint_describe(const fsdp_checkpoint *checkpoint);
/* Returns names, dtypes, shapes, saved layouts and values, without data; borrowed until the close. */
FSDP_API const fsdp_sd *fsdp_checkpoint_sd(const fsdp_checkpoint *checkpoint);
/* Describes a file of the checkpoint; number is below file_count of its info. */
FSDP_API void fsdp_checkpoint_file_at(const fsdp_checkpoint *checkpoint, int number,
                                      fsdp_checkpoint_file *file_out);

/* Gets a stored box of a tensor entry and the number of its file (either output may be NULL), in a
 * checkpoint of another program, whose tensors have no layout. Returns false after the last one, and for
 * native checkpoints. */
FSDP_API bool fsdp_checkpoint_stored_box_at(const fsdp_checkpoint *checkpoint, size_t entry,
                                            size_t number, fsdp_box *box_out, int *file_out);

/* A run of bytes in a file. */
typedef struct fsdp_file_range {
    const char *path;          /* as it can be opened; lives as long as the checkpoint */
    int64_t offset, size;
} fsdp_file_range;

/* Finds the bytes of a tensor entry, or of the tensor of an alias, in a checkpoint of another program, for
 * programs that map files: true if they lie in one file, in one run, and as fsdp_checkpoint_read returns
 * them. Nothing compares them with a checksum, and the file may change. Returns false for all other tensors
 * and for native checkpoints, whose blocks are checked while they are read. */
FSDP_API bool fsdp_checkpoint_plain_bytes(const fsdp_checkpoint *checkpoint, size_t entry,
                                          fsdp_file_range *range_out);

/* Reads any box of a tensor entry, packed row-major, into data. FSDP_ERR_DAMAGED names the tensor and the
 * block if a hash differs. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_checkpoint_read(fsdp_checkpoint *checkpoint, size_t entry,
                                                       const fsdp_box *box, void *data,
                                                       fsdp_check_mode check, fsdp_error *err);

/* Streams a whole tensor entry to visit, within `memory` bytes. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_checkpoint_stream(fsdp_checkpoint *checkpoint, size_t entry,
                                                         int64_t memory, fsdp_slab_visit visit,
                                                         void *context, fsdp_error *err);

/* Streams a tensor inside a value (FSDP_VALUE_TENSOR) of a checkpoint of another program; the entry that
 * visit gets has no name. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_checkpoint_stream_inner(fsdp_checkpoint *checkpoint, uint64_t tensor,
                                                               int64_t memory, fsdp_slab_visit visit,
                                                               void *context, fsdp_error *err);

/* Compares the files of another program's checkpoint with the checksums of its format, which reading does not
 * check. FSDP_ERR_DAMAGED names the first that differs. Native checkpoints are checked as they are read.
 * watch (may be NULL) counts the bytes. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_checkpoint_check(fsdp_checkpoint *checkpoint, int threads,
                                                        const fsdp_watch *watch, fsdp_error *err);

/* Opens an OPAQUE value that PyTorch stored (a torch.save file) as a checkpoint of one value, whose name is
 * empty; the caller closes it. FSDP_ERR_NOT_FOUND for other bytes. The value must live as long as the
 * checkpoint. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_checkpoint_open_value(const fsdp_value *value,
                                                             fsdp_checkpoint **checkpoint_out,
                                                             fsdp_error *err);

/* Returns data of another program's checkpoint that is neither tensor nor value, as JSON. member is
 * "metadata" for the metadata of safetensors, "carried" for the part of it that stays true in other files of
 * the same tensors and that native checkpoints store, or "attributes" for those of HDF5 files. Borrowed until
 * the close; NULL if there is none. */
FSDP_API const char *fsdp_checkpoint_extra(const fsdp_checkpoint *checkpoint, const char *member);

/* --- verification ----------------------------------------------------------------------------- */

typedef enum fsdp_verify_level {
    FSDP_VERIFY_QUICK = 0,     /* manifest, sizes, shard indexes, every element stored exactly once */
    FSDP_VERIFY_DATA,          /* also every block's hash */
    FSDP_VERIFY_DEEP           /* also that the view, if there is one, belongs to this manifest, and that
                                  HDF5's own structures of the shards agree with the indexes; warns of NaN and
                                  Inf, and of optimizer states that do not fit the model */
} fsdp_verify_level;

typedef enum fsdp_finding_kind {
    FSDP_FINDING_DAMAGE = 0,
    FSDP_FINDING_VALUE,        /* a warning: the bytes are as saved, but their values are doubtful */
    FSDP_FINDING_FIXED,        /* a damaged or missing file that was written again */
    FSDP_FINDING_CODE,         /* not damage: a program that loads the file runs code that it names */
    /* of fsdp_checkpoint_verify_like: */
    FSDP_FINDING_MISSING,      /* a tensor that the model has */
    FSDP_FINDING_EXTRA,        /* a tensor that it lacks */
    FSDP_FINDING_SHAPE,        /* another shape, or integers instead of floating numbers */
    FSDP_FINDING_NOT_FINITE,   /* NaN or Inf */
    FSDP_FINDING_ZERO,         /* a matrix of zeros */
    FSDP_FINDING_TWIN,         /* two experts of a layer with equal bytes */
    FSDP_FINDING_UNCHANGED     /* the model of the step before it in the run */
} fsdp_finding_kind;

typedef struct fsdp_finding {
    const char *file;          /* relative to the checkpoint */
    const char *tensor;        /* printable name, "" when the file as a whole is meant */
    int64_t block;             /* -1: none */
    const char *text;
    bool unreadable;           /* the part could not be read; its bytes may be good */
    fsdp_finding_kind kind;
} fsdp_finding;

typedef enum fsdp_digests {
    FSDP_DIGESTS_IGNORE = 0,
    FSDP_DIGESTS_USE,          /* compares the files with PATH.xxh3, if it exists (docs/formats.md) */
    FSDP_DIGESTS_WRITE         /* also writes it for a good checkpoint that has none */
} fsdp_digests;

typedef struct fsdp_verify_opts {
    fsdp_verify_level level;
    fsdp_digests digests;
    bool repair;               /* writes a missing or wrong view again if the data is undamaged.
                                  FSDP_ERR_USAGE with FSDP_VERIFY_QUICK and for other programs' checkpoints */
    const char *variant;       /* as in fsdp_open_opts */
    int threads;
    int64_t memory;
    void (*finding)(void *context, const fsdp_finding *finding);   /* once per finding; may be NULL */
    void *finding_context;
    fsdp_watch watch;
    fsdp_access access;
} fsdp_verify_opts;

typedef struct fsdp_verify_summary {
    int64_t files, tensors, blocks, bytes;
    int64_t checked_bytes;             /* compared with checksums or digests, as stored; 0: there are none, or
                                        * only sizes and indexes were requested */
    int64_t findings, unreadable;      /* damage; the unreadable ones among it */
    int64_t warnings, fixed, code_files;   /* findings of the other kinds */
    int64_t digest_files;              /* files that PATH.xxh3 lists; 0: there is none, or it was not used */
    bool digests_written;
} fsdp_verify_summary;

/* Verifies a checkpoint. Returns FSDP_OK if it is good (warnings do not count), FSDP_DIFFERS if there is
 * damage, FSDP_ERR_IO if a part could not be read; each fault is reported as a finding. summary_out may be
 * NULL. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_checkpoint_verify(const char *path, const fsdp_verify_opts *opts,
                                                         fsdp_verify_summary *summary_out, fsdp_error *err);

typedef struct fsdp_like_summary {
    char model[128];           /* the expected model: "llama", or the path of the other checkpoint */
    int64_t expected, found;   /* tensors that must exist; those of them that do, of whatever shape */
    int64_t findings;
} fsdp_like_summary;

/*
 * Compares the model of a checkpoint, under the names that a conversion to hf gives it, with the model of
 * `like`: a checkpoint (its names and shapes), or a config.json or a directory with one. Returns FSDP_DIFFERS
 * if tensors are missing, extra or of another shape, or (except at FSDP_VERIFY_QUICK) have values that no
 * training produces; each is reported as a finding. FSDP_ERR_USAGE for a config.json of a model that is not
 * known. `repair` and `digests` of opts are ignored. summary_out may be NULL.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_checkpoint_verify_like(const char *path, const char *like,
                                                              const fsdp_verify_opts *opts,
                                                              fsdp_like_summary *summary_out,
                                                              fsdp_error *err);

#ifdef __cplusplus
}
#endif
#endif
