/*
 * Room source: a checkpoint of another program as a catalog of named typed arrays and values. This header
 * is what statedict and the format rooms see of it.
 *
 * In: the path of a checkpoint, whose bytes may be hostile. Out: fsdp_source, a catalog of entries (names,
 * shapes, dtypes, values) and a function that reads any box of a tensor.
 *
 *   probe (detect/detect.c) finds the format  ->  the format's open fills the catalog through the builder
 *   below  ->  fsdp_source_complete checks it as a whole  ->  fsdp_source_read reads boxes of tensors
 *
 *   source.c           the builder: checks every name, shape and offset that a format adds
 *   source_complete.c  sorts chunks by tensor and checks that they cover each tensor exactly once; has the
 *                      entries that --allow-missing accepts as incomplete
 *   source_file.c      files of the checkpoint, opened and closed so that descriptors do not run out
 *   source_read.c      boxes out of strided chunks, byte order and signs
 *   source_stream.c    compressed streams (deflate, zstd), and which of them get a spool file
 *   source_join.c      one source of several, such as a model and its optimizer
 *   rank_names.c       file names of rank files; escaped_names.c: true names of escaped ones
 *
 * A tensor consists of *chunks*: boxes of it, each with the place of its bytes. Most formats keep plain
 * bytes; a chunk is then a strided view into a file, and reading does not call the format any more.
 * Compressed bytes (deflate, zstd) lie in a *stream*, which is decoded from its beginning. A format with
 * storage of another kind (HDF5) supplies a read function.
 *
 * Callers of the builder: the rooms of formats that are read. Callers of the catalog and of reading:
 * statedict and torch (values as torch.save files). Several threads may read a completed source at once.
 */
#ifndef FSDP_SOURCE_H
#define FSDP_SOURCE_H

#include "base/io/io.h"
#include "base/core/mem.h"
#include <fsdp/box.h>
#include <fsdp/dtype.h>
#include <fsdp/format.h>
#include "base/text.h"
#include <fsdp/value.h>

typedef struct fsdp_source fsdp_source;

/* --- the catalog ------------------------------------------------------------------------------ */

enum { FSDP_NO_STREAM = -1 };

/* Repairs that stored elements need: bits. */
enum {
    FSDP_FIX_SWAP = 1,         /* swap bytes (of each half of a complex number) */
    FSDP_FIX_CONJUGATE = 2,
    FSDP_FIX_NEGATE = 4
};

typedef struct fsdp_source_chunk {
    const int64_t *lo, *len;   /* its box in the tensor; the builder copies it into the catalog */
    const int64_t *strides;    /* in bytes; 0 repeats an element, negative goes backwards; NULL: row-major */
    int64_t offset;            /* offset of its first element, in the file or in the decoded stream */
    int file;                  /* number in the catalog; -1: the read function of the format reads it */
    int origin;                /* for file -1: the file that holds the bytes nevertheless */
    int stream;                /* FSDP_NO_STREAM: the bytes of the file are the bytes of the elements */
    unsigned fix;
} fsdp_source_chunk;

typedef struct fsdp_source_tensor {
    const char *name;          /* zero-terminated after its end, may hold NUL */
    size_t name_size;
    fsdp_dtype dtype;
    int ndim;
    const int64_t *shape;
    bool is_inner;             /* only inside a value (FSDP_VALUE_TENSOR): it has no name */
    bool is_missing;           /* incomplete, as fsdp_source_opts allows; it must not be read */
    const fsdp_source_chunk *chunks;   /* completed source: they cover the tensor exactly once */
    size_t chunk_count;
} fsdp_source_tensor;

typedef enum fsdp_packing { FSDP_PACKING_DEFLATE, FSDP_PACKING_ZSTD } fsdp_packing;

/* Compressed bytes, which must be decoded from their beginning. */
typedef struct fsdp_source_stream {
    int file;
    fsdp_packing packing;
    int64_t offset, stored;    /* in the file */
    int64_t size;              /* decoded, checked; -1: not known, the builder decodes it once */
    bool has_crc;
    uint32_t crc;              /* CRC-32 of the decoded bytes */
} fsdp_source_stream;

/* A range of a file that holds a value as its writer encoded it, to be copied as it is. */
typedef struct fsdp_source_blob {
    int file;                  /* -1: no blob */
    int64_t offset, size;
} fsdp_source_blob;

/* Entries in the order of the source: a tensor (by number) or a value. */
typedef struct fsdp_source_entry {
    bool is_tensor;
    bool is_alias;             /* a second name of a tensor; aliases follow all other entries */
    size_t tensor;
    const char *name;
    size_t name_size;
    const fsdp_value *value;
    fsdp_source_blob blob;
    const int32_t *path;       /* how its name is nested (name_path.h); NULL: flat */
    size_t path_count;
} fsdp_source_entry;

size_t fsdp_source_entry_count(const fsdp_source *source);
const fsdp_source_entry *fsdp_source_entry_at(const fsdp_source *source, size_t number);
size_t fsdp_source_tensor_count(const fsdp_source *source);      /* inner ones included */
const fsdp_source_tensor *fsdp_source_tensor_at(const fsdp_source *source, size_t number);
const char *fsdp_source_format(const fsdp_source *source);       /* "safetensors", "dcp", "torch", ... */
const char *fsdp_source_path(const fsdp_source *source);
/* Counts the weights of which the files have rounded copies alone. */
int64_t fsdp_source_rounded_count(const fsdp_source *source);
size_t fsdp_source_file_count(const fsdp_source *source);
const char *fsdp_source_file_path(const fsdp_source *source, size_t number);
int64_t fsdp_source_file_size(const fsdp_source *source, size_t number);
/* Returns the state of the file when the source opened it. */
const fsdp_file_info *fsdp_source_file_info(const fsdp_source *source, size_t number);
/* FSDP_ERR_DAMAGED when info, which another open of the file returned, belongs to a different or a changed
 * file. */
fsdp_status fsdp_source_file_compare(const fsdp_source *source, size_t number, const fsdp_file_info *now,
                                     fsdp_error *err);
/* Counts the files that hold tensors and values; they come first. Files that were read only to
 * understand the checkpoint (metadata, an index) follow. */
size_t fsdp_source_content_count(const fsdp_source *source);

/* Returns a class or function that a program runs when it loads the file: a printable name, at most
 * FSDP_SOURCE_CODE of each file. NULL after the last. */
enum { FSDP_SOURCE_CODE = 4 };
const char *fsdp_source_code_at(const fsdp_source *source, size_t file, size_t number);

/* Returns a member of the listing that is neither a tensor nor a value, as a JSON text, or NULL: "metadata"
 * of safetensors, "attributes" of HDF5. "carried" is the metadata that stays true in other files,
 * "contradicting" has keys of that with the files whose texts differ (safetensors_read.c). */
const char *fsdp_source_extra(const fsdp_source *source, const char *member);

/* Counts the incomplete entries, and those of which only the name is known, that may_lack allowed. */
size_t fsdp_source_missing_count(const fsdp_source *source);
const char *fsdp_source_missing_at(const fsdp_source *source, size_t number, size_t *size_out);

/* --- reading ---------------------------------------------------------------------------------- */

/* Buffers of one reading thread; zero-initialise. */
typedef struct fsdp_source_reader {
    void *buf;
    size_t size;
    int64_t bytes_read;
    /* Called by fsdp_source_check after each piece; an error ends the check. NULL: not called. */
    fsdp_status (*count)(void *context, int64_t bytes, const char *what, fsdp_error *err);
    void *context;
} fsdp_source_reader;
void fsdp_source_reader_release(fsdp_source_reader *reader);
/* For formats: counts bytes that a check has read. reader may be NULL. */
fsdp_status fsdp_reader_count(fsdp_source_reader *reader, int64_t bytes, const char *what, fsdp_error *err);

/* Fills a box of a tensor, packed row-major, little-endian, with all repairs done. */
fsdp_status fsdp_source_read(fsdp_source *source, size_t tensor, const fsdp_box *box, void *data,
                             fsdp_source_reader *reader, fsdp_error *err);

/*
 * Sets the memory for all decoded streams together. A stream over a quarter of it keeps only the part
 * decoded last, which is enough for reading forwards; a stream that is read back and forth nevertheless is
 * spooled into an unnamed file in `directory` (NULL: $TMPDIR or /tmp). Call before the first read.
 */
void fsdp_source_set_memory(fsdp_source *source, int64_t memory, const char *directory);
int64_t fsdp_source_memory(const fsdp_source *source);

/*
 * Announces that the tensor will be read whole, in row-major order (source_stream.c). `repeated`: more than
 * once, or in parts that are not runs of that order. Streams that this would decode many times over are
 * spooled when they are first read. FSDP_ERR_LIMIT when it takes more memory than there may be. Call after
 * fsdp_source_set_memory and before the first read.
 */
fsdp_status fsdp_source_announce(fsdp_source *source, size_t tensor, bool repeated, fsdp_error *err);
/* Returns how many threads may read at once so that each finds the bytes it decoded of its stream, and how
 * many bytes they together may lag the foremost one. INT_MAX and INT64_MAX where no stream is
 * larger than that. */
void fsdp_source_reading_limits(const fsdp_source *source, int *threads_out, int64_t *bytes_out);
/* Returns the bytes that the announced reads put into spool files. */
int64_t fsdp_source_spool_bytes(const fsdp_source *source);

/* Count and check the checksums that the format itself keeps (records of a zip, decoded streams); reading
 * does not check those of plain bytes. FSDP_ERR_DAMAGED names the record. Several threads may check different
 * numbers at once. */
size_t fsdp_source_check_count(const fsdp_source *source);
/* Returns the bytes that readers count when all checks are made, at most FSDP_SOURCE_CHECK_MOST: ranges of a
 * hostile file may overlap. */
#define FSDP_SOURCE_CHECK_MOST (INT64_MAX / 4)
int64_t fsdp_source_check_bytes(const fsdp_source *source);
fsdp_status fsdp_source_check(fsdp_source *source, size_t number, fsdp_source_reader *reader,
                              fsdp_error *err);

void fsdp_source_close(fsdp_source *source);          /* accepts NULL */

/*
 * Encodes an entry that is a value as torch.save does: the bytes that its writer stored, its part of a
 * larger pickle, or a new encoding that includes its tensors, which are read now. out stays empty where no
 * encoding is possible, or where it takes more than `most` bytes. One thread.
 */
fsdp_status fsdp_source_save_value(fsdp_source *source, size_t entry, size_t most, fsdp_text *out,
                                   fsdp_error *err);

/* Opens a value as its writer stored it (the bytes of a blob: a torch.save file) from memory: a source of
 * one value, whose name is empty, and its tensors. data is borrowed until the source is closed. */
fsdp_status fsdp_source_open_blob(const void *data, size_t size, fsdp_source **source_out, fsdp_error *err);

/*
 * Adds the names of the classes and functions that PyTorch runs when it loads the blob; none for bytes that
 * are neither a torch.save file nor a pickle. FSDP_ERR_REFUSED: a call that no checkpoint may have.
 */
fsdp_status fsdp_source_blob_code(const void *data, size_t size, fsdp_text *names, fsdp_error *err);

/* --- the builder, for formats ----------------------------------------------------------------- */

/* Functions of a format whose elements are not plain bytes or streams. */
typedef struct fsdp_source_ops {
    /* As fsdp_source_read, for tensors with a chunk whose file is -1. NULL when there are none. */
    fsdp_status (*read)(void *state, size_t tensor, const fsdp_box *box, void *data, fsdp_error *err);
    /* For chunks with file -1 whose bytes are plain, but whose offset is found only by reading: fills in
     * file, stream, offset, fix and strides (capacity for the tensor's dims) of a copy of the chunk, whose
     * offset is the one that add_chunk got. Called repeatedly, and by several threads. NULL: read reads
     * them. The format checks that the place is valid. */
    fsdp_status (*place)(void *state, size_t tensor, fsdp_source_chunk *chunk, int64_t *strides,
                         fsdp_error *err);
    /* With both: true for tensors that read reads. NULL: place is for all of them. */
    bool (*reads)(void *state, size_t tensor);
    /* FSDP_ERR_LIMIT when read would need more memory than the source may use. NULL: never. */
    fsdp_status (*check_memory)(void *state, size_t tensor, fsdp_error *err);
    /* Checks of the format, numbered after those of the source, and the bytes that all of them count.
     * All NULL: none. */
    size_t (*check_count)(void *state);
    int64_t (*check_bytes)(void *state);
    fsdp_status (*check)(void *state, size_t number, fsdp_source_reader *reader, fsdp_error *err);
    int64_t (*checked_bytes)(void *state); /* that the format counts besides the source; NULL: none */
    /* As fsdp_source_save_value, for values without a blob. NULL: not supported. */
    fsdp_status (*save_value)(void *state, size_t entry, size_t most, fsdp_text *out, fsdp_error *err);
    void (*close)(void *state);    /* may be NULL */
} fsdp_source_ops;

fsdp_status fsdp_source_create(fsdp_io *io, const char *path, const char *format, fsdp_source **source_out,
                               fsdp_error *err);
/* The source closes state when it is closed. */
void fsdp_source_set_ops(fsdp_source *source, const fsdp_source_ops *ops, void *state);

/*
 * Adds a regular file; a file that is replaced while it is read is noticed. A path that was added gets its
 * old number. beneath: the path is the directory of the source, '/' and a name that came out of a file; the
 * name must be a clean relative one, and no symbolic link may lead out of the directory, except the links
 * of a Hugging Face cache (snapshots/R/NAME -> blobs/X).
 */
fsdp_status fsdp_source_add_file(fsdp_source *source, const char *path, bool beneath, int *number_out,
                                 fsdp_error *err);
/* As fsdp_io_read_file, for a file that was found in its directory: by the same rule for links. */
fsdp_status fsdp_source_read_file(fsdp_io *io, const char *path, size_t most, char **data_out,
                                  size_t *size_out, fsdp_error *err);
fsdp_io *fsdp_source_io(const fsdp_source *source);
/* Notes a class or function that a program runs when it loads the file. Equal names count once. */
fsdp_status fsdp_source_note_code(fsdp_source *source, int file, const char *name, fsdp_error *err);
/* Counts a weight that is not added, because the files have a rounded copy alone. */
void fsdp_source_count_rounded(fsdp_source *source);
/* Reads headers of the format. */
fsdp_status fsdp_source_pread(const fsdp_source *source, int file, void *data, size_t size, int64_t offset,
                              fsdp_error *err);

/* Adds a stream, which must lie in the file. FSDP_ERR_REFUSED when it is over 4 GiB and over 1,000 times
 * its stored size. A stream of size -1 is decoded once. */
fsdp_status fsdp_source_add_stream(fsdp_source *source, const fsdp_source_stream *stream, int *number_out,
                                   fsdp_error *err);
int64_t fsdp_source_stream_size(const fsdp_source *source, int stream);
/* Reads headers inside a stream. The range must lie in it. */
fsdp_status fsdp_source_stream_pread(fsdp_source *source, int stream, void *data, size_t size, int64_t offset,
                                     fsdp_error *err);

/* A range of a file with its CRC-32. */
typedef struct fsdp_source_crc {
    const char *what;          /* for messages ("record 'data/0'"); add copies it */
    int file;
    int64_t offset, size;
    uint32_t crc;
} fsdp_source_crc;

fsdp_status fsdp_source_add_crc(fsdp_source *source, const fsdp_source_crc *check, fsdp_error *err);

/* Counts bytes of data that a checksum of another kind protects; any thread. */
void fsdp_source_count_checked(fsdp_source *source, int64_t bytes);
/* Returns the bytes of files or streams with checksums; final after all checks. 0: the format has none. */
int64_t fsdp_source_checked_bytes(const fsdp_source *source);

/* Limit for the bytes of all names and their paths together: nesting copies a long key for each short one
 * beneath it. */
enum { FSDP_SOURCE_NAMES = 256 << 20 };

/* Reserves capacity for about so many tensors and chunks, as far as there is memory. The counts must be
 * bounded by the size of the file. */
void fsdp_source_expect(fsdp_source *source, size_t tensors, size_t chunks);

typedef struct fsdp_source_shape { fsdp_dtype dtype; int ndim; const int64_t *shape; } fsdp_source_shape;

/*
 * Adds a tensor and copies its name, which must be UTF-8 (FSDP_ERR_REFUSED). More than FSDP_SOURCE_NAMES
 * bytes of names are FSDP_ERR_LIMIT. A second entry of the same name becomes "NAME#2", the next "NAME#3",
 * ... The shape is checked (fsdp_shape_check); more than FSDP_MAX_DIMS dims are FSDP_ERR_LIMIT.
 */
fsdp_status fsdp_source_add_tensor(fsdp_source *source, const char *name, size_t name_size,
                                   const fsdp_source_shape *shape, size_t *tensor_out, fsdp_error *err);
/* Sets how the names of tensors and values that are added from now on are nested (name_path.h). A name
 * that the path does not spell gets no path. Borrowed; count 0: flat names. */
void fsdp_source_nest(fsdp_source *source, const int32_t *path, size_t count);
const int32_t *fsdp_source_nesting(const fsdp_source *source, size_t *count_out);
/* Adds a new name of a tensor. No tensor and no value may be added afterwards. */
fsdp_status fsdp_source_add_alias(fsdp_source *source, const char *name, size_t name_size, size_t tensor,
                                  fsdp_error *err);
/* Returns true when there is an entry of that name. */
bool fsdp_source_has(const fsdp_source *source, const char *name, size_t name_size);
/* Adds a tensor inside a value. */
fsdp_status fsdp_source_add_inner(fsdp_source *source, fsdp_dtype dtype, int ndim, const int64_t *shape,
                                  size_t *tensor_out, fsdp_error *err);

/* Adds a copy of the chunk. Its box must lie in the tensor, and all its elements in the file or stream. */
fsdp_status fsdp_source_add_chunk(fsdp_source *source, size_t tensor, const fsdp_source_chunk *chunk,
                                  fsdp_error *err);

/* Adds a value and takes over its contents, so that it becomes null. blob NULL: no blob. */
fsdp_status fsdp_source_add_value(fsdp_source *source, const char *name, size_t name_size, fsdp_value *value,
                                  const fsdp_source_blob *blob, fsdp_error *err);

/* Adds a member of the listing (a JSON text that is copied). */
fsdp_status fsdp_source_add_extra(fsdp_source *source, const char *member, const char *json, size_t size,
                                  fsdp_error *err);

/* --- what is missing -------------------------------------------------------------------------- */

/* A model whose tensors have the shapes that the files lack. */
typedef struct fsdp_source_model {
    const char *path;
    /* The shape of the model's tensor of this name; false: it has none. */
    bool (*find)(void *context, const char *name, size_t size, fsdp_source_shape *shape_out);
    /* Called when all names were looked up. FSDP_ERR_DAMAGED: a tensor of the model is not among them. */
    fsdp_status (*check)(void *context, fsdp_error *err);
    void *context;
} fsdp_source_model;

/* Options of an open. Zero-initialised, or NULL: the format with the highest bid, nothing may be missing. */
typedef struct fsdp_source_opts {
    const char *format;        /* of a format that is read: only this one is tried */
    const char *variant;       /* safetensors: of a directory the model NAME.VARIANT; NULL: the plain one */
    /* True when the entry of this name may be incomplete because one of its files is missing. NULL: never. */
    bool (*may_lack)(void *context, const char *name, size_t size);
    void *context;
    bool as_stored;            /* deepspeed: without the entries that PyTorch has per parameter and DeepSpeed
                                * per group */
    int64_t memory;            /* gguf: bytes that arrays of values may take; 0: 256 MiB */
    const char *void_as;       /* npy, npz: dtypes of elements that are bytes without a type, one per size:
                                * "bf16,f8_e4m3fn"; NULL: none */
    const fsdp_source_model *model;    /* ranks: the model that was saved; NULL: not known */
} fsdp_source_opts;

/* Applies opts of the probe (or NULL); formats call it before they add the first file. */
void fsdp_source_tolerate(fsdp_source *source, const fsdp_source_opts *opts);
/* Returns true when files may be missing, whose entries are then omitted, or added as missing. */
bool fsdp_source_tolerates(const fsdp_source *source);
/* Records an entry as missing; it is not added. FSDP_ERR_DAMAGED when the options do not allow that;
 * `file` is for that message, or NULL. */
fsdp_status fsdp_source_add_missing(fsdp_source *source, const char *name, size_t name_size, const char *file,
                                    fsdp_error *err);
/* Follows a message about something missing. */
#define FSDP_MISSING_HINT "; convert the rest with fsdp-convert --allow-missing REGEX"

/*
 * Completes the catalog. FSDP_ERR_DAMAGED when the chunks of a tensor do not cover it exactly once (the
 * message names the tensor and the gap); FSDP_ERR_REFUSED when a tensor of over 4 GiB is also over 1,000
 * times its stored bytes.
 */
fsdp_status fsdp_source_complete(fsdp_source *source, fsdp_error *err);

/* --- formats ---------------------------------------------------------------------------------- */

enum { FSDP_PROBE_BYTES = 4096 };

/* The facts about a path from which a format computes its bid. */
typedef struct fsdp_probe {
    fsdp_io *io;
    const char *path;
    bool is_directory;
    bool is_pattern;           /* the path is a pattern of rank files: names are those of its directory */
    int64_t size;              /* of a file */
    const uint8_t *head;       /* of a file: its first bytes */
    size_t head_size;
    const char *const *names;  /* of a directory: names of its files, sorted */
    size_t name_count;
    const fsdp_source_opts *opts;      /* NULL: defaults */
} fsdp_probe;

/*
 * The functions that read a format. A bid is the number of bits that were verified, 0 for a path of another
 * format; the highest bid wins. Bids look at bytes, never at a name alone.
 */
typedef struct fsdp_format_reader {
    int (*bid)(const fsdp_probe *probe);   /* NULL: only the user names the format */
    fsdp_status (*open)(const fsdp_probe *probe, fsdp_source **source_out, fsdp_error *err);
} fsdp_format_reader;

/* Returns true when the directory of the probe holds the name. */
bool fsdp_probe_has(const fsdp_probe *probe, const char *name);

/* Reads the number and the count of NAME-00002-of-00003.safetensors: 2 and 3. False for other names. */
bool fsdp_source_is_part(const char *path, int *number_out, int *count_out);

/* Returns true when the last part of the path holds "{r}": where no such file exists, it is a pattern for one
 * file per rank. */
bool fsdp_source_is_pattern(const char *path);

/* Opens a path in the format with the highest bid, or the rank files of a pattern. FSDP_ERR_NOT_FOUND "...
 * is not in a known format: ..." opts may be NULL. */
fsdp_status fsdp_source_open(fsdp_io *io, const char *path, const fsdp_source_opts *opts,
                             fsdp_source **source_out, fsdp_error *err);
/* A part of a checkpoint that consists of several, as a framework saves a model and its optimizer. */
typedef struct fsdp_source_part {
    fsdp_source *source;
    const char *key;           /* above its names: "model"; "": none */
    const char *own_key;       /* that its names may have already, which key replaces; NULL: none */
} fsdp_source_part;

/* Joins sources, which it takes over and closes after a failure, too. The format of the first is that of all;
 * path: the directory around them. */
fsdp_status fsdp_source_join(const char *path, const fsdp_source_part *parts, size_t count,
                             const fsdp_source_opts *opts, fsdp_source **source_out, fsdp_error *err);
/* Tells whether the path is of a known format, by its first bytes or its names alone. */
fsdp_status fsdp_source_recognise(fsdp_io *io, const char *path, bool *is_known_out, fsdp_error *err);

#endif
