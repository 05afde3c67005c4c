/*
 * A format that is added as docs/architecture.md says: its room and a line of the list (toy_formats.c).
 * Conversions, detection, checks and messages know it without a change of theirs.
 */
#include "base/io/io.h"

#include <criterion/criterion.h>
#include <fsdp/fsdp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char directory[64], toy[100], native[100], back[100];
static fsdp_error err;

static void begin(void)
{
    strcpy(directory, "/tmp/fsdp-toy-XXXXXX");
    cr_assert(mkdtemp(directory));
    snprintf(toy, sizeof toy, "%s/model.toy", directory);
    snprintf(native, sizeof native, "%s/native", directory);
    snprintf(back, sizeof back, "%s/back.toy", directory);
    err = (fsdp_error){0};
}

static void end(void)
{
    cr_assert_eq(fsdp_io_remove_tree(NULL, directory, NULL), FSDP_OK);
}

TestSuite(toy_format, .init = begin, .fini = end);

/* A file of three tensors: 'a' [2, 3], 'b' of no dims, 'c' [1000]. */
static void write_toy(const char *path)
{
    static const unsigned char header[] = {'T', 'O', 'Y', '1', 3, 0, 0, 0, /* */
                                           1,   0,   0,   0,   2, 0, 0, 0, 2,    0, 0, 0, 3,
                                           0,   0,   0,   'a',                  /* */
                                           1,   0,   0,   0,   0, 0, 0, 0, 'b', /* */
                                           1,   0,   0,   0,   1, 0, 0, 0, 0xe8, 3, 0, 0, 'c'};
    FILE *out = fopen(path, "wb");
    cr_assert(out && fwrite(header, 1, sizeof header, out) == sizeof header);
    for (int i = 0; i < 1007; i++) {
        float number = (float)i;
        cr_assert_eq(fwrite(&number, sizeof number, 1, out), 1);
    }
    cr_assert_eq(fclose(out), 0);
}

static void convert(const char *from, const char *to, const char *format, int world)
{
    const fsdp_convert_opts opts = {.format = format, .world = world};
    cr_assert_eq(fsdp_checkpoint_convert(from, to, &opts, &err), FSDP_OK, "%s", err.text);
}

static void expect_refusal(const char *from, const fsdp_convert_opts *opts, fsdp_status status,
                           const char *words)
{
    cr_assert_eq(fsdp_checkpoint_convert(from, back, opts, &err), status, "%s", err.text);
    cr_assert(strstr(err.text, words), "%s", err.text);
    cr_assert(access(back, F_OK) != 0);
}

Test(toy_format, is_a_format_by_its_names)
{
    const fsdp_format *format = fsdp_format_to("toy");
    cr_assert(format && format == fsdp_format_to("toys") && format == fsdp_format_from("toy"));
    cr_assert_null(fsdp_format_from("toys"));
}

Test(toy_format, converts_both_ways_and_is_found_by_its_bytes)
{
    char command[300];
    write_toy(toy);
    convert(toy, native, "fsdp", 3);
    convert(native, back, "toys", 0);
    fsdp_checkpoint *checkpoint = NULL;
    cr_assert_eq(fsdp_checkpoint_open(back, NULL, &checkpoint, &err), FSDP_OK, "%s", err.text);
    cr_expect_str_eq(fsdp_checkpoint_describe(checkpoint)->format, "toy");
    fsdp_checkpoint_close(checkpoint);
    snprintf(command, sizeof command, "cmp '%s' '%s'", toy, back);
    cr_assert_eq(system(command), 0);
}

Test(toy_format, refuses_what_it_cannot_hold)
{
    write_toy(toy);
    const fsdp_convert_opts bf16 = {.format = "toy", .select = {.dtype = "bf16"}};
    expect_refusal(toy, &bf16, FSDP_ERR_USAGE, "toy cannot hold");
}

Test(toy_format, names_a_file_that_ends_early)
{
    write_toy(toy);
    cr_assert_eq(truncate(toy, 20), 0);
    expect_refusal(toy, &(fsdp_convert_opts){.format = "toy"}, FSDP_ERR_DAMAGED,
                   "ends in its header");
    write_toy(toy);
    cr_assert_eq(truncate(toy, 4000), 0);
    expect_refusal(toy, &(fsdp_convert_opts){.format = "toy"}, FSDP_ERR_DAMAGED, "model.toy");
}
