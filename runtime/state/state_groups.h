/*
 * Hyper-parameters read from a state dict: state_groups_take.c reads them, and state_groups_match.c finds
 * their groups and parameters.
 */
#ifndef FSDP_STATE_GROUPS_H
#define FSDP_STATE_GROUPS_H

#include "runtime/state/state_internal.h"

/* A hyper-parameter of a dict. */
typedef struct fsdp_state_taken {
    const fsdp_entry *entry;   /* its source; NULL: not taken yet */
    double numbers[2];
} fsdp_state_taken;

struct fsdp_state_groups {
    const fsdp_state_scope *scope;
    const fsdp_sd *sd;
    fsdp_state_taken *taken;   /* per group and hyper-parameter; shared ones in the first group */
    fsdp_state_param **order;  /* parameters by their number, if there is one optimizer */
    size_t order_count;
    int64_t *numbers;          /* their numbers in the dict; NULL: 0, 1, 2, ... */
    size_t number_count, number_room;
    const fsdp_entry **coupled; /* per group: says that its decay is Adam's; or NULL */
    fsdp_error refused;        /* the first member that cannot be continued here */
    fsdp_name_list *missing, *unexpected;
};

/* Fills `order`: an optimizer numbers the parameters of its first group, then those of the next. */
fsdp_status fsdp_state_order_params(fsdp_state_groups *groups, fsdp_error *err);
/* Sets `numbers` of a group's members. */
fsdp_status fsdp_state_note_numbers(fsdp_state_groups *groups, const fsdp_value *members, fsdp_error *err);

/* The list "params" of a group; NULL when it has none. */
const fsdp_value *fsdp_state_members(const fsdp_value *dict);

/* A group of the root's optimizers; optimizer NULL: not found. */
typedef struct fsdp_state_group {
    fsdp_optim *optim;
    size_t group;
    const char *member;        /* the first member that was found */
} fsdp_state_group;
/* Finds the group by its members. */
fsdp_status fsdp_state_find_group(const fsdp_state_groups *groups, const fsdp_entry *entry,
                                  const fsdp_value *members, fsdp_state_group *found_out, fsdp_error *err);
/* Finds the only group without members, for a list that has exactly one such group, too. */
fsdp_status fsdp_state_find_empty_group(const fsdp_state_groups *groups, const fsdp_entry *entry,
                                        fsdp_state_group *found_out, fsdp_error *err);
/* Finds the group for a place in the dict's list of groups: by the members that "param_groups.<place>.params"
 * lists; without members, the group at that place. */
fsdp_status fsdp_state_find_place(const fsdp_state_groups *groups, int64_t place,
                                  fsdp_state_group *found_out, fsdp_error *err);

/* The place of hyper-parameter number `which` of a group, as fsdp_state_list_hypers counts. */
fsdp_state_taken *fsdp_state_place_taken(const fsdp_state_groups *groups, const fsdp_optim *optim,
                                         size_t group, size_t which, bool is_shared);
/* The place of a group's hyper-parameter of that name; NULL: the optimizer has none. */
fsdp_state_taken *fsdp_state_find_hyper(const fsdp_state_groups *groups, const fsdp_state_group *live,
                                        const char *what, size_t size, fsdp_state_hyper *hyper_out);
/* Number of a group among those of all optimizers. */
size_t fsdp_state_group_number(const fsdp_state_groups *groups, const fsdp_state_group *live);
/* The number that a group's hyper-parameter will have; false: the optimizer has no such. */
bool fsdp_state_coming(const fsdp_state_groups *groups, const fsdp_state_group *live, const char *name,
                       double *number_out);

/* --- members that no optimizer here can continue (state_continue.c) --- */

/* A member of a group that its optimizer here lacks, and its value. */
typedef struct fsdp_state_unmatched {
    const fsdp_entry *entry;
    const char *name;
    size_t name_size;
    const fsdp_value *value;
    fsdp_state_group live;
} fsdp_state_unmatched;
/* Notes in groups->refused a member that changes the mathematics of steps; others are ignored. */
void fsdp_state_judge(fsdp_state_groups *groups, const fsdp_state_unmatched *unmatched);
/* Checks what depends on several members, after all were taken. */
fsdp_status fsdp_state_judge_groups(fsdp_state_groups *groups, fsdp_error *err);

#endif
