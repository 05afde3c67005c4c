/*
 * The pickle machine: opcodes, stack, marks, memo and frames, texts and numbers, and at the
 * end the equal keys of dicts. See pickle.h for the order of the files.
 *
 * Every count is compared with the remaining bytes, so that memory is bounded by the size of the
 * pickle.
 */
#include "formats/pickle/pickle.h"
#include "base/core/bytes.h"
#include "base/data/name_table.h"
#include "base/text.h"
#include "formats/pickle/pickle_opcodes.h"
#include "formats/pickle/pickle_vm.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* === texts and numbers ======================================================================== */

/* Texts in Python's UTF-8, text arguments of protocol 0, and big integers as decimal text. */

/* Python refuses to print integers with more digits. */
enum { DECIMAL_DIGITS = 4300, DECIMAL_BYTES = 1786 };
enum { CHUNK = 1000000000, CHUNK_DIGITS = 9 };

/* --- texts -------------------------------------------------------------------------------------- */

enum { SURROGATE_LEAD = 0xED };

static bool is_ascii(const char *data, size_t size)
{
    uint64_t high = 0, piece;
    size_t i = 0;
    for (; i + sizeof piece <= size; i += sizeof piece) {
        memcpy(&piece, data + i, sizeof piece);
        high |= piece;
    }
    for (; i < size; i++)
        high |= (uint64_t)(uint8_t)data[i];
    return (high & UINT64_C(0x8080808080808080)) == 0;
}

static bool is_surrogate(const char *data, size_t size)
{
    return size >= 3 && (uint8_t)data[0] == SURROGATE_LEAD && (uint8_t)data[1] >= 0xA0 &&
           (uint8_t)data[1] <= 0xBF && (uint8_t)data[2] >= 0x80 && (uint8_t)data[2] <= 0xBF;
}

/* UTF-8 as Python writes it with surrogatepass. */
static bool text_valid(const char *data, size_t size)
{
    if (is_ascii(data, size) || fsdp_utf8_valid(data, size))
        return true;
    size_t start = 0;
    for (size_t i = 0; i < size; i++)
        if (is_surrogate(data + i, size - i)) {
            if (!fsdp_utf8_valid(data + start, i - start))
                return false;
            i += 2;
            start = i + 1;
        }
    return start > 0 && fsdp_utf8_valid(data + start, size - start);
}

static fsdp_status push_text(pickle_vm *vm, fsdp_node_kind kind, const char *data, size_t size)
{
    if (kind == FSDP_NODE_STR && !text_valid(data, size))
        return pickle_fail(vm, FSDP_ERR_DAMAGED, "a text is not UTF-8");
    fsdp_pickle_node node = {.kind = (uint8_t)kind, .count = (uint32_t)size, .as.text = data};
    if (kind != FSDP_NODE_BYTEARRAY)
        node.flags = FSDP_NODE_HASHABLE;
    return pickle_push_node(vm, node);
}

/* --- numbers ------------------------------------------------------------------------------------ */

static fsdp_status push_bigint(pickle_vm *vm, const uint8_t *data, size_t size)
{
    uint8_t sign = size > 0 && data[size - 1] >= 0x80 ? 0xFF : 0;
    while (size > 0 && data[size - 1] == sign &&
           (size == 1 ? sign == 0 : data[size - 2] >> 7 == sign >> 7))
        size--;
    if (size <= 8) {
        uint64_t bits = sign ? UINT64_MAX : 0;
        for (size_t i = size; i-- > 0;)
            bits = bits << 8 | data[i];
        return pickle_push_int(vm, (int64_t)bits);
    }
    fsdp_pickle_node node = {.kind = FSDP_NODE_BIGINT, .flags = FSDP_NODE_HASHABLE};
    node.count = (uint32_t)size;
    node.as.text = (const char *)data;
    return pickle_push_node(vm, node);
}

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
    return push_bigint(vm, bytes, used);
}

/* The arguments of the text opcodes are lines without their ends. */
static fsdp_status push_int_line(pickle_vm *vm, const char *line, size_t size)
{
    if (size == 2 && line[0] == '0' && (line[1] == '0' || line[1] == '1'))
        return pickle_push(vm, line[1] == '1' ? NODE_OF_TRUE : NODE_OF_FALSE);
    if (!is_decimal(line, size))
        return pickle_fail(vm, FSDP_ERR_DAMAGED, "an integer is not a number");
    return push_decimal(vm, line, size);
}

static fsdp_status push_long_line(pickle_vm *vm, const char *line, size_t size)
{
    if (size > 0 && line[size - 1] == 'L')
        size--;
    if (!is_decimal(line, size))
        return pickle_fail(vm, FSDP_ERR_DAMAGED, "an integer is not a number");
    return push_decimal(vm, line, size);
}

static fsdp_status push_float_line(pickle_vm *vm, const char *line, size_t size)
{
    enum { LONGEST = 400 };
    char text[LONGEST + 1];
    if (size == 0 || size > LONGEST || strspn(line, "+-0123456789.eEnaifty") < size)
        return pickle_fail(vm, FSDP_ERR_DAMAGED, "a float is not a number");
    memcpy(text, line, size);
    text[size] = '\0';
    char *text_end;
    fsdp_pickle_node node = {.kind = FSDP_NODE_FLOAT, .flags = FSDP_NODE_HASHABLE};
    node.as.f64 = strtod(text, &text_end);
    if (text_end != text + size)
        return pickle_fail(vm, FSDP_ERR_DAMAGED, "a float is not a number");
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

/* Decodes one escape after its backslash; returns its length, 0 when it is invalid. */
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
static fsdp_status push_string_line(pickle_vm *vm, const char *line, size_t size)
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
    bool is_text = text_valid(text, used);
    return push_text(vm, is_text ? FSDP_NODE_STR : FSDP_NODE_BYTES, text, used);
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
static fsdp_status push_unicode_line(pickle_vm *vm, const char *line, size_t size)
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
    return push_text(vm, FSDP_NODE_STR, text, used);
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

/* === equal keys =============================================================================== */

/*
 * Equal keys of a dict: Python keeps the first key and the last value, and 1, 1.0 and True are one
 * key. The parser settles every dict once, so that readers find each key once.
 */

enum { KEY_DEPTH = 4, KEY_BYTES = 1024, MOST_SPARE = 16 };

/* First bytes of keys that are not text; UTF-8 has none of them. */
enum {
    KEY_INT = 0xFF,
    KEY_FLOAT = 0xFE,
    KEY_BYTES_OF = 0xFD,
    KEY_BIGINT = 0xFC,
    KEY_TUPLE = 0xFB,
    KEY_NODE = 0xFA
};

typedef struct key_text {
    uint8_t bytes[KEY_BYTES];
    size_t size;
    bool is_long; /* does not fit */
} key_text;

static void add(key_text *text, uint8_t kind, const void *data, size_t size)
{
    if (KEY_BYTES - text->size < size + 1) {
        text->is_long = true;
        return;
    }
    text->bytes[text->size++] = kind;
    if (size > 0)
        memcpy(text->bytes + text->size, data, size);
    text->size += size;
}

static void add_float(key_text *text, double value)
{
    int64_t number = fabs(value) < 9e18 ? (int64_t)value : 0;
    if (fabs(value) < 9e18 && (double)number == value)
        add(text, KEY_INT, &number, sizeof number);
    else
        add(text, KEY_FLOAT, &value, sizeof value);
}

/* Adds bytes that are equal for equal keys. A key that is too long or too deep equals only itself. */
static void add_key(const pickle_vm *vm, fsdp_node key, int depth, key_text *text)
{
    const fsdp_pickle_node *node = &vm->nodes[key];
    switch (node->kind) {
    case FSDP_NODE_BOOL:
    case FSDP_NODE_INT: add(text, KEY_INT, &node->as.i64, sizeof node->as.i64); return;
    case FSDP_NODE_FLOAT:
        if (isnan(node->as.f64)) /* equals no other */
            add(text, KEY_NODE, &key, sizeof key);
        else
            add_float(text, node->as.f64);
        return;
    case FSDP_NODE_BYTES: add(text, KEY_BYTES_OF, node->as.text, node->count); return;
    case FSDP_NODE_BIGINT: add(text, KEY_BIGINT, node->as.text, node->count); return;
    case FSDP_NODE_STR: add(text, 0, node->as.text, node->count); return;
    case FSDP_NODE_TUPLE:
        text->is_long |= depth == KEY_DEPTH;
        add(text, KEY_TUPLE, &node->count, sizeof node->count);
        for (uint32_t i = 0; i < node->count && !text->is_long; i++) {
            size_t before = text->size;
            add_key(vm, node->as.items[i], depth + 1, text);
            size_t size = text->size - before;
            add(text, KEY_NODE, &size, sizeof size);
        }
        return;
    default: add(text, KEY_NODE, &key, sizeof key);
    }
}

/* The bytes of a key that is not text, in memory of the pickle; NULL when there is none. */
static const char *key_bytes(pickle_vm *vm, fsdp_node key, size_t *size_out)
{
    key_text text = {.size = 0};
    add_key(vm, key, 0, &text);
    if (text.is_long) {
        text = (key_text){.size = 0};
        add(&text, KEY_NODE, &key, sizeof key);
    }
    char *bytes = pickle_store_take(vm->store, text.size);
    if (bytes)
        memcpy(bytes, text.bytes, text.size);
    *size_out = text.size;
    return bytes;
}

static fsdp_status settle(pickle_vm *vm, fsdp_pickle_node *dict, fsdp_name_table *table)
{
    fsdp_node *items = (fsdp_node *)(uintptr_t)dict->as.items; /* the store owns them */
    uint32_t kept = 0;
    if (table->capacity / MOST_SPARE > dict->count)
        fsdp_name_table_release(table);
    fsdp_name_table_clear(table);
    for (uint32_t i = 0; i + 1 < dict->count; i += 2) {
        const fsdp_pickle_node *key = &vm->nodes[items[i]];
        bool is_text = key->kind == FSDP_NODE_STR;
        size_t size = key->count;
        const char *bytes = is_text && size > 0 ? key->as.text
                            : is_text           ? ""
                                                : key_bytes(vm, items[i], &size);
        const uint64_t *number = bytes ? fsdp_name_table_enter(table, bytes, size, kept) : NULL;
        if (!number)
            return pickle_no_memory(vm);
        if (*number == kept) {
            items[2 * kept] = items[i];
            items[2 * kept++ + 1] = items[i + 1];
        } else {
            items[2 * *number + 1] = items[i + 1];
        }
    }
    dict->count = 2 * kept;
    return FSDP_OK;
}

/* Removes repeated keys of every dict: the first key and the last value stay. */
static fsdp_status settle_keys(pickle_vm *vm)
{
    fsdp_name_table table = {0};
    fsdp_status st = FSDP_OK;
    for (size_t i = NODE_FIRST_FREE; i < vm->node_count && st == FSDP_OK; i++)
        if (vm->nodes[i].kind == FSDP_NODE_DICT && vm->nodes[i].count > 2)
            st = settle(vm, &vm->nodes[i], &table);
    fsdp_name_table_release(&table);
    return st;
}

/* === the machine ============================================================================== */

enum { MEMO_LIMIT = 1 << 24, PROTOCOL_LIMIT = 5, BYTES_PER_NODE = 4, NODES_AT_FIRST = 1 << 24 };

/* --- messages ----------------------------------------------------------------------------------- */

static fsdp_status damaged(pickle_vm *vm, const char *why)
{
    return pickle_fail(vm, FSDP_ERR_DAMAGED, why);
}

/* Reports that the data ended early; a caller with more data may try again. */
static fsdp_status run_out(pickle_vm *vm, const char *why)
{
    if (vm->options->ran_out)
        *vm->options->ran_out = true;
    return damaged(vm, why);
}

/* --- input -------------------------------------------------------------------------------------- */

static inline fsdp_status take(pickle_vm *vm, uint64_t size, const uint8_t **data_out)
{
    *data_out = vm->at;
    if (size > (uint64_t)(vm->limit - vm->at))
        return run_out(vm, "it ends inside an argument, or a frame does");
    vm->at += size;
    return FSDP_OK;
}

static fsdp_status take_line(pickle_vm *vm, const char **line_out, size_t *size_out)
{
    *line_out = (const char *)vm->at;
    *size_out = 0;
    const uint8_t *line_end = memchr(vm->at, '\n', (size_t)(vm->limit - vm->at));
    if (!line_end)
        return run_out(vm, "it ends inside a line");
    *size_out = (size_t)(line_end - vm->at);
    vm->at = line_end + 1;
    return FSDP_OK;
}

/* A number of 1, 2, 4 or 8 bytes, little-endian. */
static inline fsdp_status take_number(pickle_vm *vm, size_t width, uint64_t *number_out)
{
    const uint8_t *data;
    *number_out = 0;
    FSDP_TRY(take(vm, width, &data));
    switch (width) {
    case 1: *number_out = data[0]; break;
    case 2: *number_out = fsdp_load_u16(data); break;
    case 4: *number_out = fsdp_load_u32(data); break;
    default: *number_out = fsdp_load_u64(data); break;
    }
    return FSDP_OK;
}

/* Pushes text or bytes that follow their size, a number of `width` bytes. */
static fsdp_status push_sized(pickle_vm *vm, fsdp_node_kind kind, size_t width)
{
    uint64_t size;
    const uint8_t *data;
    FSDP_TRY(take_number(vm, width, &size));
    FSDP_TRY(take(vm, size, &data));
    return push_text(vm, kind, (const char *)data, (size_t)size);
}

/* Pushes a str of Python 2: bytes that mostly are text. */
static fsdp_status push_old_string(pickle_vm *vm, size_t width)
{
    uint64_t size;
    const uint8_t *data;
    FSDP_TRY(take_number(vm, width, &size));
    if (size > INT32_MAX)
        return damaged(vm, "a size is negative");
    FSDP_TRY(take(vm, size, &data));
    bool is_text = text_valid((const char *)data, (size_t)size);
    return push_text(vm, is_text ? FSDP_NODE_STR : FSDP_NODE_BYTES, (const char *)data,
                     (size_t)size);
}

/* --- stack -------------------------------------------------------------------------------------- */

static fsdp_status need(pickle_vm *vm, size_t count)
{
    return vm->height - vm->floor >= count ? FSDP_OK : damaged(vm, "the stack is empty");
}

static fsdp_status put_mark(pickle_vm *vm)
{
    if (!fsdp_grow(&vm->marks, &vm->mark_capacity, vm->mark_count + 1, sizeof *vm->marks))
        return pickle_no_memory(vm);
    vm->marks[vm->mark_count++] = vm->height;
    vm->floor = vm->height;
    return FSDP_OK;
}

/* Removes the last mark; from_out is the stack height at the mark. */
static fsdp_status take_mark(pickle_vm *vm, size_t *from_out)
{
    *from_out = vm->height;
    if (vm->mark_count == 0)
        return damaged(vm, "there is no mark");
    *from_out = vm->marks[--vm->mark_count];
    vm->floor = vm->mark_count > 0 ? vm->marks[vm->mark_count - 1] : 0;
    return FSDP_OK;
}

static fsdp_status push_marked(pickle_vm *vm, fsdp_node_kind kind)
{
    size_t from;
    FSDP_TRY(take_mark(vm, &from));
    return pickle_push_items(vm, kind, from);
}

static inline fsdp_status push_tuple(pickle_vm *vm, size_t count)
{
    FSDP_TRY(need(vm, count));
    return pickle_push_items(vm, FSDP_NODE_TUPLE, vm->height - count);
}

static inline fsdp_status push_empty(pickle_vm *vm, fsdp_node_kind kind)
{
    return pickle_push_node(vm, (fsdp_pickle_node){.kind = (uint8_t)kind});
}

/* Appends the nodes above `from` to the container below them. */
static fsdp_status append_from(pickle_vm *vm, fsdp_node_kind kind, size_t from)
{
    if (from <= vm->floor)
        return damaged(vm, "the stack is empty");
    FSDP_TRY(pickle_append(vm, vm->stack[from - 1], kind, from));
    vm->height = from;
    return FSDP_OK;
}

static fsdp_status append_marked(pickle_vm *vm, fsdp_node_kind kind)
{
    size_t from;
    FSDP_TRY(take_mark(vm, &from));
    return append_from(vm, kind, from);
}

static fsdp_status append_last(pickle_vm *vm, fsdp_node_kind kind, size_t count)
{
    FSDP_TRY(need(vm, count));
    return append_from(vm, kind, vm->height - count);
}

static fsdp_status pop(pickle_vm *vm)
{
    size_t from;
    if (vm->height > vm->floor) {
        vm->height--;
        return FSDP_OK;
    }
    return vm->mark_count > 0 ? take_mark(vm, &from) : damaged(vm, "the stack is empty");
}

static fsdp_status pop_mark(pickle_vm *vm)
{
    size_t from;
    FSDP_TRY(take_mark(vm, &from));
    vm->height = from;
    return FSDP_OK;
}

static fsdp_status push_again(pickle_vm *vm)
{
    FSDP_TRY(need(vm, 1));
    return pickle_push(vm, vm->stack[vm->height - 1]);
}

/* --- memo --------------------------------------------------------------------------------------- */

/* Reserves capacity for the number and some more, since most pickles count up. No value was put
 * there before. */
static fsdp_status extend_memo(pickle_vm *vm, uint64_t number)
{
    enum { AT_ONCE = 1024 };
    size_t count = ((size_t)number / AT_ONCE + 1) * AT_ONCE;
    if (number >= MEMO_LIMIT)
        return pickle_fail(vm, FSDP_ERR_LIMIT, "a memo index is beyond 2^24");
    if (!fsdp_grow(&vm->memo, &vm->memo_capacity, count, sizeof *vm->memo))
        return pickle_no_memory(vm);
    memset(vm->memo + vm->memo_count, 0, (count - vm->memo_count) * sizeof *vm->memo);
    vm->memo_count = count;
    return FSDP_OK;
}

static fsdp_status memo_put(pickle_vm *vm, uint64_t number)
{
    FSDP_TRY(need(vm, 1));
    if (number >= vm->memo_count)
        FSDP_TRY(extend_memo(vm, number));
    vm->memo_used += vm->memo[number] == 0;
    vm->memo[number] = vm->stack[vm->height - 1];
    return FSDP_OK;
}

/* Puts the top at the next number: the count of memo entries. */
static inline fsdp_status memo_put_next(pickle_vm *vm)
{
    size_t number = vm->memo_used;
    if (vm->height == vm->floor || number >= vm->memo_count || vm->memo[number] != 0)
        return memo_put(vm, number);
    vm->memo[number] = vm->stack[vm->height - 1];
    vm->memo_used = number + 1;
    return FSDP_OK;
}

static inline fsdp_status memo_get(pickle_vm *vm, uint64_t number)
{
    if (number >= vm->memo_count || vm->memo[number] == 0)
        return damaged(vm, "it reads a memo entry that is not set");
    return pickle_push(vm, vm->memo[number]);
}

static fsdp_status take_index(pickle_vm *vm, uint64_t *number_out)
{
    const char *line;
    size_t size;
    *number_out = 0;
    FSDP_TRY(take_line(vm, &line, &size));
    if (size == 0 || size > 8)
        return damaged(vm, "a memo index is not a small number");
    for (size_t i = 0; i < size; i++) {
        if (line[i] < '0' || line[i] > '9')
            return damaged(vm, "a memo index is not a small number");
        *number_out = *number_out * 10 + (uint64_t)(line[i] - '0');
    }
    return FSDP_OK;
}

static inline fsdp_status memo_get_sized(pickle_vm *vm, size_t width)
{
    uint64_t number;
    FSDP_TRY(take_number(vm, width, &number));
    return memo_get(vm, number);
}

static fsdp_status memo_step(pickle_vm *vm, uint8_t opcode)
{
    uint64_t number;
    switch (opcode) {
    case OP_BINPUT: FSDP_TRY(take_number(vm, 1, &number)); return memo_put(vm, number);
    case OP_LONG_BINPUT: FSDP_TRY(take_number(vm, 4, &number)); return memo_put(vm, number);
    case OP_PUT: FSDP_TRY(take_index(vm, &number)); return memo_put(vm, number);
    default: FSDP_TRY(take_index(vm, &number)); return memo_get(vm, number);
    }
}

/* --- numbers and lines -------------------------------------------------------------------------- */

static fsdp_status push_long(pickle_vm *vm, size_t width)
{
    uint64_t size;
    const uint8_t *data;
    FSDP_TRY(take_number(vm, width, &size));
    if (size > INT32_MAX)
        return damaged(vm, "a size is negative");
    FSDP_TRY(take(vm, size, &data));
    return push_bigint(vm, data, (size_t)size);
}

static fsdp_status push_float(pickle_vm *vm)
{
    uint64_t bits;
    FSDP_TRY(take_number(vm, 8, &bits));
    bits = __builtin_bswap64(bits);
    fsdp_pickle_node node = {.kind = FSDP_NODE_FLOAT, .flags = FSDP_NODE_HASHABLE};
    memcpy(&node.as.f64, &bits, sizeof bits);
    return pickle_push_node(vm, node);
}

static inline fsdp_status push_byte(pickle_vm *vm)
{
    uint64_t number;
    FSDP_TRY(take_number(vm, 1, &number));
    fsdp_node known = vm->small_ints[number];
    return known != 0 ? pickle_push(vm, known) : pickle_push_int(vm, (int64_t)number);
}

static inline fsdp_status push_short(pickle_vm *vm)
{
    uint64_t number;
    FSDP_TRY(take_number(vm, 2, &number));
    return pickle_push_int(vm, (int64_t)number);
}

static fsdp_status number_step(pickle_vm *vm, uint8_t opcode)
{
    uint64_t number;
    switch (opcode) {
    case OP_BININT:
        FSDP_TRY(take_number(vm, 4, &number));
        return pickle_push_int(vm, (int32_t)number);
    case OP_LONG1: return push_long(vm, 1);
    case OP_LONG4: return push_long(vm, 4);
    default: return push_float(vm);
    }
}

static fsdp_status line_step(pickle_vm *vm, uint8_t opcode)
{
    const char *line;
    size_t size;
    FSDP_TRY(take_line(vm, &line, &size));
    switch (opcode) {
    case OP_INT: return push_int_line(vm, line, size);
    case OP_LONG: return push_long_line(vm, line, size);
    case OP_FLOAT: return push_float_line(vm, line, size);
    case OP_STRING: return push_string_line(vm, line, size);
    default: return push_unicode_line(vm, line, size);
    }
}

static fsdp_status text_step(pickle_vm *vm, uint8_t opcode)
{
    switch (opcode) {
    case OP_BINUNICODE: return push_sized(vm, FSDP_NODE_STR, 4);
    case OP_SHORT_BINUNICODE: return push_sized(vm, FSDP_NODE_STR, 1);
    case OP_BINUNICODE8: return push_sized(vm, FSDP_NODE_STR, 8);
    case OP_BINSTRING: return push_old_string(vm, 4);
    case OP_SHORT_BINSTRING: return push_old_string(vm, 1);
    case OP_BINBYTES: return push_sized(vm, FSDP_NODE_BYTES, 4);
    case OP_SHORT_BINBYTES: return push_sized(vm, FSDP_NODE_BYTES, 1);
    case OP_BINBYTES8: return push_sized(vm, FSDP_NODE_BYTES, 8);
    default: return push_sized(vm, FSDP_NODE_BYTEARRAY, 8);
    }
}

/* --- globals and calls -------------------------------------------------------------------------- */

/* module and name are copied. */
static fsdp_status push_global(pickle_vm *vm, const char *module, size_t module_size,
                               const char *name, size_t name_size)
{
    if (!fsdp_utf8_valid(module, module_size) || !fsdp_utf8_valid(name, name_size))
        return pickle_fail(vm, FSDP_ERR_DAMAGED, "the name of a global is not UTF-8");
    fsdp_pickle_global *global = pickle_store_take(vm->store, sizeof *global);
    char *text = pickle_store_take(vm->store, module_size + name_size + 2);
    if (!global || !text)
        return pickle_no_memory(vm);
    char *second = text + module_size + 1;
    memcpy(text, module, module_size);
    memcpy(second, name, name_size);
    text[module_size] = second[name_size] = '\0';
    *global = (fsdp_pickle_global){text, second, module_size, name_size};
    fsdp_pickle_node node = {
        .kind = FSDP_NODE_GLOBAL, .flags = FSDP_NODE_HASHABLE, .as.global = global};
    uint32_t dtype = 0;
    node.known = (uint16_t)pickle_recognise(global, &dtype);
    node.count = dtype;
    return pickle_push_node(vm, node);
}

static fsdp_status push_global_lines(pickle_vm *vm)
{
    const char *module, *name;
    size_t module_size, name_size;
    FSDP_TRY(take_line(vm, &module, &module_size));
    FSDP_TRY(take_line(vm, &name, &name_size));
    return push_global(vm, module, module_size, name, name_size);
}

static fsdp_status push_stack_global(pickle_vm *vm)
{
    FSDP_TRY(need(vm, 2));
    const fsdp_pickle_node *module = &vm->nodes[vm->stack[vm->height - 2]];
    const fsdp_pickle_node *name = &vm->nodes[vm->stack[vm->height - 1]];
    if (module->kind != FSDP_NODE_STR || name->kind != FSDP_NODE_STR)
        return damaged(vm, "the name of a global is not a string");
    vm->height -= 2;
    return push_global(vm, module->as.text, module->count, name->as.text, name->count);
}

static inline fsdp_status call_step(pickle_vm *vm, pickle_how how)
{
    const size_t parts = how == PICKLE_NEWOBJ_EX ? 3 : 2;
    FSDP_TRY(need(vm, parts));
    const fsdp_node *part = vm->stack + vm->height - parts;
    fsdp_node callable = part[0], args = part[1], kwargs = parts == 3 ? part[2] : 0;
    vm->height -= parts;
    return pickle_call(vm, how, callable, args, kwargs);
}

/* OBJ: the class lies below the arguments, above the mark. */
static fsdp_status push_obj(pickle_vm *vm)
{
    size_t from;
    FSDP_TRY(take_mark(vm, &from));
    if (vm->height == from)
        return damaged(vm, "an object has no class");
    FSDP_TRY(pickle_push_items(vm, FSDP_NODE_TUPLE, from + 1));
    return call_step(vm, PICKLE_REDUCE);
}

/* INST: the class is named after the opcode. */
static fsdp_status push_inst(pickle_vm *vm)
{
    size_t from;
    FSDP_TRY(take_mark(vm, &from));
    FSDP_TRY(pickle_push_items(vm, FSDP_NODE_TUPLE, from));
    fsdp_node args = vm->stack[--vm->height];
    FSDP_TRY(push_global_lines(vm));
    FSDP_TRY(pickle_push(vm, args));
    return call_step(vm, PICKLE_REDUCE);
}

static fsdp_status build(pickle_vm *vm)
{
    FSDP_TRY(need(vm, 2));
    fsdp_node state = vm->stack[--vm->height];
    return pickle_build(vm, vm->stack[vm->height - 1], state);
}

static bool is_source_text(const pickle_vm *vm, fsdp_node node)
{
    fsdp_node_kind kind = vm->nodes[node].kind;
    return kind == FSDP_NODE_NONE || kind == FSDP_NODE_STR || kind == FSDP_NODE_BYTES;
}

/* The class of ("module", class, file, source), which torch.save wrote for the class of a module before the
 * zip form; 0 for another id. */
static fsdp_node class_of_id(const pickle_vm *vm, fsdp_node id)
{
    const fsdp_pickle_node *tuple = &vm->nodes[id];
    if (!vm->options->is_legacy || tuple->kind != FSDP_NODE_TUPLE || tuple->count != 4)
        return 0;
    const fsdp_node *items = tuple->as.items;
    bool is_class = fsdp_pickle_has_text(&vm->nodes[items[0]], "module", strlen("module")) &&
                    vm->nodes[items[1]].kind == FSDP_NODE_GLOBAL && is_source_text(vm, items[2]) &&
                    is_source_text(vm, items[3]);
    return is_class ? items[1] : 0;
}

static fsdp_status push_persistent(pickle_vm *vm)
{
    FSDP_TRY(need(vm, 1));
    if (vm->options->is_metadata)
        return pickle_fail(vm, FSDP_ERR_REFUSED, "metadata contains a persistent id");
    fsdp_node class = class_of_id(vm, vm->stack[vm->height - 1]);
    if (class) {
        vm->stack[vm->height - 1] = class;
        return FSDP_OK;
    }
    fsdp_pickle_node node = {.kind = FSDP_NODE_PERSISTENT, .flags = FSDP_NODE_HASHABLE};
    node.as.child = vm->stack[--vm->height];
    return pickle_push_node(vm, node);
}

static fsdp_status push_persistent_line(pickle_vm *vm)
{
    const char *line;
    size_t size;
    FSDP_TRY(take_line(vm, &line, &size));
    FSDP_TRY(push_text(vm, FSDP_NODE_STR, line, size));
    return push_persistent(vm);
}

static fsdp_status object_step(pickle_vm *vm, uint8_t opcode)
{
    switch (opcode) {
    case OP_GLOBAL: return push_global_lines(vm);
    case OP_STACK_GLOBAL: return push_stack_global(vm);
    case OP_NEWOBJ_EX: return call_step(vm, PICKLE_NEWOBJ_EX);
    case OP_OBJ: return push_obj(vm);
    case OP_INST: return push_inst(vm);
    case OP_PERSID: return push_persistent_line(vm);
    default: return push_persistent(vm);
    }
}

/* --- the loop ----------------------------------------------------------------------------------- */

static fsdp_status begin_frame(pickle_vm *vm)
{
    uint64_t size;
    if (vm->limit != vm->end)
        return damaged(vm, "a frame begins inside another one");
    FSDP_TRY(take_number(vm, 8, &size));
    if (size > (uint64_t)(vm->end - vm->at))
        return run_out(vm, "a frame is longer than the pickle");
    vm->limit = vm->at + size;
    return FSDP_OK;
}

static fsdp_status check_protocol(pickle_vm *vm)
{
    uint64_t protocol;
    FSDP_TRY(take_number(vm, 1, &protocol));
    if (protocol <= PROTOCOL_LIMIT)
        return FSDP_OK;
    return pickle_fail(vm, vm->options->depth > 0 ? FSDP_ERR_DAMAGED : FSDP_ERR_LIMIT,
                       "its protocol is above 5");
}

/* Python fails there without a registry or buffers, which bytes in an object do not have. */
static fsdp_status outside(pickle_vm *vm, const char *why)
{
    return pickle_fail(vm, vm->options->depth > 0 ? FSDP_ERR_DAMAGED : FSDP_ERR_REFUSED, why);
}

static fsdp_status container_step(pickle_vm *vm, uint8_t opcode)
{
    switch (opcode) {
    case OP_TUPLE: return push_marked(vm, FSDP_NODE_TUPLE);
    case OP_TUPLE3: return push_tuple(vm, 3);
    case OP_EMPTY_LIST: return push_empty(vm, FSDP_NODE_LIST);
    case OP_LIST: return push_marked(vm, FSDP_NODE_LIST);
    case OP_APPEND: return append_last(vm, FSDP_NODE_LIST, 1);
    case OP_APPENDS: return append_marked(vm, FSDP_NODE_LIST);
    case OP_DICT: return push_marked(vm, FSDP_NODE_DICT);
    case OP_SETITEM: return append_last(vm, FSDP_NODE_DICT, 2);
    case OP_EMPTY_SET: return push_empty(vm, FSDP_NODE_SET);
    case OP_ADDITEMS: return append_marked(vm, FSDP_NODE_SET);
    default: return push_marked(vm, FSDP_NODE_FROZENSET);
    }
}

static fsdp_status other_step(pickle_vm *vm, uint8_t opcode)
{
    switch (opcode) {
    case OP_NONE: return pickle_push(vm, NODE_OF_NONE);
    case OP_NEWTRUE: return pickle_push(vm, NODE_OF_TRUE);
    case OP_NEWFALSE: return pickle_push(vm, NODE_OF_FALSE);
    case OP_POP: return pop(vm);
    case OP_POP_MARK: return pop_mark(vm);
    case OP_DUP: return push_again(vm);
    case OP_PROTO: return check_protocol(vm);
    case OP_FRAME: return begin_frame(vm);
    case OP_INT:
    case OP_LONG:
    case OP_FLOAT:
    case OP_STRING:
    case OP_UNICODE: return line_step(vm, opcode);
    case OP_EXT1:
    case OP_EXT2:
    case OP_EXT4: return outside(vm, "it uses the extension registry of a program");
    case OP_NEXT_BUFFER: return outside(vm, "it needs buffers from outside the file");
    case OP_READONLY_BUFFER:
        return vm->options->depth > 0 ? need(vm, 1)
                                      : outside(vm, "it needs buffers from outside the file");
    default: return damaged(vm, "it has an unknown opcode");
    }
}

static fsdp_status rare_step(pickle_vm *vm, uint8_t opcode)
{
    switch (opcode) {
    case OP_BINPUT:
    case OP_LONG_BINPUT:
    case OP_PUT:
    case OP_GET: return memo_step(vm, opcode);
    case OP_BININT:
    case OP_LONG1:
    case OP_LONG4:
    case OP_BINFLOAT: return number_step(vm, opcode);
    case OP_BINUNICODE:
    case OP_SHORT_BINUNICODE:
    case OP_BINUNICODE8:
    case OP_BINSTRING:
    case OP_SHORT_BINSTRING:
    case OP_BINBYTES:
    case OP_SHORT_BINBYTES:
    case OP_BINBYTES8:
    case OP_BYTEARRAY8: return text_step(vm, opcode);
    case OP_TUPLE:
    case OP_TUPLE3:
    case OP_EMPTY_LIST:
    case OP_LIST:
    case OP_APPEND:
    case OP_APPENDS:
    case OP_DICT:
    case OP_SETITEM:
    case OP_EMPTY_SET:
    case OP_ADDITEMS:
    case OP_FROZENSET: return container_step(vm, opcode);
    case OP_GLOBAL:
    case OP_STACK_GLOBAL:
    case OP_NEWOBJ_EX:
    case OP_OBJ:
    case OP_INST:
    case OP_PERSID:
    case OP_BINPERSID: return object_step(vm, opcode);
    default: return other_step(vm, opcode);
    }
}

/* Executes one opcode. The opcodes that make up most of a large pickle have their cases here. */
static inline fsdp_status step(pickle_vm *vm, uint8_t opcode)
{
    switch (opcode) {
    case OP_BINGET: return memo_get_sized(vm, 1);
    case OP_LONG_BINGET: return memo_get_sized(vm, 4);
    case OP_MEMOIZE: return memo_put_next(vm);
    case OP_BININT1: return push_byte(vm);
    case OP_BININT2: return push_short(vm);
    case OP_MARK: return put_mark(vm);
    case OP_EMPTY_TUPLE: return pickle_push(vm, NODE_OF_EMPTY_TUPLE);
    case OP_TUPLE1: return push_tuple(vm, 1);
    case OP_TUPLE2: return push_tuple(vm, 2);
    case OP_EMPTY_DICT: return push_empty(vm, FSDP_NODE_DICT);
    case OP_SETITEMS: return append_marked(vm, FSDP_NODE_DICT);
    case OP_REDUCE: return call_step(vm, PICKLE_REDUCE);
    case OP_NEWOBJ: return call_step(vm, PICKLE_NEWOBJ);
    case OP_BUILD: return build(vm);
    default: return rare_step(vm, opcode);
    }
}

static fsdp_status run(pickle_vm *vm)
{
    for (;;) {
        vm->opcode = vm->at;
        if (vm->at == vm->limit) {
            if (vm->at == vm->end)
                return run_out(vm, "it ends without STOP");
            vm->limit = vm->end;
        }
        uint8_t opcode = *vm->at++;
        if (opcode == OP_STOP)
            break;
        FSDP_TRY(step(vm, opcode));
    }
    FSDP_TRY(need(vm, 1));
    return pickle_check_pending(vm);
}

static fsdp_status set_up(pickle_vm *vm)
{
    fsdp_node made;
    fsdp_pickle_node fixed[] = {
        {.kind = FSDP_NODE_ABSENT},
        {.kind = FSDP_NODE_NONE, .flags = FSDP_NODE_HASHABLE},
        {.kind = FSDP_NODE_BOOL, .flags = FSDP_NODE_HASHABLE, .as.i64 = 0},
        {.kind = FSDP_NODE_BOOL, .flags = FSDP_NODE_HASHABLE, .as.i64 = 1},
        {.kind = FSDP_NODE_TUPLE, .flags = FSDP_NODE_HASHABLE},
    };
    /* reserves nodes for most pickles, so that large arrays need not move */
    size_t usual = NODE_FIRST_FREE + (size_t)(vm->end - vm->data) / BYTES_PER_NODE;
    usual = usual < NODES_AT_FIRST ? usual : NODES_AT_FIRST;
    if (!fsdp_grow(&vm->stack, &vm->stack_capacity, 1, sizeof *vm->stack) ||
        !fsdp_grow(&vm->nodes, &vm->node_capacity, usual, sizeof *vm->nodes))
        return pickle_no_memory(vm);
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++)
        FSDP_TRY(pickle_new_node(vm, fixed[i], &made));
    return FSDP_OK;
}

static fsdp_status parse(pickle_vm *vm)
{
    vm->store = fsdp_alloc(1, sizeof *vm->store);
    if (!vm->store)
        return pickle_no_memory(vm);
    FSDP_TRY(set_up(vm));
    FSDP_TRY(run(vm));
    return vm->options->is_metadata ? FSDP_OK : settle_keys(vm);
}

fsdp_status pickle_parse(const fsdp_pickle_options *options, const void *data, size_t size,
                         fsdp_pickle *pickle_out, size_t *used_out, fsdp_error *err)
{
    *pickle_out = (fsdp_pickle){0};
    pickle_vm vm = {.options = options, .data = data, .at = data, .opcode = data, .err = err};
    vm.end = vm.limit = vm.data + size;
    if (size > UINT32_MAX / 2)
        return pickle_fail(&vm, FSDP_ERR_LIMIT, "it is larger than 2 GiB");
    fsdp_status st = parse(&vm);
    *pickle_out = (fsdp_pickle){.nodes = vm.nodes, .count = vm.node_count, .store = vm.store};
    if (st == FSDP_OK) {
        pickle_out->root = vm.stack[vm.height - 1];
        if (used_out)
            *used_out = (size_t)(vm.at - vm.data);
    } else {
        fsdp_pickle_release(pickle_out);
    }
    fsdp_free(vm.stack);
    fsdp_free(vm.marks);
    fsdp_free(vm.memo);
    fsdp_free(vm.pending);
    return st;
}

void fsdp_pickle_release(fsdp_pickle *pickle)
{
    while (pickle->store && pickle->store->blocks) {
        struct pickle_block *next = pickle->store->blocks->next;
        fsdp_free(pickle->store->blocks);
        pickle->store->blocks = next;
    }
    fsdp_free(pickle->store);
    fsdp_free((void *)(uintptr_t)pickle->nodes);
    *pickle = (fsdp_pickle){0};
}
