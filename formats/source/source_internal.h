/*
 * The private state of a source, shared by source.c (builder), source_file.c (open files),
 * source_complete.c (coverage), source_stream.c (compressed bytes, checksums) and source_read.c (boxes).
 */
#ifndef FSDP_SOURCE_INTERNAL_H
#define FSDP_SOURCE_INTERNAL_H

#include "base/io/io_note.h"
#include "base/data/name_table.h"
#include "formats/source.h"

#include <pthread.h>
#include <stdatomic.h>

enum { FSDP_NAME_SHOWN = 200 };           /* buffer for a name in a message */

#define FSDP_SOURCE_LARGE ((int64_t)4 << 30)   /* smaller tensors may be any multiple of their stored bytes */
enum { FSDP_SOURCE_RATIO = 1000 };

typedef struct source_file {
    const char *path;
    fsdp_file_info info;
    fsdp_file *file;           /* NULL while it is closed to save descriptors */
    int pins;                  /* threads that read it now */
    bool was_used;             /* since the last search for a file to close */
    bool is_beneath;
    const char *code[FSDP_SOURCE_CODE];
} source_file;

/* The order of a tensor's chunks: they are sorted by their lower bound in `dim`, so that a box finds the
 * chunks it overlaps. */
typedef struct chunk_order {
    int dim;
    int64_t longest;           /* longest chunk in that dim */
} chunk_order;

typedef struct missing_entry {
    const char *name;
    size_t size;
} missing_entry;

typedef struct packed_stream packed_stream;

struct fsdp_source {
    fsdp_io *io;
    char *path;
    const char *format;
    fsdp_source_ops ops;
    void *state;
    bool is_complete;

    fsdp_arena arena;
    const int32_t *nesting;    /* nesting of the names added now, borrowed */
    size_t nesting_count;
    fsdp_source_entry *entries;
    size_t entry_count, entry_room;
    fsdp_source_tensor *tensors;
    size_t tensor_count, tensor_room;
    source_file *files;
    size_t file_count, file_room;
    int64_t rounded_count;     /* weights that fsdp_source_count_rounded counted */
    size_t noted_count;        /* files that the format did not add; they are never opened */
    packed_stream **streams;
    size_t stream_count, stream_room;
    fsdp_source_crc *checks;
    size_t check_count, check_room;
    atomic_llong checked_bytes;        /* of them, of streams, and of what formats check themselves */
    fsdp_source_chunk *chunks; /* in the order of arrival; once complete: sorted by tensor */
    size_t chunk_count, chunk_room;
    size_t *chunk_tensors;     /* the tensor of each chunk; NULL once complete */
    size_t chunk_tensor_room;
    chunk_order *orders;       /* once complete: one per tensor */
    struct { const char *member, *json; } *extras;
    size_t extra_count, extra_room;
    fsdp_name_table names, paths;
    size_t name_bytes;         /* bytes of all names and paths */
    fsdp_source_opts tolerance;
    missing_entry *missing;
    size_t missing_count, missing_room;

    pthread_mutex_t lock;      /* guards open files and the memory for streams */
    size_t open_count;
    int64_t stream_memory, stream_used;
    uint64_t stream_turn;
    char *spool_directory;
};

/* --- source_file.c --- */

/* Opens the file if necessary and keeps it open until it is unpinned. */
fsdp_status fsdp_source_pin(fsdp_source *source, int file, fsdp_file **file_out, fsdp_error *err);
void fsdp_source_unpin(fsdp_source *source, int file);
void fsdp_source_close_files(fsdp_source *source);
/* Adds files that were read through the notes during the open and that the source does not list yet; the
 * source reads without notes afterwards. */
fsdp_status fsdp_source_take_notes(fsdp_source *source, const fsdp_io_note *note, fsdp_error *err);

/* Adds a file of another source, which is opened when it is read; is_noted: never. A path that was added gets
 * its old number. */
fsdp_status fsdp_source_take_file(fsdp_source *source, const source_file *from, bool is_noted,
                                  int *number_out, fsdp_error *err);

/* --- source.c --- */

/* Makes a tensor that was added as an inner one an entry. */
fsdp_status fsdp_source_name_tensor(fsdp_source *source, size_t tensor, const char *name, size_t size,
                                    fsdp_error *err);

/* --- source_complete.c --- */

/* "[0:4, 2:8]" */
const char *fsdp_box_text(int ndim, const int64_t *lo, const int64_t *len, char *out, size_t room);
/* The name of a tensor for messages. */
const char *fsdp_tensor_text(const fsdp_source_tensor *tensor, char *out, size_t room);

/* --- source_stream.c --- */

/* Allocates the reader's buffer unless it has one. */
fsdp_status fsdp_reader_prepare(fsdp_source_reader *reader, fsdp_error *err);
const fsdp_source_stream *fsdp_source_stream_at(const fsdp_source *source, size_t stream);
void fsdp_packed_free(packed_stream *stream);   /* the struct belongs to the arena */

#endif
