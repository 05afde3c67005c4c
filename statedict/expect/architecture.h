/*
 * The architectures of models as data, for expect.c. Formulas (formula.h) over members of config.json give
 * shapes and conditions.
 *
 * A name may hold {base} (the prefix of the model without its head, "model." or ""), {layer} and {expert}.
 */
#ifndef FSDP_ARCHITECTURE_H
#define FSDP_ARCHITECTURE_H

#include <stddef.h>

/* A member of config.json; where it is absent or null, the formula counts. Members whose name begins with '$'
 * are names for formulas only. */
typedef struct fsdp_config_member {
    const char *name, *otherwise;
} fsdp_config_member;

typedef struct fsdp_tensor_row {
    const char *name;
    const char *shape;         /* formulas with ", " between them; "?": any shape */
    const char *when;          /* the tensor exists; NULL: always */
    const char *may_lack;      /* it need not be stored; NULL: it must */
    int spelling;              /* from 1 on; 0: the row belongs to every spelling */
} fsdp_tensor_row;

enum { FSDP_ROW_LISTS = 8, FSDP_BASES = 4 };

typedef struct fsdp_architecture {
    const char *model_type;
    const char *bases[FSDP_BASES];     /* prefixes of the model without its head, up to NULL */
    int spellings;
    const fsdp_config_member *members; /* up to a NULL name; they count before fsdp_config_common */
    const fsdp_tensor_row *rows[FSDP_ROW_LISTS];   /* lists up to a NULL name */
} fsdp_architecture;

/* Members of most architectures. "$layers" and "$experts" are the bounds of {layer} and {expert}. */
extern const fsdp_config_member fsdp_config_common[];

const fsdp_architecture *fsdp_architecture_find(const char *model_type, size_t size);   /* NULL: unknown */
const fsdp_config_member *fsdp_architecture_member(const fsdp_architecture *architecture, const char *name,
                                                   size_t size);   /* NULL: none */

#endif
