/*
 * NumPy arrays as a source: one .npy file, or the members of an .npz. Numeric arrays become
 * tensors, in any element order and byte order; all others become values that describe their
 * type.
 */
#include "base/core/bytes.h"
#include "base/core/mem.h"
#include "formats/npy/npy.h"
#include "formats/source.h"
#include "formats/source/escaped_names.h"
#include "formats/zip/zip.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* === the header of an array =================================================================== */

/*
 * NumPy evaluates the header as a Python literal; this parser accepts a small grammar: one dict of three
 * keys, strings, truth values, a tuple of numbers, and the nested lists of a structured type.
 */

enum { DEEPEST = 16, PREFIX_V1 = 10, LONGEST_STRING = 1000 };

static const char magic[] = "\x93NUMPY";
enum { MAGIC_SIZE = sizeof magic - 1 };

typedef struct literal {
    const char *path;
    const char *text, *at, *end;
    fsdp_npy *npy;
} literal;

/* True for the six bytes that every array begins with. */
static bool is_magic(const void *data, size_t size)
{
    return size >= MAGIC_SIZE && memcmp(data, magic, MAGIC_SIZE) == 0;
}

fsdp_status fsdp_npy_place(const char *path, const uint8_t *prefix, size_t prefix_size,
                           int64_t *offset_out, size_t *size_out, fsdp_error *err)
{
    if (!is_magic(prefix, prefix_size) || prefix_size < FSDP_NPY_PREFIX)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': the header of an array is cut off", path);
    unsigned major = prefix[MAGIC_SIZE], minor = prefix[MAGIC_SIZE + 1];
    if (major < 1 || major > 3 || minor != 0)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                         "'%s': version %u.%u of the npy format is unknown", path, major, minor);
    uint32_t size = fsdp_load_u32(prefix + MAGIC_SIZE + 2);
    *offset_out = major == 1 ? PREFIX_V1 : FSDP_NPY_PREFIX;
    *size_out = major == 1 ? size & 0xFFFF : size;
    if (*size_out > FSDP_NPY_LONGEST)
        return fsdp_fail(err, FSDP_ERR_LIMIT,
                         "'%s': its header has %zu bytes, at most %d are allowed", path, *size_out,
                         FSDP_NPY_LONGEST);
    return FSDP_OK;
}

/* --- the grammar ------------------------------------------------------------------------------ */

static fsdp_status fail_at(const literal *in, const char *what, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': character %zu of the array's header: %s",
                     in->path, (size_t)(in->at - in->text) + 1, what);
}

/* Skips white space and returns the next character, 0 at the end. */
static char next(literal *in)
{
    while (in->at < in->end &&
           (*in->at == ' ' || *in->at == '\n' || *in->at == '\t' || *in->at == '\r'))
        in->at++;
    return in->at < in->end ? *in->at : '\0';
}

static bool take(literal *in, char c)
{
    if (next(in) != c)
        return false;
    in->at++;
    return true;
}

static fsdp_status expect(literal *in, char c, fsdp_error *err)
{
    char what[] = "'_' was expected";
    what[1] = c;
    return take(in, c) ? FSDP_OK : fail_at(in, what, err);
}

/* A string without its quotes. Escapes are kept: no field that is used has one. */
static fsdp_status take_string(literal *in, const char **data_out, size_t *size_out,
                               fsdp_error *err)
{
    char quote = next(in);
    if (quote != '\'' && quote != '"')
        return fail_at(in, "expected a string", err);
    const char *start = ++in->at;
    while (in->at < in->end && *in->at != quote)
        in->at += *in->at == '\\' ? 2 : 1;
    if (in->at >= in->end)
        return fail_at(in, "the string has no end", err);
    *data_out = start;
    *size_out = (size_t)(in->at - start);
    in->at++;
    return *size_out <= LONGEST_STRING ? FSDP_OK : fail_at(in, "the string is too long", err);
}

static bool take_word(literal *in, const char *word)
{
    size_t size = strlen(word);
    next(in);
    if ((size_t)(in->end - in->at) < size || memcmp(in->at, word, size) != 0)
        return false;
    in->at += size;
    return true;
}

static fsdp_status take_number(literal *in, int64_t *number_out, fsdp_error *err)
{
    int64_t number = 0;
    next(in);
    const char *start = in->at;
    for (; in->at < in->end && *in->at >= '0' && *in->at <= '9'; in->at++) {
        if (fsdp_mul_overflow(number, 10, &number) ||
            fsdp_add_overflow(number, *in->at - '0', &number))
            return fail_at(in, "the number is too large", err);
    }
    if (in->at == start)
        return fail_at(in, "expected a natural number", err);
    take(in, 'L'); /* Python 2 wrote long integers with an L */
    *number_out = number;
    return FSDP_OK;
}

/* "()", "(3,)", "(3, 4)"; a shape of numbers, at most `room` of them. */
static fsdp_status take_shape(literal *in, int64_t *shape, int room, int *ndim_out, fsdp_error *err)
{
    *ndim_out = 0;
    FSDP_TRY(expect(in, '(', err));
    while (!take(in, ')')) {
        if (*ndim_out == room) {
            fail_at(in, "it has too many dimensions", err);
            if (err)
                err->status = FSDP_ERR_LIMIT;
            return FSDP_ERR_LIMIT;
        }
        FSDP_TRY(take_number(in, &shape[*ndim_out], err));
        ++*ndim_out;
        if (!take(in, ',') && next(in) != ')')
            return fail_at(in, "',' or ')' was expected", err);
        if (*ndim_out == 1 && in->at[-1] != ',')
            return fail_at(in, "',' was expected", err);
    }
    return FSDP_OK;
}

/* --- types ------------------------------------------------------------------------------------ */

static bool has_size(const char *sizes, int64_t size)
{
    for (const char *s = sizes; *s; s++) {
        if (*s == size)
            return true;
    }
    return false;
}

/* Bytes of one element of a plain type, -1 when the type does not exist. */
static int64_t plain_size(char kind, int64_t size)
{
    switch (kind) {
    case 'b': return size == 1 ? 1 : -1;
    case 'i':
    case 'u': return has_size("\1\2\4\10", size) ? size : -1;
    case 'f': return has_size("\1\2\4\10\12\14\20", size) ? size : -1;
    case 'c': return has_size("\10\20\24\30\40", size) ? size : -1;
    case 'M':
    case 'm': return size == 8 ? 8 : -1;
    case 'S':
    case 'a':
    case 'V': return size <= INT32_MAX ? size : -1;
    case 'U': return size <= INT32_MAX / 4 ? 4 * size : -1;
    default: return -1;
    }
}

static fsdp_dtype dtype_of(char kind, int64_t size)
{
    char name[24];
    if (kind == 'f' && size == 1) /* ml_dtypes: its only type of this kind */
        return FSDP_F8_E5M2;
    for (fsdp_dtype dtype = FSDP_DTYPE_NONE + 1; dtype < FSDP_DTYPE_COUNT; dtype++) {
        const char *theirs = fsdp_dtype_describe(dtype)->numpy;
        snprintf(name, sizeof name, "%c%" PRId64, kind, size);
        if (theirs && strcmp(theirs + 1, name) == 0)
            return dtype;
    }
    return FSDP_DTYPE_NONE;
}

/* "<f4", "|O", "<M8[D]": the type of an array or of a field. */
static fsdp_status read_plain_type(literal *in, const char *text, size_t size, int64_t *size_out,
                                   fsdp_error *err)
{
    const char *at = text, *end = text + size;
    bool is_big = at < end && *at == '>';
    if (at < end && strchr("<>=|", *at))
        at++;
    char kind = at < end ? *at++ : '\0';
    *size_out = 0;
    if (kind == 'O') {
        in->npy->has_objects = true;
        return FSDP_OK;
    }
    int64_t number = 0;
    for (; at < end && *at >= '0' && *at <= '9' && number <= INT32_MAX; at++)
        number = 10 * number + (*at - '0');
    bool is_time = kind == 'M' || kind == 'm';
    if (is_time && at < end && *at == '[')
        at = end; /* the unit does not change the size */
    *size_out = at == end ? plain_size(kind, number) : -1;
    if (*size_out < 0)
        return fail_at(in, "the type is unknown", err);
    in->npy->dtype = dtype_of(kind, number);
    in->npy->is_void = kind == 'V';
    in->npy->is_swapped = is_big;
    return FSDP_OK;
}

static fsdp_status take_type(literal *in, int depth, int64_t *size_out, fsdp_error *err);

/* A name, or a title and a name. */
static fsdp_status take_field_name(literal *in, const char **name_out, size_t *size_out,
                                   fsdp_error *err)
{
    bool is_pair = take(in, '(');
    FSDP_TRY(take_string(in, name_out, size_out, err));
    if (!is_pair)
        return FSDP_OK;
    FSDP_TRY(expect(in, ',', err));
    FSDP_TRY(take_string(in, name_out, size_out, err));
    return expect(in, ')', err);
}

/* The type that a field is named for: "bfloat16". */
static fsdp_dtype dtype_named(const char *name, size_t size, int64_t bytes)
{
    for (fsdp_dtype dtype = FSDP_DTYPE_NONE + 1; dtype < FSDP_DTYPE_COUNT; dtype++) {
        const fsdp_dtype_info *info = fsdp_dtype_describe(dtype);
        if (!info->numpy && info->torch && strlen(info->torch) == size &&
            memcmp(info->torch, name, size) == 0 && (int64_t)info->size == bytes)
            return dtype;
    }
    return FSDP_DTYPE_NONE;
}

/* ('name', type) or ('name', type, shape) */
static fsdp_status take_field(literal *in, int depth, int64_t *total, fsdp_dtype *named_out,
                              fsdp_error *err)
{
    int64_t size, shape[FSDP_MAX_DIMS];
    int ndim = 0;
    const char *name;
    size_t name_size;
    FSDP_TRY(expect(in, '(', err));
    FSDP_TRY(take_field_name(in, &name, &name_size, err));
    FSDP_TRY(expect(in, ',', err));
    FSDP_TRY(take_type(in, depth + 1, &size, err));
    *named_out = dtype_named(name, name_size, size);
    if (take(in, ',') && next(in) != ')')
        FSDP_TRY(take_shape(in, shape, FSDP_MAX_DIMS, &ndim, err));
    FSDP_TRY(expect(in, ')', err));
    bool is_over = false;
    for (int dim = 0; dim < ndim; dim++)
        is_over = fsdp_mul_overflow(size, shape[dim], &size) || is_over;
    if (is_over || fsdp_add_overflow(*total, size, total))
        return fail_at(in, "the type is too large", err);
    return FSDP_OK;
}

static fsdp_status take_type(literal *in, int depth, int64_t *size_out, fsdp_error *err)
{
    if (depth > DEEPEST)
        return fail_at(in, "types are nested too deeply", err);
    if (!take(in, '[')) {
        const char *text;
        size_t size;
        FSDP_TRY(take_string(in, &text, &size, err));
        return read_plain_type(in, text, size, size_out, err);
    }
    int fields = 0;
    fsdp_dtype named = FSDP_DTYPE_NONE;
    *size_out = 0;
    for (; !take(in, ']'); fields++) {
        FSDP_TRY(take_field(in, depth, size_out, &named, err));
        if (!take(in, ',') && next(in) != ']')
            return fail_at(in, "',' or ']' was expected", err);
    }
    bool is_named = depth == 0 && fields == 1 && (size_t)*size_out == fsdp_dtype_size(named);
    in->npy->dtype = is_named ? named : FSDP_DTYPE_NONE;
    in->npy->is_void = false;
    return FSDP_OK;
}

/* --- the dict --------------------------------------------------------------------------------- */

static fsdp_status take_descr(literal *in, fsdp_error *err)
{
    next(in);
    const char *start = in->at;
    FSDP_TRY(take_type(in, 0, &in->npy->item_size, err));
    fsdp_npy *npy = in->npy;
    size_t size = (size_t)(in->at - start);
    snprintf(npy->descr, sizeof npy->descr, "%.*s%s", size < 100 ? (int)size : 100, start,
             size > 100 ? "..." : "");
    return FSDP_OK;
}

static fsdp_status take_order(literal *in, fsdp_error *err)
{
    in->npy->is_fortran = take_word(in, "True");
    if (!in->npy->is_fortran && !take_word(in, "False"))
        return fail_at(in, "True or False was expected", err);
    return FSDP_OK;
}

static fsdp_status take_member(literal *in, unsigned *seen, fsdp_error *err)
{
    static const char *const keys[] = {"descr", "fortran_order", "shape"};
    const char *key;
    size_t size;
    FSDP_TRY(take_string(in, &key, &size, err));
    int which = 0;
    while (which < 3 && (strlen(keys[which]) != size || memcmp(keys[which], key, size) != 0))
        which++;
    if (which == 3 || *seen & 1u << which)
        return fail_at(in, "the key is unknown or appears twice", err);
    *seen |= 1u << which;
    FSDP_TRY(expect(in, ':', err));
    if (which == 0)
        return take_descr(in, err);
    if (which == 1)
        return take_order(in, err);
    return take_shape(in, in->npy->shape, FSDP_MAX_DIMS, &in->npy->ndim, err);
}

fsdp_status fsdp_npy_parse(const char *path, const char *text, size_t size, fsdp_npy *npy_out,
                           fsdp_error *err)
{
    *npy_out = (fsdp_npy){0};
    literal in = {.path = path, .text = text, .at = text, .end = text + size, .npy = npy_out};
    unsigned seen = 0;
    FSDP_TRY(expect(&in, '{', err));
    while (!take(&in, '}')) {
        FSDP_TRY(take_member(&in, &seen, err));
        if (!take(&in, ',') && next(&in) != '}')
            return fail_at(&in, "',' or '}' was expected", err);
    }
    if (seen != 7)
        return fail_at(&in, "descr, fortran_order or shape is missing", err);
    if (next(&in) != '\0' || in.at != in.end)
        return fail_at(&in, "the header is followed by other text", err);
    return FSDP_OK;
}

/* === arrays as a source ======================================================================= */

static const char names_member[] = "%names.npy";
enum { LONGEST_SPELLING = 64 << 20 };

/* The bytes of one array, header included. */
typedef struct array_place {
    fsdp_source *source;
    const char *name;
    size_t name_size;
    int file, stream;
    int64_t offset, size; /* in the file, or in the stream */
    bool is_member;
    const fsdp_source_opts *opts;
} array_place;

static fsdp_status read_at(const array_place *place, void *data, size_t size, int64_t offset,
                           fsdp_error *err)
{
    if (place->stream >= 0)
        return fsdp_source_stream_pread(place->source, place->stream, data, size,
                                        place->offset + offset, err);
    return fsdp_source_pread(place->source, place->file, data, size, place->offset + offset, err);
}

/* --- one array -------------------------------------------------------------------------------- */

/* Reads and parses the header; *data_out is the offset of the elements. */
static fsdp_status read_header(const array_place *place, fsdp_npy *npy, int64_t *data_out,
                               fsdp_error *err)
{
    const char *path = fsdp_source_file_path(place->source, (size_t)place->file);
    uint8_t prefix[FSDP_NPY_PREFIX];
    size_t prefix_size = place->size < FSDP_NPY_PREFIX ? (size_t)place->size : FSDP_NPY_PREFIX;
    int64_t offset;
    size_t size = 0;
    FSDP_TRY(read_at(place, prefix, prefix_size, 0, err));
    FSDP_TRY(fsdp_npy_place(path, prefix, prefix_size, &offset, &size, err));
    if ((int64_t)size > place->size - offset)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': the header of an array is cut off", path);
    char *text = fsdp_realloc(NULL, size + 1, 1);
    if (!text)
        return fsdp_fail_memory(err, path);
    fsdp_status status = read_at(place, text, size, offset, err);
    if (status == FSDP_OK)
        status = fsdp_npy_parse(path, text, size, npy, err);
    fsdp_free(text);
    *data_out = offset + (int64_t)size;
    return status;
}

/* The elements must fill the rest of the array exactly. */
static fsdp_status check_size(const array_place *place, const fsdp_npy *npy, int64_t data,
                              fsdp_error *err)
{
    int64_t size = npy->item_size;
    bool is_over = false, is_empty = false;
    for (int dim = 0; dim < npy->ndim; dim++) {
        is_empty = is_empty || npy->shape[dim] == 0;
        is_over = fsdp_mul_overflow(size, npy->shape[dim], &size) || is_over;
    }
    if (is_empty)
        size = 0;
    if ((is_over && !is_empty) || size != place->size - data)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': its header at byte %" PRId64 " does not fit the %" PRId64
                         " bytes that follow it",
                         fsdp_source_file_path(place->source, (size_t)place->file), place->offset,
                         place->size - data);
    return FSDP_OK;
}

static fsdp_status add_array(const array_place *place, const fsdp_npy *npy, int64_t data,
                             fsdp_error *err)
{
    static const int64_t origin[FSDP_MAX_DIMS];
    size_t tensor;
    FSDP_TRY(fsdp_source_add_tensor(place->source, place->name, place->name_size,
                                    &(fsdp_source_shape){npy->dtype, npy->ndim, npy->shape},
                                    &tensor, err));
    int64_t strides[FSDP_MAX_DIMS], stride = npy->item_size;
    for (int dim = 0; dim < npy->ndim; dim++) {
        strides[dim] = stride;
        stride *= npy->shape[dim] > 0 ? npy->shape[dim] : 1;
    }
    fsdp_source_chunk chunk = {.lo = origin,
                               .len = npy->shape,
                               .strides = npy->is_fortran ? strides : NULL,
                               .offset = place->offset + data,
                               .file = place->file,
                               .stream = place->stream,
                               .fix = npy->is_swapped && npy->item_size > 1 ? FSDP_FIX_SWAP : 0};
    return fsdp_source_add_chunk(place->source, tensor, &chunk, err);
}

static fsdp_status add_opaque(const array_place *place, const char *text, fsdp_error *err)
{
    fsdp_value value = {.kind = FSDP_VALUE_NULL};
    char shown[200]; /* the text of a header need not be UTF-8 */
    fsdp_printable(text, strlen(text), shown, sizeof shown);
    FSDP_TRY(fsdp_value_set_bytes(&value, FSDP_VALUE_CLASS, shown, strlen(shown), err));
    fsdp_status status =
        fsdp_source_add_value(place->source, place->name, place->name_size, &value, NULL, err);
    fsdp_value_release(&value);
    return status;
}

/* The next dtype of a list "bf16,f8_e4m3fn"; false at the end. */
static bool next_dtype(const char **list, fsdp_dtype *dtype_out)
{
    const char *name = *list;
    size_t size = strcspn(name, ",");
    if (*name == '\0')
        return false;
    *list += size + (name[size] == ',');
    *dtype_out = fsdp_dtype_from_typed(name, size);
    return true;
}

/* Every item is a dtype, and no two have the same size. */
static fsdp_status check_options(const fsdp_source_opts *opts, fsdp_error *err)
{
    enum { MOST_BYTES = 16 }; /* of an element: c128 */
    fsdp_dtype dtype, of_size[MOST_BYTES + 1] = {FSDP_DTYPE_NONE};
    const char *list = opts ? opts->void_as : NULL;
    for (bool more = list != NULL; more; more = *list != '\0') {
        const char *name = list;
        if (!next_dtype(&list, &dtype) || dtype == FSDP_DTYPE_NONE)
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "--void-as: '%.*s' is not a dtype, such as bf16 or f8_e4m3fn",
                             (int)strcspn(name, ","), name);
        fsdp_dtype *other = &of_size[fsdp_dtype_size(dtype)];
        if (*other != FSDP_DTYPE_NONE && *other != dtype)
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "--void-as: elements of %zu bytes are %s or %s; name one of them",
                             fsdp_dtype_size(dtype), fsdp_dtype_name(*other),
                             fsdp_dtype_name(dtype));
        *other = dtype;
    }
    return FSDP_OK;
}

/* NumPy has no name for the dtypes of other programs and writes their elements as bytes. */
static void name_void(const array_place *place, fsdp_npy *npy)
{
    fsdp_dtype dtype;
    const char *list = place->opts && place->opts->void_as ? place->opts->void_as : "";
    while (npy->is_void && npy->dtype == FSDP_DTYPE_NONE && next_dtype(&list, &dtype))
        if ((int64_t)fsdp_dtype_size(dtype) == npy->item_size)
            npy->dtype = dtype;
}

static fsdp_status add_one(const array_place *place, fsdp_error *err)
{
    fsdp_npy npy;
    int64_t data = 0;
    FSDP_TRY(read_header(place, &npy, &data, err));
    name_void(place, &npy);
    if (npy.has_objects && !place->is_member)
        return fsdp_fail(err, FSDP_ERR_REFUSED,
                         "'%s' is not an array of numbers but a pickle of Python objects",
                         fsdp_source_path(place->source));
    if (!npy.has_objects)
        FSDP_TRY(check_size(place, &npy, data, err));
    if (npy.dtype != FSDP_DTYPE_NONE && !npy.has_objects)
        return add_array(place, &npy, data, err);
    char text[sizeof npy.descr + 20];
    snprintf(text, sizeof text, "numpy array of %s", npy.descr);
    if (npy.has_objects)
        FSDP_TRY(fsdp_source_note_code(place->source, place->file, "numpy arrays of objects", err));
    return add_opaque(place, text, err);
}

/* --- the members of an archive ---------------------------------------------------------------- */

typedef struct npz_archive {
    fsdp_source *source;
    int file;
    const fsdp_source_opts *opts;
} npz_archive;

static fsdp_status read_zip(void *context, void *data, size_t size, int64_t offset, fsdp_error *err)
{
    const npz_archive *file = context;
    return fsdp_source_pread(file->source, file->file, data, size, offset, err);
}

static fsdp_status place_member(fsdp_source *source, int file, const fsdp_zip_entry *entry,
                                array_place *place, fsdp_error *err)
{
    *place = (array_place){.source = source,
                           .name = entry->name,
                           .name_size = entry->name_size,
                           .file = file,
                           .stream = FSDP_NO_STREAM,
                           .offset = entry->offset,
                           .size = entry->size,
                           .is_member = true};
    if (place->name_size >= 4 && memcmp(entry->name + place->name_size - 4, ".npy", 4) == 0)
        place->name_size -= 4;
    if (entry->is_deflated) {
        fsdp_source_stream stream = {.file = file,
                                     .packing = FSDP_PACKING_DEFLATE,
                                     .offset = entry->offset,
                                     .stored = entry->stored,
                                     .size = entry->size,
                                     .has_crc = entry->has_crc,
                                     .crc = entry->crc};
        place->offset = 0;
        return fsdp_source_add_stream(source, &stream, &place->stream, err);
    }
    if (!entry->has_crc)
        return FSDP_OK;
    char what[200], shown[150];
    snprintf(what, sizeof what, "member '%s'",
             fsdp_printable(entry->name, entry->name_size, shown, sizeof shown));
    return fsdp_source_add_crc(
        source, &(fsdp_source_crc){what, file, entry->offset, entry->size, entry->crc}, err);
}

static fsdp_status add_member(const npz_archive *archive, const fsdp_zip_entry *entry,
                              const fsdp_escaped_names *escaped, fsdp_error *err)
{
    array_place place;
    uint8_t head[6] = {0};
    fsdp_source *source = archive->source;
    FSDP_TRY(place_member(source, archive->file, entry, &place, err));
    place.opts = archive->opts;
    fsdp_escaped_names_resolve(escaped, &place.name, &place.name_size);
    size_t size = place.size < (int64_t)sizeof head ? (size_t)place.size : sizeof head;
    FSDP_TRY(read_at(&place, head, size, 0, err));
    if (!is_magic(head, size))
        return add_opaque(&place, "member of a zip that is not an array", err);
    return add_one(&place, err);
}

/* Reads the array that holds the true names of escaped members. */
static fsdp_status read_escaped_names(fsdp_source *source, int file, const fsdp_zip_entry *entry,
                                      fsdp_escaped_names *escaped, fsdp_error *err)
{
    array_place place;
    fsdp_npy npy;
    int64_t data;
    FSDP_TRY(place_member(source, file, entry, &place, err));
    FSDP_TRY(read_header(&place, &npy, &data, err));
    FSDP_TRY(check_size(&place, &npy, data, err));
    size_t size = (size_t)(place.size - data);
    if (size > LONGEST_SPELLING)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s': the list of names is too long",
                         fsdp_source_path(source));
    char *text = fsdp_realloc(NULL, size + 1, 1);
    if (!text)
        return fsdp_fail_memory(err, fsdp_source_path(source));
    fsdp_status status = read_at(&place, text, size, data, err);
    if (status == FSDP_OK)
        status = fsdp_escaped_names_parse(escaped, fsdp_source_path(source), text, size, err);
    fsdp_free(text);
    return status;
}

static fsdp_status add_members(npz_archive *archive, fsdp_error *err)
{
    fsdp_source *source = archive->source;
    int file = archive->file;
    fsdp_zip_input input = {.read = read_zip,
                            .context = archive,
                            .path = fsdp_source_path(source),
                            .size = fsdp_source_file_size(source, (size_t)file)};
    fsdp_zip *zip = NULL;
    FSDP_TRY(fsdp_zip_open(&input, FSDP_ZIP_NAMES_ARE_DATA, &zip, err));
    fsdp_status status = FSDP_OK;
    fsdp_escaped_names escaped = {0};
    const fsdp_zip_entry *names = fsdp_zip_find(zip, names_member, strlen(names_member));
    if (names)
        status = read_escaped_names(source, file, names, &escaped, err);
    for (size_t i = 0; i < fsdp_zip_count(zip) && status == FSDP_OK; i++) {
        const fsdp_zip_entry *entry = fsdp_zip_at(zip, i);
        if (entry == names)
            continue;
        status = add_member(archive, entry, &escaped, err);
        char shown[200];
        if (status != FSDP_OK)
            fsdp_error_prefix(err, "member '%s'",
                              fsdp_printable(entry->name, entry->name_size, shown, sizeof shown));
    }
    fsdp_escaped_names_release(&escaped);
    fsdp_zip_close(zip);
    return status;
}

/* --- the formats ------------------------------------------------------------------------------ */

static fsdp_status finish(fsdp_source *source, fsdp_status status, fsdp_source **source_out,
                          fsdp_error *err)
{
    if (status == FSDP_OK)
        status = fsdp_source_complete(source, err);
    if (status != FSDP_OK) {
        fsdp_source_close(source);
        source = NULL;
    }
    *source_out = source;
    return status;
}

static int bid_npy(const fsdp_probe *probe)
{
    return !probe->is_directory && is_magic(probe->head, probe->head_size) ? 48 : 0;
}

static fsdp_status open_npy(const fsdp_probe *probe, fsdp_source **source_out, fsdp_error *err)
{
    fsdp_source *source = NULL;
    FSDP_TRY(check_options(probe->opts, err));
    FSDP_TRY(fsdp_source_create(probe->io, probe->path, "npy", &source, err));
    array_place place = {
        .source = source, .name = "", .stream = FSDP_NO_STREAM, .opts = probe->opts};
    fsdp_status status = fsdp_source_add_file(source, probe->path, false, &place.file, err);
    if (status == FSDP_OK) {
        place.size = fsdp_source_file_size(source, (size_t)place.file);
        status = add_one(&place, err);
    }
    return finish(source, status, source_out, err);
}

/* A bid for a zip whose first member is named like an array, or that has no members. A name that
 * is longer than the probe is an array's, since torch.save names its records after a file. */
static int bid_npz(const fsdp_probe *probe)
{
    enum { LOCAL_HEADER = 30, EMPTY_ZIP = 22 };
    if (probe->is_directory || probe->head_size < EMPTY_ZIP)
        return 0;
    if (memcmp(probe->head, "PK\5\6", 4) == 0)
        return probe->size == EMPTY_ZIP ? 32 : 0;
    if (probe->head_size < LOCAL_HEADER || memcmp(probe->head, "PK\3\4", 4) != 0)
        return 0;
    size_t size = fsdp_load_u16(probe->head + 26);
    if (size > probe->head_size - LOCAL_HEADER)
        return probe->size > (int64_t)probe->head_size ? 64 : 0;
    return size >= 4 && memcmp(probe->head + LOCAL_HEADER + size - 4, ".npy", 4) == 0 ? 64 : 0;
}

static fsdp_status open_npz(const fsdp_probe *probe, fsdp_source **source_out, fsdp_error *err)
{
    npz_archive archive = {.opts = probe->opts};
    FSDP_TRY(check_options(probe->opts, err));
    FSDP_TRY(fsdp_source_create(probe->io, probe->path, "npz", &archive.source, err));
    fsdp_status status =
        fsdp_source_add_file(archive.source, probe->path, false, &archive.file, err);
    if (status == FSDP_OK)
        status = add_members(&archive, err);
    return finish(archive.source, status, source_out, err);
}

const fsdp_format fsdp_format_npz = {
    .name = "npz",
    .suffixes = {".npz"},
    .reads_file = true,
    .writes_file = true,
    .caps = {.maps_names = true, .takes_void = true},
    .reader = &(const fsdp_format_reader){.bid = bid_npz, .open = open_npz},
    .writer = &fsdp_npz_writer};

const fsdp_format fsdp_format_npy = {
    .name = "npy",
    .suffixes = {".npy"},
    .base = "npz",
    .reads_file = true,
    .writes_file = true,
    .caps = {.nameless = true, .maps_names = true, .takes_void = true},
    .reader = &(const fsdp_format_reader){.bid = bid_npy, .open = open_npy},
    .writer = &fsdp_npy_writer};
