/*
 * Notes of fsdp-convert: a sentence each about what a person would not expect of the result. They are lines
 * of the plan, or said before a conversion. See convert_tool.h.
 */
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

void convert_add_name(fsdp_text *text, const char *name, size_t size)
{
    char shown[160];
    fsdp_text_addf(text, "%s", fsdp_printable(name, size, shown, sizeof shown));
}

/* --- sentences; nothing where they do not apply -------------------------------------------------- */

static void add_short(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan)
{
    bool one = plan->short_tensors == 1;
    if (plan->short_tensors > 0)
        fsdp_text_addf(text,
                       "%" PRId64 " of %" PRId64 " tensors %s no dim %d and %s cut along dim 0",
                       plan->short_tensors, plan->tensors, one ? "has" : "have",
                       opts->convert.shard_dim, one ? "is" : "are");
}

static bool is_adapter(const char *name)
{
    return strncmp(name, "adapter_model.", 14) == 0;
}

static void add_unread(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan)
{
    size_t count = plan->unread_count;
    if (count == 0)
        return;
    fsdp_text_addf(text, "%zu weight file%s of '", count, count == 1 ? "" : "s");
    cli_add_message(text, fsdp_checkpoint_describe(plan->source)->path);
    fsdp_text_addf(text, "' %s not read: ", count == 1 ? "is" : "are");
    for (size_t i = 0; i < count && add_between(text, i, count); i++)
        convert_add_name(text, plan->unread[i], strlen(plan->unread[i]));
    for (size_t i = 0; i < count && !opts->convert.adapter; i++)
        if (is_adapter(plan->unread[i])) {
            fsdp_text_addf(text, "; --adapter");
            cli_add_path_argument(text, fsdp_checkpoint_describe(plan->source)->path);
            fsdp_text_addf(text, " merges the adapter");
            break;
        }
}

static void add_extra(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan)
{
    (void)opts;
    size_t count = plan->extra_count;
    if (count == 0)
        return;
    fsdp_text_addf(text, "%zu tensor%s no part of the %s that config.json describes: ", count,
                   count == 1 ? " is" : "s are", plan->model);
    for (size_t i = 0; i < count && add_between(text, i, count); i++)
        convert_add_name(text, plan->extra[i], strlen(plan->extra[i]));
}

static void add_missing(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan)
{
    (void)opts;
    const fsdp_checkpoint *source = plan->source;
    size_t count = fsdp_checkpoint_missing_count(source), size;
    if (count == 0)
        return;
    fsdp_text_addf(text, "%zu incomplete %s left out: ", count,
                   count == 1 ? "entry is" : "entries are");
    for (size_t i = 0; i < count && add_between(text, i, count); i++) {
        const char *name = fsdp_checkpoint_missing_at(source, i, &size);
        convert_add_name(text, name, size);
    }
}

static const char root_rule[] = "s/^";

/* "model." of the rule s/^model\.//, "module." of s/(^|\.)(module\.)+/\1/g, and "optimizer." of
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
        cli_add_message(text, taken.data);
    fsdp_text_release(&taken);
}

/* The rule of an optimizer that has no names before its own takes nothing away. */
static bool takes_away(const char *rule)
{
    return strncmp(rule, root_rule, sizeof root_rule - 1) != 0 || rule[sizeof root_rule - 1] != '(';
}

/* "strip 'model.' and 'module.' from 29 names (--names keep leaves them)" */
static void add_stripped(fsdp_text *text, const convert_options *opts,
                         const fsdp_convert_plan *plan)
{
    (void)opts;
    char number[CLI_NUMBER];
    if (!plan->strips || plan->renamed == 0)
        return;
    size_t count = plan->rename_count; /* a rule of the optimizer is the last */
    count -= count > 0 && !takes_away(plan->renames[count - 1]);
    fsdp_text_addf(text, count > 0 ? "strip" : "put 'optim.' before");
    for (size_t i = 0; i < count; i++) {
        const char *between = i + 1 == count ? " and" : ",";
        fsdp_text_addf(text, "%s '", i > 0 ? between : "");
        add_taken_away(text, plan->renames[i]);
        fsdp_text_addf(text, "'");
    }
    fsdp_text_addf(text, "%s %s (--names keep leaves them)", count > 0 ? " from" : "",
                   cli_plural(plan->renamed, "name", number));
}

static void add_tied(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan)
{
    size_t count = plan->tied_count;
    if (count == 0)
        return;
    fsdp_text_addf(text, "%zu tied name%s left out%s: ", count, count == 1 ? " is" : "s are",
                   convert_target(opts)->caps.notes_ties ? " and noted beside the tensor" : "");
    for (size_t i = 0; i < count && add_between(text, i, count); i++) {
        convert_add_name(text, plan->tied[i].dropped, plan->tied[i].dropped_size);
        fsdp_text_addf(text, " (the same as ");
        convert_add_name(text, plan->tied[i].kept, plan->tied[i].kept_size);
        fsdp_text_addf(text, ")");
    }
}

static void add_added(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan)
{
    (void)opts;
    size_t count = plan->added_count;
    if (count == 0)
        return;
    fsdp_text_addf(text, "%zu tied name%s added, since PyTorch's loaders ask for %s: ", count,
                   count == 1 ? " is" : "s are", count == 1 ? "it" : "them");
    for (size_t i = 0; i < count && add_between(text, i, count); i++)
        convert_add_name(text, plan->added[i], strlen(plan->added[i]));
}

static void add_code(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan)
{
    (void)opts;
    size_t count = plan->code_count;
    if (count == 0)
        return;
    fsdp_text_addf(text, "%zu object%s when %s loaded: ", count,
                   count == 1 ? " runs code" : "s run code", count == 1 ? "it is" : "they are");
    for (size_t i = 0; i < count && add_between(text, i, count); i++) {
        convert_add_name(text, plan->code[i].name, plan->code[i].name_size);
        fsdp_text_addf(text, " (%s)", plan->code[i].class_name);
    }
}

static void add_form(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan)
{
    (void)opts;
    bool is_flat = plan->optim_form == FSDP_OPTIM_FORM_FLAT;
    if (plan->optim_form)
        fsdp_text_addf(
            text, "hyper-parameters %s, as PyTorch's get_optimizer_state_dict has them%s",
            is_flat ? "flat" : "nested", is_flat ? " with flatten_optimizer_state_dict" : "");
    if (plan->optim_named > 0)
        fsdp_text_addf(text, "; %" PRId64 " parameters that the optimizer numbers get names",
                       plan->optim_named);
}

static void add_tokenizer(fsdp_text *text, const convert_options *opts,
                          const fsdp_convert_plan *plan)
{
    (void)opts;
    if (plan->has_tiktoken)
        fsdp_text_addf(text,
                       "tokenizer.model is a list of tiktoken, which lacks the special tokens, and "
                       "llama.cpp runs no model without a tokenizer: --copy-from DIR takes "
                       "config.json and tokenizer.json from DIR");
    else if (plan->lacks_tokenizer)
        fsdp_text_addf(text,
                       "no tokenizer.json and no tokenizer.model lie beside the config.json, and "
                       "llama.cpp runs no model without a tokenizer: --copy-from DIR takes them "
                       "from DIR");
}

static void add_names(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan)
{
    (void)opts;
    if (!plan->map[0] || plan->is_mapped)
        return;
    if (strcmp(plan->map, "hub") == 0) {
        fsdp_text_addf(text,
                       "names are those that transformers has in memory, which version 5 loads; "
                       "--names hub gives those that it saves, which vLLM, SGLang and llama.cpp "
                       "load");
        return;
    }
    fsdp_text_addf(text,
                   "names of %s stay: --copy-from a directory with the model's config.json, or "
                   "--map %s, makes those of %s",
                   plan->map_from, plan->map, plan->map_to);
}

static void add_rounded(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan)
{
    char number[CLI_NUMBER];
    (void)opts;
    if (plan->rounded > 0)
        fsdp_text_addf(text,
                       "%s left out: DeepSpeed's stage 1 stores frozen weights in the rounded "
                       "model alone, which is not read",
                       cli_plural(plan->rounded, "weight", number));
}

static void add_tuples(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan)
{
    (void)opts;
    if (plan->in_tuples == 0)
        return;
    bool one = plan->in_tuples == 1;
    fsdp_text_addf(text, "%" PRId64 " tensor%s in tuples: dcp stores %s in lists, as PyTorch does",
                   plan->in_tuples, one ? " is" : "s are", one ? "it" : "them");
}

/* DCP is what trainers leave, and mostly without the configuration that a loader asks for. */
static void add_config(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan)
{
    const fsdp_convert_opts *convert = &opts->convert;
    const fsdp_format *source = fsdp_format_from(fsdp_checkpoint_describe(plan->source)->format);
    if (!convert_target(opts)->caps.for_loaders || !source->caps.without_config ||
        convert->copy_from || convert->skip_copies || convert->select.only == FSDP_ONLY_OPTIM)
        return;
    for (size_t i = 0; i < plan->copied_count; i++)
        if (strcmp(plan->copied[i].name, "config.json") == 0)
            return;
    fsdp_text_addf(text,
                   "no config.json is here, which loaders of the result ask for: --copy-from DIR "
                   "takes it and the tokenizer from the model's directory");
}

static void add_metadata(fsdp_text *text, const convert_options *opts,
                         const fsdp_convert_plan *plan)
{
    size_t count = plan->metadata_count;
    if (count == 0)
        return;
    fsdp_text_addf(text, "%zu text%s of the source's metadata %s left out, ", count,
                   count == 1 ? "" : "s", count == 1 ? "is" : "are");
    if (convert_target(opts)->caps.metadata)
        fsdp_text_addf(text, "hashes of bytes that change: ");
    else
        fsdp_text_addf(text, "since %s has none: ", opts->convert.format);
    for (size_t i = 0; i < count && add_between(text, i, count); i++)
        fsdp_text_addf(text, "%s", plan->metadata[i]);
}

/* Other programs make one file of such a name. */
static void add_directory(fsdp_text *text, const convert_options *opts,
                          const fsdp_convert_plan *plan)
{
    (void)plan;
    if (!convert_target(opts)->caps.for_loaders || !fsdp_has_suffix(opts->to, ".ckpt"))
        return;
    fsdp_text_addf(text, "'");
    cli_add_message(text, opts->to);
    fsdp_text_addf(text, "' becomes a directory that Hugging Face loads: --to torch writes a file "
                         "of that name, as torch.save does");
}

static void add_quantized(fsdp_text *text, const convert_options *opts,
                          const fsdp_convert_plan *plan)
{
    char number[CLI_NUMBER];
    if (plan->quantized == 0)
        return;
    fsdp_text_addf(text, "%s stay%s quantized: --dtype %s does not apply the scales of integers",
                   cli_plural(plan->quantized, "weight", number), plan->quantized == 1 ? "s" : "",
                   opts->convert.select.dtype);
    if (plan->quantized_known == plan->quantized)
        fsdp_text_addf(text, ", --dequant bf16 does");
    else if (plan->quantized_known > 0)
        fsdp_text_addf(text, ", --dequant bf16 applies %" PRId64 " of them", plan->quantized_known);
}

/* --- lines and messages -------------------------------------------------------------------------- */

static void (*const notes[CONVERT_NOTES])(fsdp_text *text, const convert_options *opts,
                                          const fsdp_convert_plan *plan) = {
    [CONVERT_NOTE_SHORT] = add_short,         [CONVERT_NOTE_UNREAD] = add_unread,
    [CONVERT_NOTE_EXTRA] = add_extra,         [CONVERT_NOTE_MISSING] = add_missing,
    [CONVERT_NOTE_STRIPPED] = add_stripped,   [CONVERT_NOTE_TIED] = add_tied,
    [CONVERT_NOTE_CODE] = add_code,           [CONVERT_NOTE_FORM] = add_form,
    [CONVERT_NOTE_TOKENIZER] = add_tokenizer, [CONVERT_NOTE_NAMES] = add_names,
    [CONVERT_NOTE_ROUNDED] = add_rounded,     [CONVERT_NOTE_TUPLES] = add_tuples,
    [CONVERT_NOTE_CONFIG] = add_config,       [CONVERT_NOTE_METADATA] = add_metadata,
    [CONVERT_NOTE_DIRECTORY] = add_directory, [CONVERT_NOTE_QUANTIZED] = add_quantized,
    [CONVERT_NOTE_ADDED] = add_added,
};

void convert_add_note(fsdp_text *text, convert_note note, const convert_options *opts,
                      const fsdp_convert_plan *plan)
{
    fsdp_text sentence = {0};
    notes[note](&sentence, opts, plan);
    if (sentence.size > 0)
        fsdp_text_addf(text, "  %s\n", sentence.data);
    text->failed = text->failed || sentence.failed;
    fsdp_text_release(&sentence);
}

void convert_report_notes(const convert_options *opts, const fsdp_convert_plan *plan)
{
    if (opts->common.quiet || opts->common.json)
        return;
    for (int i = 0; i < CONVERT_NOTES; i++) {
        fsdp_text sentence = {0};
        notes[i](&sentence, opts, plan);
        if (sentence.size > 0 && !sentence.failed)
            cli_say("note", "%s", sentence.data);
        fsdp_text_release(&sentence);
    }
}
