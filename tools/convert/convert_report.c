/* fsdp-convert's output: its plan as text and as JSON, and its last two lines. See convert_tool.h. */
#include "tools/convert/convert_tool.h"
#include "base/text.h"

#include <inttypes.h>
#include <string.h>

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

/* "  model 29 · ema 29 left out · optimizer left out (--part ema takes other weights, ...)" */
static void add_left_out(fsdp_text *text, const convert_options *opts,
                         const fsdp_convert_plan *plan)
{
    if (plan->parts && opts->convert.select.only != FSDP_ONLY_OPTIM) {
        fsdp_text_addf(text, "  %s (", plan->parts);
        if (plan->other_part) {
            fsdp_text_addf(text, "--part");
            cli_add_argument(text, plan->other_part);
            fsdp_text_addf(text, " takes those weights, ");
        }
        fsdp_text_addf(text, "--only all everything)\n");
        return;
    }
    fsdp_text_addf(text, "  %" PRId64 " %s of the %s left out (--only all takes everything)\n",
                   plan->left_out, plan->left_out == 1 ? "entry" : "entries",
                   opts->convert.select.only == FSDP_ONLY_OPTIM ? "model" : "optimizer");
}

/* Names of hf are stripped already, and those of a universal checkpoint are the engine's. */
static bool keeps_prefix(const convert_options *opts)
{
    const fsdp_caps *caps = &convert_target(opts)->caps;
    return caps->for_loaders || caps->plain_names;
}

/* Lines for entries that are renamed, cast, dropped or left out. */
static void add_changes(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan)
{
    char number[CLI_NUMBER];
    for (int i = 0; i < plan->stage_count; i++)
        if (plan->stages[i].text[0])
            fsdp_text_addf(text, "  %s\n", plan->stages[i].text);
    convert_add_note(text, CONVERT_NOTE_NAMES, opts, plan);
    convert_add_note(text, CONVERT_NOTE_STRIPPED, opts, plan);
    if (plan->renamed > 0 && !plan->strips)
        fsdp_text_addf(text, "  rename %s\n", cli_plural(plan->renamed, "name", number));
    if (plan->left_out > 0)
        add_left_out(text, opts, plan);
    if (plan->dropped > 0)
        fsdp_text_addf(text, "  %" PRId64 " dropped (--drop)\n", plan->dropped);
    if (plan->cast_tensors > 0)
        convert_add_casts(text, plan);
    convert_add_carried(text, opts, plan);
    convert_add_note(text, CONVERT_NOTE_FORM, opts, plan);
    convert_add_note(text, CONVERT_NOTE_TOKENIZER, opts, plan);
    convert_add_note(text, CONVERT_NOTE_ROUNDED, opts, plan);
    convert_add_note(text, CONVERT_NOTE_TUPLES, opts, plan);
    convert_add_note(text, CONVERT_NOTE_CONFIG, opts, plan);
    convert_add_note(text, CONVERT_NOTE_METADATA, opts, plan);
    convert_add_note(text, CONVERT_NOTE_DIRECTORY, opts, plan);
    convert_add_note(text, CONVERT_NOTE_ADDED, opts, plan);
    convert_add_note(text, CONVERT_NOTE_QUANTIZED, opts, plan);
    convert_add_note(text, CONVERT_NOTE_SHORT, opts, plan);
    if (plan->prefix[0] && !is_ours(opts) && !keeps_prefix(opts)) {
        fsdp_text_addf(text, "  all names of the model begin with '%s': --rename 's/^",
                       plan->prefix);
        for (const char *c = plan->prefix; *c; c++)
            fsdp_text_addf(text, *c == '.' ? "\\%c" : "%c", *c);
        fsdp_text_addf(text, "//' strips it\n");
    }
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
    add_changes(text, opts, plan);
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

void convert_add_json(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan,
                      const convert_outcome *outcome)
{
    const fsdp_checkpoint_info *info = fsdp_checkpoint_describe(plan->source);
    fsdp_text_addf(text, "{\"schema\": 1, \"from\": ");
    fsdp_text_add_json_shown(text, info->path, strlen(info->path));
    fsdp_text_addf(text, ", \"to\": ");
    fsdp_text_add_json_shown(text, opts->to, strlen(opts->to));
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
    fsdp_text_addf(text,
                   ",\n \"renamed\": %" PRId64 ", \"left_out\": %" PRId64 ", \"dropped\": %" PRId64,
                   plan->renamed, plan->left_out + (int64_t)plan->tied_count, plan->dropped);
    if (plan->stage_count > 0) {
        fsdp_text_addf(text, ", \"stages\": [");
        for (int i = 0; i < plan->stage_count; i++)
            fsdp_text_addf(text, "%s\"%s\"", i > 0 ? ", " : "", plan->stages[i].name);
        fsdp_text_addf(text, "]");
    }
    if (plan->optim_form)
        fsdp_text_addf(text, ", \"optim\": \"%s\"",
                       plan->optim_form == FSDP_OPTIM_FORM_FLAT ? "flat" : "nested");
    if (plan->quantized > 0)
        fsdp_text_addf(text, ", \"quantized\": %" PRId64, plan->quantized);
    if (plan->rounded > 0)
        fsdp_text_addf(text, ", \"rounded\": %" PRId64, plan->rounded);
    if (plan->in_tuples > 0)
        fsdp_text_addf(text, ", \"in_tuples\": %" PRId64, plan->in_tuples);
    if (plan->lacks_tokenizer)
        fsdp_text_addf(text, ", \"lacks_tokenizer\": true");
    if (convert_is_given(opts, "shard-dim"))
        fsdp_text_addf(text, ", \"short_tensors\": %" PRId64, plan->short_tensors);
    fsdp_text_addf(text,
                   ",\n \"bytes_spooled\": %" PRId64 ", \"bytes_needed\": %" PRId64
                   ", \"free_bytes\": %" PRId64 ",",
                   plan->bytes_spooled, plan->bytes_needed, plan->free_bytes);
    convert_add_carried_json(text, plan);
    if (plan->cast_tensors > 0)
        convert_add_casts_json(text, opts, plan);
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

void convert_add_done(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan,
                      const convert_outcome *outcome)
{
    double seconds = outcome->seconds;
    char number[CLI_NUMBER];
    fsdp_text_addf(text, "ok    %s, ", cli_plural(plan->tensors, "tensor", number));
    fsdp_text_addf(text, "%s in %.2f s ", cli_bytes(plan->bytes_written, number), seconds);
    fsdp_text_addf(text, "(%s), ", cli_rate(plan->bytes_written, seconds, number));
    if (plan->cast_tensors > 0)
        convert_add_cast_result(text, &opts->cast);
    if (plan->quantized > 0)
        fsdp_text_addf(text, "%s still quantized, ", cli_plural(plan->quantized, "weight", number));
    fsdp_text_addf(text, "%s", opts->convert.skip_verify ? "not verified" : "verified by re-read");
    if (opts->write_digests && !outcome->failure) {
        fsdp_text_addf(text, ", digests in ");
        add_digest_file(text, opts, false);
    }
    fsdp_text_addf(text, "\n");
    if (plan->parts && opts->convert.select.only == FSDP_ONLY_DEFAULT)
        add_left_out(text, opts, plan);
    convert_add_next(text, opts, plan);
}
