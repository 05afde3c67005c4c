/* Names and their numbers: room that was made beforehand changes nothing but when the table grows. */
#include "base/data/name_table.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

enum { NAMES = 1000 };
static char names[NAMES][16];

static void put(fsdp_name_table *table, int first, int end)
{
    for (int i = first; i < end; i++) {
        int size = snprintf(names[i], sizeof names[i], "name.%d", i);
        cr_assert(fsdp_name_table_put(table, names[i], (size_t)size, (uint64_t)i));
    }
}

static void expect_all(const fsdp_name_table *table, int count)
{
    cr_expect_eq(table->count, (size_t)count);
    for (int i = 0; i < count; i++) {
        const uint64_t *number = fsdp_name_table_find(table, names[i], strlen(names[i]));
        cr_assert(number && *number == (uint64_t)i, "'%s'", names[i]);
    }
    cr_expect_null(fsdp_name_table_find(table, "none", 4));
}

Test(name_table, expected_names_fit_without_growing)
{
    fsdp_name_table table = {0};
    fsdp_name_table_expect(&table, NAMES);
    size_t capacity = table.capacity;
    put(&table, 0, NAMES);
    cr_expect_eq(table.capacity, capacity);
    expect_all(&table, NAMES);
    fsdp_name_table_release(&table);
}

Test(name_table, what_was_there_is_found_after_room_was_made)
{
    fsdp_name_table table = {0};
    put(&table, 0, 10);
    fsdp_name_table_expect(&table, NAMES);
    expect_all(&table, 10);
    put(&table, 10, NAMES);
    expect_all(&table, NAMES);
    fsdp_name_table_release(&table);
}

Test(name_table, expecting_fewer_than_there_are_changes_nothing)
{
    fsdp_name_table table = {0};
    put(&table, 0, NAMES);
    size_t capacity = table.capacity;
    fsdp_name_table_expect(&table, 0);
    fsdp_name_table_expect(&table, 5);
    cr_expect_eq(table.capacity, capacity);
    expect_all(&table, NAMES);
    fsdp_name_table_release(&table);
}

Test(name_table, more_than_were_expected_are_taken)
{
    fsdp_name_table table = {0};
    fsdp_name_table_expect(&table, 3);
    put(&table, 0, NAMES);
    expect_all(&table, NAMES);
    fsdp_name_table_release(&table);
}

Test(name_table, an_expectation_that_no_memory_holds_is_dropped)
{
    fsdp_name_table table = {0};
    put(&table, 0, 10);
    fsdp_name_table_expect(&table, SIZE_MAX / 64);
    expect_all(&table, 10);
    put(&table, 10, NAMES);
    expect_all(&table, NAMES);
    fsdp_name_table_release(&table);
}
