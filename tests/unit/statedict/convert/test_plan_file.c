/* Plans as files: they read back as written, are never trusted, and errors name changed sources. */
#include "base/text.h"
#include "tests/support/disk/io_fault.h"
#include "statedict/convert/plan_file.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fsdp/fsdp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char directory[64];
static fsdp_error err;

static const char *path_of(const char *name)
{
    static char paths[8][200];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", directory, name);
    return path;
}

static void put_file(const char *name, const char *data, size_t size)
{
    FILE *out = fopen(path_of(name), "wb");
    cr_assert(out && fwrite(data, 1, size, out) == size && fclose(out) == 0);
}

static void put_source(void)
{
    static const char header[] =
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[4,2],\"data_offsets\":[0,32]},"
        "\"b\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[32,40]}}";
    char file[300] = {(char)(sizeof header - 1)};
    memcpy(file + 8, header, sizeof header - 1);
    put_file("source.safetensors", file, 8 + sizeof header - 1 + 40);
}

static void begin(void)
{
    strcpy(directory, "/tmp/fsdp-plan-XXXXXX");
    cr_assert(mkdtemp(directory));
    put_source();
}

static void end(void)
{
    cr_assert_eq(fsdp_io_remove_tree(NULL, directory, NULL), FSDP_OK);
}

TestSuite(plan_file, .init = begin, .fini = end);

static fsdp_status try_plan(const fsdp_convert_opts *opts, const char *path)
{
    fsdp_conversion *conversion;
    fsdp_status st = fsdp_conversion_open(path_of("source.safetensors"), path_of("out"), opts,
                                          &conversion, &err);
    if (st == FSDP_OK)
        st = fsdp_conversion_write_plan(conversion, path, &err);
    fsdp_conversion_close(conversion);
    return st;
}

static void write_plan(const fsdp_convert_opts *opts, const char *name)
{
    cr_assert_eq(try_plan(opts, path_of(name)), FSDP_OK, "%s", err.text);
}

static fsdp_status open_plan(const char *name)
{
    fsdp_convert_order *order = NULL;
    err = (fsdp_error){0};
    fsdp_status st = fsdp_convert_order_open(path_of(name), NULL, &order, &err);
    fsdp_convert_order_close(order);
    return st;
}

static fsdp_status check_plan(const char *name)
{
    fsdp_conversion *conversion;
    err = (fsdp_error){0};
    fsdp_status st = fsdp_conversion_apply(path_of(name), NULL, &conversion, &err);
    fsdp_conversion_close(conversion);
    return st;
}

static char *read_plan(const char *name, size_t *size_out)
{
    char *data;
    cr_assert_eq(fsdp_io_read_file(NULL, path_of(name), 1 << 20, &data, size_out, &err), FSDP_OK);
    return data;
}

/* --- there and back --------------------------------------------------------------------------- */

Test(plan_file, every_option_comes_back)
{
    const char *drops[] = {"values", "^b(\"\\.)?$"}, *renames[] = {"s/^a/b\n/"};
    const int64_t shape[] = {2, 3};
    const char *names[] = {"dp", "tp"};
    fsdp_mesh *mesh = NULL;
    fsdp_convert_order *order = NULL;
    cr_assert_eq(fsdp_mesh_create(2, shape, names, NULL, &mesh, &err), FSDP_OK);
    fsdp_convert_opts opts = {.format = "fsdp", .kind = FSDP_LOCAL, .world = 6, .mesh = mesh};
    opts.select = (fsdp_select_opts){
        .include = "[ab]", .exclude = "^c", .only = FSDP_ONLY_ALL, .drops = drops, .drop_count = 2};
    opts.compress = opts.skip_view = true;
    opts.level = 3;
    write_plan(&opts, "plan");
    opts.select.renames = renames;
    opts.select.rename_count = 1;
    write_plan(&opts, "plan");
    cr_assert_eq(fsdp_convert_order_open(path_of("plan"), NULL, &order, &err), FSDP_OK, "%s",
                 err.text);
    const fsdp_convert_opts *back = &order->opts;
    cr_expect_str_eq(order->from, path_of("source.safetensors"));
    cr_expect_str_eq(order->to, path_of("out"));
    cr_expect(back->kind == FSDP_LOCAL && back->world == 6 && back->level == 3);
    cr_expect(back->compress && back->skip_view && !back->overwrite &&
              back->chunk_bytes == 1 << 20);
    cr_expect(back->mesh && fsdp_mesh_equal(back->mesh, mesh));
    cr_expect_str_eq(back->select.include, "[ab]");
    cr_expect_str_eq(back->select.exclude, "^c");
    cr_expect_eq(back->select.only, FSDP_ONLY_ALL);
    cr_expect(back->select.drop_count == 2 && strcmp(back->select.drops[1], drops[1]) == 0);
    cr_expect(back->select.rename_count == 1 && strcmp(back->select.renames[0], renames[0]) == 0);
    cr_expect_eq(check_plan("plan"), FSDP_OK, "%s", err.text);
    fsdp_convert_order_close(order);
    fsdp_mesh_free(mesh);
}

Test(plan_file, a_mesh_has_as_many_ranks_as_the_world)
{
    fsdp_mesh *mesh = NULL;
    cr_assert_eq(fsdp_mesh_create(1, (int64_t[]){3}, (const char *[]){"dp"}, NULL, &mesh, &err),
                 FSDP_OK);
    for (int world = 0; world < 5; world++) {
        const fsdp_convert_opts opts = {.format = "fsdp", .world = world, .mesh = mesh};
        fsdp_conversion *conversion;
        fsdp_status st = fsdp_conversion_open(path_of("source.safetensors"), path_of("out"), &opts,
                                              &conversion, &err);
        cr_expect_eq(st, world == 0 || world == 3 ? FSDP_OK : FSDP_ERR_USAGE, "%d", world);
        cr_expect(st == FSDP_OK || strstr(err.text, "the mesh has 3 ranks, but the world"), "%s",
                  err.text);
        fsdp_conversion_close(conversion);
    }
    fsdp_mesh_free(mesh);
}

/* Plans of conversions without casts have no members about casts, as in earlier versions. */
Test(plan_file, casts_come_back_and_are_silent_when_there_are_none)
{
    const char *rules[] = {"a=b=keep", "^b=f8e4m3"};
    fsdp_convert_order *order = NULL;
    fsdp_convert_opts opts = {.format = "torch"};
    size_t size;
    write_plan(&opts, "plan");
    char *text = read_plan("plan", &size);
    cr_expect_null(strstr(text, "dtype_for"));
    cr_expect_null(strstr(text, "on_overflow"));
    cr_expect_not_null(strstr(text, "\"rename\": []\n}"));
    fsdp_free(text);
    opts.select = (fsdp_select_opts){.dtype = "bf16",
                                     .dtype_rules = rules,
                                     .dtype_rule_count = 1,
                                     .on_overflow = FSDP_OVERFLOW_CLAMP};
    write_plan(&opts, "plan");
    text = read_plan("plan", &size);
    cr_expect_not_null(strstr(text, "\"dtype\": \"bf16\", \"lo\""), "the new dtype of a part");
    fsdp_free(text);
    cr_assert_eq(fsdp_convert_order_open(path_of("plan"), NULL, &order, &err), FSDP_OK, "%s",
                 err.text);
    const fsdp_select_opts *back = &order->opts.select;
    cr_expect_str_eq(back->dtype, "bf16");
    cr_expect(back->dtype_rule_count == 1 && strcmp(back->dtype_rules[0], rules[0]) == 0);
    cr_expect_eq(back->on_overflow, FSDP_OVERFLOW_CLAMP);
    cr_expect_eq(check_plan("plan"), FSDP_OK, "%s", err.text);
    fsdp_convert_order_close(order);
}

Test(plan_file, what_is_no_plan_is_never_replaced)
{
    fsdp_convert_opts opts = {.format = "torch"};
    write_plan(&opts, "plan");
    write_plan(&opts, "plan");
    put_file("other", "{\"fsdp_plan", 11);
    cr_expect_eq(try_plan(&opts, path_of("other")), FSDP_ERR_EXISTS);
    cr_assert_eq(symlink(path_of("plan"), path_of("link")), 0);
    cr_expect_eq(try_plan(&opts, path_of("link")), FSDP_ERR_EXISTS);
    cr_assert_eq(mkdir(path_of("folder"), 0700), 0);
    cr_expect_eq(try_plan(&opts, path_of("folder")), FSDP_ERR_EXISTS);
    cr_expect_not(fsdp_io_exists(NULL, path_of("plan.tmp")));
}

/* The source and plans, and nothing next to them. */
static int count_files(void)
{
    fsdp_io_names names;
    cr_assert_eq(fsdp_io_list_names(fsdp_io_posix(), directory, NULL, NULL, &names, &err), FSDP_OK);
    int count = (int)names.count;
    fsdp_io_names_release(&names);
    return count;
}

/* Another conversion writes its plan to the path while the plan of this one is written. */
static int write_another(void *user, fsdp_io_call call, const char *path)
{
    (void)call;
    (void)path;
    if (!*(bool *)user) {
        *(bool *)user = true;
        write_plan(&(fsdp_convert_opts){.format = "dcp"}, "plan");
    }
    return 0;
}

Test(plan_file, two_conversions_write_whole_plans_to_one_path)
{
    static const unsigned calls[] = {FSDP_CALL_CREATE, FSDP_CALL_PWRITE, FSDP_CALL_RENAME};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        for (int64_t at = 1; at <= 2; at++) {
            bool was_written = false;
            fsdp_fault_plan plan = {.calls = 1U << calls[i],
                                    .at = at,
                                    .action = FSDP_FAULT_CALL,
                                    .call = write_another,
                                    .user = &was_written};
            fsdp_io *io = NULL;
            cr_assert_eq(fsdp_io_fault_create(NULL, &plan, &io, &err), FSDP_OK);
            write_plan(&(fsdp_convert_opts){.format = "torch", .open.access.disk = io}, "plan");
            fsdp_io_fault_free(io);
            cr_expect_eq(check_plan("plan"), FSDP_OK, "%s", err.text);
            cr_expect(was_written || at > 1);
            cr_expect_eq(count_files(), 2, "%s %d", fsdp_io_call_name(calls[i]), (int)at);
        }
}

static int fail_open(void *user, fsdp_io_call call, const char *path)
{
    (void)call;
    return strstr(path, "/plan") ? -*(const int *)user : 0;
}

/* A path that cannot be opened is not reported as a file of another kind. */
Test(plan_file, a_place_that_cannot_be_looked_at_is_called_so)
{
    static const int reasons[] = {EACCES, EIO, ENAMETOOLONG};
    fsdp_convert_opts opts = {.format = "torch"};
    write_plan(&opts, "plan");
    for (size_t i = 0; i < sizeof reasons / sizeof *reasons; i++) {
        int reason = reasons[i];
        fsdp_fault_plan fault = {.calls = 1 << FSDP_CALL_OPEN,
                                 .at = 1,
                                 .forever = true,
                                 .action = FSDP_FAULT_CALL,
                                 .call = fail_open,
                                 .user = &reason};
        fsdp_io *io = NULL;
        cr_assert_eq(fsdp_io_fault_create(NULL, &fault, &io, &err), FSDP_OK);
        opts.open.access.disk = io;
        cr_expect_neq(try_plan(&opts, path_of("plan")), FSDP_OK);
        cr_expect_eq(err.errnum, reasons[i]);
        cr_expect(strstr(err.text, "cannot open") && strstr(err.text, path_of("plan")), "%s",
                  err.text);
        fsdp_io_fault_free(io);
    }
    opts.open.access.disk = NULL;
    cr_expect_neq(try_plan(&opts, path_of("source.safetensors/plan")), FSDP_OK);
    cr_expect_eq(err.errnum, ENOTDIR);
    cr_expect(strstr(err.text, "cannot open"), "%s", err.text);
}

static int count_open(void *user, fsdp_io_call call, const char *path)
{
    (void)call;
    const char *found = strstr(path, "/source.safetensors"); /* not its digests */
    *(int *)user += found && strcmp(found, "/source.safetensors") == 0;
    return 0;
}

/* Opening a large source takes long: a conversion that is planned, written and run opens it to describe it,
 * to move it, and not to write its plan. */
Test(plan_file, the_source_is_opened_once)
{
    const char *const formats[] = {"fsdp", "torch"};
    for (size_t i = 0; i < 2; i++) {
        int opens = 0;
        fsdp_fault_plan fault = {.calls = 1 << FSDP_CALL_OPEN,
                                 .at = 1,
                                 .forever = true,
                                 .action = FSDP_FAULT_CALL,
                                 .call = count_open,
                                 .user = &opens};
        fsdp_convert_opts opts = {.format = formats[i], .overwrite = true};
        fsdp_conversion *conversion;
        fsdp_io *io = NULL;
        cr_assert_eq(fsdp_io_fault_create(NULL, &fault, &io, &err), FSDP_OK);
        opts.open.access.disk = io;
        cr_assert_eq(fsdp_conversion_open(path_of("source.safetensors"), path_of("out"), &opts,
                                          &conversion, &err),
                     FSDP_OK, "%s", err.text);
        cr_expect_eq(opens, 1, "%s: to describe it", formats[i]);
        cr_assert_eq(fsdp_conversion_write_plan(conversion, path_of("plan"), &err), FSDP_OK, "%s",
                     err.text);
        cr_expect_eq(opens, 1, "%s: to write the plan", formats[i]);
        cr_assert_eq(fsdp_conversion_run(conversion, &err), FSDP_OK, "%s", err.text);
        cr_expect_eq(opens, 1, "%s: to move it, since it is still open", formats[i]);
        fsdp_conversion_close(conversion);
        fsdp_io_fault_free(io);
        cr_assert_eq(fsdp_io_remove_tree(NULL, path_of("out"), NULL), FSDP_OK);
    }
}

Test(plan_file, a_conversion_runs_once_and_only_with_a_plan)
{
    fsdp_convert_opts opts = {.format = "torch"};
    fsdp_conversion *conversion;
    cr_assert_eq(fsdp_conversion_open(path_of("source.safetensors"), path_of("out"), &opts,
                                      &conversion, &err),
                 FSDP_OK, "%s", err.text);
    cr_expect_eq(fsdp_conversion_write_digests(conversion, &err), FSDP_ERR_USAGE);
    cr_assert_eq(fsdp_conversion_run(conversion, &err), FSDP_OK, "%s", err.text);
    cr_expect_eq(fsdp_conversion_run(conversion, &err), FSDP_ERR_USAGE);
    cr_expect(strstr(err.text, "has run already"), "%s", err.text);
    cr_expect_eq(fsdp_conversion_write_plan(conversion, path_of("plan"), &err), FSDP_ERR_USAGE);
    fsdp_conversion_close(conversion);
    cr_assert_eq(fsdp_conversion_open(path_of("source.safetensors"), path_of("out"), &opts,
                                      &conversion, &err),
                 FSDP_ERR_EXISTS);
    const fsdp_convert_plan *plan = fsdp_conversion_plan(conversion);
    cr_expect(plan->may_overwrite && plan->source && plan->files == 1);
    cr_expect_eq(fsdp_conversion_run(conversion, &err), FSDP_ERR_USAGE);
    cr_expect(strstr(err.text, "its plan failed"), "%s", err.text);
    fsdp_conversion_close(conversion);
}

/* --- forged plans ----------------------------------------------------------------------------- */

Test(plan_file, any_byte_that_differs_is_noticed)
{
    size_t size;
    write_plan(&(fsdp_convert_opts){.format = "dcp", .world = 2}, "plan");
    char *data = read_plan("plan", &size);
    for (size_t i = 0; i < size; i += 7) {
        data[i] ^= 1;
        put_file("spoiled", data, size);
        fsdp_status st = open_plan("spoiled");
        cr_expect(st == FSDP_ERR_DAMAGED || st == FSDP_ERR_NOT_FOUND, "byte %zu: %d", i, (int)st);
        data[i] ^= 1;
    }
    for (size_t i = 0; i < size; i += 13) {
        put_file("spoiled", data, i);
        fsdp_status st = open_plan("spoiled");
        cr_expect(st == FSDP_ERR_DAMAGED || st == FSDP_ERR_NOT_FOUND, "%zu bytes: %d", i, (int)st);
    }
    fsdp_free(data);
}

/* The plan with `old` replaced and its last hash recomputed. */
static void forge(const char *name, const char *old, const char *new)
{
    size_t size;
    fsdp_text text = {0};
    char *data = read_plan("plan", &size), *found = strstr(data, old);
    char *closing = strstr(data, ",\n\"xxh3\"");
    cr_assert(found && closing, "%s", old);
    fsdp_text_add(&text, data, (size_t)(found - data));
    fsdp_text_add(&text, new, strlen(new));
    fsdp_text_add(&text, found + strlen(old), (size_t)(closing - found) - strlen(old));
    cr_assert_eq(fsdp_plan_close(&text, &err), FSDP_OK);
    put_file(name, text.data, text.size);
    fsdp_text_release(&text);
    fsdp_free(data);
}

Test(plan_file, forged_plans_are_damaged)
{
    static const char *const forgeries[][2] = {
        {"\"world_size\": 2", "\"world_size\": -2"},
        {"\"world_size\": 2", "\"world_size\": 99999999999"},
        {"\"world_size\": 2", "\"world_size\": \"2\""},
        {"\"shard_dim\": 0", "\"shard_dim\": 64"},
        {"\"kind\": \"sharded\"", "\"kind\": \"fluid\""},
        {"\"mesh\": []", "\"mesh\": [[\"a\"]]"},
        {"\"mesh\": []", "\"mesh\": [[\"a\", 2, 3]]"},
        {"\"mesh\": []", "\"mesh\": [[\"a\",1],[\"b\",1],[\"c\",1],[\"d\",1],[\"e\",1]]"},
        {"\"drop\": []", "\"drop\": [1]"},
        {"\"drop\": []", "\"drop\": [\"a\\u0000b\"]"},
        {"\"drop\": []", "\"drop\": [], \"drop\": []"},
        {"\"rename\": []", "\"rename\": null"},
        {",\n  \"overwrite\": false", ""},
        {"\"mtime_ns\"", "\"time\""},
        {"\"to\": ", "\"to\": 3, \"too\": "},
        {"\"hash\": ", "\"hush\": "},
        {"\"outputs\": [", "\"outputs\": {"},
    };
    write_plan(&(fsdp_convert_opts){.format = "dcp", .world = 2}, "plan");
    for (size_t i = 0; i < sizeof forgeries / sizeof *forgeries; i++) {
        forge("forged", forgeries[i][0], forgeries[i][1]);
        cr_expect_eq(open_plan("forged"), FSDP_ERR_DAMAGED, "%s", forgeries[i][1]);
    }
}

/* A readable plan is applied only if it equals the plan that is made again. */
Test(plan_file, a_plan_that_says_something_else_is_not_applied)
{
    static const char *const lies[][2] = {
        {"\"name\": \"a\"", "\"name\": \"c\""},   {"\"lo\": [0, 0]", "\"lo\": [1, 0]"},
        {"__0_0.distcp", "../../../x"},           {"\"world_size\": 2", "\"world_size\": 3"},
        {"\"writer\": \"", "\"writer\": \"not "}, {"\"bytes_read\": 40", "\"bytes_read\": 41"}};
    write_plan(&(fsdp_convert_opts){.format = "dcp", .world = 2}, "plan");
    cr_assert_eq(check_plan("plan"), FSDP_OK, "%s", err.text);
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        forge("forged", lies[i][0], lies[i][1]);
        cr_expect_eq(check_plan("forged"), FSDP_ERR_DAMAGED, "%s", lies[i][1]);
        cr_expect(strstr(err.text, "--plan-out"), "%s", err.text);
    }
}

Test(plan_file, what_changed_is_named)
{
    write_plan(&(fsdp_convert_opts){.format = "npz"}, "plan");
    usleep(20000);
    put_source();
    cr_expect_eq(check_plan("plan"), FSDP_ERR_DAMAGED);
    cr_expect(strstr(err.text, "source.safetensors") && strstr(err.text, " UTC, the plan says "),
              "%s", err.text);
    put_file("source.safetensors", "", 0);
    cr_expect_eq(check_plan("plan"), FSDP_ERR_DAMAGED);
    cr_expect(strstr(err.text, "it has 0 bytes"), "%s", err.text);
    unlink(path_of("source.safetensors"));
    cr_expect_eq(check_plan("plan"), FSDP_ERR_DAMAGED);
    cr_expect(strstr(err.text, "was removed after"), "%s", err.text);
}

/* "hdf5" was the name of the one-file target, and stays its alias. */
Test(plan_file, a_plan_with_an_older_name_of_the_target_is_applied)
{
    const fsdp_convert_opts opts = {.format = "hdf5"};
    fsdp_conversion *conversion;
    size_t size;
    write_plan(&opts, "plan");
    char *text = read_plan("plan", &size);
    cr_expect_not_null(strstr(text, "\"format\": \"hdf5\""), "as an older version wrote it");
    fsdp_free(text);
    cr_assert_eq(fsdp_conversion_apply(path_of("plan"), NULL, &conversion, &err), FSDP_OK, "%s",
                 err.text);
    cr_expect_eq(fsdp_conversion_run(conversion, &err), FSDP_OK, "%s", err.text);
    fsdp_conversion_close(conversion);
    struct stat found;
    cr_expect(stat(path_of("out"), &found) == 0 && S_ISREG(found.st_mode));
}
