/* Nodes of a pickle, the memory that they lie in, the queries of readers, and the errors of the machine. See
 * pickle.h. */
#include "formats/pickle/pickle_vm.h"
#include "base/text.h"

#include <string.h>

/* --- errors: with the place in the pickle ----------------------------------------------------------- */

fsdp_status pickle_fail(pickle_vm *vm, fsdp_status status, const char *why)
{
    return fsdp_fail(vm->err, status, "%s: pickle, byte %lld: %s", vm->options->where,
                     (long long)(vm->options->offset + (vm->opcode - vm->data)), why);
}

fsdp_status pickle_no_memory(pickle_vm *vm)
{
    return fsdp_fail(vm->err, FSDP_ERR_LIMIT, "%s: cannot allocate memory for a pickle",
                     vm->options->where);
}

enum { FIRST_BLOCK = 4 << 10, LARGEST_BLOCK = 16 << 20, NODE_LIMIT = 1 << 26, SMALLEST_ROOM = 8 };
enum { MORE_KWARGS, MORE_LIST, MORE_DICT, MORE_SET, MORE_COUNT };

/* --- memory ------------------------------------------------------------------------------------- */

void *pickle_store_take_more(fsdp_pickle_store *store, size_t size)
{
    if (size > SIZE_MAX / 2)
        return NULL;
    size = size == 0 ? 8 : (size + 7) & ~(size_t)7;
    if ((size_t)(store->end - store->next) < size) {
        size_t usual = store->blocks ? store->block_bytes * 2 : FIRST_BLOCK;
        if (usual > LARGEST_BLOCK)
            usual = LARGEST_BLOCK;
        size_t room = size > usual / 4 ? size : usual;
        struct pickle_block *block = fsdp_realloc(NULL, sizeof *block + room, 1);
        if (!block)
            return NULL;
        block->next = store->blocks;
        store->blocks = block;
        if (room == size)
            return block->data;
        store->block_bytes = room;
        store->next = (char *)block->data;
        store->end = store->next + room;
    }
    void *data = store->next;
    store->next += size;
    return data;
}

static fsdp_node *take_nodes(pickle_vm *vm, size_t count)
{
    return pickle_store_take(vm->store, count * sizeof(fsdp_node));
}

/* --- making nodes ------------------------------------------------------------------------------- */

fsdp_status pickle_push_grown(pickle_vm *vm, fsdp_node node)
{
    if (!fsdp_grow(&vm->stack, &vm->stack_capacity, vm->height + 1, sizeof *vm->stack))
        return pickle_no_memory(vm);
    vm->stack[vm->height++] = node;
    return FSDP_OK;
}

fsdp_status pickle_new_node_grown(pickle_vm *vm, const fsdp_pickle_node *node, fsdp_node *node_out)
{
    if (vm->node_count >= NODE_LIMIT)
        return pickle_fail(vm, FSDP_ERR_LIMIT, "it holds over 2^26 objects");
    if (!fsdp_grow(&vm->nodes, &vm->node_capacity, vm->node_count + 1, sizeof *vm->nodes))
        return pickle_no_memory(vm);
    *node_out = (fsdp_node)vm->node_count;
    vm->nodes[vm->node_count++] = *node;
    return FSDP_OK;
}

/* Small ints are one object in Python, too, which matters to readers that compare identity.
 * Larger ones are shared in metadata only, up to the range of file offsets, which do not repeat. */
enum { SHARED_BELOW = 1 << 20 };

fsdp_status pickle_push_int(pickle_vm *vm, int64_t value)
{
    bool is_small = value >= 0 && value < PICKLE_SMALL_INTS;
    bool is_shared = is_small || (vm->options->is_metadata && value >= 0 && value < SHARED_BELOW);
    fsdp_node *known = is_small ? &vm->small_ints[value] : pickle_shared(vm, (uint64_t)value, 0);
    const fsdp_pickle_node *node = &vm->nodes[*known];
    if (is_shared && node->kind == FSDP_NODE_INT && node->as.i64 == value)
        return pickle_push(vm, *known);
    fsdp_node made = 0;
    FSDP_TRY(pickle_new_node(
        vm, (fsdp_pickle_node){.kind = FSDP_NODE_INT, .flags = FSDP_NODE_HASHABLE, .as.i64 = value},
        &made));
    if (is_shared)
        *known = made;
    return pickle_push(vm, made);
}

/* --- containers --------------------------------------------------------------------------------- */

/* Capacity of a growing container of count items. */
static inline size_t room_for(size_t count)
{
    if (count <= SMALLEST_ROOM)
        return (count + 1) / 2 * 2;
    return (size_t)1 << (64 - __builtin_clzll(count - 1));
}

/* Checks every step-th node of the stack from `from` on. */
static bool all_hashable(const pickle_vm *vm, size_t from, size_t step)
{
    for (size_t i = from; i < vm->height; i += step)
        if (!(vm->nodes[vm->stack[i]].flags & FSDP_NODE_HASHABLE))
            return false;
    return true;
}

/* Keys must be hashable. A hashable node cannot contain itself and never changes. */
static fsdp_status check_items(pickle_vm *vm, fsdp_node_kind kind, size_t from)
{
    size_t count = vm->height - from;
    if (kind == FSDP_NODE_DICT && count % 2 != 0)
        return pickle_fail(vm, FSDP_ERR_DAMAGED, "a dict receives a key without a value");
    size_t step = kind == FSDP_NODE_DICT ? 2 : 1;
    bool has_keys = kind == FSDP_NODE_DICT || kind == FSDP_NODE_SET || kind == FSDP_NODE_FROZENSET;
    if (has_keys && !all_hashable(vm, from, step))
        return pickle_fail(vm, FSDP_ERR_REFUSED, "a key of a dict or set is mutable");
    return FSDP_OK;
}

static fsdp_status push_new_items(pickle_vm *vm, fsdp_node_kind kind, size_t from)
{
    size_t count = vm->height - from;
    fsdp_pickle_node node = {.kind = (uint8_t)kind, .count = (uint32_t)count};
    if (kind == FSDP_NODE_FROZENSET || (kind == FSDP_NODE_TUPLE && all_hashable(vm, from, 1)))
        node.flags = FSDP_NODE_HASHABLE;
    if (count > 0) {
        bool is_fixed = kind == FSDP_NODE_TUPLE || kind == FSDP_NODE_FROZENSET;
        fsdp_node *items = take_nodes(vm, is_fixed ? count : room_for(count));
        if (!items)
            return pickle_no_memory(vm);
        memcpy(items, vm->stack + from, count * sizeof *items);
        node.as.items = items;
    }
    vm->height = from;
    return pickle_push_node(vm, node);
}

static bool is_tuple_of(const fsdp_pickle_node *node, const fsdp_node *items, size_t count)
{
    if (node->kind != FSDP_NODE_TUPLE || node->count != count)
        return false;
    for (size_t i = 0; i < count; i++)
        if (node->as.items[i] != items[i])
            return false;
    return true;
}

static fsdp_status push_short_tuple(pickle_vm *vm, size_t from)
{
    const fsdp_node *items = vm->stack + from;
    size_t count = vm->height - from;
    uint64_t key = count;
    for (size_t i = 0; i < count; i++)
        key = key * 31 + items[i];
    fsdp_node *known = pickle_shared(vm, key, count);
    if (is_tuple_of(&vm->nodes[*known], items, count)) {
        vm->height = from;
        return pickle_push(vm, *known);
    }
    FSDP_TRY(push_new_items(vm, FSDP_NODE_TUPLE, from));
    *known = vm->stack[from];
    return FSDP_OK;
}

fsdp_status pickle_push_items(pickle_vm *vm, fsdp_node_kind kind, size_t from)
{
    enum { SHORT_TUPLE = 4 };
    size_t count = vm->height - from;
    if (kind == FSDP_NODE_TUPLE)
        return vm->options->is_metadata && count > 0 && count <= SHORT_TUPLE
                   ? push_short_tuple(vm, from)
                   : push_new_items(vm, kind, from);
    FSDP_TRY(check_items(vm, kind, from));
    return push_new_items(vm, kind, from);
}

/* The store owns the items of a growing node; the const protects them from readers only. */
static fsdp_node *own_items(const fsdp_pickle_node *node)
{
    return (fsdp_node *)(uintptr_t)node->as.items;
}

static fsdp_status extend(pickle_vm *vm, fsdp_node target, size_t from)
{
    fsdp_pickle_node *node = &vm->nodes[target];
    size_t before = node->count, added = vm->height - from;
    if (added == 0)
        return FSDP_OK;
    if (before + added > UINT32_MAX / 2)
        return pickle_fail(vm, FSDP_ERR_LIMIT, "a container is too large");
    fsdp_node *items = own_items(node);
    size_t room = room_for(before + added);
    if (before == 0 || room != room_for(before)) {
        items = take_nodes(vm, room);
        if (!items)
            return pickle_no_memory(vm);
        if (before > 0)
            memcpy(items, node->as.items, before * sizeof *items);
    }
    memcpy(items + before, vm->stack + from, added * sizeof *items);
    node->as.items = items;
    node->count = (uint32_t)(before + added);
    return FSDP_OK;
}

/* Parts that few calls have, allowed on first use. */
static fsdp_status more_of(pickle_vm *vm, fsdp_node call, int part, fsdp_node_kind kind,
                           fsdp_node *part_out)
{
    fsdp_pickle_call *parts = vm->nodes[call].as.call;
    if (parts->more == 0) {
        fsdp_node *items = take_nodes(vm, MORE_COUNT);
        if (!items)
            return pickle_no_memory(vm);
        memset(items, 0, MORE_COUNT * sizeof *items);
        fsdp_pickle_node node = {.kind = FSDP_NODE_TUPLE, .count = MORE_COUNT, .as.items = items};
        FSDP_TRY(pickle_new_node(vm, node, &parts->more));
    }
    fsdp_node *items = own_items(&vm->nodes[parts->more]);
    if (items[part] == 0) {
        fsdp_pickle_node node = {.kind = (uint8_t)kind};
        FSDP_TRY(pickle_new_node(vm, node, &items[part]));
    }
    *part_out = items[part];
    return FSDP_OK;
}

/* Every object of a class that the policy does not list may have items; no listed class is a set. */
static bool takes_items(const fsdp_pickle_node *node, fsdp_node_kind kind)
{
    unsigned traits = pickle_traits(node->known);
    return node->flags & FSDP_NODE_OPAQUE ||
           (kind == FSDP_NODE_LIST && traits & PICKLE_TAKES_LISTS) ||
           (kind == FSDP_NODE_DICT && traits & PICKLE_TAKES_DICTS);
}

fsdp_status pickle_append(pickle_vm *vm, fsdp_node target, fsdp_node_kind kind, size_t from)
{
    FSDP_TRY(check_items(vm, kind, from));
    const fsdp_pickle_node *node = &vm->nodes[target];
    if (node->kind == kind)
        return extend(vm, target, from);
    if (node->kind != FSDP_NODE_CALL || !takes_items(node, kind))
        return pickle_fail(vm, FSDP_ERR_REFUSED,
                           "an object that does not take items receives some");
    if (node->as.call->state != 0) /* the state could have replaced __setitem__ or append */
        return pickle_fail(vm, FSDP_ERR_REFUSED, "an object receives items after its state");
    static const int parts[] = {
        [FSDP_NODE_LIST] = MORE_LIST, [FSDP_NODE_DICT] = MORE_DICT, [FSDP_NODE_SET] = MORE_SET};
    fsdp_node part;
    FSDP_TRY(more_of(vm, target, parts[kind], kind, &part));
    return extend(vm, part, from);
}

static fsdp_status set_kwargs(pickle_vm *vm, fsdp_node call, fsdp_node kwargs)
{
    fsdp_node part;
    FSDP_TRY(more_of(vm, call, MORE_KWARGS, FSDP_NODE_DICT, &part));
    own_items(&vm->nodes[vm->nodes[call].as.call->more])[MORE_KWARGS] = kwargs;
    return FSDP_OK;
}

fsdp_status pickle_push_call(pickle_vm *vm, fsdp_pickle_node node, fsdp_node callable,
                             fsdp_node args, fsdp_node kwargs)
{
    fsdp_pickle_call *call = pickle_store_take(vm->store, sizeof *call);
    if (!call)
        return pickle_no_memory(vm);
    *call = (fsdp_pickle_call){.callable = callable, .args = args};
    node.kind = FSDP_NODE_CALL;
    node.flags |= FSDP_NODE_HASHABLE;
    node.as.call = call;
    FSDP_TRY(pickle_push_node(vm, node));
    return kwargs == 0 ? FSDP_OK : set_kwargs(vm, vm->stack[vm->height - 1], kwargs);
}

/* --- queries ------------------------------------------------------------------------------------ */

static fsdp_node part_of(const fsdp_pickle *pickle, const fsdp_pickle_node *node, int part)
{
    if (node->kind != FSDP_NODE_CALL || node->as.call->more == 0)
        return 0;
    return pickle->nodes[node->as.call->more].as.items[part];
}

fsdp_node fsdp_pickle_kwargs(const fsdp_pickle *pickle, const fsdp_pickle_node *node)
{
    return part_of(pickle, node, MORE_KWARGS);
}

fsdp_node fsdp_pickle_list_items(const fsdp_pickle *pickle, const fsdp_pickle_node *node)
{
    return part_of(pickle, node, MORE_LIST);
}

fsdp_node fsdp_pickle_dict_items(const fsdp_pickle *pickle, const fsdp_pickle_node *node)
{
    return part_of(pickle, node, MORE_DICT);
}

fsdp_node fsdp_pickle_element(const fsdp_pickle *pickle, fsdp_node tuple, size_t number)
{
    const fsdp_pickle_node *node = &pickle->nodes[tuple];
    bool has_items = node->kind == FSDP_NODE_TUPLE || node->kind == FSDP_NODE_LIST;
    return has_items && number < node->count ? node->as.items[number] : 0;
}

fsdp_node fsdp_pickle_argument(const fsdp_pickle *pickle, const fsdp_pickle_node *call,
                               size_t number)
{
    return call->kind == FSDP_NODE_CALL ? fsdp_pickle_element(pickle, call->as.call->args, number)
                                        : 0;
}

bool fsdp_pickle_is_text(const fsdp_pickle *pickle, fsdp_node node, const char *text)
{
    return fsdp_pickle_has_text(&pickle->nodes[node], text, strlen(text));
}

bool fsdp_pickle_int(const fsdp_pickle *pickle, fsdp_node node, int64_t *value_out)
{
    *value_out = pickle->nodes[node].kind == FSDP_NODE_INT ? pickle->nodes[node].as.i64 : 0;
    return pickle->nodes[node].kind == FSDP_NODE_INT;
}

char *fsdp_pickle_global_name(const fsdp_pickle *pickle, fsdp_node node)
{
    const fsdp_pickle_node *at = &pickle->nodes[node];
    for (int hops = 0; at->kind == FSDP_NODE_CALL && hops < 4; hops++) {
        /* getattr(C, name) and copyreg._reconstructor(C, ...) have the name of C */
        bool is_shape = at->known == FSDP_KNOWN_GETATTR || at->known == FSDP_KNOWN_RECONSTRUCTOR;
        node = is_shape ? fsdp_pickle_argument(pickle, at, 0) : at->as.call->callable;
        at = &pickle->nodes[node];
    }
    if (at->kind != FSDP_NODE_GLOBAL)
        return fsdp_strndup("object", 6);
    fsdp_pickle_global old = *at->as.global, *global = &old;
    if (strcmp(old.module, "__builtin__") == 0) { /* the name in Python 2 */
        old.module = "builtins";
        old.module_size = strlen(old.module);
    }
    char *text = fsdp_alloc(global->module_size + global->name_size + 2, 1);
    if (!text)
        return NULL;
    memcpy(text, global->module, global->module_size);
    text[global->module_size] = '.';
    memcpy(text + global->module_size + 1, global->name, global->name_size);
    return text;
}
