/*
 * Applies a map to a checkpoint: finds the bindings of each rule's variables among the names, follows them
 * through the rule's steps, and makes a derived tensor for each name of the other side. See map.h.
 */
#include "statedict/map/map_run.h"

#include "base/data/value_internal.h"

#include <inttypes.h>
#include <string.h>

/* --- bindings of a rule ------------------------------------------------------------------------------- */

/* A stacked variable counts from 0 without gaps; that of a first tensor may have any numbers. */
static fsdp_status merge_numbers(map_run *run, int number, fsdp_error *err)
{
    const map_step *step = &run->steps[number];
    const binding_list *before = &run->bindings[number];
    binding_list *after = &run->bindings[number + 1];
    for (size_t i = 0; i < before->count; i++) {
        map_binding one = before->items[i], previous = one;
        if (one.values[step->variable] < 0)
            return fsdp_fail(err, FSDP_ERR_USAGE, "no name has {%s}, whose tensors become one",
                             run->rule->variables.names[step->variable]);
        if (step->verb != MAP_FIRST && previous.values[step->variable]-- > 0 &&
            !map_bindings_have(before, &previous))
            return fsdp_fail(err, FSDP_ERR_USAGE, "number %" PRId64 " of {%s} is missing",
                             previous.values[step->variable],
                             run->rule->variables.names[step->variable]);
        one.values[step->variable] = -1;
        FSDP_TRY(map_bindings_add(after, &one, err));
    }
    map_bindings_sort(after);
    return FSDP_OK;
}

enum { PARTS_MOST = 1 << 20 };

static fsdp_status spread_numbers(map_run *run, int number, fsdp_error *err)
{
    const binding_list *before = &run->bindings[number];
    int64_t count = 0;
    for (size_t i = 0; i < before->count; i++) {
        map_binding one = before->items[i];
        FSDP_TRY(map_count_parts(run, number, &one, &count, err));
        if (count > PARTS_MOST - (int64_t)run->bindings[number + 1].count)
            return fsdp_fail(err, FSDP_ERR_LIMIT, "a rule makes more than %d tensors", PARTS_MOST);
        for (int64_t k = 0; k < count; k++) {
            one.values[run->steps[number].variable] = k;
            FSDP_TRY(map_bindings_add(&run->bindings[number + 1], &one, err));
        }
    }
    map_bindings_sort(&run->bindings[number + 1]);
    return FSDP_OK;
}

static fsdp_status copy_bindings(map_run *run, int number, fsdp_error *err)
{
    for (size_t i = 0; i < run->bindings[number].count; i++)
        FSDP_TRY(
            map_bindings_add(&run->bindings[number + 1], &run->bindings[number].items[i], err));
    return FSDP_OK;
}

/* Tensors for which the first one stands are taken, too. */
static fsdp_status take_all(map_run *run, int number, fsdp_error *err)
{
    const fsdp_derived *ignored;
    for (size_t i = 0; i < run->bindings[number].count; i++)
        for (int list = 0; list < run->lists[number]; list++)
            FSDP_TRY(map_make(run, number, list, &run->bindings[number].items[i], &ignored, err));
    return FSDP_OK;
}

/* --- numbers of several variables ------------------------------------------------------------------- */

/* The variables of a line "numbered" that a step counts, by their names there. False: it lacks one. */
static bool find_counted(const map_run *run, const map_step *step, const map_numbered *numbered,
                         int found[MAP_COUNTED])
{
    for (int i = 0; i < step->counted_count; i++) {
        const char *name = run->rule->variables.names[step->counted[i]];
        found[i] = -1;
        for (int k = 0; k < numbered->variables.count; k++)
            if (strcmp(numbered->variables.names[k], name) == 0)
                found[i] = k;
        if (found[i] < 0)
            return false;
    }
    return true;
}

/* The line by which a step counts; NULL: it counts the names of its rule. */
static const map_numbered *find_numbered(const map_run *run, const map_step *step,
                                         int found[MAP_COUNTED])
{
    for (size_t i = 0; i < run->map->numbered_count; i++)
        if (find_counted(run, step, &run->map->numbered[i], found))
            return &run->map->numbered[i];
    return NULL;
}

static fsdp_status count_all(map_run *run, int number, const map_numbered *numbered,
                             const int found[MAP_COUNTED], fsdp_error *err)
{
    const map_step *step = &run->steps[number];
    map_binding there, here = {0};
    for (size_t i = 0; i < fsdp_sd_count(run->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(run->sd, i);
        if (entry->kind == FSDP_ENTRY_VALUE ||
            !map_pattern_matches(&numbered->name, entry->name, entry->name_size, &there))
            continue;
        for (int k = 0; k < step->counted_count; k++)
            here.values[step->counted[k]] = there.values[found[k]];
        map_binding key = map_counted_key(step, &here, true);
        FSDP_TRY(map_bindings_add(&run->counted[number], &key, err));
    }
    return FSDP_OK;
}

/* Adds the keys of the bindings before the step. */
static fsdp_status add_keys(map_run *run, int number, bool counts_all, fsdp_error *err)
{
    const binding_list *before = &run->bindings[number];
    for (size_t i = 0; i < before->count; i++) {
        map_binding key = map_counted_key(&run->steps[number], &before->items[i], counts_all);
        FSDP_TRY(map_bindings_add(&run->counted[number], &key, err));
    }
    map_bindings_sort(&run->counted[number]);
    return FSDP_OK;
}

/* The values of several variables become one number. */
static fsdp_status number_values(map_run *run, int number, fsdp_error *err)
{
    const map_step *step = &run->steps[number];
    const binding_list *before = &run->bindings[number];
    binding_list *counted = &run->counted[number];
    int found[MAP_COUNTED];
    const map_numbered *numbered = find_numbered(run, step, found);
    bool all = run->counts_all[number] = numbered != NULL;
    counted->count = 0;
    if (numbered)
        FSDP_TRY(count_all(run, number, numbered, found, err));
    FSDP_TRY(add_keys(run, number, all, err));
    for (size_t i = 0; i < before->count; i++) {
        map_binding one = before->items[i], key = map_counted_key(step, &one, all);
        for (int k = 0; k < step->counted_count; k++)
            one.values[step->counted[k]] = -1;
        one.values[step->variable] = map_counted_number(counted, step, &key);
        FSDP_TRY(map_bindings_add(&run->bindings[number + 1], &one, err));
    }
    map_bindings_sort(&run->bindings[number + 1]);
    return FSDP_OK;
}

/* Bindings and the length of the list after step `number`. */
static fsdp_status follow_step(map_run *run, int number, fsdp_error *err)
{
    const map_step *step = &run->steps[number];
    map_verb verb = step->verb;
    run->lists[number + 1] = verb == MAP_CONCAT  ? 1
                             : verb != MAP_SPLIT ? run->lists[number]
                             : step->size_count  ? step->size_count
                                                 : run->to_count;
    if (verb == MAP_FIRST) {
        run->counted[number].count = 0;
        FSDP_TRY(add_keys(run, number, false, err));
        FSDP_TRY(take_all(run, number, err));
    }
    if (verb == MAP_STACK || verb == MAP_GATHER || verb == MAP_FIRST)
        return merge_numbers(run, number, err);
    if (verb == MAP_NUMBER)
        return number_values(run, number, err);
    if (verb == MAP_UNSTACK || verb == MAP_SCATTER)
        return spread_numbers(run, number, err);
    return copy_bindings(run, number, err);
}

/* Names of tensors that match the first pattern of the rule. */
static fsdp_status find_bindings(map_run *run, fsdp_error *err)
{
    map_binding binding;
    for (size_t i = 0; i < fsdp_sd_count(run->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(run->sd, i);
        if (entry->kind != FSDP_ENTRY_VALUE && !run->is_taken[i] &&
            map_pattern_matches(&run->from[0], entry->name, entry->name_size, &binding))
            FSDP_TRY(map_bindings_add(&run->bindings[0], &binding, err));
    }
    map_bindings_sort(&run->bindings[0]);
    return FSDP_OK;
}

/* --- a rule ------------------------------------------------------------------------------------------- */

static void choose_rule(map_run *run, const map_rule *rule, bool from_right)
{
    int count = rule->step_count;
    run->rule = rule;
    run->to_right = !from_right;
    run->from = from_right ? rule->right : rule->left;
    run->to = from_right ? rule->left : rule->right;
    run->from_count = from_right ? rule->right_count : rule->left_count;
    run->to_count = from_right ? rule->left_count : rule->right_count;
    for (int i = 0; i < count; i++)
        run->steps[i] = from_right ? map_step_inverse(&rule->steps[count - 1 - i]) : rule->steps[i];
    run->lists[0] = run->from_count;
    for (int i = 0; i <= MAP_STEPS; i++)
        run->bindings[i].count = 0;
}

/* Does the other side keep this name of a tensor that has another name there, too? */
static bool keeps_tied(const map_run *run, const char *name)
{
    for (size_t i = 0; i < run->map->tied_count && !run->sizes.call->keeps_tied; i++)
        if (run->map->tied[i].is_right == run->to_right &&
            strcmp(run->map->tied[i].name, name) == 0)
            return false;
    return true;
}

static fsdp_status add_tensor(map_run *run, int number, const map_binding *binding, fsdp_error *err)
{
    const fsdp_derived *tensor = NULL;
    fsdp_text name = {0};
    FSDP_TRY(map_make(run, run->rule->step_count, number, binding, &tensor, err));
    bool is_known = map_pattern_render(&run->to[number], binding, &name);
    fsdp_status st = FSDP_OK;
    if (name.failed)
        st = fsdp_fail_memory(err, "a name");
    else if (!is_known)
        st =
            fsdp_fail(err, FSDP_ERR_USAGE, "a variable of '%s' has no value", run->to[number].text);
    else
        st = fsdp_derivation_add_tied(run->derivation, (fsdp_derived_name){name.data, name.size},
                                      tensor, keeps_tied(run, name.data), err);
    fsdp_text_release(&name);
    return st;
}

/* A rule that gives every tensor another name, whatever its "{rest:*}" is. */
static fsdp_status rename_rest(map_run *run, fsdp_error *err)
{
    map_binding binding;
    for (size_t i = 0; i < fsdp_sd_count(run->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(run->sd, i);
        fsdp_text name = {0};
        if (entry->kind == FSDP_ENTRY_VALUE || run->is_taken[i] ||
            !map_pattern_matches(&run->from[0], entry->name, entry->name_size, &binding))
            continue;
        bool is_known = map_pattern_render(&run->to[0], &binding, &name);
        fsdp_status st = name.failed ? fsdp_fail_memory(err, "a name")
                         : is_known
                             ? fsdp_derivation_rename(run->derivation, i,
                                                      (fsdp_derived_name){name.data, name.size},
                                                      keeps_tied(run, name.data), err)
                             : fsdp_fail(err, FSDP_ERR_USAGE, "a variable of '%s' has no value",
                                         run->to[0].text);
        fsdp_text_release(&name);
        FSDP_TRY(st);
        run->is_taken[i] = true;
    }
    return FSDP_OK;
}

static void leave_out(map_run *run)
{
    map_binding binding;
    for (size_t i = 0; i < fsdp_sd_count(run->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(run->sd, i);
        for (int k = 0; k < run->from_count && !run->is_taken[i]; k++)
            run->is_taken[i] =
                map_pattern_matches(&run->from[k], entry->name, entry->name_size, &binding);
    }
}

static fsdp_status apply_rule(map_run *run, fsdp_error *err)
{
    int steps = run->rule->step_count;
    if (run->to_count == 0) {
        leave_out(run);
        return FSDP_OK;
    }
    if (run->rule->has_rest)
        return rename_rest(run, err);
    FSDP_TRY(find_bindings(run, err));
    if (run->bindings[0].count == 0)
        return FSDP_OK;
    for (int i = 0; i < steps; i++)
        FSDP_TRY(follow_step(run, i, err));
    if (run->lists[steps] != run->to_count)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "the steps make %d tensors, but the other side has %d names",
                         run->lists[steps], run->to_count);
    for (size_t i = 0; i < run->bindings[steps].count; i++)
        for (int k = 0; k < run->to_count; k++)
            FSDP_TRY(add_tensor(run, k, &run->bindings[steps].items[i], err));
    return FSDP_OK;
}

/* --- the whole ---------------------------------------------------------------------------------------- */

static bool holds(const map_rule *rule, bool from_right)
{
    return (rule->directions & (from_right ? MAP_TO_LEFT : MAP_TO_RIGHT)) != 0;
}

/* True when a rule takes the name, less the key of root_size bytes that its patterns begin with. */
static bool takes_below(const fsdp_map *map, bool from_right, const char *name, size_t size,
                        size_t root_size)
{
    map_binding binding;
    for (size_t i = 0; i < map->rule_count; i++) {
        const map_rule *rule = map->rules[i];
        const map_pattern *from = from_right ? rule->right : rule->left;
        int count = from_right ? rule->right_count : rule->left_count;
        for (int k = 0; holds(rule, from_right) && k < count; k++) {
            map_pattern below;
            const map_pattern *pattern = &from[k];
            if (pattern->pieces[0].text_size < root_size)
                continue;
            if (root_size > 0) { /* seldom: a pattern is large */
                below = *pattern;
                below.pieces[0].text += root_size;
                below.pieces[0].text_size -= root_size;
                pattern = &below;
            }
            if (map_pattern_matches(pattern, name, size, &binding))
                return true;
        }
    }
    return false;
}

static bool takes(const fsdp_map *map, bool from_right, const fsdp_entry *entry)
{
    return takes_below(map, from_right, entry->name, entry->name_size, 0);
}

bool fsdp_map_takes_moment(const fsdp_map *map, bool from_right, const fsdp_entry *entry,
                           size_t root_size)
{
    static const char state[] = "state.";
    const size_t size = sizeof state - 1;
    size_t end = takes(map, from_right, entry) ? 0 : entry->name_size;
    while (end > 0 && entry->name[end - 1] != '.')
        end--;
    for (size_t at = 0; at + size < end; at++) /* another key may end in the word, too */
        if ((at == 0 || entry->name[at - 1] == '.') && memcmp(entry->name + at, state, size) == 0 &&
            takes_below(map, from_right, entry->name + at + size, end - 1 - at - size, root_size))
            return true;
    return false;
}

static bool may_stay(const fsdp_map *map, const fsdp_map_call *call, const fsdp_entry *entry)
{
    return map->keeps_others || (call->may_stay && call->may_stay(call->context, entry));
}

fsdp_map_match fsdp_map_compare(const fsdp_map *map, bool from_right, const fsdp_sd *sd,
                                const fsdp_map_call *call)
{
    fsdp_map_match match = {0};
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (entry->kind == FSDP_ENTRY_VALUE)
            continue;
        bool taken = takes(map, from_right, entry);
        match.taken += taken;
        match.left_over += !taken && !may_stay(map, call, entry);
    }
    return match;
}

/* Values of the other layout mean nothing in one that has values of its own. */
static bool has_own_values(const fsdp_map *map, bool right)
{
    for (size_t i = 0; i < map->number_count; i++)
        if (map->numbers[i].is_right == right)
            return true;
    return strcmp(fsdp_map_layout(map, right), "gguf") == 0;
}

/* Values that the side has, unless the other one brings them. */
static fsdp_status add_values(map_run *run, bool right, fsdp_error *err)
{
    for (size_t i = 0; i < run->map->number_count; i++) {
        const map_number *number = &run->map->numbers[i];
        fsdp_value value = fsdp_value_i64(0);
        bool is_there = run->map->value_count > 0 &&
                        fsdp_sd_find(run->sd, number->name, strlen(number->name)) >= 0;
        if (number->is_right != right || is_there)
            continue;
        fsdp_status st = map_sizes_compute(&run->sizes, number->expression, &value.as.i64, err);
        if (st != FSDP_OK) {
            fsdp_error_prefix(err, "%s, line %d, '%s'", run->map->path, number->line, number->name);
            return st;
        }
        FSDP_TRY(fsdp_derivation_add_value(
            run->derivation, (fsdp_derived_name){number->name, strlen(number->name)}, &value, err));
    }
    return FSDP_OK;
}

/* "values LEFT* = RIGHT*": the beginning of a value's name, and the one that replaces it. NULL: none. */
static const char *find_beginning(const map_run *run, const fsdp_entry *entry, bool from_right,
                                  const char **other_out)
{
    for (size_t i = 0; i < run->map->value_count; i++) {
        const char *from = run->map->values[i][from_right];
        size_t size = strlen(from);
        *other_out = run->map->values[i][!from_right];
        if (entry->name_size >= size && memcmp(entry->name, from, size) == 0)
            return from;
    }
    return NULL;
}

/* A value stays, or gets the name of the other side, where the map has lines for values. An object can only
 * keep its name. */
static fsdp_status keep_value(map_run *run, size_t number, bool from_right, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(run->sd, number);
    const char *other, *from = find_beginning(run, entry, from_right, &other);
    fsdp_text name = {0};
    if (run->map->value_count == 0)
        return fsdp_derivation_keep(run->derivation, number, err);
    if (!from || (strcmp(from, other) != 0 && fsdp_value_is_opaque(&entry->value)))
        return FSDP_OK;
    size_t size = strlen(from);
    fsdp_text_addf(&name, "%s", other);
    fsdp_text_add(&name, entry->name + size, entry->name_size - size);
    fsdp_status st = name.failed
                         ? fsdp_fail_memory(err, "a name")
                         : fsdp_derivation_keep_as(run->derivation, number,
                                                   (fsdp_derived_name){name.data, name.size}, err);
    fsdp_text_release(&name);
    return st;
}

/* Values stay; so do tensors that no rule takes and that may. */
static fsdp_status keep_others(map_run *run, bool from_right, const fsdp_map_call *call,
                               fsdp_error *err)
{
    enum { SHOWN = 3 };
    fsdp_text names = {0};
    size_t count = 0;
    char shown[200];
    bool drops_values = run->map->value_count == 0 &&
                        (has_own_values(run->map, false) || has_own_values(run->map, true));
    for (size_t i = 0; i < fsdp_sd_count(run->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(run->sd, i);
        if (run->is_taken[i] || (entry->kind == FSDP_ENTRY_VALUE && drops_values))
            continue;
        if (entry->kind == FSDP_ENTRY_VALUE) {
            FSDP_TRY(keep_value(run, i, from_right, err));
        } else if (may_stay(run->map, call, entry)) {
            FSDP_TRY(fsdp_derivation_keep(run->derivation, i, err));
        } else if (count++ < SHOWN) {
            fsdp_text_addf(&names, "%s'%s'", count > 1 ? ", " : "",
                           fsdp_printable(entry->name, entry->name_size, shown, sizeof shown));
        }
    }
    if (count > 0)
        (void)fsdp_fail(err, FSDP_ERR_USAGE,
                        "no rule of the map '%s' takes %.*s%s; --drop REGEX leaves "
                        "out what is not needed",
                        run->map->name, (int)names.size, names.data ? names.data : "",
                        count > SHOWN ? " and more" : "");
    fsdp_text_release(&names);
    return count > 0 ? FSDP_ERR_USAGE : FSDP_OK;
}

static fsdp_status apply_rules(map_run *run, bool from_right, fsdp_error *err)
{
    for (size_t i = 0; i < run->map->rule_count; i++) {
        const map_rule *rule = run->map->rules[i];
        if (!holds(rule, from_right))
            continue;
        choose_rule(run, rule, from_right);
        fsdp_status st = apply_rule(run, err);
        if (st != FSDP_OK) {
            fsdp_error_prefix(err, "%s, line %d, '%s'", run->map->path, rule->line,
                              run->from[0].text);
            return st;
        }
    }
    return FSDP_OK;
}

static void release(map_run *run)
{
    for (int i = 0; i <= MAP_STEPS; i++)
        fsdp_free(run->bindings[i].items);
    for (int i = 0; i < MAP_STEPS; i++)
        fsdp_free(run->counted[i].items);
    fsdp_free(run->is_taken);
    fsdp_free(run);
}

/* The files that decide about the result, besides the checkpoint's own. */
static fsdp_status note_files(map_run *run, const fsdp_map_call *call, fsdp_error *err)
{
    FSDP_TRY(
        fsdp_derivation_note_file(run->derivation, call->config ? call->config->path : NULL, err));
    return fsdp_derivation_note_file(run->derivation, run->map->is_file ? run->map->path : NULL,
                                     err);
}

static fsdp_status derive(map_run *run, bool from_right, const fsdp_map_call *call, fsdp_error *err)
{
    FSDP_TRY(note_files(run, call, err));
    run->is_taken = fsdp_alloc(fsdp_sd_count(run->sd), sizeof *run->is_taken);
    if (!run->is_taken)
        return fsdp_fail_memory(err, "a map");
    FSDP_TRY(apply_rules(run, from_right, err));
    FSDP_TRY(add_values(run, !from_right, err));
    return keep_others(run, from_right, call, err);
}

fsdp_status fsdp_map_apply(const fsdp_map *map, bool from_right, const fsdp_map_call *call,
                           fsdp_checkpoint **checkpoint, fsdp_error *err)
{
    fsdp_checkpoint *base = *checkpoint;
    map_run *run = fsdp_alloc(1, sizeof *run);
    *checkpoint = NULL;
    if (!run) {
        fsdp_checkpoint_close(base);
        return fsdp_fail_memory(err, "a map");
    }
    run->map = map;
    run->sd = base->manifest.sd;
    run->sizes =
        (map_sizes){map->sizes, map->size_count, call, base->manifest.sd, run->size_values};
    fsdp_status st = fsdp_derivation_begin(base, &run->derivation, err);
    if (st == FSDP_OK) {
        run->arena = fsdp_derivation_arena(run->derivation);
        st = derive(run, from_right, call, err);
        if (st == FSDP_OK)
            st = fsdp_derivation_finish(run->derivation, checkpoint, err);
        else
            fsdp_derivation_cancel(run->derivation);
    }
    release(run);
    return st;
}
