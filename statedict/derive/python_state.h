/* The states of a Python expression, which python_expression.c makes and python_match.c runs. */
#ifndef FSDP_PYTHON_STATE_H
#define FSDP_PYTHON_STATE_H

#include "statedict/derive/python_expression.h"

enum { FSDP_PYTHON_CHARACTERS = 128 };

typedef enum fsdp_python_kind {
    FSDP_PYTHON_END,           /* of the expression, or of a lookahead */
    FSDP_PYTHON_SET,           /* one character of a set */
    FSDP_PYTHON_SPLIT,         /* `next` or `other` */
    FSDP_PYTHON_LOOK,          /* continues when what begins at `other` matches here */
    FSDP_PYTHON_LOOK_NOT,
    FSDP_PYTHON_START,
    FSDP_PYTHON_STOP,          /* the end of the text, or the newline that ends it */
    FSDP_PYTHON_VERY_END,
    FSDP_PYTHON_BORDER,        /* of a word */
    FSDP_PYTHON_NO_BORDER
} fsdp_python_kind;

typedef struct fsdp_python_set { uint64_t bits[FSDP_PYTHON_CHARACTERS / 64]; } fsdp_python_set;

extern const fsdp_python_set fsdp_python_word;        /* \w */

typedef struct fsdp_python_state {
    fsdp_python_kind kind;
    uint16_t next, other;
    fsdp_python_set set;
} fsdp_python_state;

static inline bool fsdp_python_has(const fsdp_python_set *set, unsigned char c)
{
    return c < FSDP_PYTHON_CHARACTERS && (set->bits[c / 64] >> c % 64 & 1);
}

#endif
