/*
 * Writes the state dict into the manifest: meshes, flat buffers and entries, one line each. The
 * reader is manifest_state_read.c. A layout is stored as a mesh and placements, so that its line
 * does not grow with the number of ranks; only irregular layouts list their boxes.
 */
#include "statedict/manifest/large_value.h"
#include "statedict/manifest/manifest_internal.h"

#include "base/core/mem.h"
#include "statedict/sd/layout_internal.h"

#include <string.h>

/* --- small spellings -------------------------------------------------------------------------- */

/* printf would take most of the time of a manifest with many tensors. */
static void put_i64(fsdp_text *text, int64_t value)
{
    char digits[20];
    size_t at = sizeof digits;
    uint64_t rest = value < 0 ? 0 - (uint64_t)value : (uint64_t)value;
    do {
        digits[--at] = (char)('0' + rest % 10);
        rest /= 10;
    } while (rest > 0);
    if (value < 0)
        digits[--at] = '-';
    fsdp_text_add(text, digits + at, sizeof digits - at);
}

static void put(fsdp_text *text, const char *words)
{
    fsdp_text_add(text, words, strlen(words));
}

static void put_i64s(fsdp_text *text, const int64_t *values, int n)
{
    put(text, "[");
    for (int i = 0; i < n; i++) {
        if (i > 0)
            put(text, ", ");
        put_i64(text, values[i]);
    }
    put(text, "]");
}

static void put_name(fsdp_text *text, const char *name, size_t size)
{
    put(text, "{\"name\": ");
    fsdp_text_add_json_string(text, name, size);
}

/* --- writing: meshes -------------------------------------------------------------------------- */

/* The different meshes of a state dict, numbered in the order in which they are met. */
typedef struct mesh_table {
    const fsdp_mesh **items;
    size_t count, capacity;
} mesh_table;

static int64_t find_mesh(const mesh_table *table, const fsdp_mesh *mesh)
{
    for (size_t i = table->count; i-- > 0;) {
        if (table->items[i] == mesh)
            return (int64_t)i;
    }
    for (size_t i = table->count; i-- > 0;) {
        if (fsdp_mesh_equal(table->items[i], mesh))
            return (int64_t)i;
    }
    return -1;
}

static fsdp_status add_mesh(mesh_table *table, const fsdp_mesh *mesh, fsdp_error *err)
{
    if (find_mesh(table, mesh) >= 0)
        return FSDP_OK;
    if (!fsdp_grow(&table->items, &table->capacity, table->count + 1, sizeof *table->items))
        return fsdp_fail_memory(err, "the manifest");
    table->items[table->count++] = mesh;
    return FSDP_OK;
}

static fsdp_status collect_meshes(const fsdp_sd *sd, mesh_table *table, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_flat_count(sd); i++)
        FSDP_TRY(add_mesh(table, fsdp_sd_flat_at(sd, i)->mesh, err));
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (entry->kind == FSDP_ENTRY_TENSOR && entry->layout.kind != FSDP_LAYOUT_BOXES)
            FSDP_TRY(add_mesh(table, entry->layout.mesh, err));
    }
    return FSDP_OK;
}

static void put_mesh(fsdp_text *text, const fsdp_mesh *mesh)
{
    int64_t shape[FSDP_MAX_MESH_DIMS];
    int ndim = fsdp_mesh_ndim(mesh);
    put(text, "{\"names\": [");
    for (int i = 0; i < ndim; i++) {
        if (i > 0)
            put(text, ", ");
        const char *name = fsdp_mesh_dim_name(mesh, i);
        fsdp_text_add_json_string(text, name, strlen(name));
        shape[i] = fsdp_mesh_dim_size(mesh, i);
    }
    put(text, "], \"shape\": ");
    put_i64s(text, shape, ndim);
    if (!fsdp_mesh_is_dense(mesh)) {
        put(text, ", \"ranks\": [");
        for (int64_t i = 0; i < fsdp_mesh_size(mesh); i++) {
            if (i > 0)
                put(text, ", ");
            put_i64(text, fsdp_mesh_rank_at(mesh, i));
        }
        put(text, "]");
    }
    put(text, "}");
}

static void put_meshes(fsdp_text *text, const mesh_table *table)
{
    put(text, "\"meshes\": [");
    for (size_t i = 0; i < table->count; i++) {
        put(text, i > 0 ? ",\n" : "\n");
        put_mesh(text, table->items[i]);
    }
    put(text, "\n],\n");
}

static void put_flats(fsdp_text *text, const fsdp_sd *sd, const mesh_table *table)
{
    put(text, "\"flats\": [");
    for (size_t i = 0; i < fsdp_sd_flat_count(sd); i++) {
        const fsdp_flat *flat = fsdp_sd_flat_at(sd, i);
        put(text, i > 0 ? ",\n" : "\n");
        put_name(text, flat->name, flat->name_size);
        put(text, ", \"dtype\": \"");
        put(text, fsdp_dtype_name(flat->dtype));
        put(text, "\", \"mesh\": ");
        put_i64(text, find_mesh(table, flat->mesh));
        put(text, ", \"count\": ");
        put_i64(text, flat->count);
        put(text, "}");
    }
    put(text, "\n],\n");
}

/* --- writing: entries ------------------------------------------------------------------------- */

static void put_placement(fsdp_text *text, fsdp_placement placement)
{
    put(text, placement.kind == FSDP_REPLICATE       ? "\"R"
              : placement.kind == FSDP_STRIDED_SHARD ? "\"SS"
                                                     : "\"S");
    if (placement.kind != FSDP_REPLICATE)
        put_i64(text, placement.dim);
    if (placement.kind == FSDP_STRIDED_SHARD) {
        put(text, "/");
        put_i64(text, placement.split);
    }
    put(text, "\"");
}

static fsdp_status put_mesh_layout(fsdp_text *text, const fsdp_layout *layout,
                                   const mesh_table *table, fsdp_error *err)
{
    put(text, ", \"mesh\": ");
    put_i64(text, find_mesh(table, layout->mesh));
    put(text, ", \"placements\": [");
    for (int i = 0; i < fsdp_mesh_ndim(layout->mesh); i++) {
        if (layout->placement[i].kind == FSDP_PARTIAL)
            return fsdp_fail(err, FSDP_ERR_USAGE, "its placement is partial: reduce it first");
        if (i > 0)
            put(text, ", ");
        put_placement(text, layout->placement[i]);
    }
    put(text, "]");
    return FSDP_OK;
}

static fsdp_status put_boxes(fsdp_text *text, const fsdp_layout *layout, int ndim, fsdp_error *err)
{
    if (layout->box_count > FSDP_MANIFEST_BOXES_MAX)
        return fsdp_fail(err, FSDP_ERR_USAGE, "it has %zu boxes, at most %d are allowed",
                         layout->box_count, FSDP_MANIFEST_BOXES_MAX);
    put(text, ", \"boxes\": [");
    for (size_t i = 0; i < layout->box_count; i++) {
        put(text, i > 0 ? ", [" : "[");
        put_i64(text, layout->boxes[i].rank);
        put(text, ", ");
        put_i64s(text, layout->boxes[i].box.lo, ndim);
        put(text, ", ");
        put_i64s(text, layout->boxes[i].box.len, ndim);
        put(text, "]");
    }
    put(text, "]");
    return FSDP_OK;
}

static fsdp_status put_tensor(fsdp_text *text, const fsdp_entry *entry, const mesh_table *table,
                              fsdp_error *err)
{
    const fsdp_layout *layout = &entry->layout;
    if (layout->kind != FSDP_LAYOUT_FLAT) {
        put(text, ", \"dtype\": \"");
        put(text, fsdp_dtype_name(entry->dtype));
        put(text, "\"");
    }
    put(text, ", \"shape\": ");
    put_i64s(text, entry->shape, entry->ndim);
    if (layout->kind == FSDP_LAYOUT_MESH)
        return put_mesh_layout(text, layout, table, err);
    if (layout->kind == FSDP_LAYOUT_BOXES)
        return put_boxes(text, layout, entry->ndim, err);
    if (entry->flat < 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "it lies in no flat buffer of this state dict");
    put(text, ", \"flat\": [");
    put_i64(text, entry->flat);
    put(text, ", ");
    put_i64(text, layout->flat_offset);
    put(text, "]");
    return FSDP_OK;
}

static fsdp_status put_entry_value(fsdp_text *text, const fsdp_value *value, fsdp_error *err)
{
    if (!fsdp_value_is_large(value)) {
        put(text, ", \"value\": ");
        return fsdp_manifest_put_value(text, value, err);
    }
    fsdp_text bytes = {0};
    fsdp_status status = fsdp_value_pack(value, &bytes, err);
    put(text, ", \"stored\": ");
    fsdp_manifest_put_stored(text, value->kind, bytes.size);
    fsdp_text_release(&bytes);
    return status;
}

static fsdp_status put_entry(fsdp_text *text, const fsdp_sd *sd, const fsdp_entry *entry,
                             const mesh_table *table, int world, fsdp_error *err)
{
    put_name(text, entry->name, entry->name_size);
    if (entry->kind == FSDP_ENTRY_VALUE) {
        FSDP_TRY(put_entry_value(text, &entry->value, err));
    } else if (entry->kind == FSDP_ENTRY_ALIAS) {
        const fsdp_entry *target = fsdp_sd_at(sd, entry->target);
        put(text, ", \"alias\": ");
        fsdp_text_add_json_string(text, target->name, target->name_size);
    } else {
        if (fsdp_layout_world(&entry->layout) > world)
            return fsdp_fail(err, FSDP_ERR_USAGE, "its layout names rank %d, there are %d ranks",
                             fsdp_layout_world(&entry->layout) - 1, world);
        FSDP_TRY(put_tensor(text, entry, table, err));
    }
    fsdp_manifest_put_path(text, entry);
    put(text, "}");
    return FSDP_OK;
}

static fsdp_status put_entries(fsdp_text *text, const fsdp_sd *sd, const mesh_table *table,
                               int world, fsdp_error *err)
{
    put(text, "\"entries\": [");
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        put(text, i > 0 ? ",\n" : "\n");
        fsdp_status status = put_entry(text, sd, entry, table, world, err);
        if (status != FSDP_OK) {
            char name[200];
            fsdp_error_prefix(err, "'%s'",
                              fsdp_printable(entry->name, entry->name_size, name, sizeof name));
            return status;
        }
    }
    put(text, "\n],\n");
    return FSDP_OK;
}

fsdp_status fsdp_manifest_put_state(fsdp_text *text, const fsdp_sd *sd, int world, fsdp_error *err)
{
    mesh_table table = {0};
    fsdp_status status = collect_meshes(sd, &table, err);
    if (status == FSDP_OK) {
        put_meshes(text, &table);
        put_flats(text, sd, &table);
        status = put_entries(text, sd, &table, world, err);
    }
    fsdp_free(table.items);
    return status;
}
