/*
 * libhdf5 in this process: one lock, silenced errors, the driver and the filter; and the
 * property lists with which native files are created. hdf5_file.c is the caller.
 *
 * libhdf5 keeps its exit handler: the program may have HDF5 files, which that handler flushes.
 */
#include "formats/hdf5/hdf5_internal.h"

#include "base/core/mem.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static pthread_mutex_t library_lock = PTHREAD_MUTEX_INITIALIZER;

/* Registering a filter replaces an earlier one, so a program that registers zstd itself does no
 * harm. */
static bool library_ready(void)
{
    static bool registered = false;
    bool was_ready = registered && H5Zfilter_avail(FSDP_H5_ZSTD) > 0;
    if (!was_ready)
        registered = H5Zregister(&fsdp_h5_zstd_filter) >= 0;
    return registered && fsdp_h5_driver() >= 0;
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

fsdp_status fsdp_h5_check(const fsdp_h5_base *base, fsdp_error *err)
{
    const fsdp_error *failure = &base->disk->failure;
    if (failure->status != FSDP_OK && err)
        *err = *failure;
    return failure->status;
}

fsdp_status fsdp_h5_fail(const fsdp_h5_base *base, fsdp_error *err, const char *format, ...)
{
    FSDP_TRY(fsdp_h5_check(base, err));
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

hid_t fsdp_h5_dataset_list(void)
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
              H5Pset_fclose_degree(list, H5F_CLOSE_STRONG) >= 0 &&
              fsdp_h5_disk_use(list, disk) >= 0;
    if (ok)
        return list;
    H5Pclose(list);
    return H5I_INVALID_HID;
}

herr_t fsdp_h5_set_extent(fsdp_h5_base *base, int ndim, const int64_t *shape)
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
    fsdp_h5_types_init(&base->types);
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
        status = fsdp_h5_fail(base, err, "create the root group");
    else
        status = fsdp_h5_check(base, err);
    H5Pclose(creation);
    H5Pclose(access);
    return status;
}

fsdp_status fsdp_h5_base_create(fsdp_h5_base *base, fsdp_io *io, const char *path,
                                const fsdp_h5_plan *plan, fsdp_error *err)
{
    base_reset(base);
    if (!fsdp_mem_available(LAYOUT_BYTES + plan->metadata_bytes))
        return fsdp_fail_memory(err, "the layout of an HDF5 file");
    FSDP_TRY(fsdp_h5_disk_create(io, path, &base->disk, err));
    fsdp_status status = create_in_library(base, plan, err);
    if (status != FSDP_OK)
        fsdp_h5_base_discard(base);
    return status;
}

fsdp_status fsdp_h5_base_close(fsdp_h5_base *base, int64_t *size_out, fsdp_error *err)
{
    fsdp_h5_types_release(&base->types);
    H5Sclose(base->space);
    fsdp_status status = FSDP_OK;
    if (base->file >= 0 && H5Fclose(base->file) < 0)
        status = fsdp_h5_fail(base, err, "write the last objects");
    int64_t size = base->disk->size;
    fsdp_status disk_status = fsdp_h5_disk_free(base->disk, status == FSDP_OK ? err : NULL);
    if (status == FSDP_OK)
        status = disk_status;
    base_reset(base);
    if (size_out)
        *size_out = status == FSDP_OK ? size : 0;
    return status;
}

void fsdp_h5_base_discard(fsdp_h5_base *base)
{
    base->disk->dead = true;
    fsdp_error ignored = {0};
    (void)fsdp_h5_base_close(base, NULL, &ignored);
}
