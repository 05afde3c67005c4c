/*
 * Names are bytes with a length: allowed names come back bit for bit from every kind, through
 * conversions and listings; others are refused, each with its own message.
 */
#include "base/core/mem.h"

#include <criterion/criterion.h>
#include <fsdp/fsdp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/io/io.h"

static char folder[64];
static char long_name[10000], longest_name[FSDP_MAX_NAME];

typedef struct odd_name {
    const char *data;
    size_t size;
} odd_name;

/* clang-format off */
static const odd_name odd_names[] = {
    {FSDP_NAME("")}, {FSDP_NAME(".")}, {FSDP_NAME("..")}, {FSDP_NAME("...")}, {FSDP_NAME("/")},
    {FSDP_NAME("//")}, {FSDP_NAME("a")}, {FSDP_NAME("a/b")}, {FSDP_NAME("a//b")}, {FSDP_NAME("/a")},
    {FSDP_NAME("a/")}, {FSDP_NAME("../../etc/passwd")}, {FSDP_NAME("\0")}, {FSDP_NAME("\0\0")},
    {FSDP_NAME("a\0b")}, {FSDP_NAME("a\0")}, {FSDP_NAME("%")}, {FSDP_NAME("%%")}, {FSDP_NAME("%2F")},
    {FSDP_NAME("%00")}, {FSDP_NAME("%index")}, {FSDP_NAME("a%#1")}, {FSDP_NAME("%h")}, {FSDP_NAME(" ")},
    {FSDP_NAME("\n")}, {FSDP_NAME("\r\n\t")}, {FSDP_NAME("\x1b[2J\x07")}, {FSDP_NAME("\x7f\x01\x1f")},
    {FSDP_NAME("\"quoted\\ \"")}, {FSDP_NAME("\\u0000")}, {FSDP_NAME("{\"a\": [1]}")},
    {FSDP_NAME("\xc3\xa9")}, {FSDP_NAME("e\xcc\x81")}, {FSDP_NAME("\xef\xbb\xbf" "bom")},
    {FSDP_NAME("\xe5\x90\x8d\xe5\x89\x8d")}, {FSDP_NAME("\xf0\x9f\x98\x80")},
    {FSDP_NAME("\xe2\x80\xae" "rtl")},
    {FSDP_NAME("\xef\xbf\xbd")}, {FSDP_NAME("A")}, {FSDP_NAME("manifest.json")}, {FSDP_NAME("index.h5")},
    {long_name, sizeof long_name}, {longest_name, sizeof longest_name},
};
/* clang-format on */
enum { NAMES = sizeof odd_names / sizeof odd_names[0] };

static void set_up(void)
{
    strcpy(folder, "/tmp/fsdp-test-XXXXXX");
    cr_assert_not_null(mkdtemp(folder));
    for (size_t i = 0; i < sizeof long_name; i++)
        long_name[i] = (char)('a' + i % 26);
    /* equal beginnings, so that a part of a name does not identify it */
    memcpy(longest_name, long_name, sizeof long_name);
    memset(longest_name + sizeof long_name, '/', sizeof longest_name - sizeof long_name);
}

static void tear_down(void)
{
    cr_assert_eq(fsdp_io_remove_tree(NULL, folder, NULL), FSDP_OK);
}

TestSuite(odd_names, .init = set_up, .fini = tear_down, .timeout = 120);

/* Tensor i holds i * 100 + position; a value and an alias have odd names, too. */
static fsdp_sd *make_state(int world, int rank)
{
    fsdp_sd *sd;
    fsdp_mesh *mesh;
    fsdp_error err = {0};
    const fsdp_placement rows = {FSDP_SHARD, 0, 0};
    const int64_t shape[] = {3};
    cr_assert_eq(fsdp_mesh_create(1, (int64_t[]){world}, (const char *[]){"dp"}, NULL, &mesh, &err),
                 FSDP_OK);
    cr_assert_eq(fsdp_sd_create(&sd, &err), FSDP_OK);
    for (int i = 0; i < NAMES; i++)
        cr_assert_eq(
            fsdp_sd_add_tensor(
                sd, odd_names[i].data, odd_names[i].size,
                &(fsdp_tensor){FSDP_I32, 1, shape, {.mesh = mesh, .placement = {rows}}, NULL},
                &err),
            FSDP_OK, "%s", err.text);
    fsdp_value value = fsdp_value_i64(1);
    cr_assert_eq(fsdp_sd_add_value(sd, FSDP_NAME("value\0/\n"), &value, &err), FSDP_OK, "%s",
                 err.text);
    cr_assert_eq(fsdp_sd_add_alias(sd, FSDP_NAME("alias\0%"), FSDP_NAME("a\0b"), &err), FSDP_OK,
                 "%s", err.text);
    cr_assert_eq(fsdp_sd_allocate(sd, rank, &err), FSDP_OK);
    fsdp_mesh_free(mesh);
    return sd;
}

static int32_t *elements(const fsdp_sd *sd, size_t i, int rank, fsdp_box *box)
{
    const fsdp_entry *entry = fsdp_sd_at(sd, i);
    *box = (fsdp_box){.ndim = 1};
    if (fsdp_layout_box_count(&entry->layout, 1, entry->shape, rank) > 0)
        fsdp_layout_box_at(&entry->layout, 1, entry->shape, rank, 0, box);
    return entry->data;
}

typedef struct names_job {
    const char *path;
    fsdp_save_opts opts;
} names_job;

static fsdp_status save_rank(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    names_job *job = user;
    fsdp_sd *sd = make_state(fsdp_ctl_size(ctl), fsdp_ctl_rank(ctl));
    for (size_t i = 0; i < NAMES; i++) {
        fsdp_box box;
        int32_t *data = elements(sd, i, fsdp_ctl_rank(ctl), &box);
        for (int64_t k = 0; k < box.len[0]; k++)
            data[k] = (int32_t)i * 100 + (int32_t)(box.lo[0] + k);
    }
    fsdp_status st = fsdp_sd_save(sd, ctl, job->path, &job->opts, err);
    fsdp_sd_free(sd);
    return st;
}

static fsdp_status load_rank(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    names_job *job = user;
    fsdp_sd *sd = make_state(fsdp_ctl_size(ctl), fsdp_ctl_rank(ctl));
    fsdp_status st = fsdp_sd_load(sd, ctl, job->path, NULL, err);
    for (size_t i = 0; st == FSDP_OK && i < NAMES; i++) {
        fsdp_box box;
        int32_t *data = elements(sd, i, fsdp_ctl_rank(ctl), &box);
        for (int64_t k = 0; k < box.len[0]; k++)
            if (data[k] != (int32_t)i * 100 + (int32_t)(box.lo[0] + k))
                st = fsdp_fail(err, FSDP_ERR_INTERNAL, "tensor %zu is another one", i);
    }
    fsdp_sd_free(sd);
    return st;
}

static void check_listing(const char *path)
{
    fsdp_checkpoint *checkpoint;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_checkpoint_open(path, NULL, &checkpoint, &err), FSDP_OK, "%s", err.text);
    const fsdp_sd *sd = fsdp_checkpoint_sd(checkpoint);
    cr_assert_eq(fsdp_sd_count(sd), NAMES + 2);
    for (size_t i = 0; i < NAMES; i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        cr_assert_eq(entry->name_size, odd_names[i].size);
        cr_assert_eq(memcmp(entry->name, odd_names[i].data, entry->name_size), 0);
        cr_assert_eq(fsdp_sd_find(sd, odd_names[i].data, odd_names[i].size), (int64_t)i);
    }
    cr_assert_eq(fsdp_sd_find(sd, FSDP_NAME("value\0/\n")), NAMES);
    int64_t alias = fsdp_sd_find(sd, FSDP_NAME("alias\0%"));
    cr_assert_eq(alias, NAMES + 1);
    cr_assert_eq((int64_t)fsdp_sd_at(sd, (size_t)alias)->target,
                 fsdp_sd_find(sd, FSDP_NAME("a\0b")));
    cr_assert_eq(fsdp_sd_find(sd, FSDP_NAME("a\0c")), -1);
    fsdp_checkpoint_close(checkpoint);
}

static void check_all(const char *path)
{
    fsdp_error err = {0};
    names_job job = {.path = path};
    fsdp_verify_opts deep = {.level = FSDP_VERIFY_DEEP, .threads = 1};
    check_listing(path);
    cr_assert_eq(fsdp_ctl_run_threads(3, load_rank, &job, &err), FSDP_OK, "%s: %s", path, err.text);
    cr_assert_eq(fsdp_checkpoint_verify(path, &deep, NULL, &err), FSDP_OK, "%s: %s", path,
                 err.text);
}

Test(odd_names, every_kind_keeps_them_and_so_do_conversions)
{
    char path[100], to[120];
    fsdp_error err = {0};
    for (int kind = FSDP_SHARDED; kind <= FSDP_LOCAL; kind++)
        for (int compress = 0; compress < 2; compress++) {
            snprintf(path, sizeof path, "%s/%d%d", folder, kind, compress);
            names_job job = {.path = path};
            job.opts.kind = (fsdp_kind)kind;
            job.opts.compress = compress;
            job.opts.skip_fsync = true;
            cr_assert_eq(fsdp_ctl_run_threads(2, save_rank, &job, &err), FSDP_OK, "%s", err.text);
            check_all(path);
            snprintf(to, sizeof to, "%s-b", path);
            fsdp_convert_opts convert = {
                .kind = (fsdp_kind)((kind + 1) % 3), .compress = !compress, .skip_fsync = true};
            cr_assert_eq(fsdp_checkpoint_convert(path, to, &convert, &err), FSDP_OK, "%s: %s", path,
                         err.text);
            check_all(to);
        }
}

/* --- refused ---------------------------------------------------------------------------------- */

static void refuse(const char *name, size_t size, const char *words)
{
    fsdp_sd *sd;
    fsdp_error err = {0};
    fsdp_value value = {0};
    cr_assert_eq(fsdp_sd_create(&sd, &err), FSDP_OK);
    cr_assert_eq(fsdp_sd_add_value(sd, FSDP_NAME("first"), &value, &err), FSDP_OK);
    cr_assert_eq(fsdp_sd_add_value(sd, name, size, &value, &err), FSDP_ERR_USAGE);
    cr_assert_not_null(strstr(err.text, words), "'%s' is not in: %s", words, err.text);
    for (const char *c = err.text; *c; c++)
        cr_assert((unsigned char)*c >= ' ' && *c != '\x7f',
                  "a control character reaches the terminal");
    cr_assert_eq(fsdp_sd_count(sd), 1);
    fsdp_sd_free(sd);
}

Test(odd_names, what_is_no_utf8_is_refused)
{
    refuse(FSDP_NAME("a\xff"), "UTF-8");
    refuse(FSDP_NAME("\xc3"), "UTF-8");
    refuse(FSDP_NAME("\xc0\x80"), "UTF-8");         /* an overlong NUL */
    refuse(FSDP_NAME("\xed\xa0\x80"), "UTF-8");     /* half a surrogate pair */
    refuse(FSDP_NAME("\xf4\x90\x80\x80"), "UTF-8"); /* beyond U+10FFFF */
    refuse(FSDP_NAME("\x1b[2J\xfe"), "UTF-8");
}

Test(odd_names, what_is_too_long_is_refused)
{
    char *name = calloc(1, FSDP_MAX_NAME + 1);
    memset(name, 'n', FSDP_MAX_NAME + 1);
    refuse(name, FSDP_MAX_NAME + 1, "65,535");
    free(name);
}

Test(odd_names, a_name_that_is_there_already_is_refused)
{
    refuse(FSDP_NAME("first"), "first");
}
