/*
 * The child process that runs libhdf5, inside a sandbox. It is forked with libhdf5 initialised
 * and its lock held by the forking thread, which is its only thread. It serves one request at a
 * time until the parent closes the channel, and gets the bytes of the file from the parent.
 */
#include "formats/hdf5_child/hdf5_child.h"

#include "base/core/mem.h"
#include "formats/hdf5_child/hdf5_sandbox.h"

#include <stdio.h>
#include <string.h>
#if H5_VERSION_GE(1, 14, 0)
#include <H5FDdevelop.h>
#endif

/* === the file as libhdf5 sees it ============================================================== */

/*
 * The file driver: libhdf5 sees one read-only file, whose bytes the parent sends. The child has no file
 * descriptor of it. A small page cache serves small reads, because libhdf5 reads its structures piece by
 * piece and every fetch is a message and its answer.
 */

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
    fsdp_h5_send(child,
                 &(fsdp_h5_message){.kind = FSDP_H5_NEED, .number = offset, .size = (int64_t)size});
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

/* Makes `access` open the file of the parent, under any name; no other file can be opened. */
static herr_t use_driver(hid_t access, fsdp_h5_child *child)
{
    hid_t driver = H5FDregister(&child_driver);
    child_info info = {.child = child};
    return driver < 0 ? -1 : H5Pset_driver(access, driver, &info);
}

/* === the file and its boxes =================================================================== */

/* A dataset that is opened by its address gets the chunk cache with which the file was opened. cache 0 is for
 * chunks without filters, whose lengths in the file libhdf5 then leaves alone (hdf5_child_chunk.c). */
static fsdp_status open_file(fsdp_h5_child *child, size_t cache, fsdp_error *err)
{
    enum { SLOTS = 4093, UNUSED = 0 };
    hid_t access = H5Pcreate(H5P_FILE_ACCESS);
    bool ok = access >= 0 && H5Pset_fclose_degree(access, H5F_CLOSE_STRONG) >= 0 &&
              H5Pset_cache(access, UNUSED, SLOTS, cache, 1.0) >= 0 &&
              use_driver(access, child) >= 0;
    child->file = ok ? H5Fopen("the file", H5F_ACC_RDONLY, access) : H5I_INVALID_HID;
    child->cache = cache;
    fsdp_status status = FSDP_OK;
    if (child->file < 0)
        status = fsdp_h5_child_fail(err, "cannot open it as HDF5");
    H5Pclose(access);
    return status;
}

static void close_dataset(fsdp_h5_child *child)
{
    if (child->open >= 0)
        H5Dclose(child->open);
    child->open = H5I_INVALID_HID;
    fsdp_free(child->checked);
    child->checked = NULL;
}

static void close_file(fsdp_h5_child *child)
{
    close_dataset(child);
    H5Fclose(child->file);
}

/* --- reading a box ---------------------------------------------------------------------------- */

/* The cache for a dataset: a row of chunks, so that boxes that cut through chunks do not decode
 * them again and again; at least one chunk, at most `most` bytes. 0 for chunks without filters. */
static size_t wanted_cache(hid_t dataset, int64_t most)
{
    hsize_t chunk[H5S_MAX_RANK], dims[H5S_MAX_RANK];
    hid_t creation = H5Dget_create_plist(dataset), type = H5Dget_type(dataset);
    hid_t space = H5Dget_space(dataset);
    size_t one = H5Tget_size(type);
    int ndim = 0;
    bool is_decoded = H5Pget_layout(creation) == H5D_CHUNKED && H5Pget_nfilters(creation) > 0;
    if (is_decoded &&
        H5Sget_simple_extent_dims(space, dims, NULL) == H5Pget_chunk(creation, H5S_MAX_RANK, chunk))
        ndim = H5Pget_chunk(creation, H5S_MAX_RANK, chunk);
    for (int d = 0; d < ndim; d++)
        if (chunk[d] == 0 || __builtin_mul_overflow(one, chunk[d], &one))
            one = SIZE_MAX / 2;
    size_t row = one;
    for (int d = 1; d < ndim; d++)
        if (__builtin_mul_overflow(row, (dims[d] + chunk[d] - 1) / chunk[d], &row))
            row = SIZE_MAX / 2;
    H5Sclose(space);
    H5Tclose(type);
    H5Pclose(creation);
    if (!is_decoded)
        return 0;
    if (most >= 0 && row > (size_t)most)
        row = (size_t)most;
    return row > one ? row : one;
}

static fsdp_status open_dataset(fsdp_h5_child *child, size_t number, int64_t most_kept,
                                fsdp_error *err)
{
    for (int round = 0; round < 2; round++) {
        if (child->open >= 0 && child->open_number == number)
            return FSDP_OK;
        close_dataset(child);
        child->open = H5Oopen_by_addr(child->file, child->datasets[number]);
        child->open_number = number;
        if (child->open < 0)
            return fsdp_h5_child_fail(err, "cannot open the dataset");
        size_t cache = wanted_cache(child->open, most_kept);
        if (cache == child->cache || (cache > 0 && cache < child->cache))
            return FSDP_OK;
        close_file(child);
        FSDP_TRY(open_file(child, cache, err));
    }
    return FSDP_OK;
}

static void swap_elements(unsigned char *data, size_t size, size_t element_size)
{
    for (size_t at = 0; at + element_size <= size; at += element_size) {
        for (size_t i = 0; i < element_size / 2; i++) {
            unsigned char byte = data[at + i];
            data[at + i] = data[at + element_size - 1 - i];
            data[at + element_size - 1 - i] = byte;
        }
    }
}

/* Names an unknown filter by its number; libhdf5 reports only that one is missing. */
static fsdp_status fail_read(hid_t dataset, fsdp_error *err)
{
    hid_t creation = H5Dget_create_plist(dataset);
    int count = H5Pget_nfilters(creation);
    H5Z_filter_t missing = 0;
    for (int i = 0; i < count && missing == 0; i++) {
        unsigned flags;
        size_t values = 0;
        H5Z_filter_t filter =
            H5Pget_filter2(creation, (unsigned)i, &flags, &values, NULL, 0, NULL, NULL);
        if (filter > 0 && H5Zfilter_avail(filter) <= 0)
            missing = filter;
    }
    H5Pclose(creation);
    if (missing > 0)
        return fsdp_fail(
            err, FSDP_ERR_REFUSED,
            "filter %d is unknown, and plugins are not loaded for files of other programs",
            (int)missing);
    return fsdp_h5_child_fail(err, "cannot read it");
}

/* Reads the bits without conversion: the memory type is the file type. */
static fsdp_status read_selected(fsdp_h5_child *child, const fsdp_box *box, size_t bytes,
                                 hid_t type, hid_t space, fsdp_error *err)
{
    hsize_t lo[FSDP_MAX_DIMS], len[FSDP_MAX_DIMS];
    for (int d = 0; d < box->ndim; d++) {
        lo[d] = (hsize_t)box->lo[d];
        len[d] = (hsize_t)box->len[d];
    }
    hid_t memory = H5Screate_simple(box->ndim, len, NULL);
    /* libhdf5 leaves elements without fill value untouched */
    memset(child->reply, 0, bytes);
    bool ok =
        memory >= 0 &&
        (box->ndim == 0 || H5Sselect_hyperslab(space, H5S_SELECT_SET, lo, NULL, len, NULL) >= 0) &&
        H5Dread(child->open, type, memory, space, H5P_DEFAULT, child->reply) >= 0;
    fsdp_status status = ok ? FSDP_OK : fail_read(child->open, err);
    H5Sclose(memory);
    return status;
}

static fsdp_status read_box(fsdp_h5_child *child, const fsdp_h5_message *request, size_t *size_out,
                            fsdp_error *err)
{
    if (request->number < 0 || (size_t)request->number >= child->count)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "there is no such dataset");
    FSDP_TRY(open_dataset(child, (size_t)request->number, request->size, err));
    hid_t type = H5Dget_type(child->open), space = H5Dget_space(child->open);
    fsdp_h5_type_info info;
    fsdp_h5_classify(type, &info);
    size_t element = H5Tget_size(type);
    int64_t count = fsdp_box_count(&request->box);
    fsdp_status status = FSDP_OK;
    if (space < 0 || element == 0 || count < 0 || (size_t)count > FSDP_H5_REPLY_ROOM / element ||
        H5Sget_simple_extent_ndims(space) != request->box.ndim)
        status = fsdp_fail(err, FSDP_ERR_INTERNAL, "the request does not fit the dataset");
    *size_out = (size_t)count * element;
    if (status == FSDP_OK)
        status = fsdp_h5_child_check(child, child->open, &request->box, err);
    if (status == FSDP_OK)
        status = read_selected(child, &request->box, *size_out, type, space, err);
    if (status == FSDP_OK && info.is_swapped)
        swap_elements(child->reply, *size_out,
                      info.kind == FSDP_H5_COMPLEX ? element / 2 : element);
    H5Sclose(space);
    H5Tclose(type);
    return status;
}

/* === requests ================================================================================= */

static void send_failure(const fsdp_h5_child *child, fsdp_status status, const fsdp_error *err)
{
    size_t size = strnlen(err->text, sizeof err->text);
    memcpy(child->reply, err->text, size);
    fsdp_h5_message message = {
        .kind = FSDP_H5_FAILED, .status = (uint32_t)status, .size = (int64_t)size};
    fsdp_h5_send(child, &message);
}

static void serve(fsdp_h5_child *child, const fsdp_h5_message *request)
{
    fsdp_error err = {0};
    fsdp_status status = FSDP_ERR_INTERNAL;
    H5Eclear2(H5E_DEFAULT);
    child->reply_size = 0;
    if (request->kind == FSDP_H5_LIST)
        status = fsdp_h5_child_list(child, &err);
    else if (request->kind == FSDP_H5_READ)
        status = read_box(child, request, &child->reply_size, &err);
    if (status == FSDP_OK)
        fsdp_h5_send(child,
                     &(fsdp_h5_message){.kind = FSDP_H5_DONE, .size = (int64_t)child->reply_size});
    else
        send_failure(child, status, &err);
}

/* Disables plugins: a file could choose their code. */
static fsdp_status prepare(fsdp_h5_child *child, bool limits_only, fsdp_error *err)
{
    FSDP_TRY(fsdp_hdf5_sandbox_enter(&child->channel, limits_only, err));
    if (H5PLset_loading_state(0) < 0 || H5Zregister(&fsdp_h5_lzf_filter) < 0)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "cannot prepare libhdf5");
    return FSDP_OK;
}

void fsdp_h5_child_run(int channel, unsigned char *shared, int64_t file_size, bool limits_only)
{
    fsdp_h5_child child = {.channel = channel,
                           .file_room = shared,
                           .reply = shared + FSDP_H5_FILE_ROOM,
                           .file_size = file_size,
                           .file = H5I_INVALID_HID,
                           .open = H5I_INVALID_HID};
    fsdp_error err = {0};
    fsdp_status status = prepare(&child, limits_only, &err);
    if (status == FSDP_OK)
        status = open_file(&child, 0, &err);
    if (status == FSDP_OK)
        fsdp_h5_send(&child, &(fsdp_h5_message){.kind = FSDP_H5_READY});
    else
        send_failure(&child, status, &err);
    for (;;) {
        fsdp_h5_message request;
        fsdp_h5_receive(&child, &request);
        serve(&child, &request);
    }
}
