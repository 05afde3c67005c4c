/*
 * fsdp-ls: what is inside a checkpoint, and who holds what. Opens it, selects and sorts the entries,
 * and hands them to one of the printers (ls_summary.c, ls_entries.c, ls_json.c).
 */
#include "tools/ls/ls.h"
#include "base/text.h"

#include <fsdp/filter.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* --- options ---------------------------------------------------------------------------------- */

enum { KEY_SHARDS = 0x2000, KEY_TREE, KEY_CONFIG, KEY_STATS, KEY_HIST, KEY_DIGEST, KEY_SORT };

static const struct argp_option options[] = {
    {"long", 'l', NULL, 0, "one line per entry", 0},
    {"shards", KEY_SHARDS, NULL, 0, "files, and which rank holds which box", 0},
    {"tree", KEY_TREE, NULL, 0, "names as a tree", 0},
    {"config", KEY_CONFIG, NULL, 0, "the values that are not tensors", 0},
    {"stats", KEY_STATS, NULL, 0, "reads the data: min, max, mean, NaN, Inf of float tensors", 0},
    {"hist", KEY_HIST, NULL, 0, "reads the data: how large the numbers of float tensors are", 0},
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
    .summary = "What is inside a checkpoint, and who holds what.",
    .examples = "  fsdp-ls runs/gpt2                        newest good checkpoint of a run\n"
                "  fsdp-ls --long --sort size step-00001200 every tensor, largest first\n"
                "  fsdp-ls --shards -I 'attn' step-00001200 which rank holds which rows\n"
                "  fsdp-ls --json --digest sha256 step-00001200 > listing.json\n",
    .argp = &argp,
    .words = words};

/* The same program under its other name. */
static const cli_tool inspect_tool = {
    .name = "fsdp-inspect",
    .args = "PATH",
    .summary = "Every entry of a checkpoint, one a line: fsdp-ls --long by a shorter name.",
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

/* --- entries ---------------------------------------------------------------------------------- */

const fsdp_entry *ls_tensor(const ls_listing *listing, const fsdp_entry *entry)
{
    if (entry->kind == FSDP_ENTRY_ALIAS)
        return fsdp_sd_at(listing->sd, entry->target);
    return entry->kind == FSDP_ENTRY_TENSOR ? entry : NULL;
}

static int64_t listed_bytes(const ls_listing *listing, size_t number)
{
    const fsdp_entry *entry = fsdp_sd_at(listing->sd, number);
    return entry->kind == FSDP_ENTRY_TENSOR ? fsdp_entry_bytes(entry) : -1;
}

static int by_size(const void *left, const void *right, void *user)
{
    size_t a = *(const size_t *)left, b = *(const size_t *)right;
    int64_t bytes_a = listed_bytes(user, a), bytes_b = listed_bytes(user, b);
    if (bytes_a != bytes_b)
        return bytes_a > bytes_b ? -1 : 1;
    return a < b ? -1 : a > b;
}

/* Components of names, numbers by their value: layers.2 comes before layers.10. */
static int compare_components(const char *a, size_t size_a, const char *b, size_t size_b)
{
    bool number_a = strspn(a, "0123456789") >= size_a && size_a > 0;
    bool number_b = strspn(b, "0123456789") >= size_b && size_b > 0;
    if (number_a != number_b)
        return number_a ? -1 : 1;
    if (number_a && size_a != size_b)
        return size_a < size_b ? -1 : 1;
    int order = memcmp(a, b, size_a < size_b ? size_a : size_b);
    return order != 0 ? order : (size_a > size_b) - (size_a < size_b);
}

static size_t component_size(const char *data, size_t size)
{
    const char *dot = memchr(data, '.', size);
    return dot ? (size_t)(dot - data) : size;
}

static int by_name(const void *left, const void *right, void *user)
{
    const ls_listing *listing = user;
    const fsdp_entry *a = fsdp_sd_at(listing->sd, *(const size_t *)left);
    const fsdp_entry *b = fsdp_sd_at(listing->sd, *(const size_t *)right);
    size_t at_a = 0, at_b = 0;
    while (at_a <= a->name_size && at_b <= b->name_size) {
        size_t size_a = component_size(a->name + at_a, a->name_size - at_a);
        size_t size_b = component_size(b->name + at_b, b->name_size - at_b);
        int order = compare_components(a->name + at_a, size_a, b->name + at_b, size_b);
        if (order != 0)
            return order;
        at_a += size_a + 1;
        at_b += size_b + 1;
    }
    return (a->name_size > b->name_size) - (a->name_size < b->name_size);
}

static fsdp_status select_entries(ls_listing *listing, fsdp_error *err)
{
    const cli_common *common = &listing->options->common;
    size_t count = fsdp_sd_count(listing->sd);
    fsdp_filter *filter = NULL;
    listing->order = calloc(count + 1, sizeof *listing->order);
    if (!listing->order)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "cannot allocate memory for %zu names", count);
    FSDP_TRY(fsdp_filter_create(common->include, common->exclude, &filter, err));
    for (size_t i = 0; i < count; i++) {
        const fsdp_entry *entry = fsdp_sd_at(listing->sd, i);
        if (!fsdp_filter_selects(filter, entry->name, entry->name_size))
            continue;
        listing->order[listing->count++] = i;
        if (entry->kind == FSDP_ENTRY_TENSOR)
            listing->total += fsdp_entry_bytes(entry);
    }
    fsdp_filter_free(filter);
    if (listing->options->sort == LS_SORT_NAME)
        qsort_r(listing->order, listing->count, sizeof *listing->order, by_name, listing);
    if (listing->options->sort == LS_SORT_SIZE)
        qsort_r(listing->order, listing->count, sizeof *listing->order, by_size, listing);
    return FSDP_OK;
}

/* --- reading ---------------------------------------------------------------------------------- */

typedef struct counted_visit {
    ls_listing *listing;
    fsdp_slab_visit visit;
    void *user;
} counted_visit;

static fsdp_status count_slab(void *user, const fsdp_entry *entry, int64_t first, int64_t count,
                              const void *data, fsdp_error *err)
{
    counted_visit *counted = user;
    ls_listing *listing = counted->listing;
    char name[160];
    FSDP_TRY(counted->visit(counted->user, entry, first, count, data, err));
    listing->done += count * (int64_t)fsdp_dtype_size(entry->dtype);
    fsdp_printable(entry->name, entry->name_size, name, sizeof name);
    listing->watch.progress(listing->watch.user, listing->done, listing->total, name);
    return cli_check_stop(err);
}

fsdp_status ls_stream(ls_listing *listing, size_t number, fsdp_slab_visit visit, void *user,
                      fsdp_error *err)
{
    counted_visit counted = {listing, visit, user};
    return fsdp_checkpoint_stream(listing->checkpoint, number, listing->options->common.memory,
                                  count_slab, &counted, err);
}

/* --- the plugin ------------------------------------------------------------------------------- */

static bool holds_plugin(const char *directory)
{
    char file[2500];
    snprintf(file, sizeof file, "%s/%s", directory, FSDP_PLUGIN_FILE);
    return access(file, R_OK) == 0;
}

/* Beside the program: in the build tree, and where `cmake --install` puts both. */
void ls_plugin_path(char *out, size_t size)
{
    static const char *const places[] = {FSDP_PLUGIN_DIRS};
    char program[2048], path[2400];
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    out[0] = '\0';
    if (length <= 0)
        return;
    program[length] = '\0';
    *strrchr(program, '/') = '\0';
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        snprintf(path, sizeof path, "%s/%s", program, places[i]);
        char *clean = holds_plugin(path) ? realpath(path, NULL) : NULL;
        if (clean && strlen(clean) < size)
            memcpy(out, clean, strlen(clean) + 1);
        free(clean);
        if (out[0])
            return;
    }
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
    FSDP_TRY(
        cli_open_checkpoint(listing->options->path, &listing->watch, &listing->checkpoint, err));
    listing->info = fsdp_checkpoint_describe(listing->checkpoint);
    listing->sd = fsdp_checkpoint_sd(listing->checkpoint);
    FSDP_TRY(select_entries(listing, err));
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
