/* Lists of bindings, the values of a rule's variables: see map_run.h. */
#include "statedict/map/map_run.h"

#include <stdlib.h>
#include <string.h>

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

/* --- numbers of several variables together ---------------------------------------------------------- */

static bool is_counted(const map_step *step, int variable)
{
    for (int i = 0; i < step->counted_count; i++)
        if (step->counted[i] == variable)
            return true;
    return false;
}

map_binding map_counted_key(const map_step *step, const map_binding *binding, bool counts_all)
{
    map_binding key;
    int at = 0;
    for (int i = 0; i < MAP_VARIABLES; i++)
        if (!is_counted(step, i))
            key.values[at++] = i == step->variable || counts_all ? -1 : binding->values[i];
    for (int i = 0; i < step->counted_count; i++)
        key.values[at++] = binding->values[step->counted[i]];
    return key;
}

/* The first of the sorted keys that is not less. */
static size_t lower_bound(const binding_list *keys, const map_binding *key)
{
    size_t low = 0, high = keys->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (compare_bindings(&keys->items[middle], key) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The place of number 0 next to the key. */
static size_t first_place(const binding_list *keys, const map_step *step, map_binding key)
{
    for (int i = MAP_VARIABLES - step->counted_count; i < MAP_VARIABLES; i++)
        key.values[i] = -1;
    return lower_bound(keys, &key);
}

int64_t map_counted_number(const binding_list *keys, const map_step *step, const map_binding *key)
{
    return (int64_t)(lower_bound(keys, key) - first_place(keys, step, *key));
}

bool map_counted_find(const binding_list *keys, const map_step *step, int64_t number,
                      map_binding *key)
{
    size_t place = first_place(keys, step, *key) + (size_t)number;
    size_t apart = (size_t)(MAP_VARIABLES - step->counted_count) * sizeof *key->values;
    if (place >= keys->count || memcmp(keys->items[place].values, key->values, apart) != 0)
        return false;
    *key = keys->items[place];
    return true;
}
