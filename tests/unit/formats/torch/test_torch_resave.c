/* Values that only Python understands are looked for in their file once more: it must be the same one. */
#include "formats/source.h"
#include "formats/torch/torch_emit.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char directory[64], path[100], other[100];

static void set_up(void)
{
    snprintf(directory, sizeof directory, "/tmp/fsdp-torch-resave-XXXXXX");
    cr_assert_not_null(mkdtemp(directory));
    snprintf(path, sizeof path, "%s/x.pt", directory);
    snprintf(other, sizeof other, "%s/y.pt", directory);
}

static void tear_down(void)
{
    cr_assert_eq(fsdp_io_remove_tree(fsdp_io_posix(), directory, NULL), FSDP_OK);
}

TestSuite(torch_resave, .init = set_up, .fini = tear_down);

enum { PADDING = 1000 };

/* {"padding": PADDING numbers, or as many bytes of text, "object": mine.Thing()} */
static void put_pickle(fsdp_pickler *pickler, bool is_text)
{
    static char text[2 * PADDING];
    fsdp_pickler_begin(pickler);
    fsdp_pickler_op(pickler, FSDP_OP_EMPTY_DICT);
    fsdp_pickler_op(pickler, FSDP_OP_MARK);
    fsdp_pickler_text(pickler, "padding", 7);
    size_t begin = pickler->text.size;
    fsdp_pickler_op(pickler, FSDP_OP_EMPTY_LIST);
    fsdp_pickler_op(pickler, FSDP_OP_MARK);
    for (int i = 0; i < PADDING; i++)
        fsdp_pickler_int(pickler, 7);
    fsdp_pickler_op(pickler, FSDP_OP_APPENDS);
    size_t size = pickler->text.size - begin;
    if (is_text) { /* 'X' and the size before it */
        pickler->text.size = begin;
        memset(text, 't', sizeof text);
        cr_assert(size >= 5 && size - 5 <= sizeof text);
        fsdp_pickler_text(pickler, text, size - 5);
        cr_assert_eq(pickler->text.size - begin, size);
    }
    fsdp_pickler_text(pickler, "object", 6);
    fsdp_pickler_global(pickler, "mine", "Thing");
    fsdp_pickler_op(pickler, FSDP_OP_EMPTY_TUPLE);
    fsdp_pickler_op(pickler, FSDP_OP_REDUCE);
    fsdp_pickler_op(pickler, FSDP_OP_SETITEMS);
    fsdp_pickler_op(pickler, FSDP_OP_STOP);
    cr_assert_not(pickler->text.failed);
}

/* A torch.save file of that pickle; into the file that is there, or a new one. */
static void put_file(const char *name, bool is_text)
{
    fsdp_zip_record records[TORCH_FIXED] = {0};
    fsdp_pickler pickler = {0};
    fsdp_text text = {0};
    fsdp_error err = {0};
    int64_t size;
    put_pickle(&pickler, is_text);
    cr_assert_eq(torch_place_archive(records, 0, &pickler.text, &size, &err), FSDP_OK);
    torch_emit_leading(&text, records, &pickler.text);
    torch_emit_closing(&text, records, 0);
    cr_assert(!text.failed && (int64_t)text.size == size);
    int fd = open(name, O_WRONLY | O_CREAT, 0600);
    cr_assert(fd >= 0 && write(fd, text.data, text.size) == (ssize_t)text.size && close(fd) == 0);
    fsdp_text_release(&text);
    fsdp_pickler_release(&pickler);
}

static fsdp_source *open_source(size_t *object_out)
{
    fsdp_error err = {0};
    fsdp_source *source;
    cr_assert_eq(fsdp_source_open(NULL, path, NULL, &source, &err), FSDP_OK, "%s", err.text);
    size_t count = fsdp_source_entry_count(source);
    *object_out = 0;
    while (*object_out < count &&
           strcmp(fsdp_source_entry_at(source, *object_out)->name, "object") != 0)
        ++*object_out;
    cr_assert_lt(*object_out, count);
    return source;
}

static void expect_damaged(fsdp_source *source, size_t object, const char *words)
{
    fsdp_error err = {0};
    fsdp_text text = {0};
    cr_expect_eq(fsdp_source_save_value(source, object, 1 << 20, &text, &err), FSDP_ERR_DAMAGED);
    cr_expect(strstr(err.text, words) && strstr(err.text, path), "%s", err.text);
    fsdp_text_release(&text);
    fsdp_source_close(source);
}

Test(torch_resave, an_object_is_told_from_its_file)
{
    fsdp_error err = {0};
    fsdp_text text = {0};
    size_t object;
    put_file(path, false);
    fsdp_source *source = open_source(&object);
    cr_assert_eq(fsdp_source_save_value(source, object, 1 << 20, &text, &err), FSDP_OK, "%s",
                 err.text);
    cr_expect(text.size > 0 && memmem(text.data, text.size, "Thing", 5));
    fsdp_text_release(&text);
    fsdp_source_close(source);
}

/* In the new one, the number of the object's node is that of nothing. */
Test(torch_resave, another_file_of_that_name_is_noticed)
{
    size_t object;
    put_file(path, false);
    put_file(other, true);
    fsdp_source *source = open_source(&object);
    cr_assert_eq(rename(other, path), 0);
    expect_damaged(source, object, "was replaced while it was read");
}

/* An equal one: nothing is mixed in from elsewhere. */
Test(torch_resave, another_file_of_the_same_contents_is_noticed)
{
    size_t object;
    put_file(path, false);
    put_file(other, false);
    fsdp_source *source = open_source(&object);
    cr_assert_eq(rename(other, path), 0);
    expect_damaged(source, object, "was replaced while it was read");
}

/* The new contents have the size and the time of the old ones. */
Test(torch_resave, a_file_that_was_overwritten_in_place_is_noticed)
{
    size_t object;
    struct stat info;
    put_file(path, false);
    cr_assert_eq(stat(path, &info), 0);
    fsdp_source *source = open_source(&object);
    put_file(path, true);
    cr_assert_eq(utimensat(AT_FDCWD, path, (struct timespec[]){info.st_atim, info.st_mtim}, 0), 0);
    expect_damaged(source, object, "was changed while it was read");
}
