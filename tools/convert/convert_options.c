/* The command line of fsdp-convert. See convert_tool.h. */
#include "tools/convert/convert_tool.h"
#include "base/text.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    KEY_TO = 0x2000,
    KEY_FROM,
    KEY_VARIANT,
    KEY_LIKE,
    KEY_VOID_AS,
    KEY_ALLOW_MISSING,
    KEY_STRICT,
    KEY_COPY_FROM,
    KEY_COPY_CODE,
    KEY_NO_COPY,
    KEY_TIED,
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
    KEY_PART,
    KEY_NAMES,
    KEY_DROP,
    KEY_OPAQUE,
    KEY_OPTIM,
    KEY_RENAME,
    KEY_UNDER,
    KEY_ADAPTER,
    KEY_DEQUANT,
    KEY_MAP,
    KEY_SIZE,
    KEY_DTYPE,
    KEY_DTYPE_FOR,
    KEY_ON_OVERFLOW,
    KEY_SHARD_SIZE,
    KEY_PLAN_OUT,
    KEY_APPLY,
    KEY_RESUME,
    KEY_RULES,
    KEY_IO,
    KEY_RATE,
    KEY_DIGEST,
    KEY_WRITE_DIGESTS
};

static const struct argp_option options[] = {
    {"to", KEY_TO, "FORMAT", 0,
     "fsdp, hf, safetensors, dcp, megatron, torch, hdf5, npz, npy, gguf, llmc, universal", 0},
    {"from", KEY_FROM, "FORMAT", 0, "format of SRC (default: by its bytes)", 0},
    {"variant", KEY_VARIANT, "NAME", 0, "of SRC the files model.NAME.safetensors", 0},
    {"void-as", KEY_VOID_AS, "T", 0, "npz: dtype of arrays of raw bytes, |V2: bf16", 0},
    {"like", KEY_LIKE, "MODEL", 0, "ranks of FSDP1: a model with the parameters' shapes", 0},
    {"only", KEY_ONLY, "PART", 0, "all, model or optim (default: all; model for hf)", 0},
    {"part", KEY_PART, "NAME", 0, "only what is below NAME, such as ema", 0},
    {"names", KEY_NAMES, "HOW", 0, "hf: strip (default) \"module.\" and the like, keep, or hub", 0},
    {"drop", KEY_DROP, "WHAT", 0, "values, opaque, optim, dtype:T, tensors:KIND or a regex", 0},
    {"opaque", KEY_OPAQUE, "HOW", 0, "objects of unknown classes: refuse or copy", 0},
    {"optim", KEY_OPTIM, "FORM", 0, "dcp: hyper-parameters nested or flat", 0},
    {"rename", KEY_RENAME, "s/RE/NEW/", 0, "rename entries; repeatable, in order", 0},
    {"under", KEY_UNDER, "KEY", 0, "dcp, torch, fsdp: every entry below KEY, such as model", 0},
    {"adapter", KEY_ADAPTER, "DIR", 0, "merge the adapter of PEFT (LoRA, DoRA) in DIR", 0},
    {"dequant", KEY_DEQUANT, "T", 0, "quantized weights as plain ones: bf16, f32 or f16", 0},
    {"map", KEY_MAP, "MAP", 0, "names of another framework: a built-in map, a file, or none", 0},
    {"size", KEY_SIZE, "NAME=N", 0, "a size that the map needs, such as heads=32", 0},
    {"dtype", KEY_DTYPE, "T", 0, "cast the model: keep, f32, bf16, f16, f64, f8e4m3, ...", 0},
    {"dtype-for", KEY_DTYPE_FOR, "RE=T", 0, "cast names that match; the first rule wins", 0},
    {"on-overflow", KEY_ON_OVERFLOW, "HOW", 0, "overflow of a cast: fail (default), clamp or inf",
     0},
    {"max-shard-size", KEY_SHARD_SIZE, "SIZE", 0, "hf: bytes in a file (default: 50G)", 0},
    {"copy-from", KEY_COPY_FROM, "DIR", 0, "hf: config.json, tokenizer, ... from DIR", 0},
    {"no-copy", KEY_NO_COPY, NULL, 0, "hf: not what lies beside the weights of SRC", 0},
    {"copy-code", KEY_COPY_CODE, NULL, 0, "also copy *.py, and keep auto_map", 0},
    {"tied", KEY_TIED, "MODE", 0, "names of one tensor: auto, keep or drop", 0},
    {"allow-missing", KEY_ALLOW_MISSING, "RE", 0, "leave out names that files lack", 0},
    {"strict", KEY_STRICT, NULL, 0, "every file must be there (the default)", 0},
    {"kind", KEY_KIND, "KIND", 0, "fsdp: sharded (default), full or local", 0},
    {"world-size", KEY_WORLD, "N", 0, "ranks of the result (default: as SRC)", 0},
    {"mesh", KEY_MESH, "NAME=N,...", 0, "mesh of the result, such as dp=4,tp=2", 0},
    {"shard-dim", KEY_DIM, "D", 0, "tensor dim that is cut (default 0)", 0},
    {"compress", KEY_COMPRESS, "zstd[:L]", 0, "byte shuffle + zstd; level 0 (default) is fastest",
     0},
    {"plan", 'n', NULL, 0, "print the plan, and write nothing", 0},
    {"plan-out", KEY_PLAN_OUT, "FILE", 0, "write the plan as JSON; with -n nothing else", 0},
    {"apply", KEY_APPLY, "FILE", 0, "convert exactly as such a plan says", 0},
    {"resume", KEY_RESUME, NULL, 0, "resume the same conversion after a stop", 0},
    {"overwrite", KEY_OVERWRITE, NULL, 0, "replace DST when it exists", 0},
    {"no-verify", KEY_NO_VERIFY, NULL, 0, "do not read the result back", 0},
    {"no-sync", KEY_NO_SYNC, NULL, 0, "leave durability to the operating system", 0},
    {"no-view", KEY_NO_VIEW, NULL, 0, "no index.h5 for other programs", 0},
    {"io", KEY_IO, "MODE", 0, "how files are read: auto, pread or direct", 0},
    {"bwlimit", KEY_RATE, "RATE", 0, "bytes per second, read and written: 100M", 0},
    {"digest", KEY_DIGEST, "sha256", 0, "print the SHA-256 of every file written", 0},
    {"write-digests", KEY_WRITE_DIGESTS, NULL, 0, "leave DST.xxh3, for fsdp-verify", 0},
    {"rules", KEY_RULES, "FILE", 0, "more options, one per line; typed ones win", 0},
    {"verbose", 'v', NULL, 0, "show the plan, then do it", 0},
    {0}};

/* The library knows the formats and dtypes; see list_words. */
enum { MOST_FORMATS = 32 };
static const char *formats[MOST_FORMATS + 1], *sources[MOST_FORMATS + 1];
static const char *const parts[] = {"all", "model", "optim", NULL};
static const char *const namings[] = {"strip", "keep", "hub", NULL};
static const char *const ties[] = {"auto", "keep", "drop", NULL};
static const char *const opaques[] = {"refuse", "copy", NULL};
static const char *const forms[] = {"nested", "flat", NULL}; /* from FSDP_OPTIM_FORM_NESTED on */
static const char *const modes[] = {"auto", "pread", "direct", NULL};
static const char *const digests[] = {"sha256", NULL};
static const char *const quanta[] = {"bf16", "f32", "f16", NULL};
static const char *const policies[] = {"fail", "clamp", "inf", NULL};
enum { MOST_DTYPES = 16 };
static const char *dtypes[MOST_DTYPES + 1] = {"keep"};
static const cli_words words[] = {{"to", formats},
                                  {"from", sources},
                                  {"tied", ties},
                                  {"opaque", opaques},
                                  {"optim", forms},
                                  {"only", parts},
                                  {"names", namings},
                                  {"io", modes},
                                  {"digest", digests},
                                  {"dtype", dtypes},
                                  {"dequant", quanta},
                                  {"on-overflow", policies},
                                  {0}};

static void list_words(void)
{
    for (size_t i = 0; i < MOST_FORMATS && fsdp_convert_format_at(i); i++)
        formats[i] = fsdp_convert_format_at(i);
    for (size_t i = 0; i + 1 < MOST_DTYPES && fsdp_castable_at(i); i++)
        dtypes[i + 1] = fsdp_castable_at(i);
    for (size_t i = 0; i < MOST_FORMATS && fsdp_checkpoint_format_at(i); i++)
        sources[i] = fsdp_checkpoint_format_at(i);
}

static void check_format(const convert_options *opts)
{
    const fsdp_convert_opts *convert = &opts->convert;
    const char *format = convert->format;
    bool takes_config = strcmp(format, "hf") == 0 || strcmp(format, "gguf") == 0 ||
                        strcmp(format, "llmc") == 0 || strcmp(format, "megatron") == 0 ||
                        convert->map;
    if (convert->copy_from && !takes_config)
        cli_usage_error(
            "--copy-from is for --to hf, gguf, llmc and megatron, and with --map, not for %s",
            format);
    if (convert->optim_form && strcmp(format, "dcp") != 0)
        cli_usage_error("--optim is for --to dcp, not for %s", format);
    if (strcmp(format, "fsdp") == 0)
        return;
    if (opts->kind_given)
        cli_usage_error("--kind is for --to fsdp, not for %s", format);
    if (convert->compress && strcmp(format, "hdf5") != 0)
        cli_usage_error("--compress is for --to fsdp or hdf5, not for %s", format);
    if (convert->skip_view)
        cli_usage_error("--no-view is for --to fsdp, not for %s", format);
    if (convert->max_shard_bytes > 0 && strcmp(format, "hf") != 0)
        cli_usage_error("--max-shard-size is for --to hf, not for %s", format);
}

/* "model" or "app.model": the rule that puts it before every name is the last. */
static void put_under(convert_options *opts)
{
    fsdp_select_opts *select = &opts->convert.select;
    static const char letters[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.";
    static const char *const targets[] = {"dcp", "torch", "fsdp", NULL};
    const char *key = select->under;
    size_t size = key ? strlen(key) : 0, target = 0;
    if (!key)
        return;
    while (targets[target] && strcmp(targets[target], opts->convert.format) != 0)
        target++;
    if (!targets[target])
        cli_usage_error("--under is for --to dcp, torch and fsdp, not for %s",
                        opts->convert.format);
    if (size == 0 || size > UNDER_MOST || strspn(key, letters) < size || key[0] == '.' ||
        key[size - 1] == '.' || strstr(key, ".."))
        cli_usage_error("--under takes keys of dicts such as 'model' or 'app.model', not '%s'",
                        key);
    snprintf(opts->under_rule, sizeof opts->under_rule, "s/^/%s./", key);
    opts->renames[select->rename_count++] = opts->under_rule;
}

/* --names hub is the map of that name, to the right. */
static void take_hub_names(convert_options *opts)
{
    const char **map = &opts->convert.map;
    if (opts->hub_names && *map && strcmp(*map, "hub") != 0)
        cli_usage_error("--names hub and --map %s contradict each other: both give names", *map);
    if (opts->hub_names)
        *map = "hub";
}

/* True for a mode that bypasses the page cache. */
static bool parse_mode(const char *text)
{
    if (strcmp(text, "mmap") == 0)
        cli_usage_error("--io mmap is not offered: a file that shrinks under a map kills its "
                        "reader; there is auto, pread, direct");
    return strcmp(modes[cli_parse_word("--io", text, modes)], "direct") == 0;
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

/* An option that another one makes meaningless is a usage error, since the user expects an effect. */
static void check_contradictions(const convert_options *opts)
{
    if (opts->convert.skip_copies && opts->convert.copy_from)
        cli_usage_error("--no-copy and --copy-from contradict each other");
    if (opts->convert.copy_code && !opts->convert.copy_from)
        cli_usage_error("--copy-code has no meaning without --copy-from DIR");
    fsdp_kind kind = opts->convert.kind;
    if (kind == FSDP_FULL && opts->mesh_text)
        cli_usage_error("--kind full has every tensor whole: --mesh has no meaning");
    if (kind != FSDP_SHARDED && opts->dim_given)
        cli_usage_error("--kind %s cuts no tensor dim: --shard-dim has no meaning", cli_kind(kind));
    if (opts->verbose && opts->common.quiet)
        cli_usage_error("--quiet and --verbose contradict each other");
}

/* Refuses options that the plan has; those about how the work is done are allowed. */
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

static void check_memory(const convert_options *opts)
{
    enum { LEAST = 1 << 20 }; /* the size of one read or write */
    if (opts->common.memory > 0 && opts->common.memory < LEAST)
        cli_usage_error("--mem of %" PRId64 " bytes is too little: a thread reads and writes 1 MiB "
                        "at a time, so that the least is 1M",
                        opts->common.memory);
}

static void check_arguments(convert_options *opts, const struct argp_state *state)
{
    fsdp_convert_opts *convert = &opts->convert;
    check_memory(opts);
    if (opts->apply) {
        check_apply(opts, state);
        return;
    }
    if (state->arg_num < 2)
        cli_usage_error("SRC and DST are expected");
    take_hub_names(opts);
    convert_choose_format(opts);
    check_format(opts);
    put_under(opts);
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
    convert->open.access = *cli_access();
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

static fsdp_optim_form parse_form(const char *arg)
{
    return (fsdp_optim_form)(FSDP_OPTIM_FORM_NESTED + cli_parse_word("--optim", arg, forms));
}

static int parse_world(const char *arg)
{
    return (int)cli_parse_integer("--world-size", arg, 1, 1 << 20);
}

static error_t take_kind(fsdp_convert_opts *convert, const char *arg)
{
    convert->kind = cli_parse_kind(arg);
    return 0;
}

static void parse_names(convert_options *opts, const char *arg)
{
    const char *word = namings[cli_parse_word("--names", arg, namings)];
    opts->convert.select.keep_names = strcmp(word, "keep") == 0;
    opts->hub_names = strcmp(word, "hub") == 0;
}

static bool parse_sha256(const char *arg)
{
    return cli_parse_word("--digest", arg, digests) == 0;
}

/* "heads=32" */
static const char *parse_size(const char *arg)
{
    const char *sign = strchr(arg, '=');
    if (!sign || sign == arg)
        cli_usage_error("--size '%s' is not NAME=NUMBER, such as heads=32", arg);
    (void)cli_parse_integer("--size", sign + 1, 1, INT64_MAX);
    return arg;
}

/* Lists with room for as many items as there are arguments. */
static error_t make_lists(convert_options *opts, size_t room)
{
    fsdp_convert_opts *convert = &opts->convert;
    convert->select.drops = opts->drops = calloc(room, sizeof *opts->drops);
    convert->select.renames = opts->renames = calloc(room, sizeof *opts->renames);
    convert->select.dtype_rules = opts->dtype_rules = calloc(room, sizeof *opts->dtype_rules);
    convert->sizes = opts->sizes = calloc(room, sizeof *opts->sizes);
    return opts->drops && opts->renames && opts->dtype_rules && opts->sizes ? 0 : ENOMEM;
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
        return make_lists(opts, (size_t)state->argc + 1);
    case KEY_TO: convert->format = convert_parse_format(arg); return 0;
    case KEY_FROM: convert->open.format = sources[cli_parse_word("--from", arg, sources)]; return 0;
    case KEY_PART: convert->select.part = arg; return 0;
    case KEY_NAMES: parse_names(opts, arg); return 0;
    case KEY_VARIANT: convert->open.variant = arg; return 0;
    case KEY_LIKE: convert->open.like = arg; return 0;
    case KEY_VOID_AS: convert->open.void_as = arg; return 0;
    case KEY_ALLOW_MISSING: convert->open.allow_missing = arg; return 0;
    case KEY_STRICT: convert->open.allow_missing = NULL; return 0;
    case KEY_COPY_FROM: convert->copy_from = arg; return 0;
    case KEY_NO_COPY: convert->skip_copies = true; return 0;
    case KEY_COPY_CODE: convert->copy_code = true; return 0;
    case KEY_TIED: convert->tied = (fsdp_tied)cli_parse_word("--tied", arg, ties); return 0;
    case KEY_ONLY:
        convert->select.only = (fsdp_only)(FSDP_ONLY_ALL + cli_parse_word("--only", arg, parts));
        return 0;
    case KEY_OPAQUE:
        convert->opaque = (fsdp_opaque)cli_parse_word("--opaque", arg, opaques);
        return 0;
    case KEY_OPTIM: convert->optim_form = parse_form(arg); return 0;
    case KEY_DROP: opts->drops[convert->select.drop_count++] = arg; return 0;
    case KEY_UNDER: convert->select.under = arg; return 0;
    case KEY_RENAME: opts->renames[convert->select.rename_count++] = arg; return 0;
    case KEY_ADAPTER: convert->adapter = arg; return 0;
    case KEY_DEQUANT: convert->dequant = quanta[cli_parse_word("--dequant", arg, quanta)]; return 0;
    case KEY_MAP: convert->map = arg; return 0;
    case KEY_SIZE: opts->sizes[convert->size_count++] = parse_size(arg); return 0;
    case KEY_DTYPE: convert->select.dtype = arg; return 0;
    case KEY_DTYPE_FOR: opts->dtype_rules[convert->select.dtype_rule_count++] = arg; return 0;
    case KEY_ON_OVERFLOW:
        convert->select.on_overflow =
            (fsdp_on_overflow)cli_parse_word("--on-overflow", arg, policies);
        return 0;
    case KEY_SHARD_SIZE:
        convert->max_shard_bytes = cli_parse_size("--max-shard-size", arg);
        return 0;
    case KEY_KIND: opts->kind_given = true; return take_kind(convert, arg);
    case KEY_WORLD: convert->world = parse_world(arg); return 0;
    case KEY_MESH: opts->mesh_text = arg; return 0;
    case KEY_DIM:
        convert->shard_dim = (int)cli_parse_integer("--shard-dim", arg, 0, FSDP_MAX_DIMS - 1);
        opts->dim_given = true;
        return 0;
    case KEY_COMPRESS:
        convert->compress = true;
        convert->level = cli_parse_compress(arg);
        return 0;
    case KEY_NO_VERIFY: convert->skip_verify = true; return 0;
    case KEY_OVERWRITE: convert->overwrite = true; return 0;
    case KEY_NO_SYNC: convert->skip_fsync = true; return 0;
    case KEY_NO_VIEW: convert->skip_view = true; return 0;
    case KEY_PLAN_OUT: opts->plan_out = arg; return 0;
    case KEY_APPLY: opts->apply = arg; return 0;
    case KEY_RESUME: convert->resume = true; return 0;
    case KEY_RULES: return 0; /* cli_begin has read it */
    case KEY_IO: convert->direct = parse_mode(arg); return 0;
    case KEY_RATE: convert->bytes_per_second = cli_parse_size("--bwlimit", arg); return 0;
    case KEY_DIGEST: opts->digest = parse_sha256(arg); return 0;
    case KEY_WRITE_DIGESTS: opts->write_digests = true; return 0;
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

void convert_options_read(int argc, char **argv, convert_options *opts_out)
{
    opts_out->argc = argc;
    opts_out->argv = argv;
    list_words();
    cli_begin(&tool, argc, argv, opts_out);
}

void convert_options_release(convert_options *opts)
{
    fsdp_conversion_close(opts->conversion);
    fsdp_mesh_free(opts->mesh);
    free(opts->drops);
    free(opts->renames);
    free(opts->dtype_rules);
    free(opts->sizes);
}
