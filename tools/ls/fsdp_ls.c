/*
 * fsdp-ls: lists the entries of a checkpoint and the ranks that hold them. Opens it, selects and sorts the
 * entries (ls_listing.c), and hands them to one of the printers (ls_summary.c, ls_entries.c, ls_json.c).
 */
#include "tools/ls/ls.h"
#include "base/text.h"

#include <stdlib.h>
#include <string.h>

/* --- options ---------------------------------------------------------------------------------- */

enum { KEY_SHARDS = 0x2000, KEY_TREE, KEY_CONFIG, KEY_STATS, KEY_HIST, KEY_DIGEST, KEY_SORT };

static const struct argp_option options[] = {
    {"long", 'l', NULL, 0, "one line per entry", 0},
    {"shards", KEY_SHARDS, NULL, 0, "files, and the boxes that each rank holds", 0},
    {"tree", KEY_TREE, NULL, 0, "names as a tree", 0},
    {"config", KEY_CONFIG, NULL, 0, "the values that are not tensors", 0},
    {"stats", KEY_STATS, NULL, 0, "reads the data: min, max, mean, NaN, Inf of float tensors", 0},
    {"hist", KEY_HIST, NULL, 0, "reads the data: magnitudes of float tensors", 0},
    {"digest", KEY_DIGEST, "sha256", 0, "reads the data: digests of whole tensors", 0},
    {"sort", KEY_SORT, "KEY", 0, "order (as saved), name or size", 0},
    {0}};

static const char *const sort_keys[] = {
    [LS_SORT_ORDER] = "order", [LS_SORT_NAME] = "name", [LS_SORT_SIZE] = "size", NULL};
static const char *const digests[] = {"sha256", NULL};
static const cli_words words[] = {{"sort", sort_keys}, {"digest", digests}, {0}};

static void set_mode(ls_options *opts, ls_mode mode)
{
    if (opts->mode != LS_SUMMARY && opts->mode != mode)
        cli_usage_error("only one of --long, --shards, --tree, --config, --stats can be shown");
    opts->mode = mode;
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    ls_options *opts = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        for (int i = 0; i < CLI_CHILDREN; i++)
            state->child_inputs[i] = &opts->common;
        return 0;
    case 'l': set_mode(opts, LS_LONG); return 0;
    case KEY_SHARDS: set_mode(opts, LS_SHARDS); return 0;
    case KEY_TREE: set_mode(opts, LS_TREE); return 0;
    case KEY_CONFIG: set_mode(opts, LS_CONFIG); return 0;
    case KEY_STATS: set_mode(opts, LS_STATS); return 0;
    case KEY_HIST: set_mode(opts, LS_HIST); return 0;
    case KEY_SORT:
        opts->sort = (ls_sort)cli_parse_word("--sort", arg, sort_keys);
        opts->sort_given = true;
        return 0;
    case KEY_DIGEST:
        if (strcmp(arg, "sha256") != 0)
            cli_usage_error("--digest '%s' is not known; there is sha256", arg);
        opts->digest = true;
        return 0;
    case ARGP_KEY_ARG:
        if (opts->path)
            cli_usage_error("one PATH is expected, '%s' is too many", arg);
        opts->path = arg;
        return 0;
    case ARGP_KEY_END:
        if (!opts->path)
            cli_usage_error("PATH is missing");
        if (opts->mode == LS_SUMMARY)
            opts->mode = opts->usual;
        if (opts->mode == LS_TREE && !opts->sort_given)
            opts->sort = LS_SORT_NAME; /* so that every branch is printed once */
        return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp argp = {.options = options, .parser = parse, .children = cli_children};

static const cli_tool tool = {
    .name = "fsdp-ls",
    .args = "PATH",
    .summary = "Lists the contents of a checkpoint, and the ranks that hold them.",
    .examples = "  fsdp-ls runs/gpt2                        newest good checkpoint of a run\n"
                "  fsdp-ls --long --sort size step-00001200 every tensor, largest first\n"
                "  fsdp-ls --shards -I 'attn' step-00001200 which rank holds which rows\n"
                "  fsdp-ls --json --digest sha256 step-00001200 > listing.json\n",
    .argp = &argp,
    .words = words};

/* fsdp-inspect is this program under another name. */
static const cli_tool inspect_tool = {
    .name = "fsdp-inspect",
    .args = "PATH",
    .summary = "Lists the entries of a checkpoint, one per line: short for fsdp-ls --long.",
    .examples = "  fsdp-inspect step-00001200               names, dtypes, shapes, layouts\n"
                "  fsdp-inspect runs/gpt2 -I 'attn'         of the newest good one of a run\n"
                "  fsdp-inspect --shards step-00001200      all that fsdp-ls can show\n",
    .argp = &argp,
    .words = words};

static bool is_inspect(const char *program)
{
    const char *slash = strrchr(program, '/');
    return strcmp(slash ? slash + 1 : program, inspect_tool.name) == 0;
}

/* --- the whole -------------------------------------------------------------------------------- */

static fsdp_status print_entries(ls_listing *listing, fsdp_text *text, fsdp_error *err)
{
    const ls_options *opts = listing->options;
    if (opts->common.json)
        return ls_print_json(listing, text, err);
    if (opts->digest)
        return ls_print_digests(listing, text, err);
    switch (opts->mode) {
    case LS_SUMMARY: return ls_print_summary(listing, text);
    case LS_LONG: return ls_print_long(listing, text);
    case LS_SHARDS: return ls_print_shards(listing, text);
    case LS_TREE: return ls_print_tree(listing, text);
    case LS_CONFIG: return ls_print_config(listing, text);
    case LS_STATS:
    case LS_HIST: return ls_print_stats(listing, text, err);
    }
    return FSDP_OK;
}

static fsdp_status list(ls_listing *listing, fsdp_error *err)
{
    fsdp_text text = {0};
    listing->watch = cli_watch(&listing->options->common);
    FSDP_TRY(cli_open_checkpoint(listing->options->path, &(fsdp_open_opts){.whole = true},
                                 &listing->watch, &listing->checkpoint, err));
    listing->info = fsdp_checkpoint_describe(listing->checkpoint);
    listing->sd = fsdp_checkpoint_sd(listing->checkpoint);
    FSDP_TRY(ls_select(listing, err));
    if (listing->count == 0 && fsdp_sd_count(listing->sd) > 0)
        return fsdp_fail(err, FSDP_DIFFERS, "no name in '%s' matches", listing->info->path);
    if (listing->options->digest)
        FSDP_TRY(fsdp_checkpoint_check(listing->checkpoint, listing->options->common.jobs, err));
    fsdp_status st = print_entries(listing, &text, err);
    if (st != FSDP_OK)
        cli_drop(&text);
    fsdp_status put = cli_put_all(&text);
    return st != FSDP_OK ? st : put;
}

int main(int argc, char **argv)
{
    ls_options opts = {0};
    ls_listing listing = {.options = &opts};
    fsdp_error err = {0};
    bool inspect = argc > 0 && is_inspect(argv[0]);
    opts.usual = inspect ? LS_LONG : LS_SUMMARY;
    cli_begin(inspect ? &inspect_tool : &tool, argc, argv, &opts);
    fsdp_status st = list(&listing, &err);
    fsdp_checkpoint_close(listing.checkpoint);
    free(listing.order);
    return cli_end(st, &err);
}
