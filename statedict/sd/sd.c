/*
 * The state dict: an array of entries, a hash table over their names, and the copies of the meshes,
 * shapes and boxes that the entries point to. Every entry is checked when it is added, so that
 * planners, writers and readers need not check it again.
 */
#include <fsdp/sd.h>

#include "base/core/given.h"
#include "base/core/mem.h"
#include "base/data/box_internal.h"
#include "base/data/name_path.h"
#include "base/data/name_table.h"
#include "statedict/sd/layout_internal.h"
#include "base/text.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

struct fsdp_sd {
    fsdp_entry *entries;
    size_t count, capacity;
    fsdp_flat *flats;
    size_t flat_count, flat_capacity;
    fsdp_mesh **meshes;
    size_t mesh_count, mesh_capacity;
    fsdp_name_table names; /* of entries and flat buffers: entry_number and flat_number */
    fsdp_arena arena;      /* names, shapes, boxes */
    void **owned;          /* memory of tensors, from fsdp_sd_allocate */
    size_t owned_count, owned_capacity;
};

int64_t fsdp_sd_room(const fsdp_sd *sd)
{
    enum { RECORD_BYTES = 160 }; /* a name, a shape and how it is cut; small values take as much */
    return (int64_t)(sd->capacity * sizeof *sd->entries +
                     sd->names.capacity * sizeof *sd->names.slots + sd->count * RECORD_BYTES);
}

enum { NAME_TEXT = 200 };

/* Meshes are searched linearly: models have a handful, a hostile file may have millions. */
enum { MESHES_MOST = 4096 };

fsdp_status fsdp_sd_create(fsdp_sd **sd_out, fsdp_error *err)
{
    FSDP_NEED(err, sd_out);
    *sd_out = fsdp_alloc(1, sizeof **sd_out);
    return *sd_out ? FSDP_OK : fsdp_fail_memory(err, "a state dict");
}

void fsdp_sd_free(fsdp_sd *sd)
{
    if (!sd)
        return;
    for (size_t i = 0; i < sd->count; i++)
        fsdp_value_release(&sd->entries[i].value);
    for (size_t i = 0; i < sd->mesh_count; i++)
        fsdp_mesh_free(sd->meshes[i]);
    for (size_t i = 0; i < sd->owned_count; i++)
        fsdp_free(sd->owned[i]);
    fsdp_free(sd->owned);
    fsdp_free(sd->entries);
    fsdp_free(sd->flats);
    fsdp_free(sd->meshes);
    fsdp_name_table_release(&sd->names);
    fsdp_arena_release(&sd->arena);
    fsdp_free(sd);
}

/* --- names ------------------------------------------------------------------------------------ */

static uint64_t entry_number(size_t index)
{
    return 2 * (uint64_t)index;
}

static uint64_t flat_number(size_t index)
{
    return 2 * (uint64_t)index + 1;
}

/* Enters a name for which copy_name has reserved room. */
static void enter_name(fsdp_sd *sd, const char *name, size_t size, uint64_t number)
{
    (void)fsdp_name_table_put(&sd->names, name, size, number);
}

static void enter_all_names(fsdp_sd *sd)
{
    fsdp_name_table_clear(&sd->names);
    for (size_t i = 0; i < sd->count; i++)
        enter_name(sd, sd->entries[i].name, sd->entries[i].name_size, entry_number(i));
    for (size_t i = 0; i < sd->flat_count; i++)
        enter_name(sd, sd->flats[i].name, sd->flats[i].name_size, flat_number(i));
}

size_t fsdp_sd_tensor_of(const fsdp_sd *sd, size_t entry)
{
    const fsdp_entry *at = fsdp_sd_at(sd, entry);
    return at->kind == FSDP_ENTRY_ALIAS ? at->target : entry;
}

void fsdp_sd_expect(fsdp_sd *sd, size_t count)
{
    (void)fsdp_name_table_expect(&sd->names, sd->count + sd->flat_count + count);
    (void)fsdp_grow(&sd->entries, &sd->capacity, sd->count + count, sizeof *sd->entries);
}

static fsdp_status check_name(const fsdp_sd *sd, const char *name, size_t size, fsdp_error *err)
{
    char text[NAME_TEXT];
    if (!name && size > 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "a name of %zu bytes has no address: 'name' is NULL",
                         size);
    if (size > FSDP_MAX_NAME)
        return fsdp_fail(err, FSDP_ERR_USAGE, "name is %zu bytes long, at most 65,535 are allowed",
                         size);
    if (!fsdp_utf8_valid(name ? name : "", size))
        return fsdp_fail(err, FSDP_ERR_USAGE, "name is not UTF-8: '%s'",
                         fsdp_printable(name, size, text, sizeof text));
    if (fsdp_name_table_find(&sd->names, name, size))
        return fsdp_fail(err, FSDP_ERR_USAGE, "name '%s' is used twice",
                         fsdp_printable(name ? name : "", size, text, sizeof text));
    return FSDP_OK;
}

/* Checks a name, copies it into the arena and reserves memory for it in the table. */
static fsdp_status copy_name(fsdp_sd *sd, const char *name, size_t size, const char **copy_out,
                             fsdp_error *err)
{
    FSDP_TRY(check_name(sd, name, size, err));
    *copy_out = fsdp_arena_strndup(&sd->arena, name ? name : "", size);
    if (!*copy_out || !fsdp_name_table_expect(&sd->names, sd->count + sd->flat_count + 1))
        return fsdp_fail_memory(err, "a state dict");
    return FSDP_OK;
}

/* --- entries ---------------------------------------------------------------------------------- */

/* Fills in the name; the entry exists only once it is appended, which cannot fail. */
static fsdp_status begin_entry(fsdp_sd *sd, fsdp_entry_kind kind, const char *name, size_t size,
                               fsdp_entry *entry, fsdp_error *err)
{
    *entry = (fsdp_entry){.kind = kind, .name_size = size, .flat = -1};
    FSDP_TRY(copy_name(sd, name, size, &entry->name, err));
    if (!fsdp_grow(&sd->entries, &sd->capacity, sd->count + 1, sizeof *sd->entries))
        return fsdp_fail_memory(err, "a state dict");
    return FSDP_OK;
}

static void append_entry(fsdp_sd *sd, const fsdp_entry *entry)
{
    sd->entries[sd->count++] = *entry;
    enter_name(sd, entry->name, entry->name_size, entry_number(sd->count - 1));
}

/* The one copy of an equal mesh that the state dict keeps; made when there is none. */
static fsdp_status intern_mesh(fsdp_sd *sd, const fsdp_mesh *mesh, const fsdp_mesh **copy_out,
                               fsdp_error *err)
{
    for (size_t i = sd->mesh_count; i-- > 0;) {
        if (fsdp_mesh_equal(sd->meshes[i], mesh)) {
            *copy_out = sd->meshes[i];
            return FSDP_OK;
        }
    }
    if (sd->mesh_count == MESHES_MOST)
        return fsdp_fail(err, FSDP_ERR_USAGE, "a state dict has more than %d different meshes",
                         MESHES_MOST);
    if (!fsdp_grow(&sd->meshes, &sd->mesh_capacity, sd->mesh_count + 1, sizeof *sd->meshes))
        return fsdp_fail_memory(err, "a state dict");
    FSDP_TRY(fsdp_mesh_copy(mesh, &sd->meshes[sd->mesh_count], err));
    *copy_out = sd->meshes[sd->mesh_count++];
    return FSDP_OK;
}

static fsdp_status copy_boxes(fsdp_sd *sd, const fsdp_layout *layout, fsdp_layout *copy,
                              fsdp_error *err)
{
    fsdp_rank_box *boxes = fsdp_arena_alloc(&sd->arena, layout->box_count, sizeof *boxes);
    fsdp_box_copy *copies = fsdp_arena_alloc(&sd->arena, layout->box_count, sizeof *copies);
    if (!boxes || !copies)
        return fsdp_fail_memory(err, "a state dict");
    if (layout->box_count > 0)
        memcpy(boxes, layout->boxes, layout->box_count * sizeof *boxes);
    copy->boxes = boxes;
    copy->box_count = layout->box_count;
    copy->copies = copies;
    return fsdp_layout_count_copies(copy, copies, err);
}

/* Only what the kind uses is copied, the rest is zero: equal layouts have equal members. */
static fsdp_status copy_layout(fsdp_sd *sd, const fsdp_layout *layout, fsdp_layout *copy,
                               fsdp_error *err)
{
    *copy = (fsdp_layout){.kind = layout->kind};
    if (layout->kind == FSDP_LAYOUT_BOXES)
        return copy_boxes(sd, layout, copy, err);
    FSDP_TRY(intern_mesh(sd, layout->mesh, &copy->mesh, err));
    if (layout->kind == FSDP_LAYOUT_FLAT) {
        copy->flat_count = layout->flat_count;
        copy->flat_offset = layout->flat_offset;
        return FSDP_OK;
    }
    for (int i = 0; i < fsdp_mesh_ndim(copy->mesh); i++) {
        fsdp_placement placement = layout->placement[i];
        copy->placement[i].kind = placement.kind;
        copy->placement[i].dim = placement.kind == FSDP_REPLICATE ? 0 : placement.dim;
        copy->placement[i].split = placement.kind == FSDP_STRIDED_SHARD ? placement.split : 0;
    }
    return FSDP_OK;
}

static fsdp_status check_tensor(const fsdp_tensor *tensor, fsdp_error *err)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(tensor->dtype);
    if (!info)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the dtype %d is unknown", (int)tensor->dtype);
    size_t most = info->values > info->size ? info->values : info->size; /* both are counted */
    FSDP_TRY(fsdp_shape_check(tensor->ndim, tensor->shape, most, err));
    return fsdp_layout_check(&tensor->layout, tensor->ndim, tensor->shape, err);
}

/* Fills in the entry, but for its memory. */
static fsdp_status copy_tensor(fsdp_sd *sd, const fsdp_tensor *tensor, fsdp_entry *entry,
                               fsdp_error *err)
{
    FSDP_TRY(check_tensor(tensor, err));
    int64_t *shape = fsdp_arena_alloc(&sd->arena, (size_t)tensor->ndim, sizeof *shape);
    if (!shape)
        return fsdp_fail_memory(err, "a state dict");
    for (int i = 0; i < tensor->ndim; i++)
        shape[i] = tensor->shape[i];
    entry->dtype = tensor->dtype;
    entry->ndim = tensor->ndim;
    entry->shape = shape;
    return copy_layout(sd, &tensor->layout, &entry->layout, err);
}

static fsdp_status begin_tensor(fsdp_sd *sd, const char *name, size_t name_size,
                                const fsdp_tensor *tensor, fsdp_entry *entry, fsdp_error *err)
{
    FSDP_TRY(begin_entry(sd, FSDP_ENTRY_TENSOR, name, name_size, entry, err));
    fsdp_status status = copy_tensor(sd, tensor, entry, err);
    if (status != FSDP_OK) {
        char text[NAME_TEXT];
        fsdp_error_prefix(err, "tensor '%s'",
                          fsdp_printable(entry->name, name_size, text, sizeof text));
    }
    return status;
}

fsdp_status fsdp_sd_add_tensor(fsdp_sd *sd, const char *name, size_t name_size,
                               const fsdp_tensor *tensor, fsdp_error *err)
{
    FSDP_NEED(err, sd, tensor);
    fsdp_entry entry;
    FSDP_TRY(begin_tensor(sd, name, name_size, tensor, &entry, err));
    entry.data = tensor->data;
    append_entry(sd, &entry);
    return FSDP_OK;
}

fsdp_status fsdp_sd_add_value(fsdp_sd *sd, const char *name, size_t name_size,
                              const fsdp_value *value, fsdp_error *err)
{
    FSDP_NEED(err, sd, value);
    fsdp_entry entry;
    FSDP_TRY(begin_entry(sd, FSDP_ENTRY_VALUE, name, name_size, &entry, err));
    fsdp_status status = fsdp_value_copy(value, &entry.value, err);
    if (status != FSDP_OK) {
        char text[NAME_TEXT];
        fsdp_error_prefix(err, "value '%s'",
                          fsdp_printable(entry.name, name_size, text, sizeof text));
        return status;
    }
    append_entry(sd, &entry);
    return FSDP_OK;
}

fsdp_status fsdp_sd_add_alias(fsdp_sd *sd, const char *name, size_t name_size, const char *target,
                              size_t target_size, fsdp_error *err)
{
    FSDP_NEED(err, sd);
    if (target_size > 0)
        FSDP_NEED(err, target);
    fsdp_entry entry;
    FSDP_TRY(begin_entry(sd, FSDP_ENTRY_ALIAS, name, name_size, &entry, err));
    int64_t index = fsdp_sd_find(sd, target, target_size);
    if (index >= 0 && sd->entries[index].kind == FSDP_ENTRY_ALIAS)
        index = (int64_t)sd->entries[index].target;
    if (index < 0 || sd->entries[index].kind != FSDP_ENTRY_TENSOR) {
        char name_text[NAME_TEXT], target_text[NAME_TEXT];
        return fsdp_fail(
            err, FSDP_ERR_USAGE, "alias '%s' names '%s', which is %s",
            fsdp_printable(entry.name, name_size, name_text, sizeof name_text),
            fsdp_printable(target ? target : "", target_size, target_text, sizeof target_text),
            index < 0 ? "not in the state dict: add that tensor first" : "not a tensor");
    }
    entry.target = (size_t)index;
    append_entry(sd, &entry);
    return FSDP_OK;
}

/* --- flat buffers ----------------------------------------------------------------------------- */

static fsdp_status add_flat_buffer(fsdp_sd *sd, const fsdp_flat *flat, fsdp_error *err)
{
    fsdp_flat copy = *flat;
    FSDP_TRY(copy_name(sd, flat->name, flat->name_size, &copy.name, err));
    /* As a layout, the buffer is one tensor that fills it. */
    fsdp_layout layout = {.kind = FSDP_LAYOUT_FLAT, .mesh = flat->mesh, .flat_count = flat->count};
    fsdp_tensor whole = {flat->dtype, 1, &flat->count, layout, NULL};
    fsdp_status status = check_tensor(&whole, err);
    if (status == FSDP_OK)
        status = intern_mesh(sd, flat->mesh, &copy.mesh, err);
    if (status == FSDP_OK &&
        !fsdp_grow(&sd->flats, &sd->flat_capacity, sd->flat_count + 1, sizeof *sd->flats))
        status = fsdp_fail_memory(err, "a state dict");
    if (status != FSDP_OK) {
        char text[NAME_TEXT];
        fsdp_error_prefix(err, "flat buffer '%s'",
                          fsdp_printable(copy.name, copy.name_size, text, sizeof text));
        return status;
    }
    sd->flats[sd->flat_count++] = copy;
    enter_name(sd, copy.name, copy.name_size, flat_number(sd->flat_count - 1));
    return FSDP_OK;
}

static int64_t element_count(const fsdp_entry *entry)
{
    return fsdp_shape_count(entry->ndim, entry->shape);
}

static fsdp_status add_flat_part(fsdp_sd *sd, const fsdp_flat_part *part, int rank, fsdp_error *err)
{
    size_t number = sd->flat_count - 1;
    const fsdp_flat *flat = &sd->flats[number];
    fsdp_layout layout = {.kind = FSDP_LAYOUT_FLAT,
                          .mesh = flat->mesh,
                          .flat_count = flat->count,
                          .flat_offset = part->offset};
    fsdp_tensor tensor = {flat->dtype, part->ndim, part->shape, layout, NULL};
    fsdp_entry entry;
    FSDP_TRY(begin_tensor(sd, part->name, part->name_size, &tensor, &entry, err));
    size_t size = fsdp_dtype_size(entry.dtype);
    int64_t start = fsdp_layout_flat_start(&entry.layout, element_count(&entry), rank);
    if (flat->data && start >= 0)
        entry.data = (char *)flat->data + (size_t)start * size;
    entry.flat = (int)number;
    append_entry(sd, &entry);
    return FSDP_OK;
}

/* By place in the buffer; tensors without elements come first, where they overlap nothing. */
static int compare_places(const void *left, const void *right)
{
    const fsdp_entry *a = *(const fsdp_entry *const *)left;
    const fsdp_entry *b = *(const fsdp_entry *const *)right;
    int64_t a_place = element_count(a) > 0 ? a->layout.flat_offset : -1;
    int64_t b_place = element_count(b) > 0 ? b->layout.flat_offset : -1;
    return (a_place > b_place) - (a_place < b_place);
}

/* Checks that entries first .. count - 1, the parts of one flat buffer, do not overlap. */
static fsdp_status check_parts_apart(const fsdp_sd *sd, size_t first, fsdp_error *err)
{
    size_t n = sd->count - first;
    const fsdp_entry **sorted = fsdp_alloc(n, sizeof *sorted);
    if (!sorted)
        return fsdp_fail_memory(err, "a state dict");
    for (size_t i = 0; i < n; i++)
        sorted[i] = &sd->entries[first + i];
    qsort(sorted, n, sizeof *sorted, compare_places);
    fsdp_status status = FSDP_OK;
    for (size_t i = 1; i < n && status == FSDP_OK; i++) {
        const fsdp_entry *a = sorted[i - 1], *b = sorted[i];
        if (element_count(a) == 0 ||
            a->layout.flat_offset + element_count(a) <= b->layout.flat_offset)
            continue;
        char a_text[NAME_TEXT], b_text[NAME_TEXT];
        status =
            fsdp_fail(err, FSDP_ERR_USAGE, "tensors '%s' and '%s' overlap in their flat buffer",
                      fsdp_printable(a->name, a->name_size, a_text, sizeof a_text),
                      fsdp_printable(b->name, b->name_size, b_text, sizeof b_text));
    }
    fsdp_free(sorted);
    return status;
}

fsdp_status fsdp_sd_add_flat(fsdp_sd *sd, const char *name, size_t name_size,
                             const fsdp_flat_buffer *buffer, fsdp_error *err)
{
    FSDP_NEED(err, sd, buffer);
    fsdp_flat flat = {.name = name,
                      .name_size = name_size,
                      .dtype = buffer->dtype,
                      .mesh = buffer->mesh,
                      .count = buffer->count,
                      .data = buffer->data};
    size_t first = sd->count;
    FSDP_TRY(add_flat_buffer(sd, &flat, err));
    fsdp_status status = FSDP_OK;
    for (size_t i = 0; i < buffer->part_count && status == FSDP_OK; i++)
        status = add_flat_part(sd, &buffer->parts[i], buffer->rank, err);
    if (status == FSDP_OK)
        status = check_parts_apart(sd, first, err);
    if (status != FSDP_OK) {
        sd->count = first;
        sd->flat_count--;
        enter_all_names(sd);
    }
    return status;
}

size_t fsdp_sd_flat_count(const fsdp_sd *sd)
{
    return sd->flat_count;
}

const fsdp_flat *fsdp_sd_flat_at(const fsdp_sd *sd, size_t index)
{
    return index < sd->flat_count ? &sd->flats[index] : NULL;
}

/* --- queries and changes ---------------------------------------------------------------------- */

size_t fsdp_sd_count(const fsdp_sd *sd)
{
    if (!sd)
        return 0;
    return sd->count;
}

const fsdp_entry *fsdp_sd_at(const fsdp_sd *sd, size_t index)
{
    if (!sd)
        return NULL;
    return index < sd->count ? &sd->entries[index] : NULL;
}

int64_t fsdp_sd_find(const fsdp_sd *sd, const char *name, size_t name_size)
{
    if (!sd || (!name && name_size > 0))
        return -1;
    const uint64_t *number = fsdp_name_table_find(&sd->names, name, name_size);
    return number && *number % 2 == 0 ? (int64_t)(*number / 2) : -1;
}

void fsdp_sd_set_data(fsdp_sd *sd, size_t index, void *data)
{
    if (!sd)
        return;
    if (index < sd->count && sd->entries[index].kind == FSDP_ENTRY_TENSOR)
        sd->entries[index].data = data;
}

void fsdp_sd_set_value(fsdp_sd *sd, size_t index, fsdp_value *value)
{
    if (!sd || !value)
        return;
    fsdp_value taken = *value;
    *value = (fsdp_value){0};
    if (index < sd->count && sd->entries[index].kind == FSDP_ENTRY_VALUE) {
        fsdp_value_release(&sd->entries[index].value);
        sd->entries[index].value = taken;
    } else {
        fsdp_value_release(&taken);
    }
}

int64_t fsdp_entry_bytes(const fsdp_entry *entry)
{
    if (!entry)
        return 0;
    if (entry->kind != FSDP_ENTRY_TENSOR)
        return 0;
    return element_count(entry) * (int64_t)fsdp_dtype_size(entry->dtype);
}

int64_t fsdp_sd_tensor_bytes(const fsdp_sd *sd)
{
    int64_t bytes = 0;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++)
        if (fsdp_sd_at(sd, i)->kind == FSDP_ENTRY_TENSOR)
            bytes += fsdp_entry_bytes(fsdp_sd_at(sd, i));
    return bytes;
}

int64_t fsdp_entry_local_bytes(const fsdp_entry *entry, int rank)
{
    if (!entry)
        return 0;
    if (entry->kind != FSDP_ENTRY_TENSOR)
        return 0;
    int64_t elements = 0;
    size_t boxes = fsdp_layout_box_count(&entry->layout, entry->ndim, entry->shape, rank);
    for (size_t i = 0; i < boxes; i++) {
        fsdp_box box;
        fsdp_layout_box_at(&entry->layout, entry->ndim, entry->shape, rank, i, &box);
        elements += fsdp_box_count(&box);
    }
    return elements * (int64_t)fsdp_dtype_size(entry->dtype);
}

/* --- nesting ---------------------------------------------------------------------------------- */

fsdp_status fsdp_sd_set_path(fsdp_sd *sd, size_t index, const int32_t *path, size_t count,
                             fsdp_error *err)
{
    FSDP_NEED(err, sd, path);
    const fsdp_entry *entry = fsdp_sd_at(sd, index);
    char text[NAME_TEXT];
    if (!entry || !fsdp_path_fits(entry->name, entry->name_size, path, count))
        return fsdp_fail(err, FSDP_ERR_USAGE, "the path does not spell the name '%s'",
                         entry ? fsdp_printable(entry->name, entry->name_size, text, sizeof text)
                               : "");
    int32_t *copy = fsdp_arena_alloc(&sd->arena, count, sizeof *copy);
    if (!copy)
        return fsdp_fail_memory(err, "a state dict");
    memcpy(copy, path, count * sizeof *copy);
    sd->entries[index].path = copy;
    sd->entries[index].path_count = count;
    return FSDP_OK;
}

/* --- many tensors ----------------------------------------------------------------------------- */

/* Where the arrays whose elements differ in size have been read. */
typedef struct tensors_at {
    size_t name, path, shape;
} tensors_at;

static fsdp_status add_next(fsdp_sd *sd, const fsdp_tensors *tensors, size_t i, tensors_at *at,
                            fsdp_error *err)
{
    int32_t name_size = tensors->name_sizes[i], path_count = tensors->path_counts[i];
    int32_t ndim = tensors->ndims[i], layout = tensors->layout_numbers[i];
    if (name_size < 0 || path_count < 0 || ndim < 0 || layout < 0 ||
        (size_t)layout >= tensors->layout_count)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "tensor %zu has a negative size, or a layout that is not among them", i);
    fsdp_tensor tensor = {.dtype = tensors->dtypes[i],
                          .ndim = ndim,
                          .shape = tensors->shapes + at->shape,
                          .layout = tensors->layouts[layout],
                          .data = tensors->data[i]};
    FSDP_TRY(fsdp_sd_add_tensor(sd, tensors->names + at->name, (size_t)name_size, &tensor, err));
    if (path_count > 0)
        FSDP_TRY(fsdp_sd_set_path(sd, sd->count - 1, tensors->paths + at->path, (size_t)path_count,
                                  err));
    at->name += (size_t)name_size;
    at->path += (size_t)path_count;
    at->shape += (size_t)ndim;
    return FSDP_OK;
}

fsdp_status fsdp_sd_add_tensors(fsdp_sd *sd, const fsdp_tensors *tensors, fsdp_error *err)
{
    FSDP_NEED(err, sd, tensors);
    if (tensors->count == 0)
        return FSDP_OK;
    FSDP_NEED(err, tensors->names, tensors->name_sizes, tensors->path_counts, tensors->dtypes);
    FSDP_NEED(err, tensors->ndims, tensors->layouts, tensors->layout_numbers, tensors->data);
    fsdp_sd_expect(sd, tensors->count);
    tensors_at at = {0};
    for (size_t i = 0; i < tensors->count; i++)
        FSDP_TRY(add_next(sd, tensors, i, &at, err));
    return FSDP_OK;
}

/* --- memory ----------------------------------------------------------------------------------- */

/*
 * Page-aligned when large. The kernel copies between a file's page and memory at a third of its
 * speed when one lies a few bytes after the other within their pages, as malloc's headers have it.
 */
enum { LARGE_BYTES = 64 << 10, LARGE_ALIGNMENT = 4096, SMALL_ALIGNMENT = 64 };

static void *aligned_up(void *data, size_t alignment)
{
    return (void *)(((uintptr_t)data + alignment - 1) / alignment * alignment);
}

static fsdp_status allocate_entry(fsdp_sd *sd, size_t index, int rank, fsdp_error *err)
{
    int64_t bytes = fsdp_entry_local_bytes(&sd->entries[index], rank);
    if (bytes == 0)
        return FSDP_OK;
    size_t alignment = bytes >= LARGE_BYTES ? LARGE_ALIGNMENT : SMALL_ALIGNMENT;
    void *data = fsdp_grow(&sd->owned, &sd->owned_capacity, sd->owned_count + 1, sizeof *sd->owned)
                     ? fsdp_alloc(1, (size_t)bytes + alignment)
                     : NULL;
    if (!data)
        return fsdp_fail_memory(err, "the tensors of a state dict");
    sd->owned[sd->owned_count++] = data;
    sd->entries[index].data = aligned_up(data, alignment);
    return FSDP_OK;
}

fsdp_status fsdp_sd_allocate(fsdp_sd *sd, int rank, fsdp_error *err)
{
    FSDP_NEED(err, sd);
    for (size_t i = 0; i < sd->count; i++) {
        if (sd->entries[i].kind == FSDP_ENTRY_TENSOR && !sd->entries[i].data)
            FSDP_TRY(allocate_entry(sd, i, rank, err));
    }
    return FSDP_OK;
}
