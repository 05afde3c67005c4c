/*
 * fsdp-convert's output: its plan as text and as JSON, its last two lines, and the command that compares. See
 * convert_tool.h.
 */
#include "tools/convert/convert_tool.h"
#include "base/text.h"

#include <ctype.h>
#include <fsdp/filter.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* === the plan and its results ================================================================= */

/* Returns the first note of a kind; NULL: the plan has none. */
static const fsdp_convert_note *find_note(const fsdp_convert_plan *plan, fsdp_note_kind kind)
{
    for (size_t i = 0; plan && i < plan->note_count; i++)
        if (plan->notes[i].kind == kind)
            return &plan->notes[i];
    return NULL;
}

/* The last element of a path, which is enough for people. */
static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash && slash[1] ? slash + 1 : path;
}

static bool is_ours(const convert_options *opts)
{
    return convert_target(opts)->caps.has_kinds;
}

/* "(fsdp sharded, world 8, zstd)", "(hf)", "(dcp, world 4)" */
static void add_target(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan)
{
    fsdp_text_addf(text, " (%s", opts->convert.format);
    if (is_ours(opts))
        fsdp_text_addf(text, " %s", cli_kind(opts->convert.kind));
    if (is_ours(opts) || plan->world > 1)
        fsdp_text_addf(text, ", world %d", plan->world);
    fsdp_text_addf(text, opts->convert.compress ? ", zstd)\n" : ")\n");
}

static void add_source(fsdp_text *text, const fsdp_checkpoint_info *info)
{
    cli_add_message(text, base_name(info->path));
    fsdp_text_addf(text, " (%s", info->format);
    if (info->format_major > 0)
        fsdp_text_addf(text, " %s, world %d", cli_kind(info->kind), info->world);
    fsdp_text_addf(text, ") -> ");
}

/* Adds the lines of a note that a plan has. */
static void add_note(fsdp_text *text, const fsdp_convert_note *note)
{
    for (const char *at = note->text; *at && note->level != FSDP_NOTE_IN_SHORT;) {
        size_t size = strcspn(at, "\n");
        fsdp_text_addf(text, "  %.*s\n", (int)size, at);
        at += size + (at[size] == '\n');
    }
}

void convert_say_notes(const fsdp_convert_plan *plan)
{
    for (size_t i = 0; i < plan->note_count; i++)
        if (plan->notes[i].level != FSDP_NOTE_LINE)
            cli_say("note", "%s", plan->notes[i].text);
}

void convert_add_plan(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan)
{
    const fsdp_checkpoint_info *info = fsdp_checkpoint_describe(plan->source);
    char number[CLI_NUMBER];
    bool fits = plan->free_bytes >= plan->bytes_needed;
    fsdp_text_addf(text, "plan  ");
    add_source(text, info);
    cli_add_message(text, opts->to);
    add_target(text, opts, plan);
    fsdp_text_addf(text, "  %s, ", cli_plural(plan->tensors, "tensor", number));
    fsdp_text_addf(text, "%s, %" PRId64 " alias%s, ", cli_plural(plan->values, "value", number),
                   plan->aliases, plan->aliases == 1 ? "" : "es");
    fsdp_text_addf(text, "%s\n", cli_plural(plan->files, "file", number));
    fsdp_text_addf(text, "  read %s", cli_bytes(plan->bytes_read, number));
    if (plan->bytes_read < info->tensor_bytes)
        fsdp_text_addf(text, " of %s", cli_bytes(info->tensor_bytes, number));
    fsdp_text_addf(text, "   write %s%s", opts->convert.compress ? "at most " : "",
                   cli_bytes(plan->bytes_written, number));
    fsdp_text_addf(text, "   peak memory %s", cli_bytes(plan->peak_memory, number));
    if (plan->free_bytes >= 0)
        fsdp_text_addf(text, "   free %s: ", cli_bytes(plan->free_bytes, number));
    if (plan->free_bytes >= 0 && fits)
        fsdp_text_addf(text, "ok");
    else if (plan->free_bytes >= 0)
        fsdp_text_addf(text, "not enough for %s, including bytes beside the tensors",
                       cli_bytes(plan->bytes_needed, number));
    fsdp_text_add(text, "\n", 1);
    if (plan->bytes_spooled > 0)
        fsdp_text_addf(text,
                       "  unpack %s temporarily beside the result (packed, read out of order)\n",
                       cli_bytes(plan->bytes_spooled, number));
    for (size_t i = 0; i < plan->note_count; i++)
        add_note(text, &plan->notes[i]);
}

/* DST.xxh3, as JSON or for people. */
static void add_digest_file(fsdp_text *text, const convert_options *opts, bool json)
{
    fsdp_text path = {0};
    size_t size = strlen(opts->to);
    while (size > 1 && opts->to[size - 1] == '/')
        size--;
    fsdp_text_add(&path, opts->to, size);
    fsdp_text_addf(&path, ".xxh3");
    if (path.failed)
        text->failed = true;
    else if (json)
        fsdp_text_add_json_shown(text, path.data, path.size);
    else
        cli_add_message(text, path.data);
    fsdp_text_release(&path);
}

/* --- JSON ------------------------------------------------------------------------------------- */

static void add_string(fsdp_text *text, const char *before, const char *data, size_t size)
{
    fsdp_text_addf(text, "%s", before);
    fsdp_text_add_json_shown(text, data, size);
}

typedef struct json_member json_member;
typedef void (*json_add)(fsdp_text *text, const fsdp_convert_plan *plan,
                         const fsdp_convert_note *note);

static void add_count(fsdp_text *text, const fsdp_convert_plan *plan, const fsdp_convert_note *note)
{
    (void)plan;
    fsdp_text_addf(text, "%" PRId64, note->count);
}

/* Tied names are left out, too. */
static void add_left_out(fsdp_text *text, const fsdp_convert_plan *plan,
                         const fsdp_convert_note *note)
{
    const fsdp_convert_note *tied = find_note(plan, FSDP_NOTE_TIED);
    fsdp_text_addf(text, "%" PRId64, note->count + (tied ? tied->count : 0));
}

static void add_true(fsdp_text *text, const fsdp_convert_plan *plan, const fsdp_convert_note *note)
{
    (void)plan;
    (void)note;
    fsdp_text_addf(text, "true");
}

static void add_word(fsdp_text *text, const fsdp_convert_plan *plan, const fsdp_convert_note *note)
{
    (void)plan;
    add_string(text, "", note->items[0].name, note->items[0].name_size);
}

static void add_names(fsdp_text *text, const fsdp_convert_plan *plan, const fsdp_convert_note *note)
{
    (void)plan;
    fsdp_text_addf(text, "[");
    for (size_t i = 0; i < note->item_count; i++)
        add_string(text, i > 0 ? ", " : "", note->items[i].name, note->items[i].name_size);
    fsdp_text_addf(text, "]");
}

static void add_stages(fsdp_text *text, const fsdp_convert_plan *plan,
                       const fsdp_convert_note *first)
{
    fsdp_text_addf(text, "[");
    for (size_t i = 0; i < plan->note_count; i++)
        if (plan->notes[i].kind == FSDP_NOTE_STAGE)
            fsdp_text_addf(text, "%s\"%s\"", &plan->notes[i] == first ? "" : ", ",
                           plan->notes[i].items[0].name);
    fsdp_text_addf(text, "]");
}

static void add_pairs(fsdp_text *text, const fsdp_convert_plan *plan, const fsdp_convert_note *note)
{
    (void)plan;
    fsdp_text_addf(text, "{");
    for (size_t i = 0; i < note->item_count; i++) {
        add_string(text, i > 0 ? ", " : "", note->items[i].name, note->items[i].name_size);
        add_string(text, ": ", note->items[i].other, note->items[i].other_size);
    }
    fsdp_text_addf(text, "}");
}

static void add_code(fsdp_text *text, const fsdp_convert_plan *plan, const fsdp_convert_note *note)
{
    (void)plan;
    fsdp_text_addf(text, "[");
    for (size_t i = 0; i < note->item_count; i++) {
        const fsdp_note_item *code = &note->items[i];
        add_string(text, i > 0 ? ", {\"name\": " : "{\"name\": ", code->name, code->name_size);
        add_string(text, ", \"class\": ", code->other, code->other_size);
        fsdp_text_addf(text, ", \"bytes\": %" PRId64 "}", code->number);
    }
    fsdp_text_addf(text, "]");
}

static const fsdp_convert_note no_note;

static void add_model(fsdp_text *text, const fsdp_convert_plan *plan, const fsdp_convert_note *note)
{
    const fsdp_convert_note *extra = find_note(plan, FSDP_NOTE_EXTRA);
    add_string(text, "{\"type\": ", note->items[0].name, note->items[0].name_size);
    fsdp_text_addf(text,
                   ", \"tensors\": %" PRId64 ", \"missing\": %" PRId64 ", \"extra\": ", note->count,
                   note->items[0].number);
    add_names(text, plan, extra ? extra : &no_note);
    fsdp_text_addf(text, "}");
}

static void add_casts(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan)
{
    const fsdp_convert_note *note = find_note(plan, FSDP_NOTE_CAST);
    const fsdp_cast_report *cast = &opts->cast;
    if (!note)
        return;
    fsdp_text_addf(text, "\"cast\": {\"tensors\": %" PRId64 ", \"types\": [", note->count);
    for (size_t i = 0; i < note->item_count; i++)
        fsdp_text_addf(text, "%s{\"from\": \"%s\", \"to\": \"%s\", \"tensors\": %" PRId64 "}",
                       i > 0 ? ", " : "", note->items[i].name, note->items[i].other,
                       note->items[i].number);
    fsdp_text_addf(text, "]");
    if (!opts->plan) {
        fsdp_text_addf(text,
                       ", \"overflow\": %" PRId64 ", \"nan\": %" PRId64 ", \"underflow\": %" PRId64
                       ", \"max_rel_rounding\": ",
                       cast->overflows, cast->nans, cast->underflows);
        fsdp_text_add_f64(text, cast->max_rounding);
    }
    fsdp_text_addf(text, "},\n ");
}

/* Members that are made of notes: in the first line, and in lines of their own. */
static const struct json_member {
    const char *before;
    fsdp_note_kind kind;
    json_add add;
    bool is_always;
} numbers[] = {{",\n \"renamed\": ", FSDP_NOTE_RENAMED, add_count, true},
               {", \"left_out\": ", FSDP_NOTE_LEFT_OUT, add_left_out, true},
               {", \"dropped\": ", FSDP_NOTE_DROPPED, add_count, true},
               {", \"stages\": ", FSDP_NOTE_STAGE, add_stages, false},
               {", \"optim\": ", FSDP_NOTE_OPTIM, add_word, false},
               {", \"quantized\": ", FSDP_NOTE_QUANTIZED, add_count, false},
               {", \"rounded\": ", FSDP_NOTE_ROUNDED, add_count, false},
               {", \"in_tuples\": ", FSDP_NOTE_TUPLES, add_count, false},
               {", \"lacks_tokenizer\": ", FSDP_NOTE_TOKENIZER, add_true, false}},
  short_tensors[] = {{", \"short_tensors\": ", FSDP_NOTE_SHORT, add_count, true}},
  lists[] = {{",\n \"unread\": ", FSDP_NOTE_UNREAD, add_names, false},
             {",\n \"metadata_left_out\": ", FSDP_NOTE_METADATA, add_names, false},
             {",\n \"model\": ", FSDP_NOTE_MODEL, add_model, false},
             {",\n \"parts\": ", FSDP_NOTE_LEFT_OUT, add_word, false},
             {",\n \"tied\": ", FSDP_NOTE_TIED, add_pairs, true},
             {", \"copied\": ", FSDP_NOTE_COPIED, add_names, true},
             {", \"code\": ", FSDP_NOTE_CODE, add_code, true},
             {", \"missing\": ", FSDP_NOTE_MISSING, add_names, true}};

static void add_members(fsdp_text *text, const fsdp_convert_plan *plan, const json_member *members,
                        size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const fsdp_convert_note *note = find_note(plan, members[i].kind);
        bool lacks_item = note && members[i].add == add_word && note->item_count == 0;
        if ((!note && !members[i].is_always) || lacks_item)
            continue;
        fsdp_text_addf(text, "%s", members[i].before);
        members[i].add(text, plan, note ? note : &no_note);
    }
}

static void add_outcome(fsdp_text *text, const convert_options *opts,
                        const convert_outcome *outcome)
{
    if (opts->plan)
        fsdp_text_addf(text, "\"written\": false");
    else
        fsdp_text_addf(text, "\"written\": true, \"verified\": %s, \"seconds\": %.3f",
                       opts->convert.skip_verify ? "false" : "true", outcome->seconds);
    if (opts->write_digests && !opts->plan && !outcome->failure) {
        fsdp_text_addf(text, ",\n \"digests\": ");
        add_digest_file(text, opts, true);
    }
    if (outcome->digests.size > 0)
        fsdp_text_addf(text, ",\n \"sha256\": {%.*s}", (int)outcome->digests.size,
                       outcome->digests.data);
    if (outcome->failure) {
        fsdp_text_addf(text, ", ");
        cli_add_json_error(text, outcome->failure->status, outcome->failure);
    }
    fsdp_text_addf(text, "}\n");
}

void convert_add_json(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan,
                      const convert_outcome *outcome)
{
    const fsdp_checkpoint_info *info = fsdp_checkpoint_describe(plan->source);
    add_string(text, "{\"schema\": 1, \"from\": ", info->path, strlen(info->path));
    add_string(text, ", \"to\": ", opts->to, strlen(opts->to));
    fsdp_text_addf(text, ",\n \"format\": \"%s\"", opts->convert.format);
    if (is_ours(opts))
        fsdp_text_addf(text, ", \"kind\": \"%s\"", cli_kind(opts->convert.kind));
    fsdp_text_addf(text, ", \"world_size\": %d, \"files\": %d", plan->world, plan->files);
    fsdp_text_addf(text,
                   ",\n \"tensors\": %" PRId64 ", \"values\": %" PRId64 ", \"aliases\": %" PRId64,
                   plan->tensors, plan->values, plan->aliases);
    fsdp_text_addf(text, ",\n \"bytes_checked\": %" PRId64, plan->bytes_checked);
    fsdp_text_addf(text,
                   ", \"bytes_read\": %" PRId64 ", \"bytes_written\": %" PRId64
                   ", \"peak_memory\": %" PRId64,
                   plan->bytes_read, plan->bytes_written, plan->peak_memory);
    add_members(text, plan, numbers, sizeof numbers / sizeof *numbers);
    if (convert_is_given(opts, "shard-dim"))
        add_members(text, plan, short_tensors, 1);
    fsdp_text_addf(text,
                   ",\n \"bytes_spooled\": %" PRId64 ", \"bytes_needed\": %" PRId64
                   ", \"free_bytes\": %" PRId64,
                   plan->bytes_spooled, plan->bytes_needed, plan->free_bytes);
    add_members(text, plan, lists, sizeof lists / sizeof *lists);
    fsdp_text_addf(text, ",\n ");
    add_casts(text, opts, plan);
    add_outcome(text, opts, outcome);
}

/* "HEX  NAME"; where a backslash or an end of line is in the name, spelled as sha256sum does. */
static void add_sum_line(fsdp_text *text, const char *name, const uint8_t digest[32])
{
    bool spelled = strpbrk(name, "\\\n\r") != NULL;
    fsdp_text_addf(text, "%s", spelled ? "\\" : "");
    fsdp_text_add_hex(text, digest, 32);
    fsdp_text_addf(text, "  ");
    for (; *name; name++) {
        if (strchr("\\\n\r", *name))
            fsdp_text_addf(text, "\\%c", *name == '\n' ? 'n' : *name == '\r' ? 'r' : '\\');
        else
            fsdp_text_add(text, name, 1);
    }
    fsdp_text_addf(text, "\n");
}

void convert_add_digest(fsdp_text *text, bool json, const char *name, const uint8_t digest[32])
{
    if (!json) {
        add_sum_line(text, name, digest);
        return;
    }
    fsdp_text_addf(text, "%s", text->size > 0 ? ",\n  " : "");
    fsdp_text_add_json_shown(text, name, strlen(name));
    fsdp_text_addf(text, ": \"");
    fsdp_text_add_hex(text, digest, 32);
    fsdp_text_addf(text, "\"");
}

/* "0 overflow, 0 NaN, max rel rounding 3.9e-03, " */
static void add_cast_result(fsdp_text *text, const fsdp_cast_report *cast)
{
    fsdp_text_addf(text, "%" PRId64 " overflow, ", cast->overflows);
    if (cast->underflows > 0)
        fsdp_text_addf(text, "%" PRId64 " underflow, ", cast->underflows);
    fsdp_text_addf(text, "%" PRId64 " NaN, max rel rounding %.1e, ", cast->nans,
                   cast->max_rounding);
}

/* Adds an option with the number rounded up to one digit. The smallest numbers have powers of ten that a
 * double does not have, so every digit is tried. */
static void add_bound(fsdp_text *text, const char *option, double number)
{
    char spelled[40] = "0";
    for (int digit = 1; strtod(spelled, NULL) < number; digit++)
        snprintf(spelled, sizeof spelled, "%de%d", digit, (int)floor(log10(number)));
    if (number > 0)
        fsdp_text_addf(text, " %s %s", option, spelled);
}

/* fsdp-diff compares with the new value: |new - old| / |new| may be larger than with the old one, but, as
 * rounding moves by half a step at most, no more than a half. */
/* Adds the options with which fsdp-diff finds values and the values that they were cast to equal. */
static void add_tolerance(fsdp_text *text, const fsdp_cast_report *cast)
{
    double rounding = cast->max_rounding;
    add_bound(text, "--rtol", rounding < 1.0 / 3 ? rounding / (1 - rounding) : 0.5);
    add_bound(text, "--atol", cast->max_underflow);
}

void convert_add_done(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan,
                      const convert_outcome *outcome)
{
    double seconds = outcome->seconds;
    const fsdp_convert_note *quantized = find_note(plan, FSDP_NOTE_QUANTIZED);
    const fsdp_convert_note *left_out = find_note(plan, FSDP_NOTE_LEFT_OUT);
    char number[CLI_NUMBER];
    fsdp_text_addf(text, "ok    %s, ", cli_plural(plan->tensors, "tensor", number));
    fsdp_text_addf(text, "%s in %.2f s ", cli_bytes(plan->bytes_written, number), seconds);
    fsdp_text_addf(text, "(%s), ", cli_rate(plan->bytes_written, seconds, number));
    if (find_note(plan, FSDP_NOTE_CAST))
        add_cast_result(text, &opts->cast);
    if (quantized)
        fsdp_text_addf(text, "%s still quantized, ",
                       cli_plural(quantized->count, "weight", number));
    fsdp_text_addf(text, "%s", opts->convert.skip_verify ? "not verified" : "verified by re-read");
    if (opts->write_digests && !outcome->failure) {
        fsdp_text_addf(text, ", digests in ");
        add_digest_file(text, opts, false);
    }
    fsdp_text_addf(text, "\n");
    if (left_out && left_out->item_count > 0 && opts->convert.select.only == FSDP_ONLY_DEFAULT)
        add_note(text, left_out);
}

/* === the line "next" ========================================================================== */

/*
 * The command of fsdp-diff that finds source and result equal after a correct conversion. Names that one side
 * lacks are excluded by the shortest branches of names, each of which is tried on all names; a line that is
 * wrong or longer than people read is not printed.
 */

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
    const fsdp_convert_note *mapped = find_note(plan, FSDP_NOTE_MAPPED);
    const char *map = opts->map || !mapped ? opts->map : mapped->items[0].name;
    fsdp_text_addf(text, "next  fsdp-diff");
    cli_add_path_argument(text, cli_from_here(fsdp_checkpoint_describe(plan->source)->path));
    cli_add_path_argument(text, cli_from_here(plan->to));
    add_options(text, "--map", &map, mapped != NULL);
    add_options(text, "--size", opts->sizes, mapped ? opts->size_count : 0);
    add_options(text, "--rename", opts->select.renames, opts->select.rename_count);
    add_tolerance(text, opts->cast);
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
           !opts->dequant && !find_note(plan, FSDP_NOTE_MISSING) &&
           !find_note(plan, FSDP_NOTE_ENCODED) &&
           ((has_sizes && opts->tied != FSDP_TIED_KEEP) || !find_note(plan, FSDP_NOTE_MAPPED));
}

/* Excludes what was typed, and values that the conversion makes, loses or gives other names. */
static void exclude_known(fsdp_text *exclude, const fsdp_convert_plan *plan, const char *made)
{
    const fsdp_select_opts *select = &plan->opts->select;
    bool is_lost = find_note(plan, FSDP_NOTE_METADATA) != NULL;
    for (size_t i = 0; i < select->drop_count; i++)
        is_lost = is_lost || strncmp(select->drops[i], "metadata", 8) == 0;
    const char *const patterns[] = {
        select->exclude, find_note(plan, FSDP_NOTE_OPTIM) ? "(^|\\.)param_groups(\\.|$)" : NULL,
        find_note(plan, FSDP_NOTE_NUMBERED) ? "(^|\\.)opt[^.]*\\.state\\." : NULL, made,
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
