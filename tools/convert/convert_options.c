/*
 * The command line of fsdp-convert: the library's table of options (fsdp_convert_option_at), and below it
 * what the tool does with a conversion. Help and completion are made of the same rows. See convert_tool.h.
 */
#include "tools/convert/convert_tool.h"
#include "base/text.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* === the format of the result ================================================================= */

static void list_known(fsdp_text *known)
{
    for (size_t i = 0; fsdp_convert_format_at(i); i++)
        fsdp_text_addf(known, "%s%s", i > 0 ? ", " : "", fsdp_convert_format_at(i));
}

_Noreturn static void refuse_format_of(const char *to, const char *suffix)
{
    fsdp_text known = {0};
    list_known(&known);
    cli_usage_error("'%s': %s files cannot be written; known formats for --to: %.*s", to, suffix,
                    (int)known.size, known.data);
}

/* The format of "HF" or "HuggingFace"; NULL: none. */
static const char *format_in_small_letters(const char *text)
{
    char small[32];
    size_t size = strlen(text);
    if (size >= sizeof small)
        return NULL;
    for (size_t i = 0; i <= size; i++)
        small[i] = (char)tolower((unsigned char)text[i]);
    const fsdp_format *format = fsdp_format_to(cli_meant(small));
    return format ? format->name : NULL;
}

/* Words for programs, and the format that they load. */
static const struct {
    const char *start, *format, *why;
} loaders[] = {{"deepspeed", "universal", "a checkpoint that DeepSpeed loads at any stage"},
               {"zero", "universal", "a checkpoint that DeepSpeed loads at any stage"},
               {"fsdp1", "dcp", "a checkpoint that PyTorch's FSDP loads"},
               {"fsdp2", "dcp", "a checkpoint that PyTorch's FSDP loads"},
               {"pytorch_", "dcp", "PyTorch's distributed checkpoint"},
               {"pytorch-", "dcp", "PyTorch's distributed checkpoint"},
               {"torch_d", "dcp", "PyTorch's distributed checkpoint"},
               {"distcp", "dcp", "PyTorch's distributed checkpoint"}};

/* The format whose name is one or two letters away. */
static const char *format_nearby(const char *text)
{
    const char *near = NULL;
    int least = 3;
    for (size_t i = 0; fsdp_convert_format_at(i); i++) {
        const char *known = fsdp_convert_format_at(i);
        int distance = cli_edit_distance(text, strlen(text), known, strlen(known));
        if (distance < least && distance < (int)strlen(known) / 2) {
            least = distance;
            near = known;
        }
    }
    return near;
}

_Noreturn static void refuse_format(const char *text)
{
    fsdp_text known = {0};
    const char *near = format_in_small_letters(text);
    for (size_t i = 0; !near && i < sizeof loaders / sizeof *loaders; i++)
        if (strncasecmp(text, loaders[i].start, strlen(loaders[i].start)) == 0)
            cli_usage_error("--to '%s' cannot be written; did you mean '%s', %s?", text,
                            loaders[i].format, loaders[i].why);
    near = near ? near : format_nearby(text);
    if (near)
        cli_usage_error("--to '%s' cannot be written; did you mean '%s'?", text, near);
    list_known(&known);
    cli_usage_error("--to '%s' cannot be written; known formats: %.*s", text, (int)known.size,
                    known.data);
}

/* The format that is written; ends the program where there is none of that name. */
static const char *parse_format(const char *text)
{
    const fsdp_format *format = fsdp_format_to(cli_meant(text));
    if (format)
        return format->name;
    refuse_format(text);
}

const fsdp_format *convert_target(const convert_options *opts)
{
    return fsdp_format_to(opts->convert.format);
}

enum { NO_SLIP = 32 };

/* The distance of typed from known, if it may be known with a slip: another case, up to three wrong, missing
 * or added letters of a long one, two exchanged or one missing or added of a short one. A wrong letter of
 * a short one makes another word (".bit"), and so does a number (".v5"). */
static int slip_of(const char *typed, const char *known)
{
    size_t size = strlen(typed), size_known = strlen(known);
    int distance = cli_edit_distance(typed, size, known, size_known);
    bool is_long = size_known > 8, has_wrong = size == size_known && strspn(typed, known) < size;
    if (strcasecmp(typed, known) == 0)
        return 0;
    if (distance > (is_long ? 3 : 1) || size < 3 || typed[1] != known[1] ||
        (has_wrong && size_known <= 4) || strpbrk(typed, "0123456789/"))
        return NO_SLIP;
    return 2 * distance + (size != size_known);
}

static void refuse_slip(const char *to)
{
    const char *suffix = strrchr(to, '.'), *near = NULL;
    int least = NO_SLIP;
    for (size_t i = 0; suffix && fsdp_format_at(i); i++) {
        for (const char *const *known = fsdp_format_at(i)->suffixes; *known; known++) {
            int slip = slip_of(suffix, *known);
            near = slip < least ? *known : near;
            least = slip < least ? slip : least;
        }
    }
    if (near)
        cli_usage_error("'%s': did you mean '%.*s%s'? --to FORMAT writes to any name", to,
                        (int)(suffix - to), to, near);
}

/* Refuses a name with the suffix of a format that is not written, in place of a directory of that
 * name. */
static void refuse_suffix(const char *to)
{
    static const char *const others[] = {".ggml",    ".onnx",    ".tflite", ".pkl", ".keras",
                                         ".msgpack", ".mlmodel", ".json",   ".zip", ".tar",
                                         ".gz",      ".tgz",     ".bz2",    ".xz",  ".zst"};
    const char *suffix = strrchr(to, '.');
    for (size_t i = 0; suffix && i < sizeof others / sizeof *others; i++)
        if (strcasecmp(suffix, others[i]) == 0)
            refuse_format_of(to, suffix);
}

/* Without --to: by the suffix of DST, else fsdp when an option needs it, else hf. */
static void choose_format(convert_options *opts, bool needs_native)
{
    fsdp_convert_opts *convert = &opts->convert;
    if (strcmp(opts->to, "-") == 0)
        cli_usage_error("DST '-' would be standard output, but a result is read back; name a file "
                        "or a directory ('./-' if that is its name)");
    if (strstr(opts->to, "://"))
        cli_usage_error("DST '%s' is an address; name a file or a directory here, and upload it",
                        opts->to);
    const fsdp_format *named = fsdp_format_to(fsdp_convert_format_of(opts->to));
    if (convert->format) {
        if (named->base && strcmp(named->base, convert->format) == 0)
            convert->format = named->name; /* NumPy's, either way */
        return;
    }
    convert->format = named->name;
    refuse_suffix(opts->to);
    if (named->suffixes[0])
        return;
    refuse_slip(opts->to);
    if (needs_native)
        convert->format = "fsdp";
}

/* === the command line ========================================================================= */

enum {
    KEY_STRICT = 0x2000,
    KEY_NAMES,
    KEY_PLAN_OUT,
    KEY_APPLY,
    KEY_DIGEST,
    KEY_WRITE_DIGESTS,
    KEY_RULES,
    KEY_IO,
    KEY_ROWS = 0x3000 /* and the number of a row of the library's table */
};

static const struct argp_option own_options[] = {
    {"strict", KEY_STRICT, NULL, 0, "every file must be there (the default)", FSDP_OPTIONS_SOURCE},
    {"names", KEY_NAMES, "HOW", 0, "hf: strip (default) \"module.\" and the like, keep, or hub",
     FSDP_OPTIONS_NAMES},
    {"plan", 'n', NULL, CLI_USUAL, "print the plan, and write nothing", FSDP_OPTIONS_SAFETY},
    {"plan-out", KEY_PLAN_OUT, "FILE", 0, "write the plan as JSON; with -n nothing else",
     FSDP_OPTIONS_SAFETY},
    {"apply", KEY_APPLY, "FILE", 0, "convert exactly as such a plan says", FSDP_OPTIONS_SAFETY},
    {"digest", KEY_DIGEST, "sha256", 0, "print the SHA-256 of every file written",
     FSDP_OPTIONS_SAFETY},
    {"write-digests", KEY_WRITE_DIGESTS, NULL, 0, "leave DST.xxh3, for fsdp-verify",
     FSDP_OPTIONS_SAFETY},
    {"rules", KEY_RULES, "FILE", 0, "more options, one per line; typed ones win",
     FSDP_OPTIONS_RUNNING},
    {"verbose", 'v', NULL, 0, "show the plan, then do it", FSDP_OPTIONS_RUNNING},
    {"io", KEY_IO, "MODE", 0, "how files are read: auto, pread or direct", FSDP_OPTIONS_RUNNING}};
enum { OWN_OPTIONS = sizeof own_options / sizeof *own_options };

static const char *const namings[] = {"strip", "keep", "hub", NULL};
static const char *const modes[] = {"auto", "pread", "direct", NULL};
static const char *const digests[] = {"sha256", NULL};

static const char *const groups[] = {
    [FSDP_OPTIONS_SOURCE] = "source",   [FSDP_OPTIONS_TAKEN] = "what is taken",
    [FSDP_OPTIONS_NAMES] = "names",     [FSDP_OPTIONS_NUMBERS] = "numbers",
    [FSDP_OPTIONS_TARGET] = "target",   [FSDP_OPTIONS_SAFETY] = "safety",
    [FSDP_OPTIONS_RUNNING] = "running", NULL};

/* --- the tables ------------------------------------------------------------------------------- */

enum { MOST_WORDS = 32, MOST_LISTED = 4 };
static struct argp_option options[CONVERT_ROWS + OWN_OPTIONS + 1];
static cli_words words[CONVERT_ROWS + 4] = {{"names", namings}, {"io", modes}, {"digest", digests}};
static const char *listed[MOST_LISTED][MOST_WORDS + 1];

/* Returns the words of a row that has them from another list, in an array of its own. */
static const char *const *list_words(const fsdp_convert_option *row)
{
    static int used;
    const char **list = listed[used < MOST_LISTED - 1 ? used++ : used];
    for (size_t i = 0; i < MOST_WORDS && row->word_at(i); i++)
        list[i] = row->word_at(i);
    return list;
}

static void fill_tables(void)
{
    struct argp_option *option = options;
    cli_words *completed = words + 3;
    const fsdp_convert_option *row;
    for (int i = 0; i < CONVERT_ROWS && (row = fsdp_convert_option_at((size_t)i)); i++) {
        if (!row->name)
            continue;
        *option++ = (struct argp_option){.name = row->name,
                                         .key = KEY_ROWS + i,
                                         .arg = row->value,
                                         .flags = row->is_usual ? CLI_USUAL : 0,
                                         .doc = row->help,
                                         .group = (int)row->group};
        if (row->word_at || row->words)
            *completed++ = (cli_words){row->name, row->word_at ? list_words(row)
                                                               : row->words + row->first_word};
    }
    memcpy(option, own_options, sizeof own_options);
}

static const char *const *words_of(const char *option)
{
    const cli_words *found = words;
    while (strcmp(found->option, option) != 0)
        found++;
    return found->words;
}

/* --- values ----------------------------------------------------------------------------------- */

/* Returns true for a mode that bypasses the page cache. */
static bool parse_mode(const char *text)
{
    if (strcmp(text, "mmap") == 0)
        cli_usage_error("--io mmap is not supported: a file that shrinks under a map kills its "
                        "reader; use auto, pread or direct");
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

/* "heads=32" */
static void check_size(const char *arg)
{
    const char *sign = strchr(arg, '=');
    if (!sign || sign == arg)
        cli_usage_error("--size '%s' is not NAME=NUMBER, such as heads=32", arg);
    (void)cli_parse_integer("--size", sign + 1, 1, INT64_MAX);
}

static void parse_names(convert_options *opts, const char *arg)
{
    const char *word = namings[cli_parse_word("--names", arg, namings)];
    opts->convert.select.keep_names = strcmp(word, "keep") == 0;
    opts->hub_names = strcmp(word, "hub") == 0;
}

/* A list has capacity for as many items as there are arguments, and one more. */
static void add_item(convert_options *opts, int row, const char *item)
{
    const fsdp_convert_option *option = fsdp_convert_option_at((size_t)row);
    char *convert = (char *)&opts->convert;
    size_t *count = (void *)(convert + option->count_offset);
    if (!opts->lists[row]) {
        opts->lists[row] = calloc((size_t)opts->argument_count + 1, sizeof *opts->lists[row]);
        *(const char *const **)(void *)(convert + option->offset) = opts->lists[row];
    }
    if (!opts->lists[row])
        cli_usage_error("cannot read the command line: out of memory");
    opts->lists[row][(*count)++] = item;
}

static const char *parse_text(const fsdp_convert_option *option, const char *flag, const char *arg)
{
    if (option->offset == offsetof(fsdp_convert_opts, format))
        return parse_format(arg);
    if ((!option->words && !option->word_at) || option->takes_others)
        return arg;
    const char *const *known = words_of(option->name);
    return known[cli_parse_word(flag, arg, known)];
}

static void take_value(convert_options *opts, int row, const char *arg)
{
    const fsdp_convert_option *option = fsdp_convert_option_at((size_t)row);
    void *member = (char *)&opts->convert + option->offset;
    char flag[40];
    snprintf(flag, sizeof flag, "--%s", option->name);
    opts->given[row] = true;
    if (option->offset == offsetof(fsdp_convert_opts, compress))
        opts->convert.level = cli_parse_compress(arg);
    if (option->offset == offsetof(fsdp_convert_opts, sizes))
        check_size(arg);
    switch (option->kind) {
    case FSDP_OPTION_TEXT:
    case FSDP_OPTION_PATH: *(const char **)member = parse_text(option, flag, arg); break;
    case FSDP_OPTION_WORD:
        *(int *)member =
            option->first_word + cli_parse_word(flag, arg, option->words + option->first_word);
        break;
    case FSDP_OPTION_INT:
        *(int *)member = (int)cli_parse_integer(flag, arg, option->least, option->most);
        break;
    case FSDP_OPTION_BYTES: *(int64_t *)member = cli_parse_size(flag, arg); break;
    case FSDP_OPTION_FLAG: *(bool *)member = true; break;
    case FSDP_OPTION_LIST: add_item(opts, row, arg); break;
    case FSDP_OPTION_MESH: opts->mesh_text = arg; break;
    }
}

/* --- checks ----------------------------------------------------------------------------------- */

bool convert_is_given(const convert_options *opts, const char *name)
{
    const fsdp_convert_option *row;
    for (size_t i = 0; (row = fsdp_convert_option_at(i)); i++)
        if (row->name && strcmp(row->name, name) == 0)
            return opts->given[i];
    return false;
}

/* Returns true for options of ranks, and of what only a native checkpoint has. */
static bool needs_native(const convert_options *opts)
{
    static const char *const names[] = {"kind",      "world-size", "mesh",
                                        "shard-dim", "compress",   "no-view"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (convert_is_given(opts, names[i]))
            return true;
    return false;
}

static bool takes_option(const fsdp_format *format, const fsdp_convert_option *row)
{
    return ((const bool *)&format->caps)[row->capability];
}

/* "hf, gguf and llmc": the formats that take the option. */
static void list_takers(const fsdp_convert_option *row, fsdp_text *out)
{
    const fsdp_format *format, *last = NULL;
    for (size_t i = 0; (format = fsdp_format_at(i)); i++) {
        if (!format->writer || !takes_option(format, row))
            continue;
        if (last)
            fsdp_text_addf(out, "%s%s", out->size > 0 ? ", " : "", last->name);
        last = format;
    }
    fsdp_text_addf(out, "%s%s", out->size > 0 ? " and " : "", last->name);
}

/* Refuses options that another format takes. */
static void check_format(const convert_options *opts)
{
    const fsdp_convert_option *row;
    for (size_t i = 0; (row = fsdp_convert_option_at(i)); i++) {
        fsdp_text takers = {0};
        bool is_taken = !row->capability || (row->or_map && opts->convert.map) ||
                        takes_option(convert_target(opts), row);
        if (!opts->given[i] || is_taken)
            continue;
        list_takers(row, &takers);
        cli_usage_error("--%s is for --to %s%s, not for %s", row->name, takers.data,
                        row->or_map ? ", and with --map" : "", opts->convert.format);
    }
}

/* "model" or "app.model": the rule that puts it before every name is the last. */
static void put_under(convert_options *opts)
{
    static const char letters[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.";
    const char *key = opts->convert.select.under;
    size_t size = key ? strlen(key) : 0;
    if (!key)
        return;
    if (size == 0 || size > UNDER_MOST || strspn(key, letters) < size || key[0] == '.' ||
        key[size - 1] == '.' || strstr(key, ".."))
        cli_usage_error("--under takes keys of dicts such as 'model' or 'app.model', not '%s'",
                        key);
    snprintf(opts->under_rule, sizeof opts->under_rule, "s/^/%s./", key);
    int row = 0;
    while (fsdp_convert_option_at((size_t)row)->offset !=
           offsetof(fsdp_convert_opts, select.renames))
        row++;
    add_item(opts, row, opts->under_rule);
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

/* An option that another one makes meaningless is a usage error, since the user expects an effect. */
static void check_contradictions(const convert_options *opts)
{
    const fsdp_convert_opts *convert = &opts->convert;
    if (convert->skip_copies && convert->copy_from)
        cli_usage_error("--no-copy and --copy-from contradict each other");
    if (convert->copy_code && !convert->copy_from)
        cli_usage_error("--copy-code needs --copy-from DIR");
    if (convert->kind == FSDP_FULL && opts->mesh_text)
        cli_usage_error("--kind full has every tensor whole: --mesh has no meaning");
    if (convert->kind != FSDP_SHARDED && convert_is_given(opts, "shard-dim"))
        cli_usage_error("--kind %s cuts no tensor dim: --shard-dim has no meaning",
                        cli_kind(convert->kind));
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
}

static void make_mesh(convert_options *opts)
{
    opts->mesh = parse_mesh(opts->mesh_text);
    int64_t ranks = fsdp_mesh_size(opts->mesh);
    if (opts->convert.world > 0 && opts->convert.world != ranks)
        cli_usage_error("--mesh %s has %" PRId64 " ranks, but --world-size says %d",
                        opts->mesh_text, ranks, opts->convert.world);
    opts->convert.mesh = opts->mesh;
}

static void check_arguments(convert_options *opts, const struct argp_state *state)
{
    enum { LEAST_MEMORY = 1 << 20 }; /* the size of one read or write */
    if (opts->common.memory > 0 && opts->common.memory < LEAST_MEMORY)
        cli_usage_error(
            "--mem of %" PRId64
            " bytes is too small: a thread reads and writes 1 MiB at a time; set at least 1M",
            opts->common.memory);
    if (opts->apply) {
        check_apply(opts, state);
    } else {
        if (state->arg_num < 2)
            cli_usage_error("SRC and DST are expected");
        take_hub_names(opts);
        choose_format(opts, needs_native(opts));
        check_format(opts);
        put_under(opts);
        check_contradictions(opts);
    }
    if (opts->verbose && opts->common.quiet)
        cli_usage_error("--quiet and --verbose contradict each other");
    if (opts->mesh_text)
        make_mesh(opts);
    opts->convert.select.include = opts->common.include;
    opts->convert.select.exclude = opts->common.exclude;
    opts->convert.threads = opts->common.jobs;
    opts->convert.memory = opts->common.memory;
    opts->convert.open.access = *cli_access();
}

/* --- the command line ------------------------------------------------------------------------- */

/* Notes an option that is part of a plan. */
static void note_planning(convert_options *opts, int key)
{
    const fsdp_convert_option *row =
        key >= KEY_ROWS ? fsdp_convert_option_at((size_t)(key - KEY_ROWS)) : NULL;
    const char *name = key == KEY_STRICT    ? "strict"
                       : key == KEY_NAMES   ? "names"
                       : row && row->member ? row->name
                                            : NULL;
    if (name)
        snprintf(opts->planning, sizeof opts->planning, "--%s", name);
}

static void take_argument(convert_options *opts, char *arg, const struct argp_state *state)
{
    if (state->arg_num > 1)
        cli_usage_error("SRC and DST are expected, '%s' is too many", arg);
    *(state->arg_num == 0 ? &opts->from : &opts->to) = arg;
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    convert_options *opts = state->input;
    note_planning(opts, key);
    switch (key) {
    case ARGP_KEY_INIT:
        for (int i = 0; i < CLI_CHILDREN; i++)
            state->child_inputs[i] = &opts->common;
        opts->argument_count = state->argc;
        break;
    case KEY_STRICT: opts->convert.open.allow_missing = NULL; break;
    case KEY_NAMES: parse_names(opts, arg); break;
    case KEY_PLAN_OUT: opts->plan_out = arg; break;
    case KEY_APPLY: opts->apply = arg; break;
    case KEY_DIGEST: opts->digest = cli_parse_word("--digest", arg, digests) == 0; break;
    case KEY_WRITE_DIGESTS: opts->write_digests = true; break;
    case KEY_RULES: break; /* cli_begin has read it */
    case KEY_IO: opts->convert.direct = parse_mode(arg); break;
    case 'n': opts->plan = true; break;
    case 'v': opts->verbose = true; break;
    case ARGP_KEY_ARG: take_argument(opts, arg, state); break;
    case ARGP_KEY_END: check_arguments(opts, state); break;
    default:
        if (key < KEY_ROWS || key >= KEY_ROWS + CONVERT_ROWS)
            return ARGP_ERR_UNKNOWN;
        take_value(opts, key - KEY_ROWS, arg);
    }
    return 0;
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
    .words = words,
    .groups = groups};

void convert_options_read(int argc, char **argv, convert_options *opts_out)
{
    opts_out->argc = argc;
    opts_out->argv = argv;
    fill_tables();
    cli_begin(&tool, argc, argv, opts_out);
}

void convert_options_release(convert_options *opts)
{
    fsdp_conversion_close(opts->conversion);
    fsdp_mesh_free(opts->mesh);
    for (int i = 0; i < CONVERT_ROWS; i++)
        free(opts->lists[i]);
}
