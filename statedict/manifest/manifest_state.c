/*
 * The state dict in the manifest: meshes, flat buffers and entries, one line each. A layout is stored as a
 * mesh and placements, so that its line does not grow with the number of ranks; only irregular layouts list
 * their boxes. The reader adds what it reads to a state dict, which checks names, shapes and layouts. No
 * count in the text decides an allocation; memory grows with the bytes that were read.
 */
#include "statedict/manifest/large_value.h"
#include "base/core/mem.h"
#include "base/data/name_path.h"
#include "statedict/manifest/manifest_internal.h"
#include "statedict/sd/layout_internal.h"

#include <inttypes.h>
#include <string.h>

enum { BOXES_MAX = 65536 }; /* explicit boxes of one tensor */

/* === paths ==================================================================================== */

/* The paths of names (base/data/name_path.h), written and read. */

/* Paths are applied after all entries exist: tensors of flat buffers are added late. Zero-initialise. */
typedef struct fsdp_path_list {
    int32_t *path; /* the last one read */
    size_t path_count, path_capacity;
    struct fsdp_listed_path *items;
    size_t count, capacity;
    fsdp_arena arena;
} fsdp_path_list;

typedef struct fsdp_listed_path {
    const char *name;
    size_t name_size;
    const int32_t *path;
    size_t count;
} fsdp_listed_path;

/* Writes the length of the element; in brackets when it is a number used as a key. */
static void put_element(fsdp_text *text, int32_t element)
{
    if (element >= 0 && element & FSDP_PATH_NUMBER)
        fsdp_text_addf(text, "[%zu]", fsdp_path_bytes(element));
    else
        fsdp_text_addf(text, element < 0 ? "-%zu" : "%zu", fsdp_path_bytes(element));
}

/* Writes the numbers of the elements that are positions in tuples. */
static void put_tuples(fsdp_text *text, const fsdp_entry *entry)
{
    const char *before = ", \"tuples\": [";
    for (size_t i = 0; i < entry->path_count; i++)
        if (fsdp_path_in_tuple(entry->path[i])) {
            fsdp_text_addf(text, "%s%zu", before, i);
            before = ", ";
        }
    if (strcmp(before, ", ") == 0)
        fsdp_text_add(text, "]", 1);
}

/* Writes ", "path": [...]"; nothing when the reader derives the same path from the name. */
static void manifest_put_path(fsdp_text *text, const fsdp_entry *entry)
{
    if (!entry->path ||
        fsdp_path_is_default(entry->name, entry->name_size, entry->path, entry->path_count))
        return;
    if (fsdp_path_is_whole(entry->path, entry->path_count)) {
        fsdp_text_addf(text, ", \"whole\": true");
        return;
    }
    fsdp_text_addf(text, ", \"path\": [");
    for (size_t i = 0; i < entry->path_count; i++) {
        if (i > 0)
            fsdp_text_add(text, ", ", 2);
        put_element(text, entry->path[i]);
    }
    fsdp_text_add(text, "]", 1);
    put_tuples(text, entry);
}

static void path_list_release(fsdp_path_list *list)
{
    fsdp_free(list->path);
    fsdp_free(list->items);
    fsdp_arena_release(&list->arena);
    *list = (fsdp_path_list){0};
}

static fsdp_status take_element(fsdp_json *json, int32_t *element_out, fsdp_error *err)
{
    int64_t bytes;
    bool is_number = fsdp_json_peek(json) == FSDP_JSON_ARRAY, more;
    if (is_number) {
        FSDP_TRY(fsdp_json_enter_array(json, err));
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return fsdp_json_fail(json, err, "a path has an empty element");
    }
    FSDP_TRY(fsdp_json_i64(json, &bytes, err));
    if (bytes < (is_number ? 1 : -FSDP_MAX_NAME) || bytes > FSDP_MAX_NAME)
        return fsdp_json_fail(json, err, "a path has an element of %" PRId64 " bytes", bytes);
    *element_out = (int32_t)bytes | (is_number ? FSDP_PATH_NUMBER : 0);
    if (!is_number)
        return FSDP_OK;
    FSDP_TRY(fsdp_json_next_item(json, &more, err));
    return more ? fsdp_json_fail(json, err, "a path has an element of two numbers") : FSDP_OK;
}

static fsdp_status manifest_take_path(fsdp_json *json, fsdp_path_list *list, fsdp_error *err)
{
    list->path_count = 0;
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (;;) {
        bool more;
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return FSDP_OK;
        if (list->path_count == FSDP_PATH_MOST)
            return fsdp_json_fail(json, err, "a path has more than %d elements", FSDP_PATH_MOST);
        if (!fsdp_grow(&list->path, &list->path_capacity, list->path_count + 1, sizeof *list->path))
            return fsdp_fail_memory(err, "the manifest");
        FSDP_TRY(take_element(json, &list->path[list->path_count], err));
        list->path_count++;
    }
}

/* Marks elements of the last path read. */
static fsdp_status manifest_take_tuples(fsdp_json *json, fsdp_path_list *list, fsdp_error *err)
{
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (;;) {
        bool more;
        int64_t i;
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return FSDP_OK;
        FSDP_TRY(fsdp_json_i64(json, &i, err));
        if (i < 0 || (size_t)i >= list->path_count || list->path[i] >= 0 ||
            list->path[i] < -FSDP_MAX_NAME) /* the whole object, or in a tuple already */
            return fsdp_json_fail(json, err, "a tuple is not a list of the path before it");
        list->path[i] = -(-list->path[i] | FSDP_PATH_TUPLE);
    }
}

static fsdp_status manifest_take_whole(fsdp_json *json, fsdp_path_list *list, fsdp_error *err)
{
    bool is_whole;
    FSDP_TRY(fsdp_json_bool(json, &is_whole, err));
    list->path_count = 0;
    if (!is_whole)
        return fsdp_json_fail(json, err, "an entry says that it is not the whole");
    if (!fsdp_grow(&list->path, &list->path_capacity, 1, sizeof *list->path))
        return fsdp_fail_memory(err, "the manifest");
    list->path[list->path_count++] = FSDP_PATH_WHOLE;
    return FSDP_OK;
}

/* Adds the last path read for this name. */
static fsdp_status path_list_add(fsdp_path_list *list, const fsdp_json *json, const char *name,
                                 size_t size, fsdp_error *err)
{
    if (!fsdp_path_fits(name, size, list->path, list->path_count))
        return fsdp_json_fail(json, err, "a path does not spell its name");
    char *name_copy = fsdp_arena_strndup(&list->arena, name, size);
    int32_t *path_copy = fsdp_arena_alloc(&list->arena, list->path_count, sizeof *path_copy);
    if (!name_copy || !path_copy ||
        !fsdp_grow(&list->items, &list->capacity, list->count + 1, sizeof *list->items))
        return fsdp_fail_memory(err, "the manifest");
    memcpy(path_copy, list->path, list->path_count * sizeof *path_copy);
    list->items[list->count++] = (fsdp_listed_path){name_copy, size, path_copy, list->path_count};
    return FSDP_OK;
}

static fsdp_status path_list_apply(const fsdp_path_list *list, fsdp_sd *sd, fsdp_error *err)
{
    for (size_t i = 0; i < list->count; i++) {
        const fsdp_listed_path *item = &list->items[i];
        int64_t found = fsdp_sd_find(sd, item->name, item->name_size);
        if (found >= 0)
            FSDP_TRY(fsdp_sd_set_path(sd, (size_t)found, item->path, item->count, err));
    }
    return FSDP_OK;
}

/* === writing the entries ===================================================================== */

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
            return fsdp_fail(err, FSDP_ERR_USAGE, "its placement is partial; reduce it first");
        if (i > 0)
            put(text, ", ");
        put_placement(text, layout->placement[i]);
    }
    put(text, "]");
    return FSDP_OK;
}

static fsdp_status put_boxes(fsdp_text *text, const fsdp_layout *layout, int ndim, fsdp_error *err)
{
    if (layout->box_count > BOXES_MAX)
        return fsdp_fail(err, FSDP_ERR_USAGE, "it has %zu boxes, at most %d are allowed",
                         layout->box_count, BOXES_MAX);
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
        return fsdp_fail(err, FSDP_ERR_USAGE, "it is in no flat buffer of this state dict");
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
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "its layout names rank %d, but there are %d ranks",
                             fsdp_layout_world(&entry->layout) - 1, world);
        FSDP_TRY(put_tensor(text, entry, table, err));
    }
    manifest_put_path(text, entry);
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

/* === reading the entries ===================================================================== */

/* --- the reader ------------------------------------------------------------------------------- */

/* A copy of text that outlives the reader's position; its memory is reused for every record. */
typedef struct kept_text {
    char *data;
    size_t size, capacity;
} kept_text;

typedef struct flat_record {
    char *name;
    size_t name_size;
    fsdp_dtype dtype;
    const fsdp_mesh *mesh;
    int64_t count;
} flat_record;

/* The members of one entry's line. */
typedef struct entry_record {
    uint64_t seen;
    kept_text name, target;
    fsdp_dtype dtype;
    int ndim;
    int64_t shape[FSDP_MAX_DIMS];
    int64_t mesh;
    int placement_count;
    fsdp_placement placement[FSDP_MAX_MESH_DIMS];
    fsdp_rank_box *boxes;
    size_t box_count, box_capacity;
    int64_t flat, flat_offset;
    fsdp_value value;
    fsdp_value_kind stored_kind;
    int64_t stored_size;
} entry_record;

struct fsdp_state_reader {
    fsdp_json *json;
    int world;
    fsdp_sd *sd;
    fsdp_mesh **meshes;
    size_t mesh_count, mesh_capacity;
    flat_record *flats;
    size_t flat_count, flat_capacity;
    entry_record entry;
    /* the parts of flat buffer number `flats_done`, which is added when the last one was read */
    size_t flats_done;
    fsdp_flat_part *parts;
    size_t part_count, part_capacity;
    fsdp_stored_value *stored;
    size_t stored_count, stored_capacity;
    fsdp_path_list paths;
    fsdp_arena arena;
    fsdp_error reason; /* the error of the state dict */
};

static fsdp_status create_reader(fsdp_json *json, int world, fsdp_state_reader **reader_out,
                                 fsdp_error *err)
{
    *reader_out = fsdp_alloc(1, sizeof **reader_out);
    if (!*reader_out)
        return fsdp_fail_memory(err, "the manifest");
    (*reader_out)->json = json;
    (*reader_out)->world = world;
    return fsdp_sd_create(&(*reader_out)->sd, err);
}

/* Turns a wrong argument of the state dict into damage at a line of the file. */
static fsdp_status refused(fsdp_state_reader *reader, fsdp_status status, fsdp_error *err)
{
    if (status == FSDP_ERR_USAGE)
        return fsdp_json_fail(reader->json, err, "%s", reader->reason.text);
    if (status != FSDP_OK && err)
        *err = reader->reason;
    return status;
}

static fsdp_status take_text(fsdp_json *json, kept_text *kept, fsdp_error *err)
{
    const char *data;
    FSDP_TRY(fsdp_json_string(json, &data, &kept->size, err));
    if (!fsdp_grow(&kept->data, &kept->capacity, kept->size + 1, 1))
        return fsdp_fail_memory(err, "the manifest");
    memcpy(kept->data, data, kept->size + 1);
    return FSDP_OK;
}

static fsdp_status take_i64s(fsdp_json *json, int64_t *values_out, int room, int *n_out,
                             fsdp_error *err)
{
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (int n = 0;; n++) {
        bool more;
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more) {
            *n_out = n;
            return FSDP_OK;
        }
        if (n == room)
            return fsdp_json_fail(json, err, "there are more than %d numbers", room);
        FSDP_TRY(fsdp_json_i64(json, &values_out[n], err));
    }
}

static fsdp_status take_exactly(fsdp_json *json, int64_t *values_out, int n, fsdp_error *err)
{
    int found = 0;
    FSDP_TRY(take_i64s(json, values_out, n, &found, err));
    if (found != n)
        return fsdp_json_fail(json, err, "there are %d numbers, but %d were expected", found, n);
    return FSDP_OK;
}

static fsdp_status take_dtype(fsdp_json *json, fsdp_dtype *dtype_out, fsdp_error *err)
{
    const char *text;
    size_t size;
    FSDP_TRY(fsdp_json_string(json, &text, &size, err));
    *dtype_out = fsdp_dtype_from_name(text, size);
    char name[40];
    if (*dtype_out == FSDP_DTYPE_NONE)
        return fsdp_json_fail(json, err, "the dtype '%s' is unknown",
                              fsdp_printable(text, size, name, sizeof name));
    return FSDP_OK;
}

static fsdp_status take_rank(fsdp_state_reader *reader, int *rank_out, fsdp_error *err)
{
    int64_t rank;
    FSDP_TRY(fsdp_json_i64(reader->json, &rank, err));
    if (rank < 0 || rank >= reader->world)
        return fsdp_json_fail(reader->json, err, "rank %" PRId64 " is not one of %d ranks", rank,
                              reader->world);
    *rank_out = (int)rank;
    return FSDP_OK;
}

static fsdp_status check_mesh_number(fsdp_state_reader *reader, int64_t number, fsdp_error *err)
{
    if (number < 0 || (uint64_t)number >= reader->mesh_count)
        return fsdp_json_fail(reader->json, err, "mesh %" PRId64 " is not one of %zu meshes",
                              number, reader->mesh_count);
    return FSDP_OK;
}

/* An array of records, each taken by `take`. */
static fsdp_status take_records(fsdp_state_reader *reader,
                                fsdp_status (*take)(fsdp_state_reader *reader, fsdp_error *err),
                                fsdp_error *err)
{
    FSDP_TRY(fsdp_json_enter_array(reader->json, err));
    for (;;) {
        bool more;
        FSDP_TRY(fsdp_json_next_item(reader->json, &more, err));
        if (!more)
            return FSDP_OK;
        FSDP_TRY(take(reader, err));
    }
}

/* A kind of object: its keys, and the function that reads the value of one of them. */
typedef struct record_kind {
    const char *const *keys;
    int count;
    fsdp_status (*take)(fsdp_state_reader *reader, void *record, int which, fsdp_error *err);
} record_kind;

/* Reads an object; unknown keys are skipped. */
static fsdp_status take_members(fsdp_state_reader *reader, const record_kind *kind, void *record,
                                uint64_t *seen_out, fsdp_error *err)
{
    fsdp_json_members members = {.names = kind->keys, .count = kind->count};
    int which;
    FSDP_TRY(fsdp_json_enter_object(reader->json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(reader->json, &members, &which, err));
        *seen_out = members.seen;
        if (which < 0)
            return FSDP_OK;
        FSDP_TRY(kind->take(reader, record, which, err));
    }
}

/* --- meshes ---------------------------------------------------------------------------- */

typedef struct mesh_record {
    int name_count, ndim;
    char names[FSDP_MAX_MESH_DIMS][FSDP_MAX_MESH_NAME + 1];
    int64_t shape[FSDP_MAX_MESH_DIMS];
    int *ranks;
    size_t rank_count, rank_capacity;
} mesh_record;

enum { MESH_NAMES, MESH_SHAPE, MESH_RANKS, MESH_KEYS };

static fsdp_status take_mesh_names(fsdp_json *json, mesh_record *mesh, fsdp_error *err)
{
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (;; mesh->name_count++) {
        const char *text;
        size_t size;
        bool more;
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return FSDP_OK;
        if (mesh->name_count == FSDP_MAX_MESH_DIMS)
            return fsdp_json_fail(json, err, "a mesh has more than %d dims", FSDP_MAX_MESH_DIMS);
        FSDP_TRY(fsdp_json_string(json, &text, &size, err));
        if (size > FSDP_MAX_MESH_NAME || memchr(text, '\0', size))
            return fsdp_json_fail(json, err, "the name of a mesh dim is invalid");
        memcpy(mesh->names[mesh->name_count], text, size);
    }
}

static fsdp_status take_mesh_ranks(fsdp_state_reader *reader, mesh_record *mesh, fsdp_error *err)
{
    FSDP_TRY(fsdp_json_enter_array(reader->json, err));
    for (;;) {
        bool more;
        FSDP_TRY(fsdp_json_next_item(reader->json, &more, err));
        if (!more)
            return FSDP_OK;
        if (!fsdp_grow(&mesh->ranks, &mesh->rank_capacity, mesh->rank_count + 1,
                       sizeof *mesh->ranks))
            return fsdp_fail_memory(err, "the manifest");
        FSDP_TRY(take_rank(reader, &mesh->ranks[mesh->rank_count++], err));
    }
}

static fsdp_status take_mesh_member(fsdp_state_reader *reader, void *record, int which,
                                    fsdp_error *err)
{
    mesh_record *mesh = record;
    if (which == MESH_NAMES)
        return take_mesh_names(reader->json, mesh, err);
    if (which == MESH_SHAPE)
        return take_i64s(reader->json, mesh->shape, FSDP_MAX_MESH_DIMS, &mesh->ndim, err);
    return take_mesh_ranks(reader, mesh, err);
}

static fsdp_status check_mesh(fsdp_state_reader *reader, const mesh_record *mesh, uint64_t seen,
                              fsdp_error *err)
{
    if ((seen & 3) != 3 || mesh->ndim != mesh->name_count)
        return fsdp_json_fail(reader->json, err, "a mesh needs as many names as dims");
    int64_t size = 1;
    for (int i = 0; i < mesh->ndim; i++) {
        if (mesh->shape[i] < 1 || fsdp_mul_overflow(size, mesh->shape[i], &size))
            return fsdp_json_fail(reader->json, err, "the size of a mesh dim cannot be %" PRId64,
                                  mesh->shape[i]);
    }
    if (size > reader->world)
        return fsdp_json_fail(reader->json, err, "a mesh has %" PRId64 " ranks, but there are %d",
                              size, reader->world);
    if ((seen >> MESH_RANKS & 1) && mesh->rank_count != (size_t)size)
        return fsdp_json_fail(reader->json, err, "a mesh of %" PRId64 " ranks names %zu", size,
                              mesh->rank_count);
    return FSDP_OK;
}

static fsdp_status create_mesh(fsdp_state_reader *reader, const mesh_record *mesh, uint64_t seen,
                               fsdp_error *err)
{
    FSDP_TRY(check_mesh(reader, mesh, seen, err));
    const char *names[FSDP_MAX_MESH_DIMS];
    for (int i = 0; i < mesh->ndim; i++)
        names[i] = mesh->names[i];
    if (!fsdp_grow(&reader->meshes, &reader->mesh_capacity, reader->mesh_count + 1,
                   sizeof *reader->meshes))
        return fsdp_fail_memory(err, "the manifest");
    fsdp_status status = fsdp_mesh_create(mesh->ndim, mesh->shape, names,
                                          seen >> MESH_RANKS & 1 ? mesh->ranks : NULL,
                                          &reader->meshes[reader->mesh_count], &reader->reason);
    if (status == FSDP_OK)
        reader->mesh_count++;
    return refused(reader, status, err);
}

static fsdp_status take_mesh(fsdp_state_reader *reader, fsdp_error *err)
{
    static const char *const keys[MESH_KEYS] = {"names", "shape", "ranks"};
    static const record_kind kind = {keys, MESH_KEYS, take_mesh_member};
    mesh_record mesh = {0};
    uint64_t seen;
    fsdp_status status = take_members(reader, &kind, &mesh, &seen, err);
    if (status == FSDP_OK)
        status = create_mesh(reader, &mesh, seen, err);
    fsdp_free(mesh.ranks);
    return status;
}

/* --- flat buffers ---------------------------------------------------------------------- */

enum { FLAT_NAME, FLAT_DTYPE, FLAT_MESH, FLAT_COUNT, FLAT_KEYS };

static fsdp_status take_flat_member(fsdp_state_reader *reader, void *record, int which,
                                    fsdp_error *err)
{
    flat_record *flat = record;
    const char *name;
    int64_t mesh;
    switch (which) {
    case FLAT_NAME:
        FSDP_TRY(fsdp_json_string(reader->json, &name, &flat->name_size, err));
        flat->name = fsdp_arena_strndup(&reader->arena, name, flat->name_size);
        return flat->name ? FSDP_OK : fsdp_fail_memory(err, "the manifest");
    case FLAT_DTYPE: return take_dtype(reader->json, &flat->dtype, err);
    case FLAT_MESH:
        FSDP_TRY(fsdp_json_i64(reader->json, &mesh, err));
        FSDP_TRY(check_mesh_number(reader, mesh, err));
        flat->mesh = reader->meshes[mesh];
        return FSDP_OK;
    default: return fsdp_json_i64(reader->json, &flat->count, err);
    }
}

static fsdp_status take_flat(fsdp_state_reader *reader, fsdp_error *err)
{
    static const char *const keys[FLAT_KEYS] = {"name", "dtype", "mesh", "count"};
    static const record_kind kind = {keys, FLAT_KEYS, take_flat_member};
    flat_record flat = {0};
    uint64_t seen;
    FSDP_TRY(take_members(reader, &kind, &flat, &seen, err));
    if (seen != (1 << FLAT_KEYS) - 1)
        return fsdp_json_fail(reader->json, err, "a flat buffer has no name, dtype, mesh or count");
    if (!fsdp_grow(&reader->flats, &reader->flat_capacity, reader->flat_count + 1,
                   sizeof *reader->flats))
        return fsdp_fail_memory(err, "the manifest");
    reader->flats[reader->flat_count++] = flat;
    return FSDP_OK;
}

/* Adds the flat buffer whose parts were read, and those before `number` that have no parts. */
static fsdp_status finish_flats(fsdp_state_reader *reader, size_t number, fsdp_error *err)
{
    for (; reader->flats_done < number; reader->flats_done++) {
        const flat_record *flat = &reader->flats[reader->flats_done];
        fsdp_status status = fsdp_sd_add_flat(reader->sd, flat->name, flat->name_size,
                                              &(fsdp_flat_buffer){.dtype = flat->dtype,
                                                                  .mesh = flat->mesh,
                                                                  .count = flat->count,
                                                                  .parts = reader->parts,
                                                                  .part_count = reader->part_count},
                                              &reader->reason);
        FSDP_TRY(refused(reader, status, err));
        reader->part_count = 0;
    }
    return FSDP_OK;
}

static fsdp_status add_flat_part(fsdp_state_reader *reader, const entry_record *entry,
                                 fsdp_error *err)
{
    fsdp_json *json = reader->json;
    if (entry->flat < 0 || (uint64_t)entry->flat >= reader->flat_count)
        return fsdp_json_fail(json, err, "flat buffer %" PRId64 " is not one of %zu flat buffers",
                              entry->flat, reader->flat_count);
    if ((uint64_t)entry->flat < reader->flats_done)
        return fsdp_json_fail(json, err,
                              "the tensors of flat buffer %" PRId64 " do not follow one another",
                              entry->flat);
    FSDP_TRY(finish_flats(reader, (size_t)entry->flat, err));
    if (!fsdp_grow(&reader->parts, &reader->part_capacity, reader->part_count + 1,
                   sizeof *reader->parts))
        return fsdp_fail_memory(err, "the manifest");
    int64_t *shape = fsdp_arena_alloc(&reader->arena, (size_t)entry->ndim, sizeof *shape);
    char *name = fsdp_arena_strndup(&reader->arena, entry->name.data, entry->name.size);
    if (!shape || !name)
        return fsdp_fail_memory(err, "the manifest");
    memcpy(shape, entry->shape, (size_t)entry->ndim * sizeof *shape);
    reader->parts[reader->part_count++] = (fsdp_flat_part){.name = name,
                                                           .name_size = entry->name.size,
                                                           .ndim = entry->ndim,
                                                           .shape = shape,
                                                           .offset = entry->flat_offset};
    return FSDP_OK;
}

/* --- entries --------------------------------------------------------------------------- */

enum {
    ENTRY_NAME,
    ENTRY_DTYPE,
    ENTRY_SHAPE,
    ENTRY_MESH,
    ENTRY_PLACEMENTS,
    ENTRY_BOXES,
    ENTRY_FLAT,
    ENTRY_VALUE,
    ENTRY_ALIAS,
    ENTRY_STORED,
    ENTRY_PATH,
    ENTRY_TUPLES,
    ENTRY_WHOLE,
    ENTRY_KEYS
};

static bool take_digits(const char **at, const char *end, int64_t *value_out)
{
    const char *p = *at;
    if (p == end || *p < '0' || *p > '9' ||
        (*p == '0' && end - p > 1 && p[1] >= '0' && p[1] <= '9'))
        return false;
    int64_t value = 0;
    for (; p < end && *p >= '0' && *p <= '9'; p++) {
        if (fsdp_mul_overflow(value, 10, &value) || fsdp_add_overflow(value, *p - '0', &value))
            return false;
    }
    *at = p;
    *value_out = value;
    return true;
}

/* "R", "S0", "SS0/2" */
static bool parse_placement(const char *text, size_t size, fsdp_placement *placement_out)
{
    const char *at = text, *end = text + size;
    *placement_out = (fsdp_placement){.kind = FSDP_REPLICATE};
    if (size == 1 && *text == 'R')
        return true;
    bool strided = size > 2 && text[0] == 'S' && text[1] == 'S';
    int64_t dim;
    if (size < 2 || text[0] != 'S')
        return false;
    at += strided ? 2 : 1;
    if (!take_digits(&at, end, &dim) || dim >= FSDP_MAX_DIMS)
        return false;
    placement_out->kind = strided ? FSDP_STRIDED_SHARD : FSDP_SHARD;
    placement_out->dim = (int)dim;
    if (strided && (at == end || *at++ != '/' || !take_digits(&at, end, &placement_out->split)))
        return false;
    return at == end;
}

static fsdp_status take_placements(fsdp_json *json, entry_record *entry, fsdp_error *err)
{
    entry->placement_count = 0;
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (;; entry->placement_count++) {
        const char *text;
        size_t size;
        bool more;
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return FSDP_OK;
        if (entry->placement_count == FSDP_MAX_MESH_DIMS)
            return fsdp_json_fail(json, err, "there are more than %d placements",
                                  FSDP_MAX_MESH_DIMS);
        FSDP_TRY(fsdp_json_string(json, &text, &size, err));
        char name[40];
        if (!parse_placement(text, size, &entry->placement[entry->placement_count]))
            return fsdp_json_fail(json, err, "the placement '%s' is unknown",
                                  fsdp_printable(text, size, name, sizeof name));
    }
}

/* [rank, [offset per dim], [length per dim]] */
static fsdp_status take_box(fsdp_state_reader *reader, fsdp_rank_box *box, fsdp_error *err)
{
    fsdp_json *json = reader->json;
    *box = (fsdp_rank_box){.rank = 0};
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (int i = 0;; i++) {
        bool more;
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (more != (i < 3))
            return fsdp_json_fail(json, err, "a box is [rank, offsets, lengths]");
        if (!more)
            return FSDP_OK;
        if (i == 0)
            FSDP_TRY(take_rank(reader, &box->rank, err));
        else if (i == 1)
            FSDP_TRY(take_i64s(json, box->box.lo, FSDP_MAX_DIMS, &box->box.ndim, err));
        else
            FSDP_TRY(take_exactly(json, box->box.len, box->box.ndim, err));
    }
}

static fsdp_status take_boxes(fsdp_state_reader *reader, entry_record *entry, fsdp_error *err)
{
    entry->box_count = 0;
    FSDP_TRY(fsdp_json_enter_array(reader->json, err));
    for (;;) {
        bool more;
        FSDP_TRY(fsdp_json_next_item(reader->json, &more, err));
        if (!more)
            return FSDP_OK;
        if (entry->box_count == BOXES_MAX)
            return fsdp_json_fail(reader->json, err, "there are more than %d boxes", BOXES_MAX);
        if (!fsdp_grow(&entry->boxes, &entry->box_capacity, entry->box_count + 1,
                       sizeof *entry->boxes))
            return fsdp_fail_memory(err, "the manifest");
        FSDP_TRY(take_box(reader, &entry->boxes[entry->box_count++], err));
    }
}

static fsdp_status take_flat_place(fsdp_json *json, entry_record *entry, fsdp_error *err)
{
    int64_t place[2];
    FSDP_TRY(take_exactly(json, place, 2, err));
    entry->flat = place[0];
    entry->flat_offset = place[1];
    return FSDP_OK;
}

static fsdp_status take_entry_member(fsdp_state_reader *reader, void *record, int which,
                                     fsdp_error *err)
{
    entry_record *entry = record;
    fsdp_json *json = reader->json;
    switch (which) {
    case ENTRY_NAME: return take_text(json, &entry->name, err);
    case ENTRY_DTYPE: return take_dtype(json, &entry->dtype, err);
    case ENTRY_SHAPE: return take_i64s(json, entry->shape, FSDP_MAX_DIMS, &entry->ndim, err);
    case ENTRY_MESH: return fsdp_json_i64(json, &entry->mesh, err);
    case ENTRY_PLACEMENTS: return take_placements(json, entry, err);
    case ENTRY_BOXES: return take_boxes(reader, entry, err);
    case ENTRY_FLAT: return take_flat_place(json, entry, err);
    case ENTRY_VALUE: return fsdp_manifest_take_value(json, &entry->value, err);
    case ENTRY_STORED:
        return fsdp_manifest_take_stored(json, &entry->stored_kind, &entry->stored_size, err);
    case ENTRY_PATH: return manifest_take_path(json, &reader->paths, err);
    case ENTRY_TUPLES: return manifest_take_tuples(json, &reader->paths, err);
    case ENTRY_WHOLE: return manifest_take_whole(json, &reader->paths, err);
    default: return take_text(json, &entry->target, err);
    }
}

static fsdp_status add_stored_value(fsdp_state_reader *reader, const entry_record *entry,
                                    fsdp_error *err)
{
    fsdp_value none = {0};
    fsdp_status status =
        fsdp_sd_add_value(reader->sd, entry->name.data, entry->name.size, &none, &reader->reason);
    FSDP_TRY(refused(reader, status, err));
    if (!fsdp_grow(&reader->stored, &reader->stored_capacity, reader->stored_count + 1,
                   sizeof *reader->stored))
        return fsdp_fail_memory(err, "the manifest");
    reader->stored[reader->stored_count++] =
        (fsdp_stored_value){fsdp_sd_count(reader->sd) - 1, entry->stored_kind, entry->stored_size};
    return FSDP_OK;
}

static fsdp_status add_mesh_tensor(fsdp_state_reader *reader, const entry_record *entry,
                                   fsdp_error *err)
{
    FSDP_TRY(check_mesh_number(reader, entry->mesh, err));
    const fsdp_mesh *mesh = reader->meshes[entry->mesh];
    if (entry->placement_count != fsdp_mesh_ndim(mesh))
        return fsdp_json_fail(reader->json, err, "there are %d placements on a mesh of %d dims",
                              entry->placement_count, fsdp_mesh_ndim(mesh));
    fsdp_tensor tensor = {entry->dtype, entry->ndim, entry->shape, {.mesh = mesh}, NULL};
    memcpy(tensor.layout.placement, entry->placement, sizeof tensor.layout.placement);
    fsdp_status status = fsdp_sd_add_tensor(reader->sd, entry->name.data, entry->name.size, &tensor,
                                            &reader->reason);
    return refused(reader, status, err);
}

static fsdp_status add_box_tensor(fsdp_state_reader *reader, const entry_record *entry,
                                  fsdp_error *err)
{
    for (size_t i = 0; i < entry->box_count; i++) {
        if (entry->boxes[i].box.ndim != entry->ndim)
            return fsdp_json_fail(reader->json, err, "a box has %d dims, but its tensor has %d",
                                  entry->boxes[i].box.ndim, entry->ndim);
    }
    fsdp_layout layout = {
        .kind = FSDP_LAYOUT_BOXES, .boxes = entry->boxes, .box_count = entry->box_count};
    fsdp_status status = fsdp_sd_add_tensor(
        reader->sd, entry->name.data, entry->name.size,
        &(fsdp_tensor){entry->dtype, entry->ndim, entry->shape, layout, NULL}, &reader->reason);
    return refused(reader, status, err);
}

static fsdp_status add_plain_entry(fsdp_state_reader *reader, entry_record *entry, fsdp_error *err)
{
    enum {
        TENSOR = 1 << ENTRY_NAME | 1 << ENTRY_DTYPE | 1 << ENTRY_SHAPE,
        IN_MESH = TENSOR | 1 << ENTRY_MESH | 1 << ENTRY_PLACEMENTS,
        IN_BOXES = TENSOR | 1 << ENTRY_BOXES,
        VALUE = 1 << ENTRY_NAME | 1 << ENTRY_VALUE,
        STORED = 1 << ENTRY_NAME | 1 << ENTRY_STORED,
        ALIAS = 1 << ENTRY_NAME | 1 << ENTRY_ALIAS
    };
    /* the tensors of a flat buffer are consecutive, so any other entry ends the buffer */
    if (reader->part_count > 0)
        FSDP_TRY(finish_flats(reader, reader->flats_done + 1, err));
    switch (entry->seen) {
    case IN_MESH: return add_mesh_tensor(reader, entry, err);
    case IN_BOXES: return add_box_tensor(reader, entry, err);
    case VALUE:
        return refused(reader,
                       fsdp_sd_add_value(reader->sd, entry->name.data, entry->name.size,
                                         &entry->value, &reader->reason),
                       err);
    case STORED: return add_stored_value(reader, entry, err);
    case ALIAS:
        return refused(reader,
                       fsdp_sd_add_alias(reader->sd, entry->name.data, entry->name.size,
                                         entry->target.data, entry->target.size, &reader->reason),
                       err);
    default:
        return fsdp_json_fail(reader->json, err, "an entry is not a tensor, a value or an alias");
    }
}

static fsdp_status take_entry(fsdp_state_reader *reader, fsdp_error *err)
{
    static const char *const keys[ENTRY_KEYS] = {"name",  "dtype",  "shape", "mesh",  "placements",
                                                 "boxes", "flat",   "value", "alias", "stored",
                                                 "path",  "tuples", "whole"};
    static const record_kind kind = {keys, ENTRY_KEYS, take_entry_member};
    enum {
        IN_FLAT = 1 << ENTRY_NAME | 1 << ENTRY_SHAPE | 1 << ENTRY_FLAT,
        PATH = 1 << ENTRY_PATH | 1 << ENTRY_WHOLE,
        ANY_PATH = PATH | 1 << ENTRY_TUPLES
    };
    entry_record *entry = &reader->entry;
    reader->paths.path_count = 0; /* "tuples" refers to a path of the same entry */
    fsdp_status status = take_members(reader, &kind, entry, &entry->seen, err);
    if (status == FSDP_OK && (entry->seen & PATH) == PATH)
        status = fsdp_json_fail(reader->json, err, "an entry that is the whole object has a path");
    if (status == FSDP_OK && entry->seen & PATH && entry->seen & 1 << ENTRY_NAME)
        status =
            path_list_add(&reader->paths, reader->json, entry->name.data, entry->name.size, err);
    entry->seen &= ~(uint64_t)ANY_PATH;
    if (status == FSDP_OK && entry->seen == IN_FLAT)
        status = add_flat_part(reader, entry, err);
    else if (status == FSDP_OK)
        status = add_plain_entry(reader, entry, err);
    fsdp_value_release(&entry->value);
    return status;
}

/* --- the whole ---------------------------------------------------------------------------------- */

fsdp_status fsdp_state_reader_take(fsdp_state_reader **reader, fsdp_json *json, int world,
                                   fsdp_state_part part, fsdp_error *err)
{
    if (part == FSDP_STATE_MESHES) {
        FSDP_TRY(create_reader(json, world, reader, err));
        return take_records(*reader, take_mesh, err);
    }
    if (part == FSDP_STATE_FLATS)
        return take_records(*reader, take_flat, err);
    FSDP_TRY(take_records(*reader, take_entry, err));
    FSDP_TRY(finish_flats(*reader, (*reader)->flat_count, err));
    return path_list_apply(&(*reader)->paths, (*reader)->sd, err);
}

void fsdp_state_reader_end(fsdp_state_reader *reader, fsdp_manifest *manifest_out)
{
    if (!reader)
        return;
    if (manifest_out) {
        manifest_out->sd = reader->sd;
        manifest_out->stored = reader->stored;
        manifest_out->stored_count = reader->stored_count;
    } else {
        fsdp_sd_free(reader->sd);
        fsdp_free(reader->stored);
    }
    for (size_t i = 0; i < reader->mesh_count; i++)
        fsdp_mesh_free(reader->meshes[i]);
    fsdp_free(reader->meshes);
    fsdp_free(reader->flats);
    fsdp_free(reader->entry.name.data);
    fsdp_free(reader->entry.target.data);
    fsdp_free(reader->entry.boxes);
    path_list_release(&reader->paths);
    fsdp_value_release(&reader->entry.value);
    fsdp_free(reader->parts);
    fsdp_arena_release(&reader->arena);
    fsdp_free(reader);
}
