/*
 * Names with variables: "model.layers.{layer}.mlp.{part:gate|up}_proj.weight". A variable stands for a number
 * without leading zeros, or for one of the words after its colon. See map.h.
 */
#include "statedict/map/map_rules.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { DIGITS_MOST = 9 };

int map_variable(fsdp_arena *arena, map_variables *variables, const char *name, size_t size)
{
    for (int i = 0; i < variables->count; i++)
        if (strlen(variables->names[i]) == size && memcmp(variables->names[i], name, size) == 0)
            return i;
    if (variables->count == MAP_VARIABLES)
        return -1;
    variables->names[variables->count] = fsdp_arena_strndup(arena, name, size);
    return variables->names[variables->count] ? variables->count++ : -1;
}

/* The words that the map gives to a variable; NULL: it is a number. */
static const char *find_words(const map_variables *variables, int variable)
{
    const map_words *known = variables->known;
    for (int i = 0; known && i < known->count; i++)
        if (strcmp(known->names[i], variables->names[variable]) == 0)
            return known->words[i];
    return NULL;
}

/* Reads "{name}" or "{name:word|word}" at `text`; *end_out is after it. */
static const char *read_variable(fsdp_arena *arena, const char *text, map_variables *variables,
                                 map_piece *piece, const char **end_out)
{
    const char *close = strchr(text, '}');
    if (!close)
        return "a '{' without '}'";
    const char *colon = memchr(text, ':', (size_t)(close - text));
    const char *end = colon ? colon : close;
    if (end == text + 1)
        return "a variable has no name";
    piece->variable = map_variable(arena, variables, text + 1, (size_t)(end - text - 1));
    if (piece->variable < 0)
        return "there are too many variables";
    piece->words = find_words(variables, piece->variable);
    if (colon) {
        piece->words = fsdp_arena_strndup(arena, colon + 1, (size_t)(close - colon - 1));
        if (!piece->words || !*piece->words)
            return "a variable has no words after its ':'";
    }
    *end_out = close + 1;
    return NULL;
}

const char *map_pattern_read(fsdp_arena *arena, const char *text, map_variables *variables,
                             map_pattern *pattern_out)
{
    *pattern_out = (map_pattern){.text = fsdp_arena_strndup(arena, text, strlen(text))};
    const char *at = pattern_out->text;
    if (!at)
        return "there is no memory for it";
    while (*at) {
        map_piece piece = {.text = at, .text_size = strcspn(at, "{"), .variable = -1};
        at += piece.text_size;
        if (pattern_out->count == MAP_PIECES)
            return "a name has too many variables";
        const char *wrong = *at ? read_variable(arena, at, variables, &piece, &at) : NULL;
        if (wrong)
            return wrong;
        pattern_out->pieces[pattern_out->count++] = piece;
    }
    return NULL;
}

/* --- matching ------------------------------------------------------------------------------------- */

static size_t match_number(const char *name, size_t size, int64_t *value_out)
{
    size_t digits = 0;
    *value_out = 0;
    while (digits < size && digits < DIGITS_MOST && name[digits] >= '0' && name[digits] <= '9')
        *value_out = *value_out * 10 + (name[digits++] - '0');
    return digits > 1 && name[0] == '0' ? 0 : digits;
}

static bool is_rest(const char *words)
{
    return strcmp(words, "*") == 0;
}

/* "{rest:*}" is all that follows, up to the text at the end of the name. */
static size_t match_rest(const map_pattern *pattern, int piece, size_t size, int64_t *value_out)
{
    size_t end = piece + 2 == pattern->count ? pattern->pieces[piece + 1].text_size : 0;
    *value_out = 0;
    return size > end ? size - end : 0;
}

/* The longest word that the name begins with. */
static size_t match_word(const char *words, const char *name, size_t size, int64_t *value_out)
{
    size_t longest = 0;
    for (int64_t number = 0; words; number++) {
        size_t length = strcspn(words, "|");
        if (length > longest && length <= size && memcmp(words, name, length) == 0) {
            longest = length;
            *value_out = number;
        }
        words = words[length] ? words + length + 1 : NULL;
    }
    return longest;
}

bool map_pattern_matches(const map_pattern *pattern, const char *name, size_t size,
                         map_binding *binding_out)
{
    for (int i = 0; i < MAP_VARIABLES; i++)
        binding_out->values[i] = -1;
    binding_out->rest = NULL;
    binding_out->rest_size = 0;
    for (int i = 0; i < pattern->count; i++) {
        const map_piece *piece = &pattern->pieces[i];
        int64_t value = -1;
        if (piece->text_size > size || memcmp(piece->text, name, piece->text_size) != 0)
            return false;
        name += piece->text_size;
        size -= piece->text_size;
        if (piece->variable < 0)
            continue;
        size_t taken = piece->words && is_rest(piece->words) ? match_rest(pattern, i, size, &value)
                       : piece->words ? match_word(piece->words, name, size, &value)
                                      : match_number(name, size, &value);
        int64_t *bound = &binding_out->values[piece->variable];
        if (taken == 0 || (*bound >= 0 && *bound != value))
            return false;
        *bound = value;
        if (piece->words && is_rest(piece->words)) {
            binding_out->rest = name;
            binding_out->rest_size = taken;
        }
        name += taken;
        size -= taken;
    }
    return size == 0;
}

bool map_pattern_has_rest(const map_pattern *pattern)
{
    for (int i = 0; i < pattern->count; i++)
        if (pattern->pieces[i].words && is_rest(pattern->pieces[i].words))
            return true;
    return false;
}

static bool render_rest(const map_binding *binding, fsdp_text *out)
{
    fsdp_text_add(out, binding->rest ? binding->rest : "", binding->rest_size);
    return binding->rest != NULL;
}

static bool render_word(const char *words, int64_t number, fsdp_text *out)
{
    for (; number > 0; number--) {
        words += strcspn(words, "|");
        if (!*words)
            return false;
        words++;
    }
    fsdp_text_add(out, words, strcspn(words, "|"));
    return true;
}

bool map_pattern_render(const map_pattern *pattern, const map_binding *binding, fsdp_text *out)
{
    for (int i = 0; i < pattern->count; i++) {
        const map_piece *piece = &pattern->pieces[i];
        fsdp_text_add(out, piece->text, piece->text_size);
        if (piece->variable < 0)
            continue;
        int64_t value = binding->values[piece->variable];
        bool takes_rest = piece->words && is_rest(piece->words);
        if (value < 0 || (takes_rest && !render_rest(binding, out)) ||
            (piece->words && !takes_rest && !render_word(piece->words, value, out)))
            return false;
        if (!piece->words)
            fsdp_text_addf(out, "%" PRId64, value);
    }
    return true;
}
