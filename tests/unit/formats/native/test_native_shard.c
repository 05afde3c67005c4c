/*
 * Shard files without the layers above: boxes written in any pieces come back bit for bit, raw and
 * encoded, packed and strided, and a file's bytes depend on nothing but what is in it.
 */
#include "formats/native/native_index.h"

#include "base/core/mem.h"
#include "tests/support/sample_state.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char folder[64];

static void make_folder(void)
{
    strcpy(folder, "/tmp/fsdp-test-XXXXXX");
    cr_assert_not_null(mkdtemp(folder));
}

static void remove_folder(void)
{
    cr_assert_eq(fsdp_io_remove_tree(NULL, folder, NULL), FSDP_OK);
}

TestSuite(native_shard, .init = make_folder, .fini = remove_folder, .timeout = 120);

#define ASSERT_OK(call)                                \
    do {                                               \
        fsdp_error err = {0};                          \
        cr_assert_eq((call), FSDP_OK, "%s", err.text); \
    } while (0)

static uint64_t random_state = 1;

static int64_t below(int64_t limit)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (int64_t)((random_state >> 33) % (uint64_t)limit);
}

/* Half of it random, half of it runs, so that frames are neither all stored nor all tiny. */
static char *make_data(size_t size, uint64_t seed)
{
    char *data = malloc(size + 1);
    random_state = seed;
    for (size_t i = 0; i < size; i++)
        data[i] = (char)(i / 4096 % 2 == 0 ? below(256) : (int64_t)(i / 700));
    return data;
}

/* --- one file with some boxes ----------------------------------------------------------------- */

enum { BOXES = 4 };

typedef struct sample {
    fsdp_shard_dataset datasets[BOXES];
    fsdp_shard_box boxes[BOXES];
    int64_t lo[BOXES][3];
    char *data[BOXES];
    fsdp_shard_opts opts;
    fsdp_file_record record;
    char path[100];
} sample;

static const int64_t shapes[BOXES][3] = {{1100, 1001, 3}, {129, 33, 0}, {0, 0, 0}, {5, 0, 0}};
static const int dims[BOXES] = {3, 2, 0, 1};
static const fsdp_dtype dtypes[BOXES] = {FSDP_F32, FSDP_F64, FSDP_I16, FSDP_C128};
static const char *const names[BOXES] = {"large", "a/b", "", "."};

static fsdp_shard_id some_id(uint32_t rank, uint32_t world)
{
    return (fsdp_shard_id){.run = {9, 8, 7}, .step = 12, .rank = rank, .world = world};
}

static void describe(sample *s, const char *name, bool encode, int64_t chunk_bytes, int threads)
{
    memset(s, 0, sizeof *s);
    snprintf(s->path, sizeof s->path, "%s/%s.h5", folder, name);
    s->opts = (fsdp_shard_opts){.io = fsdp_io_posix(),
                                .path = s->path,
                                .id = some_id(1, 3),
                                .encode = encode,
                                .chunk_bytes = chunk_bytes,
                                .threads = threads};
    for (uint32_t i = 0; i < BOXES; i++) {
        fsdp_box box = fsdp_box_whole(dims[i], shapes[i]);
        for (int d = 0; d < dims[i]; d++)
            s->lo[i][d] = 10 * (int64_t)i + d;
        s->datasets[i] = (fsdp_shard_dataset){.name = names[i],
                                              .name_size = strlen(names[i]),
                                              .dtype = dtypes[i],
                                              .ndim = dims[i],
                                              .shape = shapes[i]};
        s->boxes[i] = (fsdp_shard_box){.name = names[i],
                                       .name_size = strlen(names[i]),
                                       .tensor = 2 * i + 1,
                                       .part = i,
                                       .dataset = i,
                                       .packed = true,
                                       .ndim = dims[i],
                                       .lo = s->lo[i],
                                       .len = shapes[i]};
        s->data[i] = make_data((size_t)fsdp_box_count(&box) * fsdp_dtype_size(dtypes[i]), i + 1);
    }
}

static void drop(sample *s)
{
    for (int i = 0; i < BOXES; i++)
        free(s->data[i]);
}

static fsdp_shard_piece piece_of(const sample *s, size_t box, int64_t first, int64_t count)
{
    return (fsdp_shard_piece){box, first, count,
                              s->data[box] + first * (int64_t)fsdp_dtype_size(dtypes[box])};
}

/* most 0: every box as one piece. Else pieces of up to `most` elements: box after box, or in turns. */
static void write_sample(sample *s, int64_t most, bool in_turns)
{
    fsdp_shard_writer *writer;
    ASSERT_OK(fsdp_shard_create(&s->opts,
                                &(fsdp_shard_layout){s->datasets, BOXES, NULL, 0, s->boxes, BOXES},
                                &writer, &err));
    fsdp_shard_piece pieces[BOXES];
    int64_t done[BOXES] = {0};
    for (size_t left = 1; left > 0;) {
        size_t count = 0;
        left = 0;
        for (size_t i = 0; i < BOXES; i++) {
            fsdp_box box = fsdp_shard_box_box(&s->boxes[i]);
            int64_t rest = fsdp_box_count(&box) - done[i];
            bool waits = !in_turns && left > 0;
            int64_t n = most == 0 || rest == 0 ? rest : 1 + below(rest < most ? rest : most);
            n = waits ? 0 : n;
            if (n > 0)
                pieces[count++] = piece_of(s, i, done[i], n);
            done[i] += n;
            left += rest > n;
        }
        ASSERT_OK(fsdp_shard_write(writer, pieces, count, &err));
    }
    ASSERT_OK(fsdp_shard_finish(writer, &s->record, &err));
}

/* --- reading it back -------------------------------------------------------------------------- */

static void check_cut(const fsdp_stored_box *box)
{
    int64_t next = 0;
    for (int64_t block = 0; block < box->block_count; block++) {
        int64_t first, count;
        fsdp_block_range(box, block, &first, &count);
        cr_assert_eq(first, next);
        cr_assert_gt(count, 0);
        next = first + count;
    }
    cr_assert_eq(next, box->count);
}

static void check_blocks(fsdp_shard_reader *reader, const fsdp_stored_box *box,
                         const char *expected)
{
    fsdp_decoder decoder = {0};
    char *raw = malloc(FSDP_BLOCK_BYTES);
    for (int64_t block = 0; block < box->block_count; block++) {
        int64_t first, count;
        const void *data = raw;
        fsdp_block_range(box, block, &first, &count);
        size_t size = (size_t)count * box->element_size;
        if (box->encoded)
            ASSERT_OK(fsdp_shard_decode(reader, box, block, &decoder, &data, &err));
        else
            ASSERT_OK(fsdp_shard_read(reader, box, first, count, raw, &err));
        cr_assert_eq(memcmp(data, expected + first * (int64_t)box->element_size, size), 0);
        fsdp_hash hash = fsdp_kernels_get()->hash(data, size);
        cr_assert_eq(memcmp(&hash, &box->hashes[block], sizeof hash), 0);
    }
    free(raw);
    fsdp_decoder_release(&decoder);
}

static void check_ranges(fsdp_shard_reader *reader, const fsdp_stored_box *box,
                         const char *expected)
{
    char *data = malloc((size_t)box->count * box->element_size);
    for (int i = 0; i < 20; i++) {
        int64_t first = below(box->count), count = 1 + below(box->count - first);
        ASSERT_OK(fsdp_shard_read(reader, box, first, count, data, &err));
        cr_assert_eq(memcmp(data, expected + first * (int64_t)box->element_size,
                            (size_t)count * box->element_size),
                     0);
    }
    free(data);
}

static void check_sample(const sample *s)
{
    fsdp_shard_reader *reader;
    fsdp_shard_id id = s->opts.id;
    ASSERT_OK(fsdp_shard_open(NULL, s->path, &s->record, &id, &reader, &err));
    cr_assert_eq(fsdp_shard_box_count(reader), BOXES);
    for (uint32_t i = 0; i < BOXES; i++) {
        const fsdp_stored_box *box = fsdp_shard_find(reader, 1, 2 * i + 1, i);
        cr_assert_eq(box, fsdp_shard_box_at(reader, i));
        fsdp_box stored = fsdp_stored_box_box(box), given = fsdp_shard_box_box(&s->boxes[i]);
        cr_assert(fsdp_box_equal(&stored, &given));
        cr_assert_eq(box->dtype, dtypes[i]);
        cr_assert_eq(box->name_size, strlen(names[i]));
        cr_assert_eq(memcmp(box->name, names[i], box->name_size), 0);
        cr_assert_eq(box->encoded, s->opts.encode && i < 2);
        check_cut(box);
        check_blocks(reader, box, s->data[i]);
        if (!box->encoded)
            check_ranges(reader, box, s->data[i]);
    }
    cr_assert_null(fsdp_shard_find(reader, 1, 2, 0));
    cr_assert_null(fsdp_shard_find(reader, 1, 1, 1));
    cr_assert_null(fsdp_shard_find(reader, 0, 1, 0));
    cr_assert_null(fsdp_shard_find(reader, 2, 1, 0));
    fsdp_shard_close(reader);
}

static void check_same_bytes(const char *a, const char *b)
{
    char *left, *right;
    size_t left_size, right_size;
    ASSERT_OK(fsdp_io_read_file(NULL, a, 256 << 20, &left, &left_size, &err));
    ASSERT_OK(fsdp_io_read_file(NULL, b, 256 << 20, &right, &right_size, &err));
    cr_assert_eq(left_size, right_size);
    cr_assert_eq(memcmp(left, right, left_size), 0, "'%s' and '%s' differ", a, b);
    fsdp_free(left);
    fsdp_free(right);
}

static const int thread_counts[] = {1, 2, 5};

/* The first box has 13,213,200 bytes: four raw blocks, and chunks whose last one is not full. The
 * place of a chunk depends on when it was complete, so pieces of several encoded boxes must not mix
 * here. */
static void compare_ways(bool encode, int64_t chunk_bytes)
{
    static const int64_t most[] = {0, 700000, 5003};
    char first[100] = "";
    for (int t = 0; t < 3; t++)
        for (int m = 0; m < 3; m++) {
            sample s;
            char name[40];
            snprintf(name, sizeof name, "t%d-m%d", t, m);
            describe(&s, name, encode, chunk_bytes, thread_counts[t]);
            write_sample(&s, most[m], !encode);
            if (m == 0 || t == 0)
                check_sample(&s);
            if (first[0])
                check_same_bytes(first, s.path);
            else
                strcpy(first, s.path);
            drop(&s);
        }
}

Test(native_shard, raw_files_are_equal_however_the_pieces_came)
{
    compare_ways(false, 0);
}

Test(native_shard, encoded_files_are_equal_however_the_pieces_were_cut)
{
    compare_ways(true, 0);
}

Test(native_shard, small_chunks_that_do_not_divide_the_shape_are_whole)
{
    compare_ways(true, 65536);
}

Test(native_shard, encoded_files_do_not_depend_on_the_number_of_threads)
{
    char paths[3][100];
    for (int t = 0; t < 3; t++) {
        sample s;
        char name[40];
        snprintf(name, sizeof name, "t%d", t);
        describe(&s, name, true, 100000, thread_counts[t]);
        write_sample(&s, 30011, true);
        check_sample(&s);
        strcpy(paths[t], s.path);
        check_same_bytes(paths[0], paths[t]);
        drop(&s);
    }
}

/* --- random boxes ----------------------------------------------------------------------------- */

/* One encoded box of a random shape with a random chunk size, in random pieces. */
static void round_trip(int number)
{
    int64_t shape[4];
    int ndim = 1 + (int)below(4);
    fsdp_dtype dtype = (fsdp_dtype)(1 + below(FSDP_DTYPE_COUNT - 1));
    bool is_block = fsdp_dtype_describe(dtype)->values > 1;
    for (int d = 0; d < ndim; d++)
        shape[d] = 1 + below(ndim == 1 ? 9000 : is_block ? 9 : 24);
    fsdp_shard_dataset dataset = {
        .name = "t", .name_size = 1, .dtype = dtype, .ndim = ndim, .shape = shape};
    fsdp_box whole = fsdp_box_whole(ndim, shape);
    fsdp_shard_box box = {.name = "t",
                          .name_size = 1,
                          .packed = true,
                          .ndim = ndim,
                          .lo = whole.lo,
                          .len = whole.len};
    size_t size = fsdp_dtype_size(dtype);
    int64_t count = fsdp_box_count(&whole);
    char path[100];
    snprintf(path, sizeof path, "%s/%d.h5", folder, number);
    fsdp_shard_opts opts = {.io = fsdp_io_posix(),
                            .path = path,
                            .id = some_id(0, 1),
                            .encode = below(4) > 0,
                            .chunk_bytes = 16 + below(6000),
                            .threads = 1 + (int)below(3)};
    uint64_t keep = random_state;
    char *data = make_data((size_t)count * size, (uint64_t)number);
    random_state = keep;
    fsdp_shard_writer *writer;
    fsdp_file_record record;
    ASSERT_OK(fsdp_shard_create(&opts, &(fsdp_shard_layout){&dataset, 1, NULL, 0, &box, 1}, &writer,
                                &err));
    for (int64_t done = 0; done < count;) {
        fsdp_shard_piece piece = {0, done, 1 + below(count - done), data + (size_t)done * size};
        ASSERT_OK(fsdp_shard_write(writer, &piece, 1, &err));
        done += piece.count;
    }
    ASSERT_OK(fsdp_shard_finish(writer, &record, &err));
    fsdp_shard_reader *reader;
    ASSERT_OK(fsdp_shard_open(NULL, path, &record, &opts.id, &reader, &err));
    check_cut(fsdp_shard_box_at(reader, 0));
    check_blocks(reader, fsdp_shard_box_at(reader, 0), data);
    fsdp_shard_close(reader);
    free(data);
}

Test(native_shard, boxes_of_any_shape_dtype_and_chunk_come_back)
{
    random_state = 77;
    for (int i = 0; i < 150; i += (int)test_sample_at_most(6))
        round_trip(i);
}

/* --- signs of life --- */

static void count_sign(void *user, bool long_wait)
{
    int *counts = user;
    counts[long_wait]++;
}

/* Others wait for a rank as long as it gives signs: with every piece, and before the fsync. */
Test(native_shard, a_writer_gives_signs_of_life_while_it_gets_on)
{
    for (int encode = 0; encode < 2; encode++) {
        sample s;
        int counts[2] = {0};
        describe(&s, encode ? "signs-encoded" : "signs", encode, 1 << 20, 1);
        s.opts.alive = count_sign;
        s.opts.alive_user = counts;
        s.opts.sync = true;
        fsdp_shard_writer *writer;
        ASSERT_OK(fsdp_shard_create(
            &s.opts, &(fsdp_shard_layout){s.datasets, BOXES, NULL, 0, s.boxes, BOXES}, &writer,
            &err));
        for (size_t i = 0; i < BOXES; i++) {
            fsdp_box box = fsdp_shard_box_box(&s.boxes[i]);
            fsdp_shard_piece piece = {i, 0, fsdp_box_count(&box), s.data[i]};
            ASSERT_OK(fsdp_shard_write(writer, &piece, 1, &err));
        }
        int64_t largest = 1100 * 1001 * 3 * 4;
        cr_expect_geq(counts[0], largest / (encode ? 1 << 20 : FSDP_PIECE_BYTES));
        cr_expect_eq(counts[1], 0);
        ASSERT_OK(fsdp_shard_finish(writer, &s.record, &err));
        cr_expect_eq(counts[1], 1);
        drop(&s);
    }
}

/* --- a full file: several writers, boxes inside one dataset ----------------------------------- */

enum { ROWS = 37, COLUMNS = 23, WRITERS = 3 };
static const int64_t full_shape[] = {ROWS, COLUMNS};

/* Rank 0 has the first rows, one run; the others share the columns of the rest, strided. */
static fsdp_shard_box full_box(int rank)
{
    static const fsdp_box parts[WRITERS] = {
        {2, {0, 0}, {10, COLUMNS}}, {2, {10, 0}, {27, 9}}, {2, {10, 9}, {27, 14}}};
    return (fsdp_shard_box){.name = "w",
                            .name_size = 1,
                            .packed = rank == 0,
                            .ndim = 2,
                            .lo = parts[rank].lo,
                            .len = parts[rank].len,
                            .first = fsdp_box_position(2, full_shape, parts[rank].lo)};
}

static void pack_box(const fsdp_box *box, const int32_t *whole, int32_t *packed)
{
    for (int64_t r = 0; r < box->len[0]; r++)
        memcpy(packed + r * box->len[1], whole + (box->lo[0] + r) * COLUMNS + box->lo[1],
               (size_t)box->len[1] * sizeof *packed);
}

static void write_part(fsdp_shard_writer *writer, const fsdp_box *box, const int32_t *whole)
{
    int32_t packed[ROWS * COLUMNS];
    int64_t count = fsdp_box_count(box);
    pack_box(box, whole, packed);
    for (int64_t done = 0; done < count;) {
        fsdp_shard_piece piece = {0, done, 1 + below(count - done), packed + done};
        ASSERT_OK(fsdp_shard_write(writer, &piece, 1, &err));
        done += piece.count;
    }
}

static void check_part(fsdp_shard_reader *reader, int rank, const int32_t *whole)
{
    int32_t expected[ROWS * COLUMNS], found[ROWS * COLUMNS];
    fsdp_shard_box box = full_box(rank);
    const fsdp_stored_box *stored = fsdp_shard_find(reader, (uint32_t)rank, 0, 0);
    cr_assert_not_null(stored);
    cr_assert_eq(stored, fsdp_shard_box_at(reader, (size_t)rank));
    cr_assert_eq(stored->packed, rank == 0);
    fsdp_box part = fsdp_shard_box_box(&box);
    pack_box(&part, whole, expected);
    for (int64_t first = 0; first < stored->count; first += 5)
        for (int64_t count = 1; count <= stored->count - first; count += 11) {
            ASSERT_OK(fsdp_shard_read(reader, stored, first, count, found, &err));
            cr_assert_eq(memcmp(found, expected + first, (size_t)count * sizeof *found), 0);
        }
    check_blocks(reader, stored, (const char *)expected);
}

Test(native_shard, boxes_of_several_writers_lie_inside_one_dataset)
{
    int32_t whole[ROWS * COLUMNS], found[ROWS * COLUMNS];
    for (int i = 0; i < ROWS * COLUMNS; i++)
        whole[i] = i * 7 - 1000;
    fsdp_shard_dataset dataset = {
        .name = "w", .name_size = 1, .dtype = FSDP_I32, .ndim = 2, .shape = full_shape};
    fsdp_shard_link link = {.name = "tied", .name_size = 4, .dataset = 0};
    fsdp_shard_box boxes[WRITERS];
    fsdp_shard_writer *writers[WRITERS];
    char path[100];
    snprintf(path, sizeof path, "%s/full.h5", folder);
    fsdp_shard_opts opts = {.io = fsdp_io_posix(), .path = path, .threads = 1};
    for (int r = 0; r < WRITERS; r++) {
        boxes[r] = full_box(r);
        opts.index_room += fsdp_shard_index_bytes(&dataset, &boxes[r], 1);
    }
    for (uint32_t r = 0; r < WRITERS; r++) {
        opts.id = some_id(r, WRITERS);
        if (r == 0)
            ASSERT_OK(fsdp_shard_create(&opts,
                                        &(fsdp_shard_layout){&dataset, 1, &link, 1, &boxes[r], 1},
                                        &writers[r], &err));
        else
            ASSERT_OK(fsdp_shard_join(&opts, &dataset, &boxes[r], 1, &writers[r], &err));
        fsdp_box part = fsdp_shard_box_box(&boxes[r]);
        write_part(writers[r], &part, whole);
    }
    for (int r = 0; r < WRITERS; r++) {
        fsdp_text segment = {0};
        ASSERT_OK(fsdp_shard_segment(writers[r], &segment, &err));
        size_t half = segment.size / 2;
        ASSERT_OK(fsdp_shard_put_index(writers[0], segment.data, half, &err));
        ASSERT_OK(fsdp_shard_put_index(writers[0], segment.data + half, segment.size - half, &err));
        fsdp_text_release(&segment);
    }
    fsdp_file_record record;
    for (int r = WRITERS - 1; r >= 0; r--)
        ASSERT_OK(fsdp_shard_finish(writers[r], r == 0 ? &record : NULL, &err));
    fsdp_shard_reader *reader;
    opts.id.rank = 0;
    ASSERT_OK(fsdp_shard_open(NULL, path, &record, &opts.id, &reader, &err));
    for (int r = 0; r < WRITERS; r++)
        check_part(reader, r, whole);
    fsdp_shard_close(reader);
    /* the dataset is the whole tensor, as other programs see it */
    fsdp_file *file;
    ASSERT_OK(fsdp_io_open(NULL, path, FSDP_IO_READ, &file, &err));
    ASSERT_OK(fsdp_io_read(file, path, found, sizeof found, dataset.offset, &err));
    cr_assert_eq(memcmp(found, whole, sizeof whole), 0);
    ASSERT_OK(fsdp_io_close(&file, path, &err));
}

/* --- errors of a writer ----------------------------------------------------------------------- */

Test(native_shard, gaps_and_what_is_missing_are_errors)
{
    sample s;
    fsdp_error why = {0};
    fsdp_shard_writer *writer;
    for (int encode = 0; encode < 2; encode++) {
        describe(&s, encode ? "e" : "r", encode, 0, 1);
        ASSERT_OK(fsdp_shard_create(
            &s.opts, &(fsdp_shard_layout){s.datasets, BOXES, NULL, 0, s.boxes, BOXES}, &writer,
            &err));
        fsdp_shard_piece pieces[] = {piece_of(&s, 1, 5, 10), piece_of(&s, 1, 0, 129 * 33)};
        cr_assert_eq(fsdp_shard_write(writer, &pieces[0], 1, &why), FSDP_ERR_INTERNAL);
        cr_assert_not_null(strstr(why.text, "box 1 is written out of order"), "%s", why.text);
        pieces[1].count++;
        cr_assert_eq(fsdp_shard_write(writer, &pieces[1], 1, &why), FSDP_ERR_INTERNAL);
        cr_assert_eq(fsdp_shard_finish(writer, &s.record, &why), FSDP_ERR_INTERNAL);
        cr_assert_not_null(strstr(why.text, "box 0 is incomplete"), "%s", why.text);
        drop(&s);
    }
}

Test(native_shard, a_file_that_exists_is_never_overwritten)
{
    sample s;
    fsdp_error why = {0};
    fsdp_shard_writer *writer;
    describe(&s, "x", false, 0, 1);
    write_sample(&s, 0, true);
    cr_assert_eq(fsdp_shard_create(&s.opts,
                                   &(fsdp_shard_layout){s.datasets, BOXES, NULL, 0, s.boxes, BOXES},
                                   &writer, &why),
                 FSDP_ERR_EXISTS, "%s", why.text);
    cr_assert_not_null(strstr(why.text, s.path), "%s", why.text);
    check_sample(&s);
    drop(&s);
}
