/* The data of a training: files, folders and token files as sequences; their order; bad data by name. */
#include "base/io/io.h"
#include "base/core/mem.h"
#include "runtime/tokens/token_data.h"
#include "runtime/tokens/token_order.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[64];
static fsdp_tokenizer *bytes;

static void init(void)
{
    strcpy(folder, "/tmp/fsdp_tokens_XXXXXX");
    cr_assert(mkdtemp(folder));
    cr_assert_eq(fsdp_tokenizer_open("bytes", &bytes, NULL), FSDP_OK);
}

static void release(void)
{
    cr_assert_eq(fsdp_io_remove_tree(NULL, folder, NULL), FSDP_OK);
    fsdp_tokenizer_free(bytes);
}

static const char *path_of(const char *name)
{
    static char paths[8][200];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static const char *write_file(const char *name, const void *data, size_t size)
{
    const char *path = path_of(name);
    FILE *file = fopen(path, "wb");
    cr_assert(file && fwrite(data, 1, size, file) == size && fclose(file) == 0);
    return path;
}

static const char *write_text(const char *name, const char *text)
{
    return write_file(name, text, strlen(text));
}

/* Tokens first, first + 1, ... as llm.c has them, 2 or 4 bytes each. */
static const char *write_bin(const char *name, int width, uint32_t first, uint32_t count)
{
    static uint8_t data[1 << 16];
    uint32_t header[3] = {width == 2 ? 20240520 : 20240801, width == 2 ? 1 : 7, count};
    memset(data, 0, 1024);
    memcpy(data, header, sizeof header);
    for (uint32_t i = 0, id; i < count; i++) {
        id = first + i;
        memcpy(data + 1024 + i * (uint32_t)width, &id, (size_t)width);
    }
    return write_file(name, data, 1024 + count * (size_t)width);
}

static fsdp_token_data *open_data(fsdp_token_options options)
{
    fsdp_token_data *data = NULL;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_token_data_open(&options, &data, &err), FSDP_OK, "%s", err.text);
    return data;
}

static void expect_fail(fsdp_token_options options, fsdp_status status, const char *part)
{
    fsdp_token_data *data = NULL;
    fsdp_error err = {0};
    cr_expect_eq(fsdp_token_data_open(&options, &data, &err), status, "%s", err.text);
    cr_expect(strstr(err.text, part), "'%s' does not say '%s'", err.text, part);
    cr_expect_null(data);
}

/* The ids of a sequence as characters. */
static const char *text_of(const fsdp_token_data *data, fsdp_token_part part, int64_t k,
                           int64_t length)
{
    static char text[100];
    int64_t ids[100];
    cr_assert_eq(fsdp_token_data_read(data, part, 0, k, ids, NULL), FSDP_OK);
    for (int64_t i = 0; i <= length; i++)
        text[i] = (char)ids[i];
    text[length + 1] = '\0';
    return text;
}

Test(token_order, is_a_permutation_that_seed_and_epoch_choose)
{
    for (uint64_t count = 1; count < 1500; count += 1 + count / 8) {
        char *seen = fsdp_alloc(count, 1);
        for (uint64_t k = 0; k < count; k++) {
            uint64_t place = fsdp_token_order(7, count % 3, count, k);
            cr_assert(place < count && !seen[place]);
            seen[place] = 1;
        }
        fsdp_free(seen);
    }
    int equal = 0;
    for (uint64_t k = 0; k < 1000; k++) {
        equal += fsdp_token_order(1, 0, 1000, k) == fsdp_token_order(1, 1, 1000, k);
        equal += fsdp_token_order(1, 0, 1000, k) == fsdp_token_order(2, 0, 1000, k);
        equal += fsdp_token_order(1, 0, 1000, k) == k;
    }
    cr_assert_lt(equal, 20);
    cr_assert_lt(fsdp_token_order(1, 0, UINT64_C(1) << 62, 5), UINT64_C(1) << 62);
    /* checkpoints count on it */
    cr_assert_eq(fsdp_token_order(1, 0, 1000, 0), 7);
}

Test(token_data, sequences_of_a_text, .init = init, .fini = release)
{
    const char *path =
        write_text("t.txt", "abcdefghijklmnopqrstuvwxyzabcdefghijklmn"); /* 40: 38 and 2 */
    fsdp_token_data *data = open_data(
        (fsdp_token_options){.path = path, .tokenizer = bytes, .length = 4, .in_order = true});
    cr_assert_eq(fsdp_token_data_count(data, FSDP_TOKENS_TRAIN), 9);
    cr_assert_eq(fsdp_token_data_tokens(data, FSDP_TOKENS_TRAIN), 38);
    cr_assert_eq(fsdp_token_data_count(data, FSDP_TOKENS_VAL), 0);
    cr_assert_eq(fsdp_token_data_tokens(data, FSDP_TOKENS_VAL), 2);
    cr_assert_str_eq(text_of(data, FSDP_TOKENS_TRAIN, 0, 4), "abcde");
    cr_assert_str_eq(text_of(data, FSDP_TOKENS_TRAIN, 1, 4), "efghi");
    cr_assert_str_eq(text_of(data, FSDP_TOKENS_TRAIN, 8, 4), "ghijk");
    int64_t ids[5];
    cr_assert_eq(fsdp_token_data_read(data, FSDP_TOKENS_TRAIN, 0, 9, ids, NULL), FSDP_ERR_USAGE);
    fsdp_token_data_close(data);
    data = open_data((fsdp_token_options){.path = path, .tokenizer = bytes, .length = 1});
    cr_assert_eq(fsdp_token_data_count(data, FSDP_TOKENS_VAL), 1);
    cr_assert_str_eq(text_of(data, FSDP_TOKENS_VAL, 0, 1), "mn");
    /* every sequence of an epoch once */
    char seen[38] = {0};
    for (int64_t k = 0; k < 37; k++) {
        cr_assert_eq(fsdp_token_data_read(data, FSDP_TOKENS_TRAIN, 3, k, ids, NULL), FSDP_OK);
        int64_t at = (int64_t)fsdp_token_order(0, 3, 37, (uint64_t)k);
        cr_assert_eq(ids[0], "abcdefghijklmnopqrstuvwxyz"[at % 26]);
        cr_assert_eq(seen[at]++, 0);
    }
    fsdp_token_data_close(data);
}

Test(token_data, a_long_text_of_bytes, .init = init, .fini = release)
{
    enum { SIZE = 200003 };
    char *text = fsdp_alloc(SIZE, 1);
    int64_t *ids = fsdp_alloc(SIZE, sizeof *ids);
    for (int i = 0; i < SIZE; i++)
        text[i] = (char)('a' + i % 23);
    const char *path = write_file("long", text, SIZE);
    fsdp_token_options options = {
        .path = path, .val = path, .tokenizer = bytes, .length = SIZE - 1};
    fsdp_token_data *data = open_data(options);
    cr_assert_eq(fsdp_token_data_read(data, FSDP_TOKENS_TRAIN, 0, 0, ids, NULL), FSDP_OK);
    for (int i = 0; i < SIZE; i++)
        cr_assert_eq(ids[i], text[i]);
    fsdp_token_data_close(data);
    text[150000] = '~';
    options.path = write_file("long", text, SIZE);
    options.vocab = '~';
    expect_fail(options, FSDP_ERR_DAMAGED,
                "long' token 150000: the id 126 is not in the vocabulary of 126 ids");
    fsdp_free(text);
    fsdp_free(ids);
}

Test(token_data, a_folder_is_read_in_the_order_of_paths, .init = init, .fini = release)
{
    cr_assert_eq(mkdir(path_of("b"), 0700), 0);
    cr_assert_eq(mkdir(path_of(".git"), 0700), 0);
    write_text(".git/x", "hidden");
    write_text(".hidden", "hidden");
    write_text("b/2", "2222");
    write_text("b/10", "1010");
    write_text("c", "cc");
    write_text("a", "aa");
    write_text("empty", "");
    cr_assert_eq(symlink("..", path_of("b/loop")), 0);
    cr_assert_eq(symlink(".", path_of("z")), 0);
    fsdp_token_data *data = open_data(
        (fsdp_token_options){.path = folder, .tokenizer = bytes, .length = 11, .in_order = true});
    cr_assert_str_eq(text_of(data, FSDP_TOKENS_TRAIN, 0, 11), "aa10102222cc");
    fsdp_token_data_close(data);
    write_text("b/bad", "good\xC3");
    expect_fail((fsdp_token_options){.path = folder, .tokenizer = bytes, .length = 1},
                FSDP_ERR_DAMAGED, "b/bad' is not UTF-8 at byte 4");
}

Test(token_data, the_end_of_a_text_stands_between_files, .init = init, .fini = release)
{
    fsdp_tokenizer *gpt2;
    cr_assert_eq(fsdp_tokenizer_open(GOLDEN "/gpt2", &gpt2, NULL), FSDP_OK);
    write_text("1", "!\"#");
    write_text("2", "$%");
    fsdp_token_data *data =
        open_data((fsdp_token_options){.path = folder, .tokenizer = gpt2, .length = 5});
    int64_t ids[6];
    const int64_t wanted[] = {1, 2, 3, 0, 4, 5};
    cr_assert_eq(fsdp_token_data_read(data, FSDP_TOKENS_TRAIN, 0, 0, ids, NULL), FSDP_OK);
    cr_assert_arr_eq(ids, wanted, sizeof wanted);
    fsdp_token_data_close(data);
    expect_fail(
        (fsdp_token_options){.path = path_of("2"), .tokenizer = gpt2, .length = 1, .vocab = 5},
        FSDP_ERR_DAMAGED, "2' token 1: the id 5 is not in the vocabulary of 5 ids");
    fsdp_tokenizer_free(gpt2);
}

/* Ids of a text are kept in as few bytes as the vocabulary needs: 1, 2 or 4. */
Test(token_data, the_last_id_of_a_vocabulary_is_kept, .init = init, .fini = release)
{
    static const int64_t last[] = {255, 256, 65535, 65536, 1 << 24};
    const char *path = write_text("t", "ab~ab~");
    for (size_t i = 0; i < sizeof last / sizeof *last; i++) {
        char file[500];
        fsdp_tokenizer *tokenizer;
        int64_t ids[6];
        const int64_t wanted[] = {0, 1, last[i], 0, 1, last[i]};
        snprintf(file, sizeof file,
                 "{\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},"
                 "\"decoder\":{\"type\":\"ByteLevel\"},\"model\":{\"type\":\"BPE\",\"vocab\":"
                 "{\"a\":0,\"b\":1,\"~\":%lld},\"merges\":[]}}",
                 (long long)last[i]);
        fsdp_error err = {0};
        cr_assert_eq(fsdp_tokenizer_parse(file, strlen(file), "t", &tokenizer, &err), FSDP_OK, "%s",
                     err.text);
        fsdp_token_data *data = open_data((fsdp_token_options){
            .path = path, .val = path, .tokenizer = tokenizer, .length = 5, .in_order = true});
        cr_assert_eq(fsdp_token_data_read(data, FSDP_TOKENS_TRAIN, 0, 0, ids, NULL), FSDP_OK);
        cr_assert_arr_eq(ids, wanted, sizeof wanted, "%lld", (long long)last[i]);
        fsdp_token_data_close(data);
        fsdp_tokenizer_free(tokenizer);
    }
}

Test(token_data, token_files, .init = init, .fini = release)
{
    write_bin("train_0.bin", 2, 0, 10);
    write_bin("train_1.bin", 2, 10, 3);
    write_bin("train_2.bin", 2, 13, 0);
    write_bin("train_30.bin", 4, 13, 12000);
    const char *val = write_bin("val.bin", 4, 64000, 6007);
    fsdp_token_data *data = open_data((fsdp_token_options){.path = path_of("train_*.bin"),
                                                           .val = val,
                                                           .vocab = 70007,
                                                           .length = 5000,
                                                           .in_order = true});
    cr_assert_eq(fsdp_token_data_tokens(data, FSDP_TOKENS_TRAIN), 12013);
    cr_assert_eq(fsdp_token_data_count(data, FSDP_TOKENS_TRAIN), 2);
    int64_t *ids = fsdp_alloc(5001, sizeof *ids);
    for (int64_t k = 0; k < 2; k++) {
        cr_assert_eq(fsdp_token_data_read(data, FSDP_TOKENS_TRAIN, 0, k, ids, NULL), FSDP_OK);
        for (int64_t i = 0; i <= 5000; i++)
            cr_assert_eq(ids[i], k * 5000 + i);
    }
    cr_assert_eq(fsdp_token_data_count(data, FSDP_TOKENS_VAL), 1);
    cr_assert_eq(fsdp_token_data_read(data, FSDP_TOKENS_VAL, 0, 0, ids, NULL), FSDP_OK);
    cr_assert_eq(ids[5000], 69000);
    fsdp_token_data_close(data);
    fsdp_free(ids);
}

Test(token_data, ids_beyond_the_vocabulary, .init = init, .fini = release)
{
    write_bin("a.bin", 2, 0, 3);
    write_bin("b.bin", 2, 50255, 5);
    fsdp_token_data *data = open_data((fsdp_token_options){
        .path = folder, .val = path_of("a.bin"), .vocab = 50257, .length = 2, .in_order = true});
    int64_t ids[3];
    fsdp_error err = {0};
    cr_assert_eq(fsdp_token_data_read(data, FSDP_TOKENS_TRAIN, 0, 1, ids, NULL), FSDP_OK);
    cr_assert_eq(fsdp_token_data_read(data, FSDP_TOKENS_TRAIN, 0, 2, ids, &err), FSDP_ERR_DAMAGED);
    cr_assert(
        strstr(err.text, "b.bin' token 2: the id 50257 is not in the vocabulary of 50257 ids"),
        "%s", err.text);
    fsdp_token_data_close(data);
}

Test(token_data, bad_data_has_its_own_message, .init = init, .fini = release)
{
    fsdp_token_options options = {.tokenizer = bytes, .length = 8};
    options.path = path_of("none");
    expect_fail(options, FSDP_ERR_NOT_FOUND, "none'");
    options.path = path_of("x*.bin");
    expect_fail(options, FSDP_ERR_NOT_FOUND, "no data files");
    options.path = write_text("e", "");
    expect_fail(options, FSDP_ERR_DAMAGED, "is empty");
    options.path = write_text("s", "12345678");
    expect_fail(options, FSDP_ERR_DAMAGED, "holds 8 tokens for training, a sequence takes 9");
    options.path = write_text("l", "1234567890");
    options.val = path_of("s");
    expect_fail(options, FSDP_ERR_DAMAGED, "for validation holds 8 tokens");
    options.val = NULL;
    options.path = write_text("no.bin", "text");
    expect_fail(options, FSDP_ERR_DAMAGED, "does not begin with the header");
    options.path = write_file("short.bin", "\x88\xD8\x34\x01", 4); /* the magic alone */
    expect_fail(options, FSDP_ERR_DAMAGED, "ends in its header");
    options.path = write_bin("cut.bin", 2, 0, 100);
    cr_assert_eq(truncate(options.path, 1100), 0);
    expect_fail(options, FSDP_ERR_DAMAGED,
                "has 1100 bytes, but its header says 100 tokens of 2 bytes");
    uint32_t header[256] = {20240801, 1, 0};
    options.path = write_file("version.bin", header, sizeof header);
    expect_fail(options, FSDP_ERR_DAMAGED, "tokens is 1");
    cr_assert_eq(mkdir(path_of("m"), 0700), 0);
    write_text("m/readme", "text");
    write_bin("m/t.bin", 2, 0, 100);
    options.path = path_of("m");
    expect_fail(options, FSDP_ERR_USAGE, "name data of one kind");
    options.path = path_of("l");
    options.tokenizer = NULL;
    expect_fail(options, FSDP_ERR_USAGE, "size of the vocabulary");
    options.vocab = 256;
    expect_fail(options, FSDP_ERR_USAGE, "needs a tokenizer");
    options.length = 0;
    expect_fail(options, FSDP_ERR_USAGE, "at least 1");
    expect_fail((fsdp_token_options){.path = "/dev/null", .tokenizer = bytes, .length = 1},
                FSDP_ERR_USAGE, "neither a file nor a folder");
}

static fsdp_value identity_of(const char *path, const char *val)
{
    fsdp_token_data *data =
        open_data((fsdp_token_options){.path = path, .val = val, .tokenizer = bytes, .length = 1});
    fsdp_value value;
    cr_assert_eq(fsdp_token_data_identity(data, &value, NULL), FSDP_OK);
    fsdp_token_data_close(data);
    return value;
}

Test(token_data, identity_follows_the_bytes_and_not_the_place, .init = init, .fini = release)
{
    cr_assert_eq(mkdir(path_of("a"), 0700), 0);
    write_text("a/t", "some text");
    write_text("a/u", "more");
    fsdp_value before = identity_of(path_of("a"), NULL);
    cr_assert_eq(rename(path_of("a"), path_of("b")), 0);
    fsdp_value moved = identity_of(path_of("b"), NULL),
               with_val = identity_of(path_of("b"), path_of("b/t")),
               other_val = identity_of(path_of("b"), path_of("b/u"));
    write_text("b/t", "same size");
    fsdp_value changed = identity_of(path_of("b"), NULL);
    cr_assert(fsdp_value_equal(&before, &moved));
    cr_assert_not(fsdp_value_equal(&before, &changed));
    cr_assert_not(fsdp_value_equal(&before, &with_val));
    cr_assert_not(fsdp_value_equal(&with_val, &other_val));
    cr_assert(fsdp_value_equal(&with_val.as.list.items[1], &other_val.as.list.items[1]));
    cr_assert_eq(with_val.as.list.items[3].as.list.count, 1);
    const fsdp_value *file = &before.as.list.items[1].as.list.items[0];
    cr_assert_eq(memcmp(file->as.list.items[1].as.bytes.data, "t", 1), 0);
    cr_assert_eq(file->as.list.items[3].as.i64, 9);
    cr_assert_eq(file->as.list.items[5].as.bytes.size, 32);
    fsdp_value_release(&before);
    fsdp_value_release(&moved);
    fsdp_value_release(&changed);
    fsdp_value_release(&with_val);
    fsdp_value_release(&other_val);
    write_bin("1.bin", 2, 0, 100);
    write_bin("2.bin", 2, 1, 100);
    before = identity_of(path_of("1.bin"), NULL);
    changed = identity_of(path_of("2.bin"), NULL);
    cr_assert_not(fsdp_value_equal(&before, &changed));
    fsdp_value_release(&before);
    fsdp_value_release(&changed);
}

/* Files are hashed a MiB at a time: two and a half here. */
Test(token_data, identity_follows_every_byte_of_a_large_file, .init = init, .fini = release)
{
    enum { TOKENS = 5 << 18, SIZE = 1024 + 2 * TOKENS };
    uint8_t *data = fsdp_alloc(SIZE, 1);
    const uint32_t header[3] = {20240520, 1, TOKENS};
    memcpy(data, header, sizeof header);
    fsdp_value first = identity_of(write_file("t.bin", data, SIZE), NULL);
    for (int part = 0; part < 3; part++) {
        const size_t at = part == 2 ? SIZE - 2 : 5000 + ((size_t)part << 20);
        data[at] = 1;
        fsdp_value other = identity_of(write_file("t.bin", data, SIZE), NULL);
        cr_expect_not(fsdp_value_equal(&first, &other), "byte %zu", at);
        fsdp_value_release(&other);
        data[at] = 0;
    }
    fsdp_value_release(&first);
    fsdp_free(data);
}

/* The first name of a folder counts where several links lead to it, in whatever order the disk has them. */
Test(token_data, a_folder_under_several_names, .init = init, .fini = release)
{
    cr_assert_eq(mkdir(path_of("data"), 0700), 0);
    cr_assert_eq(mkdir(path_of(".outside"), 0700), 0);
    write_text(".outside/t", "some text");
    for (int i = 0; i < 40; i++) {
        char name[40];
        snprintf(name, sizeof name, "data/link%02d", (i * 7 + 20) % 40);
        cr_assert_eq(symlink("../.outside", path_of(name)), 0);
    }
    fsdp_value value = identity_of(path_of("data"), NULL);
    const fsdp_value *files = &value.as.list.items[1];
    cr_assert_eq(files->as.list.count, 1);
    cr_assert_eq(memcmp(files->as.list.items[0].as.list.items[1].as.bytes.data, "link00/t", 8), 0);
    fsdp_value_release(&value);
}

static fsdp_status whole_way(const char *path)
{
    fsdp_token_options options = {.path = path, .tokenizer = bytes, .length = 2};
    fsdp_token_data *data;
    fsdp_value value = {0};
    int64_t ids[3];
    fsdp_error err = {0};
    fsdp_status status = fsdp_token_data_open(&options, &data, &err);
    if (status == FSDP_OK)
        status = fsdp_token_data_read(data, FSDP_TOKENS_TRAIN, 0, 0, ids, &err);
    if (status == FSDP_OK)
        status = fsdp_token_data_identity(data, &value, &err);
    fsdp_value_release(&value);
    fsdp_token_data_close(data);
    cr_assert_eq(status, err.status);
    return status;
}

Test(token_data, every_allocation_may_fail, .init = init, .fini = release)
{
    write_text("t", "some text");
    const char *paths[] = {path_of("?"), write_bin("x.bin", 4, 0, 50)};
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(whole_way(paths[i]), FSDP_OK);
        for (int64_t n = 0;; n++) {
            fsdp_mem_fail_after(n, true);
            fsdp_status status = whole_way(paths[i]);
            fsdp_mem_fail_after(-1, false);
            if (status == FSDP_OK)
                break;
            cr_assert_eq(status, FSDP_ERR_LIMIT);
            cr_assert_lt(n, 100);
        }
    }
}
