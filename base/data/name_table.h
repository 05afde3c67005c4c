/*
 * The hash table of the project, from names to numbers. Names come from files, so keys are compared in full
 * and the table grows with the names that are put into it.
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

/* Reserves memory for count names in all; false when there is no memory. The puts of those names cannot
 * fail. */
bool fsdp_name_table_expect(fsdp_name_table *table, size_t count);
/* Takes all names out and keeps the room. */
void fsdp_name_table_clear(fsdp_name_table *table);

/* The number of a name, NULL when it is not there; valid until the next put. */
uint64_t *fsdp_name_table_find(const fsdp_name_table *table, const char *name, size_t size);

/* Puts a name that is not there yet, and borrows it; false when there is no memory. */
bool fsdp_name_table_put(fsdp_name_table *table, const char *name, size_t size, uint64_t number);

/* Finds a name, or puts it with this number when it is not there; NULL when there is no memory. */
uint64_t *fsdp_name_table_enter(fsdp_name_table *table, const char *name, size_t size, uint64_t number);

#endif
