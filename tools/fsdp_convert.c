/*
 * fsdp-convert: the same state in another kind, world size, mesh or sharding, offline. The work is
 * fsdp_checkpoint_convert's; this is options, the plan and the last two lines.
 */
#include "tools/cli.h"

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
    const char *from, *to;
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
    KEY_NO_VIEW
};

static const struct argp_option options[] = {
    {"to", KEY_TO, "FORMAT", 0, "fsdp (the only one so far, and the default)", 0},
    {"kind", KEY_KIND, "KIND", 0, "sharded (default), full or local", 0},
    {"world-size", KEY_WORLD, "N", 0, "ranks of the result (default: as SRC)", 0},
    {"mesh", KEY_MESH, "NAME=N,...", 0, "mesh of the result, such as dp=4,tp=2", 0},
    {"shard-dim", KEY_DIM, "D", 0, "tensor dim that is cut (default 0)", 0},
    {"compress", KEY_COMPRESS, "zstd[:L]", 0, "byte shuffle + zstd; level 0 (default) is fastest",
     0},
    {"plan", 'n', NULL, 0, "say what would be done, and write nothing", 0},
    {"overwrite", KEY_OVERWRITE, NULL, 0, "replace DST when it exists", 0},
    {"no-verify", KEY_NO_VERIFY, NULL, 0, "do not read back what was written", 0},
    {"no-sync", KEY_NO_SYNC, NULL, 0, "leave durability to the operating system", 0},
    {"no-view", KEY_NO_VIEW, NULL, 0, "no index.h5 for other programs", 0},
    {"verbose", 'v', NULL, 0, "show the plan, then do it", 0},
    {0}};

static void parse_format(const char *text)
{
    if (strcmp(text, "fsdp") != 0)
        cli_usage_error("--to '%s' cannot be written; known formats: fsdp", text);
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

static void check_arguments(convert_options *opts, const struct argp_state *state)
{
    fsdp_convert_opts *convert = &opts->convert;
    if (state->arg_num < 2)
        cli_usage_error("SRC and DST are expected");
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

static error_t parse(int key, char *arg, struct argp_state *state)
{
    convert_options *opts = state->input;
    fsdp_convert_opts *convert = &opts->convert;
    switch (key) {
    case ARGP_KEY_INIT:
        for (int i = 0; i < 3; i++)
            state->child_inputs[i] = &opts->common;
        return 0;
    case KEY_TO: parse_format(arg); return 0;
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
    case 'n': opts->plan = true; return 0;
    case 'v': opts->verbose = true; return 0;
    case ARGP_KEY_ARG: return parse_argument(opts, arg, state);
    case ARGP_KEY_END: check_arguments(opts, state); return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_child children[] = {{&cli_names_argp, 0, NULL, 0},
                                             {&cli_work_argp, 0, NULL, 0},
                                             {&cli_general_argp, 0, NULL, 0},
                                             {0}};
static const struct argp argp = {.options = options, .parser = parse, .children = children};

static const cli_tool tool = {
    .name = "fsdp-convert",
    .args = "SRC DST",
    .summary = "Writes a checkpoint again for another world size, mesh, kind or compression.",
    .examples = "  fsdp-convert step-00001200 on-6 --world-size 6   for six ranks\n"
                "  fsdp-convert step-00001200 one --kind full       every tensor whole, one file\n"
                "  fsdp-convert runs/gpt2 tp --mesh dp=4,tp=2 -n    plan only, newest of a run\n"
                "  fsdp-convert SRC DST -I '^model' --compress zstd a part, compressed\n",
    .runs_alone = true,
    .argp = &argp};

/* --- what is printed -------------------------------------------------------------------------- */

/* The last line of a path is enough for people. */
static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash && slash[1] ? slash + 1 : path;
}

static int result_world(const convert_options *opts, const fsdp_checkpoint_info *info)
{
    const fsdp_convert_opts *convert = &opts->convert;
    if (convert->mesh)
        return (int)fsdp_mesh_size(convert->mesh);
    return convert->kind == FSDP_FULL ? 1 : convert->world > 0 ? convert->world : info->world;
}

static void add_plan(fsdp_text *text, const convert_options *opts, const fsdp_checkpoint_info *info,
                     const fsdp_convert_plan *plan)
{
    char number[CLI_NUMBER];
    bool fits = plan->free_bytes < 0 || plan->free_bytes >= plan->bytes_written;
    fsdp_text_addf(text, "plan  ");
    cli_add_message(text, base_name(info->path));
    fsdp_text_addf(text, " (%s %s, world %d) -> ", info->format, cli_kind(info->kind), info->world);
    cli_add_message(text, opts->to);
    fsdp_text_addf(text, " (fsdp %s, world %d%s)\n", cli_kind(opts->convert.kind),
                   result_world(opts, info), opts->convert.compress ? ", zstd" : "");
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
        fsdp_text_addf(text, "   free %s: %s", cli_bytes(plan->free_bytes, number),
                       fits ? "ok" : "not enough");
    fsdp_text_add(text, "\n", 1);
}

static void add_json(fsdp_text *text, const convert_options *opts, const fsdp_checkpoint_info *info,
                     const fsdp_convert_plan *plan, double seconds, const fsdp_error *failure)
{
    fsdp_text_addf(text, "{\"schema\": 1, \"from\": ");
    fsdp_text_add_json_string(text, info->path, strlen(info->path));
    fsdp_text_addf(text, ", \"to\": ");
    fsdp_text_add_json_string(text, opts->to, strlen(opts->to));
    fsdp_text_addf(text,
                   ",\n \"format\": \"fsdp\", \"kind\": \"%s\", \"world_size\": %d, \"files\": %d",
                   cli_kind(opts->convert.kind), result_world(opts, info), plan->files);
    fsdp_text_addf(text,
                   ",\n \"tensors\": %" PRId64 ", \"values\": %" PRId64 ", \"aliases\": %" PRId64,
                   plan->tensors, plan->values, plan->aliases);
    fsdp_text_addf(text,
                   ",\n \"bytes_read\": %" PRId64 ", \"bytes_written\": %" PRId64
                   ", \"peak_memory\": %" PRId64,
                   plan->bytes_read, plan->bytes_written, plan->peak_memory);
    fsdp_text_addf(text, ",\n \"free_bytes\": %" PRId64 ", ", plan->free_bytes);
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

static fsdp_status convert(const convert_options *opts, const fsdp_checkpoint_info *info,
                           const fsdp_convert_plan *plan, fsdp_error *err)
{
    fsdp_text text = {0};
    double began = cli_now();
    if (opts->verbose && !opts->common.json) {
        add_plan(&text, opts, info, plan);
        FSDP_TRY(cli_put_all(&text));
    }
    FSDP_TRY(fsdp_checkpoint_convert(info->path, opts->to, &opts->convert, err));
    cli_progress_clear();
    if (opts->common.json)
        add_json(&text, opts, info, plan, cli_now() - began, NULL);
    else if (!opts->common.quiet)
        add_done(&text, opts, info, plan, cli_now() - began);
    return cli_put_all(&text);
}

/* A full checkpoint that is only compressed or filtered stays one. */
static void choose_kind(convert_options *opts, const fsdp_checkpoint_info *info)
{
    fsdp_convert_opts *convert = &opts->convert;
    bool is_cut = convert->world > 0 || convert->mesh || opts->dim_given;
    if (!opts->kind_given && info->kind == FSDP_FULL && !is_cut)
        convert->kind = FSDP_FULL;
}

static fsdp_status plan_and_convert(convert_options *opts, fsdp_checkpoint *source, fsdp_error *err)
{
    const fsdp_checkpoint_info *info = fsdp_checkpoint_describe(source);
    fsdp_convert_plan plan = {0};
    choose_kind(opts, info);
    fsdp_status st = fsdp_checkpoint_convert_plan(info->path, opts->to, &opts->convert, &plan, err);
    if (opts->plan && plan.files > 0) {
        fsdp_status printed = print_plan(opts, info, &plan, st == FSDP_OK ? NULL : err);
        return st == FSDP_OK ? printed : st;
    }
    return st == FSDP_OK ? convert(opts, info, &plan, err) : st;
}

static fsdp_status run(convert_options *opts, fsdp_error *err)
{
    fsdp_checkpoint *source = NULL;
    opts->convert.watch = cli_watch(&opts->common);
    FSDP_TRY(cli_open_checkpoint(opts->from, &opts->convert.watch, &source, err));
    fsdp_status st = plan_and_convert(opts, source, err);
    fsdp_checkpoint_close(source);
    return st;
}

int main(int argc, char **argv)
{
    convert_options opts = {0};
    fsdp_error err = {0};
    cli_begin(&tool, argc, argv, &opts);
    fsdp_status st = run(&opts, &err);
    fsdp_mesh_free(opts.mesh);
    return cli_end(st, &err);
}
