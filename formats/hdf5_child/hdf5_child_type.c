/*
 * Classifies an HDF5 type: the dtype with the same bits, text, or an opaque type. The mirror is
 * hdf5_file.c.
 */
#include "formats/hdf5_child/hdf5_child.h"

#include <stdio.h>
#include <string.h>

/* --- numbers ---------------------------------------------------------------------------------- */

/* True when every bit is used, in one of the two byte orders. */
static bool is_plain(hid_t type, fsdp_h5_type_info *out)
{
    size_t size = H5Tget_size(type);
    H5T_order_t order = H5Tget_order(type);
    out->is_swapped = order == H5T_ORDER_BE && size > 1;
    return (order == H5T_ORDER_LE || order == H5T_ORDER_BE) && H5Tget_precision(type) == 8 * size &&
           H5Tget_offset(type) == 0;
}

static fsdp_dtype integer_dtype(size_t size, bool is_signed)
{
    switch (size) {
    case 1: return is_signed ? FSDP_I8 : FSDP_U8;
    case 2: return is_signed ? FSDP_I16 : FSDP_U16;
    case 4: return is_signed ? FSDP_I32 : FSDP_U32;
    case 8: return is_signed ? FSDP_I64 : FSDP_U64;
    default: return FSDP_DTYPE_NONE;
    }
}

static void understand_integer(hid_t type, fsdp_h5_type_info *out)
{
    size_t size = H5Tget_size(type);
    out->kind = FSDP_H5_INTEGER;
    out->is_signed = H5Tget_sign(type) == H5T_SGN_2;
    if (is_plain(type, out))
        out->dtype = integer_dtype(size, out->is_signed);
    snprintf(out->text, sizeof out->text, "integer of %zu bytes", size);
    snprintf(out->numpy, sizeof out->numpy, "%c%c%zu",
             out->is_swapped ? '>'
             : size > 1      ? '<'
                             : '|',
             out->is_signed ? 'i' : 'u', size);
}

/* HDF5 floats: the sign on top, then the exponent, then the mantissa. An HDF5 type does not
 * state which values are infinities, so e4m3 with bias 7 is taken for the usual one, which has
 * none. */
static const struct float_layout {
    fsdp_dtype dtype;
    size_t size, exponent_bits, bias;
} float_layouts[] = {
    {FSDP_F64, 8, 11, 1023},     {FSDP_F32, 4, 8, 127},        {FSDP_F16, 2, 5, 15},
    {FSDP_BF16, 2, 8, 127},      {FSDP_F8_E4M3FN, 1, 4, 7},    {FSDP_F8_E5M2, 1, 5, 15},
    {FSDP_F8_E4M3FNUZ, 1, 4, 8}, {FSDP_F8_E5M2FNUZ, 1, 5, 16},
};

static fsdp_dtype float_dtype(hid_t type)
{
    size_t size = H5Tget_size(type), bits = 8 * size;
    size_t sign, exponent, exponent_bits, mantissa, mantissa_bits;
    if (H5Tget_norm(type) != H5T_NORM_IMPLIED ||
        H5Tget_fields(type, &sign, &exponent, &exponent_bits, &mantissa, &mantissa_bits) < 0 ||
        sign != bits - 1 || mantissa != 0 || exponent != mantissa_bits ||
        exponent + exponent_bits != sign)
        return FSDP_DTYPE_NONE;
    for (size_t i = 0; i < sizeof float_layouts / sizeof float_layouts[0]; i++) {
        const struct float_layout *layout = &float_layouts[i];
        if (layout->size == size && layout->exponent_bits == exponent_bits &&
            layout->bias == H5Tget_ebias(type))
            return layout->dtype;
    }
    return FSDP_DTYPE_NONE;
}

static void understand_float(hid_t type, fsdp_h5_type_info *out)
{
    size_t size = H5Tget_size(type);
    out->kind = FSDP_H5_FLOAT;
    if (is_plain(type, out))
        out->dtype = float_dtype(type);
    snprintf(out->text, sizeof out->text, "floating type of %zu bits in %zu bytes",
             H5Tget_precision(type), size);
    snprintf(out->numpy, sizeof out->numpy, "%cf%zu",
             out->is_swapped ? '>'
             : size > 1      ? '<'
                             : '|',
             size);
}

/* --- h5py's booleans and complex numbers ------------------------------------------------------ */

static bool is_member(hid_t type, unsigned number, const char *name)
{
    char *actual = H5Tget_member_name(type, number);
    bool is_same = actual && strcmp(actual, name) == 0;
    H5free_memory(actual);
    return is_same;
}

static bool is_boolean(hid_t type)
{
    signed char no = -1, yes = -1;
    return H5Tget_size(type) == 1 && H5Tget_nmembers(type) == 2 &&
           H5Tenum_valueof(type, "FALSE", &no) >= 0 && H5Tenum_valueof(type, "TRUE", &yes) >= 0 &&
           no == 0 && yes == 1;
}

static void understand_enum(hid_t type, fsdp_h5_type_info *out)
{
    snprintf(out->text, sizeof out->text, "enum of %zu bytes", H5Tget_size(type));
    snprintf(out->numpy, sizeof out->numpy, "|i%zu", H5Tget_size(type));
    if (is_boolean(type)) {
        out->kind = FSDP_H5_BOOLEAN;
        out->dtype = FSDP_BOOL;
        return;
    }
    hid_t base = H5Tget_super(type);
    out->kind = FSDP_H5_ENUM;
    out->is_signed = H5Tget_sign(base) == H5T_SGN_2;
    H5Tclose(base);
}

static fsdp_dtype complex_of(fsdp_dtype part)
{
    switch (part) {
    case FSDP_F64: return FSDP_C128;
    case FSDP_F32: return FSDP_C64;
    case FSDP_F16: return FSDP_COMPLEX32;
    case FSDP_BF16: return FSDP_BCOMPLEX32;
    default: return FSDP_DTYPE_NONE;
    }
}

static void understand_compound(hid_t type, fsdp_h5_type_info *out)
{
    int members = H5Tget_nmembers(type);
    snprintf(out->text, sizeof out->text, "compound of %d members", members);
    snprintf(out->numpy, sizeof out->numpy, "|V%zu", H5Tget_size(type) % 100000);
    if (members != 2 || !is_member(type, 0, "r") || !is_member(type, 1, "i"))
        return;
    hid_t real = H5Tget_member_type(type, 0), imaginary = H5Tget_member_type(type, 1);
    size_t half = H5Tget_size(real);
    fsdp_h5_type_info part = {.kind = FSDP_H5_OTHER};
    if (H5Tget_class(real) == H5T_FLOAT && H5Tequal(real, imaginary) > 0 &&
        H5Tget_member_offset(type, 0) == 0 && H5Tget_member_offset(type, 1) == half &&
        H5Tget_size(type) == 2 * half)
        understand_float(real, &part);
    H5Tclose(real);
    H5Tclose(imaginary);
    if (complex_of(part.dtype) == FSDP_DTYPE_NONE)
        return;
    out->kind = FSDP_H5_COMPLEX;
    out->dtype = complex_of(part.dtype);
    out->is_swapped = part.is_swapped;
}

/* --- all types -------------------------------------------------------------------------------- */

static void understand_text(hid_t type, fsdp_h5_type_info *out)
{
    bool is_variable = H5Tis_variable_str(type) > 0;
    size_t size = H5Tget_size(type);
    out->kind = is_variable ? FSDP_H5_TEXT : FSDP_H5_FIXED_TEXT;
    snprintf(out->text, sizeof out->text, "text of %zu bytes", size);
    if (is_variable)
        snprintf(out->numpy, sizeof out->numpy, "|O");
    else
        snprintf(out->numpy, sizeof out->numpy, "|S%zu", size % 1000000000);
}

void fsdp_h5_classify(hid_t type, fsdp_h5_type_info *out)
{
    *out = (fsdp_h5_type_info){.kind = FSDP_H5_OTHER, .numpy = "|O"};
    const char *text = "unknown type";
    switch (H5Tget_class(type)) {
    case H5T_INTEGER: understand_integer(type, out); return;
    case H5T_FLOAT: understand_float(type, out); return;
    case H5T_ENUM: understand_enum(type, out); return;
    case H5T_COMPOUND: understand_compound(type, out); return;
    case H5T_STRING: understand_text(type, out); return;
    case H5T_BITFIELD: text = "bit field"; break;
    case H5T_OPAQUE: text = "opaque bytes"; break;
    case H5T_REFERENCE: text = "reference"; break;
    case H5T_VLEN: text = "sequences of varying length"; break;
    case H5T_ARRAY: text = "array"; break;
    case H5T_TIME: text = "time"; break;
    default: break;
    }
    snprintf(out->text, sizeof out->text, "%s", text);
    if (H5Tget_class(type) == H5T_OPAQUE)
        snprintf(out->numpy, sizeof out->numpy, "|V%zu", H5Tget_size(type) % 1000000000);
}
