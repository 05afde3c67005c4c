/*
 * Reads the text of a map. A line is a setting ("size heads = num_attention_heads"), the left side of a rule,
 * or, indented, a step of the rule or "= RIGHT". See map.h and docs/maps.md.
 */
#include "statedict/map/map_rules.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { WORDS_MOST = 40, FILE_MOST = 1 << 20 };

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

static fsdp_status no_memory(fsdp_error *err)
{
    return fsdp_fail_memory(err, "a map");
}

/* --- lines ---------------------------------------------------------------------------------------- */

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
        map_pattern_read(&map->arena, reader->words[1], &numbered->variables, &numbered->name);
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
        const char *wrong = map_pattern_read(&reader->map->arena, reader->words[i],
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
    bool left = map_pattern_has_rest(&rule->left[0]), right = map_pattern_has_rest(&rule->right[0]);
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
    *variable_out = map_variable(&reader->map->arena, &reader->rule->variables, word + 1, size - 2);
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
    return map_repeat_rules(reader->map, err);
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

fsdp_status fsdp_map_open(fsdp_io *io, const char *path, fsdp_map **map_out, fsdp_error *err)
{
    char *text = NULL;
    size_t size = 0;
    FSDP_TRY(fsdp_io_read_file(io, path, FILE_MOST, &text, &size, err));
    fsdp_status st = fsdp_map_parse(text, size, path, map_out, err);
    fsdp_free(text);
    if (st == FSDP_OK)
        (*map_out)->is_file = true;
    return st;
}

void fsdp_map_free(fsdp_map *map)
{
    if (!map)
        return;
    fsdp_free(map->rules);
    fsdp_arena_release(&map->arena);
    fsdp_free(map);
}

const char *fsdp_map_name(const fsdp_map *map)
{
    return map->name;
}

const char *fsdp_map_layout(const fsdp_map *map, bool right)
{
    return map->layouts[right] ? map->layouts[right] : "";
}

bool fsdp_map_types_have(const char *types, const char *model_type)
{
    size_t size = strlen(model_type);
    if (!types[0])
        return true;
    for (const char *type = types; type; type = strchr(type, ' ') ? strchr(type, ' ') + 1 : NULL)
        if (strncmp(type, model_type, size) == 0 && (type[size] == ' ' || type[size] == '\0'))
            return true;
    return false;
}

bool fsdp_map_is_for(const fsdp_map *map, const char *model_type)
{
    return !map->types || fsdp_map_types_have(map->types, model_type);
}
