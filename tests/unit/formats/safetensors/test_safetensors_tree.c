/* Trees of folders as Nanotron writes them: parts of parameters, and those that lie about their place. */
#include "base/core/mem.h"
#include "formats/source.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define RANK "_pp-rank-0-of-1_tp-rank-%d-of-2.safetensors"

static char directory[] = "/tmp/fsdp-tree-XXXXXX";
static fsdp_error err;
static fsdp_source *source;

static void make_file(const char *path, const void *data, size_t size)
{
    FILE *file = fopen(path, "w");
    cr_assert(file && fwrite(data, 1, size, file) == size && fclose(file) == 0);
}

static void begin(void)
{
    cr_assert(mkdtemp(directory) && chdir(directory) == 0);
    make_file("checkpoint_metadata.json", "{}", 2);
    cr_assert(mkdir("model", 0700) == 0 && mkdir("model/lm_head", 0700) == 0);
}

static void end(void)
{
    fsdp_source_close(source);
    cr_assert_eq(fsdp_io_remove_tree(NULL, directory, NULL), FSDP_OK);
}

TestSuite(tree, .init = begin, .fini = end);

/* A file with one tensor of 8 bytes per row: numbers from first on. */
static void write_part(const char *path, int rows, unsigned char first, const char *metadata)
{
    char text[1024] = {0};
    unsigned char data[256];
    size_t bytes = (size_t)rows * 8;
    int size = snprintf(text + 8, sizeof text - 8,
                        "{\"__metadata__\":{%s},\"data\":{\"dtype\":\"U8\",\"shape\":[%d,8],"
                        "\"data_offsets\":[0,%zu]}}",
                        metadata, rows, bytes);
    text[0] = (char)(size & 255);
    text[1] = (char)(size >> 8);
    for (size_t i = 0; i < bytes; i++)
        data[i] = (unsigned char)(first + i);
    cr_assert(size > 0 && bytes <= sizeof data);
    memcpy(text + 8 + size, data, bytes);
    make_file(path, text, 8 + (size_t)size + bytes);
}

static void write_rank(int rank, int rows, const char *shape, const char *pairs)
{
    char path[100], metadata[300];
    snprintf(path, sizeof path, "model/lm_head/model_weight" RANK, rank);
    snprintf(metadata, sizeof metadata,
             "\"version\":\"1.4\",\"unsharded_shape\":\"%s\",\"local_global_slices_pairs\":\"%s\"",
             shape, pairs);
    write_part(path, rows, (unsigned char)(rank * 100), metadata);
}

static fsdp_status open_tree(void)
{
    fsdp_source_close(source);
    source = NULL;
    err = (fsdp_error){0};
    return fsdp_source_open(NULL, "model", NULL, &source, &err);
}

static void expect_damage(const char *said)
{
    cr_expect_eq(open_tree(), FSDP_ERR_DAMAGED, "%s", err.text);
    cr_expect(strstr(err.text, said), "%s", err.text);
}

Test(tree, parts_become_one_parameter)
{
    write_rank(0, 3, "(6, 8)",
               "0,1,None|None,None,None#0,1,None|None,None,None;"
               "1,3,None|0,8,None#2,4,None|0,8,None");
    write_rank(1, 3, "(np.int64(6), 8)",
               "0,1,1|0,8,1#1,2,None|0,8,None;"
               "1,3,None|None,8,None#4,6,None|0,None,None");
    write_part("model/lm_head/model_bias.safetensors", 1, 7, "\"version\":\"1.4\"");
    cr_assert_eq(open_tree(), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_source_tensor_count(source), 2);
    const fsdp_source_tensor *bias = fsdp_source_tensor_at(source, 0),
                             *weight = fsdp_source_tensor_at(source, 1);
    cr_expect_str_eq(bias->name, "lm_head.bias");
    cr_expect_str_eq(weight->name, "lm_head.weight");
    cr_assert(weight->ndim == 2 && weight->shape[0] == 6 && weight->shape[1] == 8);
    unsigned char data[48];
    const unsigned char first[] = {0, 100, 8, 16, 108, 116};
    const fsdp_box whole = {.ndim = 2, .len = {6, 8}};
    fsdp_source_reader reader = {0};
    cr_assert_eq(fsdp_source_read(source, 1, &whole, data, &reader, &err), FSDP_OK);
    fsdp_source_reader_release(&reader);
    for (size_t i = 0; i < sizeof data; i++)
        cr_expect_eq(data[i], first[i / 8] + i % 8, "byte %zu is %d", i, data[i]);
}

Test(tree, a_missing_rank_is_damage)
{
    write_rank(0, 3, "(6, 8)", "0,3,None|0,8,None#0,3,None|0,8,None");
    expect_damage("lm_head.weight");
}

Test(tree, parts_that_lie_are_damage)
{
    write_rank(0, 3, "(6, 8)", "0,3,None|0,8,None#0,3,None|0,8,None");
    static const char *const pairs[] = {
        "0,3,None|0,8,None#2,5,None|0,8,None", /* a row twice, and one missing */
        "0,3,None|0,8,None#3,7,None|0,8,None",
        "0,4,None|0,8,None#3,7,None|0,8,None",
        "0,3,2|0,8,None#3,6,2|0,8,None",
        "0,3,None#3,6,None",
        "0,3,None|0,8,None",
        "0,3,None|0,8,None#3,6,None|0,8,None;",
        "0,-3,None|0,8,None#3,6,None|0,8,None"};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        write_rank(1, 3, "(6, 8)", pairs[i]);
        expect_damage("weight");
    }
    static const char *const shapes[] = {"(7, 8)", "6, 8", "(6, 8", "(6)", "(6, 8, x)", "[6, 8]"};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        write_rank(1, 3, shapes[i], "0,3,None|0,8,None#3,6,None|0,8,None");
        expect_damage("tp-rank-1");
    }
}

Test(tree, a_file_of_another_program_is_named)
{
    make_file("model/lm_head/model_weight.safetensors", "\2\0\0\0\0\0\0\0{}", 10);
    expect_damage("holds no tensor 'data'");
}

Test(tree, a_folder_without_parameters_is_not_found)
{
    cr_expect_eq(open_tree(), FSDP_ERR_NOT_FOUND, "%s", err.text);
}

Test(tree, folders_have_a_limit)
{
    char path[200] = "model";
    for (int i = 0; i < 40; i++) {
        strcat(path, "/a");
        cr_assert_eq(mkdir(path, 0700), 0);
    }
    cr_expect_eq(open_tree(), FSDP_ERR_LIMIT, "%s", err.text);
    for (char *slash; (slash = strrchr(path, '/'));
         *slash = '\0') /* deeper than remove_tree goes */
        cr_assert_eq(rmdir(path), 0);
}

Test(tree, a_failing_allocation_is_an_error)
{
    write_rank(0, 3, "(6, 8)", "0,3,None|0,8,None#0,3,None|0,8,None");
    write_rank(1, 3, "(6, 8)", "0,3,None|0,8,None#3,6,None|0,8,None");
    fsdp_mem_fail_after(-1, false);
    cr_assert_eq(open_tree(), FSDP_OK, "%s", err.text);
    int64_t count = fsdp_mem_fail_after(-1, false);
    for (int64_t i = 0; i < count; i++) {
        fsdp_mem_fail_after(i, false);
        fsdp_status st = open_tree();
        fsdp_mem_fail_after(-1, false);
        cr_expect(st == FSDP_ERR_LIMIT || (st == FSDP_OK && source), "allocation %lld: %d %s",
                  (long long)i, st, err.text);
    }
}
