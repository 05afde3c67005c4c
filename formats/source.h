/*
 * A checkpoint of another program as named typed arrays and values: what every reader of a foreign
 * format gives.
 *
 *   probe (detect.c): which format is it?  ->  the format's open fills a catalog through the builder
 *   below  ->  seal checks it as a whole  ->  fsdp_source_read brings boxes of tensors
 *
 * A tensor consists of *chunks*: boxes of it, each with the place of its bytes. Most formats keep
 * plain bytes, so a chunk is a strided view into a file, and reading needs nothing of the format any
 * more. Bytes that are packed (deflate, zstd) lie in a *stream*, which is decoded from its beginning.
 * A format with storage of its own (HDF5) brings a read function.
 *
 * Names, shapes and places come from files that nobody vouches for: the builder checks every one of
 * them. A source that was sealed may be read by several threads at once.
 */
#ifndef FSDP_SOURCE_H
#define FSDP_SOURCE_H

#include "base/io/io.h"
#include "base/core/mem.h"
#include <fsdp/box.h>
#include <fsdp/dtype.h>
#include "base/text.h"
#include <fsdp/value.h>

typedef struct fsdp_source fsdp_source;

/* --- the catalog ------------------------------------------------------------------------------ */

enum { FSDP_NO_STREAM = -1 };

/* What must be done to stored elements: bits. */
enum {
    FSDP_FIX_SWAP = 1,         /* the other byte order (of each half of a complex number) */
    FSDP_FIX_CONJUGATE = 2,
    FSDP_FIX_NEGATE = 4
};

typedef struct fsdp_source_chunk {
    const int64_t *lo, *len;   /* its box in the tensor; borrowed by the builder's call, then the catalog's */
    const int64_t *strides;    /* in bytes; 0 repeats an element, negative goes backwards; NULL: row-major */
    int64_t offset;            /* of its first element, in the file or in the decoded stream */
    int file;                  /* number in the catalog; -1: the format's own read brings it */
    int origin;                /* where file is -1: the file that it comes from all the same */
    int stream;                /* FSDP_NO_STREAM: the bytes of the file are the bytes of the elements */
    unsigned fix;
} fsdp_source_chunk;

typedef struct fsdp_source_tensor {
    const char *name;          /* zero-terminated behind its end, may hold NUL */
    size_t name_size;
    fsdp_dtype dtype;
    int ndim;
    const int64_t *shape;
    bool is_inner;             /* only inside a value (FSDP_VALUE_TENSOR): no name of its own */
    bool is_missing;           /* not whole, and it may be: see fsdp_source_opts. It must not be read */
    const fsdp_source_chunk *chunks;   /* after seal: they cover it exactly once */
    size_t chunk_count;
} fsdp_source_tensor;

typedef enum fsdp_packing { FSDP_PACKING_DEFLATE, FSDP_PACKING_ZSTD } fsdp_packing;

/* Bytes that must be decoded from their beginning. */
typedef struct fsdp_source_stream {
    int file;
    fsdp_packing packing;
    int64_t offset, stored;    /* in the file */
    int64_t size;              /* decoded; a stream of another size is damaged. -1: to be found out */
    bool has_crc;
    uint32_t crc;              /* CRC-32 of what is decoded */
} fsdp_source_stream;

/* A range of a file that holds a value in the writer's own form, to be carried on as it is. */
typedef struct fsdp_source_blob {
    int file;                  /* -1: none */
    int64_t offset, size;
} fsdp_source_blob;

/* Entries in the order of the source: a tensor (its number) or a value. */
typedef struct fsdp_source_entry {
    bool is_tensor;
    bool is_alias;             /* a second name of the tensor; behind all others */
    size_t tensor;
    const char *name;
    size_t name_size;
    const fsdp_value *value;
    fsdp_source_blob blob;
    const int32_t *path;       /* how its name is nested (name_path.h); NULL: it is not */
    size_t path_count;
} fsdp_source_entry;

size_t fsdp_source_entry_count(const fsdp_source *source);
const fsdp_source_entry *fsdp_source_entry_at(const fsdp_source *source, size_t number);
size_t fsdp_source_tensor_count(const fsdp_source *source);      /* inner ones included */
const fsdp_source_tensor *fsdp_source_tensor_at(const fsdp_source *source, size_t number);
const char *fsdp_source_format(const fsdp_source *source);       /* "safetensors", "dcp", "torch", ... */
const char *fsdp_source_path(const fsdp_source *source);
size_t fsdp_source_file_count(const fsdp_source *source);
const char *fsdp_source_file_path(const fsdp_source *source, size_t number);
int64_t fsdp_source_file_size(const fsdp_source *source, size_t number);
/* As it was when it was opened. */
const fsdp_file_info *fsdp_source_file_info(const fsdp_source *source, size_t number);
/* FSDP_ERR_DAMAGED when what was learned since, by another open, is of another file, or of a changed one. */
fsdp_status fsdp_source_file_compare(const fsdp_source *source, size_t number, const fsdp_file_info *now,
                                     fsdp_error *err);
/* The first of them hold tensors and values. Behind those are files that were only read to understand them:
 * metadata, an index. */
size_t fsdp_source_content_count(const fsdp_source *source);

/* Members of the listing that are neither tensors nor values: "metadata" of safetensors, "attributes" of
 * HDF5: a JSON text, or NULL. */
const char *fsdp_source_extra(const fsdp_source *source, const char *member);

/* Entries that are not whole, or of which no more than the name is known: what may_lack allowed. */
size_t fsdp_source_missing_count(const fsdp_source *source);
const char *fsdp_source_missing_at(const fsdp_source *source, size_t number, size_t *size_out);

/* --- reading ---------------------------------------------------------------------------------- */

/* What one reading thread keeps; zero-initialise. */
typedef struct fsdp_source_reader { void *buf; size_t size; int64_t bytes_read; } fsdp_source_reader;
void fsdp_source_reader_release(fsdp_source_reader *reader);

/* Fills a box of a tensor, packed row-major, little-endian, with everything resolved. */
fsdp_status fsdp_source_read(fsdp_source *source, size_t tensor, const fsdp_box *box, void *data,
                             fsdp_source_reader *reader, fsdp_error *err);

/*
 * Memory for decoded streams together. Of a stream over a quarter of it only the last part is kept, which
 * is enough for reading onwards; a stream that is read back and forth all the same is spooled into an
 * unnamed file in `directory` (NULL: $TMPDIR or /tmp). Call before the first read.
 */
void fsdp_source_set_memory(fsdp_source *source, int64_t memory, const char *directory);
int64_t fsdp_source_memory(const fsdp_source *source);

/*
 * What is to be read, told beforehand (source_spool.c): the tensor whole, in row-major order. `repeated`:
 * again and again, or in parts that are no runs of that order. Streams that this would decode many times over
 * are spooled when they are first read. FSDP_ERR_LIMIT when it takes more memory than there may be. Call
 * after fsdp_source_set_memory and before the first read.
 */
fsdp_status fsdp_source_announce(fsdp_source *source, size_t tensor, bool repeated, fsdp_error *err);
/* How many threads may read at once, so that each finds what it had decoded of its stream, and how many bytes
 * behind the foremost one they may be together. INT_MAX and INT64_MAX where no stream is larger than that. */
void fsdp_source_reading_limits(const fsdp_source *source, int *threads_out, int64_t *bytes_out);
/* Bytes that what was announced puts into spools. */
int64_t fsdp_source_spool_bytes(const fsdp_source *source);

/* Checksums that the format itself keeps (records of a zip, decoded streams): reading does not look at
 * those of plain bytes. FSDP_ERR_DAMAGED naming the record. Numbers may be checked by several threads. */
size_t fsdp_source_check_count(const fsdp_source *source);
fsdp_status fsdp_source_check(fsdp_source *source, size_t number, fsdp_source_reader *reader,
                              fsdp_error *err);

void fsdp_source_close(fsdp_source *source);          /* accepts NULL */

/*
 * An entry that is a value, in the form that torch.save gives it: what its writer stored, its part of a
 * larger pickle, or, for one that no file has as it is, with the tensors in it read now. out stays empty
 * where that cannot be, or takes more than `most` bytes. One thread.
 */
fsdp_status fsdp_source_save_value(fsdp_source *source, size_t entry, size_t most, fsdp_text *out,
                                   fsdp_error *err);

/* A value as its writer stored it (the bytes of a blob: a torch.save file), in memory: one value, whose name
 * is empty, and the tensors in it. data is borrowed until the source is closed. */
fsdp_status fsdp_source_open_blob(const void *data, size_t size, fsdp_source **source_out, fsdp_error *err);

/* --- the builder, for formats ----------------------------------------------------------------- */

/* A format that keeps elements in a way of its own. */
typedef struct fsdp_source_ops {
    /* As fsdp_source_read, for tensors of which a chunk has file -1. NULL when there are none. */
    fsdp_status (*read)(void *state, size_t tensor, const fsdp_box *box, void *data, fsdp_error *err);
    /* For chunks with file -1 whose bytes are plain after all, but whose place takes reading to find out:
     * fills in file, stream, offset, fix and strides (room for the tensor's dims) of a copy of the chunk; its
     * offset is what add_chunk was given. Called again and again, and by several threads. NULL: read brings
     * them. The format answers for the place. */
    fsdp_status (*place)(void *state, size_t tensor, fsdp_source_chunk *chunk, int64_t *strides,
                         fsdp_error *err);
    /* FSDP_ERR_LIMIT when read would need more memory than the source may have. NULL: never. */
    fsdp_status (*check_memory)(void *state, size_t tensor, fsdp_error *err);
    /* Checks of the format's own, counted behind those of the source. Both NULL: none. */
    size_t (*check_count)(void *state);
    fsdp_status (*check)(void *state, size_t number, fsdp_source_reader *reader, fsdp_error *err);
    /* As fsdp_source_save_value, for values without a blob. NULL: cannot. */
    fsdp_status (*save_value)(void *state, size_t entry, size_t most, fsdp_text *out, fsdp_error *err);
    void (*close)(void *state);    /* may be NULL */
} fsdp_source_ops;

fsdp_status fsdp_source_create(fsdp_io *io, const char *path, const char *format, fsdp_source **source_out,
                               fsdp_error *err);
/* state is closed with the source. */
void fsdp_source_set_ops(fsdp_source *source, const fsdp_source_ops *ops, void *state);

/*
 * The file must be a regular one, and one that is replaced while it is read is noticed. The same path gives
 * the same number. beneath: the path is the source's own and '/' and a name that came out of a file; the
 * name must be a clean relative one, and no symbolic link may lead out of the directory, but for the links
 * of a Hugging Face cache (snapshots/R/NAME -> blobs/X).
 */
fsdp_status fsdp_source_add_file(fsdp_source *source, const char *path, bool beneath, int *number_out,
                                 fsdp_error *err);
fsdp_io *fsdp_source_io(const fsdp_source *source);
/* For the format's own headers. */
fsdp_status fsdp_source_pread(const fsdp_source *source, int file, void *data, size_t size, int64_t offset,
                              fsdp_error *err);

/* The stream must lie in the file. FSDP_ERR_REFUSED when it is over 4 GiB and over 1,000 times what is
 * stored. With size -1 it is decoded once. */
fsdp_status fsdp_source_add_stream(fsdp_source *source, const fsdp_source_stream *stream, int *number_out,
                                   fsdp_error *err);
int64_t fsdp_source_stream_size(const fsdp_source *source, int stream);
/* For headers in a stream. The range must lie in it. */
fsdp_status fsdp_source_stream_pread(fsdp_source *source, int stream, void *data, size_t size, int64_t offset,
                                     fsdp_error *err);

/* A range of a file with its CRC-32; `what` is for messages ("record 'data/0'") and is copied. */
fsdp_status fsdp_source_add_crc(fsdp_source *source, const char *what, int file, int64_t offset, int64_t size,
                                uint32_t crc, fsdp_error *err);

/* Bytes of all names and their paths together: a long key that stands before many short ones would be copied
 * for each. */
enum { FSDP_SOURCE_NAMES = 256 << 20 };

/* About so many tensors and chunks will be added: room for them is made at once, as far as there is memory.
 * Only what the file holds may be counted. */
void fsdp_source_expect(fsdp_source *source, size_t tensors, size_t chunks);

/*
 * Names are copied; they must be UTF-8 (FSDP_ERR_REFUSED). Over FSDP_SOURCE_NAMES bytes of them are
 * FSDP_ERR_LIMIT. A second entry of the same name becomes
 * "NAME#2", the next "NAME#3", ... A shape is checked (fsdp_shape_check);
 * More than FSDP_MAX_DIMS dims is FSDP_ERR_LIMIT.
 */
fsdp_status fsdp_source_add_tensor(fsdp_source *source, const char *name, size_t name_size, fsdp_dtype dtype,
                                   int ndim, const int64_t *shape, size_t *tensor_out, fsdp_error *err);
/* How the names of tensors and values are nested that are added from now on (name_path.h); a name of which
 * it is not the path has none. Borrowed; count 0: not at all. */
void fsdp_source_nest(fsdp_source *source, const int32_t *path, size_t count);
/* Another name of a tensor, which is not there yet. No tensor and no value is added afterwards. */
fsdp_status fsdp_source_add_alias(fsdp_source *source, const char *name, size_t name_size, size_t tensor,
                                  fsdp_error *err);
/* Is there an entry of that name? */
bool fsdp_source_has(const fsdp_source *source, const char *name, size_t name_size);
/* A tensor inside a value. */
fsdp_status fsdp_source_add_inner(fsdp_source *source, fsdp_dtype dtype, int ndim, const int64_t *shape,
                                  size_t *tensor_out, fsdp_error *err);

/* Copies the chunk. Its box must lie in the tensor, and every element of it in the file or stream. */
fsdp_status fsdp_source_add_chunk(fsdp_source *source, size_t tensor, const fsdp_source_chunk *chunk,
                                  fsdp_error *err);

/* Takes what value holds, and leaves null. blob NULL: none. */
fsdp_status fsdp_source_add_value(fsdp_source *source, const char *name, size_t name_size, fsdp_value *value,
                                  const fsdp_source_blob *blob, fsdp_error *err);

/* Adds a member of the listing (a JSON text that is copied). */
fsdp_status fsdp_source_add_extra(fsdp_source *source, const char *member, const char *json, size_t size,
                                  fsdp_error *err);

/* --- what is not there */

/* How the source is opened. Zero-initialised, or NULL: in the format that bids most, and whole. */
typedef struct fsdp_source_opts {
    const char *format;        /* a name of fsdp_source_format_name: no other is tried */
    /* An entry of this name may be incomplete, since a file of it is not there. NULL: none may. */
    bool (*may_lack)(void *user, const char *name, size_t size);
    void *user;
} fsdp_source_opts;

/* For formats, before the first file is added: opts of the probe, or NULL. */
void fsdp_source_tolerate(fsdp_source *source, const fsdp_source_opts *opts);
/* May a file be missing? What it holds is then not added, or added to the missing. */
bool fsdp_source_tolerates(const fsdp_source *source);
/* An entry that has not all of its files, and is not added. FSDP_ERR_DAMAGED when it may not lack any; `file`
 * for that message, or NULL. */
fsdp_status fsdp_source_add_missing(fsdp_source *source, const char *name, size_t name_size, const char *file,
                                    fsdp_error *err);
/* Behind a message about what is missing: what to do. */
#define FSDP_MISSING_HINT "; fsdp-convert --allow-missing REGEX takes what is whole"

/*
 * The catalog is complete. FSDP_ERR_DAMAGED when the chunks of a tensor do not cover it exactly once
 * (naming it and what lacks); FSDP_ERR_REFUSED when a tensor of over 4 GiB is also over 1,000 times what
 * is stored of it.
 */
fsdp_status fsdp_source_seal(fsdp_source *source, fsdp_error *err);

/* --- formats ---------------------------------------------------------------------------------- */

enum { FSDP_PROBE_BYTES = 4096 };

/* What a format looks at before it bids. */
typedef struct fsdp_probe {
    fsdp_io *io;
    const char *path;
    bool is_directory;
    bool is_pattern;           /* no path but a pattern of rank files: names are those of its directory */
    int64_t size;              /* of a file */
    const uint8_t *head;       /* of a file: its first bytes */
    size_t head_size;
    const char *const *names;  /* of a directory: what it holds, sorted */
    size_t name_count;
    const fsdp_source_opts *opts;      /* NULL: defaults */
} fsdp_probe;

/*
 * A foreign format, one per file or small folder in formats/. A bid is the number of bits that were
 * verified, 0 for "not mine"; the highest bid wins. Bids look at bytes, never at a name alone.
 */
typedef struct fsdp_foreign_format {
    const char *name;
    int (*bid)(const fsdp_probe *probe);
    fsdp_status (*open)(const fsdp_probe *probe, fsdp_source **source_out, fsdp_error *err);
} fsdp_foreign_format;

/* True when the directory of the probe holds the name. */
bool fsdp_probe_has(const fsdp_probe *probe, const char *name);

/* Formats that read in a child process hold it back by resource limits only: for kernels without better. */
void fsdp_source_limit_only(void);

/* NAME-00002-of-00003.safetensors: number 2 of 3 files. False for other names. */
bool fsdp_source_is_part(const char *path, int *number_out, int *count_out);

/* The last part of the path holds "{r}": where no such file is, it stands for a set of files, one a rank. */
bool fsdp_source_is_pattern(const char *path);

/* Names that opts->format takes, as fsdp_source_format gives them, and "hf"; NULL behind the last. */
const char *fsdp_source_format_name(size_t i);

/* Opens a path in the format that bids most, or the rank files of a pattern. FSDP_ERR_NOT_FOUND "... is in
 * no format that is known: ..." opts may be NULL. */
fsdp_status fsdp_source_open(fsdp_io *io, const char *path, const fsdp_source_opts *opts,
                             fsdp_source **source_out, fsdp_error *err);

#endif
