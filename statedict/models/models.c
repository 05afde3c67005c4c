/*
 * Descriptions of models: finds one among the built-in texts and reads it. See models.h; the format is in
 * docs/models.md. The texts are part of the program, and faults in them are for the developer.
 */
#include "statedict/models/models.h"

#include "base/text.h"

#include <stdlib.h>
#include <string.h>

typedef struct model_text {
    const char *name;  /* of the file, without its suffix */
    const char *types; /* "gptj gpt_neo": model_types; "": a part, which others are like */
    const char *text;
} model_text;

#include "statedict/models/model_texts.h"

enum {
    TEXTS = sizeof model_texts / sizeof *model_texts,
    MEMBERS_MOST = 128,
    ROWS_MOST = 256,
    KEYS_MOST = 48,
    FIXED_MOST = 16,
    BACK_MOST = 8,
    BASES_MOST = 4,
    LIKE_DEPTH = 8
};

/* A description while it is read. Its lists have their full capacity from the beginning. */
typedef struct model_reader {
    fsdp_arena *arena;
    fsdp_architecture *model;
    fsdp_config_member *members;
    fsdp_tensor_row *rows;
    fsdp_gguf_key *keys;
    fsdp_gguf_fixed *fixed;
    fsdp_gguf_back *back;
    const char **bases;
    int depth; /* of `like` */
} model_reader;

/* One text. */
typedef struct model_lines {
    model_reader *reader;
    const char *name;
    int number;         /* of the line that is read */
    const char *prefix; /* of the names of tensors */
    size_t inherited;   /* rows of the descriptions that this one is like */
    char *at;           /* in the line: the words that are left */
} model_lines;

static fsdp_status fail(const model_lines *lines, const char *what, const char *word,
                        fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_USAGE, "%s.model:%d: %s%s%s%s", lines->name, lines->number, what,
                     word ? " '" : "", word ? word : "", word ? "'" : "");
}

/* --- words of a line ------------------------------------------------------------------------------ */

/* Takes the next word; "" after the last. */
static char *take_word(model_lines *lines)
{
    char *word = lines->at + strspn(lines->at, " ");
    lines->at = word + strcspn(word, " ");
    if (*lines->at)
        *lines->at++ = '\0';
    return word;
}

/* Takes all that is left. */
static char *take_rest(model_lines *lines)
{
    char *rest = lines->at + strspn(lines->at, " ");
    lines->at = rest + strlen(rest);
    return rest;
}

/* Finds a word after a space, which ends at a space or with the text. */
static char *find_word(char *text, const char *word)
{
    size_t size = strlen(word);
    for (char *at = strchr(text, ' '); at; at = strchr(at + 1, ' '))
        if (strncmp(at + 1, word, size) == 0 && (at[1 + size] == ' ' || at[1 + size] == '\0'))
            return at;
    return NULL;
}

/* The text up to the next of these words, which becomes the line's rest. */
static const char *take_clause(model_lines *lines)
{
    static const char *const words[] = {"as", "when", "may-lack", "spelling", "null"};
    char *clause = lines->at + strspn(lines->at, " "), *end = clause + strlen(clause);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        char *found = find_word(clause, words[i]);
        end = found && found < end ? found : end;
    }
    lines->at = end;
    if (*end)
        *lines->at++ = '\0';
    return clause;
}

/* The name of a tensor below the prefix of `in`. */
static fsdp_status take_name(model_lines *lines, const char **name_out, fsdp_error *err)
{
    const char *name = take_word(lines);
    size_t size = strlen(lines->prefix);
    char *full = fsdp_arena_alloc(lines->reader->arena, size + strlen(name) + 1, 1);
    if (!full)
        return fsdp_fail_memory(err, "a description of a model");
    memcpy(full, lines->prefix, size);
    memcpy(full + size, name, strlen(name));
    *name_out = full;
    return FSDP_OK;
}

/* --- members, keys, bases ------------------------------------------------------------------------- */

static fsdp_status read_member(model_lines *lines, fsdp_member_kind kind, fsdp_error *err)
{
    model_reader *reader = lines->reader;
    const char *name = take_word(lines), *sign = take_word(lines), *otherwise = take_clause(lines);
    const char *word = take_word(lines), *null = take_word(lines);
    size_t at = 0;
    while (at < reader->model->member_count && strcmp(reader->members[at].name, name) != 0)
        at++;
    if (!*name || (*sign && (strcmp(sign, "=") != 0 || !*otherwise)) ||
        (*word && (strcmp(word, "null") != 0 || !*null)))
        return fail(lines, "a member is NAME, NAME = DEFAULT, or NAME = DEFAULT null NUMBER", NULL,
                    err);
    if (at == MEMBERS_MOST)
        return fail(lines, "there are too many members", NULL, err);
    reader->members[at] =
        (fsdp_config_member){name, *sign ? otherwise : NULL, *word ? null : NULL, kind};
    reader->model->member_count += at == reader->model->member_count;
    return FSDP_OK;
}

static const char unknown_member[] =
    "no line 'member', 'flag', 'real', 'reals' or 'word' has the name";

static size_t find_key(const model_reader *reader, const char *key)
{
    size_t at = 0;
    while (at < reader->model->gguf.key_count && strcmp(reader->keys[at].key, key) != 0)
        at++;
    return at;
}

static void remove_key(model_reader *reader, size_t at)
{
    size_t after = --reader->model->gguf.key_count - at;
    memmove(reader->keys + at, reader->keys + at + 1, after * sizeof *reader->keys);
}

/* A key that comes again moves to the end: files have keys in this order. */
static fsdp_status read_key(model_lines *lines, fsdp_error *err)
{
    model_reader *reader = lines->reader;
    fsdp_gguf_names *gguf = &reader->model->gguf;
    const char *key = take_word(lines), *sign = take_word(lines), *member = take_word(lines);
    const char *word = take_word(lines);
    const size_t at = find_key(reader, key);
    const fsdp_gguf_key row = {key, member, strcmp(word, "needed") == 0};
    if (*word && !row.is_needed)
        return fail(lines, "after the member only needed may follow, not", word, err);
    if (strcmp(sign, "=") != 0 || !*member)
        return fail(lines, "a key of GGUF is KEY = MEMBER", NULL, err);
    if (at == KEYS_MOST)
        return fail(lines, "there are too many keys", NULL, err);
    if (!fsdp_architecture_member(reader->model, member, strlen(member)))
        return fail(lines, unknown_member, member, err);
    if (at < gguf->key_count)
        remove_key(reader, at);
    reader->keys[gguf->key_count++] = row;
    return FSDP_OK;
}

static fsdp_status read_no_key(model_lines *lines, fsdp_error *err)
{
    for (const char *key = take_word(lines); *key; key = take_word(lines)) {
        size_t at = find_key(lines->reader, key);
        if (at == lines->reader->model->gguf.key_count)
            return fail(lines, "no inherited key has the name", key, err);
        remove_key(lines->reader, at);
    }
    return FSDP_OK;
}

static fsdp_status read_fixed(model_lines *lines, fsdp_error *err)
{
    model_reader *reader = lines->reader;
    fsdp_gguf_names *gguf = &reader->model->gguf;
    const char *member = take_word(lines), *sign = take_word(lines), *number = take_rest(lines);
    if (strcmp(sign, "=") != 0 || !*number)
        return fail(lines, "a fixed number is MEMBER = FORMULA", NULL, err);
    if (!fsdp_architecture_member(reader->model, member, strlen(member)))
        return fail(lines, unknown_member, member, err);
    size_t at = 0;
    while (at < gguf->fixed_count && strcmp(reader->fixed[at].member, member) != 0)
        at++;
    if (at == FIXED_MOST)
        return fail(lines, "there are too many fixed numbers", NULL, err);
    reader->fixed[at] = (fsdp_gguf_fixed){member, number};
    gguf->fixed_count += at == gguf->fixed_count;
    return FSDP_OK;
}

static fsdp_status read_back(model_lines *lines, fsdp_error *err)
{
    model_reader *reader = lines->reader;
    fsdp_gguf_names *gguf = &reader->model->gguf;
    const char *member = take_word(lines), *sign = take_word(lines), *formula = take_rest(lines);
    if (strcmp(sign, "=") != 0 || !*formula)
        return fail(lines, "a member of the way back is MEMBER = FORMULA", NULL, err);
    if (!fsdp_architecture_member(reader->model, member, strlen(member)))
        return fail(lines, unknown_member, member, err);
    if (gguf->back_count == BACK_MOST)
        return fail(lines, "there are too many members of the way back", NULL, err);
    reader->back[gguf->back_count++] = (fsdp_gguf_back){member, formula};
    return FSDP_OK;
}

/* A line that names one member. */
static fsdp_status read_member_name(model_lines *lines, const char **member_out, fsdp_error *err)
{
    *member_out = take_word(lines);
    return fsdp_architecture_member(lines->reader->model, *member_out, strlen(*member_out))
               ? FSDP_OK
               : fail(lines, unknown_member, *member_out, err);
}

/* TENSOR A|B */
static fsdp_status read_gated(model_lines *lines, fsdp_error *err)
{
    fsdp_gguf_names *gguf = &lines->reader->model->gguf;
    gguf->gate = take_word(lines);
    gguf->gated = take_word(lines);
    return *gguf->gated ? FSDP_OK : fail(lines, "no activations follow", gguf->gate, err);
}

static fsdp_status read_bases(model_lines *lines, fsdp_error *err)
{
    fsdp_architecture *model = lines->reader->model;
    const char *base = take_word(lines);
    for (model->base_count = 0; *base; base = take_word(lines)) {
        if (model->base_count == BASES_MOST)
            return fail(lines, "there are too many bases", NULL, err);
        lines->reader->bases[model->base_count++] = strcmp(base, "-") == 0 ? "" : base;
    }
    return FSDP_OK;
}

static fsdp_status read_gguf(model_lines *lines, fsdp_error *err)
{
    fsdp_gguf_names *gguf = &lines->reader->model->gguf;
    const char *word;
    gguf->architecture = take_word(lines);
    const struct {
        const char *word;
        bool *fact;
    } facts[] = {{"one-way", &gguf->one_way},           {"factors", &gguf->has_factors},
                 {"untied", &gguf->needs_output},       {"tied", &gguf->has_no_output},
                 {"mscale", &gguf->has_mscale},         {"scaled", &gguf->is_scaled},
                 {"longrope", &gguf->has_long_factors}, {"ropes-differ", &gguf->ropes_differ},
                 {"unrounded", &gguf->is_unrounded},    {"encoder", &gguf->is_encoder}};
    enum { FACTS = sizeof facts / sizeof *facts };
    for (size_t i = 0; i < FACTS; i++)
        *facts[i].fact = false;
    while (*(word = take_word(lines))) {
        size_t at = 0;
        while (at < FACTS && strcmp(facts[at].word, word) != 0)
            at++;
        if (at == FACTS)
            return fail(lines, "after the name of the architecture is the unknown word", word, err);
        *facts[at].fact = true;
    }
    return FSDP_OK;
}

/* never, always, if-used, or every PERIOD with `listed` after it. */
static fsdp_status read_window(model_lines *lines, fsdp_error *err)
{
    static const char *const uses[] = {"never", "always", "if-used", "every"};
    fsdp_gguf_names *gguf = &lines->reader->model->gguf;
    const char *word = take_word(lines);
    size_t use = 0;
    while (use < sizeof uses / sizeof *uses && strcmp(uses[use], word) != 0)
        use++;
    if (use == sizeof uses / sizeof *uses)
        return fail(lines, "a window is never, always, if-used or every N, not", word, err);
    gguf->window = (fsdp_window_use)use;
    gguf->window_period = use == FSDP_WINDOW_EVERY ? atoi(take_word(lines)) : 0;
    if (use == FSDP_WINDOW_EVERY && gguf->window_period < 1)
        return fail(lines, "the number of layers is missing after", word, err);
    word = use == FSDP_WINDOW_EVERY ? take_word(lines) : "";
    gguf->lists_windows = strcmp(word, "listed") == 0;
    return !*word || gguf->lists_windows
               ? FSDP_OK
               : fail(lines, "after the number only listed may follow, not", word, err);
}

static fsdp_status read_token_model(model_lines *lines, fsdp_error *err)
{
    const char *word = take_word(lines);
    bool is_unigram = strcmp(word, "unigram") == 0;
    if (!is_unigram && strcmp(word, "wordpiece") != 0)
        return fail(lines, "a tokenizer is unigram or wordpiece, not", word, err);
    lines->reader->model->gguf.tokenizer = is_unigram ? FSDP_TOKENS_UNIGRAM : FSDP_TOKENS_WORDPIECE;
    return FSDP_OK;
}

/* --- tensors -------------------------------------------------------------------------------------- */

/* NAME [SHAPE] as ROLE when FORMULA may-lack FORMULA spelling N */
static fsdp_status read_row(model_lines *lines, fsdp_tensor_row *row, fsdp_error *err)
{
    const char *word;
    FSDP_TRY(take_name(lines, &row->name, err));
    char *shape = lines->at + strspn(lines->at, " "), *end = strchr(shape, ']');
    if (*shape != '[' || !end)
        return fail(lines, "no [SHAPE] follows the name of the tensor", row->name, err);
    *end = '\0';
    row->shape = shape + 1;
    row->role = "";
    lines->at = end + 1;
    while (*(word = take_word(lines))) {
        const char *clause = take_clause(lines);
        if (strcmp(word, "as") == 0)
            row->role = clause;
        else if (strcmp(word, "when") == 0)
            row->when = clause;
        else if (strcmp(word, "may-lack") == 0)
            row->may_lack = clause;
        else if (strcmp(word, "spelling") == 0)
            row->spelling = atoi(clause);
        else
            return fail(lines, "unknown word", word, err);
        if (!*clause)
            return fail(lines, "nothing follows", word, err);
    }
    return FSDP_OK;
}

static void remove_row(model_lines *lines, size_t at)
{
    fsdp_tensor_row *rows = lines->reader->rows;
    size_t count = --lines->reader->model->row_count;
    lines->inherited--;
    memmove(rows + at, rows + at + 1, (count - at) * sizeof *rows);
}

/* Removes inherited rows by name; one that ends in '*' stands for all that begin so. False: there are none.
 */
static bool remove_rows(model_lines *lines, const char *name)
{
    size_t size = strlen(name), before = lines->inherited;
    bool is_begin = size > 0 && name[size - 1] == '*';
    for (size_t i = lines->inherited; i-- > 0;) {
        const char *row = lines->reader->rows[i].name;
        if (is_begin ? strncmp(row, name, size - 1) == 0 : strcmp(row, name) == 0)
            remove_row(lines, i);
    }
    return lines->inherited < before;
}

/* A tensor of an inherited name takes the place of the inherited ones. */
static fsdp_status read_tensor(model_lines *lines, fsdp_error *err)
{
    fsdp_architecture *model = lines->reader->model;
    fsdp_tensor_row row = {0};
    FSDP_TRY(read_row(lines, &row, err));
    (void)remove_rows(lines, row.name);
    if (model->row_count == ROWS_MOST)
        return fail(lines, "there are too many tensors", NULL, err);
    if (row.spelling > model->spellings)
        model->spellings = row.spelling;
    lines->reader->rows[model->row_count++] = row;
    return FSDP_OK;
}

static fsdp_status read_without(model_lines *lines, fsdp_error *err)
{
    const char *name;
    while (lines->at[strspn(lines->at, " ")]) {
        FSDP_TRY(take_name(lines, &name, err));
        if (!remove_rows(lines, name))
            return fail(lines, "no inherited tensor has the name", name, err);
    }
    return FSDP_OK;
}

/* --- a text --------------------------------------------------------------------------------------- */

static fsdp_status read_text(model_reader *reader, const char *name, const char *text,
                             fsdp_error *err);

/* Its own file has to say the class, what it computes, and that llama.cpp has it. */
static fsdp_status read_like(model_lines *lines, fsdp_error *err)
{
    model_reader *reader = lines->reader;
    const char *name = take_word(lines);
    const fsdp_architecture own = *reader->model;
    size_t i = 0;
    while (i < TEXTS && strcmp(model_texts[i].name, name) != 0)
        i++;
    if (i == TEXTS || reader->depth == LIKE_DEPTH)
        return fail(lines, "there is no description", name, err);
    reader->depth++;
    FSDP_TRY(read_text(reader, name, model_texts[i].text, err));
    reader->depth--;
    lines->inherited = reader->model->row_count;
    reader->model->gguf.architecture = NULL;
    reader->model->class_name = own.class_name;
    reader->model->form = own.form;
    return FSDP_OK;
}

static fsdp_status read_line(model_lines *lines, fsdp_error *err)
{
    fsdp_architecture *model = lines->reader->model;
    const char *word = take_word(lines);
    if (strcmp(word, "type") == 0 || strcmp(word, "maps") == 0)
        take_rest(lines); /* texts.cmake, map/texts.cmake list them */
    else if (strcmp(word, "class") == 0)
        model->class_name = take_word(lines);
    else if (strcmp(word, "form") == 0)
        model->form = take_rest(lines);
    else if (strcmp(word, "like") == 0)
        FSDP_TRY(read_like(lines, err));
    else if (strcmp(word, "bases") == 0)
        FSDP_TRY(read_bases(lines, err));
    else if (strcmp(word, "member") == 0)
        FSDP_TRY(read_member(lines, FSDP_MEMBER_WHOLE, err));
    else if (strcmp(word, "flag") == 0)
        FSDP_TRY(read_member(lines, FSDP_MEMBER_FLAG, err));
    else if (strcmp(word, "real") == 0)
        FSDP_TRY(read_member(lines, FSDP_MEMBER_REAL, err));
    else if (strcmp(word, "reals") == 0)
        FSDP_TRY(read_member(lines, FSDP_MEMBER_REALS, err));
    else if (strcmp(word, "word") == 0)
        FSDP_TRY(read_member(lines, FSDP_MEMBER_WORD, err));
    else if (strcmp(word, "in") == 0)
        lines->prefix = take_word(lines);
    else if (strcmp(word, "tensor") == 0)
        FSDP_TRY(read_tensor(lines, err));
    else if (strcmp(word, "without") == 0)
        FSDP_TRY(read_without(lines, err));
    else if (strcmp(word, "gguf") == 0)
        FSDP_TRY(read_gguf(lines, err));
    else if (strcmp(word, "pre") == 0)
        model->gguf.pre = take_word(lines);
    else if (strcmp(word, "activations") == 0)
        model->gguf.activations = take_word(lines);
    else if (strcmp(word, "gated") == 0)
        FSDP_TRY(read_gated(lines, err));
    else if (strcmp(word, "window") == 0)
        FSDP_TRY(read_window(lines, err));
    else if (strcmp(word, "key") == 0)
        FSDP_TRY(read_key(lines, err));
    else if (strcmp(word, "no-key") == 0)
        FSDP_TRY(read_no_key(lines, err));
    else if (strcmp(word, "fixed") == 0)
        FSDP_TRY(read_fixed(lines, err));
    else if (strcmp(word, "back") == 0)
        FSDP_TRY(read_back(lines, err));
    else if (strcmp(word, "rotary") == 0)
        FSDP_TRY(read_member_name(lines, &model->gguf.rotary, err));
    else if (strcmp(word, "scaled-output") == 0)
        FSDP_TRY(read_member_name(lines, &model->gguf.scaled_output, err));
    else if (strcmp(word, "tokenizer") == 0)
        FSDP_TRY(read_token_model(lines, err));
    else if (*word)
        return fail(lines, "unknown word", word, err);
    const char *more = take_word(lines);
    return *more ? fail(lines, "the line has a word too many:", more, err) : FSDP_OK;
}

/* Adds a line of the text without its comment and without spaces around it. Returns the next line. */
static const char *add_line(const char *at, fsdp_text *line)
{
    size_t all = strcspn(at, "\n"), size = strcspn(at, "#\n"), spaces = strspn(at, " ");
    while (size > spaces && at[size - 1] == ' ')
        size--;
    if (size > spaces)
        fsdp_text_addf(line, "%s%.*s", line->size > 0 ? " " : "", (int)(size - spaces),
                       at + spaces);
    return at + all + (at[all] == '\n');
}

/* Copies the next line, and the indented ones that continue it. */
static char *next_line(model_lines *lines, const char **text, int *count)
{
    fsdp_text line = {0};
    *count = 0;
    do {
        *text = add_line(*text, &line);
        (*count)++;
    } while (**text == ' ');
    char *copy =
        line.failed ? NULL : fsdp_arena_strndup(lines->reader->arena, line.data, line.size);
    fsdp_text_release(&line);
    return copy;
}

static fsdp_status read_text(model_reader *reader, const char *name, const char *text,
                             fsdp_error *err)
{
    model_lines lines = {.reader = reader,
                         .name = name,
                         .number = 1,
                         .prefix = "",
                         .inherited = reader->model->row_count};
    int count = 0;
    while (*text) {
        lines.at = next_line(&lines, &text, &count);
        if (!lines.at)
            return fsdp_fail_memory(err, "a description of a model");
        FSDP_TRY(read_line(&lines, err));
        lines.number += count;
    }
    return FSDP_OK;
}

/* --- the calls ------------------------------------------------------------------------------------ */

fsdp_status fsdp_architecture_parse(fsdp_arena *arena, const char *name, const char *text,
                                    const fsdp_architecture **architecture_out, fsdp_error *err)
{
    model_reader reader = {
        .arena = arena,
        .model = fsdp_arena_alloc(arena, 1, sizeof *reader.model),
        .members = fsdp_arena_alloc(arena, MEMBERS_MOST, sizeof *reader.members),
        .rows = fsdp_arena_alloc(arena, ROWS_MOST, sizeof *reader.rows),
        .keys = fsdp_arena_alloc(arena, KEYS_MOST, sizeof *reader.keys),
        .fixed = fsdp_arena_alloc(arena, FIXED_MOST, sizeof *reader.fixed),
        .back = fsdp_arena_alloc(arena, BACK_MOST, sizeof *reader.back),
        .bases = fsdp_arena_alloc(arena, BASES_MOST, sizeof *reader.bases),
    };
    *architecture_out = NULL;
    if (!reader.model || !reader.members || !reader.rows || !reader.keys || !reader.fixed ||
        !reader.back || !reader.bases)
        return fsdp_fail_memory(err, "a description of a model");
    *reader.model = (fsdp_architecture){.model_type = name,
                                        .spellings = 1,
                                        .members = reader.members,
                                        .rows = reader.rows,
                                        .bases = reader.bases,
                                        .gguf.keys = reader.keys,
                                        .gguf.fixed = reader.fixed,
                                        .gguf.back = reader.back};
    FSDP_TRY(read_text(&reader, name, text, err));
    *architecture_out = reader.model;
    return FSDP_OK;
}

/* Word n of the types of a text, "" after the last. */
static const char *type_at(const model_text *text, size_t n, size_t *size_out)
{
    const char *at = text->types;
    while (n-- > 0 && *at) {
        at += strcspn(at, " ");
        at += strspn(at, " ");
    }
    *size_out = strcspn(at, " ");
    return at;
}

static fsdp_status read_model(fsdp_arena *arena, const model_text *text, const char *type,
                              size_t size, const fsdp_architecture **out, fsdp_error *err)
{
    const fsdp_architecture *model;
    const char *model_type = fsdp_arena_strndup(arena, type, size);
    fsdp_architecture *copy = fsdp_arena_alloc(arena, 1, sizeof *copy);
    if (!model_type || !copy)
        return fsdp_fail_memory(err, "a description of a model");
    FSDP_TRY(fsdp_architecture_parse(arena, text->name, text->text, &model, err));
    *copy = *model;
    copy->model_type = model_type;
    *out = copy;
    return FSDP_OK;
}

fsdp_status fsdp_architecture_find(fsdp_arena *arena, const char *model_type, size_t size,
                                   const fsdp_architecture **architecture_out, fsdp_error *err)
{
    *architecture_out = NULL;
    for (size_t i = 0; size > 0 && i < TEXTS; i++) {
        size_t each;
        for (size_t n = 0; *type_at(&model_texts[i], n, &each); n++)
            if (each == size && memcmp(type_at(&model_texts[i], n, &each), model_type, size) == 0)
                return read_model(arena, &model_texts[i], model_type, size, architecture_out, err);
    }
    return FSDP_OK;
}

fsdp_status fsdp_architecture_at(fsdp_arena *arena, size_t i,
                                 const fsdp_architecture **architecture_out, fsdp_error *err)
{
    *architecture_out = NULL;
    for (size_t t = 0; t < TEXTS; t++) {
        size_t size;
        const char *type = type_at(&model_texts[t], 0, &size);
        if (*type && i-- == 0)
            return read_model(arena, &model_texts[t], type, size, architecture_out, err);
    }
    return FSDP_OK;
}

const fsdp_config_member *fsdp_architecture_member(const fsdp_architecture *architecture,
                                                   const char *name, size_t size)
{
    for (size_t i = 0; i < architecture->member_count; i++)
        if (fsdp_bytes_are(name, size, architecture->members[i].name))
            return &architecture->members[i];
    return NULL;
}

const fsdp_tensor_row *fsdp_architecture_role(const fsdp_architecture *architecture,
                                              const char *role, size_t from)
{
    for (size_t i = from; i < architecture->row_count; i++)
        if (strcmp(architecture->rows[i].role, role) == 0)
            return &architecture->rows[i];
    return NULL;
}
