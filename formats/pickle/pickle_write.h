/*
 * Emits pickles of protocol 2, the mirror of pickle.h: what torch.save writes, and what
 * torch.load(weights_only=True) takes (no opcode beyond those that it knows). Python of every version
 * reads it, so .metadata of DCP is written the same way.
 *
 * Containers are built as Python's own pickler does: the container, a mark, the items, then "append" or
 * "set items". A failure to grow is remembered in text.failed.
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

/* Zero-initialise; release when done. */
typedef struct fsdp_pickler {
    fsdp_text text;            /* the pickle so far */
    bool weights_only;         /* integers of over 255 bytes are refused: they need an opcode it lacks */
    uint32_t memo_count;
    /* What was memoized by its spelling: constants, borrowed. */
    struct { const char *module, *name; uint32_t memo; } terms[FSDP_PICKLER_TERMS];
    size_t term_count;
} fsdp_pickler;

void fsdp_pickler_release(fsdp_pickler *pickler);
/* Empties it and begins with the protocol. */
void fsdp_pickler_begin(fsdp_pickler *pickler);
/* What the opcode means to the stack is up to the caller. */
void fsdp_pickler_op(fsdp_pickler *pickler, fsdp_opcode op);
void fsdp_pickler_int(fsdp_pickler *pickler, int64_t number);
/* A str. Text of 4 GiB or more counts as a failure to grow. */
void fsdp_pickler_text(fsdp_pickler *pickler, const char *data, size_t size);

/* Remembers the top of the stack; its number brings it back. */
uint32_t fsdp_pickler_put(fsdp_pickler *pickler);
void fsdp_pickler_get(fsdp_pickler *pickler, uint32_t memo);

/* Constants, spelled out the first time: a class or function, and a str. They must outlive the pickler. */
void fsdp_pickler_global(fsdp_pickler *pickler, const char *module, const char *name);
void fsdp_pickler_word(fsdp_pickler *pickler, const char *word);

/* A tuple of ints, and torch.Size of them. */
void fsdp_pickler_ints(fsdp_pickler *pickler, const int64_t *items, size_t count);
void fsdp_pickler_size(fsdp_pickler *pickler, const int64_t *items, size_t count);

/*
 * Any value that Python's own types hold. Lists become lists, but tuples where they are keys. FSDP_ERR_USAGE
 * for objects, tensors, keys that Python cannot hash, and integers of over 4,300 digits.
 */
FSDP_CHECKED fsdp_status fsdp_pickler_value(fsdp_pickler *pickler, const fsdp_value *value, fsdp_error *err);

#endif
