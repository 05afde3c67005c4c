/*
 * A filter selects names: one POSIX extended regular expression must match and another one must not. Loads,
 * conversions, comparisons and the tools' -I and -X use it. All calls are local; several threads may use a
 * filter at once.
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
 * expression that cannot be compiled or could take too long to match: over 4,096 bytes, groups over 32 deep,
 * repetitions of over 1,000 characters in all, or back-references.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_filter_create(const char *include, const char *exclude,
                                                     fsdp_filter **filter_out, fsdp_error *err);
/* Frees a filter; accepts NULL. */
FSDP_API void fsdp_filter_free(fsdp_filter *filter);

/* Returns true if the filter selects the name. A match may be anywhere in the name; NUL is a character like
 * any other. */
FSDP_API bool fsdp_filter_selects(const fsdp_filter *filter, const char *name, size_t name_size);

#ifdef __cplusplus
}
#endif
#endif
