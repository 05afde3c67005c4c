/*
 * A state dict is a list of names, each a tensor, a value or an alias of a tensor.
 *
 * Every rank declares every tensor (name, dtype, global shape, layout) and provides the memory of its own
 * boxes. That memory is borrowed: it must live until the call that uses the state dict returns. Everything
 * else (names, shapes, meshes, boxes, values) is copied.
 *
 * A name is UTF-8 with a length, 0..65,535 bytes, and may hold NUL and '/'. If a name is repeated, a layout
 * does not fit its shape, or another rule is broken, an add returns FSDP_ERR_USAGE and adds nothing. All
 * calls are local; one thread at a time uses a state dict.
 */
#ifndef FSDP_SD_H
#define FSDP_SD_H

#include <fsdp/dtype.h>
#include <fsdp/layout.h>
#include <fsdp/status.h>
#include <fsdp/value.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { FSDP_MAX_NAME = 65535 };

typedef enum fsdp_entry_kind { FSDP_ENTRY_TENSOR, FSDP_ENTRY_VALUE, FSDP_ENTRY_ALIAS } fsdp_entry_kind;

typedef struct fsdp_entry {
    fsdp_entry_kind kind;
    const char *name;          /* zero-terminated, for names without NUL */
    size_t name_size;
    /* The nesting of the name in programs with dicts and lists (FSDP_PATH_NUMBER in value.h). NULL: that of
     * fsdp_path_default. */
    const int32_t *path;
    size_t path_count;
    /* TENSOR */
    fsdp_dtype dtype;
    int ndim;
    const int64_t *shape;
    fsdp_layout layout;
    void *data;                /* this rank's boxes, packed row-major, one after the other; NULL if none */
    int flat;                  /* number of its flat buffer, -1 if none */
    /* VALUE */
    fsdp_value value;
    /* ALIAS: number of the tensor entry it names */
    size_t target;
} fsdp_entry;

typedef struct fsdp_sd fsdp_sd;

/* Creates an empty state dict, which the caller frees. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_sd_create(fsdp_sd **sd_out, fsdp_error *err);
/* Frees a state dict; accepts NULL. */
FSDP_API void fsdp_sd_free(fsdp_sd *sd);

/* A literal as the two arguments name, name_size. */
#define FSDP_NAME(text) (text), (sizeof "" text - 1)

/* A tensor to add: the same on every rank, but for data. */
typedef struct fsdp_tensor {
    fsdp_dtype dtype;
    int ndim;
    const int64_t *shape;
    fsdp_layout layout;        /* {.mesh = mesh, .placement = {{FSDP_SHARD, 0}}} cuts dim 0 over a mesh */
    void *data;                /* this rank's boxes, packed row-major, one after the other; NULL when it holds
                                  none, or when the state dict only describes */
} fsdp_tensor;

/* Adds a tensor: borrows its data and copies everything else. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_sd_add_tensor(fsdp_sd *sd, const char *name, size_t name_size,
                                                     const fsdp_tensor *tensor, fsdp_error *err);

/* Many tensors to add in one call, as arrays of each member: for programs in other languages, whose calls
 * cost more than the work. */
typedef struct fsdp_tensors {
    size_t count;
    const char *names;         /* one after the other */
    const int32_t *name_sizes;
    const int32_t *paths;      /* nestings (fsdp_sd_set_path), one after the other */
    const int32_t *path_counts;    /* 0: that of fsdp_path_default */
    const fsdp_dtype *dtypes;
    const int32_t *ndims;
    const int64_t *shapes;     /* one after the other */
    const fsdp_layout *layouts;
    size_t layout_count;
    const int32_t *layout_numbers; /* each tensor's layout, an index into layouts */
    void *const *data;
} fsdp_tensors;

/* Adds tensors in order, up to the first that breaks a rule, as fsdp_sd_add_tensor and fsdp_sd_set_path
 * do. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_sd_add_tensors(fsdp_sd *sd, const fsdp_tensors *tensors,
                                                      fsdp_error *err);

/* Adds a value, which is copied. Values are the same on all ranks. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_sd_add_value(fsdp_sd *sd, const char *name, size_t name_size,
                                                    const fsdp_value *value, fsdp_error *err);

/* Adds a second name of a tensor that was added before (tied weights). If target is an alias, the tensor of
 * that alias is meant. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_sd_add_alias(fsdp_sd *sd, const char *name, size_t name_size,
                                                    const char *target, size_t target_size,
                                                    fsdp_error *err);

/* Sets the nesting of an entry's name, which is copied. FSDP_ERR_USAGE if the elements do not make up the
 * name. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_sd_set_path(fsdp_sd *sd, size_t index, const int32_t *path,
                                                   size_t count, fsdp_error *err);

/* A flat buffer as FSDP1 keeps it: rank i of the mesh holds chunk i of it. */
typedef struct fsdp_flat_buffer {
    fsdp_dtype dtype;
    const fsdp_mesh *mesh;
    int rank;                  /* the caller's: decides where in data a tensor's piece begins */
    int64_t count;             /* elements over all ranks with padding: a multiple of the mesh size */
    const fsdp_flat_part *parts;   /* the tensors in it, not overlapping; between them is padding */
    size_t part_count;
    void *data;                /* this rank's chunk; borrowed */
} fsdp_flat_buffer;

/* Adds a flat buffer and a tensor entry for each of its parts. The buffer's name must differ from every
 * entry's. Kind *local* stores the chunks as they are; the other kinds store the tensors. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_sd_add_flat(fsdp_sd *sd, const char *name, size_t name_size,
                                                   const fsdp_flat_buffer *buffer, fsdp_error *err);

/* Returns the number of entries. */
FSDP_API size_t fsdp_sd_count(const fsdp_sd *sd);
/* Returns an entry, in the order in which they were added, borrowed until the next add or the free; NULL
 * after the last. */
FSDP_API const fsdp_entry *fsdp_sd_at(const fsdp_sd *sd, size_t index);
/* Returns the index of an entry; -1 if no entry has this name. */
FSDP_API int64_t fsdp_sd_find(const fsdp_sd *sd, const char *name, size_t name_size);
/* Points a tensor entry at other memory, which is borrowed. Does nothing for an entry that is not a tensor.
 * */
FSDP_API void fsdp_sd_set_data(fsdp_sd *sd, size_t index, void *data);
/* Moves *value into a value entry and leaves it null. If the entry is not a value, *value is only released.
 * */
FSDP_API void fsdp_sd_set_value(fsdp_sd *sd, size_t index, fsdp_value *value);

/* Allocates zeroed memory for the boxes that `rank` holds, for every tensor entry without memory. The state
 * dict owns the memory; fsdp_sd_free frees it. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_sd_allocate(fsdp_sd *sd, int rank, fsdp_error *err);

/* Returns the bytes of a whole tensor entry; 0 for other entries. */
FSDP_API int64_t fsdp_entry_bytes(const fsdp_entry *entry);
/* Returns the bytes of the boxes that a rank holds of a tensor entry; 0 for other entries. */
FSDP_API int64_t fsdp_entry_local_bytes(const fsdp_entry *entry, int rank);

/* --- entries of optimizers ------------------------------------------------------------------- */

/* Returns true if the names state and param_groups belong to an optimizer: some names begin with the one
 * element and some with the other, or all names begin with a number and then one of these, as in a list of
 * optimizers. */
FSDP_API bool fsdp_sd_state_is_optim(const fsdp_sd *sd);
/* Returns true when the entry belongs to an optimizer: its name, or what follows "app." in it, begins with
 * the element optim, optimizer, optimizers, opt, optimizer_state_dict, optimizer_states, optimizer_0 or
 * the like, before a dot or a slash, or, with state_is_optim (above, once per state dict), state or
 * param_groups. */
FSDP_API bool fsdp_entry_is_optim(const fsdp_entry *entry, bool state_is_optim);

#ifdef __cplusplus
}
#endif
#endif
