/*
 * The file driver under libhdf5: its reads and writes go through fsdp_io like all others, so
 * that tests can fail, cut or lose them.
 *
 * The driver opens only a file that fsdp_h5_disk_create has just made. fsdp_h5_disk says why a
 * failed write is success to libhdf5.
 */
#include "formats/hdf5/hdf5_internal.h"

#include "base/core/mem.h"

#include <string.h>
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

/* Called under the lock of fsdp_h5_enter. */
hid_t fsdp_h5_driver(void)
{
    static hid_t driver = H5I_INVALID_HID;
    if (driver < 0 || H5Iget_type(driver) != H5I_VFL)
        driver = H5FDregister(&driver_class);
    return driver;
}

herr_t fsdp_h5_disk_use(hid_t access, fsdp_h5_disk *disk)
{
    driver_info info = {.disk = disk};
    return H5Pset_driver(access, fsdp_h5_driver(), &info);
}

fsdp_status fsdp_h5_disk_create(fsdp_io *io, const char *path, fsdp_h5_disk **disk_out,
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

fsdp_status fsdp_h5_disk_free(fsdp_h5_disk *disk, fsdp_error *err)
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
