/*
 * Equal keys of a dict: Python keeps the first key and the last value, and 1, 1.0 and True are one
 * key. The parser settles every dict once, so that readers find each key once. See pickle.h.
 */
#include "formats/pickle/pickle_vm.h"

#include <math.h>
#include <string.h>

#include "base/data/name_table.h"

enum { KEY_DEPTH = 4, KEY_BYTES = 1024, MOST_SPARE = 16 };

/* First bytes of keys that are no text; UTF-8 has none of them. */
enum {
    KEY_INT = 0xFF,
    KEY_FLOAT = 0xFE,
    KEY_BYTES_OF = 0xFD,
    KEY_BIGINT = 0xFC,
    KEY_TUPLE = 0xFB,
    KEY_NODE = 0xFA
};

typedef struct key_text {
    uint8_t bytes[KEY_BYTES];
    size_t size;
    bool is_long; /* does not fit */
} key_text;

static void add(key_text *text, uint8_t kind, const void *data, size_t size)
{
    if (KEY_BYTES - text->size < size + 1) {
        text->is_long = true;
        return;
    }
    text->bytes[text->size++] = kind;
    if (size > 0)
        memcpy(text->bytes + text->size, data, size);
    text->size += size;
}

static void add_float(key_text *text, double value)
{
    int64_t number = fabs(value) < 9e18 ? (int64_t)value : 0;
    if (fabs(value) < 9e18 && (double)number == value)
        add(text, KEY_INT, &number, sizeof number);
    else
        add(text, KEY_FLOAT, &value, sizeof value);
}

/* Adds bytes that are equal for equal keys. A key that is too long or too deep equals only itself. */
static void add_key(const pickle_vm *vm, fsdp_node key, int depth, key_text *text)
{
    const fsdp_pickle_node *node = &vm->nodes[key];
    switch (node->kind) {
    case FSDP_NODE_BOOL:
    case FSDP_NODE_INT: add(text, KEY_INT, &node->as.i64, sizeof node->as.i64); return;
    case FSDP_NODE_FLOAT:
        if (isnan(node->as.f64)) /* equals no other */
            add(text, KEY_NODE, &key, sizeof key);
        else
            add_float(text, node->as.f64);
        return;
    case FSDP_NODE_BYTES: add(text, KEY_BYTES_OF, node->as.text, node->count); return;
    case FSDP_NODE_BIGINT: add(text, KEY_BIGINT, node->as.text, node->count); return;
    case FSDP_NODE_STR: add(text, 0, node->as.text, node->count); return;
    case FSDP_NODE_TUPLE:
        text->is_long |= depth == KEY_DEPTH;
        add(text, KEY_TUPLE, &node->count, sizeof node->count);
        for (uint32_t i = 0; i < node->count && !text->is_long; i++) {
            size_t before = text->size;
            add_key(vm, node->as.items[i], depth + 1, text);
            size_t size = text->size - before;
            add(text, KEY_NODE, &size, sizeof size);
        }
        return;
    default: add(text, KEY_NODE, &key, sizeof key);
    }
}

/* The bytes of a key that is no text, in memory of the pickle; NULL when there is none. */
static const char *key_bytes(pickle_vm *vm, fsdp_node key, size_t *size_out)
{
    key_text text = {.size = 0};
    add_key(vm, key, 0, &text);
    if (text.is_long) {
        text = (key_text){.size = 0};
        add(&text, KEY_NODE, &key, sizeof key);
    }
    char *bytes = pickle_store_take(vm->store, text.size);
    if (bytes)
        memcpy(bytes, text.bytes, text.size);
    *size_out = text.size;
    return bytes;
}

static fsdp_status settle(pickle_vm *vm, fsdp_pickle_node *dict, fsdp_name_table *table)
{
    fsdp_node *items = (fsdp_node *)(uintptr_t)dict->as.items; /* the store owns them */
    uint32_t kept = 0;
    if (table->capacity / MOST_SPARE > dict->count)
        fsdp_name_table_release(table);
    fsdp_name_table_clear(table);
    for (uint32_t i = 0; i + 1 < dict->count; i += 2) {
        const fsdp_pickle_node *key = &vm->nodes[items[i]];
        bool is_text = key->kind == FSDP_NODE_STR;
        size_t size = key->count;
        const char *bytes = is_text && size > 0 ? key->as.text
                            : is_text           ? ""
                                                : key_bytes(vm, items[i], &size);
        const uint64_t *number = bytes ? fsdp_name_table_enter(table, bytes, size, kept) : NULL;
        if (!number)
            return pickle_no_memory(vm);
        if (*number == kept) {
            items[2 * kept] = items[i];
            items[2 * kept++ + 1] = items[i + 1];
        } else {
            items[2 * *number + 1] = items[i + 1];
        }
    }
    dict->count = 2 * kept;
    return FSDP_OK;
}

fsdp_status pickle_settle_keys(pickle_vm *vm)
{
    fsdp_name_table table = {0};
    fsdp_status st = FSDP_OK;
    for (size_t i = NODE_FIRST_FREE; i < vm->node_count && st == FSDP_OK; i++)
        if (vm->nodes[i].kind == FSDP_NODE_DICT && vm->nodes[i].count > 2)
            st = settle(vm, &vm->nodes[i], &table);
    fsdp_name_table_release(&table);
    return st;
}
