/*
 * Shard files: libhdf5 creates the datasets and reports their offsets. native_write.c writes the
 * bytes by pwrite after fsdp_h5_close, or passes encoded chunks. From the ground up: HDF5 types of
 * dtypes, the file driver under libhdf5, libhdf5 under its lock, the shard file. See hdf5_file.h.
 */
#include "formats/hdf5/hdf5_internal.h"
#include "base/core/mem.h"
#include "formats/hdf5/hdf5_types.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* === types ==================================================================================== */

/*
 * HDF5 types of dtypes. Other programs see numbers where HDF5 can describe the bits (bf16, f16
 * and e5m2 are IEEE-like); where it cannot, they see bytes and an attribute with the name of the
 * type. Blocks of quantized numbers are opaque types without a tag: libhdf5 converts no tagged
 * type into the one of h5py.
 */

typedef struct fsdp_h5_types {
    hid_t ids[FSDP_DTYPE_COUNT];
} fsdp_h5_types;

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

static hid_t h5_type(fsdp_h5_types *types, fsdp_dtype dtype); /* complex types are made of others */

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
    case FSDP_C64: return complex_of(h5_type(types, FSDP_F32));
    case FSDP_C128: return complex_of(h5_type(types, FSDP_F64));
    case FSDP_COMPLEX32: return complex_of(h5_type(types, FSDP_F16));
    case FSDP_BCOMPLEX32: return complex_of(h5_type(types, FSDP_BF16));
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

/* The HDF5 type of a dtype, made once; negative on failure. */
static hid_t h5_type(fsdp_h5_types *types, fsdp_dtype dtype)
{
    if (dtype <= FSDP_DTYPE_NONE || dtype >= FSDP_DTYPE_COUNT)
        return H5I_INVALID_HID;
    if (types->ids[dtype] < 0)
        types->ids[dtype] = make_type(types, dtype);
    return types->ids[dtype];
}

static void h5_types_init(fsdp_h5_types *types)
{
    for (int i = 0; i < FSDP_DTYPE_COUNT; i++)
        types->ids[i] = H5I_INVALID_HID;
}

static void h5_types_release(fsdp_h5_types *types)
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

/* Adds the attribute that names a type which HDF5 cannot express and which is stored as u8. */
static herr_t h5_mark_type(hid_t dataset, fsdp_dtype dtype)
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
    h5_types_init(&types);
    herr_t result = encode(h5_type(&types, dtype), out);
    h5_types_release(&types);
    fsdp_h5_leave(&call);
    if (result < 0)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "libhdf5 cannot describe the type %s",
                         fsdp_dtype_name(dtype));
    return FSDP_OK;
}

/* === the driver =============================================================================== */

/*
 * The file driver under libhdf5: its reads and writes go through fsdp_io like all others, so
 * that tests can fail, cut or lose them.
 *
 * The driver opens only a file that h5_disk_create has just made. fsdp_h5_disk says why a
 * failed write is success to libhdf5.
 */

/*
 * Once a call to the file has failed, or the file is discarded, the disk is dead: it accepts every write
 * and drops it. libhdf5 1.10 cannot close a file whose writes fail (it leaks the file and tries again at
 * exit), so the driver reports success, and the functions of this room check `failure` after each call.
 */
typedef struct fsdp_h5_disk {
    fsdp_file *file; /* NULL once closed */
    char *path;
    bool dead;
    bool adopted;       /* libhdf5 has a pointer to this struct */
    int64_t size;       /* of the file, as this struct wrote or resized it */
    fsdp_error failure; /* of the first call that failed */
} fsdp_h5_disk;

#if H5_VERSION_GE(1, 14, 0)
#include <H5FDdevelop.h>
#endif

/* The argument of open_disk, carried by the access list. */
typedef struct driver_info {
    fsdp_h5_disk *disk;
} driver_info;

/* The driver's file struct; libhdf5's part comes first. */
typedef struct driver_file {
    H5FD_t base;
    fsdp_h5_disk *disk;
    haddr_t allocated;
} driver_file;

static fsdp_h5_disk *disk_of(H5FD_t *file)
{
    return ((driver_file *)file)->disk;
}

static bool in_range(haddr_t address, size_t size)
{
    return address <= INT64_MAX && size <= INT64_MAX - address;
}

/* libhdf5 first opens without H5F_ACC_CREAT to find out whether it has the file open already. */
static H5FD_t *open_disk(const char *name, unsigned flags, hid_t access, haddr_t max_address)
{
    (void)name;
    (void)max_address;
    const driver_info *info = H5Pget_driver_info(access);
    if (!info || !info->disk || info->disk->adopted || !(flags & H5F_ACC_CREAT))
        return NULL;
    driver_file *file = fsdp_alloc(1, sizeof *file);
    if (!file) {
        fsdp_fail_memory(&info->disk->failure, "an HDF5 file");
        return NULL;
    }
    file->disk = info->disk;
    file->disk->adopted = true;
    return &file->base;
}

static herr_t close_disk(H5FD_t *file)
{
    fsdp_h5_disk *disk = disk_of(file);
    fsdp_error failure = {0};
    if (fsdp_io_close(&disk->file, disk->path, &failure) != FSDP_OK && !disk->dead)
        disk->failure = failure;
    disk->dead = true;
    disk->adopted = false;
    fsdp_free(file);
    return 0;
}

static int compare_disks(const H5FD_t *a, const H5FD_t *b)
{
    uintptr_t first = (uintptr_t)((const driver_file *)a)->disk;
    uintptr_t second = (uintptr_t)((const driver_file *)b)->disk;
    return (first > second) - (first < second);
}

/* Reports the features of libhdf5's POSIX driver. */
static herr_t query_features(const H5FD_t *file, unsigned long *flags)
{
    (void)file;
    *flags = H5FD_FEAT_AGGREGATE_METADATA | H5FD_FEAT_ACCUMULATE_METADATA | H5FD_FEAT_DATA_SIEVE |
             H5FD_FEAT_AGGREGATE_SMALLDATA | H5FD_FEAT_DEFAULT_VFD_COMPATIBLE;
    return 0;
}

static haddr_t get_allocated(const H5FD_t *file, H5FD_mem_t type)
{
    (void)type;
    return ((const driver_file *)file)->allocated;
}

static herr_t set_allocated(H5FD_t *file, H5FD_mem_t type, haddr_t address)
{
    (void)type;
    ((driver_file *)file)->allocated = address;
    return 0;
}

static haddr_t get_end(const H5FD_t *file, H5FD_mem_t type)
{
    (void)type;
    return (haddr_t)((const driver_file *)file)->disk->size;
}

/* libhdf5 may read bytes that it allocated and never wrote: they read as zeros. */
static herr_t read_disk(H5FD_t *file, H5FD_mem_t type, hid_t transfer, haddr_t address, size_t size,
                        void *data)
{
    (void)type;
    (void)transfer;
    fsdp_h5_disk *disk = disk_of(file);
    if (disk->dead || !in_range(address, size))
        return -1;
    int64_t offset = (int64_t)address;
    size_t stored = offset >= disk->size ? 0 : (size_t)(disk->size - offset);
    if (stored > size)
        stored = size;
    memset((char *)data + stored, 0, size - stored);
    if (stored == 0)
        return 0;
    if (fsdp_io_read(disk->file, disk->path, data, stored, offset, &disk->failure) == FSDP_OK)
        return 0;
    disk->dead = true;
    return -1;
}

static herr_t write_disk(H5FD_t *file, H5FD_mem_t type, hid_t transfer, haddr_t address,
                         size_t size, const void *data)
{
    (void)type;
    (void)transfer;
    fsdp_h5_disk *disk = disk_of(file);
    if (disk->dead)
        return 0;
    if (!in_range(address, size))
        return -1;
    int64_t offset = (int64_t)address;
    if (fsdp_io_write(disk->file, disk->path, data, size, offset, &disk->failure) != FSDP_OK)
        disk->dead = true;
    else if (offset + (int64_t)size > disk->size)
        disk->size = offset + (int64_t)size;
    return 0;
}

/* Extends the file to its allocated end; raw data is written later, without libhdf5. */
static herr_t truncate_disk(H5FD_t *file, hid_t transfer, hbool_t closing)
{
    (void)transfer;
    (void)closing;
    fsdp_h5_disk *disk = disk_of(file);
    int64_t size = (int64_t)((driver_file *)file)->allocated;
    if (disk->dead || size == disk->size)
        return 0;
    int result = disk->file->ops->resize(disk->file, size);
    if (result < 0) {
        fsdp_fail_errno(&disk->failure, -result, "cannot set the size of '%s' to %lld", disk->path,
                        (long long)size);
        disk->dead = true;
    } else {
        disk->size = size;
    }
    return 0;
}

static const H5FD_class_t driver_class = {
#if H5_VERSION_GE(1, 14, 0)
    .version = H5FD_CLASS_VERSION,
    .value = (H5FD_class_value_t)600,
#endif
    .name = "fsdp",
    .maxaddr = INT64_MAX,
    .fc_degree = H5F_CLOSE_STRONG,
    .fapl_size = sizeof(driver_info),
    .open = open_disk,
    .close = close_disk,
    .cmp = compare_disks,
    .query = query_features,
    .get_eoa = get_allocated,
    .set_eoa = set_allocated,
    .get_eof = get_end,
    .read = read_disk,
    .write = write_disk,
    .truncate = truncate_disk,
    .fl_map = H5FD_FLMAP_DICHOTOMY,
};

/* The driver's identifier; the driver is registered again if the program has closed libhdf5 meanwhile.
 * Called under the lock of fsdp_h5_enter. */
static hid_t h5_driver(void)
{
    static hid_t driver = H5I_INVALID_HID;
    if (driver < 0 || H5Iget_type(driver) != H5I_VFL)
        driver = H5FDregister(&driver_class);
    return driver;
}

static herr_t h5_disk_use(hid_t access, fsdp_h5_disk *disk)
{
    driver_info info = {.disk = disk};
    return H5Pset_driver(access, h5_driver(), &info);
}

/* Creates a file (exclusive), which the next H5Fcreate with this access list adopts. */
static fsdp_status h5_disk_create(fsdp_io *io, const char *path, fsdp_h5_disk **disk_out,
                                  fsdp_error *err)
{
    *disk_out = NULL;
    fsdp_h5_disk *disk = fsdp_alloc(1, sizeof *disk);
    char *copy = fsdp_strndup(path, strlen(path));
    fsdp_status status = FSDP_OK;
    if (!disk || !copy)
        status = fsdp_fail_memory(err, "an HDF5 file");
    else
        status = fsdp_io_open(io, path, FSDP_IO_CREATE, &disk->file, err);
    if (status != FSDP_OK) {
        fsdp_free(copy);
        fsdp_free(disk);
        return status;
    }
    disk->path = copy;
    *disk_out = disk;
    return FSDP_OK;
}

/* Call after H5Fclose. Returns the first failure of any call to the file. Accepts NULL. */
static fsdp_status h5_disk_free(fsdp_h5_disk *disk, fsdp_error *err)
{
    if (!disk)
        return FSDP_OK;
    fsdp_error failure = {0};
    if (fsdp_io_close(&disk->file, disk->path, &failure) != FSDP_OK && !disk->dead)
        disk->failure = failure;
    disk->dead = true;
    fsdp_status status = disk->failure.status;
    if (status != FSDP_OK && err)
        *err = disk->failure;
    /* libhdf5 could not close the file and will call again at exit: the struct must stay, as a
     * dead disk */
    if (disk->adopted)
        return status;
    fsdp_free(disk->path);
    fsdp_free(disk);
    return status;
}

/* === libhdf5 ================================================================================== */

/*
 * libhdf5 in this process: one lock, silenced errors, the driver and the filter; and the
 * property lists with which native files are created.
 *
 * libhdf5 keeps its exit handler: the program may have HDF5 files, which that handler flushes.
 */

typedef struct fsdp_h5_base {
    fsdp_h5_disk *disk;
    hid_t file;
    hid_t space; /* shared by all datasets: each sets its extent */
    fsdp_h5_types types;
} fsdp_h5_base;

/* Estimates made before the first object, so that the file is laid out without gaps. */
typedef struct fsdp_h5_plan {
    size_t objects;
    size_t link_bytes;     /* all link names together */
    size_t metadata_bytes; /* estimate for all structures of libhdf5 */
} fsdp_h5_plan;

static pthread_mutex_t library_lock = PTHREAD_MUTEX_INITIALIZER;

/* Registering a filter replaces an earlier one, so a program that registers zstd itself does no
 * harm. */
static bool library_ready(void)
{
    static bool registered = false;
    bool was_ready = registered && H5Zfilter_avail(FSDP_H5_ZSTD) > 0;
    if (!was_ready)
        registered = H5Zregister(&fsdp_h5_zstd_filter) >= 0;
    return registered && h5_driver() >= 0;
}

/* libhdf5 1.14 crashes when memory ends while it starts: what it takes then must be there before. */
static fsdp_status check_memory(fsdp_error *err)
{
    enum { START_BYTES = 4 << 20 };
    static bool has_started;
    void *start = has_started ? NULL : fsdp_alloc(START_BYTES, 1);
    if (!has_started && !start)
        return fsdp_fail_memory(err, "the start of libhdf5");
    fsdp_free(start);
    has_started = true;
    return FSDP_OK;
}

fsdp_status fsdp_h5_enter(fsdp_h5_call *call, fsdp_error *err)
{
    pthread_mutex_lock(&library_lock);
    *call = (fsdp_h5_call){0};
    fsdp_status status = check_memory(err);
    if (status != FSDP_OK) {
        pthread_mutex_unlock(&library_lock);
        return status;
    }
    bool ready = H5open() >= 0 && H5Eget_auto2(H5E_DEFAULT, &call->print, &call->print_data) >= 0 &&
                 H5Eset_auto2(H5E_DEFAULT, NULL, NULL) >= 0;
    if (ready && library_ready())
        return FSDP_OK;
    if (ready)
        H5Eset_auto2(H5E_DEFAULT, call->print, call->print_data);
    pthread_mutex_unlock(&library_lock);
    return fsdp_fail(err, FSDP_ERR_INTERNAL, "cannot start libhdf5");
}

void fsdp_h5_leave(const fsdp_h5_call *call)
{
    H5Eclear2(H5E_DEFAULT);
    H5Eset_auto2(H5E_DEFAULT, call->print, call->print_data);
    pthread_mutex_unlock(&library_lock);
}

/* --- errors --- */

typedef struct library_error {
    char text[200];
    bool memory;
} library_error;

/* The innermost entry has the cause; the outer ones only name the callers. */
static herr_t take_error(unsigned depth, const H5E_error2_t *entry, void *context)
{
    library_error *error = context;
    if (depth == 0 && entry->desc)
        snprintf(error->text, sizeof error->text, "%s", entry->desc);
    if (entry->maj_num == H5E_RESOURCE)
        error->memory = true;
    return 0;
}

/* Returns the disk's failure: libhdf5 itself reports success then. */
static fsdp_status h5_check(const fsdp_h5_base *base, fsdp_error *err)
{
    const fsdp_error *failure = &base->disk->failure;
    if (failure->status != FSDP_OK && err)
        *err = *failure;
    return failure->status;
}

/* Reports "cannot WHAT" with the disk's failure, or else with libhdf5's reason. */
static fsdp_status h5_fail(const fsdp_h5_base *base, fsdp_error *err, const char *format, ...)
{
    FSDP_TRY(h5_check(base, err));
    char what[FSDP_ERROR_TEXT / 2];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    library_error error = {.text = "no reason given"};
    H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, take_error, &error);
    fsdp_status status = error.memory ? FSDP_ERR_LIMIT : FSDP_ERR_INTERNAL;
    return fsdp_fail(err, status, "cannot %s in '%s': libhdf5: %s", what, base->disk->path,
                     error.text);
}

/* --- property lists --- */

/* A property list for new datasets: no timestamps. */
static hid_t h5_dataset_list(void)
{
    hid_t list = H5Pcreate(H5P_DATASET_CREATE);
    if (list >= 0 && H5Pset_obj_track_times(list, false) >= 0)
        return list;
    H5Pclose(list);
    return H5I_INVALID_HID;
}

/*
 * Nodes of the root group's index hold 64 links instead of 8: with 40,000 datasets the file
 * becomes smaller and creation faster, and any reader accepts it. The names get one block.
 */
static hid_t creation_list(const fsdp_h5_plan *plan)
{
    enum { LINKS_PER_NODE_HALF = 32, SMALL = 64, TREE_HALF = 16, NAME_OVERHEAD = 16 };
    hid_t list = H5Pcreate(H5P_FILE_CREATE);
    if (list < 0)
        return list;
    bool ok = H5Pset_obj_track_times(list, false) >= 0;
    if (plan->objects > SMALL) {
        size_t names = plan->link_bytes + NAME_OVERHEAD * plan->objects;
        ok = ok && H5Pset_sym_k(list, TREE_HALF, LINKS_PER_NODE_HALF) >= 0 &&
             H5Pset_local_heap_size_hint(list, names) >= 0;
    }
    if (ok)
        return list;
    H5Pclose(list);
    return H5I_INVALID_HID;
}

/* Metadata lies together at the front, in blocks of about its total size. */
static hsize_t metadata_block(const fsdp_h5_plan *plan)
{
    const size_t least = 2048, most = (size_t)4 << 20;
    size_t need = plan->metadata_bytes;
    if (need < least)
        return least;
    return need > most ? most : (need + 511) / 512 * 512;
}

/* Datasets of 64 KiB and more begin on pages, for direct I/O and mappings. */
static hid_t access_list(const fsdp_h5_plan *plan, fsdp_h5_disk *disk)
{
    enum { ALIGN_FROM = 64 << 10, PAGE = 4096 };
    hid_t list = H5Pcreate(H5P_FILE_ACCESS);
    if (list < 0)
        return list;
    bool ok = H5Pset_libver_bounds(list, H5F_LIBVER_EARLIEST, H5F_LIBVER_V18) >= 0 &&
              H5Pset_alignment(list, ALIGN_FROM, PAGE) >= 0 &&
              H5Pset_meta_block_size(list, metadata_block(plan)) >= 0 &&
              H5Pset_fclose_degree(list, H5F_CLOSE_STRONG) >= 0 && h5_disk_use(list, disk) >= 0;
    if (ok)
        return list;
    H5Pclose(list);
    return H5I_INVALID_HID;
}

/* Sets the extent of base->space, with everything selected. ndim 0 is a scalar. */
static herr_t h5_set_extent(fsdp_h5_base *base, int ndim, const int64_t *shape)
{
    hsize_t dims[FSDP_MAX_DIMS];
    for (int d = 0; d < ndim; d++)
        dims[d] = (hsize_t)shape[d];
    return H5Sset_extent_simple(base->space, ndim, dims, NULL);
}

/* --- one file --- */

/* libhdf5 1.10 crashes when an allocation inside it fails (in H5AC_create, for one), so a file
 * is begun only when several times the needed memory is available. */
enum { LAYOUT_BYTES = 8 << 20 };

static void base_reset(fsdp_h5_base *base)
{
    *base = (fsdp_h5_base){.file = H5I_INVALID_HID, .space = H5I_INVALID_HID};
    h5_types_init(&base->types);
}

/* libhdf5 drops the reason of a failure at the next call, so the error is written before the
 * cleanup. */
static fsdp_status create_in_library(fsdp_h5_base *base, const fsdp_h5_plan *plan, fsdp_error *err)
{
    hid_t creation = creation_list(plan), access = access_list(plan, base->disk);
    base->space = H5Screate(H5S_SCALAR);
    if (creation >= 0 && access >= 0 && base->space >= 0)
        base->file = H5Fcreate(base->disk->path, H5F_ACC_EXCL, creation, access);
    fsdp_status status = FSDP_OK;
    if (base->file < 0)
        status = h5_fail(base, err, "create the root group");
    else
        status = h5_check(base, err);
    H5Pclose(creation);
    H5Pclose(access);
    return status;
}

/* Writes the metadata that libhdf5 holds, closes, returns the size. base is empty afterwards, also after a
 * failure. */
static fsdp_status h5_base_close(fsdp_h5_base *base, int64_t *size_out, fsdp_error *err)
{
    h5_types_release(&base->types);
    H5Sclose(base->space);
    fsdp_status status = FSDP_OK;
    if (base->file >= 0 && H5Fclose(base->file) < 0)
        status = h5_fail(base, err, "write the last objects");
    int64_t size = base->disk->size;
    fsdp_status disk_status = h5_disk_free(base->disk, status == FSDP_OK ? err : NULL);
    if (status == FSDP_OK)
        status = disk_status;
    base_reset(base);
    if (size_out)
        *size_out = status == FSDP_OK ? size : 0;
    return status;
}

static void h5_base_discard(fsdp_h5_base *base)
{
    base->disk->dead = true;
    fsdp_error ignored = {0};
    (void)h5_base_close(base, NULL, &ignored);
}

/* Call these three between enter and leave. */
static fsdp_status h5_base_create(fsdp_h5_base *base, fsdp_io *io, const char *path,
                                  const fsdp_h5_plan *plan, fsdp_error *err)
{
    base_reset(base);
    if (!fsdp_mem_available(LAYOUT_BYTES + plan->metadata_bytes))
        return fsdp_fail_memory(err, "the layout of an HDF5 file");
    FSDP_TRY(h5_disk_create(io, path, &base->disk, err));
    fsdp_status status = create_in_library(base, plan, err);
    if (status != FSDP_OK)
        h5_base_discard(base);
    return status;
}

/* === shard files ============================================================================== */

struct fsdp_h5_file {
    fsdp_h5_base base;
    hid_t contiguous; /* property lists for new datasets */
    hid_t chunked;
    hid_t chunk_access;
    size_t count;
    char **links; /* link names of chunked datasets, NULL for the others */
    fsdp_arena names;
    hid_t open; /* the dataset of the last chunk */
    size_t open_number;
    int open_ndim;
};

static const char index_link[] = "%index";

/* --- creation lists --- */

static hid_t contiguous_list(void)
{
    hid_t list = h5_dataset_list();
    if (H5Pset_layout(list, H5D_CONTIGUOUS) >= 0 &&
        H5Pset_alloc_time(list, H5D_ALLOC_TIME_EARLY) >= 0 &&
        H5Pset_fill_time(list, H5D_FILL_TIME_NEVER) >= 0)
        return list;
    H5Pclose(list);
    return H5I_INVALID_HID;
}

/* The filters are mandatory: a reader without zstd must fail rather than return frames as
 * values. The chunk shape is set for each dataset. */
static hid_t chunked_list(int level)
{
    const unsigned values[1] = {(unsigned)level};
    hid_t list = h5_dataset_list();
    if (H5Pset_alloc_time(list, H5D_ALLOC_TIME_INCR) >= 0 &&
        H5Pset_fill_time(list, H5D_FILL_TIME_NEVER) >= 0 && H5Pset_shuffle(list) >= 0 &&
        H5Pset_filter(list, FSDP_H5_ZSTD, H5Z_FLAG_MANDATORY, 1, values) >= 0)
        return list;
    H5Pclose(list);
    return H5I_INVALID_HID;
}

/* Chunks arrive encoded, so libhdf5 needs no cache for them. */
static hid_t chunk_access_list(void)
{
    hid_t list = H5Pcreate(H5P_DATASET_ACCESS);
    if (H5Pset_chunk_cache(list, 1, 0, 1.0) >= 0)
        return list;
    H5Pclose(list);
    return H5I_INVALID_HID;
}

static fsdp_status make_lists(fsdp_h5_file *file, int level, fsdp_error *err)
{
    file->contiguous = contiguous_list();
    file->chunked = chunked_list(level);
    file->chunk_access = chunk_access_list();
    if (file->contiguous < 0 || file->chunked < 0 || file->chunk_access < 0)
        return h5_fail(&file->base, err, "make property lists");
    return FSDP_OK;
}

/* --- creating datasets --- */

static herr_t set_chunk(hid_t list, int ndim, const int64_t *chunk)
{
    hsize_t dims[FSDP_MAX_DIMS];
    for (int d = 0; d < ndim; d++)
        dims[d] = (hsize_t)chunk[d];
    return H5Pset_chunk(list, ndim, dims);
}

static fsdp_status create_dataset(fsdp_h5_file *file, const fsdp_h5_dataset *wanted,
                                  int64_t *offset_out, fsdp_error *err)
{
    fsdp_h5_base *base = &file->base;
    hid_t list = wanted->chunk ? file->chunked : file->contiguous;
    hid_t type = h5_type(&base->types, wanted->dtype);
    bool ready = type >= 0 && h5_set_extent(base, wanted->ndim, wanted->shape) >= 0 &&
                 (!wanted->chunk || set_chunk(list, wanted->ndim, wanted->chunk) >= 0);
    if (!ready)
        return h5_fail(base, err, "describe dataset '%s'", wanted->link);
    hid_t dataset =
        H5Dcreate2(base->file, wanted->link, type, base->space, H5P_DEFAULT, list, H5P_DEFAULT);
    if (dataset < 0)
        return h5_fail(base, err, "create dataset '%s'", wanted->link);
    bool marked = h5_mark_type(dataset, wanted->dtype) >= 0;
    haddr_t offset = wanted->chunk ? HADDR_UNDEF : H5Dget_offset(dataset);
    *offset_out = offset == HADDR_UNDEF ? -1 : (int64_t)offset;
    if (H5Dclose(dataset) < 0 || !marked)
        return h5_fail(base, err, "finish dataset '%s'", wanted->link);
    return h5_check(base, err);
}

static fsdp_status create_index(fsdp_h5_file *file, int64_t size, int64_t *offset_out,
                                fsdp_error *err)
{
    fsdp_h5_dataset index = {.link = index_link, .dtype = FSDP_U8, .ndim = 1, .shape = &size};
    return create_dataset(file, &index, offset_out, err);
}

static fsdp_status create_datasets(fsdp_h5_file *file, fsdp_h5_dataset *datasets,
                                   int64_t index_size, int64_t *index_offset_out, fsdp_error *err)
{
    for (size_t i = 0; i < file->count; i++)
        FSDP_TRY(create_dataset(file, &datasets[i], &datasets[i].offset, err));
    if (index_size == 0)
        return FSDP_OK;
    return create_index(file, index_size, index_offset_out, err);
}

/* --- the file --- */

static fsdp_status keep_links(fsdp_h5_file *file, const fsdp_h5_dataset *datasets, fsdp_error *err)
{
    file->links = fsdp_alloc(file->count, sizeof *file->links);
    if (!file->links)
        return fsdp_fail_memory(err, "the link names of an HDF5 file");
    for (size_t i = 0; i < file->count; i++) {
        if (!datasets[i].chunk)
            continue;
        file->links[i] =
            fsdp_arena_strndup(&file->names, datasets[i].link, strlen(datasets[i].link));
        if (!file->links[i])
            return fsdp_fail_memory(err, "the link names of an HDF5 file");
    }
    return FSDP_OK;
}

/* Measured: an object header with its link takes 420 bytes. A chunked dataset also has a B-tree
 * node with 65 keys (8 bytes and its coordinates, one dim more) and 64 addresses. */
static size_t metadata_bytes(const fsdp_h5_dataset *dataset)
{
    enum { OBJECT = 420, NODE = 24 + 64 * 8, KEYS = 65 };
    size_t bytes = OBJECT + strlen(dataset->link);
    if (dataset->chunk)
        bytes += NODE + KEYS * 8 * ((size_t)dataset->ndim + 2);
    return bytes;
}

static fsdp_h5_plan plan_file(const fsdp_h5_dataset *datasets, size_t count)
{
    const fsdp_h5_dataset index = {.link = index_link};
    fsdp_h5_plan plan = {.objects = count + 1, .metadata_bytes = metadata_bytes(&index)};
    for (size_t i = 0; i < count; i++) {
        plan.link_bytes += strlen(datasets[i].link) + 1;
        plan.metadata_bytes += metadata_bytes(&datasets[i]);
    }
    return plan;
}

static void release_lists(fsdp_h5_file *file)
{
    if (file->open >= 0)
        H5Dclose(file->open);
    H5Pclose(file->contiguous);
    H5Pclose(file->chunked);
    H5Pclose(file->chunk_access);
}

static void release_memory(fsdp_h5_file *file)
{
    fsdp_arena_release(&file->names);
    fsdp_free(file->links);
    fsdp_free(file);
}

static fsdp_status create_file(fsdp_h5_file *file, fsdp_io *io, const char *path,
                               const fsdp_h5_layout *layout, int64_t *index_offset_out,
                               fsdp_error *err)
{
    fsdp_h5_plan plan = plan_file(layout->datasets, file->count);
    FSDP_TRY(h5_base_create(&file->base, io, path, &plan, err));
    fsdp_status status = make_lists(file, layout->level, err);
    if (status == FSDP_OK)
        status = create_datasets(file, layout->datasets, layout->index_size, index_offset_out, err);
    if (status != FSDP_OK) {
        release_lists(file);
        h5_base_discard(&file->base);
    }
    return status;
}

fsdp_status fsdp_h5_create(fsdp_io *io, const char *path, const fsdp_h5_layout *layout,
                           fsdp_h5_file **file_out, int64_t *index_offset_out, fsdp_error *err)
{
    *file_out = NULL;
    *index_offset_out = -1;
    fsdp_h5_file *file = fsdp_alloc(1, sizeof *file);
    if (!file)
        return fsdp_fail_memory(err, "an HDF5 file");
    file->count = layout->count;
    file->open = H5I_INVALID_HID;
    fsdp_h5_call call;
    fsdp_status status = keep_links(file, layout->datasets, err);
    if (status == FSDP_OK)
        status = fsdp_h5_enter(&call, err);
    if (status == FSDP_OK) {
        status = create_file(file, io, path, layout, index_offset_out, err);
        fsdp_h5_leave(&call);
    }
    if (status != FSDP_OK)
        release_memory(file);
    else
        *file_out = file;
    return status;
}

fsdp_status fsdp_h5_add_index(fsdp_h5_file *file, int64_t index_size, int64_t *index_offset_out,
                              fsdp_error *err)
{
    fsdp_h5_call call;
    *index_offset_out = -1;
    FSDP_TRY(fsdp_h5_enter(&call, err));
    fsdp_status status = create_index(file, index_size, index_offset_out, err);
    fsdp_h5_leave(&call);
    return status;
}

/* --- chunks --- */

/* One dataset stays open: workers pass chunks nearly in order, and 40,000 open datasets would
 * take half a gigabyte. */
static fsdp_status open_dataset(fsdp_h5_file *file, size_t number, fsdp_error *err)
{
    if (file->open >= 0 && file->open_number == number)
        return FSDP_OK;
    if (file->open >= 0)
        H5Dclose(file->open);
    file->open = H5Dopen2(file->base.file, file->links[number], file->chunk_access);
    file->open_number = number;
    if (file->open < 0)
        return h5_fail(&file->base, err, "open dataset '%s'", file->links[number]);
    hid_t space = H5Dget_space(file->open);
    file->open_ndim = H5Sget_simple_extent_ndims(space);
    H5Sclose(space);
    return FSDP_OK;
}

static fsdp_status write_chunk(fsdp_h5_file *file, const fsdp_h5_chunk *chunk, int64_t *offset_out,
                               fsdp_error *err)
{
    size_t number = chunk->dataset;
    if (number >= file->count || !file->links[number])
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "dataset %zu of '%s' has no chunks", number,
                         file->base.disk->path);
    FSDP_TRY(open_dataset(file, number, err));
    hsize_t at[FSDP_MAX_DIMS];
    for (int d = 0; d < file->open_ndim; d++)
        at[d] = (hsize_t)chunk->coord[d];
    const char *link = file->links[number];
    if (H5Dwrite_chunk(file->open, H5P_DEFAULT, 0, at, chunk->size, chunk->data) < 0)
        return h5_fail(&file->base, err, "write a chunk of dataset '%s'", link);
    haddr_t offset = HADDR_UNDEF;
    hsize_t stored = 0;
    unsigned skipped_filters = 0;
    if (H5Dget_chunk_info_by_coord(file->open, at, &skipped_filters, &offset, &stored) < 0 ||
        offset == HADDR_UNDEF)
        return h5_fail(&file->base, err, "find a chunk of dataset '%s'", link);
    *offset_out = (int64_t)offset;
    return h5_check(&file->base, err);
}

fsdp_status fsdp_h5_write_chunk(fsdp_h5_file *file, const fsdp_h5_chunk *chunk, int64_t *offset_out,
                                fsdp_error *err)
{
    fsdp_h5_call call;
    *offset_out = -1;
    FSDP_TRY(fsdp_h5_enter(&call, err));
    fsdp_status status = write_chunk(file, chunk, offset_out, err);
    fsdp_h5_leave(&call);
    return status;
}

fsdp_status fsdp_h5_link(fsdp_h5_file *file, const char *link, const char *target, fsdp_error *err)
{
    fsdp_h5_call call;
    FSDP_TRY(fsdp_h5_enter(&call, err));
    fsdp_status status = FSDP_OK;
    if (H5Lcreate_hard(file->base.file, target, H5L_SAME_LOC, link, H5P_DEFAULT, H5P_DEFAULT) < 0)
        status = h5_fail(&file->base, err, "link '%s' to dataset '%s'", link, target);
    fsdp_h5_leave(&call);
    return status;
}

/* --- the end --- */

fsdp_status fsdp_h5_close(fsdp_h5_file *file, int64_t *size_out, fsdp_error *err)
{
    fsdp_h5_call call;
    fsdp_status status = fsdp_h5_enter(&call, err);
    if (status == FSDP_OK) {
        release_lists(file);
        status = h5_base_close(&file->base, size_out, err);
        fsdp_h5_leave(&call);
    }
    release_memory(file);
    return status;
}

void fsdp_h5_discard(fsdp_h5_file *file)
{
    if (!file)
        return;
    file->base.disk->dead = true;
    fsdp_error ignored = {0};
    (void)fsdp_h5_close(file, NULL, &ignored);
}
