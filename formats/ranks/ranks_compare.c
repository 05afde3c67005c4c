/* Compares copies of a part that several ranks hold. See ranks.h. */
#include "formats/ranks/ranks.h"

#include <string.h>

fsdp_status rank_files_count_compared(rank_files *set, const torch_tensor *tensor, int64_t most,
                                      fsdp_error *err)
{
    const int64_t views = 16, small = (int64_t)1 << 30;
    int64_t span = tensor->data ? 0 : torch_tensor_span(tensor);
    set->compared += span < most ? span : most;
    return set->compared / views <= set->bytes + small / views
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_LIMIT,
                           "'%s': the tensors of the ranks are far larger than their files",
                           set->where);
}

static void describe(const rank_entry *entry, const fsdp_source_chunk *chunk,
                     torch_tensor *tensor_out)
{
    size_t bytes = (size_t)entry->ndim * sizeof(int64_t);
    *tensor_out = (torch_tensor){.dtype = entry->dtype,
                                 .ndim = entry->ndim,
                                 .storage = {.file = chunk->file, .stream = chunk->stream},
                                 .offset = chunk->offset,
                                 .fix = chunk->fix};
    int64_t stride = (int64_t)fsdp_dtype_size(entry->dtype);
    for (int dim = entry->ndim - 1; dim >= 0; dim--) {
        tensor_out->strides[dim] = stride;
        stride *= chunk->len[dim];
    }
    if (bytes > 0) {
        memcpy(tensor_out->shape, chunk->len, bytes);
        if (chunk->strides)
            memcpy(tensor_out->strides, chunk->strides, bytes);
    }
}

fsdp_status rank_same_replica(rank_files *set, const rank_entry *entry, const rank_chunk *a,
                              const rank_chunk *b, fsdp_error *err)
{
    torch_tensor one, other;
    bool is_same;
    char shown[200];
    if (a->chunk.file < 0 || b->chunk.file < 0)
        return FSDP_OK;
    describe(entry, &a->chunk, &one);
    describe(entry, &b->chunk, &other);
    FSDP_TRY(rank_files_count_compared(set, &one, TORCH_REPLICA, err));
    FSDP_TRY(torch_same_elements(set->source, &one, &other, TORCH_REPLICA, &is_same, err));
    return is_same ? FSDP_OK
                   : fsdp_fail(err, FSDP_ERR_DAMAGED,
                               "'%s' and '%s' have different values of a part of '%s' that both "
                               "hold" FSDP_TWO_SAVES,
                               fsdp_source_file_path(set->source, (size_t)a->chunk.file),
                               fsdp_source_file_path(set->source, (size_t)b->chunk.file),
                               fsdp_printable(entry->name, entry->name_size, shown, sizeof shown));
}
