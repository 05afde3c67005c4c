/*
 * Formulas over members of config.json, for descriptions of models: integers, names of members, "layer",
 * + - * / %, == != >, && || !, "layer in LIST", and 'ForCausalLM', which is 1 when the name of the model's
 * class ends with that text. A true condition is 1.
 *
 * In: a formula of a description, which is trusted, and members, which are not. Out: a number, computed with
 * overflow checks.
 */
#ifndef FSDP_FORMULA_H
#define FSDP_FORMULA_H

#include "statedict/models/models.h"
#include <fsdp/value.h>

enum { FSDP_CONFIG_LIST = 4096 };

/* A member as config.json has it. */
typedef struct fsdp_config_value {
    const char *name;
    bool is_there;             /* and not null */
    int64_t number;            /* of an object or a list: the number of its items */
    int64_t *items;            /* of a list of integers, sorted */
} fsdp_config_value;

typedef struct fsdp_config {
    const fsdp_architecture *architecture;     /* its description */
    const struct fsdp_config_file *file;
    const char *path;          /* for messages */
    fsdp_arena arena;
    const char *class_name;    /* the first of "architectures"; "" or NULL: there is none */
    bool is_class_known;       /* the description has the class; otherwise its heads are not known */
    bool any_class;            /* every 'CLASS' in a formula is 1 */
    fsdp_config_value *values; /* of the description's members */
    size_t count;
} fsdp_config;

/* Sorts the items of a list, in which "layer in LIST" searches for each layer. */
void fsdp_formula_sort(fsdp_config_value *list);
/* FSDP_ERR_USAGE names a member that makes no sense. */
fsdp_status fsdp_formula_compute(const fsdp_config *config, const char *formula, int64_t layer,
                                 int64_t *value_out, fsdp_error *err);
/* Likewise for a text that may also be a real number. */
fsdp_status fsdp_formula_number(const fsdp_config *config, const char *text, int64_t layer,
                                double *number_out, fsdp_error *err);
/* Computes one dim of "A, B, C" and moves *shape_at after it; *shape_at becomes NULL after the last. */
fsdp_status fsdp_formula_next_dim(const fsdp_config *config, const char **shape_at, int64_t layer,
                                  int64_t *value_out, fsdp_error *err);
/* True when the formula names a class (in quotes) that the model has. */
bool fsdp_formula_names_class(const fsdp_config *config, const char *formula);

#endif
