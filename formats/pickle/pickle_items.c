/*
 * Containers that are made of their items: OrderedDict([(key, value), ...]), as Python 2 wrote it,
 * defaultdict(list, {...}), deque([...], 5). The items that the call is given become items of the
 * container, as if SETITEMS or APPENDS had added them, so that readers find them in one place. See
 * pickle.h.
 */
#include "formats/pickle/pickle_vm.h"

static const fsdp_pickle_node *node_at(const pickle_vm *vm, fsdp_node node)
{
    return &vm->nodes[node];
}

static fsdp_node item_of(const pickle_vm *vm, fsdp_node tuple, size_t number)
{
    const fsdp_pickle_node *node = node_at(vm, tuple);
    return number < node->count ? node->as.items[number] : 0;
}

static bool makes_dict(unsigned known)
{
    return known == FSDP_KNOWN_ORDERED_DICT || known == FSDP_KNOWN_DEFAULTDICT ||
           known == FSDP_KNOWN_COUNTER;
}

static bool is_sequence(const fsdp_pickle_node *node)
{
    return node->kind == FSDP_NODE_LIST || node->kind == FSDP_NODE_TUPLE ||
           node->kind == FSDP_NODE_SET || node->kind == FSDP_NODE_FROZENSET;
}

/* Pushes the items of a list, or the keys and values of a dict. */
static fsdp_status push_all(pickle_vm *vm, fsdp_node container)
{
    for (uint32_t i = 0; i < node_at(vm, container)->count; i++)
        FSDP_TRY(pickle_push(vm, node_at(vm, container)->as.items[i]));
    return FSDP_OK;
}

/* Pushes the items of [(key, value), ...], as Python 2 wrote an OrderedDict. */
static fsdp_status push_pairs(pickle_vm *vm, fsdp_node list)
{
    for (uint32_t i = 0; i < node_at(vm, list)->count; i++) {
        const fsdp_pickle_node *pair = node_at(vm, node_at(vm, list)->as.items[i]);
        if (pair->count != 2)
            return pickle_fail(
                vm, FSDP_ERR_DAMAGED,
                "the argument of an OrderedDict or defaultdict is no list of (key, value)");
        fsdp_node value = pair->as.items[1];
        FSDP_TRY(pickle_push(vm, pair->as.items[0]));
        FSDP_TRY(pickle_push(vm, value));
    }
    return FSDP_OK;
}

/* Pushes the items that a container is made of. */
static fsdp_status push_given(pickle_vm *vm, unsigned known, fsdp_node given)
{
    const fsdp_pickle_node *at = node_at(vm, given);
    fsdp_pickle pickle = {.nodes = vm->nodes, .count = vm->node_count};
    if (known == FSDP_KNOWN_DEQUE && (is_sequence(at) || given == 0))
        return push_all(vm, given);
    if (makes_dict(known) && at->kind == FSDP_NODE_DICT)
        return push_all(vm, given);
    if (makes_dict(known) && at->kind == FSDP_NODE_CALL && makes_dict(at->known))
        return push_all(vm, fsdp_pickle_dict_items(&pickle, at));
    bool counts = known == FSDP_KNOWN_COUNTER && at->count > 0; /* how often, not pairs */
    if (makes_dict(known) && !counts && (is_sequence(at) || given == 0))
        return push_pairs(vm, given);
    return pickle_fail(
        vm, FSDP_ERR_DAMAGED,
        "the argument of an OrderedDict, defaultdict, Counter or deque holds no items");
}

/* args without the items: the factory of a defaultdict, the length of a deque. */
static fsdp_status drop_items(pickle_vm *vm, unsigned known, fsdp_node *args)
{
    size_t base = vm->height;
    if (known == FSDP_KNOWN_DEFAULTDICT)
        FSDP_TRY(pickle_push(vm, item_of(vm, *args, 0)));
    if (known == FSDP_KNOWN_DEQUE && node_at(vm, *args)->count > 1) {
        FSDP_TRY(pickle_push(vm, NODE_OF_EMPTY_TUPLE));
        FSDP_TRY(pickle_push(vm, item_of(vm, *args, 1)));
    }
    *args = NODE_OF_EMPTY_TUPLE;
    if (vm->height == base)
        return FSDP_OK;
    FSDP_TRY(pickle_push_items(vm, FSDP_NODE_TUPLE, base));
    *args = vm->stack[--vm->height];
    return FSDP_OK;
}

fsdp_status pickle_push_container(pickle_vm *vm, fsdp_pickle_node node, fsdp_node callable,
                                  fsdp_node args)
{
    size_t first = node.known == FSDP_KNOWN_DEFAULTDICT ? 1 : 0, base = vm->height;
    fsdp_node_kind kind = makes_dict(node.known) ? FSDP_NODE_DICT : FSDP_NODE_LIST;
    fsdp_node given = item_of(vm, args, first);
    if (given != 0)
        FSDP_TRY(drop_items(vm, node.known, &args));
    FSDP_TRY(pickle_push_call(vm, node, callable, args, 0));
    FSDP_TRY(push_given(vm, node.known, given));
    if (vm->height > base + 1)
        FSDP_TRY(pickle_append(vm, vm->stack[base], kind, base + 1));
    vm->height = base + 1;
    return FSDP_OK;
}

bool pickle_is_container(unsigned known)
{
    return makes_dict(known) || known == FSDP_KNOWN_DEQUE;
}
