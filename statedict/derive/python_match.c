/* Runs the states of a Python expression over a text: see python_expression.h. */
#include "statedict/derive/python_state.h"

#include <inttypes.h>
#include <string.h>

/* A lookahead runs in a level of its own; python_expression.c refuses one in another. */
enum { LEVELS = 2, LONGEST = 4096, MOST_STEPS = 20000000 };

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
    return at < run->size && fsdp_python_has(&fsdp_python_word, (unsigned char)run->text[at]);
}

/* Conditions between two characters. */
static bool holds(const match_run *run, fsdp_python_kind kind, size_t at)
{
    bool is_border = is_word(run, at) != (at > 0 && is_word(run, at - 1));
    switch (kind) {
    case FSDP_PYTHON_START: return at == 0;
    case FSDP_PYTHON_STOP: return at == run->size || (at + 1 == run->size && run->text[at] == '\n');
    case FSDP_PYTHON_VERY_END: return at == run->size;
    case FSDP_PYTHON_BORDER: return is_border;
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
        case FSDP_PYTHON_END:
            level->is_matched =
                level->is_matched || level_number > 0 || !run->whole || at == run->size;
            break;
        case FSDP_PYTHON_SET: level->next[level->next_count++] = (uint16_t)number; break;
        case FSDP_PYTHON_SPLIT:
            level->stack[depth++] = state->other;
            level->stack[depth++] = state->next;
            break;
        case FSDP_PYTHON_LOOK:
        case FSDP_PYTHON_LOOK_NOT:
            if (run_from(run, level_number + 1, state->other, at) ==
                (state->kind == FSDP_PYTHON_LOOK))
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
        if (fsdp_python_has(&state->set, (unsigned char)run->text[at]))
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
        if ((unsigned char)text[i] >= FSDP_PYTHON_CHARACTERS)
            return false;
    return true;
}

fsdp_status fsdp_python_match(const fsdp_python_expression *expression, bool whole,
                              const char *text, size_t size, bool *matches_out, fsdp_error *err)
{
    match_run run = {.expression = expression, .text = text, .size = size, .whole = whole};
    if (size > LONGEST || !is_ascii(text, size))
        return fsdp_fail(err, FSDP_ERR_LIMIT,
                         "cannot compare a name with a Python expression: it has more than %d "
                         "characters, or one beyond ASCII",
                         (int)LONGEST);
    fsdp_status st = take_memory(&run) ? FSDP_OK : fsdp_fail_memory(err, "an expression");
    if (st == FSDP_OK)
        *matches_out = run_from(&run, 0, expression->first, 0);
    if (st == FSDP_OK && run.steps >= MOST_STEPS)
        st = fsdp_fail(err, FSDP_ERR_LIMIT, "matching the expression takes more than %d steps",
                       (int)MOST_STEPS);
    give_memory(&run);
    return st;
}
