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

#include <string.h>

/* --- calls -------------------------------------------------------------------------------------- */

static fsdp_status refuse_call(pickle_vm *vm, fsdp_node callable)
{
    fsdp_pickle pickle = {.nodes = vm->nodes, .count = vm->node_count};
    char name[300];
    char *spelled = fsdp_pickle_global_name(&pickle, callable);
    if (!spelled)
        return pickle_no_memory(vm);
    fsdp_status st = fsdp_fail(
        vm->err, FSDP_ERR_REFUSED,
        "%s: pickle, byte %lld: it calls %s, which a checkpoint has no need of: nothing was run",
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

static const fsdp_pickle_node *node_at(const pickle_vm *vm, fsdp_node node)
{
    return &vm->nodes[node];
}

static fsdp_node item_of(const pickle_vm *vm, fsdp_node tuple, size_t number)
{
    const fsdp_pickle_node *node = node_at(vm, tuple);
    return node->kind == FSDP_NODE_TUPLE && number < node->count ? node->as.items[number] : 0;
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
                  "else: nothing was run",
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
    if (is_text(vm, name, "__new__") && pickle_is_unknown_class(of) && !vm->options->is_metadata)
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
        return pickle_fail(vm, FSDP_ERR_REFUSED, "a state is given to what has none");
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
    /* Python fails on data, so that bytes in an object with such a state are no pickle */
    bool is_data =
        vm->options->depth > 0 && node->kind != FSDP_NODE_GLOBAL && node->kind != FSDP_NODE_CALL;
    if (node->kind != FSDP_NODE_CALL || !pickle_takes_state(node))
        return pickle_fail(vm, is_data ? FSDP_ERR_DAMAGED : FSDP_ERR_REFUSED,
                           "a state is given to what has none");
    if (node->as.call->state != 0)
        return pickle_fail(vm, FSDP_ERR_REFUSED, "an object is given two states");
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
    return pickle_is_in_metadata(known) || (pickle_is_dcp(known) && how != PICKLE_REDUCE);
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
    if (pickle_is_callable(node.known))
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
        return pickle_fail(vm, FSDP_ERR_DAMAGED, "the arguments of a call are no tuple");
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
