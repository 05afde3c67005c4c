/* Lists of bindings, the values of a rule's variables: see map_run.h. */
#include "statedict/map/map_run.h"

#include <stdlib.h>

static int compare_bindings(const void *a, const void *b)
{
    const map_binding *x = a, *y = b;
    for (int i = 0; i < MAP_VARIABLES; i++)
        if (x->values[i] != y->values[i])
            return x->values[i] < y->values[i] ? -1 : 1;
    return 0;
}

fsdp_status map_bindings_add(binding_list *list, const map_binding *binding, fsdp_error *err)
{
    if (!fsdp_grow(&list->items, &list->room, list->count + 1, sizeof *list->items))
        return fsdp_fail_memory(err, "a map");
    list->items[list->count++] = *binding;
    return FSDP_OK;
}

void map_bindings_sort(binding_list *list)
{
    size_t kept = 0;
    if (list->count == 0)
        return;
    qsort(list->items, list->count, sizeof *list->items, compare_bindings);
    for (size_t i = 1; i < list->count; i++)
        if (compare_bindings(&list->items[kept], &list->items[i]) != 0)
            list->items[++kept] = list->items[i];
    list->count = kept + 1;
}

bool map_bindings_have(const binding_list *list, const map_binding *binding)
{
    return list->count > 0 && bsearch(binding, list->items, list->count, sizeof *list->items,
                                      compare_bindings) != NULL;
}

int64_t map_bindings_count(const binding_list *list, const map_binding *binding, int variable)
{
    map_binding next = *binding;
    for (next.values[variable] = 0; map_bindings_have(list, &next); next.values[variable]++)
        ;
    return next.values[variable];
}

bool map_bindings_are_beside(const map_binding *a, const map_binding *b, const map_step *step)
{
    for (int i = 0; i < MAP_VARIABLES; i++)
        if (i != step->variable && i != step->pair[0] && i != step->pair[1] &&
            a->values[i] != b->values[i])
            return false;
    return true;
}

const map_binding *map_bindings_numbered(const binding_list *before, const map_step *step,
                                         const map_binding *after)
{
    int64_t left = after->values[step->variable];
    for (size_t i = 0; i < before->count; i++)
        if (map_bindings_are_beside(&before->items[i], after, step) && left-- == 0)
            return &before->items[i];
    return NULL;
}
