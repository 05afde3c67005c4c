/* A target of another format: elements in any order and from several threads, each exactly once, and
 * nothing left behind by what fails. */
#include "formats/source.h"
#include "formats/target.h"

#include "base/pool.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 64, COLS = 50 };

static char directory[64], path[128];
static float data[ROWS * COLS];
static fsdp_target *target;
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

TestSuite(target, .init = begin, .fini = end);

static fsdp_status add(const char *name, fsdp_dtype dtype, size_t *number)
{
    fsdp_target_tensor tensor = {.name = name,
                                 .name_size = strlen(name),
                                 .dtype = dtype,
                                 .ndim = 2,
                                 .shape = (int64_t[]){ROWS, COLS}};
    return fsdp_target_add_tensor(target, &tensor, number, &err);
}

static void create(const fsdp_target_format *format)
{
    fsdp_target_opts opts = {.sync = true};
    cr_assert_eq(fsdp_target_create(format, &opts, path, &target, &err), FSDP_OK);
}

static size_t lay_out_one(const fsdp_target_format *format)
{
    size_t number;
    create(format);
    cr_assert_eq(add("a", FSDP_F32, &number), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_target_lay_out(target, &err), FSDP_OK, "%s", err.text);
    return number;
}

static void compare_all(void)
{
    fsdp_source *source;
    static float got[ROWS * COLS];
    fsdp_source_reader reader = {0};
    cr_assert_eq(fsdp_source_open(NULL, path, &source, &err), FSDP_OK, "%s", err.text);
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
    return fsdp_target_write(target, 0, row * COLS, COLS, data + row * COLS, error);
}

static void write_from_threads(const fsdp_target_format *format)
{
    lay_out_one(format);
    cr_assert_eq(fsdp_parallel(4, ROWS, write_row, NULL, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_target_finish(target, &err), FSDP_OK, "%s", err.text);
    compare_all();
}

Test(target, rows_from_threads_in_any_order_become_an_archive_with_right_sums)
{
    write_from_threads(&fsdp_target_npz);
}

Test(target, rows_from_threads_in_any_order_become_a_safetensors_file)
{
    write_from_threads(&fsdp_target_safetensors);
}

Test(target, elements_are_written_once)
{
    size_t number = lay_out_one(&fsdp_target_npz);
    cr_assert_eq(fsdp_target_write(target, number, 10, 10, data, &err), FSDP_OK);
    cr_expect_eq(fsdp_target_write(target, number, 19, 2, data, &err), FSDP_ERR_INTERNAL);
    cr_expect_eq(fsdp_target_write(target, number, 5, 6, data, &err), FSDP_ERR_INTERNAL);
    cr_expect_eq(fsdp_target_write(target, number, 0, 30, data, &err), FSDP_ERR_INTERNAL);
    cr_expect_eq(fsdp_target_write(target, number, ROWS * COLS, 1, data, &err), FSDP_ERR_INTERNAL);
    cr_expect_eq(fsdp_target_note(target, number, 0, 10, &err), FSDP_OK);
    fsdp_target_discard(target);
}

Test(target, what_is_not_whole_does_not_stay)
{
    size_t number = lay_out_one(&fsdp_target_hf);
    cr_assert_eq(fsdp_target_write(target, number, 0, ROWS * COLS - 1, data, &err), FSDP_OK);
    cr_expect(fsdp_io_exists(NULL, path));
    cr_expect_eq(fsdp_target_finish(target, &err), FSDP_ERR_INTERNAL);
    cr_expect(strstr(err.text, "'a'"), "%s", err.text);
    cr_expect_not(fsdp_io_exists(NULL, path));
}

Test(target, an_existing_file_is_not_touched)
{
    FILE *file = fopen(path, "w");
    cr_assert(file && fclose(file) == 0);
    size_t number;
    create(&fsdp_target_safetensors);
    cr_assert_eq(add("a", FSDP_F32, &number), FSDP_OK);
    cr_expect_eq(fsdp_target_lay_out(target, &err), FSDP_ERR_EXISTS, "%s", err.text);
    fsdp_target_discard(target);
    cr_expect(fsdp_io_exists(NULL, path));
}

Test(target, what_a_format_cannot_hold_is_told_at_once)
{
    size_t number;
    create(&fsdp_target_npz);
    cr_expect_eq(add("b", FSDP_BF16, &number), FSDP_ERR_USAGE);
    cr_expect(strstr(err.text, "bf16"), "%s", err.text);
    cr_expect_eq(add("c", FSDP_C128, &number), FSDP_OK);
    cr_expect_eq(add("c", FSDP_C128, &number), FSDP_ERR_USAGE);
    fsdp_value value = fsdp_value_bool(true);
    cr_expect_eq(fsdp_target_add_value(target, "v", 1, &value, &err), FSDP_ERR_USAGE);
    cr_expect_not(fsdp_target_holds_dtype(&fsdp_target_safetensors, FSDP_C128));
    cr_expect(fsdp_target_holds_dtype(&fsdp_target_safetensors, FSDP_F4_E2M1FN_X2));
    fsdp_target_discard(target);
}

Test(target, places_are_where_the_elements_are)
{
    size_t number = lay_out_one(&fsdp_target_safetensors);
    fsdp_target_place place = fsdp_target_place_of(target, number);
    cr_assert_eq(place.size, (int64_t)sizeof data);
    cr_expect_eq(place.offset % 8, 0);
    cr_assert(fsdp_target_takes_copies(target));
    cr_assert_eq(fsdp_io_write(place.file, place.path, data, sizeof data, place.offset, &err),
                 FSDP_OK);
    cr_assert_eq(fsdp_target_note(target, number, 0, ROWS * COLS, &err), FSDP_OK);
    cr_assert_eq(fsdp_target_finish(target, &err), FSDP_OK, "%s", err.text);
    compare_all();
}
