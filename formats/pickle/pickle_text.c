/*
 * Text arguments of protocol 0, Python's UTF-8, and big integers as decimal text. See
 * pickle_vm.h.
 */
#include "formats/pickle/pickle_vm.h"
#include "base/text.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Python refuses to print integers with more digits. */
enum { DECIMAL_DIGITS = 4300, DECIMAL_BYTES = 1786 };
enum { CHUNK = 1000000000, CHUNK_DIGITS = 9 };

/* --- numbers ------------------------------------------------------------------------------------ */

/* [-+]?[0-9]+ */
static bool is_decimal(const char *line, size_t size)
{
    size_t i = size > 0 && (line[0] == '-' || line[0] == '+') ? 1 : 0;
    if (i == size)
        return false;
    for (; i < size; i++)
        if (line[i] < '0' || line[i] > '9')
            return false;
    return true;
}

/* Pushes decimal digits in two's complement, as the binary opcodes hold them. */
static fsdp_status push_decimal(pickle_vm *vm, const char *line, size_t size)
{
    if (size > DECIMAL_DIGITS + 1)
        return pickle_fail(vm, FSDP_ERR_LIMIT, "an integer has over 4,300 digits");
    uint8_t *bytes = pickle_store_take(vm->store, size / 2 + 2);
    if (!bytes)
        return pickle_no_memory(vm);
    size_t used = 0;
    bool is_negative = line[0] == '-';
    for (size_t i = is_negative || line[0] == '+' ? 1 : 0; i < size; i++) {
        unsigned carry = (unsigned)(line[i] - '0');
        for (size_t k = 0; k < used; k++) {
            carry += bytes[k] * 10U;
            bytes[k] = (uint8_t)carry;
            carry >>= 8;
        }
        if (carry > 0)
            bytes[used++] = (uint8_t)carry;
    }
    bytes[used++] = 0;
    unsigned carry = 1;
    for (size_t k = 0; is_negative && k < used; k++) {
        carry += (uint8_t)~bytes[k];
        bytes[k] = (uint8_t)carry;
        carry >>= 8;
    }
    return pickle_push_bigint(vm, bytes, used);
}

fsdp_status pickle_int_line(pickle_vm *vm, const char *line, size_t size)
{
    if (size == 2 && line[0] == '0' && (line[1] == '0' || line[1] == '1'))
        return pickle_push(vm, line[1] == '1' ? NODE_OF_TRUE : NODE_OF_FALSE);
    if (!is_decimal(line, size))
        return pickle_fail(vm, FSDP_ERR_DAMAGED, "an integer is no number");
    return push_decimal(vm, line, size);
}

fsdp_status pickle_long_line(pickle_vm *vm, const char *line, size_t size)
{
    if (size > 0 && line[size - 1] == 'L')
        size--;
    if (!is_decimal(line, size))
        return pickle_fail(vm, FSDP_ERR_DAMAGED, "an integer is no number");
    return push_decimal(vm, line, size);
}

fsdp_status pickle_float_line(pickle_vm *vm, const char *line, size_t size)
{
    enum { LONGEST = 400 };
    char text[LONGEST + 1];
    if (size == 0 || size > LONGEST || strspn(line, "+-0123456789.eEnaifty") < size)
        return pickle_fail(vm, FSDP_ERR_DAMAGED, "a float is no number");
    memcpy(text, line, size);
    text[size] = '\0';
    char *text_end;
    fsdp_pickle_node node = {.kind = FSDP_NODE_FLOAT, .flags = FSDP_NODE_HASHABLE};
    node.as.f64 = strtod(text, &text_end);
    if (text_end != text + size)
        return pickle_fail(vm, FSDP_ERR_DAMAGED, "a float is no number");
    return pickle_push_node(vm, node);
}

/* --- strings ------------------------------------------------------------------------------------ */

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

static bool hex_number(const char *data, size_t digits, size_t rest, uint32_t *number_out)
{
    *number_out = 0;
    if (digits > rest)
        return false;
    for (size_t i = 0; i < digits; i++) {
        if (hex_digit(data[i]) < 0)
            return false;
        *number_out = *number_out << 4 | (uint32_t)hex_digit(data[i]);
    }
    return true;
}

/* Decodes one escape behind its backslash; returns its length, 0 when it is invalid. */
static size_t unescape(const char *data, size_t rest, char *out)
{
    static const char plain[] = "\\\\''\"\"a\ab\bf\fn\nr\rt\tv\v";
    uint32_t number;
    if (rest == 0)
        return 0;
    for (size_t i = 0; i + 1 < sizeof plain; i += 2)
        if (data[0] == plain[i]) {
            *out = plain[i + 1];
            return 1;
        }
    if (data[0] == 'x' && hex_number(data + 1, 2, rest - 1, &number)) {
        *out = (char)number;
        return 3;
    }
    size_t digits = 0;
    number = 0;
    while (digits < 3 && digits < rest && data[digits] >= '0' && data[digits] <= '7')
        number = number << 3 | (uint32_t)(data[digits++] - '0');
    *out = (char)number;
    return digits;
}

/* A str of Python 2 as its repr: quoted, with escapes. */
fsdp_status pickle_string_line(pickle_vm *vm, const char *line, size_t size)
{
    while (size > 0 && (line[size - 1] == '\r' || line[size - 1] == ' '))
        size--;
    if (size < 2 || line[0] != line[size - 1] || (line[0] != '\'' && line[0] != '"'))
        return pickle_fail(vm, FSDP_ERR_DAMAGED, "a string has no quotes");
    char *text = pickle_store_take(vm->store, size);
    if (!text)
        return pickle_no_memory(vm);
    size_t used = 0;
    for (size_t i = 1; i < size - 1; i++) {
        text[used] = line[i];
        if (line[i] == '\\') {
            size_t taken = unescape(line + i + 1, size - 2 - i, &text[used]);
            if (taken == 0)
                return pickle_fail(vm, FSDP_ERR_DAMAGED, "a string has an unknown escape");
            i += taken;
        }
        used++;
    }
    bool is_text = pickle_text_valid(text, used);
    return pickle_push_text(vm, is_text ? FSDP_NODE_STR : FSDP_NODE_BYTES, text, used);
}

static size_t put_utf8(char *out, uint32_t code)
{
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    size_t count = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (size_t i = count; i-- > 1; code >>= 6)
        out[i] = (char)(0x80 | (code & 0x3F));
    out[0] = (char)((0xF00 >> count & 0xFF) | code);
    return count;
}

/* Latin-1 with \uXXXX and \UXXXXXXXX. */
fsdp_status pickle_unicode_line(pickle_vm *vm, const char *line, size_t size)
{
    char *text = pickle_store_take(vm->store, size * 2);
    if (!text)
        return pickle_no_memory(vm);
    size_t used = 0;
    for (size_t i = 0; i < size;) {
        uint32_t code = (uint8_t)line[i];
        size_t digits = 0;
        if (line[i] == '\\' && i + 1 < size)
            digits = line[i + 1] == 'u' ? 4 : line[i + 1] == 'U' ? 8 : 0;
        if (digits > 0 &&
            (!hex_number(line + i + 2, digits, size - i - 2, &code) || code > 0x10FFFF))
            return pickle_fail(vm, FSDP_ERR_DAMAGED, "a text has a broken escape");
        used += put_utf8(text + used, code);
        i += digits > 0 ? digits + 2 : 1;
    }
    return pickle_push_text(vm, FSDP_NODE_STR, text, used);
}

/* --- big integers ------------------------------------------------------------------------------- */

/* Divides the number (32-bit words, least first) by 10^9 in place and returns the remainder. */
static uint32_t divide(uint32_t *words, size_t count)
{
    uint64_t rest = 0;
    for (size_t i = count; i-- > 0;) {
        rest = rest << 32 | words[i];
        words[i] = (uint32_t)(rest / CHUNK);
        rest %= CHUNK;
    }
    return (uint32_t)rest;
}

char *fsdp_pickle_decimal(const fsdp_pickle_node *node)
{
    enum { WORDS = DECIMAL_BYTES / 4 + 2, ROOM = WORDS * 10 + CHUNK_DIGITS + 2 };
    uint32_t words[WORDS] = {0};
    char text[ROOM + 1];
    size_t size = node->count, place = ROOM;
    if (size > DECIMAL_BYTES)
        return NULL;
    bool is_negative = size > 0 && (uint8_t)node->as.text[size - 1] >= 0x80;
    uint32_t carry = is_negative;
    for (size_t i = 0; i < size; i++) {
        uint32_t byte = (uint8_t)node->as.text[i];
        byte = (is_negative ? ~byte & 0xFF : byte) + carry;
        carry = byte >> 8;
        words[i / 4] |= (byte & 0xFF) << (i % 4 * 8);
    }
    words[size / 4] += carry << (size % 4 * 8);
    text[ROOM] = '\0';
    size_t count = size / 4 + 1;
    while (count > 0) {
        uint32_t chunk = divide(words, count);
        for (int digit = 0; digit < CHUNK_DIGITS; digit++, chunk /= 10)
            text[--place] = (char)('0' + chunk % 10);
        while (count > 0 && words[count - 1] == 0)
            count--;
    }
    while (text[place] == '0' && text[place + 1] != '\0')
        place++;
    if (is_negative)
        text[--place] = '-';
    return fsdp_strndup(text + place, ROOM - place);
}
