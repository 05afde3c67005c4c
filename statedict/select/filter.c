/* Selection of names by regular expressions. See filter.h. */
#include <fsdp/filter.h>

#include "base/core/given.h"
#include "base/core/mem.h"
#include "statedict/select/expression.h"
#include "statedict/select/selection.h"

struct fsdp_filter {
    regex_t include, exclude;
    bool has_include, has_exclude;
};

static fsdp_status compile(const char *text, regex_t *expression, bool *has_out, fsdp_error *err)
{
    if (!text)
        return FSDP_OK;
    fsdp_status st = fsdp_expression_compile(text, REG_NOSUB, expression, err);
    *has_out = st == FSDP_OK;
    return st;
}

fsdp_status fsdp_filter_create(const char *include, const char *exclude, fsdp_filter **filter_out,
                               fsdp_error *err)
{
    FSDP_NEED(err, filter_out);
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

bool fsdp_filter_selects(const fsdp_filter *filter, const char *name, size_t name_size)
{
    if (!filter || !name)
        return false;
    if (filter->has_include && !fsdp_expression_matches(&filter->include, name, name_size))
        return false;
    return !filter->has_exclude || !fsdp_expression_matches(&filter->exclude, name, name_size);
}

static bool selects_any(const fsdp_filter *filter, const fsdp_sd *sd)
{
    for (size_t i = 0; i < fsdp_sd_count(sd); i++)
        if (fsdp_filter_selects(filter, fsdp_sd_at(sd, i)->name, fsdp_sd_at(sd, i)->name_size))
            return true;
    return false;
}

fsdp_status fsdp_filter_require(const fsdp_sd *sd, const char *include, const char *exclude,
                                fsdp_error *err)
{
    fsdp_filter *filter = NULL;
    size_t count = fsdp_sd_count(sd);
    FSDP_TRY(fsdp_filter_create(include, exclude, &filter, err));
    bool selected = selects_any(filter, sd);
    fsdp_filter_free(filter);
    if (selected || count == 0)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "no name of the state dict matches: none of %zu names is selected", count);
}
