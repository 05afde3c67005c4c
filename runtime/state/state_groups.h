/*
 * Groups of hyper-parameters on their way out of a state dict: what state_groups_take.c reads, and
 * state_groups_match.c finds the groups and parameters for.
 */
#ifndef FSDP_STATE_GROUPS_H
#define FSDP_STATE_GROUPS_H

#include "runtime/state/state_internal.h"

/* A hyper-parameter of a dict. */
typedef struct fsdp_state_taken {
    const fsdp_entry *entry;   /* where it is from; NULL: not taken yet */
    double numbers[2];
} fsdp_state_taken;

struct fsdp_state_groups {
    const fsdp_state_scope *scope;
    const fsdp_sd *sd;
    fsdp_state_taken *taken;   /* per group and hyper-parameter; shared ones are the first group's */
    fsdp_state_param **order;  /* parameters by their number in the only optimizer */
    size_t order_count;
    int64_t *numbers;          /* as the dict numbers them; NULL: 0, 1, 2, ... */
    size_t number_count, number_room;
    fsdp_name_list *missing, *unexpected;
};

/* An optimizer numbers the parameters of its first group, then those of the next. */
fsdp_status fsdp_state_order_params(fsdp_state_groups *groups, fsdp_error *err);
/* The numbers of a group's members, which take the place of 0, 1, 2, ... */
fsdp_status fsdp_state_note_numbers(fsdp_state_groups *groups, const fsdp_value *members, fsdp_error *err);

/* The list "params" of a group; NULL when it has none. */
const fsdp_value *fsdp_state_members(const fsdp_value *dict);

/* A group here; NULL optimizer: there is none such. */
typedef struct fsdp_state_group {
    fsdp_optim *optim;
    size_t group;
    const char *member;        /* the first that was found */
} fsdp_state_group;
/* That of the members. */
fsdp_status fsdp_state_find_group(const fsdp_state_groups *groups, const fsdp_entry *entry,
                                  const fsdp_value *members, fsdp_state_group *found_out, fsdp_error *err);
/* The only one without members, of a list that has one such, too. */
fsdp_status fsdp_state_find_empty_group(const fsdp_state_groups *groups, const fsdp_entry *entry,
                                        fsdp_state_group *found_out, fsdp_error *err);
/* That of a place in the list of groups: by the members that "param_groups.<place>.params" lists; without
 * any, the same place here. */
fsdp_status fsdp_state_find_place(const fsdp_state_groups *groups, int64_t place,
                                  fsdp_state_group *found_out, fsdp_error *err);

#endif
