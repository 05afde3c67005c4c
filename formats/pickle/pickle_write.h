/*
 * Writes pickles of protocol 2, the mirror of pickle.h: the form of torch.save, which
 * torch.load(weights_only=True) accepts (only opcodes that it knows). Every version of Python reads it, so
 * .metadata of DCP is written in the same form.
 *
 * Containers are built as Python's pickler does: the container, a mark, the items, then "append" or "set
 * items". text.failed remembers a failed allocation.
 */
#ifndef FSDP_PICKLE_WRITE_H
#define FSDP_PICKLE_WRITE_H

#include "base/text.h"
#include <fsdp/value.h>

typedef enum fsdp_opcode {
    FSDP_OP_MARK = '(', FSDP_OP_STOP = '.', FSDP_OP_NONE = 'N', FSDP_OP_TRUE = 0x88, FSDP_OP_FALSE = 0x89,
    FSDP_OP_EMPTY_TUPLE = ')', FSDP_OP_TUPLE = 't',
    FSDP_OP_TUPLE1 = 0x85, FSDP_OP_TUPLE2 = 0x86, FSDP_OP_TUPLE3 = 0x87,
    FSDP_OP_EMPTY_LIST = ']', FSDP_OP_APPENDS = 'e', FSDP_OP_EMPTY_DICT = '}', FSDP_OP_SETITEMS = 'u',
    FSDP_OP_REDUCE = 'R', FSDP_OP_NEWOBJ = 0x81, FSDP_OP_BUILD = 'b', FSDP_OP_PERSID = 'Q'
} fsdp_opcode;

enum { FSDP_PICKLER_TERMS = 64 };

/* Zero-initialise; release after use. */
typedef struct fsdp_pickler {
    fsdp_text text;            /* the pickle so far */
    bool weights_only;         /* refuse integers of over 255 bytes: their opcode is not allowed */
    uint32_t memo_count;
    /* Memoized constants, borrowed, by module and name. */
    struct { const char *module, *name; uint32_t memo; } terms[FSDP_PICKLER_TERMS];
    size_t term_count;
} fsdp_pickler;

void fsdp_pickler_release(fsdp_pickler *pickler);
/* Empties the text and writes the protocol. */
void fsdp_pickler_begin(fsdp_pickler *pickler);
/* Writes an opcode; the caller keeps the stack consistent. */
void fsdp_pickler_op(fsdp_pickler *pickler, fsdp_opcode op);
void fsdp_pickler_int(fsdp_pickler *pickler, int64_t number);
/* Writes a str. Text of 4 GiB or more counts as a failed allocation. */
void fsdp_pickler_text(fsdp_pickler *pickler, const char *data, size_t size);

/* Memoizes the top of the stack and returns its number. */
uint32_t fsdp_pickler_put(fsdp_pickler *pickler);
void fsdp_pickler_get(fsdp_pickler *pickler, uint32_t memo);

/* Constants, written out the first time: a class or function, and a str. The strings must outlive the
 * pickler. */
void fsdp_pickler_global(fsdp_pickler *pickler, const char *module, const char *name);
void fsdp_pickler_word(fsdp_pickler *pickler, const char *word);

/* A tuple of ints, and torch.Size of them. */
void fsdp_pickler_ints(fsdp_pickler *pickler, const int64_t *items, size_t count);
void fsdp_pickler_size(fsdp_pickler *pickler, const int64_t *items, size_t count);

/*
 * Writes a value of Python's built-in types. Lists become tuples inside keys.
 * FSDP_ERR_USAGE for objects, tensors, keys that Python cannot hash, and integers of over 4,300 digits.
 */
FSDP_CHECKED fsdp_status fsdp_pickler_value(fsdp_pickler *pickler, const fsdp_value *value, fsdp_error *err);

#endif
