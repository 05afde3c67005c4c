/*
 * Torch.save files and DCP directories as targets: pieces in any order by several threads give one file,
 * of the size that was announced; what cannot be written is refused before the first byte.
 */
#include "base/core/mem.h"
#include "base/core/pool.h"
#include "formats/source.h"
#include "formats/target.h"
#include "formats/zip/zip.h"
#include "formats/zip/zip_write.h"
#include "kernels/kernels.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ROWS = 37, COLUMNS = 5, ELEMENTS = ROWS * COLUMNS };

static char directory[64];
static int32_t elements[ELEMENTS];

static void set_up(void)
{
    snprintf(directory, sizeof directory, "/tmp/fsdp-torch-write-XXXXXX");
    cr_assert_not_null(mkdtemp(directory));
    for (int i = 0; i < ELEMENTS; i++)
        elements[i] = i * 7919;
}

static void tear_down(void)
{
    cr_assert_eq(fsdp_io_remove_tree(fsdp_io_posix(), directory, NULL), FSDP_OK);
}

TestSuite(torch_write, .init = set_up, .fini = tear_down);

static const int64_t shape[] = {ROWS, COLUMNS}, none[] = {0, 4};
static const fsdp_target_box boxes[] = {
    {0, (int64_t[]){0, 0}, (int64_t[]){20, COLUMNS}},
    {1, (int64_t[]){20, 0}, (int64_t[]){0, COLUMNS}},
    {2, (int64_t[]){20, 0}, (int64_t[]){17, COLUMNS}},
};
static const fsdp_target_box whole[] = {{0, (int64_t[]){0, 0}, (int64_t[]){ROWS, COLUMNS}}};

/* A tensor, one without elements and without boxes, and a value. */
static void declare(fsdp_target_entry entries[3], const fsdp_value *value, bool sharded)
{
    entries[0] = (fsdp_target_entry){.name = "value", .name_size = 5, .value = value};
    entries[1] = (fsdp_target_entry){.name = "a.b",
                                     .name_size = 3,
                                     .dtype = FSDP_I32,
                                     .ndim = 2,
                                     .shape = shape,
                                     .boxes = sharded ? boxes : whole,
                                     .box_count = sharded ? 3 : 1};
    entries[2] = (fsdp_target_entry){
        .name = "none", .name_size = 4, .dtype = FSDP_F8_E4M3FN, .ndim = 2, .shape = none};
}

typedef struct writing {
    const fsdp_target_ops *ops;
    fsdp_target *target;
    const fsdp_target_entry *entry;
} writing;

/* Every worker writes every fourth element, from the last to the first. */
static fsdp_status write_some(void *user, size_t worker, fsdp_error *err)
{
    const writing *work = user;
    for (size_t b = 0; b < work->entry->box_count; b++) {
        fsdp_box box = fsdp_target_box_at(work->entry, b);
        const int32_t *from = elements + box.lo[0] * COLUMNS;
        for (int64_t i = fsdp_box_count(&box) - 1; i >= 0; i--)
            if ((size_t)i % 4 == worker) {
                fsdp_target_piece piece = {1, b, i, 1, &from[i]};
                FSDP_TRY(work->ops->write(work->target, &piece, err));
            }
    }
    return FSDP_OK;
}

static void expect_listed(const char *path)
{
    fsdp_error err = {0};
    fsdp_source *source;
    fsdp_source_reader reader = {0};
    int32_t got[ELEMENTS] = {0};
    cr_assert_eq(fsdp_source_open(NULL, path, NULL, &source, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_source_entry_count(source), 3);
    for (size_t i = 0; i < fsdp_source_check_count(source); i++)
        cr_assert_eq(fsdp_source_check(source, i, &reader, &err), FSDP_OK, "%s", err.text);
    for (size_t i = 0; i < 3; i++) {
        const fsdp_source_entry *entry = fsdp_source_entry_at(source, i);
        if (!entry->is_tensor || strcmp(entry->name, "a.b") != 0)
            continue;
        fsdp_box box = fsdp_box_whole(2, shape);
        cr_assert_eq(fsdp_source_read(source, entry->tensor, &box, got, &reader, &err), FSDP_OK);
    }
    cr_assert_eq(memcmp(got, elements, sizeof got), 0);
    fsdp_source_reader_release(&reader);
    fsdp_source_close(source);
}

static int64_t add_size(const char *folder, const char *name)
{
    fsdp_file_info info;
    char *path = fsdp_path_join(folder, name);
    cr_assert_eq(fsdp_io_posix()->ops->info(fsdp_io_posix(), path, &info), 0, "%s", path);
    fsdp_free(path);
    return info.size;
}

static void write_all(const char *name, const char *path, int world)
{
    fsdp_error err = {0};
    fsdp_value value = fsdp_value_f64(0.5);
    fsdp_target_entry entries[3];
    const fsdp_format *format = fsdp_format_to(name);
    fsdp_target_opts opts = {.io = fsdp_io_posix(),
                             .path = path,
                             .entries = entries,
                             .entry_count = 3,
                             .world = world,
                             .sync = true};
    declare(entries, &value, format->caps.sharded);
    int64_t files, bytes, written = 0;
    cr_assert_eq(format->writer->ops->measure(&opts, &files, &bytes, &err), FSDP_OK, "%s",
                 err.text);
    writing work = {.ops = format->writer->ops, .entry = &entries[1]};
    cr_assert_eq(format->writer->ops->create(&opts, &work.target, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_parallel(4, 4, write_some, &work, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(format->writer->ops->finish(work.target, &err), FSDP_OK, "%s", err.text);
    expect_listed(path);
    if (!format->writes_directory) {
        cr_assert_eq(files, 1);
        cr_assert_eq(add_size(directory, "x"), bytes);
        return;
    }
    cr_assert_eq(files, world + 1);
    written = add_size(path, ".metadata");
    for (int rank = 0; rank < world; rank++) {
        char file[32];
        snprintf(file, sizeof file, "__%d_0.distcp", rank);
        written += add_size(path, file);
    }
    cr_assert_eq(written, bytes);
}

Test(torch_write, a_file_is_what_was_written_and_as_large_as_announced)
{
    char *path = fsdp_path_join(directory, "x");
    write_all("torch", path, 1);
    fsdp_free(path);
}

Test(torch_write, a_directory_is_what_was_written_and_as_large_as_announced)
{
    write_all("dcp", directory, 3);
}

Test(torch_write, a_world_of_more_files_than_may_be_open_is_written)
{
    write_all("dcp", directory, 300);
}

Test(torch_write, what_is_not_complete_does_not_end)
{
    static const char *const names[] = {"torch", "dcp"};
    for (size_t i = 0; i < 2; i++) {
        fsdp_error err = {0};
        fsdp_value value = {0};
        fsdp_target_entry entries[3];
        fsdp_target *target;
        char *path = fsdp_path_join(directory, "x");
        const fsdp_format *format = fsdp_format_to(names[i]);
        fsdp_target_opts opts = {
            .io = fsdp_io_posix(), .entries = entries, .entry_count = 3, .world = 3};
        opts.path = format->writes_directory ? directory : path;
        declare(entries, &value, format->caps.sharded);
        cr_assert_eq(format->writer->ops->create(&opts, &target, &err), FSDP_OK, "%s", err.text);
        fsdp_target_piece piece = {1, 0, 1, 9, elements + 1};
        cr_assert_eq(format->writer->ops->write(target, &piece, &err), FSDP_OK);
        cr_assert_eq(format->writer->ops->finish(target, &err), FSDP_ERR_INTERNAL);
        cr_assert_neq(fsdp_io_exists(fsdp_io_posix(), path), format->writes_directory);
        cr_assert_eq(unlink(path), format->writes_directory ? -1 : 0);
        fsdp_free(path);
    }
}

Test(torch_write, what_cannot_be_held_is_refused_by_name)
{
    fsdp_value value = {0};
    cr_assert_eq(fsdp_value_set_bytes(&value, FSDP_VALUE_OPAQUE, "\1\2\3\4\5", 5, NULL), FSDP_OK);
    static const char *const names[] = {"torch", "dcp"};
    for (size_t i = 0; i < 2; i++) {
        fsdp_error err = {0};
        fsdp_target_entry entries[3];
        int64_t files, bytes;
        fsdp_target_opts opts = {
            .path = directory, .entries = entries, .entry_count = 3, .world = 3};
        declare(entries, &value, i == 1);
        const fsdp_target_ops *ops = fsdp_format_to(names[i])->writer->ops;
        cr_assert_eq(ops->measure(&opts, &files, &bytes, &err), FSDP_ERR_USAGE);
        cr_assert(strstr(err.text, "'value'") != NULL, "%s", err.text);
    }
    fsdp_value_release(&value);
}

Test(torch_write, boxes_that_do_not_cover_a_tensor_are_refused)
{
    fsdp_error err = {0};
    fsdp_value value = {0};
    fsdp_target_entry entries[3];
    int64_t files, bytes;
    fsdp_target_opts opts = {.path = directory, .entries = entries, .entry_count = 3, .world = 3};
    declare(entries, &value, true);
    entries[1].box_count = 2;
    const fsdp_target_ops *ops = fsdp_format_to("dcp")->writer->ops;
    cr_assert_eq(ops->measure(&opts, &files, &bytes, &err), FSDP_ERR_INTERNAL);
    cr_assert(strstr(err.text, "'a.b'") != NULL, "%s", err.text);
}

Test(torch_write, an_overwrite_deletes_only_what_dcp_made)
{
    static const char *const ours[] = {".metadata", "__0.metadata", "__31.metadata", "__0_0.distcp",
                                       "__12_345.distcp"};
    static const char *const others[] = {
        "__0.distcp",     "__0_0.distcp.txt", "__a_0.distcp",  "x",
        ".metadata.tmp",  "__0_.distcp",      "__-1_0.distcp", "__.metadata",
        "__0_0.metadata", "0.metadata"};
    bool (*owns)(const char *) = fsdp_format_to("dcp")->writer->owns;
    for (size_t i = 0; i < sizeof ours / sizeof *ours; i++)
        cr_assert(owns(ours[i]), "%s", ours[i]);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        cr_assert_not(owns(others[i]), "%s", others[i]);
}

/* --- zip archives ----------------------------------------------------------------------------- */

Test(torch_write, checksums_of_pieces_in_any_order_are_one)
{
    const char *bytes = (const char *)elements;
    size_t size = sizeof elements, cuts[] = {0, 1, 17, 64, 400, size};
    uint32_t crc = 0;
    for (size_t i = 5; i-- > 0;)
        crc ^= fsdp_zip_crc_part(bytes + cuts[i], cuts[i + 1] - cuts[i],
                                 (int64_t)(size - cuts[i + 1]));
    cr_assert_eq(crc, fsdp_crc32(0, bytes, size));
}

static fsdp_status read_file(void *user, void *data, size_t size, int64_t offset, fsdp_error *err)
{
    return fsdp_io_read(user, "x", data, size, offset, err);
}

static void put(fsdp_file *file, fsdp_text *text, int64_t offset)
{
    cr_assert_not(text->failed);
    cr_assert_eq(fsdp_io_write(file, "x", text->data, text->size, offset, NULL), FSDP_OK);
    fsdp_text_release(text);
}

/* 5 GiB that are one hole of the file, and a record behind them. */
Test(torch_write, records_of_many_gib_and_behind_them_are_found)
{
    fsdp_zip_record records[2] = {{.name = "archive/data/0", .size = INT64_C(5) << 30, .crc = 7},
                                  {.name = "archive/late", .size = 4}};
    int64_t end = 0;
    fsdp_file *file = NULL;
    fsdp_text text = {0};
    char *path = fsdp_path_join(directory, "x");
    records[1].crc = fsdp_crc32(0, "late", 4);
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(fsdp_zip_place(&records[i], &end, NULL), FSDP_OK);
        cr_assert_eq(records[i].data % FSDP_ZIP_ALIGNMENT, 0);
    }
    cr_assert_eq(fsdp_io_open(NULL, path, FSDP_IO_CREATE, &file, NULL), FSDP_OK);
    fsdp_zip_add_header(&text, &records[0]);
    cr_assert_eq((int64_t)text.size, records[0].data);
    put(file, &text, 0);
    fsdp_zip_add_trailer(&text, &records[0]);
    cr_assert_eq(text.size, 24);
    fsdp_zip_add_record(&text, &records[1], "late");
    fsdp_zip_add_directory(&text, records, 2, end);
    int64_t last = records[0].data + records[0].size, size = last + (int64_t)text.size;
    cr_assert_eq(size, end + fsdp_zip_directory_size(records, 2));
    put(file, &text, last);

    fsdp_error err = {0};
    fsdp_zip_input input = {.read = read_file, .context = file, .path = "x", .size = size};
    fsdp_zip *zip = NULL;
    cr_assert_eq(fsdp_zip_open(&input, 0, &zip, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_zip_count(zip), 2);
    cr_assert_eq(fsdp_zip_at(zip, 0)->size, records[0].size);
    cr_assert_eq(fsdp_zip_at(zip, 1)->offset, records[1].data);
    char *late = NULL;
    cr_assert_eq(fsdp_zip_read(zip, fsdp_zip_at(zip, 1), 4, &late, &err), FSDP_OK, "%s", err.text);
    fsdp_free(late);
    fsdp_zip_close(zip);
    cr_assert_eq(fsdp_io_close(&file, path, NULL), FSDP_OK);
    fsdp_free(path);
}

Test(torch_write, an_archive_beyond_all_bounds_is_refused)
{
    fsdp_zip_record record = {.name = "archive/data/0", .size = INT64_C(1) << 62};
    int64_t place = 0;
    cr_assert_eq(fsdp_zip_place(&record, &place, NULL), FSDP_OK);
    cr_assert_eq(fsdp_zip_place(&record, &place, NULL), FSDP_ERR_LIMIT);
}
