/* fsdp-diff: are two checkpoints the same state, and where not? Largest differences first. */
#include "tools/ls/ls.h"
#include "base/text.h"
#include "base/values_shape.h"

#include <fsdp/convert.h>
#include <fsdp/diff.h>

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { TOP_DEFAULT = 20, VALUE_SHOWN = 80, VALUE_BEFORE = 16, MAPS_MOST = 2 };

typedef enum color_mode { COLOR_AUTO, COLOR_ALWAYS, COLOR_NEVER } color_mode;

typedef struct diff_options {
    cli_common common;
    double atol, rtol;
    int64_t ulp;
    bool keys_only;
    int64_t top;                      /* 0: all */
    const char *map_paths[MAPS_MOST]; /* as typed: rules of names, or a map of a framework */
    const char *map;                  /* of a framework */
    const char **sizes, *variant;
    const char *plot_path;
    color_mode color;
    char *map_text;     /* of the file; rules point into it */
    const char **typed; /* rules of --rename, which come last */
    const char **rules;
    size_t map_count, size_count, typed_count, rule_count;
    const char *paths[2];
} diff_options;

/* The differences; entries are borrowed from the opened checkpoints. */
typedef struct diff_list {
    fsdp_diff_item *items;
    size_t count, capacity;
    bool failed;
} diff_list;

/* --- options ---------------------------------------------------------------------------------- */

enum {
    KEY_ATOL = 0x2000,
    KEY_RTOL,
    KEY_ULP,
    KEY_KEYS,
    KEY_TOP,
    KEY_MAP,
    KEY_RENAME,
    KEY_SIZE,
    KEY_COLOR,
    KEY_PLOT,
    KEY_VARIANT
};

static const struct argp_option options[] = {
    {"atol", KEY_ATOL, "X", 0, "equal when |a - b| <= X ...", 0},
    {"rtol", KEY_RTOL, "X", 0, "... + X * |b|", 0},
    {"ulp", KEY_ULP, "N", 0, "equal when at most N steps of their dtype apart", 0},
    {"keys-only", KEY_KEYS, NULL, 0, "compare names, dtypes and shapes; read no data", 0},
    {"top", KEY_TOP, "N", 0, "show the N largest differences (default 20; 0: all)", 0},
    {"map", KEY_MAP, "MAP", 0,
     "give A the names of B: a map as in fsdp-convert, or a file of s/REGEX/NEW/", 0},
    {"rename", KEY_RENAME, "s/RE/NEW/", 0, "rename before the comparison, in order", 0},
    {"size", KEY_SIZE, "NAME=N", 0, "give a size that the map needs, such as heads=32", 0},
    {"variant", KEY_VARIANT, "NAME", 0, "read files model.NAME.safetensors, of A or B or both", 0},
    {"color", KEY_COLOR, "WHEN", 0, "auto (default), always or never", 0},
    {"plot", KEY_PLOT, "FILE", 0, "write the largest differences as a picture (SVG)", 0},
    {0}};

static const char *const colors[] = {
    [COLOR_AUTO] = "auto", [COLOR_ALWAYS] = "always", [COLOR_NEVER] = "never", NULL};
static const cli_words words[] = {{"color", colors}, {0}};

static error_t parse(int key, char *arg, struct argp_state *state)
{
    diff_options *opts = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        for (int i = 0; i < CLI_CHILDREN; i++)
            state->child_inputs[i] = &opts->common;
        opts->sizes = calloc((size_t)state->argc + 1, sizeof *opts->sizes);
        opts->typed = calloc((size_t)state->argc + 1, sizeof *opts->typed);
        return opts->sizes && opts->typed ? 0 : ENOMEM;
    case KEY_ATOL: opts->atol = cli_parse_real("--atol", arg); return 0;
    case KEY_RTOL: opts->rtol = cli_parse_real("--rtol", arg); return 0;
    case KEY_ULP: opts->ulp = cli_parse_integer("--ulp", arg, 0, INT32_MAX); return 0;
    case KEY_KEYS: opts->keys_only = true; return 0;
    case KEY_TOP: opts->top = cli_parse_integer("--top", arg, 0, INT32_MAX); return 0;
    case KEY_MAP:
        if (opts->map_count == MAPS_MOST)
            cli_usage_error("--map is given at most twice: a map of a framework, and rules");
        opts->map_paths[opts->map_count++] = arg;
        return 0;
    case KEY_VARIANT: opts->variant = arg; return 0;
    case KEY_RENAME: opts->typed[opts->typed_count++] = arg; return 0;
    case KEY_SIZE: opts->sizes[opts->size_count++] = arg; return 0;
    case KEY_COLOR: opts->color = (color_mode)cli_parse_word("--color", arg, colors); return 0;
    case KEY_PLOT: opts->plot_path = arg; return 0;
    case ARGP_KEY_ARG:
        if (state->arg_num > 1)
            cli_usage_error("two checkpoints are expected, '%s' is too many", arg);
        opts->paths[state->arg_num] = arg;
        return 0;
    case ARGP_KEY_END:
        if (state->arg_num < 2)
            cli_usage_error("two checkpoints are expected, A and B");
        if (opts->size_count > 0 && opts->map_count == 0)
            cli_usage_error("--size gives a number to a map; add --map");
        return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp argp = {.options = options, .parser = parse, .children = cli_children};

static const cli_tool tool = {
    .name = "fsdp-diff",
    .args = "A B",
    .summary = "Compares the states in two checkpoints, and shows where they differ.",
    .examples =
        "  fsdp-diff step-00001200 on-6-ranks        bit for bit, any world sizes and kinds\n"
        "  fsdp-diff a b --rtol 4e-3 --top 5         equal within the rounding of bf16\n"
        "  fsdp-diff a b --keys-only                 names, dtypes and shapes\n"
        "  fsdp-diff mcore hf --map megatron-llama   the names of another framework\n"
        "  fsdp-diff a b --json -I '^model'          for programs\n",
    .argp = &argp,
    .words = words};

/* --- collecting ------------------------------------------------------------------------------- */

static void keep_item(void *context, const fsdp_diff_item *item)
{
    diff_list *list = context;
    if (item->state == FSDP_DIFF_EQUAL || list->failed)
        return;
    if (list->count == list->capacity) {
        size_t capacity = list->capacity ? list->capacity * 2 : 64;
        void *items = reallocarray(list->items, capacity, sizeof *list->items);
        list->failed = !items;
        if (!items)
            return;
        list->items = items;
        list->capacity = capacity;
    }
    list->items[list->count++] = *item;
}

static int compare_reals(double a, double b)
{
    return (a < b) - (a > b);
}

/* Order: differences of kind, dtype, shape or value, then of data by size, then names of one side only. */
static int largest_first(const void *left, const void *right)
{
    const fsdp_diff_item *a = left, *b = right;
    if (a->state != b->state)
        return a->state < b->state ? -1 : 1;
    if (!a->why != !b->why)
        return a->why ? -1 : 1;
    if (a->max_abs != b->max_abs)
        return compare_reals(a->max_abs, b->max_abs);
    const fsdp_entry *entry_a = a->a ? a->a : a->b, *entry_b = b->a ? b->a : b->b;
    size_t size = entry_a->name_size < entry_b->name_size ? entry_a->name_size : entry_b->name_size;
    int order = memcmp(entry_a->name, entry_b->name, size);
    return order ? order : (entry_a->name_size > entry_b->name_size) * 2 - 1;
}

/* --- the map of names ------------------------------------------------------------------------- */

enum { MAP_MOST = 1 << 20, MAP_PATIENCE_MS = 10000 };

/* Reads to the end. A pipe may be slow, but not silent: its other end may never be opened. */
static fsdp_status read_all(int fd, const char *path, char *text, fsdp_error *err)
{
    size_t size = 0;
    while (size < MAP_MOST) {
        struct pollfd wait = {.fd = fd, .events = POLLIN};
        int ready = poll(&wait, 1, MAP_PATIENCE_MS);
        if (ready == 0)
            return fsdp_fail(err, FSDP_ERR_IO, "cannot read '%s': nothing arrived for %d s", path,
                             MAP_PATIENCE_MS / 1000);
        ssize_t got = ready < 0 ? -1 : read(fd, text + size, MAP_MOST - size);
        if (got == 0)
            return FSDP_OK;
        if (got < 0 && errno != EINTR && errno != EAGAIN)
            return fsdp_fail_errno(err, errno, "cannot read '%s'", path);
        size += got > 0 ? (size_t)got : 0;
    }
    return fsdp_fail(err, FSDP_ERR_LIMIT, "cannot read '%s': a map of names has at most %d bytes",
                     path, MAP_MOST);
}

static char *read_text(const char *path, fsdp_error *err)
{
    char *text = calloc(1, MAP_MOST + 1);
    int fd = text ? open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC) : -1;
    if (!text)
        fsdp_fail(err, FSDP_ERR_LIMIT, "cannot allocate memory for '%s'", path);
    else if (fd < 0)
        fsdp_fail_errno(err, errno, "cannot open '%s'", path);
    if (fd >= 0 && read_all(fd, path, text, err) == FSDP_OK) {
        close(fd);
        return text;
    }
    if (fd >= 0)
        close(fd);
    free(text);
    return NULL;
}

/* "s/REGEX/NEW/" on the first line that is not a comment; a map of a framework begins with a name or a
 * word. */
static bool has_rules(const char *text)
{
    while (*text == '\n' || *text == '#') {
        const char *end = strchr(text, '\n');
        text = end ? end + 1 : text + strlen(text);
    }
    return *text == '\0' || (text[0] == 's' && text[1] && !isalnum((unsigned char)text[1]) &&
                             !strchr("._{ \t", text[1]));
}

/* One rule a line; empty lines and lines that begin with # are skipped. Takes the text. */
static fsdp_status take_rules(diff_options *opts, char *text, const char *path, fsdp_error *err)
{
    opts->map_text = text;
    opts->rules = calloc(strlen(text) + opts->typed_count + 1, sizeof *opts->rules);
    if (!opts->rules)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "cannot allocate memory for '%s'", path);
    for (char *line; (line = strsep(&text, "\n")) != NULL;)
        if (line[0] && line[0] != '#')
            opts->rules[opts->rule_count++] = line;
    return FSDP_OK;
}

/* A path that is not there may be the name of a built-in map. */
static fsdp_status read_map(diff_options *opts, const char *path, fsdp_error *err)
{
    char *text = NULL;
    bool is_there = access(path, F_OK) == 0, is_framework = !is_there;
    if (is_there) {
        text = read_text(path, err);
        if (!text)
            return err->status;
        is_framework = !has_rules(text);
    }
    if (is_framework ? opts->map != NULL : opts->map_text != NULL) {
        free(text);
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot use --map '%s': it is the second of its kind; give at most a map "
                         "of a framework and a file of rules",
                         path);
    }
    if (!is_framework)
        return take_rules(opts, text, path, err);
    free(text);
    opts->map = path;
    return FSDP_OK;
}

static fsdp_status read_maps(diff_options *opts, fsdp_error *err)
{
    for (size_t i = 0; i < opts->map_count; i++)
        FSDP_TRY(read_map(opts, opts->map_paths[i], err));
    if (!opts->rules)
        opts->rules = calloc(opts->typed_count + 1, sizeof *opts->rules);
    if (!opts->rules)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "cannot allocate memory for rules");
    for (size_t i = 0; i < opts->typed_count; i++)
        opts->rules[opts->rule_count++] = opts->typed[i];
    return FSDP_OK;
}

/* A under the names of the framework of B, whose config.json may be the only one. */
static fsdp_status rename_a(const diff_options *opts, fsdp_checkpoint **a, const fsdp_checkpoint *b,
                            fsdp_error *err)
{
    const fsdp_map_opts map = {.map = opts->map,
                               .sizes = opts->sizes,
                               .size_count = opts->size_count,
                               .other = fsdp_checkpoint_describe(b)->path};
    return opts->map ? fsdp_checkpoint_map(a, &map, err) : FSDP_OK;
}

static bool has_blocks(const fsdp_checkpoint *checkpoint)
{
    const fsdp_sd *sd = fsdp_checkpoint_sd(checkpoint);
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (entry->kind == FSDP_ENTRY_TENSOR && fsdp_dtype_describe(entry->dtype)->values > 1)
            return true;
    }
    return false;
}

/* Blocks next to a checkpoint that has none, which was made of them, are compared as their numbers. */
static fsdp_status decode_blocks(fsdp_checkpoint **a, fsdp_checkpoint **b, fsdp_error *err)
{
    bool in_a = has_blocks(*a), in_b = has_blocks(*b);
    return in_a == in_b ? FSDP_OK : fsdp_checkpoint_map(in_a ? a : b, &(fsdp_map_opts){0}, err);
}

/* --- the picture ------------------------------------------------------------------------------ */

enum {
    PLOT_ROWS = 40,
    PLOT_ROW = 18,
    PLOT_NAMES = 420,
    PLOT_BARS = 420,
    PLOT_LEAST = -12,
    PLOT_MOST = 4
};

static void add_escaped(fsdp_text *svg, const char *text)
{
    for (; *text; text++) {
        const char *entity = *text == '<' ? "&lt;" : *text == '&' ? "&amp;" : NULL;
        fsdp_text_add(svg, entity ? entity : text, entity ? strlen(entity) : 1);
    }
}

/* A bar on a logarithmic scale from 10^PLOT_LEAST to 10^PLOT_MOST. */
static void add_bar(fsdp_text *svg, const fsdp_diff_item *item, int row)
{
    char name[60];
    double decades =
        item->max_abs > 0 && isfinite(item->max_abs) ? log10(item->max_abs) : PLOT_MOST;
    double part =
        (fmin(fmax(decades, PLOT_LEAST), PLOT_MOST) - PLOT_LEAST) / (PLOT_MOST - PLOT_LEAST);
    int y = (row + 2) * PLOT_ROW;
    fsdp_text_addf(svg, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">", PLOT_NAMES - 8, y);
    add_escaped(svg, fsdp_printable(item->a->name, item->a->name_size, name, sizeof name));
    fsdp_text_addf(svg,
                   "</text><rect x=\"%d\" y=\"%d\" width=\"%.0f\" height=\"%d\" "
                   "fill=\"#4477aa\"/><text x=\"%.0f\" y=\"%d\">%.3g</text>\n",
                   PLOT_NAMES, y - 11, part * PLOT_BARS + 1, PLOT_ROW - 5,
                   PLOT_NAMES + part * PLOT_BARS + 8, y, item->max_abs);
}

static fsdp_status write_plot(const char *path, const diff_list *list, fsdp_error *err)
{
    fsdp_text svg = {0};
    int rows = 0;
    fsdp_text_addf(&svg,
                   CLI_PICTURE
                   "diff: largest differences -->\n"
                   "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
                   "font-family=\"sans-serif\" font-size=\"12\">\n<text x=\"%d\" y=\"14\">largest "
                   "absolute difference (logarithmic, 1e%d to 1e%d)</text>\n",
                   PLOT_NAMES + PLOT_BARS + 100, (PLOT_ROWS + 3) * PLOT_ROW, PLOT_NAMES, PLOT_LEAST,
                   PLOT_MOST);
    for (size_t i = 0; i < list->count && rows < PLOT_ROWS; i++)
        if (list->items[i].state == FSDP_DIFF_DIFFERS && !list->items[i].why)
            add_bar(&svg, &list->items[i], rows++);
    fsdp_text_addf(&svg, "</svg>\n");
    fsdp_status st = cli_write_picture(path, &svg, err);
    fsdp_text_release(&svg);
    return st;
}

/* --- for people ------------------------------------------------------------------------------- */

static void add_summary(fsdp_text *text, const fsdp_diff_summary *summary,
                        fsdp_checkpoint *const sides[2])
{
    fsdp_text_addf(text,
                   "= %" PRId64 " equal   * %" PRId64 " differ   + %" PRId64
                   " only in b   - %" PRId64 " only in a   ",
                   summary->equal, summary->differ, summary->only_b, summary->only_a);
    for (int i = 0; i < 2; i++) {
        const fsdp_checkpoint_info *info = fsdp_checkpoint_describe(sides[i]);
        fsdp_text_addf(text, "%s: %s", i == 0 ? "     (a" : "; b", info->format);
        if (info->format_major > 0)
            fsdp_text_addf(text, " %s, world %d", cli_kind(info->kind), info->world);
    }
    fsdp_text_addf(text, ")\n");
}

/* A shape or a position in it; blocks count as the values that they hold. */
static void add_numbers(fsdp_text *text, const fsdp_entry *tensor, const int64_t *elements)
{
    int64_t values[FSDP_MAX_DIMS];
    fsdp_dtype_to_values(tensor->dtype, tensor->ndim, elements, values);
    cli_add_shape(text, tensor->ndim, values);
}

static void add_entry(fsdp_text *text, const fsdp_entry *entry)
{
    if (entry->kind == FSDP_ENTRY_VALUE)
        fsdp_text_addf(text, "value");
    else if (entry->kind == FSDP_ENTRY_ALIAS)
        fsdp_text_addf(text, "alias");
    else
        fsdp_text_addf(text, "%s ", fsdp_dtype_name(entry->dtype));
    if (entry->kind == FSDP_ENTRY_TENSOR)
        add_numbers(text, entry, entry->shape);
}

static void add_data(fsdp_text *text, const fsdp_diff_item *item, const fsdp_entry *tensor)
{
    fsdp_text_addf(text, "%" PRId64 " of %" PRId64 " elements, max abs %.3g at ", item->differing,
                   item->elements, item->max_abs);
    add_numbers(text, tensor, item->at);
    fsdp_text_addf(text, ": %s -> %s", item->from, item->to);
    if (item->bits > 0)
        fsdp_text_addf(text, " (%d of %zu bits differ%s)", item->bits,
                       8 * fsdp_dtype_size(tensor->dtype), item->bits == 1 ? "s" : "");
    if (isfinite(item->max_rel))
        fsdp_text_addf(text, ", max rel %.2g", item->max_rel);
}

static const fsdp_entry *tensor_of(const fsdp_checkpoint *checkpoint, const fsdp_entry *entry)
{
    const fsdp_sd *sd = fsdp_checkpoint_sd(checkpoint);
    return entry->kind == FSDP_ENTRY_ALIAS ? fsdp_sd_at(sd, entry->target) : entry;
}

static bool in_color;

static void add_mark(fsdp_text *text, char mark)
{
    int color = mark == '*' ? 33 : mark == '+' ? 32 : 31;
    if (in_color)
        fsdp_text_addf(text, "\x1b[%dm%c\x1b[0m ", color, mark);
    else
        fsdp_text_addf(text, "%c ", mark);
}

static bool is_value(const fsdp_diff_item *item)
{
    return item->why && strcmp(item->why, "value") == 0;
}

static void add_value(fsdp_text *text, const diff_options *opts, fsdp_checkpoint *side,
                      const fsdp_entry *entry)
{
    ls_options shown = {.common = opts->common};
    ls_listing listing = {.options = &shown, .checkpoint = side, .names_tuples = true};
    ls_add_value(&listing, text, &entry->value);
}

/* Adds a value that is too long without its beginning, up to a few characters before the first difference. */
static void add_cut(fsdp_text *text, const fsdp_text *value, size_t same)
{
    char shown[VALUE_SHOWN];
    size_t skipped = value->size >= sizeof shown && same > VALUE_BEFORE ? same - VALUE_BEFORE : 0;
    while (skipped > 0 && ((unsigned char)value->data[skipped] & 0xC0) == 0x80)
        skipped--; /* inside a character */
    if (skipped > 0)
        fsdp_text_addf(text, "...");
    fsdp_printable(value->data + skipped, value->size - skipped, shown, sizeof shown);
    fsdp_text_add(text, shown, strlen(shown));
}

static void add_values(fsdp_text *text, const diff_options *opts, const fsdp_diff_item *item,
                       fsdp_checkpoint *const sides[2])
{
    fsdp_text a = {0}, b = {0};
    size_t same = 0;
    add_value(&a, opts, sides[0], item->a);
    add_value(&b, opts, sides[1], item->b);
    if (a.failed || b.failed)
        text->failed = true;
    while (!text->failed && same < a.size && same < b.size && a.data[same] == b.data[same])
        same++;
    if (!text->failed) {
        fsdp_text_addf(text, "value: ");
        add_cut(text, &a, same);
        fsdp_text_addf(text, " -> ");
        add_cut(text, &b, same);
    }
    fsdp_text_release(&a);
    fsdp_text_release(&b);
}

static void add_difference(fsdp_text *text, const diff_options *opts, const fsdp_diff_item *item,
                           fsdp_checkpoint *const sides[2])
{
    add_mark(text, '*');
    cli_add_name(text, item->a->name, item->a->name_size);
    fsdp_text_addf(text, "  ");
    if (is_value(item)) {
        add_values(text, opts, item, sides);
    } else if (item->nesting[0]) {
        fsdp_text_addf(text, "%s: %s -> %s", item->why, item->nesting[0], item->nesting[1]);
    } else if (item->why) {
        fsdp_text_addf(text, "%s: ", item->why);
        add_entry(text, tensor_of(sides[0], item->a));
        fsdp_text_addf(text, " -> ");
        add_entry(text, tensor_of(sides[1], item->b));
    } else {
        const fsdp_entry *tensor = tensor_of(sides[0], item->a);
        add_numbers(text, tensor, tensor->shape);
        fsdp_text_addf(text, "  ");
        add_data(text, item, tensor);
    }
    fsdp_text_addf(text, "\n");
}

static void add_one_sided(fsdp_text *text, const fsdp_diff_item *item)
{
    const fsdp_entry *entry = item->a ? item->a : item->b;
    add_mark(text, item->a ? '-' : '+');
    cli_add_name(text, entry->name, entry->name_size);
    fsdp_text_addf(text, "  ");
    add_entry(text, entry);
    fsdp_text_addf(text, "\n");
}

static fsdp_status print_items(const diff_options *opts, const diff_list *list,
                               fsdp_checkpoint *const sides[2], fsdp_text *text)
{
    size_t shown =
        opts->top > 0 && (size_t)opts->top < list->count ? (size_t)opts->top : list->count;
    for (size_t i = 0; i < shown; i++) {
        if (list->items[i].state == FSDP_DIFF_DIFFERS)
            add_difference(text, opts, &list->items[i], sides);
        else
            add_one_sided(text, &list->items[i]);
        FSDP_TRY(cli_put(text));
    }
    if (shown < list->count)
        fsdp_text_addf(text, "... and %zu more (--top 0 shows all)\n", list->count - shown);
    return FSDP_OK;
}

/* --- for programs ----------------------------------------------------------------------------- */

static void add_real(fsdp_text *text, double value)
{
    if (isfinite(value))
        fsdp_text_add_f64(text, value);
    else
        fsdp_text_addf(text, "{\"float\": \"inf\"}");
}

static void add_data_json(fsdp_text *text, const fsdp_diff_item *item, const fsdp_entry *tensor)
{
    fsdp_text_addf(text, ", \"elements\": %" PRId64 ", \"differing\": %" PRId64 ", \"at\": ",
                   item->elements, item->differing);
    add_numbers(text, tensor, item->at);
    fsdp_text_addf(text, ", \"a\": \"%s\", \"b\": \"%s\", \"max_abs\": ", item->from, item->to);
    add_real(text, item->max_abs);
    fsdp_text_addf(text, ", \"max_rel\": ");
    add_real(text, item->max_rel);
}

static void add_values_json(fsdp_text *text, const diff_options *opts, const fsdp_diff_item *item,
                            fsdp_checkpoint *const sides[2])
{
    fsdp_text_addf(text, ", \"a\": ");
    add_value(text, opts, sides[0], item->a);
    fsdp_text_addf(text, ", \"b\": ");
    add_value(text, opts, sides[1], item->b);
}

static fsdp_status print_json(const diff_options *opts, const diff_list *list,
                              const fsdp_diff_summary *summary, fsdp_checkpoint *const sides[2],
                              fsdp_text *text)
{
    static const char *const states[] = {"equal", "differs", "only_a", "only_b"};
    fsdp_text_addf(text, "{\"schema\": 1, \"equal\": %" PRId64 ", \"differ\": %" PRId64,
                   summary->equal, summary->differ);
    fsdp_text_addf(text, ", \"only_a\": %" PRId64 ", \"only_b\": %" PRId64 ", \"items\": [",
                   summary->only_a, summary->only_b);
    for (size_t i = 0; i < list->count; i++) {
        const fsdp_diff_item *item = &list->items[i];
        const fsdp_entry *entry = item->a ? item->a : item->b;
        fsdp_text_addf(text, "%s\n {\"name\": ", i > 0 ? "," : "");
        fsdp_text_add_json_shown(text, entry->name, entry->name_size);
        fsdp_text_addf(text, ", \"state\": \"%s\"", states[item->state]);
        if (item->state == FSDP_DIFF_DIFFERS)
            fsdp_text_addf(text, ", \"why\": \"%s\"", item->why ? item->why : "data");
        if (item->state == FSDP_DIFF_DIFFERS && !item->why)
            add_data_json(text, item, tensor_of(sides[0], item->a));
        else if (is_value(item))
            add_values_json(text, opts, item, sides);
        else if (item->nesting[0])
            fsdp_text_addf(text, ", \"a\": \"%s\", \"b\": \"%s\"", item->nesting[0],
                           item->nesting[1]);
        fsdp_text_addf(text, "}");
        FSDP_TRY(cli_put(text));
    }
    fsdp_text_addf(text, "]}\n");
    return FSDP_OK;
}

/* --- the whole -------------------------------------------------------------------------------- */

static fsdp_status print_result(const diff_options *opts, diff_list *list,
                                const fsdp_diff_summary *summary, fsdp_checkpoint *const sides[2])
{
    fsdp_text text = {0};
    fsdp_status st = FSDP_OK;
    cli_progress_clear();
    if (list->count > 1)
        qsort(list->items, list->count, sizeof *list->items, largest_first);
    if (opts->common.json) {
        st = print_json(opts, list, summary, sides, &text);
    } else if (!opts->common.quiet) {
        add_summary(&text, summary, sides);
        st = print_items(opts, list, sides, &text);
    }
    fsdp_status put = cli_put_all(&text);
    return st != FSDP_OK ? st : put;
}

static fsdp_status compare(const diff_options *opts, fsdp_checkpoint *const sides[2],
                           diff_list *list, fsdp_error *err)
{
    fsdp_diff_summary summary = {0};
    fsdp_diff_opts diff = {.atol = opts->atol,
                           .rtol = opts->rtol,
                           .ulp = opts->ulp,
                           .keys_only = opts->keys_only,
                           .renames = opts->rules,
                           .rename_count = opts->rule_count,
                           .include = opts->common.include,
                           .exclude = opts->common.exclude,
                           .threads = opts->common.jobs,
                           .memory = opts->common.memory,
                           .visit = keep_item,
                           .visit_context = list,
                           .watch = cli_watch(&opts->common)};
    fsdp_status st = fsdp_checkpoint_diff(sides[0], sides[1], &diff, &summary, err);
    if (list->failed)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "cannot allocate memory for a list of differences");
    bool compared = summary.equal + summary.differ + summary.only_a + summary.only_b > 0;
    if (st != FSDP_OK && (st != FSDP_DIFFERS || !compared))
        return st;
    FSDP_TRY(print_result(opts, list, &summary, sides));
    if (opts->plot_path)
        FSDP_TRY(write_plot(opts->plot_path, list, err));
    return st;
}

/* A side without the variant is read as it is: it may be what was made of the other one. */
static fsdp_status open_sides(const diff_options *opts, fsdp_checkpoint **sides, fsdp_error *err)
{
    fsdp_watch watch = cli_watch(&opts->common);
    bool has_variant = false;
    for (int i = 0; i < 2; i++) {
        fsdp_open_opts open = {
            .variant = opts->variant, .whole = true, .memory = opts->common.memory};
        fsdp_status st = cli_open_checkpoint(opts->paths[i], &open, &watch, &sides[i], err);
        bool lacks = st == FSDP_ERR_USAGE && opts->variant && (i == 0 || has_variant);
        has_variant = has_variant || st == FSDP_OK;
        if (lacks) {
            open.variant = NULL;
            *err = (fsdp_error){0};
            st = cli_open_checkpoint(opts->paths[i], &open, &watch, &sides[i], err);
        }
        FSDP_TRY(st);
    }
    return FSDP_OK;
}

static fsdp_status diff_paths(const diff_options *opts, fsdp_error *err)
{
    fsdp_checkpoint *sides[2] = {0};
    diff_list list = {0};
    fsdp_status st = open_sides(opts, sides, err);
    if (st == FSDP_OK)
        st = rename_a(opts, &sides[0], sides[1], err);
    if (st == FSDP_OK && !opts->keys_only)
        st = decode_blocks(&sides[0], &sides[1], err);
    if (st == FSDP_OK)
        st = compare(opts, sides, &list, err);
    free(list.items);
    fsdp_checkpoint_close(sides[0]);
    fsdp_checkpoint_close(sides[1]);
    return st;
}

int main(int argc, char **argv)
{
    diff_options opts = {.top = TOP_DEFAULT};
    fsdp_error err = {0};
    cli_begin(&tool, argc, argv, &opts);
    in_color = opts.color == COLOR_ALWAYS || (opts.color == COLOR_AUTO && cli_colors_out());
    fsdp_status st = read_maps(&opts, &err);
    if (st == FSDP_OK && opts.plot_path)
        st = cli_check_output(opts.plot_path, &cli_picture, NULL, &err);
    if (st == FSDP_OK)
        st = diff_paths(&opts, &err);
    free(opts.rules);
    free(opts.typed);
    free(opts.map_text);
    free(opts.sizes);
    return cli_end(st, &err);
}
