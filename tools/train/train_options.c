/*
 * The configuration of a training, whose table of keys makes its file, its options and --print-config, and
 * the command line of fsdp-train. See train_config.h and train.h.
 */
#include "tools/train/train.h"
#include "tools/cli/cli.h"
#include "tools/train/train_config.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* === the configuration ======================================================================== */

/* --- keys ---------------------------------------------------------------------------------------- */

typedef enum key_type {
    KEY_TEXT,
    KEY_COUNT, /* an integer from 0 to INT32_MAX: products of two fit in 64 bits */
    KEY_SIZE,  /* a count that may end in K, M, G */
    KEY_REAL,  /* at least 0 */
    KEY_BOOL,
    KEY_WORD,   /* one of `words`: its number */
    KEY_FAMILY, /* a model_type that can be trained */
    KEY_BETAS,  /* two reals */
    KEY_MESH,
    KEY_RESHARD
} key_type;

typedef struct config_key {
    const char *name; /* "section.key" */
    key_type type;
    size_t offset;
    const char *initial;
    /* For KEY_WORD: "cosine|linear|constant"; for KEY_TEXT: all values that it takes; NULL: any. */
    const char *words;
    const char *help;
} config_key;

#define AT(section, member) offsetof(train_config, section.member)

static const config_key keys[] = {
    {"model.family", KEY_FAMILY, AT(model, family), "gpt2", NULL, "architecture of a new model"},
    {"model.layers", KEY_COUNT, AT(model, layers), "4", NULL, "layers"},
    {"model.heads", KEY_COUNT, AT(model, heads), "4", NULL, "heads of attention"},
    {"model.kv_heads", KEY_COUNT, AT(model, kv_heads), "0", NULL,
     "heads of keys and values; 0: as heads"},
    {"model.width", KEY_COUNT, AT(model, width), "128", NULL, "width of the residual stream"},
    {"model.inner", KEY_COUNT, AT(model, inner), "0", NULL,
     "width inside the MLP; 0: the family's"},
    {"model.context", KEY_COUNT, AT(model, context), "128", NULL, "tokens of a sequence"},
    {"model.tie", KEY_BOOL, AT(model, tie), "true", NULL, "the head is the embedding"},
    {"model.norm_eps", KEY_REAL, AT(model, norm_eps), "1e-5", NULL, "epsilon of norms"},
    {"model.rope_theta", KEY_REAL, AT(model, rope_theta), "10000", NULL,
     "base of rotary positions"},
    {"data.path", KEY_TEXT, AT(data, path), "", NULL,
     "UTF-8 file or folder, or token files (.bin)"},
    {"data.val", KEY_TEXT, AT(data, val), "", NULL,
     "data that is held out; empty: the last 5 % of path"},
    {"data.tokenizer", KEY_TEXT, AT(data, tokenizer), "bytes", NULL,
     "bytes, a tokenizer.json, or a directory with one"},
    {"data.shuffle", KEY_BOOL, AT(data, shuffle), "true", NULL, "sequences in random order"},
    {"data.seed", KEY_COUNT, AT(data, seed), "1", NULL, "seed of that order"},
    {"train.steps", KEY_COUNT, AT(train, steps), "1000", NULL, "steps of the whole training"},
    {"train.batch", KEY_COUNT, AT(train, batch), "16", NULL, "sequences of a step, of all ranks"},
    {"train.micro", KEY_COUNT, AT(train, micro), "0", NULL,
     "sequences that a rank runs at once; 0: all"},
    {"train.seed", KEY_COUNT, AT(train, seed), "1", NULL, "seed of a new model's values"},
    {"train.dtype", KEY_WORD, AT(train, dtype), "f32", "f32|mixed",
     "mixed: bf16 parameters are gathered"},
    {"train.recompute", KEY_WORD, AT(train, recompute), "none", "none|block",
     "block: activations are computed again in backward"},
    {"train.on_nan", KEY_WORD, AT(train, on_nan), "stop", "stop|skip",
     "when loss or gradients are not finite"},
    {"train.threads", KEY_COUNT, AT(train, threads), "1", NULL, "threads of a rank"},
    {"optim.lr", KEY_REAL, AT(optim, lr), "6e-4", NULL, "learning rate"},
    {"optim.betas", KEY_BETAS, AT(optim, beta1), "0.9,0.95", NULL, "of AdamW"},
    {"optim.eps", KEY_REAL, AT(optim, eps), "1e-8", NULL, "of AdamW"},
    {"optim.weight_decay", KEY_REAL, AT(optim, weight_decay), "0.1", NULL, "of AdamW"},
    {"optim.decay", KEY_WORD, AT(optim, decay), "matrices", "matrices|all",
     "parameters that decay: those of two dims, or all"},
    {"optim.clip", KEY_REAL, AT(optim, clip), "1.0", NULL, "largest norm of gradients; 0: none"},
    {"optim.schedule", KEY_WORD, AT(optim, schedule), "cosine", "cosine|linear|constant",
     "of the learning rate"},
    {"optim.warmup", KEY_COUNT, AT(optim, warmup), "0", NULL, "steps of linear warm-up"},
    {"optim.min_lr", KEY_REAL, AT(optim, min_lr), "0.1", NULL,
     "last learning rate, as a part of lr"},
    {"parallel.mesh", KEY_MESH, AT(parallel, mesh), "", NULL,
     "dp=N, or replicate=R,dp=N; empty: dp=all ranks"},
    {"parallel.reshard", KEY_RESHARD, AT(parallel, reshard), "true", NULL,
     "after forward: true, false, or to groups of K ranks"},
    {"parallel.comm", KEY_TEXT, AT(parallel, comm), "auto", "auto|self|shm|threads|mpi|tcp",
     "transport between ranks"},
    {"parallel.device", KEY_WORD, AT(parallel, device), "cpu", "cpu|cuda", "where it computes"},
    {"save.every", KEY_COUNT, AT(save, every), "100", NULL,
     "steps between checkpoints; 0: at the end"},
    {"save.async", KEY_BOOL, AT(save, async), "true", NULL,
     "training continues while files are written"},
    {"save.keep_last", KEY_COUNT, AT(save, keep_last), "3", NULL,
     "newest checkpoints that stay; 0: all"},
    {"save.keep_every", KEY_COUNT, AT(save, keep_every), "0", NULL,
     "steps divisible by this stay for good; 0: none"},
    {"save.compress", KEY_WORD, AT(save, compress), "none", "none|zstd", "of checkpoints"},
    {"save.also", KEY_WORD, AT(save, also), "none", "none|dcp|hf",
     "another format next to each checkpoint"},
    {"save.on_error", KEY_WORD, AT(save, on_error), "stop", "stop|retry|continue",
     "when a save fails"},
    {"save.mem", KEY_SIZE, AT(save, mem), "0", NULL,
     "bytes of buffers of a save; 0: the library's"},
    {"eval.every", KEY_COUNT, AT(eval, every), "0", NULL, "steps between evaluations; 0: none"},
    {"eval.batches", KEY_COUNT, AT(eval, batches), "8", NULL, "batches of an evaluation"},
    {"log.every", KEY_COUNT, AT(log, every), "1", NULL, "steps between lines on the terminal"},
    {"log.tensorboard", KEY_BOOL, AT(log, tensorboard), "true", NULL,
     "writes TensorBoard's events"},
};

enum { KEYS = sizeof keys / sizeof *keys };

/* The name of key i ("optim.lr") and its help; NULL after the last. */
static const char *key_name_at(size_t i, const char **help_out)
{
    if (i >= KEYS)
        return NULL;
    *help_out = keys[i].help;
    return keys[i].name;
}

/* --- text -> values ------------------------------------------------------------------------------ */

static bool parse_real(const char *text, double *real_out)
{
    char *end;
    *real_out = strtod(text, &end);
    return end != text && *end == '\0' && isfinite(*real_out) && *real_out >= 0;
}

static bool parse_count(const char *text, bool has_unit, int64_t *count_out)
{
    static const char units[] = "KMG";
    char *end;
    errno = 0;
    long long count = strtoll(text, &end, 10);
    const char *unit = has_unit && *end ? strchr(units, toupper((unsigned char)*end)) : NULL;
    int shift = unit ? 10 * (int)(unit - units + 1) : 0;
    long long most = has_unit ? INT64_MAX >> shift : INT32_MAX;
    if (end == text || errno || count < 0 || end[unit ? 1 : 0] || count > most)
        return false;
    *count_out = (int64_t)count << shift;
    return true;
}

static bool parse_bool(const char *text, bool *is_set_out)
{
    *is_set_out = strcmp(text, "true") == 0;
    return *is_set_out || strcmp(text, "false") == 0;
}

static bool parse_word(const char *text, const char *words, int *number_out)
{
    size_t size = strlen(text);
    *number_out = 0;
    for (const char *word = words; word; word = strchr(word, '|')) {
        word += word[0] == '|';
        if (strcspn(word, "|") == size && strncmp(word, text, size) == 0)
            return true;
        ++*number_out;
    }
    return false;
}

static bool parse_family(const char *text, char *to)
{
    fsdp_text families = {0};
    int number;
    fsdp_transformer_families("|", &families);
    bool is_known = !families.failed && parse_word(text, families.data, &number) &&
                    snprintf(to, TRAIN_FAMILY, "%s", text) < TRAIN_FAMILY;
    fsdp_text_release(&families);
    return is_known;
}

static bool parse_betas(const char *text, double betas_out[2])
{
    char first[32];
    size_t size = strcspn(text, ",");
    if (size >= sizeof first || text[size] != ',')
        return false;
    snprintf(first, sizeof first, "%.*s", (int)size, text);
    return parse_real(first, &betas_out[0]) && parse_real(text + size + 1, &betas_out[1]) &&
           betas_out[0] < 1 && betas_out[1] < 1;
}

/* "", "dp=4", "replicate=2,dp=2" */
static bool parse_mesh(const char *text, train_mesh *mesh_out)
{
    int used = 0;
    long long replicate = 0, shard = 0;
    *mesh_out = (train_mesh){0};
    if (!*text)
        return true;
    if (sscanf(text, "replicate=%lld,%n", &replicate, &used) == 1 && used > 0 && replicate > 0)
        text += used;
    else
        replicate = 0;
    used = 0;
    if (sscanf(text, "dp=%lld%n", &shard, &used) != 1 || text[used] || shard < 1)
        return false;
    *mesh_out = (train_mesh){replicate, shard};
    return true;
}

static bool parse_reshard(const char *text, int64_t *reshard_out)
{
    if (strcmp(text, "true") == 0 || strcmp(text, "false") == 0) {
        *reshard_out = text[0] == 't' ? 0 : -1;
        return true;
    }
    return parse_count(text, false, reshard_out) && *reshard_out >= 2;
}

/* A checkpoint holds the configuration as the text of a file, from which a resume reads it. */
static bool fits_in_file(const char *text)
{
    const bool has_both_quotes = strchr(text, '"') && strchr(text, '\'');
    return fsdp_utf8_valid(text, strlen(text)) && !strchr(text, '\n') && !has_both_quotes;
}

static bool parse_text(const config_key *key, const char *text, char *to)
{
    int number;
    if (key->words && !parse_word(text, key->words, &number))
        return false;
    if (!fits_in_file(text))
        return false;
    return snprintf(to, TRAIN_TEXT, "%s", text) < TRAIN_TEXT;
}

static bool parse(const config_key *key, const char *text, void *to)
{
    switch (key->type) {
    case KEY_TEXT: return parse_text(key, text, to);
    case KEY_COUNT:
    case KEY_SIZE: return parse_count(text, key->type == KEY_SIZE, to);
    case KEY_REAL: return parse_real(text, to);
    case KEY_BOOL: return parse_bool(text, to);
    case KEY_WORD: return parse_word(text, key->words, to);
    case KEY_FAMILY: return parse_family(text, to);
    case KEY_BETAS: return parse_betas(text, to);
    case KEY_MESH: return parse_mesh(text, to);
    case KEY_RESHARD: return parse_reshard(text, to);
    }
    return false;
}

/* Describes what a key takes; `families` holds the text where it is made here. */
static const char *describe(const config_key *key, fsdp_text *families)
{
    switch (key->type) {
    case KEY_TEXT:
        return key->words ? key->words
                          : "a line of UTF-8, of at most 1023 bytes and with one kind of quotes";
    case KEY_COUNT: return "a whole number from 0 to 2147483647";
    case KEY_SIZE: return "a number of bytes, such as 512M";
    case KEY_REAL: return "a number of at least 0";
    case KEY_BOOL: return "true or false";
    case KEY_WORD: return key->words;
    case KEY_FAMILY:
        fsdp_transformer_families("|", families);
        return families->failed ? "" : families->data;
    case KEY_BETAS: return "two numbers from 0 to less than 1, such as 0.9,0.95";
    case KEY_MESH: return "dp=N or replicate=R,dp=N";
    case KEY_RESHARD: return "true, false, or a number of ranks of at least 2";
    }
    return "";
}

/* --- setting by name ----------------------------------------------------------------------------- */

static int64_t find_key(const char *name)
{
    for (size_t i = 0; i < KEYS; i++)
        if (strcmp(keys[i].name, name) == 0)
            return (int64_t)i;
    return -1;
}

/* "[data] and [train]": the sections that have a key of this name; "": none. */
static void list_sections(const char *key, char *out, size_t size)
{
    size_t used = 0;
    out[0] = '\0';
    for (size_t i = 0; i < KEYS && used < size; i++) {
        const int section = (int)strcspn(keys[i].name, ".");
        if (strcmp(keys[i].name + section + 1, key) == 0)
            used += (size_t)snprintf(out + used, size - used, "%s[%.*s]", used ? " and " : "",
                                     section, keys[i].name);
    }
}

static fsdp_status fail_unknown(const char *name, const char *origin, fsdp_error *err)
{
    char shown[128], sections[128];
    const char *dot = strchr(name, '.');
    list_sections(dot ? dot + 1 : name, sections, sizeof sections);
    fsdp_printable(name, strlen(name), shown, sizeof shown);
    if (*sections)
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s: there is no key '%s'; '%s' belongs to %s",
                         origin, shown, dot ? dot + 1 : name, sections);
    size_t best = 0, size = strlen(name);
    int nearest = INT_MAX;
    for (size_t i = 0; i < KEYS; i++) {
        int distance = cli_edit_distance(name, size, keys[i].name, strlen(keys[i].name));
        if (distance < nearest) {
            nearest = distance;
            best = i;
        }
    }
    return fsdp_fail(err, FSDP_ERR_USAGE, "%s: there is no key '%s'; did you mean '%s'?", origin,
                     shown, keys[best].name);
}

/* Sets "section.key" from text. `origin` ("run.conf:12", "--optim.lr") begins the message of FSDP_ERR_USAGE,
 * which for an unknown key names the sections that have one of this name, or else the nearest one. */
static fsdp_status set_by_name(train_config *config, const char *name, const char *value,
                               const char *origin, fsdp_error *err)
{
    char shown[128];
    int64_t i = find_key(name);
    if (i < 0)
        return fail_unknown(name, origin, err);
    if (!parse(&keys[i], value, (char *)config + keys[i].offset)) {
        fsdp_text families = {0};
        fsdp_status st = fsdp_fail(err, FSDP_ERR_USAGE, "%s: %s must be %s, not '%s'", origin, name,
                                   describe(&keys[i], &families),
                                   fsdp_printable(value, strlen(value), shown, sizeof shown));
        fsdp_text_release(&families);
        return st;
    }
    config->has_steps |= strcmp(name, "train.steps") == 0;
    return FSDP_OK;
}

void train_config_init(train_config *config)
{
    memset(config, 0, sizeof *config);
    for (size_t i = 0; i < KEYS; i++)
        parse(&keys[i], keys[i].initial, (char *)config + keys[i].offset);
}

/* --- files --------------------------------------------------------------------------------------- */

/* Editors of Windows begin files in UTF-8 with it. */
#define BYTE_ORDER_MARK "\xef\xbb\xbf"

typedef struct config_file {
    train_config *config;
    const char *path;
    int line;
    char section[32];
    int lines[KEYS]; /* where each key was set; 0: nowhere */
} config_file;

static char *trim(char *text)
{
    while (isspace((unsigned char)*text))
        text++;
    size_t size = strlen(text);
    while (size > 0 && isspace((unsigned char)text[size - 1]))
        text[--size] = '\0';
    return text;
}

static fsdp_status fail_line(const config_file *file, const char *reason, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_USAGE, "%s:%d: %s", file->path, file->line, reason);
}

/* Bare text ends at a '#' after a blank; quotes keep it. */
static fsdp_status take_value(const config_file *file, char *text, char **value_out,
                              fsdp_error *err)
{
    char *end;
    *value_out = text;
    if (*text == '"' || *text == '\'') {
        end = strchr(text + 1, *text);
        if (!end)
            return fail_line(file, "a quote is not closed", err);
        *value_out = text + 1;
        *end++ = '\0';
        end = trim(end);
        return !*end || *end == '#' ? FSDP_OK
                                    : fail_line(file, "text follows the closing quote", err);
    }
    for (end = text; *end; end++)
        if (*end == '#' && (end == text || isspace((unsigned char)end[-1])))
            break;
    *end = '\0';
    *value_out = trim(text);
    return FSDP_OK;
}

static fsdp_status take_section(config_file *file, char *line, fsdp_error *err)
{
    char *end = strchr(line, ']');
    char *rest = end ? trim(end + 1) : NULL;
    if (!end || (*rest && *rest != '#') || (size_t)(end - line) > sizeof file->section)
        return fail_line(file, "a section needs a line such as [model]", err);
    *end = '\0';
    snprintf(file->section, sizeof file->section, "%s", trim(line + 1));
    for (size_t i = 0; i < KEYS; i++)
        if (strncmp(keys[i].name, file->section, strlen(file->section)) == 0 &&
            keys[i].name[strlen(file->section)] == '.')
            return FSDP_OK;
    return fail_line(
        file,
        "there is no such section; use model, data, train, optim, parallel, save, eval or log",
        err);
}

static fsdp_status take_key(config_file *file, char *line, fsdp_error *err)
{
    char name[96], origin[PATH_MAX + 16], reason[160];
    char *value, *equals = strchr(line, '=');
    if (!equals)
        return fail_line(file, "the line is neither [section] nor key = value", err);
    if (!file->section[0])
        return fail_line(file, "a key comes before the first [section]", err);
    *equals = '\0';
    snprintf(name, sizeof name, "%s.%s", file->section, trim(line));
    snprintf(origin, sizeof origin, "%s:%d", file->path, file->line);
    FSDP_TRY(take_value(file, trim(equals + 1), &value, err));
    FSDP_TRY(set_by_name(file->config, name, value, origin, err));
    int *before = &file->lines[find_key(name)];
    if (*before) {
        snprintf(reason, sizeof reason, "'%s' is already set in line %d", name, *before);
        return fail_line(file, reason, err);
    }
    *before = file->line;
    return FSDP_OK;
}

static fsdp_status take_line(config_file *file, char *line, fsdp_error *err)
{
    line = trim(line);
    if (!*line || *line == '#')
        return FSDP_OK;
    return *line == '[' ? take_section(file, line, err) : take_key(file, line, err);
}

static fsdp_status take_lines(config_file *file, FILE *stream, fsdp_error *err)
{
    char *line = NULL;
    size_t room = 0;
    ssize_t size;
    fsdp_status st = FSDP_OK;
    while (st == FSDP_OK && (size = getline(&line, &room, stream)) >= 0) {
        file->line++;
        if (file->line == 1 && strncmp(line, BYTE_ORDER_MARK, strlen(BYTE_ORDER_MARK)) == 0) {
            size -= (ssize_t)strlen(BYTE_ORDER_MARK);
            memmove(line, line + strlen(BYTE_ORDER_MARK), (size_t)size + 1);
        }
        if (strlen(line) != (size_t)size || !fsdp_utf8_valid(line, (size_t)size))
            st = fail_line(file, "the line is not UTF-8 text", err);
        else if (size > 1 << 16)
            st = fail_line(file, "the line is too long", err);
        else
            st = take_line(file, line, err);
    }
    if (st == FSDP_OK && ferror(stream))
        st = fsdp_fail_errno(err, errno, "cannot read '%s'", file->path);
    free(line);
    return st;
}

static fsdp_status read_stream(train_config *config, FILE *stream, const char *path,
                               fsdp_error *err)
{
    config_file file = {.config = config, .path = path};
    fsdp_status st = take_lines(&file, stream, err);
    fclose(stream);
    return st;
}

/* Reads a file; a key that comes twice is FSDP_ERR_USAGE with both lines. */
static fsdp_status read_config_file(train_config *config, const char *path, fsdp_error *err)
{
    FILE *stream = fopen(path, "re");
    if (!stream)
        return fsdp_fail_errno(err, errno, "cannot open '%s'", path);
    return read_stream(config, stream, path, err);
}

fsdp_status train_config_parse(train_config *config, const char *text, size_t size,
                               const char *origin, fsdp_error *err)
{
    FILE *stream = fmemopen((char *)text, size, "r"); /* only read */
    train_config_init(config);
    if (!stream)
        return fsdp_fail_errno(err, errno, "cannot read %s", origin);
    return read_stream(config, stream, origin, err);
}

/* --- values -> text ------------------------------------------------------------------------------ */

static void add_word(fsdp_text *text, const char *words, int number)
{
    for (; number > 0; number--)
        words = strchr(words, '|') + 1;
    fsdp_text_add(text, words, strcspn(words, "|"));
}

/* A text needs quotes where its end would not be seen. */
static void add_text(fsdp_text *text, const char *value)
{
    size_t size = strlen(value);
    bool is_bare = size > 0 && !strpbrk(value, "#'\"") && !isspace((unsigned char)value[0]) &&
                   !isspace((unsigned char)value[size - 1]);
    char quote = strchr(value, '"') ? '\'' : '"';
    if (is_bare)
        fsdp_text_addf(text, "%s", value);
    else
        fsdp_text_addf(text, "%c%s%c", quote, value, quote);
}

static void add_mesh(fsdp_text *text, const train_mesh *mesh)
{
    if (mesh->replicate)
        fsdp_text_addf(text, "replicate=%lld,", (long long)mesh->replicate);
    if (mesh->shard)
        fsdp_text_addf(text, "dp=%lld", (long long)mesh->shard);
    else
        fsdp_text_addf(text, "\"\"");
}

static void add_reshard(fsdp_text *text, int64_t reshard)
{
    if (reshard > 1)
        fsdp_text_addf(text, "%lld", (long long)reshard);
    else
        fsdp_text_addf(text, "%s", reshard < 0 ? "false" : "true");
}

static void add_value(fsdp_text *text, const config_key *key, const void *value)
{
    const double *reals = value;
    switch (key->type) {
    case KEY_TEXT: add_text(text, value); break;
    case KEY_FAMILY: fsdp_text_addf(text, "%s", (const char *)value); break;
    case KEY_COUNT:
    case KEY_SIZE: fsdp_text_addf(text, "%lld", (long long)*(const int64_t *)value); break;
    case KEY_REAL: fsdp_text_add_f64(text, *reals); break;
    case KEY_BOOL: fsdp_text_addf(text, "%s", *(const bool *)value ? "true" : "false"); break;
    case KEY_WORD: add_word(text, key->words, *(const int *)value); break;
    case KEY_BETAS:
        fsdp_text_add_f64(text, reals[0]);
        fsdp_text_addf(text, ",");
        fsdp_text_add_f64(text, reals[1]);
        break;
    case KEY_MESH: add_mesh(text, value); break;
    case KEY_RESHARD: add_reshard(text, *(const int64_t *)value); break;
    }
}

void train_config_print(const train_config *config, fsdp_text *text)
{
    const char *section = "";
    for (size_t i = 0; i < KEYS; i++) {
        size_t size = strcspn(keys[i].name, ".");
        if (strncmp(section, keys[i].name, size + 1) != 0)
            fsdp_text_addf(text, "%s[%.*s]\n", i ? "\n" : "", (int)size, keys[i].name);
        section = keys[i].name;
        fsdp_text_addf(text, "%s = ", keys[i].name + size + 1);
        add_value(text, &keys[i], (const char *)config + keys[i].offset);
        fsdp_text_addf(text, "\n");
    }
}

const char *train_config_find_change(const train_config *a, const train_config *b,
                                     const char *prefix)
{
    for (size_t i = 0; i < KEYS; i++) {
        fsdp_text one = {0}, other = {0};
        if (strncmp(keys[i].name, prefix, strlen(prefix)) != 0)
            continue;
        add_value(&one, &keys[i], (const char *)a + keys[i].offset);
        add_value(&other, &keys[i], (const char *)b + keys[i].offset);
        bool is_same = !one.failed && !other.failed && strcmp(one.data, other.data) == 0;
        fsdp_text_release(&one);
        fsdp_text_release(&other);
        if (!is_same)
            return keys[i].name;
    }
    return NULL;
}

typedef enum train_device { TRAIN_CPU, TRAIN_CUDA } train_device;

/* === files that it may replace ================================================================ */

/* An empty file, as mktemp makes them, holds nothing that could be lost. */
static bool is_array(const char *begin, size_t size)
{
    return size == 0 || (size >= 6 && memcmp(begin, "\x93NUMPY", 6) == 0);
}

/* The size of the header in 8 bytes, then a JSON object: no header has 4 GiB. */
static bool is_safetensors(const char *begin, size_t size)
{
    static const char high[4];
    return size == 0 || (size > 8 && memcmp(begin + 4, high, sizeof high) == 0 && begin[8] == '{');
}

static bool is_same_file(const struct stat *a, const char *path)
{
    struct stat b;
    return path && *path && stat(path, &b) == 0 && a->st_dev == b.st_dev && a->st_ino == b.st_ino;
}

/* Whether output lies in the file or directory `input`, which may be NULL or "". */
static bool is_part_of(const char *output, const char *input)
{
    struct stat info;
    char place[PATH_MAX];
    if (stat(output, &info) != 0 || !S_ISREG(info.st_mode))
        return false;
    if (is_same_file(&info, input))
        return true;
    char *slash = realpath(output, place) ? strrchr(place, '/') : NULL;
    if (!slash)
        return false;
    slash[slash == place] = '\0'; /* "/" stays */
    return stat(place, &info) == 0 && is_same_file(&info, input);
}

static fsdp_status check_output(const train_options *opts, const char *output,
                                const cli_output_kind *kind, fsdp_error *err)
{
    const char *const inputs[] = {opts->config_path,
                                  opts->tokens,
                                  opts->batches,
                                  opts->data,
                                  opts->eval,
                                  opts->sample,
                                  opts->init,
                                  opts->resume_path,
                                  opts->config.data.path,
                                  opts->config.data.val,
                                  opts->config.data.tokenizer};
    if (!output)
        return FSDP_OK;
    FSDP_TRY(cli_check_output(output, kind, NULL, err));
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
        if (is_part_of(output, inputs[i]))
            return fsdp_fail(err, FSDP_ERR_EXISTS,
                             "cannot write '%s': this command reads it ('%s')", output, inputs[i]);
    return FSDP_OK;
}

/* Outputs of the command replace files of their own kind only, and none of its inputs: FSDP_ERR_EXISTS. */
static fsdp_status check_outputs(const train_options *opts, fsdp_error *err)
{
    static const cli_output_kind array = {"an array of NumPy (.npy)", is_array};
    static const cli_output_kind tensors = {"a safetensors file", is_safetensors};
    FSDP_TRY(check_output(opts, opts->logits_out, &array, err));
    FSDP_TRY(check_output(opts, opts->out, &array, err));
    return check_output(opts, opts->dump_grads, &tensors, err);
}

/* === the command line ========================================================================= */

enum {
    KEY_RUN = 0x2000,
    KEY_INIT,
    KEY_RESUME,
    KEY_ALLOW,
    KEY_PRINT,
    KEY_BATCHES,
    KEY_STEPS,
    KEY_DUMP,
    KEY_EVAL,
    KEY_TOKENS,
    KEY_LOGITS,
    KEY_DATA,
    KEY_SAMPLE,
    KEY_PROMPT,
    KEY_TEMPERATURE,
    KEY_TOP_K,
    KEY_TOP_P,
    KEY_SEED,
    KEY_OUT,
    KEY_TOKENIZE,
    KEY_SPECIAL,
    KEY_DECODE,
    KEY_NP,
    KEY_THREADS,
    KEY_COMM,
    KEY_DEADLINE,
    KEY_DEVICE,
    KEY_TRACE,
    KEY_CHECK,
    KEY_CONFIG
};

enum { OWN_OPTIONS = 31, MOST_KEYS = 64 };

static const struct argp_option own_options[OWN_OPTIONS] = {
    {"run", KEY_RUN, "DIR", 0, "the run: checkpoints, metrics.jsonl, main.log", 0},
    {"init", KEY_INIT, "SRC", 0, "first values: a Hugging Face directory or a checkpoint", 0},
    {"resume", KEY_RESUME, "auto|no|PATH", 0,
     "auto (default): resume from the run's newest checkpoint that is whole", 0},
    {"allow-change", KEY_ALLOW, "WHAT,...", 0, "resume with other data, optim or batch", 0},
    {"print-config", KEY_PRINT, NULL, 0, "print all keys with their values and end", 0},
    {"batches", KEY_BATCHES, "F.npy", 0, "i64 [N, B, S+1]: the ids of each step", 0},
    {"steps", KEY_STEPS, "N", 0, "steps of the whole training (train.steps)", 0},
    {"dump-grads", KEY_DUMP, "F.safetensors", 0, "write the gradients of step 1, before clipping",
     0},
    {"eval", KEY_EVAL, "SRC", 0, "evaluate a checkpoint, run or Hugging Face directory", 1},
    {"sample", KEY_SAMPLE, "SRC", 0, "continue a prompt", 1},
    {"tokens", KEY_TOKENS, "F.npy", 0, "eval, sample: i64 [B, S] ids", 1},
    {"logits-out", KEY_LOGITS, "F.npy", 0, "eval: f32 [B, S, V]", 1},
    {"data", KEY_DATA, "PATH", 0, "eval: text or token files to find the loss of", 1},
    {"prompt", KEY_PROMPT, "TEXT", 0, "sample: text to continue", 1},
    {"count", 'n', "N", 0, "sample: new tokens (default 64)", 1},
    {"temperature", KEY_TEMPERATURE, "T", 0, "sample: 0 is greedy (default 0.8)", 1},
    {"top-k", KEY_TOP_K, "K", 0, "sample: of the K likeliest only (default 40; 0: all)", 1},
    {"top-p", KEY_TOP_P, "P", 0, "sample: of the likeliest that make up P (default 1)", 1},
    {"seed", KEY_SEED, "N", 0, "sample: seed of the draws (default 1)", 1},
    {"out", KEY_OUT, "F.npy", 0, "sample: write the new ids, i64 [B, N]", 1},
    {"tokenize", KEY_TOKENIZE, "TOKENIZER", 0,
     "one JSON string per line in, its ids out: bytes, tokenizer.json or a directory", 2},
    {"special", KEY_SPECIAL, NULL, 0, "tokenize: with the tokens that begin and end a text", 2},
    {"decode", KEY_DECODE, NULL, 0, "tokenize: ids in, text out", 2},
    {"np", KEY_NP, "N", 0, "ranks are N processes", 3},
    {"threads", KEY_THREADS, "N", 0, "ranks are N threads", 3},
    {"comm", KEY_COMM, "NAME", 0, "auto (default), self, threads, shm, mpi, tcp or nccl", 3},
    {"device", KEY_DEVICE, "NAME", 0, "cpu, cpu-async, cuda or cuda:N", 3},
    {"deadline", KEY_DEADLINE, "SECONDS", 0, "longest wait for another rank (default 30)", 3},
    {"trace", KEY_TRACE, "FILE", 0, "an event per line; %r is the rank", 3},
    {"check", KEY_CHECK, NULL, 0, "check buffers and calls of all ranks (slower)", 3},
};

/* Own options, then one per key: made when first asked for, since their names are the keys'. */
static struct argp_option options[OWN_OPTIONS + MOST_KEYS];

static void make_options(void)
{
    const char *name, *help;
    size_t own = 0;
    for (; own_options[own].key; own++)
        options[own] = own_options[own];
    for (size_t i = 0;
         own + i + 1 < sizeof options / sizeof *options && (name = key_name_at(i, &help)); i++)
        options[own + i] = (struct argp_option){name, KEY_CONFIG + (int)i, "VALUE", 0, help, 4};
}

/* --- parsing ------------------------------------------------------------------------------------- */

static void parse_resume(train_options *opts, const char *arg)
{
    opts->resume = strcmp(arg, "auto") == 0 ? TRAIN_RESUME_AUTO
                   : strcmp(arg, "no") == 0 ? TRAIN_RESUME_NO
                                            : TRAIN_RESUME_PATH;
    opts->resume_path = arg;
}

static void parse_changes(train_options *opts, const char *arg)
{
    static const char *const words[] = {"data", "optim", "batch"};
    while (*arg) {
        size_t size = strcspn(arg, ","), i = 0;
        while (i < 3 && (strlen(words[i]) != size || strncmp(words[i], arg, size) != 0))
            i++;
        if (i == 3)
            cli_usage_error("--allow-change takes data, optim, batch, not '%.*s'", (int)size, arg);
        opts->allowed_changes |= 1u << i;
        arg += size + (arg[size] == ',');
    }
}

static void set_key(train_options *opts, const char *name, const char *value)
{
    opts->settings[opts->setting_count++] = (train_setting){name, value};
}

static bool parse_training(train_options *opts, int key, char *arg)
{
    switch (key) {
    case KEY_RUN: opts->run = arg; return true;
    case KEY_INIT: opts->init = arg; return true;
    case KEY_RESUME: parse_resume(opts, arg); return true;
    case KEY_ALLOW: parse_changes(opts, arg); return true;
    case KEY_PRINT: opts->print_config = true; return true;
    case KEY_BATCHES: opts->batches = arg; return true;
    case KEY_STEPS: set_key(opts, "train.steps", arg); return true;
    case KEY_DUMP: opts->dump_grads = arg; return true;
    case KEY_DEADLINE: opts->deadline = arg; return true;
    default: return false;
    }
}

static bool parse_use(train_options *opts, int key, char *arg)
{
    switch (key) {
    case KEY_EVAL: opts->eval = arg; return true;
    case KEY_SAMPLE: opts->sample = arg; return true;
    case KEY_TOKENS: opts->tokens = arg; return true;
    case KEY_LOGITS: opts->logits_out = arg; return true;
    case KEY_DATA: opts->data = arg; return true;
    case KEY_PROMPT: opts->prompt = arg; return true;
    case 'n': opts->count = cli_parse_integer("-n", arg, 0, 1 << 24); return true;
    case KEY_TEMPERATURE: opts->temperature = cli_parse_real("--temperature", arg); return true;
    case KEY_TOP_K: opts->top_k = cli_parse_integer("--top-k", arg, 0, INT64_MAX); return true;
    case KEY_TOP_P: opts->top_p = cli_parse_real("--top-p", arg); return true;
    case KEY_SEED: opts->seed = cli_parse_integer("--seed", arg, 0, INT64_MAX); return true;
    case KEY_OUT: opts->out = arg; return true;
    case KEY_TOKENIZE: opts->tokenize = arg; return true;
    case KEY_SPECIAL: opts->special = true; return true;
    case KEY_DECODE: opts->decode = true; return true;
    default: return false;
    }
}

static bool is_launch_key(int key)
{
    return key >= KEY_NP && key <= KEY_CHECK;
}

/* --- options of other work ----------------------------------------------------------------------- */

enum { TRAINING = 1, EVAL = 2, SAMPLE = 4, TOKENIZE = 8, ALL = 15 };

static unsigned work_of_own(int key)
{
    switch (key) {
    case KEY_RUN:
    case KEY_INIT:
    case KEY_RESUME:
    case KEY_ALLOW:
    case KEY_PRINT:
    case KEY_BATCHES:
    case KEY_STEPS:
    case KEY_DUMP: return TRAINING;
    case KEY_TOKENS: return EVAL | SAMPLE;
    case KEY_LOGITS:
    case KEY_DATA: return EVAL;
    case KEY_PROMPT:
    case 'n':
    case KEY_TEMPERATURE:
    case KEY_TOP_K:
    case KEY_TOP_P:
    case KEY_SEED:
    case KEY_OUT: return SAMPLE;
    case KEY_SPECIAL:
    case KEY_DECODE: return TOKENIZE;
    default: return ALL;
    }
}

/* A model runs on ranks, with a tokenizer and data; an evaluation also in batches. */
static unsigned work_of_setting(const char *name)
{
    static const struct {
        const char *begin;
        unsigned work;
    } kept[] = {{"parallel.", TRAINING | EVAL | SAMPLE},
                {"data.", TRAINING | EVAL | SAMPLE},
                {"train.threads", TRAINING | EVAL | SAMPLE},
                {"train.dtype", TRAINING | EVAL | SAMPLE},
                {"train.batch", TRAINING | EVAL},
                {"train.micro", TRAINING | EVAL}};
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
        if (strncmp(name, kept[i].begin, strlen(kept[i].begin)) == 0)
            return kept[i].work;
    return TRAINING;
}

/* Options that the work of this command would not look at. */
static void refuse_others(const train_options *opts)
{
    static const char *const names[] = {"--eval", "--sample", "--tokenize"};
    const int use = opts->eval ? 0 : opts->sample ? 1 : opts->tokenize ? 2 : -1;
    for (size_t i = 0; i < opts->given_count; i++) {
        const train_given *given = &opts->given[i];
        const char *place = given->work & SAMPLE
                                ? given->work & EVAL ? "--eval or --sample" : "--sample"
                            : given->work & EVAL ? "--eval"
                                                 : "--tokenize";
        if (given->work & (use < 0 ? TRAINING : (unsigned)EVAL << use))
            continue;
        if (given->work & TRAINING)
            cli_usage_error("--%s %s %s", given->name,
                            given->work == TRAINING ? "is for training, not for"
                                                    : "cannot be combined with",
                            names[use]);
        cli_usage_error("--%s needs %s", given->name, place);
    }
}

bool train_option_is_given(const train_options *opts, const char *name)
{
    for (size_t i = 0; i < opts->given_count; i++)
        if (strcmp(opts->given[i].name, name) == 0)
            return true;
    return false;
}

static void check(const train_options *opts)
{
    int uses = !!opts->eval + !!opts->sample + !!opts->tokenize;
    if (uses > 1)
        cli_usage_error("--eval, --sample and --tokenize cannot be combined");
    refuse_others(opts);
    if (opts->logits_out && !opts->tokens)
        cli_usage_error("--logits-out needs --eval and --tokens");
    if (train_option_is_given(opts, "comm") && train_option_is_given(opts, "parallel.comm"))
        cli_usage_error("--comm and --parallel.comm cannot be combined");
    if (opts->eval && !opts->tokens == !opts->data)
        cli_usage_error("--eval needs --tokens or --data");
    if (!(opts->top_p > 0 && opts->top_p <= 1))
        cli_usage_error("--top-p must be more than 0 and at most 1");
    if (opts->sample && opts->prompt && opts->tokens)
        cli_usage_error("--prompt and --tokens cannot be combined");
    if (uses == 0 && !opts->run && !opts->print_config)
        cli_usage_error("--run is missing");
}

static const char *name_of(int key)
{
    const char *help;
    for (const struct argp_option *option = own_options; option->name; option++)
        if (option->key == key)
            return option->name;
    return key >= KEY_CONFIG ? key_name_at((size_t)(key - KEY_CONFIG), &help) : NULL;
}

static void note_given(train_options *opts, int key)
{
    const char *name = name_of(key);
    if (name)
        opts->given[opts->given_count++] =
            (train_given){name, key >= KEY_CONFIG ? work_of_setting(name) : work_of_own(key)};
}

static error_t parse_option(int key, char *arg, struct argp_state *state)
{
    train_options *opts = state->input;
    note_given(opts, key);
    if (key == ARGP_KEY_INIT) {
        state->child_inputs[0] = &opts->common;
        return 0;
    }
    if (key == ARGP_KEY_END) {
        check(opts);
        return 0;
    }
    if (key == ARGP_KEY_ARG) {
        if (opts->config_path)
            cli_usage_error("one CONFIG is expected, '%s' is too many", arg);
        opts->config_path = arg;
        return 0;
    }
    if (key >= KEY_CONFIG && name_of(key)) {
        set_key(opts, name_of(key), arg);
        return 0;
    }
    if (parse_training(opts, key, arg) || parse_use(opts, key, arg) || is_launch_key(key))
        return 0;
    return ARGP_ERR_UNKNOWN;
}

static const struct argp_child children[] = {{&cli_general_argp, 0, NULL, 0}, {0}};
static const struct argp argp = {.options = options, .parser = parse_option, .children = children};

static const cli_tool train_tool = {
    .name = "fsdp-train",
    .args = "[CONFIG]",
    .summary =
        "Trains a transformer in shards, saves while it trains, and resumes from there on any "
        "number of ranks.",
    .examples =
        "  fsdp-train --run runs/a --data.path text/ --np 2     train a small GPT-2 of bytes\n"
        "  fsdp-train a.conf --run runs/a --np 4                resume, on other ranks\n"
        "  fsdp-train --eval runs/a --data held-out.txt         its loss and perplexity\n"
        "  fsdp-train --sample runs/a --prompt 'Once upon' -n 200\n",
    .argp = &argp};

/* --- the configuration --------------------------------------------------------------------------- */

static fsdp_status check_config(const train_config *config, fsdp_error *err)
{
    enum { LEAST = 1 << 20 };
    if (config->parallel.device != TRAIN_CPU)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "parallel.device is cuda, but models are computed on the host only so far; use cpu");
    if (config->save.keep_last == 1)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "save.keep_last is 1; keep at least 2, in case one is damaged, or 0 for all");
    if (config->save.mem > 0 && config->save.mem < LEAST)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "save.mem of %lld bytes is too small: a thread reads and writes 1 MiB at "
                         "a time; set at least 1M, or 0 for the library's default",
                         (long long)config->save.mem);
    return FSDP_OK;
}

/* Keys of the command line win, so they are set when the file was read. */
static fsdp_status read_config(train_options *opts, fsdp_error *err)
{
    char origin[96];
    train_config_init(&opts->config);
    if (opts->config_path)
        FSDP_TRY(read_config_file(&opts->config, opts->config_path, err));
    for (size_t i = 0; i < opts->setting_count; i++) {
        const train_setting *setting = &opts->settings[i];
        snprintf(origin, sizeof origin, "--%s", setting->name);
        FSDP_TRY(set_by_name(&opts->config, setting->name, setting->value, origin, err));
    }
    FSDP_TRY(check_config(&opts->config, err));
    if (opts->batches && !opts->config.has_steps)
        FSDP_TRY(train_ids_count(opts->batches, 3, &opts->config.train.steps, err));
    return FSDP_OK;
}

/* Saves put the run's name after its parent's: "." and ".." have none. */
static const char *name_run(const char *run)
{
    size_t end = strlen(run), begin;
    while (end > 1 && run[end - 1] == '/')
        end--;
    for (begin = end; begin > 0 && run[begin - 1] != '/';)
        begin--;
    const bool has_name = end - begin > 2 || strspn(run + begin, ".") < end - begin;
    const char *named = has_name ? NULL : realpath(run, NULL);
    return named ? named : run;
}

fsdp_status train_options_parse(train_options *opts, int argc, char **argv, fsdp_error *err)
{
    *opts = (train_options){.count = 64,
                            .temperature = 0.8,
                            .top_k = 40,
                            .top_p = 1,
                            .seed = 1,
                            .argc = argc,
                            .argv = argv};
    opts->settings = calloc((size_t)argc + 1, sizeof *opts->settings);
    opts->given = calloc((size_t)argc + 1, sizeof *opts->given);
    if (!opts->settings || !opts->given)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    make_options();
    cli_begin(&train_tool, argc, argv, opts);
    if (opts->run)
        opts->run = name_run(opts->run);
    FSDP_TRY(read_config(opts, err));
    return check_outputs(opts, err);
}
