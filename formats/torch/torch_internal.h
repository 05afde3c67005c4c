/*
 * Room torch: torch.save files (zip and legacy), sharded directories of them, and the parts of PyTorch's
 * formats that ranks and dcp share. This header is the readers' side, torch_emit.h the writers'.
 *
 * In: files whose bytes may be hostile, or the entries of a target. Out: the catalog of a source
 * (source.h), or one torch.save file.
 *
 *   bytes -> torch_zip.c or torch_read.c (an archive: a pickle and its storages)
 *         -> torch_storage.c (persistent ids: the place of each storage)   torch_code.c (code that it holds)
 *         -> torch_tensor.c (nodes that are tensors)   torch_numpy.c (arrays, scalars)
 *         -> torch_compare.c (two tensors that should be one)
 *         -> torch_names.c (the walk that names entries, and their values; torch_keys.c: keys of dicts)
 *         -> torch_dist.c (DTensor, ShardedTensor)
 *         -> torch_read.c (the format: bid, open, index) -> the builder of the source
 *
 *   entries -> torch_write.c (the target "torch": nested dicts) -> torch_emit.c (records)
 *
 *   values as torch.save bytes: torch_resave.c and torch_blob.c write them, torch_blob.c opens them
 *
 * Callers: detect (the tables of formats), ranks and dcp. The room calls pickle, zip, source and target.
 */
#ifndef FSDP_TORCH_INTERNAL_H
#define FSDP_TORCH_INTERNAL_H

#include "formats/pickle/pickle.h"
#include "formats/source.h"

/* The place of a storage's bytes. */
typedef struct torch_storage {
    int file;                  /* -1: no bytes (location "meta") */
    int stream;                /* FSDP_NO_STREAM: plain bytes in the file */
    int64_t offset, size;      /* in the file or stream, in bytes */
    bool has_crc;
    uint32_t crc;              /* CRC of those bytes */
    fsdp_dtype dtype;          /* from its class; FSDP_DTYPE_NONE: quantized; FSDP_U8: untyped */
} torch_storage;

/* A resolved persistent id of the pickle. */
typedef struct torch_link {
    fsdp_node node;
    torch_storage storage;
} torch_link;

/* Decoded arrays; they belong to the state of the source. */
typedef struct torch_memory torch_memory;

/* One torch.save file, or an item of DCP. */
typedef struct torch_archive {
    fsdp_source *source;
    const char *where;         /* "'PATH'", for messages */
    fsdp_pickle pickle;
    char *data;                /* the bytes of the pickle */
    int file;
    int64_t data_offset;       /* their offset in the file; -1: they are compressed there */
    bool is_swapped;           /* big-endian storages */
    torch_link *links;         /* sorted by node */
    size_t link_count;
    torch_memory *memory;
    int64_t work;              /* nodes visited */
    uint8_t *marks;            /* per node, used by the walk */
    uint32_t *sizes;           /* per node: objects in it, shared ones each time; 0: not counted yet */
    bool has_elements;         /* the walk found a tensor with elements */
    fsdp_node subject;         /* the node entered, or read as a value, last: a value that the walk reports
                                * comes from it */
} torch_archive;

static inline const fsdp_pickle_node *torch_node(const torch_archive *archive, fsdp_node node)
{
    return fsdp_pickle_at(&archive->pickle, node);
}

/* Element `number` of a tuple or list; 0 when there is none. */
static inline fsdp_node torch_element(const torch_archive *archive, fsdp_node tuple, size_t number)
{
    return fsdp_pickle_element(&archive->pickle, tuple, number);
}

/* --- torch_zip.c, torch_read.c --- */

typedef struct torch_opening {
    fsdp_source *source;
    torch_memory *memory;      /* belongs to that source */
    int file;
    int stream;                /* FSDP_NO_STREAM, or the stream of a compressed zip */
    const char *where;         /* "'PATH'"; must outlive the archive */
} torch_opening;

/* Opens a range of a file that is a torch.save zip. checks: its checksums are added to those of the
 * source. *archive_out is empty on failure. */
fsdp_status torch_zip_open(const torch_opening *opening, int64_t offset, int64_t size, bool checks,
                           torch_archive *archive_out, fsdp_error *err);
bool torch_legacy_begins(const uint8_t *head, size_t size);
void torch_archive_release(torch_archive *archive);

/* --- torch_code.c --- */

/* Notes the objects of a pickle of the file that run code when Python loads them. */
fsdp_status torch_note_code(const torch_opening *opening, const fsdp_pickle *pickle, fsdp_error *err);

/* Opens either form, which the first bytes distinguish. */
fsdp_status torch_file_open(const torch_opening *opening, torch_archive *archive_out, fsdp_error *err);

/* --- torch_storage.c --- */

typedef struct torch_storage_id {
    fsdp_node node;
    const char *key;
    size_t key_size;
    bool is_meta;
    int64_t elements;
    fsdp_node view;            /* legacy: the sixth member, 0 without one */
    torch_storage storage;     /* its dtype is set */
    size_t element_size;       /* 0: unknown */
} torch_storage_id;

/* Reads ("storage", class, key, location, elements); any other id is refused. */
fsdp_status torch_read_storage_id(const torch_archive *archive, fsdp_node persistent,
                                  torch_storage_id *id_out, fsdp_error *err);
/* Makes the table of links; place fills in the place of each storage. */
fsdp_status torch_resolve_links(torch_archive *archive,
                                fsdp_status (*place)(void *context, const torch_storage_id *id,
                                                     torch_storage *storage, fsdp_error *err),
                                void *context, fsdp_error *err);

/* Tensors whose bytes are in memory: their chunks have file -1. One table per source. */
fsdp_status torch_memory_create(torch_memory **memory_out, fsdp_error *err);
/* Takes the row-major little-endian bytes of a tensor. Tensors arrive in rising order. */
fsdp_status torch_memory_keep(torch_memory *memory, size_t tensor, char *data, fsdp_error *err);
fsdp_status torch_memory_read(const torch_memory *memory, const fsdp_source *source, size_t tensor,
                              const fsdp_box *box, void *data, fsdp_error *err);
void torch_memory_close(torch_memory *memory);         /* accepts NULL */

/* --- torch_tensor.c --- */

typedef struct torch_tensor {
    fsdp_dtype dtype;
    int ndim;
    int64_t shape[FSDP_MAX_DIMS], strides[FSDP_MAX_DIMS];   /* strides in bytes */
    torch_storage storage;
    int64_t offset;            /* offset of its first element in the file or stream */
    unsigned fix;
    char *data;                /* a decoded array in its final form, or NULL */
} torch_tensor;

typedef enum torch_kind {
    TORCH_KIND_NONE,           /* not a tensor */
    TORCH_KIND_TENSOR,
    TORCH_KIND_OPAQUE,         /* a tensor listed by its kind only: sparse, quantized, meta */
    TORCH_KIND_WRAPPER         /* a subclass without bytes: DTensor, ShardedTensor, others */
} torch_kind;

/* A subclass: its class and its state. */
typedef struct torch_wrapper {
    fsdp_known known;          /* FSDP_KNOWN_DTENSOR, FSDP_KNOWN_SHARDED_TENSOR, other */
    fsdp_node type, args, state;
} torch_wrapper;

/* Reads a tensor through Parameters and subclasses. Its offsets are checked against its storage. */
fsdp_status torch_tensor_read(const torch_archive *archive, fsdp_node node, torch_kind *kind_out,
                              torch_tensor *tensor_out, torch_wrapper *wrapper_out, fsdp_error *err);
/* The kind of a node, found without reading the tensor. */
torch_kind torch_tensor_kind(const torch_archive *archive, fsdp_node node);
void torch_tensor_release(torch_tensor *tensor);

/* The chunk of a tensor at lo of a larger one. It borrows from tensor and lo. */
void torch_tensor_chunk(const torch_tensor *tensor, const int64_t *lo, fsdp_source_chunk *chunk_out);
/* Adds the tensor to the source, with name NULL as an inner one. Takes the data of tensor. */
fsdp_status torch_tensor_add(torch_archive *archive, const char *name, size_t name_size, torch_tensor *tensor,
                             size_t *number_out, fsdp_error *err);

/* --- torch_compare.c --- */

enum { TORCH_REPLICA = 64 << 10 };   /* bytes by which copies of one tensor are compared */

/* Reads bytes relative to the tensor's first element, from file, stream or memory. */
fsdp_status torch_tensor_pread(fsdp_source *source, const torch_tensor *tensor, int64_t offset, void *data,
                               size_t size, fsdp_error *err);
/* Bytes from the first one of the tensor to the last one. */
int64_t torch_tensor_span(const torch_tensor *tensor);
/* Compares dtype, shape and the first `most` bytes of two tensors; INT64_MAX: all of them. */
fsdp_status torch_same_elements(fsdp_source *source, const torch_tensor *a, const torch_tensor *b,
                                int64_t most, bool *same_out, fsdp_error *err);

/* --- torch_tensor.c --- */

/* fsdp_shape_check for a shape from a file: FSDP_ERR_DAMAGED. */
fsdp_status torch_check_shape(const torch_archive *archive, int ndim, const int64_t *shape, fsdp_dtype dtype,
                              fsdp_error *err);
/* Reads a tuple, list or torch.Size of ints. FSDP_ERR_DAMAGED "... NAME is not a list of numbers" */
fsdp_status torch_read_sizes(const torch_archive *archive, fsdp_node node, const char *what, int *count_out,
                             int64_t *sizes_out, fsdp_error *err);

/* True for dict, OrderedDict, defaultdict, Counter. */
bool torch_is_dict(const torch_archive *archive, fsdp_node node);
/* Its keys and values: a DICT node, or 0 for none. */
fsdp_node torch_dict_items(const torch_archive *archive, fsdp_node node);

/* An attribute of an object, from its state or its slots; 0 without one. */
fsdp_node torch_attribute(const torch_archive *archive, fsdp_node object, const char *name);
/* An attribute from a state. */
fsdp_node torch_state_attribute(const torch_archive *archive, fsdp_node state, const char *name);
/* The name of an object's class without its module; "" when the node is not an object. */
const char *torch_class_name(const torch_archive *archive, fsdp_node object);

/* Counts visited nodes, shared ones each time. FSDP_ERR_LIMIT beyond FSDP_PICKLE_WORK. */
fsdp_status torch_count_work(torch_archive *archive, int64_t count, fsdp_error *err);

/* --- torch_numpy.c --- */

bool torch_numpy_is_array(const torch_archive *archive, fsdp_node node);
/* True for an array whose elements are numbers. */
bool torch_numpy_is_numeric(const torch_archive *archive, fsdp_node node);
fsdp_status torch_numpy_read(const torch_archive *archive, fsdp_node node, torch_tensor *tensor_out,
                             fsdp_error *err);
/* False when the node is not a numeric scalar. */
bool torch_numpy_scalar(const torch_archive *archive, fsdp_node node, fsdp_value *value_out);
/* FSDP_DTYPE_NONE when it is not a scalar. */
fsdp_dtype torch_numpy_scalar_dtype(const torch_archive *archive, fsdp_node node);
/* The bytes of BYTES, BYTEARRAY, or the calls that protocol 2 writes for them. *owned_out is freed with
 * fsdp_free (NULL: they lie in the pickle). False for other nodes, or without memory. */
bool torch_bytes(const torch_archive *archive, fsdp_node node, const char **data_out, size_t *size_out,
                 char **owned_out);

/* --- torch_names.c: values --- */

enum {
    TORCH_MARK_PATH = 1, TORCH_MARK_PLAIN = 2, TORCH_MARK_FULL = 4, TORCH_MARK_SEEN = 8, TORCH_MARK_KEPT = 16
};

/* Reads any node as a value; tensors in it become inner ones of the source. */
fsdp_status torch_value_read(torch_archive *archive, fsdp_node node, fsdp_value *value_out, fsdp_error *err);

/* --- torch_names.c: names --- */

/* A named part of an archive. */
typedef struct torch_item {
    torch_archive *archive;
    const char *name;
    size_t name_size;
    fsdp_node node;            /* 0: its parts follow under their own names */
} torch_item;

/* Receives the findings of a walk in place of the source: for rank files, where they are parts of wholes. */
typedef struct torch_visitor {
    void *context;
    /* A tensor. The visitor takes the data of a decoded one. */
    fsdp_status (*tensor)(void *context, const torch_item *item, torch_tensor *tensor, fsdp_error *err);
    /* A DTensor or ShardedTensor. */
    fsdp_status (*distributed)(void *context, const torch_item *item, const torch_wrapper *wrapper,
                               fsdp_error *err);
    /* Called before the parts of an object are visited; *taken_out true: they are not. NULL: they are. */
    fsdp_status (*object)(void *context, const torch_item *item, bool *taken_out, fsdp_error *err);
    /* Any other entry; the visitor takes the contents of value. */
    fsdp_status (*value)(void *context, const torch_item *item, fsdp_value *value, fsdp_error *err);
} torch_visitor;

/* Names every part of the archive and adds it to the source, or passes it to the visitor (may be NULL). */
fsdp_status torch_walk(torch_archive *archive, const torch_visitor *visitor, fsdp_error *err);
/* Appends Python's str(key). */
void torch_add_key(const torch_archive *archive, fsdp_node key, fsdp_text *text);

/* --- torch_dist.c --- */

/* FSDP_ERR_REFUSED when a placement of the DTensor is Partial: its pieces are not yet summed up. */
fsdp_status torch_dist_check_partial(const torch_archive *archive, const char *name, size_t name_size,
                                     const torch_wrapper *wrapper, fsdp_error *err);

/* Adds a DTensor or ShardedTensor that is whole in this file; FSDP_ERR_DAMAGED when it is a part. */
fsdp_status torch_dist_add(torch_archive *archive, const char *name, size_t name_size,
                           const torch_wrapper *wrapper, fsdp_error *err);

#endif
