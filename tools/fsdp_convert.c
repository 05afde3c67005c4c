/*
 * fsdp-convert: the same state in another kind, world size, mesh or sharding, offline. The work is
 * fsdp_checkpoint_convert's; this is options, the plan and the last two lines.
 */
#include "tools/cli.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct convert_options {
    cli_common common;
    fsdp_convert_opts convert;
    const char *mesh_text;
    fsdp_mesh *mesh;
    bool kind_given, dim_given, plan, verbose;
    const char **drops, **renames; /* as many as there are arguments at most */
    const char *from, *to;
    const char *plan_out, *apply;
    char planning[32];         /* an option that plans and was given, for the message */
    fsdp_convert_order *order; /* what --apply read */
} convert_options;

/* --- options ---------------------------------------------------------------------------------- */

enum {
    KEY_TO = 0x2000,
    KEY_KIND,
    KEY_WORLD,
    KEY_MESH,
    KEY_DIM,
    KEY_COMPRESS,
    KEY_NO_VERIFY,
    KEY_OVERWRITE,
    KEY_NO_SYNC,
    KEY_NO_VIEW,
    KEY_ONLY,
    KEY_DROP,
    KEY_RENAME,
    KEY_SHARD_SIZE,
    KEY_PLAN_OUT,
    KEY_APPLY,
    KEY_RESUME
};

static const struct argp_option options[] = {
    {"to", KEY_TO, "FORMAT", 0, "fsdp, hf, safetensors, dcp, torch, hdf5, npz", 0},
    {"only", KEY_ONLY, "PART", 0, "all, model or optim (default: all; model for hf)", 0},
    {"drop", KEY_DROP, "WHAT", 0, "values, opaque, optim, dtype:NAME or a regex", 0},
    {"rename", KEY_RENAME, "s/RE/NEW/", 0, "rename entries; repeatable, in order", 0},
    {"max-shard-size", KEY_SHARD_SIZE, "SIZE", 0, "hf: bytes in a file (default: 50G)", 0},
    {"kind", KEY_KIND, "KIND", 0, "fsdp: sharded (default), full or local", 0},
    {"world-size", KEY_WORLD, "N", 0, "ranks of the result (default: as SRC)", 0},
    {"mesh", KEY_MESH, "NAME=N,...", 0, "mesh of the result, such as dp=4,tp=2", 0},
    {"shard-dim", KEY_DIM, "D", 0, "tensor dim that is cut (default 0)", 0},
    {"compress", KEY_COMPRESS, "zstd[:L]", 0, "byte shuffle + zstd; level 0 (default) is fastest",
     0},
    {"plan", 'n', NULL, 0, "say what would be done, and write nothing", 0},
    {"plan-out", KEY_PLAN_OUT, "FILE", 0, "write the plan as JSON, then do it; -n: only that", 0},
    {"apply", KEY_APPLY, "FILE", 0, "do exactly what such a plan says", 0},
    {"resume", KEY_RESUME, NULL, 0, "go on where the same was cut off", 0},
    {"overwrite", KEY_OVERWRITE, NULL, 0, "replace DST when it exists", 0},
    {"no-verify", KEY_NO_VERIFY, NULL, 0, "do not read back what was written", 0},
    {"no-sync", KEY_NO_SYNC, NULL, 0, "leave durability to the operating system", 0},
    {"no-view", KEY_NO_VIEW, NULL, 0, "no index.h5 for other programs", 0},
    {"verbose", 'v', NULL, 0, "show the plan, then do it", 0},
    {0}};

/* The library knows the formats; see list_formats. */
enum { MOST_FORMATS = 32 };
static const char *formats[MOST_FORMATS + 1];
static const char *const parts[] = {"all", "model", "optim", NULL};
static const cli_words words[] = {{"to", formats}, {"only", parts}, {0}};

static void list_formats(void)
{
    for (size_t i = 0; i < MOST_FORMATS && fsdp_convert_format(i); i++)
        formats[i] = fsdp_convert_format(i);
}

_Noreturn static void refuse_format(const char *text)
{
    fsdp_text known = {0};
    for (size_t i = 0; fsdp_convert_format(i); i++)
        fsdp_text_addf(&known, "%s%s", i > 0 ? ", " : "", fsdp_convert_format(i));
    cli_usage_error("--to '%s' cannot be written; known formats: %.*s", text, (int)known.size,
                    known.data);
}

static const char *parse_format(const char *text)
{
    for (size_t i = 0; fsdp_convert_format(i); i++)
        if (strcmp(text, fsdp_convert_format(i)) == 0)
            return fsdp_convert_format(i);
    refuse_format(text);
}

/* Without --to: the suffix of DST, else fsdp when an option of its own asks for it, else hf. */
static void choose_format(convert_options *opts)
{
    fsdp_convert_opts *convert = &opts->convert;
    bool ours = opts->kind_given || opts->dim_given || opts->mesh_text || convert->world > 0 ||
                convert->compress || convert->no_view;
    if (!convert->format)
        convert->format = fsdp_convert_format_of(opts->to);
    else
        return;
    if (ours && strcmp(convert->format, "hf") == 0)
        convert->format = "fsdp";
}

static void check_format(const convert_options *opts)
{
    const fsdp_convert_opts *convert = &opts->convert;
    const char *format = convert->format;
    if (strcmp(format, "fsdp") == 0)
        return;
    if (opts->kind_given)
        cli_usage_error("--kind is for --to fsdp, not for %s", format);
    if (convert->compress && strcmp(format, "hdf5") != 0)
        cli_usage_error("--compress is for --to fsdp or hdf5, not for %s", format);
    if (convert->no_view)
        cli_usage_error("--no-view is for --to fsdp, not for %s", format);
    if (convert->max_shard_bytes > 0 && strcmp(format, "hf") != 0)
        cli_usage_error("--max-shard-size is for --to hf, not for %s", format);
}

/* "dp=4,tp=2" */
static fsdp_mesh *parse_mesh(const char *given)
{
    char *text = strdup(given), *rest = text;
    const char *names[FSDP_MAX_MESH_DIMS];
    int64_t shape[FSDP_MAX_MESH_DIMS];
    int ndim = 0;
    fsdp_mesh *mesh = NULL;
    fsdp_error err = {0};
    for (char *item; (item = strsep(&rest, ",")) != NULL; ndim++) {
        char *sign = strchr(item, '=');
        if (!sign || ndim == FSDP_MAX_MESH_DIMS)
            cli_usage_error("--mesh '%s' is not one to four NAME=N, such as dp=4,tp=2", given);
        *sign = '\0';
        names[ndim] = item;
        shape[ndim] = cli_parse_integer("--mesh", sign + 1, 1, 1 << 20);
    }
    if (fsdp_mesh_create(ndim, shape, names, NULL, &mesh, &err) != FSDP_OK)
        cli_usage_error("--mesh '%s': %s", given, err.text);
    free(text);
    return mesh;
}

/* What would be ignored is a misunderstanding. */
static void check_contradictions(const convert_options *opts)
{
    fsdp_kind kind = opts->convert.kind;
    if (kind == FSDP_FULL && opts->mesh_text)
        cli_usage_error("--kind full has every tensor whole: --mesh has no meaning");
    if (kind != FSDP_SHARDED && opts->dim_given)
        cli_usage_error("--kind %s cuts no tensor dim: --shard-dim has no meaning", cli_kind(kind));
    if (opts->verbose && opts->common.quiet)
        cli_usage_error("--quiet and --verbose contradict each other");
}

/* The plan says it all; what only says how the work is done may be said anew. */
static void check_apply(const convert_options *opts, const struct argp_state *state)
{
    const char *planning = opts->planning[0] ? opts->planning : NULL;
    if (opts->common.include || opts->common.exclude)
        planning = opts->common.include ? "--include" : "--exclude";
    if (planning)
        cli_usage_error("--apply does what the plan says: %s would change it", planning);
    if (state->arg_num > 0)
        cli_usage_error("--apply takes SRC and DST from the plan, '%s' is too many", opts->from);
    if (opts->plan_out)
        cli_usage_error("--apply and --plan-out contradict each other");
    if (opts->verbose && opts->common.quiet)
        cli_usage_error("--quiet and --verbose contradict each other");
}

static void check_arguments(convert_options *opts, const struct argp_state *state)
{
    fsdp_convert_opts *convert = &opts->convert;
    if (opts->apply) {
        check_apply(opts, state);
        return;
    }
    if (state->arg_num < 2)
        cli_usage_error("SRC and DST are expected");
    choose_format(opts);
    check_format(opts);
    check_contradictions(opts);
    if (opts->mesh_text) {
        opts->mesh = parse_mesh(opts->mesh_text);
        int64_t ranks = fsdp_mesh_size(opts->mesh);
        if (convert->world > 0 && convert->world != ranks)
            cli_usage_error("--mesh %s has %" PRId64 " ranks, --world-size says %d",
                            opts->mesh_text, ranks, convert->world);
        convert->mesh = opts->mesh;
    }
    convert->select.include = opts->common.include;
    convert->select.exclude = opts->common.exclude;
    convert->threads = opts->common.jobs;
    convert->memory = opts->common.memory;
}

static error_t parse_argument(convert_options *opts, char *arg, const struct argp_state *state)
{
    if (state->arg_num > 1)
        cli_usage_error("SRC and DST are expected, '%s' is too many", arg);
    *(state->arg_num == 0 ? &opts->from : &opts->to) = arg;
    return 0;
}

/* Options that are part of a plan. */
static void note_planning(convert_options *opts, int key)
{
    for (const struct argp_option *option = options; option->name; option++) {
        bool plans =
            key >= KEY_TO && key <= KEY_SHARD_SIZE && key != KEY_NO_VERIFY && key != KEY_NO_SYNC;
        if (option->key == key && plans)
            snprintf(opts->planning, sizeof opts->planning, "--%s", option->name);
    }
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    convert_options *opts = state->input;
    fsdp_convert_opts *convert = &opts->convert;
    note_planning(opts, key);
    switch (key) {
    case ARGP_KEY_INIT:
        for (int i = 0; i < CLI_CHILDREN; i++)
            state->child_inputs[i] = &opts->common;
        opts->drops = calloc((size_t)state->argc + 1, sizeof *opts->drops);
        opts->renames = calloc((size_t)state->argc + 1, sizeof *opts->renames);
        convert->select.drops = opts->drops;
        convert->select.renames = opts->renames;
        return opts->drops && opts->renames ? 0 : ENOMEM;
    case KEY_TO: convert->format = parse_format(arg); return 0;
    case KEY_ONLY:
        convert->select.only = (fsdp_only)(FSDP_ONLY_ALL + cli_parse_word("--only", arg, parts));
        return 0;
    case KEY_DROP: opts->drops[convert->select.drop_count++] = arg; return 0;
    case KEY_RENAME: opts->renames[convert->select.rename_count++] = arg; return 0;
    case KEY_SHARD_SIZE:
        convert->max_shard_bytes = cli_parse_size("--max-shard-size", arg);
        return 0;
    case KEY_KIND:
        convert->kind = cli_parse_kind(arg);
        opts->kind_given = true;
        return 0;
    case KEY_WORLD:
        convert->world = (int)cli_parse_integer("--world-size", arg, 1, 1 << 20);
        return 0;
    case KEY_MESH: opts->mesh_text = arg; return 0;
    case KEY_DIM:
        convert->shard_dim = (int)cli_parse_integer("--shard-dim", arg, 0, FSDP_MAX_DIMS - 1);
        opts->dim_given = true;
        return 0;
    case KEY_COMPRESS:
        convert->compress = true;
        convert->level = cli_parse_compress(arg);
        return 0;
    case KEY_NO_VERIFY: convert->no_verify = true; return 0;
    case KEY_OVERWRITE: convert->overwrite = true; return 0;
    case KEY_NO_SYNC: convert->no_sync = true; return 0;
    case KEY_NO_VIEW: convert->no_view = true; return 0;
    case KEY_PLAN_OUT: opts->plan_out = arg; return 0;
    case KEY_APPLY: opts->apply = arg; return 0;
    case KEY_RESUME: convert->resume = true; return 0;
    case 'n': opts->plan = true; return 0;
    case 'v': opts->verbose = true; return 0;
    case ARGP_KEY_ARG: return parse_argument(opts, arg, state);
    case ARGP_KEY_END: check_arguments(opts, state); return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp argp = {.options = options, .parser = parse, .children = cli_children};

static const cli_tool tool = {
    .name = "fsdp-convert",
    .args = "SRC DST | --apply FILE",
    .summary =
        "Writes a checkpoint again: in another format, for another world size, mesh or kind.",
    .examples = "  fsdp-convert step-00001200 on-6 --world-size 6   for six ranks\n"
                "  fsdp-convert pytorch_model.bin model.safetensors another format\n"
                "  fsdp-convert SRC DST -n --plan-out plan.json     then: --apply plan.json\n",
    .runs_alone = true,
    .argp = &argp,
    .words = words};

/* --- what is printed -------------------------------------------------------------------------- */

/* The last line of a path is enough for people. */
static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash && slash[1] ? slash + 1 : path;
}

static bool is_ours(const convert_options *opts)
{
    return strcmp(opts->convert.format, "fsdp") == 0;
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

/* "3 of 148 tensors have no dim 7 and are cut along dim 0" */
static void add_short(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan)
{
    bool one = plan->short_tensors == 1;
    fsdp_text_addf(text, "%" PRId64 " of %" PRId64 " tensors %s no dim %d and %s cut along dim 0",
                   plan->short_tensors, plan->tensors, one ? "has" : "have",
                   opts->convert.shard_dim, one ? "is" : "are");
}

/* What does not go over as it is. */
static void add_changes(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan)
{
    char number[CLI_NUMBER];
    if (plan->renamed > 0)
        fsdp_text_addf(text, "  rename %s\n", cli_plural(plan->renamed, "name", number));
    if (plan->left_out > 0)
        fsdp_text_addf(text, "  %" PRId64 " %s of the %s left out (--only all takes everything)\n",
                       plan->left_out, plan->left_out == 1 ? "entry" : "entries",
                       opts->convert.select.only == FSDP_ONLY_OPTIM ? "model" : "optimizer");
    if (plan->dropped > 0)
        fsdp_text_addf(text, "  %" PRId64 " dropped (--drop)\n", plan->dropped);
    if (plan->short_tensors > 0) {
        fsdp_text_addf(text, "  ");
        add_short(text, opts, plan);
        fsdp_text_addf(text, "\n");
    }
    if (plan->prefix[0] && !is_ours(opts)) {
        fsdp_text_addf(text, "  all names of the model begin with '%s': --rename 's/^",
                       plan->prefix);
        for (const char *c = plan->prefix; *c; c++)
            fsdp_text_addf(text, *c == '.' ? "\\%c" : "%c", *c);
        fsdp_text_addf(text, "//' strips it\n");
    }
}

static void add_plan(fsdp_text *text, const convert_options *opts, const fsdp_checkpoint_info *info,
                     const fsdp_convert_plan *plan)
{
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
        fsdp_text_addf(text, "not enough for %s with all that is beside the tensors",
                       cli_bytes(plan->bytes_needed, number));
    fsdp_text_add(text, "\n", 1);
    if (plan->bytes_spooled > 0)
        fsdp_text_addf(text,
                       "  unpack %s beside the result meanwhile (packed, read out of order)\n",
                       cli_bytes(plan->bytes_spooled, number));
    add_changes(text, opts, plan);
}

static void add_json(fsdp_text *text, const convert_options *opts, const fsdp_checkpoint_info *info,
                     const fsdp_convert_plan *plan, double seconds, const fsdp_error *failure)
{
    fsdp_text_addf(text, "{\"schema\": 1, \"from\": ");
    fsdp_text_add_json_string(text, info->path, strlen(info->path));
    fsdp_text_addf(text, ", \"to\": ");
    fsdp_text_add_json_string(text, opts->to, strlen(opts->to));
    fsdp_text_addf(text, ",\n \"format\": \"%s\"", opts->convert.format);
    if (is_ours(opts))
        fsdp_text_addf(text, ", \"kind\": \"%s\"", cli_kind(opts->convert.kind));
    fsdp_text_addf(text, ", \"world_size\": %d, \"files\": %d", plan->world, plan->files);
    fsdp_text_addf(text,
                   ",\n \"tensors\": %" PRId64 ", \"values\": %" PRId64 ", \"aliases\": %" PRId64,
                   plan->tensors, plan->values, plan->aliases);
    fsdp_text_addf(text,
                   ",\n \"bytes_read\": %" PRId64 ", \"bytes_written\": %" PRId64
                   ", \"peak_memory\": %" PRId64,
                   plan->bytes_read, plan->bytes_written, plan->peak_memory);
    fsdp_text_addf(text,
                   ",\n \"renamed\": %" PRId64 ", \"left_out\": %" PRId64 ", \"dropped\": %" PRId64,
                   plan->renamed, plan->left_out, plan->dropped);
    if (opts->dim_given)
        fsdp_text_addf(text, ", \"short_tensors\": %" PRId64, plan->short_tensors);
    fsdp_text_addf(text,
                   ",\n \"bytes_spooled\": %" PRId64 ", \"bytes_needed\": %" PRId64
                   ", \"free_bytes\": %" PRId64 ", ",
                   plan->bytes_spooled, plan->bytes_needed, plan->free_bytes);
    if (opts->plan)
        fsdp_text_addf(text, "\"written\": false");
    else
        fsdp_text_addf(text, "\"written\": true, \"verified\": %s, \"seconds\": %.3f",
                       opts->convert.no_verify ? "false" : "true", seconds);
    if (failure) {
        fsdp_text_addf(text, ", ");
        cli_add_json_error(text, failure->status, failure);
    }
    fsdp_text_addf(text, "}\n");
}

/* With $'...', where control characters and what is not ASCII have no other harmless spelling. */
static void add_spelled_argument(fsdp_text *text, const char *argument)
{
    fsdp_text_addf(text, " $'");
    for (; *argument; argument++) {
        unsigned char c = (unsigned char)*argument;
        if (c < 32 || c > 126)
            fsdp_text_addf(text, "\\x%02x", c);
        else
            fsdp_text_addf(text, "%s%c", c == '\'' || c == '\\' ? "\\" : "", c);
    }
    fsdp_text_addf(text, "'");
}

static bool is_harmless(const char *argument)
{
    fsdp_text spelled = {0};
    cli_add_message(&spelled, argument);
    bool same = spelled.data && strcmp(spelled.data, argument) == 0;
    fsdp_text_release(&spelled);
    return same;
}

/* Quoted for a shell when it must be. */
static void add_argument(fsdp_text *text, const char *argument)
{
    static const char plain[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./,=+@:%";
    if (argument[0] && strspn(argument, plain) == strlen(argument)) {
        fsdp_text_addf(text, " %s", argument);
        return;
    }
    if (argument[0] && !is_harmless(argument)) {
        add_spelled_argument(text, argument);
        return;
    }
    fsdp_text_addf(text, " '");
    for (; *argument; argument++)
        fsdp_text_add(text, *argument == '\'' ? "'\\''" : argument, *argument == '\'' ? 4 : 1);
    fsdp_text_addf(text, "'");
}

static void add_done(fsdp_text *text, const convert_options *opts, const fsdp_checkpoint_info *info,
                     const fsdp_convert_plan *plan, double seconds)
{
    char number[CLI_NUMBER];
    const cli_common *common = &opts->common;
    fsdp_text_addf(text, "ok    %s, ", cli_plural(plan->tensors, "tensor", number));
    fsdp_text_addf(text, "%s in %.2f s ", cli_bytes(plan->bytes_written, number), seconds);
    fsdp_text_addf(text, "(%s), %s\n", cli_rate(plan->bytes_written, seconds, number),
                   opts->convert.no_verify ? "not verified" : "verified by re-read");
    fsdp_text_addf(text, "next  fsdp-diff");
    add_argument(text, info->path);
    add_argument(text, opts->to);
    if (common->include) {
        fsdp_text_addf(text, " -I");
        add_argument(text, common->include);
    }
    if (common->exclude) {
        fsdp_text_addf(text, " -X");
        add_argument(text, common->exclude);
    }
    fsdp_text_add(text, "\n", 1);
}

/* --- the work --------------------------------------------------------------------------------- */

static void add_replaced(fsdp_text *text, const char *path)
{
    fsdp_text_addf(text, "  '");
    cli_add_message(text, path);
    fsdp_text_addf(text, "' exists and is replaced\n");
}

static fsdp_status print_plan(const convert_options *opts, const fsdp_checkpoint_info *info,
                              const fsdp_convert_plan *plan, const fsdp_error *failure)
{
    fsdp_text text = {0};
    if (opts->common.json) {
        add_json(&text, opts, info, plan, 0, failure);
    } else if (!opts->common.quiet) {
        add_plan(&text, opts, info, plan);
        if (!failure && opts->convert.overwrite && access(opts->to, F_OK) == 0)
            add_replaced(&text, opts->to);
        fsdp_text_addf(&text, "  nothing written (plan only)\n");
    }
    return cli_put_all(&text);
}

/* An option that did not do what it says, for some tensors or for all. */
static void tell_short(const convert_options *opts, const fsdp_convert_plan *plan)
{
    fsdp_text text = {0};
    if (plan->short_tensors == 0 || opts->common.quiet || opts->common.json)
        return;
    add_short(&text, opts, plan);
    if (!text.failed)
        cli_say("note", "%s", text.data);
    fsdp_text_release(&text);
}

static fsdp_status convert(const convert_options *opts, const fsdp_checkpoint_info *info,
                           const fsdp_convert_plan *plan, fsdp_error *err)
{
    fsdp_text text = {0};
    double began = cli_now();
    if (opts->verbose && !opts->common.json) {
        add_plan(&text, opts, info, plan);
        FSDP_TRY(cli_put_all(&text));
    } else {
        tell_short(opts, plan);
    }
    FSDP_TRY(fsdp_checkpoint_convert(info->path, opts->to, &opts->convert, err));
    cli_progress_clear();
    if (opts->common.json)
        add_json(&text, opts, info, plan, cli_now() - began, NULL);
    else if (!opts->common.quiet)
        add_done(&text, opts, info, plan, cli_now() - began);
    return cli_put_all(&text);
}

/* What DST is decides whether the option would help; where it would not, that is the better answer. */
static void name_overwrite(const convert_options *opts, const char *from, fsdp_error *err)
{
    fsdp_convert_opts overwriting = opts->convert;
    fsdp_convert_plan plan = {0};
    fsdp_error found = *err, other = {0};
    overwriting.overwrite = true;
    overwriting.watch = (fsdp_watch){0}; /* notices were given */
    fsdp_status st = fsdp_checkpoint_convert_plan(from, opts->to, &overwriting, &plan, &other);
    if (st == FSDP_OK)
        fsdp_fail(err, FSDP_ERR_EXISTS, "%s; --overwrite replaces it", found.text);
    else if (st == FSDP_ERR_EXISTS)
        *err = other;
}

/* A full checkpoint that is only compressed or filtered stays one. */
static void choose_kind(convert_options *opts, const fsdp_checkpoint_info *info)
{
    fsdp_convert_opts *convert = &opts->convert;
    bool is_cut = convert->world > 0 || convert->mesh || opts->dim_given;
    if (!opts->order && !opts->kind_given && info->kind == FSDP_FULL && !is_cut)
        convert->kind = FSDP_FULL;
}

static fsdp_status plan_and_convert(convert_options *opts, fsdp_checkpoint *source, fsdp_error *err)
{
    const fsdp_checkpoint_info *info = fsdp_checkpoint_describe(source);
    fsdp_convert_plan plan = {0};
    choose_kind(opts, info);
    fsdp_status st = fsdp_checkpoint_convert_plan(info->path, opts->to, &opts->convert, &plan, err);
    if (st == FSDP_ERR_EXISTS && !opts->convert.overwrite)
        name_overwrite(opts, info->path, err);
    if (st == FSDP_OK && opts->plan_out)
        st = fsdp_checkpoint_convert_plan_write(info->path, opts->to, &opts->convert,
                                                opts->plan_out, err);
    if (opts->plan && plan.files > 0) {
        fsdp_status printed = print_plan(opts, info, &plan, st == FSDP_OK ? NULL : err);
        return st == FSDP_OK ? printed : st;
    }
    return st == FSDP_OK ? convert(opts, info, &plan, err) : st;
}

/* The plan's options; how the work is done is the command line's. */
static fsdp_status take_order(convert_options *opts, fsdp_error *err)
{
    const fsdp_convert_opts given = opts->convert;
    FSDP_TRY(fsdp_convert_order_open(opts->apply, NULL, &opts->order, err));
    fsdp_convert_opts *convert = &opts->order->opts;
    convert->no_verify = given.no_verify;
    convert->no_sync = given.no_sync;
    convert->resume = given.resume;
    convert->threads = opts->common.jobs;
    convert->memory = opts->common.memory;
    opts->convert = *convert;
    opts->from = opts->order->from;
    opts->to = opts->order->to;
    return fsdp_convert_order_check(opts->order, err);
}

static fsdp_status run(convert_options *opts, fsdp_error *err)
{
    fsdp_checkpoint *source = NULL;
    if (opts->apply)
        FSDP_TRY(take_order(opts, err));
    opts->convert.watch = cli_watch(&opts->common);
    FSDP_TRY(cli_open_checkpoint(opts->from, &opts->convert.watch, &source, err));
    fsdp_status st = plan_and_convert(opts, source, err);
    fsdp_checkpoint_close(source);
    return st;
}

/* A batch system runs it again. */
static int end_for_resume(void)
{
    cli_progress_clear();
    cli_say("stop", "by signal %d; what is done is kept, and --resume goes on with it",
            cli_stopped());
    return FSDP_ERR_CANCELLED;
}

int main(int argc, char **argv)
{
    convert_options opts = {0};
    fsdp_error err = {0};
    list_formats();
    cli_begin(&tool, argc, argv, &opts);
    fsdp_status st = run(&opts, &err);
    bool resumes = st == FSDP_ERR_CANCELLED && cli_stopped() && opts.convert.resume &&
                   fsdp_convert_keeps_work(opts.convert.format);
    fsdp_convert_order_close(opts.order);
    fsdp_mesh_free(opts.mesh);
    free(opts.drops);
    free(opts.renames);
    return resumes ? end_for_resume() : cli_end(st, &err);
}
