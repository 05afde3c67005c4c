/*
 * The child process that runs libhdf5, inside a sandbox. It is forked with libhdf5 initialised
 * and its lock held by the forking thread, which is its only thread. It serves one request at a
 * time until the parent closes the channel.
 */
#include "formats/hdf5_child/hdf5_child.h"

#include "base/core/mem.h"
#include "formats/hdf5_child/hdf5_lzf.h"
#include "formats/hdf5_child/hdf5_sandbox.h"

#include <stdio.h>
#include <string.h>

/* --- the file --------------------------------------------------------------------------------- */

/* A dataset that is opened by its address gets the chunk cache with which the file was opened. cache 0 is for
 * chunks without filters, whose lengths in the file libhdf5 then leaves alone (hdf5_child_chunk.c). */
static fsdp_status open_file(fsdp_h5_child *child, size_t cache, fsdp_error *err)
{
    enum { SLOTS = 4093, UNUSED = 0 };
    hid_t access = H5Pcreate(H5P_FILE_ACCESS);
    bool ok = access >= 0 && H5Pset_fclose_degree(access, H5F_CLOSE_STRONG) >= 0 &&
              H5Pset_cache(access, UNUSED, SLOTS, cache, 1.0) >= 0 &&
              fsdp_h5_child_use(access, child) >= 0;
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

/* --- requests --------------------------------------------------------------------------------- */

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
        fsdp_h5_send(child, FSDP_H5_DONE, 0, (int64_t)child->reply_size);
    else
        fsdp_h5_send_failure(child, status, &err);
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
        fsdp_h5_send(&child, FSDP_H5_READY, 0, 0);
    else
        fsdp_h5_send_failure(&child, status, &err);
    for (;;) {
        fsdp_h5_message request;
        fsdp_h5_receive(&child, &request);
        serve(&child, &request);
    }
}
