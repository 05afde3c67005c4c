/*
 * The line "next": the command of fsdp-diff that finds source and result equal after a correct conversion.
 * Names that one side lacks are excluded by the shortest branches of names, each of which is tried on all
 * names; a line that is wrong or longer than people read is not printed. See convert_tool.h.
 */
#include "tools/convert/convert_tool.h"
#include "base/text.h"

#include <ctype.h>
#include <fsdp/filter.h>
#include <stdlib.h>
#include <string.h>

/* Lists a name that the filter selects, with true when both sides have it. */
static bool add_name(fsdp_sd *names, const fsdp_filter *filter, const fsdp_entry *entry,
                     bool is_shared)
{
    fsdp_value value = fsdp_value_bool(is_shared);
    return !fsdp_filter_selects(filter, entry->name, entry->name_size) ||
           fsdp_sd_add_value(names, entry->name, entry->name_size, &value, NULL) == FSDP_OK;
}

/* Lists the names of the source, and those that only the result has. */
static bool list_names(fsdp_sd *names, const fsdp_filter *filter, const fsdp_convert_plan *plan,
                       const fsdp_sd *result)
{
    bool *paired = calloc(fsdp_sd_count(result) + 1, sizeof *paired), is_listed = paired != NULL;
    for (size_t i = 0; i < plan->result_count && is_listed; i++) {
        const fsdp_note_item *item = &plan->results[i];
        int64_t at = item->name ? fsdp_sd_find(result, item->name, item->name_size) : -1;
        paired[at >= 0 ? (size_t)at : fsdp_sd_count(result)] = true;
        is_listed = add_name(names, filter, fsdp_sd_at(plan->sd, i), at >= 0);
    }
    for (size_t i = 0; i < fsdp_sd_count(result) && is_listed; i++)
        is_listed = paired[i] || add_name(names, filter, fsdp_sd_at(result, i), false);
    free(paired);
    return is_listed;
}

/* Finds the first shared name, or name of one side, that an expression matches or not; NULL for none. */
static const fsdp_entry *find_name(const fsdp_sd *names, bool is_shared, const char *regex,
                                   bool matches)
{
    fsdp_filter *filter = NULL;
    const fsdp_entry *entry;
    bool is_valid = regex && *regex && fsdp_filter_create(regex, NULL, &filter, NULL) == FSDP_OK;
    for (size_t i = 0; (entry = fsdp_sd_at(names, i)) != NULL; i++)
        if (entry->value.as.boolean == is_shared &&
            (is_valid && fsdp_filter_selects(filter, entry->name, entry->name_size)) == matches)
            break;
    fsdp_filter_free(filter);
    return entry;
}

/* Adds "^(BRANCH|...)(\.|$)", which matches all shared names and no others, or all names of one side. A
 * branch is the shortest beginning of a name, up to a dot, that no name of the others has. */
static bool add_branches(fsdp_text *pattern, const fsdp_sd *names, bool is_shared,
                         bool joins_numbers)
{
    fsdp_text branches = {0};
    const fsdp_entry *entry, *other = NULL;
    size_t begin = pattern->size;
    while (!other && branches.size < CLI_NEXT_MOST &&
           (entry = find_name(names, is_shared, pattern->data, false)) != NULL) {
        other = entry;
        fsdp_text_addf(&branches, "|");
        for (const char *at = entry->name; other && at < entry->name + entry->name_size; at++) {
            if (!joins_numbers || !isdigit((unsigned char)*at))
                fsdp_text_addf(&branches, strchr(".[]()*+?{}|^$\\", *at) ? "\\%c" : "%c", *at);
            else if (at == entry->name || !isdigit((unsigned char)at[-1]))
                fsdp_text_addf(&branches, "[0-9]+");
            if (branches.failed || (at[1] && at[1] != '.'))
                continue;
            pattern->size = begin;
            fsdp_text_addf(pattern, "%s^(%s)(\\.|$)", begin > 0 ? "|" : "", branches.data + 1);
            other = find_name(names, !is_shared, pattern->data, true);
        }
    }
    fsdp_text_release(&branches);
    return !entry && !pattern->failed;
}

static void add_options(fsdp_text *text, const char *option, const char *const *values,
                        size_t count)
{
    for (size_t i = 0; i < count; i++) {
        fsdp_text_addf(text, " %s", option);
        cli_add_argument(text, values[i]);
    }
}

static void add_line(fsdp_text *text, const fsdp_convert_plan *plan, const char *include,
                     const char *exclude)
{
    const fsdp_convert_opts *opts = plan->opts;
    const fsdp_convert_note *mapped = convert_find_note(plan, FSDP_NOTE_MAPPED);
    const char *map = opts->map || !mapped ? opts->map : mapped->items[0].name;
    fsdp_text_addf(text, "next  fsdp-diff");
    cli_add_path_argument(text, cli_from_here(fsdp_checkpoint_describe(plan->source)->path));
    cli_add_path_argument(text, cli_from_here(plan->to));
    add_options(text, "--map", &map, mapped != NULL);
    add_options(text, "--size", opts->sizes, mapped ? opts->size_count : 0);
    add_options(text, "--rename", opts->select.renames, opts->select.rename_count);
    convert_add_tolerance(text, opts->cast);
    add_options(text, "-I", &include, include != NULL);
    add_options(text, "-X", &exclude, exclude && exclude[0]);
    fsdp_text_addf(text, opts->open.access.follow_links ? " --follow-links\n" : "\n");
}

/* fsdp-diff detects the format and reads the whole source; weights that an adapter changes, blocks, and
 * values that did not fit have no counterpart; an .npy has no name to compare by. It finds the sizes of a map
 * in the config.json of either side, and --tied keep has names that a map leaves out. */
static bool has_counterpart(const fsdp_convert_plan *plan, const fsdp_format *format)
{
    const fsdp_convert_opts *opts = plan->opts;
    bool has_sizes = !opts->copy_from || format->caps.for_loaders;
    return !opts->open.format && !opts->open.void_as && !opts->open.variant && !opts->open.like &&
           !format->caps.nameless && opts->cast->overflows == 0 && !opts->adapter &&
           !opts->dequant && !convert_find_note(plan, FSDP_NOTE_MISSING) &&
           !convert_find_note(plan, FSDP_NOTE_ENCODED) &&
           ((has_sizes && opts->tied != FSDP_TIED_KEEP) ||
            !convert_find_note(plan, FSDP_NOTE_MAPPED));
}

/* Excludes what was typed, and values that the conversion makes, loses or gives other names. */
static void exclude_known(fsdp_text *exclude, const fsdp_convert_plan *plan, const char *made)
{
    const fsdp_select_opts *select = &plan->opts->select;
    bool is_lost = convert_find_note(plan, FSDP_NOTE_METADATA) != NULL;
    for (size_t i = 0; i < select->drop_count; i++)
        is_lost = is_lost || strncmp(select->drops[i], "metadata", 8) == 0;
    const char *const patterns[] = {
        select->exclude,
        convert_find_note(plan, FSDP_NOTE_OPTIM) ? "(^|\\.)param_groups(\\.|$)" : NULL,
        convert_find_note(plan, FSDP_NOTE_NUMBERED) ? "(^|\\.)opt[^.]*\\.state\\." : NULL, made,
        is_lost ? "^__metadata__\\." : NULL};
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++)
        if (patterns[i])
            fsdp_text_addf(exclude, "%s%s", exclude->size > 0 ? "|" : "", patterns[i]);
}

/* Names what one side lacks, or joins the numbers in those names, or names what both sides have. */
void convert_add_next(fsdp_text *text, const fsdp_convert_plan *plan)
{
    const char *include = plan->opts->select.include;
    const fsdp_format *format = fsdp_format_to(plan->opts->format);
    const fsdp_open_opts open = {.access = *cli_access(), .whole = true};
    fsdp_checkpoint *result = NULL;
    fsdp_filter *filter = NULL;
    fsdp_sd *names = NULL;
    fsdp_text exclude = {0}, line = {0}, pattern = {0};
    exclude_known(&exclude, plan, format->makes);
    bool is_done = !has_counterpart(plan, format) || exclude.failed ||
                   fsdp_checkpoint_open(plan->to, &open, &result, NULL) != FSDP_OK ||
                   fsdp_filter_create(include, exclude.data, &filter, NULL) != FSDP_OK ||
                   fsdp_sd_create(&names, NULL) != FSDP_OK ||
                   !list_names(names, filter, plan, fsdp_checkpoint_sd(result)) ||
                   !find_name(names, true, NULL, false);
    for (int form = 0; form < (include ? 2 : 3) && !is_done; form++) {
        fsdp_text_release(&line);
        fsdp_text_release(&pattern);
        fsdp_text_add(&pattern, exclude.data, form < 2 ? exclude.size : 0);
        is_done = add_branches(&pattern, names, form == 2, form > 0);
        add_line(&line, plan, form == 2 ? pattern.data : include,
                 form == 2 ? exclude.data : pattern.data);
        is_done = is_done && !line.failed && line.size <= CLI_NEXT_MOST + 1;
        if (is_done)
            fsdp_text_add(text, line.data, line.size);
    }
    fsdp_text_release(&exclude);
    fsdp_text_release(&line);
    fsdp_text_release(&pattern);
    fsdp_filter_free(filter);
    fsdp_sd_free(names);
    fsdp_checkpoint_close(result);
}
