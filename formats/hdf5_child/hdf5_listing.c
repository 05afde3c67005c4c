/*
 * Checks the listing that the child wrote and fills a catalog. The child may have sent anything:
 * counts are bounded by the bytes present, numbers by HDF5's limits, and the builder checks the
 * rest.
 */
#include "formats/hdf5_child/hdf5_listing.h"

#include "base/data/box_internal.h"
#include "formats/hdf5_child/hdf5_protocol.h"
#include "base/data/name_table.h"
#include "formats/hdf5/hdf5_link_name.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

enum { NAME_SHOWN = 200, RATIO = 1000 };
#define LARGE ((int64_t)4 << 30)
#define LARGEST_CHUNK ((int64_t)4 << 30)

typedef struct text_view {
    const char *data;
    size_t size;
} text_view;

typedef struct listing {
    const char *at, *end;
    fsdp_source *source;
    const fsdp_h5_place *place;
    fsdp_h5_tensors *tensors;
    int64_t dataset; /* number of the next one */
    bool is_native;  /* a native shard file: names are escaped, types are marked */
    fsdp_text attributes, links;
    fsdp_name_table seen; /* paths that have attributes */
    text_view object;     /* the object whose attributes are being written */
    bool is_open;         /* its JSON bracket is open */
    fsdp_error *err;
} listing;

/* --- bytes ------------------------------------------------------------------------------------ */

static fsdp_status fail_listing(const listing *list, const char *what)
{
    return fsdp_fail(
        list->err, FSDP_ERR_REFUSED,
        "'%s': the HDF5 library failed on this file: its process sent an invalid list (%s)",
        fsdp_source_path(list->source), what);
}

static bool take(listing *list, void *out, size_t size)
{
    if ((size_t)(list->end - list->at) < size)
        return false;
    if (size > 0)
        memcpy(out, list->at, size);
    list->at += size;
    return true;
}

static bool take_u8(listing *list, unsigned *out)
{
    unsigned char byte = 0;
    bool ok = take(list, &byte, 1);
    *out = byte;
    return ok;
}

static bool take_text(listing *list, text_view *out)
{
    uint32_t size;
    if (!take(list, &size, sizeof size) || (size_t)(list->end - list->at) < size)
        return false;
    *out = (text_view){list->at, size};
    list->at += size;
    return true;
}

static bool take_shape(listing *list, fsdp_box *out)
{
    unsigned ndim;
    *out = (fsdp_box){.ndim = 0};
    if (!take_u8(list, &ndim) || ndim > FSDP_MAX_DIMS)
        return false;
    out->ndim = (int)ndim;
    return take(list, out->len, ndim * sizeof out->len[0]);
}

/* --- values ----------------------------------------------------------------------------------- */

static size_t least_size(unsigned kind)
{
    switch (kind) {
    case 'b': return 1;
    case 'i':
    case 'u':
    case 'f': return 8;
    case 'z': return 16;
    case 's': return 4;
    default: return 0;
    }
}

static fsdp_status take_string(listing *list, fsdp_value *out)
{
    text_view text;
    if (!take_text(list, &text))
        return fail_listing(list, "a value is cut off");
    fsdp_value_kind kind =
        fsdp_utf8_valid(text.data, text.size) ? FSDP_VALUE_STRING : FSDP_VALUE_BYTES;
    return fsdp_value_set_bytes(out, kind, text.data, text.size, list->err);
}

static fsdp_status take_element(listing *list, unsigned kind, fsdp_value *out)
{
    unsigned char byte;
    bool ok = true;
    if (kind == 's')
        return take_string(list, out);
    *out = (fsdp_value){.kind = FSDP_VALUE_NULL};
    if (kind == 'b') {
        ok = take(list, &byte, 1);
        *out = fsdp_value_bool(ok && byte != 0);
    } else if (kind == 'i') {
        out->kind = FSDP_VALUE_I64;
        ok = take(list, &out->as.i64, 8);
    } else if (kind == 'u') {
        out->kind = FSDP_VALUE_U64;
        ok = take(list, &out->as.u64, 8);
    } else if (kind == 'f') {
        out->kind = FSDP_VALUE_F64;
        ok = take(list, &out->as.f64, 8);
    } else {
        out->kind = FSDP_VALUE_COMPLEX;
        ok = take(list, out->as.complex_parts, 16);
    }
    return ok ? FSDP_OK : fail_listing(list, "a value is cut off");
}

/* Recursion depth is at most the number of dims. */
static fsdp_status take_elements(listing *list, unsigned kind, int ndim, const int64_t *shape,
                                 fsdp_value *out)
{
    if (ndim == 0)
        return take_element(list, kind, out);
    FSDP_TRY(fsdp_value_set_items(out, FSDP_VALUE_LIST, (size_t)shape[0], list->err));
    for (int64_t i = 0; i < shape[0]; i++)
        FSDP_TRY(take_elements(list, kind, ndim - 1, shape + 1, &out->as.list.items[i]));
    return FSDP_OK;
}

/* An empty array becomes an empty list, whatever its other dims are. */
static fsdp_status take_array(listing *list, unsigned kind, fsdp_value *out)
{
    fsdp_box whole;
    size_t size = least_size(kind);
    if (size == 0 || !take_shape(list, &whole) ||
        fsdp_shape_check(whole.ndim, whole.len, size, NULL) != FSDP_OK)
        return fail_listing(list, "a value has no kind or shape");
    int64_t count = fsdp_box_count(&whole);
    if (count > (list->end - list->at) / (int64_t)size)
        return fail_listing(list, "a value is cut off");
    if (count == 0)
        return fsdp_value_set_items(out, FSDP_VALUE_LIST, 0, list->err);
    return take_elements(list, kind, whole.ndim, whole.len, out);
}

static fsdp_status take_value(listing *list, fsdp_value *out, bool *is_empty_out)
{
    unsigned kind;
    text_view text;
    if (!take_u8(list, &kind))
        return fail_listing(list, "a value is cut off");
    *is_empty_out = kind == 'e';
    if (kind != 'c' && kind != 'e')
        return take_array(list, kind, out);
    if (!take_text(list, &text) || !fsdp_utf8_valid(text.data, text.size))
        return fail_listing(list, "a class has no name");
    return fsdp_value_set_bytes(out, FSDP_VALUE_CLASS, text.data, text.size, list->err);
}

/* --- attributes and links, which are JSON ----------------------------------------------------- */

static void add_f64(fsdp_text *text, double number)
{
    if (isnan(number))
        fsdp_text_addf(text, "{\"float\": \"nan\"}");
    else if (isinf(number))
        fsdp_text_addf(text, "{\"float\": \"%sinf\"}", number < 0 ? "-" : "");
    else
        fsdp_text_add_f64(text, number);
}

static void add_scalar(fsdp_text *text, const fsdp_value *value, bool is_empty)
{
    switch (value->kind) {
    case FSDP_VALUE_BOOL: fsdp_text_addf(text, value->as.boolean ? "true" : "false"); break;
    case FSDP_VALUE_I64: fsdp_text_addf(text, "%" PRId64, value->as.i64); break;
    case FSDP_VALUE_U64:
        fsdp_text_addf(text, value->as.u64 > INT64_MAX ? "{\"int\": \"%" PRIu64 "\"}" : "%" PRIu64,
                       value->as.u64);
        break;
    case FSDP_VALUE_F64: add_f64(text, value->as.f64); break;
    case FSDP_VALUE_COMPLEX:
        fsdp_text_addf(text, "{\"complex\": [");
        add_f64(text, value->as.complex_parts[0]);
        fsdp_text_addf(text, ", ");
        add_f64(text, value->as.complex_parts[1]);
        fsdp_text_addf(text, "]}");
        break;
    case FSDP_VALUE_CLASS:
        fsdp_text_addf(text, is_empty ? "{\"empty\": " : "{\"opaque\": ");
        fsdp_text_add_json_string(text, value->as.bytes.data, value->as.bytes.size);
        fsdp_text_addf(text, "}");
        break;
    default: fsdp_text_add_json_string(text, value->as.bytes.data, value->as.bytes.size); break;
    }
}

/* Recursion depth is at most the number of dims. */
static void add_value(fsdp_text *text, const fsdp_value *value, bool is_empty)
{
    if (value->kind != FSDP_VALUE_LIST) {
        add_scalar(text, value, is_empty);
        return;
    }
    fsdp_text_add(text, "[", 1);
    for (size_t i = 0; i < value->as.list.count; i++) {
        if (i > 0)
            fsdp_text_add(text, ", ", 2);
        add_value(text, &value->as.list.items[i], is_empty);
    }
    fsdp_text_add(text, "]", 1);
}

static bool same_text(text_view a, text_view b)
{
    return a.size == b.size && (a.size == 0 || memcmp(a.data, b.data, a.size) == 0);
}

static void close_object(listing *list)
{
    if (list->is_open)
        fsdp_text_add(&list->attributes, "}", 1);
    list->is_open = false;
}

/* The path of the root is "/" here. */
static fsdp_status open_object(listing *list, text_view path)
{
    if (list->is_open && same_text(path, list->object))
        return FSDP_OK;
    close_object(list);
    if (fsdp_name_table_find(&list->seen, path.data, path.size))
        return fail_listing(list, "two objects have one path");
    if (!fsdp_name_table_put(&list->seen, path.data, path.size, 0))
        return fsdp_fail_memory(list->err, "attributes");
    fsdp_text_addf(&list->attributes, list->attributes.size > 0 ? ", " : "{");
    fsdp_text_add_json_string(&list->attributes, path.size > 0 ? path.data : "/",
                              path.size > 0 ? path.size : 1);
    fsdp_text_add(&list->attributes, ": {", 3);
    list->object = path;
    list->is_open = true;
    return FSDP_OK;
}

static fsdp_status take_attribute(listing *list)
{
    text_view path, name;
    bool is_empty;
    if (!take_text(list, &path) || !take_text(list, &name))
        return fail_listing(list, "an attribute is cut off");
    bool is_first = !list->is_open || !same_text(path, list->object);
    FSDP_TRY(open_object(list, path));
    fsdp_value value = {.kind = FSDP_VALUE_NULL};
    fsdp_status status = take_value(list, &value, &is_empty);
    if (status == FSDP_OK) {
        fsdp_text_addf(&list->attributes, is_first ? "" : ", ");
        fsdp_text_add_json_string(&list->attributes, name.data, name.size);
        fsdp_text_add(&list->attributes, ": ", 2);
        add_value(&list->attributes, &value, is_empty);
    }
    fsdp_value_release(&value);
    return status;
}

static fsdp_status take_soft_link(listing *list)
{
    text_view path, target;
    if (!take_text(list, &path) || !take_text(list, &target))
        return fail_listing(list, "a link is cut off");
    fsdp_text_addf(&list->links, list->links.size > 0 ? ", " : "{");
    fsdp_text_add_json_string(&list->links, path.data, path.size);
    fsdp_text_add(&list->links, ": ", 2);
    fsdp_text_add_json_string(&list->links, target.data, target.size);
    return FSDP_OK;
}

/* --- tensors ---------------------------------------------------------------------------------- */

typedef struct dataset {
    text_view path;
    unsigned dtype, mark, swap;
    fsdp_box whole;
    int64_t offset, stored;
    unsigned has_checksums, is_chunked;
    int64_t chunk[FSDP_MAX_DIMS];
    fsdp_dtype info; /* combined from dtype and mark */
} dataset;

static bool is_dtype(unsigned number)
{
    return number > FSDP_DTYPE_NONE && number < FSDP_DTYPE_COUNT;
}

/* A mark counts in native files, and where HDF5 has no such type (Keras). */
static bool choose_dtype(const listing *list, dataset *out)
{
    out->info = is_dtype(out->dtype) ? (fsdp_dtype)out->dtype : FSDP_DTYPE_NONE;
    if (is_dtype(out->mark) && (list->is_native || out->dtype == FSDP_DTYPE_NONE))
        out->info = (fsdp_dtype)out->mark;
    return out->info != FSDP_DTYPE_NONE &&
           (out->dtype == FSDP_DTYPE_NONE ||
            (is_dtype(out->dtype) &&
             fsdp_dtype_size((fsdp_dtype)out->dtype) == fsdp_dtype_size(out->info)));
}

static bool take_dataset(listing *list, dataset *out)
{
    return take_text(list, &out->path) && take_u8(list, &out->dtype) && take_u8(list, &out->mark) &&
           take_u8(list, &out->swap) && take_shape(list, &out->whole) &&
           take(list, &out->offset, 8) && take(list, &out->stored, 8) &&
           take_u8(list, &out->has_checksums) && take_u8(list, &out->is_chunked) &&
           out->stored >= 0 &&
           (!out->is_chunked ||
            take(list, out->chunk, (size_t)out->whole.ndim * sizeof out->chunk[0]));
}

/* HDF5 chunks are smaller than 4 GiB. */
static bool measure_chunk(const dataset *set, int64_t *bytes_out)
{
    *bytes_out = (int64_t)fsdp_dtype_size(set->info);
    for (int dim = 0; dim < set->whole.ndim; dim++)
        if (set->chunk[dim] < 1 || fsdp_mul_overflow(*bytes_out, set->chunk[dim], bytes_out) ||
            *bytes_out > LARGEST_CHUNK)
            return false;
    return true;
}

/* Refuses gigabytes that are stored in a few bytes: a decompression bomb. A dataset cannot store
 * more than the file's size. */
static fsdp_status check_ratio(const listing *list, const dataset *set)
{
    int64_t size = fsdp_box_count(&set->whole) * (int64_t)fsdp_dtype_size(set->info);
    int64_t stored = list->place->size;
    if (set->stored < stored)
        stored = set->stored;
    if (size <= LARGE || size / RATIO <= stored)
        return FSDP_OK;
    char shown[NAME_SHOWN];
    return fsdp_fail(
        list->err, FSDP_ERR_REFUSED,
        "'%s': dataset '%s' has %" PRId64 " bytes, of which only %" PRId64 " are stored",
        fsdp_source_path(list->source),
        fsdp_printable(set->path.data, set->path.size, shown, sizeof shown), size, stored);
}

static fsdp_status keep_tensor(listing *list, const dataset *set, size_t number)
{
    fsdp_h5_tensors *tensors = list->tensors;
    fsdp_h5_tensor *tensor;
    if (!fsdp_grow(&tensors->items, &tensors->room, number + 1, sizeof *tensors->items))
        return fsdp_fail_memory(list->err, "the tensors of an HDF5 file");
    tensor = &tensors->items[number];
    *tensor = (fsdp_h5_tensor){
        .dataset = list->dataset, .is_plain = set->offset >= 0, .stored = set->stored};
    tensors->count = number + 1;
    if (set->has_checksums)
        fsdp_source_count_checked(list->source, set->stored);
    if (!set->is_chunked)
        return FSDP_OK;
    if (!measure_chunk(set, &tensor->chunk_bytes))
        return fail_listing(list, "a chunk has no size");
    size_t bytes = (size_t)set->whole.ndim * sizeof *tensor->chunk;
    tensor->chunk = fsdp_arena_alloc(&tensors->arena, 1, bytes > 0 ? bytes : 1);
    if (!tensor->chunk)
        return fsdp_fail_memory(list->err, "the tensors of an HDF5 file");
    memcpy(tensor->chunk, set->chunk, bytes);
    return FSDP_OK;
}

/* Decodes the link names of native files; other names stay as they are. */
static text_view plain_name(const listing *list, text_view path,
                            char room[FSDP_NATIVE_NAME_PLAIN + 1])
{
    char link[FSDP_NATIVE_LINK_ROOM];
    size_t size;
    uint32_t part;
    if (!list->is_native || path.size >= sizeof link || memchr(path.data, '\0', path.size))
        return path;
    memcpy(link, path.data, path.size);
    link[path.size] = '\0';
    if (fsdp_native_name(link, room, &size, &part, NULL) != FSDP_OK || part > 0)
        return path;
    return (text_view){room, size};
}

/* The source checks its whole file, of which the HDF5 file may be a part. */
static bool is_behind_end(const listing *list, const dataset *set)
{
    int64_t size = fsdp_box_count(&set->whole) * (int64_t)fsdp_dtype_size(set->info);
    return list->place->offset > 0 && size > 0 &&
           (set->offset > list->place->size || size > list->place->size - set->offset);
}

static fsdp_status add_tensor(listing *list, const dataset *set)
{
    static const int64_t origin[FSDP_MAX_DIMS];
    char room[FSDP_NATIVE_NAME_PLAIN + 1];
    size_t number;
    text_view name = plain_name(list, set->path, room);
    FSDP_TRY(fsdp_source_add_tensor(
        list->source, name.data, name.size,
        &(fsdp_source_shape){set->info, set->whole.ndim, set->whole.len}, &number, list->err));
    FSDP_TRY(check_ratio(list, set));
    FSDP_TRY(keep_tensor(list, set, number));
    if (is_behind_end(list, set))
        return fail_listing(list, "a dataset begins after the end of the file");
    fsdp_source_chunk chunk = {.lo = origin,
                               .len = set->whole.len,
                               .offset = list->place->offset + set->offset,
                               .file = list->place->file,
                               .stream = list->place->stream,
                               .fix = set->swap ? FSDP_FIX_SWAP : 0};
    if (set->offset < 0) {
        chunk.file = -1;
        chunk.origin = list->place->file;
        chunk.stream = FSDP_NO_STREAM;
        chunk.offset = 0;
        chunk.fix = 0;
    }
    return fsdp_source_add_chunk(list->source, number, &chunk, list->err);
}

static bool is_index(const dataset *set)
{
    return set->path.size == 6 && memcmp(set->path.data, "%index", 6) == 0 &&
           set->dtype == FSDP_U8 && set->whole.ndim == 1;
}

static fsdp_status take_tensor(listing *list)
{
    dataset set = {.offset = -1};
    if (!take_dataset(list, &set) || !choose_dtype(list, &set))
        return fail_listing(list, "a dataset has no type or shape");
    fsdp_status status = FSDP_OK;
    if (!list->is_native || !is_index(&set))
        status = add_tensor(list, &set);
    else
        list->tensors->index_offset = set.offset;
    list->dataset++;
    return status;
}

static fsdp_status take_other(listing *list)
{
    text_view path;
    bool is_empty;
    char room[FSDP_NATIVE_NAME_PLAIN + 1];
    if (!take_text(list, &path))
        return fail_listing(list, "a value is cut off");
    fsdp_value value = {.kind = FSDP_VALUE_NULL};
    fsdp_status status = take_value(list, &value, &is_empty);
    path = plain_name(list, path, room);
    if (status == FSDP_OK)
        status = fsdp_source_add_value(list->source, path.data, path.size, &value, NULL, list->err);
    fsdp_value_release(&value);
    return status;
}

/* --- the whole -------------------------------------------------------------------------------- */

static fsdp_status take_records(listing *list)
{
    for (;;) {
        unsigned tag;
        if (!take_u8(list, &tag))
            return fail_listing(list, "it has no end");
        switch (tag) {
        case 'D': FSDP_TRY(take_tensor(list)); break;
        case 'V': FSDP_TRY(take_other(list)); break;
        case 'A': FSDP_TRY(take_attribute(list)); break;
        case 'S': FSDP_TRY(take_soft_link(list)); break;
        case 'E':
            return list->at == list->end ? FSDP_OK
                                         : fail_listing(list, "it continues after its end");
        default: return fail_listing(list, "a record has no kind");
        }
    }
}

/* A native shard file has the dataset "%index" in its root. The search looks for the bytes of
 * that record; a crafted text that contains them only gets its names unescaped. */
static bool looks_native(const listing *list)
{
    static const char record[] = "D\6\0\0\0%index";
    size_t size = sizeof record - 1;
    return memmem(list->at, (size_t)(list->end - list->at), record, size) != NULL;
}

static fsdp_status add_members(listing *list)
{
    close_object(list);
    struct {
        const char *name;
        fsdp_text *text;
    } members[] = {{"attributes", &list->attributes}, {"soft_links", &list->links}};
    for (size_t i = 0; i < 2; i++) {
        fsdp_text *text = members[i].text;
        if (text->size == 0 && !text->failed)
            continue;
        fsdp_text_add(text, "}", 1);
        if (text->failed)
            return fsdp_fail_memory(list->err, "attributes");
        FSDP_TRY(fsdp_source_add_extra(list->source, members[i].name, text->data, text->size,
                                       list->err));
    }
    return FSDP_OK;
}

fsdp_status fsdp_h5_listing_take(const char *data, size_t size, fsdp_source *source,
                                 const fsdp_h5_place *place, fsdp_h5_tensors *tensors,
                                 fsdp_error *err)
{
    listing list = {.at = data,
                    .end = data + size,
                    .source = source,
                    .place = place,
                    .tensors = tensors,
                    .err = err};
    list.is_native = size > 0 && looks_native(&list);
    fsdp_status status = take_records(&list);
    if (status == FSDP_OK)
        status = add_members(&list);
    fsdp_text_release(&list.attributes);
    fsdp_text_release(&list.links);
    fsdp_name_table_release(&list.seen);
    return status;
}

void fsdp_h5_tensors_release(fsdp_h5_tensors *tensors)
{
    fsdp_free(tensors->items);
    fsdp_arena_release(&tensors->arena);
    *tensors = (fsdp_h5_tensors){0};
}
