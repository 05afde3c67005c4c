/*
 * The file driver of the child: libhdf5 sees one read-only file, whose bytes the parent sends.
 * The child has no file descriptor of it. A small page cache serves small reads, because libhdf5
 * reads its structures piece by piece and every fetch is a message and its answer.
 */
#include "formats/hdf5_child/hdf5_child.h"

#include "base/core/mem.h"

#include <string.h>
#if H5_VERSION_GE(1, 14, 0)
#include <H5FDdevelop.h>
#endif

typedef struct child_info {
    fsdp_h5_child *child;
} child_info;

typedef struct child_file {
    H5FD_t base; /* libhdf5's part comes first */
    fsdp_h5_child *child;
    haddr_t allocated;
} child_file;

/* An external link or a virtual dataset may open more files; only one file exists, and it is
 * open. */
static bool is_taken;

static H5FD_t *open_child(const char *name, unsigned flags, hid_t access, haddr_t max_address)
{
    (void)name;
    (void)max_address;
    const child_info *info = H5Pget_driver_info(access);
    if (!info || !info->child || is_taken || (flags & (H5F_ACC_RDWR | H5F_ACC_CREAT)))
        return NULL;
    child_file *file = fsdp_alloc(1, sizeof *file);
    if (!file)
        return NULL;
    file->child = info->child;
    is_taken = true;
    return &file->base;
}

static herr_t close_child(H5FD_t *file)
{
    fsdp_free(file);
    is_taken = false;
    return 0;
}

static int compare_children(const H5FD_t *a, const H5FD_t *b)
{
    return (a > b) - (a < b);
}

static herr_t query_features(const H5FD_t *file, unsigned long *flags)
{
    (void)file;
    *flags = H5FD_FEAT_DATA_SIEVE | H5FD_FEAT_DEFAULT_VFD_COMPATIBLE;
    return 0;
}

static haddr_t get_allocated(const H5FD_t *file, H5FD_mem_t type)
{
    (void)type;
    return ((const child_file *)file)->allocated;
}

static herr_t set_allocated(H5FD_t *file, H5FD_mem_t type, haddr_t address)
{
    (void)type;
    ((child_file *)file)->allocated = address;
    return 0;
}

static haddr_t get_end(const H5FD_t *file, H5FD_mem_t type)
{
    (void)type;
    return (haddr_t)((const child_file *)file)->child->file_size;
}

/* --- reading ---------------------------------------------------------------------------------- */

/* Requests a range of the file from the parent, which puts it into shared memory. */
static bool fetch(const fsdp_h5_child *child, int64_t offset, size_t size)
{
    fsdp_h5_send(child, FSDP_H5_NEED, offset, (int64_t)size);
    fsdp_h5_message answer;
    fsdp_h5_receive(child, &answer);
    return answer.kind == FSDP_H5_BYTES && answer.size == (int64_t)size;
}

static fsdp_h5_page *find_page(fsdp_h5_child *child, int64_t offset)
{
    fsdp_h5_page *page = &child->pages[offset / FSDP_H5_PAGE % FSDP_H5_PAGES];
    if (page->data && page->offset == offset)
        return page;
    if (!page->data)
        page->data = fsdp_alloc(1, FSDP_H5_PAGE);
    int64_t left = child->file_size - offset;
    size_t size = left < FSDP_H5_PAGE ? (size_t)left : FSDP_H5_PAGE;
    if (!page->data)
        return NULL;
    page->offset = -1;
    if (!fetch(child, offset, size))
        return NULL;
    memcpy(page->data, child->file_room, size);
    page->offset = offset;
    return page;
}

/* The range lies within the file. */
static bool read_small(fsdp_h5_child *child, unsigned char *data, size_t size, int64_t offset)
{
    while (size > 0) {
        int64_t within = offset % FSDP_H5_PAGE;
        const fsdp_h5_page *page = find_page(child, offset - within);
        if (!page)
            return false;
        size_t n = (size_t)(FSDP_H5_PAGE - within);
        if (n > size)
            n = size;
        memcpy(data, page->data + within, n);
        data += n;
        size -= n;
        offset += (int64_t)n;
    }
    return true;
}

static bool read_large(const fsdp_h5_child *child, unsigned char *data, size_t size, int64_t offset)
{
    while (size > 0) {
        size_t n = size < FSDP_H5_FILE_ROOM ? size : FSDP_H5_FILE_ROOM;
        if (!fetch(child, offset, n))
            return false;
        memcpy(data, child->file_room, n);
        data += n;
        size -= n;
        offset += (int64_t)n;
    }
    return true;
}

/* Bytes after the end of the file read as zeros, as in libhdf5's POSIX driver. */
static herr_t read_child(H5FD_t *file, H5FD_mem_t type, hid_t transfer, haddr_t address,
                         size_t size, void *data)
{
    (void)type;
    (void)transfer;
    fsdp_h5_child *child = ((child_file *)file)->child;
    if (address > INT64_MAX || size > INT64_MAX - address)
        return -1;
    int64_t offset = (int64_t)address;
    size_t stored = offset >= child->file_size ? 0 : (size_t)(child->file_size - offset);
    if (stored > size)
        stored = size;
    memset((char *)data + stored, 0, size - stored);
    bool ok = stored < FSDP_H5_PAGE ? read_small(child, data, stored, offset)
                                    : read_large(child, data, stored, offset);
    return ok ? 0 : -1;
}

static herr_t write_child(H5FD_t *file, H5FD_mem_t type, hid_t transfer, haddr_t address,
                          size_t size, const void *data)
{
    (void)file;
    (void)type;
    (void)transfer;
    (void)address;
    (void)size;
    (void)data;
    return -1;
}

static const H5FD_class_t child_driver = {
#if H5_VERSION_GE(1, 14, 0)
    .version = H5FD_CLASS_VERSION,
    .value = (H5FD_class_value_t)601,
#endif
    .name = "fsdp_child",
    .maxaddr = INT64_MAX,
    .fc_degree = H5F_CLOSE_STRONG,
    .fapl_size = sizeof(child_info),
    .open = open_child,
    .close = close_child,
    .cmp = compare_children,
    .query = query_features,
    .get_eoa = get_allocated,
    .set_eoa = set_allocated,
    .get_eof = get_end,
    .read = read_child,
    .write = write_child,
    .fl_map = H5FD_FLMAP_DICHOTOMY,
};

herr_t fsdp_h5_child_use(hid_t access, fsdp_h5_child *child)
{
    hid_t driver = H5FDregister(&child_driver);
    child_info info = {.child = child};
    return driver < 0 ? -1 : H5Pset_driver(access, driver, &info);
}
