/* Zip directories: what is read, and that an archive is refused as soon as two readers could differ. */
#include "base/core/mem.h"
#include "formats/zip/zip.h"
#include "kernels/kernels.h"
#include "tests/fuzz/tiny_zip.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

enum { BEFORE = 100, FIRST_LOCAL = 0, FIRST_NAME = 30 };

static const tiny_record records[] = {
    {"a/one", "first", 5}, {"a/two", "second!", 7}, {"a/none", "", 0}};

typedef struct memory {
    uint8_t *data;
    size_t size;
} memory;

static memory file; /* the archive begins at byte BEFORE of it */
static fsdp_zip *zip;
static fsdp_error err;

static fsdp_status read_memory(void *user, void *data, size_t size, int64_t offset,
                               fsdp_error *error)
{
    (void)user;
    (void)error;
    cr_assert(offset >= BEFORE && (size_t)offset + size <= file.size);
    memcpy(data, file.data + offset, size);
    return FSDP_OK;
}

static void begin(void)
{
    size_t size;
    uint8_t *bytes = tiny_zip(records, 3, &size);
    file.size = BEFORE + size;
    file.data = calloc(1, file.size + 1000);
    memcpy(file.data + BEFORE, bytes, size);
    free(bytes);
}

static void end(void)
{
    fsdp_zip_close(zip);
    zip = NULL;
    free(file.data);
}

TestSuite(zip, .init = begin, .fini = end);

static fsdp_status open_zip(unsigned flags)
{
    fsdp_zip_input input = {read_memory, NULL, "test", BEFORE, (int64_t)file.size - BEFORE};
    fsdp_zip_close(zip);
    err = (fsdp_error){0};
    return fsdp_zip_open(&input, flags, &zip, &err);
}

static uint8_t *archive(size_t place)
{
    return file.data + BEFORE + place;
}

static size_t directory(void)
{
    size_t size = 0;
    for (size_t i = 0; i < 3; i++)
        size += 30 + strlen(records[i].name) + records[i].size;
    return size;
}

static size_t end_record(void)
{
    return file.size - BEFORE - 22;
}

Test(zip, records_are_found_and_read_at_an_offset_of_a_file)
{
    cr_assert_eq(open_zip(0), FSDP_OK, "%s", err.text);
    cr_expect_eq(fsdp_zip_count(zip), 3);
    for (size_t i = 0; i < 3; i++) {
        char *data;
        const fsdp_zip_entry *entry = fsdp_zip_find(zip, records[i].name, strlen(records[i].name));
        cr_assert_eq(entry, fsdp_zip_at(zip, i));
        cr_assert_eq(fsdp_zip_read(zip, entry, 100, &data, &err), FSDP_OK, "%s", err.text);
        cr_expect_eq(memcmp(data, records[i].data, records[i].size), 0);
        cr_expect_eq(memcmp(file.data + entry->offset, records[i].data, records[i].size), 0);
        fsdp_free(data);
    }
    cr_expect_null(fsdp_zip_find(zip, "a/thr", 5));
    char *data;
    cr_expect_eq(fsdp_zip_read(zip, fsdp_zip_at(zip, 1), 6, &data, &err), FSDP_ERR_LIMIT);
}

Test(zip, a_checksum_that_is_there_is_held_against_the_bytes)
{
    uint32_t crc = fsdp_crc32(0, "first", 5);
    for (size_t i = 0; i < 4; i++)
        *archive(FIRST_LOCAL + 14 + i) = *archive(directory() + 16 + i) = (uint8_t)(crc >> 8 * i);
    cr_assert_eq(open_zip(0), FSDP_OK, "%s", err.text);
    char *data = NULL;
    cr_expect_eq(fsdp_zip_read(zip, fsdp_zip_at(zip, 0), 5, &data, &err), FSDP_OK);
    fsdp_free(data);
    *archive(FIRST_NAME + 5) ^= 1;
    cr_expect_eq(fsdp_zip_read(zip, fsdp_zip_at(zip, 0), 5, &data, &err), FSDP_ERR_DAMAGED);
}

/* A deflated record of "abc", without a checksum, that says it has `size` bytes. */
static fsdp_status read_deflated(uint8_t size, char **data_out)
{
    static const tiny_record deflated = {"a",
                                         "\1\3\0\xfc\xff"
                                         "abc",
                                         8};
    enum { CENTRAL = 30 + 1 + 8 };
    size_t bytes;
    free(file.data);
    uint8_t *made = tiny_zip(&deflated, 1, &bytes);
    file = (memory){calloc(1, BEFORE + bytes), BEFORE + bytes};
    memcpy(file.data + BEFORE, made, bytes);
    free(made);
    *archive(8) = *archive(CENTRAL + 10) = 8; /* the method */
    *archive(22) = *archive(CENTRAL + 24) = size;
    cr_assert_eq(open_zip(0), FSDP_OK, "%s", err.text);
    return fsdp_zip_read(zip, fsdp_zip_at(zip, 0), 100, data_out, &err);
}

/* Decoding stops at the size that a record has by its header, however much more follows. */
Test(zip, a_deflated_record_is_as_long_as_it_says)
{
    char *data;
    cr_assert_eq(read_deflated(3, &data), FSDP_OK, "%s", err.text);
    cr_expect_str_eq(data, "abc");
    fsdp_free(data);
    cr_expect_eq(read_deflated(2, &data), FSDP_ERR_DAMAGED);
    cr_expect(strstr(err.text, "longer than declared"), "%s", err.text);
    cr_expect_eq(read_deflated(4, &data), FSDP_ERR_DAMAGED);
    cr_expect(strstr(err.text, "a different size than declared"), "%s", err.text);
}

Test(zip, every_disagreement_of_the_two_headers_is_refused)
{
    static const size_t places[] = {8, 14, 18, 22, 26, 28, FIRST_NAME};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        *archive(FIRST_LOCAL + places[i]) ^= 1;
        cr_expect_neq(open_zip(0), FSDP_OK, "byte %zu of the local header", places[i]);
        *archive(FIRST_LOCAL + places[i]) ^= 1;
    }
    cr_expect_eq(open_zip(0), FSDP_OK, "%s", err.text);
}

Test(zip, a_cut_or_lengthened_archive_is_refused)
{
    size_t whole = file.size;
    for (file.size = BEFORE; file.size < whole; file.size++)
        cr_expect_neq(open_zip(0), FSDP_OK, "%zu bytes", file.size - BEFORE);
    file.size = whole + 1;
    cr_expect_neq(open_zip(0), FSDP_OK);
}

Test(zip, counts_and_places_of_the_end_record_must_hold)
{
    static const size_t places[] = {4, 8, 10, 12, 16};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        *archive(end_record() + places[i]) ^= 1;
        cr_expect_neq(open_zip(0), FSDP_OK, "byte %zu of the end record", places[i]);
        *archive(end_record() + places[i]) ^= 1;
    }
}

/* Memory for the records is allocated only after their number is compared with the directory. */
Test(zip, more_records_than_the_directory_can_hold_are_refused)
{
    *archive(end_record() + 8) = *archive(end_record() + 10) = 4;
    cr_expect_eq(open_zip(0), FSDP_ERR_DAMAGED, "%s", err.text);
    cr_expect(strstr(err.text, "counts more records"), "%s", err.text);
}

/* The zip64 end record, of 56 bytes, ends before its locator. */
Test(zip, a_zip64_end_record_is_no_part_of_its_locator)
{
    enum { LOCATOR_BYTES = 20, END64_BYTES = 56 };
    size_t locator = end_record();
    memmove(archive(locator + LOCATOR_BYTES), archive(locator), 22);
    file.size += LOCATOR_BYTES;
    for (size_t before = END64_BYTES - 1; before <= END64_BYTES; before++) {
        uint8_t bytes[LOCATOR_BYTES] = {'P', 'K', 6, 7, [16] = 1};
        bytes[8] = (uint8_t)(locator - before);
        memcpy(archive(locator), bytes, sizeof bytes);
        cr_expect_eq(open_zip(0), FSDP_ERR_DAMAGED);
        cr_expect(strstr(err.text, before < END64_BYTES
                                       ? "locator that points nowhere"
                                       : "no zip64 end record where its locator points"),
                  "%zu bytes before: %s", before, err.text);
    }
}

/* The last record has no bytes, so that its data begins where the directory does. */
Test(zip, a_record_ends_before_the_directory)
{
    size_t local = directory() - 30 - strlen(records[2].name);
    size_t central = end_record() - 46 - strlen(records[2].name);
    cr_assert_eq(memcmp(archive(central + 46), "a/none", 6), 0);
    *archive(local + 18) = *archive(local + 22) = 1;
    *archive(central + 20) = *archive(central + 24) = 1;
    cr_expect_eq(open_zip(0), FSDP_ERR_DAMAGED, "%s", err.text);
    cr_expect(strstr(err.text, "reaches beyond the end"), "%s", err.text);
}

Test(zip, a_comment_may_follow_but_no_second_end)
{
    file.size += 30;
    *archive(end_record() + 20 - 30) = 30;
    cr_expect_eq(open_zip(0), FSDP_OK, "%s", err.text);
    memcpy(archive(end_record()), "PK\5\6", 4);
    cr_expect_neq(open_zip(0), FSDP_OK);
}

Test(zip, names_are_paths_unless_they_are_data)
{
    static const char *const names[] = {"../up", "/root", "a\\bup", "a/../", "a//bc"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        memcpy(archive(FIRST_NAME), names[i], 5);
        memcpy(archive(directory() + 46), names[i], 5);
        cr_expect_eq(open_zip(0), FSDP_ERR_REFUSED, "%s", names[i]);
        cr_expect_eq(open_zip(FSDP_ZIP_NAMES_ARE_DATA), FSDP_OK, "%s: %s", names[i], err.text);
    }
}

Test(zip, names_with_a_zero_byte_are_refused_as_data_too)
{
    *archive(FIRST_NAME + 3) = *archive(directory() + 46 + 3) = '\0';
    cr_expect_eq(open_zip(0), FSDP_ERR_REFUSED);
    cr_expect_eq(open_zip(FSDP_ZIP_NAMES_ARE_DATA), FSDP_ERR_REFUSED);
    cr_expect(strstr(err.text, "zero byte"), "%s", err.text);
}

/* Sets byte 3 of the first name and the flags of its two headers. */
static void rename_first(uint8_t letter, unsigned local_flags, unsigned flags)
{
    *archive(FIRST_NAME + 3) = *archive(directory() + 46 + 3) = letter;
    *archive(FIRST_LOCAL + 7) = (uint8_t)(local_flags >> 8);
    *archive(directory() + 9) = (uint8_t)(flags >> 8);
}

Test(zip, names_without_the_flag_of_utf_8_are_in_code_page_437_where_they_are_data)
{
    enum { UTF8 = 0x800 };
    rename_first(0x82, 0, 0);
    cr_assert_eq(open_zip(FSDP_ZIP_NAMES_ARE_DATA), FSDP_OK, "%s", err.text);
    cr_expect_str_eq(fsdp_zip_at(zip, 0)->name, "a/o\u00e9e");
    cr_expect_eq(fsdp_zip_find(zip, "a/o\u00e9e", 6), fsdp_zip_at(zip, 0));
    cr_expect_str_eq(fsdp_zip_at(zip, 1)->name, "a/two");
    cr_assert_eq(open_zip(0), FSDP_OK, "%s", err.text);
    cr_expect_str_eq(fsdp_zip_at(zip, 0)->name, "a/o\x82\x65");
    rename_first(0x82, UTF8, UTF8);
    cr_assert_eq(open_zip(FSDP_ZIP_NAMES_ARE_DATA), FSDP_OK, "%s", err.text);
    cr_expect_str_eq(fsdp_zip_at(zip, 0)->name, "a/o\x82\x65");
    rename_first(0x82, UTF8, 0);
    cr_expect_eq(open_zip(FSDP_ZIP_NAMES_ARE_DATA), FSDP_ERR_REFUSED);
    cr_expect(strstr(err.text, "two names"), "%s", err.text);
    rename_first('n', UTF8, 0);
    cr_expect_eq(open_zip(FSDP_ZIP_NAMES_ARE_DATA), FSDP_OK, "%s", err.text);
}

Test(zip, files_that_are_marked_as_folders_are_refused)
{
    *archive(directory() + 38) = 0x10;
    cr_expect_eq(open_zip(0), FSDP_ERR_REFUSED);
    cr_expect(strstr(err.text, "marked as a folder"), "%s", err.text);
}

Test(zip, links_and_encrypted_records_are_refused)
{
    *archive(directory() + 41) = 0xA1;
    cr_expect_eq(open_zip(0), FSDP_ERR_REFUSED);
    *archive(directory() + 41) = 0x81;
    cr_expect_eq(open_zip(0), FSDP_OK, "%s", err.text);
    *archive(directory() + 8) = 1;
    cr_expect_eq(open_zip(0), FSDP_ERR_REFUSED);
}

Test(zip, the_same_name_twice_is_refused)
{
    size_t second = FIRST_NAME + 5 + 5 + 30;
    memcpy(archive(second), "a/one", 5);
    memcpy(archive(directory() + 46 + 5 + 46), "a/one", 5);
    cr_expect_eq(open_zip(0), FSDP_ERR_REFUSED);
    cr_expect(strstr(err.text, "twice"), "%s", err.text);
}

Test(zip, running_out_of_memory_is_an_error)
{
    rename_first(0x82, 0, 0);
    for (int64_t n = 0;; n++) {
        fsdp_mem_fail_after(n, false);
        fsdp_status st = open_zip(FSDP_ZIP_NAMES_ARE_DATA);
        fsdp_mem_fail_after(-1, false);
        if (st == FSDP_OK)
            break;
        cr_assert_eq(st, FSDP_ERR_LIMIT, "allocation %lld: %s", (long long)n, err.text);
    }
}
