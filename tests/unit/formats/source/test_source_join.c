/* One source of several: names below the keys of the parts, and the bytes of their checks. */
#include "formats/source.h"

#include <criterion/criterion.h>
#include <string.h>

static fsdp_error err;

static bool may_lack_all(void *context, const char *name, size_t size)
{
    (void)context;
    (void)name;
    (void)size;
    return true;
}

static const fsdp_source_opts tolerant = {.may_lack = may_lack_all};

static fsdp_source *new_source(void)
{
    fsdp_source *source = NULL;
    cr_assert_eq(fsdp_source_create(NULL, "part", "test", &source, &err), FSDP_OK);
    fsdp_source_tolerate(source, &tolerant);
    return source;
}

static void add_value(fsdp_source *source, const char *name, const int32_t *path, size_t count)
{
    fsdp_value value = fsdp_value_i64(7);
    fsdp_source_nest(source, path, count);
    cr_assert_eq(fsdp_source_add_value(source, name, strlen(name), &value, NULL, &err), FSDP_OK,
                 "%s", err.text);
    fsdp_source_nest(source, NULL, 0);
}

static fsdp_source *join(fsdp_source *model, fsdp_source *optim)
{
    const fsdp_source_part parts[] = {{model, "model", "model"}, {optim, "optim", "optimizer"}};
    fsdp_source *whole = NULL;
    cr_assert_eq(fsdp_source_complete(model, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_source_complete(optim, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_source_join("whole", parts, 2, &tolerant, &whole, &err), FSDP_OK, "%s",
                 err.text);
    return whole;
}

static void expect_text(const char *expected, const char *name, size_t size)
{
    cr_expect(size == strlen(expected) && memcmp(name, expected, size) == 0, "'%.*s', not '%s'",
              (int)size, name, expected);
}

/* The names of a checkpoint whose optimizer has one value and lacks another one. */
static void expect_joined(const char *lacks, const char *entry, const char *missing)
{
    static const int32_t path[] = {9, 2};
    size_t size;
    fsdp_source *optim = new_source();
    add_value(optim, "optimizer.lr", path, 2);
    cr_assert_eq(fsdp_source_add_missing(optim, lacks, strlen(lacks), NULL, &err), FSDP_OK);
    fsdp_source *whole = join(new_source(), optim);
    const fsdp_source_entry *found = fsdp_source_entry_at(whole, 0);
    expect_text(entry, found->name, found->name_size);
    cr_assert_eq(fsdp_source_missing_count(whole), 1u);
    const char *name = fsdp_source_missing_at(whole, 0, &size);
    expect_text(missing, name, size);
    fsdp_source_close(whole);
}

Test(source_join, a_key_of_the_part_replaces_the_one_that_all_names_have)
{
    expect_joined("optimizer.eps", "optim.lr", "optim.eps");
    expect_joined("x", "optim.optimizer.lr", "optim.x");
    expect_joined("optimizer", "optim.optimizer.lr", "optim.optimizer");
    expect_joined("optimizers.eps", "optim.optimizer.lr", "optim.optimizers.eps");
}

static int64_t bytes_of(void *state)
{
    return *(int64_t *)state;
}

Test(source_join, bytes_of_checks_are_those_of_all_parts)
{
    int64_t bytes[] = {5, 7};
    const fsdp_source_ops ops = {.check_bytes = bytes_of};
    for (int huge = 0; huge < 2; huge++) {
        fsdp_source *model = new_source(), *optim = new_source();
        bytes[1] = huge ? INT64_MAX : 7;
        fsdp_source_set_ops(model, &ops, &bytes[0]);
        fsdp_source_set_ops(optim, &ops, &bytes[1]);
        fsdp_source *whole = join(model, optim);
        cr_expect_eq(fsdp_source_check_bytes(whole), huge ? FSDP_SOURCE_CHECK_MOST : 12);
        fsdp_source_close(whole);
    }
}
