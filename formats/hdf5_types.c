/*
 * dtypes as HDF5 types. Where HDF5 can describe the bits (bf16, f16 and e5m2 are IEEE-like) other
 * programs see numbers; where it cannot, they see bytes and an attribute with the type's name.
 */
#include "formats/hdf5_internal.h"

#include <string.h>

/* An IEEE-like little-endian float: sign, exponent and mantissa from the top bit down. */
static hid_t small_float(size_t size, size_t exponent_bits, size_t bias)
{
    size_t bits = size * 8, mantissa_bits = bits - 1 - exponent_bits;
    hid_t type = H5Tcopy(H5T_IEEE_F32LE);
    if (type < 0)
        return type;
    if (H5Tset_fields(type, bits - 1, mantissa_bits, exponent_bits, 0, mantissa_bits) >= 0 &&
        H5Tset_size(type, size) >= 0 && H5Tset_ebias(type, bias) >= 0)
        return type;
    H5Tclose(type);
    return H5I_INVALID_HID;
}

/* As h5py writes booleans, so that it reads them as booleans. */
static hid_t boolean(void)
{
    const int8_t no = 0, yes = 1;
    hid_t type = H5Tenum_create(H5T_STD_I8LE);
    if (type < 0)
        return type;
    if (H5Tenum_insert(type, "FALSE", &no) >= 0 && H5Tenum_insert(type, "TRUE", &yes) >= 0)
        return type;
    H5Tclose(type);
    return H5I_INVALID_HID;
}

/* As h5py writes complex numbers. */
static hid_t complex_of(hid_t part)
{
    size_t size = H5Tget_size(part);
    hid_t type = size == 0 ? H5I_INVALID_HID : H5Tcreate(H5T_COMPOUND, 2 * size);
    if (type < 0)
        return type;
    if (H5Tinsert(type, "r", 0, part) >= 0 && H5Tinsert(type, "i", size, part) >= 0)
        return type;
    H5Tclose(type);
    return H5I_INVALID_HID;
}

static hid_t make_type(fsdp_h5_base *base, fsdp_dtype dtype)
{
    switch (dtype) {
    case FSDP_F64: return H5Tcopy(H5T_IEEE_F64LE);
    case FSDP_F32: return H5Tcopy(H5T_IEEE_F32LE);
    case FSDP_F16: return small_float(2, 5, 15);
    case FSDP_BF16: return small_float(2, 8, 127);
    case FSDP_F8_E5M2: return small_float(1, 5, 15);
    case FSDP_I64: return H5Tcopy(H5T_STD_I64LE);
    case FSDP_I32: return H5Tcopy(H5T_STD_I32LE);
    case FSDP_I16: return H5Tcopy(H5T_STD_I16LE);
    case FSDP_I8: return H5Tcopy(H5T_STD_I8LE);
    case FSDP_U64: return H5Tcopy(H5T_STD_U64LE);
    case FSDP_U32: return H5Tcopy(H5T_STD_U32LE);
    case FSDP_U16: return H5Tcopy(H5T_STD_U16LE);
    case FSDP_BOOL: return boolean();
    case FSDP_C64: return complex_of(fsdp_h5_type(base, FSDP_F32));
    case FSDP_C128: return complex_of(fsdp_h5_type(base, FSDP_F64));
    case FSDP_COMPLEX32: return complex_of(fsdp_h5_type(base, FSDP_F16));
    case FSDP_BCOMPLEX32: return complex_of(fsdp_h5_type(base, FSDP_BF16));
    case FSDP_U8:
    case FSDP_F8_E4M3FN:
    case FSDP_F8_E4M3FNUZ:
    case FSDP_F8_E5M2FNUZ:
    case FSDP_F8_E8M0FNU:
    case FSDP_F4_E2M1FN_X2:
    case FSDP_F6_E2M3:
    case FSDP_F6_E3M2: return H5Tcopy(H5T_STD_U8LE);
    case FSDP_DTYPE_NONE:
    case FSDP_DTYPE_COUNT: break;
    }
    return H5I_INVALID_HID;
}

hid_t fsdp_h5_type(fsdp_h5_base *base, fsdp_dtype dtype)
{
    if (dtype <= FSDP_DTYPE_NONE || dtype >= FSDP_DTYPE_COUNT)
        return H5I_INVALID_HID;
    if (base->types[dtype] < 0)
        base->types[dtype] = make_type(base, dtype);
    return base->types[dtype];
}

void fsdp_h5_types_release(fsdp_h5_base *base)
{
    for (int i = 0; i < FSDP_DTYPE_COUNT; i++) {
        if (base->types[i] >= 0)
            H5Tclose(base->types[i]);
        base->types[i] = H5I_INVALID_HID;
    }
}

/* Attributes cost time and space, so only these types have one. */
static bool needs_mark(fsdp_dtype dtype)
{
    switch (dtype) {
    case FSDP_F8_E4M3FN:
    case FSDP_F8_E4M3FNUZ:
    case FSDP_F8_E5M2FNUZ:
    case FSDP_F8_E8M0FNU:
    case FSDP_F4_E2M1FN_X2:
    case FSDP_F6_E2M3:
    case FSDP_F6_E3M2: return true;
    default: return false;
    }
}

static herr_t write_string(hid_t dataset, const char *name, const char *value)
{
    herr_t result = -1;
    hid_t attribute = H5I_INVALID_HID;
    hid_t type = H5Tcopy(H5T_C_S1), space = H5Screate(H5S_SCALAR);
    if (type >= 0 && space >= 0 && H5Tset_size(type, strlen(value)) >= 0 &&
        H5Tset_strpad(type, H5T_STR_NULLPAD) >= 0)
        attribute = H5Acreate2(dataset, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
    if (attribute >= 0)
        result = H5Awrite(attribute, type, value);
    if (attribute >= 0 && H5Aclose(attribute) < 0)
        result = -1;
    H5Sclose(space);
    H5Tclose(type);
    return result;
}

herr_t fsdp_h5_mark_type(hid_t dataset, fsdp_dtype dtype)
{
    return needs_mark(dtype) ? write_string(dataset, "dtype", fsdp_dtype_name(dtype)) : 0;
}
