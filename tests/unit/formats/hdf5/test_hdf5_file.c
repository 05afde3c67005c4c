/*
 * HDF5 files of ours: what libhdf5 reads back, that the same calls give the same bytes, and what is
 * left when a call to the disk fails. tests/h5py reads them as users do.
 */
#include "tests/support/disk/io_fault.h"
#include "base/core/mem.h"
#include "formats/hdf5/hdf5_internal.h"
#include "formats/hdf5/hdf5_types.h"
#include "kernels/kernels.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char dir[] = "/tmp/test_hdf5_file.XXXXXX";

static void make_dir(void)
{
    cr_assert_not_null(mkdtemp(dir));
}

/* Every test also shows that nothing of ours stays open in libhdf5. */
static void remove_dir(void)
{
    cr_assert_eq(H5Fget_obj_count((hid_t)H5F_OBJ_ALL, H5F_OBJ_ALL), 0);
    fsdp_error err = {0};
    cr_assert_eq(fsdp_io_remove_tree(NULL, dir, &err), FSDP_OK, "%s", err.text);
}

TestSuite(hdf5_file, .init = make_dir, .fini = remove_dir);

static const char *in_dir(const char *name)
{
    static char path[300];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

#define ASSERT_OK(call) cr_assert_eq((call), FSDP_OK, "%s", err.text)

static void write_at(const char *path, const void *data, size_t size, int64_t offset)
{
    fsdp_error err = {0};
    fsdp_file *file = NULL;
    ASSERT_OK(fsdp_io_open(NULL, path, FSDP_IO_WRITE, &file, &err));
    ASSERT_OK(fsdp_io_write(file, path, data, size, offset, &err));
    ASSERT_OK(fsdp_io_close(&file, path, &err));
}

static char *read_all(const char *path, size_t *size_out)
{
    char *data = NULL;
    fsdp_error err = {0};
    ASSERT_OK(fsdp_io_read_file(NULL, path, (size_t)1 << 30, &data, size_out, &err));
    return data;
}

/* Reads a whole dataset in its own type. */
static void read_dataset(const char *path, const char *link, void *data)
{
    hid_t file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT);
    hid_t dataset = H5Dopen2(file, link, H5P_DEFAULT), type = H5Dget_type(dataset);
    cr_assert(H5Dread(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data) >= 0, "%s", link);
    H5Tclose(type);
    H5Dclose(dataset);
    H5Fclose(file);
}

/* --- contiguous datasets --- */

Test(hdf5_file, bytes_written_at_the_offset_are_the_dataset_of_every_dtype)
{
    enum { SETS = FSDP_DTYPE_COUNT - 1, COUNT = 12 };
    const int64_t shape[2] = {3, 4};
    fsdp_h5_dataset sets[SETS];
    for (int i = 0; i < SETS; i++) {
        fsdp_dtype dtype = (fsdp_dtype)(i + 1);
        sets[i] = (fsdp_h5_dataset){
            .link = fsdp_dtype_name(dtype), .dtype = dtype, .ndim = 2, .shape = shape};
    }
    fsdp_error err = {0};
    fsdp_h5_file *file = NULL;
    int64_t index_offset = 0, size = 0;
    const char *path = in_dir("types.h5");
    ASSERT_OK(fsdp_h5_create(NULL, path, &(fsdp_h5_layout){sets, SETS, 0, 0}, &file, &index_offset,
                             &err));
    cr_assert_eq(index_offset, -1);
    ASSERT_OK(fsdp_h5_close(file, &size, &err));
    enum { LARGEST = 256 };
    unsigned char data[COUNT * LARGEST], back[COUNT * LARGEST];
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < SETS; i++) {
            size_t bytes = COUNT * fsdp_dtype_size(sets[i].dtype);
            for (size_t b = 0; b < bytes; b++)
                data[b] = (unsigned char)((size_t)i * 31 + b);
            cr_assert(sets[i].offset > 0 && sets[i].offset + (int64_t)bytes <= size);
            if (pass == 0)
                write_at(path, data, bytes, sets[i].offset);
            else
                read_dataset(path, sets[i].link, back);
            cr_assert(pass == 0 || memcmp(data, back, bytes) == 0, "%s", sets[i].link);
        }
}

Test(hdf5_file, large_datasets_and_the_index_begin_on_pages_and_the_size_is_final)
{
    const int64_t large = 100000, small = 10;
    fsdp_h5_dataset sets[] = {{.link = "small", .dtype = FSDP_U8, .ndim = 1, .shape = &small},
                              {.link = "large", .dtype = FSDP_U8, .ndim = 1, .shape = &large}};
    fsdp_error err = {0};
    fsdp_h5_file *file = NULL;
    int64_t index_offset = 0, size = 0;
    const char *path = in_dir("a.h5");
    ASSERT_OK(fsdp_h5_create(NULL, path, &(fsdp_h5_layout){sets, 2, 70000, 0}, &file, &index_offset,
                             &err));
    ASSERT_OK(fsdp_h5_close(file, &size, &err));
    cr_assert_eq(sets[1].offset % 4096, 0);
    cr_assert_eq(index_offset % 4096, 0);
    fsdp_file_info info = {0};
    cr_assert_eq(fsdp_io_posix()->ops->info(fsdp_io_posix(), path, &info), 0);
    cr_assert_eq(info.size, size);
    cr_assert_geq(size, index_offset + 70000);
    cr_assert_lt(size, 100000 + 70000 + 3 * 4096 + 4096, "small files stay small");
}

Test(hdf5_file, scalars_have_an_offset_and_zero_size_datasets_have_none)
{
    const int64_t none[2] = {0, 7}, inner[3] = {2, 0, 3};
    fsdp_h5_dataset sets[] = {
        {.link = "scalar", .dtype = FSDP_F64, .ndim = 0, .shape = NULL},
        {.link = "none", .dtype = FSDP_BF16, .ndim = 2, .shape = none},
        {.link = "inner", .dtype = FSDP_F8_E4M3FN, .ndim = 3, .shape = inner}};
    fsdp_error err = {0};
    fsdp_h5_file *file = NULL;
    int64_t index_offset = 0, size = 0;
    const char *path = in_dir("a.h5");
    ASSERT_OK(
        fsdp_h5_create(NULL, path, &(fsdp_h5_layout){sets, 3, 0, 0}, &file, &index_offset, &err));
    ASSERT_OK(fsdp_h5_close(file, &size, &err));
    cr_assert_gt(sets[0].offset, 0);
    cr_assert_eq(sets[1].offset, -1);
    cr_assert_eq(sets[2].offset, -1);
    double value = 2.5, back = 0;
    write_at(path, &value, sizeof value, sets[0].offset);
    read_dataset(path, "scalar", &back);
    cr_assert_eq(back, value);
    read_dataset(path, "none", NULL);
}

Test(hdf5_file, many_datasets_follow_one_another_without_gaps)
{
    enum { COUNT = 3000, EACH = 512 };
    static char links[COUNT][60];
    static fsdp_h5_dataset sets[COUNT];
    const int64_t shape = EACH;
    for (int i = 0; i < COUNT; i++) {
        snprintf(links[i], sizeof links[i], "model.layers.%d.some.ordinary.weight", i);
        sets[i] = (fsdp_h5_dataset){.link = links[i], .dtype = FSDP_U8, .ndim = 1, .shape = &shape};
    }
    fsdp_error err = {0};
    fsdp_h5_file *file = NULL;
    int64_t index_offset = 0, size = 0;
    ASSERT_OK(fsdp_h5_create(NULL, in_dir("a.h5"), &(fsdp_h5_layout){sets, COUNT, 100, 0}, &file,
                             &index_offset, &err));
    ASSERT_OK(fsdp_h5_close(file, &size, &err));
    int gaps = 0;
    for (int i = 1; i < COUNT; i++)
        gaps += sets[i].offset != sets[i - 1].offset + EACH;
    cr_assert_leq(gaps, 1);
    cr_assert_leq(size, COUNT * (EACH + 520), "%lld bytes", (long long)size);
}

/* --- compressed datasets --- */

enum {
    ROWS = 10,
    COLUMNS = 33,
    CHUNK_ROWS = 4,
    CHUNK_BYTES = CHUNK_ROWS * COLUMNS * 4,
    CHUNKS = 3
};
static const int64_t chunked_shape[2] = {ROWS, COLUMNS}, chunk_shape[2] = {CHUNK_ROWS, COLUMNS};

/* A chunk of the tensor whose element i is i; rows beyond the edge are zero. */
static void fill_chunk(int chunk, float *data)
{
    memset(data, 0, CHUNK_BYTES);
    for (int i = 0; i < CHUNK_ROWS * COLUMNS; i++)
        if (chunk * CHUNK_ROWS * COLUMNS + i < ROWS * COLUMNS)
            data[i] = (float)(chunk * CHUNK_ROWS * COLUMNS + i);
}

/* Two compressed datasets, written alternately as two workers would, and an index after them. */
static fsdp_status write_compressed(fsdp_io *io, const char *path, int64_t frames_out[2][CHUNKS],
                                    fsdp_error *err)
{
    fsdp_h5_dataset sets[2] = {
        {.link = "a", .dtype = FSDP_F32, .ndim = 2, .shape = chunked_shape, .chunk = chunk_shape},
        {.link = "b", .dtype = FSDP_F32, .ndim = 2, .shape = chunked_shape, .chunk = chunk_shape}};
    fsdp_h5_file *file = NULL;
    fsdp_codec *codec = NULL;
    float data[CHUNK_ROWS * COLUMNS];
    char frame[2 * CHUNK_BYTES];
    size_t size = 0;
    int64_t offset = 0, file_size = 0;
    FSDP_TRY(fsdp_h5_create(io, path, &(fsdp_h5_layout){sets, 2, 0, 1}, &file, &offset, err));
    fsdp_status status = fsdp_codec_create(1, &codec, err);
    for (int i = 0; i < 2 * CHUNKS && status == FSDP_OK; i++) {
        const int64_t coord[2] = {i / 2 * CHUNK_ROWS, 0};
        fill_chunk(i / 2, data);
        status = fsdp_codec_encode(codec, &(fsdp_coding){data, CHUNK_BYTES, frame, sizeof frame, 4},
                                   &size, err);
        if (status == FSDP_OK)
            status = fsdp_h5_write_chunk(file, &(fsdp_h5_chunk){(size_t)i % 2, coord, frame, size},
                                         &frames_out[i % 2][i / 2], err);
    }
    fsdp_codec_free(codec);
    if (status == FSDP_OK)
        status = fsdp_h5_add_index(file, 100, &offset, err);
    if (status != FSDP_OK)
        fsdp_h5_discard(file);
    else
        status = fsdp_h5_close(file, &file_size, err);
    return status;
}

Test(hdf5_file, chunks_are_read_through_the_filters)
{
    fsdp_error err = {0};
    int64_t frames[2][CHUNKS];
    const char *path = in_dir("a.h5");
    ASSERT_OK(write_compressed(NULL, path, frames, &err));
    float back[ROWS * COLUMNS];
    for (int set = 0; set < 2; set++) {
        memset(back, 0xFF, sizeof back);
        read_dataset(path, set == 0 ? "a" : "b", back);
        for (int i = 0; i < ROWS * COLUMNS; i++)
            cr_assert_eq(back[i], (float)i);
    }
}

Test(hdf5_file, a_chunk_lies_where_write_chunk_says)
{
    fsdp_error err = {0};
    int64_t frames[2][CHUNKS];
    ASSERT_OK(write_compressed(NULL, in_dir("a.h5"), frames, &err));
    size_t size = 0;
    char *bytes = read_all(in_dir("a.h5"), &size);
    for (int set = 0; set < 2; set++)
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            static const unsigned char magic[4] = {0x28, 0xB5, 0x2F, 0xFD};
            cr_assert(frames[set][chunk] > 0 && frames[set][chunk] + 4 < (int64_t)size);
            cr_assert_eq(memcmp(bytes + frames[set][chunk], magic, 4), 0);
        }
    fsdp_free(bytes);
}

/* The filter runs in both directions when another part of the program uses libhdf5's own I/O. */
Test(hdf5_file, the_filter_compresses_and_restores)
{
    enum { SIZE = 5000 };
    const unsigned level = 3;
    char data[SIZE];
    for (int i = 0; i < SIZE; i++)
        data[i] = (char)(i / 100);
    size_t room = SIZE;
    void *buf = malloc(SIZE);
    memcpy(buf, data, SIZE);
    size_t packed = fsdp_h5_zstd_filter.filter(0, 1, &level, SIZE, &room, &buf);
    cr_assert(packed > 0 && packed < SIZE / 10);
    size_t restored = fsdp_h5_zstd_filter.filter(H5Z_FLAG_REVERSE, 1, &level, packed, &room, &buf);
    cr_assert_eq(restored, (size_t)SIZE);
    cr_assert_eq(memcmp(buf, data, SIZE), 0);
    cr_assert_eq(fsdp_h5_zstd_filter.filter(H5Z_FLAG_REVERSE, 1, &level, SIZE, &room, &buf), 0u,
                 "no frame");
    free(buf);
}

/* --- views: tests/h5py has more of them --- */

static fsdp_status write_view(fsdp_io *io, const char *path, fsdp_error *err)
{
    const int64_t shape[2] = {4, 6}, half[2] = {2, 6}, lo[2][2] = {{0, 0}, {2, 0}},
                  zero[2] = {0, 0};
    fsdp_h5_source sources[2];
    for (int i = 0; i < 2; i++)
        sources[i] = (fsdp_h5_source){.file = i == 0 ? "0.h5" : "1.h5",
                                      .link = "w",
                                      .source_ndim = 2,
                                      .source_shape = half,
                                      .source_lo = zero,
                                      .source_len = half,
                                      .lo = lo[i],
                                      .len = half};
    fsdp_h5_view *view = NULL;
    int64_t size = 0;
    FSDP_TRY(fsdp_h5_view_create(io, path, &view, err));
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < 50 && status == FSDP_OK; i++) {
        char link[20];
        snprintf(link, sizeof link, "w%d", i);
        status = fsdp_h5_view_add(view,
                                  &(fsdp_h5_dataset){.link = link,
                                                     .dtype = i % 2 ? FSDP_I32 : FSDP_F8_E4M3FN,
                                                     .ndim = 2,
                                                     .shape = shape},
                                  sources, 2, err);
    }
    if (status == FSDP_OK)
        status = fsdp_h5_view_link(view, "tied", "w1", err);
    if (status != FSDP_OK)
        fsdp_h5_view_discard(view);
    else
        status = fsdp_h5_view_close(view, &size, err);
    return status;
}

Test(hdf5_file, a_view_shows_its_sources_and_minus_one_where_they_are_missing)
{
    const int64_t half[2] = {2, 6};
    fsdp_h5_dataset set = {.link = "w", .dtype = FSDP_I32, .ndim = 2, .shape = half};
    fsdp_error err = {0};
    fsdp_h5_file *file = NULL;
    int64_t index_offset = 0, size = 0;
    ASSERT_OK(fsdp_h5_create(NULL, in_dir("1.h5"), &(fsdp_h5_layout){&set, 1, 0, 0}, &file,
                             &index_offset, &err));
    ASSERT_OK(fsdp_h5_close(file, &size, &err));
    int32_t data[12], back[24];
    for (int i = 0; i < 12; i++)
        data[i] = 12 + i;
    write_at(in_dir("1.h5"), data, sizeof data, set.offset);
    ASSERT_OK(write_view(NULL, in_dir("v.h5"), &err));
    read_dataset(in_dir("v.h5"), "w1", back);
    for (int i = 0; i < 24; i++)
        cr_assert_eq(back[i], i < 12 ? -1 : i);
    read_dataset(in_dir("v.h5"), "tied", back);
    cr_assert_eq(back[23], 23);
}

/* Lengths and offsets of more than 32 bits, in a source that is not there. */
Test(hdf5_file, a_view_maps_boxes_beyond_four_gibi_elements)
{
    const int64_t shape = (int64_t)3 << 33, lo = (int64_t)1 << 33, len = (int64_t)1 << 33, zero = 0;
    const fsdp_h5_source source = {.file = "0.h5",
                                   .link = "w",
                                   .source_ndim = 1,
                                   .source_shape = &len,
                                   .source_lo = &zero,
                                   .source_len = &len,
                                   .lo = &lo,
                                   .len = &len};
    fsdp_error err = {0};
    fsdp_h5_view *view = NULL;
    int64_t size = 0;
    ASSERT_OK(fsdp_h5_view_create(NULL, in_dir("v.h5"), &view, &err));
    ASSERT_OK(fsdp_h5_view_add(
        view, &(fsdp_h5_dataset){.link = "w", .dtype = FSDP_U8, .ndim = 1, .shape = &shape},
        &source, 1, &err));
    ASSERT_OK(fsdp_h5_view_close(view, &size, &err));
    hid_t file = H5Fopen(in_dir("v.h5"), H5F_ACC_RDONLY, H5P_DEFAULT);
    hid_t dataset = H5Dopen2(file, "w", H5P_DEFAULT), list = H5Dget_create_plist(dataset);
    hid_t space = H5Pget_virtual_vspace(list, 0);
    hsize_t start = 0, end = 0;
    cr_assert(H5Sget_select_bounds(space, &start, &end) >= 0);
    cr_assert_eq(start, (hsize_t)lo);
    cr_assert_eq(end, (hsize_t)(lo + len - 1));
    H5Sclose(space);
    H5Pclose(list);
    H5Dclose(dataset);
    H5Fclose(file);
}

/* Two levels of tree nodes above the symbol nodes: libhdf5 must find and list every name. */
Test(hdf5_file, a_view_of_very_many_datasets_is_one_group_that_libhdf5_can_search)
{
    enum { COUNT = 64 * 32 * 32 + 1000 };
    const int64_t shape = 3, zero = 0;
    char link[40];
    fsdp_h5_source source = {.file = "0.h5",
                             .link = link,
                             .source_ndim = 1,
                             .source_shape = &shape,
                             .source_lo = &zero,
                             .source_len = &shape,
                             .lo = &zero,
                             .len = &shape};
    fsdp_error err = {0};
    fsdp_h5_view *view = NULL;
    int64_t size = 0;
    ASSERT_OK(fsdp_h5_view_create(NULL, in_dir("v.h5"), &view, &err));
    for (int i = 0; i < COUNT; i++) {
        snprintf(link, sizeof link, "%x.%d", (unsigned)i * 2654435761u, i);
        ASSERT_OK(fsdp_h5_view_add(
            view, &(fsdp_h5_dataset){.link = link, .dtype = FSDP_F16, .ndim = 1, .shape = &shape},
            &source, 1, &err));
    }
    ASSERT_OK(fsdp_h5_view_close(view, &size, &err));
    hid_t file = H5Fopen(in_dir("v.h5"), H5F_ACC_RDONLY, H5P_DEFAULT);
    H5G_info_t info = {0};
    cr_assert(H5Gget_info(file, &info) >= 0);
    cr_assert_eq(info.nlinks, (hsize_t)COUNT);
    for (int i = 0; i < COUNT; i++) {
        snprintf(link, sizeof link, "%x.%d", (unsigned)i * 2654435761u, i);
        cr_assert_gt(H5Lexists(file, link, H5P_DEFAULT), 0, "%s", link);
    }
    cr_assert_eq(H5Lexists(file, "0.1", H5P_DEFAULT), 0);
    H5Fclose(file);
    fsdp_file_info on_disk = {0};
    cr_assert_eq(fsdp_io_posix()->ops->info(fsdp_io_posix(), in_dir("v.h5"), &on_disk), 0);
    cr_assert_eq(on_disk.size, size);
}

/* libhdf5 opens the file for writing and adds to it: its structures are not only readable. */
Test(hdf5_file, libhdf5_can_add_to_a_view)
{
    fsdp_error err = {0};
    ASSERT_OK(write_view(NULL, in_dir("v.h5"), &err));
    hid_t file = H5Fopen(in_dir("v.h5"), H5F_ACC_RDWR, H5P_DEFAULT);
    for (int i = 0; i < 200; i++) {
        char link[20];
        snprintf(link, sizeof link, "group%d", i);
        hid_t group = H5Gcreate2(file, link, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
        cr_assert(group >= 0);
        H5Gclose(group);
    }
    cr_assert(H5Ldelete(file, "tied", H5P_DEFAULT) >= 0);
    cr_assert(H5Ldelete(file, "w0", H5P_DEFAULT) >= 0);
    cr_assert(H5Fclose(file) >= 0);
    int32_t back[24];
    read_dataset(in_dir("v.h5"), "w1", back);
    cr_assert_eq(back[0], -1);
    file = H5Fopen(in_dir("v.h5"), H5F_ACC_RDONLY, H5P_DEFAULT);
    H5G_info_t info = {0};
    cr_assert(H5Gget_info(file, &info) >= 0);
    cr_assert_eq(info.nlinks, 49u + 200u);
    H5Fclose(file);
}

Test(hdf5_file, an_empty_view_is_a_valid_file)
{
    fsdp_error err = {0};
    fsdp_h5_view *view = NULL;
    int64_t size = 0;
    ASSERT_OK(fsdp_h5_view_create(NULL, in_dir("v.h5"), &view, &err));
    ASSERT_OK(fsdp_h5_view_close(view, &size, &err));
    hid_t file = H5Fopen(in_dir("v.h5"), H5F_ACC_RDONLY, H5P_DEFAULT);
    H5G_info_t info = {.nlinks = 1};
    cr_assert(H5Gget_info(file, &info) >= 0);
    cr_assert_eq(info.nlinks, 0u);
    H5Fclose(file);
}

Test(hdf5_file, wrong_links_in_a_view_are_errors_that_name_them)
{
    static const char *const cases[3][2] = {{"twice", NULL}, {"tied", "nothing"}, {"b", "a"}};
    for (int i = 0; i < 3; i++) {
        const int64_t none = 0;
        fsdp_error err = {0};
        fsdp_h5_view *view = NULL;
        int64_t size = 0;
        ASSERT_OK(fsdp_h5_view_create(NULL, in_dir("v.h5"), &view, &err));
        ASSERT_OK(fsdp_h5_view_add(
            view, &(fsdp_h5_dataset){.link = "twice", .dtype = FSDP_F32, .ndim = 1, .shape = &none},
            NULL, 0, &err));
        ASSERT_OK(fsdp_h5_view_link(view, "a", "twice", &err));
        if (cases[i][1])
            ASSERT_OK(fsdp_h5_view_link(view, cases[i][0], cases[i][1], &err));
        else
            ASSERT_OK(fsdp_h5_view_add(
                view,
                &(fsdp_h5_dataset){
                    .link = cases[i][0], .dtype = FSDP_F32, .ndim = 1, .shape = &none},
                NULL, 0, &err));
        cr_assert_eq(fsdp_h5_view_close(view, &size, &err), FSDP_ERR_INTERNAL);
        cr_assert_not_null(strstr(err.text, cases[i][0]), "%s", err.text);
        cr_assert_not_null(strstr(err.text, "v.h5"), "%s", err.text);
        unlink(in_dir("v.h5"));
    }
}

/* Values of lookup3.c's own self test and of libhdf5's. */
Test(hdf5_file, the_checksum_is_lookup3)
{
    cr_assert_eq(fsdp_h5_checksum("", 0), 0xDEADBEEFu);
    cr_assert_eq(fsdp_h5_checksum("Four score and seven years ago", 30), 0x17770551u);
}

/* --- same calls, same bytes --- */

static fsdp_status write_contiguous(fsdp_io *io, const char *path, fsdp_error *err)
{
    enum { COUNT = 200 };
    static char links[COUNT][20];
    static fsdp_h5_dataset sets[COUNT];
    const int64_t shape[2] = {5, 9};
    for (int i = 0; i < COUNT; i++) {
        snprintf(links[i], sizeof links[i], "t%d", i);
        sets[i] = (fsdp_h5_dataset){
            .link = links[i], .dtype = (fsdp_dtype)(1 + i % 20), .ndim = 2, .shape = shape};
    }
    fsdp_h5_file *file = NULL;
    int64_t index_offset = 0, size = 0;
    FSDP_TRY(fsdp_h5_create(io, path, &(fsdp_h5_layout){sets, COUNT, 1000, 0}, &file, &index_offset,
                            err));
    return fsdp_h5_close(file, &size, err);
}

static fsdp_status write_chunks(fsdp_io *io, const char *path, fsdp_error *err)
{
    int64_t frames[2][CHUNKS];
    return write_compressed(io, path, frames, err);
}

typedef fsdp_status (*writer)(fsdp_io *io, const char *path, fsdp_error *err);
static const writer writers[] = {write_contiguous, write_chunks, write_view};
enum { WRITERS = sizeof writers / sizeof *writers };

Test(hdf5_file, the_same_calls_give_the_same_bytes)
{
    fsdp_error err = {0};
    for (int w = 0; w < WRITERS; w++) {
        char first[20], second[20];
        snprintf(first, sizeof first, "first%d", w);
        snprintf(second, sizeof second, "second%d", w);
        ASSERT_OK(writers[w](NULL, in_dir(first), &err));
        sleep(w == 0); /* so that a time stored anywhere would differ */
        ASSERT_OK(writers[w](NULL, in_dir(second), &err));
        size_t first_size = 0, second_size = 0;
        char *a = read_all(in_dir(first), &first_size), *b = read_all(in_dir(second), &second_size);
        cr_assert_eq(first_size, second_size);
        cr_assert_eq(memcmp(a, b, first_size), 0);
        fsdp_free(a);
        fsdp_free(b);
    }
}

/* --- failures --- */

static void fail_each_call(writer write, int errnum)
{
    const char *path = in_dir("f.h5");
    int64_t calls = 1;
    for (int64_t n = 0; n <= calls; n++) {
        fsdp_error err = {0};
        fsdp_fault_plan plan = {.at = n, .action = FSDP_FAULT_ERRNO, .errnum = errnum};
        fsdp_io *io = NULL;
        ASSERT_OK(fsdp_io_fault_create(NULL, &plan, &io, &err));
        fsdp_status status = write(io, path, &err);
        if (n == 0) {
            cr_assert_eq(status, FSDP_OK);
            calls = fsdp_io_fault_calls(io);
            cr_assert_gt(calls, 4);
        } else {
            cr_assert_neq(status, FSDP_OK, "call %lld", (long long)n);
            cr_assert_eq(err.status, status);
            cr_assert_eq(err.errnum, errnum, "call %lld: %s", (long long)n, err.text);
            cr_assert_not_null(strstr(err.text, path), "%s", err.text);
        }
        cr_assert_eq(H5Fget_obj_count((hid_t)H5F_OBJ_ALL, H5F_OBJ_ALL), 0);
        fsdp_io_fault_free(io);
        unlink(path);
    }
}

Test(hdf5_file, every_failing_call_is_reported_with_path_and_errno)
{
    for (int w = 0; w < WRITERS; w++) {
        fail_each_call(writers[w], ENOSPC);
        fail_each_call(writers[w], EIO);
    }
}

Test(hdf5_file, short_transfers_are_completed)
{
    fsdp_error err = {0};
    for (int w = 0; w < WRITERS; w++) {
        ASSERT_OK(writers[w](NULL, in_dir("whole"), &err));
        fsdp_fault_plan plan = {.at = 1, .forever = true, .action = FSDP_FAULT_SHORT, .part = 777};
        fsdp_io *io = NULL;
        ASSERT_OK(fsdp_io_fault_create(NULL, &plan, &io, &err));
        ASSERT_OK(writers[w](io, in_dir("short"), &err));
        fsdp_io_fault_free(io);
        size_t whole_size = 0, short_size = 0;
        char *a = read_all(in_dir("whole"), &whole_size),
             *b = read_all(in_dir("short"), &short_size);
        cr_assert_eq(whole_size, short_size);
        cr_assert_eq(memcmp(a, b, whole_size), 0);
        fsdp_free(a);
        fsdp_free(b);
        unlink(in_dir("whole"));
        unlink(in_dir("short"));
    }
}

Test(hdf5_file, memory_that_runs_out_is_an_error)
{
    for (int w = 0; w < WRITERS; w++)
        for (int64_t n = 0;; n++) {
            fsdp_error err = {0};
            (void)fsdp_mem_fail_after(n, false);
            fsdp_status status = writers[w](NULL, in_dir("m.h5"), &err);
            (void)fsdp_mem_fail_after(-1, false);
            unlink(in_dir("m.h5"));
            if (status == FSDP_OK) {
                cr_assert_gt(n, 3);
                break;
            }
            cr_assert_eq(status, FSDP_ERR_LIMIT, "%s", err.text);
        }
}

Test(hdf5_file, an_existing_file_is_kept)
{
    fsdp_error err = {0};
    ASSERT_OK(fsdp_io_replace_file(NULL, in_dir("a.h5"), "precious", 8, &err));
    for (int w = 0; w < WRITERS; w++) {
        err = (fsdp_error){0};
        cr_assert_eq(writers[w](NULL, in_dir("a.h5"), &err), FSDP_ERR_EXISTS, "%s", err.text);
        cr_assert_not_null(strstr(err.text, in_dir("a.h5")));
    }
    size_t size = 0;
    char *data = read_all(in_dir("a.h5"), &size);
    cr_assert_str_eq(data, "precious");
    fsdp_free(data);
}

Test(hdf5_file, the_same_link_twice_is_an_error_that_names_it)
{
    const int64_t one = 1;
    fsdp_h5_dataset sets[] = {{.link = "twice", .dtype = FSDP_U8, .ndim = 1, .shape = &one},
                              {.link = "twice", .dtype = FSDP_U8, .ndim = 1, .shape = &one}};
    fsdp_error err = {0};
    fsdp_h5_file *file = NULL;
    int64_t offset = 0;
    cr_assert_eq(fsdp_h5_create(NULL, in_dir("a.h5"), &(fsdp_h5_layout){sets, 2, 0, 0}, &file,
                                &offset, &err),
                 FSDP_ERR_INTERNAL);
    cr_assert_null(file);
    cr_assert_not_null(strstr(err.text, "'twice'"));
    cr_assert_not_null(strstr(err.text, "already exists"), "%s", err.text);
}

Test(hdf5_file, a_chunk_of_a_contiguous_dataset_is_refused)
{
    const int64_t one = 1, zero = 0;
    fsdp_h5_dataset set = {.link = "a", .dtype = FSDP_U8, .ndim = 1, .shape = &one};
    fsdp_error err = {0};
    fsdp_h5_file *file = NULL;
    int64_t offset = 0;
    ASSERT_OK(fsdp_h5_create(NULL, in_dir("a.h5"), &(fsdp_h5_layout){&set, 1, 0, 0}, &file, &offset,
                             &err));
    cr_assert_eq(fsdp_h5_write_chunk(file, &(fsdp_h5_chunk){0, &zero, "x", 1}, &offset, &err),
                 FSDP_ERR_INTERNAL);
    cr_assert_eq(fsdp_h5_write_chunk(file, &(fsdp_h5_chunk){1, &zero, "x", 1}, &offset, &err),
                 FSDP_ERR_INTERNAL);
    fsdp_h5_discard(file);
}

Test(hdf5_file, discarding_writes_nothing_more)
{
    fsdp_error err = {0};
    fsdp_io *io = NULL;
    const int64_t one = 1;
    fsdp_h5_dataset set = {.link = "a", .dtype = FSDP_U8, .ndim = 1, .shape = &one};
    fsdp_fault_plan count_writes = {.calls = 1u << FSDP_CALL_PWRITE | 1u << FSDP_CALL_RESIZE};
    ASSERT_OK(fsdp_io_fault_create(NULL, &count_writes, &io, &err));
    fsdp_h5_file *file = NULL;
    fsdp_h5_view *view = NULL;
    int64_t offset = 0;
    ASSERT_OK(
        fsdp_h5_create(io, in_dir("a.h5"), &(fsdp_h5_layout){&set, 1, 0, 0}, &file, &offset, &err));
    ASSERT_OK(fsdp_h5_view_create(io, in_dir("v.h5"), &view, &err));
    int64_t before = fsdp_io_fault_calls(io);
    fsdp_h5_discard(file);
    fsdp_h5_view_discard(view);
    cr_assert_eq(fsdp_io_fault_calls(io), before);
    fsdp_h5_discard(NULL);
    fsdp_h5_view_discard(NULL);
    fsdp_io_fault_free(io);
}

/* --- next to other users of libhdf5 --- */

static herr_t own_handler(hid_t stack, void *user)
{
    (void)stack;
    (*(int *)user)++;
    return 0;
}

Test(hdf5_file, the_programs_own_error_handler_stays_and_hears_nothing_of_ours)
{
    int heard = 0;
    fsdp_error err = {0};
    H5Eset_auto2(H5E_DEFAULT, own_handler, &heard);
    const int64_t one = 1;
    fsdp_h5_dataset sets[] = {{.link = "twice", .dtype = FSDP_U8, .ndim = 1, .shape = &one},
                              {.link = "twice", .dtype = FSDP_U8, .ndim = 1, .shape = &one}};
    fsdp_h5_file *file = NULL;
    int64_t offset = 0;
    cr_assert_neq(fsdp_h5_create(NULL, in_dir("a.h5"), &(fsdp_h5_layout){sets, 2, 0, 0}, &file,
                                 &offset, &err),
                  FSDP_OK);
    cr_assert_eq(heard, 0);
    cr_assert(H5Fopen(in_dir("none"), H5F_ACC_RDONLY, H5P_DEFAULT) < 0);
    cr_assert_eq(heard, 1);
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
}

Test(hdf5_file, a_program_may_close_libhdf5_between_our_calls)
{
    fsdp_error err = {0};
    ASSERT_OK(write_contiguous(NULL, in_dir("a.h5"), &err));
    H5close();
    ASSERT_OK(write_chunks(NULL, in_dir("b.h5"), &err));
    H5close();
    ASSERT_OK(write_view(NULL, in_dir("v.h5"), &err));
}

typedef struct thread_work {
    pthread_t thread;
    char path[100];
    writer write;
    fsdp_status status;
    fsdp_error err;
} thread_work;

static void *run_writer(void *user)
{
    thread_work *work = user;
    work->status = work->write(NULL, work->path, &work->err);
    return NULL;
}

Test(hdf5_file, threads_may_write_files_at_the_same_time)
{
    enum { THREADS = 8 };
    static thread_work work[THREADS];
    for (int i = 0; i < THREADS; i++) {
        work[i].write = i % 2 ? write_chunks : write_view;
        snprintf(work[i].path, sizeof work[i].path, "%s/%d.h5", dir, i);
        cr_assert_eq(pthread_create(&work[i].thread, NULL, run_writer, &work[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(work[i].thread, NULL);
        cr_assert_eq(work[i].status, FSDP_OK, "%s", work[i].err.text);
    }
}
