/*
 * The view: an HDF5 file in which every tensor is one virtual dataset over the shard files, for
 * h5py, h5ls and the like. Nothing of ours reads it. See hdf5_file.h.
 */
#include "formats/hdf5_internal.h"

#include "base/mem.h"

#include <string.h>

struct fsdp_h5_view {
    fsdp_h5_base base;
    hid_t source_space;
    hid_t lists[FSDP_DTYPE_COUNT]; /* creation lists with the fill value of a type */
};

enum { MAX_ELEMENT = 16 };

/* All bytes 0xFF: NaN for the floating types, which is how a missing source file shows. */
static hid_t filled_list(hid_t type)
{
    unsigned char fill[MAX_ELEMENT];
    memset(fill, 0xFF, sizeof fill);
    hid_t list = fsdp_h5_dataset_list();
    if (H5Pset_fill_value(list, type, fill) >= 0)
        return list;
    H5Pclose(list);
    return H5I_INVALID_HID;
}

static hid_t list_of(fsdp_h5_view *view, fsdp_dtype dtype)
{
    hid_t type = fsdp_h5_type(&view->base, dtype);
    if (type >= 0 && view->lists[dtype] < 0)
        view->lists[dtype] = filled_list(type);
    return type < 0 ? type : view->lists[dtype];
}

/* --- mappings --- */

/* A box as a hyperslab; the whole extent stays "all", which is stored in fewer bytes. */
static herr_t select_box(hid_t space, int ndim, const int64_t *shape, const int64_t *lo,
                         const int64_t *len)
{
    hsize_t start[FSDP_MAX_DIMS], count[FSDP_MAX_DIMS];
    bool whole = true;
    for (int d = 0; d < ndim; d++) {
        start[d] = (hsize_t)lo[d];
        count[d] = (hsize_t)len[d];
        whole = whole && lo[d] == 0 && len[d] == shape[d];
    }
    if (whole)
        return H5Sselect_all(space);
    hsize_t once[FSDP_MAX_DIMS];
    for (int d = 0; d < ndim; d++)
        once[d] = 1;
    return H5Sselect_hyperslab(space, H5S_SELECT_SET, start, NULL, once, count);
}

static herr_t set_source_extent(fsdp_h5_view *view, const fsdp_h5_source *source)
{
    hsize_t dims[FSDP_MAX_DIMS];
    for (int d = 0; d < source->source_ndim; d++)
        dims[d] = (hsize_t)source->source_shape[d];
    return H5Sset_extent_simple(view->source_space, source->source_ndim, dims, NULL);
}

static herr_t map_source(fsdp_h5_view *view, hid_t list, int ndim, const int64_t *shape,
                         const fsdp_h5_source *source)
{
    hid_t space = view->base.space;
    if (set_source_extent(view, source) < 0 ||
        select_box(view->source_space, source->source_ndim, source->source_shape, source->source_lo,
                   source->source_len) < 0 ||
        select_box(space, ndim, shape, source->lo, source->len) < 0)
        return -1;
    return H5Pset_virtual(list, space, source->file, source->link, view->source_space);
}

/* --- datasets --- */

static fsdp_status create_dataset(fsdp_h5_view *view, const char *link, fsdp_dtype dtype,
                                  hid_t list, fsdp_error *err)
{
    fsdp_h5_base *base = &view->base;
    hid_t dataset = H5Dcreate2(base->file, link, fsdp_h5_type(base, dtype), base->space,
                               H5P_DEFAULT, list, H5P_DEFAULT);
    if (dataset < 0)
        return fsdp_h5_fail(base, err, "create dataset '%s'", link);
    bool marked = fsdp_h5_mark_type(dataset, dtype) >= 0;
    if (H5Dclose(dataset) < 0 || !marked)
        return fsdp_h5_fail(base, err, "finish dataset '%s'", link);
    return fsdp_h5_check(base, err);
}

static fsdp_status add_virtual(fsdp_h5_view *view, const char *link, fsdp_dtype dtype, int ndim,
                               const int64_t *shape, const fsdp_h5_source *sources, size_t count,
                               fsdp_error *err)
{
    hid_t list = H5Pcopy(list_of(view, dtype));
    if (list < 0)
        return fsdp_h5_fail(&view->base, err, "describe dataset '%s'", link);
    fsdp_status status = FSDP_OK;
    for (size_t i = 0; i < count && status == FSDP_OK; i++)
        if (map_source(view, list, ndim, shape, &sources[i]) < 0)
            status = fsdp_h5_fail(&view->base, err, "map '%s' of '%s' into dataset '%s'",
                                  sources[i].link, sources[i].file, link);
    if (status == FSDP_OK)
        status = create_dataset(view, link, dtype, list, err);
    H5Pclose(list);
    return status;
}

static fsdp_status add(fsdp_h5_view *view, const char *link, fsdp_dtype dtype, int ndim,
                       const int64_t *shape, const fsdp_h5_source *sources, size_t count,
                       fsdp_error *err)
{
    if (fsdp_h5_set_extent(&view->base, ndim, shape) < 0 || list_of(view, dtype) < 0)
        return fsdp_h5_fail(&view->base, err, "describe dataset '%s'", link);
    if (count == 0)
        return create_dataset(view, link, dtype, list_of(view, dtype), err);
    return add_virtual(view, link, dtype, ndim, shape, sources, count, err);
}

fsdp_status fsdp_h5_view_add(fsdp_h5_view *view, const char *link, fsdp_dtype dtype, int ndim,
                             const int64_t *shape, const fsdp_h5_source *sources, size_t count,
                             fsdp_error *err)
{
    fsdp_h5_call call;
    FSDP_TRY(fsdp_h5_enter(&call, err));
    fsdp_status status = add(view, link, dtype, ndim, shape, sources, count, err);
    fsdp_h5_leave(&call);
    return status;
}

fsdp_status fsdp_h5_view_link(fsdp_h5_view *view, const char *link, const char *target,
                              fsdp_error *err)
{
    fsdp_h5_call call;
    FSDP_TRY(fsdp_h5_enter(&call, err));
    hid_t file = view->base.file;
    fsdp_status status = FSDP_OK;
    if (H5Lcreate_hard(file, target, file, link, H5P_DEFAULT, H5P_DEFAULT) < 0)
        status = fsdp_h5_fail(&view->base, err, "link '%s' to dataset '%s'", link, target);
    else
        status = fsdp_h5_check(&view->base, err);
    fsdp_h5_leave(&call);
    return status;
}

/* --- the file --- */

static void view_reset(fsdp_h5_view *view)
{
    view->source_space = H5I_INVALID_HID;
    for (int i = 0; i < FSDP_DTYPE_COUNT; i++)
        view->lists[i] = H5I_INVALID_HID;
}

/* Virtual datasets need the format of 1.10; everything else stays as old as it can be. */
static fsdp_status create_view(fsdp_h5_view *view, fsdp_io *io, const char *path, fsdp_error *err)
{
    const fsdp_h5_plan plan = {.newest = H5F_LIBVER_V110};
    view_reset(view);
    FSDP_TRY(fsdp_h5_base_create(&view->base, io, path, &plan, err));
    view->source_space = H5Screate(H5S_SIMPLE);
    if (view->source_space >= 0)
        return FSDP_OK;
    fsdp_status status = fsdp_h5_fail(&view->base, err, "describe sources");
    fsdp_h5_base_discard(&view->base);
    return status;
}

fsdp_status fsdp_h5_view_create(fsdp_io *io, const char *path, fsdp_h5_view **view_out,
                                fsdp_error *err)
{
    *view_out = NULL;
    fsdp_h5_view *view = fsdp_alloc(1, sizeof *view);
    if (!view)
        return fsdp_fail_memory(err, "a view");
    fsdp_h5_call call;
    fsdp_status status = fsdp_h5_enter(&call, err);
    if (status == FSDP_OK) {
        status = create_view(view, io, path, err);
        fsdp_h5_leave(&call);
    }
    if (status != FSDP_OK)
        fsdp_free(view);
    else
        *view_out = view;
    return status;
}

static void release_lists(fsdp_h5_view *view)
{
    H5Sclose(view->source_space);
    for (int i = 0; i < FSDP_DTYPE_COUNT; i++)
        if (view->lists[i] >= 0)
            H5Pclose(view->lists[i]);
}

fsdp_status fsdp_h5_view_close(fsdp_h5_view *view, int64_t *size_out, fsdp_error *err)
{
    fsdp_h5_call call;
    fsdp_status status = fsdp_h5_enter(&call, err);
    if (status == FSDP_OK) {
        release_lists(view);
        status = fsdp_h5_base_close(&view->base, size_out, err);
        fsdp_h5_leave(&call);
    }
    fsdp_free(view);
    return status;
}

void fsdp_h5_view_discard(fsdp_h5_view *view)
{
    if (!view)
        return;
    view->base.disk->dead = true;
    fsdp_error ignored = {0};
    (void)fsdp_h5_view_close(view, NULL, &ignored);
}
