/* Sorts parameters as their model has them: see parameter_order.h. */
#include "statedict/select/parameter_order.h"

#include "statedict/select/parameter_orders.h"

#include <stdlib.h>
#include <string.h>

enum { ELEMENTS_MOST = 64, NUMBER_MOST = 100000000 };
/* Ranks of words are above all numbers; a word that the order does not have is the last. */
enum { FIRST_RANK = NUMBER_MOST, NO_RANK = INT32_MAX };

typedef struct word {
    const char *text;
    size_t size;
} word;

static bool is_same(word a, word b)
{
    return a.size == b.size && memcmp(a.text, b.text, a.size) == 0;
}

/* --- the text ------------------------------------------------------------------------------------ */

/* A line, which continues in the lines after it that begin with a space. */
static const char *end_of_line(const char *line)
{
    const char *end = strchr(line, '\n');
    while (end && end[1] == ' ')
        end = strchr(end + 1, '\n');
    return end ? end : line + strlen(line);
}

/* The next word of a line; its size is 0 after the last. */
static word next_word(const char **at, const char *end)
{
    while (*at < end && (**at == ' ' || **at == '\n'))
        (*at)++;
    word found = {*at, 0};
    while (*at < end && **at != ' ' && **at != '\n') {
        (*at)++;
        found.size++;
    }
    return found;
}

static bool has_word(const char *line, word wanted)
{
    const char *end = end_of_line(line);
    word found = next_word(&line, end);
    while ((found = next_word(&line, end)).size > 0)
        if (is_same(found, wanted))
            return true;
    return false;
}

/* The lines of a model type, after its line "for"; NULL: it has none. */
static const char *find_order(const char *model_type)
{
    const word type = {model_type, strlen(model_type)};
    for (const char *line = parameter_orders; *line;) {
        if (strncmp(line, "for ", 4) == 0 && has_word(line, type))
            return end_of_line(line) + 1;
        line = end_of_line(line);
        line += *line == '\n';
    }
    return NULL;
}

/* The place of a word among those below `above`, and its mark; NO_RANK: it has none. */
static int32_t rank_of(const char *order, word above, word wanted, char *mark_out)
{
    *mark_out = '\0';
    for (const char *line = order; *line && strncmp(line, "for ", 4) != 0;) {
        const char *at = line, *end = end_of_line(line);
        word found = next_word(&at, end);
        for (int32_t rank = FIRST_RANK; is_same(found, above); rank++) {
            word below = next_word(&at, end);
            if (below.size == 0)
                return NO_RANK;
            char mark = below.text[below.size - 1];
            below.size -= mark == '*' || mark == '~';
            if (!is_same(below, wanted))
                continue;
            *mark_out = mark;
            return rank;
        }
        line = *end ? end + 1 : end;
    }
    return NO_RANK;
}

/* --- keys ---------------------------------------------------------------------------------------- */

static int32_t number_of(word text)
{
    int32_t number = 0;
    for (size_t i = 0; i < text.size; i++) {
        if (text.text[i] < '0' || text.text[i] > '9' || number >= NUMBER_MOST / 10)
            return -1;
        number = number * 10 + (text.text[i] - '0');
    }
    return text.size > 0 ? number : -1;
}

/* The rank of each element. */
static fsdp_status make_key(const char *order, fsdp_parameter *parameter, fsdp_arena *arena,
                            fsdp_error *err)
{
    int32_t key[ELEMENTS_MOST];
    int count = 0;
    word above = {"-", 1}, element;
    char mark = '\0';
    for (size_t at = 0; at <= parameter->size; at += element.size + 1) {
        const char *text = parameter->name + at;
        const char *dot = memchr(text, '.', parameter->size - at);
        element = (word){text, dot ? (size_t)(dot - text) : parameter->size - at};
        int32_t number = number_of(element);
        if (count == ELEMENTS_MOST)
            return fsdp_fail(err, FSDP_ERR_LIMIT, "'%.*s...' has more than %d elements", 100,
                             parameter->name, ELEMENTS_MOST);
        mark = '\0';
        key[count++] = number >= 0 ? number : rank_of(order, above, element, &mark);
        if (number < 0)
            above = element;
    }
    parameter->is_norm = mark == '*';
    parameter->is_buffer = mark == '~';
    int32_t *kept = fsdp_arena_alloc(arena, (size_t)count, sizeof *kept);
    if (!kept)
        return fsdp_fail_memory(err, "the order of parameters");
    memcpy(kept, key, (size_t)count * sizeof *kept);
    parameter->key = kept;
    parameter->key_count = count;
    return FSDP_OK;
}

static int compare_keys(const void *a, const void *b)
{
    const fsdp_parameter *x = a, *y = b;
    for (int i = 0; i < x->key_count && i < y->key_count; i++)
        if (x->key[i] != y->key[i])
            return x->key[i] < y->key[i] ? -1 : 1;
    if (x->key_count != y->key_count)
        return x->key_count < y->key_count ? -1 : 1;
    return (x->entry > y->entry) - (x->entry < y->entry);
}

/* Sorted neighbours differ first in an element whose two words the order has. */
static bool are_apart(const fsdp_parameter *before, const fsdp_parameter *after)
{
    size_t at = 0, size = before->size < after->size ? before->size : after->size;
    int element = 0;
    for (; at < size && before->name[at] == after->name[at]; at++)
        element += before->name[at] == '.';
    return element < before->key_count && element < after->key_count &&
           before->key[element] < after->key[element] && after->key[element] != NO_RANK;
}

fsdp_status fsdp_parameters_sort(const char *model_type, fsdp_parameter *parameters, size_t count,
                                 fsdp_arena *arena, bool *is_known_out, fsdp_error *err)
{
    const char *order = find_order(model_type);
    *is_known_out = false;
    if (!order || count == 0)
        return FSDP_OK;
    fsdp_parameter *sorted = fsdp_arena_alloc(arena, count, sizeof *sorted);
    if (!sorted)
        return fsdp_fail_memory(err, "the order of parameters");
    memcpy(sorted, parameters, count * sizeof *sorted);
    for (size_t i = 0; i < count; i++)
        FSDP_TRY(make_key(order, &sorted[i], arena, err));
    qsort(sorted, count, sizeof *sorted, compare_keys);
    size_t kept = 0; /* buffers are not neighbours of parameters */
    for (size_t i = 0; i < count; i++) {
        if (sorted[i].is_buffer)
            continue;
        if (kept > 0 && !are_apart(&sorted[kept - 1], &sorted[i]))
            return FSDP_OK;
        kept = i + 1;
    }
    memcpy(parameters, sorted, count * sizeof *sorted);
    *is_known_out = true;
    return FSDP_OK;
}
