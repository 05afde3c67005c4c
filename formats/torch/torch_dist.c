/*
 * DTensor and ShardedTensor in a single file: whole ones become tensors, a part is reported as a
 * part. Rank files are merged in ranks. See torch_internal.h.
 */
#include "formats/source/rank_names.h"
#include "formats/torch/torch_internal.h"

#include <stdio.h>
#include <string.h>

static fsdp_status fail_part(const torch_archive *archive, const char *name, size_t name_size,
                             fsdp_error *err)
{
    char shown[200], last[256];
    const char *slash = strrchr(archive->where, '/');
    const char *begin = slash ? slash + 1 : archive->where + 1; /* where is 'PATH' */
    const char *const file = last;
    rank_names names;
    snprintf(last, sizeof last, "%.*s", (int)strcspn(begin, "'"), begin);
    FSDP_TRY(rank_names_group(&file, 1, NULL, &names, err));
    fsdp_printable(name, name_size, shown, sizeof shown);
    if (names.count > 0)
        fsdp_fail(err, FSDP_ERR_DAMAGED,
                  "%s: tensor '%s' is spread over several files; give the pattern '%.*s%s', or the "
                  "directory of all ranks",
                  archive->where, shown, (int)(begin - archive->where - 1), archive->where + 1,
                  names.groups[0].pattern);
    else
        fsdp_fail(err, FSDP_ERR_DAMAGED,
                  "%s: tensor '%s' is spread over several files; give the directory of all ranks, "
                  "or a pattern with {r} for the rank",
                  archive->where, shown);
    rank_names_release(&names);
    return FSDP_ERR_DAMAGED;
}

fsdp_status torch_dist_check_partial(const torch_archive *archive, const char *name,
                                     size_t name_size, const torch_wrapper *wrapper,
                                     fsdp_error *err)
{
    fsdp_node spec = torch_state_attribute(archive, wrapper->state, "_spec");
    fsdp_node placements = torch_attribute(archive, spec, "placements");
    for (size_t i = 0; torch_element(archive, placements, i) != 0; i++) {
        char shown[200];
        if (strstr(torch_class_name(archive, torch_element(archive, placements, i)), "Partial"))
            return fsdp_fail(
                err, FSDP_ERR_REFUSED,
                "%s: tensor '%s' is Partial: its pieces are terms of a sum that was not computed; "
                "redistribute it to Shard or Replicate before it is saved",
                archive->where, fsdp_printable(name, name_size, shown, sizeof shown));
    }
    return FSDP_OK;
}

/* Adds a local piece at its box in the whole. */
static fsdp_status add_piece(torch_archive *archive, size_t number, fsdp_node piece,
                             const int64_t *lo, int64_t *stored, fsdp_error *err)
{
    torch_tensor tensor;
    torch_wrapper wrapper;
    torch_kind kind;
    FSDP_TRY(torch_tensor_read(archive, piece, &kind, &tensor, &wrapper, err));
    const fsdp_source_tensor *whole = fsdp_source_tensor_at(archive->source, number);
    if (kind != TORCH_KIND_TENSOR || tensor.data || tensor.dtype != whole->dtype ||
        tensor.ndim != whole->ndim) {
        torch_tensor_release(&tensor);
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "%s: a piece of a distributed tensor does not fit it", archive->where);
    }
    fsdp_source_chunk chunk;
    torch_tensor_chunk(&tensor, lo, &chunk);
    fsdp_box box = fsdp_box_whole(tensor.ndim, tensor.shape);
    *stored += fsdp_box_count(&box);
    return fsdp_source_add_chunk(archive->source, number, &chunk, err);
}

static fsdp_status piece_dtype(const torch_archive *archive, fsdp_node piece, fsdp_dtype *dtype_out,
                               fsdp_error *err)
{
    torch_tensor tensor;
    torch_wrapper wrapper;
    torch_kind kind;
    FSDP_TRY(torch_tensor_read(archive, piece, &kind, &tensor, &wrapper, err));
    torch_tensor_release(&tensor);
    *dtype_out = tensor.dtype;
    return kind == TORCH_KIND_TENSOR
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_DAMAGED, "%s: a distributed tensor has no local piece",
                           archive->where);
}

static fsdp_status add_dtensor(torch_archive *archive, const char *name, size_t name_size,
                               const torch_wrapper *wrapper, fsdp_error *err)
{
    static const int64_t origin[FSDP_MAX_DIMS];
    fsdp_node local = torch_state_attribute(archive, wrapper->state, "_local_tensor");
    int ndim;
    int64_t shape[FSDP_MAX_DIMS], stored = 0;
    fsdp_dtype dtype;
    size_t number;
    FSDP_TRY(torch_dist_check_partial(archive, name, name_size, wrapper, err));
    FSDP_TRY(torch_read_sizes(archive, torch_element(archive, wrapper->args, 2), "sizes", &ndim,
                              shape, err));
    FSDP_TRY(piece_dtype(archive, local, &dtype, err));
    FSDP_TRY(fsdp_source_add_tensor(archive->source, name, name_size,
                                    &(fsdp_source_shape){dtype, ndim, shape}, &number, err));
    FSDP_TRY(add_piece(archive, number, local, origin, &stored, err));
    fsdp_box box = fsdp_box_whole(ndim, shape);
    return stored == fsdp_box_count(&box) ? FSDP_OK : fail_part(archive, name, name_size, err);
}

/* The state of the pickle: (local shards, metadata, group, spec, init_rrefs). */
static fsdp_status add_sharded(torch_archive *archive, const char *name, size_t name_size,
                               const torch_wrapper *wrapper, fsdp_error *err)
{
    fsdp_node shards = torch_element(archive, wrapper->state, 0),
              metadata = torch_element(archive, wrapper->state, 1);
    int ndim, lo_count;
    int64_t shape[FSDP_MAX_DIMS], lo[FSDP_MAX_DIMS], stored = 0;
    fsdp_dtype dtype;
    size_t number;
    fsdp_node first = torch_attribute(archive, torch_element(archive, shards, 0), "tensor");
    FSDP_TRY(torch_read_sizes(archive, torch_attribute(archive, metadata, "size"), "sizes", &ndim,
                              shape, err));
    if (first == 0)
        return fail_part(archive, name, name_size, err);
    FSDP_TRY(piece_dtype(archive, first, &dtype, err));
    FSDP_TRY(fsdp_source_add_tensor(archive->source, name, name_size,
                                    &(fsdp_source_shape){dtype, ndim, shape}, &number, err));
    for (size_t i = 0; torch_element(archive, shards, i) != 0; i++) {
        fsdp_node shard = torch_element(archive, shards, i);
        FSDP_TRY(torch_count_work(archive, 1, err));
        fsdp_node place =
            torch_attribute(archive, torch_attribute(archive, shard, "metadata"), "shard_offsets");
        FSDP_TRY(torch_read_sizes(archive, place, "offsets", &lo_count, lo, err));
        if (lo_count != ndim)
            return fsdp_fail(err, FSDP_ERR_DAMAGED,
                             "%s: a piece of a sharded tensor does not fit it", archive->where);
        FSDP_TRY(add_piece(archive, number, torch_attribute(archive, shard, "tensor"), lo, &stored,
                           err));
    }
    fsdp_box box = fsdp_box_whole(ndim, shape);
    return stored == fsdp_box_count(&box) ? FSDP_OK : fail_part(archive, name, name_size, err);
}

fsdp_status torch_dist_add(torch_archive *archive, const char *name, size_t name_size,
                           const torch_wrapper *wrapper, fsdp_error *err)
{
    return wrapper->known == FSDP_KNOWN_DTENSOR
               ? add_dtensor(archive, name, name_size, wrapper, err)
               : add_sharded(archive, name, name_size, wrapper, err);
}
