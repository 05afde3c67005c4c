/* Numbers in state dicts: programs store them as values or as 0-d tensors of any type. */
#include "runtime/state/state_internal.h"

#include <math.h>
#include <string.h>

bool fsdp_state_value_number(const fsdp_value *value, double *number_out)
{
    switch (value->kind) {
    case FSDP_VALUE_BOOL: *number_out = value->as.boolean; return true;
    case FSDP_VALUE_I64: *number_out = (double)value->as.i64; return true;
    case FSDP_VALUE_U64: *number_out = (double)value->as.u64; return true;
    case FSDP_VALUE_F64: *number_out = value->as.f64; return true;
    default: return false;
    }
}

static bool is_integer(fsdp_dtype dtype)
{
    return dtype >= FSDP_I64 && dtype <= FSDP_BOOL;
}

/* Reads an integer of any size; little-endian, as memory is. */
static double read_integer(const void *data, fsdp_dtype dtype)
{
    uint64_t bits = 0;
    size_t size = fsdp_dtype_size(dtype);
    unsigned unused = (unsigned)(64 - 8 * size);
    memcpy(&bits, data, size);
    return dtype <= FSDP_I8 ? (double)((int64_t)(bits << unused) >> unused) : (double)bits;
}

bool fsdp_state_number(const fsdp_entry *entry, double *number_out)
{
    if (entry->kind == FSDP_ENTRY_VALUE)
        return fsdp_state_value_number(&entry->value, number_out);
    if (entry->kind != FSDP_ENTRY_TENSOR || entry->ndim != 0 || !entry->data)
        return false;
    bool is_float = fsdp_dtype_describe(entry->dtype)->is_float;
    if (is_float)
        fsdp_cast(number_out, FSDP_F64, entry->data, entry->dtype, 1);
    else if (is_integer(entry->dtype))
        *number_out = read_integer(entry->data, entry->dtype);
    return is_float || is_integer(entry->dtype);
}

/* A double holds integers up to 2^53 only. */
static int64_t integer_of(const fsdp_entry *from, double number)
{
    if (from->kind == FSDP_ENTRY_VALUE && from->value.kind == FSDP_VALUE_I64)
        return from->value.as.i64;
    return fabs(number) < 0x1p63 ? (int64_t)number : 0;
}

bool fsdp_state_set_number(const fsdp_entry *to, const fsdp_entry *from)
{
    size_t size = fsdp_dtype_size(to->dtype);
    double number;
    if (from->kind == FSDP_ENTRY_TENSOR && from->ndim == 0 && from->dtype == to->dtype &&
        from->data) {
        memmove(to->data, from->data, size);
        return true;
    }
    if (!fsdp_state_number(from, &number))
        return false;
    int64_t integer = integer_of(from, number);
    if (fsdp_dtype_describe(to->dtype)->is_float)
        fsdp_cast(to->data, to->dtype, &number, FSDP_F64, 1);
    else if (is_integer(to->dtype))
        memcpy(to->data, &integer, size);
    else
        return false;
    return true;
}
