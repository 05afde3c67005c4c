/*
 * Writes HDF5 files of every kind we make, for read_samples.py: argv[1] is an existing directory.
 *
 *   types.h5        every dtype, 0-d, zero-size, and names that need escaping
 *   compressed.h5   chunks with shuffle + zstd
 *   view/           three shard files and index.h5 over them, one source missing
 */
#include "base/core/mem.h"
#include "formats/hdf5/hdf5_file.h"
#include "formats/hdf5/hdf5_link_name.h"
#include "kernels/kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void check(fsdp_status status, const fsdp_error *err)
{
    if (status == FSDP_OK)
        return;
    fprintf(stderr, "%s\n", err->text);
    exit(1);
}

static void write_at(const char *path, const void *data, size_t size, int64_t offset)
{
    fsdp_error err = {0};
    fsdp_file *file = NULL;
    check(fsdp_io_open(NULL, path, FSDP_IO_WRITE, &file, &err), &err);
    check(fsdp_io_write(file, path, data, size, offset, &err), &err);
    check(fsdp_io_close(&file, path, &err), &err);
}

/* --- types.h5 --- */

enum { VALUES = 10 };

/* -1, -0.5, 0, ... 3.5: exact in every floating type that HDF5 can describe. */
static size_t fill_values(fsdp_dtype dtype, unsigned char *data)
{
    size_t size = fsdp_dtype_size(dtype);
    fsdp_dtype part = dtype == FSDP_C64 ? FSDP_F32 : dtype == FSDP_C128 ? FSDP_F64 : dtype;
    part = dtype == FSDP_COMPLEX32 ? FSDP_F16 : dtype == FSDP_BCOMPLEX32 ? FSDP_BF16 : part;
    size_t parts = part == dtype ? 1 : 2, part_size = fsdp_dtype_size(part);
    for (int i = 0; i < VALUES; i++) {
        float value = (float)(i - 2) * 0.5f;
        int64_t whole = dtype == FSDP_BOOL ? i % 2 : i;
        for (size_t p = 0; p < parts; p++) {
            float real = p == 0 ? value : -value;
            void *to = data + (size_t)i * size + p * part_size;
            if (fsdp_dtype_describe(part)->is_float)
                fsdp_kernels_get()->cast(to, part, &real, FSDP_F32, 1, FSDP_OVERFLOW_INF);
            else
                memcpy(to, &whole, size < sizeof whole ? size : sizeof whole);
        }
    }
    return size * VALUES;
}

static void write_types(const char *dir)
{
    static const char *const names[] = {"a/b", "..", "100%", "gewicht.\xC3\xBC", "", "plain"};
    enum { NAMES = sizeof names / sizeof *names, SETS = FSDP_DTYPE_COUNT - 1 + 2 + NAMES };
    const int64_t shape[2] = {2, 5}, none[2] = {0, 5}, one = 1;
    char links[NAMES][FSDP_NATIVE_LINK_ROOM];
    fsdp_h5_dataset sets[SETS] = {0};
    size_t n = 0;
    for (int i = 1; i < FSDP_DTYPE_COUNT; i++)
        sets[n++] = (fsdp_h5_dataset){.link = fsdp_dtype_name((fsdp_dtype)i),
                                      .dtype = (fsdp_dtype)i,
                                      .ndim = 2,
                                      .shape = shape};
    sets[n++] = (fsdp_h5_dataset){.link = "scalar", .dtype = FSDP_F32, .ndim = 0, .shape = none};
    sets[n++] = (fsdp_h5_dataset){.link = "empty", .dtype = FSDP_BF16, .ndim = 2, .shape = none};
    for (size_t i = 0; i < NAMES; i++) {
        fsdp_native_link(names[i], strlen(names[i]), 0, links[i]);
        sets[n++] = (fsdp_h5_dataset){.link = links[i], .dtype = FSDP_U8, .ndim = 1, .shape = &one};
    }
    fsdp_error err = {0};
    fsdp_h5_file *file = NULL;
    int64_t index_offset = 0, size = 0;
    char *path = fsdp_path_join(dir, "types.h5");
    check(fsdp_h5_create(NULL, path, &(fsdp_h5_layout){sets, n, 5, 1}, &file, &index_offset, &err),
          &err);
    check(fsdp_h5_close(file, &size, &err), &err);
    for (size_t i = 0; i < n; i++) {
        unsigned char data[VALUES * 256] = {0};
        float scalar = 1.5f;
        size_t bytes = i < FSDP_DTYPE_COUNT - 1 ? fill_values(sets[i].dtype, data) : 1;
        data[0] = bytes == 1 ? (unsigned char)i : data[0];
        if (sets[i].ndim == 0)
            write_at(path, &scalar, sizeof scalar, sets[i].offset);
        else if (sets[i].offset >= 0)
            write_at(path, data, bytes, sets[i].offset);
    }
    write_at(path, "index", 5, index_offset);
    fsdp_free(path);
}

/* --- compressed.h5: f32 [10, 300] in chunks of 4 rows, element i is i --- */

static void write_compressed(const char *dir)
{
    enum { ROWS = 10, COLUMNS = 300, CHUNK = 4, CHUNK_BYTES = CHUNK * COLUMNS * 4 };
    const int64_t shape[2] = {ROWS, COLUMNS}, chunk[2] = {CHUNK, COLUMNS};
    fsdp_h5_dataset set = {
        .link = "numbers", .dtype = FSDP_F32, .ndim = 2, .shape = shape, .chunk = chunk};
    fsdp_error err = {0};
    fsdp_h5_file *file = NULL;
    fsdp_codec *codec = NULL;
    int64_t offset = 0, size = 0;
    char *path = fsdp_path_join(dir, "compressed.h5");
    check(fsdp_codec_create(FSDP_CODEC_HUFFMAN, &codec, &err), &err);
    check(fsdp_h5_create(NULL, path, &(fsdp_h5_layout){&set, 1, 0, 1}, &file, &offset, &err), &err);
    size_t room = fsdp_codec_bound(CHUNK_BYTES), frame_size = 0;
    void *frame = fsdp_alloc(room, 1);
    for (int64_t row = 0; row < ROWS; row += CHUNK) {
        static float data[CHUNK * COLUMNS];
        memset(data, 0, sizeof data);
        for (int64_t i = 0; i < CHUNK * COLUMNS && row * COLUMNS + i < ROWS * COLUMNS; i++)
            data[i] = (float)(row * COLUMNS + i);
        const int64_t coord[2] = {row, 0};
        check(fsdp_codec_encode(codec, &(fsdp_coding){data, CHUNK_BYTES, frame, room, 4},
                                &frame_size, &err),
              &err);
        check(
            fsdp_h5_write_chunk(file, &(fsdp_h5_chunk){0, coord, frame, frame_size}, &offset, &err),
            &err);
    }
    check(fsdp_h5_add_index(file, 5, &offset, &err), &err);
    check(fsdp_h5_close(file, &size, &err), &err);
    write_at(path, "index", 5, offset);
    fsdp_free(frame);
    fsdp_codec_free(codec);
    fsdp_free(path);
}

/* --- view/: tensors of i32 whose element i is i --- */

typedef struct stored {
    const char *link;
    int ndim;
    int64_t shape[2];      /* of the stored dataset */
    int64_t lo[2], len[2]; /* its box in the tensor */
    int64_t columns;       /* of the tensor */
    int32_t first;         /* value of its first element, for flat and scalar */
} stored;

enum { SHARDS = 3 };
static const char shard_name[] = "shard-00000-of-00003.h5";

static void name_shard(int shard, char out[sizeof shard_name])
{
    memcpy(out, shard_name, sizeof shard_name);
    out[10] = (char)('0' + shard);
}

/* rows: [7, 4] as 3, 3, 1 rows. columns: [4, 6] as 2, 2, 2 columns. flat: [3, 4], elements 0..5,
 * 5..9, 9..12 in one dataset per shard. scalar: on shard 1. */
static const stored pieces[SHARDS][4] = {
    {{"rows", 2, {3, 4}, {0, 0}, {3, 4}, 4, 0},
     {"columns", 2, {4, 2}, {0, 0}, {4, 2}, 6, 0},
     {"flat", 1, {5, 0}, {0, 0}, {1, 4}, 4, 0}},
    {{"rows", 2, {3, 4}, {3, 0}, {3, 4}, 4, 0},
     {"columns", 2, {4, 2}, {0, 2}, {4, 2}, 6, 0},
     {"flat", 1, {4, 0}, {1, 1}, {1, 3}, 4, 5},
     {"scalar", 0, {0, 0}, {0, 0}, {1, 1}, 1, 7}},
    {{"rows", 2, {1, 4}, {6, 0}, {1, 4}, 4, 0},
     {"columns", 2, {4, 2}, {0, 4}, {4, 2}, 6, 0},
     {"flat", 1, {3, 0}, {2, 1}, {1, 3}, 4, 9}},
};

/* A flat piece holds `count` elements from `first` on; a box piece its box, row by row. */
static size_t fill_piece(const stored *piece, int32_t *data)
{
    size_t n = 0;
    if (piece->ndim == 1)
        for (int i = 0; i < piece->shape[0]; i++)
            data[n++] = piece->first + i;
    else
        for (int64_t r = 0; r < piece->len[0]; r++)
            for (int64_t c = 0; c < piece->len[1]; c++)
                data[n++] = (int32_t)(piece->first + (piece->lo[0] + r) * piece->columns +
                                      piece->lo[1] + c);
    return n;
}

static void write_shard(const char *dir, int shard)
{
    char name[sizeof shard_name];
    name_shard(shard, name);
    fsdp_h5_dataset sets[4] = {0};
    size_t n = 0;
    while (n < 4 && pieces[shard][n].link) {
        sets[n] = (fsdp_h5_dataset){.link = pieces[shard][n].link,
                                    .dtype = FSDP_I32,
                                    .ndim = pieces[shard][n].ndim,
                                    .shape = pieces[shard][n].shape};
        n++;
    }
    fsdp_error err = {0};
    fsdp_h5_file *file = NULL;
    int64_t index_offset = 0, size = 0;
    char *path = fsdp_path_join(dir, name);
    check(fsdp_h5_create(NULL, path, &(fsdp_h5_layout){sets, n, 0, 1}, &file, &index_offset, &err),
          &err);
    check(fsdp_h5_close(file, &size, &err), &err);
    for (size_t i = 0; i < n; i++) {
        int32_t data[32];
        size_t count = fill_piece(&pieces[shard][i], data);
        write_at(path, data, count * sizeof *data, sets[i].offset);
    }
    fsdp_free(path);
}

static void add_boxes(fsdp_h5_view *view, size_t which, const int64_t *shape)
{
    static const int64_t zero[2] = {0, 0};
    char names[SHARDS][sizeof shard_name];
    fsdp_h5_source sources[SHARDS];
    for (int s = 0; s < SHARDS; s++) {
        const stored *piece = &pieces[s][which];
        name_shard(s, names[s]);
        sources[s] = (fsdp_h5_source){.file = names[s],
                                      .link = piece->link,
                                      .source_ndim = 2,
                                      .source_shape = piece->shape,
                                      .source_lo = zero,
                                      .source_len = piece->shape,
                                      .lo = piece->lo,
                                      .len = piece->len};
    }
    fsdp_error err = {0};
    check(fsdp_h5_view_add(
              view,
              &(fsdp_h5_dataset){
                  .link = pieces[0][which].link, .dtype = FSDP_I32, .ndim = 2, .shape = shape},
              sources, SHARDS, &err),
          &err);
}

/* The flat shards cut rows in two: five boxes of the tensor, each a range of a 1-D dataset. */
static void add_flat(fsdp_h5_view *view)
{
    static const struct {
        int shard;
        int64_t from, count, row, column;
    } ranges[] = {
        {0, 0, 4, 0, 0}, {0, 4, 1, 1, 0}, {1, 0, 3, 1, 1}, {1, 3, 1, 2, 0}, {2, 0, 3, 2, 1}};
    enum { RANGES = sizeof ranges / sizeof *ranges };
    static const int64_t shape[2] = {3, 4};
    char names[RANGES][sizeof shard_name];
    int64_t lo[RANGES][2], len[RANGES][2];
    fsdp_h5_source sources[RANGES];
    for (size_t i = 0; i < RANGES; i++) {
        name_shard(ranges[i].shard, names[i]);
        lo[i][0] = ranges[i].row;
        lo[i][1] = ranges[i].column;
        len[i][0] = 1;
        len[i][1] = ranges[i].count;
        sources[i] = (fsdp_h5_source){.file = names[i],
                                      .link = "flat",
                                      .source_ndim = 1,
                                      .source_shape = pieces[ranges[i].shard][2].shape,
                                      .source_lo = &ranges[i].from,
                                      .source_len = &ranges[i].count,
                                      .lo = lo[i],
                                      .len = len[i]};
    }
    fsdp_error err = {0};
    check(fsdp_h5_view_add(
              view,
              &(fsdp_h5_dataset){.link = "flat", .dtype = FSDP_I32, .ndim = 2, .shape = shape},
              sources, RANGES, &err),
          &err);
}

static void write_view(const char *parent)
{
    static const int64_t rows[2] = {7, 4}, columns[2] = {4, 6}, none[2] = {0, 3}, zero[1] = {0};
    static const int64_t three[1] = {3};
    fsdp_error err = {0};
    char *dir = fsdp_path_join(parent, "view");
    check(fsdp_io_mkdir(NULL, dir, &err), &err);
    for (int s = 0; s < SHARDS; s++)
        write_shard(dir, s);
    fsdp_h5_view *view = NULL;
    int64_t size = 0;
    char *path = fsdp_path_join(dir, "index.h5");
    char shard[sizeof shard_name];
    name_shard(1, shard);
    check(fsdp_h5_view_create(NULL, path, &view, &err), &err);
    add_boxes(view, 0, rows);
    add_boxes(view, 1, columns);
    add_flat(view);
    const fsdp_h5_source scalar = {.file = shard,
                                   .link = "scalar",
                                   .source_ndim = 0,
                                   .source_shape = zero,
                                   .source_lo = zero,
                                   .source_len = zero,
                                   .lo = zero,
                                   .len = zero};
    check(fsdp_h5_view_add(
              view,
              &(fsdp_h5_dataset){.link = "scalar", .dtype = FSDP_I32, .ndim = 0, .shape = zero},
              &scalar, 1, &err),
          &err);
    const fsdp_h5_source gone = {.file = "nowhere.h5",
                                 .link = "gone",
                                 .source_ndim = 1,
                                 .source_shape = three,
                                 .source_lo = zero,
                                 .source_len = three,
                                 .lo = zero,
                                 .len = three};
    check(fsdp_h5_view_add(
              view,
              &(fsdp_h5_dataset){.link = "gone", .dtype = FSDP_I32, .ndim = 1, .shape = three},
              &gone, 1, &err),
          &err);
    check(fsdp_h5_view_add(
              view,
              &(fsdp_h5_dataset){.link = "gone.f32", .dtype = FSDP_F32, .ndim = 1, .shape = three},
              &gone, 1, &err),
          &err);
    check(
        fsdp_h5_view_add(view,
                         &(fsdp_h5_dataset){
                             .link = "gone.f8", .dtype = FSDP_F8_E4M3FN, .ndim = 1, .shape = three},
                         &gone, 1, &err),
        &err);
    check(fsdp_h5_view_add(
              view,
              &(fsdp_h5_dataset){.link = "empty", .dtype = FSDP_F32, .ndim = 2, .shape = none},
              NULL, 0, &err),
          &err);
    check(fsdp_h5_view_link(view, "tied", "rows", &err), &err);
    check(fsdp_h5_view_close(view, &size, &err), &err);
    fsdp_free(path);
    fsdp_free(dir);
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    write_types(argv[1]);
    write_compressed(argv[1]);
    write_view(argv[1]);
    return 0;
}
