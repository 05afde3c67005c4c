/* A state dict in memory is converted as a checkpoint on the disk is: to every format, in several slabs, and
 * without a file of its own. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <fsdp/fsdp.h>

enum {
    ROWS = 700,
    COLUMNS = 1000
}; /* 2.8 MB: three slabs of a conversion within 1 MiB, the last one partial */

typedef struct fixture {
    char folder[64], target[128];
    float *weight;
    fsdp_mesh *mesh;
    fsdp_sd *sd;
} fixture;

static fixture own;

static void add_tensor(const char *name, fsdp_dtype dtype, const int64_t *shape, void *data)
{
    fsdp_error err = {0};
    fsdp_tensor tensor = {
        .dtype = dtype, .ndim = 2, .shape = shape, .layout = {.mesh = own.mesh}, .data = data};
    cr_assert_eq(fsdp_sd_add_tensor(own.sd, name, strlen(name), &tensor, &err), FSDP_OK, "%s",
                 err.text);
}

static void set_up(void)
{
    static int64_t small[] = {1, 2, 3, 4};
    static const int64_t shape[] = {ROWS, COLUMNS}, small_shape[] = {2, 2};
    const fsdp_value step = fsdp_value_i64(7);
    fsdp_error err = {0};
    snprintf(own.folder, sizeof own.folder, "/tmp/fsdp-state-XXXXXX");
    cr_assert(mkdtemp(own.folder));
    own.weight = calloc((size_t)ROWS * COLUMNS, sizeof *own.weight);
    for (int i = 0; i < ROWS * COLUMNS; i++)
        own.weight[i] = (float)i;
    cr_assert_eq(fsdp_mesh_create(1, (int64_t[]){1}, (const char *[]){"dp"}, NULL, &own.mesh, &err),
                 FSDP_OK);
    cr_assert_eq(fsdp_sd_create(&own.sd, &err), FSDP_OK);
    add_tensor("model.w", FSDP_F32, shape, own.weight);
    add_tensor("model.ids", FSDP_I64, small_shape, small);
    cr_assert_eq(fsdp_sd_add_alias(own.sd, FSDP_NAME("model.tied"), FSDP_NAME("model.w"), &err),
                 FSDP_OK);
    cr_assert_eq(fsdp_sd_add_value(own.sd, FSDP_NAME("step"), &step, &err), FSDP_OK);
}

static void tear_down(void)
{
    char command[160];
    snprintf(command, sizeof command, "rm -rf '%s'", own.folder);
    cr_expect_eq(system(command), 0);
    fsdp_sd_free(own.sd);
    fsdp_mesh_free(own.mesh);
    free(own.weight);
}

TestSuite(convert_state, .init = set_up, .fini = tear_down, .timeout = 60);

static fsdp_status convert(const char *name, fsdp_convert_opts opts, fsdp_error *err)
{
    opts.state = own.sd;
    opts.skip_fsync = true;
    snprintf(own.target, sizeof own.target, "%s/%s", own.folder, name);
    return fsdp_checkpoint_convert(NULL, own.target, &opts, err);
}

/* The elements of a tensor, under whichever of its names the format stores it. */
static const void *elements(const fsdp_sd *sd, const char *name)
{
    int64_t at = fsdp_sd_find(sd, name, strlen(name));
    cr_assert(at >= 0, "%s", name);
    const fsdp_entry *entry = fsdp_sd_at(sd, (size_t)at);
    return entry->kind == FSDP_ENTRY_ALIAS ? fsdp_sd_at(sd, entry->target)->data : entry->data;
}

/* The result has the elements of the state, and its step unless the format has no values. */
static void expect_state(bool has_values)
{
    fsdp_sd *full = NULL;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_load_full(own.target, NULL, &full, &err), FSDP_OK, "%s", err.text);
    cr_expect_eq(memcmp(elements(full, "model.w"), own.weight, sizeof(float) * ROWS * COLUMNS), 0);
    cr_expect_eq(((const int64_t *)elements(full, "model.ids"))[3], 4);
    cr_expect_eq(fsdp_sd_find(full, FSDP_NAME("step")) >= 0, has_values);
    fsdp_sd_free(full);
}

Test(convert_state, every_kind_of_target_gets_the_elements)
{
    static const char *const drop_values[] = {"values"};
    static const struct {
        const char *name;
        fsdp_convert_opts opts;
        bool has_values;
    } cases[] = {{"native", {.format = "fsdp", .world = 3}, true},
                 {"packed", {.format = "fsdp", .compress = true}, true},
                 {"one.h5", {.format = "fsdp-file"}, true},
                 {"dcp", {.format = "dcp", .world = 2}, true},
                 {"a.pt", {.format = "torch"}, true},
                 {"a.safetensors",
                  {.format = "safetensors",
                   .select = {.only = FSDP_ONLY_ALL, .drops = drop_values, .drop_count = 1}},
                  false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fsdp_error err = {0};
        fsdp_convert_opts opts = cases[i].opts;
        opts.memory = 1 << 20;
        fsdp_status status = convert(cases[i].name, opts, &err);
        if (status == FSDP_ERR_LIMIT) { /* it names what this format needs */
            opts.memory = 8 << 20;
            status = convert(cases[i].name, opts, &err);
        }
        cr_assert_eq(status, FSDP_OK, "%s: %s", cases[i].name, err.text);
        expect_state(cases[i].has_values);
    }
}

Test(convert_state, a_tensor_that_is_not_whole_is_named)
{
    fsdp_error err = {0};
    fsdp_mesh *two = NULL;
    static const int64_t shape[] = {4, 4};
    static float half[8];
    cr_assert_eq(fsdp_mesh_create(1, (int64_t[]){2}, (const char *[]){"dp"}, NULL, &two, &err),
                 FSDP_OK);
    fsdp_tensor tensor = {.dtype = FSDP_F32,
                          .ndim = 2,
                          .shape = shape,
                          .layout = {.mesh = two, .placement = {{.kind = FSDP_SHARD}}},
                          .data = half};
    cr_assert_eq(fsdp_sd_add_tensor(own.sd, FSDP_NAME("half"), &tensor, &err), FSDP_OK);
    cr_expect_eq(convert("native", (fsdp_convert_opts){.format = "fsdp"}, &err), FSDP_ERR_USAGE);
    cr_expect(strstr(err.text, "'half' is not whole"), "%s", err.text);
    cr_expect_neq(access(own.target, F_OK), 0);
    fsdp_mesh_free(two);
}

Test(convert_state, a_description_without_memory_is_refused)
{
    fsdp_error err = {0};
    static const int64_t shape[] = {4, 4};
    add_tensor("described", FSDP_F32, shape, NULL);
    cr_expect_eq(convert("native", (fsdp_convert_opts){.format = "fsdp"}, &err), FSDP_ERR_USAGE);
    cr_expect(strstr(err.text, "'described'"), "%s", err.text);
}

Test(convert_state, a_state_has_neither_path_nor_resume_nor_plan_file)
{
    fsdp_error err = {0};
    fsdp_conversion *conversion = NULL;
    fsdp_convert_opts opts = {.state = own.sd, .format = "fsdp"};
    char target[128], plan[128];
    snprintf(target, sizeof target, "%s/native", own.folder);
    snprintf(plan, sizeof plan, "%s/plan", own.folder);
    cr_expect_eq(fsdp_checkpoint_convert("path", target, &opts, &err), FSDP_ERR_USAGE);
    cr_expect(strstr(err.text, "no path"), "%s", err.text);
    opts.resume = true;
    cr_expect_eq(fsdp_checkpoint_convert(NULL, target, &opts, &err), FSDP_ERR_USAGE);
    cr_expect(strstr(err.text, "no resume"), "%s", err.text);
    opts.resume = false;
    cr_assert_eq(fsdp_conversion_open(NULL, target, &opts, &conversion, &err), FSDP_OK, "%s",
                 err.text);
    cr_expect_eq(fsdp_conversion_write_plan(conversion, plan, &err), FSDP_ERR_USAGE);
    fsdp_conversion_close(conversion);
    cr_expect_neq(access(target, F_OK), 0);
}
