/* Reads config.json: see config_members.h. Only members of the table are kept; all others are skipped. */
#include "statedict/expect/config_members.h"

#include "base/data/json.h"
#include "base/text.h"
#include "formats/frameworks.h"
#include "formats/source.h"
#include "statedict/expect/expect.h"

#include <math.h>
#include <string.h>

/* --- the kind of model -------------------------------------------------------------------------- */

enum {
    MODEL_TYPE,
    ARCHITECTURES,
    QUANTIZATION,
    MLX_QUANTIZATION,
    TIED,
    LAYERS,
    FURTHER_LAYERS,
    TEXT,
    KINDS
};
static const char *const kinds[KINDS] = {
    "model_type",          "architectures",     "quantization_config",      "quantization",
    "tie_word_embeddings", "num_hidden_layers", "num_nextn_predict_layers", "text_config"};

static fsdp_status read_string(fsdp_json *json, char *out, size_t room, fsdp_error *err)
{
    const char *data;
    size_t size;
    if (fsdp_json_peek(json) != FSDP_JSON_STRING)
        return fsdp_json_skip(json, err);
    FSDP_TRY(fsdp_json_string(json, &data, &size, err));
    if (size < room && memchr(data, 0, size) == NULL) {
        memcpy(out, data, size);
        out[size] = 0;
    }
    return FSDP_OK;
}

/* The first of the list. */
static fsdp_status read_class(fsdp_json *json, fsdp_model_kind *kind, fsdp_error *err)
{
    bool more;
    if (fsdp_json_peek(json) != FSDP_JSON_ARRAY)
        return fsdp_json_skip(json, err);
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (bool is_first = true;; is_first = false) {
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return FSDP_OK;
        FSDP_TRY(is_first ? read_string(json, kind->class_name, sizeof kind->class_name, err)
                          : fsdp_json_skip(json, err));
    }
}

static fsdp_status read_layers(fsdp_json *json, int64_t *layers, fsdp_error *err)
{
    double count;
    if (fsdp_json_peek(json) != FSDP_JSON_NUMBER)
        return fsdp_json_skip(json, err);
    FSDP_TRY(fsdp_json_f64(json, &count, err));
    if (count >= 0 && count <= INT32_MAX)
        *layers = (int64_t)count;
    return FSDP_OK;
}

/* The model of the text in one of several kinds: only its layers count. */
static fsdp_status read_text_config(fsdp_json *json, fsdp_model_kind *kind, fsdp_error *err)
{
    fsdp_json_members members = {.names = kinds, .count = KINDS};
    int which;
    if (fsdp_json_peek(json) != FSDP_JSON_OBJECT)
        return fsdp_json_skip(json, err);
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        if (which < 0)
            return FSDP_OK;
        FSDP_TRY(which == LAYERS           ? read_layers(json, &kind->layers, err)
                 : which == FURTHER_LAYERS ? read_layers(json, &kind->further_layers, err)
                                           : fsdp_json_skip(json, err));
    }
}

static fsdp_status read_kind_member(fsdp_json *json, int which, fsdp_model_kind *kind,
                                    fsdp_error *err)
{
    bool is_there = fsdp_json_peek(json) != FSDP_JSON_NULL;
    switch (which) {
    case MODEL_TYPE: return read_string(json, kind->type, sizeof kind->type, err);
    case ARCHITECTURES: return read_class(json, kind, err);
    case LAYERS: return read_layers(json, &kind->layers, err);
    case FURTHER_LAYERS: return read_layers(json, &kind->further_layers, err);
    case TEXT: return read_text_config(json, kind, err);
    case QUANTIZATION:
    case MLX_QUANTIZATION: kind->is_quantized = kind->is_quantized || is_there; break;
    default:
        if (fsdp_json_peek(json) == FSDP_JSON_BOOL)
            return fsdp_json_bool(json, &kind->is_tied, err);
    }
    return fsdp_json_skip(json, err);
}

/* transformers leaves members with the values of their defaults out of config.json. */
static bool is_tied_by_default(const fsdp_model_kind *kind)
{
    const fsdp_architecture *known = fsdp_architecture_find(kind->type, strlen(kind->type));
    const char *name = kinds[TIED];
    return known &&
           strcmp(fsdp_architecture_member(known, name, strlen(name))->otherwise, "1") == 0;
}

fsdp_status fsdp_model_kind_read(const char *text, size_t size, const char *path,
                                 fsdp_model_kind *kind, fsdp_error *err)
{
    *kind = (fsdp_model_kind){0};
    fsdp_json_members members = {.names = kinds, .count = KINDS};
    fsdp_json json;
    bool says_tied = false;
    int which = 0;
    fsdp_json_init(&json, text, size, path);
    fsdp_status st = fsdp_json_peek(&json) == FSDP_JSON_OBJECT
                         ? fsdp_json_enter_object(&json, err)
                         : fsdp_json_fail(&json, err, "no JSON object begins here");
    while (st == FSDP_OK) {
        st = fsdp_json_next_member(&json, &members, &which, err);
        if (st != FSDP_OK || which < 0)
            break;
        says_tied = says_tied || (which == TIED && fsdp_json_peek(&json) == FSDP_JSON_BOOL);
        st = read_kind_member(&json, which, kind, err);
    }
    if (st == FSDP_OK && !says_tied)
        kind->is_tied = is_tied_by_default(kind);
    if (st == FSDP_OK)
        st = fsdp_json_finish(&json, err);
    fsdp_json_release(&json);
    return st;
}

/* The path of a file in the directory, or where dir is NULL in the one that holds the checkpoint's
 * configuration. */
static char *locate(fsdp_io *io, const char *dir, const char *path, const char *name)
{
    char *beside = NULL;
    if (!dir && fsdp_framework_config(io, path, &beside, NULL) == FSDP_OK)
        dir = beside;
    char *file = dir ? fsdp_path_join(dir, name) : NULL;
    fsdp_free(beside);
    return file;
}

/* Takes the path. */
static char *read_located(fsdp_io *io, char *file, size_t *size_out, char **path_out,
                          fsdp_error *err)
{
    char *text = NULL;
    if (file)
        (void)fsdp_source_read_file(io, file, FSDP_EXPECT_CONFIG_MOST, &text, size_out, err);
    *path_out = text ? file : NULL;
    if (!text)
        fsdp_free(file);
    return text;
}

char *fsdp_config_find(fsdp_io *io, const char *dir, const char *path, size_t *size_out,
                       char **path_out, fsdp_error *err)
{
    return read_located(io, locate(io, dir, path, "config.json"), size_out, path_out, err);
}

char *fsdp_params_find(fsdp_io *io, const char *path, size_t *size_out, char **path_out)
{
    return read_located(io, locate(io, NULL, path, "params.json"), size_out, path_out, NULL);
}

void fsdp_model_kind_find(fsdp_io *io, const char *dir, const char *path, fsdp_model_kind *kind)
{
    size_t size;
    char *found, *text = fsdp_config_find(io, dir, path, &size, &found, NULL);
    *kind = (fsdp_model_kind){0};
    if (text && fsdp_model_kind_read(text, size, "config.json", kind, NULL) != FSDP_OK)
        *kind = (fsdp_model_kind){0};
    fsdp_free(found);
    fsdp_free(text);
}

/* --- numbers ------------------------------------------------------------------------------------ */

/* 8, and 8.0, which a program wrote that computed it. */
static fsdp_status read_number(fsdp_json *json, fsdp_config_value *value, fsdp_error *err)
{
    const double most = 9007199254740992.0; /* whole numbers up to it are exact */
    const char *at = json->at;
    double number = 0;
    fsdp_error ignored = {0};
    value->is_there = fsdp_json_i64(json, &value->number, &ignored) == FSDP_OK;
    if (value->is_there)
        return FSDP_OK;
    json->at = at;
    if (fsdp_json_f64(json, &number, &ignored) == FSDP_OK && fabs(number) <= most &&
        number == floor(number)) {
        value->number = (int64_t)number;
        value->is_there = true;
        return FSDP_OK;
    }
    json->at = at;
    return fsdp_json_fail(json, err, "'%s' is no whole number of 64 bits", value->name);
}

/* Integers are kept; of other items only their number. */
static fsdp_status read_list(fsdp_json *json, fsdp_config *config, fsdp_config_value *value,
                             fsdp_error *err)
{
    bool more;
    FSDP_TRY(fsdp_json_enter_array(json, err));
    value->is_there = true;
    value->items = fsdp_arena_alloc(&config->arena, FSDP_CONFIG_LIST, sizeof *value->items);
    if (!value->items)
        return fsdp_fail_memory(err, config->path);
    for (;;) {
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more) {
            fsdp_formula_sort(value);
            return FSDP_OK;
        }
        if (value->number == FSDP_CONFIG_LIST)
            return fsdp_json_fail(json, err, "'%s' has more than %d items", value->name,
                                  FSDP_CONFIG_LIST);
        int64_t *item = &value->items[value->number++];
        *item = -1;
        FSDP_TRY(fsdp_json_peek(json) == FSDP_JSON_NUMBER ? fsdp_json_i64(json, item, err)
                                                          : fsdp_json_skip(json, err));
    }
}

static fsdp_status count_members(fsdp_json *json, fsdp_config_value *value, fsdp_error *err)
{
    const char *key;
    size_t size;
    bool more;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    value->is_there = true;
    for (;;) {
        FSDP_TRY(fsdp_json_next_key(json, &key, &size, &more, err));
        if (!more)
            return FSDP_OK;
        value->number++;
        FSDP_TRY(fsdp_json_skip(json, err));
    }
}

static fsdp_status read_value(fsdp_json *json, fsdp_config *config, fsdp_config_value *value,
                              fsdp_error *err)
{
    bool truth;
    switch (fsdp_json_peek(json)) {
    case FSDP_JSON_NUMBER:
    case FSDP_JSON_STRING: return read_number(json, value, err);
    case FSDP_JSON_ARRAY: return read_list(json, config, value, err);
    case FSDP_JSON_OBJECT: return count_members(json, value, err);
    case FSDP_JSON_BOOL:
        FSDP_TRY(fsdp_json_bool(json, &truth, err));
        value->number = truth;
        value->is_there = true;
        return FSDP_OK;
    default: return fsdp_json_skip(json, err);
    }
}

static void add_names(fsdp_config *config, const fsdp_config_member *list)
{
    for (; list->name; list++) {
        bool is_known = list->name[0] == '$';
        for (int i = 0; i < config->count; i++)
            is_known = is_known || strcmp(config->values[i].name, list->name) == 0;
        if (!is_known && config->count < FSDP_CONFIG_MEMBERS)
            config->values[config->count++].name = list->name;
    }
}

static fsdp_status read_values(const char *text, size_t size, fsdp_config *config, fsdp_error *err)
{
    const char *names[FSDP_CONFIG_MEMBERS];
    fsdp_json json;
    int which = 0;
    add_names(config, config->architecture->members);
    add_names(config, fsdp_config_common);
    for (int i = 0; i < config->count; i++)
        names[i] = config->values[i].name;
    fsdp_json_members members = {.names = names, .count = config->count};
    fsdp_json_init(&json, text, size, config->path);
    fsdp_status st = fsdp_json_enter_object(&json, err);
    while (st == FSDP_OK) {
        st = fsdp_json_next_member(&json, &members, &which, err);
        if (st != FSDP_OK || which < 0)
            break;
        st = read_value(&json, config, &config->values[which], err);
    }
    fsdp_json_release(&json);
    return st;
}

/* --- the call ----------------------------------------------------------------------------------- */

static bool is_base_class(const char *name)
{
    size_t size = strlen(name);
    return size > 5 && strcmp(name + size - 5, "Model") == 0;
}

static bool has_class(const fsdp_config *config)
{
    for (int l = 0; l < FSDP_ROW_LISTS && config->architecture->rows[l]; l++)
        for (const fsdp_tensor_row *row = config->architecture->rows[l]; row->name; row++)
            if (row->when && fsdp_formula_names_class(config, row->when))
                return true;
    for (const fsdp_config_member *m = config->architecture->members; m->name; m++)
        if (m->otherwise && fsdp_formula_names_class(config, m->otherwise))
            return true;
    return is_base_class(config->class_name);
}

static fsdp_status fail_unknown(const fsdp_model_kind *kind, const char *path, fsdp_error *err)
{
    char type[80];
    fsdp_printable(kind->type, strlen(kind->type), type, sizeof type);
    if (kind->is_quantized)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' is of a quantized model, whose tensors are not known: name a "
                         "directory with its weights",
                         path);
    if (!kind->type[0])
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has no model_type: name a directory with the model's weights", path);
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "the tensors of model_type '%s' in '%s' are not known: name a directory with "
                     "weights of this model",
                     type, path);
}

fsdp_status fsdp_config_members_read(const char *text, size_t size, const char *path,
                                     fsdp_config *config, fsdp_error *err)
{
    fsdp_model_kind kind;
    *config = (fsdp_config){.path = path};
    FSDP_TRY(fsdp_model_kind_read(text, size, path, &kind, err));
    config->architecture = fsdp_architecture_find(kind.type, strlen(kind.type));
    if (!config->architecture || kind.is_quantized)
        return fail_unknown(&kind, path, err);
    memcpy(config->class_name, kind.class_name, sizeof config->class_name);
    FSDP_TRY(read_values(text, size, config, err));
    config->is_class_known = has_class(config);
    config->any_class = !config->is_class_known;
    return FSDP_OK;
}
