/*
 * Objects of classes that the policy does not list. Python runs the code of such a class when it
 * loads the object, so that readers may list the object, and writers name it as code.
 *
 * The arguments, the state and the items of such an object are checked at every depth: the class
 * may call a function that it gets, and may load bytes that are a pickle themselves. A nested
 * pickle is parsed under the same policy.
 */
#include "base/text.h"
#include "formats/pickle/pickle_vm.h"

#include <stdio.h>
#include <string.h>

enum { NESTED_MOST = 4 }; /* pickles in pickles */

/* --- which nodes are code ----------------------------------------------------------------------- */

/* True for a word of a list whose words stand between spaces. */
static bool is_listed(const char *list, const char *word, size_t size)
{
    for (const char *at = list; size > 0 && (at = strchr(at, ' ')) != NULL && at[1]; at++)
        if (strncmp(at + 1, word, size) == 0 && at[1 + size] == ' ')
            return true;
    return false;
}

/* True for a global of a listed package of PyTorch's: sharded tensors and their layouts, whose states
 * are plain attributes. */
static bool is_layout(const fsdp_pickle_global *global)
{
    static const char *const modules[] = {
        "torch.distributed.tensor",       "torch.distributed._tensor",
        "torch.distributed._shard",       "torch.distributed.device_mesh",
        "torch.distributed._mesh_layout", "torch.distributed.remote_device",
        "torch.distributed.fsdp"};
    for (size_t i = 0; i < sizeof modules / sizeof *modules; i++) {
        size_t size = strlen(modules[i]);
        if (strncmp(global->module, modules[i], size) == 0 &&
            (global->module[size] == '.' || global->module[size] == '\0'))
            return true;
    }
    return false;
}

static bool is_builtin(const fsdp_pickle_global *global)
{
    return strcmp(global->module, "builtins") == 0 || strcmp(global->module, "__builtin__") == 0;
}

/* A name that is looked up when the pickle is loaded; that imports its module. */
static bool names_code(const fsdp_pickle_node *node)
{
    if (node->known == FSDP_KNOWN_FOREIGN)
        return true;
    const char *module = node->as.global->module;
    bool is_numpy = strcmp(module, "numpy") == 0 || strcmp(module, "numpy.dtypes") == 0;
    return node->known == FSDP_KNOWN_STANDARD && !is_builtin(node->as.global) && !is_numpy;
}

bool fsdp_pickle_is_code(const fsdp_pickle *pickle, fsdp_node node)
{
    const fsdp_pickle_node *at = fsdp_pickle_at(pickle, node);
    if (at->kind == FSDP_NODE_GLOBAL)
        return names_code(at);
    if (at->kind != FSDP_NODE_CALL || !(at->flags & FSDP_NODE_OPAQUE))
        return false;
    const fsdp_pickle_node *callable = fsdp_pickle_at(pickle, at->as.call->callable);
    bool is_nested_class = callable->kind == FSDP_NODE_CALL; /* of ShardedTensor */
    return !is_nested_class && !pickle_is_dcp(at->known) && !is_layout(callable->as.global);
}

/* --- what an object may hold -------------------------------------------------------------------- */

typedef struct object_check {
    const fsdp_pickle_options *options;
    const fsdp_pickle *pickle;
    bool *was_seen; /* per node */
    fsdp_node *stack;
    size_t height, room;
    fsdp_error *err;
} object_check;

static fsdp_status no_memory(const object_check *check)
{
    return fsdp_fail(check->err, FSDP_ERR_LIMIT, "%s: cannot allocate memory for a pickle",
                     check->options->where);
}

/* torch.load, torch.hub.load, torch.storage._load_from_bytes, numpy.load: they load pickles. */
static bool loads_files(const fsdp_pickle_node *node)
{
    const fsdp_pickle_global *global = node->as.global;
    const char *name = global->name + strspn(global->name, "_");
    return strncmp(name, "load", 4) == 0 &&
           (pickle_is_torch(node->known) || strncmp(global->module, "numpy", 5) == 0);
}

/* A function that runs what it is given. */
static bool runs_arguments(const fsdp_pickle_node *node)
{
    static const char packages[] =
        " _pickle cPickle code codeop commands ctypes importlib marshal nt os pickle popen2 posix "
        "pty runpy shelve shutil subprocess sys timeit webbrowser ";
    static const char builtins[] =
        " __import__ apply breakpoint compile delattr eval exec execfile file getattr input open "
        "raw_input setattr ";
    const fsdp_pickle_global *global = node->as.global;
    if (node->known == FSDP_KNOWN_GETATTR || loads_files(node))
        return true;
    if (node->known != FSDP_KNOWN_STANDARD)
        return false;
    if (is_builtin(global))
        return is_listed(builtins, global->name, global->name_size);
    return pickle_leads_to_python(global) ||
           is_listed(packages, global->module, strcspn(global->module, "."));
}

static fsdp_status refuse(const object_check *check, fsdp_node node)
{
    char *name = fsdp_pickle_global_name(check->pickle, node), shown[300];
    if (!name)
        return no_memory(check);
    fsdp_status st = fsdp_fail(
        check->err, FSDP_ERR_REFUSED,
        "%s: pickle: an object gets %s, which a checkpoint does not need; nothing was run",
        check->options->where, fsdp_printable(name, strlen(name), shown, sizeof shown));
    fsdp_free(name);
    return st;
}

static fsdp_status parse_nested(const object_check *check, const char *data, size_t size)
{
    char where[400];
    fsdp_pickle nested;
    fsdp_error found = {0};
    snprintf(where, sizeof where, "%s: bytes in an object", check->options->where);
    fsdp_pickle_options options = {.where = where, .depth = check->options->depth + 1};
    fsdp_status st = fsdp_pickle_parse(&options, data, size, &nested, NULL, &found);
    fsdp_pickle_release(&nested);
    if (st != FSDP_ERR_REFUSED && st != FSDP_ERR_LIMIT)
        return FSDP_OK; /* a pickle without calls that are refused, or other bytes */
    if (check->err)
        *check->err = found;
    return st;
}

/* The bytes of a text whose characters are bytes (latin1), as protocol 2 stores them. */
static size_t decode_latin1(const char *text, size_t size, char *out)
{
    size_t count = 0;
    for (size_t i = 0; i < size; i++) {
        uint8_t byte = (uint8_t)text[i];
        if (byte >= 0xc4)
            return 0;
        out[count++] = (char)(byte < 0x80 ? byte : (byte & 3) << 6 | ((uint8_t)text[++i] & 0x3f));
    }
    return count;
}

/* A pickle that calls ends with '.', and its globals have lines or the opcode STACK_GLOBAL. */
static fsdp_status check_bytes(const object_check *check, const fsdp_pickle_node *at)
{
    enum { STACK_GLOBAL = 0x93 };
    const char *data = at->as.text;
    size_t size = at->count;
    if (size == 0 || !memchr(data, '.', size) ||
        (!memchr(data, '\n', size) && !memchr(data, STACK_GLOBAL, size)))
        return FSDP_OK;
    FSDP_TRY(parse_nested(check, data, size));
    if (at->kind != FSDP_NODE_STR)
        return FSDP_OK;
    char *decoded = fsdp_alloc(size, 1);
    if (!decoded)
        return no_memory(check);
    size_t count = decode_latin1(data, size, decoded);
    fsdp_status st = count == 0 || count == size ? FSDP_OK : parse_nested(check, decoded, count);
    fsdp_free(decoded);
    return st;
}

static fsdp_status put(object_check *check, fsdp_node node)
{
    if (check->was_seen[node])
        return FSDP_OK;
    if (!fsdp_grow(&check->stack, &check->room, check->height + 1, sizeof *check->stack))
        return no_memory(check);
    check->was_seen[node] = true;
    check->stack[check->height++] = node;
    return FSDP_OK;
}

static fsdp_status put_call(object_check *check, const fsdp_pickle_call *call)
{
    FSDP_TRY(put(check, call->args));
    FSDP_TRY(put(check, call->state));
    return put(check, call->more);
}

static fsdp_status check_node(object_check *check, fsdp_node node)
{
    const fsdp_pickle_node *at = fsdp_pickle_at(check->pickle, node);
    switch (at->kind) {
    case FSDP_NODE_GLOBAL: return runs_arguments(at) ? refuse(check, node) : FSDP_OK;
    case FSDP_NODE_STR:
    case FSDP_NODE_BYTES:
    case FSDP_NODE_BYTEARRAY: return check_bytes(check, at);
    case FSDP_NODE_TUPLE:
    case FSDP_NODE_LIST:
    case FSDP_NODE_SET:
    case FSDP_NODE_FROZENSET:
    case FSDP_NODE_DICT:
        for (uint32_t i = 0; i < at->count; i++)
            FSDP_TRY(put(check, at->as.items[i]));
        return FSDP_OK;
    case FSDP_NODE_CALL: return put_call(check, at->as.call);
    default: return FSDP_OK;
    }
}

static fsdp_status check_objects(object_check *check)
{
    const fsdp_pickle *pickle = check->pickle;
    for (size_t i = 0; i < pickle->count; i++) {
        const fsdp_pickle_node *at = &pickle->nodes[i];
        if (at->kind != FSDP_NODE_CALL || !(at->flags & FSDP_NODE_OPAQUE))
            continue;
        if (!check->was_seen)
            check->was_seen = fsdp_alloc(pickle->count, sizeof *check->was_seen);
        if (!check->was_seen)
            return no_memory(check);
        FSDP_TRY(put_call(check, at->as.call));
        while (check->height > 0)
            FSDP_TRY(check_node(check, check->stack[--check->height]));
    }
    return FSDP_OK;
}

fsdp_status fsdp_pickle_parse(const fsdp_pickle_options *options, const void *data, size_t size,
                              fsdp_pickle *pickle_out, size_t *used_out, fsdp_error *err)
{
    *pickle_out = (fsdp_pickle){0};
    if (options->depth > NESTED_MOST)
        return fsdp_fail(err, FSDP_ERR_REFUSED, "%s: over %d pickles are nested; nothing was run",
                         options->where, NESTED_MOST);
    FSDP_TRY(pickle_parse(options, data, size, pickle_out, used_out, err));
    if (options->is_metadata) /* its few classes are those of DCP */
        return FSDP_OK;
    object_check check = {.options = options, .pickle = pickle_out, .err = err};
    fsdp_status st = check_objects(&check);
    fsdp_free(check.was_seen);
    fsdp_free(check.stack);
    if (st != FSDP_OK)
        fsdp_pickle_release(pickle_out);
    return st;
}
