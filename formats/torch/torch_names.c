/*
 * Nodes of a pickle as entries of a source: the walk that names them, path elements joined by dots, and their
 * values.
 *
 * The walk visits the items of dicts and namespaces, of lists and tuples that contain a named entry,
 * and of objects of unknown classes, which are themselves listed as opaque. Other nodes become
 * values. A module of torch.nn has the names of its state_dict().
 */
#include "formats/torch/torch_internal.h"

#include "base/data/name_path.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* === values =================================================================================== */

static fsdp_status read_value(torch_archive *archive, fsdp_node node, int depth,
                              fsdp_value *value_out, fsdp_error *err);

/* --- walking ------------------------------------------------------------------------------------ */

/* Begins the visit of a container's items: counts the work, and sets *cycle_out when the container is
 * inside itself. FSDP_ERR_LIMIT beyond the limits. leave ends the visit (not after a cycle). */
static fsdp_status enter(torch_archive *archive, fsdp_node node, int depth, bool *cycle_out,
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

static void leave(torch_archive *archive, fsdp_node node)
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

/* FSDP_ERR_LIMIT when the node is too large once shared containers are expanded. */
static fsdp_status measure(torch_archive *archive, fsdp_node node, fsdp_error *err)
{
    if (!archive->sizes)
        archive->sizes = fsdp_alloc(archive->pickle.count, sizeof *archive->sizes);
    if (!archive->sizes)
        return fsdp_fail_memory(err, "a walk through a pickle");
    uint32_t size = size_of(archive, node, 0); /* at most FSDP_PICKLE_WORK + 1 */
    return size <= FSDP_PICKLE_WORK ? FSDP_OK : torch_count_work(archive, size, err);
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

static fsdp_status fill_items(torch_archive *archive, fsdp_node node, int depth, fsdp_value *value,
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
    FSDP_TRY(enter(archive, node, depth, &is_cycle, err));
    if (is_cycle)
        return set_text(value, FSDP_VALUE_CLASS, "cycle", err);
    fsdp_status st = torch_is_dict(archive, node) ? set_dict(archive, node, depth, value, err)
                                                  : fill_items(archive, node, depth, value, err);
    leave(archive, node);
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
    FSDP_TRY(measure(archive, node, err));
    fsdp_status st = read_value(archive, node, 0, value_out, err);
    archive->subject = node;
    if (st != FSDP_OK)
        fsdp_value_release(value_out);
    return st;
}

/* === names ==================================================================================== */

enum { ELEMENT_MOST = FSDP_PATH_NUMBER - 1 };

typedef struct walk {
    torch_archive *archive;
    const torch_visitor *visitor;
    fsdp_text name;
    int depth;     /* number of path elements */
    int32_t *path; /* see name_path.h */
    size_t path_room;
    size_t name_bytes; /* of all visited entries, and of their paths */
    fsdp_error *err;
} walk;

static fsdp_status visit(walk *at, fsdp_node node);

/* --- path elements ------------------------------------------------------------------------------ */

static size_t begin_element(walk *at)
{
    size_t before = at->name.size;
    if (at->depth++ > 0)
        fsdp_text_add(&at->name, ".", 1);
    return before;
}

static void report_path(const walk *at)
{
    static const int32_t whole[] = {FSDP_PATH_WHOLE};
    if (at->archive->source)
        fsdp_source_nest(at->archive->source, at->depth > 0 ? at->path : whole,
                         at->depth > 0 ? (size_t)at->depth : 1);
}

typedef enum element_kind {
    ELEMENT_KEY,
    ELEMENT_NUMBER,
    ELEMENT_POSITION,
    ELEMENT_IN_TUPLE
} element_kind;

/* Pushes the text added to the name since begin_element as an element. */
static fsdp_status push_element(walk *at, size_t before, element_kind kind)
{
    size_t depth = (size_t)at->depth, start = before + (depth > 1);
    if (at->name.failed || !fsdp_grow(&at->path, &at->path_room, depth, sizeof *at->path))
        return fsdp_fail_memory(at->err, "a name");
    size_t size = at->name.size - start;
    if (size > ELEMENT_MOST)
        size = ELEMENT_MOST; /* the builder will refuse the name */
    at->path[depth - 1] = kind == ELEMENT_POSITION   ? -(int32_t)size
                          : kind == ELEMENT_IN_TUPLE ? -((int32_t)size | FSDP_PATH_TUPLE)
                                                     : (int32_t)size;
    if (kind == ELEMENT_NUMBER && fsdp_path_is_number(at->name.data + start, size))
        at->path[depth - 1] |= FSDP_PATH_NUMBER;
    return FSDP_OK;
}

static fsdp_status visit_element(walk *at, size_t before, element_kind kind, fsdp_node node)
{
    FSDP_TRY(push_element(at, before, kind));
    report_path(at);
    fsdp_status st = visit(at, node);
    at->name.size = before;
    at->depth--;
    report_path(at);
    return st;
}

static fsdp_status visit_number(walk *at, size_t number, element_kind kind, fsdp_node node)
{
    size_t before = begin_element(at);
    fsdp_text_addf(&at->name, "%zu", number);
    return visit_element(at, before, kind, node);
}

static fsdp_status visit_items(walk *at, fsdp_node list)
{
    const fsdp_pickle_node *items = torch_node(at->archive, list);
    element_kind kind = items->kind == FSDP_NODE_TUPLE ? ELEMENT_IN_TUPLE : ELEMENT_POSITION;
    for (uint32_t i = 0; i < items->count; i++)
        FSDP_TRY(visit_number(at, i, kind, items->as.items[i]));
    return FSDP_OK;
}

static fsdp_status visit_pair(walk *at, fsdp_node key, fsdp_node value)
{
    size_t before = begin_element(at);
    bool is_number = torch_node(at->archive, key)->kind == FSDP_NODE_INT;
    torch_add_key(at->archive, key, &at->name);
    return visit_element(at, before, is_number ? ELEMENT_NUMBER : ELEMENT_KEY, value);
}

static fsdp_status visit_pairs(walk *at, fsdp_node dict)
{
    const fsdp_pickle_node *pairs = torch_node(at->archive, dict);
    for (uint32_t i = 0; i + 1 < pairs->count; i += 2)
        FSDP_TRY(visit_pair(at, pairs->as.items[i], pairs->as.items[i + 1]));
    return FSDP_OK;
}

/* --- leaves ------------------------------------------------------------------------------------- */

static const char *name_of(const walk *at)
{
    return at->name.data ? at->name.data : "";
}

static torch_item item_of(const walk *at, fsdp_node node)
{
    return (torch_item){at->archive, name_of(at), at->name.size, node};
}

static fsdp_status add_value(walk *at, fsdp_node node, fsdp_value *value)
{
    const torch_visitor *visitor = at->visitor;
    torch_item item = item_of(at, node);
    fsdp_status st = visitor ? visitor->value(visitor->context, &item, value, at->err)
                             : fsdp_source_add_value(at->archive->source, item.name, item.name_size,
                                                     value, NULL, at->err);
    fsdp_value_release(value);
    return st;
}

static fsdp_status leaf(walk *at, fsdp_node node)
{
    fsdp_value value;
    FSDP_TRY(torch_value_read(at->archive, node, &value, at->err));
    return add_value(at, node, &value);
}

/* Adds the tensor and takes its data. */
static fsdp_status add_tensor(walk *at, torch_tensor *tensor)
{
    const torch_visitor *visitor = at->visitor;
    torch_item item = item_of(at, 0);
    size_t number;
    at->archive->has_elements |= fsdp_shape_count(tensor->ndim, tensor->shape) > 0;
    fsdp_status st = visitor ? visitor->tensor(visitor->context, &item, tensor, at->err)
                             : torch_tensor_add(at->archive, item.name, item.name_size, tensor,
                                                &number, at->err);
    torch_tensor_release(tensor);
    return st;
}

static fsdp_status class_leaf(walk *at, fsdp_node node)
{
    fsdp_value value = {0};
    char *text = fsdp_pickle_global_name(&at->archive->pickle, node);
    if (!text)
        return fsdp_fail_memory(at->err, "a value");
    fsdp_status st = fsdp_value_set_bytes(&value, FSDP_VALUE_CLASS, text, strlen(text), at->err);
    fsdp_free(text);
    return st == FSDP_OK ? add_value(at, 0, &value) : st;
}

static fsdp_status fixed_leaf(walk *at, fsdp_value_kind kind, const char *text)
{
    fsdp_value value = {0};
    FSDP_TRY(text ? fsdp_value_set_bytes(&value, kind, text, strlen(text), at->err)
                  : fsdp_value_set_items(&value, kind, 0, at->err));
    return add_value(at, 0, &value);
}

/* Adds the name of the entry to an error. */
static fsdp_status named(walk *at, fsdp_status status)
{
    char shown[200];
    if (status != FSDP_OK)
        fsdp_error_prefix(at->err, "'%s'",
                          fsdp_printable(name_of(at), at->name.size, shown, sizeof shown));
    return status;
}

static fsdp_status array_leaf(walk *at, fsdp_node node)
{
    torch_tensor tensor;
    FSDP_TRY(named(at, torch_numpy_read(at->archive, node, &tensor, at->err)));
    return add_tensor(at, &tensor);
}

/* --- containers --------------------------------------------------------------------------------- */

static bool is_namespace(const torch_archive *archive, fsdp_node node)
{
    const fsdp_pickle_node *at = torch_node(archive, node);
    return at->kind == FSDP_NODE_CALL && at->known == FSDP_KNOWN_NAMESPACE;
}

/* The items of a list, a tuple or a deque; 0 for none, and for other nodes. */
static fsdp_node list_items(const torch_archive *archive, fsdp_node node)
{
    const fsdp_pickle_node *at = torch_node(archive, node);
    if (at->kind == FSDP_NODE_LIST || at->kind == FSDP_NODE_TUPLE)
        return node;
    bool is_deque = at->kind == FSDP_NODE_CALL && at->known == FSDP_KNOWN_DEQUE;
    return is_deque ? fsdp_pickle_list_items(&archive->pickle, at) : 0;
}

static bool is_object(const torch_archive *archive, fsdp_node node)
{
    const fsdp_pickle_node *at = torch_node(archive, node);
    return at->kind == FSDP_NODE_CALL && at->flags & FSDP_NODE_OPAQUE;
}

static bool has_own_name(const torch_archive *archive, fsdp_node node)
{
    return torch_is_dict(archive, node) || is_namespace(archive, node) ||
           is_object(archive, node) || torch_tensor_kind(archive, node) != TORCH_KIND_NONE ||
           torch_numpy_is_numeric(archive, node);
}

/* True when a list contains a named entry, at any depth of lists. Each list is examined once,
 * and one inside itself adds nothing. */
static bool list_is_full(torch_archive *archive, fsdp_node node, int depth)
{
    uint8_t *mark = &archive->marks[node];
    if (*mark & (TORCH_MARK_PLAIN | TORCH_MARK_FULL | TORCH_MARK_SEEN))
        return *mark & TORCH_MARK_FULL;
    if (depth > FSDP_PICKLE_DEPTH)
        return true; /* the visit will report the excessive depth */
    *mark |= TORCH_MARK_SEEN;
    bool is_full = false;
    const fsdp_pickle_node *list = torch_node(archive, list_items(archive, node));
    for (uint32_t i = 0; i < list->count && !is_full; i++) {
        fsdp_node item = list->as.items[i];
        is_full = list_items(archive, item) != 0 ? list_is_full(archive, item, depth + 1)
                                                 : has_own_name(archive, item);
    }
    *mark &= (uint8_t)~TORCH_MARK_SEEN;
    *mark |= is_full ? TORCH_MARK_FULL : TORCH_MARK_PLAIN;
    return is_full;
}

static fsdp_status go_into_list(walk *at, fsdp_node node)
{
    return visit_items(at, list_items(at->archive, node));
}

static fsdp_status go_into_dict(walk *at, fsdp_node node)
{
    bool is_space = is_namespace(at->archive, node);
    fsdp_node items = is_space ? torch_node(at->archive, node)->as.call->state
                               : torch_dict_items(at->archive, node);
    if (torch_node(at->archive, items)->kind != FSDP_NODE_DICT ||
        torch_node(at->archive, items)->count == 0)
        return fixed_leaf(at, FSDP_VALUE_DICT, NULL);
    return visit_pairs(at, items);
}

/* Visits a state: (attributes or None, slots), attributes alone, or another form that the class
 * defines. */
static fsdp_status go_into_state(walk *at, fsdp_node state)
{
    const fsdp_pickle_node *node = torch_node(at->archive, state);
    if (node->kind == FSDP_NODE_DICT)
        return visit_pairs(at, state);
    if (node->kind == FSDP_NODE_ABSENT || node->kind == FSDP_NODE_NONE)
        return FSDP_OK;
    fsdp_node first = fsdp_pickle_element(&at->archive->pickle, state, 0);
    fsdp_node second = fsdp_pickle_element(&at->archive->pickle, state, 1);
    uint8_t kind = torch_node(at->archive, first)->kind;
    if (node->kind == FSDP_NODE_TUPLE && node->count == 2 &&
        (kind == FSDP_NODE_NONE || kind == FSDP_NODE_DICT) &&
        torch_node(at->archive, second)->kind == FSDP_NODE_DICT) {
        if (kind == FSDP_NODE_DICT)
            FSDP_TRY(visit_pairs(at, first));
        return visit_pairs(at, second);
    }
    size_t before = begin_element(at);
    fsdp_text_addf(&at->name, "state");
    return visit_element(at, before, ELEMENT_KEY, state);
}

/* Arguments of an object, and whether each item is an attribute, too. */
typedef struct arguments {
    const fsdp_pickle_node *args, *named;
    bool *are_kept; /* of args, then of named */
} arguments;

static void mark_attributes(const torch_archive *archive, const fsdp_pickle_node *state, bool is_on)
{
    for (uint32_t i = 1; state->kind == FSDP_NODE_DICT && i < state->count; i += 2) {
        uint8_t *mark = &archive->marks[state->as.items[i]];
        *mark = (uint8_t)(is_on ? *mark | TORCH_MARK_KEPT : *mark & ~TORCH_MARK_KEPT);
    }
}

/* Marks all at once, because arguments and attributes may be many. */
static fsdp_status find_kept(const walk *at, const fsdp_pickle_node *object, arguments *found)
{
    torch_archive *archive = at->archive;
    const fsdp_pickle_node *state = torch_node(archive, object->as.call->state);
    found->args = torch_node(archive, object->as.call->args);
    found->named = torch_node(archive, fsdp_pickle_kwargs(&archive->pickle, object));
    size_t args = found->args->count, named = found->named->count;
    archive->work += (int64_t)(args + named);
    found->are_kept = fsdp_alloc(args + named, sizeof *found->are_kept);
    if (!found->are_kept)
        return fsdp_fail_memory(at->err, "a walk through a pickle");
    mark_attributes(archive, state, true);
    for (size_t i = 0; i < args; i++)
        found->are_kept[i] = archive->marks[found->args->as.items[i]] & TORCH_MARK_KEPT;
    for (size_t i = 0; i < named; i++)
        found->are_kept[args + i] = archive->marks[found->named->as.items[i]] & TORCH_MARK_KEPT;
    mark_attributes(archive, state, false);
    return FSDP_OK;
}

static fsdp_status visit_arguments(walk *at, const arguments *found)
{
    const fsdp_pickle_node *args = found->args, *named = found->named;
    const bool *is_named_kept = found->are_kept + args->count;
    for (uint32_t i = 0; i < args->count; i++)
        if (!found->are_kept[i])
            FSDP_TRY(visit_number(at, i, ELEMENT_POSITION, args->as.items[i]));
    for (uint32_t i = 0; i + 1 < named->count; i += 2)
        if (!is_named_kept[i + 1])
            FSDP_TRY(visit_pair(at, named->as.items[i], named->as.items[i + 1]));
    return FSDP_OK;
}

/* Visits the arguments that are not attributes, too: attributes have their names already. */
static fsdp_status go_into_arguments(walk *at, const fsdp_pickle_node *object)
{
    arguments found;
    FSDP_TRY(find_kept(at, object, &found));
    fsdp_status st = visit_arguments(at, &found);
    fsdp_free(found.are_kept);
    return st;
}

/* --- modules: a pickled torch.nn.Module ----------------------------------------------------------- */

static bool is_module(const torch_archive *archive, fsdp_node node)
{
    return torch_is_dict(archive, torch_attribute(archive, node, "_parameters")) &&
           torch_is_dict(archive, torch_attribute(archive, node, "_buffers")) &&
           torch_is_dict(archive, torch_attribute(archive, node, "_modules"));
}

/* The members of a set; 0: none. Protocol 2 writes set([...]). */
static fsdp_node set_items(const torch_archive *archive, fsdp_node node)
{
    const fsdp_pickle_node *at = torch_node(archive, node);
    if (at->kind == FSDP_NODE_SET || at->kind == FSDP_NODE_FROZENSET)
        return node;
    bool is_set = at->kind == FSDP_NODE_CALL && at->known == FSDP_KNOWN_SET;
    return is_set ? torch_element(archive, at->as.call->args, 0) : 0;
}

static fsdp_status find_in_set(walk *at, fsdp_node set, fsdp_node key, bool *found_out)
{
    const fsdp_pickle_node *items = torch_node(at->archive, set);
    fsdp_text text = {0};
    torch_add_key(at->archive, key, &text);
    *found_out = false;
    at->archive->work += items->count;
    for (uint32_t i = 0; i < items->count && text.data && !text.failed && !*found_out; i++)
        *found_out = fsdp_pickle_is_text(&at->archive->pickle, items->as.items[i], text.data);
    fsdp_status st = text.failed ? fsdp_fail_memory(at->err, "a name") : FSDP_OK;
    fsdp_text_release(&text);
    return st;
}

/* A member of a state_dict(), whose key is "encoder.0.weight" whatever the modules are in. */
static fsdp_status visit_member(walk *at, const fsdp_text *inside, fsdp_node key, fsdp_node value)
{
    size_t before = begin_element(at);
    fsdp_text_add(&at->name, inside->data ? inside->data : "", inside->size);
    torch_add_key(at->archive, key, &at->name);
    return visit_element(at, before, ELEMENT_KEY, value);
}

/* Parameters or persistent buffers; those that are None are not in the state_dict(). */
static fsdp_status visit_members(walk *at, const fsdp_text *inside, fsdp_node dict, fsdp_node left)
{
    const fsdp_pickle_node *pairs = torch_node(at->archive, torch_dict_items(at->archive, dict));
    for (uint32_t i = 0; i + 1 < pairs->count; i += 2) {
        fsdp_node key = pairs->as.items[i], value = pairs->as.items[i + 1];
        bool is_left = false;
        if (left != 0)
            FSDP_TRY(find_in_set(at, left, key, &is_left));
        if (!is_left && torch_node(at->archive, value)->kind != FSDP_NODE_NONE)
            FSDP_TRY(visit_member(at, inside, key, value));
    }
    return FSDP_OK;
}

static fsdp_status visit_module(walk *at, fsdp_text *inside, fsdp_node module, int depth);

/* A child that is not a module, such as a compiled one, is a member. */
static fsdp_status visit_child(walk *at, fsdp_text *inside, fsdp_node key, fsdp_node child,
                               int depth)
{
    bool is_cycle;
    size_t before = inside->size;
    if (torch_node(at->archive, child)->kind == FSDP_NODE_NONE)
        return FSDP_OK;
    if (!is_object(at->archive, child) || !is_module(at->archive, child))
        return visit_member(at, inside, key, child);
    FSDP_TRY(enter(at->archive, child, depth, &is_cycle, at->err));
    if (is_cycle)
        return FSDP_OK;
    torch_add_key(at->archive, key, inside);
    fsdp_text_add(inside, ".", 1);
    fsdp_status st = inside->failed ? fsdp_fail_memory(at->err, "a name")
                                    : visit_module(at, inside, child, depth + 1);
    inside->size = before;
    leave(at->archive, child);
    return st;
}

static fsdp_status visit_module(walk *at, fsdp_text *inside, fsdp_node module, int depth)
{
    const torch_archive *archive = at->archive;
    fsdp_node left =
        set_items(archive, torch_attribute(archive, module, "_non_persistent_buffers_set"));
    FSDP_TRY(visit_members(at, inside, torch_attribute(archive, module, "_parameters"), 0));
    FSDP_TRY(visit_members(at, inside, torch_attribute(archive, module, "_buffers"), left));
    const fsdp_pickle_node *pairs = torch_node(
        archive, torch_dict_items(archive, torch_attribute(archive, module, "_modules")));
    for (uint32_t i = 0; i + 1 < pairs->count; i += 2)
        FSDP_TRY(visit_child(at, inside, pairs->as.items[i], pairs->as.items[i + 1], depth));
    return FSDP_OK;
}

/* A module without parameters is an object. */
static fsdp_status go_into_module(walk *at, fsdp_node node)
{
    fsdp_text inside = {0};
    size_t before = at->name_bytes;
    fsdp_status st = visit_module(at, &inside, node, at->depth + 1);
    fsdp_text_release(&inside);
    return st == FSDP_OK && at->name_bytes == before ? class_leaf(at, node) : st;
}

static fsdp_status go_into_object(walk *at, fsdp_node node)
{
    const fsdp_pickle *pickle = &at->archive->pickle;
    const fsdp_pickle_node *object = torch_node(at->archive, node);
    bool is_taken = false;
    torch_item item = item_of(at, node);
    if (at->visitor && at->visitor->object)
        FSDP_TRY(at->visitor->object(at->visitor->context, &item, &is_taken, at->err));
    if (is_taken)
        return FSDP_OK;
    if (is_module(at->archive, node))
        return go_into_module(at, node);
    FSDP_TRY(class_leaf(at, node));
    if (object->known != FSDP_KNOWN_RECONSTRUCTOR)
        FSDP_TRY(go_into_arguments(at, object));
    FSDP_TRY(go_into_state(at, object->as.call->state));
    FSDP_TRY(visit_items(at, fsdp_pickle_list_items(pickle, object)));
    return visit_pairs(at, fsdp_pickle_dict_items(pickle, object));
}

/* Visits a subclass without bytes: distributed tensors, or an unknown one. */
static fsdp_status go_into_wrapper(walk *at, fsdp_node node)
{
    torch_tensor tensor;
    torch_wrapper wrapper;
    torch_kind kind;
    FSDP_TRY(torch_tensor_read(at->archive, node, &kind, &tensor, &wrapper, at->err));
    torch_item item = item_of(at, node);
    if (wrapper.known == FSDP_KNOWN_DTENSOR || wrapper.known == FSDP_KNOWN_SHARDED_TENSOR)
        return at->visitor
                   ? at->visitor->distributed(at->visitor->context, &item, &wrapper, at->err)
                   : torch_dist_add(at->archive, item.name, item.name_size, &wrapper, at->err);
    FSDP_TRY(class_leaf(at, wrapper.type != 0 ? wrapper.type : node));
    return go_into_state(at, wrapper.state);
}

static fsdp_status go_into(walk *at, fsdp_node node,
                           fsdp_status (*inside)(walk *at, fsdp_node node))
{
    bool is_cycle;
    FSDP_TRY(enter(at->archive, node, at->depth, &is_cycle, at->err));
    if (is_cycle)
        return fixed_leaf(at, FSDP_VALUE_CLASS, "cycle");
    fsdp_status st = inside(at, node);
    leave(at->archive, node);
    return st;
}

static fsdp_status tensor_leaf(walk *at, fsdp_node node)
{
    torch_tensor tensor;
    torch_wrapper wrapper;
    torch_kind kind;
    FSDP_TRY(named(at, torch_tensor_read(at->archive, node, &kind, &tensor, &wrapper, at->err)));
    return add_tensor(at, &tensor);
}

/* Limits the bytes of names: the source counts its own, but not those of rank files and
 * containers. */
static fsdp_status count_name(walk *at)
{
    at->name_bytes += at->name.size + (size_t)at->depth * sizeof *at->path;
    if (at->name_bytes <= FSDP_SOURCE_NAMES)
        return FSDP_OK;
    return fsdp_fail(at->err, FSDP_ERR_LIMIT,
                     "%s: its names take over %d MiB, because many begin with a long one",
                     at->archive->where, FSDP_SOURCE_NAMES >> 20);
}

static fsdp_status visit(walk *at, fsdp_node node)
{
    torch_archive *archive = at->archive;
    FSDP_TRY(count_name(at));
    if (++archive->work > FSDP_PICKLE_WORK || !archive->marks) {
        bool is_cycle;
        FSDP_TRY(enter(archive, node, at->depth, &is_cycle, at->err));
        leave(archive, node);
    }
    switch (torch_tensor_kind(archive, node)) {
    case TORCH_KIND_TENSOR: return tensor_leaf(at, node);
    case TORCH_KIND_WRAPPER:
        archive->has_elements = true;
        return go_into(at, node, go_into_wrapper);
    case TORCH_KIND_OPAQUE: archive->has_elements = true; return leaf(at, node);
    case TORCH_KIND_NONE: break;
    }
    if (torch_numpy_is_numeric(archive, node))
        return array_leaf(at, node);
    if (torch_is_dict(archive, node) || is_namespace(archive, node))
        return go_into(at, node, go_into_dict);
    if (list_items(archive, node) != 0 && list_is_full(archive, node, 0))
        return go_into(at, node, go_into_list);
    return is_object(archive, node) ? go_into(at, node, go_into_object) : leaf(at, node);
}

fsdp_status torch_walk(torch_archive *archive, const torch_visitor *visitor, fsdp_error *err)
{
    walk at = {.archive = archive, .visitor = visitor, .err = err};
    FSDP_TRY(measure(archive, archive->pickle.root, err));
    report_path(&at);
    fsdp_status st = visit(&at, archive->pickle.root);
    if (archive->source)
        fsdp_source_nest(archive->source, NULL, 0);
    fsdp_free(at.path);
    fsdp_text_release(&at.name);
    return st;
}
