/* Nested containers out of the paths of names: see torch_tree.h; read back by the walk of torch_names.c. */
#include "formats/torch_tree.h"

#include "base/mem.h"
#include "formats/name_table.h"
#include "formats/nesting.h"

#include <stdlib.h>

enum { NO_NODE = 0 }; /* the root is nobody's child */

/* A container or an entry, as an item of a container. */
typedef struct tree_node {
    const char *key;
    int32_t element; /* of a path, see name_path.h */
    bool is_list, is_leaf;
    size_t entry;             /* of a leaf */
    size_t first, last, next; /* items, and the item behind this one */
} tree_node;

typedef struct tree {
    const fsdp_target_entry *entries;
    size_t entry_count;
    nesting nesting;
    tree_node *nodes;
    size_t count, room;
    fsdp_name_table table; /* of containers by their paths: numbers of nodes */
    fsdp_arena arena;
    fsdp_text path; /* of the container at hand */
    fsdp_pickler *pickler;
    fsdp_status (*emit)(void *user, size_t entry, fsdp_error *err);
    void *user;
} tree;

/* --- growing ---------------------------------------------------------------------------------- */

static int64_t position_of(const tree_node *node)
{
    return strtoll(node->key, NULL, 10);
}

/* The item behind which the new one comes: those of a list are in the order of their positions. */
static size_t find_before(const tree *at, const tree_node *parent, const tree_node *item)
{
    size_t before = NO_NODE;
    const tree_node *last = &at->nodes[parent->last];
    if (!parent->is_list || parent->last == NO_NODE || position_of(last) < position_of(item))
        return parent->last;
    for (size_t i = parent->first; position_of(&at->nodes[i]) < position_of(item);
         i = at->nodes[i].next)
        before = i;
    return before;
}

static void link_item(tree *at, size_t parent, size_t number)
{
    tree_node *list = &at->nodes[parent], *item = &at->nodes[number];
    size_t before = find_before(at, list, item);
    size_t *link = before == NO_NODE ? &list->first : &at->nodes[before].next;
    item->next = *link;
    *link = number;
    if (item->next == NO_NODE)
        list->last = number;
}

static fsdp_status add_node(tree *at, size_t parent, const tree_node *node, fsdp_error *err)
{
    if (!fsdp_grow(&at->nodes, &at->room, at->count + 1, sizeof *at->nodes))
        return fsdp_fail_memory(err, "a pickle");
    at->nodes[at->count++] = *node;
    if (at->count > 1)
        link_item(at, parent, at->count - 1);
    return FSDP_OK;
}

/* The container at at->path, made when it is not there yet. */
static fsdp_status find_container(tree *at, const tree_node *node, size_t *parent, fsdp_error *err)
{
    const uint64_t *found = fsdp_name_table_find(&at->table, at->path.data, at->path.size);
    if (found) {
        *parent = (size_t)*found;
        return FSDP_OK;
    }
    const char *key = fsdp_arena_strndup(&at->arena, at->path.data, at->path.size);
    if (at->path.failed || !key || !fsdp_name_table_put(&at->table, key, at->path.size, at->count))
        return fsdp_fail_memory(err, "a pickle");
    FSDP_TRY(add_node(at, *parent, node, err));
    *parent = at->count - 1;
    return FSDP_OK;
}

static fsdp_status add_entry(tree *at, size_t i, fsdp_error *err)
{
    const char *key = at->entries[i].name;
    const int32_t *path = at->nesting.paths[i];
    size_t count = at->nesting.counts[i], parent = 0;
    at->path.size = 0;
    for (size_t e = 0; e + 1 < count; e++) {
        tree_node node = {.key = key, .element = path[e], .is_list = path[e + 1] < 0};
        fsdp_text_add(&at->path, (const char *)&path[e], sizeof path[e]);
        fsdp_text_add(&at->path, key, nesting_bytes(path[e]));
        FSDP_TRY(find_container(at, &node, &parent, err));
        key += nesting_bytes(path[e]) + 1;
    }
    tree_node leaf = {.key = key, .element = path[count - 1], .is_leaf = true, .entry = i};
    return add_node(at, parent, &leaf, err);
}

/* --- telling ---------------------------------------------------------------------------------- */

/* As deep as paths are long. */
static fsdp_status tell(tree *at, size_t number, fsdp_error *err)
{
    tree_node node = at->nodes[number];
    if (node.is_leaf)
        return at->emit(at->user, node.entry, err);
    fsdp_pickler_op(at->pickler, node.is_list ? FSDP_OP_EMPTY_LIST : FSDP_OP_EMPTY_DICT);
    fsdp_pickler_op(at->pickler, FSDP_OP_MARK);
    for (size_t i = node.first; i != NO_NODE; i = at->nodes[i].next) {
        if (!node.is_list)
            fsdp_pickler_text(at->pickler, at->nodes[i].key, nesting_bytes(at->nodes[i].element));
        FSDP_TRY(tell(at, i, err));
    }
    fsdp_pickler_op(at->pickler, node.is_list ? FSDP_OP_APPENDS : FSDP_OP_SETITEMS);
    return FSDP_OK;
}

static fsdp_status tell_all(tree *at, fsdp_error *err)
{
    FSDP_TRY(nesting_find(at->entries, at->entry_count, NESTING_TORCH, &at->nesting, err));
    FSDP_TRY(add_node(at, 0, &(tree_node){.is_list = false}, err));
    for (size_t i = 0; i < at->entry_count; i++)
        FSDP_TRY(add_entry(at, i, err));
    return tell(at, 0, err);
}

fsdp_status torch_emit_tree(fsdp_pickler *pickler, const fsdp_target_entry *entries, size_t count,
                            fsdp_status (*emit)(void *user, size_t entry, fsdp_error *err),
                            void *user, fsdp_error *err)
{
    tree at = {
        .entries = entries, .entry_count = count, .pickler = pickler, .emit = emit, .user = user};
    fsdp_status st = tell_all(&at, err);
    nesting_release(&at.nesting);
    fsdp_free(at.nodes);
    fsdp_name_table_release(&at.table);
    fsdp_arena_release(&at.arena);
    fsdp_text_release(&at.path);
    return st;
}
