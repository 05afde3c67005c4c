/*
 * Nodes that are tensors: resolves torch's rebuild functions, Parameters and subclasses, and
 * checks every size, stride and offset against the storage. Parts of dicts and of other objects,
 * which all readers of nodes ask for, are here too. See torch_internal.h.
 */
#include "formats/torch/torch_internal.h"
#include "base/data/box_internal.h"

#include <stdlib.h>
#include <string.h>

enum { NESTING = 8 }; /* a Parameter of a subclass of ...: real files nest no deeper */

/* A rebuild call, direct or through _rebuild_from_type_v2: its function and arguments. */
typedef struct rebuild {
    fsdp_known known;
    fsdp_node args;
    torch_wrapper wrapper; /* of the last _rebuild_from_type_v2, type 0: none */
} rebuild;

static fsdp_status bad_tensor(const torch_archive *archive, const char *why, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "%s: a tensor %s", archive->where, why);
}

/* --- rebuild functions -------------------------------------------------------------------------- */

/* Steps from a Parameter or a subclass to the tensor inside; false when there is none. */
static bool unwrap(const torch_archive *archive, rebuild *at)
{
    if (at->known == FSDP_KNOWN_FROM_TYPE) {
        at->wrapper.type = torch_element(archive, at->args, 1);
        at->wrapper.known = (fsdp_known)torch_node(archive, at->wrapper.type)->known;
        at->wrapper.args = torch_element(archive, at->args, 2);
        at->wrapper.state = torch_element(archive, at->args, 3);
        at->known = (fsdp_known)torch_node(archive, torch_element(archive, at->args, 0))->known;
        at->args = at->wrapper.args;
        return true;
    }
    if (at->known == FSDP_KNOWN_PARAMETER || at->known == FSDP_KNOWN_PARAMETER_STATE ||
        at->known == FSDP_KNOWN_DEVICE_TENSOR) {
        const fsdp_pickle_node *inner = torch_node(archive, torch_element(archive, at->args, 0));
        if (inner->kind != FSDP_NODE_CALL)
            return false;
        at->known = (fsdp_known)inner->known;
        at->args = inner->as.call->args;
        return true;
    }
    return false;
}

static torch_kind find_rebuild(const torch_archive *archive, fsdp_node node, rebuild *at)
{
    const fsdp_pickle_node *call = torch_node(archive, node);
    *at = (rebuild){0};
    if (call->kind != FSDP_NODE_CALL || call->flags & FSDP_NODE_OBJECT)
        return TORCH_KIND_NONE;
    at->known = (fsdp_known)call->known;
    at->args = call->as.call->args;
    for (int depth = 0; depth < NESTING && unwrap(archive, at); depth++)
        ;
    switch (at->known) {
    case FSDP_KNOWN_TENSOR:
    case FSDP_KNOWN_TENSOR_V2:
    case FSDP_KNOWN_TENSOR_V3:
    case FSDP_KNOWN_DEVICE_TENSOR_NUMPY: return TORCH_KIND_TENSOR;
    case FSDP_KNOWN_WRAPPER_SUBCLASS: return TORCH_KIND_WRAPPER;
    case FSDP_KNOWN_REBUILD_OTHER:
    case FSDP_KNOWN_FROM_TYPE:
    case FSDP_KNOWN_PARAMETER:
    case FSDP_KNOWN_PARAMETER_STATE:
    case FSDP_KNOWN_DEVICE_TENSOR: return TORCH_KIND_OPAQUE;
    default: return TORCH_KIND_NONE;
    }
}

/* Distinguishes plain tensors whose storage has no bytes, or elements of an unknown dtype. */
static torch_kind refine(const torch_archive *archive, const rebuild *at);

torch_kind torch_tensor_kind(const torch_archive *archive, fsdp_node node)
{
    rebuild at;
    torch_kind kind = find_rebuild(archive, node, &at);
    return kind == TORCH_KIND_TENSOR ? refine(archive, &at) : kind;
}

/* --- parts of objects --------------------------------------------------------------------------- */

bool torch_is_dict(const torch_archive *archive, fsdp_node node)
{
    const fsdp_pickle_node *at = torch_node(archive, node);
    return at->kind == FSDP_NODE_DICT ||
           (at->kind == FSDP_NODE_CALL &&
            (at->known == FSDP_KNOWN_ORDERED_DICT || at->known == FSDP_KNOWN_DEFAULTDICT ||
             at->known == FSDP_KNOWN_COUNTER));
}

fsdp_node torch_dict_items(const torch_archive *archive, fsdp_node node)
{
    const fsdp_pickle_node *at = torch_node(archive, node);
    return at->kind == FSDP_NODE_DICT ? node : fsdp_pickle_dict_items(&archive->pickle, at);
}

fsdp_node torch_state_attribute(const torch_archive *archive, fsdp_node state, const char *name)
{
    if (torch_node(archive, state)->kind == FSDP_NODE_DICT)
        return fsdp_pickle_lookup(&archive->pickle, state, name);
    for (size_t part = 0; part < 2; part++) { /* (attributes, slots) */
        fsdp_node found = fsdp_pickle_lookup(
            &archive->pickle, fsdp_pickle_element(&archive->pickle, state, part), name);
        if (found != 0)
            return found;
    }
    return 0;
}

fsdp_node torch_attribute(const torch_archive *archive, fsdp_node object, const char *name)
{
    const fsdp_pickle_node *at = torch_node(archive, object);
    return at->kind == FSDP_NODE_CALL ? torch_state_attribute(archive, at->as.call->state, name)
                                      : 0;
}

const char *torch_class_name(const torch_archive *archive, fsdp_node object)
{
    const fsdp_pickle_node *at = torch_node(archive, object);
    if (at->kind != FSDP_NODE_CALL)
        return "";
    const fsdp_pickle_node *class = torch_node(archive, at->as.call->callable);
    return class->kind == FSDP_NODE_GLOBAL ? class->as.global->name : "";
}

/* --- work ---------------------------------------------------------------------------------------- */

static fsdp_status fail_work(const torch_archive *archive, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_LIMIT,
                     "%s: with shared containers expanded it holds over 10 million objects",
                     archive->where);
}

fsdp_status torch_count_work(torch_archive *archive, int64_t count, fsdp_error *err)
{
    archive->work += count;
    return archive->work > FSDP_PICKLE_WORK ? fail_work(archive, err) : FSDP_OK;
}

/* --- numbers ------------------------------------------------------------------------------------ */

fsdp_status torch_read_sizes(const torch_archive *archive, fsdp_node node, const char *what,
                             int *count_out, int64_t *sizes_out, fsdp_error *err)
{
    const fsdp_pickle_node *list = torch_node(archive, node);
    *count_out = 0;
    if (list->kind == FSDP_NODE_CALL && list->known == FSDP_KNOWN_TORCH_SIZE) {
        node = torch_element(archive, list->as.call->args, 0);
        list = torch_node(archive, node);
    }
    if (list->kind != FSDP_NODE_TUPLE && list->kind != FSDP_NODE_LIST)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "%s: the %s of a tensor are not a list",
                         archive->where, what);
    if (list->count > FSDP_MAX_DIMS)
        return fsdp_fail(err, FSDP_ERR_LIMIT,
                         "%s: a tensor has %u dimensions, at most %d are allowed", archive->where,
                         list->count, FSDP_MAX_DIMS);
    for (uint32_t i = 0; i < list->count; i++)
        if (!fsdp_pickle_int(&archive->pickle, list->as.items[i], &sizes_out[i]) ||
            sizes_out[i] < 0)
            return fsdp_fail(err, FSDP_ERR_DAMAGED, "%s: the %s of a tensor are not counts",
                             archive->where, what);
    *count_out = (int)list->count;
    return FSDP_OK;
}

fsdp_status torch_check_shape(const torch_archive *archive, int ndim, const int64_t *shape,
                              fsdp_dtype dtype, fsdp_error *err)
{
    fsdp_error why = {0};
    if (fsdp_shape_check(ndim, shape, fsdp_dtype_size(dtype), &why) == FSDP_OK)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "%s: %s", archive->where, why.text);
}

static int compare_links(const void *key, const void *link)
{
    fsdp_node node = *(const fsdp_node *)key, other = ((const torch_link *)link)->node;
    return (node > other) - (node < other);
}

static const torch_link *find_link(const torch_archive *archive, fsdp_node node)
{
    return archive->link_count == 0 ? NULL
                                    : bsearch(&node, archive->links, archive->link_count,
                                              sizeof *archive->links, compare_links);
}

static fsdp_dtype dtype_of(const torch_archive *archive, fsdp_node node)
{
    const fsdp_pickle_node *name = torch_node(archive, node);
    bool is_dtype = name->kind == FSDP_NODE_GLOBAL && name->known == FSDP_KNOWN_TORCH_DTYPE;
    return is_dtype ? (fsdp_dtype)name->count : FSDP_DTYPE_NONE;
}

static torch_kind refine(const torch_archive *archive, const rebuild *at)
{
    if (at->known == FSDP_KNOWN_DEVICE_TENSOR_NUMPY)
        return torch_numpy_is_numeric(archive, torch_element(archive, at->args, 0))
                   ? TORCH_KIND_TENSOR
                   : TORCH_KIND_OPAQUE;
    const torch_link *link = find_link(archive, torch_element(archive, at->args, 0));
    if (!link)
        return TORCH_KIND_TENSOR; /* reading the tensor reports the error */
    bool is_unknown =
        at->known == FSDP_KNOWN_TENSOR_V3
            ? dtype_of(archive, torch_element(archive, at->args, 6)) == FSDP_DTYPE_NONE
            : link->storage.dtype == FSDP_DTYPE_NONE;
    return link->storage.file < 0 || is_unknown ? TORCH_KIND_OPAQUE : TORCH_KIND_TENSOR;
}

/* --- reading ------------------------------------------------------------------------------------ */

/* The last byte of the tensor must lie in its storage. */
static fsdp_status check_reach(const torch_archive *archive, const torch_tensor *tensor,
                               int64_t first, fsdp_error *err)
{
    int64_t element = (int64_t)fsdp_dtype_size(tensor->dtype), reach, last = 0;
    for (int dim = 0; dim < tensor->ndim; dim++) {
        if (tensor->shape[dim] == 0)
            return FSDP_OK;
        if (fsdp_mul_overflow(tensor->shape[dim] - 1, tensor->strides[dim], &reach) ||
            fsdp_add_overflow(last, reach, &last))
            return bad_tensor(archive, "reaches beyond its storage", err);
    }
    if (fsdp_add_overflow(last, first, &last) || fsdp_add_overflow(last, element, &last) ||
        last > tensor->storage.size)
        return bad_tensor(archive, "reaches beyond its storage", err);
    return FSDP_OK;
}

static bool is_empty(const torch_tensor *tensor)
{
    for (int dim = 0; dim < tensor->ndim; dim++)
        if (tensor->shape[dim] == 0)
            return true;
    return false;
}

/* PyTorch takes the truth of a number, too. */
static bool flag_is_set(const torch_archive *archive, fsdp_node dict, const char *name)
{
    const fsdp_pickle_node *value =
        torch_node(archive, fsdp_pickle_lookup(&archive->pickle, dict, name));
    if (value->kind == FSDP_NODE_FLOAT)
        return value->as.f64 != 0;
    return (value->kind == FSDP_NODE_BOOL || value->kind == FSDP_NODE_INT) && value->as.i64 != 0;
}

static void read_fixes(const torch_archive *archive, fsdp_node flags, torch_tensor *tensor)
{
    bool is_complex = tensor->dtype == FSDP_C64 || tensor->dtype == FSDP_C128 ||
                      tensor->dtype == FSDP_COMPLEX32 || tensor->dtype == FSDP_BCOMPLEX32;
    if (archive->is_swapped && fsdp_dtype_size(tensor->dtype) > 1)
        tensor->fix |= FSDP_FIX_SWAP;
    if (is_complex && flag_is_set(archive, flags, "conj"))
        tensor->fix |= FSDP_FIX_CONJUGATE;
    if (flag_is_set(archive, flags, "neg"))
        tensor->fix |= FSDP_FIX_NEGATE;
}

static fsdp_status read_strides(const torch_archive *archive, fsdp_node node, torch_tensor *tensor,
                                fsdp_error *err)
{
    int count;
    int64_t element = (int64_t)fsdp_dtype_size(tensor->dtype);
    FSDP_TRY(torch_read_sizes(archive, node, "strides", &count, tensor->strides, err));
    if (count != tensor->ndim)
        return bad_tensor(archive, "has different numbers of strides and sizes", err);
    for (int dim = 0; dim < count; dim++)
        if (fsdp_mul_overflow(tensor->strides[dim], element, &tensor->strides[dim])) {
            if (tensor->shape[dim] > 1)
                return bad_tensor(archive, "has a stride beyond all storages", err);
            tensor->strides[dim] = 0;
        }
    return FSDP_OK;
}

/* (storage, offset, size, stride, requires_grad, hooks, [dtype,] [flags]) */
static fsdp_status read_plain(const torch_archive *archive, const rebuild *at, torch_tensor *tensor,
                              fsdp_error *err)
{
    bool is_v3 = at->known == FSDP_KNOWN_TENSOR_V3;
    const torch_link *link = find_link(archive, torch_element(archive, at->args, 0));
    if (!link)
        return bad_tensor(archive, "has no storage", err);
    tensor->storage = link->storage;
    tensor->dtype =
        is_v3 ? dtype_of(archive, torch_element(archive, at->args, 6)) : link->storage.dtype;
    int64_t first;
    if (!fsdp_pickle_int(&archive->pickle, torch_element(archive, at->args, 1), &first) ||
        first < 0 || fsdp_mul_overflow(first, (int64_t)fsdp_dtype_size(tensor->dtype), &first))
        return bad_tensor(archive, "has no valid offset in its storage", err);
    FSDP_TRY(torch_read_sizes(archive, torch_element(archive, at->args, 2), "sizes", &tensor->ndim,
                              tensor->shape, err));
    FSDP_TRY(torch_check_shape(archive, tensor->ndim, tensor->shape, tensor->dtype, err));
    FSDP_TRY(read_strides(archive, torch_element(archive, at->args, 3), tensor, err));
    FSDP_TRY(check_reach(archive, tensor, first, err));
    tensor->offset = tensor->storage.offset + (is_empty(tensor) ? 0 : first);
    read_fixes(archive, torch_element(archive, at->args, is_v3 ? 7 : 6), tensor);
    return FSDP_OK;
}

fsdp_status torch_tensor_read(const torch_archive *archive, fsdp_node node, torch_kind *kind_out,
                              torch_tensor *tensor_out, torch_wrapper *wrapper_out, fsdp_error *err)
{
    rebuild at;
    *kind_out = find_rebuild(archive, node, &at);
    *wrapper_out = at.wrapper;
    *tensor_out = (torch_tensor){.storage = {.file = -1, .stream = FSDP_NO_STREAM}};
    if (*kind_out == TORCH_KIND_TENSOR)
        *kind_out = refine(archive, &at);
    if (*kind_out != TORCH_KIND_TENSOR)
        return FSDP_OK;
    if (at.known == FSDP_KNOWN_DEVICE_TENSOR_NUMPY)
        return torch_numpy_read(archive, torch_element(archive, at.args, 0), tensor_out, err);
    return read_plain(archive, &at, tensor_out, err);
}

void torch_tensor_release(torch_tensor *tensor)
{
    fsdp_free(tensor->data);
    tensor->data = NULL;
}

/* --- adding ------------------------------------------------------------------------------------- */

void torch_tensor_chunk(const torch_tensor *tensor, const int64_t *lo, fsdp_source_chunk *chunk_out)
{
    *chunk_out = (fsdp_source_chunk){.lo = lo,
                                     .len = tensor->shape,
                                     .strides = tensor->strides,
                                     .offset = tensor->offset,
                                     .file = tensor->storage.file,
                                     .stream = tensor->storage.stream,
                                     .fix = tensor->fix};
    if (tensor->data)
        *chunk_out = (fsdp_source_chunk){.lo = lo,
                                         .len = tensor->shape,
                                         .file = -1,
                                         .origin = tensor->storage.file,
                                         .stream = FSDP_NO_STREAM};
}

fsdp_status torch_tensor_add(torch_archive *archive, const char *name, size_t name_size,
                             torch_tensor *tensor, size_t *number_out, fsdp_error *err)
{
    static const int64_t origin[FSDP_MAX_DIMS];
    fsdp_source_chunk chunk;
    torch_tensor_chunk(tensor, origin, &chunk);
    if (name)
        FSDP_TRY(fsdp_source_add_tensor(
            archive->source, name, name_size,
            &(fsdp_source_shape){tensor->dtype, tensor->ndim, tensor->shape}, number_out, err));
    else
        FSDP_TRY(fsdp_source_add_inner(archive->source, tensor->dtype, tensor->ndim, tensor->shape,
                                       number_out, err));
    if (tensor->data) {
        char *data = tensor->data;
        tensor->data = NULL;
        FSDP_TRY(torch_memory_keep(archive->memory, *number_out, data, err));
    }
    return fsdp_source_add_chunk(archive->source, *number_out, &chunk, err);
}
