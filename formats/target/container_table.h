/*
 * Containers of nested names, by where they stand: a key is the number of the container around and one
 * element of a path. A key that were the whole way down to a container would make deep names take memory by
 * the square of their depth.
 */
#ifndef FSDP_CONTAINER_TABLE_H
#define FSDP_CONTAINER_TABLE_H

#include "base/core/mem.h"
#include "base/data/name_table.h"

#include "base/text.h"

/* Zero-initialise; release when done. */
typedef struct container_table {
    fsdp_name_table table;
    fsdp_arena arena;          /* of keys */
    fsdp_text key;             /* of what was looked for last */
} container_table;

void container_table_release(container_table *table);

/* The number of what stands in the container `parent` as that element (name_path.h), which begins at
 * `text`; NULL when nothing does, or when there is no memory. Valid until the next put. */
const uint64_t *container_table_find(container_table *table, size_t parent, const char *text,
                                     int32_t element);

/* Numbers what was looked for last and not found; false when there is no memory. */
bool container_table_put(container_table *table, uint64_t number);

#endif
