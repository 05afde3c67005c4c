/* A target of another format: elements in any order and from several threads, each exactly once, and
 * nothing left behind by what fails. */
#include "formats/source.h"
#include "formats/target/packed.h"

#include "base/core/pool.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 64, COLS = 50 };

static char directory[64], path[128];
static float data[ROWS * COLS];
static fsdp_packed *target;
static fsdp_error err;

static void begin(void)
{
    strcpy(directory, "/tmp/fsdp-target-XXXXXX");
    cr_assert(mkdtemp(directory));
    snprintf(path, sizeof path, "%s/out", directory);
    for (int i = 0; i < ROWS * COLS; i++)
        data[i] = (float)i;
}

static void end(void)
{
    cr_assert_eq(fsdp_io_remove_tree(NULL, directory, &err), FSDP_OK);
}

TestSuite(packed, .init = begin, .fini = end);

static fsdp_status add(const char *name, fsdp_dtype dtype, size_t *number)
{
    fsdp_packed_tensor tensor = {.name = name,
                                 .name_size = strlen(name),
                                 .dtype = dtype,
                                 .ndim = 2,
                                 .shape = (int64_t[]){ROWS, COLS}};
    return fsdp_packed_add_tensor(target, &tensor, number, &err);
}

static void create(const char *format)
{
    fsdp_packed_opts opts = {.sync = true};
    cr_assert_eq(fsdp_packed_create(fsdp_format_to(format), &opts, path, &target, &err), FSDP_OK);
}

static size_t lay_out_one(const char *format)
{
    size_t number;
    create(format);
    cr_assert_eq(add("a", FSDP_F32, &number), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_packed_lay_out(target, &err), FSDP_OK, "%s", err.text);
    return number;
}

static void compare_all(void)
{
    fsdp_source *source;
    static float got[ROWS * COLS];
    fsdp_source_reader reader = {0};
    cr_assert_eq(fsdp_source_open(NULL, path, NULL, &source, &err), FSDP_OK, "%s", err.text);
    fsdp_box box = {.ndim = 2, .len = {ROWS, COLS}};
    cr_assert_eq(fsdp_source_read(source, 0, &box, got, &reader, &err), FSDP_OK);
    cr_assert_arr_eq(got, data, sizeof data);
    for (size_t i = 0; i < fsdp_source_check_count(source); i++)
        cr_assert_eq(fsdp_source_check(source, i, &reader, &err), FSDP_OK, "%s", err.text);
    fsdp_source_reader_release(&reader);
    fsdp_source_close(source);
}

static fsdp_status write_row(void *user, size_t i, fsdp_error *error)
{
    (void)user;
    int64_t row = (int64_t)(i * 37 % ROWS);
    return fsdp_packed_write(target, 0, row * COLS, COLS, data + row * COLS, error);
}

static void write_from_threads(const char *format)
{
    lay_out_one(format);
    cr_assert_eq(fsdp_parallel(4, ROWS, write_row, NULL, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_packed_finish(target, &err), FSDP_OK, "%s", err.text);
    compare_all();
}

Test(packed, rows_from_threads_in_any_order_become_an_archive_with_right_sums)
{
    write_from_threads("npz");
}

Test(packed, rows_from_threads_in_any_order_become_a_safetensors_file)
{
    write_from_threads("safetensors");
}

Test(packed, elements_are_written_once)
{
    size_t number = lay_out_one("npz");
    cr_assert_eq(fsdp_packed_write(target, number, 10, 10, data, &err), FSDP_OK);
    cr_expect_eq(fsdp_packed_write(target, number, 19, 2, data, &err), FSDP_ERR_INTERNAL);
    cr_expect_eq(fsdp_packed_write(target, number, 5, 6, data, &err), FSDP_ERR_INTERNAL);
    cr_expect_eq(fsdp_packed_write(target, number, 0, 30, data, &err), FSDP_ERR_INTERNAL);
    cr_expect_eq(fsdp_packed_write(target, number, ROWS * COLS, 1, data, &err), FSDP_ERR_INTERNAL);
    cr_expect_eq(fsdp_packed_write(target, number, 0, 10, data, &err), FSDP_OK);
    fsdp_packed_discard(target);
}

Test(packed, what_is_not_whole_is_refused_and_stays)
{
    size_t number = lay_out_one("hf");
    cr_assert_eq(fsdp_packed_write(target, number, 0, ROWS * COLS - 1, data, &err), FSDP_OK);
    cr_expect(fsdp_io_exists(NULL, path));
    cr_expect_eq(fsdp_packed_finish(target, &err), FSDP_ERR_INTERNAL);
    cr_expect(strstr(err.text, "'a'"), "%s", err.text);
    cr_expect(fsdp_io_exists(NULL, path));
}

Test(packed, an_existing_file_is_not_touched)
{
    FILE *file = fopen(path, "w");
    cr_assert(file && fclose(file) == 0);
    size_t number;
    create("safetensors");
    cr_assert_eq(add("a", FSDP_F32, &number), FSDP_OK);
    cr_expect_eq(fsdp_packed_lay_out(target, &err), FSDP_ERR_EXISTS, "%s", err.text);
    fsdp_packed_discard(target);
    cr_expect(fsdp_io_exists(NULL, path));
}

Test(packed, what_a_format_cannot_hold_is_told_at_once)
{
    size_t number;
    create("npz");
    cr_expect_eq(add("b", FSDP_BF16, &number), FSDP_ERR_USAGE);
    cr_expect(strstr(err.text, "bf16"), "%s", err.text);
    cr_expect_eq(add("c", FSDP_C128, &number), FSDP_OK);
    cr_expect_eq(add("c", FSDP_C128, &number), FSDP_ERR_USAGE);
    fsdp_value value = fsdp_value_bool(true);
    cr_expect_eq(fsdp_packed_add_value(target, "v", 1, &value, &err), FSDP_ERR_USAGE);
    cr_expect_not(fsdp_format_to("safetensors")->writer->holds_dtype(FSDP_C128));
    cr_expect(fsdp_format_to("safetensors")->writer->holds_dtype(FSDP_F4_E2M1FN_X2));
    fsdp_packed_discard(target);
}

Test(packed, places_are_where_the_elements_are)
{
    size_t number = lay_out_one("safetensors");
    fsdp_packed_place place = fsdp_packed_place_of(target, number);
    cr_assert_eq(place.size, (int64_t)sizeof data);
    cr_expect_eq(place.offset % 8, 0);
    static float got[ROWS * COLS];
    cr_assert_eq(fsdp_packed_write(target, number, 0, ROWS * COLS, data, &err), FSDP_OK);
    cr_assert_eq(fsdp_io_read(place.file, place.path, got, sizeof got, place.offset, &err),
                 FSDP_OK);
    cr_assert_arr_eq(got, data, sizeof data);
    cr_assert_eq(fsdp_packed_finish(target, &err), FSDP_OK, "%s", err.text);
    compare_all();
}
