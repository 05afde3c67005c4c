/* A hash table from pairs of numbers to numbers, half empty. See pair_table.h. */
#include "runtime/tokens/pair_table.h"

#include "base/core/mem.h"

#include <string.h>

fsdp_status fsdp_pair_table_init(fsdp_pair_table *table, size_t count, fsdp_error *err)
{
    *table = (fsdp_pair_table){0};
    size_t slots = 4;
    while (slots / 2 < count && slots <= SIZE_MAX / 4)
        slots *= 2;
    table->slots = fsdp_realloc(NULL, slots, sizeof *table->slots);
    if (!table->slots)
        return fsdp_fail_memory(err, "a table of pairs");
    memset(table->slots, 0xFF, slots * sizeof *table->slots);
    table->mask = slots - 1;
    return FSDP_OK;
}

void fsdp_pair_table_release(fsdp_pair_table *table)
{
    fsdp_free(table->slots);
    *table = (fsdp_pair_table){0};
}

void fsdp_pair_table_set(fsdp_pair_table *table, uint32_t first, uint32_t second, uint64_t value)
{
    uint64_t key = (uint64_t)first << 32 | second;
    size_t slot = fsdp_pair_slot(table, key);
    while (table->slots[slot].key != key && table->slots[slot].key != UINT64_MAX)
        slot = (slot + 1) & table->mask;
    table->slots[slot] = (fsdp_pair_entry){key, value};
}
