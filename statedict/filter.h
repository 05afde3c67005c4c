/*
 * A filter selects names: one POSIX extended regular expression must match and another one must not. Loads,
 * conversions, comparisons and the tools' -I and -X select through it. Local; any thread may use a filter.
 */
#ifndef FSDP_FILTER_H
#define FSDP_FILTER_H

#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_filter fsdp_filter;

/*
 * Creates a filter, which the caller frees; either expression may be NULL. FSDP_ERR_USAGE names an
 * expression that cannot be compiled or would take too long: over 4,096 bytes, groups over 32 deep,
 * repetitions that stand for over 1,000 characters when they are written out, references back to a group.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_filter_create(const char *include, const char *exclude,
                                                     fsdp_filter **filter_out, fsdp_error *err);
/* Frees a filter; accepts NULL. */
FSDP_API void fsdp_filter_free(fsdp_filter *filter);

/* Returns true for a name that is selected. A match anywhere in the name counts; NUL is a character of the
 * name. */
FSDP_API bool fsdp_filter_selects(const fsdp_filter *filter, const char *name, size_t name_size);

#ifdef __cplusplus
}
#endif
#endif
