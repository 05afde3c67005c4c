/*
 * Reads meshes, flat buffers and entries of the manifest and adds them to a state dict, which
 * checks names, shapes and layouts. The writer is manifest_state.c. No count in the text decides an
 * allocation; memory grows with the bytes that were read.
 */
#include "statedict/manifest/manifest_internal.h"

#include "base/core/mem.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

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

fsdp_status fsdp_state_reader_create(fsdp_json *json, int world, fsdp_state_reader **reader_out,
                                     fsdp_error *err)
{
    *reader_out = fsdp_alloc(1, sizeof **reader_out);
    if (!*reader_out)
        return fsdp_fail_memory(err, "the manifest");
    (*reader_out)->json = json;
    (*reader_out)->world = world;
    fsdp_status status = fsdp_sd_create(&(*reader_out)->sd, err);
    if (status != FSDP_OK) {
        fsdp_state_reader_free(*reader_out);
        *reader_out = NULL;
    }
    return status;
}

void fsdp_state_reader_free(fsdp_state_reader *reader)
{
    if (!reader)
        return;
    fsdp_sd_free(reader->sd);
    for (size_t i = 0; i < reader->mesh_count; i++)
        fsdp_mesh_free(reader->meshes[i]);
    fsdp_free(reader->meshes);
    fsdp_free(reader->flats);
    fsdp_free(reader->entry.name.data);
    fsdp_free(reader->entry.target.data);
    fsdp_free(reader->entry.boxes);
    fsdp_path_list_release(&reader->paths);
    fsdp_value_release(&reader->entry.value);
    fsdp_free(reader->parts);
    fsdp_free(reader->stored);
    fsdp_arena_release(&reader->arena);
    fsdp_free(reader);
}

void fsdp_state_reader_move(fsdp_state_reader *reader, fsdp_manifest *manifest_out)
{
    manifest_out->sd = reader->sd;
    manifest_out->stored = reader->stored;
    manifest_out->stored_count = reader->stored_count;
    reader->sd = NULL;
    reader->stored = NULL;
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
            return fsdp_json_fail(json, err, "more than %d numbers", room);
        FSDP_TRY(fsdp_json_i64(json, &values_out[n], err));
    }
}

static fsdp_status take_exactly(fsdp_json *json, int64_t *values_out, int n, fsdp_error *err)
{
    int found = 0;
    FSDP_TRY(take_i64s(json, values_out, n, &found, err));
    if (found != n)
        return fsdp_json_fail(json, err, "%d numbers where %d were expected", found, n);
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
        return fsdp_json_fail(json, err, "unknown dtype '%s'",
                              fsdp_printable(text, size, name, sizeof name));
    return FSDP_OK;
}

static fsdp_status take_rank(fsdp_state_reader *reader, int *rank_out, fsdp_error *err)
{
    int64_t rank;
    FSDP_TRY(fsdp_json_i64(reader->json, &rank, err));
    if (rank < 0 || rank >= reader->world)
        return fsdp_json_fail(reader->json, err, "rank %" PRId64 " of %d", rank, reader->world);
    *rank_out = (int)rank;
    return FSDP_OK;
}

static fsdp_status check_mesh_number(fsdp_state_reader *reader, int64_t number, fsdp_error *err)
{
    if (number < 0 || (uint64_t)number >= reader->mesh_count)
        return fsdp_json_fail(reader->json, err, "mesh %" PRId64 " of %zu", number,
                              reader->mesh_count);
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
            return fsdp_json_fail(json, err, "a mesh of more than %d dims", FSDP_MAX_MESH_DIMS);
        FSDP_TRY(fsdp_json_string(json, &text, &size, err));
        if (size > FSDP_MAX_MESH_NAME || memchr(text, '\0', size))
            return fsdp_json_fail(json, err, "a bad name of a mesh dim");
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
            return fsdp_json_fail(reader->json, err, "a mesh dim of size %" PRId64, mesh->shape[i]);
    }
    if (size > reader->world)
        return fsdp_json_fail(reader->json, err, "a mesh of %" PRId64 " ranks, there are %d", size,
                              reader->world);
    if ((seen >> MESH_RANKS & 1) && mesh->rank_count != (size_t)size)
        return fsdp_json_fail(reader->json, err, "a mesh of %" PRId64 " ranks that names %zu", size,
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

fsdp_status fsdp_state_reader_take_meshes(fsdp_state_reader *reader, fsdp_error *err)
{
    return take_records(reader, take_mesh, err);
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
        return fsdp_json_fail(reader->json, err,
                              "a flat buffer without name, dtype, mesh or count");
    if (!fsdp_grow(&reader->flats, &reader->flat_capacity, reader->flat_count + 1,
                   sizeof *reader->flats))
        return fsdp_fail_memory(err, "the manifest");
    reader->flats[reader->flat_count++] = flat;
    return FSDP_OK;
}

fsdp_status fsdp_state_reader_take_flats(fsdp_state_reader *reader, fsdp_error *err)
{
    return take_records(reader, take_flat, err);
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
        return fsdp_json_fail(json, err, "flat buffer %" PRId64 " of %zu", entry->flat,
                              reader->flat_count);
    if ((uint64_t)entry->flat < reader->flats_done)
        return fsdp_json_fail(json, err, "the tensors of flat buffer %" PRId64 " stand apart",
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
            return fsdp_json_fail(json, err, "more than %d placements", FSDP_MAX_MESH_DIMS);
        FSDP_TRY(fsdp_json_string(json, &text, &size, err));
        char name[40];
        if (!parse_placement(text, size, &entry->placement[entry->placement_count]))
            return fsdp_json_fail(json, err, "unknown placement '%s'",
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
        if (entry->box_count == FSDP_MANIFEST_BOXES_MAX)
            return fsdp_json_fail(reader->json, err, "more than %d boxes", FSDP_MANIFEST_BOXES_MAX);
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
    case ENTRY_PATH: return fsdp_manifest_take_path(json, &reader->paths, err);
    case ENTRY_TUPLES: return fsdp_manifest_take_tuples(json, &reader->paths, err);
    case ENTRY_WHOLE: return fsdp_manifest_take_whole(json, &reader->paths, err);
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
        return fsdp_json_fail(reader->json, err, "%d placements on a mesh of %d dims",
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
            return fsdp_json_fail(reader->json, err, "a box of %d dims in a tensor of %d",
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
    default: return fsdp_json_fail(reader->json, err, "an entry that is no tensor, value or alias");
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
        status = fsdp_json_fail(reader->json, err, "an entry with a path that is the whole object");
    if (status == FSDP_OK && entry->seen & PATH && entry->seen & 1 << ENTRY_NAME)
        status = fsdp_path_list_add(&reader->paths, reader->json, entry->name.data,
                                    entry->name.size, err);
    entry->seen &= ~(uint64_t)ANY_PATH;
    if (status == FSDP_OK && entry->seen == IN_FLAT)
        status = add_flat_part(reader, entry, err);
    else if (status == FSDP_OK)
        status = add_plain_entry(reader, entry, err);
    fsdp_value_release(&entry->value);
    return status;
}

fsdp_status fsdp_state_reader_take_entries(fsdp_state_reader *reader, fsdp_error *err)
{
    FSDP_TRY(take_records(reader, take_entry, err));
    FSDP_TRY(finish_flats(reader, reader->flat_count, err));
    return fsdp_path_list_apply(&reader->paths, reader->sd, err);
}
