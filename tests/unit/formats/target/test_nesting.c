/*
 * Names that ask for much, out of files that are small: deep ones, and long lists in any order. Work on
 * them takes memory and time by their bytes. An algorithm of quadratic time does not come to an end before
 * the suite's timeout.
 */
#include "base/data/name_path.h"
#include "formats/dcp/dcp_fold.h"
#include "formats/target/nesting.h"
#include "formats/torch/torch_emit.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

TestSuite(nesting, .timeout = 100);

static const fsdp_value number = {.kind = FSDP_VALUE_I64}, dict = {.kind = FSDP_VALUE_DICT};

/* Names with their paths. */
typedef struct names {
    fsdp_target_entry *entries;
    size_t count;
    fsdp_arena arena;
} names;

static names new_names(size_t most)
{
    names all = {.entries = fsdp_alloc(most, sizeof *all.entries)};
    cr_assert_not_null(all.entries);
    return all;
}

static void release_names(names *all)
{
    fsdp_free(all->entries);
    fsdp_arena_release(&all->arena);
}

static void add_name(names *all, const char *name, const int32_t *path, size_t count,
                     const fsdp_value *value)
{
    size_t size = strlen(name);
    int32_t *own = fsdp_arena_alloc(&all->arena, count, sizeof *own);
    const char *text = fsdp_arena_strndup(&all->arena, name, size);
    cr_assert(own && text);
    memcpy(own, path, count * sizeof *own);
    all->entries[all->count++] = (fsdp_target_entry){
        .name = text, .name_size = size, .path = own, .path_count = count, .value = value};
}

/* "NUMBER.element.element..." */
static void add_deep(names *all, const char *element, size_t depth)
{
    enum { MOST = 1000 };
    static char name[65536];
    int32_t path[MOST], size = (int32_t)strlen(element);
    cr_assert_leq(depth, MOST);
    path[0] = sprintf(name, "%06zu", all->count);
    size_t at = (size_t)path[0];
    for (size_t i = 1; i < depth; i++) {
        at += (size_t)sprintf(name + at, ".%s", element);
        path[i] = size;
    }
    add_name(all, name, path, depth, &number);
}

/* "list.POSITION" */
static void add_item(names *all, size_t position, const fsdp_value *value)
{
    char name[40];
    int digits = sprintf(name, "list.%zu", position) - 5;
    add_name(all, name, (int32_t[]){4, -digits}, 2, value);
}

static int64_t peak_bytes(void)
{
    struct rusage usage;
    cr_assert_eq(getrusage(RUSAGE_SELF, &usage), 0);
    return (int64_t)usage.ru_maxrss << 10;
}

/* --- depth ------------------------------------------------------------------------------------ */

static fsdp_status emit_nothing(void *user, size_t entry, fsdp_error *err)
{
    (void)entry;
    (void)err;
    fsdp_pickler_op(user, FSDP_OP_NONE);
    return FSDP_OK;
}

/* 60 names of 54 KB, 900 elements each: by the square of the depth that were 1.5 GB. */
Test(nesting, deep_names_take_memory_by_their_bytes)
{
    enum { NAMES = 60, DEPTH = 900, MOST = 128 << 20 };
    static const char element[] = "0123456789012345678901234567890123456789012345678901234567";
    fsdp_error err = {0};
    names all = new_names(NAMES + 1);
    nesting found;
    dcp_fold fold;
    fsdp_pickler pickler = {0};
    for (int i = 0; i < NAMES; i++)
        add_deep(&all, element, DEPTH);
    add_item(&all, 0, &dict);
    int64_t before = peak_bytes();
    cr_assert_eq(nesting_find(all.entries, all.count, NESTING_DCP, &found, &err), FSDP_OK);
    cr_expect_eq(found.counts[NAMES - 1], DEPTH);
    nesting_release(&found);
    cr_assert_eq(dcp_fold_lists(all.entries, all.count, &fold, &err), FSDP_OK);
    dcp_fold_release(&fold);
    cr_assert_eq(
        torch_emit_tree(&pickler,
                        &(fsdp_target_opts){.entries = all.entries, .entry_count = all.count},
                        emit_nothing, &pickler, &err),
        FSDP_OK);
    cr_expect_lt(peak_bytes() - before, MOST, "%lld bytes", (long long)(peak_bytes() - before));
    fsdp_pickler_release(&pickler);
    release_names(&all);
}

/* Each container takes memory, however short its name is. */
Test(nesting, names_of_too_many_containers_are_not_nested)
{
    enum { DEPTH = 1000, NAMES = NESTING_MOST / DEPTH + 100 };
    fsdp_error err = {0};
    names all = new_names(NAMES);
    nesting found;
    size_t nested = 0;
    for (int i = 0; i < NAMES; i++)
        add_deep(&all, "a", DEPTH);
    cr_assert_eq(nesting_find(all.entries, all.count, NESTING_DCP, &found, &err), FSDP_OK);
    cr_expect_eq(found.counts[0], DEPTH);
    cr_expect_eq(found.counts[NAMES - 1], 1);
    for (int i = 0; i < NAMES; i++)
        nested += found.counts[i] > 1;
    cr_expect_eq(nested, NESTING_MOST / (DEPTH - 1));
    nesting_release(&found);
    release_names(&all);
}

/* --- length ----------------------------------------------------------------------------------- */

/* Shuffles with a fixed seed. */
static void shuffle(names *all)
{
    uint64_t state = 1;
    for (size_t i = all->count; i > 1; i--) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        size_t other = (size_t)(state >> 33) % i;
        fsdp_target_entry kept = all->entries[i - 1];
        all->entries[i - 1] = all->entries[other];
        all->entries[other] = kept;
    }
}

static void spell_names(const names *all, fsdp_text *text)
{
    for (size_t i = 0; i < all->count; i++)
        fsdp_text_addf(text, "%s ", all->entries[i].name);
}

typedef struct telling {
    const names *all;
    fsdp_text text;
} telling;

static fsdp_status emit_name(void *user, size_t entry, fsdp_error *err)
{
    telling *told = user;
    (void)err;
    fsdp_text_addf(&told->text, "%s ", told->all->entries[entry].name);
    return FSDP_OK;
}

/* PyTorch allocates a list up to the highest position in it. */
Test(nesting, a_position_behind_the_longest_list_is_not_nested)
{
    enum { LONGEST = 1 << 20 };
    fsdp_error err = {0};
    names all = new_names(LONGEST + 1);
    nesting found;
    for (size_t i = 0; i <= LONGEST; i++)
        add_item(&all, i, NULL);
    cr_assert_eq(nesting_find(all.entries, all.count, NESTING_DCP, &found, &err), FSDP_OK);
    cr_expect_eq(found.counts[LONGEST - 1], 2);
    cr_expect_eq(found.counts[LONGEST], 1);
    nesting_release(&found);
    release_names(&all);
}

Test(nesting, a_long_list_in_any_order_is_told_in_its_own)
{
    enum { ITEMS = 200000 };
    fsdp_error err = {0};
    fsdp_text expected = {0};
    fsdp_pickler pickler = {0};
    names all = new_names(ITEMS);
    for (size_t i = 0; i < ITEMS; i++)
        add_item(&all, i, &dict);
    spell_names(&all, &expected);
    shuffle(&all);
    cr_assert_str_neq(all.entries[0].name, "list.0");
    telling told = {.all = &all};
    cr_assert_eq(
        torch_emit_tree(&pickler,
                        &(fsdp_target_opts){.entries = all.entries, .entry_count = all.count},
                        emit_name, &told, &err),
        FSDP_OK);
    cr_expect(told.text.size == expected.size &&
              memcmp(told.text.data, expected.data, expected.size) == 0);
    fsdp_text_release(&told.text);
    fsdp_text_release(&expected);
    fsdp_pickler_release(&pickler);
    release_names(&all);
}

static void fold(const names *all, size_t expected)
{
    fsdp_error err = {0};
    dcp_fold fold;
    cr_assert_eq(dcp_fold_lists(all->entries, all->count, &fold, &err), FSDP_OK, "%s", err.text);
    cr_expect_eq(fold.count, expected);
    dcp_fold_release(&fold);
}

/* Its first item is missing, so it stays as it is, entry after entry. */
Test(nesting, a_long_list_that_does_not_fold_is_looked_at_once)
{
    enum { ITEMS = 400000 };
    names all = new_names(ITEMS);
    for (size_t i = 1; i <= ITEMS; i++)
        add_item(&all, i, &dict);
    fold(&all, ITEMS);
    release_names(&all);
}

/* Items of items: [[1, {}], [1]] and, after another name, one more item of the first list. */
Test(nesting, lists_fold_when_all_of_them_stands_together)
{
    names all = new_names(8);
    add_name(&all, "list.0.0", (int32_t[]){4, -1, -1}, 3, &number);
    add_name(&all, "list.0.1", (int32_t[]){4, -1, -1}, 3, &dict);
    add_name(&all, "list.1.0", (int32_t[]){4, -1, -1}, 3, &number);
    add_name(&all, "x", (int32_t[]){1}, 1, &number);
    fold(&all, 2);
    add_name(&all, "list.2", (int32_t[]){4, -1}, 2, &number);
    fold(&all, 5);
    release_names(&all);
}

/* --- the outermost object --------------------------------------------------------------------- */

static void expect_root(const names *all, nesting_reader reader, nesting_root expected)
{
    fsdp_error err = {0};
    nesting found;
    cr_assert_eq(nesting_find(all->entries, all->count, reader, &found, &err), FSDP_OK);
    cr_expect_eq(found.root, expected);
    if (expected == NESTING_IN_DICT)
        for (size_t i = 0; i < all->count; i++)
            cr_expect_geq(found.paths[i][0], 0);
    nesting_release(&found);
}

Test(nesting, a_list_or_a_tuple_is_the_object_when_all_of_it_is_there)
{
    for (int i = 0; i < 2; i++) {
        names all = new_names(3);
        int32_t first = i ? -(1 | FSDP_PATH_TUPLE) : -1;
        add_name(&all, "0", &first, 1, NULL);
        add_name(&all, "1.a", (int32_t[]){first, 1}, 2, &number);
        expect_root(&all, NESTING_TORCH, i ? NESTING_IN_TUPLE : NESTING_IN_LIST);
        expect_root(&all, NESTING_DCP, NESTING_IN_DICT);
        add_name(&all, "3", &first, 1, &number);
        expect_root(&all, NESTING_TORCH, NESTING_IN_DICT);
        all.entries[2] = all.entries[1];
        all.entries[2].name = "b", all.entries[2].name_size = 1;
        all.entries[2].path_count = 1, all.entries[2].path = (const int32_t[]){1};
        expect_root(&all, NESTING_TORCH, NESTING_IN_DICT);
        release_names(&all);
    }
}

Test(nesting, an_entry_is_the_object_when_it_is_alone)
{
    names all = new_names(2);
    add_name(&all, "", (int32_t[]){FSDP_PATH_WHOLE}, 1, NULL);
    expect_root(&all, NESTING_TORCH, NESTING_WHOLE);
    expect_root(&all, NESTING_DCP, NESTING_IN_DICT);
    add_name(&all, "x", (int32_t[]){1}, 1, &number);
    expect_root(&all, NESTING_TORCH, NESTING_IN_DICT);
    release_names(&all);
}

/* Values only, as in [1, 2] of a reader that would not visit it. */
Test(nesting, a_list_of_values_alone_is_no_object)
{
    names all = new_names(2);
    add_name(&all, "0", (int32_t[]){-1}, 1, &number);
    add_name(&all, "1", (int32_t[]){-1}, 1, &number);
    expect_root(&all, NESTING_TORCH, NESTING_IN_DICT);
    release_names(&all);
}
