/*
 * Regular expressions of Python: see python_expression.h. An expression becomes nodes, and these become
 * states, the last first: a state names those that follow it. A match runs the states over a text.
 */
#include "statedict/derive/python_expression.h"
#include "base/text.h"

#include <string.h>

/* === states =================================================================================== */

enum { CHARACTERS = 128 };

typedef enum state_kind {
    STATE_END,   /* of the expression, or of a lookahead */
    STATE_SET,   /* one character of a set */
    STATE_SPLIT, /* `next` or `other` */
    STATE_LOOK,  /* continues when what begins at `other` matches here */
    STATE_LOOK_NOT,
    STATE_START,
    STATE_STOP, /* the end of the text, or the newline that ends it */
    STATE_VERY_END,
    STATE_BORDER, /* of a word */
    STATE_NO_BORDER
} state_kind;

typedef struct character_set {
    uint64_t bits[CHARACTERS / 64];
} character_set;

typedef struct fsdp_python_state {
    state_kind kind;
    uint16_t next, other;
    character_set set;
} fsdp_python_state;

static bool set_has(const character_set *set, unsigned char c)
{
    return c < CHARACTERS && (set->bits[c / 64] >> c % 64 & 1);
}

/* === reading an expression ==================================================================== */

enum { LONGEST_EXPRESSION = 8192, DEEPEST = 32, MOST_STATES = 4096, MANY = 1000000, NO_LIMIT = -1 };

typedef enum node_kind {
    NODE_EMPTY,
    NODE_SET,
    NODE_HERE,   /* what holds between two characters */
    NODE_LOOK,   /* a lookahead, whose states are made */
    NODE_JOIN,   /* a, then b */
    NODE_EITHER, /* a or b */
    NODE_REPEAT  /* a, `least` to `most` times */
} node_kind;

typedef struct node {
    node_kind kind;
    state_kind state; /* of NODE_HERE and NODE_LOOK */
    int a, b;
    int64_t least, most;
    character_set set;
} node;

typedef struct reader {
    const char *text;
    size_t size, at;
    int depth, looks;    /* open groups, and those among them that look ahead */
    const char *refused; /* why the expression is not taken */
    bool lacks_memory;
    node *nodes;
    size_t count, room;
    fsdp_python_state *states;
    size_t state_count, state_room;
} reader;

/* --- nodes -------------------------------------------------------------------------------------- */

static int add_node(reader *in, node added)
{
    if (!fsdp_grow(&in->nodes, &in->room, in->count + 1, sizeof added)) {
        in->lacks_memory = true;
        return 0;
    }
    in->nodes[in->count] = added;
    return (int)in->count++;
}

static int refuse(reader *in, const char *reason)
{
    if (!in->refused)
        in->refused = reason;
    return 0; /* the empty node */
}

static bool has_failed(const reader *in)
{
    return in->refused || in->lacks_memory;
}

static int peek(const reader *in)
{
    return in->at < in->size ? (unsigned char)in->text[in->at] : -1;
}

static bool take(reader *in, int c)
{
    bool is_next = peek(in) == c;
    in->at += is_next;
    return is_next;
}

static bool take_word(reader *in, const char *word)
{
    size_t size = strlen(word);
    bool is_next = in->size - in->at >= size && memcmp(in->text + in->at, word, size) == 0;
    in->at += is_next ? size : 0;
    return is_next;
}

/* --- sets --------------------------------------------------------------------------------------- */

/* a-z, A-Z, 0-9 and _ */
static const character_set word_characters = {
    {UINT64_C(0x03ff000000000000), UINT64_C(0x07fffffe87fffffe)}};
static const character_set digits = {{UINT64_C(0x03ff000000000000), 0}};
/* str.isspace has the separators 28 to 31, too. */
static const character_set spaces = {{UINT64_C(0x00000001f0003e00), 0}};

static void add_range(character_set *set, int first, int last)
{
    for (int c = first; c <= last; c++)
        set->bits[c / 64] |= UINT64_C(1) << c % 64;
}

static void add_set(character_set *set, const character_set *other)
{
    set->bits[0] |= other->bits[0];
    set->bits[1] |= other->bits[1];
}

static character_set inverse(const character_set *set)
{
    return (character_set){{~set->bits[0], ~set->bits[1]}};
}

static int add_character(reader *in, int c)
{
    node added = {.kind = NODE_SET};
    if (c >= CHARACTERS)
        return refuse(in, "it has a character beyond ASCII");
    add_range(&added.set, c, c);
    return add_node(in, added);
}

/* \d, \W and so on; false for another letter. */
static bool find_category(int c, character_set *set_out)
{
    static const char letters[] = "dsw";
    const character_set *const sets[] = {&digits, &spaces, &word_characters};
    const char *at = c > 0 && c < CHARACTERS ? strchr(letters, c | 0x20) : NULL;
    if (!at || *at == '\0' || !(c & 0x40))
        return false;
    *set_out = c & 0x20 ? *sets[at - letters] : inverse(sets[at - letters]);
    return true;
}

static int digit_of(int c, int base)
{
    int value = c >= '0' && c <= '9'            ? c - '0'
                : (c | 0x20) >= 'a' && c >= 'A' ? (c | 0x20) - 'a' + 10
                                                : base;
    return value < base ? value : -1;
}

/* `count` digits, or for octal numbers up to so many. */
static int read_digits(reader *in, int base, int count)
{
    int64_t value = 0;
    int read = 0;
    for (; read < count && digit_of(peek(in), base) >= 0; read++)
        value = value * base + digit_of(in->text[in->at++], base);
    if (base == 16 && read < count)
        return refuse(in, "it has an escape of too few digits");
    return value < CHARACTERS ? (int)value : CHARACTERS;
}

/* The character of an escape, after its backslash; the caller has taken those that are none. */
static int read_escaped(reader *in)
{
    static const char names[] = "afnrtv\\", characters[] = "\a\f\n\r\t\v\\";
    int c = peek(in);
    const char *at = c > 0 ? strchr(names, c) : NULL;
    if (c < 0)
        return refuse(in, "it ends in a backslash");
    if (c == '0')
        return read_digits(in, 8, 3);
    in->at++;
    if (at)
        return characters[at - names];
    if (c == 'x' || c == 'u' || c == 'U')
        return read_digits(in, 16, c == 'x' ? 2 : c == 'u' ? 4 : 8);
    if ((c | 0x20) >= 'a' && (c | 0x20) <= 'z' && c < CHARACTERS)
        return refuse(in, "it has an escape that is not known");
    return c;
}

/* One character or category of a bracket; *c_out is -1 for a category. */
static character_set read_member(reader *in, int *c_out)
{
    character_set set = {0};
    int c = peek(in);
    *c_out = 0;
    if (c < 0) {
        refuse(in, "a bracket is not closed");
        return set;
    }
    in->at++;
    if (c == '\\' && find_category(peek(in), &set)) {
        in->at++;
        *c_out = -1;
        return set;
    }
    if (c == '\\' && take(in, 'b'))
        c = '\b';
    else if (c == '\\' && peek(in) >= '1' && peek(in) <= '7')
        c = read_digits(in, 8, 3);
    else if (c == '\\' && (peek(in) == '8' || peek(in) == '9'))
        c = refuse(in, "it has an escape that is not known");
    else if (c == '\\')
        c = read_escaped(in);
    if (c >= CHARACTERS)
        c = refuse(in, "it has a character beyond ASCII");
    add_range(&set, c, c);
    *c_out = c;
    return set;
}

/* After "[". */
static int read_bracket(reader *in)
{
    node added = {.kind = NODE_SET};
    bool is_inverse = take(in, '^');
    for (bool is_first = true; !has_failed(in) && (is_first || !take(in, ']')); is_first = false) {
        int low, high;
        character_set one = read_member(in, &low);
        add_set(&added.set, &one);
        if (!take(in, '-'))
            continue;
        if (take(in, ']')) {
            add_range(&added.set, '-', '-');
            break;
        }
        one = read_member(in, &high);
        if (low < 0 || high < low)
            return refuse(in, "it has a range whose ends are not in order");
        add_range(&added.set, low, high);
    }
    if (is_inverse)
        added.set = inverse(&added.set);
    return add_node(in, added);
}

/* --- pieces ------------------------------------------------------------------------------------- */

static int read_either(reader *in);
static size_t make_states(reader *in, int number, size_t next);

/* Python has these, and a match by states has not. */
static int refuse_extension(reader *in)
{
    static const char *const rows[][2] = {
        {"?P<", "it has a named group"}, {"?P=", "it refers back to a group"},
        {"?<=", "it looks behind"},      {"?<!", "it looks behind"},
        {"?(", "it has a condition"},    {"?>", "it has an atomic group"},
        {"?#", "it has a comment"},      {"?", "it sets flags"}};
    size_t row = 0;
    while (!take_word(in, rows[row][0]))
        row++;
    return refuse(in, rows[row][1]);
}

/* The states of a lookahead end by themselves, and are made at once. */
static int look_ahead(reader *in, state_kind kind)
{
    if (++in->looks > 1)
        return refuse(in, "it looks ahead within a lookahead");
    int inside = read_either(in);
    in->looks--;
    node added = {.kind = NODE_LOOK, .state = kind};
    if (!has_failed(in))
        added.a = (int)make_states(in, inside, 0);
    return add_node(in, added);
}

/* After "(". */
static int read_group(reader *in)
{
    int inside;
    if (++in->depth > DEEPEST)
        return refuse(in, "its groups are nested more than 32 deep");
    if (take_word(in, "?="))
        inside = look_ahead(in, STATE_LOOK);
    else if (take_word(in, "?!"))
        inside = look_ahead(in, STATE_LOOK_NOT);
    else if (take_word(in, "?:") || peek(in) != '?')
        inside = read_either(in);
    else
        return refuse_extension(in);
    in->depth--;
    return take(in, ')') ? inside : refuse(in, "a group is not closed");
}

/* The place that a character or an escape asks for; STATE_END: none. */
static state_kind read_place(reader *in)
{
    static const struct {
        const char *spelled;
        state_kind kind;
    } rows[] = {{"^", STATE_START},      {"$", STATE_STOP},     {"\\A", STATE_START},
                {"\\Z", STATE_VERY_END}, {"\\b", STATE_BORDER}, {"\\B", STATE_NO_BORDER}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (take_word(in, rows[i].spelled))
            return rows[i].kind;
    return STATE_END;
}

/* After a backslash. */
static int read_escape(reader *in)
{
    node added = {.kind = NODE_SET};
    if (find_category(peek(in), &added.set)) {
        in->at++;
        return add_node(in, added);
    }
    if (peek(in) >= '1' && peek(in) <= '9')
        return refuse(in, "it refers back to a group");
    return add_character(in, read_escaped(in));
}

static int read_atom(reader *in, bool *repeats_out)
{
    const state_kind place = read_place(in);
    node added = {.kind = NODE_HERE, .state = place};
    *repeats_out = place == STATE_END;
    if (place != STATE_END)
        return add_node(in, added);
    int c = (unsigned char)in->text[in->at++];
    switch (c) {
    case '(': return read_group(in);
    case '[': return read_bracket(in);
    case '\\': return read_escape(in);
    case '.':
        added.kind = NODE_SET;
        add_range(&added.set, '\n', '\n');
        added.set = inverse(&added.set);
        return add_node(in, added);
    case '*':
    case '+':
    case '?': return refuse(in, "there is nothing to repeat");
    default: return add_character(in, c);
    }
}

/* --- repetitions -------------------------------------------------------------------------------- */

/* Digits, if there are some. */
static int64_t read_number(reader *in, int64_t usual)
{
    int64_t value = 0;
    size_t from = in->at;
    for (; peek(in) >= '0' && peek(in) <= '9'; in->at++)
        value = value < MANY ? value * 10 + (in->text[in->at] - '0') : value;
    return in->at > from ? value : usual;
}

/* "{m,n}"; any other text after a brace makes it a character. */
static bool read_braces(reader *in, int64_t *least_out, int64_t *most_out)
{
    size_t from = in->at;
    in->at++;
    bool is_empty = peek(in) == '}';
    int64_t least = read_number(in, -1), most = least;
    bool has_comma = take(in, ',');
    if (has_comma)
        most = read_number(in, NO_LIMIT);
    if (is_empty || !take(in, '}')) {
        in->at = from;
        return false;
    }
    *least_out = least > 0 ? least : 0;
    *most_out = most;
    return true;
}

static bool read_repetition(reader *in, int64_t *least_out, int64_t *most_out)
{
    *least_out = peek(in) == '+';
    *most_out = peek(in) == '?' ? 1 : NO_LIMIT;
    if (peek(in) == '{')
        return read_braces(in, least_out, most_out);
    return take(in, '*') || take(in, '+') || take(in, '?');
}

/* Whether a repetition is greedy does not change whether there is a match. */
static int read_piece(reader *in)
{
    bool repeats;
    int64_t least, most, again[2];
    bool is_brace = peek(in) == '{'; /* a repetition of nothing, or a character */
    if (is_brace && read_braces(in, &least, &most))
        return refuse(in, "there is nothing to repeat");
    int atom = is_brace ? add_character(in, in->text[in->at++]) : read_atom(in, &repeats);
    repeats = is_brace || repeats;
    if (has_failed(in) || !read_repetition(in, &least, &most))
        return atom;
    if (!repeats)
        return refuse(in, "there is nothing to repeat");
    if (most != NO_LIMIT && most < least)
        return refuse(in, "it has a repetition whose minimum exceeds its maximum");
    if (take(in, '+'))
        return refuse(in, "it has a possessive repetition");
    take(in, '?');
    if (read_repetition(in, &again[0], &again[1]))
        return refuse(in, "it repeats a repetition");
    return add_node(in, (node){.kind = NODE_REPEAT, .a = atom, .least = least, .most = most});
}

static int read_sequence(reader *in)
{
    int all = 0;
    while (!has_failed(in) && in->at < in->size && peek(in) != '|' && peek(in) != ')') {
        int piece = read_piece(in);
        all = all == 0 ? piece : add_node(in, (node){.kind = NODE_JOIN, .a = all, .b = piece});
    }
    return all;
}

static int read_either(reader *in)
{
    int all = read_sequence(in);
    while (!has_failed(in) && take(in, '|')) {
        int other = read_sequence(in);
        all = add_node(in, (node){.kind = NODE_EITHER, .a = all, .b = other});
    }
    return all;
}

/* --- states ------------------------------------------------------------------------------------- */

static size_t add_state(reader *in, fsdp_python_state added)
{
    if (in->state_count == MOST_STATES)
        return (size_t)refuse(in, "its repetitions stand for more than 4096 states");
    if (!fsdp_grow(&in->states, &in->state_room, in->state_count + 1, sizeof added)) {
        in->lacks_memory = true;
        return 0;
    }
    in->states[in->state_count] = added;
    return in->state_count++;
}

static size_t add_split(reader *in, size_t next, size_t other)
{
    return add_state(
        in,
        (fsdp_python_state){.kind = STATE_SPLIT, .next = (uint16_t)next, .other = (uint16_t)other});
}

/* A node without states is not repeated: once is as good. */
static size_t make_repeated(reader *in, const node *from, size_t next)
{
    size_t first = next, inside;
    if (from->most == NO_LIMIT) {
        first = add_split(in, next, next);
        inside = make_states(in, from->a, first);
        if (!has_failed(in))
            in->states[first].other = (uint16_t)inside;
    }
    for (int64_t i = from->least; i < from->most && !has_failed(in); i++) {
        inside = make_states(in, from->a, first);
        if (inside == first)
            break;
        first = add_split(in, inside, next);
    }
    for (int64_t i = 0; i < from->least && !has_failed(in); i++) {
        inside = make_states(in, from->a, first);
        if (inside == first)
            break;
        first = inside;
    }
    return first;
}

static size_t make_sequence(reader *in, int number, size_t next)
{
    for (; in->nodes[number].kind == NODE_JOIN && !has_failed(in); number = in->nodes[number].a)
        next = make_states(in, in->nodes[number].b, next);
    const node from = in->nodes[has_failed(in) ? 0 : number];
    fsdp_python_state made = {.kind = from.state, .next = (uint16_t)next, .set = from.set};
    switch (from.kind) {
    case NODE_EITHER: return make_states(in, number, next);
    case NODE_REPEAT: return make_repeated(in, &from, next);
    case NODE_SET: made.kind = STATE_SET; return add_state(in, made);
    case NODE_HERE: return add_state(in, made);
    case NODE_LOOK: made.other = (uint16_t)from.a; return add_state(in, made);
    default: return next; /* nothing, also after a failure */
    }
}

/* The first of the states of a node, which `next` follows. */
static size_t make_states(reader *in, int number, size_t next)
{
    size_t others = next;
    bool has_others = false;
    for (; in->nodes[number].kind == NODE_EITHER && !has_failed(in); number = in->nodes[number].a) {
        size_t other = make_states(in, in->nodes[number].b, next);
        others = has_others ? add_split(in, other, others) : other;
        has_others = true;
    }
    size_t first = make_sequence(in, number, next);
    return has_others ? add_split(in, first, others) : first;
}

/* --- the expression --------------------------------------------------------------------------- */

/* The state in which a match begins. */
static size_t read_expression(reader *in)
{
    add_node(in, (node){.kind = NODE_EMPTY});
    add_state(in, (fsdp_python_state){.kind = STATE_END});
    if (in->size > LONGEST_EXPRESSION)
        refuse(in, "it has more than 8192 characters");
    if (has_failed(in))
        return 0;
    int whole = read_either(in);
    if (in->at < in->size)
        refuse(in, "a parenthesis closes no group");
    return has_failed(in) ? 0 : make_states(in, whole, 0);
}

fsdp_status fsdp_python_compile(fsdp_arena *arena, const char *text, size_t size,
                                fsdp_python_expression *expression_out, fsdp_error *err)
{
    char shown[100];
    reader in = {.text = text, .size = size};
    size_t first = read_expression(&in);
    fsdp_python_state *states = fsdp_arena_alloc(arena, in.state_count, sizeof *states);
    if (states && in.state_count > 0)
        memcpy(states, in.states, in.state_count * sizeof *states);
    *expression_out = (fsdp_python_expression){states, in.state_count, first};
    fsdp_free(in.nodes);
    fsdp_free(in.states);
    if (in.lacks_memory || !states)
        return fsdp_fail_memory(err, "an expression");
    if (!in.refused)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE, "cannot use the Python expression '%s': %s",
                     fsdp_printable(text, size, shown, sizeof shown), in.refused);
}

/* === matching ================================================================================= */

/* A lookahead runs in a level of its own; one in another is refused above. */
enum { LEVELS = 2, LONGEST_TEXT = 4096, MOST_STEPS = 20000000 };

/* The states of one character of the text: those of the next one are collected next to them. */
typedef struct match_level {
    uint16_t *now, *next, *stack;
    size_t now_count, next_count;
    uint32_t *seen; /* per state: the last round in which it was entered */
    uint32_t round;
    bool is_matched;
} match_level;

typedef struct match_run {
    const fsdp_python_expression *expression;
    const char *text;
    size_t size;
    bool whole;
    int64_t steps;
    match_level levels[LEVELS];
} match_run;

static bool is_word(const match_run *run, size_t at)
{
    return at < run->size && set_has(&word_characters, (unsigned char)run->text[at]);
}

/* Conditions between two characters. */
static bool holds(const match_run *run, state_kind kind, size_t at)
{
    bool is_border = is_word(run, at) != (at > 0 && is_word(run, at - 1));
    switch (kind) {
    case STATE_START: return at == 0;
    case STATE_STOP: return at == run->size || (at + 1 == run->size && run->text[at] == '\n');
    case STATE_VERY_END: return at == run->size;
    case STATE_BORDER: return is_border;
    default: return !is_border && run->size > 0; /* Python finds none in an empty text */
    }
}

static bool run_from(match_run *run, int level_number, size_t first, size_t at);

/* Adds a state to those of the next character, or the states that follow it without one. */
static void enter(match_run *run, int level_number, size_t first, size_t at)
{
    match_level *level = &run->levels[level_number];
    size_t depth = 0;
    level->stack[depth++] = (uint16_t)first;
    while (depth > 0) {
        size_t number = level->stack[--depth];
        const fsdp_python_state *state = &run->expression->states[number];
        if (level->seen[number] == level->round)
            continue;
        level->seen[number] = level->round;
        run->steps++;
        switch (state->kind) {
        case STATE_END:
            level->is_matched =
                level->is_matched || level_number > 0 || !run->whole || at == run->size;
            break;
        case STATE_SET: level->next[level->next_count++] = (uint16_t)number; break;
        case STATE_SPLIT:
            level->stack[depth++] = state->other;
            level->stack[depth++] = state->next;
            break;
        case STATE_LOOK:
        case STATE_LOOK_NOT:
            if (run_from(run, level_number + 1, state->other, at) == (state->kind == STATE_LOOK))
                level->stack[depth++] = state->next;
            break;
        default:
            if (holds(run, state->kind, at))
                level->stack[depth++] = state->next;
        }
    }
}

static void step(match_run *run, int level_number, size_t at)
{
    match_level *level = &run->levels[level_number];
    uint16_t *now = level->next;
    level->next = level->now;
    level->now = now;
    level->now_count = level->next_count;
    level->next_count = 0;
    level->round++;
    run->steps += (int64_t)level->now_count;
    for (size_t i = 0; i < level->now_count; i++) {
        const fsdp_python_state *state = &run->expression->states[now[i]];
        if (set_has(&state->set, (unsigned char)run->text[at]))
            enter(run, level_number, state->next, at + 1);
    }
}

static bool run_from(match_run *run, int level_number, size_t first, size_t at)
{
    match_level *level = &run->levels[level_number];
    level->next_count = 0;
    level->is_matched = false;
    level->round++;
    enter(run, level_number, first, at);
    for (; !level->is_matched && level->next_count > 0 && at < run->size && run->steps < MOST_STEPS;
         at++)
        step(run, level_number, at);
    return level->is_matched;
}

/* A state puts at most two others on the stack. */
static bool take_memory(match_run *run)
{
    size_t count = run->expression->count;
    bool is_there = true;
    for (int i = 0; i < LEVELS; i++) {
        match_level *level = &run->levels[i];
        level->now = fsdp_alloc(count, sizeof *level->now);
        level->next = fsdp_alloc(count, sizeof *level->next);
        level->stack = fsdp_alloc(2 * count + 1, sizeof *level->stack);
        level->seen = fsdp_alloc(count, sizeof *level->seen);
        is_there = is_there && level->now && level->next && level->stack && level->seen;
    }
    return is_there;
}

static void give_memory(match_run *run)
{
    for (int i = 0; i < LEVELS; i++) {
        fsdp_free(run->levels[i].now);
        fsdp_free(run->levels[i].next);
        fsdp_free(run->levels[i].stack);
        fsdp_free(run->levels[i].seen);
    }
}

static bool is_ascii(const char *text, size_t size)
{
    for (size_t i = 0; i < size; i++)
        if ((unsigned char)text[i] >= CHARACTERS)
            return false;
    return true;
}

fsdp_status fsdp_python_match(const fsdp_python_expression *expression, bool whole,
                              const char *text, size_t size, bool *matches_out, fsdp_error *err)
{
    match_run run = {.expression = expression, .text = text, .size = size, .whole = whole};
    if (size > LONGEST_TEXT || !is_ascii(text, size))
        return fsdp_fail(err, FSDP_ERR_LIMIT,
                         "cannot compare a name with a Python expression: it has more than %d "
                         "characters, or one beyond ASCII",
                         (int)LONGEST_TEXT);
    fsdp_status st = take_memory(&run) ? FSDP_OK : fsdp_fail_memory(err, "an expression");
    if (st == FSDP_OK)
        *matches_out = run_from(&run, 0, expression->first, 0);
    if (st == FSDP_OK && run.steps >= MOST_STEPS)
        st = fsdp_fail(err, FSDP_ERR_LIMIT, "matching the expression takes more than %d steps",
                       (int)MOST_STEPS);
    give_memory(&run);
    return st;
}
