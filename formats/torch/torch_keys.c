/*
 * Computes Python's str(key): keys of dicts that are not strings become elements of names.
 * Inside a tuple a key is written as its repr(). A key whose class formats it by its own rules
 * gets the name of the class.
 */
#include "formats/torch/torch_internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEEPEST = 16, LONGEST = 4096, DAY = 86400 };

typedef struct key_repr {
    const torch_archive *archive;
    fsdp_text *text;
    size_t start; /* begin of the key in the text */
} key_repr;

static void add_repr(const key_repr *at, fsdp_node key, int depth);

static const fsdp_pickle_node *node_at(const key_repr *at, fsdp_node node)
{
    return fsdp_pickle_at(&at->archive->pickle, node);
}

static fsdp_node argument(const key_repr *at, fsdp_node call, size_t number)
{
    return fsdp_pickle_argument(&at->archive->pickle, node_at(at, call), number);
}

static void add_global_name(const key_repr *at, fsdp_node key)
{
    char *spelled = fsdp_pickle_global_name(&at->archive->pickle, key);
    at->text->failed |= !spelled;
    if (spelled)
        fsdp_text_addf(at->text, "%s", spelled);
    fsdp_free(spelled);
}

/* --- numbers ------------------------------------------------------------------------------------ */

/* True when the digits read back as this number, in a float of so many bytes; for two bytes,
 * within half a step. */
static bool comes_back(const char *digits, double value, size_t width)
{
    if (width == 4)
        return strtof(digits, NULL) == (float)value;
    double read = strtod(digits, NULL);
    if (width == 8 || value == 0)
        return read == value;
    int exponent = ilogb(value) < -14 ? -14 : ilogb(value);
    bool is_step_halved =
        fabs(read) < fabs(value) && exponent > -14 && fabs(value) == ldexp(1, exponent);
    return fabs(read - value) < ldexp(1, exponent - (is_step_halved ? 12 : 11));
}

/* Adds the shortest digits that read back, without exponent in a middle range. end: the suffix
 * of whole numbers. */
static void add_float(const key_repr *at, double value, size_t width, const char *end)
{
    char digits[40];
    if (!isfinite(value)) {
        fsdp_text_addf(at->text, "%s", isnan(value) ? "nan" : value > 0 ? "inf" : "-inf");
        return;
    }
    int precision = 0;
    do {
        snprintf(digits, sizeof digits, "%.*e", precision, value);
    } while (!comes_back(digits, value, width) && ++precision < 17);
    int exponent = atoi(strchr(digits, 'e') + 1);
    bool is_plain = exponent >= -4 && exponent < 16;
    if (width < 8) /* the form of NumPy 2.3 and newer */
        is_plain = value == 0 || (fabs(value) >= 1e-4 && fabs(value) < (width == 4 ? 1e6 : 1e3));
    if (!is_plain) {
        fsdp_text_addf(at->text, "%s", digits);
    } else if (precision > exponent) {
        fsdp_text_addf(at->text, "%.*f", precision - exponent, strtod(digits, NULL));
    } else {
        fsdp_text_addf(at->text, "%.0f%s", strtod(digits, NULL), end);
    }
}

static void add_complex(const key_repr *at, const double parts[2], size_t width)
{
    bool has_real = parts[0] != 0 || signbit(parts[0]);
    if (has_real) {
        fsdp_text_add(at->text, "(", 1);
        add_float(at, parts[0], width, "");
        if (!signbit(parts[1]) || isnan(parts[1]))
            fsdp_text_add(at->text, "+", 1);
    }
    add_float(at, parts[1], width, "");
    fsdp_text_addf(at->text, has_real ? "j)" : "j");
}

static void add_bigint(const key_repr *at, const fsdp_pickle_node *node)
{
    char *decimal = fsdp_pickle_decimal(node);
    fsdp_text_addf(at->text, "%s", decimal ? decimal : "int");
    fsdp_free(decimal);
}

static double number_of(const key_repr *at, fsdp_node node)
{
    const fsdp_pickle_node *number = node_at(at, node);
    return number->kind == FSDP_NODE_FLOAT ? number->as.f64
           : number->kind == FSDP_NODE_INT ? (double)number->as.i64
                                           : 0;
}

static int64_t int_of(const key_repr *at, fsdp_node node)
{
    int64_t number;
    fsdp_pickle_int(&at->archive->pickle, node, &number);
    return number;
}

static void add_numpy_number(const key_repr *at, const fsdp_value *value, size_t width)
{
    switch (value->kind) {
    case FSDP_VALUE_I64: fsdp_text_addf(at->text, "%lld", (long long)value->as.i64); break;
    case FSDP_VALUE_U64: fsdp_text_addf(at->text, "%llu", (unsigned long long)value->as.u64); break;
    case FSDP_VALUE_F64: add_float(at, value->as.f64, width, ".0"); break;
    case FSDP_VALUE_COMPLEX: add_complex(at, value->as.complex_parts, width / 2); break;
    default: fsdp_text_addf(at->text, "%s", value->as.boolean ? "True" : "False");
    }
}

/* Since NumPy 2 the repr of a number names its type. */
static bool add_numpy_scalar(const key_repr *at, fsdp_node key, bool is_inside)
{
    fsdp_value value = {0};
    fsdp_dtype dtype = torch_numpy_scalar_dtype(at->archive, key);
    if (!torch_numpy_scalar(at->archive, key, &value))
        return false;
    const char *name = fsdp_dtype_describe(dtype)->torch;
    bool is_bool = value.kind == FSDP_VALUE_BOOL, is_complex = value.kind == FSDP_VALUE_COMPLEX;
    if (is_inside)
        fsdp_text_addf(at->text, is_bool ? "np.%s_" : "np.%s",
                       is_bool ? (value.as.boolean ? "True" : "False") : name);
    if (is_inside && is_bool)
        return true;
    if (is_inside && !is_bool && !is_complex)
        fsdp_text_add(at->text, "(", 1);
    if (is_inside && is_complex && value.as.complex_parts[0] == 0)
        fsdp_text_add(at->text, "(", 1);
    add_numpy_number(at, &value, fsdp_dtype_size(dtype));
    bool is_open = !is_bool && (!is_complex || value.as.complex_parts[0] == 0);
    if (is_inside && is_open)
        fsdp_text_add(at->text, ")", 1);
    return true;
}

/* --- text --------------------------------------------------------------------------------------- */

/* False for characters that Python escapes: controls, formats, spaces other than ' ',
 * surrogates, private use. */
static bool is_printable(uint32_t code)
{
    static const struct {
        uint32_t first, last;
    } unprintable[] = {
        {0x0, 0x1F},         {0x7F, 0xA0},       {0xAD, 0xAD},       {0x600, 0x605},
        {0x61C, 0x61C},      {0x6DD, 0x6DD},     {0x70F, 0x70F},     {0x890, 0x891},
        {0x8E2, 0x8E2},      {0x1680, 0x1680},   {0x180E, 0x180E},   {0x2000, 0x200F},
        {0x2028, 0x202F},    {0x205F, 0x206F},   {0x3000, 0x3000},   {0xD800, 0xF8FF},
        {0xFDD0, 0xFDEF},    {0xFEFF, 0xFEFF},   {0xFFF0, 0xFFFB},   {0xFFFE, 0xFFFF},
        {0x110BD, 0x110BD},  {0x110CD, 0x110CD}, {0x13430, 0x1343F}, {0x1BCA0, 0x1BCA3},
        {0x1D173, 0x1D17A},  {0x1FFFE, 0x1FFFF}, {0x2FFFE, 0x2FFFF}, {0x3FFFE, 0xE00FF},
        {0xE01F0, 0x10FFFF},
    };
    for (size_t i = 0; i < sizeof unprintable / sizeof *unprintable; i++)
        if (code >= unprintable[i].first && code <= unprintable[i].last)
            return false;
    return true;
}

/* Decodes one character of valid UTF-8 and returns its length. */
static size_t decode(const char *data, size_t size, uint32_t *code_out)
{
    uint8_t lead = (uint8_t)data[0];
    size_t count = lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    if (count > size)
        count = 1;
    *code_out = count == 1 ? lead : lead & (0x7FU >> count);
    for (size_t i = 1; i < count; i++)
        *code_out = *code_out << 6 | ((uint8_t)data[i] & 0x3F);
    return count;
}

static void add_escape(fsdp_text *text, uint32_t code)
{
    if (code == '\n' || code == '\r' || code == '\t')
        fsdp_text_addf(text, "\\%c", code == '\n' ? 'n' : code == '\r' ? 'r' : 't');
    else if (code < 0x100)
        fsdp_text_addf(text, "\\x%02x", (unsigned)code);
    else
        fsdp_text_addf(text, code < 0x10000 ? "\\u%04x" : "\\U%08x", (unsigned)code);
}

static void add_quoted(fsdp_text *text, const char *data, size_t size, bool is_bytes)
{
    char quote = size > 0 && memchr(data, '\'', size) && !memchr(data, '"', size) ? '"' : '\'';
    fsdp_text_add(text, &quote, 1);
    for (size_t i = 0, count; i < size; i += count) {
        uint32_t code = (uint8_t)data[i];
        count = is_bytes ? 1 : decode(data + i, size - i, &code);
        if (code == (uint8_t)quote || code == '\\')
            fsdp_text_addf(text, "\\%c", (char)code);
        else if ((is_bytes && code >= 0x7F) || !is_printable(code))
            add_escape(text, code);
        else
            fsdp_text_add(text, data + i, count);
    }
    fsdp_text_add(text, &quote, 1);
}

static bool add_bytes(const key_repr *at, fsdp_node key)
{
    const char *data;
    char *owned;
    size_t size;
    if (!torch_bytes(at->archive, key, &data, &size, &owned))
        return false;
    fsdp_text_add(at->text, "b", 1);
    add_quoted(at->text, data, size, true);
    fsdp_free(owned);
    return true;
}

/* Adds text as it is, or as "name('text')". */
static bool add_wrapped(const key_repr *at, const char *name, fsdp_node node, bool is_inside)
{
    const fsdp_pickle_node *text = node_at(at, node);
    if (text->kind != FSDP_NODE_STR)
        return false;
    if (!is_inside) {
        fsdp_text_add(at->text, text->as.text, text->count);
        return true;
    }
    fsdp_text_addf(at->text, "%s(", name);
    add_quoted(at->text, text->as.text, text->count, false);
    fsdp_text_add(at->text, ")", 1);
    return true;
}

/* --- containers --------------------------------------------------------------------------------- */

static void add_items(const key_repr *at, const fsdp_pickle_node *items, int depth)
{
    for (uint32_t i = 0; i < items->count; i++) {
        if (depth == DEEPEST || at->text->size - at->start > LONGEST) {
            fsdp_text_addf(at->text, "...");
            break;
        }
        if (i > 0)
            fsdp_text_addf(at->text, ", ");
        add_repr(at, items->as.items[i], depth + 1);
    }
}

static void add_list(const key_repr *at, fsdp_node list, const char *before, const char *after,
                     int depth)
{
    fsdp_text_addf(at->text, "%s", before);
    add_items(at, node_at(at, list), depth);
    fsdp_text_addf(at->text, "%s", after);
}

static bool is_list(const key_repr *at, fsdp_node node)
{
    uint8_t kind = node_at(at, node)->kind;
    return kind == FSDP_NODE_TUPLE || kind == FSDP_NODE_LIST;
}

static bool add_frozenset(const key_repr *at, fsdp_node items, int depth)
{
    if (items != 0 && !is_list(at, items) && node_at(at, items)->kind != FSDP_NODE_FROZENSET)
        return false;
    bool is_empty = node_at(at, items)->count == 0;
    add_list(at, items, is_empty ? "frozenset(" : "frozenset({", is_empty ? ")" : "})", depth);
    return true;
}

/* A step of 1 is omitted. */
static bool add_range(const key_repr *at, fsdp_node key)
{
    fsdp_node args = node_at(at, key)->as.call->args;
    uint32_t count = node_at(at, args)->count;
    if (count == 0 || count > 3)
        return false;
    if (count == 3 && int_of(at, argument(at, key, 2)) == 1)
        count = 2;
    fsdp_text_addf(at->text, count == 1 ? "range(0, " : "range(");
    for (uint32_t i = 0; i < count; i++) {
        fsdp_text_addf(at->text, i > 0 ? ", " : "");
        add_repr(at, argument(at, key, i), DEEPEST);
    }
    fsdp_text_add(at->text, ")", 1);
    return true;
}

/* --- dates -------------------------------------------------------------------------------------- */

static void add_delta(const key_repr *at, int64_t days, int64_t seconds, int64_t micros)
{
    if (days != 0)
        fsdp_text_addf(at->text, "%lld day%s, ", (long long)days,
                       days == 1 || days == -1 ? "" : "s");
    fsdp_text_addf(at->text, "%lld:%02lld:%02lld", (long long)(seconds / 3600),
                   (long long)(seconds / 60 % 60), (long long)(seconds % 60));
    if (micros != 0)
        fsdp_text_addf(at->text, ".%06lld", (long long)micros);
}

static void add_delta_repr(const key_repr *at, const int64_t parts[3])
{
    static const char *const names[] = {"days", "seconds", "microseconds"};
    const char *between = "";
    fsdp_text_addf(at->text, "datetime.timedelta(");
    for (int i = 0; i < 3; i++)
        if (parts[i] != 0) {
            fsdp_text_addf(at->text, "%s%s=%lld", between, names[i], (long long)parts[i]);
            between = ", ";
        }
    fsdp_text_addf(at->text, "%s)", between[0] ? "" : "0");
}

/* Adds "+02:00" for timezone(timedelta); false for other zones, and for offsets beyond Python's
 * limit. */
static bool add_zone(const key_repr *at, fsdp_node zone)
{
    if (zone == 0)
        return true;
    fsdp_node delta = argument(at, zone, 0);
    if (node_at(at, zone)->known != FSDP_KNOWN_DATETIME ||
        strcmp(torch_class_name(at->archive, zone), "timezone") != 0)
        return false;
    int64_t days = int_of(at, argument(at, delta, 0)), seconds = int_of(at, argument(at, delta, 1));
    if (days < -1 || days > 1 || seconds < -2 * DAY || seconds > 2 * DAY)
        return false;
    seconds += days * DAY;
    char sign = seconds < 0 ? '-' : '+';
    seconds = seconds < 0 ? -seconds : seconds;
    if (seconds >= DAY)
        return false;
    fsdp_text_addf(at->text, "%c%02lld:%02lld", sign, (long long)(seconds / 3600),
                   (long long)(seconds / 60 % 60));
    if (seconds % 60 != 0)
        fsdp_text_addf(at->text, ":%02lld", (long long)(seconds % 60));
    return true;
}

/* Decodes the bytes of a pickled date (4), time (6) or both (10); the first bit of a time and of
 * a month is the fold. */
static bool add_packed_time(const key_repr *at, const uint8_t *bytes, size_t size, fsdp_node zone)
{
    if (size == 4 || size == 10)
        fsdp_text_addf(at->text, "%04d-%02d-%02d", bytes[0] * 256 + bytes[1], bytes[2] & 0x7F,
                       bytes[3]);
    if (size == 10)
        fsdp_text_add(at->text, " ", 1);
    if (size == 4)
        return true;
    const uint8_t *time = bytes + size - 6;
    int micros = time[3] * 65536 + time[4] * 256 + time[5];
    fsdp_text_addf(at->text, "%02d:%02d:%02d", time[0] & 0x7F, time[1], time[2]);
    if (micros != 0)
        fsdp_text_addf(at->text, ".%06d", micros);
    return add_zone(at, zone);
}

static bool add_packed_time_repr(const key_repr *at, const uint8_t *bytes, size_t size)
{
    const uint8_t *time = bytes + size - 6;
    if (size == 4 || size == 10)
        fsdp_text_addf(at->text, "%s(%d, %d, %d", size == 4 ? "datetime.date" : "datetime.datetime",
                       bytes[0] * 256 + bytes[1], bytes[2] & 0x7F, bytes[3]);
    if (size == 6)
        fsdp_text_addf(at->text, "datetime.time(%d, %d", time[0] & 0x7F, time[1]);
    if (size == 10)
        fsdp_text_addf(at->text, ", %d, %d", time[0] & 0x7F, time[1]);
    if (size > 4) {
        int micros = time[3] * 65536 + time[4] * 256 + time[5];
        if (time[2] != 0 || micros != 0)
            fsdp_text_addf(at->text, ", %d", time[2]);
        if (micros != 0)
            fsdp_text_addf(at->text, ", %d", micros);
    }
    fsdp_text_add(at->text, ")", 1);
    return true;
}

static bool add_time(const key_repr *at, fsdp_node key, bool is_inside)
{
    const char *class_name = torch_class_name(at->archive, key), *data;
    char *owned;
    size_t size, before = at->text->size;
    if (strcmp(class_name, "timedelta") == 0) {
        int64_t parts[3];
        for (size_t i = 0; i < 3; i++)
            parts[i] = int_of(at, argument(at, key, i));
        if (is_inside)
            add_delta_repr(at, parts);
        else
            add_delta(at, parts[0], parts[1], parts[2]);
        return true;
    }
    size_t wanted = strcmp(class_name, "date") == 0       ? 4
                    : strcmp(class_name, "time") == 0     ? 6
                    : strcmp(class_name, "datetime") == 0 ? 10
                                                          : 0;
    fsdp_node zone = argument(at, key, 1);
    if (wanted == 0 || (is_inside && zone != 0) ||
        !torch_bytes(at->archive, argument(at, key, 0), &data, &size, &owned))
        return false;
    bool is_added =
        size == wanted && (is_inside ? add_packed_time_repr(at, (const uint8_t *)data, size)
                                     : add_packed_time(at, (const uint8_t *)data, size, zone));
    fsdp_free(owned);
    if (!is_added)
        at->text->size = before;
    return is_added;
}

/* --- other classes of Python -------------------------------------------------------------------- */

static bool add_fraction(const key_repr *at, fsdp_node key, bool is_inside)
{
    char text[100] = "";
    const fsdp_pickle_node *first = node_at(at, argument(at, key, 0));
    long long parts[2] = {first->as.i64, int_of(at, argument(at, key, 1))};
    if (first->kind == FSDP_NODE_STR && first->count < sizeof text) {
        memcpy(text, first->as.text, first->count);
        parts[1] = 1;
        if (sscanf(text, "%lld/%lld", &parts[0], &parts[1]) < 1)
            return false;
    } else if (first->kind != FSDP_NODE_INT) {
        return false;
    }
    if (is_inside)
        fsdp_text_addf(at->text, "Fraction(%lld, %lld)", parts[0], parts[1]);
    else
        fsdp_text_addf(at->text, parts[1] == 1 ? "%lld" : "%lld/%lld", parts[0], parts[1]);
    return true;
}

/* The state holds the number, of 128 bits. */
static bool add_uuid(const key_repr *at, fsdp_node key, bool is_inside)
{
    uint8_t bytes[16] = {0};
    const fsdp_pickle_node *number = node_at(at, torch_attribute(at->archive, key, "int"));
    if (number->kind == FSDP_NODE_BIGINT && number->count <= sizeof bytes + 1)
        for (uint32_t i = 0; i < number->count && i < sizeof bytes; i++)
            bytes[15 - i] = (uint8_t)number->as.text[i];
    else if (number->kind == FSDP_NODE_INT && number->as.i64 >= 0)
        for (int i = 0; i < 8; i++)
            bytes[15 - i] = (uint8_t)(number->as.i64 >> (8 * i));
    else
        return false;
    fsdp_text_addf(at->text, is_inside ? "UUID('" : "");
    for (int i = 0; i < 16; i++)
        fsdp_text_addf(at->text, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x",
                       bytes[i]);
    fsdp_text_addf(at->text, is_inside ? "')" : "");
    return true;
}

/* Python 3.13 pickles a path as it was given: pathlib drops '.' and separators that follow one. */
static void drop_empty_parts(fsdp_text *path, char separator)
{
    size_t size = 0, i = 0;
    while (i < path->size && path->data[i] == separator)
        i++;
    if (i > 0)
        size = i == 2 ? 2 : 1; /* two are a root of their own */
    while (i < path->size) {
        size_t end = i;
        while (end < path->size && path->data[end] != separator)
            end++;
        bool is_dropped = end == i || (end == i + 1 && path->data[i] == '.');
        for (; !is_dropped && i < end; i++)
            path->data[size++] = path->data[i];
        if (!is_dropped && end < path->size)
            path->data[size++] = separator;
        i = end + 1;
    }
    bool is_root = size <= 2 && path->size > 0 && path->data[0] == separator;
    bool is_drive = size == 3 && path->data[1] == ':' && separator == '\\';
    if (size > 0 && path->data[size - 1] == separator && !is_root && !is_drive)
        size--;
    path->size = size;
}

static bool add_path(const key_repr *at, fsdp_node key, bool is_inside)
{
    const char *class_name = torch_class_name(at->archive, key);
    bool is_windows = strstr(class_name, "Windows");
    const fsdp_pickle_node *parts = node_at(at, node_at(at, key)->as.call->args);
    for (uint32_t i = 0; i < parts->count; i++)
        if (node_at(at, parts->as.items[i])->kind != FSDP_NODE_STR)
            return false;
    fsdp_text path = {0};
    for (uint32_t i = 0; i < parts->count; i++) {
        const fsdp_pickle_node *part = node_at(at, parts->as.items[i]);
        char last = path.size > 0 ? path.data[path.size - 1] : '/';
        if (last != '/' && last != '\\')
            fsdp_text_add(&path, is_windows ? "\\" : "/", 1);
        fsdp_text_add(&path, part->as.text, part->count);
    }
    for (size_t i = 0; is_windows && i < path.size; i++)
        path.data[i] = path.data[i] == '/' ? '\\' : path.data[i];
    drop_empty_parts(&path, is_windows ? '\\' : '/');
    if (path.size == 0)
        fsdp_text_add(&path, ".", 1);
    at->text->failed |= path.failed;
    for (size_t i = 0; is_windows && is_inside && i < path.size; i++)
        path.data[i] = path.data[i] == '\\' ? '/' : path.data[i];
    if (is_inside) {
        fsdp_text_addf(at->text, "%s(", class_name);
        add_quoted(at->text, path.data, path.size, false);
        fsdp_text_add(at->text, ")", 1);
    } else {
        fsdp_text_add(at->text, path.data, path.size);
    }
    fsdp_text_release(&path);
    return true;
}

static bool add_call(const key_repr *at, fsdp_node key, int depth)
{
    const fsdp_pickle_node *call = node_at(at, key);
    bool is_inside = depth > 0;
    double parts[2];
    if (call->flags & FSDP_NODE_OPAQUE)
        return false;
    switch (call->known) {
    case FSDP_KNOWN_BYTES:
    case FSDP_KNOWN_CODECS_ENCODE: return add_bytes(at, key);
    case FSDP_KNOWN_NUMPY_SCALAR: return add_numpy_scalar(at, key, is_inside);
    case FSDP_KNOWN_COMPLEX:
        parts[0] = number_of(at, argument(at, key, 0));
        parts[1] = number_of(at, argument(at, key, 1));
        add_complex(at, parts, 8);
        return true;
    case FSDP_KNOWN_TORCH_SIZE:
        add_list(at, argument(at, key, 0), "torch.Size([", "])", depth);
        return true;
    case FSDP_KNOWN_FROZENSET: return add_frozenset(at, argument(at, key, 0), depth);
    case FSDP_KNOWN_RANGE: return add_range(at, key);
    case FSDP_KNOWN_SLICE: add_list(at, call->as.call->args, "slice(", ")", depth); return true;
    case FSDP_KNOWN_DATETIME: return add_time(at, key, is_inside);
    case FSDP_KNOWN_DECIMAL: return add_wrapped(at, "Decimal", argument(at, key, 0), is_inside);
    case FSDP_KNOWN_FRACTION: return add_fraction(at, key, is_inside);
    case FSDP_KNOWN_UUID: return add_uuid(at, key, is_inside);
    case FSDP_KNOWN_PATHLIB: return add_path(at, key, is_inside);
    default: return false;
    }
}

/* --- all keys ----------------------------------------------------------------------------------- */

static void add_global(const key_repr *at, fsdp_node key)
{
    const fsdp_pickle_global *global = node_at(at, key)->as.global;
    bool is_builtin =
        strcmp(global->module, "builtins") == 0 || strcmp(global->module, "__builtin__") == 0;
    if (is_builtin &&
        (strcmp(global->name, "Ellipsis") == 0 || strcmp(global->name, "NotImplemented") == 0))
        fsdp_text_addf(at->text, "%s", global->name);
    else
        add_global_name(at, key);
}

static void add_repr(const key_repr *at, fsdp_node key, int depth)
{
    const fsdp_pickle_node *node = node_at(at, key);
    switch (node->kind) {
    case FSDP_NODE_NONE: fsdp_text_addf(at->text, "None"); break;
    case FSDP_NODE_BOOL: fsdp_text_addf(at->text, "%s", node->as.i64 ? "True" : "False"); break;
    case FSDP_NODE_INT: fsdp_text_addf(at->text, "%lld", (long long)node->as.i64); break;
    case FSDP_NODE_BIGINT: add_bigint(at, node); break;
    case FSDP_NODE_FLOAT: add_float(at, node->as.f64, 8, ".0"); break;
    case FSDP_NODE_STR: add_quoted(at->text, node->as.text, node->count, false); break;
    case FSDP_NODE_BYTES: add_bytes(at, key); break;
    case FSDP_NODE_TUPLE: add_list(at, key, "(", node->count == 1 ? ",)" : ")", depth); break;
    case FSDP_NODE_FROZENSET: add_frozenset(at, key, depth); break;
    case FSDP_NODE_GLOBAL: add_global(at, key); break;
    case FSDP_NODE_CALL:
        if (!add_call(at, key, depth))
            add_global_name(at, key);
        break;
    default: add_global_name(at, key);
    }
}

void torch_add_key(const torch_archive *archive, fsdp_node key, fsdp_text *text)
{
    const fsdp_pickle_node *node = fsdp_pickle_at(&archive->pickle, key);
    const key_repr at = {archive, text, text->size};
    if (node->kind == FSDP_NODE_STR)
        fsdp_text_add(text, node->as.text, node->count);
    else
        add_repr(&at, key, 0);
}
