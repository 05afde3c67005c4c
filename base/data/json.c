/*
 * The JSON reader: a cursor over memory that the caller pulls values from. See json.h.
 *
 * Each fsdp_json_* function takes one token and checks the brackets and commas before it, so a text is
 * valid once fsdp_json_finish has accepted it.
 */
#include "base/data/json.h"

#include "base/core/mem.h"

#include "base/text.h"
#include <errno.h>
#include <inttypes.h>
#include <locale.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEEPEST = 64 };

void fsdp_json_init(fsdp_json *json, const char *text, size_t size, const char *name)
{
    *json = (fsdp_json){.text = text, .at = text, .end = text + size, .name = name};
}

void fsdp_json_release(fsdp_json *json)
{
    fsdp_free(json->scratch);
    *json = (fsdp_json){0};
}

fsdp_status fsdp_json_fail(const fsdp_json *json, fsdp_error *err, const char *format, ...)
{
    if (!err)
        return FSDP_ERR_DAMAGED;
    size_t line = 1;
    const char *line_start = json->text;
    for (const char *p = json->text; p < json->at; p++) {
        if (*p == '\n') {
            line++;
            line_start = p + 1;
        }
    }
    char what[FSDP_ERROR_TEXT];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' line %zu column %zu: %s", json->name, line,
                     (size_t)(json->at - line_start) + 1, what);
}

static void skip_space(fsdp_json *json)
{
    const char *p = json->at;
    while (p < json->end && (*p == ' ' || *p == '\n' || *p == '\r' || *p == '\t'))
        p++;
    json->at = p;
}

/* The next character that is not white space, -1 at the end. */
static int next_character(fsdp_json *json)
{
    skip_space(json);
    return json->at < json->end ? (unsigned char)*json->at : -1;
}

static fsdp_status fail_expected(fsdp_json *json, const char *what, fsdp_error *err)
{
    if (next_character(json) < 0)
        return fsdp_json_fail(json, err, "the text ends where %s was expected", what);
    return fsdp_json_fail(json, err, "%s was expected", what);
}

fsdp_json_kind fsdp_json_peek(fsdp_json *json)
{
    switch (next_character(json)) {
    case -1: return FSDP_JSON_END;
    case '{': return FSDP_JSON_OBJECT;
    case '[': return FSDP_JSON_ARRAY;
    case '"': return FSDP_JSON_STRING;
    case 't':
    case 'f': return FSDP_JSON_BOOL;
    case 'n': return FSDP_JSON_NULL;
    default: return FSDP_JSON_NUMBER;
    }
}

static fsdp_status enter(fsdp_json *json, char bracket, const char *what, fsdp_error *err)
{
    if (next_character(json) != bracket)
        return fail_expected(json, what, err);
    if (json->depth == DEEPEST)
        return fsdp_json_fail(json, err, "values are nested more than %d deep", DEEPEST);
    json->depth++;
    json->at++;
    json->first = true;
    return FSDP_OK;
}

fsdp_status fsdp_json_enter_object(fsdp_json *json, fsdp_error *err)
{
    return enter(json, '{', "an object", err);
}

fsdp_status fsdp_json_enter_array(fsdp_json *json, fsdp_error *err)
{
    return enter(json, '[', "an array", err);
}

/* Takes the closing bracket, or the comma unless this is the first member. */
static fsdp_status next_member(fsdp_json *json, char bracket, bool *more_out, fsdp_error *err)
{
    bool first = json->first;
    json->first = false;
    int c = next_character(json);
    *more_out = c != bracket;
    if (c == bracket) {
        json->depth--;
        json->at++;
        return FSDP_OK;
    }
    if (first)
        return FSDP_OK;
    if (c != ',')
        return fail_expected(json, bracket == '}' ? "',' or '}'" : "',' or ']'", err);
    json->at++;
    return FSDP_OK;
}

fsdp_status fsdp_json_next_key(fsdp_json *json, const char **key_out, size_t *size_out,
                               bool *more_out, fsdp_error *err)
{
    FSDP_TRY(next_member(json, '}', more_out, err));
    if (!*more_out)
        return FSDP_OK;
    if (next_character(json) != '"')
        return fail_expected(json, "a key in quotes", err);
    FSDP_TRY(fsdp_json_string(json, key_out, size_out, err));
    if (next_character(json) != ':')
        return fail_expected(json, "':'", err);
    json->at++;
    return FSDP_OK;
}

fsdp_status fsdp_json_next_item(fsdp_json *json, bool *more_out, fsdp_error *err)
{
    FSDP_TRY(next_member(json, ']', more_out, err));
    if (*more_out && next_character(json) == ']')
        return fail_expected(json, "a value", err);
    return FSDP_OK;
}

/* Four hexadecimal digits at p, -1 when they are not. */
static int32_t hex_code(const char *p, const char *end)
{
    if (end - p < 4)
        return -1;
    int32_t code = 0;
    for (int i = 0; i < 4; i++) {
        char c = p[i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0)
            return -1;
        code = code << 4 | digit;
    }
    return code;
}

static char *put_utf8(char *to, uint32_t c)
{
    if (c < 0x80) {
        *to++ = (char)c;
    } else if (c < 0x800) {
        *to++ = (char)(0xC0 | c >> 6);
        *to++ = (char)(0x80 | (c & 63));
    } else if (c < 0x10000) {
        *to++ = (char)(0xE0 | c >> 12);
        *to++ = (char)(0x80 | (c >> 6 & 63));
        *to++ = (char)(0x80 | (c & 63));
    } else {
        *to++ = (char)(0xF0 | c >> 18);
        *to++ = (char)(0x80 | (c >> 12 & 63));
        *to++ = (char)(0x80 | (c >> 6 & 63));
        *to++ = (char)(0x80 | (c & 63));
    }
    return to;
}

/* Takes the digits after "\u", and the second escape of a surrogate pair. */
static fsdp_status take_unicode_escape(fsdp_json *json, char **to, fsdp_error *err)
{
    int32_t code = hex_code(json->at, json->end);
    if (code < 0)
        return fsdp_json_fail(json, err, "four hexadecimal digits were expected");
    if (code >= 0xD800 && code <= 0xDFFF) {
        const char *second = json->at + 4;
        bool pair = code <= 0xDBFF && json->end - second >= 6 && memcmp(second, "\\u", 2) == 0;
        int32_t low = pair ? hex_code(second + 2, json->end) : -1;
        if (low < 0xDC00 || low > 0xDFFF)
            return fsdp_json_fail(json, err, "a string has half of a surrogate pair");
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
        json->at += 6;
    }
    json->at += 4;
    *to = put_utf8(*to, (uint32_t)code);
    return FSDP_OK;
}

static fsdp_status take_escape(fsdp_json *json, char **to, fsdp_error *err)
{
    static const char letters[] = "\"\\/bfnrt";
    static const char meanings[] = "\"\\/\b\f\n\r\t";
    json->at++; /* the backslash */
    char c = json->at < json->end ? *json->at : '\0';
    if (c == 'u') {
        json->at++;
        return take_unicode_escape(json, to, err);
    }
    const char *letter = c ? strchr(letters, c) : NULL;
    if (!letter)
        return fsdp_json_fail(json, err, "a string has an unknown escape");
    *(*to)++ = meanings[letter - letters];
    json->at++;
    return FSDP_OK;
}

static bool ends_run(unsigned char c)
{
    return c == '"' || c == '\\' || c < 0x20;
}

/* A mask with the top bit of each byte of word that is zero (and perhaps of bytes above one). */
static uint64_t zero_bytes(uint64_t word)
{
    return (word - 0x0101010101010101u) & ~word & 0x8080808080808080u;
}

/* The first character that is not plain ASCII, or that means something within a string. */
static const char *plain_run(const char *p, const char *end)
{
    for (uint64_t word; end - p >= 8; p += 8) {
        memcpy(&word, p, sizeof word);
        uint64_t quotes = zero_bytes(word ^ 0x2222222222222222u);
        uint64_t backslashes = zero_bytes(word ^ 0x5C5C5C5C5C5C5C5Cu);
        uint64_t controls = (word - 0x2020202020202020u) & ~word;
        if ((quotes | backslashes | controls | word) & 0x8080808080808080u)
            break;
    }
    while (p < end && !ends_run((unsigned char)*p) && (unsigned char)*p < 0x80)
        p++;
    return p;
}

/* The position of the closing quote of the string whose first character is at p; NULL: none. */
static const char *closing_quote(const char *p, const char *end)
{
    for (; p < end && *p != '"'; p++) {
        if (*p == '\\' && ++p == end)
            return NULL;
    }
    return p < end ? p : NULL;
}

/* Copies from right after the opening quote up to the closing one; scratch has capacity for it, since
 * no escape is shorter than what it stands for. */
static fsdp_status unescape(fsdp_json *json, const char *quote, size_t *size_out, fsdp_error *err)
{
    char *to = json->scratch;
    while (json->at < quote) {
        const char *run = json->at;
        while (!ends_run((unsigned char)*json->at))
            json->at++;
        memcpy(to, run, (size_t)(json->at - run));
        to += json->at - run;
        if (json->at < quote && *json->at != '\\')
            return fsdp_json_fail(json, err, "a string has a control character");
        if (json->at < quote)
            FSDP_TRY(take_escape(json, &to, err));
    }
    *to = '\0';
    *size_out = (size_t)(to - json->scratch);
    return FSDP_OK;
}

fsdp_status fsdp_json_string(fsdp_json *json, const char **data_out, size_t *size_out,
                             fsdp_error *err)
{
    if (next_character(json) != '"')
        return fail_expected(json, "a string", err);
    const char *start = json->at + 1;
    const char *quote = plain_run(start, json->end);
    bool plain = quote < json->end && *quote == '"';
    if (!plain)
        quote = closing_quote(quote, json->end);
    if (!quote)
        return fsdp_json_fail(json, err, "a string has no end");
    size_t size = (size_t)(quote - start);
    if (!plain && !fsdp_utf8_valid(start, size))
        return fsdp_json_fail(json, err, "a string is not UTF-8");
    if (!fsdp_grow(&json->scratch, &json->scratch_capacity, size + 1, 1))
        return fsdp_fail_memory(err, json->name);
    json->at = start;
    if (plain) {
        memcpy(json->scratch, start, size);
        json->scratch[size] = '\0';
        *size_out = size;
    } else {
        FSDP_TRY(unescape(json, quote, size_out, err));
    }
    json->at = quote + 1;
    *data_out = json->scratch;
    return FSDP_OK;
}

typedef struct number_text {
    const char *start;
    size_t size;
    bool integer; /* neither fraction nor exponent */
} number_text;

static const char *take_digits(const char *p, const char *end)
{
    while (p < end && *p >= '0' && *p <= '9')
        p++;
    return p;
}

/* The number's spelling by the grammar of RFC 8259; an empty one when there is no number. */
static number_text scan_number(fsdp_json *json)
{
    skip_space(json);
    const char *end = json->end;
    number_text none = {0};
    number_text number = {.start = json->at, .integer = true};
    const char *p = json->at;
    if (p < end && *p == '-')
        p++;
    const char *digits = p;
    p = p < end && *p == '0' ? p + 1 : take_digits(p, end);
    if (p == digits)
        return none;
    if (p < end && *p == '.') {
        number.integer = false;
        digits = ++p;
        p = take_digits(p, end);
        if (p == digits)
            return none;
    }
    if (p < end && (*p == 'e' || *p == 'E')) {
        number.integer = false;
        p++;
        if (p < end && (*p == '+' || *p == '-'))
            p++;
        digits = p;
        p = take_digits(p, end);
        if (p == digits)
            return none;
    }
    number.size = (size_t)(p - number.start);
    return number;
}

/* Takes an integer as sign and magnitude; the limits are magnitudes. */
static fsdp_status take_integer(fsdp_json *json, uint64_t lowest, uint64_t highest,
                                bool *negative_out, uint64_t *magnitude_out, fsdp_error *err)
{
    number_text number = scan_number(json);
    if (number.size == 0 || !number.integer)
        return fail_expected(json, "an integer", err);
    bool negative = *number.start == '-';
    bool too_large = false;
    uint64_t magnitude = 0;
    for (size_t i = negative; i < number.size && !too_large; i++) {
        uint64_t digit = (uint64_t)(number.start[i] - '0');
        too_large = __builtin_mul_overflow(magnitude, 10u, &magnitude) ||
                    __builtin_add_overflow(magnitude, digit, &magnitude);
    }
    if (too_large || magnitude > (negative ? lowest : highest))
        return fsdp_json_fail(json, err, "the integer is out of range");
    json->at += number.size;
    *negative_out = negative;
    *magnitude_out = magnitude;
    return FSDP_OK;
}

fsdp_status fsdp_json_i64(fsdp_json *json, int64_t *value_out, fsdp_error *err)
{
    bool negative = false;
    uint64_t magnitude = 0;
    FSDP_TRY(take_integer(json, (uint64_t)INT64_MAX + 1, INT64_MAX, &negative, &magnitude, err));
    *value_out = (int64_t)(negative ? 0 - magnitude : magnitude);
    return FSDP_OK;
}

fsdp_status fsdp_json_u64(fsdp_json *json, uint64_t *value_out, fsdp_error *err)
{
    bool negative = false;
    FSDP_TRY(take_integer(json, 0, UINT64_MAX, &negative, value_out, err));
    return negative ? fsdp_json_fail(json, err, "the number is negative") : FSDP_OK;
}

static locale_t c_locale;
static pthread_once_t c_locale_once = PTHREAD_ONCE_INIT;

static void create_c_locale(void)
{
    c_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
}

fsdp_status fsdp_json_f64(fsdp_json *json, double *value_out, fsdp_error *err)
{
    number_text number = scan_number(json);
    if (number.size == 0)
        return fail_expected(json, "a number", err);
    pthread_once(&c_locale_once, create_c_locale);
    if (!c_locale || !fsdp_grow(&json->scratch, &json->scratch_capacity, number.size + 1, 1))
        return fsdp_fail_memory(err, json->name);
    memcpy(json->scratch, number.start, number.size);
    json->scratch[number.size] = '\0';
    double value = strtod_l(json->scratch, NULL, c_locale);
    if (isinf(value))
        return fsdp_json_fail(json, err, "the number is out of range");
    json->at += number.size;
    *value_out = value;
    return FSDP_OK;
}

static bool take_word(fsdp_json *json, const char *word)
{
    size_t size = strlen(word);
    skip_space(json);
    if ((size_t)(json->end - json->at) < size || memcmp(json->at, word, size) != 0)
        return false;
    json->at += size;
    return true;
}

fsdp_status fsdp_json_bool(fsdp_json *json, bool *value_out, fsdp_error *err)
{
    *value_out = take_word(json, "true");
    if (!*value_out && !take_word(json, "false"))
        return fail_expected(json, "true or false", err);
    return FSDP_OK;
}

fsdp_status fsdp_json_null(fsdp_json *json, fsdp_error *err)
{
    return take_word(json, "null") ? FSDP_OK : fail_expected(json, "null", err);
}

static fsdp_status skip_scalar(fsdp_json *json, fsdp_json_kind kind, fsdp_error *err)
{
    const char *data;
    size_t size;
    bool truth;
    if (kind == FSDP_JSON_STRING)
        return fsdp_json_string(json, &data, &size, err);
    if (kind == FSDP_JSON_BOOL)
        return fsdp_json_bool(json, &truth, err);
    if (kind == FSDP_JSON_NULL)
        return fsdp_json_null(json, err);
    size = scan_number(json).size;
    if (size == 0)
        return fail_expected(json, "a value", err);
    json->at += size;
    return FSDP_OK;
}

fsdp_status fsdp_json_skip(fsdp_json *json, fsdp_error *err)
{
    bool is_object[DEEPEST + 1];
    int outside = json->depth;
    for (;;) {
        fsdp_json_kind kind = fsdp_json_peek(json);
        if (kind == FSDP_JSON_OBJECT)
            FSDP_TRY(fsdp_json_enter_object(json, err));
        else if (kind == FSDP_JSON_ARRAY)
            FSDP_TRY(fsdp_json_enter_array(json, err));
        else
            FSDP_TRY(skip_scalar(json, kind, err));
        if (kind == FSDP_JSON_OBJECT || kind == FSDP_JSON_ARRAY)
            is_object[json->depth] = kind == FSDP_JSON_OBJECT;
        bool more = false;
        while (json->depth > outside && !more) {
            const char *key;
            size_t size;
            if (is_object[json->depth])
                FSDP_TRY(fsdp_json_next_key(json, &key, &size, &more, err));
            else
                FSDP_TRY(fsdp_json_next_item(json, &more, err));
        }
        if (!more)
            return FSDP_OK;
    }
}

fsdp_status fsdp_json_finish(fsdp_json *json, fsdp_error *err)
{
    if (next_character(json) >= 0)
        return fsdp_json_fail(json, err, "the end of the value is followed by other text");
    return FSDP_OK;
}

static int find_name(const fsdp_json_members *members, const char *key, size_t size)
{
    for (int i = 0; i < members->count; i++)
        if (strlen(members->names[i]) == size && memcmp(members->names[i], key, size) == 0)
            return i;
    return -1;
}

fsdp_status fsdp_json_next_member(fsdp_json *json, fsdp_json_members *members, int *which_out,
                                  fsdp_error *err)
{
    *which_out = -1;
    for (;;) {
        const char *key;
        size_t size;
        bool more;
        FSDP_TRY(fsdp_json_next_key(json, &key, &size, &more, err));
        if (!more)
            return FSDP_OK;
        int which = find_name(members, key, size);
        if (which >= 0 && (members->seen >> which & 1))
            return fsdp_json_fail(json, err, "the key '%s' appears twice", members->names[which]);
        if (which >= 0) {
            members->seen |= (uint64_t)1 << which;
            *which_out = which;
            return FSDP_OK;
        }
        FSDP_TRY(fsdp_json_skip(json, err));
    }
}

static int base64_value(char c)
{
    if (c >= 'A' && c <= 'Z')
        return c - 'A';
    if (c >= 'a' && c <= 'z')
        return c - 'a' + 26;
    if (c >= '0' && c <= '9')
        return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* Decodes four characters, `padding` of which are '='; false when they are not base64. */
static bool decode_group(const char *from, int padding, unsigned char *to)
{
    uint32_t group = 0;
    for (int i = 0; i < 4 - padding; i++) {
        int value = base64_value(from[i]);
        if (value < 0)
            return false;
        group |= (uint32_t)value << (18 - 6 * i);
    }
    for (int i = 0; i < 3 - padding; i++)
        to[i] = (unsigned char)(group >> (16 - 8 * i));
    uint32_t unused = padding == 2 ? 0xFFFF : padding == 1 ? 0xFF : 0;
    return (group & unused) == 0;
}

fsdp_status fsdp_base64_decode(const char *text, size_t size, void **data_out, size_t *size_out,
                               fsdp_error *err)
{
    *data_out = NULL;
    *size_out = 0;
    if (size % 4 != 0)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "the base64 text has %zu characters, which is not a multiple of 4", size);
    unsigned char *data = fsdp_alloc(size / 4 * 3 + 1, 1);
    if (!data)
        return fsdp_fail_memory(err, "base64 text");
    int padding = 0;
    for (size_t at = 0, to = 0; at < size; at += 4, to += 3) {
        if (at + 4 == size && text[at + 3] == '=')
            padding = text[at + 2] == '=' ? 2 : 1;
        if (!decode_group(text + at, padding, data + to)) {
            fsdp_free(data);
            return fsdp_fail(err, FSDP_ERR_DAMAGED, "the base64 text is wrong at character %zu",
                             at);
        }
    }
    *data_out = data;
    *size_out = size / 4 * 3 - (size_t)padding;
    return FSDP_OK;
}
