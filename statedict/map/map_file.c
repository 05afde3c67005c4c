/*
 * Reads the text of a map: names with variables, rules, and the rules that they stand for. A line is a
 * setting ("size heads = num_attention_heads"), the left side of a rule, or, indented, a step of the rule or
 * "= RIGHT". See map.h and docs/maps.md.
 */
#include "statedict/map/map_rules.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { WORDS_MOST = 40, DIGITS_MOST = 9 };

static fsdp_status no_memory(fsdp_error *err)
{
    return fsdp_fail_memory(err, "a map");
}

/* === names with variables ===================================================================== */

/*
 * "model.layers.{layer}.mlp.{part:gate|up}_proj.weight": a variable stands for a number without leading
 * zeros, or for one of the words after its colon.
 */

/* The number of a variable, which is added if it is new; -1: too many. */
static int find_variable(fsdp_arena *arena, map_variables *variables, const char *name, size_t size)
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
static const char *read_piece(fsdp_arena *arena, const char *text, map_variables *variables,
                              map_piece *piece, const char **end_out)
{
    const char *close = strchr(text, '}');
    if (!close)
        return "a '{' without '}'";
    const char *colon = memchr(text, ':', (size_t)(close - text));
    const char *end = colon ? colon : close;
    if (end == text + 1)
        return "a variable has no name";
    piece->variable = find_variable(arena, variables, text + 1, (size_t)(end - text - 1));
    if (piece->variable < 0)
        return "there are too many variables";
    piece->words = find_words(variables, piece->variable);
    if (colon) {
        piece->words = fsdp_arena_strndup(arena, colon + 1, (size_t)(close - colon - 1));
        if (!piece->words || !*piece->words)
            return "a variable has no words after its ':'";
    }
    piece->is_rest = piece->words && strcmp(piece->words, "*") == 0;
    *end_out = close + 1;
    return NULL;
}

/* Reads a pattern, and adds its variables. NULL, or the reason why it is wrong. */
static const char *read_pattern(fsdp_arena *arena, const char *text, map_variables *variables,
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
        const char *wrong = *at ? read_piece(arena, at, variables, &piece, &at) : NULL;
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
        size_t taken = piece->is_rest ? match_rest(pattern, i, size, &value)
                       : piece->words ? match_word(piece->words, name, size, &value)
                                      : match_number(name, size, &value);
        int64_t *bound = &binding_out->values[piece->variable];
        if (taken == 0 || (*bound >= 0 && *bound != value))
            return false;
        *bound = value;
        if (piece->is_rest) {
            binding_out->rest = name;
            binding_out->rest_size = taken;
        }
        name += taken;
        size -= taken;
    }
    return size == 0;
}

/* True for a pattern with "{rest:*}". */
static bool has_rest(const map_pattern *pattern)
{
    for (int i = 0; i < pattern->count; i++)
        if (pattern->pieces[i].is_rest)
            return true;
    return false;
}

/* === rules for further names ================================================================== */

/* Rules hold for frames (moments of an optimizer), for single rows of a stacked tensor, and below a key. */

/* "optimizer.state.{m:exp_avg}.*" around a name */
static fsdp_status frame_names(fsdp_map *map, map_rule *rule, const char *frame, bool right,
                               fsdp_error *err)
{
    map_pattern *names = right ? rule->right : rule->left;
    int count = right ? rule->right_count : rule->left_count;
    const char *star = strchr(frame, '*');
    for (int i = 0; i < count; i++) {
        fsdp_text text = {0};
        fsdp_text_addf(&text, "%.*s%s%s", (int)(star - frame), frame, names[i].text, star + 1);
        const char *wrong = text.failed
                                ? "there is no memory for it"
                                : read_pattern(&map->arena, text.data, &rule->variables, &names[i]);
        fsdp_text_release(&text);
        if (wrong)
            return fsdp_fail(err, FSDP_ERR_USAGE, "%s, line %d: %s", map->path, rule->line, wrong);
    }
    return FSDP_OK;
}

static fsdp_status copy_rule(fsdp_map *map, const map_rule *rule, map_rule **copy_out,
                             fsdp_error *err)
{
    if (map->rule_count == MAP_RULES)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' has more than %d rules, with those of frames",
                         map->path, MAP_RULES);
    *copy_out = fsdp_arena_alloc(&map->arena, 1, sizeof **copy_out);
    if (!*copy_out || !fsdp_grow(&map->rules, &map->rule_room, map->rule_count + 1, sizeof(void *)))
        return no_memory(err);
    **copy_out = *rule;
    map->rules[map->rule_count++] = *copy_out;
    return FSDP_OK;
}

/* Repeats every rule in every frame. */
static fsdp_status add_frames(fsdp_map *map, fsdp_error *err)
{
    size_t plain = map->rule_count;
    map_rule *copy;
    for (size_t f = 0; f < map->frame_count; f++) {
        for (size_t i = 0; i < plain; i++) {
            FSDP_TRY(copy_rule(map, map->rules[i], &copy, err));
            FSDP_TRY(frame_names(map, copy, map->frames[f][0], false, err));
            FSDP_TRY(frame_names(map, copy, map->frames[f][1], true, err));
        }
    }
    return FSDP_OK;
}

/* The names of a rule below a key. */
static fsdp_status put_below(fsdp_map *map, map_rule *rule, const char *frame, fsdp_error *err)
{
    FSDP_TRY(frame_names(map, rule, frame, false, err));
    return frame_names(map, rule, frame, true, err);
}

static fsdp_status put_tied_below(fsdp_map *map, const char *key, size_t size, fsdp_error *err)
{
    for (size_t i = 0; i < map->tied_count; i++) {
        fsdp_text text = {0};
        fsdp_text_addf(&text, "%.*s%s", (int)size, key, map->tied[i].name);
        map->tied[i].name =
            text.failed ? NULL : fsdp_arena_strndup(&map->arena, text.data, text.size);
        fsdp_text_release(&text);
        if (!map->tied[i].name)
            return no_memory(err);
    }
    return FSDP_OK;
}

fsdp_status fsdp_map_put_below(fsdp_map *map, const char *key, size_t size, fsdp_error *err)
{
    fsdp_text frame = {0};
    fsdp_text_addf(&frame, "%.*s*", (int)size, key);
    fsdp_status st = frame.failed ? no_memory(err) : FSDP_OK;
    for (size_t i = 0; i < map->rule_count && st == FSDP_OK; i++)
        st = put_below(map, map->rules[i], frame.data, err);
    fsdp_text_release(&frame);
    return st == FSDP_OK ? put_tied_below(map, key, size, err) : st;
}

/* The rule for a tensor per row, where its first step takes the rows out of one tensor. */
static fsdp_status add_unstacked_rule(fsdp_map *map, const map_rule *rule,
                                      const char *const names[2], fsdp_error *err)
{
    size_t size = strlen(names[0]);
    map_rule *copy;
    if (rule->step_count == 0 || rule->steps[0].verb != MAP_UNSTACK || rule->left_count != 1 ||
        strncmp(rule->left[0].text, names[0], size) != 0)
        return FSDP_OK;
    FSDP_TRY(copy_rule(map, rule, &copy, err));
    fsdp_text text = {0};
    fsdp_text_addf(&text, "%s%s", names[1], rule->left[0].text + size);
    const char *wrong =
        text.failed ? "there is no memory for it"
                    : read_pattern(&map->arena, text.data, &copy->variables, &copy->left[0]);
    fsdp_text_release(&text);
    if (wrong)
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s, line %d: %s", map->path, rule->line, wrong);
    memmove(copy->steps, copy->steps + 1, (size_t)--copy->step_count * sizeof *copy->steps);
    copy->directions &= MAP_TO_RIGHT;
    return FSDP_OK;
}

static fsdp_status add_unstacked(fsdp_map *map, fsdp_error *err)
{
    size_t plain = map->rule_count;
    for (size_t u = 0; u < map->unstacked_count; u++)
        for (size_t i = 0; i < plain; i++)
            FSDP_TRY(add_unstacked_rule(map, map->rules[i], map->unstacked[u], err));
    return FSDP_OK;
}

/* Adds the rules of unstacked names and of frames. */
static fsdp_status repeat_rules(fsdp_map *map, fsdp_error *err)
{
    FSDP_TRY(add_unstacked(map, err));
    return add_frames(map, err);
}

/* === lines ==================================================================================== */

typedef struct map_reader {
    fsdp_map *map;
    const char *at, *end;
    int line;
    map_rule *rule;          /* that is being read; NULL: none */
    bool has_right;          /* it is complete but for further names of its right side */
    char *words[WORDS_MOST]; /* of the line */
    int count;
    bool is_indented;
} map_reader;

static fsdp_status refuse(const map_reader *reader, const char *why, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_USAGE, "%s, line %d: %s", reader->map->path, reader->line, why);
}

/* --- words of a line ---------------------------------------------------------------------------- */

/* A comment begins with a '#' that no word has before it. */
static void cut_comment(char *line)
{
    line[strcspn(line, "\r")] = '\0';
    for (char *at = line; *at; at++)
        if (*at == '#' && (at == line || at[-1] == ' ' || at[-1] == '\t'))
            *at = '\0';
}

/* Cuts the next line into words. False at the end of the text. */
static bool next_line(map_reader *reader, fsdp_status *status_out, fsdp_error *err)
{
    *status_out = FSDP_OK;
    if (reader->at == reader->end)
        return false;
    const char *stop = memchr(reader->at, '\n', (size_t)(reader->end - reader->at));
    stop = stop ? stop : reader->end;
    char *line = fsdp_arena_strndup(&reader->map->arena, reader->at, (size_t)(stop - reader->at));
    reader->at = stop < reader->end ? stop + 1 : stop;
    reader->line++;
    reader->count = 0;
    if (!line) {
        *status_out = no_memory(err);
        return false;
    }
    cut_comment(line);
    reader->is_indented = *line == ' ' || *line == '\t';
    for (char *word, *rest = line; (word = strtok_r(NULL, " \t", &rest)) != NULL;) {
        if (reader->count == WORDS_MOST) {
            *status_out = refuse(reader, "there are too many words", err);
            return false;
        }
        reader->words[reader->count++] = word;
    }
    return true;
}

/* --- settings ------------------------------------------------------------------------------------- */

/* The words from `first` on, with spaces between them. */
static const char *join_words(const map_reader *reader, int first)
{
    fsdp_text text = {0};
    for (int i = first; i < reader->count; i++)
        fsdp_text_addf(&text, "%s%s", i > first ? " " : "", reader->words[i]);
    const char *joined = text.failed ? NULL
                                     : fsdp_arena_strndup(&reader->map->arena,
                                                          text.data ? text.data : "", text.size);
    fsdp_text_release(&text);
    return joined;
}

static fsdp_status read_size(map_reader *reader, fsdp_error *err)
{
    fsdp_map *map = reader->map;
    if (reader->count < 4 || strcmp(reader->words[2], "=") != 0)
        return refuse(reader, "a size is: size NAME = SOURCE | SOURCE ...", err);
    if (map->size_count == MAP_SIZES)
        return refuse(reader, "there are too many sizes", err);
    for (size_t i = 0; i < map->size_count; i++)
        if (strcmp(map->sizes[i].name, reader->words[1]) == 0)
            return refuse(reader, "the size is here twice", err);
    map_size size = {reader->words[1], join_words(reader, 3), reader->line};
    if (!size.sources)
        return no_memory(err);
    map->sizes[map->size_count++] = size;
    return FSDP_OK;
}

static fsdp_status read_frame(map_reader *reader, fsdp_error *err)
{
    fsdp_map *map = reader->map;
    bool is_frame = reader->count == 4 && strcmp(reader->words[2], "=") == 0 &&
                    strchr(reader->words[1], '*') && strchr(reader->words[3], '*');
    if (!is_frame)
        return refuse(reader, "a frame is: frame LEFT*NAME = RIGHT*NAME", err);
    if (map->frame_count == MAP_NAMES || map->rule_count > 0)
        return refuse(reader, "frames come before the rules, and are at most 16", err);
    map->frames[map->frame_count][0] = reader->words[1];
    map->frames[map->frame_count++][1] = reader->words[3];
    return FSDP_OK;
}

static fsdp_status read_unstacked(map_reader *reader, fsdp_error *err)
{
    fsdp_map *map = reader->map;
    if (reader->count != 4 || strcmp(reader->words[2], "=") != 0)
        return refuse(reader, "names of single rows are: unstacked PREFIX = PREFIX{variable}.",
                      err);
    if (map->unstacked_count == MAP_NAMES || map->rule_count > 0)
        return refuse(reader, "unstacked names come before the rules, and are at most 16", err);
    map->unstacked[map->unstacked_count][0] = reader->words[1];
    map->unstacked[map->unstacked_count++][1] = reader->words[3];
    return FSDP_OK;
}

static fsdp_status read_value(map_reader *reader, fsdp_error *err)
{
    fsdp_map *map = reader->map;
    bool right = reader->count == 5 && strcmp(reader->words[1], "right") == 0;
    bool left = reader->count == 5 && strcmp(reader->words[1], "left") == 0;
    if ((!left && !right) || strcmp(reader->words[3], "=") != 0)
        return refuse(reader, "a value of a side is: value left NAME = SIZE", err);
    if (map->number_count == MAP_SIZES)
        return refuse(reader, "there are too many values", err);
    map->numbers[map->number_count++] =
        (map_number){reader->words[2], reader->words[4], right, reader->line};
    return FSDP_OK;
}

/* "words NAME = WORD|WORD" */
static fsdp_status read_words(map_reader *reader, fsdp_error *err)
{
    map_words *words = &reader->map->words;
    if (reader->count != 4 || strcmp(reader->words[2], "=") != 0)
        return refuse(reader, "words of a variable are: words NAME = WORD|WORD", err);
    if (words->count == MAP_NAMES)
        return refuse(reader, "there are at most 16 lines for words", err);
    words->names[words->count] = reader->words[1];
    words->words[words->count++] = reader->words[3];
    return FSDP_OK;
}

/* "values LEFT* = RIGHT*" */
static fsdp_status read_values(map_reader *reader, fsdp_error *err)
{
    fsdp_map *map = reader->map;
    const char *left = reader->count == 4 ? reader->words[1] : "", *right = reader->words[3];
    size_t sizes[2] = {strlen(left), *left ? strlen(right) : 0};
    if (!*left || strcmp(reader->words[2], "=") != 0 || strcspn(left, "*") + 1 != sizes[0] ||
        strcspn(right, "*") + 1 != sizes[1])
        return refuse(reader, "names of values are: values LEFT* = RIGHT*", err);
    if (map->value_count == MAP_NAMES)
        return refuse(reader, "there are at most 16 lines for values", err);
    for (int side = 0; side < 2; side++) {
        const char *text = fsdp_arena_strndup(&map->arena, side ? right : left, sizes[side] - 1);
        if (!text)
            return no_memory(err);
        map->values[map->value_count][side] = text;
    }
    map->value_count++;
    return FSDP_OK;
}

/* "tied left NAME ..." */
static fsdp_status read_tied(map_reader *reader, fsdp_error *err)
{
    fsdp_map *map = reader->map;
    bool right = reader->count > 2 && strcmp(reader->words[1], "right") == 0;
    if (reader->count < 3 || (!right && strcmp(reader->words[1], "left") != 0))
        return refuse(reader,
                      "names of tied tensors are: tied left NAME ..., or tied right NAME ...", err);
    for (int i = 2; i < reader->count; i++) {
        if (map->tied_count == MAP_NAMES)
            return refuse(reader, "there are at most 16 names of tied tensors", err);
        map->tied[map->tied_count++] = (map_tied){reader->words[i], right};
    }
    return FSDP_OK;
}

/* "numbered NAME" */
static fsdp_status read_numbered(map_reader *reader, fsdp_error *err)
{
    fsdp_map *map = reader->map;
    if (reader->count != 2)
        return refuse(reader, "names that numbers count are: numbered NAME", err);
    if (map->numbered_count == MAP_NAMES)
        return refuse(reader, "there are at most 16 lines for names that numbers count", err);
    map_numbered *numbered = &map->numbered[map->numbered_count++];
    numbered->variables.known = &map->words;
    const char *wrong =
        read_pattern(&map->arena, reader->words[1], &numbered->variables, &numbered->name);
    return wrong ? refuse(reader, wrong, err) : FSDP_OK;
}

static fsdp_status read_keep(map_reader *reader, fsdp_error *err)
{
    if (reader->count != 2 || strcmp(reader->words[1], "others") != 0)
        return refuse(reader, "tensors that no rule takes stay by: keep others", err);
    reader->map->keeps_others = true;
    return FSDP_OK;
}

/* "left LAYOUT", "right LAYOUT for TYPE TYPE" */
static fsdp_status read_side(map_reader *reader, fsdp_error *err)
{
    fsdp_map *map = reader->map;
    bool right = reader->words[0][0] == 'r';
    bool has_types = reader->count > 3 && strcmp(reader->words[2], "for") == 0;
    if (reader->count != 2 && !has_types)
        return refuse(reader, "a side is: left LAYOUT, or right LAYOUT for MODEL_TYPE ...", err);
    map->layouts[right] = reader->words[1];
    if (has_types)
        map->types = join_words(reader, 3);
    return has_types && !map->types ? no_memory(err) : FSDP_OK;
}

static fsdp_status add_rule(map_reader *reader, fsdp_error *err);
static fsdp_status add_names(map_reader *reader, int first, map_pattern *names, int *count,
                             fsdp_error *err);

/* "drop left NAME ..." */
static fsdp_status read_drop(map_reader *reader, fsdp_error *err)
{
    bool right = reader->count > 2 && strcmp(reader->words[1], "right") == 0;
    if (reader->rule && !reader->has_right)
        return refuse(reader, "the rule before has no right side", err);
    if (reader->count < 3 || (!right && strcmp(reader->words[1], "left") != 0))
        return refuse(reader, "names are left out by: drop left NAME ..., or drop right NAME ...",
                      err);
    FSDP_TRY(add_rule(reader, err));
    map_rule *rule = reader->rule;
    rule->directions = right ? MAP_TO_LEFT : MAP_TO_RIGHT;
    FSDP_TRY(add_names(reader, 2, right ? rule->right : rule->left,
                       right ? &rule->right_count : &rule->left_count, err));
    reader->rule = NULL;
    return FSDP_OK;
}

/* --- rules ---------------------------------------------------------------------------------------- */

static fsdp_status add_rule(map_reader *reader, fsdp_error *err)
{
    fsdp_map *map = reader->map;
    if (map->rule_count == MAP_RULES)
        return refuse(reader, "there are too many rules", err);
    map_rule *rule = fsdp_arena_alloc(&map->arena, 1, sizeof *rule);
    if (!rule || !fsdp_grow(&map->rules, &map->rule_room, map->rule_count + 1, sizeof(void *)))
        return no_memory(err);
    rule->line = reader->line;
    rule->variables.known = &map->words;
    rule->directions = MAP_TO_LEFT | MAP_TO_RIGHT;
    map->rules[map->rule_count++] = reader->rule = rule;
    reader->has_right = false;
    return FSDP_OK;
}

static fsdp_status add_names(map_reader *reader, int first, map_pattern *names, int *count,
                             fsdp_error *err)
{
    for (int i = first; i < reader->count; i++) {
        if (*count == MAP_NAMES)
            return refuse(reader, "a side of a rule has at most 16 names", err);
        const char *wrong = read_pattern(&reader->map->arena, reader->words[i],
                                         &reader->rule->variables, &names[(*count)++]);
        if (wrong)
            return refuse(reader, wrong, err);
    }
    return FSDP_OK;
}

/* "=" both ways, ">" only to the right, "<" only to the left. */
static int directions_of(const char *sign)
{
    if (sign[0] == '\0' || sign[1] != '\0')
        return 0;
    return *sign == '='   ? MAP_TO_LEFT | MAP_TO_RIGHT
           : *sign == '>' ? MAP_TO_RIGHT
           : *sign == '<' ? MAP_TO_LEFT
                          : 0;
}

static bool is_one_way(const map_rule *rule)
{
    for (int i = 0; i < rule->step_count; i++) {
        const map_step *step = &rule->steps[i];
        if (step->verb == MAP_FIRST || step->verb == MAP_NUMBER ||
            (step->verb == MAP_GATHER && step->size_count == 0))
            return true;
    }
    return false;
}

static fsdp_status read_right(map_reader *reader, int sign, fsdp_error *err)
{
    map_rule *rule = reader->rule;
    rule->directions = directions_of(reader->words[sign]);
    if (sign + 1 == reader->count)
        return refuse(reader, "a rule has a name on its right side", err);
    if ((rule->directions & MAP_TO_LEFT) && is_one_way(rule))
        return refuse(reader,
                      "'first', 'number' and a 'gather' without a number have no way back: write >",
                      err);
    FSDP_TRY(add_names(reader, sign + 1, rule->right, &rule->right_count, err));
    reader->has_right = true;
    bool left = has_rest(&rule->left[0]), right = has_rest(&rule->right[0]);
    rule->has_rest = left && right;
    return left == right && (!left || (rule->step_count == 0 && rule->left_count == 1 &&
                                       rule->right_count == 1))
               ? FSDP_OK
               : refuse(reader, "a rule with '{rest:*}' has it once on either side, and no steps",
                        err);
}

/* "+ NAME": one more name of the side that was read last. */
static fsdp_status read_more_names(map_reader *reader, fsdp_error *err)
{
    map_rule *rule = reader->rule;
    if (reader->has_right)
        return add_names(reader, 1, rule->right, &rule->right_count, err);
    if (rule->step_count > 0)
        return refuse(reader, "names of the left side come before the steps", err);
    return add_names(reader, 1, rule->left, &rule->left_count, err);
}

/* The left side, and on the same line perhaps the right one. */
static fsdp_status read_left(map_reader *reader, fsdp_error *err)
{
    int sign = 0, count = reader->count;
    if (reader->rule && !reader->has_right)
        return refuse(reader, "the rule before has no right side", err);
    while (sign < count && directions_of(reader->words[sign]) == 0)
        sign++;
    if (sign == 0)
        return refuse(reader, "a rule has a name on its left side", err);
    FSDP_TRY(add_rule(reader, err));
    reader->count = sign;
    FSDP_TRY(add_names(reader, 0, reader->rule->left, &reader->rule->left_count, err));
    reader->count = count;
    return sign < count ? read_right(reader, sign, err) : FSDP_OK;
}

/* --- steps ---------------------------------------------------------------------------------------- */

/* The arguments of a verb: d a dim, v a variable, V others (at least two), s a size, S sizes (at least one),
 * t sizes or none, o an order of dims, f a factor, : a colon between sizes. */
static const struct {
    const char *name, *arguments;
    map_verb verb;
} verbs[] = {{"stack", "dv", MAP_STACK},
             {"unstack", "dv", MAP_UNSTACK},
             {"gather", "dvt", MAP_GATHER},
             {"scatter", "dvs", MAP_SCATTER},
             {"concat", "dt", MAP_CONCAT},
             {"split", "dt", MAP_SPLIT},
             {"flatten", "dS", MAP_FLATTEN},
             {"unflatten", "dS", MAP_UNFLATTEN},
             {"pad", "dss", MAP_PAD},
             {"unpad", "dss", MAP_UNPAD},
             {"transpose", "dd", MAP_TRANSPOSE},
             {"permute", "o", MAP_PERMUTE},
             {"reshape", ":", MAP_RESHAPE},
             {"scale", "f", MAP_SCALE},
             {"add", "f", MAP_ADD},
             {"exp", "", MAP_EXP},
             {"log", "", MAP_LOG},
             {"first", "v", MAP_FIRST},
             {"number", "vV", MAP_NUMBER}};

static bool read_dim(const char *word, int *dim_out)
{
    char *end;
    long dim = strtol(word, &end, 10);
    *dim_out = (int)dim;
    return *word >= '0' && *word <= '9' && *end == '\0' && dim < FSDP_MAX_DIMS;
}

static bool read_number(const char *word, double *factor_out)
{
    char *end;
    *factor_out = strtod(word, &end);
    return end != word && *end == '\0' && isfinite(*factor_out) && isfinite(1 / *factor_out);
}

static bool read_sizes(map_reader *reader, int first, int least, map_step *step)
{
    step->split_at = -1;
    for (int i = first; i < reader->count; i++) {
        bool is_colon = strcmp(reader->words[i], ":") == 0;
        if (is_colon && step->split_at >= 0)
            return false;
        if (is_colon)
            step->split_at = step->size_count;
        else if (step->size_count < MAP_NAMES)
            step->sizes[step->size_count++] = reader->words[i];
        else
            return false;
    }
    return step->size_count >= least;
}

/* "{name}" */
static bool read_variable(map_reader *reader, const char *word, int *variable_out)
{
    size_t size = strlen(word);
    if (size < 3 || word[0] != '{' || word[size - 1] != '}')
        return false;
    *variable_out =
        find_variable(&reader->map->arena, &reader->rule->variables, word + 1, size - 2);
    return *variable_out >= 0;
}

/* The variables that a number counts together, each once and none the number itself. */
static bool read_counted(map_reader *reader, const char *word, map_step *step)
{
    int *added = &step->counted[step->counted_count++];
    if (!read_variable(reader, word, added) || *added == step->variable)
        return false;
    for (const int *before = step->counted; before < added; before++)
        if (*before == *added)
            return false;
    return true;
}

/* Each dim once. */
static bool read_order(const map_reader *reader, int *at, map_step *step)
{
    for (; *at < reader->count && step->order_count < MAP_NAMES; (*at)++)
        if (!read_dim(reader->words[*at], &step->order[step->order_count++]))
            return false;
    unsigned seen = 0;
    for (int d = 0; d < step->order_count; d++)
        seen |= 1U << (step->order[d] < MAP_NAMES ? step->order[d] : MAP_NAMES);
    return step->order_count > 0 && seen == (1U << step->order_count) - 1;
}

static bool read_argument(map_reader *reader, char kind, int *at, map_step *step)
{
    const char *word = *at < reader->count ? reader->words[*at] : "";
    switch (kind) {
    case 'd':
        (*at)++;
        return read_dim(word, step->order_count++ == 0 ? &step->dim : &step->order[0]);
    case 's':
        step->sizes[step->size_count++] = word;
        (*at)++;
        return *word != '\0';
    case 'f': (*at)++; return read_number(word, &step->factor);
    case 'v': (*at)++; return read_variable(reader, word, &step->variable);
    case 'V':
        for (; *at < reader->count && step->counted_count < MAP_COUNTED; (*at)++)
            if (!read_counted(reader, reader->words[*at], step))
                return false;
        return step->counted_count > 1;
    case 'o': return read_order(reader, at, step);
    default: {
        bool is_read = read_sizes(reader, *at, kind == 't' ? 0 : 1, step);
        *at = reader->count;
        return is_read && (kind == ':' ? step->split_at > 0 : step->split_at < 0);
    }
    }
}

static bool changes_a_tensor(map_verb verb)
{
    return verb == MAP_FLATTEN || verb == MAP_UNFLATTEN || verb == MAP_PAD || verb == MAP_UNPAD ||
           verb == MAP_TRANSPOSE || verb == MAP_PERMUTE || verb == MAP_RESHAPE ||
           verb == MAP_SCALE || verb == MAP_ADD || verb == MAP_EXP || verb == MAP_LOG;
}

/* The index of "1", "2" ...; -1: it is none. */
static int read_place(const char *word)
{
    char *end;
    long place = strtol(word, &end, 10);
    return *word >= '1' && *word <= '9' && *end == '\0' && place <= MAP_NAMES ? (int)place - 1 : -1;
}

static fsdp_status read_step(map_reader *reader, fsdp_error *err)
{
    map_rule *rule = reader->rule;
    size_t number = 0, most = sizeof verbs / sizeof *verbs;
    int at = 0, only = -1;
    if (reader->count > 2 && strcmp(reader->words[0], "only") == 0) {
        only = read_place(reader->words[1]);
        at = 2;
        if (only < 0)
            return refuse(reader, "a step for one of several names is: only NUMBER STEP ...", err);
    }
    while (number < most && strcmp(verbs[number].name, reader->words[at]) != 0)
        number++;
    at++;
    if (number == most)
        return refuse(reader, "there is no such step; see docs/maps.md", err);
    if (rule->step_count == MAP_STEPS)
        return refuse(reader, "a rule has at most 16 steps", err);
    map_step *step = &rule->steps[rule->step_count++];
    *step = (map_step){.verb = verbs[number].verb, .split_at = -1, .only = only};
    if (only >= 0 && !changes_a_tensor(step->verb))
        return refuse(reader, "the step takes or makes several tensors, and is for all names", err);
    for (const char *kind = verbs[number].arguments; *kind; kind++)
        if (!read_argument(reader, *kind, &at, step))
            return refuse(reader, "the step has other arguments; see docs/maps.md", err);
    if (step->verb == MAP_FIRST)
        step->counted[step->counted_count++] = step->variable;
    return at == reader->count ? FSDP_OK : refuse(reader, "the step has too many arguments", err);
}

/* --- the whole ------------------------------------------------------------------------------------ */

static const struct {
    const char *word;
    fsdp_status (*read)(map_reader *reader, fsdp_error *err);
} settings[] = {
    {"left", read_side},           {"right", read_side},  {"size", read_size},
    {"frame", read_frame},         {"value", read_value}, {"values", read_values},
    {"words", read_words},         {"tied", read_tied},   {"numbered", read_numbered},
    {"unstacked", read_unstacked}, {"keep", read_keep},   {"drop", read_drop},
};

static fsdp_status read_line(map_reader *reader, fsdp_error *err)
{
    const char *first = reader->words[0];
    if (reader->is_indented) {
        if (!reader->rule)
            return refuse(reader, "an indented line belongs to a rule, but there is none before it",
                          err);
        if (strcmp(first, "+") == 0)
            return read_more_names(reader, err);
        if (reader->has_right)
            return refuse(reader, "a rule ends with its right side", err);
        return directions_of(first) ? read_right(reader, 0, err) : read_step(reader, err);
    }
    if (reader->count > 1 && directions_of(reader->words[1]) == 0)
        for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
            if (strcmp(first, settings[i].word) == 0)
                return settings[i].read(reader, err);
    return read_left(reader, err);
}

static fsdp_status read_map(map_reader *reader, fsdp_error *err)
{
    fsdp_status st;
    while (next_line(reader, &st, err))
        if (reader->count > 0)
            FSDP_TRY(read_line(reader, err));
    FSDP_TRY(st);
    if (reader->rule && !reader->has_right)
        return refuse(reader, "the last rule has no right side", err);
    if (reader->map->rule_count == 0)
        return refuse(reader, "a map has at least one rule", err);
    return repeat_rules(reader->map, err);
}

/* "llama" of "maps/llama.map" */
static const char *name_of(fsdp_map *map)
{
    const char *slash = strrchr(map->path, '/'), *name = slash ? slash + 1 : map->path;
    const char *dot = strrchr(name, '.');
    return fsdp_arena_strndup(&map->arena, name,
                              dot && dot > name ? (size_t)(dot - name) : strlen(name));
}

fsdp_status fsdp_map_parse(const char *text, size_t size, const char *path, fsdp_map **map_out,
                           fsdp_error *err)
{
    fsdp_map *map = fsdp_alloc(1, sizeof *map);
    if (!map)
        return no_memory(err);
    map_reader reader = {.map = map, .at = text, .end = text + size};
    map->path = fsdp_arena_strndup(&map->arena, path, strlen(path));
    map->name = map->path ? name_of(map) : NULL;
    fsdp_status st = !map->name ? no_memory(err)
                     : memchr(text, '\0', size)
                         ? fsdp_fail(err, FSDP_ERR_USAGE, "'%s' is not a text file", path)
                         : read_map(&reader, err);
    if (st != FSDP_OK) {
        fsdp_map_free(map);
        return st;
    }
    *map_out = map;
    return FSDP_OK;
}

void fsdp_map_free(fsdp_map *map)
{
    if (!map)
        return;
    fsdp_free(map->rules);
    fsdp_arena_release(&map->arena);
    fsdp_free(map);
}

const char *fsdp_map_layout(const fsdp_map *map, bool right)
{
    return map->layouts[right] ? map->layouts[right] : "";
}
