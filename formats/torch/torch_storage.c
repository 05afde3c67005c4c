/*
 * Persistent ids: resolves the storages that a torch pickle refers to, and keeps the arrays that
 * were decoded into memory. See torch_internal.h.
 */
#include "formats/torch/torch_internal.h"
#include "kernels/kernels.h"

#include <stdlib.h>
#include <string.h>

/* --- persistent ids ----------------------------------------------------------------------------- */

static fsdp_status bad_id(const torch_archive *archive, const char *why, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_REFUSED, "%s: a persistent id %s", archive->where, why);
}

static bool key_is_clean(const char *key, size_t size)
{
    return size > 0 && !memchr(key, '/', size) && !memchr(key, '\\', size) &&
           !memchr(key, '\0', size) &&
           !(key[0] == '.' && (size == 1 || (key[1] == '.' && size == 2)));
}

static fsdp_status read_class(const torch_archive *archive, fsdp_node node, torch_storage_id *id,
                              fsdp_error *err)
{
    const fsdp_pickle_node *type = fsdp_pickle_at(&archive->pickle, node);
    bool is_untyped = type->known == FSDP_KNOWN_UNTYPED_STORAGE;
    if (type->kind != FSDP_NODE_GLOBAL || (!is_untyped && type->known != FSDP_KNOWN_TORCH_STORAGE))
        return bad_id(archive, "names an unknown storage class", err);
    id->storage.dtype = is_untyped ? FSDP_U8 : (fsdp_dtype)type->count;
    id->element_size = fsdp_dtype_size(id->storage.dtype);
    if (id->storage.dtype == FSDP_DTYPE_NONE && type->as.global->name[0] == 'Q') /* quantized */
        id->element_size = strcmp(type->as.global->name, "QInt32Storage") == 0 ? 4 : 1;
    return FSDP_OK;
}

fsdp_status torch_read_storage_id(const torch_archive *archive, fsdp_node persistent,
                                  torch_storage_id *id_out, fsdp_error *err)
{
    const fsdp_pickle *pickle = &archive->pickle;
    fsdp_node parts = fsdp_pickle_at(pickle, persistent)->as.child;
    *id_out =
        (torch_storage_id){.node = persistent, .storage = {.file = -1, .stream = FSDP_NO_STREAM}};
    fsdp_node kind = fsdp_pickle_element(pickle, parts, 0);
    if (fsdp_pickle_at(pickle, parts)->kind != FSDP_NODE_TUPLE)
        return bad_id(archive, "is not a tuple", err);
    if (!fsdp_pickle_is_text(pickle, kind, "storage"))
        return bad_id(archive, "does not name a storage", err);
    FSDP_TRY(read_class(archive, fsdp_pickle_element(pickle, parts, 1), id_out, err));
    const fsdp_pickle_node *key = fsdp_pickle_at(pickle, fsdp_pickle_element(pickle, parts, 2));
    if (key->kind != FSDP_NODE_STR || !key_is_clean(key->as.text, key->count))
        return bad_id(archive, "has a storage key that is not a plain name", err);
    id_out->key = key->as.text;
    id_out->key_size = key->count;
    fsdp_node location = fsdp_pickle_element(pickle, parts, 3);
    if (fsdp_pickle_at(pickle, location)->kind != FSDP_NODE_STR)
        return bad_id(archive, "has no location", err);
    id_out->is_meta = fsdp_pickle_is_text(pickle, location, "meta");
    if (!fsdp_pickle_int(pickle, fsdp_pickle_element(pickle, parts, 4), &id_out->elements) ||
        id_out->elements < 0)
        return bad_id(archive, "has no count of elements", err);
    id_out->view = fsdp_pickle_element(pickle, parts, 5);
    if (fsdp_mul_overflow(id_out->elements, (int64_t)id_out->element_size, &id_out->storage.size))
        return bad_id(archive, "counts too many elements", err);
    return FSDP_OK;
}

static fsdp_status resolve_one(torch_archive *archive, fsdp_node node,
                               fsdp_status (*place)(void *context, const torch_storage_id *id,
                                                    torch_storage *storage, fsdp_error *err),
                               void *context, fsdp_error *err)
{
    torch_storage_id id;
    FSDP_TRY(torch_read_storage_id(archive, node, &id, err));
    torch_link *link = &archive->links[archive->link_count++];
    *link = (torch_link){node, id.storage};
    return id.is_meta ? FSDP_OK : place(context, &id, &link->storage, err);
}

fsdp_status torch_resolve_links(torch_archive *archive,
                                fsdp_status (*place)(void *context, const torch_storage_id *id,
                                                     torch_storage *storage, fsdp_error *err),
                                void *context, fsdp_error *err)
{
    size_t count = 0;
    for (size_t i = 0; i < archive->pickle.count; i++)
        count += archive->pickle.nodes[i].kind == FSDP_NODE_PERSISTENT;
    archive->links = fsdp_alloc(count, sizeof *archive->links);
    if (!archive->links)
        return fsdp_fail_memory(err, "storages");
    for (size_t i = 0; i < archive->pickle.count; i++)
        if (archive->pickle.nodes[i].kind == FSDP_NODE_PERSISTENT)
            FSDP_TRY(resolve_one(archive, (fsdp_node)i, place, context, err));
    return FSDP_OK;
}

void torch_archive_release(torch_archive *archive)
{
    fsdp_pickle_release(&archive->pickle);
    fsdp_free(archive->data);
    fsdp_free(archive->links);
    fsdp_free(archive->marks);
    fsdp_free(archive->sizes);
    *archive = (torch_archive){0};
}

/* --- arrays in memory --------------------------------------------------------------------------- */

typedef struct kept_array {
    size_t tensor;
    char *data;
} kept_array;

struct torch_memory {
    kept_array *arrays; /* sorted by number of tensor */
    size_t count, capacity;
};

fsdp_status torch_memory_create(torch_memory **memory_out, fsdp_error *err)
{
    *memory_out = fsdp_alloc(1, sizeof **memory_out);
    return *memory_out ? FSDP_OK : fsdp_fail_memory(err, "arrays");
}

fsdp_status torch_memory_keep(torch_memory *memory, size_t tensor, char *data, fsdp_error *err)
{
    if (!fsdp_grow(&memory->arrays, &memory->capacity, memory->count + 1, sizeof *memory->arrays)) {
        fsdp_free(data);
        return fsdp_fail_memory(err, "arrays");
    }
    memory->arrays[memory->count++] = (kept_array){tensor, data};
    return FSDP_OK;
}

static int compare_arrays(const void *key, const void *item)
{
    size_t tensor = *(const size_t *)key, other = ((const kept_array *)item)->tensor;
    return (tensor > other) - (tensor < other);
}

fsdp_status torch_memory_read(const torch_memory *memory, const fsdp_source *source, size_t tensor,
                              const fsdp_box *box, void *data, fsdp_error *err)
{
    const kept_array *array = memory->count == 0 ? NULL
                                                 : bsearch(&tensor, memory->arrays, memory->count,
                                                           sizeof *array, compare_arrays);
    if (!array)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "tensor %zu is not in memory", tensor);
    const fsdp_source_tensor *described = fsdp_source_tensor_at(source, tensor);
    fsdp_box whole = fsdp_box_whole(described->ndim, described->shape);
    fsdp_copy_shared(box, data, &whole, array->data, fsdp_dtype_size(described->dtype));
    return FSDP_OK;
}

void torch_memory_close(torch_memory *memory)
{
    if (!memory)
        return;
    for (size_t i = 0; i < memory->count; i++)
        fsdp_free(memory->arrays[i].data);
    fsdp_free(memory->arrays);
    fsdp_free(memory);
}
