/*
 * fsdp-ls: lists the entries of a checkpoint and the ranks that hold them. Opens it, selects and sorts the
 * entries (ls_listing.c), and hands them to one of the printers (ls_summary.c, ls_entries.c, ls_json.c).
 */
#include "tools/ls/ls.h"
#include "base/text.h"
#include <fsdp/filter.h>
#include <fsdp/stats.h>

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* === stats ==================================================================================== */

/* fsdp-ls --stats, --hist: reads every floating tensor and prints statistics of its numbers. */

static fsdp_status add_slab(void *context, const fsdp_entry *entry, int64_t first, int64_t count,
                            const void *data, fsdp_error *err)
{
    (void)first;
    (void)err;
    fsdp_stats_add(context, entry->dtype, data, count);
    return FSDP_OK;
}

static void add_line(fsdp_text *text, const fsdp_entry *entry, const fsdp_stats *stats)
{
    char name[64];
    fsdp_printable(entry->name, entry->name_size, name, sizeof name);
    fsdp_text_addf(text, "%-48s  %-8s", name, fsdp_dtype_name(entry->dtype));
    if (stats->finite > 0)
        fsdp_text_addf(text, "  min %-12.6g max %-12.6g mean %-12.6g zeros %" PRId64, stats->min,
                       stats->max, stats->sum / (double)stats->finite, stats->zeros);
    if (stats->nans > 0)
        fsdp_text_addf(text, "  NaN %" PRId64, stats->nans);
    if (stats->infinities > 0)
        fsdp_text_addf(text, "  Inf %" PRId64, stats->infinities);
    cli_end_line(text);
}

/* One character per bin, as high as the logarithm of its count; counts of zeros, NaN and Inf follow. */
static void add_histogram(fsdp_text *text, const fsdp_entry *entry, const fsdp_stats *stats)
{
    static const char *const bars[] = {" ",      "\u2581", "\u2582", "\u2583", "\u2584",
                                       "\u2585", "\u2586", "\u2587", "\u2588"};
    char name[64];
    int64_t most = 1;
    fsdp_printable(entry->name, entry->name_size, name, sizeof name);
    for (int i = 0; i < FSDP_STATS_BINS; i++)
        most = stats->magnitudes[i] > most ? stats->magnitudes[i] : most;
    fsdp_text_addf(text, "%-48s  %-8s  |", name, fsdp_dtype_name(entry->dtype));
    for (int i = 0; i < FSDP_STATS_BINS; i++) {
        double part = log1p((double)stats->magnitudes[i]) / log1p((double)most);
        fsdp_text_addf(text, "%s", bars[(int)ceil(8 * part)]);
    }
    fsdp_text_addf(text, "|  zeros %" PRId64, stats->zeros);
    if (stats->nans > 0)
        fsdp_text_addf(text, "  NaN %" PRId64, stats->nans);
    if (stats->infinities > 0)
        fsdp_text_addf(text, "  Inf %" PRId64, stats->infinities);
    fsdp_text_add(text, "\n", 1);
}

static fsdp_status ls_print_stats(ls_listing *listing, fsdp_text *text, fsdp_error *err)
{
    if (listing->options->mode == LS_HIST)
        fsdp_text_addf(text, "%-58s  |2^%d .. 2^%d, 2^%d a column, heights logarithmic|\n", "",
                       FSDP_STATS_LOWEST, FSDP_STATS_LOWEST + FSDP_STATS_BINS * FSDP_STATS_STEP,
                       FSDP_STATS_STEP);
    for (size_t i = 0; i < listing->count; i++) {
        const fsdp_entry *entry = fsdp_sd_at(listing->sd, listing->order[i]);
        fsdp_stats stats = {0};
        if (entry->kind != FSDP_ENTRY_TENSOR || !fsdp_dtype_describe(entry->dtype)->is_float)
            continue;
        FSDP_TRY(ls_stream(listing, listing->order[i], add_slab, &stats, err));
        if (listing->options->mode == LS_HIST)
            add_histogram(text, entry, &stats);
        else
            add_line(text, entry, &stats);
        FSDP_TRY(cli_put(text));
    }
    return FSDP_OK;
}

/* === the tool ================================================================================= */

/* --- options ---------------------------------------------------------------------------------- */

enum {
    KEY_SHARDS = 0x2000,
    KEY_TREE,
    KEY_CONFIG,
    KEY_STATS,
    KEY_HIST,
    KEY_DIGEST,
    KEY_SORT,
    KEY_MAP,
    KEY_SIZE,
    KEY_VARIANT
};

static const struct argp_option options[] = {
    {"long", 'l', NULL, 0, "one line per entry", 0},
    {"shards", KEY_SHARDS, NULL, 0, "files, and the boxes that each rank holds", 0},
    {"tree", KEY_TREE, NULL, 0, "names as a tree", 0},
    {"config", KEY_CONFIG, NULL, 0, "the values that are not tensors", 0},
    {"stats", KEY_STATS, NULL, 0, "reads the data: min, max, mean, NaN, Inf of float tensors", 0},
    {"hist", KEY_HIST, NULL, 0, "reads the data: magnitudes of float tensors", 0},
    {"digest", KEY_DIGEST, "sha256", 0, "reads the data: digests of whole tensors", 0},
    {"sort", KEY_SORT, "KEY", 0, "order (as saved), name or size", 0},
    {"map", KEY_MAP, "MAP", 0, "under the names of another framework, as fsdp-convert has it", 0},
    {"size", KEY_SIZE, "NAME=N", 0, "a size that the map needs, such as heads=32", 0},
    {"variant", KEY_VARIANT, "NAME", 0, "of PATH the files model.NAME.safetensors", 0},
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
        opts->paths = calloc((size_t)state->argc + 1, sizeof *opts->paths);
        opts->map.sizes = opts->sizes = calloc((size_t)state->argc + 1, sizeof *opts->sizes);
        return opts->paths && opts->sizes ? 0 : ENOMEM;
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
    case KEY_MAP: opts->map.map = arg; return 0;
    case KEY_VARIANT: opts->variant = arg; return 0;
    case KEY_SIZE: opts->sizes[opts->map.size_count++] = arg; return 0;
    case KEY_DIGEST:
        if (strcmp(arg, "sha256") != 0)
            cli_usage_error("--digest '%s' is unknown; use sha256", arg);
        opts->digest = true;
        return 0;
    case ARGP_KEY_ARG: opts->paths[opts->path_count++] = arg; return 0;
    case ARGP_KEY_END:
        if (opts->path_count == 0)
            cli_usage_error("PATH is missing");
        if (opts->map.size_count > 0 && !opts->map.map)
            cli_usage_error("--size is a size of a map: --map names it");
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
    .args = "PATH...",
    .summary = "Lists the contents of checkpoints, and the ranks that hold them.",
    .examples = "  fsdp-ls runs/gpt2                        newest good checkpoint of a run\n"
                "  fsdp-ls --long --sort size step-00001200 every tensor, largest first\n"
                "  fsdp-ls --shards -I 'attn' step-00001200 which rank holds which rows\n"
                "  fsdp-ls --json --digest sha256 step-00001200 > listing.json\n",
    .argp = &argp,
    .words = words};

/* fsdp-inspect is this program under another name. */
static const cli_tool inspect_tool = {
    .name = "fsdp-inspect",
    .args = "PATH...",
    .summary = "Lists the entries of checkpoints, one per line: short for fsdp-ls --long.",
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

/* Lists one path; heading has what stands above, or is empty. */
static fsdp_status list_path(ls_listing *listing, const char *path, const fsdp_text *heading,
                             fsdp_text *text, fsdp_error *err)
{
    const ls_options *opts = listing->options;
    listing->watch = cli_watch(&opts->common);
    const fsdp_open_opts open = {
        .variant = opts->variant, .whole = true, .as_stored = true, .memory = opts->common.memory};
    FSDP_TRY(cli_open_checkpoint(path, &open, &listing->watch, &listing->checkpoint, err));
    if (opts->map.map)
        FSDP_TRY(fsdp_checkpoint_map(&listing->checkpoint, &opts->map, err));
    listing->info = fsdp_checkpoint_describe(listing->checkpoint);
    listing->sd = fsdp_checkpoint_sd(listing->checkpoint);
    FSDP_TRY(ls_select(listing, err));
    if (listing->count == 0 && fsdp_sd_count(listing->sd) > 0)
        return fsdp_fail(err, FSDP_DIFFERS, "no name in '%s' matches", listing->info->path);
    if (opts->digest)
        FSDP_TRY(
            fsdp_checkpoint_check(listing->checkpoint, opts->common.jobs, &listing->watch, err));
    if (heading->size > 0)
        fsdp_text_add(text, heading->data, heading->size);
    return print_entries(listing, text, err);
}

/* Text of JSON is dropped after a failure, text for people is printed as far as it came. */
static fsdp_status list(const ls_options *opts, const char *path, const fsdp_text *heading,
                        fsdp_text *text, fsdp_error *err)
{
    ls_listing listing = {.options = opts};
    fsdp_status st = list_path(&listing, path, heading, text, err);
    if (st != FSDP_OK)
        cli_drop(text);
    fsdp_checkpoint_close(listing.checkpoint);
    free(listing.order);
    return st;
}

static fsdp_status list_only(const ls_options *opts, fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_status st = list(opts, opts->paths[0], &(fsdp_text){0}, &text, err);
    fsdp_status put = cli_put_all(&text);
    return st != FSDP_OK ? st : put;
}

/* Prints an element of "paths": the object of one path alone, or its error. */
static void add_element(fsdp_text *all, const char *path, fsdp_text *text, fsdp_status status,
                        const fsdp_error *err)
{
    fsdp_text_addf(all, all->data[all->size - 1] == '[' ? "\n" : ",\n");
    if (status == FSDP_OK) {
        fsdp_text_add(all, text->data, text->size - 1); /* without its end of line */
        return;
    }
    fsdp_text_addf(all, "{\"path\": ");
    fsdp_text_add_json_shown(all, path, strlen(path));
    fsdp_text_addf(all, ", ");
    cli_add_json_error(all, status, err);
    fsdp_text_addf(all, "}");
}

/* A path that fails does not hide the others: the worst outcome is the program's. */
static fsdp_status list_all(const ls_options *opts)
{
    fsdp_status worst = FSDP_OK, put = FSDP_OK;
    fsdp_text all = {0};
    bool is_json = opts->common.json, is_first = true;
    fsdp_text_addf(&all, "{\"schema\": 1, \"paths\": [");
    for (int i = 0; i < opts->path_count && put == FSDP_OK && !cli_stopped(); i++) {
        fsdp_text heading = {0}, text = {0};
        fsdp_error err = {0};
        if (!is_json) {
            /* "PATH:" above the listing, after an empty line below the one before it. */
            fsdp_text_addf(&heading, is_first ? "" : "\n");
            cli_add_message(&heading, opts->paths[i]);
            fsdp_text_addf(&heading, ":\n");
        }
        fsdp_status st = list(opts, opts->paths[i], &heading, &text, &err);
        is_first = is_first && text.size == 0;
        cli_progress_clear();
        if (is_json && !all.failed && !text.failed)
            add_element(&all, opts->paths[i], &text, st, &err);
        else if (!is_json)
            put = cli_put_all(&text);
        if (st != FSDP_ERR_CANCELLED)
            cli_report(&err);
        all.failed = all.failed || text.failed || heading.failed;
        worst = st > worst ? st : worst;
        fsdp_text_release(&text);
        fsdp_text_release(&heading);
    }
    fsdp_text_addf(&all, "\n]}\n");
    if (is_json)
        put = cli_put_end(&all);
    fsdp_text_release(&all);
    return worst == FSDP_OK ? put : worst;
}

int main(int argc, char **argv)
{
    ls_options opts = {0};
    fsdp_error err = {0};
    bool inspect = argc > 0 && is_inspect(argv[0]);
    opts.usual = inspect ? LS_LONG : LS_SUMMARY;
    cli_begin(inspect ? &inspect_tool : &tool, argc, argv, &opts);
    bool is_one = opts.path_count == 1;
    fsdp_status st = is_one ? list_only(&opts, &err) : list_all(&opts);
    free(opts.paths);
    free(opts.sizes);
    return cli_end(st, is_one ? &err : NULL);
}
