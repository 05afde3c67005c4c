/* A map while it is applied: map_apply.c follows the rules, map_steps.c makes the tensors. See map.h. */
#ifndef FSDP_MAP_RUN_H
#define FSDP_MAP_RUN_H

#include "statedict/map/map_rules.h"

/* Sorted bindings of a rule's variables: one per group of tensors that it takes or makes. */
typedef struct binding_list {
    map_binding *items;
    size_t count, room;
} binding_list;

typedef struct map_run {
    const fsdp_map *map;
    map_sizes sizes;
    const fsdp_sd *sd; /* of the base */
    fsdp_derivation *derivation;
    fsdp_arena *arena;
    bool *is_taken; /* per entry of the base */
    int64_t made;   /* tensors of steps, which lists of lists would multiply without end */

    /* the rule that is applied */
    const map_rule *rule;
    const map_pattern *from, *to;
    int from_count, to_count;
    map_step steps[MAP_STEPS]; /* in the order of this direction */
    int lists[MAP_STEPS + 1];  /* tensors in the list before each step, and behind the last */
    binding_list bindings[MAP_STEPS + 1]; /* likewise */
} map_run;

/* --- map_bindings.c --- */

fsdp_status map_bindings_add(binding_list *list, const map_binding *binding, fsdp_error *err);
/* Sorts, and keeps one of equal ones. */
void map_bindings_sort(binding_list *list);
bool map_bindings_have(const binding_list *list, const map_binding *binding);
/* Counts the numbers of a variable, from 0 on, in the bindings that are equal but for it. */
int64_t map_bindings_count(const binding_list *list, const map_binding *binding, int variable);

/* Are they equal but for the variables of a step that numbers pairs? */
bool map_bindings_are_beside(const map_binding *a, const map_binding *b, const map_step *step);
/* The binding whose pair has the number that `after` gives its variable; NULL: none. */
const map_binding *map_bindings_numbered(const binding_list *before, const map_step *step,
                                         const map_binding *after);

/* --- map_steps.c --- */

/* The step that undoes it. */
map_step map_step_inverse(const map_step *step);
/* Tensor `list` of the list behind step `number` of the rule; 0: before the first step. */
fsdp_status map_make(map_run *run, int number, int list, const map_binding *binding,
                     const fsdp_derived **out, fsdp_error *err);
/* The tensors that step `number`, which takes rows or parts, makes of one. */
fsdp_status map_count_parts(map_run *run, int number, const map_binding *binding, int64_t *count_out,
                            fsdp_error *err);

#endif
