/*
 * The notes of a plan: what a person may want to know of a conversion, or would not expect of its result, a
 * sentence each. The first half gathers names while they are at hand, the second makes the sentences. See
 * plan_notes.h.
 */
#include "statedict/convert/plan_notes.h"
#include "statedict/checkpoint/unread.h"
#include "statedict/checkpoint/verify_code.h"
#include "statedict/convert/convert_job.h"
#include "statedict/manifest/large_value.h"
#include "statedict/sd/names.h"

#include <inttypes.h>
#include <string.h>

enum { NAMES_SHOWN = 5, NOTES_MOST = FSDP_STAGES + FSDP_NOTE_KINDS + 2 };

/* --- gathering -------------------------------------------------------------------------------- */

/* Makes a list of at most `most` items that begins empty; NULL: memory is short. */
static fsdp_note_list *begin_list(fsdp_plan_facts *facts, fsdp_note_kind kind, size_t most,
                                  fsdp_arena *arena)
{
    fsdp_note_list *list = &facts->lists[kind];
    *list = (fsdp_note_list){.items = fsdp_arena_alloc(arena, most + 1, sizeof *list->items)};
    return list->items ? list : NULL;
}

static bool add_item(fsdp_note_list *list, fsdp_note_item item, fsdp_arena *arena)
{
    item.name = fsdp_arena_strndup(arena, item.name, item.name_size);
    if (item.other)
        item.other = fsdp_arena_strndup(arena, item.other, item.other_size);
    list->items[list->count++] = item;
    return item.name && (item.other_size == 0 || item.other);
}

static fsdp_note_item item_of(const char *name, const char *other)
{
    return (fsdp_note_item){.name = name,
                            .name_size = strlen(name),
                            .other = other,
                            .other_size = other ? strlen(other) : 0};
}

static bool add_names(fsdp_plan_facts *facts, fsdp_note_kind kind, const char *const *names,
                      size_t count, fsdp_arena *arena)
{
    fsdp_note_list *list = begin_list(facts, kind, count, arena);
    for (size_t i = 0; list && i < count; i++)
        if (!add_item(list, item_of(names[i], NULL), arena))
            return false;
    return list != NULL;
}

static bool add_ties(fsdp_plan_facts *facts, const fsdp_ties *ties, fsdp_arena *arena)
{
    fsdp_note_list *list = begin_list(facts, FSDP_NOTE_TIED, ties->count, arena);
    for (size_t i = 0; list && i < ties->count; i++) {
        const fsdp_convert_tie *tie = &ties->items[i];
        if (!add_item(list,
                      (fsdp_note_item){.name = tie->dropped,
                                       .name_size = tie->dropped_size,
                                       .other = tie->kept,
                                       .other_size = tie->kept_size},
                      arena))
            return false;
    }
    return list != NULL;
}

static bool add_copies(fsdp_plan_facts *facts, const fsdp_copies *copies, fsdp_arena *arena)
{
    fsdp_note_list *list = begin_list(facts, FSDP_NOTE_COPIED, copies->count, arena);
    for (size_t i = 0; list && i < copies->count; i++)
        if (!add_item(list, item_of(copies->files[i].name, copies->files[i].change), arena))
            return false;
    return list != NULL;
}

static bool is_copied_path(const fsdp_copies *copies, const char *path)
{
    for (size_t i = 0; i < copies->count; i++)
        if (copies->files[i].path && strcmp(copies->files[i].path, path) == 0)
            return true;
    return false;
}

/* Adds the weight files that are not read, but for those that are copied. */
static fsdp_status add_unread(convert_job *job, fsdp_arena *arena, fsdp_error *err)
{
    fsdp_name_list unread = {0};
    fsdp_status st = fsdp_unread_list(job->from, &unread, err);
    fsdp_note_list *list = begin_list(&job->facts, FSDP_NOTE_UNREAD, unread.count, arena);
    if (st == FSDP_OK && !list)
        st = fsdp_fail_memory(err, "a plan");
    for (size_t i = 0; i < unread.count && st == FSDP_OK; i++) {
        char *path = fsdp_path_join(job->from->path, unread.items[i]);
        bool is_copied = path && is_copied_path(&job->copies, path);
        if (!path || (!is_copied && !add_item(list, item_of(unread.items[i], NULL), arena)))
            st = fsdp_fail_memory(err, "a plan");
        fsdp_free(path);
    }
    fsdp_names_release(&unread);
    return st;
}

static bool add_missing(const fsdp_convert_plan *plan, convert_job *job, fsdp_arena *arena)
{
    size_t count = fsdp_checkpoint_missing_count(plan->source);
    fsdp_note_list *list = begin_list(&job->facts, FSDP_NOTE_MISSING, count, arena);
    for (size_t i = 0; list && i < count; i++) {
        fsdp_note_item item = {0};
        item.name = fsdp_checkpoint_missing_at(plan->source, i, &item.name_size);
        if (!add_item(list, item, arena))
            return false;
    }
    return list != NULL;
}

/* The parts as a line, and the weights among those that are left out. */
static bool add_parts(fsdp_plan_facts *facts, const fsdp_part_text *parts, fsdp_arena *arena)
{
    fsdp_note_list *list = begin_list(facts, FSDP_NOTE_LEFT_OUT, 1, arena);
    const char *other = parts->other.size > 0 ? parts->other.data : NULL;
    return list &&
           (parts->line.size == 0 || add_item(list, item_of(parts->line.data, other), arena));
}

static bool add_model(fsdp_plan_facts *facts, const fsdp_export_report *report, fsdp_arena *arena)
{
    fsdp_note_list *list = begin_list(facts, FSDP_NOTE_MODEL, 1, arena);
    fsdp_note_item model = item_of(report->model, NULL);
    model.number = (int64_t)report->missing.count;
    facts->model_tensors = report->expected;
    return list && (!report->model[0] ||
                    (add_item(list, model, arena) &&
                     add_names(facts, FSDP_NOTE_EXTRA, (const char *const *)report->extra.items,
                               report->extra.count, arena)));
}

static bool add_results(fsdp_convert_plan *plan, const convert_job *job,
                        const fsdp_selection *selection, fsdp_arena *arena)
{
    size_t count = fsdp_sd_count(job->from->manifest.sd) - job->added.count - job->target_entries;
    bool notes_ties = job->format->caps.notes_ties;
    fsdp_note_item *results = fsdp_arena_alloc(arena, count, sizeof *results);
    for (size_t i = 0; results && i < count; i++) {
        const fsdp_selected *selected = fsdp_selection_at(selection, i);
        if (!selected->is_kept && !(selected->is_tied && notes_ties))
            continue;
        results[i].name = fsdp_arena_strndup(arena, selected->name, selected->name_size);
        results[i].name_size = selected->name_size;
        if (!results[i].name)
            return false;
    }
    plan->results = results;
    plan->result_count = results ? count : 0;
    return results != NULL;
}

/* --- code ------------------------------------------------------------------------------------- */

/*
 * Values, and copied files, that a program runs code for when it loads them: objects of classes outside the
 * evaluated list of the pickle reader. A target gets them only with opts.opaque copy, and the plan names
 * each.
 */

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

static fsdp_status add_code(code_list *list, code_name name, int64_t bytes, const char *class_name,
                            fsdp_error *err)
{
    fsdp_text shown = {0};
    const fsdp_note_item item = {.name = name.name,
                                 .name_size = name.size,
                                 .other = class_name,
                                 .other_size = strlen(class_name),
                                 .number = bytes};
    fsdp_text_add(&shown, name.from, name.from_size);
    fsdp_text_addf(&shown, " (%s)", class_name);
    bool is_whole = add_item(list->list, item, list->arena) && !shown.failed &&
                    fsdp_names_add(&list->names, shown.data, shown.size);
    fsdp_text_release(&shown);
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
        st = add_code(
            list, (code_name){selected->name, entry->name, selected->name_size, entry->name_size},
            (int64_t)fsdp_value_bytes(&entry->value), classes.data, err);
    fsdp_text_release(&classes);
    return st;
}

/* A file that is copied as it is. */
static fsdp_status check_copy(code_list *list, const fsdp_copied_file *file, fsdp_error *err)
{
    if (!file->code || !file->path)
        return FSDP_OK;
    size_t size = strlen(file->name);
    return add_code(list, (code_name){file->name, file->name, size, size}, file->size, file->code,
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

/* Notes the values that are code; FSDP_ERR_USAGE when there are some and the options do not copy them. */
static fsdp_status note_code(fsdp_convert_plan *plan, convert_job *job,
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
        st = check_copy(&list, &job->copies.files[i], err);
    if (st == FSDP_OK && found->count > 0 && job->opts.opaque != FSDP_OPAQUE_COPY)
        st = fail_code(&list, err);
    fsdp_names_release(&list.names);
    return st;
}

/* --- what the selection does ------------------------------------------------------------------ */

fsdp_status fsdp_plan_note_selected(fsdp_convert_plan *plan, convert_job *job,
                                    const fsdp_selection *selection,
                                    const fsdp_export_report *report, fsdp_error *err)
{
    fsdp_plan_facts *facts = &job->facts;
    const fsdp_select_opts *select = &job->opts.select;
    fsdp_arena *arena = plan->memory = fsdp_alloc(1, sizeof *arena);
    if (arena && add_results(plan, job, selection, arena) &&
        add_names(facts, FSDP_NOTE_RENAMED, select->renames, select->rename_count, arena) &&
        add_names(facts, FSDP_NOTE_ADDED, (const char *const *)job->added.items, job->added.count,
                  arena) &&
        add_parts(facts, fsdp_selection_parts(selection), arena) &&
        add_model(facts, report, arena) && add_ties(facts, &job->ties, arena) &&
        add_copies(facts, &job->copies, arena) && add_missing(plan, job, arena)) {
        FSDP_TRY(add_unread(job, arena, err));
        return note_code(plan, job, selection, err);
    }
    return fsdp_fail_memory(err, "a plan");
}

/* --- sentences -------------------------------------------------------------------------------- */

typedef struct noting {
    const convert_job *job;
    const fsdp_plan_facts *facts;
    const fsdp_convert_plan *plan;
    const fsdp_note_list *list; /* of the kind at hand */
    fsdp_text *text;
} noting;

static const char *plural(int64_t count)
{
    return count == 1 ? "" : "s";
}

static const fsdp_caps *caps_of(const noting *note)
{
    return &note->job->format->caps;
}

static void add_name(fsdp_text *text, const char *name, size_t size)
{
    char shown[160];
    fsdp_text_addf(text, "%s", fsdp_printable(name, size, shown, sizeof shown));
}

/* Adds "a, b, c, d, e and 3 more"; `between` and `after` put the other name of an item in: "a (the same as
 * b)". */
static void add_list(const noting *note, const char *between, const char *after)
{
    const fsdp_note_list *list = note->list;
    for (size_t i = 0; i < list->count; i++) {
        if (i == NAMES_SHOWN) {
            fsdp_text_addf(note->text, " and %zu more", list->count - i);
            return;
        }
        fsdp_text_addf(note->text, i > 0 ? ", " : "");
        add_name(note->text, list->items[i].name, list->items[i].name_size);
        if (!between)
            continue;
        fsdp_text_addf(note->text, "%s", between);
        add_name(note->text, list->items[i].other, list->items[i].other_size);
        fsdp_text_addf(note->text, "%s", after);
    }
}

/* Each returns what the note counts; there is none when that is 0. */

static int64_t tell_mapped(const noting *note)
{
    return note->facts->is_mapped;
}

static int64_t tell_encoded(const noting *note)
{
    return note->facts->encoded;
}

static int64_t tell_unmapped(const noting *note)
{
    const fsdp_plan_facts *facts = note->facts;
    if (!facts->map[0] || facts->is_mapped)
        return 0;
    if (strcmp(facts->map, "hub") == 0)
        fsdp_text_addf(note->text,
                       "names are those that transformers has in memory, which version 5 "
                       "loads; --names hub gives those that it saves, which vLLM, "
                       "SGLang and llama.cpp load");
    else
        fsdp_text_addf(note->text,
                       "names of %s stay; use --copy-from with the directory of the model's "
                       "config.json, or --map %s, to get those of %s",
                       facts->map_from, facts->map, facts->map_to);
    return 1;
}

static const char root_rule[] = "s/^";

/* Adds "model." of the rule s/^model\.//, "module." of s/(^|\.)(module\.)+/\1/g, and "optimizer." of
 * s/^optimizer\.(state|param_groups)\./optim.\1./ */
static void add_taken_away(fsdp_text *text, const char *rule)
{
    static const char wrapper[] = "s/(^|\\.)(";
    bool is_wrapper = strncmp(rule, wrapper, sizeof wrapper - 1) == 0;
    fsdp_text taken = {0};
    const char *at = rule + (is_wrapper ? sizeof wrapper : sizeof root_rule) - 1;
    for (; *at && !strchr(is_wrapper ? ")" : "(/", *at); at++) {
        at += *at == '\\' && at[1];
        fsdp_text_add(&taken, at, 1);
    }
    text->failed |= taken.failed;
    if (taken.data)
        fsdp_text_add_message(text, taken.data);
    fsdp_text_release(&taken);
}

/* Returns false for the rule of an optimizer that has no names before its own, which takes nothing away. */
static bool takes_away(const char *rule)
{
    return strncmp(rule, root_rule, sizeof root_rule - 1) != 0 || rule[sizeof root_rule - 1] != '(';
}

static bool strips(const noting *note)
{
    return note->job->rule_list != NULL;
}

/* "strip 'model.' and 'module.' from 29 names (--names keep leaves them)" */
static int64_t tell_stripped(const noting *note)
{
    int64_t renamed = note->facts->selected.renamed;
    size_t count = note->list->count; /* a rule of the optimizer is the last */
    if (!strips(note) || renamed == 0)
        return 0;
    count -= count > 0 && !takes_away(note->list->items[count - 1].name);
    fsdp_text_addf(note->text, count > 0 ? "strip" : "put 'optim.' before");
    for (size_t i = 0; i < count; i++) {
        const char *between = i + 1 == count ? " and" : ",";
        fsdp_text_addf(note->text, "%s '", i > 0 ? between : "");
        add_taken_away(note->text, note->list->items[i].name);
        fsdp_text_addf(note->text, "'");
    }
    fsdp_text_addf(note->text, "%s %" PRId64 " name%s (--names keep leaves them)",
                   count > 0 ? " from" : "", renamed, plural(renamed));
    return renamed;
}

static int64_t tell_renamed(const noting *note)
{
    int64_t renamed = strips(note) ? 0 : note->facts->selected.renamed;
    if (renamed > 0)
        fsdp_text_addf(note->text, "rename %" PRId64 " name%s", renamed, plural(renamed));
    return renamed;
}

static int64_t tell_left_out(const noting *note)
{
    int64_t left_out = note->facts->selected.left_out;
    bool is_optim = note->job->opts.select.only == FSDP_ONLY_OPTIM;
    if (left_out > 0 && note->list->count > 0 && !is_optim) {
        const fsdp_note_item *parts = note->list->items;
        fsdp_text_addf(note->text, "%s (", parts->name);
        if (parts->other) {
            fsdp_text_addf(note->text, "--part");
            fsdp_text_add_argument(note->text, parts->other);
            fsdp_text_addf(note->text, " takes those weights, ");
        }
        fsdp_text_addf(note->text, "--only all everything)");
    } else if (left_out > 0) {
        fsdp_text_addf(note->text,
                       "%" PRId64 " %s of the %s left out (--only all takes everything)", left_out,
                       left_out == 1 ? "entry" : "entries", is_optim ? "model" : "optimizer");
    }
    return left_out;
}

static int64_t tell_dropped(const noting *note)
{
    int64_t dropped = note->facts->selected.dropped;
    if (dropped > 0)
        fsdp_text_addf(note->text, "%" PRId64 " dropped (--drop)", dropped);
    return dropped;
}

static int64_t tell_casts(const noting *note)
{
    const fsdp_selection_counts *selected = &note->facts->selected;
    if (selected->cast == 0)
        return 0;
    fsdp_text_addf(note->text, "cast %" PRId64 " tensor%s: ", selected->cast,
                   plural(selected->cast));
    for (size_t i = 0; i < note->list->count; i++) {
        const fsdp_note_item *pair = &note->list->items[i];
        fsdp_text_addf(note->text, "%s%" PRId64 " %s -> %s", i > 0 ? ", " : "", pair->number,
                       pair->name, pair->other);
    }
    if (selected->optim_uncast > 0)
        fsdp_text_addf(note->text, "; %" PRId64 " of the optimizer stay%s (--dtype-for casts them)",
                       selected->optim_uncast, selected->optim_uncast == 1 ? "s" : "");
    return selected->cast;
}

static void list_code(const noting *note, size_t count)
{
    char number[32];
    for (size_t i = 0; i < count; i++) {
        const fsdp_note_item *code = &note->list->items[i];
        fsdp_text_addf(note->text, i > 0 ? "\nobject " : "object ");
        add_name(note->text, code->name, code->name_size);
        fsdp_text_addf(note->text, " (%s, %s) runs code when loaded", code->other,
                       fsdp_spell_bytes(code->number, number, sizeof number));
    }
}

static void tell_code(const noting *note, size_t count)
{
    fsdp_text_addf(note->text, "%zu object%s when %s loaded: ", count,
                   count == 1 ? " runs code" : "s run code", count == 1 ? "it is" : "they are");
    add_list(note, " (", ")");
}

static void list_ties(const noting *note, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const fsdp_note_item *tie = &note->list->items[i];
        if (i == NAMES_SHOWN) {
            fsdp_text_addf(note->text, "\nand %zu more", count - i);
            break;
        }
        fsdp_text_addf(note->text, i > 0 ? "\ndrop " : "drop ");
        add_name(note->text, tie->name, tie->name_size);
        fsdp_text_addf(note->text, " (alias of ");
        add_name(note->text, tie->other, tie->other_size);
        fsdp_text_addf(note->text, ")");
    }
}

static void tell_ties(const noting *note, size_t count)
{
    fsdp_text_addf(note->text, "%zu tied name%s left out%s: ", count, count == 1 ? " is" : "s are",
                   caps_of(note)->notes_ties ? " and noted beside the tensor" : "");
    add_list(note, " (the same as ", ")");
}

static void tell_copied(const noting *note, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const fsdp_note_item *file = &note->list->items[i];
        fsdp_text_addf(note->text, i > 0 ? ", " : "copy ");
        add_name(note->text, file->name, file->name_size);
        if (file->other_size > 0)
            fsdp_text_addf(note->text, " (%s)", file->other);
    }
}

static int64_t tell_model(const noting *note)
{
    int64_t tensors = note->facts->model_tensors;
    const fsdp_note_item *model = note->list->items;
    if (note->list->count == 0)
        return 0;
    fsdp_text_addf(note->text, "config.json describes a %s: ", model->name);
    if (model->number > 0)
        fsdp_text_addf(note->text, "%" PRId64 " of %" PRId64 " tensors are missing, as allowed",
                       model->number, tensors);
    else
        fsdp_text_addf(note->text, "all %" PRId64 " tensors are there", tensors);
    return tensors;
}

static void tell_extra(const noting *note, size_t count)
{
    fsdp_text_addf(note->text, "%zu tensor%s no part of the %s that config.json describes: ", count,
                   count == 1 ? " is" : "s are", note->facts->lists[FSDP_NOTE_MODEL].items->name);
    add_list(note, NULL, NULL);
}

static void tell_unread(const noting *note, size_t count)
{
    static const char adapter[] = "adapter_model.";
    const char *from = fsdp_checkpoint_describe(note->plan->source)->path;
    fsdp_text_addf(note->text, "%zu weight file%s of '", count, count == 1 ? "" : "s");
    fsdp_text_add_message(note->text, from);
    fsdp_text_addf(note->text, "' %s not read: ", count == 1 ? "is" : "are");
    add_list(note, NULL, NULL);
    bool has_adapter = false;
    for (size_t i = 0; i < count; i++)
        has_adapter |= strncmp(note->list->items[i].name, adapter, sizeof adapter - 1) == 0;
    if (has_adapter && !note->job->opts.adapter) {
        fsdp_text_addf(note->text, "; --adapter");
        fsdp_text_add_path_argument(note->text, from);
        fsdp_text_addf(note->text, " merges the adapter");
    }
}

static void tell_missing(const noting *note, size_t count)
{
    fsdp_text_addf(note->text, "%zu incomplete %s left out: ", count,
                   count == 1 ? "entry is" : "entries are");
    add_list(note, NULL, NULL);
}

static int64_t tell_form(const noting *note)
{
    bool is_flat = note->facts->optim_form == FSDP_OPTIM_FORM_FLAT;
    if (!note->facts->optim_form)
        return 0;
    fsdp_text_addf(
        note->text, "hyper-parameters %s, as PyTorch's get_optimizer_state_dict has them%s",
        is_flat ? "flat" : "nested", is_flat ? " with flatten_optimizer_state_dict" : "");
    if (note->facts->optim_named > 0)
        fsdp_text_addf(note->text, "; %" PRId64 " parameters that the optimizer numbers get names",
                       note->facts->optim_named);
    return 1;
}

static int64_t tell_numbered(const noting *note)
{
    return note->facts->optim_named;
}

static int64_t tell_tokenizer(const noting *note)
{
    if (note->facts->has_tiktoken)
        fsdp_text_addf(note->text,
                       "tokenizer.model is a list of tiktoken, which lacks the special tokens, and "
                       "llama.cpp runs no model without a tokenizer; take config.json and "
                       "tokenizer.json from a directory with --copy-from DIR");
    else if (note->facts->lacks_tokenizer)
        fsdp_text_addf(
            note->text,
            "no tokenizer (tokenizer.json, tokenizer.model, spiece.model) is next to config.json, "
            "and llama.cpp runs "
            "no model without a tokenizer; take one from a directory with --copy-from DIR");
    return note->facts->lacks_tokenizer;
}

static int64_t tell_rounded(const noting *note)
{
    int64_t rounded = note->facts->rounded;
    if (rounded > 0)
        fsdp_text_addf(note->text,
                       "%" PRId64
                       " weight%s left out: DeepSpeed's stage 1 stores frozen weights in "
                       "the rounded model alone, which is not read",
                       rounded, plural(rounded));
    return rounded;
}

static int64_t tell_tuples(const noting *note)
{
    int64_t count = note->facts->in_tuples;
    if (count > 0)
        fsdp_text_addf(note->text,
                       "%" PRId64 " tensor%s in tuples: dcp stores %s in lists, as PyTorch does",
                       count, count == 1 ? " is" : "s are", count == 1 ? "it" : "them");
    return count;
}

/* DCP is what trainers leave, and mostly without the configuration that a loader asks for. */
static int64_t tell_config(const noting *note)
{
    const fsdp_convert_opts *opts = &note->job->opts;
    const fsdp_note_list *copied = &note->facts->lists[FSDP_NOTE_COPIED];
    const char *format = fsdp_checkpoint_describe(note->plan->source)->format;
    bool lacks_config = fsdp_format_from(format)->caps.without_config;
    if (!caps_of(note)->for_loaders || !lacks_config || opts->copy_from || opts->skip_copies ||
        opts->select.only == FSDP_ONLY_OPTIM)
        return 0;
    for (size_t i = 0; i < copied->count; i++)
        if (strcmp(copied->items[i].name, "config.json") == 0)
            return 0;
    fsdp_text_addf(note->text, "config.json is missing, which loaders of the result need; take it "
                               "and the tokenizer from the model's directory with --copy-from DIR");
    return 1;
}

static void tell_metadata(const noting *note, size_t count)
{
    fsdp_text_addf(note->text, "%zu text%s of the source's metadata %s left out, ", count,
                   count == 1 ? "" : "s", count == 1 ? "is" : "are");
    if (caps_of(note)->metadata)
        fsdp_text_addf(note->text, "hashes of bytes that change: ");
    else
        fsdp_text_addf(note->text, "since %s has none: ", note->job->format->name);
    add_list(note, NULL, NULL);
}

/* Other programs make one file of such a name. */
static int64_t tell_directory(const noting *note)
{
    if (!caps_of(note)->for_loaders || !fsdp_has_suffix(note->job->to, ".ckpt"))
        return 0;
    fsdp_text_addf(note->text, "'");
    fsdp_text_add_message(note->text, note->job->to);
    fsdp_text_addf(note->text, "' becomes a directory that Hugging Face loads; --to torch writes a "
                               "file of that name, as torch.save does");
    return 1;
}

static void tell_added(const noting *note, size_t count)
{
    fsdp_text_addf(note->text, "%zu tied name%s added, since PyTorch's loaders ask for %s: ", count,
                   count == 1 ? " is" : "s are", count == 1 ? "it" : "them");
    add_list(note, NULL, NULL);
}

static int64_t tell_quantized(const noting *note)
{
    int64_t count = note->facts->selected.quantized, known = note->facts->selected.quantized_known;
    if (count == 0)
        return 0;
    fsdp_text_addf(note->text,
                   "%" PRId64 " weight%s stay%s quantized: --dtype %s does not apply the scales of "
                   "integers",
                   count, plural(count), count == 1 ? "s" : "", note->job->opts.select.dtype);
    if (known == count)
        fsdp_text_addf(note->text, ", --dequant bf16 does");
    else if (known > 0)
        fsdp_text_addf(note->text, ", --dequant bf16 applies %" PRId64 " of them", known);
    return count;
}

static int64_t tell_short(const noting *note)
{
    int64_t count = note->facts->short_tensors;
    if (count > 0)
        fsdp_text_addf(note->text,
                       "%" PRId64 " of %" PRId64 " tensors %s no dim %d and %s cut along dim 0",
                       count, note->plan->tensors, count == 1 ? "has" : "have",
                       note->job->opts.shard_dim, count == 1 ? "is" : "are");
    return count;
}

/* Names of hf are stripped already, and those of a universal checkpoint are the engine's. */
static int64_t tell_prefix(const noting *note)
{
    const char *prefix = note->facts->selected.prefix;
    const fsdp_caps *caps = caps_of(note);
    if (!prefix[0] || caps->for_loaders || caps->plain_names || caps->has_kinds)
        return 0;
    fsdp_text_addf(note->text, "all names of the model begin with '%s'; --rename 's/^", prefix);
    for (const char *c = prefix; *c; c++)
        fsdp_text_addf(note->text, *c == '.' ? "\\%c" : "%c", *c);
    fsdp_text_addf(note->text, "//' strips it");
    return 1;
}

/* --- the notes -------------------------------------------------------------------------------- */

static const struct {
    fsdp_note_kind kind;
    fsdp_note_level level;
    int64_t (*tell)(const noting *note);            /* returns the count; 0: nothing to say */
    void (*list)(const noting *note, size_t count); /* or: says the items, where there are some */
} table[] = {
    {FSDP_NOTE_MAPPED, FSDP_NOTE_LINE, .tell = tell_mapped},
    {FSDP_NOTE_UNMAPPED, FSDP_NOTE_SAID, .tell = tell_unmapped},
    {FSDP_NOTE_ENCODED, FSDP_NOTE_LINE, .tell = tell_encoded},
    {FSDP_NOTE_RENAMED, FSDP_NOTE_SAID, .tell = tell_stripped},
    {FSDP_NOTE_RENAMED, FSDP_NOTE_LINE, .tell = tell_renamed},
    {FSDP_NOTE_LEFT_OUT, FSDP_NOTE_LINE, .tell = tell_left_out},
    {FSDP_NOTE_DROPPED, FSDP_NOTE_LINE, .tell = tell_dropped},
    {FSDP_NOTE_CAST, FSDP_NOTE_LINE, .tell = tell_casts},
    {FSDP_NOTE_CODE, FSDP_NOTE_LINE, .list = list_code},
    {FSDP_NOTE_CODE, FSDP_NOTE_IN_SHORT, .list = tell_code},
    {FSDP_NOTE_TIED, FSDP_NOTE_LINE, .list = list_ties},
    {FSDP_NOTE_TIED, FSDP_NOTE_IN_SHORT, .list = tell_ties},
    {FSDP_NOTE_COPIED, FSDP_NOTE_LINE, .list = tell_copied},
    {FSDP_NOTE_MODEL, FSDP_NOTE_LINE, .tell = tell_model},
    {FSDP_NOTE_EXTRA, FSDP_NOTE_SAID, .list = tell_extra},
    {FSDP_NOTE_UNREAD, FSDP_NOTE_SAID, .list = tell_unread},
    {FSDP_NOTE_MISSING, FSDP_NOTE_SAID, .list = tell_missing},
    {FSDP_NOTE_OPTIM, FSDP_NOTE_SAID, .tell = tell_form},
    {FSDP_NOTE_NUMBERED, FSDP_NOTE_LINE, .tell = tell_numbered},
    {FSDP_NOTE_TOKENIZER, FSDP_NOTE_SAID, .tell = tell_tokenizer},
    {FSDP_NOTE_ROUNDED, FSDP_NOTE_SAID, .tell = tell_rounded},
    {FSDP_NOTE_TUPLES, FSDP_NOTE_SAID, .tell = tell_tuples},
    {FSDP_NOTE_CONFIG, FSDP_NOTE_SAID, .tell = tell_config},
    {FSDP_NOTE_METADATA, FSDP_NOTE_SAID, .list = tell_metadata},
    {FSDP_NOTE_DIRECTORY, FSDP_NOTE_SAID, .tell = tell_directory},
    {FSDP_NOTE_ADDED, FSDP_NOTE_SAID, .list = tell_added},
    {FSDP_NOTE_QUANTIZED, FSDP_NOTE_SAID, .tell = tell_quantized},
    {FSDP_NOTE_SHORT, FSDP_NOTE_SAID, .tell = tell_short},
    {FSDP_NOTE_PREFIX, FSDP_NOTE_LINE, .tell = tell_prefix},
};

/* Lists what is known as numbers and words until now. */
static bool add_late_lists(fsdp_plan_facts *facts, fsdp_arena *arena)
{
    fsdp_note_list *casts = begin_list(facts, FSDP_NOTE_CAST, FSDP_CAST_PAIRS, arena);
    fsdp_note_list *form = begin_list(facts, FSDP_NOTE_OPTIM, 1, arena);
    fsdp_note_kind map = facts->is_mapped ? FSDP_NOTE_MAPPED : FSDP_NOTE_UNMAPPED;
    fsdp_note_list *maps = begin_list(facts, map, 1, arena);
    if (!casts || !form || !maps)
        return false;
    for (int i = 0; i < facts->selected.cast_pairs; i++) {
        const fsdp_cast_pair *pair = &facts->selected.casts[i];
        fsdp_note_item item = item_of(fsdp_dtype_name(pair->from), fsdp_dtype_name(pair->to));
        item.number = pair->tensors;
        if (!add_item(casts, item, arena))
            return false;
    }
    const char *word = facts->optim_form == FSDP_OPTIM_FORM_FLAT ? "flat" : "nested";
    return (!facts->optim_form || add_item(form, item_of(word, NULL), arena)) &&
           (!facts->map[0] || add_item(maps, item_of(facts->map, facts->map_to), arena));
}

/* The keys of metadata that are left out. */
static bool add_metadata(fsdp_plan_facts *facts, const fsdp_text_pairs *left_out, fsdp_arena *arena)
{
    fsdp_note_list *list = begin_list(facts, FSDP_NOTE_METADATA, left_out->count, arena);
    for (size_t i = 0; list && i < left_out->count; i++) {
        char shown[160]; /* a key may hold NUL */
        const fsdp_text_pair *pair = &left_out->items[i];
        fsdp_printable(pair->key, pair->key_size, shown, sizeof shown);
        if (!add_item(list, item_of(shown, NULL), arena))
            return false;
    }
    return list != NULL;
}

/* Returns false when memory is short. */
static bool add_note(fsdp_convert_plan *plan, fsdp_convert_note note, const fsdp_text *text)
{
    fsdp_arena *arena = plan->memory;
    fsdp_convert_note *notes = (fsdp_convert_note *)(uintptr_t)plan->notes;
    note.text = fsdp_arena_strndup(arena, text->size > 0 ? text->data : "", text->size);
    notes[plan->note_count++] = note;
    return note.text && !text->failed;
}

static bool add_stages(fsdp_convert_plan *plan, const fsdp_plan_facts *facts)
{
    fsdp_note_item *items = fsdp_arena_alloc(plan->memory, FSDP_STAGES, sizeof *items);
    bool is_whole = items != NULL;
    for (int i = 0; i < facts->stage_count && is_whole; i++) {
        fsdp_text text = {0};
        items[i] = item_of(facts->stages[i].name, NULL);
        fsdp_text_addf(&text, "%s", facts->stages[i].text);
        is_whole = add_note(plan,
                            (fsdp_convert_note){.kind = FSDP_NOTE_STAGE,
                                                .level = FSDP_NOTE_LINE,
                                                .count = 1,
                                                .items = &items[i],
                                                .item_count = 1},
                            &text);
        fsdp_text_release(&text);
    }
    return is_whole;
}

static bool add_told(fsdp_convert_plan *plan, const convert_job *job, size_t i)
{
    fsdp_text text = {0};
    noting note = {.job = job,
                   .facts = &job->facts,
                   .plan = plan,
                   .list = &job->facts.lists[table[i].kind],
                   .text = &text};
    int64_t count = table[i].list ? (int64_t)note.list->count : table[i].tell(&note);
    if (table[i].list && count > 0)
        table[i].list(&note, note.list->count);
    bool is_whole = count == 0 || add_note(plan,
                                           (fsdp_convert_note){.kind = table[i].kind,
                                                               .level = table[i].level,
                                                               .count = count,
                                                               .items = note.list->items,
                                                               .item_count = note.list->count},
                                           &text);
    fsdp_text_release(&text);
    return is_whole;
}

fsdp_status fsdp_plan_note(fsdp_convert_plan *plan, convert_job *job, fsdp_error *err)
{
    plan->notes = fsdp_arena_alloc(plan->memory, NOTES_MOST, sizeof *plan->notes);
    bool is_whole = plan->notes &&
                    add_metadata(&job->facts, &job->metadata.left_out, plan->memory) &&
                    add_late_lists(&job->facts, plan->memory) && add_stages(plan, &job->facts);
    for (size_t i = 0; i < sizeof table / sizeof *table && is_whole; i++)
        is_whole = add_told(plan, job, i);
    return is_whole ? FSDP_OK : fsdp_fail_memory(err, "a plan");
}
