/* Regular expressions of users, and renaming by them: see expression.h and rename.h. */
#include "statedict/select/expression.h"
#include "base/core/mem.h"
#include "statedict/select/rename.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* === expressions ============================================================================== */

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
        const char closing[] = {at[1], ']', '\0'};
        const char *end = strstr(at + 2, closing);
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

/* Finds the first match at or after `from`; groups[0] is the whole match.
 * REG_STARTEND gives the length, so that a name may hold NUL. */
static bool expression_find(const regex_t *expression, const char *text, size_t from, size_t size,
                            regmatch_t *groups, size_t group_count)
{
    groups[0] = (regmatch_t){.rm_so = (regoff_t)from, .rm_eo = (regoff_t)size};
    return regexec(expression, text, group_count, groups,
                   REG_STARTEND | (from > 0 ? REG_NOTBOL : 0)) == 0;
}

bool fsdp_expression_matches(const regex_t *expression, const char *text, size_t size)
{
    regmatch_t range;
    return expression_find(expression, text, 0, size, &range, 1);
}

/* === renaming ================================================================================= */

enum { GROUPS = 10 };

struct fsdp_rename {
    regex_t expression;
    char *replacement;
    bool everywhere;
};

/* --- a rule ----------------------------------------------------------------------------------- */

static fsdp_status refuse(const char *rule, const char *why, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_USAGE, "the rule '%.200s' %s; a rule is s/REGEX/NEW/", rule,
                     why);
}

/* The text up to the next delimiter that is not after a backslash; "\/" becomes "/". NULL: no
 * end. */
static const char *take_part(const char *at, char delimiter, fsdp_text *part)
{
    for (; *at && *at != delimiter; at++) {
        if (at[0] == '\\' && at[1] == delimiter)
            at++;
        else if (at[0] == '\\' && at[1])
            fsdp_text_add(part, at++, 1);
        fsdp_text_add(part, at, 1);
    }
    return *at ? at + 1 : NULL;
}

static fsdp_status check_replacement(const fsdp_rename *rename, const char *rule, fsdp_error *err)
{
    for (const char *at = rename->replacement; *at; at++) {
        if (*at != '\\')
            continue;
        at++;
        if (*at == '\0')
            return refuse(rule, "ends in a backslash", err);
        if (*at >= '1' && *at <= '9' && (size_t)(*at - '0') > rename->expression.re_nsub)
            return refuse(rule, "refers to a group that its expression does not have", err);
    }
    return FSDP_OK;
}

static fsdp_status compile(fsdp_rename *rename, const char *rule, fsdp_text *expression,
                           fsdp_text *replacement, fsdp_error *err)
{
    if (rule[0] != 's' || !rule[1] || rule[1] == '\\')
        return refuse(rule, "does not begin with s/", err);
    const char *at = take_part(rule + 2, rule[1], expression);
    if (at)
        at = take_part(at, rule[1], replacement);
    if (!at)
        return refuse(rule, "has no end", err);
    rename->everywhere = strcmp(at, "g") == 0;
    if (*at && !rename->everywhere)
        return refuse(rule, "has more behind its end than a g", err);
    fsdp_text_add(expression, "", 1);
    rename->replacement =
        fsdp_strndup(replacement->size ? replacement->data : "", replacement->size);
    if (expression->failed || replacement->failed || !rename->replacement)
        return fsdp_fail_memory(err, "a rule");
    return fsdp_expression_compile(expression->data, 0, &rename->expression, err);
}

fsdp_status fsdp_rename_create(const char *rule, fsdp_rename **rename_out, fsdp_error *err)
{
    fsdp_text expression = {0}, replacement = {0};
    fsdp_rename *rename = fsdp_alloc(1, sizeof *rename);
    if (!rename)
        return fsdp_fail_memory(err, "a rule");
    fsdp_status st = compile(rename, rule, &expression, &replacement, err);
    fsdp_text_release(&expression);
    fsdp_text_release(&replacement);
    if (st != FSDP_OK) {
        fsdp_free(rename->replacement);
        fsdp_free(rename);
        return st;
    }
    st = check_replacement(rename, rule, err);
    if (st != FSDP_OK) {
        fsdp_rename_free(rename);
        return st;
    }
    *rename_out = rename;
    return FSDP_OK;
}

void fsdp_rename_free(fsdp_rename *rename)
{
    if (!rename)
        return;
    regfree(&rename->expression);
    fsdp_free(rename->replacement);
    fsdp_free(rename);
}

/* --- a name ----------------------------------------------------------------------------------- */

static void add_group(fsdp_text *out, const char *name, const regmatch_t *group)
{
    if (group->rm_so >= 0)
        fsdp_text_add(out, name + group->rm_so, (size_t)(group->rm_eo - group->rm_so));
}

static void add_replacement(const fsdp_rename *rename, const char *name, const regmatch_t *groups,
                            fsdp_text *out)
{
    for (const char *at = rename->replacement; *at; at++) {
        if (*at == '&')
            add_group(out, name, &groups[0]);
        else if (*at == '\\' && *++at >= '1' && *at <= '9')
            add_group(out, name, &groups[*at - '0']);
        else
            fsdp_text_add(out, at, 1);
    }
}

/* As in sed, an empty match right after another match does not count. */
static void apply(const fsdp_rename *rename, const char *name, size_t size, fsdp_text *out)
{
    regmatch_t groups[GROUPS];
    size_t done = 0, last_end = SIZE_MAX;
    bool more = true;
    while (more && done <= size &&
           expression_find(&rename->expression, name, done, size, groups, GROUPS)) {
        size_t start = (size_t)groups[0].rm_so, end = (size_t)groups[0].rm_eo;
        fsdp_text_add(out, name + done, start - done);
        if (end > start || start != last_end) {
            add_replacement(rename, name, groups, out);
            more = rename->everywhere;
        }
        last_end = end;
        done = end;
        if (end == start && done++ < size)
            fsdp_text_add(out, name + end, 1);
    }
    if (done < size)
        fsdp_text_add(out, name + done, size - done);
}

fsdp_status fsdp_rename_apply(const fsdp_rename *rename, fsdp_text *name, fsdp_error *err)
{
    fsdp_text renamed = {0};
    apply(rename, name->size ? name->data : "", name->size, &renamed);
    if (renamed.failed) {
        fsdp_text_release(&renamed);
        return fsdp_fail_memory(err, "a name");
    }
    fsdp_text_release(name);
    *name = renamed;
    return FSDP_OK;
}
