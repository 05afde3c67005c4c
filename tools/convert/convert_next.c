/*
 * Command lines that fsdp-convert suggests: fsdp-diff after its work, and fsdp-convert with the --drop
 * options that a refusal names. See convert_tool.h.
 */
#include "tools/convert/convert_tool.h"
#include "base/text.h"

#include <fsdp/filter.h>

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Patterns of fsdp-diff are no longer, and more than this many elements would not fit. */
enum { PATTERN_MOST = 4000, TOPS_MOST = 200 };

/* --- entries that the result lacks ------------------------------------------------------------ */

/* Spellings of a line: as it is; with paths from here, and with the branches that are not in the result,
 * of which those that differ in numbers are one; with those that are in it. */
typedef enum next_spelling { AS_IT_IS, BY_LEFT, BY_TAKEN, SPELLINGS } next_spelling;

/* A first element of names that are not in the result, or a branch. */
typedef struct left_top {
    const char *name;
    size_t size;
    bool is_shared; /* with names that are in the result */
} left_top;

typedef struct left_out {
    const convert_options *opts;
    const fsdp_sd *sd;
    const fsdp_convert_plan *plan;
    fsdp_filter *filter; /* what the user's patterns take */
    next_spelling spelling;
    fsdp_text taken;   /* what -I gets in place of the user's, or empty */
    fsdp_text pattern; /* what -X gets */
    size_t group;      /* begin of the alternatives at hand, in the pattern */
    left_top tops[TOPS_MOST];
    size_t top_count;
    bool failed;
} left_out;

static size_t top_size(const fsdp_entry *entry)
{
    const char *dot = memchr(entry->name, '.', entry->name_size);
    return dot ? (size_t)(dot - entry->name) : entry->name_size;
}

static left_top *find_top(left_out *left, const fsdp_entry *entry)
{
    size_t size = top_size(entry);
    for (size_t i = 0; i < left->top_count; i++)
        if (left->tops[i].size == size && memcmp(left->tops[i].name, entry->name, size) == 0)
            return &left->tops[i];
    return NULL;
}

static bool is_selected(const left_out *left, size_t i)
{
    const fsdp_entry *entry = fsdp_sd_at(left->sd, i);
    return fsdp_filter_selects(left->filter, entry->name, entry->name_size);
}

static void list_tops(left_out *left)
{
    for (size_t i = 0; i < left->plan->kept_count; i++) {
        const fsdp_entry *entry = fsdp_sd_at(left->sd, i);
        bool is_note = entry->kind == FSDP_ENTRY_ALIAS; /* it says nothing of its branch */
        if (left->plan->kept[i] || is_note || !is_selected(left, i) || find_top(left, entry))
            continue;
        if (left->top_count == TOPS_MOST) {
            left->failed = true;
            return;
        }
        left->tops[left->top_count++] = (left_top){.name = entry->name, .size = top_size(entry)};
    }
    for (size_t i = 0; left->top_count > 0 && i < left->plan->kept_count; i++) {
        left_top *top = left->plan->kept[i] ? find_top(left, fsdp_sd_at(left->sd, i)) : NULL;
        if (top)
            top->is_shared = true;
    }
}

/* --- patterns --------------------------------------------------------------------------------- */

static void add_literal(left_out *left, const char *name, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        bool is_number = name[i] >= '0' && name[i] <= '9';
        left->failed = left->failed || name[i] == '\0';
        if (left->spelling != AS_IT_IS && is_number) {
            while (i + 1 < size && name[i + 1] >= '0' && name[i + 1] <= '9')
                i++;
            fsdp_text_addf(&left->pattern, "[0-9]+");
            continue;
        }
        if (strchr(".[]()*+?{}|^$\\", name[i]))
            fsdp_text_addf(&left->pattern, "\\");
        fsdp_text_add(&left->pattern, name + i, 1);
    }
}

/* True when the alternative that begins at `at` stands before it in its group. */
static bool is_repeated(const left_out *left, size_t at)
{
    const char *begin = left->pattern.data + left->group, *end = left->pattern.data + at;
    size_t size = left->pattern.size - at;
    for (const char *one = begin; one < end; one++)
        if ((one == begin || one[-1] == '|') && one + size < end && one[size] == '|' &&
            memcmp(one, end, size) == 0)
            return true;
    return false;
}

/* "^(a|b)" grows by one; is_first begins it. */
static void add_alternative(left_out *left, bool is_first, const char *name, size_t size)
{
    size_t before = left->pattern.size;
    const char *bar = is_first && before > 0 ? "|" : "";
    fsdp_text_addf(&left->pattern, is_first ? "%s^(" : "%s|", bar);
    size_t at = left->pattern.size;
    left->group = is_first ? at : left->group;
    add_literal(left, name, size);
    left->failed = left->failed || left->pattern.failed || left->pattern.size > PATTERN_MOST;
    if (left->spelling != AS_IT_IS && !left->failed && is_repeated(left, at))
        left->pattern.size = before;
}

/* Whole branches where the result has nothing of them. */
static void add_tops(left_out *left)
{
    bool is_first = true;
    for (size_t i = 0; i < left->top_count && !left->failed; i++) {
        if (left->tops[i].is_shared)
            continue;
        add_alternative(left, is_first, left->tops[i].name, left->tops[i].size);
        is_first = false;
    }
    if (!is_first)
        fsdp_text_addf(&left->pattern, ")(\\.|$)");
}

static bool is_in_top(left_out *left, const fsdp_entry *entry)
{
    const left_top *top = find_top(left, entry);
    return top && !top->is_shared;
}

/* Single names, from branches of which the result has some. */
static void add_names(left_out *left)
{
    bool is_first = true;
    for (size_t i = 0; i < left->plan->kept_count && !left->failed; i++) {
        const fsdp_entry *entry = fsdp_sd_at(left->sd, i);
        if (left->plan->kept[i] || !is_selected(left, i) || is_in_top(left, entry))
            continue;
        add_alternative(left, is_first, entry->name, entry->name_size);
        is_first = false;
    }
    if (!is_first)
        fsdp_text_addf(&left->pattern, ")$");
}

/* True when the result has nothing below the first `size` bytes of a name. */
static bool is_free(const left_out *left, const char *name, size_t size)
{
    for (size_t i = 0; i < left->plan->kept_count; i++) {
        const fsdp_entry *kept = fsdp_sd_at(left->sd, i);
        if (left->plan->kept[i] && kept->name_size >= size && memcmp(kept->name, name, size) == 0 &&
            (kept->name_size == size || kept->name[size] == '.'))
            return false;
    }
    return true;
}

static bool is_below_branch(const left_out *left, const fsdp_entry *entry)
{
    for (size_t i = 0; i < left->top_count; i++) {
        const left_top *branch = &left->tops[i];
        if (entry->name_size >= branch->size &&
            memcmp(entry->name, branch->name, branch->size) == 0 &&
            (entry->name_size == branch->size || entry->name[branch->size] == '.'))
            return true;
    }
    return false;
}

/* The largest branches of which the result has nothing. */
static void add_branches(left_out *left)
{
    for (size_t i = 0; i < left->plan->kept_count && !left->failed; i++) {
        const fsdp_entry *entry = fsdp_sd_at(left->sd, i);
        if (left->plan->kept[i] || !is_selected(left, i) || is_below_branch(left, entry))
            continue;
        size_t size = top_size(entry);
        while (size < entry->name_size && !is_free(left, entry->name, size)) {
            const char *dot = memchr(entry->name + size + 1, '.', entry->name_size - size - 1);
            size = dot ? (size_t)(dot - entry->name) : entry->name_size;
        }
        left->failed = left->top_count == TOPS_MOST;
        if (left->failed)
            return;
        left->tops[left->top_count++] = (left_top){.name = entry->name, .size = size};
        add_alternative(left, left->top_count == 1, entry->name, size);
    }
    if (left->top_count > 0)
        fsdp_text_addf(&left->pattern, ")(\\.|$)");
}

/* True for a list or dict that torch and dcp may split into one name per value, or join into one value. */
static bool may_regroup(const convert_options *opts, const fsdp_entry *entry)
{
    fsdp_value_kind kind = entry->value.kind;
    return convert_target(opts)->caps.regroups && entry->kind == FSDP_ENTRY_VALUE &&
           (kind == FSDP_VALUE_LIST || kind == FSDP_VALUE_DICT);
}

/* Size of the name without the numbers at its end: lists in one list are split or joined together. */
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

static bool is_regrouped(const left_out *left, const fsdp_sd *result, size_t i)
{
    const fsdp_entry *entry = fsdp_sd_at(left->sd, i);
    return left->plan->kept[i] && is_selected(left, i) && may_regroup(left->opts, entry) &&
           fsdp_sd_find(result, entry->name, entry->name_size) < 0;
}

/* Values that both sides have, under other names. */
static void add_groups(left_out *left, const fsdp_sd *result)
{
    bool is_first = true;
    for (size_t i = 0; i < left->plan->kept_count && !left->failed; i++) {
        const fsdp_entry *entry = fsdp_sd_at(left->sd, i);
        if (!is_regrouped(left, result, i))
            continue;
        add_alternative(left, is_first, entry->name, group_size(entry));
        is_first = false;
    }
    if (!is_first)
        fsdp_text_addf(&left->pattern, ")(\\.|$)");
}

/* Opens the result and finds the values that were split or joined; after a rename it compares only counts. */
static void add_regrouped(left_out *left)
{
    fsdp_checkpoint *result = NULL;
    size_t kept = 0, candidates = 0;
    for (size_t i = 0; i < left->plan->kept_count; i++) {
        kept += left->plan->kept[i];
        candidates += left->plan->kept[i] && may_regroup(left->opts, fsdp_sd_at(left->sd, i));
    }
    if (candidates == 0 || left->failed)
        return;
    fsdp_open_opts open = {.access = *cli_access()};
    left->failed = fsdp_checkpoint_open(left->opts->to, &open, &result, NULL) != FSDP_OK;
    if (!left->failed && left->plan->renamed == 0)
        add_groups(left, fsdp_checkpoint_sd(result));
    else if (!left->failed)
        left->failed = fsdp_sd_count(fsdp_checkpoint_sd(result)) != kept;
    fsdp_checkpoint_close(result);
}

static const char metadata_word[] = "metadata";

/* "metadata", "metadata:^ss_" */
static bool is_metadata(const char *drop)
{
    size_t size = sizeof metadata_word - 1;
    return strncmp(drop, metadata_word, size) == 0 && strchr(":", drop[size]);
}

static bool is_word(const char *drop)
{
    return is_metadata(drop) || strcmp(drop, "values") == 0 || strcmp(drop, "opaque") == 0 ||
           strcmp(drop, "optim") == 0 || strncmp(drop, "dtype:", 6) == 0 ||
           strncmp(drop, "tensors:", 8) == 0;
}

/* Begins the pattern with the patterns of --exclude and --drop, as they were given, and hyper-parameters that
 * got another form, or other names. */
static void add_typed(left_out *left)
{
    const fsdp_select_opts *select = &left->opts->convert.select;
    if (select->exclude)
        fsdp_text_addf(&left->pattern, "%s", select->exclude);
    if (left->plan->optim_form)
        fsdp_text_addf(&left->pattern, "%s(^|\\.)param_groups(\\.|$)",
                       left->pattern.size > 0 ? "|" : "");
    if (left->plan->optim_named > 0)
        fsdp_text_addf(&left->pattern, "|(^|\\.)opt[^.]*\\.state\\.");
    for (size_t i = 0; i < left->plan->added_count; i++) { /* --under and renames put more before */
        fsdp_text_addf(&left->pattern, "%s(^|\\.)", left->pattern.size > 0 ? "|" : "");
        add_literal(left, left->plan->added[i], strlen(left->plan->added[i]));
        fsdp_text_addf(&left->pattern, "$");
    }
    for (size_t i = 0; i < select->drop_count; i++)
        if (!is_word(select->drops[i]))
            fsdp_text_addf(&left->pattern, "%s%s", left->pattern.size > 0 ? "|" : "",
                           select->drops[i]);
    left->failed = left->pattern.failed || left->pattern.size > PATTERN_MOST;
}

static const char *pattern_of(const left_out *left)
{
    return left->pattern.size > 0 ? left->pattern.data : NULL;
}

static const char *include_of(const left_out *left)
{
    return left->taken.size > 0 ? left->taken.data : left->opts->convert.select.include;
}

/* True when the patterns take the entries of the result and no other. Values that have other names in the
 * result may be either. */
static bool is_exact(const left_out *left)
{
    fsdp_filter *filter = NULL;
    if (fsdp_filter_create(include_of(left), pattern_of(left), &filter, NULL) != FSDP_OK)
        return false;
    bool exact = true;
    for (size_t i = 0; i < left->plan->kept_count && exact; i++) {
        const fsdp_entry *entry = fsdp_sd_at(left->sd, i);
        bool is_outside = left->spelling != BY_TAKEN && !is_selected(left, i);
        exact = is_outside || may_regroup(left->opts, entry) ||
                fsdp_filter_selects(filter, entry->name, entry->name_size) == left->plan->kept[i];
    }
    fsdp_filter_free(filter);
    return exact;
}

/* Makes the pattern of the first elements that are in the result. */
static void take_branches(left_out *left)
{
    for (size_t i = 0; i < left->plan->kept_count && !left->failed; i++) {
        const fsdp_entry *entry = fsdp_sd_at(left->sd, i);
        if (!left->plan->kept[i] || find_top(left, entry))
            continue;
        left->failed = left->top_count == TOPS_MOST;
        if (left->failed)
            return;
        left->tops[left->top_count++] = (left_top){.name = entry->name, .size = top_size(entry)};
        add_alternative(left, left->top_count == 1, entry->name, top_size(entry));
    }
    fsdp_text_addf(&left->pattern, ")(\\.|$)");
    left->taken = left->pattern;
    left->pattern = (fsdp_text){0};
}

/* Makes the patterns of the names that are in the result, or of those that it lacks. */
static bool describe_left(left_out *left)
{
    bool by_taken = left->spelling == BY_TAKEN;
    if (!by_taken)
        add_typed(left);
    if (left->failed || fsdp_filter_create(left->opts->convert.select.include, pattern_of(left),
                                           &left->filter, NULL) != FSDP_OK)
        return false;
    if (by_taken) {
        take_branches(left);
    } else if (left->spelling == BY_LEFT) {
        add_branches(left);
    } else {
        list_tops(left);
        add_tops(left);
        add_names(left);
    }
    add_regrouped(left);
    bool is_right = !left->failed && (left->spelling == AS_IT_IS || is_exact(left));
    fsdp_filter_free(left->filter);
    return is_right;
}

/* --- fsdp-diff -------------------------------------------------------------------------------- */

/* fsdp-diff detects the format and reads the whole source, so --from, --void-as, --variant, --like
 * and --allow-missing have no counterpart; values that a cast did not fit differ; an .npy has no name
 * to compare by. */
static bool can_compare(const convert_options *opts, const fsdp_convert_plan *plan)
{
    const fsdp_open_opts *open = &opts->convert.open;
    return !open->format && !open->void_as && !open->variant && !open->like &&
           !convert_target(opts)->caps.nameless && opts->cast.overflows == 0 &&
           fsdp_checkpoint_missing_count(plan->source) == 0;
}

/* The map of the conversion: the one that was named, or the one that it chose. */
static const char *map_of(const convert_options *opts, const fsdp_convert_plan *plan)
{
    return opts->convert.map ? opts->convert.map : plan->map;
}

static void add_map(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan)
{
    fsdp_text_addf(text, " --map");
    cli_add_argument(text, map_of(opts, plan));
    for (size_t i = 0; i < opts->convert.size_count; i++) {
        fsdp_text_addf(text, " --size");
        cli_add_argument(text, opts->convert.sizes[i]);
    }
}

/* Names of values that the writer of a format makes, or that are added after a map; NULL: none. A checkpoint
 * of Megatron has objects and a common state that its map does not make; a universal one is of one rank, with
 * a step per group. */
static const char *made_anew(const left_out *left)
{
    const fsdp_format *target = convert_target(left->opts);
    const fsdp_format *mapped = left->plan->is_mapped ? fsdp_format_to(left->plan->map_to) : NULL;
    if (mapped && mapped->caps.adds_objects)
        return mapped->makes;
    return target->caps.adds_objects ? NULL : target->makes;
}

/* Texts next to the tensors, as fsdp-diff names them, unless the result has all of the source's. */
static const char *lost_metadata(const left_out *left)
{
    const fsdp_select_opts *select = &left->opts->convert.select;
    bool is_lost = left->plan->metadata_count > 0;
    for (size_t i = 0; i < select->drop_count; i++)
        is_lost = is_lost || is_metadata(select->drops[i]);
    return is_lost ? "^__metadata__\\." : NULL;
}

static void add_excluded(fsdp_text *text, const left_out *left)
{
    const char *const patterns[] = {pattern_of(left), made_anew(left), lost_metadata(left)};
    fsdp_text whole = {0};
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++)
        if (patterns[i])
            fsdp_text_addf(&whole, "%s%s", whole.size > 0 ? "|" : "", patterns[i]);
    if (whole.size > 0) {
        fsdp_text_addf(text, " -X");
        cli_add_argument(text, whole.failed ? "" : whole.data);
    }
    text->failed = text->failed || whole.failed;
    fsdp_text_release(&whole);
}

static void add_diff(fsdp_text *text, const left_out *left, const char *from, const char *to)
{
    const convert_options *opts = left->opts;
    const fsdp_convert_plan *plan = left->plan;
    fsdp_text_addf(text, "next  fsdp-diff");
    cli_add_path_argument(text, from);
    cli_add_path_argument(text, to);
    if (plan->is_mapped)
        add_map(text, opts, plan);
    for (size_t i = 0; i < plan->rename_count && plan->renamed > 0; i++) {
        fsdp_text_addf(text, " --rename");
        cli_add_argument(text, plan->renames[i]);
    }
    if (plan->cast_tensors > 0)
        convert_add_tolerance(text, &opts->cast);
    if (include_of(left)) {
        fsdp_text_addf(text, " -I");
        cli_add_argument(text, include_of(left));
    }
    add_excluded(text, left);
    if (opts->convert.open.access.follow_links)
        fsdp_text_addf(text, " --follow-links");
    fsdp_text_add(text, "\n", 1);
}

/* False where the line would be wrong, or longer than people read. */
static bool add_spelled(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan,
                        next_spelling spelling)
{
    const char *from = fsdp_checkpoint_describe(plan->source)->path;
    left_out *left = calloc(1, sizeof *left);
    if (!left)
        return false;
    *left = (left_out){.opts = opts, .sd = plan->sd, .plan = plan, .spelling = spelling};
    fsdp_text line = {0};
    bool is_right = describe_left(left);
    if (is_right && spelling == AS_IT_IS)
        add_diff(&line, left, from, opts->to);
    else if (is_right)
        add_diff(&line, left, cli_from_here(from), cli_from_here(opts->to));
    is_right = is_right && !line.failed && line.size <= CLI_NEXT_MOST + 1;
    if (is_right)
        fsdp_text_add(text, line.data, line.size);
    fsdp_text_release(&line);
    fsdp_text_release(&left->taken);
    fsdp_text_release(&left->pattern);
    free(left);
    return is_right;
}

/* Weights that an adapter changes, and blocks, have no counterpart. fsdp-diff finds the sizes of a map in the
 * config.json of either side, and --tied keep has names that a map leaves out. */
static bool has_counterpart(const convert_options *opts, const fsdp_convert_plan *plan)
{
    const fsdp_convert_opts *convert = &opts->convert;
    bool has_config = !convert->copy_from || convert_target(opts)->caps.for_loaders;
    bool is_map_alike = !plan->is_mapped || (has_config && convert->tied != FSDP_TIED_KEEP);
    return can_compare(opts, plan) && is_map_alike && plan->encoded == 0 && !convert->adapter &&
           !convert->dequant;
}

/* A GGUF file has pairs besides the tensors of the map, so that only names of tensors are compared. */
void convert_add_next(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan)
{
    bool is_done = !has_counterpart(opts, plan);
    bool has_pairs = plan->is_mapped && strcmp(plan->map_to, "gguf") == 0;
    for (next_spelling spelling = has_pairs ? BY_TAKEN : AS_IT_IS; spelling < SPELLINGS && !is_done;
         spelling++)
        is_done = add_spelled(text, opts, plan, spelling);
}

/* --- names for --drop ------------------------------------------------------------------------- */

static const char drop_advice[] = "; leave out with", drop_option[] = " --drop ";

/* " --drop values --drop dtype:bf16" at the end of a refusal, or NULL. Names of the source stand
 * before it. */
static char *find_drops(char *message)
{
    char *found = NULL;
    for (char *at = message; (at = strstr(at, drop_advice)) != NULL; at++)
        found = at + sizeof drop_advice - 1;
    static const char letters[] = "abcdefghijklmnopqrstuvwxyz0123456789_:- ";
    return found && strspn(found, letters) == strlen(found) ? found : NULL;
}

enum { DROPS_MOST = 20 };

/* Arguments of --drop: the user's, and those of refusals, each of which is a text in `words`. */
typedef struct drop_list {
    const char **items;
    size_t count, given;
    char *words[DROPS_MOST];
    size_t word_count;
} drop_list;

/* Takes the arguments of " --drop A --drop B"; false when they are too many. */
static bool take_drops(drop_list *list, const char *drops)
{
    while ((drops = strstr(drops, drop_option)) != NULL) {
        drops += sizeof drop_option - 1;
        char *word = list->word_count < DROPS_MOST ? strndup(drops, strcspn(drops, " ")) : NULL;
        if (!word)
            return false;
        list->words[list->word_count++] = word;
        list->items[list->count++] = word;
    }
    return true;
}

/* Plans the conversion with what refusals advise to drop, and with what the next one does. False when it is
 * refused otherwise, with the reason in other_out. */
static bool try_drops(const convert_options *opts, drop_list *list, const char *drops,
                      fsdp_error *other_out)
{
    fsdp_convert_opts dropping = opts->convert;
    dropping.watch = (fsdp_watch){0}; /* notices were given */
    while (drops && take_drops(list, drops)) {
        fsdp_conversion *conversion = NULL;
        *other_out = (fsdp_error){0};
        dropping.select.drops = list->items;
        dropping.select.drop_count = list->count;
        fsdp_status st =
            fsdp_conversion_open(opts->from, opts->to, &dropping, &conversion, other_out);
        fsdp_conversion_close(conversion);
        if (st == FSDP_OK || st == FSDP_ERR_EXISTS)
            return true;
        drops = st == FSDP_ERR_USAGE ? find_drops(other_out->text) : NULL;
    }
    return false;
}

/* ": fsdp-convert SRC DST --drop values" */
static void add_command(fsdp_text *text, const convert_options *opts, const drop_list *list)
{
    fsdp_text_addf(text, ": fsdp-convert");
    for (int i = 1; i < opts->argc; i++) {
        if (strcmp(opts->argv[i], "--") == 0)
            text->failed = true; /* what is after it is not an option */
        cli_add_argument(text, opts->argv[i]);
    }
    for (size_t i = list->given; i < list->count; i++)
        fsdp_text_addf(text, "%s%s", drop_option, list->items[i]);
}

void convert_name_drops(const convert_options *opts, fsdp_error *err)
{
    const fsdp_select_opts *select = &opts->convert.select;
    char *drops = err->status == FSDP_ERR_USAGE ? find_drops(err->text) : NULL;
    fsdp_error other = {0};
    fsdp_text text = {0};
    if (!drops || opts->apply)
        return;
    drop_list list = {.items = calloc(select->drop_count + DROPS_MOST, sizeof *list.items),
                      .given = select->drop_count};
    for (; list.items && list.count < list.given; list.count++)
        list.items[list.count] = select->drops[list.count];
    bool succeeds = list.items && try_drops(opts, &list, drops, &other);
    if (succeeds) {
        fsdp_text_addf(&text, "%s", err->text);
        add_command(&text, opts, &list);
    } else if (other.status != FSDP_OK) {
        drops[1 - (int)sizeof drop_advice] = '\0';
        fsdp_text_addf(&text, "%s; without them: %s", err->text, other.text);
    }
    if (text.size > 0 && !text.failed && text.size < FSDP_ERROR_TEXT)
        memcpy(err->text, text.data, text.size + 1);
    for (size_t i = 0; i < list.word_count; i++)
        free(list.words[i]);
    free(list.items);
    fsdp_text_release(&text);
}

/* Size of a shell's word that is quoted as fsdp_text_add_quoted does; 0 when it does not end. */
static size_t word_size(const char *word)
{
    size_t size = 0;
    while (word[size] == '\'' || word[size] == '\\' || strncmp(word + size, "$'", 2) == 0) {
        bool is_spelled = word[size] == '$';
        if (word[size] == '\\' && word[size + 1]) {
            size += 2;
            continue;
        }
        for (size += is_spelled ? 2 : 1; word[size] && word[size] != '\''; size++)
            size += is_spelled && word[size] == '\\' && word[size + 1];
        if (!word[size++])
            return 0;
    }
    return size;
}

/* " PATH"; without quotes where it needs none. */
static void add_word(fsdp_text *text, const char *word, size_t size)
{
    fsdp_text inner = {0};
    fsdp_text_add(&inner, word + 1, size - 2);
    if (word[0] != '\'' || inner.failed || strchr(inner.data, '\''))
        fsdp_text_addf(text, " %.*s", (int)size, word);
    else
        cli_add_argument(text, inner.data);
    fsdp_text_release(&inner);
}

void convert_name_source(const convert_options *opts, fsdp_error *err)
{
    static const char advice[] = "; name one of them: ";
    const char *found = err->status == FSDP_ERR_USAGE ? strstr(err->text, advice) : NULL;
    fsdp_text text = {0};
    size_t size = found ? word_size(found + strlen(advice)) : 0;
    if (size < 2 || opts->apply || !opts->from)
        return;
    fsdp_text_addf(&text, "%s: fsdp-convert", err->text);
    for (int i = 1; i < opts->argc; i++) {
        if (opts->argv[i] == opts->from)
            add_word(&text, found + strlen(advice), size);
        else
            cli_add_argument(&text, opts->argv[i]);
    }
    if (!text.failed && text.size < FSDP_ERROR_TEXT)
        memcpy(err->text, text.data, text.size + 1);
    fsdp_text_release(&text);
}
