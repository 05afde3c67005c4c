/* The directory of config.json: of the checkpoint's path, never of the working directory. */
#include "base/core/mem.h"
#include "formats/frameworks.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char directory[] = "/tmp/fsdp-config-XXXXXX";
static fsdp_error err;

static void begin(void)
{
    cr_assert(mkdtemp(directory) && chdir(directory) == 0);
    FILE *file = fopen("config.json", "w");
    cr_assert(file && fputs("{}", file) >= 0 && fclose(file) == 0);
}

static void end(void)
{
    cr_assert_eq(fsdp_io_remove_tree(NULL, directory, NULL), FSDP_OK);
}

TestSuite(framework_config, .init = begin, .fini = end);

static void expect_dir(const char *path, const char *wanted)
{
    char *dir = NULL;
    cr_assert_eq(fsdp_framework_config(fsdp_io_posix(), path, &dir, &err), FSDP_OK);
    cr_expect(wanted ? dir && strcmp(dir, wanted) == 0 : !dir, "%s: %s", path, dir ? dir : "none");
    fsdp_free(dir);
}

Test(framework_config, it_is_beside_the_checkpoint)
{
    expect_dir("model_{r}.pt", ".");
    expect_dir(".", ".");
    expect_dir(directory, directory);
    expect_dir("none/model.pt", NULL);
    expect_dir("/fsdp-no-such-file.pt", access("/config.json", F_OK) == 0 ? "/" : NULL);
}

Test(framework_config, every_failing_allocation_is_an_error)
{
    char *dir = NULL;
    fsdp_mem_fail_after(-1, false);
    cr_assert_eq(fsdp_framework_config(fsdp_io_posix(), directory, &dir, &err), FSDP_OK);
    int64_t count = fsdp_mem_fail_after(-1, false);
    fsdp_free(dir);
    cr_assert_gt(count, 3);
    for (int64_t i = 0; i < count; i++) {
        fsdp_mem_fail_after(i, false);
        fsdp_status st = fsdp_framework_config(fsdp_io_posix(), directory, &dir, &err);
        fsdp_mem_fail_after(-1, false);
        cr_expect_eq(st, FSDP_ERR_LIMIT, "allocation %lld", (long long)i);
        cr_expect_null(dir);
    }
}
