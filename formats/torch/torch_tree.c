/* Makes nested containers from the paths of names: see torch_tree.h. The walk of torch_names.c
 * reads them back. */
#include "formats/torch/torch_tree.h"

#include "base/core/mem.h"
#include "base/data/name_path.h"
#include "formats/target/container_table.h"
#include "formats/target/nesting.h"

#include <stdlib.h>
#include <string.h>

enum { NO_NODE = 0 }; /* no node has the root as a child */

/* A container or an entry, as an item of a container. */
typedef struct tree_node {
    const char *key;
    int32_t element;                 /* of a path, see name_path.h */
    bool is_list, is_tuple, is_leaf; /* a tuple is a list, too */
    bool is_top;                     /* its key is the first of a path */
    size_t entry;                    /* of a leaf */
    size_t first, last, next;        /* first and last item; the next item after this one */
    size_t count;                    /* of items */
} tree_node;

typedef struct tree {
    const fsdp_target_entry *entries;
    size_t entry_count;
    const char *namespaces; /* the dict of this key is a namespace; NULL: none */
    nesting nesting;
    tree_node *nodes;
    size_t count, room;
    container_table table; /* of numbers of nodes */
    fsdp_pickler *pickler;
    fsdp_status (*emit)(void *context, size_t entry, fsdp_error *err);
    void *context;
} tree;

/* --- growing ---------------------------------------------------------------------------------- */

static void append_item(tree *at, size_t parent, size_t number)
{
    tree_node *around = &at->nodes[parent];
    size_t *link = around->last == NO_NODE ? &around->first : &at->nodes[around->last].next;
    *link = number;
    around->last = number;
    around->count++;
}

static fsdp_status add_node(tree *at, size_t parent, const tree_node *node, fsdp_error *err)
{
    if (!fsdp_grow(&at->nodes, &at->room, at->count + 1, sizeof *at->nodes))
        return fsdp_fail_memory(err, "a pickle");
    at->nodes[at->count++] = *node;
    if (at->count > 1)
        append_item(at, parent, at->count - 1);
    return FSDP_OK;
}

/* Replaces *parent by the container that the node names in it, which is made when it is new. */
static fsdp_status find_container(tree *at, const tree_node *node, size_t *parent, fsdp_error *err)
{
    const uint64_t *found = container_table_find(&at->table, *parent, node->key, node->element);
    if (found) {
        *parent = (size_t)*found;
        return FSDP_OK;
    }
    if (!container_table_put(&at->table, at->count))
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
    for (size_t e = 0; e + 1 < count; e++) {
        tree_node node = {.key = key,
                          .element = path[e],
                          .is_list = path[e + 1] < 0,
                          .is_tuple = fsdp_path_in_tuple(path[e + 1]),
                          .is_top = e == 0};
        FSDP_TRY(find_container(at, &node, &parent, err));
        key += fsdp_path_bytes(path[e]) + 1;
    }
    tree_node leaf = {.key = key, .element = path[count - 1], .is_leaf = true, .entry = i};
    return add_node(at, parent, &leaf, err);
}

/* --- order ------------------------------------------------------------------------------------ */

typedef struct list_item {
    int64_t position;
    size_t number; /* of its node */
} list_item;

static int compare_positions(const void *a, const void *b)
{
    const list_item *x = a, *y = b;
    return (x->position > y->position) - (x->position < y->position);
}

/* Sorts the items of a list by position, because entries arrive in any order. */
static fsdp_status sort_list(tree *at, tree_node *list, fsdp_error *err)
{
    list_item *items = fsdp_alloc(list->count, sizeof *items);
    if (!items)
        return fsdp_fail_memory(err, "a pickle");
    size_t count = 0, *link = &list->first;
    for (size_t i = list->first; i != NO_NODE; i = at->nodes[i].next)
        items[count++] = (list_item){strtoll(at->nodes[i].key, NULL, 10), i};
    qsort(items, count, sizeof *items, compare_positions);
    for (size_t i = 0; i < count; i++) {
        *link = items[i].number;
        link = &at->nodes[items[i].number].next;
    }
    *link = NO_NODE;
    fsdp_free(items);
    return FSDP_OK;
}

static fsdp_status sort_lists(tree *at, fsdp_error *err)
{
    for (size_t i = 0; i < at->count; i++)
        if (at->nodes[i].is_list)
            FSDP_TRY(sort_list(at, &at->nodes[i], err));
    return FSDP_OK;
}

/* --- writing ---------------------------------------------------------------------------------- */

static void emit_key(fsdp_pickler *pickler, const tree_node *item)
{
    if (item->element >= 0 && item->element & FSDP_PATH_NUMBER)
        fsdp_pickler_int(pickler, strtoll(item->key, NULL, 10));
    else
        fsdp_pickler_text(pickler, item->key, fsdp_path_bytes(item->element));
}

/* A dict at the top whose key is that of a namespace. */
static bool is_namespace(const tree *at, const tree_node *node)
{
    size_t size = at->namespaces ? strlen(at->namespaces) : 0;
    return size > 0 && !node->is_list && node->is_top && fsdp_path_bytes(node->element) == size &&
           memcmp(node->key, at->namespaces, size) == 0;
}

/* Recursion depth is the length of paths. */
static fsdp_status emit_node(tree *at, size_t number, fsdp_error *err)
{
    tree_node node = at->nodes[number];
    if (node.is_leaf)
        return at->emit(at->context, node.entry, err);
    bool opens_object = is_namespace(at, &node);
    if (opens_object) {
        fsdp_pickler_global(at->pickler, "argparse", "Namespace");
        fsdp_pickler_op(at->pickler, FSDP_OP_EMPTY_TUPLE);
        fsdp_pickler_op(at->pickler, FSDP_OP_NEWOBJ);
    }
    if (!node.is_tuple)
        fsdp_pickler_op(at->pickler, node.is_list ? FSDP_OP_EMPTY_LIST : FSDP_OP_EMPTY_DICT);
    fsdp_pickler_op(at->pickler, FSDP_OP_MARK);
    for (size_t i = node.first; i != NO_NODE; i = at->nodes[i].next) {
        if (!node.is_list)
            emit_key(at->pickler, &at->nodes[i]);
        FSDP_TRY(emit_node(at, i, err));
    }
    fsdp_pickler_op(at->pickler, node.is_tuple  ? FSDP_OP_TUPLE
                                 : node.is_list ? FSDP_OP_APPENDS
                                                : FSDP_OP_SETITEMS);
    if (opens_object)
        fsdp_pickler_op(at->pickler, FSDP_OP_BUILD);
    return FSDP_OK;
}

static fsdp_status emit_tree(tree *at, fsdp_error *err)
{
    FSDP_TRY(nesting_find(at->entries, at->entry_count, NESTING_TORCH, &at->nesting, err));
    nesting_root kind = at->nesting.root;
    if (kind == NESTING_WHOLE)
        return at->emit(at->context, 0, err);
    const tree_node root = {.is_list = kind != NESTING_IN_DICT,
                            .is_tuple = kind == NESTING_IN_TUPLE};
    FSDP_TRY(add_node(at, 0, &root, err));
    for (size_t i = 0; i < at->entry_count; i++)
        FSDP_TRY(add_entry(at, i, err));
    FSDP_TRY(sort_lists(at, err));
    return emit_node(at, 0, err);
}

fsdp_status torch_emit_tree(fsdp_pickler *pickler, const fsdp_target_opts *opts,
                            fsdp_status (*emit)(void *context, size_t entry, fsdp_error *err),
                            void *context, fsdp_error *err)
{
    tree at = {.entries = opts->entries,
               .entry_count = opts->entry_count,
               .namespaces = opts->namespaces,
               .pickler = pickler,
               .emit = emit,
               .context = context};
    fsdp_status st = emit_tree(&at, err);
    nesting_release(&at.nesting);
    fsdp_free(at.nodes);
    container_table_release(&at.table);
    return st;
}
