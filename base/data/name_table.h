/*
 * A hash table from names to numbers: names that come from files, so keys are compared in full and the
 * table grows with what was put into it.
 */
#ifndef FSDP_NAME_TABLE_H
#define FSDP_NAME_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fsdp_name_slot {
    const char *name;          /* NULL: free; borrowed */
    size_t size;
    uint64_t hash;
    uint64_t number;
} fsdp_name_slot;

/* Zero-initialise; release when done. */
typedef struct fsdp_name_table {
    fsdp_name_slot *slots;
    size_t capacity, count;
} fsdp_name_table;

void fsdp_name_table_release(fsdp_name_table *table);

/* Makes room for so many names in all, as far as there is memory. */
void fsdp_name_table_expect(fsdp_name_table *table, size_t count);

/* The number of a name, NULL when it is not there; valid until the next put. */
uint64_t *fsdp_name_table_find(const fsdp_name_table *table, const char *name, size_t size);

/* Puts a name that is not there yet, and borrows it; false when there is no memory. */
bool fsdp_name_table_put(fsdp_name_table *table, const char *name, size_t size, uint64_t number);

/* Both at once: the number of a name, which is put with this one if it is not there; NULL when there is no
 * memory. */
uint64_t *fsdp_name_table_enter(fsdp_name_table *table, const char *name, size_t size, uint64_t number);

#endif
