/*
 * Shard files: libhdf5 creates the datasets and reports their offsets. native_write.c writes the
 * bytes by pwrite after fsdp_h5_close, or passes encoded chunks. See hdf5_file.h.
 */
#include "formats/hdf5/hdf5_internal.h"

#include "base/core/mem.h"

#include <string.h>

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
    hid_t list = fsdp_h5_dataset_list();
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
    hid_t list = fsdp_h5_dataset_list();
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
        return fsdp_h5_fail(&file->base, err, "make property lists");
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
    hid_t type = fsdp_h5_type(&base->types, wanted->dtype);
    bool ready = type >= 0 && fsdp_h5_set_extent(base, wanted->ndim, wanted->shape) >= 0 &&
                 (!wanted->chunk || set_chunk(list, wanted->ndim, wanted->chunk) >= 0);
    if (!ready)
        return fsdp_h5_fail(base, err, "describe dataset '%s'", wanted->link);
    hid_t dataset =
        H5Dcreate2(base->file, wanted->link, type, base->space, H5P_DEFAULT, list, H5P_DEFAULT);
    if (dataset < 0)
        return fsdp_h5_fail(base, err, "create dataset '%s'", wanted->link);
    bool marked = fsdp_h5_mark_type(dataset, wanted->dtype) >= 0;
    haddr_t offset = wanted->chunk ? HADDR_UNDEF : H5Dget_offset(dataset);
    *offset_out = offset == HADDR_UNDEF ? -1 : (int64_t)offset;
    if (H5Dclose(dataset) < 0 || !marked)
        return fsdp_h5_fail(base, err, "finish dataset '%s'", wanted->link);
    return fsdp_h5_check(base, err);
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
    FSDP_TRY(fsdp_h5_base_create(&file->base, io, path, &plan, err));
    fsdp_status status = make_lists(file, layout->level, err);
    if (status == FSDP_OK)
        status = create_datasets(file, layout->datasets, layout->index_size, index_offset_out, err);
    if (status != FSDP_OK) {
        release_lists(file);
        fsdp_h5_base_discard(&file->base);
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
        return fsdp_h5_fail(&file->base, err, "open dataset '%s'", file->links[number]);
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
        return fsdp_h5_fail(&file->base, err, "write a chunk of dataset '%s'", link);
    haddr_t offset = HADDR_UNDEF;
    hsize_t stored = 0;
    unsigned skipped_filters = 0;
    if (H5Dget_chunk_info_by_coord(file->open, at, &skipped_filters, &offset, &stored) < 0 ||
        offset == HADDR_UNDEF)
        return fsdp_h5_fail(&file->base, err, "find a chunk of dataset '%s'", link);
    *offset_out = (int64_t)offset;
    return fsdp_h5_check(&file->base, err);
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
        status = fsdp_h5_fail(&file->base, err, "link '%s' to dataset '%s'", link, target);
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
        status = fsdp_h5_base_close(&file->base, size_out, err);
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
