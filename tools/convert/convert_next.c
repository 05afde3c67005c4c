/*
 * The line "next": the command of fsdp-diff that finds source and result equal after a correct conversion.
 * What the result lacks is excluded by the shortest branches of names; the patterns are tried on the names
 * of the source, and a line that would be wrong or longer than people read is not printed. See
 * convert_tool.h.
 */
#include "tools/convert/convert_tool.h"
#include "base/text.h"

#include <fsdp/filter.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PATTERN_MOST = 4000, BRANCHES_MOST = 200 }; /* fsdp-diff takes no longer ones */

typedef struct next_line {
    const convert_options *opts;
    const fsdp_convert_plan *plan;
    bool joins_numbers;    /* branches that differ in numbers are one: "[0-9]+" */
    bool by_taken;         /* names what is in the result (-I), not what is not (-X) */
    fsdp_text typed;       /* -X: patterns that were typed, and what the target makes */
    fsdp_text branches;    /* "|model\.lm_head|optim|" */
    const fsdp_sd *result; /* to look for lists and dicts; NULL: all keep their names */
    size_t begun[BRANCHES_MOST], sizes[BRANCHES_MOST], count; /* indices of entries */
    bool failed;
} next_line;

const fsdp_convert_note *convert_find_note(const fsdp_convert_plan *plan, fsdp_note_kind kind)
{
    for (size_t i = 0; plan && i < plan->note_count; i++)
        if (plan->notes[i].kind == kind)
            return &plan->notes[i];
    return NULL;
}

static const fsdp_convert_note *note_of(const next_line *next, fsdp_note_kind kind)
{
    return convert_find_note(next->plan, kind);
}

static bool is_below(const fsdp_entry *entry, const char *name, size_t size)
{
    return entry->name_size >= size && memcmp(entry->name, name, size) == 0 &&
           (entry->name_size == size || entry->name[size] == '.');
}

/* Returns the size of a name without the numbers at its end: lists in one list are regrouped together. */
static size_t group_size(const fsdp_entry *entry)
{
    size_t size = entry->name_size, at = size;
    while (at > 0 && entry->name[at - 1] >= '0' && entry->name[at - 1] <= '9') {
        at--;
        if (at > 1 && at < size && entry->name[at - 1] == '.')
            size = --at;
    }
    return size;
}

static const fsdp_entry *entry_at(const next_line *next, size_t i)
{
    return fsdp_sd_at(next->plan->sd, i);
}

static bool is_group(const fsdp_entry *entry)
{
    fsdp_value_kind kind = entry->value.kind;
    return entry->kind == FSDP_ENTRY_VALUE && (kind == FSDP_VALUE_LIST || kind == FSDP_VALUE_DICT);
}

/* Returns true for a list or dict that the target split into one name per value, or joined. */
static bool is_regrouped(const next_line *next, size_t i)
{
    const fsdp_entry *entry = entry_at(next, i);
    return next->result && next->plan->kept[i] && is_group(entry) &&
           fsdp_sd_find(next->result, entry->name, entry->name_size) < 0;
}

static bool is_named(const next_line *next, size_t i)
{
    bool is_left = !next->plan->kept[i] || is_regrouped(next, i);
    return is_left != next->by_taken;
}

/* Returns the size of the largest branch of an entry in which all entries are named. */
static size_t branch_size(const next_line *next, const fsdp_entry *entry)
{
    for (size_t size = 1; size < entry->name_size; size++) {
        bool is_free = entry->name[size] == '.';
        for (size_t i = 0; is_free && i < next->plan->kept_count; i++)
            is_free = is_named(next, i) || !is_below(entry_at(next, i), entry->name, size);
        if (is_free)
            return size;
    }
    return entry->name_size;
}

static void add_literal(fsdp_text *text, const char *name, size_t size, bool joins_numbers)
{
    for (size_t i = 0; i < size; i++) {
        if (joins_numbers && name[i] >= '0' && name[i] <= '9') {
            while (i + 1 < size && name[i + 1] >= '0' && name[i + 1] <= '9')
                i++;
            fsdp_text_addf(text, "[0-9]+");
            continue;
        }
        text->failed = text->failed || name[i] == '\0';
        fsdp_text_addf(text, strchr(".[]()*+?{}|^$\\", name[i]) ? "\\%c" : "%c", name[i]);
    }
}

/* Adds the branch of entry `at`, unless an earlier one has it. */
static void add_branch(next_line *next, size_t at)
{
    const fsdp_entry *entry = entry_at(next, at);
    fsdp_text one = {0};
    for (size_t i = 0; i < next->count; i++)
        if (is_below(entry, entry_at(next, next->begun[i])->name, next->sizes[i]))
            return;
    if (next->count == BRANCHES_MOST || next->branches.size > PATTERN_MOST) {
        next->failed = true;
        return;
    }
    size_t size = is_regrouped(next, at) ? group_size(entry) : branch_size(next, entry);
    next->begun[next->count] = at;
    next->sizes[next->count++] = size;
    fsdp_text_addf(&one, "|");
    add_literal(&one, entry->name, size, next->joins_numbers);
    fsdp_text_addf(&one, "|");
    if (!next->branches.data)
        fsdp_text_add(&next->branches, one.data, one.size);
    else if (!strstr(next->branches.data, one.data))
        fsdp_text_add(&next->branches, one.data + 1, one.size - 1);
    next->failed = next->failed || one.failed || next->branches.failed;
    fsdp_text_release(&one);
}

/* --- patterns --------------------------------------------------------------------------------- */

static void add_typed(next_line *next, const char *pattern)
{
    if (pattern)
        fsdp_text_addf(&next->typed, "%s%s", next->typed.size > 0 ? "|" : "", pattern);
}

static bool is_metadata(const char *drop)
{
    return strncmp(drop, "metadata", 8) == 0 && strchr(":", drop[8]);
}

static bool is_word(const char *drop)
{
    return is_metadata(drop) || strcmp(drop, "values") == 0 || strcmp(drop, "opaque") == 0 ||
           strcmp(drop, "optim") == 0 || strncmp(drop, "dtype:", 6) == 0 ||
           strncmp(drop, "tensors:", 8) == 0;
}

/* Adds what was typed, and names that the conversion changes or adds. */
static void add_known(next_line *next)
{
    const fsdp_select_opts *select = &next->opts->convert.select;
    const fsdp_convert_note *added = note_of(next, FSDP_NOTE_ADDED);
    add_typed(next, select->exclude);
    add_typed(next, note_of(next, FSDP_NOTE_OPTIM) ? "(^|\\.)param_groups(\\.|$)" : NULL);
    add_typed(next, note_of(next, FSDP_NOTE_NUMBERED) ? "(^|\\.)opt[^.]*\\.state\\." : NULL);
    for (size_t i = 0; added && i < added->item_count; i++) {
        add_typed(next, "(^|\\.)"); /* --under and renames put more before */
        add_literal(&next->typed, added->items[i].name, added->items[i].name_size, false);
        fsdp_text_addf(&next->typed, "$");
    }
    for (size_t i = 0; i < select->drop_count; i++)
        add_typed(next, is_word(select->drops[i]) ? NULL : select->drops[i]);
}

/* Adds values that writers make, after the names were tried: a checkpoint of Megatron has objects, a
 * universal one is of one rank, and texts next to the tensors may be lost. */
static void add_made(next_line *next)
{
    const fsdp_select_opts *select = &next->opts->convert.select;
    const fsdp_convert_note *mapped = note_of(next, FSDP_NOTE_MAPPED);
    bool is_lost = note_of(next, FSDP_NOTE_METADATA) != NULL;
    for (size_t i = 0; i < select->drop_count; i++)
        is_lost = is_lost || is_metadata(select->drops[i]);
    const fsdp_format *target = convert_target(next->opts);
    const fsdp_format *framework = mapped ? fsdp_format_to(mapped->items[0].other) : NULL;
    if (framework && framework->caps.adds_objects)
        add_typed(next, framework->makes);
    else if (!target->caps.adds_objects)
        add_typed(next, target->makes);
    add_typed(next, is_lost ? "^__metadata__\\." : NULL);
}

/* Returns true for a value that has other names in the result, and for its neighbours. */
static bool is_near_group(const next_line *next, const fsdp_entry *entry)
{
    for (size_t i = 0; i < next->count; i++)
        if (is_regrouped(next, next->begun[i]) &&
            is_below(entry, entry_at(next, next->begun[i])->name, next->sizes[i]))
            return true;
    return false;
}

/* Makes the patterns, and tries them on all names: the entries of the result and no others are compared. */
static bool find_names(next_line *next)
{
    const char *include = next->opts->convert.select.include;
    fsdp_filter *typed = NULL, *whole = NULL;
    if (!next->by_taken)
        add_known(next);
    if (fsdp_filter_create(include, next->typed.data, &typed, NULL) != FSDP_OK)
        return false;
    for (size_t i = 0; i < next->plan->kept_count && !next->failed; i++) {
        const fsdp_entry *entry = entry_at(next, i);
        if (is_named(next, i) && fsdp_filter_selects(typed, entry->name, entry->name_size))
            add_branch(next, i);
    }
    if (next->branches.size > 0)
        fsdp_text_addf(&next->typed, "%s^(%.*s)(\\.|$)", next->typed.size > 0 ? "|" : "",
                       (int)next->branches.size - 2, next->branches.data + 1);
    const char *pattern = next->typed.data;
    bool is_exact = !next->failed && !next->typed.failed && next->typed.size <= PATTERN_MOST &&
                    fsdp_filter_create(next->by_taken ? pattern : include,
                                       next->by_taken ? NULL : pattern, &whole, NULL) == FSDP_OK;
    for (size_t i = 0; i < next->plan->kept_count && is_exact; i++) {
        const fsdp_entry *entry = entry_at(next, i);
        bool is_left = !fsdp_filter_selects(typed, entry->name, entry->name_size);
        bool is_compared = fsdp_filter_selects(whole, entry->name, entry->name_size);
        is_exact = (is_left && !next->by_taken) || is_compared == next->plan->kept[i] ||
                   is_near_group(next, entry);
    }
    fsdp_filter_free(typed);
    fsdp_filter_free(whole);
    return is_exact;
}

/* --- the line --------------------------------------------------------------------------------- */

/* Adds an option with the number rounded up to one digit. The smallest numbers have powers of ten that a
 * double does not have, so every digit is tried. */
static void add_bound(fsdp_text *text, const char *option, double number)
{
    char spelled[40];
    int exponent = (int)floor(log10(number)), digit = 1;
    do
        snprintf(spelled, sizeof spelled, "%de%d", digit < 10 ? digit : 1,
                 digit < 10 ? exponent : exponent + 1);
    while (strtod(spelled, NULL) < number && digit++ < 10);
    fsdp_text_addf(text, " %s %s", option, spelled);
}

/* fsdp-diff compares with the new value: |new - old| / |new| may be larger than with the old one, but, as
 * rounding moves by half a step at most, no more than a half. */
static void add_tolerance(fsdp_text *text, const fsdp_cast_report *cast)
{
    double rounding = cast->max_rounding;
    if (rounding > 0)
        add_bound(text, "--rtol", rounding < 1.0 / 3 ? rounding / (1 - rounding) : 0.5);
    if (cast->max_underflow > 0)
        add_bound(text, "--atol", cast->max_underflow);
}

static void add_option(fsdp_text *text, const char *option, const char *value)
{
    if (value) {
        fsdp_text_addf(text, " %s", option);
        cli_add_argument(text, value);
    }
}

static void add_line(fsdp_text *text, next_line *next)
{
    const fsdp_convert_opts *convert = &next->opts->convert;
    const fsdp_convert_note *mapped = note_of(next, FSDP_NOTE_MAPPED);
    const fsdp_convert_note *renamed = note_of(next, FSDP_NOTE_RENAMED);
    fsdp_text_addf(text, "next  fsdp-diff");
    const char *from = fsdp_checkpoint_describe(next->plan->source)->path, *to = next->opts->to;
    cli_add_path_argument(text, next->joins_numbers ? cli_from_here(from) : from);
    cli_add_path_argument(text, next->joins_numbers ? cli_from_here(to) : to);
    if (mapped)
        add_option(text, "--map", convert->map ? convert->map : mapped->items[0].name);
    for (size_t i = 0; mapped && i < convert->size_count; i++)
        add_option(text, "--size", convert->sizes[i]);
    for (size_t i = 0; renamed && i < renamed->item_count; i++)
        add_option(text, "--rename", renamed->items[i].name);
    if (note_of(next, FSDP_NOTE_CAST))
        add_tolerance(text, &next->opts->cast);
    add_option(text, "-I", next->by_taken ? next->typed.data : convert->select.include);
    if (next->by_taken)
        fsdp_text_release(&next->typed);
    add_made(next);
    add_option(text, "-X", next->typed.data);
    fsdp_text_addf(text, convert->open.access.follow_links ? " --follow-links\n" : "\n");
    text->failed = text->failed || next->typed.failed;
}

/* fsdp-diff detects the format and reads the whole source; weights that an adapter changes, blocks, and
 * values that did not fit have no counterpart; an .npy has no name to compare by. It finds the sizes of a map
 * in the config.json of either side, and --tied keep has names that a map leaves out. */
static bool has_counterpart(const convert_options *opts, const fsdp_convert_plan *plan)
{
    const fsdp_convert_opts *convert = &opts->convert;
    const fsdp_open_opts *open = &convert->open;
    bool is_mapped = convert_find_note(plan, FSDP_NOTE_MAPPED) != NULL;
    const fsdp_caps *target = &convert_target(opts)->caps;
    bool has_config = !convert->copy_from || target->for_loaders;
    return !open->format && !open->void_as && !open->variant && !open->like && !target->nameless &&
           opts->cast.overflows == 0 && !convert->adapter && !convert->dequant &&
           !convert_find_note(plan, FSDP_NOTE_MISSING) &&
           !convert_find_note(plan, FSDP_NOTE_ENCODED) &&
           (!is_mapped || (has_config && convert->tied != FSDP_TIED_KEEP));
}

/* Opens a result in which lists and dicts may have other names. Returns false when the line cannot tell them:
 * after a rename only counts are compared. */
static bool open_result(const convert_options *opts, const fsdp_convert_plan *plan,
                        fsdp_checkpoint **result_out)
{
    fsdp_open_opts open = {.access = *cli_access()};
    size_t kept = 0, groups = 0;
    for (size_t i = 0; i < plan->kept_count; i++) {
        kept += plan->kept[i];
        groups += plan->kept[i] && is_group(fsdp_sd_at(plan->sd, i));
    }
    if (!convert_target(opts)->caps.regroups || groups == 0)
        return true;
    if (fsdp_checkpoint_open(opts->to, &open, result_out, NULL) != FSDP_OK)
        return false;
    if (!convert_find_note(plan, FSDP_NOTE_RENAMED))
        return true;
    bool has_all = fsdp_sd_count(fsdp_checkpoint_sd(*result_out)) == kept;
    fsdp_checkpoint_close(*result_out);
    *result_out = NULL;
    return has_all;
}

/* Names what the result lacks, or joins numbers and shortens paths, or names what it has. Only the last is
 * right for GGUF, which has pairs besides the tensors of the map. */
void convert_add_next(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan)
{
    const fsdp_convert_note *mapped = convert_find_note(plan, FSDP_NOTE_MAPPED);
    int first = mapped && strcmp(mapped->items[0].other, "gguf") == 0 ? 2 : 0;
    fsdp_checkpoint *result = NULL;
    bool is_done = !has_counterpart(opts, plan) || !open_result(opts, plan, &result);
    for (int form = first; form < 3 && !is_done; form++) {
        fsdp_text line = {0};
        next_line next = {.opts = opts,
                          .plan = plan,
                          .joins_numbers = form > 0,
                          .by_taken = form == 2,
                          .result = result ? fsdp_checkpoint_sd(result) : NULL};
        if (find_names(&next))
            add_line(&line, &next);
        is_done = line.size > 0 && !line.failed && line.size <= CLI_NEXT_MOST + 1;
        if (is_done)
            fsdp_text_add(text, line.data, line.size);
        fsdp_text_release(&line);
        fsdp_text_release(&next.typed);
        fsdp_text_release(&next.branches);
    }
    fsdp_checkpoint_close(result);
}
