/* Selection of names by regular expressions. See filter.h. */
#include <fsdp/filter.h>

#include "base/mem.h"

#include <regex.h>

struct fsdp_filter {
    regex_t include, exclude;
    bool has_include, has_exclude;
};

static fsdp_status compile(const char *text, regex_t *expression, bool *has_out, fsdp_error *err)
{
    if (!text)
        return FSDP_OK;
    int problem = regcomp(expression, text, REG_EXTENDED);
    *has_out = problem == 0;
    if (problem == 0)
        return FSDP_OK;
    if (problem == REG_ESPACE)
        return fsdp_fail_memory(err, "a regular expression");
    char reason[128];
    regerror(problem, expression, reason, sizeof reason);
    return fsdp_fail(err, FSDP_ERR_USAGE, "the regular expression '%s' is not valid: %s", text,
                     reason);
}

fsdp_status fsdp_filter_create(const char *include, const char *exclude, fsdp_filter **filter_out,
                               fsdp_error *err)
{
    fsdp_filter *filter = fsdp_alloc(1, sizeof *filter);
    if (!filter)
        return fsdp_fail_memory(err, "a filter");
    fsdp_status st = compile(include, &filter->include, &filter->has_include, err);
    if (st == FSDP_OK)
        st = compile(exclude, &filter->exclude, &filter->has_exclude, err);
    if (st != FSDP_OK) {
        fsdp_filter_free(filter);
        return st;
    }
    *filter_out = filter;
    return FSDP_OK;
}

void fsdp_filter_free(fsdp_filter *filter)
{
    if (!filter)
        return;
    if (filter->has_include)
        regfree(&filter->include);
    if (filter->has_exclude)
        regfree(&filter->exclude);
    fsdp_free(filter);
}

/* REG_STARTEND gives the length, so that a name may hold NUL. */
static bool matches(const regex_t *expression, const char *name, size_t name_size)
{
    regmatch_t range = {.rm_so = 0, .rm_eo = (regoff_t)name_size};
    return regexec(expression, name, 1, &range, REG_STARTEND) == 0;
}

bool fsdp_filter_selects(const fsdp_filter *filter, const char *name, size_t name_size)
{
    if (filter->has_include && !matches(&filter->include, name, name_size))
        return false;
    return !filter->has_exclude || !matches(&filter->exclude, name, name_size);
}
