/*
 * Pickles of protocol 2 as torch.save writes them: see pickle_write.h; read back by pickle.c.
 */
#include "formats/pickle/pickle_write.h"

#include "base/core/mem.h"

#include <string.h>

enum {
    LONG1 = 0x8a,
    LONG4 = 0x8b,
    LONG1_MOST = 255,
    DIGITS_MOST = 4300, /* Python's limit for converting integers to text and back */
    LIMBS_MOST = 512
};

void fsdp_pickler_release(fsdp_pickler *pickler)
{
    fsdp_text_release(&pickler->text);
    *pickler = (fsdp_pickler){0};
}

void fsdp_pickler_begin(fsdp_pickler *pickler)
{
    pickler->text.size = 0;
    pickler->memo_count = 0;
    pickler->term_count = 0;
    fsdp_text_add(&pickler->text, "\x80\x02", 2);
}

static void add_byte(fsdp_pickler *pickler, unsigned byte)
{
    char text = (char)byte;
    fsdp_text_add(&pickler->text, &text, 1);
}

/* An opcode and a little-endian number. */
static void add_number(fsdp_pickler *pickler, unsigned op, uint64_t number, size_t size)
{
    char text[9] = {(char)op};
    for (size_t i = 0; i < size; i++)
        text[1 + i] = (char)(number >> 8 * i);
    fsdp_text_add(&pickler->text, text, 1 + size);
}

void fsdp_pickler_op(fsdp_pickler *pickler, fsdp_opcode op)
{
    add_byte(pickler, op);
}

/* --- numbers ---------------------------------------------------------------------------------- */

/* Length of a two's complement number without bytes that only repeat the sign. */
static size_t significant(const uint8_t *bytes, size_t size)
{
    uint8_t sign = bytes[size - 1] & 0x80 ? 0xff : 0;
    while (size > 1 && bytes[size - 1] == sign && (bytes[size - 2] & 0x80) == (sign & 0x80))
        size--;
    return size;
}

static void add_long(fsdp_pickler *pickler, const uint8_t *bytes, size_t size)
{
    size = significant(bytes, size);
    if (size <= LONG1_MOST)
        add_number(pickler, LONG1, size, 1);
    else
        add_number(pickler, LONG4, size, 4);
    fsdp_text_add(&pickler->text, (const char *)bytes, size);
}

static size_t split_u64(uint64_t number, uint8_t *bytes)
{
    for (int i = 0; i < 8; i++)
        bytes[i] = (uint8_t)(number >> 8 * i);
    return 8;
}

void fsdp_pickler_int(fsdp_pickler *pickler, int64_t number)
{
    uint8_t bytes[8];
    if (number >= 0 && number <= UINT8_MAX)
        add_number(pickler, 'K', (uint64_t)number, 1);
    else if (number >= 0 && number <= UINT16_MAX)
        add_number(pickler, 'M', (uint64_t)number, 2);
    else if (number >= INT32_MIN && number <= INT32_MAX)
        add_number(pickler, 'J', (uint64_t)number, 4);
    else
        add_long(pickler, bytes, split_u64((uint64_t)number, bytes));
}

static void add_u64(fsdp_pickler *pickler, uint64_t number)
{
    uint8_t bytes[9] = {0};
    if (number <= INT64_MAX)
        fsdp_pickler_int(pickler, (int64_t)number);
    else
        add_long(pickler, bytes, split_u64(number, bytes) + 1);
}

static void add_f64(fsdp_pickler *pickler, double number)
{
    uint64_t bits;
    char text[9] = {'G'};
    memcpy(&bits, &number, sizeof bits);
    for (int i = 0; i < 8; i++)
        text[1 + i] = (char)(bits >> (56 - 8 * i));
    fsdp_text_add(&pickler->text, text, sizeof text);
}

/* Multiplies by ten and adds a digit. */
static void push_digit(uint32_t *limbs, size_t *count, unsigned digit)
{
    uint64_t carry = digit;
    for (size_t i = 0; i < *count; i++) {
        carry += (uint64_t)limbs[i] * 10;
        limbs[i] = (uint32_t)carry;
        carry >>= 32;
    }
    if (carry > 0)
        limbs[(*count)++] = (uint32_t)carry;
}

static size_t twos_complement(const uint32_t *limbs, size_t count, bool negative, uint8_t *bytes)
{
    unsigned carry = negative;
    for (size_t i = 0; i < 4 * count; i++) {
        unsigned byte = (limbs[i / 4] >> 8 * (i % 4)) & 0xff;
        byte = (negative ? byte ^ 0xff : byte) + carry;
        bytes[i] = (uint8_t)byte;
        carry = byte >> 8;
    }
    bytes[4 * count] = negative && carry == 0 ? 0xff : 0; /* carry: minus zero */
    return 4 * count + 1;
}

static fsdp_status add_decimal(fsdp_pickler *pickler, const char *digits, size_t size,
                               fsdp_error *err)
{
    uint32_t limbs[LIMBS_MOST] = {0};
    uint8_t bytes[4 * LIMBS_MOST + 1];
    bool negative = size > 0 && digits[0] == '-';
    size_t count = 0, first = negative ? 1 : 0;
    if (size == first || size - first > DIGITS_MOST)
        return fsdp_fail(err, FSDP_ERR_USAGE, "an integer of %zu digits cannot be pickled",
                         size - first);
    for (size_t i = first; i < size; i++) {
        if (digits[i] < '0' || digits[i] > '9')
            return fsdp_fail(err, FSDP_ERR_USAGE, "'%.40s' is not an integer", digits);
        push_digit(limbs, &count, (unsigned)(digits[i] - '0'));
    }
    size_t used = twos_complement(limbs, count, negative, bytes);
    if (pickler->weights_only && significant(bytes, used) > LONG1_MOST)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "torch.load(weights_only=True) does not accept an integer of %zu digits",
                         size - first);
    add_long(pickler, bytes, used);
    return FSDP_OK;
}

/* --- text, memo, constants -------------------------------------------------------------------- */

void fsdp_pickler_text(fsdp_pickler *pickler, const char *data, size_t size)
{
    if (size > UINT32_MAX) {
        pickler->text.failed = true;
        return;
    }
    add_number(pickler, 'X', size, 4);
    fsdp_text_add(&pickler->text, data, size);
}

uint32_t fsdp_pickler_put(fsdp_pickler *pickler)
{
    uint32_t memo = pickler->memo_count++;
    if (memo <= UINT8_MAX)
        add_number(pickler, 'q', memo, 1);
    else
        add_number(pickler, 'r', memo, 4);
    return memo;
}

void fsdp_pickler_get(fsdp_pickler *pickler, uint32_t memo)
{
    if (memo <= UINT8_MAX)
        add_number(pickler, 'h', memo, 1);
    else
        add_number(pickler, 'j', memo, 4);
}

/* Emits a memoized constant; false when it is new and the caller must write it. A str has no
 * module. */
static bool get_term(fsdp_pickler *pickler, const char *module, const char *name)
{
    for (size_t i = 0; i < pickler->term_count; i++) {
        const char *known = pickler->terms[i].module;
        if ((known == module || (known && module && strcmp(known, module) == 0)) &&
            strcmp(pickler->terms[i].name, name) == 0) {
            fsdp_pickler_get(pickler, pickler->terms[i].memo);
            return true;
        }
    }
    return false;
}

static void put_term(fsdp_pickler *pickler, const char *module, const char *name)
{
    if (pickler->term_count == FSDP_PICKLER_TERMS)
        return;
    size_t i = pickler->term_count++;
    pickler->terms[i].module = module;
    pickler->terms[i].name = name;
    pickler->terms[i].memo = fsdp_pickler_put(pickler);
}

void fsdp_pickler_global(fsdp_pickler *pickler, const char *module, const char *name)
{
    if (get_term(pickler, module, name))
        return;
    add_byte(pickler, 'c');
    fsdp_text_add(&pickler->text, module, strlen(module));
    add_byte(pickler, '\n');
    fsdp_text_add(&pickler->text, name, strlen(name));
    add_byte(pickler, '\n');
    put_term(pickler, module, name);
}

void fsdp_pickler_word(fsdp_pickler *pickler, const char *word)
{
    if (get_term(pickler, NULL, word))
        return;
    fsdp_pickler_text(pickler, word, strlen(word));
    put_term(pickler, NULL, word);
}

/* --- tuples ----------------------------------------------------------------------------------- */

static void begin_tuple(fsdp_pickler *pickler, size_t count)
{
    if (count > 3)
        fsdp_pickler_op(pickler, FSDP_OP_MARK);
}

static void end_tuple(fsdp_pickler *pickler, size_t count)
{
    static const fsdp_opcode small[] = {FSDP_OP_EMPTY_TUPLE, FSDP_OP_TUPLE1, FSDP_OP_TUPLE2,
                                        FSDP_OP_TUPLE3};
    fsdp_pickler_op(pickler, count > 3 ? FSDP_OP_TUPLE : small[count]);
}

void fsdp_pickler_ints(fsdp_pickler *pickler, const int64_t *items, size_t count)
{
    begin_tuple(pickler, count);
    for (size_t i = 0; i < count; i++)
        fsdp_pickler_int(pickler, items[i]);
    end_tuple(pickler, count);
}

void fsdp_pickler_size(fsdp_pickler *pickler, const int64_t *items, size_t count)
{
    fsdp_pickler_global(pickler, "torch", "Size");
    fsdp_pickler_ints(pickler, items, count);
    fsdp_pickler_op(pickler, FSDP_OP_TUPLE1);
    fsdp_pickler_op(pickler, FSDP_OP_REDUCE);
}

/* --- values ----------------------------------------------------------------------------------- */

static fsdp_status add_value(fsdp_pickler *pickler, const fsdp_value *value, int depth,
                             fsdp_error *err);

static fsdp_status fail_too_deep(fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_USAGE, "lists and dicts are nested more than %d deep",
                     FSDP_VALUE_DEPTH);
}

/* Protocol 2 encodes bytes as the call of a function that turns text into them. */
static void add_bytes(fsdp_pickler *pickler, const char *data, size_t size)
{
    fsdp_pickler_global(pickler, "_codecs", "encode");
    size_t wide = 0;
    for (size_t i = 0; i < size; i++)
        wide += (uint8_t)data[i] >> 7;
    if (size > UINT32_MAX - wide) {
        pickler->text.failed = true;
        return;
    }
    add_number(pickler, 'X', size + wide, 4);
    for (size_t i = 0; i < size; i++) {
        uint8_t byte = (uint8_t)data[i];
        char text[2] = {(char)(0xc0 | byte >> 6), (char)(0x80 | (byte & 0x3f))};
        fsdp_text_add(&pickler->text, byte < 0x80 ? &data[i] : text, byte < 0x80 ? 1 : 2);
    }
    fsdp_pickler_word(pickler, "latin1");
    fsdp_pickler_op(pickler, FSDP_OP_TUPLE2);
    fsdp_pickler_op(pickler, FSDP_OP_REDUCE);
}

static void add_complex(fsdp_pickler *pickler, const double *parts)
{
    fsdp_pickler_global(pickler, "__builtin__", "complex");
    add_f64(pickler, parts[0]);
    add_f64(pickler, parts[1]);
    fsdp_pickler_op(pickler, FSDP_OP_TUPLE2);
    fsdp_pickler_op(pickler, FSDP_OP_REDUCE);
}

static fsdp_status add_key(fsdp_pickler *pickler, const fsdp_value *key, int depth, fsdp_error *err)
{
    if (key->kind == FSDP_VALUE_DICT)
        return fsdp_fail(err, FSDP_ERR_USAGE, "a dict cannot be a key of a dict");
    if (depth > FSDP_VALUE_DEPTH)
        return fail_too_deep(err);
    if (key->kind != FSDP_VALUE_LIST)
        return add_value(pickler, key, depth, err);
    size_t count = key->as.list.count;
    begin_tuple(pickler, count);
    for (size_t i = 0; i < count; i++)
        FSDP_TRY(add_key(pickler, &key->as.list.items[i], depth + 1, err));
    end_tuple(pickler, count);
    return FSDP_OK;
}

static fsdp_status add_list(fsdp_pickler *pickler, const fsdp_value *value, int depth,
                            fsdp_error *err)
{
    fsdp_pickler_op(pickler, FSDP_OP_EMPTY_LIST);
    if (value->as.list.count == 0)
        return FSDP_OK;
    fsdp_pickler_op(pickler, FSDP_OP_MARK);
    for (size_t i = 0; i < value->as.list.count; i++)
        FSDP_TRY(add_value(pickler, &value->as.list.items[i], depth, err));
    fsdp_pickler_op(pickler, FSDP_OP_APPENDS);
    return FSDP_OK;
}

static fsdp_status add_tuple(fsdp_pickler *pickler, const fsdp_value *value, int depth,
                             fsdp_error *err)
{
    begin_tuple(pickler, value->as.list.count);
    for (size_t i = 0; i < value->as.list.count; i++)
        FSDP_TRY(add_value(pickler, &value->as.list.items[i], depth, err));
    end_tuple(pickler, value->as.list.count);
    return FSDP_OK;
}

static fsdp_status add_dict(fsdp_pickler *pickler, const fsdp_value *value, int depth,
                            fsdp_error *err)
{
    fsdp_pickler_op(pickler, FSDP_OP_EMPTY_DICT);
    if (value->as.list.count == 0)
        return FSDP_OK;
    fsdp_pickler_op(pickler, FSDP_OP_MARK);
    for (size_t i = 0; i < value->as.list.count; i += 2) {
        FSDP_TRY(add_key(pickler, &value->as.list.items[i], depth, err));
        FSDP_TRY(add_value(pickler, &value->as.list.items[i + 1], depth, err));
    }
    fsdp_pickler_op(pickler, FSDP_OP_SETITEMS);
    return FSDP_OK;
}

/* Recursion depth is the nesting depth of values. */
static fsdp_status add_value(fsdp_pickler *pickler, const fsdp_value *value, int depth,
                             fsdp_error *err)
{
    if (depth > FSDP_VALUE_DEPTH)
        return fail_too_deep(err);
    switch (value->kind) {
    case FSDP_VALUE_NULL: fsdp_pickler_op(pickler, FSDP_OP_NONE); break;
    case FSDP_VALUE_BOOL:
        fsdp_pickler_op(pickler, value->as.boolean ? FSDP_OP_TRUE : FSDP_OP_FALSE);
        break;
    case FSDP_VALUE_I64: fsdp_pickler_int(pickler, value->as.i64); break;
    case FSDP_VALUE_U64: add_u64(pickler, value->as.u64); break;
    case FSDP_VALUE_F64: add_f64(pickler, value->as.f64); break;
    case FSDP_VALUE_COMPLEX: add_complex(pickler, value->as.complex_parts); break;
    case FSDP_VALUE_STRING:
        fsdp_pickler_text(pickler, value->as.bytes.data, value->as.bytes.size);
        break;
    case FSDP_VALUE_BYTES: add_bytes(pickler, value->as.bytes.data, value->as.bytes.size); break;
    case FSDP_VALUE_INTEGER:
        return add_decimal(pickler, value->as.bytes.data, value->as.bytes.size, err);
    case FSDP_VALUE_LIST:
        return value->is_tuple ? add_tuple(pickler, value, depth + 1, err)
                               : add_list(pickler, value, depth + 1, err);
    case FSDP_VALUE_DICT: return add_dict(pickler, value, depth + 1, err);
    default:
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "an object of a class, or a tensor inside a value, cannot be pickled");
    }
    return FSDP_OK;
}

fsdp_status fsdp_pickler_value(fsdp_pickler *pickler, const fsdp_value *value, fsdp_error *err)
{
    return add_value(pickler, value, 0, err);
}
