/* The way from a directory to the checkpoint that it means. */
#include "base/core/mem.h"
#include "formats/frameworks.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char directory[] = "/tmp/fsdp-frameworks-XXXXXX";
static fsdp_error err;

static void begin(void)
{
    cr_assert(mkdtemp(directory) && chdir(directory) == 0);
}

static void end(void)
{
    cr_assert_eq(fsdp_io_remove_tree(NULL, directory, NULL), FSDP_OK);
}

TestSuite(frameworks, .init = begin, .fini = end);

/* A safetensors file without tensors. */
static void make(const char *folder)
{
    char path[64];
    cr_assert(snprintf(path, sizeof path, "%s/model.safetensors", folder) > 0);
    cr_assert_eq(mkdir(folder, 0700), 0);
    FILE *file = fopen(path, "w");
    cr_assert(file && fwrite("\2\0\0\0\0\0\0\0{}", 10, 1, file) == 1 && fclose(file) == 0);
}

static fsdp_status resolve(char **path_out)
{
    static const fsdp_framework_way way;
    return fsdp_framework_resolve(fsdp_io_posix(), ".", &way, path_out, &err);
}

/* A failing allocation is an error, or the answer is as without it; wanted NULL: there are several. */
static void expect_every_failure(const char *wanted)
{
    char *path = NULL;
    fsdp_status good = wanted ? FSDP_OK : FSDP_ERR_USAGE;
    fsdp_mem_fail_after(-1, false);
    cr_assert_eq(resolve(&path), good, "%s", err.text);
    int64_t count = fsdp_mem_fail_after(-1, false);
    cr_assert(wanted ? path && strcmp(path, wanted) == 0 : !path);
    fsdp_free(path);
    cr_assert_gt(count, 10);
    for (int64_t i = 0; i < count; i++) {
        fsdp_mem_fail_after(i, false);
        fsdp_status st = resolve(&path);
        fsdp_mem_fail_after(-1, false);
        cr_expect(st == FSDP_ERR_LIMIT || st == good, "allocation %lld: %s", (long long)i,
                  err.text);
        cr_expect(!path || (wanted && strcmp(path, wanted) == 0), "allocation %lld: %s",
                  (long long)i, path);
        fsdp_free(path);
    }
}

Test(frameworks, a_failing_allocation_hides_no_folder)
{
    make("a");
    make("b");
    expect_every_failure(NULL);
}

Test(frameworks, a_failing_allocation_skips_no_step)
{
    make("step_1");
    make("step_2");
    expect_every_failure("./step_2");
}

/* Once without memory: the kind of a path is then not known, and it must not count as a file. */
static int lacks_memory_after;

static int info_without_memory(fsdp_io *io, const char *path, fsdp_file_info *info_out)
{
    (void)io;
    return lacks_memory_after-- == 0 ? -ENOMEM
                                     : fsdp_io_posix()->ops->info(fsdp_io_posix(), path, info_out);
}

Test(frameworks, a_path_of_unknown_kind_is_an_error)
{
    static const fsdp_framework_way way;
    fsdp_io_ops ops = *fsdp_io_posix()->ops;
    fsdp_io io = {.ops = &ops};
    char *path = NULL;
    ops.info = info_without_memory;
    make("step_1");
    make("step_2");
    for (int i = 0;; i++) {
        lacks_memory_after = i;
        fsdp_status st = fsdp_framework_resolve(&io, ".", &way, &path, &err);
        if (lacks_memory_after >= 0)
            break;
        cr_expect(st == FSDP_ERR_LIMIT || (path && strcmp(path, "./step_2") == 0), "call %d: %s", i,
                  path ? path : err.text);
        fsdp_free(path);
        cr_assert_lt(i, 100);
    }
    cr_expect_str_eq(path, "./step_2");
    fsdp_free(path);
}

Test(frameworks, weights_of_transformers_go_before_those_of_meta)
{
    static const fsdp_framework_way way;
    char *path = NULL;
    make("hub");
    FILE *file = fopen("hub/consolidated.01.pth", "w");
    cr_assert(file && fclose(file) == 0);
    cr_assert_eq(fsdp_framework_resolve(fsdp_io_posix(), "hub", &way, &path, &err), FSDP_OK, "%s",
                 err.text);
    cr_expect_null(path, "%s", path);
}
