/*
 * Our end of the talk with the process that reads HDF5, when that process has been taken over: a fake one
 * says what it likes, over the channel or in the listing.
 */
#include "base/core/mem.h"
#include "formats/hdf5_child/hdf5_listing.h"
#include "formats/hdf5_child/hdf5_child.h"
#include "formats/hdf5_child/hdf5_session.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define ASSERT_OK(call) cr_assert_eq((call), FSDP_OK, "%s", err.text)
#define ASSERT_SAYS(words) cr_assert_not_null(strstr(err.text, (words)), "%s", err.text)

/* --- the channel ------------------------------------------------------------------------------ */

static int channels[2]; /* ours, the fake child's */
static unsigned char *shared;
static fsdp_h5_session *session;
static const char file_bytes[] = "0123456789";
static bool disk_fails;

static fsdp_status read_bytes(void *user, void *data, size_t size, int64_t offset, fsdp_error *err)
{
    (void)user;
    if (disk_fails)
        return fsdp_fail(err, FSDP_ERR_IO, "the disk fails");
    memcpy(data, file_bytes + offset, size);
    return FSDP_OK;
}

static void start_patient(int64_t deadline_ms)
{
    fsdp_error err = {0};
    const fsdp_h5_file_view view = {"x.h5", sizeof file_bytes - 1, read_bytes, NULL, false};
    shared = fsdp_alloc(1, FSDP_H5_SHARED);
    cr_assert(shared && socketpair(AF_UNIX, SOCK_SEQPACKET, 0, channels) == 0);
    ASSERT_OK(fsdp_h5_session_adopt(&view, channels[0], shared, deadline_ms, &session, &err));
}

static void start(void)
{
    start_patient(5000);
}

static void stop(void)
{
    fsdp_h5_session_stop(session);
    close(channels[0]);
    if (channels[1] >= 0)
        close(channels[1]);
    fsdp_free(shared);
}

TestSuite(hdf5_session, .init = start, .fini = stop);

static void child_sends(fsdp_h5_message_kind kind, uint32_t status, int64_t number, int64_t size)
{
    const fsdp_h5_message message = {
        .kind = kind, .status = status, .number = number, .size = size};
    cr_assert_eq(send(channels[1], &message, sizeof message, 0), (ssize_t)sizeof message);
}

static fsdp_h5_message child_receives(void)
{
    fsdp_h5_message message = {.kind = 0};
    cr_assert_eq(recv(channels[1], &message, sizeof message, MSG_DONTWAIT),
                 (ssize_t)sizeof message);
    return message;
}

static fsdp_status list(fsdp_text *text, fsdp_error *err)
{
    return fsdp_h5_session_list(session, 100, text, err);
}

static void expect_list(fsdp_status status, const char *said)
{
    fsdp_text text = {0};
    fsdp_error err = {0};
    cr_assert_eq(list(&text, &err), status, "%s", err.text);
    cr_assert_eq(err.status, status);
    ASSERT_SAYS(said);
    ASSERT_SAYS("x.h5");
    fsdp_text_release(&text);
}

static fsdp_status read_four(char data[4], fsdp_error *err)
{
    const fsdp_box box = {.ndim = 1, .len = {4}};
    const fsdp_h5_request wanted = {.dataset = 7, .box = &box, .size = 4, .cache = 99};
    return fsdp_h5_session_read(session, &wanted, data, err);
}

Test(hdf5_session, a_listing_comes_in_parts)
{
    fsdp_text text = {0};
    fsdp_error err = {0};
    memcpy(shared + FSDP_H5_FILE_ROOM, "abcd", 4);
    child_sends(FSDP_H5_PART, 0, 0, 4);
    child_sends(FSDP_H5_DONE, 0, 0, 3);
    ASSERT_OK(list(&text, &err));
    cr_assert(text.size == 7 && memcmp(text.data, "abcdabc", 7) == 0);
    cr_assert_eq(child_receives().kind, (uint32_t)FSDP_H5_LIST);
    cr_assert_eq(child_receives().kind, (uint32_t)FSDP_H5_GO_ON);
    fsdp_text_release(&text);
}

Test(hdf5_session, bytes_of_the_file_are_brought)
{
    fsdp_text text = {0};
    fsdp_error err = {0};
    child_sends(FSDP_H5_NEED, 0, 7, 3);
    child_sends(FSDP_H5_DONE, 0, 0, 0);
    ASSERT_OK(list(&text, &err));
    (void)child_receives();
    fsdp_h5_message answer = child_receives();
    cr_assert(answer.kind == FSDP_H5_BYTES && answer.size == 3);
    cr_assert_eq(memcmp(shared, "789", 3), 0);
    fsdp_text_release(&text);
}

Test(hdf5_session, bytes_beyond_the_file_are_not_brought)
{
    const struct {
        int64_t offset, size;
    } wrong[] = {{8, 3},  {-1, 1},        {11, 1},        {0, 0},
                 {0, -5}, {INT64_MAX, 1}, {1, INT64_MAX}, {0, FSDP_H5_FILE_ROOM + 1}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        stop();
        start();
        child_sends(FSDP_H5_NEED, 0, wrong[i].offset, wrong[i].size);
        expect_list(FSDP_ERR_REFUSED, "asks for bytes that the file does not have");
    }
}

Test(hdf5_session, a_failing_disk_is_told_as_such)
{
    fsdp_text text = {0};
    fsdp_error err = {0};
    disk_fails = true;
    child_sends(FSDP_H5_NEED, 0, 0, 3);
    cr_assert_eq(list(&text, &err), FSDP_ERR_IO);
    ASSERT_SAYS("the disk fails");
}

Test(hdf5_session, a_box_comes_as_a_whole)
{
    fsdp_error err = {0};
    char data[4];
    memcpy(shared + FSDP_H5_FILE_ROOM, "abcd", 4);
    child_sends(FSDP_H5_DONE, 0, 0, 4);
    ASSERT_OK(read_four(data, &err));
    cr_assert_eq(memcmp(data, "abcd", 4), 0);
    fsdp_h5_message asked = child_receives();
    cr_assert(asked.kind == FSDP_H5_READ && asked.number == 7 && asked.box.len[0] == 4 &&
              asked.size == 99);
}

Test(hdf5_session, a_box_of_another_size_is_not_taken)
{
    for (int64_t size = 3; size <= 5; size += 2) {
        stop();
        start();
        fsdp_error err = {0};
        char data[4] = "....";
        child_sends(FSDP_H5_DONE, 0, 0, size);
        cr_assert_eq(read_four(data, &err), FSDP_ERR_REFUSED);
        cr_assert_eq(data[0], '.');
    }
}

Test(hdf5_session, nonsense_is_refused)
{
    const struct {
        unsigned kind;
        int64_t size;
    } wrong[] = {{0, 0},
                 {FSDP_H5_LIST, 0},
                 {FSDP_H5_READY, 0},
                 {99, 0},
                 {FSDP_H5_DONE, -1},
                 {FSDP_H5_DONE, FSDP_H5_REPLY_ROOM + 1},
                 {FSDP_H5_PART, INT64_MAX},
                 {FSDP_H5_FAILED, INT64_MIN}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        stop();
        start();
        child_sends((fsdp_h5_message_kind)wrong[i].kind, 0, 0, wrong[i].size);
        expect_list(FSDP_ERR_REFUSED, "sent an invalid message");
    }
}

Test(hdf5_session, a_part_in_place_of_a_box_is_refused)
{
    fsdp_error err = {0};
    char data[4];
    child_sends(FSDP_H5_PART, 0, 0, 4);
    cr_assert_eq(read_four(data, &err), FSDP_ERR_REFUSED);
    ASSERT_SAYS("sent an invalid message");
}

Test(hdf5_session, messages_of_another_length_are_refused)
{
    char bytes[sizeof(fsdp_h5_message) + 1] = {FSDP_H5_DONE};
    for (size_t size = 1; size <= sizeof bytes; size += sizeof bytes - 1) {
        stop();
        start();
        cr_assert_eq(send(channels[1], bytes, size, 0), (ssize_t)size);
        expect_list(FSDP_ERR_REFUSED, "sent an invalid message");
    }
}

Test(hdf5_session, a_listing_without_end_is_cut)
{
    for (int i = 0; i < 3; i++)
        child_sends(FSDP_H5_PART, 0, 0, 50);
    expect_list(FSDP_ERR_LIMIT, "more than 100 bytes");
}

Test(hdf5_session, silence_has_a_deadline)
{
    stop();
    start_patient(30);
    expect_list(FSDP_ERR_REFUSED, "took too long");
}

Test(hdf5_session, a_child_that_is_gone_is_noticed_and_never_asked_again)
{
    char data[4];
    fsdp_error err = {0};
    close(channels[1]);
    channels[1] = -1;
    expect_list(FSDP_ERR_REFUSED, "the HDF5 library failed on this file");
    cr_assert_eq(read_four(data, &err), FSDP_ERR_REFUSED);
    ASSERT_SAYS("before");
}

Test(hdf5_session, the_child_chooses_among_few_errors)
{
    const struct {
        uint32_t said;
        fsdp_status taken;
    } table[] = {{FSDP_ERR_DAMAGED, FSDP_ERR_DAMAGED}, {FSDP_ERR_LIMIT, FSDP_ERR_LIMIT},
                 {FSDP_ERR_REFUSED, FSDP_ERR_REFUSED}, {FSDP_OK, FSDP_ERR_REFUSED},
                 {FSDP_DIFFERS, FSDP_ERR_REFUSED},     {FSDP_ERR_INTERNAL, FSDP_ERR_REFUSED},
                 {0xFFFFFFFF, FSDP_ERR_REFUSED}};
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        memcpy(shared + FSDP_H5_FILE_ROOM, "a\33[2Jb\0\xff", 8);
        child_sends(FSDP_H5_FAILED, table[i].said, 0, 8);
        expect_list(table[i].taken, "'x.h5': a\\x1b[2Jb");
    }
}

/* --- the listing ------------------------------------------------------------------------------ */

static char folder[] = "/tmp/test_hdf5_session.XXXXXX";
static char path[64];
static fsdp_source *source;
static fsdp_h5_tensors tensors;
static fsdp_text said;

static void make_source(void)
{
    fsdp_error err = {0};
    fsdp_file *file = NULL;
    int number;
    cr_assert_not_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/x.h5", folder);
    ASSERT_OK(fsdp_io_open(NULL, path, FSDP_IO_CREATE, &file, &err));
    ASSERT_OK(fsdp_io_write(file, path, "0123456789abcdef", 16, 0, &err));
    ASSERT_OK(fsdp_io_close(&file, path, &err));
    ASSERT_OK(fsdp_source_create(NULL, path, "hdf5", &source, &err));
    ASSERT_OK(fsdp_source_add_file(source, path, false, &number, &err));
}

static void drop_source(void)
{
    fsdp_error err = {0};
    fsdp_source_close(source);
    fsdp_h5_tensors_release(&tensors);
    fsdp_text_release(&said);
    ASSERT_OK(fsdp_io_remove_tree(NULL, folder, &err));
}

TestSuite(hdf5_listing, .init = make_source, .fini = drop_source);

static void say_u8(unsigned value)
{
    char byte = (char)value;
    fsdp_text_add(&said, &byte, 1);
}

static void say_i64(int64_t value)
{
    fsdp_text_add(&said, (const char *)&value, sizeof value);
}

static void say_string(const char *text)
{
    uint32_t size = (uint32_t)strlen(text);
    fsdp_text_add(&said, (const char *)&size, sizeof size);
    fsdp_text_add(&said, text, size);
}

static void say_dataset(const char *name, unsigned dtype, unsigned mark, int64_t count,
                        int64_t offset)
{
    say_u8('D');
    say_string(name);
    say_u8(dtype);
    say_u8(mark);
    say_u8(0);
    say_u8(1);
    say_i64(count);
    say_i64(offset);
    say_i64(count);
    say_u8(0); /* no checksums */
    say_u8(0); /* not chunked */
}

static fsdp_status take_said(fsdp_error *err)
{
    const fsdp_h5_place place = {.stream = FSDP_NO_STREAM,
                                 .size = fsdp_source_file_size(source, 0)};
    return fsdp_h5_listing_take(said.data, said.size, source, &place, &tensors, err);
}

static void expect_nonsense(const char *what)
{
    fsdp_error err = {0};
    cr_assert_eq(take_said(&err), FSDP_ERR_REFUSED, "%s", err.text);
    ASSERT_SAYS("sent an invalid list");
    ASSERT_SAYS(what);
}

Test(hdf5_listing, plain_bytes_are_read_from_the_file)
{
    fsdp_error err = {0};
    say_dataset("w", FSDP_I16, 0, 3, 10);
    say_u8('E');
    ASSERT_OK(take_said(&err));
    ASSERT_OK(fsdp_source_complete(source, &err));
    char data[6];
    const fsdp_box box = {.ndim = 1, .len = {3}};
    fsdp_source_reader reader = {0};
    ASSERT_OK(fsdp_source_read(source, 0, &box, data, &reader, &err));
    cr_assert_eq(memcmp(data, "abcdef", 6), 0);
    fsdp_source_reader_release(&reader);
}

Test(hdf5_listing, bytes_beyond_the_file_are_damage)
{
    fsdp_error err = {0};
    say_dataset("w", FSDP_I16, 0, 3, 11);
    say_u8('E');
    cr_assert_eq(take_said(&err), FSDP_ERR_DAMAGED);
    ASSERT_SAYS("extends past the end of the file");
}

Test(hdf5_listing, every_cut_of_it_is_nonsense)
{
    say_dataset("w", FSDP_F32, 0, 2, -1);
    say_u8('V');
    say_string("v");
    say_u8('s');
    say_u8(1);
    say_i64(1);
    say_string("text");
    say_u8('A');
    say_string("");
    say_string("a");
    say_u8('f');
    say_u8(0);
    say_i64(0);
    say_u8('S');
    say_string("link");
    say_string("/w");
    say_u8('E');
    size_t whole = said.size;
    for (size_t size = 0; size < whole; size++) {
        said.size = size;
        expect_nonsense("");
    }
}

Test(hdf5_listing, what_follows_the_end_is_nonsense)
{
    say_u8('E');
    say_u8('E');
    expect_nonsense("after its end");
}

Test(hdf5_listing, a_type_that_is_none_is_nonsense)
{
    const unsigned wrong[][2] = {{0, 0}, {FSDP_DTYPE_COUNT, 0}, {0, 255}, {255, FSDP_F32}};
    for (size_t i = 0; i < 4; i++) {
        said.size = 0;
        say_dataset("w", wrong[i][0], wrong[i][1], 3, 0);
        say_u8('E');
        expect_nonsense("no type or shape");
    }
}

Test(hdf5_listing, a_mark_of_another_size_is_nonsense)
{
    say_dataset("%index", FSDP_U8, 0, 3, 0);
    say_dataset("w", FSDP_U8, FSDP_F32, 3, 0);
    say_u8('E');
    expect_nonsense("no type or shape");
}

Test(hdf5_listing, gigabytes_out_of_nothing_are_refused)
{
    fsdp_error err = {0};
    say_u8('D');
    say_string("w");
    say_u8(FSDP_U8);
    say_u8(0);
    say_u8(0);
    say_u8(1);
    say_i64((int64_t)5 << 30);
    say_i64(-1);
    say_i64(INT64_MAX); /* what is stored, as it says */
    say_u8(0);
    say_u8(0);
    say_u8('E');
    cr_assert_eq(take_said(&err), FSDP_ERR_REFUSED);
    ASSERT_SAYS("of which only 16 are stored");
}

Test(hdf5_listing, chunks_of_no_size_are_nonsense)
{
    const int64_t wrong[] = {0, -1, INT64_MAX, (int64_t)1 << 31};
    for (size_t i = 0; i < 4; i++) {
        said.size = 0;
        say_dataset("w", FSDP_F32, 0, 3, -1);
        said.data[said.size - 1] = 1;
        say_i64(wrong[i]);
        say_u8('E');
        expect_nonsense("a chunk has no size");
    }
}

Test(hdf5_listing, a_list_is_no_longer_than_its_bytes)
{
    const int64_t shapes[][2] = {{INT64_MAX, 1}, {1 << 20, 1}, {-1, 1}, {INT64_MAX, INT64_MAX}};
    for (size_t i = 0; i < 4; i++) {
        said.size = 0;
        say_u8('V');
        say_string("v");
        say_u8('s');
        say_u8(2);
        say_i64(shapes[i][0]);
        say_i64(shapes[i][1]);
        say_u8('E');
        expect_nonsense("");
    }
}

Test(hdf5_listing, an_empty_array_is_an_empty_list)
{
    fsdp_error err = {0};
    say_u8('V');
    say_string("v");
    say_u8('s');
    say_u8(2);
    say_i64((int64_t)1 << 40);
    say_i64(0);
    say_u8('E');
    ASSERT_OK(take_said(&err));
    const fsdp_value *value = fsdp_source_entry_at(source, 0)->value;
    cr_assert(value->kind == FSDP_VALUE_LIST && value->as.list.count == 0);
}

Test(hdf5_listing, names_that_are_not_utf8_are_refused)
{
    fsdp_error err = {0};
    say_dataset("w\xff", FSDP_U8, 0, 3, 0);
    say_u8('E');
    cr_assert_eq(take_said(&err), FSDP_ERR_REFUSED);
    ASSERT_SAYS("not UTF-8");
}

Test(hdf5_listing, attributes_become_json)
{
    fsdp_error err = {0};
    for (int i = 0; i < 2; i++) {
        say_u8('A');
        say_string("g\"");
        say_string(i == 0 ? "n" : "t");
        say_u8(i == 0 ? 'u' : 'e');
        if (i == 0) {
            say_u8(1);
            say_i64(2);
            say_i64(3);
            say_i64(-1);
        } else {
            say_string("|S1");
        }
    }
    say_u8('A');
    say_string("");
    say_string("x");
    say_u8('c');
    say_string("reference");
    say_u8('E');
    ASSERT_OK(take_said(&err));
    cr_assert_str_eq(fsdp_source_extra(source, "attributes"),
                     "{\"g\\\"\": {\"n\": [3, {\"int\": \"18446744073709551615\"}], "
                     "\"t\": {\"empty\": \"|S1\"}}, \"/\": {\"x\": {\"opaque\": \"reference\"}}}");
}

Test(hdf5_listing, two_objects_of_one_path_are_nonsense)
{
    const char *const paths[] = {"a", "b", "a"};
    for (int i = 0; i < 3; i++) {
        say_u8('A');
        say_string(paths[i]);
        say_string("x");
        say_u8('c');
        say_string("y");
    }
    say_u8('E');
    expect_nonsense("two objects have one path");
}

Test(hdf5_listing, names_and_types_of_our_own_files_are_understood)
{
    fsdp_error err = {0};
    say_dataset("%index", FSDP_U8, 0, 3, 0);
    say_dataset("a%2Fb", FSDP_U8, FSDP_F8_E4M3FN, 3, 0);
    say_u8('E');
    ASSERT_OK(take_said(&err));
    cr_assert_eq(fsdp_source_entry_count(source), 1);
    const fsdp_source_tensor *tensor = fsdp_source_tensor_at(source, 0);
    cr_assert_str_eq(tensor->name, "a/b");
    cr_assert_eq(tensor->dtype, FSDP_F8_E4M3FN);
}

Test(hdf5_listing, names_and_types_of_other_files_are_as_they_stand)
{
    fsdp_error err = {0};
    say_dataset("a%2Fb", FSDP_U8, FSDP_F8_E4M3FN, 3, 0);
    say_dataset("keras", 0, FSDP_BF16, 3, 0);
    say_u8('E');
    ASSERT_OK(take_said(&err));
    cr_assert_str_eq(fsdp_source_tensor_at(source, 0)->name, "a%2Fb");
    cr_assert_eq(fsdp_source_tensor_at(source, 0)->dtype, FSDP_U8);
    cr_assert_eq(fsdp_source_tensor_at(source, 1)->dtype, FSDP_BF16);
}

/* --- LZF -------------------------------------------------------------------------------------- */

Test(hdf5_lzf, literals_and_copies)
{
    /* "abc", then 5 bytes from 3 back (which it writes itself), then 10 from 1 back */
    const unsigned char data[] = {2, 'a', 'b', 'c', 3 << 5, 2, 7 << 5, 1, 0};
    unsigned char out[18];
    size_t size;
    cr_assert_eq(fsdp_lzf_decode(data, sizeof data, out, sizeof out, &size), FSDP_LZF_OK);
    cr_assert_eq(size, 18);
    cr_assert_eq(memcmp(out, "abcabcabbbbbbbbbbb", 18), 0);
    for (size_t room = 0; room < 18; room++)
        cr_assert_eq(fsdp_lzf_decode(data, sizeof data, out, room, &size), FSDP_LZF_NO_ROOM);
}

Test(hdf5_lzf, what_is_cut_or_leads_before_the_beginning_is_damaged)
{
    const unsigned char cut[] = {2, 'a', 'b'}, early[] = {0, 'a', 1 << 5, 1},
                        half[] = {0, 'a', 1 << 5};
    const unsigned char longer[] = {0, 'a', 7 << 5, 1};
    unsigned char out[300];
    size_t size;
    cr_assert_eq(fsdp_lzf_decode(cut, sizeof cut, out, sizeof out, &size), FSDP_LZF_DAMAGED);
    cr_assert_eq(fsdp_lzf_decode(early, sizeof early, out, sizeof out, &size), FSDP_LZF_DAMAGED);
    cr_assert_eq(fsdp_lzf_decode(half, sizeof half, out, sizeof out, &size), FSDP_LZF_DAMAGED);
    cr_assert_eq(fsdp_lzf_decode(longer, sizeof longer, out, sizeof out, &size), FSDP_LZF_DAMAGED);
}
