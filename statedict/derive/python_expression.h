/*
 * Regular expressions as Python's `re` reads them in settings of PEFT: the answer is whether one matches.
 *
 * The syntax is Python's for str, without flags: sets, categories, groups, repetitions, lookahead. An
 * expression that needs more than a set of states is refused by name: references to groups, named groups,
 * lookbehind, conditions, flags, atomic groups, characters beyond ASCII. Time and memory are bounded: an
 * expression is a list of states, and a match goes through the text once with all states that it may be in.
 */
#ifndef FSDP_PYTHON_EXPRESSION_H
#define FSDP_PYTHON_EXPRESSION_H

#include "base/core/mem.h"

typedef struct fsdp_python_expression {
    const struct fsdp_python_state *states;
    size_t count;
    size_t first;              /* where a match begins */
} fsdp_python_expression;

/* The arena holds the expression. FSDP_ERR_USAGE says why Python, or this reader, does not take it. */
fsdp_status fsdp_python_compile(fsdp_arena *arena, const char *text, size_t size,
                                fsdp_python_expression *expression_out, fsdp_error *err);

/* re.match, which begins at the start of the text; with `whole` re.fullmatch. FSDP_ERR_LIMIT: the text is too
 * long, or has characters beyond ASCII. */
fsdp_status fsdp_python_match(const fsdp_python_expression *expression, bool whole, const char *text,
                              size_t size, bool *matches_out, fsdp_error *err);

#endif
