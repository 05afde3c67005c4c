/*
 * A table of the containers in nested names. The key is the number of the parent container and one element
 * of a path; a key of the whole path would make the memory of deep names quadratic in their depth.
 */
#ifndef FSDP_CONTAINER_TABLE_H
#define FSDP_CONTAINER_TABLE_H

#include "base/core/mem.h"
#include "base/data/name_table.h"

#include "base/text.h"

/* Zero-initialise; release when done. */
typedef struct container_table {
    fsdp_name_table table;
    fsdp_arena arena;          /* of the keys */
    fsdp_text key;             /* the key of the last find */
} container_table;

void container_table_release(container_table *table);

/* The number of the entry of container `parent` under that element (name_path.h), whose text begins at
 * `text`; NULL when there is none, or no memory. Valid until the next put. */
const uint64_t *container_table_find(container_table *table, size_t parent, const char *text,
                                     int32_t element);

/* Stores a number for the key of the last find, which had no result; false when there is no memory. */
bool container_table_put(container_table *table, uint64_t number);

#endif
