/*
 * HDF5 types of dtypes. Other programs see numbers where HDF5 can describe the bits (bf16, f16
 * and e5m2 are IEEE-like); where it cannot, they see bytes and an attribute with the name of the
 * type. Blocks of quantized numbers are opaque types without a tag: libhdf5
 * converts no tagged type into the one of h5py.
 */
#include "formats/hdf5/hdf5_types.h"

#include "formats/hdf5/hdf5_internal.h"

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

/* The type that h5py uses for booleans. */
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

/* The type that h5py uses for complex numbers. */
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

static hid_t make_type(fsdp_h5_types *types, fsdp_dtype dtype)
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
    case FSDP_C64: return complex_of(fsdp_h5_type(types, FSDP_F32));
    case FSDP_C128: return complex_of(fsdp_h5_type(types, FSDP_F64));
    case FSDP_COMPLEX32: return complex_of(fsdp_h5_type(types, FSDP_F16));
    case FSDP_BCOMPLEX32: return complex_of(fsdp_h5_type(types, FSDP_BF16));
    case FSDP_U8:
    case FSDP_F8_E4M3FN:
    case FSDP_F8_E4M3FNUZ:
    case FSDP_F8_E5M2FNUZ:
    case FSDP_F8_E8M0FNU:
    case FSDP_F4_E2M1FN_X2:
    case FSDP_F6_E2M3:
    case FSDP_F6_E3M2: return H5Tcopy(H5T_STD_U8LE);
    case FSDP_Q4_0:
    case FSDP_Q4_1:
    case FSDP_Q5_0:
    case FSDP_Q5_1:
    case FSDP_Q8_0:
    case FSDP_Q2_K:
    case FSDP_Q3_K:
    case FSDP_Q4_K:
    case FSDP_Q5_K:
    case FSDP_Q6_K: return H5Tcreate(H5T_OPAQUE, fsdp_dtype_size(dtype));
    case FSDP_DTYPE_NONE:
    case FSDP_DTYPE_COUNT: break;
    }
    return H5I_INVALID_HID;
}

hid_t fsdp_h5_type(fsdp_h5_types *types, fsdp_dtype dtype)
{
    if (dtype <= FSDP_DTYPE_NONE || dtype >= FSDP_DTYPE_COUNT)
        return H5I_INVALID_HID;
    if (types->ids[dtype] < 0)
        types->ids[dtype] = make_type(types, dtype);
    return types->ids[dtype];
}

void fsdp_h5_types_init(fsdp_h5_types *types)
{
    for (int i = 0; i < FSDP_DTYPE_COUNT; i++)
        types->ids[i] = H5I_INVALID_HID;
}

void fsdp_h5_types_release(fsdp_h5_types *types)
{
    for (int i = 0; i < FSDP_DTYPE_COUNT; i++) {
        if (types->ids[i] >= 0)
            H5Tclose(types->ids[i]);
        types->ids[i] = H5I_INVALID_HID;
    }
}

/* Only these types get an attribute, because attributes cost time and space. */
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
    default: return fsdp_dtype_describe(dtype) && fsdp_dtype_describe(dtype)->values > 1;
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
    return needs_mark(dtype) ? write_string(dataset, FSDP_H5_MARK, fsdp_dtype_name(dtype)) : 0;
}

/* --- as bytes --- */

/* libhdf5 puts a prefix of two bytes before the message. */
static herr_t encode(hid_t type, fsdp_h5_type_bytes *out)
{
    enum { PREFIX = 2 };
    unsigned char buf[PREFIX + sizeof out->bytes];
    size_t size = 0;
    if (type < 0 || H5Tencode(type, NULL, &size) < 0 || size <= PREFIX || size > sizeof buf ||
        H5Tencode(type, buf, &size) < 0)
        return -1;
    out->size = size - PREFIX;
    memcpy(out->bytes, buf + PREFIX, out->size);
    return 0;
}

fsdp_status fsdp_h5_type_encode(fsdp_dtype dtype, fsdp_h5_type_bytes *out, fsdp_error *err)
{
    *out = (fsdp_h5_type_bytes){.marked = needs_mark(dtype)};
    fsdp_h5_call call;
    FSDP_TRY(fsdp_h5_enter(&call, err));
    fsdp_h5_types types;
    fsdp_h5_types_init(&types);
    herr_t result = encode(fsdp_h5_type(&types, dtype), out);
    fsdp_h5_types_release(&types);
    fsdp_h5_leave(&call);
    if (result < 0)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "libhdf5 cannot describe the type %s",
                         fsdp_dtype_name(dtype));
    return FSDP_OK;
}
