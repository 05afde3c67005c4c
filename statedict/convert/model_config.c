/* Edits of config.json: see model_config.h. */
#include "statedict/convert/model_config.h"

#include "base/data/json.h"
#include "base/core/mem.h"
#include "base/text.h"

#include <stdio.h>
#include <string.h>

typedef enum cut_kind { REMOVED, TO_DTYPE, TO_FALSE } cut_kind;

/* A range of the text and its replacement. */
typedef struct config_cut {
    const char *from, *to;
    cut_kind kind;
} config_cut;

typedef struct config_walk {
    fsdp_json json;
    const fsdp_config_edits *edits;
    const char *first_key; /* of the whole text, or NULL */
    bool says_tied;        /* it has tie_word_embeddings, or its text_config has */
    config_cut *cuts;
    size_t cut_count, cut_room;
    char was[32];
} config_walk;

/* The place of an object: at the top, in a member "NAME_config" of the top, or elsewhere. */
typedef enum config_place { AT_TOP, IN_TEXT_CONFIG, IN_OTHER_CONFIG, ELSEWHERE } config_place;

static config_place place_below(config_place place, const char *key, size_t size)
{
    static const char end[] = "_config";
    size_t n = sizeof end - 1;
    if (place != AT_TOP || size < n || memcmp(key + size - n, end, n) != 0 ||
        fsdp_bytes_are(key, size, "quantization_config"))
        return ELSEWHERE;
    return fsdp_bytes_are(key, size, "text_config") ? IN_TEXT_CONFIG : IN_OTHER_CONFIG;
}

/* --- edits ------------------------------------------------------------------------------------ */

/* Ranges arrive in the order of their ends; one that contains earlier ones replaces them. */
static fsdp_status add_cut(config_walk *walk, config_cut cut, fsdp_error *err)
{
    while (walk->cut_count > 0 && walk->cuts[walk->cut_count - 1].to > cut.from) {
        const config_cut *last = &walk->cuts[--walk->cut_count];
        cut.from = last->from < cut.from ? last->from : cut.from;
    }
    if (!fsdp_grow(&walk->cuts, &walk->cut_room, walk->cut_count + 1, sizeof *walk->cuts))
        return fsdp_fail_memory(err, walk->json.name);
    walk->cuts[walk->cut_count++] = cut;
    return FSDP_OK;
}

/* The member is added before the first one, which no cut removes then. */
static bool lacks_tied(const config_walk *walk)
{
    return walk->edits->untied && !walk->says_tied && walk->first_key &&
           (walk->cut_count == 0 || walk->cuts[0].from >= walk->first_key);
}

static fsdp_status apply_cuts(const config_walk *walk, fsdp_text *out, fsdp_error *err)
{
    const char *at = walk->json.text;
    if (lacks_tied(walk)) {
        fsdp_text_add(out, at, (size_t)(walk->first_key - at));
        fsdp_text_addf(out, "\"tie_word_embeddings\": false,\n  ");
        at = walk->first_key;
    }
    for (size_t i = 0; i < walk->cut_count; i++) {
        const config_cut *cut = &walk->cuts[i];
        fsdp_text_add(out, at, (size_t)(cut->from - at));
        if (cut->kind == TO_DTYPE)
            fsdp_text_addf(out, "\"%s\"", walk->edits->dtype);
        else if (cut->kind == TO_FALSE)
            fsdp_text_addf(out, "false");
        at = cut->to;
    }
    if (at != walk->json.text)
        fsdp_text_add(out, at, (size_t)(walk->json.end - at));
    return out->failed ? fsdp_fail_memory(err, walk->json.name) : FSDP_OK;
}

/* kept_end: the end of the last kept member before this one, or of the brace. */
static fsdp_status cut_member(config_walk *walk, const char *key, const char *kept_end,
                              fsdp_error *err)
{
    const char *end = walk->json.at;
    if (fsdp_json_peek(&walk->json) == FSDP_JSON_END || *walk->json.at != ',')
        return add_cut(walk, (config_cut){.from = kept_end, .to = end}, err);
    const char *next = walk->json.at + 1; /* not consumed: the reader takes the comma itself */
    while (next < walk->json.end && strchr(" \t\r\n", *next))
        next++;
    return add_cut(walk, (config_cut){.from = key, .to = next}, err);
}

/* --- members ---------------------------------------------------------------------------------- */

static fsdp_status walk_value(config_walk *walk, config_place place, fsdp_error *err);

/* Skips NaN, Infinity and -Infinity, which Python writes and JSON does not have. */
static bool skip_word(fsdp_json *json)
{
    static const char *const words[] = {"NaN", "Infinity", "-Infinity"};
    (void)fsdp_json_peek(json); /* skips white space */
    for (int i = 0; i < 3; i++) {
        size_t n = strlen(words[i]);
        if ((size_t)(json->end - json->at) >= n && memcmp(json->at, words[i], n) == 0) {
            json->at += n;
            return true;
        }
    }
    return false;
}

static fsdp_status read_dtype(config_walk *walk, fsdp_error *err)
{
    const char *data;
    size_t size;
    if (fsdp_json_peek(&walk->json) != FSDP_JSON_STRING)
        return walk_value(walk, ELSEWHERE, err);
    const char *from = walk->json.at;
    FSDP_TRY(fsdp_json_string(&walk->json, &data, &size, err));
    const char *wanted = walk->edits->dtype;
    if (!wanted || fsdp_bytes_are(data, size, wanted))
        return FSDP_OK;
    if (!walk->was[0])
        fsdp_printable(data, size, walk->was, sizeof walk->was);
    return add_cut(walk, (config_cut){from, walk->json.at, TO_DTYPE}, err);
}

static fsdp_status read_tied(config_walk *walk, fsdp_error *err)
{
    bool value;
    if (fsdp_json_peek(&walk->json) != FSDP_JSON_BOOL)
        return walk_value(walk, ELSEWHERE, err);
    const char *from = walk->json.at;
    FSDP_TRY(fsdp_json_bool(&walk->json, &value, err));
    walk->says_tied = true;
    return value && walk->edits->untied
               ? add_cut(walk, (config_cut){from, walk->json.at, TO_FALSE}, err)
               : FSDP_OK;
}

static fsdp_status walk_member(config_walk *walk, config_place place, const char *key, size_t size,
                               fsdp_error *err)
{
    if (place != ELSEWHERE &&
        (fsdp_bytes_are(key, size, "dtype") || fsdp_bytes_are(key, size, "torch_dtype")))
        return read_dtype(walk, err);
    if ((place == AT_TOP || place == IN_TEXT_CONFIG) &&
        fsdp_bytes_are(key, size, "tie_word_embeddings"))
        return read_tied(walk, err);
    return walk_value(walk, place_below(place, key, size), err);
}

/* --- values ----------------------------------------------------------------------------------- */

static const char *start_of_key(const char *at, const char *end)
{
    while (at < end && *at != '"')
        at++;
    return at;
}

static bool is_removed(const fsdp_config_edits *edits, const char *key, size_t size)
{
    return (edits->no_code && fsdp_bytes_are(key, size, "auto_map")) ||
           (edits->no_quantization && fsdp_bytes_are(key, size, "quantization_config"));
}

static fsdp_status walk_object(config_walk *walk, config_place place, fsdp_error *err)
{
    fsdp_json *json = &walk->json;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (const char *kept_end = json->at;;) {
        const char *key, *before = json->at;
        size_t size;
        bool more;
        FSDP_TRY(fsdp_json_next_key(json, &key, &size, &more, err));
        if (!more)
            return FSDP_OK;
        if (place == AT_TOP && !walk->first_key)
            walk->first_key = start_of_key(before, json->end);
        bool goes = is_removed(walk->edits, key, size);
        FSDP_TRY(goes ? walk_value(walk, ELSEWHERE, err)
                      : walk_member(walk, place, key, size, err));
        if (goes)
            FSDP_TRY(cut_member(walk, start_of_key(before, json->end), kept_end, err));
        else
            kept_end = json->at;
    }
}

static fsdp_status walk_array(config_walk *walk, fsdp_error *err)
{
    bool more;
    FSDP_TRY(fsdp_json_enter_array(&walk->json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_item(&walk->json, &more, err));
        if (!more)
            return FSDP_OK;
        FSDP_TRY(walk_value(walk, ELSEWHERE, err));
    }
}

static fsdp_status walk_value(config_walk *walk, config_place place, fsdp_error *err)
{
    switch (fsdp_json_peek(&walk->json)) {
    case FSDP_JSON_OBJECT: return walk_object(walk, place, err);
    case FSDP_JSON_ARRAY: return walk_array(walk, err);
    case FSDP_JSON_NUMBER:
        if (skip_word(&walk->json))
            return FSDP_OK;
        return fsdp_json_skip(&walk->json, err);
    default: return fsdp_json_skip(&walk->json, err);
    }
}

/* --- the calls -------------------------------------------------------------------------------- */

static fsdp_status walk_text(config_walk *walk, const char *text, size_t size, const char *path,
                             fsdp_error *err)
{
    fsdp_json_init(&walk->json, text, size, path);
    if (fsdp_json_peek(&walk->json) != FSDP_JSON_OBJECT)
        return fsdp_json_fail(&walk->json, err, "a JSON object was expected");
    FSDP_TRY(walk_value(walk, AT_TOP, err));
    return fsdp_json_finish(&walk->json, err);
}

fsdp_status fsdp_model_config_edit(const char *text, size_t size, const char *path,
                                   const fsdp_config_edits *edits, fsdp_edited_config *out,
                                   fsdp_error *err)
{
    config_walk walk = {.edits = edits};
    fsdp_status st = walk_text(&walk, text, size, path, err);
    if (st == FSDP_OK)
        st = apply_cuts(&walk, &out->text, err);
    memcpy(out->was, walk.was, sizeof walk.was);
    fsdp_json_release(&walk.json);
    fsdp_free(walk.cuts);
    return st;
}
