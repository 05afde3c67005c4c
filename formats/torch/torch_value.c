/* Converts nodes of a pickle that are not tensors to fsdp_values. See torch_internal.h. */
#include "formats/torch/torch_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static fsdp_status read_value(torch_archive *archive, fsdp_node node, int depth,
                              fsdp_value *value_out, fsdp_error *err);

/* --- walking ------------------------------------------------------------------------------------ */

static fsdp_status fail_work(const torch_archive *archive, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_LIMIT,
                     "%s: with shared containers expanded it holds over 10 million objects",
                     archive->where);
}

fsdp_status torch_count_work(torch_archive *archive, int64_t count, fsdp_error *err)
{
    archive->work += count;
    return archive->work > FSDP_PICKLE_WORK ? fail_work(archive, err) : FSDP_OK;
}

fsdp_status torch_enter(torch_archive *archive, fsdp_node node, int depth, bool *cycle_out,
                        fsdp_error *err)
{
    *cycle_out = false;
    if (!archive->marks) {
        archive->marks = fsdp_alloc(archive->pickle.count, 1);
        if (!archive->marks)
            return fsdp_fail_memory(err, "a walk through a pickle");
    }
    if (depth >= FSDP_PICKLE_DEPTH)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "%s: lists and dicts are nested more than %d deep",
                         archive->where, FSDP_PICKLE_DEPTH);
    FSDP_TRY(torch_count_work(archive, 1 + (int64_t)torch_node(archive, node)->count, err));
    *cycle_out = archive->marks[node] & TORCH_MARK_PATH;
    archive->marks[node] |= TORCH_MARK_PATH;
    archive->subject = node;
    return FSDP_OK;
}

void torch_leave(torch_archive *archive, fsdp_node node)
{
    archive->marks[node] &= (uint8_t)~TORCH_MARK_PATH;
}

static uint32_t size_of(torch_archive *archive, fsdp_node node, int depth);

static uint32_t size_of_items(torch_archive *archive, fsdp_node node, int depth)
{
    const fsdp_pickle_node *at = torch_node(archive, node);
    uint64_t size = 0;
    bool has_items =
        at->kind == FSDP_NODE_TUPLE || at->kind == FSDP_NODE_LIST || at->kind == FSDP_NODE_DICT;
    for (uint32_t i = 0; has_items && i < at->count && size <= FSDP_PICKLE_WORK; i++)
        size += size_of(archive, at->as.items[i], depth + 1);
    return size > FSDP_PICKLE_WORK ? FSDP_PICKLE_WORK + 1 : (uint32_t)size;
}

/* A tensor counts as one, an object with all its parts. A node inside itself counts once. */
static uint32_t size_of(torch_archive *archive, fsdp_node node, int depth)
{
    if (archive->sizes[node] != 0 || depth > FSDP_PICKLE_DEPTH)
        return archive->sizes[node] + (archive->sizes[node] == 0);
    archive->sizes[node] = 1;
    const fsdp_pickle_node *at = torch_node(archive, node);
    uint64_t size = 1 + (uint64_t)size_of_items(archive, node, depth);
    if (at->kind == FSDP_NODE_CALL && torch_tensor_kind(archive, node) == TORCH_KIND_NONE) {
        size += size_of(archive, at->as.call->args, depth + 1);
        size += size_of(archive, at->as.call->state, depth + 1);
        size += size_of(archive, at->as.call->more, depth + 1);
    }
    archive->sizes[node] = size > FSDP_PICKLE_WORK ? FSDP_PICKLE_WORK + 1 : (uint32_t)size;
    return archive->sizes[node];
}

fsdp_status torch_measure(torch_archive *archive, fsdp_node node, fsdp_error *err)
{
    if (!archive->sizes)
        archive->sizes = fsdp_alloc(archive->pickle.count, sizeof *archive->sizes);
    if (!archive->sizes)
        return fsdp_fail_memory(err, "a walk through a pickle");
    return size_of(archive, node, 0) <= FSDP_PICKLE_WORK ? FSDP_OK : fail_work(archive, err);
}

/* --- parts of objects --------------------------------------------------------------------------- */

bool torch_is_dict(const torch_archive *archive, fsdp_node node)
{
    const fsdp_pickle_node *at = torch_node(archive, node);
    return at->kind == FSDP_NODE_DICT ||
           (at->kind == FSDP_NODE_CALL &&
            (at->known == FSDP_KNOWN_ORDERED_DICT || at->known == FSDP_KNOWN_DEFAULTDICT ||
             at->known == FSDP_KNOWN_COUNTER));
}

fsdp_node torch_dict_items(const torch_archive *archive, fsdp_node node)
{
    const fsdp_pickle_node *at = torch_node(archive, node);
    return at->kind == FSDP_NODE_DICT ? node : fsdp_pickle_dict_items(&archive->pickle, at);
}

fsdp_node torch_state_attribute(const torch_archive *archive, fsdp_node state, const char *name)
{
    if (torch_node(archive, state)->kind == FSDP_NODE_DICT)
        return fsdp_pickle_lookup(&archive->pickle, state, name);
    for (size_t part = 0; part < 2; part++) { /* (attributes, slots) */
        fsdp_node found = fsdp_pickle_lookup(
            &archive->pickle, fsdp_pickle_element(&archive->pickle, state, part), name);
        if (found != 0)
            return found;
    }
    return 0;
}

fsdp_node torch_attribute(const torch_archive *archive, fsdp_node object, const char *name)
{
    const fsdp_pickle_node *at = torch_node(archive, object);
    return at->kind == FSDP_NODE_CALL ? torch_state_attribute(archive, at->as.call->state, name)
                                      : 0;
}

const char *torch_class_name(const torch_archive *archive, fsdp_node object)
{
    const fsdp_pickle_node *at = torch_node(archive, object);
    if (at->kind != FSDP_NODE_CALL)
        return "";
    const fsdp_pickle_node *class = torch_node(archive, at->as.call->callable);
    return class->kind == FSDP_NODE_GLOBAL ? class->as.global->name : "";
}

/* --- values without items ------------------------------------------------------------------------ */

static fsdp_status set_text(fsdp_value *value, fsdp_value_kind kind, const char *text,
                            fsdp_error *err)
{
    return fsdp_value_set_bytes(value, kind, text, strlen(text), err);
}

/* Sets the name: the class of an object, or the name of a function. */
static fsdp_status set_class(torch_archive *archive, fsdp_node node, fsdp_value *value,
                             fsdp_error *err)
{
    static const char *const names[] = {[FSDP_NODE_SET] = "builtins.set",
                                        [FSDP_NODE_FROZENSET] = "builtins.frozenset",
                                        [FSDP_NODE_STR] = "builtins.str",
                                        [FSDP_NODE_BIGINT] = "builtins.int"};
    const fsdp_pickle_node *at = torch_node(archive, node);
    if (at->kind < sizeof names / sizeof *names && names[at->kind])
        return set_text(value, FSDP_VALUE_CLASS, names[at->kind], err);
    if (torch_numpy_is_array(archive, node))
        return set_text(value, FSDP_VALUE_CLASS, "numpy.ndarray", err);
    if (at->kind == FSDP_NODE_PERSISTENT)
        node = fsdp_pickle_element(&archive->pickle, at->as.child, 1);
    char *text = fsdp_pickle_global_name(&archive->pickle, node);
    if (!text)
        return fsdp_fail_memory(err, "a value");
    fsdp_status st = set_text(value, FSDP_VALUE_CLASS, text, err);
    fsdp_free(text);
    return st;
}

/* Numbers between 2^63 and 2^64 have a kind of their own. */
static bool parse_u64(const char *text, uint64_t *number_out)
{
    char *end;
    errno = 0;
    *number_out = strtoull(text, &end, 10);
    return text[0] != '-' && *end == '\0' && errno == 0;
}

static fsdp_status set_bigint(torch_archive *archive, fsdp_node node, fsdp_value *value,
                              fsdp_error *err)
{
    char *text = fsdp_pickle_decimal(torch_node(archive, node));
    if (!text)
        return set_class(archive, node, value, err);
    fsdp_status st = FSDP_OK;
    if (!parse_u64(text, &value->as.u64))
        st = set_text(value, FSDP_VALUE_INTEGER, text, err);
    else
        value->kind = FSDP_VALUE_U64;
    fsdp_free(text);
    return st;
}

static double number_of(const torch_archive *archive, fsdp_node node)
{
    const fsdp_pickle_node *at = torch_node(archive, node);
    return at->kind == FSDP_NODE_FLOAT ? at->as.f64
           : at->kind == FSDP_NODE_INT ? (double)at->as.i64
                                       : 0;
}

static fsdp_status set_string(torch_archive *archive, fsdp_node node, fsdp_value *value,
                              fsdp_error *err)
{
    const fsdp_pickle_node *at = torch_node(archive, node);
    if (!fsdp_utf8_valid(at->as.text, at->count)) /* lone surrogates */
        return set_class(archive, node, value, err);
    return fsdp_value_set_bytes(value, FSDP_VALUE_STRING, at->as.text, at->count, err);
}

static fsdp_status set_bytes(torch_archive *archive, fsdp_node node, fsdp_value *value,
                             fsdp_error *err)
{
    const char *data;
    char *owned;
    size_t size;
    if (!torch_bytes(archive, node, &data, &size, &owned))
        return set_class(archive, node, value, err);
    fsdp_status st = fsdp_value_set_bytes(value, FSDP_VALUE_BYTES, data, size, err);
    fsdp_free(owned);
    return st;
}

static fsdp_status set_scalar(torch_archive *archive, fsdp_node node, fsdp_value *value,
                              fsdp_error *err)
{
    fsdp_value scalar = {0};
    if (!torch_numpy_scalar(archive, node, &scalar))
        return set_class(archive, node, value, err);
    *value = scalar;
    return FSDP_OK;
}

/* --- containers --------------------------------------------------------------------------------- */

static fsdp_status set_items(torch_archive *archive, fsdp_node node, int depth, fsdp_value *value,
                             fsdp_error *err)
{
    const fsdp_pickle_node *list = torch_node(archive, node);
    FSDP_TRY(fsdp_value_set_items(value, FSDP_VALUE_LIST, list->count, err));
    value->is_tuple = list->kind == FSDP_NODE_TUPLE;
    for (uint32_t i = 0; i < list->count; i++)
        FSDP_TRY(read_value(archive, list->as.items[i], depth + 1, &value->as.list.items[i], err));
    return FSDP_OK;
}

static fsdp_status set_dict(torch_archive *archive, fsdp_node node, int depth, fsdp_value *value,
                            fsdp_error *err)
{
    const fsdp_pickle_node *items = torch_node(archive, torch_dict_items(archive, node));
    FSDP_TRY(fsdp_value_set_items(value, FSDP_VALUE_DICT, items->count, err));
    for (uint32_t i = 0; i < items->count; i++)
        FSDP_TRY(read_value(archive, items->as.items[i], depth + 1, &value->as.list.items[i], err));
    return FSDP_OK;
}

static fsdp_status set_container(torch_archive *archive, fsdp_node node, int depth,
                                 fsdp_value *value, fsdp_error *err)
{
    bool is_cycle;
    FSDP_TRY(torch_enter(archive, node, depth, &is_cycle, err));
    if (is_cycle)
        return set_text(value, FSDP_VALUE_CLASS, "cycle", err);
    fsdp_status st = torch_is_dict(archive, node) ? set_dict(archive, node, depth, value, err)
                                                  : set_items(archive, node, depth, value, err);
    torch_leave(archive, node);
    return st;
}

/* The call that makes the tensor in a Parameter. */
static fsdp_node in_parameter(const torch_archive *archive, fsdp_node node)
{
    const fsdp_pickle_node *at = torch_node(archive, node);
    bool is_parameter =
        at->known == FSDP_KNOWN_PARAMETER || at->known == FSDP_KNOWN_PARAMETER_STATE;
    fsdp_node inner = is_parameter ? fsdp_pickle_argument(&archive->pickle, at, 0) : 0;
    return torch_tensor_kind(archive, inner) != TORCH_KIND_NONE ? inner : node;
}

static fsdp_status set_tensor(torch_archive *archive, fsdp_node node, fsdp_value *value,
                              fsdp_error *err)
{
    torch_tensor tensor;
    torch_wrapper wrapper;
    torch_kind kind;
    size_t number;
    FSDP_TRY(torch_tensor_read(archive, node, &kind, &tensor, &wrapper, err));
    if (tensor.data && !archive->memory) { /* there is no table for its data */
        torch_tensor_release(&tensor);
        kind = TORCH_KIND_OPAQUE;
    }
    if (kind != TORCH_KIND_TENSOR)
        return set_class(archive, wrapper.type != 0 ? wrapper.type : in_parameter(archive, node),
                         value, err);
    fsdp_status st = torch_tensor_add(archive, NULL, 0, &tensor, &number, err);
    torch_tensor_release(&tensor);
    if (st == FSDP_OK)
        *value = (fsdp_value){.kind = FSDP_VALUE_TENSOR, .as.tensor = number};
    return st;
}

static fsdp_status set_call(torch_archive *archive, fsdp_node node, int depth, fsdp_value *value,
                            fsdp_error *err)
{
    const fsdp_pickle_node *at = torch_node(archive, node);
    if (torch_tensor_kind(archive, node) != TORCH_KIND_NONE)
        return set_tensor(archive, node, value, err);
    switch (at->known) {
    case FSDP_KNOWN_BYTES:
    case FSDP_KNOWN_BYTEARRAY:
    case FSDP_KNOWN_CODECS_ENCODE: return set_bytes(archive, node, value, err);
    case FSDP_KNOWN_COMPLEX:
        value->kind = FSDP_VALUE_COMPLEX;
        value->as.complex_parts[0] =
            number_of(archive, fsdp_pickle_argument(&archive->pickle, at, 0));
        value->as.complex_parts[1] =
            number_of(archive, fsdp_pickle_argument(&archive->pickle, at, 1));
        return FSDP_OK;
    case FSDP_KNOWN_NUMPY_SCALAR: return set_scalar(archive, node, value, err);
    case FSDP_KNOWN_TORCH_SIZE:
        return read_value(archive, fsdp_pickle_argument(&archive->pickle, at, 0), depth + 1, value,
                          err);
    case FSDP_KNOWN_ORDERED_DICT:
    case FSDP_KNOWN_DEFAULTDICT:
    case FSDP_KNOWN_COUNTER: return set_container(archive, node, depth, value, err);
    default: return set_class(archive, node, value, err);
    }
}

static fsdp_status read_value(torch_archive *archive, fsdp_node node, int depth,
                              fsdp_value *value_out, fsdp_error *err)
{
    const fsdp_pickle_node *at = torch_node(archive, node);
    switch (at->kind) {
    case FSDP_NODE_ABSENT:
    case FSDP_NODE_NONE: return FSDP_OK;
    case FSDP_NODE_BOOL: *value_out = fsdp_value_bool(at->as.i64); return FSDP_OK;
    case FSDP_NODE_INT: *value_out = fsdp_value_i64(at->as.i64); return FSDP_OK;
    case FSDP_NODE_FLOAT: *value_out = fsdp_value_f64(at->as.f64); return FSDP_OK;
    case FSDP_NODE_BIGINT: return set_bigint(archive, node, value_out, err);
    case FSDP_NODE_STR: return set_string(archive, node, value_out, err);
    case FSDP_NODE_BYTES:
    case FSDP_NODE_BYTEARRAY: return set_bytes(archive, node, value_out, err);
    case FSDP_NODE_TUPLE:
    case FSDP_NODE_LIST:
    case FSDP_NODE_DICT: return set_container(archive, node, depth, value_out, err);
    case FSDP_NODE_CALL: return set_call(archive, node, depth, value_out, err);
    default: return set_class(archive, node, value_out, err);
    }
}

fsdp_status torch_value_read(torch_archive *archive, fsdp_node node, fsdp_value *value_out,
                             fsdp_error *err)
{
    *value_out = (fsdp_value){0};
    FSDP_TRY(torch_measure(archive, node, err));
    fsdp_status st = read_value(archive, node, 0, value_out, err);
    archive->subject = node;
    if (st != FSDP_OK)
        fsdp_value_release(value_out);
    return st;
}
