/*
 * Parses the header of a .npy array. NumPy evaluates it as a Python literal; this parser accepts
 * a small grammar: one dict of three keys, strings, truth values, a tuple of numbers, and the
 * nested lists of a structured type.
 */
#include "formats/npy/npy_header.h"

#include "base/core/mem.h"
#include "base/core/bytes.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { DEEPEST = 16, PREFIX_V1 = 10, LONGEST_STRING = 1000 };

static const char magic[] = "\x93NUMPY";
enum { MAGIC_SIZE = sizeof magic - 1 };

typedef struct literal {
    const char *path;
    const char *text, *at, *end;
    fsdp_npy *npy;
} literal;

bool fsdp_npy_is_magic(const void *data, size_t size)
{
    return size >= MAGIC_SIZE && memcmp(data, magic, MAGIC_SIZE) == 0;
}

fsdp_status fsdp_npy_place(const char *path, const uint8_t *prefix, size_t prefix_size,
                           int64_t *offset_out, size_t *size_out, fsdp_error *err)
{
    if (!fsdp_npy_is_magic(prefix, prefix_size) || prefix_size < FSDP_NPY_PREFIX)
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
