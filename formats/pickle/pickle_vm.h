/* The state of the pickle machine, shared by the files of the room that parse. */
#ifndef FSDP_PICKLE_VM_H
#define FSDP_PICKLE_VM_H

#include "base/core/mem.h"
#include "formats/pickle/pickle.h"

struct pickle_block {
    struct pickle_block *next;
    uint64_t data[];
};

/* Memory that is freed with the pickle: 8-byte aligned, not zeroed, in blocks that double. */
typedef struct fsdp_pickle_store {
    struct pickle_block *blocks;
    char *next, *end;
    size_t block_bytes; /* of the last block for several allocations */
} fsdp_pickle_store;

void *pickle_store_take_more(fsdp_pickle_store *store, size_t size);
static inline void *pickle_store_take(fsdp_pickle_store *store, size_t size)
{
    size_t bytes = (size + 7) & ~(size_t)7;
    if (bytes - 1 >= (size_t)(store->end - store->next)) /* empty store, too many bytes, or an overflow */
        return pickle_store_take_more(store, size);
    void *data = store->next;
    store->next += bytes;
    return data;
}

/* Nodes that every pickle begins with. */
enum {
    NODE_OF_NONE = 1,
    NODE_OF_FALSE,
    NODE_OF_TRUE,
    NODE_OF_EMPTY_TUPLE,
    NODE_FIRST_FREE
};

/* Sizes of the caches for ints, short tuples and sizes. Large metadata repeats shapes and offsets hundreds
 * of thousands of times; because such nodes cannot change, a recent equal one is reused. */
enum { PICKLE_SMALL_INTS = 256, PICKLE_SHARED_BITS = 10, PICKLE_SHARED = 1 << PICKLE_SHARED_BITS };
_Static_assert(PICKLE_SMALL_INTS > UINT8_MAX, "a byte is a small int");

typedef struct pickle_vm {
    const fsdp_pickle_options *options;
    const uint8_t *data, *at, *limit, *end;   /* limit: the end of the frame */
    const uint8_t *opcode;                    /* start of the current opcode, for messages */
    fsdp_pickle_node *nodes;
    size_t node_count, node_capacity;
    fsdp_node *stack;
    size_t height, stack_capacity;
    size_t *marks;
    size_t mark_count, mark_capacity;
    size_t floor;                             /* stack height at the last mark: no pop goes below */
    fsdp_node *memo;
    size_t memo_count, memo_capacity;         /* entries from memo_count on are unset */
    size_t memo_used;
    fsdp_node small_ints[PICKLE_SMALL_INTS];  /* 0: not used yet */
    fsdp_node shared[PICKLE_SHARED];          /* by a hash of their contents */
    fsdp_node *pending;                       /* first halves of shapes, checked at the end */
    size_t pending_count, pending_capacity;
    size_t items_copied;                      /* from the arguments of calls */
    fsdp_pickle_store *store;
    fsdp_error *err;
} pickle_vm;

/* --- pickle_nodes.c --- */

/* Fails with the offset of the current opcode. */
fsdp_status pickle_fail(pickle_vm *vm, fsdp_status status, const char *why);
fsdp_status pickle_no_memory(pickle_vm *vm);

/* Nodes are pushed on the stack. */
fsdp_status pickle_push_grown(pickle_vm *vm, fsdp_node node);
fsdp_status pickle_new_node_grown(pickle_vm *vm, const fsdp_pickle_node *node, fsdp_node *node_out);

/* Inline, because a large pickle has millions of them. */
static inline fsdp_status pickle_push(pickle_vm *vm, fsdp_node node)
{
    if (vm->height == vm->stack_capacity)
        return pickle_push_grown(vm, node);
    vm->stack[vm->height++] = node;
    return FSDP_OK;
}

static inline fsdp_status pickle_new_node(pickle_vm *vm, fsdp_pickle_node node, fsdp_node *node_out)
{
    if (vm->node_count == vm->node_capacity)
        return pickle_new_node_grown(vm, &node, node_out);
    *node_out = (fsdp_node)vm->node_count;
    vm->nodes[vm->node_count++] = node;
    return FSDP_OK;
}

static inline fsdp_status pickle_push_node(pickle_vm *vm, fsdp_pickle_node node)
{
    fsdp_node made = 0;
    FSDP_TRY(pickle_new_node(vm, node, &made));
    return pickle_push(vm, made);
}

/* The cache slot for a node identified by these two numbers. */
static inline fsdp_node *pickle_shared(pickle_vm *vm, uint64_t a, uint64_t b)
{
    uint64_t mixed = (a + (b << 32)) * UINT64_C(0x9E3779B97F4A7C15);
    return &vm->shared[mixed >> (64 - PICKLE_SHARED_BITS)];
}

fsdp_status pickle_push_int(pickle_vm *vm, int64_t value);
/* Replaces the nodes on the stack from `from` on by a container of them. */
fsdp_status pickle_push_items(pickle_vm *vm, fsdp_node_kind kind, size_t from);
/* Appends the nodes on the stack from `from` on to the list, dict, set or object below. */
fsdp_status pickle_append(pickle_vm *vm, fsdp_node target, fsdp_node_kind kind, size_t from);
/* Makes `node` a call; kwargs 0: none. */
fsdp_status pickle_push_call(pickle_vm *vm, fsdp_pickle_node node, fsdp_node callable, fsdp_node args,
                             fsdp_node kwargs);

/* --- pickle.c --- */

/* fsdp_pickle_parse without its check of objects. */
fsdp_status pickle_parse(const fsdp_pickle_options *options, const void *data, size_t size,
                         fsdp_pickle *pickle_out, size_t *used_out, fsdp_error *err);

/* --- pickle_known.c --- */

/* Identifies the global; *dtype_out for those that stand for a dtype. */
fsdp_known pickle_recognise(const fsdp_pickle_global *global, uint32_t *dtype_out);
/* Per known global: whether readers evaluate it (a function, or a class), what may be added to an object
 * after the call, and whether .metadata needs it although it is not a class of DCP. */
enum {
    PICKLE_CALLED = 1,
    PICKLE_TAKES_LISTS = 2,
    PICKLE_TAKES_DICTS = 4,
    PICKLE_TAKES_STATE = 8,
    PICKLE_IN_METADATA = 16
};
unsigned pickle_traits(unsigned known);
bool pickle_is_torch(unsigned known);
bool pickle_is_dcp(unsigned known);
/* True for a dotted name that can reach Python's library through another module. */
bool pickle_leads_to_python(const fsdp_pickle_global *global);

/* --- pickle_policy.c --- */

typedef enum pickle_how { PICKLE_REDUCE, PICKLE_NEWOBJ, PICKLE_NEWOBJ_EX } pickle_how;

/* Replaces callable and args (kwargs 0: none) by the node of the call, or refuses the file. */
fsdp_status pickle_call(pickle_vm *vm, pickle_how how, fsdp_node callable, fsdp_node args, fsdp_node kwargs);
/* Adds a state to the object, or to the first half of a shape, which completes it. */
fsdp_status pickle_build(pickle_vm *vm, fsdp_node target, fsdp_node state);
/* Fails when an incomplete shape is left at the end. */
fsdp_status pickle_check_pending(pickle_vm *vm);

#endif
