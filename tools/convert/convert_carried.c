/* fsdp-convert's reports on entries and files that are not converted one to one: tied names that are
 * left out, files that are copied beside the weights, entries of missing files. See convert_tool.h. */
#include "tools/convert/convert_tool.h"
#include "base/text.h"

#include <inttypes.h>
#include <string.h>

enum { NAMES_SHOWN = 5 };

/* Adds the separator before name i in "a, b, c, d, e and 3 more"; false when the list ends with it. */
static bool add_between(fsdp_text *text, size_t i, size_t count)
{
    if (i == NAMES_SHOWN)
        fsdp_text_addf(text, " and %zu more", count - i);
    else if (i > 0 && i < NAMES_SHOWN)
        fsdp_text_addf(text, ", ");
    return i < NAMES_SHOWN;
}

static void add_name(fsdp_text *text, const char *name, size_t size)
{
    char shown[160];
    fsdp_text_addf(text, "%s", fsdp_printable(name, size, shown, sizeof shown));
}

static void add_missing(fsdp_text *text, const fsdp_checkpoint *source)
{
    size_t count = fsdp_checkpoint_missing_count(source), size;
    fsdp_text_addf(text, "%zu incomplete %s left out: ", count,
                   count == 1 ? "entry is" : "entries are");
    for (size_t i = 0; i < count && add_between(text, i, count); i++) {
        const char *name = fsdp_checkpoint_missing_at(source, i, &size);
        add_name(text, name, size);
    }
}

/* "model." of the rule s/^model\.// and "module." of s/(^|\.)(module\.)+/\1/g */
static void add_taken_away(fsdp_text *text, const char *rule)
{
    static const char wrapper[] = "s/(^|\\.)(", root[] = "s/^";
    bool is_wrapper = strncmp(rule, wrapper, sizeof wrapper - 1) == 0;
    fsdp_text taken = {0};
    const char *at = rule + (is_wrapper ? sizeof wrapper : sizeof root) - 1;
    for (; *at && *at != (is_wrapper ? ')' : '/'); at++) {
        at += *at == '\\' && at[1];
        fsdp_text_add(&taken, at, 1);
    }
    text->failed |= taken.failed;
    if (taken.data)
        cli_add_message(text, taken.data);
    fsdp_text_release(&taken);
}

/* "strip 'model.' and 'module.' from 29 names (--names keep leaves them)" */
static void add_stripped(fsdp_text *text, const fsdp_convert_plan *plan)
{
    char number[CLI_NUMBER];
    fsdp_text_addf(text, "strip");
    for (size_t i = 0; i < plan->rename_count; i++) {
        const char *between = i + 1 == plan->rename_count ? " and" : ",";
        fsdp_text_addf(text, "%s '", i > 0 ? between : "");
        add_taken_away(text, plan->renames[i]);
        fsdp_text_addf(text, "'");
    }
    fsdp_text_addf(text, " from %s (--names keep leaves them)",
                   cli_plural(plan->renamed, "name", number));
}

void convert_add_stripped(fsdp_text *text, const fsdp_convert_plan *plan)
{
    fsdp_text_addf(text, "  ");
    add_stripped(text, plan);
    fsdp_text_addf(text, "\n");
}

void convert_report_stripped(const convert_options *opts, const fsdp_convert_plan *plan)
{
    fsdp_text text = {0};
    if (!plan->strips || plan->renamed == 0 || opts->common.quiet || opts->common.json)
        return;
    add_stripped(&text, plan);
    if (!text.failed)
        cli_say("note", "%s", text.data);
    fsdp_text_release(&text);
}

static void add_unread(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan)
{
    size_t count = plan->unread_count;
    fsdp_text_addf(text, "%zu weight file%s of '", count, count == 1 ? "" : "s");
    cli_add_message(text, fsdp_checkpoint_describe(opts->source)->path);
    fsdp_text_addf(text, "' %s not read: ", count == 1 ? "is" : "are");
    for (size_t i = 0; i < count && add_between(text, i, count); i++)
        add_name(text, plan->unread[i], strlen(plan->unread[i]));
}

void convert_report_unread(const convert_options *opts, const fsdp_convert_plan *plan)
{
    fsdp_text text = {0};
    if (plan->unread_count == 0 || opts->common.quiet || opts->common.json)
        return;
    add_unread(&text, opts, plan);
    if (!text.failed)
        cli_say("note", "%s", text.data);
    fsdp_text_release(&text);
}

static void add_extra(fsdp_text *text, const fsdp_convert_plan *plan)
{
    size_t count = plan->extra_count;
    fsdp_text_addf(text, "%zu tensor%s no part of the %s that config.json describes: ", count,
                   count == 1 ? " is" : "s are", plan->model);
    for (size_t i = 0; i < count && add_between(text, i, count); i++)
        add_name(text, plan->extra[i], strlen(plan->extra[i]));
}

void convert_report_extra(const convert_options *opts, const fsdp_convert_plan *plan)
{
    fsdp_text text = {0};
    if (plan->extra_count == 0 || opts->common.quiet || opts->common.json)
        return;
    add_extra(&text, plan);
    if (!text.failed)
        cli_say("note", "%s", text.data);
    fsdp_text_release(&text);
}

/* "  config.json describes a llama: all 29 tensors are there" */
static void add_model(fsdp_text *text, const fsdp_convert_plan *plan)
{
    if (!plan->model)
        return;
    fsdp_text_addf(text, "  config.json describes a %s: ", plan->model);
    if (plan->model_missing > 0)
        fsdp_text_addf(text, "%" PRId64 " of %" PRId64 " tensors are missing, as allowed\n",
                       plan->model_missing, plan->model_tensors);
    else
        fsdp_text_addf(text, "all %" PRId64 " tensors are there\n", plan->model_tensors);
    if (plan->extra_count > 0) {
        fsdp_text_addf(text, "  ");
        add_extra(text, plan);
        fsdp_text_addf(text, "\n");
    }
}

void convert_report_missing(const convert_options *opts)
{
    fsdp_text text = {0};
    if (fsdp_checkpoint_missing_count(opts->source) == 0 || opts->common.quiet || opts->common.json)
        return;
    add_missing(&text, opts->source);
    if (!text.failed)
        cli_say("note", "%s", text.data);
    fsdp_text_release(&text);
}

static bool notes_ties(const convert_options *opts)
{
    const char *format = opts->convert.format;
    return strcmp(format, "hf") == 0 || strcmp(format, "safetensors") == 0;
}

void convert_report_tied(const convert_options *opts, const fsdp_convert_plan *plan)
{
    fsdp_text text = {0};
    size_t count = plan->tied_count;
    if (count == 0 || opts->common.quiet || opts->common.json)
        return;
    fsdp_text_addf(&text, "%zu tied name%s left out%s: ", count, count == 1 ? " is" : "s are",
                   notes_ties(opts) ? " and noted beside the tensor" : "");
    for (size_t i = 0; i < count && add_between(&text, i, count); i++) {
        add_name(&text, plan->tied[i].dropped, plan->tied[i].dropped_size);
        fsdp_text_addf(&text, " (the same as ");
        add_name(&text, plan->tied[i].kept, plan->tied[i].kept_size);
        fsdp_text_addf(&text, ")");
    }
    if (!text.failed)
        cli_say("note", "%s", text.data);
    fsdp_text_release(&text);
}

void convert_add_form(fsdp_text *text, const fsdp_convert_plan *plan)
{
    bool is_flat = plan->optim_form == FSDP_OPTIM_FORM_FLAT;
    if (plan->optim_form)
        fsdp_text_addf(
            text, "hyper-parameters %s, as PyTorch's get_optimizer_state_dict has them%s",
            is_flat ? "flat" : "nested", is_flat ? " with flatten_optimizer_state_dict" : "");
}

void convert_report_form(const convert_options *opts, const fsdp_convert_plan *plan)
{
    fsdp_text text = {0};
    if (!plan->optim_form || opts->common.quiet || opts->common.json)
        return;
    convert_add_form(&text, plan);
    if (!text.failed)
        cli_say("note", "%s", text.data);
    fsdp_text_release(&text);
}

void convert_add_tokenizer(fsdp_text *text, const fsdp_convert_plan *plan)
{
    if (plan->lacks_tokenizer)
        fsdp_text_addf(text, "no tokenizer.json lies beside the config.json, and llama.cpp runs no "
                             "model without a tokenizer: --copy-from DIR takes both from DIR");
}

void convert_report_tokenizer(const convert_options *opts, const fsdp_convert_plan *plan)
{
    fsdp_text text = {0};
    if (!plan->lacks_tokenizer || opts->common.quiet || opts->common.json)
        return;
    convert_add_tokenizer(&text, plan);
    if (!text.failed)
        cli_say("note", "%s", text.data);
    fsdp_text_release(&text);
}

void convert_add_names(fsdp_text *text, const fsdp_convert_plan *plan)
{
    fsdp_text_addf(text,
                   "names of %s stay: --copy-from a directory with the model's config.json, or "
                   "--map %s, makes those of %s",
                   plan->map_from, plan->map, plan->map_to);
}

void convert_report_names(const convert_options *opts, const fsdp_convert_plan *plan)
{
    fsdp_text text = {0};
    if (!plan->map[0] || plan->is_mapped || opts->common.quiet || opts->common.json)
        return;
    convert_add_names(&text, plan);
    if (!text.failed)
        cli_say("note", "%s", text.data);
    fsdp_text_release(&text);
}

void convert_add_tuples(fsdp_text *text, const fsdp_convert_plan *plan)
{
    bool one = plan->in_tuples == 1;
    fsdp_text_addf(text, "%" PRId64 " tensor%s in tuples: dcp stores %s in lists, as PyTorch does",
                   plan->in_tuples, one ? " is" : "s are", one ? "it" : "them");
}

void convert_report_tuples(const convert_options *opts, const fsdp_convert_plan *plan)
{
    fsdp_text text = {0};
    if (plan->in_tuples == 0 || opts->common.quiet || opts->common.json)
        return;
    convert_add_tuples(&text, plan);
    if (!text.failed)
        cli_say("note", "%s", text.data);
    fsdp_text_release(&text);
}

void convert_report_code(const convert_options *opts, const fsdp_convert_plan *plan)
{
    fsdp_text text = {0};
    size_t count = plan->code_count;
    if (count == 0 || opts->common.quiet || opts->common.json)
        return;
    fsdp_text_addf(&text, "%zu object%s when %s loaded: ", count,
                   count == 1 ? " runs code" : "s run code", count == 1 ? "it is" : "they are");
    for (size_t i = 0; i < count && add_between(&text, i, count); i++) {
        add_name(&text, plan->code[i].name, plan->code[i].name_size);
        fsdp_text_addf(&text, " (%s)", plan->code[i].class_name);
    }
    if (!text.failed)
        cli_say("note", "%s", text.data);
    fsdp_text_release(&text);
}

static void add_code(fsdp_text *text, const fsdp_convert_plan *plan)
{
    char number[CLI_NUMBER];
    for (size_t i = 0; i < plan->code_count; i++) {
        fsdp_text_addf(text, "  object ");
        add_name(text, plan->code[i].name, plan->code[i].name_size);
        fsdp_text_addf(text, " (%s, %s) runs code when loaded\n", plan->code[i].class_name,
                       cli_bytes(plan->code[i].bytes, number));
    }
}

void convert_add_carried(fsdp_text *text, const convert_options *opts,
                         const fsdp_convert_plan *plan)
{
    add_code(text, plan);
    for (size_t i = 0; i < plan->tied_count; i++) {
        if (i == NAMES_SHOWN) {
            fsdp_text_addf(text, "  and %zu more\n", plan->tied_count - i);
            break;
        }
        fsdp_text_addf(text, "  drop ");
        add_name(text, plan->tied[i].dropped, plan->tied[i].dropped_size);
        fsdp_text_addf(text, " (alias of ");
        add_name(text, plan->tied[i].kept, plan->tied[i].kept_size);
        fsdp_text_addf(text, ")\n");
    }
    if (plan->copied_count > 0)
        fsdp_text_addf(text, "  copy ");
    for (size_t i = 0; i < plan->copied_count; i++) {
        fsdp_text_addf(text, i > 0 ? ", " : "");
        add_name(text, plan->copied[i].name, strlen(plan->copied[i].name));
        if (plan->copied[i].change[0])
            fsdp_text_addf(text, " (%s)", plan->copied[i].change);
    }
    if (plan->copied_count > 0)
        fsdp_text_addf(text, "\n");
    add_model(text, plan);
    if (plan->unread_count > 0) {
        fsdp_text_addf(text, "  ");
        add_unread(text, opts, plan);
        fsdp_text_addf(text, "\n");
    }
    if (fsdp_checkpoint_missing_count(opts->source) > 0) {
        fsdp_text_addf(text, "  ");
        add_missing(text, opts->source);
        fsdp_text_addf(text, "\n");
    }
}

static void add_model_json(fsdp_text *text, const fsdp_convert_plan *plan)
{
    if (!plan->model)
        return;
    fsdp_text_addf(text, "\n \"model\": {\"type\": \"%s\", \"tensors\": %" PRId64, plan->model,
                   plan->model_tensors);
    fsdp_text_addf(text, ", \"missing\": %" PRId64 ", \"extra\": [", plan->model_missing);
    for (size_t i = 0; i < plan->extra_count; i++) {
        fsdp_text_addf(text, i > 0 ? ", " : "");
        fsdp_text_add_json_shown(text, plan->extra[i], strlen(plan->extra[i]));
    }
    fsdp_text_addf(text, "]},");
}

void convert_add_carried_json(fsdp_text *text, const convert_options *opts,
                              const fsdp_convert_plan *plan)
{
    size_t count = fsdp_checkpoint_missing_count(opts->source), size;
    for (size_t i = 0; i < plan->unread_count; i++) {
        fsdp_text_addf(text, i > 0 ? ", " : "\n \"unread\": [");
        fsdp_text_add_json_shown(text, plan->unread[i], strlen(plan->unread[i]));
    }
    if (plan->unread_count > 0)
        fsdp_text_addf(text, "],");
    add_model_json(text, plan);
    if (plan->parts) {
        fsdp_text_addf(text, "\n \"parts\": ");
        fsdp_text_add_json_shown(text, plan->parts, strlen(plan->parts));
        fsdp_text_addf(text, ",");
    }
    fsdp_text_addf(text, "\n \"tied\": {");
    for (size_t i = 0; i < plan->tied_count; i++) {
        fsdp_text_addf(text, i > 0 ? ", " : "");
        fsdp_text_add_json_shown(text, plan->tied[i].dropped, plan->tied[i].dropped_size);
        fsdp_text_addf(text, ": ");
        fsdp_text_add_json_shown(text, plan->tied[i].kept, plan->tied[i].kept_size);
    }
    fsdp_text_addf(text, "}, \"copied\": [");
    for (size_t i = 0; i < plan->copied_count; i++) {
        fsdp_text_addf(text, i > 0 ? ", " : "");
        fsdp_text_add_json_shown(text, plan->copied[i].name, strlen(plan->copied[i].name));
    }
    fsdp_text_addf(text, "], \"code\": [");
    for (size_t i = 0; i < plan->code_count; i++) {
        fsdp_text_addf(text, i > 0 ? ", {\"name\": " : "{\"name\": ");
        fsdp_text_add_json_shown(text, plan->code[i].name, plan->code[i].name_size);
        fsdp_text_addf(text, ", \"class\": ");
        fsdp_text_add_json_shown(text, plan->code[i].class_name, strlen(plan->code[i].class_name));
        fsdp_text_addf(text, ", \"bytes\": %" PRId64 "}", plan->code[i].bytes);
    }
    fsdp_text_addf(text, "], \"missing\": [");
    for (size_t i = 0; i < count; i++) {
        const char *name = fsdp_checkpoint_missing_at(opts->source, i, &size);
        fsdp_text_addf(text, i > 0 ? ", " : "");
        fsdp_text_add_json_shown(text, name, size);
    }
    fsdp_text_addf(text, "],\n ");
}
