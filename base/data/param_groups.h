/*
 * Hyper-parameter groups of an optimizer: a group is the list of its parameters and its options (lr, betas,
 * weight_decay, ...), which are values of any type. Below a prefix ("optim.", or none) programs spell groups
 * in three ways:
 *
 *   LIST     "param_groups", one list [{lr, ..., params: [...]}, ...]     Optimizer.state_dict(), DeepSpeed
 *   PLACES   "param_groups.0.lr", ..., "param_groups.0.params"            DCP, nested
 *   NAMES    "param_groups.layers.0.weight.lr", ... per parameter         DCP, flattened; fsdp_root_save
 *
 * LIST and PLACES list parameters by their names or numbers. NAMES has a group per parameter, until
 * fsdp_groups_join makes one of those with equal options.
 *
 * A reader calls fsdp_groups_read for its entries in any order and then fsdp_groups_sort. The model borrows
 * names, values and prefixes. Its users judge an item of a list that is not a dict, which is a group without
 * options, and a key that is not text, which is an option without a name. Local, without I/O.
 */
#ifndef FSDP_PARAM_GROUPS_H
#define FSDP_PARAM_GROUPS_H

#include "base/core/mem.h"
#include "base/data/name_table.h"
#include <fsdp/value.h>

/* --- the model ---------------------------------------------------------------------------------- */

/* Is an option, or a parameter. */
typedef struct fsdp_group_item {
    const char *name;          /* NULL: the key of the option is not text, the parameter has a number */
    size_t size;
    const fsdp_value *value;   /* NULL: the option is a tensor, the parameter has a name */
    size_t entry;              /* the reader's number of the entry that has it */
    struct fsdp_group_item *next;
} fsdp_group_item;

typedef struct fsdp_group_items {
    fsdp_group_item *first, *last;     /* NULL: none */
    size_t count;
} fsdp_group_items;

typedef enum fsdp_group_spelling {
    FSDP_GROUPS_LIST, FSDP_GROUPS_PLACES, FSDP_GROUPS_NAMES
} fsdp_group_spelling;

typedef struct fsdp_param_group {
    const char *prefix;
    size_t prefix_size;
    fsdp_group_spelling spelling;      /* as it was read */
    size_t place;              /* among the groups of its prefix */
    size_t entry;              /* the first entry that it was read from */
    bool is_listed;            /* it has a list "params" */
    size_t listed;             /* the entry with that list */
    fsdp_group_items options, params;
} fsdp_param_group;

/* Zero-initialise; release when done. */
typedef struct fsdp_param_groups {
    fsdp_param_group *items;
    size_t count, capacity;
    fsdp_name_table keys;      /* of groups that are read: names up to the key -> number of the group */
    fsdp_arena arena;
} fsdp_param_groups;

void fsdp_groups_release(fsdp_param_groups *groups);

/* Adds a group; *added_out is valid until the next one is added. */
FSDP_CHECKED fsdp_status fsdp_groups_add(fsdp_param_groups *groups, const fsdp_param_group *group,
                                         fsdp_param_group **added_out, fsdp_error *err);
/* Adds a copy of an option or a parameter to a list of a group. */
FSDP_CHECKED fsdp_status fsdp_group_add(fsdp_param_groups *groups, fsdp_group_items *items,
                                        fsdp_group_item item, fsdp_error *err);
/* Returns the option of that name; NULL: the group does not have it. */
const fsdp_group_item *fsdp_group_option(const fsdp_param_group *group, const char *name, size_t size);

/* --- reading ------------------------------------------------------------------------------------ */

/* Says where the parts of "optim." "param_groups" "." "layers.0.weight" "." "lr" lie. */
typedef struct fsdp_group_name {
    size_t prefix_size;
    size_t key, key_size;      /* the name of a parameter, or a place */
    size_t option, option_size;        /* size 0: LIST, whose name ends with param_groups */
} fsdp_group_name;

/* Splits a name at its first element "param_groups" and at its last dot. Returns false for other names. */
bool fsdp_group_name_split(const char *name, size_t size, fsdp_group_name *parts_out);

/* Describes an entry. Names of parameters may be numbers, so the reader says which spelling it is. */
typedef struct fsdp_group_source {
    const char *name;
    fsdp_group_name parts;
    fsdp_group_spelling spelling;
    const fsdp_value *value;   /* NULL: a tensor */
    size_t entry;              /* the reader's number of it */
} fsdp_group_source;

/* Reads all groups of a LIST, or one option of a group, or its list "params". FSDP_ERR_DAMAGED: a place has
 * a zero in front, or too many digits; it would be that of another group. */
FSDP_CHECKED fsdp_status fsdp_groups_read(fsdp_param_groups *groups, const fsdp_group_source *from,
                                          fsdp_error *err);
/* Returns true for a list of dicts whose keys are text. */
bool fsdp_group_list_fits(const fsdp_value *list);
/* Returns the list "params" in a dict of a LIST; NULL: the dict does not have one. */
const fsdp_value *fsdp_group_list_params(const fsdp_value *dict);

/* Sorts the groups that were read: those of LIST and PLACES by prefix and place, since entries may come in
 * the order of names ("10" before "2"), then those of NAMES as they were read. */
void fsdp_groups_sort(fsdp_param_groups *groups);
/* Joins sorted groups of NAMES that have one prefix and equal options, in the order of the first of each, and
 * numbers the places of all groups. Returns false, with some joined, when `most` or more remain, because the
 * search compares each with all others. */
bool fsdp_groups_join(fsdp_param_groups *groups, size_t most);

/* --- writing ------------------------------------------------------------------------------------ */

/* Describes an entry to write. All of it is valid during the call. */
typedef struct fsdp_group_entry {
    const char *name;
    size_t name_size;
    const int32_t *path;       /* name_path.h; NAMES are one key below the prefix, as PyTorch flattens */
    size_t path_count;
    const fsdp_value *value;
    size_t entry;              /* of the option; of the group for its list "params" */
} fsdp_group_entry;

typedef fsdp_status fsdp_group_put_call(void *context, const fsdp_group_entry *entry, fsdp_error *err);

/* Puts a group as NAMES, or as PLACES with its list "params" last, if it has one. Leaves out options without
 * a name. */
FSDP_CHECKED fsdp_status fsdp_group_put(const fsdp_param_group *group, fsdp_group_spelling spelling,
                                        fsdp_group_put_call *put, void *context, fsdp_error *err);
/* Makes the dict of a group in a LIST. All its options have names. Release the dict also on failure. */
FSDP_CHECKED fsdp_status fsdp_group_dict(const fsdp_param_group *group, fsdp_value *dict_out,
                                         fsdp_error *err);

#endif
