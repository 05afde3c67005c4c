/* Layouts in words: how a tensor is cut over the ranks. */
#include "tools/ls/ls.h"
#include "base/text.h"

#include <inttypes.h>
#include <string.h>

/* Another program's files: the boxes that a tensor lies in there. */
static size_t stored_boxes(const ls_listing *listing, size_t number)
{
    size_t count = 0;
    while (fsdp_checkpoint_stored_box_at(listing->checkpoint, number, count, NULL, NULL))
        count++;
    return count;
}

bool ls_same_layout(const ls_listing *listing, size_t a, size_t b)
{
    const fsdp_layout *one = &fsdp_sd_at(listing->sd, a)->layout;
    const fsdp_layout *other = &fsdp_sd_at(listing->sd, b)->layout;
    if (one->kind != other->kind || stored_boxes(listing, a) != stored_boxes(listing, b))
        return false;
    if (one->kind != FSDP_LAYOUT_MESH)
        return true; /* told by kind and number only */
    return fsdp_mesh_equal(one->mesh, other->mesh) &&
           memcmp(one->placement, other->placement, sizeof one->placement) == 0;
}

/* "288 per rank", or the sizes that occur, in rank order: "uneven: 6283 x7 + 6276". */
static void add_chunks(fsdp_text *text, int64_t rows, int64_t parts)
{
    int64_t low, length, run_length = 0, run = 0;
    fsdp_chunk(rows, parts, parts - 1, &low, &length);
    if (rows % parts == 0) {
        fsdp_text_addf(text, " (%" PRId64 " per rank)", rows / parts);
        return;
    }
    fsdp_text_addf(text, ", uneven (");
    for (int64_t i = 0; i <= parts; i++) {
        if (i < parts)
            fsdp_chunk(rows, parts, i, &low, &length);
        if (i < parts && (i == 0 || length == run_length)) {
            run_length = length;
            run++;
            continue;
        }
        fsdp_text_addf(text, "%" PRId64, run_length);
        if (run > 1)
            fsdp_text_addf(text, " x%" PRId64, run);
        fsdp_text_addf(text, i < parts ? " + " : ")");
        run_length = length;
        run = 1;
    }
}

static void add_one_shard(fsdp_text *text, const fsdp_entry *tensor, int mesh_dim, int64_t copies)
{
    const fsdp_placement *placement = &tensor->layout.placement[mesh_dim];
    int64_t parts = fsdp_mesh_dim_size(tensor->layout.mesh, mesh_dim);
    fsdp_text_addf(text, "shard dim %d", placement->dim);
    if (placement->kind == FSDP_SHARD)
        add_chunks(text, tensor->shape[placement->dim], parts);
    else
        fsdp_text_addf(text, " strided by %" PRId64, placement->split);
    if (copies > 1)
        fsdp_text_addf(text, ", %" PRId64 " copies", copies);
}

static void add_many_shards(fsdp_text *text, const fsdp_entry *tensor, int64_t copies)
{
    const fsdp_mesh *mesh = tensor->layout.mesh;
    const char *between = "shard ";
    for (int d = 0; d < fsdp_mesh_ndim(mesh); d++) {
        const fsdp_placement *placement = &tensor->layout.placement[d];
        if (placement->kind != FSDP_SHARD && placement->kind != FSDP_STRIDED_SHARD)
            continue;
        fsdp_text_addf(text, "%sdim %d by %s=%" PRId64, between, placement->dim,
                       fsdp_mesh_dim_name(mesh, d), fsdp_mesh_dim_size(mesh, d));
        if (placement->kind == FSDP_STRIDED_SHARD)
            fsdp_text_addf(text, " strided");
        between = ", ";
    }
    if (copies > 1)
        fsdp_text_addf(text, ", %" PRId64 " copies", copies);
}

static void add_mesh_layout(fsdp_text *text, const fsdp_entry *tensor)
{
    const fsdp_mesh *mesh = tensor->layout.mesh;
    int sharding = 0, last = 0;
    int64_t copies = 1;
    for (int d = 0; d < fsdp_mesh_ndim(mesh); d++) {
        fsdp_placement_kind kind = tensor->layout.placement[d].kind;
        if (kind == FSDP_SHARD || kind == FSDP_STRIDED_SHARD) {
            sharding++;
            last = d;
        } else {
            copies *= fsdp_mesh_dim_size(mesh, d);
        }
    }
    if (fsdp_mesh_size(mesh) == 1)
        fsdp_text_addf(text, "whole");
    else if (sharding == 0)
        fsdp_text_addf(text, "replicated");
    else if (sharding == 1)
        add_one_shard(text, tensor, last, copies);
    else
        add_many_shards(text, tensor, copies);
}

static void add_boxes(fsdp_text *text, size_t count)
{
    fsdp_text_addf(text, "%zu box%s", count, count == 1 ? "" : "es");
}

void ls_add_layout(fsdp_text *text, const ls_listing *listing, size_t number)
{
    const fsdp_entry *tensor = fsdp_sd_at(listing->sd, number);
    const fsdp_layout *layout = &tensor->layout;
    size_t stored = stored_boxes(listing, number);
    if (stored > 1) {
        add_boxes(text, stored);
        return;
    }
    switch (layout->kind) {
    case FSDP_LAYOUT_MESH: add_mesh_layout(text, tensor); break;
    case FSDP_LAYOUT_BOXES: add_boxes(text, layout->box_count); break;
    case FSDP_LAYOUT_FLAT:
        fsdp_text_addf(text, "flat, %" PRId64 " chunks", fsdp_mesh_size(layout->mesh));
        break;
    }
}
