/* The catalog of a foreign checkpoint: what the builder refuses, and that boxes come out of chunks of any
 * strides, packings and byte orders as a plain loop would read them. */
#include "formats/source.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

enum { FILE_BYTES = 3 << 20 };

static char directory[64];
static uint8_t *bytes; /* of the file */
static fsdp_source *source;
static fsdp_error err;
static int file;

static const char *path_of(const char *name)
{
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return path;
}

static void put_file(const char *name, const void *data, size_t size)
{
    FILE *out = fopen(path_of(name), "wb");
    cr_assert(out && fwrite(data, 1, size, out) == size && fclose(out) == 0);
}

static void begin(void)
{
    strcpy(directory, "/tmp/fsdp-source-XXXXXX");
    cr_assert(mkdtemp(directory));
    bytes = malloc(FILE_BYTES);
    for (size_t i = 0; i < FILE_BYTES; i++)
        bytes[i] = (uint8_t)(i * 2654435761u >> 13);
    put_file("data", bytes, FILE_BYTES);
    cr_assert_eq(fsdp_source_create(NULL, directory, "test", &source, &err), FSDP_OK);
    cr_assert_eq(fsdp_source_add_file(source, path_of("data"), true, &file, &err), FSDP_OK, "%s",
                 err.text);
}

static void end(void)
{
    fsdp_source_close(source);
    free(bytes);
    cr_assert_eq(fsdp_io_remove_tree(NULL, directory, &err), FSDP_OK);
}

TestSuite(source, .init = begin, .fini = end);

static size_t tensor_of(const char *name, fsdp_dtype dtype, int ndim, const int64_t *shape)
{
    size_t number = 0;
    cr_assert_eq(fsdp_source_add_tensor(source, name, strlen(name),
                                        &(fsdp_source_shape){dtype, ndim, shape}, &number, &err),
                 FSDP_OK, "%s", err.text);
    return number;
}

static fsdp_status add_box(size_t tensor, const int64_t *lo, const int64_t *len, int64_t offset)
{
    fsdp_source_chunk chunk = {
        .lo = lo, .len = len, .offset = offset, .file = file, .stream = FSDP_NO_STREAM};
    return fsdp_source_add_chunk(source, tensor, &chunk, &err);
}

/* --- names ------------------------------------------------------------------------------------ */

Test(source, the_second_of_a_name_gets_a_number_that_is_free)
{
    static const char *const names[] = {"a", "a#2", "a", "a", "a#2"};
    static const char *const wanted[] = {"a", "a#2", "a#3", "a#4", "a#2#2"};
    for (size_t i = 0; i < 5; i++)
        tensor_of(names[i], FSDP_U8, 1, (int64_t[]){0});
    for (size_t i = 0; i < 5; i++)
        cr_expect_str_eq(fsdp_source_entry_at(source, i)->name, wanted[i]);
}

Test(source, names_have_a_limit_together)
{
    enum { SIZE = 65535, FIT = FSDP_SOURCE_NAMES / SIZE };
    char *name = malloc(SIZE);
    cr_assert(name);
    memset(name, 'n', SIZE);
    for (int i = 0; i <= FIT; i++) {
        name[SIZE - 1] = (char)('a' + i % 16);
        name[SIZE - 2] = (char)('a' + i / 16 % 16);
        name[SIZE - 3] = (char)('a' + i / 256);
        fsdp_value value = {0};
        fsdp_status st = fsdp_source_add_value(source, name, SIZE, &value, NULL, &err);
        cr_assert_eq(st, i < FIT ? FSDP_OK : FSDP_ERR_LIMIT, "%d: %s", i, err.text);
    }
    cr_expect(strstr(err.text, "names take over 256 MiB"), "%s", err.text);
    free(name);
}

/* Names of dots alone: their paths are four times as large. */
Test(source, paths_count_among_the_names)
{
    enum { COUNT = 1000, SIZE = COUNT + 7, FIT = FSDP_SOURCE_NAMES / (SIZE + 4 * COUNT) };
    char name[SIZE + 1];
    int32_t path[COUNT] = {0};
    memset(name, '.', sizeof name);
    path[COUNT - 1] = 8;
    fsdp_source_nest(source, path, COUNT);
    for (int i = 0; i <= FIT; i++) {
        snprintf(name + COUNT - 1, 9, "%08d", i);
        fsdp_value value = {0};
        fsdp_status st = fsdp_source_add_value(source, name, SIZE, &value, NULL, &err);
        cr_assert_eq(st, i < FIT ? FSDP_OK : FSDP_ERR_LIMIT, "%d: %s", i, err.text);
    }
    cr_expect(strstr(err.text, "names take over 256 MiB"), "%s", err.text);
    cr_expect_eq(fsdp_source_entry_at(source, 0)->path_count, COUNT);
}

Test(source, names_that_are_not_utf8_are_refused)
{
    fsdp_value value = fsdp_value_bool(true);
    cr_assert_eq(fsdp_source_add_value(source, "\xFF", 1, &value, NULL, &err), FSDP_ERR_REFUSED);
    cr_assert_eq(value.kind, FSDP_VALUE_BOOL);
}

Test(source, shapes_of_a_file_are_damage_or_a_limit)
{
    int64_t shape[FSDP_MAX_DIMS + 1] = {1};
    size_t number;
    cr_expect_eq(fsdp_source_add_tensor(source, "a", 1,
                                        &(fsdp_source_shape){FSDP_F32, 1, (int64_t[]){-1}}, &number,
                                        &err),
                 FSDP_ERR_DAMAGED);
    cr_expect_eq(
        fsdp_source_add_tensor(source, "a", 1,
                               &(fsdp_source_shape){FSDP_F32, 2, (int64_t[]){INT64_MAX / 2, 3}},
                               &number, &err),
        FSDP_ERR_DAMAGED);
    cr_expect_eq(fsdp_source_add_tensor(source, "a", 1,
                                        &(fsdp_source_shape){FSDP_F32, FSDP_MAX_DIMS + 1, shape},
                                        &number, &err),
                 FSDP_ERR_LIMIT);
    cr_expect_eq(fsdp_source_entry_count(source), 0);
}

/* --- files ------------------------------------------------------------------------------------ */

static fsdp_status add_name(const char *name)
{
    int number;
    err = (fsdp_error){0};
    return fsdp_source_add_file(source, path_of(name), true, &number, &err);
}

Test(source, names_of_files_stay_below_the_directory)
{
    put_file("plain", "x", 1);
    cr_assert_eq(mkdir(path_of("sub"), 0755), 0);
    put_file("sub/plain", "x", 1);
    cr_assert_eq(symlink("/etc/hostname", path_of("link")), 0);
    cr_assert_eq(symlink("/etc", path_of("away")), 0);
    cr_expect_eq(add_name("plain"), FSDP_OK, "%s", err.text);
    cr_expect_eq(add_name("sub/plain"), FSDP_OK, "%s", err.text);
    static const char *const refused[] = {
        "link",   "away/hostname", "../x",    "sub/../plain", "",
        "/plain", "sub//plain",    "./plain", "sub/./plain",  "sub\\plain"};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        cr_expect_eq(add_name(refused[i]), FSDP_ERR_REFUSED, "'%s': %s", refused[i], err.text);
    cr_expect_eq(add_name("none"), FSDP_ERR_NOT_FOUND);
}

Test(source, links_into_the_blobs_of_a_cache_are_followed)
{
    char snapshot[160];
    cr_assert_eq(mkdir(path_of("blobs"), 0755), 0);
    cr_assert_eq(mkdir(path_of("snapshots"), 0755), 0);
    cr_assert_eq(mkdir(path_of("snapshots/rev"), 0755), 0);
    put_file("blobs/1234", "x", 1);
    cr_assert_eq(symlink("../../blobs/1234", path_of("snapshots/rev/inside")), 0);
    cr_assert_eq(symlink("../../data", path_of("snapshots/rev/outside")), 0);
    snprintf(snapshot, sizeof snapshot, "%s", path_of("snapshots/rev"));
    fsdp_source *cached;
    int number;
    cr_assert_eq(fsdp_source_create(NULL, snapshot, "test", &cached, &err), FSDP_OK);
    cr_expect_eq(fsdp_source_add_file(cached, path_of("snapshots/rev/inside"), true, &number, &err),
                 FSDP_OK, "%s", err.text);
    cr_expect_eq(
        fsdp_source_add_file(cached, path_of("snapshots/rev/outside"), true, &number, &err),
        FSDP_ERR_REFUSED);
    fsdp_source_close(cached);
}

/* A source in snapshots/rev/unet of the cache, and a file in it that is a link to `target`. */
static fsdp_status add_link_through(fsdp_io *io, const char *target)
{
    char folder[160], link[200];
    int number;
    fsdp_source *cached;
    snprintf(folder, sizeof folder, "%s", path_of("snapshots/rev/unet"));
    snprintf(link, sizeof link, "%s/link", folder);
    (void)unlink(link);
    cr_assert_eq(symlink(target, link), 0);
    cr_assert_eq(fsdp_source_create(io, folder, "test", &cached, NULL), FSDP_OK);
    err = (fsdp_error){0};
    fsdp_status status = fsdp_source_add_file(cached, link, true, &number, &err);
    fsdp_source_close(cached);
    return status;
}

static fsdp_status add_link_in_folder(const char *target)
{
    return add_link_through(NULL, target);
}

Test(source, a_blob_is_a_file_of_the_same_cache)
{
    cr_assert_eq(mkdir(path_of("blobs"), 0755), 0);
    cr_assert_eq(mkdir(path_of("snapshots"), 0755), 0);
    cr_assert_eq(mkdir(path_of("snapshots/rev"), 0755), 0);
    cr_assert_eq(mkdir(path_of("snapshots/rev/unet"), 0755), 0);
    put_file("blobs/1234", "x", 1);
    cr_assert_eq(symlink("/etc/hostname", path_of("blobs/away")), 0);
    cr_expect_eq(add_link_in_folder("../../../blobs/1234"), FSDP_OK, "%s", err.text);
    cr_expect_eq(add_link_in_folder("../../../blobs/away"), FSDP_ERR_REFUSED);
    cr_expect_eq(add_link_in_folder("/etc/hostname"), FSDP_ERR_REFUSED);
    cr_expect(strstr(err.text, "--follow-links"), "%s", err.text);
    cr_expect_eq(add_link_through(fsdp_io_posix_trusting(FSDP_TRUST_LINKS), "/etc/hostname"),
                 FSDP_OK, "%s", err.text);
}

Test(source, a_link_in_the_place_of_blobs_is_none)
{
    cr_assert_eq(mkdir(path_of("snapshots"), 0755), 0);
    cr_assert_eq(mkdir(path_of("snapshots/rev"), 0755), 0);
    cr_assert_eq(mkdir(path_of("snapshots/rev/unet"), 0755), 0);
    cr_assert_eq(symlink("/etc", path_of("blobs")), 0);
    cr_expect_eq(add_link_in_folder("../../../blobs/hostname"), FSDP_ERR_REFUSED);
}

Test(source, more_files_than_may_be_open_are_read)
{
    enum { FILES = 700 };
    int numbers[FILES];
    char name[32];
    for (int i = 0; i < FILES; i++) {
        snprintf(name, sizeof name, "f%d", i);
        put_file(name, &i, sizeof i);
        cr_assert_eq(fsdp_source_add_file(source, path_of(name), true, &numbers[i], &err), FSDP_OK);
    }
    for (int i = 0, value; i < FILES; i++) {
        cr_assert_eq(fsdp_source_pread(source, numbers[i], &value, sizeof value, 0, &err), FSDP_OK,
                     "%s", err.text);
        cr_assert_eq(value, i);
    }
    put_file("f0", "longer than it was", 18);
    int value;
    cr_expect_eq(fsdp_source_pread(source, numbers[0], &value, sizeof value, 0, &err),
                 FSDP_ERR_DAMAGED, "a file that was replaced must not be read on");
}

/* --- coverage --------------------------------------------------------------------------------- */

Test(source, a_chunk_must_lie_in_its_tensor_and_its_file)
{
    size_t number = tensor_of("a", FSDP_F32, 1, (int64_t[]){4});
    cr_expect_eq(add_box(number, (int64_t[]){2}, (int64_t[]){3}, 0), FSDP_ERR_DAMAGED);
    cr_expect_eq(add_box(number, (int64_t[]){0}, (int64_t[]){4}, FILE_BYTES - 15),
                 FSDP_ERR_DAMAGED);
    cr_expect_eq(add_box(number, (int64_t[]){0}, (int64_t[]){4}, -1), FSDP_ERR_DAMAGED);
    fsdp_source_chunk backwards = {.lo = (int64_t[]){0},
                                   .len = (int64_t[]){4},
                                   .strides = (int64_t[]){-4},
                                   .offset = 8,
                                   .file = file,
                                   .stream = FSDP_NO_STREAM};
    cr_expect_eq(fsdp_source_add_chunk(source, number, &backwards, &err), FSDP_ERR_DAMAGED);
    backwards.strides = (int64_t[]){INT64_MAX / 2};
    cr_expect_eq(fsdp_source_add_chunk(source, number, &backwards, &err), FSDP_ERR_DAMAGED);
}

Test(source, overlaps_and_holes_are_damage)
{
    size_t number = tensor_of("a", FSDP_U8, 2, (int64_t[]){4, 4});
    add_box(number, (int64_t[]){0, 0}, (int64_t[]){4, 2}, 0);
    add_box(number, (int64_t[]){0, 2}, (int64_t[]){3, 2}, 0);
    cr_assert_eq(fsdp_source_complete(source, &err), FSDP_ERR_DAMAGED);
    cr_expect(strstr(err.text, "2 of the 16") && strstr(err.text, "[3:4, 2:3]"), "%s", err.text);
}

Test(source, equal_volumes_with_an_overlap_are_damage)
{
    size_t number = tensor_of("a", FSDP_U8, 2, (int64_t[]){4, 4});
    add_box(number, (int64_t[]){0, 0}, (int64_t[]){4, 2}, 0);
    add_box(number, (int64_t[]){1, 1}, (int64_t[]){3, 2}, 0);
    add_box(number, (int64_t[]){0, 3}, (int64_t[]){2, 1}, 0);
    cr_assert_eq(fsdp_source_complete(source, &err), FSDP_ERR_DAMAGED);
    cr_expect(strstr(err.text, "overlap"), "%s", err.text);
}

Test(source, a_grid_of_many_chunks_is_checked_fast_and_found_again)
{
    enum { SIDE = 200 };
    size_t number = tensor_of("a", FSDP_U16, 2, (int64_t[]){SIDE, SIDE});
    for (int64_t i = 0; i < SIDE * SIDE; i++) {
        int64_t mixed = i * 7919 % (SIDE * SIDE);
        cr_assert_eq(
            add_box(number, (int64_t[]){mixed / SIDE, mixed % SIDE}, (int64_t[]){1, 1}, 2 * mixed),
            FSDP_OK);
    }
    cr_assert_eq(fsdp_source_complete(source, &err), FSDP_OK, "%s", err.text);
    fsdp_box box = {.ndim = 2, .lo = {17, 5}, .len = {3, 4}};
    uint16_t got[12], wanted;
    fsdp_source_reader reader = {0};
    cr_assert_eq(fsdp_source_read(source, number, &box, got, &reader, &err), FSDP_OK);
    for (int i = 0; i < 12; i++) {
        memcpy(&wanted, bytes + 2 * ((17 + i / 4) * SIDE + 5 + i % 4), 2);
        cr_expect_eq(got[i], wanted);
    }
    fsdp_source_reader_release(&reader);
}

/* Two tensors of four rows, a chunk per row; the rows' bytes follow one another. */
static void expect_rows(const size_t tensors[2])
{
    fsdp_source_reader reader = {0};
    for (int t = 0; t < 2; t++) {
        uint8_t got[16];
        fsdp_box box = {.ndim = 2, .lo = {0, 0}, .len = {4, 4}};
        cr_assert_eq(fsdp_source_tensor_at(source, tensors[t])->chunk_count, 4);
        cr_assert_eq(fsdp_source_read(source, tensors[t], &box, got, &reader, &err), FSDP_OK);
        cr_expect_arr_eq(got, bytes + 16 * t, sizeof got);
    }
    fsdp_source_reader_release(&reader);
}

static void add_row(size_t tensor, int64_t row, int64_t offset)
{
    cr_assert_eq(add_box(tensor, (int64_t[]){row, 0}, (int64_t[]){1, 4}, offset + 4 * row),
                 FSDP_OK);
}

Test(source, chunks_that_come_tensor_by_tensor_stay_where_they_are)
{
    size_t tensors[2] = {tensor_of("a", FSDP_U8, 2, (int64_t[]){4, 4}),
                         tensor_of("b", FSDP_U8, 2, (int64_t[]){4, 4})};
    for (int t = 0; t < 2; t++)
        for (int64_t row = 0; row < 4; row++)
            add_row(tensors[t], 3 - row, 16 * t);
    cr_assert_eq(fsdp_source_complete(source, &err), FSDP_OK, "%s", err.text);
    expect_rows(tensors);
}

Test(source, chunks_that_come_mixed_are_put_to_their_tensors)
{
    size_t tensors[2] = {tensor_of("a", FSDP_U8, 2, (int64_t[]){4, 4}),
                         tensor_of("b", FSDP_U8, 2, (int64_t[]){4, 4})};
    size_t empty = tensor_of("c", FSDP_U8, 1, (int64_t[]){0});
    for (int64_t row = 0; row < 4; row++)
        for (int t = 1; t >= 0; t--)
            add_row(tensors[t], row, 16 * t);
    cr_assert_eq(fsdp_source_complete(source, &err), FSDP_OK, "%s", err.text);
    cr_expect_eq(fsdp_source_tensor_at(source, empty)->chunk_count, 0);
    expect_rows(tensors);
}

Test(source, what_was_expected_may_be_more_or_less_than_what_comes)
{
    static const size_t expected[] = {0, 1, 2, 50, SIZE_MAX / 4};
    size_t tensors[2] = {tensor_of("a", FSDP_U8, 2, (int64_t[]){4, 4}), 0};
    add_row(tensors[0], 0, 0);
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++)
        fsdp_source_expect(source, expected[i], 4 * expected[i]);
    tensors[1] = tensor_of("b", FSDP_U8, 2, (int64_t[]){4, 4});
    for (int64_t row = 0; row < 8; row++)
        if (row != 0)
            add_row(tensors[row / 4], row % 4, 16 * (row / 4));
    tensor_of("a", FSDP_U8, 1, (int64_t[]){0});
    cr_expect_str_eq(fsdp_source_entry_at(source, 2)->name, "a#2");
    cr_assert_eq(fsdp_source_complete(source, &err), FSDP_OK, "%s", err.text);
    expect_rows(tensors);
}

Test(source, a_repeated_element_of_many_gigabytes_is_refused)
{
    size_t number = tensor_of("a", FSDP_F32, 1, (int64_t[]){(int64_t)1 << 40});
    fsdp_source_chunk chunk = {.lo = (int64_t[]){0},
                               .len = (int64_t[]){(int64_t)1 << 40},
                               .strides = (int64_t[]){0},
                               .file = file,
                               .stream = FSDP_NO_STREAM};
    cr_assert_eq(fsdp_source_add_chunk(source, number, &chunk, &err), FSDP_OK);
    cr_assert_eq(fsdp_source_complete(source, &err), FSDP_ERR_REFUSED);
}

/* --- reading ---------------------------------------------------------------------------------- */

typedef struct view {
    int ndim;
    int64_t shape[3], strides[3], offset;
} view;

static int64_t place_in(const view *v, const int64_t *index)
{
    int64_t at = v->offset;
    for (int dim = 0; dim < v->ndim; dim++)
        at += index[dim] * v->strides[dim];
    return at;
}

static void compare_box(size_t number, const view *v, const fsdp_box *box)
{
    int64_t count = fsdp_box_count(box);
    uint32_t *got = calloc((size_t)count + 1, 4);
    fsdp_source_reader reader = {0};
    cr_assert_eq(fsdp_source_read(source, number, box, got, &reader, &err), FSDP_OK, "%s",
                 err.text);
    for (int64_t i = 0; i < count; i++) {
        int64_t index[3], rest = i;
        for (int dim = v->ndim - 1; dim >= 0; dim--) {
            index[dim] = box->lo[dim] + rest % box->len[dim];
            rest /= box->len[dim];
        }
        cr_assert_eq(memcmp(&got[i], bytes + place_in(v, index), 4), 0, "element %d", (int)i);
    }
    cr_assert_eq(got[count], 0);
    fsdp_source_reader_release(&reader);
    free(got);
}

static const view views[] = {
    {1, {700000}, {4}, 12},
    {2, {300, 600}, {2400, 4}, 7},        /* unaligned rows */
    {2, {600, 300}, {4, 2400}, 0},        /* transposed */
    {2, {64, 8}, {32768, 4}, 100},        /* far apart */
    {2, {8, 9000}, {40000, 4}, 0},        /* long runs */
    {2, {300, 200}, {-4000, 8}, 1300000}, /* backwards, every second */
    {2, {50, 1000}, {0, 4}, 0},           /* expanded */
    {2, {1000, 50}, {4, 0}, 0},
    {3, {20, 30, 40}, {4, 3200, 80}, 0}, /* permuted */
    {3, {3, 40, 2000}, {400000, 4, 160}, 4},
    {3, {2, 1, 350000}, {1, 99, 4}, 0}, /* overlapping */
    {0, {0}, {0}, 40},
};

Test(source, boxes_of_strided_views_are_what_a_loop_reads)
{
    enum { VIEWS = sizeof views / sizeof *views };
    size_t numbers[VIEWS];
    char name[8];
    int64_t zeros[3] = {0};
    for (size_t i = 0; i < VIEWS; i++) {
        snprintf(name, sizeof name, "v%zu", i);
        numbers[i] = tensor_of(name, FSDP_U32, views[i].ndim, views[i].shape);
        fsdp_source_chunk chunk = {.lo = zeros,
                                   .len = views[i].shape,
                                   .strides = views[i].strides,
                                   .offset = views[i].offset,
                                   .file = file,
                                   .stream = FSDP_NO_STREAM};
        cr_assert_eq(fsdp_source_add_chunk(source, numbers[i], &chunk, &err), FSDP_OK, "%s %s",
                     name, err.text);
    }
    cr_assert_eq(fsdp_source_complete(source, &err), FSDP_OK, "%s", err.text);
    srand(1);
    for (size_t i = 0; i < VIEWS; i++) {
        fsdp_box box = fsdp_box_whole(views[i].ndim, views[i].shape);
        compare_box(numbers[i], &views[i], &box);
        for (int round = 0; round < 5; round++) {
            for (int dim = 0; dim < views[i].ndim; dim++) {
                box.lo[dim] = rand() % views[i].shape[dim];
                box.len[dim] = 1 + rand() % (views[i].shape[dim] - box.lo[dim]);
            }
            compare_box(numbers[i], &views[i], &box);
        }
    }
}

static void read_fixed(fsdp_dtype dtype, unsigned fix, const void *stored, size_t size, void *got)
{
    int number;
    char name[32];
    snprintf(name, sizeof name, "fix-%d-%u", (int)dtype, fix);
    put_file(name, stored, size);
    cr_assert_eq(fsdp_source_add_file(source, path_of(name), true, &number, &err), FSDP_OK);
    int64_t shape[2] = {2, (int64_t)(size / fsdp_dtype_size(dtype) / 2)};
    size_t tensor = tensor_of(name, dtype, 2, shape);
    for (int64_t part = 0; part < 2; part++) {
        fsdp_source_chunk chunk = {
            .lo = (int64_t[]){0, part},
            .len = (int64_t[]){2, part ? shape[1] - 1 : 1},
            .strides = (int64_t[]){(int64_t)size / 2, (int64_t)fsdp_dtype_size(dtype)},
            .offset = part * (int64_t)fsdp_dtype_size(dtype),
            .file = number,
            .stream = FSDP_NO_STREAM,
            .fix = fix};
        cr_assert_eq(fsdp_source_add_chunk(source, tensor, &chunk, &err), FSDP_OK, "%s", err.text);
    }
    cr_assert_eq(fsdp_source_complete(source, &err), FSDP_OK, "%s", err.text);
    fsdp_box box = fsdp_box_whole(2, shape);
    fsdp_source_reader reader = {0};
    cr_assert_eq(fsdp_source_read(source, tensor, &box, got, &reader, &err), FSDP_OK);
    fsdp_source_reader_release(&reader);
}

Test(source, byte_order_is_turned_in_each_half_of_a_complex_number)
{
    uint8_t stored[32], got[32];
    for (uint8_t i = 0; i < 32; i++)
        stored[i] = i;
    read_fixed(FSDP_C64, FSDP_FIX_SWAP, stored, 32, got);
    for (int i = 0; i < 32; i++)
        cr_expect_eq(got[i], stored[i / 4 * 4 + 3 - i % 4]);
}

Test(source, conjugates_flip_the_imaginary_signs)
{
    float stored[8] = {1, 2, -3, -0.0f, 5, -6, 7, 8}, got[8];
    read_fixed(FSDP_C64, FSDP_FIX_CONJUGATE | FSDP_FIX_NEGATE, stored, sizeof stored, got);
    float wanted[8] = {-1, 2, 3, -0.0f, -5, -6, -7, 8};
    cr_expect_arr_eq(got, wanted, sizeof wanted);
}

Test(source, integers_are_negated_as_numbers)
{
    int32_t stored[4] = {1, -256, 0, INT32_MIN}, got[4];
    read_fixed(FSDP_I32, FSDP_FIX_NEGATE, stored, sizeof stored, got);
    int32_t wanted[4] = {-1, 256, 0, INT32_MIN};
    cr_expect_arr_eq(got, wanted, sizeof wanted);
}

/* --- packed streams --------------------------------------------------------------------------- */

static size_t deflate_all(uint8_t *to, size_t room)
{
    z_stream z = {0};
    deflateInit2(&z, 1, Z_DEFLATED, -MAX_WBITS, 8, Z_DEFAULT_STRATEGY);
    z.next_in = bytes;
    z.avail_in = FILE_BYTES;
    z.next_out = to;
    z.avail_out = (uInt)room;
    cr_assert_eq(deflate(&z, Z_FINISH), Z_STREAM_END);
    deflateEnd(&z);
    return room - z.avail_out;
}

static size_t pack(fsdp_packing packing, uint8_t *to, size_t room)
{
    return packing == FSDP_PACKING_DEFLATE ? deflate_all(to, room)
                                           : ZSTD_compress(to, room, bytes, FILE_BYTES, 1);
}

static int64_t stored_size;

static fsdp_source_stream put_packed(fsdp_packing packing, int64_t cut)
{
    size_t room = ZSTD_compressBound(FILE_BYTES) + FILE_BYTES / 8;
    uint8_t *packed = malloc(room);
    stored_size = (int64_t)pack(packing, packed, room) - cut;
    put_file("packed", packed, (size_t)stored_size);
    free(packed);
    int number;
    cr_assert_eq(fsdp_source_add_file(source, path_of("packed"), true, &number, &err), FSDP_OK);
    return (fsdp_source_stream){.file = number,
                                .packing = packing,
                                .stored = stored_size,
                                .size = FILE_BYTES,
                                .has_crc = true,
                                .crc = (uint32_t)crc32(0, bytes, FILE_BYTES)};
}

static void compare_range(int stream, int64_t offset, size_t size)
{
    uint8_t *got = malloc(size);
    cr_assert_eq(fsdp_source_stream_pread(source, stream, got, size, offset, &err), FSDP_OK, "%s",
                 err.text);
    cr_assert_eq(memcmp(got, bytes + offset, size), 0);
    free(got);
}

static void read_back_and_forth(fsdp_packing packing, int64_t memory)
{
    fsdp_source_stream where = put_packed(packing, 0);
    int stream;
    fsdp_source_set_memory(source, memory, directory);
    cr_assert_eq(fsdp_source_add_stream(source, &where, &stream, &err), FSDP_OK, "%s", err.text);
    compare_range(stream, 100, 70000);
    compare_range(stream, 1000000, 2000000);
    for (int round = 0; round < 5; round++) {
        compare_range(stream, 5, 1000);
        compare_range(stream, FILE_BYTES - 1000, 1000);
    }
    cr_assert_eq(fsdp_source_check(source, 0, NULL, &err), FSDP_OK, "%s", err.text);
}

Test(source, packed_bytes_in_memory_are_what_went_in)
{
    read_back_and_forth(FSDP_PACKING_DEFLATE, (int64_t)1 << 30);
}

Test(source, packed_bytes_are_spooled_when_memory_is_small)
{
    read_back_and_forth(FSDP_PACKING_DEFLATE, 1000);
}

Test(source, zstd_does_the_same)
{
    read_back_and_forth(FSDP_PACKING_ZSTD, 1000);
}

Test(source, a_stream_of_unknown_size_is_measured)
{
    fsdp_source_stream where = put_packed(FSDP_PACKING_ZSTD, 0);
    where.size = -1;
    int stream;
    cr_assert_eq(fsdp_source_add_stream(source, &where, &stream, &err), FSDP_OK, "%s", err.text);
    cr_expect_eq(fsdp_source_stream_size(source, stream), FILE_BYTES);
}

/* --- limits before the first read ------------------------------------------------------------- */

enum { SIDE = 512 }; /* bytes a row: 3 MiB are 6144 rows */

static int add_packed(int64_t memory)
{
    fsdp_source_stream where = put_packed(FSDP_PACKING_DEFLATE, 0);
    int stream;
    fsdp_source_set_memory(source, memory, directory);
    cr_assert_eq(fsdp_source_add_stream(source, &where, &stream, &err), FSDP_OK, "%s", err.text);
    return stream;
}

/* A tensor whose rows, or columns, follow one another in the stream. */
static size_t add_unpacked(int stream, bool by_columns)
{
    const int64_t shape[] = {FILE_BYTES / SIDE, SIDE}, lo[] = {0, 0};
    const int64_t columns[] = {1, FILE_BYTES / SIDE};
    size_t tensor = tensor_of(by_columns ? "columns" : "rows", FSDP_U8, 2, shape);
    fsdp_source_chunk chunk = {.lo = lo,
                               .len = shape,
                               .strides = by_columns ? columns : NULL,
                               .file = file,
                               .stream = stream};
    cr_assert_eq(fsdp_source_add_chunk(source, tensor, &chunk, &err), FSDP_OK, "%s", err.text);
    return tensor;
}

static int64_t announced(bool by_columns, bool repeated, int64_t memory)
{
    int stream = add_packed(memory);
    size_t tensor = add_unpacked(stream, by_columns);
    cr_assert_eq(fsdp_source_complete(source, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_source_announce(source, tensor, repeated, &err), FSDP_OK, "%s", err.text);
    return fsdp_source_spool_bytes(source);
}

Test(source, rows_in_order_are_not_spooled)
{
    cr_expect_eq(announced(false, false, 1 << 20), 0);
}

Test(source, columns_are_spooled)
{
    cr_expect_eq(announced(true, false, 1 << 20), FILE_BYTES);
}

Test(source, columns_that_fit_into_memory_are_not_spooled)
{
    cr_expect_eq(announced(true, true, (int64_t)4 * FILE_BYTES), 0);
}

Test(source, what_is_read_again_and_again_is_spooled)
{
    cr_expect_eq(announced(false, true, 1 << 20), FILE_BYTES);
}

/* One decode, and then any order: what was announced is what happens. */
Test(source, an_announced_spool_is_right)
{
    fsdp_source_reader reader = {0};
    uint8_t got[16];
    cr_assert_eq(announced(true, false, 1 << 20), FILE_BYTES);
    for (int64_t row = FILE_BYTES / SIDE - 16; row >= 0; row -= 500) {
        const fsdp_box box = {2, {row, 7}, {16, 1}};
        cr_assert_eq(fsdp_source_read(source, 0, &box, got, &reader, &err), FSDP_OK, "%s",
                     err.text);
        cr_expect_arr_eq(got, bytes + 7 * (FILE_BYTES / SIDE) + row, 16);
    }
    cr_assert_eq(fsdp_source_check(source, 0, &reader, &err), FSDP_OK, "%s", err.text);
    fsdp_source_reader_release(&reader);
}

/* Halves side by side are decoded side by side. */
Test(source, columns_of_chunks_are_spooled_when_memory_cannot_hold_them_together)
{
    enum { PARTS = 8 };
    const int64_t shape[] = {FILE_BYTES / SIDE, (int64_t)PARTS * SIDE};
    size_t tensor = tensor_of("wide", FSDP_U8, 2, shape);
    for (int64_t i = 0; i < PARTS; i++) {
        const int64_t lo[] = {0, i * SIDE}, len[] = {FILE_BYTES / SIDE, SIDE};
        fsdp_source_chunk chunk = {
            .lo = lo, .len = len, .file = file, .stream = add_packed(1 << 20)};
        cr_assert_eq(fsdp_source_add_chunk(source, tensor, &chunk, &err), FSDP_OK, "%s", err.text);
    }
    cr_assert_eq(fsdp_source_complete(source, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_source_announce(source, tensor, false, &err), FSDP_OK, "%s", err.text);
    cr_expect_eq(fsdp_source_spool_bytes(source), (int64_t)PARTS * FILE_BYTES);
}

static void expect_damage(fsdp_source_stream where, const char *what)
{
    int stream;
    cr_assert_eq(fsdp_source_add_stream(source, &where, &stream, &err), FSDP_OK, "%s", err.text);
    err = (fsdp_error){0};
    cr_expect_eq(fsdp_source_check(source, (size_t)stream, NULL, &err), FSDP_ERR_DAMAGED);
    cr_expect(strstr(err.text, what), "%s", err.text);
}

Test(source, streams_that_lie_are_damage)
{
    fsdp_source_stream where = put_packed(FSDP_PACKING_DEFLATE, 0);
    fsdp_source_stream longer = where, shorter = where, cut = where, other = where;
    longer.size++;
    expect_damage(longer, "decode to fewer bytes");
    shorter.size--;
    shorter.has_crc = false;
    expect_damage(shorter, "decode to more bytes");
    cut.stored -= 100;
    expect_damage(cut, "end too early");
    other.crc ^= 1;
    expect_damage(other, "CRC-32");
    other.crc ^= 1;
    other.offset = 1;
    other.stored--;
    expect_damage(other, "");
}

Test(source, a_stream_of_over_a_thousandfold_of_gigabytes_is_refused)
{
    fsdp_source_stream where = put_packed(FSDP_PACKING_DEFLATE, 0);
    where.size = (int64_t)1 << 40;
    int stream;
    cr_expect_eq(fsdp_source_add_stream(source, &where, &stream, &err), FSDP_ERR_REFUSED);
}

Test(source, checksums_of_plain_bytes_are_compared)
{
    fsdp_source_reader reader = {0};
    uint32_t crc = (uint32_t)crc32(0, bytes + 10, FILE_BYTES - 10);
    cr_assert_eq(
        fsdp_source_add_crc(source,
                            &(fsdp_source_crc){"record 'x'", file, 10, FILE_BYTES - 10, crc}, &err),
        FSDP_OK);
    cr_assert_eq(
        fsdp_source_add_crc(source, &(fsdp_source_crc){"record 'y'", file, 0, 10, 77}, &err),
        FSDP_OK);
    cr_expect_eq(fsdp_source_check(source, 0, &reader, &err), FSDP_OK, "%s", err.text);
    cr_expect_eq(fsdp_source_check(source, 1, &reader, &err), FSDP_ERR_DAMAGED);
    cr_expect(strstr(err.text, "record 'y'"), "%s", err.text);
    fsdp_source_reader_release(&reader);
}

/* --- detection -------------------------------------------------------------------------------- */

Test(source, what_is_no_format_is_told_with_what_was_seen)
{
    fsdp_source *none = NULL;
    put_file("odd", "hello", 5);
    cr_expect_eq(fsdp_source_open(NULL, path_of("odd"), NULL, &none, &err), FSDP_ERR_NOT_FOUND);
    cr_expect(strstr(err.text, "68 65 6c 6c 6f") && strstr(err.text, "safetensors"), "%s",
              err.text);
    cr_expect_eq(fsdp_source_open(NULL, directory, NULL, &none, &err), FSDP_ERR_NOT_FOUND);
    cr_expect(strstr(err.text, "'odd'"), "%s", err.text);
    cr_expect_eq(fsdp_source_open(NULL, path_of("none"), NULL, &none, &err), FSDP_ERR_NOT_FOUND);
    cr_expect(strstr(err.text, "No such file"), "%s", err.text);
    cr_expect_null(none);
}
