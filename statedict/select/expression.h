/* Regular expressions that users give: POSIX extended ones, and only such as cost little. */
#ifndef FSDP_EXPRESSION_H
#define FSDP_EXPRESSION_H

#include <fsdp/status.h>
#include <regex.h>
#include <stdbool.h>
#include <stddef.h>

/* FSDP_ERR_USAGE says what is wrong with it, or why it would take too long (filter.h). flags: REG_NOSUB. */
fsdp_status fsdp_expression_compile(const char *text, int flags, regex_t *expression_out, fsdp_error *err);

/* Anywhere in the text, which may hold NUL. */
bool fsdp_expression_matches(const regex_t *expression, const char *text, size_t size);

/* The first match at or behind `from`: groups[0] is the whole of it. */
bool fsdp_expression_find(const regex_t *expression, const char *text, size_t from, size_t size,
                          regmatch_t *groups, size_t group_count);

#endif
