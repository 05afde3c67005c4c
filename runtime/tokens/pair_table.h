/*
 * A hash table from pairs of numbers to numbers: merges of tokens, compositions of code points. Its keys are
 * numbers and its finds are inlined into the innermost loop of merges; tables of names are
 * base/data/name_table.h.
 */
#ifndef FSDP_PAIR_TABLE_H
#define FSDP_PAIR_TABLE_H

#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fsdp_pair_entry { uint64_t key, value; } fsdp_pair_entry;

/* Zero-initialise; an empty one finds nothing. */
typedef struct fsdp_pair_table {
    fsdp_pair_entry *slots;
    size_t mask;               /* slots - 1, a power of two - 1; 0: none */
} fsdp_pair_table;

/* For at most `count` pairs. */
fsdp_status fsdp_pair_table_init(fsdp_pair_table *table, size_t count, fsdp_error *err);
void fsdp_pair_table_release(fsdp_pair_table *table);

/* first and second are below UINT32_MAX. A pair that is there gets the new value. */
void fsdp_pair_table_set(fsdp_pair_table *table, uint32_t first, uint32_t second, uint64_t value);

static inline size_t fsdp_pair_slot(const fsdp_pair_table *table, uint64_t key)
{
    uint64_t mixed = key * UINT64_C(0x9E3779B97F4A7C15);
    return (size_t)(mixed ^ mixed >> 32) & table->mask;
}

/* UINT64_MAX: there is none. */
static inline uint64_t fsdp_pair_table_get(const fsdp_pair_table *table, uint32_t first, uint32_t second)
{
    uint64_t key = (uint64_t)first << 32 | second;
    if (!table->slots)
        return UINT64_MAX;
    for (size_t slot = fsdp_pair_slot(table, key);; slot = (slot + 1) & table->mask) {
        if (table->slots[slot].key == key)
            return table->slots[slot].value;
        if (table->slots[slot].key == UINT64_MAX)
            return UINT64_MAX;
    }
}

#endif
