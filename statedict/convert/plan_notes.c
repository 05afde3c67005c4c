/* The lists of an fsdp_convert_plan: see plan_notes.h. */
#include "statedict/convert/plan_notes.h"

#include "statedict/select/part_text.h"

#include <string.h>

static bool note_ties(fsdp_convert_plan *plan, const fsdp_ties *ties, fsdp_arena *arena)
{
    fsdp_convert_tie *list = fsdp_arena_alloc(arena, ties->count, sizeof *list);
    for (size_t i = 0; list && i < ties->count; i++) {
        list[i] = ties->items[i];
        list[i].dropped = fsdp_arena_strndup(arena, list[i].dropped, list[i].dropped_size);
        list[i].kept = fsdp_arena_strndup(arena, list[i].kept, list[i].kept_size);
        if (!list[i].dropped || !list[i].kept)
            return false;
    }
    plan->tied = list;
    plan->tied_count = list ? ties->count : 0;
    return list != NULL;
}

static bool note_copies(fsdp_convert_plan *plan, const fsdp_copies *copies, fsdp_arena *arena)
{
    fsdp_convert_copy *list = fsdp_arena_alloc(arena, copies->count, sizeof *list);
    for (size_t i = 0; list && i < copies->count; i++) {
        const char *name = fsdp_copies_name(copies, i), *change = fsdp_copies_change(copies, i);
        list[i] = (fsdp_convert_copy){fsdp_arena_strndup(arena, name, strlen(name)),
                                      fsdp_arena_strndup(arena, change, strlen(change))};
        if (!list[i].name || !list[i].change)
            return false;
    }
    plan->copied = list;
    plan->copied_count = list ? copies->count : 0;
    return list != NULL;
}

static bool note_kept(fsdp_convert_plan *plan, const fsdp_noted *noted, fsdp_arena *arena)
{
    bool *kept = fsdp_arena_alloc(arena, noted->count, sizeof *kept);
    for (size_t i = 0; kept && i < noted->count; i++) {
        const fsdp_selected *selected = fsdp_selection_at(noted->selection, i);
        kept[i] = selected->is_kept || (selected->is_tied && noted->notes_ties);
    }
    plan->kept = kept;
    plan->kept_count = kept ? noted->count : 0;
    return kept != NULL;
}

static const char *const *copy_list(const char *const *items, size_t count, fsdp_arena *arena)
{
    const char **list = fsdp_arena_alloc(arena, count, sizeof *list);
    for (size_t i = 0; list && i < count; i++) {
        list[i] = fsdp_arena_strndup(arena, items[i], strlen(items[i]));
        if (!list[i])
            return NULL;
    }
    return list;
}

static bool note_parts(fsdp_convert_plan *plan, const fsdp_part_text *parts, fsdp_arena *arena)
{
    if (parts->line.size > 0)
        plan->parts = fsdp_arena_strndup(arena, parts->line.data, parts->line.size);
    if (parts->other.size > 0)
        plan->other_part = fsdp_arena_strndup(arena, parts->other.data, parts->other.size);
    return (parts->line.size == 0 || plan->parts) && (parts->other.size == 0 || plan->other_part);
}

/* A copied file goes along. */
static bool note_unread(fsdp_convert_plan *plan, const fsdp_noted *noted, fsdp_arena *arena)
{
    const char **list = fsdp_arena_alloc(arena, noted->unread.count + 1, sizeof *list);
    size_t count = 0;
    for (size_t i = 0; list && i < noted->unread.count; i++) {
        const char *name = noted->unread.items[i];
        char *path = fsdp_path_join(noted->from, name);
        if (!path)
            return false;
        if (!noted->copies || !fsdp_copies_have(noted->copies, path))
            list[count++] = fsdp_arena_strndup(arena, name, strlen(name));
        fsdp_free(path);
        if (count > 0 && !list[count - 1])
            return false;
    }
    plan->unread = list;
    plan->unread_count = list ? count : 0;
    return list != NULL;
}

/* Rules of names, parts, and files that were not read. */
static bool note_names(fsdp_convert_plan *plan, const fsdp_noted *noted, fsdp_arena *arena)
{
    plan->renames = copy_list(noted->select->renames, noted->select->rename_count, arena);
    plan->rename_count = plan->renames ? noted->select->rename_count : 0;
    plan->strips = noted->strips;
    plan->added = copy_list((const char *const *)noted->added->items, noted->added->count, arena);
    plan->added_count = plan->added ? noted->added->count : 0;
    return plan->renames && plan->added && note_unread(plan, noted, arena) &&
           note_parts(plan, fsdp_selection_parts(noted->selection), arena);
}

/* The model that config.json describes. */
static bool note_model(fsdp_convert_plan *plan, const fsdp_export_report *model, fsdp_arena *arena)
{
    if (!model->model[0])
        return true;
    plan->model = fsdp_arena_strndup(arena, model->model, strlen(model->model));
    plan->model_tensors = model->expected;
    plan->model_missing = (int64_t)model->missing.count;
    plan->extra = copy_list((const char *const *)model->extra.items, model->extra.count, arena);
    plan->extra_count = plan->extra ? model->extra.count : 0;
    return plan->model && plan->extra;
}

fsdp_status fsdp_plan_note(fsdp_convert_plan *plan, const fsdp_noted *noted, fsdp_error *err)
{
    bool has_copies = noted->copies && noted->copies->count > 0;
    plan->memory = fsdp_alloc(1, sizeof(fsdp_arena));
    fsdp_arena *arena = plan->memory;
    if (arena && note_kept(plan, noted, arena) && note_names(plan, noted, arena) &&
        note_model(plan, &noted->model, arena) &&
        (noted->ties->count == 0 || note_ties(plan, noted->ties, arena)) &&
        (!has_copies || note_copies(plan, noted->copies, arena)))
        return FSDP_OK;
    return fsdp_fail_memory(err, "a plan");
}

fsdp_status fsdp_plan_note_metadata(fsdp_convert_plan *plan, const fsdp_text_pairs *left_out,
                                    fsdp_error *err)
{
    fsdp_arena *arena = plan->memory;
    const char **keys = fsdp_arena_alloc(arena, left_out->count, sizeof *keys);
    for (size_t i = 0; keys && i < left_out->count; i++) {
        char shown[160]; /* a key may hold NUL */
        const fsdp_text_pair *pair = &left_out->items[i];
        fsdp_printable(pair->key, pair->key_size, shown, sizeof shown);
        keys[i] = fsdp_arena_strndup(arena, shown, strlen(shown));
        if (!keys[i])
            return fsdp_fail_memory(err, "a plan");
    }
    plan->metadata = keys;
    plan->metadata_count = keys ? left_out->count : 0;
    return keys ? FSDP_OK : fsdp_fail_memory(err, "a plan");
}

void fsdp_plan_release(fsdp_convert_plan *plan)
{
    if (plan->memory)
        fsdp_arena_release(plan->memory);
    fsdp_free(plan->memory);
    plan->memory = NULL;
}
