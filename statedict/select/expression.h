/* Regular expressions of users: POSIX extended ones, limited to those that are cheap to compile and match. */
#ifndef FSDP_EXPRESSION_H
#define FSDP_EXPRESSION_H

#include <fsdp/status.h>
#include <regex.h>
#include <stdbool.h>
#include <stddef.h>

/* FSDP_ERR_USAGE names the syntax error, or the limit that it exceeds (filter.h). flags: REG_NOSUB or 0. */
fsdp_status fsdp_expression_compile(const char *text, int flags, regex_t *expression_out, fsdp_error *err);

/* FSDP_ERR_LIMIT when the expressions would take more than 64 MiB together, once they are compiled. what:
 * "--drop", for the message. */
fsdp_status fsdp_expressions_check(const char *const *texts, size_t count, const char *what, fsdp_error *err);

/* True when it matches anywhere in the text, which may hold NUL. */
bool fsdp_expression_matches(const regex_t *expression, const char *text, size_t size);

#endif
