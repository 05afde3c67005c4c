/*
 * Room pickle: pickles (protocols 0 to 5) as a graph of plain nodes, and pickles written.
 *
 * In: the bytes of a pickle, which may be hostile. Out: an array of nodes. Nothing is executed: a class or
 * function is a name, and a call is a node that keeps the name and the arguments.
 *
 *   pickle.c          opcodes, stack, memo, texts and numbers, equal keys of dicts
 *   pickle_nodes.c    nodes, their memory, the queries of readers, and errors with their place
 *   pickle_known.c    the globals that a checkpoint may name
 *   pickle_policy.c   the calls that it may contain, and the arguments that those calls may have
 *   pickle_objects.c  objects of unknown classes: what they may hold, which of them are code
 *   pickle_write.c    the mirror: pickles of protocol 2 (pickle_write.h)
 *
 * A call that the policy does not list makes the parser refuse the whole file, wherever the call is,
 * because Python would run it when it loads the file.
 *
 * Nodes are numbers. Containers may be shared and may contain themselves: a reader that walks the graph
 * bounds depth (FSDP_PICKLE_DEPTH) and work (FSDP_PICKLE_WORK).
 *
 * Callers: torch, ranks and dcp. The room calls base only.
 */
#ifndef FSDP_PICKLE_H
#define FSDP_PICKLE_H

#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum {
    FSDP_PICKLE_DEPTH = 1000,
    FSDP_PICKLE_WORK = 10000000,    /* nodes visited; a shared node counts each time */
    FSDP_PICKLE_ATTRIBUTES = 100    /* of an object that a reader knows */
};

typedef uint32_t fsdp_node;    /* 0: no node */

typedef enum fsdp_node_kind {
    FSDP_NODE_ABSENT = 0,
    FSDP_NODE_NONE,
    FSDP_NODE_BOOL,            /* as.i64 */
    FSDP_NODE_INT,             /* as.i64 */
    FSDP_NODE_BIGINT,          /* as.text: two's complement, little-endian, count bytes */
    FSDP_NODE_FLOAT,
    FSDP_NODE_STR,             /* as.text: UTF-8, surrogates allowed as Python's surrogatepass writes them */
    FSDP_NODE_BYTES,           /* as.text: also a str of Python 2 that is not text */
    FSDP_NODE_BYTEARRAY,
    FSDP_NODE_TUPLE,           /* as.items: count nodes */
    FSDP_NODE_LIST,
    FSDP_NODE_SET,
    FSDP_NODE_FROZENSET,
    FSDP_NODE_DICT,            /* as.items: key, value, key, value, ...; count of both */
    FSDP_NODE_GLOBAL,          /* as.global */
    FSDP_NODE_CALL,            /* as.call: a call, or an object of a class */
    FSDP_NODE_PERSISTENT       /* as.child: the persistent id */
} fsdp_node_kind;

/* The globals that readers distinguish. */
typedef enum fsdp_known {
    FSDP_KNOWN_FOREIGN = 0,    /* of a package outside Python, numpy and torch */
    FSDP_KNOWN_STANDARD,       /* another global of Python's library or of numpy */
    FSDP_KNOWN_TORCH,          /* another global of torch */
    FSDP_KNOWN_SET, FSDP_KNOWN_FROZENSET, FSDP_KNOWN_BYTES, FSDP_KNOWN_BYTEARRAY, FSDP_KNOWN_COMPLEX,
    FSDP_KNOWN_SLICE, FSDP_KNOWN_RANGE, FSDP_KNOWN_GETATTR, FSDP_KNOWN_PARTIAL, FSDP_KNOWN_CODECS_ENCODE,
    FSDP_KNOWN_ORDERED_DICT, FSDP_KNOWN_DEFAULTDICT, FSDP_KNOWN_COUNTER, FSDP_KNOWN_DEQUE,
    FSDP_KNOWN_DATETIME, FSDP_KNOWN_DECIMAL, FSDP_KNOWN_FRACTION, FSDP_KNOWN_UUID, FSDP_KNOWN_PATHLIB,
    FSDP_KNOWN_NAMESPACE,      /* argparse.Namespace, types.SimpleNamespace */
    FSDP_KNOWN_RECONSTRUCTOR,
    FSDP_KNOWN_NUMPY_DTYPE, FSDP_KNOWN_NUMPY_ARRAY, FSDP_KNOWN_NUMPY_RECONSTRUCT, FSDP_KNOWN_NUMPY_SCALAR,
    FSDP_KNOWN_NUMPY_FROMBUFFER,
    FSDP_KNOWN_TORCH_SIZE, FSDP_KNOWN_TORCH_DEVICE, FSDP_KNOWN_TORCH_LAYOUT, FSDP_KNOWN_MEMORY_FORMAT,
    FSDP_KNOWN_PLAN_ITEM,
    FSDP_KNOWN_TENSOR, FSDP_KNOWN_TENSOR_V2, FSDP_KNOWN_TENSOR_V3, FSDP_KNOWN_PARAMETER,
    FSDP_KNOWN_PARAMETER_STATE, FSDP_KNOWN_WRAPPER_SUBCLASS, FSDP_KNOWN_DEVICE_TENSOR,
    FSDP_KNOWN_DEVICE_TENSOR_NUMPY,
    FSDP_KNOWN_REBUILD_OTHER,  /* another torch._utils._rebuild_*: sparse, quantized, meta, nested */
    FSDP_KNOWN_FROM_TYPE,      /* _rebuild_from_type_v2 */
    FSDP_KNOWN_TORCH_DTYPE,    /* torch.float32: its dtype is in node.count */
    FSDP_KNOWN_TORCH_STORAGE,  /* torch.FloatStorage: its dtype is in node.count */
    FSDP_KNOWN_UNTYPED_STORAGE,
    FSDP_KNOWN_PARAMETER_CLASS, FSDP_KNOWN_TENSOR_CLASS,
    FSDP_KNOWN_DTENSOR, FSDP_KNOWN_SHARDED_TENSOR,
    FSDP_KNOWN_DCP_METADATA, FSDP_KNOWN_DCP_TENSOR, FSDP_KNOWN_DCP_BYTES, FSDP_KNOWN_DCP_PROPERTIES,
    FSDP_KNOWN_DCP_CHUNK, FSDP_KNOWN_DCP_INDEX, FSDP_KNOWN_DCP_STORAGE, FSDP_KNOWN_DCP_ENUM,
    FSDP_KNOWN_DCP_OTHER,      /* another class of torch.distributed.checkpoint or ._shard */
    FSDP_KNOWN_COUNT
} fsdp_known;

typedef struct fsdp_pickle_global {
    const char *module, *name;     /* zero-terminated */
    size_t module_size, name_size;
} fsdp_pickle_global;

/* callable(*args, **kwargs), and the state and items that BUILD, SETITEMS, APPENDS added. */
typedef struct fsdp_pickle_call {
    fsdp_node callable;        /* a global, or one of the two accepted shapes (pickle_policy.c) */
    fsdp_node args;            /* a tuple; 0: NEWOBJ_EX without positional arguments */
    fsdp_node state;
    fsdp_node more;            /* a tuple (kwargs, list of items, dict of items, set) with 0 for none; or 0 */
} fsdp_pickle_call;

enum {
    FSDP_NODE_HASHABLE = 1,
    FSDP_NODE_OPAQUE = 2,      /* a call of a class that the policy does not list */
    FSDP_NODE_OBJECT = 4,      /* made by NEWOBJ or NEWOBJ_EX */
    FSDP_NODE_PENDING = 8      /* the first half of a shape; the rest must follow */
};

typedef struct fsdp_pickle_node {
    uint8_t kind, flags;
    uint16_t known;            /* GLOBAL, CALL: an fsdp_known (of a call: of its class or function) */
    uint32_t count;
    union {
        int64_t i64;
        double f64;
        const char *text;
        const fsdp_node *items;
        const fsdp_pickle_global *global;
        fsdp_pickle_call *call;
        fsdp_node child;
    } as;
} fsdp_pickle_node;

typedef struct fsdp_pickle {
    const fsdp_pickle_node *nodes;
    size_t count;
    fsdp_node root;
    struct fsdp_pickle_store *store;
} fsdp_pickle;

typedef struct fsdp_pickle_options {
    const char *where;         /* "'PATH': record 'NAME'", for messages */
    int64_t offset;            /* offset of the first byte of data, added to offsets in messages */
    bool *ran_out;             /* set when parsing fails because the data ends early; may be NULL */
    bool is_metadata;          /* accept only the classes of DCP's metadata; no persistent ids */
    bool is_legacy;            /* torch.save's old form: the persistent id ("module", class, file, source) is
                                  that class */
    int depth;                 /* 0; over 0: bytes that may be a pickle, of so many around them */
} fsdp_pickle_options;

/*
 * data must outlive the pickle. *used_out (may be NULL) is the number of bytes up to STOP, included.
 * FSDP_ERR_REFUSED: a call that is not allowed, FSDP_ERR_DAMAGED: not a pickle, FSDP_ERR_LIMIT: beyond the
 * limits. *pickle_out is empty on failure.
 */
fsdp_status fsdp_pickle_parse(const fsdp_pickle_options *options, const void *data, size_t size,
                              fsdp_pickle *pickle_out, size_t *used_out, fsdp_error *err);
void fsdp_pickle_release(fsdp_pickle *pickle);

/* True for an object, or the name of a class or function, that makes Python run code outside the evaluated
 * list when it loads the pickle. */
bool fsdp_pickle_is_code(const fsdp_pickle *pickle, fsdp_node node);

static inline const fsdp_pickle_node *fsdp_pickle_at(const fsdp_pickle *pickle, fsdp_node node)
{
    return &pickle->nodes[node];
}

/* Parts of the node's call, 0 for none. */
fsdp_node fsdp_pickle_kwargs(const fsdp_pickle *pickle, const fsdp_pickle_node *node);
fsdp_node fsdp_pickle_list_items(const fsdp_pickle *pickle, const fsdp_pickle_node *node);
fsdp_node fsdp_pickle_dict_items(const fsdp_pickle *pickle, const fsdp_pickle_node *node);

/* The argument of a call or the element of a tuple or list; 0 when there are fewer. */
fsdp_node fsdp_pickle_argument(const fsdp_pickle *pickle, const fsdp_pickle_node *call, size_t number);
fsdp_node fsdp_pickle_element(const fsdp_pickle *pickle, fsdp_node tuple, size_t number);

static inline bool fsdp_pickle_has_text(const fsdp_pickle_node *node, const char *text, size_t size)
{
    return node->kind == FSDP_NODE_STR && node->count == size && memcmp(node->as.text, text, size) == 0;
}

/* The value of a text key in a dict (the last one), 0 without one. For attributes: of a dict of more than
 * FSDP_PICKLE_ATTRIBUTES entries, only the last ones are searched. */
static inline fsdp_node fsdp_pickle_lookup(const fsdp_pickle *pickle, fsdp_node dict, const char *key)
{
    const fsdp_pickle_node *node = &pickle->nodes[dict];
    size_t size = strlen(key);
    if (node->kind != FSDP_NODE_DICT)
        return 0;
    const size_t most = 2 * (size_t)FSDP_PICKLE_ATTRIBUTES;
    const size_t first = node->count > most ? node->count - most : 0;
    for (size_t i = node->count; i >= first + 2; i -= 2)
        if (fsdp_pickle_has_text(&pickle->nodes[node->as.items[i - 2]], key, size))
            return node->as.items[i - 1];
    return 0;
}

/* True when the node is a str with exactly this text. */
bool fsdp_pickle_is_text(const fsdp_pickle *pickle, fsdp_node node, const char *text);
/* True for an int, not for a bool. */
bool fsdp_pickle_int(const fsdp_pickle *pickle, fsdp_node node, int64_t *value_out);

/* "module.name" of a global, or of the class or function of a call, in a fresh string; NULL when there is
 * no memory. */
char *fsdp_pickle_global_name(const fsdp_pickle *pickle, fsdp_node node);

/* Decimal text of a BIGINT in a fresh string. NULL: no memory, or more digits than Python itself would
 * print. */
char *fsdp_pickle_decimal(const fsdp_pickle_node *node);

#endif
