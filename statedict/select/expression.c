/* Regular expressions of users: see expression.h. */
#include "statedict/select/expression.h"

#include "base/core/mem.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* --- cost of expressions ---------------------------------------------------------------------- */

/*
 * regcomp expands repetitions: a{1,255} becomes 255 copies, nested ones multiply, and each + makes
 * a copy, too. The cost of an expression is therefore computed before regcomp.
 */
enum { LONGEST = 4096, DEEPEST = 32, MOST_COPIES = 1000, MANY = 1000000 };

typedef struct cost_group {
    int64_t size; /* characters of the group so far, expanded */
    int64_t last; /* those of the piece that a repetition would repeat */
} cost_group;

typedef struct cost_scan {
    const char *at;
    cost_group groups[DEEPEST + 1];
    int depth;
    int64_t characters; /* as the expression has them */
    const char *refused;
} cost_scan;

static void add_piece(cost_group *group, int64_t size)
{
    group->last = size;
    group->size = group->size + size < MANY ? group->size + size : MANY;
}

static void repeat_piece(cost_group *group, int64_t times)
{
    int64_t again = times > MANY ? MANY : times > 1 ? times - 1 : 0;
    int64_t more = group->last * again;
    group->last = group->last + more < MANY ? group->last + more : MANY;
    group->size = group->size + more < MANY ? group->size + more : MANY;
}

/* "[...]" counts as one character; a bracket may hold ] first, and classes such as [:alpha:]. */
static const char *skip_bracket(const char *at)
{
    at += at[1] == '^' ? 2 : 1;
    for (bool first = true; *at && (*at != ']' || first); first = false, at++) {
        if (at[0] != '[' || !at[1] || !strchr(":.=", at[1]))
            continue;
        const char *end = strstr(at + 2, (char[]){at[1], ']', '\0'});
        at = end ? end + 1 : at;
    }
    return *at ? at + 1 : at;
}

/* "{m,n}": the maximum number of copies of the piece. Anything else in braces counts as a
 * character; regcomp decides whether it is valid. */
static void scan_braces(cost_scan *scan)
{
    char *end;
    int64_t least = strtol(scan->at + 1, &end, 10), most = least;
    if (*end == ',')
        most = end[1] == '}' && least < MANY ? least + 1 : strtol(end + 1, &end, 10);
    const char *close = strchr(scan->at, '}');
    repeat_piece(&scan->groups[scan->depth], most > least ? most : least);
    scan->at = close ? close + 1 : scan->at + 1;
}

static void scan_escape(cost_scan *scan)
{
    if (scan->at[1] >= '1' && scan->at[1] <= '9')
        scan->refused = "it refers back to a group";
    scan->at += scan->at[1] ? 2 : 1;
    scan->characters++;
    add_piece(&scan->groups[scan->depth], 1);
}

static void scan_character(cost_scan *scan)
{
    scan->at = *scan->at == '[' ? skip_bracket(scan->at) : scan->at + 1;
    scan->characters++;
    add_piece(&scan->groups[scan->depth], 1);
}

static void scan_group(cost_scan *scan)
{
    bool opens = *scan->at++ == '(';
    if (opens && scan->depth == DEEPEST)
        scan->refused = "its groups are nested more than 32 deep";
    else if (opens)
        scan->groups[++scan->depth] = (cost_group){0};
    else if (scan->depth > 0) {
        scan->depth--;
        add_piece(&scan->groups[scan->depth], scan->groups[scan->depth + 1].size);
    }
}

static void scan_piece(cost_scan *scan)
{
    switch (*scan->at) {
    case '(':
    case ')': scan_group(scan); break;
    case '{': scan_braces(scan); break;
    case '+':
        repeat_piece(&scan->groups[scan->depth], 2);
        scan->at++;
        break;
    case '*':
    case '?': scan->at++; break;
    case '\\': scan_escape(scan); break;
    default: scan_character(scan); break;
    }
}

/* The limit that the expression exceeds, or NULL. */
static const char *find_excess(const char *text)
{
    cost_scan scan = {.at = text};
    if (strlen(text) > LONGEST)
        return "it has more than 4096 characters";
    while (*scan.at && !scan.refused) {
        scan_piece(&scan);
        if (scan.groups[scan.depth].size - scan.characters > MOST_COPIES)
            scan.refused = "its repetitions stand for more than 1000 characters";
    }
    return scan.refused;
}

/* Bytes that an expression takes once it has matched: a floor, the characters, and copies of them. */
static int64_t room_of(const char *text)
{
    enum { FLOOR = 16 << 10, CHARACTER = 128, COPY = 3000 };
    cost_scan scan = {.at = text};
    while (*scan.at && !scan.refused)
        scan_piece(&scan);
    int64_t copies = scan.groups[0].size - scan.characters;
    return FLOOR + CHARACTER * (int64_t)strlen(text) + (copies > 0 ? COPY * copies : 0);
}

fsdp_status fsdp_expressions_check(const char *const *texts, size_t count, const char *what,
                                   fsdp_error *err)
{
    enum { MOST = 64 << 20 };
    int64_t room = 0;
    for (size_t i = 0; i < count; i++) {
        room += room_of(texts[i]);
        if (room > MOST)
            return fsdp_fail(err, FSDP_ERR_LIMIT,
                             "%zu expressions of %s take more than %d MiB of memory from number "
                             "%zu on; join several by '|'",
                             count, what, MOST >> 20, i + 1);
    }
    return FSDP_OK;
}

/* --- the calls -------------------------------------------------------------------------------- */

fsdp_status fsdp_expression_compile(const char *text, int flags, regex_t *expression_out,
                                    fsdp_error *err)
{
    const char *excess = find_excess(text);
    if (excess)
        return fsdp_fail(err, FSDP_ERR_USAGE, "cannot use the regular expression '%.80s%s': %s",
                         text, strlen(text) > 80 ? "..." : "", excess);
    int problem = regcomp(expression_out, text, REG_EXTENDED | flags);
    if (problem == 0)
        return FSDP_OK;
    if (problem == REG_ESPACE)
        return fsdp_fail_memory(err, "a regular expression");
    char reason[128];
    regerror(problem, expression_out, reason, sizeof reason);
    return fsdp_fail(err, FSDP_ERR_USAGE, "the regular expression '%s' is not valid: %s", text,
                     reason);
}

/* REG_STARTEND gives the length, so that a name may hold NUL. */
bool fsdp_expression_find(const regex_t *expression, const char *text, size_t from, size_t size,
                          regmatch_t *groups, size_t group_count)
{
    groups[0] = (regmatch_t){.rm_so = (regoff_t)from, .rm_eo = (regoff_t)size};
    return regexec(expression, text, group_count, groups,
                   REG_STARTEND | (from > 0 ? REG_NOTBOL : 0)) == 0;
}

bool fsdp_expression_matches(const regex_t *expression, const char *text, size_t size)
{
    regmatch_t range;
    return fsdp_expression_find(expression, text, 0, size, &range, 1);
}
