/* Containers by parent and key: see container_table.h. */
#include "formats/target/container_table.h"

#include "base/data/name_path.h"

void container_table_release(container_table *table)
{
    fsdp_name_table_release(&table->table);
    fsdp_arena_release(&table->arena);
    fsdp_text_release(&table->key);
}

const uint64_t *container_table_find(container_table *table, size_t parent, const char *text,
                                     int32_t element)
{
    uint64_t number = parent;
    element =
        element < 0 ? element : element & ~FSDP_PATH_NUMBER; /* names cannot tell 1 from "1" */
    table->key.size = 0;
    fsdp_text_add(&table->key, (const char *)&number, sizeof number);
    fsdp_text_add(&table->key, (const char *)&element, sizeof element);
    fsdp_text_add(&table->key, text, fsdp_path_bytes(element));
    if (table->key.failed)
        return NULL;
    return fsdp_name_table_find(&table->table, table->key.data, table->key.size);
}

bool container_table_put(container_table *table, uint64_t number)
{
    if (table->key.failed)
        return false;
    const char *key = fsdp_arena_strndup(&table->arena, table->key.data, table->key.size);
    return key && fsdp_name_table_put(&table->table, key, table->key.size, number);
}
