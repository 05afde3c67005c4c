/* Renaming by rules: see rename.h. */
#include "statedict/select/rename.h"

#include "base/core/mem.h"
#include "statedict/select/expression.h"

#include <stdint.h>
#include <string.h>

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
           fsdp_expression_find(&rename->expression, name, done, size, groups, GROUPS)) {
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
