/* Paths of names: what fits, what is usual, and what renaming leaves of them. */
#include "base/data/name_path.h"
#include "formats/target/nesting.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PATH(...) (const int32_t[]){__VA_ARGS__}, sizeof((int32_t[]){__VA_ARGS__}) / sizeof(int32_t)

static bool fits(const char *name, const int32_t *path, size_t count)
{
    return fsdp_path_fits(name, strlen(name), path, count);
}

/* "optim|0|lr", positions as "#0". */
static const char *spell(const char *name, const int32_t *path, size_t count)
{
    static char text[200];
    size_t size = 0;
    cr_assert(fits(name, path, count), "'%s'", name);
    for (size_t i = 0; i < count; i++) {
        int bytes = abs(path[i]);
        size += (size_t)snprintf(text + size, sizeof text - size, "%s%s%.*s", i > 0 ? "|" : "",
                                 path[i] < 0 ? "#" : "", bytes, name);
        name += bytes + 1;
    }
    return text;
}

Test(name_path, a_path_makes_up_its_name)
{
    cr_assert(fits("optim.0.lr", PATH(5, -1, 2)));
    cr_assert(fits("optim.0.lr", PATH(10)));
    cr_assert(fits("", PATH(0)));
    cr_assert(fits(".", PATH(0, 0)));
    cr_assert(fits("a..b", PATH(1, 0, 1)));
    cr_assert(fits("state.0.lr", PATH(5, FSDP_PATH_NUMBER | 1, 2)));
    cr_assert(fits("-12", PATH(FSDP_PATH_NUMBER | 3)));
    cr_assert_not(fits("a.x", PATH(1, FSDP_PATH_NUMBER | 1)), "a number is spelled as one");
    cr_assert_not(fits("-0", PATH(FSDP_PATH_NUMBER | 2)));
    cr_assert_not(fits("", PATH(FSDP_PATH_NUMBER)));
    cr_assert_not(fits("1234567890123456789", PATH(FSDP_PATH_NUMBER | 19)), "of 64 bits");
    cr_assert_not(fits("a", NULL, 0));
    cr_assert_not(fits("optim.0.lr", PATH(5, -1)));
    cr_assert_not(fits("optim.0.lr", PATH(5, -1, 2, 0)));
    cr_assert_not(fits("optim.0.lr", PATH(4, 5)));
    cr_assert_not(fits("optim.0.lr", PATH(11)));
    cr_assert_not(fits("a.b", PATH(1, -1)), "a position is a number");
    cr_assert_not(fits("a.01", PATH(1, -2)), "spelled as Python does");
    cr_assert_not(fits("a.12345678901", PATH(1, -11)), "that fits into an int");
    cr_assert_not(fits("a", PATH(INT32_MIN)));
    cr_assert_not(fits("a.b", PATH(1, INT32_MAX)));
}

static void usual(const char *name, const char *expected)
{
    int32_t path[FSDP_PATH_DEFAULT_MOST];
    size_t count = fsdp_path_default(name, strlen(name), path);
    const char *got = spell(name, path, count);
    cr_assert_str_eq(got, expected);
    cr_assert(fsdp_path_is_default(name, strlen(name), path, count));
}

Test(name_path, names_of_our_runs_are_nested_as_pytorch_nests_them)
{
    usual("model.layers.0.w", "model|layers.0.w");
    usual("optim.state.layers.0.w.exp_avg", "optim|state|layers.0.w|exp_avg");
    usual("optim.param_groups.layers.0.w.lr", "optim|param_groups|layers.0.w|lr");
    usual("optim.lr", "optim|lr");
    usual("optim.state.w", "optim|state.w");
    usual("optim.state.w.", "optim|state.w.");
    usual("optim.state..w", "optim|state..w");
    usual("model.", "model.");
    usual("model", "model");
    usual("models.w", "models.w");
    usual("layers.0.w", "layers.0.w");
    usual("", "");
}

static void renamed(const char *old, const char *name, const int32_t *path, size_t count,
                    const char *expected)
{
    int32_t got[8];
    cr_assert(fits(old, path, count));
    fsdp_path from = {old, strlen(old), path, count};
    size_t n = fsdp_path_rename(&from, name, strlen(name), got);
    const char *text = spell(name, got, n);
    cr_assert_str_eq(text, expected);
}

Test(name_path, positions_in_tuples_and_whole_objects)
{
    const int32_t in_tuple = -(1 | FSDP_PATH_TUPLE), whole = FSDP_PATH_WHOLE;
    cr_expect(fits("t.0", PATH(1, in_tuple)) && !fits("t.x", PATH(1, in_tuple)));
    cr_expect(fsdp_path_bytes(in_tuple) == 1 && fsdp_path_bytes(whole) == 0);
    cr_expect(fsdp_path_in_tuple(in_tuple) && !fsdp_path_in_tuple(-1) &&
              !fsdp_path_in_tuple(whole));
    cr_expect(fits("", PATH(whole)) && !fits("a", PATH(whole)) && !fits("a.", PATH(1, whole)));
    cr_expect(fsdp_path_is_whole(&whole, 1) && !fsdp_path_is_whole(&in_tuple, 1));
}

Test(name_path, renaming_keeps_the_elements_that_stay)
{
    renamed("a.b.c", "a.b.c", PATH(1, 1, 1), "a|b|c");
    renamed("model.a.b", "net.a.b", PATH(5, 1, 1), "net|a|b");
    renamed("model.a.b", "net.a.b", PATH(5, 3), "net|a.b");
    renamed("model.a.b", "a.b", PATH(5, 1, 1), "a|b");
    renamed("model.a.b", "a.b", PATH(5, 3), "a.b");
    renamed("model._orig_mod.w", "model.w", PATH(5, 11), "model|w");
    renamed("model.a.w", "model.x.y.w", PATH(5, 1, 1), "model|x.y|w");
    renamed("optim.0.lr", "opt.0.lr", PATH(5, -1, 2), "opt|#0|lr");
    renamed("optim.0.lr", "optim.1.lr", PATH(5, -1, 2), "optim|1|lr");
    renamed("a.a.a", "a.a", PATH(1, 1, 1), "a|a");
    renamed("a.b", "", PATH(1, 1), "");
    renamed("a.b", ".b", PATH(1, 1), "|b");
    renamed("a", "b.c", PATH(1), "b.c");
}

static fsdp_target_entry nested(const char *name, const int32_t *path, size_t count)
{
    return (fsdp_target_entry){
        .name = name, .name_size = strlen(name), .path = path, .path_count = count};
}

static void together(const fsdp_target_entry *entries, size_t count, const char *const *expected)
{
    nesting paths;
    fsdp_error err = {0};
    cr_assert_eq(nesting_find(entries, count, NESTING_DCP, &paths, &err), FSDP_OK, "%s", err.text);
    for (size_t i = 0; i < count; i++) {
        const char *got = spell(entries[i].name, paths.paths[i], paths.counts[i]);
        cr_assert_str_eq(got, expected[i]);
    }
    nesting_release(&paths);
}

/* PyTorch fills gaps of lists, and goes only into lists with a tensor or a dict in them. */
Test(name_path, lists_that_would_not_come_back_are_no_lists)
{
    static const fsdp_value number = {.kind = FSDP_VALUE_I64}, dict = {.kind = FSDP_VALUE_DICT};
    fsdp_target_entry gap[] = {nested("a.1", PATH(1, -1)), nested("b.0.x", PATH(1, -1, 1)),
                               nested("b.2.x", PATH(1, -1, 1)), nested("c.0", PATH(1, -1))};
    together(gap, 4, (const char *[]){"a.1", "b.0.x", "b.2.x", "c|#0"});
    fsdp_target_entry values[] = {nested("a.0", PATH(1, -1)), nested("b.0", PATH(1, -1)),
                                  nested("b.1", PATH(1, -1)), nested("c.0.0", PATH(1, -1, -1)),
                                  nested("c.1.x", PATH(1, -1, 1))};
    values[0].value = values[1].value = values[3].value = &number;
    together(values, 5, (const char *[]){"a.0", "b|#0", "b|#1", "c.0.0", "c.1.x"});
    fsdp_target_entry empty[] = {nested("a.0", PATH(1, -1)), nested("a.1", PATH(1, -1))};
    empty[0].value = &number;
    empty[1].value = &dict;
    together(empty, 2, (const char *[]){"a.0", "a.1"});
    nesting paths;
    cr_assert_eq(nesting_find(empty, 2, NESTING_TORCH, &paths, NULL), FSDP_OK);
    cr_assert(paths.counts[0] == 2 && paths.counts[1] == 2);
    nesting_release(&paths);
}

Test(name_path, paths_that_do_not_fit_together_yield)
{
    const fsdp_target_entry good[] = {nested("a.b", PATH(1, 1)), nested("a.c.0", PATH(1, 1, -1)),
                                      nested("a.c.1.x", PATH(1, 1, -1, 1)), nested("d.e", PATH(3)),
                                      nested("model.w", NULL, 0)};
    together(good, 5, (const char *[]){"a|b", "a|c|#0", "a|c|#1|x", "d.e", "model|w"});
    const fsdp_target_entry leaf_and_dict[] = {nested("a.b", PATH(1, 1)), nested("a", PATH(1)),
                                               nested("a.b.c", PATH(1, 1, 1))};
    together(leaf_and_dict, 3, (const char *[]){"a.b", "a", "a.b.c"});
    const fsdp_target_entry dict_and_list[] = {nested("a.0", PATH(1, -1)),
                                               nested("a.x", PATH(1, 1))};
    together(dict_and_list, 2, (const char *[]){"a|#0", "a.x"});
    const fsdp_target_entry odd[] = {nested("0.x", PATH(-1, 1)), nested("a.99999999", PATH(1, -8)),
                                     nested("b.c", PATH(9))};
    together(odd, 3, (const char *[]){"0|x", "a.99999999", "b.c"});
    const fsdp_target_entry in_turn[] = {nested("a.b.c", PATH(3, 1)), nested("a.b", PATH(1, 1)),
                                         nested("a", PATH(1))};
    together(in_turn, 3, (const char *[]){"a.b.c", "a.b", "a"});
}
