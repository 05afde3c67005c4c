/* The listing of one object: type, shape and offset of a dataset, or its text; and attributes. */
#include "formats/hdf5_child/hdf5_child.h"
#include "base/core/mem.h"
#include "base/data/box_internal.h"

#include <string.h>

/* === datasets and attributes ================================================================== */

typedef struct fsdp_h5_path {
    const char *data;
    size_t size;
} fsdp_h5_path;

enum { NAME_SHOWN = 200 };

static const char *shown(const fsdp_h5_path *path, char out[NAME_SHOWN])
{
    return fsdp_printable(path->data, path->size, out, NAME_SHOWN);
}

/* --- the listing ------------------------------------------------------------------------------ */

static void put(fsdp_h5_child *child, const void *data, size_t size)
{
    const char *from = data;
    while (size > 0) {
        size_t n = FSDP_H5_REPLY_ROOM - child->reply_size;
        if (n > size)
            n = size;
        memcpy(child->reply + child->reply_size, from, n);
        child->reply_size += n;
        from += n;
        size -= n;
        if (child->reply_size < FSDP_H5_REPLY_ROOM)
            continue;
        fsdp_h5_message answer;
        fsdp_h5_send(child, &(fsdp_h5_message){.kind = FSDP_H5_PART, .size = FSDP_H5_REPLY_ROOM});
        fsdp_h5_receive(child, &answer);
        child->reply_size = 0;
    }
}

static void put_u8(fsdp_h5_child *child, unsigned value)
{
    unsigned char byte = (unsigned char)value;
    put(child, &byte, 1);
}

static void put_i64(fsdp_h5_child *child, int64_t value)
{
    put(child, &value, sizeof value);
}

/* Adds bytes to the listing, which goes to the parent in parts. */
static void put_string(fsdp_h5_child *child, const char *data, size_t size)
{
    uint32_t shown = size > UINT32_MAX ? UINT32_MAX : (uint32_t)size;
    put(child, &shown, sizeof shown);
    put(child, data, shown);
}

/* --- values ----------------------------------------------------------------------------------- */

static void put_class(fsdp_h5_child *child, char kind, const char *text)
{
    put_u8(child, (unsigned char)kind);
    put_string(child, text, strlen(text));
}

static void put_shape(fsdp_h5_child *child, char kind, const fsdp_box *whole)
{
    put_u8(child, (unsigned char)kind);
    put_u8(child, (unsigned)whole->ndim);
    put(child, whole->len, (size_t)whole->ndim * sizeof whole->len[0]);
}

/* The extent as a box; false for a null dataspace. */
static fsdp_status take_shape(hid_t space, fsdp_box *whole_out, bool *is_null_out, fsdp_error *err)
{
    hsize_t dims[H5S_MAX_RANK];
    *whole_out = (fsdp_box){.ndim = H5Sget_simple_extent_dims(space, dims, NULL)};
    *is_null_out = H5Sget_simple_extent_type(space) == H5S_NULL;
    if (whole_out->ndim < 0 || whole_out->ndim > FSDP_MAX_DIMS)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "it has %d dims", whole_out->ndim);
    for (int d = 0; d < whole_out->ndim; d++) {
        if (dims[d] > INT64_MAX)
            return fsdp_fail(err, FSDP_ERR_DAMAGED, "one of its dims is %llu",
                             (unsigned long long)dims[d]);
        whole_out->len[d] = (int64_t)dims[d];
    }
    return fsdp_shape_check(whole_out->ndim, whole_out->len, 1, err) == FSDP_OK
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_DAMAGED, "the product of its dims is too large");
}

static void put_texts(fsdp_h5_child *child, char *const *texts, size_t count)
{
    for (size_t i = 0; i < count; i++)
        put_string(child, texts[i] ? texts[i] : "", texts[i] ? strlen(texts[i]) : 0);
}

/* Text of fixed size ends at a zero byte, or at its last byte other than padding. */
static void put_fixed_texts(fsdp_h5_child *child, const char *data, size_t count, size_t size,
                            H5T_str_t padding)
{
    for (size_t i = 0; i < count; i++, data += size) {
        size_t n = padding == H5T_STR_NULLTERM ? strnlen(data, size) : size;
        while (n > 0 && data[n - 1] == '\0')
            n--;
        put_string(child, data, n);
    }
}

/* --- text datasets ---------------------------------------------------------------------------- */

/* The memory type of text of variable length: pointers. */
static hid_t text_in_memory(hid_t type)
{
    hid_t memory = H5Tcopy(H5T_C_S1);
    if (memory >= 0 && H5Tset_size(memory, H5T_VARIABLE) >= 0 &&
        H5Tset_cset(memory, H5Tget_cset(type)) >= 0)
        return memory;
    H5Tclose(memory);
    return H5I_INVALID_HID;
}

/* A dataset of text that is put piece by piece. */
typedef struct text_dataset {
    hid_t dataset, memory_type, space;
    char **texts; /* of a piece */
} text_dataset;

static fsdp_status put_piece(fsdp_h5_child *child, const text_dataset *from, const fsdp_box *piece,
                             fsdp_error *err)
{
    hsize_t lo[FSDP_MAX_DIMS], len[FSDP_MAX_DIMS];
    for (int d = 0; d < piece->ndim; d++) {
        lo[d] = (hsize_t)piece->lo[d];
        len[d] = (hsize_t)piece->len[d];
    }
    size_t count = (size_t)fsdp_box_count(piece);
    memset(from->texts, 0, count * sizeof *from->texts);
    hid_t memory = H5Screate_simple(piece->ndim, len, NULL);
    bool ok = memory >= 0 &&
              (piece->ndim == 0 ||
               H5Sselect_hyperslab(from->space, H5S_SELECT_SET, lo, NULL, len, NULL) >= 0) &&
              H5Dread(from->dataset, from->memory_type, memory, from->space, H5P_DEFAULT,
                      from->texts) >= 0;
    fsdp_status status = ok ? FSDP_OK : fsdp_h5_child_fail(err, "cannot read it");
    if (ok) {
        put_texts(child, from->texts, count);
        H5Dvlen_reclaim(from->memory_type, memory, H5P_DEFAULT, from->texts);
    }
    H5Sclose(memory);
    return status;
}

static fsdp_status put_text_dataset(fsdp_h5_child *child, hid_t dataset, hid_t type, hid_t space,
                                    const fsdp_box *whole, fsdp_error *err)
{
    enum { AT_ONCE = 1024, ALWAYS = 65536 };
    int64_t count = fsdp_box_count(whole);
    if (count > child->file_size + ALWAYS)
        return fsdp_fail(err, FSDP_ERR_REFUSED,
                         "it has %lld strings, but the file has only %lld bytes", (long long)count,
                         (long long)child->file_size);
    FSDP_TRY(fsdp_h5_child_check(child, dataset, NULL, err));
    put_shape(child, 's', whole);
    text_dataset from = {.dataset = dataset,
                         .memory_type = text_in_memory(type),
                         .space = space,
                         .texts = fsdp_alloc(AT_ONCE, sizeof *from.texts)};
    fsdp_status status =
        from.texts && from.memory_type >= 0 ? FSDP_OK : fsdp_fail_memory(err, "text");
    for (int64_t first = 0; status == FSDP_OK && first < count; first += AT_ONCE) {
        fsdp_box pieces[FSDP_BOX_PIECES];
        int64_t n = count - first < AT_ONCE ? count - first : AT_ONCE;
        int piece_count = fsdp_box_cut(whole, first, n, pieces);
        for (int i = 0; status == FSDP_OK && i < piece_count; i++)
            status = put_piece(child, &from, &pieces[i], err);
    }
    H5Tclose(from.memory_type);
    fsdp_free(from.texts);
    return status;
}

/* --- attributes ------------------------------------------------------------------------------- */

static hid_t complex_in_memory(void)
{
    hid_t type = H5Tcreate(H5T_COMPOUND, 2 * sizeof(double));
    H5Tinsert(type, "r", 0, H5T_NATIVE_DOUBLE);
    H5Tinsert(type, "i", sizeof(double), H5T_NATIVE_DOUBLE);
    return type;
}

/* The kind under which an attribute's elements are listed, and their memory type; kind 0: not
 * listed. */
static hid_t told_as(hid_t type, const fsdp_h5_type_info *info, char *kind_out)
{
    enum { LARGEST_NUMBER = 8 };
    bool is_number = H5Tget_size(type) <= LARGEST_NUMBER;
    *kind_out = '\0';
    switch (info->kind) {
    case FSDP_H5_INTEGER:
    case FSDP_H5_ENUM:
        if (!is_number)
            break;
        *kind_out = info->is_signed ? 'i' : 'u';
        return H5Tcopy(info->is_signed ? H5T_NATIVE_INT64 : H5T_NATIVE_UINT64);
    case FSDP_H5_FLOAT:
        if (!is_number)
            break;
        *kind_out = 'f';
        return H5Tcopy(H5T_NATIVE_DOUBLE);
    case FSDP_H5_BOOLEAN: *kind_out = 'b'; return H5Tcopy(type);
    case FSDP_H5_COMPLEX: *kind_out = 'z'; return complex_in_memory();
    case FSDP_H5_TEXT: *kind_out = 's'; return text_in_memory(type);
    case FSDP_H5_FIXED_TEXT: *kind_out = 's'; return H5Tcopy(type);
    case FSDP_H5_OTHER: break;
    }
    return H5I_INVALID_HID;
}

static void put_elements(fsdp_h5_child *child, const fsdp_h5_type_info *info, hid_t memory,
                         hid_t space, void *data, size_t count)
{
    size_t size = H5Tget_size(memory);
    if (info->kind == FSDP_H5_TEXT) {
        put_texts(child, data, count);
        H5Dvlen_reclaim(memory, space, H5P_DEFAULT, data);
    } else if (info->kind == FSDP_H5_FIXED_TEXT) {
        put_fixed_texts(child, data, count, size, H5Tget_strpad(memory));
    } else {
        put(child, data, count * size);
    }
}

/* An attribute that cannot be read is listed as unreadable, so that the tensors next to it remain
 * usable. */
static void put_attribute_value(fsdp_h5_child *child, hid_t attribute, hid_t type, hid_t space)
{
    enum { MOST_BYTES = 64 << 20 };
    fsdp_h5_type_info info;
    fsdp_h5_classify(type, &info);
    fsdp_box whole;
    bool is_null;
    if (take_shape(space, &whole, &is_null, NULL) != FSDP_OK) {
        put_class(child, 'c', "an attribute of an odd shape");
        return;
    }
    if (is_null) {
        put_class(child, 'e', info.numpy);
        return;
    }
    char kind;
    hid_t memory = told_as(type, &info, &kind);
    int64_t count = fsdp_box_count(&whole), bytes;
    size_t size = memory >= 0 ? H5Tget_size(memory) : 0;
    void *data = NULL;
    if (size > 0 && !fsdp_mul_overflow(count, (int64_t)size, &bytes) && bytes <= MOST_BYTES)
        data = fsdp_alloc((size_t)bytes, 1);
    if (data && H5Aread(attribute, memory, data) >= 0) {
        put_shape(child, kind, &whole);
        put_elements(child, &info, memory, space, data, (size_t)count);
    } else {
        put_class(child, 'c', info.text[0] ? info.text : "text");
    }
    fsdp_free(data);
    H5Tclose(memory);
}

typedef struct attribute_walk {
    fsdp_h5_child *child;
    const fsdp_h5_path *path;
} attribute_walk;

static herr_t put_attribute(hid_t object, const char *name, const H5A_info_t *info, void *context)
{
    (void)info;
    const attribute_walk *walk = context;
    hid_t attribute = H5Aopen(object, name, H5P_DEFAULT);
    if (attribute < 0)
        return -1;
    hid_t type = H5Aget_type(attribute), space = H5Aget_space(attribute);
    if (type >= 0 && space >= 0) {
        put_u8(walk->child, 'A');
        put_string(walk->child, walk->path->data, walk->path->size);
        put_string(walk->child, name, strlen(name));
        put_attribute_value(walk->child, attribute, type, space);
    }
    H5Sclose(space);
    H5Tclose(type);
    H5Aclose(attribute);
    return type >= 0 && space >= 0 ? 0 : -1;
}

/* Lists all attributes of an object. */
static fsdp_status list_attributes(fsdp_h5_child *child, const fsdp_h5_path *path, hid_t object,
                                   fsdp_error *err)
{
    attribute_walk walk = {child, path};
    hsize_t at = 0;
    char name[NAME_SHOWN];
    if (H5Aiterate2(object, H5_INDEX_NAME, H5_ITER_INC, &at, put_attribute, &walk) < 0)
        return fsdp_h5_child_fail(err, "the attributes of '%s'", shown(path, name));
    return FSDP_OK;
}

/* --- unsupported storage ---------------------------------------------------------------------- */

static fsdp_status check_virtual(hid_t creation, fsdp_error *err)
{
    size_t count = 0;
    if (H5Pget_virtual_count(creation, &count) < 0)
        return fsdp_h5_child_fail(err, "its virtual sources");
    for (size_t i = 0; i < count; i++) {
        char file[FSDP_H5_PAGE / 64] = "";
        if (H5Pget_virtual_filename(creation, i, file, sizeof file) < 0)
            return fsdp_h5_child_fail(err, "its virtual sources");
        if (strcmp(file, ".") != 0) {
            char name[NAME_SHOWN];
            return fsdp_fail(err, FSDP_ERR_REFUSED,
                             "it is virtual, and its source is another file, '%s'",
                             fsdp_printable(file, strlen(file), name, sizeof name));
        }
    }
    return FSDP_OK;
}

/* Refuses a dataset with a mandatory filter that is unknown. */
static fsdp_status check_filters(hid_t creation, fsdp_error *err)
{
    int count = H5Pget_nfilters(creation);
    for (int i = 0; i < count; i++) {
        unsigned flags = 0;
        size_t values = 0;
        char name[NAME_SHOWN] = "";
        H5Z_filter_t filter = H5Pget_filter2(creation, (unsigned)i, &flags, &values, NULL,
                                             sizeof name - 1, name, NULL);
        if (filter >= 0 && !(flags & H5Z_FLAG_OPTIONAL) && H5Zfilter_avail(filter) <= 0)
            return fsdp_fail(err, FSDP_ERR_REFUSED,
                             "it needs filter %d (%s), which is unknown; plugins are not loaded "
                             "for files of other programs",
                             (int)filter, name[0] ? name : "without a name");
    }
    return FSDP_OK;
}

static fsdp_status check_storage(hid_t creation, fsdp_error *err)
{
    int external = H5Pget_external_count(creation);
    if (external < 0)
        return fsdp_h5_child_fail(err, "how it is stored");
    if (external > 0)
        return fsdp_fail(err, FSDP_ERR_REFUSED, "its data is in another file (external storage)");
    if (H5Pget_layout(creation) == H5D_VIRTUAL)
        FSDP_TRY(check_virtual(creation, err));
    return check_filters(creation, err);
}

/* --- datasets --------------------------------------------------------------------------------- */

/* The dtype that an attribute names for a type outside HDF5: bytes or opaque blocks in native files,
 * opaque 16 bits in Keras files. */
static fsdp_dtype marked_dtype(hid_t dataset, hid_t type, const fsdp_h5_type_info *info)
{
    enum { LONGEST = 32 };
    bool is_opaque = info->kind == FSDP_H5_OTHER && H5Tget_class(type) == H5T_OPAQUE;
    size_t size = H5Tget_size(type);
    if (info->dtype != FSDP_U8 && !is_opaque)
        return FSDP_DTYPE_NONE;
    if (H5Aexists(dataset, "dtype") <= 0)
        return FSDP_DTYPE_NONE;
    char text[LONGEST + 1] = "", *varying = NULL;
    hid_t attribute = H5Aopen(dataset, "dtype", H5P_DEFAULT);
    hid_t stored = H5Aget_type(attribute), space = H5Aget_space(attribute);
    if (H5Tget_class(stored) == H5T_STRING && H5Sget_simple_extent_type(space) == H5S_SCALAR) {
        hid_t memory = text_in_memory(stored);
        if (H5Tis_variable_str(stored) > 0 && H5Aread(attribute, memory, &varying) >= 0 && varying)
            memcpy(text, varying, strnlen(varying, LONGEST));
        else if (H5Tis_variable_str(stored) == 0 && H5Tget_size(stored) <= LONGEST)
            (void)H5Aread(attribute, stored, text);
        H5free_memory(varying);
        H5Tclose(memory);
    }
    H5Sclose(space);
    H5Tclose(stored);
    H5Aclose(attribute);
    if (is_opaque && size == 2)
        return strcmp(text, "bfloat16") == 0 ? FSDP_BF16 : FSDP_DTYPE_NONE;
    fsdp_dtype dtype = fsdp_dtype_from_name(text, strlen(text));
    const fsdp_dtype_info *known = fsdp_dtype_describe(dtype);
    bool is_right = known && known->size == size && (known->values > 1) == is_opaque;
    return is_right ? dtype : FSDP_DTYPE_NONE;
}

/* The offset of plain bytes in the file, -1 when libhdf5 must read them. */
static int64_t plain_offset(hid_t dataset, hid_t creation, const fsdp_box *whole,
                            size_t element_size)
{
    int64_t bytes;
    haddr_t offset = H5Dget_offset(dataset);
    if (H5Pget_layout(creation) != H5D_CONTIGUOUS || offset == HADDR_UNDEF || offset > INT64_MAX ||
        fsdp_mul_overflow(fsdp_box_count(whole), (int64_t)element_size, &bytes) ||
        H5Dget_storage_size(dataset) != (hsize_t)bytes)
        return -1;
    return (int64_t)offset;
}

static void put_place(fsdp_h5_child *child, hid_t dataset, hid_t creation, const fsdp_box *whole,
                      size_t element_size)
{
    H5D_layout_t layout = H5Pget_layout(creation);
    hsize_t stored =
        layout == H5D_VIRTUAL ? (hsize_t)child->file_size : H5Dget_storage_size(dataset);
    hsize_t chunk[H5S_MAX_RANK];
    put_i64(child, plain_offset(dataset, creation, whole, element_size));
    put_i64(child, stored > INT64_MAX ? INT64_MAX : (int64_t)stored);
    bool is_chunked =
        layout == H5D_CHUNKED && H5Pget_chunk(creation, H5S_MAX_RANK, chunk) == whole->ndim;
    unsigned flags;
    size_t values = 0;
    bool has_checksums = H5Pget_filter_by_id2(creation, H5Z_FILTER_FLETCHER32, &flags, &values,
                                              NULL, 0, NULL, NULL) >= 0;
    put_u8(child, has_checksums);
    put_u8(child, is_chunked);
    for (int d = 0; is_chunked && d < whole->ndim; d++)
        put_i64(child, (int64_t)chunk[d]);
}

/* A dataset that is being listed. */
typedef struct listed_dataset {
    hid_t id, creation, type, space;
    haddr_t address;
    fsdp_h5_type_info info; /* of type */
    fsdp_dtype mark;
    fsdp_box whole;
} listed_dataset;

static fsdp_status put_tensor(fsdp_h5_child *child, const fsdp_h5_path *path,
                              const listed_dataset *set, fsdp_error *err)
{
    if (!fsdp_grow(&child->datasets, &child->room, child->count + 1, sizeof *child->datasets))
        return fsdp_fail_memory(err, "a list of datasets");
    child->datasets[child->count++] = set->address;
    fsdp_dtype stored = set->info.dtype != FSDP_DTYPE_NONE ? set->info.dtype : set->mark;
    put_u8(child, 'D');
    put_string(child, path->data, path->size);
    put_u8(child, set->info.dtype);
    put_u8(child, set->mark);
    put_u8(child, set->info.is_swapped);
    put_u8(child, (unsigned)set->whole.ndim);
    put(child, set->whole.len, (size_t)set->whole.ndim * sizeof set->whole.len[0]);
    put_place(child, set->id, set->creation, &set->whole, fsdp_dtype_size(stored));
    return FSDP_OK;
}

/* Fills in info, mark and whole. */
static fsdp_status put_dataset(fsdp_h5_child *child, const fsdp_h5_path *path, listed_dataset *set,
                               fsdp_error *err)
{
    bool is_null;
    fsdp_h5_classify(set->type, &set->info);
    FSDP_TRY(take_shape(set->space, &set->whole, &is_null, err));
    set->mark = marked_dtype(set->id, set->type, &set->info);
    if (!is_null && (set->info.dtype != FSDP_DTYPE_NONE || set->mark != FSDP_DTYPE_NONE))
        return put_tensor(child, path, set, err);
    put_u8(child, 'V');
    put_string(child, path->data, path->size);
    if (!is_null && set->info.kind == FSDP_H5_TEXT)
        return put_text_dataset(child, set->id, set->type, set->space, &set->whole, err);
    put_class(child, 'c', is_null ? "null dataspace" : set->info.text);
    return FSDP_OK;
}

/* Lists a dataset; FSDP_ERR_REFUSED when its bytes are in another file. */
static fsdp_status list_dataset(fsdp_h5_child *child, const fsdp_h5_path *path, hid_t dataset,
                                haddr_t address, fsdp_error *err)
{
    listed_dataset set = {.id = dataset,
                          .creation = H5Dget_create_plist(dataset),
                          .type = H5I_INVALID_HID,
                          .space = H5I_INVALID_HID,
                          .address = address};
    fsdp_status status = FSDP_OK;
    if (set.creation < 0)
        status = fsdp_h5_child_fail(err, "how it is stored");
    else
        status = check_storage(set.creation, err);
    if (status == FSDP_OK) {
        set.type = H5Dget_type(dataset);
        set.space = H5Dget_space(dataset);
        if (set.type < 0 || set.space < 0)
            status = fsdp_h5_child_fail(err, "its type or shape");
        else
            status = put_dataset(child, path, &set, err);
    }
    char name[NAME_SHOWN];
    if (status != FSDP_OK)
        fsdp_error_prefix(err, "dataset '%s'", shown(path, name));
    H5Sclose(set.space);
    H5Tclose(set.type);
    H5Pclose(set.creation);
    return status;
}

/* === groups and links ========================================================================= */

/*
 * The child's walk over groups and links. It opens objects by address, never by name, because a
 * name could lead through a link to another file. Every hard link is listed; a group that
 * contains itself is entered once; soft links are listed, not followed; external links refuse
 * the file.
 */

enum { DEEPEST = 1000, MOST_LINKS = 10000000, LONGEST_PATH = 65535, WALKED_SHOWN = 200 };

typedef struct group_link {
    const char *name;
    H5L_type_t type;
    haddr_t address;
} group_link;

/* A group on the path of the walk. */
typedef struct group_frame {
    haddr_t address;
    group_link *links;
    size_t count, room, next;
    size_t path_size; /* of the group's path */
    fsdp_arena names;
} group_frame;

typedef struct group_walk {
    fsdp_h5_child *child;
    group_frame *frames;
    size_t depth, room;
    fsdp_text path;
    size_t links; /* links seen so far */
    fsdp_error *err;
    fsdp_status status; /* status of the callback */
} group_walk;

static const char *walked(const group_walk *walk, char out[WALKED_SHOWN])
{
    return fsdp_printable(walk->path.data ? walk->path.data : "", walk->path.size, out,
                          WALKED_SHOWN);
}

/* --- one group -------------------------------------------------------------------------------- */

static void set_path(group_walk *walk, size_t parent_size, const char *name)
{
    walk->path.size = parent_size;
    if (parent_size > 0)
        fsdp_text_add(&walk->path, "/", 1);
    fsdp_text_add(&walk->path, name, strlen(name));
}

static void put_soft_link(group_walk *walk, hid_t group, const char *name, size_t size)
{
    char target[4096] = "";
    if (size == 0 || size >= sizeof target ||
        H5Lget_val(group, name, target, size, H5P_DEFAULT) < 0)
        target[0] = '\0';
    set_path(walk, walk->frames[walk->depth - 1].path_size, name);
    if (walk->path.failed)
        return;
    put_u8(walk->child, 'S');
    put_string(walk->child, walk->path.data, walk->path.size);
    put_string(walk->child, target, strnlen(target, sizeof target));
}

static fsdp_status check_link(const group_walk *walk, const char *name, H5L_type_t type)
{
    char text[WALKED_SHOWN];
    const char *printable = fsdp_printable(name, strlen(name), text, sizeof text);
    if (type != H5L_TYPE_HARD && type != H5L_TYPE_SOFT)
        return fsdp_fail(walk->err, FSDP_ERR_REFUSED, "link '%s' %s", printable,
                         type == H5L_TYPE_EXTERNAL ? "leads to another file (an external link)"
                                                   : "has a user-defined type");
    if (name[0] == '\0' || strchr(name, '/'))
        return fsdp_fail(walk->err, FSDP_ERR_DAMAGED, "link '%s' has an invalid name", printable);
    if (walk->links > MOST_LINKS)
        return fsdp_fail(walk->err, FSDP_ERR_LIMIT, "the file has more than %d links", MOST_LINKS);
    return FSDP_OK;
}

static herr_t take_link(hid_t group, const char *name, const H5L_info_t *info, void *context)
{
    group_walk *walk = context;
    group_frame *frame = &walk->frames[walk->depth - 1];
    walk->links++;
    walk->status = check_link(walk, name, info->type);
    if (walk->status != FSDP_OK)
        return -1;
    if (info->type == H5L_TYPE_SOFT) {
        put_soft_link(walk, group, name, info->u.val_size);
        return 0;
    }
    const char *copy = fsdp_arena_strndup(&frame->names, name, strlen(name));
    if (!copy || !fsdp_grow(&frame->links, &frame->room, frame->count + 1, sizeof *frame->links)) {
        walk->status = fsdp_fail_memory(walk->err, "the links of a group");
        return -1;
    }
    frame->links[frame->count++] =
        (group_link){.name = copy, .type = info->type, .address = info->u.address};
    return 0;
}

static void leave_group(group_walk *walk)
{
    group_frame *frame = &walk->frames[--walk->depth];
    fsdp_arena_release(&frame->names);
    fsdp_free(frame->links);
}

static bool is_inside(const group_walk *walk, haddr_t address)
{
    for (size_t i = 0; i < walk->depth; i++)
        if (walk->frames[i].address == address)
            return true;
    return false;
}

static fsdp_status enter_group(group_walk *walk, hid_t group, haddr_t address)
{
    char name[WALKED_SHOWN];
    if (walk->depth >= DEEPEST)
        return fsdp_fail(walk->err, FSDP_ERR_LIMIT, "groups are nested more than %d deep", DEEPEST);
    if (!fsdp_grow(&walk->frames, &walk->room, walk->depth + 1, sizeof *walk->frames))
        return fsdp_fail_memory(walk->err, "nested groups");
    size_t path_size = walk->path.size;
    walk->frames[walk->depth++] = (group_frame){.address = address, .path_size = path_size};
    walk->status = FSDP_OK;
    herr_t result = H5Literate(group, H5_INDEX_NAME, H5_ITER_INC, NULL, take_link, walk);
    walk->path.size = path_size;
    if (walk->status == FSDP_OK && result < 0)
        return fsdp_h5_child_fail(walk->err, "group '/%s'", walked(walk, name));
    return walk->status;
}

/* --- all objects ------------------------------------------------------------------------------ */

static fsdp_status visit_object(group_walk *walk, hid_t object, haddr_t address)
{
    const fsdp_h5_path path = {walk->path.data, walk->path.size};
    H5I_type_t type = H5Iget_type(object);
    if (type == H5I_DATASET)
        FSDP_TRY(list_dataset(walk->child, &path, object, address, walk->err));
    if (type == H5I_GROUP && is_inside(walk, address))
        return FSDP_OK;
    FSDP_TRY(list_attributes(walk->child, &path, object, walk->err));
    return type == H5I_GROUP ? enter_group(walk, object, address) : FSDP_OK;
}

static fsdp_status visit_link(group_walk *walk, const group_link *link, size_t parent_size)
{
    char name[WALKED_SHOWN];
    set_path(walk, parent_size, link->name);
    if (walk->path.failed)
        return fsdp_fail_memory(walk->err, "a path");
    if (walk->path.size > LONGEST_PATH)
        return fsdp_fail(walk->err, FSDP_ERR_LIMIT, "a path is too long with %zu bytes: '%s'",
                         walk->path.size, walked(walk, name));
    hid_t object = H5Oopen_by_addr(walk->child->file, link->address);
    if (object < 0)
        return fsdp_h5_child_fail(walk->err, "'%s'", walked(walk, name));
    fsdp_status status = visit_object(walk, object, link->address);
    H5Oclose(object);
    return status;
}

static fsdp_status walk_groups(group_walk *walk)
{
    const fsdp_h5_path root_path = {"", 0};
    H5O_info_t info;
    hid_t root = H5Gopen2(walk->child->file, "/", H5P_DEFAULT);
    if (root < 0 || H5Oget_info2(root, &info, H5O_INFO_BASIC) < 0)
        return fsdp_h5_child_fail(walk->err, "the root group");
    fsdp_status status = list_attributes(walk->child, &root_path, root, walk->err);
    if (status == FSDP_OK)
        status = enter_group(walk, root, info.addr);
    H5Gclose(root);
    while (status == FSDP_OK && walk->depth > 0) {
        group_frame *frame = &walk->frames[walk->depth - 1];
        if (frame->next == frame->count) {
            leave_group(walk);
            continue;
        }
        const group_link *link = &frame->links[frame->next++];
        status = visit_link(walk, link, frame->path_size);
    }
    return status;
}

fsdp_status fsdp_h5_child_list(fsdp_h5_child *child, fsdp_error *err)
{
    group_walk walk = {.child = child, .err = err};
    child->count = 0;
    fsdp_status status = walk_groups(&walk);
    while (walk.depth > 0)
        leave_group(&walk);
    fsdp_free(walk.frames);
    fsdp_text_release(&walk.path);
    if (status == FSDP_OK)
        put_u8(child, 'E');
    return status;
}
