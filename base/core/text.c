/* A growing string, JSON spelling, and names made safe for a terminal. See text.h. */
#include "base/text.h"

#include "base/core/mem.h"

#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char HEX_DIGITS[] = "0123456789abcdef";

void fsdp_text_release(fsdp_text *text)
{
    fsdp_free(text->data);
    *text = (fsdp_text){0};
}

/* Memory for `more` bytes and the zero after them. */
static char *make_room(fsdp_text *text, size_t more)
{
    size_t need;
    if (text->failed || __builtin_add_overflow(text->size, more, &need) || need == SIZE_MAX ||
        !fsdp_grow(&text->data, &text->capacity, need + 1, 1)) {
        text->failed = true;
        return NULL;
    }
    return text->data + text->size;
}

void fsdp_text_add(fsdp_text *text, const char *data, size_t size)
{
    char *room = make_room(text, size);
    if (!room)
        return;
    if (size > 0)
        memcpy(room, data, size);
    room[size] = '\0';
    text->size += size;
}

void fsdp_text_addf(fsdp_text *text, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int length = vsnprintf(NULL, 0, format, args);
    va_end(args);
    char *room = length < 0 ? NULL : make_room(text, (size_t)length);
    if (!room) {
        text->failed = true;
        return;
    }
    va_start(args, format);
    vsnprintf(room, (size_t)length + 1, format, args);
    va_end(args);
    text->size += (size_t)length;
}

/* Payload bits of a continuation byte, -1 when it is none. */
static int continuation(unsigned char c)
{
    return (c & 0xC0) == 0x80 ? c & 0x3F : -1;
}

/* Bytes of the well-formed character at p, 0 when there is none. */
static size_t utf8_length(const unsigned char *p, size_t left, uint32_t *character_out)
{
    static const uint32_t smallest[] = {0, 0, 0x80, 0x800, 0x10000};
    if (p[0] < 0x80) {
        *character_out = p[0];
        return 1;
    }
    size_t length = p[0] >= 0xF0 ? 4 : p[0] >= 0xE0 ? 3 : 2;
    if (p[0] < 0xC2 || p[0] > 0xF4 || left < length)
        return 0;
    uint32_t character = p[0] & (0x7Fu >> length);
    for (size_t i = 1; i < length; i++) {
        int bits = continuation(p[i]);
        if (bits < 0)
            return 0;
        character = character << 6 | (uint32_t)bits;
    }
    bool surrogate = character >= 0xD800 && character <= 0xDFFF;
    if (character < smallest[length] || character > 0x10FFFF || surrogate)
        return 0;
    *character_out = character;
    return length;
}

static bool eight_ascii(const unsigned char *p)
{
    uint64_t word;
    memcpy(&word, p, sizeof word);
    return (word & 0x8080808080808080u) == 0;
}

bool fsdp_utf8_valid(const char *data, size_t size)
{
    const unsigned char *p = (const unsigned char *)data;
    for (size_t at = 0; at < size;) {
        if (size - at >= 8 && eight_ascii(p + at)) {
            at += 8;
            continue;
        }
        uint32_t character;
        size_t length = utf8_length(p + at, size - at, &character);
        if (length == 0)
            return false;
        at += length;
    }
    return true;
}

/* Control characters, and the ones that reorder or hide the text around them. */
static bool misleads_terminal(uint32_t c)
{
    return c < 0x20 || (c >= 0x7F && c <= 0x9F) || (c >= 0x200B && c <= 0x200F) ||
           (c >= 0x2028 && c <= 0x202E) || (c >= 0x2060 && c <= 0x2069) || c == 0xFEFF;
}

static void add_json_escape(fsdp_text *text, uint32_t character)
{
    static const char letters[] = "btn\0fr"; /* of 8, 9, 10, 12, 13 */
    char escape[6] = {'\\', (char)character};
    size_t length = 2;
    if (character == '"' || character == '\\') {
        /* stands for itself */
    } else if (character >= 8 && character <= 13 && character != 11) {
        escape[1] = letters[character - 8];
    } else {
        escape[1] = 'u';
        for (int i = 0; i < 4; i++)
            escape[2 + i] = HEX_DIGITS[character >> (12 - 4 * i) & 15];
        length = 6;
    }
    fsdp_text_add(text, escape, length);
}

static void add_json(fsdp_text *text, const char *data, size_t size, bool for_people)
{
    const unsigned char *p = (const unsigned char *)data;
    fsdp_text_add(text, "\"", 1);
    size_t plain = 0; /* start of the run that needs no change */
    for (size_t at = 0; at < size;) {
        uint32_t character = 0;
        size_t length = utf8_length(p + at, size - at, &character);
        bool escape = length > 0 && (character < 0x20 || character == '"' || character == '\\' ||
                                     (for_people && misleads_terminal(character)));
        if (length > 0 && !escape) {
            at += length;
            continue;
        }
        fsdp_text_add(text, data + plain, at - plain);
        if (escape)
            add_json_escape(text, character);
        else
            fsdp_text_add(text, "\xEF\xBF\xBD", 3);
        at += length > 0 ? length : 1;
        plain = at;
    }
    if (plain < size)
        fsdp_text_add(text, data + plain, size - plain);
    fsdp_text_add(text, "\"", 1);
}

void fsdp_text_add_json_string(fsdp_text *text, const char *data, size_t size)
{
    add_json(text, data, size, false);
}

void fsdp_text_add_json_shown(fsdp_text *text, const char *data, size_t size)
{
    add_json(text, data, size, true);
}

/* printf writes the decimal point of the process's locale, which may be several bytes. */
static void restore_point(char *number)
{
    char *to = number;
    bool pointed = false;
    for (const char *from = number; *from; from++) {
        if (strchr("0123456789+-e", *from)) {
            *to++ = *from;
        } else if (!pointed) {
            *to++ = '.';
            pointed = true;
        }
    }
    *to = '\0';
}

void fsdp_text_add_f64(fsdp_text *text, double value)
{
    char number[64];
    /* fifteen digits tell all normal numbers with at most fifteen apart; subnormals need fewer */
    int digits = fabs(value) < DBL_MIN ? 1 : DBL_DIG;
    do {
        snprintf(number, sizeof number, "%.*g", digits, value);
    } while (strtod(number, NULL) != value && ++digits <= DBL_DECIMAL_DIG);
    restore_point(number);
    fsdp_text_add(text, number, strlen(number));
    if (!strpbrk(number, ".e"))
        fsdp_text_add(text, ".0", 2);
}

void fsdp_text_add_base64(fsdp_text *text, const void *data, size_t size)
{
    static const char alphabet[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const unsigned char *from = data;
    size_t length = size > SIZE_MAX / 2 ? SIZE_MAX : (size + 2) / 3 * 4;
    char *to = make_room(text, length);
    if (!to)
        return;
    for (size_t at = 0; at < size; at += 3, to += 4) {
        size_t left = size - at;
        uint32_t group = (uint32_t)from[at] << 16;
        group |= left > 1 ? (uint32_t)from[at + 1] << 8 : 0;
        group |= left > 2 ? from[at + 2] : 0;
        to[0] = alphabet[group >> 18];
        to[1] = alphabet[group >> 12 & 63];
        to[2] = left > 1 ? alphabet[group >> 6 & 63] : '=';
        to[3] = left > 2 ? alphabet[group & 63] : '=';
    }
    *to = '\0';
    text->size += length;
}

bool fsdp_bytes_are(const char *data, size_t size, const char *word)
{
    return size == strlen(word) && memcmp(data, word, size) == 0;
}

bool fsdp_bytes_end(const char *data, size_t size, const char *end)
{
    size_t n = strlen(end);
    return size >= n && memcmp(data + size - n, end, n) == 0;
}

bool fsdp_has_suffix(const char *name, const char *suffix)
{
    size_t size = strlen(name);
    return size > strlen(suffix) && fsdp_bytes_end(name, size, suffix);
}

void fsdp_text_add_hex(fsdp_text *text, const void *data, size_t size)
{
    const unsigned char *from = data;
    char *to = make_room(text, size > SIZE_MAX / 2 ? SIZE_MAX : size * 2);
    if (!to)
        return;
    for (size_t i = 0; i < size; i++) {
        *to++ = HEX_DIGITS[from[i] >> 4];
        *to++ = HEX_DIGITS[from[i] & 15];
    }
    *to = '\0';
    text->size += size * 2;
}

enum { PIECE_BYTES = 16 }; /* four bytes as \xHH */

/* Spells the character (or the bad byte) at p; returns the bytes written to piece. */
static size_t spell_piece(const unsigned char *p, size_t left, bool is_name, char *piece,
                          size_t *taken_out)
{
    uint32_t character = 0;
    size_t length = utf8_length(p, left, &character);
    *taken_out = length > 0 ? length : 1;
    if (is_name && length == 1 && character == '\\') {
        memcpy(piece, "\\\\", 2);
        return 2;
    }
    if (length > 0 && !misleads_terminal(character)) {
        memcpy(piece, p, length);
        return length;
    }
    char *to = piece;
    for (size_t i = 0; i < *taken_out; i++) {
        *to++ = '\\';
        *to++ = 'x';
        *to++ = HEX_DIGITS[p[i] >> 4];
        *to++ = HEX_DIGITS[p[i] & 15];
    }
    return (size_t)(to - piece);
}

static size_t spelled_size(const unsigned char *p, size_t size, bool is_name)
{
    char piece[PIECE_BYTES];
    size_t total = 0;
    for (size_t at = 0, taken; at < size; at += taken)
        total += spell_piece(p + at, size - at, is_name, piece, &taken);
    return total;
}

static const char *spell(const char *data, size_t size, bool is_name, char *out, size_t out_size)
{
    static const char dots[] = "...";
    const unsigned char *p = (const unsigned char *)data;
    if (out_size < sizeof dots) {
        if (out_size > 0)
            out[0] = '\0';
        return out_size > 0 ? out : "";
    }
    size_t total = spelled_size(p, size, is_name);
    bool fits = total < out_size;
    size_t room = out_size - sizeof dots;
    size_t head = fits ? total : (room + 1) / 2;
    size_t tail_start = fits ? total : total - (room - head);
    bool dotted = fits;
    size_t used = 0;
    for (size_t at = 0, position = 0, taken; at < size; at += taken) {
        char piece[PIECE_BYTES];
        size_t length = spell_piece(p + at, size - at, is_name, piece, &taken);
        if (position + length <= head || position >= tail_start) {
            memcpy(out + used, piece, length);
            used += length;
        } else if (!dotted) {
            memcpy(out + used, dots, sizeof dots - 1);
            used += sizeof dots - 1;
            dotted = true;
        }
        position += length;
    }
    out[used] = '\0';
    return out;
}

const char *fsdp_printable(const char *data, size_t size, char *out, size_t out_size)
{
    return spell(data, size, true, out, out_size);
}

const char *fsdp_printable_message(const char *data, size_t size, char *out, size_t out_size)
{
    return spell(data, size, false, out, out_size);
}

/* --- for a shell -------------------------------------------------------------------------------- */

/* With $'...': control characters and what is not ASCII have no other harmless spelling. */
static void add_spelled(fsdp_text *text, const char *word)
{
    fsdp_text_addf(text, "$'");
    for (; *word; word++) {
        unsigned char c = (unsigned char)*word;
        if (c < 32 || c > 126)
            fsdp_text_addf(text, "\\x%02x", c);
        else
            fsdp_text_addf(text, "%s%c", c == '\'' || c == '\\' ? "\\" : "", c);
    }
    fsdp_text_addf(text, "'");
}

void fsdp_text_add_quoted(fsdp_text *text, const char *word)
{
    size_t size = strlen(word);
    if (spelled_size((const unsigned char *)word, size, false) != size) {
        add_spelled(text, word);
        return;
    }
    fsdp_text_addf(text, "'");
    for (; *word; word++)
        fsdp_text_add(text, *word == '\'' ? "'\\''" : word, *word == '\'' ? 4 : 1);
    fsdp_text_addf(text, "'");
}

void fsdp_text_add_argument(fsdp_text *text, const char *word)
{
    static const char plain[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./,=+@:%";
    fsdp_text_addf(text, " ");
    if (word[0] && strspn(word, plain) == strlen(word))
        fsdp_text_addf(text, "%s", word);
    else
        fsdp_text_add_quoted(text, word);
}

void fsdp_text_add_path_argument(fsdp_text *text, const char *path)
{
    fsdp_text spelled = {0};
    fsdp_text_addf(&spelled, "%s%s", path[0] == '-' ? "./" : "", path);
    if (spelled.failed)
        text->failed = true;
    else
        fsdp_text_add_argument(text, spelled.data);
    fsdp_text_release(&spelled);
}

void fsdp_text_add_message(fsdp_text *text, const char *message)
{
    size_t size = strlen(message), room = 4 * size + 8; /* a byte becomes at most \xHH */
    char *printable = fsdp_alloc(room, 1);
    if (!printable) {
        text->failed = true;
        return;
    }
    fsdp_printable_message(message, size, printable, room);
    fsdp_text_add(text, printable, strlen(printable));
    fsdp_free(printable);
}

/* --- numbers ------------------------------------------------------------------------------------ */

const char *fsdp_spell_bytes(int64_t bytes, char *out, size_t out_size)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", NULL};
    double value = (double)bytes;
    int unit = 0;
    for (; value >= 1024 && units[unit + 1]; unit++)
        value /= 1024;
    snprintf(out, out_size, "%.*f %s", unit > 0, value, units[unit]);
    return out;
}
