/*
 * The policy: the calls that a pickle of a checkpoint may contain. No call is executed here; a
 * call that is not allowed refuses the file, because Python would execute it.
 *
 *   1. listed functions and classes have a meaning, and readers evaluate them;
 *   2. classes of packages other than Python, numpy and torch, and objects (NEWOBJ) of any
 *      class of torch, become opaque nodes;
 *   3. two harmless shapes that Python writes are accepted: getattr(ShardedTensor,
 *      "ProcessGroupState"), and functools.partial(getattr(C, "__new__"), C, ...)() with C as in 2;
 *   4. getattr(ZeroStageEnum, NAME) of DeepSpeed becomes ZeroStageEnum(NUMBER): Python 3.11.0 to 3.11.3
 *      pickle a member of an enum by its name;
 *   5. any other call refuses the file.
 */
#include "formats/pickle/pickle_vm.h"
#include "base/text.h"
#include <fsdp/box.h>

#include <string.h>

/* === containers that are made of their items ================================================== */

/*
 * Containers that are made of their items: OrderedDict([(key, value), ...]), as Python 2 wrote it,
 * defaultdict(list, {...}), deque([...], 5). The items that the call is given become items of the
 * container, as if SETITEMS or APPENDS had added them, so that readers find them in one
 * place.
 */

static const fsdp_pickle_node *node_at(const pickle_vm *vm, fsdp_node node)
{
    return &vm->nodes[node];
}

static fsdp_node item_of(const pickle_vm *vm, fsdp_node tuple, size_t number)
{
    const fsdp_pickle_node *node = node_at(vm, tuple);
    return node->kind == FSDP_NODE_TUPLE && number < node->count ? node->as.items[number] : 0;
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
                "the argument of an OrderedDict or defaultdict is not a list of (key, value)");
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

/* Pushes the call of such a class, whose arguments were checked; the items it is given become its own. */
static fsdp_status pickle_push_container(pickle_vm *vm, fsdp_pickle_node node, fsdp_node callable,
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

/* True for OrderedDict, defaultdict, Counter and deque. */
static bool pickle_is_container(unsigned known)
{
    return makes_dict(known) || known == FSDP_KNOWN_DEQUE;
}

/* === arguments of calls ======================================================================= */

/*
 * The arguments that listed calls may have. The calls are harmless with arguments that Python
 * itself writes, but some of them call their argument: a function, the constructor of a class,
 * or a method of an object, which the file may have replaced by an attribute of that name.
 *
 *   functions and classes   only where the call expects one, and only harmless ones
 *   objects                 only of kinds whose attributes the file cannot set
 *   tensors                 results of rebuild functions, with attributes that replace no method
 */

enum { ATTRIBUTES_MOST = 4096, NESTED_MOST = 256, STATE_DEPTH = 3, ITEMS_MOST = 1 << 22 };

typedef struct call_check {
    pickle_vm *vm;
    fsdp_node args;
    fsdp_node culprit; /* the refused argument */
} call_check;

static fsdp_node argument(const call_check *check, size_t number)
{
    return item_of(check->vm, check->args, number);
}

static size_t argument_count(const call_check *check)
{
    return node_at(check->vm, check->args)->count;
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
    const fsdp_pickle_node *at = node_at(check->vm, node);
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
        if (is_method(node_at(check->vm, pairs->as.items[i]),
                      node_at(check->vm, pairs->as.items[i + 1])))
            return false;
    return true;
}

/* A state whose members become attributes: a dict, or a dict and a dict of slots. The class's
 * __setstate__ takes any other state. */
static bool state_is_harmless(const call_check *check, fsdp_node state, int depth)
{
    const fsdp_pickle_node *at = node_at(check->vm, state);
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
               pairs_hide_no_method(check, node_at(check->vm, items));
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

/* Bounds the items that calls copy: a small pickle may give one long list to many calls. */
static bool may_be_copied(call_check *check, fsdp_node items)
{
    const fsdp_pickle_node *at = node_at(check->vm, items);
    fsdp_pickle pickle = {.nodes = check->vm->nodes, .count = check->vm->node_count};
    if (at->kind == FSDP_NODE_CALL)
        at = node_at(check->vm, fsdp_pickle_dict_items(&pickle, at));
    if (is_sequence(at) || at->kind == FSDP_NODE_DICT)
        check->vm->items_copied += at->count;
    return verdict(check, check->vm->items_copied <= ITEMS_MOST, items);
}

/* A list that becomes a dict must be a list of pairs, because each item is iterated over. */
static bool is_list_of_pairs(call_check *check, fsdp_node list)
{
    const fsdp_pickle_node *at = node_at(check->vm, list);
    if (!may_be_copied(check, list))
        return false;
    for (uint32_t i = 0; is_sequence(at) && i < at->count; i++) {
        uint8_t kind = node_at(check->vm, at->as.items[i])->kind;
        if (kind != FSDP_NODE_TUPLE && kind != FSDP_NODE_LIST)
            return verdict(check, false, at->as.items[i]);
    }
    return true;
}

/* defaultdict calls the factory for every missing key. */
static bool factory_allowed(const call_check *check, fsdp_node factory)
{
    const fsdp_pickle_node *at = node_at(check->vm, factory);
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
        const fsdp_pickle_node *at = node_at(check->vm, part);
        bool is_zone = at->kind == FSDP_NODE_CALL && at->known == FSDP_KNOWN_FOREIGN;
        if (!is_zone && !is_data(check, part))
            return verdict(check, false, part);
    }
    return true;
}

/* True for a class whose objects may be made although the policy does not list it. */
static bool is_unknown_class(const fsdp_pickle_node *node)
{
    return node->kind == FSDP_NODE_GLOBAL &&
           (node->known == FSDP_KNOWN_FOREIGN ||
            (pickle_is_torch(node->known) && !(pickle_traits(node->known) & PICKLE_CALLED)));
}

/* (class, base, state): base makes the object from the state. */
static bool reconstruction_allowed(call_check *check)
{
    const fsdp_pickle_node *class_node = node_at(check->vm, argument(check, 0));
    const fsdp_pickle_node *base = node_at(check->vm, argument(check, 1));
    bool is_class = is_unknown_class(class_node) || is_builtin_class(class_node) ||
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
    const fsdp_pickle_node *at = node_at(check->vm, node);
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
    const fsdp_pickle_node *at = node_at(check->vm, sizes);
    if (at->kind == FSDP_NODE_CALL && at->known == FSDP_KNOWN_TORCH_SIZE)
        return true;
    if (at->kind != FSDP_NODE_TUPLE && at->kind != FSDP_NODE_LIST)
        return verdict(check, is_data(check, sizes), sizes);
    for (uint32_t i = 0; i < at->count && i <= FSDP_MAX_DIMS; i++) {
        uint8_t kind = node_at(check->vm, at->as.items[i])->kind;
        if (kind == FSDP_NODE_CALL || kind == FSDP_NODE_GLOBAL)
            return verdict(check, false, at->as.items[i]);
    }
    return true;
}

/* Arguments of the other rebuild functions: storages, tensors, dtypes and data. */
static bool is_part_of_tensor(const call_check *check, fsdp_node part)
{
    const fsdp_pickle_node *at = node_at(check->vm, part);
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
        const fsdp_pickle_node *at = node_at(check->vm, part);
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
        return verdict(check, is_unknown_class(node_at(check->vm, argument(check, 0))),
                       argument(check, 0)) &&
               are_parts_of_tensor(check, 1);
    case FSDP_KNOWN_DEVICE_TENSOR_NUMPY: return are_parts_of_tensor(check, 0);
    default: return are_parts_of_tensor(check, 0);
    }
}

/* (function, type, arguments, state): the function must itself rebuild a tensor. */
static bool from_type_allowed(call_check *check)
{
    const fsdp_pickle_node *function = node_at(check->vm, argument(check, 0));
    const fsdp_pickle_node *type = node_at(check->vm, argument(check, 1));
    fsdp_node inner = argument(check, 2), state = argument(check, 3);
    bool is_function = function->kind == FSDP_NODE_GLOBAL && is_rebuild(function->known);
    if (!verdict(check, is_function, argument(check, 0)) ||
        !verdict(check, is_unknown_class(type), argument(check, 1)) ||
        !verdict(check, node_at(check->vm, inner)->kind == FSDP_NODE_TUPLE, inner) ||
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
        return are_data(check, is_numpy(node_at(check->vm, argument(check, 0))) ? 1 : 0);
    case FSDP_KNOWN_NUMPY_RECONSTRUCT: {
        const fsdp_pickle_node *type = node_at(check->vm, argument(check, 0));
        bool is_array = is_numpy(type) || is_unknown_class(type);
        return verdict(check, is_array, argument(check, 0)) && are_data(check, 1);
    }
    default: return is_rebuild(known) ? rebuild_allowed(check, known) : are_data(check, 0);
    }
}

/* True when the listed call may have these arguments; otherwise *culprit_out is the refused one. */
static bool pickle_arguments_allowed(pickle_vm *vm, unsigned known, fsdp_node args,
                                     fsdp_node *culprit_out)
{
    call_check check = {.vm = vm, .args = args};
    bool is_allowed = allowed(&check, known);
    *culprit_out = check.culprit;
    return is_allowed;
}

/* Like pickle_arguments_allowed, for a class that the policy does not list. */
static bool pickle_objects_allowed(pickle_vm *vm, fsdp_node args, fsdp_node *culprit_out)
{
    call_check check = {.vm = vm, .args = args};
    *culprit_out = 0;
    for (size_t i = 0; i < argument_count(&check); i++) {
        fsdp_node given = argument(&check, i);
        const fsdp_pickle_node *at = node_at(vm, given);
        if (at->kind != FSDP_NODE_CALL || state_is_harmless(&check, at->as.call->state, 0))
            continue;
        *culprit_out = given;
        return false;
    }
    return true;
}

/* === the policy =============================================================================== */

static fsdp_status refuse_call(pickle_vm *vm, fsdp_node callable)
{
    fsdp_pickle pickle = {.nodes = vm->nodes, .count = vm->node_count};
    char name[300];
    char *spelled = fsdp_pickle_global_name(&pickle, callable);
    if (!spelled)
        return pickle_no_memory(vm);
    fsdp_status st = fsdp_fail(
        vm->err, FSDP_ERR_REFUSED,
        "%s: pickle, byte %lld: it calls %s, which a checkpoint does not need; nothing was run",
        vm->options->where, (long long)(vm->options->offset + (vm->opcode - vm->data)),
        fsdp_printable(spelled, strlen(spelled), name, sizeof name));
    fsdp_free(spelled);
    return st;
}

static fsdp_status push_pending(pickle_vm *vm, fsdp_known known, fsdp_node callable, fsdp_node args)
{
    if (!fsdp_grow(&vm->pending, &vm->pending_capacity, vm->pending_count + 1, sizeof *vm->pending))
        return pickle_no_memory(vm);
    fsdp_pickle_node node = {.known = (uint16_t)known, .flags = FSDP_NODE_PENDING};
    FSDP_TRY(pickle_push_call(vm, node, callable, args, 0));
    vm->pending[vm->pending_count++] = vm->stack[vm->height - 1];
    return FSDP_OK;
}

/* Refuses an argument that the call would execute, or could. */
static fsdp_status refuse_argument(pickle_vm *vm, fsdp_node callable, fsdp_node culprit)
{
    const fsdp_pickle_node *given = node_at(vm, culprit);
    if (given->kind == FSDP_NODE_GLOBAL)
        return refuse_call(vm, culprit);
    fsdp_pickle pickle = {.nodes = vm->nodes, .count = vm->node_count};
    char name[300];
    char *spelled = fsdp_pickle_global_name(&pickle, callable);
    if (!spelled)
        return pickle_no_memory(vm);
    fsdp_status st =
        fsdp_fail(vm->err, FSDP_ERR_REFUSED,
                  "%s: pickle, byte %lld: %s has an argument that could make it call something "
                  "else; nothing was run",
                  vm->options->where, (long long)(vm->options->offset + (vm->opcode - vm->data)),
                  fsdp_printable(spelled, strlen(spelled), name, sizeof name));
    fsdp_free(spelled);
    return st;
}

static bool is_text(const pickle_vm *vm, fsdp_node node, const char *text)
{
    fsdp_pickle pickle = {.nodes = vm->nodes, .count = vm->node_count};
    return fsdp_pickle_is_text(&pickle, node, text);
}

/* A member of an enum that PyTorch stores in metadata, not a method of its class: capitals and '_'. */
static bool is_enum_member(const fsdp_pickle_node *of, const fsdp_pickle_node *name)
{
    bool is_enum = of->known == FSDP_KNOWN_MEMORY_FORMAT || of->known == FSDP_KNOWN_PLAN_ITEM;
    if (!is_enum || name->kind != FSDP_NODE_STR || name->count == 0 || name->as.text[0] == '_')
        return false;
    for (size_t i = 0; i < name->count; i++)
        if (name->as.text[i] != '_' && (name->as.text[i] < 'A' || name->as.text[i] > 'Z'))
            return false;
    return true;
}

/* Pushes ZeroStageEnum(number) for the name of a member; *is_member_out false: it is none. */
static fsdp_status push_zero_stage(pickle_vm *vm, fsdp_node of, fsdp_node name, bool *is_member_out)
{
    static const char *const members[] = {"disabled", "optimizer_states", "gradients", "weights"};
    const fsdp_pickle_node *class_node = node_at(vm, of);
    size_t number = 0, count = sizeof members / sizeof *members, from = vm->height;
    *is_member_out = class_node->known == FSDP_KNOWN_FOREIGN &&
                     strcmp(class_node->as.global->module, "deepspeed.runtime.zero.config") == 0 &&
                     strcmp(class_node->as.global->name, "ZeroStageEnum") == 0;
    while (number < count && !is_text(vm, name, members[number]))
        number++;
    *is_member_out &= number < count;
    if (!*is_member_out)
        return FSDP_OK;
    FSDP_TRY(pickle_push_int(vm, (int64_t)number));
    FSDP_TRY(pickle_push_items(vm, FSDP_NODE_TUPLE, from));
    fsdp_node args = vm->stack[--vm->height];
    const fsdp_pickle_node node = {.known = FSDP_KNOWN_FOREIGN, .flags = FSDP_NODE_OPAQUE};
    return pickle_push_call(vm, node, of, args, 0);
}

/* Accepts getattr where the result is known to be a plain name. */
static fsdp_status call_getattr(pickle_vm *vm, fsdp_node callable, fsdp_node args)
{
    const fsdp_pickle_node *of = node_at(vm, item_of(vm, args, 0));
    fsdp_node name = item_of(vm, args, 1);
    if (node_at(vm, args)->count != 2 || of->kind != FSDP_NODE_GLOBAL)
        return refuse_call(vm, callable);
    fsdp_pickle_node node = {.known = of->known};
    if (is_enum_member(of, node_at(vm, name)))
        return pickle_push_call(vm, node, item_of(vm, args, 0), NODE_OF_EMPTY_TUPLE, 0);
    bool is_member = false;
    if (!vm->options->is_metadata)
        FSDP_TRY(push_zero_stage(vm, item_of(vm, args, 0), name, &is_member));
    if (is_member)
        return FSDP_OK;
    of = node_at(vm, item_of(vm, args, 0)); /* a push moves nodes */
    node.known = FSDP_KNOWN_GETATTR;
    if (of->known == FSDP_KNOWN_SHARDED_TENSOR && is_text(vm, name, "ProcessGroupState") &&
        !vm->options->is_metadata)
        return pickle_push_call(vm, node, callable, args, 0);
    if (is_text(vm, name, "__new__") && is_unknown_class(of) && !vm->options->is_metadata)
        return push_pending(vm, FSDP_KNOWN_GETATTR, callable, args);
    return refuse_call(vm, callable);
}

/* functools.partial(getattr(C, "__new__"), ...), whose arguments BUILD adds. */
static fsdp_status call_partial(pickle_vm *vm, fsdp_node callable, fsdp_node args)
{
    fsdp_node made = item_of(vm, args, 0);
    fsdp_pickle_node *half = &vm->nodes[made];
    if (half->kind != FSDP_NODE_CALL || half->known != FSDP_KNOWN_GETATTR ||
        !is_text(vm, item_of(vm, half->as.call->args, 1), "__new__") ||
        node_at(vm, args)->count != 1)
        return refuse_call(vm, callable);
    half->flags &= (uint8_t)~FSDP_NODE_PENDING;
    return push_pending(vm, FSDP_KNOWN_PARTIAL, callable, args);
}

static fsdp_status complete_shape(pickle_vm *vm, fsdp_node target, fsdp_node state)
{
    const fsdp_pickle_node *partial = node_at(vm, target);
    if (partial->known != FSDP_KNOWN_PARTIAL)
        return pickle_fail(vm, FSDP_ERR_REFUSED,
                           "an object that does not take a state receives one");
    fsdp_node made = item_of(vm, partial->as.call->args, 0), args = item_of(vm, state, 1);
    fsdp_node of = item_of(vm, node_at(vm, made)->as.call->args, 0);
    const fsdp_pickle_node *first = node_at(vm, item_of(vm, args, 0)),
                           *class_node = node_at(vm, of);
    fsdp_node_kind kwargs = node_at(vm, item_of(vm, state, 2))->kind;
    bool is_same = first->kind == FSDP_NODE_GLOBAL && first->known == class_node->known &&
                   strcmp(first->as.global->module, class_node->as.global->module) == 0 &&
                   strcmp(first->as.global->name, class_node->as.global->name) == 0;
    if (item_of(vm, state, 0) != made || !is_same || node_at(vm, state)->count != 4 ||
        (kwargs != FSDP_NODE_DICT && kwargs != FSDP_NODE_NONE))
        return pickle_fail(vm, FSDP_ERR_REFUSED,
                           "functools.partial is used for more than making an object");
    return FSDP_OK;
}

fsdp_status pickle_build(pickle_vm *vm, fsdp_node target, fsdp_node state)
{
    fsdp_pickle_node *node = &vm->nodes[target];
    /* Python fails on data, so that bytes in an object with such a state are not a pickle */
    bool is_data =
        vm->options->depth > 0 && node->kind != FSDP_NODE_GLOBAL && node->kind != FSDP_NODE_CALL;
    bool takes_state =
        node->kind == FSDP_NODE_CALL &&
        (node->flags & FSDP_NODE_OPAQUE || pickle_traits(node->known) & PICKLE_TAKES_STATE);
    if (!takes_state)
        return pickle_fail(vm, is_data ? FSDP_ERR_DAMAGED : FSDP_ERR_REFUSED,
                           "an object that does not take a state receives one");
    if (node->as.call->state != 0)
        return pickle_fail(vm, FSDP_ERR_REFUSED, "an object receives two states");
    node->as.call->state = state;
    return node->flags & FSDP_NODE_PENDING ? complete_shape(vm, target, state) : FSDP_OK;
}

/* The complete shape: an object of class C with the arguments of partial. */
static fsdp_status call_shape(pickle_vm *vm, fsdp_node callable, fsdp_node args)
{
    fsdp_pickle_node *partial = &vm->nodes[callable];
    fsdp_node state = partial->as.call->state;
    if (state == 0 || node_at(vm, args)->count != 0)
        return refuse_call(vm, callable);
    partial->flags &= (uint8_t)~FSDP_NODE_PENDING;
    fsdp_node all = item_of(vm, state, 1), kwargs = item_of(vm, state, 2);
    size_t from = vm->height, count = node_at(vm, all)->count;
    for (size_t i = 1; i < count; i++)
        FSDP_TRY(pickle_push(vm, item_of(vm, all, i)));
    FSDP_TRY(pickle_push_items(vm, FSDP_NODE_TUPLE, from));
    fsdp_node rest = vm->stack[--vm->height], of = item_of(vm, all, 0);
    fsdp_node culprit;
    if (!pickle_objects_allowed(vm, rest, &culprit))
        return refuse_argument(vm, of, culprit);
    if (node_at(vm, kwargs)->kind != FSDP_NODE_DICT)
        kwargs = 0;
    fsdp_pickle_node node = {.known = node_at(vm, of)->known,
                             .flags = FSDP_NODE_OPAQUE | FSDP_NODE_OBJECT};
    return pickle_push_call(vm, node, of, rest, kwargs);
}

fsdp_status pickle_check_pending(pickle_vm *vm)
{
    for (size_t i = 0; i < vm->pending_count; i++)
        if (node_at(vm, vm->pending[i])->flags & FSDP_NODE_PENDING)
            return refuse_call(vm, node_at(vm, vm->pending[i])->as.call->callable);
    return FSDP_OK;
}

static bool metadata_needs(pickle_how how, unsigned known)
{
    return pickle_traits(known) & PICKLE_IN_METADATA ||
           (pickle_is_dcp(known) && how != PICKLE_REDUCE);
}

static bool opaque_allowed(const pickle_vm *vm, pickle_how how, unsigned known)
{
    bool is_object = how != PICKLE_REDUCE;
    if (vm->options->is_metadata)
        return is_object || known == FSDP_KNOWN_DCP_ENUM;
    return known == FSDP_KNOWN_FOREIGN || (pickle_is_torch(known) && is_object);
}

/*
 * A shortcut for the calls that make up most of large metadata. An object of a DCP class without
 * arguments has nothing that could be refused. A size with the same tuple as an earlier,
 * accepted one is the same size, because neither can change.
 */
static bool is_plain_object(const pickle_vm *vm, pickle_how how, const fsdp_pickle_node *callable,
                            fsdp_node args)
{
    return how == PICKLE_NEWOBJ && args == NODE_OF_EMPTY_TUPLE && vm->options->is_metadata &&
           callable->kind == FSDP_NODE_GLOBAL && pickle_is_dcp(callable->known);
}

static bool is_known_size(pickle_vm *vm, fsdp_node callable, fsdp_node args, fsdp_node *size_out)
{
    *size_out = *pickle_shared(vm, callable, args);
    const fsdp_pickle_node *size = node_at(vm, *size_out);
    return size->kind == FSDP_NODE_CALL && size->as.call->callable == callable &&
           size->as.call->args == args;
}

static fsdp_status push_size(pickle_vm *vm, fsdp_pickle_node node, fsdp_node callable,
                             fsdp_node args)
{
    FSDP_TRY(pickle_push_call(vm, node, callable, args, 0));
    if (node_at(vm, args)->count == 1 && node_at(vm, item_of(vm, args, 0))->kind == FSDP_NODE_TUPLE)
        *pickle_shared(vm, callable, args) = vm->stack[vm->height - 1];
    return FSDP_OK;
}

static fsdp_status call_listed(pickle_vm *vm, fsdp_pickle_node node, fsdp_node callable,
                               fsdp_node args, fsdp_node kwargs)
{
    fsdp_node culprit;
    if (kwargs != 0 && node_at(vm, kwargs)->count > 0)
        return refuse_call(vm, callable);
    if (!pickle_arguments_allowed(vm, node.known, args, &culprit))
        return refuse_argument(vm, callable, culprit);
    if (node.known == FSDP_KNOWN_TORCH_SIZE && node.flags == 0)
        return push_size(vm, node, callable, args);
    if (pickle_is_container(node.known) && node.flags == 0)
        return pickle_push_container(vm, node, callable, args);
    if (node.known == FSDP_KNOWN_RECONSTRUCTOR)
        node.flags |= FSDP_NODE_OPAQUE;
    return pickle_push_call(vm, node, callable, args, kwargs);
}

static fsdp_status call_global(pickle_vm *vm, pickle_how how, fsdp_node callable, fsdp_node args,
                               fsdp_node kwargs)
{
    fsdp_node culprit;
    fsdp_pickle_node node = {.known = node_at(vm, callable)->known};
    if (how != PICKLE_REDUCE)
        node.flags = FSDP_NODE_OBJECT;
    if (vm->options->is_metadata && !metadata_needs(how, node.known))
        return refuse_call(vm, callable);
    if (pickle_traits(node.known) & PICKLE_CALLED)
        return call_listed(vm, node, callable, args, kwargs);
    if (node.known == FSDP_KNOWN_GETATTR && how == PICKLE_REDUCE)
        return call_getattr(vm, callable, args);
    if (node.known == FSDP_KNOWN_PARTIAL && how == PICKLE_REDUCE)
        return call_partial(vm, callable, args);
    if (!opaque_allowed(vm, how, node.known))
        return refuse_call(vm, callable);
    if (pickle_is_torch(node.known) && !pickle_objects_allowed(vm, args, &culprit))
        return refuse_argument(vm, callable, culprit);
    node.flags |= FSDP_NODE_OPAQUE;
    return pickle_push_call(vm, node, callable, args, kwargs);
}

fsdp_status pickle_call(pickle_vm *vm, pickle_how how, fsdp_node callable, fsdp_node args,
                        fsdp_node kwargs)
{
    const fsdp_pickle_node *node = node_at(vm, callable);
    fsdp_node size;
    if (is_plain_object(vm, how, node, args))
        return pickle_push_call(
            vm,
            (fsdp_pickle_node){.known = node->known, .flags = FSDP_NODE_OBJECT | FSDP_NODE_OPAQUE},
            callable, args, 0);
    if (how == PICKLE_REDUCE && is_known_size(vm, callable, args, &size))
        return pickle_push(vm, size);
    if (node_at(vm, args)->kind != FSDP_NODE_TUPLE ||
        (kwargs != 0 && node_at(vm, kwargs)->kind != FSDP_NODE_DICT))
        return pickle_fail(vm, FSDP_ERR_DAMAGED, "the arguments of a call are not a tuple");
    if (node->kind == FSDP_NODE_GLOBAL)
        return call_global(vm, how, callable, args, kwargs);
    if (node->kind == FSDP_NODE_CALL && node->known == FSDP_KNOWN_PARTIAL && how == PICKLE_REDUCE)
        return call_shape(vm, callable, args);
    bool is_nested_class = node->kind == FSDP_NODE_CALL && node->known == FSDP_KNOWN_GETATTR &&
                           !is_text(vm, item_of(vm, node->as.call->args, 1), "__new__");
    if (is_nested_class && how != PICKLE_REDUCE) {
        fsdp_pickle_node made = {.known = FSDP_KNOWN_TORCH,
                                 .flags = FSDP_NODE_OPAQUE | FSDP_NODE_OBJECT};
        return pickle_push_call(vm, made, callable, args, kwargs);
    }
    return refuse_call(vm, callable);
}
