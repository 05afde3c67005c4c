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
    map_size_value size_values[MAP_SIZES];
    const fsdp_sd *sd; /* of the base */
    fsdp_derivation *derivation;
    fsdp_arena *arena;
    bool *is_taken; /* per entry of the base */
    int64_t made;   /* tensors of steps, which lists of lists would multiply without end */

    /* the rule that is applied */
    const map_rule *rule;
    const map_pattern *from, *to;
    int from_count, to_count;
    bool to_right;
    map_step steps[MAP_STEPS]; /* in the order of this direction */
    int lists[MAP_STEPS + 1];  /* tensors in the list before each step, and after the last */
    binding_list bindings[MAP_STEPS + 1]; /* likewise */
    binding_list counted[MAP_STEPS]; /* of a step with counted variables: the keys of its bindings */
    bool counts_all[MAP_STEPS];      /* they are those of a line "numbered" */
} map_run;

/* --- map_bindings.c --- */

fsdp_status map_bindings_add(binding_list *list, const map_binding *binding, fsdp_error *err);
/* Sorts, and keeps one of equal ones. */
void map_bindings_sort(binding_list *list);
bool map_bindings_have(const binding_list *list, const map_binding *binding);
/* Counts the numbers of a variable, from 0 on, in the bindings that are equal but for it. */
int64_t map_bindings_count(const binding_list *list, const map_binding *binding, int variable);

/* A step that numbers counts keys, which are bindings in another order: first the values of the other
 * variables, which keep counts apart unless it counts all, then those that it counts, in its order. */
map_binding map_counted_key(const map_step *step, const map_binding *binding, bool counts_all);
/* The number of a key among the sorted keys that are not apart from it; and the key of a number, where *key
 * has the values of the other variables. False: there is none. */
int64_t map_counted_number(const binding_list *keys, const map_step *step, const map_binding *key);
bool map_counted_find(const binding_list *keys, const map_step *step, int64_t number, map_binding *key);

/* --- map_steps.c --- */

/* The step that undoes it. */
map_step map_step_inverse(const map_step *step);
/* Tensor `list` of the list after step `number` of the rule; 0: before the first step. */
fsdp_status map_make(map_run *run, int number, int list, const map_binding *binding,
                     const fsdp_derived **out, fsdp_error *err);
/* The tensors that step `number`, which takes rows or parts, makes of one. */
fsdp_status map_count_parts(map_run *run, int number, const map_binding *binding, int64_t *count_out,
                            fsdp_error *err);

#endif
