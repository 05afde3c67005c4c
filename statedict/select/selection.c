/* The entries of a target and their names: see selection.h. */
#include "statedict/select/selection.h"
#include "base/core/mem.h"
#include "base/data/name_path.h"
#include "base/data/value_internal.h"
#include "base/text.h"
#include "statedict/sd/layout_internal.h"
#include "statedict/sd/names.h"
#include "statedict/select/drop_rules.h"
#include "statedict/select/expression.h"
#include "statedict/select/rename.h"
#include "statedict/select/scales.h"
#include "statedict/select/vectors.h"
#include <fsdp/filter.h>

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* === tensors of subclasses ==================================================================== */

/*
 * Tensors of subclasses without a storage of their own (torchao's AffineQuantizedTensor and Float8Tensor): a
 * source lists such a tensor as a value of its class, and its members (the numbers, their scale) below its
 * name. Only together they are weights, so that a selection takes all of them or none.
 */

static bool unit_has_member(const fsdp_selected *selected, size_t entry)
{
    return selected[entry].unit != 0 && selected[entry].unit != entry + 1;
}

/* --- finding ---------------------------------------------------------------------------------- */

/* The end of the element of a name after `begin`: of a key where nesting is known, else the next dot. */
static size_t end_of_element(const fsdp_entry *entry, size_t number, size_t begin)
{
    if (entry->path)
        return number < entry->path_count ? begin + fsdp_path_bytes(entry->path[number])
                                          : entry->name_size;
    const char *dot = memchr(entry->name + begin, '.', entry->name_size - begin);
    return dot ? (size_t)(dot - entry->name) : entry->name_size;
}

/* The tensor of a subclass in which the entry is, -1 for none. A subclass may hold a second one: the outer
 * one counts. */
static int64_t find_unit(const fsdp_sd *sd, const bool *are_units, const fsdp_entry *entry)
{
    size_t end = end_of_element(entry, 0, 0);
    for (size_t number = 1; end < entry->name_size; number++) {
        int64_t found = fsdp_sd_find(sd, entry->name, end);
        if (found >= 0 && are_units[found])
            return found;
        end = end_of_element(entry, number, end + 1);
    }
    return -1;
}

static void join_units(const fsdp_sd *sd, const bool *are_units, fsdp_selected *selected)
{
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        int64_t unit = find_unit(sd, are_units, fsdp_sd_at(sd, i));
        if (unit < 0)
            continue;
        selected[unit].unit = selected[i].unit = (size_t)unit + 1;
        selected[i].kind = selected[unit].kind;
    }
}

/* Fills in the kinds and the units of selected, which has an item per entry of sd. A member has the kind of
 * its unit. */
static fsdp_status units_find(const fsdp_sd *sd, fsdp_selected *selected, fsdp_error *err)
{
    bool has_units = false;
    bool *are_units = fsdp_alloc(fsdp_sd_count(sd), sizeof *are_units);
    if (!are_units)
        return fsdp_fail_memory(err, "a selection");
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        selected[i].kind = fsdp_tensor_kind(fsdp_sd_at(sd, i), &are_units[i]);
        has_units = has_units || are_units[i];
    }
    if (has_units)
        join_units(sd, are_units, selected);
    fsdp_free(are_units);
    return FSDP_OK;
}

/* --- checking --------------------------------------------------------------------------------- */

static fsdp_status fail_part(const fsdp_sd *sd, size_t unit, size_t member, bool is_kept,
                             fsdp_error *err)
{
    const fsdp_entry *whole = fsdp_sd_at(sd, unit), *part = fsdp_sd_at(sd, member);
    char name[160], other[160];
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "'%s' is one tensor of a subclass, and its part '%s' is %s: patterns take all "
                     "of it, or nothing; to get its numbers alone, save it as a plain tensor in "
                     "Python",
                     fsdp_printable(whole->name, whole->name_size, name, sizeof name),
                     fsdp_printable(part->name, part->name_size, other, sizeof other),
                     is_kept ? "taken without the rest" : "left out");
}

/* FSDP_ERR_USAGE names a unit of which the selection takes only some entries. */
static fsdp_status units_check(const fsdp_sd *sd, const fsdp_selected *selected, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        size_t unit = selected[i].unit - 1;
        if (unit_has_member(selected, i) && selected[i].is_kept != selected[unit].is_kept)
            return fail_part(sd, unit, i, selected[i].is_kept, err);
    }
    return FSDP_OK;
}

/* === cast rules =============================================================================== */

/* The rules of --dtype and --dtype-for: they decide the dtype of every tensor in a conversion. */

/* One --dtype-for. */
typedef struct cast_rule {
    regex_t expression;
    fsdp_dtype dtype; /* NONE: keep */
} cast_rule;

struct fsdp_cast_rules {
    fsdp_dtype model; /* NONE: keep */
    cast_rule *items;
    size_t count;
};

static bool is_castable(fsdp_dtype dtype)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(dtype);
    return info && info->is_float;
}

const char *fsdp_castable_at(size_t i)
{
    for (int dtype = 1; dtype < FSDP_DTYPE_COUNT; dtype++)
        if (is_castable((fsdp_dtype)dtype) && i-- == 0)
            return fsdp_dtype_name((fsdp_dtype)dtype);
    return NULL;
}

/* --- reading ---------------------------------------------------------------------------------- */

/* "Q4_K_M", "iq2_xs": names of llama.cpp for files of several types of blocks. */
static bool is_mixture(const char *text)
{
    text += *text == 'i' || *text == 'I';
    return (*text == 'q' || *text == 'Q') && text[1] >= '1' && text[1] <= '8';
}

static fsdp_status fail_dtype(const char *text, const char *option, fsdp_error *err)
{
    if (is_mixture(text))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "%s: '%.40s' is a name for blocks, of which --dtype q8_0 and --dtype q4_0 "
                         "make some (--to gguf); make others with llama-quantize of llama.cpp",
                         option, text);
    fsdp_text known = {0};
    for (size_t i = 0; fsdp_castable_at(i); i++)
        fsdp_text_addf(&known, ", %s", fsdp_castable_at(i));
    fsdp_status st =
        fsdp_fail(err, FSDP_ERR_USAGE, "%s: '%.40s' is not a dtype to cast to; known are keep%.*s",
                  option, text, (int)known.size, known.data ? known.data : "");
    fsdp_text_release(&known);
    return st;
}

static fsdp_status parse_dtype(const char *text, const char *option, fsdp_dtype *dtype_out,
                               fsdp_error *err)
{
    bool keeps = strcmp(text, "keep") == 0;
    *dtype_out = keeps ? FSDP_DTYPE_NONE : fsdp_dtype_from_typed(text, strlen(text));
    if (keeps || is_castable(*dtype_out))
        return FSDP_OK;
    return fail_dtype(text, option, err);
}

/* "RE=T"; an expression may hold a '='. */
static fsdp_status parse_rule(const char *text, cast_rule *rule, fsdp_error *err)
{
    const char *sign = strrchr(text, '=');
    if (!sign)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "--dtype-for '%.80s' has no '='; a rule is REGEX=DTYPE, such as "
                         "'norm=f32'",
                         text);
    FSDP_TRY(parse_dtype(sign + 1, "--dtype-for", &rule->dtype, err));
    char *expression = fsdp_strndup(text, (size_t)(sign - text));
    if (!expression)
        return fsdp_fail_memory(err, "rules");
    fsdp_status st = fsdp_expression_compile(expression, REG_NOSUB, &rule->expression, err);
    fsdp_free(expression);
    return st;
}

static fsdp_status parse_all(const fsdp_select_opts *opts, fsdp_cast_rules *rules, fsdp_error *err)
{
    rules->items = fsdp_alloc(opts->dtype_rule_count, sizeof *rules->items);
    if (!rules->items)
        return fsdp_fail_memory(err, "rules");
    if (opts->dtype)
        FSDP_TRY(parse_dtype(opts->dtype, "--dtype", &rules->model, err));
    for (; rules->count < opts->dtype_rule_count; rules->count++)
        FSDP_TRY(parse_rule(opts->dtype_rules[rules->count], &rules->items[rules->count], err));
    return FSDP_OK;
}

void fsdp_cast_rules_free(fsdp_cast_rules *rules)
{
    if (!rules)
        return;
    for (size_t i = 0; i < rules->count; i++)
        regfree(&rules->items[i].expression);
    fsdp_free(rules->items);
    fsdp_free(rules);
}

fsdp_status fsdp_cast_rules_create(const fsdp_select_opts *opts, fsdp_cast_rules **rules_out,
                                   fsdp_error *err)
{
    FSDP_TRY(fsdp_expressions_check(opts->dtype_rules, opts->dtype_rule_count, "--dtype-for", err));
    fsdp_cast_rules *rules = fsdp_alloc(1, sizeof *rules);
    if (!rules)
        return fsdp_fail_memory(err, "rules");
    fsdp_status st = parse_all(opts, rules, err);
    if (st == FSDP_OK)
        *rules_out = rules;
    else
        fsdp_cast_rules_free(rules);
    return st;
}

/* A packed or quantized float: --dtype applies to it, although casts do not support it, so the
 * rule must fail. */
static bool is_packed_float(fsdp_dtype dtype)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(dtype);
    return (info && info->values > 1) || dtype == FSDP_F4_E2M1FN_X2 || dtype == FSDP_F6_E2M3 ||
           dtype == FSDP_F6_E3M2;
}

/* The first rule that has the name; NULL: none has. */
static const cast_rule *find_rule(const fsdp_cast_rules *rules, const fsdp_entry *named)
{
    for (size_t i = 0; i < rules->count; i++)
        if (fsdp_expression_matches(&rules->items[i].expression, named->name, named->name_size))
            return &rules->items[i];
    return NULL;
}

bool fsdp_cast_rules_have(const fsdp_cast_rules *rules, const fsdp_entry *entry)
{
    return find_rule(rules, entry) != NULL;
}

/* The dtype of the result, `wanted` where no rule has the name. FSDP_DTYPE_NONE when a rule demands a cast
 * that `dtype` does not allow. */
static fsdp_dtype cast_rules_decide(const fsdp_cast_rules *rules, const fsdp_entry *named,
                                    fsdp_dtype wanted, fsdp_dtype dtype, bool is_optim)
{
    const cast_rule *rule = find_rule(rules, named);
    if (rule)
        return rule->dtype == FSDP_DTYPE_NONE || rule->dtype == dtype ? dtype
               : is_castable(dtype)                                   ? rule->dtype
                                                                      : FSDP_DTYPE_NONE;
    if (wanted == FSDP_DTYPE_NONE || is_optim)
        return dtype;
    return is_castable(dtype) ? wanted : is_packed_float(dtype) ? FSDP_DTYPE_NONE : dtype;
}

/* === what the format cannot hold ============================================================== */

/* Takes the place of an argument of --drop: the cast to that dtype was requested, and the format cannot hold
 * its result. */
#define FSDP_CAST_TO "cast to "

typedef struct excess_group {
    char drop[40];
    fsdp_name_list names;
} excess_group;

/* Entries that a format cannot hold, by the --drop that removes them. Zero-initialise. */
typedef struct excess_list {
    excess_group *groups;
    size_t count, room;
    bool holds_values; /* the format holds others than these */
    bool has_pieces;   /* ranks' pieces of parameters without shapes are among them */
    bool has_units;    /* tensors of subclasses are among them */
    bool has_weights;  /* weights remain without them */
} excess_list;

static fsdp_status excess_add(excess_list *excess, const char *drop, const char *name, size_t size,
                              fsdp_error *err)
{
    size_t i = 0;
    while (i < excess->count && strcmp(excess->groups[i].drop, drop) != 0)
        i++;
    if (i == excess->count) {
        if (!fsdp_grow(&excess->groups, &excess->room, i + 1, sizeof *excess->groups))
            return fsdp_fail_memory(err, "a list of names");
        excess->groups[i] = (excess_group){0};
        snprintf(excess->groups[i].drop, sizeof excess->groups[i].drop, "%s", drop);
        excess->count++;
    }
    return fsdp_names_add(&excess->groups[i].names, name, size)
               ? FSDP_OK
               : fsdp_fail_memory(err, "a list of names");
}

static void excess_release(excess_list *excess)
{
    for (size_t i = 0; i < excess->count; i++)
        fsdp_names_release(&excess->groups[i].names);
    fsdp_free(excess->groups);
}

/* The part of the argument after `begin`, NULL when it begins otherwise. */
static const char *behind(const char *drop, const char *begin)
{
    return strncmp(drop, begin, strlen(begin)) == 0 ? drop + strlen(begin) : NULL;
}

static bool is_cast(const excess_group *group)
{
    return behind(group->drop, FSDP_CAST_TO) != NULL;
}

/* "2 values", "1 quantized tensor", "3 tensors of f8_e4m3fn", "1 flat parameter" */
static void add_count(const excess_group *group, fsdp_text *text)
{
    size_t count = group->names.count;
    const char *end = count == 1 ? "" : "s", *kind = behind(group->drop, FSDP_DROP_TENSORS);
    const char *dtype = behind(group->drop, FSDP_DROP_DTYPE);
    if (kind && strcmp(kind, "flat") == 0)
        fsdp_text_addf(text, "%zu flat parameter%s", count, end);
    else if (kind)
        fsdp_text_addf(text, "%zu %s tensor%s", count, kind, end);
    else if (dtype)
        fsdp_text_addf(text, "%zu tensor%s of %s", count, end, dtype);
    else if (is_cast(group))
        fsdp_text_addf(text, "%zu tensor%s that %s %s", count, end, count == 1 ? "is" : "are",
                       group->drop);
    else if (strcmp(group->drop, "opaque") == 0)
        fsdp_text_addf(text, "%zu opaque value%s", count, end);
    else
        fsdp_text_addf(text, "%zu value%s", count, end);
}

/* Adds the first names: all groups share the size of a message. */
static void add_names(const excess_group *group, size_t most, fsdp_text *text)
{
    size_t start = text->size;
    fsdp_text_addf(text, ":");
    for (size_t i = 0; i < group->names.count; i++) {
        if (i > 0 && text->size - start > most) {
            fsdp_text_addf(text, " and %zu more", group->names.count - i);
            return;
        }
        fsdp_text_addf(text, "%s '%s'", i ? "," : "", group->names.items[i]);
    }
}

/* Reading the whole is better than leaving out a part, where that is possible. */
static void add_other_ways(const excess_list *excess, fsdp_text *text)
{
    for (size_t i = 0; i < excess->count; i++) {
        const char *kind = behind(excess->groups[i].drop, FSDP_DROP_TENSORS);
        if (kind && strcmp(kind, "void") == 0)
            fsdp_text_addf(text, "; read elements of 2 bytes as bf16 with --void-as bf16");
        if (kind && strcmp(kind, "flat") == 0 && !excess->has_pieces)
            fsdp_text_addf(text, "; rank files name its parts only if the units' shard_metadata "
                                 "was saved next to it");
    }
    if (excess->has_pieces)
        fsdp_text_addf(text, "; the ranks have pieces of parameters; give their shapes with --like "
                             "MODEL, a Hugging Face directory or a checkpoint of the model");
}

/* Leaving these out would leave no model. */
static void add_reason(const excess_list *excess, fsdp_text *text)
{
    if (excess->has_units)
        fsdp_text_addf(
            text, "; a tensor of a subclass is one unit, with its scale; in Python, save it as a "
                  "plain tensor (dequantize()), or keep it whole with --to dcp --opaque copy");
    else
        fsdp_text_addf(text, "; without them no weights are left to convert; list what the source "
                             "holds with fsdp-ls");
}

/* Ends with the arguments: tools/convert/convert_advice.c makes a command line of them. */
static void add_advice(const excess_list *excess, fsdp_text *text)
{
    bool is_first = true, may_drop = excess->has_weights && !excess->has_units;
    if (!may_drop)
        add_reason(excess, text);
    for (size_t i = 0; i < excess->count && may_drop; i++) {
        if (is_cast(&excess->groups[i]))
            continue;
        fsdp_text_addf(text, "%s --drop %s", is_first ? "; leave out with" : "",
                       excess->groups[i].drop);
        is_first = false;
    }
    for (size_t i = 0; i < excess->count; i++)
        if (is_cast(&excess->groups[i]))
            fsdp_text_addf(text,
                           "; it has no %s; choose another --dtype, or keep tensors as they are "
                           "with --dtype-for 'RE=keep'",
                           behind(excess->groups[i].drop, FSDP_CAST_TO));
}

/* FSDP_ERR_USAGE: counts and names the entries of each group and ends with what to type, unless a model would
 * lose its weights by it. */
static fsdp_status excess_fail(const excess_list *excess, const char *format, fsdp_error *err)
{
    enum { SHOWN_BYTES = 300 };
    fsdp_text text = {0};
    bool only_values = excess->count == 1 && !excess->holds_values &&
                       strcmp(excess->groups[0].drop, "values") == 0;
    fsdp_text_addf(&text, only_values ? "%s holds tensors only" : "%s cannot hold everything",
                   format);
    for (size_t i = 0; i < excess->count; i++) {
        fsdp_text_addf(&text, "; ");
        add_count(&excess->groups[i], &text);
        add_names(&excess->groups[i], SHOWN_BYTES / excess->count, &text);
    }
    add_other_ways(excess, &text);
    if (!excess->has_pieces) /* what is left would have no weights */
        add_advice(excess, &text);
    fsdp_text_add(&text, "", 1);
    fsdp_status st = text.failed ? fsdp_fail_memory(err, "a message")
                                 : fsdp_fail(err, FSDP_ERR_USAGE, "%s", text.data);
    fsdp_text_release(&text);
    return st;
}

/* === parts for people ========================================================================= */

enum { FSDP_PART_LABELS = 40, FSDP_PART_SHOWN = 6 };

typedef struct part_label {
    const char *label;
    size_t size;
    fsdp_part_kind kind;
    int64_t tensors;
    bool is_kept;
} part_label;

/* Zero-initialised but for parts and part. */
typedef struct part_list {
    const fsdp_parts *parts;
    const char *part; /* of --part, or NULL */
    part_label items[FSDP_PART_LABELS];
    size_t count, more; /* more: entries under further labels */
} part_list;

static part_label label_of(const part_list *list, const fsdp_entry *entry, bool is_kept)
{
    part_label found = {.kind = fsdp_part_of(list->parts, entry), .is_kept = is_kept};
    found.label = fsdp_part_label_of(list->parts, entry, &found.size);
    if (found.kind == FSDP_PART_MODEL)
        found.label = list->part ? list->part : "model";
    if (found.kind == FSDP_PART_OPTIM)
        found.label = "optimizer";
    if (found.kind == FSDP_PART_MODEL || found.kind == FSDP_PART_OPTIM)
        found.size = strlen(found.label);
    return found;
}

static void part_list_add(part_list *list, const fsdp_entry *entry, bool is_kept)
{
    part_label found = label_of(list, entry, is_kept);
    size_t at = 0;
    while (at < list->count &&
           (list->items[at].is_kept != is_kept || list->items[at].size != found.size ||
            memcmp(list->items[at].label, found.label, found.size) != 0))
        at++;
    if (at == FSDP_PART_LABELS) {
        list->more++;
        return;
    }
    if (at == list->count)
        list->items[list->count++] = found;
    list->items[at].tensors += entry->kind == FSDP_ENTRY_TENSOR;
}

static void add_part(const part_label *item, fsdp_text *line)
{
    char shown[80];
    if (item->is_kept && item->tensors == 0)
        return;
    fsdp_text_addf(line, "%s%s", line->size > 0 ? " · " : "",
                   fsdp_printable(item->label, item->size, shown, sizeof shown));
    if (item->tensors > 0 && item->kind != FSDP_PART_OPTIM && item->kind != FSDP_PART_STATE)
        fsdp_text_addf(line, " %" PRId64, item->tensors);
    fsdp_text_addf(line, item->is_kept ? "" : " left out");
}

/* The part that is taken stands first, then weights, the optimizer, and the rest. */
static int rank_of(const part_label *item)
{
    if (item->is_kept)
        return 0;
    if (item->tensors > 0 && item->kind == FSDP_PART_WEIGHTS)
        return 1;
    return item->kind == FSDP_PART_OPTIM ? 2 : 3;
}

static fsdp_status part_list_spell(const part_list *list, fsdp_part_text *text, fsdp_error *err)
{
    size_t shown = 0, more = list->more;
    for (int round = 0; round <= 3; round++)
        for (size_t i = 0; i < list->count; i++) {
            const part_label *item = &list->items[i];
            if (rank_of(item) != round)
                continue;
            if (shown < FSDP_PART_SHOWN)
                add_part(item, &text->line);
            else
                more++;
            shown++;
            if (round == 1 && text->other.size == 0)
                fsdp_text_add(&text->other, item->label, item->size);
        }
    if (more > 0)
        fsdp_text_addf(&text->line, " · %zu more left out", more);
    return text->line.failed || text->other.failed ? fsdp_fail_memory(err, "a list of parts")
                                                   : FSDP_OK;
}

static void part_text_release(fsdp_part_text *text)
{
    fsdp_text_release(&text->line);
    fsdp_text_release(&text->other);
}

/* === selection ================================================================================ */

struct fsdp_selection {
    fsdp_selected *entries;
    fsdp_arena names;
    fsdp_part_text parts;
    int64_t kept, renamed, left_out, dropped;
    char prefix[64];
    fsdp_cast_pair casts[FSDP_CAST_PAIRS];
    int cast_pairs;
    int64_t optim_uncast;
    fsdp_scales_report scales; /* of a cast of the model */
    bool has_other;            /* entries are left out that are no optimizer's */
};

typedef struct selecting {
    const fsdp_sd *sd;
    const fsdp_select_opts *opts;
    const fsdp_format *target;
    const bool *is_missing;
    fsdp_names_known known;
    bool looks_only;
    fsdp_selection *selection;
    fsdp_filter *filter;
    fsdp_drop_rules *drops;
    fsdp_rename **renames;
    fsdp_cast_rules *casts;
    fsdp_only only;
    fsdp_parts parts;
    bool takes_model; /* and nothing beside it, as parts knows it */
} selecting;

/* --- model or optimizer? ---------------------------------------------------------------------- */

static bool is_optim(const selecting *work, const fsdp_entry *entry)
{
    return fsdp_entry_is_optim(entry, work->parts.state_is_optim);
}

/* --- taking and dropping ---------------------------------------------------------------------- */

static fsdp_dtype dtype_of(const fsdp_sd *sd, const fsdp_entry *entry)
{
    if (entry->kind == FSDP_ENTRY_VALUE)
        return FSDP_DTYPE_NONE;
    return entry->kind == FSDP_ENTRY_ALIAS ? fsdp_sd_at(sd, entry->target)->dtype : entry->dtype;
}

/* The entry by whose name and kind the part of another one is known: a tensor that is listed as a value is a
 * tensor, and a member belongs where its unit does. */
static fsdp_entry judged(const selecting *work, size_t i)
{
    const fsdp_selected *selected = &work->selection->entries[i];
    fsdp_entry entry = *fsdp_sd_at(work->sd, selected->unit ? selected->unit - 1 : i);
    if (selected->kind && entry.kind == FSDP_ENTRY_VALUE) {
        entry.kind = FSDP_ENTRY_TENSOR;
        entry.ndim = 1;
    }
    return entry;
}

static bool has_elements(const fsdp_sd *sd, size_t i)
{
    if (fsdp_sd_at(sd, i)->kind == FSDP_ENTRY_VALUE)
        return false;
    const fsdp_entry *tensor = fsdp_sd_at(sd, fsdp_sd_tensor_of(sd, i));
    return fsdp_shape_count(tensor->ndim, tensor->shape) > 0;
}

static bool is_taken(const selecting *work, const fsdp_entry *entry)
{
    if (work->takes_model)
        return fsdp_part_of(&work->parts, entry) == FSDP_PART_MODEL;
    return work->only == FSDP_ONLY_ALL || is_optim(work, entry) == (work->only == FSDP_ONLY_OPTIM);
}

static bool is_kept(selecting *work, size_t i)
{
    const fsdp_entry *entry = fsdp_sd_at(work->sd, i);
    fsdp_selection *selection = work->selection;
    if (!fsdp_filter_selects(work->filter, entry->name, entry->name_size) ||
        (work->looks_only && entry->kind == FSDP_ENTRY_VALUE))
        return false;
    const fsdp_entry whole = judged(work, i);
    bool optim = is_optim(work, &whole);
    fsdp_part_kind part = fsdp_part_of(&work->parts, &whole);
    selection->entries[i].is_optim = optim;
    selection->entries[i].is_model = part == FSDP_PART_MODEL;
    selection->entries[i].is_weight = (part == FSDP_PART_MODEL || part == FSDP_PART_WEIGHTS ||
                                       work->opts->only == FSDP_ONLY_OPTIM) &&
                                      has_elements(work->sd, i);
    if (!is_taken(work, &whole)) {
        selection->has_other = selection->has_other || !optim;
        selection->left_out++;
        return false;
    }
    const fsdp_droppable what = {entry, dtype_of(work->sd, entry), selection->entries[i].kind,
                                 optim};
    if (fsdp_drop_rules_take(work->drops, &what)) {
        selection->dropped++;
        return false;
    }
    selection->kept++;
    return true;
}

/* --- dtypes ----------------------------------------------------------------------------------- */

static bool is_kept_tensor(const selecting *work, size_t i)
{
    return work->selection->entries[i].is_kept && fsdp_sd_at(work->sd, i)->kind != FSDP_ENTRY_VALUE;
}

/* What --dtype asks for, but for vectors that the target wants in f32: its programs load no others. */
static fsdp_dtype usual_dtype(const selecting *work, const fsdp_entry *entry)
{
    fsdp_dtype wanted = work->casts->model;
    bool is_f32 = work->target->caps.f32_vectors && fsdp_is_vector(entry);
    return is_f32 && wanted != FSDP_DTYPE_NONE && wanted != FSDP_F64 ? FSDP_F32 : wanted;
}

/* The dtype of the result; FSDP_DTYPE_NONE for an alias that stays an alias. */
static fsdp_dtype decide_dtype(const selecting *work, size_t i)
{
    const fsdp_entry *entry = fsdp_sd_at(work->sd, i);
    bool follows = entry->kind == FSDP_ENTRY_ALIAS && is_kept_tensor(work, entry->target);
    const fsdp_entry *named = follows ? fsdp_sd_at(work->sd, entry->target) : entry;
    if (work->selection->entries[i].unit)
        return dtype_of(work->sd, entry);
    return cast_rules_decide(work->casts, named, usual_dtype(work, named),
                             dtype_of(work->sd, entry), is_optim(work, named));
}

static fsdp_status fail_uncastable(const fsdp_name_list *names, fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_text_addf(&text, "only floats of 8 bits and more can be cast");
    (void)fsdp_names_append(names, names->count == 1 ? "other" : "others", &text);
    fsdp_text_addf(&text, "; keep tensors as they are with --dtype-for 'RE=keep', which comes "
                          "before other rules");
    fsdp_status st = text.failed ? fsdp_fail_memory(err, "a message")
                                 : fsdp_fail(err, FSDP_ERR_USAGE, "%s", text.data);
    fsdp_text_release(&text);
    return st;
}

static bool add_uncastable(fsdp_name_list *names, const fsdp_entry *entry, fsdp_dtype dtype)
{
    fsdp_text text = {0};
    fsdp_text_add(&text, entry->name, entry->name_size);
    fsdp_text_addf(&text, " (%s)", fsdp_dtype_name(dtype));
    bool fine = !text.failed && fsdp_names_add(names, text.data, text.size);
    fsdp_text_release(&text);
    return fine;
}

static fsdp_status decide_dtypes(selecting *work, fsdp_error *err)
{
    fsdp_name_list names = {0};
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < fsdp_sd_count(work->sd) && st == FSDP_OK; i++) {
        fsdp_selected *selected = &work->selection->entries[i];
        if (!is_kept_tensor(work, i))
            continue;
        const fsdp_entry *entry = fsdp_sd_at(work->sd, i);
        selected->dtype = decide_dtype(work, i);
        if (selected->dtype == FSDP_DTYPE_NONE &&
            !add_uncastable(&names, entry, dtype_of(work->sd, entry)))
            st = fsdp_fail_memory(err, "a list of names");
    }
    if (st == FSDP_OK && names.count > 0)
        st = fail_uncastable(&names, err);
    fsdp_names_release(&names);
    return st;
}

static void count_cast(fsdp_selection *selection, fsdp_dtype from, fsdp_dtype to)
{
    int at = 0;
    while (at < selection->cast_pairs &&
           (selection->casts[at].from != from || selection->casts[at].to != to))
        at++;
    if (at == selection->cast_pairs)
        selection->casts[selection->cast_pairs++] = (fsdp_cast_pair){from, to, 0};
    selection->casts[at].tensors++;
}

/* Counts the tensors that are cast; in formats without aliases also the aliases, which become
 * tensors. */
static void count_casts(selecting *work)
{
    for (size_t i = 0; i < fsdp_sd_count(work->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(work->sd, i);
        fsdp_dtype from = dtype_of(work->sd, entry), to = work->selection->entries[i].dtype;
        bool is_tensor = entry->kind == FSDP_ENTRY_TENSOR || !work->target->caps.aliases ||
                         !is_kept_tensor(work, entry->target);
        if (!is_kept_tensor(work, i) || !is_tensor)
            continue;
        if (from != to)
            count_cast(work->selection, from, to);
        else if (work->opts->dtype && is_optim(work, entry) && fsdp_dtype_describe(to)->is_float)
            work->selection->optim_uncast++;
    }
}

/* --- what the format holds --------------------------------------------------------------------- */

/* No value refers to elements in the source. */
static bool holds_parts(fsdp_caps caps, const fsdp_value *value)
{
    return caps.classes ? !fsdp_value_holds_tensor(value) : !fsdp_value_is_opaque(value);
}

/* The argument of --drop that removes an entry which the format cannot hold; NULL when it can. A member is
 * judged where the format holds its unit. */
static const char *excess_of(const selecting *work, size_t i, char drop[40])
{
    const fsdp_entry *entry = fsdp_sd_at(work->sd, i);
    const fsdp_selected *selected = &work->selection->entries[i];
    const char *kind = unit_has_member(work->selection->entries, i) ? NULL : selected->kind;
    const fsdp_format_writer *writer = work->target->writer;
    const fsdp_caps caps = work->target->caps;
    bool is_value = entry->kind == FSDP_ENTRY_VALUE;
    bool is_blob = is_value && entry->value.kind == FSDP_VALUE_OPAQUE;
    bool is_held = !kind || !caps.model_only || selected->is_optim;
    if (is_value)
        is_held = caps.values && (is_blob ? caps.opaque : holds_parts(caps, &entry->value));
    if (is_value && writer->holds_value && kind)
        is_held = is_held && writer->holds_value(entry->name, entry->name_size, &entry->value);
    if (!is_held && kind) {
        strcat(strcpy(drop, FSDP_DROP_TENSORS), kind);
        return drop;
    }
    if (!is_held)
        return !caps.values && !fsdp_value_holds_tensor(&entry->value) ? "values" : "opaque";
    if (is_value && writer->holds_value &&
        !writer->holds_value(entry->name, entry->name_size, &entry->value))
        return is_blob ? "opaque" : "values";
    if (is_value || writer->holds_dtype(selected->dtype))
        return NULL;
    strcpy(drop, selected->dtype == dtype_of(work->sd, entry) ? FSDP_DROP_DTYPE : FSDP_CAST_TO);
    strncat(drop, fsdp_dtype_name(selected->dtype), 24);
    return drop;
}

/* Checked before other limits: choosing the one tensor resolves those as well. */
static fsdp_status check_one(const selecting *work, fsdp_error *err)
{
    size_t tensors = 0;
    for (size_t i = 0; i < fsdp_sd_count(work->sd); i++)
        tensors += work->selection->entries[i].is_kept &&
                   fsdp_sd_at(work->sd, i)->kind == FSDP_ENTRY_TENSOR;
    if (tensors <= 1)
        return FSDP_OK;
    return fsdp_fail(
        err, FSDP_ERR_USAGE,
        "%s holds one tensor, but %zu are selected; choose one with --include, or write an npz",
        work->target->name, tensors);
}

/* False for a member of a unit that the format cannot hold. */
static bool is_judged(const selecting *work, size_t i)
{
    const fsdp_selected *selected = &work->selection->entries[i];
    char room[40];
    return selected->is_kept && (!unit_has_member(work->selection->entries, i) ||
                                 !excess_of(work, selected->unit - 1, room));
}

static fsdp_status check_limits(const selecting *work, fsdp_error *err)
{
    excess_list excess = {.holds_values = work->target->caps.values};
    fsdp_status st = FSDP_OK;
    if (work->target->caps.nameless)
        FSDP_TRY(check_one(work, err));
    for (size_t i = 0; i < fsdp_sd_count(work->sd) && st == FSDP_OK; i++) {
        char room[40];
        const fsdp_entry *entry = fsdp_sd_at(work->sd, i);
        const fsdp_selected *selected = &work->selection->entries[i];
        if (!is_judged(work, i))
            continue;
        const char *drop = excess_of(work, i, room);
        excess.has_weights = excess.has_weights || (!drop && selected->is_weight);
        excess.has_units = excess.has_units || (drop && selected->unit);
        if (drop)
            st = excess_add(&excess, drop, entry->name, entry->name_size, err);
        excess.has_pieces = excess.has_pieces || (drop && fsdp_is_flat_piece(work->sd, entry));
    }
    if (st == FSDP_OK && excess.count > 0)
        st = excess_fail(&excess, work->target->name, err);
    excess_release(&excess);
    return st;
}

/* --- names ------------------------------------------------------------------------------------ */

static fsdp_status rename_entry(selecting *work, size_t i, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(work->sd, i);
    fsdp_selected *selected = &work->selection->entries[i];
    fsdp_text name = {0};
    fsdp_status st = FSDP_OK;
    fsdp_text_add(&name, entry->name, entry->name_size);
    for (size_t r = 0; r < work->opts->rename_count && st == FSDP_OK; r++)
        st = fsdp_rename_apply(work->renames[r], &name, err);
    st = st ? st : fsdp_name_in_item(work->target, entry, is_optim(work, entry), &name, err);
    if (st == FSDP_OK) {
        selected->name =
            fsdp_arena_strndup(&work->selection->names, name.size ? name.data : "", name.size);
        selected->name_size = name.size;
        if (name.failed || !selected->name)
            st = fsdp_fail_memory(err, "a name");
        else if (name.size != entry->name_size || memcmp(name.data, entry->name, name.size) != 0)
            work->selection->renamed++;
    }
    fsdp_text_release(&name);
    return st;
}

static fsdp_status rename_all(selecting *work, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_count(work->sd); i++)
        if (work->selection->entries[i].is_kept)
            FSDP_TRY(rename_entry(work, i, err));
    return FSDP_OK;
}

static bool is_renamed(const selecting *work, size_t i)
{
    const fsdp_entry *entry = fsdp_sd_at(work->sd, i);
    const fsdp_selected *selected = &work->selection->entries[i];
    return selected->name_size != entry->name_size ||
           memcmp(selected->name, entry->name, entry->name_size) != 0;
}

/* The rule that gave the entry its new name: the last one that changed it. */
static const char *rule_of(const selecting *work, size_t i)
{
    const fsdp_entry *entry = fsdp_sd_at(work->sd, i);
    const char *rule = "";
    fsdp_text name = {0}, before = {0};
    fsdp_text_add(&name, entry->name, entry->name_size);
    for (size_t r = 0; r < work->opts->rename_count; r++) {
        before.size = 0;
        fsdp_text_add(&before, name.size ? name.data : "", name.size);
        if (fsdp_rename_apply(work->renames[r], &name, NULL) != FSDP_OK)
            break;
        if (name.size != before.size || memcmp(name.data, before.data, name.size) != 0)
            rule = work->opts->renames[r];
    }
    fsdp_text_release(&name);
    fsdp_text_release(&before);
    return rule[0] ? rule : work->target->name; /* it puts names into items */
}

/* At least one of the two entries was renamed. */
static fsdp_status fail_collision(const selecting *work, size_t first, size_t second,
                                  fsdp_error *err)
{
    size_t culprit = is_renamed(work, second) ? second : first;
    size_t victim = culprit == second ? first : second;
    const fsdp_entry *from = fsdp_sd_at(work->sd, culprit), *other = fsdp_sd_at(work->sd, victim);
    const fsdp_selected *selected = &work->selection->entries[culprit];
    char new[160], old[160], second_old[160];
    fsdp_printable(selected->name, selected->name_size, new, sizeof new);
    fsdp_printable(from->name, from->name_size, old, sizeof old);
    fsdp_printable(other->name, other->name_size, second_old, sizeof second_old);
    if (is_renamed(work, victim))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "renaming by '%s' gives the name '%s' to '%s' and to '%s'",
                         rule_of(work, culprit), new, old, second_old);
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "renaming by '%s' gives the name '%s' to '%s', but '%s' exists already",
                     rule_of(work, culprit), new, old, second_old);
}

/* Renaming may give two entries one name; adding the new names to a state dict finds that. */
static fsdp_status check_collisions(const selecting *work, fsdp_error *err)
{
    fsdp_sd *names = NULL;
    const fsdp_value nothing = {0};
    if (work->selection->renamed == 0)
        return FSDP_OK;
    FSDP_TRY(fsdp_sd_create(&names, err));
    size_t *entries = fsdp_alloc(fsdp_sd_count(work->sd), sizeof *entries);
    fsdp_status st = entries ? FSDP_OK : fsdp_fail_memory(err, "names");
    for (size_t i = 0; i < fsdp_sd_count(work->sd) && st == FSDP_OK; i++) {
        const fsdp_selected *selected = &work->selection->entries[i];
        if (!selected->is_kept)
            continue;
        int64_t taken = fsdp_sd_find(names, selected->name, selected->name_size);
        if (taken >= 0) {
            st = fail_collision(work, entries[taken], i, err);
            break;
        }
        entries[fsdp_sd_count(names)] = i;
        st = fsdp_sd_add_value(names, selected->name, selected->name_size, &nothing, err);
        if (st == FSDP_ERR_USAGE && is_renamed(work, i))
            fsdp_error_prefix(err, "renaming by '%s'", rule_of(work, i));
    }
    fsdp_free(entries);
    fsdp_sd_free(names);
    return st;
}

/* Finds the first name element that all kept tensors of the model share. */
static void find_prefix(selecting *work)
{
    char *prefix = work->selection->prefix;
    size_t size = 0;
    for (size_t i = 0; i < fsdp_sd_count(work->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(work->sd, i);
        const fsdp_selected *selected = &work->selection->entries[i];
        if (!selected->is_kept || entry->kind == FSDP_ENTRY_VALUE || is_optim(work, entry))
            continue;
        const char *dot = memchr(selected->name, '.', selected->name_size);
        size_t length = dot ? (size_t)(dot - selected->name) + 1 : 0;
        bool same = size == 0 || (length == size && memcmp(prefix, selected->name, size) == 0);
        if (length == 0 || length >= sizeof work->selection->prefix || !same) {
            prefix[0] = '\0';
            return;
        }
        memcpy(prefix, selected->name, length);
        prefix[size = length] = '\0';
    }
}

/* --- the calls -------------------------------------------------------------------------------- */

static fsdp_status take_rules(selecting *work, fsdp_error *err)
{
    const fsdp_select_opts *opts = work->opts;
    FSDP_TRY(fsdp_expressions_check(opts->renames, opts->rename_count, "--rename", err));
    work->renames = fsdp_alloc(opts->rename_count, sizeof(fsdp_rename *));
    if (!work->renames)
        return fsdp_fail_memory(err, "rules");
    FSDP_TRY(fsdp_filter_create(opts->include, opts->exclude, &work->filter, err));
    FSDP_TRY(fsdp_cast_rules_create(opts, &work->casts, err));
    FSDP_TRY(fsdp_drop_rules_create(opts, &work->drops, err));
    for (size_t i = 0; i < opts->rename_count; i++)
        FSDP_TRY(fsdp_rename_create(opts->renames[i], &work->renames[i], err));
    return FSDP_OK;
}

static void release_rules(selecting *work)
{
    for (size_t i = 0; work->renames && i < work->opts->rename_count; i++)
        fsdp_rename_free(work->renames[i]);
    fsdp_drop_rules_free(work->drops);
    fsdp_free(work->renames);
    fsdp_filter_free(work->filter);
    fsdp_cast_rules_free(work->casts);
}

static bool has_tensors(const fsdp_sd *sd)
{
    for (size_t i = 0; i < fsdp_sd_count(sd); i++)
        if (has_elements(sd, i))
            return true;
    return false;
}

/* The name of the first part that has weights beside the model, for --part; NULL: none has. */
static const char *other_weights(const selecting *work, size_t *size_out)
{
    for (size_t i = 0; i < fsdp_sd_count(work->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(work->sd, i);
        if (!work->selection->entries[i].is_weight)
            continue;
        const char *label = fsdp_part_label_of(&work->parts, entry, size_out);
        if (label + *size_out < entry->name + entry->name_size)
            return label;
    }
    return NULL;
}

/* FSDP_DIFFERS when no name matches; a usage error when --drop, or the format, left out all that matched. */
static fsdp_status fail_empty(const selecting *work, fsdp_error *err)
{
    char part[160];
    size_t size;
    if (work->selection->dropped > 0)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "nothing is left to convert: --drop leaves out everything that was selected");
    if (work->opts->only != FSDP_ONLY_DEFAULT || work->selection->left_out == 0)
        return fsdp_fail(err, FSDP_DIFFERS, "no name matches");
    const char *label = other_weights(work, &size);
    if (label)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "there is no model, and %s takes only the model by default; take other "
                         "weights with --part '%s'",
                         work->target->name, fsdp_printable(label, size, part, sizeof part));
    return fsdp_fail(
        err, FSDP_ERR_USAGE, "%s, and %s is for models: %s",
        work->selection->has_other ? "there is no model" : "all entries belong to the optimizer",
        work->target->name,
        has_tensors(work->sd) ? "fsdp, dcp, fsdp-file and torch hold other tensors as well"
                              : "list what the source holds with fsdp-ls");
}

static fsdp_status describe_parts(selecting *work, fsdp_error *err)
{
    part_list list = {.parts = &work->parts, .part = work->opts->part};
    for (size_t i = 0; i < fsdp_sd_count(work->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(work->sd, i);
        bool kept = work->selection->entries[i].is_kept;
        const fsdp_entry whole = judged(work, i);
        if (kept || !is_taken(work, &whole))
            part_list_add(&list, entry, kept);
    }
    return part_list_spell(&list, &work->selection->parts, err);
}

/* True for "NAME#2", which is what a source calls the second tensor of a name. */
static bool is_double(const fsdp_sd *sd, const fsdp_entry *entry)
{
    const char *mark = memrchr(entry->name, '#', entry->name_size);
    size_t size = mark ? (size_t)(mark - entry->name) : 0;
    return mark && size + 1 < entry->name_size &&
           strspn(mark + 1, "0123456789") + size + 1 == entry->name_size &&
           fsdp_sd_find(sd, entry->name, size) >= 0;
}

/* A model for a loader has elements, and each of its names once. */
static fsdp_status check_model(const selecting *work, fsdp_error *err)
{
    int64_t tensors = 0, elements = 0;
    if (!work->target->caps.for_loaders || work->looks_only)
        return FSDP_OK;
    for (size_t i = 0; i < fsdp_sd_count(work->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(work->sd, i);
        char name[160];
        if (!work->selection->entries[i].is_kept || entry->kind == FSDP_ENTRY_VALUE)
            continue;
        if (is_double(work->sd, entry))
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "the source holds two tensors of one name, and '%s' is the second; "
                             "leave one out with --exclude, or rename it with --rename",
                             fsdp_printable(entry->name, entry->name_size, name, sizeof name));
        entry = fsdp_sd_at(work->sd, fsdp_sd_tensor_of(work->sd, i));
        tensors++;
        elements += fsdp_shape_count(entry->ndim, entry->shape) > 0;
    }
    if (tensors == 0 || elements > 0)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "%s of the model without one element: the weights are in other files "
                     "(DeepSpeed's ZeRO-3 keeps them in *_optim_states.pt); give the directory, or "
                     "convert what is here with --only all",
                     tensors == 1 ? "this is a tensor" : "these are tensors");
}

static fsdp_status select_entries(selecting *work, fsdp_error *err)
{
    size_t count = fsdp_sd_count(work->sd);
    FSDP_TRY(take_rules(work, err));
    work->selection->entries = fsdp_alloc(count, sizeof *work->selection->entries);
    if (!work->selection->entries)
        return fsdp_fail_memory(err, "a selection");
    FSDP_TRY(fsdp_parts_find(work->sd, work->known, work->opts->part, &work->parts, err));
    if (count > 0)
        FSDP_TRY(fsdp_drop_rules_check(work->drops, work->sd, err));
    FSDP_TRY(units_find(work->sd, work->selection->entries, err));
    for (size_t i = 0; i < count; i++)
        work->selection->entries[i].is_kept =
            !(work->is_missing && work->is_missing[i]) && is_kept(work, i);
    if (work->selection->left_out > 0)
        FSDP_TRY(describe_parts(work, err));
    if (work->selection->kept == 0 && count > 0)
        return fail_empty(work, err);
    FSDP_TRY(units_check(work->sd, work->selection->entries, err));
    FSDP_TRY(check_model(work, err));
    FSDP_TRY(decide_dtypes(work, err));
    FSDP_TRY(fsdp_scales_check(work->sd, work->selection->entries, &work->selection->scales, err));
    if (!work->opts->dtype || strcmp(work->opts->dtype, "keep") == 0)
        work->selection->scales = (fsdp_scales_report){0};
    count_casts(work);
    FSDP_TRY(check_limits(work, err));
    FSDP_TRY(rename_all(work, err));
    FSDP_TRY(check_collisions(work, err));
    find_prefix(work);
    return FSDP_OK;
}

const fsdp_part_text *fsdp_selection_parts(const fsdp_selection *selection)
{
    return &selection->parts;
}

fsdp_status fsdp_selection_create(const fsdp_select_from *from, const fsdp_select_opts *opts,
                                  const fsdp_format *target, fsdp_selection **selection_out,
                                  fsdp_error *err)
{
    selecting work = {.sd = from->sd,
                      .opts = opts,
                      .target = target,
                      .is_missing = from->is_missing,
                      .known = from->known,
                      .looks_only = from->looks_only,
                      .only = opts->only};
    work.selection = fsdp_alloc(1, sizeof *work.selection);
    if (!work.selection)
        return fsdp_fail_memory(err, "a selection");
    if (work.only == FSDP_ONLY_DEFAULT)
        work.only = target->caps.model_only ? FSDP_ONLY_MODEL : FSDP_ONLY_ALL;
    work.takes_model = opts->part || (target->caps.model_part && work.only == FSDP_ONLY_MODEL);
    fsdp_status st = select_entries(&work, err);
    release_rules(&work);
    if (st != FSDP_OK) {
        fsdp_selection_free(work.selection);
        return st;
    }
    *selection_out = work.selection;
    return FSDP_OK;
}

void fsdp_selection_free(fsdp_selection *selection)
{
    if (!selection)
        return;
    fsdp_arena_release(&selection->names);
    part_text_release(&selection->parts);
    fsdp_free(selection->entries);
    fsdp_free(selection);
}

const fsdp_selected *fsdp_selection_at(const fsdp_selection *selection, size_t entry)
{
    return &selection->entries[entry];
}

bool fsdp_selection_has_weights(const fsdp_selection *selection, const fsdp_sd *sd)
{
    for (size_t i = 0; i < fsdp_sd_count(sd); i++)
        if (selection->entries[i].is_kept && selection->entries[i].is_weight)
            return true;
    return false;
}

void fsdp_selection_leave_out(fsdp_selection *selection, size_t entry)
{
    selection->entries[entry].is_kept = false;
    selection->entries[entry].is_tied = true;
    selection->kept--;
}

void fsdp_selection_count(const fsdp_selection *selection, fsdp_selection_counts *counts_out)
{
    *counts_out = (fsdp_selection_counts){.renamed = selection->renamed,
                                          .left_out = selection->left_out,
                                          .dropped = selection->dropped,
                                          .cast_pairs = selection->cast_pairs,
                                          .optim_uncast = selection->optim_uncast,
                                          .quantized = selection->scales.integers,
                                          .quantized_known = selection->scales.known};
    memcpy(counts_out->prefix, selection->prefix, sizeof counts_out->prefix);
    memcpy(counts_out->casts, selection->casts, sizeof counts_out->casts);
    for (int i = 0; i < selection->cast_pairs; i++)
        counts_out->cast += selection->casts[i].tensors;
}
