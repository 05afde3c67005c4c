/*
 * The arguments that listed calls may have. The calls are harmless with arguments that Python
 * itself writes, but some of them call their argument: a function, the constructor of a class,
 * or a method of an object, which the file may have replaced by an attribute of that name. See
 * pickle_policy.c.
 *
 *   functions and classes   only where the call expects one, and only harmless ones
 *   objects                 only of kinds whose attributes the file cannot set
 *   tensors                 results of rebuild functions, with attributes that replace no method
 */
#include "formats/pickle/pickle_vm.h"
#include <fsdp/box.h>

#include <string.h>

enum { ATTRIBUTES_MOST = 4096, NESTED_MOST = 256, STATE_DEPTH = 3, ITEMS_MOST = 1 << 22 };

typedef struct call_check {
    pickle_vm *vm;
    fsdp_node args;
    fsdp_node culprit; /* the refused argument */
} call_check;

static const fsdp_pickle_node *node_at(const call_check *check, fsdp_node node)
{
    return &check->vm->nodes[node];
}

static fsdp_node item_of(const call_check *check, fsdp_node tuple, size_t number)
{
    const fsdp_pickle_node *node = node_at(check, tuple);
    return node->kind == FSDP_NODE_TUPLE && number < node->count ? node->as.items[number] : 0;
}

static fsdp_node argument(const call_check *check, size_t number)
{
    return item_of(check, check->args, number);
}

static size_t argument_count(const call_check *check)
{
    return node_at(check, check->args)->count;
}

static bool verdict(call_check *check, bool is_allowed, fsdp_node culprit)
{
    if (!is_allowed)
        check->culprit = culprit;
    return is_allowed;
}

/* --- classes ------------------------------------------------------------------------------------ */

static bool is_numpy(const fsdp_pickle_node *node)
{
    return node->kind == FSDP_NODE_GLOBAL && (node->known == FSDP_KNOWN_NUMPY_ARRAY ||
                                              (node->known == FSDP_KNOWN_STANDARD &&
                                               strncmp(node->as.global->module, "numpy", 5) == 0));
}

/* A class of Python's library whose constructor only stores its arguments. */
static bool is_builtin_class(const fsdp_pickle_node *node)
{
    static const char classes[] = " object bool int long float complex str unicode bytes bytearray "
                                  "tuple list dict set frozenset ";
    if (node->kind != FSDP_NODE_GLOBAL || (strcmp(node->as.global->module, "builtins") != 0 &&
                                           strcmp(node->as.global->module, "__builtin__") != 0))
        return false;
    size_t size = node->as.global->name_size;
    const char *found = strstr(classes, node->as.global->name);
    return size > 0 && !strchr(node->as.global->name, ' ') && found && found[-1] == ' ' &&
           found[size] == ' ';
}

static bool is_class_of(const fsdp_pickle_node *node, fsdp_known first, fsdp_known last)
{
    return node->kind == FSDP_NODE_GLOBAL && node->known >= first && node->known <= last;
}

/* --- objects ------------------------------------------------------------------------------------ */

static bool is_rebuild(unsigned known)
{
    return known >= FSDP_KNOWN_TENSOR && known <= FSDP_KNOWN_REBUILD_OTHER;
}

/* Numbers, text, containers, and objects whose methods the file cannot replace. Items of a
 * container are not searched for methods. */
static bool is_data(const call_check *check, fsdp_node node)
{
    const fsdp_pickle_node *at = node_at(check, node);
    if (at->kind == FSDP_NODE_GLOBAL || at->kind == FSDP_NODE_PERSISTENT)
        return false;
    if (at->kind != FSDP_NODE_CALL)
        return true;
    if (at->flags & (FSDP_NODE_OPAQUE | FSDP_NODE_PENDING))
        return false;
    switch (at->known) {
    case FSDP_KNOWN_NUMPY_DTYPE:
    case FSDP_KNOWN_NUMPY_ARRAY:
    case FSDP_KNOWN_NUMPY_RECONSTRUCT:
    case FSDP_KNOWN_UUID:
    case FSDP_KNOWN_DATETIME: return true; /* their states are not attributes */
    case FSDP_KNOWN_NAMESPACE:
    case FSDP_KNOWN_GETATTR:
    case FSDP_KNOWN_PARTIAL:
    case FSDP_KNOWN_FROM_TYPE: return false;
    default: return !is_rebuild(at->known) && at->as.call->state == 0;
    }
}

/* Attributes that Python would call in place of methods of the object. */
static bool is_method(const fsdp_pickle_node *key, const fsdp_pickle_node *value)
{
    if (value->kind != FSDP_NODE_GLOBAL && value->kind != FSDP_NODE_CALL)
        return false;

    static const char *const methods[] = {"detach", "requires_grad_", "as_subclass",  "to",
                                          "items",  "keys",           "__setstate__", "__class__"};
    for (size_t i = 0; key->kind == FSDP_NODE_STR && i < sizeof methods / sizeof *methods; i++)
        if (key->count == strlen(methods[i]) && memcmp(key->as.text, methods[i], key->count) == 0)
            return true;
    return false;
}

static bool pairs_hide_no_method(const call_check *check, const fsdp_pickle_node *pairs)
{
    if (pairs->count > 2 * ATTRIBUTES_MOST)
        return false;
    for (uint32_t i = 0; i + 1 < pairs->count; i += 2)
        if (is_method(node_at(check, pairs->as.items[i]), node_at(check, pairs->as.items[i + 1])))
            return false;
    return true;
}

/* A state whose members become attributes: a dict, or a dict and a dict of slots. The class's
 * __setstate__ takes any other state. */
static bool state_is_harmless(const call_check *check, fsdp_node state, int depth)
{
    const fsdp_pickle_node *at = node_at(check, state);
    if (depth == STATE_DEPTH)
        return false;
    switch (at->kind) {
    case FSDP_NODE_DICT: return pairs_hide_no_method(check, at);
    case FSDP_NODE_GLOBAL: return at->known != FSDP_KNOWN_STANDARD;
    case FSDP_NODE_TUPLE:
        return at->count != 2 || (state_is_harmless(check, at->as.items[0], depth + 1) &&
                                  state_is_harmless(check, at->as.items[1], depth + 1));
    case FSDP_NODE_CALL: {
        fsdp_pickle pickle = {.nodes = check->vm->nodes, .count = check->vm->node_count};
        fsdp_node items = fsdp_pickle_dict_items(&pickle, at);
        return at->known != FSDP_KNOWN_PARTIAL && at->known != FSDP_KNOWN_GETATTR &&
               state_is_harmless(check, at->as.call->state, depth + 1) &&
               pairs_hide_no_method(check, node_at(check, items));
    }
    default: return true;
    }
}

/* --- Python's and numpy's ------------------------------------------------------------------------- */

static bool are_data(call_check *check, size_t from)
{
    for (size_t i = from; i < argument_count(check); i++)
        if (!is_data(check, argument(check, i)))
            return verdict(check, false, argument(check, i));
    return true;
}

static bool is_sequence(const fsdp_pickle_node *node)
{
    return node->kind == FSDP_NODE_LIST || node->kind == FSDP_NODE_TUPLE ||
           node->kind == FSDP_NODE_SET || node->kind == FSDP_NODE_FROZENSET;
}

/* Bounds the items that calls copy: a small pickle may give one long list to many calls. */
static bool may_be_copied(call_check *check, fsdp_node items)
{
    const fsdp_pickle_node *at = node_at(check, items);
    fsdp_pickle pickle = {.nodes = check->vm->nodes, .count = check->vm->node_count};
    if (at->kind == FSDP_NODE_CALL)
        at = node_at(check, fsdp_pickle_dict_items(&pickle, at));
    if (is_sequence(at) || at->kind == FSDP_NODE_DICT)
        check->vm->items_copied += at->count;
    return verdict(check, check->vm->items_copied <= ITEMS_MOST, items);
}

/* A list that becomes a dict must be a list of pairs, because each item is iterated over. */
static bool is_list_of_pairs(call_check *check, fsdp_node list)
{
    const fsdp_pickle_node *at = node_at(check, list);
    if (!may_be_copied(check, list))
        return false;
    for (uint32_t i = 0; is_sequence(at) && i < at->count; i++) {
        uint8_t kind = node_at(check, at->as.items[i])->kind;
        if (kind != FSDP_NODE_TUPLE && kind != FSDP_NODE_LIST)
            return verdict(check, false, at->as.items[i]);
    }
    return true;
}

/* defaultdict calls the factory for every missing key. */
static bool factory_allowed(const call_check *check, fsdp_node factory)
{
    const fsdp_pickle_node *at = node_at(check, factory);
    if (at->kind == FSDP_NODE_GLOBAL)
        return at->known == FSDP_KNOWN_FOREIGN || is_builtin_class(at) ||
               is_class_of(at, FSDP_KNOWN_SET, FSDP_KNOWN_COMPLEX) ||
               is_class_of(at, FSDP_KNOWN_ORDERED_DICT, FSDP_KNOWN_DEQUE) ||
               at->known == FSDP_KNOWN_NAMESPACE;
    return at->kind == FSDP_NODE_NONE || at->kind == FSDP_NODE_ABSENT ||
           (at->kind == FSDP_NODE_CALL && at->known == FSDP_KNOWN_FOREIGN);
}

/* A time zone may be of any package. */
static bool are_parts_of_time(call_check *check)
{
    for (size_t i = 0; i < argument_count(check); i++) {
        fsdp_node part = argument(check, i);
        const fsdp_pickle_node *at = node_at(check, part);
        bool is_zone = at->kind == FSDP_NODE_CALL && at->known == FSDP_KNOWN_FOREIGN;
        if (!is_zone && !is_data(check, part))
            return verdict(check, false, part);
    }
    return true;
}

/* (class, base, state): base makes the object from the state. */
static bool reconstruction_allowed(call_check *check)
{
    const fsdp_pickle_node *class_node = node_at(check, argument(check, 0));
    const fsdp_pickle_node *base = node_at(check, argument(check, 1));
    bool is_class = pickle_is_unknown_class(class_node) || is_builtin_class(class_node) ||
                    is_class_of(class_node, FSDP_KNOWN_SET, FSDP_KNOWN_COMPLEX) ||
                    is_class_of(class_node, FSDP_KNOWN_ORDERED_DICT, FSDP_KNOWN_NAMESPACE);
    if (!verdict(check, is_class, argument(check, 0)) || argument_count(check) != 3)
        return false;
    bool is_base = is_builtin_class(base) ||
                   (base->kind == FSDP_NODE_GLOBAL && base->known == FSDP_KNOWN_FOREIGN) ||
                   is_class_of(base, FSDP_KNOWN_SET, FSDP_KNOWN_COMPLEX);
    return verdict(check, is_base, argument(check, 1)) && are_data(check, 2) &&
           is_list_of_pairs(check, argument(check, 2));
}

/* --- tensors ------------------------------------------------------------------------------------ */

static bool is_tensor(const call_check *check, fsdp_node node)
{
    const fsdp_pickle_node *at = node_at(check, node);
    if (at->kind != FSDP_NODE_CALL)
        return at->kind == FSDP_NODE_NONE;
    if (is_rebuild(at->known) || at->known == FSDP_KNOWN_FROM_TYPE)
        return true;
    bool is_object = at->known == FSDP_KNOWN_FOREIGN || at->known == FSDP_KNOWN_TENSOR_CLASS ||
                     at->known == FSDP_KNOWN_PARAMETER_CLASS;
    return is_object && state_is_harmless(check, at->as.call->state, 0);
}

/* Sizes and strides must be ints: Python would call __index__ of any other object. */
static bool are_sizes(call_check *check, fsdp_node sizes)
{
    const fsdp_pickle_node *at = node_at(check, sizes);
    if (at->kind == FSDP_NODE_CALL && at->known == FSDP_KNOWN_TORCH_SIZE)
        return true;
    if (at->kind != FSDP_NODE_TUPLE && at->kind != FSDP_NODE_LIST)
        return verdict(check, is_data(check, sizes), sizes);
    for (uint32_t i = 0; i < at->count && i <= FSDP_MAX_DIMS; i++) {
        uint8_t kind = node_at(check, at->as.items[i])->kind;
        if (kind == FSDP_NODE_CALL || kind == FSDP_NODE_GLOBAL)
            return verdict(check, false, at->as.items[i]);
    }
    return true;
}

/* Arguments of the other rebuild functions: storages, tensors, dtypes and data. */
static bool is_part_of_tensor(const call_check *check, fsdp_node part)
{
    const fsdp_pickle_node *at = node_at(check, part);
    if (at->kind == FSDP_NODE_GLOBAL)
        return at->known == FSDP_KNOWN_TORCH_DTYPE || at->known == FSDP_KNOWN_TORCH_STORAGE ||
               (at->known == FSDP_KNOWN_TORCH && strcmp(at->as.global->module, "torch") == 0);
    if (at->kind == FSDP_NODE_CALL && (is_rebuild(at->known) || at->known == FSDP_KNOWN_FROM_TYPE))
        return true;
    return at->kind == FSDP_NODE_PERSISTENT || is_data(check, part);
}

static bool are_parts_of_tensor(call_check *check, size_t from)
{
    for (size_t i = from; i < argument_count(check); i++) {
        fsdp_node part = argument(check, i);
        const fsdp_pickle_node *at = node_at(check, part);
        if (!is_part_of_tensor(check, part))
            return verdict(check, false, part);
        if (at->kind == FSDP_NODE_TUPLE && at->count > NESTED_MOST)
            return verdict(check, false, part);
        for (uint32_t k = 0; at->kind == FSDP_NODE_TUPLE && k < at->count; k++)
            if (!is_part_of_tensor(check, at->as.items[k]))
                return verdict(check, false, at->as.items[k]);
    }
    return true;
}

static bool rebuild_allowed(call_check *check, unsigned known)
{
    switch (known) {
    case FSDP_KNOWN_TENSOR:
    case FSDP_KNOWN_TENSOR_V2:
    case FSDP_KNOWN_TENSOR_V3:
        return are_sizes(check, argument(check, 2)) && are_sizes(check, argument(check, 3));
    case FSDP_KNOWN_PARAMETER:
    case FSDP_KNOWN_PARAMETER_STATE:
    case FSDP_KNOWN_DEVICE_TENSOR:
        return verdict(check, is_tensor(check, argument(check, 0)), argument(check, 0)) &&
               verdict(check, state_is_harmless(check, argument(check, 3), 0), argument(check, 3));
    case FSDP_KNOWN_WRAPPER_SUBCLASS:
        return verdict(check, pickle_is_unknown_class(node_at(check, argument(check, 0))),
                       argument(check, 0)) &&
               are_parts_of_tensor(check, 1);
    case FSDP_KNOWN_DEVICE_TENSOR_NUMPY: return are_parts_of_tensor(check, 0);
    default: return are_parts_of_tensor(check, 0);
    }
}

/* (function, type, arguments, state): the function must itself rebuild a tensor. */
static bool from_type_allowed(call_check *check)
{
    const fsdp_pickle_node *function = node_at(check, argument(check, 0));
    const fsdp_pickle_node *type = node_at(check, argument(check, 1));
    fsdp_node inner = argument(check, 2), state = argument(check, 3);
    bool is_function = function->kind == FSDP_NODE_GLOBAL && is_rebuild(function->known);
    if (!verdict(check, is_function, argument(check, 0)) ||
        !verdict(check, pickle_is_unknown_class(type), argument(check, 1)) ||
        !verdict(check, node_at(check, inner)->kind == FSDP_NODE_TUPLE, inner) ||
        !verdict(check, state_is_harmless(check, state, 0), state))
        return false;
    check->args = inner;
    return rebuild_allowed(check, function->known);
}

/* --- all calls ---------------------------------------------------------------------------------- */

static bool allowed(call_check *check, unsigned known)
{
    switch (known) {
    case FSDP_KNOWN_FROM_TYPE: return from_type_allowed(check);
    case FSDP_KNOWN_RECONSTRUCTOR: return reconstruction_allowed(check);
    case FSDP_KNOWN_SLICE: return true; /* stores its arguments and calls none of their methods */
    case FSDP_KNOWN_NAMESPACE:
        return verdict(check, argument_count(check) == 0, argument(check, 0));
    case FSDP_KNOWN_DEFAULTDICT:
        return verdict(check, factory_allowed(check, argument(check, 0)), argument(check, 0)) &&
               are_data(check, 1) && is_list_of_pairs(check, argument(check, 1));
    case FSDP_KNOWN_COUNTER:
    case FSDP_KNOWN_ORDERED_DICT:
        return are_data(check, 0) && is_list_of_pairs(check, argument(check, 0));
    case FSDP_KNOWN_DEQUE: return are_data(check, 0) && may_be_copied(check, argument(check, 0));
    case FSDP_KNOWN_DATETIME: return are_parts_of_time(check);
    case FSDP_KNOWN_NUMPY_DTYPE:
        return are_data(check, is_numpy(node_at(check, argument(check, 0))) ? 1 : 0);
    case FSDP_KNOWN_NUMPY_RECONSTRUCT: {
        const fsdp_pickle_node *type = node_at(check, argument(check, 0));
        bool is_array = is_numpy(type) || pickle_is_unknown_class(type);
        return verdict(check, is_array, argument(check, 0)) && are_data(check, 1);
    }
    default: return is_rebuild(known) ? rebuild_allowed(check, known) : are_data(check, 0);
    }
}

bool pickle_arguments_allowed(pickle_vm *vm, unsigned known, fsdp_node args, fsdp_node *culprit_out)
{
    call_check check = {.vm = vm, .args = args};
    bool is_allowed = allowed(&check, known);
    *culprit_out = check.culprit;
    return is_allowed;
}

bool pickle_objects_allowed(pickle_vm *vm, fsdp_node args, fsdp_node *culprit_out)
{
    call_check check = {.vm = vm, .args = args};
    *culprit_out = 0;
    for (size_t i = 0; i < argument_count(&check); i++) {
        fsdp_node given = argument(&check, i);
        const fsdp_pickle_node *at = node_at(&check, given);
        if (at->kind != FSDP_NODE_CALL || state_is_harmless(&check, at->as.call->state, 0))
            continue;
        *culprit_out = given;
        return false;
    }
    return true;
}
