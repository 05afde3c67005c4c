/*
 * Values, and copied files, that a program runs code for when it loads them: objects of classes outside the
 * evaluated list of the pickle reader. A target gets them only with opts.opaque copy, and the plan names
 * each. See plan_notes.h.
 */
#include "statedict/checkpoint/verify_code.h"
#include "statedict/convert/convert_job.h"
#include "statedict/manifest/large_value.h"
#include "statedict/sd/names.h"

#include <string.h>

typedef struct code_list {
    const fsdp_sd *sd; /* of the source */
    const fsdp_selection *selection;
    fsdp_arena *arena;
    fsdp_note_list *list;
    fsdp_name_list names; /* for the message */
    bool has_tensors;     /* of subclasses, which --drop opaque keeps */
} code_list;

/* A value: its name in the result, and in the source for messages; or a copied file. */
typedef struct code_name {
    const char *name, *from;
    size_t size, from_size;
} code_name;

static fsdp_status add_item(code_list *list, code_name name, int64_t bytes, const char *class_name,
                            fsdp_error *err)
{
    fsdp_text shown = {0};
    size_t size = strlen(class_name);
    fsdp_note_item item = {.name = fsdp_arena_strndup(list->arena, name.name, name.size),
                           .name_size = name.size,
                           .other = fsdp_arena_strndup(list->arena, class_name, size),
                           .other_size = size,
                           .number = bytes};
    fsdp_text_add(&shown, name.from, name.from_size);
    fsdp_text_addf(&shown, " (%s)", class_name);
    bool is_whole = item.name && item.other && !shown.failed &&
                    fsdp_names_add(&list->names, shown.data, shown.size);
    fsdp_text_release(&shown);
    list->list->items[list->list->count++] = item;
    return is_whole ? FSDP_OK : fsdp_fail_memory(err, "a plan");
}

static fsdp_status check_entry(code_list *list, size_t i, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(list->sd, i);
    const fsdp_selected *selected = fsdp_selection_at(list->selection, i);
    fsdp_text classes = {0};
    if (!selected->is_kept || entry->kind != FSDP_ENTRY_VALUE)
        return FSDP_OK;
    fsdp_status st = fsdp_value_code(&entry->value, &classes, err);
    if (st != FSDP_OK) {
        char name[160];
        fsdp_error_prefix(err, "'%s'",
                          fsdp_printable(entry->name, entry->name_size, name, sizeof name));
    }
    fsdp_text_add(&classes, "", 1);
    if (st == FSDP_OK && classes.failed)
        st = fsdp_fail_memory(err, "a plan");
    list->has_tensors = list->has_tensors || (classes.size > 1 && selected->kind);
    if (st == FSDP_OK && classes.size > 1)
        st = add_item(
            list, (code_name){selected->name, entry->name, selected->name_size, entry->name_size},
            (int64_t)fsdp_value_bytes(&entry->value), classes.data, err);
    fsdp_text_release(&classes);
    return st;
}

/* A file that is copied as it is. */
static fsdp_status check_copy(code_list *list, const fsdp_copies *copies, size_t i, fsdp_error *err)
{
    fsdp_file_info info;
    const char *name = fsdp_copies_name(copies, i), *code = fsdp_copies_code(copies, i);
    if (!code || !fsdp_copies_path(copies, i, &info))
        return FSDP_OK;
    return add_item(list, (code_name){name, name, strlen(name), strlen(name)}, info.size, code,
                    err);
}

static bool holds_tensor(const code_list *list)
{
    for (size_t i = 0; i < fsdp_sd_count(list->sd); i++)
        if (fsdp_selection_at(list->selection, i)->is_kept &&
            fsdp_sd_at(list->sd, i)->kind != FSDP_ENTRY_VALUE)
            return true;
    return false;
}

/* Names no command by which nothing is converted. */
static fsdp_status fail_code(const code_list *list, fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_text_addf(&text, "the result would run code when it is loaded");
    (void)fsdp_names_append(&list->names, list->list->count == 1 ? "object" : "objects", &text);
    if (holds_tensor(list))
        fsdp_text_addf(&text, "; copy with --opaque copy");
    else
        fsdp_text_addf(&text,
                       "; there is no tensor to convert; list what the source holds with fsdp-ls");
    if (!list->has_tensors && fsdp_selection_has_weights(list->selection, list->sd))
        fsdp_text_addf(&text, "; leave out with --drop opaque");
    fsdp_status st = text.failed ? fsdp_fail_memory(err, "a message")
                                 : fsdp_fail(err, FSDP_ERR_USAGE, "%s", text.data);
    fsdp_text_release(&text);
    return st;
}

fsdp_status fsdp_plan_note_code(fsdp_convert_plan *plan, convert_job *job,
                                const fsdp_selection *selection, fsdp_error *err)
{
    fsdp_note_list *found = &job->facts.lists[FSDP_NOTE_CODE];
    code_list list = {
        .sd = job->from->manifest.sd, .selection = selection, .arena = plan->memory, .list = found};
    size_t count = fsdp_sd_count(list.sd);
    found->items = fsdp_arena_alloc(list.arena, count + job->copies.count, sizeof *found->items);
    fsdp_status st = found->items ? FSDP_OK : fsdp_fail_memory(err, "a plan");
    for (size_t i = 0; i < count && st == FSDP_OK; i++)
        st = check_entry(&list, i, err);
    for (size_t i = 0; i < job->copies.count && st == FSDP_OK; i++)
        st = check_copy(&list, &job->copies, i, err);
    if (st == FSDP_OK && found->count > 0 && job->opts.opaque != FSDP_OPAQUE_COPY)
        st = fail_code(&list, err);
    fsdp_names_release(&list.names);
    return st;
}
