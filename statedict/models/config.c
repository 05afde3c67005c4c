/* config.json, and formulas over its members, a recursive descent over the text: see config.h. */
#include "statedict/models/config.h"
#include "base/data/json.h"
#include "base/text.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* === config.json ============================================================================== */

/* --- the text as values --------------------------------------------------------------------------- */

/* Items of a list or an object until all are read; they then move into the arena. */
typedef struct item_list {
    fsdp_value *items;
    size_t count, capacity;
} item_list;

typedef struct config_parser {
    fsdp_json json;
    fsdp_arena *arena;
    size_t values;
} config_parser;

static fsdp_status parse_value(config_parser *parser, fsdp_value *out, fsdp_error *err);

static fsdp_status keep_string(config_parser *parser, const char *data, size_t size,
                               fsdp_value *out, fsdp_error *err)
{
    out->kind = FSDP_VALUE_STRING;
    out->as.bytes.size = size;
    out->as.bytes.data = fsdp_arena_strndup(parser->arena, data, size);
    return out->as.bytes.data ? FSDP_OK : fsdp_fail_memory(err, parser->json.name);
}

/* Makes the list large enough for `more` items. */
static fsdp_status grow(config_parser *parser, item_list *list, size_t more, fsdp_error *err)
{
    parser->values += more;
    if (parser->values > FSDP_CONFIG_VALUES)
        return fsdp_json_fail(&parser->json, err, "there are more than %d values",
                              FSDP_CONFIG_VALUES);
    return fsdp_grow(&list->items, &list->capacity, list->count + more, sizeof *list->items)
               ? FSDP_OK
               : fsdp_fail_memory(err, parser->json.name);
}

static fsdp_status parse_items(config_parser *parser, bool is_object, item_list *list,
                               fsdp_error *err)
{
    fsdp_json *json = &parser->json;
    const char *key;
    size_t size;
    bool more;
    FSDP_TRY(is_object ? fsdp_json_enter_object(json, err) : fsdp_json_enter_array(json, err));
    for (;;) {
        FSDP_TRY(is_object ? fsdp_json_next_key(json, &key, &size, &more, err)
                           : fsdp_json_next_item(json, &more, err));
        if (!more)
            return FSDP_OK;
        FSDP_TRY(grow(parser, list, is_object ? 2 : 1, err));
        fsdp_value item = {0};
        if (is_object) {
            FSDP_TRY(keep_string(parser, key, size, &item, err));
            list->items[list->count++] = item;
            item = (fsdp_value){0};
        }
        FSDP_TRY(parse_value(parser, &item, err));
        list->items[list->count++] = item;
    }
}

/* Floats that JSON does not have, in Python's spellings, as in time_step_limit of Mamba. */
static const struct {
    const char *word;
    double number;
} odd_floats[] = {{"NaN", NAN}, {"Infinity", INFINITY}, {"-Infinity", -INFINITY}};
enum { ODD_FLOATS = sizeof odd_floats / sizeof *odd_floats };

/* transformers 5 writes such a number as {"__float__": "Infinity"}. */
static void take_tagged(fsdp_value *value)
{
    const fsdp_value *items = value->as.list.items;
    if (value->as.list.count != 2 || items[1].kind != FSDP_VALUE_STRING ||
        !fsdp_bytes_are(items[0].as.bytes.data, items[0].as.bytes.size, "__float__"))
        return;
    for (size_t i = 0; i < ODD_FLOATS; i++)
        if (fsdp_bytes_are(items[1].as.bytes.data, items[1].as.bytes.size, odd_floats[i].word)) {
            *value = fsdp_value_f64(odd_floats[i].number);
            return;
        }
}

static fsdp_status parse_list(config_parser *parser, bool is_object, fsdp_value *out,
                              fsdp_error *err)
{
    item_list list = {0};
    fsdp_status st = parse_items(parser, is_object, &list, err);
    if (st == FSDP_OK) {
        out->kind = is_object ? FSDP_VALUE_DICT : FSDP_VALUE_LIST;
        out->as.list.count = list.count;
        out->as.list.items = fsdp_arena_alloc(parser->arena, list.count, sizeof *list.items);
        if (!out->as.list.items)
            st = fsdp_fail_memory(err, parser->json.name);
        else if (list.count > 0)
            memcpy(out->as.list.items, list.items, list.count * sizeof *list.items);
    }
    fsdp_free(list.items);
    if (st == FSDP_OK && is_object)
        take_tagged(out);
    return st;
}

/* All but whole numbers of 64 bits are floats. */
static fsdp_status parse_number(config_parser *parser, fsdp_value *out, fsdp_error *err)
{
    const char *at = parser->json.at;
    for (size_t i = 0; i < ODD_FLOATS; i++) {
        size_t size = strlen(odd_floats[i].word);
        if ((size_t)(parser->json.end - at) >= size && memcmp(at, odd_floats[i].word, size) == 0) {
            *out = fsdp_value_f64(odd_floats[i].number);
            parser->json.at += size;
            return FSDP_OK;
        }
    }
    out->kind = FSDP_VALUE_I64;
    if (fsdp_json_i64(&parser->json, &out->as.i64, NULL) == FSDP_OK)
        return FSDP_OK;
    parser->json.at = at;
    out->kind = FSDP_VALUE_F64;
    if (fsdp_json_f64(&parser->json, &out->as.f64, NULL) == FSDP_OK)
        return FSDP_OK;
    parser->json.at = at;
    out->as.f64 = INFINITY; /* a number that is too large */
    return fsdp_json_skip(&parser->json, err);
}

static fsdp_status parse_value(config_parser *parser, fsdp_value *out, fsdp_error *err)
{
    fsdp_json *json = &parser->json;
    const char *data;
    size_t size;
    switch (fsdp_json_peek(json)) {
    case FSDP_JSON_NULL: return fsdp_json_null(json, err);
    case FSDP_JSON_BOOL:
        out->kind = FSDP_VALUE_BOOL;
        return fsdp_json_bool(json, &out->as.boolean, err);
    case FSDP_JSON_STRING:
        FSDP_TRY(fsdp_json_string(json, &data, &size, err));
        return keep_string(parser, data, size, out, err);
    case FSDP_JSON_ARRAY: return parse_list(parser, false, out, err);
    case FSDP_JSON_OBJECT: return parse_list(parser, true, out, err);
    default: return parse_number(parser, out, err);
    }
}

static int compare_keys(const void *a, const void *b)
{
    const fsdp_value *one = *(const fsdp_value *const *)a, *other = *(const fsdp_value *const *)b;
    size_t n = one->as.bytes.size, m = other->as.bytes.size;
    int order = memcmp(one->as.bytes.data, other->as.bytes.data, n < m ? n : m);
    return order ? order : (n > m) - (n < m);
}

/* Moves to the value of a member of the object that follows. */
static fsdp_status skip_to(fsdp_json *json, const char *key, int occurrence)
{
    const char *name;
    size_t size;
    bool more = true;
    FSDP_TRY(fsdp_json_enter_object(json, NULL));
    for (;;) {
        FSDP_TRY(fsdp_json_next_key(json, &name, &size, &more, NULL));
        if (!more || (fsdp_bytes_are(name, size, key) && --occurrence == 0))
            return FSDP_OK;
        FSDP_TRY(fsdp_json_skip(json, NULL));
    }
}

/* Fails at a member that comes for the `occurrence`-th time, in an object of the text or, where `within` is
 * NULL, in the text itself, which is read again up to it. */
static fsdp_status fail_at(const fsdp_config_file *file, const char *within, const char *key,
                           int occurrence, const char *what, fsdp_error *err)
{
    fsdp_json json;
    fsdp_json_init(&json, file->text, file->size, fsdp_config_name(file));
    if (within)
        (void)skip_to(&json, within, 1);
    (void)skip_to(&json, key, occurrence);
    (void)fsdp_json_peek(&json); /* to the value */
    fsdp_status st = fsdp_json_fail(&json, err, what, key);
    fsdp_json_release(&json);
    return st;
}

/* A member that comes twice has two values, and nothing says which one counts. */
static fsdp_status check_keys(fsdp_config_file *file, const char *within, fsdp_error *err)
{
    const fsdp_value *object = within ? fsdp_config_at(&file->json, within) : &file->json;
    if (!object || object->kind != FSDP_VALUE_DICT)
        return FSDP_OK;
    size_t count = object->as.list.count / 2;
    const fsdp_value **keys = fsdp_arena_alloc(&file->arena, count, sizeof *keys);
    if (!keys)
        return fsdp_fail_memory(err, fsdp_config_name(file));
    for (size_t i = 0; i < count; i++)
        keys[i] = &object->as.list.items[2 * i];
    qsort(keys, count, sizeof *keys, compare_keys);
    for (size_t i = 1; i < count; i++)
        if (compare_keys(&keys[i - 1], &keys[i]) == 0)
            return fail_at(file, within, keys[i]->as.bytes.data, 2, "the key '%.80s' appears twice",
                           err);
    return FSDP_OK;
}

static fsdp_status parse_text(fsdp_config_file *file, fsdp_error *err)
{
    static const char *const read[] = {NULL, "text_config", "rope_parameters", "rope_scaling",
                                       "quantization_config"};
    config_parser parser = {.arena = &file->arena};
    fsdp_json_init(&parser.json, file->text, file->size, fsdp_config_name(file));
    fsdp_status st = fsdp_json_peek(&parser.json) == FSDP_JSON_OBJECT
                         ? parse_value(&parser, &file->json, err)
                         : fsdp_json_fail(&parser.json, err, "a JSON object was expected");
    if (st == FSDP_OK)
        st = fsdp_json_finish(&parser.json, err);
    fsdp_json_release(&parser.json);
    file->is_object = st == FSDP_OK;
    for (size_t i = 0; i < sizeof read / sizeof *read && st == FSDP_OK; i++)
        st = check_keys(file, read[i], err);
    return st;
}

/* --- members -------------------------------------------------------------------------------------- */

/* Finds a member that may be null. */
static const fsdp_value *find_member(const fsdp_value *object, const char *name)
{
    for (size_t i = 0; object && object->kind == FSDP_VALUE_DICT && i < object->as.list.count;
         i += 2) {
        const fsdp_value *key = &object->as.list.items[i];
        if (fsdp_bytes_are(key->as.bytes.data, key->as.bytes.size, name))
            return &key[1];
    }
    return NULL;
}

const fsdp_value *fsdp_config_at(const fsdp_value *object, const char *name)
{
    const fsdp_value *found = find_member(object, name);
    return found && found->kind != FSDP_VALUE_NULL ? found : NULL;
}

bool fsdp_config_is_null(const fsdp_value *object, const char *name)
{
    const fsdp_value *found = find_member(object, name);
    return found && found->kind == FSDP_VALUE_NULL;
}

/* False, and nothing is copied, when the value is NULL or no number. */
static bool copy_real(const fsdp_value *value, double *number_out)
{
    if (value && value->kind == FSDP_VALUE_BOOL)
        *number_out = value->as.boolean;
    else if (value && value->kind == FSDP_VALUE_I64)
        *number_out = (double)value->as.i64;
    else if (value && value->kind == FSDP_VALUE_F64)
        *number_out = value->as.f64;
    else
        return false;
    return true;
}

bool fsdp_config_real(const fsdp_value *object, const char *name, double *number_out)
{
    return copy_real(fsdp_config_at(object, name), number_out);
}

static const char *word_of(const fsdp_value *value)
{
    bool is_word = value && value->kind == FSDP_VALUE_STRING &&
                   strlen(value->as.bytes.data) == value->as.bytes.size;
    return is_word ? value->as.bytes.data : NULL;
}

const char *fsdp_config_word(const fsdp_value *object, const char *name)
{
    return word_of(fsdp_config_at(object, name));
}

/* --- the kind of model ---------------------------------------------------------------------------- */

static void copy_word(const char *word, char *out, size_t capacity)
{
    if (word && strlen(word) < capacity)
        memcpy(out, word, strlen(word) + 1);
}

static void read_layers(const fsdp_value *config, const char *name, int64_t *layers)
{
    double count;
    if (fsdp_config_real(config, name, &count) && count >= 0 && count <= INT32_MAX)
        *layers = (int64_t)count;
}

static void fill_kind(const fsdp_value *config, fsdp_model_kind *kind)
{
    const fsdp_value *classes = fsdp_config_at(config, "architectures");
    const fsdp_value *text = fsdp_config_at(config, "text_config");
    copy_word(fsdp_config_word(config, "model_type"), kind->type, sizeof kind->type);
    if (classes && classes->kind == FSDP_VALUE_LIST && classes->as.list.count > 0)
        copy_word(word_of(classes->as.list.items), kind->class_name, sizeof kind->class_name);
    kind->is_quantized = fsdp_config_at(config, "quantization_config") ||
                         fsdp_config_at(config, "quantization"); /* the latter of MLX */
    read_layers(config, "num_hidden_layers", &kind->layers);
    read_layers(config, "num_nextn_predict_layers", &kind->further_layers);
    /* the model of the text in one of several kinds */
    read_layers(text, "num_hidden_layers", &kind->layers);
    read_layers(text, "num_nextn_predict_layers", &kind->further_layers);
}

/* Returns 1, 0, or -1 where the object has no such boolean. */
static int says_tied(const fsdp_value *object)
{
    const fsdp_value *tied = fsdp_config_at(object, "tie_word_embeddings");
    return tied && tied->kind == FSDP_VALUE_BOOL ? tied->as.boolean : -1;
}

/* transformers leaves members with the values of their defaults out of config.json. */
static bool is_tied(const fsdp_config_file *file)
{
    static const char name[] = "tie_word_embeddings";
    const int tied = says_tied(&file->json);
    const fsdp_config_member *member =
        tied < 0 && file->architecture
            ? fsdp_architecture_member(file->architecture, name, sizeof name - 1)
            : NULL;
    return tied > 0 || (member && member->otherwise && strcmp(member->otherwise, "1") == 0);
}

static fsdp_status read_kind(fsdp_config_file *file, fsdp_error *err)
{
    fsdp_model_kind *kind = &file->kind;
    fill_kind(&file->json, kind);
    FSDP_TRY(fsdp_architecture_find(&file->arena, kind->type, strlen(kind->type),
                                    &file->architecture, err));
    kind->is_tied = is_tied(file);
    return FSDP_OK;
}

/* --- the file ------------------------------------------------------------------------------------- */

fsdp_status fsdp_config_parse(const char *text, size_t size, const char *path,
                              fsdp_config_file *file, fsdp_error *err)
{
    *file = (fsdp_config_file){.size = size};
    file->path = path ? fsdp_arena_strndup(&file->arena, path, strlen(path)) : NULL;
    file->text = fsdp_arena_strndup(&file->arena, text, size);
    fsdp_status st = file->text && (file->path || !path)
                         ? parse_text(file, &file->error)
                         : fsdp_fail_memory(&file->error, "config.json");
    if (st == FSDP_OK)
        st = read_kind(file, &file->error);
    if (st == FSDP_OK)
        return FSDP_OK;
    file->json = (fsdp_value){0};
    file->kind = (fsdp_model_kind){0};
    return fsdp_config_check(file, err);
}

void fsdp_config_release(fsdp_config_file *file)
{
    fsdp_arena_release(&file->arena);
    *file = (fsdp_config_file){0};
}

fsdp_status fsdp_config_check(const fsdp_config_file *file, fsdp_error *err)
{
    if (err && file->error.status != FSDP_OK)
        *err = file->error;
    return file->error.status;
}

int fsdp_config_says_tied(const fsdp_config_file *file)
{
    const int tied = says_tied(&file->json);
    return tied < 0 ? says_tied(fsdp_config_at(&file->json, "text_config")) : tied;
}

const char *fsdp_config_name(const fsdp_config_file *file)
{
    return file->path ? file->path : "config.json";
}

/* === formulas ================================================================================= */

typedef struct formula {
    const fsdp_config *config;
    const char *at;
    int64_t layer;
    bool skips; /* after a condition that decided: values do not count, and may make no sense */
} formula;

static fsdp_status either(formula *f, int64_t *out, fsdp_error *err);

static bool take(formula *f, const char *sign)
{
    size_t size = strlen(sign);
    while (*f->at == ' ')
        f->at++;
    if (strncmp(f->at, sign, size) != 0)
        return false;
    f->at += size;
    return true;
}

static bool is_name(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '$';
}

static bool ends_with(const char *text, const char *end, size_t size)
{
    size_t n = text ? strlen(text) : 0;
    return n >= size && memcmp(text + n - size, end, size) == 0;
}

static const fsdp_config_value *find_value(const fsdp_config *config, const char *name, size_t size)
{
    for (size_t i = 0; i < config->count; i++)
        if (fsdp_bytes_are(name, size, config->values[i].name))
            return config->values[i].is_there ? &config->values[i] : NULL;
    return NULL;
}

/* --- atoms -------------------------------------------------------------------------------------- */

static fsdp_status member(formula *f, const char *name, size_t size, int64_t *out, fsdp_error *err)
{
    const fsdp_config_value *value = find_value(f->config, name, size);
    const fsdp_config_member *known = fsdp_architecture_member(f->config->architecture, name, size);
    if (size == 5 && memcmp(name, "layer", size) == 0)
        *out = f->layer;
    else if (f->skips)
        *out = 1;
    else if (value)
        *out = value->number;
    else if (!known || !known->otherwise || !fsdp_member_is_whole(known))
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' has no member '%.*s'", f->config->path,
                         (int)size, name);
    else
        return fsdp_formula_compute(f->config, known->otherwise, f->layer, out, err);
    return FSDP_OK;
}

static fsdp_status atom(formula *f, int64_t *out, fsdp_error *err)
{
    if (take(f, "!")) {
        FSDP_TRY(atom(f, out, err));
        *out = !*out;
        return FSDP_OK;
    }
    if (take(f, "(")) {
        FSDP_TRY(either(f, out, err));
        (void)take(f, ")");
        return FSDP_OK;
    }
    if (take(f, "'")) {
        size_t size = strcspn(f->at, "'");
        *out = f->config->any_class || ends_with(f->config->class_name, f->at, size);
        f->at += size + 1;
        return FSDP_OK;
    }
    const char *name = f->at;
    while (is_name(*f->at))
        f->at++;
    if (*name >= '0' && *name <= '9') {
        long long number = 0;
        (void)sscanf(name, "%lld", &number);
        *out = number;
        return FSDP_OK;
    }
    return member(f, name, (size_t)(f->at - name), out, err);
}

/* --- operators, the tightest first -------------------------------------------------------------- */

static fsdp_status fail_number(const formula *f, const char *what, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_USAGE, "the members of '%s' contradict one another: %s",
                     f->config->path, what);
}

static fsdp_status product(formula *f, int64_t *out, fsdp_error *err)
{
    FSDP_TRY(atom(f, out, err));
    for (;;) {
        int64_t right;
        char sign = take(f, "*") ? '*' : take(f, "/") ? '/' : take(f, "%") ? '%' : 0;
        if (!sign)
            return FSDP_OK;
        FSDP_TRY(atom(f, &right, err));
        if (f->skips)
            right = *out = 1;
        if (sign != '*' && right <= 0)
            return fail_number(f, "a divisor is 0 or less", err);
        if (sign == '*' && fsdp_mul_overflow(*out, right, out))
            return fail_number(f, "a size is too large", err);
        if (sign != '*')
            *out = sign == '/' ? *out / right : *out % right;
    }
}

static fsdp_status sum(formula *f, int64_t *out, fsdp_error *err)
{
    FSDP_TRY(product(f, out, err));
    for (;;) {
        int64_t right;
        char sign = take(f, "+") ? '+' : take(f, "-") ? '-' : 0;
        if (!sign)
            return FSDP_OK;
        FSDP_TRY(product(f, &right, err));
        if (sign == '-' && fsdp_mul_overflow(right, -1, &right))
            return fail_number(f, "a size is too large", err);
        if (fsdp_add_overflow(*out, right, out))
            return fail_number(f, "a size is too large", err);
    }
}

static int compare_numbers(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Sorts the items of a list, in which "layer in LIST" searches for each layer. */
static void sort_items(fsdp_config_value *list)
{
    if (list->number > 1)
        qsort(list->items, (size_t)list->number, sizeof *list->items, compare_numbers);
}

static bool is_listed(const formula *f, const char *name, size_t size, int64_t number)
{
    const fsdp_config_value *list = find_value(f->config, name, size);
    return list && list->items && list->number > 0 &&
           bsearch(&number, list->items, (size_t)list->number, sizeof number, compare_numbers);
}

static fsdp_status relation(formula *f, int64_t *out, fsdp_error *err)
{
    int64_t right;
    FSDP_TRY(sum(f, out, err));
    if (take(f, "in ")) {
        const char *name = f->at;
        while (is_name(*f->at))
            f->at++;
        *out = is_listed(f, name, (size_t)(f->at - name), *out);
        return FSDP_OK;
    }
    char sign = take(f, "==") ? '=' : take(f, "!=") ? '!' : take(f, ">") ? '>' : 0;
    if (!sign)
        return FSDP_OK;
    FSDP_TRY(sum(f, &right, err));
    *out = sign == '=' ? *out == right : sign == '!' ? *out != right : *out > right;
    return FSDP_OK;
}

/* Like Python, ignores the right side where the left one decides: it may divide by 0. */
static fsdp_status both(formula *f, int64_t *out, fsdp_error *err)
{
    bool skipped = f->skips;
    FSDP_TRY(relation(f, out, err));
    while (take(f, "&&")) {
        int64_t right;
        f->skips = f->skips || !*out;
        FSDP_TRY(relation(f, &right, err));
        *out = *out && right;
    }
    f->skips = skipped;
    return FSDP_OK;
}

static fsdp_status either(formula *f, int64_t *out, fsdp_error *err)
{
    FSDP_TRY(both(f, out, err));
    while (take(f, "||")) {
        int64_t right;
        FSDP_TRY(both(f, &right, err));
        *out = *out || right;
    }
    return FSDP_OK;
}

/* --- formulas as numbers ---------------------------------------------------------------------- */

fsdp_status fsdp_formula_compute(const fsdp_config *config, const char *text, int64_t layer,
                                 int64_t *value_out, fsdp_error *err)
{
    formula f = {config, text, layer, false};
    return either(&f, value_out, err);
}

fsdp_status fsdp_formula_number(const fsdp_config *config, const char *text, int64_t layer,
                                double *number_out, fsdp_error *err)
{
    char *rest = NULL;
    int64_t whole = 0;
    *number_out = strtod(text, &rest);
    if (*rest == '\0')
        return FSDP_OK;
    FSDP_TRY(fsdp_formula_compute(config, text, layer, &whole, err));
    *number_out = (double)whole;
    return FSDP_OK;
}

fsdp_status fsdp_formula_next_dim(const fsdp_config *config, const char **shape_at, int64_t layer,
                                  int64_t *value_out, fsdp_error *err)
{
    formula f = {config, *shape_at, layer, false};
    FSDP_TRY(either(&f, value_out, err));
    *shape_at = take(&f, ",") ? f.at : NULL;
    return *value_out >= 0 ? FSDP_OK : fail_number(&f, "a size is negative", err);
}

/* True when the formula names a class (in quotes) that the model has. */
static bool names_class(const fsdp_config *config, const char *text)
{
    while ((text = strchr(text, '\'')) != NULL) {
        size_t size = strcspn(text + 1, "'");
        if (ends_with(config->class_name, text + 1, size))
            return true;
        text += size + 2;
    }
    return false;
}

/* === members for formulas ===================================================================== */

/* --- numbers of formulas -------------------------------------------------------------------------- */

/* 8, and 8.0, which a program wrote that computed it. */
static fsdp_status take_whole(const fsdp_config *config, const fsdp_value *json,
                              fsdp_config_value *value, fsdp_error *err)
{
    const double most = 9007199254740992.0; /* whole numbers up to it are exact */
    if (json->kind == FSDP_VALUE_I64)
        value->number = json->as.i64;
    else if (json->kind == FSDP_VALUE_F64 && fabs(json->as.f64) <= most &&
             json->as.f64 == floor(json->as.f64))
        value->number = (int64_t)json->as.f64;
    else
        return fail_at(config->file, NULL, value->name, 1, "'%.80s' is not a 64-bit integer", err);
    return FSDP_OK;
}

/* Integers are kept; of other items only their number. */
static fsdp_status take_list(fsdp_config *config, const fsdp_value *json, fsdp_config_value *value,
                             fsdp_error *err)
{
    size_t count = json->as.list.count;
    if (count > FSDP_CONFIG_LIST)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': '%s' has more than %d items", config->path,
                         value->name, FSDP_CONFIG_LIST);
    value->items = fsdp_arena_alloc(&config->arena, count, sizeof *value->items);
    if (!value->items)
        return fsdp_fail_memory(err, config->path);
    for (size_t i = 0; i < count; i++) {
        const fsdp_value *item = &json->as.list.items[i];
        value->items[i] = item->kind == FSDP_VALUE_I64 ? item->as.i64 : -1;
    }
    value->number = (int64_t)count;
    sort_items(value);
    return FSDP_OK;
}

static fsdp_status take_value(fsdp_config *config, const fsdp_value *json, fsdp_config_value *value,
                              fsdp_error *err)
{
    value->is_there = true;
    switch (json->kind) {
    case FSDP_VALUE_LIST: return take_list(config, json, value, err);
    case FSDP_VALUE_DICT: value->number = (int64_t)(json->as.list.count / 2); return FSDP_OK;
    case FSDP_VALUE_BOOL: value->number = json->as.boolean; return FSDP_OK;
    default: return take_whole(config, json, value, err);
    }
}

static fsdp_status take_values(fsdp_config *config, fsdp_error *err)
{
    const fsdp_architecture *model = config->architecture;
    config->values = fsdp_arena_alloc(&config->arena, model->member_count, sizeof *config->values);
    if (!config->values)
        return fsdp_fail_memory(err, config->path);
    for (size_t i = 0; i < model->member_count; i++) {
        const fsdp_config_member *member = &model->members[i];
        bool is_whole = fsdp_member_is_whole(member) && member->name[0] != '$';
        const fsdp_value *json = is_whole ? find_member(&config->file->json, member->name) : NULL;
        fsdp_config_value *value = &config->values[config->count++];
        value->name = member->name;
        if (config->file->is_untied && strcmp(member->name, "tie_word_embeddings") == 0) {
            value->is_there = true;
        } else if (json && json->kind != FSDP_VALUE_NULL) {
            FSDP_TRY(take_value(config, json, value, err));
        } else if (json && member->null) {
            value->number = strtoll(member->null, NULL, 10);
            value->is_there = true;
        }
    }
    return FSDP_OK;
}

fsdp_status fsdp_config_number(const fsdp_config *config, const char *name, double *number_out,
                               fsdp_error *err)
{
    const fsdp_config_member *member =
        fsdp_architecture_member(config->architecture, name, strlen(name));
    int64_t whole;
    if (member && member->kind == FSDP_MEMBER_REAL && member->otherwise) {
        if (!fsdp_config_real(&config->file->json, name, number_out))
            *number_out = strtod(member->otherwise, NULL);
        return FSDP_OK;
    }
    FSDP_TRY(fsdp_formula_compute(config, name, 0, &whole, err));
    *number_out = (double)whole;
    return FSDP_OK;
}

/* --- config.json of a family ---------------------------------------------------------------------- */

static bool is_base_class(const char *name)
{
    size_t size = strlen(name);
    return size > 5 && strcmp(name + size - 5, "Model") == 0;
}

static bool has_class(const fsdp_config *config)
{
    const fsdp_architecture *model = config->architecture;
    for (size_t i = 0; i < model->row_count; i++)
        if (model->rows[i].when && names_class(config, model->rows[i].when))
            return true;
    for (size_t i = 0; i < model->member_count; i++)
        if (model->members[i].otherwise && names_class(config, model->members[i].otherwise))
            return true;
    return is_base_class(config->class_name);
}

static fsdp_status fail_unknown(const fsdp_config_file *file, fsdp_error *err)
{
    const char *path = fsdp_config_name(file);
    char type[80];
    fsdp_printable(file->kind.type, strlen(file->kind.type), type, sizeof type);
    if (file->kind.is_quantized)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' describes a quantized model, whose tensors are unknown; name a "
                         "directory with its weights",
                         path);
    if (!file->kind.type[0])
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has no model_type; name a directory with the model's weights", path);
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "the tensors of model_type '%s' in '%s' are unknown; name a directory with "
                     "weights of this model",
                     type, path);
}

fsdp_status fsdp_config_take(const fsdp_config_file *file, fsdp_config *config, fsdp_error *err)
{
    *config = (fsdp_config){.file = file,
                            .architecture = file->architecture,
                            .path = fsdp_config_name(file),
                            .class_name = file->kind.class_name};
    FSDP_TRY(take_values(config, err));
    config->is_class_known = has_class(config);
    config->any_class = !config->is_class_known;
    return FSDP_OK;
}

bool fsdp_config_has_tensors(const fsdp_config_file *file)
{
    return file->architecture && file->architecture->row_count > 0 && !file->kind.is_quantized;
}

fsdp_status fsdp_config_read(const fsdp_config_file *file, fsdp_config *config, fsdp_error *err)
{
    *config = (fsdp_config){0};
    FSDP_TRY(fsdp_config_check(file, err));
    return fsdp_config_has_tensors(file) ? fsdp_config_take(file, config, err)
                                         : fail_unknown(file, err);
}
