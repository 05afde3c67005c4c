/* The hash table of names: open addressing, at most three quarters full. See name_table.h. */
#include "base/data/name_table.h"

#include "base/core/mem.h"

#include <string.h>

enum { SMALLEST = 64 }; /* slots; a power of two */

void fsdp_name_table_release(fsdp_name_table *table)
{
    fsdp_free(table->slots);
    *table = (fsdp_name_table){0};
}

static uint64_t mix(uint64_t hash, uint64_t word)
{
    hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
    return hash ^ hash >> 32;
}

static uint64_t hash_of(const char *name, size_t size)
{
    uint64_t hash = mix(0, size), word = 0;
    for (; size >= sizeof word; name += sizeof word, size -= sizeof word) {
        memcpy(&word, name, sizeof word);
        hash = mix(hash, word);
    }
    word = 0;
    if (size > 0)
        memcpy(&word, name, size);
    return mix(hash, word);
}

/* The slot that holds the name, or the free one where it belongs. */
static fsdp_name_slot *slot_of(const fsdp_name_table *table, const char *name, size_t size,
                               uint64_t hash)
{
    size_t mask = table->capacity - 1;
    for (size_t i = (size_t)hash & mask;; i = (i + 1) & mask) {
        fsdp_name_slot *slot = &table->slots[i];
        if (!slot->name)
            return slot;
        if (slot->hash == hash && slot->size == size &&
            (size == 0 || memcmp(slot->name, name, size) == 0))
            return slot;
    }
}

uint64_t *fsdp_name_table_find(const fsdp_name_table *table, const char *name, size_t size)
{
    if (table->capacity == 0)
        return NULL;
    fsdp_name_slot *slot = slot_of(table, name, size, hash_of(name, size));
    return slot->name ? &slot->number : NULL;
}

static bool grow_to(fsdp_name_table *table, size_t capacity)
{
    fsdp_name_table larger = {.capacity = capacity, .count = table->count};
    larger.slots = fsdp_alloc(larger.capacity, sizeof *larger.slots);
    if (!larger.slots)
        return false;
    for (size_t i = 0; i < table->capacity; i++) {
        const fsdp_name_slot *old = &table->slots[i];
        if (old->name)
            *slot_of(&larger, old->name, old->size, old->hash) = *old;
    }
    fsdp_free(table->slots);
    *table = larger;
    return true;
}

static bool is_full(const fsdp_name_table *table, size_t count)
{
    return count >= table->capacity / 4 * 3;
}

bool fsdp_name_table_expect(fsdp_name_table *table, size_t count)
{
    size_t capacity = SMALLEST;
    while (capacity < SIZE_MAX / 4 && count > capacity / 4 * 3)
        capacity *= 2;
    return capacity <= table->capacity || grow_to(table, capacity);
}

void fsdp_name_table_clear(fsdp_name_table *table)
{
    for (size_t i = 0; i < table->capacity; i++)
        table->slots[i] = (fsdp_name_slot){0};
    table->count = 0;
}

uint64_t *fsdp_name_table_enter(fsdp_name_table *table, const char *name, size_t size,
                                uint64_t number)
{
    if (is_full(table, table->count) &&
        !grow_to(table, table->capacity ? table->capacity * 2 : SMALLEST))
        return NULL;
    uint64_t hash = hash_of(name, size);
    fsdp_name_slot *slot = slot_of(table, name, size, hash);
    if (!slot->name) {
        *slot = (fsdp_name_slot){.name = name, .size = size, .hash = hash, .number = number};
        table->count++;
    }
    return &slot->number;
}

bool fsdp_name_table_put(fsdp_name_table *table, const char *name, size_t size, uint64_t number)
{
    uint64_t *entered = fsdp_name_table_enter(table, name, size, number);
    if (entered)
        *entered = number;
    return entered;
}
