/*
 * An opened checkpoint, native or of another program, behind one table of functions.
 *
 * In: a path. Out: its description, the data of its tensors by boxes, findings about its bytes. Local; save/
 * (loads), convert/, diff/, run/ and the tools call this room.
 *
 *   checkpoint_ops.c   calls the table
 *   checkpoint.c       opens and reads native checkpoints, also when files are missing
 *   foreign.c          opens and reads other programs' checkpoints
 *   in_memory.c        a state dict in memory, as a source of conversions
 *   one_file.c         a checkpoint in one file
 *   view.c             writes and compares index.h5
 *   verify.c           verification: files, indexes, values, other programs' checksums
 *   digests.c          digest files next to checkpoints; file_list.c  files and their digests
 */
#ifndef FSDP_CHECKPOINT_INTERNAL_H
#define FSDP_CHECKPOINT_INTERNAL_H

#include "statedict/manifest/manifest.h"
#include "formats/source.h"
#include "statedict/transfer/pipeline.h"
#include "statedict/transfer/box_plan.h"
#include "statedict/sd/access.h"
#include <fsdp/filter.h>

/* Limits of reading that a conversion needs for its plan; see fsdp_source_reading_limits. */
typedef struct fsdp_reading {
    int threads;               /* that may read at once */
    int64_t apart;             /* bytes that they may be apart together */
    int64_t spooled;           /* bytes that are put into spools */
    int64_t per_thread;        /* bytes of buffers that each thread needs for derived tensors (derive/) */
} fsdp_reading;

struct fsdp_read_request;

/* Called for a file that is read: `number` as in fsdp_checkpoint_file_at, or -1 for a file that only
 * describes others. */
typedef fsdp_status (*fsdp_file_visit)(void *context, int number, const char *path,
                                       const fsdp_file_info *info, fsdp_error *err);
typedef fsdp_status (*fsdp_number_visit)(void *context, int number, fsdp_error *err);

/*
 * The functions of an opened checkpoint: native (checkpoint.c), another program's (foreign.c), a state dict
 * in memory (in_memory.c), or tensors that are derived from another's (derive/derived_checkpoint.c). Other
 * files call the functions below, which call these. Entries are tensors. NULL, except for get: there is
 * nothing to close, check, announce or limit, no file, and no place.
 */
typedef struct fsdp_checkpoint_ops {
    fsdp_status (*get)(fsdp_checkpoint *checkpoint, const struct fsdp_read_request *request, fsdp_error *err);
    void (*close)(fsdp_checkpoint *checkpoint);
    void (*file_at)(const fsdp_checkpoint *checkpoint, int number, fsdp_checkpoint_file *file_out);
    fsdp_status (*each_file)(const fsdp_checkpoint *checkpoint, fsdp_file_visit visit, void *context,
                             fsdp_error *err);
    fsdp_status (*locate)(fsdp_checkpoint *checkpoint, size_t entry, const fsdp_box *box,
                          fsdp_number_visit visit, void *context, fsdp_error *err);
    const char *(*missing_at)(const fsdp_checkpoint *checkpoint, size_t number, size_t *size_out);
    fsdp_status (*require)(fsdp_checkpoint *checkpoint, size_t entry, fsdp_error *err);
    fsdp_status (*announce)(fsdp_checkpoint *checkpoint, size_t entry, bool repeated, fsdp_error *err);
    fsdp_status (*set_memory)(fsdp_checkpoint *checkpoint, int64_t memory, const char *to, fsdp_error *err);
    fsdp_reading (*reading)(const fsdp_checkpoint *checkpoint);
    /* Orders entries by the bytes that they are read from; 0: the same ones, in the same way. False when one
     * of them has no such place. */
    bool (*compare_places)(const fsdp_checkpoint *checkpoint, size_t a, size_t b, int *order_out);
} fsdp_checkpoint_ops;

/* The base of the three structs, which begin with it. */
struct fsdp_checkpoint {
    const fsdp_checkpoint_ops *ops;
    fsdp_io *io;
    fsdp_io *cache;            /* of the opening, below io; NULL: the caller's (base/io/io_cache.h) */
    char *path;
    bool is_one_file;          /* the path is a native file (one_file.h), not a directory */
    bool is_derived;
    fsdp_manifest manifest;    /* another program's: an equivalent one, without files */
    fsdp_sd *metadata;         /* its metadata as values; NULL until a comparison lists them */
    fsdp_checkpoint_info info;
    struct fsdp_source *source;    /* another program's, also below derived tensors; NULL: native */
    fsdp_filter *may_lack;     /* during the opening: names that may be incomplete; NULL: none */
    bool *is_missing;          /* per entry: incomplete (checkpoint_internal.h); NULL: all are whole */
    size_t missing_count;      /* of them, and of missing names without entry */
};

typedef struct fsdp_native {
    fsdp_checkpoint base;
    int *owners;               /* per entry, repeated from the manifest's policy */
    fsdp_shard_reader **readers;   /* per file; NULL until needed */
} fsdp_native;

/* The checkpoint must be native. */
static inline fsdp_native *fsdp_native_of(const fsdp_checkpoint *checkpoint)
{
    return (fsdp_native *)(uintptr_t)checkpoint;
}

/* Opens the path itself, no run; native files are opened when they are needed. opts NULL: defaults. */
fsdp_status fsdp_checkpoint_open_as(fsdp_io *io, const char *path, const fsdp_open_opts *opts,
                                    fsdp_checkpoint **checkpoint_out, fsdp_error *err);

/* Opens the directory itself (no run), without shard files. */
fsdp_status fsdp_checkpoint_open_manifest(fsdp_io *io, const char *path, fsdp_checkpoint **checkpoint_out,
                                          fsdp_error *err);

/* Like fsdp_checkpoint_open_manifest, without the check of file sizes, which opening the files repeats. */
fsdp_status fsdp_checkpoint_open_alone(fsdp_io *io, const char *path, fsdp_checkpoint **checkpoint_out,
                                       fsdp_error *err);

/* Opens file `number` of a native checkpoint and checks its index, unless that was done. Not thread-safe. */
fsdp_status fsdp_checkpoint_need_file(fsdp_checkpoint *checkpoint, int number, fsdp_error *err);
/* All of them, but for those that may be missing, whose entries are marked; nothing for other checkpoints. */
fsdp_status fsdp_checkpoint_need_all(fsdp_checkpoint *checkpoint, fsdp_error *err);

/* The file that holds the boxes of a rank. */
int fsdp_checkpoint_file_of(const fsdp_checkpoint *checkpoint, int rank);

/* A box that the manifest promises: the rank that stored it, as its box number `part` of the entry. */
typedef struct fsdp_promised_box {
    size_t entry;
    int rank;
    size_t part;
    const fsdp_box *box;
} fsdp_promised_box;
/* The promised box as the index has it, which must agree. Its file must be open. */
fsdp_status fsdp_checkpoint_stored(const fsdp_checkpoint *checkpoint, const fsdp_promised_box *promised,
                                   const fsdp_stored_box **stored_out, fsdp_shard_reader **reader_out,
                                   fsdp_error *err);

/*
 * Workers that fill the same targets together walk over the same blocks in the same order, and each
 * takes the blocks whose number it drew. No worker waits for another.
 */
typedef struct fsdp_work_counter {
    atomic_llong *next;        /* shared: the next number to draw */
    int64_t mine;              /* drawn by this worker */
    int64_t at;                /* number of this worker's current block */
} fsdp_work_counter;

void fsdp_work_counter_begin(fsdp_work_counter *counter, atomic_llong *next);
/* True when the next item is this worker's; always with counter NULL. */
bool fsdp_work_counter_take(fsdp_work_counter *counter);
/* Stops all workers after a failure: none gets another item. */
void fsdp_work_counter_stop(fsdp_work_counter *counter);

/* A tensor that is given to visit in slabs. */
typedef struct fsdp_slab_stream {
    const fsdp_entry *tensor;
    fsdp_status (*read)(void *source, const fsdp_box *slab, char *data, fsdp_error *err);
    void *source;
    int64_t memory;            /* of a slab; 0: the default */
    fsdp_slab_visit visit;
    void *context;
} fsdp_slab_stream;
fsdp_status fsdp_stream_slabs(const fsdp_slab_stream *stream, fsdp_error *err);

/* Buffers of one size that computed tensors (derive/) take in turns. */
enum { FSDP_READ_BUFFERS = 48 };
typedef struct fsdp_read_buffers {
    void *data[FSDP_READ_BUFFERS];
    int used;
} fsdp_read_buffers;

/* The buffers of one worker, which reads any checkpoint. Zero-initialise. */
typedef struct fsdp_reader {
    fsdp_block_reader blocks;          /* of a native one */
    fsdp_source_reader source;         /* of another program's */
    fsdp_read_buffers buffers;         /* of a derived one */
    fsdp_read_slots slots;             /* for targets of devices, which native and foreign ones have */
} fsdp_reader;
int64_t fsdp_reader_bytes(const fsdp_reader *reader);  /* that it has read */
void fsdp_reader_release(fsdp_reader *reader);

/* A request to read boxes of one entry. The files that hold it must be open. */
typedef struct fsdp_read_request {
    size_t entry;              /* a tensor */
    const fsdp_read_target *targets;
    size_t count;
    fsdp_reader *reader;       /* of the thread: several may read at once */
    fsdp_work_counter *counter;        /* shares the blocks among workers; NULL: one worker reads all */
} fsdp_read_request;
fsdp_status fsdp_checkpoint_get(fsdp_checkpoint *checkpoint, const fsdp_read_request *request,
                                fsdp_error *err);

/* Checks, before memory is allocated for an entry, that its files hold what the manifest declares. */
fsdp_status fsdp_checkpoint_require(fsdp_checkpoint *checkpoint, size_t entry, fsdp_error *err);

/* --- files ------------------------------------------------------------------------------------ */

/* Visits all files that exist. */
fsdp_status fsdp_checkpoint_each_file(const fsdp_checkpoint *checkpoint, fsdp_file_visit visit, void *context,
                                      fsdp_error *err);
/* Bytes that fsdp_checkpoint_check counts; bytes of files or streams that have checksums. */
int64_t fsdp_checkpoint_check_bytes(const fsdp_checkpoint *checkpoint);
/* FSDP_ERR_DAMAGED when a file of another program has another size, time or inode than when it was opened:
 * what was read before may be of the old file. Native blocks have digests that notice it. */
fsdp_status fsdp_checkpoint_check_unchanged(const fsdp_checkpoint *checkpoint, fsdp_error *err);
/* Visits the numbers of the files that hold a part of a box, some perhaps more than once. */
fsdp_status fsdp_checkpoint_locate(fsdp_checkpoint *checkpoint, size_t entry, const fsdp_box *box,
                                   fsdp_number_visit visit, void *context, fsdp_error *err);
/* True when one of its files, or the checkpoint itself, is in this directory. */
bool fsdp_checkpoint_lies_in(const fsdp_checkpoint *checkpoint, const char *dir);
/* FSDP_ERR_USAGE when `to` would lie in the checkpoint's directory, which is converted. */
fsdp_status fsdp_checkpoint_refuse_inside(const fsdp_checkpoint *checkpoint, const char *to, fsdp_error *err);
/* True when the path is one of the checkpoint's files. */
bool fsdp_checkpoint_reads(const fsdp_checkpoint *checkpoint, const char *path);

/* --- conversions, before the first read --------------------------------------------------------- */

/* Makes torch.save files (fsdp_source_save_value) of values that only their writer understands, up to 64 MiB
 * in all. Values that differ from rank to rank are kept only if the target is native (is_ours). */
fsdp_status fsdp_checkpoint_carry_values(fsdp_checkpoint *checkpoint, bool is_ours, fsdp_error *err);
/* Limits the memory for unpacking; spools go next to `to`. */
fsdp_status fsdp_checkpoint_set_memory(fsdp_checkpoint *checkpoint, int64_t memory, const char *to,
                                       fsdp_error *err);
/* Announces how an entry, or the target of an alias, will be read: see fsdp_source_announce. */
fsdp_status fsdp_checkpoint_announce(fsdp_checkpoint *checkpoint, size_t entry, bool repeated,
                                     fsdp_error *err);
fsdp_reading fsdp_checkpoint_reading(const fsdp_checkpoint *checkpoint);
/* Orders entries by the bytes that they are read from; 0: the same ones, in the same way. False when one of
 * them has no such place. */
bool fsdp_checkpoint_compare_places(const fsdp_checkpoint *checkpoint, size_t a, size_t b, int *order_out);

/* --- missing files (checkpoint_ops.c) --- */

/*
 * Checkpoints with missing files. A conversion leaves out the incomplete entries whose names the user allowed
 * to be missing, and takes all others. A file that exists and is damaged stays an error.
 */

/* Takes opts->allow_missing; opts may be NULL. */
fsdp_status fsdp_incomplete_allow(fsdp_checkpoint *checkpoint, const fsdp_open_opts *opts, fsdp_error *err);

/* Marks an entry as incomplete. */
fsdp_status fsdp_incomplete_mark(fsdp_checkpoint *checkpoint, size_t entry, fsdp_error *err);

/* --- foreign.c --- */

/* Checkpoints of other programs as opened checkpoints: listed, compared and converted like native ones. */

/* True when the path is a file that is not native, or a directory without native files. */
bool fsdp_path_is_foreign(fsdp_io *io, const char *path);

/* Opens a path in the format that opts (NULL: defaults) name, or that its bytes show. The state dict has
 * every tensor whole, on one rank. model: that of opts->like, or NULL; borrowed during the call. */
fsdp_status fsdp_foreign_open(fsdp_io *io, const char *path, const fsdp_open_opts *opts,
                              const fsdp_checkpoint *model, fsdp_checkpoint **checkpoint_out,
                              fsdp_error *err);

/* --- in_memory.c --- */

/* Stands for a path in messages. */
#define FSDP_STATE_PATH "(state in memory)"

/* Makes a checkpoint of a state dict whose tensors are whole in this process. It borrows the state dict and
 * its memory. FSDP_ERR_USAGE names a tensor that is not whole. */
fsdp_status fsdp_checkpoint_of_state(fsdp_io *io, const fsdp_sd *state, fsdp_checkpoint **checkpoint_out,
                                     fsdp_error *err);

#endif
