/* A view is compared with the one that belongs to its checkpoint without ever being held in memory. */
#include "base/io/io.h"
#include "base/core/mem.h"
#include "statedict/transfer/box_plan.h"
#include "statedict/checkpoint/view.h"
#include "tests/support/sample_state.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[] = "/tmp/fsdp-view-XXXXXX";
static char view_path[100];

static void make_folder(void)
{
    cr_assert_not_null(mkdtemp(folder));
    snprintf(view_path, sizeof view_path, "%s/" FSDP_VIEW_NAME, folder);
}

static void remove_folder(void)
{
    cr_assert_eq(fsdp_io_remove_tree(fsdp_io_posix(), folder, NULL), FSDP_OK);
}

TestSuite(view_check, .init = make_folder, .fini = remove_folder, .timeout = 240);

typedef struct described {
    fsdp_manifest manifest;
    int *owners;
} described;

/* `count` tensors of 2 * ranks rows, and `aliases` of the first of them. No shard file is needed. */
static described describe(int count, int ranks, int aliases)
{
    fsdp_mesh *mesh = NULL;
    fsdp_sd *sd = NULL;
    char name[60];
    const int64_t shape[] = {2 * ranks, 3};
    const fsdp_placement cut = {.kind = FSDP_SHARD};
    cr_assert_eq(fsdp_sd_create(&sd, NULL), FSDP_OK);
    cr_assert_eq(fsdp_mesh_create(1, (int64_t[]){ranks}, (const char *[]){"dp"}, NULL, &mesh, NULL),
                 FSDP_OK);
    for (int i = 0; i < count; i++) {
        int n = snprintf(name, sizeof name, "model.layers.%d.weight", i);
        cr_assert_eq(
            fsdp_sd_add_tensor(
                sd, name, (size_t)n,
                &(fsdp_tensor){FSDP_F32, 2, shape, {.mesh = mesh, .placement = {cut}}, NULL}, NULL),
            FSDP_OK);
    }
    for (int i = 0; i < aliases; i++) {
        int n = snprintf(name, sizeof name, "tied.%d", i);
        cr_assert_eq(
            fsdp_sd_add_alias(sd, name, (size_t)n, FSDP_NAME("model.layers.0.weight"), NULL),
            FSDP_OK);
    }
    fsdp_mesh_free(mesh);
    described d = {{.kind = FSDP_SHARDED, .sd = sd, .world = ranks, .file_count = ranks}, NULL};
    d.owners = fsdp_alloc(fsdp_sd_count(sd), sizeof *d.owners);
    cr_assert_eq(fsdp_box_plan_owners(sd, FSDP_OWNERS_BALANCED, d.owners, NULL), FSDP_OK);
    return d;
}

static void forget(described *d)
{
    fsdp_sd_free(d->manifest.sd);
    fsdp_free(d->owners);
}

static fsdp_view_opts view_of(const described *d)
{
    return (fsdp_view_opts){.io = fsdp_io_posix(), .manifest = &d->manifest, .owners = d->owners};
}

static void write_view(const described *d)
{
    fsdp_error err = {0};
    fsdp_view_opts opts = view_of(d);
    unlink(view_path);
    cr_assert_eq(fsdp_view_write(&opts, folder, &err), FSDP_OK, "%s", err.text);
}

static bool is_same(const described *d)
{
    bool same = false;
    fsdp_error err = {0};
    fsdp_view_opts opts = view_of(d);
    cr_assert_eq(fsdp_view_check(&opts, folder, &same, &err), FSDP_OK, "%s", err.text);
    return same;
}

static int64_t view_size(void)
{
    struct stat info;
    cr_assert_eq(stat(view_path, &info), 0);
    return info.st_size;
}

static void flip(int file, int64_t at)
{
    unsigned char byte;
    cr_assert_eq(pread(file, &byte, 1, at), 1);
    byte ^= 0x21;
    cr_assert_eq(pwrite(file, &byte, 1, at), 1);
}

/* Also where the number of a tensor's aliases stands, which is only known at the end. */
static void expect_every_byte_counts(int aliases)
{
    described d = describe(3, 2, aliases);
    write_view(&d);
    cr_assert(is_same(&d), "%d aliases", aliases);
    int file = open(view_path, O_RDWR);
    cr_assert_geq(file, 0);
    int64_t size = view_size();
    for (int64_t at = 0; at < size; at += test_sample(1)) {
        flip(file, at);
        cr_assert_not(is_same(&d), "byte %" PRId64 ", %d aliases", at, aliases);
        flip(file, at);
    }
    cr_assert(is_same(&d));
    close(file);
    forget(&d);
}

Test(view_check, every_byte_counts)
{
    expect_every_byte_counts(0);
    expect_every_byte_counts(1);
    expect_every_byte_counts(300); /* a number of two bytes */
}

Test(view_check, a_view_that_is_longer_or_shorter_is_another)
{
    described d = describe(3, 2, 2);
    write_view(&d);
    int64_t size = view_size();
    const int64_t sizes[] = {0, 1, 95, size / 2, size - 1, size + 1};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        write_view(&d);
        cr_assert_eq(truncate(view_path, sizes[i]), 0);
        cr_assert_not(is_same(&d), "%" PRId64 " bytes", sizes[i]);
    }
    forget(&d);
}

Test(view_check, the_view_of_another_checkpoint_is_another)
{
    const int others[][3] = {{3, 2, 1}, {3, 2, 3}, {2, 2, 2}, {4, 2, 2}, {3, 3, 2}, {3, 2, 0}};
    described d = describe(3, 2, 2);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        described other = describe(others[i][0], others[i][1], others[i][2]);
        write_view(&other);
        cr_assert(is_same(&other));
        cr_assert_not(is_same(&d), "number %zu", i);
        forget(&other);
    }
    forget(&d);
}

Test(view_check, a_new_view_takes_the_place_of_any)
{
    described d = describe(3, 2, 2);
    bool written = false;
    fsdp_error err = {0};
    char temporary[120];
    snprintf(temporary, sizeof temporary, "%s/" FSDP_VIEW_TEMPORARY, folder);
    int file = open(temporary, O_RDWR | O_CREAT, 0600); /* of a repair that was killed */
    close(file);
    for (int i = 0; i < 2; i++) {
        fsdp_view_opts opts = view_of(&d);
        cr_assert_eq(fsdp_view_replace(&opts, folder, &written, &err), FSDP_OK, "%s", err.text);
        cr_assert(written);
        cr_assert(is_same(&d));
        cr_assert_eq(truncate(view_path, 7), 0);
    }
    cr_assert_neq(access(temporary, F_OK), 0);
    forget(&d);
}

/* --- memory --- */

#if !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__) /* they have much of their own */

static int64_t peak_bytes(void)
{
    struct rusage usage;
    cr_assert_eq(getrusage(RUSAGE_SELF, &usage), 0);
    return (int64_t)usage.ru_maxrss << 10;
}

Test(view_check, a_large_view_is_not_held_in_memory)
{
    enum { LEAST = 24 << 20, MOST = 4 << 20 };
    bool written;
    described d = describe(1000, 250, 10);
    write_view(&d);
    cr_assert_gt(view_size(), LEAST);
    int64_t before = peak_bytes();
    cr_assert(is_same(&d));
    cr_assert_lt(peak_bytes() - before, MOST, "checking takes %" PRId64 " bytes more than writing",
                 peak_bytes() - before);
    fsdp_view_opts opts = view_of(&d);
    cr_assert_eq(fsdp_view_replace(&opts, folder, &written, NULL), FSDP_OK);
    cr_assert_lt(peak_bytes() - before, MOST);
    forget(&d);
}

#endif
