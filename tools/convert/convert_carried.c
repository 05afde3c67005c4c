/* fsdp-convert's reports on entries and files that are not converted one to one: tied names that are
 * left out, files that are copied next to the weights, entries of missing files. See convert_tool.h. */
#include "tools/convert/convert_tool.h"
#include "base/text.h"

#include <inttypes.h>
#include <string.h>

enum { NAMES_SHOWN = 5 };

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
}

static void add_code(fsdp_text *text, const fsdp_convert_plan *plan)
{
    char number[CLI_NUMBER];
    for (size_t i = 0; i < plan->code_count; i++) {
        fsdp_text_addf(text, "  object ");
        convert_add_name(text, plan->code[i].name, plan->code[i].name_size);
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
        convert_add_name(text, plan->tied[i].dropped, plan->tied[i].dropped_size);
        fsdp_text_addf(text, " (alias of ");
        convert_add_name(text, plan->tied[i].kept, plan->tied[i].kept_size);
        fsdp_text_addf(text, ")\n");
    }
    if (plan->copied_count > 0)
        fsdp_text_addf(text, "  copy ");
    for (size_t i = 0; i < plan->copied_count; i++) {
        fsdp_text_addf(text, i > 0 ? ", " : "");
        convert_add_name(text, plan->copied[i].name, strlen(plan->copied[i].name));
        if (plan->copied[i].change[0])
            fsdp_text_addf(text, " (%s)", plan->copied[i].change);
    }
    if (plan->copied_count > 0)
        fsdp_text_addf(text, "\n");
    add_model(text, plan);
    convert_add_note(text, CONVERT_NOTE_EXTRA, opts, plan);
    convert_add_note(text, CONVERT_NOTE_UNREAD, opts, plan);
    convert_add_note(text, CONVERT_NOTE_MISSING, opts, plan);
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

void convert_add_carried_json(fsdp_text *text, const fsdp_convert_plan *plan)
{
    size_t count = fsdp_checkpoint_missing_count(plan->source), size;
    for (size_t i = 0; i < plan->unread_count; i++) {
        fsdp_text_addf(text, i > 0 ? ", " : "\n \"unread\": [");
        fsdp_text_add_json_shown(text, plan->unread[i], strlen(plan->unread[i]));
    }
    if (plan->unread_count > 0)
        fsdp_text_addf(text, "],");
    for (size_t i = 0; i < plan->metadata_count; i++) {
        fsdp_text_addf(text, i > 0 ? ", " : "\n \"metadata_left_out\": [");
        fsdp_text_add_json_shown(text, plan->metadata[i], strlen(plan->metadata[i]));
    }
    if (plan->metadata_count > 0)
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
        const char *name = fsdp_checkpoint_missing_at(plan->source, i, &size);
        fsdp_text_addf(text, i > 0 ? ", " : "");
        fsdp_text_add_json_shown(text, name, size);
    }
    fsdp_text_addf(text, "],\n ");
}
