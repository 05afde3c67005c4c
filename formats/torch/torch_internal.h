/*
 * What the readers of PyTorch's files share: torch.save files (zip and legacy), items of DCP, rank files.
 *
 *   bytes -> torch_zip.c or torch_legacy.c (an archive: a pickle and its storages)
 *         -> torch_tensor.c (nodes that are tensors)   torch_numpy.c (arrays, scalars)
 *         -> torch_names.c (the walk that names everything)   torch_value.c (what stays a value)
 *         -> the builder of the source
 */
#ifndef FSDP_TORCH_INTERNAL_H
#define FSDP_TORCH_INTERNAL_H

#include "formats/pickle/pickle.h"
#include "formats/source.h"

/* Where the bytes of a storage are. */
typedef struct torch_storage {
    int file;                  /* -1: there are no bytes (location "meta") */
    int stream;                /* FSDP_NO_STREAM: plain bytes of the file */
    int64_t offset, size;      /* in the file or stream, in bytes */
    uint32_t crc;              /* of those bytes; 0: none */
    fsdp_dtype dtype;          /* of its class; FSDP_DTYPE_NONE: quantized ones; FSDP_U8: untyped */
} torch_storage;

/* A persistent id of the pickle, resolved. */
typedef struct torch_link {
    fsdp_node node;
    torch_storage storage;
} torch_link;

/* Arrays that had to be decoded; they belong to the source (its state). */
typedef struct torch_memory torch_memory;

/* One torch.save file, or an item of DCP. */
typedef struct torch_archive {
    fsdp_source *source;
    const char *where;         /* "'PATH'", for messages */
    fsdp_pickle pickle;
    char *data;                /* the bytes of the pickle */
    int file;
    int64_t data_offset;       /* of them in the file; -1: they are packed there */
    bool is_swapped;           /* storages are big-endian */
    bool is_legacy;
    torch_link *links;         /* sorted by node */
    size_t link_count;
    torch_memory *memory;
    int64_t work;              /* nodes visited so far */
    uint8_t *marks;            /* per node, of the walk */
    uint32_t *sizes;           /* per node: objects in it, shared ones each time; 0: not counted yet */
    fsdp_node subject;         /* that was entered or read as a value last: a value that the walk gives out
                                * is what it became */
} torch_archive;

/* --- torch_zip.c, torch_legacy.c --- */

typedef struct torch_opening {
    fsdp_source *source;
    torch_memory *memory;      /* of that source */
    int file;
    int stream;                /* FSDP_NO_STREAM, or the stream that decodes to the zip */
    const char *where;         /* "'PATH'"; must outlive the archive */
} torch_opening;

/* The range of the file is a torch.save zip. checks: its checksums are added to those of the source.
 * *archive_out is empty on failure. */
fsdp_status torch_zip_open(const torch_opening *opening, int64_t offset, int64_t size, bool checks,
                           torch_archive *archive_out, fsdp_error *err);
fsdp_status torch_legacy_open(const torch_opening *opening, torch_archive *archive_out, fsdp_error *err);
bool torch_legacy_begins(const uint8_t *head, size_t size);
void torch_archive_release(torch_archive *archive);

/* Either form, recognised by its first bytes. */
fsdp_status torch_file_open(const torch_opening *opening, torch_archive *archive_out, fsdp_error *err);

/* --- torch_storage.c --- */

typedef struct torch_storage_id {
    fsdp_node node;
    const char *key;
    size_t key_size;
    bool is_meta, is_module;   /* is_module: a class's source text, no storage */
    int64_t elements;
    fsdp_node view;            /* legacy: the sixth member, 0 for none */
    torch_storage storage;     /* its dtype is set */
    size_t element_size;       /* 0: not known */
} torch_storage_id;

/* Reads ("storage", class, key, location, elements): refused when it is anything else. */
fsdp_status torch_read_storage_id(const torch_archive *archive, fsdp_node persistent,
                                  torch_storage_id *id_out, fsdp_error *err);
/* Makes the table of links, place fills in where each storage is. */
fsdp_status torch_resolve_links(torch_archive *archive,
                                fsdp_status (*place)(void *user, const torch_storage_id *id,
                                                     torch_storage *storage, fsdp_error *err),
                                void *user, fsdp_error *err);

/* Tensors whose bytes are in memory: they have chunks with file -1. One table per source. */
fsdp_status torch_memory_create(torch_memory **memory_out, fsdp_error *err);
/* Takes the row-major little-endian bytes of a tensor. Tensors come in rising order. */
fsdp_status torch_memory_keep(torch_memory *memory, size_t tensor, char *data, fsdp_error *err);
bool torch_memory_has(const torch_memory *memory, size_t tensor);
fsdp_status torch_memory_read(const torch_memory *memory, const fsdp_source *source, size_t tensor,
                              const fsdp_box *box, void *data, fsdp_error *err);
void torch_memory_close(torch_memory *memory);         /* accepts NULL */

/* --- torch_tensor.c --- */

typedef struct torch_tensor {
    fsdp_dtype dtype;
    int ndim;
    int64_t shape[FSDP_MAX_DIMS], strides[FSDP_MAX_DIMS];   /* strides in bytes */
    torch_storage storage;
    int64_t offset;            /* of its first element in the file or stream */
    unsigned fix;
    char *data;                /* an array that was decoded, in its final form; else NULL */
} torch_tensor;

typedef enum torch_kind {
    TORCH_KIND_NONE,           /* no tensor */
    TORCH_KIND_TENSOR,
    TORCH_KIND_OPAQUE,         /* a tensor that is listed by its kind only: sparse, quantized, meta */
    TORCH_KIND_WRAPPER         /* a subclass without data of its own: DTensor, ShardedTensor, others */
} torch_kind;

/* A subclass: its class and its state. */
typedef struct torch_wrapper {
    fsdp_known known;          /* FSDP_KNOWN_DTENSOR, FSDP_KNOWN_SHARDED_TENSOR, other */
    fsdp_node type, args, state;
} torch_wrapper;

/* Parameters and subclasses resolved. A tensor's places are checked against its storage. */
fsdp_status torch_tensor_read(const torch_archive *archive, fsdp_node node, torch_kind *kind_out,
                              torch_tensor *tensor_out, torch_wrapper *wrapper_out, fsdp_error *err);
/* The kind alone, by the shape of the node. */
torch_kind torch_tensor_kind(const torch_archive *archive, fsdp_node node);
void torch_tensor_release(torch_tensor *tensor);

/* The chunk that the tensor is, at lo of a larger one. It borrows from tensor and lo. */
void torch_tensor_chunk(const torch_tensor *tensor, const int64_t *lo, fsdp_source_chunk *chunk_out);
/* Adds the tensor to the source; name NULL: as an inner one. Takes tensor's data. */
fsdp_status torch_tensor_add(torch_archive *archive, const char *name, size_t name_size, torch_tensor *tensor,
                             size_t *number_out, fsdp_error *err);

/* fsdp_shape_check for a shape out of a file: FSDP_ERR_DAMAGED. */
fsdp_status torch_check_shape(const torch_archive *archive, int ndim, const int64_t *shape, fsdp_dtype dtype,
                              fsdp_error *err);
/* A tuple, list or torch.Size of ints. FSDP_ERR_DAMAGED "... NAME is no list of numbers" */
fsdp_status torch_read_sizes(const torch_archive *archive, fsdp_node node, const char *what, int *count_out,
                             int64_t *sizes_out, fsdp_error *err);

/* --- torch_numpy.c --- */

bool torch_numpy_is_array(const torch_archive *archive, fsdp_node node);
/* True: an array whose elements are numbers. */
bool torch_numpy_is_numeric(const torch_archive *archive, fsdp_node node);
fsdp_status torch_numpy_read(const torch_archive *archive, fsdp_node node, torch_tensor *tensor_out,
                             fsdp_error *err);
/* False: no scalar of numbers. */
bool torch_numpy_scalar(const torch_archive *archive, fsdp_node node, fsdp_value *value_out);
/* FSDP_DTYPE_NONE when it is none. */
fsdp_dtype torch_numpy_scalar_dtype(const torch_archive *archive, fsdp_node node);
/* Bytes: BYTES, BYTEARRAY, or the calls that protocol 2 writes for them. *owned_out is freed with
 * fsdp_free (NULL: they lie in the pickle). False: no bytes, or no memory. */
bool torch_bytes(const torch_archive *archive, fsdp_node node, const char **data_out, size_t *size_out,
                 char **owned_out);

/* --- torch_value.c --- */

enum {
    TORCH_MARK_PATH = 1, TORCH_MARK_PLAIN = 2, TORCH_MARK_FULL = 4, TORCH_MARK_SEEN = 8, TORCH_MARK_KEPT = 16
};

/* FSDP_ERR_LIMIT when there is too much in the node once shared containers are expanded. */
fsdp_status torch_measure(torch_archive *archive, fsdp_node node, fsdp_error *err);

/* Any node as a value; tensors in it become inner ones of the source. */
fsdp_status torch_value_read(torch_archive *archive, fsdp_node node, fsdp_value *value_out, fsdp_error *err);

/* Nodes that are looked at, shared ones each time. FSDP_ERR_LIMIT beyond FSDP_PICKLE_WORK. */
fsdp_status torch_count_work(torch_archive *archive, int64_t count, fsdp_error *err);
/* Before a container's items are visited: counts the work, and says in *cycle_out whether it is inside
 * itself. FSDP_ERR_LIMIT beyond the caps. leave undoes it (not after a cycle). */
fsdp_status torch_enter(torch_archive *archive, fsdp_node node, int depth, bool *cycle_out, fsdp_error *err);
void torch_leave(torch_archive *archive, fsdp_node node);

/* dict, OrderedDict, defaultdict, Counter. */
bool torch_is_dict(const torch_archive *archive, fsdp_node node);
/* Up to two runs of keys and values (from the arguments and from items): DICT nodes or 0. */
void torch_dict_runs(const torch_archive *archive, fsdp_node node, fsdp_node runs_out[2]);

/* An attribute of an object, out of its state or its slots; 0 when there is none. */
fsdp_node torch_attribute(const torch_archive *archive, fsdp_node object, const char *name);
/* The same, out of a state. */
fsdp_node torch_state_attribute(const torch_archive *archive, fsdp_node state, const char *name);
/* The name of an object's class without its module; "" when it is none. */
const char *torch_class_name(const torch_archive *archive, fsdp_node object);

/* --- torch_names.c --- */

/* Takes what a walk finds in the source's stead: for files of ranks, where it is a part of something. */
typedef struct torch_visitor {
    void *user;
    /* A tensor of its own; the data of one that was decoded goes over. */
    fsdp_status (*tensor)(void *user, torch_archive *archive, const char *name, size_t name_size,
                          torch_tensor *tensor, fsdp_error *err);
    /* A DTensor or ShardedTensor. */
    fsdp_status (*distributed)(void *user, torch_archive *archive, const char *name, size_t name_size,
                               const torch_wrapper *wrapper, fsdp_error *err);
    /* Before an object of a class is gone into; *taken_out true: it is not. */
    fsdp_status (*object)(void *user, torch_archive *archive, const char *name, size_t name_size,
                          fsdp_node node, bool *taken_out, fsdp_error *err);
    /* Anything else; what value holds goes over. node: what it was read from; 0 when its parts follow by
     * names of their own. */
    fsdp_status (*value)(void *user, const torch_archive *archive, fsdp_node node, const char *name,
                         size_t name_size, fsdp_value *value, fsdp_error *err);
} torch_visitor;

/* Names everything in the archive and adds it to the source, or gives it to the visitor (may be NULL). */
fsdp_status torch_walk(torch_archive *archive, const torch_visitor *visitor, fsdp_error *err);
/* Python's str(key), appended. */
void torch_add_key(const torch_archive *archive, fsdp_node key, fsdp_text *text);

/* --- torch_dist.c --- */

/* FSDP_ERR_REFUSED when a placement of the DTensor says that its pieces must still be added up. */
fsdp_status torch_dist_check_partial(const torch_archive *archive, const char *name, size_t name_size,
                                     const torch_wrapper *wrapper, fsdp_error *err);

/* A DTensor or ShardedTensor that is whole in this one file; FSDP_ERR_DAMAGED when it is a part. */
fsdp_status torch_dist_add(torch_archive *archive, const char *name, size_t name_size,
                           const torch_wrapper *wrapper, fsdp_error *err);

#endif
